"""Folders of `accelerate`, or of the Trainer of `transformers`, with torch's FSDP: the optimizer is saved separately.

With ``SHARDED_STATE_DICT`` both are folders of `torch.distributed.checkpoint`, ``pytorch_model_fsdp_0`` and
``optimizer_0``. With ``FULL_STATE_DICT`` they are files of `torch.save`, ``pytorch_model_fsdp.bin`` and
``optimizer.bin``. The optimizer's state is keyed by names, with FSDP1 and with FSDP2.
"""

from __future__ import annotations

import hashlib
import os

from fsdp.checkpoint.formats.dcp import DcpFolder
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.formats.trees import Choices, source_of_tree
from fsdp.checkpoint.untrusted import reading

_MODEL, _OPTIMIZER = "model", "optimizer"
_SHARDED = {_MODEL: "pytorch_model_fsdp_0", _OPTIMIZER: "optimizer_0"}
_FULL = {_MODEL: "pytorch_model_fsdp.bin", _OPTIMIZER: "optimizer.bin"}


def is_accelerate(path: str) -> bool:
    return bool(_saved(path))


def _saved(path: str) -> list[dict[str, str]]:
    """Return the existing paths of the model and the optimizer for each kind of save, complete or not."""
    found = []
    for names, is_there in ((_SHARDED, os.path.isdir), (_FULL, os.path.isfile)):
        places = {part: os.path.join(path, name) for part, name in names.items()}
        if is_there(places[_MODEL]):
            found.append({part: place for part, place in places.items() if os.path.lexists(place)})
    return found


def parts_of(path: str, only: str | None = None) -> dict[str, DcpFolder | TorchArchive]:
    """Open the model and the optimizer, if it exists; `only` selects one of them."""
    places, *others = _saved(path)
    if others:
        models = f"{places[_MODEL]} and {others[0][_MODEL]}"
        raise ValueError(f"{models} are two saves of a model in one folder: move the older one to another folder")
    return {
        part: DcpFolder(place) if os.path.isdir(place) else TorchArchive(place)
        for part, place in places.items()
        if only in (None, part)
    }


def read_accelerate(path: str, choices: Choices) -> Source:
    parts = parts_of(path, choices.only)
    tree, identities, world_size = {}, [], None
    for part, found in parts.items():
        with reading(found.path):
            if isinstance(found, DcpFolder):
                tree[part], world_size = found.tree()[part], found.world_size
            else:
                tree[part] = found.content
            identities.append(found.identity)
    identity = hashlib.sha256("".join(identities).encode()).hexdigest()
    with reading(path):
        return source_of_tree("accelerate", path, tree, choices, world_size=world_size, identity=identity)
