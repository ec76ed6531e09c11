"""Names of torch's FSDP1 and of FairScale that `FullyShardedDataParallel` does not have, with replacements.

The names are arguments, methods, attributes, names in modules and environment variables. This module also sets the
marks with which torch's composable functions (`replicate`, `fully_shard`) skip each other's modules.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import nn

from fsdp.distributed.communicator import uncompiled
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.names import named_modules

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    """Return a table with an entry for each name; names in the keys of `reasons` are separated by spaces."""
    return {name: reason for names, reason in reasons.items() for name in names.split()}


# Arguments of FSDP1's constructor and methods, and of FSDP2's `fully_shard`, for the wrapper.
KEYWORDS = {
    "auto_wrap_policy": "call fsdp.shard(module, units={Block}, ...), which takes classes of modules or a policy, "
    "and the other arguments",
    "device_id": "pass compute_device, or move the module before it is wrapped",
    "device_mesh": "pass it as process_group",
    "ignored_states": "pass ignored_modules or ignored_parameters",
    "backward_prefetch": "omit it: the next unit is gathered in advance, in the recorded order",
    "forward_prefetch": "omit it: the next unit is gathered in advance, in the recorded order",
    "limit_all_gathers": "omit it: at most one unit is gathered in advance",
    "writeback": "volatile=True is writeback=False, and writeback=True the default",
    "mesh": "pass it as process_group",
    "mp_policy": "pass mixed_precision=fsdp.MixedPrecision(...)",
    "offload_policy": "pass offload='cpu'",
    "ignored_params": "pass ignored_parameters",
    "shard_placement_fn": "omit it: vectors are divided at any element",
}
# Arguments of the wrapper and of FSDP1, for `fully_shard`.
FULLY_SHARD_KEYWORDS = _by_name(
    {
        "process_group device_mesh": "pass a DeviceMesh as mesh",
        "auto_wrap_policy units": "call fully_shard on each inner module first",
        "mixed_precision compute_dtype": "pass mp_policy=fsdp.MixedPrecisionPolicy(...)",
        "cpu_offload offload": "pass offload_policy=fsdp.CPUOffloadPolicy()",
        "sharding_strategy": "pass reshard_after_forward, or placements",
        "ignored_modules ignored_parameters ignored_states": "pass parameters as ignored_params",
        "device_id compute_device": "pass a mesh of the device's type",
        "use_orig_params": "omit it: parameters keep their names and shapes",
        "sync_module_states param_init_fn": "build the module on the meta device, then load values, or call "
        "fsdp.materialize(model)",
    }
)

_FULL = (
    "each type has a method: state_dict(), state_dict(rank0_only=True), sharded_state_dict(), local_state_dict(); "
    "or use fsdp.save"
)
_OPTIM = "use fsdp.optim_utils.full_optim_state_dict(model, optimizer), or fsdp.save"

# Methods of FSDP1, called on the class.
METHODS = _by_name(
    {
        "state_dict_type set_state_dict_type get_state_dict_type": _FULL,
        "optim_state_dict full_optim_state_dict sharded_optim_state_dict": _OPTIM,
        "optim_state_dict_to_load scatter_full_optim_state_dict shard_full_optim_state_dict "
        "flatten_sharded_optim_state_dict": "use fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, state), "
        "with rank0_only=True for a state on the first rank, or fsdp.load",
        "rekey_optim_state_dict": "use fsdp.optim_utils.rekey_optim_state_dict",
        "fsdp_modules": "use fsdp.get_fsdp_instances(model)",
        "check_is_root": "the outermost wrapper is whichever is used first",
    }
)

# Names of FSDP1 in torch.distributed.fsdp and its module `wrap` that `fsdp` and `fsdp.wrap` do not define.
NAMES = _by_name(
    {
        "StateDictType StateDictConfig StateDictSettings FullStateDictConfig ShardedStateDictConfig "
        "LocalStateDictConfig": _FULL,
        "OptimStateDictConfig FullOptimStateDictConfig ShardedOptimStateDictConfig LocalOptimStateDictConfig": _OPTIM,
        "OptimStateKeyType": METHODS["rekey_optim_state_dict"],
        "BackwardPrefetch": KEYWORDS["backward_prefetch"],
        "CPUOffload": "pass cpu_offload=True, or offload='cpu'",
        "ModuleWrapPolicy transformer_auto_wrap_policy": "call fsdp.shard(module, units={Block}, ...), or use "
        "fsdp.module_wrap_policy",
        "size_based_auto_wrap_policy": "use fsdp.default_auto_wrap_policy",
        "CustomPolicy lambda_auto_wrap_policy": "use fsdp.lambda_wrap_policy, whose function may return options",
        "always_wrap_policy": "use fsdp.lambda_wrap_policy(lambda module: True)",
    }
)

# Attributes of FSDP1's instances, most of them private, but read by other programs.
ATTRIBUTES = _by_name(
    {
        "_handle _handles _all_handles _fully_sharded_module_to_handle": "fsdp.flat_param_handles(model) lists the "
        "handles of all units",
        "_flat_param": "params lists this wrapper's flat parameters, and fsdp.flat_param_handles(model) their handles",
        "_has_params": "params is empty for a wrapper without parameters of its own",
        "_use_orig_params": "the attribute is use_orig_params",
        "_use_full_prec_in_eval": "evaluate inside fsdp.full_precision(model)",
        "_all_fsdp_states": "use fsdp.get_fsdp_instances(model)",
        "_comm_hook": "register_comm_hook() sets one, for all units",
        "_comm_hook_state": "pass the state to register_comm_hook(), which passes it to the hook",
        "_device_mesh": "process_group and replicate_group are the groups of its dimensions",
        "_gradient_predivide_factor": "the attribute is gradient_predivide_factor",
        "_gradient_postdivide_factor": "the attribute is gradient_postdivide_factor",
        "_sync_gradients": "no_sync() decides whether gradients are reduced",
        "_ignored_modules": "pass them as ignored_modules; they stay ordinary modules",
        "_ignored_params": "pass them as ignored_parameters; they stay ordinary parameters",
        "_exec_order_data": "the order of units is recorded in each pass; fsdp.trace shows it",
        "_device_handle _default_stream _unshard_stream _pre_unshard_stream _post_backward_stream _all_reduce_stream "
        "_free_event_queue": "streams and events belong to the communicators, and cannot be set",
        "_state_dict_type _state_dict_config": _FULL,
        "_optim_state_dict_config": _OPTIM,
        **{name: KEYWORDS[name] for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers")},
    }
)

# Environment variables of FSDP1, enabled by "1".
VARIABLES = {
    "FSDP_USE_FULL_PREC_IN_EVAL": "evaluate inside `with fsdp.full_precision(model):`",
    "FSDP_SKIP_WRITEBACK_CHECK": "omit it: changes of parameters between steps are always detected and kept",
    "FSDP_USE_UNSAFE_SETATTR": "omit it: there is only one way to set parameters of modules",
    "FSDP_USE_FAKE_ALL_GATHER": "use fsdp.trace for the time of all-gathers, and fsdp.plan for their bytes",
    "FSDP_USE_FAKE_REDUCE": "use fsdp.trace for the time of reductions, and fsdp.plan for their bytes",
}

# Private names of FairScale, called or overridden by other programs.
PRIVATE = {
    "_rebuild_full_params": "use summon_full_params(), or run the module, which gathers by itself",
    "_use_full_params": "use summon_full_params()",
    "_use_fp32_param_shard": "params are shards between steps",
    "_cast_fp32_param_shards_to_fp16": "this is part of each gather",
    "_free_fp16_param_shard": "this is part of each gather",
    "_prep_grads_for_backward": "gradients of several backwards are accumulated without it",
    "_post_backward_hook": "to change gradients before their reduction, use register_comm_hook()",
    "_post_reduction_hook": "hook params with register_post_accumulate_grad_hook, or use register_comm_hook()",
    "_wait_for_post_backward": "when backward() returns, gradients are reduced",
    "_queue_wait_for_post_backward": "when backward() returns, gradients are reduced",
    "_wait_for_previous_optim_step": "gathers wait for the optimizer automatically",
    "_set_is_root": "the first use of the outermost wrapper determines it; _lazy_init() does so immediately",
    "_setup_streams": "there are no streams to set up",
    "_streams": "a wrapper has no separate streams",
    "_reducer": "bucket_cap_mb determines how gradients are collected",
    "_shard_parameters_": "parameters are sharded when they are wrapped",
    "_get_shard": "fsdp.optim_utils and load_state_dict() shard unsharded values",
    "_gather_optim_state": "use gather_full_optim_state_dict()",
    "_cast_buffers": "buffers are cast automatically, see buffer_dtype",
    "_no_return_full_state_dict": "local_state_dict() does not recurse into state_dict()",
    "_load_state_dict": "use load_state_dict(), or load_local_state_dict()",
    "_num_flatten_params": "len(wrapper.params)",
    "_param_name_groups": "wrapper.module.metadata(i) has the names",
}


def refuse_foreign(owner: type, name: str) -> None:
    """Raise AttributeError for a name of FSDP1 or FairScale that a class does not have."""
    for others, table in (("torch's FSDP", METHODS), ("torch's FSDP", ATTRIBUTES), ("FairScale's", PRIVATE)):
        if name in table:
            raise AttributeError(f"{owner.__name__} has no {name}, which {others} has: {table[name]}")


def refuse_missing(package: str, name: str) -> NoReturn:
    """Raise AttributeError for a name that a package's `__getattr__` does not find, or ImportError during an import."""
    if name not in NAMES:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    told = f"{package} has no {name}, which torch's FSDP1 has: {NAMES[name]}"
    # `from package import name` first calls hasattr, and replaces the text of an AttributeError.
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    raise (ImportError if is_import else AttributeError)(told)


def replicated_in(module: nn.Module) -> list[nn.Module]:
    """Return the inner modules managed by torch's composable `replicate`."""
    from torch.distributed._composable.contract import REGISTRY_KEY

    return [inner for inner in module.modules() if "replicate" in inner.__dict__.get(REGISTRY_KEY, ())]


def note_fully_sharded(module: nn.Module) -> None:
    """Make torch's composable `replicate` skip a sharded module inside it."""
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


_TORCHS = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel"}  # functions by classes


def refuse_torchs_units(module: nn.Module) -> None:
    """Raise ValueError for inner modules sharded by torch, except modules of its composable `replicate`."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for name, inner in named_modules(module):
        kinds = {kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.distributed.fsdp")}
        for kind, function in _TORCHS.items():
            if kind in kinds and inner not in replicated_in(module):
                raise ValueError(
                    f"'{name}' of this {type(module).__name__} is sharded by torch's {function}. Shard all modules of "
                    f"a model by the same library: from fsdp import {function}"
                )


def refuse_data_parallel(name: str, instead: str) -> NoReturn:
    """Raise RuntimeError if `nn.DataParallel` replicates a sharded module."""
    raise RuntimeError(
        f"DataParallel got {name}, which is sharded over processes and cannot be copied to the devices of one process. "
        f"Call {instead}, in one process for each device."
    )


@uncompiled
def refuse_local_sgd() -> None:
    """Raise NotImplementedError if accelerate's LocalSGD calls `no_sync`: it would average different shards."""
    if is_called_from("accelerate.local_sgd"):
        raise NotImplementedError(
            "accelerate's LocalSGD averages `param.data` of all ranks, but each rank of a sharded model has different "
            "elements there. Use fsdp.OuterOptimizer, with a replica of the model for each group of ranks."
        )


class ForeignMethod:
    """A descriptor on the class for a method of FSDP1. Reading it raises AttributeError with a replacement."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        refuse_foreign(owner, self._name)


def refuses_keywords(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function of the wrapper raise TypeError for arguments that only torch's FSDP has; the signature is kept.

    The function also warns of FSDP1's environment variables.
    """

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **given: _Arguments.kwargs) -> _Result:
        _refuse_keywords(given, "FullyShardedDataParallel", "torch's FSDP", KEYWORDS)
        _warn_of_variables()
        return function(*args, **given)

    return checked


def refuses_wrappers_keywords(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make `fully_shard` raise TypeError for arguments of `FullyShardedDataParallel`; the signature is kept."""

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **given: _Arguments.kwargs) -> _Result:
        _refuse_keywords(given, "fully_shard", "FullyShardedDataParallel", FULLY_SHARD_KEYWORDS)
        return function(*args, **given)

    return checked


def _refuse_keywords(given: Iterable[str], owner: str, others: str, known: Mapping[str, str]) -> None:
    found = [f"no argument {name}, which {others} has: {known[name]}" for name in given if name in known]
    if found:
        raise TypeError(f"{owner} has {'. It has '.join(found)}")


@functools.cache
def _warn_of_variables() -> None:
    for name, instead in VARIABLES.items():
        if os.environ.get(name) == "1":
            warnings.warn(
                f"{name}=1 is for torch's FullyShardedDataParallel, and has no effect on fsdp's: {instead}",
                stacklevel=3,
            )
