"""What is being done with the state of a unit, while it is being done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp.engine.state_requests import LoadPass, Saving, Summoning


@dataclass
class StateAccess:
    """One unit's; as it is made, nothing is being done."""

    saving: Saving | None = None  # how a state dict of it, or of a unit around it, is being taken
    is_exporting: bool = False  # its own is being taken, not that of a unit around it
    is_local: bool = False  # state dicts are of its shards
    shows_parts: bool = False  # its modules list this rank's parts of parameters, for a sharded state dict
    loading: LoadPass | None = None  # how a state dict is being loaded into it, or into a unit around it
    close_loading: Callable[[], None] | None = None  # shards what is exposed for that
    summoned: Summoning | None = None  # in which form its parameters are summoned
    is_filling: bool = False  # its modules give their parameters first values
    is_converting: bool = False  # its module is being cast or moved
