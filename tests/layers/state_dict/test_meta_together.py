"""Starting from the meta device together with other features: ties across units, optimizers from before, ignoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from tests.helpers.equality import assert_same_state
from tests.helpers.meta_models import FORMS, UNFLATTENED, Norms, on_meta, sharded, started, state_of
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


class TiedAcross(nn.Module):
    """The weight of the first of these is used first here, and wrapped first in the other."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, inside = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.weight = inside.weight
        self.unit: Any = wrap(nn.Sequential(inside, nn.Linear(3, 3)))
        self.own = nn.Linear(3, 1)


@on_ranks(2)
def test_a_parameter_that_units_share_has_the_value_that_its_first_module_gives_it() -> None:
    wrap = sharded(**UNFLATTENED)
    tied: Any = on_meta(lambda _: TiedAcross(wrap))
    first: Any = wrap(tied.first)
    first.append_shared_param(tied.unit.params[0])
    tied.first = first
    model = wrap(tied)
    fsdp.materialize(model, seed=0)
    found, expected = state_of(model), state_of(started(TiedAcross))
    assert_same_state(dict(sorted(found.items())), dict(sorted(expected.items())))


@on_ranks(2)
def test_an_optimizer_from_before_wrapping_is_handed_over() -> None:
    plain = on_meta(Norms)
    optimizer = torch.optim.AdamW(plain.parameters())
    model: Any = sharded()(plain)
    model.reshard_optimizer(optimizer)
    fsdp.materialize(model, seed=0)
    alone = started(Norms)
    for each, stepping in ((model, optimizer), (alone, torch.optim.AdamW(alone.parameters()))):
        each(INPUTS).square().sum().backward()
        stepping.step()
    for name, value in state_of(model).items():
        assert torch.allclose(value, alone.state_dict()[name], rtol=1e-4), name


@pytest.mark.parametrize("by", ["materialize", "load_state_dict"])
def test_what_is_given_values_in_inference_mode_can_be_trained(by: str) -> None:
    model = on_meta(Norms, sharded(process_group=Alone()))
    with torch.inference_mode():
        if by == "materialize":
            fsdp.materialize(model, seed=0)
        else:
            model.load_state_dict(state_of(started(Norms)))
    model(INPUTS).sum().backward()
    assert_same_state(
        {name: value for name, value in state_of(model).items() if "running" not in name and "num" not in name},
        {
            name: value
            for name, value in state_of(started(Norms)).items()
            if "running" not in name and "num" not in name
        },
    )


@parametrize_pairs(form=FORMS, by=["materialize", "load_state_dict"])
@on_ranks(2)
def test_recurrent_modules_compute_with_their_values(form: dict[str, Any], by: str) -> None:
    plain, model = started(lstm), on_meta(lstm, sharded(**form))
    if by == "materialize":
        fsdp.materialize(model, seed=0)
    else:
        model.load_state_dict(plain.state_dict())
    inputs = torch.linspace(-1, 1, 30).view(5, 2, 3)
    assert torch.equal(model(inputs)[0], plain(inputs)[0])


def lstm(wrap: Wrap = keep) -> nn.Module:
    return nn.LSTM(3, 4)


def test_ignored_modules_are_missed_and_loaded() -> None:
    with torch.device("meta"):
        layer, ignored = nn.Linear(2, 2), nn.Linear(2, 2)
    model = sharded(process_group=Alone(), ignored_modules=[ignored])(nn.Sequential(layer, ignored))
    with pytest.raises(RuntimeError, match=r"4 of its .*: 0\.weight, 0\.bias, 1\.weight, 1\.bias"):
        model(torch.ones(1, 2))
    state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    model.load_state_dict(state)
    assert_same_state(state_of(model), dict(state))
