"""`parallelize_module`, and then `fully_shard` over another dimension of the mesh, beside torch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import fsdp
from tests.helpers.convert_formats import converted
from tests.helpers.dtensor_twins import (
    ROUNDING,
    Plan,
    assert_side_by_side,
    assert_states_within,
    assert_within,
    local,
    ours,
    spread_of,
    torchs,
    whole,
)
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import REGRESSION
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import SENTENCES, Experts, gpt, mesh_of, perceptron
from tests.helpers.traffic import Counting, Traffic


@cache
def cube_of(*shape: int) -> DeviceMesh:
    """Collective. Ranks in two dimensions of data parallelism and one of tensors, or the other way round."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c"))


# Training beside torch's


@pytest.mark.parametrize(("shape", "kind"), [((2, 2), "sequence"), ((1, 2), "heads"), ((2, 1), "sequence")])
@on_ranks(lambda shape: shape[0] * shape[1])
def test_trains_as_torchs(shape: tuple[int, int], kind: str) -> None:
    mesh = mesh_of(*shape)
    model = partial(gpt, mesh=mesh, kind=kind, vocabulary=True)
    plan = Plan(make_model=model, task=SENTENCES, mesh=mesh["dp"], accumulate=2)
    assert_side_by_side(plan, mesh=mesh["dp"])


PLACEMENTS: dict[str, Sequence[tuple[Placement, ...]]] = {
    "rows_and_columns": [(Shard(0),), (Shard(1),)],
    "replicated": [(Replicate(),), (Shard(0),)],
}


@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(4)
def test_sizes_that_divide_by_nothing(placements: str) -> None:
    placements = PLACEMENTS[placements]
    mesh = mesh_of(2, 2)
    model = partial(perceptron, mesh=mesh["tp"], hidden=7, placements=placements, each=True)
    plan = Plan(make_model=model, task=REGRESSION, mesh=mesh["dp"])
    assert_side_by_side(plan, mesh=mesh["dp"])


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)])
@on_ranks(lambda shape: shape[0] * shape[1] * shape[2])
def test_two_tensor_dimensions(shape: tuple[int, int, int]) -> None:
    mesh = cube_of(*shape)
    placements = [(Shard(0), Shard(0)), (Shard(1), Shard(0))]
    model = partial(perceptron, mesh=mesh["b", "c"], hidden=8, placements=placements)
    plan = Plan(make_model=model, task=REGRESSION, mesh=mesh["a"])
    assert_side_by_side(plan, mesh=mesh["a"])


@on_ranks(8)
def test_hybrid_sharding_besides() -> None:
    mesh = cube_of(2, 2, 2)
    model = partial(perceptron, mesh=mesh["c"], hidden=6, placements=[(Shard(0),), (Shard(1),)], each=True)
    plan = Plan(make_model=model, task=REGRESSION, mesh=mesh["a", "b"])
    assert_side_by_side(plan, mesh=mesh["a", "b"])


def _second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 and local(param).shape[1] % 2 == 0 else None


@on_ranks(4)
def test_along_another_dimension() -> None:
    mesh = mesh_of(2, 2)
    model = partial(perceptron, mesh=mesh["tp"], hidden=8, placements=[(Shard(0),), (Shard(1),)])
    plan = Plan(make_model=model, task=REGRESSION, mesh=mesh["dp"])
    assert_side_by_side(plan, mesh=mesh["dp"], shard_placement_fn=_second_dim)


# Clipping


@on_ranks(4)
def test_clipping() -> None:
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(2, 2)
    # Parameters on one mesh, where torch has a norm, and on two, where it has none.
    for kinds in ("on one mesh", "on two"):
        placements = PLACEMENTS["rows_and_columns"]
        model = perceptron(ours(mesh=mesh["dp"]), mesh=mesh["tp"], hidden=7, placements=placements)
        model(torch.linspace(-1, 1, 20).view(4, 5)).sum().backward()
        listed: list[Any] = list(model.parameters())
        trained = [param for param in listed if kinds == "on two" or param.device_mesh.ndim == 2]
        for norm_type in (2.0, 1.0, float("inf")):
            grads = [whole(param.grad) for param in trained]
            expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), norm_type)
            found = nn.utils.clip_grad_norm_(trained, expected.item() / 2, norm_type)
            assert isinstance(found, DTensor)
            assert_within(f"norm {norm_type} {kinds}", whole(found), expected, ROUNDING)
            for param, grad in zip(trained, grads, strict=True):
                assert_within("a clipped gradient", whole(param.grad), grad / 2, 1e-5)


# States


def _model(wrap: Wrap, mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    """A small one: torch looks for the sharding of each operation for every size, also of an optimizer."""
    placements = PLACEMENTS["rows_and_columns"]
    return perceptron(wrap, mesh=mesh["tp"], hidden=8, placements=placements, each=True, seed=seed)


def _inputs(mesh: DeviceMesh) -> Tensor:
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    return torch.randn(2, 5, generator=generator)


def _go_on(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    for _ in range(2):
        model(_inputs(mesh)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(wrap: Wrap, mesh: DeviceMesh, seed: int = 0) -> tuple[Any, Any]:
    model = _model(wrap, mesh, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    _go_on(model, optimizer, mesh)
    return model, optimizer


def _assert_equal(found: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        own: Any = found.state_dict()[name]
        assert spread_of(own) == spread_of(value), name
        assert_within(name, local(own), local(value))


@on_ranks(4)
def test_states_go_to_torchs_and_come_from_there(tmp_path: Path) -> None:
    mesh = mesh_of(2, 2)
    (mine, optimizer), (theirs, _) = (_trained(wrap(mesh=mesh["dp"]), mesh) for wrap in (ours, torchs))
    plain = _model(keep, mesh)
    assert {name: value.shape for name, value in mine.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    dcp.save({"model": mine.state_dict()}, checkpoint_id=tmp_path / "ours")
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=tmp_path / "torchs")
    for source, name, wrap in ((mine, "ours", ours), (mine, "ours", torchs), (theirs, "torchs", ours)):
        target = _model(wrap(mesh=mesh["dp"]), mesh, seed=5)
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / name)
        target.load_state_dict(state["model"])
        _assert_equal(target, source)
    target = _model(ours(mesh=mesh["dp"]), mesh, seed=5)
    target.load_state_dict(full_state(mine))
    _assert_equal(target, mine)
    # A copy trains by itself, as its original does.
    copied_model, copied_optimizer = copy.deepcopy((mine, optimizer))
    _assert_equal(copied_model, mine)
    _go_on(copied_model, copied_optimizer, mesh)
    _go_on(mine, optimizer, mesh)
    _assert_equal(copied_model, mine)


@on_ranks(4)
def test_whole_tensors_of_uneven_sizes() -> None:
    mesh = mesh_of(2, 2)
    make = partial(perceptron, mesh=mesh["tp"], hidden=7, placements=PLACEMENTS["rows_and_columns"])
    expected = make(keep).state_dict()
    model = make(ours(mesh=mesh["dp"]))
    assert_states_within(full_state(model), expected)
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(value.shape, generator=generator) for name, value in expected.items()}
    model.load_state_dict(state)
    assert_states_within(full_state(model), state)


@on_ranks(4)
def test_final_files_are_read(tmp_path: Path) -> None:
    mesh = mesh_of(2, 2)
    expected = _model(ours(mesh=mesh["dp"]), mesh, seed=5)
    state = full_state(expected)
    if dist.get_rank() == 0:
        save_file(state, tmp_path / "model.safetensors")
    dist.barrier()
    model = _model(ours(mesh=mesh["dp"]), mesh)
    fsdp.load_safetensors(model, tmp_path)
    _assert_equal(model, expected)


def test_folders_of_torchs_become_final_files(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(4).run(_save_with_torch, tmp_path / "saved")[0]
    converted(tmp_path / "saved", tmp_path / "final", "--to", "safetensors")
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert_states_within({name: found[name] for name in expected}, expected)


def _save_with_torch(folder: Path) -> dict[str, Tensor]:
    mesh = mesh_of(2, 2)
    model, optimizer = _trained(ours(mesh=mesh["dp"]), mesh)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return full_state(model)


@on_ranks(4)
def test_values_that_come_after_sharding() -> None:
    mesh = mesh_of(2, 2)
    expected = _model(ours(mesh=mesh["dp"]), mesh)
    for way in ("materialize", "to_empty"):
        with torch.device("meta"):
            model: Any = _model(ours(mesh=mesh["dp"]), mesh)
        assert all(param.is_meta and param.device.type == "meta" for param in model.parameters())
        if way == "materialize":
            fsdp.materialize(model)
        else:
            model.to_empty(device="cpu")
            model.load_state_dict(full_state(expected))
            _assert_equal(model, expected)
        model(_inputs(mesh)).square().mean().backward()
        assert all(param.grad is not None for param in model.parameters())


@on_ranks(4)
def test_ties() -> None:
    mesh = mesh_of(2, 2)
    model = partial(gpt, mesh=mesh, vocabulary=True, tied=True)
    plan = Plan(make_model=model, task=SENTENCES, mesh=mesh["dp"])
    assert_side_by_side(plan, mesh=mesh["dp"])


# Errors


@on_ranks(4)
def test_meshes_that_do_not_fit() -> None:
    mesh = mesh_of(2, 2)
    elsewhere = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for data in (None, mesh["tp"], elsewhere):
        model = gpt(lambda module: module, mesh=mesh)
        with pytest.raises(ValueError, match=r'query.weight is a DTensor .* pass mesh=mesh\["dp"\]'):
            fsdp.fully_shard(model.layers[0], mesh=data)


# Expert parallelism: over ranks that are data-parallel for the rest of the model


@on_ranks(4)
def test_experts_that_data_parallel_ranks_have_divided_among_them() -> None:
    trained, received = [], []
    for fully_shard in (fsdp.fully_shard, torchs_fully_shard):
        with Counting(traffic := Traffic()):
            model = _with_experts(fully_shard)
        trained.append([(local(param), local(param.grad)) for param in model.parameters()])
        received.append(traffic.values)
    torch.testing.assert_close(*trained, rtol=ROUNDING, atol=ROUNDING)
    assert 0 < received[0] <= received[1]


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(4)
def test_ranks_without_experts(dim: int) -> None:
    along = partial(fsdp.fully_shard, shard_placement_fn=lambda param: Shard(min(dim, param.dim() - 1)))
    sharded, plain = (_with_experts(fully_shard, number=1) for fully_shard in (along, lambda module, mesh: module))
    for param, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param), whole(other))
        dist.all_reduce(mean := whole(other.grad) / dist.get_world_size())
        torch.testing.assert_close(whole(param.grad), mean)


def _with_experts(fully_shard: Any, number: int = 3) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    everyone = mesh["fsdp", "ep"]._flatten("dp")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Experts(mesh["ep"], number), nn.Linear(5, 2)).double()
    fully_shard(model[1], mesh=mesh["fsdp"])
    fully_shard(model, mesh=everyone)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(3, 5, dtype=torch.double)).square().mean().backward()
    return model


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(4)
def test_experts_are_clipped_by_the_norm_of_all_parameters(norm_type: float) -> None:
    model = _with_experts(fsdp.fully_shard)
    grads = [whole(param.grad) for param in model.parameters()]
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), norm_type)
    found = nn.utils.clip_grad_norm_(model.parameters(), expected.item() / 2, norm_type)
    assert_within("norm", whole(found), expected, ROUNDING)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert_within("a clipped gradient", whole(param.grad), grad / 2, 1e-5)


@pytest.mark.parametrize(("norm_type", "numbers"), [(2.0, 1), (float("inf"), 2)], ids=["sum", "and-whether-nan"])
@on_ranks(2)
def test_a_norm_is_added_up_once(norm_type: float, numbers: int) -> None:
    model: Any = fsdp.fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with Counting(traffic := Traffic()):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    assert traffic.values == numbers * 4
