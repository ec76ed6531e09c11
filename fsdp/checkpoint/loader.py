"""Loading a checkpoint: each rank reads what it keeps, at any number of ranks, and all compare checksums."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.checkpoint.folder import found, step_of
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.load_safetensors import does_not_fit, misfits, read
from fsdp.checkpoint.manifest import read_ours
from fsdp.checkpoint.model_tensors import extra_states, named_tensors, prepared, size_of, tensors_in
from fsdp.checkpoint.optim import StatePlan, give_state, plan_state, read_state
from fsdp.checkpoint.safetensors import CheckedFiles
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
from fsdp.engine.unit import Unit


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
        """Return the step that it was saved with; None if it was saved without one."""
        return step_of(self.path)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Any, *, strict: bool, generators: bool) -> Loaded:
    """Collective. Load a checkpoint: see `fsdp.checkpoint.load`."""
    units, everyone = prepared(model, "load a checkpoint")
    settings = [f"strict={bool(strict)}", f"generators={bool(generators)}"]
    settings += ["no optimizer" if optimizer is None else "an optimizer"]
    for ranks in everyone:
        agree_on(ranks, "settings to load a checkpoint", ", ".join(settings))
    with closing(_opened(path, everyone, optimizer is not None)) as source:
        states = None
        if generators:
            states = done_by_all(everyone, f"read {source.path}", lambda: _generators(source, everyone))
        targets = tensors_in(model, units)
        missing, unexpected, problems = misfits(targets, source.model, strict)
        extra = extra_states(model)
        problems += _extra_problems(extra, source) if strict else []
        plan = None
        if optimizer is not None:
            plan = done_by_all(everyone, f"load {source.path}", lambda: _plan(optimizer, source, model, units))
            problems += plan.problems
        problem = RuntimeError(does_not_fit(source.path, model, problems)) if problems else None
        agree_on_outcome(everyone, f"load {source.path}", problem)
        done_by_all(everyone, f"read {source.path}", lambda: read(targets, units, source.model))
        _compare(source.model, everyone)
        if plan is not None and source.optimizer is not None:
            what, files = f"read the optimizer's state in {source.path}", source.optimizer
            found = done_by_all(everyone, what, partial(read_state, plan, files))
            _compare(files, everyone)
            give_state(plan, found)
    for name in extra.keys() & source.extra.keys():
        extra[name].set_extra_state(decoded(source.extra[name]))
    if states is not None:
        states.set()
    return Loaded(Path(source.path), decoded(source.values), missing, unexpected, states is not None, source.world_size)


def _extra_problems(extra: Mapping[str, nn.Module], source: Source) -> list[str]:
    missing, unexpected = extra.keys() - source.extra.keys(), source.extra.keys() - extra.keys()
    both = ((missing, "missing"), (unexpected, "unexpected"))
    return [f"{what}: {readable(', '.join(sorted(names)))}" for names, what in both if names]


def _plan(optimizer: Any, source: Source, model: nn.Module, units: Sequence[Unit]) -> StatePlan:
    if source.optimizer is None:
        raise ValueError(f"{source.path} has no optimizer in it: load it without one")
    return plan_state(optimizer, named_tensors(model, units), source.optimizer, source.optimizer_rest)


def _opened(path: str | os.PathLike[str], everyone: Sequence[Ranks], with_optimizer: bool) -> Source:
    """Collective. Open the checkpoint, which all ranks must have."""
    place = os.fspath(path)

    def look() -> Source:
        with reading(place):
            if found(place) is None and os.path.exists(place):
                from fsdp.checkpoint.formats.dcp import is_dcp, read_dcp  # loaded only for such a folder
                from fsdp.checkpoint.formats.trees import Choices

                if is_dcp(place):
                    return read_dcp(place, Choices(only=None if with_optimizer else "model"))
            return read_ours(place, with_optimizer=with_optimizer)

    source = done_by_all(everyone, f"open the checkpoint {place}", look)
    for ranks in everyone:
        agree_on(ranks, "checkpoints", source.identity, source.path)
    return source


def _compare(files: TensorReader, everyone: Sequence[Ranks]) -> None:
    """Collective. Compare the blocks of which ranks have read different ranges, if there are checksums."""
    if not isinstance(files, CheckedFiles):
        return
    heard = [each for ranks in everyone if peers_answer(ranks) for each in from_everyone(ranks, files.fragments)]
    done_by_all(everyone, f"find {files.path} undamaged", lambda: files.compare_fragments(heard))


def _generators(source: Source, everyone: Sequence[Ranks]) -> GeneratorStates | None:
    """Return the states of this rank's generators, if as many ranks load the checkpoint as saved it."""
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


# --- random number generators -----------------------------------------------------------------------------------------


_WORDS = 624  # of a Mersenne Twister, which all three generators on the CPU are
_POSITION = struct.Struct("<8xiiQ")  # in torch's state: behind the seed, how many are left, a flag, and the next one


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """The states of this process's random number generators, checked so that they can be set without harm.

    NumPy takes any position, torch some that do not fit together, and then they read memory that is not their own.
    """

    states: dict[str, Any]

    def __post_init__(self) -> None:
        checks = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch}
        if not isinstance(self.states, dict) or not checks.keys() <= self.states.keys():
            raise ValueError("the states of random number generators are not those of Python's, NumPy's and torch's")
        for name, check in checks.items():
            try:
                check(self.states[name])
            except (ValueError, TypeError, OverflowError, RuntimeError) as error:
                raise ValueError(f"the state of {name}'s random number generator cannot be set: {error}") from None
        cuda = self.states.get("cuda")
        if cuda is not None and not _is_bytes(cuda):
            raise ValueError("the state of the GPU's random number generator cannot be set: it is no tensor of bytes")

    def set(self) -> None:
        """Have the generators go on from there; one that has no state among them is left alone."""
        random.setstate(self.states["python"])
        kind, keys, *rest = self.states["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(self.states["torch"])
        if "cuda" in self.states and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.states["cuda"])


def _check_python(state: Any) -> None:
    version, words, gauss = state
    if not (isinstance(words, tuple) and all(type(word) is int and 0 <= word < 1 << 32 for word in words)):
        raise ValueError("it is not made of numbers of 32 bits")
    if version == 3 and not (len(words) == _WORDS + 1 and 1 <= words[-1] <= _WORDS):
        raise ValueError(f"it has {len(words)} numbers, of which the last one is its position")
    if not (gauss is None or isinstance(gauss, float)):
        raise ValueError("what it keeps for the next call is no number")
    random.Random().setstate(state)


def _check_numpy(state: Any) -> None:
    kind, keys, position, has_gauss, gauss = state
    if kind != "MT19937":
        raise ValueError(f"it is not of the kind MT19937, which numpy.random has: {kind!r}")
    if not isinstance(keys, bytes) or len(keys) != 4 * _WORDS:
        raise ValueError(f"it is not made of {_WORDS} numbers of 32 bits")
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"its position is {position!r}, and must be 0 to {_WORDS}")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("what it keeps for the next call is no number")


def _check_torch(state: Any) -> None:
    if not _is_bytes(state):
        raise ValueError("it is no tensor of bytes")
    torch.Generator().set_state(state)  # which looks at the numbers one by one
    left, _, position = _POSITION.unpack_from(state.numpy().tobytes())
    if left + position > _WORDS + 1:
        raise ValueError(f"{left} of its numbers are left from position {position} on, and it has {_WORDS}")


def _is_bytes(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype == torch.uint8 and state.dim() == 1
