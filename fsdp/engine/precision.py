"""The dtypes of a unit.

There are four dtypes: the dtype of the shard, which the optimizer updates (the parameters' own dtype); the dtype of
unsharded parameters and of computation; the dtype of gradient sums; and the dtype of buffers. `MixedPrecision` sets
the last three, and `Precision` contains the resulting dtypes of a unit, from a policy or from FairScale's flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.engine.trees import map_tensors

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Compute and communicate in a narrower dtype than the optimizer uses.

    The shards and their gradients keep the parameters' own dtype (usually float32). The field names are the same as in
    torch's policies.

    Args:
        param_dtype: the dtype of the unsharded parameters and of computation; shards are cast just before the
            all-gather, which sends half the bytes for 16 bits. None uses the parameters' own dtype.
        reduce_dtype: the dtype in which gradients are sent and summed over ranks. None uses the compute dtype. If the
            library itself computes the sum (gloo on CPU, and over micro-batches), it uses the shard's dtype.
        buffer_dtype: the dtype of floating-point buffers. None does not cast them, because tables of positions and
            running statistics lose precision in 16 bits and use little memory.
        output_dtype: the dtype of the floating-point outputs of the wrapped module. None does not cast them.
        cast_forward_inputs: cast floating-point inputs of the wrapped module, in any nested containers, mappings and
            dataclasses, to its compute dtype.
        full_precision_modules: classes whose modules in this unit keep parameters, buffers and computation in their
            own dtype; their outputs are cast back to the dtype of their inputs. The default is batch norms.
        keep_low_precision_grads: keep reduced gradients in `param_dtype`, regardless of `reduce_dtype`: half the bytes
            between backward and step, for optimizers that widen gradients themselves. In torch, SGD (not fused)
            supports this; other optimizers raise an error at their step.

    Raises:
        ValueError: for a dtype that is not a floating-point dtype with at least 16 bits.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    full_precision_modules: Sequence[type[nn.Module]] = BATCH_NORMS
    keep_low_precision_grads: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            check_dtype(name, getattr(self, name))
        kept = self.full_precision_modules
        if not isinstance(kept, (list, tuple)) or not all(isinstance(kind, type) for kind in kept):
            raise ValueError(f"full_precision_modules must be a list or tuple of module classes, got {kept!r}")


def check_dtype(name: str, dtype: Any) -> None:
    """Raise ValueError unless `dtype` is None or can be used for training."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2):
        return
    raise ValueError(
        f"{name} must be torch.float16, bfloat16, float32 or float64 (or None for its default), got {dtype!r}"
    )


class InputCast(Enum):
    """The inputs that a unit casts to its compute dtype."""

    NONE = auto()
    OUTERMOST = auto()  # only if no outer unit uses mixed precision (as in FairScale)
    ALWAYS = auto()
    WIDEN = auto()  # 16-bit inputs to float32


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a unit with all defaults resolved; None means the parameters' own dtype."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffers: torch.dtype | None = None
    output: torch.dtype | None = None
    inputs: InputCast = InputCast.NONE
    kept: tuple[type[nn.Module], ...] = ()
    grads: torch.dtype | None = None  # of the shards' gradients, between backward and step
    required: torch.dtype | None = None  # of the trained parameters
    reduces_in_own: bool = False  # without `reduce`, gradients are sent in `grads` or the parameters' own dtype
    override: Callable[[nn.Parameter], torch.dtype | None] | None = None  # the user's function, see `leaves`

    def describe(self) -> dict[str, str]:
        """Return all fields as text, for comparison across ranks."""
        kept = sorted(kind.__qualname__ for kind in self.kept)  # users may pass any order
        settings = vars(self) | {"kept": kept}
        del settings["override"]  # the returned dtypes are compared with the parameters
        return {name: str(value) for name, value in settings.items()}

    @classmethod
    def of_policy(cls, policy: MixedPrecision) -> Precision:
        return cls(
            compute=policy.param_dtype,
            reduce=policy.reduce_dtype,
            buffers=policy.buffer_dtype,
            output=policy.output_dtype,
            inputs=InputCast.ALWAYS if policy.cast_forward_inputs and policy.param_dtype else InputCast.NONE,
            kept=tuple(policy.full_precision_modules),
            grads=policy.param_dtype if policy.keep_low_precision_grads else None,
        )

    @classmethod
    def of_flags(
        cls,
        *,
        mixed_precision: bool,
        fp32_reduce_scatter: bool,
        compute_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        force_input_to_fp32: bool,
    ) -> Precision:
        """Return the precision for FairScale's arguments and defaults; raise ValueError for contradictions."""
        check_dtype("compute_dtype", compute_dtype)
        check_dtype("buffer_dtype", buffer_dtype)
        if not mixed_precision:
            if fp32_reduce_scatter:
                raise ValueError(
                    "fp32_reduce_scatter=True needs mixed_precision=True. For 16-bit parameters whose gradients are "
                    "summed in float32 use mixed_precision=MixedPrecision(reduce_dtype=torch.float32)."
                )
            inputs = InputCast.WIDEN if force_input_to_fp32 else InputCast.NONE
            return cls(buffers=buffer_dtype or compute_dtype, inputs=inputs, required=compute_dtype)
        if force_input_to_fp32:
            raise ValueError(
                "force_input_to_fp32=True is for units that compute in full precision; this one has "
                "mixed_precision=True. Omit one of them."
            )
        compute = compute_dtype or torch.float16
        return cls(
            compute=compute,
            reduce=torch.float32 if fp32_reduce_scatter else None,
            buffers=buffer_dtype or compute,
            inputs=InputCast.OUTERMOST,
            kept=BATCH_NORMS,
            required=torch.float32,
        )

    @property
    def is_mixed(self) -> bool:
        return self.compute is not None

    def without_casts(self) -> Precision:
        """Return the precision of modules that keep their own dtype."""
        return replace(self, compute=None, reduce=None, grads=None, buffers=None, required=None, inputs=InputCast.NONE)

    def in_own_dtype(self) -> Precision:
        """Return the precision of parameters unsharded in their own dtype."""
        return replace(self, compute=None, grads=None, override=None)

    def leaves(self, name: str, param: nn.Parameter) -> bool:
        """Return whether the user's function excludes a parameter from casts; ValueError for any third dtype."""
        dtype = None if self.override is None else self.override(param)
        if dtype in (None, self.compute):
            return False
        if dtype != param.dtype:
            raise ValueError(
                f"param_dtype_override_fn returned {dtype!r} for {name}: it must be the parameter's own dtype "
                f"({param.dtype}), param_dtype ({self.compute}), or None, which means param_dtype"
            )
        return self.is_mixed

    def compute_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters of dtype `own` are unsharded."""
        return own if self.compute is None or not own.is_floating_point else self.compute

    def input_dtype(self, kind: str) -> torch.dtype | None:
        """Return the dtype to which inputs on this kind of device are cast; None does not cast them.

        As in FairScale, inputs use autocast's dtype if a unit computes in float32 under autocast.
        """
        if self.inputs is InputCast.OUTERMOST and self.compute == torch.float32:
            return autocast_dtype(kind) or self.compute
        return self.compute

    def reduce_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of dtype `own` are sent."""
        if self.reduce is not None and own.is_floating_point:
            return self.reduce
        return (self.grads or own) if self.reduces_in_own else self.compute_dtype(own)

    def for_param(self, param: Tensor) -> Precision:
        """Return the precision for a parameter, using a gradient dtype set by the user as `grad_dtype`."""
        if param.grad_dtype is None:  # any
            return self.with_grads(self.reduce or self.compute_dtype(param.dtype))
        if param.grad_dtype != param.dtype:
            return self.with_grads(param.grad_dtype)
        return self if self.grads is None or param.is_floating_point() else replace(self, grads=None)

    def with_grads(self, dtype: torch.dtype) -> Precision:
        """Return the precision for parameters with a gradient dtype set by the user."""
        return replace(self, grads=dtype, reduces_in_own=True)

    def check(self, name: str, dtype: torch.dtype, requires_grad: bool) -> None:
        """Raise ValueError for a parameter that cannot be trained with this precision."""
        if not requires_grad or dtype.is_complex:
            return
        if self.required is not None and dtype != self.required:
            raise ValueError(
                f"{name} is {dtype}, but mixed_precision=True keeps float32 parameters and computes in {self.compute}: "
                "call .float() first, or leave mixed_precision=False to train in the parameters' own dtype."
                if self.is_mixed
                else f"{name} is {dtype}, but compute_dtype={self.required} without mixed_precision trains parameters "
                f"that are {self.required} themselves: cast the module first (module.to({self.required})), or pass "
                "mixed_precision=True to keep a float32 master."
            )
        if self.compute is not None and torch.promote_types(dtype, self.compute) != dtype:
            raise ValueError(
                f"{name} is {dtype}, which cannot represent values computed in param_dtype={self.compute}: cast the "
                "module to float32 first, or leave param_dtype=None to compute in the parameters' own dtype."
            )


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts on this kind of device; None if it does not cast."""
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else None


def cast_floats(tree: Any, dtype: torch.dtype | None, only: Iterable[torch.dtype] | None = None) -> Any:
    """Return nested containers with floating-point tensors (of `only` these dtypes) cast to `dtype`; None: no cast."""

    if dtype is None:
        return tree

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and (only is None or tensor.dtype in only):
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, tree)


class Buffers:
    """The floating-point buffers of a unit: cast to `dtype` for computation, and restored on request."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._places = [
            (module, name, buffer.dtype)
            for module in modules
            if dtype is not None
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
        ]
        self._sources: dict[int, tuple[Tensor, int, Tensor]] = {}  # by the id of the cast tensor
        self.narrow()

    def __getstate__(self) -> dict[str, Any]:
        # Ids are not valid in a copy, and version counters of copies start again.
        unchanged = [(cast, source) for cast, version, source in self._sources.values() if cast._version == version]
        return self.__dict__ | {"_sources": unchanged}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sources = {id(cast): (cast, cast._version, source) for cast, source in state["_sources"]}
        self.__dict__.update(state | {"_sources": sources})

    def narrow(self) -> None:
        """Cast the buffers to the compute dtype."""
        self._replace(self._narrowed)

    def widen(self) -> None:
        """Restore the original dtype of the buffers, with their original values unless they were written since."""
        self._replace(self._widened)
        self._sources.clear()

    def _narrowed(self, buffer: Tensor, own: torch.dtype) -> Tensor:
        cast = buffer.to(self._dtype)
        if cast is not buffer:
            self._sources[id(cast)] = (cast, cast._version, buffer)
        return cast

    def _widened(self, buffer: Tensor, own: torch.dtype) -> Tensor:
        cast, version, source = self._sources.pop(id(buffer), (None, 0, buffer))
        return source if buffer is cast and buffer._version == version and source.dtype == own else buffer.to(own)

    @torch.inference_mode(False)  # else buffers cast in inference mode could not be written in training
    def _replace(self, new: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        done: dict[int, tuple[Tensor, Tensor]] = {}  # buffers shared by multiple modules stay shared
        for module, name, own in self._places:
            buffer = module._buffers.get(name)
            if buffer is not None:
                if id(buffer) not in done:
                    done[id(buffer)] = (buffer, new(buffer, own))
                module._buffers[name] = done[id(buffer)][1]


def kept_modules(modules: Iterable[nn.Module], precision: Precision) -> dict[nn.Module, list[nn.Module]]:
    """Return a unit's modules that keep their precision, outer before inner, each with all modules inside it.

    Modules without a cast are not included: inputs of a unit that computes in float32 may be cast by autocast.
    """
    kept: dict[nn.Module, list[nn.Module]] = {}
    seen: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, precision.kept) and module not in seen and _would_be_cast(module, precision):
            kept[module] = list(module.modules())
            seen.update(kept[module])
    return kept


def _would_be_cast(module: nn.Module, precision: Precision) -> bool:
    params = [param.dtype for param in module.parameters() if param.is_floating_point()]
    buffers = [buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()]
    return (
        not (params or buffers)
        or any({precision.compute_dtype(own), precision.reduce_dtype(own)} != {own} for own in params)
        or any(precision.buffers not in (None, own) for own in buffers)
    )


def compute_in_own_dtype(module: nn.Module) -> list[RemovableHandle]:
    """Make a module compute in its own dtype, and return outputs in the dtype of its inputs."""
    casts = _Casts(module)
    return [
        module.register_forward_pre_hook(casts.widen, with_kwargs=True),
        module.register_forward_hook(casts.narrow),
    ]


class _Casts:
    def __init__(self, module: nn.Module) -> None:
        tensors = (
            (inner, name)
            for inner in module.modules()
            for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
            if tensor is not None and tensor.is_floating_point()
        )
        self._first = next(tensors, None)
        self._came_in: list[torch.dtype | None] = []  # of the running calls; a module may call itself

    def widen(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtypes: set[torch.dtype] = set()
        map_tensors(lambda tensor: dtypes.add(tensor.dtype) or tensor, (args, kwargs))  # type: ignore[func-returns-value]
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        self._came_in.append(floating[0] if len(floating) == 1 else None)
        return cast_floats((args, kwargs), getattr(*self._first).dtype if self._first else torch.float32)

    def narrow(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self._came_in.pop()
        return output if dtype is None else cast_floats(output, dtype)
