"""Steps of an optimizer that is parked: its state is in memory for a unit at a time, and the bits are the same."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.checkpoint import parked_tensors
from fsdp.checkpoint.parked_tensors import Guard
from tests.checkpoint.test_parking import KINDS, local, nbytes_of
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import backward, talk
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import adamw
from tests.helpers.safetensors_files import counted_reads

flat = FullyShardedDataParallel
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Counting(torch.optim.AdamW):
    """Counts its steps in an option, and takes the norm of all gradients: its state does not come and go by units."""

    def step(self, closure: Any = None) -> Any:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        self.norm = torch.nn.utils.get_total_norm(grads)
        return super().step(closure)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda model: adamw(model.parameters()),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "groups": lambda model: torch.optim.RMSprop(
        [{"params": [param], "lr": 0.01 * (1 + number)} for number, param in enumerate(model.parameters())]
    ),
    "counting": lambda model: Counting(model.parameters()),
}


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [local(each) for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]


def train(wrap: Wrap, make_optimizer: MakeOptimizer, folder: Path | None, *, by_closure: bool = False) -> Any:
    torch.set_default_dtype(torch.float64)
    model = talk(wrap)
    optimizer = make_optimizer(model)
    if folder is not None:
        fsdp.park(model, optimizer, to=folder, parts=["optimizer"])  # before there is any state
    for step in range(2):
        optimizer.zero_grad()
        if by_closure:
            optimizer.step(partial(backward, model, step))  # type: ignore[arg-type]
        else:
            backward(model, step)
            optimizer.step()
        if folder is not None:
            assert nbytes_of(tensors_of(optimizer)) == 0
    state = optimizer.state_dict()["state"]
    fsdp.unpark(model)
    assert not any(isinstance(each, Guard) for each in tensors_of(optimizer))
    return full_state(model), state, optimizer.state_dict()["state"]


@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_steps_of_a_parked_optimizer_have_the_bits_of_other_steps_in_every_form(kind: str, tmp_path: Path) -> None:
    (weights, parked, after), (expected, *_, state) = train(*KINDS[kind], tmp_path), train(*KINDS[kind], None)
    assert_same_state(weights, expected)
    assert_same(after, state)
    assert_same(parked, state)
    assert not any(tmp_path.iterdir())


@parametrize_pairs(at_most=len(OPTIMIZERS) + 1, kind=list(OPTIMIZERS), by_closure=[False, True])
@on_ranks(2)
def test_steps_of_a_parked_optimizer_have_the_bits_of_other_steps_for_every_optimizer(
    kind: str, by_closure: bool, tmp_path: Path
) -> None:
    wrap = partial(flat, use_orig_params=True)
    found = train(wrap, OPTIMIZERS[kind], tmp_path, by_closure=by_closure)
    expected = train(wrap, OPTIMIZERS[kind], None, by_closure=by_closure)
    assert_same_state(found[0], expected[0])
    assert_same(found[2], expected[2])


@pytest.mark.parametrize("parts", [None, ["optimizer"]])
@on_ranks(2)
def test_a_scheduler_changes_the_learning_rate_of_a_parked_optimizer(parts: list[str] | None, tmp_path: Path) -> None:
    def trained(folder: Path | None) -> Any:
        model = talk(flat)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            backward(model, step)
            if folder is not None and parts:
                fsdp.park(model, optimizer, to=folder, parts=parts)
            optimizer.step()
            if folder is not None:
                fsdp.park(model, optimizer, to=folder, parts=parts)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2 ** (step + 1))
            fsdp.unpark(model)
        return full_state(model)

    assert_same_state(trained(tmp_path), trained(None))


@contextmanager
def steps_seen(seen: Callable[[], Any]) -> Iterator[list[Any]]:
    """What is seen whenever torch's step has updated some parameters."""
    found: list[Any] = []
    wrapped: Any = torch.optim.AdamW.step
    original = wrapped.__wrapped__

    def step(optimizer: Any, closure: Any = None) -> Any:
        loss = original(optimizer, closure)
        found.append(seen())
        return loss

    wrapped.__wrapped__ = step
    try:
        yield found
    finally:
        wrapped.__wrapped__ = original


@on_ranks(2)
def test_the_state_of_two_units_at_most_is_in_memory(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    optimizer.step()
    by_unit = [nbytes_of(state.values()) for state in optimizer.state.values()]
    backward(model, 1)
    with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
        with steps_seen(lambda: nbytes_of(tensors_of(optimizer))) as seen:
            optimizer.step()
        assert len(seen) == 1 + len(by_unit) == 4
        assert 0 < max(seen) <= sum(sorted(by_unit)[-2:]) < sum(by_unit)
        assert nbytes_of(tensors_of(optimizer)) == 0


@on_ranks(2)
def test_each_step_reads_the_state_once(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    optimizer.step()
    counts = []
    with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
        for step in range(3):
            backward(model, step)
            with counted_reads() as sizes:
                optimizer.step()
            counts.append(len(sizes))
    assert counts == 3 * [len(tensors_of(optimizer))]


@on_ranks(2)
def test_units_are_stepped_one_by_one_also_if_this_rank_has_no_rows_of_some(tmp_path: Path) -> None:
    model: Any = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(nn.Linear(4, 1)), fsdp.fully_shard(nn.Linear(1, 1))))
    optimizer = adamw(model.parameters())
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if step == 1:
            fsdp.park(model, optimizer, to=tmp_path, parts=["optimizer"])  # with empty tensors in the state of rank 1
        with steps_seen(lambda: None) as seen:
            optimizer.step()
    assert len(seen) == 3
    fsdp.unpark(model)


@on_ranks(2)
def test_hooks_of_users_are_called_once_with_all_parameters(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    seen: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append((name, len(optimizer.param_groups[0]["params"])))

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
        optimizer.register_step_pre_hook(note("before, registered later"))
        optimizer.register_step_post_hook(note("after, registered later"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
    assert [name for name, _ in seen if name.startswith("before")] == ["before", "before, registered later"]
    assert [name for name, _ in seen if name.startswith("after")] == ["after", "after, registered later"]
    assert {count for _, count in seen} == {4}
    assert optimizer.param_groups[0]["lr"] == 0.005


@on_ranks(2)
def test_units_without_gradients_stay_parked(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    left_out = next(iter(optimizer.param_groups[0]["params"]))
    left_out.grad = None
    with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
        with steps_seen(lambda: None) as seen:
            optimizer.step()
        assert len(seen) == 3
        assert int(optimizer.state[left_out]["step"].item()) == 1
    assert int(optimizer.state[left_out]["step"]) == 1


@pytest.mark.parametrize("kind", ["adamw", "counting"])
@on_ranks(2)
def test_after_a_step_that_fails_nothing_is_lost_and_training_goes_on(kind: str, tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = OPTIMIZERS[kind](model)
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    listed = [*optimizer.param_groups[0]["params"]]
    fsdp.park(model, optimizer, to=tmp_path, parts=["optimizer"])
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises((ValueError, IndexError)):
        optimizer.step()
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, listed)]
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    assert nbytes_of(tensors_of(optimizer)) == 0
    fsdp.unpark(model)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert not [*tmp_path.glob(f"parked-rank-{dist.get_rank()}-*")]


@pytest.mark.parametrize("kind", ["orig", "rows"])
@on_ranks(2)
def test_state_that_cannot_be_parked_again_after_a_step_stays_in_memory(kind: str, tmp_path: Path) -> None:
    model, twin = talk(KINDS[kind][0]), talk(KINDS[kind][0])
    optimizer, expected = adamw(model.parameters()), adamw(twin.parameters())
    folder = tmp_path / f"{dist.get_rank()}"
    with fsdp.parked(model, optimizer, to=folder, parts=["optimizer"]):
        for step in range(3):
            for each, its in ((model, optimizer), (twin, expected)):
                backward(each, step)
                full = mock.patch.object(parked_tensors, "write_at", side_effect=OSError(errno.ENOSPC, "full"))
                fails = step == 1 and its is optimizer
                with full if fails else nullcontext(), pytest.raises(OSError, match="full") if fails else nullcontext():
                    its.step()
                its.zero_grad()
            if step == 1:  # the first unit was updated
                assert nbytes_of(tensors_of(optimizer)) > 0
                twin.load_state_dict(model.state_dict())
                expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not [*folder.iterdir()]
    assert_same(full_state(model), full_state(twin))
    assert_same(optimizer.state_dict()["state"], expected.state_dict()["state"])


@on_ranks(2)
def test_state_that_is_parked_by_two_calls_is_stepped_and_each_context_brings_back_its_own(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
        with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
            backward(model, 0)
            optimizer.step()
        backward(model, 1)
        optimizer.step()
        assert nbytes_of(tensors_of(optimizer)) == 0
    backward(model, 2)
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


@pytest.mark.parametrize("kind", ["flat", "rows"])
@on_ranks(2)
def test_the_optimizer_of_two_models_is_stepped_while_it_is_parked_with_both(kind: str, tmp_path: Path) -> None:
    def train(parks: bool) -> Any:
        models = [talk(KINDS[kind][0], seed) for seed in (0, 1)]
        optimizer = adamw(param for model in models for param in model.parameters())
        for model in models if parks else ():
            fsdp.park(model, optimizer, to=tmp_path, parts=["optimizer"])
        for step in range(3):
            for model in models:
                backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            assert not parks or nbytes_of(tensors_of(optimizer)) == 0
            if parks and step == 1:
                fsdp.unpark(models[0])  # the other one takes over
        fsdp.unpark(models[1])
        return [*map(full_state, models)], optimizer.state_dict()["state"]

    assert_same(train(parks=True), train(parks=False))


@pytest.mark.parametrize("kind", ["flat", "orig"])
@on_ranks(2)
def test_ranks_with_different_numbers_of_batches_step_a_parked_optimizer(kind: str, tmp_path: Path) -> None:
    def train(parks: bool) -> Any:
        model = talk(KINDS[kind][0])
        optimizer = adamw(model.parameters())
        if parks:
            fsdp.park(model, optimizer, to=tmp_path, parts=["optimizer"])
        with fsdp.join(model, optimizer):
            for step in range(1 + 2 * dist.get_rank()):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        fsdp.unpark(model)
        return full_state(model), optimizer.state_dict()["state"]

    assert_same(train(parks=True), train(parks=False))


@on_ranks(2)
def test_a_step_while_gradients_are_parked_is_an_error_that_names_them(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    with (
        fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer", "gradients"]),
        pytest.raises(RuntimeError, match=r"AdamW.step\(\): the gradients of .* are parked: call fsdp.unpark"),
    ):
        optimizer.step()
    optimizer.step()
