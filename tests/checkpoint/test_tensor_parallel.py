"""`fsdp.save` and `fsdp.load` of models with parameters that are `DTensor`s, at any mesh, with their optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.checkpoint_models import counted_writes, stored_state, tied_state
from tests.helpers.dtensor_twins import local, ours, whole
from tests.helpers.equality import assert_same_state
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import MakeOptimizer, adamw, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import Experts, cube, gpt, mesh_of, over_data, perceptron

Shape = tuple[int, int] | None
SHAPES: list[Shape] = [(2, 2), (1, 2), (2, 1), None]
MODELS: list[dict[str, Any]] = [{"kind": "sequence"}, {"vocabulary": True}, {"vocabulary": True, "tied": True}]
WRAPS: list[dict[str, Any]] = [{"door": "fully_shard"}, {}, {"use_orig_params": True}, {"flatten_parameters": False}]


def size_of(shape: Shape) -> int:
    """Three ranks without tensor parallelism."""
    return 3 if shape is None else shape[0] * shape[1]


def made(shape: Shape, how: dict[str, Any], options: dict[str, Any], seed: int = 0) -> nn.Module:
    """Collective. A language model on a mesh of data and tensor ranks; without one, over all ranks."""
    door = options.get("door")
    options = {name: value for name, value in options.items() if name != "door"}
    if shape is None:
        return gpt(ours() if door else fully_sharded(**options), seed=seed, **how)
    mesh = mesh_of(*shape)
    return gpt(ours(mesh=mesh["dp"]) if door else over_data(mesh, **options), mesh=mesh, seed=seed, **how)


def tokens() -> Tensor:
    return torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(0))


def stepped(model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    """Collective. An optimizer that has taken a step."""
    optimizer = make_optimizer(model.parameters())
    model(tokens()).square().mean().backward()
    optimizer.step()
    return optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Collective. The state for each element, whole, of a model whose parameters optimizers see as such."""
    return {
        f"{name}/{key}": whole(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
        if value.dim()
    }


# Every rank writes what it has


@parametrize_cases(at_most=4, shape=SHAPES, loaded=SHAPES, how=MODELS, options=WRAPS, others=WRAPS)
def test_any_mesh_loads_what_any_other_has_saved(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    written = ranks(size_of(case.shape)).run(_save, tmp_path / "run", case.shape, case.how, case.options)
    expected = tied_state(partial(gpt, **case.how), seed=1)
    assert sum(written) == sum(value.nbytes for value in expected.values()), "each element is written once"
    found = stored_state(tmp_path / "run")
    assert_same_state({name: found[name] for name in expected}, expected)
    fsdp.checkpoint.verify(tmp_path / "run")
    ranks(size_of(case.loaded)).run(_load, tmp_path / "run", case.loaded, case.how, case.others)


def _save(folder: Path, shape: Shape, how: dict[str, Any], options: dict[str, Any]) -> int:
    with counted_writes() as sizes:
        fsdp.save(folder, made(shape, how, options, seed=1))
    return sum(sizes)


def _load(folder: Path, shape: Shape, how: dict[str, Any], options: dict[str, Any]) -> None:
    model = made(shape, how, options)
    loaded = fsdp.load(folder, model)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert_same_state(found, gpt(seed=1, **how).state_dict())


@parametrize_cases(at_most=4, shape=SHAPES, loaded=SHAPES, options=WRAPS)
def test_optimizers_go_on_at_another_mesh(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    # torch looks for the sharding of every operation on `DTensor`s of each size, and AdamW has many.
    make_optimizer = sgd_with_momentum if "door" in case.options else adamw
    ranks(size_of(case.shape)).run(_save_trained, tmp_path / "run", case.shape, case.options, make_optimizer)
    plain = gpt(vocabulary=True)
    optimizer = make_optimizer(plain.parameters())
    fsdp.load(tmp_path / "run", plain, optimizer)
    expected = plain.state_dict(), moments(plain, optimizer)
    assert all(bool(value.any()) for value in expected[1].values())
    for found in ranks(size_of(case.loaded)).run(_load_trained, tmp_path / "run", case.loaded, make_optimizer):
        for own, value in zip(found, expected, strict=True):
            assert_same_state(own, value)
    # And a model under other options goes on, whose optimizer shows no whole state.
    options = {} if "door" in case.options else case.options
    plain(tokens()).square().mean().backward()
    optimizer.step()
    for after in ranks(size_of(case.loaded)).run(_go_on, tmp_path / "run", case.loaded, options, make_optimizer):
        torch.testing.assert_close(after, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def _save_trained(folder: Path, shape: Shape, options: dict[str, Any], make_optimizer: MakeOptimizer) -> None:
    model = made(shape, {"vocabulary": True}, options)
    fsdp.save(folder, model, stepped(model, make_optimizer))


def _load_trained(
    folder: Path, shape: Shape, make_optimizer: MakeOptimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = made(shape, {"vocabulary": True}, {"door": "fully_shard"})
    optimizer = make_optimizer(model.parameters())
    fsdp.load(folder, model, optimizer)
    return {name: whole(value) for name, value in model.state_dict().items()}, moments(model, optimizer)


def _go_on(folder: Path, shape: Shape, options: dict[str, Any], make_optimizer: MakeOptimizer) -> dict[str, Tensor]:
    model = made(shape, {"vocabulary": True}, options)
    optimizer = make_optimizer(model.parameters())
    fsdp.load(folder, model, optimizer)
    model(tokens()).square().mean().backward()
    optimizer.step()
    return {name: whole(value) for name, value in model.state_dict().items()}


# Placements


def _second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


CUTS: dict[str, Callable[[], nn.Module]] = {
    "uneven": lambda: _perceptron(mesh_of(2, 2)["tp"], mesh_of(2, 2)["dp"], hidden=7),
    "several dimensions": lambda: _perceptron(
        cube()["a", "b"], cube()["dp"], placements=[[Shard(0), Shard(1)], [Shard(1), Shard(0)]]
    ),
    "twice the same": lambda: _perceptron(
        cube()["a", "b"], cube()["dp"], hidden=7, placements=[[Shard(1), Shard(1)], [Replicate(), Shard(0)]]
    ),
    "rows of another dimension": lambda: _perceptron(
        mesh_of(2, 2)["tp"], mesh_of(2, 2)["dp"], hidden=7, shard_placement_fn=_second_dim
    ),
}


def _perceptron(mesh: Any, data: Any, hidden: int = 8, placements: Any = None, **options: Any) -> nn.Module:
    cuts = placements or [[Shard(0)], [Shard(1)]]
    return perceptron(ours(mesh=data, **options), mesh=mesh, hidden=hidden, placements=cuts, each=True)


@pytest.mark.parametrize("cut", CUTS)
def test_placements_of_every_kind(ranks: RankPool, tmp_path: Path, cut: str) -> None:
    expected = ranks(4).run(_save_and_load_cut, tmp_path / "run", cut)[0]
    found = stored_state(tmp_path / "run")
    assert_same_state({name: found[name] for name in expected}, expected)


def _save_and_load_cut(folder: Path, cut: str) -> dict[str, Tensor]:
    model = CUTS[cut]()
    optimizer = sgd_with_momentum(model.parameters())
    for param in model.parameters():  # without a step: torch looks long for its shardings on three dimensions
        momentum = param.detach().clone()
        local(momentum).mul_(2)
        optimizer.state[param]["momentum_buffer"] = momentum
    fsdp.save(folder, model, optimizer)
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    other = CUTS[cut]()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    resumed = sgd_with_momentum(other.parameters())
    fsdp.load(folder, other, resumed)
    assert_same_state({name: whole(value) for name, value in other.state_dict().items()}, expected)
    assert_same_state(moments(other, resumed), moments(model, optimizer))
    return expected


def test_rows_of_another_dimension_without_tensor_parallelism(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(3).run(_save_second_dim, tmp_path / "run")[0]
    found = stored_state(tmp_path / "run")
    assert_same_state({name: found[name] for name in expected}, expected)


def _save_second_dim(folder: Path) -> dict[str, Tensor]:
    model = gpt(ours(shard_placement_fn=_second_dim), seed=1)
    fsdp.save(folder, model)
    return gpt(seed=1).state_dict()


@pytest.mark.parametrize("door", ["fully_shard", "wrapper"])
def test_hybrid_besides(ranks: RankPool, tmp_path: Path, door: str) -> None:
    written = ranks(8).run(_save_hybrid, tmp_path / "run", door)
    expected = _hybrid(keep, mesh=None, seed=1).state_dict()
    assert sum(written) == sum(value.nbytes for value in expected.values())
    found = stored_state(tmp_path / "run")
    assert_same_state({name: found[name] for name in expected}, expected)


def _hybrid(wrap: Wrap, mesh: Any, seed: int) -> nn.Module:
    return perceptron(wrap, mesh=mesh, hidden=8, placements=[[Shard(0)], [Shard(1)]], seed=seed)


def _save_hybrid(folder: Path, door: str) -> int:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
    data = mesh["replicate", "dp"]
    wrap = ours(mesh=data) if door == "fully_shard" else fully_sharded(process_group=data)
    with counted_writes() as sizes:
        fsdp.save(folder, _hybrid(wrap, mesh["tp"], seed=1))
    model = _hybrid(wrap, mesh["tp"], seed=0)
    fsdp.load(folder, model)
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert_same_state(found, _hybrid(keep, mesh=None, seed=1).state_dict())
    return sum(sizes)


def test_experts_beside_what_all_ranks_share(ranks: RankPool, tmp_path: Path) -> None:
    written = ranks(4).run(_save_experts, tmp_path / "run")
    assert sum(written) == sum(value.nbytes for value in stored_state(tmp_path / "run").values())


def _save_experts(folder: Path) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))

    def sharded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 5), Experts(mesh["ep"]), nn.Linear(5, 2)).double()
        fsdp.fully_shard(model[1], mesh=mesh["fsdp"])
        fsdp.fully_shard(model, mesh=mesh["fsdp", "ep"]._flatten("dp"))
        return model

    model, other = sharded(1), sharded(2)
    with counted_writes() as sizes:
        fsdp.save(folder, model)
    fsdp.load(folder, other)
    assert_same_state(*({name: whole(value) for name, value in each.state_dict().items()} for each in (other, model)))
    return sum(sizes)


def test_what_is_not_sharded_is_written_in_parts_as_well(ranks: RankPool, tmp_path: Path) -> None:
    written = ranks(4).run(_save_ignored, tmp_path / "run")
    found = stored_state(tmp_path / "run")
    assert torch.equal(found["0.weight"], torch.arange(24.0).view(6, 4))
    assert sum(written) == sum(value.nbytes for value in found.values())


def _save_ignored(folder: Path) -> int:
    mesh = mesh_of(2, 2)

    def wrapped(value: Tensor) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 4, bias=False))
        module[0].weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(1)]))
        return FullyShardedDataParallel(module, mesh["dp"].get_group(), ignored_modules=[module[0]])

    value = torch.arange(24.0).view(6, 4)
    with counted_writes() as sizes:
        fsdp.save(folder, wrapped(value))
    other = wrapped(torch.zeros(6, 4))
    fsdp.load(folder, other)
    assert torch.equal(whole(other.get_parameter("module.0.weight")), value)
    return sum(sizes)


@on_ranks(2)
def test_what_is_still_to_be_summed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    from torch.distributed.tensor import DTensor

    module = nn.Linear(4, 4, bias=False)
    value = DTensor.from_local(module.weight.detach(), mesh_of(1, 2)["tp"], [Partial()], run_check=False)
    module.weight = nn.Parameter(value)
    with pytest.raises(NotImplementedError, match=r"weight has placements .*: only Shard and Replicate can be saved"):
        fsdp.save(folder, module)


# Other ways


def test_in_the_background_and_cast(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(_save_in_background, tmp_path / "run")
    expected = gpt(seed=1).bfloat16().state_dict()
    found = stored_state(tmp_path / "run")
    assert_same_state({name: found[name] for name in expected}, expected)


def _save_in_background(folder: Path) -> None:
    model = made((2, 2), {"vocabulary": True}, {"door": "fully_shard"}, seed=1)
    with fsdp.checkpoint.Saver() as saver:
        saver.save(folder, model, dtype=torch.bfloat16)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
