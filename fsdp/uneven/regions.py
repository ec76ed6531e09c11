"""Modules that not every rank runs, the calls of them, and what all ranks call them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp.engine.forward_hooks import Call
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.unit import Unit
from fsdp.uneven.messages import Kind, Message

# A position is one number: places in the root's forward, in a visit, in a visit inside of that, and so on.
LEVELS = 4
_BITS = 15


def position_at(place: int, level: int = 0, base: int = 0) -> int:
    """The position of a place (from 1 on) in the root's forward, or at a `level` in the visit at position `base`.

    Raises:
        RuntimeError: for too many levels.
    """
    if level >= LEVELS:
        raise RuntimeError(
            f"fsdp.cond: modules that not every rank runs can be {LEVELS - 1} deep in each other at most"
        )
    return base + (place << _BITS * (LEVELS - 1 - level))


class Region:
    """A module that not every rank runs."""

    def __init__(self, number: int, module: nn.Module, units: Sequence[Unit]) -> None:
        self.number = number
        inside = set(module.modules())
        self.units = [unit for unit in units if unit.module in inside]
        own = inside - {inner for unit in self.units for inner in unit.module.modules()}
        # Parameters of the region that units around it shard: their gradients are reduced wherever it was run.
        self.around = [
            handle
            for unit in units
            for handle in unit.handles
            if any(place.module in own for places in handle.places for place in places)
        ]
        self.last: Visit | None = None  # the visit of the last forward that came to it; None if nobody ran it
        self.forward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self.backward_order: ExecutionOrder[Unit] = ExecutionOrder()

    def order(self, is_backward: bool) -> ExecutionOrder[Unit]:
        """The order of its units, of its own: the root's is the same whoever runs this."""
        return self.backward_order if is_backward else self.forward_order


class Visit:
    """One call of a region by all ranks, which at least one of them runs."""

    def __init__(self, region: Region, position: int, level: int, runs_here: bool, is_mixed: bool) -> None:
        self.region = region
        self.position, self.level, self.places = position, level, 0
        self.runs_here, self.is_mixed = runs_here, is_mixed
        self.units = list(region.units)  # and others that it runs
        self.calls: list[Call] = []  # whose backward may come
        self.reached: set[Call] = set()
        self.is_differentiable = False  # backward may come to its outputs
        self.is_reentrant = False  # only its recomputation has a graph
        self.was_owed = False  # its forward had a graph
        self.reduced: set[FlatParamHandle] = set()

    def add(self, unit: Unit) -> None:
        """A unit runs in it."""
        if unit not in self.units:
            self.units.append(unit)


class Directory:
    """Numbers that are alike on all ranks, for the modules, units and handles of one root."""

    def __init__(self, root: Unit, units: Sequence[Unit], handles: Sequence[FlatParamHandle]) -> None:
        self._root, self.units, self.handles = root, units, handles
        self._modules: list[tuple[str, nn.Module]] = []
        self._numbers: dict[nn.Module, int] = {}
        self._regions: dict[nn.Module, Region] = {}

    @property
    def regions(self) -> list[Region]:
        """All that were ever come to."""
        return list(self._regions.values())

    def region(self, module: nn.Module) -> Region:
        """The region that a module is.

        Raises:
            ValueError: if the module is not in the root's.
        """
        if module not in self._regions:
            self._regions[module] = Region(self._number(module), module, self.units)
        return self._regions[module]

    def region_of_number(self, number: int) -> Region:
        """The region that another rank named."""
        self._number(self._root.module)
        return self.region(self._modules[number][1])

    def name(self, number: int) -> str:
        """The plain name of a region's module."""
        self._number(self._root.module)
        return clean_name(self._modules[number][0]) or self._root.name

    def describe(self, message: Message) -> str:
        """What a rank does, as text."""
        kind, subject = Kind(message.kind), message.subject
        if kind in (Kind.VISIT, Kind.LEAVE, Kind.FAILED):
            return ("the end of " if kind is Kind.LEAVE else "") + f"fsdp.cond of {self.name(subject)}"
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            return f"the {kind.name.lower()} of {self.units[subject].name}"
        if kind is Kind.REDUCE:
            return f"the gradient of {self.handles[subject].name}"
        if kind in (Kind.WAIT, Kind.FINISHED):
            return "waiting for other ranks"
        return f"{kind.name.lower()} in fsdp.join"

    def _number(self, module: nn.Module) -> int:
        if module not in self._numbers:
            self._modules = list(self._root.module.named_modules())
            self._numbers = {found: number for number, (_, found) in enumerate(self._modules)}
        if module not in self._numbers:
            raise ValueError(
                f"fsdp.cond: this {type(module).__name__} is not inside of {self._root.name}, so other ranks cannot be "
                "told which it is. Give a module of the wrapped model."
            )
        return self._numbers[module]
