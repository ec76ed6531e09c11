"""Settings of torch and functions of other libraries around a sharded model, which compute as the plain model does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import full_tensor
from tests.helpers.forms import FORMS, full_state, inside
from tests.helpers.forms import sharded as sharded_in
from tests.helpers.on_ranks import on_ranks

every_form = pytest.mark.parametrize("form", FORMS)


class Tied(nn.Module):
    """A model whose weights can be tied again, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(5, 5), nn.Linear(5, 5)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.exit.weight = self.get_parameter("entry.weight")  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(torch.tanh(self.entry(inputs)))


class Looking(Tied):
    """A model that reads a weight by NumPy in its forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = float(np.mean(self.entry.weight.detach().numpy()))
        return super().forward(inputs)


def _twins(form: str, kind: type[nn.Module] = Tied) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = kind()
    return sharded_in(copy.deepcopy(plain), form), plain


def _assert_alike(sharded: Any, plain: Any, steps: int = 2) -> None:
    """Train both, on the same inputs on every rank, and compare."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, plain)]
    for _ in range(steps):
        inputs = torch.linspace(-1, 1, 10, dtype=next(plain.parameters()).dtype).view(2, 5)
        outputs = []
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            outputs.append(model(inputs))
            outputs[-1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(full_state(sharded), dict(plain.state_dict()))


@contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@every_form
@on_ranks(2)
def test_a_weight_can_be_read_by_numpy_in_a_forward(form: str) -> None:
    sharded, plain = _twins(form, Looking)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _assert_alike(sharded, plain)
    assert any("entry.weight" in str(each.message) and "NumPy" in str(each.message) for each in caught)


@every_form
@on_ranks(2)
def test_a_model_can_be_sharded_in_inference_mode(form: str) -> None:
    with torch.inference_mode():
        sharded, _ = _twins(form)
    _, plain = _twins(form)
    _assert_alike(sharded, plain)


@every_form
@on_ranks(2)
def test_an_optimizer_can_step_in_inference_mode(form: str) -> None:
    model, plain = _twins(form)
    for each in (model, plain):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        for _ in range(2):  # the state is made by the first step
            each(torch.ones(3, 5)).sum().backward()
            with torch.inference_mode():
                optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model(torch.ones(3, 5)), plain(torch.ones(3, 5)))


@every_form
@on_ranks(2)
def test_parameters_are_not_swapped(form: str) -> None:
    """By a cast and by a load, if torch is set to do so."""
    sharded, plain = _twins(form)
    before = sharded.state_dict()
    with _swapping():
        sharded.to(torch.float64)
    plain.to(torch.float64)
    _assert_alike(sharded, plain)
    with _swapping():
        sharded.load_state_dict(before)
    plain.load_state_dict({name: full_tensor(value) for name, value in before.items()})
    _assert_alike(sharded, plain)


@every_form
@on_ranks(2)
def test_a_state_dict_can_be_taken_in_inference_mode(form: str) -> None:
    sharded, plain = _twins(form)
    with torch.inference_mode():
        state = sharded.state_dict()
    torch.testing.assert_close({name: full_tensor(value) for name, value in state.items()}, dict(plain.state_dict()))
    _assert_alike(sharded, plain)


@every_form
@on_ranks(2)
def test_weights_can_be_tied_again(form: str) -> None:
    sharded, plain = _twins(form)
    for _ in range(2):
        inside(sharded).tie_weights()
        _assert_alike(sharded, plain)


@every_form
@on_ranks(2)
def test_a_sharded_weight_is_found_as_a_parameter(form: str) -> None:
    sharded, _ = _twins(form)
    name = next(name for name, _ in Tied().named_parameters())
    found = inside(sharded).get_parameter(name)
    assert isinstance(found, nn.Parameter)
    if form != "rows":
        with pytest.raises(RuntimeError, match="is sharded"):
            found.sum()
