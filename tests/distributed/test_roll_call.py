"""Ranks that take other optimizer steps than the rest are found out, and so are replicas that differ."""

from __future__ import annotations

import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy, set_watchdog
from fsdp.distributed.journal import Finding, Journal, journals
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.waiting

PATIENCE = 60.0  # seconds until a difference must have been found


def make_model() -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return FullyShardedDataParallel(nn.Linear(4, 4))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def raised_by(one_step: Callable[[int], None]) -> str:
    """Take steps until one raises, and return what it says."""
    until = time.monotonic() + PATIENCE
    for number in itertools.count():
        try:
            one_step(number)
        except RuntimeError as error:
            return str(error)
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return ""


Misstep = Callable[[int, nn.Module], Callable[[int], None]]


def another_learning_rate(rank: int, model: nn.Module) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def one_step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.2 if rank == 1 and number == 2 else 0.1
        step(model, optimizer)

    return one_step


def no_step(rank: int, model: nn.Module) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda number: step(model, *[optimizer] * (rank != 1))


def two_steps(rank: int, model: nn.Module) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda number: step(model, *[optimizer] * (2 if rank == 1 and number == 1 else 1))


@pytest.mark.parametrize(
    ("misstep", "others", "one"),
    [
        (another_learning_rate, "AdamW.step() of group 0, 1 parameters: lr=0.1, betas=(0.9, 0.999),", ": lr=0.2, "),
        (no_step, "SGD.step() of group 0, 1 parameters: lr=0.1", "rank 1: nothing\n"),
        (two_steps, "SGD.step() of group 0, 1 parameters: lr=0.1", "(2 times)\n"),
    ],
)
@on_ranks(3, backend=None)
def test_a_rank_that_steps_otherwise_is_found_out_on_all_ranks(
    tmp_path: Path, misstep: Misstep, others: str, one: str
) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=3, store=dist.FileStore(str(tmp_path / "store"), 3))
    error = raised_by(misstep(rank, model := make_model()))
    with pytest.raises(RuntimeError, match="different optimizer steps"):  # and from now on
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.destroy_process_group()
    assert "the ranks have taken different optimizer steps after backward " in error
    assert f"  ranks 0, 2: {others}" in error
    assert "  rank 1: " in error
    assert one in error
    assert "Take the same steps on every rank" in error


# What is changed between steps


def shard_written(model: FullyShardedDataParallel) -> None:
    with torch.no_grad():
        next(model.parameters()).clamp_(-1, 1)


def gradient_lost(model: FullyShardedDataParallel) -> None:
    model.zero_grad()


def gradient_written(model: FullyShardedDataParallel) -> None:
    next(model.parameters()).grad.mul_(2)  # type: ignore[union-attr]


Change = Callable[[FullyShardedDataParallel], None]


@pytest.mark.parametrize(
    ("change", "words", "raises"),
    [
        (shard_written, "the shard of root (Linear) was written", False),
        (gradient_lost, "root (Linear) has no gradient of weight", True),
        (gradient_written, "gradients were written ", False),
    ],
)
def test_what_one_rank_changes_alone_is_a_warning_or_if_asked_for_an_error(
    ranks: RankPool, tmp_path: Path, change: Change, words: str, raises: bool
) -> None:
    found = ranks(2, backend=None).run(_change, tmp_path, change, raises)
    for kind, text in found:
        assert kind == ("RuntimeError" if raises else "UserWarning")
        assert "some ranks have made changes that other ranks have not, found at the step after backward " in text
        assert f"  rank 1: between steps, {words}" in text


def _change(folder: Path, change: Change, raises: bool) -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(folder / "store"), 2))
    set_watchdog(raises=raises)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one_step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if number == 3 and rank == 1:
            change(model)
        optimizer.step()
        if not raises:  # until both have heard of it
            dist.all_reduce(heard := torch.tensor(len(warned)))
            if heard == 2:
                raise RuntimeError

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = raised_by(one_step)
    dist.destroy_process_group()
    return ("UserWarning", str(warned[0].message)) if warned else ("RuntimeError", error)


# What must not be taken for a difference


def same_everywhere() -> list[dict[int, list[str]]]:
    """Collective. Return what is in the journals of this rank, after having seen that it is the same on all."""
    own = {each.name: {page: each.lines(page) for page in range(each.page + 1)} for each in list(journals)}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for other in found:
        for name in own.keys() & other.keys():
            assert own[name] == other[name]
    return list(own.values())


@on_ranks(4)
def test_ranks_of_a_mesh_keep_the_same_journals() -> None:
    before = {each.name for each in list(journals)}
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": init_device_mesh("cpu", (2, 2))}
    model: Any = FullyShardedDataParallel(nn.Linear(4, 4), **options)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept: list[Any] = [None] * 4
    dist.all_gather_object(kept, [(each.name, each.ranks) for each in list(journals) if each.name not in before])
    for rank, of_rank in enumerate(kept):
        assert sorted(len(ranks) for _, ranks in of_rank) == [2, 4]
        for name, ranks in of_rank:
            assert rank in ranks
            assert all((name, ranks) in kept[other] for other in ranks)


@on_ranks(2)
def test_models_over_different_groups_of_the_same_ranks_are_not_compared_with_each_other() -> None:
    before, models = {each.name for each in list(journals)}, []
    for group in (dist.new_group([0, 1]), init_device_mesh("cpu", (1, 2))):
        model: Any = FullyShardedDataParallel(nn.Linear(4, 4), process_group=group)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        models.append(model)  # or the first one would be freed, on some ranks later than on others
    assert len({each.name for each in list(journals)} - before) == 2
    del model, models
    gc.collect()  # with the journals, which other tests read


@on_ranks(2)
def test_what_ranks_may_do_differently_makes_no_difference() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = FullyShardedDataParallel(body, use_orig_params=True)
    rank = dist.get_rank()
    # In another order, of parameters that this rank has something of, and with what is nobody else's concern.
    ours = [param for param in model.parameters() if param.numel()]
    first = torch.optim.SGD(ours, lr=0.1 + 1e-12 * rank)
    first.param_groups[0]["note"] = f"of rank {rank}"
    second = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    optimizers = [first, second][:: 1 - 2 * rank]
    of_each = {param: torch.optim.SGD([param], lr=0.01) for param in ours}
    for param in ours:
        param.register_post_accumulate_grad_hook(lambda param: of_each[param].step())
    for _ in range(3):
        with model.no_sync():
            for _ in range(1 + rank):
                model(torch.ones(2, 4)).sum().backward()
        step(model, *optimizers)
    (found,) = same_everywhere()
    assert found[3] == [
        "Adam.step() of group 0: lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0",
        "SGD.step() of group 0: lr=0.01, momentum=0, dampening=0, weight_decay=0",
        "SGD.step() of group 0: lr=0.1, momentum=0, dampening=0, weight_decay=0",
    ]


@on_ranks(2)
def test_ranks_that_have_run_out_of_batches_step_as_the_others_do() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp.join(model, optimizer):
        for number in range(2 + 3 * dist.get_rank()):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            step(model, optimizer)
    (found,) = same_everywhere()
    assert sorted(page for page, lines in found.items() if lines) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("originals", [False, True])
@on_ranks(2)
def test_what_all_ranks_change_makes_no_difference(tmp_path: Path, originals: bool) -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), use_orig_params=originals)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    fsdp.save(tmp_path / "saved", model, optimizer)
    state, local = model.state_dict(), model.local_state_dict()
    for number in range(8):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        model(torch.ones(2, 4)).sum().backward()
        if number % 3 == 0:
            model.clip_grad_norm_(0.1)
        elif number == 7:
            with model.summon_full_params(with_grads=True):
                pass
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                if number == 1 and param.numel():
                    param.clamp_(-1, 1)
                elif number == 2 and param.numel():
                    param.data.mul_(0.9)
        if number == 3:
            model.load_state_dict(state)
        elif number == 4:
            model.load_local_state_dict(local)
        elif number == 5:
            fsdp.load(tmp_path / "saved", model, optimizer)
        elif number == 6:
            with model.summon_full_params(rank0_only=True), torch.no_grad():
                for param in model.parameters() if dist.get_rank() == 0 else ():
                    param.mul_(2)
    assert len(same_everywhere()[0]) > 8


# Replicas


@on_ranks(2, backend=None)
def test_replicas_that_drift_apart_are_found_out(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(tmp_path / "store"), 2))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_watchdog(replicas_every=3)

    def one_step(number: int) -> None:
        step(model, optimizer)
        if number == 5 and rank == 1:
            with torch.no_grad():
                next(model.parameters()).numpy()[-1] += 1e-6  # which torch does not count

    error = raised_by(one_step)
    dist.destroy_process_group()
    assert "replicas of the same shards have different values" in error
    assert "  rank 0: bias of unit 'root (Linear)' has the checksum " in error
    assert "weight" not in error


# Journals


def test_a_page_is_closed_when_the_next_one_is_begun_and_lost_when_there_are_too_many() -> None:
    journal = Journal("of a test", [1, 0], Finding("", ""))
    journal.note("a", "one")
    assert journal.closed() == (0, [])
    journal.page = 2
    first, (noted, empty) = journal.closed()
    assert (first, bool(noted), empty) == (0, True, "")
    for page in range(2, 2000):
        journal.page = page
        journal.note("a", "one")
    first, digests = journal.closed()
    assert first == 2000 - 1024
    assert set(digests) == {noted}


def test_of_notes_with_one_text_those_of_one_thing_count() -> None:
    journal = Journal("of a test", [0, 1], Finding("", ""))
    for what in ("a", "b", "b"):
        journal.note(what, "one")
    assert journal.lines(0) == ["one (2 times)"]
