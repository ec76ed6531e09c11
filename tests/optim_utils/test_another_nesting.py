"""Full optimizer states are loaded by names where the numbers of parameters are others: another nesting of wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp import FullyShardedDataParallel, OwnedOptimizer, fully_shard, optim_utils
from fsdp.compat import fairscale
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import adam, from_first
from tests.helpers.pairs import parametrize_pairs

EQUAL, UNEQUAL = (4, 4, 4, 4), (4, 6, 3, 5)
OPTIONS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]
SAME_MODULES = r"has numbers instead of names.*wrap the same modules as when it was saved"
Load = Callable[[Any, torch.optim.Optimizer, Any], None]


def nested(wrapped: int, sizes: tuple[int, ...], options: dict[str, Any]) -> FullyShardedDataParallel:
    """Three layers, one of them a unit of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    layers[wrapped] = FullyShardedDataParallel(layers[wrapped], **options)  # type: ignore[call-overload]
    return FullyShardedDataParallel(nn.Sequential(*layers), **options)


def trained(wrapped: int, sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = nested(wrapped, sizes, options)
    optimizer = adam(model)
    model(torch.arange(4.0 * sizes[0]).reshape(4, -1)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _by_shard(model: Any, optimizer: Any, full: Any) -> None:
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))


def _by_shard_full(model: Any, optimizer: Any, full: Any) -> None:
    optimizer.load_state_dict(optim_utils.shard_full_optim_state_dict(model, full, optimizer))


def _from_everyone(model: Any, optimizer: Any, full: Any) -> None:
    optim_utils.load_full_optim_state_dict(model, optimizer, full)


def _from_first(model: Any, optimizer: Any, full: Any) -> None:
    optim_utils.load_full_optim_state_dict(model, optimizer, full if dist.get_rank() == 0 else None, rank0_only=True)


def _by_rekeying(model: Any, optimizer: Any, full: Any) -> None:
    for to in ("numbers", "names", "numbers"):
        full = optim_utils.rekey_optim_state_dict(full, model, to)
    _by_shard(model, optimizer, full)


DOORS: list[Load] = [_by_shard, _by_shard_full, _from_everyone, _from_first]


@parametrize_pairs(at_most=8, load=[*DOORS, _by_rekeying], sizes=[EQUAL, UNEQUAL], options=OPTIONS, world_size=[2, 3])
@on_ranks("world_size")
def test_each_parameter_gets_its_own_state(load: Load, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    model, optimizer = trained(1, sizes, options)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    expected = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert expected is not None
    other = nested(2, sizes, options)
    second = adam(other)
    load(other, second, full)
    found = optim_utils.full_optim_state_dict(other, second, recipient_rank=None)
    assert found is not None
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][name][key], value), (name, key)


@pytest.mark.parametrize("load", [*DOORS, _by_rekeying])
@on_ranks(2)
def test_a_state_without_names_goes_by_numbers(load: Load) -> None:
    """As those are that FairScale and version 0.1.0 have written."""
    model, optimizer = trained(1, UNEQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    del full["param_names"]
    same = nested(1, UNEQUAL, {})
    second = adam(same)
    load(same, second, from_first(full))
    assert_same(
        from_first(same.gather_full_optim_state_dict(second))["state"],
        from_first(model.gather_full_optim_state_dict(optimizer))["state"],
    )


@pytest.mark.parametrize("load", DOORS)
@on_ranks(2)
def test_numbers_of_other_shapes_are_refused_with_the_remedy(load: Load) -> None:
    model, optimizer = trained(1, UNEQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    del full["param_names"]
    other = nested(2, UNEQUAL, {})
    second = adam(other)
    with pytest.raises((ValueError, RuntimeError), match=SAME_MODULES) as caught:
        load(other, second, full)
    assert "OwnedOptimizer" not in str(caught.value)
    assert not second.state
    # The remedy that it names.
    named = optim_utils.rekey_optim_state_dict(full, nested(1, UNEQUAL, {}), "names")
    optim_utils.load_full_optim_state_dict(other, second, named)


@on_ranks(2)
def test_a_state_by_names_of_other_shapes_is_told_to_be_of_another_model() -> None:
    model, optimizer = trained(1, UNEQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    other = nested(1, (4, 6, 5, 5), {})
    with pytest.raises(ValueError, match=r"state 'exp_avg' of 2.weight has shape .*Load the state of a model with par"):
        other.get_shard_from_optim_state_dict(full)


@on_ranks(2)
def test_names_are_plain_whatever_the_units_are() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    names = sorted(name for name, _ in plain.named_parameters())
    wrapped = FullyShardedDataParallel(FullyShardedDataParallel(copy.deepcopy(plain)))
    fully_shard([plain[0], plain[1]])
    fully_shard(plain)
    owned = OwnedOptimizer(
        plain, [{"params": names[:4], "optimizer": torch.optim.Adam}, {"optimizer": torch.optim.SGD}]
    )
    assert sorted(owned.plan.owner_of) == names
    for model, optimizer in ((wrapped, adam(wrapped)), (plain, owned)):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
        assert full is not None
        assert sorted(name for group in full["param_groups"] for name in group["params"]) == names


def _plain(module: nn.Module) -> nn.Module:
    return module


def _checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _compiled_around(module: nn.Module) -> Any:
    return _compiled(_checkpointed(module))


AROUND: list[Callable[[nn.Module], Any]] = [_checkpointed, _compiled, _compiled_around]


def inside(around: Callable[[nn.Module], Any], options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    """A unit in the module that is put around it, and a module of the outermost unit, trained for a step."""
    torch.manual_seed(0)
    layers = [around(FullyShardedDataParallel(nn.Linear(4, 4), **options)), around(nn.Linear(4, 4)), nn.Linear(4, 4)]
    model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
    optimizer = adam(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@parametrize_pairs(at_most=6, load=DOORS, around=AROUND, saves=[True, False], options=OPTIONS)
@on_ranks(2)
def test_torch_s_wrappers_may_be_around_modules_in_one_of_the_two_models(
    load: Load, around: Callable[[nn.Module], Any], saves: bool, options: dict[str, Any]
) -> None:
    first, second = (inside(each, options) for each in ([around, _plain] if saves else [_plain, around]))
    full = optim_utils.full_optim_state_dict(*first, recipient_rank=None)
    expected = copy.deepcopy(second[1].state_dict())
    for state in second[1].state.values():
        state["exp_avg"].zero_()
    load(*second, full)
    assert_same(second[1].state_dict(), expected)


@parametrize_pairs(around=AROUND, options=OPTIONS)
@on_ranks(2)
def test_states_have_the_names_of_the_state_dict(around: Callable[[nn.Module], Any], options: dict[str, Any]) -> None:
    model, optimizer = inside(around, options)
    full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert full is not None
    assert sorted(full["state"]) == sorted(model.state_dict())
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    by_number = optim_utils.rekey_optim_state_dict(full, plain, "numbers")
    assert sorted(by_number["state"]) == list(range(6))


@on_ranks(2)
def test_owners_have_the_names_of_the_state_dict_and_know_all_names() -> None:
    model, _ = inside(_checkpointed, {"use_orig_params": True})
    names = ["1.weight", "1._checkpoint_wrapped_module.bias"]
    groups = [{"params": names, "optimizer": torch.optim.Adam}, {"optimizer": torch.optim.SGD}]
    assert sorted(OwnedOptimizer(model, groups).plan.owner_of) == sorted(model.state_dict())


@on_ranks(2)
def test_fairscale_s_helper_drops_the_names() -> None:
    model, optimizer = trained(1, EQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert fairscale.flatten_optim_state_dict(full).keys() == {"state", "param_groups"}


def dimensions(name: str, param: nn.Parameter) -> int:
    return param.dim()


def layers(unit: int | None, **options: Any) -> FullyShardedDataParallel:
    """Three layers, of which one may be a unit of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(EQUAL)))
    if unit is not None:
        model[unit] = FullyShardedDataParallel(model[unit], **options)
    return FullyShardedDataParallel(model, **options)


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    model(torch.arange(16.0).reshape(4, 4)).square().sum().backward()
    optimizer.step()
    return optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)


# A flat parameter of a unit inside comes after that of the outermost unit, and groups follow each other.
WRAPPINGS: dict[str, dict[str, Any]] = {
    "flat": {"unit": 1},
    "grouped": {"unit": None, "group_by": dimensions},
    "original": {"unit": None, "use_orig_params": True},
    "original inside": {"unit": 1, "use_orig_params": True},
    "unflattened": {"unit": None, "flatten_parameters": False},
}


@parametrize_pairs(
    at_most=10, load=[*DOORS, _by_rekeying], saved=list(WRAPPINGS), loaded=list(reversed(WRAPPINGS)), world_size=[2, 3]
)
@on_ranks("world_size")
def test_a_model_may_list_its_parameters_in_another_order(load: Load, saved: str, loaded: str) -> None:
    model = layers(**WRAPPINGS[saved])
    optimizer = adam(model)
    expected = stepped(model, optimizer)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    other = layers(**WRAPPINGS[loaded])
    second = adam(other)
    load(other, second, full)
    found = optim_utils.full_optim_state_dict(other, second, recipient_rank=None)
    assert found is not None
    for name, state in expected["state"].items():
        assert_same(found["state"][name], state, name)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@on_ranks(2)
def test_an_order_of_the_optimizer_is_kept(wrapping: str) -> None:
    model = layers(**WRAPPINGS[wrapping])
    optimizer = torch.optim.Adam([*model.parameters()][::-1])
    expected = stepped(model, optimizer)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    second = torch.optim.Adam([*model.parameters()][::-1])
    _by_shard(model, second, full)
    assert_same(optim_utils.full_optim_state_dict(model, second, recipient_rank=None)["state"], expected["state"])


@on_ranks(2)
def test_names_without_an_order_need_the_optimizer_if_the_model_lists_others_first() -> None:
    model = layers(**WRAPPINGS["flat"])
    full = stepped(model, adam(model))
    other = layers(**WRAPPINGS["original"])
    with pytest.raises(ValueError, match=r"perhaps the optimizer's: pass the optimizer as well: .*shard_full_optim"):
        other.get_shard_from_optim_state_dict(full)
    second = adam(other)
    _by_shard_full(other, second, full)
    found = optim_utils.full_optim_state_dict(other, second, recipient_rank=None)
    assert found is not None
    assert found["state"].keys() == full["state"].keys()
