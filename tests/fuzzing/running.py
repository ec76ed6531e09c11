"""Random models, options and sequences of calls, each compared with the unsharded model.

A `Case` follows from its seed alone, on every rank alike. It is run by `run_case`: every rank builds the sharded model
and an unsharded twin, does the same with both, and compares values after each operation. The twin computes the batches
of all ranks, one after the other, and averages their gradients, so it needs no process group.

Everything is in float64 (but for cases that compute in float32 on purpose), so two right results agree to about 1e-12,
and a wrong divisor, a stale weight or a shifted shard is seen at once.
"""

from __future__ import annotations

import copy
import pkgutil
import random
from collections.abc import Sequence
from unittest import mock

import torch

from tests.fuzzing import operations
from tests.fuzzing.case import Case
from tests.fuzzing.mistakes import MISTAKES
from tests.fuzzing.models import plain_model
from tests.fuzzing.pair import Pair
from tests.fuzzing.sharding import shard


def run_case(case: Case) -> None:
    """Collective. Do what the case says with both models, and raise AssertionError where they differ."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        pair = _make(case)
        pair.compare("after wrapping")
        for number, name in enumerate(case.operations):
            what = f"operation {number}, {name}"
            try:
                getattr(operations, name)(pair)
                pair.compare("afterwards")
            except Exception as error:
                raise CaseError(f"seed {case.seed} at {what}: {type(error).__name__}: {error}\n{case}") from error
    finally:
        torch.set_default_dtype(before)


class CaseError(AssertionError):
    """A case's result differs from the unsharded model's, or it raised."""


def _make(case: Case) -> Pair:
    plain = plain_model(case).to(case.device)
    return Pair(case, shard(case, copy.deepcopy(plain)), plain, random.Random(f"operations {case.seed}"))


def run_seeds(seeds: Sequence[int], world_size: int, device: str = "cpu") -> None:
    """Collective. The cases of these seeds, one after the other."""
    for seed in seeds:
        run_case(Case.of_seed(seed, world_size, device))


def run_seeds_with(mistake: str, seeds: Sequence[int], world_size: int) -> None:
    """Collective. As `run_seeds`, with a mistake planted in the library."""
    place, planted = MISTAKES[mistake]
    owner, _, name = place.rpartition(".")
    pkgutil.resolve_name(place)  # loads what is loaded when it is first used
    target = pkgutil.resolve_name(owner)
    with mock.patch.object(target, name, planted(target.__dict__[name])):
        run_seeds(seeds, world_size)
