"""Staging what sharded models and their optimizers hold, without the stager knowing what sharding is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp import FlatParameter, StateDictStager
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import TOKENS, Training, adam, fully_sharded, nested_mlp, tiny_transformer
from tests.helpers.ranks import RankPool


def _train(model: Any, optimizer: Any, step: int, task: Any = None) -> None:
    training = Training(make_model=nested_mlp, make_optimizer=adam)
    inputs, targets = (task or training.task).batch(torch.Generator().manual_seed(step), 4)
    optimizer.zero_grad()
    (task or training.task).loss(model(inputs), targets).backward()
    optimizer.step()


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "params": list(model.parameters()), "optim": optimizer.state_dict()}


def _values(tree: Any) -> list[Tensor]:
    """All tensors of a state, as plain ones."""
    if isinstance(tree, Tensor):
        return [tree.detach().as_subclass(Tensor).clone()]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [value for part in tree for value in _values(part)] if isinstance(tree, (list, tuple)) else []


KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "pieces": {"use_orig_params": True},
    "one by one": {"flatten_parameters": False},
    "kept whole": {"reshard_after_forward": False},
    "on the host": {"offload": "cpu"},
    "on disk": {"offload": "disk"},
    "pieces on disk": {"offload": "disk", "use_orig_params": True},
}


@parametrize_pairs(kind=list(KINDS), world_size=[3, 1])
def test_the_state_of_a_sharded_training_is_staged_and_stays(
    ranks: RankPool, tmp_path: Path, kind: str, world_size: int
) -> None:
    options = dict(KINDS[kind])
    if options.get("offload") == "disk":
        options["offload_folder"] = tmp_path
    ranks(world_size).run(_stage_and_train_on, options)


def _stage_and_train_on(options: dict[str, Any]) -> None:
    model = nested_mlp(fully_sharded(**options))
    optimizer = adam(model.parameters())
    stager = StateDictStager()
    _train(model, optimizer, 0)
    for step in range(1, 3):
        state = _state(model, optimizer)
        before = _values(state)
        copied = stager.stage(state)
        del state
        for mine, param in zip(copied["params"], model.parameters(), strict=True):
            assert type(mine) is type(param)
            assert mine.requires_grad == param.requires_grad
            assert mine.untyped_storage().data_ptr() != param.untyped_storage().data_ptr() or not param.numel()
        _train(model, optimizer, step)
        assert [torch.equal(*pair) for pair in zip(_values(copied), before, strict=True)] == [True] * len(before)
        del copied
    shards = sum(param.numel() * param.element_size() for param in model.parameters())
    assert stager.held_bytes >= shards


@on_ranks(2)
def test_a_training_goes_on_from_a_staged_state_that_went_through_a_file() -> None:
    model = tiny_transformer(fully_sharded())
    optimizer = adam(model.parameters())
    _train(model, optimizer, 0, TOKENS)
    file = io.BytesIO()
    torch.save(StateDictStager().stage({"model": model.state_dict(), "optim": optimizer.state_dict()}), file)
    _train(model, optimizer, 1, TOKENS)
    expected = _values(model.state_dict())

    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = tiny_transformer(fully_sharded())
    other.load_state_dict(loaded["model"])
    other_optimizer = adam(other.parameters())
    other_optimizer.load_state_dict(loaded["optim"])
    _train(other, other_optimizer, 1, TOKENS)
    assert all(torch.equal(*pair) for pair in zip(_values(other.state_dict()), expected, strict=True))


@on_ranks(2)
def test_pieces_stay_views_of_their_shard() -> None:
    model: Any = nested_mlp(fully_sharded(use_orig_params=True))
    copied = StateDictStager().stage(list(model.parameters()))
    originals = list(model.parameters())
    for one, mine in zip(originals, copied, strict=True):
        assert (mine.fqn, mine.unsharded_shape, mine.offset) == (one.fqn, one.unsharded_shape, one.offset)
        assert isinstance(mine.owner, FlatParameter)
        assert mine.shard_storage is None  # memory of its own, and no tie to where the unit keeps its shards
        assert mine.untyped_storage().data_ptr() == mine.owner.untyped_storage().data_ptr()
    owners = [{id(each.owner) for each in params} for params in (originals, copied)]
    assert len(owners[0]) == len(owners[1])


def test_a_staged_flat_parameter_knows_what_it_is_made_of() -> None:
    flat = FlatParameter([torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.zeros(4))], names=["w", "b"])
    copied = StateDictStager().stage(flat)
    assert type(copied) is FlatParameter
    assert copied.metadata() == flat.metadata()
    assert [view.shape for view in copied.get_param_views()] == [(2, 3), (4,)]


@on_ranks(2)
def test_a_weight_that_is_sharded_says_so() -> None:
    model: Any = fully_sharded()(torch.nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="weight is sharded"):
        StateDictStager().stage({"w": model.module.weight})
