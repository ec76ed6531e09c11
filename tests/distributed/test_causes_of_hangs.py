"""Ranks that take different paths are told which of them did what, in which pass, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard, optim_utils
from fsdp.distributed.communicator import CollectiveError
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.standing import watched

pytestmark = pytest.mark.waiting

FORMS = ["flat", "orig", "rows"]


class Net(nn.Module):
    """Three blocks and a head, run in an order that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.order = [0, 1, 2]
        self.is_wide = False  # the blocks run beside each other

    def forward(self, x: Tensor) -> Any:
        if self.is_wide:
            return [block(x) for block in self.blocks]
        for number in self.order:
            x = torch.tanh(self.blocks[number](x))
        return self.head(x)


class Training:
    """A training on one rank, in one of the forms."""

    def __init__(self, form: str, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        torch.manual_seed(0)
        self.form, self.folder, self.net = form, folder, Net()
        options: dict[str, Any] = {} if group is None else {"process_group": group}
        if form == "rows":
            options = {} if group is None else {"mesh": DeviceMesh.from_group(group, "cpu")}
            for block in self.net.blocks:
                fully_shard(block, **options)
            self.model: Any = fully_shard(self.net, **options)
        else:
            options |= {"use_orig_params": form == "orig"}
            for number, block in enumerate(self.net.blocks):
                self.net.blocks[number] = FullyShardedDataParallel(block, **options)
            self.model = FullyShardedDataParallel(self.net, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def forward(self) -> Tensor:
        loss: Tensor = self.model(torch.ones(2, 4)).sum()
        return loss

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def without_gradients(self) -> None:
        with torch.no_grad():
            self.forward()

    def without_reduction(self) -> None:
        if self.form == "rows":
            self.model.set_requires_gradient_sync(False)
            self.step()
        else:
            with self.model.no_sync():
                self.forward().backward()

    def freeze(self, name: str) -> None:
        module = self.net.blocks[1]
        if name:
            getattr(getattr(module, "module", module), name).requires_grad_(False)
        else:
            module.requires_grad_(False)

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def save(self) -> None:
        fsdp.save(self.folder / "saved", self.model)

    def set(self, **what: Any) -> None:
        vars(self.net).update(what)


# What one rank does after two steps, the others going on to train; and what all are told.
OTHERS = "rank(s 0, 2| 0)"
FAULTS: dict[str, tuple[Callable[[Training], Any], str]] = {
    "a unit skipped": (
        lambda job: job.set(order=[0, 2]),
        r"Rank 1 left blocks\.1 out of forward 3|Rank 1 ran blocks\.2 before blocks\.1 in forward 3, or left",
    ),
    "the last unit skipped": (
        lambda job: job.set(order=[0, 1]),
        rf"Rank 1 left blocks\.2 out of forward 3, which {OTHERS} ran",
    ),
    "a unit used twice": (
        lambda job: job.set(order=[0, 0, 1, 2]),
        rf"Rank 1 ran blocks\.0 twice in forward 3, {OTHERS} once",
    ),
    "a forward more": (
        Training.forward,
        rf"Rank 1 began forward 4 while {OTHERS} (is|are) in backward 3.*backward\(\)",
    ),
    "no gradients": (
        Training.without_gradients,
        rf"Rank 1 runs forward 3 without gradients, {OTHERS} with gradients.*torch\.no_grad\(\)",
    ),
    "no reduction": (Training.without_reduction, rf"Rank 1 runs backward 3 under no_sync\(\), {OTHERS} with reduction"),
    "evaluation": (lambda job: job.model.eval(), rf"Rank 1 runs forward 3 in eval\(\), {OTHERS} in train\(\)"),
    "a frozen unit": (
        lambda job: job.freeze(""),
        rf"Rank 1 did not train blocks\.1 in backward 3, where it is frozen; {OTHERS} did.*requires_grad_",
    ),
    "a call to save": (Training.save, r"Rank 1 is in fsdp\.save\(\), which every rank must call, and .* in forward 3"),
    "a call for a fingerprint": (
        lambda job: fsdp.fingerprint(job.model),
        r"Rank 1 is in fsdp\.fingerprint\(\), which every rank must call, and .* in forward 3",
    ),
    "a call to clip": (Training.clip, r"Rank 1 is in .*clip_grad_norm_\(\), which every rank must call"),
    "a call for the optimizer's state": (
        lambda job: optim_utils.full_optim_state_dict(job.model, job.optimizer),
        r"Rank 1 is in full_optim_state_dict\(\), which every rank must call, and .* in forward 3",
    ),
}


# Each kind in one of the forms, at 2 or 3 ranks. (The state of an optimizer is the wrapper's.)
OF_WRAPPERS = "a call for the optimizer's state"
CASES = [
    (kind, FORMS[number % (2 if kind == OF_WRAPPERS else 3)], 2 + (number % 4 == 0))
    for number, kind in enumerate(FAULTS)
]


@pytest.mark.parametrize(("kind", "form", "world_size"), CASES)
@on_ranks("world_size", backend=None)
def test_the_cause_of_a_hang_is_named_on_every_rank(tmp_path: Path, kind: str, form: str) -> None:
    def go_wrong(job: Training, rank: int) -> None:
        job.step()
        job.step()
        if rank == 1:
            FAULTS[kind][0](job)
        for _ in range(3):
            job.step()

    error = _error_of(go_wrong, tmp_path, form)
    # On a busy machine a rank may raise, and so leave the step, before another rank has written its report.
    assert re.search(rf"\n(The others wait for rank \d\. )?({FAULTS[kind][1]}).*\n\(", error), error


@pytest.mark.parametrize("place", ["train.py", "torch/distributed/checkpoint/state_dict.py"])
@on_ranks(2, backend=None)
def test_a_rank_in_a_collective_of_torchs_is_not_busy(tmp_path: Path, place: str) -> None:
    """It waits, also in a function that may take long for a good reason."""
    with _watched(tmp_path) as rank:
        names: dict[str, Any] = {"call": partial(dist.all_reduce, torch.ones(1), group=dist.new_group([0, 1]))}
        exec(compile("def get_state(): call()", f"/lib/{place}", "exec"), names)
        job = Training("flat", tmp_path)
        job.step()
        if rank == 0:
            expected = r"Rank 1 is in all_reduce\(\), which every rank must call, and rank 0 in forward 2"
            with pytest.raises(CollectiveError, match=expected):
                job.step()
        names["get_state"]()


@contextmanager
def _watched(folder: Path) -> Iterator[int]:
    """Yield the rank in a process group of its own, in which waits end soon after all ranks have come to theirs."""
    folder.mkdir(exist_ok=True)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        with watched(raises=True):
            with redirect_stderr(StringIO()):
                yield rank
            store.set(f"rank {rank} is done", "")
            store.wait([f"rank {each} is done" for each in range(size)])  # until then they are asked where they are
    finally:
        dist.destroy_process_group()


def _error_of(train: Callable[[Training, int], Any], folder: Path, form: str) -> str:
    with _watched(folder) as rank, pytest.raises(CollectiveError) as raised:
        train(Training(form, folder), rank)
    return str(raised.value)


@on_ranks(2, backend=None)
def test_units_in_another_order_in_the_first_forward_are_named(tmp_path: Path) -> None:
    def train(job: Training, rank: int) -> None:
        job.set(order=[2, 1, 0] if rank == 1 else [0, 1, 2])
        job.step()
        job.step()

    error = _error_of(train, tmp_path, "flat")
    cause = r"Rank 1 ran blocks\.2 before blocks\.0 in forward 1.*; rank 0 ran blocks\.0 first"
    assert re.search(cause, error), error


@on_ranks(2, backend=None)
def test_units_in_another_order_in_backward_are_named(tmp_path: Path) -> None:
    def train(job: Training, rank: int) -> None:
        job.set(is_wide=True)
        outputs = job.model(torch.ones(2, 4))
        for number in [2, 1, 0] if rank == 1 else [0, 1, 2]:
            outputs[number].sum().backward()

    error = _error_of(train, tmp_path, "rows")
    assert re.search(r"Rank 1 ran blocks\.2 before blocks\.0 in backward 1.*; rank 0 ran blocks\.0 first", error), error


@parametrize_pairs(at_most=3, form=FORMS, world_size=[2, 3])
def test_models_over_other_ranks_are_named(ranks: RankPool, tmp_path: Path, form: str, world_size: int) -> None:
    error = ranks(world_size, backend=None).run(_shard_over_other_ranks, tmp_path, form)[0]
    every, fewer = f"ranks 0-{world_size - 1}", "itself alone" if world_size == 2 else "ranks 0-1"
    assert re.search(rf"shards over {every}, and .* over {fewer}|shards over {fewer}, and .* over {every}", error)
    assert "Pass the same ranks on every rank" in error


def _shard_over_other_ranks(folder: Path, form: str) -> str:
    with _watched(folder) as rank:
        size = dist.get_world_size()
        every, fewer = dist.new_group(list(range(size))), dist.new_group([1] if size == 2 else [0, 1])
        job = Training(form, folder, fewer if rank == 1 else every)
        if rank == 1 and size == 2:
            job.step()  # and others wait for it
            return ""
        with pytest.raises(CollectiveError) as raised:
            job.step()
        return str(raised.value)
