"""What a wrapper does with this rank's shards: saving them as they are, loading them, putting all ranks' together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp.checkpoint.formats.consolidate import consolidate
from fsdp.engine.deferred_init import require_values
from fsdp.engine.names import clean_name
from fsdp.engine.sharding_strategy import ranks_of
from fsdp.state_dict.local import LocalLoad, Member, local, local_metadata, local_state
from fsdp.wrapper.state import WrapperState


class WrapperLocal(WrapperState):
    """The part of `FullyShardedDataParallel` that saves and loads without other ranks."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        # Reached for inner wrappers while the outermost one's local state is taken, perhaps through a subclass.
        return (
            self.local_state_dict(*args, **kwargs)
            if self._unit.access.is_local
            else super().state_dict(*args, **kwargs)
        )

    state_dict.__doc__ = WrapperState.state_dict.__doc__

    def local_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """This rank's shards, and buffers, under the names of FairScale's. No rank needs another for it.

        A flat parameter is under the plain path of its wrapper, as ``path.flat_param_0`` (``flat_param_0`` of the
        outermost), a vector ``[shard]`` in the dtype that the optimizer steps, on the device where it is kept; with
        ``flatten_parameters=False`` a parameter's shard, and with ``use_orig_params=True`` its piece, is under the
        parameter's own name. Ignored parameters are whole, buffers in the dtype from before wrapping. The tensors are
        the model's own, detached, as those of `nn.Module.state_dict` are: save or copy them before the next step.

        Args:
            destination, prefix, keep_vars: as for `nn.Module.state_dict`.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`, or while there are parameters without
                values.
        """
        if not self._unit.access.is_local:
            self._require_idle("take a local state dict")
            require_values(self._unit.module, "take a local state dict")
        with local(self._unit, "take a local state dict"):
            return local_state(self._unit, destination, prefix, keep_vars)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what `local_state_dict` gave on the same rank of as many ranks. No rank needs another for it.

        Call it on every rank before the model is used again. It is checked as a whole before anything is changed: after
        an error this rank has what it had before (only modules with a ``_load_from_state_dict`` or load hooks of their
        own may have taken what is theirs). Other ranks are not asked: if one of them raises, none should go on.

        Args:
            state_dict: as `local_state_dict` gives it, FairScale's too; names with wrappers' path parts are taken.
            strict: missing and unexpected keys are an error.

        Returns:
            torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`; or for keys and sizes that do not fit, or
                shards that say that they are another rank's, with the unit, the rank, and both sizes.
        """
        self._require_idle("load a local state dict")
        with local(self._unit, "load a local state dict"):
            return LocalLoad(self, self._members(), state_dict, strict).run()

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` needs to know of this rank's shards. No rank needs another for it.

        FairScale's format: ``param_metadata`` has an entry for each wrapper (``fsdp_path``, ``params``,
        ``no_broadcast_optim_state``, ``shared_param_info``), and ``params`` for each key of `local_state_dict` the
        ``names``, ``shapes``, ``numels`` and ``padding`` of what is in it, in this order. ``buffer_names`` has
        everything else that modules save, each rank's being as good as another's: buffers, ignored parameters, extra
        state. Padding differs, so all ranks' are needed.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`.
            NotImplementedError: for parameters that are `DTensor`s.
        """
        self._require_idle("take local metadata")
        with local(self._unit, "take local metadata"):
            return local_metadata(self, self._members())

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Any]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Whole weights under plain names from all ranks' shards, FairScale's too. Offline: no process group is needed.

        Tensors are new, on the device of the first rank's, and made one parameter at a time: beyond what is given and
        the result, nothing is held. Tied parameters are one tensor under all their names. Nothing given is changed.

        Args:
            shard_weights: each rank's `local_state_dict`, in rank order; with hybrid sharding of all ranks or of the
                first replica.
            shard_metadata: the same ranks' `local_metadata_dict`.
            with_module_buffers: whether to add the first rank's buffers, and whatever else is not sharded.
            strict: False leaves out parameters and buffers that the first rank's weights lack, and keys that no
                metadata name.

        Returns:
            What `state_dict` would give on the first rank: of a unit with fewer ranks than the outermost, those values
            that the first rank's group has.

        Raises:
            ValueError: for lists that are empty or not of one length; for missing, cut, reordered or superfluous
                shards, and those of different models: with the rank and the key.
        """
        return consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    def _members(self) -> list[Member]:
        """The wrappers in this one, itself first."""
        inner = [(clean_name(path), one) for path, one in self.named_modules() if isinstance(one, WrapperLocal)]
        first = min(self._unit.ranks, default=None)
        found = []
        for path, one in inner:
            ranks = ranks_of(one.process_group)
            is_counted = first is None or not ranks or first in ranks
            is_alone = one.world_size == 1 < self.world_size
            found.append(Member(path, one._unit, one.flatten_parameters, is_counted, is_alone))
        return found
