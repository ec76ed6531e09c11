"""`summon_full_params` with gradients, and with whole parameters on the first rank only.

Answers pain point 15: combinations that raise `NotImplementedError` elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, ShardingStrategy, TrainingState, get_fsdp_instances
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.twins import assert_at_rest


def pair(**options: Any) -> tuple[nn.Module, Any]:
    """The plain model and the wrapped one, after the same backward."""
    torch.set_default_dtype(torch.float64)
    models = nested_mlp(), nested_mlp(fully_sharded(**options))
    for model in models:
        model(torch.ones(2, 5)).sin().sum().backward()
    return models


FORMS = [{}, {"use_orig_params": True}, {"flatten_parameters": False}, {"move_params_to_cpu": True}]


@parametrize_cases(world_size=[2, 1], rank0_only=[False, True], volatile=[False, True], options=FORMS)
@on_ranks("world_size")
def test_every_combination_shows_and_keeps_what_it_says_pain_point_15(case: Case) -> None:
    plain, model = pair(**case.options)
    before = model.state_dict()
    with model.summon_full_params(rank0_only=case.rank0_only, volatile=case.volatile, with_grads=True):
        if dist.get_rank() == 0 or not case.rank0_only:
            shown = dict(model.named_parameters())
            for name, param in plain.named_parameters():
                torch.testing.assert_close(shown[name], param)
                torch.testing.assert_close(shown[name].grad, param.grad)
            with torch.no_grad():
                shown["trunk.0.weight"].mul_(2.0)
                shown["entry.bias"].grad.add_(1.0)
                shown["gate.weight"].grad = None
    after = model.state_dict()
    factor = 1.0 if case.volatile else 2.0
    torch.testing.assert_close(after["trunk.0.weight"], factor * before["trunk.0.weight"])
    torch.testing.assert_close(after["entry.weight"], before["entry.weight"])
    assert_at_rest(model)
    with model.summon_full_params(with_grads=True, volatile=True):
        shown = dict(model.named_parameters())
        added = 0.0 if case.volatile else 1.0
        torch.testing.assert_close(shown["entry.bias"].grad, dict(plain.named_parameters())["entry.bias"].grad + added)
        assert (shown["gate.weight"].grad is None) is (not case.volatile)


@on_ranks(2)
def test_the_model_trains_on_with_what_the_first_rank_has_changed() -> None:
    plain, model = pair()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    with torch.no_grad():
        plain.entry.weight.fill_(0.5)  # type: ignore[operator, union-attr]
        plain.entry.bias.grad.mul_(3.0)  # type: ignore[operator, union-attr]
        with model.summon_full_params(rank0_only=True, with_grads=True):
            if dist.get_rank() == 0:
                model.module.entry.weight.fill_(0.5)
                model.module.entry.bias.grad.mul_(3.0)
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        one(torch.ones(2, 5)).sin().sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()))


@on_ranks(2)
def test_units_that_are_unsharded_on_all_ranks_stay_so_if_the_first_rank_changes_others() -> None:
    """Storing an unchanged parameter on the first rank alone would make this rank wait for an all-gather."""
    plain, model = pair(sharding_strategy=ShardingStrategy.SHARD_OPTIM_GRADS)
    with torch.no_grad():
        plain.entry.weight.fill_(0.5)  # type: ignore[operator, union-attr]
        with model.summon_full_params(rank0_only=True):
            if dist.get_rank() == 0:
                model.module.entry.weight.fill_(0.5)
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()))
    inputs = torch.ones(2, 5)
    torch.testing.assert_close(model(inputs), plain(inputs))


@on_ranks(4)
def test_replicas_get_what_the_first_rank_of_all_has_changed() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = FullyShardedDataParallel(nn.Linear(5, 3), process_group=mesh)
    with model.summon_full_params(rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            model.module.weight.fill_(7.0)
    assert model.state_dict()["weight"].eq(7.0).all()
    with model.summon_full_params(rank0_only=True):
        if dist.get_rank() == 0:
            model.module.weight.data.fill_(5.0)  # which no version counter shows
            model.module.bias.detach().numpy()[:] = 3.0
    assert model.state_dict()["weight"].eq(5.0).all()
    assert model.state_dict()["bias"].eq(3.0).all()


@on_ranks(2)
def test_other_ranks_stay_sharded() -> None:
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    with model.summon_full_params(rank0_only=True):
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="weight is sharded"):
                model.module.weight.sum()
            assert [param.numel() for param in model.parameters()] == [9]
        else:
            assert model.module.weight.shape == (3, 5)


class Single(nn.Module):
    """The first rank alone has an element of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale + self.empty.sum()


@on_ranks(2, timeout=60)
def test_shows_the_gradients_of_ranks_that_have_elements() -> None:
    """Users leave empty local shards out of optimizers, whose `zero_grad()` keeps the gradients of these."""
    torch.manual_seed(0)
    wrap = fully_sharded(use_orig_params=True)
    model = wrap(nn.Sequential(wrap(Single()), nn.Linear(4, 4)))
    trained = {name: param for name, param in model.named_parameters() if param.numel()}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    with model.summon_full_params(with_grads=True):
        assert [name for name, param in model.named_parameters() if param.grad is not None] == ["0.empty"]
    if dist.get_rank() == 0:
        trained["0.scale"].grad = torch.full((1,), 3.0)
    with model.summon_full_params(with_grads=True):
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        assert grads.keys() == {"0.scale", "0.empty"}
        assert grads["0.scale"] == 3.0
        grads["0.scale"].mul_(2.0)
    if dist.get_rank() == 0:
        assert trained["0.scale"].grad == 6.0


@pytest.mark.parametrize("name", ["rank0_only", "volatile", "with_grads", "offload_to_cpu", "recurse"])
@on_ranks(2)
def test_arguments_that_differ_between_ranks_are_an_error_on_all(name: str) -> None:
    model: Any = nested_mlp(fully_sharded())
    given = {name: dist.get_rank() == 1}
    with (
        pytest.raises(RuntimeError, match=rf"rank 0 has .*{name}=False.* and rank 1 has .*{name}=True"),
        model.summon_full_params(**given),
    ):
        pass
    assert_at_rest(model)


@on_ranks(2)
def test_a_change_that_cannot_be_kept_is_told_to_all_ranks() -> None:
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    with pytest.raises(RuntimeError, match="weight"):
        _misshape_on_first(model)
    assert model.state_dict()["bias"].eq(1.0).all()
    assert_at_rest(model)


def _misshape_on_first(model: Any) -> None:
    with model.summon_full_params(rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            model.module.module.weight = nn.Parameter(torch.ones(2, 2))
            model.module.bias.fill_(1.0)


@on_ranks(2)
def test_gradients_that_are_not_reduced_are_not_shown() -> None:
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="not reduced"), model.summon_full_params(with_grads=True):
        pass
    with model.summon_full_params():
        pass


@on_ranks(2)
def test_on_the_host_values_and_gradients_are_kept_as_well() -> None:
    plain, model = pair()
    with model.summon_full_params(with_grads=True, offload_to_cpu=True):
        shown = dict(model.named_parameters())
        assert {param.device.type for param in shown.values()} == {"cpu"}
        with torch.no_grad():
            shown["entry.weight"].mul_(3.0)
    with torch.no_grad():
        plain.entry.weight.mul_(3.0)
    torch.testing.assert_close(model.state_dict()["entry.weight"], plain.state_dict()["entry.weight"])


@on_ranks(2)
def test_no_state_dict_while_other_ranks_are_sharded() -> None:
    _, model = pair()
    with (
        model.summon_full_params(rank0_only=True),
        pytest.raises(RuntimeError, match=r"Call it outside the context, with state_dict\(rank0_only=True\)"),
    ):
        model.state_dict()


# Unit by unit


@parametrize_pairs(world_size=[2, 1], rank0_only=[False, True], volatile=[False, True], options=FORMS)
@on_ranks("world_size")
def test_units_are_shown_one_after_the_other(rank0_only: bool, volatile: bool, options: dict[str, Any]) -> None:
    plain, model = pair(**options)
    before, found = model.state_dict(), {}
    wrappers = get_fsdp_instances(model)
    for number, (module, params) in enumerate(model.summon_units(volatile=volatile, rank0_only=rank0_only)):
        assert module is wrappers[number].module.module
        summoned = [each.training_state is TrainingState.SUMMON_FULL_PARAMS for each in wrappers]
        assert summoned == [each is wrappers[number] for each in wrappers], "one unit at a time"
        found.update({name: param.detach().clone() for name, param in params.items()})
        with torch.no_grad():
            for param in params.values():
                param.mul_(2.0)
    expected = dict(plain.named_parameters()) if dist.get_rank() == 0 or not rank0_only else {}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].detach())
    for name, value in model.state_dict().items():
        is_param = name in dict(plain.named_parameters(remove_duplicate=False))
        torch.testing.assert_close(value, before[name] * (2 if is_param and not volatile else 1))
    assert_at_rest(model)


@on_ranks(2)
def test_units_around_one_module_show_its_parameters_by_plain_names() -> None:
    model = FullyShardedDataParallel(FullyShardedDataParallel(nn.Linear(2, 2)))
    assert [list(params) for _, params in model.summon_units()] == [[], ["weight", "bias"]]


@on_ranks(2)
def test_leaving_the_loop_shards_the_unit_again() -> None:
    _, model = pair()
    for _, params in model.summon_units():
        with torch.no_grad():
            params["entry.weight"].zero_()
        break
    assert_at_rest(model)
    assert not model.state_dict()["entry.weight"].any()
    with pytest.raises(KeyError, match="missing"):  # noqa: PT012 - raised inside the loop
        for _, params in model.summon_units():
            params["missing"].zero_()
    assert_at_rest(model)


@on_ranks(1)
def test_a_gradient_that_is_missing_stays_missing_on_the_host() -> None:
    model: Any = fully_sharded(flatten_parameters=False)(nn.ModuleList([nn.Linear(2, 2)]))
    with model.summon_full_params(with_grads=True, offload_to_cpu=True):
        assert [param.grad for param in model.parameters()] == [None, None]
