"""Context parallelism: ranks divide the sequences, and gather keys and values.

    torchrun --nproc-per-node 4 -m examples.compositions.context_parallel

Each rank along the axis `cp` has a part of every sequence. It is a data parallel rank
for fully_shard, which averages gradients over `dp` and `cp` together.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import fsdp
from examples.compositions import gpt
from examples.compositions.tensor_parallel import shard


def gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Collective. All-gather [batch, heads, length / ranks, size] along the length.

    Its backward is a reduce-scatter: all ranks attend to this rank's part.
    """
    whole = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
    return whole.full_tensor(grad_placements=[Partial()])


def attend(mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Collective. Causal attention of this rank's queries to the keys of all ranks."""
    key, value = gathered(key, mesh), gathered(value, mesh)
    own = torch.arange(query.shape[2]) + mesh.get_local_rank() * query.shape[2]
    mask = own[:, None] >= torch.arange(key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a model compute with this rank's part of each sequence."""
    for block in gpt.blocks(model):
        block.attention.attend = partial(attend, mesh)
    for embedding in model.children():
        if isinstance(embedding, gpt.Embedding):
            embedding.start = mesh.get_local_rank() * gpt.LENGTH // mesh.size()


def own(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows, and of these the part of the sequence."""
    rows = tokens.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    return rows.chunk(mesh["cp"].size(), dim=1)[mesh.get_local_rank("cp")]


def train(folder: Path, steps: int, cp: int = 2) -> list[float]:
    """Collective. Train, from the checkpoint in `folder` if there is one."""
    dp = gpt.ranks_of_rest(cp)
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    model = gpt.build()
    divide(model, mesh["cp"])
    # Parameters are sharded over both axes, as over a single one.
    axes = fsdp.DataParallelMeshDims(shard=("dp", "cp"))
    model = shard(model, mesh=mesh, dp_mesh_dims=axes)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = gpt.loss_of(model(own(inputs, mesh)), own(targets, mesh))
        loss.backward()
        return loss

    return gpt.fit(model, step, folder, steps)


if __name__ == "__main__":
    gpt.run(train)
