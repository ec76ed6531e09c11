"""What a forward without gradients leaves unsharded serves the next one, as with torch's, and is never out of date."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers.dtensor_twins import (
    adamw_at_once,
    assert_at_rest,
    assert_within,
    is_whole,
    local,
    ours,
    seeded,
    torchs,
    uneven,
    units,
)
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import Counting, Traffic
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)
OPTIONS: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"reshard_after_forward": True}]


def look(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(INPUTS)
    return found


@pytest.mark.parametrize(("world_size", "options"), [*((2, each) for each in OPTIONS), (4, {"mesh": (2, 2)})], ids=str)
@on_ranks("world_size")
def test_no_more_is_received_than_with_torchs(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    inputs = INPUTS.double()
    (theirs, expected), (mine, found) = (_counts(wrap(**options), inputs) for wrap in (torchs, ours))
    for step, (least, most) in enumerate(zip(mine, theirs, strict=True)):
        assert least <= most, f"in pass {step}"
    for one, other in zip(found, expected, strict=True):
        assert_within("outputs", one, other, 1e-10)


def _counts(wrap: Wrap, inputs: Tensor) -> tuple[list[int], list[Tensor]]:
    """Return what a rank receives in each pass of an evaluation, a step, and an evaluation; and the outputs."""
    model: Any = uneven(wrap)
    optimizer = adamw_at_once(model.parameters())
    counts, outputs = [], []
    for is_training in (False, False, True, False, False, True, True, False):
        with Counting(traffic := Traffic()):
            if is_training:
                model(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    outputs.append(model(inputs).clone())
        counts.append(traffic.values)
    return counts, outputs


def _step(model: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _load(model: Any) -> None:
    model.load_state_dict(uneven(ours(), seed=1).state_dict())


def _write(model: Any) -> None:
    for param in model.parameters():
        param.data.mul_(2)


def _change_mode(model: Any) -> None:
    model.eval()
    look(model)
    model.train()


def _freeze(model: Any) -> None:
    model.requires_grad_(False)
    look(model)
    model.requires_grad_(True)


def _cast(model: Any) -> None:
    model.double().float()


def _use_alone(model: Any) -> None:
    model.unshard()
    look(model)


@parametrize_pairs(at_most=2, world_size=[1, 2], options=OPTIONS[:2])
@on_ranks("world_size")
def test_changes_in_between_are_seen_by_the_next_forward(options: dict[str, Any]) -> None:
    model: Any = uneven(ours(**options))
    for change in (_step, _load, _write, _change_mode, _freeze, _cast, _use_alone, _step):
        before = look(model)
        change(model)
        found = look(model)
        for unit in units(model):
            unit.reshard()
        assert torch.equal(look(model), found), change.__name__
        assert torch.equal(found, before) == (change in (_change_mode, _freeze, _cast, _use_alone)), change.__name__
        copied = copy.deepcopy(model)
        assert torch.equal(look(copied), found), change.__name__
        plain = uneven()
        plain.load_state_dict(full_state(model))
        assert_within(change.__name__, found, look(plain), 1e-6)
    once(model, INPUTS)
    model.zero_grad()
    assert_at_rest(model)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@on_ranks(2)  # torch's raises an error
def test_training_goes_on_after_inference_mode(options: dict[str, Any]) -> None:
    model, other = (uneven(ours(**options)) for _ in range(2))
    for _ in range(2):
        with torch.inference_mode():
            model(INPUTS)
        for each in (model, other):
            once(each, INPUTS)
    for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(mine.grad), local(expected.grad))  # type: ignore[arg-type]


@on_ranks(2)
def test_dtensors_are_listed_after_it() -> None:
    model: Any = uneven(ours())
    look(model)
    assert is_whole(model)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    before = full_state(model)
    optimizer = adamw_at_once(model.parameters())  # torch's would get unsharded parameters
    once(model, INPUTS)
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in full_state(model).items())
    look(model)
    model.unshard()
    assert not any(isinstance(param, DTensor) for param in (model.scale, model.entry.weight))
    model.reshard()
    assert_at_rest(model)


class _Counts(nn.Module):
    """Writes to weights of the module around it, in its forward."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner = wrap(nn.Linear(5, 5))
        self.calls = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        with torch.no_grad():
            self.calls.add_(1)
        return outputs * self.calls.mean()


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_what_it_writes_to_its_weights_is_kept(mesh: tuple[int, ...]) -> None:
    model: Any = seeded(_Counts, ours(mesh=mesh))
    for _ in range(3):
        look(model)
    assert torch.equal(full_state(model)["calls"], torch.full((4,), 3.0))
