"""Calls that fail half way: an exception in each function of ours that they call, in one after the other.

After each failure, the state is compared with the state before it. Functions that restore state do not fail, and
neither do those of `fsdp.distributed`: how often they are called depends on the time that messages take.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from dis import opmap
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.distributed.dtensor import local_part
from fsdp.engine.unit import Unit, unit_of
from tests.helpers.paths import ROOT

PACKAGE = f"{ROOT / 'fsdp'}/"
LEFT_ALONE = f"{PACKAGE}distributed/"
# These put things back, and what they call does so too.
UNDOING = {"close", "end", "forget", "__exit__", "__del__", "take_back"}
# Learnt when needed, or different after each use.
UNSETTLED = {"_gathered", "_looked_at", "_expected", "_is_arranged", "is_spare", "_load_errors", "_error_msgs"}


class PlantedError(Exception):
    """A failure in the middle of a call."""


class FailingCall:
    """While it is entered, the first call of one function of ours raises `PlantedError`; all called are noted.

    Args:
        place: the function, as its file and its name; by default none fails.
    """

    def __init__(self, place: str = "") -> None:
        self._place = place
        self.called: dict[str, None] = {}  # in the order of their first calls

    def __enter__(self) -> FailingCall:
        gc.disable()  # finalizers run at any time, and their exceptions end nowhere
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _on_call(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(LEFT_ALONE)
        if event != "call" or not is_ours or _goes_on(frame) or _undoes(frame):
            return
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the latter
        place = f"{code.co_filename.removeprefix(PACKAGE)}:{name}"
        is_first = place not in self.called
        self.called[place] = None
        if is_first and place == self._place:
            raise PlantedError(place)


def _goes_on(frame: FrameType) -> bool:
    """Return whether a generator goes on behind a yield, or is closed, instead of a function that begins."""
    if "RESUME" not in opmap:  # Python 3.10
        return frame.f_lasti >= 0
    operation = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return operation != bytes([opmap["RESUME"], 0])


def _undoes(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in UNDOING:
            return True
        frame = frame.f_back
    return False


def assert_failures_leave_nothing(
    enter: Callable[[], AbstractContextManager[Any]], *things: Any, besides: Collection[str] = ()
) -> list[str]:
    """Collective. Enter a context once for each function in it that all ranks call, which fails there.

    All there is must be as before each time.

    Args:
        enter: makes the context.
        things: models, optimizers, and whatever else the context may change.
        besides: functions that are not made to fail.

    Returns:
        The functions that were made to fail.
    """
    with enter():
        pass
    _fail_in("", enter())
    calls: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(calls, _fail_in("", enter()))
    places = [place for place in calls[0] if place not in besides and all(place in each for each in calls)]
    before = _look(things)
    for place in places:
        _fail_in(place, enter())
        after = _look(things)
        if before != after:
            keys = [key for key in before | after if before.get(key) != after.get(key)]
            found = {key: f"{before.get(key)} -> {after.get(key)}"[:300] for key in keys[:5]}
            raise AssertionError(f"after a failure in {place}: {found}")
        before = after
    return places


def _fail_in(place: str, context: AbstractContextManager[Any]) -> list[str]:
    """Enter a context in which a function fails, leave it if that works all the same, and return what it has called."""
    failing, is_entered = FailingCall(place), False
    with suppress(Exception):
        with failing:
            context.__enter__()
        is_entered = True
    if is_entered:
        context.__exit__(None, None, None)
    return list(failing.called)


def _look(things: tuple[Any, ...]) -> dict[str, Any]:
    """Return what may be changed for a while, by names."""
    found: dict[str, Any] = {}
    for number, thing in enumerate(things):
        if isinstance(thing, nn.Module):
            for name, module in thing.named_modules():
                found |= _facts(f"{number} {name}", module.__dict__)
                unit = unit_of(module)
                if unit is not None:
                    found |= _of_unit(f"{number} unit {name}", unit)
        else:
            found |= _facts(f"{number}", vars(thing))
    for name, value in _watched():
        found[name] = [*map(id, vars(value).values())]  # without more names: there are thousands
    return found


@cache
def _watched() -> list[tuple[str, Any]]:
    """Return the classes of the package, the objects that its modules have by name, and what is replaced in torch."""
    torchs = (torch, torch.distributed, nn.Module, torch.optim.Optimizer, Tensor)
    found: dict[int, tuple[str, Any]] = {id(each): (repr(each), each) for each in torchs}
    for module_name, module in sys.modules.items():
        for name, value in vars(module).items() if module_name.startswith("fsdp.") else ():
            if (value if isinstance(value, type) else type(value)).__module__.startswith("fsdp."):
                found[id(value)] = (f"{module_name}.{name}", value)
    return [each for each in found.values() if hasattr(each[1], "__dict__")]


def _of_unit(name: str, unit: Unit) -> dict[str, Any]:
    found = _facts(name, unit.__dict__) | _facts(f"{name}.policy", vars(unit.policy))
    for number, handle in enumerate(unit.handles):
        found |= _facts(f"{name}.{number}", handle.__dict__)
        found |= {f"{name}.{number} values": handle.flat_param.detach().reshape(-1).tolist()}
        grads = [None if param.grad is None else local_part(param.grad) for param in handle.listed_params]
        found[f"{name}.{number} gradients"] = [None if grad is None else (grad.dtype, grad.tolist()) for grad in grads]
    return found


def _facts(name: str, values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            entries = {inner if isinstance(inner, str) else id(inner): _fact(each) for inner, each in value.items()}
            found[f"{name}.{key}"] = list(entries)  # their order
            found |= {f"{name}.{key}.{inner}": each for inner, each in entries.items()}
        elif key not in UNSETTLED:
            found[f"{name}.{key}"] = list(map(_fact, value)) if isinstance(value, (list, tuple)) else _fact(value)
    return found


def _fact(value: Any) -> Any:
    """Return something that is equal as long as a value is the same."""
    if type(value) is Tensor:  # a buffer: one that was cast there and back is another tensor
        return value.dtype, value.device, value.tolist() if value.untyped_storage().nbytes() else None
    return value if isinstance(value, (bool, int, str, float, type(None))) else id(value)
