"""What a checkpoint says of itself, in ``checkpoint.json``: its files, their checksums, and all that is no tensor."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp._checkpoint.checked_files import CheckedFiles
from fsdp._checkpoint.checksums import BLOCK_BYTES
from fsdp._checkpoint.folder import MANIFEST, found, steps_in
from fsdp._checkpoint.safetensors_writer import SUFFIX, PlannedFile, index_name

VERSION = 1
_FORMAT = "fsdp checkpoint"


@dataclass(frozen=True)
class TensorFiles:
    """One or several safetensors files that hold one set of tensors.

    Attributes:
        stem: the first part of their names.
        files: by name, the file's size, the size of what is before its data, and the checksum of that.
        checksums: by a tensor's name, those of its blocks (`fsdp._checkpoint.checksums`).
    """

    stem: str
    files: Mapping[str, tuple[int, int, int]]
    checksums: Mapping[str, str]

    @property
    def name(self) -> str:
        """Of the file, or of the index."""
        return f"{self.stem}{SUFFIX}" if len(self.files) == 1 else index_name(self.stem)

    def damaged_heads(self, folder: str) -> Iterator[str]:
        """What is wrong with the files, but for their tensors."""
        for name, (nbytes, head_nbytes, checksum) in self.files.items():
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    head, size = file.read(head_nbytes), os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                yield f"{path} is missing"
                continue
            if size != nbytes:
                yield f"{path} has {size} bytes instead of {nbytes}"
            elif zlib.crc32(head) != checksum:
                yield f"{path}: its header is damaged"

    def opened_in(self, folder: str) -> CheckedFiles:
        """The tensors in a checkpoint's folder.

        Raises:
            ValueError, OSError: if the files are damaged or cannot be read.
        """
        problem = next(self.damaged_heads(folder), None)
        if problem is not None:
            raise ValueError(f"{problem}. Load another checkpoint.")
        return CheckedFiles(os.path.join(folder, self.name), self.checksums)


def files_of(stem: str, files: list[PlannedFile], index: bytes, checksums: Mapping[str, str]) -> TensorFiles:
    """What is to be said of files that were planned and written."""
    heads = {file.name: (file.nbytes, len(file.head), zlib.crc32(file.head)) for file in files}
    if len(files) > 1:
        heads[index_name(stem)] = (len(index), len(index), zlib.crc32(index))
    return TensorFiles(stem, heads, checksums)


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says of itself.

    Attributes:
        world_size: of the ranks that saved it; whoever loads it need not know.
        model: its tensors.
        optimizer: its state's tensors; None without one.
        optimizer_rest: what else is in its state, encoded.
        extra: what modules have of extra state, by name, encoded.
        generators: for each rank the states of its random number generators, encoded; None if they were not saved.
        values: the user's, encoded.
    """

    world_size: int
    model: TensorFiles
    optimizer: TensorFiles | None
    optimizer_rest: Any
    extra: dict[str, Any]
    generators: list[Any] | None
    values: Any

    def to_bytes(self) -> bytes:
        """The text of the file."""
        sets = {"model": self.model, "optimizer": self.optimizer}
        content = {
            "format": _FORMAT,
            "version": VERSION,
            "world_size": self.world_size,
            "block_bytes": BLOCK_BYTES,
            **{key: each and {"files": dict(each.files), "crc32": dict(each.checksums)} for key, each in sets.items()},
            "optimizer_rest": self.optimizer_rest,
            "extra": self.extra,
            "generators": self.generators,
            "values": self.values,
        }
        text = _text(content)
        return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}",\n"checkpoint":{text}}}\n'.encode()

    @classmethod
    def read(cls, folder: str) -> Manifest:
        """That of a complete checkpoint.

        Raises:
            ValueError: if it is damaged, or of a newer version.
            OSError: if it cannot be read.
        """
        path = os.path.join(folder, MANIFEST)
        with open(path, "rb") as file:
            text = file.read()
        try:
            whole = json.loads(text)
            content, digest = whole["checkpoint"], whole["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: it cannot be read: {error!r}") from None
        if hashlib.sha256(_text(content).encode()).hexdigest() != digest:
            raise ValueError(f"{path} is damaged: it is not what its checksum says")
        if content.get("format") != _FORMAT or content.get("version") != VERSION:
            raise ValueError(
                f"{path} is of version {content.get('version')}, and this is version {VERSION}: load it with the "
                "library that has saved it, or a newer one"
            )
        return cls(
            content["world_size"],
            _tensor_files("model", content["model"]),
            content["optimizer"] and _tensor_files("optimizer", content["optimizer"]),
            content["optimizer_rest"],
            content["extra"],
            content["generators"],
            content["values"],
        )

    @property
    def digest(self) -> str:
        """Equal for equal checkpoints, their values included."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _tensor_files(stem: str, content: Any) -> TensorFiles:
    files = {name: (numbers[0], numbers[1], numbers[2]) for name, numbers in content["files"].items()}
    return TensorFiles(stem, files, content["crc32"])


def complete(path: str | os.PathLike[str]) -> str:
    """The folder of the checkpoint that is meant by a path.

    Raises:
        FileNotFoundError: if there is none.
    """
    folder = found(path)
    if folder is None:
        raise FileNotFoundError(f"{os.fspath(path)} is no complete checkpoint: {_what_is_there(os.fspath(path))}")
    return folder


def _what_is_there(path: str) -> str:
    steps = steps_in(path)
    if steps:
        numbers = ", ".join(map(str, steps))
        return f"it is a folder of those of steps {numbers}. fsdp.checkpoint.newest gives the last, {steps[max(steps)]}"
    if not os.path.lexists(path):
        return "there is nothing"
    if not os.path.isdir(path):
        return "it is a file, and a checkpoint is a folder"
    tensors = f"model{SUFFIX}", index_name("model")
    if any(os.path.exists(os.path.join(path, name)) for name in tensors):
        return f"there is no {MANIFEST} in it. fsdp.load_safetensors loads a model's tensors alone"
    return f"there is no {MANIFEST} in it"
