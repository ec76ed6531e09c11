"""Readers of our own checkpoints, of plain safetensors files, and of files of `torch.save`."""

from __future__ import annotations

import os

from fsdp.checkpoint.folder import found as found_ours
from fsdp.checkpoint.folder import is_left_behind
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_archive import TorchArchive, is_torch_file
from fsdp.checkpoint.formats.trees import Choices, source_of_tree
from fsdp.checkpoint.manifest import Manifest, complete
from fsdp.checkpoint.safetensors import INDEX_SUFFIX, SafetensorsFiles
from fsdp.checkpoint.safetensors_writer import SUFFIX

_SAFETENSORS_ENDINGS = (SUFFIX, INDEX_SUFFIX)


def is_ours(path: str) -> bool:
    """Whether `fsdp.save` has completed a checkpoint there."""
    return found_ours(path) is not None


def read_ours(path: str, choices: Choices) -> Source:
    """A folder that `fsdp.save` has written. What is read of it is compared with its checksums.

    Raises:
        FileNotFoundError: if there is no complete one.
        ValueError, OSError: if it is damaged or cannot be read.
    """
    folder = complete(path)
    manifest = Manifest.read(folder)
    model = manifest.model.opened_in(folder)
    is_wanted = manifest.optimizer is not None and choices.only != "model"
    optimizer = manifest.optimizer.opened_in(folder) if manifest.optimizer is not None and is_wanted else None
    return Source(
        "fsdp",
        folder,
        model,
        optimizer,
        manifest.optimizer_rest if is_wanted else None,
        manifest.extra,
        manifest.values,
        world_size=manifest.world_size,
        generators=manifest.generators,
        identity=manifest.digest,
    )


def is_safetensors(path: str) -> bool:
    """Whether there is a safetensors file or index, or a folder that has one."""
    if os.path.isdir(path):
        return not is_left_behind(path) and any(name.endswith(_SAFETENSORS_ENDINGS) for name in os.listdir(path))
    return path.endswith(_SAFETENSORS_ENDINGS)


def read_safetensors(path: str, choices: Choices) -> Source:
    """A safetensors file, an index, or a folder that has one of these: a model.

    Raises:
        ValueError, OSError: if it is damaged or cannot be read.
    """
    files = SafetensorsFiles(path)
    beside = os.path.join(os.path.dirname(files.path), f"optimizer{SUFFIX}")
    notes = [f"{beside} is left out: it is no model"] if os.path.isfile(beside) and beside != files.path else []
    return Source("safetensors", files.path, files, notes=tuple(notes))


def is_torch(path: str) -> bool:
    """Whether there is a file of `torch.save`, damaged perhaps."""
    return os.path.isfile(path) and is_torch_file(path)


def read_torch(path: str, choices: Choices) -> Source:
    """A file of `torch.save`: the state of a model, or a dictionary with it and that of an optimizer.

    Nothing in it is executed. What is no number, text, container or tensor is left out, and notes say so.

    Raises:
        ValueError: if it is damaged, or its model or optimizer cannot be made out.
        OSError: if it cannot be read.
    """
    return source_of_tree("torch", path, TorchArchive(path).content, choices)
