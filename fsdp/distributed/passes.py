"""The passes (forwards and backwards) of this rank, with the units that ran during each pass.

The hot path only appends names. When a rank waits too long, names are compared across ranks (`paths`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from fsdp.distributed.communicator import named

_KEPT = 8  # the number of recorded passes
_MOST_UNITS = 1000  # the maximum number of recorded units in a pass; a forward with a loop may run any number
_SHOWN = 4  # the maximum number of units of a pass in reports


@dataclass
class Pass:
    """A forward or backward of this rank.

    Attributes:
        name: the kind of pass and its number in the model, such as "backward 3".
        model: the name of the outermost unit in the pass.
        ranks: the ranks of the model.
        mode: another property that must be equal on all ranks, such as "without gradients".
        reduced: the flat parameters whose gradients a backward reduces, with their frozen parts.
        units: the units reached in the pass, in order.
        is_over: if True, the pass ended on this rank without a failed collective.
    """

    name: str
    model: str
    ranks: str
    mode: Sequence[str]
    reduced: Sequence[str] = ()
    units: list[str] = field(default_factory=list)
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({'..., ' * (len(self.units) > _SHOWN)}{', '.join(self.units[-_SHOWN:])})"

    def come_to(self, unit: str) -> None:
        if len(self.units) < _MOST_UNITS:
            self.units.append(unit)

    def is_same(self, other: Pass) -> bool:
        return (self.name, self.model, self.ranks) == (other.name, other.model, other.ranks)

    def events(self, *, units: bool = True) -> Iterator[tuple[str, Hashable]]:
        """Yield the events that must be equal on all ranks, in temporal order; optionally without the `units`."""
        yield "begin", (self.name, self.model)
        yield "mode", tuple(self.mode)
        if not units:
            return
        yield "reduced", tuple(self.reduced)
        yield from (("unit", unit) for unit in self.units)
        if self.is_over:
            yield "end", None


class Path:
    """The latest passes of this rank, the oldest first."""

    def __init__(self) -> None:
        self.passes: deque[Pass] = deque(maxlen=_KEPT)
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def begin(
        self, kind: str, model: str, ranks: frozenset[int], mode: Sequence[str], reduced: Sequence[str] = ()
    ) -> Pass:
        """Record the start of a forward or backward."""
        self._numbers[kind, model, ranks] += 1
        begun = Pass(f"{kind} {self._numbers[kind, model, ranks]}", model, _text(ranks), mode, reduced)
        self.passes.append(begun)
        return begun

    def snapshot(self) -> list[Pass]:
        """Return copies of the passes, which do not change while this rank continues."""
        return [replace(one, units=list(one.units)) for one in list(self.passes)]

    def forget(self, ranks: frozenset[int] | None = None) -> None:
        """Reset the passes and their numbers, which may differ between ranks, for models on `ranks` (default: all)."""
        kept = [] if ranks is None else [one for one in self.passes if one.ranks != _text(ranks)]
        numbers = {key: number for key, number in self._numbers.items() if ranks is not None and ranks not in key}
        self.passes, self._numbers = deque(kept, maxlen=_KEPT), Counter(numbers)


_text = lru_cache(maxsize=64)(named)  # cached, because a model may have thousands of ranks
path = Path()  # the path of this rank


class Passes:
    """The passes of a root, which must be equal on all ranks; used for tags of all-gathers and for reports of hangs.

    Attributes:
        stage: the direction and mode of the current or last pass; empty before the first pass, and if ranks may differ.
    """

    def __init__(self) -> None:
        self.stage = ""
        self._is_stopped = False
        self._current = self._around = Pass("", "", "", ())  # `_around`: the forward in which a backward runs

    def stop(self) -> None:
        """Record nothing from now on, because ranks may run different modules."""
        self._is_stopped, self.stage = True, ""

    def begin_forward(self, name: str, ranks: frozenset[int], mode: str) -> None:
        """Record a forward.

        Args:
            name: the name of the called outermost unit.
            ranks: the ranks that run the forward.
            mode: "train()" or another mode.
        """
        if self._is_stopped:
            return
        has_graph = torch.is_grad_enabled()
        told = "" if mode == "train()" else f" in {mode}"
        self.stage = f"forward{told}{'' if has_graph else ' without gradients'}"
        modes = (f"in {mode}", "with gradients" if has_graph else "without gradients")
        self._current = path.begin("forward", name, ranks, modes)

    def begin_backward(
        self, name: str, ranks: frozenset[int], modes: Sequence[str], unusual: str, reduced: Sequence[str]
    ) -> None:
        """Record a backward.

        Args:
            name: the name of the outermost unit called last.
            ranks: the ranks that run the backward.
            modes: the modes of the reduction, such as "with reduction".
            unusual: the modes that are part of the stage.
            reduced: the names of the handles whose gradients are reduced.
        """
        if self._is_stopped:
            return
        self.stage = f"backward {unusual}".rstrip()
        self._around = self._current
        self._current = path.begin("backward", name, ranks, modes, reduced)

    def reach(self, unit: str) -> None:
        """Record the next unit of the pass."""
        self._current.come_to(unit)

    def end_forward(self) -> None:
        """Record the end of the outermost unit's forward."""
        self._current.is_over = True

    def end_backward(self) -> None:
        """Record the end of a backward; the forward in which it ran continues."""
        self._current.is_over, self._current = True, self._around
