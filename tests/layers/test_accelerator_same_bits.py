"""`SameBits` on an accelerator, whose generator is seeded for each micro-batch too."""

from __future__ import annotations

import pytest
import torch

from fsdp import SameBits
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks
from tests.helpers.same_bits import FORMS, adamw, train_same_bits, writer

pytestmark = pytest.mark.accelerator


def test_bits_are_the_same_at_every_number_of_ranks(accelerator_ranks: AcceleratorRanks) -> None:
    one, two = (accelerator_ranks(world_size).run(_train)[0] for world_size in (1, 2))
    assert one == two


def _train() -> list[str]:
    model = FORMS["flat"](writer().to(ACCELERATOR))
    module = torch.get_device_module(ACCELERATOR)
    state = module.get_rng_state() if hasattr(module, "get_rng_state") else None
    found = train_same_bits(model, adamw(model), SameBits(model, 4), range(1))
    if state is not None:
        assert torch.equal(module.get_rng_state(), state)
    return found
