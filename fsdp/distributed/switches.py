"""The environment variables that turn parts of the library off, with the value 0."""

from __future__ import annotations

import os

SHARED_MEMORY = "FSDP_SHARED_MEMORY"  # without it, all messages go through gloo
TORCH_FUNCTIONS = "FSDP_TORCH_FUNCTIONS"  # without it, torch's functions are left as they are
WATCHDOG = "FSDP_WATCHDOG"  # without it, there is no watchdog unless `set_watchdog` is called


def is_off(variable: str) -> bool:
    """Return whether an environment variable turns a part of the library off."""
    return os.environ.get(variable) == "0"


def check_switches() -> None:
    """Raise ValueError for a value other than 0 and 1, which would have no effect."""
    for name in (SHARED_MEMORY, TORCH_FUNCTIONS, WATCHDOG):
        if (value := os.environ.get(name, "1")) not in ("0", "1", ""):
            raise ValueError(f"{name}={value} in the environment: give it the value 0 to turn it off, or leave it out")
