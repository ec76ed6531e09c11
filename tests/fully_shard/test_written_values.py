"""Values that users write to the `DTensor`s of `fully_shard`, in whatever way, are those that modules compute with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp
from fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fsdp.distributed.gathered_part import LEAST_TORCH
from tests.helpers.dtensor_twins import local
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.forms import FORMS, full_state, sharded
from tests.helpers.models import Net
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import Counting, Traffic

ROWS = 5  # of 2 or 3 ranks: never as many for each, and on 4 ranks less than two


def net() -> nn.Module:
    return Net(lambda net, x: net.exit(torch.tanh(net.inner(x))), inner=nn.Linear(ROWS, ROWS), exit=nn.Linear(ROWS, 3))


def _inputs() -> Tensor:
    return torch.linspace(-1, 1, 2 * ROWS, dtype=torch.float64).view(2, ROWS)


def _net() -> Any:
    return seeded(net).double()


# Ways to write all of a model's parameters. Each does the same to the plain model. The parameters are those that an
# optimizer was given: after a forward with gradients, modules list unsharded ones until backward, as torch's do.

Write = Callable[[nn.Module, list[Any]], None]


def foreach(model: nn.Module, params: list[Any]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(params, 0.5)


def foreach_of_data(model: nn.Module, params: list[Any]) -> None:
    torch._foreach_add_([param.data for param in params], 0.25)


def foreach_detached(model: nn.Module, params: list[Any]) -> None:
    values = [param.detach() for param in params]
    torch._foreach_lerp_(values, [torch.zeros_like(value) for value in values], 0.5)


def data_assigned(model: nn.Module, params: list[Any]) -> None:
    for param in params:
        param.data = param.data * 0.5 + 0.1


def data_swapped(model: nn.Module, params: list[Any]) -> None:
    kept = [param.data for param in params]
    for param in params:
        param.data = param.data + 1
    with torch.no_grad():
        model(_inputs())
    for param, before in zip(params, kept, strict=True):
        param.data = before


def local_numpy(model: nn.Module, params: list[Any]) -> None:
    for param in params:
        array = local(param).detach().numpy()
        array *= 0.5


def sent_alone(model: nn.Module, params: list[Any]) -> None:
    for param in params:
        other = local(param).detach() * 3
        dist.all_reduce(other, group=_alone())
        local(param).detach().numpy()[...] = other.numpy()


def _alone() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


WRITES = [foreach, foreach_of_data, foreach_detached, data_assigned, data_swapped, local_numpy, sent_alone]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@parametrize_pairs(form=FORMS[1:], kept=[True, False], grad=[False, True], world_size=[2, 3])
@on_ranks("world_size")
def test_written_parameters_are_computed_with(write: Write, form: str, kept: bool, grad: bool) -> None:
    plain = _net()
    model = sharded(_net(), form, (nn.Linear,), reshard_after_forward=not kept)
    params = {each: list(each.parameters()) for each in (model, plain)}
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            assert_close(model(_inputs()), plain(_inputs()), "the output before")
        for each, own in params.items():
            write(each, own)
        with torch.set_grad_enabled(grad):
            assert_close(model(_inputs()), plain(_inputs()), "the output")
    assert_close_state(full_state(model), plain.state_dict())
    for each, own in params.items():
        each(_inputs()).sum().backward()
        torch.optim.SGD(own, lr=0.1).step()
    assert_close_state(full_state(model), plain.state_dict())


def halve_each(params: list[Any]) -> None:
    for param in params:
        param.detach().mul_(0.5)


def halve_together(params: list[Any]) -> None:
    torch._foreach_mul_([param.detach() for param in params], 0.5)


@pytest.mark.parametrize("halve", [halve_each, halve_together])
@parametrize_pairs(form=FORMS[1:], grad=[False, True], world_size=[1, 2, 3])
@on_ranks("world_size")
def test_a_forward_writes_parameters_of_units_that_it_calls_afterwards(
    form: str, halve: Callable[[list[Any]], None], grad: bool
) -> None:
    # As RWKV does in its first forward in eval(), and MoCo for the averages of its other encoder. The all-gather of
    # the first such unit is in flight by then.
    written: dict[nn.Module, list[Any]] = {}

    def halve_first(own: nn.Module, x: Tensor) -> Tensor:
        if own in written:
            halve(written[own])
        return own.exit(torch.tanh(own.inner(x)))  # type: ignore[no-any-return, operator]

    def made() -> nn.Module:
        return Net(halve_first, inner=nn.Linear(ROWS, ROWS), exit=nn.Linear(ROWS, 3))

    plain, inner = seeded(made).double(), seeded(made).double()
    model = sharded(inner, form, (nn.Linear,))
    params = {own: list(each.parameters()) for own, each in ((plain, plain), (inner, model))}
    for step in range(3):
        written |= params if step else {}
        with torch.set_grad_enabled(grad or not step):
            outputs = model(_inputs()), plain(_inputs())
        assert_close(*outputs, f"the output of step {step}")
        if outputs[0].requires_grad:
            for output, own in zip(outputs, (inner, plain), strict=True):
                output.sum().backward()
                torch.optim.SGD(params[own], lr=0.1).step()
    assert_close_state(full_state(model), plain.state_dict())


SINGLE = {"mixed_precision": MixedPrecision(param_dtype=torch.float32)}
KEPT_COPIES: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("flat", SINGLE | {"reshard_after_forward": False}),
    "orig": ("orig", SINGLE | {"reshard_after_forward": False}),
    "rows": ("rows", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32), "reshard_after_forward": False}),
    "replicas": ("flat", SINGLE | {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "replicas of orig": ("orig", SINGLE | {"sharding_strategy": ShardingStrategy.NO_SHARD}),
}


@parametrize_pairs(kept=list(KEPT_COPIES), world_size=[2, 1])
@on_ranks("world_size")
def test_copies_in_another_dtype_follow_what_is_written(kept: str) -> None:
    # Without shards, too, the model computes with a copy in the other dtype, which is kept from forward to forward.
    plain = _net()
    form, options = KEPT_COPIES[kept]
    model = sharded(_net(), form, (nn.Linear,), **options)
    params = [list(each.parameters()) for each in (model, plain)]
    for _ in range(2):
        with torch.no_grad():
            outputs = model(_inputs()), plain(_inputs())
        assert_close(outputs[0].double(), outputs[1], "the output", rtol=1e-4, atol=1e-4)
        for own in params:
            torch._foreach_mul_([param.data for param in own], 0.5)


@on_ranks(3)
def test_a_value_that_one_rank_has_written_is_gathered_by_all() -> None:
    model = fully_shard(_net())
    weight = model.exit.weight
    with torch.no_grad():
        before = model(_inputs())
    if dist.get_rank() == 1:
        torch._foreach_mul_([weight.to_local().detach()], 3.0)
    with torch.no_grad():
        after = model(_inputs())
    assert not torch.equal(before, after)
    plain = _net()
    plain.load_state_dict(full_state(model))
    assert_close(after, plain(_inputs()))


@on_ranks(2)
def test_parameters_that_nobody_has_written_are_not_gathered_again() -> None:
    model = fully_shard(_net())
    with torch.no_grad():
        model(_inputs())
        traffic = Traffic()
        with Counting(traffic):
            model(_inputs())
    assert traffic.values == 0


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_averages_of_models_compute_with_what_they_save(form: str) -> None:
    student = sharded(_net(), form)
    teachers: list[Any] = [
        AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
        AveragedModel(student),
        fsdp.EMA(student, decay=0.5),
    ]
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for _ in range(3):
        for teacher in teachers:
            with torch.no_grad():
                found = teacher(_inputs())
            plain = _net()
            plain.load_state_dict(full_state(teacher.module))
            assert_close(found, plain(_inputs()), type(teacher).__name__)
        student(_inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for teacher in teachers:
            teacher.update_parameters(student)


# Parts along the sharded dimension

needs_dispatch = pytest.mark.skipif(
    torch.__version__ < LEAST_TORCH, reason="before, torch does not dispatch to subclasses of DTensor"
)


def one_row(weight: Tensor) -> None:
    weight[1].zero_()


def rows_of_data(weight: Tensor) -> None:
    weight.data[1:4].fill_(7.0)


def chunks(weight: Tensor) -> None:
    for number, chunk in enumerate(weight.chunk(2)):
        chunk.fill_(float(number))


def split(weight: Tensor) -> None:
    weight.split([2, 1, 2])[2].mul_(3.0)


def narrowed_twice(weight: Tensor) -> None:
    weight.narrow(0, 1, 3)[1:2].add_(1.0)


def transposed(weight: Tensor) -> None:
    weight.t()[:, 2:4].mul_(2.0)


def row_and_column(weight: Tensor) -> None:
    weight[3][1:3].fill_(5.0)


def column(weight: Tensor) -> None:
    weight[:, 1].fill_(4.0)


def diagonal(weight: Tensor) -> None:
    weight.diagonal().fill_(9.0)


def after_another_write(weight: Tensor) -> None:
    row = weight[2]
    weight.mul_(2.0)
    row.zero_()


def identity(weight: Tensor) -> None:
    nn.init.eye_(weight)


PARTS = [
    one_row,
    rows_of_data,
    chunks,
    split,
    narrowed_twice,
    transposed,
    row_and_column,
    column,
    diagonal,
    after_another_write,
    identity,
]


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("mesh", [(1,), (3,), (2, 2)], ids=str)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_what_is_written_between_unshard_and_reshard_is_kept(mesh: tuple[int, ...], used: bool) -> None:
    plain, model = _net(), _net()
    fully_shard(model, mesh=init_device_mesh("cpu", mesh))
    if used:
        assert_close(model(_inputs()), plain(_inputs()))
    model.unshard()
    with torch.no_grad():
        for each in (model, plain):
            each.inner.weight += each.inner.bias.outer(each.inner.bias)  # as adapters are merged into their base
            each.exit.bias.zero_()
    model.reshard()
    assert_close_state(full_state(model), plain.state_dict())
    assert_close(model(_inputs()), plain(_inputs()))


@on_ranks(2)
def test_what_is_written_to_unsharded_parameters_is_in_state_dicts_and_copies() -> None:
    plain, model = _net(), _net()
    fully_shard(model)
    with torch.no_grad():
        model(_inputs())  # which leaves the outermost module unsharded
        for each in (model, plain):
            each.exit.bias.fill_(3.0)
    assert_close_state(full_state(model), plain.state_dict())
    with torch.no_grad():
        for each in (model, plain):
            each.exit.bias.fill_(4.0)
    assert_close_state(full_state(copy.deepcopy(model)), plain.state_dict())
    assert_close_state(full_state(model), plain.state_dict())


@needs_dispatch
@parametrize_pairs(at_most=len(PARTS), write=PARTS, world_size=[2, 4])
@on_ranks("world_size")
def test_parts_of_parameters_are_written(write: Callable[[Tensor], None]) -> None:
    plain = _net()
    model = fully_shard(_net())
    weight = model.inner.weight  # after the forward, the module has the unsharded parameter here
    with torch.no_grad():
        model(_inputs())
        write(weight)
        write(plain.inner.weight)
        assert_close(model(_inputs()), plain(_inputs()))
    assert_close_state(full_state(model), plain.state_dict())


@needs_dispatch
@pytest.mark.parametrize("write", [one_row, transposed, row_and_column, column], ids=lambda write: write.__name__)
@on_ranks(2)
def test_parts_of_columns_are_written(write: Callable[[Tensor], None]) -> None:
    plain = _net()
    model = fully_shard(_net(), shard_placement_fn=lambda param: Shard(param.dim() - 1))
    with torch.no_grad():
        write(model.inner.weight)
        write(plain.inner.weight)
    assert_close_state(full_state(model), plain.state_dict())


@needs_dispatch
@pytest.mark.parametrize("kind", ["replicas", "tensor parallel"])
@on_ranks(4)
def test_parts_are_written_on_two_dimensional_meshes(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    plain, model = _net(), _net()
    if kind == "tensor parallel":
        model = parallelize_module(model, mesh["two"], {"inner": ColwiseParallel(), "exit": RowwiseParallel()})
        model = fully_shard(model, mesh=mesh["one"])
    else:
        model = fully_shard(model, mesh=mesh)
    for write in (one_row, rows_of_data, diagonal, identity):
        with torch.no_grad():
            for name in ("inner", "exit"):
                for each in (model, plain):
                    write(getattr(each, name).weight)
        assert_close_state(full_state(model), plain.state_dict())


@needs_dispatch
@on_ranks(3)
def test_an_embedding_resets_its_padding() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 3))
    fully_shard(model)
    model.to_empty(device="cpu")
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    weight = full_state(model)["0.weight"]
    assert (weight[1] == 0).all()
    assert (weight[[0, 2, 3, 4, 5, 6]] != 0).all()


@on_ranks(2)
def test_a_part_that_is_only_read_is_an_ordinary_dtensor() -> None:
    model, plain = fully_shard(_net()), _net()
    row = model.inner.weight[1]
    assert torch.equal(row.full_tensor(), plain.inner.weight[1])
    (row.square().sum().full_tensor()).backward()
    plain.inner.weight[1].square().sum().backward()
    assert_close(model.inner.weight.grad.full_tensor(), plain.inner.weight.grad)


@on_ranks(2)
def test_other_dtensors_are_left_alone() -> None:
    fully_shard(_net())
    mesh = init_device_mesh("cpu", (2,))
    other = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    assert type(other[1]) is type(other)


# What cannot be kept is an error


@pytest.mark.parametrize("change", [Tensor.half, partial(torch.flatten)], ids=["dtype", "shape"])
@on_ranks(2)
def test_data_that_does_not_fit_is_an_error(change: Callable[[Tensor], Tensor]) -> None:
    model = fully_shard(nn.Linear(4, 4).double())
    model.weight.data = change(model.weight.data)
    with pytest.raises(RuntimeError, match=r"weight: its \.data was replaced by"):
        model(torch.ones(2, 4, dtype=torch.float64))


@on_ranks(2)
def test_a_plain_tensor_as_data_is_an_error() -> None:
    """torch would drop its values, as those of `vector_to_parameters`."""
    model, values = fully_shard(nn.Linear(4, 4)), torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"plain tensor of shape \(4, 4\).*distribute_tensor\(value, "):
        model.weight.data = values
    with pytest.raises(ValueError, match="plain tensor"):
        nn.utils.vector_to_parameters(torch.ones(20), model.parameters())
    model.weight.data = distribute_tensor(values, model.weight.device_mesh, model.weight.placements)
    assert torch.equal(model.weight.full_tensor(), values)


@pytest.mark.parametrize("form", FORMS[1:])
@on_ranks(2)
def test_swapped_parameters_are_refused(form: str) -> None:
    model = sharded(_net(), form)
    weight = dict(model.named_parameters())["inner.weight"]
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))
    with pytest.raises(RuntimeError, match=r"weight: torch.utils.swap_tensors has replaced its shard"):
        model(_inputs())
