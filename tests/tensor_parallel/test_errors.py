"""What cannot be done with parameters that are `DTensor`s is an error that names the parameter and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp
from fsdp import FlattenParamsWrapper, FullyShardedDataParallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.tensor_parallel import SENTENCES, gpt, mesh_of, over_data, perceptron


class Holder(nn.Module):
    """A module with one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@on_ranks(4)
def test_a_group_that_holds_the_tensor_ranks_is_refused() -> None:
    mesh = mesh_of(2, 2)
    module = Holder(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)]))
    for group in (None, mesh["tp"].get_group()):
        with pytest.raises(ValueError, match=r"weight is a DTensor .*Shard\(dim=0\) over tp.*mesh\[\"dp\"\]"):
            FullyShardedDataParallel(module, group)
    module = Holder(distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(0)]))
    with pytest.raises(ValueError, match=r"DTensors on the other dimensions only, mesh\[\"tp\"\]"):
        over_data(mesh)(module)
    assert isinstance(module.weight, DTensor)  # as it was


@on_ranks(4)
def test_a_group_that_mixes_different_parts_is_found_by_the_ranks() -> None:
    mesh = mesh_of(2, 2)
    # Rank 0 has the first half and rank 3 the second: of equal shapes, so that nothing else would tell.
    across = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    module = nn.Sequential(nn.Linear(2, 2), Holder(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)])))
    model = FullyShardedDataParallel(module, across[dist.get_rank() in (1, 2)])
    with pytest.raises(RuntimeError, match=r"weight \(of \[4, 2\], Shard\(dim=0\) over tp of 2, at \[1\]\)"):
        model.state_dict()


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)], ids=str)
@on_ranks(4)
def test_other_placements_are_refused(placement: Placement) -> None:
    mesh = mesh_of(2, 2)
    module = Holder(DTensor.from_local(torch.ones(4, 2), mesh["tp"], [placement], run_check=False))
    with pytest.raises(TypeError, match=r"weight is a DTensor with placements .*Redistribute it before sharding"):
        over_data(mesh)(module)


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    groups = [dist.new_group([rank]) for rank in range(3)]
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    weight = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match=r"weight is a DTensor .* rank 2 is not in that mesh"):
            FullyShardedDataParallel(Holder(weight), groups[2])


@on_ranks(2)
def test_a_mesh_in_another_order_than_its_ranks_is_refused() -> None:
    mesh = DeviceMesh("cpu", [1, 0])
    module = Holder(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None))
    lone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"weight is a DTensor on .*, whose ranks are not in ascending order"):
        FullyShardedDataParallel(module, lone)


@on_ranks(2)
def test_a_mesh_of_another_device_is_refused() -> None:
    mesh = mesh_of(1, 2)
    module = Holder(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match="weight is a DTensor on a mesh of cpu but the module computes on meta"):
        over_data(mesh, compute_device="meta")(module)
    model = over_data(mesh)(module)
    with pytest.raises(ValueError, match="mesh of cpu: the module cannot be moved to meta"):
        model.to("meta")
    assert model.state_dict()["weight"].shape == (4, 2)


@on_ranks(2)
def test_flattening_without_sharding_is_for_plain_parameters() -> None:
    module = Holder(distribute_tensor(torch.ones(4, 2), mesh_of(1, 2)["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match="flattens plain parameters, got a DTensor"):
        FlattenParamsWrapper(module)
    assert isinstance(module.weight, DTensor)


@on_ranks(2)
def test_an_optimizer_made_before_wrapping_is_refused() -> None:
    mesh = mesh_of(1, 2)
    plain = gpt(lambda module: module, mesh=mesh)
    cut = [param for param in plain.parameters() if isinstance(param, DTensor)]
    optimizer = torch.optim.SGD(cut, lr=0.1)
    model = over_data(mesh)(plain)
    model(SENTENCES.batch(torch.Generator(), 2)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"created before the model was sharded.*query\.weight"):
        optimizer.step()


@on_ranks(4)
def test_meshes_that_overlap_in_part_have_no_common_norm() -> None:
    one = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "all"))
    other = mesh_of(2, 2)
    group = one["dp"].get_group()
    models = [perceptron(over_data(one), mesh=mesh, hidden=4, placements=[[Shard(0)]] * 2) for mesh in _two(one, other)]
    model = FullyShardedDataParallel(nn.Sequential(*models), group)
    with pytest.raises(NotImplementedError, match=r"ranks \[0, 1, 2, 3\] and \[\d, \d\].*one init_device_mesh"):
        model.clip_grad_norm_(1.0)


def _two(one: Any, other: Any) -> tuple[Any, Any]:
    return one["all"], other["tp"]


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("form", ["flat", "rows"])
@on_ranks(4)
def test_fingerprints_of_parts_are_refused(form: str, is_ignored: bool, tmp_path: Path) -> None:
    mesh = mesh_of(2, 2)
    model: Any = nn.Sequential(nn.Linear(2, 2), Holder(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)])))
    ignored = {model[1].weight} if is_ignored else set()
    if form == "flat":
        model = over_data(mesh)(model, ignored_parameters=ignored)
    else:
        fsdp.fully_shard(model, mesh=mesh["dp"], ignored_params=ignored)
    what = r": 1\.weight is tensor-parallel, .* fsdp.save into a model without tensor parallelism"
    with pytest.raises(NotImplementedError, match="fsdp.fingerprint" + what):
        fsdp.fingerprint(model)
    with pytest.raises(NotImplementedError, match="fsdp.record_fingerprints" + what):
        fsdp.record_fingerprints(model, tmp_path / "recording")
    copied: Any = nn.Sequential(Holder(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Replicate()])))
    plain: Any = nn.Sequential(Holder(torch.ones(4, 2)))
    fsdp.fully_shard(copied, mesh=mesh["dp"])
    assert fsdp.fingerprint(copied) == fsdp.fingerprint(fsdp.fully_shard(plain))
