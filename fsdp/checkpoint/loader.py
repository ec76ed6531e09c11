"""Loading a checkpoint: each rank reads what it keeps, at any number of ranks, and all compare checksums."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fsdp.checkpoint.checked_files import CheckedFiles
from fsdp.checkpoint.folder import step_of
from fsdp.checkpoint.formats.dcp import is_dcp, read_dcp
from fsdp.checkpoint.formats.files import is_ours, read_ours
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.generators import GeneratorStates
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.load_safetensors import does_not_fit, misfits, read
from fsdp.checkpoint.model import Stored, size_of, stored_tensors
from fsdp.checkpoint.model_tensors import extra_states, prepared, tensors_in
from fsdp.checkpoint.optim import StatePlan, give_state, plan_state, read_state, release_state
from fsdp.checkpoint.several import as_one
from fsdp.checkpoint.untrusted import readable, reading
from fsdp.distributed.consensus import (
    Ranks,
    agree_on,
    agree_on_outcome,
    done_by_all,
    from_everyone,
    number_among,
    peers_answer,
)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        path: the folder it was read from.
        values: what `save` was given.
        missing_keys, unexpected_keys: of the model, in plain names.
        has_generators: whether this rank's random number generators go on from where they were saved.
        world_size: the number of ranks that saved it; None if it does not say.
    """

    path: Path
    values: Any
    missing_keys: list[str]
    unexpected_keys: list[str]
    has_generators: bool
    world_size: int | None

    @property
    def step(self) -> int | None:
        """The step that it was saved with; None if it was saved without one."""
        return step_of(self.path)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Any, *, strict: bool, generators: bool) -> Loaded:
    """Collective. See `fsdp.checkpoint.load`."""
    units, everyone = prepared(model, "load a checkpoint")
    settings = [f"strict={bool(strict)}", f"generators={bool(generators)}"]
    settings += ["no optimizer" if optimizer is None else "an optimizer"]
    for ranks in everyone:
        agree_on(ranks, "settings to load a checkpoint", ", ".join(settings))
    with closing(_found(path, everyone, None if optimizer is not None else "model")) as source:
        states = None
        if generators:
            states = done_by_all(everyone, f"read {source.path}", lambda: _generators(source, everyone))
        targets = tensors_in(model, units)
        missing, unexpected, problems = misfits(targets, source.model, strict)
        extra = extra_states(model)
        problems += _extra_problems(extra, source) if strict else []
        state = None
        if optimizer is not None:
            state = _SavedState(as_one(optimizer), source, everyone)
            what = f"load {source.path}"
            problems += done_by_all(everyone, what, lambda: state.problems(stored_tensors(model, units)))
        problem = RuntimeError(does_not_fit(source.path, model, problems)) if problems else None
        agree_on_outcome(everyone, f"load {source.path}", problem)
        done_by_all(everyone, f"read {source.path}", lambda: read(targets, units, source.model))
        _compare(source.model, everyone)
        if state is not None:
            state.load()
    for name in extra.keys() & source.extra.keys():
        extra[name].set_extra_state(decoded(source.extra[name]))
    if states is not None:
        states.set()
    return Loaded(Path(source.path), decoded(source.values), missing, unexpected, states is not None, source.world_size)


def _extra_problems(extra: Mapping[str, nn.Module], source: Source) -> list[str]:
    missing, unexpected = extra.keys() - source.extra.keys(), source.extra.keys() - extra.keys()
    both = ((missing, "missing"), (unexpected, "unexpected"))
    return [f"{what}: {readable(', '.join(sorted(names)))}" for names, what in both if names]


class _SavedState:
    """An optimizer's state in a checkpoint.

    Args:
        optimizer: that is to get it.
        source: the checkpoint.
        everyone: the ranks.
    """

    def __init__(self, optimizer: Any, source: Source, everyone: Sequence[Ranks]) -> None:
        if source.optimizer is None:
            raise ValueError(f"{source.path} has no optimizer in it: load it without one")
        self._optimizer, self._rest, self._everyone = optimizer, source.optimizer_rest, everyone
        self._what = f"read the optimizer's state in {source.path}"
        self._files = source.optimizer
        self._plan = StatePlan([], [], [], [])

    def problems(self, tensors: dict[str, Stored]) -> list[str]:
        """What does not fit."""
        self._plan = plan_state(self._optimizer, tensors, self._files, self._rest)
        return self._plan.problems

    def load(self) -> None:
        """Collective. Read it, and have the optimizer go on with it if every rank could."""
        found = done_by_all(self._everyone, self._what, lambda: read_state(self._optimizer, self._plan, self._files))
        _compare(self._files, self._everyone)
        give_state(self._optimizer, self._plan, found)
        release_state(self._plan.groups)


def _found(path: str | os.PathLike[str], everyone: Sequence[Ranks], only: str | None) -> Source:
    """Collective. The checkpoint, which all ranks have."""
    place = os.fspath(path)

    def look() -> Source:
        read_it = read_dcp if is_dcp(place) and not is_ours(place) else read_ours
        with reading(place):
            return read_it(place, Choices(only=only))

    source = done_by_all(everyone, f"open the checkpoint {place}", look)
    for ranks in everyone:
        agree_on(ranks, "checkpoints", source.identity, source.path)
    return source


def _compare(files: TensorReader, everyone: Sequence[Ranks]) -> None:
    """Collective. Blocks of which ranks have read different parts are as they were saved, if anybody noted that."""
    if not isinstance(files, CheckedFiles):
        return
    heard = [each for ranks in everyone if peers_answer(ranks) for each in from_everyone(ranks, files.fragments)]
    done_by_all(everyone, f"find {files.path} undamaged", lambda: files.compare_fragments(heard))


def _generators(source: Source, everyone: Sequence[Ranks]) -> GeneratorStates | None:
    """Those of this rank, if as many ranks load the checkpoint as saved it."""
    ranks = everyone[0] if everyone else ()
    if source.generators is None or len(everyone) > 1 or size_of(ranks) != source.world_size:
        return None
    number = number_among(ranks)
    try:
        return GeneratorStates(decoded(source.generators[number]))
    except ValueError as error:
        raise ValueError(
            f"{source.path}, of rank {number}: {error}. Load another checkpoint, or this one with generators=False."
        ) from None
