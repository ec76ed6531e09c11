"""On an accelerator the host does not wait for collectives of the device, but for what the hosts tell each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks
from tests.helpers.standing import watched

pytestmark = [pytest.mark.accelerator, pytest.mark.waiting]


def _train(model: nn.Module, folder: Path) -> None:
    model(torch.ones(1, 4, device=ACCELERATOR)).sum().backward()


def _save(model: nn.Module, folder: Path) -> None:
    fsdp.save(folder / "saved", model)


@pytest.mark.parametrize(
    ("behave", "awaited"),
    [
        (_train, "exchange of which parameters get a gradient in the backward of root (Linear)"),
        (_save, "an exchange of messages in fsdp.save()"),
    ],
)
def test_a_rank_that_is_late_is_reported(
    accelerator_ranks: AcceleratorRanks, tmp_path: Path, behave: Callable[..., None], awaited: str
) -> None:
    printed = "".join(accelerator_ranks(2, backend="nccl").run(_be_late, behave, tmp_path))
    assert f"rank 0: waiting for {awaited}" in printed
    assert re.search(r"rank 1: in no collective, at .* in _be_late", printed)
    assert "The others wait for rank 1." in printed


def _be_late(behave: Callable[..., None], folder: Path) -> str:
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(nn.Linear(4, 4).to(ACCELERATOR))
    _train(model, folder)
    with watched() as standing, redirect_stderr(StringIO()) as output:
        if dist.get_rank() == 1:
            standing.until("report")
        behave(model, folder)
    return output.getvalue()
