"""Values from safetensors files: each rank reads the ranges that it keeps, straight into its shards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp.checkpoint.formats.source import FoundTensor, TensorReader
from fsdp.checkpoint.model_tensors import Target, UnshardedTensor, prepared, tensors_in
from fsdp.checkpoint.safetensors import SafetensorsFiles
from fsdp.checkpoint.untrusted import readable
from fsdp.distributed.collectives import during
from fsdp.distributed.consensus import agree_on, done_by_all
from fsdp.engine.names import foreign_prefix, prefix_problem
from fsdp.engine.unit import Unit
from fsdp.state_dict.full import stored_buffers


@during("fsdp.load_safetensors()")
def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Collective. Load unsharded values from safetensors files, each rank reading only what it keeps.

    The bytes go from the file into the shard's memory; a shard on an accelerator, and values of another dtype, go
    through 4 MiB of host memory. There is never an unsharded parameter on a rank of several. Buffers and parameters
    that are not sharded are read as a whole on every rank; of `DTensor`s, what the local part needs.

    Stored values are cast to the dtype of the parameter or buffer as `Tensor.copy_` does. Tied parameters are loaded
    from the first of their names that is there. Hooks of state dicts, and extra state, have no part in it.

    Args:
        model: with wrapped modules, or without; not a part of a wrapped module.
        path: a ``.safetensors`` file, an index of several (``model.safetensors.index.json``), or a folder that has one
            of these. Every rank needs the same files, which need not lie in the same place.
        strict: raise for missing and unexpected keys.

    Returns:
        torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

    Raises:
        RuntimeError: for all missing and unexpected keys (if `strict`) and other shapes together, before anything is
            changed; in a forward or backward, or inside `summon_full_params`; if ranks have different files, or another
            rank could not read them.
        FileNotFoundError, ValueError, OSError: if this rank has no such file, or a file is not what it should be.
        NotImplementedError: for a `DTensor` that is cut along several dimensions.
    """
    units, everyone = prepared(model, "load safetensors files")
    files = done_by_all(everyone, "open its safetensors files", lambda: SafetensorsFiles(path))
    with files:
        for ranks in everyone:
            agree_on(ranks, "safetensors files", files.digest, f"{files.path} with {len(files.tensors)} tensors")
        targets = tensors_in(model, units)
        missing, unexpected, problems = misfits(targets, files, strict)
        if problems:
            raise RuntimeError(does_not_fit(files.path, model, problems))
        done_by_all(everyone, f"read {files.path}", lambda: read(targets, units, files))
    return _IncompatibleKeys(missing, unexpected)


def misfits(targets: Sequence[Target], files: TensorReader, strict: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the missing and the unexpected keys, and all reasons why the files cannot be loaded."""
    stored = files.tensors
    named = {name for target in targets for name in (*target.names, *target.aliases)}
    missing = [name for target in targets if _key(target, stored) is None for name in target.names]
    unexpected = [name for name in stored if name not in named]
    problems = []
    for target in targets:
        key = _key(target, stored)
        if key is not None:
            problems += _misfit(target, stored[key])
    own = {name.partition(".")[0] for name in named}
    prefix = foreign_prefix(unexpected, own.__contains__) if strict and missing else ""
    if prefix:
        holder = "model"
        for part in reversed(prefix.split(".")[:-1]):
            holder = f"torch.nn.ModuleDict({{{part!r}: {holder}}})"
        problems.append(prefix_problem(prefix, f"load into {holder}, which has it in its names too"))
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    return missing, unexpected, problems


def does_not_fit(path: str, model: nn.Module, problems: Sequence[str]) -> str:
    """Return a message about files that do not fit a model."""
    lines = "\n\t".join(map(readable, problems))
    return f"{path} does not fit this {type(model).__name__}, and nothing was loaded:\n\t{lines}"


def _key(target: Target, stored: Mapping[str, FoundTensor]) -> str | None:
    return next((name for name in (*target.names, *target.aliases) if name in stored), None)


def _misfit(target: Target, stored: FoundTensor) -> list[str]:
    if target.part is not None:
        target.part.cut_dim(stored.name)
    found = []
    if stored.shape != target.shape:
        found.append(f"{stored} has shape {list(stored.shape)}, and the model's {list(target.shape)}")
    if stored.dtype.is_complex and not target.dtype.is_complex:
        found.append(f"{stored} is of {stored.dtype}, and the model's of {target.dtype}")
    if isinstance(target, UnshardedTensor) and target.is_missing_memory:
        found.append(f"{target.names[0]} is on the meta device: give it memory first (to_empty), or wrap it")
    return found


def read(targets: Sequence[Target], units: Sequence[Unit], files: TensorReader) -> None:
    """Fill what is in the files."""
    with stored_buffers(units), torch.no_grad():
        for target in targets:
            key = _key(target, files.tensors)
            if key is not None:
                target.fill(files, key)
