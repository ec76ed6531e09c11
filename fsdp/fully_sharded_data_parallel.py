"""`FullyShardedDataParallel`, the wrapper: its arguments, its methods, and the names under which things are found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.distributed.communicator import Group, reduce_group, served_device
from fsdp.engine.flatten_params_wrapper import FlattenParamsWrapper
from fsdp.engine.grad_clipping import clip_by_norm, clip_by_value
from fsdp.engine.ignored import Ignored
from fsdp.engine.managed_params import GroupKey, Places, collect, device_of, taken_by
from fsdp.engine.module_overrides import guard, move_values, refuse_shared_modules
from fsdp.engine.nn_utils import teach_torch
from fsdp.engine.optimizer_hooks import watch_optimizers
from fsdp.engine.options import Options
from fsdp.engine.precision import MixedPrecision
from fsdp.engine.runtime import Runtime
from fsdp.engine.sharding_strategy import Groups, ShardingStrategy, reshards_after_forward
from fsdp.engine.shared_params import claimed_in, refuse_nothing_own, wanted
from fsdp.engine.synchronize import take_states_of_first
from fsdp.engine.unit import Unit, unit_of
from fsdp.fsdp_module import FSDPModule
from fsdp.state_dict.load import Loading
from fsdp.state_dict.materialize import ParamInit, materialize_unit
from fsdp.wrapper.fsdp1 import METHODS, Instead, refuses_keywords
from fsdp.wrapper.shards import WrapperShards


class ProcessGroupName(str, Enum):
    """Names that stand for process groups in the constructor."""

    default = "default"
    reduce_scatter = "reduce_scatter"


class FullyShardedDataParallel(WrapperShards):
    """Train a module whose parameters, gradients and optimizer state are spread over the ranks.

    The parameters of `module` that no inner wrapper took become one flat parameter (one for each combination of
    dtype and `requires_grad`), of which every rank keeps an equal part. They are gathered when the module runs, and
    freed afterwards; in backward, gradients are summed over the ranks, averaged, and each rank keeps its part. Wrap
    inner modules first (see `fsdp.auto_wrap`): only one wrapper's parameters, and the next one's, are whole at a time.
    Make the optimizer afterwards, from ``parameters()`` of the outermost wrapper.

    A wrapper may be wrapped in turn, used or not. A module of which inner wrappers took all parameters may be wrapped
    again, for another session say: the new wrapper takes the place of the old one, which is not to be used any more.

    Every rank must wrap the same modules with the same values in the same order; nothing is broadcast but for
    `sync_module_states`, and ranks compare their values at the first use. The
    arguments are FairScale's, in its order, and after them our own, by keyword only.

    Args:
        module: the module to wrap; its parameters are taken over in place.
        process_group: ranks to shard over; None means all. A pair of groups, ``(shard_group, replicate_group)``, or a
            2-D `DeviceMesh`, whose dim 0 replicates and dim 1 shards, is hybrid sharding: gathers stay within the
            first, gradients are summed over both. A 1-D mesh stands for its group. Parameters may be `DTensor`s on a
            mesh of other ranks, for tensor parallelism: give the group (or mesh) of the data-parallel dimension then.
            An object with ``rank()`` and ``size()`` is enough for a world of one, without `torch.distributed`.
        process_group_reduce_scatter: ranks to sum gradients over, of the same size (otherwise `process_group` is used,
            with a warning). By default a second NCCL communicator, so that reductions and gathers overlap; on other
            backends, or with a `process_group` of your own, the same group.
        reshard_after_forward: free whole parameters after forward and gather them again for backward: least memory.
            False keeps them until backward is done: a third less communication.
        disable_reshard_on_root: the outermost wrapper keeps its own parameters (only) between forward and backward,
            which need them at once.
        flatten_parameters: False makes every parameter a flat parameter of its own, under its own name, and in a world
            of one of its own shape.
        bucket_cap_mb: gradients of small units (below 1 MiB, where latency counts) are collected up to this many MiB
            and reduced by one collective; 0 or less reduces each by itself. Larger gradients always leave at once.
        mixed_precision: a `MixedPrecision` says in which dtypes to compute and communicate. True is FairScale's way of
            saying it: compute in `compute_dtype`, with float32 shards, buffers in `buffer_dtype`, and floating-point
            inputs of the outermost such wrapper cast. False computes in the parameters' own dtype, which may be any.
        fp32_reduce_scatter: with ``mixed_precision=True``, sum gradients over the ranks in float32.
        move_params_to_cpu: shards live in host memory (pinned, if there is an accelerator), and the optimizer steps
            there; each is copied to `compute_device` for its gather. Without an accelerator everything is in host
            memory anyway, and nothing is copied.
        compute_dtype: with ``mixed_precision=True``, what to compute in; None means float16. Without, the dtype that
            parameters must have.
        buffer_dtype: dtype of floating-point buffers; None means `compute_dtype` if that or ``mixed_precision=True`` is
            given, and otherwise leaves them as they are. State dicts hold them in their own.
        move_grads_to_cpu: reduced gradients live in host memory; None means as `move_params_to_cpu`. If only one of the
            two is moved, clipping, unscaling or the optimizer's step bring gradients to their parameters.
        compute_device: where to compute; None means where the parameters are, or, if those are offloaded and on the
            host, the current CUDA device if there is one; so also if all are on the meta device and the group serves
            CUDA.
        state_dict_device: where the tensors of `state_dict` are put, unit by unit; None means `compute_device`.
        clear_autocast_cache: clear autocast's cache of cast weights after each forward of the module, which otherwise
            holds whole weights until the autocast context ends.
        force_input_to_fp32: in a wrapper of full precision, cast 16-bit inputs to float32.
        cpu_offload: old name of `move_params_to_cpu`.
        gradient_predivide_factor: divide gradients by it before they are summed, and by the number of ranks (replicas
            included) over it afterwards, to keep 16-bit sums in range. None: the smallest power of two whose square is
            at least that number, or that does not divide it.
        verbose: print more in ``repr``.
        allow_reset_parameters: let `reset_parameters` reach the module, instead of raising.
        offload: "cpu" is both `move_params_to_cpu` and `move_grads_to_cpu`. "disk" keeps shards, gradients and
            optimizer state in files that are mapped into memory, so that a model larger than memory trains; the next
            unit's shard is read ahead. None offloads what the two flags say.
        offload_folder: with "disk", below which folder the files are made; it should be on a fast local disk.
        keep_offload_files: with "disk", leave the files when the process ends. Otherwise they are gone with the
            process, however it ends.
        use_orig_params: optimizers see the original parameters under their own names, each as this rank's piece of it
            (1-D, empty where the rank has nothing of it), instead of flat ones: for groups, learning rates and missing
            gradients per parameter. A little slower, because optimizers then work on many small tensors.
        group_by: called with each parameter's name (from `module`) and the parameter; those for which it returns the
            same value share a flat parameter, which shows that value as ``flat_param.group``. So optimizers can treat
            kinds of parameters differently (no weight decay on biases) and still step few, large tensors.
        ignored_modules: modules inside of `module` that are left as they are, with all that is inside of them: not
            sharded, not cast, their gradients not summed over the ranks. What they share with others is ignored too.
        ignored_parameters: the same for single parameters.
        sharding_strategy: a `ShardingStrategy`, or torch's of the same name; see there. None means what
            `process_group` and `reshard_after_forward` say. With HYBRID_SHARD and one group, or None, shards are within
            a machine (of ``LOCAL_WORLD_SIZE`` ranks, which torchrun sets) and replicas across. NO_SHARD keeps whole
            parameters on every rank of `process_group`. Making groups is collective over `process_group`.
        sync_module_states: collective; take parameters and buffers from the group's rank 0 (with replicas, the first of
            all) before they are cut, without those of inner wrappers, which have an argument of their own, and of what
            is ignored. Other ranks may have theirs on the meta device; what no rank has values of waits for them.
        param_init_fn: called with each module of this unit that has parameters or buffers without values (meta device),
            to initialise them, when it is wrapped; see `fsdp.materialize`. Without it they wait for values.
        state_dict_on_rank_0_only: `state_dict` is empty on other ranks than the first.
        no_broadcast_optim_state: leave this wrapper's optimizer state out of the gathered one
            (`gather_full_optim_state_dict`). A wrapper of one rank inside of a sharded one does so by itself, and then
            the gathered state has that of the rank that gets it.

    Raises:
        RuntimeError: without a process group, or if the disk is too small.
        TypeError: for integer parameters, or `DTensor`s without values (meta device) or of other placements than
            `Shard` and `Replicate`.
        ValueError: for a module whose own parameters a wrapper has already, that has no parameters, or that shares one
            with an inner wrapper; for `DTensor`s on ranks of `process_group`, or on a mesh of another kind of device;
            for dtypes that cannot be trained as asked, and for options that contradict each other.
    """

    @refuses_keywords
    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool | MixedPrecision = False,
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
        *,
        offload: str | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        keep_offload_files: bool = False,
        use_orig_params: bool = False,
        group_by: GroupKey | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_parameters: Iterable[nn.Parameter] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        sync_module_states: bool = False,
        param_init_fn: ParamInit | None = None,
    ) -> None:
        reshard_after_forward = reshards_after_forward(sharding_strategy, reshard_after_forward)
        options = Options.resolve(**{name: value for name, value in locals().items() if name != "__class__"})
        super().__init__()
        ignored = Ignored.of(ignored_modules, ignored_parameters)
        _check_module(module, ignored)
        refuse_shared_modules(module)
        inner = [unit for unit in map(unit_of, module.modules()) if unit is not None]
        ignored.check(taken_by, [place for unit in inner for place in unit.places()])
        watch_optimizers()
        teach_torch()
        self._options = options
        groups = Groups.resolve(process_group, sharding_strategy, reshard_after_forward)
        self.process_group, self.replicate_group = groups.shard, groups.replicate
        self.sharding_strategy = groups.strategy
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.flatten_parameters, self.verbose = flatten_parameters, verbose
        _take_over(module, inner)
        self._wrap(module, ignored, group_by, process_group_reduce_scatter, groups)
        if param_init_fn is not None:
            materialize_unit(self._unit, param_init_fn)

    # --- construction -------------------------------------------------------------------------------------------

    def _wrap(
        self, module: nn.Module, ignored: Ignored, key: GroupKey | None, reduce_over: Any, groups: Groups
    ) -> None:
        tied: dict[nn.Parameter, Places] = {}
        tied_ones = None if self.flatten_parameters else tied
        found = collect(module, ignored, tied_ones, claimed_in(module), with_values=False)
        refuse_nothing_own(found, tied, type(module).__name__)
        params_are_on = _device_of(found, module, self.process_group)
        device = self._options.device_for(params_are_on)
        self.process_group_reduce_scatter = self._reduce_group(reduce_over, device)
        if self._options.sync_module_states:
            found = take_states_of_first(module, found, ignored, groups.communicators(device), device)
        self._unit = self._make_unit(module, device, ignored, groups)
        try:
            alone = self._cut(module, found, key)
        except BaseException:
            self._unit.withdraw()
            raise
        if device != params_are_on or self._options.compute_device is not None or self._unit.awaits_values:
            move_values(module, device)  # buffers; the parameters that are ours have left
        self._shard_flattened(found) if self.flatten_parameters else self._shard_one_by_one(found, alone)
        self._unit.rename(type(module).__name__)
        self._unit.wanted = wanted(tied)
        self._unit.restore_order()
        guard(self._unit, names_shards=not self.flatten_parameters)
        self._forward_entries()
        self._loading = Loading(self, self._unit)

    def _reduce_group(self, wanted: Any, device: torch.device) -> Group:
        if wanted in (None, ProcessGroupName.reduce_scatter):
            return reduce_group(self.process_group, device)
        return self._options.checked_reduce_group(wanted, self.process_group, ProcessGroupName.default)

    # --- training -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Collective over its ranks, as is the backward through its outputs."""
        self._register_post_backward_hooks()
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            if self._unit.runtime is not None:
                self._unit.runtime.give_up_forward(self._unit)
            raise
        changed = self._register_pre_backward_hooks(output)
        return output if changed is None else changed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without summing them over the ranks; the next backward outside does it for all.

        For the outermost wrapper. Each rank holds whole gradients meanwhile.

        Raises:
            RuntimeError: on an inner wrapper.
        """
        with self._runtime_as_root("no_sync").no_sync():
            yield

    @during("clip_grad_norm_()")
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Collective. Scale all gradients so that their norm, over all ranks, is at most `max_norm`.

        Args:
            max_norm: the largest norm to leave.
            norm_type: p of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: raise, on every rank and before any gradient is changed, if the norm is infinite or NaN.

        Returns:
            The norm before clipping, a scalar of at least float32, the same on every rank.

        Raises:
            RuntimeError: on an inner wrapper, inside a forward or backward, if gradients are not reduced yet, or if the
                norm is not finite and that was to be an error.
            ValueError: if `norm_type` is not positive, or an inner wrapper spans ranks that this one does not.
            NotImplementedError: if meshes of `DTensor`s overlap in part.
        """
        runtime = self._runtime_as_root("clip_grad_norm_")
        return clip_by_norm(runtime, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of all gradients to at most `clip_value` in absolute value. No rank needs another for it.

        Raises:
            RuntimeError: on an inner wrapper, inside a forward or backward, or if gradients are not reduced yet.
            ValueError: if `clip_value` is negative.
        """
        clip_by_value(self._runtime_as_root("clip_grad_value_"), float(clip_value))

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

    def _runtime_as_root(self, method: str) -> Runtime:
        runtime = self._unit.ensure_runtime()
        if runtime.root is not self._unit:
            raise RuntimeError(
                f"{method} is for the outermost FullyShardedDataParallel; this one ('{self._unit.name}') lies inside "
                f"{runtime.root.name}. Call it there."
            )
        return runtime


for _name in METHODS:
    setattr(FullyShardedDataParallel, _name, Instead(_name))


def _device_of(found: dict[nn.Parameter, Places], module: nn.Module, over: Group) -> torch.device:
    """Where a module is: its own parameters, or what its inner units compute on."""
    if found:
        return device_of(found) or served_device(over)
    return get_fsdp_instances(module, skip_empty=True)[0].compute_device


def _take_over(module: nn.Module, units: Iterable[Unit]) -> None:
    """Have those that were outermost until now, or the module's own from an earlier wrapper, make way for a new one."""
    for unit in units:
        if unit.module is module:
            unit.withdraw()
        elif unit.runtime is not None and unit.runtime.root is unit:
            unit.runtime.forget()


def _check_module(module: Any, ignored: Ignored) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got a {type(module).__name__}")
    managed = isinstance(module, FlattenParamsWrapper) and module._is_managed
    if managed or ((unit := unit_of(module)) is not None and not unit.holds_nothing):
        raise ValueError(
            f"this {type(module).__name__} is wrapped already, and its wrapper has parameters of its own: wrap that "
            "wrapper, or the modules around it"
        )
    if any(isinstance(inner, FSDPModule) for inner in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is, or has inside, what fully_shard has sharded: use it for all modules of a "
            "model, or the wrapper"
        )
    if all(ignored.has(inner, param) for inner in module.modules() for param in inner.parameters(recurse=False)):
        raise ValueError(
            f"{type(module).__name__} has no parameters to shard"
            + (" that are not ignored" if ignored.parameters else "")
            + ": leave it unwrapped, or wrap the module around it"
        )


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """The wrappers in a module tree, in the order of ``modules()``.

    Args:
        mod: the outermost module to look at.
        skip_empty: leave out wrappers whose parameters were all taken by inner ones.
    """
    found = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [wrapper for wrapper in found if wrapper.params or not skip_empty]
