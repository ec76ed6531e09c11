"""`Nested` is the communicator of a rectangle of two groups, for shards that are divided again across replicas.

A rank with index `s` in its shard group, and index `r` among its R replicas, gets index ``s * R + r``. The shards of a
rank's replicas are neighbours in the gathered tensor, so a collective consists of one collective along each group.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Messages, Pending, Tag, made_once_for_groups, words_of


class Nested(Communicator):
    """A communicator of all ranks of a rectangle.

    Args:
        shard, replicas: the communicators of this rank's row and column.
        together: the communicator of a group of all ranks, for messages between any two ranks; None if there is none.
        ranks: the global ranks, in the order of this communicator; empty without `together`.
    """

    def __init__(
        self, shard: Communicator, replicas: Communicator, together: Communicator | None, ranks: Sequence[int]
    ) -> None:
        super().__init__(shard.rank * replicas.world_size + replicas.rank, shard.world_size * replicas.world_size)
        self._shard, self._replicas, self._together = shard, replicas, together
        self._ranks = ranks
        self.group = None if together is None else together.group
        self.peers_answer = shard.peers_answer and replicas.peers_answer
        self.sends_pieces = shard.sends_pieces or replicas.sends_pieces
        # The indices in `together`, whose ranks are sorted.
        self._places = [sorted(ranks).index(rank) for rank in ranks]

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    @property
    def _parts(self) -> list[Communicator]:
        return [each for each in (self._shard, self._replicas, self._together) if each is not None]

    def _of(self, shard: Communicator, replicas: Communicator, together: Communicator | None = None) -> Communicator:
        return nested(shard, replicas, together, self.ranks)

    @property
    def on_host(self) -> Communicator:
        return self._of(*(each.on_host for each in self._parts))

    def for_device(self, device: torch.device) -> Communicator:
        return self._of(*(each.for_device(device) for each in self._parts))

    def apart(self) -> Communicator:
        return self._of(*(each.apart() for each in self._parts))

    def new_tag(self) -> int:
        # A tag of the group of all ranks, so that tags are unique among all meshes over this group.
        return super().new_tag() if self._together is None else self._together.new_tag()

    def take_order(self) -> int:
        return zlib.crc32(b"%d" % self._shard.take_order(), self._replicas.take_order())

    def note_order(self, tag: Tag) -> None:
        self._shard.note_order(tag)

    def share_memory(self, nbytes: int) -> None:
        for each in self._parts:
            each.share_memory(nbytes)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._shard.empty(numel, dtype, device)

    def is_read_in_place(self, tensor: Tensor) -> bool:
        return self._shard.is_read_in_place(tensor)

    def give_up(self) -> None:
        for each in self._parts:
            each.give_up()

    def ensure_connected(self) -> None:
        for each in self._parts:
            each.ensure_connected()

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        part = full.view(self._shard.world_size, -1)[self._shard.rank]
        first = self._replicas.all_gather(part, shard, what, _inside(tag))

        def gathered() -> Tensor:
            first.wait()
            # In collectives of a backend, input and output must not overlap.
            own = part if self._shard.sends_pieces or self._shard.world_size == 1 else part.clone()
            return self._shard.all_gather(full, own, what, _inside(tag)).wait()

        return Pending(what, (), gathered)

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        sent = full.dtype
        wide = torch.promote_types(sent, dtype or sent)
        first = self._shard.reduce_scatter(full, what, _inside(tag), wide)

        def scattered() -> Tensor:
            part = first.wait().to(sent)
            return self._replicas.reduce_scatter(part, what, _inside(tag), dtype).wait()

        return Pending(what, (), scattered)

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        first = self._shard.all_reduce(tensor, op, what)
        return Pending(what, (), lambda: self._replicas.all_reduce(first.wait(), op, what).wait())

    def broadcast(self, tensor: Tensor) -> Pending:
        def received() -> Tensor:
            if self._shard.rank == 0:
                self._replicas.broadcast(tensor).wait()
            return self._shard.broadcast(tensor).wait()

        return Pending("broadcast", (), received)

    def meet(self, what: str, tag: Tag) -> None:
        self._shard.meet(what, _inside(tag))
        self._replicas.meet(what, _inside(tag))

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        if self._together is None:
            raise RuntimeError(f"{what}: there is no process group of all ranks. Shard over a DeviceMesh.")

        def placed(messages: Messages) -> Mapping[int, Sequence[Tensor]]:
            return {self._places[peer]: tensors for peer, tensors in messages.items()}

        return self._together.exchange(placed(incoming), placed(outgoing), what, _inside(tag))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        column = pickle.dumps(self._replicas.all_gather_bytes(payload))
        return [each for other in self._shard.all_gather_bytes(column) for each in pickle.loads(other)]

    def settle(self) -> None:
        for each in self._parts:
            each.settle()


def _inside(tag: Tag) -> Tag:
    """Return a tag that differs from the tags of handles that communicate over only one of the two groups."""
    return ("nested", *words_of(tag))


_nested: dict[tuple[Communicator, Communicator], Nested] = made_once_for_groups()


def nested(
    shard: Communicator, replicas: Communicator, together: Communicator | None, ranks: Sequence[int]
) -> Communicator:
    """Return the communicator of a rectangle. Each pair of groups uses a single object, so that tags are unique."""
    if replicas.world_size == 1:
        return shard
    if (shard, replicas) not in _nested:
        _nested[shard, replicas] = Nested(shard, replicas, together, ranks)
    return _nested[shard, replicas]
