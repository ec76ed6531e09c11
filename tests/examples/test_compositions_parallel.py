"""The recipes of `examples/compositions` for a mesh train as the unsharded model, in float64, across a checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp.compat.fsdp2
from examples.compositions import context_parallel, gpt, pipeline
from fsdp.testing import World
from tests.helpers.dtensor_twins import whole
from tests.helpers.equality import assert_close
from tests.helpers.on_ranks import on_ranks
from tests.helpers.traffic import counting_sent

STEPS = 2


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Train the unsharded model on the batches of all ranks; return the losses and the parameters."""
    model = gpt.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = gpt.batch(step)
        loss = gpt.loss_of(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@contextmanager
def restored() -> Iterator[None]:
    """Give torch's pipelines their own names back, which the recipes replace."""
    try:
        yield
    finally:
        fsdp.compat.fsdp2.uninstall()


def train_and_resume(recipe: Any, folder: Path, first: Any = None, second: Any = None) -> list[float]:
    """Collective. Train half of the steps, and the others from the checkpoint, with the arguments of each."""
    with restored():
        return recipe.train(folder, STEPS // 2, **(first or {})) + recipe.train(folder, STEPS, **(second or {}))


def assert_as_plain(losses: list[float], folder: Path) -> None:
    """The losses are those of the unsharded model, and the checkpoints in a folder have its parameters."""
    expected, parameters = plain()
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)
    model, missing = gpt.build(), []
    for path in folder.rglob("model.safetensors"):
        missing += fsdp.load_safetensors(model, path, strict=False).missing_keys
    assert len(missing) == (len(list(folder.rglob("model.safetensors"))) - 1) * len(parameters)  # each is in one file
    assert_close(model.state_dict(), parameters, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "axes"), [("context_parallel", [{"cp": 2}, {"cp": 4}]), ("pipeline", [])])
@on_ranks(4)
def test_a_recipe_trains_as_the_unsharded_model(tmp_path: Path, name: str, axes: list[dict[str, int]]) -> None:
    losses = train_and_resume(importlib.import_module(f"examples.compositions.{name}"), tmp_path / "run", *axes)
    dist.barrier()  # all stages have saved
    assert_as_plain(losses, tmp_path / "run")


class _Bidirectional(gpt.Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's context_parallel was tried on CPUs with torch 2.13")
@pytest.mark.parametrize("front_door", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_attention_without_a_mask_trains_under_context_parallel_of_torch(front_door: str) -> None:
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with mock.patch.object(gpt, "Attention", _Bidirectional):
        reference, model = [gpt.build()[1] for _ in range(2)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    if front_door == "fully_shard":
        model = fsdp.fully_shard(model, mesh=mesh)
    else:
        model = fsdp.FullyShardedDataParallel(model, process_group=mesh.get_group())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (reference, model)]
    for step in range(2):
        hidden = torch.randn(2, 8, gpt.WIDTH, generator=torch.Generator().manual_seed(step)).double()
        reference(hidden).square().mean().backward()
        with (
            sdpa_kernel(SDPBackend.MATH),
            mock.patch.object(_attention._cp_options, "enable_load_balance", new=False),
            context_parallel(mesh, buffers=[hidden], buffer_seq_dims=[1]),
        ):
            model(hidden).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert_close(found, reference.state_dict(), rtol=0, atol=1e-10)


# As threads of one process, ranks search for the sharding of each operation on `DTensor`s once, and not once each.
@pytest.mark.parametrize(
    ("name", "ranks", "axes"),
    [
        ("tensor_parallel", 4, [{"tp": 2}, {"tp": 4}]),
        ("all_four", 8, []),  # with two ranks along each axis, but the data parallel axis
    ],
)
def test_tensors_are_divided_as_well(tmp_path: Path, name: str, ranks: int, axes: list[dict[str, int]]) -> None:
    if name == "all_four" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13, stages refuse views of padded rows: here 19 words on two ranks")
    recipe = importlib.import_module(f"examples.compositions.{name}")
    losses, *others = World(ranks).run(train_and_resume, recipe, tmp_path / "run", *axes)
    assert_as_plain(losses, tmp_path / "run")
    assert others == [losses] * (ranks - 1)


# Bytes


def sent_in_a_step(recipe: Any, folder: Path, *ranks: int, after: int = 1, **arguments: Any) -> int:
    """Collective. Return the bytes of parameters and gradients that this rank sends to a group in a step `after`
    others.
    """
    counted = []
    for steps in (after, after + 1):
        with restored(), counting_sent(lambda group, _: tuple(dist.get_process_group_ranks(group))) as sent:
            recipe.train(folder / f"{steps} with {arguments}", steps, **arguments)
        counted.append(sent[ranks])
    norm = torch.float64.itemsize * (len(ranks) - 1)  # to each other rank
    return counted[1] - counted[0] - norm


def nbytes(model: Any, ranks: int) -> int:
    """Return the bytes of a model's parameters, with each padded to equal rows on all ranks."""
    return sum(8 * ranks * -(-len(param) // ranks) * param[0].numel() for param in model.parameters())


@on_ranks(4)
def test_a_rank_sends_as_much_for_a_part_of_a_sequence_as_for_a_sequence(tmp_path: Path) -> None:
    model = gpt.build()
    # Two all-gathers, of which the last block needs one, and a reduction.
    expected = (2 * nbytes(model, 4) + nbytes(gpt.blocks(model)[0], 4)) * 3 // 4
    # The second step gathers a block more than later steps.
    assert sent_in_a_step(context_parallel, tmp_path, 0, 1, 2, 3, after=2, cp=4) == expected


def stage_of_this_rank() -> tuple[Any, list[int]]:
    """Return the plain modules of this rank's stage, of two stages on two ranks each, and the ranks of the stage."""
    model, stage = gpt.build(), dist.get_rank() // 2
    pipeline.keep_stage(model, stage, 2)
    return model, [2 * stage, 2 * stage + 1]


@on_ranks(4)
def test_a_pipeline_reduces_gradients_once_for_all_micro_batches(tmp_path: Path) -> None:
    model, ranks = stage_of_this_rank()
    with mock.patch.object(pipeline, "MICRO_BATCHES", 2):
        sent = sent_in_a_step(pipeline, tmp_path, *ranks)
    assert sent == nbytes(model, 2)  # half of it in an all-gather, half in a reduction


@on_ranks(4)
def test_a_pipeline_that_does_not_know_of_shards_trains_the_same_with_more_bytes(tmp_path: Path) -> None:
    model, ranks = stage_of_this_rank()
    with mock.patch.object(fsdp.compat.fsdp2, "install"):
        sent = sent_in_a_step(pipeline, tmp_path / "sent", *ranks)
        losses = train_and_resume(pipeline, tmp_path / "run")
    assert sent == pipeline.MICRO_BATCHES * nbytes(model, 2)
    dist.barrier()
    assert_as_plain(losses, tmp_path / "run")


@on_ranks(4)
def test_a_pipeline_of_wrappers_trains_the_same(tmp_path: Path) -> None:
    def wrap(model: Any, *, mesh: Any, **options: Any) -> Any:
        return fsdp.shard(model, units={gpt.Block}, process_group=mesh.get_group(), **options)

    with mock.patch.object(pipeline, "shard", wrap):
        losses = train_and_resume(pipeline, tmp_path)
    dist.barrier()
    assert_as_plain(losses, tmp_path)


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel", "pipeline"])
@on_ranks(3)
def test_a_number_of_ranks_that_no_mesh_has_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="3 ranks: start a multiple of 2"):
        importlib.import_module(f"examples.compositions.{name}").train(tmp_path, 1)
