"""Resident units on an accelerator: their memory, and what they compute."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.accelerator import ACCELERATOR, device_module
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_accelerators

pytestmark = pytest.mark.accelerator


def allocated() -> int:
    gc.collect()
    device_module().synchronize()
    return int(device_module().memory_allocated())


@on_accelerators(2)
def test_the_memory_of_resident_units_is_allocated_inside_the_context_only() -> None:
    model: Any = nested_mlp(lambda module: FullyShardedDataParallel(module.to(ACCELERATOR)))
    inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).to(ACCELERATOR)
    with torch.no_grad():
        expected = model(inputs).cpu()
        before = allocated()
        with fsdp.resident(model) as names:
            fulls = [handle.unsharded.full for handle in fsdp.flat_param_handles(model)]
            assert len(names) == len(fulls) == 4
            blocks = sum((full.nbytes + 511) // 512 * 512 for full in fulls)
            for _ in range(2):
                assert torch.equal(model(inputs).cpu(), expected)
            assert before < allocated() <= before + blocks
        assert allocated() == before
