"""`full_precision` disables the mixed precision of a model, for an evaluation with the bits of the unsharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import nn

from fsdp.distributed.communicator import during
from fsdp.distributed.consensus import from_everyone
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.precision import Buffers, InputCast, Precision
from fsdp.engine.runtime import runtime_of_root
from fsdp.engine.unit import Unit
from fsdp.layers.verify import require_sharded


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Collective at the beginning. Compute in the dtype of the optimizer's parameters, without mixed precision. ::

        with fsdp.full_precision(model), torch.no_grad():
            for inputs, targets in batches:
                output = model.eval()(inputs)
        model.train()

    Parameters are all-gathered in their original dtype, which requires twice the bytes and memory of 16 bits; buffers
    are in their original dtype as well, and inputs of 16 bits are cast to float32. Outputs are cast to `output_dtype`
    as usual. A model may be trained inside; gradients are sent in the same dtype as outside.

    A forward and its backward must both run before, both inside, or both after the context.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.

    Raises:
        TypeError: if `model` is not sharded.
        RuntimeError: inside a forward, a backward or `fsdp.join`; for an inner unit; or at the end, for a value that
            was assigned to a parameter and cannot be kept.
        NotImplementedError: for parameters that are all-gathered in another form, using `gather` of `fsdp.compress` or
            a class with a custom all-gather.
    """
    root = require_sharded(model, "fsdp.full_precision")
    runtime = runtime_of_root(root, "fsdp.full_precision")
    runtime.ensure_idle("enter fsdp.full_precision()")
    cast = [handle for handle in runtime.handles if handle.is_cast]
    for handle in cast:
        if not handle.unsharded.is_exact:
            raise NotImplementedError(
                f"fsdp.full_precision: {handle.name} is not all-gathered in its own form. Omit `gather` of "
                "fsdp.compress, or cast parameters of a class with a custom all-gather before sharding."
            )
    with during("fsdp.full_precision()"):
        from_everyone(root.everyone, None)  # no rank computes before all ranks have entered
    with ExitStack() as undo:  # undoes all changes, even if an assigned value cannot be kept
        for unit in runtime.units:
            if unit.precision.is_mixed:
                undo.callback(_restore, unit, unit.precision, unit.buffers)
                unit.buffers.widen()
                unit.precision = replace(unit.precision, compute=None, inputs=InputCast.WIDEN)
                unit.buffers = Buffers((), None)
        for handle in cast:
            undo.callback(_compute_in, handle, handle.precision)
            sent = handle.precision.reduce_dtype(handle.flat_param.dtype)
            _compute_in(handle, replace(handle.precision, compute=None, reduce=sent))
        yield


def _restore(unit: Unit, precision: Precision, buffers: Buffers) -> None:
    unit.precision, unit.buffers = precision, buffers
    buffers.narrow()


def _compute_in(handle: FlatParamHandle, precision: Precision) -> None:
    handle.precision = precision
    handle.renew_unsharded()
