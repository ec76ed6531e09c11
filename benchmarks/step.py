"""Training steps of a GPT with this library and with torch, in the same run: time, CPU time, bytes, memory.

    python -m benchmarks.step
    python -m benchmarks.step --size 46M --rounds 6 --only ours fsdp2
    python -m benchmarks.step --precision bfloat16
    python -m benchmarks.step --skip gathers

Ratios are first, because only ratios are valid on other machines. `docs/benchmarks.md` explains the columns. Exits
with 1 if the contestants compute different losses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import (
    CONTESTANTS,
    DDP,
    FLOOR,
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    FSDP2_PREFETCH,
    OURS,
    OURS_ORIG,
    OURS_ROWS,
    SHARDED_FLOOR,
    Policy,
    choose,
)
from benchmarks._figures import (
    Figures,
    best_peers,
    cpu_above_floor,
    join,
    live_bytes,
    peak_bytes,
    with_memory,
    without_refused,
)
from benchmarks._measure import Spread, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._report_losses import report_losses
from benchmarks._report_steps import report_memory, report_original_parameters, report_times
from benchmarks._skipping import Skip
from benchmarks._step_options import add_options, check_counts, describe, write_json
from benchmarks._training import BFLOAT16_TOLERANCES, Setup, train_interleaved

AMONG = (OURS, OURS_ORIG, OURS_ROWS, FSDP1_FLAT, FSDP1_ORIG, FSDP2, FSDP2_PREFETCH, DDP, FLOOR, SHARDED_FLOOR)
_ALWAYS = (DDP, FLOOR, SHARDED_FLOOR)  # everything is related to them

# The targets of `ours`, as ratios to the best sharded peer's figure.
TARGETS = {"step time": 0.85, "CPU time above the floor": 0.6, "peak memory": 0.8, "live bytes": 1.0}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    setup = _setup(options)
    names = choose(options.only, among=AMONG, always=_ALWAYS)
    names = [name for name in names if CONTESTANTS[name].can_do(setup.policy, setup.device)]
    print(describe(options, setup, f"{options.precision}, offload {options.offload}"), flush=True)
    warn_if_busy()
    if setup.device != "cpu":  # where a backend may not have what a peer asks for
        names = without_refused(setup, names, options.ranks)
    ranks = run_ranks(
        train_interleaved, options.ranks, setup, names, options.rounds, options.steps, device=setup.device
    )
    figures = {name: join([rank[name] for rank in ranks]) for name in names}
    same = True
    if setup.skip is Skip.NOTHING:
        losses = {name: [rank[name].losses for rank in ranks] for name in names}
        same = report_losses(losses, BFLOAT16_TOLERANCES if setup.policy.is_mixed else setup.float32_tolerances)
    else:
        print(f"\nWithout {setup.skip.value}: results are wrong, only the times mean something.")
    report_times(figures, setup)
    if not options.no_memory and setup.skip is Skip.NOTHING:
        figures = with_memory(figures, setup, options.ranks)
        report_memory(figures, setup)
    report_original_parameters(figures)
    if setup.skip is Skip.NOTHING:
        report_targets(figures)
    if options.json is not None:
        write_json(options, ranks, figures)
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
    add_options(parser, AMONG, _ALWAYS, rounds=12)
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
    options = parser.parse_args(arguments)
    check_counts(parser, options)
    return options


def report_targets(figures: Mapping[str, Figures]) -> None:
    """Print `ours` relative to its targets, if `ours` and a peer ran."""
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
        ratios["peak memory"] = _median_ratio(peak_bytes(figures), peak_peer), peak_peer
    if ours.live and live_peer:
        ratios["live bytes"] = _median_ratio(live_bytes(figures), live_peer), live_peer
    print()
    for what, (ratio, other) in ratios.items():
        verdict = "met" if ratio <= TARGETS[what] else "MISSED"
        print(f"{what}: {ratio:.3f} of the best peer's ({other}), at most {TARGETS[what]:.2f} wanted: {verdict}")


def _median_ratio(values: Mapping[str, Sequence[float]], peer: str) -> float:
    return Spread.of_ratios(values[OURS], values[peer]).median


if __name__ == "__main__":
    sys.exit(main())
