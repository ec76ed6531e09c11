"""`Observers` are notified of the events of a unit: for traces, recordings, and the search for nonfinite gradients.

An observer is any object with methods named after events. The engine uses only these methods.
Without observers, an event only reads an empty tuple.

| event | the engine calls | with |
|---|---|---|
| `forward` | after the unit was unsharded for its forward | the unit, the inputs |
| `forward_end` | after the forward, before anything else | the unit, the outputs, whether it failed |
| `backward` | when backward reaches outputs of the unit | the unit |
| `gradient` | before a gradient joins those of its flat parameter | the handle, the parameter's number, the gradient |
| `gradients_complete` | when a flat parameter has all gradients | the unit, the handle |
| `unshard`, `reshard` | after the unit was unsharded, before it is resharded | the unit |
| `backward_end` | when a backward ends; of the outermost unit | nothing |
| `step`, `step_end` | before and after the step of an optimizer; of the outermost unit | the optimizer |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Methods = tuple[Callable[..., None], ...]


class Observers:
    """The methods of a unit's observers for each event, in the order of attachment."""

    forward: Methods
    forward_end: Methods
    backward: Methods
    gradient: Methods
    gradients_complete: Methods
    unshard: Methods
    reshard: Methods
    backward_end: Methods
    step: Methods
    step_end: Methods

    def __init__(self) -> None:
        self.__dict__.update(dict.fromkeys(EVENTS, ()))

    def attach(self, observer: Any) -> None:
        """Call an observer's methods from now on."""
        for event in EVENTS:
            if (method := getattr(observer, event, None)) is not None:
                setattr(self, event, (*getattr(self, event), method))

    def detach(self, observer: Any) -> None:
        """Stop calling the observer's methods."""
        for event in EVENTS:
            kept = [method for method in getattr(self, event) if method.__self__ is not observer]
            setattr(self, event, tuple(kept))

    def __deepcopy__(self, memo: Any) -> Observers:
        return NONE  # a copy of a unit has no observers

    def __reduce__(self) -> Any:
        return _none, ()


EVENTS = tuple(Observers.__annotations__)


def _none() -> Observers:
    return NONE


NONE = Observers()  # shared by all units without observers


class Observed(Protocol):
    """A unit with observers."""

    observers: Observers


@contextmanager
def attached(observer: Any, units: Iterable[Observed]) -> Iterator[None]:
    """Attach an observer to units, and detach it at the end."""
    observed = list(units)
    for unit in observed:
        if unit.observers is NONE:
            unit.observers = Observers()
        unit.observers.attach(observer)
    try:
        yield
    finally:
        for unit in observed:
            unit.observers.detach(observer)
