"""The states of this process's random number generators: functions to get, check and set them."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp.distributed.devices import generator_state, set_generator_state

_WORDS = 624  # of a Mersenne Twister, the algorithm of all three generators on the CPU
_POSITION = struct.Struct("<8xiiQ")  # in torch's state, after the seed: remaining numbers, a flag, next index


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators in this process, as values for `encoded`."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }
    return states | dict(filter(None, [generator_state()]))


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """The states of this process's random number generators, checked so that they can be set safely.

    NumPy accepts any position, and torch accepts inconsistent positions. Both would then read memory out of bounds.
    """

    states: dict[str, Any]

    def __post_init__(self) -> None:
        checks = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch}
        if not isinstance(self.states, dict) or not checks.keys() <= self.states.keys():
            raise ValueError("the states of random number generators do not include Python's, NumPy's and torch's")
        for name, check in checks.items():
            try:
                check(self.states[name])
            except (ValueError, TypeError, OverflowError, RuntimeError) as error:
                raise ValueError(f"the state of {name}'s random number generator cannot be set: {error}") from None
        for device in self.states.keys() - checks.keys():
            if not _is_bytes(self.states[device]):
                raise ValueError(
                    f"the state of the {device!r} random number generator cannot be set: it is no tensor of bytes"
                )

    def set(self) -> None:
        """Set the states of the generators; a generator without a saved state does not change."""
        random.setstate(self.states["python"])
        kind, keys, *rest = self.states["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(self.states["torch"])
        for device in self.states.keys() - {"python", "numpy", "torch"}:
            set_generator_state(device, self.states[device])


def _check_python(state: Any) -> None:
    version, words, gauss = state
    if not (isinstance(words, tuple) and all(type(word) is int and 0 <= word < 1 << 32 for word in words)):
        raise ValueError("it does not consist of numbers of 32 bits")
    if version == 3 and not (len(words) == _WORDS + 1 and 1 <= words[-1] <= _WORDS):
        raise ValueError(f"it has {len(words)} numbers, or an invalid position as the last one")
    if not (gauss is None or isinstance(gauss, float)):
        raise ValueError("its value for the next call is not a number")
    random.Random().setstate(state)


def _check_numpy(state: Any) -> None:
    kind, keys, position, has_gauss, gauss = state
    if kind != "MT19937":
        raise ValueError(f"it is not of the kind MT19937, which numpy.random has: {kind!r}")
    if not isinstance(keys, bytes) or len(keys) != 4 * _WORDS:
        raise ValueError(f"it does not consist of {_WORDS} numbers of 32 bits")
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"its position is {position!r}, and must be 0 to {_WORDS}")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("its value for the next call is not a number")


def _check_torch(state: Any) -> None:
    if not _is_bytes(state):
        raise ValueError("it is no tensor of bytes")
    torch.Generator().set_state(state)  # which validates each number
    left, _, position = _POSITION.unpack_from(state.numpy().tobytes())
    if left + position > _WORDS + 1:
        raise ValueError(f"{left} of its numbers are left from position {position} on, but it has {_WORDS}")


def _is_bytes(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype == torch.uint8 and state.dim() == 1
