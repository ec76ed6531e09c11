"""`ShardValues` writes values of original parameters to this rank's shard, for loads and users' assignments."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.distributed.dtensor import is_dtensor
from fsdp.distributed.gather_extension import PLAIN, values_of
from fsdp.engine.flat_param import FlatParameter, ListedParameters
from fsdp.engine.layout import Layout
from fsdp.engine.presentation import Presentation


class ShardValues:
    """The values of the parameters in one flat parameter's shard.

    Args:
        flat_param: this rank's shard; its fingerprints are moved to this object.
        layout: the layout of the parameters.
        rank: the number of the shard.
        listed: the parameters that modules list.
        presentation: shows parameters to modules when they get their first values.

    Attributes:
        fingerprints: of the parameters on this rank at wrapping; None after the ranks have compared them, and if there
            are no other ranks.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        layout: Layout,
        rank: int,
        listed: ListedParameters,
        presentation: Presentation,
    ) -> None:
        self._flat_param, self._layout, self._rank = flat_param, layout, rank
        self._listed, self._presentation = listed, presentation
        self.fingerprints, flat_param.fingerprints = flat_param.fingerprints, None

    @property
    def local_shards(self) -> list[Tensor]:
        """This rank's shard of each parameter: flat views of the shard, empty if there are no elements on this rank."""
        return self._layout.local_shards(self._flat_param.vector, self._rank)

    def local_shard(self, slot: int) -> Tensor:
        """Return this rank's shard of a parameter, see `local_shards`."""
        vector, interval = self._flat_param.vector, self._layout.interval(slot, self._rank)
        return vector[:0] if interval is None else vector[interval.offset : interval.offset + interval.numel]

    def store(self, slot: int, value: Tensor) -> None:
        """Store this rank's shard of an unsharded parameter's new value."""
        part, packing = self._flat_param.parts[slot], self._flat_param.packings[slot]
        with torch.no_grad():
            value = value if packing is None or is_dtensor(value) else packing.pack(value)  # a `DTensor` contains bytes
            rows = self._listed.local_shard_of(slot, value)
            if rows is None:
                value = values_of(value if part is None else part.to_local(self._layout.slots[slot].name, value))
                self._layout.shard_of(slot, value, self._flat_param.vector, self._rank)
            else:
                self.local_shard(slot).copy_(rows)
        self.touch()
        self._end_lack(slot)

    def keep(self, slot: int, value: nn.Parameter) -> None:
        """Store this rank's shard of a value assigned by a user to an unsharded parameter.

        Raises:
            ValueError: for a different shape or `requires_grad`, or a value without data.
        """
        self.check(slot, value)
        self.store(slot, value)

    def check(self, slot: int, value: nn.Parameter) -> None:
        """Raise ValueError for a value without data, or with a different `requires_grad` than the parameter."""
        name = self._layout.slots[slot].name
        if value.is_meta:
            raise ValueError(f"{name} has no values now: the assigned tensor is on the meta device")
        packing = self._flat_param.packings[slot]
        if any(map(_is_freed, [value] if packing is None else packing.inner_of(value))):
            raise ValueError(
                f"{name} has no values now: the assigned tensor used the memory of unsharded parameters, which was "
                "freed. Assign a copy (.clone())"
            )
        if value.requires_grad is not self._listed.param_of(slot).requires_grad:
            raise ValueError(
                f"{name} has requires_grad={value.requires_grad} now: set requires_grad of the sharded model's "
                "parameters(), not of a new value"
            )

    def fill(self, slot: int, read: Callable[[Tensor], object]) -> None:
        """Call `read` to write this rank's shard of a parameter, if any."""
        if (own := self.local_shard(slot)).numel():
            read(own)
        self.touch()  # also because writes to memory may not be counted
        self.renewed([slot])

    def fill_local(self, value: Tensor, slot: int | None = None) -> None:
        """Write these values to this rank's shard, or to its shard of a single parameter. `touch` it on every rank."""
        with torch.no_grad():
            own = self._flat_param.vector if slot is None else self.local_shard(slot)
            own.copy_(value.detach().reshape(-1))
        self.renewed(range(len(self._layout.slots)) if slot is None else [slot])
        self._flat_param.shard_storage.release()

    def touch(self) -> None:
        """Mark the shard as changed, also on ranks without elements, which must take part in the next all-gather."""
        increment_version(self._flat_param)

    def renewed(self, slots: Iterable[int]) -> None:
        """Record that the shard contains new or first values of parameters."""
        self.note_written(slots)
        if self._flat_param.valueless:
            for slot in slots:
                self._end_lack(slot)

    def _end_lack(self, slot: int) -> None:
        """Record that the shard contains values of this parameter, if there were none before."""
        if slot in self._flat_param.valueless:
            self._flat_param.valueless -= {slot}
            self._listed.give_memory([slot])
            self._presentation.reveal(slot)

    def note_written(self, slots: Iterable[int]) -> None:
        """Record that these parameters were given new values intentionally."""
        if self.fingerprints is not None:
            self.fingerprints.forget(slots)


def _is_freed(tensor: Tensor | None) -> bool:
    """Return whether a plain tensor's memory was freed through its storage."""
    if tensor is None or type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
