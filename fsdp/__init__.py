"""Sharded data parallel training for PyTorch."""

from fsdp._comm import use_torch_collectives as use_torch_collectives
from fsdp._flat_param import FlatParameter as FlatParameter
from fsdp._unit import TrainingState as TrainingState
from fsdp._version import __version__ as __version__
from fsdp.flatten_params_wrapper import FlattenParamsWrapper as FlattenParamsWrapper
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FullyShardedDataParallel
from fsdp.fully_sharded_data_parallel import ProcessGroupName as ProcessGroupName
from fsdp.fully_sharded_data_parallel import get_fsdp_instances as get_fsdp_instances
from fsdp.wrap import ConfigAutoWrap as ConfigAutoWrap
from fsdp.wrap import auto_wrap as auto_wrap
from fsdp.wrap import config_auto_wrap_policy as config_auto_wrap_policy
from fsdp.wrap import default_auto_wrap_policy as default_auto_wrap_policy
from fsdp.wrap import enable_wrap as enable_wrap
from fsdp.wrap import lambda_wrap_policy as lambda_wrap_policy
from fsdp.wrap import module_wrap_policy as module_wrap_policy
from fsdp.wrap import wrap as wrap
