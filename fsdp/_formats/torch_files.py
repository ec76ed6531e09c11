"""Files of `torch.save`, mapped and not read, without running anything that they name.

Tensors of such a file are parts of the mapped file. Classes that torch does not know by itself (a program's settings,
say) are not imported: a stand-in takes the place of each, and what has them in it is told of and left out.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp._plain_values import encoded

# With which files of torch before 1.6 begin: a pickle of its magic number.
_OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


_DAMAGED = (RuntimeError, ValueError, OSError, pickle.UnpicklingError)


class StandIn:
    """In the place of an object of a class that is not known. It takes all that a pickle does to one."""

    state: Any = None

    def __new__(cls, *_: Any) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Nested(StandIn):
    """In the place of an object of a class inside of another one, or of a member of an enumeration."""


def _nested(*_: Any) -> type[Nested]:
    return Nested


def _default_dict(*_: Any) -> OrderedDict[Any, Any]:
    return OrderedDict()


_DEFAULT_DICT = "collections.defaultdict"
# Pickles get such classes by calling `getattr`, which is not to be called for them. The second name is nobody's.
_NESTED = [(_nested, "builtins.getattr"), (Nested, "fsdp.Nested")]
_DTENSOR = "torch.distributed.tensor"


@dataclass(frozen=True)
class TorchFile:
    """One file.

    Attributes:
        path: of it.
        content: what was saved, with stand-ins.
        is_mapped: whether its tensors are parts of the file. Those of files of torch before 1.6 are in memory.
    """

    path: str
    content: Any
    is_mapped: bool

    def __str__(self) -> str:
        return self.path

    def notes(self) -> list[str]:
        """What is to be told of it."""
        return [] if self.is_mapped else [f"{self.path} is in the form of torch before 1.6: all of it is in memory"]


def open_torch_file(path: str | os.PathLike[str], known: Mapping[str, type] | None = None) -> TorchFile:
    """What is in a file, with its tensors on the host.

    Args:
        path: the file.
        known: classes of our own for classes in the file, by their full names.

    Raises:
        OSError: if it is missing, or may not be read.
        ValueError: if it is no file of `torch.save`, or not all of it.
    """
    place = os.fspath(path)
    if not os.path.isfile(place):
        raise FileNotFoundError(f"{place} is missing, or no file")
    with open(place, "rb"):  # whether it may be read; what else goes wrong is what is in it
        pass
    if not zipfile.is_zipfile(place):
        return TorchFile(place, _loaded(place, [], mmap=False), False)
    unknown = _unknown_in(place)
    if f"{_DTENSOR}.DTensor" in unknown:
        importlib.import_module(_DTENSOR)  # which makes what belongs to them known
        unknown = _unknown_in(place)
    own: dict[str, Any] = {_DEFAULT_DICT: _default_dict, **(known or {})}
    stand_ins: list[Any] = [(own.get(name) or _stand_in(name), name) for name in unknown]
    if "builtins.getattr" in unknown:
        stand_ins = [each for each in stand_ins if each[1] != "builtins.getattr"] + _NESTED
    return TorchFile(place, _loaded(place, stand_ins, mmap=True), True)


def _unknown_in(place: str) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(place)
    except _DAMAGED as error:
        raise _unreadable(place, error) from None


def _loaded(place: str, stand_ins: list[Any], *, mmap: bool) -> Any:
    try:
        with _quiet_meshes(), torch.serialization.safe_globals(stand_ins):
            return torch.load(place, map_location="cpu", mmap=mmap, weights_only=True)
    except (*_DAMAGED, EOFError, LookupError, AttributeError, TypeError) as error:
        raise _unreadable(place, error) from None


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Meshes warn that there is no process group, each time that one is loaded. Here none is wanted."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _unreadable(place: str, error: Exception) -> ValueError:
    *_, reason = str(error).partition("WeightsUnpickler error: ")
    first = (reason or str(error)).strip().partition("\n")[0]
    return ValueError(
        f"{place} cannot be read as a file of torch.save: {first[:300]}. It is cut short or damaged, of another kind, "
        "or has objects in it that are not loaded because they could run anything: then load it with "
        "weights_only=False where you trust it, and save the tensors again."
    )


def _stand_in(name: str) -> type[StandIn]:
    module, _, last = name.rpartition(".")
    return type(last, (StandIn,), {"__module__": module})


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file looks like one of `torch.save`. Reads a few bytes of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        with open(path, "rb") as file:
            return file.read(len(_OLD_MAGIC)) == _OLD_MAGIC
    except OSError:
        return False


def plain(value: Any) -> Any:
    """A value in which stand-ins of ``argparse.Namespace`` are dictionaries."""
    if isinstance(value, StandIn) and type(value).__name__ == "Namespace" and isinstance(value.state, dict):
        return plain(value.state)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def values_of(content: Mapping[Any, Any], leave: Iterable[Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """What else a user has saved, encoded (`fsdp._plain_values`), and what is to be told of it.

    Args:
        content: of a file.
        leave: keys that are no such values.
    """
    found, left = {}, []
    for key, value in content.items():
        if key not in leave:
            try:
                found[str(key)] = encoded(plain(value), str(key))
            except (TypeError, RecursionError) as error:
                left.append(f"{key} is left out: {str(error).partition(':')[0]}")
    return found or None, left
