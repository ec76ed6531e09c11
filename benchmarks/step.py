"""Training steps of one GPT with ours and with torch's own ways, in one run: time, CPU time, bytes, memory.

    python -m benchmarks.step
    python -m benchmarks.step --size 46M --rounds 6 --only ours fsdp2
    python -m benchmarks.step --precision bfloat16
    python -m benchmarks.step --skip gathers

Ratios come first, because only they carry over to another machine. `docs/benchmarks.md` says what each column
means. Exits with 1 when the contestants do not compute the same losses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import (
    CONTESTANTS,
    DDP,
    FLOOR,
    OURS,
    SHARDED_FLOOR,
    Kind,
    Policy,
    Skip,
    choose,
)
from benchmarks._measure import NOTHING_KEPT, Spread, count_collectives, table, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._report_losses import report_losses
from benchmarks._training import BFLOAT16_TOLERANCES, Memory, Rounds, Setup, train_alone, train_interleaved
from benchmarks.gpt import SIZES

_BYTES = 4  # of a float32 parameter
_MEMORY_STEPS = 3
_MISSING = "-"

# What ours is held to, as a ratio to the best sharded peer's figure.
TARGETS = {"step time": 0.85, "CPU time above the floor": 0.6, "peak memory": 0.8, "live bytes": 1.0}


@dataclass(frozen=True)
class Figures:
    """One contestant, all ranks together: per round where that is possible.

    Args:
        seconds: step time of the slowest rank.
        cpu_seconds: mean over the ranks.
        sent: bytes per step, mean over the ranks; None where the kernel does not tell.
        sent_in_float32: the same in a step in float32; None where it was not counted.
        collectives: per step.
        operations: backend operations per step on rank 0.
        resident, live: memory of the rank that has most; None when it was not measured.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    sent: float | None
    sent_in_float32: float | None
    collectives: float
    operations: dict[str, int]
    resident: Memory | None = None
    live: Memory | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    setup = _setup(options)
    names = choose(options.only, among=CONTESTANTS, always=(DDP, FLOOR, SHARDED_FLOOR))
    names = [name for name in names if CONTESTANTS[name].can_do(setup.policy, setup.device)]
    print(
        f"{setup.size} parameters ({setup.num_parameters:,}), {options.ranks} ranks with one thread each, "
        f"batch {setup.batch} x {setup.context}, AdamW ({'foreach' if setup.foreach else 'fused'}), "
        f"{options.precision}, offload {options.offload}, "
        f"{options.rounds} rounds of {options.steps} steps in rotated order, {setup.device}, "
        f"torch {torch.__version__}",
        flush=True,
    )
    warn_if_busy()
    ranks = run_ranks(
        train_interleaved, options.ranks, setup, names, options.rounds, options.steps, device=setup.device
    )
    figures = {name: _join([rank[name] for rank in ranks], options.ranks) for name in names}
    same = True
    if setup.skip is Skip.NOTHING:
        losses = {name: [rank[name].losses for rank in ranks] for name in names}
        same = report_losses(losses, BFLOAT16_TOLERANCES if setup.policy.is_mixed else None)
    else:
        print(f"\nWithout {setup.skip.value}: results are wrong, only the times mean something.")
    report_times(figures, setup)
    if not options.no_memory and setup.skip is Skip.NOTHING:
        figures = {name: _with_memory(figures[name], setup, name, options.ranks) for name in names}
        report_memory(figures, setup)
    if setup.skip is Skip.NOTHING:
        report_targets(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(options, ranks, figures), indent=1))
    return 0 if same else 1


def _setup(options: argparse.Namespace) -> Setup:
    return Setup(
        size=options.size,
        batch=options.batch,
        context=options.context,
        foreach=options.foreach,
        device=options.device,
        skip=Skip(options.skip),
        policy=Policy(getattr(torch, options.precision), offload=options.offload == "cpu"),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description="Training steps: ours, the peers and the floor in one run.",
    )
    parser.add_argument("--size", choices=list(SIZES), default="17M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=Setup.batch, help="sequences per rank (%(default)s)")
    parser.add_argument("--context", type=int, default=Setup.context, help="length of one (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of each contestant in a round (%(default)s)")
    parser.add_argument("--foreach", action="store_true", help="AdamW by its foreach implementation, not fused")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help=f"what sharded contestants compute, gather and reduce in; {DDP} and its floor stay in float32",
    )
    parser.add_argument(
        "--offload", choices=("none", "cpu"), default="none", help="shards and gradients in host memory, where sharded"
    )
    parser.add_argument("--skip", choices=[skip.value for skip in Skip], default=Skip.NOTHING.value)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CONTESTANTS),
        metavar="NAME",
        help=f"of {', '.join(CONTESTANTS)}; {DDP} and the floors always run",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    options = parser.parse_args(arguments)
    for name in ("ranks", "batch", "context", "rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def _join(ranks: Sequence[Rounds], world_size: int) -> Figures:
    sent = [statistics.median(rank.sent) for rank in ranks if rank.sent]
    in_float32 = [rank.sent_in_float32 for rank in ranks if rank.sent_in_float32 is not None]
    return Figures(
        seconds=[max(values) for values in zip(*(rank.seconds for rank in ranks), strict=True)],
        cpu_seconds=[statistics.mean(values) for values in zip(*(rank.cpu_seconds for rank in ranks), strict=True)],
        sent=statistics.mean(sent) if len(sent) == len(ranks) else None,
        sent_in_float32=statistics.mean(in_float32) if len(in_float32) == len(ranks) else None,
        collectives=count_collectives(ranks[0].operations, world_size),
        operations=ranks[0].operations,
    )


def _with_memory(figures: Figures, setup: Setup, name: str, world_size: int) -> Figures:
    """Runs this contestant in processes of its own: what the heap keeps must not come from another one."""

    def most(environment: Mapping[str, str] | None) -> tuple[Memory, Memory]:
        ranks = run_ranks(
            train_alone, world_size, setup, name, _MEMORY_STEPS, device=setup.device, environment=environment
        )
        resident, live = max(ranks, key=lambda pair: pair[0].peak)
        return resident, live

    resident, live = most(None)
    if setup.device == "cpu":
        _, live = most(NOTHING_KEPT)
    return Figures(**{**vars(figures), "resident": resident, "live": live})


# --- what is compared


def floor_of(name: str) -> str:
    """The floor that does the same optimizer work."""
    return SHARDED_FLOOR if CONTESTANTS[name].is_sharded else FLOOR


def cpu_above_floor(figures: Mapping[str, Figures], name: str) -> list[float]:
    """CPU seconds per step above the floor of the same round."""
    floor = figures[floor_of(name)]
    return [mine - least for mine, least in zip(figures[name].cpu_seconds, floor.cpu_seconds, strict=True)]


def peak_bytes(figures: Mapping[str, Figures]) -> dict[str, int]:
    return {name: figure.resident.peak for name, figure in figures.items() if figure.resident}


def live_bytes(figures: Mapping[str, Figures]) -> dict[str, int]:
    return {name: figure.live.peak for name, figure in figures.items() if figure.live}


class BestPeers(NamedTuple):
    """The sharded peer with the lowest figure of each kind; None when no peer has one."""

    step: str | None
    cpu: str | None
    peak: str | None
    live: str | None


def best_peers(figures: Mapping[str, Figures]) -> BestPeers:
    # By ratios of the same round, so that a disturbance in one contestant's turn does not choose.
    step = {
        name: Spread.of_ratios(figure.seconds, figures[floor_of(name)].seconds).median
        for name, figure in figures.items()
    }
    cpu = {name: statistics.median(cpu_above_floor(figures, name)) for name in figures}

    def best(values: Mapping[str, float]) -> str | None:
        peers = [name for name in values if CONTESTANTS[name].kind is Kind.PEER]
        return min(peers, key=values.__getitem__, default=None)

    return BestPeers(best(step), best(cpu), best(peak_bytes(figures)), best(live_bytes(figures)))


# --- reports


def _label(name: str, setup: Setup) -> str:
    return f"{name} (float32)" if setup.policy.is_mixed and name in (DDP, FLOOR) else name


def _share_of_float32(figure: Figures) -> str:
    if figure.sent is None or not figure.sent_in_float32:
        return _MISSING
    return f"{figure.sent / figure.sent_in_float32:.2f}"


def report_times(figures: Mapping[str, Figures], setup: Setup) -> None:
    peer, cpu_peer, *_ = best_peers(figures)
    rows = []
    for name, figure in figures.items():
        is_floor = CONTESTANTS[name].kind is Kind.FLOOR
        above, floor = cpu_above_floor(figures, name), figures[floor_of(name)].seconds
        rows.append(
            [
                _label(name, setup),
                str(Spread.of_ratios(figure.seconds, figures[peer].seconds)) if peer else _MISSING,
                _MISSING if is_floor else str(Spread.of_ratios(figure.seconds, floor)),
                _MISSING
                if is_floor or not cpu_peer
                else str(Spread.of_ratios(above, cpu_above_floor(figures, cpu_peer))),
                _MISSING if figure.sent is None else f"{figure.sent / setup.num_parameters / _BYTES:.2f}",
                *([_MISSING if is_floor else _share_of_float32(figure)] if setup.policy.is_mixed else []),
                f"{figure.collectives:g}",
                f"{1000 * statistics.median(figure.seconds):.0f}",
                _MISSING if is_floor else f"{1000 * statistics.median(above):.0f}",
            ]
        )
    header = [
        "",
        "step / best peer",
        "step / floor",
        "CPU+ / best peer",
        "sent",
        *(["sent / float32"] if setup.policy.is_mixed else []),
        "colls",
        "step ms",
        "CPU+ ms",
    ]
    print(f"\nBest sharded peer: {peer or 'none'} by step time, {cpu_peer or 'none'} by CPU above the floor.")
    print(table(header, rows), flush=True)


def report_memory(figures: Mapping[str, Figures], setup: Setup) -> None:
    peaks, lives = peak_bytes(figures), live_bytes(figures)
    *_, peer, live_peer = best_peers(figures)
    rows = []
    for name, figure in figures.items():
        if figure.resident is None or figure.live is None:
            continue
        bytes_each = [figure.resident.peak, figure.live.peak, figure.live.between, figure.resident.built]
        rows.append(
            [
                _label(name, setup),
                f"{peaks[name] / peaks[peer]:.2f}" if peer else _MISSING,
                f"{lives[name] / lives[live_peer]:.2f}" if live_peer else _MISSING,
                *(f"{count / setup.num_parameters:.2f}" for count in bytes_each),
                f"{figure.resident.peak / 2**20:.0f}",
            ]
        )
    header = ["", "peak / best peer", "live / best peer", "peak", "live", "between", "building", "peak MiB"]
    best = f"{peer or 'none'} by peak, {live_peer or 'none'} by live bytes"
    print(f"\nMemory of a rank in bytes per parameter. Best sharded peer: {best}.")
    print(table(header, rows), flush=True)


def report_targets(figures: Mapping[str, Figures]) -> None:
    """Ours against what it is held to; nothing when ours did not run or no peer did."""
    peer, cpu_peer, peak_peer, live_peer = best_peers(figures)
    ours = figures.get(OURS)
    if ours is None or peer is None or cpu_peer is None:
        return
    above = cpu_above_floor(figures, OURS), cpu_above_floor(figures, cpu_peer)
    ratios = {
        "step time": (Spread.of_ratios(ours.seconds, figures[peer].seconds).median, peer),
        "CPU time above the floor": (Spread.of_ratios(*above).median, cpu_peer),
    }
    if ours.resident and peak_peer:
        ratios["peak memory"] = ours.resident.peak / peak_bytes(figures)[peak_peer], peak_peer
    if ours.live and live_peer:
        ratios["live bytes"] = ours.live.peak / live_bytes(figures)[live_peer], live_peer
    print()
    for what, (ratio, other) in ratios.items():
        verdict = "met" if ratio <= TARGETS[what] else "MISSED"
        print(f"{what}: {ratio:.3f} of the best peer's ({other}), at most {TARGETS[what]:.2f} wanted: {verdict}")


def _as_json(
    options: argparse.Namespace, ranks: Sequence[Mapping[str, Rounds]], figures: Mapping[str, Figures]
) -> dict[str, object]:
    return {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "torch": torch.__version__,
        "contestants": {name: asdict(figure) for name, figure in figures.items()},
        "ranks": [{name: asdict(rounds) for name, rounds in rank.items()} for rank in ranks],
    }


if __name__ == "__main__":
    sys.exit(main())
