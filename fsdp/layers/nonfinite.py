"""The first gradient that is not finite is named on the rank where it comes from, as long as that can be told.

Once the ranks have added their gradients up, what is not a number on one of them is so on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fsdp.distributed.communicator import own_rank
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.observers import attached
from fsdp.engine.unit import units_of


@contextmanager
def detect_nonfinite(model: nn.Module) -> Iterator[None]:
    """Inside, backward raises an error at the first gradient that is infinite or not a number, on the rank that has it.

    The other ranks raise a `CollectiveError` that says so; with `recover` all may go on and leave the batch out. Each
    gradient is read once more, and a device is waited for each time: switch it on to find out where a loss comes from
    that is not a number. Not with a gradient scaler, which looks for its scale by gradients that are not finite.

    Args:
        model: a sharded model.

    Raises:
        ValueError: if nothing in `model` is sharded.
    """
    units = units_of(model.modules())
    if not any(unit.handles for unit in units):
        raise ValueError(f"detect_nonfinite: nothing in this {type(model).__name__} is sharded")
    with attached(_Check(), units):
        yield


class _Check:
    def gradient(self, handle: FlatParamHandle, slot: int, gradient: Tensor) -> None:
        if not local_part(gradient).isfinite().all():
            raise RuntimeError(
                f"rank {own_rank()}: the gradient of {handle.layout.slots[slot].name} of unit '{handle.unit_name}' is "
                "not finite, as the first of this backward. It is this rank's own: the loss of its batch is not "
                "finite, or something that is computed after this parameter. (fsdp.detect_nonfinite)"
            )
