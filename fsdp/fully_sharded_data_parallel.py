"""`FullyShardedDataParallel`, the wrapper: its arguments, its methods, and the names under which things are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fsdp._clip import clip_grad_norm
from fsdp._collect import Places, collect, group, names_of, take_over
from fsdp._comm import Group, communicator, default_group, reduce_group
from fsdp._flat_param import FlatParameter
from fsdp._optimizers import watch_optimizers
from fsdp._options import Options
from fsdp._runtime import Runtime
from fsdp._state_dict import Loading, ensure_agreed, exposed, whole_state, with_wrapped_metadata
from fsdp._unit import TrainingState, Unit, unit_of
from fsdp._wrapper_access import WrapperAccess
from fsdp.flatten_params_wrapper import FlattenParamsWrapper, ShardedParamsWrapper


class ProcessGroupName(str, Enum):
    """Names that stand for process groups in the constructor."""

    default = "default"
    reduce_scatter = "reduce_scatter"


class FullyShardedDataParallel(WrapperAccess):
    """Train a module whose parameters, gradients and optimizer state are spread over the ranks.

    The parameters of `module` that no inner wrapper took become one flat parameter (one for each combination of
    dtype and `requires_grad`), of which every rank keeps an equal part. They are gathered when the module runs, and
    freed afterwards; in backward, gradients are summed over the ranks, averaged, and each rank keeps its part. Wrap
    inner modules first (see `fsdp.auto_wrap`): only one wrapper's parameters, and the next one's, are whole at a time.
    Make the optimizer afterwards, from ``parameters()`` of the outermost wrapper.

    Every rank must wrap the same modules with the same values in the same order; nothing is broadcast. The
    arguments are FairScale's, in its order. Those that this version does not build yet raise `NotImplementedError`
    when set to anything but their default.

    Args:
        module: the module to wrap; its parameters are taken over in place.
        process_group: ranks to shard over; None means all. An object with ``rank()`` and ``size()`` is enough for a
            world of one, without `torch.distributed`.
        process_group_reduce_scatter: ranks to sum gradients over, of the same size (otherwise `process_group` is used,
            with a warning). By default a second NCCL communicator, so that reductions and gathers overlap; on other
            backends, or with a `process_group` of your own, the same group.
        reshard_after_forward: free whole parameters after forward and gather them again for backward: least memory.
            False keeps them until backward is done: a third less communication.
        disable_reshard_on_root: the outermost wrapper keeps its own parameters (only) between forward and backward,
            which need them at once.
        flatten_parameters: False makes every parameter a flat parameter of its own, under its own name.
        bucket_cap_mb: gradients of small units (below 1 MiB, where latency counts) are collected up to this many MiB
            and reduced by one collective; 0 or less reduces each by itself. Larger gradients always leave at once.
        compute_device: where to compute; None means where the parameters are.
        gradient_predivide_factor: divide gradients by it before they are summed, and by ``world_size`` over it
            afterwards, to keep 16-bit sums in range. None: the smallest power of two whose square is at least the
            world size, or that does not divide it.
        verbose: print more in ``repr``.
        allow_reset_parameters: let `reset_parameters` reach the module, instead of raising.
        mixed_precision, fp32_reduce_scatter, move_params_to_cpu, compute_dtype, buffer_dtype, move_grads_to_cpu,
            no_broadcast_optim_state, state_dict_device, clear_autocast_cache, force_input_to_fp32, cpu_offload,
            state_dict_on_rank_0_only: only their defaults, for now.

    Raises:
        RuntimeError: without a process group.
        TypeError: for integer parameters, or parameters without values (meta device).
        ValueError: for a module that is wrapped already, has no parameters, or shares one with an inner wrapper.
        NotImplementedError: for options that are not built yet.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Group | None = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: float = 25,
        compute_device: torch.device | str | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "module", "__class__")}
        options = Options.resolve(**given)
        super().__init__()
        _check_module(module)
        watch_optimizers()
        self._options = options
        self.process_group = default_group(process_group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.flatten_parameters = flatten_parameters
        self.verbose = verbose
        found = collect(module)
        self.compute_device = options.device_for(module)
        self.compute_dtype = next((param.dtype for param in found), torch.float32)
        self.process_group_reduce_scatter = self._reduce_group(process_group_reduce_scatter)
        self._unit = self._make_unit(module)
        self._fsdp_wrapped_module = ShardedParamsWrapper(
            module, group(found) if flatten_parameters else [], self.rank, self.world_size, self.compute_device
        )
        if options.compute_device is not None:
            module.to(self.compute_device)  # buffers; the parameters that are ours have left
        if flatten_parameters:
            found.clear()  # the shards are cut: let the originals go before more memory is taken
            self._shard_flattened()
        else:
            self._shard_one_by_one(found)
        self._unit.rename(type(module).__name__)
        self._loading = Loading(self, self._unit)

    # --- construction -------------------------------------------------------------------------------------------

    def _reduce_group(self, wanted: Any) -> Group:
        if wanted in (None, ProcessGroupName.reduce_scatter):
            return reduce_group(self.process_group, self.compute_device)
        return self._options.checked_reduce_group(wanted, self.process_group, ProcessGroupName.default)

    def _make_unit(self, module: nn.Module) -> Unit:
        predivide = self._options.predivide_factor(self.world_size)
        return Unit(
            module,
            communicator(self.process_group, self.compute_device),
            reshard_after_forward=self._options.reshard_after_forward,
            predivide=predivide,
            postdivide=self.world_size / predivide,
            new_runtime=self._new_runtime,
        )

    def _shard_flattened(self) -> None:
        outer, inner = self.module, self.module.module
        for name, flat_param, places in zip(outer.flat_param_names, outer.flat_params, outer.param_infos, strict=True):
            # On the user's module as well, so that its own `parameters()`, `dtype` and `device` go on working.
            self._shard(flat_param, places, [(outer, name), (inner, name)])

    def _shard_one_by_one(self, found: dict[nn.Parameter, Places]) -> None:
        take_over(found, type(self.module.module).__name__)
        for param, places in found.items():
            flat_param = self.module._flatten([param], names_of([param], found))
            self._shard(flat_param, [places], [(place.module, place.name) for place in places])

    def _shard(self, flat_param: FlatParameter, places: Any, registered: list[tuple[nn.Module, str]]) -> None:
        reduce_comm = communicator(self.process_group_reduce_scatter, self.compute_device)
        self._unit.add_handle(flat_param, places, registered, reduce_comm)

    def _new_runtime(self, root: Unit) -> Runtime:
        return Runtime(root, keep_root=self._options.disable_reshard_on_root, bucket_bytes=self._options.bucket_bytes)

    # --- training -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Collective over the process group, as is the backward through its outputs."""
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            if self._unit.runtime is not None:
                self._unit.runtime.give_up_forward(self._unit)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without summing them over the ranks; the next backward outside does it for all.

        For the outermost wrapper. Each rank holds whole gradients meanwhile.

        Raises:
            RuntimeError: on an inner wrapper.
        """
        with self._runtime_as_root("no_sync").no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. Scale all gradients so that their norm, over all ranks, is at most `max_norm`.

        Args:
            max_norm: the largest norm to leave.
            norm_type: p of the p-norm; ``inf`` for the largest absolute value.

        Returns:
            The norm before clipping, a scalar of at least float32, the same on every rank.

        Raises:
            RuntimeError: on an inner wrapper, inside a forward or backward, or if gradients are not reduced yet.
            ValueError: if `norm_type` is not positive.
            NotImplementedError: if an inner wrapper uses other ranks.
        """
        runtime = self._runtime_as_root("clip_grad_norm_")
        runtime.ensure_idle("clip gradients")
        return clip_grad_norm(self._unit, runtime.units, float(max_norm), float(norm_type), self.compute_device)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = False) -> None:
        """Divide gradients by `pre` before and by `post` after they are summed, whatever the world size.

        Raises:
            RuntimeError: inside a forward or backward.
            ValueError: for factors that are not positive.
        """
        if pre <= 0 or post <= 0:
            raise ValueError(f"gradients are divided by these: they must be positive, got pre={pre}, post={post}")
        self._require_idle("set gradient factors")
        for unit in self._units() if recursive else [self._unit]:
            unit.set_divide_factors(pre, post)

    # --- whole parameters ---------------------------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Collective. Whole parameters as ordinary parameters of the modules, under their plain names.

        Each rank holds all of them at once. What is changed inside (in place, or by assigning a new parameter of the
        same shape) is kept on leaving, each rank keeping its part: make the same changes on every rank. Forward works
        inside without gradients. The tensors stay valid afterwards, as copies.

        Args:
            recurse: inner wrappers' parameters as well.
            volatile: forget changes.

        Raises:
            RuntimeError: inside a forward or backward, when nested, or for changes that cannot be kept.
        """
        self._require_idle("summon full parameters")
        units = self._units() if recurse else [self._unit]
        summoned = [unit.name for unit in units if unit.state is TrainingState.SUMMON_FULL_PARAMS]
        if summoned:
            raise RuntimeError(f"summon_full_params cannot be nested: {summoned[0]} is summoned already")
        ensure_agreed(self._unit)
        with exposed(units, keep_changes=not volatile):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
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

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Collective. The whole state under the module's plain names, in tensors of its own, on every rank.

        Units are gathered one after the other: no rank needs more than the result and one unit besides.

        Raises:
            RuntimeError: inside a forward or backward.
        """
        self._require_idle("take a state dict")
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        ensure_agreed(self._unit)
        state = whole_state(self._unit, destination, prefix, keep_vars)
        for after in self._state_dict_hooks.values():
            changed = after(self, state, prefix, state._metadata.get(prefix[:-1], {}))
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Load a whole state with plain names, each rank keeping its part, unit by unit.

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
            for wrapper in get_fsdp_instances(self):
                wrapper._loading.close()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        self._require_idle("move or cast the module")
        if self._unit.runtime is not None:
            self._unit.runtime.release()
        super()._apply(fn, recurse)
        self._unit.comm = self._unit.comm.for_device(next(self.parameters()).device)
        for handle in self._unit.handles:
            handle.follow_shard()
            self.compute_device, self.compute_dtype = handle.full.device, handle.full.dtype
        return self

    def _units(self) -> list[Unit]:
        return [wrapper._unit for wrapper in get_fsdp_instances(self)]

    def _require_idle(self, what: str) -> None:
        if self._unit.close_loading is not None:
            self._unit.close_loading()
        if self._unit.runtime is not None:
            self._unit.runtime.ensure_idle(what)

    def _runtime_as_root(self, method: str) -> Runtime:
        if self._unit.runtime is None:
            self._unit.runtime = self._new_runtime(self._unit)
        if self._unit.runtime.root is not self._unit:
            raise RuntimeError(
                f"{method} is for the outermost FullyShardedDataParallel; this one ('{self._unit.name}') lies inside "
                f"{self._unit.runtime.root.name}. Call it there."
            )
        return self._unit.runtime


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got a {type(module).__name__}")
    managed = isinstance(module, FlattenParamsWrapper) and module._is_managed
    if isinstance(module, FullyShardedDataParallel) or managed or unit_of(module) is not None:
        raise ValueError(
            f"this {type(module).__name__} is wrapped already: wrap each module once, and the modules around it"
        )
    if next(module.parameters(), None) is None:
        raise ValueError(
            f"{type(module).__name__} has no parameters to shard: leave it unwrapped, or wrap the module around it"
        )


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """The wrappers in a module tree, in the order of ``modules()``.

    Args:
        mod: the outermost module to look at.
        skip_empty: leave out wrappers whose parameters were all taken by inner ones.
    """
    found = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [wrapper for wrapper in found if wrapper.params or not skip_empty]
