"""The process group of a world implements gloo's interface and arithmetic, with messages in memory."""

# mypy: disable-error-code="override, assignment"
# torch declares multiple overloads of each method, and only calls the overload that is defined here.

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.testing.network import Message, Network, Work, copied, flipped

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}

_SEGMENT_BYTES = 1 << 20

# The inputs or outputs of each rank in a collective: tensors by rank of the group.
Parts = Sequence[Sequence[Tensor]]


class MemoryGroup(dist.ProcessGroup):
    """A process group in memory, on a single rank.

    torch creates this class instead of gloo's class (`fsdp.testing.world`), with gloo's arguments. This class defines
    the methods that torch calls, with the names in torch 2.13 and in earlier versions. Methods that return a work are
    collective and do not block. torch 2.14 passes an additional argument (`sockets`) for reconnecting, which is unused
    because there are no connections.
    """

    def __init__(self, network: Network, store: Any, rank: int, size: int, timeout: Any = None, **sockets: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # groups in Python have no store
        self.network = network
        self.options = SimpleNamespace(global_ranks_in_group=[], group_name="", _timeout=timeout)
        self._calls, self._description = 0, ""

    @property
    def group_name(self) -> str:
        return self.options.group_name

    def _set_group_name(self, name: str) -> None:
        self.options.group_name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def _get_backend(self, device: torch.device) -> MemoryGroup:
        return self  # `batch_isend_irecv` of torch 2.14 queries whether the backend coalesces messages

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False, because gloo does not allocate tensors for communication."""
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Not required, because the ranks have no common sequence number."""

    def getBackendName(self) -> str:  # noqa: N802
        return "memory"  # for C++, where DistributedDataParallel would require the sockets of gloo's class

    def name(self) -> str:
        return "gloo"

    def shutdown(self) -> None:
        """Not required, because there are no resources."""

    abort = shutdown

    def _number(self, peer: int) -> int:
        ranks = self.options.global_ranks_in_group
        return ranks[peer] if ranks else peer

    @property
    def _members(self) -> list[int]:
        return [self._number(peer) for peer in range(self.size())]

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Message:
        return self.network.send(
            self.options.group_name, self._number(self.rank()), self._number(peer), tag, tensors[0]
        )

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Message:
        return self.network.receive(
            self.options.group_name, self._number(self.rank()), self._number(peer), tag, tensors[0]
        )

    def _meet(
        self, what: str, given: Sequence[Tensor], wanted: Sequence[Tensor], results: Callable[[Parts], Parts]
    ) -> Work:
        """Start a collective.

        Args:
            what: a description that must be equal on all ranks.
            given, wanted: the input and output tensors of this rank.
            results: a function that is called with the input tensors of each rank, after all ranks have arrived. The
                function returns, for each rank, the tensors to copy to the outputs, if any.
        """
        network, rank, members = self.network, self._number(self.rank()), self._members
        self._calls += 1
        key = self.options.group_name, self._calls
        work = Work(network, rank, what, members, [*given, *wanted])
        with network.schedule.turn(rank):
            network.check(rank, work.peers)
            fault = network.fault(rank)
            if fault == "flip":
                given = [flipped(each.clone()) for each in given]
            meeting = network.meetings.setdefault(key, {})
            meeting[rank if fault != "lose" else None] = what, given, wanted, work
            if len(meeting) == self.size() and None not in meeting:
                del network.meetings[key]
                self._complete([meeting[each] for each in members], members, results)
        return work

    def _complete(self, came: list[Any], members: list[int], results: Callable[[Parts], Parts]) -> None:
        works = [work for *_, work in came]
        texts = {what: member for (what, *_), member in zip(reversed(came), reversed(members), strict=True)}
        error = ""
        if len(texts) > 1:
            error = "the ranks are in different collectives: " + "; ".join(
                f"rank {member} in {what}" for what, member in sorted(texts.items(), key=lambda each: each[1])
            )

        def deliver() -> None:
            if not error:
                with torch.no_grad():
                    found = results([given for _, given, _, _ in came])
                    for sources, (_, _, wanted, _) in zip(found, came, strict=True):
                        for source, target in zip(sources, wanted, strict=False):
                            _write(source, target)
            for work in works:
                work.end(error)

        for work in works:
            work.complete = deliver
        if any(work.waiters for work in works) or self.network.schedule.draw():
            deliver()

    def _on_all(self, tensors: Sequence[Tensor]) -> Parts:
        return [tensors] * self.size()

    def _on(self, root: int, tensors: Sequence[Tensor]) -> Parts:
        return [tensors if rank == root else () for rank in range(self.size())]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        operation = _operation(opts)
        return self._meet(
            f"all_reduce{_shapes(tensors)} {operation}",
            tensors,
            tensors,
            lambda given: self._on_all([reduced(each, operation) for each in zip(*given, strict=True)]),
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        operation, root = _operation(opts), opts.rootRank
        return self._meet(
            f"reduce{_shapes(tensors)} {operation} to {root}",
            tensors,
            tensors,
            lambda given: self._on(root, [reduced(each, operation) for each in zip(*given, strict=True)]),
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank
        what = f"broadcast{_shapes(tensors)} from {root}"
        return self._meet(what, tensors, tensors, lambda given: self._on_all(given[root]))

    def _gather(self, what: str, given: list[Tensor], wanted: list[list[Tensor]]) -> Work:
        return self._meet(
            f"{what}{_shapes(given)}",
            given,
            [each for targets in wanted for each in targets],
            # For each input tensor in order, the tensors of all ranks.
            lambda sources: self._on_all([each for tensors in zip(*sources, strict=True) for each in tensors]),
        )

    def allgather(self, wanted: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Work:
        return self._gather("all_gather", given, wanted)

    def allgather_coalesced(self, wanted: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Work:
        # torch's outputs are ordered by rank first
        return self._gather("all_gather", given, [list(each) for each in zip(*wanted, strict=True)])

    def all_gather_single_coalesced(self, wanted: list[Tensor], given: list[Tensor], opts: Any = None) -> Work:
        def results(sources: Parts) -> Parts:
            return self._on_all([torch.cat([each.reshape(-1) for each in same]) for same in zip(*sources, strict=True)])

        return self._meet(f"all_gather{_shapes(given)}", given, wanted, results)

    def all_gather_single(self, wanted: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([wanted], [given])

    def gather(self, wanted: list[list[Tensor]], given: list[Tensor], opts: Any) -> Work:
        return self._gather(f"gather to {opts.rootRank} of ", given, wanted)

    def scatter(self, wanted: list[Tensor], given: list[list[Tensor]], opts: Any) -> Work:
        root, flat = opts.rootRank, [each for tensors in given for each in tensors]
        what = f"scatter{_shapes(wanted)} from {root}"
        return self._meet(what, flat, wanted, lambda sources: [[each] for each in sources[root]])

    def reduce_scatter(self, wanted: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> Work:
        operation, size = _operation(opts), self.size()

        def results(sources: Parts) -> Parts:  # a separate reduction for each piece, as in gloo
            totals = [reduced(each, operation) for each in zip(*sources, strict=True)]
            return [totals[rank::size] for rank in range(size)]

        flat = [each for tensors in given for each in tensors]
        return self._meet(f"reduce_scatter{_shapes(flat)} {operation}", flat, wanted, results)

    def reduce_scatter_single_coalesced(self, wanted: list[Tensor], given: list[Tensor], opts: Any = None) -> Work:
        operation, size = _operation(opts), self.size()

        def results(sources: Parts) -> Parts:  # by an all-reduce, as in gloo
            totals = [reduced(each, operation).view(size, -1) for each in zip(*sources, strict=True)]
            return [[total[rank] for total in totals] for rank in range(size)]

        return self._meet(f"reduce_scatter{_shapes(given)} {operation}", given, wanted, results)

    def reduce_scatter_single(self, wanted: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([wanted], [given], opts)

    def _swap(self, wanted: list[Tensor], given: list[Tensor]) -> Work:
        return self._meet("all_to_all", given, wanted, lambda sources: list(zip(*sources, strict=True)))

    def alltoall(self, wanted: list[Tensor], given: list[Tensor], opts: Any = None) -> Work:
        return self._swap(wanted, given)

    def all_to_all_single(
        self, wanted: Tensor, given: Tensor, wanted_sizes: list[int], given_sizes: list[int], opts: Any = None
    ) -> Work:
        def split(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
            return list(tensor.detach().split(list(sizes) or tensor.shape[0] // self.size()))

        return self._swap(split(wanted, wanted_sizes), split(given, given_sizes))

    def barrier(self, opts: Any = None) -> Work:
        return self._meet("barrier", (), (), lambda given: self._on_all(()))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _operation(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op


def reduced(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    """Reduce the ranks' tensors of equal shape in the order of gloo's ring, bitwise equal to gloo.

    The first of W parts is passed from rank W - 1 down to rank 0, and each rank adds its values; each following part
    starts at the next rank. A part consists of two segments, or of more segments if two would exceed a MiB each.
    """
    if operation not in _REDUCTIONS:
        raise RuntimeError(f"gloo has no reduction {operation}")
    size, first = len(tensors), tensors[0]
    segments = max(2, -(-first.nbytes // (size * _SEGMENT_BYTES)))  # of each part
    segment = -(-first.nbytes // (size * segments))
    part = segments * -(-segment // first.element_size()) or 1
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    total = torch.empty_like(flat[0])
    for number, start in enumerate(range(0, len(total), part)):
        own = slice(start, start + part)
        value = flat[(number - 1) % size][own]
        for step in range(2, size + 1):
            value = _REDUCTIONS[operation](value, flat[(number - step) % size][own])
        total[own] = value
    return (total / size if operation == dist.ReduceOp.AVG else total).view(first.shape)


def _write(source: Tensor, target: Tensor) -> None:
    error = copied(source if source.is_contiguous() else source.contiguous(), target, "of a collective")
    if error:
        raise RuntimeError(error)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors).join("()")
