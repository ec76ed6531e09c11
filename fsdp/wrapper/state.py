"""What a wrapper does with whole parameters: showing them, saving them, loading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp.distributed.collectives import during
from fsdp.engine.deferred_init import require_values_everywhere
from fsdp.engine.forward_hooks import TrainingState
from fsdp.engine.precision import check_dtype
from fsdp.engine.state_requests import Saving, Summoning, saving
from fsdp.engine.unit import Unit, units_in
from fsdp.optim_utils.reshard_optimizer import reshard_optimizer
from fsdp.state_dict.full import ensure_agreed, ensure_same_values, load_whole, whole_state
from fsdp.state_dict.summon import params_shown, shapes_summoned, summoned
from fsdp.wrapper.copy import WrapperCopy
from fsdp.wrapper.hooks import WrapperHooks

if TYPE_CHECKING:
    from typing_extensions import Self


class WrapperState(WrapperCopy, WrapperHooks):
    """The half of `FullyShardedDataParallel` that training does not need."""

    @contextmanager
    def summon_full_params(
        self,
        recurse: bool = True,
        volatile: bool = False,
        *,
        rank0_only: bool = False,
        with_grads: bool = False,
        offload_to_cpu: bool = False,
    ) -> Iterator[None]:
        """Collective. Whole parameters as ordinary parameters of the modules, under their plain names.

        Parameters that were `DTensor`s are so again.

        Each rank holds all of them at once (`summon_units` shows one unit after the other). What is changed inside (in
        place, or by assigning a new parameter of the same shape) is kept on leaving, each rank keeping its part: make
        the same changes on every rank. Forward works inside without gradients. The tensors stay valid afterwards, as
        copies. What is summoned already may be summoned again inside in the same form; changes are kept when the
        outer one ends.

        Args:
            recurse: inner wrappers' parameters as well.
            volatile: forget changes.
            rank0_only: only the first rank (of the process group, and of the first replica) holds them; elsewhere the
                modules stay sharded, and no memory is needed. What is changed there is sent to the ranks that keep it.
            with_grads: show the reduced gradients as well, whole, in ``grad``; changed or assigned ones are kept. Those
                that a parameter doesn't have stay None.
            offload_to_cpu: in host memory, moved there unit by unit. Forward then doesn't work inside, unless it is
                computed there.

        Raises:
            RuntimeError: inside a forward or backward, when nested in another form, while there are parameters without
                values, for changes that cannot be kept, or with `with_grads` while gradients are not reduced.
            NotImplementedError: for `offload_to_cpu` of `DTensor`s that are elsewhere.
        """
        form = Summoning(not volatile, with_grads, rank0_only, offload_to_cpu)
        units = self._units() if recurse else [self._unit]
        self._prepare_to_summon(form, recurse)
        with summoned(units, form):
            yield

    def summon_units(
        self,
        volatile: bool = False,
        *,
        rank0_only: bool = False,
        with_grads: bool = False,
        offload_to_cpu: bool = False,
    ) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter]]]:
        """Collective. As `summon_full_params`, of one unit after the other, so that one is whole at a time.

        For tools that go through a model: each unit is sharded again, with what was changed, before the next one is
        shown, and when the loop is left. Go through all units on every rank, and in the loop do nothing collective with
        the model.

        Args:
            volatile, rank0_only, with_grads, offload_to_cpu: as for `summon_full_params`.

        Yields:
            For each wrapper in the tree, outer before inner, the module that it wraps, and the parameters that are
            whole now under their plain names from here: none of the inner wrappers', tied ones once. With
            `rank0_only` there are none on other ranks.

        Raises:
            As `summon_full_params`.
        """
        form = Summoning(not volatile, with_grads, rank0_only, offload_to_cpu)
        self._prepare_to_summon(form, recurse=True)
        for name, unit in units_in(self._unit):
            with summoned([unit], form):
                yield unit.module, params_shown(unit, "" if unit is self._unit else f"{name}.")

    @contextmanager
    def summon_shapes(self) -> Iterator[None]:
        """Whole parameters without values: as in `summon_full_params`, but on the meta device.

        For what counts and prints, and for nothing that computes: ``num_parameters()``, summaries,
        ``print_trainable_parameters()``. It needs no memory and no other rank, so it may be called on one rank alone.

        Raises:
            RuntimeError: inside a forward or backward.
        """
        self._require_idle("summon shapes")
        with shapes_summoned(self._units()):
            yield

    @during("summon_full_params()")
    def _prepare_to_summon(self, form: Summoning, recurse: bool) -> None:
        self._require_idle("summon full parameters")
        ensure_agreed(self._unit)
        require_values_everywhere(self._unit, "summon full parameters", recurse)
        if not form.keeps_changes:
            ensure_same_values(self._unit)

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

    @during("state_dict()")
    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        *,
        dtype: torch.dtype | None = None,
        rank0_only: bool | None = None,
    ) -> Any:
        """Collective. The whole state under the module's plain names, in tensors of its own.

        Collective over the meshes of parameters that are `DTensor`s as well; they are saved as plain, whole tensors.

        Units are put together one after the other: a rank that gets the state needs memory for it and one unit
        besides, and other ranks need none. Tensors are on `state_dict_device`, parameters in the dtype that the
        optimizer steps, buffers in the one they had before wrapping.

        What the outermost wrapper was given, as arguments and as options, counts for those inside of it.

        Args:
            destination, prefix, keep_vars: as for `nn.Module.state_dict`.
            dtype: cast floating-point parameters (not buffers) to this one.
            rank0_only: on other ranks than the first (of the process group, and of the first replica) the result is
                empty; there, hooks of state dicts see tensors on the meta device. None: as the option
                ``state_dict_on_rank_0_only`` says.

        Raises:
            RuntimeError: inside a forward or backward, or while there are parameters without values.
            ValueError: for a `dtype` that is no floating-point one, or together with `keep_vars`.
        """
        if dtype is not None:
            check_dtype("dtype", dtype)
            if keep_vars:
                raise ValueError("state_dict(keep_vars=True) gives the tensors themselves, which have their own dtype")
        if self._unit.access.shows_parts:
            return self._state_of_parts(destination, prefix, keep_vars)
        self._require_idle("take a state dict")
        if self._unit.access.summoned is not None and self._unit.access.summoned.rank0_only:
            raise RuntimeError(
                "state_dict(): inside summon_full_params(rank0_only=True) the other ranks' modules are sharded. Take "
                "it outside, with state_dict(rank0_only=True)."
            )
        is_outermost = self._unit.access.saving is None
        first_only = self._options.state_dict_on_rank_0_only if rank0_only is None else rank0_only
        asked = Saving(self._unit.everyone, dtype, self._options.state_dict_device, first_only)
        with saving(self._unit, asked) as form:
            for before in self._state_dict_pre_hooks.values():
                before(self, prefix, keep_vars)
            ensure_agreed(self._unit)
            require_values_everywhere(self._unit, "take a state dict")
            ensure_same_values(self._unit)
            state = whole_state(self._unit, destination, prefix, keep_vars, form)
            for after in self._state_dict_hooks.values():
                changed = after(self, state, prefix, state._metadata.get(prefix[:-1], {}))
                state = state if changed is None else changed
        if is_outermost:
            for unit in self._units():
                unit.settle()
            if not form.is_here:
                for key in [key for key in state if key.startswith(prefix)]:
                    del state[key]
        return state

    def _state_of_parts(self, destination: Any, prefix: str, keep_vars: bool) -> Any:
        """Of modules that show this rank's parts (`state_dict.sharded`): nothing is to be gathered."""
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state = self._unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for after in self._state_dict_hooks.values():
            changed = after(self, state, prefix, state._metadata.get(prefix[:-1], {}))
            state = state if changed is None else changed
        return state

    @during("load_state_dict()")
    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False, *, rank0_only: bool = False
    ) -> Any:
        """Collective. Load a whole state with plain names, each rank keeping its part, unit by unit.

        For parameters that are `DTensor`s it may have whole plain tensors, or `DTensor`s. A state that does not fit
        changes nothing, unless modules have load hooks or methods of their own; then what fits is loaded, as torch
        does.

        Args:
            state_dict, strict, assign: as for `nn.Module.load_state_dict`.
            rank0_only: take the first rank's (of the process group, and of the first replica); others pass anything,
                and are sent their parts. They need memory for their shards only.

        Returns:
            torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

        Raises:
            RuntimeError: inside a forward or backward, or for keys and shapes that do not fit; on every rank, naming
                the first one that could not load.
            NotImplementedError: for ``assign=True``: a shard cannot become the given tensors.
        """
        if assign:
            raise NotImplementedError("load_state_dict(assign=True): shards are copied into; leave assign at False")
        self._require_idle("load a state dict")
        ensure_agreed(self._unit)
        return load_whole(self, self._unit, super().load_state_dict, state_dict, strict, rank0_only)

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
        if self._unit.access.close_loading is not None:
            self._unit.access.close_loading()
        if self._unit.runtime is not None:
            self._unit.runtime.ensure_idle(what)
