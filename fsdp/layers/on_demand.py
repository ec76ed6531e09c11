"""The layers used by methods of the front doors. Each layer is imported at the first use of one of its names.

So `import fsdp` only loads the engine and the front doors; for example, a program that saves no checkpoint never loads
the corresponding code. A front door uses layers only through the names of this module, such as ``layers.save_full``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fsdp.layers.lazy import lazily

# ruff: noqa: F401 (names for front doors)
if TYPE_CHECKING:
    from fsdp.checkpoint.formats.consolidate import consolidate
    from fsdp.distributed.comm_hooks import AllReduceHook, CommHook
    from fsdp.distributed.custom_collectives import Collective, CustomAllGather, CustomReduceScatter, moved
    from fsdp.layers import copying
    from fsdp.layers.deferred_init import require_values, require_values_everywhere
    from fsdp.layers.foreign_names import refuse_local_sgd
    from fsdp.layers.forwarding import forward_entries
    from fsdp.layers.grad_clipping import clip_by_norm, clip_by_value
    from fsdp.layers.packed_params import pack_loaded
    from fsdp.layers.pipelines import FSDPState, finalize_backward, refuse_separate_backwards
    from fsdp.layers.report import Report, last_report
    from fsdp.layers.sharded_methods import explain_methods
    from fsdp.layers.state_dict.full import (
        ensure_agreed,
        ensure_same_values,
        explain,
        load_full,
        save_full,
        with_wrapped_metadata,
    )
    from fsdp.layers.state_dict.loading import Loading
    from fsdp.layers.state_dict.local import LocalLoad, local, local_metadata, local_state
    from fsdp.layers.state_dict.materialize import ParamInit, materialize_unit
    from fsdp.layers.state_dict.sharded import TensorPart, _rebuild, load_sharded_state, sharded_state
    from fsdp.layers.state_dict.summon import params_shown, shapes_summoned, summoned
    from fsdp.layers.summary import options_in_use, summary
    from fsdp.optim_utils.gather import fairscale_dictionary
    from fsdp.optim_utils.params import is_uncollected
    from fsdp.optim_utils.scatter import become_shard, reshard_optimizer
    from fsdp.weights.stream import stream_weights

_HOMES = {
    "fsdp.checkpoint.formats.consolidate": "consolidate",
    "fsdp.distributed.comm_hooks": "AllReduceHook CommHook",
    "fsdp.distributed.custom_collectives": "Collective CustomAllGather CustomReduceScatter moved",
    "fsdp.layers.copying": "",
    "fsdp.layers.deferred_init": "require_values require_values_everywhere",
    "fsdp.layers.foreign_names": "refuse_local_sgd",
    "fsdp.layers.forwarding": "forward_entries",
    "fsdp.layers.grad_clipping": "clip_by_norm clip_by_value",
    "fsdp.layers.packed_params": "pack_loaded",
    "fsdp.layers.pipelines": "FSDPState finalize_backward refuse_separate_backwards",
    "fsdp.layers.report": "Report last_report",
    "fsdp.layers.sharded_methods": "explain_methods",
    "fsdp.layers.state_dict.full": "ensure_agreed ensure_same_values explain load_full save_full with_wrapped_metadata",
    "fsdp.layers.state_dict.loading": "Loading",
    "fsdp.layers.state_dict.local": "LocalLoad local local_metadata local_state",
    "fsdp.layers.state_dict.materialize": "ParamInit materialize_unit",
    "fsdp.layers.state_dict.sharded": "TensorPart _rebuild load_sharded_state sharded_state",
    "fsdp.layers.state_dict.summon": "params_shown shapes_summoned summoned",
    "fsdp.layers.summary": "options_in_use summary",
    "fsdp.optim_utils.gather": "fairscale_dictionary",
    "fsdp.optim_utils.params": "is_uncollected",
    "fsdp.optim_utils.scatter": "become_shard reshard_optimizer",
    "fsdp.weights.stream": "stream_weights",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)


def _rebuild_part(*facts: Any) -> Any:
    """Return a tensor of a sharded state dict, for `torch.load` with its default, ``weights_only=True``."""
    return __getattr__("_rebuild")(*facts)


# Registered under the name in files; otherwise `torch.load` would raise an error until the layer is loaded.
torch.serialization.add_safe_globals([(_rebuild_part, "fsdp.layers.state_dict.sharded._rebuild")])
