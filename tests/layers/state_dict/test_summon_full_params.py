"""`summon_full_params`, `apply` and `reset_parameters`: whole parameters, as if nothing was wrapped, and back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, TrainingState, get_fsdp_instances
from fsdp.engine.shard_values import ShardValues
from tests.helpers.calls import users
from tests.helpers.equality import assert_same_state
from tests.helpers.models import tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, nested_mlp, sgd_with_momentum

tied_transformer = partial(tiny_transformer, tied=True)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 10).view(2, 5)


def step(model: nn.Module) -> None:
    optimizer = sgd_with_momentum(model.parameters())
    model(inputs()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_at_rest(model: nn.Module, plain: nn.Module) -> None:
    """Collective. The same state, and the model is at rest."""
    assert_same_state(model.state_dict(), plain.state_dict())
    for wrapper in get_fsdp_instances(model):
        wrapper.assert_state(TrainingState.IDLE)
        assert all(param._is_sharded == (wrapper.world_size > 1) for param in wrapper.params)


def forget() -> None:
    """Whatever memory is not referenced any more is written over by somebody else."""
    gc.collect()
    scratch = [torch.full((77,), float("nan")) for _ in range(100)]
    del scratch


# What is seen inside


@parametrize_pairs(world_size=[1, 2, 3, 4], flatten_parameters=[True, False])
@on_ranks("world_size")
def test_names_shapes_and_values_are_the_plain_modules(flatten_parameters: bool) -> None:
    model, plain = nested_mlp(fully_sharded(flatten_parameters=flatten_parameters)), nested_mlp()
    before = [(name, id(param)) for name, param in model.named_parameters()]
    with model.summon_full_params():
        model.assert_state(TrainingState.SUMMON_FULL_PARAMS)
        expected = dict(plain.named_parameters())
        found = dict(model.named_parameters())
        assert list(found) == list(expected)
        for name, param in found.items():
            assert type(param) is nn.Parameter
            assert param.is_leaf
            assert param.requires_grad
            assert torch.equal(param, expected[name]), name
        inside = users(model)
        assert list(dict(inside.entry.named_parameters())) == ["weight", "bias"]
        assert isinstance(inside.scale, nn.Parameter)
        assert inside.trunk[0].weight.shape == (11, 7)
    assert [(name, id(param)) for name, param in model.named_parameters()] == before
    assert_same_at_rest(model, plain)


@on_ranks(2)
def test_tied_and_frozen_parameters_stay_what_they_are() -> None:
    plain = tied_transformer()
    plain.positions.requires_grad_(False)
    model = FullyShardedDataParallel(plain)
    with model.summon_full_params():
        inside = users(model)
        assert inside.head.weight is inside.tokens.weight
        assert not inside.positions.weight.requires_grad
        assert inside.norm.weight.requires_grad
        assert dict(model.named_parameters()).keys() == dict(tied_transformer().named_parameters()).keys()


@on_ranks(2)
def test_only_the_own_ones_without_recurse() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    with model.summon_full_params(recurse=False):
        found = dict(model.named_parameters())
        assert list(found) == [
            "scale",
            "entry.weight",
            "entry.bias",
            "trunk.flat_param_0",
            "trunk.2.flat_param_0",
            "gate.flat_param_0",
            "exit.weight",
            "exit.bias",
        ]
        assert torch.equal(found["entry.weight"], plain.entry.weight)
        assert found["gate.flat_param_0"].shape == (2,), "an inner wrapper's is this rank's shard"
        users(model).trunk.assert_state(TrainingState.IDLE)
        with users(model).trunk.summon_full_params(recurse=False):  # wrapper by wrapper is no nesting
            assert torch.equal(users(model).trunk.module[0].weight, plain.trunk[0].weight)
        with torch.no_grad():
            assert torch.equal(model(inputs()), plain(inputs()))
            users(model).entry.bias.fill_(2.0)
            plain.entry.bias.fill_(2.0)
    assert_same_at_rest(model, plain)
    step(model)


@on_ranks(3)
def test_an_inner_wrapper_alone() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    for _ in range(2):
        with users(model).trunk.summon_full_params(), torch.no_grad():
            users(model).trunk.module[0].weight.add_(1.0)
            model.assert_state(TrainingState.IDLE)
        with torch.no_grad():
            plain.trunk[0].weight.add_(1.0)
        assert_same_at_rest(model, plain)
        step(model)
        plain.load_state_dict(model.state_dict())


@on_ranks(1, 2)
def test_parameters_stay_valid_after_leaving() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    with model.summon_full_params():
        kept = dict(model.named_parameters())
        views = {name: param[None].detach() for name, param in kept.items()}
    forget()
    step(model)
    for name, param in plain.named_parameters():
        assert torch.equal(kept[name], param), name
        assert torch.equal(views[name][0], param), name
    with torch.no_grad():
        kept["entry.weight"].zero_()  # and is nobody's any more
    assert model.state_dict()["entry.weight"].count_nonzero()


@on_ranks(2)
def test_summoning_between_steps_changes_nothing() -> None:
    models = [nested_mlp(fully_sharded()), nested_mlp(fully_sharded())]
    optimizers = [sgd_with_momentum(model.parameters()) for model in models]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs()).square().mean().backward()
            if model is models[0]:
                grads = [param.grad for param in model.parameters()]
                with model.summon_full_params():
                    assert all(param.grad is None for param in model.parameters())
                assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
            optimizer.step()
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_looking_between_forward_and_backward(reshard_after_forward: bool) -> None:
    wrap = fully_sharded(reshard_after_forward=reshard_after_forward)
    model, undisturbed = nested_mlp(wrap), nested_mlp(wrap)
    loss = model(inputs()).sum()
    with model.summon_full_params(volatile=True):
        assert torch.equal(users(model).entry.weight, nested_mlp().entry.weight)
    loss.backward()
    undisturbed(inputs()).sum().backward()
    for found, expected in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


# What is changed inside


def in_place(module: Any) -> None:
    with torch.no_grad():
        module.entry.weight.mul_(2.0)
        module.scale.fill_(3.0)
        module.gate.weight[0, 2] = 9.0


def by_data(module: Any) -> None:
    module.entry.weight.data = module.entry.weight.data * 2.0
    module.gate.weight.data.zero_()


def by_assignment(module: Any) -> None:
    module.entry.weight = nn.Parameter(torch.arange(35.0).view(7, 5))
    module.trunk[0].weight = nn.Parameter(torch.full((11, 7), 2.0))


def by_an_awkward_assignment(module: Any) -> None:
    module.entry.weight = nn.Parameter(torch.arange(35.0).view(5, 7).T)  # not contiguous
    module.exit.weight = nn.Parameter(torch.arange(3.0, dtype=torch.float64)[None])  # another dtype


def with_init(module: Any) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(module.entry.weight)
    nn.init.normal_(module.trunk[0].weight)


@pytest.mark.parametrize("volatile", [False, True])
@on_ranks(1, 3)
def test_changes_are_kept_and_forgotten_if_volatile(volatile: bool) -> None:
    for change in (in_place, by_data, by_assignment, by_an_awkward_assignment, with_init):
        model, plain = nested_mlp(fully_sharded()), nested_mlp()
        params = [id(param) for param in model.parameters()]
        with model.summon_full_params(volatile=volatile):
            change(users(model))
        if not volatile:
            change(plain)
        state = {key: value.float() for key, value in plain.state_dict().items()}
        plain = nested_mlp()
        plain.load_state_dict(state)
        assert_same_at_rest(model, plain)
        assert torch.equal(model(inputs()), plain(inputs())), change.__name__
        assert [id(param) for param in model.parameters()] == params, "optimizers go on working"
        step(model)


@on_ranks(2)
def test_tied_parameters_change_under_both_names() -> None:
    model = tied_transformer(fully_sharded())
    with model.summon_full_params(), torch.no_grad():
        users(model).head.weight.fill_(2.0)
        assert (users(model).tokens.weight == 2.0).all()
    assert (model.state_dict()["tokens.weight"] == 2.0).all()
    with model.summon_full_params():
        users(model).head.weight = users(model).tokens.weight = nn.Parameter(torch.full((29, 9), 3.0))
    assert (model.state_dict()["head.weight"] == 3.0).all()
    with pytest.raises(RuntimeError, match=r"replaced under only some of its names \(.*tokens\.weight"):
        _change(model, _untie)
    state = model.state_dict()
    assert torch.equal(state["head.weight"], state["tokens.weight"])
    assert (state["norm.bias"] == 4.0).all(), "the rest is kept"


def _change(model: Any, *changes: Callable[[Any], None]) -> None:
    with model.summon_full_params():
        for change in changes:
            change(users(model))


def _untie(module: Any) -> None:
    module.head.weight = nn.Parameter(torch.zeros(29, 9))
    module.norm.bias.data.fill_(4.0)


def reshape(module: Any) -> None:
    module.entry.weight = nn.Parameter(torch.zeros(5, 7))


def reshape_data(module: Any) -> None:
    module.entry.weight.data = torch.zeros(5, 7)


def remove(module: Any) -> None:
    del module.entry.weight


def replace_by_none(module: Any) -> None:
    module.entry.weight = None


def others(module: Any) -> None:
    module.entry.bias.data.fill_(2.0)
    module.gate.weight.data.fill_(3.0)


@on_ranks(1, 2)
def test_the_error_of_an_impossible_change_names_the_parameter_and_the_rest_is_kept() -> None:
    for change in (reshape, reshape_data, remove, replace_by_none):
        is_there = change in (reshape, reshape_data)
        model, plain = nested_mlp(fully_sharded()), nested_mlp()
        with pytest.raises(
            RuntimeError,
            match=r"entry\.weight" + (r": expected shape \(7, 5\), got \(5, 7\)" if is_there else " was removed"),
        ):
            _change(model, change, others)
        others(plain)
        assert_same_at_rest(model, plain)
        step(model)
        with model.summon_full_params():
            assert users(model).entry.weight.shape == (7, 5)


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(1, 2)
def test_freezing_inside_is_kept_or_refused(rank0_only: bool) -> None:
    model = nested_mlp(fully_sharded())
    before = model.state_dict()
    try:
        with model.summon_full_params(rank0_only=rank0_only):
            for param in model.parameters():
                param.requires_grad_(False)
    except RuntimeError as error:
        assert "requires_grad" in str(error)  # noqa: PT017 (either way is right)
    else:
        out = model(inputs())
        if out.requires_grad:
            out.sum().backward()
        assert all(param.grad is None for param in model.parameters()), "freezing was ignored"
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# Forward inside


@on_ranks(1, 2)
def test_forward_inside_works_without_gradients() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    for used_before in (False, True):
        with model.summon_full_params():
            with torch.no_grad():
                assert torch.equal(model(inputs()), plain(inputs()))
                assert torch.equal(users(model)(inputs()), plain(inputs()))
            with torch.inference_mode():
                assert torch.equal(model(inputs()), plain(inputs()))
            with pytest.raises(RuntimeError, match=r"inside summon_full_params\(\) works for inference only.*no_grad"):
                model(inputs())
            with torch.no_grad():  # what is changed is computed with at once
                for module in (users(model), plain):
                    module.entry.bias.add_(1.0)
                    module.gate.weight.add_(1.0)
                assert torch.equal(model(inputs()), plain(inputs()))
        assert_same_at_rest(model, plain)
        if not used_before:
            step(model)
            plain.load_state_dict(model.state_dict())


# The wrong moment


@on_ranks(1, 2)
def test_it_nests_in_the_same_form() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    trunk = users(model).trunk
    with model.summon_full_params():
        shown = users(model).entry.weight
        for each in (model, trunk):
            with each.summon_full_params(), torch.no_grad():
                assert users(model).entry.weight is shown
                trunk.module[0].weight.add_(1.0)
        model.assert_state(TrainingState.SUMMON_FULL_PARAMS)
        assert users(model).entry.weight is shown, "the outer one goes on"
    with trunk.summon_full_params(), torch.no_grad():
        with model.summon_full_params():
            users(model).entry.weight.add_(1.0)
        model.assert_state(TrainingState.IDLE)
        trunk.assert_state(TrainingState.SUMMON_FULL_PARAMS)
        trunk.module[0].weight.add_(1.0)
    with torch.no_grad():
        plain.trunk[0].weight.add_(1.0).add_(1.0).add_(1.0)
        plain.entry.weight.add_(1.0)
    assert_same_at_rest(model, plain)
    step(model)


@on_ranks(2)
def test_it_does_not_nest_in_another_form() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    trunk = users(model).trunk
    for outer, inner, missing in (
        ({}, {"volatile": True}, "volatile=True"),
        ({"volatile": True}, {}, "volatile=False"),
        ({}, {"rank0_only": True}, "rank0_only=True"),
        ({}, {"with_grads": True, "offload_to_cpu": True}, "offload_to_cpu=True, with_grads=True"),
    ):
        with model.summon_full_params(**outer):
            with pytest.raises(RuntimeError, match=rf"nested summon_full_params.* already, without {missing}\."):
                trunk.summon_full_params(**inner).__enter__()
            assert torch.equal(users(model).entry.weight, plain.entry.weight), "the outer one goes on"
    with model.summon_full_params(with_grads=True), trunk.summon_full_params():
        pass
    assert_same_at_rest(model, plain)
    step(model)


def fail(module: nn.Module) -> None:
    raise ValueError("of the user")


@on_ranks(1, 2)
def test_an_exception_inside_shards_again() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    for recurse in (True, False):
        for volatile in (True, False):
            with pytest.raises(ValueError, match="of the user"), model.summon_full_params(recurse, volatile):
                fail(users(model))
            assert_same_at_rest(model, plain)
    with pytest.raises(RuntimeError, match=r"entry\.weight was removed") as error:
        _change(model, remove, fail)
    assert isinstance(error.value.__context__, ValueError), "the user's exception is shown as well"
    assert_same_at_rest(model, plain)
    step(model)


@on_ranks(1, 2)
def test_an_optimizer_made_inside_is_refused_at_its_step() -> None:
    model = nested_mlp(fully_sharded())
    with model.summon_full_params():
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match=r"a summoned copy of .*weight"):
        inside.step()
    sgd_with_momentum(model.parameters()).step()


# apply and reset_parameters


def initialise(module: nn.Module) -> None:
    """What users pass to `apply`."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.uniform_(module.bias)
    elif isinstance(module, nn.PReLU):
        nn.init.constant_(module.weight, 0.3)


@parametrize_pairs(world_size=[1, 3], flatten_parameters=[True, False])
@on_ranks("world_size")
def test_apply_initialises_as_the_plain_module(flatten_parameters: bool) -> None:
    model, plain = nested_mlp(fully_sharded(flatten_parameters=flatten_parameters)), nested_mlp()
    parent = nn.Sequential(nested_mlp(fully_sharded()))
    for module in (model, plain, parent):
        torch.manual_seed(7)
        assert module.apply(initialise) is module
    assert_same_at_rest(model, plain)
    assert_same_at_rest(parent[0], plain)  # type: ignore[arg-type]
    with model.summon_full_params():
        torch.manual_seed(8)
        model.apply(initialise)
    torch.manual_seed(8)
    plain.apply(initialise)
    assert_same_at_rest(model, plain)
    step(model)


@on_ranks(2)
def test_apply_visits_every_module_once() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    visited: list[nn.Module] = []
    model.apply(visited.append)
    assert len(set(visited)) == len(visited)
    assert set(visited) == set(model.modules())
    users_own = [type(module) for module in visited if "fsdp" not in type(module).__module__]
    expected: list[nn.Module] = []
    plain.apply(expected.append)
    assert users_own == [type(module) for module in expected]


@on_ranks(2)
def test_shards_are_written_only_when_peers_have_received_what_they_were_sent() -> None:
    model: Any = nested_mlp(fully_sharded())
    values = nested_mlp().state_dict()
    handles = [handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
    for write in (_write_in_summon, lambda model: model.load_state_dict(values)):
        written: list[str] = []
        with ExitStack() as patched:
            for name in ("store", "fill", "fill_local"):
                checked = _checked(getattr(ShardValues, name), written, handles)
                patched.enter_context(mock.patch.object(ShardValues, name, checked))
            write(model)
        assert written


def _checked(method: Any, written: list[str], handles: list[Any]) -> Any:
    def checked(values: Any, *args: Any, **kwargs: Any) -> Any:
        handle = next(handle for handle in handles if handle.values is values)
        written.append(handle.name)
        assert not handle.comm._sent
        return method(values, *args, **kwargs)

    return checked


def _write_in_summon(model: Any) -> None:
    with model.summon_full_params():
        for param in model.parameters():
            param.data.add_(1.0)


@on_ranks(1, 3)
def test_reset_parameters() -> None:
    plain = nn.Linear(5, 7)
    refused = FullyShardedDataParallel(nn.Linear(5, 7))
    before = refused.state_dict()
    with pytest.raises(RuntimeError, match="allow_reset_parameters=True"):
        refused.reset_parameters()
    assert torch.equal(refused.state_dict()["weight"], before["weight"])
    allowed = FullyShardedDataParallel(nn.Linear(5, 7), allow_reset_parameters=True)
    for layer in (allowed, plain):
        torch.manual_seed(9)
        layer.reset_parameters()  # type: ignore[operator]
    assert_same_at_rest(allowed, plain)
    model = FullyShardedDataParallel(nn.Sequential(allowed), allow_reset_parameters=True)
    with pytest.raises(AttributeError, match="reset_parameters"):
        model.reset_parameters()
    assert_same_at_rest(model, nn.Sequential(plain))
