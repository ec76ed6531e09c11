"""Handles in users' hands: those of a model, what shards say of themselves, and handles without a unit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from fsdp import (
    FlatParamHandle,
    FlatParamShardMetadata,
    FullyShardedDataParallel,
    StandaloneHandle,
    flat_param_handles,
)
from fsdp.engine.placeholder import Placeholder
from tests.helpers.forms import FORMS, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone
from tests.helpers.ranks import RankPool


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


# The handles of a model


@parametrize_pairs(world_size=[2, 3], form=FORMS)
@on_ranks("world_size")
def test_a_model_gives_its_handles_which_unshard_by_hand(form: str) -> None:
    plain, model = layers(), layers()
    model[2] = sharded(model[2], form)
    model = sharded(model, form)
    outer, inner = flat_param_handles(nn.Sequential(model))
    assert all(isinstance(handle, FlatParamHandle) for handle in (outer, inner))
    assert [info.fqn for info in (*outer.param_infos, *inner.param_infos)] == ["0.weight", "0.bias", "weight", "bias"]
    for number in range(2):
        for handle, unsharded in ((outer, plain[0]), (inner, plain[2])):
            handle.unshard()
            handle.wait_for_unshard()
            for info, value in zip(handle.param_infos, unsharded.parameters(), strict=True):
                assert torch.equal(getattr(info.module, info.name), value)
            handle.reshard()
        model(batch(number, dist.get_rank())).sum().backward()


@parametrize_pairs(world_size=[1, 3], form=[*FORMS, "standalone"])
@on_ranks("world_size")
def test_a_shard_keeps_what_is_written_before_it_is_resharded_by_hand(form: str) -> None:
    plain, module = layers(), layers()
    if form == "standalone":
        handle: FlatParamHandle = StandaloneHandle(module.parameters(), module)
    else:
        (handle,) = flat_param_handles(sharded(module, form))
    places = handle.param_infos
    handle.wait_for_unshard()
    with torch.no_grad():
        for each in (*plain.parameters(), *(getattr(info.module, info.name) for info in places)):
            each.mul_(2)
    handle.reshard()
    handle.wait_for_unshard()
    for info, value in zip(places, plain.parameters(), strict=True):
        assert torch.equal(getattr(info.module, info.name), value)
    handle.reshard()


def test_a_plain_module_has_no_handles() -> None:
    assert flat_param_handles(layers()) == []


# Shard metadata


def metadata(names: tuple[str, ...], offsets: tuple[tuple[int, int], ...]) -> FlatParamShardMetadata:
    """That of some parameters of `layers`."""
    params = dict(layers().named_parameters())
    found = [params[name] for name in names]
    return FlatParamShardMetadata(
        names,
        tuple(param.shape for param in found),
        tuple(param.stride() for param in found),
        (True,) * len(names),
        tuple(param.numel() for param in found),
        offsets,
    )


FLAT = [
    metadata(("0.weight",), ((0, 21),)),
    metadata(("0.weight", "0.bias", "2.weight"), ((22, 34), (0, 6), (0, 1))),
    metadata(("2.weight", "2.bias"), ((2, 20), (0, 2))),
]
ROWS = [
    metadata(("0.weight", "0.bias", "2.weight", "2.bias"), ((0, 14), (0, 2), (0, 6), (0, 0))),
    metadata(("0.weight", "0.bias", "2.weight", "2.bias"), ((15, 29), (3, 5), (7, 13), (1, 1))),
    metadata(("0.weight", "0.bias", "2.weight", "2.bias"), ((30, 34), (6, 6), (14, 20), (2, 2))),
]


@pytest.mark.parametrize(("form", "expected"), [("flat", FLAT), ("rows", ROWS)], ids=["flat", "rows"])
def test_a_shard_says_which_elements_it_has(ranks: RankPool, form: str, expected: list[FlatParamShardMetadata]) -> None:
    assert ranks(3).run(_describe_shard, form) == expected


def _describe_shard(form: str) -> FlatParamShardMetadata:
    (handle,) = flat_param_handles(sharded(layers(), form))
    return handle.shard_metadata()


@parametrize_pairs(world_size=[2, 3], use_orig_params=[True, False])
@on_ranks("world_size")
def test_the_metadata_is_that_of_fsdp1(use_orig_params: bool) -> None:
    theirs = TorchFSDP(layers().double(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    model = FullyShardedDataParallel(layers().double(), use_orig_params=use_orig_params)
    found, expected = flat_param_handles(model)[0].shard_metadata(), theirs._handle.shard_metadata()
    assert found._fields == expected._fields
    if not use_orig_params:  # else FSDP1 begins parameters at multiples of 16 bytes, and not of 8 elements
        assert tuple(found) == tuple(expected)


# Handles without a unit


@parametrize_pairs(world_size=[1, 2, 3], use_orig_params=[True, False])
@on_ranks("world_size")
def test_a_module_trains_by_hand_like_unsharded(use_orig_params: bool) -> None:
    torch.set_default_dtype(torch.float64)
    plain, module = layers(), layers()
    handle = StandaloneHandle(module.parameters(), module, use_orig_params=use_orig_params)
    names = [name for name, _ in module.named_parameters()]
    assert names == ([name for name, _ in plain.named_parameters()] if use_orig_params else ["flat_param_0"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, module)]
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):  # accumulates
            handle.unshard()
            handle.wait_for_unshard()
            output = module(batch(2 * number + micro, rank))
            handle.reshard()
            handle.wait_for_unshard()
            output.sin().mean().backward()
            handle.reshard()
            for other in range(world_size):
                (plain(batch(2 * number + micro, other)).sin().mean() / world_size).backward()
        handle.reduce_gradient()
        for optimizer in optimizers:
            optimizer.step()
    handle.wait_for_unshard()
    for one, other in zip(plain, module, strict=True):
        for name in dict(one.named_parameters()):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=1e-12, atol=1e-14)
    handle.reshard()
    assert handle.shard_metadata().param_names
    if world_size > 1:
        assert isinstance(module[0].weight, Placeholder)


@on_ranks(2)
def test_two_handles_of_a_module_and_what_they_leave_out() -> None:
    module = layers().double()
    module[0].bias.requires_grad_(False)
    weights = StandaloneHandle([module[2].weight, module[0].weight], module, dist.group.WORLD)
    bias = StandaloneHandle([module[0].bias], module)
    left = module[2].bias
    assert [name for name, _ in module.named_parameters()] == ["flat_param_0", "flat_param_1", "2.bias"]
    assert [info.fqn for info in weights.param_infos] == ["2.weight", "0.weight"]
    for handle in (weights, bias):
        handle.wait_for_unshard()
    module(batch(0, dist.get_rank()).double()).sum().backward()
    for handle in (weights, bias):
        handle.reshard()
        handle.reduce_gradient()
    assert weights.flat_param.grad is not None
    assert bias.flat_param.grad is None
    assert left.grad is not None
    assert flat_param_handles(module) == []


@on_ranks(2)
def test_a_rank_without_gradients_counts_with_zeros() -> None:
    module = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        module.weight.fill_(1.0)
    handle = StandaloneHandle([module.weight], module)
    for _ in range(2):
        handle.wait_for_unshard()
        if dist.get_rank() == 0:
            module(torch.tensor([[2.0, 4.0]]).double()).sum().backward()
        handle.reshard()
        handle.reduce_gradient()
        assert handle.flat_param.grad.tolist() == [[1.0], [2.0]][dist.get_rank()]
        handle.zero_grad()


@on_ranks(2)
def test_a_handle_by_hand_computes_in_the_dtype_that_was_asked_for() -> None:
    module = layers()
    handle = StandaloneHandle(
        module.parameters(), module, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, device="cpu"
    )
    handle.wait_for_unshard()
    output = module(batch(0, 0).bfloat16())
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    handle.reshard()
    handle.reduce_gradient()
    assert handle.flat_param.grad.dtype is torch.float32


@on_ranks(2)
def test_a_step_before_the_reduction_is_an_error() -> None:
    module = layers()
    handle = StandaloneHandle(module.parameters(), module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    handle.wait_for_unshard()
    module(batch(0, 0)).sum().backward()
    handle.reshard()
    with pytest.raises(RuntimeError, match="are not reduced"):
        optimizer.step()
    optimizer.zero_grad()  # drops them
    handle.wait_for_unshard()
    module(batch(1, 0)).sum().backward()
    handle.reshard()
    handle.reduce_gradient()
    optimizer.step()


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_torch_does_not_clip_by_one_ranks_shard(use_orig_params: bool) -> None:
    module = layers()
    handle = StandaloneHandle(module.parameters(), module, use_orig_params=use_orig_params)
    handle.wait_for_unshard()
    module(batch(0, 0)).sum().backward()
    handle.reshard()
    handle.reduce_gradient()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: 0\.weight is sharded by a StandaloneHandle"):
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)  # of each element by itself
    assert max(param.grad.abs().max() for param in module.parameters() if param.numel()) <= 1e-3


@on_ranks(2)
def test_user_hooks_are_called_with_the_reduced_gradient() -> None:
    module, seen = layers(), []
    handle = StandaloneHandle(module.parameters(), module)
    handle.flat_param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    handle.wait_for_unshard()
    module(batch(0, dist.get_rank())).sum().backward()
    handle.reshard()
    assert seen == []
    handle.reduce_gradient()
    assert len(seen) == 1
    assert torch.equal(seen[0], handle.flat_param.grad)


# Mistakes


def alone(params: Any, module: nn.Module, **options: Any) -> StandaloneHandle:
    return StandaloneHandle(params, module, Alone(), **options)


def test_parameters_that_cannot_be_sharded_together_are_named() -> None:
    module = layers()
    with pytest.raises(RuntimeError, match=r"this Sequential .* FakeTensorMode"), FakeTensorMode():
        alone([module[0].weight], module)
    with pytest.raises(ValueError, match="needs parameters to shard, got none"):
        alone([], module)
    with pytest.raises(ValueError, match=r"params\[1\], of shape \[3\], is not a parameter of this Sequential"):
        alone([module[0].bias, nn.Parameter(torch.ones(3))], module)
    module[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"one requires_grad, got 0\.weight: True, 0\.bias: False"):
        alone(module[0].parameters(), module)
    module.double()
    assert [name for name, _ in module.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    bias = alone([module[0].bias], module)
    with pytest.raises(ValueError, match="flat_param_0 is sharded by a StandaloneHandle"):
        alone([bias.flat_param], module)


@pytest.mark.parametrize("form", ["flat", "rows"])
@on_ranks(1)
def test_no_unit_takes_what_a_handle_has(form: str) -> None:
    module = layers()
    handle = alone(module[0].parameters(), module[0], use_orig_params=True)
    with pytest.raises(ValueError, match=r"0\.weight is sharded by a StandaloneHandle, which no unit would unshard"):
        sharded(module, form)
    handle.wait_for_unshard()
    module(batch(0, 0)).sum().backward()


def test_a_handle_by_hand_is_not_copied() -> None:
    module = layers()
    handle = alone(module.parameters(), module)
    for travel in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a StandaloneHandle of Sequential .* cannot be copied or pickled"):
            travel(handle)


@on_ranks(2)
def test_ranks_with_different_parameters_or_values_are_told() -> None:
    module = nn.Linear(2 + dist.get_rank(), 2)
    with pytest.raises(RuntimeError, match=r"different parameters of a StandaloneHandle: .*\[2, 2\].*\[2, 3\]"):
        StandaloneHandle(module.parameters(), module)
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, dist.get_rank())
    with pytest.raises(RuntimeError, match="other values than rank 0 of weight of unit 'Linear'"):
        StandaloneHandle([module.weight], module)
