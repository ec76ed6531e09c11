"""Tensors of torch's sharded state dicts as they lie in the files of ranks: no process group, nothing put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint.formats.lazy_tensors import LazyTensor
from fsdp.checkpoint.formats.stitched import Elements, Stitched, stitched
from fsdp.checkpoint.formats.torch_pickle import Foreign


class Part(NamedTuple):
    """What one file has of a tensor: from which element on, and where that is said."""

    start: int
    values: LazyTensor
    file: str


def is_sharded(value: Any) -> bool:
    """Whether it is one rank's part of a tensor."""
    return is_sharded_tensor(value) or _is_of_torch(value, "DTensor")


def is_sharded_tensor(value: Any) -> bool:
    """Whether it is such a part, of a `ShardedTensor`."""
    return _is_of_torch(value, "ShardedTensor")


def _is_of_torch(value: Any, name: str) -> bool:
    if not isinstance(value, Foreign):
        return False
    module, _, last = value.origin.rpartition(".")
    return last == name and f"{module}.".startswith("torch.distributed.")


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
    shape, found = parts_of(name, first, files[0])
    for value, file in list(zip(values, files, strict=True))[1:]:
        other, parts = parts_of(name, value, file) if is_sharded(value) else (None, [])
        if other != shape:
            raise ValueError(
                f"{name} in {file} is another tensor than in {files[0]}, which has shards of {list(shape)}"
            )
        found += parts
    parts = sorted({part.start: part for part in reversed(found) if part.values.shape.numel()}.values())
    reached = 0
    for part in parts:
        _check_follows(name, part.start, reached, part.file, len(files))
        reached += part.values.shape.numel()
    _check_follows(name, shape.numel(), reached, files[-1], len(files))
    pieces = tuple(Elements.of(part.values) for part in parts)
    dtype = pieces[0].dtype if pieces else dtype_of(first)
    return Stitched(name, shape, dtype, pieces or (Elements.of(torch.empty(0, dtype=dtype)),))


def _check_follows(name: str, start: int, reached: int, file: str, count: int) -> None:
    if start != reached:
        raise ValueError(
            f"{name}: up to {file}, the {count} files given have its elements to {reached}, and the next ones begin at "
            f"{start}. A rank's file is missing, or one is of another number of ranks."
        )


def parts_of(name: str, value: Any, file: str) -> tuple[torch.Size, list[Part]]:
    """The shape of a whole tensor, and what is in a file of it.

    Raises:
        ValueError: for what FSDP1 does not save.
    """
    try:
        if is_sharded_tensor(value):
            shape = torch.Size(value.state[1].fields["size"])
            return shape, list(_shards(name, value, shape, file))
        shape = torch.Size(value.args[2])
        return shape, list(_rows(name, value, shape, file))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name} in {file} is a {value.origin} of a form that is not known here ({error!r}): load it with the "
            "version of torch that has written it, and save FULL_STATE_DICT"
        ) from None


def dtype_of(value: Any) -> torch.dtype:
    """Of such a part."""
    if not is_sharded_tensor(value):
        return value.args[1]
    properties = value.state[1].fields["tensor_properties"]
    return properties.state[0] if isinstance(properties.state, tuple) else properties.state["dtype"]


def _shards(name: str, value: Any, shape: torch.Size, file: str) -> Iterator[Part]:
    """Of a `ShardedTensor`."""
    for shard in (each.fields for each in value.state[0]):
        where = shard["metadata"].fields
        offsets, sizes = list(where["shard_offsets"]), list(where["shard_sizes"])
        if any(offsets[1:]) or sizes[1:] != list(shape[1:]):
            raise ValueError(_not_of_fsdp1(name, file, f"shards at {offsets} of sizes {sizes}"))
        yield Part(offsets[0] * shape[1:].numel() if offsets else 0, shard["tensor"], file)


def _rows(name: str, value: Any, shape: torch.Size, file: str) -> Iterator[Part]:
    """Of a `DTensor`."""
    local, spec = value.fields["_local_tensor"], value.fields["_spec"].fields
    kinds = [each.origin.rpartition(".")[2] for each in spec["placements"]]
    cut = [dim for dim, kind in enumerate(kinds) if kind != "Replicate"]
    if not cut:
        yield Part(0, local, file)
        return
    if len(cut) > 1 or kinds[cut[0]] != "Shard" or spec["placements"][cut[0]].fields["dim"] != 0:
        dims = [each.fields.get("dim", "") for each in spec["placements"]]
        shown = ", ".join(f"{kind}({dim})" for kind, dim in zip(kinds, dims, strict=True))
        raise ValueError(_not_of_fsdp1(name, file, f"placements {shown}"))
    ranks, number = _place_in_mesh(spec["mesh"].fields, cut[0])
    rows = -(-shape[0] // ranks)  # as `torch.chunk`
    yield Part(min(number * rows, shape[0]) * shape[1:].numel(), local, file)


def _place_in_mesh(mesh: Mapping[str, Any], dim: int) -> tuple[int, int]:
    """Over how many ranks a dimension of a mesh is, and which of them has saved this. Its form changes with torch's."""
    if "mesh" in mesh:
        sizes = mesh["mesh"].shape
    else:
        layout = mesh["_layout"].fields
        sizes = [each.fields["shape"] for each in layout["axes"]] if "axes" in layout else layout["shape"]
    size = sizes[dim]
    return size if isinstance(size, int) else math.prod(size), mesh["_coordinate_on_dim"][dim]


def _not_of_fsdp1(name: str, file: str, what: str) -> str:
    return (
        f"{name} in {file} has {what}, and FSDP1 cuts the first dimension over one group of ranks: save such a model "
        "with torch.distributed.checkpoint"
    )
