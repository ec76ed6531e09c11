"""Folders that `accelerate` writes with torch's FSDP, for the Trainer of `transformers` too: model and optimizer apart.

With ``SHARDED_STATE_DICT`` both are folders of `torch.distributed.checkpoint`, ``pytorch_model_fsdp_0`` and
``optimizer_0``. With ``FULL_STATE_DICT`` they are files of `torch.save`, ``pytorch_model_fsdp.bin`` and
``optimizer.bin``. The parameters of the optimizer go by names, with FSDP1 and with FSDP2.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

from fsdp.checkpoint.formats.dcp import DcpFolder, is_dcp
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_file import TorchArchive, is_torch_file
from fsdp.checkpoint.formats.trees import Choices, source_of_tree
from fsdp.checkpoint.untrusted import reading

_MODEL, _OPTIMIZER = "model", "optimizer"
_SHARDED = {_MODEL: "pytorch_model_fsdp_0", _OPTIMIZER: "optimizer_0"}
_FULL = {_MODEL: "pytorch_model_fsdp.bin", _OPTIMIZER: "optimizer.bin"}


def is_accelerate(path: str) -> bool:
    return _MODEL in _places(path)


def _places(path: str) -> dict[str, str]:
    """Return the paths of the model and of the optimizer, as far as they are there."""
    sharded = {part: os.path.join(path, name) for part, name in _SHARDED.items()}
    if is_dcp(sharded[_MODEL]):
        return {part: place for part, place in sharded.items() if is_dcp(place)}
    full = {part: os.path.join(path, name) for part, name in _FULL.items()}
    return {part: place for part, place in full.items() if os.path.isfile(place) and is_torch_file(place)}


def parts_of(path: str) -> dict[str, DcpFolder | TorchArchive]:
    """Open the model and the optimizer, if that is there."""
    return {
        part: DcpFolder(place) if os.path.isdir(place) else TorchArchive(place) for part, place in _places(path).items()
    }


def read_accelerate(path: str, choices: Choices) -> Source:
    parts = parts_of(path)
    if choices.only == _MODEL:
        parts.pop(_OPTIMIZER, None)
    tree, identities, world_size = {}, [], None
    for part, found in parts.items():
        with reading(found.path):
            if isinstance(found, DcpFolder):
                if (problem := next(found.misplaced(), None)) is not None:
                    raise ValueError(f"{problem}. Load another checkpoint.")
                tree[part], world_size = found.tree()[part], found.world_size
            else:
                tree[part] = found.content
            identities.append(found.identity)
    with reading(path):
        source = source_of_tree("accelerate", path, tree, choices)
    identity = hashlib.sha256("".join(identities).encode()).hexdigest()
    return replace(source, world_size=world_size, identity=identity)
