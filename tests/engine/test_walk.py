"""How many files of the package a construction and a training step enter, counted while they run.

A budget of lines can be met by moving methods into files of their own; this one cannot. When it falls, lower it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
import fsdp.distributed.watchdog
import fsdp.layers.sharded_methods
import fsdp.layers.state_dict.full
import fsdp.layers.torch_functions  # what the first wrap loads: to load a file is not to enter it
from tests.helpers.forms import FORMS, sharded
from tests.helpers.on_ranks import on_ranks

PACKAGE = str(Path(fsdp.__file__).parent)
# Of a unit's construction, a forward and backward of a root with three units, and an optimizer's step.
MOST = {"flat": (47, 25, 2), "orig": (48, 26, 2), "rows": (50, 27, 2)}


def files_entered(function: Callable[[], Any]) -> set[str]:
    """Call the function; return the files of the package whose functions it enters."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        is_ours = event == "call" and frame.f_code.co_filename.startswith(PACKAGE)
        if is_ours and not threading.current_thread().name.startswith("fsdp"):  # the watchdog's, whenever it looks
            found.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(profile)  # of threads that begin later
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, backend=None)  # in processes where nothing else has run
def test_a_step_enters_few_files(tmp_path: Path, form: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(tmp_path / "store"), 2))
    fsdp.set_watchdog(None)  # a wait that takes long, on a busy machine, would enter its files
    constructed = files_entered(lambda: sharded(nn.Linear(8, 8), form))
    model = sharded(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), form, (nn.Linear,))
    optimizer = torch.optim.Adam(model.parameters())

    def compute() -> None:
        model(torch.ones(4, 8)).sum().backward()

    for _ in range(3):
        compute()
        optimizer.step()
        optimizer.zero_grad()
    entered = [constructed, files_entered(compute), files_entered(optimizer.step)]
    for found, most in zip(entered, MOST[form], strict=True):
        assert len(found) <= most, f"{len(found)} files, {most} allowed: {sorted(found)}"
