"""Functions that gather, shard and rekey the optimizer state of a wrapped model.

A *full* optimizer state is the state of an optimizer of the unsharded model: ``state`` by parameter and
``param_groups``, with tensors in the parameters' shapes. Keys are the parameters' names in the module before wrapping,
or FairScale's numbers (`FullyShardedDataParallel.gather_full_optim_state_dict`). These functions do not change their
input dictionaries.
"""

from typing import TYPE_CHECKING

from fsdp.layers.lazy import lazily

if TYPE_CHECKING:
    from fsdp.optim_utils.full import rekey_optim_state_dict as rekey_optim_state_dict
    from fsdp.optim_utils.gather import full_optim_state_dict as full_optim_state_dict
    from fsdp.optim_utils.gather import stream_optim_state as stream_optim_state
    from fsdp.optim_utils.owned import OwnedOptimizer as OwnedOptimizer
    from fsdp.optim_utils.scatter import load_full_optim_state_dict as load_full_optim_state_dict
    from fsdp.optim_utils.scatter import shard_full_optim_state_dict as shard_full_optim_state_dict

_HOMES = {
    "fsdp.optim_utils.full": "rekey_optim_state_dict",
    "fsdp.optim_utils.gather": "full_optim_state_dict stream_optim_state",
    "fsdp.optim_utils.owned": "OwnedOptimizer",
    "fsdp.optim_utils.scatter": "load_full_optim_state_dict shard_full_optim_state_dict",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
