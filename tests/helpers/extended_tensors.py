"""Tensor subclasses with torch's all-gather extension, small as float8's and torchao's are big."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.helpers.models import Wrap, keep, seeded

_KEPT = {  # operations whose result is of the class
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
}


class Values(Tensor):
    """A tensor around another one, which most operations see instead."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, *settings: Any) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor, *settings: Any) -> None:
        self.values, self.settings = values, settings

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.values})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], self.settings

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], settings: Any, size: Any, stride: Any) -> Tensor:
        return cls(inner["values"], *settings)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        settings: list[Any] = []

        def unwrapped(tensor: Values) -> Tensor:
            settings[:] = tensor.settings
            return tensor.values

        plain_args, plain_kwargs = tree_map_only(Values, unwrapped, (args, kwargs or {}))
        found = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        return tree_map_only(Tensor, lambda made: cls(made, *settings), found) if func in _KEPT else found


def padded(rows: Tensor, mesh: Any, outer_size: torch.Size) -> Tensor:
    """Rows of a rank, and as many zeros below as there are rows on the first rank."""
    made = rows.new_zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
    made[: rows.shape[0]] = rows
    return made


class InHalf(Values):
    """Travels in bfloat16, and is computed with as it was: a plain tensor that is filled again."""

    seen: list[Any] = []  # noqa: RUF012 (what the methods were called with)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        name = next(name for name, param in module.named_parameters() if param.shape == outer_size)
        self.seen.append((tuple(self.shape), mesh.size(), outer_size, outer_stride, name, mp_policy.param_dtype))
        return (padded(self.values, mesh, outer_size).bfloat16(),), "metadata"

    @torch.no_grad()  # which torch's does not see to
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (come,) = outputs
        self.seen.append((tuple(come.shape), metadata, param_dtype, None if out is None else tuple(out.shape)))
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(come[: out.shape[0]])
            return None
        made = come.to(param_dtype, copy=True)
        return made, (come, made)


class Scaled(Tensor):
    """8-bit numbers with a scale for each rank that sent them, which multiply as what they stand for."""

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype, size: Any = None) -> Any:
        return Tensor._make_wrapper_subclass(cls, size or numbers.shape, dtype=dtype, device=numbers.device)

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype, size: Any = None) -> None:
        self.numbers, self.scales = numbers, scales

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Scaled({tuple(self.shape)})"

    def plain(self) -> Tensor:
        rows = self.numbers.shape[0] // self.scales.numel()
        factors = self.scales.to(self.dtype).repeat_interleave(rows).unsqueeze(1)
        return (self.numbers.to(self.dtype) * factors)[: self.shape[0]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            inputs, weight, *bias = args
            return _ScaledLinear.apply(inputs, weight, *(bias or [(kwargs or {}).get("bias")]))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scales, args[0].dtype, args[0].shape)
        if func is torch.ops.aten.as_strided.default:
            return cls(args[0].numbers, args[0].scales, args[0].dtype, args[1])
        raise NotImplementedError(f"{func} of Scaled")


class _ScaledLinear(torch.autograd.Function):
    """A product with weights of 8 bits, differentiated as if by those that they stand for."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Scaled, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return nn.functional.linear(inputs, weight.plain(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        (grad,) = grads
        return grad @ weight.plain(), grad.T @ inputs, grad.sum(0) if ctx.has_bias else None


class InEight(Values):
    """Travels as 8-bit numbers with a scale for each rank, and is computed with as such, in a class of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        scale = self.values.abs().max().clamp_min(1e-6).float() / 127
        return ((self.values / scale).round().to(torch.int8), scale.view(1)), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        numbers, scales = outputs
        if out is None:
            return Scaled(numbers, scales, param_dtype), (numbers, scales)
        assert out.numbers.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()
        assert out.scales.untyped_storage().data_ptr() == scales.untyped_storage().data_ptr()
        return None


class Layers(nn.Module):
    """Two units and what is around them, whose matrices are of a class; other parameters are plain."""

    def __init__(self, wrap: Wrap, kind: Any, width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(5, width)
        inner = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)]
        for layer in inner:
            layer[0].weight = nn.Parameter(kind(layer[0].weight.detach().clone()))
        self.inner = nn.ModuleList(map(wrap, inner))
        self.exit = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.entry(inputs))
        for layer in self.inner:
            hidden = layer(hidden)
        return self.exit(hidden)


def extended(wrap: Wrap = keep, *, kind: Any = InHalf, width: int = 7, seed: int = 0) -> nn.Module:
    return seeded(lambda inner: Layers(inner, kind, width), wrap, seed)


class Pair(Tensor):
    """Two tensors of one shape and dtype, on both of which every operation runs; of any class in which its kind is."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Any:
        like = {"dtype": first.dtype, "device": first.device, "storage_offset": first.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, first.shape, first.stride(), **like)

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pair({self.first}, {self.second})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Tensor:
        return cls(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        both = [
            func(*tree_map_only(Pair, pick, args), **tree_map_only(Pair, pick, kwargs or {}))
            for pick in (lambda pair: pair.first, lambda pair: pair.second)
        ]
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        firsts, spec = tree_flatten(both[0])
        made = [
            cls(*each) if isinstance(each[0], Tensor) else each[0]
            for each in zip(firsts, tree_flatten(both[1])[0], strict=True)
        ]
        return tree_unflatten(made, spec)


class SentPair(Pair):
    """A pair whose tensors are sent as they are, and that its methods put together again."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.first, self.second), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        first, second = outputs
        if out is None:
            return type(self)(first, second).to(param_dtype), (first, second)
        if first.dtype != param_dtype:
            out.first.copy_(first[: out.shape[0]])
            out.second.copy_(second[: out.shape[0]])
        return None


class ToldPair(SentPair):
    """The same, with all arguments."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        if (outer_size, outer_stride) not in [(each.shape, each.stride()) for each in module.parameters()]:
            raise AssertionError(f"{outer_size} is of no parameter of the module")
        return super().fsdp_pre_all_gather(mesh)


def pairs(wrap: Wrap = keep, *, kind: Any = Pair, width: int = 6, seed: int = 0) -> nn.Module:
    """Layers without biases, whose weights are pairs of unequal tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = []
        for _ in range(3):
            layer = nn.Sequential(nn.Linear(width, 7, bias=False), nn.Tanh(), nn.Linear(7, width, bias=False))
            for linear in (layer[0], layer[2]):
                values = linear.weight.detach()
                linear.weight = nn.Parameter(kind(values.clone(), values * 0.5))
            layers.append(wrap(layer))
        return wrap(nn.Sequential(*layers))
