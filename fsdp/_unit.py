"""A unit: one wrapped module, its handles, and the hooks that tell the runtime what happens to it.

Hooks sit on the wrapped module itself, so calling it through the wrapper, directly, or from its own ``generate()``
is the same. A unit knows what belongs to it; when its parameters come and go is decided by the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.compiler import disable

from fsdp._autograd import differentiable_tensors
from fsdp._comm import Communicator
from fsdp._errors import NotCopied
from fsdp._flat_param import FlatParameter, ParamInfo
from fsdp._handle import FlatParamHandle, Phase
from fsdp._kept_modules import compute_in_own_dtype, kept_modules
from fsdp._names import clean_name
from fsdp._precision import Buffers, InputCast, Precision, cast_floats
from fsdp._trees import map_tensors

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


class Hook(NotCopied):
    """A module's hook of ours. A compiler that traces the module leaves it alone: it moves data between ranks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        _keep_from_compilers()

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


@cache
def _keep_from_compilers() -> None:
    # The call of the class, not the function in it: a module that is compiled in place calls its hooks uncompiled, one
    # by one, and each would be a frame to trace, with a graph break in it. Only now, because it imports for seconds.
    Hook.__call__ = disable(Hook.__call__)  # type: ignore[method-assign]


class Call:
    """One forward of a unit, as its backward will meet it again."""

    def __init__(self, unit: Unit, recomputed: bool) -> None:
        self.unit = unit
        self.recomputed = recomputed  # by activation checkpointing, inside a backward
        self.shards: list[Hashable] = []  # the state of those that it computed with
        self.in_full_precision = False  # what it computed in
        self.will_pass = False  # whether backward goes on through its inputs


class Unit(NotCopied):
    """The parameters of one wrapped module that no inner unit took.

    Args:
        module: gets the hooks.
        comm: the ranks that share the parameters.
        precision: the dtypes that it computes in.
        reshard_after_forward: whether memory is given back between forward and backward.
        predivide, postdivide: factors by which gradients are divided before and after they are summed.
        clear_autocast_cache: let go of autocast's copies of weights after each forward.
        new_runtime: makes the runtime of a tree whose outermost unit is given.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        precision: Precision,
        *,
        reshard_after_forward: bool,
        predivide: float,
        postdivide: float,
        clear_autocast_cache: bool,
        new_runtime: Callable[[Unit], Runtime],
    ) -> None:
        self.module = module
        self.comm = comm
        ours = own_modules(module)
        kept = kept_modules(ours, precision.kept)
        self._kept = {inner for group in kept.values() for inner in group}
        # Before our own hooks, which then run around those that keep a module's precision.
        casting = kept if precision.is_mixed else {}
        self._hooks = [hook for outermost in casting for hook in compute_in_own_dtype(outermost)]
        self.precision = precision.without_casts() if module in self._kept else precision
        self.buffers = Buffers([inner for inner in ours if inner not in self._kept], precision.buffers)
        self.in_full_precision = False
        self.export_dtype: torch.dtype | None = None  # of the parameters in the state dict that is being taken
        self.is_inside_mixed = False  # a unit around it casts inputs
        self.handles: list[FlatParamHandle] = []
        self.reshard_after_forward = reshard_after_forward
        self.predivide, self.postdivide = predivide, postdivide
        self.name = type(module).__name__
        self.state = TrainingState.IDLE
        self.runtime: Runtime | None = None
        self.is_agreed = False  # the ranks have compared what they have
        self.close_loading: Callable[[], None] | None = None  # set while a state dict is being loaded into it
        self.incomplete: set[FlatParamHandle] = set()  # their gradients are not all there, in this backward
        self.unpassed: set[Call] = set()  # backward has reached their outputs, and not yet left by their inputs
        self.param_order = {m: list(m._parameters) for m in module.modules()}  # before any is taken over
        self._clear_autocast_cache = clear_autocast_cache
        self._new_runtime = new_runtime
        self._guarded: set[nn.Module] = set()
        module.__dict__[_ATTRIBUTE] = self
        before, after = Hook(self._before_forward), Hook(self._after_forward)
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))
        self._guard_state(module)

    def withdraw(self) -> None:
        """Leave the module as it was found: it could not be wrapped."""
        for hook in self._hooks:
            hook.remove()
        self.buffers.widen()
        del self.module.__dict__[_ATTRIBUTE]

    # --- what the hooks report ----------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.runtime is None:
            # The first to run without a runtime is the outermost: inner units' hooks run after outer ones'.
            self.runtime = self._new_runtime(self)
        self.runtime.before_forward(self, (args, kwargs))
        return self._cast_inputs((args, kwargs))

    def _cast_inputs(self, inputs: Any) -> Any:
        kind = self.precision.inputs
        if kind is InputCast.NONE or (kind is InputCast.OUTERMOST and self.is_inside_mixed):
            return None
        if kind is InputCast.WIDEN:
            return cast_floats(inputs, torch.float32, only=(torch.float16, torch.bfloat16))
        if not self.in_full_precision and self.state is not TrainingState.SUMMON_FULL_PARAMS:
            return cast_floats(inputs, self.precision.compute)
        own = next((handle.flat_param.dtype for handle in self.handles if handle.is_cast), None)
        return cast_floats(inputs, own)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.runtime is None:
            return None
        if self.state is TrainingState.SUMMON_FULL_PARAMS:
            return cast_floats(output, self.precision.output)
        # torch calls this hook with None while it handles an exception of the forward.
        failed = output is None and sys.exc_info()[1] is not None
        if not failed:
            output = cast_floats(map_tensors(self._outlive_buffers, output), self.precision.output)
        if self._clear_autocast_cache:
            torch.clear_autocast_cache()
        self.runtime.after_forward(self, output, failed)
        return output

    def _outlive_buffers(self, tensor: Tensor) -> Tensor:
        # A module may return a parameter, or a part of it: its memory will be given back.
        if tensor._is_view() or isinstance(tensor, nn.Parameter):
            for handle in self.handles:
                if handle.whole.holds(tensor):
                    return tensor.clone()
        return tensor

    def _guard_state(self, module: nn.Module) -> None:
        if module not in self._guarded:
            self._guarded.add(module)
            self._hooks.append(module.register_state_dict_pre_hook(Hook(self._refuse_partial_state)))

    def _refuse_partial_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.state is not TrainingState.SUMMON_FULL_PARAMS:
            raise RuntimeError(
                f"{self.name}: state_dict() of a {type(module).__name__} inside a FullyShardedDataParallel would hold "
                "this rank's shards, or nothing. Call state_dict() of the wrapper, or be inside summon_full_params()."
            )

    def on_gradient(self, handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
        """A leaf's gradient is there (called by the handle's hooks)."""
        if handle.take_gradient(slot, leaf, self.predivide) and self.runtime is not None:
            self.runtime.gradient_complete(self, handle)

    def add_handle(
        self,
        flat_param: FlatParameter,
        places: Sequence[Sequence[ParamInfo]],
        registered: Sequence[tuple[nn.Module, str]],
        reduce_comm: Communicator,
        original: bool = False,
    ) -> None:
        """Run a flat parameter's shard, whose original parameters were used at `places`; see `FlatParamHandle`."""
        for module in {place.module for group in places for place in group}:
            self._guard_state(module)
        precision = self.precision_at(places[0])
        self.handles.append(
            FlatParamHandle(
                flat_param, places, self.comm, reduce_comm, registered, precision, self.on_gradient, original
            )
        )

    def restore_order(self) -> None:
        """Have modules list their parameters in the order from before they were wrapped."""
        for module in {place.module for handle in self.handles for places in handle.places for place in places}:
            params = dict(module._parameters)
            order = self.param_order.get(module, [])
            module._parameters.clear()
            module._parameters.update({name: params.pop(name) for name in order if name in params})
            module._parameters.update(params)

    def precision_at(self, places: Sequence[ParamInfo]) -> Precision:
        """The dtypes for a parameter that is used at these places."""
        is_kept = any(place.module in self._kept for place in places)
        return self.precision.without_casts() if is_kept else self.precision

    def watch_inputs(self, call: Call, inputs: Any) -> None:
        """Have the runtime told when backward has the gradients of a call's inputs, if it will compute any."""
        tensors = differentiable_tensors(inputs)
        call.will_pass = bool(tensors)

        def on_input_gradients(_: Any) -> None:
            if self.runtime is not None:
                self.runtime.passed(self, call)

        # Hooks on leaves would stay for good. Without one the call never passes, and memory is freed at the end.
        if tensors and not any(tensor.is_leaf for tensor in tensors):
            register_multi_grad_hook(tensors, on_input_gradients)

    def watch_outputs(self, call: Call, outputs: Any) -> bool:
        """Have the runtime told when backward reaches a call's outputs; False if it never will."""
        # A leaf among the outputs was passed through; nothing of the unit is between it and the loss.
        tensors = [tensor for tensor in differentiable_tensors(outputs) if not tensor.is_leaf]
        call.in_full_precision = self.in_full_precision
        call.shards = [handle.shard_state for handle in self.handles]

        def on_output_gradient(_: Tensor) -> None:
            if self.runtime is not None:
                self.runtime.before_backward(self, call)

        for tensor in tensors:
            tensor.register_hook(on_output_gradient)
        return bool(tensors)

    # --- what the runtime asks for ------------------------------------------------------------------------------

    @property
    def has_frozen_handle(self) -> bool:
        return any(handle.has_frozen for handle in self.handles)

    @property
    def contains_units(self) -> bool:
        return any(unit_of(module) is not None for module in self.module.modules() if module is not self.module)

    @property
    def is_gathering(self) -> bool:
        return any(handle.phase is Phase.GATHERING for handle in self.handles)

    def compute_in_full(self, wanted: bool) -> None:
        """Whether to compute in the shards' own precision from now on."""
        if wanted is not self.in_full_precision:
            for handle in self.handles:
                handle.compute_in_full(wanted)
            self.in_full_precision = wanted
            if wanted:
                self.buffers.widen()
            else:
                self.buffers.narrow()

    def follow_mode(self) -> None:
        """Compute in full precision if that was asked for in evaluation, and the module is in it."""
        self.compute_in_full(self.precision.full_in_eval and not self.module.training)

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

    def read_ahead(self) -> None:
        """It will be gathered after the next one."""
        for handle in self.handles:
            handle.home.read_ahead()

    def begin_backward(self, is_summing: bool) -> None:
        self.expect_gradients()
        self.unpassed.clear()
        for handle in self.incomplete:
            handle.begin_backward(is_summing)

    def expect_gradients(self) -> None:
        """Its backward begins, or begins again in a re-entrant checkpoint."""
        self.incomplete = {handle for handle in self.handles if handle.requires_grad}

    def set_divide_factors(self, pre: float, post: float) -> None:
        """Divide by these from now on, what is accumulated already included."""
        for handle in self.handles:
            handle.gradients.rescale(self.predivide / pre)
        self.predivide, self.postdivide = float(pre), float(post)

    def changed_since(self, shards: Sequence[Hashable]) -> bool:
        """Whether a shard was changed after a forward that saw it like this."""
        return shards != [handle.shard_state for handle in self.handles]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that runs `module`, None if it is no unit's."""
    return module.__dict__.get(_ATTRIBUTE)


def own_modules(module: nn.Module) -> list[nn.Module]:
    """The modules of a tree, outer before inner, without those that run in units inside of it."""
    found: dict[nn.Module, None] = {}
    ahead = [module]
    while ahead:
        current = ahead.pop()
        if current not in found and (current is module or unit_of(current) is None):
            found[current] = None
            ahead += reversed(list(current.children()))
    return list(found)


def units_in(root: Unit) -> list[tuple[str, Unit]]:
    """The units of a tree with the plain names of their modules, outer before inner."""
    found = [(name, unit_of(module)) for name, module in root.module.named_modules()]
    return [(clean_name(name) or f"root ({type(root.module).__name__})", unit) for name, unit in found if unit]
