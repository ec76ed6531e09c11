"""The formats of checkpoints: detecting the format at a path, opening a checkpoint, and reading it completely."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from fsdp.checkpoint.folder import found as found_ours
from fsdp.checkpoint.folder import is_left_behind, newest
from fsdp.checkpoint.formats.accelerate_folder import is_accelerate, parts_of, read_accelerate
from fsdp.checkpoint.formats.dcp import DcpFolder, is_dcp, read_dcp
from fsdp.checkpoint.formats.fairscale import is_fairscale, open_fairscale
from fsdp.checkpoint.formats.plain_folder import plain_optimizer, read_plain
from fsdp.checkpoint.formats.rank_files import has_fsdp1_shards, open_fsdp1, rank_files
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_file import TorchArchive, is_torch_file
from fsdp.checkpoint.formats.trees import DEFAULT, Choices, source_of_tree
from fsdp.checkpoint.manifest import examine_ours, read_ours
from fsdp.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX, SafetensorsFiles
from fsdp.checkpoint.untrusted import reading

Start = Callable[[int], Callable[[int], None]]  # receives the number of bytes, returns a progress callback
_SAFETENSORS_ENDINGS = (SUFFIX, INDEX_SUFFIX)


class Format(NamedTuple):
    """A format of checkpoints."""

    word: str  # on the command line
    what: str  # for messages
    is_at: Callable[[str], bool]  # detects the format without reading all data
    read: Callable[[str, Choices], Source]
    # Reads a whole checkpoint and appends all errors to a list; returns its size and a description of the check.
    examine: Callable[[str, Start, list[str]], tuple[int, str]]


def _is_safetensors(path: str) -> bool:
    if os.path.isdir(path):
        return not is_left_behind(path) and any(name.endswith(_SAFETENSORS_ENDINGS) for name in os.listdir(path))
    return path.endswith(_SAFETENSORS_ENDINGS)


def _read_safetensors(path: str, choices: Choices) -> Source:
    optimizer = plain_optimizer(path)
    if optimizer is not None and choices.param_order is not None:
        return read_plain(path, optimizer, choices)
    files = SafetensorsFiles(path)
    beside = os.path.join(os.path.dirname(files.path), f"optimizer{SUFFIX}")
    notes = [f"{beside} is left out: it is no model"] if os.path.isfile(beside) and beside != files.path else []
    if optimizer is not None:
        notes.append(f"{optimizer} is left out: pass the names of its parameters (--param-order)")
    return Source("safetensors", files.path, files, notes=tuple(notes))


def _examine_safetensors(path: str, start: Start, problems: list[str]) -> tuple[int, str]:
    files = SafetensorsFiles(path)
    problems += files.damaged(start(files.nbytes))
    return files.nbytes, "headers and sizes agree, and all can be read; the format has no checksums"


def _examine_archives(
    parts: Iterable[DcpFolder | TorchArchive | str], start: Start, problems: list[str]
) -> tuple[int, str]:
    """Examine archives of `torch.save` in folders and files, using torch's checksums if there are any."""
    archives: list[Callable[[], TorchArchive]] = []
    nbytes, have_checksums = 0, True
    for part in parts:
        if isinstance(part, DcpFolder):
            problems += part.misplaced()
            archives += part.archives()
            nbytes += part.nbytes
        else:
            archives.append(partial(TorchArchive, str(part)))
            nbytes += os.path.getsize(str(part))
    advance = start(nbytes)
    for opener in archives:
        try:
            archive = opener()
            archive.content  # noqa: B018 (which is read now)
        except ValueError as error:
            problems.append(str(error))
        else:
            have_checksums &= archive.has_checksums
            problems += archive.damaged(advance)
    if have_checksums:
        return nbytes, "all data matches torch's checksums"
    return nbytes, "all can be read; there are no checksums, since it was saved without them"


def _examine_ranks(path: str, start: Start, problems: list[str]) -> tuple[int, str]:
    files = rank_files(path)
    nbytes, how = _examine_archives(files, start, problems)
    return nbytes, f"in {len(files)} files, {how}"


# The first matching format is used.
FORMATS = (
    Format(
        "fsdp",
        "a folder of fsdp.save",
        lambda path: found_ours(path) is not None,
        lambda path, choices: read_ours(path, with_optimizer=choices.only != "model"),
        examine_ours,
    ),
    Format(
        "dcp",
        "a folder of torch.distributed.checkpoint",
        is_dcp,
        read_dcp,
        lambda path, *how: _examine_archives([DcpFolder(path)], *how),
    ),
    Format(
        "accelerate",
        "a folder of accelerate, or of the Trainer of transformers, with torch's FSDP",
        is_accelerate,
        read_accelerate,
        lambda path, *how: _examine_archives(parts_of(path).values(), *how),
    ),
    Format(
        "fairscale",
        "a file of each rank, with FairScale's local_state_dict() and local_metadata_dict()",
        is_fairscale,
        open_fairscale,
        _examine_ranks,
    ),
    Format(
        "fsdp1",
        "a file of each rank, with sharded state dicts of torch's FSDP1",
        has_fsdp1_shards,
        open_fsdp1,
        _examine_ranks,
    ),
    Format(
        "torch",
        "a file of torch.save",
        lambda path: os.path.isfile(path) and is_torch_file(path),
        lambda path, choices: source_of_tree("torch", path, TorchArchive(path).content, choices),
        lambda path, *how: _examine_archives([path], *how),
    ),
    Format(
        "safetensors",
        "a file of the safetensors library, an index of several, or a folder with either",
        _is_safetensors,
        _read_safetensors,
        _examine_safetensors,
    ),
)
WORDS = tuple(each.word for each in FORMATS)


def open_source(path: str | os.PathLike[str], word: str | None = None, choices: Choices | None = None) -> Source:
    """Open a checkpoint of any format, or of the format `word`. Tensors are not loaded into memory."""
    place, given = os.fspath(path), choices or DEFAULT
    found = format_of(place, word)
    if given.optimizer_files is not None and found.word not in ("fairscale", "fsdp1"):
        raise ValueError(f"{place} has the format {found.word}, but --optimizer-files is for fairscale and fsdp1")
    with reading(place):
        return found.read(place, given)


def examine(found: Format, path: str, start: Start) -> tuple[list[str], int, str]:
    """Read a whole checkpoint, and return all errors, the number of bytes, and a description of the check.

    `start` receives the number of bytes to read, and returns a function that receives the progress.
    """
    problems: list[str] = []
    try:
        nbytes, how = found.examine(path, start, problems)
    except (ValueError, FileNotFoundError) as error:
        return [*problems, str(error)], 0, ""
    return problems, nbytes, "" if problems else how


def format_of(path: str, word: str | None = None) -> Format:
    found = next((each for each in FORMATS if (each.is_at(path) if word is None else each.word == word)), None)
    if found is not None:
        # After a killed save, a checkpoint has a temporary name; files of ranks have only a common prefix.
        if not os.path.lexists(path) and not found.is_at(path):
            raise FileNotFoundError(f"{path}: there is no such file or folder")
        return found
    if word is not None:
        raise ValueError(f"there is no format {word!r}: the formats are {', '.join(WORDS)}")
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    last = newest(path) if os.path.isdir(path) else None
    if last is not None:
        raise ValueError(f"{path} is a folder of several checkpoints: pass one of them, such as {last}")
    formats = ", ".join(each.what for each in FORMATS)
    raise ValueError(f"{path} is not a complete checkpoint of a supported format ({formats})")
