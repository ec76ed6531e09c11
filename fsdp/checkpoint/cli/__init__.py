"""The command ``fsdp``, also ``python -m fsdp``: its arguments, its errors, and its exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp import __version__
from fsdp.checkpoint.cli import convert, inspect, verify
from fsdp.checkpoint.cli.errors import UsageError
from fsdp.checkpoint.cli.show import say
from fsdp.checkpoint.formats.open_source import FORMATS, WORDS
from fsdp.checkpoint.formats.trees import Choices

FINE, WRONG, MISUSED, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
_EPILOG = (
    "Exit codes: 0 if all is well; 1 if a checkpoint is damaged, cannot be read or written, or does not fit; 2 for "
    "wrong usage, as a path that is not there, or a target that is. Formats: "
    + "; ".join(f"{each.word}, {each.what}" for each in FORMATS)
    + "."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return MISUSED
    try:
        with _terminated_tidily():
            code: int = args.run(args, _choices(args))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _said("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at the end
        return NO_READER
    except (UsageError, FileExistsError) as error:
        return _said(str(error), MISUSED)
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        return _said(str(error) or type(error).__name__, WRONG)
    return code


@contextmanager
def _terminated_tidily() -> Iterator[None]:
    """Whoever is terminated tidies up, as after an interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _said(message: str, code: int) -> int:
    say(f"fsdp: {message}", sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fsdp", description="Checkpoints of fsdp, and of others.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"fsdp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    about: tuple[tuple[str, str, Callable[..., int], Callable[[argparse.ArgumentParser], None]], ...] = (
        ("inspect", inspect.HELP, inspect.run, inspect.add_arguments),
        ("verify", verify.HELP, verify.run, verify.add_arguments),
        ("convert", convert.HELP, convert.run, convert.add_arguments),
    )
    for name, text, run, add_arguments in about:
        command = commands.add_parser(name, help=text.splitlines()[0], description=text, epilog=_EPILOG)
        command.add_argument("path", metavar="CHECKPOINT", help="the file or folder")
        add_arguments(command)
        command.add_argument("--from", dest="format", choices=WORDS, help="its format; found out without it")
        if name != "verify":
            _add_choices(command)
        command.set_defaults(run=run)
    return parser


def _add_choices(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("for what a checkpoint does not say, or keeps under an unusual name")
    group.add_argument("--model-key", metavar="KEY", help="under which key the model is, as app.model")
    group.add_argument("--optimizer-key", metavar="KEY", help="under which key the optimizer is")
    group.add_argument(
        "--param-order",
        metavar="FILE",
        help="for an optimizer whose parameters go by numbers: their names, a line each, in the order that it was "
        "given them (that of model.named_parameters(), if there is one group). For fairscale, the keys of the shards",
    )
    group.add_argument(
        "--optimizer-files",
        metavar="PATH",
        help="for fairscale and fsdp1: files of the optimizer's state, if they are others than those of the weights",
    )
    group.add_argument(
        "--like", metavar="FILE", help="for fsdp1's local state dicts: a state dict of the plain model, for its names"
    )


def _choices(args: argparse.Namespace) -> Choices:
    if not os.path.lexists(args.path) and not any(each.is_at(args.path) for each in FORMATS):
        raise UsageError(f"{args.path}: there is no such file or folder")
    order = getattr(args, "param_order", None)
    try:
        lines = [] if order is None else Path(order).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--param-order: {error}") from None
    names = None if order is None else [line.strip() for line in lines if line.strip()]
    return Choices(
        getattr(args, "model_key", None),
        getattr(args, "optimizer_key", None),
        names,
        getattr(args, "only", None),
        getattr(args, "like", None),
        getattr(args, "optimizer_files", None),
    )
