"""Parameters of classes that say themselves how they are all-gathered, beside torch's `fully_shard`."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.dtensor_twins import (
    Plan,
    adamw_at_once,
    adamw_one_by_one,
    assert_at_rest,
    assert_side_by_side,
    assert_within,
    handles,
    local,
    mesh_of,
    ours,
    torchs,
    train,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.extended_tensors import InEight, InHalf, Pair, Scaled, Values, extended, padded
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.own_collectives import OwnAllGather
from tests.helpers.parity import Alone, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import mesh_of as mesh_beside
from tests.helpers.tensor_parallel import perceptron
from tests.helpers.twins import once

HALF = partial(extended, kind=InHalf, width=7)  # which no number of ranks divides
EIGHT = partial(extended, kind=InEight, width=12)
IN_HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


# Training beside torch's


# torch's sends only the first tensor in a world of one.
@pytest.mark.parametrize(
    ("make_model", "world_size"),
    [(HALF, 1), (HALF, 3), (EIGHT, 2), (EIGHT, 4)],
    ids=lambda value: value.keywords["kind"].__name__ if isinstance(value, partial) else str(value),
)
def test_training_at_every_world_size(ranks: RankPool, make_model: Any, world_size: int) -> None:
    ranks(world_size).run(_compare, {"make_model": make_model}, {})


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ({"make_optimizer": adamw_one_by_one}, {"reshard_after_forward": False}),
        ({"make_optimizer": adamw_at_once, "accumulate": 2}, {"mp_policy": IN_HALF}),
        ({"accumulate": 2, "sync_each": True, "clip": 0.1}, {"reshard_after_forward": True}),
        ({}, {"unlike": {"reshard_after_forward": 2}}),  # which torch's cannot do
        ({}, {"unlike": {"offload_policy": fsdp.CPUOffloadPolicy()}}),
    ],
)
def test_training_with_options(ranks: RankPool, plan: dict[str, Any], options: dict[str, Any]) -> None:
    ranks(2).run(_compare, {"make_model": HALF, **plan}, options)


def test_training_with_replicas(ranks: RankPool) -> None:
    ranks(4).run(_compare, {"make_model": HALF, "make_optimizer": adamw_at_once}, {"mesh": (2, 2)})


def _compare(plan: dict[str, Any], options: dict[str, Any]) -> None:
    # The optimizer steps DTensors of the class.
    assert_side_by_side(Plan(**{"rows": 4, "make_optimizer": sgd_with_momentum, **plan}), **options)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@on_ranks(lambda shape: torch.Size(shape).numel())
def test_methods_are_called_with_what_torchs_gives_them(shape: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"mesh": shape, "mp_policy": {"param_dtype": torch.bfloat16}}
    seen = []
    for wrap in (torchs(**options), ours(**options)):
        InHalf.seen.clear()
        train(Plan(make_model=partial(HALF), rows=4, steps=2), wrap)
        seen.append(set(InHalf.seen))
    assert seen[0] == seen[1]
    assert any(call[-1] is None for call in seen[1] if call[1] == "metadata")  # the first one
    assert any(call[-1] == (7, 7) for call in seen[1] if call[1] == "metadata")  # and later ones


@pytest.mark.parametrize("make_model", [HALF, EIGHT], ids=["half", "eight"])
@on_ranks(2)
def test_no_more_bytes_are_sent_than_by_torchs(make_model: Any) -> None:
    sent = []
    for wrap in (torchs(), ours()):
        model, gather = make_model(wrap), OwnAllGather()
        for layer in model.inner:
            layer.set_custom_all_gather(gather)
        once(model, INPUTS)
        sent.append(sum(numel * dtype.itemsize for _, numel, dtype, _ in gather.calls))
    assert 0 < sent[1] <= sent[0]


# Along other dimensions, and in tensor parallelism


class InColumns(InHalf):
    """Of equal parts along any dimension."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        self.seen.append((tuple(self.shape), mesh.size(), mesh.ndim, outer_size, outer_stride, mp_policy.param_dtype))
        return (self.values.bfloat16(),), "metadata"

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (come,) = outputs
        self.seen.append((come.numel(), metadata, param_dtype, type(out), None if out is None else tuple(out.shape)))
        if out is not None:
            own = local(out)
            with torch.autograd._unsafe_preserve_version_counter(own):
                own.copy_(come.view(own.shape))  # torch's gives rows as wide as a rank's
            return None
        made = come.to(param_dtype, copy=True)
        return made, (come, made)


def _last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.dim() - 1) if param.shape == (12, 12) else None


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {"mp_policy": IN_HALF}), (3, {"reshard_after_forward": False}), (4, {"mesh": (2, 2)})],
    ids=str,
)
def test_training_along_another_dimension(ranks: RankPool, world_size: int, options: dict[str, Any]) -> None:
    make_model = partial(extended, kind=InColumns, width=12)
    ranks(world_size).run(_compare, {"make_model": make_model}, {"shard_placement_fn": _last_dim, **options})


class PaddedColumns(InHalf):
    """Of any number of columns on whatever number of ranks, with a scale for each."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        scale = self.values.abs().max().clamp_min(1e-6).view(1) if self.values.numel() else torch.ones(1)
        made = self.values.new_zeros(outer_size[0], -(-outer_size[1] // mesh.size()))
        made[:, : self.values.shape[1]] = self.values / scale
        return (made, scale), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        come, scales = outputs
        each = -(-come.shape[1] // scales.numel())
        if out is None:
            out = torch.empty_like(come)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(come * scales.repeat_interleave(each)[: come.shape[1]])
        return out, (come, scales, out)


@on_ranks(1, 3)
def test_columns_that_do_not_divide_evenly() -> None:
    found = []
    for kind, options in ((PaddedColumns, {"shard_placement_fn": lambda param: Shard(param.dim() - 1)}), (None, {})):
        model: Any = extended(ours(**options), kind=kind or (lambda values: values))
        for _ in range(2):  # into new memory, and again into that
            outputs = model(INPUTS)
            outputs.sum().backward()
        found.append([outputs, *(param.grad.full_tensor() for param in model.parameters())])
    for mine, plain in zip(*found, strict=True):
        assert_within("outputs and gradients", mine, plain, 1e-5)


def _parallel(wrap: Wrap, *, mesh: DeviceMesh, each: bool = True) -> nn.Module:
    """A perceptron with local parts of the class in its two inner layers."""
    cuts = [[Shard(0)], [Shard(1)]]

    def around_parts(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            weight = module.weight
            part = DTensor.from_local(InColumns(local(weight)), weight.device_mesh, weight.placements, run_check=False)
            module.weight = nn.Parameter(part)
        return wrap(module)

    return perceptron(around_parts, mesh=mesh, hidden=8, placements=cuts, each=each)


def _other_dim(param: Any) -> Shard | None:
    """As torchtitan does: along the dimension that tensor parallelism leaves alone."""
    return Shard(1) if isinstance(param, DTensor) and param.dim() > 1 and param.placements[0] == Shard(0) else None


TWO_DIMENSIONS = [{"mp_policy": IN_HALF, "reshard_after_forward": False}, {"shard_placement_fn": _other_dim}]


@pytest.mark.parametrize("options", TWO_DIMENSIONS, ids=str)
@on_ranks(4)
def test_training_beside_tensor_parallelism(options: dict[str, Any]) -> None:
    mesh = mesh_beside(2, 2)
    seen = []
    for wrap in (torchs, ours):
        InColumns.seen.clear()
        train(Plan(make_model=partial(_parallel, mesh=mesh["tp"]), mesh=mesh["dp"]), wrap(mesh=mesh["dp"], **options))
        seen.append(set(InColumns.seen))
    assert seen[0] == seen[1]
    assert any(call[3] is nn.Parameter or issubclass(call[3], DTensor) for call in seen[1] if call[1] == "metadata")
    plan = {"make_model": partial(_parallel, mesh=mesh["tp"]), "mesh": mesh["dp"], "accumulate": 2}
    _compare(plan, {"mesh": mesh["dp"], **options})


@on_ranks(4)
def test_states_beside_tensor_parallelism(tmp_path: Path) -> None:
    mesh = mesh_beside(2, 2)
    make = partial(_parallel, mesh=mesh["tp"])
    source: Any = make(ours(mesh=mesh["dp"]))
    source(INPUTS).sum().backward()
    optimizer = sgd_with_momentum(source.parameters())
    optimizer.step()
    fsdp.save(tmp_path / "saved", source, optimizer)
    loaded, copied = make(ours(mesh=mesh["dp"])), copy.deepcopy(source)
    fsdp.load(tmp_path / "saved", loaded, sgd_with_momentum(loaded.parameters()))
    assigned = make(ours(mesh=mesh["dp"]))
    assigned.load_state_dict(source.state_dict(), assign=True)
    for model in (loaded, copied, assigned):
        assert_same_state(_values(model), _values(source))
        model(INPUTS).sum().backward()
    _assert_same_gradients(loaded, assigned)


# Beside one process


@on_ranks(1)
def test_tensors_of_several_dtypes_in_a_world_of_one() -> None:
    model, plain = EIGHT(ours()), EIGHT()
    for layer in plain.inner:  # as if each weight had been sent
        layer.register_forward_pre_hook(_quantise)
    found = []
    for each in (model, plain):
        outputs = each(INPUTS)
        outputs.sum().backward()
        found.append(outputs)
    assert torch.equal(*found)
    assert torch.equal(local(model.inner[0][0].weight.grad), plain.inner[0][0].kept.grad)


def _quantise(layer: Any, args: Any) -> None:
    weight = layer[0].weight
    sent, metadata = weight.fsdp_pre_all_gather(None)
    made, _ = weight.fsdp_post_all_gather(sent, metadata, weight.dtype)
    layer[0].kept = layer[0]._parameters["weight"] = nn.Parameter(made)


class PaddedEight(InEight):
    """Of any number of rows, on whatever number of ranks."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        (numbers, scales), metadata = super().fsdp_pre_all_gather(mesh)
        return (padded(numbers, mesh, outer_size), scales), metadata


@on_ranks(3)
def test_scales_beside_rows_that_do_not_divide_evenly() -> None:
    model, plain = extended(ours(), kind=PaddedEight), extended(kind=PaddedEight)
    found = model(INPUTS)
    found.sum().backward()
    for layer in plain.inner:
        rows = [PaddedEight(part) for part in layer[0].weight.values.split(3)]
        sent = [InEight.fsdp_pre_all_gather(each, None)[0] for each in rows]
        layer[0].weight = nn.Parameter(torch.cat([numbers * scale for numbers, scale in sent]))
    outputs = plain(INPUTS)
    outputs.sum().backward()
    assert_within("outputs", found, outputs, 1e-6)
    mine = model.inner[0][0].weight.grad.full_tensor()
    assert_within("gradient", mine, plain.inner[0][0].weight.grad, 1e-6)


@on_ranks(1)
def test_a_copy_of_what_is_unsharded_is_not_read_where_it_was_freed() -> None:
    model: Any = EIGHT(ours())
    layer = model.inner[0]
    layer.unshard()
    weight = layer[0].weight
    layer.reshard()
    with pytest.raises(RuntimeError, match="is sharded"):
        copy.deepcopy(weight) + 1


@on_ranks(2)
def test_memory_is_freed_and_autograd_does_not_read_what_was_freed() -> None:
    model: Any = EIGHT(ours())
    layer = model.inner[0]
    layer.unshard()
    weight = layer[0].weight
    assert isinstance(weight, Scaled)
    product = nn.functional.linear(torch.ones(2, 12), weight).sum()
    assert weight.numbers.untyped_storage().nbytes() == 144
    layer.reshard()
    assert weight.numbers.untyped_storage().nbytes() == weight.scales.untyped_storage().nbytes() == 0
    assert isinstance(layer[0].weight, DTensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    once(model, INPUTS)
    assert_at_rest(model)


@on_ranks(2)
def test_forwards_without_gradients_first() -> None:
    model, other = HALF(ours()), HALF(ours())
    with torch.inference_mode():
        before = model(INPUTS)
    with torch.no_grad():
        assert torch.equal(model(INPUTS), before)
    once(model, INPUTS)
    once(other, INPUTS)
    _assert_same_gradients(model, other)


def _assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert_within("gradient", local(mine.grad), local(theirs.grad))


# Copies and states


def _steps(model: Any, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for step in range(count):
        once(model, INPUTS * (step + 1))
        optimizer.step()
        optimizer.zero_grad()


def _values(model: nn.Module) -> dict[str, Tensor]:
    """This rank's rows, plain."""
    rows = {name: local(value) for name, value in model.state_dict().items()}
    return {name: (each.values if isinstance(each, Values) else each).clone() for name, each in rows.items()}


@on_ranks(2)
def test_modules_list_the_class_and_states_hold_it_as_torchs_do() -> None:
    states = [HALF(wrap).state_dict() for wrap in (ours(), torchs())]
    for (name, mine), (theirs_name, theirs) in zip(*(state.items() for state in states), strict=True):
        assert name == theirs_name
        assert type(local(mine)) is type(local(theirs))
        assert (mine.shape, mine.stride(), mine.placements) == (theirs.shape, theirs.stride(), theirs.placements)
        assert torch.equal(local(mine), local(theirs))
    assert isinstance(local(states[0]["inner.0.0.weight"]), InHalf)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_state_dicts_are_loaded(assign: bool) -> None:
    source, model = HALF(ours()), HALF(ours(), seed=9)
    model.load_state_dict(source.state_dict(), assign=assign)
    assert_same_state(_values(model), _values(source))
    plain = HALF()
    whole = {name: value.values if isinstance(value, Values) else value for name, value in plain.state_dict().items()}
    other = HALF(ours(), seed=9)
    other.load_state_dict(whole)
    assert_same_state(_values(other), _values(source))
    for each in (model, other):
        once(each, INPUTS)
    _assert_same_gradients(model, other)


@pytest.mark.parametrize("wraps", [(ours, torchs), (torchs, ours)], ids=["to_torchs", "from_torchs"])
@on_ranks(2)
def test_distributed_checkpoints(wraps: tuple[Any, Any], tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([InHalf])
    source, model = HALF(wraps[0]()), HALF(wraps[1](), seed=9)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state)
    assert_same_state(_values(model), _values(source))


class Scaling(InHalf):
    """Around the parameter that it was made of, and a number for the next all-gather, as torchao's float8 weights."""

    factor: Tensor | None = None
    used: list[Any] = []  # noqa: RUF012

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"] if self.factor is None else ["values", "factor"], self.settings

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, *args[0].settings)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        self.used.append(None if self.factor is None else self.factor.item())
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def _around_parameter(values: Tensor) -> Tensor:
    return Scaling(nn.Parameter(values))


@on_ranks(2)
def test_a_number_that_is_set_between_steps_is_there_in_the_next_all_gather() -> None:
    plain, model = (extended(fsdp.fully_shard, kind=kind) for kind in (InHalf, _around_parameter))
    optimizers = [sgd_with_momentum(each.parameters()) for each in (plain, model)]
    for factor in (None, 1.0, 2.0):
        if factor is not None:
            for layer in model.inner:  # type: ignore[union-attr]
                layer[0].weight._local_tensor.factor = torch.tensor(factor)  # type: ignore[index]
        Scaling.used.clear()
        _steps(model, optimizers[1], 1)
        assert set(Scaling.used) == {factor}
        _steps(plain, optimizers[0], 1)
        assert_same_state(_values(model), _values(plain))


# What is refused


class WithoutPost(Values):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values,), None


class OfTwoShapes(InHalf):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self.scale = self.values[:1]
        return ["values", "scale"], self.settings


class Quantised(InHalf):
    """With values in another dtype than its own."""

    @staticmethod
    def __new__(cls, values: Tensor, *settings: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float64)


class AtOneOffset(Pair):
    """As torch's own `TwoTensor`, which its tests use."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor | None = None) -> Any:
        assert second is None or first.storage_offset() == second.storage_offset()
        return Pair.__new__(cls, first, first)

    def __init__(self, first: Tensor, second: Tensor | None = None) -> None:
        super().__init__(first, first.clone() if second is None else second)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AtOneOffset, r"inner.0.0.weight is a AtOneOffset, which cannot be created around parts of one storage"),
        (WithoutPost, r"inner.0.0.weight is a WithoutPost, which has no fsdp_post_all_gather"),
        (OfTwoShapes, r"inner.0.0.weight is a OfTwoShapes: .*must name plain tensors of its shape.*freeze"),
        (Quantised, r"inner.0.0.weight is a Quantised: .*must name plain tensors"),
    ],
)
@on_ranks(1)
def test_classes_that_cannot_be_sharded(kind: Any, message: str) -> None:
    model = extended(kind=kind)
    with pytest.raises(TypeError, match=message):
        fsdp.fully_shard(model)
    assert type(model.inner[0][0].weight) is kind  # as it was found


def test_the_wrapper_refuses_the_class(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match=r"inner.0.0.weight is a InHalf parameter.* To train it, use fully_shard"):
        FullyShardedDataParallel(HALF(), Alone())
    ranks(1).run(_refuse_dtensors)


def _refuse_dtensors() -> None:
    model: Any = HALF()
    weight = DTensor.from_local(model.inner[0][0].weight.detach(), mesh_of(1), [Replicate()])
    model.inner[0][0].weight = nn.Parameter(weight)
    with pytest.raises(TypeError, match=r"inner.0.0.weight is a DTensor around a InHalf parameter"):
        FullyShardedDataParallel(model, Alone())


class Unpadded(InHalf):
    def fsdp_pre_all_gather(self, *args: Any) -> Any:  # type: ignore[override]
        return (self.values.bfloat16(),), None


class OfOddSignature(InHalf):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        return (self.values,), None


@on_ranks(1)
def test_methods_that_return_or_take_the_wrong_things() -> None:
    with pytest.raises(TypeError, match=r"fsdp_pre_all_gather of a OfOddSignature \(.*weight\) takes 2 arguments"):
        extended(ours(), kind=OfOddSignature)(INPUTS)


@on_ranks(2, 3)
def test_rows_are_padded() -> None:
    found = [extended(ours(), kind=kind)(INPUTS) for kind in (Unpadded, InHalf)]
    assert torch.equal(*found)


class Ambiguous(Values):
    """A vector with as many scales as it has elements on a rank."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values, self.values.abs()), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        raise AssertionError


@on_ranks(2)
def test_vectors_of_which_it_is_unclear_whether_they_are_rows() -> None:
    layer = nn.Linear(2, 3)
    layer.bias = nn.Parameter(Ambiguous(layer.bias.detach()))
    handle = next(one for one in handles(fsdp.fully_shard(layer)) if one.flat_param.examples[0] is not None)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"bias.* returned 2 tensors of \[1\], this rank's rows.*to \[2\]"):
            handle.unshard()


@on_ranks(2)
def test_writing_to_the_unsharded_parameter_is_an_error() -> None:
    model: Any = HALF(ours())
    layer = model.inner[0]
    layer.unshard()
    with torch.no_grad():
        layer[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"weight was written to while it was unsharded"):
        model(INPUTS)
