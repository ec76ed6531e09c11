"""What FairScale keeps to itself and its clients call or override all the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from fsdp.wrapper.fsdp1 import METHODS, Instead
from fsdp.wrapper.state import WrapperState

# Said in place of the error of the wrapped module, which knows nothing of FairScale.
INSTEAD = {
    "_rebuild_full_params": "use summon_full_params(), or run the module, which gathers by itself",
    "_use_full_params": "use summon_full_params()",
    "_use_fp32_param_shard": "shards are what params hold between steps",
    "_cast_fp32_param_shards_to_fp16": "this is part of each gather",
    "_free_fp16_param_shard": "this is part of each gather",
    "_prep_grads_for_backward": "gradients of several backwards are added without it",
    "_post_backward_hook": "to change gradients on their way to the reduction, use register_comm_hook()",
    "_post_reduction_hook": "hook params with register_post_accumulate_grad_hook, or use register_comm_hook()",
    "_wait_for_post_backward": "when backward() returns, gradients are reduced",
    "_queue_wait_for_post_backward": "when backward() returns, gradients are reduced",
    "_wait_for_previous_optim_step": "gathers wait for the optimizer by themselves",
    "_set_is_root": "the first use of the outermost wrapper settles it; _lazy_init() does so at once",
    "_setup_streams": "there are none to be set up",
    "_streams": "there are none of its own",
    "_reducer": "bucket_cap_mb says how gradients are collected",
    "_shard_parameters_": "parameters are cut when they are wrapped",
    "_get_shard": "fsdp.optim_utils and load_state_dict() cut whole values",
    "_gather_optim_state": "use gather_full_optim_state_dict()",
    "_cast_buffers": "the precision's buffers are cast by themselves, see buffer_dtype",
    "_no_return_full_state_dict": "local_state_dict() does not recurse into state_dict()",
    "_load_state_dict": "use load_state_dict(), or load_local_state_dict()",
    "_num_flatten_params": "len(wrapper.params)",
    "_param_name_groups": "wrapper.module.metadata(i) has the names",
}


class WrapperPrivate(WrapperState):
    """The part of `FullyShardedDataParallel` that goes by names with an underscore in FairScale."""

    def _lazy_init(self) -> None:
        """Collective. Settle now that this wrapper is the outermost one, which its first use would do."""
        self._unit.ensure_runtime()

    def _free_full_params(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Give back the memory of whole parameters, such as those kept under `no_sync` without resharding.

        Args:
            params: of `params`, those whose memory is meant; None for all.

        Raises:
            RuntimeError: inside a forward or backward, which needs them.
        """
        self._require_idle("free full parameters")
        wanted = None if params is None else {id(param) for param in params}
        for handle in self._unit.handles:
            if wanted is None or not wanted.isdisjoint(map(id, handle.registry.params)):
                handle.reshard()

    def _register_post_backward_hooks(self) -> None:
        """To be overridden: called before each forward of the module. Our hooks are elsewhere, so this does nothing."""

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        """To be overridden: called with what each forward of the module has returned, to return what is to be returned.

        Our hooks are elsewhere, so this changes nothing. Where it returns None, the outputs stay as they are.
        """
        return outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in METHODS:
                return Instead(name).__get__(self, type(self))
            if name not in INSTEAD:
                raise
        raise AttributeError(f"{type(self).__name__} has no {name}, which FairScale's has: {INSTEAD[name]}")
