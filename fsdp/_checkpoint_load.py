"""Loading a checkpoint: each rank reads what it keeps, at any number of ranks, and all compare checksums."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fsdp._agreement import Ranks, agree_on, agree_on_outcome, from_everyone, number_among, peers_answer
from fsdp._checked_files import CheckedFiles
from fsdp._checkpoint_manifest import Manifest, complete
from fsdp._checkpoint_model import size_of
from fsdp._generators import set_generator_states
from fsdp._load_safetensors import does_not_fit, misfits, opened, read
from fsdp._model_tensors import prepared, tensors_in
from fsdp._plain_values import decoded


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        path: the folder it was read from.
        values: what `save` was given.
        missing_keys, unexpected_keys: of the model, in plain names.
        has_generators: whether this rank's random number generators go on from where they were saved.
        world_size: the number of ranks that saved it.
    """

    path: Path
    values: Any
    missing_keys: list[str]
    unexpected_keys: list[str]
    has_generators: bool
    world_size: int


def load(path: str | os.PathLike[str], model: nn.Module, *, strict: bool, generators: bool) -> Loaded:
    """Collective. See `fsdp.checkpoint.load`."""
    units, everyone = prepared(model, "load a checkpoint")
    folder, manifest = _found(path, everyone)
    with ExitStack() as stack:
        files = stack.enter_context(opened(lambda: manifest.model.opened_in(folder), everyone))
        targets = tensors_in(model, units)
        missing, unexpected, problems = misfits(targets, files, strict)
        problem = RuntimeError(does_not_fit(folder, model, problems)) if problems else None
        agree_on_outcome(everyone, f"load {folder}", problem)
        error: Exception | None = None
        try:
            read(targets, units, files)
        except (OSError, ValueError) as found:
            error = found
        agree_on_outcome(everyone, f"read {folder}", error)
        _compare(files, everyone)
    has_generators = generators and _restore_generators(manifest, everyone)
    return Loaded(Path(folder), decoded(manifest.values), missing, unexpected, has_generators, manifest.world_size)


def _found(path: str | os.PathLike[str], everyone: Sequence[Ranks]) -> tuple[str, Manifest]:
    """Collective. The checkpoint, which all ranks have."""
    folder, manifest, error = "", None, None
    try:
        folder = complete(path)
        manifest = Manifest.read(folder)
    except (OSError, ValueError) as found:
        error = found
    agree_on_outcome(everyone, f"open the checkpoint {os.fspath(path)}", error)
    if manifest is None:
        raise RuntimeError(f"{folder} has no manifest")
    for ranks in everyone:
        agree_on(ranks, "checkpoints", manifest.digest, folder)
    return folder, manifest


def _compare(files: CheckedFiles, everyone: Sequence[Ranks]) -> None:
    """Collective. Blocks of which ranks have read different parts are as they were saved."""
    heard = [each for ranks in everyone if peers_answer(ranks) for each in from_everyone(ranks, files.fragments)]
    error: Exception | None = None
    try:
        files.compare_fragments(heard)
    except (OSError, ValueError) as found:
        error = found
    agree_on_outcome(everyone, f"find {files.path} undamaged", error)


def _restore_generators(manifest: Manifest, everyone: Sequence[Ranks]) -> bool:
    """Whether as many ranks load the checkpoint as saved it, and their generators go on."""
    ranks = everyone[0] if everyone else ()
    if manifest.generators is None or len(everyone) > 1 or size_of(ranks) != manifest.world_size:
        return False
    set_generator_states(decoded(manifest.generators[number_among(ranks)]))
    return True
