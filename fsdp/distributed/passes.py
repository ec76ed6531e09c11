"""The passes of this rank, its forwards and backwards, with the units that it ran in them.

The hot path appends names. They are compared with those of other ranks when a rank has waited too long (`paths`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from fsdp.distributed.communicator import named

_KEPT = 8  # passes
_MOST_UNITS = 1000  # of a pass; a forward that loops inside of itself may come to any number
_SHOWN = 4  # units of a pass, in reports


@dataclass
class Pass:
    """A forward or backward that this rank has begun.

    Attributes:
        name: the kind of pass and its number in the model, such as "backward 3".
        model: the name of the outermost unit in the pass.
        ranks: the ranks of the model.
        mode: another property that must be equal on all ranks, such as "without gradients".
        reduced: the flat parameters of which a backward reduces gradients, with their frozen parts.
        units: the units that the pass has reached, in order.
        is_over: the pass has ended on this rank; not if a collective has failed in it.
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
        """Yield the events that must be equal on all ranks, in the order of time; optionally without the `units`."""
        yield "begin", (self.name, self.model)
        yield "mode", tuple(self.mode)
        if not units:
            return
        yield "reduced", tuple(self.reduced)
        yield from (("unit", unit) for unit in self.units)
        if self.is_over:
            yield "end", None


class Path:
    """The passes that this rank has begun last, the oldest first."""

    def __init__(self) -> None:
        self.passes: deque[Pass] = deque(maxlen=_KEPT)
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def begin(
        self, kind: str, model: str, ranks: frozenset[int], mode: Sequence[str], reduced: Sequence[str] = ()
    ) -> Pass:
        """Note that a forward or backward begins."""
        self._numbers[kind, model, ranks] += 1
        begun = Pass(f"{kind} {self._numbers[kind, model, ranks]}", model, _text(ranks), mode, reduced)
        self.passes.append(begun)
        return begun

    def snapshot(self) -> list[Pass]:
        """Return copies of the passes, which do not change while this rank goes on."""
        return [replace(one, units=list(one.units)) for one in list(self.passes)]

    def forget(self, ranks: frozenset[int] | None = None) -> None:
        """Count anew, the passes of models on these ranks or all: ranks may have begun different numbers of them."""
        kept = [] if ranks is None else [one for one in self.passes if one.ranks != _text(ranks)]
        numbers = {key: number for key, number in self._numbers.items() if ranks is not None and ranks not in key}
        self.passes, self._numbers = deque(kept, maxlen=_KEPT), Counter(numbers)


_text = lru_cache(maxsize=64)(named)  # of a model's ranks, which may be thousands
path = Path()  # of this rank


class Passes:
    """The passes of a root, which all ranks run alike: for the tags of all-gathers, and for reports of hangs.

    Attributes:
        stage: the pass that all ranks are in, or were in last: its direction and mode; empty before the first one, and
            where ranks may differ.
    """

    def __init__(self) -> None:
        self.stage = ""
        self._is_stopped = False
        self._current = self._around = Pass("", "", "", ())  # the last forward around a backward

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
        self._current = path.begin("forward", name, ranks, modes)

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
        self._current = path.begin("backward", name, ranks, modes, reduced)

    def reach(self, unit: str) -> None:
        """Record that the pass has come to a unit."""
        self._current.come_to(unit)

    def end_forward(self) -> None:
        """Record that the forward of the outermost unit has ended."""
        self._current.is_over = True

    def end_backward(self) -> None:
        """Record that a backward has ended; a forward around it goes on."""
        self._current.is_over, self._current = True, self._around
