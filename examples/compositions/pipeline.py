"""A 1F1B pipeline of torch, with stages that are sharded over the other axis.

    torchrun --nproc-per-node 4 -m examples.compositions.pipeline

Ranks along the axis `pp` have different blocks. Each stage is a model of its own, with
its own checkpoint. Gradients are reduced once a step, after all micro-batches.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import fsdp.compat.fsdp2
from examples.compositions import gpt
from examples.compositions.tensor_parallel import shard

MICRO_BATCHES = 4


def keep_stage(model: nn.Sequential, number: int, stages: int) -> None:
    """Remove all modules from a model that are not in a stage; names do not change."""
    parts = torch.arange(gpt.LAYERS).tensor_split(stages)
    names = [str(layer) for layer in parts[number].tolist()]
    names = ["embedding"] * (number == 0) + names
    names += ["norm", "head"] * (number == stages - 1)
    for name, _ in list(model.named_children()):
        if name not in names:
            delattr(model, name)


def schedule(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Collective. Return the schedule of a sharded stage on the axis `pp` of a mesh."""
    number, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    group = mesh.get_group("pp")
    stage = PipelineStage(model, number, stages, torch.device("cpu"), group=group)
    return Schedule1F1B(stage, MICRO_BATCHES, loss_fn=gpt.loss_of)


def step(mesh: DeviceMesh, run: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Collective. Compute gradients; return a loss whose mean is that of all ranks."""
    number, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    losses: list[Tensor] = []
    run.step(
        *([inputs.contiguous()] if number == 0 else []),
        **({"target": targets, "losses": losses} if number == stages - 1 else {}),
    )
    return torch.stack(losses).mean() * stages if losses else torch.zeros(()).double()


def clip(mesh: DeviceMesh, params: list[nn.Parameter], max_norm: float) -> None:
    """Collective. Clip by the norm of the gradient of all stages."""
    grads = [param.grad for param in params if param.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    # One by one, because the gradients may be on several meshes.
    nn.utils.clip_grads_with_norm_(params, max_norm, square.sqrt(), foreach=False)


def train(folder: Path, steps: int, pp: int = 2) -> list[float]:
    """Collective. Train, from the checkpoints in `folder` if there are any."""
    dp = gpt.ranks_of_rest(pp)
    fsdp.compat.fsdp2.install()  # torch's pipelines then know that stages are sharded
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    number, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = gpt.build()
    keep_stage(model, number, pp)
    # An all-gather for each micro-batch would be needed otherwise.
    model = shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    run = schedule(model, mesh)

    def own_step(*tokens: Tensor) -> Tensor:
        return step(mesh, run, *(part.chunk(dp)[place] for part in tokens))

    stage = folder / f"stage-{number}"
    return gpt.fit(model, own_step, stage, steps, partial(clip, mesh))


if __name__ == "__main__":
    gpt.run(train)
