"""Steps of several contestants as the whole run saw them: all ranks together, and who is best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks._contestants import CONTESTANTS, FLOOR, SHARDED_FLOOR, Kind
from benchmarks._machines import Machine
from benchmarks._measure import NOTHING_KEPT, Spread, count_collectives
from benchmarks._ranks import run_ranks
from benchmarks._training import Memory, Rounds, Setup, refusals, train_alone
from examples.gpt.report import HeldBytes

_MEMORY_STEPS = 3


@dataclass(frozen=True)
class Figures:
    """The results of a contestant over all ranks, per round if possible.

    Args:
        seconds: step time of the slowest rank.
        cpu_seconds: mean over the ranks.
        sent: bytes per step, mean over the ranks; None if the kernel does not provide them.
        sent_in_float32: the same for a step in float32; None if it was not counted.
        collectives: per step.
        operations: backend operations per step on rank 0.
        held: bytes between backward and the next step, on the rank with the highest value of each.
        resident, live: memory of the rank with the highest value, an entry for each run; empty if it was not measured.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    sent: float | None
    sent_in_float32: float | None
    collectives: float
    operations: dict[str, int]
    held: HeldBytes | None
    resident: tuple[Memory, ...] = ()
    live: tuple[Memory, ...] = ()


def join(ranks: Sequence[Rounds]) -> Figures:
    """Combine the results of all ranks for a contestant."""
    sent = [statistics.median(rank.sent) for rank in ranks if rank.sent]
    in_float32 = [rank.sent_in_float32 for rank in ranks if rank.sent_in_float32 is not None]
    return Figures(
        seconds=[max(values) for values in zip(*(rank.seconds for rank in ranks), strict=True)],
        cpu_seconds=[statistics.mean(values) for values in zip(*(rank.cpu_seconds for rank in ranks), strict=True)],
        sent=statistics.mean(sent) if len(sent) == len(ranks) else None,
        sent_in_float32=statistics.mean(in_float32) if len(in_float32) == len(ranks) else None,
        collectives=count_collectives(ranks[0].operations, len(ranks)),
        operations=ranks[0].operations,
        held=_most([rank.held for rank in ranks if rank.held is not None]),
    )


def _most(held: Sequence[HeldBytes]) -> HeldBytes | None:
    if not held:
        return None
    return HeldBytes(
        parameters=max(each.parameters for each in held),
        gradients=max(each.gradients for each in held),
        optimizer_state=max(each.optimizer_state for each in held),
    )


def with_memory(
    figures: Mapping[str, Figures], setup: Setup, world_size: int, runs: int = 1, machines: Sequence[Machine] = ()
) -> dict[str, Figures]:
    """The figures, with the memory of each contestant over `runs` runs, in which the contestants take turns."""
    complete = dict(figures)
    for _ in range(runs):
        for name, figure in complete.items():
            resident, live = _measure_memory(setup, name, world_size, machines)
            complete[name] = replace(figure, resident=(*figure.resident, resident), live=(*figure.live, live))
    return complete


def _measure_memory(setup: Setup, name: str, world_size: int, machines: Sequence[Machine]) -> tuple[Memory, Memory]:
    """Run a contestant in separate processes: the heap must not contain memory of another contestant."""

    def most(environment: Mapping[str, str] | None) -> tuple[Memory, Memory]:
        ranks = run_ranks(
            train_alone,
            world_size,
            *(setup, name, _MEMORY_STEPS),
            device=setup.device,
            environment=environment,
            machines=machines,
        )
        resident, live = max(ranks, key=lambda pair: pair[0].peak)
        return resident, live

    resident, live = most(None)
    if setup.device == "cpu":
        _, live = most(NOTHING_KEPT)
    return resident, live


# --- what is compared


def without_refused(setup: Setup, names: Sequence[str], world_size: int) -> list[str]:
    """Return the names without peers that raise when they train a tiny model like this one; print their errors."""
    peers = [name for name in names if CONTESTANTS[name].kind is Kind.PEER]
    refused = run_ranks(refusals, world_size, replace(setup, size="tiny"), peers, device=setup.device)[0]
    for name, error in refused.items():
        print(f"Left out: {name}, which raises {error}", flush=True)
    return [name for name in names if name not in refused]


def floor_of(name: str) -> str:
    """The floor that does the same optimizer work."""
    return SHARDED_FLOOR if CONTESTANTS[name].is_sharded else FLOOR


def cpu_above_floor(figures: Mapping[str, Figures], name: str) -> list[float]:
    """CPU seconds per step above the floor of the same round."""
    floor = figures[floor_of(name)]
    return [mine - least for mine, least in zip(figures[name].cpu_seconds, floor.cpu_seconds, strict=True)]


def peak_bytes(figures: Mapping[str, Figures]) -> dict[str, list[float]]:
    return {name: [run.peak for run in figure.resident] for name, figure in figures.items() if figure.resident}


def live_bytes(figures: Mapping[str, Figures]) -> dict[str, list[float]]:
    return {name: [run.peak for run in figure.live] for name, figure in figures.items() if figure.live}


class BestPeers(NamedTuple):
    """The sharded peer with the lowest value of each figure; None if no peer has the figure."""

    step: str | None
    cpu: str | None
    peak: str | None
    live: str | None


def best_peers(figures: Mapping[str, Figures]) -> BestPeers:
    # By ratios of the same round, so that a disturbance in a contestant's turn does not affect the choice.
    step = {
        name: Spread.of_ratios(figure.seconds, figures[floor_of(name)].seconds).median
        for name, figure in figures.items()
    }
    cpu = {name: statistics.median(cpu_above_floor(figures, name)) for name in figures}
    peak = {name: statistics.median(runs) for name, runs in peak_bytes(figures).items()}
    live = {name: statistics.median(runs) for name, runs in live_bytes(figures).items()}

    def best(values: Mapping[str, float]) -> str | None:
        peers = [name for name in values if CONTESTANTS[name].kind is Kind.PEER]
        return min(peers, key=values.__getitem__, default=None)

    return BestPeers(best(step), best(cpu), best(peak), best(live))
