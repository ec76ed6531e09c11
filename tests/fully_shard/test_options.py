"""What one may ask of our `fully_shard`, beside torch's with the same: dtypes, meshes, placements, checkpointing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import Shard

import fsdp
from tests.helpers.dtensor_twins import (
    Plan,
    adamw_at_once,
    assert_side_by_side,
    last_dim_if_even,
    mesh_of,
    ours,
    partly_frozen,
    seeded,
    uneven,
)
from tests.helpers.models import Block, Net, Wrap, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import TOKENS
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import Counting, Traffic

BF16, FLOAT = torch.bfloat16, torch.float32


def transformer_of_rows(wrap: Wrap) -> nn.Module:
    """Attention over the five numbers of a row."""
    return seeded(RowTransformer, wrap)


class RowTransformer(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = nn.Linear(1, 6)
        self.blocks = nn.ModuleList(wrap(Block(6, 2, 7, "no", False)) for _ in range(2))
        self.exit = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs.unsqueeze(2))
        for block in self.blocks:
            hidden = block(hidden)
        return self.exit(hidden.mean(1))


def compare(what: dict[str, Any], options: dict[str, Any], **how: Any) -> None:
    assert_side_by_side(Plan(**what, **how), **options)


# Dtypes


# Gradients that travel in fewer bits than the shards have are summed in the shards' dtype by us, and in the fewer bits
# by torch: the two agree as well as the fewer bits allow.
IN_BFLOAT16, IN_FLOAT = 0.15, 1e-5


@parametrize_cases(
    at_most=5,
    policy=[
        {"param_dtype": BF16, "reduce_dtype": FLOAT},
        {"param_dtype": BF16},
        {"param_dtype": BF16, "reduce_dtype": BF16, "cast_forward_inputs": True},
        {"param_dtype": FLOAT, "reduce_dtype": FLOAT},
        {"reduce_dtype": BF16},
    ],
    make=[uneven, transformer_of_rows],
    reshard_after_forward=[True, False],
    training=[{}, {"accumulate": 2}, {"clip": 0.1}],
)
def test_mixed_precision(ranks: RankPool, case: Case) -> None:
    reduced_in = case.policy.get("reduce_dtype", case.policy.get("param_dtype"))
    options = {"mp_policy": case.policy, "reshard_after_forward": case.reshard_after_forward}
    options["tolerance"] = IN_BFLOAT16 if reduced_in is BF16 else IN_FLOAT if "clip" in case.training else None
    ranks(2).run(compare, {"make_model": case.make}, options, **case.training)


@pytest.mark.parametrize(
    ("dtype", "policy", "tolerance"),
    [
        (BF16, {}, None),
        (torch.float64, {}, None),
        (torch.float64, {"param_dtype": FLOAT, "reduce_dtype": FLOAT}, IN_FLOAT),
    ],
    ids=["bfloat16", "float64", "float64_in_float32"],
)
@on_ranks(2)
def test_a_model_in_another_dtype(dtype: torch.dtype, policy: dict[str, Any], tolerance: float | None) -> None:
    torch.set_default_dtype(dtype)
    assert_side_by_side(Plan(make_model=uneven), mp_policy=policy, tolerance=tolerance)


@on_ranks(2)
def test_outputs_are_cast() -> None:
    wrap = ours(mp_policy={"output_dtype": torch.float64})
    output = wrap(nn.Linear(5, 3))(torch.ones(2, 5))
    assert output.dtype == torch.float64
    output.sum().backward()


@on_ranks(2)
def test_inputs_are_cast_only_where_asked() -> None:
    for casts in (True, False):
        model = uneven(ours(mp_policy={"param_dtype": BF16, "cast_forward_inputs": casts}))
        if casts:
            assert model(torch.ones(2, 5)).dtype == BF16
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                model(torch.ones(2, 5))


# Meshes and placements


@parametrize_pairs(at_most=5, shape=[(2, 2), (1, 3), (3, 1), (1, 1), (4,)], reshard_after_forward=[True, False])
def test_meshes(ranks: RankPool, shape: tuple[int, ...], reshard_after_forward: bool) -> None:
    world_size = torch.Size(shape).numel()
    options = {"mesh": shape, "reshard_after_forward": reshard_after_forward}
    ranks(world_size).run(compare, {"make_model": uneven}, options, clip=0.1, accumulate=2)


@on_ranks(2, 3)
def test_placements_along_an_even_dimension() -> None:
    plan = Plan(make_model=partial(seeded, even), clip=0.1, make_optimizer=adamw_at_once)
    # What is cut along another dimension lies transposed with us, and products of matrices round otherwise.
    assert_side_by_side(plan, tolerance=IN_FLOAT, shard_placement_fn=last_dim_if_even)
    model = plan.make_model(ours(shard_placement_fn=last_dim_if_even))
    assert [placement.dim for placement in model.get_parameter("exit.weight").placements] == [1]


def even(wrap: Wrap) -> nn.Module:
    """Its inner dimensions are 12."""
    return Net(
        lambda net, x: net.exit(net.inner(x)),
        inner=wrap(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.LayerNorm(12))),
        exit=nn.Linear(12, 1),
    )


# Activation checkpointing


@parametrize_cases(reshard_after_forward=[True, False], reentrant=[True, False], recompute=["inside", "outside"])
def test_activation_checkpointing(ranks: RankPool, case: Case) -> None:
    make = partial(tiny_transformer, recompute=case.recompute, reentrant=case.reentrant)
    options = {"reshard_after_forward": case.reshard_after_forward}
    ranks(2).run(compare, {"make_model": make, "task": TOKENS}, options)


# Frozen parameters


@parametrize_pairs(
    at_most=3,
    frozen=[("entry",), ("trunk.2.0", "gate"), ("trunk.0", "exit")],
    options=[{}, {"reshard_after_forward": False}],
)
@on_ranks(2)
def test_frozen_parameters_thawed_later(frozen: tuple[str, ...], options: dict[str, Any]) -> None:
    compare({"make_model": partial(partly_frozen, frozen)}, options, steps=3, before_step=partial(_thaw, frozen))


def _thaw(frozen: tuple[str, ...], model: Any, step: int) -> None:
    if step == 1:
        for name in frozen:
            model.get_submodule(name).requires_grad_(True)


# Meshes of modules inside


@on_ranks(4)
def test_parameters_of_modules_inside_may_be_on_another_mesh_as_with_torchs() -> None:
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch before 2.13 has one mesh for each module")
    everyone, some = mesh_of(4), mesh_of(2, 2)
    by_rows = common.FSDPMeshInfo(everyone, shard_mesh_dim=0)
    by_columns = common.HSDPMeshInfo(some, shard_mesh_dim=1, replicate_mesh_dim=0)
    trained, received = [], []
    for fully_shard in (fsdp.fully_shard, torchs_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), Experts(), nn.Linear(6, 3)).double()

        def place(param: nn.Parameter, experts: frozenset[Any] = frozenset(model[1].parameters())) -> Any:
            info = by_columns if param in experts else by_rows
            return common.ShardPlacementResult(Shard(0), info)

        fully_shard(model, mesh=everyone, shard_placement_fn=place)
        assert [param.device_mesh for param in model.parameters()] == [everyone] * 2 + [some] * 2 + [everyone] * 2
        torch.manual_seed(dist.get_rank())
        received.append(Traffic())
        with Counting(received[-1]):
            for _ in range(2):
                model(torch.randn(2, 5, dtype=torch.double)).square().mean().backward()
        trained.append([(param.to_local(), param.grad.to_local()) for param in model.parameters()])
    torch.testing.assert_close(*trained, rtol=1e-10, atol=1e-12)
    assert 0 < received[0].values <= received[1].values


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.first.T + self.second


@on_ranks(2)
def test_a_module_has_its_own_parameters_on_one_mesh() -> None:
    placed = SimpleNamespace(placement=None, mesh_info=SimpleNamespace(mesh=mesh_of(2, 1)))
    with pytest.raises(ValueError, match=r"parameters of the Linear itself on .*an inner module"):
        fsdp.fully_shard(nn.Linear(3, 3), mesh=mesh_of(2), shard_placement_fn=lambda _: placed)


class Nothing(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.empty.sum()


@on_ranks(2)
def test_a_unit_of_empty_parameters_computes_in_another_dtype() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Nothing())
    for module in (model[1], model):
        fsdp.fully_shard(module, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16))
    model(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is not None
