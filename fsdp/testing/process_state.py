"""`ProcessState` is the process-wide state that each rank of a world requires separately."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch

from fsdp.distributed import collectives, journal, messages, passes
from fsdp.distributed.passes import Pass, Path
from fsdp.engine import placeholder, runtime

# The package's process-wide settings and current operations.
_OWN: tuple[tuple[Any, str], ...] = (
    (warnings, "filters"),
    (warnings, "showwarning"),
    (warnings, "_showwarnmsg_impl"),  # private; replaced to record warnings (Python 3.10 to 3.13)
    (collectives, "_only_torch"),
    (messages, "_are_checked"),
    (passes, "path"),
    (journal, "journals"),
    (runtime, "_last"),
    (placeholder, "_under_way"),
)
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class ProcessState:
    """The process-wide state of a rank, which is active while the rank runs, and stored while another rank runs.

    The state contains random number generators, the default dtype, warning filters, torchrun's variables, and the
    package's process-wide state. Initially it is a copy of the caller's state.

    Args:
        variables: torchrun's variables for a rank.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._attributes: dict[Any, Any] = {}
        self.keep()
        self._attributes[warnings, "filters"] = list(warnings.filters)
        if variables is not None:
            self._variables = dict(variables)
            self._attributes[passes, "path"] = Path()
            self._attributes[journal, "journals"] = set()  # not weak: keeps journals alive until they are compared

    def keep(self) -> None:
        """Save the current state of the process in this object."""
        self._variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        self._attributes = {(place, name): getattr(place, name) for place, name in _OWN}
        self._dtype = torch.get_default_dtype()
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def show(self) -> None:
        """Restore this state as the current state of the process."""
        for name in _VARIABLES:
            if os.environ.get(name) != self._variables.get(name):
                if name in self._variables:
                    os.environ[name] = self._variables[name]
                else:
                    del os.environ[name]
        for (place, name), value in self._attributes.items():
            setattr(place, name, value)
        # Private; makes Python read `filters` again (the second name is for Python 3.14).
        getattr(warnings, "_filters_mutated", getattr(warnings, "_filters_mutated_lock_held", int))()
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        if torch.are_deterministic_algorithms_enabled() != self._is_deterministic:
            torch.use_deterministic_algorithms(self._is_deterministic)
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    @property
    def passes(self) -> list[Pass]:
        return list(cast("Path", self._attributes[passes, "path"]).passes)

    @property
    def journals(self) -> Collection[Any]:
        return cast("set[Any]", self._attributes[journal, "journals"])
