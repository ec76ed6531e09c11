"""Blocks in torchtitan's order beside torch's: tensor parallelism, activation checkpointing, compiling, sharding.

Torch's are not compiled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp
from tests.helpers.compile_backends import Counter, torchs_own_deprecations
from tests.helpers.dtensor_twins import ROUNDING, Plan, assert_side_by_side
from tests.helpers.hugging_face import PATIENCE
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.tensor_parallel import SENTENCES, Layer, gpt, mesh_of

PRELOAD = ["torch._inductor.compile_fx"]


class Recomputed(nn.Module):
    """A layer that is recomputed in backward by a call of `torch.utils.checkpoint`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.layer, inputs, use_reentrant=False)


RECOMPUTING = {
    "composable": composable_checkpoint,
    "wrapper": checkpoint_wrapper,
    "ours": fsdp.checkpoint_wrapper,
    "call": Recomputed,
}


@torchs_own_deprecations
@pytest.mark.parametrize(
    ("shape", "kind", "recomputing", "backend", "reshards"),
    [
        ((2, 1), None, "wrapper", "aot_eager", False),
        ((2, 1), None, "call", "eager", True),
        ((1, 2), "heads", "composable", "eager", True),
        # Where what is recomputed is inside of the graph, torch 2.13 itself compiles DTensors only so.
        ((1, 2), "sequence", "ours", "eager", True),
    ],
)
@on_ranks(lambda shape: shape[0] * shape[1], timeout=PATIENCE)
def test_recomputed_and_compiled_blocks(
    shape: tuple[int, int], kind: str | None, recomputing: str, backend: str, reshards: bool
) -> None:
    mesh, counter = mesh_of(*shape), Counter(backend)
    make = partial(_as_torchtitan, mesh, kind, recomputing)
    if kind is not None:
        torch.set_default_dtype(torch.float64)  # partial gradients are summed before they accumulate, or after it
    # What is compiled does not all run while a dispatch mode counts.
    how = {"accumulate": 2, "is_counted": False}
    plan, theirs = (
        Plan(make_model=partial(make, backend), task=SENTENCES, mesh=mesh["dp"], **how) for backend in (counter, None)
    )
    options = {"mesh": mesh["dp"], "reshard_after_forward": reshards}
    assert_side_by_side(plan, theirs=theirs, tolerance=None if kind is None else ROUNDING, **options)
    assert counter.sizes, "nothing was compiled"


def _as_torchtitan(mesh: DeviceMesh, kind: str | None, recomputing: str, backend: Any, wrap: Wrap) -> nn.Module:
    def prepared(module: nn.Module) -> nn.Module:
        if isinstance(module, Layer):
            module = RECOMPUTING[recomputing](module)
            if backend is not None:
                module.compile(backend=backend)
        return wrap(module)

    return gpt(prepared, mesh=None if kind is None else mesh, kind=kind or "", vocabulary=kind is not None)
