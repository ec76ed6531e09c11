"""States of random number generators are looked at before they are set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp.checkpoint.generators import GeneratorStates, generator_states


@pytest.mark.parametrize(
    "state", [torch.zeros(16), torch.zeros(2, 8, dtype=torch.uint8), b""], ids=["floats", "rows", "bytes"]
)
@pytest.mark.parametrize("name", ["torch", "cuda"])
def test_what_is_no_row_of_bytes_is_refused(name: str, state: Any) -> None:
    with pytest.raises(ValueError, match="random number generator cannot be set: it is no tensor of bytes"):
        GeneratorStates({**generator_states(), name: state})
