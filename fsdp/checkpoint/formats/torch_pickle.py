"""Pickles as `torch.save` writes them, taken apart: nothing that they name is called.

An unpickler makes containers, numbers, and what it is told to make of tensors. Whatever else is in a pickle becomes a
`Foreign`, which says what it would have been, and of what. So files from elsewhere cannot run code, and one strange
object does not keep anybody from the rest.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint.formats.pickle_bounds import end_of_pickle, require_small
from fsdp.checkpoint.untrusted import BROKEN, readable, short

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class Foreign:
    """An object of a class that is not made when a file is read.

    Attributes:
        origin: the class or function that would have made it.
        args: what that would have been given.
        state: what would have been its attributes.
    """

    origin = ""

    def __new__(cls, *args: Any, **options: Any) -> Foreign:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _take(self, *_: Any) -> None:
        """Items of what is a container to others."""

    append = extend = add = __setitem__ = _take

    def __repr__(self) -> str:
        return readable(f"<{self.origin}>", 200)

    @property
    def fields(self) -> dict[str, Any]:
        """Its attributes by name, whether or not they were in slots."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


class Storage(NamedTuple):
    """Memory of tensors, as a pickle mentions it.

    Attributes:
        number: by which a file knows it.
        dtype: of its elements.
    """

    number: str
    dtype: torch.dtype


class Unpickler(pickle.Unpickler):
    """Makes containers, numbers and tensors.

    Args:
        content: the pickle, and nothing behind it.
        make: a tensor of a storage, an offset, a shape, strides, and perhaps a dtype. Without it tensors are foreign.

    Raises:
        one of `fsdp.checkpoint.untrusted.BROKEN`: if it is none, or asks for more memory or time than its size allows.
    """

    def __init__(self, content: bytes, make: Callable[..., Any] | None = None) -> None:
        end_of_pickle(content)
        super().__init__(BytesIO(content))
        self._nbytes, self._make = len(content), make

    def load(self) -> Any:
        found = super().load()
        require_small(found, self._nbytes)
        return found

    def find_class(self, module: str, name: str) -> Any:
        origin = f"{module}.{name}"
        if origin in _HARMLESS:
            return _HARMLESS[origin]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        own = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }
        return own.get(origin) or _foreign_class(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        if pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
            raise pickle.UnpicklingError(f"a {short(pid[0])} of the kind {short(pid[1])}")
        return Storage(str(pid[2]), pid[1])

    def _tensor(
        self, storage: Any, offset: int, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, bits: Any = None
    ) -> Any:
        return self._made(storage, offset, shape, strides, None, bits)

    def _tensor_of_dtype(
        self, storage: Any, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> Any:
        return self._made(storage, offset, shape, strides, dtype, bits)

    def _made(self, storage: Any, offset: int, shape: Any, strides: Any, dtype: Any, bits: Any) -> Any:
        if self._make is None or bits:  # conjugated, or negated, when it is looked at
            return _foreign_class("torch", "Tensor")()
        return self._make(storage, offset, shape, strides, dtype)

    def _of_type(self, rebuild: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a class, or one that was given attributes."""
        origin = getattr(kind, "origin", "")
        if origin in _PLAIN_TYPES and rebuild in (self._tensor, self._tensor_of_dtype, _data_of):
            return rebuild(*args)
        made = _foreign_class(*_split(origin))()
        made.args, made.state = args, state
        return made


def unpickled(content: bytes) -> Any:
    """What a pickle has of containers and numbers, with `Foreign`s for the rest. Nothing that it names is called.

    Raises:
        pickle.UnpicklingError: if it cannot be read.
    """
    try:
        return Unpickler(content).load()
    except BROKEN as error:
        raise pickle.UnpicklingError(f"the pickle cannot be read: {type(error).__name__}: {error}") from None


def _foreign_class(module: str, name: str) -> type[Foreign]:
    return type(name, (Foreign,), {"origin": f"{module}.{name}", "__module__": module})


def _split(origin: str) -> tuple[str, str]:
    module, _, name = origin.rpartition(".")
    return module, name


def _inside(owner: Any, name: str) -> type[Foreign]:
    """In the place of `getattr`, by which pickles get at a class inside of another one: what it would be called."""
    return _foreign_class(getattr(owner, "origin", ""), name)


def _data_of(data: Any, *_: Any) -> Any:
    """A parameter as its values."""
    return data


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    """As old pickles have them."""
    return text.encode("latin1")


def _default_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _bytearray(*args: Any) -> bytearray:
    """Of bytes; not of a number, for which there would be as many."""
    if args and not isinstance(args[0], (bytes, str)):
        raise TypeError(f"a bytearray of a {type(args[0]).__name__}")
    return bytearray(*args)


_BUILTINS = {"set": set, "frozenset": frozenset, "complex": complex, "bytearray": _bytearray}
_HARMLESS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _default_dict,
    "_codecs.encode": _bytes,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_parameter": _data_of,
    "torch._utils._rebuild_parameter_with_state": _data_of,
    **{
        f"{module}.{name}": made
        for module in ("builtins", "__builtin__")
        for name, made in [("getattr", _inside), *_BUILTINS.items()]
    },
}
