"""A head that is tied to its embedding when both are sharded already becomes one parameter with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import distribute_tensor

import fsdp
from fsdp.engine.kept_shard import KeptShard
from fsdp.engine.originals import follow_flat_param
from fsdp.engine.unit import unit_of
from fsdp.layers.host_copy import HostCopy
from tests.helpers.dtensor_twins import adamw_one_by_one, assert_at_rest
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import full_state
from tests.helpers.on_ranks import on_ranks

VOCABULARY = 13  # which two ranks do not divide


class Language(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocabulary, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))

    def tie(self) -> Language:
        self.head.weight = self.embedding.weight
        return self


def _train(model: nn.Module, ranks: range) -> None:
    """Three steps on the batches of some ranks."""
    optimizer = adamw_one_by_one(model.parameters())
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (dist.get_world_size(), 5), generator=torch.Generator().manual_seed(step))
        losses = [nn.functional.cross_entropy(model(tokens[rank]), (tokens[rank] + 1) % VOCABULARY) for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _own() -> range:
    return range(dist.get_rank(), dist.get_rank() + 1)


def _trained_plain() -> dict[str, Tensor]:
    plain = Language().tie()
    _train(plain, range(dist.get_world_size()))
    return plain.state_dict()


def _sharded(names: list[str], fully_shard: Callable[..., Any] = fsdp.fully_shard, **sizes: int) -> Language:
    model = Language(**sizes)
    for name in names:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    return model


UNITS = {"one unit": [], "units of their own": ["embedding", "body", "head"], "the head's unit": ["head"]}


@pytest.mark.parametrize("units", UNITS)
@on_ranks(2)
def test_it_is_trained_as_one(units: str) -> None:
    names = UNITS[units]
    model = _sharded(names).tie()
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight", "body.weight", "body.bias"]
    _train(model, _own())
    assert model.head.weight is model.embedding.weight
    assert_at_rest(model)
    assert_close_state(full_state(model), _trained_plain(), 1e-10)


@on_ranks(2)
def test_both_may_be_given_a_new_value() -> None:
    model = _sharded(UNITS["units of their own"])
    listed = model.embedding.weight
    placed = distribute_tensor(Language().embedding.weight.detach(), listed.device_mesh, listed.placements)
    with torch.no_grad():
        listed.zero_()
    model.embedding.weight = nn.Parameter(placed)
    _train(model.tie(), _own())
    assert_close_state(full_state(model), _trained_plain(), 1e-10)


@pytest.mark.parametrize("units", UNITS)
@on_ranks(2)
def test_values_may_come_after_the_tie(tmp_path: Path, units: str) -> None:
    names = UNITS[units]
    start, expected = Language().tie().state_dict(), _trained_plain()
    with torch.device("meta"):
        empty = _sharded(names).tie()
    empty.to_empty(device="cpu")
    empty.load_state_dict(start)
    _train(empty, _own())
    assert_close_state(full_state(empty), expected, 1e-10)
    fsdp.save(tmp_path, empty)
    again = _sharded(names).tie()
    fsdp.load(tmp_path, again)
    assert_close_state(full_state(again), expected, 1e-10)


@on_ranks(2)
def test_torchs_trains_them_wrongly() -> None:
    """Remove the row from docs/fully_shard.md when it does not any more."""
    model = _sharded([], torchs_fully_shard).tie()
    _train(model, _own())
    assert max((full_state(model)[name] - value).abs().max() for name, value in _trained_plain().items()) > 1e-5


@on_ranks(2)
def test_an_unlike_one_is_refused() -> None:
    model = _sharded(["head"], vocabulary=VOCABULARY + 1).tie()
    with pytest.raises(RuntimeError, match=r"weight was tied to embedding.weight after sharding.*shape"):
        _train(model, _own())


@on_ranks(2)
def test_it_is_too_late_after_the_first_use() -> None:
    model = _sharded(["head"])
    _train(model, _own())
    with pytest.raises(RuntimeError, match=r"weight.*before the first use"):
        _train(model.tie(), _own())


@on_ranks(2)
def test_an_optimizer_from_before_is_an_error() -> None:
    model = _sharded(["head"])
    optimizer = adamw_one_by_one(model.parameters())
    model.tie()(torch.arange(VOCABULARY)).sum().backward()
    with pytest.raises((RuntimeError, ValueError), match=r"what weight was before it was tied to embedding.weight"):
        optimizer.step()


@pytest.mark.parametrize("reshards", [2, "host"])
@on_ranks(4)
def test_what_it_is_split_from_goes_on_being_kept_in_the_same_way(reshards: Any) -> None:
    model = Language()
    inside = [model.embedding, model.body, model.head]
    fsdp.fully_shard(inside, reshard_after_forward=reshards)
    fsdp.fully_shard(model)
    _train(model.tie(), _own())
    unit = unit_of(model.body)
    assert unit is not None
    assert len(unit.handles) == 2
    assert {type(handle.kept_shard) for handle in unit.handles} == {HostCopy if reshards == "host" else KeptShard}
    assert_close_state(full_state(model), _trained_plain(), 1e-10)


@pytest.mark.parametrize("what", ["precision", "use"])
@on_ranks(2)
def test_a_module_that_cannot_share_its_tied_parameter_stays_as_it_was(what: str) -> None:
    model = Language().tie().float()
    narrow = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp.fully_shard(model.embedding, mp_policy=narrow)
    if what == "use":
        model.embedding(torch.tensor([1]))
    given = {} if what == "precision" else {"mp_policy": narrow}
    head = model.head = nn.Sequential(nn.Linear(6, 6), model.head)
    error, message = (ValueError, "differ in precision") if what == "precision" else (RuntimeError, "used already")
    with pytest.raises(error, match=message):
        fsdp.fully_shard(head, **given)
    assert unit_of(head) is None
    assert type(head) is nn.Sequential
    assert all(type(param) is nn.Parameter for param in head.parameters())
    if what == "precision":
        fsdp.fully_shard(head, mp_policy=narrow)
        fsdp.fully_shard(model, mp_policy=narrow)
        model(torch.tensor([1])).sum().backward()
        assert_at_rest(model)


@on_ranks(2)
def test_originals_may_be_freed_while_the_rank_looks_for_one_that_is_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    held = list(model.parameters())  # as by an optimizer that was made too early
    fsdp.fully_shard(model)
    (handle,) = fsdp.flat_param_handles(model)

    class Numbers(dict[int, Any]):
        def __contains__(self, slot: object) -> bool:
            held.clear()  # a garbage collection, which may run at any time
            return super().__contains__(slot)

    follow_flat_param(handle.flat_param, Numbers({0: (handle.flat_param, 0)}))
    assert model(torch.ones(1, 4)).shape == (1, 4)
