"""Calls of a sharded model, for tables of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def summon(model: Any) -> None:
    with model.summon_full_params():
        pass


def users(model: Any) -> Any:
    """The module that was wrapped."""
    return model.module.module


def infer(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(4, 5))
