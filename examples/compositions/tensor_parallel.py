"""Tensor and sequence parallelism of torch, and fully_shard over another axis.

    torchrun --nproc-per-node 4 -m examples.compositions.tensor_parallel

Ranks along the axis `tp` divide the heads and hidden units of each block, and the
sequence between its linear layers. Ranks along the axis `dp` have different batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsdp
from examples.compositions import gpt

PARTS, WHOLE = Shard(1), Replicate()  # of the sequence


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Collective. Divide the linear layers of a model over the ranks of a mesh."""
    gather = PrepareModuleInput(
        input_layouts=PARTS, desired_input_layouts=WHOLE, use_local_output=True
    )
    block = {
        "norms.*": SequenceParallel(),
        "attention": gather,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=PARTS),
        "mlp": gather,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=PARTS),
    }
    for module in gpt.blocks(model):
        parallelize_module(module, mesh, block)
    ends = {
        "embedding": PrepareModuleOutput(
            output_layouts=WHOLE, desired_output_layouts=PARTS
        ),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=PARTS, output_layouts=WHOLE),
    }
    present = dict(model.named_children())
    ends = {name: style for name, style in ends.items() if name in present}
    parallelize_module(model, mesh, ends)


def shard(model: nn.Module, **options: Any) -> Any:
    """Collective. Shard a model, with a unit for each block."""
    for block in gpt.blocks(model):
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def train(folder: Path, steps: int, tp: int = 2) -> list[float]:
    """Collective. Train, from the checkpoint in `folder` if there is one."""
    dp = gpt.ranks_of_rest(tp)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = gpt.build()
    divide(model, mesh["tp"])  # before sharding
    model = shard(model, mesh=mesh["dp"])

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        place = mesh.get_local_rank("dp")
        scores = model(inputs.chunk(dp)[place])
        loss = gpt.loss_of(scores, targets.chunk(dp)[place])
        loss.backward()
        return loss

    return gpt.fit(model, step, folder, steps)


if __name__ == "__main__":
    gpt.run(train)
