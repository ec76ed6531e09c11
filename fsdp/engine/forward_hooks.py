"""The hooks around the forward of a unit's module, and the module's calls, which backward reaches again.

Hooks are registered on the wrapped module itself, so the module may be called through the wrapper, directly, or from
its ``generate()``.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.communicator import own_rank, uncompiled
from fsdp.engine.autograd import (
    backward_id,
    copies_saved_tensors,
    differentiable_tensors,
    in_backward,
    in_transform,
    outside_modes,
    outside_transforms,
    unpacks_saved_tensors,
    will_run,
)
from fsdp.engine.call_stack import MODULE_CALL, calls_on
from fsdp.engine.handle import FlatParamHandle, ShardState
from fsdp.engine.precision import InputCast, cast_floats
from fsdp.engine.presentation import lenders
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.trees import map_tensors
from fsdp.engine.unit import TrainingState, Unit

# The module attribute for the hooks.
_ATTRIBUTE = "_fsdp_forward"


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, because its class or the instance defines ``forward``."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


class ForwardHooks:
    """Runs a unit's runtime around the forward of a module, and casts inputs and outputs.

    Args:
        unit: the module's unit.
        module: the unit's module, or a module of its group.
        clear_autocast_cache: If True, clear autocast's cache of cast weights after each forward.
        brings_inputs: If True, move inputs of the outermost module to the device of the computation.
    """

    def __init__(self, unit: Unit, module: nn.Module, *, clear_autocast_cache: bool, brings_inputs: bool) -> None:
        self._unit, self._module = unit, module
        self._clear_autocast_cache, self._brings_inputs = clear_autocast_cache, brings_inputs
        self.depth = 0  # the number of running calls of the module, nested in the first
        self._handled = 0  # the id of the exception that the first call's caller is handling

    def register(self) -> None:
        """Register the hooks on the module until the unit removes them."""
        self._module.__dict__[_ATTRIBUTE] = self
        self._unit.hooks += [
            self,
            self._module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            self._module.register_forward_hook(self.after, always_call=True),
        ]

    def remove(self) -> None:
        """Remove this object from the module's attributes."""
        del self._module.__dict__[_ATTRIBUTE]

    @uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before the module computes. Returns the arguments, cast and moved if requested."""
        inputs = args, kwargs
        if self._unit.state is TrainingState.FORWARD and (in_backward() or self._is_inside_its_call()):
            self.depth += 1
        elif self._unit.state is TrainingState.FORWARD and self.threads - {threading.get_ident()}:
            self.depth += 1  # the other call continues after this call raises
            raise called_by_two_threads(self._unit)
        else:
            self.depth, self._handled = 1, id(sys.exc_info()[1])
            if copies_saved_tensors():
                self._refuse_copies()
            if not (lenders and self._unit.is_lent):  # else the unit takes no part in this call
                with outside_transforms():
                    runtime = self._unit.runtime or self._unit.ensure_runtime()
                    runtime.before_forward(self._unit, inputs)
                if self._brings_inputs and runtime.root is self._unit:
                    inputs = map_tensors(partial(_on_device, self._unit.device), inputs)
        return self._cast_inputs(inputs)

    @uncompiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after the module computed or raised. Returns the output, cast if requested."""
        unit = self._unit
        self.depth -= 1
        if self.depth > 0 or unit.runtime is None or unit.state is TrainingState.SUMMON_FULL_PARAMS:
            return cast_floats(output, unit.precision.output)
        # torch calls this hook with None while it handles an exception of the forward.
        failed = output is None and id(sys.exc_info()[1]) != self._handled
        if not failed:
            output = map_tensors(partial(_outlive_buffers, unit.runtime.unsharded_after(unit)), output)
            if unit.runtime.participation.may_differ:
                output = map_tensors(_in_graph, output)
            if unit.precision.output is not None:
                output = cast_floats(output, unit.precision.output)
        if self._clear_autocast_cache:
            torch.clear_autocast_cache()
        with outside_modes():
            unit.runtime.after_forward(unit, module, output, failed)
        return output

    def around(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method of the module in the same way as its forward."""
        depth = self.depth
        try:
            args, kwargs = self.before(self._module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            self.give_up(depth)
            raise
        return self.after(self._module, args, output)

    def give_up(self, depth: int) -> None:
        """End the call that began at depth `depth` after an exception, which torch's hooks may not have seen."""
        if self.depth > depth:
            self.depth = depth
            if not depth and self._unit.runtime is not None:
                self._unit.runtime.give_up_forward(self._unit)

    def _is_inside_its_call(self) -> bool:
        """Return whether the module runs further down the stack, and was not left by an unseen exception.

        A backward may have a separate stack; a recomputed forward in a backward during a forward counts as nested.
        """
        return sum(1 for _ in islice(self._calls_on(sys._getframe(1)), 2)) == 2  # the first is the call that begins

    @property
    def threads(self) -> set[int]:
        """The threads in which the module runs.

        Hooks do not see exceptions that are not an `Exception`, for example `KeyboardInterrupt`, when they end a call.
        """
        return {thread for thread, stack in sys._current_frames().items() if any(self._calls_on(stack))}

    def _calls_on(self, stack: FrameType) -> Iterator[FrameType]:
        return calls_on(stack, {MODULE_CALL: self._module, ForwardHooks.around.__code__: self})

    def _refuse_copies(self) -> None:
        if not all(handle.unsharded.is_shard for handle in self._unit.handles):
            raise RuntimeError(
                f"{self._unit.name} computes inside of torch.autograd.graph.allow_mutation_on_saved_tensors(), which "
                "copies saved tensors before they are written: it would read parameters whose memory is freed until "
                "backward. Run this module outside the context, and clone the tensors that its in-place operations "
                "write to."
            )

    def _cast_inputs(self, inputs: Any) -> Any:
        unit, kind = self._unit, self._unit.precision.inputs
        if kind is InputCast.NONE:
            return inputs
        if kind is InputCast.OUTERMOST and unit.runtime is not None and unit in unit.runtime.inside_mixed:
            return inputs
        if kind is InputCast.WIDEN:
            return cast_floats(inputs, torch.float32, only=(torch.float16, torch.bfloat16))
        if unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            return cast_floats(inputs, unit.precision.input_dtype(unit.device.type))
        own = next((handle.flat_param.dtype for handle in unit.handles if handle.is_cast), None)
        return cast_floats(inputs, own)


def _on_device(device: torch.device, tensor: Tensor) -> Tensor:
    # Function modes see the operation `to` even if it changes nothing.
    return tensor if tensor.device == device else tensor.to(device)


def _outlive_buffers(handles: Sequence[FlatParamHandle], tensor: Tensor) -> Tensor:
    # A module may return a parameter, or a view of a parameter, which resharding frees.
    shows = tensor._is_view() or tensor.is_leaf
    for handle in handles:
        # Results of DTensor operations do not show whether they are views of the local part.
        if (shows or any(handle.flat_param.parts)) and handle.unsharded.holds(tensor):
            return tensor.clone()
    return tensor


def _in_graph(tensor: Tensor) -> Tensor:
    # A leaf that is passed through does not report a backward in which other ranks reach the unit and gather it.
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor


def forward_hooks_of(module: nn.Module) -> ForwardHooks:
    """Return a module's forward hooks, registered by a unit."""
    hooks: ForwardHooks = module.__dict__[_ATTRIBUTE]
    return hooks


def threads_in(unit: Unit) -> set[int]:
    """Return the threads in which a module of a unit runs, see `ForwardHooks.threads`."""
    return set[int]().union(*(forward_hooks_of(module).threads for module in unit.modules))


def called_by_two_threads(unit: Unit) -> RuntimeError:
    """Return the error of a call while another thread is in the forward of a unit."""
    return RuntimeError(
        f"rank {own_rank()}: {unit.name} is called while another thread is in its forward. A sharded model unshards "
        "its parameters for one thread at a time: call it from one thread, or with a lock around each forward and "
        "backward, in the same order on every rank."
    )


def _trained(unit: Unit) -> list[list[bool]]:
    return [handle.requires_grad_each for handle in unit.handles]


def _nodes_of(tensors: list[Tensor]) -> set[Any]:
    bases = [tensor._base for tensor in tensors if tensor._base is not None]
    return {tensor.grad_fn for tensor in tensors + bases if tensor.grad_fn is not None}


@uncompiled
def _call_alive(method: weakref.WeakMethod[Callable[[Any], None]], gradient: Any) -> None:
    if (alive := method()) is not None:
        alive(gradient)


class Call:
    """A forward of a unit, to which the unit's backward refers.

    The graph keeps the call alive: hooks of outputs refer to the call, and the call refers to nodes of inputs, in the
    direction of the graph. Hooks of inputs refer to it weakly. `register_multi_grad_hook` would create a cycle that
    keeps the call and the graph of a forward without backward until a garbage collection. Ranks collect garbage at
    different times, and backward waits for all calls that are alive.
    """

    def __init__(self, unit: Unit, recomputed: bool) -> None:
        self.unit = unit
        self.number = 0  # see `UnitBackward`
        self.recomputed = recomputed  # by activation checkpointing, inside a backward
        self.shards: list[ShardState] = []  # the states of the shards used in the computation
        self.is_transformed = False  # by `torch.func`, which always computes input gradients with create_graph
        self.will_pass = False  # backward continues through the inputs and reports to the runtime after them
        self.references = 0  # from its graph to the memory of the unsharded parameters
        self.checkpoints: list[weakref.ref[Any]] = []  # around inner units; alive until backward has passed them
        self._unpack_id = 0  # distinguishes inner from outer checkpoints during the call
        self.ends_at: list[list[bool]] | None = None  # trained parameters, if inputs are watched
        self._input_nodes: list[Any] = []  # whose gradients are reported to the runtime
        self._upstream: set[Any] = set()  # these, and the nodes of the inputs' base tensors
        # The last backward to reach the inputs, and how many of their gradients are not computed yet.
        self._input_backward, self._missing_inputs = -1, 0
        self.order: ExecutionOrder[Unit] | None = None  # in which all ranks run the call; None if only some ranks do
        self.backward: object = None  # the last backward to reach the outputs

    def begin(self, around: Call | None) -> None:
        """Begin the computation, in the forward of a call `around` this call."""
        self.references = -self.unit.references
        unpack = unpacks_saved_tensors()
        self._unpack_id = id(unpack)
        if around is not None and unpack is not None and self._unpack_id != around._unpack_id:
            around.checkpoints.append(weakref.ref(unpack))

    def watch_inputs(self, inputs: Any) -> None:
        """Report to the runtime after backward computed the gradients of the inputs, if there are any."""
        tensors = differentiable_tensors(inputs)
        self.ends_at = _trained(self.unit)
        self.will_pass = bool(tensors)
        # Hooks on leaves would never be removed. Without hooks the call never passes, and memory is freed at the end.
        if tensors and not any(tensor.is_leaf for tensor in tensors):
            self._input_nodes = [tensor.grad_fn for tensor in tensors]
            self._upstream = _nodes_of(tensors)
            for tensor in tensors:
                tensor.register_hook(partial(_call_alive, weakref.WeakMethod(self._input_has_gradient)))

    @property
    def may_outlast_gradients(self) -> bool:
        """Return whether the backward may continue after all awaited gradients of the unit have arrived."""
        # A parameter frozen after this forward is still in its graph.
        return self.will_pass or (self.unit.has_frozen_handle and self.ends_at != _trained(self.unit))

    def watch_outputs(self, outputs: Any) -> bool:
        """Report to the runtime when backward reaches the outputs; return False if backward never will."""
        self.is_transformed = in_transform()
        # A leaf among the outputs was passed through; no operation of the unit is between the leaf and the loss.
        tensors = [tensor for tensor in differentiable_tensors(outputs) if not tensor.is_leaf]
        self.shards = [handle.state_in_use for handle in self.unit.handles]
        if self.recomputed and self.unit.backward.has_counted:
            self.references = 0  # its graph did not exist when references of all calls were counted
        else:
            self.references += self.unit.references
        if self._upstream and not self._upstream.isdisjoint(_nodes_of(tensors)):
            # An output is an input or a view of it, so hooks of the outputs would create the cycle described above.
            self._input_nodes, self._upstream = [], set()
        for tensor in tensors:
            # Another rank may compute with an inner unit's output that this rank returns unchanged. So that both ranks
            # reach the outer unit first, its hook is placed before the inner unit's (autograd calls hooks in order).
            hooks: Any = tensor._backward_hooks or {}
            earlier = dict(hooks)
            hooks.clear()
            tensor.register_hook(self._output_has_gradient)
            hooks.update(earlier)
            # An in-place operation on a view moves the view in the graph and drops the hooks of its former node. The
            # node of the base tensor still precedes the unit in backward.
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(self._output_has_gradient)
        return bool(tensors)

    def _input_has_gradient(self, _: Any) -> None:
        if self._input_backward != (backward := backward_id()):
            self._input_backward, self._missing_inputs = backward, sum(map(will_run, self._input_nodes))
        self._missing_inputs -= 1
        if self._missing_inputs == 0 and self.unit.runtime is not None:
            self.unit.runtime.passed(self.unit, self)

    @uncompiled
    def _output_has_gradient(self, _: Tensor) -> None:
        if self.unit.runtime is not None:
            with outside_transforms():
                self.unit.runtime.before_backward(self.unit, self)
