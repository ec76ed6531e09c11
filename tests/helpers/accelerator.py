"""The accelerator that tests run on: CUDA where there is a GPU, and elsewhere the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import simulated
from tests.helpers.ranks import Ranks

ACCELERATOR = "cuda" if torch.cuda.is_available() else simulated.NAME
IS_SIMULATED = ACCELERATOR == simulated.NAME

AcceleratorRanks = Callable[..., Ranks]


def device_module() -> Any:
    """Return torch's module for it: `torch.cuda`, or its likeness."""
    return torch.get_device_module(ACCELERATOR)


def has_accelerator() -> bool:
    """Return whether there is one, or a compiler that makes one."""
    return not IS_SIMULATED or simulated.compiler() is not None
