"""What there is to know of a handle, for all of its parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import Communicator
from fsdp.distributed.comm_hook import CommHook
from fsdp.engine.fingerprints import Fingerprints
from fsdp.engine.flat_param import FlatParameter, ParamInfo
from fsdp.engine.grad_buffer import GradientBuffer
from fsdp.engine.layout import ContiguousLayout, Interval, Layout
from fsdp.engine.managed_params import text_of_key
from fsdp.engine.offload import ShardStorage
from fsdp.engine.orig_params import Pieces
from fsdp.engine.post_forward_shard import PostForwardShard
from fsdp.engine.precision import Precision
from fsdp.engine.registration import Registry
from fsdp.engine.unsharded_params import UnshardedParameters


class Phase(Enum):
    """Each member says what is true of a handle's unsharded buffer."""

    SHARDED = auto()  # it has no memory; modules see placeholders
    UNSHARDING = auto()  # allocated, the all-gather is in flight; nobody may read it
    UNSHARDED = auto()  # complete and valid; modules see the leaves


class HandleState:
    """The attributes of a `FlatParamHandle`, and what follows from them."""

    flat_param: FlatParameter
    storage: ShardStorage
    layout: Layout
    comm: Communicator
    reduce_comm: Communicator
    replicas: Communicator  # the ranks that hold the same shard; the lone rank if there are no others
    places: list[list[ParamInfo]]  # for each parameter, where it is used, first the place that names it
    registry: Registry
    pieces: Pieces | None  # with `use_orig_params`
    name: str
    _unit_name: str
    # Alike on all ranks once they have agreed on a plan: its place among all handles of the root, and tags that are its
    # own on each of the communicators.
    number: int
    tag: int
    reduce_tag: int
    replica_tag: int
    post_forward_shard: PostForwardShard | None
    phase: Phase
    unsharded: UnshardedParameters
    gradients: GradientBuffer
    has_frozen: bool
    comm_hook: CommHook | None = None
    fingerprints: Fingerprints | None = None  # until the ranks have compared them, and where there are others
    _reduced: Tensor | None = None  # in this backward, with hooks that are still to be called with it
    _delivered: Sequence[nn.Parameter] = ()  # whose gradients this backward has brought, and hooks are to be called
    is_exposed = False  # its places hold whole, ordinary parameters

    _gathered: Hashable  # the state of the shard that the whole parameter is of; None of none
    _precision: Precision
    _in_full_precision: bool
    _unsharded_by_dtype: dict[torch.dtype, UnshardedParameters]
    _built_for: tuple[torch.dtype, list[bool], int, torch.device]
    _build: Callable[[], None]
    settle: Callable[[], None]

    @property
    def comms(self) -> tuple[Communicator, ...]:
        """All ways by which its values go to other ranks."""
        return self.comm, self.replicas, *([] if self.post_forward_shard is None else [self.post_forward_shard.comm])

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold a part of it."""
        return self.comm.world_size > 1

    @property
    def is_replicated(self) -> bool:
        """Whether other ranks hold the same part of it, and train it together with this one."""
        return self.replicas.world_size > 1

    @property
    def is_local(self) -> bool:
        """Whether no other rank has anything to do with it."""
        return not self.is_sharded and not self.is_replicated

    @property
    def requires_grad(self) -> bool:
        return self.flat_param.requires_grad

    @property
    def valueless(self) -> set[int]:
        """The numbers of the parameters that have no values yet; the shard holds zeros for them."""
        return self.flat_param.valueless

    @property
    def requires_grad_each(self) -> list[bool]:
        """Of each parameter."""
        if self.pieces is not None:
            return self.pieces.requires_grad
        return [self.flat_param.requires_grad] * len(self.layout.slots)

    @property
    def accumulators(self) -> list[list[Any]]:
        """See `UnshardedParameters.accumulators`; of each form in which the parameters were whole."""
        return [unsharded.accumulators for unsharded in self._unsharded_by_dtype.values()]

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        own = self.flat_param.dtype
        return own if self._in_full_precision else self._precision.compute_dtype(own)

    @property
    def is_cast(self) -> bool:
        """Whether it is computed with in another dtype than the optimizer steps it in."""
        return self._precision.compute_dtype(self.flat_param.dtype) != self.flat_param.dtype

    @property
    def shard_state(self) -> Hashable:
        """Changes when the shard is written, cast, moved, frozen or released."""
        shard = self.flat_param
        pieces = (shard.requires_grad,) if self.pieces is None else (*self.pieces.requires_grad, self.pieces.versions)
        return shard._version, shard.data_ptr(), shard.dtype, shard.device, pieces

    @property
    def intervals(self) -> list[Interval]:
        """What this rank holds: shard metadata in the layout's terms."""
        return self.layout.intervals(self.comm.rank)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the whole gradient as it is sent."""
        return self.layout.padded_numel * self.gradients.dtype.itemsize

    def describe(self) -> str:
        """All that the ranks must agree on, as text."""
        slots = ", ".join(
            f"{slot.name}{list(slot.shape)}{f' along {slot.dim}' if slot.dim else ''}"
            + (f" ({part})" if part else "")
            + (" frozen" if self.requires_grad and not needs else "")
            for slot, part, needs in zip(self.layout.slots, self.flat_param.parts, self.requires_grad_each, strict=True)
        )
        kind = f"{self.flat_param.dtype} requires_grad={self.requires_grad}"
        if self.is_cast or self.gradients.dtype != self.flat_param.dtype:
            computed = self._precision.compute_dtype(self.flat_param.dtype)
            kind += f" computed in {computed}, reduced in {self.gradients.dtype},"
        if self.flat_param.group is not None:
            kind += f" of group {text_of_key(self.flat_param.group)}"
        ranks = f"over {self.layout.world_size} ranks by {type(self.comm).__name__}"
        if not isinstance(self.layout, ContiguousLayout):
            kind += " in rows"
        if self.is_replicated:
            ranks += f" and {self.replicas.world_size} replicas by {type(self.replicas).__name__}"
        if self.post_forward_shard is not None:
            ranks += f", kept among {self.post_forward_shard.comm.world_size} of them"
        return f"{kind} {ranks}: {slots}"
