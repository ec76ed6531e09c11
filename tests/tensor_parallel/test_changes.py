"""What users do with parallel models between steps: copies, averages, new values, ignored and grouped parameters."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp import EMA, fully_shard
from fsdp.distributed.dtensor import MeshPart, full_tensor, local_part
from tests.helpers.equality import assert_close_state, assert_same_state
from tests.helpers.module_kinds import FORMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import sgd_with_momentum
from tests.helpers.tensor_parallel import SENTENCES, assert_parallel_parity, gpt, mesh_of, over_data, own_rows


def step(model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or sgd_with_momentum(model.parameters())
    inputs, targets = own_rows(mesh)(*SENTENCES.batch(torch.Generator().manual_seed(0), 4))[0]
    SENTENCES.loss(model(inputs), targets).backward()
    optimizer.step()


def query(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("query"))


@on_ranks(4)
def test_copies_train_alike() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh, kind="sequence")
    step(model, mesh)  # used before it is copied
    copied = copy.deepcopy(model)
    assert_same_state(copied.state_dict(), model.state_dict())
    before = model.state_dict()
    step(copied, mesh)
    assert_same_state(model.state_dict(), before)
    model.zero_grad()
    step(model, mesh)
    assert_same_state(copied.state_dict(), model.state_dict())


@on_ranks(4)
def test_an_average_follows_the_local_parts() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    first = model.state_dict()
    ema = EMA(model, 0.5)
    ema.update_parameters(model)
    step(model, mesh)
    ema.update_parameters(model)
    sharded_state = model.state_dict()
    for name, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, (first[name] + sharded_state[name]) / 2)


@on_ranks(2)
def test_pickling_is_refused() -> None:
    mesh = mesh_of(1, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"DTensors.*state_dict\(\)"):
        torch.save(model, io.BytesIO())


@parametrize_pairs(at_most=3, options=FORMS, spread=[False, True])
@on_ranks(4)
def test_new_values_that_are_assigned_between_steps_are_kept(options: dict[str, Any], spread: bool) -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh, **options), mesh=mesh)
    optimizer = sgd_with_momentum(model.parameters())
    value = torch.arange(64.0).view(8, 8) / 64
    query(model).weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(0)]) if spread else value)
    step(model, mesh, optimizer)
    plain = gpt()
    query(plain).weight = nn.Parameter(value)
    optimizer = sgd_with_momentum(plain.parameters())
    inputs, targets = SENTENCES.batch(torch.Generator().manual_seed(0), 4)
    SENTENCES.loss(plain(inputs), targets).backward()
    optimizer.step()
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1.3e-6, atol=1e-5)


@on_ranks(4)
def test_a_module_inside_of_a_unit_is_loaded_by_itself() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    value = torch.arange(64.0).view(8, 8)
    query(model).load_state_dict({"weight": value})
    assert torch.equal(model.state_dict()["layers.0.query.weight"], value)


# Ignored, and grouped by a key


@pytest.mark.parametrize(("kind", "norm_type"), [("heads", 2.0), ("sequence", torch.inf)])
@on_ranks(4)
def test_ignored_dtensors_are_clipped_with_the_rest(kind: str, norm_type: float) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(2, 2)
    inputs, targets = SENTENCES.batch(torch.Generator().manual_seed(0), 2)  # alike on all ranks: nobody averages

    def ignoring(module: nn.Module) -> nn.Module:
        ignored = [param for name, param in module.named_parameters() if "query" in name or "norms.0" in name]
        return over_data(mesh, ignored_parameters=ignored)(module)

    model, plain = gpt(ignoring, mesh=mesh, kind=kind), gpt()
    assert isinstance(query(model).weight, DTensor)
    for each in (model, plain):
        SENTENCES.loss(each(inputs), targets).backward()
    norm = model.clip_grad_norm_(1e-2, norm_type)  # type: ignore[operator]
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e-2, norm_type))
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=1.0, foreach=False).step()
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1e-7, atol=1e-7)


def by_kind(name: str, param: nn.Parameter) -> str:
    return "matrix" if param.dim() > 1 else "vector"


@on_ranks(4)
def test_groups_by_key_train_as_one_process() -> None:
    mesh = mesh_of(2, 2)
    options = {"group_by": by_kind}
    assert_parallel_parity(mesh, sgd_with_momentum, model={"kind": "sequence"}, options=options, clip=0.3)


# Collectives of DTensors' own


@on_ranks(2)
def test_a_gradient_that_is_still_being_summed_is_awaited() -> None:
    mesh = mesh_of(1, 2)["tp"]
    part = MeshPart.of(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    assert part is not None
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    gradient = part.gradient(partial.redistribute(placements=[Replicate()], async_op=True))
    assert type(gradient) is Tensor
    assert torch.equal(gradient, torch.full((3,), 2.0))


# Written in place, while unsharded weights are kept


def by_data(param: nn.Parameter) -> None:
    param.data.mul_(2)


def by_copying_data(param: nn.Parameter) -> None:
    param.data.copy_(2 * param.data)


def through_the_local_tensor(param: nn.Parameter) -> None:
    with torch.no_grad():
        local_part(param).mul_(2)


def through_data_of_the_local_tensor(param: nn.Parameter) -> None:
    local_part(param.data).mul_(2)


WRITES = [by_data, by_copying_data, through_the_local_tensor, through_data_of_the_local_tensor]


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(4)
def test_what_is_written_in_place_while_weights_are_unsharded_is_kept(door: str) -> None:
    mesh = mesh_of(2, 2)
    wrap = over_data(mesh, use_orig_params=True, reshard_after_forward=False)
    if door == "fully_shard":
        wrap = partial(fully_shard, mesh=mesh["dp"], reshard_after_forward=False)
    model, plain = gpt(wrap, mesh=mesh), gpt()
    shard = next(param for name, param in model.named_parameters() if name.endswith("query.weight"))
    inputs, _ = SENTENCES.batch(torch.Generator().manual_seed(0), 4)
    for write in WRITES:
        for written in ("leaf", "shard"):
            model(inputs)
            write(query(model).weight if written == "leaf" else shard)
            with torch.no_grad():
                query(plain).weight.mul_(2)
                torch.testing.assert_close(model(inputs), plain(inputs), msg=f"{write} {written}")
    saved = next(value for name, value in model.state_dict().items() if name.endswith("query.weight"))
    torch.testing.assert_close(full_tensor(saved), query(plain).weight.detach())


class Clamped(nn.Linear):
    """A linear layer that keeps its weights small by itself."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(inputs)


@on_ranks(4)
def test_what_a_forward_writes_through_data_is_kept() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    plain = nn.Sequential(Clamped(8, 4), nn.Linear(4, 2))
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    inputs = torch.randn(3, 8)
    for each in (model, plain):
        each(inputs).sum().backward()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full_tensor(model.state_dict()[name]), value, msg=name)
