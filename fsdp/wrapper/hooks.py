"""What users may put in the place of the reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsdp.distributed.collectives import during
from fsdp.distributed.comm_hooks import CommHook
from fsdp.distributed.consensus import agree_on
from fsdp.wrapper.access import WrapperAccess


class WrapperHooks(WrapperAccess):
    """The part of `FullyShardedDataParallel` that hands the gradients of all units to a hook."""

    @during("register_comm_hook()")
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Tensor, Tensor], None]) -> None:
        """Collective. Have `hook` average gradients over the ranks, in the place of this library's reduce-scatter.

        For the outermost wrapper, between steps, once; it then serves all units. It is called in backward, once for
        each flat parameter that is trained, as ``hook(state, gradient, shard)``:

        - ``gradient`` ``[world_size * n]`` is this rank's whole flat gradient with its padding (zeros), sums over
          `no_sync` included, not divided by anything, in the unit's reduce dtype and on its compute device. The hook
          may overwrite it.
        - ``shard`` ``[n]``, of the same dtype and device, must hold this rank's part of the *average* over ranks when
          the hook returns: elements ``rank * n`` to ``(rank + 1) * n``. It is then cast to the parameter's dtype.

        The signature and the meaning are those of torch's FSDP1 for sharded strategies, so its hooks work here. A hook
        is called at world size 1 too, in the same way. `fsdp.comm_hooks` has a hook, and what is needed to write one.

        Args:
            state: is passed to each call; anything.
            hook: the same function on every rank.

        Raises:
            TypeError: if `hook` cannot be called.
            RuntimeError: on an inner wrapper, inside a forward or backward, if one is registered already, or if the
                ranks register different ones.
            ValueError: if other factors to divide gradients by were asked for, which a hook replaces, or if shards
                have replicas (HYBRID_SHARD, NO_SHARD), over which gradients would be summed without the hook.
        """
        if not callable(hook):
            raise TypeError(f"register_comm_hook needs a function hook(state, gradient, shard), got {hook!r}")
        runtime = self._runtime_as_root("register_comm_hook")
        self._require_idle("register a communication hook")
        for wrapper in self.modules():
            if isinstance(wrapper, WrapperAccess):
                _check_free(wrapper)
        comm_hook = CommHook(hook, state)
        agree_on(self._unit.everyone, "communication hooks", comm_hook.name)
        for unit in runtime.units:
            unit.use_comm_hook(comm_hook)


def _check_free(wrapper: WrapperAccess) -> None:
    unit, options = wrapper._unit, wrapper._options
    if unit.comm_hook is not None:
        raise RuntimeError(
            f"{unit.name}: a communication hook ({unit.comm_hook.name}) is registered already, and there can be only "
            "one. Write one hook that does both, or change what is in its state."
        )
    if unit.replicas.world_size > 1:
        raise ValueError(
            f"{unit.name}: gradients are summed over {unit.replicas.world_size} replicas besides "
            f"({wrapper.sharding_strategy.name}), and a communication hook does not see that. Wrap with one "
            "process_group to shard over; or leave the hook out, and say in which dtype to send with "
            "MixedPrecision(reduce_dtype=...)."
        )
    predivide = options.predivide_factor(wrapper.world_size)
    found, default = (unit.predivide, unit.postdivide), (predivide, wrapper.world_size / predivide)
    if options.gradient_predivide_factor is not None or found != default:
        raise ValueError(
            f"{unit.name}: gradients were to be divided by {unit.predivide} and {unit.postdivide}, but a communication "
            "hook divides them by itself. Leave gradient_predivide_factor at None, don't call "
            "set_gradient_divide_factors, and have the hook divide by what you want."
        )
