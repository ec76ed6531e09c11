"""How models under `fully_shard` come by values and by copies: the meta device, `copy.deepcopy`, casts and moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp
from tests.helpers.dtensor_twins import assert_states_within, local, ours, seeded, uneven
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import adamw
from tests.helpers.ranks import RankPool
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


class Net(nn.Module):
    """All of its modules can initialise themselves; it has a buffer."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7)
        self.inner = wrap(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)))
        self.exit = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.inner(torch.tanh(self.entry(inputs))))


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        return seeded(Net, ours(**options))


def assert_trains(model: Any) -> None:
    optimizer = adamw(model.parameters())
    before = full_state(model)
    once(model, INPUTS)
    optimizer.step()
    assert all(torch.isfinite(value).all() for value in full_state(model).values())
    assert not torch.equal(full_state(model)["entry.weight"], before["entry.weight"])


# Without values


def forward(model: Any) -> None:
    model(INPUTS)


def save(model: Any) -> None:
    fsdp.save("/nowhere", model)


def unshard(model: Any) -> None:
    model.unshard()


@pytest.mark.parametrize("use", [forward, save, unshard])
@on_ranks(2)
def test_parameters_without_values_cannot_be_used(use: Callable[[Any], None]) -> None:
    model = on_meta()
    with pytest.raises(RuntimeError, match=r"entry.weight|inner.0.weight"):
        use(model)


@on_ranks(2)
def test_memory_without_values_is_not_taken_for_values() -> None:
    model = on_meta()
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features != 2:
            module.reset_parameters()
    with pytest.raises(RuntimeError, match=r"exit.weight"):
        model(INPUTS)


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.shift


@pytest.mark.parametrize("to_fill", ["shift", "steps", "mask"])
@on_ranks(2)
def test_buffers_without_values_are_an_error_too(to_fill: str) -> None:
    with torch.device("meta"):
        model: Any = Buffered()
    ours()(model).to_empty(device="cpu")
    model.reset_parameters()
    others = [buffer for name, buffer in model.named_buffers() if name != to_fill]
    for buffer in others:
        buffer.zero_()
    with pytest.raises(RuntimeError, match=f"1 of its .*: {to_fill}\\."):
        model(INPUTS)
    model.get_buffer(to_fill).zero_()
    assert model(INPUTS).isfinite().all()


@on_ranks(2)
def test_a_part_that_gets_memory_leaves_the_others_without() -> None:
    model = on_meta()
    model.entry.to_empty(device="cpu")
    assert {name for name, param in model.named_parameters() if not param.is_meta} == {"entry.weight", "entry.bias"}
    model.inner[1].to_empty(device="cpu")
    for module in (model.entry, model.inner[0], model.exit):
        module.to_empty(device="cpu").reset_parameters()
    with pytest.raises(RuntimeError, match=r"inner.1.weight.*inner.1.running_mean"):  # memory, and no values
        model(INPUTS)


@on_ranks(2)
def test_each_module_of_a_group_gets_memory() -> None:
    with torch.device("meta"):
        model: Any = seeded(Net, lambda module: module)
    fsdp.fully_shard([model.entry, model.exit])
    fsdp.fully_shard(model)
    model.exit.to_empty(device="cpu")
    assert [name for name, param in model.named_parameters() if not param.is_meta] == ["exit.weight", "exit.bias"]
    by_reset(model, Path())
    assert_trains(model)


# Getting values


def by_reset(model: Any, folder: Path) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def by_reset_of_parts(model: Any, folder: Path) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.to_empty(device="cpu")
            module.reset_parameters()


def by_reset_of_inner_modules_first(model: Any, folder: Path) -> None:
    """As `meta_init` of composer: the memory of a module goes to its own parameters, after those inside have values."""
    for module in reversed(list(model.modules())):
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
            torch.nn.init.constant_(module.bias, 2.0)
    assert all(param.eq(2).all() for name, param in full_state(model).items() if name.endswith("bias"))


def by_materialize(model: Any, folder: Path) -> None:
    fsdp.materialize(model, seed=1)


def by_init_function(model: Any, folder: Path) -> None:
    fsdp.materialize(model, param_init_fn=lambda module: module.reset_parameters(), seed=1)


def by_whole_state(model: Any, folder: Path) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(seeded(Net).state_dict())


def by_assigned_state(model: Any, folder: Path) -> None:
    model.load_state_dict(seeded(Net).state_dict(), assign=True)


def by_assigned_dtensors(model: Any, folder: Path) -> None:
    model.load_state_dict(seeded(Net, ours()).state_dict(), assign=True)


def by_checkpoint(model: Any, folder: Path) -> None:
    fsdp.save(folder / "saved", seeded(Net, ours()), generators=False)
    fsdp.load(folder / "saved", model)


@parametrize_pairs(
    world_size=[1, 2],
    start=[
        by_reset,
        by_reset_of_parts,
        by_reset_of_inner_modules_first,
        by_materialize,
        by_init_function,
        by_whole_state,
        by_assigned_state,
        by_assigned_dtensors,
        by_checkpoint,
    ],
)
@on_ranks("world_size")
def test_values_come_after_sharding(start: Any, tmp_path: Path) -> None:
    model = on_meta()
    start(model, tmp_path)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    if start in (by_whole_state, by_assigned_state, by_assigned_dtensors, by_checkpoint):
        assert_same_state(full_state(model), seeded(Net).state_dict())
    assert_trains(model)


def test_materialize_draws_the_same_values_at_every_world_size(ranks: RankPool) -> None:
    one, three = (ranks(size).run(_materialized)[0] for size in (1, 3))
    assert_same_state(three, one)


def _materialized() -> dict[str, Tensor]:
    model = on_meta()
    fsdp.materialize(model, seed=3)
    return full_state(model)


# Copies


@parametrize_pairs(
    world_size=[1, 2], options=[{}, {"mp_policy": {"param_dtype": torch.bfloat16}}, {"reshard_after_forward": False}]
)
@on_ranks("world_size")
def test_a_deep_copy_is_independent(options: dict[str, Any]) -> None:
    model = uneven(ours(**options))
    once(model, INPUTS)
    copied: Any = copy.deepcopy(model)
    assert type(copied) is type(model)
    before = full_state(model)
    for name, param in copied.named_parameters():
        original = model.get_parameter(name)
        assert isinstance(param, DTensor)
        assert local(param).numel() == 0 or local(param).data_ptr() != local(original).data_ptr()
        assert param.grad is None  # as in copies of plain modules
    assert_trains(copied)
    assert_same_state(full_state(model), before)
    model.zero_grad()
    assert_trains(model)
    assert_same_state(full_state(copied), full_state(model))


@on_ranks(2)
def test_a_copy_of_a_compiled_module_computes_with_its_own_parameters() -> None:
    model: Any = seeded(Net, ours())
    model.inner.compile(backend="eager")
    once(model, INPUTS)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.inner.parameters():
            param.zero_()
        found = copied(INPUTS)
        assert torch.equal(found, found[:1].expand_as(found))  # the bias of the last layer, for all inputs
        assert not torch.equal(model(INPUTS)[0], model(INPUTS)[1])


@on_ranks(2)
def test_a_part_can_be_copied() -> None:
    model: Any = seeded(Net, ours())
    once(model, INPUTS)
    part = copy.deepcopy(model.inner)
    hidden = torch.ones(4, 7)
    assert_same(part(hidden), model.inner(hidden), "output")


@on_ranks(1)
def test_pickling_says_what_to_do() -> None:
    model = seeded(Net, ours())
    with pytest.raises(NotImplementedError, match=r"FSDPNet cannot be pickled.*fsdp.save"):
        pickle.dumps(model)
    with pytest.raises(NotImplementedError, match=r"entry.weight is a DTensor.*fsdp.save"):
        pickle.dumps(model.get_parameter("entry.weight"))


# Casts and moves


@parametrize_pairs(cast=[nn.Module.double, nn.Module.bfloat16], is_used=[False, True])
@on_ranks(2)
def test_a_model_can_be_cast(cast: Callable[[nn.Module], nn.Module], is_used: bool) -> None:
    model, plain = seeded(Net, ours()), seeded(Net)
    if is_used:
        with torch.no_grad():
            model.eval()(INPUTS)
    model.train()
    params = list(model.parameters())
    for each in (model, plain):
        assert cast(each) is each
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    dtype = next(plain.parameters()).dtype
    assert {param.dtype for param in model.parameters()} == {dtype} == {local(param).dtype for param in params}
    for each in (model, plain):
        optimizer = adamw(each.parameters())
        each(INPUTS.to(dtype)).sin().mean().backward()
        optimizer.step()
    assert_states_within(full_state(model), plain.state_dict(), 1e-2 if dtype is torch.bfloat16 else 1e-12)


@on_ranks(2)
def test_gradients_can_be_zeroed_in_place() -> None:
    model: Any = seeded(Net, ours())
    once(model, INPUTS)
    expected = {name: local(param.grad).clone() for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    assert all(not local(param.grad).any() for param in model.parameters())
    once(model, INPUTS)
    for name, param in model.named_parameters():
        assert_same(local(param.grad), expected[name], name)
