"""An `Arrangement` copies what was all-gathered to where parameters lie unsharded, for layouts where that differs."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp.engine.layout import Layout


class Arrangement:
    """A buffer to all-gather into, and the views from which and to which its parameters are copied.

    Like leaves, all of it is made once; the buffer has memory during an all-gather only.

    Args:
        layout: does not gather parameters in the order in which they are shown.
        unsharded: ``[layout.unsharded_numel]`` or more.
    """

    def __init__(self, layout: Layout, unsharded: Tensor) -> None:
        self._gathered = unsharded.new_empty(layout.padded_numel)
        self._nbytes = self._gathered.nbytes
        self._sources, self._targets = layout.pairs(self._gathered, unsharded.detach()[: layout.unsharded_numel])
        self._gathered.untyped_storage().resize_(0)

    def begin(self) -> Tensor:
        """Return the buffer ``[layout.padded_numel]``."""
        self._gathered.untyped_storage().resize_(self._nbytes)
        return self._gathered

    def end(self, is_wanted: bool) -> None:
        """Copy what has come, if it is wanted, and free the buffer."""
        if is_wanted:
            torch._foreach_copy_(self._targets, self._sources)
        self._gathered.untyped_storage().resize_(0)
