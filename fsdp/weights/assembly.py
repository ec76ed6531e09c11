"""`Assembly` collects each bucket from the ranks that hold parts of it, with one exchange for each bucket.

[Note: two buckets] While a sink consumes bucket n, the parts of bucket n + 1 arrive, packed. After the sink returns,
they are copied to the memory of bucket n. A rank therefore holds at most two buckets: the assembled bucket, and the
parts of the next bucket that it receives or sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Pending
from fsdp.weights.plan import Holding, Run, WeightPlan


class Shards:
    """This rank's values of the tensors of a plan.

    Args:
        plan: the plan.
        vectors: by the number of a tensor, the flat vector that contains its elements, of any dtype and device.
        device: of the memory in which parts are packed.
    """

    def __init__(self, plan: WeightPlan, vectors: Mapping[int, Tensor], device: torch.device) -> None:
        self.plan, self.device = plan, device
        self._vectors = vectors

    def packed(self, runs: Sequence[Run]) -> Tensor:
        """Return a new tensor of bytes with some runs, cast to the dtypes of the plan."""
        # Bytes that align dtypes are zeros, so that equal weights have equal bytes.
        memory = torch.zeros(self.plan.packed_nbytes(runs), dtype=torch.uint8, device=self.device)
        for run in runs:
            self.plan.packed_view(run, memory).copy_(self._values(run))
        return memory

    def copy_to(self, bucket: Tensor, runs: Sequence[Run]) -> None:
        """Copy some runs to their positions in a bucket."""
        for run in runs:
            self.plan.run_view(run, bucket).copy_(self._values(run))

    def _values(self, run: Run) -> Tensor:
        values = self._vectors[run.piece.tensor][run.start : run.start + run.box.numel]
        return values.detach().reshape(run.box.sizes)


class Assembly:
    """The exchange of a stream among the ranks. All ranks create it, and iterate over `buckets`.

    Args:
        shards: this rank's values.
        own: the elements that this rank holds, in its vectors.
        holdings: by rank, the elements that it holds, of which replicas hold the same.
        alike: the numbers of the tensors with equal values on all ranks that hold the same elements.
        consumers: the ranks that receive complete buckets.
        comm: the communicator of the exchange.
        places: by rank, its number in `comm`.
    """

    def __init__(
        self,
        shards: Shards,
        own: Holding,
        holdings: Sequence[Holding],
        alike: Collection[int],
        consumers: Collection[int],
        comm: Communicator,
        places: Sequence[int],
    ) -> None:
        self._shards, self._plan, self._comm = shards, shards.plan, comm
        rank = self._plan.rank
        self._consumes = rank in consumers

        def sent(source: int, target: int) -> frozenset[int]:
            """Return the tensors of which a rank sends its part to another rank, which does not hold the same."""
            theirs = holdings[target]
            part = self._plan.parts[source].items()
            return frozenset(number for number, held in part if number not in alike or theirs.get(number) != held)

        self._outgoing: dict[frozenset[int], list[int]] = {}
        for target in consumers:
            if target != rank:
                self._outgoing.setdefault(sent(rank, target), []).append(places[target])
        sources = [each for each in range(len(places)) if each != rank] if self._consumes else []
        self._incoming = {
            places[source]: self._only(self._plan.parts[source], sent(source, rank)) for source in sources
        }
        self._part = {number: own[number] for number in self._plan.parts[rank]}
        self._own = {number: held for number, held in own.items() if number in alike or number in self._part}

    @staticmethod
    def _only(holding: Holding, numbers: Collection[int]) -> Holding:
        return {number: held for number, held in holding.items() if number in numbers}

    def buckets(self, consume: Callable[[int, Tensor], None]) -> None:
        """Collective. Assemble all buckets and call a function with each, on the ranks that receive them."""
        arriving = self._start(0)
        bucket = self._memory()
        for number, nbytes in enumerate(self._plan.bucket_nbytes):
            pending, received = arriving
            pending.wait()
            if self._consumes:
                self._shards.copy_to(bucket, self._plan.runs(number, self._own))
                for source, packed in received.items():
                    self._plan.unpack(self._plan.runs(number, self._incoming[source]), packed, bucket)
            del received
            self._comm.settle()  # the sent parts are released before the next parts are packed
            arriving = self._start(number + 1)
            if self._consumes:
                consume(number, bucket[:nbytes])

    def _memory(self) -> Tensor:
        most = max(self._plan.bucket_nbytes, default=0) if self._consumes else 0
        return torch.empty(most, dtype=torch.uint8, device=self._shards.device)

    def _start(self, number: int) -> tuple[Pending, dict[int, Tensor]]:
        """Start the exchange of a bucket; after the last bucket, do nothing."""
        if number >= len(self._plan.buckets):
            return Pending("", (), lambda: torch.empty(0)), {}
        sent: dict[int, list[Tensor]] = {}
        for numbers, targets in self._outgoing.items():
            packed = self._shards.packed(self._plan.runs(number, self._only(self._part, numbers)))
            sent |= {target: [packed] for target in targets if len(packed)}
        received = dict(self._received(number))
        incoming = {source: [packed] for source, packed in received.items()}
        what = f"the exchange of bucket {number} of a stream of weights"
        return self._comm.exchange(incoming, sent, what, ("weights", number)), received

    def _received(self, number: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the memory for the parts of other ranks."""
        for source, holding in self._incoming.items():
            nbytes = self._plan.packed_nbytes(self._plan.runs(number, holding))
            if nbytes:
                yield source, torch.empty(nbytes, dtype=torch.uint8, device=self._shards.device)
