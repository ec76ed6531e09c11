"""Plain parameters that `spmd_types` annotates: local parts for modules, `DTensor`s for optimizers and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

import fsdp
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.on_ranks import on_ranks

spmd = pytest.importorskip("spmd_types")
typecheck = pytest.importorskip("spmd_types.checker").typecheck

BATCH = 12
Dims = fsdp.DataParallelMeshDims
TYPES = {
    "scale": spmd.R,  # each rank uses it for a part of the batch
    "up.weight": spmd.S(0),
    "up.bias": spmd.S(0),
    "down.weight": spmd.S(1),
    "down.bias": spmd.I,  # after the sum, the same on each rank
}
PLACED = {"scale": Replicate(), "up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


class Perceptron(nn.Module):
    """The unsharded model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(6))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(inputs * self.scale)))


class RowLinear(nn.Linear):
    """A linear layer whose ranks hold some of the inputs' weights each."""

    group: Any

    def forward(self, inputs: Tensor) -> Tensor:
        return _Sum.apply(linear(inputs, self.weight), self.group) + self.bias


class ParallelPerceptron(Perceptron):
    """Computes on the local parts over the dimension ``tp`` of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tp = mesh["tp"]
        self.down.__class__ = RowLinear
        self.down.group = self.tp.get_group()

    def forward(self, inputs: Tensor) -> Tensor:
        parts = inputs.chunk(self.tp.size())
        scaled = _Gather.apply(parts[self.tp.get_local_rank()] * self.scale, self.tp)
        return self.down(torch.tanh(self.up(_Copy.apply(scaled, self.tp.get_group()))))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        found = [torch.empty_like(value) for _ in range(mesh.size())]
        dist.all_gather(found, value.contiguous(), group=mesh.get_group())
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.mesh.size())[ctx.mesh.get_local_rank()], None


def annotated(mesh: DeviceMesh, types: Mapping[str, Any] = TYPES) -> ParallelPerceptron:
    """A model of annotated local parts."""
    model = ParallelPerceptron(mesh)
    axes = {name: spmd.MeshAxis.of(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()}
    for name, kind in types.items():
        module, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        place = PLACED.get(name, Replicate())
        local = distribute_tensor(getattr(module, attribute).detach(), mesh["tp"], [place]).to_local()
        param = nn.Parameter(local.contiguous())
        setattr(module, attribute, param)
        spmd.assert_type(param, {axes["tp"]: kind} | {axis: spmd.R for each, axis in axes.items() if each != "tp"})
    return model


def sharded(mesh: DeviceMesh, dims: Any = None) -> ParallelPerceptron:
    model = annotated(mesh)
    dims = dims or Dims("dp")
    fsdp.fully_shard(model.up, mesh=mesh, dp_mesh_dims=dims)
    fsdp.fully_shard(model.down, mesh=mesh, dp_mesh_dims=dims)
    return fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, step: int, *, data_rank: int = 0, data_ranks: int = 1) -> Tensor:
    """Return the norm of the gradients, of which a small part is kept."""
    model(batch(step).chunk(data_ranks)[data_rank]).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return full_tensor(norm)


def assert_weights_of(plain: nn.Module, model: nn.Module) -> None:
    for (name, expected), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-10, atol=1e-12, msg=name)


MESHES = {
    "tensors alone": (("dp", "tp"), (1, 2), Dims("dp")),
    "data alone": (("dp", "tp"), (3, 1), Dims("dp")),
    "tensors last": (("dp", "tp"), (2, 2), Dims("dp")),
    "tensors first": (("tp", "dp"), (2, 2), Dims("dp")),
    "replicas": (("dp", "tp"), (2, 2), Dims(replicate="dp")),
    "hybrid": (("rep", "dp", "tp"), (2, 1, 2), Dims("dp", "rep")),
    "two that are one": (("dp", "cp", "tp"), (2, 1, 2), Dims(("dp", "cp"))),
}


@pytest.mark.parametrize("case", MESHES)
@on_ranks(lambda case: prod(MESHES[case][1]))
def test_trains_as_the_unsharded_model(case: str, tmp_path: Path) -> None:
    (names, shape, dims), path = MESHES[case], tmp_path / "checkpoint"
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = [name for name in names if name != "tp"]
    data_mesh = mesh[data[0]] if len(data) == 1 else mesh[tuple(data)]._flatten("all_data")
    plain, model = Perceptron(), sharded(mesh, dims)
    optimizers = adamw(plain), adamw(model)
    where = {"data_rank": data_mesh.get_local_rank(), "data_ranks": data_mesh.size()}
    for step in range(2):
        expected, norm = train(plain, optimizers[0], step), train(model, optimizers[1], step, **where)
        torch.testing.assert_close(norm, expected)
    assert_weights_of(plain, model)
    fsdp.save(path, model, optimizers[1])
    loaded = Perceptron()
    loaded_optimizer = adamw(loaded)
    fsdp.load(path, loaded, loaded_optimizer)
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)
    again = sharded(mesh, dims)
    optimizer = adamw(again)
    fsdp.load(path, again, optimizer)
    train(plain, optimizers[0], 3)
    train(again, optimizer, 3, **where)
    assert_weights_of(plain, again)


@on_ranks(4)
def test_modules_compute_with_plain_parameters_and_optimizers_step_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(mesh)
    seen = []
    model.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(batch(0))
    (weight,) = seen
    assert not isinstance(weight, DTensor)
    assert weight.shape == (4, 6)
    assert spmd.get_local_type(weight)[spmd.MeshAxis.of(mesh.get_group("tp"))] is spmd.V
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.shape == (8, 6)
    assert model.up.weight.device_mesh == mesh
    assert model.down.weight.placements == (Shard(0), Shard(1))


@on_ranks(2)
def test_keeps_what_is_written_to_unsharded_parts() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plain, model = Perceptron(), sharded(mesh)
    model.up.unshard()
    with torch.no_grad():
        model.up.weight.mul_(2)
        plain.up.weight.mul_(2)
    model.up.reshard()
    assert_weights_of(plain, model)


@pytest.mark.parametrize("kind", ["annotated", "DTensor"])
@on_ranks(2)
def test_gradients_are_summed_over_other_dimensions_in_the_dtype_of_reductions(kind: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = _Scaled([256.0, 1.0][mesh["tp"].get_local_rank()])  # the sum is no bfloat16
    if kind == "annotated":
        spmd.assert_type(model.weight, {spmd.MeshAxis.of(mesh.get_group("tp")): spmd.R})
    else:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Replicate()]))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"), mp_policy=policy)
    model().backward()
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.full_tensor().tolist() == [257.0]


class _Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(1)), scale

    def forward(self) -> Tensor:
        is_dtensor = isinstance(self.weight, DTensor)
        weight = self.weight.to_local(grad_placements=[Partial(), Partial()]) if is_dtensor else self.weight
        return (weight * self.scale).sum()


def divided(mesh: DeviceMesh, rows: list[int], dim: int = 0) -> nn.Linear:
    """The part of a layer of five rows that a rank holds, with so many rows on each rank."""
    torch.manual_seed(0)
    model, rank = nn.Linear(6, 5, dtype=torch.float64), mesh["tp"].get_local_rank()
    for name, param in list(model.named_parameters()):
        part = nn.Parameter(param.detach().split(rows)[rank].clone())
        setattr(model, name, part)
        spmd.assert_type(part, {spmd.MeshAxis.of(mesh.get_group("tp")): spmd.S(dim % part.dim())})
    return model


@pytest.mark.parametrize(("shape", "rows"), [((2, 2), [3, 2]), ((1, 4), [2, 2, 1, 0])])
@on_ranks(4)
def test_trains_parts_of_different_sizes(shape: tuple[int, int], rows: list[int], tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Linear(6, 5, dtype=torch.float64)
    model = fsdp.fully_shard(divided(mesh, rows), mesh=mesh, dp_mesh_dims=Dims("dp"))
    for one in (plain, model):
        one(batch(0)).square().sum().backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert model.weight.shape == (5, 6)
    assert_weights_of(plain, model)
    fsdp.save(str(tmp_path / "checkpoint"), model)
    loaded = nn.Linear(6, 5, dtype=torch.float64)
    fsdp.load(str(tmp_path / "checkpoint"), loaded)
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)
    model.load_state_dict(nn.Linear(6, 5, dtype=torch.float64).state_dict())
    model.load_state_dict(plain.state_dict())
    assert_weights_of(plain, model)


@on_ranks(2)
def test_parts_that_do_not_make_up_a_dtensor_are_an_error_on_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError, match=r"weight .*\[5, 6\].*Rank 0 has a part of shape \[2, 6\].*instead of \[3, 6\]"
    ):
        fsdp.fully_shard(divided(mesh, [2, 3]), mesh=mesh, dp_mesh_dims=Dims("dp"))


@on_ranks(2)
def test_other_annotations_on_other_ranks_are_an_error() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = divided(mesh, [3, 2], dim=dist.get_rank())
    with pytest.raises(RuntimeError, match=r"different annotated parameters.*weight.*Shard\(dim=0\).*Shard\(dim=1\)"):
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"))


FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no mesh": ({"up.weight": spmd.S(0)}, None, r"up\.weight.*dp_mesh_dims"),
    "no placement": ({"up.weight": spmd.V}, Dims("dp"), r"up\.weight.*no placement"),
    "summands": ({"up.weight": spmd.P}, Dims("dp"), r"up\.weight is annotated as P.*S\(dim\), R or I"),
    "a data dimension": ({"up.weight": spmd.S(0)}, Dims("tp"), r"up\.weight.*only spmd_types\.R"),
}


@pytest.mark.parametrize("case", FAULTS)
@on_ranks(2)
def test_an_annotation_that_has_no_shards_is_an_error(case: str) -> None:
    types, dims, message = FAULTS[case]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = annotated(mesh, types)
    with pytest.raises(ValueError, match=message):
        fsdp.fully_shard(model, mesh=mesh["dp"] if dims is None else mesh, dp_mesh_dims=dims)


@on_ranks(2)
def test_a_parameter_without_annotation_beside_others_is_an_error() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = annotated(mesh, {"up.weight": spmd.S(0)})
    with pytest.raises(ValueError, match=r"bias has no annotations.*unlike weight.*as R .*as I "):
        fsdp.fully_shard(model.up, mesh=mesh, dp_mesh_dims=Dims("dp"))


@on_ranks(4)
def test_a_dimension_without_annotation_is_an_error() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Perceptron()
    spmd.assert_type(model.scale, {spmd.MeshAxis.of(mesh.get_group("dp")): spmd.R})
    with pytest.raises(ValueError, match=r"scale.*none for \['tp'\]"):
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"))


@on_ranks(2)
def test_an_annotation_over_ranks_outside_the_mesh_is_an_error() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
    model = nn.Linear(6, 4)
    for param in model.parameters():
        spmd.assert_type(param, {spmd.MeshAxis.of(mesh.get_group("cp")): spmd.R})
    with pytest.raises(ValueError, match=r"weight is annotated as R over .*no dimension of the mesh.*whole mesh"):
        fsdp.fully_shard(model, mesh=mesh["dp", "tp"], dp_mesh_dims=Dims("dp"))


@on_ranks(2)
def test_parts_on_ranks_that_do_not_rise_are_an_error() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[1, 0]]), mesh_dim_names=("dp", "tp"))
    model = annotated(mesh, {"up.weight": spmd.S(0)})
    with pytest.raises(ValueError, match=r"up\.weight.*ascending ranks"):
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"))


@on_ranks(2)
def test_a_wrapper_refuses_parts() -> None:
    model = annotated(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    with pytest.raises(NotImplementedError, match=r"scale has annotations.*fully_shard"):
        fsdp.FullyShardedDataParallel(model)


@on_ranks(4)
def test_types_are_checked_where_modules_compute() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("dp", "tp"))
    model = nn.Linear(6, 4)
    for param in model.parameters():
        spmd.assert_type(param, {tp: spmd.S(0)})
    with spmd.set_current_mesh(mesh):
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"))
    with spmd.set_current_mesh(mesh), typecheck():
        for _ in range(2):
            inputs = spmd.assert_type(torch.randn(3, 6), {dp: spmd.V, tp: spmd.R})
            assert spmd.get_local_type(model(inputs)) == {dp: spmd.V, tp: spmd.V}
        with pytest.raises(spmd.SpmdTypeError):
            model(spmd.assert_type(torch.randn(3, 6), {dp: spmd.V, tp: spmd.P}))


@on_ranks(4)
def test_types_on_another_mesh_are_left_to_type_checks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = divided(mesh, [3, 2])
    with spmd.set_current_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("all",))):
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"))
    assert model.weight.shape == (5, 6)
    with spmd.set_current_mesh(mesh), typecheck(), pytest.raises(spmd.SpmdTypeError, match="missing axis"):
        model(spmd.assert_type(batch(0), dict.fromkeys(("dp", "tp"), spmd.R)))


@on_ranks(4)
def test_a_division_in_another_order_than_the_meshes_is_an_error() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    model = nn.Linear(6, 2, bias=False)
    ep, tp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("ep", "tp"))
    spmd.assert_type(model.weight, {ep: spmd.V, tp: spmd.V}, partition_spec=spmd.PartitionSpec((tp, ep), None))
    with pytest.raises(NotImplementedError, match=r"weight.*not divided in the order of the mesh"):
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("dp"))
