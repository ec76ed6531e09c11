"""`Passes` records the forwards and backwards of a root: for the tags of all-gathers, and for reports of hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp.distributed import paths


class Tags(NamedTuple):
    """The number of a handle among all handles of its root, and its tags, which no other handle has.

    Tags tell the messages of collectives apart. They are alike on all ranks.
    """

    number: int
    gather: int  # on its communicator to all-gather from
    reduce: int  # on the one to reduce over
    replica: int  # on that along the replica axis


class Passes:
    """The passes of a root, which all ranks run alike.

    Attributes:
        stage: the pass that all ranks are in, or were in last: its direction and mode; empty before the first one, and
            where ranks may differ.
    """

    def __init__(self) -> None:
        self.stage = ""
        self._is_stopped = False
        self._current = self._around = paths.Pass("", "", "", ())  # the last forward around a backward

    def stop(self) -> None:
        """Record nothing from now on, because ranks may run different modules."""
        self._is_stopped, self.stage = True, ""

    def begin_forward(self, name: str, ranks: frozenset[int], mode: str) -> None:
        """Record a forward.

        Args:
            name: of the outermost unit that is called.
            ranks: the ranks that run it.
            mode: as "train()".
        """
        if self._is_stopped:
            return
        has_graph = torch.is_grad_enabled()
        told = "" if mode == "train()" else f" in {mode}"
        self.stage = f"forward{told}{'' if has_graph else ' without gradients'}"
        modes = (f"in {mode}", "with gradients" if has_graph else "without gradients")
        self._current = paths.path.begin("forward", name, ranks, modes)

    def begin_backward(
        self, name: str, ranks: frozenset[int], modes: Sequence[str], unusual: str, reduced: Sequence[str]
    ) -> None:
        """Record a backward.

        Args:
            name: of the outermost unit that was called last.
            ranks: the ranks that run it.
            modes: how its gradients are reduced.
            unusual: the modes that the stage names.
            reduced: names of the handles whose gradients it reduces.
        """
        if self._is_stopped:
            return
        self.stage = f"backward {unusual}".rstrip()
        self._around = self._current
        self._current = paths.path.begin("backward", name, ranks, modes, reduced)

    def reach(self, unit: str) -> None:
        """Record that the pass has come to a unit."""
        self._current.come_to(unit)

    def end_forward(self) -> None:
        """Record that the forward of the outermost unit has ended."""
        self._current.is_over = True

    def end_backward(self) -> None:
        """Record that a backward has ended; a forward around it goes on."""
        self._current.is_over, self._current = True, self._around
