"""Replicas that average their changes every few steps train like unsharded models that do the same."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, OuterOptimizer, OwnedOptimizer, fully_shard
from tests.helpers import forms
from tests.helpers.equality import assert_same
from tests.helpers.forms import FORMS, full_state
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import Counting, Traffic

Make = Callable[[Any], torch.optim.Optimizer]
ADAM: Make = partial(torch.optim.AdamW, lr=0.01)
SITES = {1: 1, 2: 2, 3: 3, 4: 2}  # the number of replicas by world size


def mesh_of(world_size: int) -> Any:
    shape = (SITES[world_size], world_size // SITES[world_size])
    return init_device_mesh("cpu", shape, mesh_dim_names=("site", "rank"))


def of_form(module: nn.Module, form: str, mesh: Any) -> Any:
    """Shard a module, and the layers and sequences in it, within a replica."""
    options = {"mesh": mesh["rank"]} if form == "rows" else {"process_group": mesh["rank"].get_group()}
    return forms.sharded(module, form, (nn.Linear, nn.Sequential), **options)


def sharded(form: str, mesh: Any) -> Any:
    return of_form(nested_mlp(keep), form, mesh)


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch_of(step, rank)).square().mean().backward()


def train(model: Any, optimizer: torch.optim.Optimizer, outer: OuterOptimizer, steps: range) -> list[bool]:
    exchanged = []
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, dist.get_rank())
        optimizer.step()
        exchanged.append(outer.step())
    return exchanged


class Unsharded:
    """Replicas of an unsharded model, and torch's own SGD as the outer optimizer of each parameter."""

    def __init__(self, world_size: int, make: Make, every: int, lr: float, momentum: float, fragments: int = 1) -> None:
        self.world_size, self.every, self.fragments = world_size, every, fragments
        torch.manual_seed(0)
        self.replicas = [nested_mlp(keep) for _ in range(SITES[world_size])]
        for replica in self.replicas:
            replica.load_state_dict(self.replicas[0].state_dict())
        self.inner = [make(replica.parameters()) for replica in self.replicas]
        self.anchors = [nn.Parameter(param.detach().clone()) for param in self.replicas[0].parameters()]
        nesterov = momentum > 0
        self.outer = [torch.optim.SGD([each], lr=lr, momentum=momentum, nesterov=nesterov) for each in self.anchors]

    def train(self, steps: range) -> None:
        own = self.world_size // len(self.replicas)
        for step in steps:
            for site, (replica, optimizer) in enumerate(zip(self.replicas, self.inner, strict=True)):
                optimizer.zero_grad()
                for rank in range(site * own, site * own + own):
                    (replica(batch_of(step, rank)).square().mean() / own).backward()
                optimizer.step()
            for number in range(len(self.anchors)):
                fragment = self.fragment_of(number)
                if (step + 1 + fragment * self.every // self.fragments) % self.every == 0:
                    self.exchange(number)

    def fragment_of(self, number: int) -> int:
        size, more = divmod(len(self.anchors), self.fragments)
        ends = [(fragment + 1) * size + min(fragment + 1, more) for fragment in range(self.fragments)]
        return next(fragment for fragment, end in enumerate(ends) if number < end)

    @torch.no_grad()
    def exchange(self, number: int) -> None:
        anchor = self.anchors[number]
        params = [list(replica.parameters())[number] for replica in self.replicas]
        anchor.grad = torch.stack([anchor - param for param in params]).mean(0)
        self.outer[number].step()
        for param in params:
            param.copy_(anchor)


def assert_equal(model: Any, expected: nn.Module) -> None:
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-10, atol=1e-12)


@parametrize_pairs(at_most=6, form=FORMS, world_size=[1, 2, 3, 4])
@on_ranks("world_size")
def test_replicas_train_as_unsharded_ones_with_torchs_own_nesterov_sgd(form: str) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(dist.get_world_size())
    model = sharded(form, mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=3, lr=0.7, momentum=0.9)
    expected = Unsharded(dist.get_world_size(), ADAM, 3, 0.7, 0.9)
    assert train(model, optimizer, outer, range(7)) == [False, False, True, False, False, True, False]
    expected.train(range(7))
    assert_equal(model, expected.replicas[mesh.get_local_rank("site")])


@parametrize_pairs(form=FORMS, world_size=[2, 4])
@on_ranks("world_size")
def test_an_exchange_in_every_step_that_averages_weights_is_training_with_all_gradients(form: str) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(dist.get_world_size())
    model = sharded(form, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = OuterOptimizer(optimizer, mesh["site"].get_group(), every=1)
    torch.manual_seed(0)
    plain = nested_mlp(keep)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        train(model, optimizer, outer, range(step, step + 1))
        reference.zero_grad()
        for rank in range(dist.get_world_size()):
            (plain(batch_of(step, rank)).square().mean() / dist.get_world_size()).backward()
        reference.step()
    assert_equal(model, plain)


@on_ranks(4)
def test_fragments_are_exchanged_at_different_steps() -> None:
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(4)
    model = sharded("orig", mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=4, lr=0.7, momentum=0.9, fragments=3)
    expected = Unsharded(4, ADAM, 4, 0.7, 0.9, fragments=3)
    assert train(model, optimizer, outer, range(8)) == [False, True, True, True] * 2
    expected.train(range(8))
    assert_equal(model, expected.replicas[mesh.get_local_rank("site")])
    outer.synchronize()
    fingerprints: list[Any] = [None] * 4
    dist.all_gather_object(fingerprints, fsdp.fingerprint(model))
    assert len(set(fingerprints)) == 1


@on_ranks(4)
def test_a_rank_receives_a_shard_per_exchange_and_nothing_between_two() -> None:
    mesh = mesh_of(4)
    model = sharded("flat", mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=2)
    nbytes = sum(4 * param.numel() for param in model.parameters())
    received = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step, dist.get_rank())
        optimizer.step()
        with Counting(traffic := Traffic()):
            outer.step()
        received.append(traffic.values)
    assert received[0] == received[2] == 0
    assert nbytes <= received[1] == received[3] <= nbytes + 8


@pytest.mark.parametrize("form", FORMS)
@on_ranks(4)
def test_training_goes_on_from_a_checkpoint_of_each_replica_also_with_other_numbers_of_ranks(
    form: str, tmp_path: Path
) -> None:
    torch.set_default_dtype(torch.float64)
    pairs, singles = mesh_of(4), init_device_mesh("cpu", (4, 1), mesh_dim_names=("site", "rank"))
    own = tmp_path / f"replica {pairs.get_local_rank('site')}"

    def new(mesh: Any) -> tuple[Any, torch.optim.Optimizer, OuterOptimizer]:
        model = sharded(form, mesh)
        optimizer = ADAM(model.parameters())
        return model, optimizer, OuterOptimizer(optimizer, mesh["site"], every=2, lr=0.7, momentum=0.9)

    model, optimizer, outer = new(pairs)
    train(model, optimizer, outer, range(3))
    keys = {key for state in optimizer.state.values() for key in state}
    with outer.stored_in(optimizer):
        fsdp.save(own, model, optimizer)
    assert {key for state in optimizer.state.values() for key in state} == keys
    train(model, optimizer, outer, range(3, 5))
    for mesh in (pairs, singles):
        again, optimizer, outer = new(mesh)
        fsdp.load(own, again, optimizer)
        outer.load_from(optimizer)
        assert {key for state in optimizer.state.values() for key in state} == keys
        assert outer.steps == 3
        for step in range(3, 5):
            optimizer.zero_grad()
            if mesh is pairs:
                backward(again, step, dist.get_rank())
            else:  # the same gradients, of the two ranks that a replica had before
                for rank in (dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1):
                    (again(batch_of(step, rank)).square().mean() / 2).backward()
            optimizer.step()
            outer.step()
        for name, value in full_state(again).items():
            torch.testing.assert_close(value, full_state(model)[name], rtol=1e-10, atol=1e-12)


@parametrize_pairs(saves=["file", "state_dict"], form=FORMS)
@on_ranks(2)
def test_16_bit_shards_go_on_with_the_same_bits(form: str, saves: str, tmp_path: Path) -> None:
    mesh = mesh_of(2)

    def new() -> tuple[Any, torch.optim.Optimizer, OuterOptimizer]:
        torch.manual_seed(0)
        model = of_form(nn.Linear(5, 3, dtype=torch.bfloat16), form, mesh)
        optimizer = ADAM(model.parameters())
        return model, optimizer, OuterOptimizer(optimizer, mesh["site"], every=2, lr=0.7, momentum=0.9)

    def go_on(model: Any, optimizer: torch.optim.Optimizer, outer: OuterOptimizer, steps: range) -> None:
        for step in steps:
            model(batch_of(step, dist.get_rank()).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    first, again = new(), new()
    first[2].steps = 254  # bfloat16 has no 257
    go_on(*first, range(3))
    own = tmp_path / f"replica {dist.get_rank()}"
    with first[2].stored_in(first[1]):
        fsdp.save(own, *first[:2])
        state = first[1].state_dict()
    fsdp.load(own, *again[:2])
    if saves == "state_dict":
        again[1].load_state_dict(copy.deepcopy(state))
    again[2].load_from(again[1])
    assert again[2].steps == 257
    for trained in (first, again):
        go_on(*trained, range(3, 6))
    assert_same(full_state(again[0]), full_state(first[0]))


@on_ranks(2)
def test_replicas_that_were_saved_after_different_steps_are_an_error(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    model = sharded("orig", mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=2)
    for number in range(2):
        train(model, optimizer, outer, range(2 * number, 2 * number + 2))
        with outer.stored_in(optimizer):
            fsdp.save(tmp_path / f"{number} {dist.get_rank()}", model, optimizer)
    fsdp.load(tmp_path / f"{dist.get_rank()} {dist.get_rank()}", model, optimizer)
    with pytest.raises(RuntimeError, match=r"different weights and momenta .*of step 2 .*of step 4"):
        outer.load_from(optimizer)


@on_ranks(2)
def test_a_loaded_state_that_was_not_taken_is_an_error(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    model = sharded("orig", mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=2)
    train(model, optimizer, outer, range(1))
    with outer.stored_in(optimizer):
        fsdp.save(tmp_path / f"{dist.get_rank()}", model, optimizer)
    fsdp.load(tmp_path / f"{dist.get_rank()}", model, optimizer)
    with pytest.raises(RuntimeError, match=r"the AdamW has loaded the state of an OuterOptimizer, which has not read"):
        outer.step()
    outer.load_from(optimizer)
    assert outer.step()


@on_ranks(2)
def test_parameters_without_gradients_and_buffers_need_nothing() -> None:
    mesh = mesh_of(2)
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(
        nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}),
        process_group=mesh["rank"].get_group(),
        use_orig_params=True,
    )
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=1)
    before = model.module["unused"].weight.detach().clone()
    used = [*model.module["used"].parameters()]
    for param in used:
        param.grad = torch.ones_like(param)
    optimizer.step()
    outer.step()
    assert_same(model.module["unused"].weight.detach(), before)
    with outer.stored_in(optimizer):
        assert "outer_anchor" in optimizer.state[used[0]]
        assert not optimizer.state.get(model.module["unused"].weight)


class Branches(nn.Module):
    """A layer, and another one that one replica uses alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        return self.other(self.first(inputs)) if both else self.first(inputs)


class SignSGD(torch.optim.Optimizer):
    """An optimizer of a user, without state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"])


@parametrize_pairs(form=FORMS, inner=[torch.optim.AdamW, SignSGD])
@on_ranks(4)
def test_what_one_replica_has_not_stepped_yet_is_saved_or_an_error(form: str, inner: Any, tmp_path: Path) -> None:
    mesh = mesh_of(4)
    replica = mesh["site"].get_local_rank()

    def begun() -> tuple[Any, Any, OuterOptimizer]:
        model = of_form(Branches(), form, mesh)
        optimizer = inner(model.parameters())
        return model, optimizer, OuterOptimizer(optimizer, mesh["site"], every=2, lr=0.7, momentum=0.9)

    def go_on(model: Any, optimizer: Any, outer: OuterOptimizer, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
            model(inputs, replica == 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    model, optimizer, outer = begun()
    go_on(model, optimizer, outer, range(5))
    if inner is not SignSGD and replica == 1:
        storing = outer.stored_in(optimizer)
        with pytest.raises(RuntimeError, match=r"parameter .*has no state of the AdamW on this replica"), storing:
            pass
    if inner is not SignSGD:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
    with outer.stored_in(optimizer):
        fsdp.save(tmp_path / f"{replica}", model, optimizer)
    go_on(model, optimizer, outer, range(5, 8))
    resumed, its_optimizer, its_outer = begun()
    fsdp.load(tmp_path / f"{replica}", resumed, its_optimizer)
    its_outer.load_from(its_optimizer)
    go_on(resumed, its_optimizer, its_outer, range(5, 8))
    assert its_outer.steps == outer.steps == 8
    assert_same(full_state(resumed), full_state(model))


class Aside(nn.Module):
    """One row, which only the first of two ranks has a part of, beside a layer that every step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.row = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)

    def forward(self, inputs: Tensor, uses_row: bool) -> Tensor:
        return self.row(self.used(inputs)) if uses_row else self.used(inputs)


@on_ranks(4)
def test_state_that_one_rank_cannot_store_is_an_error_on_every_rank_of_the_replica() -> None:
    mesh = mesh_of(4)
    replica, rank = mesh["site"].get_local_rank(), mesh["rank"].get_local_rank()
    model = fully_shard(Aside(), mesh=mesh["rank"])
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=1, momentum=0.9)
    model(torch.ones(2, 4), replica == 0).square().mean().backward()
    optimizer.step()
    outer.step()
    storing = outer.stored_in(optimizer)
    if replica == 0:
        with storing:
            return
    with pytest.raises(RuntimeError, match=r"row\.weight has no state of the AdamW on this replica") as caught, storing:
        pass
    assert isinstance(caught.value, fsdp.OtherRankError) == (rank == 1)


@on_ranks(2)
def test_memory_that_one_rank_lacks_for_the_state_is_an_error_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("site", "rank"))
    model = fully_shard(nested_mlp(keep), mesh=mesh["rank"])
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=1)
    train(model, optimizer, outer, range(1))
    before = {param: dict(state) for param, state in optimizer.state.items()}
    made = itertools.count()

    def zeros_like(*args: Any, **options: Any) -> Tensor:
        if next(made) == 3 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory for it")
        return torch.empty_like(*args, **options).zero_()

    storing = outer.stored_in(optimizer)
    with patch.object(torch, "zeros_like", zeros_like), pytest.raises(RuntimeError, match="no memory for it"), storing:
        pass
    assert {param: dict(state) for param, state in optimizer.state.items()} == before
    train(model, optimizer, outer, range(1, 2))


@on_ranks(2)
def test_an_optimizer_keeps_no_state_of_one_that_was_replaced() -> None:
    mesh = mesh_of(2)
    model = sharded("flat", mesh)
    optimizer = ADAM(model.parameters())
    former = weakref.ref(OuterOptimizer(optimizer, mesh["site"], every=2))
    gc.collect()
    assert former() is None


@on_ranks(2)
def test_wrong_arguments_are_errors_that_name_them() -> None:
    mesh = mesh_of(2)
    optimizer = ADAM(sharded("flat", mesh).parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and less than 1"),
        ({"fragments": 5}, "fragments must be from 1 to every=4"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            OuterOptimizer(optimizer, mesh["site"], **{"every": 4, **options})


@on_ranks(2)
def test_differences_between_replicas_are_errors_on_every_rank() -> None:
    mesh = mesh_of(2)
    model = sharded("flat", mesh)
    optimizer = ADAM(model.parameters())
    with pytest.raises(RuntimeError, match="different arguments and shards of an OuterOptimizer: rank 0 has every=2"):
        OuterOptimizer(optimizer, mesh["site"], every=2 + dist.get_rank())
    with torch.no_grad():
        next(iter(model.parameters())).add_(dist.get_rank())
    with pytest.raises(RuntimeError, match="different weights in their replicas at the construction"):
        OuterOptimizer(optimizer, mesh["site"], every=2)


@on_ranks(2)
def test_ranks_that_exchange_gradients_already_are_an_error() -> None:
    model: Any = nested_mlp(FullyShardedDataParallel)
    optimizer = ADAM(model.parameters())
    backward(model, 0, dist.get_rank())
    with pytest.raises(ValueError, match=r"sharded or replicated over ranks \[0, 1\] already"):
        OuterOptimizer(optimizer, dist.group.WORLD, every=2)
    with pytest.raises(TypeError, match="needs a torch optimizer of shards, got OwnedOptimizer"):
        OuterOptimizer(OwnedOptimizer(model, [{"optimizer": torch.optim.AdamW}]), dist.group.WORLD, every=2)


@on_ranks(2)
def test_the_state_of_another_optimizer_is_an_error() -> None:
    mesh = mesh_of(2)
    model = sharded("flat", mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=2)
    other = ADAM(model.parameters())
    with pytest.raises(ValueError, match="is not the inner optimizer"), outer.stored_in(other):
        pass
    with pytest.raises(ValueError, match="is not the inner optimizer"):
        outer.load_from(other)


@on_ranks(2)
def test_parameters_that_would_not_be_exchanged_are_errors() -> None:
    mesh = mesh_of(2)
    model = sharded("flat", mesh)
    optimizer = ADAM(model.parameters())
    outer = OuterOptimizer(optimizer, mesh["site"], every=2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match="the AdamW has other parameters than when"):
        outer.step()
    with pytest.raises(NotImplementedError, match="does not support complex parameters"):
        OuterOptimizer(ADAM([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), mesh["site"], every=2)
