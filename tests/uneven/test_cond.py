"""`fsdp.cond`: ranks run different parts of a model, and come to the same weights as one process that runs all.

Answers pain point 8: ranks take different paths (layer drop, no image in a batch, experts without tokens).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.distributed.collectives import DirectExchange
from fsdp.uneven.regions import Visits
from tests.helpers.equality import assert_close_state
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.twins import assert_at_rest
from tests.helpers.uneven_models import PARTS, WIDTH, Choice, Pair, directly


def nothing_but(*parts: str) -> Choice:
    return {part: part in parts for part in PARTS}


# Results


class PartOfUnits(nn.Module):
    """A part that is no unit, and computes a region with a unit again in backward."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.first, self.unit = nn.Linear(4, 4), FullyShardedDataParallel(nn.Linear(4, 4))

    def compute(self, x: Tensor) -> Tensor:
        return self.first(x) + fsdp.cond(self.unit, True, x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.compute, x, use_reentrant=self.is_reentrant)
        return found


class ChoiceOfParts(nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.parts = nn.ModuleList(PartOfUnits(is_reentrant) for _ in range(3))

    def forward(self, x: Tensor, runs: tuple[bool, ...]) -> Tensor:
        x = self.entry(x)
        for part, run_here in zip(self.parts, runs, strict=True):
            found = fsdp.cond(part, run_here, x)
            x = x if found is None else x + found
        return x


@pytest.mark.parametrize("chosen", [[(1, 0, 0), (0, 1, 0), (0, 0, 1)], [(0, 1, 1), (1, 0, 1), (1, 1, 0)]])
@on_ranks(3)
def test_re_entrant_checkpoints_in_different_parts_are_recomputed_in_order(chosen: list[tuple[int, ...]]) -> None:
    rank = dist.get_rank()
    results = []
    for is_reentrant in (False, True):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(ChoiceOfParts(is_reentrant))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(3 * step + rank))
            model(inputs, tuple(map(bool, chosen[(rank + step) % 3]))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert_close_state(*results, rtol=1e-5, atol=1e-6)


class RecomputedBefore(nn.Module):
    """Calls of a unit that backward computes again, each before a part that not every rank runs."""

    def __init__(self, wrap: Wrap, num_calls: int) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unit = wrap(nn.Linear(4, 4))
        self.parts = nn.ModuleList(wrap(nn.Linear(4, 4)) for _ in range(num_calls))

    def forward(self, x: Tensor, runs: Sequence[bool], cond: Callable[..., Any]) -> Tensor:
        x = self.entry(x)
        for part, run_here in zip(self.parts, runs, strict=True):
            x = checkpoint(self.unit, x, use_reentrant=True).tanh()
            found = cond(part, run_here, x)
            x = x if found is None else x + found
        return self.exit(x)


def step_both(model: nn.Module, plain: nn.Module, *steps: Sequence[tuple[Any, ...]]) -> None:
    """Train the sharded and the plain model, with the arguments that each of two ranks gives the model in each step."""
    rank = dist.get_rank()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for given in steps:
        batches = torch.randn(2, 3, 4)
        model(batches[rank], *given[rank], fsdp.cond).square().sum().backward()
        for batch, own in zip(batches, given, strict=True):
            (plain(batch, *own, directly).square().sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("num_calls", [1, 2])
@on_ranks(2)
def test_a_unit_that_all_ranks_recompute_waits_for_the_backward_of_later_parts(num_calls: int) -> None:
    torch.manual_seed(0)
    plain = RecomputedBefore(keep, num_calls)
    model = FullyShardedDataParallel(RecomputedBefore(FullyShardedDataParallel, num_calls))
    model.load_state_dict(plain.state_dict())
    for step in range(2):
        runs = [[(rank + number + step) % 2 == 0 for number in range(num_calls)] for rank in range(2)]
        step_both(model, plain, [(of_rank,) for of_rank in runs])
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


class PartBetweenUnits(nn.Module):
    """A part between two units that all ranks run, perhaps all of it computed again in backward."""

    def __init__(self, wrap: Wrap, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.before, self.part, self.after = (wrap(nn.Linear(4, 4)) for _ in range(3))
        self.exit = nn.Linear(4, 1)

    def compute(self, x: Tensor, run_here: bool, cond: Callable[..., Any]) -> Tensor:
        x = self.before(x).tanh()
        found = cond(self.part, run_here, x)
        return self.after(x if found is None else x + found).tanh()

    def forward(self, x: Tensor, run_here: bool, cond: Callable[..., Any]) -> Tensor:
        args = (x, run_here, cond)
        found = checkpoint(self.compute, *args, use_reentrant=False) if self.recomputes else self.compute(*args)
        return self.exit(found)


@pytest.mark.parametrize(
    ("recomputes", "options"),
    [
        (True, {}),
        (True, {"reshard_after_forward": "host"}),
        (False, {"bucket_cap_mb": 0, "sharding_strategy": fsdp.ShardingStrategy.NO_SHARD}),
        (True, {"bucket_cap_mb": 0, "sharding_strategy": fsdp.ShardingStrategy.NO_SHARD}),
    ],
)
@on_ranks(2)
def test_a_part_between_units_of_all_ranks_has_its_backward(recomputes: bool, options: dict[str, Any]) -> None:
    wrap = partial(FullyShardedDataParallel, **options)
    plain, model = PartBetweenUnits(keep, recomputes), wrap(PartBetweenUnits(wrap, recomputes))
    model.load_state_dict(plain.state_dict())
    step_both(model, plain, [(True,), (False,)], [(False,), (True,)])
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


class PlainPartRecomputed(PartBetweenUnits):
    """The part is no unit, and a re-entrant checkpoint is around all."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__(wrap, recomputes=True)
        del self.part
        self.entry, self.part = nn.Linear(4, 4), nn.Linear(4, 4)  # backward expects the last one first

    def forward(self, x: Tensor, run_here: bool, cond: Callable[..., Any]) -> Tensor:
        return self.exit(checkpoint(self.compute, self.entry(x), run_here, cond, use_reentrant=True))


@on_ranks(2)
def test_a_plain_part_in_a_re_entrant_checkpoint_is_reduced_when_backward_has_ended() -> None:
    wrap = partial(FullyShardedDataParallel, flatten_parameters=False, bucket_cap_mb=0)
    plain, model = PlainPartRecomputed(keep), wrap(PlainPartRecomputed(wrap))
    model.load_state_dict(plain.state_dict())
    step_both(model, plain, [(True,), (False,)], [(False,), (True,)])
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


class PassingThrough(nn.Module):
    """A unit that returns its input where its part does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor, run_here: bool, cond: Callable[..., Any]) -> Tensor:
        found = cond(self.part, run_here, x)
        return x if found is None else x + found


class BehindALeaf(nn.Module):
    def __init__(self, wrap: Wrap, recomputes: bool) -> None:
        super().__init__()
        self.block, self.exit, self.recomputes = wrap(PassingThrough()), nn.Linear(4, 1), recomputes

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = x.detach().requires_grad_()
        found = checkpoint(self.block, x, *args, use_reentrant=True) if self.recomputes else self.block(x, *args)
        return self.exit(found)


@pytest.mark.parametrize("recomputes", [False, True])
@on_ranks(2)
def test_a_unit_that_returns_its_input_on_some_ranks_has_its_backward(recomputes: bool) -> None:
    rank = dist.get_rank()
    plain = BehindALeaf(keep, recomputes)
    model = FullyShardedDataParallel(BehindALeaf(FullyShardedDataParallel, recomputes))
    model.load_state_dict(plain.state_dict())
    for runs in ([True, False], [False, True]):
        batches = torch.randn(2, 3, 4)
        model(batches[rank], runs[rank], fsdp.cond).square().sum().backward()
        for batch, run_here in zip(batches, runs, strict=True):
            (plain(batch, run_here, directly).square().sum() / 2).backward()
    norm = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norm)


class SometimesUsed(nn.Module):
    """A unit that uses its parameters in some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        return x + self.layer(x).tanh() if is_used else 1.0 * x


class PartBeforeOthers(nn.Module):
    """A part, and behind it units of all ranks, one of which uses its parameters in some calls only."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.part, self.one, self.other = (wrap(nn.Linear(4, 4)) for _ in range(3))
        self.entry, self.sometimes, self.exit = nn.Linear(4, 4), wrap(SometimesUsed()), nn.Linear(4, 1)

    def forward(self, x: Tensor, run_here: bool, first: bool, last: bool, cond: Callable[..., Any]) -> Tensor:
        x = self.entry(x)
        found = cond(self.part, run_here, x)
        x = self.sometimes(x if found is None else x + found, first)
        x = self.other(self.one(x).tanh()).tanh()
        return self.exit(self.sometimes(x, last))


@pytest.mark.parametrize("uses", [[(False, True), (False, False)], [(False, True), (True, False)]])
@pytest.mark.parametrize("runs_part", [[True, False], [False, True]])
@on_ranks(2)
def test_backward_of_a_part_follows_gradients_that_ranks_complete_at_other_calls(
    uses: list[tuple[bool, bool]], runs_part: list[bool]
) -> None:
    wrap = partial(FullyShardedDataParallel, bucket_cap_mb=0)
    plain, model = PartBeforeOthers(keep), wrap(PartBeforeOthers(wrap))
    model.load_state_dict(plain.state_dict())
    given = [(runs, *used) for runs, used in zip(runs_part, uses, strict=True)]
    step_both(model, plain, given, given)
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


class PartOfAGroup(nn.Module):
    """Two modules that are one unit, one of which is a part; they run before a unit that all ranks run."""

    def __init__(self, shard: Callable[[Any], Any]) -> None:
        super().__init__()
        self.entry, self.part, self.always, self.exit = (nn.Linear(4, 4) for _ in range(4))
        for unit in ([self.part, self.always], self.exit, self):
            shard(unit)

    def forward(self, x: Tensor, run_here: bool, cond: Callable[..., Any]) -> Tensor:
        x = self.entry(x)
        found = cond(self.part, run_here, x)
        x = self.always(x if found is None else x + found)
        return self.exit(self.always(x).tanh())


@on_ranks(2)
def test_a_part_and_another_module_are_one_unit() -> None:
    torch.manual_seed(0)
    plain = PartOfAGroup(keep)
    model = PartOfAGroup(fsdp.fully_shard)
    model.load_state_dict(plain.state_dict())
    step_both(model, plain, [(True,), (False,)], [(False,), (True,)], [(True,), (True,)])
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert_close_state(state, plain.state_dict(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_plain_part_runs_after_another_sharded_model_in_the_same_forward() -> None:
    teacher = FullyShardedDataParallel(nn.Linear(4, 4))

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.part = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(x)
            seen = fsdp.cond(self.part, dist.get_rank() == 1, x)
            return self.head(x) - target if seen is None else self.head(x) + seen - target

    student = FullyShardedDataParallel(Student(), use_orig_params=True)
    student(torch.ones(1, 4)).sum().backward()
    with student.summon_full_params(with_grads=True):
        for param, ranks in ((student.module.head.weight, 2), (student.module.part.weight, 1)):
            assert param.grad is not None
            assert torch.equal(param.grad, torch.full((4, 4), ranks / 2))


@on_ranks(2)
def test_a_plain_part_runs_while_another_thread_evaluates_another_model() -> None:
    begun, ended = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            begun.set()
            ended.wait(10)
            return super().forward(x)

    class Student(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.part = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            thread.start()
            begun.wait(10)
            seen = fsdp.cond(self.part, dist.get_rank() == 1, x)
            return super().forward(x if seen is None else 2 * seen)

    teacher = FullyShardedDataParallel(Waiting(4, 4), process_group=dist.new_group())
    thread = threading.Thread(target=teacher, args=[torch.ones(1, 4)])
    student = FullyShardedDataParallel(Student(), use_orig_params=True)
    student(torch.ones(1, 4)).sum().backward()
    ended.set()
    thread.join()
    with student.summon_full_params(with_grads=True):
        assert student.module.weight.grad is not None
        assert torch.equal(student.module.weight.grad, torch.full((4, 4), 1.5))
    assert_at_rest(student)


@on_ranks(2)
def test_a_gradient_is_differentiated_after_an_evaluation_with_a_part() -> None:
    plain = PartBetweenUnits(keep, False)
    model = FullyShardedDataParallel(PartBetweenUnits(FullyShardedDataParallel, False))
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        model(torch.ones(3, 4), dist.get_rank() == 0, fsdp.cond)
    for each, cond in ((plain, directly), (model, fsdp.cond)):
        inputs = torch.ones(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(each(inputs, True, cond).tanh().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    norm = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norm)


@on_ranks(3)
def test_steps_of_random_choices_equal_the_unsharded_model_pain_point_8() -> None:
    pair = Pair()
    for _ in range(5):
        pair.backward()
        pair.step()
    pair.assert_close()
    assert_at_rest(pair.model)


@parametrize_pairs(
    at_most=5,
    world_size=[2, 1, 4],
    recompute=[None, False, True],
    accumulate=[1, 2],
    options=[
        {},
        {"reshard_after_forward": False, "flatten_parameters": False, "bucket_cap_mb": 0},
        {"bucket_cap_mb": 0},
        {"use_orig_params": True, "reshard_after_forward": False},
        {"use_orig_params": True, "bucket_cap_mb": 0},
    ],
)
@on_ranks("world_size", timeout=120)
def test_choices_equal_the_unsharded_model(recompute: bool | None, accumulate: int, options: dict[str, Any]) -> None:
    pair = Pair(recompute=recompute, **options)
    pair.train(steps=2, accumulate=accumulate)
    pair.assert_close()
    assert_at_rest(pair.model)


@on_ranks(3)
def test_ranks_run_different_parts_side_by_side() -> None:
    """None of them knows the order of the others' backwards."""
    pair = Pair(bucket_cap_mb=0)
    for step in range(3):
        turns = [("left", "inner"), ("right", "plain"), ("tower", "layer")]
        pair.backward([nothing_but(*turns[(rank + step) % 3]) for rank in range(3)])
        pair.step()
    pair.assert_close()


@on_ranks(3)
def test_an_accumulated_gradient_of_some_ranks_is_reduced_when_nobody_runs_the_part() -> None:
    pair = Pair(bucket_cap_mb=0)
    for _ in range(2):
        pair.backward([nothing_but("layer", "plain"), nothing_but(), nothing_but("tower")], sync=False)
        pair.backward([nothing_but()] * 3)
        pair.step()
    pair.assert_close()


class PartInAPart(nn.Module):
    """A part with a layer that always runs, and one that runs by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, run_here: bool) -> Tensor:
        found = fsdp.cond(self.inner, run_here, x)
        return self.always(x if found is None else x + found)


class PartsOfOneUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.part = nn.Linear(4, 4), PartInAPart()

    def forward(self, x: Tensor, runs: bool, runs_inner: bool) -> Tensor:
        x = self.entry(x)
        found = fsdp.cond(self.part, runs, x, runs_inner)
        return x if found is None else x + found


@on_ranks(2)
def test_a_part_that_nobody_ran_has_no_gradient_after_no_sync() -> None:
    model: Any = FullyShardedDataParallel(PartsOfOneUnit(), flatten_parameters=False)
    with model.no_sync():
        model(torch.ones(2, 4), dist.get_rank() == 0, False).sum().backward()
    model(torch.ones(2, 4), False, False).sum().backward()
    used = {name for name, param in model.named_parameters() if param.grad is not None}
    assert used == {"entry.weight", "entry.bias", "part.always.weight", "part.always.bias"}


# What is sent


@on_ranks(3)
def test_no_bytes_move_for_a_part_that_nobody_runs() -> None:
    pair = Pair(bucket_cap_mb=0)
    for parts in (PARTS, (), PARTS, ()):  # also where the part is expected, since it ran the last time
        with sent() as messages:
            pair.backward([nothing_but(*parts)] * 3)
            pair.step()
        names = {what for what in messages if not what.startswith("talk")}
        of_parts = [what for what in names if any(f" {part}" in what for part in ("left", "right", "layer", "tower"))]
        assert bool(of_parts) is bool(parts), of_parts
        # One message for each part that is come to; if all run it, or nobody, there are no others.
        assert sum(what.startswith("talk") for what in messages) == (6 if parts else 5)


@on_ranks(3)
def test_ranks_that_do_not_run_a_part_gather_and_reduce_it_once() -> None:
    pair = Pair(bucket_cap_mb=0)
    with sent() as messages:
        pair.backward([nothing_but("layer"), nothing_but(), nothing_but()])
        pair.step()
    assert messages.count("all-gather of layer") == 2  # forward and backward, as on the rank that runs it
    assert messages.count("reduce-scatter of layer") == 1


@contextmanager
def sent() -> Iterator[list[str]]:
    """What this rank says to others meanwhile."""
    found: list[str] = []
    gather, reduce = DirectExchange.all_gather, DirectExchange.reduce_scatter

    def all_gather(self: Any, full: Any, shard: Any, what: str, *args: Any) -> Any:
        found.append(what)
        return gather(self, full, shard, what, *args)

    def reduce_scatter(self: Any, full: Any, what: str, *args: Any) -> Any:
        found.append(what)
        return reduce(self, full, what, *args)

    with mock.patch.multiple(DirectExchange, all_gather=all_gather, reduce_scatter=reduce_scatter):
        yield found


# Ways to call it


@on_ranks(3)
def test_a_part_runs_without_gradients() -> None:
    pair = Pair()
    choices = [nothing_but("left", "inner"), nothing_but("left"), nothing_but("layer", "plain")]
    inputs = torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = pair.plain(inputs, choices[pair.rank], directly)
        torch.testing.assert_close(pair.model(inputs, choices[pair.rank], fsdp.cond), expected)
    assert_at_rest(pair.model)


@on_ranks(3)
def test_a_forward_without_backward_changes_nothing() -> None:
    pair = Pair()
    for _ in range(3):
        choices = [nothing_but("layer"), nothing_but("layer", "left"), nothing_but()]
        pair.model(torch.randn(2, WIDTH), choices[pair.rank], fsdp.cond)
        pair.backward()
        pair.step()
    pair.assert_close()


# Errors


@on_ranks(2)
def test_ranks_at_different_parts_are_told() -> None:
    model = FullyShardedDataParallel(_Calling())
    with pytest.raises(RuntimeError, match=r"rank 0 is at fsdp\.cond of first and rank 1 at fsdp\.cond of second"):
        model(torch.ones(2, 3), _by_rank)
    assert_usable(model)


class _Calling(nn.Module):
    """Calls what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = FullyShardedDataParallel(nn.Linear(3, 3))
        self.second = FullyShardedDataParallel(nn.Linear(3, 3))
        self.own = nn.Linear(3, 3)

    def forward(self, inputs: Tensor, call: Callable[[_Calling, Tensor], Any]) -> Tensor:
        out = call(self, inputs)
        return self.own(inputs if out is None else out)


def _by_rank(model: _Calling, inputs: Tensor) -> Any:
    return fsdp.cond(model.second if dist.get_rank() else model.first, True, inputs)


def assert_usable(model: nn.Module) -> None:
    assert_at_rest(model)
    model(torch.ones(2, 3), lambda own, inputs: fsdp.cond(own.first, dist.get_rank() == 0, inputs)).sum().backward()
    assert_at_rest(model)


@on_ranks(3)
def test_an_exception_in_a_part_ends_the_forward_of_all() -> None:
    model = FullyShardedDataParallel(_Calling())
    match = (
        "shapes cannot be multiplied" if dist.get_rank() == 1 else r"rank 1 of the model failed in fsdp\.cond of first"
    )
    with pytest.raises(RuntimeError, match=match):
        model(torch.ones(2, 3), _raising)
    assert_usable(model)


def _raising(model: _Calling, inputs: Tensor) -> Any:
    return fsdp.cond(model.first, dist.get_rank() == 1, torch.ones(2, 7))


@on_ranks(2)
def test_a_part_runs_once_in_a_forward_if_not_on_all_ranks() -> None:
    model = FullyShardedDataParallel(_Calling())
    with pytest.raises(RuntimeError, match="first runs a second time in one forward"):
        model(torch.ones(2, 3), _first_twice)
    assert_usable(model)
    with torch.no_grad():
        model(torch.ones(2, 3), _first_twice)


def _first_twice(model: _Calling, inputs: Tensor) -> Any:
    fsdp.cond(model.first, dist.get_rank() == 0, inputs)
    return fsdp.cond(model.first, True, inputs)


@on_ranks(1)
def test_a_second_backward_says_that_nobody_waits() -> None:
    """On one rank, which pretends that there is another that does not run the part."""
    model = FullyShardedDataParallel(_Calling())
    real = Visits.open

    def open_mixed(self: Visits, module: nn.Module, run_here: bool) -> Any:
        visit = real(self, module, run_here)
        if visit is not None:
            visit.is_mixed = True
        return visit

    with mock.patch.object(Visits, "open", open_mixed):
        loss = model(torch.ones(2, 3), lambda own, inputs: fsdp.cond(own.first, True, inputs)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Run one backward after each forward"):
            loss.backward()


@on_ranks(1)
def test_what_is_no_part_of_the_model_says_so() -> None:
    model = FullyShardedDataParallel(_Calling())
    with pytest.raises(TypeError, match=r"nn\.Module, got a function"):
        fsdp.cond(assert_usable, True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no wrapped model is running"):
        fsdp.cond(nn.Linear(3, 3), True, torch.ones(2, 3))
    with pytest.raises(ValueError, match="this Linear is not inside"):
        model(torch.ones(2, 3), lambda own, inputs: fsdp.cond(nn.Linear(3, 3), True, inputs))


class Growing(nn.Module):
    """A part that the first rank runs, behind parts without parameters that are added later."""

    def __init__(self) -> None:
        super().__init__()
        self.added, self.part, self.exit = nn.ModuleList(), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.added, self.part):
            found = fsdp.cond(part, dist.get_rank() == 0, x)
            x = x if found is None else found
        return self.exit(x)


@on_ranks(2)
def test_parts_are_known_by_the_same_numbers_after_modules_were_added_before_them() -> None:
    model = fsdp.shard(Growing(), {nn.Linear}, sync_module_states=True)
    inputs, gradients = torch.ones(2, 4), []
    for _ in range(2):
        model(inputs).sum().backward()
        gradients.append([None if param.grad is None else param.grad.clone() for param in model.parameters()])
        model.zero_grad()
        model.module.module.added.append(nn.Identity())
    assert_close_state(*({str(place): each for place, each in enumerate(step)} for step in gradients))
    assert_at_rest(model)
