"""`FSDPState`: what torch's pipelines ask of the state of a module under `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp.engine.runtime import runtime_of
from fsdp.engine.unit import Unit, units_in


@dataclass(frozen=True)
class FSDPState:
    """The state of a sharded module, see ``fully_shard.state``.

    Attributes:
        unit: of the module.
    """

    unit: Unit

    _fsdp_param_groups = ()  # torch's pipelines reduce the gradients of each, and then call this one:
    _fsdp_param_group = None  # the same in torch 2.11

    @property
    def _state_ctx(self) -> FSDPState:
        return self

    @property
    def all_states(self) -> list[FSDPState]:
        """The states of the module and of those inside."""
        return [FSDPState(unit) for _, unit in units_in(self.unit)]

    def _root_post_backward_final_callback(self) -> None:
        for _, unit in units_in(self.unit):
            _take_assigned(unit)
        runtime_of(self.unit).reduce_accumulated()


def _take_assigned(unit: Unit) -> None:
    """Accumulate gradients that were assigned to unsharded parameters, for which autograd has called no hook.

    Pipelines that separate the backward of weights compute their gradients with ``torch.autograd.grad``.
    """
    for handle in unit.handles:
        for slot, leaf in enumerate(handle.unsharded.leaves):
            if leaf.grad is not None:
                handle.take_gradient(slot, leaf, unit.predivide)
        handle.mark_unreduced()
