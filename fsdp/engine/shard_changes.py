"""`ShardChanges` finds what others than optimizers have written to shards and to gradients between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fsdp.distributed.dtensor import is_dtensor
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit


class ShardChanges:
    """The shards of a model as its optimizers have left them.

    Args:
        root: the outermost unit. Shards are watched of which all of its ranks change theirs if one does.
    """

    def __init__(self, root: Unit) -> None:
        self._root = root
        self._is_watched: dict[FlatParamHandle, bool] = {}  # those that were stepped
        self._left: dict[FlatParamHandle, Any] = {}  # of those that are: a value that changes when the shard is written
        self._looked_at: int | None = None  # the number of backwards before the last look at all of these

    def _watched(self, handles: Iterable[FlatParamHandle]) -> list[FlatParamHandle]:
        for handle in handles:
            if handle not in self._is_watched:
                self._is_watched[handle] = _is_changed_by_all(handle, self._root)
        return [handle for handle in handles if self._is_watched[handle]]

    def rest(self, handles: Iterable[FlatParamHandle]) -> None:
        """Take what these shards have for what a step has made of them."""
        self._left |= {handle: _written(handle) for handle in self._watched(handles)}

    def found(self, handles: Sequence[FlatParamHandle], backwards: int) -> Iterator[str]:
        """Yield what was written since the last steps, and to the gradients of these handles since the last backward.

        All shards are looked at in the first step after each backward; so many have ended.
        """
        if self._looked_at != backwards:
            self._looked_at = backwards
            written = (handle for handle, left in self._left.items() if _written(handle) != left)
            yield from (f"the shard of {handle.name} was written" for handle in written)
        counts: dict[str, int] = {}
        for handle in self._watched(handles):
            grads = [param.grad for param in handle.listed_params]
            versions = [grad._version for grad in grads if grad is not None]
            if len(versions) < len(grads):
                names = [slot.name for slot, grad in zip(handle.layout.slots, grads, strict=False) if grad is None]
                yield f"{handle.name} has no gradient of {', '.join(names)}"
            counts[handle.name] = sum(versions)
        # One line for what is the same of most of them, as after clipping.
        tally = Counter(counts.values())
        usual = min(tally, key=lambda times: (-tally[times], times), default=0)
        if usual:
            yield f"gradients were written {usual} times"
        yield from (f"the gradient of {name} was written {n} times" for name, n in counts.items() if n != usual)


def _is_changed_by_all(handle: FlatParamHandle, root: Unit) -> bool:
    """Return whether all ranks change a shard if one does.

    Units may have ranks of their own; and of parameters that a rank has nothing of, users leave local shards out.
    """
    if root.comm not in (handle.comm, handle.replicas) or handle.is_local:
        return False
    if handle.orig_params is None or is_dtensor(handle.orig_params.params[0]):
        return True
    ranks, slots = range(handle.comm.world_size), range(len(handle.layout.slots))
    return all(handle.layout.interval(slot, rank) is not None for slot in slots for rank in ranks)


def _written(handle: FlatParamHandle) -> Any:
    """Return what changes when a shard is written."""
    version = handle.flat_param._version
    return version if handle.orig_params is None else (version, handle.orig_params.versions)
