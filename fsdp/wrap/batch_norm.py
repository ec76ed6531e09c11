"""Batch norms as units of their own, in full precision."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp.distributed.communicator import Group
from fsdp.engine.precision import BATCH_NORMS
from fsdp.engine.sharding_strategy import LoneGroup
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.wrap import ConfigAutoWrap, enable_wrap, module_wrap_policy


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Group | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Make each batch norm in `module` a unit that computes in full precision, whatever the unit around it does.

    For models that are wrapped with FairScale's ``mixed_precision=True``, before the rest is wrapped. A unit of mixed
    precision keeps batch norms that lie in it in full precision by itself (`MixedPrecision.full_precision_modules`), so
    this is needed only where batch norms must have a unit, a group or options of their own.

    Args:
        module: the model; it is changed in place.
        single_rank_pg: don't shard batch norms, and don't average their gradients either: each rank trains its own, as
            in FairScale. Right for batch norms whose weights are frozen.
        process_group: over which they are sharded; None means all ranks.
        fsdp_config: arguments for the wrappers instead of the default ones, which are: full precision, not
            flattened, not freed after forward, no buckets. Give ``force_input_to_fp32=True`` for `nn.SyncBatchNorm` on
            16-bit inputs.
        wrap_it: False only notes the arguments on the batch norms (as ``wrapper_config``), for a later `auto_wrap` with
            `config_auto_wrap_policy`.
        assert_on_collision: with ``wrap_it=False``, refuse batch norms that have such a note already; otherwise it is
            replaced.

    Returns:
        The module, or the wrapper around it if it is a batch norm itself.

    Raises:
        ValueError: for a batch norm that has a ``wrapper_config`` already.
    """
    config = fsdp_config
    if config is None:
        config = {
            "process_group": LoneGroup() if single_rank_pg else process_group,
            "mixed_precision": False,
            "flatten_parameters": False,
            "reshard_after_forward": False,
            "bucket_cap_mb": 0,
            "force_input_to_fp32": False,
        }
    if wrap_it:
        with enable_wrap(module_wrap_policy(BATCH_NORMS), wrapper_cls=FullyShardedDataParallel, **config):
            return ConfigAutoWrap.recursive_wrap(module, None)[0]  # without a warning where there is none
    norms = [(name, child) for name, child in module.named_modules() if isinstance(child, BATCH_NORMS)]
    for name, child in norms:
        if assert_on_collision and hasattr(child, "wrapper_config"):
            raise ValueError(
                f"{name or type(child).__name__} has a wrapper_config already. Pass assert_on_collision=False to "
                "replace it."
            )
    for _, child in norms:
        child.wrapper_config = config  # type: ignore[assignment]
    return module
