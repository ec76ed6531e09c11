"""Small units are all-gathered together: their values, their messages, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.engine.phase import Phase
from fsdp.engine.unit import unit_of
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import gathering

WIDTH = 5
INPUTS = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
LAYER_BYTES = 4 * 6 * WIDTH  # of weight and bias; divided by 2 ranks without padding


class Chain(nn.Module):
    """Layers that are used in a given order; those of upper-case letters are larger."""

    def __init__(self, order: str, wrap: Wrap) -> None:
        super().__init__()
        self.order = order
        for name in sorted(set(order)):
            layer = nn.Linear(WIDTH, WIDTH) if name.islower() else nn.Sequential(nn.Linear(WIDTH, 60), nn.Linear(60, 5))
            self.add_module(name, wrap(layer))

    def forward(self, inputs: Tensor) -> Tensor:
        for name in self.order:
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


def chain(order: str, wrap: Wrap = keep) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Chain(order, wrap))


FORMS: dict[str, Callable[..., Wrap]] = {
    "flat": lambda **options: partial(FullyShardedDataParallel, **options),
    "orig": lambda **options: partial(FullyShardedDataParallel, use_orig_params=True, **options),
    "rows": lambda **options: partial(fsdp.fully_shard, **options),
}


def small(limit: int) -> Any:
    """Up to so many bytes are gathered together, of models that are used first in this context."""
    return mock.patch("fsdp.engine.runtime.SMALL_BYTES", limit)


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(INPUTS).square().sum()
    loss.backward()
    return loss


def units_of(message: str) -> str:
    """The units of an all-gather, without the classes of roots."""
    what = message.removeprefix("all-gather of ").split(" in ")[0]
    return " to ".join(name.split()[0] for name in what.split(" to "))


def assert_trains_alike(plain: nn.Module, model: nn.Module, steps: int) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for _ in range(steps):
        losses = [step(each) for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@parametrize_pairs(
    world_size=[2, 3],
    form=list(FORMS),
    order=["abcd", "abAcBd", "abac", "aabbc", "AbA"],
    limit=[0, LAYER_BYTES, 3 * LAYER_BYTES],
)
@on_ranks("world_size")
def test_a_model_trains_as_the_plain_one(form: str, order: str, limit: int) -> None:
    plain, model = chain(order), chain(order, FORMS[form]())
    with small(limit):
        assert_trains_alike(plain, model, steps=4)


def offloaded(offload: str, folder: Path) -> nn.Module:
    options = {"offload_folder": folder} if offload == "disk" else {}
    return chain("abcd", FORMS["flat"](offload=offload, **options))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@on_ranks(2)
def test_one_rank_may_keep_its_shards_elsewhere(tmp_path: Path, offload: str) -> None:
    plain, model = chain("abcd"), offloaded(offload, tmp_path) if dist.get_rank() else chain("abcd", FORMS["flat"]())
    assert_trains_alike(plain, model, steps=4)


@on_ranks(2)
def test_one_rank_may_keep_parameters_after_backward() -> None:
    plain, model = chain("abcd"), chain("abcd")
    for name in "bcd":
        fsdp.fully_shard(model.get_submodule(name))
    fsdp.fully_shard(model)
    assert_trains_alike(plain, model, steps=2)
    cast(fsdp.FSDPModule, model).set_reshard_after_backward(not dist.get_rank())
    assert_trains_alike(plain, model, steps=3)


@on_ranks(2)
def test_parameters_that_a_step_has_changed_come_together_again() -> None:
    model = chain("abcd", FORMS["rows"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cast(fsdp.FSDPModule, model).set_reshard_after_backward(False)
    for _ in range(3):
        step(model)
        optimizer.step()
    with gathering() as seen:
        step(model)
    assert list(map(units_of, seen)) == ["a to d", "c to a"]


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_small_units_come_in_one_message_once_their_order_is_known(form: str) -> None:
    model = chain("abcdef", FORMS[form]())
    with gathering() as seen:
        step(model)
        assert list(map(units_of, seen)) == [*"abcdef", *"fedcba"]
        seen.clear()
        step(model)
    assert list(map(units_of, seen)) == ["a to f", "f to a"]


@on_ranks(2)
def test_a_message_ends_at_the_limit_and_large_units_come_alone() -> None:
    model = chain("abcdAef", FORMS["flat"]())
    with small(2 * LAYER_BYTES), gathering() as seen:
        step(model)
        seen.clear()
        with torch.no_grad():
            model(INPUTS)
    assert list(map(units_of, seen)) == ["a to b", "c to d", "A", "e to f"]


@on_ranks(2)
def test_a_bucket_of_nothing_gathers_each_unit_by_itself() -> None:
    model = chain("abc", FORMS["flat"](bucket_cap_mb=0))
    step(model)
    with gathering() as seen, torch.no_grad():
        model(INPUTS)
    assert list(map(units_of, seen)) == [*"abc"]


@on_ranks(2)
def test_units_of_other_dtypes_come_in_messages_of_their_own() -> None:
    model = Chain("abcd", keep)
    model.b.bfloat16()
    model.d.bfloat16()
    for name in "abcd":
        setattr(model, name, FORMS["flat"]()(model.get_submodule(name)))
        model.get_submodule(name).register_forward_pre_hook(_like_the_weights)
    wrapped = FORMS["flat"]()(model)
    step(wrapped)
    with gathering() as seen, torch.no_grad():
        wrapped(INPUTS)
    assert sorted(map(units_of, seen)) == ["a to c", "b to d"]


def _like_the_weights(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    (param,) = module.parameters()
    return (args[0].to(param.dtype),)


@on_ranks(2)
def test_at_most_two_messages_are_unsharded_beside_the_unit_that_computes() -> None:
    model = chain("abcdefgh", FORMS["flat"]())
    units = [unit_of(module) for module in model.modules() if unit_of(module) is not None]
    handles = {handle for unit in units for handle in unit.handles}
    most: list[int] = []

    def look(*_: Any) -> None:
        most.append(sum(handle.phase is not Phase.SHARDED for handle in handles))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look)
    with small(2 * LAYER_BYTES):
        for _ in range(3):
            with torch.no_grad():
                model(INPUTS)
    assert max(most) == 4


@on_ranks(2)
def test_nothing_is_unsharded_beside_units_that_are_kept_for_backward() -> None:
    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        wrapped[type(module)] = wrapped.get(type(module), 0) + 1
        return FullyShardedDataParallel(module, reshard_after_forward=wrapped[type(module)] <= 3, bucket_cap_mb=0)

    wrapped: dict[type, int] = {}
    model = chain("abcdef", wrap)
    for _ in range(3):
        step(model)
    unsharded: list[str] = []
    for name in "ed":
        layer = model.get_submodule(name).module.module
        layer.register_full_backward_pre_hook(lambda *_: unsharded.append(in_use(model)))
    step(model)
    assert unsharded == ["de", "d"]


def in_use(model: nn.Module) -> str:
    units = {name: unit_of(model.get_submodule(name).module.module) for name in "abcdef"}
    return "".join(name for name, unit in units.items() if unit is not None and unit.is_in_use)


@on_ranks(2)
def test_a_value_that_is_written_after_the_message_has_begun_is_used() -> None:
    model: Any = chain("abc", FORMS["flat"]())
    step(model)

    def write(*_: Any) -> None:
        with torch.no_grad():
            model.c.params[0].fill_(0.5)

    model.a.register_forward_hook(write)
    with torch.no_grad():
        model(INPUTS)
        again = model(INPUTS)
        with model.summon_full_params():
            assert model.c.module.weight.eq(0.5).all()
            hidden = torch.tanh(model.b.module(torch.tanh(model.a.module.module(INPUTS))))
            torch.testing.assert_close(again, torch.tanh(hidden @ torch.full((5, 5), 0.5) + 0.5))


@on_ranks(2)
def test_a_forward_that_fails_leaves_nothing_unsharded() -> None:
    model: Any = chain("abcd", FORMS["flat"]())
    step(model)
    model.zero_grad()
    hook = model.b.register_forward_hook(_fail)
    with pytest.raises(ValueError, match="as told"):
        model(INPUTS)
    hook.remove()
    units = [unit_of(module) for module in model.modules() if unit_of(module) is not None]
    assert all(handle.phase is Phase.SHARDED for unit in units for handle in unit.handles)
    torch.testing.assert_close(step(model), step(chain("abcd")))


def _fail(*_: Any) -> None:
    raise ValueError("as told")
