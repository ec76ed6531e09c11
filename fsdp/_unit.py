"""A unit: one wrapped module, its handles, and the hooks that tell the runtime what happens to it.

Hooks sit on the wrapped module itself, so calling it through the wrapper, directly, or from its own ``generate()``
is the same. A unit knows what belongs to it; when its parameters come and go is decided by the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp._autograd import differentiable_tensors
from fsdp._comm import Communicator
from fsdp._flat_param import FlatParameter, ParamInfo
from fsdp._handle import FlatParamHandle, Phase
from fsdp._names import clean_name

if TYPE_CHECKING:
    from fsdp._runtime import Runtime


class TrainingState(Enum):
    """What a unit is doing, in FairScale's names."""

    IDLE = auto()  # between its computations
    FORWARD = auto()  # its module's forward is running
    BACKWARD_PRE = auto()  # backward has reached its outputs; parameters are whole
    BACKWARD_POST = auto()  # its gradients are complete; the backward of others goes on
    SUMMON_FULL_PARAMS = auto()  # its modules hold whole parameters as ordinary ones


# Where a module keeps its unit. On the module, so that both die together, and so that copying or pickling the
# module meets the unit, which says what to do instead.
_ATTRIBUTE = "_fsdp_unit"


class Unit:
    """The parameters of one wrapped module that no inner unit took.

    Args:
        module: gets the hooks.
        comm: the ranks that share the parameters.
        reshard_after_forward: whether memory is given back between forward and backward.
        predivide, postdivide: factors by which gradients are divided before and after they are summed.
        new_runtime: makes the runtime of a tree whose outermost unit is given.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        reshard_after_forward: bool,
        predivide: float,
        postdivide: float,
        new_runtime: Callable[[Unit], Runtime],
    ) -> None:
        self.module = module
        self.comm = comm
        self.handles: list[FlatParamHandle] = []
        self.reshard_after_forward = reshard_after_forward
        self.predivide, self.postdivide = predivide, postdivide
        self.name = type(module).__name__
        self.state = TrainingState.IDLE
        self.runtime: Runtime | None = None
        self.is_agreed = False  # the ranks have compared what they have
        self.close_loading: Callable[[], None] | None = None  # set while a state dict is being loaded into it
        self.incomplete: set[FlatParamHandle] = set()  # their gradients are not all there, in this backward
        self.input_gradients_due = 0  # calls whose inputs' gradients are awaited; only counted with frozen handles
        self.param_order = {m: list(m._parameters) for m in module.modules()}  # before any is taken over
        self._new_runtime = new_runtime
        module.__dict__[_ATTRIBUTE] = self
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    # --- what the hooks report ----------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.runtime is None:
            # The first to run without a runtime is the outermost: inner units' hooks run after outer ones'.
            self.runtime = self._new_runtime(self)
        return self.runtime.before_forward(self, args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.runtime is not None:
            # torch calls this hook with None while it handles an exception of the forward.
            failed = output is None and sys.exc_info()[1] is not None
            self.runtime.after_forward(self, output, failed)

    def on_gradient(self, handle: FlatParamHandle, slot: int) -> None:
        """A leaf's gradient is there (called by the handle's hooks)."""
        if handle.take_gradient(slot, self.predivide) and self.runtime is not None:
            self.runtime.gradient_complete(self, handle)

    def add_handle(
        self,
        flat_param: FlatParameter,
        places: Sequence[Sequence[ParamInfo]],
        registered: Sequence[tuple[nn.Module, str]],
        reduce_comm: Communicator,
        device: torch.device,
    ) -> None:
        """Shard a flat parameter whose original ones were used at `places`; see `FlatParamHandle`."""
        for module, name in registered:
            module._parameters[name] = flat_param
        handle = FlatParamHandle(flat_param, places, self.comm, reduce_comm, device, registered, self.on_gradient)
        self.handles.append(handle)

    def watch_outputs(self, output: Any) -> bool:
        """Have the runtime told when backward reaches the outputs; False if it never will."""
        tensors = differentiable_tensors(output)
        versions = [handle.flat_param._version for handle in self.handles]

        def on_output_gradient(_: Tensor) -> None:
            if self.runtime is not None:
                self.runtime.before_backward(self, versions)

        for tensor in tensors:
            tensor.register_hook(on_output_gradient)
        return bool(tensors)

    # --- what the runtime asks for ------------------------------------------------------------------------------

    @property
    def has_frozen_handle(self) -> bool:
        return any(not handle.requires_grad for handle in self.handles)

    @property
    def is_gathering(self) -> bool:
        return any(handle.phase is Phase.GATHERING for handle in self.handles)

    def rename(self, name: str) -> None:
        self.name = name
        for number, handle in enumerate(self.handles):
            handle.name = name if len(self.handles) == 1 else f"{name} (flat parameter {number})"

    def gather(self) -> None:
        for handle in self.handles:
            handle.gather()

    def unshard(self) -> None:
        for handle in self.handles:
            handle.unshard()

    def reshard(self) -> None:
        for handle in self.handles:
            handle.reshard()

    def begin_backward(self) -> None:
        self.incomplete = {handle for handle in self.handles if handle.requires_grad}
        for handle in self.incomplete:
            handle.begin_backward()

    def set_divide_factors(self, pre: float, post: float) -> None:
        """Divide by these from now on, what is accumulated already included."""
        for handle in self.handles:
            handle.gradients.rescale(self.predivide / pre)
        self.predivide, self.postdivide = float(pre), float(post)

    def changed_since(self, versions: Sequence[int]) -> bool:
        """Whether a shard was written after a forward that saw these versions."""
        return any(
            handle.flat_param._version != version for handle, version in zip(self.handles, versions, strict=True)
        )

    def __deepcopy__(self, memo: Any) -> Unit:
        raise NotImplementedError(
            f"a module wrapped by FullyShardedDataParallel ({self.name}) cannot be deep-copied yet: build a second one "
            "and copy the weights with load_state_dict(model.state_dict())."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a module wrapped by FullyShardedDataParallel ({self.name}) cannot be pickled yet: save its state_dict()."
        )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that runs `module`, None if it is no unit's."""
    return module.__dict__.get(_ATTRIBUTE)


def units_in(root: Unit) -> list[tuple[str, Unit]]:
    """The units of a tree with the plain names of their modules, outer before inner."""
    found = [(name, unit_of(module)) for name, module in root.module.named_modules()]
    return [(clean_name(name) or f"root ({type(root.module).__name__})", unit) for name, unit in found if unit]
