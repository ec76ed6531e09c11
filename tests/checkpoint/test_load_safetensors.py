"""`load_safetensors`: each rank reads what it keeps, and the model then has the values of the files.

`test_pain_point_20_...` are about host memory that explodes while a model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, load_safetensors
from tests.helpers.equality import assert_same_state
from tests.helpers.models import Net, nested_mlp, tiny_transformer
from tests.helpers.offload import with_folder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.safetensors_files import counted_reads, other_values, save, shard_bytes

# Values


OPTIONS = [
    {},
    {"flatten_parameters": False},
    {"use_orig_params": True},
    {"offload": "cpu"},
    {"offload": "disk"},
    {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    {"use_orig_params": True, "offload": "disk"},
]


@parametrize_cases(world_size=[3, 1, 2], options=OPTIONS, nested=[True, False], files=[1, 2])
@on_ranks("world_size")
def test_the_model_has_the_values_of_the_files(tmp_path: Path, case: Case) -> None:
    save(tmp_path, other_values(), case.files)
    model = nested_mlp(fully_sharded(**with_folder(case.options, tmp_path / "offload")), nested=case.nested)
    result = load_safetensors(model, tmp_path)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(model.state_dict(), other_values())


@parametrize_pairs(options=OPTIONS, world_size=[2, 3])
def test_a_forward_before_does_not_leave_stale_parameters(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], world_size: int
) -> None:
    save(tmp_path, other_values())
    ranks(world_size).run(_load_between_steps, tmp_path, with_folder(options, tmp_path / "offload"))


def _load_between_steps(path: Path, options: dict[str, Any]) -> None:
    model = nested_mlp(fully_sharded(**options, reshard_after_forward=False))
    inputs = torch.ones(2, 5)
    with model.no_sync():
        model(inputs).sum().backward()  # leaves parameters whole
    load_safetensors(model, path)
    expected = nested_mlp(fully_sharded(**options))
    expected.load_state_dict(other_values())
    assert torch.equal(model(inputs), expected(inputs))


@on_ranks(2)
def test_ranks_that_keep_nothing_of_a_parameter_gather_it_again(tmp_path: Path) -> None:
    save(tmp_path, {"scale": torch.tensor(-3.0)})
    model = nested_mlp(fully_sharded(reshard_after_forward=False))
    inputs = torch.ones(2, 5)
    with model.no_sync():
        before = model(inputs)
    load_safetensors(model, tmp_path, strict=False)
    assert not torch.equal(model(inputs), before)


@on_ranks(2)
def test_what_was_assigned_gives_way(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = nested_mlp(fully_sharded())
    model.entry.bias = nn.Parameter(torch.ones(7))
    with counted_reads() as sizes:
        load_safetensors(model, tmp_path)
    assert sum(sizes) == shard_bytes(model)
    assert_same_state(model.state_dict(), other_values())


# Other dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@on_ranks(2)
def test_values_of_another_dtype_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path, {name: value.to(dtype) for name, value in other_values().items()})
    model = nested_mlp(fully_sharded())
    load_safetensors(model, tmp_path)
    assert_same_state(model.state_dict(), {name: v.to(dtype).float() for name, v in other_values().items()})


# What is not flat


def with_buffers() -> nn.Module:
    """A batch norm beside a layer, a table that is not in memory in row-major order, and one that is not saved."""
    return Net(
        lambda net, x: net.layer(net.norm(x)) @ net.table,
        norm=nn.BatchNorm1d(3),
        layer=nn.Linear(3, 3),
        table=nn.Buffer(torch.zeros(4, 3).t()),
        own=nn.Buffer(torch.ones(2), persistent=False),
    )


def state_with_buffers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = with_buffers().state_dict()
    return {
        name: torch.rand(value.shape, generator=generator) if value.is_floating_point() else torch.tensor(7)
        for name, value in state.items()
    }


POLICY = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


@parametrize_pairs(options=[{}, {"mixed_precision": POLICY}, {"use_orig_params": True}], world_size=[2, 3])
@on_ranks("world_size")
def test_buffers_are_read_whole_on_every_rank(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, state_with_buffers())
    torch.manual_seed(0)
    model = FullyShardedDataParallel(with_buffers(), **options)
    with counted_reads() as sizes:
        load_safetensors(model, tmp_path)
    assert sum(sizes) == shard_bytes(model) + sum(b.nbytes for b in with_buffers().buffers()) - 2 * 4
    assert_same_state(model.state_dict(), state_with_buffers())
    assert torch.equal(model.module.own, torch.ones(2, dtype=model.module.own.dtype))
    inputs = torch.rand(4, 3)
    plain = with_buffers().eval()
    plain.load_state_dict(state_with_buffers())
    tolerance = {"rtol": 0.1, "atol": 0.1} if options.get("mixed_precision") else {}
    torch.testing.assert_close(model.eval()(inputs).float(), plain(inputs), **tolerance)


def test_buffers_without_memory_get_some(tmp_path: Path) -> None:
    save(tmp_path, state_with_buffers())
    module = with_buffers()
    module.table = module.table.to("meta")
    model = FullyShardedDataParallel(module, Alone())
    load_safetensors(model, tmp_path)
    assert torch.equal(model.state_dict()["table"], state_with_buffers()["table"])


@on_ranks(2)
def test_ignored_parameters_are_read_whole(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    plain = nested_mlp()
    model = FullyShardedDataParallel(plain, ignored_modules=[plain.entry], ignored_parameters=[plain.scale])
    weight = plain.entry.weight
    load_safetensors(model, tmp_path)
    assert_same_state(model.state_dict(), other_values())
    assert plain.entry.weight is weight


@on_ranks(2)
def test_a_plain_model_with_units_inside_is_loaded_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = nested_mlp()
    model.trunk = FullyShardedDataParallel(model.trunk)
    model.gate = FullyShardedDataParallel(model.gate, flatten_parameters=False)
    load_safetensors(model, tmp_path)
    assert_same_state(model.state_dict(), other_values())


def test_a_model_without_units_is_loaded_in_place(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = nested_mlp()
    before = {name: (id(param), param._version) for name, param in model.named_parameters()}
    load_safetensors(model, tmp_path)
    assert_same_state(model.state_dict(), other_values())
    assert {name: (id(param), param._version - 1) for name, param in model.named_parameters()} == before


@on_ranks(2)
def test_one_unit_of_a_model_is_loaded_by_itself(tmp_path: Path) -> None:
    state = {name.removeprefix("trunk."): value for name, value in other_values().items() if name.startswith("trunk.")}
    save(tmp_path, state)
    model = nested_mlp(fully_sharded())
    load_safetensors(model.trunk, tmp_path)
    own, other = nested_mlp().state_dict(), other_values()
    assert_same_state(model.state_dict(), {name: (other if "trunk." in name else own)[name] for name in own})


@on_ranks(2)
def test_frozen_parameters_are_loaded_and_stay_frozen(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    plain = nested_mlp()
    plain.trunk.requires_grad_(False)
    model = FullyShardedDataParallel(plain)
    needs = [param.requires_grad for param in model.parameters()]
    load_safetensors(model, tmp_path)
    assert_same_state(model.state_dict(), other_values())
    assert [param.requires_grad for param in model.parameters()] == needs == [True, False]


# Names


@parametrize_pairs(
    stored=["tokens.weight", "head.weight"], options=[{}, {"use_orig_params": True}, {"flatten_parameters": False}]
)
@on_ranks(2)
def test_a_tied_parameter_is_loaded_under_any_of_its_names(
    tmp_path: Path, stored: str, options: dict[str, Any]
) -> None:
    state = tiny_transformer(tied=True, seed=1).state_dict()
    for name in {"tokens.weight", "head.weight"} - {stored}:
        del state[name]
    save(tmp_path, state)
    model = tiny_transformer(fully_sharded(**options), tied=True)
    result = load_safetensors(model, tmp_path)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(model.state_dict(), tiny_transformer(tied=True, seed=1).state_dict())


def test_names_that_torchs_wrappers_add_are_not_needed(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    save(tmp_path, {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    model = FullyShardedDataParallel(module, Alone())
    load_safetensors(model, tmp_path)
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


# What it costs


@parametrize_pairs(world_size=[1, 2, 3], options=OPTIONS)
def test_pain_point_20_each_rank_reads_only_what_it_keeps(
    ranks: RankPool, tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    save(tmp_path, other_values())
    read = ranks(world_size).run(_count, tmp_path, with_folder(options, tmp_path / "offload"))
    assert sum(read) == sum(value.nbytes for value in other_values().values())


def _count(path: Path, options: dict[str, Any]) -> int:
    model = nested_mlp(fully_sharded(**options))
    with counted_reads() as sizes:
        load_safetensors(model, path)
    assert sum(sizes) == shard_bytes(model)
    return sum(sizes)


@parametrize_pairs(dtype=[torch.float32, torch.bfloat16], world_size=[2, 4], offload=["no", "disk"])
def test_pain_point_20_no_rank_holds_a_whole_parameter(
    ranks: RankPool, tmp_path: Path, dtype: torch.dtype, world_size: int, offload: str
) -> None:
    save_file({"weight": torch.ones(2048, 2048).to(dtype)}, tmp_path / "model.safetensors")
    options = {"offload": "disk", "offload_folder": tmp_path / "offload"} if offload == "disk" else {}
    ranks(world_size).run(_load_large, tmp_path, options)


def _load_large(path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(2048, 2048, bias=False), **options)
    with torch.profiler.profile(profile_memory=True) as profile:
        load_safetensors(model, path)
    largest = max((event.cpu_memory_usage for event in profile.events()), default=0)
    assert largest <= 4 << 20  # the buffer for casts
    with model.summon_full_params():
        assert bool((model.module.weight == 1).all())
