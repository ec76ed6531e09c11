"""Environment variables with the value 0 disable parts of the library."""

from __future__ import annotations

import os

SHARED_MEMORY = "FSDP_SHARED_MEMORY"  # 0: all messages are sent through gloo
TORCH_FUNCTIONS = "FSDP_TORCH_FUNCTIONS"  # 0: functions of torch are not patched
WATCHDOG = "FSDP_WATCHDOG"  # 0: there is no watchdog unless `set_watchdog` is called


def is_off(variable: str) -> bool:
    """Return whether an environment variable disables a part of the library."""
    return os.environ.get(variable) == "0"


def check_switches() -> None:
    """Raise ValueError for a value other than 0, 1 or an empty string, because the value would be ignored."""
    for name in (SHARED_MEMORY, TORCH_FUNCTIONS, WATCHDOG):
        if (value := os.environ.get(name, "1")) not in ("0", "1", ""):
            raise ValueError(f"{name}={value} in the environment: set it to 0 to turn the feature off, or unset it")
