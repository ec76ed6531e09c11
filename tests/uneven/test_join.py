"""`fsdp.join`: ranks with different numbers of batches finish, and come to the weights that the formula says.

Answers pain point 28: uneven inputs hang at the end of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import FullyShardedDataParallel, ShardedGradScaler
from tests.helpers.dtensor_twins import whole
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded, sgd_with_momentum
from tests.helpers.twins import assert_at_rest
from tests.helpers.uneven_models import WIDTH, Choosing, choose, directly

COUNTS = [3, 5, 8, 1]  # batches of each rank


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(count, 2, 5, generator=generator, dtype=torch.float64))


def pair(wrap: Wrap = FullyShardedDataParallel) -> tuple[nn.Module, Any]:
    """The unsharded model and the sharded one, of equal values."""
    torch.set_default_dtype(torch.float64)
    return nested_mlp(), nested_mlp(wrap)


def assert_equal_weights(model: nn.Module, plain: nn.Module) -> None:
    found = {name: whole(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, dict(plain.state_dict()))


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def train_plain(model: nn.Module, accumulate: int = 1, clip: float | None = None, decay: float = 1.0) -> list[int]:
    """One process with the batches of all ranks; returns how many ranks had one in each turn."""
    world_size = dist.get_world_size()
    everyone = [batches(rank, COUNTS[rank]) for rank in range(world_size)]
    optimizer, running = make_adam(model), []
    for turn in range(max(COUNTS[:world_size])):
        here = [own[turn] for own in everyone if turn < len(own)]
        running.append(len(here))
        for batch in here:
            (model(batch).square().mean() / world_size).backward()
        if turn % accumulate == accumulate - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= decay
    return running


@pytest.mark.parametrize("wrap", [FullyShardedDataParallel, fsdp.fully_shard])
@on_ranks(3, 1)
def test_ranks_with_3_5_and_8_batches_finish_pain_point_28(wrap: Wrap) -> None:
    plain, model = pair(wrap)
    expected, running = train_plain(plain), []
    optimizer = make_adam(model)
    with fsdp.join(model, optimizer) as joined:
        for batch in batches(dist.get_rank(), COUNTS[dist.get_rank()]):
            model(batch).square().mean().backward()
            running.append(joined.running_ranks)
            optimizer.step()
            optimizer.zero_grad()
    assert running == expected[: len(running)]
    assert_equal_weights(model, plain)
    assert_at_rest(model)
    assert all("zero_grad" not in owner.__dict__ for owner in (optimizer, model))


@parametrize_cases(
    at_most=6,
    accumulate=[1, 2],
    clip=[None, 0.05],
    set_to_none=[True, False],
    zeroed_by=["optimizer", "model", "hand"],
    wrap=[
        FullyShardedDataParallel,
        fully_sharded(use_orig_params=True),
        fully_sharded(reshard_after_forward=False, bucket_cap_mb=0),
        fsdp.fully_shard,
    ],
)
@on_ranks(3)
def test_what_steps_do_finished_ranks_do_too(case: Case) -> None:
    plain, model = pair(case.wrap)
    train_plain(plain, case.accumulate, case.clip, decay=0.9)
    optimizer = make_adam(model)
    with fsdp.join(model, optimizer):
        for turn, batch in enumerate(batches(dist.get_rank(), COUNTS[dist.get_rank()])):
            is_last = turn % case.accumulate == case.accumulate - 1
            with nullcontext() if is_last else without_sync(model):
                model(batch).square().mean().backward()
            if not is_last:
                continue
            if case.clip is not None and case.wrap is fsdp.fully_shard:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            elif case.clip is not None:
                model.clip_grad_norm_(case.clip)
            optimizer.step()
            if case.zeroed_by == "hand":
                for param in model.parameters():
                    param.grad = None
            else:
                {"optimizer": optimizer, "model": model}[case.zeroed_by].zero_grad(set_to_none=case.set_to_none)
            optimizer.param_groups[0]["lr"] *= 0.9  # only ranks with batches know of the schedule
    assert_equal_weights(model, plain)


@on_ranks(4)
def test_shards_of_replicas_accumulate_where_batches_have_run_out() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
    model: Any = copy.deepcopy(plain)
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    train_plain(plain, accumulate=2)
    optimizer = make_adam(model)
    with fsdp.join(model, optimizer):
        for turn, batch in enumerate(batches(dist.get_rank(), COUNTS[dist.get_rank()])):
            model.set_requires_all_reduce(turn % 2 == 1)
            model(batch).square().mean().backward()
            if turn % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal_weights(model, plain)


class Recomputing(nn.Module):
    """A unit with a layer behind another unit, which backward computes again."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner, self.own = wrap(nn.Linear(5, 5)), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(checkpoint(self.inner, x, use_reentrant=False).tanh())


@on_ranks(3)
def test_finished_ranks_serve_a_checkpoint_inside_of_a_unit() -> None:
    torch.set_default_dtype(torch.float64)
    plain = nn.Sequential(Recomputing(keep), nn.Linear(5, 1))
    inside = nn.Sequential(FullyShardedDataParallel(Recomputing(FullyShardedDataParallel)), nn.Linear(5, 1))
    model = FullyShardedDataParallel(inside)
    model.load_state_dict(plain.state_dict())
    train_plain(plain)
    optimizer = make_adam(model)
    with fsdp.join(model, optimizer):
        for batch in batches(dist.get_rank(), COUNTS[dist.get_rank()]):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(model, plain)


@on_ranks(3)
def test_a_rank_that_had_finished_steps_with_the_same_options_in_the_next_epoch() -> None:
    model = fully_sharded(use_orig_params=True)(nn.Linear(5, 1))
    weight, bias = model.parameters()
    # The groups share the tuple of betas, until a rank takes the betas of another rank.
    optimizer = torch.optim.Adam([{"params": [weight]}, {"params": [bias], "weight_decay": 0.1}])
    for counts in ((1, 2, 2), (2, 2, 1)):
        with fsdp.join(model, optimizer):
            for _ in range(counts[dist.get_rank()]):
                model(torch.ones(1, 5)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_at_rest(model)


@on_ranks(3)
def test_options_in_tensors_are_those_of_ranks_with_batches() -> None:
    plain, model = pair()
    train_plain(plain, decay=0.9)
    _held = [torch.ones(1) for _ in range(9 * dist.get_rank())]  # so that each rank has its tensors elsewhere
    rate, betas = torch.tensor(0.01), (torch.tensor(0.9), torch.tensor(0.999))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=betas, foreach=False)
    with fsdp.join(model, optimizer):
        for batch in batches(dist.get_rank(), COUNTS[dist.get_rank()]):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.mul_(0.9)
    assert_equal_weights(model, plain)
    # Compiled steps and schedulers refer to these tensors.
    group = optimizer.param_groups[0]
    assert group["lr"] is rate
    assert group["betas"][0] is betas[0]


@on_ranks(3)
def test_values_are_clipped_on_finished_ranks() -> None:
    torch.set_default_dtype(torch.float64)
    model = nested_mlp(fully_sharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.state_dict()
    with fsdp.join(model, optimizer):
        for batch in batches(0, 2) if dist.get_rank() == 0 else []:
            (1e6 * model(batch)).sum().backward()
            model.clip_grad_value_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert (value - before[name]).abs().max() <= 2e-3 + 1e-9


@on_ranks(3)
def test_evaluation_with_uneven_batches() -> None:
    plain, model = pair()
    optimizer = make_adam(model)
    with fsdp.join(model, optimizer), torch.no_grad():
        for batch in batches(dist.get_rank(), COUNTS[dist.get_rank()]):
            torch.testing.assert_close(model(batch), plain(batch))
    assert_at_rest(model)


@on_ranks(3, timeout=120)
def test_parts_that_not_every_rank_runs_inside_of_uneven_batches() -> None:
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Choosing(keep)
    model = FullyShardedDataParallel(Choosing(FullyShardedDataParallel))
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    generator = torch.Generator().manual_seed(0)
    choices = [choose(generator) for _ in range(max(COUNTS))]
    inputs = torch.randn(max(COUNTS), world_size, 2, WIDTH, generator=generator)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (plain, model)]
    for turn in range(max(COUNTS[:world_size])):
        for other in range(world_size):
            if turn < COUNTS[other]:
                (plain(inputs[turn, other], choices[turn][other], directly).square().mean() / world_size).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    with fsdp.join(model, optimizers[1]):
        for turn in range(COUNTS[rank]):
            model(inputs[turn, rank], choices[turn][rank], fsdp.cond).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert_equal_weights(model, plain)


@on_ranks(3)
def test_after_step_is_called_where_batches_have_run_out() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = sgd_with_momentum(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with fsdp.join(model, optimizer, after_step=lambda _: schedule.step()):
        for _ in range(COUNTS[dist.get_rank()]):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert schedule.last_epoch == max(COUNTS[:3])


@on_ranks(2)
@pytest.mark.parametrize("listed", [False, True])
def test_every_optimizer_steps_on_finished_ranks(listed: bool) -> None:
    model = nested_mlp(fully_sharded())
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    steps: list[torch.optim.Optimizer] = []
    with fsdp.join(model, *([optimizers] if listed else optimizers), after_step=steps.append):
        for _ in range(1 + 2 * dist.get_rank()):
            model(torch.ones(2, 5)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(optimizers) > 1
    assert steps == ([] if dist.get_rank() else 2 * optimizers)


@on_ranks(2)
def test_an_average_is_updated_on_finished_ranks_too() -> None:
    model = nested_mlp(fully_sharded())
    optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.1), fsdp.EMA(model, 0.5)

    def train(**options: Any) -> None:
        with fsdp.join(model, optimizer, **options):
            for _ in range(1 + 2 * dist.get_rank()):
                model(torch.ones(2, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                ema.update_parameters(model)

    with pytest.raises(RuntimeError, match=r"would not update the average.*after_step=lambda _: ema.update_p"):
        train()
    train(after_step=lambda _: ema.update_parameters(model))
    counts = [torch.zeros_like(ema.n_averaged) for _ in range(2)]
    dist.all_gather(counts, ema.n_averaged)
    assert counts[0] == counts[1] == 3


@on_ranks(3)
def test_training_goes_on_as_usual_afterwards() -> None:
    plain, model = pair()
    train_plain(plain)
    optimizer = make_adam(model)
    for _ in range(2):
        with fsdp.join(model, optimizer):
            for batch in batches(dist.get_rank(), COUNTS[dist.get_rank()]):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_at_rest(model)


# Errors


@on_ranks(2)
def test_what_needs_all_ranks_is_refused_inside() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = sgd_with_momentum(model.parameters())
    scaler = ShardedGradScaler(device="cpu")
    with fsdp.join(model, optimizer):
        with pytest.raises(RuntimeError, match=r"take a state dict inside fsdp\.join"):
            model.state_dict()
        with pytest.raises(RuntimeError, match=r"load a state dict inside fsdp\.join"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match=r"inside fsdp\.join"), model.summon_full_params():
            pass
        with pytest.raises(RuntimeError, match=r"begin fsdp\.join inside fsdp\.join"), fsdp.join(model, optimizer):
            pass
        scaler.scale(model(torch.ones(2, 5)).sum()).backward()
        with pytest.raises(NotImplementedError, match=r"ShardedGradScaler inside fsdp\.join"):
            scaler.step(optimizer)
        with pytest.raises(NotImplementedError, match=r"step\(closure\)"):
            optimizer.step(lambda: 0.0)
        optimizer.zero_grad()
    model.state_dict()


@on_ranks(2)
def test_units_whose_gradients_go_differently_far_are_refused() -> None:
    _, model = pair(fsdp.fully_shard)
    model.trunk.set_requires_gradient_sync(False)
    with fsdp.join(model, sgd_with_momentum(model.parameters())):
        output = model(torch.ones(2, 5)).sum()
        with pytest.raises(NotImplementedError, match=r"inside fsdp\.join: units differ in how far they reduce"):
            output.backward()


@on_ranks(2)
def test_what_cannot_join_says_why() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = sgd_with_momentum(model.parameters())
    model(torch.ones(2, 5))
    inner = fsdp.get_fsdp_instances(model)[1]
    for error, given, match in (
        (
            TypeError,
            (nn.Linear(2, 2), optimizer),
            "outermost module under fully_shard; got a Linear",
        ),
        (ValueError, (model,), "pass the optimizer"),
        (RuntimeError, (inner, optimizer), "outermost"),
    ):
        with pytest.raises(error, match=match), fsdp.join(*given):
            pass


@on_ranks(2)
def test_an_exception_inside_leaves_the_model_usable() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = sgd_with_momentum(model.parameters())
    with pytest.raises(KeyError, match="on purpose"):
        _raise_in_join(model, optimizer)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model.state_dict()


def _raise_in_join(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with fsdp.join(model, optimizer):
        model(torch.ones(2, 5)).sum().backward()
        raise KeyError("on purpose")


class Option:
    """An option of an optimizer that knows no equality but its identity."""


@on_ranks(3)
def test_options_that_do_not_compare_by_value_may_be_the_same_on_all_ranks() -> None:
    model = nested_mlp(fully_sharded())
    groups = [{"params": list(model.parameters()), "nan": float("nan"), "numbers": np.ones(2), "option": Option()}]
    _step_in_join(model, torch.optim.SGD(groups, lr=0.1), 2 if dist.get_rank() else 1)
    assert_at_rest(model)


@pytest.mark.parametrize("option", ["lr", "numbers"])
@on_ranks(3)
def test_ranks_that_step_with_different_options_are_told(option: str) -> None:
    model = nested_mlp(fully_sharded())
    options: dict[str, Any] = {"lr": 0.1, "numbers": np.ones(2)}
    options[option] = options[option] + dist.get_rank()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), **options}], lr=0.1)
    with pytest.raises(RuntimeError, match="different options"):
        _step_in_join(model, optimizer, 2 if dist.get_rank() else 1)


def _step_in_join(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    with fsdp.join(model, optimizer):
        for _ in range(steps):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
