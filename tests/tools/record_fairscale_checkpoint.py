"""Records checkpoints as fairseq and metaseq write them, with FairScale's shards and optimizers, as test data.

    pip install wheel && pip install --no-deps --no-build-isolation fairscale==0.4.13    # in an environment with torch
    python -m tests.tools.record_fairscale_checkpoint

For each case FairScale trains a small model on a few CPU ranks. Each rank saves its weights, metadata and the state of
its own optimizer to ``tests/data/fairscale/<case>/``, in the files and under the keys of the program; the whole
weights, and the full optimizer state, which FairScale gathers, are the truth. FairScale gathers no state of unflattened
parameters; there each rank's parts are put one after the other.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks._fairscale import copying, from_first
from tests.tools.record_fairscale_optim import train
from tests.tools.record_fairscale_shards import Case, _theirs, record_all


class Program(NamedTuple):
    """How a program saves."""

    file: str
    metadata: str


_FAIRSEQ = Program("checkpoint_last-shard{rank}.pt", "fsdp_metadata")
_METASEQ = Program("checkpoint_last-model_part-0-shard{rank}.pt", "shard_metadata")
CASES = {
    "fairseq-flat-3": (_FAIRSEQ, Case(3, {}, {})),
    "fairseq-unflattened-3": (_FAIRSEQ, Case(3, {"flatten_parameters": False}, {"flatten_parameters": False})),
    "metaseq-mixed-2": (_METASEQ, Case(2, {"mixed_precision": True}, {})),
    "metaseq-alone-2": (_METASEQ, Case(2, {}, {}, is_alone=True)),
}
SETTINGS = {"lr": [0.01], "arch": "tiny", "fp16": True}


def record(folder: str, name: str) -> None:
    """On each rank: train and save."""
    warnings.simplefilter("ignore")
    program, case = CASES[name]
    model, rank = _theirs(case), dist.get_rank()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer)
    saved = {
        "args": argparse.Namespace(**SETTINGS),
        "model": model.local_state_dict(),
        program.metadata: model.local_metadata_dict(),
        "last_optimizer_state": {**optimizer.state_dict(), "loss_scale": 4.0},
        "extra_state": {"val_loss": 1.5, "train_iterator": {"epoch": 2, "iterations_in_epoch": 7}},
    }
    torch.save(saved, Path(folder) / program.file.format(rank=rank))
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    if case.theirs.get("flatten_parameters", True):
        with copying():
            full = from_first(model.gather_full_optim_state_dict(optimizer))["state"]
    else:
        full = _gathered(model, optimizer)
    if rank == 0:
        torch.save({"model": whole, "optimizer": full}, Path(folder) / "whole.pt")


def _gathered(model: Any, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The ranks' parts of each parameter's state, in the parameters' shapes, by the optimizer's numbers."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, optimizer.state_dict()["state"])
    whole: dict[int, dict[str, Any]] = {}
    for number, param in enumerate(model.parameters()):
        shape = param._orig_size
        for key in found[0][number]:
            parts = [state[number][key] for state in found]
            whole.setdefault(number, {})[key] = (
                torch.cat(parts)[: shape.numel()].view(shape) if parts[0].dim() else parts[0].item()
            )
    return whole


if __name__ == "__main__":
    record_all(__doc__, {name: case for name, (_, case) in CASES.items()}, record)
