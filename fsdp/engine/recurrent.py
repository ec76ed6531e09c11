"""Recurrent modules keep their weights in lists besides, which have to follow what is shown in their places."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class RecurrentModules:
    """Those of some modules that are recurrent."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = [module for module in dict.fromkeys(modules) if isinstance(module, nn.RNNBase)]
        for module in self.modules:
            # It would move the weights into memory of cuDNN's choice; ours lie one after the other already.
            module.__dict__["flatten_parameters"] = _leave_as_they_are

    def refresh(self) -> None:
        """Have in the lists what is in the places of the weights."""
        for module in self.modules:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _leave_as_they_are() -> None:
    pass
