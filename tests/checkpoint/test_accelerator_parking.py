"""A parked model has no bytes on the accelerator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import fsdp
from fsdp import FullyShardedDataParallel, OwnedOptimizer, ShardingStrategy
from fsdp.distributed.devices import is_host
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, device_module
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.owned import under_fully_shard
from tests.helpers.parity import adamw

pytestmark = pytest.mark.accelerator

flat = FullyShardedDataParallel
WRAPS: dict[str, Wrap] = {
    "orig": partial(flat, use_orig_params=True),
    "rows": under_fully_shard,
    "offloaded": partial(flat, move_params_to_cpu=True, move_grads_to_cpu=False),
    "zero 1": partial(flat, sharding_strategy=ShardingStrategy.SHARD_OPTIM),
    "replicated": partial(flat, sharding_strategy=ShardingStrategy.NO_SHARD),
}


def allocated() -> int:
    gc.collect()
    device_module().synchronize()
    return int(device_module().memory_allocated())


def new_model(wrap: Wrap) -> Any:
    return nested_mlp(lambda module: wrap(module.to(ACCELERATOR)))


def new_optimizer(model: nn.Module, *, is_owned: bool) -> torch.optim.Optimizer:
    if is_owned:
        return OwnedOptimizer(model, [{"optimizer": torch.optim.Adafactor, "lr": 0.05}])
    return adamw(model.parameters())


RoundTrip = Callable[[nn.Module, torch.optim.Optimizer], None]


def no_round_trip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def batch_of(step: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(step)).to(ACCELERATOR)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, between: RoundTrip = no_round_trip) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        between(model, optimizer)
        optimizer.step()


PLACES = "host", "folder"
PAIRS = [(wrap, PLACES[number % 2]) for number, wrap in enumerate([*WRAPS, "owned"])]


@pytest.mark.parametrize(("wrap", "to"), PAIRS)
@on_accelerators(2)
def test_nothing_of_a_parked_model_is_on_the_accelerator_and_training_goes_on_with_the_same_bits(
    wrap: str, to: str, tmp_path: Path
) -> None:
    way = WRAPS.get(wrap, flat)

    def trained(between: RoundTrip) -> dict[str, Tensor]:
        model = new_model(way)
        optimizer = new_optimizer(model, is_owned=wrap == "owned")
        train(model, optimizer, 2, between)
        return {name: value.cpu() for name, value in full_state(model).items()}

    expected = trained(no_round_trip)  # allocates what a process allocates once
    before = allocated()

    def parked(model: nn.Module, optimizer: Any) -> None:
        # Sums of 8 bytes stay, by which an OwnedOptimizer sees that shards were written.
        sums = [one._known[1] for one in optimizer._each() if one._known] if wrap == "owned" else []
        kept = before + sum(512 * (each.numel() > 0 and not is_host(each.device)) for each in sums)
        assert allocated() > kept
        with fsdp.parked(model, optimizer, to="host" if to == "host" else tmp_path) as nbytes:
            assert nbytes > 0
            assert allocated() == kept

    assert_same_state(trained(parked), expected)
    assert allocated() == before


@on_accelerators(2)
def test_nothing_grows_over_thirty_rounds() -> None:
    model: Any = flat(nested_mlp(keep).to(ACCELERATOR))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    expected, before = full_state(model), allocated()
    for _ in range(30):
        with fsdp.parked(model, optimizer):
            pass
    assert allocated() == before
    assert_same_state(full_state(model), expected)


@on_accelerators(2)
def test_an_accelerator_without_room_is_an_error_and_the_model_comes_back_later() -> None:
    model: Any = flat(nn.Linear(512, 512).to(ACCELERATOR))
    expected = full_state(model)
    model(torch.ones(1, 512, device=ACCELERATOR)).sum().backward()
    fsdp.park(model)
    taken = torch.UntypedStorage.resize_
    try:
        torch.UntypedStorage.resize_ = _refuse  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no room"):
            fsdp.unpark(model)
    finally:
        torch.UntypedStorage.resize_ = taken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="are parked"):
        model(torch.ones(1, 512, device=ACCELERATOR))
    fsdp.unpark(model)
    assert_same_state(full_state(model), expected)


EXPORTS: dict[str, Callable[[Any, torch.optim.Optimizer, Path], Any]] = {
    "state_dict": lambda model, *_: model.state_dict(),
    "get_model_state_dict": lambda model, *_: get_model_state_dict(model, options=ON_RANK_0),
    "optimizer": lambda model, optimizer, _: get_optimizer_state_dict(model, optimizer, options=ON_RANK_0),
    "fsdp.save": lambda model, optimizer, folder: fsdp.save(folder / "saved", model, optimizer),
    "stream_weights": lambda model, *_: streamed(model),
}
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)


def streamed(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    fsdp.stream_weights(model, lambda tensors: found.update(apart(tensors)), bucket_bytes=WIDTH * WIDTH * 4)
    return found


def apart(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: apart(value) for key, value in tree.items()}
    return tree.detach().to("cpu", copy=True) if isinstance(tree, Tensor) else tree


WIDTH, LAYERS = 64, 6


@pytest.mark.parametrize("form", ["orig", "rows"])
@on_accelerators(2)
def test_exports_of_a_parked_model_need_device_memory_for_a_unit_at_most(form: str, tmp_path: Path) -> None:
    wrap = WRAPS[form]
    layers = [wrap(nn.Linear(WIDTH, WIDTH, bias=False).to(ACCELERATOR)) for _ in range(LAYERS)]
    model: Any = wrap(nn.Sequential(*layers).to(ACCELERATOR))
    optimizer = adamw(model.parameters())
    model(torch.ones(2, WIDTH, device=ACCELERATOR)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    # torch's own gather `DTensor`s, which on CUDA over gloo ends the process.
    with_torch = form == "rows" and IS_SIMULATED
    names = [name for name in EXPORTS if with_torch or name not in ("get_model_state_dict", "optimizer")]
    expected = {name: apart(EXPORTS[name](model, optimizer, tmp_path / "a")) for name in names}
    unit = WIDTH * WIDTH * 4
    with fsdp.parked(model, optimizer):
        for name in names:
            before = allocated()
            device_module().reset_peak_memory_stats()
            found = EXPORTS[name](model, optimizer, tmp_path / "b")
            # The unsharded unit, its shard and the shard that was sent before; two buckets, and parts of the next one.
            most = (3 if name == "stream_weights" else 2) * unit + 4096
            assert device_module().max_memory_allocated() - before <= most, name
            if isinstance(found, dict):
                assert allocated() == before, name
                assert_same(apart(found), expected[name], name)
                assert all(each.device.type == "cpu" for each in found.values() if isinstance(each, Tensor))
    assert_same(apart(model.state_dict()), expected["state_dict"])
    for name in ("model", "optimizer"):
        files = [load_file(tmp_path / folder / "saved" / f"{name}.safetensors") for folder in "ab"]
        assert_same(files[1], files[0])


def _refuse(storage: Any, nbytes: int) -> None:
    if nbytes:
        raise RuntimeError("no room")


@pytest.mark.parametrize("wrap", ["orig", "rows", "owned"])
@on_accelerators(2)
def test_an_optimizer_that_is_parked_between_steps_has_no_bytes_there_and_the_same_bits(wrap: str) -> None:
    way = WRAPS.get(wrap, flat)

    def trained(is_parked: bool) -> Any:
        model = new_model(way)
        optimizer = new_optimizer(model, is_owned=wrap == "owned")
        if is_parked:
            fsdp.park(model, optimizer, parts=["optimizer"])
        train(model, optimizer, 2)
        after, freed = allocated(), 0
        if is_parked:
            fsdp.unpark(model)
            freed = allocated() - after
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        return {name: value.cpu() for name, value in full_state(model).items()}, freed, state

    (weights, freed, state), (expected, *_) = trained(True), trained(False)
    assert_same_state(weights, expected)
    on_device = [getattr(value, "_local_tensor", value) for value in state]
    nbytes = sum(value.untyped_storage().nbytes() for value in on_device if value.device.type == ACCELERATOR)
    assert freed >= nbytes
    assert wrap == "owned" or nbytes > 0


@on_accelerators(2)
def test_a_step_of_a_parked_optimizer_has_the_state_of_two_units_in_memory() -> None:
    def peak(is_parked: bool) -> int:
        before = allocated()
        layers = nn.Sequential(*(flat(nn.Linear(64, 64).to(ACCELERATOR)) for _ in range(8)))
        model: Any = flat(layers)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for step in range(2):
            model(torch.ones(1, 64, device=ACCELERATOR)).sum().backward()
            if is_parked and not step:
                fsdp.park(model, optimizer, parts=["optimizer"])
            if step:
                device_module().synchronize()
                device_module().reset_peak_memory_stats()
            optimizer.step()
        return int(device_module().max_memory_allocated()) - before

    peak(False)  # allocates what a process allocates once
    state_of_unit = 2 * 4 * (64 * 64 + 64) // 2
    assert peak(False) - peak(True) >= 5 * state_of_unit
