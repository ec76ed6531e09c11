"""Faults while a model is built and wrapped, which show at its first use."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.faults.fault import ENDED, LATE, Action, Fault, also, assigns, ends_by, raises, sets, sleeps, usual
from tests.faults.job import Job

BUILD_ALIKE = "Build and shard the same modules in the same order and with the same options on every rank"
DIFFERS = r"on rank 0 and .* on rank 1\."
BLOCK_1, ROOT = r"Unit 'blocks\.1'", r"Unit 'root"


def assigned(name: str, make: Any) -> Action:
    """Put something else under a name into the second block."""

    def do(job: Job) -> None:
        setattr(job.plain.blocks[1], name, make())

    return do


def narrow(job: Job) -> None:
    job.plain.blocks[1].linear = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))


def frozen(job: Job) -> None:
    job.plain.blocks[1].linear.weight.requires_grad_(False)


def in_half(job: Job) -> None:
    job.plain.blocks[1].half()


def tied(job: Job) -> None:
    job.plain.blocks[1].linear.weight = job.plain.blocks[0].linear.weight


def older(job: Job) -> None:
    job.stack.enter_context(mock.patch("fsdp.layers.verify.__version__", "0.0.9"))


def other_torch(job: Job) -> None:
    job.stack.enter_context(mock.patch("torch.__version__", "2.99.0"))


def option(name: str, unit: str = ROOT, **options: Any) -> Fault:
    known = {"rank": DIFFERS, "unit": unit, "remedy": BUILD_ALIKE, "after": "kept"}
    return Fault(f"{name} on one rank only", "options", sets(**options), "wrap", **known)


def structure(name: str, do: Action, unit: str = BLOCK_1, **more: Any) -> Fault:
    known = {"rank": DIFFERS, "unit": unit, "remedy": BUILD_ALIKE, "after": "kept"}
    return Fault(name, "structure", do, "wrap", **(known | more))


wrapping = partial(Fault, at="wrap")
first_use = partial(Fault, at="forward")

# fmt: off
FAULTS = {
    "wrapping": [
        option("reshard_after_forward=False", reshard_after_forward=False),
        option("mixed precision", mixed_precision=True),
        option("a predivide factor", gradient_predivide_factor=1.0),
        option("use_orig_params", use_orig_params=True),
        option("unflattened parameters", flatten_parameters=False),
        option("a bucket size", bucket_cap_mb=0),
        option("reductions in float32", mixed_precision=True, fp32_reduce_scatter=True),
        structure("a block with other layers", narrow),
        structure("a buffer more", assigned("extra", lambda: nn.Buffer(torch.zeros(3)))),
        structure("a parameter more", assigned("extra", lambda: nn.Parameter(torch.zeros(3)))),
        structure("a block in half precision", in_half),
        structure("a frozen parameter", frozen),
        structure("tied on one rank only", tied,
            rank=f"{ENDED} ValueError: linear.weight is the same", unit="", remedy="", by="others", after=""),
        structure("a block that is no unit", assigns(units=1), unit="blocks.1"),
        wrapping("an older version of the library", "other versions", older, rank=DIFFERS, unit="fsdp 0"),
        wrapping("another torch", "other versions", other_torch, rank=DIFFERS, unit="torch 2"),
        wrapping("other values", "values", assigns(seed=1), at="build",
            rank="Rank 1 has other values", unit=r"head\.weight of unit 'root", remedy="torch.manual_seed"),
        wrapping("an error while building", "exceptions", raises(FileNotFoundError("vocabulary.txt")), at="build",
            rank="rank 1 was ended by FileNotFoundError: vocabulary.txt", by="others"),
        wrapping("an error while wrapping", "exceptions", raises(TypeError("unhashable")),
            rank="rank 1 was ended by TypeError: unhashable", by="others"),
        wrapping("killed before wrapping", "SIGKILL", ends_by(signal.SIGKILL), ends="SIGKILL"),
        wrapping("building for long", "slow ranks", sleeps(5), at="build",
            rank=LATE + "|rank 1: has wrapped no model yet", by="one", raises=False, after="trained"),
        wrapping("sync_module_states on one rank only", "options", sets(sync_module_states=True),
            rank="rank 1", unit="sync_module_states", remedy="on every rank"),
    ],
    "first use": [
        *usual("forward"),
        first_use("evaluation where others train", "modes", lambda job: job.model.eval(),
            rank=DIFFERS, unit="eval", remedy="[Ee]very rank", after="kept"),
        first_use("a layer added after wrapping", "structure",
            lambda job: job.plain.add_module("late", nn.Linear(2, 2)), rank=ENDED, unit="late", by="others"),
        first_use("cast after wrapping", "structure", lambda job: job.model.half(),
            rank=DIFFERS, unit="Unit", remedy=BUILD_ALIKE),
        first_use("a second model on one rank", "structure", also("wrap_another"), at="wrap",
            quiet=True, after="trained"),
        first_use("a checkpoint loaded on one rank only", "extra calls", also("state_dict"),
            rank="rank 1", unit="state_dict", remedy="Make the same calls on every rank"),
        first_use("late for the first forward", "slow ranks", sleeps(5),
            rank=LATE, by="one", raises=False, after="trained"),
        first_use("a gradient divisor set on one rank", "options",
            lambda job: job.model.set_gradient_divide_factors(1.0, 8.0), rank=DIFFERS, unit=ROOT, remedy=BUILD_ALIKE),
        first_use("no_sync on one rank", "modes", lambda job: job.stack.enter_context(job.model.no_sync()),
            unit="root|blocks", remedy="no_sync"),
    ],
}
# fmt: on
