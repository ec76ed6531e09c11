"""Tensors of torch's sharded state dicts as they lie in the files of ranks: no process group, nothing put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp._dtensors import is_dtensor
from fsdp._formats.stitched import Stitched, stitched
from fsdp._formats.torch_files import StandIn

_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


class SavedShardedTensor(Tensor):
    """In the place of torch's, which cannot be loaded without a process group of as many ranks."""

    local_shards: list[Any]
    described: Any

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} on a ShardedTensor of a file")

    def __setstate__(self, state: Any) -> None:
        self.local_shards, self.described = state[0], state[1]


KNOWN = {_SHARDED: SavedShardedTensor}


class Part(NamedTuple):
    """What one file has of a tensor: from which element on, and where that is said."""

    start: int
    values: Tensor
    file: str


def is_sharded(value: Any) -> bool:
    """Whether it is one rank's part of a tensor."""
    return isinstance(value, SavedShardedTensor) or is_dtensor(value)


def merged(name: str, values: Sequence[Any], files: Sequence[str]) -> Stitched:
    """A tensor of which each file has a part, or all files the whole.

    Args:
        name: its.
        values: of each file.
        files: their names.

    Raises:
        ValueError: if parts are missing or do not fit; names a file.
    """
    first = values[0]
    if not is_sharded(first):
        return stitched(name, first)
    shape = _shape_of(first)
    for value, file in zip(values, files, strict=True):
        if not is_sharded(value) or _shape_of(value) != shape:
            raise ValueError(
                f"{name} in {file} is another tensor than in {files[0]}, which has shards of {list(shape)}"
            )
    count = len(files)
    found = [part for place, value in enumerate(values) for part in _parts(name, value, place, count, files[place])]
    parts = sorted({part.start: part for part in reversed(found) if part.values.numel()}.values())
    reached = 0
    for part in parts:
        _check_follows(name, part.start, reached, part.file, len(files))
        reached += part.values.numel()
    _check_follows(name, shape.numel(), reached, files[-1], len(files))
    pieces = tuple(part.values for part in parts)
    dtype = pieces[0].dtype if pieces else first.dtype
    return Stitched(name, shape, dtype, pieces or (torch.empty(0, dtype=dtype),))


def _check_follows(name: str, start: int, reached: int, file: str, count: int) -> None:
    if start != reached:
        raise ValueError(
            f"{name}: up to {file}, the {count} files given have its elements to {reached}, and the next ones begin at "
            f"{start}. A rank's file is missing, or one is of another number of ranks."
        )


def parts_of(name: str, value: Any, file: str) -> tuple[torch.Size, list[Part]]:
    """The shape of a whole `ShardedTensor`, and what is in a file of it."""
    return _shape_of(value), list(_parts(name, value, 0, 1, file))


def _shape_of(value: Any) -> torch.Size:
    return torch.Size(_fields(value.described)["size"]) if isinstance(value, SavedShardedTensor) else value.shape


def _parts(name: str, value: Any, place: int, count: int, file: str) -> Iterator[Part]:
    shape = _shape_of(value)
    row = shape[1:].numel()
    if isinstance(value, SavedShardedTensor):
        for shard in map(_fields, value.local_shards):
            where = _fields(shard["metadata"])
            offsets, sizes = list(where["shard_offsets"]), list(where["shard_sizes"])
            if any(offsets[1:]) or sizes[1:] != list(shape[1:]):
                raise ValueError(_not_of_fsdp1(name, file, f"shards at {offsets} of sizes {sizes}"))
            yield Part(offsets[0] * row if offsets else 0, shard["tensor"], file)
        return
    placements, local = value.placements, value._local_tensor
    cut = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
    if any(placement.is_partial() for placement in placements) or len(cut) > 1:
        raise ValueError(_not_of_fsdp1(name, file, f"placements {placements}"))
    if not cut:
        yield Part(0, local, file)
        return
    ranks, number = count, place
    if len(placements) > 1:
        ranks, number = _place_in_mesh(name, value, cut[0], place, file)
    if placements[cut[0]].dim != 0:
        raise ValueError(_not_of_fsdp1(name, file, f"placements {placements}"))
    rows = -(-shape[0] // ranks)  # as `torch.chunk`
    yield Part(min(number * rows, shape[0]) * row, local, file)


def _place_in_mesh(name: str, value: Any, dim: int, place: int, file: str) -> tuple[int, int]:
    """Over how many ranks a dimension of a mesh is, and which of them a file is of."""
    try:
        mesh = value.device_mesh.mesh
    except AttributeError as error:  # what a mesh is made of changes with torch's versions
        raise ValueError(
            f"{name} in {file} is a DTensor whose mesh torch {torch.__version__} cannot read ({error}): convert the "
            "files with the version of torch that has written them"
        ) from None
    found = (mesh == sorted(mesh.flatten().tolist())[place]).nonzero() if place < mesh.numel() else []
    if not len(found):
        raise ValueError(f"{file} is the file {place + 1} in order, and the mesh of {name} has {mesh.numel()} ranks")
    return mesh.shape[dim], int(found[0][dim])


def _not_of_fsdp1(name: str, file: str, what: str) -> str:
    return (
        f"{name} in {file} has {what}, and FSDP1 cuts the first dimension over one group of ranks: save such a model "
        "with torch.distributed.checkpoint"
    )


def _fields(record: Any) -> dict[str, Any]:
    """The attributes of an object, with or without its class."""
    if isinstance(record, StandIn):
        parts = record.state if isinstance(record.state, tuple) else (record.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    slots = getattr(type(record), "__slots__", ())
    return {**{key: getattr(record, key) for key in slots}, **getattr(record, "__dict__", {})}
