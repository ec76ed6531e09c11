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
    places: Sequence[Sequence[ParamInfo]]  # where each original parameter is used, first the place that names it
    listed_at: Sequence[tuple[nn.Module, str]] = ()  # the modules, and names there, that list the flat parameter itself
    new_listed: Callable[..., ListedParameters] = ListedParameters  # makes what modules and optimizers list
    is_kept: bool = True  # a few ranks may keep gathered parameters, see `KeptShard`
    new_unsharded: Callable[..., UnshardedParameters] = UnshardedParameters  # makes its unsharded parameters
    is_replicated: bool = False  # every rank has all of it
