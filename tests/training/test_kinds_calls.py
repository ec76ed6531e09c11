"""Weights and submodules that are used outside of the model's forward, and backwards that come in other numbers.

`test_pain_point_13_...` are about weights that were read while sharded, and methods beside forward;
`test_pain_point_14_...` about several forwards and backwards in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Net, Wrap
from tests.helpers.module_kinds import FORMS, SideBySide, Units, auto_wrapped, whole, wrapped_parts
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import MakeOptimizer, adamw, fully_sharded, sgd_with_momentum
from tests.helpers.twins import (
    Step,
    Twins,
    assert_at_rest,
    backward_twice,
    batch,
    inference_mode_between,
    no_grad_between,
    once,
    score,
    toolbox,
    two_forwards_then_backwards,
    two_forwards_then_one_backward,
)


class Generator(nn.Module):
    """Has methods beside forward that compute: in a loop, with itself or with its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.decoder = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 5))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs)) * self.scale

    def generate(self, inputs: Tensor, count: int) -> Tensor:
        for _ in range(count):
            inputs = inputs + self(inputs)
        return inputs

    def encode(self, inputs: Tensor, count: int) -> Tensor:
        for _ in range(count):
            inputs = self.encoder(inputs)
        return inputs

    def scaled(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def by_parts(model: nn.Module, wrap: Wrap) -> nn.Module:
    return wrapped_parts(model, wrap, parts=["encoder", "decoder"])


UNITS: list[Units] = [whole, by_parts, auto_wrapped]
INFERENCE: list[Callable[[], AbstractContextManager[Any]]] = [torch.no_grad, torch.inference_mode]


# Methods


@parametrize_cases(at_most=5, options=FORMS, units=UNITS, world_size=[3, 2], mode=INFERENCE)
@on_ranks("world_size")
def test_pain_point_13_a_generate_method_calls_the_model_in_a_loop(case: Case) -> None:
    pair = SideBySide(Generator, case.units, **case.options)
    for number in range(2):
        with case.mode():  # before the first step, too
            found = pair.sharded.generate(batch(number, 0), count=3)
            assert_close(found, pair.plain.generate(batch(number, 0), count=3), "generated")
        assert_at_rest(pair.sharded)
        pair.step(number)
    pair.assert_close()


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_13_a_method_calls_units(options: dict[str, Any]) -> None:
    pair = SideBySide(Generator, by_parts, **options)
    for number in range(2):
        pair.step(number)
        with torch.no_grad():
            found = pair.sharded.encode(batch(number, 0), count=3)
        assert_close(found, pair.plain.encode(batch(number, 0), count=3), "encoded")
    pair.assert_close()


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_13_training_through_a_method(options: dict[str, Any]) -> None:
    pair = SideBySide(Generator, by_parts, **options)
    for number in range(2):
        parts = [batch(number, rank) for rank in range(dist.get_world_size())]
        score(pair.sharded.generate(parts[dist.get_rank()], count=2)).backward()
        score(pair.plain.generate(torch.cat(parts), count=2)).backward()
        pair.optimize()
    pair.assert_close()


@pytest.mark.parametrize("units", UNITS)
@on_ranks(2)
def test_pain_point_13_every_method_works_with_summoned_parameters(units: Units) -> None:
    pair = SideBySide(Generator, units)
    pair.step(0)
    with pair.sharded.summon_full_params(), torch.no_grad():
        for use in (partial(_use, "scaled"), partial(_use, "encode", count=2), partial(_use, "generate", count=2)):
            assert_close(use(pair.sharded), use(pair.plain), str(use))
        assert_close(pair.sharded.decoder[0].weight, pair.plain.decoder[0].weight, "a computed weight")
    pair.step(1)
    pair.assert_close()


def _use(method: str, model: nn.Module, **how: Any) -> Tensor:
    return getattr(model, method)(batch(0, 0), **how)


# Weights that are not there


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_13_a_raw_weight_names_itself_its_unit_and_the_way_out(options: dict[str, Any]) -> None:
    pair = SideBySide(Generator, by_parts, **options)
    pair.step(0)
    model = pair.sharded
    way_out = r".*Call the sharded module.*make the part a unit as well.*`with model\.summon_full_params\(\):`"
    with pytest.raises(RuntimeError, match=r"^2\.weight is sharded: .* of encoder this rank" + way_out):
        model.encoder[2].weight.sum()
    # A weight that is computed from parameters names those.
    with pytest.raises(RuntimeError, match=r"^0\.parametrizations\.weight\.original\d is sharded: .* of decoder"):
        _ = model.decoder[0].weight
    with pytest.raises(RuntimeError, match=r"^scale is sharded: .* of root \(Generator\) this rank" + way_out):
        model.scaled(batch(0, 0))
    pair.step(1)
    pair.assert_close()


def reads_unit() -> nn.Module:
    """Never calls its child, and uses its weight."""
    return Net(lambda net, x: net.exit(x @ net.child.weight), child=nn.Linear(5, 5), exit=nn.Linear(5, 5))


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_13_a_parent_that_reads_the_weight_of_another_unit(options: dict[str, Any]) -> None:
    model = wrapped_parts(reads_unit(), fully_sharded(**options), parts=["child"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^weight is sharded: .* of child .*must be in the same unit"):
            model(torch.ones(2, 5))
        assert_at_rest(model)
    assert list(model.state_dict()) == list(reads_unit().state_dict())


@on_ranks(2)
def test_pain_point_13_attention_in_units_of_its_parts_names_the_weight() -> None:
    # torch's attention never calls its out_proj; auto_wrap knows, and by hand it must be seen what is wrong.
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = wrapped_parts(attention, fully_sharded(), parts=["out_proj"])
    inputs = torch.ones(2, 3, 4)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training), pytest.raises(RuntimeError, match=r"is sharded: .* of out_proj "):
            model(inputs, inputs, inputs)


# Several forwards and backwards

SEVERAL = [
    two_forwards_then_backwards,
    two_forwards_then_one_backward,
    backward_twice,
    no_grad_between,
    inference_mode_between,
]


@parametrize_pairs(
    at_most=5,
    step=SEVERAL,
    options=FORMS,
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adamw],
    reshard_after_forward=[True, False],
    model=[{"order": "abab"}, {"recompute": True, "order": "abca"}, {"recompute": False, "order": "abca"}],
)
@on_ranks("world_size")
def test_pain_point_14_several_forwards_and_backwards_in_a_step(
    step: Step,
    options: dict[str, Any],
    make_optimizer: MakeOptimizer,
    reshard_after_forward: bool,
    model: dict[str, Any],
) -> None:
    options = {**options, "reshard_after_forward": reshard_after_forward}
    make = partial(toolbox, **model)
    twins = Twins.of(make, **options)
    twins.optimizers = [make_optimizer(model.parameters()) for model in (twins.sharded, twins.plain)]
    for number in range(3):
        twins.take(number, step if number % 3 else once)
    assert_at_rest(twins.sharded)
    twins.share_plain()
    assert_close_state(twins.sharded.state_dict(), twins.plain.state_dict())
