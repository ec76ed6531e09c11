"""The constructor's options, resolved and checked once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch

from fsdp.distributed.communicator import Group
from fsdp.engine.offload import Offload
from fsdp.engine.precision import MixedPrecision, Precision
from fsdp.wrapper.fsdp1 import offload_of, precision_of

# Arguments that say in flags what a `MixedPrecision` says in one object, with the values that say nothing.
_PRECISION_FLAGS: dict[str, tuple[Any, ...]] = {
    "fp32_reduce_scatter": (False, None),
    "compute_dtype": (None,),
    "buffer_dtype": (None,),
    "force_input_to_fp32": (False, None),
}

# Those that change what ranks say to each other, beside what is known by other names.
ALIKE = (
    "flatten_parameters",
    "use_orig_params",
    "bucket_cap_mb",
    "disable_reshard_on_root",
    "state_dict_on_rank_0_only",
    "no_broadcast_optim_state",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one wrapper was asked for, every default decided."""

    precision: Precision
    offload: Offload
    reshard_after_forward: bool
    disable_reshard_on_root: bool
    flatten_parameters: bool
    bucket_cap_mb: float
    compute_device: torch.device | None
    state_dict_device: torch.device | None
    gradient_predivide_factor: float | None
    clear_autocast_cache: bool
    use_orig_params: bool
    verbose: bool
    allow_reset_parameters: bool
    sync_module_states: bool
    state_dict_on_rank_0_only: bool

    # As FairScale's users read them; what they mean is in `precision` and `offload`.
    mixed_precision: bool | MixedPrecision
    fp32_reduce_scatter: bool
    force_input_to_fp32: bool
    move_params_to_cpu: bool
    move_grads_to_cpu: bool
    cpu_offload: bool
    no_broadcast_optim_state: bool

    @classmethod
    def resolve(cls, **given: Any) -> Options:
        """Check the constructor's arguments.

        Raises:
            ValueError: for a value out of range, or options that contradict each other.
        """
        given["mixed_precision"] = precision_of(given["mixed_precision"])
        factor = given["gradient_predivide_factor"]
        if factor is not None and factor <= 0:
            raise ValueError(f"gradient_predivide_factor must be positive, got {factor}")
        if given["use_orig_params"] and not given["flatten_parameters"]:
            raise ValueError(
                "use_orig_params=True is for flattened parameters; with flatten_parameters=False optimizers see each "
                "parameter's shard already. Choose one."
            )
        offload = Offload.of_options(
            move_params_to_cpu=bool(given["move_params_to_cpu"] or offload_of(given["cpu_offload"])),
            **{name: given[name] for name in ("offload", "offload_folder", "keep_offload_files", "move_grads_to_cpu")},
        )
        resolved: dict[str, Any] = {
            "precision": _precision(given),
            "offload": offload,
            "move_params_to_cpu": offload.params,
            "move_grads_to_cpu": offload.grads,
            "cpu_offload": offload.params,
        }
        resolved |= {name: _device(given[name]) for name in ("compute_device", "state_dict_device")}
        resolved |= {
            name: bool(given[name])
            for name in (
                "fp32_reduce_scatter",
                "force_input_to_fp32",
                "state_dict_on_rank_0_only",
                "no_broadcast_optim_state",
            )
        }
        return cls(**resolved, **{name: given[name] for name in _FIELDS - resolved.keys()})

    @property
    def public_names(self) -> frozenset[str]:
        """Options that FairScale's users read as attributes of the wrapper."""
        return _FIELDS - {"precision", "offload"}

    @property
    def bucket_bytes(self) -> int:
        return max(0, int(self.bucket_cap_mb * 2**20))

    def device_for(self, params_are_on: torch.device) -> torch.device:
        """Where to compute: as asked, else where the parameters are, or from where they are offloaded."""
        if self.compute_device is not None:
            return self.compute_device
        if self.offload.params and params_are_on.type == "cpu" and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return params_are_on

    def predivide_factor(self, world_size: int) -> float:
        """As asked, else `usual_predivide_factor`."""
        if self.gradient_predivide_factor is not None:
            return float(self.gradient_predivide_factor)
        return usual_predivide_factor(world_size)

    @staticmethod
    def checked_reduce_group(wanted: Any, process_group: Group, default: Any) -> Group:
        """The group that the user named for reductions.

        Raises:
            TypeError: if it is neither a group nor the name of one.
        """
        if wanted == default:
            return process_group
        if not hasattr(wanted, "rank") or not hasattr(wanted, "size"):
            raise TypeError(
                f"process_group_reduce_scatter must be a process group or a ProcessGroupName, got {wanted!r}"
            )
        if wanted.size() != process_group.size():
            warnings.warn(
                f"process_group_reduce_scatter has {wanted.size()} ranks and process_group {process_group.size()}: "
                "gradients are reduced over process_group instead",
                stacklevel=4,
            )
            return process_group
        return wanted


def usual_predivide_factor(world_size: int) -> float:
    """The smallest power of two whose square is at least `world_size`, or that doesn't divide it."""
    factor = 1
    while factor * factor < world_size and world_size % factor == 0:
        factor *= 2
    return float(factor)


def _precision(given: dict[str, Any]) -> Precision:
    policy = given["mixed_precision"]
    if not isinstance(policy, MixedPrecision):
        if policy not in (True, False, None):
            raise TypeError(f"mixed_precision must be True, False or a fsdp.MixedPrecision, got {policy!r}")
        flags = {name: given[name] for name in _PRECISION_FLAGS}
        return Precision.of_flags(mixed_precision=bool(policy), **flags)
    also = [name for name, silent in _PRECISION_FLAGS.items() if not any(given[name] is value for value in silent)]
    if also:
        raise ValueError(
            f"mixed_precision is a MixedPrecision, which says everything about dtypes: {', '.join(also)} cannot be "
            "given beside it. Use its param_dtype, reduce_dtype and buffer_dtype, or the flags and no policy."
        )
    return Precision.of_policy(policy)


def _device(given: Any) -> torch.device | None:
    return None if given is None else torch.device(given)


_FIELDS = frozenset(field.name for field in fields(Options))
