"""`fsdp.plan_wrapping` meets a memory budget as measured, with as few bytes on the wire as that allows, or says so."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import MixedPrecision, PlannedWrapping, auto_wrap, checkpoint_wrapper, enable_wrap
from fsdp.wrap import plan_wrapping as planning
from tests.helpers.ranks import RankPool
from tests.wrap.test_plan import Case, Measured, gpt, loss_of, train

MIB = 2**20
APART: dict[str, Any] = {"bucket_cap_mb": 0}  # buckets of small units would count beside units of 1 MiB
GPT, SHORT = (Case(partial(gpt, num_layers=number), options=APART, rows=8) for number in (4, 3))
# All units are kept unsharded, or about half of them; the second is below what blocks as units can do.
BUDGETS = {"large": 30 * MIB, "small": int(23.4 * MIB)}


def wrapping_of(case: Case, world_size: int, budget: float, **arguments: Any) -> PlannedWrapping:
    with torch.device("meta"):
        model = case.model()
    return fsdp.plan_wrapping(
        model, world_size, budget, sample=case.sample(), loss=loss_of, **{**case.options, **arguments}
    )


JUDGED: dict[str, int] = {}  # how many candidates were planned for each of them


@cache
def for_budget(name: str) -> PlannedWrapping:
    with mock.patch.object(planning, "plan", side_effect=planning.plan) as judging:
        found = wrapping_of(GPT, 2, BUDGETS[name])
    JUDGED[name] = judging.call_count
    return found


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_is_met_as_measured(ranks: RankPool, name: str) -> None:
    wrapping = for_budget(name)
    measured: Measured = ranks(2).run(_train, dict(wrapping.units))[0]
    assert wrapping.fits
    assert max(measured.peaks.values()) == pytest.approx(wrapping.plan.peak, rel=0.005)
    assert max(measured.peaks.values()) <= BUDGETS[name]
    assert measured.sent == wrapping.plan.bytes_sent


def _train(units: dict[str, bool]) -> Measured:
    return train(GPT, planning._NamedPolicy(units))


def test_a_long_search_reports_its_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fsdp.plan_wrapping(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2, 1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(planning, "_SILENT_SECONDS", 0.0)
    fsdp.plan_wrapping(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2, 1)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("fsdp.plan_wrapping: plan 1 after 0 s has a peak of ")
    assert last.endswith(", the budget is 1 B")


def test_a_larger_budget_never_sends_more() -> None:
    sent = [for_budget(name).plan.bytes_sent for name in ("large", "small")]
    assert sent == sorted(set(sent))
    assert sent[0] == GPT.plan(2, reshard_after_forward=False).bytes_sent


def test_few_candidates_are_judged() -> None:
    """Of those in which more or fewer of 6, 15 or 19 units stay unsharded."""
    for_budget("small")
    assert JUDGED["small"] <= 10


def test_what_runs_last_stays_unsharded() -> None:
    units = for_budget("small").units
    assert len(set(units.values())) == 2
    assert list(units.values()) == sorted(units.values(), reverse=True)
    assert list(units)[-1] == "head"


def test_the_coarsest_units_are_taken_where_they_do() -> None:
    assert all(f"blocks.{number}" in for_budget("large").units for number in range(4))
    assert "blocks.0" not in for_budget("small").units


def test_where_nothing_fits_it_says_what_is_missing_and_what_helps() -> None:
    wrapping = wrapping_of(SHORT, 2, 12 * MIB)
    assert not wrapping.fits
    assert wrapping.missing == wrapping.plan.peak - 12 * MIB > 0
    assert list(wrapping.remedies) == ["activation checkpointing", "bfloat16", "offload", "all of these"]
    peaks = {remedy: plan.peak for remedy, plan in wrapping.remedies.items()}
    assert max(peaks.values()) < wrapping.plan.peak
    assert min(peaks, key=lambda remedy: peaks[remedy]) == "all of these"
    assert 2 * wrapping.remedies["bfloat16"].bytes_sent == wrapping.plan.bytes_sent
    assert wrapping.remedies["offload"].host_peak > wrapping.plan.parameter_bytes
    text = str(wrapping)
    assert "Nothing fits into 12.0 MiB on each rank." in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("activation checkpointing  ")] == ["fits"]
    with pytest.raises(ValueError, match="Nothing fits into 12"):
        wrapped(SHORT.model(), wrapping)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16), "sample": None}, ["offload"]),
        ({"offload": "cpu"}, ["activation checkpointing", "bfloat16", "all of these"]),
    ],
)
def test_what_was_given_already_is_no_remedy(given: dict[str, Any], left: list[str]) -> None:
    wrapping = fsdp.plan_wrapping(nested(), 2, 1, **{"sample": torch.zeros(64, 12), **given})
    assert list(wrapping.remedies) == left


def test_a_remedy_fits_when_it_is_taken() -> None:
    def checkpointed() -> nn.Module:
        model: Any = SHORT.model()
        for block in model.blocks:
            checkpoint_wrapper(block)
        return model

    assert wrapping_of(Case(checkpointed, rows=8), 2, 14 * MIB).fits  # without, the least is 18 MiB


# --- as a policy


class Block(nn.Module):
    """Two layers, of which another module may read the second one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, inputs: Tensor) -> Any:
        return inputs + self.down(torch.relu(self.up(inputs)))


class Nested(nn.Module):
    """Blocks that run in another order than that in which they are listed, and a weight that is read from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.embedding = nn.Linear(12, 12, bias=False)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.embedding(inputs)
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden @ self.embedding.weight


def nested() -> nn.Module:
    return Nested()


def wrapped(model: nn.Module, policy: Any) -> nn.Module:
    with enable_wrap(wrapper_cls=lambda module, **settings: Unit(module, settings)):
        return auto_wrap(model, policy)


class Unit(nn.Module):
    """What a policy has picked, with the keywords for its wrapper."""

    def __init__(self, module: nn.Module, settings: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.settings = module, settings


def test_it_is_a_policy_for_every_model_of_its_names() -> None:
    wrapping = planning.PlannedWrapping(
        *({"blocks.0": True, "blocks.3": False}, GPT.plan(2), 100 * MIB, {}),
        planning._NamedPolicy({"blocks.0": True, "blocks.3": False}),
    )
    for _ in range(2):
        model: Any = wrapped(nested(), wrapping)
        settings = [block.settings if isinstance(block, Unit) else None for block in model.blocks]
        assert settings == [{"reshard_after_forward": True}, None, None, {"reshard_after_forward": False}, None]
    with pytest.raises(ValueError, match=r"this Linear has no module 'blocks\.0', which was planned to be a unit"):
        wrapped(nn.Linear(1, 1), wrapping)


def test_units_are_in_the_order_of_forward_and_what_others_read_is_none() -> None:
    wrapping = fsdp.plan_wrapping(nested(), 2, MIB, sample=torch.zeros(3, 12))
    assert list(wrapping.units) == [f"blocks.{number}" for number in (4, 3, 2, 1, 0)]
    assert wrapping.plan.units[0].parameters == 12 * 12


def test_tied_weights_stay_together() -> None:
    model: Any = GPT.model()
    model.head.weight = model.token_embedding.weight
    wrapping = fsdp.plan_wrapping(model, 2, 30 * MIB, sample=GPT.sample())
    assert list(wrapping.units) == [f"blocks.{number}" for number in range(4)]


def test_a_model_that_nothing_divides_is_one_unit() -> None:
    for model in (nn.Linear(3, 3), nn.MultiheadAttention(4, 2)):
        wrapping = fsdp.plan_wrapping(model, 3, MIB)
        assert not wrapping.units
        assert [unit.parameters for unit in wrapping.plan.units] == [sum(param.numel() for param in model.parameters())]


@pytest.mark.parametrize("name", ["auto_wrap_policy", "reshard_after_forward"])
def test_what_is_chosen_cannot_be_given(name: str) -> None:
    with pytest.raises(TypeError, match=f"plan_wrapping\\(\\) chooses {name}"):
        fsdp.plan_wrapping(nested(), 2, MIB, **{name: None})
