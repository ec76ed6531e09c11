"""Training steps of `benchmarks.step`, their memory, and a state of `benchmarks.state`, on an accelerator."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks import _ranks
from benchmarks._contestants import DDP, OURS
from benchmarks._report_losses import report_losses
from benchmarks._states import TINY, seconds, wrapped
from benchmarks._training import Setup, train_alone, train_interleaved
from examples.gpt.model import SIZES
from tests.helpers.accelerator import ACCELERATOR, device_module
from tests.helpers.on_ranks import on_accelerators

pytestmark = pytest.mark.accelerator

NAMES = (OURS, DDP)
PRELOAD = ["benchmarks._training"]  # which imports torch's sharding, and DDP's hooks


@on_accelerators(2)
def test_contestants_train_and_their_memory_is_measured() -> None:
    device = torch.device(ACCELERATOR, device_module().current_device())
    setup = Setup(size="a block", context=8, batch=1, foreach=True, device=ACCELERATOR)
    with mock.patch.object(_ranks, "_device", device), mock.patch.dict(SIZES, {"a block": TINY}):
        found = train_interleaved(setup, NAMES, num_rounds=1, steps=1)
        assert report_losses({name: [found[name].losses] for name in NAMES}, setup.float32_tolerances)
        assert all(len(each.seconds) == 1 and each.seconds[0] > 0 for each in found.values())
        _, sharded = train_alone(setup, OURS, steps=2)
        # Half of the parameters and of their two averages; the whole peak has gradients and unsharded units as well.
        assert 1.0 <= sharded.between / (3 * 4 * setup.num_parameters / 2) < 1.3
        assert sharded.peak > sharded.between
        state, took = seconds(lambda: wrapped(OURS, TINY).state_dict(rank0_only=True))
        assert took > 0
        assert {value.device.type for value in state.values()} <= {"cpu"}
