"""Gradients of data x tensor parallel models are clipped, and steps are skipped, as one model's: on all ranks alike."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fsdp import ShardedGradScaler
from fsdp.distributed.collectives import DirectExchange
from tests.helpers.equality import assert_close
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import REGRESSION, Task, sgd_with_momentum, trained_gradients
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import SENTENCES, cube, gpt, mesh_of, over_data, own_rows, perceptron


def backward(model: nn.Module, task: Task, data_rank: int, data_size: int) -> None:
    """Gradients of one rank's part of a batch."""
    inputs, targets = task.batch(torch.Generator().manual_seed(0), 4)
    task.loss(model(inputs.chunk(data_size)[data_rank]), targets.chunk(data_size)[data_rank]).backward()


def mean_gradients(plain: nn.Module, task: Task, data_size: int) -> None:
    for rank in range(data_size):
        backward(plain, task, rank, data_size)
    for param in plain.parameters():
        if param.grad is not None:
            param.grad /= data_size


def assert_close_gradients(model: nn.Module, plain: nn.Module) -> None:
    assert_close(trained_gradients(model), trained_gradients(plain), rtol=1e-8, atol=1e-12)


def build(options: dict[str, Any], model: dict[str, Any]) -> tuple[nn.Module, nn.Module, int, int]:
    """A parallel model, its plain twin, this rank's place in the data dimension, and the dimension's size."""
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(2, 2)
    return gpt(over_data(mesh, **options), mesh=mesh, **model), gpt(**model), mesh["dp"].get_local_rank(), 2


@parametrize_cases(
    at_most=4,
    norm_type=[2.0, math.inf, 1.0, 3.0],
    kind=["heads", "sequence"],
    model=[{}, {"vocabulary": True, "tied": True}, {"frozen": ("query", "norms.0")}],
    options=[{}, {"use_orig_params": True}, {"flatten_parameters": False}],
)
def test_the_norm_is_that_of_the_whole_model(ranks: RankPool, case: Case) -> None:
    norms = ranks(4).run(_clip, case.norm_type, {"kind": case.kind, **case.model}, case.options)
    assert norms == norms[:1] * 4  # to the bit


def _clip(norm_type: float, how: dict[str, Any], options: dict[str, Any]) -> float:
    model, plain, rank, size = build(options, how)
    backward(model, SENTENCES, rank, size)
    mean_gradients(plain, SENTENCES, size)
    norm = model.clip_grad_norm_(1e-2, norm_type)  # type: ignore[operator]
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0.0)
    assert_close_gradients(model, plain)
    return float(norm)


@pytest.mark.parametrize(
    ("norm_type", "placements", "hidden"),
    [
        (2.0, [[Shard(0), Shard(1)], [Shard(1), Replicate()]], 7),
        (2.0, [[Replicate(), Shard(0)], [Replicate(), Replicate()]], 7),
        (math.inf, [[Shard(0), Shard(0)], [Replicate(), Shard(1)]], 1),
    ],
    ids=str,
)
@on_ranks(4)
def test_parts_on_two_tensor_dimensions_are_counted_once(norm_type: float, placements: list[Any], hidden: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = cube()
    cut: dict[str, Any] = {"mesh": mesh["a", "b"], "hidden": hidden, "placements": placements}
    model, plain = perceptron(over_data(mesh), **cut), perceptron(**cut)
    backward(model, DOUBLES, 0, 1)
    mean_gradients(plain, DOUBLES, 1)
    norm = model.clip_grad_norm_(1e-3, norm_type)  # type: ignore[operator]
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0.0)
    assert_close_gradients(model, plain)


DOUBLES = Task(
    lambda generator, rows: (torch.randn(rows, 5, generator=generator), torch.ones(rows, 1)), REGRESSION.loss
)


@on_ranks(4)
def test_values_are_clamped_as_in_the_whole_model() -> None:
    model, plain, rank, size = build({}, {"kind": "sequence"})
    backward(model, SENTENCES, rank, size)
    mean_gradients(plain, SENTENCES, size)
    model.clip_grad_value_(1e-3)  # type: ignore[operator]
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    assert_close_gradients(model, plain)


def test_a_plain_model_is_clipped_with_one_reduction(ranks: RankPool) -> None:
    counts = ranks(4).run(_count_reductions)
    assert counts == [(1, 2)] * 4


def _count_reductions() -> tuple[int, int]:
    mesh = mesh_of(2, 2)
    counts = []
    for tensor in (None, mesh):
        model = gpt(over_data(mesh), mesh=tensor)
        backward(model, SENTENCES, mesh["dp"].get_local_rank(), 2)
        way = DirectExchange.all_reduce
        with mock.patch.object(DirectExchange, "all_reduce", autospec=True, side_effect=way) as reduce:
            model.clip_grad_norm_(1.0)  # type: ignore[operator]
        counts.append(reduce.call_count)
    return counts[0], counts[1]


@pytest.mark.parametrize(("bad", "norm_type"), [(math.nan, math.inf), (math.inf, 2.0)])
@on_ranks(4)
def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks(bad: float, norm_type: float) -> None:
    model, _, rank, size = build({}, {})
    backward(model, SENTENCES, rank, size)
    spoil_on_the_last_rank(model, bad)
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    with pytest.raises(RuntimeError, match="norm of the gradients"):
        model.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)  # type: ignore[operator]
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(torch.equal(*both) or both[0].isnan().any() for both in zip(after, before, strict=True))


def spoil_on_the_last_rank(model: nn.Module, value: float) -> None:
    """An element of the gradient of a part that no other rank has."""
    if dist.get_rank() == dist.get_world_size() - 1:
        handle = next(
            handle
            for wrapper in model.modules()
            if hasattr(wrapper, "_unit")
            for handle in wrapper._unit.handles
            if handle.flat_param.parts[0] is not None and handle.flat_param.parts[0].sharded_dims
        )
        handle.flat_param.grad[0] = value


# Loss scaling


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
@on_ranks(lambda shape: shape[0] * shape[1])
def test_an_infinity_on_one_tensor_rank_skips_the_step_on_all(shape: tuple[int, int]) -> None:
    mesh = mesh_of(*shape)
    model = gpt(over_data(mesh, mixed_precision=True), mesh=mesh)
    optimizer = sgd_with_momentum(model.parameters())
    scaler = ShardedGradScaler(init_scale=2.0**10, device="cpu")
    inputs, targets = own_rows(mesh)(*SENTENCES.batch(torch.Generator().manual_seed(0), 4))[0]
    for spoiled in (True, False):
        before = model.state_dict()
        optimizer.zero_grad()
        scaler.scale(SENTENCES.loss(model(inputs).float(), targets)).backward()
        if spoiled:
            spoil_on_the_last_rank(model, torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) is spoiled


@on_ranks(4)
def test_a_scaler_must_ask_the_tensor_ranks_too() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    optimizer = sgd_with_momentum(model.parameters())
    scaler = ShardedGradScaler(device="cpu", process_group=mesh["dp"].get_group())
    scaler.scale(model(SENTENCES.batch(torch.Generator(), 2)[0]).sum()).backward()
    with pytest.raises(ValueError, match=r"ShardedGradScaler: ranks \[\d\] hold other parts of .*process_group"):
        scaler.step(optimizer)


@on_ranks(2)
def test_torchs_own_scaler_is_refused_without_data_parallelism() -> None:
    mesh = mesh_of(1, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    optimizer = sgd_with_momentum(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(SENTENCES.batch(torch.Generator(), 2)[0]).sum()).backward()
    with pytest.raises(RuntimeError, match="ShardedGradScaler"):
        scaler.step(optimizer)
