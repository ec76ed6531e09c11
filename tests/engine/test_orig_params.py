"""`use_orig_params=True`: what optimizers and users see, and what they may do with it.

Every parameter of the model is there under its own name, as this rank's piece of it, a view of the unit's shard. The
plain model beside it (`OrigTwins`) says what each change should mean.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter, FullyShardedDataParallel
from fsdp.engine.orig_params import LocalShard
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import full_state, sharded
from tests.helpers.models import Wrap, keep, nested_mlp, tiny_transformer
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.orig_twins import (
    OrigTwins,
    half_frozen,
    one_adamw,
    one_sgd,
    one_toolbox,
    original,
    part_of,
)
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.twins import batch


def pieces(model: nn.Module) -> dict[str, LocalShard]:
    found = dict(model.named_parameters())
    assert all(isinstance(piece, LocalShard) for piece in found.values())
    return found  # type: ignore[return-value]


def lies_in(tensor: Tensor, memory: Tensor) -> bool:
    return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def assert_pieces_are_the_shards(model: nn.Module) -> None:
    """There is one copy of what this rank holds."""
    grads: dict[FlatParameter, Tensor] = {}  # of each shard, the first that it shows
    for name, piece in pieces(model).items():
        assert piece.dtype == piece.owner.dtype
        assert lies_in(piece, piece.owner), f"{name} has memory of its own"
        if piece.grad is not None:
            assert piece.grad.dtype == piece.dtype
            shown = grads.setdefault(piece.owner, piece.grad)
            assert lies_in(piece.grad, shown), f"the gradient of {name} has memory of its own"


# Names and pieces


@pytest.mark.parametrize("make", [nested_mlp, partial(tiny_transformer, tied=True), one_toolbox, half_frozen])
@on_ranks(2)
def test_names_are_those_of_the_plain_model_in_its_order(make: Callable[[Wrap], nn.Module]) -> None:
    model, plain = make(original()), make(keep)
    expected = [(name, param.requires_grad) for name, param in plain.named_parameters()]
    assert [(name, param.requires_grad) for name, param in model.named_parameters()] == expected
    with model.summon_full_params():  # type: ignore[operator]
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected]
    assert [(name, param.requires_grad) for name, param in model.named_parameters()] == expected


@on_ranks(1, 2, 3)
def test_each_rank_has_its_part_of_each_parameter() -> None:
    model, plain = nested_mlp(original()), nested_mlp(keep)
    for name, whole in plain.named_parameters():
        piece = pieces(model)[name]
        assert piece.dim() == 1
        assert piece.unsharded_shape == whole.shape
        assert torch.equal(piece.detach(), part_of(whole.detach(), piece))
        spans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(spans, (piece.offset, piece.numel()))
        elements = [number for start, numel in spans for number in range(start, start + numel)]
        assert elements == list(range(whole.numel()))  # each on one rank, in the order of ranks


@on_ranks(1)
def test_flatten_parameters_false_is_refused() -> None:
    with pytest.raises(ValueError, match="use_orig_params"):
        FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True, flatten_parameters=False)


# One copy of everything


@parametrize_pairs(world_size=[1, 2], offload=[None, "cpu", "disk"])
@on_ranks("world_size")
def test_pieces_share_the_shards_memory(tmp_path: Path, offload: str | None) -> None:
    folder = {"offload_folder": tmp_path} if offload == "disk" else {}
    model = nested_mlp(original(offload=offload, **folder))
    assert_pieces_are_the_shards(model)
    (optimizer,) = one_adamw(model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert_pieces_are_the_shards(model)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert_pieces_are_the_shards(model)
    with model.summon_full_params():  # type: ignore[operator]
        for param in model.parameters():
            param.data.mul_(2)
    assert_pieces_are_the_shards(model)
    model.to(torch.float64)
    assert_pieces_are_the_shards(model)
    assert all(piece.dtype == torch.float64 for piece in model.parameters())
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert_pieces_are_the_shards(model)


@on_ranks(1, 2)
def test_zeroed_gradients_are_freed_before_the_next_forward_computes() -> None:
    model = nested_mlp(original())
    model(torch.ones(2, 5)).sum().backward()
    gradients = [weakref.ref(param.grad._base) for param in model.parameters()]  # type: ignore[union-attr]
    assert all(gradient() is not None for gradient in gradients)
    model.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 5))
    assert all(gradient() is None for gradient in gradients)


# Values


@parametrize_pairs(
    then=["train", "state_dict", "summon", "to", "step", "forward_before"], world_size=[2, 1], whole=[True, False]
)
@on_ranks("world_size")
def test_assigned_data_is_kept(whole: bool, then: str) -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.step(0)
    if then == "forward_before":  # leaves the root's parameters whole, for a backward that doesn't come
        twins.sharded(batch(0, dist.get_rank()))
    elif then == "step":
        twins.zero()
        twins.backward(1)
    for name in ("entry.weight", "exit.bias", "trunk.0.weight"):
        value = torch.full_like(twins.wholes[name], 0.3)
        twins.wholes[name].data = value
        piece = twins.pieces[name]
        piece.data = value.clone() if whole else part_of(value, piece).clone()
    if then == "step" and not whole:
        twins.optimize()
    elif then == "summon":
        for model in (twins.sharded, twins.plain):
            with model.summon_full_params() if model is twins.sharded else torch.no_grad():  # type: ignore[operator]
                for param in model.parameters():
                    param.data.mul_(2)
    elif then == "to":
        twins.sharded.to(torch.float32).to(torch.float64)
        twins.plain.to(torch.float32).to(torch.float64)
    elif then != "state_dict":
        twins.step(2)
    twins.assert_close_weights()
    assert_pieces_are_the_shards(twins.sharded)


@pytest.mark.parametrize("inference", [False, True])
@parametrize_pairs(form=["flat", "orig", "rows"], world_size=[2, 1])
@on_ranks("world_size")
def test_data_of_two_models_may_be_exchanged(form: str, inference: bool) -> None:
    def run(*models: nn.Module) -> list[dict[str, Tensor]]:
        values = []
        pairs = list(zip(*(model.parameters() for model in models), strict=True))  # as an optimizer was given them
        for exchange in (exchange_at_once, exchange_by_a_name, exchange_at_once):
            for one, other in pairs:
                exchange(one, other)
            with torch.inference_mode(inference):
                for model in models:
                    model(torch.ones(2, 5, dtype=torch.float64))
            values += [full_state(model) for model in models]
        return values

    plain = [seeded(lambda: nn.Linear(5, 3), seed).double() for seed in (0, 1)]
    expected = run(*copy.deepcopy(plain))
    for found, value in zip(run(*(sharded(model, form) for model in plain)), expected, strict=True):
        assert_close_state(found, value)


def exchange_at_once(one: Any, other: Any) -> None:
    one.data, other.data = other.data, one.data


def exchange_by_a_name(one: Any, other: Any) -> None:
    kept = other.data
    other.data = one.data
    one.data = kept


@on_ranks(2)
def test_data_may_be_exchanged_with_plain_tensors() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.step(0)
    others = {name: torch.full_like(piece, 0.3) for name, piece in twins.pieces.items()}
    before = {name: piece.detach().clone() for name, piece in twins.pieces.items()}
    for name, piece in twins.pieces.items():
        exchange_by_a_name(piece, others[name])
    state = twins.sharded.state_dict()
    assert all(value.eq(0.3).all() for value in state.values())
    assert all(torch.equal(others[name], values) for name, values in before.items())


@on_ranks(2)
def test_what_was_read_from_data_follows_when_another_piece_is_replaced() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    seen = twins.pieces["entry.weight"].data
    twins.pieces["entry.bias"].data = torch.zeros_like(twins.pieces["entry.bias"])
    twins.sharded.state_dict()
    seen.fill_(0.3)
    assert twins.sharded.state_dict()["entry.weight"].eq(0.3).all()


@on_ranks(2)
def test_data_of_another_shape_is_an_error_that_names_it() -> None:
    model = nested_mlp(original())
    pieces(model)["entry.weight"].data = torch.zeros(6, 6)
    with pytest.raises(RuntimeError, match=r"entry\.weight.*\(6, 6\)"):
        model(torch.ones(2, 5))


@on_ranks(1, 2)
def test_whole_parameters_show_what_is_frozen() -> None:
    twins = OrigTwins(half_frozen, one_sgd)
    twins.step(0)
    twins.on_both(_freeze_scale)
    state = twins.sharded.state_dict()
    with twins.sharded.summon_full_params():  # type: ignore[operator]
        expected = {name: whole.requires_grad for name, whole in twins.wholes.items()}
        assert {name: param.requires_grad for name, param in twins.sharded.named_parameters()} == expected
    twins.sharded.load_state_dict(state)
    twins.step(1)
    twins.assert_close_weights()


def _freeze_scale(params: dict[str, nn.Parameter]) -> None:
    params["scale"].requires_grad_(False)


@on_ranks(2)
def test_an_optimizers_state_is_saved_and_loaded_per_piece() -> None:
    twins = OrigTwins(nested_mlp, one_adamw)
    twins.step(0)
    for optimizers, model in zip(twins.optimizers, (twins.sharded, twins.plain), strict=True):
        saved = optimizers[0].state_dict()
        optimizers[:] = one_adamw(model)
        optimizers[0].load_state_dict(saved)
    twins.step(1)
    twins.assert_close_weights()


@on_ranks(2)
@torch.no_grad()
def test_whole_parameters_lie_at_multiples_of_16_bytes() -> None:
    layers = [nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 7)]  # nothing of this is a multiple of anything
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = fully_sharded(use_orig_params=True)(nn.Sequential(*copy.deepcopy(layers)).to(dtype))
        seen: list[int] = []
        model.module.module[2].register_forward_hook(
            lambda *_, model=model, seen=seen: seen.extend(
                p.data_ptr() for p in model._unit.handles[0].unsharded.leaves
            )
        )
        model(torch.ones(1, 3, dtype=dtype))
        assert len(seen) == 6
        assert all(address % 16 == 0 for address in seen)
