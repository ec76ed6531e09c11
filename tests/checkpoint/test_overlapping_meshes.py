"""`fsdp.save` and `fsdp.load` of modules and `DTensor`s on several meshes: inside of one another, or crossing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from tests.helpers.checkpoint_models import counted_writes, stored_state
from tests.helpers.dtensor_twins import whole
from tests.helpers.equality import assert_same_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool


class Spread(nn.Module):
    """A weight, whose rows may be on a mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        weight = torch.randn(5, 3)
        self.weight = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.T


def grid(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


def build(seed: int, *meshes: DeviceMesh) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), *map(Spread, (*meshes, None, None)[:2]), nn.Linear(7, 3))


def shard_inside_over(inner: DeviceMesh, outer: DeviceMesh, seed: int) -> nn.Module:
    model = build(seed)
    fsdp.fully_shard(model[1], mesh=inner)
    return fsdp.fully_shard(model, mesh=outer)


def shard_beside(seed: int, mesh: DeviceMesh, *others: DeviceMesh) -> nn.Module:
    """Weights on other meshes are left as they are."""
    model = build(seed, *others)
    ignored = {spread.weight for spread, _ in zip(model[1:], others, strict=False)}
    return fsdp.fully_shard(model, mesh=mesh, ignored_params=ignored)


def all_inside_pairs(seed: int) -> nn.Module:
    return shard_inside_over(grid(4), grid(2, 2)["inner"], seed)


def all_inside_replicas(seed: int) -> nn.Module:
    return shard_inside_over(grid(4), grid(2, 2), seed)


def replicas_inside_all(seed: int) -> nn.Module:
    return shard_inside_over(grid(2, 2), grid(4), seed)


def replicas_inside_turned_ones(seed: int) -> nn.Module:
    turned = DeviceMesh("cpu", grid(2, 2).mesh.T.contiguous())
    return shard_inside_over(turned, grid(2, 2), seed)


def all_inside_one(seed: int) -> nn.Module:
    return shard_inside_over(grid(3), grid(3, 1)["inner"], seed)


def all_beside_replicas(seed: int) -> nn.Module:
    return shard_beside(seed, grid(2, 2), grid(4))


def all_and_pairs_beside_pairs(seed: int) -> nn.Module:
    mesh = grid(2, 2)
    return shard_beside(seed, mesh["outer"], mesh["inner"], grid(4))


def both_pairs_beside_all(seed: int) -> nn.Module:
    mesh = grid(2, 2)
    return shard_beside(seed, grid(4), mesh["inner"], mesh["outer"])


ON_FOUR = [
    all_inside_pairs,
    all_inside_replicas,
    replicas_inside_all,
    replicas_inside_turned_ones,
    all_beside_replicas,
    all_and_pairs_beside_pairs,
    both_pairs_beside_all,
]


@pytest.mark.parametrize("make", [*ON_FOUR, all_inside_one])
def test_meshes_inside_of_one_another(ranks: RankPool, tmp_path: Path, make: Callable[[int], nn.Module]) -> None:
    written = ranks(3 if make is all_inside_one else 4).run(_save_and_load, tmp_path / "run", make)
    assert_same_state(stored_state(tmp_path / "run"), stepped(build(1))[0].state_dict())
    assert sum(written) == 2 * sum(param.nbytes for param in build(1).parameters()), "each element is written once"
    fsdp.checkpoint.verify(tmp_path / "run")
    if make is ON_FOUR[0]:  # the tensors in files are the same of all
        for world_size in (1, 2):
            ranks(world_size).run(_load_elsewhere, tmp_path / "run")


def stepped(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer that has taken a step whose momentum is half of the weights before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    for param in model.parameters():
        param.grad = param.detach() / 2
    optimizer.step()
    return model, optimizer


def _save_and_load(folder: Path, make: Callable[[int], nn.Module]) -> int:
    with counted_writes() as sizes:
        fsdp.save(folder, *stepped(make(1)))
    _load(folder, *stepped(make(0)))
    return sum(sizes)


def _load_elsewhere(folder: Path) -> None:
    _load(folder, *stepped(fsdp.fully_shard(build(0))))


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    fsdp.load(folder, model, optimizer)
    found, expected = (whole_state(*both) for both in ((model, optimizer), stepped(build(1))))
    assert_same_state(found, expected)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    momenta = {
        f"momentum of {name}": whole(optimizer.state[param]["momentum_buffer"])
        for name, param in model.named_parameters()
    }
    return {name: whole(value) for name, value in model.state_dict().items()} | momenta


@on_ranks(6, grace=1)
def test_meshes_that_cross_are_named(tmp_path: Path) -> None:
    """Of six ranks, each pair has ranks of two triples."""
    folder = tmp_path / "run"
    one, other = (rf"{name} \(over ranks \[(\d, )+\d\]\)" for name in (r"0\.weight", r"1\.weight"))
    with pytest.raises(NotImplementedError, match=f"{one} and {other} .* Create all meshes with a single init"):
        fsdp.save(folder, shard_beside(1, grid(2, 3)["inner"], grid(3, 2)["inner"]))
    assert not folder.exists()
