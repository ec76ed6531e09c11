"""The accelerator that tests run on: CUDA where there is a GPU, and elsewhere the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage

from fsdp.state_dict_utils import host_memory
from tests import simulated
from tests.helpers.ranks import Ranks
from tests.helpers.workers import MOST_DELAY

ACCELERATOR = "cuda" if torch.cuda.is_available() else simulated.NAME
IS_SIMULATED = ACCELERATOR == simulated.NAME

# Without GPUs, NCCL is gloo at any number of ranks.
NCCL_SIZES = [1, 2] if IS_SIMULATED else [1, 2, 4]

AcceleratorRanks = Callable[..., Ranks]


def device_module() -> Any:
    """Return torch's module for it: `torch.cuda`, or its likeness."""
    return torch.get_device_module(ACCELERATOR)


def host_waits() -> int:
    """Return how often the host has waited for the device, which only the simulated one counts."""
    return int(device_module()._host_waits()) if IS_SIMULATED else 0


@contextmanager
def later_kernels() -> Iterator[None]:
    """Have kernels of the simulated device begin up to 5 ms late; a GPU takes the time that it takes."""
    if IS_SIMULATED:
        device_module()._set_delay(5000)
    try:
        yield
    finally:
        if IS_SIMULATED:
            device_module().synchronize()
            device_module()._set_delay(MOST_DELAY)


@contextmanager
def page_locking() -> Iterator[None]:
    """Have host memory that torch has not allocated pinned for the simulated device too, as CUDA does it."""

    def page_lock(storage: UntypedStorage) -> Callable[[], Any]:
        address = storage.data_ptr()
        device_module()._pin(address, storage.nbytes())
        return partial(device_module()._unpin, address)

    if IS_SIMULATED:
        with (
            mock.patch.object(host_memory, "can_page_lock", return_value=True),
            mock.patch.object(host_memory, "page_lock", page_lock),
        ):
            yield
    else:
        yield


def has_accelerator() -> bool:
    """Return whether there is one, or a compiler that makes one, and a torch that bears it."""
    return not IS_SIMULATED or (simulated.compiler() is not None and torch.__version__ >= simulated.LEAST_TORCH)


def global_batches(steps: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 5, generator=generator).to(ACCELERATOR) for _ in range(steps)]
