"""The recipes of `examples/compositions` with experts, float8, offloaded activations and Muon train as the plain model.

Losses, norms of gradients and final parameters are compared in float64, across a checkpoint.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from examples.compositions import expert_parallel, offload
from examples.compositions.loop import train
from examples.compositions.offload import Saved
from fsdp.testing import World
from tests.helpers.accelerator import device_module
from tests.helpers.dtensor_twins import whole
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_accelerators, on_ranks
from tests.helpers.traffic import Counting, Traffic

RECIPES = "examples.compositions"
PRELOAD = [f"{RECIPES}.transformers_experts"]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def assert_trains_as_plain(
    name: str,
    folder: Path,
    steps: int = 2,
    built: Any = None,
    plain_optimizer: Any = None,
    then: Any = None,
    **options: Any,
) -> nn.Module:
    """Collective. Train sharded, with a checkpoint after half of the steps, and unsharded; return the sharded model.

    After the checkpoint, the model is sharded with the options `then`.
    """
    recipe = importlib.import_module(f"{RECIPES}.{name}")
    rank, ranks, half = dist.get_rank(), dist.get_world_size(), steps // 2

    def build() -> nn.Module:
        return recipe.build(**(built or {}))

    def optimizers_of(model: nn.Module, make: Any = recipe.make_optimizer) -> list[torch.optim.Optimizer]:
        made = make(model)
        return made if isinstance(made, list) else [made]

    torch.manual_seed(0)
    plain = build()
    optimizers = optimizers_of(plain, plain_optimizer or recipe.make_optimizer)
    expected = train(plain, optimizers, recipe.loss_of, range(steps), range(ranks), ranks)
    torch.manual_seed(0)
    model = recipe.shard(build(), **options)
    optimizers = optimizers_of(model)
    found = train(model, optimizers, recipe.loss_of, range(half), [rank], ranks)
    fsdp.save(folder, model, optimizers)
    resumed = recipe.shard(build(), **(then or options))  # with other weights
    optimizers = optimizers_of(resumed)
    fsdp.load(folder, resumed, optimizers)
    found += train(resumed, optimizers, recipe.loss_of, range(half, steps), [rank], ranks)
    torch.testing.assert_close(*(torch.tensor(each, dtype=torch.double) for each in (found, expected)), **CLOSE)
    states = {name: whole(value).cpu() for name, value in resumed.state_dict().items()}, plain.state_dict()
    torch.testing.assert_close(*states, **CLOSE)
    return resumed


# As threads of one process, ranks search for the sharding of each operation on `DTensor`s once, and not once each.
def test_experts_are_divided_over_an_axis_of_ranks(tmp_path: Path) -> None:
    World(4).run(assert_trains_as_plain, "expert_parallel", tmp_path / "run", ep=2, then={"ep": 4})


@needs("transformers")
@pytest.mark.parametrize("ep", [None, 2])
@on_ranks(4)
def test_experts_of_transformers_are_sharded_and_divided(tmp_path: Path, ep: int | None) -> None:
    model = assert_trains_as_plain("transformers_experts", tmp_path / "run", ep=ep)
    chosen: list[Tensor] = []
    model.get_submodule("model.layers.0.mlp.gate").register_forward_hook(lambda *call: chosen.append(call[-1][2]))
    used = torch.zeros(dist.get_world_size(), 8)
    with torch.no_grad():
        importlib.import_module(f"{RECIPES}.transformers_experts").loss_of(model, dist.get_rank(), len(used))
    used[dist.get_rank(), chosen[0].flatten()] = 1.0
    dist.all_reduce(used)
    assert (used.any(0) & ~used.all(0)).any(), "ranks without tokens for an expert that other ranks use"


@needs("torchao")
@pytest.mark.parametrize("gather", [False, True])
@on_ranks(2)
def test_float8_weights_are_scaled_as_unsharded_ones(tmp_path: Path, gather: bool) -> None:
    assert_trains_as_plain("float8", tmp_path / "run", built={"gather": gather})


@needs("torchao")
@on_ranks(2)
def test_float8_weights_are_sent_as_a_byte_for_each_element() -> None:
    recipe, received = importlib.import_module(f"{RECIPES}.float8"), []
    for gather in (False, True):
        model = recipe.shard(recipe.build(gather=gather))
        train(model, [recipe.make_optimizer(model)], recipe.loss_of, range(1), [dist.get_rank()], 2)
        with Counting(traffic := Traffic()), torch.no_grad():
            recipe.loss_of(model, dist.get_rank(), 2)
        received.append(traffic.values + traffic.words)
    elements = 2 * 2 * 32 * recipe.WIDTH // 2  # of the other rank, in two layers of two matrices
    assert received[0] - received[1] == 7 * elements, "a byte instead of a float64"


@pytest.mark.accelerator
@on_accelerators(2)
def test_activations_are_offloaded_and_unsharded_parameters_are_not(tmp_path: Path) -> None:
    assert_trains_as_plain("activation_offload", tmp_path / "run")
    recipe, shapes = importlib.import_module(f"{RECIPES}.activation_offload"), list[torch.Size]()
    kept, peak = _bytes_of_a_step(recipe.shard(recipe.build(), offloads=False))
    model = recipe.shard(recipe.build())
    with patch.object(offload, "Saved", lambda tensor: shapes.append(tensor.shape) or Saved(tensor)):
        kept_beside, peak_beside = _bytes_of_a_step(model)
    assert kept_beside < 0.25 * kept
    assert peak_beside < 0.6 * peak
    assert {shape[0] for shape in shapes} == {recipe.BATCH // 2}, "activations, and no parameters"


def _bytes_of_a_step(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of a step on the device, besides the shards: between forward and backward, and at most."""
    recipe, found = importlib.import_module(f"{RECIPES}.activation_offload"), (0, 0)
    for _ in range(2):  # the first step creates buffers that are kept
        device_module().synchronize()
        device_module().reset_peak_memory_stats()
        before = device_module().memory_allocated()
        loss = recipe.loss_of(model, dist.get_rank(), 2)
        device_module().synchronize()
        kept = device_module().memory_allocated() - before
        loss.backward()
        device_module().synchronize()
        found = kept, device_module().max_memory_allocated() - before
    return found


@on_ranks(2)
def test_hooks_of_saved_tensors_see_unsharded_parameters() -> None:
    recipe, shapes = importlib.import_module(f"{RECIPES}.activation_offload"), list[torch.Size]()
    model = recipe.shard(recipe.build())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: shapes.append(tensor.shape) or tensor, lambda kept: kept
    ):
        recipe.loss_of(model, dist.get_rank(), 2)
    assert torch.Size((2 * recipe.WIDTH, recipe.WIDTH)) in shapes


@on_ranks(4)
def test_matrices_are_stepped_by_muon_under_expert_parallelism(tmp_path: Path) -> None:
    assert_trains_as_plain("muon", tmp_path / "run", plain_optimizer=_muon_of_a_plain_model)


def _muon_of_a_plain_model(model: nn.Module) -> list[torch.optim.Optimizer]:
    recipe = importlib.import_module(f"{RECIPES}.muon")
    params = dict(model.named_parameters())
    experts = [param for name, param in params.items() if recipe.is_expert(name, param.shape)]
    matrices = [param for name, param in params.items() if recipe.is_matrix(name, param.shape)]
    rest = [param for param in params.values() if not any(param is other for other in (*experts, *matrices))]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01), recipe.StackedMuon(experts)]


@on_ranks(3)
def test_a_number_of_ranks_that_no_mesh_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 ranks: start a multiple of 2"):
        expert_parallel.mesh_of(2)
