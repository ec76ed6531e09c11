"""What a wrapper does with whole parameters: showing them, saving them, loading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp._forward import TrainingState
from fsdp._handover import reshard_optimizer
from fsdp._precision import check_dtype
from fsdp._state_dict import ensure_agreed, ensure_same_values, whole_state, with_wrapped_metadata
from fsdp._summon import summoned
from fsdp._unit import Unit, units_in
from fsdp._values import require_values_everywhere
from fsdp._wrapper_copy import WrapperCopy
from fsdp._wrapper_hooks import WrapperHooks

if TYPE_CHECKING:
    from typing_extensions import Self


class WrapperState(WrapperCopy, WrapperHooks):
    """The half of `FullyShardedDataParallel` that training does not need."""

    @contextmanager
    def summon_full_params(
        self, recurse: bool = True, volatile: bool = False, *, rank0_only: bool = False, with_grads: bool = False
    ) -> Iterator[None]:
        """Collective. Whole parameters as ordinary parameters of the modules, under their plain names.

        Parameters that were `DTensor`s are so again.

        Each rank holds all of them at once. What is changed inside (in place, or by assigning a new parameter of the
        same shape) is kept on leaving, each rank keeping its part: make the same changes on every rank. Forward works
        inside without gradients. The tensors stay valid afterwards, as copies.

        Args:
            recurse: inner wrappers' parameters as well.
            volatile: forget changes.
            rank0_only: only the first rank (of the process group, and of the first replica) holds them; elsewhere the
                modules stay sharded. What is changed there is sent to all, so no other rank needs the memory.
            with_grads: show the reduced gradients as well, whole, in ``grad``; changed or assigned ones are kept. Those
                that a parameter doesn't have stay None.

        Raises:
            RuntimeError: inside a forward or backward, when nested, while there are parameters without values, for
                changes that cannot be kept, or with `with_grads` while gradients are not reduced.
        """
        self._require_idle("summon full parameters")
        units = self._units() if recurse else [self._unit]
        already = [unit.name for unit in units if unit.state is TrainingState.SUMMON_FULL_PARAMS]
        if already:
            raise RuntimeError(f"summon_full_params cannot be nested: {already[0]} is summoned already")
        ensure_agreed(self._unit)
        require_values_everywhere(self._unit, "summon full parameters", recurse)
        if volatile:
            ensure_same_values(self._unit)
        with summoned(units, not volatile, with_grads, rank0_only):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Collective. As `nn.Module.apply`, with whole parameters visible; changes are kept."""
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            return super().apply(fn)
        with self.summon_full_params():
            return super().apply(fn)

    def reset_parameters(self) -> None:
        """Collective. The module's own ``reset_parameters()``; every rank must have the same random state.

        Raises:
            RuntimeError: unless `allow_reset_parameters` was given.
        """
        if not self._options.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters() on sharded parameters is refused, because ranks with different random states would "
                "mix different values. Pass allow_reset_parameters=True if all ranks are seeded alike."
            )
        with self.summon_full_params():
            self.module.module.reset_parameters()  # type: ignore[operator]

    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Collective. The whole state under the module's plain names, in tensors of its own, on every rank.

        Collective over the meshes of parameters that are `DTensor`s as well; they are saved as plain, whole tensors.

        Units are gathered one after the other: no rank needs more than the result and one unit besides. Tensors are on
        `state_dict_device`, parameters in the dtype that the optimizer steps, buffers in the one they had before
        wrapping.

        Args:
            destination, prefix, keep_vars: as for `nn.Module.state_dict`.
            dtype: cast floating-point parameters (not buffers) to this one.

        Raises:
            RuntimeError: inside a forward or backward, or while there are parameters without values.
            ValueError: for a `dtype` that is no floating-point one, or together with `keep_vars`.
        """
        if dtype is not None:
            return self._cast_state_dict(destination, prefix, keep_vars, dtype)
        if self._unit.shows_parts:
            return self._state_of_parts(destination, prefix, keep_vars)
        self._require_idle("take a state dict")
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        ensure_agreed(self._unit)
        require_values_everywhere(self._unit, "take a state dict")
        ensure_same_values(self._unit)
        device = self._options.state_dict_device
        state = whole_state(self._unit, destination, prefix, keep_vars, device, self._unit.export_dtype)
        for after in self._state_dict_hooks.values():
            changed = after(self, state, prefix, state._metadata.get(prefix[:-1], {}))
            state = state if changed is None else changed
        return state

    def _cast_state_dict(self, destination: Any, prefix: str, keep_vars: bool, dtype: torch.dtype) -> Any:
        check_dtype("dtype", dtype)
        if keep_vars:
            raise ValueError("state_dict(keep_vars=True) gives the tensors themselves, which have their own dtype")
        for unit in self._units():
            unit.export_dtype = dtype
        try:
            return self.state_dict(destination=destination, prefix=prefix)
        finally:
            for unit in self._units():
                unit.export_dtype = None

    def _state_of_parts(self, destination: Any, prefix: str, keep_vars: bool) -> Any:
        """Of modules that show this rank's parts (`_sharded_state`): nothing is to be gathered."""
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state = self._unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for after in self._state_dict_hooks.values():
            changed = after(self, state, prefix, state._metadata.get(prefix[:-1], {}))
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Load a whole state with plain names, each rank keeping its part, unit by unit.

        For parameters that are `DTensor`s it may have whole plain tensors, or `DTensor`s.

        Returns:
            torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

        Raises:
            RuntimeError: inside a forward or backward, or for keys and shapes that do not fit.
            NotImplementedError: for ``assign=True``: a shard cannot become the given tensors.
        """
        if assign:
            raise NotImplementedError("load_state_dict(assign=True): shards are copied into; leave assign at False")
        self._require_idle("load a state dict")
        ensure_agreed(self._unit)
        try:
            return super().load_state_dict(with_wrapped_metadata(state_dict, self), strict=strict)
        finally:
            for unit in self._units():
                if unit.close_loading is not None:
                    unit.close_loading()

    def reshard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand over an optimizer that was made before wrapping: it goes on where it was, on this rank's shards.

        For the outermost wrapper that its parameters are in. In place: original parameters are replaced by what stands
        for them now, and their state is cut (tensors of the parameter's shape) or kept (numbers). Groups, their
        options, learning-rate schedulers and parameters that were not wrapped stay as they are. No rank needs another
        for it, but call it on every rank, with the same state. The second time it does nothing.

        Args:
            optimizer: any of `torch.optim.Optimizer`, stepped or not. If there is an error it is not changed.

        Raises:
            RuntimeError: inside a forward or backward.
            TypeError: if it is no `torch.optim.Optimizer`.
            ValueError: if it has only some of the parameters of a flat parameter, or has them in several groups or in
                different states (all of which ``use_orig_params=True`` allows); for state that is neither of the
                parameter's shape nor a number; for parameters of other models, and summoned copies.
        """
        self._require_idle("hand over an optimizer")
        reshard_optimizer(self._unit, optimizer, {param: name for name, param in self.named_parameters()})

    def _units(self) -> list[Unit]:
        return [unit for _, unit in units_in(self._unit)]

    def _require_idle(self, what: str) -> None:
        if self._unit.close_loading is not None:
            self._unit.close_loading()
        if self._unit.runtime is not None:
            self._unit.runtime.ensure_idle(what)
