"""`FlatParamShardMetadata` describes which elements of which parameters a rank's shard contains, as in FSDP1."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fsdp.engine.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self


class FlatParamShardMetadata(NamedTuple):
    """The parameters with elements in a rank's shard of a flat parameter, in the order of the flat parameter.

    The fields have the same names and contents as in FSDP1's class of this name.

    Attributes:
        param_names: names relative to the unit's module.
        param_shapes: unsharded shapes; local shapes for `DTensor`s on other dimensions of a mesh.
        param_strides: the strides of these shapes, in row-major order.
        param_contiguities: True for each.
        param_numels: unsharded numbers of elements.
        param_offsets: the first and the last of the elements in the shard, in row-major order. If a parameter is
            sharded along a dimension other than the first, elements are counted with this dimension moved to the
            front.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """Return the metadata of a rank's shard."""
        intervals = layout.intervals(rank)
        slots = [layout.slots[interval.slot] for interval in intervals]
        return cls(
            tuple(slot.name for slot in slots),
            tuple(slot.shape for slot in slots),
            tuple(slot.stride for slot in slots),
            tuple(True for _ in slots),
            tuple(slot.numel for slot in slots),
            tuple((interval.start, interval.stop - 1) for interval in intervals),
        )
