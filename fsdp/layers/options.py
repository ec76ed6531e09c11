"""The options of a unit, which are checked and resolved once, and the policy classes of `fully_shard`."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp.distributed.devices import accelerator, is_host
from fsdp.engine.precision import InputCast, MixedPrecision, Precision, check_dtype
from fsdp.engine.unit import Unit

if TYPE_CHECKING:
    from fsdp.engine.storage import ShardStorage

# Flags that a `MixedPrecision` object replaces, with the values that count as not given.
_PRECISION_FLAGS: dict[str, tuple[Any, ...]] = {
    "fp32_reduce_scatter": (False, None),
    "compute_dtype": (None,),
    "buffer_dtype": (None,),
    "force_input_to_fp32": (False, None),
}

# Options that change communication, so ranks compare them. Further such options are compared under other names.
_COMPARED = (
    "flatten_parameters",
    "use_orig_params",
    "bucket_cap_mb",
    "disable_reshard_on_root",
    "state_dict_on_rank_0_only",
    "no_broadcast_optim_state",
)
_compared_in = operator.attrgetter(*_COMPARED)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `FullyShardedDataParallel` that are options of a single unit, with resolved defaults.

    Args:
        disable_reshard_on_root: If True (the default), the outermost wrapper keeps its own parameters between forward
            and backward, because backward needs them first.
        flatten_parameters: If False, every parameter becomes a separate flat parameter under its own name.
        bucket_cap_mb: maximum size in MiB of a bucket. Gradients of up to 1 MiB are collected in a bucket, which is
            reduced by a single collective. Consecutive units of up to 1 MiB in total are also all-gathered by a single
            collective. With 0 or less, each unit is gathered and reduced separately.
        mixed_precision: a `MixedPrecision` defines the dtypes of computation and communication. True has FairScale's
            meaning: computation in `compute_dtype`, float32 shards, buffers in `buffer_dtype`, and casts of
            floating-point inputs in the outermost such wrapper. False (the default) uses the dtype of the parameters.
        fp32_reduce_scatter: with ``mixed_precision=True``, sum gradients across ranks in float32.
        move_params_to_cpu: keep shards in host memory, where the optimizer updates them.
        compute_dtype: with ``mixed_precision=True``, the dtype of computation; None means float16. Without
            ``mixed_precision``, the required dtype of the parameters.
        buffer_dtype: dtype of floating-point buffers. With None, buffers use `compute_dtype` if it or
            ``mixed_precision=True`` is given, and are not cast otherwise. State dicts contain the original dtype.
        move_grads_to_cpu: keep reduced gradients in host memory; None means the value of `move_params_to_cpu`.
        compute_device: device of computation; None means the device of the parameters. For offloaded parameters on the
            host, or meta parameters with a group that serves CUDA, None means the current CUDA device, if any.
        state_dict_device: device of the tensors in `state_dict`, moved unit by unit; None means `compute_device`.
        clear_autocast_cache: clear autocast's cache of cast weights after each forward of the module.
        force_input_to_fp32: in a wrapper of full precision, cast 16-bit inputs to float32.
        cpu_offload: old name of `move_params_to_cpu`.
        gradient_predivide_factor: divisor of gradients before they are summed; the sum is divided by the number of
            ranks (replicas included) over this factor. The default for n ranks is the smallest power of two with a
            square of at least n, or that does not divide n.
        verbose: print more in ``repr``.
        allow_reset_parameters: If True, `reset_parameters` calls the module's method instead of raising an error.
        offload: "cpu" sets both `move_params_to_cpu` and `move_grads_to_cpu`. "disk" keeps shards, gradients and
            optimizer state in mapped files, for models larger than memory.
        offload_folder: with "disk", the folder for the files, on a fast local disk.
        keep_offload_files: with "disk", keep the files after the process has ended, even after a crash.
        use_orig_params: If True, optimizers see this rank's shard of each original parameter under the original name,
            instead of flat parameters. Shards are 1-D, and empty if the rank holds no element. A little slower.
        sync_module_states: collective; copy parameters and buffers from rank 0 of the group (with replicas, of the
            first replica). Tensors of inner wrappers and ignored tensors are not copied. Other ranks may create theirs
            on the meta device. Tensors without values on all ranks stay without values.
        state_dict_on_rank_0_only: If True, `state_dict` returns an empty dict on all ranks except the first.
        no_broadcast_optim_state: If True, exclude this wrapper's optimizer state from the gathered state
            (`gather_full_optim_state_dict`). The state of a wrapper with a single rank inside a sharded wrapper is
            always excluded; the gathered state then contains the receiving rank's own state.

    Attributes:
        precision: the dtypes in which the unit computes and communicates.

    Raises:
        TypeError, ValueError: for a value out of range, or options that contradict each other.
    """

    disable_reshard_on_root: bool = True
    mixed_precision: bool | MixedPrecision | Precision = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: float = 25
    compute_device: torch.device | str | None = None
    no_broadcast_optim_state: bool | None = False
    state_dict_device: torch.device | None = None
    clear_autocast_cache: bool = False
    force_input_to_fp32: bool = False
    verbose: bool = False
    cpu_offload: bool = False
    state_dict_on_rank_0_only: bool = False
    gradient_predivide_factor: float | None = None
    allow_reset_parameters: bool = False
    offload: str | None = None
    offload_folder: Any = None
    keep_offload_files: bool = False
    use_orig_params: bool = False
    sync_module_states: bool = False
    precision: Precision = field(init=False)

    def __post_init__(self) -> None:
        factor = self.gradient_predivide_factor
        if factor is not None and factor <= 0:
            raise ValueError(f"gradient_predivide_factor must be positive, got {factor}")
        if self.use_orig_params and not self.flatten_parameters:
            raise ValueError(
                "use_orig_params=True is for flattened parameters; with flatten_parameters=False optimizers see each "
                "parameter's shard already. Omit one of them."
            )
        moves_params, moves_grads = self._offloads()
        policy = _own_policy(self.mixed_precision)
        resolved = {
            "mixed_precision": policy,
            "precision": _precision(policy, {name: getattr(self, name) for name in _PRECISION_FLAGS}),
            "move_params_to_cpu": moves_params,
            "move_grads_to_cpu": moves_grads,
            "cpu_offload": moves_params,
            "compute_device": _device(self.compute_device),
            "state_dict_device": _device(self.state_dict_device),
            "no_broadcast_optim_state": bool(self.no_broadcast_optim_state),  # users pass None for these
            "fp32_reduce_scatter": bool(self.fp32_reduce_scatter),
            "force_input_to_fp32": bool(self.force_input_to_fp32),
            "state_dict_on_rank_0_only": bool(self.state_dict_on_rank_0_only),
        }
        self.__dict__.update(resolved)

    def _offloads(self) -> tuple[bool, bool]:
        """Return whether shards are offloaded, and whether gradients are."""
        moves_params = bool(self.move_params_to_cpu or _asks_for_offload(self.cpu_offload))
        if self.offload not in (None, "cpu", "disk"):
            raise ValueError(f"offload must be None, 'cpu' or 'disk', got {self.offload!r}")
        if self.offload is not None and (moves_params or self.move_grads_to_cpu is not None):
            raise ValueError(
                f"offload={self.offload!r} determines where shards and gradients are stored: omit move_params_to_cpu, "
                "cpu_offload and move_grads_to_cpu"
            )
        if self.offload != "disk" and (self.offload_folder is not None or self.keep_offload_files):
            raise ValueError("offload_folder and keep_offload_files are for offload='disk'")
        if self.offload == "disk" and self.offload_folder is None:
            raise ValueError(
                "offload='disk' needs offload_folder: a folder on a disk with space for the model's shards"
            )
        params = self.offload is not None or moves_params
        return params, params if self.move_grads_to_cpu is None else self.move_grads_to_cpu

    def storage_on(self, device: torch.device) -> Callable[[], ShardStorage]:
        """Return a function that creates a storage for a flat parameter with the compute device `device`."""
        if not (self.move_params_to_cpu or self.move_grads_to_cpu):
            from fsdp.engine.storage import ShardStorage  # not required before a module is sharded

            return partial(ShardStorage, device)
        from fsdp.layers.offload import DiskStorage, HostStorage  # not used by most units

        if self.offload != "disk":
            return partial(HostStorage, device, self.move_params_to_cpu, bool(self.move_grads_to_cpu))
        from fsdp.layers.mapped_files import files_under  # only for offloading to disk

        return partial(DiskStorage, device, files_under(os.fspath(self.offload_folder), self.keep_offload_files))

    @property
    def compared(self) -> Mapping[str, Any]:
        """The options compared across ranks."""
        return _named(*_compared_in(self))

    @property
    def bucket_bytes(self) -> int:
        return max(0, int(min(self.bucket_cap_mb * 2**20, sys.maxsize)))  # infinity is no limit

    def device_for(self, params_are_on: torch.device) -> torch.device:
        """Return the requested device, else the parameters' device, or an accelerator if they are offloaded."""
        if isinstance(self.compute_device, torch.device):
            return self.compute_device
        if self.move_params_to_cpu and is_host(params_are_on):
            return accelerator() or params_are_on
        return params_are_on

    def predivide_factor(self, world_size: int) -> float:
        """Return the requested factor, or the default for this number of ranks."""
        if self.gradient_predivide_factor is not None:
            return float(self.gradient_predivide_factor)
        factor = 1
        while factor * factor < world_size and world_size % factor == 0:
            factor *= 2
        return float(factor)

    def require_no_other_division(self, unit: Unit) -> None:
        """Raise an error if a communication hook cannot replace the division and summation of a unit's gradients."""
        if (hook := unit.policy.comm_hook) is not None:
            raise RuntimeError(
                f"{unit.name}: a communication hook ({hook.name}) is registered already, and there can be only one. "
                "Register one hook that does both, or change its state."
            )
        if unit.axes[1].world_size > 1:
            raise ValueError(
                f"{unit.name}: gradients are also summed over {unit.axes[1].world_size} replicas, along the replica "
                "axis, where no communication hook is called. Wrap with one process_group to shard over; or omit the "
                "hook, and set the dtype of messages with MixedPrecision(reduce_dtype=...)."
            )
        from fsdp.distributed.custom_collectives import InFront  # few models use it

        if any(isinstance(handle.reduce_comm, InFront) for handle in unit.handles):
            raise ValueError(
                f"{unit.name}: gradients are sent quantised, which conflicts with a communication hook. Omit one of "
                "them; fsdp.compress(model) without other arguments ends quantised communication."
            )
        world_size = unit.comm.world_size
        usual = self.predivide_factor(world_size)
        is_usual = (unit.policy.predivide, unit.policy.postdivide) == (usual, world_size / usual)
        if self.gradient_predivide_factor is not None or not is_usual:
            raise ValueError(
                f"{unit.name}: gradients are divided by {unit.policy.predivide} and {unit.policy.postdivide}, but a "
                "communication hook divides them by itself. Use gradient_predivide_factor=None, do not call "
                "set_gradient_divide_factors, and set the divisor in the hook."
            )


# Options that are readable attributes of the wrapper, as in FairScale.
PUBLIC = frozenset(option.name for option in fields(Options)) - {
    "precision",
    "offload",
    "offload_folder",
    "keep_offload_files",
}
SETTLED = PUBLIC | {"reshard_after_forward", "sharding_strategy"}  # read-only attributes of a wrapper


def settled(name: str) -> AttributeError:
    return AttributeError(
        f"{name} of a FullyShardedDataParallel is fixed when the module is wrapped: pass {name}=... to the "
        f"constructor. An attribute of the wrapped module is assigned as model.module.{name}."
    )


@lru_cache(maxsize=64, typed=True)  # most units share the same mapping
def _named(*values: Any) -> Mapping[str, Any]:
    return dict(zip(_COMPARED, values, strict=True))


def _precision(policy: Any, flags: dict[str, Any]) -> Precision:
    if isinstance(policy, Precision):
        return policy  # from `fully_shard`
    if not isinstance(policy, MixedPrecision):
        if policy not in (True, False, None):
            raise TypeError(f"mixed_precision must be True, False or an fsdp.MixedPrecision, got {policy!r}")
        return Precision.of_flags(mixed_precision=bool(policy), **flags)
    also = [name for name, silent in _PRECISION_FLAGS.items() if not any(flags[name] is value for value in silent)]
    if also:
        raise ValueError(
            f"mixed_precision is a MixedPrecision, which determines all dtypes: {', '.join(also)} cannot be combined "
            "with it. Use its param_dtype, reduce_dtype and buffer_dtype, or the flags without a policy."
        )
    return Precision.of_policy(policy)


def _device(given: Any) -> torch.device | None:
    return None if given is None else torch.device(given)


def _asks_for_offload(given: Any) -> bool:
    """Return whether `cpu_offload`, a flag or torch's ``CPUOffload``, requests offloading."""
    if isinstance(given, bool) or given is None:
        return bool(given)
    if _is_torchs(given, "CPUOffload"):
        return bool(given.offload_params)
    raise TypeError(f"cpu_offload must be True, False or torch's CPUOffload, got {given!r}")


def _own_policy(given: Any) -> Any:
    """Return `mixed_precision`, with torch's ``MixedPrecision`` converted to this library's class."""
    if not _is_torchs(given, "MixedPrecision"):
        return given
    return MixedPrecision(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype,
        buffer_dtype=given.buffer_dtype,
        cast_forward_inputs=given.cast_forward_inputs or given.cast_root_forward_inputs,
        full_precision_modules=tuple(given._module_classes_to_ignore),
        keep_low_precision_grads=given.keep_low_precision_grads,
    )


def _is_torchs(given: Any, name: str) -> bool:
    """Return whether a value is an instance of this FSDP1 class, without importing the class."""
    kind = type(given)
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.fsdp")


# The policies of `fully_shard`.

_POLICY_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a module under `fully_shard` computes and communicates; torch's class is also accepted.

    Attributes:
        param_dtype: dtype of the unsharded parameters and of computation; None keeps the dtype of the parameters.
        reduce_dtype: dtype in which gradients are summed across ranks. None means the default of the installed torch:
            the dtype of the parameters since torch 2.15, and `param_dtype` before.
        output_dtype: dtype of the module's floating-point outputs; None does not cast them.
        cast_forward_inputs: If True, cast the module's floating-point inputs to `param_dtype`.
        param_dtype_override_fn: function that is called once with each parameter when the module is sharded. If it
            returns the parameter's own dtype, the parameter is not cast; None and `param_dtype` change nothing. The
            result must be the same on all ranks. Inputs of the module are cast to `param_dtype` in any case.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class OffloadPolicy:
    """Do not offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and the optimizer state in host memory. Shards are copied to the device when needed.

    Attributes:
        pin_memory: use pinned memory. If an accelerator exists, host memory is always pinned, and False is an error.
    """

    pin_memory: bool = True


def precision_of(policy: Any) -> Precision:
    """Return the dtypes of a `MixedPrecisionPolicy` of this library or of torch.

    Raises:
        TypeError: for an object of another class.
        ValueError: for a dtype that cannot be used for training.
    """
    if isinstance(policy, MixedPrecision):
        raise TypeError(
            "mp_policy must be a MixedPrecisionPolicy, got a MixedPrecision, which belongs to the wrapper: pass "
            "fsdp.MixedPrecisionPolicy(param_dtype=...), or use FullyShardedDataParallel for the other fields"
        )
    if not all(hasattr(policy, name) for name in (*_POLICY_DTYPES, "cast_forward_inputs")):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got a {type(policy).__name__}")
    for name in _POLICY_DTYPES:
        check_dtype(name, getattr(policy, name))
    is_cast = policy.cast_forward_inputs and policy.param_dtype is not None
    return Precision(
        compute=policy.param_dtype,
        reduce=policy.reduce_dtype,
        reduces_in_own=_reduces_in_own(torch.__version__),
        output=policy.output_dtype,
        inputs=InputCast.ALWAYS if is_cast else InputCast.NONE,
        override=getattr(policy, "param_dtype_override_fn", None),  # a field of torch's class since 2.15
    )


@cache  # called for each unit, and torch's comparison of versions is slow
def _reduces_in_own(torchs: str) -> bool:
    """Return whether this version of torch reduces gradients in the parameters' dtype instead of `param_dtype`."""
    return torchs >= "2.15"


def is_offloaded(policy: Any) -> bool:
    """Return whether an `OffloadPolicy` of this library or of torch offloads to the host; None does not.

    Raises:
        TypeError: for an object of another class.
        ValueError: for ``pin_memory=False`` if an accelerator exists.
    """
    kinds = {kind.__name__ for kind in type(policy).__mro__}  # torch's classes have the same names
    if "CPUOffloadPolicy" in kinds:
        if not policy.pin_memory and accelerator() is not None:
            raise ValueError("CPUOffloadPolicy(pin_memory=False): host memory is always pinned; omit pin_memory")
        return True
    if policy is not None and "OffloadPolicy" not in kinds:
        raise TypeError(f"offload_policy must be CPUOffloadPolicy() or OffloadPolicy(), got {policy!r}")
    return False
