"""`Policy` contains the settings of a unit: when it is resharded and prefetched, and how gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.placements import Placements

if TYPE_CHECKING:
    from fsdp.distributed.comm_hooks import AllReduceHook, CommHook


@dataclass
class Policy:
    """The user's settings for a unit: resharding, prefetching, and the reduction of gradients.

    Attributes:
        reshard_after_forward, reshard_after_backward: whether the unit is resharded then.
        keeps_without_backward: a unit not resharded after a forward stays unsharded, even without a backward.
        keeps_as_root: as the outermost unit, stay unsharded from forward to backward, which begins with this unit.
        keeps_for_inference: stay unsharded between forwards without gradients, without comparison with the shards.
        part_of: a unit created in the same call; if it is outermost, this unit counts as outermost as well.
        keeps_memory: resharding keeps the memory of the unsharded parameters.
        unshard_in_backward: whether backward requires the parameters.
        forward_prefetch, backward_prefetch: units to unshard ahead. Default: the units expected next.
        sync: the stages of the reduction that the next backwards run.
        is_last_backward: whether the next backward is the last of a step; True unless the user set otherwise.
        predivide, postdivide: divisors of gradients before and after they are summed.
        fills_unused: whether a parameter not used on any rank gets a gradient of zeros.
        comm_hook: the user's reduce-scatter. Default: None, the library's reduce-scatter.
        all_reduce_hook: a user's function, called at the end of a reduction.
        reductions_in_flight: the maximum number in flight when another starts; a root uses the maximum of its units.
        bucket_bytes: maximum size of a root's buckets of small gradients; 0 sends each gradient separately.
    """

    reshard_after_forward: bool
    keeps_as_root: bool
    keeps_without_backward: bool
    keeps_for_inference: bool = False
    part_of: Any = None
    reshard_after_backward: bool = True
    keeps_memory: bool = False
    unshard_in_backward: bool = True
    forward_prefetch: Sequence[Any] | None = None
    backward_prefetch: Sequence[Any] | None = None
    sync: GradientSync = GradientSync.FULL
    is_last_backward: bool = True
    predivide: float = 1.0
    postdivide: float = 1.0
    fills_unused: bool = False
    comm_hook: CommHook | None = None
    all_reduce_hook: AllReduceHook | None = None
    reductions_in_flight: int = 1
    bucket_bytes: int = 0

    @classmethod
    def of(
        cls,
        placements: Placements,
        *,
        keeps_as_root: bool,
        keeps_without_backward: bool,
        predivide: float,
        postdivide: float,
        bucket_bytes: int,
    ) -> Policy:
        """Return the settings of a new unit."""
        is_kept, reshards = placements.keeps_unsharded, placements.reshard_after_forward
        deferred = GradientSync.SHARDS if placements.reduce else GradientSync.NONE
        return cls(
            reshard_after_forward=not is_kept and (reshards is True or reshards == "host" or reshards > 1),
            keeps_as_root=keeps_as_root,
            keeps_without_backward=keeps_without_backward or is_kept,
            reshard_after_backward=not is_kept,
            sync=deferred if placements.defers_reduction else GradientSync.FULL,
            predivide=predivide,
            postdivide=postdivide,
            bucket_bytes=bucket_bytes,
        )

    @property
    def awaits_backwards(self) -> bool:
        """True if more backwards of this step follow, before the gradients are reduced."""
        return not self.is_last_backward and self.sync is GradientSync.NONE

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Apply a user's setting, also to the outermost unit."""
        self.reshard_after_forward, self.keeps_as_root = reshard, False

    def of_copy(self) -> Policy:
        """Return the settings of a copied unit, without references to other units, which may not be copied."""
        return replace(self, part_of=None, forward_prefetch=None, backward_prefetch=None, keeps_for_inference=False)
