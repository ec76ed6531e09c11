"""`dp_mesh_dims`: parameters and inputs that are `DTensor`s on all of a mesh, beside torch's."""

from __future__ import annotations

import copy
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import fsdp
from tests.helpers.dtensor_twins import (
    Plan,
    assert_side_by_side,
    assert_within,
    local,
    ours,
    seeded,
    spread_of,
    torchs,
    whole,
)
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import REGRESSION
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="torch 2.11")

Dims = fsdp.DataParallelMeshDims


@cache
def mesh_with(*names: str) -> DeviceMesh:
    """Collective. Two ranks in each of the last dimensions, and what there are more in the first one."""
    last = (2,) * (len(names) - 1)
    return init_device_mesh("cpu", (dist.get_world_size() >> len(last), *last), mesh_dim_names=names)


class OnAll(nn.Module):
    """A perceptron of `DTensor`s on all of a mesh; batches are divided over the data ranks.

    It computes on `DTensor`s, or on their local tensors: torch searches long for shardings of its operations.
    """

    def __init__(self, mesh: DeviceMesh, dims: Any, hidden: int, is_local: bool, inputs: int, wrap: Wrap) -> None:
        super().__init__()
        self.mesh, self.is_local = mesh, is_local
        self.data = [name in (*dims.shard_names, *dims.replicate_names) for name in mesh.mesh_dim_names or ()]
        layers = (nn.Linear(inputs, hidden), nn.Linear(hidden, 1))
        if is_local:
            layers = (LocalLinear(self, inputs, hidden), LocalLinear(self, hidden, 1))
        for layer, dim in zip(layers, (0, 1), strict=True):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, self._placed(Replicate(), dim)))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, self._placed(Replicate(), -dim)))
        self.layers = nn.Sequential(wrap(layers[0]), nn.Tanh(), wrap(layers[1]))

    def _placed(self, data: Placement, dim: int) -> list[Placement]:
        """Placements: over the data ranks, and over the others along a dimension of the tensor, if it is none below."""
        return [data if is_data else Shard(dim) if dim >= 0 else Replicate() for is_data in self.data]

    def to_local(self, param: DTensor) -> Tensor:
        """Return the local tensor, whose gradient is still to be summed over the data ranks."""
        places = zip(self.data, param.placements, strict=True)
        return param.to_local(grad_placements=[Partial() if is_data else place for is_data, place in places])

    def summed(self, outputs: Tensor) -> Tensor:
        """Sum over the ranks that are not data ranks."""
        placed = [Shard(0) if is_data else Partial() for is_data in self.data]
        summed = DTensor.from_local(outputs, self.mesh, placed, run_check=False)
        return summed.redistribute(placements=self._placed(Shard(0), -1)).to_local()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_local:
            return self.layers(inputs)
        outputs = self.layers(DTensor.from_local(inputs, self.mesh, self._placed(Shard(0), -1), run_check=False))
        return outputs.redistribute(placements=self._placed(Shard(0), -1)).to_local()


class LocalLinear(nn.Linear):
    """A layer of `OnAll` that computes on local tensors."""

    def __init__(self, model: OnAll, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self._model = (model,)  # which is no submodule

    def forward(self, inputs: Tensor) -> Tensor:
        (model,) = self._model
        outputs = nn.functional.linear(inputs, model.to_local(self.weight))
        return (outputs if self.out_features > 1 else model.summed(outputs)) + model.to_local(self.bias)


def on_all(
    mesh: DeviceMesh,
    dims: Any,
    wrap: Wrap = keep,
    *,
    hidden: int = 8,
    is_local: bool = True,
    inputs: int = 5,
    seed: int = 0,
) -> Any:
    return seeded(partial(OnAll, mesh, dims, hidden, is_local, inputs), wrap, seed)


def data_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """The ranks that see different batches."""
    names = (*dims.replicate_names, *dims.shard_names)
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


CASES: dict[str, tuple[tuple[str, ...], Any]] = {
    "one dimension": (("fsdp",), Dims("fsdp")),
    "hybrid": (("rep", "fsdp"), Dims("fsdp", "rep")),
    "two that are one": (("dp", "cp"), Dims(("dp", "cp"))),
    "tensors last": (("fsdp", "tp"), Dims("fsdp")),
    "tensors first": (("tp", "fsdp"), Dims("fsdp")),
    "replicas beside tensors": (("ddp", "tp"), Dims(replicate="ddp")),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_torchs(ranks: RankPool, case: str) -> None:
    ranks(4).run(_train, *CASES[case], is_local=case not in ("hybrid", "tensors last"))


# With four ranks the first dimension has one.
@pytest.mark.parametrize(
    ("world_size", "names", "dims"),
    [(8, ("rep", "fsdp", "tp"), Dims("fsdp", "rep")), (4, ("dp", "cp", "tp"), Dims(("dp", "cp")))],
    ids=["hybrid beside tensors", "two that are one beside tensors"],
)
def test_trains_in_three_dimensions(ranks: RankPool, world_size: int, names: tuple[str, ...], dims: Any) -> None:
    ranks(world_size).run(_train, names, dims)


def _train(names: tuple[str, ...], dims: Any, hidden: int = 8, is_local: bool = True, **options: Any) -> None:
    mesh = mesh_with(*names)
    make = partial(on_all, mesh, dims, hidden=hidden, is_local=is_local)
    plan = Plan(make_model=make, task=REGRESSION, mesh=data_mesh(mesh, dims), accumulate=2)
    assert_side_by_side(plan, mesh=mesh, dp_mesh_dims=dims, **options)


def _other_dim(param: Any) -> Shard | None:
    """Along the dimension that tensor parallelism leaves alone."""
    return Shard(param.dim() - 1) if local(param).shape[-1] % 2 == 0 and param.dim() > 1 else None


@pytest.mark.parametrize("options", [{"shard_placement_fn": _other_dim}, {"reshard_after_forward": False}], ids=str)
def test_options(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(4).run(partial(_train, **options), ("fsdp", "tp"), Dims("fsdp"))


@pytest.mark.parametrize("replicate", [None, "rep"], ids=str)
@on_ranks(4)
def test_parameters_of_modules_inside_may_be_on_all_of_another_mesh(replicate: str | None) -> None:
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch before 2.13 has one mesh for each module")
    init = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_init")
    mesh, dims = mesh_with("dp"), Dims("dp")
    inner, inner_dims = mesh_with(*filter(None, (replicate, "fsdp", "ep"))), Dims("fsdp", replicate)
    infos = {mesh: init._get_mesh_info(mesh, dims), inner: init._get_mesh_info(inner, inner_dims)}

    def place(param: Any) -> Any:
        return common.ShardPlacementResult(Shard(0), infos[param.device_mesh])

    def make(wrap: Wrap) -> nn.Module:
        return wrap(nn.Sequential(on_all(inner, inner_dims), on_all(mesh, dims, inputs=1)))

    options = {"mesh": mesh, "dp_mesh_dims": dims, "shard_placement_fn": place}
    assert_side_by_side(Plan(make_model=make, task=REGRESSION, mesh=mesh), **options)


@on_ranks(4)
def test_sizes_that_divide_by_nothing() -> None:
    _train(("fsdp", "tp"), Dims("fsdp"), hidden=7)


@on_ranks(4)
def test_modules_compute_with_parameters_on_all_of_the_mesh() -> None:
    mesh, dims = mesh_with("fsdp", "tp"), Dims("fsdp")
    model = on_all(mesh, dims, ours(mesh=mesh, dp_mesh_dims=dims), is_local=False)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(torch.ones(2, 5)).sum().backward()
    assert (seen[0].device_mesh, seen[0].placements) == (mesh, (Replicate(), Shard(0)))
    assert isinstance(model.layers[0].weight.grad, DTensor)


@on_ranks(4)
def test_states(tmp_path: Path) -> None:
    for (case, (names, dims)), way in zip(CASES.items(), cycle(["dcp", "whole", "fsdp"]), strict=False):
        mesh = mesh_with(*names)
        make = partial(on_all, mesh, dims)
        expected = {name: whole(value) for name, value in make(seed=1).state_dict().items()}
        mine, theirs = (make(wrap(mesh=mesh, dp_mesh_dims=dims), seed=1) for wrap in (ours, torchs))
        for name, value in theirs.state_dict().items():
            assert spread_of(mine.state_dict()[name]) == spread_of(value), case
            assert_within(name, local(mine.state_dict()[name]), local(value))
        target = make(ours(mesh=mesh, dp_mesh_dims=dims))
        if way == "dcp":
            dcp.save(mine.state_dict(), checkpoint_id=tmp_path / case)
            state = target.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / case)
            target.load_state_dict(state)
        elif way == "whole":
            target.load_state_dict(expected)
        else:
            fsdp.save(tmp_path / case, mine)
            fsdp.load(tmp_path / case, target)
        for name, value in full_state(target).items():
            assert_within(f"{name} by {way}", value, expected[name])
        copied = copy.deepcopy(mine)
        for model in (mine, copied):
            model(torch.ones(2, 5)).sum().backward()
        for param, other in zip(mine.parameters(), copied.parameters(), strict=True):
            assert_within("gradient of a copy", local(other.grad), local(param.grad))


@on_ranks(4)
def test_norms() -> None:
    torch.set_default_dtype(torch.float64)
    for names, dims in CASES.values():
        mesh = mesh_with(*names)
        model = on_all(mesh, dims, ours(mesh=mesh, dp_mesh_dims=dims))
        torch.manual_seed(data_mesh(mesh, dims).get_local_rank())
        model(torch.randn(2, 5)).sum().backward()
        for norm_type in (2.0, float("inf")):
            grads = torch.cat([whole(param.grad).flatten() for param in model.parameters()])
            expected = torch.linalg.vector_norm(grads, norm_type)
            found = nn.utils.clip_grad_norm_(model.parameters(), expected.item() / 2, norm_type)
            assert_within(f"norm {norm_type} on {names}", whole(found), expected, 1e-10)


@on_ranks(4)
def test_parameters_that_are_sharded_over_data_ranks_are_refused() -> None:
    mesh, layer = mesh_with("fsdp", "tp"), nn.Linear(4, 8, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(ValueError, match=r"weight: Expected Replicate\(\) along 'fsdp', .* got Shard"):
        fsdp.fully_shard(layer, mesh=mesh, dp_mesh_dims=Dims("fsdp"))


@on_ranks(4)
def test_ranks_that_have_built_different_models_are_told() -> None:
    mesh, dims = mesh_with("fsdp", "tp"), Dims("fsdp")

    def wrap(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            local(module.weight).add_(dist.get_rank() // 2)  # which a replicated one should not be
        return ours(mesh=mesh, dp_mesh_dims=dims)(module)

    model = on_all(mesh, dims, wrap)
    with pytest.raises(RuntimeError, match=r"other values than rank [01] of weight of unit 'layers\.0'"):
        model(torch.ones(2, 5))
