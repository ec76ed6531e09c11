"""Ranks on one host send large messages through shared memory, with the bits of sockets, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fsdp
from fsdp.distributed import shared_memory
from fsdp.distributed.collectives import DirectExchange, communicator
from fsdp.distributed.comm_hooks import reduce_scatter
from fsdp.distributed.dtensor import full_tensor
from fsdp.distributed.messages import CheckedGroup
from fsdp.distributed.shared_memory import _Slots
from fsdp.distributed.switches import SHARED_MEMORY
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankError, RankPool

CPU = torch.device("cpu")
LARGE = 1 << 18  # elements of float32, twice what goes through shared memory
FORMS: dict[str, Any] = {
    "flat": fsdp.FullyShardedDataParallel,
    "orig": partial(fsdp.FullyShardedDataParallel, use_orig_params=True),
    "rows": fsdp.fully_shard,
}
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name")


def shared(switch: str = "1") -> Any:
    way = DirectExchange(dist.group.WORLD)
    with mock.patch.dict(os.environ, {SHARED_MEMORY: switch}):
        way.share_memory(1 << 20)
    return way


@contextmanager
def sharing(*, is_on: bool) -> Iterator[Any]:
    """Let new models send each message through shared memory, however small, or none of them."""
    way: Any = communicator(dist.group.WORLD, CPU)
    way._shared, way._was_asked = None, False
    switch = mock.patch.dict(os.environ, {SHARED_MEMORY: str(int(is_on))})
    with switch, mock.patch.object(DirectExchange, "shares_from", 1):
        yield way
    way._shared, way._was_asked = None, False


def train(model: Any, steps: int = 3) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([full_tensor(value).flatten() for value in model.state_dict().values()])


@linux
@pytest.mark.parametrize("form", FORMS)
@on_ranks(lambda form: 3 if form == "rows" else 2)
def test_training_has_the_bits_of_messages_through_sockets(form: str) -> None:
    found = []
    for is_on in (True, False):
        with sharing(is_on=is_on) as way:
            found.append(train(nested_mlp(FORMS[form])))
            assert (way._shared is not None) is is_on
    assert torch.equal(*found)


@linux
@on_ranks(2)
def test_small_models_do_not_ask_for_it() -> None:
    way: Any = communicator(dist.group.WORLD, CPU)
    way._was_asked = False
    train(nested_mlp(fsdp.FullyShardedDataParallel))
    assert not way._was_asked


@linux
@on_ranks(2, 4)
def test_a_sender_does_not_wait_for_readers_and_overwrites_nothing_that_is_not_read() -> None:
    way, rank, ranks = shared(), dist.get_rank(), dist.get_world_size()
    pending = []
    for number in range(12):  # more than the limit, beyond which gradients are copied
        full = torch.empty(ranks * LARGE)
        pending.append(way.all_gather(full, torch.full((LARGE,), float(100 * rank + number)), "gather", number))
        reduced = way.empty(ranks * LARGE, torch.float32, CPU).fill_(number + 1)
        pending.append(way.reduce_scatter(reduced, "reduction", number))
        del reduced
    for number in reversed(range(12)):
        assert torch.equal(pending[2 * number + 1].wait(), torch.full((LARGE,), float(ranks * (number + 1))))
        gathered = pending[2 * number].wait().view(ranks, -1)
        assert all((row == 100 * other + number).all() for other, row in enumerate(gathered))
    way.settle()


@linux
@on_ranks(2)
def test_slots_are_used_again_and_bounded() -> None:
    way = shared()
    for number in range(20):
        full = way.empty(2 * LARGE, torch.float32, CPU).fill_(1)
        way.reduce_scatter(full, "reduction", number).wait()
        way.all_gather(torch.empty(2 * LARGE), torch.ones(LARGE), "gather", number).wait()
        way.meet("both have read", number)
        del full
    slots = way._shared._own
    assert 2 <= len(slots._slots) <= 4
    assert slots._nbytes <= 5 * slots._largest


@linux
@on_ranks(2)
def test_a_reduction_copies_nothing_to_send_it() -> None:
    way = shared()
    full = way.empty(2 * LARGE, torch.float32, CPU).fill_(1)
    with mock.patch.object(_Slots, "payload", side_effect=AssertionError("copied")):
        pending = way.reduce_scatter(full, "reduction", 0)
    assert torch.equal(pending.wait(), torch.full((LARGE,), 2.0))


@linux
@on_ranks(2)
def test_a_hook_may_write_its_gradient_after_it_is_reduced() -> None:
    found = []
    for is_on in (True, False):
        with sharing(is_on=is_on):
            model: Any = nested_mlp(fsdp.FullyShardedDataParallel)
            train(model, steps=1)
            model.register_comm_hook(None, _overwriting)
            found.append(train(model))
    assert torch.equal(*found)


def _overwriting(state: None, gradient: Tensor, shard: Tensor) -> None:
    if dist.get_rank():
        time.sleep(0.01)  # the other rank has written before this one reads
    reduced = reduce_scatter(gradient).clone()
    gradient.fill_(torch.nan)
    shard.copy_(reduced).div_(dist.get_world_size())


@linux
@on_ranks(2)
def test_a_system_without_memory_is_an_error_that_names_the_remedy() -> None:
    way = shared()
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
        full = way.empty(2 * LARGE, torch.float32, CPU)
        with pytest.raises(RuntimeError, match=r"rank \d: no shared memory .*No space left.* FSDP_SHARED_MEMORY=0 in"):
            way.reduce_scatter(full, "reduction", 0)


@linux
@pytest.mark.parametrize("lack", ["switched off", "no memory", "cannot be opened", "another file"])
@on_ranks(3)
def test_one_rank_that_cannot_share_leaves_all_on_sockets(lack: str) -> None:
    contexts: dict[str, Any] = {
        "switched off": nullcontext(),
        "no memory": mock.patch.object(os, "memfd_create", side_effect=OSError(12, "Cannot allocate memory")),
        "cannot be opened": mock.patch.object(shared_memory.os, "open", side_effect=PermissionError(13, "refused")),
        "another file": mock.patch.object(_Slots, "address", (os.getpid(), 0, "00")),
    }
    if dist.get_rank() == 1:
        with contexts[lack]:
            way = shared("0" if lack == "switched off" else "1")
    else:
        way = shared()
    assert way._shared is None
    full = torch.arange(3.0 * LARGE)
    assert torch.equal(way.reduce_scatter(full.clone(), "reduction", 0).wait(), 3 * full.view(3, -1)[dist.get_rank()])


@linux
@pytest.mark.parametrize(("call", "num_closed"), [("memfd_create", 0), ("ftruncate", 1), ("posix_fallocate", 1)])
def test_memory_that_cannot_be_allocated_closes_its_file_once(
    call: str, num_closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # other tests may have left files to be closed
    monkeypatch.setattr(sys, "unraisablehook", unraised := mock.Mock())
    with mock.patch.object(os, call, side_effect=OSError), mock.patch.object(os, "close", wraps=os.close) as close:
        with pytest.raises(OSError):  # noqa: PT011
            _Slots(2)
        gc.collect()
    assert close.call_count == num_closed
    assert not unraised.called


@linux
@on_ranks(2)
def test_messages_with_checksums_go_through_sockets() -> None:
    way: Any = DirectExchange(CheckedGroup(dist.group.WORLD))  # type: ignore[arg-type]
    with mock.patch.dict(os.environ, {SHARED_MEMORY: "1"}):
        way.share_memory(1 << 20)
    assert way._shared is None


@linux
@on_ranks(2)
def test_what_was_sent_and_never_read_is_forgotten_with_the_step() -> None:
    way = shared()
    way.all_gather(torch.empty(2 * LARGE), torch.ones(LARGE), "gather", 0)  # never awaited
    way.meet("both have sent", 0)
    slots = way._shared._own
    assert not any(map(slots._is_free, slots._slots))
    way.restart_tags()  # as `fsdp.recover` does
    assert all(map(slots._is_free, slots._slots))


@linux
def test_a_killed_rank_leaves_no_memory_and_ends_the_waits_of_the_others(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        ranks(2, backend=None, grace=60).run(_exchange_until_killed, tmp_path / "store")
    waiting, killed = failed.value.outcomes
    assert killed.headline == "killed by SIGKILL"
    assert "CollectiveError: rank 0: the " in waiting.headline
    shared_files = [Path(line) for line in (tmp_path / "mapped").read_text().splitlines()]
    assert [file.name for file in shared_files] == 2 * ["memfd:fsdp.exchange (deleted)"]


def _exchange_until_killed(store: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    way = shared()
    assert way._shared is not None
    if rank == 1:
        mapped = re.findall(r"/(?:dev/shm/(?!sem\.)|memfd:).*", Path("/proc/self/maps").read_text())
        (store.parent / "mapped").write_text("\n".join(mapped))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(10**6):
        full = way.empty(2 * LARGE, torch.float32, CPU).fill_(1)
        way.reduce_scatter(full, "the reduction", number).wait()
        way.all_gather(torch.empty(2 * LARGE), torch.ones(LARGE), "the gather", number).wait()


sizes = st.integers(1, 60_000)


@linux
@settings(max_examples=60)
@given(st.data())
def test_slots_in_use_never_overlap(data: st.DataObject) -> None:
    """Any order of messages that are put, tensors that are made and dropped, and readers that read late."""
    slots = _Slots(3)
    tensors: list[tuple[Tensor, int]] = []
    messages: list[tuple[int, int, int, int, list[int]]] = []  # slot, payload, bytes, value, readers that have not read
    for value in range(1, data.draw(st.integers(1, 30)) + 1):
        action = data.draw(st.sampled_from(["put", "make", "send", "drop", "read", "read"]))
        if action == "put" or (action == "send" and tensors):
            tensor = torch.full((data.draw(sizes),), value, dtype=torch.uint8)
            if action == "send":
                tensor, value = tensors[data.draw(st.integers(0, len(tensors) - 1))]  # a strategy would keep them
            place = slots.put(tensor, [1, 2])
            messages.append((*place, tensor.nbytes, value, [1, 2]))
        elif action == "make" and (made := slots.empty(data.draw(sizes))) is not None:
            tensors.append((made.fill_(value), value))
        elif action == "drop" and tensors:
            tensors.pop(data.draw(st.integers(0, len(tensors) - 1)))
        elif action == "read" and messages:
            message = messages[data.draw(st.integers(0, len(messages) - 1))]
            slots.count_read(message[0], message[4].pop())
            if not message[4]:
                messages.remove(message)
        for tensor, filled in tensors:
            assert (tensor == filled).all()
        for _, payload, nbytes, filled, _ in messages:
            assert (slots.payload(payload, nbytes) == filled).all()
