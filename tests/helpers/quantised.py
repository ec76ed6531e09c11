"""A small class of quantised weights, as torchao's are: 8-bit integers with a scale for each row, and modules of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten


class Rows8(Tensor):
    """A weight of 8-bit integers with a scale for each row, which computes as a tensor of `dtype`."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Rows8:
        made: Rows8 = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        return made

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.values, self.scale = values, scale  # type: ignore[assignment]

    @classmethod
    def of(cls, weight: Tensor) -> Rows8:
        """Return a weight, quantised."""
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale, weight.dtype)

    def plain(self) -> Tensor:
        return (self.values.float() * self.scale.float()).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Rows8:
        return cls(inner["values"], inner["scale"], metadata)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Rows8(...)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            change = torch.clone if func is aten.clone.default else torch.detach
            return cls(change(args[0].values), change(args[0].scale), args[0].dtype)
        if func is aten.copy_.default and isinstance(args[1], cls):
            args[0].values.copy_(args[1].values)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is aten._to_copy.default and set(kwargs) == {"device"}:
            return cls(args[0].values.to(**kwargs), args[0].scale.to(**kwargs), args[0].dtype)

        def plain(value: Any) -> Any:
            return value.plain() if isinstance(value, cls) else value

        return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


class Doubled(Rows8):
    """The same with a scale that is itself quantised."""

    @classmethod
    def of(cls, weight: Tensor) -> Doubled:
        made = Rows8.of(weight)
        return cls(made.values, Rows8.of(made.scale), weight.dtype)

    def plain(self) -> Tensor:
        return (self.values.float() * self.scale.plain()).to(self.dtype)  # type: ignore[attr-defined]


class Adapted(nn.Module):
    """A frozen linear layer, whose weight is to be quantised, with a low-rank adapter that is trained."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
        self.down, self.up = (nn.Linear(*sizes, bias=False, dtype=dtype) for sizes in ((inputs, 2), (2, outputs)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Narrow(nn.Module):
    """A frozen linear layer of integers, float8 and bool, without a class of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight, scale = torch.randn(outputs, inputs), torch.rand(outputs, 1)
        self.weight = nn.Parameter((weight * 40).to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter((scale / 40).to(torch.float8_e4m3fn), requires_grad=False)
        self.kept = nn.Parameter(torch.rand(outputs, inputs) > 0.1, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight.float() * self.scale.float() * self.kept
        return nn.functional.linear(inputs, weight, self.bias)


def quantised(kind: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return two layers with quantised, frozen weights beside trained parameters."""
    torch.manual_seed(0)
    if kind == "plain dtypes":
        return nn.Sequential(Narrow(33, 17), nn.Tanh(), Narrow(17, 9))
    model = nn.Sequential(Adapted(33, 17, dtype), nn.Tanh(), Adapted(17, 9, dtype))
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("base"))
        model[0].base.requires_grad_(False)
        model[2].base.requires_grad_(False)
        return model
    of = {"two tensors": Rows8.of, "nested": Doubled.of}[kind]
    for layer in (model[0], model[2]):
        layer.base.weight = nn.Parameter(of(layer.base.weight), requires_grad=False)
    return model


def plain_values(value: Tensor) -> Tensor:
    """Return what a weight computes as."""
    if isinstance(value, Rows8):
        return value.plain()
    made: Tensor = value.dequantize() if type(value) not in (Tensor, nn.Parameter) else value.detach()  # type: ignore[no-untyped-call]
    return made.float()
