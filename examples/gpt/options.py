"""The training job's arguments, which the launcher checks once and then hands on to
every rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from examples.gpt.model import SIZES


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a training run; the help texts of `parse_options` explain them.

    `ranks` and `device` are None until the launcher has looked at the machine.
    """

    data: str | None
    out: Path
    size: str
    steps: int
    max_seconds: float
    save_every: int
    resume: bool
    batch: int
    learning_rate: float
    max_bytes: int
    seed: int
    ranks: int | None
    device: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Without the usage text in front of it: what is wrong is then the only thing to
        # read.
        self.exit(2, f"error: {message}\n")


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"needs {what}, got {text!r}") from None
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return value

    return parse


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; an error prints a single line to stderr and exits with
    status 2.
    """
    description = "Train a small byte-level GPT, sharded, and check it."
    parser = _Parser(prog="python -m examples.gpt.launch", description=description)
    count, amount = _positive(int), _positive(float)
    add = parser.add_argument
    add(
        "--data",
        help="a file or a folder of text; default: the source of Python's standard "
        "library",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/gpt"),
        help="folder for weights and report [%(default)s]",
    )
    add(
        "--size", choices=SIZES, default="small", help="size of the model [%(default)s]"
    )
    add("--steps", type=count, default=700, help="optimizer steps [%(default)s]")
    add(
        "--max-seconds",
        type=amount,
        default=120.0,
        help="fewer steps where they would take longer [%(default)s]",
    )
    add(
        "--save-every",
        type=count,
        default=100,
        help="steps between two checkpoints, in OUT/checkpoints [%(default)s]",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, on any number of ranks",
    )
    add(
        "--batch",
        type=count,
        default=8,
        help="sequences per rank and step [%(default)s]",
    )
    add(
        "--learning-rate",
        type=amount,
        default=3e-3,
        help="at its highest [%(default)s]",
    )
    add(
        "--max-bytes",
        type=count,
        default=16_000_000,
        help="how much text to read [%(default)s]",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the weights and of the order of the text [%(default)s]",
    )
    add(
        "--ranks",
        type=count,
        help="processes; default: one for each GPU, or 2 on a machine without",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    return Options(**vars(parser.parse_args(arguments)))


def to_arguments(options: Options) -> list[str]:
    """The command line that `parse_options` reads back as `options`."""
    given = {
        f"--{name.replace('_', '-')}": value for name, value in vars(options).items()
    }
    flags = [name for name, value in given.items() if value is True]
    return flags + [
        f"{name}={value}"
        for name, value in given.items()
        if not isinstance(value, bool | None)
    ]
