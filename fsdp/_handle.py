"""`FlatParamHandle` keeps one flat parameter sharded, shows it whole, and takes in its gradients.

The tensors of a handle, for W ranks (P is the layout's padded number of elements):

- ``flat_param`` ``[P / W]``: this rank's shard, the only thing that lives between steps and all that the
  optimizer sees. Registered in modules, so `parameters()` finds it.
- ``full`` ``[P]``: the gathered parameters. One tensor made once, whose *storage* is freed and allocated again.
- ``leaves``: one per parameter, views of ``full`` made once and never again; modules compute with them, and
  autograd accumulates into them. They are made from ``.data``, so each has a version counter of its own: gathering
  into ``full`` does not look to autograd like a change of the weights that it saved.

In a world of one ``full`` is the shard itself, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from fsdp._comm import LONE_RANK, Communicator, Pending
from fsdp._errors import InternalError
from fsdp._flat_param import FlatParameter, ParamInfo, SharedParamInfo
from fsdp._gradients import GradientBuffer
from fsdp._layout import Interval
from fsdp._placeholder import Placeholder, sharded_weight, unreduced_gradient


class Phase(Enum):
    """What is true of a handle's gathered buffer."""

    SHARDED = auto()  # it has no memory; modules see placeholders
    GATHERING = auto()  # allocated, the all-gather is in flight; nobody may read it
    FULL = auto()  # whole and valid; modules see the leaves


_LEGAL = {
    Phase.SHARDED: (Phase.GATHERING,),
    Phase.GATHERING: (Phase.FULL, Phase.SHARDED),
    Phase.FULL: (Phase.SHARDED,),
}


class FlatParamHandle:
    """Runs one flat parameter: shards it, shows it whole, and takes in its gradients.

    It knows how, and nothing of when: which collectives happen in which order is the runtime's.

    Args:
        flat_param: this rank's shard (`FlatParameter.shard_of`), where it is computed.
        infos: for each of its parameters, the places where it is used, first the one that names it.
        comm, reduce_comm: the ranks to gather from, and to reduce over.
        registered: the modules, with the name, among whose parameters `flat_param` is registered.
        on_gradient: called with the handle and a parameter's number when autograd has finished that gradient.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        infos: Sequence[Sequence[ParamInfo]],
        comm: Communicator,
        reduce_comm: Communicator,
        registered: Sequence[tuple[nn.Module, str]],
        on_gradient: Callable[[FlatParamHandle, int], None],
    ) -> None:
        self.flat_param = flat_param
        self.param_infos = [places[0] for places in infos]
        self.shared_param_infos = [
            SharedParamInfo(*place, primary=places[0]) for places in infos for place in places[1:]
        ]
        if flat_param.make_layout().numel == 0:
            comm = reduce_comm = LONE_RANK  # there is nothing to say to other ranks
        self.comm, self.reduce_comm = comm, reduce_comm
        self.layout = flat_param.make_layout(comm.world_size)
        self.name = ""
        self.phase = Phase.SHARDED
        self.registered = list(registered)
        self._on_gradient = on_gradient
        self.places = [list(places) for places in infos]
        self.tag = 0  # distinct on its communicator once the ranks have agreed on a plan
        flat_param._is_managed = True
        self._build()

    # --- the shard ----------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold a part of it."""
        return self.comm.world_size > 1

    @property
    def requires_grad(self) -> bool:
        return self.flat_param.requires_grad

    @property
    def intervals(self) -> list[Interval]:
        """What this rank holds: shard metadata in the layout's terms."""
        return self.layout.intervals(self.comm.rank)

    def describe(self) -> str:
        """All that the ranks must agree on, as text."""
        slots = ", ".join(f"{slot.name}{list(slot.shape)}" for slot in self.layout.slots)
        kind = f"{self.flat_param.dtype} requires_grad={self.requires_grad}"
        return f"{kind} over {self.layout.world_size} ranks by {type(self.comm).__name__}: {slots}"

    # --- the leaves ---------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Make buffer, leaves and placeholders for the shard's present dtype and device."""
        shard = self.flat_param
        if self.is_sharded:
            self.full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=shard.device)
        else:
            self.full = shard.detach()
        self.nbytes = self.layout.padded_numel * self.full.element_size()
        self.leaves = [nn.Parameter(view.data, shard.requires_grad) for view in self.layout.unpack(self.full)]
        self.gradients = GradientBuffer(self.layout, self.full)
        if shard.requires_grad:
            for slot, leaf in enumerate(self.leaves):
                leaf.register_post_accumulate_grad_hook(lambda _, slot=slot: self._on_gradient(self, slot))
        self._list_places()
        self._gathered_version = -1
        if self.is_sharded:
            self.full.untyped_storage().resize_(0)

    def _list_places(self) -> None:
        self._swaps: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for slot, leaf, places in zip(self.layout.slots, self.leaves, self.places, strict=True):
            absent = sharded_weight(slot.name, leaf) if self.is_sharded else leaf
            self._swaps += [(place.module.__dict__, place.name, leaf, absent) for place in places]
        modules = {place.module: None for places in self.places for place in places}
        self._rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        for module in self._rnns:
            # It would move the weights into memory of cuDNN's choice; ours lie one after the other already.
            module.__dict__["flatten_parameters"] = _leave_as_they_are
        self.fill_places()

    def fill_places(self) -> None:
        """Put where the modules look for their parameters what belongs there in this phase, whatever is there."""
        for attributes, name, leaf, absent in self._swaps:
            attributes[name] = leaf if self.phase is Phase.FULL else absent
        self.refresh_rnns()

    def _show(self) -> None:
        self.check_places()
        for attributes, name, leaf, _ in self._swaps:
            attributes[name] = leaf
        if self._rnns:
            self.refresh_rnns()

    def _hide(self) -> None:
        for attributes, name, leaf, absent in self._swaps:
            if attributes.get(name) is leaf:  # else `check_places` will report what is there
                attributes[name] = absent
        if self._rnns:
            self.refresh_rnns()

    def refresh_rnns(self) -> None:
        """Recurrent modules keep their weights in a list besides: make it what their attributes are."""
        for module in self._rnns:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter's attribute is no longer what we put there."""
        for slot, (attributes, name, leaf, absent) in enumerate(self._swaps):
            found = attributes.get(name)
            if found is not absent and found is not leaf:
                fqn = [place.fqn for places in self.places for place in places][slot]
                raise RuntimeError(
                    f"{self.name}: {fqn} was replaced after wrapping. The new value would not be trained, and other "
                    "ranks would never see it: assign it inside `with model.summon_full_params():`, or load it with "
                    "load_state_dict()."
                )

    def replacement(self, slot: int) -> nn.Parameter | None:
        """What the user has put in the place of a parameter, None if nothing."""
        place = self.places[slot][0]
        found = place.module._parameters.get(place.name)
        return None if found is self.flat_param else found

    def follow_shard(self) -> None:
        """Follow a shard that was moved, cast or frozen (`module.to(...)`): buffer and leaves are made anew."""
        shard = self.flat_param
        if shard.numel() != self.layout.shard_numel:
            raise RuntimeError(
                f"{self.name}: the flat parameter's shard has {shard.numel()} elements instead of "
                f"{self.layout.shard_numel}: its .data was replaced by something else. Change parameters inside "
                "`with model.summon_full_params():`."
            )
        if shard.device != self.full.device:
            self.comm = self.comm.for_device(shard.device)
            self.reduce_comm = self.reduce_comm.for_device(shard.device)
        changed = shard.dtype != self.full.dtype or shard.device != self.full.device
        changed |= bool(self.leaves) and shard.requires_grad != self.leaves[0].requires_grad
        if changed or (not self.is_sharded and shard.data_ptr() != self.full.data_ptr()):
            self._build()

    # --- unshard and reshard ------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise InternalError(
                f"rank {self.comm.rank}, {self.name}: {self.phase.name} -> {phase.name} is not a legal step"
            )
        self.phase = phase

    def gather(self) -> None:
        """Start to fetch the whole parameter; nothing happens if it is here or on its way."""
        if self.phase is not Phase.SHARDED:
            if self.phase is Phase.GATHERING or self.flat_param._version == self._gathered_version:
                return
            self.reshard()  # the shard was changed since: what is here is stale
        self.follow_shard()
        self._gathered_version = self.flat_param._version
        self._enter(Phase.GATHERING)
        if self.is_sharded:
            self.full.untyped_storage().resize_(self.nbytes)
            shard = self.flat_param.detach()
            self._pending: Pending = self.comm.all_gather(self.full, shard, f"all-gather of {self.name}", self.tag)

    def unshard(self) -> None:
        """Whole and visible in the modules when this returns (on CUDA: for work on the current stream)."""
        self.gather()
        if self.phase is Phase.GATHERING:
            if self.is_sharded:
                self._pending.wait()
            self._show()
            self._enter(Phase.FULL)

    def reshard(self) -> None:
        """Give the memory of the whole parameter back."""
        if self.phase is Phase.SHARDED:
            return
        if self.is_sharded:
            if self.phase is Phase.GATHERING:
                self._pending.wait()  # it writes into the buffer until it is done
            else:
                self._hide()
            # Through the storage, not by dropping the tensor: autograd may have saved the leaves, and must find the
            # data at the same place again after the next gather.
            self.full.untyped_storage().resize_(0)
        self._enter(Phase.SHARDED)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is the gathered buffer's."""
        return self.is_sharded and tensor.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr()

    def full_copies(self) -> list[Tensor]:
        """Collective. The whole parameters as tensors with memory of their own."""
        is_fresh = self.phase is Phase.FULL and self.flat_param._version == self._gathered_version
        if is_fresh or not self.is_sharded:
            return [leaf.detach().clone() for leaf in self.leaves]
        full = torch.empty(self.layout.padded_numel, dtype=self.full.dtype, device=self.full.device)
        self.comm.all_gather(full, self.flat_param.detach(), f"all-gather of {self.name}", self.tag).wait()
        self.comm.settle()
        return [view.clone() for view in self.layout.unpack(full)]

    def store(self, slot: int, value: Tensor) -> None:
        """Keep this rank's part of a whole parameter's new value."""
        with torch.no_grad():
            self.layout.shard_of(slot, value, self.flat_param, self.comm.rank)
            # Ranks that keep nothing of this parameter must find the shard changed as the others do, or they would
            # not take part in the next gather.
            self.flat_param[:0].zero_()

    # --- gradients ----------------------------------------------------------------------------------------------

    def take_gradient(self, slot: int, divisor: float) -> bool:
        """Move a leaf's gradient into the flat buffer; True when it was the last one missing in this backward."""
        leaf = self.leaves[slot]
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{self.layout.slots[slot].name} has a gradient of layout {gradient.layout}: flat gradients are "
                    "dense. Make the embedding with sparse=False."
                )
            self.gradients.add(slot, gradient, divisor)
        return self.gradients.is_complete

    def reduce(self) -> Pending:
        """Start to sum the accumulated gradient over the ranks; the result is the shard's ``[shard_numel]``."""
        return self.reduce_comm.reduce_scatter(self.gradients.take(), f"reduce-scatter of {self.name}", self.tag)

    def accept(self, reduced: Tensor) -> None:
        """Add a reduced gradient to the shard's."""
        self.flat_param._has_unreduced = False
        grad = self.flat_param.grad
        if grad is None or isinstance(grad, Placeholder):
            self.flat_param.grad = reduced
        else:
            grad.add_(reduced)

    def mark_unreduced(self) -> None:
        """Let the shard's missing gradient say why it is missing, if it is and something is accumulated."""
        if not self.gradients.is_empty:
            self.flat_param._has_unreduced = True
            if self.flat_param.grad is None:
                self.flat_param.grad = unreduced_gradient(self.name, self.flat_param)

    def begin_backward(self) -> None:
        # `mark_unreduced` left no None behind: the user has zeroed the gradients since, accumulated ones included.
        if self.flat_param.grad is None:
            self.gradients.drop()
        self.gradients.begin_backward()

    def drop_gradients(self) -> None:
        """Forget what is accumulated and not reduced."""
        self.flat_param._has_unreduced = False
        self.gradients.drop()
        if isinstance(self.flat_param.grad, Placeholder):
            self.flat_param.grad = None
        for leaf in self.leaves:
            leaf.grad = None


def _leave_as_they_are() -> None:
    pass
