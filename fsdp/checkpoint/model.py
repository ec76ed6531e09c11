"""A model's tensors in a checkpoint: each once, under one FQN, with the ranges of it that each rank writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.checkpoint.model_tensors import SlotTensor, UnshardedTensor, paths_in, tensors_in
from fsdp.checkpoint.safetensors import Entry, Part
from fsdp.distributed.collectives import LONE_RANK, communicator
from fsdp.distributed.communicator import default_group
from fsdp.distributed.consensus import Ranks, number_among
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import Interval
from fsdp.engine.names import plain_name
from fsdp.engine.precision import BATCH_NORMS
from fsdp.engine.unit import Unit

Stored = SlotTensor | UnshardedTensor


def all_ranks(everyone: Sequence[Ranks]) -> Ranks:
    """Return the ranks that save a checkpoint together; of a model without units, all ranks.

    Raises:
        RuntimeError: if units that lie in no other one are not spread over the same ranks.
    """
    if len(everyone) > 1:
        raise RuntimeError(
            "cannot save a checkpoint: units of this model that lie in no other one are spread over different ranks. "
            "Wrap the outermost module, with a process_group of all of them."
        )
    if everyone:
        return everyone[0]
    if dist.is_available() and dist.is_initialized():
        return (communicator(default_group(None), torch.device("cpu")),)
    return (LONE_RANK,)


def size_of(ranks: Ranks) -> int:
    """Return the number of ranks."""
    return math.prod(comm.world_size for comm in ranks)


def stored_tensors(model: nn.Module, units: Sequence[Unit]) -> dict[str, Stored]:
    """Return a model's tensors in the order of its modules, each under the first of its names there."""
    order = {path: number for number, path in enumerate(path for paths in paths_in(model).values() for path in paths)}

    def place(name: str) -> int:
        module, dot, _ = name.rpartition(".")
        return order[module + dot]

    named = [(min(target.names, key=place), target) for target in tensors_in(model, units)]
    return {plain_name(name): target for name, target in sorted(named, key=lambda pair: place(pair[0]))}


@contextmanager
def buffers_in_own_precision(units: Iterable[Unit]) -> Iterator[None]:
    """Have buffers in the dtype that they are kept in, and not that of computation."""
    units = list(units)
    for unit in units:
        unit.buffers.widen()
    try:
        yield
    finally:
        for unit in units:
            if not unit.in_full_precision:
                unit.buffers.narrow()


def require_one_model(units: Sequence[Unit], ranks: Ranks) -> None:
    """Raise RuntimeError if other ranks have other parameters under the same names."""
    for unit in units:
        # Batch norms that each rank trains for itself are saved as buffers are: those of the first rank.
        is_own_norm = isinstance(unit.module, BATCH_NORMS) and unit.comm.world_size == 1
        if size_of(unit.everyone) < size_of(ranks) and not is_own_norm:
            raise RuntimeError(
                f"cannot save a checkpoint: {unit.name} has a process group of its own, so that ranks outside of it "
                "have other values under the same names. Save it by itself, once for each group, to a folder for each."
            )


def entries_of(tensors: dict[str, Stored], ranks: Ranks, dtype: torch.dtype | None) -> list[Entry]:
    """Return a model's tensors that are to be written, with this rank's ranges of them.

    Args:
        tensors: all of them.
        ranks: that write.
        dtype: of floating-point parameters; None leaves them in their own.

    Raises:
        NotImplementedError: for `DTensor`s.
        RuntimeError: for what has no values.
    """
    return [_entry(name, target, ranks, dtype) for name, target in tensors.items()]


def _entry(name: str, target: Stored, ranks: Ranks, dtype: torch.dtype | None) -> Entry:
    if target.part is not None and target.part.mesh.size() > 1:
        raise NotImplementedError(
            f"{name} is a DTensor ({target.part}): checkpoints of tensor-parallel models are saved with "
            "torch.distributed.checkpoint, from sharded_state_dict() of the wrapper, or state_dict() under fully_shard"
        )
    is_parameter = isinstance(target, SlotTensor) or isinstance(target.tensor, nn.Parameter)
    kept = dtype if dtype is not None and is_parameter and target.dtype.is_floating_point else target.dtype
    return Entry(name, kept, target.shape, parts_of(target, values_of(name, target), interval_of(target), ranks))


def values_of(name: str, target: Stored) -> Tensor:
    """Return this rank's shard of the flat parameter, or all of a tensor; flat."""
    if isinstance(target, SlotTensor):
        target.handle.storage.check(target.handle.name)
        return target.handle.flat_param.vector
    if target.tensor.is_meta:
        raise RuntimeError(f"cannot save a checkpoint: {name} is on the meta device and has no values")
    return target.tensor.detach().reshape(-1)


def parts_of(target: Stored, flat: Tensor, interval: Interval | None, ranks: Ranks) -> list[Part]:
    """Return the ranges that this rank writes of a tensor, or of another one in its likeness.

    Args:
        target: the tensor.
        flat: where this rank's elements are.
        interval: which they are, and at what place; None if it has none.
        ranks: that write.
    """
    if interval is None or not _writes(target, ranks):
        return []
    if flat.stride(0) != 1:  # a buffer that is every other element of something
        flat = flat.clone(memory_format=torch.contiguous_format)
    return [Part(interval.start, flat[interval.offset : interval.offset + interval.numel])]


def interval_of(target: Stored) -> Interval | None:
    """Return the elements that this rank has of a tensor, and their place."""
    if isinstance(target, SlotTensor):
        return target.handle.layout.interval(target.slot, target.handle.comm.rank)
    return Interval(0, 0, target.shape.numel(), 0) if target.shape.numel() else None


def _writes(target: Stored, ranks: Ranks) -> bool:
    """Return whether this rank writes it: the first replica of a shard, and the first rank of what all ranks have."""
    if isinstance(target, SlotTensor) and _reach(target.handle) == size_of(ranks):
        return target.handle.replicas.rank == 0
    return number_among(ranks) == 0


def _reach(handle: FlatParamHandle) -> int:
    return handle.comm.world_size * handle.replicas.world_size
