"""Wrapping of batch norms as separate units in full precision."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp.distributed.communicator import Group
from fsdp.engine.precision import BATCH_NORMS
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.layers.sharding_strategy import LoneGroup
from fsdp.wrap import ConfigAutoWrap, enable_wrap, module_wrap_policy

_DEFAULTS = {
    "process_group": None,
    "mixed_precision": False,
    "flatten_parameters": False,
    "reshard_after_forward": False,
    "bucket_cap_mb": 0,
    "force_input_to_fp32": False,
}


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Group | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Make each batch norm in `module` a unit that computes in full precision, regardless of the enclosing unit.

    Use this function for models with FairScale's ``mixed_precision=True``, before wrapping other modules. A unit with
    mixed precision keeps its batch norms in full precision automatically (`MixedPrecision.full_precision_modules`), so
    this function is required only if batch norms need separate units, groups or options.

    Args:
        module: the model; it is changed in place.
        single_rank_pg: If True, batch norms are not sharded and their gradients are not averaged: each rank trains its
            own, as in FairScale. This is suitable for batch norms with frozen weights.
        process_group: the group for sharding; None means all ranks.
        fsdp_config: arguments for the wrappers that replace the defaults: full precision, not flattened, not resharded
            after forward, no buckets; `single_rank_pg` and `process_group` still apply. Pass
            ``force_input_to_fp32=True`` for `nn.SyncBatchNorm` on 16-bit inputs.
        wrap_it: If False, only set the arguments on the batch norms (as ``wrapper_config``), for a later `auto_wrap`
            with `config_auto_wrap_policy`.
        assert_on_collision: with ``wrap_it=False``, raise an error for batch norms that already have a
            ``wrapper_config``. If False, the attribute is replaced.

    Returns:
        The module, or the wrapper around it if it is a batch norm itself.

    Raises:
        ValueError: if a batch norm already has a ``wrapper_config`` (see `assert_on_collision`), or if `fsdp_config`
            contains another process group than these arguments select.
    """
    group = LoneGroup() if single_rank_pg else process_group
    config: dict[str, Any] = dict(_DEFAULTS if fsdp_config is None else fsdp_config)
    if group is not None:
        if config.get("process_group") not in (None, group):
            raise ValueError(
                "auto_wrap_bn: fsdp_config contains another process_group than the arguments single_rank_pg and "
                "process_group select. Pass only one of them."
            )
        config["process_group"] = group
    if wrap_it:
        with enable_wrap(module_wrap_policy(BATCH_NORMS), wrapper_cls=FullyShardedDataParallel, **config):
            return ConfigAutoWrap.recursive_wrap(module, None)[0]  # no warning for models without batch norms
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
