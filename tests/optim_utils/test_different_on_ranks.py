"""A full state has room for one value, so that ranks with different ones are an error at every door."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp import optim_utils
from tests.helpers.equality import assert_same
from tests.helpers.hybrid import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import adam, from_first, garden, train
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded

Save = Callable[[Any, torch.optim.Optimizer, Path], Any]
DOORS: dict[str, Save] = {
    "fsdp.save": lambda model, optimizer, folder: fsdp.save(folder / "saved", model, optimizer),
    "numbers": lambda model, optimizer, folder: model.gather_full_optim_state_dict(optimizer),
    "numbers, everywhere": lambda model, optimizer, folder: model.gather_full_optim_state_dict(optimizer, None),
    "names": lambda model, optimizer, folder: optim_utils.full_optim_state_dict(model, optimizer),
    "stream": lambda model, optimizer, folder: list(optim_utils.stream_optim_state(model, optimizer)),
}
STATE = r"the optimizer's state of .* has {} on rank 0 and {} on rank 1. Every rank must have stepped the same param"
OPTIONS = r"rank \d: the ranks have different options in their optimizers: {} is {} on rank 0 and {} on rank 1"


def _set_step(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.tensor(2.0 + dist.get_rank())


def _set_text(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["phase"] = "late" if dist.get_rank() == 1 else "early"


def _drop_moment(optimizer: torch.optim.Optimizer) -> None:
    if dist.get_rank() == 1:
        del next(iter(optimizer.state.values()))["exp_avg"]


def _set_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + (dist.get_rank() == 1))


def _set_rate_tensor(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5 * (1 + (dist.get_rank() == 1)))


def _set_betas(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.5 if dist.get_rank() == 1 else 0.25)


CHANGES: list[tuple[Callable[[torch.optim.Optimizer], None], type[Exception], str]] = [
    (_set_step, ValueError, STATE.format(r"'step' \(2.0 of torch.float32\)", r"'step' \(3.0 of torch.float32\)")),
    (_set_text, ValueError, STATE.format(r"'phase' \('early'\)", r"'phase' \('late'\)")),
    (_drop_moment, ValueError, STATE.format(r"'exp_avg' \(elements of torch.float32\)", "no 'exp_avg'")),
    (_set_rate, RuntimeError, OPTIONS.format("lr of parameter group 0", "0.1", "0.2")),
    (_set_rate_tensor, RuntimeError, OPTIONS.format("lr of parameter group 0", "0.5", "1.0")),
    (_set_betas, RuntimeError, OPTIONS.format("betas of parameter group 0", r"\(0.9, 0.25\)", r"\(0.9, 0.5\)")),
]


@parametrize_pairs(case=CHANGES, form=[{}, {"use_orig_params": True}])
@on_ranks(lambda form: 2 if form else 3)
def test_all_doors_raise_the_same_error_on_every_rank(
    tmp_path: Path, case: tuple[Callable[[torch.optim.Optimizer], None], type[Exception], str], form: dict[str, Any]
) -> None:
    change, error, message = case
    model = garden(fully_sharded(**form))
    optimizer = adam(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy([optimizer.state[param] for param in optimizer.state]), dict(optimizer.param_groups[0])
    change(optimizer)
    for save in DOORS.values():
        with pytest.raises(error, match=message):
            save(model, optimizer, tmp_path)
    optimizer.state.update(zip(optimizer.state, before[0], strict=True))
    optimizer.param_groups[0].update(before[1])
    for save in DOORS.values():
        save(model, optimizer, tmp_path)


@on_ranks(4)
def test_replicas_are_compared_as_well() -> None:
    model = garden(fully_sharded(process_group=mesh_of(2, 2)))
    optimizer = adam(model)
    train(model, optimizer, range(2))
    for state in optimizer.state.values():
        state["step"] += dist.get_rank() // 2
    with pytest.raises(ValueError, match=r"'step' \(2.0 .*\) on rank 0 and 'step' \(3.0 .*\) on rank 2"):
        model.gather_full_optim_state_dict(optimizer)


class Scaled:
    """An optimizer's wrapper, with a value of its own in the dictionary."""

    def __init__(self, optimizer: torch.optim.Optimizer, scale: Any) -> None:
        self._optimizer, self._scale = optimizer, scale

    def state_dict(self) -> dict[str, Any]:
        return {**self._optimizer.state_dict(), "loss_scale": self._scale}


@on_ranks(2)
def test_what_is_beside_state_and_groups_is_compared() -> None:
    model = garden(fully_sharded())
    optimizer = adam(model)
    train(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"'loss_scale' is 1.0 on rank 0 and 2.0 on rank 1"):
        model.gather_full_optim_state_dict(Scaled(optimizer, 1.0 + dist.get_rank()))


class Note:
    """An option that has no text and is equal to no other object."""

    def __init__(self, text: str) -> None:
        self.text = text


@on_ranks(2)
def test_objects_with_the_same_content_are_the_same() -> None:
    model = garden(fully_sharded())
    optimizer = adam(model)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["note"] = Note("any")
    for state in optimizer.state.values():
        state["note"], state["table"] = Note("same"), {"a": torch.ones(2)}
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert {state["note"].text for state in full["state"].values()} == {"same"}
    assert_same(full["state"][0]["table"], {"a": torch.ones(2)})
