"""`no_sync`: gradients accumulate without reductions, and come out as those of one large batch.

The numbers of gathers and reductions are promises to tools that count them. They are counted at the communicator,
where every gather and every reduction passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, get_fsdp_instances, reduce_gradients, use_torch_collectives
from fsdp.distributed.collectives import DirectExchange
from tests.helpers.equality import assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import every_pair, parametrize_pairs
from tests.helpers.parity import assert_parity, fully_sharded, sgd_with_momentum
from tests.helpers.twins import assert_at_rest

UNITS = 4  # of nested_mlp


def backward(model: nn.Module, *, sync: bool = True, scale: float = 1.0) -> None:
    with nullcontext() if sync else model.no_sync():
        (scale * model(torch.ones(2, 5))).sum().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters()]


# Results


@parametrize_pairs(
    at_most=5,
    world_size=[2, 1],
    accumulate=[2, 3, 5],
    nested=[True, False],
    options=every_pair(reshard_after_forward=[True, False], flatten_parameters=[True, False], bucket_cap_mb=[25, 0]),
)
@on_ranks("world_size")
def test_accumulation_equals_one_large_batch(accumulate: int, nested: bool, options: dict[str, Any]) -> None:
    make = partial(nested_mlp, nested=nested)
    assert_parity(make, sgd_with_momentum, wrap=fully_sharded(**options), accumulate=accumulate)


@parametrize_pairs(
    options=[{}, {"use_orig_params": True}, {"flatten_parameters": False}, {"move_params_to_cpu": True}],
    by_name=[True, False],
)
@on_ranks(2)
def test_a_closure_may_bring_the_last_gradients_of_a_step(options: dict[str, Any], by_name: bool) -> None:
    model, plain = nested_mlp(fully_sharded(**options)), nested_mlp()
    optimizers = [sgd_with_momentum(each.parameters()) for each in (model, plain)]
    for _ in range(2):
        backward(model, sync=False)
        for _ in range(2):
            plain(torch.ones(2, 5)).sum().backward()

        def closure() -> int:
            backward(model)
            return 7

        returned = optimizers[0].step(closure=closure) if by_name else optimizers[0].step(closure)
        assert returned == 7
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    backward(model, sync=False)
    with pytest.raises(RuntimeError, match=r"accumulated under no_sync\(\)"):
        optimizers[0].step(lambda: backward(model, sync=False))


@pytest.mark.parametrize("syncs", [[True, True], [False, True], [True, False, True], [False, False, True, True]])
@on_ranks(2)
def test_synchronised_backwards_add_up_with_accumulated_ones(syncs: list[bool]) -> None:
    torch.set_default_dtype(torch.float64)
    model = nested_mlp(fully_sharded())
    backward(model)
    once = gradients(model)
    model.zero_grad()
    for number, sync in enumerate(syncs):
        backward(model, sync=sync, scale=number + 1)
    factor = sum(range(1, len(syncs) + 1))
    torch.testing.assert_close(gradients(model), [factor * grad for grad in once])


@on_ranks(2)
def test_only_the_backward_has_to_be_inside() -> None:
    model = nested_mlp(fully_sharded(bucket_cap_mb=0))
    with model.no_sync():
        output = model(torch.ones(2, 5))
    with counted() as counts:
        output.sum().backward()
    assert counts["reductions"] == UNITS
    expected = gradients(model)
    model.zero_grad()
    output = model(torch.ones(2, 5))
    with counted() as counts, model.no_sync():
        output.sum().backward()
    assert counts["reductions"] == 0
    backward(model, scale=0)
    torch.testing.assert_close(gradients(model), expected)


# Counts


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the gathers and reductions inside."""
    counts: Counter[str] = Counter()

    def counting(method: str, kind: str) -> Any:
        original = getattr(DirectExchange, method)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return original(self, *args, **kwargs)

        return mock.patch.object(DirectExchange, method, call)

    with counting("all_gather", "gathers"), counting("reduce_scatter", "reductions"):
        yield counts


def count(model: nn.Module, *, sync: bool) -> tuple[int, int]:
    with counted() as counts:
        backward(model, sync=sync)
    return counts["gathers"], counts["reductions"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("reshard_after_forward", "unsynchronised", "synchronised"),
    [(True, 2 * UNITS - 1, 2 * UNITS - 2), (False, UNITS, 0)],
)
@on_ranks("world_size")
def test_gathers_and_reductions_of_two_passes(
    reshard_after_forward: bool, unsynchronised: int, synchronised: int
) -> None:
    model = nested_mlp(fully_sharded(reshard_after_forward=reshard_after_forward, bucket_cap_mb=0))
    counts = [count(model, sync=False), count(model, sync=True)]
    assert counts == [(unsynchronised, 0), (synchronised, UNITS)]


@on_ranks(2)
def test_from_the_third_pass_on_the_last_unit_stays_whole() -> None:
    model = nested_mlp(fully_sharded(bucket_cap_mb=0))
    counts = [count(model, sync=sync)[0] for sync in (False, True, False, False, False, True)]
    assert counts == [2 * UNITS - 1, 2 * UNITS - 2, 2 * UNITS - 2, 2 * UNITS - 3, 2 * UNITS - 3, 2 * UNITS - 3]


@on_ranks(2)
def test_small_reductions_go_together() -> None:
    model = nested_mlp(fully_sharded(reshard_after_forward=False))
    counts = [count(model, sync=False), count(model, sync=True)]
    assert counts == [(UNITS, 0), (0, 1)]


@on_ranks(2)
def test_a_flat_model_is_gathered_once() -> None:
    model = nested_mlp(fully_sharded(), nested=False)
    counts = [count(model, sync=sync) for sync in (False, False, True, True)]
    assert counts == [(1, 0), (0, 0), (0, 1), (1, 1)]


# Between accumulation and step


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_zero_grad_drops_what_was_accumulated(reshard_after_forward: bool) -> None:
    model = nested_mlp(fully_sharded(reshard_after_forward=reshard_after_forward))
    optimizer = sgd_with_momentum(model.parameters())
    backward(model)
    expected = gradients(model)
    for zero_grad in (optimizer.zero_grad, model.zero_grad):
        zero_grad()
        backward(model, sync=False, scale=100.0)
        zero_grad()
        assert model.params_with_grad == []
        backward(model)
        torch.testing.assert_close(gradients(model), expected)


@on_ranks(2)
def test_zeroing_in_place_what_is_not_reduced_is_an_error() -> None:
    model = nested_mlp(fully_sharded())
    backward(model, sync=False)
    with pytest.raises(RuntimeError, match=r"accumulated under no_sync\(\).*zero_grad\(set_to_none=True\)"):
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("syncs", [[False], [False, False], [True, False]])
@on_ranks(2)
def test_a_step_would_leave_out_what_is_not_reduced(syncs: list[bool]) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = sgd_with_momentum(model.parameters())
    before = model.state_dict()
    for sync in syncs:
        backward(model, sync=sync)
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\): gradients .* no_sync\(\) are not reduced"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    backward(model)
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    optimizer.step()


@on_ranks(2)
def test_whole_parameters_can_be_read_in_between() -> None:
    model = nested_mlp(fully_sharded(reshard_after_forward=False))
    before = model.state_dict()
    backward(model)
    expected = [2 * grad for grad in gradients(model)]
    model.zero_grad()
    backward(model, sync=False)
    assert_same_state(model.state_dict(), before)
    with model.summon_full_params():
        assert len(list(model.parameters())) == len(before)
    backward(model)
    torch.testing.assert_close(gradients(model), expected)
    assert_at_rest(model)


# The context


@on_ranks(2)
def test_nested_contexts() -> None:
    model = nested_mlp(fully_sharded(bucket_cap_mb=0))
    with counted() as counts:
        with model.no_sync():
            with model.no_sync():
                backward(model)
            backward(model)
        assert counts["reductions"] == 0
        backward(model)
    assert counts["reductions"] == UNITS


@pytest.mark.parametrize("when", ["outside", "in forward", "in backward"])
@on_ranks(2)
def test_an_exception_ends_the_context(when: str) -> None:
    model = nested_mlp(fully_sharded(bucket_cap_mb=0))
    backward(model)
    expected = gradients(model)
    model.zero_grad()

    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    hooks = []
    if when == "in forward":
        hooks.append(model.gate.module.module.register_forward_pre_hook(refuse))
    with pytest.raises(ValueError, match="refused"), model.no_sync():  # noqa: PT012
        output = model(torch.ones(2, 5))
        if when == "in backward":
            output.register_hook(refuse)
        output.sum().backward()
        refuse()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    assert count(model, sync=True)[1] == UNITS
    torch.testing.assert_close(gradients(model), expected)
    assert_at_rest(model)


@on_ranks(2)
def test_only_the_outermost_wrapper_has_it() -> None:
    model = nested_mlp(fully_sharded())
    backward(model)
    inner = [wrapper for wrapper in get_fsdp_instances(model) if wrapper is not model]
    for wrapper in inner:
        with pytest.raises(RuntimeError, match=r"no_sync is for the outermost"), wrapper.no_sync():
            pass
    assert len(inner) == UNITS - 1


@on_ranks(2)
def test_it_may_be_entered_before_anything_ran() -> None:
    model = nested_mlp(fully_sharded())
    with model.no_sync():
        pass
    assert isinstance(model, FullyShardedDataParallel)
    assert model._is_root
    assert count(model, sync=True) == (2 * UNITS - 1, 1)


@on_ranks(2)
def test_tools_can_count_collectives_by_replacing_torchs_functions() -> None:
    """Two units: 2n - 1 gathers under `no_sync`, then 2n - 2 more and n reductions (the contract, section 10)."""
    use_torch_collectives()
    try:
        inner = FullyShardedDataParallel(nn.Linear(5, 5), bucket_cap_mb=0)
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(5, 5), inner), bucket_cap_mb=0)
    finally:
        use_torch_collectives(False)
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    reduce = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with (
        mock.patch.object(dist, gather, wraps=getattr(dist, gather)) as gathers,
        mock.patch.object(dist, reduce, wraps=getattr(dist, reduce)) as reductions,
    ):
        with model.no_sync():
            model(torch.ones(2, 5)).sum().backward()
        assert (gathers.call_count, reductions.call_count) == (3, 0)
        model(torch.ones(2, 5)).sum().backward()
        assert (gathers.call_count, reductions.call_count) == (3 + 2, 2)


@on_ranks(2)
def test_a_backward_after_a_reduction_that_failed_is_reduced() -> None:
    model = nested_mlp(fully_sharded(), seed=1)
    backward(model)
    expected = gradients(model)
    model.zero_grad()
    backward(model, sync=False)
    loss = model(torch.ones(2, 5)).sum()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in a hook")

    hooks = [param.register_hook(fail) for param in model.parameters()]
    with pytest.raises(ValueError, match="in a hook"):
        reduce_gradients(model)
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert_at_rest(model)
    for found, value in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, value)
