"""Units that stay unsharded between forwards without gradients, within a budget."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.engine.phase import Phase
from fsdp.layers.first_use import TreeChecks
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import under_fully_shard
from tests.helpers.parity import fully_sharded, sgd_with_momentum
from tests.helpers.traffic import Counting, Traffic


class Looping(nn.Module):
    """Units of 12, 12 and 6 numbers, the first one around the second; and 2 numbers of the root."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.outer = wrap(Outer(wrap))
        self.head = wrap(nn.Linear(3, 2, bias=False))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.outer(inputs)) * self.scale


class Outer(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry, self.inner = nn.Linear(3, 3), wrap(nn.Linear(3, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(self.inner(self.entry(inputs)).tanh())


WRAPS: dict[str, Wrap] = {
    "flat": FullyShardedDataParallel,
    "orig": partial(FullyShardedDataParallel, use_orig_params=True),
    "rows": under_fully_shard,
}
every_form = pytest.mark.parametrize("form", list(WRAPS))


def looping(form: str) -> tuple[Any, nn.Module]:
    """A sharded model, and the plain one with the same weights."""
    torch.manual_seed(0)
    plain = Looping(keep)
    torch.manual_seed(0)
    return WRAPS[form](Looping(WRAPS[form])), plain


def unsharded_bytes(model: nn.Module) -> int:
    fulls = [handle.unsharded.full for handle in fsdp.flat_param_handles(model) if not handle.unsharded.is_shard]
    return sum(full.untyped_storage().nbytes() for full in fulls)


def received(traffic: Traffic) -> tuple[int, int]:
    found = traffic.values, traffic.words
    traffic.values = traffic.words = 0
    return found


@every_form
@on_ranks(1, 2, 3)
def test_forwards_without_gradients_communicate_nothing_within_the_budget(form: str) -> None:
    model, plain = looping(form)
    inputs, traffic = torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank())), Traffic()
    with Counting(traffic), torch.no_grad():
        model(inputs)
        is_alone = dist.get_world_size() == 1
        assert (received(traffic)[0] == 0) is is_alone
        with fsdp.resident(model) as names:
            assert len(names) == 4
            received(traffic)
            for _ in range(3 + dist.get_rank()):  # as many as this rank wants
                assert torch.equal(model(inputs), plain(inputs))
            assert received(traffic) == (0, 0)
        assert unsharded_bytes(model) == 0
        model(inputs)
        assert (received(traffic)[0] == 0) is is_alone


@on_ranks(2)
def test_units_are_kept_by_their_runs_then_the_innermost_then_the_smallest() -> None:
    model, _ = looping("flat")
    inputs = torch.randn(2, 3)
    with fsdp.resident(model, budget_bytes=79) as names, torch.no_grad():  # nothing has been counted
        assert names == ("outer.inner", "head")
        model(inputs)
        assert 0 < unsharded_bytes(model) <= 79
    with fsdp.resident(model, budget_bytes=60) as names, torch.no_grad():
        assert names == ("outer.inner", "root (Looping)")  # the head does not fit
        for _ in range(4):
            model.head(inputs)
    with fsdp.resident(model, budget_bytes=79) as names:
        assert names == ("head", "outer.inner")
    with fsdp.resident(model, budget_bytes=0) as names:
        assert names == ()


@every_form
@on_ranks(2)
def test_training_inside_reshards_units_and_new_values_are_gathered(form: str) -> None:
    model, plain = looping(form)
    optimizers = [sgd_with_momentum(each.parameters()) for each in (model, plain)]
    inputs, traffic = torch.randn(2, 3), Traffic()
    before, values = copy.deepcopy((model.state_dict(), plain.state_dict()))
    with fsdp.resident(model):
        for _ in range(2):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                with torch.no_grad():
                    each(inputs)
                each(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert all(handle.phase is Phase.SHARDED for handle in fsdp.flat_param_handles(model))
            with torch.no_grad():
                torch.testing.assert_close(model(inputs), plain(inputs))
                with Counting(traffic):
                    torch.testing.assert_close(model(inputs), plain(inputs))
                assert received(traffic) == (0, 0)
        with torch.no_grad():
            model.load_state_dict(before)
            plain.load_state_dict(values)
            torch.testing.assert_close(model(inputs), plain(inputs))
    torch.testing.assert_close(full_state(model), dict(plain.state_dict()))


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"sharding_strategy": ShardingStrategy.SHARD_OPTIM},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"offload": "cpu"},
    ],
    ids=str,
)
@on_ranks(2)
def test_it_goes_with_other_options(options: dict[str, Any]) -> None:
    model = nested_mlp(fully_sharded(**options))
    inputs, traffic = torch.randn(2, 5), Traffic()
    model(inputs).sum().backward()
    with torch.no_grad():
        expected = model.eval()(inputs)
        with fsdp.resident(model), Counting(traffic):
            assert torch.equal(model(inputs), expected)
            received(traffic)
            assert torch.equal(model(inputs), expected)
            assert received(traffic) == (0, 0)
    model.train()(inputs).sum().backward()


@on_ranks(2)
def test_contexts_may_be_nested_and_exceptions_leave_the_model_sharded() -> None:
    model, plain = looping("flat")
    inputs, traffic = torch.randn(2, 3), Traffic()
    with torch.no_grad():
        with fsdp.resident(model, budget_bytes=60):
            with fsdp.resident(model):
                model(inputs)
            assert 0 < unsharded_bytes(model) <= 60
            with Counting(traffic):
                model(inputs)
            assert received(traffic)[0] > 0
        assert unsharded_bytes(model) == 0
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), fsdp.resident(model):
            model(torch.randn(2, 4))
        assert unsharded_bytes(model) == 0
        assert torch.equal(model(inputs), plain(inputs))
    with torch.inference_mode(), fsdp.resident(model):
        assert torch.equal(model(inputs), plain(inputs))
    with torch.no_grad(), fsdp.resident(model):
        assert_same_state(full_state(model), plain.state_dict())
        assert torch.equal(model(inputs), plain(inputs))
    model(inputs).sum().backward()
    assert_same_state(full_state(model), plain.state_dict())
    assert type(model._unit.runtime.checks) is TreeChecks


@on_ranks(2)
def test_wrong_uses_are_errors_on_every_rank() -> None:
    model, _ = looping("flat")
    with pytest.raises(TypeError, match=r"fsdp.resident needs the outermost"), fsdp.resident(nn.Linear(1, 1)):
        pass
    with pytest.raises(ValueError, match="budget_bytes must not be negative, got -1"), fsdp.resident(model, -1):
        pass
    with (
        pytest.raises(RuntimeError, match=r"different budgets in fsdp.resident: rank 0 has 10 and rank 1 has 11"),
        fsdp.resident(model, 10 + dist.get_rank()),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"rank 0 has 1 and rank 1 has -1"),
        fsdp.resident(model, 1 - 2 * dist.get_rank()),
    ):
        pass
    inner = next(
        module for module in model.modules() if isinstance(module, FullyShardedDataParallel) and module is not model
    )
    with pytest.raises(RuntimeError, match="is for the outermost"), fsdp.resident(inner):
        pass
    with torch.no_grad():
        model(torch.randn(2, 3))


@every_form
@on_ranks(2, timeout=60, grace=1)
def test_training_inside_goes_on_after_ranks_have_run_different_numbers_of_forwards(form: str) -> None:
    model, plain = looping(form)
    inputs = torch.randn(2, 3)
    with fsdp.resident(model):
        for _ in range(2):
            with torch.no_grad():
                for _ in range(1 + dist.get_rank()):
                    model(inputs)
            for each in (model, plain):
                each(inputs).square().sum().backward()
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(full_state(model), dict(plain.state_dict()))
