"""Sharded state dicts of a wrapper: its part of everything, to be saved and loaded without gathering."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp.distributed.collectives import during
from fsdp.engine.forward_hooks import TrainingState
from fsdp.state_dict.full import with_wrapped_metadata
from fsdp.state_dict.load_targets import TensorPart
from fsdp.state_dict.sharded import load_sharded_state, sharded_state
from fsdp.wrapper.state import WrapperState


class WrapperSharded(WrapperState):
    """The part of `FullyShardedDataParallel` that `torch.distributed.checkpoint` (DCP) needs."""

    @during("sharded_state_dict()")
    def sharded_state_dict(self, *, prefix: str = "") -> Any:
        """Collective the first time. The state with this rank's parts in the place of whole parameters, for DCP.

        Keys, and their order, are those of `state_dict`, so that unsharded models, and others of any world size or
        kind of sharding, read the checkpoint. Nothing is gathered, and parameters are not copied: save them before
        they change, or stage them (``dcp.async_save``). ``dcp.load`` into the result writes to memory of its own, as
        large as the shards; `load_sharded_state_dict` takes it over. The same for FSDP1's ``SHARDED_STATE_DICT``.

        Parameters are `TensorPart`s: tensors of the whole shape, in the dtype that the optimizer steps and where the
        shards are, that hold ``local``, elements ``part.start:part.stop`` in row-major order. Tied parameters are
        there under each of their names. Buffers and ignored parameters are whole copies.

        What has no values yet (meta device), and values that ranks were wrapped with differently, can be loaded into;
        saving them raises an error.

        Args:
            prefix: of all keys.

        Raises:
            RuntimeError: inside a forward or backward, or inside `summon_full_params`.
        """
        self._require_shards("take a sharded state dict")
        return sharded_state(self._unit, self._units(), lambda: self.state_dict(prefix=prefix))

    @during("load_sharded_state_dict()")
    def load_sharded_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Collective. Load what `sharded_state_dict` returned, when DCP has loaded values into it.

        Values of another dtype are cast as `Tensor.copy_` does. Whole, plain tensors are taken as well, each rank
        keeping its part. If a rank cannot load its part, all raise an error, and none of their parameters and buffers
        has changed (what ``set_extra_state`` and hooks do is not undone).

        Args:
            state_dict: with plain names, and parts of the same parameters that this rank keeps.
            strict: raise for missing and unexpected keys. What has no values, because nothing was loaded into it,
                counts as missing.

        Returns:
            torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

        Raises:
            RuntimeError: inside a forward or backward, or inside `summon_full_params`; for keys and shapes that do not
                fit, parts that another world size has, and other kinds of tensors, naming rank and key; if another
                rank could not load its part, or loads other keys.
        """
        self._require_shards("load a sharded state dict")
        given = with_wrapped_metadata(state_dict, self)
        for key, value in state_dict.items():
            if isinstance(value, TensorPart) and value.is_blank:
                del given[key]
        return load_sharded_state(
            self._unit, self._units(), lambda: nn.Module.load_state_dict(self, given, strict=strict)
        )

    def _require_shards(self, what: str) -> None:
        self._require_idle(what)
        inside = TrainingState.SUMMON_FULL_PARAMS
        summoned = [unit.name for unit in self._units() if unit.state is inside or unit.access.summoned is not None]
        if summoned:
            raise RuntimeError(f"cannot {what}: {summoned[0]} is inside summon_full_params(). Leave it first.")
