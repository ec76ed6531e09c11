"""`Assembly` collects each bucket from the ranks that hold parts of it, with one exchange for each bucket.

[Note: two buckets] While a sink consumes bucket n, bucket n + 1 arrives, and a rank holds at most these two buckets. If
all parts are contiguous in the bucket, each run is sent from the shard. The receiving rank has memory for two buckets,
and receives each run at its position, without further copies. In host memory, the exchange of bucket n + 1 then begins
before bucket n has arrived. Otherwise parts are packed: arriving parts are stored in separate memory instead of a
second bucket, and copied to the memory of bucket n after the sink has consumed bucket n.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Pending
from fsdp.distributed.devices import byte_view, is_host
from fsdp.weights.plan import Holding, Run, WeightPlan, aligned


class Shards:
    """This rank's values of the tensors of a plan.

    Args:
        plan: the plan.
        vectors: by the number of a tensor, the flat vector that contains its elements, of any dtype and device.
        device: the device on which parts are packed.
    """

    def __init__(self, plan: WeightPlan, vectors: Mapping[int, Tensor], device: torch.device) -> None:
        self.plan, self.device = plan, device
        self._vectors = vectors

    def packed(self, runs: Sequence[Run], memory: Tensor) -> Tensor:
        """Copy some runs to memory, cast to the dtypes of the plan, and return their bytes."""
        end = 0
        for run in runs:
            memory[end : run.packed].zero_()  # alignment bytes, so that equal weights have equal bytes
            view = self.plan.packed_view(run, memory)
            view.copy_(self._values(run))
            end = run.packed + view.nbytes
        return memory[:end]

    def copy_to(self, bucket: Tensor, runs: Sequence[Run]) -> None:
        for run in runs:
            self.plan.run_view(run, bucket).copy_(self._values(run))

    def bytes_of(self, run: Run) -> Tensor:
        """Return the bytes of a run: a view of the shard if the shard has the dtype and the device of the bucket."""
        values = self._values(run).to(self.device, self.plan.dtype_of(run))
        return byte_view(values.contiguous())

    def _values(self, run: Run) -> Tensor:
        values = self._vectors[run.piece.tensor][run.start : run.start + run.box.numel]
        return values.detach().reshape(run.box.sizes)


class Assembly:
    """The exchange of a stream among the ranks. All ranks create an assembly, and call `buckets`.

    Args:
        shards: this rank's values.
        own: the elements that this rank holds, in its vectors.
        holdings: the elements that each rank holds; replicas hold the same elements.
        alike: the numbers of the tensors with equal values on all ranks that hold the same elements.
        is_direct: whether all parts are direct (`WeightPlan.is_direct`).
        consumers: the ranks that receive complete buckets.
        comm: the communicator of the exchange.
        places: the number of each rank in `comm`.
    """

    def __init__(
        self,
        shards: Shards,
        own: Holding,
        holdings: Sequence[Holding],
        alike: Collection[int],
        is_direct: bool,
        consumers: Collection[int],
        comm: Communicator,
        places: Sequence[int],
    ) -> None:
        self._shards, self._plan, self._comm, self._is_direct = shards, shards.plan, comm, is_direct
        self._known: dict[tuple[int, int], list[Run]] = {}
        self._problem: Exception | None = None
        rank = self._plan.rank
        self._consumes = rank in consumers

        def sent(source: int, target: int) -> frozenset[int]:
            """Return the tensors of which `source` sends a part to `target`, which does not hold an equal part."""
            theirs = holdings[target]
            part = self._plan.parts[source].items()
            return frozenset(number for number, held in part if number not in alike or theirs.get(number) != held)

        outgoing: dict[frozenset[int], list[int]] = {}
        for target in consumers:
            if target != rank:
                outgoing.setdefault(sent(rank, target), []).append(places[target])
        sources = [each for each in range(len(places)) if each != rank] if self._consumes else []
        self._incoming = {
            places[source]: self._only(self._plan.parts[source], sent(source, rank)) for source in sources
        }
        part = {number: own[number] for number in self._plan.parts[rank]}
        self._outgoing = [(self._only(part, numbers), targets) for numbers, targets in outgoing.items()]
        numbers = range(len(self._plan.buckets))
        # On an accelerator, the copy of an offloaded shard and the send that reads the copy use different streams.
        self._starts_early = self._is_direct and is_host(shards.device)
        sizes = [0 if self._is_direct else sum(self._sizes(number)) for number in numbers]
        self._staging = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=shards.device)
        most = max(self._plan.bucket_nbytes, default=0) if self._consumes else 0
        count = 2 if self._is_direct else 1
        self._memory = [torch.empty(most, dtype=torch.uint8, device=shards.device) for _ in range(count)]
        self._own = {number: held for number, held in own.items() if number in alike or number in part}

    def _sizes(self, number: int) -> list[int]:
        """Return the bytes of the parts of a bucket that this rank sends and receives, aligned for all dtypes."""
        parts = [*(part for part, _ in self._outgoing), *self._incoming.values()]
        return [aligned(self._plan.packed_nbytes(self._runs(number, part))) for part in parts]

    def _runs(self, number: int, part: Holding) -> list[Run]:
        key = (number, id(part))
        if key not in self._known:
            self._known[key] = self._plan.runs(number, part)
        return self._known[key]

    @staticmethod
    def _only(holding: Holding, numbers: Collection[int]) -> Holding:
        return {number: held for number, held in holding.items() if number in numbers}

    def buckets(self, consume: Callable[[int, Tensor], None]) -> None:
        """Collective. Assemble all buckets and call a function with each, on the ranks that receive them."""
        arriving, received = self._start(0)
        for number, nbytes in enumerate(self._plan.bucket_nbytes):
            # Bucket n + 1 uses the memory of bucket n - 1; packed parts use the memory of the parts of bucket n.
            following = self._start(number + 1) if self._starts_early else None
            arriving.wait()
            for source, packed in received.items():
                self._plan.unpack(self._runs(number, self._incoming[source]), packed, self._bucket(number))
            if following is None:
                self._comm.settle()  # before the memory of sent parts is used again
                following = self._start(number + 1)
            arriving, received = following
            if self._consumes:
                self._shards.copy_to(self._bucket(number), self._runs(number, self._own))
                consume(number, self._bucket(number)[:nbytes])
        self._comm.settle()  # before shards are written again

    def _messages(self, runs: Sequence[Run], memory: Tensor | None) -> list[Tensor]:
        """Return the bytes of some runs, separately or packed in `memory`; after an error, arbitrary bytes."""
        if self._problem is None:
            try:
                if memory is None:
                    return [self._shards.bytes_of(run) for run in runs]
                return [self._shards.packed(runs, memory)]
            except Exception as error:  # noqa: BLE001 (other ranks wait for the messages, and `check` raises it)
                self._problem = error
        if memory is not None:
            return [memory[: self._plan.packed_nbytes(runs)]]
        sizes = [run.box.numel * self._plan.dtype_of(run).itemsize for run in runs]
        return [torch.empty(nbytes, dtype=torch.uint8, device=self._shards.device) for nbytes in sizes]

    def check(self) -> None:
        """Raise the exception after which this rank has sent arbitrary bytes, if there was one."""
        if self._problem is not None:
            raise self._problem

    def _bucket(self, number: int) -> Tensor:
        return self._memory[number % len(self._memory)]

    def _start(self, number: int) -> tuple[Pending, dict[int, Tensor]]:
        """Start the exchange of a bucket; return the exchange, and the memory for packed parts of other ranks."""
        what, tag = f"the exchange of bucket {number} of a stream of weights", ("weights", number)
        if number >= len(self._plan.buckets):
            return Pending(what, (), lambda: torch.empty(0, device="cpu")), {}
        sizes, bucket = self._sizes(number), self._bucket(number)
        memory = iter(() if self._is_direct else self._staging[: sum(sizes)].split(sizes))
        sent: dict[int, list[Tensor]] = {}
        for part, targets in self._outgoing:
            runs = self._runs(number, part)
            values = self._messages(runs, None if self._is_direct else next(memory))
            sent |= {target: values for target in targets if runs}
        incoming: dict[int, list[Tensor]] = {}
        for source, part in self._incoming.items():
            runs = self._runs(number, part)
            if self._is_direct:
                places = [self._plan.run_view(run, bucket).view(-1).view(torch.uint8) for run in runs]
            else:
                places = [next(memory)[: self._plan.packed_nbytes(runs)]]
            incoming |= {source: places} if runs else {}
        packed = {} if self._is_direct else {source: places[0] for source, places in incoming.items()}
        return self._comm.exchange(incoming, sent, what, tag), packed
