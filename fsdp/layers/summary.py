"""`summary` describes a unit for `print(model)`: its sharded parameters, this rank's part, and the options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def summary(unit: Unit | None) -> str:
    """Return a line for each flat parameter of a unit; empty without parameters, or for None."""
    return "" if unit is None else "\n".join(map(_of_handle, unit.handles))


def options_in_use(wrapper: Any, unit: Unit) -> str:
    """Return the most important options of a `FullyShardedDataParallel` with this unit, or more if ``verbose``."""
    shown = {
        "world_size": wrapper.world_size,
        "flatten_parameters": wrapper.flatten_parameters,
        "mixed_precision": bool(wrapper.mixed_precision),
    }
    if wrapper.replicate_group is not None:
        strategy = wrapper.sharding_strategy
        shown |= {"sharding_strategy": strategy and strategy.name, "replicas": unit.axes[1].world_size}
    if wrapper.verbose:
        more = "rank reshard_after_forward compute_dtype compute_device bucket_cap_mb gradient_predivide_factor"
        shown |= {name: getattr(wrapper, name) for name in more.split()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _of_handle(handle: FlatParamHandle) -> str:
    slots, own = handle.layout.slots, handle.flat_param.dtype
    words = [f"{len(slots)} parameter{'s' if len(slots) > 1 else ''}", _name(own)]
    if handle.is_cast:
        words.append(f"computed in {_name(handle.precision.compute_dtype(own))}")
    if not any(handle.requires_grad_each):
        words.append("frozen")
    nbytes = own.itemsize * sum(slot.numel for slot in slots)
    held = own.itemsize * handle.layout.shard_numel
    words.append(f"{size_text(held)} of {size_text(nbytes)} on this rank" if handle.is_sharded else size_text(nbytes))
    return ", ".join(words)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text, for example ``1.5 MiB``."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


def milliseconds(nanoseconds: int) -> str:
    """Return a time as text, for example ``1.5 ms``."""
    return f"{nanoseconds / 1e6:,.1f} ms"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column is aligned to the left, the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
