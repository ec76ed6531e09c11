"""Local state dicts of FSDP1: parts of flat parameters, and from a state dict of the plain model what is in them.

A unit's flat parameter has the parameters of its modules, but for those of units inside, in the order in which modules
list them, one after the other; a rank has a part of it, without what pads it. With that said in FairScale's metadata,
these are shards like FairScale's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.formats.consolidate import Shard, put_together
from fsdp.checkpoint.formats.saved_shards import dtype_of, is_sharded_tensor, parts_of
from fsdp.checkpoint.formats.stitched import is_tensor, memory_of
from fsdp.checkpoint.formats.torch_archive import TorchArchive
from fsdp.engine.names import join, plain_name

_FLAT = "_flat_param"


def is_flat(state_dict: Mapping[Any, Any]) -> bool:
    """Whether it has flat parameters in it."""
    return any(str(key).rpartition(".")[2] == _FLAT for key in state_dict)


@dataclass(frozen=True)
class FlatShards:
    """Shards of all ranks.

    Attributes:
        shards: with metadata.
        aliases: second names of tied parameters.
        order: the places of all names in the plain model.
    """

    shards: list[Shard]
    aliases: Mapping[str, str]
    order: Mapping[str, int]

    def put_together(self) -> dict[str, Any]:
        """See `fsdp.checkpoint.formats.consolidate.put_together`."""
        found = put_together(self.shards, True, True)
        found |= {name: found[first] for name, first in self.aliases.items() if first in found}
        return {name: found[name] for name in sorted(found, key=lambda name: self.order.get(name, len(self.order)))}


def with_metadata(
    models: Sequence[Mapping[str, Any]],
    files: Sequence[str],
    like: Mapping[str, Any] | str | os.PathLike[str] | None,
) -> FlatShards:
    """The shards of all ranks, and what is in them.

    Args:
        models: local state dicts, by plain names.
        files: their names.
        like: a state dict of the plain model, or its file.

    Raises:
        ValueError: if there is none, or if it is of another model; says what to do.
    """
    if like is None:
        raise ValueError(
            f"{files[0]} has flat parameters of LOCAL_STATE_DICT in it, and nothing in it says which parameters they "
            "are made of. Give a state dict of the plain model, whose names and shapes are enough: torch.save(Model()."
            "state_dict(), 'names.pt'), and name the file (--like). Or load it with FSDP1 on as many ranks, and save "
            "FULL_STATE_DICT."
        )
    title = "the state dict of the model" if isinstance(like, Mapping) else os.fspath(like)
    plain = like if isinstance(like, Mapping) else TorchArchive(title).content
    units = [name[: -len(_FLAT)].rstrip(".") for name in models[0] if name.rpartition(".")[2] == _FLAT]
    inside: dict[str, list[tuple[str, torch.Size]]] = {path: [] for path in units}
    known: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in ((plain_name(key), value) for key, value in plain.items()):
        if name in models[0] or not is_tensor(tensor):
            continue  # buffers, and what was ignored
        is_meta = isinstance(tensor, Tensor) and tensor.is_meta
        place = tensor.untyped_storage()._cdata if is_meta else memory_of(tensor)
        first = known.setdefault(place, name)
        if first != name:
            aliases[name] = first
            continue
        path = max((path for path in units if not path or name.startswith(f"{path}.")), key=len, default=None)
        if path is None:
            raise ValueError(f"{title} has {name}, which is in no unit of {files[0]} ({', '.join(units)})")
        inside[path].append((name[len(path) + 1 if path else 0 :], tensor.shape))
    return FlatShards(
        [
            Shard(file, *_described(model, inside, units, file, title))
            for model, file in zip(models, files, strict=True)
        ],
        aliases,
        {plain_name(name): place for place, name in enumerate(plain)},
    )


def _described(
    model: Mapping[str, Any],
    inside: Mapping[str, Sequence[tuple[str, torch.Size]]],
    units: Sequence[str],
    file: str,
    title: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rank's weights and metadata as FairScale has them."""
    weights, entries = dict(model), []
    for path in units:
        key = join(path, _FLAT)
        value = model.get(key)
        if not is_sharded_tensor(value):
            raise ValueError(f"{file}: {key} is a {type(value).__name__}, not a ShardedTensor")
        shape, parts = parts_of(key, value, file)
        wanted = sum(size.numel() for _, size in inside[path])
        if shape.numel() != wanted:
            raise ValueError(
                f"{key} in {file} is of {shape.numel()} elements, and the parameters of that unit in {title} have "
                f"{wanted} ({', '.join(name for name, _ in inside[path][:3])}, ...): it is of another model, or was "
                "saved with use_orig_params=True, which leaves gaps that only FSDP1 knows. Load it with FSDP1 and save "
                "FULL_STATE_DICT."
            )
        weights[key] = parts[0].values if parts else torch.empty(0, dtype=dtype_of(value))
        params = {
            "names": [name for name, _ in inside[path]],
            "shapes": [size for _, size in inside[path]],
            "numels": [size.numel() for _, size in inside[path]],
            "padding": 0,
        }
        entries.append(
            {
                "fsdp_path": path,
                "params": {_FLAT: params},
                "no_broadcast_optim_state": False,
                "shared_param_info": [],
            }
        )
    beside = [name for name in model if name.rpartition(".")[2] not in (_FLAT, "_extra_state")]
    return weights, {"param_metadata": entries, "buffer_names": beside}
