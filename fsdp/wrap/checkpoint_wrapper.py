"""`checkpoint_wrapper` makes a module save only its inputs for backward, and recompute its activations.

The recomputation uses the non-re-entrant variant of `torch.utils.checkpoint`, which this module applies to any module.
The tensors in the arguments of a call, at any nesting depth, become the tensors that the checkpoint saves (`_Call`),
and the recomputation has no side effects (`_statistics_kept`).
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import disable, is_compiling
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from fsdp.distributed.devices import HOST, arrival_on, has_streams
from fsdp.engine.autograd import in_backward
from fsdp.engine.forward_hooks import has_forward
from fsdp.engine.trees import map_tensors

M = TypeVar("M", bound=nn.Module)


def checkpoint_wrapper(module: M, offload_to_cpu: bool = False) -> M:
    """Make a module keep its inputs for backward instead of its activations, which are recomputed.

    Only the module's ``forward`` is replaced: the module is the same object, with the same names, parameters and state
    dict. The module can be copied, pickled, and wrapped in `FullyShardedDataParallel` before or after. Results and
    gradients are the same as for the plain module. Random numbers (of the CPU and the inputs' devices) and autocast
    are restored for recomputation. Outputs require a gradient only if an input or a parameter does, and batch norms
    update their statistics once. All kinds of backward are supported, including `torch.autograd.grad` and double
    backward. Without gradients, and inside `disable_checkpointing`, there is no checkpointing.

    Not collective. However, like any backward of units, the recomputation of a unit, or of a module that contains
    units, is collective. The recomputation unshards all units in the module, and each stays unsharded until its
    gradients are complete.

    Args:
        module: the module, which is changed in place. Wrapping it again has no effect.
        offload_to_cpu: If True, keep the inputs in host memory (pinned, for CUDA) until backward. Inputs of a module
            inside another checkpointed module are not saved, and therefore not moved.

    Returns:
        The module.

    Raises:
        TypeError: if `module` is not a module.
        ValueError: for a module without a ``forward`` (for example a list of modules), or a module that is already
            wrapped with a different `offload_to_cpu`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint_wrapper takes a module, got {type(module).__name__}")
    own = vars(module).get("forward")
    offload = bool(offload_to_cpu)
    if isinstance(own, _CheckpointedForward):
        if own.offload != offload:
            raise ValueError(f"this {type(module).__name__} is checkpointed already, with offload_to_cpu={own.offload}")
        return module
    if not has_forward(module):
        raise ValueError(f"{type(module).__name__} has no forward to checkpoint: wrap the modules in it")
    module.forward = _CheckpointedForward(module, own, offload)
    return module


class _CheckpointedForward:
    """The ``forward`` of a wrapped module.

    The module is referenced weakly, because a reference cycle would delay its release until garbage collection.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, offload: bool) -> None:
        self._module = weakref.ref(module)
        self._own = own  # the instance attribute ``forward`` before wrapping, if there was one
        self.offload = offload
        if offload:
            _keep_from_compilers()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self._own, self.offload)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward no longer exists")
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # Under this name for `inspect.signature`, which trainers use to find a model's arguments.
        return MethodType(type(self.module).forward, self.module) if self._own is None else self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _modes.disabled or not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if self.offload:
            return self._compute(args, kwargs, is_compiling())
        if is_compiling():
            return self._compute_compiled(args, kwargs)
        if "torch._dynamo" in sys.modules:
            _keep_from_compilers()
        return self._compute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any, drops_compile: bool = False) -> Any:
        if drops_compile:
            warnings.warn(
                f"torch.compile leaves {type(self.module).__name__} uncompiled, because checkpoint_wrapper("
                "offload_to_cpu=True) cannot be compiled. Compile the inner module instead: "
                "checkpoint_wrapper(torch.compile(module), offload_to_cpu=True).",
                stacklevel=3,
            )
        call = _Call(self.module, self.__wrapped__, args, kwargs)
        # Tensors that a checkpoint saves inside another checkpoint are released with the outer checkpoint's
        # activations.
        is_inside = _modes.checkpointing or _modes.recomputing
        with _offloading() if self.offload and not is_inside else nullcontext():
            return checkpoint(call, *call.take_tensors(), use_reentrant=False)

    def _compute_compiled(self, args: Any, kwargs: Any) -> Any:
        # torch.compile supports checkpoints, and plans the recomputation itself, without side effects.
        module, own = self.module, self._own

        def forward(*args: Any, **kwargs: Any) -> Any:
            # After a graph break inside, the checkpoint is torch's, uncompiled, and computes this again in backward.
            is_again = not is_compiling() and in_backward()
            with _statistics_kept(module) if is_again else nullcontext():
                return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)

        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@cache
def _keep_from_compilers() -> None:
    # Stand-ins are distinguished by their ids, so a compiler would create a graph for every call. Called only when
    # required, because `disable` imports the compiler, which takes seconds.
    _CheckpointedForward._compute = disable(_CheckpointedForward._compute)  # type: ignore[method-assign]


class _Call:
    """A call of a module: first with its arguments, then any number of times with tensors that replace them.

    The checkpoint receives all tensors separately, so that it saves each like autograd (for an outer checkpoint or the
    host, with a check for writes), and knows their devices. This object keeps copies of the containers with
    substitutes for the tensors, so a module may change its arguments without affecting recomputation.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._module, self._forward = module, forward
        self._arguments: tuple[Any, Any] | None = (args, kwargs)  # until the first call
        self._stand_ins: dict[int, Tensor] = {}  # by the id of the tensor, until the first call
        self._tensors: list[Tensor] = []
        self._template = map_tensors(self._stand_in, self._arguments)
        # A container inside of itself stays the original, with its tensors instead of their substitutes.
        self._order = [(key, id(stand_in)) for key, stand_in in self._stand_ins.items()]

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._stand_ins:
            # With the same properties and without memory: containers may check their items.
            shape = tensor.shape if tensor.layout is torch.strided else (0,)
            stand_in = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(shape)
            self._stand_ins[id(tensor)] = stand_in
            self._tensors.append(tensor)
        return self._stand_ins[id(tensor)]

    def take_tensors(self) -> list[Tensor]:
        tensors, self._tensors = self._tensors, []
        self._stand_ins.clear()
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        if self._arguments is not None:
            (args, kwargs), self._arguments = self._arguments, None
            # During backward, the first call of this object is the second for the statistics: an enclosing module is
            # recomputed, using this wrapper or another implementation.
            statistics = _statistics_kept(self._module) if in_backward() else nullcontext()
            with _mode(checkpointing=True), statistics:
                return self._forward(*args, **kwargs)
        found = {key: tensor for keys, tensor in zip(self._order, tensors, strict=True) for key in keys}

        def original(tensor: Tensor) -> Tensor:
            if id(tensor) not in found:
                raise RuntimeError(
                    f"checkpoint_wrapper: an argument of {type(self._module).__name__} is a container that replaces "
                    "tensors when it is copied, so the module cannot be recomputed. Pass these tensors in a list, "
                    "tuple, dictionary or dataclass."
                )
            return found[id(tensor)]

        args, kwargs = map_tensors(original, self._template)
        # As in the first call, even if backward is called inside `disable_checkpointing`: inner modules must save the
        # same tensors.
        with _mode(recomputing=True, checkpointing=False, disabled=False), _statistics_kept(self._module):
            return self._forward(*args, **kwargs)


class _Modes(threading.local):
    """Modes of this thread; on CUDA, backward and its recomputations run in a different thread."""

    checkpointing = False
    recomputing = False
    disabled = False


_modes = _Modes()


@contextmanager
def _mode(**changes: bool) -> Iterator[None]:
    before = {name: getattr(_modes, name) for name in changes}
    vars(_modes).update(changes)
    try:
        yield
    finally:
        vars(_modes).update(before)


def is_checkpointing() -> bool:
    """Return whether a checkpointed module computes for the first time, so that its activations are not kept."""
    return _modes.checkpointing


def is_recomputing() -> bool:
    """Return whether a checkpointed module computes again, for backward."""
    return _modes.recomputing


def disable_checkpointing() -> AbstractContextManager[None]:
    """Disable checkpointing inside the context, on this thread: modules keep their activations.

    The context affects the forward; backward may be called inside or outside.
    """
    return _mode(disabled=True)


class _Kept:
    """A saved tensor that is already on the host. torch no longer checks its version, so this class does."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of a checkpointed module, of shape {tuple(self._tensor.shape)}, has been modified by an "
                "inplace operation: its activations cannot be computed again. Write to a copy of it instead."
            )
        return self._tensor


class _Offloaded:
    """A saved tensor that was copied to the host. On CUDA, the copies in both directions are asynchronous."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        is_queued = has_streams(tensor.device.type)
        self._host = torch.empty_like(tensor, device=HOST, pin_memory=is_queued)
        self._host.copy_(tensor, non_blocking=is_queued)
        self._copied = arrival_on(tensor.device)  # backward may run on another stream

    def get(self) -> Tensor:
        self._copied.wait()
        return self._host.to(self._device, non_blocking=True)


def _offloading() -> saved_tensors_hooks:
    """Move tensors that autograd saves in the context to the host: inputs, because the checkpoint handles others."""
    return saved_tensors_hooks(
        lambda tensor: _Kept(tensor) if tensor.device == HOST else _Offloaded(tensor), lambda packed: packed.get()
    )


# The attribute for the statistics of a patched batch norm while it computes with copies.
_ASIDE = "_fsdp_statistics"


def patch_batchnorm(module: nn.Module) -> list[RemovableHandle]:
    """Prevent the batch norms in a module from updating their running statistics during a backward.

    `checkpoint_wrapper` does this automatically; use this function for modules under `torch.utils.checkpoint` or your
    own recomputation. Instance norms are included. Norms with a true attribute ``disable_patch_batchnorm`` are
    skipped, or all norms if `module` has this attribute. Not collective.

    Args:
        module: the module whose batch norms get hooks.

    Returns:
        The handles of the hooks; remove all handles to undo the patch.
    """
    handles: list[RemovableHandle] = []
    for norm in _norms(module):
        handles.append(norm.register_forward_pre_hook(_set_aside))
        handles.append(norm.register_forward_hook(_put_back, always_call=True))
    return handles


def _norms(module: nn.Module) -> list[nn.Module]:
    if getattr(module, "disable_patch_batchnorm", False):
        return []
    # Private in torch: the common base class of all batch and instance norms. Tested with torch 2.11 to 2.15.
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase)]
    return [norm for norm in norms if not getattr(norm, "disable_patch_batchnorm", False)]


def _use_copies(norm: nn.Module) -> dict[str, Tensor | None]:
    """Replace the statistics by copies, and return the original statistics.

    Without statistics, or with a momentum of zero, the norm would save different tensors for backward, or write NaN.
    """
    buffers = dict(norm._buffers)
    norm._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    return buffers


def _set_aside(norm: nn.Module, inputs: Any) -> None:
    _put_back(norm)  # after an exception that hooks did not see, or if another patch has used copies
    if norm.training and (in_backward() or is_recomputing()):
        norm.__dict__[_ASIDE] = _use_copies(norm)


def _put_back(norm: nn.Module, inputs: Any = None, output: Any = None) -> None:
    norm._buffers.update(norm.__dict__.pop(_ASIDE, {}))


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    kept: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    try:
        for norm in _norms(module):
            if norm.training:
                kept.append((norm, _use_copies(norm)))
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)
