"""The stager's host memory: used again when a copy was dropped and never before, released, limited, shared."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from fsdp import StateDictStager
from fsdp.distributed.devices import Arrival, CopyStream
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool

KIB = 256  # float32 values in a KiB
MAPPED = 1 << 16  # float32 values from which on memory is mapped, here

every_size = pytest.mark.parametrize("numel", [1, KIB, MAPPED + 3], ids=["4 bytes", "1 KiB", "mapped"])
every_memory = pytest.mark.parametrize("share_memory", [False, True], ids=["private", "shared"])


@pytest.fixture(autouse=True)
def _map_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp.state_dict_utils.host_memory._MAPPED_BYTES", 4 * MAPPED)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Used again


@every_size
@every_memory
def test_memory_of_a_copy_that_was_dropped_is_used_again(numel: int, share_memory: bool) -> None:
    stager = StateDictStager(share_memory=share_memory)
    original = torch.zeros(numel)
    copied = stager.stage(original)
    first = address(copied)
    del copied
    original.fill_(1)
    copied = stager.stage(original)
    assert address(copied) == first
    assert torch.equal(copied, original)


HOLDERS = {
    "the tensor": lambda copied: copied,
    "a view": lambda copied: copied[2:],
    "another dtype": lambda copied: copied.view(torch.uint8),
    "the storage": lambda copied: copied.untyped_storage(),
    "numpy": lambda copied: copied.numpy(),
    "the computation of something": lambda copied: (copied.requires_grad_() ** 2).grad_fn,
}


@parametrize_pairs(holder=list(HOLDERS), numel=[1, KIB, MAPPED + 3], share_memory=[False, True])
def test_a_copy_is_not_written_over_while_somebody_holds_it(holder: str, numel: int, share_memory: bool) -> None:
    stager = StateDictStager(share_memory=share_memory)
    original = torch.zeros(numel)
    copied = stager.stage(original)
    first = address(copied)
    kept = HOLDERS[holder](copied)
    del copied
    assert address(stager.stage(original)) != first
    del kept
    stager.stage(original)
    assert stager.held_bytes == 4 * numel


def test_a_variable_that_still_holds_the_last_copy_takes_memory_for_two() -> None:
    stager = StateDictStager()
    original = torch.zeros(KIB)
    held = set()
    for step in range(20):
        original.fill_(step)
        copied = stager.stage(original)
        held.add(stager.held_bytes)
        assert copied[0] == step
    assert max(held) == 2 * 1024


def test_memory_for_more_copies_is_given_back_when_they_were_dropped() -> None:
    stager = StateDictStager()
    original = torch.zeros(KIB)
    copies = [stager.stage(original) for _ in range(5)]
    assert stager.held_bytes == 5 * 1024
    copies.clear()
    stager.stage(original)
    assert stager.held_bytes == 1024


def test_two_trees_with_a_common_tensor_have_it_once_in_memory() -> None:
    stager = StateDictStager()
    common = torch.zeros(KIB)
    stager.stage([common])
    stager.stage({"again": common[1:], "more": torch.zeros(KIB)})
    assert stager.held_bytes == 2 * 1024 - 1024  # what was new is gone with its original


# Released


def test_memory_is_released_when_its_original_dies() -> None:
    stager = StateDictStager()
    original, other = torch.zeros(KIB), torch.zeros(KIB)
    stager.stage([original, other])
    view = original[3:]
    del original
    assert stager.held_bytes == 2 * 1024  # a view keeps it alive
    del view
    assert stager.held_bytes == 1024


def test_a_copy_outlives_its_original_and_is_counted_until_it_is_dropped() -> None:
    stager = StateDictStager()
    copied = stager.stage(torch.ones(KIB))
    assert stager.held_bytes == 1024
    assert copied.sum() == KIB
    del copied
    assert stager.held_bytes == 0


def test_a_thousand_stagings_of_the_same_tensors_hold_what_one_does() -> None:
    stager = StateDictStager()
    tree = {"w": torch.zeros(KIB), "steps": [torch.tensor(0) for _ in range(3)]}
    for _ in range(1000):
        stager.stage(tree)
    assert stager.held_bytes == 1024 + 3 * 8


@every_memory
def test_hundreds_of_stagings_of_new_tensors_leave_nothing(share_memory: bool) -> None:
    stager = StateDictStager(share_memory=share_memory)
    gc.collect()
    objects = None
    for step in range(300):
        stager.stage({"w": torch.zeros(KIB), "view": torch.zeros(4)[1:]})
        if step == 100:
            objects = len(gc.get_objects())
    assert stager.held_bytes == 0
    assert objects is not None
    assert len(gc.get_objects()) < objects + 100  # and no record of them


def test_staging_leaves_no_garbage_that_holds_copies() -> None:
    gc.collect()
    gc.disable()
    try:
        storage = weakref.ref(StateDictStager().stage({"a": [torch.zeros(KIB)]})["a"][0].untyped_storage())
        assert storage() is None
    finally:
        gc.enable()


def test_a_storage_that_was_resized_gets_memory_of_its_new_size() -> None:
    stager = StateDictStager()
    original = torch.zeros(KIB)
    stager.stage(original)
    original.resize_(2 * KIB).fill_(1)
    assert torch.equal(stager.stage(original), original)
    assert stager.held_bytes == 2 * 1024
    original.untyped_storage().resize_(0)
    assert stager.stage(original.resize_(0)).numel() == 0


def test_closing_releases_what_nobody_holds_and_leaves_the_rest() -> None:
    with StateDictStager() as stager:
        held, other = torch.ones(KIB), torch.ones(KIB)
        copied = stager.stage([held, other])[0]
    assert stager.held_bytes == 1024
    assert copied.sum() == KIB
    with pytest.raises(RuntimeError, match="was closed"):
        stager.stage(held)


def test_a_copy_outlives_the_stager() -> None:
    copied = StateDictStager().stage(torch.ones(MAPPED))
    gc.collect()
    assert copied.sum() == MAPPED


# Limited


def test_a_tree_larger_than_allowed_is_refused_with_both_numbers() -> None:
    stager = StateDictStager(max_bytes=3000, wait_seconds=math.inf)
    tree = [torch.zeros(KIB) for _ in range(3)]
    with pytest.raises(MemoryError, match="the tree has 3072 bytes of tensors, but max_bytes=3000"):
        stager.stage([*tree, tree[0][2:], torch.empty(9, device="meta")])
    assert stager.stage(tree[:2])[1].numel() == KIB


def test_copies_that_are_held_count() -> None:
    stager = StateDictStager(max_bytes=1024)
    original = torch.zeros(KIB)
    copied = stager.stage(original)
    with pytest.raises(MemoryError, match=r"1024 bytes .* earlier copies still use .* \(waited 0 s\)"):
        stager.stage(original)
    del copied
    assert stager.stage(original) is not None


def test_what_is_kept_to_be_used_again_makes_room() -> None:
    stager = StateDictStager(max_bytes=2048)
    first, second = torch.zeros(KIB), torch.zeros(2 * KIB)
    stager.stage(first)
    assert torch.equal(stager.stage(second), second)
    assert stager.held_bytes == 2048
    assert torch.equal(stager.stage(first), first)
    assert stager.held_bytes == 1024


def test_only_as_much_is_evicted_as_it_takes_and_what_was_not_staged_for_longest_first() -> None:
    stager = StateDictStager(max_bytes=3 * 1024)
    used, idle, other, new = (torch.zeros(KIB) for _ in range(4))
    for original in (used, idle, other):
        stager.stage(original)
    kept = address(stager.stage(used))
    stager.stage(new)
    assert stager.held_bytes == 3 * 1024
    del new
    assert stager.held_bytes == 2 * 1024
    assert address(stager.stage(used)) == kept


def test_a_copy_that_is_garbage_makes_room() -> None:
    stager = StateDictStager(max_bytes=1024)
    original = torch.zeros(KIB)
    gc.disable()
    try:
        tree: list[Any] = [original]
        tree.append(tree)
        stager.stage(tree)
        assert stager.stage(original).numel() == KIB
    finally:
        gc.enable()


def test_staging_waits_until_another_thread_drops_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    stager = StateDictStager(max_bytes=1024, wait_seconds=math.inf)
    original = torch.zeros(KIB)
    copies, waits = [stager.stage(original)], threading.Event()
    written: list[float] = []

    def write() -> None:
        waits.wait()
        written.append(copies.pop().sum().item())

    def sleep(seconds: float) -> None:
        waits.set()
        real_sleep(seconds)

    real_sleep = time.sleep
    monkeypatch.setattr("fsdp.state_dict_utils.host_memory.time.sleep", sleep)
    writer = threading.Thread(target=write)
    writer.start()
    original.fill_(1)
    assert stager.stage(original).sum() == KIB
    writer.join()
    assert written == [0]


def test_waiting_ends_with_an_error_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fsdp.state_dict_utils.host_memory.time.monotonic", lambda: now[0])
    monkeypatch.setattr("fsdp.state_dict_utils.host_memory.time.sleep", lambda seconds: now.append(now.pop() + 10))
    stager = StateDictStager(max_bytes=1024, wait_seconds=60)
    original = torch.zeros(KIB)
    copied = stager.stage(original)
    with pytest.raises(MemoryError, match=r"\(waited 60 s\)"):
        stager.stage(original)
    assert now == [160.0]
    assert copied.sum() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": -1},
        {"max_bytes": 1, "wait_seconds": -1.0},
        {"wait_seconds": 1.0},
        {"max_bytes": 1, "wait_seconds": math.nan},
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(max_bytes|wait_seconds)"):
        StateDictStager(**options)


# Shared by threads and processes


def test_threads_that_stage_at_once_get_right_copies() -> None:
    stager = StateDictStager()
    originals = [torch.full((1000,), float(number)) for number in range(4)]
    common = torch.arange(1000.0)
    start = threading.Barrier(4)
    wrong: list[int] = []

    def work(number: int) -> None:
        start.wait()
        for _ in range(100):
            mine, ours = stager.stage([originals[number], common])
            if not (torch.equal(mine, originals[number]) and torch.equal(ours, common)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    stager.stage([*originals, common])
    assert stager.held_bytes == 5 * 4000


def test_an_object_may_stage_while_it_is_staged() -> None:
    stager = StateDictStager()

    class Stages:
        def __reduce__(self) -> Any:
            return list, ([stager.stage(weight).sum()],)

    weight = torch.ones(3)
    assert stager.stage([Stages(), weight])[0] == [3]


def test_another_process_reads_shared_copies_without_a_copy(ranks: RankPool) -> None:
    context = mp.get_context("forkserver")  # the server of `ranks`, which has imported torch
    questions, answers = context.Queue(), context.Queue()
    process = context.Process(target=_sum_and_mark, args=(questions, answers), daemon=True)
    process.start()
    before = mp.get_sharing_strategy()
    try:
        for strategy in sorted(mp.get_all_sharing_strategies()):
            mp.set_sharing_strategy(strategy)
            weight = torch.arange(4.0)
            tree = {"w": weight, "view": weight[2:], "large": torch.ones(MAPPED)}
            copied = StateDictStager(share_memory=True).stage(tree)
            assert all(each.is_shared() for each in copied.values())
            questions.put(copied)
            assert answers.get(timeout=120) == [6, 5, MAPPED]
            assert copied["w"][2] == -1  # what was written there is seen here
    finally:
        mp.set_sharing_strategy(before)
        questions.put(None)
        process.join()


def _sum_and_mark(questions: Any, answers: Any) -> None:
    while (tree := questions.get()) is not None:
        sums = [tree[name].sum().item() for name in ("w", "view", "large")]
        tree["view"][0] = -1
        answers.put(sums)


def test_pinning_without_an_accelerator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp.state_dict_utils.host_memory.accelerator", lambda: None)
    with pytest.raises(RuntimeError, match=r"needs an accelerator.* Pass pin_memory=torch.accelerator.is_available"):
        StateDictStager(pin_memory=True)


# Without waiting


class RecordingLane(CopyStream):
    """A stream that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fork(self) -> AbstractContextManager[None]:
        self.calls.append("fork")
        return nullcontext()

    def arrival(self) -> Arrival:
        calls = self.calls

        class Noting(Arrival):
            def wait(self) -> None:
                calls.append("stream waits")

            def synchronize(self) -> None:
                calls.append("host waits")

        return Noting()


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> RecordingLane:
    lane = RecordingLane()
    monkeypatch.setattr("fsdp.state_dict_utils.stager.new_copy_stream", lambda device: lane)
    return lane


def test_all_copies_are_queued_on_one_stream_and_awaited_once(lane: RecordingLane) -> None:
    StateDictStager().stage([torch.ones(KIB) for _ in range(5)])
    assert lane.calls == ["fork", "host waits"]


def test_without_blocking_the_caller_says_when_to_wait(lane: RecordingLane) -> None:
    pending = StateDictStager().stage([torch.ones(KIB)], non_blocking=True)
    assert lane.calls == ["fork"]
    pending.protect()
    assert lane.calls == ["fork", "stream waits"]
    pending.wait()
    assert lane.calls == ["fork", "stream waits", "host waits"]


def test_plain_containers_and_parameters_do_not_wait_and_what_may_read_values_does(lane: RecordingLane) -> None:
    state = nn.Linear(2, 2).state_dict()
    tree = [state, defaultdict(list, {("a", 1): state}), nn.Parameter(torch.ones(2)), deque([torch.ones(1)])]
    pending: Any = StateDictStager().stage(tree, non_blocking=True)
    assert lane.calls == ["fork"]
    pending.wait()
    lane.calls.clear()
    pending = StateDictStager().stage([*tree, nn.Linear(2, 2), torch.ones(3)], non_blocking=True)
    assert lane.calls == ["fork", "host waits"]  # the module has a __setstate__


def test_originals_live_until_a_copy_has_arrived(lane: RecordingLane) -> None:
    original = torch.ones(KIB)
    alive = weakref.ref(original.untyped_storage())
    pending = StateDictStager().stage([original], non_blocking=True)
    del original
    assert alive() is not None
    pending.wait()
    assert alive() is None


def test_a_copy_that_is_dropped_under_way_is_awaited(lane: RecordingLane) -> None:
    stager = StateDictStager()
    original = torch.ones(KIB)
    pending = stager.stage([original], non_blocking=True)
    assert lane.calls == ["fork"]
    del pending
    assert lane.calls == ["fork", "host waits"]
    stager.stage([original])
    assert stager.held_bytes == 1024


def test_on_a_cpu_a_copy_is_there_at_once() -> None:
    original = torch.ones(3)
    pending = StateDictStager().stage({"w": original}, non_blocking=True)
    original.zero_()
    assert pending.wait()["w"].tolist() == [1, 1, 1]
    assert pending.wait() is pending.wait()
