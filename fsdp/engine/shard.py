"""`Shard`: one flat parameter's shard as it leaves the front doors, with all that a handle is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp.distributed.collectives import Communicator
from fsdp.engine.flat_param import FlatParameter, ParamInfo
from fsdp.engine.orig_params import NewOrigParams
from fsdp.engine.unsharded_params import UnshardedParameters


@dataclass(frozen=True)
class Shard:
    """This rank's shard of one flat parameter, whose original parameters have left their modules.

    Attributes:
        flat_param: the shard.
        places: for each original parameter, where it is used, first the place that names it.
        listed_at: the modules, and the names there, that list the flat parameter itself.
        new_orig_params: makes what modules list in its place: local shards of the original parameters.
        post_forward_comm: the ranks that keep it unsharded between forward and backward; see `PostForwardShard`.
        new_unsharded: makes its unsharded parameters, of the arguments of `UnshardedParameters`.
        is_replicated: every rank has all of it.
    """

    flat_param: FlatParameter
    places: Sequence[Sequence[ParamInfo]]
    listed_at: Sequence[tuple[nn.Module, str]] = ()
    new_orig_params: NewOrigParams | None = None
    post_forward_comm: Communicator | None = None
    new_unsharded: Callable[..., UnshardedParameters] = UnshardedParameters
    is_replicated: bool = False
