"""Offload to disk: training is that in memory to the bit, and what it needs lies in mapped files.

Values are looked for by address in the process's own list of mappings, so these tests don't take our word for it.
"""

from __future__ import annotations

import copy
import gc
import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.engine.placeholder import Placeholder
from fsdp.layers.mapped_files import MappedFiles
from tests.helpers.memory import mapped_kib, mappings
from tests.helpers.models import nested_mlp, tiny_transformer
from tests.helpers.offload import AlwaysReducing, on
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, every_pair, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    TOKENS,
    MakeOptimizer,
    Training,
    adamw,
    alone,
    assert_bit_equal,
    fully_sharded,
    fused_adamw,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.twins import STEPS, assert_trains_like_plain, toolbox

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads Linux's /proc")


def foreach_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=True)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def on_disk(folder: Path, **options: Any) -> dict[str, Any]:
    return {"offload": "disk", "offload_folder": folder, **options}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(3, 5, dtype=next(model.parameters()).dtype)).sum().backward()
    if optimizer is not None:
        optimizer.step()


def gradients(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


# Training


@parametrize_cases(
    at_most=6,
    world_size=[2, 1],
    machine=["accelerated", "of CPUs only"],
    make_optimizer=[sgd_with_momentum, adamw, fused_adamw, foreach_adamw],
    compute_dtype=[None, torch.bfloat16],
    accumulate=[(1, True), (3, True), (2, False)],
    recompute=["no", "outside", "inside"],
    others=every_pair(flatten_parameters=[True, False], reshard_after_forward=[True, False]),
)
@on_ranks("world_size")
def test_training_is_that_in_memory_to_the_bit(tmp_path: Path, case: Case) -> None:
    options = case.others | {"mixed_precision": MixedPrecision(param_dtype=case.compute_dtype)}
    turns, under_no_sync = case.accumulate
    wrapper = FullyShardedDataParallel if under_no_sync else AlwaysReducing
    training = Training(
        make_model=partial(tiny_transformer, recompute=case.recompute),
        make_optimizer=case.make_optimizer,
        task=TOKENS,
        accumulate=turns,
        clip=0.5,
    )
    in_memory = train_sharded(training, partial(wrapper, **options))
    with on(case.machine):
        assert_bit_equal(train_sharded(training, partial(wrapper, **on_disk(tmp_path, **options))), in_memory)


@on_ranks(1, 2)
def test_units_on_disk_can_be_called_in_unusual_ways(tmp_path: Path) -> None:
    assert_trains_like_plain(toolbox, *STEPS, options=on_disk(tmp_path))


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_can_be_zeroed_in_both_ways(tmp_path: Path, set_to_none: bool) -> None:
    states = []
    for options in ({}, on_disk(tmp_path)):
        model = nested_mlp(fully_sharded(**options))
        optimizer = sgd_with_momentum(model.parameters())
        for _ in range(3):
            train_step(model, optimizer)
            optimizer.zero_grad(set_to_none)
            assert all(grad is None if set_to_none else not grad.any() for grad in gradients(model))
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_gradient_that_the_user_keeps_stays_as_it_was(tmp_path: Path) -> None:
    model = alone(nn.Linear(5, 3), **on_disk(tmp_path))
    kept: list[Any] = []
    for scale in (1.0, 2.0):
        model.zero_grad()
        (scale * model(torch.ones(2, 5))).sum().backward()
        kept.append(model.params[0].grad)
    assert torch.equal(2 * kept[0], kept[1])


@on_ranks(2)
def test_frozen_parameters_lie_on_disk_too(tmp_path: Path) -> None:
    def freeze_gate(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)
        return fully_sharded(**on_disk(tmp_path))(module)

    model = nested_mlp(freeze_gate)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [param for param in model.parameters() if param.requires_grad]
    train_step(model, sgd_with_momentum(trained))
    assert len(trained) == len(list(model.parameters())) - 1
    assert all(map(Addresses(tmp_path).contain, model.parameters()))
    assert {name for name, value in model.state_dict().items() if torch.equal(value, before[name])} == {"gate.weight"}


# Where things are


class Addresses:
    """Where in the process files below a folder are mapped now."""

    def __init__(self, folder: Path) -> None:
        self._ranges = [(start, stop) for start, stop, path in mappings() if path.startswith(f"{folder}/")]

    def contain(self, tensor: Any) -> bool:
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a fake tensor that a compiler left behind: it has no memory
            return True
        return any(start <= address < stop for start, stop in self._ranges)


def bytes_in_memory(folder: Path) -> int:
    """Of all tensors that live in the process, each storage once, those whose memory is no file's."""
    gc.collect()
    files, storages = Addresses(folder), {}
    for item in gc.get_objects():
        if isinstance(item, Tensor) and not isinstance(item, Placeholder) and not files.contain(item):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@needs_proc
@parametrize_cases(
    at_most=5,
    world_size=[2, 1],
    make_optimizer=[sgd_with_momentum, plain_sgd, adamw, fused_adamw, foreach_adamw],
    machine=["of CPUs only", "accelerated"],
    flatten_parameters=[True, False],
    compute_dtype=[None, torch.bfloat16],
)
@on_ranks("world_size")
def test_between_steps_nothing_but_counts_is_in_memory(tmp_path: Path, case: Case) -> None:
    policy = MixedPrecision(param_dtype=case.compute_dtype)
    options = {"flatten_parameters": case.flatten_parameters, "mixed_precision": policy}
    before = bytes_in_memory(tmp_path)
    with on(case.machine):
        model = nested_mlp(fully_sharded(**on_disk(tmp_path, **options)))
        assert bytes_in_memory(tmp_path) == before
        optimizer = case.make_optimizer(model.parameters())
        # Adam counts its steps for each parameter, in a float.
        counts = 4 * len(list(model.parameters())) if isinstance(optimizer, torch.optim.Adam) else 0
        for step in range(3):
            train_step(model)
            assert bytes_in_memory(tmp_path) == before + (counts if step else 0)
            assert all(map(Addresses(tmp_path).contain, gradients(model)))
            optimizer.step()
            assert bytes_in_memory(tmp_path) == before + counts
            optimizer.zero_grad()


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All of an optimizer's state that is as large as its parameters."""
    return [
        value for state in optimizer.state.values() for value in state.values() if value is not None and value.dim()
    ]


@needs_proc
@pytest.mark.parametrize("make_optimizer", [sgd_with_momentum, adamw, fused_adamw, foreach_adamw])
@on_ranks(2)
def test_a_loaded_optimizer_state_is_in_files_after_the_next_step(
    tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    models = [nested_mlp(fully_sharded(**options)) for options in ({}, on_disk(tmp_path))]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            train_step(model, optimizer)
        expected, found = map(state_of, optimizers)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        assert all(map(Addresses(tmp_path).contain, found))
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        assert not any(map(Addresses(tmp_path).contain, state_of(optimizers[1])))
    assert len(expected) >= len(optimizers[0].param_groups[0]["params"])


@needs_proc
@on_ranks(2)
def test_neither_backward_nor_step_leaves_anything_of_the_files_resident(tmp_path: Path) -> None:
    # Kept files are one for each tensor; in a shared one, the system fetches what lies beside a page along with it.
    model = nested_mlp(fully_sharded(**on_disk(tmp_path, keep_offload_files=True)))
    optimizer = adamw(model.parameters())
    for _ in range(3):
        train_step(model)
        assert mapped_kib(tmp_path, "Rss") == 0
        optimizer.step()
        assert mapped_kib(tmp_path, "Rss") == 0
        optimizer.zero_grad(set_to_none=False)
        assert mapped_kib(tmp_path, "Rss") > 0


def test_what_is_made_in_a_shard_s_likeness_is_in_a_file(tmp_path: Path) -> None:
    param: Any = alone(nn.Linear(5, 3), **on_disk(tmp_path)).params[0]
    files: MappedFiles = param.shard_storage.files
    made = {
        "zeros": torch.zeros_like(param),
        "named": torch.zeros_like(input=param),
        "ones": torch.ones_like(param, memory_format=torch.preserve_format),
        "sevens": torch.full_like(param, 7),
        "eights": torch.full_like(param, fill_value=8),
        "double": torch.zeros_like(param, dtype=torch.float64),
        "empty": torch.empty_like(param),
    }
    for name, tensor in made.items():
        assert files.holds(tensor), name
        assert (tensor.shape, tensor.dtype) == (param.shape, torch.float64 if name == "double" else param.dtype)
        assert type(tensor) is Tensor
    values = [float(made[name].mean()) for name in ("zeros", "named", "ones", "sevens", "eights")]
    assert values == [0, 0, 1, 7, 8]
    assert torch.zeros_like(param, device="meta").device.type == "meta"
    assert torch.zeros_like(param, requires_grad=True).requires_grad
    assert not files.holds(param.detach() + 1)


def test_a_saved_optimizer_state_is_its_own_bytes_only(tmp_path: Path) -> None:
    model = alone(nn.Linear(5, 3), **on_disk(tmp_path))
    optimizer = adamw(model.parameters())
    train_step(model, optimizer)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    assert saved.tell() < 8192  # and not the files, of which each is four MiB
    saved.seek(0)
    again = adamw(model.parameters())
    again.load_state_dict(torch.load(saved))
    assert all(torch.equal(*pair) for pair in zip(state_of(again), state_of(optimizer), strict=True))


def test_copies_of_shards_are_in_files_of_their_own(tmp_path: Path) -> None:
    param: Any = alone(nn.Linear(5, 3), **on_disk(tmp_path)).params[0]
    copied = copy.deepcopy(param)
    assert torch.equal(copied, param)
    assert param.shard_storage.files.holds(copied)
    copied.data.zero_()
    assert param.any()


@parametrize_pairs(with_gradients=[True, False], world_size=[1, 2])
@on_ranks("world_size")
def test_a_model_that_was_cast_trains_on_in_files(tmp_path: Path, with_gradients: bool) -> None:
    states = []
    for options in ({}, on_disk(tmp_path)):
        model = nested_mlp(fully_sharded(**options))
        train_step(model, sgd_with_momentum(model.parameters()))
        if not with_gradients:
            model.zero_grad()
        model.to(torch.float64)
        optimizer = sgd_with_momentum(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            train_step(model, optimizer)
        states.append(model.state_dict())
    for tensor in (*model.parameters(), *gradients(model)):
        assert tensor.dtype == torch.float64
        assert Addresses(tmp_path).contain(tensor)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
