"""Random models, wrappings, options and calls against the unsharded model (`tests.fuzzing.running`).

A few cases each time; `make test ARGS="tests/test_fuzz.py --fuzz-cases 2000"` runs more, and `--fuzz-seed` others.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from fsdp.distributed.gathered_part import LEAST_TORCH
from tests.fuzzing.case import OPTIMIZERS, Case
from tests.fuzzing.mistakes import MISTAKES
from tests.fuzzing.models import plain_model
from tests.fuzzing.running import run_seeds, run_seeds_with
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks
from tests.helpers.ranks import RankError, RankPool, Ranks

CHUNK = 20  # cases in one run of ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_cases_equal_the_unsharded_model(ranks: RankPool, world_size: int, pytestconfig: pytest.Config) -> None:
    _run_cases(ranks(world_size), pytestconfig)


@pytest.mark.accelerator
@pytest.mark.parametrize("world_size", [2, 4])
def test_random_cases_on_an_accelerator_equal_the_unsharded_model(
    accelerator_ranks: AcceleratorRanks, world_size: int, pytestconfig: pytest.Config
) -> None:
    _run_cases(accelerator_ranks(world_size, backend="nccl"), pytestconfig, ACCELERATOR)


def _run_cases(ranks: Ranks, config: pytest.Config, device: str = "cpu") -> None:
    first, count = config.getoption("--fuzz-seed"), config.getoption("--fuzz-cases")
    left = [seed for seed in range(first, first + count) if seed % 4 == ranks.world_size - 1]
    failures = []
    while left:
        now, left = left[:CHUNK], left[CHUNK:]
        try:
            ranks.run(run_seeds, now, ranks.world_size, device)
        except RankError as error:
            failures.append(str(error))
            seed = re.search(r"seed (\d+) at", failures[-1])
            if seed is None:  # the ranks have died or waited for each other, and said nothing of the case
                failures[-1] = f"one of the seeds {now}: {failures[-1]}"
            else:
                left = now[now.index(int(seed[1])) + 1 :] + left
    assert not failures, f"{len(failures)} cases failed, the first one:\n{failures[0]}"


def test_a_case_follows_from_its_seed() -> None:
    assert [Case.of_seed(seed, 2) for seed in range(20)] == [Case.of_seed(seed, 2) for seed in range(20)]
    assert len({str(Case.of_seed(seed, 2)) for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", [5054, 5187, 5249])
def test_no_training_diverges(seed: int) -> None:
    case, generator = Case.of_seed(seed, 2), torch.Generator().manual_seed(seed)
    model = plain_model(case)
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    for _ in range(9):
        model(torch.randn(4, 2, 3, generator=generator), [True] * model.optional).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.detach().abs().max() < 10 for param in model.parameters())


def is_rows(case: Case) -> bool:
    return case.door == "fully_shard"


def has_any(case: Case, *operations: str) -> bool:
    return not {*operations}.isdisjoint(case.operations)


# What a case has to do, so that a mistake can show, where most cases do not.
NEEDED: dict[str, Callable[[Case], bool]] = {
    "the optimizer's state is not loaded": lambda case: "optimizer_state" in case.operations,
    "the last rank does not load": lambda case: "load" in case.operations,
    "replicas go apart": lambda case: case.options.get("sharding") in ("hybrid", "replicated"),
    "stale parameters are computed with": lambda case: "local_state" in case.operations,
    "leaves are built anew when a parameter is frozen": lambda case: "toggle" in case.operations,
    "writes to memory are not seen": lambda case: is_rows(case) and has_any(case, "average", "write_memory"),
    "data of rows is dropped": lambda case: is_rows(case) and "write_memory" in case.operations,
    "data that was kept is overwritten": lambda case: "write_memory" in case.operations,
    "numbers of another nesting are believed": lambda case: "wrap_otherwise" in case.operations and not is_rows(case),
    "writes to rows are dropped": lambda case: is_rows(case) and "write_rows" in case.operations,
}

# A seed whose case is short and finds the mistake; if it no longer does, the other seeds follow.
FIRST = {
    "gradients are divided twice": 121,
    "gradients replace accumulated ones": 25,
    "clipping knows this rank's norm only": 121,
    "the last rank does not load": 513,
    "replicas go apart": 419,
    "the optimizer's state is not loaded": 513,
    "leaves are built anew when a parameter is frozen": 557,
    "a forward lists shards": 93,
    "writes to memory are not seen": 185,
    "data of rows is dropped": 1561,
    "data that was kept is overwritten": 329,
    "writes to rows are dropped": 329,
    "numbers of another nesting are believed": 529,
    "what is not used has a gradient": 21,
    "stale parameters are computed with": 2749,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(ranks: RankPool, mistake: str) -> None:
    if mistake == "writes to rows are dropped" and torch.__version__ < LEAST_TORCH:
        pytest.skip("before, torch does not dispatch to subclasses of DTensor")
    world_size, is_able = 4 if "replicas" in mistake else 2, NEEDED.get(mistake, lambda case: True)
    cases = (Case.of_seed(seed, world_size) for seed in range(world_size - 1, 2000, 4))
    seeds = [case.seed for case in cases if is_able(case) and case.optimizer != "sgd"][:40]
    with pytest.raises(RankError, match=r"CaseError: seed \d+ at operation"):
        ranks(world_size, grace=1).run(run_seeds_with, mistake, [FIRST[mistake], *seeds], world_size)
