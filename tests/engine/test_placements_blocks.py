"""Blocks of elements are never divided between ranks: 8-bit optimizers compute what they compute without sharding."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, Placements, ShardingStrategy, fully_shard
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import WRAPPERS
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import assert_parity, fully_sharded, sgd_with_momentum
from tests.helpers.quantised import Rows8, quantised


def in_blocks(numel: int, strategy: str = "FULL_SHARD") -> Placements:
    return replace(Placements.from_strategy(ShardingStrategy[strategy]), block_numel=numel)


@parametrize_pairs(
    at_most=6,
    strategy=["FULL_SHARD", "SHARD_OPTIM", "SHARD_OPTIM_GRADS", "SHARD_GRAD_OP"],
    world_size=[2, 3, 1, 4],
    form=[*WRAPPERS],
    numel=[3, 16, 1000],
)
@on_ranks("world_size")
def test_a_model_in_blocks_trains_as_one_process_does(strategy: str, form: str, numel: int) -> None:
    wrap = fully_sharded(placements=in_blocks(numel, strategy), **WRAPPERS[form])
    assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, steps=2, clip=0.1)


@on_ranks(4)
def test_blocks_are_not_divided_between_replicas_either() -> None:
    placements = in_blocks(16, "HYBRID_SHARD_OPTIM")
    wrap = fully_sharded(placements=placements, process_group=mesh_of(2, 2), use_orig_params=True)
    assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, steps=2)
    model = wrap(nn.Linear(9, 7))
    (handle,) = fsdp.flat_param_handles(model)
    assert (handle.layout.world_size, handle.layout.shard_numel) == (4, 32)  # 63 and 7 elements: 32, 31, 7 and none


# Two layers whose weights have whole blocks of 256 elements, and not on every rank.
def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 66), nn.Tanh(), nn.Linear(66, 128))


def distances(placements: Placements) -> list[float]:
    """Train with 8-bit Adam, sharded and not, on the same batches on every rank; return how far parameters differ."""
    make = pytest.importorskip("torchao.optim").AdamW8bit
    plain = layers()
    model = FullyShardedDataParallel(copy.deepcopy(plain), use_orig_params=True, placements=placements)
    optimizers = [make(each.parameters(), lr=1e-2, block_size=256) for each in (model, plain)]
    with torch.compiler.set_stance("force_eager"):
        for step in range(3):
            inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                module(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    with model.summon_full_params():
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return [float((ours - theirs).detach().abs().max()) for ours, theirs in pairs]


@on_ranks(2)
def test_an_8_bit_optimizer_has_the_bits_of_the_unsharded_one() -> None:
    assert distances(in_blocks(256)) == [0.0] * 4
    assert max(distances(in_blocks(1))) > 0  # without blocks, scales are of other elements


@pytest.mark.parametrize("numel", [8, 64])
@on_ranks(3)
def test_a_checkpoint_does_not_depend_on_blocks(tmp_path: Path, numel: int) -> None:
    model = FullyShardedDataParallel(layers(), placements=in_blocks(numel))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    fsdp.save(tmp_path / "saved", model, optimizer)
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    torch.manual_seed(1)
    for value in ({}, {"placements": in_blocks(5)}):
        again = FullyShardedDataParallel(layers(), process_group=group, **value)
        fsdp.load(tmp_path / "saved", again, torch.optim.Adam(again.parameters()))
        plain = layers()
        adam = torch.optim.Adam(plain.parameters())
        plain(torch.ones(2, 128)).sum().backward()
        adam.step()
        with again.summon_full_params():
            for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@parametrize_pairs(form=[*WRAPPERS], numel=[4, 64], strategy=["FULL_SHARD", "NO_SHARD", "SHARD_OPTIM"])
@on_ranks(3)
def test_local_states_in_blocks_are_consolidated_or_refused(form: str, numel: int, strategy: str) -> None:
    plain = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))
    for param in plain.parameters():
        nn.init.uniform_(param, generator=torch.Generator().manual_seed(param.numel()))
    options = {"placements": in_blocks(numel, strategy), **WRAPPERS[form]}
    model = FullyShardedDataParallel(copy.deepcopy(plain), **options)
    again = FullyShardedDataParallel(nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1)), **options)
    again.load_local_state_dict(model.local_state_dict())
    assert_same_state(again.state_dict(), plain.state_dict())
    if form == "flat":
        with pytest.raises(NotImplementedError, match=f"padding between its parameters, for blocks of {numel}"):
            model.local_metadata_dict()
        return
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, (model.local_state_dict(), model.local_metadata_dict()))
    weights, metadata = zip(*every, strict=True)
    assert_same_state(FullyShardedDataParallel.consolidate_shard_weights(weights, metadata), plain.state_dict())


@on_ranks(2)
def test_the_padding_that_blocks_need_is_planned() -> None:
    plan = fsdp.plan(layers(), world_size=2, placements=in_blocks(256), use_orig_params=True)
    model = FullyShardedDataParallel(layers(), placements=in_blocks(256), use_orig_params=True)
    numels = torch.tensor([float(sum(param.numel() for param in model.parameters()))])
    dist.all_reduce(numels)
    (handle,) = fsdp.flat_param_handles(model)
    assert plan.units[0].padding == handle.layout.padded_numel - int(numels)
    assert handle.layout.shard_numel % 256 == 0


@pytest.mark.parametrize("form", [*WRAPPERS, "rows"])
@on_ranks(2)
def test_parameters_that_are_sharded_as_bytes_have_no_blocks(form: str) -> None:
    plain, model = quantised("two tensors"), quantised("two tensors")
    ignored = {param for param in model.parameters() if type(param) is nn.Parameter}
    for module in (plain, model):
        module.register_parameter("other", nn.Parameter(Rows8.of(torch.ones(3, 3)), requires_grad=False))
    if form == "rows":
        fully_shard(model, placements=in_blocks(7), ignored_params=ignored)
    else:
        model = FullyShardedDataParallel(model, placements=in_blocks(7), **WRAPPERS[form])  # type: ignore[assignment]
    inputs = torch.ones(2, 33)
    torch.testing.assert_close(model(inputs), plain(inputs))


@on_ranks(2)
def test_rows_of_bytes_beside_parameters_that_are_sharded_as_bytes_have_blocks() -> None:
    def module(rows: int) -> nn.Module:
        made = nn.Module()
        made.forward = torch.ones_like  # type: ignore[method-assign]
        made.register_parameter("codes", nn.Parameter(torch.ones(rows, 4, dtype=torch.uint8), requires_grad=False))
        made.register_parameter("packed", nn.Parameter(Rows8.of(torch.ones(3, 3)), requires_grad=False))
        return made

    with pytest.raises(ValueError, match="codes: 3 rows of 4 elements on each of 2 ranks are not a multiple"):
        fully_shard(module(6), placements=in_blocks(8))
    model = fully_shard(module(8), placements=in_blocks(8))
    (handle,) = fsdp.flat_param_handles(model)
    assert handle.layout.interval(0, 0).numel == 16


@on_ranks(2)
def test_rows_that_hold_whole_blocks_are_divided_and_others_are_an_error() -> None:
    module = nn.Linear(8, 6)
    wrong = "bias: 3 rows of 1 elements on each of 2 ranks are not a multiple of the block of 8 .*ignored_params"
    with pytest.raises(ValueError, match=wrong):
        fully_shard(copy.deepcopy(module), placements=in_blocks(8))
    model = fully_shard(module, placements=in_blocks(8), ignored_params={module.bias})
    assert model.weight.to_local().shape == (3, 8)  # type: ignore[operator, union-attr]
    model(torch.ones(2, 8)).sum().backward()


@on_ranks(2)
def test_ranks_with_other_blocks_are_told() -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 8), placements=in_blocks(8 + dist.get_rank() * 8))
    with pytest.raises((ValueError, RuntimeError), match="block_numel"):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("numel", [0, -1, 1.5, True, None])
def test_a_block_has_a_positive_number_of_elements(numel: Any) -> None:
    with pytest.raises(ValueError, match="block_numel must be a positive number"):
        in_blocks(numel)


def test_a_strategy_keeps_its_name_with_blocks() -> None:
    assert in_blocks(8).strategy(is_hybrid=False) is ShardingStrategy.FULL_SHARD
