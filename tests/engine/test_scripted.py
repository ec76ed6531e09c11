"""Modules of `torch.jit` inside of a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.compile_backends import torchs_own_deprecations
from tests.helpers.forms import FORMS, assert_trains, sharded
from tests.helpers.on_ranks import on_ranks

pytestmark = [torchs_own_deprecations, pytest.mark.parametrize("form", FORMS)]


class Gate(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.sigmoid(inputs)


def around_scripted() -> nn.Module:
    inner = nn.Sequential(nn.Linear(5, 7), torch.jit.script(nn.BatchNorm1d(7, affine=False).eval()), nn.Linear(7, 5))
    return nn.Sequential(inner, torch.jit.trace(Gate(), torch.ones(5)), nn.Linear(5, 5))


def scripted_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), torch.jit.script(nn.Linear(5, 5)))


def trains(model: Any, inputs: Tensor, step: int) -> Tensor:
    model.load_state_dict(model.state_dict())
    loss: Tensor = model(inputs).sin().mean()
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_those_without_parameters_are_part_of_a_unit(form: str) -> None:
    assert_trains(around_scripted, form, trains, (nn.Sequential,))


@on_ranks(2)
def test_their_parameters_are_refused_by_name_and_may_be_ignored(form: str) -> None:
    with pytest.raises(TypeError, match=r"^1\.weight is a parameter of a module of torch\.jit.*ignored_modules"):
        sharded(scripted_layer(), form)
    model = scripted_layer()
    ignored: Any = {"ignored_params": set(model[1].parameters())} if form == "rows" else {"ignored_modules": [model[1]]}
    whole = sharded(model, form, **ignored)
    whole.load_state_dict(whole.state_dict())
    whole(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is not None for param in model[1].parameters())
