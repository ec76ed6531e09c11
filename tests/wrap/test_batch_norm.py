"""Batch norms in mixed precision: by themselves, and as units of their own through `auto_wrap_bn`.

Running statistics are buffers: each rank's are of its own batches, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
)
from tests.helpers.accelerator import AcceleratorRanks
from tests.helpers.dtypes import BRAIN, HALF, SINGLE
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, alone


class Residual(nn.Module):
    """Batch norms of two kinds, one of them deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.block = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
        self.exit = nn.Linear(12, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.entry(inputs))
        return self.exit(self.block(hidden.view(-1, 1, 2, 3)).flatten(1))


def residual(seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    return Residual()


def batch(number: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 5, generator=generator) * 3 + 1


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if "running" in name or "num_batches" in name}


def batch_norm_units(model: nn.Module) -> list[FullyShardedDataParallel]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [unit for unit in get_fsdp_instances(model) if isinstance(unit.module.module, kinds)]


# Statistics

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "full precision": FullyShardedDataParallel,
    "policy": lambda module: FullyShardedDataParallel(module, mixed_precision=MixedPrecision(param_dtype=BRAIN)),
    "policy with buffers": lambda module: FullyShardedDataParallel(
        module, mixed_precision=MixedPrecision(param_dtype=BRAIN, buffer_dtype=BRAIN)
    ),
    "flags": lambda module: FullyShardedDataParallel(module, mixed_precision=True, compute_dtype=BRAIN),
    "auto_wrap_bn": lambda module: FullyShardedDataParallel(
        auto_wrap_bn(module), mixed_precision=True, compute_dtype=BRAIN
    ),
}


@parametrize_pairs(wrap=list(WRAPS), world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_18_running_statistics_are_the_unsharded_ones(wrap: str) -> None:
    """In 16 bits a statistic stops moving when a batch's share of it falls below half a unit in the last place.

    The plain model computes what is not batch norm in the same precision, on this rank's batches.
    """
    plain = residual()
    model = WRAPS[wrap](copy.deepcopy(plain))
    dtype = SINGLE if wrap == "full precision" else BRAIN
    entry, conv = copy.deepcopy(plain.entry).to(dtype), copy.deepcopy(plain.block[0]).to(dtype)
    for number in range(2):
        inputs = batch(number, dist.get_rank())
        model(inputs)
        hidden = plain.norm(entry(inputs.to(dtype)).float()).to(dtype)
        plain.block[1](conv(hidden.view(-1, 1, 2, 3)).float())
    rtol, atol = (1e-5, 1e-6) if wrap == "full precision" else (5e-2, 5e-2)
    evaluated = model.eval()(batch(9))  # by the statistics, which stay
    torch.testing.assert_close(evaluated.float(), plain.eval()(batch(9)), rtol=rtol, atol=atol)
    found, expected = statistics(model), statistics(plain)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        # auto_wrap_bn's units take 16-bit inputs as they are, which the kernel widens in an order of its own.
        torch.testing.assert_close(found[name], value, rtol=1e-6 if wrap == "auto_wrap_bn" else 0, atol=0)


@pytest.mark.parametrize("wrap", ["policy", "policy with buffers", "flags", "auto_wrap_bn"])
def test_batch_norms_keep_float32_in_a_unit_of_16_bits(wrap: str) -> None:
    module = residual()
    norms = [module.norm, module.block[1]]
    seen: list[torch.dtype] = []

    def look(norm: Any, inputs: Any, output: Tensor) -> None:
        seen.extend([norm.weight.dtype, norm.bias.dtype, norm.running_mean.dtype, norm.running_var.dtype])

    for norm in norms:
        norm.register_forward_hook(look)
    options: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=BRAIN)}
    if wrap == "policy with buffers":
        options = {"mixed_precision": MixedPrecision(param_dtype=BRAIN, buffer_dtype=BRAIN)}
    elif wrap != "policy":
        options = {"mixed_precision": True, "compute_dtype": BRAIN}
    wrapped = auto_wrap_bn(module, fsdp_config={"process_group": Alone()}) if wrap == "auto_wrap_bn" else module
    model = alone(wrapped, **options)
    assert model(batch(0)).dtype is BRAIN
    assert seen == [SINGLE] * 8


def test_batch_norms_without_weights_have_their_statistics() -> None:
    norm = nn.BatchNorm1d(5, affine=False)
    model = alone(nn.Sequential(norm, nn.Linear(5, 3)), mixed_precision=MixedPrecision(param_dtype=BRAIN))
    assert model(batch(0)).dtype is BRAIN
    plain = nn.BatchNorm1d(5, affine=False)
    plain(batch(0).bfloat16().float())
    assert torch.equal(norm.get_buffer("running_mean"), plain.get_buffer("running_mean"))


# auto_wrap_bn


@on_ranks(3)
def test_each_batch_norm_becomes_a_unit_of_full_precision() -> None:
    module = residual()
    assert auto_wrap_bn(module) is module
    units = get_fsdp_instances(module)
    assert [unit.module.module for unit in units] == [unit.module.module for unit in batch_norm_units(module)]
    assert len(units) == 2
    for unit in units:
        assert not unit.mixed_precision
        assert not unit.flatten_parameters
        assert not unit.reshard_after_forward
        assert not unit.force_input_to_fp32
        assert unit._options.bucket_cap_mb == 0
        assert unit.process_group is dist.group.WORLD
        assert (unit.compute_dtype, unit.world_size) == (SINGLE, 3)


def test_a_batch_norm_itself_is_returned_wrapped() -> None:
    norm = nn.BatchNorm1d(5)
    wrapped = auto_wrap_bn(norm, fsdp_config={"process_group": Alone()})
    assert isinstance(wrapped, FullyShardedDataParallel)
    assert wrapped.module.module is norm


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_all_kinds_of_batch_norms_are_found(kind: type[nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(5, 5), kind(5), nn.LayerNorm(5), nn.GroupNorm(1, 5))
    auto_wrap_bn(module, fsdp_config={"process_group": Alone()})
    assert [isinstance(child, FullyShardedDataParallel) for child in module] == [False, True, False, False]


def test_a_model_without_batch_norms_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(5, 5))
    assert auto_wrap_bn(module, single_rank_pg=True) is module
    assert get_fsdp_instances(module) == []


@on_ranks(2)
def test_a_process_group_of_ones_own() -> None:
    group = dist.new_group()
    units = batch_norm_units(auto_wrap_bn(residual(), process_group=group))
    assert len(units) == 2
    assert all(unit.process_group is group for unit in units)


def test_arguments_of_ones_own_replace_the_default_ones() -> None:
    config = {"process_group": Alone(), "force_input_to_fp32": True, "reshard_after_forward": True}
    module = residual()
    auto_wrap_bn(module, fsdp_config=config)
    units = batch_norm_units(module)
    assert len(units) == 2
    assert all(unit.force_input_to_fp32 and unit.reshard_after_forward for unit in units)
    assert all(unit.flatten_parameters for unit in units), "the wrapper's own default"


@on_ranks(2)
def test_a_group_that_is_chosen_by_an_argument_is_used_with_arguments_of_ones_own() -> None:
    config = {"flatten_parameters": False}
    group = dist.new_group()
    assert [unit.world_size for unit in batch_norm_units(auto_wrap_bn(residual(), True, fsdp_config=config))] == [1, 1]
    for own in (config, {**config, "process_group": group}):
        units = batch_norm_units(auto_wrap_bn(residual(), process_group=group, fsdp_config=own))
        assert all(unit.process_group is group for unit in units)
    assert config == {"flatten_parameters": False}
    for arguments in ({"single_rank_pg": True}, {"process_group": group}):
        with pytest.raises(ValueError, match="fsdp_config contains another process_group"):
            auto_wrap_bn(residual(), fsdp_config={"process_group": Alone()}, **arguments)  # type: ignore[arg-type]


@on_ranks(2)
def test_each_rank_can_train_batch_norms_of_its_own() -> None:
    module = residual()
    model = FullyShardedDataParallel(auto_wrap_bn(module, single_rank_pg=True))
    units = batch_norm_units(model)
    assert [(unit.world_size, unit.rank) for unit in units] == [(1, 0)] * 2
    assert [param.numel() for param in units[0].params] == [6, 6], "they are not sharded"
    plain = residual()
    rank = dist.get_rank()
    model(batch(0, rank)).square().mean().backward()
    plain(batch(0, rank)).square().mean().backward()
    weight, bias = (param.grad for param in units[0].params)
    torch.testing.assert_close(weight, plain.norm.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias, plain.norm.bias.grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_sharded_batch_norms_are_trained_by_all_ranks() -> None:
    model, plain = FullyShardedDataParallel(auto_wrap_bn(residual())), residual()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for number in range(3):
        model(batch(number, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(number, rank)).square().mean() / dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = model.state_dict(), plain.state_dict()
    for name in set(expected) - set(statistics(plain)):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def note_on(module: Any) -> Any:
    return module.wrapper_config


def test_a_note_for_a_later_wrap() -> None:
    module = residual()
    config = {"process_group": Alone(), "flatten_parameters": False}
    assert auto_wrap_bn(module, fsdp_config=config, wrap_it=False) is module
    assert get_fsdp_instances(module) == []
    assert [note_on(module.norm), note_on(module.block[1])] == [config, config]
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel, process_group=Alone()):
        auto_wrap(module)
    assert len(batch_norm_units(module)) == 2
    assert not any(unit.flatten_parameters for unit in batch_norm_units(module))


def test_a_note_that_is_there_already() -> None:
    module = residual()
    auto_wrap_bn(module.block, fsdp_config={"verbose": True}, wrap_it=False)
    with pytest.raises(ValueError, match=r"block\.1 has a wrapper_config already. Pass assert_on_collision=False"):
        auto_wrap_bn(module, wrap_it=False)
    assert note_on(module.block[1]) == {"verbose": True}
    assert not hasattr(module.norm, "wrapper_config")  # refused before any note is made
    auto_wrap_bn(module, fsdp_config={"verbose": False}, wrap_it=False, assert_on_collision=False)
    assert [note_on(module.norm), note_on(module.block[1])] == [{"verbose": False}] * 2


# Training in mixed precision


@parametrize_cases(
    world_size=[2, 1],
    dtype=[BRAIN, HALF],
    is_unit=[True, False],
    widens=[True, False],
    flatten_parameters=[True, False],
)
@on_ranks("world_size")
def test_mixed_training_with_batch_norms_follows_float32(case: Case) -> None:
    module, plain = residual(), residual()
    if case.is_unit:
        auto_wrap_bn(
            module, fsdp_config={"force_input_to_fp32": case.widens, "flatten_parameters": case.flatten_parameters}
        )
    options: dict[str, Any] = {"mixed_precision": True, "compute_dtype": case.dtype}
    if case.is_unit and case.widens:
        options = {"mixed_precision": MixedPrecision(param_dtype=case.dtype)}
        # A widened norm returns float32, which the layer after it must take.
        module.block[0].register_forward_pre_hook(lambda _, args: (args[0].to(case.dtype),))
        module.exit.register_forward_pre_hook(lambda _, args: (args[0].to(case.dtype),))
    model = FullyShardedDataParallel(module, flatten_parameters=case.flatten_parameters, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    for number in range(4):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(batch(number)).float().square().mean().backward()  # the same on all ranks
            optimizer.step()
    found = model.state_dict()
    assert {value.dtype for value in found.values()} == {SINGLE, torch.int64}
    torch.testing.assert_close(found, plain.state_dict(), rtol=5e-2, atol=2e-2)


# SyncBatchNorm


def synced() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(residual())


@on_ranks(2)
def test_synchronised_batch_norms_evaluate_without_a_gpu() -> None:
    """Their training is for GPUs only, in torch itself."""
    model = FullyShardedDataParallel(synced(), mixed_precision=MixedPrecision(param_dtype=BRAIN)).eval()
    found, expected = model(batch(0)), residual().eval()(batch(0))
    assert found.dtype is BRAIN
    torch.testing.assert_close(found.float(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("is_unit", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_synchronised_batch_norms_train_as_one_process_with_the_global_batch(
    accelerator_ranks: AcceleratorRanks, world_size: int, is_unit: bool
) -> None:
    """Over NCCL: gloo's all-gather refuses torch's own call for CUDA tensors."""
    accelerator_ranks(world_size, backend="nccl").run(_train_synchronised, is_unit)


def _train_synchronised(is_unit: bool) -> None:
    module, plain = synced().cuda(), residual().cuda()
    options: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=BRAIN)}
    if is_unit:
        options = {"mixed_precision": True, "compute_dtype": BRAIN}
        module = auto_wrap_bn(module)
    model = FullyShardedDataParallel(module, **options)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    for number in range(3):
        whole = torch.cat([batch(number, each) for each in range(world_size)]).cuda()
        for each, inputs, optimizer in zip(
            (model, plain), (whole.chunk(world_size)[rank], whole), optimizers, strict=True
        ):
            optimizer.zero_grad()
            each(inputs).float().square().mean().backward()
            optimizer.step()
    found = model.state_dict()
    assert {value.dtype for value in statistics(model).values()} == {SINGLE, torch.int64}
    torch.testing.assert_close(found, plain.state_dict(), rtol=5e-2, atol=2e-2)
