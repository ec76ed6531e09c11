"""How a handle follows what users do to its parameters between steps: replace, assign, cast, move, freeze."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.distributed.dtensor import check_device, local_part
from fsdp.engine.handle_state import HandleState, Phase
from fsdp.engine.merged_writes import Merged, differs


class FollowsChanges(HandleState):
    """The part of `FlatParamHandle` that users' code between steps needs."""

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter's attribute is no longer what we put there."""
        for slot in self.unsharded.disturbed():
            raise RuntimeError(
                f"{self.name}: {self.layout.slots[slot].name} was replaced while its unit was computing. Change "
                "parameters between steps, or inside `with model.summon_full_params():`."
            )

    def fill_places(self) -> None:
        """Put where the modules look for their parameters what belongs there in this phase, whatever is there."""
        self.unsharded.fill_places(self.phase is Phase.UNSHARDED)

    def absorb(self) -> None:
        """Write to the shard what users have put in the places of parameters, or assigned to ``.data`` of pieces.

        Raises:
            RuntimeError: for what cannot be written; it is left where it is.
        """
        if self.is_exposed:
            return  # changes are kept, or not, when that ends
        if self.phase is Phase.UNSHARDING:
            return  # the shard is being sent; `check_places` will report what is new
        disturbed, missing = self.unsharded.disturbed(), self.registry.missing()
        # Where the buffer is the shard, what is written to it is there already.
        written = self.unsharded.moved() if self.unsharded.is_shard else self.unsharded.written()
        if disturbed or missing or written:
            self._take_back(list(dict.fromkeys([*disturbed, *missing])), written)
        if self.pieces is not None:
            for slot in self.pieces.absorb():
                self.note_written([slot])
                self.note_values(slot)

    def refuse_lent(self, what: str) -> None:
        """Raise RuntimeError if modules compute with tensors that are not ours and were given for one call."""
        for module, name in self.registry.lent:
            raise RuntimeError(
                f"{self._unit_name}: cannot {what}: '{name}' of a {type(module).__name__} was given other tensors to "
                "compute with, which have not been taken back. Do it outside of torch.func.functional_call; and assign "
                "new values as attributes (module.weight = nn.Parameter(...)), not in `_parameters`."
            )

    def _take_back(self, replaced: list[int], written: list[int]) -> None:
        try:
            for slot in written:
                self.keep(slot, self.unsharded.leaves[slot])
            for slot in replaced:
                self.keep(slot, self.registry.assigned(slot))
            self.note_written([*written, *replaced])
        except ValueError as error:
            raise RuntimeError(
                f"{self.name}: a parameter was replaced after wrapping by what cannot be kept: {error}. Assign an "
                "nn.Parameter of the parameter's shape, on every rank."
            ) from None
        if written:
            self.unsharded.restore(written)
        if replaced:
            self.registry.withdraw(replaced)
            self.fill_places()

    @property
    def was_written(self) -> bool:
        """Whether modules or users have written to the whole parameters what their shards do not have."""
        return not (self.unsharded.is_shard and not self.is_replicated) and bool(self.unsharded.written())

    def take_written(self) -> None:
        """Collective if the module's own forward has written to its weights, as an embedding with ``max_norm`` does.

        An element is what the ranks that wrote it made of it, whether others did or not: what a forward over all ranks'
        batches would have made of it.

        Raises:
            RuntimeError: on all ranks, if some made different values of one element.
        """
        if not self.was_written:
            return
        slots = self.unsharded.written()
        made = {slot: local_part(self.unsharded.leaves[slot]).detach() for slot in slots}
        parts = self.layout.parts(self._shard, self.comm.rank)
        own = [parts[slot].data for slot in slots]  # `.data`: it is not the user who changes it between two passes
        before = None if self.unsharded.is_shard else [part.to(self.storage.device, self.dtype) for part in own]
        merged = Merged(before, [self.layout.part_of(slot, made[slot], self.comm.rank) for slot in slots])
        what = f"values that the forward of {self._unit_name} wrote to its parameters"
        ranks = range(self.comm.world_size)
        dealt = [[self.layout.part_of(slot, made[slot], rank) for slot in slots] for rank in ranks]
        merged.exchange(self.comm, dealt, what, self.tag)
        merged.exchange(self.replicas, [merged.values] * self.replicas.world_size, what, self.replica_tag)
        self.settle()
        clashes = merged.clashes((self.comm, self.replicas))
        if clashes:
            names = ", ".join(self.layout.slots[slots[number]].name for number in clashes)
            raise RuntimeError(
                f"{self._unit_name}: its forward wrote to {names}, and other values on other ranks, from their own "
                "part of the batch: there is no right one to keep. Let all ranks write the same (sum over the ranks "
                "what it is computed from), keep it in a buffer, or change it between steps inside "
                "`with model.summon_full_params():`."
            )
        for part, value, was in zip(own, merged.values, before or merged.values, strict=True):
            if before is not None:
                part.copy_(torch.where(differs(value, was).to(part.device), value.to(part.device, part.dtype), part))
        self.note_written(slots)
        self.storage.release()
        self.unsharded.rest()
        if before is not None:
            self._gathered = None  # other ranks may have written other elements

    def keep(self, slot: int, value: nn.Parameter) -> None:
        """Keep this rank's part of what a user has made of a whole parameter.

        Raises:
            ValueError: if it has another shape or `requires_grad`, or no values.
        """
        if value.is_meta:
            raise ValueError(f"{self.layout.slots[slot].name} has no values now: what was assigned is on meta")
        if value.requires_grad is not self.requires_grad_each[slot]:
            raise ValueError(
                f"{self.layout.slots[slot].name} has requires_grad={value.requires_grad} now: set that on the "
                "parameters that the wrapped model lists, not on a new value"
            )
        self.store(slot, value)

    def apply_to_hidden(self, fn: Callable[[Tensor], Tensor]) -> None:
        """What `nn.Module._apply` did to registered parameters, for a shard of which only pieces are registered."""
        if self.pieces is not None:
            shard = self.flat_param
            with torch.no_grad():
                grad = None if shard.grad is None else fn(shard.grad)  # which may ask whose gradient it is
                shard.grad = None
                shard.data = fn(shard)
                shard.grad = grad
            self.pieces.alias()
            self.pieces.show_gradients([0] * len(self.places))

    def check_cast(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise ValueError if the shard could not be followed after `fn`."""
        shard = self.flat_param
        if any(shard.parts):
            check_device(self.name, shard.parts, fn(torch.empty(0, device=self.storage.device)).device)
        cast = fn(torch.empty(0, dtype=shard.dtype, device=shard.device))
        self._precision.check(f"after this cast {self.name}", cast.dtype, shard.requires_grad)

    def follow_shard(self) -> None:
        """Follow a shard that was moved, cast or frozen (`module.to(...)`): buffer and leaves are made anew."""
        shard = self.flat_param
        if shard.numel() != self.layout.shard_numel:
            raise RuntimeError(
                f"{self.name}: the flat parameter's shard has {shard.numel()} elements instead of "
                f"{self.layout.shard_numel}: its .data was replaced by something else. Change parameters inside "
                "`with model.summon_full_params():`."
            )
        self.storage.adopt(shard)
        dtype, requires_grad, address, device = self._built_for
        if self.storage.device != device:
            self.comm = self.comm.for_device(self.storage.device)
            self.reduce_comm = self.reduce_comm.for_device(self.storage.device)
            self.replicas = self.replicas.for_device(self.storage.device)
            if self.post_forward_shard is not None:
                self.post_forward_shard.comm = self.post_forward_shard.comm.for_device(self.storage.device)
        is_another = (shard.dtype, self.requires_grad_each, self.storage.device) != (dtype, requires_grad, device)
        if self.pieces is not None and (is_another or shard.data_ptr() != address):
            self.pieces.alias()
        if is_another or (self.unsharded.is_shard and shard.data_ptr() != address):
            self._precision.check(self.name, shard.dtype, shard.requires_grad)
            self._build()

    def store(self, slot: int, value: Tensor) -> None:
        """Keep this rank's part of a whole parameter's new value."""
        part = self.flat_param.parts[slot]
        with torch.no_grad():
            if part is not None:
                value = part.cut(self.layout.slots[slot].name, value)
            rows = None if self.pieces is None else self.pieces.part_of(slot, value)
            if rows is None:
                self.layout.shard_of(slot, value, self._shard, self.comm.rank)
            else:
                self.layout.parts(self._shard, self.comm.rank)[slot].copy_(rows)
            # Ranks that keep nothing of this parameter must find the shard changed as the others do, or they would
            # not take part in the next gather.
            increment_version(self.flat_param)
        self.note_values(slot)

    def fill(self, slot: int, read: Callable[[Tensor, int], None]) -> None:
        """Have `read` write this rank's part of a parameter: it gets that, and the number of its first element.

        It is not called on ranks that keep nothing of the parameter.
        """
        interval = self.layout.interval(slot, self.comm.rank)
        if interval is not None:
            read(self._shard[interval.offset : interval.offset + interval.numel], interval.start)
        increment_version(self.flat_param)  # as in `store`, and because memory may be written past its counter
        self.note_written([slot])
        self.note_values(slot)

    def fill_local(self, value: Tensor, slot: int | None = None) -> None:
        """Have these values in this rank's shard, or in its piece of one parameter. `touch` it on every rank."""
        own = self._shard if slot is None else self.layout.parts(self._shard, self.comm.rank)[slot]
        with torch.no_grad():
            own.copy_(value.detach().reshape(-1))
        slots = range(len(self.layout.slots)) if slot is None else [slot]
        self.note_written(slots)
        for each in slots:
            self.note_values(each)
        self.storage.release()

    def touch(self) -> None:
        """Count as changed."""
        increment_version(self.flat_param)

    def note_values(self, slot: int) -> None:
        """The shard has this parameter's values now, if it had none."""
        if slot in self.valueless:
            self.valueless.discard(slot)
            for unsharded in self._unsharded_by_dtype.values():
                unsharded.reveal(slot)

    # --- what was seen at wrapping ------------------------------------------------------------------------------

    def note_written(self, slots: Iterable[int]) -> None:
        """These parameters were given new values, on purpose."""
        if self.fingerprints is not None:
            self.fingerprints.forget(slots)

    def settle_fingerprints(self) -> None:
        """Forget those of parameters that were written in ways which nobody announced."""
        if self.fingerprints is not None and self.flat_param.numel() == self.layout.shard_numel:
            self.fingerprints.forget_written(self.layout.parts(self._shard, self.comm.rank))
            self.storage.release()

    def renew_fingerprints(self) -> None:
        """The shard was cast or moved since `settle_fingerprints`."""
        if self.fingerprints is not None:
            self.fingerprints.follow(self.layout.parts(self._shard, self.comm.rank))
            self.storage.release()

    @property
    def _shard(self) -> Tensor:
        return self.flat_param.vector
