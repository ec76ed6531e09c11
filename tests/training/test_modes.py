"""Modes of users around a training, which see each operation, or each function of torch, and print its arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp.engine.autograd import outside_modes
from tests.helpers.forms import FORMS, assert_trains, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

Mode = Callable[[], AbstractContextManager[Any]]


class PrintedOperations(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        repr((args, kwargs))
        return operation(*args, **kwargs or {})


class PrintedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        repr((args, kwargs))
        self.called.append(getattr(function, "__name__", ""))
        return function(*args, **kwargs or {})


MODES: dict[str, Mode] = {"operations": PrintedOperations, "functions": PrintedFunctions}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.second(torch.tanh(self.first(x))))


def _train(mode: Mode, model: nn.Module, x: Tensor, step: int) -> Tensor:
    with mode():
        loss = model(x).square().mean()
        loss.backward()
    return loss.detach()


@parametrize_pairs(world_size=[2, 1, 3], form=FORMS, mode=list(MODES))
@on_ranks("world_size")
def test_a_mode_that_prints_all_arguments_meets_no_memory_that_is_freed(world_size: int, form: str, mode: str) -> None:
    assert_trains(Net, form, partial(_train, MODES[mode]), (nn.Linear,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_the_same_for_calls_between_steps(tmp_path: Path, form: str, mode: str) -> None:
    model = sharded(Net(), form, (nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train(MODES[mode], model, torch.ones(2, 5), 0)
    with MODES[mode]():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fsdp.save(tmp_path / "saved", model, optimizer)
        fsdp.load(tmp_path / "saved", model, optimizer)
        if form == "rows":
            model.first.unshard()  # type: ignore[operator, union-attr]
            model.first.reshard()  # type: ignore[operator, union-attr]
            model.first.unshard(async_op=True).wait()  # type: ignore[operator, union-attr]
        else:
            with model.summon_full_params():  # type: ignore[operator]
                pass


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_function_mode_does_not_see_what_hooks_call(form: str) -> None:
    model = sharded(Net(), form, (nn.Linear,))
    model(torch.ones(2, 5)).sum().backward()
    with PrintedFunctions() as mode:
        model(torch.ones(2, 5)).sum().backward()
    assert mode.called.count("linear") == 3
    assert not {"view", "copy_", "new_empty", "detach"} & {*mode.called}


def test_a_default_device_is_there_inside_of_hooks() -> None:
    with torch.device("meta"), PrintedFunctions() as mode, outside_modes():
        device = torch.empty(1).device
    assert (device, mode.called) == (torch.device("meta"), [])
    assert torch.empty(1).device == torch.device("cpu")
