"""Trained parameters whose class consists of multiple tensors, with and without torch's all-gather extension."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp
from fsdp import fully_shard
from tests.helpers.dtensor_twins import handles, local, ours
from tests.helpers.extended_tensors import InEight, InHalf, Pair, SentPair, ToldPair, extended, pairs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import gathering

KINDS = [Pair, SentPair, ToldPair]
# Adam amplifies the rounding of small gradients, which depends on the processor, the more the smaller `eps` is.
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda params: torch.optim.AdamW(params, lr=0.05, eps=1e-3),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-3, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def batch(step: int, rank: int, width: int = 6) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


def both(value: Any) -> Tensor:
    """Return both tensors of a pair, or of a pair in a `DTensor` whose rows are all gathered."""
    if isinstance(value, Pair):
        return torch.stack([value.first, value.second]).detach()
    inside = local(value)
    parts = [inside.first, inside.second] if isinstance(inside, Pair) else [inside, inside]
    dim = next((each.dim for each in value.placements if each.is_shard()), None)
    shard_ranks = value.device_mesh.get_group(value.device_mesh.ndim - 1)
    if dim is None:
        return torch.stack(parts).detach()
    found: list[Any] = [None] * dist.get_world_size(shard_ranks)
    dist.all_gather_object(found, torch.stack(parts).detach().clone(), group=shard_ranks)
    return torch.cat(found, dim + 1)


def train(model: Any, optimizer: Any, world_size: int, steps: range, *, accumulate: int = 1) -> list[Tensor]:
    """Return losses; an unsharded model takes the batches of all ranks."""
    is_sharded, losses = isinstance(model, fsdp.FSDPModule), []
    for step in steps:
        for number in range(accumulate):
            if is_sharded:
                model.set_requires_gradient_sync(number == accumulate - 1)
            ranks = [dist.get_rank()] if is_sharded else range(world_size)
            for rank in ranks:
                loss = model(batch(step * accumulate + number, rank)).square().sum() / (1 if is_sharded else world_size)
                loss.backward()
                if rank == dist.get_rank():
                    losses.append(both(loss) * (1 if is_sharded else world_size))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(both(mine), both(theirs), rtol=1e-5, atol=1e-6, msg=name)


@parametrize_pairs(
    kind=KINDS, world_size=[1, 2, 3, 4], optimizer=[*OPTIMIZERS], reshards=[True, False], accumulate=[1, 2]
)
@on_ranks("world_size")
def test_pairs_train_as_the_unsharded_model(
    kind: Any, world_size: int, optimizer: str, reshards: bool, accumulate: int
) -> None:
    plain, model = pairs(kind=kind), pairs(ours(reshard_after_forward=reshards), kind=kind)
    found = []
    for each in (model, plain):
        steps = OPTIMIZERS[optimizer](each.parameters())
        found.append(train(each, steps, world_size, range(2), accumulate=accumulate))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert_same(model, plain)
    assert all(type(local(param)) is kind for param in model.parameters())


def assert_trains_alike(model: nn.Module, plain: nn.Module, optimizer: str = "adam", tolerance: float = 1e-5) -> None:
    """Collective. Losses of two steps."""
    world_size = dist.get_world_size()
    found = [train(each, OPTIMIZERS[optimizer](each.parameters()), world_size, range(2)) for each in (model, plain)]
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance / 10, check_dtype=False)


@on_ranks(4)
def test_pairs_with_replicas() -> None:
    plain, model = pairs(kind=SentPair), pairs(ours(mesh=(2, 2)), kind=SentPair)
    assert_trains_alike(model, plain, "momentum")
    assert_same(model, plain)


def _columns(param: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1)


@on_ranks(3)
def test_pairs_along_another_dimension() -> None:
    plain, model = pairs(), pairs(ours(shard_placement_fn=_columns))
    assert_trains_alike(model, plain)
    assert_same(model, plain)


@pytest.mark.parametrize("make_model", [pairs, extended])
@on_ranks(2)
def test_the_tensors_of_a_unit_are_gathered_together(make_model: Any) -> None:
    model = make_model(ours())
    inputs = torch.ones(2, 6 if make_model is pairs else 5)
    model(inputs).sum().backward()
    of_classes = [one for one in handles(model) if any(each is not None for each in one.flat_param.examples)]
    with gathering() as started, torch.no_grad():
        model(inputs)
    units = 3 if make_model is pairs else 2
    assert len(of_classes) == units
    assert len([what for what in started if any(one.name in what for one in of_classes)]) == units


class Mixed(SentPair):
    """Sends tensors of several dtypes and sizes, with scales of the rank, and an odd number of bytes."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        signs = (self.first > 0).to(torch.int8)
        scale = torch.tensor([2.0], dtype=torch.float64)
        return (signs, self.first.abs(), scale, self.second.to(torch.bfloat16)), {"rank": mesh.get_local_rank()}

    @torch.no_grad()
    def fsdp_post_all_gather(  # type: ignore[override]
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        signs, sizes, scales, second = outputs
        if metadata != {"rank": dist.get_rank()} or scales.tolist() != [2.0] * dist.get_world_size():
            raise AssertionError(f"{metadata} with {scales}")
        first, second = (signs * 2 - 1) * sizes, second.to(param_dtype)
        if out is None:
            return type(self)(first, second), (signs, sizes, scales, first, second)
        with torch.autograd._unsafe_preserve_version_counter((out.first, out.second)):
            out.first.copy_(first[: out.shape[0]])
            out.second.copy_(second[: out.shape[0]])
        return None


@on_ranks(1, 3)
def test_tensors_of_several_dtypes_and_sizes() -> None:
    world_size = dist.get_world_size()
    plain, model = pairs(kind=Mixed), pairs(ours(), kind=Mixed)
    found = []
    for each in (model, plain):
        optimizer = OPTIMIZERS["momentum"](each.parameters())
        found.append(torch.stack(train(each, optimizer, world_size, range(2))))
    torch.testing.assert_close(found[0][:, 0], found[1][:, 0], rtol=1e-5, atol=1e-6)  # of the first tensors, exact
    torch.testing.assert_close(found[0][:, 1], found[1][:, 1], rtol=2e-2, atol=2e-2)  # sent in bfloat16


class Beside(nn.Module):
    """Matrices of several classes, and a plain one."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        for layer, kind in zip(self.layers, (first, second), strict=False):
            layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@on_ranks(2)
def test_parameters_of_several_classes_are_frozen_and_thawed_apart() -> None:
    model: Any = fully_shard(Beside(InHalf, InEight))
    alone = [fully_shard(Beside(InHalf, InEight)) for _ in range(2)]
    assert len(handles(model)) == 2  # the plain parameter, and all others
    weights = [layer.weight for layer in model.layers]
    for frozen in (1, 0):
        for number, weight in enumerate(weights[:2]):
            weight.requires_grad_(number != frozen)
        for each in (model, alone[frozen]):
            each(torch.ones(2, 6)).sum().backward()
        for number, weight in enumerate(weights):
            expected = alone[frozen].layers[number].weight.grad
            assert (weight.grad is None) == (number == frozen)
            if weight.grad is not None:
                torch.testing.assert_close(local(weight.grad), local(expected))
        model.zero_grad()


@on_ranks(1)
def test_a_gradient_of_more_tensors_than_the_parameter_is_an_error() -> None:
    model: Any = fully_shard(Beside(InHalf, lambda values: Pair(values, values.clone())))
    loss = model(torch.ones(2, 6)).sum()
    with pytest.raises(RuntimeError, match=r"layers\..\.weight has a gradient of class Pair, whose 2 inner tensors"):
        loss.backward()


# Methods of single tensors


def _before(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    self.meshes.append(mesh)
    return (self.to(torch.bfloat16),), None


@torch.no_grad()
def _after(self: Any, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    (come,) = outputs
    if out is not None:
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(come[: out.shape[0]])
        return None
    made = come.to(param_dtype)
    return made, (come, made)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@on_ranks(lambda shape: torch.Size(shape).numel())
def test_methods_that_are_set_on_local_tensors(shape: tuple[int, ...]) -> None:
    world_size = dist.get_world_size()
    plain, model = pairs(), pairs(ours(mesh=shape))
    meshes: list[Any] = []
    for param in model.parameters():
        held: Any = param._local_tensor  # type: ignore[attr-defined]
        held.meshes = meshes
        held.fsdp_pre_all_gather, held.fsdp_post_all_gather = _before.__get__(held), _after.__get__(held)
    found = [train(each, OPTIMIZERS["adam"](each.parameters()), world_size, range(2)) for each in (model, plain)]
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)
    assert meshes
    assert all(each.ndim == 1 and each.size() == shape[-1] for each in meshes)


@pytest.mark.parametrize("kind", [Pair, ToldPair])
@on_ranks(2)
def test_models_of_the_meta_device(kind: Any) -> None:
    with torch.device("meta"):
        model: Any = pairs(kind=kind)
    for layer in model:
        fully_shard(layer, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    assert all(type(local(param)) is kind for param in model.parameters())
    source = pairs(ours(), kind=kind)
    model.load_state_dict(source.state_dict())
    other = pairs(ours(), kind=kind)
    found = [train(each, OPTIMIZERS["foreach"](each.parameters()), 2, range(2)) for each in (model, other)]
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2, check_dtype=False)
    assert found[0][0].dtype is torch.bfloat16


@pytest.mark.parametrize("is_late", [False, True])
@on_ranks(2)
def test_tied_pairs(is_late: bool) -> None:
    plain: Any = pairs()
    model: Any = pairs()
    plain[1][0].weight = plain[0][0].weight
    if not is_late:
        model[1][0].weight = model[0][0].weight
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if is_late:
        model[1][0].weight = model[0][0].weight
    assert_trains_alike(model, plain)


OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (4, {"reshard_after_forward": 2}),
    (2, {"offload_policy": fsdp.CPUOffloadPolicy()}),
]


@pytest.mark.parametrize(("world_size", "options"), OPTIONS, ids=["neighbours", "offload"])
@on_ranks("world_size")
def test_pairs_with_options(options: dict[str, Any]) -> None:
    plain, model = pairs(seed=3), pairs(ours(**options))
    model.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        model(batch(0, 0))
    assert_trains_alike(model, plain, "momentum")
    assert_same(model, plain)


# Copies and files


@on_ranks(2)
def test_parked_and_averaged_pairs(tmp_path: Path) -> None:
    plain, model = pairs(), pairs(ours())
    average, optimizer = fsdp.EMA(model, decay=0.5), OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, 2, range(2))
    average.update_parameters(model)
    train(plain, OPTIMIZERS["adam"](plain.parameters()), 2, range(2))
    with fsdp.parked(model, optimizer, to=tmp_path), pytest.raises(RuntimeError, match="unpark"):
        model(batch(0, 0))
    assert_same(model, plain)
    assert_same(average.module, plain)  # the first update copies


@pytest.mark.parametrize("kind", [Pair, SentPair])
@on_ranks(2)
def test_copies_train_by_themselves(kind: Any) -> None:
    world_size = dist.get_world_size()
    plain, model = pairs(kind=kind), pairs(ours(), kind=kind)
    train(model, OPTIMIZERS["adam"](model.parameters()), world_size, range(2))
    train(plain, OPTIMIZERS["adam"](plain.parameters()), world_size, range(2))
    copied, copied_plain = copy.deepcopy(model), copy.deepcopy(plain)
    train(copied, OPTIMIZERS["adam"](copied.parameters()), world_size, range(2, 4))
    assert_same(model, plain)
    train(copied_plain, OPTIMIZERS["adam"](copied_plain.parameters()), world_size, range(2, 4))
    assert_same(copied, copied_plain)
    assert type(local(next(copied.parameters()))) is kind


@pytest.mark.parametrize(("sizes", "kind", "optimizer"), [((3, 2), SentPair, "adam"), ((1, 2), Pair, "momentum")])
def test_checkpoints_at_another_world_size(
    ranks: RankPool, sizes: tuple[int, int], kind: Any, optimizer: str, tmp_path: Path
) -> None:
    ranks(sizes[0]).run(_save, tmp_path / "saved", kind, optimizer, sizes[0])
    ranks(sizes[1]).run(_load, tmp_path / "saved", kind, optimizer, sizes)


def _save(folder: Path, kind: Any, optimizer: str, world_size: int) -> None:
    model = pairs(ours(), kind=kind)
    steps = OPTIMIZERS[optimizer](model.parameters())
    train(model, steps, world_size, range(2))
    fsdp.save(folder, model, steps, generators=False)


def _load(folder: Path, kind: Any, optimizer: str, sizes: tuple[int, int]) -> None:
    model, plain = pairs(ours(), kind=kind, seed=9), pairs(kind=kind)
    mine, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](plain.parameters())
    train(plain, theirs, sizes[0], range(2))
    fsdp.load(folder, model, mine)
    assert_same(model, plain)
    found = [train(each, steps, sizes[1], range(2, 4)) for each, steps in ((model, mine), (plain, theirs))]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert_same(model, plain)


@on_ranks(2)
def test_distributed_checkpoints_of_pairs(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Pair])
    found = []
    for seed in (0, 9):
        model = pairs(ours(), seed=seed)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        if seed == 0:
            train(model, optimizer, 2, range(2))
        values, steps = get_state_dict(model, optimizer)
        state = {"model": values, "optimizer": steps}
        if seed == 0:
            dcp.save(state, checkpoint_id=tmp_path)
        else:
            dcp.load(state, checkpoint_id=tmp_path)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append(train(model, optimizer, 2, range(2, 4)))
    torch.testing.assert_close(*found)


@on_ranks(2)
def test_pairs_are_cast_and_assigned() -> None:
    model, plain = pairs(ours()), pairs()
    model.to(torch.float64)
    plain.to(torch.float64)
    mine: Any = next(model.parameters())
    theirs: Any = next(plain.parameters())
    mine.data = mine.data * 2
    with torch.no_grad():
        theirs.mul_(2)  # a class keeps its inner tensors when its ``.data`` is assigned
        for pair in (local(mine), theirs):
            pair.second.add_(1)
    inputs = batch(0, 0).double()
    torch.testing.assert_close(both(model(inputs)), both(plain(inputs)))
    assert_same(model, plain)


@on_ranks(2)
def test_files_of_pairs_do_not_load_into_other_parameters(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "saved", pairs(ours()))
    layers = [nn.Module() for _ in range(3)]
    for layer in layers:
        for name, shape in (("0", (7, 6)), ("2", (6, 7))):
            layer.add_module(name, nn.Module())
            layer.get_submodule(name).weight = nn.Parameter(torch.zeros(2, *shape))
    model = fully_shard(nn.Sequential(*layers))
    with pytest.raises(RuntimeError, match=r"0\.0\.weight in .* is 2 inner tensors, but the model's is a tensor"):
        fsdp.load(tmp_path / "saved", model)


@on_ranks(2)
def test_writes_to_unsharded_pairs_without_methods_are_kept() -> None:
    model: Any = pairs(ours())
    layer = model[0]
    layer.unshard()
    with torch.no_grad():
        layer[0].weight.mul_(2)
        layer[2].weight.second.fill_(3)
    plain: Any = pairs()
    with torch.no_grad():
        plain[0][0].weight.mul_(2)
        plain[0][2].weight.second.fill_(3)
    torch.testing.assert_close(both(model(batch(0, 0))), both(plain(batch(0, 0))))
    assert_same(model, plain)


@on_ranks(2)
def test_other_classes_on_a_rank_are_an_error_on_all() -> None:
    model = pairs(ours(), kind=Pair if dist.get_rank() else SentPair)
    with pytest.raises(RuntimeError, match=r"of class (Sent)?Pair"):
        model(batch(0, 0))
