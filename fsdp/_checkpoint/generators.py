"""The states of random number generators of one process: Python's, NumPy's, torch's on the CPU and on its GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """All of them, as values that `encoded` takes."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Go on from there; a generator that has no state among them is left alone."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
