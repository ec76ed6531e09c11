"""`load_state_dict` of modules inside of a wrapped model is kept in the shards, with torch's rules and plain names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, TrainingState, get_fsdp_instances
from tests.helpers.changed_params import LAYOUTS, ChangedTwins, adamw, find, momentum
from tests.helpers.equality import assert_same
from tests.helpers.models import Net, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import MakeOptimizer, fully_sharded

PARTS = {
    "the module in the wrapper": "",
    "a part of a unit": "entry",
    "the module of an inner unit": "trunk",
    "a unit of the innermost kind": "trunk.2",
    "a part of an inner unit": "trunk.2.0",
}

in_every_layout = parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True])


def other_state(path: str) -> dict[str, Tensor]:
    """What a plain module of this kind has, with other values."""
    return find(nested_mlp(keep, seed=7), path).state_dict()


def assert_idle(model: nn.Module) -> None:
    assert {wrapper.training_state for wrapper in get_fsdp_instances(model)} == {TrainingState.IDLE}


@parametrize_pairs(
    at_most=6,
    part=list(PARTS),
    world_size=[2, 1],
    layout=list(LAYOUTS),
    whole=[False, True],
    make_optimizer=[momentum, adamw],
)
@on_ranks("world_size")
def test_a_module_inside_is_loaded(part: str, layout: str, whole: bool, make_optimizer: MakeOptimizer) -> None:
    path = PARTS[part]
    twins = ChangedTwins(layout, make_optimizer=make_optimizer, reshard_after_forward=not whole)

    def change() -> None:
        for model in twins.models:
            result = find(model, path).load_state_dict(other_state(path))
            assert result.missing_keys == result.unexpected_keys == []
        assert_idle(twins.sharded)
        twins.assert_close()

    twins.train(change, whole=whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_module_is_loaded_before_anything_has_run(layout: str) -> None:
    twins = ChangedTwins(layout)
    for model in twins.models:
        find(model, "trunk.2.0").load_state_dict(other_state("trunk.2.0"))
    twins.train(lambda: None)


@in_every_layout
@on_ranks("world_size")
def test_the_attribute_module_is_loaded_as_that_of_other_wrappers(layout: str, whole: bool) -> None:
    twins = ChangedTwins(layout, reshard_after_forward=not whole)

    def change() -> None:
        for model in twins.models:
            result = getattr(model, "module", model).load_state_dict(other_state(""))
            assert result.missing_keys == result.unexpected_keys == []
        assert_idle(twins.sharded)
        twins.assert_close()

    twins.train(change, whole=whole)


def container(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Modules without parameters of their own around a unit and a part of the outer one."""
    unit = wrap(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    return Net(
        lambda net, x: net.parts["norm"](net.parts["own"](net.parts["unit"](x))),
        parts=nn.ModuleDict({"unit": unit, "own": nn.Linear(5, 5), "norm": nn.BatchNorm1d(5, affine=False)}),
    )


def contained(wrap: Callable[[nn.Module], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return wrap(container(wrap))


@in_every_layout
@on_ranks("world_size")
def test_a_container_with_units_inside_is_loaded(layout: str, whole: bool) -> None:
    # In training mode batches would be normalised per rank.
    twins = ChangedTwins(layout, contained, reshard_after_forward=not whole)
    for model in twins.models:
        find(model, "parts.norm").eval()
    state = find(contained(keep, seed=7), "parts").state_dict()

    def change() -> None:
        for model in twins.models:
            result = find(model, "parts").load_state_dict(state)
            assert result.missing_keys == result.unexpected_keys == []
        assert_idle(twins.sharded)
        twins.assert_close()

    twins.train(change, whole=whole)


# Keys that do not fit


def without_weight(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.endswith("weight")}


def with_another(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "another": torch.ones(1)}


@parametrize_cases(
    at_most=5, part=list(PARTS), layout=list(LAYOUTS), spoil=[without_weight, with_another], strict=[True, False]
)
@on_ranks(2)
def test_keys_that_do_not_fit_are_named_as_in_the_plain_model(case: Case) -> None:
    path = PARTS[case.part]
    twins = ChangedTwins(case.layout)
    said = [_told(find(model, path), case.spoil(other_state(path)), case.strict) for model in twins.models]
    assert said[0] == said[1]
    assert said[0]
    assert_idle(twins.sharded)
    twins.assert_close()  # what fits was loaded in both
    twins.train(lambda: None)


def _told(module: nn.Module, state: dict[str, Tensor], strict: bool) -> list[str]:
    """The lines of the error, or the keys."""
    if strict:
        with pytest.raises(RuntimeError) as caught:
            module.load_state_dict(state)
        return str(caught.value).replace("ShardedParamsWrapper", type(module).__name__).splitlines()[1:]
    result = module.load_state_dict(state, strict=False)
    return [*result.missing_keys, *result.unexpected_keys]


@parametrize_pairs(
    at_most=4, part=["the module in the wrapper", "a part of a unit"], world_size=[2, 1], layout=list(LAYOUTS)
)
@on_ranks("world_size")
def test_a_value_of_another_shape_is_an_error_that_names_it(part: str, layout: str) -> None:
    path = PARTS[part]
    twins = ChangedTwins(layout)
    name = "weight" if path else "entry.weight"
    for model in twins.models:
        with pytest.raises(RuntimeError, match=rf"size mismatch for {name}: .*\[2, 2\]"):
            find(model, path).load_state_dict({**other_state(path), name: torch.ones(2, 2)})
    twins.assert_close()
    twins.train(lambda: None)


# Exceptions, and whole parameters


class Stubborn(nn.Linear):
    """Does not load, but for the last time."""

    refuse = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if Stubborn.refuse:
            raise KeyboardInterrupt
        super()._load_from_state_dict(*args, **kwargs)


def stubborn(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), wrap(nn.Sequential(nn.Linear(5, 5), Stubborn(5, 5))), nn.Linear(5, 5)))


@parametrize_pairs(path=["", "1"], world_size=[2, 1], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_an_exception_in_the_middle_leaves_the_model_usable(path: str, layout: str) -> None:
    twins = ChangedTwins(layout, stubborn)
    state = {name: value + 1 for name, value in find(twins.plain, path).state_dict().items()}
    Stubborn.refuse = True
    try:
        for model in twins.models:
            with pytest.raises(KeyboardInterrupt):
                find(model, path).load_state_dict(state)
        twins.train(lambda: None)  # equal: what came before the exception was loaded in both
    finally:
        Stubborn.refuse = False
    for model in twins.models:
        find(model, path).load_state_dict(state)
    twins.assert_close()


class Doubling(nn.Linear):
    """Loads by a way of its own, that leaves no trace on the parameters."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.data.mul_(2)
        self.bias.data.copy_(state_dict[prefix + "bias"])


@on_ranks(2)
def test_what_a_load_writes_through_data_is_kept() -> None:
    plain = Doubling(5, 3)
    model = FullyShardedDataParallel(copy.deepcopy(plain))
    state = {"weight": torch.zeros(3, 5), "bias": torch.ones(3)}
    for each in (plain, model):
        each.load_state_dict(state)
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()), rtol=0, atol=0)


@parametrize_pairs(at_most=6, part=list(PARTS), world_size=[2, 1], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_a_module_is_loaded_inside_summon_full_params(part: str, layout: str) -> None:
    path = PARTS[part]
    twins = ChangedTwins(layout)
    twins.step()
    with twins.sharded.summon_full_params():  # type: ignore[operator]
        for model in twins.models:
            find(model, path).load_state_dict(other_state(path))
    twins.train(lambda: None)


@parametrize_pairs(
    at_most=5, part=list(PARTS), world_size=[2, 1], layout=[name for name in LAYOUTS if name != "unflattened"]
)
@on_ranks("world_size")
def test_the_state_of_a_module_inside_is_refused(part: str, layout: str) -> None:
    path = PARTS[part]
    twins = ChangedTwins(layout)
    twins.step()
    with pytest.raises(
        RuntimeError, match=r"inside a FullyShardedDataParallel would hold this rank's shards"
    ) as raised:
        find(twins.sharded, path).state_dict()
    assert "Call state_dict() of the wrapper on every rank" in str(raised.value), "one rank alone would wait"
    with twins.sharded.summon_full_params():  # type: ignore[operator]
        found = find(twins.sharded, path).state_dict()
    assert sorted(found) == sorted(find(twins.plain, path).state_dict())
    twins.train(lambda: None)


@parametrize_pairs(part=list(PARTS), world_size=[2, 1])
@on_ranks("world_size")
def test_without_flattening_a_module_inside_lists_and_saves_its_shards(part: str) -> None:
    path = PARTS[part]
    twins = ChangedTwins("unflattened")
    twins.step()
    module, plain = find(twins.sharded, path), find(twins.plain, path)
    with warnings.catch_warnings(record=True) as caught:
        state = module.state_dict()
    told = {str(each.message) for each in caught if "holds this rank's shards" in str(each.message)}
    assert bool(told) is (dist.get_world_size() > 1)
    assert all("Call state_dict() of the wrapper on every rank" in message for message in told)
    listed = dict(module.named_parameters())
    assert list(state) == list(plain.state_dict())
    inside = tuple(f"{name}." for name, each in module.named_modules() if isinstance(each, FullyShardedDataParallel))
    own = [name for name in state if not name.startswith(inside)]
    assert {name for name, _ in plain.named_parameters() if name.count(".") == 0} <= set(own)
    for name in own:
        assert torch.equal(state[name], listed[name])
        assert not state[name].requires_grad
    for name in state.keys() - set(own):  # of wrappers inside, which give whole values
        torch.testing.assert_close(state[name], plain.state_dict()[name])
    local = twins.sharded.local_state_dict()  # type: ignore[operator]
    prefix = f"{path}." if path else ""
    for name in own:
        assert torch.equal(state[name], local[prefix + name])
    twins.train(lambda: None)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_loading_a_part_in_the_middle_of_a_backward_is_refused(layout: str) -> None:
    twins = ChangedTwins(layout)

    def load(gradient: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"cannot load a state dict in the middle of a forward or backward"):
            find(twins.sharded, "entry").load_state_dict(other_state("entry"))

    output = twins.sharded(torch.ones(2, 5))
    output.register_hook(load)
    output.sum().backward()
    for optimizer in twins.optimizers:
        optimizer.zero_grad()
    twins.train(lambda: None)


@parametrize_pairs(world_size=[2, 3], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_the_module_of_a_wrapper_answers_as_the_users_own(layout: str) -> None:
    model: Any = fully_sharded(**LAYOUTS[layout])(nested_mlp(keep))
    if layout == "unflattened":  # as FairScale's, for example when `local_state_dict()` is compared with it
        with pytest.warns(UserWarning, match=r"holds this rank's shards, as FairScale's does.*local_state_dict\(\)"):
            state = model.module.state_dict()
        assert_same(state, model.local_state_dict())
        return
    remedy = r"Call state_dict\(\) of the wrapper on every rank.*local_state_dict\(\) of the wrapper returns shards"
    with pytest.raises(RuntimeError, match=f"would hold this rank's shards.*{remedy}"):
        model.module.state_dict()
    with model.summon_full_params():
        assert_same(model.module.state_dict(), nested_mlp(keep).state_dict())
