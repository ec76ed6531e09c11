"""Writing converted checkpoints as folders of `torch.distributed.checkpoint`, by its own writer, a tensor at a time.

It imports that package, which is slow, so this module is imported when it is needed.
"""

from __future__ import annotations

import mmap
import re
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from fsdp.checkpoint.formats.convert import Advance, Content, Item, tree_of
from fsdp.checkpoint.formats.convert_place import new_place

_OWN = re.compile(r"\.metadata|__\d+_\d+\.distcp")


class _Planner(dcp.DefaultSavePlanner):
    """Has the values of a tensor when they are asked for.

    Args:
        items: by the id of what stands for a tensor in the state, where it comes from.
        advance: is told how many bytes were read.
    """

    def __init__(self, items: dict[int, Item], advance: Advance) -> None:
        super().__init__()
        self._items, self._advance = items, advance
        self._last: mmap.mmap | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        item = self._items.get(id(self.state_dict[write_item.index.fqn]))
        if item is None:
            return super().resolve_data(write_item)
        if self._last is not None:
            # It is written. The writer keeps all tensors of a file to its end, so their pages are given back.
            self._last.madvise(mmap.MADV_DONTNEED)
            self._last = None
        if not item.nbytes:
            return torch.empty(item.shape, dtype=item.dtype)
        self._last = mmap.mmap(-1, item.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(self._last, dtype=item.dtype).view(item.shape)
        item.reader.read(item.key, tensor)
        self._advance(item.nbytes)
        return tensor


def write_dcp(path: str, content: Content, *, is_flat: bool, overwrite: bool, advance: Advance) -> None:
    """A folder with ``model.<name>``, ``optimizer.state.<name>.<key>``, and the values.

    Raises:
        ValueError: if the source is damaged.
        OSError: if it cannot be written.
    """
    items: dict[int, Item] = {}

    def make(item: Item) -> Tensor:
        stand_in = torch.empty(item.shape, dtype=item.dtype, device="meta")
        items[id(stand_in)] = item
        return stand_in

    state = tree_of(content, make, is_flat=is_flat)
    with new_place(path, is_folder=True, overwrite=overwrite, own=_OWN) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Without copying ahead, tensors are asked for one after the other.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        try:
            dcp.save(state, storage_writer=writer, planner=_Planner(items, advance), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
