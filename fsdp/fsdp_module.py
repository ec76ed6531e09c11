"""`FSDPModule`: what a module can do besides, once `fully_shard` was called on it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from fsdp.engine.deferred_init import require_values_everywhere
from fsdp.engine.placeholder import under_way
from fsdp.engine.runtime import Runtime, runtime_of
from fsdp.engine.unit import TrainingState, Unit, unit_of, units_in
from fsdp.state_dict.load import explain


class UnshardHandle:
    """Whole parameters that are on their way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return when the module sees them (on CUDA: for work on the current stream)."""
        self._unit.wait_for_unshard()


class FSDPModule:
    """A module whose parameters are sharded by `fully_shard`: mixed into its class, ``FSDP<Class>``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(module)(...)`` makes another module of the original class, which nobody has sharded.
        return cls.__mro__[2](*args, **kwargs)

    # --- parameters ---------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Collective. Have the module see its own parameters whole, until `reshard`, or the end of its next forward.

        Inner sharded modules keep theirs sharded. ``parameters()`` lists the `DTensor`s all the time.

        Args:
            async_op: return at once; the next forward waits by itself, everybody else by the handle's ``wait()``.

        Raises:
            RuntimeError: naming parameters without values.
        """
        unit = _of(self)
        unit.ensure_runtime()
        require_values_everywhere(unit, "unshard", recurse=False)
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def wait_for_unshard(self) -> None:
        """Return when an ``unshard(async_op=True)`` is done."""
        if _of(self).is_gathering:
            _of(self).wait_for_unshard()

    def reshard(self) -> None:
        """Give the memory of the module's own whole parameters back.

        Raises:
            RuntimeError: while the module computes.
        """
        unit = _of(self)
        if unit.state is TrainingState.FORWARD:
            raise RuntimeError(f"cannot reshard {unit.name} in the middle of its forward")
        unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are freed after forward, for this module and, with `recurse`, those inside."""
        for unit in _units(self, recurse):
            unit.policy.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are freed after backward. Otherwise they stay until the end of the next forward.

        For several backwards with the same weights. A changed shard is gathered again in any case.
        """
        for unit in _units(self, recurse):
            unit.policy.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """In this module's forward, gather these ahead, in this order, instead of what is expected to come next."""
        _of(self).policy.forward_prefetch = [_of(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """In this module's backward, gather these ahead, in this order, instead of what is expected to come next."""
        _of(self).policy.backward_prefetch = [_of(module) for module in modules]

    # --- gradients ----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients over the ranks, or accumulate them whole on each rank.

        Raises:
            RuntimeError: on an inner module, or inside a forward or backward.
            ValueError: for ``recurse=False`` on a module with others inside.
        """
        runtime = _runtime_as_root(self, "set_requires_gradient_sync")
        if not recurse and len(runtime.units) > 1:
            raise ValueError("set_requires_gradient_sync(recurse=False): all modules under one root reduce, or none")
        runtime.ensure_idle("change whether gradients are reduced", is_served=True)
        runtime.sync_gradients = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """For callers of torch's method, which saves its backwards but the last one some waiting.

        Here nothing depends on it: each backward leaves complete gradients behind, whatever comes next.
        """

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by this number, and not by that of the ranks.

        Raises:
            ValueError: if it is not positive.
        """
        if factor <= 0:
            raise ValueError(f"gradients are divided by this: it must be positive, got {factor}")
        _of(self).set_divide_factors(1.0, float(factor))

    # --- other --------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the module does by itself; of whole tensors each rank keeps its part."""
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            explain(error, self, state_dict)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for unit in _units(self, recurse=True):
            if unit.runtime is not None:
                unit.runtime.ensure_idle("copy the model")
                unit.runtime.release()
            for handle in unit.handles:
                handle.absorb()
        copied = memo[id(self)] = object.__new__(type(self))
        with under_way():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        _of(copied).wake()
        return copied

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"DataParallel has been given a {type(self).__name__}, which is sharded over processes and cannot be "
            "copied to several devices of one. Call the module itself, in one process for each device."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be pickled: its parameters are DTensors, whose mesh is of these "
            "processes. Save it with fsdp.save, or its state_dict() with torch.distributed.checkpoint."
        )


# Functions, and no methods: a user's module may have those names.


def _of(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"this {type(module).__name__} was not sharded: call fully_shard on it")
    return unit


def _units(module: Any, recurse: bool) -> list[Unit]:
    return [unit for _, unit in units_in(_of(module))] if recurse else [_of(module)]


def _runtime_as_root(module: Any, method: str) -> Runtime:
    unit = _of(module)
    runtime = runtime_of(unit)
    if runtime.root is not unit:
        raise RuntimeError(
            f"{method} is for the outermost module under fully_shard; '{unit.name}' lies inside "
            f"{runtime.root.name}. Call it there."
        )
    return runtime


@cache
def fsdp_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module of this one gets."""
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})
