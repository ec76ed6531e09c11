"""Ranks that were wrapped with different values are told so at the first use, and what was meant is left alone.

`test_pain_point_19_...` are about models that begin differently on different ranks: shards of different models, which
other libraries put together silently.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy, get_fsdp_instances, load_safetensors
from fsdp.distributed.collectives import DirectExchange
from fsdp.layers.fingerprints import Fingerprints, fingerprint, first_difference
from tests.helpers.hybrid import mesh_of as hybrid_mesh
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import gpt, mesh_of, over_data

INPUTS = torch.ones(2, 5)
DIFFERENT = "the ranks have sharded different values"

OPTIONS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False},
    {"use_orig_params": True},
    {"offload": "cpu"},
    {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    {"reshard_after_forward": False},
]


def seeded_by_rank(**options: Any) -> nn.Module:
    """A model of which the last rank has built another one."""
    return nested_mlp(fully_sharded(**options), seed=1 if dist.get_rank() == dist.get_world_size() - 1 else 0)


def assert_refused(model: nn.Module, use: Callable[[nn.Module], Any] | None = None) -> str:
    with pytest.raises(RuntimeError, match=DIFFERENT) as caught:
        (use or forward)(model)
    return str(caught.value)


def forward(model: nn.Module) -> Tensor:
    return model(INPUTS)


# The error


@parametrize_pairs(world_size=[3, 2, 4], options=OPTIONS)
def test_pain_point_19_different_seeds_are_an_error_at_the_first_forward(
    ranks: RankPool, world_size: int, options: dict[str, Any]
) -> None:
    ranks(world_size).run(_forward_differs, options)


def _forward_differs(options: dict[str, Any]) -> None:
    last = dist.get_world_size() - 1
    message = assert_refused(seeded_by_rank(**options))
    # The scale is the same number on all ranks.
    assert f"Rank {last} has other values than rank 0 of entry.weight of unit 'root (NestedMlp)' (and of " in message
    for remedy in ("torch.manual_seed", "sync_module_states=True", "load a checkpoint"):
        assert remedy in message


def test_pain_point_19_different_seeds_are_an_error_on_disk(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_forward_differs, {"offload": "disk", "offload_folder": tmp_path})


USES: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "summon": lambda model: model.summon_full_params(volatile=True).__enter__(),
    "inner unit": lambda model: model.trunk(torch.ones(2, 7)),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_pain_point_19_whoever_reads_whole_values_is_told(use: str) -> None:
    assert_refused(seeded_by_rank(), USES[use])


@pytest.mark.parametrize("over", ["a group", "a mesh whose both axes are sharded"])
@on_ranks(4)
def test_ranks_are_named_by_their_numbers_among_all(over: str) -> None:
    rank, odd = dist.get_rank(), 3 if over == "a group" else 1
    torch.manual_seed(1 if rank == odd else 0)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    options: dict[str, Any] = {"process_group": groups[rank // 2]}
    if over != "a group":
        options = {"process_group": hybrid_mesh(2, 2), "sharding_strategy": ShardingStrategy.HYBRID_SHARD_OPTIM}
    model = FullyShardedDataParallel(nn.Linear(5, 5), **options)
    if over == "a group" and rank < 2:
        forward(model)
    else:
        first = 2 if over == "a group" else 0
        message = assert_refused(model)
        assert message.startswith(f"rank {rank}: the ranks have sharded different values. Rank {odd} has")
        assert f"other values than rank {first} of" in message


@on_ranks(3)
def test_pain_point_19_a_single_bit_is_enough() -> None:
    model = nested_mlp()
    if dist.get_rank() == 1:
        model.trunk[0].weight.data.view(torch.int32)[3, 2] ^= 1
    message = assert_refused(FullyShardedDataParallel(model))
    assert "Rank 1 has other values than rank 0 of trunk.0.weight of unit 'root (NestedMlp)': " in message


@on_ranks(2)
def test_pain_point_19_frozen_parameters_are_compared_too() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    module[0].requires_grad_(False)
    nn.init.ones_(module[1].weight)
    nn.init.ones_(module[1].bias)
    assert "of 0.weight of unit" in assert_refused(FullyShardedDataParallel(module))


@on_ranks(3)
def test_it_is_raised_again_until_something_is_done() -> None:
    model = seeded_by_rank()
    assert_refused(model)
    assert_refused(model)
    model.load_state_dict(nested_mlp(seed=2).state_dict())
    assert torch.equal(model(INPUTS), nested_mlp(seed=2)(INPUTS))


@on_ranks(4)
def test_parts_of_dtensors_are_compared_with_those_in_the_same_place() -> None:
    mesh = mesh_of(2, 2)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    gpt(over_data(mesh), mesh=mesh)(tokens)  # ranks of one tensor dimension have different parts
    model = gpt(over_data(mesh), mesh=mesh, seed=mesh["dp"].get_local_rank())
    first = dist.get_rank() % 2
    message = assert_refused(model, lambda model: model(tokens))
    assert f"Rank {first + 2} has other values than rank {first} of " in message


@on_ranks(3)
def test_inner_units_are_named_with_their_path() -> None:
    model = nested_mlp()
    with torch.random.fork_rng():
        torch.manual_seed(dist.get_rank())
        model.trunk[2][0].reset_parameters()
    model.trunk[2] = FullyShardedDataParallel(model.trunk[2])
    message = assert_refused(FullyShardedDataParallel(model))
    assert "Rank 1 has other values than rank 0 of 0.weight of unit 'trunk.2' (and of 1 more)" in message


# What is not compared


WAYS: dict[str, Callable[[Any], Any]] = {}


def way(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    WAYS[change.__name__] = change
    return change


@way
def load_state_dict(model: Any) -> None:
    model.load_state_dict(nested_mlp(seed=2).state_dict())


@way
def load_what_rank_0_has(model: Any) -> None:
    """Where only rank 0 has a part of a parameter, nothing of it changes."""
    model.load_state_dict(nested_mlp(seed=0).state_dict())


@way
def write_into_summoned(model: Any) -> None:
    with model.summon_full_params(), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(nested_mlp(seed=2).state_dict()[name])


@way
def write_past_version_counters(model: Any) -> None:
    with model.summon_full_params():
        for param in model.parameters():
            param.data.fill_(0.5)


@way
def replace_summoned(model: Any) -> None:
    with model.summon_full_params():
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.ones_like(param)))


@way
def write_to_shards(model: Any) -> None:
    for param in model.parameters():
        param.data.fill_(0.5)


@way
def apply(model: Any) -> None:
    model.apply(lambda module: [nn.init.ones_(param) for param in module.parameters(recurse=False)])


@parametrize_pairs(change=list(WAYS), options=OPTIONS[:3])
@on_ranks(2)
def test_what_was_written_on_purpose_is_not_compared(change: str, options: dict[str, Any]) -> None:
    model = seeded_by_rank(**options)
    WAYS[change](model)
    forward(model)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_files_that_were_loaded_are_not_compared(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    save_file(nested_mlp(seed=0).state_dict(), tmp_path / "model.safetensors")
    ranks(2).run(_written_by_files, tmp_path, options)


def _written_by_files(path: Path, options: dict[str, Any]) -> None:
    model = seeded_by_rank(**options)
    load_safetensors(model, path)
    assert torch.equal(model(INPUTS), nested_mlp(seed=0)(INPUTS))


@on_ranks(2)
def test_assigned_parameters_are_not_compared() -> None:
    torch.manual_seed(dist.get_rank())
    model = FullyShardedDataParallel(nn.Linear(5, 1), flatten_parameters=False)
    layer = model.module.module
    layer.weight = nn.Parameter(torch.ones(1, 5))
    layer.bias = nn.Parameter(bias_of(seed=0))  # all of it is on rank 0, which has this value already
    assert torch.equal(model(INPUTS), 5 + bias_of(seed=0).expand(2, 1))


def bias_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return nn.Linear(5, 1).bias.detach()


@pytest.mark.parametrize("what", ["look", "load a part"])
@on_ranks(2)
def test_what_was_not_written_is_still_compared(what: str) -> None:
    model = seeded_by_rank()
    if what == "look":
        with model.summon_full_params():
            assert model.module.scale.item() == 1.25
    else:
        state = {name: value for name, value in nested_mlp(seed=2).state_dict().items() if name != "exit.weight"}
        model.load_state_dict(state, strict=False)
    message = assert_refused(model)
    assert ("of exit.weight of unit 'root (NestedMlp)': " in message) is (what != "look")


@on_ranks(3)
def test_a_model_that_was_cast_since_is_still_compared() -> None:
    assert_refused(seeded_by_rank().double().half(), lambda model: model(INPUTS.half()))
    model = seeded_by_rank()
    write_to_shards(model)
    model.double()(INPUTS.double())


@on_ranks(3)
def test_a_copy_is_compared_as_its_original_would_be() -> None:
    assert_refused(copy.deepcopy(seeded_by_rank()))
    unpickled = pickle.loads(pickle.dumps(seeded_by_rank()))
    for wrapper in get_fsdp_instances(unpickled):
        wrapper.process_group = dist.group.WORLD
    assert_refused(unpickled)
    same = nested_mlp(fully_sharded())
    forward(same)
    assert fingerprints_of(copy.deepcopy(same)) == [None] * 4


def fingerprints_of(model: nn.Module) -> list[Fingerprints | None]:
    return [handle.values.fingerprints for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]


@on_ranks(2)
def test_buffers_are_not_compared() -> None:
    module = nn.BatchNorm1d(5)
    module.running_mean = torch.full((5,), float(dist.get_rank()))
    FullyShardedDataParallel(module)(INPUTS)


@on_ranks(2)
def test_units_in_groups_of_one_are_not_compared() -> None:
    torch.manual_seed(dist.get_rank())
    model = FullyShardedDataParallel(nn.Linear(5, 1), Alone())
    assert fingerprints_of(model) == [None]
    forward(model)


@on_ranks(3)
def test_values_are_compared_once_and_in_one_exchange() -> None:
    model = nested_mlp(fully_sharded())
    heard = DirectExchange.all_gather_bytes
    with mock.patch.object(DirectExchange, "all_gather_bytes", autospec=True, side_effect=heard) as exchange:
        forward(model)
        assert exchange.call_count == 3  # what was built, whether values are there, and which
        forward(model)
        assert exchange.call_count == 3
        model.state_dict()
        assert exchange.call_count == 9  # its arguments, and outcomes: before each of four units, and at the end
    assert fingerprints_of(model) == [None] * 4


@on_ranks(1, backend=None)
def test_simulated_ranks_are_not_asked() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = FullyShardedDataParallel(nn.Linear(5, 1))
    forward(model)
    assert fingerprints_of(model) == [None]


# Fingerprints


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_two_bits_that_differ_make_another_fingerprint(data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 300))
    one = torch.randn(numel).to(data.draw(st.sampled_from(DTYPES[:5])))
    other = one.clone()
    raw = other.view(torch.uint8)
    for place in data.draw(st.sets(st.integers(0, 8 * raw.numel() - 1), min_size=1, max_size=2)):
        raw[place // 8] ^= 1 << place % 8
    with mock.patch("fsdp.layers.fingerprints._WORDS", 16):
        assert fingerprint(one) != fingerprint(other)


def test_a_word_and_its_complement_differ() -> None:
    one = torch.tensor([7, -8, 9])
    for place in range(3):
        other = one.clone()
        other[place] = ~other[place]
        assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("numel", [5, 131_072, 131_073, 400_000])
def test_order_counts(numel: int) -> None:
    values = torch.arange(float(numel))
    found = {fingerprint(each) for each in (values, values.flip(0), values.roll(1), values.roll(2))}
    assert len(found) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_a_tensor_lies_does_not_count(dtype: torch.dtype) -> None:
    base = torch.randn(41).to(dtype)
    for start in range(4):
        assert fingerprint(base[start : start + 32]) == fingerprint(base[start : start + 32].clone())
    every_other = torch.randn(64).to(dtype)[::2]
    assert fingerprint(every_other) == fingerprint(every_other.clone())
    grid = torch.randn(6, 7)
    assert fingerprint(grid.t()) == fingerprint(grid.t().contiguous()) != fingerprint(grid)


def test_how_much_is_done_at_once_does_not_count() -> None:
    """As on an accelerator, where several blocks are."""
    value = torch.randn(500_001)
    expected = fingerprint(value)
    with mock.patch("fsdp.layers.fingerprints._BLOCKS", {"cpu": 3}):
        assert fingerprint(value) == expected


def test_the_default_device_does_not_count() -> None:
    value = torch.arange(50.0)
    with mock.patch("fsdp.layers.fingerprints._WORDS", 17):
        with torch.device("meta"):
            found = fingerprint(value)
        assert found == fingerprint(value.clone())


def test_random_numbers_of_the_user_are_left_alone() -> None:
    before = torch.get_rng_state()
    fingerprint(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_one_rank_does_not_know_counts_for_none() -> None:
    assert first_difference([[1, 2, 3], [1, None, 3]]) is None
    assert first_difference([[1, 2, 3], [1, None, 4]]) == (1, 2, 1)
    assert first_difference([[1, 2, 3], [1, 2, 3], [0, None, 3]]) == (2, 0, 1)
