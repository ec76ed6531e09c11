"""A `Packing` converts a frozen parameter of any class and dtype to bytes, and bytes to such a parameter.

Integers, bool, float8, and tensor subclasses with a `TensorProtocol`, for example quantised weights, are sharded as
vectors of bytes. A flat parameter of bytes contains all such parameters of a unit, which share a single all-gather.
Only unsharded parameters have their original form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp.distributed.gather_extension import PLAIN
from fsdp.layers.tensor_protocol import TensorProtocol, protocol_of

ALIGNED = 16  # bytes; each inner tensor begins at a multiple, and the size of each parameter is a multiple


@dataclass(frozen=True)
class _Inner:
    """A plain tensor inside a parameter: the position, shape, stride and dtype of its bytes."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]  # dense
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    def of(self, packed: Tensor, *, is_view: bool = True) -> Tensor:
        own = packed[self.start : self.stop]
        flat = (own if is_view else own.clone()).view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


@dataclass(frozen=True)
class _Outer:
    """A tensor subclass: its inner tensors by attribute name, and its metadata."""

    kind: Any
    protocol: TensorProtocol
    inner: dict[str, _Outer | _Inner]
    metadata: Any = field(compare=False)
    shown_metadata: str  # without devices and memory addresses, which differ between ranks
    shape: torch.Size
    stride: tuple[int, ...]

    def __str__(self) -> str:
        inner = ", ".join(f"{name} {each}" for name, each in self.inner.items())
        return f"{self.kind.__name__} {list(self.shape)} of ({inner}), {self.shown_metadata}"

    def of(self, packed: Tensor, *, is_view: bool = True) -> Tensor:
        inner = {name: each.of(packed, is_view=is_view) for name, each in self.inner.items()}
        metadata = tree_map_only(torch.device, lambda _: packed.device, self.metadata)
        made: Tensor = self.protocol.unflatten(self.kind, inner, metadata, self.shape, self.stride)
        return made


class Packing:
    """The form of a parameter that is sharded as bytes.

    Args:
        name: the parameter's name, for messages.
        param: the frozen parameter; only its form is kept.

    Attributes:
        shape, dtype: the parameter's, as defined by its class.
        nbytes: the length of the vector of bytes, a multiple of 16.

    Raises:
        TypeError: if an inner tensor has a sparse layout or a class without `TensorProtocol`; if the class raises an
            exception.
    """

    def __init__(self, name: str, param: Tensor) -> None:
        self.name, self.shape, self.dtype = name, param.shape, param.dtype
        self._stop = 0
        self._form = self._form_of(param)
        self.nbytes = self._stop

    def _form_of(self, tensor: Tensor) -> _Outer | _Inner:
        if type(tensor) in PLAIN:
            if tensor.layout is not torch.strided:
                raise TypeError(f"{self.name} has an inner tensor with the layout {tensor.layout}: {_REMEDY}")
            stride = torch.empty_like(tensor, device="meta").stride()
            found = _Inner(self._stop, tensor.shape, stride, tensor.dtype)
            self._stop += -(-(found.stop - found.start) // ALIGNED) * ALIGNED
            return found
        kind: Any = type(tensor)
        protocol = protocol_of(kind)
        if protocol is None:
            raise TypeError(
                f"{self.name} has an inner tensor of class {kind.__name__}, without __tensor_flatten__: {_REMEDY}"
            )
        try:
            tensors, metadata = protocol.flatten(tensor)
        except Exception as error:
            raise TypeError(
                f"{self.name}: a {kind.__name__} cannot be flattened into inner tensors ({error!r}): {_REMEDY}"
            ) from error
        inner = {name: self._form_of(each) for name, each in tensors.items()}
        shown = repr(tree_map_only(torch.device, lambda _: torch.device("meta"), metadata))
        shown = re.sub(r" at 0x[0-9a-f]+", "", shown)
        return _Outer(kind, protocol, inner, metadata, shown, tensor.shape, tensor.stride())

    @property
    def is_tensor(self) -> bool:
        """True if the parameter is a plain tensor, and its row-major elements are the first bytes of the vector."""
        form = self._form
        return isinstance(form, _Inner) and form.stride == torch.empty(form.shape, device="meta").stride()

    def pack(self, value: Tensor) -> Tensor:
        """Return a copy of a parameter's bytes, ``[nbytes]`` of torch.uint8, on its device; gaps are zeros.

        Args:
            value: a tensor in the form of the parameter, or already its bytes.

        Raises:
            ValueError: if the value is of another class, shape, dtype or metadata.
        """
        if type(value) in PLAIN and value.dtype is torch.uint8 and list(value.shape) == [self.nbytes]:
            return value
        self.check(value)
        return self.pack_form(value)

    def check(self, value: Tensor) -> None:
        """Raise ValueError if a value's class, shape, dtype or metadata differ from the parameter's."""
        try:
            form = Packing(self.name, value)._form
        except TypeError as error:
            raise ValueError(f"{self.name} is {self.description}, and cannot be set to this value: {error}") from error
        if form != self._form:
            raise ValueError(
                f"{self.name} is {self.description}, and cannot be set to {form}: quantise the value like the model's "
                "parameter"
            )

    def takes(self, value: Tensor) -> bool:
        """Return whether a value has the form of the parameter."""
        try:
            self.check(value)
        except ValueError:
            return False
        return True

    def pack_form(self, value: Tensor) -> Tensor:
        """Return the bytes of a value in the form of the parameter, without a check."""
        inner = list(_inner_of(value, self._form))
        packed = torch.zeros(self.nbytes, dtype=torch.uint8, device=inner[0][1].device if inner else value.device)
        for place, tensor in inner:
            _copy(tensor, place.of(packed))
        return packed

    def inner_of(self, value: Tensor) -> list[Any]:
        """Return the plain tensors of a value, and None for each missing tensor.

        The list is empty if the value's class differs from the parameter's.
        """
        is_alike = isinstance(self._form, _Inner) or type(value) is self._form.kind
        return [tensor for _, tensor in _inner_of(value, self._form)] if is_alike else []

    def check_compute_dtype(self, dtype: torch.dtype | None) -> None:
        """Raise ValueError if a unit's compute dtype requires a cast that the parameter's class does not support."""
        has_value_dtype = isinstance(self._form, _Outer) and self._form.protocol.has_value_dtype
        is_cast = self.dtype.is_floating_point and self.dtype.itemsize > 1
        if dtype is not None and has_value_dtype and is_cast and self.dtype != dtype:
            raise ValueError(
                f"{self.name} is {self.description} of {self.dtype}, which mixed_precision does not cast to {dtype}: "
                f"cast the module before it is quantised (module.to({dtype})), compute in {self.dtype}, or pass the "
                "class of the module in full_precision_modules"
            )

    def unpack(self, packed: Tensor, *, is_view: bool = True) -> Tensor:
        """Return the parameter around its bytes ``[nbytes]``.

        Args:
            packed: the bytes.
            is_view: If True, the parameter shares their memory; else its tensors have separate memory, because
                torch.save and safetensors do not support tensors of multiple dtypes in the same memory.

        Raises:
            TypeError: if the class raises an exception.
        """
        try:
            return self._form.of(packed, is_view=is_view)
        except Exception as error:
            raise TypeError(
                f"{self.name}: {self.description} cannot be rebuilt from inner tensors ({error!r}): {_REMEDY}"
            ) from error

    def unpack_into(self, packed: Tensor, value: Tensor) -> None:
        """Write bytes ``[nbytes]`` to the inner tensors of a value in the form of the parameter, without a check."""
        for place, tensor in _inner_of(value, self._form):
            _copy(place.of(packed), tensor)

    def joined(self, value: Tensor, state_dict: dict[str, Any], name: str) -> Tensor:
        """Return a value joined with the entries that the class saves under the parameter's name, and remove these.

        Raises:
            ValueError: if the class cannot load these entries.
        """
        if not isinstance(self._form, _Outer):
            return value
        try:
            return self._form.protocol.joined(value, state_dict, name)
        except Exception as error:
            raise ValueError(
                f"{self.name} is {self.description}, and cannot be built from a value and its additional entries "
                f"({error!r}): load all entries of the layer's state_dict(), or a value of the parameter's class "
                "without any"
            ) from error

    def detach_from(self, module: nn.Module) -> None:
        """Remove data of the parameter, which is sharded now, from its module, if the class stores such data there."""
        if isinstance(self._form, _Outer):
            self._form.protocol.detach_from(module)

    @property
    def description(self) -> str:
        """The form as text, the same on all ranks with the same form."""
        return str(self._form)

    def __deepcopy__(self, memo: dict[int, Any]) -> Packing:
        return self


_REMEDY = (
    "it cannot be sharded as bytes. Convert it to a tensor of plain inner tensors, or pass it in ignored_parameters "
    "(ignored_params of fully_shard)"
)


def _copy(source: Tensor, destination: Tensor) -> None:
    source = source.detach()
    if source.dtype.itemsize == 1:  # torch cannot copy some dtypes with less than a byte per element
        source, destination = source.view(torch.uint8), destination.view(torch.uint8)
    destination.copy_(source)


def _inner_of(tensor: Any, form: _Outer | _Inner) -> Iterator[tuple[_Inner, Any]]:
    if isinstance(form, _Inner):
        yield form, tensor
    else:
        for name, each in form.inner.items():
            yield from _inner_of(form.protocol.inner(tensor, name), each)
