"""`FlatParamHandle` shards and unshards one flat parameter, and collects and reduces its gradients.

A unit uses a handle for each kind of flattened parameter (dtype, device, `requires_grad`, precision), like a
parameter group of FSDP2. The handle implements the collectives of its parameters; the runtime decides when they run.

The tensors of a handle, for W ranks (P is the layout's padded number of elements):

- ``flat_param`` ``[P / W]``, in the parameters' dtype: this rank's shard, the only tensor allocated between steps.
  The optimizer updates it. Modules list either this tensor, so that `parameters()` returns it, or the local shards of
  the original parameters, which are views of it. `storage` keeps the shard on the device, on the host, or in files.
- ``unsharded.full`` ``[P]``, in the dtype and on the device of the computation: the all-gathered parameters. Leaves,
  one for each parameter, are views created once; resharding frees the buffer's storage and keeps the tensors.
- ``gradients`` ``[P]``, in the dtype of the reduction: each leaf's gradient is copied to this buffer once computed.
  The result of the reduce-scatter, in the shard's dtype, is added to ``flat_param.grad``.

During forward and backward, a handle is `SHARDED`, `UNSHARDING` (`unshard` started the all-gather), `UNSHARDED`
(`wait_for_unshard` showed the leaves to modules), and `SHARDED` again after `reshard`. If the world size is 1, the
shard is also the buffer and nothing is gathered, unless dtype or device of shard and computation differ.

Users may change parameters between steps: assign new parameters, write to them, cast, move or freeze them. The handle
detects such changes before the next use (`absorb`, `follow_shard`) and stores the new values in the shard.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import LONE_RANK, Communicator, Pending, Tag
from fsdp.distributed.communicator import Tags, in_stage, labelled, own_rank, uncompiled
from fsdp.distributed.gather_extension import gradient_values
from fsdp.distributed.passes import Passes
from fsdp.engine.autograd import InternalError, outside_modes
from fsdp.engine.flat_param import ListedParameters, ParamInfo, SharedParamInfo, keep_gradients_in
from fsdp.engine.grad_buffer import GradientBuffer, GradientSync, divided, refuse_gradient
from fsdp.engine.gradient_hooks import IN_BACKWARD, GradientHooks
from fsdp.engine.orig_params import OrigParams
from fsdp.engine.phase import Phase
from fsdp.engine.placeholder import Placeholder, unreduced_gradient
from fsdp.engine.policy import Policy
from fsdp.engine.precision import Precision
from fsdp.engine.presentation import Presentation
from fsdp.engine.shard import Shard
from fsdp.engine.shard_values import ShardValues
from fsdp.engine.unsharded_params import UnshardedParameters

if TYPE_CHECKING:
    from fsdp.engine.kept_shard import KeptShard
    from fsdp.engine.shard_metadata import FlatParamShardMetadata

_log = logging.getLogger(__name__)

_NO_PASSES, _NO_TAGS = Passes(), Tags(0, 0, 0, 0)

# The state of a shard: its version, the versions of local shards with separate counters, and all that buffers depend
# on: dtype, device of the computation, size, and last the address. (`requires_grad` only affects the next forward.)
ShardState = tuple[int, tuple[int, ...], tuple[Any, ...]]


class FlatParamHandle:
    """Shards and unshards one flat parameter, and collects and reduces its gradients.

    Units create their handles (see `fsdp.flat_param_handles`). To create one directly, use `fsdp.StandaloneHandle`.

    Args:
        shard: this rank's shard of the flat parameter, with the settings of the handle.

    Attributes:
        flat_param, storage, gradients: see above. A shape-keeping flat parameter has its parameter's shape.
        layout: where each parameter is in the unsharded buffer and in every rank's shard.
        comm, reduce_comm: the ranks to all-gather from, and to reduce over; `LONE_RANK` if there is only this rank.
        replicas: the ranks that hold the same shard.
        replica_axis: the ranks along the replica axis: the replicas, or ranks that divide the shard among themselves.
        tags: the handle's number in the root, and its tags; 0 until the ranks have agreed on their units.
        unit_name, name: the names of the unit and of the handle in messages.
        policy, passes: the settings of the unit, and the passes of the root.
        on_gradient: called with the handle, a parameter's number and its leaf when the gradient is complete.
        places: for each parameter, where modules use it.
        presentation: the tensors that modules see and list in these places.
        listed: lists, for modules and optimizers, `flat_param`, or local shards of the original parameters.
        values: writes the shards of new values to `flat_param`.
        precision: the dtypes of computation and reduction.
        phase: the state of the unsharded buffer.
        unsharded: the unsharded parameters in the present `dtype`, created by `new_unsharded`.
        kept_shard: parameters kept on fewer ranks until the next use; None if all or none are kept.
        has_frozen: True if some parameters are not trained.
        gradient_hooks: calls users' hooks on `listed_params`; None as long as there were no hooks.
    """

    # Defaults of most handles, kept on the class: CPython stores instance attributes compactly up to 30.
    on_gradient: Callable[[FlatParamHandle, int, Tensor], None] | None = None
    kept_shard: KeptShard | None = None
    new_unsharded: Callable[..., UnshardedParameters] = UnshardedParameters
    gradient_hooks: GradientHooks | None = None

    def __init__(
        self,
        shard: Shard,
        comm: Communicator,
        reduce_comm: Communicator,
        replicas: Communicator,
        precision: Precision,
        policy: Policy,
        replica_axis: Communicator = LONE_RANK,
        kept_shard: KeptShard | None = None,
    ) -> None:
        self.flat_param = flat_param = shard.flat_param
        self.storage = flat_param.shard_storage
        self.connect(comm, reduce_comm, replicas, replica_axis)
        self.layout = flat_param.make_layout(comm.world_size)
        self.unit_name = self.name = ""
        self.policy = policy
        self.passes, self.tags = _NO_PASSES, _NO_TAGS  # until a root numbers them
        self.places = [list(places) for places in shard.places]
        self.listed: ListedParameters = shard.new_listed(flat_param, self.layout, comm.rank)
        entries: list[tuple[nn.Module, str, nn.Parameter]] = [(*place, flat_param) for place in shard.listed_at]
        for param, used in zip(self.orig_params.params, self.places, strict=True) if self.orig_params else ():
            entries += [(place.module, place.name, param) for place in used]
        self.presentation = Presentation(self.places, entries)
        self.values = ShardValues(flat_param, self.layout, comm.rank, self.listed, self.presentation)
        self.precision = precision.for_param(flat_param)
        self.phase = Phase.SHARDED
        if kept_shard is not None:
            self.kept_shard = kept_shard
        if shard.new_unsharded is not UnshardedParameters:
            self.new_unsharded = shard.new_unsharded
        self._looked_at: Any = None  # the versions of shard and local shards at the last `_absorb_shards`
        self._gathered: ShardState | None = None  # the shard's state when it was gathered
        flat_param._is_managed = True
        self.gradients = self._new_gradients()
        self._build()

    @property
    def param_infos(self) -> list[ParamInfo]:
        """The first place of each parameter, which names the parameter."""
        return [places[0] for places in self.places]

    @property
    def shared_param_infos(self) -> list[SharedParamInfo]:
        """All other places."""
        return [SharedParamInfo(*place, primary=places[0]) for places in self.places for place in places[1:]]

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return which elements of which parameters are in this rank's shard."""
        from fsdp.engine.shard_metadata import FlatParamShardMetadata  # for code written for FSDP1

        return FlatParamShardMetadata.of(self.layout, self.comm.rank)

    @property
    def is_sharded(self) -> bool:
        """True if other ranks hold other shards of the flat parameter."""
        return self.comm.world_size > 1

    @property
    def is_replicated(self) -> bool:
        """True if other ranks hold and train the same shard."""
        return self.replicas.world_size > 1

    @property
    def is_local(self) -> bool:
        """True if no collectives with other ranks are required."""
        return not (self.is_sharded or self.is_replicated)

    @property
    def requires_grad(self) -> bool:
        return self.flat_param.requires_grad

    @property
    def requires_grad_each(self) -> list[bool]:
        """Return for each parameter whether it is trained."""
        return self.listed.requires_grad

    @property
    def listed_params(self) -> list[nn.Parameter]:
        """The parameters that modules list and optimizers step."""
        return self.listed.params

    @property
    def orig_params(self) -> OrigParams | None:
        """The local shards of the original parameters; None where modules list `flat_param` itself."""
        return self.listed if isinstance(self.listed, OrigParams) else None

    @property
    def valueless(self) -> frozenset[int]:
        """The numbers of the parameters without values yet; the shard contains zeros for them."""
        return self.flat_param.valueless

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return self.precision.compute_dtype(self.flat_param.dtype)

    @property
    def is_cast(self) -> bool:
        """True if the compute dtype differs from the dtype of the optimizer's parameters."""
        return self.precision.compute_dtype(self.flat_param.dtype) != self.flat_param.dtype

    @property
    def reduced_dtype(self) -> torch.dtype:
        """The dtype in which `reduce` sums and divides gradients: at least the dtype in which they are sent."""
        return torch.promote_types(self.sum_dtype, self.gradients.dtype)

    @property
    def kept_grad_dtype(self) -> torch.dtype:
        """The dtype of the shard's gradient between backward and step."""
        return self.precision.grads or self.flat_param.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed: at least the dtypes of the shard and of the shard's gradient."""
        return torch.promote_types(self.flat_param.dtype, self.kept_grad_dtype)

    @property
    def shard_state(self) -> ShardState:
        """A value that changes when the shard is written, cast, moved or released."""
        shard = self.flat_param
        return shard._version, self.listed.versions, (shard.dtype, self.storage.device, shard.numel(), shard.data_ptr())

    @property
    def state_in_use(self) -> ShardState:
        """The state of the shard from which the parameters in use were unsharded."""
        return self.shard_state if self._gathered is None else self._gathered

    @property
    def is_unsharded(self) -> bool:
        """True if the parameters are unsharded and match the present state of the shard."""
        return self.unsharded.is_shard or (self.phase is Phase.UNSHARDED and self.shard_state == self._gathered)

    @property
    def is_overwritten(self) -> Tensor:
        """Return whether this rank's shard was written since the all-gather, a tensor of shape ``[]``."""
        if self.shard_state != self._gathered:
            return torch.ones((), dtype=torch.bool, device=self.unsharded.full.device)
        return self.unsharded.differ_from(self.values.local_shards, self.comm.rank)

    def rename(self, unit_name: str, name: str) -> None:
        """Use these names of unit and handle in messages."""
        self.unit_name, self.name = unit_name, name
        self.unsharded.name_unit(unit_name)

    def connect(
        self, comm: Communicator, reduce_comm: Communicator, replicas: Communicator, replica_axis: Communicator
    ) -> None:
        """Use these communicators from now on."""
        if self.flat_param.make_layout().numel == 0:
            comm = reduce_comm = replicas = replica_axis = LONE_RANK  # no data to exchange
        self.comm, self.reduce_comm, self.replicas, self.replica_axis = comm, reduce_comm, replicas, replica_axis

    def number_as(self, number: int) -> None:
        """Set the handle's number and allocate its tags. All ranks of its groups must call this in the same order."""
        self.comm.take_order()  # forget all-gathers of other models, in which a rank may have failed
        gather, replica = self.comm.new_tag(), self.replica_axis.new_tag()
        reduce = gather if self.reduce_comm is self.comm else self.reduce_comm.new_tag()
        self.tags = Tags(number, gather, reduce, replica)
        if self.kept_shard is not None:
            self.kept_shard.tag = self.kept_shard.comm.new_tag()

    def use_at(self, places: Sequence[ParamInfo]) -> None:
        """Show and list the only parameter in additional places, which are empty now."""
        self.free()
        self.places[0] += places
        self.presentation.add(places, self.listed_params[0])

    def __getstate__(self) -> dict[str, Any]:
        made_again = {"gradients", "unsharded", "_pending", "_built_for", "on_gradient", "policy"}
        kept = {name: value for name, value in self.__dict__.items() if name not in made_again}
        return kept | {"phase": Phase.SHARDED, "_gathered": None, "_looked_at": None, "passes": _NO_PASSES}

    def wake(self) -> None:
        """Rebuild the uncopied parts, after the handle was copied or unpickled, and attached to a unit."""
        shard = self.flat_param
        shard.shard_storage, shard._is_managed = self.storage, True
        self.storage.adopt(shard)
        self.listed.alias()
        self.presentation.wake()
        self.gradients = self._new_gradients()
        self._build()

    def _build(self) -> None:
        """Create everything except the shard, for the shard's present dtype and device."""
        shard = self.flat_param
        *_, self._built_for = self.shard_state
        self.listed.follow_frozen()
        self._note_frozen()
        if self.gradients.fits(self.precision.reduce_dtype(shard.dtype), self.sum_dtype, self.storage.device):
            self.gradients.expect(self._trained)  # parameters may be frozen or thawed during an accumulation
        else:
            self.gradients = self._new_gradients()
        if self.precision.grads is not None:
            keep_gradients_in(self.precision.grads, (shard, *self.listed_params))
        self._make_unsharded()

    def _new_gradients(self) -> GradientBuffer:
        dtype, needs = self.precision.reduce_dtype(self.flat_param.dtype), self.requires_grad_each
        return GradientBuffer(self.layout, dtype, self.sum_dtype, self.storage.device, needs, self.reduce_comm)

    @torch.inference_mode(False)  # else parameters created in inference mode could not be trained
    def _make_unsharded(self) -> None:
        shard, numel = self.flat_param, self.layout.unsharded_numel
        is_shard = not self.is_sharded and self.dtype == shard.dtype and not self.storage.is_elsewhere
        numel = numel if self.kept_shard is None else self.kept_shard.padded(numel)
        self._gathered = None
        self.unsharded = self.new_unsharded(
            shard,
            self.layout,
            shard.vector if is_shard else torch.empty(numel, dtype=self.dtype, device=self.storage.device),
            is_shard=is_shard,
            requires_grad=self._trained,
            on_gradient=partial(_report_gradient, weakref.ref(self)),
            absent=self.listed.absent,
        )
        self.unsharded.name_unit(self.unit_name)
        self.presentation.use(self.unsharded, shard.dtype)

    def renew_unsharded(self) -> None:
        """Recreate the unsharded parameters, in another dtype or using another function.

        Backward through forwards with the former parameters raises an error.
        """
        try:
            self.absorb()
        finally:  # a value that cannot be stored stays in place and raises an error at the next use
            self.free()
            self.values.touch()  # so that such a backward raises the error for changed parameters
            self._make_unsharded()

    def _enter(self, phase: Phase) -> None:
        if phase not in self.phase.following:
            raise InternalError(
                f"rank {self.comm.rank}, {self.name}: {self.phase.name} -> {phase.name} is not a legal step"
            )
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("rank %d, %s: %s -> %s", own_rank(), self.name, self.phase.name, phase.name)
        self.phase = phase

    def unshard(self) -> None:
        """Start the all-gather of the present shard, unless it is done or in flight already."""
        if self.begin_unshard():
            self.begin_gather()

    def begin_unshard(self) -> bool:
        """Store users' changes, and return whether the present shard must be gathered."""
        if self.presentation.is_exposed:
            raise RuntimeError(
                f"{self.name}: another unit that shares its parameter is inside summon_full_params() or a load. Leave "
                "that context first, or summon the outermost wrapper."
            )
        state = self._state_to_gather()
        if self.phase is not Phase.SHARDED:
            if state == self._gathered:
                return False
            self.free()  # the shard has changed since, perhaps in the forward that calls the unit
        state = self._ready_to_send(state)
        if state != self.state_in_use:
            self.unsharded.outdate()
        self._gathered = state
        return True

    def begin_gather(self) -> None:
        """Start the handle's own all-gather, after `begin_unshard`."""
        if self.kept_shard is not None:
            self.gather_kept()
        if self.unsharded.is_shard:
            self.storage.read_ahead()
        elif self.kept_shard is not None and self.kept_shard.has((self.dtype, self._gathered)):
            full = self.unsharded.begin_gather(directly=True)
            self._pending = self.kept_shard.gather(full, self.name, self.passes.stage)
        else:
            self._pending = self._gather_into(self.unsharded.begin_gather(), self.unsharded.outgoing)
        self._enter(Phase.UNSHARDING)  # if that did not raise

    @property
    def is_gathered_plainly(self) -> bool:
        """True if the shard is sent without conversion, in the dtype of the computation; the same on all ranks."""
        return self.is_sharded and self.unsharded.is_exact and self.kept_shard is None

    def expect(self, pending: Pending) -> None:
        """After `begin_unshard`: use an all-gather in flight with the parameters of multiple handles."""
        self._pending = pending
        self._enter(Phase.UNSHARDING)

    def shard_in(self, dtype: torch.dtype) -> Tensor:
        """Return the shard in a dtype on the compute device; for a world size of 1, possibly on the host."""
        if self.flat_param.dtype != dtype or (self.storage.is_elsewhere and self.is_sharded):
            return self.storage.staged(self.flat_param, dtype)
        return self.flat_param.vector

    def _state_to_gather(self) -> ShardState:
        """Store users' changes since the last all-gather, and return the resulting state of the shard."""
        if self.presentation.touched:
            self._absorb_places()
        if self.phase is Phase.UNSHARDED or self.unsharded.is_shard:
            self._absorb_written()
        state = self.shard_state
        if state[:2] != self._looked_at:
            self._absorb_shards()
            state = self.shard_state
        return state

    def renew_kept(self) -> None:
        """Before a forward: discard parameters kept for a backward; gather parameters kept until a step."""
        if self.kept_shard is not None and not self.kept_shard.lasts:
            self.kept_shard.forget()
        self.gather_kept()

    def _ready_to_send(self, state: ShardState) -> ShardState:
        if state[-1] != self._built_for:
            self.follow_shard()
            state = self.shard_state
        if not self.storage.is_resident:
            self.storage.check(self.name)
        return state

    def gather_kept(self) -> None:
        """Start to gather the parameters kept across steps, unless they match the present shard."""
        if self.kept_shard is None or not self.kept_shard.lasts or self.phase is not Phase.SHARDED:
            return
        state = self.dtype, self._ready_to_send(self._state_to_gather())
        if not self.kept_shard.has(state):
            numel = self.kept_shard.padded(self.layout.unsharded_numel) // self.kept_shard.comm.world_size
            shard = torch.empty(numel, dtype=self.dtype, device=self.storage.device)
            self.kept_shard.fill(shard, state, partial(self._gather_into, over=(self.replica_axis, self.tags.replica)))

    def _gather_into(
        self, full: Tensor, outgoing: Tensor | None = None, over: tuple[Communicator, int] | None = None
    ) -> Pending:
        """Start to all-gather the shard, or `outgoing` instead, over all ranks or using `over` (communicator, tag)."""
        over = over or (self.comm, self.tags.gather)
        if outgoing is not None or not self.storage.is_elsewhere:
            return self._exchange(full, outgoing, *over)
        copy_stream = self.storage.copy_stream
        with copy_stream.fork():
            pending = self._exchange(full, None, *over)
        return pending.after(copy_stream.arrival())

    def _exchange(self, full: Tensor, outgoing: Tensor | None, comm: Communicator, number: int) -> Pending:
        shard = self.shard_in(full.dtype) if outgoing is None else outgoing
        what = f"all-gather of {self.name}"
        tag: Tag = number
        if comm.sends_pieces:  # else no tag is sent
            what, tag = in_stage(self.passes.stage, what, number)
        return labelled("all_gather", self.unit_name, comm.all_gather, full, shard, what, tag)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, and show the parameters to modules (on CUDA: for work on the current stream)."""
        if self.phase is not Phase.UNSHARDING:
            self.unshard()
        if self.phase is Phase.UNSHARDING:
            if not self.unsharded.is_shard:
                labelled("all_gather_wait", self.unit_name, self._pending.wait)
                self.unsharded.end_gather()
                if self.kept_shard is not None:
                    self.kept_shard.arrived(self.unsharded.full, (self.dtype, self._gathered))
                if not self.storage.is_resident:
                    self.storage.release()
            if replaced := self.presentation.show():
                self._refuse_replaced(replaced)
            self._enter(Phase.UNSHARDED)
        self.follow_frozen()

    def begin_compute(self) -> None:
        """Wait for the all-gather, and list the unsharded parameters in modules until reshard or `list_shards`."""
        self.wait_for_unshard()
        if replaced := self.presentation.list_unsharded():
            self._refuse_replaced(replaced)

    def _refuse_replaced(self, slots: Sequence[int]) -> NoReturn:
        self.presentation.hide()
        raise RuntimeError(
            f"{self.name}: {self.layout.slots[slots[0]].name} was removed, or is no longer a parameter: another tensor "
            "replaced it without `__setattr__`, or while its unit was computing. Assign an nn.Parameter between steps, "
            "or change values inside `with model.summon_full_params():`."
        )

    def reshard(self) -> None:
        """Free the unsharded parameters, after storing users' writes to them in the shard.

        Raises:
            RuntimeError: for values that the shard cannot store.
        """
        if self.phase is Phase.UNSHARDED and not self.presentation.is_exposed:
            self._absorb_written()
        self.free()

    def free(self, *, is_needed: bool = False) -> None:
        """Free the unsharded parameters, and drop written values that are not stored yet.

        If backward needs the parameters again (`is_needed`), they are kept on fewer ranks if there is a `kept_shard`.
        """
        if self.kept_shard is not None and not self.kept_shard.lasts:
            if is_needed and self.phase is Phase.UNSHARDED and not self.unsharded.is_shard:
                self.kept_shard.keep(self.unsharded.full, (self.dtype, self._gathered))
            else:
                self.kept_shard.forget()
        if self.phase is not Phase.SHARDED:
            labelled("reshard", self.unit_name, self._free)

    def release(self) -> None:
        """Free all parameters except the shard."""
        self.free()
        if self.kept_shard is not None:
            self.kept_shard.forget()

    def _free(self) -> None:
        if self.phase is Phase.UNSHARDED:
            self.presentation.hide()
        if self.unsharded.is_shard:
            self.storage.release()
        elif self.phase is Phase.UNSHARDING:
            self._pending.wait()  # which writes to the buffer until it ends
            self.unsharded.end_gather(is_wanted=False)
        self.unsharded.free(keeps_memory=self.policy.keeps_memory)
        self._enter(Phase.SHARDED)

    def gathered(self, dtype: torch.dtype | None = None) -> Tensor:
        """Collective. Return the unsharded parameters in a new buffer, by default in the shard's dtype."""
        full = torch.empty(self.layout.padded_numel, dtype=dtype or self.flat_param.dtype, device=self.storage.device)
        self._gather_into(full).wait()
        self.storage.release()
        return full

    def serve_unshard(self) -> None:
        """Collective. Take part in the all-gather of ranks that unshard; this rank's parameters remain unchanged."""
        self.gather_kept()
        if self.kept_shard is not None and self.kept_shard.has((self.dtype, self.shard_state)):
            full = self.unsharded.full.new_empty(self.kept_shard.padded(self.layout.unsharded_numel))
            self.kept_shard.gather(full, self.name, self.passes.stage).wait()
        elif self.unsharded.is_exact:
            self.gathered(self.dtype)
        else:  # in the form that other ranks send, to memory apart from the leaves
            self._gather_into(self.unsharded.begin_gather(), self.unsharded.outgoing).wait()
            self.unsharded.end_gather(is_wanted=False)
            self.storage.release()

    def settle(self) -> None:
        """Block until the shard may be written, because messages and copies from it have completed."""
        self.comm.settle()
        self.storage.copy_stream.settle()

    def begin_backward(self, sync: GradientSync) -> None:
        """Expect gradients, see `GradientBuffer.begin_backward`."""
        self.gradients.forget(self.listed.zeroed)
        self.listed.collect_gradients()
        # `mark_unreduced` left no None: the user zeroed the gradients since, including accumulated ones.
        if self.flat_param.grad is None:
            self.gradients.drop()
        self.follow_frozen()
        self.gradients.begin_backward(self._trained, sync, self.policy.fills_unused)

    def take_gradient(self, slot: int, leaf: Tensor) -> bool:
        """Move a leaf's gradient to the flat buffer; return True if this backward misses no other gradient."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            if gradient.requires_grad or gradient.layout is not torch.strided:
                refuse_gradient(f"{self.unit_name}: {self.layout.slots[slot].name}", gradient)
            part = self.flat_param.parts[slot]
            values = gradient if part is None else part.gradient(gradient, self.gradients.dtype)
            if type(values) is not Tensor or self.flat_param.examples[slot] is not None:
                values = gradient_values(self.layout.slots[slot].name, values, self.layout.slots[slot].shape)
            self.gradients.add(slot, values, self.policy.predivide)
        return not self.gradients.missing

    def reduce(self) -> Pending:
        """Start to sum the accumulated gradient over the ranks; the result is this rank's shard, in `reduced_dtype`.

        With a communication hook, the result is an average, and complete on return.
        """
        what, taken, dtype = f"reduce-scatter of {self.name}", self.gradients.take(), self.reduced_dtype
        gradient = divided(taken.flat, taken.divisor)
        hook = self.policy.comm_hook
        if hook is None or not self.layout.numel:
            reduce_scatter = self.reduce_comm.reduce_scatter
            return labelled("reduce_scatter", self.unit_name, reduce_scatter, gradient, what, self.tags.reduce, dtype)
        where = self.name, self.reduce_comm, self.tags.reduce
        shard = labelled("reduce_scatter", self.unit_name, hook.reduce, gradient, where, dtype)
        return Pending(what, (), lambda: shard)

    def accept(self, reduced: Tensor) -> None:
        """Add a reduced gradient to the shard's gradient; if hooks must be called with it, keep it for them."""
        self.flat_param._has_unreduced = False
        if not any(self.gradients.used) and self.gradients.missed and not reduced.any():
            return  # no rank has any of the awaited gradients
        if not self.storage.is_resident:
            self.storage.check(self.name)
        reduced = self.gradients.of_shard(reduced, self.comm.rank).to(self.kept_grad_dtype)
        if any(any(_hooks_of(param)) or IN_BACKWARD in param.__dict__ for param in self.listed_params):
            if self.gradient_hooks is None:
                self.gradient_hooks = GradientHooks(self.flat_param, self.listed_params, self.orig_params)
            self.gradient_hooks.keep(reduced)
        elif self.storage.is_resident:
            self.flat_param.hold_gradient(reduced)
        else:
            self.storage.accept(self.flat_param, reduced)

    def show_gradient(self, used: Sequence[int]) -> None:
        """Show the gradients of the `used` parameters to optimizers, after all gradients of a backward are reduced."""
        if self.gradient_hooks is not None:
            self.gradient_hooks.run(used)
        self.listed.show_reduced(used, self.gradients.missed)

    def end_backward(self) -> None:
        """Call users' hooks on accumulated gradients, if this backward delivered any gradients."""
        if self.gradient_hooks is not None:
            self.gradient_hooks.end_backward()

    def forget_zeroed(self) -> None:
        """Free the shard's gradient if the gradients of all local shards were zeroed."""
        self.listed.forget_zeroed()

    def mark_unreduced(self) -> None:
        """Mark a missing gradient of the shard as unreduced if gradients have accumulated; using it raises an error."""
        shard = self.flat_param
        if any(filled := self.gradients.filled):
            shard._has_unreduced = True
            if shard.grad is None:
                shard.grad = unreduced_gradient(self.name, shard)
            self.listed.mark_unreduced(filled)

    @property
    def has_unreduced(self) -> bool:
        """True if gradients wait for a reduction and were not zeroed."""
        self.forget_zeroed()
        return self.flat_param.has_unreduced

    def drop_unreduced(self) -> None:
        """Drop accumulated gradients that were not reduced or delivered."""
        self.gradients.drop()
        if self.gradient_hooks is not None:
            self.gradient_hooks.abandon()
        shard = self.flat_param
        shard._has_unreduced = False
        if isinstance(shard.grad, Placeholder) and shard.held_gradient is None:
            shard.grad = None
        self.listed.show_gradients([False] * len(self.layout.slots))
        for leaf in self.unsharded.leaves:
            leaf.grad = None

    def zero_grad(self) -> None:
        """Drop the gradient, as an optimizer's ``zero_grad()`` does."""
        for param in self.listed_params:
            param.grad = None

    def absorb(self) -> None:
        """Write values assigned by users to the places of parameters, or to ``.data``, to the shard.

        Also update `requires_grad` of parameters frozen or thawed by users in their modules.

        Raises:
            RuntimeError: for values that cannot be written; they are left in place.
        """
        if self.presentation.is_exposed or self.phase is Phase.UNSHARDING:
            return  # handled when that ends; or the shard is being sent, and the next `unshard` does this
        with outside_modes():
            self._absorb_places()
            self._absorb_written()
            self._absorb_shards()
            self.follow_frozen()

    def absorb_noticed(self) -> None:
        """Do the same as `absorb` for changes that modules and version counters report; cheap without changes."""
        if not (self.presentation.is_exposed or self.phase is Phase.UNSHARDING):
            with outside_modes():
                self._state_to_gather()

    def _absorb_places(self) -> None:
        """Store the tensors assigned by users in the places of parameters."""
        replaced = self.presentation.changed()
        if not replaced:
            return
        self.follow_frozen()  # new values must require gradients as the parameters do
        self._store(replaced, self.presentation.assigned)
        self.presentation.take_back(replaced)

    def _absorb_written(self) -> None:
        """Store the values written by users to unsharded parameters."""
        # If the buffer is the shard, written values are stored already.
        written = self.unsharded.moved() if self.unsharded.is_shard else self.unsharded.written()
        if written:
            self.follow_frozen()
            self._store(written, self.unsharded.new_value)
            self.unsharded.restore(written)

    def _absorb_shards(self) -> None:
        """Store values written to local shards or assigned to their ``.data`` by users."""
        if written := self.listed.absorb():
            self.values.renewed(written)
        self._looked_at = self.shard_state[:2]

    def _store(self, slots: Sequence[int], value_of: Callable[[int], nn.Parameter]) -> None:
        if not self.storage.is_resident:
            self.storage.check(self.name)
        self.settle()  # other ranks may still read the shard
        try:
            for slot in slots:
                self.values.keep(slot, value_of(slot))
            self.values.note_written(slots)
        except ValueError as error:
            raise RuntimeError(
                f"{self.name}: the new value of a replaced parameter cannot be kept: {error}. Assign an nn.Parameter "
                "of the parameter's shape, on every rank."
            ) from None

    def follow_frozen(self) -> None:
        """Apply `requires_grad` of the listed parameters, before a forward or backward."""
        # Users may set the flag on shards between passes, and on leaves during passes.
        if list(map(_needs_grad, self.unsharded.leaves)) == self._trained == self.requires_grad_each:
            return
        for slot, leaf in enumerate(self.unsharded.leaves):
            if leaf.requires_grad is not self._trained[slot]:
                self._freeze(slot, leaf.requires_grad)
        self.listed.follow_frozen()
        self.precision.check(self.name, self.flat_param.dtype, self.flat_param.requires_grad)
        self._note_frozen()
        self.unsharded.train(self._trained)

    def _note_frozen(self) -> None:
        """Record which parameters are trained now."""
        self._trained = self.requires_grad_each
        self.has_frozen = not all(self._trained)

    def _freeze(self, slot: int, needs: bool) -> None:
        """Apply a leaf's `requires_grad` if set by a user, for example during a forward."""
        if self.orig_params is not None:
            self.listed.param_of(slot).requires_grad_(needs)
        elif all(leaf.requires_grad is needs for leaf in self.unsharded.leaves):
            self.flat_param.requires_grad_(needs)
        else:
            self.unsharded.leaves[slot].requires_grad_(not needs)
            raise RuntimeError(
                f"{self.unit_name}: {self.layout.slots[slot].name} has requires_grad={needs} now, but cannot be frozen "
                "or thawed separately from its flat parameter. Freeze the whole wrapped module, or use "
                "use_orig_params=True."
            )

    @property
    def was_written(self) -> bool:
        """True if modules or users have written values to unsharded parameters that the shards do not have."""
        return bool(self.unsharded.written()) and (self.is_replicated or not self.unsharded.is_shard)

    def forget_written(self) -> None:
        """Ignore values written to the leaves: the next use gathers the shards."""
        self.unsharded.rest()
        if not self.unsharded.is_shard:
            self._gathered = None

    def follow_shard(self) -> None:
        """Rebuild the buffer and the leaves after the shard was moved or cast (`module.to(...)`)."""
        shard, before = self.flat_param, self._built_for
        if (now := self.shard_state[-1]) == before:
            return
        if shard.numel() != self.layout.shard_numel:
            raise RuntimeError(
                f"{self.name}: the flat parameter's shard has {shard.numel()} elements instead of "
                f"{self.layout.shard_numel}: its .data was replaced. Change parameters inside `with "
                "model.summon_full_params():`."
            )
        self.storage.adopt(shard)
        device = self.storage.device
        if device != before[1]:
            comms = self.comm, self.reduce_comm, self.replicas, self.replica_axis
            self.connect(*(comm.for_device(device) for comm in comms))
            if self.kept_shard is not None:
                self.kept_shard.comm = self.kept_shard.comm.for_device(device)
        *_, now = self.shard_state
        self.listed.alias()  # also at the same address: freed memory may have been allocated again
        if now[:-1] != before[:-1] or (self.unsharded.is_shard and now != before):
            self.precision.check(self.name, shard.dtype, shard.requires_grad)
            self._build()
        self._built_for = now


_needs_grad = operator.attrgetter("requires_grad")
_hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


@uncompiled
def _report_gradient(handle: weakref.ref[FlatParamHandle], slot: int, leaf: Tensor) -> None:
    """Hook of a leaf. The reference to the handle is weak; otherwise only the garbage collector would free a model."""
    found = handle() if leaf.requires_grad else None  # autograd calls hooks of frozen leaves too, without a gradient
    if found is not None and found.on_gradient is not None:
        found.on_gradient(found, slot, leaf)
