"""Which format a checkpoint is of, and what reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from fsdp.checkpoint.folder import newest
from fsdp.checkpoint.formats.dcp import is_dcp, read_dcp
from fsdp.checkpoint.formats.examine import (
    Examined,
    Start,
    examine_dcp,
    examine_ours,
    examine_ranks,
    examine_safetensors,
    examine_torch,
)
from fsdp.checkpoint.formats.fairscale import is_fairscale, read_fairscale
from fsdp.checkpoint.formats.files import is_ours, is_safetensors, is_torch, read_ours, read_safetensors, read_torch
from fsdp.checkpoint.formats.fsdp1 import has_fsdp1_shards, read_fsdp1
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.untrusted import reading


class Format(NamedTuple):
    """What reads a format.

    Attributes:
        word: for it, on the command line.
        what: it is.
        is_at: whether a path is one, as far as can be seen without reading it.
        read: it, with what the user has said of it.
        examine: it from end to end, telling a function how many bytes were read.
    """

    word: str
    what: str
    is_at: Callable[[str], bool]
    read: Callable[[str, Choices], Source]
    examine: Callable[[str, Start], Examined]


# The first that fits is taken.
FORMATS = (
    Format("fsdp", "a folder of fsdp.save", is_ours, read_ours, examine_ours),
    Format("dcp", "a folder of torch.distributed.checkpoint", is_dcp, read_dcp, examine_dcp),
    Format(
        "fairscale",
        "a file of each rank, with FairScale's local_state_dict() and local_metadata_dict()",
        is_fairscale,
        read_fairscale,
        examine_ranks,
    ),
    Format(
        "fsdp1",
        "a file of each rank, with sharded state dicts of torch's FSDP1",
        has_fsdp1_shards,
        read_fsdp1,
        examine_ranks,
    ),
    Format("torch", "a file of torch.save", is_torch, read_torch, examine_torch),
    Format(
        "safetensors",
        "a file of the safetensors library, an index of several, or a folder with either",
        is_safetensors,
        read_safetensors,
        examine_safetensors,
    ),
)
WORDS = tuple(each.word for each in FORMATS)


def open_source(path: str | os.PathLike[str], word: str | None = None, choices: Choices | None = None) -> Source:
    """A checkpoint of any format. Nothing is in memory of it but what is no tensor.

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
    """The format of what is at a path.

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
