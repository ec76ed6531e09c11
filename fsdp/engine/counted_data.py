"""Parameters whose ``.data`` shares their version counter, so that writes through ``.data`` are detected.

For other tensors, torch does not count writes through ``.data``.

A tensor assigned to ``.data`` is copied to the shard at the next use. The shard then moves to new memory,
because programs swap weights using ``.data``: other tensors and parameters with the old memory keep their values.
Tensors read from the ``.data`` of other parameters of the shard share the new memory (`bring_seen`).
"""

from __future__ import annotations

import operator
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.distributed.dtensor import held_part, is_dtensor, memory_of, set_local_part

_torchs: Any = vars(torch._C.TensorBase)["data"]


class CountedParameter(nn.Parameter):
    """A plain parameter whose ``.data`` shares its version counter."""

    @property
    def data(self) -> Tensor:
        return _noted(self, self.detach().as_subclass(Tensor))

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__.pop("_vector", None)
        _torchs.__set__(self, value)
        if not self.is_inference():
            increment_version(self)  # for handles to detect the new memory


def _noted(param: Tensor, seen: Tensor) -> Tensor:
    """Keep a weak reference to a tensor read from a parameter's ``.data``, and return the tensor."""
    if not torch.compiler.is_compiling():
        alive = [one for one in param.__dict__.get("__seen__", ()) if one() is not None]
        param.__dict__["__seen__"] = [*alive, weakref.ref(seen)]
    return seen


def bring_seen(param: Tensor, memory: int) -> None:
    """Share the parameter's new memory with tensors read from ``param.data`` before the memory moved.

    Args:
        param: a parameter whose ``.data`` was not assigned.
        memory: the address of the parameter's old storage.
    """
    for one in param.__dict__.get("__seen__", ()):
        seen = one()
        if seen is not None and memory_of(seen) == memory:
            set_local_part(seen, held_part(param) if is_dtensor(param) else param.detach().as_subclass(Tensor))


def counted(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter whose ``.data`` shares its version counter: `tensor` itself if it is a `DTensor`."""
    if type(tensor) is Tensor:
        return CountedParameter(tensor, requires_grad)
    if not is_dtensor(tensor):
        return nn.Parameter(tensor, requires_grad)
    _teach(type(tensor))
    tensor.__dict__.update(_is_param=True, __counted__=True)  # marks it as `nn.Parameter`, without a copy
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


version_of = operator.attrgetter("_version")  # of a plain tensor: increases with each write


def version_of_dtensor(tensor: Tensor) -> int:
    """Return a number that increases when a `DTensor` or its local tensor, with a separate counter, is written."""
    return tensor._version + held_part(tensor)._version


@cache
def _teach(dtensor: Any) -> None:
    """Make `counted` `DTensor`s share their counter. Their class remains torch's, which other code checks."""

    def data(self: Tensor) -> Any:
        if "__counted__" not in self.__dict__:
            return _torchs.__get__(self)
        with torch.inference_mode(False):  # in inference mode, `DTensor`s have no counters
            seen = self.detach()
        set_local_part(seen, held_part(self))  # which counts writes to local tensors
        return _noted(self, seen)

    def assign(self: Tensor, value: Tensor) -> None:
        if "__counted__" not in self.__dict__:
            _torchs.__set__(self, value)
            return
        if not is_dtensor(value):
            raise ValueError(
                f"a plain tensor of shape {tuple(value.shape)} was assigned to the .data of a sharded parameter, a "
                f"DTensor of shape {tuple(self.shape)}. Assign torch.distributed.tensor.distribute_tensor(value, "
                "param.device_mesh, param.placements)."
            )
        _torchs.__set__(self, value)
        set_local_part(self, held_part(value))  # torch (2.13) keeps the old local tensor
        increment_version(self)

    dtensor.data = property(data, assign)
