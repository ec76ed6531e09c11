"""What is saved of a model in mixed precision: the values that the optimizer steps, to the last bit.

`test_pain_point_10_...` are about weights that come out of saving in another dtype than was meant.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from tests.helpers.equality import assert_same_state
from tests.helpers.models import keep, nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import alone, fully_sharded

State = dict[str, Tensor]

POLICIES: dict[str, Any] = {
    "bfloat16": MixedPrecision(param_dtype=BRAIN),
    "float16, all else too": MixedPrecision(param_dtype=HALF, buffer_dtype=HALF, output_dtype=HALF, reduce_dtype=HALF),
    "FairScale's": True,
}


def wrapped(policy: Any, **options: Any) -> Any:
    return nested_mlp(fully_sharded(mixed_precision=policy, **options))


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def master_of(model: FullyShardedDataParallel) -> State:
    """The whole parameters put together from the shards by hand."""
    state: State = {}
    for module in model.modules():
        for handle in module._unit.handles if isinstance(module, FullyShardedDataParallel) else ():
            shard = handle.flat_param.vector
            shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, shard)
            prefix = "" if handle.name.startswith("root") else handle.name.split(" (flat")[0] + "."
            pieces = handle.layout.unpack(torch.cat(shards))
            names = [prefix + slot.name for slot in handle.layout.slots]
            state |= dict(zip(names, pieces, strict=True))
    return state


# Saving


@parametrize_cases(
    policy=list(POLICIES), world_size=[2, 1], flatten_parameters=[True, False], reshard_after_forward=[True, False]
)
@on_ranks("world_size")
def test_pain_point_10_what_is_saved_is_the_master_bit_for_bit(case: Case) -> None:
    """Weights saved while whole parameters are in 16 bits would have lost two thirds of their digits."""
    options = case.only("flatten_parameters", "reshard_after_forward")
    model, plain = wrapped(POLICIES[case.policy], **options), nested_mlp()
    assert_same_state(model.state_dict(), plain.state_dict())
    for _ in range(2):
        step(model)
        saved = model.state_dict()
        assert {value.dtype for value in saved.values()} == {SINGLE}
        master = master_of(model)
        assert_same_state({name: saved[name] for name in master}, master)
        assert saved.keys() == master.keys()
        assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())


@pytest.mark.parametrize("when", ["after a forward", "under no_sync", "summoned"])
@on_ranks(2)
def test_pain_point_10_it_is_the_master_also_while_parameters_are_whole(when: str) -> None:
    """What is gathered already is in 16 bits, and of no use for saving."""
    model, plain = wrapped(POLICIES["bfloat16"], reshard_after_forward=False), nested_mlp()
    if when != "summoned":
        with model.no_sync() if when == "under no_sync" else nullcontext():
            loss = model(torch.ones(2, 5)).sum()
            if when == "under no_sync":
                loss.backward()
    with model.summon_full_params() if when == "summoned" else nullcontext():
        assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [BRAIN, HALF, DOUBLE])
@on_ranks(2)
def test_pain_point_10_16_bit_parameters_are_saved_as_such(dtype: torch.dtype) -> None:
    """Peers upcast silently: files come out twice as large, and in another dtype than the model was loaded in."""
    wrap = fully_sharded()
    model = nested_mlp(lambda module: wrap(module.to(dtype)))
    expected = {name: value.to(dtype) for name, value in nested_mlp().state_dict().items()}
    assert_same_state(model.state_dict(), expected)


# Exporting


@parametrize_pairs(policy=[False, *POLICIES], dtype=[HALF, BRAIN, DOUBLE])
@on_ranks(2)
def test_pain_point_10_an_export_is_in_the_dtype_that_it_is_asked_for(policy: str | bool, dtype: torch.dtype) -> None:
    """Who trains with a float32 master and publishes in bfloat16 need not convert a file afterwards."""
    policy = policy and POLICIES[str(policy)]
    model = wrapped(policy)
    expected = {name: value.to(dtype) for name, value in nested_mlp().state_dict().items()}
    assert_same_state(model.state_dict(dtype=dtype), expected)
    assert_same_state(model.state_dict(), nested_mlp().state_dict())


def test_pain_point_10_an_export_leaves_buffers_and_integers() -> None:
    """Statistics and counters are no weights."""
    model = alone(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), mixed_precision=POLICIES["bfloat16"])
    exported = model.state_dict(dtype=BRAIN)
    assert {name: value.dtype for name, value in exported.items()} == {
        **dict.fromkeys(["0.weight", "0.bias", "1.weight", "1.bias"], BRAIN),
        **dict.fromkeys(["1.running_mean", "1.running_var"], SINGLE),
        "1.num_batches_tracked": torch.int64,
    }


@pytest.mark.parametrize("dtype", [None, BRAIN])
@on_ranks(2)
def test_pain_point_10_tied_weights_are_exported_once(dtype: torch.dtype | None) -> None:
    """Cast one by one, they would be two tensors, and take the room of two in a file."""
    model: Any = tiny_transformer(fully_sharded(), tied=True, nested=False)
    state = model.state_dict(dtype=dtype)
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()


@pytest.mark.parametrize("wrong", [torch.int8, "bfloat16"])
def test_an_export_refuses_what_is_no_floating_dtype(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype must be torch.float16, bfloat16.*got "):
        alone(nn.Linear(5, 3)).state_dict(dtype=wrong)


@pytest.mark.filterwarnings("ignore:weight of the state dict of Linear was written in place")
def test_an_export_has_tensors_of_its_own() -> None:
    model = alone(nn.Linear(5, 3))
    with pytest.raises(ValueError, match="keep_vars=True"):
        model.state_dict(keep_vars=True, dtype=BRAIN)
    model.state_dict(dtype=SINGLE)["weight"].zero_()
    assert model.state_dict()["weight"].any()


# Summoning


@parametrize_pairs(policy=list(POLICIES), world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_10_summoned_parameters_are_the_master(policy: str) -> None:
    """What a user reads or saves in `summon_full_params` is no rounded copy."""
    policy = POLICIES[policy]
    model, plain = wrapped(policy), nested_mlp()
    with model.summon_full_params():
        found = dict(model.named_parameters())
        assert_same_state(found, dict(plain.named_parameters()))
    step(model)
    expected = master_of(model)
    with model.summon_full_params():
        found = dict(model.named_parameters())
        assert_same_state({name: found[name].detach() for name in expected}, expected)


@on_ranks(2)
def test_changes_below_the_precision_of_the_computation_are_kept() -> None:
    model = wrapped(POLICIES["bfloat16"])
    expected = {name: value + 2**-20 for name, value in model.state_dict().items()}
    with model.summon_full_params(), torch.no_grad():
        for param in model.parameters():
            param += 2**-20
    assert_same_state(model.state_dict(), expected)


@on_ranks(2)
def test_inference_while_summoned_is_in_full_precision() -> None:
    model, plain = wrapped(POLICIES["bfloat16"]), nested_mlp()
    with model.summon_full_params(), torch.no_grad():
        assert torch.equal(model(torch.ones(2, 5)), plain(torch.ones(2, 5)))
    assert model(torch.ones(2, 5)).dtype is BRAIN


# Loading


@parametrize_pairs(policy=list(POLICIES), world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_10_what_was_saved_is_loaded_bit_for_bit(policy: str) -> None:
    """A round trip through 16 bits on the way in would lose as much as one on the way out."""
    policy = POLICIES[policy]
    model, other = wrapped(policy), nested_mlp(fully_sharded(mixed_precision=policy), seed=1)
    step(model)
    saved = model.state_dict()
    other(torch.ones(2, 5))
    other.load_state_dict(saved)
    assert_same_state(other.state_dict(), saved)
    assert torch.equal(other(torch.ones(2, 5)), model(torch.ones(2, 5)))
    plain = nested_mlp(keep, seed=1)
    plain.load_state_dict(saved)
    assert_same_state(plain.state_dict(), saved)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, DOUBLE])
@on_ranks(2)
def test_what_was_saved_in_another_dtype_is_loaded_into_the_master(dtype: torch.dtype) -> None:
    model = wrapped(POLICIES["bfloat16"])
    saved = {name: value.to(dtype) for name, value in nested_mlp(seed=1).state_dict().items()}
    model.load_state_dict(saved)
    assert_same_state(model.state_dict(), {name: value.float() for name, value in saved.items()})
