"""State leaves a parked model with the bits of the model that is not parked, and the model stays parked."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from fsdp.checkpoint.parked_tensors import Guard
from fsdp.optim_utils import full_optim_state_dict
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import backward, talk, under_fully_shard
from tests.helpers.parity import adamw
from tests.helpers.weights import ON_PAIRS, Collected, Parts, tensor_parallel_gpt

flat = FullyShardedDataParallel

Export = Callable[[Any, torch.optim.Optimizer, Path], Any]


def full_weights(model: nn.Module) -> Any:
    """Collective. The weights that sinks of buckets, and sinks of parts, receive."""
    buckets, parts = Collected(), Parts()
    fsdp.stream_weights(model, buckets, bucket_bytes=1000, buffers=True)
    fsdp.stream_weights(model, parts, bucket_bytes=1000, buffers=True)
    return buckets.state, parts.whole()


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    """Collective. The tensors of a checkpoint, which is saved at once and in the background."""
    fsdp.save(folder / "now", model, optimizer)
    with fsdp.checkpoint.Saver() as saver:
        saver.save(folder / "later", model, optimizer)
    found = [
        {file.name: load_file(file) for file in sorted(path.glob("*.safetensors"))}
        for path in (folder / "now", folder / "later")
    ]
    dist.barrier()  # before the next save
    return found


def pickled(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    memory = io.BytesIO()
    torch.save(optimizer.state_dict(), memory)
    return torch.load(io.BytesIO(memory.getvalue()), weights_only=False)["state"]


def torchs(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    found = []
    for is_full in (False, True):
        options = StateDictOptions(full_state_dict=is_full, cpu_offload=True)
        found += [
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options).get("state"),
        ]
    return found


def distributed(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    """Collective. The values that torch's checkpoint has after it was saved, loaded by a model that is not parked."""
    state = model.sharded_state_dict() if isinstance(model, flat) else model.state_dict()
    dcp.save({"model": state}, checkpoint_id=folder / "dcp")
    other: Any = talk(flat, seed=3)
    into = other.sharded_state_dict()
    dcp.load({"model": into}, checkpoint_id=folder / "dcp")
    other.load_sharded_state_dict(into)
    return full_state(other)


def sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    return {name: each.local.clone() for name, each in model.sharded_state_dict().items()}


OF_ALL: dict[str, Export] = {
    "state_dict": lambda model, *_: dict(model.state_dict()),
    "optimizer.state_dict": lambda model, optimizer, _: copy.deepcopy(optimizer.state_dict()),
    "pickled": pickled,
    "fsdp.save": saved,
    "stream_weights": lambda model, *_: full_weights(model),
    "fingerprint": lambda model, optimizer, _: fsdp.fingerprint(model, optimizer),
    "distributed": distributed,
}
OF_WRAPPERS: dict[str, Export] = OF_ALL | {
    "on rank 0": lambda model, *_: dict(model.state_dict(rank0_only=True)),
    "in bfloat16": lambda model, *_: dict(model.state_dict(dtype=torch.bfloat16)),
    "local_state_dict": lambda model, *_: dict(model.local_state_dict()),
    "sharded_state_dict": sharded,
    "full_optim_state_dict": lambda model, optimizer, _: full_optim_state_dict(model, optimizer, None),
    "FairScale's": lambda model, optimizer, _: model.gather_full_optim_state_dict(optimizer),
}
FEW = {name: OF_WRAPPERS[name] for name in ("state_dict", "local_state_dict", "fsdp.save", "full_optim_state_dict")}
KINDS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Export]]] = {
    "flat": (flat, OF_WRAPPERS),
    "orig": (partial(flat, use_orig_params=True), OF_WRAPPERS),
    "rows": (under_fully_shard, OF_ALL | {"torch's": torchs}),
    "offloaded": (partial(flat, offload="cpu"), FEW),
    "replicated": (partial(flat, sharding_strategy=ShardingStrategy.NO_SHARD), OF_WRAPPERS),
    "16 bits": (partial(flat, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)), FEW),
}


def apart(tree: Any) -> Any:
    """A copy, because states of shards are views of the memory that will be freed."""
    if isinstance(tree, dict):
        return {key: apart(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [apart(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


@on_ranks("world_size")
@pytest.mark.parametrize(("world_size", "kind"), [*((2, kind) for kind in KINDS), (1, "flat"), (1, "rows")])
def test_exports_of_a_parked_model_have_the_bits_of_the_model_that_is_not_parked(
    world_size: int, kind: str, tmp_path: Path
) -> None:
    wrap, exports = KINDS[kind]
    model = talk(wrap)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    optimizer.step()
    expected = {name: apart(export(model, optimizer, tmp_path / "before")) for name, export in exports.items()}
    with fsdp.parked(model, optimizer, to=tmp_path / "parked"):
        for name, export in exports.items():
            assert_same(export(model, optimizer, tmp_path / "meanwhile"), expected[name], name)
            _require_parked(model, optimizer)
    assert_same(exports["fsdp.save"](model, optimizer, tmp_path / "after"), expected["fsdp.save"])
    backward(model, 1)
    optimizer.step()


def _require_parked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    params = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    for each in (*params, *model.buffers(), *states):
        assert not each.numel() or isinstance(each, Guard)
        local: Any = getattr(each, "_local_tensor", each)
        assert not local.untyped_storage().nbytes()
    with pytest.raises(RuntimeError, match=r"call fsdp\.unpark\(model\)"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"call fsdp\.unpark\(model\)"):
        optimizer.step()


class Mixed(nn.Module):
    """A wrapper with a buffer beside a module under `fully_shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = flat(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
        self.other = fully_shard(nn.Linear(5, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.other(self.one(inputs))


@on_ranks(2)
def test_a_part_of_a_model_may_be_parked_while_all_of_it_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed()
    model(torch.ones(2, 3)).sum().backward()

    def exported() -> Any:
        fsdp.save(tmp_path / "saved", model)
        return full_state(model), full_weights(model), load_file(tmp_path / "saved" / "model.safetensors")

    expected = exported()
    with fsdp.parked(model.one, to=tmp_path):
        assert_same(exported(), expected)
        with fsdp.parked(model.other, to=tmp_path):
            assert_same(exported(), expected)
    assert_same(exported(), expected)


@on_ranks(2)
def test_buffers_that_are_cast_for_computation_are_parked_in_their_own_precision(tmp_path: Path) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model: Any = flat(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), mixed_precision=precision)
    model(torch.randn(4, 3))
    expected, narrow = dict(model.state_dict()), [buffer.clone() for buffer in model.buffers()]
    with fsdp.parked(model, to=tmp_path):
        assert_same_state(dict(model.state_dict()), expected)
        assert all(isinstance(buffer, Guard) for buffer in model.buffers())
    assert_same([buffer.clone() for buffer in model.buffers()], narrow)
    assert_same_state(dict(model.state_dict()), expected)


@on_ranks(4)
def test_tensor_parallel_weights_and_replicas_are_exported_while_they_are_parked(tmp_path: Path) -> None:
    for model in (tensor_parallel_gpt(seed=1), ON_PAIRS["hybrid flat"](1), ON_PAIRS["hybrid rows"](1)):
        expected = apart([full_state(model), full_weights(model)])
        with fsdp.parked(model, to=tmp_path):
            assert_same([full_state(model), full_weights(model)], expected)
        assert_same([full_state(model), full_weights(model)], expected)


@on_ranks(2)
def test_a_parameter_that_is_assigned_while_the_model_is_parked_is_stored_afterwards(tmp_path: Path) -> None:
    model = talk(KINDS["orig"][0])
    expected = full_state(model)
    fsdp.park(model, to=tmp_path)
    model.module.mix.weight = nn.Parameter(torch.zeros(6, 6))
    with pytest.raises(RuntimeError, match=r"call fsdp\.unpark\(model\)"):
        model.state_dict()
    fsdp.unpark(model)
    assert_same(full_state(model), expected | {"mix.weight": torch.zeros(6, 6)})


@on_ranks(2)
def test_a_state_from_a_parked_model_is_loaded_after_training_went_on(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = adamw(model.parameters())
    backward(model, 0)
    optimizer.step()
    with fsdp.parked(model, optimizer, to=tmp_path):
        weights, moments = model.state_dict(), optimizer.state_dict()
    expected = apart([full_state(model), optimizer.state_dict()["state"]])
    backward(model, 1)
    optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    assert_same([full_state(model), optimizer.state_dict()["state"]], expected)


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_an_optimizer_whose_state_is_parked_loads_a_checkpoint(form: str, tmp_path: Path) -> None:
    model = talk(KINDS[form][0])
    optimizer = adamw(model.parameters())

    def train(number: int) -> list[Any]:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        return apart([full_state(model), optimizer.state_dict()["state"]])

    train(0)
    fsdp.save(tmp_path / "saved", model, optimizer)
    expected = train(1)
    with fsdp.parked(model, optimizer, to=tmp_path / "parked", parts=["optimizer"]):
        fsdp.load(tmp_path / "saved", model, optimizer)
        assert_same(train(1), expected)
    assert_same([full_state(model), optimizer.state_dict()["state"]], expected)
    assert not os.listdir(tmp_path / "parked")


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_writes_to_an_exported_state_do_not_reach_the_parked_model(form: str, tmp_path: Path) -> None:
    model = talk(KINDS[form][0])
    expected = full_state(model)
    fsdp.park(model, to=tmp_path)
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values():
            getattr(value, "_local_tensor", value).fill_(7)
    fsdp.unpark(model)
    assert_same(full_state(model), expected)
    assert all((getattr(value, "_local_tensor", value) == 7).all() for value in state.values())


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_values_cannot_be_brought_to_a_parked_model(form: str, tmp_path: Path) -> None:
    model = talk(KINDS[form][0])
    before = full_state(model)
    sender = talk(KINDS[form][0])
    fsdp.save(tmp_path / "saved", sender)
    writes: list[Callable[[], Any]] = [
        partial(model.load_state_dict, dict(sender.state_dict())),
        partial(fsdp.load, tmp_path / "saved", model),
        lambda: fsdp.stream_weights(sender, fsdp.weights.ModelSink(model), bucket_bytes=1000),
        lambda: next(iter(model.parameters())).data.zero_(),
        lambda: nn.init.zeros_(next(iter(model.parameters()))),
    ]
    if form != "rows":
        local, parts = sender.local_state_dict(), sender.sharded_state_dict()
        writes += [
            partial(model.load_local_state_dict, local),
            partial(model.load_sharded_state_dict, parts),
            lambda: model.summon_full_params().__enter__(),
        ]
    fsdp.park(model, to=tmp_path)
    for write in writes:
        with pytest.raises(RuntimeError, match=r"call fsdp\.unpark\(model\)"):
            write()
    fsdp.unpark(model)
    assert_same(full_state(model), before)
