"""The formats of checkpoints: telling which one is at a path, and opening it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from fsdp.checkpoint.folder import found as found_ours
from fsdp.checkpoint.folder import is_left_behind, newest
from fsdp.checkpoint.formats.dcp import is_dcp, read_dcp
from fsdp.checkpoint.formats.fairscale import is_fairscale, open_fairscale
from fsdp.checkpoint.formats.fsdp1 import has_fsdp1_shards, open_fsdp1
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_file import TorchArchive, is_torch_file
from fsdp.checkpoint.formats.trees import Choices, source_of_tree
from fsdp.checkpoint.formats.verify import (
    Examined,
    Start,
    examine_dcp,
    examine_ours,
    examine_ranks,
    examine_safetensors,
    examine_torch,
)
from fsdp.checkpoint.manifest import read_ours
from fsdp.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX, SafetensorsFiles
from fsdp.checkpoint.untrusted import reading


class Format(NamedTuple):
    """A format of checkpoints.

    Attributes:
        word: its name on the command line.
        what: a description for messages.
        is_at: returns whether there is one at a path, as far as can be seen without reading it.
        read: opens it, with what the user has said of it.
        examine: reads it from end to end, telling a function how many bytes were read.
    """

    word: str
    what: str
    is_at: Callable[[str], bool]
    read: Callable[[str, Choices], Source]
    examine: Callable[[str, Start], Examined]


# --- readers --------------------------------------------------------------------------------------------------------

_SAFETENSORS_ENDINGS = (SUFFIX, INDEX_SUFFIX)


def _is_ours(path: str) -> bool:
    return found_ours(path) is not None


def _of_ranks(opener: Callable[..., Source]) -> Callable[[str, Choices], Source]:
    """Return how a checkpoint of a file for each rank is opened with what the user has said of it."""

    def read(path: str, choices: Choices) -> Source:
        choices.refuse_keys(path)
        return opener(
            path,
            optimizer=choices.optimizer_files,
            optimizer_params=choices.param_order,
            with_optimizer=choices.only != "model",
        )

    return read


def _read_ours(path: str, choices: Choices) -> Source:
    return read_ours(path, with_optimizer=choices.only != "model")


def _is_safetensors(path: str) -> bool:
    if os.path.isdir(path):
        return not is_left_behind(path) and any(name.endswith(_SAFETENSORS_ENDINGS) for name in os.listdir(path))
    return path.endswith(_SAFETENSORS_ENDINGS)


def _read_safetensors(path: str, choices: Choices) -> Source:
    files = SafetensorsFiles(path)
    beside = os.path.join(os.path.dirname(files.path), f"optimizer{SUFFIX}")
    notes = [f"{beside} is left out: it is no model"] if os.path.isfile(beside) and beside != files.path else []
    return Source("safetensors", files.path, files, notes=tuple(notes))


def _is_torch(path: str) -> bool:
    return os.path.isfile(path) and is_torch_file(path)


def _read_torch(path: str, choices: Choices) -> Source:
    """Open the state of a model, or a dictionary with it and that of an optimizer.

    Nothing in it is executed. What is no number, text, container or tensor is left out, and notes say so.
    """
    return source_of_tree("torch", path, TorchArchive(path).content, choices)


# The first that fits is taken.
FORMATS = (
    Format("fsdp", "a folder of fsdp.save", _is_ours, _read_ours, examine_ours),
    Format("dcp", "a folder of torch.distributed.checkpoint", is_dcp, read_dcp, examine_dcp),
    Format(
        "fairscale",
        "a file of each rank, with FairScale's local_state_dict() and local_metadata_dict()",
        is_fairscale,
        _of_ranks(open_fairscale),
        examine_ranks,
    ),
    Format(
        "fsdp1",
        "a file of each rank, with sharded state dicts of torch's FSDP1",
        has_fsdp1_shards,
        _of_ranks(open_fsdp1),
        examine_ranks,
    ),
    Format("torch", "a file of torch.save", _is_torch, _read_torch, examine_torch),
    Format(
        "safetensors",
        "a file of the safetensors library, an index of several, or a folder with either",
        _is_safetensors,
        _read_safetensors,
        examine_safetensors,
    ),
)
WORDS = tuple(each.word for each in FORMATS)


# --- any of them ----------------------------------------------------------------------------------------------------


def open_source(path: str | os.PathLike[str], word: str | None = None, choices: Choices | None = None) -> Source:
    """Open a checkpoint of any format. Nothing of it is in memory but what is no tensor.

    Args:
        path: the file or folder.
        word: for its format; None to look.
        choices: what there is to say of it.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if it is of no format that is known, or damaged.
        OSError: if it cannot be read.
    """
    place, given = os.fspath(path), choices or Choices()
    found = format_of(place, word)
    if given.optimizer_files is not None and found.word not in ("fairscale", "fsdp1"):
        raise ValueError(f"{place} is of the format {found.word}, and --optimizer-files is for fairscale and fsdp1")
    with reading(place):
        return found.read(place, given)


def format_of(path: str, word: str | None = None) -> Format:
    """Return the format of what is at a path.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if it is of no format that is known.
    """
    found = next((each for each in FORMATS if (each.is_at(path) if word is None else each.word == word)), None)
    if found is not None:
        # A checkpoint that was being replaced is beside its place, and files of ranks have a name in common.
        if not os.path.lexists(path) and not found.is_at(path):
            raise FileNotFoundError(f"{path}: there is no such file or folder")
        return found
    if word is not None:
        raise ValueError(f"there is no format {word!r}: those are {', '.join(WORDS)}")
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    last = newest(path) if os.path.isdir(path) else None
    if last is not None:
        raise ValueError(f"{path} is a folder of several checkpoints: name one, as {last}")
    formats = ", ".join(each.what for each in FORMATS)
    raise ValueError(f"{path} is no complete checkpoint of a format that is known here ({formats})")
