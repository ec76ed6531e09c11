"""Casting and moving a wrapped model after wrapping: as on the plain one, or refused before anything is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.changed_params import LAYOUTS, ChangedTwins, adamw, find, momentum
from tests.helpers.forms import FORMS, assert_trains, sharded
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import MakeOptimizer, fully_sharded

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def to_double(model: nn.Module) -> None:
    model.to(torch.float64)


def to_half(model: nn.Module) -> None:
    model.half()


def to_bfloat16(model: nn.Module) -> None:
    model.bfloat16()


def there_and_back(model: nn.Module) -> None:
    model.bfloat16().float()


def to_the_same(model: nn.Module) -> None:
    model.to("cpu").float()


CASTS = [to_double, to_half, to_bfloat16, there_and_back, to_the_same]


def around(model: nn.Module) -> nn.Module:
    """The wrapper, or the plain model."""
    return model


def inside(model: nn.Module) -> nn.Module:
    """The user's module."""
    return find(model, "")


# The whole model


@parametrize_cases(
    at_most=6, cast=CASTS, world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True], of=[around, inside]
)
@on_ranks("world_size")
def test_a_model_is_cast_between_steps(case: Case) -> None:
    twins = ChangedTwins(case.layout, dtype=torch.float32, reshard_after_forward=not case.whole)
    twins.step()
    if case.whole:
        twins.backward(sync=False)
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
    for model in twins.models:
        case.cast(case.of(model))
    twins.assert_close()
    dtypes = {param.dtype for param in twins.plain.parameters()}
    assert {param.dtype for param in twins.sharded.parameters()} == dtypes
    if dtypes & {torch.float32, torch.float64}:  # the twins' losses differ by a rounding in 16 bits
        _go_on(twins)


def _go_on(twins: ChangedTwins) -> None:
    for make_optimizer in (None, momentum, adamw):
        if make_optimizer is not None:
            twins.new_optimizers(make_optimizer)
        for _ in range(2):
            twins.step()
    twins.assert_close()


@parametrize_pairs(dtype=[torch.bfloat16, torch.float16], world_size=[2, 1], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_a_narrowed_model_trains_on_in_its_new_dtype(dtype: torch.dtype, layout: str) -> None:
    # On the same batch on every rank a mean over ranks is exact, so there is nothing to differ in.
    twins = ChangedTwins(layout, dtype=torch.float32)
    for model in twins.models:
        model.to(dtype)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in twins.models]
    for number in range(3):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number)).to(dtype)
        for model, optimizer in zip(twins.models, optimizers, strict=True):
            optimizer.zero_grad()
            output = model(inputs)
            assert output.dtype is dtype
            output.float().square().mean().backward()
            optimizer.step()
    found, expected = twins.sharded.state_dict(), twins.plain.state_dict()
    for name, value in expected.items():
        assert found[name].dtype is dtype
        torch.testing.assert_close(found[name], value)


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS), make_optimizer=[momentum, adamw])
@on_ranks("world_size")
def test_an_accumulated_gradient_is_cast_with_its_parameter(layout: str, make_optimizer: MakeOptimizer) -> None:
    twins = ChangedTwins(layout, dtype=torch.float32)
    twins.backward()
    for model in twins.models:
        model.double()
    twins.new_optimizers(make_optimizer)
    twins.optimize()
    sharded_state = twins.sharded.state_dict()
    for name, value in twins.plain.state_dict().items():
        torch.testing.assert_close(sharded_state[name], value, rtol=1e-4, atol=1e-6)
    for param in twins.sharded.parameters():
        assert param.dtype is torch.float64


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_one_of_several_units_is_cast(layout: str) -> None:
    sharded, plain = (_two_units(wrap) for wrap in (fully_sharded(**LAYOUTS[layout]), keep))
    for _ in range(2):
        for model in (sharded, plain):
            model[1].double()
            assert model[1](model[0](torch.ones(4, 5)).double()).dtype is torch.float64
        sharded_state = sharded.state_dict()
        for name, value in plain.state_dict().items():
            assert sharded_state[name].dtype is value.dtype


def _two_units(wrap: Wrap) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([wrap(nn.Linear(5, 7)), wrap(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)))])


# A part of a unit


def one_unit(wrap: Wrap) -> nn.Module:
    """Modules without parameters of their own beside those that have some, and a unit of one parameter inside."""
    torch.manual_seed(0)
    single = wrap(nn.Sequential(nn.Linear(5, 5, bias=False)))
    part = nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 5))
    return wrap(
        nn.ModuleDict({"entry": nn.Linear(5, 5), "part": part, "mixed": nn.ModuleList([single, nn.Linear(5, 5)])})
    )


PARTS = {
    "entry": r"entry\.weight",  # a module with parameters
    "part": r"part\.1\.weight",  # one that holds such a module, and buffers before it
    "mixed": r"mixed\.1\.weight",  # one that holds a unit before it
    "mixed.0.0": r"0\.weight",  # the only parameter of a unit, in a module inside of the unit's
}


@parametrize_pairs(part=list(PARTS), world_size=[2, 1], layout=["flat", "pieces"])
@on_ranks("world_size")
def test_a_part_of_a_unit_is_not_cast_apart(part: str, layout: str) -> None:
    model = one_unit(fully_sharded(**LAYOUTS[layout]))
    before = model.state_dict()
    for cast in (to_double, to_half, to_bfloat16):
        with pytest.raises(RuntimeError, match=PARTS[part] + r" cannot be cast or moved separately from its unit"):
            cast(find(model, part))
        after = model.state_dict()
        assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in before.items()}
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("part", PARTS)
@on_ranks(2)
def test_a_part_may_be_sent_where_it_is(part: str) -> None:
    model = one_unit(fully_sharded())
    before = model.state_dict()
    to_the_same(find(model, part))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# When it cannot be


@parametrize_cases(at_most=3, cast=[to_double, to_half], world_size=[2, 1], layout=list(LAYOUTS), of=[around, inside])
@on_ranks("world_size")
def test_casting_inside_summon_full_params_is_refused(case: Case) -> None:
    twins = ChangedTwins(case.layout, dtype=torch.float32)
    twins.step()
    with twins.sharded.summon_full_params():  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=r"inside summon_full_params\(\) there are only copies"):
            case.cast(case.of(twins.sharded))
        assert {param.dtype for param in twins.sharded.parameters()} == {torch.float32}
    _go_on(twins)


@every_layout
@on_ranks(2)
def test_casting_around_a_summoned_unit_is_refused_before_anything_is_changed(layout: str) -> None:
    twins = ChangedTwins(layout, dtype=torch.float32)
    twins.step()
    trunk = twins.sharded.trunk
    with trunk.summon_full_params():  # type: ignore[operator, union-attr]
        with pytest.raises(RuntimeError, match=r"trunk: inside summon_full_params"):
            twins.sharded.double()
        assert {param.dtype for param in twins.sharded.parameters()} == {torch.float32}
    _go_on(twins)


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_sending_a_summoned_model_where_it_is_changes_nothing(layout: str) -> None:
    twins = ChangedTwins(layout, dtype=torch.float32)
    twins.step()
    with twins.sharded.summon_full_params():  # type: ignore[operator]
        to_the_same(twins.sharded)
        with torch.no_grad():
            for model in twins.models:
                find(model, "entry").weight.fill_(0.5)
        expected = dict(twins.plain.named_parameters())
        assert {name: param.shape for name, param in twins.sharded.named_parameters()} == {
            name: param.shape for name, param in expected.items()
        }
    _go_on(twins)


@every_layout
@on_ranks(2)
def test_casting_with_unreduced_gradients_is_refused_before_anything_is_changed(layout: str) -> None:
    twins = ChangedTwins(layout, dtype=torch.float32)
    twins.backward(sync=False)
    with pytest.raises(RuntimeError, match=r"cannot move or cast gradients that were accumulated under no_sync"):
        twins.sharded.double()
    twins.assert_close()
    twins.step()  # with what was accumulated
    for optimizer in twins.optimizers:
        optimizer.zero_grad()
    _go_on(twins)


# In a forward


class Casting(nn.Module):
    """Casts a part in its forward, as routers of mixtures of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.dtype = nn.Linear(5, 5), nn.Linear(5, 3), dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.part = self.part.to(self.dtype)
        outputs: torch.Tensor = self.part(self.first(inputs))
        return outputs


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_cast_in_forward_that_changes_nothing_is_allowed(form: str) -> None:
    assert_trains(lambda: Casting(torch.float64), form, _square)
    model = sharded(Casting(torch.float32), form)
    with pytest.raises(
        RuntimeError, match=r"cannot (move or cast the module in the middle|be cast or moved separately)"
    ):
        model(torch.randn(4, 5))


def _square(model: nn.Module, inputs: torch.Tensor, step: int) -> None:
    model(inputs).square().sum().backward()
