"""Full optimizer states: what is in them, who gets them, and where they may come from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, auto_wrap_bn, optim_utils
from fsdp.optim_utils.params import parameters_of
from tests.helpers.equality import assert_close, assert_same
from tests.helpers.forms import trained_rows
from tests.helpers.hybrid import mesh_of as replica_mesh
from tests.helpers.hybrid import neighbours
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import adam, from_first, momentum, nadam, stateless, train, trained
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.tensor_parallel import SENTENCES, gpt, over_data
from tests.helpers.tensor_parallel import mesh_of as tensor_mesh


class Wrapped:
    """As clients' wrappers of optimizers are: nothing of torch's, and a value of its own in the dictionary."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {**self._optimizer.state_dict(), "loss_scale": 128.0}


# What is in them


@on_ranks(2)
def test_any_object_with_a_state_dict_serves_and_its_own_keys_stay() -> None:
    model, optimizer = trained()
    full = from_first(model.gather_full_optim_state_dict(Wrapped(optimizer)))
    assert full["loss_scale"] == 128.0
    expected = from_first(model.gather_full_optim_state_dict(optimizer))
    assert_same({key: full[key] for key in expected}, expected)
    assert model.get_shard_from_optim_state_dict(full)["loss_scale"] == 128.0
    only_trained = torch.optim.Adam([param for param in model.parameters() if param.requires_grad])
    assert from_first(model.gather_full_optim_state_dict(Wrapped(only_trained)))["state"] == {}


@pytest.mark.parametrize("recipient", [0, 2, None])
@on_ranks(3)
def test_the_ranks_that_want_it_get_it(recipient: int | None) -> None:
    model, optimizer = trained()
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=recipient)
    first = from_first(model.gather_full_optim_state_dict(optimizer))
    if recipient in (None, dist.get_rank()):
        assert_same(full, first)
        live = {value.data_ptr() for state in optimizer.state.values() for value in state.values()}
        values = [value for state in full["state"].values() for value in state.values() if isinstance(value, Tensor)]
        assert values
        assert all(value.data_ptr() not in live and value.device.type == "cpu" for value in values)
    else:
        assert full is None


@on_ranks(2)
def test_parameters_without_state_have_no_entry() -> None:
    model, optimizer = trained()
    named = _numbers(model)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    without = [named[name] for name in ("frozen.weight", "frozen.bias", "unused.weight", "unused.bias")]
    assert [number for number, local in full["param_id_map"].items() if local is None] == sorted(without)
    assert sorted(full["state"]) == sorted(set(named.values()) - set(without))
    assert sorted(full["param_groups"][0]["params"]) == sorted(named.values())
    assert full["uncollected_local_ids"] == []
    model, optimizer = trained(stateless)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert full["state"] == {}
    assert set(full["param_id_map"].values()) == {None}


@on_ranks(2)
def test_ranks_that_hold_nothing_of_a_parameter_need_no_state_of_it() -> None:
    model, optimizer = trained(use_orig_params=True)
    expected = from_first(model.gather_full_optim_state_dict(optimizer))
    held = list(optimizer.state)
    for param in held:
        if not param.numel():
            del optimizer.state[param]
    gone = torch.tensor(len(held) - len(optimizer.state))
    dist.all_reduce(gone)
    assert gone > 0
    assert_same(from_first(model.gather_full_optim_state_dict(optimizer)), expected)


def _numbers(model: Any) -> dict[str, int]:
    params = parameters_of(model, "test")
    return {original.name: number for number, (_, original) in params.by_number.items()}


@on_ranks(1)
def test_numbers_count_parameters_wrapper_by_wrapper_in_any_form() -> None:
    for options in ({}, {"flatten_parameters": False}, {"use_orig_params": True}):
        numbers = _numbers(nested_mlp(fully_sharded(**options)))
        assert sorted(numbers, key=numbers.__getitem__) == [
            *("scale", "entry.weight", "entry.bias", "exit.weight", "exit.bias"),
            *("trunk.0.weight", "trunk.2.0.weight", "trunk.2.0.bias", "trunk.2.1.weight", "gate.weight"),
        ]


@on_ranks(3)
def test_0d_tensors_are_there_for_each_rank_and_steps_are_numbers() -> None:
    model, optimizer = trained(nadam)
    for state in optimizer.state.values():
        state["mu_product"].add_(dist.get_rank())
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    entry = full["state"][0]
    assert entry["step"] == 2.0
    assert isinstance(entry["step"], float)
    base = entry["mu_product"][0].item()
    assert [value.item() - base for value in entry["mu_product"]] == pytest.approx([0, 1, 2])
    shard = model.get_shard_from_optim_state_dict(copy.deepcopy(full))
    assert shard["state"][0]["mu_product"].item() == pytest.approx(base + dist.get_rank())
    for state in full["state"].values():
        state["mu_product"] = state["mu_product"][:2]  # fewer ranks: the others have the first one's
    shard = model.get_shard_from_optim_state_dict(full)
    expected = base + (dist.get_rank() if dist.get_rank() < 2 else 0)
    assert shard["state"][0]["mu_product"].item() == pytest.approx(expected)


# What is changed


@on_ranks(2)
def test_only_get_shard_changes_what_it_is_given() -> None:
    model, optimizer = trained()
    own = copy.deepcopy(optimizer.state_dict())
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert_same(optimizer.state_dict(), own)
    kept = copy.deepcopy(full)
    named = optim_utils.rekey_optim_state_dict(full, model, "names")
    assert_same(full, kept)
    assert_same(optim_utils.rekey_optim_state_dict(named, model, "numbers"), full)
    assert_same(
        optim_utils.shard_full_optim_state_dict(model, named, optimizer)["state"][0]["exp_avg"],
        own["state"][0]["exp_avg"],
    )
    optim_utils.load_full_optim_state_dict(model, adam(model), full)
    assert_same(full, kept)
    assert model.get_shard_from_optim_state_dict(full) is full
    assert full.keys() == own.keys()


# Units with ranks of their own


class Norms(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@on_ranks(2)
def test_units_of_one_rank_are_not_collected() -> None:
    model: Any = FullyShardedDataParallel(auto_wrap_bn(Norms(), single_rank_pg=True))
    model, optimizer = trained(model=model)
    alone = model.module.module[1]
    assert alone.no_broadcast_optim_state
    assert not model.no_broadcast_optim_state
    full = model.gather_full_optim_state_dict(optimizer)
    assert model.uncollected_opt_state == {}
    if full is not None:
        assert full["uncollected_local_ids"] == [1, 2], "weight and bias, which are not flattened"
        own = optimizer.state_dict()["state"]
        for number, local in full["param_id_map"].items():
            if local in (1, 2):
                assert torch.equal(full["state"][number]["exp_avg"], own[local]["exp_avg"])
    full = from_first(full)
    first = from_first(optimizer.state_dict()["state"][1])
    shard = model.get_shard_from_optim_state_dict(copy.deepcopy(full))
    assert_same(shard["state"][1]["exp_avg"], first["exp_avg"])
    fresh = adam(model)
    optim_utils.load_full_optim_state_dict(model, fresh, full if dist.get_rank() == 0 else None, rank0_only=True)
    assert_same(fresh.state_dict()["state"][1]["exp_avg"], first["exp_avg"])


@on_ranks(2)
def test_a_unit_is_left_out_when_asked() -> None:
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(nn.Linear(5, 3), no_broadcast_optim_state=True)
    model: Any = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(3, 1)))
    assert inner.no_broadcast_optim_state
    model, optimizer = trained(model=model)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert full["uncollected_local_ids"] == [1]
    assert full["param_id_map"] == {0: 0, 1: 0, 2: None, 3: None}
    assert list(full["state"]) == [0, 1]
    full["state"][2] = {"step": 2.0, "exp_avg": torch.ones(3, 5), "exp_avg_sq": torch.ones(3, 5)}
    full["state"][3] = {"step": 2.0, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    assert torch.equal(optimizer.state[inner.params[0]]["exp_avg"], torch.ones(9)), "what was put there is cut"


@on_ranks(4)
def test_replicas_have_the_same() -> None:
    model, optimizer = trained(process_group=replica_mesh(2, 2))
    for recipient in (0, 1, 2, 3):
        full = model.gather_full_optim_state_dict(optimizer, recipient_rank=recipient)
        assert (full is not None) == (dist.get_rank() == recipient)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    fresh = adam(model)
    optim_utils.load_full_optim_state_dict(model, fresh, full if dist.get_rank() == 0 else None, rank0_only=True)
    assert_same(_elements(fresh), _elements(optimizer))


def _elements(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    state = optimizer.state_dict()["state"]
    return {number: {key: value for key, value in entry.items() if value.dim()} for number, entry in state.items()}


@on_ranks(4)
def test_a_unit_of_some_ranks_is_gathered_from_them() -> None:
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(nn.Linear(5, 3), neighbours(2))
    model: Any = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(3, 1)))
    optimizer = adam(model)
    train(model, optimizer, range(2))
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert named is not None
    assert named["state"]["0.weight"]["exp_avg"].shape == (3, 5)
    fresh = adam(model)
    optim_utils.load_full_optim_state_dict(model, fresh, named)
    assert_same(_elements(fresh), _elements(optimizer))


# Where state and parameters may be


@parametrize_pairs(offload=["cpu", "disk"], form=[{}, {"use_orig_params": True}], rank0_only=[True, False])
@on_ranks(2)
def test_offloaded_state(tmp_path: Path, offload: str, form: dict[str, Any], rank0_only: bool) -> None:
    folder = {"offload_folder": tmp_path} if offload == "disk" else {}
    options = {"offload": offload, **folder, **form}
    model, optimizer = trained(**options)
    plain, other = trained()
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    expected = optim_utils.full_optim_state_dict(plain, other, recipient_rank=None)
    assert named is not None
    assert expected is not None
    wanted = {name: expected["state"][name] for name in named["state"]}
    assert_close(named["state"], wanted, rtol=1e-3, atol=1e-5)
    fresh = adam(model)
    given = named if dist.get_rank() == 0 or not rank0_only else None
    optim_utils.load_full_optim_state_dict(model, fresh, given, rank0_only=rank0_only)
    assert_same(_elements(fresh), _elements(optimizer))
    if options["offload"] == "disk":
        for param, state in fresh.state.items():
            assert param.numel() == 0 or param.shard_storage.files.holds(state["exp_avg"]), "state beside the shard"
    train(model, fresh, range(2, 3))


@pytest.mark.parametrize("form", [{}, {"flatten_parameters": False}], ids=str)
@on_ranks(4)
def test_tensor_parallel_parameters_are_whole(form: dict[str, Any]) -> None:
    mesh = tensor_mesh(2, 2)
    model: Any = gpt(over_data(mesh, **form), mesh=mesh)
    optimizer, twin = adam(model), gpt()
    inputs, targets = SENTENCES.batch(torch.Generator().manual_seed(0), 2)
    for _ in range(2):
        optimizer.zero_grad()
        SENTENCES.loss(model(inputs), targets).backward()
        optimizer.step()
    own = adam(twin)
    for _ in range(2):
        own.zero_grad()
        SENTENCES.loss(twin(inputs), targets).backward()
        own.step()
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert named is not None
    wanted = optim_utils.rekey_optim_state_dict(own.state_dict(), twin, "names")
    assert_close(named["state"], wanted["state"], rtol=1e-3, atol=1e-4)
    fresh = adam(model)
    is_first = mesh.get_local_rank("dp") == 0
    optim_utils.load_full_optim_state_dict(model, fresh, named if is_first else None, rank0_only=True)
    assert_same(_elements(fresh), _elements(optimizer))
    full = model.gather_full_optim_state_dict(optimizer)
    assert (full is not None) == is_first


@on_ranks(2)
def test_states_are_rekeyed_while_modules_are_unsharded() -> None:
    model, optimizer = trained_rows(lambda model: torch.optim.Adam(model.parameters()))
    expected = optim_utils.rekey_optim_state_dict(optimizer.state_dict(), model, "names", optimizer)
    model[0].unshard()
    assert_same(optim_utils.rekey_optim_state_dict(optimizer.state_dict(), model, "names", optimizer), expected)


@on_ranks(2)
def test_ignored_parameters_are_whole_and_come_last() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    model: Any = FullyShardedDataParallel(module, ignored_modules=[module[0]])
    model, optimizer = trained(model=model)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert [tuple(full["state"][number]["exp_avg"].shape) for number in range(4)] == [(1, 3), (1,), (3, 5), (3,)]
    fresh = adam(model)
    fresh.load_state_dict(model.get_shard_from_optim_state_dict(copy.deepcopy(full)))
    kept = from_first(optimizer.state[module[0].bias])
    assert_same(fresh.state[module[0].bias]["exp_avg"], kept["exp_avg"])
    again = adam(model)
    optim_utils.load_full_optim_state_dict(model, again, full if dist.get_rank() == 0 else None, rank0_only=True)
    assert_same(again.state_dict(), fresh.state_dict())


# One tensor at a time


@on_ranks(2)
def test_the_stream_has_what_the_dictionary_has() -> None:
    model, optimizer = trained(momentum)
    named = from_first(optim_utils.full_optim_state_dict(model, optimizer))
    wanted = [(name, "momentum_buffer", state["momentum_buffer"]) for name, state in named["state"].items()]
    found = list(optim_utils.stream_optim_state(model, optimizer, recipient_rank=1))
    assert [(name, key, value.shape) for name, key, value in found] == [(n, k, v.shape) for n, k, v in wanted]
    if dist.get_rank() == 1:
        assert_same([value for _, _, value in found], [value for _, _, value in wanted])
    else:
        assert all(value.is_meta for _, _, value in found)


@on_ranks(2)
def test_a_stream_may_be_left_early() -> None:
    model, optimizer = trained()
    stream = optim_utils.stream_optim_state(model, optimizer)
    next(stream)
    del stream
    train(model, optimizer, range(2, 4))
    assert len(list(optim_utils.stream_optim_state(model, optimizer))) > 4
