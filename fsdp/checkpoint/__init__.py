"""Checkpoints: folders of safetensors files, of which every rank writes and reads its ranges, without an all-gather.

`writer` writes them, while training goes on if it should, and `loader` loads them. Both know from
`model_tensors` and `optim` which ranges a rank has of which tensors. Of a folder, `manifest` has the description,
`safetensors` the files, `checksums` those of their blocks, `json_values` and `generators` what is no tensor; `folder`
brings it to its place. `formats` has readers and writers of other libraries' checkpoints, for which ours are one more
`Source`. Whatever reads a file keeps to the rules of `untrusted`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint import loader, writer
from fsdp.checkpoint.folder import newest as newest
from fsdp.checkpoint.folder import steps as steps
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.loader import Loaded as Loaded
from fsdp.checkpoint.manifest import Manifest, complete, examine_ours
from fsdp.checkpoint.writer import Saved as Saved
from fsdp.checkpoint.writer import Saver as Saver
from fsdp.distributed.collectives import during


@during("fsdp.save()")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    values: Any = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | None = None,
    generators: bool = True,
) -> Saved:
    """Collective. Save a model, and its optimizer, as files with unsharded tensors, under their FQNs.

    Every rank writes the ranges of its own shards straight into the final files, from the memory that they are in;
    nothing is all-gathered, and no memory is used but 4 MiB for values that are cast or on an accelerator. Of replicas
    the first writes; what is not sharded (buffers, ignored parameters) is written by the first rank, and tied
    parameters under the first of their names. Ranks that do not see the first one's folder send their ranges there, a
    block at a time.

    The files are written beside `path`, synced to the disk, and then put there. If the save fails or is killed at any
    moment, the checkpoint that was there is still there. Files of yours in it are copied to the new one.

    Args:
        path: the folder, written alike on all ranks. One that is a checkpoint, or empty, is replaced.
        model: wrapped, or with units inside, or plain, which all ranks of the default process group then have alike.
        optimizer: of the model's parameters, or a list of several, each of its own; None saves none. State with a value
            for each element of a parameter is saved as tensors of the parameter's shape, numbers and parameter groups
            by the parameters' names. Of other shapes it is an error.
        step: save to ``step-00000100`` in the folder `path` instead, which `newest` finds.
        keep: with `step`, remove all such checkpoints but those of so many highest steps, when this one is there.
        values: of the first rank: None, numbers, strings, bytes, lists, tuples, dicts, and tensors up to 1 MiB each.
        dtype: of floating-point parameters; None saves them in their own. Buffers keep theirs.
        max_file_bytes: begin another file before there are more bytes of tensors in one, as Hugging Face divides models
            (``model-00001-of-00003.safetensors`` and an index). None makes one file for the model and one for the
            optimizer.
        generators: save the states of the random number generators of every rank (Python's, NumPy's, torch's).

    Returns:
        Where it is, its size, and what was cast.

    Raises:
        RuntimeError: in a forward or backward, or inside `summon_full_params`; if there are parameters without values;
            for units with other ranks than the outermost one; on every rank, naming the reason, if another one fails,
            or if ranks were given different paths, steps or settings.
        OSError: if this rank cannot write: the disk is full, the folder read-only, the path a file or no checkpoint.
        TypeError: for `values` of other types; says where. For what is no model, optimizer, number or float dtype.
        ValueError: for an optimizer of other parameters, or two of the same; for state that is neither of the
            parameter's shape nor a number; it names parameter, key and shape.
        NotImplementedError: for `DTensor`s.
    """
    place = writer.Place(path, step, keep)
    found, ranks, units = writer.prepare(
        place, model, optimizer, values, dtype=dtype, max_file_bytes=max_file_bytes, generators=generators
    )
    try:
        return writer.write(place, found, ranks)
    finally:
        writer.release(units)


@during("fsdp.load()")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    generators: bool = True,
) -> Loaded:
    """Collective. Load a checkpoint, saved by any number of ranks, each rank reading only what it keeps.

    As `fsdp.load_safetensors`; besides, every byte that is read is compared with the checksums of the checkpoint.

    Folders of ``torch.distributed.checkpoint`` are loaded as well, by ranges, but they have no such checksums: a model
    under ``model`` or by itself, and an optimizer under ``optimizer`` (docs/command_line.md has the rules).

    Args:
        path: its folder. What a save that was killed has left beside it is found, too.
        model: with units, or without; not a part of a wrapped module.
        optimizer: of the model's parameters, or a list of several, in groups as they were when it was saved; they get
            the saved settings. None leaves out what the checkpoint has of one.
        strict: raise for missing and unexpected keys of the model. An optimizer fits or does not.
        generators: have this rank's random number generators go on from where they were saved, if there are as many
            ranks now.

    Returns:
        The values that were saved with it, its step, and what was missing.

    Raises:
        FileNotFoundError: if there is no complete checkpoint at `path`.
        RuntimeError: for all that does not fit, together, before anything is changed; in a forward or backward, or
            inside `summon_full_params`; on every rank, naming the reason, if another one fails.
        ValueError: if a file is damaged; it names the file and the tensor. Parameters and state may have been read by
            then: load another checkpoint. If an optimizer is given, and the checkpoint has none.
        OSError: if a file cannot be read.
    """
    return loader.load(path, model, optimizer, strict=strict, generators=generators)


def values(path: str | os.PathLike[str]) -> Any:
    """Return the `values` that a checkpoint was saved with. In one process, and without reading a tensor.

    Args:
        path: its folder.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if what describes it is damaged.
    """
    return decoded(Manifest.read(complete(path)).values)


def verify(path: str | os.PathLike[str]) -> int:
    """Read a checkpoint from end to end and compare its checksums. In one process, which needs 4 MiB of memory.

    Args:
        path: its folder.

    Returns:
        The number of bytes of its tensors.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if it is damaged; it names all files and tensors that are.
    """
    problems: list[str] = []
    nbytes, _ = examine_ours(path, lambda nbytes: lambda done: None, problems)
    if problems:
        raise ValueError(f"{complete(path)} is damaged:\n\t" + "\n\t".join(problems))
    return nbytes
