"""Sharded state dicts: the state of a model with this rank's parts in place of the parameters.

A `TensorPart` is a tensor of which this rank holds a range. For `torch.distributed.checkpoint`, the part returns write
items (``torch.distributed._checkpointable``) for the boxes in the range. So saving requires no gather, the state can be
loaded on a different number of ranks, and a loader does not depend on flat parameters.

The parts are registered in the modules while the state is created or loaded, like unsharded parameters
(`state_dict.summon`). So names, order and hooks are the same as in `nn.Module`. Parameters are not copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.consensus import agree_on, done_by_all, number_among, size_of
from fsdp.distributed.dtensor import is_dtensor, local_part
from fsdp.engine.boxes import Box, boxes_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.precision import BATCH_NORMS
from fsdp.engine.unit import Unit, own_modules, units_in
from fsdp.layers.deferred_init import Uninitialized, memory_to_load_into, uninitialized_beside
from fsdp.layers.state_dict.redistribute import make_readable
from fsdp.layers.state_dict.summon import (
    Exposure,
    LoadTarget,
    Values,
    beside_ours,
    for_each,
    hidden_handles,
    recorded,
    recording,
)
from fsdp.layers.state_requests import ShardedState, serving
from fsdp.layers.verify import agree_on_values

aten = torch.ops.aten

_VALUELESS = (
    "it has no values yet, because it was on the meta device when it was wrapped. Initialize it first "
    "(fsdp.materialize, or a load)."
)


@dataclass(frozen=True)
class Part:
    """A rank's elements of a tensor: a range of a row-major *block*, the whole tensor or a `DTensor`'s local part."""

    shape: torch.Size  # of the whole tensor
    block: Box  # the block's position in the tensor
    start: int
    stop: int
    name: str = field(compare=False)  # of the tensor, for messages
    rank: int = field(compare=False)  # this rank's number, for messages
    is_alone: bool = field(compare=False)  # this rank holds all elements of the tensor

    @classmethod
    def of_whole(cls, shape: torch.Size, name: str, rank: int) -> Part:
        """Return a part that contains all elements of a tensor."""
        return cls(shape, Box.whole(shape), 0, shape.numel(), name, rank, is_alone=True)

    @cached_property
    def boxes(self) -> tuple[tuple[Box, int], ...]:
        """The boxes of the elements in the whole tensor, each with the index of its first element in the range."""
        if self.shape.numel() == 0:
            return ((Box.whole(self.shape), 0),)  # otherwise checkpoints would not contain the tensor
        found, done = [], 0
        for box in boxes_of(self.block.sizes, self.start, self.stop):
            found.append((box.moved(self.block.offsets), done))
            done += box.numel
        return tuple(found)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the elements ``[stop - start]`` of an unsharded value, as a view if possible."""
        for dim, (begin, size) in enumerate(zip(self.block.offsets, self.block.sizes, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return whole.detach().reshape(-1)[self.start : self.stop]

    def check(self, value: Tensor, dtype: torch.dtype) -> None:
        """Raise ValueError or TypeError if the elements, in this dtype, cannot be copied from a value."""
        here = f"rank {self.rank}: {self.name}"
        if isinstance(value, TensorPart):
            if value.part != self:
                raise ValueError(
                    f"{here}: this rank keeps {self}, but got {value.part}. A sharded state fits only the same number "
                    "of ranks and the same wrapping: load it with torch.distributed.checkpoint into the result of "
                    "sharded_state_dict()."
                )
        elif type(value) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{here}: a {type(value).__name__} cannot be sharded here. Load it with torch.distributed.checkpoint "
                "into the result of sharded_state_dict(), or pass an unsharded, plain tensor."
            )
        elif value.is_meta or value.shape != self.shape:
            raise ValueError(f"{here}: expected a tensor of {list(self.shape)} with values, got {list(value.shape)}")
        if value.is_complex() and not dtype.is_complex:
            raise ValueError(f"{here} is of {dtype}, but the given value is of {value.dtype}")

    def __str__(self) -> str:
        block = ""
        if self.block.sizes != tuple(self.shape):
            block = f"the block {list(self.block.sizes)} at {list(self.block.offsets)} of "
        return f"elements {self.start}:{self.stop} of {block}{list(self.shape)}"


@dataclass(eq=False)
class Held:
    """The elements of a `TensorPart`, shared by all of its aliases."""

    flat: Tensor  # [stop - start]
    # The id of the tensor with this memory, which must not change before a load is complete; 0 if not shared.
    lent_by: int = 0
    is_blank: bool = False  # without values, and no load was started
    unfit: str = ""  # the reason if the elements must not be saved
    apart: set[str] = field(default_factory=set)  # the keys under which other ranks have a different tensor

    def copied(self, change: Callable[[Tensor], Tensor]) -> Held:
        """Return a copy whose elements are the result of `change`, in separate memory."""
        return Held(change(self.flat), 0, self.is_blank, self.unfit, set(self.apart))


class TensorPart(Tensor):
    """A tensor of which this rank holds only a range, as `torch.distributed.checkpoint` saves and loads it.

    The attributes shape, dtype and device describe the whole tensor. Saving does not copy. Loading writes to separate
    memory, allocated when a load is planned, so the source does not change. A part cannot be used in computations; it
    can be copied, cast, moved, pickled and staged.
    """

    part: Part  # the held elements
    _held: Held

    # For operations that a part of a tensor does not support, the error is only raised in the dispatch below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def around(cls, part: Part, held: Held) -> Any:
        """Return a tensor around `held`, without a copy."""
        flat = held.flat
        made = Tensor._make_wrapper_subclass(cls, part.shape, dtype=flat.dtype, device=flat.device)
        made.part, made._held = part, held
        return made

    @property
    def local(self) -> Tensor:
        """This rank's elements ``[part.stop - part.start]``; shares memory."""
        return self._held.flat

    @property
    def is_blank(self) -> bool:
        """True if the part represents a tensor without values, and no values were loaded."""
        return self._held.is_blank

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.part}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            held = memo.get(id(self._held)) or self._held.copied(Tensor.clone)
            memo[id(self._held)] = held  # tied tensors stay tied
            memo[id(self)] = type(self).around(self.part, held)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        part, held = self.part, self._held
        range_ = (part.block.offsets, part.block.sizes, part.start, part.stop)
        facts = (part.shape, *range_, part.name, part.rank, part.is_alone)
        return _rebuild, (facts, held.flat, held.is_blank, held.unfit, sorted(held.apart))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        do = _MEANINGFUL.get(func)
        if do is None:
            what = ", ".join(f"{arg.part.name} is {arg}" for arg in args if isinstance(arg, TensorPart))
            raise NotImplementedError(
                f"{func} is not supported on a part of a tensor, in a sharded state dict ({what}). Use the full state "
                "(state_dict()), or this rank's elements (.local)."
            )
        return do(*args, **(kwargs or {}))

    def __create_write_items__(self, fqn: str, obj: object) -> list[Any]:
        """Return the items to be written: an item for each box, and no items on a rank without elements."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        problem = self._held.unfit
        if not problem and any(fqn == key or fqn.endswith(f".{key}") for key in self._held.apart):
            problem = (
                "its unit has a process group of its own, so other ranks have another parameter under this name, and a "
                f"checkpoint would mix the two. Rename it for each such group (state['{fqn} of group 0'] = "
                f"state.pop('{fqn}')), and back before it is loaded."
            )
        if problem:
            raise RuntimeError(f"rank {self.part.rank}: cannot save {fqn}: {problem}")
        properties = TensorProperties.create_from_tensor(self.local)
        items = []
        for box, _ in self.part.boxes:
            chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.part.shape)
            items.append(WriteItem(MetadataIndex(fqn, box.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        """Return the chunks to be loaded, and allocate separate memory for them."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        held = self._held
        if held.lent_by:
            held.flat, held.lent_by = held.flat.clone(), 0
        held.is_blank, held.unfit = False, ""
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self.part.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the elements of a box in its shape, as a view."""
        for box, begin in self.part.boxes:
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self.local[begin : begin + box.numel].view(box.sizes)
        raise ValueError(f"rank {self.part.rank} holds nothing of {index.fqn} at {index.offset}: it has {self.part}")


def part_of(handle: FlatParamHandle, slot: int, rank: int) -> Part:
    """Return the elements of a parameter that this rank keeps; `rank` is this rank's number for messages."""
    kept, mesh = handle.layout.slots[slot], handle.flat_param.parts[slot]
    interval = handle.layout.interval(slot, handle.comm.rank)
    start, stop = (interval.start, interval.stop) if interval is not None else (0, 0)
    shape = kept.shape if mesh is None else mesh.shape
    block = Box.whole(kept.shape) if mesh is None else Box.whole(kept.shape).moved(mesh.offsets)
    is_alone = not handle.is_sharded and (mesh is None or not mesh.sharded_dims)
    return Part(shape, block, start, stop, kept.name, rank, is_alone)


def _rebuild(facts: tuple[Any, ...], flat: Tensor, is_blank: bool, unfit: str, apart: list[str]) -> TensorPart:
    shape, offsets, sizes, *rest = facts
    return TensorPart.around(Part(shape, Box(offsets, sizes), *rest), Held(flat, 0, is_blank, unfit, set(apart)))


def _alias(tensor: TensorPart) -> Any:
    return type(tensor).around(tensor.part, tensor._held)


def _like(make: Callable[..., Tensor], *options: str) -> Callable[..., Any]:
    def made(tensor: TensorPart, size: Any = None, **how: Any) -> Any:
        if size is not None and torch.Size(size) != tensor.part.shape:
            raise NotImplementedError(f"a tensor of {list(size)} in the likeness of {tensor}")
        how = {name: how[name] for name in options if how.get(name) is not None}
        return TensorPart.around(tensor.part, tensor._held.copied(lambda flat: make(flat, **how)))

    return made


def _copy(into: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(into, TensorPart) and isinstance(value, TensorPart):
        if value.part != into.part:
            raise ValueError(f"cannot copy {value} into {into}: another part")
        into.local.copy_(value.local, non_blocking)
        into._held.is_blank, into._held.unfit = value._held.is_blank, value._held.unfit
    elif isinstance(into, TensorPart):
        if is_dtensor(value) or value.shape != into.part.shape:
            raise ValueError(f"cannot copy a {type(value).__name__} of {list(value.shape)} into {into}")
        into.local.copy_(into.part.cut(value), non_blocking)
    elif isinstance(value, TensorPart) and value.part.is_alone:
        into.copy_(value.local.view(value.part.shape), non_blocking)
    elif isinstance(value, TensorPart):
        raise NotImplementedError(
            f"rank {value.part.rank}: a plain tensor cannot hold {value.part.name}, of which other ranks hold the rest "
            f"({value}). Load a sharded state with load_sharded_state_dict(). If this was to stage it for "
            "dcp.async_save, pass async_stager=DefaultStager(...): BlockingAsyncStager, which FileSystemWriter is too, "
            "makes 0-d tensors plain."
        )
    return into


_MEANINGFUL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _like(Tensor.clone),
    aten._to_copy.default: _like(partial(Tensor.to, copy=True), "dtype", "device", "non_blocking"),
    aten.copy_.default: _copy,
    aten.empty_like.default: _like(torch.empty_like, "dtype", "device", "pin_memory"),
    aten.zeros_like.default: _like(torch.zeros_like, "dtype", "device", "pin_memory"),
    aten.new_empty.default: _like(torch.empty_like, "dtype", "device", "pin_memory"),
    aten.new_zeros.default: _like(torch.zeros_like, "dtype", "device", "pin_memory"),
    aten.is_pinned.default: lambda tensor, *_: tensor.local.is_pinned(),
}


@contextmanager
def _parts(unit: Unit, rank: int, unfit: str) -> Iterator[list[TensorPart]]:
    """Set this rank's parts as the parameters of a unit's modules inside the context. Not collective.

    If the parts must not be saved, `unfit` is the reason; `rank` is this rank's number for messages.
    """
    parts = {handle: _parts_of(handle, rank, unfit) for handle in hidden_handles(unit)}
    with closing(Exposure(unit, parts)), ExitStack() as undo, serving([unit], ShardedState()):
        for blank in uninitialized_beside(unit):
            if not is_dtensor(blank.value):  # DCP supports `DTensor`s
                undo.callback(blank.take_back)
                _show_blank(blank, unit.device, rank)
        yield [part for each in parts.values() for part in each]


def _parts_of(handle: FlatParamHandle, rank: int, unfit: str) -> list[TensorPart]:
    make_readable(handle, "save or load its shards")
    flats = handle.layout.local_shards(handle.flat_param.vector, handle.comm.rank)
    found = []
    for slot, flat in enumerate(flats):
        is_blank = slot in handle.valueless
        held = Held(flat, id(handle.flat_param), is_blank, _VALUELESS if is_blank else unfit)
        found.append(TensorPart.around(part_of(handle, slot, rank), held))
    return found


def _show_blank(blank: Uninitialized, device: torch.device, rank: int) -> None:
    """Allocate memory for a buffer or ignored parameter without values; it can be loaded, but not saved."""
    blank.give_memory(device)
    given = blank.value
    if given is not None:
        part = Part.of_whole(given.shape, blank.places[0][1], rank)
        own = TensorPart.around(part, Held(given.detach().reshape(-1), is_blank=True, unfit=_VALUELESS))
        blank.put(nn.Parameter(own, given.requires_grad) if isinstance(given, nn.Parameter) else own)


def sharded_state(root: Unit, units: Sequence[Unit], take: Callable[[], Any]) -> Any:
    """Collective the first time. Return the result of `take` while the modules list this rank's parts.

    Tensors that are not sharded are copied, because a load writes to the tensors of a state dict.
    """
    unfit = ""
    try:
        agree_on_values({handle: name for unit, name in units_in(root).items() for handle in unit.handles})
    except RuntimeError as error:
        unfit = str(error)  # the state may still be used as the target of a load
    rank = number_among(root.everyone)
    with for_each(units, lambda unit: _parts(unit, rank, unfit)) as shown:
        state = take()
        pairs = zip(units, shown, strict=True)
        apart = {id(part._held) for unit, parts in pairs if is_apart(unit, size_of(root.everyone)) for part in parts}
    copies: dict[Any, Tensor] = {}  # tied tensors stay tied
    for key, value in state.items():
        if isinstance(value, TensorPart):
            if id(value._held) in apart:
                value._held.apart.add(key)
        elif isinstance(value, Tensor):
            is_dense = value.layout is torch.strided
            place = (local_part(value).data_ptr(), value.shape, value.stride(), value.dtype) if is_dense else key
            if place not in copies or value.numel() == 0:
                copies[place] = value.detach().clone()
            state[key] = copies[place]
    return state


def is_apart(unit: Unit, most: int) -> bool:
    """Return whether other ranks, of `most` in total, have different parameters under this unit's names."""
    # Batch norms that each rank trains separately are saved like buffers, from a single rank.
    is_own_norm = isinstance(unit.module, BATCH_NORMS) and unit.comm.world_size == 1
    return size_of(unit.everyone) < most and not is_own_norm


def load_sharded_state(root: Unit, units: Sequence[Unit], load: Callable[[], Any]) -> Any:
    """Collective. Store the values that `load` loads into the modules, if all ranks could load them.

    Otherwise parameters, and all other tensors of the units' modules, are unchanged.
    """
    everyone, rank = root.everyone, number_among(root.everyone)
    for handle in dict.fromkeys(handle for unit in units for handle in unit.visible_handles):
        make_readable(handle, "save or load its shards")

    def check(handle: FlatParamHandle, slot: int, value: Tensor) -> None:
        packing = handle.flat_param.packings[slot]
        if packing is not None and value.dtype != handle.flat_param.dtype:
            raise ValueError(
                f"{packing.name} is sharded as {packing.nbytes} bytes of {packing.description}, and cannot be set to "
                f"{value.dtype}: load a tensor of its own class with load_state_dict()"
            )
        part_of(handle, slot, rank).check(value, handle.flat_param.dtype)

    with (
        for_each(units, lambda unit: closing(recording(unit, check, in_bytes=True))) as recordings,
        _kept_if_it_fails(units),
    ):
        result = done_by_all([everyone], "load its part of a sharded state", load)
        values = {key: value for each in recordings for key, value in recorded(each).items()}
        numbers = sorted((handle.tags.number, slot) for handle, slot in values)  # comparable across ranks
        digest = hashlib.sha256(repr(numbers).encode()).hexdigest()
        shown_as = f"those of {len(numbers)} parameters ({digest[:8]})"
        agree_on(everyone, "keys in the sharded state that they load", digest, shown_as)
    store(values)
    return result


@contextmanager
def _kept_if_it_fails(units: Sequence[Unit]) -> Iterator[None]:
    """Restore buffers and parameters that are not sharded if the block raises an error.

    Memory is allocated for tensors without values, and kept if values are loaded.
    """
    modules = (module for unit in units for module in own_modules(unit.module))
    listed = dict.fromkeys(tensor for module in modules for *_, tensor in beside_ours(module))
    live = [tensor for tensor in listed if not isinstance(tensor, LoadTarget) and not tensor.is_meta]
    before = [(tensor, tensor.detach().clone()) for tensor in live]
    with memory_to_load_into(units) as given:
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            for each in given:
                each.take_back()
            raise


def store(values: Values) -> None:
    """Store this rank's shards of loaded values."""
    for (handle, slot), value in values.items():
        handle.storage.check(handle.name)
        if not isinstance(value, TensorPart):
            handle.values.store(slot, value)
            handle.values.note_written([slot])
        elif value._held.lent_by != id(handle.flat_param):  # else no rank has loaded a value
            handle.values.fill(slot, lambda shard, values=value.local: shard.copy_(values))  # type: ignore[misc]
        handle.storage.release()
