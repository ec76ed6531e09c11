"""The unsharded parameter of a tensor subclass with its own all-gather extension, as in torch's FSDP2.

Its local tensor creates the tensors to send from this rank's rows (``fsdp_pre_all_gather``), and the leaf from the
received tensors (``fsdp_post_all_gather``). The leaf is created once, and later all-gathers use the same memory, which
is freed in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import held_part, memory_of
from fsdp.engine.autograd import FreedLeaves, accumulator_of
from fsdp.engine.layout import Layout
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.unsharded_params import UnshardedParameters


class Sent(NamedTuple):
    """The look of a tensor that each rank sends."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Arriving(NamedTuple):
    """An all-gather of a parameter's tensors, which are sent as concatenated bytes."""

    full: Tensor  # ``[ranks * bytes]``
    sent: list[Sent]
    metadata: Any  # that the method before the all-gather has for the one after it


class ExtendedParameters(UnshardedParameters):
    """The unsharded parameter of a class with torch's all-gather extension, alone in its layout.

    Args:
        layout: in rows.
        parts: the record of its `DTensor`, if it is the local part of a `DTensor`.
        full: a tensor with the compute dtype and device.
        absent: the `DTensor` with this rank's rows, which modules see while it is sharded.
        module: the module that names the parameter.
        mesh, mp_policy: the user's mesh and policy of data parallelism.
        others: see `UnshardedParameters`.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Any,
        full: Tensor,
        *,
        absent: Sequence[Tensor],
        module: nn.Module,
        mesh: Any,
        mp_policy: Any,
        **others: Any,
    ) -> None:
        # Until the first all-gather, the leaf is not visible to modules.
        full = torch.empty(layout.unsharded_numel, dtype=full.dtype, device=full.device)
        self._memory: list[tuple[Any, int]] = []  # storages that are freed with the parameter, with their sizes
        super().__init__(layout, parts, full, absent=absent, **others | {"is_shard": False})
        self._name, self._shape = layout.slots[0].name, layout.slots[0].shape
        self._stride = torch.empty(self._shape, device="meta").stride()
        self._mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        self._sharded, self._module, self._mp_policy = absent[0], module, mp_policy
        if not isinstance(layout, RowsLayout):
            raise TypeError(f"a parameter with an all-gather of its own needs rows, got {type(layout).__name__}")
        self._rows_layout, self._part, self._full_rows = layout, parts[0], layout.local_shape(0, 0)
        self._arriving: Arriving | None = None
        self._sent: list[Sent] = []  # the first time
        self._received: list[Tensor] = []  # those of all ranks, for each tensor that is sent; made once

    def _lies_there(self, view: Tensor) -> bool:  # so that only its version shows whether it was written
        return False

    @property
    def _rows(self) -> Any:
        """This rank's rows, in their class."""
        return held_part(self._sharded)

    @cached_property
    def accumulators(self) -> list[Any]:  # of one that users' classes need no `view` for
        return [accumulator_of(leaf) if leaf.requires_grad else None for leaf in self.leaves]

    # --- before and after an all-gather -------------------------------------------------------------------------

    def begin_gather(self, *, directly: bool = False) -> Tensor:
        with _as_for_parameters():
            sent, metadata = self._before_gather()
            self.outgoing = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in sent])
            full = self.outgoing.new_empty(self._layout.world_size * self.outgoing.numel())
        self._arriving = Arriving(full, [Sent(tensor.shape, tensor.dtype) for tensor in sent], metadata)
        return full

    def _before_gather(self) -> tuple[list[Tensor], Any]:
        local = self._rows if self._rows.device == self.full.device else self._rows.to(self.full.device)
        taken = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if taken not in (1, 5):
            raise TypeError(
                f"fsdp_pre_all_gather of a {type(local).__name__} ({self._name}) takes {taken} arguments: it must take "
                "(mesh, outer_size, outer_stride, module, mp_policy), or mesh alone"
            )
        every = self._mesh, self._shape, self._stride, self._module, self._mp_policy
        given, metadata = local.fsdp_pre_all_gather(*every[:taken])
        sent = list(given)
        if local.shape != self._full_rows and any(tensor.shape == local.shape for tensor in sent):
            raise ValueError(
                f"fsdp_pre_all_gather of a {type(local).__name__} ({self._name}) returned {list(local.shape)}, this "
                f"rank's rows: all ranks must send as much. Pad it to {list(self._full_rows)}, as the first rank has."
            )
        return sent, metadata

    def end_gather(self, *, is_wanted: bool = True) -> None:
        arriving, self._arriving, self.outgoing = self._arriving, None, None
        if arriving is None or not is_wanted:
            return
        with _as_for_parameters():
            for storage, nbytes in self._memory:
                storage.resize_(nbytes)
            self._take(arriving)
            come, after = tuple(self._received), self._rows.fsdp_post_all_gather
            if self._memory:
                after(come, arriving.metadata, self.full.dtype, out=self.leaves[0])
            else:
                self._show_as(*after(come, arriving.metadata, self.full.dtype))
        self._freed.unseal()
        self.rest()

    def _take(self, arriving: Arriving) -> None:
        """Copy the received tensors to their persistent memory."""
        if not self._memory:
            self._sent = arriving.sent
            self._received = [self._room_for(sent) for sent in arriving.sent]
        if arriving.sent != self._sent:
            raise RuntimeError(
                f"fsdp_pre_all_gather of a {type(self._rows).__name__} ({self._name}) returned tensors of other sizes "
                "than the first time: they must stay the same"
            )
        by_rank = arriving.full.view(self._layout.world_size, -1).split([sent.nbytes for sent in self._sent], dim=1)
        for tensor, sent, bytes_of_all in zip(self._received, self._sent, by_rank, strict=True):
            if self._is_divided(sent):
                for rank, come in enumerate(bytes_of_all):
                    first, last = self._rows_layout.rows(0, rank)
                    slices = come.clone().view(sent.dtype).view(sent.shape).narrow(self._dim, 0, last - first)
                    tensor.narrow(self._dim, first, last - first).copy_(slices)
            else:
                tensor.view(self._layout.world_size, -1).view(torch.uint8).copy_(bytes_of_all)

    @property
    def _dim(self) -> int:
        return self._layout.slots[0].dim

    def _is_divided(self, sent: Sent) -> bool:
        """Return whether ranks send slices of a tensor whose order in memory differs from the received order."""
        return self._dim > 0 and sent.shape == self._full_rows

    def _room_for(self, sent: Sent) -> Tensor:
        """Return memory for a tensor that all ranks send, either unsharded or concatenated by rows."""
        numel = self._shape.numel() if self._is_divided(sent) else self._layout.world_size * sent.shape.numel()
        shape = self._shape if self._is_divided(sent) else (-1, *sent.shape[1:])
        return torch.empty(numel, dtype=sent.dtype, device=self.full.device).view(shape)

    def _show_as(self, made: Tensor, inner: Sequence[Tensor]) -> None:
        """Create a leaf of a tensor with the padding of the shards, and record its memory."""
        if made.shape != self._shape or made.stride() != self._stride:
            made = torch.as_strided(made, self._shape, self._stride, 0)
        leaf = self._new_leaf(0, made if self._part is None else self._part.dtensor(made), self._requires_grad[0])
        self.leaves[:] = [leaf]
        self.__dict__.pop("accumulators", None)  # of the leaf that was there before
        held = [*self._received, *inner]
        self._memory = [(storage, storage.nbytes()) for storage in map(Tensor.untyped_storage, held)]
        self._freed = FreedLeaves([leaf, *held])

    def free(self) -> None:
        super().free()
        for storage, _ in self._memory:
            storage.resize_(0)

    def holds(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in {storage.data_ptr() for storage, _ in self._memory}

    def differ_from(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=self.full.device)  # the class may have changed the values

    def new_value(self, number: int) -> nn.Parameter:
        raise RuntimeError(
            f"{self._name} was written to while it was unsharded: what its fsdp_post_all_gather has made cannot be "
            "taken back into the shards. Write to the sharded parameter, between steps."
        )


@contextmanager
def _as_for_parameters() -> Iterator[None]:
    """Create tensors that can be used in training inside the context, even in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
