"""What a wrapper does with the state of optimizers: putting it together, and cutting it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fsdp.distributed.collectives import during
from fsdp.distributed.consensus import done_by_all
from fsdp.engine.optimizer_hooks import state_of
from fsdp.engine.state_requests import FirstRank
from fsdp.engine.unit import Unit
from fsdp.optim_utils.full import ADDED, Given, fairscale_dictionary, given, named_dictionary
from fsdp.optim_utils.load import (
    Plans,
    cut_states,
    deal_states,
    described_by_first,
    dictionary_of,
    groups_as_now,
    groups_as_saved,
    have_types,
    plans_for,
)
from fsdp.optim_utils.params import Listed, OwnState, Parameters, own_state, require_shards
from fsdp.optim_utils.stream import OptimStream
from fsdp.state_dict.full import ensure_agreed
from fsdp.wrapper.state import WrapperState


class WrapperOptim(WrapperState):
    """The part of `FullyShardedDataParallel` that saves and loads the state of optimizers."""

    @during("gather_full_optim_state_dict()")
    def gather_full_optim_state_dict(
        self, optim: Any, recipient_rank: int | None = 0, **ignored: Any
    ) -> dict[str, Any] | None:
        """Collective. An optimizer's whole state, as if nothing were sharded. The optimizer is left alone.

        For the outermost wrapper that all parameters of the optimizer are in. Each tensor is put together by itself,
        straight in the memory of the result; ranks that do not get it need none. FairScale's format:

        - ``state``: by number of the original parameter its state, tensors in the parameter's shape on the host, in
          their own dtype; ``step`` as a plain number, other 0-d tensors as a list with one of each rank. Numbers count
          the parameters wrapper by wrapper in the order of ``modules()``. Those without state are not there.
        - ``param_groups``: as the optimizer's, with the numbers of what is in each.
        - ``param_id_map``: by number of the original parameter, the optimizer's number of what it sees of it; None
          without state.
        - ``uncollected_local_ids``: the optimizer's numbers of what `no_broadcast_optim_state` applies to. The state of
          units of one rank is the recipient's own; that of units over several ranks is left out.
        - all other keys of ``optim.state_dict()``, such as ``loss_scale``.

        With tensor parallelism, the ranks that have the recipient's place in their own data-parallel group get it.

        Args:
            optim: an optimizer, or anything with a ``state_dict()`` like one.
            recipient_rank: the number of the rank that gets the result; None for all of them.
            ignored: taken for FairScale's sake.

        Returns:
            The dictionary; None on ranks that do not get it.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`; if another rank could not take part.
            TypeError: for what has no ``state_dict()`` of an optimizer.
            ValueError: for a rank that there is not; for parameters that are not of the model; for state of neither the
                parameter's shape nor a number; for ranks with different states.
        """
        return fairscale_dictionary(self._optim_stream(optim, recipient_rank))

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a full optimizer state, for ``optim.load_state_dict``. No rank needs another for it.

        From `gather_full_optim_state_dict`, of this world size or another, FairScale's too. The world size, and with
        `no_broadcast_optim_state` the process groups, may have changed, and so may flattening; which modules are
        wrapped may not, unless the state goes by names (`fsdp.optim_utils.rekey_optim_state_dict`).

        The given dictionary is **changed**: it becomes the result, and memory of the whole is given back as it is cut.

        Args:
            full_optim_state_dict: on every rank that calls it.

        Returns:
            The same dictionary. Tensors in it are on the host (on disk, where shards are), in memory of their own.
            Numbers, ``step`` for one, are of the types that they have in the optimizer that has stepped the parameters
            in this session, if one has.

        Raises:
            RuntimeError: inside a forward, backward or `summon_full_params`.
            TypeError: for what is no such dictionary.
            ValueError: for another model's; for state that cannot be cut. Nothing is changed then.
        """
        params = self._optim_parameters("cut an optimizer state")
        full = given(params, full_optim_state_dict)
        plans, groups = plans_for(params, full), groups_as_saved(full)
        states = cut_states(plans, full, is_consumed=True)
        for one, state in states.items():
            have_types(state, state_of(one.param))
        full_optim_state_dict |= dictionary_of(groups, states)
        for key in ADDED:
            full_optim_state_dict.pop(key, None)
        return full_optim_state_dict

    @property
    def no_broadcast_optim_state(self) -> bool:
        """Whether its optimizer state is left out of the gathered one.

        So asked, or found to be a unit of one rank inside of an outermost one that is sharded: then the first rank has
        all of it.
        """
        runtime = self._unit.runtime
        return self._options.no_broadcast_optim_state or (runtime is not None and _is_alone(self._unit, runtime.root))

    @property
    def uncollected_opt_state(self) -> dict[int, Any]:
        """Empty: what FairScale sets aside while it gathers."""
        return {}

    # --- for `fsdp.optim_utils` ---------------------------------------------------------------------------------

    def _optim_parameters(self, what: str) -> Parameters:
        self._require_idle(what)
        require_shards(self._unit, what)
        asked = {
            one._unit
            for one in self.modules()
            if isinstance(one, WrapperOptim)
            and (one._options.no_broadcast_optim_state or _is_alone(one._unit, self._unit))
        }
        return Parameters(self, self._unit, asked.__contains__)

    def _optim_stream(self, optim: Any, recipient: int | None) -> OptimStream:
        what = "gather an optimizer state"
        self._require_idle(what)
        ensure_agreed(self._unit)
        ranks = self._unit.everyone
        size = ranks[0].world_size * ranks[1].world_size
        if recipient is not None and not 0 <= recipient < size:
            raise ValueError(f"recipient_rank must be None or one of the {size} ranks, got {recipient}")

        def job() -> tuple[Parameters, OwnState]:
            params = self._optim_parameters(what)
            return params, own_state(params, optim)

        params, own = done_by_all([ranks], "gather its optimizer state", job)
        return OptimStream(params, own, recipient)

    def _named_optim_state(self, optim: Any, recipient: int | None) -> dict[str, Any] | None:
        return named_dictionary(self._optim_stream(optim, recipient))

    def _optim_shard(self, full: Mapping[str, Any], optim: Any) -> dict[str, Any]:
        """As `get_shard_from_optim_state_dict`, for this optimizer, and leaving `full` alone."""
        params = self._optim_parameters("cut an optimizer state")
        read = given(params, full)
        plans, groups = plans_for(params, read), groups_as_now(params, read, optim)
        states = cut_states(plans, read)
        for one, state in states.items():
            have_types(state, _live(optim, one))
        return {**read.beside, **dictionary_of(groups, states)}

    def _load_full_optim_state(self, optim: Any, full: Any, rank0_only: bool) -> None:
        self._require_idle("load an optimizer state")
        ensure_agreed(self._unit)
        ranks = self._unit.everyone
        if rank0_only:
            params = done_by_all([ranks], _LOAD, lambda: self._optim_parameters("load an optimizer state"))
            shard = self._from_first(params, optim, full, FirstRank(ranks))
        else:
            shard = done_by_all([ranks], _LOAD, lambda: self._optim_shard(full, optim))
        optim.load_state_dict(shard)

    def _from_first(self, params: Parameters, optim: Any, full: Any, source: FirstRank) -> dict[str, Any]:
        def read() -> tuple[Plans, Given]:
            found = given(params, full)
            return plans_for(params, found), found

        plans, found = described_by_first(params, source, read)
        groups = done_by_all([source.ranks], _LOAD, lambda: groups_as_now(params, found, optim))
        states = deal_states(params, plans, found, source, lambda one, key: _live(optim, one).get(key))
        for one, state in states.items():
            have_types(state, _live(optim, one))
        return {**found.beside, **dictionary_of(groups, states)}


_LOAD = "load its optimizer state"


def _live(optim: Any, one: Listed) -> Mapping[str, Any]:
    """What an optimizer has of a parameter now."""
    return optim.state.get(one.param, {}) if isinstance(optim, torch.optim.Optimizer) else {}


def _is_alone(unit: Unit, root: Unit) -> bool:
    """Whether the first rank has all of a unit, though the outermost one is sharded."""
    return unit.comm.world_size == 1 < root.comm.world_size and unit is not root
