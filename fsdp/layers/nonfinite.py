"""`detect_nonfinite` reports the first nonfinite gradient, on the rank that computed it.

The check runs before the reduction, which would spread a NaN of a single rank to all ranks.
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
    """Make backward raise an error at the first infinite or NaN gradient, on the rank that computed it.

    The other ranks raise a `CollectiveError` with this reason. All ranks can call `recover` and skip the batch. Use
    the context only to find the cause of a nonfinite loss, because each gradient is read again, with a device
    synchronization. Gradient scalers are not supported, because they need nonfinite gradients to find their scale.

    Args:
        model: a sharded model.

    Raises:
        ValueError: if no module in `model` is sharded.
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
                "not finite, as the first of this backward. It is this rank's unreduced gradient: the loss of its "
                "batch is not finite, or a value computed after this parameter. (fsdp.detect_nonfinite)"
            )
