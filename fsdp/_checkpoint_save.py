"""Saving a checkpoint: what all ranks agree to write, and writing it.

There are two steps. `prepare` looks at the model and finds what each rank is to write (`Plan`). `write` has the files
written, and put in their place when all of them are on disk; it does not look at the model, only at the memory of what
is to be written.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp._agreement import Ranks, agree_on, agree_on_outcome, from_everyone, number_among
from fsdp._checkpoint_folder import Destination, write_synced
from fsdp._checkpoint_manifest import Manifest, TensorFiles, files_of
from fsdp._checkpoint_model import (
    all_ranks,
    buffers_in_own_precision,
    entries_of,
    require_one_model,
    size_of,
    stored_tensors,
)
from fsdp._checksums import Fragment, HoleError, as_text, by_name, of_tensor
from fsdp._generators import generator_states
from fsdp._model_tensors import handles_of, outermost_units, prepared
from fsdp._plain_values import encoded
from fsdp._safetensors_writer import Entry, PlannedFile, create, index_name, index_of, plan, write_parts
from fsdp._state_dict import ensure_same_values
from fsdp._unit import Unit
from fsdp._values import require_values_everywhere

Result = TypeVar("Result")
_WHAT = "save a checkpoint"


@dataclass(frozen=True)
class TensorSet:
    """Tensors that are in files of their own, and the files."""

    stem: str
    entries: list[Entry]
    files: list[PlannedFile]

    @property
    def index(self) -> bytes:
        """Of several files."""
        return index_of(self.files, self.entries)


@dataclass(frozen=True)
class Plan:
    """What is to be written. All ranks have the same but for the parts of entries, and the generators.

    Attributes:
        sets: the model's tensors, and the optimizer's if there is one.
        optimizer_rest: what else is in the optimizer's state, encoded.
        values: the user's, encoded.
        generators: the states of this rank's random number generators, encoded; None if they are not to be saved.
        cast: by name, the dtype that parameters have which are saved in another one.
    """

    sets: list[TensorSet]
    optimizer_rest: Any
    values: Any
    generators: Any
    cast: dict[str, torch.dtype]

    @property
    def nbytes(self) -> int:
        """Of all files with tensors."""
        return sum(file.nbytes for each in self.sets for file in each.files)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was saved.

    Attributes:
        path: its folder.
        nbytes: the size of its files with tensors.
        cast: by name, the dtype that parameters have which were saved in another one.
    """

    path: Path
    nbytes: int
    cast: dict[str, torch.dtype]


def done_by_all(ranks: Ranks, what: str, job: Callable[[], Result]) -> Result:
    """Collective. The result of a job that each rank does for itself.

    Raises:
        Exception: what it raised here; on ranks where it did not, a RuntimeError that names the first where it did.
    """
    error = result = None
    try:
        result = job()
    except Exception as found:  # noqa: BLE001 (whatever it is, the other ranks must hear of it)
        error = found
    agree_on_outcome([ranks], what, error)
    return result  # type: ignore[return-value]


# What is to be written


def prepare(
    model: nn.Module,
    values: Any,
    *,
    dtype: torch.dtype | None,
    generators: bool,
) -> tuple[Plan, Ranks, list[Unit]]:
    """Collective. What is to be written, the ranks that write, and the units whose memory it is in."""
    units, everyone = prepared(model, _WHAT)
    ranks = all_ranks(everyone)
    require_one_model(units, ranks)
    for unit in outermost_units(model):
        require_values_everywhere(unit, _WHAT)
        ensure_same_values(unit)

    def look() -> Plan:
        with buffers_in_own_precision(units):
            tensors = stored_tensors(model, units)
            entries = entries_of(tensors, ranks, dtype)
        cast = {entry.name: tensors[entry.name].dtype for entry in entries}
        return Plan(
            [TensorSet("model", entries, plan(entries, "model"))],
            None,
            encoded(values, "values"),
            encoded(generator_states(), "generators") if generators else None,
            {entry.name: cast[entry.name] for entry in entries if entry.dtype != cast[entry.name]},
        )

    found = done_by_all(ranks, "prepare its part of a checkpoint", look)
    heads = hashlib.sha256(b"".join(file.head for each in found.sets for file in each.files)).hexdigest()
    count = sum(len(each.entries) for each in found.sets)
    agree_on(ranks, "tensors to save", heads, f"{count} ({heads[:8]})")
    return found, ranks, units


def release(units: Sequence[Unit]) -> None:
    """Shards that were read are not wanted soon."""
    for handle in handles_of(units):
        handle.home.release()


# Writing


def write(path: str | os.PathLike[str], found: Plan, ranks: Ranks) -> Saved:
    """Collective. Have a checkpoint at a path, or what was there before if that raises an error.

    Raises:
        OSError: if the files cannot be written, on the rank that cannot; a RuntimeError with the reason on the others.
    """
    destination = Destination(path)
    is_first = number_among(ranks) == 0
    try:
        done_by_all(ranks, f"make {destination.folder}", lambda: _begin(destination, found) if is_first else None)
        fragments = done_by_all(ranks, f"write to {destination.folder}", lambda: _write_own(destination, found))
        heard = [pickle.loads(each) for each in from_everyone(ranks, pickle.dumps((fragments, found.generators)))]
        done_by_all(
            ranks,
            f"complete {destination.path}",
            lambda: destination.commit(_manifest(found, ranks, heard)) if is_first else None,
        )
    except BaseException:
        if is_first:
            destination.abandon()
        raise
    return Saved(Path(destination.path), found.nbytes, found.cast)


def _begin(destination: Destination, found: Plan) -> None:
    destination.begin()
    for each in found.sets:
        for file in each.files:
            create(destination.folder, file)
        if len(each.files) > 1:
            write_synced(os.path.join(destination.folder, index_name(each.stem)), each.index)


def _write_own(destination: Destination, found: Plan) -> list[list[Fragment]]:
    return [write_parts(destination.folder, each.files, each.entries) for each in found.sets]


def _manifest(found: Plan, ranks: Ranks, heard: Sequence[Any]) -> bytes:
    sets = [
        _summary(each, [one for fragments, _ in heard for one in fragments[number]])
        for number, each in enumerate(found.sets)
    ]
    generators = None if found.generators is None else [states for _, states in heard]
    manifest = Manifest(
        size_of(ranks), sets[0], sets[1] if len(sets) > 1 else None, found.optimizer_rest, generators, found.values
    )
    return manifest.to_bytes()


def _summary(each: TensorSet, fragments: Sequence[Fragment]) -> TensorFiles:
    known = by_name(fragments)
    checksums = {}
    for entry in each.entries:
        try:
            checksums[entry.name] = as_text(of_tensor(known.get(entry.name, {}), entry.nbytes))
        except HoleError as hole:
            raise RuntimeError(f"{hole} of {entry.name} were written by no rank") from None
    return files_of(each.stem, each.files, each.index if len(each.files) > 1 else b"", checksums)
