"""What a rank holds: between steps its shards and nothing else, in a step a formula more.

Bytes between steps are those of all tensors that live in the process, each storage counted once, beyond what was
there before the model was made. Whole parameters are counted in the buffers of the handles, at every gather (which
is where they grow) and at every hook of every module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, get_fsdp_instances
from fsdp.distributed.collectives import DirectExchange
from fsdp.engine.phase import Phase
from tests.helpers.memory import handles_of, live_bytes
from tests.helpers.models import Wrap, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import adam, fully_sharded, sgd_with_momentum

FLOAT = 4  # bytes


def shard_numel(numel: int) -> int:
    return -(-numel // dist.get_world_size())


# Between steps


def train_step(model: nn.Module, *, sync: bool = True) -> None:
    with nullcontext() if sync else model.no_sync():
        model(torch.ones(3, 5)).sum().backward()


# Of nested_mlp, by unit: the root's own parameters, `trunk`, `trunk.2` and `gate`.
NUMELS = [[1, 35, 7, 3, 1], [77], [33, 3, 1], [3]]


def shards(flatten_parameters: bool, nested: bool) -> int:
    units = NUMELS if nested else [list(chain(*NUMELS))]
    groups = [sum(unit) for unit in units] if flatten_parameters else chain(*units)
    return sum(map(shard_numel, groups))


@parametrize_cases(
    world_size=[2, 1],
    make_optimizer=[sgd_with_momentum, adam],
    nested=[True, False],
    reshard_after_forward=[True, False],
    flatten_parameters=[True, False],
)
@on_ranks("world_size")
def test_between_steps_there_are_shards_to_the_byte(case: Case) -> None:
    before = live_bytes()
    wrap = fully_sharded(reshard_after_forward=case.reshard_after_forward, flatten_parameters=case.flatten_parameters)
    model = nested_mlp(wrap, nested=case.nested)
    shard = FLOAT * shards(case.flatten_parameters, case.nested)
    assert live_bytes() - before == shard
    optimizer = case.make_optimizer(model.parameters())
    is_adam = isinstance(optimizer, torch.optim.Adam)
    # Adam: two moments, and a count of steps for every parameter. SGD: the momentum.
    state = 2 * shard + FLOAT * len(handles_of(model)) if is_adam else shard
    for step in range(4):
        train_step(model)
        assert live_bytes() - before == 2 * shard + (state if step else 0)
        optimizer.step()
        assert live_bytes() - before == 2 * shard + state
        optimizer.zero_grad()
        assert live_bytes() - before == shard + state


@on_ranks(2)
def test_after_each_other_use_there_are_shards_to_the_byte() -> None:
    before = live_bytes()
    model = nested_mlp(fully_sharded(reshard_after_forward=False))
    shard = FLOAT * shards(flatten_parameters=True, nested=True)

    def infer() -> None:
        with torch.no_grad():
            model(torch.ones(3, 5))

    def fail() -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.ones(3, 4))

    def summon() -> None:
        with model.summon_full_params():
            assert live_bytes() - before > 2 * shard

    def save_and_load() -> None:
        model.load_state_dict(model.state_dict())

    def forget_loss() -> None:
        model(torch.ones(3, 5))
        infer()

    def drop() -> None:
        train_step(model, sync=False)
        model.zero_grad()
        train_step(model)
        model.zero_grad()

    for use in (infer, fail, summon, save_and_load, forget_loss, drop):
        use()
        assert live_bytes() - before == shard, use.__name__


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_accumulated_gradients_are_whole(reshard_after_forward: bool) -> None:
    before = live_bytes()
    model = nested_mlp(fully_sharded(reshard_after_forward=reshard_after_forward))
    padded = [dist.get_world_size() * shard_numel(sum(unit)) for unit in NUMELS]
    shard = FLOAT * sum(padded) // dist.get_world_size()
    # The root keeps its parameters for the next forward, as do the others if asked to.
    kept = FLOAT * (padded[0] if reshard_after_forward else sum(padded))
    for _ in range(2):
        train_step(model, sync=False)
        assert live_bytes() - before == shard + FLOAT * sum(padded) + kept
    train_step(model)
    assert live_bytes() - before == 2 * shard


# In a step


@dataclass
class Watch:
    """What is whole, in flight and being reduced, each time it may have grown."""

    model: FullyShardedDataParallel
    whole: list[int] = field(default_factory=list)  # bytes of gathered buffers
    gathering: list[int] = field(default_factory=list)  # gathers in flight
    reducing: list[int] = field(default_factory=list)  # reductions in flight, the one that starts included

    def look(self) -> None:
        handles = handles_of(self.model)
        self.whole.append(sum(handle.unsharded.full.untyped_storage().nbytes() for handle in handles))
        self.gathering.append(sum(handle.phase is Phase.UNSHARDING for handle in handles))

    @contextmanager
    def running(self) -> Iterator[None]:
        all_gather, reduce_scatter = DirectExchange.all_gather, DirectExchange.reduce_scatter

        def gather(comm: DirectExchange, *args: Any) -> Any:
            self.look()
            return all_gather(comm, *args)

        def reduce(comm: DirectExchange, *args: Any) -> Any:
            self.look()
            self.reducing.append(len(self.model._unit.runtime._reductions._in_flight) + 1)
            return reduce_scatter(comm, *args)

        hooks = []
        for module in self.model.modules():
            hooks.append(module.register_forward_pre_hook(lambda *_: self.look()))
            hooks.append(module.register_forward_hook(self._after_forward))
        with (
            mock.patch.object(DirectExchange, "all_gather", gather),
            mock.patch.object(DirectExchange, "reduce_scatter", reduce),
        ):
            yield
        for hook in hooks:
            hook.remove()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.look()
        if output.requires_grad:
            output.register_hook(lambda _: self.look())


class Tower(nn.Module):
    """Units of different sizes one after the other; the root has a small layer of its own."""

    WIDTHS = (8, 40, 24, 64, 16, 32)

    def __init__(self, wrap: Wrap, recompute: bool | None) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 8)
        self.units = nn.ModuleList(wrap(nn.Sequential(nn.Linear(8, w), nn.Linear(w, 8))) for w in self.WIDTHS)
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for unit in self.units:
            if self.recompute is None:
                hidden = unit(hidden)
            else:
                hidden = checkpoint(unit, hidden, use_reentrant=self.recompute)
        return hidden


def tower(wrap: Wrap, recompute: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Tower(wrap, recompute))


def unit_bytes(model: FullyShardedDataParallel) -> tuple[int, list[int]]:
    """Of the whole parameters of the root, and of the units inside, in order."""
    root, *units = [sum(handle.unsharded.full.nbytes for handle in w._unit.handles) for w in get_fsdp_instances(model)]
    return root, units


@parametrize_cases(
    at_most=4,
    world_size=[2, 3],
    recompute=[None, True, False],
    flatten_parameters=[True, False],
    disable_reshard_on_root=[True, False],
    bucket_cap_mb=[0, 25],
)
@on_ranks("world_size")
def test_at_most_two_units_or_small_ones_are_whole_beside_the_root(case: Case) -> None:
    options = case.only("flatten_parameters", "disable_reshard_on_root", "bucket_cap_mb")
    model = tower(fully_sharded(**options), case.recompute)
    root, units = unit_bytes(model)
    neighbours = max(one + other for one, other in pairwise(units))
    per_unit = max(len(wrapper._unit.handles) for wrapper in get_fsdp_instances(model))
    for step in range(3):
        watch = Watch(model)
        with watch.running():
            train_step(model)
        model.zero_grad()
        apart = options["bucket_cap_mb"] == 0
        # Before an order is known nothing is prefetched: the unit that computes is the only one.
        if apart or not step:
            assert max(watch.whole) == root + (neighbours if step else max(units))
        else:
            assert max(watch.whole) <= root + sum(units)
        assert max(watch.gathering) <= (2 if step else 1) * per_unit or (step and not apart)
        assert max(watch.reducing) <= 2
        assert (len(watch.reducing) > 2) == apart
        watch.look()
        assert watch.whole[-1] == 0


@on_ranks(2)
def test_kept_units_are_all_whole_at_the_end_of_forward() -> None:
    model = tower(fully_sharded(reshard_after_forward=False, bucket_cap_mb=0))
    root, units = unit_bytes(model)
    watch = Watch(model)
    for _ in range(3):
        with watch.running():
            train_step(model)
        assert max(watch.whole) == root + sum(units)
        assert max(watch.gathering) <= 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_inference_needs_the_same_and_frees_it(mode: Callable[[], Any]) -> None:
    model = tower(fully_sharded(bucket_cap_mb=0))
    root, units = unit_bytes(model)
    neighbours = max(one + other for one, other in pairwise(units))
    for step in range(3):
        watch = Watch(model)
        with watch.running(), mode():
            model(torch.ones(3, 5))
        assert max(watch.whole) == root + (neighbours if step else max(units))
        watch.look()
        assert watch.whole[-1] == 0


@on_ranks(2)
def test_nested_units_count_while_they_compute() -> None:
    model = nested_mlp(fully_sharded(bucket_cap_mb=0))
    root, (trunk, core, gate) = unit_bytes(model)
    for step in range(4):
        watch = Watch(model)
        with watch.running():
            train_step(model)
        model.zero_grad()
        assert max(watch.whole) == root + trunk + core + (gate if step else 0)
