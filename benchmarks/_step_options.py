"""Common command-line options and output of `benchmarks.step` and `benchmarks.lora`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks._figures import Figures
from benchmarks._ranks import DEVICES, backend_of
from benchmarks._training import Rounds, Setup
from examples.gpt.model import SIZES

_COUNTS = ("ranks", "batch", "context", "rounds", "steps")


def add_options(parser: argparse.ArgumentParser, among: Sequence[str], always: Sequence[str], rounds: int) -> None:
    """The options of a run in which contestants `among` take turns, those in `always` in any case."""
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="17M")
    add("--ranks", type=int, default=2)
    add("--batch", type=int, default=Setup.batch, help="sequences per rank (%(default)s)")
    add("--context", type=int, default=Setup.context, help="length of one (%(default)s)")
    add("--rounds", type=int, default=rounds, help="(%(default)s)")
    add("--steps", type=int, default=3, help="of each contestant in a round (%(default)s)")
    add("--foreach", action="store_true", help="AdamW by its foreach implementation, not fused")
    add("--device", choices=DEVICES, default="cpu", help="cuda: NCCL, also if ranks share GPUs; sim: no real times")
    add(
        "--only",
        nargs="+",
        choices=list(among),
        metavar="NAME",
        help=f"of {', '.join(among)}; {', '.join(always)} always run",
    )
    add("--no-memory", action="store_true", help="leave out the memory figures")
    add("--json", type=Path, metavar="FILE", help="write every round's figures there")


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *more: str) -> None:
    """Reject numbers below 1, also for `more` options."""
    for name in (*_COUNTS, *more):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")


def describe(options: argparse.Namespace, setup: Setup, details: str) -> str:
    """Return a line that describes the run, with `details`."""
    return (
        f"{setup.size} parameters ({setup.num_parameters:,}), {options.ranks} ranks with one thread each, "
        f"batch {setup.batch} x {setup.context}, AdamW ({'foreach' if setup.foreach else 'fused'}), "
        f"{details}, "
        f"{options.rounds} rounds of {options.steps} steps in rotated order, {setup.device} "
        f"({backend_of(setup.device)}), "
        f"torch {torch.__version__}"
    )


def write_json(
    options: argparse.Namespace, ranks: Sequence[Mapping[str, Rounds]], figures: Mapping[str, Figures]
) -> None:
    """Everything that was measured, into the file that was asked for."""
    content = {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "torch": torch.__version__,
        "contestants": {name: asdict(figure) for name, figure in figures.items()},
        "ranks": [{name: asdict(rounds) for name, rounds in rank.items()} for rank in ranks],
    }
    options.json.write_text(json.dumps(content, indent=1))
