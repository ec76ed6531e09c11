"""The hooks around the forward of a unit's module, and its calls, which backward meets again.

Hooks sit on the wrapped module itself, so calling it through the wrapper, directly, or from its own ``generate()``
is the same.
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

# Where a module keeps its hooks.
_ATTRIBUTE = "_fsdp_forward"


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, because its class or the instance defines ``forward``."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


class ForwardHooks:
    """Runs a unit's runtime around the forward of its module, and casts its inputs and outputs.

    Args:
        unit: whose module gets the hooks.
        module: that module, or one of a group.
        clear_autocast_cache: let go of autocast's copies of weights after each forward.
        brings_inputs: bring the inputs of the outermost module to the device that it computes on.
    """

    def __init__(self, unit: Unit, module: nn.Module, *, clear_autocast_cache: bool, brings_inputs: bool) -> None:
        self._unit, self._module = unit, module
        self._clear_autocast_cache, self._brings_inputs = clear_autocast_cache, brings_inputs
        self.depth = 0  # how many calls of the module are running; all but the first are parts of it
        self._handled = 0  # the id of the exception that the caller of the first is handling

    def register(self) -> None:
        """Put the hooks on the module, for as long as the unit has it."""
        self._module.__dict__[_ATTRIBUTE] = self
        self._unit.hooks += [
            self,
            self._module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            self._module.register_forward_hook(self.after, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks from the module's attributes."""
        del self._module.__dict__[_ATTRIBUTE]

    @uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module is about to compute. Returns its arguments, cast and moved if that was asked for."""
        inputs = args, kwargs
        if self._unit.state is TrainingState.FORWARD and (in_backward() or self._is_inside_its_call()):
            self.depth += 1
        elif self._unit.state is TrainingState.FORWARD and self.runs(elsewhere=True):
            self.depth += 1  # the other call goes on when this one has raised
            raise RuntimeError(
                f"rank {own_rank()}: {self._unit.name} is called while another thread is in its forward. A sharded "
                "model unshards its parameters for one thread at a time: call it from one thread, or with a lock "
                "around each forward and backward, in the same order on every rank."
            )
        else:
            self.depth, self._handled = 1, id(sys.exc_info()[1])
            if copies_saved_tensors():
                self._refuse_copies()
            if not (lenders and self._unit.is_lent):  # else it has no part in this call
                with outside_transforms():
                    runtime = self._unit.runtime or self._unit.ensure_runtime()
                    runtime.before_forward(self._unit, inputs)
                if self._brings_inputs and runtime.root is self._unit:
                    inputs = map_tensors(partial(_on_device, self._unit.device), inputs)
        return self._cast_inputs(inputs)

    @uncompiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The module has computed, or raised. Returns its output, cast if that was asked for."""
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
        """Run a method of the module as its forward is run."""
        depth = self.depth
        try:
            args, kwargs = self.before(self._module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            self.give_up(depth)
            raise
        return self.after(self._module, args, output)

    def give_up(self, depth: int) -> None:
        """An exception has ended the call before which so many were running; torch's hooks may not have seen it."""
        if self.depth > depth:
            self.depth = depth
            if not depth and self._unit.runtime is not None:
                self._unit.runtime.give_up_forward(self._unit)

    def _is_inside_its_call(self) -> bool:
        """Return whether the module runs further down the stack, and was not left there by an unseen exception.

        A backward may have a stack of its own, but a recomputed forward in it, while a forward runs, is inside of that.
        """
        return sum(1 for _ in islice(self._calls_on(sys._getframe(1)), 2)) == 2  # the first is the one that begins

    def runs(self, *, elsewhere: bool = False) -> bool:
        """Return whether the module is in a call, on any thread, or (`elsewhere`) on another one than this.

        No hook sees the exceptions that are no `Exception`, such as `KeyboardInterrupt`, when they end a call.
        """
        stacks = sys._current_frames()
        if elsewhere:
            del stacks[threading.get_ident()]
        return any(any(self._calls_on(stack)) for stack in stacks.values())

    def _calls_on(self, stack: FrameType) -> Iterator[FrameType]:
        return calls_on(stack, {MODULE_CALL: self._module, ForwardHooks.around.__code__: self})

    def _refuse_copies(self) -> None:
        if not all(handle.unsharded.is_shard for handle in self._unit.handles):
            raise RuntimeError(
                f"{self._unit.name} computes inside of torch.autograd.graph.allow_mutation_on_saved_tensors(), which "
                "copies saved tensors before they are written: it would read memory of parameters that is freed until "
                "backward. Leave the context around this module, and clone what its in-place operations write to."
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
    # A module may return a parameter, or a view of it, and the unit is resharded.
    shows = tensor._is_view() or tensor.is_leaf
    for handle in handles:
        # The result of an operation on a DTensor does not show whether it is a view of its local part.
        if (shows or any(handle.flat_param.parts)) and handle.unsharded.holds(tensor):
            return tensor.clone()
    return tensor


def _in_graph(tensor: Tensor) -> Tensor:
    # A leaf that is passed through tells of no backward, in which other ranks come to the unit and gather it.
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor


def forward_hooks_of(module: nn.Module) -> ForwardHooks:
    """Return the hooks around the forward of a module that a unit runs around."""
    hooks: ForwardHooks = module.__dict__[_ATTRIBUTE]
    return hooks


def is_called(unit: Unit) -> bool:
    """Return whether a module of a unit is in a call, on any thread."""
    return any(forward_hooks_of(module).runs() for module in unit.modules)


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
    """A forward of a unit, which its backward refers to.

    The graph keeps the call alive: hooks of the outputs refer to it, and it refers to the nodes of the inputs, in the
    direction of the graph. Hooks of the inputs refer to it weakly. With `register_multi_grad_hook` there would be a
    cycle, which keeps the call and the graph of a forward without backward until a garbage collection. Ranks collect
    garbage at different times, and backward waits for the calls that are alive.
    """

    def __init__(self, unit: Unit, recomputed: bool) -> None:
        self.unit = unit
        self.number = 0  # see `UnitBackward`
        self.recomputed = recomputed  # by activation checkpointing, inside a backward
        self.shards: list[ShardState] = []  # the state of those that it computed with
        self.is_transformed = False  # by `torch.func`, which asks for gradients of inputs with create_graph in any case
        self.will_pass = False  # backward goes on through its inputs, and the runtime is told when it has passed them
        self.references = 0  # of its graph to the memory of the unsharded parameters
        self.checkpoints: list[weakref.ref[Any]] = []  # around units inside; they live until backward has passed them
        self._unpack_id = 0  # tells a checkpoint in it from one around it, while it runs
        self.ends_at: list[list[bool]] | None = None  # the parameters that it ends at, if the inputs were looked at
        self._input_nodes: list[Any] = []  # whose gradients the runtime is told of
        self._upstream: set[Any] = set()  # these, and those of the tensors that the inputs are views of
        # The last backward that has come to the inputs, and how many of their gradients it has not computed yet.
        self._input_backward, self._missing_inputs = -1, 0
        self.order: ExecutionOrder[Unit] | None = None  # in which all ranks run it; None if only some do
        self.backward: object = None  # the last one that has come to its outputs

    def begin(self, around: Call | None) -> None:
        """The module computes from now on, in the forward of a call `around` it."""
        self.references = -self.unit.references
        unpack = unpacks_saved_tensors()
        self._unpack_id = id(unpack)
        if around is not None and unpack is not None and self._unpack_id != around._unpack_id:
            around.checkpoints.append(weakref.ref(unpack))

    def watch_inputs(self, inputs: Any) -> None:
        """Report to the runtime when backward has the gradients of the inputs, if it computes any."""
        tensors = differentiable_tensors(inputs)
        self.ends_at = _trained(self.unit)
        self.will_pass = bool(tensors)
        # Hooks on leaves would stay for good. Without one the call never passes, and memory is freed at the end.
        if tensors and not any(tensor.is_leaf for tensor in tensors):
            self._input_nodes = [tensor.grad_fn for tensor in tensors]
            self._upstream = _nodes_of(tensors)
            for tensor in tensors:
                tensor.register_hook(partial(_call_alive, weakref.WeakMethod(self._input_has_gradient)))

    @property
    def may_outlast_gradients(self) -> bool:
        """Return whether its backward may continue after all awaited gradients of the unit have arrived."""
        # A parameter that was frozen after this forward is still in its graph.
        return self.will_pass or (self.unit.has_frozen_handle and self.ends_at != _trained(self.unit))

    def watch_outputs(self, outputs: Any) -> bool:
        """Report to the runtime when backward reaches the outputs; return False if it never will."""
        self.is_transformed = in_transform()
        # A leaf among the outputs was passed through; nothing of the unit is between it and the loss.
        tensors = [tensor for tensor in differentiable_tensors(outputs) if not tensor.is_leaf]
        self.shards = [handle.state_in_use for handle in self.unit.handles]
        if self.recomputed and self.unit.backward.has_counted:
            self.references = 0  # its graph was not there when the references of all calls were counted
        else:
            self.references += self.unit.references
        if self._upstream and not self._upstream.isdisjoint(_nodes_of(tensors)):
            # An output is an input or a view of it, so hooks of the outputs would make the cycle of the class.
            self._input_nodes, self._upstream = [], set()
        for tensor in tensors:
            # Another rank may compute with what a unit inside has returned, while this one returns it as it is. So that
            # both reach the outer unit first, its hook goes before the inner one's. (Autograd calls them as they lie.)
            hooks: Any = tensor._backward_hooks or {}
            earlier = dict(hooks)
            hooks.clear()
            tensor.register_hook(self._output_has_gradient)
            hooks.update(earlier)
            # An in-place operation on a view gives it another place in the graph, and takes its hooks out of that; what
            # it is a view of stays in front of the unit.
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
