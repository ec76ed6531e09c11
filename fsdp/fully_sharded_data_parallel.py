"""`FullyShardedDataParallel`, the wrapper: its arguments, its methods, and the names under which things are found.

The wrapper computes nothing and communicates nothing. Its constructor makes the module a unit (`engine.shard_module`),
whose hooks on the module unshard, compute and reduce (`engine.forward_hooks`, `engine.runtime`). Its methods hand the
unit to the packages below: `state_dict` for parameters and buffers, `optim_utils` for the state of optimizers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.checkpoint.formats.consolidate import consolidate
from fsdp.distributed.collectives import during
from fsdp.distributed.comm_hook import CommHook
from fsdp.engine import copying
from fsdp.engine.agreement import agree_on
from fsdp.engine.deferred_init import require_values, require_values_everywhere
from fsdp.engine.flatten_params_wrapper import FlattenParamsWrapper, ShardedParamsWrapper
from fsdp.engine.foreign_names import METHODS, ForeignMethod, refuse_foreign, refuses_keywords
from fsdp.engine.grad_clipping import clip_by_norm, clip_by_value
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import GroupKey, Ignored
from fsdp.engine.names import FSDP_PART, clean_name, module_name
from fsdp.engine.options import PUBLIC, Options
from fsdp.engine.placeholder import depart, under_way
from fsdp.engine.precision import MixedPrecision, check_dtype
from fsdp.engine.registration import Forwarding
from fsdp.engine.runtime import Runtime, ddp_message, runtime_of
from fsdp.engine.shard_module import WrapperForm, shard_module
from fsdp.engine.sharding_strategy import (
    Groups,
    ProcessGroupName,
    ShardingStrategy,
    group_to_reduce_over,
    ranks_of,
    reshards_after_forward,
)
from fsdp.engine.shared_params import share
from fsdp.engine.state_requests import Saving, Summoning
from fsdp.engine.unit import TrainingState, Unit, unit_of, units_in
from fsdp.fsdp_module import FSDPModule
from fsdp.optim_utils.gather import fairscale_dictionary, optim_stream
from fsdp.optim_utils.params import is_uncollected
from fsdp.optim_utils.reshard_optimizer import reshard_optimizer
from fsdp.optim_utils.scatter import become_shard
from fsdp.state_dict.full import ensure_agreed, ensure_same_values
from fsdp.state_dict.load import Loading, load_whole, with_wrapped_metadata
from fsdp.state_dict.local import LocalLoad, Member, local, local_metadata, local_state
from fsdp.state_dict.materialize import ParamInit, materialize_unit
from fsdp.state_dict.save import save_whole
from fsdp.state_dict.sharded import load_sharded_state, sharded_state
from fsdp.state_dict.summon import params_shown, shapes_summoned, summoned
from fsdp.state_dict.tensor_part import TensorPart

if TYPE_CHECKING:
    from typing_extensions import Self

# Where modules list what may be the wrapped module's; not there before the constructor of `nn.Module`.
_ENTRIES = ("_parameters", "_buffers")
_ASSIGNED_GROUPS = ("process_group", "process_group_reduce_scatter")
_GROUPS = (*_ASSIGNED_GROUPS, "replicate_group")
_END = "_end_of_state"


class FullyShardedDataParallel(nn.Module):
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
        options = Options(
            reshard_after_forward=reshards_after_forward(sharding_strategy, reshard_after_forward),
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
        _check_module(module, ignored)
        groups = Groups.resolve(process_group, sharding_strategy, options.reshard_after_forward)
        self._options = options
        self.process_group, self.replicate_group = groups.shard, groups.replicate
        self.sharding_strategy = groups.strategy
        self._fsdp_wrapped_module = ShardedParamsWrapper(module)
        form = WrapperForm(self._fsdp_wrapped_module, options, group_by)
        reduce_over = process_group_reduce_scatter
        unit, self.process_group_reduce_scatter = shard_module(module, options, groups, reduce_over, ignored, form)
        self._unit = unit
        self._forward_entries()
        self._loading = Loading(self, unit)
        if param_init_fn is not None:
            materialize_unit(unit, param_init_fn)

    # --- attributes ---------------------------------------------------------------------------------------------

    @property
    def module(self) -> FlattenParamsWrapper:
        """The `FlattenParamsWrapper` inside; its ``module`` is the user's."""
        return self._fsdp_wrapped_module

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrapper's own parameters, as optimizers see them: flat ones, or local shards of original ones."""
        return [param for handle in self._listed_handles for param in handle.registry.params]

    @property
    def _listed_handles(self) -> list[FlatParamHandle]:
        return [*self._unit.own, *self._unit.borrowed]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters, inner wrappers' included, that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def non_shared_params(self) -> list[nn.Parameter]:
        """Return the own parameters without those of `append_shared_param`."""
        return [param for handle in self._unit.own for param in handle.registry.params]

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Share a parameter that another wrapper has taken and that this one's module uses as well.

        For modules that were tied and then wrapped one by one, each with ``flatten_parameters=False``, the same
        options and at least one parameter of its own. Call it on every wrapper but the first, before the first use. The
        parameter is then in `params` of both, in ``parameters()`` once, and under both names in state dicts. The lowest
        wrapper around all that share it unshards it, while that one computes. Doing it twice changes nothing.

        Args:
            p: the parameter, as the first wrapper's module shows it (``first.module.weight``), as its ``params`` list
                it, or as it was before wrapping.

        Raises:
            ValueError: if this wrapper flattens its parameters, if `p` is not tied to a parameter of its module or was
                not taken by another such wrapper, or if the two differ in ranks, device or precision.
            RuntimeError: after the first use of either, and inside `summon_full_params`.
        """
        if self._options.flatten_parameters:
            raise ValueError(
                f"append_shared_param: {self._unit.name} has flatten_parameters=True, so its parameters lie in one "
                "vector and cannot be shared one by one. Wrap all that share it with flatten_parameters=False."
            )
        share(self._unit, p)

    @property
    def rank(self) -> int:
        """The number of this rank in `process_group`."""
        return self._unit.comm.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share the parameters, without replicas."""
        return self._unit.comm.world_size

    @property
    def children_share_process_group(self) -> bool:
        """True if all inner wrappers shard, and replicate, over the same ranks as this one."""
        return all(unit.everyone == self._unit.everyone for unit in self._units())

    @property
    def reshard_after_forward(self) -> bool:
        """True if parameters are resharded after forward; the root's becomes False at its first use."""
        return self._unit.policy.frees_after_forward

    @property
    def training_state(self) -> TrainingState:
        """The state that the wrapper is in."""
        return self._unit.state

    @property
    def gradient_predivide_factor(self) -> float:
        """The factor that gradients are divided by before they are summed over the ranks."""
        return self._unit.predivide

    @property
    def gradient_postdivide_factor(self) -> float:
        """The factor that gradients are divided by after they were summed over the ranks."""
        return self._unit.postdivide

    @property
    def compute_device(self) -> torch.device:
        """The device that the module computes on."""
        return self._unit.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the module computes in: its first parameter's, unless the precision says another."""
        own = self.params[0].dtype if self.params else torch.float32
        return self._options.precision.compute_dtype(own)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point buffers are computed with in; None if a policy leaves them as they are."""
        is_policy = isinstance(self._options.mixed_precision, MixedPrecision)
        return self._options.precision.buffers or (None if is_policy else self.compute_dtype)

    @property
    def state_dict_device(self) -> torch.device:
        """The device of the tensors of `state_dict`."""
        return self._options.state_dict_device or self.compute_device

    @property
    def numel_padded_per_param(self) -> list[int]:
        """The number of elements that are padding, for each of `params`."""
        if self._options.use_orig_params:
            return [0] * len(self.params)
        return [handle.layout.padding(handle.comm.rank) for handle in self._listed_handles]

    @property
    def no_broadcast_optim_state(self) -> bool:
        """True if its optimizer state is left out of the gathered one.

        So asked, or found to be a unit of one rank inside of an outermost one that is sharded: then the first rank has
        all of it.
        """
        runtime = self._unit.runtime
        return is_uncollected(self._unit, self._unit if runtime is None else runtime.root)

    @property
    def uncollected_opt_state(self) -> dict[int, Any]:
        """Empty: FairScale sets aside here what it does not gather."""
        return {}

    @property
    def is_connected(self) -> bool:
        """False after unpickling, until `process_group` is assigned."""
        return copying.is_connected(self._unit)

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError unless `training_state` is `state`, or one of several."""
        expected = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in expected:
            names = " or ".join(one.name for one in expected)
            raise ValueError(f"{self._unit.name}: expected to be {names}, but it is {self.training_state.name}")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in PUBLIC and "_options" in self.__dict__:
                return getattr(self._options, name)  # FairScale's are attributes
            if "_fsdp_wrapped_module" not in self.__dict__.get("_modules", {}):
                raise  # a subclass's constructor is before ours
        try:
            return getattr(self.module, name)
        except AttributeError:
            refuse_foreign(type(self), name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ASSIGNED_GROUPS and "_unit" in self.__dict__ and not copying.is_missing(value):
            self._assign_group(name, value)
        elif name == "_is_root" and value is None:
            self._reset_lazy_init()
        elif any(isinstance(one, Forwarding) and one.forwards(name) for one in map(self.__dict__.get, _ENTRIES)):
            setattr(self._unit.module, name, value)
        elif isinstance(value, nn.Module) and name in self._children_inside():
            setattr(self.module.module, name, value)  # where it is read from
        else:
            super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)

    def _children_inside(self) -> dict[str, nn.Module | None]:
        holder = self.__dict__.get("_modules", {}).get("_fsdp_wrapped_module")
        return {} if holder is None else holder.module._modules

    def _forward_entries(self) -> None:
        """Have what is put in the wrapped module's parameters and buffers through this wrapper arrive there."""
        for kind in _ENTRIES:
            self.__dict__[kind] = Forwarding(self.__dict__[kind], lambda: self._unit.module, kind)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules as `nn.Module.named_modules`, with plain names where a plain module around wrappers asks.

        So tools that look for modules by the names in a state dict find them, as `peft` does.
        """
        found = super().named_modules(memo, prefix, remove_duplicate)
        if not prefix or FSDP_PART in prefix.split("."):
            return found
        return ((module_name(name), module) for name, module in found)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield as `nn.Module.named_parameters`, with plain names in `summon_full_params` and where there are any."""
        has_own_names = not self._options.flatten_parameters or self._options.use_orig_params
        plain = has_own_names or self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean_name(name) if plain else name, param

    def extra_repr(self) -> str:
        options = self._options
        text = f"world_size={self.world_size}, flatten_parameters={options.flatten_parameters}, "
        text += f"mixed_precision={bool(options.mixed_precision)}"
        if self.replicate_group is not None:
            text += f", sharding_strategy={self.sharding_strategy.name}, replicas={self._unit.replicas.world_size}"
        if options.verbose:
            text += (
                f", rank={self.rank}, reshard_after_forward={self.reshard_after_forward}, "
                f"compute_dtype={self.compute_dtype}, compute_device={self.compute_device}, "
                f"bucket_cap_mb={options.bucket_cap_mb}, gradient_predivide_factor={self.gradient_predivide_factor}"
            )
        return text

    # --- training -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over its ranks, as is the backward through its outputs."""
        self._register_post_backward_hooks()
        hooks = self._unit.forward
        depth = hooks.depth
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            hooks.give_up(depth)
            raise
        changed = self._register_pre_backward_hooks(output)
        return output if changed is None else changed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without summing them over the ranks; the next backward outside does it for all.

        For the outermost wrapper. Each rank holds unsharded gradients meanwhile.

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
        self._unit.require_idle("set gradient factors")
        for unit in self._units() if recursive else [self._unit]:
            unit.set_divide_factors(pre, post)

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
        self._unit.require_idle("register a communication hook")
        for wrapper in get_fsdp_instances(self):
            _require_hookable(wrapper)
        comm_hook = CommHook(hook, state)
        agree_on(self._unit.everyone, "communication hooks", comm_hook.name)
        for unit in runtime.units:
            unit.use_comm_hook(comm_hook)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module as `nn.Module.compile` does; collectives stay around what is compiled."""
        self.module.module.compile(*args, **kwargs)

    def _units(self) -> list[Unit]:
        return [unit for _, unit in units_in(self._unit)]

    def _runtime_as_root(self, method: str) -> Runtime:
        runtime = runtime_of(self._unit)
        if runtime.root is not self._unit:
            raise RuntimeError(
                f"{method} is for the outermost FullyShardedDataParallel; this one ('{self._unit.name}') lies inside "
                f"{runtime.root.name}. Call it there."
            )
        return runtime

    # --- parameters -------------------------------------------------------------------------------------------------

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
        self._unit.require_idle("summon shapes")
        with shapes_summoned(self._units()):
            yield

    @during("summon_full_params()")
    def _prepare_to_summon(self, form: Summoning, recurse: bool) -> None:
        self._unit.require_idle("summon full parameters")
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

    # --- state dicts ------------------------------------------------------------------------------------------------

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
        if self._unit.access.is_local:  # of a wrapper around this one, whose local state is taken
            return self.local_state_dict(destination, prefix, keep_vars)
        first_only = self._options.state_dict_on_rank_0_only if rank0_only is None else rank0_only
        asked = Saving(self._unit.everyone, dtype, self._options.state_dict_device, first_only)
        return save_whole(self, self._unit, asked, destination, prefix, keep_vars)

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
        self._unit.require_idle("load a state dict")
        ensure_agreed(self._unit)
        return load_whole(self, self._unit, super().load_state_dict, state_dict, strict, rank0_only)

    def local_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """This rank's shards, and buffers, under the names of FairScale's. No rank needs another for it.

        A flat parameter is under the plain path of its wrapper, as ``path.flat_param_0`` (``flat_param_0`` of the
        outermost), a vector ``[shard]`` in the dtype that the optimizer steps, on the device where it is kept; with
        ``flatten_parameters=False`` a parameter's shard, and with ``use_orig_params=True`` its piece, is under the
        parameter's own name. Ignored parameters are whole, buffers in the dtype from before wrapping. The tensors are
        the model's own, detached, as those of `nn.Module.state_dict` are: save or copy them before the next step.

        Args:
            destination, prefix, keep_vars: as for `nn.Module.state_dict`.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`, or while there are parameters without
                values.
        """
        if not self._unit.access.is_local:
            self._unit.require_idle("take a local state dict")
            require_values(self._unit.module, "take a local state dict")
        with local(self._unit, "take a local state dict"):
            return local_state(self._unit, destination, prefix, keep_vars)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what `local_state_dict` gave on the same rank of as many ranks. No rank needs another for it.

        Call it on every rank before the model is used again. It is checked as a whole before anything is changed: after
        an error this rank has what it had before (only modules with a ``_load_from_state_dict`` or load hooks of their
        own may have taken what is theirs). Other ranks are not asked: if one of them raises, none should go on.

        Args:
            state_dict: as `local_state_dict` gives it, FairScale's too; names with wrappers' path parts are taken.
            strict: missing and unexpected keys are an error.

        Returns:
            torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`; or for keys and sizes that do not fit, or
                shards that say that they are another rank's, with the unit, the rank, and both sizes.
        """
        self._unit.require_idle("load a local state dict")
        with local(self._unit, "load a local state dict"):
            return LocalLoad(self, self._members(), state_dict, strict).run()

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` needs to know of this rank's shards. No rank needs another for it.

        FairScale's format: ``param_metadata`` has an entry for each wrapper (``fsdp_path``, ``params``,
        ``no_broadcast_optim_state``, ``shared_param_info``), and ``params`` for each key of `local_state_dict` the
        ``names``, ``shapes``, ``numels`` and ``padding`` of what is in it, in this order. ``buffer_names`` has
        everything else that modules save, each rank's being as good as another's: buffers, ignored parameters, extra
        state. Padding differs, so all ranks' are needed.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`.
            NotImplementedError: for parameters that are `DTensor`s.
        """
        self._unit.require_idle("take local metadata")
        with local(self._unit, "take local metadata"):
            return local_metadata(self, self._members())

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Any]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Whole weights under plain names from all ranks' shards, FairScale's too. Offline: no process group is needed.

        Tensors are new, on the device of the first rank's, and made one parameter at a time: beyond what is given and
        the result, nothing is held. Tied parameters are one tensor under all their names. Nothing given is changed.

        Args:
            shard_weights: each rank's `local_state_dict`, in rank order; with hybrid sharding of all ranks or of the
                first replica.
            shard_metadata: the same ranks' `local_metadata_dict`.
            with_module_buffers: whether to add the first rank's buffers, and whatever else is not sharded.
            strict: False leaves out parameters and buffers that the first rank's weights lack, and keys that no
                metadata name.

        Returns:
            What `state_dict` would give on the first rank: of a unit with fewer ranks than the outermost, those values
            that the first rank's group has.

        Raises:
            ValueError: for lists that are empty or not of one length; for missing, cut, reordered or superfluous
                shards, and those of different models: with the rank and the key.
        """
        return consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    def _members(self) -> list[Member]:
        """The wrappers in this one, itself first."""
        first = min(self._unit.ranks, default=None)
        found = []
        for path, one in self.named_modules():
            if not isinstance(one, FullyShardedDataParallel):
                continue
            ranks = ranks_of(one.process_group)
            is_counted = first is None or not ranks or first in ranks
            is_alone = one.world_size == 1 < self.world_size
            found.append(Member(clean_name(path), one._unit, one._options.flatten_parameters, is_counted, is_alone))
        return found

    @during("sharded_state_dict()")
    def sharded_state_dict(self, *, prefix: str = "") -> Any:
        """Collective the first time. The state with this rank's parts in the place of whole parameters, for DCP.

        Keys, and their order, are those of `state_dict`, so that unsharded models, and others of any world size or
        kind of sharding, read the checkpoint. Nothing is gathered, and parameters are not copied: save them before
        they change, or stage them (``dcp.async_save``). ``dcp.load`` into the result writes to memory of its own, as
        large as the shards; `load_sharded_state_dict` takes it over. The same for FSDP1's ``SHARDED_STATE_DICT``.

        Parameters are `TensorPart`s: tensors of the whole shape, in the dtype that the optimizer steps and where the
        shards are, that hold ``local``, elements ``part.start:part.stop`` in row-major order. Tied parameters are
        there under each of their names. Buffers and ignored parameters are whole copies.

        What has no values yet (meta device), and values that ranks were wrapped with differently, can be loaded into;
        saving them raises an error.

        Args:
            prefix: of all keys.

        Raises:
            RuntimeError: inside a forward or backward, or inside `summon_full_params`.
        """
        self._require_shards("take a sharded state dict")
        return sharded_state(self._unit, self._units(), lambda: self.state_dict(prefix=prefix))

    @during("load_sharded_state_dict()")
    def load_sharded_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Collective. Load what `sharded_state_dict` returned, when DCP has loaded values into it.

        Values of another dtype are cast as `Tensor.copy_` does. Whole, plain tensors are taken as well, each rank
        keeping its part. If a rank cannot load its part, all raise an error, and none of their parameters and buffers
        has changed (what ``set_extra_state`` and hooks do is not undone).

        Args:
            state_dict: with plain names, and parts of the same parameters that this rank keeps.
            strict: raise for missing and unexpected keys. What has no values, because nothing was loaded into it,
                counts as missing.

        Returns:
            torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

        Raises:
            RuntimeError: inside a forward or backward, or inside `summon_full_params`; for keys and shapes that do not
                fit, parts that another world size has, and other kinds of tensors, naming rank and key; if another
                rank could not load its part, or loads other keys.
        """
        self._require_shards("load a sharded state dict")
        given = with_wrapped_metadata(state_dict, self)
        for key, value in state_dict.items():
            if isinstance(value, TensorPart) and value.is_blank:
                del given[key]
        return load_sharded_state(
            self._unit, self._units(), lambda: nn.Module.load_state_dict(self, given, strict=strict)
        )

    def _require_shards(self, what: str) -> None:
        self._unit.require_idle(what)
        inside = TrainingState.SUMMON_FULL_PARAMS
        summoned = [unit.name for unit in self._units() if unit.state is inside or unit.access.summoned is not None]
        if summoned:
            raise RuntimeError(f"cannot {what}: {summoned[0]} is inside summon_full_params(). Leave it first.")

    # --- state of optimizers ----------------------------------------------------------------------------------------

    @during("gather_full_optim_state_dict()")
    def gather_full_optim_state_dict(
        self, optim: Any, recipient_rank: int | None = 0, **ignored: Any
    ) -> dict[str, Any] | None:
        """Collective. An optimizer's whole state, as if nothing were sharded. The optimizer is left alone.

        For the outermost wrapper that all parameters of the optimizer are in. Each tensor is put together by itself,
        straight in the memory of the result; ranks that do not get it need none. FairScale's format:

        - ``state``: by number of the original parameter its state, tensors in the parameter's shape on the host, in
          their own dtype; ``step`` as a plain number, other 0-d tensors as a list with one of each rank. Numbers count
          the parameters wrapper by wrapper in the order of ``modules()``. Those without state are not there.
        - ``param_groups``: as the optimizer's, with the numbers of what is in each.
        - ``param_id_map``: by number of the original parameter, the optimizer's number of what it sees of it; None
          without state.
        - ``uncollected_local_ids``: the optimizer's numbers of what `no_broadcast_optim_state` applies to. The state of
          units of one rank is the recipient's own; that of units over several ranks is left out.
        - all other keys of ``optim.state_dict()``, such as ``loss_scale``.

        With tensor parallelism, the ranks that have the recipient's place in their own data-parallel group get it.

        Args:
            optim: an optimizer, or anything with a ``state_dict()`` like one.
            recipient_rank: the number of the rank that gets the result; None for all of them.
            ignored: taken for FairScale's sake.

        Returns:
            The dictionary; None on ranks that do not get it.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`; if another rank could not take part.
            TypeError: for what has no ``state_dict()`` of an optimizer.
            ValueError: for a rank that there is not; for parameters that are not of the model; for state of neither the
                parameter's shape nor a number; for ranks with different states.
        """
        return fairscale_dictionary(optim_stream(self, optim, recipient_rank))

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a full optimizer state, for ``optim.load_state_dict``. No rank needs another for it.

        From `gather_full_optim_state_dict`, of this world size or another, FairScale's too. The world size, and with
        `no_broadcast_optim_state` the process groups, may have changed, and so may flattening; which modules are
        wrapped may not, unless the state goes by names (`fsdp.optim_utils.rekey_optim_state_dict`).

        The given dictionary is **changed**: it becomes the result, and memory of the whole is given back as it is cut.

        Args:
            full_optim_state_dict: on every rank that calls it.

        Returns:
            The same dictionary. Tensors in it are on the host (on disk, where shards are), in memory of their own.
            Numbers, ``step`` for one, are of the types that they have in the optimizer that has stepped the parameters
            in this session, if one has.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`.
            TypeError: for what is no such dictionary.
            ValueError: for another model's; for state that cannot be cut. Nothing is changed then.
        """
        return become_shard(self, full_optim_state_dict)

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
        self._unit.require_idle("hand over an optimizer")
        reshard_optimizer(self._unit, optimizer, {param: name for name, param in self.named_parameters()})

    # --- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        copying.prepare_to_copy(self._unit)
        copying.refuse_to_pickle_dtensors(self._unit)
        groups = [name for name in _GROUPS if self.__dict__[name] is not None]
        return self.__dict__ | dict.fromkeys(groups, copying.MISSING) | {_END: depart()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop(_END, None)
        if "_unit" not in state:
            raise RuntimeError(
                "this FullyShardedDataParallel was pickled by FairScale, whose wrappers have other parts. Load it "
                "there and save its state_dict(), or local_state_dict() with local_metadata_dict(), which load here."
            )
        super().__setstate__(state)
        self._forward_entries()
        self._unit.wake()

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))  # as torch copies modules shallowly: all is shared, ranks included
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copying.prepare_to_copy(self._unit)
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name in _GROUPS:
            memo[id(self.__dict__[name])] = self.__dict__[name]  # the ranks are the same ones
        with under_way():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._forward_entries()
        copied._unit.wake()
        return copied

    def _assign_group(self, name: str, given: Any) -> None:
        """Have a wrapper that was copied or unpickled communicate over this group."""
        was_missing = copying.is_missing(self.process_group)
        if name == "process_group":
            groups = Groups.resolve(given, self.sharding_strategy)
            copying.require_same_place(self._unit, groups)
            reduce_over = self.process_group_reduce_scatter if was_missing else None
            reduce_over = None if copying.is_missing(reduce_over) else reduce_over
        elif was_missing:
            self.__dict__[name] = given  # until there is a group to compare it with
            return
        else:
            groups = Groups(self.process_group, self.replicate_group, self.sharding_strategy, self._unit.ranks)
            reduce_over = given
        reduce_group = group_to_reduce_over(reduce_over, groups.shard, self.compute_device)
        copying.connect(self._unit, groups, reduce_group)
        now = {"process_group": groups.shard, "replicate_group": groups.replicate}
        self.__dict__.update(now, process_group_reduce_scatter=reduce_group)

    # --- private names that FairScale's clients use, and torch's own ------------------------------------------------

    def _lazy_init(self) -> None:
        """Collective. Settle now that this wrapper is the outermost one, which its first use would do."""
        self._unit.ensure_runtime()

    def _free_full_params(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Give back the memory of whole parameters, such as those kept under `no_sync` without resharding.

        Args:
            params: of `params`, those whose memory is meant; None for all.

        Raises:
            RuntimeError: inside a forward or backward, which needs them.
        """
        self._unit.require_idle("free full parameters")
        wanted = None if params is None else {id(param) for param in params}
        for handle in self._unit.handles:
            if wanted is None or not wanted.isdisjoint(map(id, handle.registry.params)):
                handle.reshard()

    def _register_post_backward_hooks(self) -> None:
        """To be overridden: called before each forward of the module. Our hooks are elsewhere, so this does nothing."""

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        """To be overridden: called with what each forward of the module has returned, to return what is to be returned.

        Our hooks are elsewhere, so this changes nothing. Where it returns None, the outputs stay as they are.
        """
        return outputs

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost wrapper; None while that is not known. Setting None forgets it."""
        runtime = self._unit.runtime
        return None if runtime is None else runtime.root is self._unit

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What `DistributedDataParallel` asks first of what it is given."""
        raise RuntimeError(ddp_message(self._unit.name))

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"DataParallel has been given {self._unit.name}, which is sharded over processes and cannot be copied to "
            "several devices of one. Call the FullyShardedDataParallel itself, in one process for each device."
        )

    def _reset_lazy_init(self) -> None:
        """Forget which wrapper is outermost; the next use finds out again."""
        for unit in self._units():
            if unit.runtime is not None:
                unit.runtime.forget()


for _name in METHODS:
    setattr(FullyShardedDataParallel, _name, ForeignMethod(_name))


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Return the wrappers in a module tree, in the order of ``modules()``.

    Args:
        mod: the outermost module to look at.
        skip_empty: leave out wrappers whose parameters were all taken by inner ones.
    """
    found = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [wrapper for wrapper in found if wrapper.params or not skip_empty]


def _require_hookable(wrapper: FullyShardedDataParallel) -> None:
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
