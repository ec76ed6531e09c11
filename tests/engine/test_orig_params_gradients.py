"""`use_orig_params=True`: what users do with gradients of pieces, the shard's gradient follows.

Zeroed ones are dropped, replaced ones are taken, and clipping sees what the optimizer will see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.orig_twins import OrigTwins, one_sgd, one_toolbox, part_of, two_optimizers, use_a
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.twins import toolbox


@parametrize_pairs(world_size=[1, 2], sync=[True, False], zeroed=["all", "one", "unused", "one optimizer's"])
@on_ranks("world_size")
def test_zeroing_drops_what_was_accumulated(sync: bool, zeroed: str) -> None:
    twins = OrigTwins(one_toolbox, two_optimizers)
    twins.backward(0, use_a if zeroed == "unused" else _use_all, sync=sync)
    if zeroed == "all":
        twins.on_both(_zero_all)
    elif zeroed == "one optimizer's":
        twins.zero(slice(0, 1))
    else:
        twins.on_both(partial(_zero_one, name="entry.weight"))
    twins.backward(1, sync=True)
    twins.assert_close_gradients()
    twins.optimize()
    twins.assert_close_weights()


def _use_all(model: nn.Module, inputs: Tensor, rank: int) -> Tensor:
    return model(inputs)


def _zero_all(params: dict[str, nn.Parameter]) -> None:
    for param in params.values():
        param.grad = None


def _zero_one(params: dict[str, nn.Parameter], name: str) -> None:
    params[name].grad = None


@on_ranks(1, 2)
def test_a_unit_that_backward_expects_again_keeps_its_gradient() -> None:
    """It is gathered ahead, in vain, when its gradient is reduced and its pieces do not show it yet."""
    twins = OrigTwins(partial(toolbox, recompute=False), one_sgd, bucket_cap_mb=0)
    for number, order in enumerate(("bcab", "cab")):
        twins.step(number, partial(_in_order, order))
        twins.assert_close_gradients()
    twins.assert_close_weights()


def _in_order(order: str, model: nn.Module, inputs: Tensor, rank: int) -> Tensor:
    return model(inputs, order)


@on_ranks(2)
def test_gradients_that_are_not_reduced_are_not_stepped() -> None:
    twins = OrigTwins(nested_mlp, two_optimizers)
    twins.backward(0)
    twins.zero(slice(0, 1))
    twins.backward(1, sync=False)
    for optimizer in twins.optimizers[0]:  # that with no gradient at all would silently do nothing
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()


@on_ranks(2)
def test_an_unused_parameter_keeps_the_gradient_it_had() -> None:
    twins = OrigTwins(one_toolbox, one_sgd)
    twins.backward(0)
    twins.backward(1, use_a)
    twins.assert_close_gradients()
    twins.zero()
    twins.backward(2, use_a, sync=False)
    twins.backward(3, use_a)
    twins.assert_close_gradients()


@on_ranks(2)
def test_users_may_change_a_gradient() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.backward(0)
    twins.on_both(_halve_gradients)
    twins.backward(1)  # is added to what was put there
    twins.assert_close_gradients()
    twins.optimize()
    twins.assert_close_weights()


def _halve_gradients(params: dict[str, nn.Parameter]) -> None:
    for number, param in enumerate(params.values()):
        assert param.grad is not None
        if number % 2:
            param.grad.mul_(0.5)
        else:
            param.grad = param.grad * 0.5


@on_ranks(1, 2)
def test_a_gradient_that_users_assign_is_added_to() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    for name, whole in twins.wholes.items():
        whole.grad = torch.ones_like(whole)
        twins.pieces[name].grad = torch.ones_like(twins.pieces[name])
    twins.backward(0)
    twins.assert_close_gradients()


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
@on_ranks(2)
def test_a_gradient_that_users_keep_stays_as_it_is(tmp_path: Path, offload: str | None) -> None:
    folder = {"offload_folder": tmp_path} if offload == "disk" else {}
    twins = OrigTwins(nested_mlp, one_sgd, offload=offload, **folder)
    twins.backward(0)
    kept = {name: piece.grad for name, piece in twins.pieces.items()}
    before = {name: grad.clone() for name, grad in kept.items() if grad is not None}
    twins.step(1)
    assert all(torch.equal(kept[name], value) for name, value in before.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [_zero_one, _halve_gradients], ids=["zeroed", "replaced"])
@on_ranks(2)
def test_clipping_sees_what_users_did_to_gradients(change: Callable[..., None]) -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.backward(0)
    twins.on_both(partial(change, name="entry.weight") if change is _zero_one else change)
    _assert_clips_alike(twins)


@on_ranks(2)
def test_clipping_does_not_see_gradients_of_before_a_freeze() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.step(0)
    twins.zero()
    twins.on_both(_freeze_trunk)  # all of a unit
    twins.backward(1)
    _assert_clips_alike(twins)


def _freeze_trunk(params: dict[str, nn.Parameter]) -> None:
    for name, param in params.items():
        param.requires_grad_(not name.startswith("trunk"))


def _assert_clips_alike(twins: OrigTwins) -> None:
    """Collective. The same norm, and the same gradients afterwards."""
    norm = twins.sharded.clip_grad_norm_(0.01)  # type: ignore[operator]
    expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01)
    torch.testing.assert_close(norm, expected)
    twins.assert_close_gradients()


@on_ranks(2)
def test_clipping_is_allowed_when_what_was_accumulated_was_zeroed() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.backward(0, sync=False)
    twins.zero()
    assert twins.sharded.clip_grad_norm_(1.0) == 0  # type: ignore[operator]


@on_ranks(2)
def test_toggling_keeps_what_was_accumulated() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.backward(0, sync=False)
    twins.on_both(_freeze_scale)
    twins.backward(1)
    assert all(
        piece.grad is not None and torch.allclose(piece.grad, part_of(twins.wholes[name].grad, piece))  # type: ignore[arg-type]
        for name, piece in twins.pieces.items()
        if piece.requires_grad
    )


@on_ranks(2)
def test_a_unit_that_is_frozen_for_a_backward_keeps_what_was_accumulated() -> None:
    twins = OrigTwins(nested_mlp, one_sgd)
    twins.backward(0, sync=False)
    twins.on_both(_freeze_trunk)
    twins.backward(1)  # reduces that of the trunk as well
    twins.on_both(_thaw)
    twins.assert_close_gradients()
    twins.backward(2)
    twins.assert_close_gradients()


def _thaw(params: dict[str, nn.Parameter]) -> None:
    for param in params.values():
        param.requires_grad_(True)


def _freeze_scale(params: dict[str, nn.Parameter]) -> None:
    params["scale"].requires_grad_(False)


@on_ranks(2)
def test_a_gradient_is_read_and_dropped_by_the_name_in_the_module() -> None:
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.state_dict()
    model(torch.ones(2, 4)).sum().backward()
    kept, dropped = model.module.module
    assert kept.weight.grad is dict(model.named_parameters())["0.weight"].grad
    dropped.weight.grad = None
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "0.bias", "1.bias"}
