"""`Shard`: a flat parameter's shard as the interfaces create it, with all data for its handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp.engine.flat_param import FlatParameter, ListedParameters, ParamInfo
from fsdp.engine.unsharded_params import UnshardedParameters


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a flat parameter, whose original parameters were removed from their modules."""

    flat_param: FlatParameter
    places: Sequence[Sequence[ParamInfo]]  # of each original parameter; the first place names the parameter
    listed_at: Sequence[tuple[nn.Module, str]] = ()  # modules and names that list the flat parameter
    new_listed: Callable[..., ListedParameters] = ListedParameters  # creates the listed parameters
    is_kept: bool = True  # a few ranks may keep gathered parameters, see `KeptShard`
    new_unsharded: Callable[..., UnshardedParameters] = UnshardedParameters  # creates the unsharded parameters
    is_replicated: bool = False  # every rank stores the whole flat parameter
