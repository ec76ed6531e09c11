"""Pipeline x data x context x tensor parallelism, in the order of torchtitan.

    torchrun --nproc-per-node 8 -m examples.compositions.all_four

A rank keeps the modules of its stage, divides their tensors over `tp` and their
sequences over `cp`, and shards them over `dp` and `cp`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp.compat.fsdp2
from examples.compositions import (
    context_parallel,
    gpt,
    pipeline,
    tensor_parallel,
)


def train(
    folder: Path, steps: int, pp: int = 2, cp: int = 2, tp: int = 2
) -> list[float]:
    """Collective. Train, from the checkpoints in `folder` if there are any."""
    shape = pp, gpt.ranks_of_rest(pp * cp * tp), cp, tp
    fsdp.compat.fsdp2.install()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    data = mesh["dp", "cp"]

    model = gpt.build()
    pipeline.keep_stage(model, mesh.get_local_rank("pp"), pp)
    tensor_parallel.divide(model, mesh["tp"])
    context_parallel.divide(model, mesh["cp"])
    axes = fsdp.DataParallelMeshDims(shard=("dp", "cp"))
    options = {"dp_mesh_dims": axes, "reshard_after_forward": False}
    mesh_of_parameters = mesh["dp", "cp", "tp"]
    model = tensor_parallel.shard(model, mesh=mesh_of_parameters, **options)
    run = pipeline.schedule(model, mesh)

    def step(*tokens: Tensor) -> Tensor:
        own = (context_parallel.own(part, data) for part in tokens)
        return pipeline.step(mesh, run, *own)

    stage = folder / f"stage-{mesh.get_local_rank('pp')}"
    return gpt.fit(model, step, stage, steps, partial(pipeline.clip, mesh))


if __name__ == "__main__":
    gpt.run(train)
