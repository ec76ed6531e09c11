"""Files that torch's FullyShardedDataParallel (FSDP1) has saved with `torch.save`, read as one checkpoint.

- One file with a full state dict and a full optimizer state (``FSDP.full_optim_state_dict``, or ``optim_state_dict``
  under ``FULL_STATE_DICT``), which goes by names; or either of the two.
- A file for each rank, with sharded state dicts (``SHARDED_STATE_DICT``, ``FSDP.sharded_optim_state_dict``): shards in
  `ShardedTensor`s or `DTensor`s that say where they belong, read without a process group.

Local state dicts (``LOCAL_STATE_DICT``) are refused: they have shards of flat parameters, and nothing in the files says
which parameters these are made of.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from fsdp.checkpoint.formats.optim import NamedState, SavedOptimizer, is_optimizer_state, is_single, names_by_key
from fsdp.checkpoint.formats.rank_files import RankFiles, likely_files
from fsdp.checkpoint.formats.source import (
    Chunk,
    ChunkedTensor,
    LazyTensor,
    Source,
    are_all_of,
    is_lazy,
    is_tensor,
    memory_of,
)
from fsdp.checkpoint.formats.torch_file import Foreign, TorchArchive, shown
from fsdp.checkpoint.formats.trees import DEFAULT, Choices, Paths
from fsdp.engine.boxes import Box
from fsdp.engine.names import plain_name

_FLAT = "_flat_param"
_MODELS = ("model", "state_dict", "model_state_dict", "module")


def has_fsdp1_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether there are files of ranks at a path with sharded or local state dicts."""
    for file in likely_files(path):
        with suppress(OSError, ValueError):
            content = TorchArchive(file).content
            inside = [content, *content.values()] if isinstance(content, Mapping) else []
            dicts = [each for each in inside if isinstance(each, Mapping) and not is_optimizer_state(each)]
            if any(map(_has_shards, dicts)):
                return True
    return False


def _has_shards(state_dict: Mapping[Any, Any]) -> bool:
    return _is_local(state_dict) or any(map(_is_sharded, state_dict.values()))


def _is_local(state_dict: Mapping[Any, Any]) -> bool:
    """Return whether flat parameters are in it, as LOCAL_STATE_DICT has them."""
    return any(str(key).rpartition(".")[2] == _FLAT for key in state_dict)


def open_fsdp1(path: Paths, choices: Choices = DEFAULT) -> Source:
    """Open a file or ranks' files of FSDP1; close it when it is read."""
    ranks = RankFiles(path, choices)
    files = ranks.files
    key = _model_key(files[0])
    models = [] if key is None and not _is_state_dict(files[0].content) else [_model(file, key) for file in files]
    if models and _is_local(models[0]):
        raise ValueError(
            f"{files[0]} has flat parameters of LOCAL_STATE_DICT in it, and nothing in it says which parameters they "
            "are made of. Load it with FSDP1 on as many ranks, and save SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    found = _whole(models, files)
    saved = ranks.optimizers()
    state = _state(saved, choices.param_order, found) if saved else None
    values = {} if key is None else ranks.values([key])
    if not models:
        ranks.notes.append("there are no weights of a model in it")
    world_size = len(files) if models and _has_shards(models[0]) else None
    return ranks.source("fsdp1", found, saved, state, values, world_size=world_size)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and not is_optimizer_state(value)
        and any(is_tensor(each) or _is_sharded(each) for each in value.values())
        and all(isinstance(key, str) for key in value)
    )


def _model_key(file: TorchArchive) -> str | None:
    """Return the key under which the model is; None if it is not under one."""
    if not isinstance(file.content, Mapping):
        raise ValueError(f"{file} has a {shown(file.content)} in it, not a dict")
    if _is_state_dict(file.content) or is_optimizer_state(file.content):
        return None
    found = [key for key, value in file.content.items() if _is_state_dict(value)]
    found = [key for key in found if key in _MODELS] or found
    if len(found) > 1:
        raise ValueError(f"{file} has several state dicts, {', '.join(found)}: save the one that is meant as 'model'")
    return found[0] if found else None


def _model(file: TorchArchive, key: str | None) -> Mapping[str, Any]:
    found = file.content if key is None else file.content.get(key) if isinstance(file.content, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} has no state dict of the model{'' if key is None else f' under {key!r}'}")
    return {plain_name(name): value for name, value in found.items()}


def _whole(models: Sequence[Mapping[str, Any]], files: Sequence[TorchArchive]) -> dict[str, Any]:
    """Return the tensors by name; those that lie in the same memory are one."""
    found: dict[str, Any] = {}
    known: dict[Any, LazyTensor] = {}
    for name, value in models[0].items() if models else ():
        missing = [file for model, file in zip(models, files, strict=True) if name not in model]
        if missing:
            raise ValueError(f"{missing[0]} has no {name}, and {files[0]} has: they are of different models")
        if not (is_tensor(value) or _is_sharded(value)):
            found[name] = value
            continue
        each = _merged(name, [model[name] for model in models], [file.path for file in files])
        chunks = each.chunks if isinstance(each, ChunkedTensor) else ()
        found[name] = known.setdefault(tuple(memory_of(chunk.tensor) for chunk in chunks) or memory_of(each), each)
    return found


def _state(saved: Sequence[SavedOptimizer], order: Sequence[str] | None, model: Mapping[str, Any]) -> NamedState:
    """Return an optimizer's state that goes by names."""
    first = saved[0]
    names = names_by_key(str(first), first.content, order, plain_name)
    state = NamedState(str(first))
    for number, name in names.items():
        entries = [each.content["state"].get(number) or {} for each in saved]
        shape = model[name].shape if is_lazy(model.get(name)) else torch.Size([1])
        for key, value in entries[0].items():
            missing = [file for file, entry in zip(saved, entries, strict=True) if key not in entry]
            if missing:
                raise ValueError(f"{missing[0]} has no '{key}' of {name}, and {first} has")
            values = [entry[key] for entry in entries]
            if not _is_sharded(value) and is_single(key, value, shape):
                state.add_single([name], key, values)
            else:
                each = _merged(f"{name}/{key}", values, [each.file.path for each in saved])
                if name in model and each.shape != shape:
                    raise ValueError(state.odd_shape(name, key, each.shape, shape))
                state.add_elements(name, key, each)
    state.groups = [(group, [names[number] for number in group["params"]]) for group in first.content["param_groups"]]
    return state


def _is_sharded(value: Any) -> bool:
    """Return whether it is one rank's shard of a tensor."""
    return _is_sharded_tensor(value) or _is_of_torch(value, "DTensor")


def _is_sharded_tensor(value: Any) -> bool:
    return _is_of_torch(value, "ShardedTensor")


def _is_of_torch(value: Any, name: str) -> bool:
    if not isinstance(value, Foreign):
        return False
    module, _, last = value.origin.rpartition(".")
    return last == name and f"{module}.".startswith("torch.distributed.")


def _merged(name: str, values: Sequence[Any], files: Sequence[str]) -> LazyTensor:
    """Return a tensor of which each file has a shard, or all files all of it."""
    first = values[0]
    if not _is_sharded(first):
        return first
    shape, _ = _shards_of(name, first, files[0])
    chunks: dict[Box, Chunk] = {}  # replicas have the same
    for value, file in zip(values, files, strict=True):
        other, found = _shards_of(name, value, file) if _is_sharded(value) else (None, [])
        if other != shape:
            raise ValueError(
                f"{name} in {file} is another tensor than in {files[0]}, which has shards of {list(shape)}"
            )
        for chunk in found:
            if tuple(chunk.tensor.shape) != chunk.box.sizes:
                raise ValueError(f"{name} in {file} has shape {list(chunk.tensor.shape)}, not {list(chunk.box.sizes)}")
            chunks.setdefault(chunk.box, chunk)
    if not are_all_of(shape, chunks.keys()):
        held = sum(box.numel for box in chunks)
        raise ValueError(
            f"{name}: the {len(files)} files given have {held} of its {shape.numel()} elements, or some twice. A "
            "rank's file is missing, or one is of another number of ranks."
        )
    dtype = next((chunk.tensor.dtype for chunk in chunks.values()), None) or _dtype_of(first)
    return ChunkedTensor(dtype, shape, [chunk for chunk in chunks.values() if chunk.box.numel])


def _shards_of(name: str, value: Any, file: str) -> tuple[torch.Size, list[Chunk]]:
    """Return the shape of an unsharded tensor, and its shards in a file."""
    try:
        if _is_sharded_tensor(value):
            return torch.Size(value.state[1].fields["size"]), [_chunk(each.fields) for each in value.state[0]]
        shape = torch.Size(value.args[2])
        return shape, [_rows(name, value, shape, file)]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name} in {file} is a {value.origin} of a form that is not known here ({error!r}): load it with the "
            "version of torch that has written it, and save FULL_STATE_DICT"
        ) from None


def _dtype_of(value: Any) -> torch.dtype:
    if not _is_sharded_tensor(value):
        return value.args[1]
    properties = value.state[1].fields["tensor_properties"]
    return properties.state[0] if isinstance(properties.state, tuple) else properties.state["dtype"]


def _chunk(shard: Mapping[str, Any]) -> Chunk:
    """Return a shard in a `ShardedTensor`."""
    where = shard["metadata"].fields
    return Chunk(Box(tuple(where["shard_offsets"]), tuple(where["shard_sizes"])), lambda: shard["tensor"])


def _rows(name: str, value: Any, shape: torch.Size, file: str) -> Chunk:
    """Return the shard in a `DTensor`."""
    local, spec = value.fields["_local_tensor"], value.fields["_spec"].fields
    kinds = [each.origin.rpartition(".")[2] for each in spec["placements"]]
    sharded = [dim for dim, kind in enumerate(kinds) if kind != "Replicate"]
    if not sharded:
        return Chunk(Box((0,) * len(shape), tuple(shape)), lambda: local)
    if len(sharded) > 1 or kinds[sharded[0]] != "Shard" or spec["placements"][sharded[0]].fields["dim"] != 0:
        dims = [each.fields.get("dim", "") for each in spec["placements"]]
        shown = ", ".join(f"{kind}({dim})" for kind, dim in zip(kinds, dims, strict=True))
        raise ValueError(
            f"{name} in {file} has placements {shown}, and FSDP1 shards the first dimension over one group of ranks: "
            "save such a model with torch.distributed.checkpoint"
        )
    ranks, number = _place_in_mesh(spec["mesh"].fields, sharded[0])
    rows = -(-shape[0] // ranks)  # as `torch.chunk`
    first, last = (min(each * rows, shape[0]) for each in (number, number + 1))
    return Chunk(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), lambda: local)


def _place_in_mesh(mesh: Mapping[str, Any], dim: int) -> tuple[int, int]:
    """Return the size of a dimension of a mesh, and this rank's place in it. Its form changes with torch's version."""
    if "mesh" in mesh:
        sizes = mesh["mesh"].shape
    else:
        layout = mesh["_layout"].fields
        sizes = [each.fields["shape"] for each in layout["axes"]] if "axes" in layout else layout["shape"]
    size = sizes[dim]
    return size if isinstance(size, int) else math.prod(size), mesh["_coordinate_on_dim"][dim]
