"""What is found below `fairscale`, as a table: by module its names, and for what is not there what to use instead."""

from __future__ import annotations

from typing import Any

from fsdp.compat.fairscale import parts
from fsdp.compat.fairscale.bucketer import ReduceScatterBucketer
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.flatten_params_wrapper import FlattenParamsWrapper
from fsdp.engine.unit import TrainingState
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, ProcessGroupName, get_fsdp_instances
from fsdp.optim_utils.grad_scaler import ShardedGradScaler
from fsdp.state_dict.load import no_pre_load_state_dict_hook
from fsdp.wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from fsdp.wrap.batch_norm import auto_wrap_bn
from fsdp.wrap.checkpoint_wrapper import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)

# The last one that FairScale had. Clients compare it with those from which on they use something.
VERSION = "0.4.13"

_WRAP: dict[str, Any] = {
    "auto_wrap": auto_wrap,
    "config_auto_wrap_policy": config_auto_wrap_policy,
    "default_auto_wrap_policy": default_auto_wrap_policy,
    "enable_wrap": enable_wrap,
    "wrap": wrap,
}
_DATA_PARALLEL: dict[str, Any] = {
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "TrainingState": TrainingState,
    "auto_wrap_bn": auto_wrap_bn,
    "get_fsdp_instances": get_fsdp_instances,
    "no_pre_load_state_dict_hook": no_pre_load_state_dict_hook,
}
_CHECKPOINT: dict[str, Any] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "is_checkpointing": is_checkpointing,
    "is_recomputing": is_recomputing,
}
_CHECKPOINT_FILE = {**_CHECKPOINT, "disable_checkpointing": disable_checkpointing}
_FLATTEN: dict[str, Any] = {"FlattenParamsWrapper": FlattenParamsWrapper, "FlatParameter": FlatParameter}
# torch's own scaler would let ranks take different steps, so both names stand for the one that does not.
_SCALERS: dict[str, Any] = {
    "GradScaler": ShardedGradScaler,
    "ShardedGradScaler": ShardedGradScaler,
}
_TESTING: dict[str, Any] = {"DummyProcessGroup": parts.DummyProcessGroup}
_CONTAINERS: dict[str, Any] = {
    function.__name__: function
    for function in (
        parts.apply_to_tensors,
        parts.apply_to_type,
        parts.pack_kwargs,
        parts.unpack_kwargs,
        parts.split_non_tensors,
        parts.unpack_non_tensors,
    )
}
_BUCKETER: dict[str, Any] = {"ReduceScatterBucketer": ReduceScatterBucketer}
_PARALLEL: dict[str, Any] = {"ProcessGroupName": ProcessGroupName}

# Old paths and new ones: `fairscale.utils` became `fairscale.internal` and `fairscale.fair_dev`.
PROVIDED: dict[str, dict[str, Any]] = {
    "fairscale": {"__version__": VERSION, "__version_tuple__": tuple(map(int, VERSION.split(".")))},
    "fairscale.version": {"__version_tuple__": tuple(map(int, VERSION.split("."))), "__version__": VERSION},
    "fairscale.nn": {
        **_WRAP,
        "FullyShardedDataParallel": FullyShardedDataParallel,
        "FlattenParamsWrapper": FlattenParamsWrapper,
        "ShardedDataParallel": parts.ShardedDataParallel,
        "checkpoint_wrapper": checkpoint_wrapper,
    },
    "fairscale.nn.data_parallel": {**_DATA_PARALLEL, "ShardedDataParallel": parts.ShardedDataParallel},
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": {
        **_DATA_PARALLEL,
        **_FLATTEN,
        **_BUCKETER,
        **_PARALLEL,
    },
    "fairscale.nn.data_parallel.fsdp_optim_utils": {
        "flatten_optim_state_dict": parts.flatten_optim_state_dict,
        "build_unflat_state_dict": parts.build_unflat_state_dict,
        "check_param_counts_before_sharding": parts.check_param_counts_before_sharding,
        "is_singleton_tensor": parts.is_singleton_tensor,
    },
    "fairscale.nn.data_parallel.sharded_ddp": {"ShardedDataParallel": parts.ShardedDataParallel},
    "fairscale.nn.wrap": _WRAP,
    "fairscale.nn.wrap.auto_wrap": {**_WRAP, "ConfigAutoWrap": ConfigAutoWrap},
    "fairscale.nn.misc": {
        "FlattenParamsWrapper": FlattenParamsWrapper,
        "checkpoint_wrapper": checkpoint_wrapper,
    },
    "fairscale.nn.misc.flatten_params_wrapper": _FLATTEN,
    "fairscale.nn.misc.checkpoint_activations": _CHECKPOINT_FILE,
    "fairscale.nn.checkpoint": _CHECKPOINT,
    "fairscale.nn.checkpoint.checkpoint_activations": _CHECKPOINT_FILE,
    "fairscale.nn.checkpoint.checkpoint_utils": {"patch_batchnorm": patch_batchnorm},
    "fairscale.optim": {"GradScaler": ShardedGradScaler, "OSS": parts.OSS},
    "fairscale.optim.oss": {"OSS": parts.OSS},
    "fairscale.optim.grad_scaler": _SCALERS,
    "fairscale.utils": {},
    "fairscale.utils.testing": _TESTING,
    "fairscale.utils.containers": _CONTAINERS,
    "fairscale.utils.parallel": _PARALLEL,
    "fairscale.utils.reduce_scatter_bucketer": _BUCKETER,
    "fairscale.internal": {},
    "fairscale.internal.containers": _CONTAINERS,
    "fairscale.internal.parallel": _PARALLEL,
    "fairscale.internal.reduce_scatter_bucketer": _BUCKETER,
    "fairscale.fair_dev": {},
    "fairscale.fair_dev.testing": {},
    "fairscale.fair_dev.testing.testing": _TESTING,
}

_PIPELINES = "pipelines are not part of this library; torch.distributed.pipelining has them"
_TENSOR_PARALLEL = "use DTensors (torch.distributed.tensor.parallel) and wrap them, see docs/tensor_parallel.md"
_EXPERTS = "write the layer yourself and give its wrapper a process_group of its own"
_OPTIMIZERS = "torch.optim has optimizers; wrapped by FullyShardedDataParallel, all of them are sharded"
_LEARNING_RATES = "scale the learning rate in your own code; nothing here does so"
_BUCKETS = "these belong to ShardedDataParallel; ReduceScatterBucketer is what FullyShardedDataParallel has"
_TORCH_GROUPS = "make the group with torch.distributed.new_group, once"
_NUMPY = "apply_to_tensors(lambda tensor: tensor.cpu().numpy(), container), or the other way round"

# By a name in the path, a module's or an object's.
INSTEAD = {
    "pipe": _PIPELINES,
    "Pipe": _PIPELINES,
    "PipeRPCWrapper": _PIPELINES,
    "model_parallel": _TENSOR_PARALLEL,
    "moe": _EXPERTS,
    "MOELayer": _EXPERTS,
    "Top2Gate": _EXPERTS,
    "adam": _OPTIMIZERS,
    "Adam": _OPTIMIZERS,
    "Precision": _OPTIMIZERS,
    "adascale": _LEARNING_RATES,
    "AdaScale": _LEARNING_RATES,
    "AdaScaleWrapper": _LEARNING_RATES,
    "layerwise_gradient_scaler": "ShardedGradScaler has one scale for all layers",
    "param_bucket": _BUCKETS,
    "GradBucket": _BUCKETS,
    "ParamBucket": _BUCKETS,
    "Bucket": _BUCKETS,
    "get_process_group_cached": _TORCH_GROUPS,
    "validate_process_group": "FullyShardedDataParallel checks its groups by itself",
    "chunk_and_pad": "torch.chunk, and torch.nn.functional.pad for the last piece",
    "enable_pytorch_sync_bn": "current versions of torch need no such patch",
    "OffloadConfig": 'pass offload="disk" and offload_folder to FullyShardedDataParallel',
    "ssd_offload": 'pass offload="disk" and offload_folder to FullyShardedDataParallel',
    "to_np": _NUMPY,
    "from_np": _NUMPY,
    "experimental": "what FairScale called experimental is not part of this library",
}
