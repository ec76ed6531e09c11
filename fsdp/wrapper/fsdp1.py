"""What users of torch's FSDP1 know under its names: what is taken as it is, and what is said of the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from fsdp.engine.precision import MixedPrecision

_Arguments = ParamSpec("_Arguments")

# Arguments of its constructor, with what to use in their place.
KEYWORDS = {
    "auto_wrap_policy": "wrap inner modules first, with fsdp.auto_wrap(module, policy) inside of "
    "fsdp.enable_wrap(...); fsdp.wrap.module_wrap_policy is ModuleWrapPolicy",
    "device_id": "pass compute_device, or move the module before it is wrapped",
    "device_mesh": "pass it as process_group",
    "ignored_states": "pass ignored_modules or ignored_parameters",
    "backward_prefetch": "leave it out: the next unit is gathered ahead, in the order that was learned",
    "forward_prefetch": "leave it out: the next unit is gathered ahead, in the order that was learned",
    "limit_all_gathers": "leave it out: at most one unit is gathered ahead",
}

_FULL = "state_dict() is full, state_dict(rank0_only=True) on the first rank; sharded_state_dict() and fsdp.save shard"
_OPTIM = "use fsdp.optim_utils.full_optim_state_dict(model, optimizer), or fsdp.save"
_LOAD_OPTIM = "use fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, state), or fsdp.load"

# Its methods, which are called on the class.
METHODS = {
    "state_dict_type": _FULL,
    "set_state_dict_type": _FULL,
    "get_state_dict_type": _FULL,
    "optim_state_dict": _OPTIM,
    "full_optim_state_dict": _OPTIM,
    "sharded_optim_state_dict": _OPTIM,
    "optim_state_dict_to_load": _LOAD_OPTIM,
    "scatter_full_optim_state_dict": _LOAD_OPTIM,
    "shard_full_optim_state_dict": _LOAD_OPTIM,
    "flatten_sharded_optim_state_dict": _LOAD_OPTIM,
    "rekey_optim_state_dict": "use fsdp.optim_utils.rekey_optim_state_dict",
    "fsdp_modules": "use fsdp.get_fsdp_instances(model)",
    "check_is_root": "the outermost wrapper is whichever is used first",
}


class Instead:
    """Stands on the class for a method of FSDP1: whoever asks for it is told what to use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name}, which torch's has: {METHODS[self._name]}")


def refuses_keywords(init: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Have a constructor raise TypeError for arguments that FSDP1 has and we have not; it shows its own signature."""

    @functools.wraps(init)
    def checked(*args: _Arguments.args, **given: _Arguments.kwargs) -> None:
        for name in given:
            if name in KEYWORDS:
                raise TypeError(f"FullyShardedDataParallel has no argument {name}, which torch's has: {KEYWORDS[name]}")
        init(*args, **given)

    return checked


def offload_of(given: Any) -> bool:
    """Whether `cpu_offload` asks for it: a flag, or torch's ``CPUOffload``.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(given, bool) or given is None:
        return bool(given)
    if _is_torchs(given, "CPUOffload"):
        return bool(given.offload_params)
    raise TypeError(f"cpu_offload must be True, False or torch's CPUOffload, got {given!r}")


def precision_of(given: Any) -> Any:
    """What `mixed_precision` asks for, torch's ``MixedPrecision`` as one of ours."""
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
    """Whether a value is of this class of FSDP1, which is not imported for it."""
    kind = type(given)
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.fsdp")
