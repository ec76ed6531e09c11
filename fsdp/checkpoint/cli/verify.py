"""``python -m fsdp verify``."""

from __future__ import annotations

import argparse

from fsdp.checkpoint.cli.show import Progress, say, size_text
from fsdp.checkpoint.formats.open_source import format_of
from fsdp.checkpoint.formats.trees import Choices

HELP = (
    "read a checkpoint from end to end, and name all that is damaged\n"
    "Ours, and what torch has written, is compared with checksums. Of safetensors files, which have none, headers and "
    "sizes are."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace, choices: Choices) -> int:
    """Print what is wrong, a line each, and return whether anything is."""
    found = format_of(args.path, args.format)
    with Progress("verifying") as progress:
        examined = found.examine(args.path, progress.start)
    for problem in examined.problems:
        say(problem)
    if examined.problems:
        count = len(examined.problems)
        say(f"{args.path} ({found.word}) is damaged in {count} place{'s' if count > 1 else ''}")
        return 1
    say(f"{args.path} ({found.word}) is fine: {size_text(examined.nbytes)}, {examined.how}")
    return 0
