"""Converting checkpoints: a `Source` is written in another format, using memory for a few blocks of 4 MiB.

A file of `torch.save` is written by torch with room for the tensors (``torch.serialization.skip_data``); then each
tensor is copied from the source to its offset, a block at a time, and the checksum is written to the archive's
directory.

A converted checkpoint is written under a temporary name and renamed when it is complete (`new_place`).
`fsdp.checkpoint.folder` handles folders of this library's format.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import crc32
from fsdp.checkpoint.folder import Destination, sync
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.formats.trees import MODEL_KEYS, OPTIMIZER_KEYS, VALUES
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.manifest import TensorFiles, TensorSet, manifest_of
from fsdp.checkpoint.optim import kinds_in
from fsdp.checkpoint.safetensors import SUFFIX, Entry, plan, store_at, write_parts
from fsdp.distributed.communicator import some_of
from fsdp.optim_utils.state import Elements
from fsdp.state_dict_utils.tree import leaves

MODEL, OPTIMIZER = MODEL_KEYS[0], OPTIMIZER_KEYS[0]
Advance = Callable[[int], None]
_WRITING, _REPLACED = ".converting", ".replaced"
# Names of files in a folder that may be replaced.
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_DESCRIPTOR = b"PK\7\x08"  # after a record of an archive


@dataclass(frozen=True)
class Content:
    """The tensors to write: of a model, of an optimizer's state, or of both."""

    source: Source
    model: list[Entry] | None
    optimizer: list[Entry] | None

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in (*(self.model or ()), *(self.optimizer or ())))


def content_of(
    source: Source,
    dtype: torch.dtype | None = None,
    only: str | None = None,
    tied: Mapping[str, str] | None = None,
) -> Content:
    """Return the contents of a checkpoint to write; `tied` contains additional names for tensors of the model."""
    if only == OPTIMIZER and source.optimizer is None:
        raise ValueError(f"{source.path} has no optimizer in it")
    model, optimizer = None, None
    if only != OPTIMIZER:
        names = {name: name for name in source.model.tensors} | dict(tied or {})
        unknown = [name for name in names.values() if name not in source.model.tensors]
        if unknown:
            raise ValueError(f"{source.path} has no tensor {unknown[0]} to save under another name")
        model = [_entry(name, source.model, key, dtype) for name, key in names.items()]
    if only != MODEL and source.optimizer is not None:
        optimizer = [_entry(name, source.optimizer, name, None) for name in source.optimizer.tensors]
    return Content(source, model, optimizer)


def _entry(name: str, reader: TensorReader, key: str, dtype: torch.dtype | None) -> Entry:
    found = reader.tensors[key]
    kept = dtype if dtype is not None and found.dtype.is_floating_point else found.dtype
    return Entry(name, kept, found.shape, found, form=found.form)


def require_apart(source: Source, target: str) -> None:
    """Raise ValueError if a checkpoint would be written over itself, or into itself."""
    place, other = os.path.realpath(source.path), os.path.realpath(target)
    if other == place or os.path.dirname(place) == other:
        raise ValueError(f"{target} is the checkpoint itself, or the folder that contains it: convert to another path")


def tree_of(
    content: Content, make: Callable[[Entry], Tensor], *, by_number: bool = False, is_flat: bool = False
) -> dict[str, Any]:
    """Return the contents as dictionaries: ``model``, ``optimizer``, and the values under their names.

    The optimizer's state is keyed by names, by numbers as in torch's optimizers, or as a flat dictionary with keys
    like ``state.<name>.exp_avg``. `make` returns the object that represents a tensor.
    """
    source = content.source
    tree: dict[str, Any] = {}
    if content.model is not None:
        extra = {name: decoded(value) for name, value in source.extra.items()}
        tree[MODEL] = {entry.name: make(entry) for entry in content.model} | extra
    if content.optimizer is not None:
        full = _optimizer_tree(content, make)
        if by_number:
            full = _numbered(full, list(source.model.tensors))
        tree[OPTIMIZER] = _flattened(full) if is_flat else full
    if content.model is None:
        return tree
    values = decoded(source.values)
    reserved = {*MODEL_KEYS, *OPTIMIZER_KEYS, VALUES}
    if isinstance(values, dict) and values and all(isinstance(key, str) and key not in reserved for key in values):
        tree |= values
    elif values is not None:
        tree[VALUES] = values
    return tree


def _optimizer_tree(content: Content, make: Callable[[Entry], Tensor]) -> dict[str, Any]:
    rest = content.source.optimizer_rest
    entries = {entry.name: entry for entry in content.optimizer or ()}
    states = {
        name: {
            key: make(entries[f"{name}/{key}"]) if isinstance(kind, Elements) else kind.held
            for key, kind in kinds.items()
        }
        for name, kinds in kinds_in(content.source).items()
        if kinds
    }
    groups = [{**decoded(group["options"]), "params": list(group["params"])} for group in rest["groups"]]
    return {"state": states, "param_groups": groups}


def _numbered(full: Mapping[str, Any], order: list[str]) -> dict[str, Any]:
    """Return the state by numbers. Within a group, parameters are in the order of ``model.parameters()``."""
    place = {name: number for number, name in enumerate(order)}
    numbers: dict[str, int] = {}
    groups = []
    for group in full["param_groups"]:
        names = sorted(group["params"], key=lambda name: place.get(name, len(place)))
        numbers |= {name: number for number, name in enumerate(names, start=len(numbers))}
        groups.append({**group, "params": [numbers[name] for name in names], "param_names": names})
    return {"state": {numbers[name]: state for name, state in full["state"].items()}, "param_groups": groups}


def _flattened(full: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"state.{name}.{key}": value for name, state in full["state"].items() for key, value in state.items()}
    for group in full["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        found |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return found


def write_ours(path: str, content: Content, *, max_file_bytes: int | None, advance: Advance) -> None:
    source, destination = content.source, Destination(path)
    sets = [TensorSet.planned("model", content.model or [], max_file_bytes)]
    if content.optimizer is not None:
        sets.append(TensorSet.planned("optimizer", content.optimizer, max_file_bytes))
    try:
        destination.begin()
        written = [_written(destination.folder, each, advance) for each in sets]
        rest = {"optimizer_rest": source.optimizer_rest if len(sets) > 1 else None, "extra": dict(source.extra)}
        world_size, states = source.world_size or 1, source.generators
        destination.commit(manifest_of(world_size, written, **rest, generators=states, values=source.values))
    except BaseException:
        destination.abandon()
        raise


def _written(folder: str, each: TensorSet, advance: Advance) -> TensorFiles:
    each.create(folder)
    return each.written(write_parts(folder, each.files, each.own, advance))


def write_safetensors(path: str, content: Content, *, max_file_bytes: int | None, advance: Advance) -> None:
    """Write a model as a single file if `path` ends with ``.safetensors``, or as a folder of files."""
    model = content.model or []
    if path.endswith(SUFFIX):
        if max_file_bytes is not None:
            raise ValueError(f"--max-file-bytes writes several files, but {path} is one file: pass a folder")
        (file,) = plan(model, os.path.basename(path).removesuffix(SUFFIX))
        with new_place(path) as part:
            folder, name = os.path.split(part)
            _written(folder, TensorSet("model", model, [replace(file, name=name)]), advance)
    else:
        with new_place(path, own=_SAFETENSORS) as part:
            _written(part, TensorSet.planned("model", model, max_file_bytes), advance)


def write_torch(path: str, content: Content, *, by_number: bool, advance: Advance) -> None:
    """Write a single file. If there is only an optimizer, the file contains its state without an outer dictionary."""
    entries: dict[int, Entry] = {}
    rooms: dict[Any, Tensor] = {}  # tied tensors stay tied

    def make(entry: Entry) -> Tensor:
        if entry.values not in rooms:
            rooms[entry.values] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")  # which is never written
            entries[id(rooms[entry.values])] = entry
        return rooms[entry.values]

    tree = tree_of(content, make, by_number=by_number)
    whole = tree[OPTIMIZER] if content.model is None else tree
    with new_place(path) as part:
        _save_in_pieces(part, whole, entries, advance)


def _save_in_pieces(path: str, tree: Any, entries: Mapping[int, Entry], advance: Advance) -> None:
    """Write a tree as `torch.save` does; `entries` contains, by `id`, the entries of tensors without values."""
    with torch.serialization.skip_data():
        torch.save(tree, path)
    archive = TorchArchive(path)
    checksums: dict[int, int] = {}
    fd = os.open(path, os.O_WRONLY)
    try:
        for (_, tensor), (_, place) in zip(leaves(tree), leaves(archive.content), strict=True):
            if not isinstance(tensor, Tensor):
                continue
            if place.begin not in checksums:
                checksums[place.begin] = 0
                own = Entry("", tensor.dtype, tensor.shape, tensor.contiguous().view(-1))
                for begin, memory in entries.get(id(tensor), own).chunks():
                    store_at(fd, memory, place.begin + begin)
                    checksums[place.begin] = crc32(memory, checksums[place.begin])
                    advance(len(memory) if id(tensor) in entries else 0)
    finally:
        os.close(fd)
    _note_checksums(path, archive, checksums)


def _note_checksums(path: str, archive: TorchArchive, checksums: Mapping[int, int]) -> None:
    """Write checksums, by the records' offsets, to both places in an archive: after the record, and at the end."""
    with zipfile.ZipFile(path) as listed, open(path, "r+b") as file:
        place = listed.start_dir
        for info in listed.infolist():
            record = archive.records[info.filename]
            if record.begin in checksums and record.nbytes:
                checksum = struct.pack("<I", checksums[record.begin])
                file.seek(record.begin + record.nbytes)
                if file.read(4) == _DESCRIPTOR:
                    file.write(checksum)
                file.seek(place + 16)
                file.write(checksum)
            file.seek(place + 28)
            place += 46 + sum(struct.unpack("<HHH", file.read(6)))  # of the name, extra fields and comment


@contextmanager
def new_place(path: str, own: re.Pattern[str] | None = None) -> Iterator[str]:
    """Yield a temporary file or folder, which is renamed to `path` if the block succeeds, and removed if it fails.

    With `own`, the path is a folder, and an existing folder is replaced only if all file names in it match `own`.
    """
    is_folder = own is not None
    place = os.path.realpath(path)
    part, old = place + _WRITING, place + _REPLACED
    if os.path.lexists(place):
        if os.path.isdir(place) != is_folder:
            raise FileExistsError(f"{place} is a {'file' if is_folder else 'folder'}: move it away first")
        others = [] if own is None else sorted(name for name in os.listdir(place) if not own.fullmatch(name))
        if others:
            raise FileExistsError(
                f"{place} contains other files ({some_of(others)}), so it is not replaced: choose another path"
            )
    if os.path.lexists(part):
        raise FileExistsError(
            f"{part} exists: another conversion is writing it, or was killed. Remove it if no conversion is running."
        )
    if is_folder and os.path.lexists(old):
        raise FileExistsError(
            f"{old} exists: a conversion that was killed moved the previous checkpoint there. Move it to {place} if "
            "that does not exist; otherwise remove it."
        )
    os.makedirs(part if is_folder else os.path.dirname(part), exist_ok=True)
    try:
        yield part
        for name in os.listdir(part) if is_folder else ():
            sync(os.path.join(part, name))
        sync(part)
        if is_folder and os.path.lexists(place):
            os.rename(place, old)
        os.replace(part, place)
        if is_folder:
            _remove(old)
        sync(os.path.dirname(place))
    except BaseException:
        if is_folder:
            if os.path.lexists(old) and not os.path.lexists(place):
                os.rename(old, place)
            _remove(old)
        _remove(part)
        raise


def require_free(path: str, overwrite: bool) -> None:
    """Raise FileExistsError if a path exists and must not be replaced."""
    if os.path.lexists(path) and not overwrite and not (os.path.isdir(path) and not os.listdir(path)):
        raise FileExistsError(f"{path} exists already: choose another path, or replace it (--overwrite)")


def _remove(place: str) -> None:
    if os.path.isdir(place):
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(place)
