"""`record_fingerprints` and `python -m fsdp compare` name the first place in which two trainings differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import SameBits
from fsdp.__main__ import main
from fsdp.checkpoint.compare import Recorded, differences
from fsdp.distributed.tree_sum import TreeSum
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name
from fsdp.engine.unit import unit_of, unit_of_wrapper, units_in
from fsdp.engine.unsharded_params import UnshardedParameters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.same_bits import FORMS, FORMS_AND_OPTIMIZERS, OPTIMIZERS, loss_of, tokens_of, writer

STEPS, MICRO_BATCHES = 2, 4
STEP, NUMBER, RANK = (
    1,
    3,
    1,
)  # where something is planted: of two ranks, the second one has the micro-batch of odd number


class Training:
    """A training in which something can be planted, in one micro-batch or in one step."""

    def __init__(self, form: str = "orig_params", optimizer: str = "AdamW") -> None:
        self.model = writer(FORMS[form])
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.bits = SameBits(self.model, MICRO_BATCHES)

    def module(self, name: str) -> nn.Module:
        (found,) = [each for path, each in self.model.named_modules() if clean_name(path) == name]
        return found

    def shard(self, name: str) -> nn.Parameter:
        (found,) = [each for path, each in self.model.named_parameters() if clean_name(path) == name]
        return found

    def record(self, path: Path, in_micro_batch: Plant | None = None, in_step: Plant | None = None) -> None:
        with fsdp.record_fingerprints(self.model, path):
            for step in range(STEPS):
                self.optimizer.zero_grad()
                with self._planted(in_step, step == STEP):
                    for number in self.bits.step(step):
                        tokens = tokens_of(step, number)
                        with self._planted(in_micro_batch, (step, number) == (STEP, NUMBER)) as changed:
                            loss_of(self.model, tokens if changed is None else changed).backward()
                    self.optimizer.step()

    def _planted(self, plant: Plant | None, is_here: bool) -> AbstractContextManager[Tensor | None]:
        return nullcontext() if plant is None or not is_here else plant(self)


Plant = Callable[[Training], AbstractContextManager[Any]]


# What is planted


@contextmanager
def another_seed_in_one_dropout(training: Training) -> Iterator[None]:
    handle = training.module("blocks.1.2").register_forward_pre_hook(lambda *_: torch.manual_seed(5) and None)
    yield
    handle.remove()


def unit_of_model(training: Training) -> Any:
    return unit_of_wrapper(training.model) or unit_of(training.model)


@contextmanager
def a_scaled_gradient(training: Training) -> Iterator[None]:
    (unit,) = [unit for unit in units_in(unit_of_model(training)) if unit.name == "blocks.0"]
    (handle,) = unit.handles
    original: Any = handle.on_gradient

    def scaled(handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
        if handle.layout.slots[slot].name == "3.weight":
            leaf.grad = leaf.grad * 2
        original(handle, slot, leaf)

    handle.on_gradient = scaled
    yield
    handle.on_gradient = original


@contextmanager
def a_stale_weight(training: Training) -> Iterator[None]:
    original = UnshardedParameters.end_gather

    def stale(unsharded: UnshardedParameters, *args: Any, **kwargs: Any) -> None:
        original(unsharded, *args, **kwargs)
        if unsharded.full.numel() < 200:  # a block
            unsharded.full[-30] += 1e-3

    with mock.patch.object(UnshardedParameters, "end_gather", stale):
        yield


@contextmanager
def a_buffer(training: Training) -> Iterator[None]:
    (buffer,) = training.model.buffers()
    before = buffer.clone()
    buffer[3] += 1e-6
    yield
    buffer.copy_(before)


@contextmanager
def another_batch(training: Training) -> Iterator[Tensor]:
    yield tokens_of(STEP, 17)


@contextmanager
def another_kernel(training: Training) -> Iterator[None]:
    handle = training.module("blocks.0.3").register_forward_hook(lambda _, __, output: output * (1 + 1e-6))
    yield
    handle.remove()


@contextmanager
def another_rounding_of_sums(training: Training) -> Iterator[None]:
    # As another order of additions may give. Whether one does depends on the values, and so on the processor's kernels.
    original = TreeSum.total

    def next_to_it(tree: TreeSum) -> Tensor:
        total = original(tree)
        return total.nextafter(torch.full_like(total, torch.inf))

    with mock.patch.object(TreeSum, "total", next_to_it):
        yield


@contextmanager
def another_learning_rate(training: Training) -> Iterator[None]:
    training.optimizer.param_groups[0]["lr"] *= 1.0001
    yield


@contextmanager
def a_clipped_gradient(training: Training) -> Iterator[None]:
    original = training.optimizer.step

    def clip_and_step() -> None:
        grad = training.shard("head.bias").grad
        if grad is not None:
            grad.mul_(0.5)
        original()

    with mock.patch.object(training.optimizer, "step", clip_and_step):
        yield


def _after_step(change: Callable[[Training, nn.Parameter], Any]) -> Plant:
    """Of a parameter of which the second rank has elements."""

    @contextmanager
    def plant(training: Training) -> Iterator[None]:
        param = training.shard("blocks.1.3.bias")
        run = (lambda *_: change(training, param)) if dist.get_rank() == RANK else (lambda *_: None)
        handle = training.optimizer.register_step_post_hook(run)
        yield
        handle.remove()

    return plant


a_written_weight = _after_step(lambda _, param: param.data[-1:].mul_(2))
a_written_state = _after_step(lambda training, param: training.optimizer.state[param]["exp_avg_sq"][-1:].mul_(2))
a_counted_step = _after_step(lambda training, param: training.optimizer.state[param]["step"].add_(1))

IN_MICRO_BATCH: dict[Plant, str] = {
    another_seed_in_one_dropout: "forward output of unit 'blocks.1'",
    a_scaled_gradient: "gradient of blocks.0.3.weight (unit 'blocks.0')",
    a_stale_weight: "weight in forward of blocks.0.3.weight (unit 'blocks.0')",
    a_buffer: "buffer of shift (unit 'root')",
    another_batch: "forward input of unit 'root'",
    another_kernel: "forward output of unit 'blocks.0'",
}
IN_STEP: dict[Plant, str] = {
    another_rounding_of_sums: "reduced gradient of scale (unit 'root')",
    another_learning_rate: "optimizer option of lr of group 0",
    a_clipped_gradient: "reduced gradient of head.bias (unit 'root')",
    a_written_weight: "new weight of blocks.1.3.bias (unit 'blocks.1')",
    a_written_state: "optimizer state of blocks.1.3.bias: exp_avg_sq (unit 'blocks.1')",
    a_counted_step: "optimizer state of blocks.1.3.bias: step (unit 'blocks.1')",
}


def test_the_first_difference_is_named_for_all_that_can_go_wrong(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(2).run(_record_all, tmp_path)[0]
    expected = {plant: f"step {STEP}, micro-batch {NUMBER}: {text}" for plant, text in IN_MICRO_BATCH.items()}
    expected |= {plant: f"step {STEP}: {text}" for plant, text in IN_STEP.items()}
    assert found == list(expected.values())


def _record_all(folder: Path) -> list[str]:
    Training().record(folder / "right")
    found = []
    for number, plant in enumerate([*IN_MICRO_BATCH, *IN_STEP]):
        key = "in_micro_batch" if plant in IN_MICRO_BATCH else "in_step"
        Training().record(folder / str(number), **{key: plant})
        if dist.get_rank() == 0:
            pair = Recorded.read(folder / "right"), Recorded.read(folder / str(number))
            found.append(str(next(differences(*pair), "nothing")))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recordings_are_the_same_at_every_number_of_ranks_and_in_every_form(
    ranks: RankPool, optimizer: str, tmp_path: Path
) -> None:
    forms = [form for form in FORMS if (form, optimizer) in FORMS_AND_OPTIMIZERS]
    for world_size in (1, 2):
        ranks(world_size).run(_record_forms, forms, optimizer, tmp_path)
    first, *others = [Recorded.read(path) for path in sorted(tmp_path.iterdir())]
    assert len(others) == 2 * len(forms) - 1
    for other in others:
        assert [*map(str, differences(first, other))] == []
    assert len(first.entries) == STEPS * (MICRO_BATCHES + 1)
    directions = {key.direction for entries in first.entries.values() for key in entries}
    assert len(directions) == 9


def _record_forms(forms: list[str], optimizer: str, folder: Path) -> None:
    for form in forms:
        Training(form, optimizer).record(folder / f"{form} {dist.get_world_size()}")


@contextmanager
def an_evaluation(training: Training) -> Iterator[None]:
    training.model.eval()
    with torch.no_grad():
        loss_of(training.model, tokens_of(STEP, 17))
    training.model.train()
    yield


@on_ranks(1, 2)
def test_evaluations_are_not_recorded(tmp_path: Path) -> None:
    for name, plant in (("with", an_evaluation), ("without", None)):
        Training().record(tmp_path / name, in_step=plant)
    if dist.get_rank() == 0:
        assert [*map(str, differences(*map(Recorded.read, sorted(tmp_path.iterdir()))))] == []


@on_ranks(1)
def test_outside_nothing_is_recorded_and_nothing_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "one"
    training = Training()
    methods = dict(vars(FlatParamHandle)), training.model._unit.runtime
    training.record(path)
    size = path.stat().st_size
    for number in training.bits.step(5):
        loss_of(training.model, tokens_of(5, number)).backward()
    training.optimizer.step()
    assert path.stat().st_size == size
    assert dict(vars(FlatParamHandle)) == methods[0]
    assert not any(unit.observers.gradient for unit in methods[1].units)


@pytest.mark.parametrize("fails", ["open", "write", "state"])
@on_ranks(2)
def test_what_cannot_be_recorded_is_an_error_on_every_rank(tmp_path: Path, fails: str) -> None:
    model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if fails == "state" and dist.get_rank() == 1:
        optimizer.state[next(iter(model.parameters()))]["strange"] = torch.ones(7, 9)
    path = (
        tmp_path / "missing" / "one" if fails == "open" else Path("/dev/full") if fails == "write" else tmp_path / "one"
    )
    error = {"open": "missing", "write": "No space left", "state": "'strange' of "}[fails]
    recording = fsdp.record_fingerprints(model, path)
    with pytest.raises((OSError, ValueError, fsdp.OtherRankError), match=error), recording:
        optimizer.step()


# The command


def test_the_command_tells_what_differs(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2).run(_record_two, tmp_path)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "no difference up to step 1\n"
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "first difference in step 1, micro-batch 3: forward output of unit 'blocks.1'"
    assert others[0].startswith("  A: ")
    assert others[0][5:] != others[1][5:]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "c does not exist" in capsys.readouterr().err


def _record_two(folder: Path) -> None:
    Training().record(folder / "a")
    Training().record(folder / "b", in_micro_batch=another_seed_in_one_dropout)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"fsdp_fingerprints": 2}',
        '{"fsdp_fingerprints": 1}\n{"step": 0, "keys": 0, "values": ""}',
        '{"fsdp_fingerprints": 1}\n{"keys": [["gradient", "a"]]}',
        '{"fsdp_fingerprints": 1}\n{"keys": [["gradient", "a", "b", 0]]}\n{"step": 0, "keys": 0, "values": "0"}',
        '{"fsdp_fingerprints": 1}\n{"ke',
    ],
)
def test_what_is_no_recording_is_one_line_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = tmp_path / "damaged"
    path.write_text(damage)
    assert main(["compare", str(path), str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
