"""Messages between ranks under the checker: what is sent is not written, and what arrives not read, too early."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from fsdp.distributed import collectives
from fsdp.distributed.messages import Sending, give_up
from fsdp.state_dict_utils import broadcast_state_dict, gather_state_dict, offload_state_dict_to_cpu
from fsdp.testing import check_streams
from tests.checkpoint.test_folders import folder_of_its_own
from tests.engine.test_written_at_once import BATCH, CALLS, build, step, write
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool


@contextmanager
def way(name: str) -> Iterator[None]:
    """Send by ourselves, with checksums, or by torch's collectives."""
    fsdp.use_torch_collectives(name == "torch")
    fsdp.check_messages(name == "checked")
    try:
        yield
    finally:
        fsdp.use_torch_collectives(False)
        fsdp.check_messages(False)


@pytest.mark.parametrize("name", ["direct", "checked"])
@on_ranks(2)
def test_memory_may_be_written_when_a_call_has_returned(name: str) -> None:
    for call in CALLS if name == "direct" else CALLS[::6]:
        with way(name), check_streams(device=None) as order:
            call()
            assert not order.reports, f"{call.__name__}: {order.reports[0]}"


@pytest.mark.parametrize("name", ["direct", "torch"])
@on_ranks(2)
def test_parts_that_are_sent_to_the_rank_that_writes_them(tmp_path: Path, name: str) -> None:
    with way(name), check_streams(), folder_of_its_own(tmp_path / f"{dist.get_rank()}"):
        # In several blocks, which the host brings from the device one after the other.
        model = fsdp.FullyShardedDataParallel(nn.Linear(1500, 1500, bias=False).to("cuda"))
        fsdp.save("run", model)


@on_ranks(2)
def test_values_of_the_first_rank_that_replicas_get() -> None:
    for name in ("direct", "torch"):
        with way(name), check_streams(device=None):
            model = build(sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)
            optimizer = step(model)
            state = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
            model.load_state_dict(state if dist.get_rank() == 0 else {}, rank0_only=True)
            write(state.values())
            full = fsdp.optim_utils.full_optim_state_dict(model, optimizer)
            fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, full, rank0_only=True)
            assert all(value.eq(1).all() for value in model.state_dict().values())


@on_ranks(2)
def test_trees_that_are_broadcast_gathered_and_brought_to_the_host() -> None:
    for name in ("direct", "torch"):
        with way(name), check_streams(device=None):
            full = {"large": torch.ones(300), "small": [torch.ones(3), torch.ones(2)]}
            local = {"large": torch.zeros(300), "small": [torch.zeros(3), torch.zeros(2)]}
            broadcast_state_dict(full, local, "cpu", max_coalesced_bytes=100)
            assert local["large"].eq(1).all()  # type: ignore[attr-defined]
            write([full["large"], *full["small"]])
    with check_streams():
        values = {"a": torch.ones(4, device="cuda")}
        copied = offload_state_dict_to_cpu(values)
        assert copied["a"].is_pinned()
        assert copied["a"].sum() == 4


@on_ranks(2)
def test_a_communication_hook_begins_when_all_ranks_are_there() -> None:
    with check_streams(device=None):
        model = build()
        model.register_comm_hook(None, _average)
        step(model)


def _average(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.copy_(gradient.view(dist.get_world_size(), -1)[dist.get_rank()])  # the ranks' are equal


@on_ranks(2)
def test_first_values_are_those_of_the_first_rank() -> None:
    for name in ("direct", "torch"):
        with way(name), check_streams(device=None):
            model = nn.Linear(5, 5)
            model = fsdp.FullyShardedDataParallel(model, sync_module_states=True)
            model(BATCH)


@on_ranks(2, backend=None)
def test_a_group_that_is_given_up_waits_for_nobody(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2, store=store)
    store.set(f"connected {dist.get_rank()}", "")
    store.wait(["connected 0", "connected 1"])  # or a rank closes what the other has not connected yet
    group = dist.group.WORLD
    assert group is not None
    with check_streams(device=None):  # what is received in vain has memory until then
        give_up(group)
    with pytest.raises(RuntimeError, match=r"clos|reset by peer"):
        group.recv([torch.empty(1)], 1 - dist.get_rank(), 7).wait(timedelta(seconds=20))


# What is made only to be sent is let go


class Counted(Sending):
    """What is on its way, counted while nobody has waited for it."""

    alive = most = 0

    def __init__(self, works: Sequence[Any], what: str) -> None:
        super().__init__(works, what)
        self._counts = bool(works)
        Counted.alive += self._counts
        Counted.most = max(Counted.most, Counted.alive)

    def finish(self) -> None:
        Counted.alive -= self._counts
        self._counts = False
        super().finish()


def most_at_once(call: Callable[[], object]) -> int:
    """Return how many sendings were on their way at once in a call."""
    Counted.alive = Counted.most = 0
    with mock.patch.object(collectives, "Sending", Counted):
        call()
    assert Counted.alive == 0
    return Counted.most


def test_what_is_made_only_to_be_sent_does_not_pile_up(ranks: RankPool) -> None:
    ranks(2).run(_count_sendings)
    ranks(4).run(_count_sendings_over_two_dimensions)


def _count_sendings() -> None:
    one_at_a_time = mock.patch("fsdp.optim_utils.gather.WINDOW", 0)
    with one_at_a_time, check_streams():  # of shards on a device it is copies that are sent
        model, rank = fsdp.FullyShardedDataParallel(nn.Sequential(*map(wrapped, range(2)))), dist.get_rank()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 5, device="cuda")).sum().backward()
        optimizer.step()
        full = None

        def save() -> None:
            nonlocal full
            full = fsdp.optim_utils.full_optim_state_dict(model, optimizer)

        def summon() -> None:
            with model.summon_full_params(rank0_only=True):
                pass

        assert most_at_once(summon) == (rank > 0)
        assert most_at_once(save) <= 1
        assert most_at_once(lambda: load(model, optimizer, full)) <= 1


def load(model: Any, optimizer: Any, full: Any) -> None:
    fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, full, rank0_only=True)


def wrapped(number: int) -> Any:
    return fsdp.FullyShardedDataParallel(nn.Linear(5, 5).to("cuda"))


def _count_sendings_over_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(16.0).view(4, 4)
    tree = {str(number): distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).t() for number in range(2)}
    assert most_at_once(lambda: gather_state_dict(tree)) <= 1
