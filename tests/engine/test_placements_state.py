"""State dicts, checkpoints and optimizer state do not depend on placements; ranks may differ in what they use."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import Placed, Placement, Placements, ShardingStrategy
from fsdp.optim_utils import full_optim_state_dict, load_full_optim_state_dict
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.forms import FORMS, batch, full_state, sharded
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import scaled_layers
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.uneven_models import Pair

STRATEGIES = ["SHARD_OPTIM", "SHARD_OPTIM_GRADS", "HYBRID_SHARD_OPTIM", "FULL_SHARD"]
ON_BOTH = Placed(Placement.SHARDED, Placement.SHARDED)


def options_of(strategy: str) -> dict[str, Any]:
    """Collective. Options for four ranks, or for three without a replica axis."""
    found: dict[str, Any] = {"placements": Placements.from_strategy(ShardingStrategy[strategy])}
    if strategy == "HYBRID_SHARD_OPTIM":
        found["process_group"] = mesh_of(2, 2)
    return found


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return scaled_layers().double()


def build(strategy: str, form: str, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(net(seed), form, (nn.Linear,), **options_of(strategy))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int | None = None) -> None:
    ranks = [rank] if rank is not None else list(range(dist.get_world_size()))
    for step in steps:
        for each in ranks:
            (model(batch(step, each)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    train(plain, optimizer, range(steps))
    return plain, optimizer


def moments_of(plain: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.state[param]["exp_avg"] for name, param in plain.named_parameters()}


@parametrize_cases(at_most=4, saved=STRATEGIES, loaded=STRATEGIES, form=["flat", "orig"], again=["flat", "orig"])
def test_a_checkpoint_is_loaded_under_any_other(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    ranks(4).run(_save_and_load, tmp_path, case.saved, case.loaded, case.form, case.again)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_a_checkpoint_of_rows(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    ranks(3).run(_save_and_load, tmp_path, strategy, "FULL_SHARD", "rows", "flat")


def _save_and_load(folder: Path, saved: str, loaded: str, form: str, again: str) -> None:
    model, optimizer = build(saved, form)
    train(model, optimizer, range(2), dist.get_rank())
    model(batch(9, 0)).sum().backward()  # parameters are kept while it is saved
    fsdp.save(folder / "checkpoint", model, optimizer)
    other, other_optimizer = build(loaded, again, seed=1)
    train(other, other_optimizer, range(1), dist.get_rank())
    other(batch(9, 0)).sum().backward()  # and while it is loaded
    fsdp.load(folder / "checkpoint", other, other_optimizer)
    other_optimizer.zero_grad()
    train(other, other_optimizer, range(2, 4), dist.get_rank())
    plain, _ = trained_plain(4)
    assert_close_state(full_state(other), plain.state_dict())


@parametrize_pairs(at_most=4, saved=STRATEGIES, loaded=STRATEGIES, form=["flat", "orig"])
@on_ranks(4)
def test_full_optimizer_state(saved: str, loaded: str, form: str) -> None:
    model, optimizer = build(saved, form)
    train(model, optimizer, range(2), dist.get_rank())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    full = full_optim_state_dict(model, optimizer, recipient_rank=None)
    plain, plain_optimizer = trained_plain(2)
    moments = moments_of(plain, plain_optimizer)
    assert_close_state({name: each["exp_avg"] for name, each in full["state"].items()}, moments)
    other, other_optimizer = build(loaded, form, seed=1)
    other.load_state_dict(state)
    load_full_optim_state_dict(other, other_optimizer, full)
    train(other, other_optimizer, range(2, 4), dist.get_rank())
    train(plain, plain_optimizer, range(2, 4))
    assert_close_state(full_state(other), plain.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES[1:3])
@on_ranks(4)
def test_fairscales_optimizer_state(strategy: str) -> None:
    model, optimizer = build(strategy, "flat")
    train(model, optimizer, range(2), dist.get_rank())
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    own = model.get_shard_from_optim_state_dict(full)
    other, other_optimizer = build(strategy, "flat", seed=1)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(own)
    train(other, other_optimizer, range(2, 4), dist.get_rank())
    plain, _ = trained_plain(4)
    assert_close_state(full_state(other), plain.state_dict())


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(4)
def test_shards_are_loaded_by_the_same_ranks(form: str) -> None:
    model, optimizer = build("HYBRID_SHARD_OPTIM", form)
    train(model, optimizer, range(2), dist.get_rank())
    other, _ = build("HYBRID_SHARD_OPTIM", form, seed=1)
    other.load_local_state_dict(model.local_state_dict())
    assert_close_state(full_state(other), full_state(model))
    with pytest.raises(NotImplementedError, match="divided along the replica axis again"):
        model.local_metadata_dict()


@on_ranks(4)
def test_copies_and_pickles() -> None:
    for strategy, form in zip(STRATEGIES[:3], ("flat", "orig", "flat"), strict=True):
        model, optimizer = build(strategy, form)
        train(model, optimizer, range(1), dist.get_rank())
        model(batch(5, 0)).sum().backward()
        optimizer.zero_grad()
        copied = copy.deepcopy(model)
        pickled = io.BytesIO()
        torch.save(model, pickled)
        pickled.seek(0)
        loaded = torch.load(pickled, weights_only=False)
        for wrapper in fsdp.get_fsdp_instances(loaded):
            wrapper.process_group = options_of(strategy).get("process_group", dist.group.WORLD)
        for each in (copied, loaded):
            assert each.placements == model.placements
            with torch.no_grad():
                assert_close(each(batch(6, 0)), model(batch(6, 0)))
            stepped = torch.optim.SGD(each.parameters(), lr=0.1)
            train(each, stepped, range(1), dist.get_rank())


# Optimizers of whole parameters


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@on_ranks(4)
def test_owners_step_whole_parameters(strategy: str) -> None:
    plain = net()
    model = sharded(net(), "orig", (nn.Linear,), **options_of(strategy))
    expected = torch.optim.Adafactor(plain.parameters(), lr=0.05)
    optimizer = fsdp.OwnedOptimizer(model, [{"optimizer": torch.optim.Adafactor, "lr": 0.05}])
    train(plain, expected, range(3))
    train(model, optimizer, range(3), dist.get_rank())
    assert_close_state(full_state(model), plain.state_dict())


# Ranks that use different parameters


class Routed(nn.Module):
    """Rank r uses expert r % 2; nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, inputs: Tensor, rank: int) -> Tensor:
        return self.experts[rank % 2](self.entry(inputs))


@parametrize_pairs(strategy=STRATEGIES[:3], form=FORMS)
@on_ranks(4)
def test_ranks_that_use_different_parameters(strategy: str, form: str) -> None:
    if form == "rows" and strategy == "HYBRID_SHARD_OPTIM":
        return
    torch.manual_seed(0)
    plain = Routed().double()
    model = sharded(copy.deepcopy(plain), form, (), **options_of(strategy))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(3):
        for turn in range(2):
            for rank in range(4):
                (plain(batch(10 * step + turn, rank), rank).square().mean() / 4).backward()
            model(batch(10 * step + turn, dist.get_rank()), dist.get_rank()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close_state(full_state(model), plain.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@on_ranks(4)
def test_modules_that_only_some_ranks_run(strategy: str) -> None:
    both = Pair(**options_of(strategy))
    for _ in range(2):
        both.backward()
        both.backward()
        both.step()
    both.assert_close()


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@on_ranks(4)
def test_ranks_with_different_numbers_of_batches(strategy: str) -> None:
    model, optimizer = build(strategy, "flat")
    counts = [3, 5, 4, 1]
    if strategy == "SHARD_OPTIM":
        with pytest.raises(NotImplementedError, match="the step reduces, but ranks that have finished"):
            fsdp.join(model, optimizer).__enter__()
        return
    with fsdp.join(model, optimizer):
        for step in range(counts[dist.get_rank()]):
            model(batch(step, dist.get_rank())).square().mean().backward()
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    plain = net()
    expected = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(max(counts)):
        for rank in (rank for rank in range(4) if step < counts[rank]):
            (plain(batch(step, rank)).square().mean() / 4).backward()
        if step % 2 == 1:
            expected.step()
            expected.zero_grad()
    assert_close_state(full_state(model), plain.state_dict())


# What another layer would compute wrongly


@on_ranks(4)
def test_layers_that_sum_along_one_axis_are_refused() -> None:
    model, _ = build("HYBRID_SHARD_OPTIM", "flat")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1), dist.get_rank())
    with pytest.raises(ValueError, match="also summed over 2 replicas, along the replica axis"):
        model.register_comm_hook(None, lambda state, gradient, shard: None)
    with pytest.raises((ValueError, RuntimeError), match="is sharded and replicated"):
        fsdp.SameBits(model, 4)
    model, _ = build("SHARD_OPTIM", "flat")
    with pytest.raises((ValueError, RuntimeError), match="has PARTIAL gradients"):
        fsdp.SameBits(model, 4)
    with pytest.raises(NotImplementedError, match="because the rows of DTensors are in the order of the mesh"):
        fsdp.fully_shard(net(), mesh=mesh_of(2, 2), placements=options_of("HYBRID_SHARD_OPTIM")["placements"])
