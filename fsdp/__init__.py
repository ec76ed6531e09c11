"""Sharded data parallel training for PyTorch: `FullyShardedDataParallel`, `fully_shard`, and related functions."""

__version__ = "0.1.0"

from typing import TYPE_CHECKING

from fsdp.distributed.collectives import use_torch_collectives
from fsdp.distributed.communicator import CollectiveError, OtherRankError
from fsdp.distributed.messages import check_messages
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.placements import Placed, Placement, Placements, ShardingStrategy
from fsdp.engine.precision import MixedPrecision
from fsdp.engine.unit import TrainingState
from fsdp.fully_shard import (
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    fully_shard,
    share_comm_ctx,
)
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, get_fsdp_instances
from fsdp.layers.flatten_params_wrapper import FlattenParamsWrapper
from fsdp.layers.lazy import lazily
from fsdp.layers.module_overrides import register_fsdp_forward_method
from fsdp.layers.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp.layers.sharding_strategy import ProcessGroupName
from fsdp.wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    lambda_wrap_policy,
    module_wrap_policy,
    wrap,
)

if TYPE_CHECKING:
    from fsdp import checkpoint, optim_utils, state_dict_utils, weights
    from fsdp.checkpoint.loader import load, load_safetensors
    from fsdp.checkpoint.parking import park, parked, unpark
    from fsdp.checkpoint.writer import save
    from fsdp.distributed.comm_hooks import bf16_compress_hook
    from fsdp.distributed.start import init_distributed
    from fsdp.distributed.watchdog import set_watchdog
    from fsdp.engine.shard_metadata import FlatParamShardMetadata
    from fsdp.layers.compression import Compression, QuantizedGather, QuantizedReduce, compress
    from fsdp.layers.full_precision import full_precision
    from fsdp.layers.grad_clipping import reduce_gradients
    from fsdp.layers.nonfinite import detect_nonfinite
    from fsdp.layers.recovery import recover
    from fsdp.layers.resident import resident
    from fsdp.layers.same_bits import SameBits
    from fsdp.layers.standalone_handle import StandaloneHandle, flat_param_handles
    from fsdp.layers.state_dict.loading import no_pre_load_state_dict_hook
    from fsdp.layers.state_dict.materialize import materialize
    from fsdp.layers.trace import trace
    from fsdp.optim_utils.ema import EMA
    from fsdp.optim_utils.fingerprint import fingerprint
    from fsdp.optim_utils.grad_scaler import ShardedGradScaler
    from fsdp.optim_utils.outer import OuterOptimizer
    from fsdp.optim_utils.owned import OwnedOptimizer
    from fsdp.optim_utils.recording import record_fingerprints
    from fsdp.state_dict_utils.stager import StateDictStager
    from fsdp.uneven.join import join
    from fsdp.uneven.regions import cond
    from fsdp.weights.loading import load_stream
    from fsdp.weights.serving import serve_weights
    from fsdp.weights.stream import stream_weights
    from fsdp.wrap.batch_norm import auto_wrap_bn
    from fsdp.wrap.checkpoint_wrapper import (
        checkpoint_wrapper,
        disable_checkpointing,
        is_checkpointing,
        is_recomputing,
        patch_batchnorm,
    )
    from fsdp.wrap.plan import Plan, PlannedPhase, PlannedUnit, plan
    from fsdp.wrap.plan_wrapping import PlannedWrapping, plan_wrapping
    from fsdp.wrap.shard import shard

# Public names whose modules are imported at their first use.
_LAYERS = {
    "fsdp.checkpoint": "",
    "fsdp.optim_utils": "",
    "fsdp.state_dict_utils": "",
    "fsdp.weights": "",
    "fsdp.checkpoint.loader": "load load_safetensors",
    "fsdp.checkpoint.parking": "park parked unpark",
    "fsdp.checkpoint.writer": "save",
    "fsdp.distributed.comm_hooks": "bf16_compress_hook",
    "fsdp.distributed.start": "init_distributed",
    "fsdp.distributed.watchdog": "set_watchdog",
    "fsdp.layers.compression": "Compression QuantizedGather QuantizedReduce compress",
    "fsdp.layers.full_precision": "full_precision",
    "fsdp.layers.grad_clipping": "reduce_gradients",
    "fsdp.layers.nonfinite": "detect_nonfinite",
    "fsdp.layers.recovery": "recover",
    "fsdp.layers.resident": "resident",
    "fsdp.layers.same_bits": "SameBits",
    "fsdp.engine.shard_metadata": "FlatParamShardMetadata",
    "fsdp.layers.standalone_handle": "StandaloneHandle flat_param_handles",
    "fsdp.layers.state_dict.loading": "no_pre_load_state_dict_hook",
    "fsdp.layers.state_dict.materialize": "materialize",
    "fsdp.layers.trace": "trace",
    "fsdp.optim_utils.ema": "EMA",
    "fsdp.optim_utils.fingerprint": "fingerprint",
    "fsdp.optim_utils.grad_scaler": "ShardedGradScaler",
    "fsdp.optim_utils.outer": "OuterOptimizer",
    "fsdp.optim_utils.owned": "OwnedOptimizer",
    "fsdp.optim_utils.recording": "record_fingerprints",
    "fsdp.state_dict_utils.stager": "StateDictStager",
    "fsdp.uneven.join": "join",
    "fsdp.uneven.regions": "cond",
    "fsdp.weights.loading": "load_stream",
    "fsdp.weights.serving": "serve_weights",
    "fsdp.weights.stream": "stream_weights",
    "fsdp.wrap.batch_norm": "auto_wrap_bn",
    "fsdp.wrap.checkpoint_wrapper": "checkpoint_wrapper disable_checkpointing is_checkpointing is_recomputing "
    "patch_batchnorm",
    "fsdp.wrap.plan": "Plan PlannedPhase PlannedUnit plan",
    "fsdp.wrap.plan_wrapping": "PlannedWrapping plan_wrapping",
    "fsdp.wrap.shard": "shard",
}
__getattr__, __dir__ = lazily(__name__, _LAYERS)

__all__ = [
    "CPUOffloadPolicy",
    "CollectiveError",
    "Compression",
    "ConfigAutoWrap",
    "DataParallelMeshDims",
    "EMA",
    "FSDPModule",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OtherRankError",
    "OuterOptimizer",
    "OwnedOptimizer",
    "Placed",
    "Placement",
    "Placements",
    "Plan",
    "PlannedPhase",
    "PlannedUnit",
    "PlannedWrapping",
    "ProcessGroupName",
    "QuantizedGather",
    "QuantizedReduce",
    "SameBits",
    "ShardedGradScaler",
    "ShardingStrategy",
    "StandaloneHandle",
    "StateDictStager",
    "TrainingState",
    "UnshardHandle",
    "auto_wrap",
    "auto_wrap_bn",
    "bf16_compress_hook",
    "check_messages",
    "checkpoint",
    "checkpoint_wrapper",
    "compress",
    "cond",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "detect_nonfinite",
    "disable_checkpointing",
    "enable_wrap",
    "fingerprint",
    "flat_param_handles",
    "full_precision",
    "fully_shard",
    "get_fsdp_instances",
    "init_distributed",
    "is_checkpointing",
    "is_recomputing",
    "join",
    "lambda_wrap_policy",
    "load",
    "load_safetensors",
    "load_stream",
    "materialize",
    "module_wrap_policy",
    "no_pre_load_state_dict_hook",
    "optim_utils",
    "park",
    "parked",
    "patch_batchnorm",
    "plan",
    "plan_wrapping",
    "record_fingerprints",
    "recover",
    "reduce_gradients",
    "register_fsdp_forward_method",
    "resident",
    "save",
    "serve_weights",
    "set_watchdog",
    "shard",
    "share_comm_ctx",
    "state_dict_utils",
    "stream_weights",
    "trace",
    "unpark",
    "use_torch_collectives",
    "weights",
    "wrap",
]
