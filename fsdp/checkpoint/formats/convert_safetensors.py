"""Writing converted checkpoints as safetensors files: ours, with a manifest and checksums, and plain ones."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp.checkpoint.checksums import as_text, fragment, spans
from fsdp.checkpoint.folder import Destination, write_synced
from fsdp.checkpoint.formats.convert import Advance, Content, Item
from fsdp.checkpoint.formats.convert_place import new_place, require_free
from fsdp.checkpoint.manifest import Manifest, TensorFiles, files_of
from fsdp.checkpoint.safetensors_writer import SUFFIX, Entry, create, index_name, index_of, plan, write_at, written

_OWN = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def write_ours(path: str, content: Content, *, max_file_bytes: int | None, overwrite: bool, advance: Advance) -> None:
    """A folder as `fsdp.save` writes it.

    Raises:
        ValueError: without a model; if the source is damaged.
        OSError: if it cannot be written.
    """
    if content.model is None:
        raise ValueError("a checkpoint of ours has a model: the optimizer alone can be written for torch or dcp")
    require_free(path, overwrite)
    source = content.source
    destination = Destination(path)
    try:
        destination.begin()
        model = _write_set(destination.folder, "model", content.model, max_file_bytes, advance)
        optimizer = None
        if content.optimizer is not None:
            optimizer = _write_set(destination.folder, "optimizer", content.optimizer, max_file_bytes, advance)
        rest = source.optimizer_rest if optimizer is not None else None
        manifest = Manifest(
            source.world_size or 1, model, optimizer, rest, dict(source.extra), source.generators, source.values
        )
        destination.commit(manifest.to_bytes())
    except BaseException:
        destination.abandon()
        raise


def write_safetensors(
    path: str, content: Content, *, max_file_bytes: int | None, overwrite: bool, advance: Advance
) -> None:
    """A model as one file, if `path` ends with ``.safetensors``, or as a folder with one or several.

    Raises:
        ValueError: without a model; if the source is damaged.
        OSError: if it cannot be written.
    """
    if content.model is None:
        raise ValueError(
            "safetensors files have no place for an optimizer's numbers and groups: convert to another format"
        )
    if path.endswith(SUFFIX):
        if max_file_bytes is not None:
            raise ValueError(f"--max-file-bytes makes several files, and {path} is one: name a folder")
        stem = os.path.basename(path).removesuffix(SUFFIX)
        with new_place(path, is_folder=False, overwrite=overwrite, own=_OWN) as part:
            folder, name = os.path.split(part)
            _write_set(folder, stem, content.model, None, advance, one_file=name)
    else:
        with new_place(path, is_folder=True, overwrite=overwrite, own=_OWN) as part:
            _write_set(part, "model", content.model, max_file_bytes, advance)


def _write_set(
    folder: str, stem: str, items: Sequence[Item], max_file_bytes: int | None, advance: Advance, one_file: str = ""
) -> TensorFiles:
    """Write some tensors to files, and say what is in them."""
    entries = [Entry(item.name, item.dtype, item.shape) for item in items]
    files = plan(entries, stem, max_file_bytes)
    if one_file:
        files = [replace(files[0], name=one_file)]
    by_name = {item.name: item for item in items}
    checksums = {}
    for file in files:
        create(folder, file)
        with written(folder, file) as fd:
            for name, begin in file.begins.items():
                checksums[name] = as_text(_write_item(fd, by_name[name], begin, advance))
    index = index_of(files, entries) if len(files) > 1 else b""
    if index:
        write_synced(os.path.join(folder, index_name(stem)), index)
    return files_of(stem, files, index, {item.name: checksums[item.name] for item in items})


def _write_item(fd: int, item: Item, place: int, advance: Advance) -> list[int]:
    """Write a tensor from a byte of a file on, and return the checksums of its blocks."""
    checksums, done = [], 0
    for piece in item.pieces():
        memory = piece.view(torch.uint8).numpy().data
        for begin, end in spans(done, done + len(memory)):
            block = memory[begin - done : end - done]
            checksums.append(fragment(item.name, begin, block).checksum)
            write_at(fd, block, place + begin)
            advance(len(block))
        done += len(memory)
    return checksums
