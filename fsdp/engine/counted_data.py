"""Parameters whose ``.data`` shares their version counter, by which we know when what was gathered is stale.

What is written through the ``.data`` of other tensors is not counted by torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import held_part, is_dtensor, set_local_part

_torchs: Any = vars(torch._C.TensorBase)["data"]


class CountedParameter(nn.Parameter):
    """A plain parameter whose ``.data`` shares its version counter."""

    @property
    def data(self) -> Tensor:
        return self.detach().as_subclass(Tensor)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__.pop("_vector", None)
        _torchs.__set__(self, value)


def counted(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter around a plain tensor or a `DTensor` whose ``.data`` shares its version counter."""
    if type(tensor) is Tensor:
        return CountedParameter(tensor, requires_grad)
    param = nn.Parameter(tensor, requires_grad)
    if is_dtensor(param):
        _teach(type(param))
        param.__dict__["__counted__"] = True
    return param


def version_of_dtensor(tensor: Tensor) -> int:
    """Return a number that rises when a `DTensor` is written, or its local tensor, which counts by itself."""
    return tensor._version + held_part(tensor)._version


@cache
def _teach(dtensor: Any) -> None:
    """Have `DTensor`s that are `counted` share their counter; they stay of torch's class, for which code asks."""

    def data(self: Tensor) -> Any:
        if "__counted__" not in self.__dict__:
            return _torchs.__get__(self)
        with torch.inference_mode(False):  # in which `DTensor`s have no counters to share
            seen = self.detach()
        set_local_part(seen, held_part(self))  # which counts what is written to local tensors
        return seen

    dtensor.data = property(data, _torchs.__set__)
