"""What ranks say to each other is the same on every way to say it, in whatever order it is asked for and awaited."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.distributed import collectives
from fsdp.distributed.collectives import (
    Communicator,
    DirectExchange,
    Pending,
    StagedExchange,
    TorchCollectives,
    communicator,
)
from fsdp.distributed.communicator import CollectiveError, LoneRank, default_group, finish, waits
from fsdp.distributed.messages import CheckedGroup, Receiving, wire_tag
from fsdp.distributed.switches import SHARED_MEMORY
from fsdp.layers.sharding_strategy import group_apart, group_to_reduce_over
from tests.helpers import last_collective
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.standing import given_up

CPU = torch.device("cpu")


def shared(group: Any) -> Communicator:
    """Return a way that sends each message through shared memory, however small."""
    way = DirectExchange(group)
    way.shares_from = 1
    with mock.patch.dict(os.environ, {SHARED_MEMORY: "1"}):
        way.share_memory(1)
    assert way._shared is not None
    return way


WAYS: dict[str, Callable[[Any], Communicator]] = {
    "torch": TorchCollectives,
    "direct": DirectExchange,
    "shared": shared,
    "staged": StagedExchange,  # on CPU tensors it is the same detour
}

every_way = pytest.mark.parametrize("way", WAYS)


def world(way: str = "direct") -> Communicator:
    return WAYS[way](dist.group.WORLD)


def whole_numbers(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small ones, so that their sums are exact in any order and any dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def randoms(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# The same results


@parametrize_pairs(dtype=[torch.float32, torch.bfloat16, torch.int64], way=list(WAYS), world_size=[2, 3, 4])
@on_ranks("world_size")
def test_a_gather_puts_the_shards_in_rank_order(way: str, dtype: torch.dtype) -> None:
    comm = world(way)
    assert (comm.rank, comm.world_size) == (dist.get_rank(), dist.get_world_size())
    for numel in (1, 7, 5000):
        shards = [whole_numbers(numel, dtype, seed=rank) for rank in range(comm.world_size)]
        full = torch.empty(numel * comm.world_size, dtype=dtype)
        result = comm.all_gather(full, shards[comm.rank], "a gather", tag=0).wait()
        assert torch.equal(full, torch.cat(shards))
        assert result is full
        comm.settle()


@parametrize_pairs(dtype=[torch.float32, torch.bfloat16, torch.int64], way=list(WAYS), world_size=[2, 3, 4])
@on_ranks("world_size")
def test_a_reduction_gives_every_rank_its_piece_of_the_sum(way: str, dtype: torch.dtype) -> None:
    comm = world(way)
    for numel in (1, 7, 5000):
        fulls = [whole_numbers(numel * comm.world_size, dtype, seed=rank) for rank in range(comm.world_size)]
        expected = torch.stack(fulls).sum(0).to(dtype).chunk(comm.world_size)[comm.rank]
        full = fulls[comm.rank].clone()
        reduced = comm.reduce_scatter(full, "a reduction", tag=0).wait()
        full.untyped_storage().resize_(0)
        assert reduced.dtype is dtype
        assert torch.equal(reduced, expected)


@every_way
@on_ranks(2)
def test_complex_numbers_are_summed(way: str) -> None:
    comm = world(way)
    full = torch.tensor([1.0 + 2j, 3j]) * (1 + comm.rank)
    own = getattr(dist, collectives._REDUCE_SCATTER)
    with mock.patch.object(dist, collectives._REDUCE_SCATTER, wraps=own) as called:
        reduced = comm.reduce_scatter(full, "a reduction", tag=0).wait()
    assert not any(each.is_complex() for call in called.call_args_list for each in call.args)  # NCCL refuses them
    assert reduced.tolist() == [[3 + 6j], [9j]][comm.rank]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn], ids=str)
@every_way
@on_ranks(2)
def test_values_of_any_dtype_are_exchanged(way: str, dtype: torch.dtype) -> None:
    """NCCL knows neither integers of 16 bits nor complex numbers."""
    comm, seen = WAYS[way](dist.group.WORLD), set()
    post = dist.batch_isend_irecv

    def noted(operations: Any) -> Any:
        seen.update(operation.tensor.dtype for operation in operations)
        return post(operations)

    peer = 1 - comm.rank
    sent, arrived = torch.tensor([1.0 + comm.rank, 0.0]).to(dtype), torch.zeros(2).to(dtype)
    with mock.patch.object(dist, "batch_isend_irecv", noted):
        comm.exchange({peer: [arrived]}, {peer: [sent]}, "values", 1).wait()
    comm.settle()
    assert seen <= {torch.uint8}
    assert arrived.float().tolist() == torch.tensor([1.0 + peer, 0.0]).to(dtype).float().tolist()


@on_ranks(4)
def test_a_direct_sum_is_taken_in_rank_order() -> None:
    """On every rank, so that a run repeats to the last bit, and replicas of a piece would be equal."""
    comm = world("direct")
    fulls = [randoms(100 * comm.world_size, seed=rank) for rank in range(comm.world_size)]
    pieces = [full.chunk(comm.world_size)[comm.rank] for full in fulls]
    expected = pieces[0] + pieces[1]
    for piece in pieces[2:]:
        expected = expected + piece
    for _ in range(5):
        assert torch.equal(comm.reduce_scatter(fulls[comm.rank].clone(), "a reduction", tag=0).wait(), expected)


@parametrize_pairs(way=list(WAYS), world_size=[2, 3, 4])
@on_ranks("world_size")
def test_small_talk(way: str) -> None:
    comm = world(way)
    rank, world_size = comm.rank, comm.world_size
    tensor = torch.tensor([rank + 1.0, -rank])
    assert comm.all_reduce(tensor).wait() is tensor
    assert tensor.tolist() == [world_size * (world_size + 1) / 2, -world_size * (world_size - 1) / 2]
    assert comm.all_reduce(torch.tensor([rank + 1.0, -rank]), "max").wait().tolist() == [world_size, 0.0]
    tensor = torch.tensor([rank + 7.0])
    assert comm.broadcast(tensor).wait() is tensor
    assert tensor.item() == 7
    for length in (1, 447, 448, 449, 1000):  # the first message has room for 448
        assert comm.all_gather_bytes(b"x" * rank * length) == [b"x" * other * length for other in range(world_size)]


@every_way
@on_ranks(3)
def test_ranks_of_a_group_are_counted_in_the_group(way: str) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    comm = WAYS[way](group)
    assert (comm.rank, comm.world_size) == (dist.get_rank() - 1, 2)
    full = torch.empty(6)
    comm.all_gather(full, torch.full((3,), float(comm.rank)), "a gather", tag=0).wait()
    assert full.tolist() == [0.0] * 3 + [1.0] * 3
    reduced = comm.reduce_scatter(torch.arange(4.0) + comm.rank, "a reduction", tag=0).wait()
    assert reduced.tolist() == ([1.0, 3.0] if comm.rank == 0 else [5.0, 7.0])
    assert comm.broadcast(torch.tensor([comm.rank])).wait().item() == 0
    assert comm.all_gather_bytes(bytes([comm.rank])) == [b"\0", b"\1"]
    comm.settle()


# In any order


@parametrize_pairs(way=list(WAYS), world_size=[2, 3, 4])
@on_ranks("world_size")
def test_many_may_be_in_flight_and_be_awaited_in_any_order(way: str) -> None:
    comm = world(way)
    fulls = [torch.empty(comm.world_size * (tag + 1)) for tag in range(20)]
    gathers = [
        comm.all_gather(full, torch.full((tag + 1,), 100.0 * tag + comm.rank), f"gather {tag}", tag)
        for tag, full in enumerate(fulls)
    ]
    reductions = [
        comm.reduce_scatter(torch.full((comm.world_size * (tag + 1),), float(tag)), f"reduction {tag}", tag)
        for tag in range(20)
    ]
    for tag in [*reversed(range(20)), 0]:  # waiting again changes nothing
        expected = [100.0 * tag + rank for rank in range(comm.world_size) for _ in range(tag + 1)]
        assert gathers[tag].wait().tolist() == expected
        assert reductions[tag].wait().tolist() == [float(tag * comm.world_size)] * (tag + 1)
    comm.settle()


@on_ranks(3)
def test_ranks_may_issue_in_different_orders_what_has_different_tags() -> None:
    """What would hang or mix bytes in collectives that match by order."""
    comm = world("direct")
    tags = list(range(6))
    order = tags[comm.rank :] + tags[: comm.rank]
    fulls = {tag: torch.empty(comm.world_size * 3) for tag in tags}
    gathers, reductions = {}, {}
    for tag in order:
        gathers[tag] = comm.all_gather(fulls[tag], torch.full((3,), 10.0 * tag + comm.rank), "a gather", tag)
        reductions[tag] = comm.reduce_scatter(torch.full((comm.world_size,), float(tag)), "a reduction", tag)
    for tag in reversed(order):
        assert gathers[tag].wait().view(-1, 3)[:, 0].tolist() == [10.0 * tag + rank for rank in range(comm.world_size)]
        assert reductions[tag].wait().item() == tag * comm.world_size
    comm.settle()


@every_way
@on_ranks(3)
def test_one_tag_may_be_in_flight_several_times(way: str) -> None:
    comm = world(way)
    fulls = [torch.empty(3) for _ in range(5)]
    works = [
        comm.all_gather(full, torch.tensor([10.0 * number + comm.rank]), "a gather", tag=7)
        for number, full in enumerate(fulls)
    ]
    for number in reversed(range(5)):
        assert works[number].wait().tolist() == [10.0 * number, 10.0 * number + 1, 10.0 * number + 2]
    comm.settle()


@every_way
@on_ranks(3)
def test_a_shard_may_change_once_it_has_settled(way: str) -> None:
    comm = world(way)
    shard, full = torch.empty(20_000), torch.empty(60_000)
    for step in range(10):
        shard.fill_(10.0 * step + comm.rank)
        gather = comm.all_gather(full, shard, "a gather", tag=0)
        if comm.rank == 0:
            time.sleep(0.002)  # its peers settle only when it has come to take their shards
        gather.wait()
        comm.settle()
        assert full.view(3, -1)[:, ::1000].unique().tolist() == [10.0 * step, 10.0 * step + 1, 10.0 * step + 2]
    comm.settle()


# What goes wrong


@pytest.mark.waiting
def test_a_rank_that_never_comes_is_an_error_that_names_the_unit(ranks: RankPool, tmp_path: Path) -> None:
    # Processes of their own, since what is left of these groups would be in the way of other tests.
    for message in ranks(2, backend=None).run(_wait_in_vain, tmp_path / "store")[0]:
        assert message.startswith("rank 0: all-gather of blocks.1 did not complete: ")
        assert "Every rank of the group must run the same units" in message


def _wait_in_vain(store: Path) -> list[str]:
    """Two messages of rank 0: nobody to receive from, and nobody who takes what was sent."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    messages = []
    full, shard = torch.empty(2_000_000), torch.ones(1_000_000)
    for peer_sends in (False, True):
        dist.barrier()
        comm = DirectExchange(group := dist.new_group())
        comm.all_gather(full, shard, "all-gather of blocks.0", tag=0).wait()
        comm.settle()
        with given_up(group):
            if rank == 0:
                gather = comm.all_gather(full, shard, "all-gather of blocks.1", tag=1)
                with pytest.raises(RuntimeError) as caught:  # noqa: PT012 - whichever of the two waits for the peer
                    gather.wait()
                    comm.settle()
                messages.append(str(caught.value))
            elif peer_sends:
                for work in comm._post("a shard", "gather", 1, {}, {0: [shard]})[1]:
                    work.wait()
            dist.barrier()
    return messages


class Lost:
    """A message that does not come."""

    def wait(self) -> None:
        raise RuntimeError("nobody has sent it")


def test_a_collective_that_has_failed_stays_failed() -> None:
    pending = Pending("all-gather of blocks.1", [Lost()], lambda: torch.ones(3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"all-gather of blocks\.1 did not complete: nobody has sent it"):
            pending.wait()


# Which way is taken


@on_ranks(2)
def test_gloo_on_cpu_exchanges_directly() -> None:
    comm = communicator(dist.group.WORLD, CPU)
    assert type(comm) is DirectExchange
    assert comm.peers_answer
    assert communicator(dist.group.WORLD, CPU) is comm, "one per group: what was sent must be settled by the same one"
    assert type(communicator(dist.new_group(), CPU)) is DirectExchange
    assert communicator(dist.new_group(), CPU) is not comm
    assert type(communicator(Proxy(dist.group.WORLD), CPU)) is TorchCollectives
    lone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert type(communicator(lone, CPU)) is LoneRank
    assert default_group(None) is dist.group.WORLD
    assert default_group(lone) is lone
    assert group_to_reduce_over(None, dist.group.WORLD, CPU) is dist.group.WORLD
    assert group_to_reduce_over(None, lone, CPU) is lone


class Proxy:
    """A group that torch does not know, as tools wrap one to count what it does."""

    def __init__(self, group: Any) -> None:
        self._wrapped = group

    def rank(self) -> int:
        return self._wrapped.rank()

    def size(self) -> int:
        return self._wrapped.size()


def test_without_a_process_group_the_error_shows_the_two_lines() -> None:
    with pytest.raises(RuntimeError, match="needs a process group") as caught:
        default_group(None)
    assert "    import fsdp\n    device = fsdp.init_distributed()" in str(caught.value)


# A world of one


def test_a_lone_rank_has_what_it_gathers_and_reduces() -> None:
    assert not dist.is_initialized()
    comm = communicator(Alone(), CPU)
    assert type(comm) is LoneRank
    shard, full = torch.arange(4.0), torch.empty(4)
    assert comm.all_gather(full, shard, "a gather", tag=0).wait() is full
    assert torch.equal(full, shard)
    assert comm.all_gather(shard, shard, "a gather", tag=0).wait() is shard, "or it may be there already"
    assert torch.equal(comm.reduce_scatter(full, "a reduction", tag=0).wait(), shard)
    for op in ("sum", "max"):
        assert comm.all_reduce(torch.tensor([3.0]), op).wait().tolist() == [3.0]
    assert comm.broadcast(torch.tensor([3.0])).wait().tolist() == [3.0]
    assert comm.all_gather_bytes(b"alone") == [b"alone"]
    comm.settle()


# torch's fake group: many ranks, of which only one exists


@on_ranks(1, backend=None)
def test_a_fake_group_needs_no_peers() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    comm = communicator(dist.group.WORLD, CPU)
    assert type(comm) is TorchCollectives
    assert (comm.rank, comm.world_size) == (3, 64)
    assert not comm.peers_answer, "so nothing that they would say may be believed"
    assert comm.all_gather(torch.empty(128), torch.ones(2), "a gather", tag=0).wait().shape == (128,)
    assert comm.reduce_scatter(torch.ones(128), "a reduction", tag=0).wait().shape == (2,)
    assert comm.all_reduce(torch.ones(2)).wait().shape == (2,)
    assert comm.broadcast(torch.ones(2)).wait().shape == (2,)
    comm.settle()
    model = FullyShardedDataParallel(nn.Linear(30, 50))
    model(torch.ones(2, 30)).sum().backward()
    (shard,) = model.parameters()
    assert shard.shape == shard.grad.shape == (-(-1550 // 64),)


# What is given up, and the end


@on_ranks(2)
def test_a_gather_that_is_given_up_stops_nothing_else() -> None:
    comm = world()
    shard = torch.ones(1000)
    if comm.rank == 0:
        comm.all_gather(torch.empty(2000), shard, "a gather", tag=0)
        gc.collect()
    dist.barrier()  # gloo's own way: rank 0 has given up before rank 1 sends
    if comm.rank == 1:
        comm.all_gather(torch.empty(2000), shard, "a gather", tag=0).wait()
    assert comm.all_gather_bytes(b"%d" % comm.rank) == [b"0", b"1"]
    comm.settle()


@on_ranks(2)
def test_a_sum_that_is_given_up_stops_nothing_else() -> None:
    """As of a model that is dropped after its backward has raised, on a rank that is ahead of the other."""
    way = communicator(dist.group.WORLD, torch.device("cpu"))
    for step in range(30):
        if dist.get_rank() == step % 2:
            time.sleep(0.002)  # the other has sent, and forgets it, before this one asks
        way.all_reduce(torch.ones(2000), what="a sum")
        way.reduce_scatter(torch.ones(4000), "another sum", 1)
        gc.collect()
    assert way.all_reduce(torch.ones(1), what="the last sum").wait() == 2.0


def test_a_process_ends_well_while_gloo_tidies_up_its_last_collective(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as ended:
        ranks(2, backend=None, grace=60).run(last_collective.main, tmp_path)
    for outcome in ended.value.outcomes:
        assert outcome.headline == "exited with status 0 without answering", ended.value


# The names that torch 2.12 changed


@on_ranks(2)
def test_collectives_can_be_counted() -> None:
    """By tools that replace the functions of torch.distributed."""
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    reduce = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    originals = {name: getattr(dist, name) for name in (gather, reduce)}
    counts = dict.fromkeys(originals, 0)

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return originals[name](*args, **kwargs)

    comm = world("torch")
    try:
        for name in originals:
            setattr(dist, name, partial(counted, name))
        comm.all_gather(torch.empty(2), torch.ones(1), "a gather", tag=0).wait()
        comm.reduce_scatter(torch.ones(2), "a reduction", tag=0).wait()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert counts == {gather: 1, reduce: 1}


@on_ranks(3)
def test_a_rank_that_cannot_hear_one_rank_still_answers_the_others() -> None:
    """Else these would wait for it, as long as it lives: it may catch the error and go on."""
    way = world()

    def receiving(group: Any, tensor: Tensor, peer: int, number: int) -> Receiving:
        if peer == 1:
            raise RuntimeError("Connection closed by peer")
        return Receiving(group, tensor, peer, number)

    if dist.get_rank() == 0:
        with (
            mock.patch.object(collectives, "Receiving", receiving),
            pytest.raises(CollectiveError, match="Connection closed by peer"),
        ):
            way.all_gather(torch.empty(3), torch.ones(1), "gather", 0)
        way.settle()
        number = wire_tag(way._way, "gather", 0, 1, torch.float32)  # type: ignore[attr-defined]
        Receiving(way.group, torch.empty(1), 1, number).wait()  # leaves nothing to the next test
    else:
        full = torch.full((3,), float(dist.get_rank()))
        assert (way.all_gather(torch.empty(3), full[:1], "gather", 0).wait() == torch.tensor([1.0, 1.0, 2.0])).all()
        way.settle()


def by_itself(comm: Communicator) -> Communicator:
    return communicator(group_apart(comm.group), CPU)


@pytest.mark.parametrize("derive", [TorchCollectives.apart, by_itself])
@on_ranks(2)
def test_groups_that_the_library_creates_have_the_timeout_of_the_users_group(derive: Any) -> None:
    comm = derive(communicator(dist.new_group(timeout=timedelta(seconds=2)), CPU))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="did not complete"):
            comm.all_gather_bytes(b"")
    dist.barrier()


@pytest.mark.parametrize("way", ["direct", "shared", "checked"])
@on_ranks(3)
def test_a_wait_that_was_interrupted_is_repeated(way: str) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    comm = DirectExchange(CheckedGroup(group)) if way == "checked" else WAYS[way](group)
    full, shard = torch.zeros(3), torch.tensor([rank + 1.0])
    if rank == 2:
        dist.barrier()
    pending = comm.all_gather(full, shard, "gather", 1)
    if rank == 0:
        first, *others = pending._works
        interrupts = [KeyboardInterrupt]

        def wait(*limit: Any) -> None:
            first.wait(*limit)
            if interrupts:
                raise interrupts.pop()

        pending._works = [SimpleNamespace(wait=wait), *others]
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    if rank != 2:
        dist.barrier()
    assert pending.wait().tolist() == [1.0, 2.0, 3.0]
    comm.settle()


@pytest.mark.parametrize("way", ["direct", "checked"])
@on_ranks(2)
def test_a_shard_is_kept_until_its_messages_have_left_after_an_interrupt(way: str) -> None:
    group = dist.group.WORLD
    comm = DirectExchange(CheckedGroup(group) if way == "checked" else group)
    shard, received = torch.ones(3), torch.zeros(3)
    if dist.get_rank() == 0:
        comm.exchange({}, {1: [shard]}, "exchange", 1)
        (sent,) = [sending._works for sending in comm._sent]
        with mock.patch.object(comm._sent[0], "_works", [Interrupting(), *sent]):
            with pytest.raises(KeyboardInterrupt):
                comm.settle()
            comm.settle()
        shard.zero_()
    else:
        time.sleep(0.5)
        comm.exchange({0: [received]}, {}, "exchange", 1).wait()
        assert received.tolist() == [1.0] * 3
    dist.barrier()


class Interrupting:
    """A message whose first wait is interrupted."""

    was_awaited = False

    def wait(self, *limit: Any) -> None:
        if not self.was_awaited:
            self.was_awaited = True
            raise KeyboardInterrupt

    def is_completed(self) -> bool:
        return True


@contextmanager
def signalled(handle: Callable[[], None]) -> Iterator[SimpleNamespace]:
    """Give a message whose wait ends with a signal, for which a handler is installed: handlers run after waits of C."""
    before = signal.signal(signal.SIGUSR2, lambda *_: handle())
    try:
        yield SimpleNamespace(wait=lambda *_: signal.raise_signal(signal.SIGUSR2), is_completed=lambda: True)
    finally:
        signal.signal(signal.SIGUSR2, before)


@on_ranks(2)
def test_a_signal_handler_may_call_a_collective_while_the_rank_waits() -> None:
    comm = communicator(dist.group.WORLD, CPU)
    heard: list[list[bytes]] = []
    found: list[str] = []
    later = SimpleNamespace(wait=lambda *_: found.append(waits[threading.get_ident()].what))
    with signalled(lambda: heard.append(comm.all_gather_bytes(b"in a handler"))) as work:
        finish([work, later], "all-gather of 0")
    assert heard == [[b"in a handler"] * 2]
    assert found == ["all-gather of 0"], "the watchdog sees the rest of the wait"
    assert threading.get_ident() not in waits


@pytest.mark.parametrize("way", ["direct", "checked"])
@on_ranks(2)
def test_a_signal_handler_may_settle_what_the_rank_settles(way: str) -> None:
    group = dist.group.WORLD
    comm = DirectExchange(CheckedGroup(group) if way == "checked" else group)
    received, peer = torch.zeros(3), 1 - dist.get_rank()
    arrived = comm.exchange({peer: [received]}, {peer: [torch.ones(3)]}, "exchange", 1)
    with signalled(comm.settle) as work:
        comm._sent[0]._works = [work, *comm._sent[0]._works]
        comm.settle()
    arrived.wait()
    assert received.tolist() == [1.0] * 3
    assert not comm._sent
