"""Support for sharded modules in torch's pipelines: `FSDPState`, and a check for schedules that require it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from fsdp.distributed.communicator import uncompiled
from fsdp.engine.call_stack import frames_from
from fsdp.engine.runtime import runtime_of
from fsdp.engine.unit import Unit, units_in


@dataclass(frozen=True)
class FSDPState:
    """The state of a sharded module, see ``fully_shard.state``."""

    unit: Unit

    _fsdp_param_groups = ()  # torch's pipelines reduce the gradients of each group, then call the method below
    _fsdp_param_group = None  # the same in torch 2.11

    @property
    def _state_ctx(self) -> FSDPState:
        return self

    @property
    def all_states(self) -> list[FSDPState]:
        """The states of the module and of its inner modules."""
        return [FSDPState(unit) for unit in units_in(self.unit)]

    def _root_post_backward_final_callback(self) -> None:
        finalize_backward(self.unit)


def finalize_backward(unit: Unit) -> None:
    """Collective. Reduce the accumulated gradients of an outermost unit, and gradients that a schedule has assigned.

    Pipelines with a separate backward for weights compute their gradients using `torch.autograd.grad`, and assign them
    to unsharded parameters, so autograd does not call the hooks.
    """
    for each in units_in(unit):
        each.take_assigned_gradients()
        for handle in each.handles:
            handle.mark_unreduced()
    runtime_of(unit).reduce_accumulated()


# The modules of the frames between a pipeline's call of `parameters()` of a stage, and the front door.
_LISTING = {"torch.nn.modules.module", "fsdp.fully_shard", "fsdp.fully_sharded_data_parallel"}


@uncompiled
def refuse_separate_backwards(unit: Unit) -> None:
    """Raise an error if a pipeline lists the parameters of a stage to compute their gradients separately.

    `named_parameters` calls this function, for `parameters`, and `named_modules`, for the parameters of a module around
    the unit.

    Raises:
        RuntimeError: if the pipeline does not detect a sharded module, so it would find no gradients of shards.
    """
    if unit.policy.awaits_backwards or "torch.distributed.pipelining._backward" not in sys.modules:
        return
    callers = (frame.f_globals.get("__name__") for frame in frames_from(sys._getframe(1)))
    if next((name for name in callers if name not in _LISTING), None) == "torch.distributed.pipelining._backward":
        raise RuntimeError(
            f"{unit.name}: the pipeline schedule computes gradients of inputs and of parameters separately, which is "
            "not supported for this module. Call fsdp.compat.fsdp2.install(), and shard the stage's module with "
            "fully_shard; or use a schedule that does not split backward, such as Schedule1F1B."
        )
