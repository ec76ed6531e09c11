"""`FullyShardedDataParallel`, the wrapper: its arguments, methods, and names of tensors and modules.

The wrapper itself neither computes nor communicates. The constructor turns the module into a unit
(`layers.shard_module`), whose hooks on the module unshard, compute and reduce (`engine.forward_hooks`,
`engine.runtime`). Methods use lower packages: `state_dict` for parameters and buffers, `optim_utils` for optimizers.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.distributed.consensus import agree_on, done_by_all
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.forward_hooks import forward_hooks_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import FSDP_PART, clean_name, module_name, paths_in
from fsdp.engine.placeholder import under_way
from fsdp.engine.placements import Placements, ShardingStrategy
from fsdp.engine.precision import MixedPrecision
from fsdp.engine.runtime import runtime_of, runtime_of_root
from fsdp.engine.unit import TrainingState, Unit, units_in
from fsdp.fully_shard import FSDPModule
from fsdp.layers import on_demand
from fsdp.layers.flatten_params_wrapper import ShardedParamsWrapper
from fsdp.layers.foreign_names import METHODS, ForeignMethod, refuse_data_parallel, refuse_foreign, refuses_keywords
from fsdp.layers.managed_params import GroupKey, reader_message
from fsdp.layers.options import PUBLIC, SETTLED, Options, settled
from fsdp.layers.shard_module import WrapperForm, refuse_unwrappable, shard_module
from fsdp.layers.sharding_strategy import Groups, ProcessGroupName
from fsdp.layers.shared_params import share
from fsdp.layers.state_requests import LocalState, Progress, Saving, Summoning, require_shards
from fsdp.layers.wrapper import Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self

_GROUPS = ("process_group", "process_group_reduce_scatter")  # the process groups that users may assign


class FullyShardedDataParallel(Wrapper):
    """Train a module whose parameters, gradients and optimizer state are sharded over the ranks.

    The parameters of `module` that no inner wrapper took become one flat parameter (one for each combination of
    dtype and `requires_grad`), of which every rank keeps an equal shard. They are all-gathered when the module runs,
    and resharded afterwards; in backward, gradients are averaged over the ranks, and each rank keeps its shard. Wrap
    inner modules first, as `fsdp.shard` does: only the running wrapper and the next wrapper (or small wrappers of up
    to 1 MiB) are unsharded at a time. Then create the optimizer from ``parameters()`` of the outermost wrapper.

    A wrapper may itself be wrapped, before or after its first use. A module whose parameters were all taken by inner
    wrappers may be wrapped again: the new wrapper replaces the old one, which must no longer be used. Every rank must
    wrap the same modules with the same values in the same order; ranks compare them at the first use. The arguments
    are FairScale's, in the same order, followed by keyword-only arguments of this library.

    Args:
        module: the module to wrap; its parameters are replaced in place.
        process_group: the ranks to shard over. Default: all. A pair ``(shard_group, replicate_group)``, or a 2-D
            `DeviceMesh` whose dim 0 replicates and dim 1 shards, is hybrid sharding. A 1-D mesh is used as its group.
            For `DTensor` parameters (tensor parallelism), the group of the data-parallel dimension. For a world size
            of 1, an object with ``rank()`` and ``size()`` is enough, without `torch.distributed`.
        process_group_reduce_scatter: the group to sum gradients over, of the same ranks in the same order (for another
            size, `process_group` is used, with a warning). Default: on NCCL, a second communicator, so that reductions
            and all-gathers overlap; on other backends, or with a user's `process_group`, the same group.
        group_by: called with each parameter's name (from `module`) and the parameter. Parameters with the same
            returned value share a flat parameter, whose attribute ``group`` is this value.
        ignored_modules: modules in `module` that are ignored, including all modules inside them: not sharded, not
            cast, and their gradients are not summed over ranks. Parameters shared with them are ignored, too.
        ignored_parameters: the same for single parameters.
        reshard_after_forward: False keeps parameters unsharded until the end of backward: more memory, and a third less
            communication. A number shards them until then over that many neighbouring ranks. "host": see `Placements`.
        sharding_strategy: a `ShardingStrategy`, or torch's of the same name. Default: set by `process_group` and
            `reshard_after_forward`. Creating groups is collective over `process_group`.
        placements: `fsdp.Placements`, instead of `sharding_strategy` and `reshard_after_forward`.
        param_init_fn: called during wrapping to initialize each module of this unit that has parameters or buffers
            without values (meta device); see `fsdp.materialize`. Default: values must be provided later.
        others: the options of the unit, see `__init__`.

    Raises:
        RuntimeError: without a process group, under torch's `FakeTensorMode`, or if the disk is too small.
        TypeError: for parameters of torch's quantised dtypes, or `DTensor`s of unknown placements.
        ValueError: for a module whose own parameters were wrapped already, or that shares a parameter with an inner
            wrapper; for inconsistent ranks, devices, dtypes and options.
    """

    @refuses_keywords
    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool | int | Literal["host"] = True,
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
        placements: Placements | None = None,
        sync_module_states: bool = False,
        param_init_fn: on_demand.ParamInit | None = None,
    ) -> None:
        strategy = ShardingStrategy.of(sharding_strategy)
        placements = Placements.resolve(placements, strategy, reshard_after_forward)
        options = Options(
            disable_reshard_on_root=disable_reshard_on_root,
            mixed_precision=mixed_precision,
            fp32_reduce_scatter=fp32_reduce_scatter,
            flatten_parameters=flatten_parameters,
            move_params_to_cpu=move_params_to_cpu,
            compute_dtype=compute_dtype,
            buffer_dtype=buffer_dtype,
            move_grads_to_cpu=move_grads_to_cpu,
            bucket_cap_mb=bucket_cap_mb,
            compute_device=compute_device,
            no_broadcast_optim_state=no_broadcast_optim_state,
            state_dict_device=state_dict_device,
            clear_autocast_cache=clear_autocast_cache,
            force_input_to_fp32=force_input_to_fp32,
            verbose=verbose,
            cpu_offload=cpu_offload,
            state_dict_on_rank_0_only=state_dict_on_rank_0_only,
            gradient_predivide_factor=gradient_predivide_factor,
            allow_reset_parameters=allow_reset_parameters,
            offload=offload,
            offload_folder=offload_folder,
            keep_offload_files=keep_offload_files,
            use_orig_params=use_orig_params,
            sync_module_states=sync_module_states,
        )
        super().__init__()
        ignored = Ignored.of(ignored_modules, ignored_parameters)
        module = module.module if isinstance(module, ShardedParamsWrapper) else module  # wrapped before
        refuse_unwrappable(module, FSDPModule, ignored)
        groups = Groups.resolve(process_group, placements, strategy)
        self._options = options
        self.process_group, self.replicate_group = groups.shard, groups.replicate
        self.sharding_strategy = strategy or placements.strategy(groups.replicate is not None)
        self._fsdp_wrapped_module = ShardedParamsWrapper(module)
        form, over = WrapperForm(self._fsdp_wrapped_module, options, group_by), process_group_reduce_scatter
        unit, self.process_group_reduce_scatter = shard_module(module, options, groups, over, ignored, form)
        self._loading, self._unit = on_demand.Loading(self, unit), unit
        on_demand.forward_entries(self, unit)
        if param_init_fn is not None:
            on_demand.materialize_unit(unit, param_init_fn)

    module = property(lambda self: self._fsdp_wrapped_module, doc="The `FlattenParamsWrapper` around the module.")
    rank = property(lambda self: self._unit.comm.rank, doc="The number of this rank in `process_group`.")
    world_size = property(lambda self: self._unit.comm.world_size, doc="The number of ranks that share the parameters.")
    placements = property(lambda self: self._unit.placements, doc="The unit's `Placements`.")
    training_state = property(lambda self: self._unit.state, doc="The `TrainingState` that the wrapper is in.")
    compute_device = property(lambda self: self._unit.device, doc="The device that the module computes on.")
    gradient_predivide_factor = property(lambda self: self._unit.policy.predivide, doc="The divisor before the sum.")
    gradient_postdivide_factor = property(lambda self: self._unit.policy.postdivide, doc="The divisor after the sum.")
    reshard_after_forward = property(
        lambda self: self._unit.frees_after_forward,
        doc="True if parameters are resharded after forward; the root's becomes False at its first use.",
    )
    state_dict_device = property(
        lambda self: self._options.state_dict_device or self.compute_device, doc="The device of `state_dict`'s tensors."
    )
    children_share_process_group = property(
        lambda self: all(unit.everyone == self._unit.everyone for unit in self._units()),
        doc="True if all inner wrappers shard, and replicate, over the same ranks as this one.",
    )
    uncollected_opt_state = property(lambda self: {}, doc="Empty; FairScale sets aside here what it does not gather.")
    is_connected = property(
        lambda self: on_demand.copying.is_connected(self._unit),
        doc="False after unpickling, until `process_group` is assigned.",
    )

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrapper's own parameters, listed for optimizers: flat parameters, or local shards of originals."""
        return [param for handle in self._listed_handles for param in handle.listed_params]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All parameters with a gradient, including parameters of inner wrappers."""
        return [param for param in self.parameters() if param.grad is not None]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the computation: the first parameter's dtype, unless the precision sets another dtype."""
        own = self.params[0].dtype if self.params else torch.float32
        return self._options.precision.compute_dtype(own)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype of floating-point buffers in computation; None if a policy does not cast them."""
        is_policy = isinstance(self._options.mixed_precision, MixedPrecision)
        return self._options.precision.buffers or (None if is_policy else self.compute_dtype)

    @property
    def numel_padded_per_param(self) -> list[int]:
        """The number of padding elements for each of `params`: in a flat parameter, or after a local shard."""
        paddings = [handle.layout.paddings(handle.comm.rank) for handle in self._listed_handles]
        return list(chain(*paddings) if self._options.use_orig_params else map(sum, paddings))

    @property
    def no_broadcast_optim_state(self) -> bool:
        """True if the gathered optimizer state excludes this unit's, by option or because rank 0 stores all of it."""
        return on_demand.is_uncollected(self._unit, getattr(self._unit.runtime, "root", self._unit))

    @property
    def _listed_handles(self) -> list[FlatParamHandle]:
        return [*self._unit.owned_handles, *self._unit.borrowed_handles]

    def non_shared_params(self) -> list[nn.Parameter]:
        """Return the own parameters without parameters of `append_shared_param`."""
        return [param for handle in self._unit.owned_handles for param in handle.listed_params]

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Share a parameter that another wrapper took and this wrapper's module also uses (docs/usage.md).

        For modules tied first and then wrapped separately, each with ``flatten_parameters=False``. Call this on all
        wrappers except the first, before the first use, with the parameter from the first wrapper's module or `params`.

        Raises:
            ValueError: if this wrapper flattens its parameters, `p` is not tied to a parameter of its module or was not
                taken by another such wrapper, or the wrappers differ in ranks, device or precision.
            RuntimeError: after the first use of either wrapper, and inside `summon_full_params`.
        """
        if self._options.flatten_parameters:
            raise ValueError(
                f"append_shared_param: {self._unit.name} has flatten_parameters=True, so its parameters are in one "
                "vector and cannot be shared one by one. Wrap all modules that share it with flatten_parameters=False."
            )
        share(self._unit, p)

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError unless `training_state` is `state`, or one of multiple states."""
        expected = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in expected:
            names = " or ".join(one.name for one in expected)
            raise ValueError(f"{self._unit.name}: expected to be {names}, but it is {self.training_state.name}")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in PUBLIC and "_options" in self.__dict__ and not self._is_method(name):
                return getattr(self._options, name)  # as in FairScale
            if "_fsdp_wrapped_module" not in self.__dict__.get("_modules", {}):
                raise  # a subclass's constructor runs before this class's
        try:
            return getattr(self.module, name)
        except AttributeError:
            refuse_foreign(type(self), name)
            raise

    def _is_method(self, name: str) -> bool:
        """Return whether the wrapped module has a method with this name, such as `flatten_parameters` of RNNs."""
        return callable(getattr(type(self.module.module), name, None))

    def __setattr__(self, name: str, value: Any) -> None:
        if "_unit" not in self.__dict__:
            nn.Module.__setattr__(self, name, value)  # in the constructor
        elif name in _GROUPS and not on_demand.copying.is_missing(value):
            self.__dict__.update(on_demand.copying.assign_group(self.__dict__, self._unit, name, value))
        elif name == "_is_root" and value is None:
            self._reset_lazy_init()
        elif name in SETTLED:
            raise settled(name)
        else:
            super().__setattr__(name, value)

    def _wrapped(self) -> nn.Module | None:
        return self._unit.module if "_unit" in self.__dict__ else None

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._loading.begin(self, state_dict, prefix, *rest)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules; with the names of state dicts for outer plain modules and during saves by `peft`."""
        on_demand.refuse_separate_backwards(self._unit)
        if not (plain := prefix and FSDP_PART not in prefix.split(".")):
            plain = "peft.utils" in sys.modules and is_called_from("peft.utils.save_and_load")
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield module_name(name) if plain else name, module

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield parameters or buffers; with plain names in `summon_full_params` and if they have any."""
        on_demand.refuse_separate_backwards(self._unit)
        has_own_names = not self._options.flatten_parameters or self._options.use_orig_params
        plain = has_own_names or self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, tensor in super()._named_members(*args, **kwargs):
            yield clean_name(name) if plain else name, tensor

    def extra_repr(self) -> str:
        return on_demand.options_in_use(self, self._unit)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over its ranks, as is the backward through its outputs."""
        self._register_post_backward_hooks()
        hooks = forward_hooks_of(self._unit.module)
        depth = hooks.depth
        try:
            # Not `self.module`, which nn.Module first looks up in the parameters: each unit runs this line.
            output = self._modules[FSDP_PART](*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            hooks.give_up(depth)
            raise
        changed = self._register_pre_backward_hooks(output)
        return output if changed is None else changed

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate unsharded gradients; the next backward outside reduces all of them. For the outermost wrapper."""
        on_demand.refuse_local_sgd()
        return runtime_of_root(self._unit, "no_sync").no_sync()

    @during("clip_grad_norm_()")
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Collective. Scale all gradients so that their norm, over all ranks, is at most `max_norm`.

        The norm is the p-norm for `norm_type` p, and the largest absolute value for ``inf``. The result is the norm
        before clipping, a scalar of at least float32. With `error_if_nonfinite`, an infinite norm or NaN raises
        RuntimeError and changes no gradient.

        Raises:
            RuntimeError: on an inner wrapper, inside a forward or backward, or if gradients are not reduced yet.
            ValueError: if `norm_type` is not positive, or an inner wrapper spans ranks that this one does not.
            NotImplementedError: if meshes of `DTensor`s overlap in part.
        """
        runtime = runtime_of_root(self._unit, "clip_grad_norm_")
        return on_demand.clip_by_norm(runtime, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of all gradients to at most `clip_value` in absolute value. Not collective.

        Raises:
            RuntimeError: on an inner wrapper, inside a forward or backward, or if gradients are not reduced yet.
        """
        on_demand.clip_by_value(runtime_of_root(self._unit, "clip_grad_value_"), float(clip_value))

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = False) -> None:
        """Divide gradients by `pre` before and by `post` after they are summed, regardless of the world size.

        Raises:
            RuntimeError, ValueError: inside a forward or backward; for a divisor that is not positive.
        """
        if pre <= 0 or post <= 0:
            raise ValueError(f"gradients are divided by these: they must be positive, got pre={pre}, post={post}")
        self._unit.require_idle("set gradient factors")
        for unit in self._units() if recursive else [self._unit]:
            unit.set_divide_factors(pre, post)

    @during("register_comm_hook()")
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Tensor, Tensor], None]) -> None:
        """Collective. Use `hook` to average gradients over the ranks, instead of the reduce-scatter.

        Call this once on the outermost wrapper, between steps; all units use the hook. Backward calls it once for each
        trained flat parameter as ``hook(state, gradient, shard)``. It must write to ``shard`` ``[n]`` the average over
        ranks of elements ``rank * n`` to ``(rank + 1) * n`` of ``gradient`` ``[world_size * n]``, which it may
        overwrite. Hooks of torch's FSDP1 for sharded strategies are supported. See docs/communication.md.

        Raises:
            TypeError: if `hook` cannot be called.
            RuntimeError: on an inner wrapper, inside a forward or backward, if a hook is registered already, or if the
                ranks register different hooks.
            ValueError: if other gradient divisors were set, or if shards have replicas.
        """
        runtime = runtime_of_root(self._unit, "register_comm_hook")
        self._unit.require_idle("register a communication hook")

        def require_possible() -> None:
            if not callable(hook):
                raise TypeError(f"register_comm_hook needs a function hook(state, gradient, shard), got {hook!r}")
            for wrapper in get_fsdp_instances(self):
                wrapper._options.require_no_other_division(wrapper._unit)

        done_by_all([self._unit.everyone], "register a communication hook", require_possible)
        comm_hook = on_demand.CommHook(hook, state)
        agree_on(self._unit.everyone, "communication hooks", comm_hook.name)
        for unit in runtime.units:
            unit.set_divide_factors(1.0, 1.0)  # the hook divides gradients, including accumulated ones
            unit.policy.comm_hook = comm_hook

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module as `nn.Module.compile` does; collectives are not compiled."""
        self.module.module.compile(*args, **kwargs)

    def report(self) -> on_demand.Report:
        """Return what the last `fsdp.trace` of this model measured for each unit, on any rank; see docs/performance.md.

        Raises:
            RuntimeError: if the model was not traced. Without a trace no statistics are recorded.
        """
        return on_demand.last_report(self._unit)

    def _units(self) -> list[Unit]:
        return list(units_in(self._unit))

    @refuses_keywords
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
        """Collective. Show unsharded parameters as ordinary parameters of the modules, under their plain names.

        Each rank allocates all parameters at once (`summon_units` shows one unit at a time). Changes inside (in place,
        or by assigning a new parameter of the same shape) are kept on exit: make the same changes on every rank.
        Forward works inside without gradients. Contexts of the same form may be nested.

        Args:
            recurse: If True, also show inner wrappers' parameters.
            volatile: If True, discard changes.
            rank0_only: If True, only the first rank (of the process group, and of the first replica) shows parameters;
                it sends its changes to all other ranks.
            with_grads: If True, also show the reduced, unsharded gradients in ``grad``; changes of gradients are kept.
            offload_to_cpu: If True, move the parameters to host memory, unit by unit.

        Raises:
            RuntimeError: inside a forward or backward, when nested in another form, while there are parameters without
                values, for changes that cannot be stored, with `with_grads` while gradients are not reduced, or if
                ranks have different arguments.
        """
        form = Summoning(not volatile, with_grads, rank0_only, offload_to_cpu)
        self._prepare_to_summon(form, recurse)
        with on_demand.summoned(self._units() if recurse else [self._unit], form):
            yield

    def summon_units(
        self,
        volatile: bool = False,
        *,
        rank0_only: bool = False,
        with_grads: bool = False,
        offload_to_cpu: bool = False,
    ) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter]]]:
        """Collective. Show unsharded parameters of one unit at a time, like `summon_full_params` for all units.

        Yields:
            For each wrapper in the tree, outer before inner, the wrapped module, and its unsharded parameters under
            their plain names from this wrapper, tied parameters once. With `rank0_only`, other ranks get no parameters.
            Iterate to the end on every rank, and run no other collective with the model meanwhile.
        """
        form = Summoning(not volatile, with_grads, rank0_only, offload_to_cpu)
        self._prepare_to_summon(form, recurse=True)
        paths = paths_in(self)
        for unit in self._units():
            with on_demand.summoned([unit], form):
                yield unit.module, on_demand.params_shown(unit, paths)

    @contextmanager
    def summon_shapes(self) -> Iterator[None]:
        """Show unsharded parameters without values, on the meta device, for counting and printing. Not collective."""
        self._unit.require_idle("summon shapes")
        with on_demand.shapes_summoned(self._units()):
            yield

    @during("summon_full_params()")
    def _prepare_to_summon(self, form: Summoning, recurse: bool) -> None:
        self._unit.require_idle("summon full parameters")
        on_demand.ensure_agreed(self._unit)
        if self._unit.request(Summoning) is None:
            agree_on(self._unit.everyone, "arguments of summon_full_params()", f"{form.described}, recurse={recurse}")
        on_demand.require_values_everywhere(self._unit, "summon full parameters", recurse)
        if not form.keeps_changes:
            on_demand.ensure_same_values(self._unit)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Collective. Call `nn.Module.apply` with unsharded parameters visible; changes are kept."""
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            return super().apply(fn)
        with self.summon_full_params():
            return super().apply(fn)

    def reset_parameters(self) -> None:
        """Collective. Run the module's own ``reset_parameters()``; every rank must have the same random state."""
        if not self._options.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters() on sharded parameters is refused, because ranks with different random states would "
                "write different values. Pass allow_reset_parameters=True if all ranks are seeded alike."
            )
        with self.summon_full_params():
            self.module.module.reset_parameters()

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
        """Collective. Return the unsharded state under the module's plain names, in new tensors.

        The state is gathered unit by unit: a rank that gets the state requires memory for the state and one unit, and
        other ranks require none. Parameters have the dtype that the optimizer steps, and buffers their dtype before
        wrapping; `DTensor`s become plain tensors.

        Args:
            destination, prefix, keep_vars: the same as for `nn.Module.state_dict`.
            dtype: the dtype to which floating-point parameters (not buffers) are cast. Default: no cast.
            rank0_only: If True, the result is empty except on the first rank (of the process group, and of the first
                replica). Default: the option ``state_dict_on_rank_0_only`` of the outermost wrapper.

        Raises:
            RuntimeError: inside a forward or backward, while there are parameters without values, or if ranks have
                different `rank0_only`.
            OtherRankError: with the reason, if another rank raised an error, for example in a user's hook.
        """
        if self._unit.request(LocalState):  # an outer wrapper's local state is being taken
            return self.local_state_dict(destination, prefix, keep_vars)
        first_only = self._options.state_dict_on_rank_0_only if rank0_only is None else rank0_only
        progress = Progress(self._unit.everyone, "take its state dict")
        asked = Saving(progress, dtype, self._options.state_dict_device, first_only)
        return on_demand.save_full(self, self._unit, asked, destination, prefix, keep_vars)

    @during("load_state_dict()")
    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False, *, rank0_only: bool = False
    ) -> Any:
        """Collective. Load an unsharded state with plain names; each rank keeps its shard, unit by unit.

        With `rank0_only`, the state of the first rank (of the process group, and of the first replica) is loaded; other
        ranks may pass any value. An invalid state changes nothing, unless modules have load hooks or override load
        methods; then all matching entries are loaded, as in torch. The result is torch's, with plain names.

        Raises:
            RuntimeError: inside a forward or backward, or for keys and shapes that do not match; on every rank, naming
                the first rank that could not load.
            NotImplementedError: for ``assign=True``: a shard cannot become the given tensors.
        """
        if assign:
            raise NotImplementedError("load_state_dict(assign=True): values are copied into shards, use assign=False")
        self._unit.require_idle("load a state dict")
        on_demand.ensure_agreed(self._unit)
        return on_demand.load_full(self, self._unit, super().load_state_dict, state_dict, strict, rank0_only)

    def local_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return this rank's shards, and buffers, under FairScale's names (docs/checkpoints.md). Not collective.

        The tensors are detached but share the model's memory: save or copy them before the next step.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`, or without values.
        """
        if self._unit.request(LocalState) is None:
            on_demand.require_values(self._unit.module, "take a local state dict")
        with on_demand.local(self._unit, "take a local state dict"):
            return on_demand.local_state(self._unit, destination, prefix, keep_vars)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the result of `local_state_dict`, here or in FairScale, of the same rank and world size. Not collective.

        Call this on every rank before the model is used again. The state is checked before any change. There is no
        communication: if a rank raises, no rank should continue. The result is torch's, with plain names.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`; for keys and sizes that do not match, or
                shards that were saved by another rank, naming the unit, the rank, and both sizes.
        """
        with on_demand.local(self._unit, "load a local state dict"):
            return on_demand.LocalLoad(self, state_dict, strict).run()

    def local_metadata_dict(self) -> dict[str, Any]:
        """Return this rank's metadata for `consolidate_shard_weights` (docs/checkpoints.md).

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`.
        """
        with on_demand.local(self._unit, "take local metadata"):
            return on_demand.local_metadata(self)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Any]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Return unsharded weights under plain names from all ranks' shards, also FairScale's. Uses no process group.

        Args:
            shard_weights: the `local_state_dict` of each rank, in rank order; with replicas, of all or of the first.
            shard_metadata: the `local_metadata_dict` of the same ranks.
            with_module_buffers: If True, add the first rank's buffers and its entries that are not sharded.
            strict: If False, skip parameters and buffers missing on the first rank, and keys without metadata.

        Raises:
            ValueError: for missing, truncated or reordered shards, or shards of different models, naming rank and key.
        """
        return on_demand.consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    @during("sharded_state_dict()")
    def sharded_state_dict(self, *, prefix: str = "") -> Any:
        """Collective the first time. Return the state with local shards, for `torch.distributed.checkpoint` (DCP).

        Keys and their order are the same as in `state_dict`. There is no all-gather, and parameters are not copied:
        save them before they change. Parameters are `TensorPart`s; ``dcp.load`` into the result writes to separate
        memory, which `load_sharded_state_dict` then uses. See docs/state_dicts.md.

        Raises:
            RuntimeError: inside a forward or backward, or inside `summon_full_params`.
        """
        require_shards(self._units(), "take a sharded state dict")
        on_demand.ensure_agreed(self._unit)
        return on_demand.sharded_state(self._unit, self._units(), lambda: self.state_dict(prefix=prefix))

    @during("load_sharded_state_dict()")
    def load_sharded_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Collective. Load a state from `sharded_state_dict` after DCP loaded values into it.

        Unsharded tensors are accepted as well. Entries without loaded values count as missing. Returns torch's result.

        Raises:
            RuntimeError: inside a forward or backward, or inside `summon_full_params`; for keys, shapes, parts and
                kinds of tensors that do not match. If any rank cannot load, all ranks raise, and no value is changed.
        """
        require_shards(self._units(), "load a sharded state dict")
        on_demand.ensure_agreed(self._unit)
        walk = super().load_state_dict

        def load() -> Any:
            given = on_demand.with_wrapped_metadata(state_dict, self)
            for key, value in state_dict.items():
                if isinstance(value, on_demand.TensorPart) and value.is_blank:
                    del given[key]
            return walk(given, strict)

        return on_demand.load_sharded_state(self._unit, self._units(), load)

    def stream_weights(self, sink: Any, **options: Any) -> Any:
        """Collective. Send all weights to a sink in bounded buckets, see `fsdp.stream_weights` for the arguments."""
        return on_demand.stream_weights(self, sink, **options)

    @during("gather_full_optim_state_dict()")
    def gather_full_optim_state_dict(
        self, optim: Any, recipient_rank: int | None = 0, **ignored: Any
    ) -> dict[str, Any] | None:
        """Collective. Return an optimizer's unsharded state in FairScale's format; None on ranks without the result.

        For the outermost wrapper that contains all parameters of the optimizer. Tensors are on the host, in the shapes
        of original parameters, which are identified by numbers; see docs/optimizers.md.

        Args:
            optim: an optimizer, or an object with a similar ``state_dict()``. It is not changed.
            recipient_rank: the number of the receiving rank. None: all ranks.
            ignored: accepted for compatibility with FairScale.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`; if ranks' options differ, or one fails.
            TypeError, ValueError: if it is no optimizer of the model; if state differs or cannot be gathered.
        """
        return on_demand.fairscale_dictionary(self, optim, recipient_rank)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a full optimizer state, for ``optim.load_state_dict``. Not collective.

        The dictionary, also FairScale's, **becomes** the result, and its memory is released during sharding. World
        size, process groups and flattening may have changed. The wrapped modules may have changed if the state contains
        names, as stored by `gather_full_optim_state_dict`.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`.
            TypeError, ValueError: for another model's state, or unsupported state. Nothing is changed then.
        """
        return on_demand.become_shard(self, full_optim_state_dict)

    def reshard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Convert an optimizer created before wrapping, so that it continues on this rank's shards.

        For the outermost wrapper that contains its parameters. In place: original parameters are replaced by the
        parameters listed now, and state is sharded. Not collective, but call it on every rank with the same state.

        Raises:
            RuntimeError: inside a forward or backward.
            TypeError, ValueError: if the optimizer cannot be converted; it is unchanged then. See docs/parameters.md.
        """
        self._unit.require_idle("hand over an optimizer")
        on_demand.reshard_optimizer(self._unit, optimizer, {param: name for name, param in self.named_parameters()})

    def __getstate__(self) -> dict[str, Any]:
        return on_demand.copying.state_to_pickle(self._unit, self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop(on_demand.copying.END, None)
        if "_unit" not in state:
            raise RuntimeError(
                "this FullyShardedDataParallel was pickled by FairScale, whose wrappers differ from this class. Load "
                "it there and save its state_dict(), or local_state_dict() with local_metadata_dict(), to load here."
            )
        super().__setstate__(state)
        on_demand.forward_entries(self, self._unit)
        self._unit.wake()

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))  # as torch's shallow copies of modules: all is shared, including ranks
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        on_demand.copying.prepare_to_copy(self._unit)
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name in on_demand.copying.GROUPS:
            memo[id(self.__dict__[name])] = self.__dict__[name]  # groups are shared, not copied
        with under_way():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        on_demand.forward_entries(copied, copied._unit)
        copied._unit.wake()
        return copied

    def _lazy_init(self) -> None:
        """Collective. Make this wrapper the root now instead of at its first use."""
        runtime_of(self._unit)

    def _free_full_params(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Reshard unsharded parameters, for example parameters kept under `no_sync`: `params`, or all."""
        self._unit.require_idle("free full parameters")
        wanted = None if params is None else set(map(id, params))
        for handle in self._unit.handles:
            if wanted is None or not wanted.isdisjoint(map(id, handle.listed_params)):
                handle.reshard()

    def _register_post_backward_hooks(self) -> None:
        """Do nothing: a subclass may override this, which is called before each forward of the module."""

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        """Do nothing: an override may replace the outputs of each forward of the module; None keeps them."""

    @property
    def _is_root(self) -> bool | None:
        """True for the outermost wrapper; None if not determined yet. Set None to determine it again."""
        return None if self._unit.runtime is None else self._unit.runtime.root is self._unit

    def _reset_lazy_init(self) -> None:
        """Forget which wrapper is outermost; the next use determines it again."""
        for runtime in dict.fromkeys(unit.runtime for unit in self._units() if unit.runtime is not None):
            runtime.forget()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse `DistributedDataParallel` and `torch.jit`, which read this attribute first."""
        raise RuntimeError(reader_message(self._unit.name))

    def _replicate_for_data_parallel(self) -> Any:
        refuse_data_parallel(self._unit.name, "the FullyShardedDataParallel itself")


FullyShardedDataParallel.__init__.__doc__ = Options.__doc__
for _name in METHODS:
    setattr(FullyShardedDataParallel, _name, ForeignMethod(_name))


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Return the wrappers in a module tree, in the order of ``modules()``.

    Args:
        mod: the outermost module.
        skip_empty: If True, skip wrappers whose parameters were all taken by inner wrappers.
    """
    found = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [wrapper for wrapper in found if wrapper.params or not skip_empty]
