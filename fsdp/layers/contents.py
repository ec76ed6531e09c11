"""`Contents` detects modules and parameters that were added to a tree after it was sharded, or removed."""

from __future__ import annotations

from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn


class Contents:
    """The modules and parameters that the modules of a tree hold.

    Each forward in training asks whether these are others now, so the loops run in C. Modules may get other
    dictionaries (`nn.Sequential` does when a part of it is deleted): they are looked up each time.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module.__dict__ for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._held = self._look()

    def _look(self) -> tuple[list[Any], list[str], list[bool]]:
        children = map(dict.values, filter(None, map(itemgetter("_modules"), self._modules)))
        params = list(filter(None, map(itemgetter("_parameters"), self._modules)))
        # A name that has no parameter (`bias=False`) may get one.
        absent = map(is_, chain.from_iterable(map(dict.values, params)), repeat(None))
        return list(chain.from_iterable(children)), list(chain.from_iterable(params)), list(absent)

    def have_changed(self) -> bool:
        """Return whether a module or a parameter was put into one of the modules since, or taken out."""
        return self._look() != self._held
