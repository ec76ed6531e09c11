"""`ParkedSteps`: the steps of an optimizer with parked state, one unit after another.

For each unit, a step restores the state, updates the unit's parameters, and parks the state again. Meanwhile the state
of the next unit is copied, so the state of at most two units is in memory. torch calls the hooks of a step once for
all parameters. Therefore the optimizer has no groups during the call of `step`, and the first post-hook calls the step
without hooks for each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from fsdp.checkpoint.parked_tensors import ParkedTensors, host_values, in_own_memory
from fsdp.checkpoint.unit_states import UnitStates
from fsdp.distributed.devices import HOST, Arrival, new_copy_stream, return_cached_memory
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.trees import map_tensors


class ParkedSteps:
    """The steps of an optimizer whose state is parked, in part or completely.

    Args:
        optimizer: the optimizer. Its state is restored unit by unit if `UnitStates` divides it; otherwise all state is
            in memory during a step.
        states: the state of the optimizer, divided by units.
        device: the device of the parameters.
        check: a function that raises an error if the optimizer cannot step.
        stay: a function that returns the addresses of storages that are not parked with the state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: UnitStates,
        device: torch.device,
        check: Callable[[], None],
        stay: Callable[[], set[int]],
    ) -> None:
        self.optimizer, self.states, self._check, self._stay = optimizer, states, check, stay
        self._parked: list[tuple[FlatParamHandle | None, ParkedTensors]] = []
        self._groups: list[dict[str, Any]] | None = None  # the optimizer's, while they are removed from it
        self._hooks: list[Any] = []
        self._device, self._inward, self._outward = device, new_copy_stream(device), new_copy_stream(device)

    @contextmanager
    def with_parked(self, handle: FlatParamHandle | None, tensors: ParkedTensors) -> Iterator[None]:
        """Restore parked tensors, the part `handle` of the state, for each step during the context."""
        if not self._parked:
            optimizer = self.optimizer
            after = optimizer.register_step_post_hook(self._after)
            hooks: Any = after.hooks_dict_ref()
            hooks.move_to_end(after.id, last=False)  # users' hooks must see all parameters
            self._hooks = [after, optimizer.register_step_pre_hook(self._before)]
            self._hooks.append(optimizer.register_state_dict_post_hook(lambda _, tree: map_tensors(host_values, tree)))
            self._hooks.append(
                optimizer.register_load_state_dict_pre_hook(lambda _, tree: map_tensors(in_own_memory, tree))
            )
        entry = handle, tensors
        self._parked.append(entry)
        try:
            yield
        finally:
            self._parked.remove(entry)
            for hook in () if self._parked else self._hooks:
                hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._check()
        self.states.divide()
        if not self.states.is_divided:
            for _, tensors in self._parked:
                tensors.fill()
                tensors.show()
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        # Called after all pre-hooks of the step, and before the optimizer reads its groups.
        def then_take_groups() -> Any:
            loss = None if closure is None else closure()
            self._groups, optimizer.param_groups = optimizer.param_groups, []
            return loss

        return args[:1], {**kwargs, "closure": then_take_groups}

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        groups, self._groups = self._groups, None
        if groups is None:
            self._park(None, self._stay())
        else:
            optimizer.param_groups = groups
            self._step_by_units(optimizer)
        for device in {HOST, self._device}:
            return_cached_memory(device)

    def _step_by_units(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        step, stay = type(optimizer).step.__wrapped__, self._stay()  # type: ignore[attr-defined]  # without hooks
        handles: list[FlatParamHandle | None] = [None]  # first the options of the groups
        for handle, params in self.states.params.items():
            if handle is not None and any(param.grad is not None for param in chain.from_iterable(params)):
                handles.append(handle)
        coming = self._fill(handles[0])
        try:
            for handle, following in zip(handles, [*handles[1:], None], strict=True):
                arrival, coming = coming, coming if following is None else self._fill(following)
                arrival.wait()
                for tensors in self._of(handle):
                    tensors.show()
                _set_params(optimizer, self.states.params[handle])
                try:
                    step(optimizer)
                finally:
                    if handle is not None:
                        self._park(handle, stay)
        finally:
            _set_params(optimizer, groups)
            for _, tensors in self._parked:
                tensors.drop()  # after a failed step, copies may be in flight
            self._park(None, stay)

    def _of(self, handle: FlatParamHandle | None) -> list[ParkedTensors]:
        return [tensors for other, tensors in self._parked if other is handle]

    def _fill(self, handle: FlatParamHandle | None) -> Arrival:
        with self._inward.fork():
            for tensors in self._of(handle):
                tensors.fill()
        return self._inward.arrival()

    def _park(self, handle: FlatParamHandle | None, stay: set[int]) -> None:
        for tensors in self._of(handle):
            if tensors.is_parked:  # by an inner call, if a subclass's step calls the step of its base
                continue
            with self._outward.fork():
                tensors.find(self.states.named(handle), stay)
                tensors.copy()
            self._outward.arrival().synchronize()
            tensors.free()


def _set_params(optimizer: torch.optim.Optimizer, groups: Iterable[list[Any]]) -> None:
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params
