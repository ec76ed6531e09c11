"""The manifest of a checkpoint, ``checkpoint.json``: the files, the checksums, and all data other than tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdp.checkpoint.checksums import BLOCK_BYTES, Fragment, HoleError, as_text, by_name, crc32, of_tensor
from fsdp.checkpoint.folder import MANIFEST, OURS, found, place_of, steps
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.optim import check_rest
from fsdp.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX, CheckedFiles, Entry, PlannedFile, create, plan
from fsdp.checkpoint.untrusted import beside, content_of, opened, reading, short

VERSION = 1
_FORMAT = "fsdp checkpoint"
_STEMS = ("model", "optimizer")
_KEYS = ("world_size", *_STEMS, "optimizer_rest", "kinds", "extra", "generators", "values")
_ATTEMPTS = 10  # to open a checkpoint while another process replaces it
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class TensorFiles:
    """A set of tensors in a single safetensors file or in multiple files."""

    stem: str  # the first part of the file names
    files: Mapping[str, Sequence[int]]  # by name: size of the file, size of its header, checksum
    checksums: Mapping[str, str]  # of each tensor's blocks, by name

    def damaged_heads(self, folder: str) -> Iterator[str]:
        """Yield errors for missing files, wrong sizes and damaged headers."""
        for name, (nbytes, head_nbytes, checksum) in self.files.items():
            path = beside(os.path.join(folder, MANIFEST), name)
            try:
                with opened(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    head = file.read(min(head_nbytes, size))
            except FileNotFoundError:
                yield f"{path} is missing"
                continue
            if size != nbytes:
                yield f"{path} has {size} bytes instead of {nbytes}"
            elif crc32(head) != checksum:
                yield f"{path}: its header is damaged"

    def opened_in(self, folder: str, stack: ExitStack) -> CheckedFiles:
        """Open the files in a checkpoint's folder, and register them on `stack`; ValueError if they are damaged."""
        problem = next(self.damaged_heads(folder), None)
        if problem is not None:
            raise ValueError(f"{problem}. Load another checkpoint.")
        files = CheckedFiles(os.path.join(folder, _entrance(self.stem, self.files)), self.checksums)
        stack.enter_context(files)
        files.hold()
        return files


def _entrance(stem: str, files: Collection[str]) -> str:
    """Return the name of the single file, or of the index of multiple files."""
    return f"{stem}{SUFFIX if len(files) == 1 else INDEX_SUFFIX}"


@dataclass(frozen=True)
class TensorSet:
    """Tensors to write, and the planned files that contain only these tensors."""

    stem: str
    entries: list[Entry]
    files: list[PlannedFile]

    @classmethod
    def planned(cls, stem: str, entries: list[Entry], max_file_bytes: int | None) -> TensorSet:
        return cls(stem, entries, plan(entries, stem, max_file_bytes))

    @property
    def own(self) -> dict[str, Entry]:
        """Return the tensors with values that this rank writes, by name."""
        return {entry.name: entry for entry in self.entries if entry.values is not None}

    def create(self, folder: str) -> None:
        for file in self.files:
            create(folder, file)

    def written(self, fragments: Iterable[Fragment]) -> TensorFiles:
        """Return the files with the checksums of the data written by all ranks."""
        known, checksums = by_name(fragments), {}
        for entry in self.entries:
            try:
                checksums[entry.name] = as_text(of_tensor(known.get(entry.name, {}), entry.nbytes))
            except HoleError as hole:
                raise RuntimeError(f"{hole} of {entry.name} were written by no rank") from None
        heads = {file.name: (file.nbytes, len(file.head), crc32(file.head)) for file in self.files}
        return TensorFiles(self.stem, heads, checksums)


def manifest_of(
    world_size: int, sets: Iterable[TensorFiles], *, optimizer_rest: Any, extra: Any, generators: Any, values: Any
) -> bytes:
    """Return the manifest of a checkpoint with these sets of tensors; for the other arguments, see `Source`."""
    files = {each.stem: {"files": dict(each.files), "crc32": dict(each.checksums)} for each in sets}
    content = {
        "format": _FORMAT,
        "version": VERSION,
        "world_size": world_size,
        "block_bytes": BLOCK_BYTES,
        **{stem: files.get(stem) for stem in _STEMS},
        "optimizer_rest": optimizer_rest,
        "extra": extra,
        "generators": generators,
        "values": values,
    }
    text = _text(content)
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}",\n"checkpoint":{text}}}\n'.encode()


def _read(folder: str) -> tuple[dict[str, Any], str]:
    """Return the content of the manifest of a complete checkpoint, with `TensorFiles` as sets, and its checksum.

    Raises:
        ValueError: if the manifest is damaged, or of a different version.
    """
    path = os.path.join(folder, MANIFEST)
    with reading(path):
        try:
            found = json.loads(content_of(path))
            content, digest = found["checkpoint"], found["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: it cannot be read: {error!r}") from None
        if hashlib.sha256(_text(content).encode()).hexdigest() != digest:
            raise ValueError(f"{path} is damaged: it does not match its checksum")
        if not isinstance(content, dict):
            raise ValueError(f"{path} is damaged: its content is {short(content)}")
        if content.get("format") != _FORMAT or content.get("version") != VERSION:
            raise ValueError(
                f"{path} is of version {short(content.get('version'))}, but this library supports version {VERSION}: "
                "load it with the version that saved it, or a newer one"
            )
        try:
            content["kinds"] = _check(content)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        for stem in _STEMS:
            content[stem] = content[stem] and TensorFiles(stem, content[stem]["files"], content[stem]["crc32"])
        return {key: content[key] for key in _KEYS}, digest


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _check(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of the optimizer's state; raise ValueError unless the contents have the form of `manifest_of`.

    An attacker who can write a file can also write its checksum, so all contents are validated before loading.
    """
    world_size, generators, extra = content.get("world_size"), content.get("generators"), content.get("extra")
    if not _is_count(world_size) or world_size == 0:
        raise ValueError(f"world_size is {short(world_size)}")
    if generators is not None and not (isinstance(generators, list) and len(generators) == world_size):
        raise ValueError(f"there are not {world_size} states of generators, one for each rank")
    if not isinstance(extra, dict):
        raise ValueError(f"extra is {short(extra)}")
    for stem in _STEMS:
        if stem == "model" or content.get(stem) is not None:
            _check_files(stem, content.get(stem))
    has_optimizer = content.get("optimizer") is not None
    kinds = check_rest(content.get("optimizer_rest"), content["optimizer"]["crc32"]) if has_optimizer else {}
    for place, value in (("values", content.get("values")), *extra.items()):
        try:
            decoded(value)
        except ValueError as error:
            raise ValueError(f"{short(place)}: {error}") from None
    return kinds


def _check_files(stem: str, content: Any) -> None:
    files, checksums = (content.get("files"), content.get("crc32")) if isinstance(content, dict) else (None, None)
    if not (isinstance(files, dict) and files and isinstance(checksums, dict)):
        raise ValueError(f"{stem} should have files and checksums, but is {short(content)}")
    for name, numbers in files.items():
        if not OURS.fullmatch(name) or not name.startswith(stem):
            raise ValueError(f"{stem} has a file {short(name)}, which is not a name of a checkpoint's files")
        if not (isinstance(numbers, list) and len(numbers) == 3 and all(map(_is_count, numbers))):
            raise ValueError(
                f"{name} has {short(numbers)} instead of its size, its header's size, and the header's checksum"
            )
    if _entrance(stem, files) not in files:
        raise ValueError(f"{stem} has the files {short(list(files))}, but none that lists its tensors")
    for name, text in checksums.items():
        if not isinstance(text, str):
            raise ValueError(f"the checksums of {short(name)} are {short(text)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def read_ours(path: str | os.PathLike[str], *, with_optimizer: bool = True) -> Source:
    """Open a folder of `fsdp.save`. Data is compared with the checksums during reading."""

    def look(folder: str, stack: ExitStack) -> Source:
        found, digest = _read(folder)
        sets: dict[str, TensorFiles | None] = {stem: found.pop(stem) for stem in _STEMS}
        if not with_optimizer or sets["optimizer"] is None:
            sets["optimizer"], found["optimizer_rest"], found["kinds"] = None, None, {}
        opened: dict[str, Any] = {stem: each and each.opened_in(folder, stack) for stem, each in sets.items()}
        return Source("fsdp", folder, **opened, **found, identity=digest)

    return _steadily(path, look)


def examine_ours(
    path: str | os.PathLike[str], start: Callable[[int], Callable[[int], object]], problems: list[str]
) -> tuple[int, str]:
    """Read a whole folder of `fsdp.save`, and append all errors to `problems`.

    Returns:
        The number of bytes of the tensors, which is also passed to `start` before reading, and a description of the
        check.
    """

    def look(folder: str, stack: ExitStack) -> tuple[list[str], list[CheckedFiles]]:
        content, opened, found = _read(folder)[0], list[CheckedFiles](), list[str]()
        for each in filter(None, (content[stem] for stem in _STEMS)):
            heads = list(each.damaged_heads(folder))
            found += heads
            try:
                opened += [] if heads else [each.opened_in(folder, stack)]
            except (ValueError, OSError) as error:
                found.append(str(error))
        return found, opened

    found, opened = _steadily(path, look)
    problems += found
    nbytes = sum(files.nbytes for files in opened)
    advance = start(nbytes)
    for files in opened:
        with files:
            problems += files.damaged(advance)
    return nbytes, "all data matches its checksums"


def _steadily(path: str | os.PathLike[str], look: Callable[[str, ExitStack], _Found]) -> _Found:
    """Return the result of `look` for the folder of a checkpoint, from the files of a single save.

    A save in another process may rename, replace or remove the folder meanwhile. If the manifest is unchanged after
    `look` has opened the files, the files belong to the same save. Open files can be read even if the folder is
    removed. `look` registers opened files on the stack.
    """
    for _ in range(_ATTEMPTS):
        folder = complete(path)
        seen = _identity(folder)
        with ExitStack() as stack:
            try:
                found = look(folder, stack)
            except (OSError, ValueError):
                if seen is not None and _identity(folder) == seen:
                    raise
            else:
                if seen is not None and _identity(folder) == seen:
                    stack.pop_all()
                    return found
    raise ValueError(
        f"{os.fspath(path)} was replaced each time that it was opened, {_ATTEMPTS} times: load it when no process "
        "saves to it"
    )


def _identity(folder: str) -> tuple[int, ...] | None:
    """Return the identity of the manifest in a folder, which differs between saves; None without a manifest."""
    try:
        status = os.stat(os.path.join(folder, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def complete(path: str | os.PathLike[str]) -> str:
    """Return the folder of the complete checkpoint at a path; FileNotFoundError if there is none."""
    place = place_of(path)
    folder = found(place)
    if folder is None:
        raise FileNotFoundError(f"{place} is not a complete checkpoint: {_what_is_there(place)}")
    return folder


def _what_is_there(path: str) -> str:
    places = steps(path)
    if places:
        numbers = ", ".join(map(str, places))
        last = places[max(places)]
        return f"it contains the checkpoints of steps {numbers}. fsdp.checkpoint.newest returns the last, {last}"
    if not os.path.lexists(path):
        return "the path does not exist"
    if not os.path.isdir(path):
        return "it is a file, and a checkpoint is a folder"
    tensors = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
    if any(os.path.exists(os.path.join(path, name)) for name in tensors):
        return f"there is no {MANIFEST} in it. fsdp.load_safetensors loads a model's tensors alone"
    if os.path.exists(os.path.join(path, f"adapter_model{SUFFIX}")):
        return (
            f"there is no {MANIFEST} in it, but adapters of peft. Load them before sharding, with "
            "PeftModel.from_pretrained(base, folder, is_trainable=True), and begin with a new optimizer"
        )
    return f"there is no {MANIFEST} in it"


def values(path: str | os.PathLike[str]) -> Any:
    """Return the saved `values` of a checkpoint, in a single process and without reading tensors.

    Args:
        path: the folder of the checkpoint.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if the manifest is damaged.
    """
    return decoded(_steadily(path, lambda folder, _: _read(folder))[0]["values"])


def verify(path: str | os.PathLike[str]) -> int:
    """Read a complete checkpoint and compare all checksums, in a single process with 4 MiB of memory.

    Args:
        path: the folder of the checkpoint.

    Returns:
        The number of bytes of the tensors.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if the checkpoint is damaged; the message names all damaged files and tensors.
    """
    problems: list[str] = []
    nbytes, _ = examine_ours(path, lambda nbytes: lambda done: None, problems)
    if problems:
        raise ValueError(f"{complete(path)} is damaged:\n\t" + "\n\t".join(problems))
    return nbytes
