"""The unsharded parameter of a tensor subclass that says itself how it is all-gathered, as torch's FSDP2 has it.

Its local tensor makes of this rank's rows the tensors that are sent (``fsdp_pre_all_gather``), and the leaf of those
that have come (``fsdp_post_all_gather``): once, and from then on in the same memory, which is freed in between.
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


class Arriving(NamedTuple):
    """An all-gather of a parameter's tensors, which travel as bytes one behind the other."""

    full: Tensor  # ``[ranks * bytes]``
    looks: list[tuple[torch.Size, torch.dtype]]  # of the tensors that each rank sends
    metadata: Any  # that the method before the all-gather has for the one after it


class ExtendedParameters(UnshardedParameters):
    """The unsharded parameter of a class with torch's all-gather extension, alone in its layout.

    Args:
        layout: in rows.
        places: where it is used.
        parts: what it is a part of, which is nothing.
        full: has the dtype and device of the computation.
        absent: the `DTensor` around this rank's rows, which modules see while it is sharded.
        mp_policy: as the user gave it.
        others: see `UnshardedParameters`.
    """

    def __init__(
        self,
        layout: Layout,
        places: Any,
        parts: Any,
        full: Tensor,
        *,
        absent: Sequence[Tensor],
        mp_policy: Any,
        **others: Any,
    ) -> None:
        # Until the first all-gather there is a leaf that nobody sees.
        full = torch.empty(layout.unsharded_numel, dtype=full.dtype, device=full.device)
        self._memory: list[tuple[Any, int]] = []  # storages that are freed with the parameter, with their sizes
        super().__init__(layout, places, parts, full, absent=absent, **others | {"is_shard": False})
        self._name, self._shape = layout.slots[0].name, layout.slots[0].shape
        self._stride = torch.empty(self._shape, device="meta").stride()
        self._sharded, self._module, self._mp_policy = absent[0], places[0][0].module, mp_policy
        self._full_rows = layout.local_shape(0, 0) if isinstance(layout, RowsLayout) else self._shape
        self._world_size = layout.world_size
        self._arriving: Arriving | None = None
        self._received: list[Tensor] = []  # those of all ranks, for each tensor that is sent; made once

    def _lies_there(self, view: Tensor) -> bool:  # so that only its version shows whether it was written
        return False

    @cached_property
    def _mesh(self) -> Any:
        mesh: Any = self._sharded.device_mesh  # type: ignore[attr-defined]
        return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]

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
            full = self.outgoing.new_empty(self._world_size * self.outgoing.numel())
        self._arriving = Arriving(full, [(tensor.shape, tensor.dtype) for tensor in sent], metadata)
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
            come = tuple(
                tensor.view(-1, *shape[1:]) for tensor, (shape, _) in zip(self._received, arriving.looks, strict=True)
            )
            after = self._rows.fsdp_post_all_gather
            if self._memory:
                after(come, arriving.metadata, self.full.dtype, out=self.leaves[0])
            else:
                self._show_as(*after(come, arriving.metadata, self.full.dtype))

    def _take(self, arriving: Arriving) -> None:
        """Copy what has come to where it stays."""
        if not self._memory:
            self._received = [
                torch.empty(self._world_size * shape.numel(), dtype=dtype, device=self.full.device)
                for shape, dtype in arriving.looks
            ]
        by_rank = arriving.full.view(self._world_size, -1)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in arriving.looks]
        if [self._world_size * size for size in sizes] != [tensor.nbytes for tensor in self._received]:
            raise RuntimeError(
                f"fsdp_pre_all_gather of a {type(self._rows).__name__} ({self._name}) returned tensors of other sizes "
                "than the first time: they must stay the same"
            )
        for tensor, part in zip(self._received, by_rank.split(sizes, dim=1), strict=True):
            tensor.view(self._world_size, -1).view(torch.uint8).copy_(part)

    def _show_as(self, made: Tensor, inner: Sequence[Tensor]) -> None:
        """Have a leaf around a tensor, which is padded as the shards are, and know the memory in which it lies."""
        if made.shape != self._shape or made.stride() != self._stride:
            made = torch.as_strided(made, self._shape, self._stride, 0)
        leaf = self._new_leaf(0, made, self._requires_grad[0])
        self.leaves[:], self._numbers = [leaf], {leaf: 0}
        self._swaps = [(*place, leaf, absent) for *place, _, absent in self._swaps]  # type: ignore[misc]
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

    def new_value(self, number: int) -> nn.Parameter:
        raise RuntimeError(
            f"{self._name} was written to while it was unsharded: what its fsdp_post_all_gather has made cannot be "
            "taken back into the shards. Write to the sharded parameter, between steps."
        )


@contextmanager
def _as_for_parameters() -> Iterator[None]:
    """Have tensors made inside of it be of use in training too, also while a forward is one of inference."""
    with torch.inference_mode(False), torch.no_grad():
        yield
