"""A copy beside its original: what it costs, when it is freed, and both in one step."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.distributed.collectives import DirectExchange
from tests.helpers.copied_twins import (
    FLAT,
    ORIGINAL,
    UNFLATTENED,
    CopiedTwins,
    Travel,
    every_travel,
    nested,
    shard_bytes,
    state_of,
    through_pickle,
    train,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.memory import handles_of, live_bytes
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, sgd_with_momentum
from tests.helpers.twins import batch, score

# Memory


@parametrize_pairs(
    used=["unused", "after a forward", "with accumulated gradients"],
    options=[FLAT, ORIGINAL, UNFLATTENED],
    world_size=[1, 2],
)
@on_ranks("world_size")
def test_a_copy_costs_its_shards_to_the_byte(options: dict[str, Any], used: str) -> None:
    model = nested(fully_sharded(**options))
    if used == "after a forward":
        model(batch(0, 0).float())
    if used == "with accumulated gradients":
        with model.no_sync():
            score(model(batch(0, 0).float())).backward()
    copy.deepcopy(model)  # frees what is kept for the next use; and what torch makes once is not counted
    between = live_bytes()
    for source in (model, nn.Sequential(model)):
        copied = copy.deepcopy(source)
        taken = live_bytes() - between
        assert taken == shard_bytes(model)
        assert next(copied.parameters()).numel() == next(model.parameters()).numel()
        del copied
        assert live_bytes() == between


@parametrize_pairs(travel=[copy.deepcopy, through_pickle], options=[FLAT, ORIGINAL, UNFLATTENED])
@on_ranks(2)
def test_a_copy_that_was_trained_is_freed_when_it_is_dropped(travel: Travel, options: dict[str, Any]) -> None:
    """And its original, when the copy is kept."""
    model: Any = nested(fully_sharded(**options))
    train(model, sgd_with_momentum(model.parameters()), 0)
    copied = travel(model)
    train(copied, sgd_with_momentum(copied.parameters()), 0)
    gone = [weakref.ref(copied), *map(weakref.ref, copied.parameters())]
    del copied
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    kept = travel(model)
    gone = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    train(kept, sgd_with_momentum(kept.parameters()), 1)


# Side by side


@pytest.mark.parametrize(
    ("world_size", "options"), [(3, FLAT), (3, ORIGINAL), (3, UNFLATTENED), (1, FLAT), (2, UNFLATTENED), (4, ORIGINAL)]
)
@on_ranks("world_size")
def test_student_and_teacher_compute_in_turns_in_one_step(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    students = [nested(fully_sharded(**options)), nested()]
    teachers = [copy.deepcopy(student).requires_grad_(False) for student in students]
    optimizers = sgd_with_momentum(students[0].parameters()), sgd_with_momentum(students[1].parameters())
    student = CopiedTwins(students[0], students[1], optimizers)
    world = dist.get_world_size()
    for number in range(2):
        _loss(student.sharded, teachers[0], batch(number, dist.get_rank())).backward()
        for rank in range(world):
            (_loss(student.plain, teachers[1], batch(number, rank)) / world).backward()
        student.optimize()
    student.assert_close()
    assert_same_state(state_of(teachers[0]), dict(nested().state_dict()))


def _loss(student: nn.Module, teacher: nn.Module, inputs: Tensor) -> Tensor:
    early, wanted, late = student(inputs), teacher(inputs.cos()), student(inputs.sin())
    return ((early - wanted) * (late - teacher(inputs))).square().mean()


@on_ranks(2)
def test_one_backward_goes_through_both() -> None:
    torch.set_default_dtype(torch.float64)
    twins = CopiedTwins.of(nested, sgd_with_momentum)
    other = twins.copied()
    for number in range(3):
        inputs = batch(number, dist.get_rank())
        score(twins.sharded(inputs) * other.sharded(inputs.sin())).backward()
        for rank in range(dist.get_world_size()):
            product = twins.plain(batch(number, rank)) * other.plain(batch(number, rank).sin())
            (score(product) / dist.get_world_size()).backward()
        twins.optimize()
        other.optimize()
    twins.assert_close()
    other.assert_close()


@every_travel
@on_ranks(2)
def test_messages_of_a_copy_have_tags_of_their_own(travel: Travel) -> None:
    model = nested(fully_sharded())
    model(batch(0, 0).float())
    models = [model, travel(model), travel(model), nested(fully_sharded())]
    for each in models:
        each(batch(0, 0).float())
    handles = [handle for each in models for handle in handles_of(each)]
    assert len({handle.comm for handle in handles}) == 1
    assert isinstance(handles[0].comm, DirectExchange)
    assert len({handle.tags.gather for handle in handles}) == len(handles)
