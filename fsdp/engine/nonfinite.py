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
from fsdp.engine.unit import unit_of


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
    units = filter(None, map(unit_of, model.modules()))
    handles = dict.fromkeys(handle for unit in units for handle in unit.handles)
    if not handles:
        raise ValueError(f"detect_nonfinite: nothing in this {type(model).__name__} is sharded")
    outer = {handle: handle.check_gradient for handle in handles}
    try:
        for handle in handles:
            handle.check_gradient = _check
        yield
    finally:
        for handle, check in outer.items():
            handle.check_gradient = check


def _check(handle: FlatParamHandle, slot: int, gradient: Tensor) -> None:
    if not local_part(gradient).isfinite().all():
        raise RuntimeError(
            f"rank {own_rank()}: the gradient of {handle.layout.slots[slot].name} of unit '{handle.unit_name}' is not "
            "finite, as the first of this backward. It is this rank's own: the loss of its batch is not finite, or "
            "something that is computed after this parameter. (fsdp.detect_nonfinite)"
        )
