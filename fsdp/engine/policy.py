"""`Policy` has the settings of one unit: when it is resharded and prefetched, and how far its gradients go."""

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
    """The settings that users make for a unit: resharding, prefetching, and the reduction of its gradients.

    Attributes:
        reshard_after_forward, reshard_after_backward: whether the unit is resharded then.
        keeps_without_backward: a unit that is not resharded after a forward stays so, also if no backward will come.
        keeps_as_root: where it is outermost, it has its parameters from forward to backward, which begins with it.
        keeps_for_inference: it stays between forwards without gradients, and is not compared with its shards there.
        part_of: a unit that was made in the same call, and is outermost for this one as well.
        keeps_memory: resharding keeps the memory of the unsharded parameters.
        unshard_in_backward: whether its backward needs its parameters.
        forward_prefetch, backward_prefetch: units to unshard ahead; None for those that are expected to come next.
        sync: how far the gradients of the next backwards go.
        is_last_backward: whether the next backward is the last backward of a step, as far as a user says.
        predivide, postdivide: factors by which gradients are divided before and after they are summed.
        fills_unused: whether a parameter that no rank used gets a gradient of zeros.
        comm_hook: the user's own reduce-scatter; None for ours.
        all_reduce_hook: a user's function that a reduction ends with.
        reductions_in_flight: so many reductions may go on while another one is started; of a root, the most counts.
        bucket_bytes: of a root, small gradients go together up to this much; 0 sends each by itself.
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
        """Return the settings of a unit that was just made."""
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
        """Follow a setting of the user, also for the outermost unit."""
        self.reshard_after_forward, self.keeps_as_root = reshard, False

    def of_copy(self) -> Policy:
        """Return the settings of a copied unit, with which other units may not be copied."""
        return replace(self, part_of=None, forward_prefetch=None, backward_prefetch=None, keeps_for_inference=False)
