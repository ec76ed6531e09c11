"""The command ``fsdp``, or ``python -m fsdp``: inspect, verify and convert checkpoints, and merge reports."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from fsdp import __version__
from fsdp.checkpoint.formats.convert import (
    content_of,
    require_apart,
    require_free,
    write_ours,
    write_safetensors,
    write_torch,
)
from fsdp.checkpoint.formats.dcp import write_dcp
from fsdp.checkpoint.formats.open_source import FORMATS, WORDS, examine, format_of, open_source
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.optim import kinds_in
from fsdp.checkpoint.untrusted import readable, short
from fsdp.distributed.reports import page
from fsdp.layers.summary import aligned, size_text
from fsdp.optim_utils.state import Elements, Kind, Kinds

FINE, WRONG, MISUSED, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
TARGETS = ("fsdp", "safetensors", "dcp", "torch")
_EXIT_CODES = (
    "Exit codes: 0 if all is well; 1 if a checkpoint is damaged, cannot be read or written, or does not fit; 2 for "
    "wrong usage, such as a path that does not exist, or a target that exists."
)
_EPILOG = "\n".join([_EXIT_CODES, "Formats:", *(f"  {each.word}: {each.what}" for each in FORMATS)])
_INSPECT = "Show the contents of a checkpoint: tensors, the optimizer's groups and state, values."
_VERIFY = (
    "Read a whole checkpoint, and list all damaged parts.\n"
    "Checkpoints of fsdp and files of torch are compared with their checksums. safetensors files have no checksums: "
    "only headers and sizes are compared."
)
_CONVERT = (
    "Write a checkpoint in another format.\n"
    "Tensors are read into memory a few MiB at a time; for dcp, a tensor at a time. The target is written to a "
    "temporary name (NAME.converting, for fsdp NAME.saving), synced, and renamed when it is complete; an error or an "
    "interrupt deletes it. The disk must have space for the new target in addition to a target that it replaces."
)
_DIAGNOSE = (
    "Merge the reports of all ranks of a job into a single page, with the first cause at the top.\n"
    "Ranks write reports to the folder of fsdp.set_watchdog(reports=FOLDER) or the environment variable FSDP_REPORTS."
)
_ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
_DTYPES = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
}
_SIZE = re.compile(r"(\d+)([KMGT]?)")
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_WIDTH = 200  # characters in a column: all rows are padded to the widest
_PERIOD = 0.1  # seconds between two lines of progress


class UsageError(Exception):
    """The command received invalid arguments."""


def main(arguments: Sequence[str] | None = None, add_commands: Callable[[Any], None] | None = None) -> int:
    """Run the command, and return the exit code; `add_commands` adds subcommands that do not concern checkpoints."""
    parser = _parser(add_commands)
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return MISUSED
    try:
        with _terminated_tidily():
            code: int = args.run(args, _choices(args) if "path" in args else None)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _said("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the final flush would raise an error
        return NO_READER
    except (UsageError, FileExistsError) as error:
        return _said(str(error), MISUSED)
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        if _is_of_interrupt(error):
            return _said("interrupted", INTERRUPTED)
        return _said(str(error) or type(error).__name__, WRONG)
    return code


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt has caused an error; torch's archives raise another exception instead."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextmanager
def _terminated_tidily() -> Iterator[None]:
    """Make SIGTERM clean up in the same way as an interrupt; further signals are ignored during the cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs of shells ignore it
        before[signal.SIGINT] = signal.default_int_handler

    def interrupt(*_: Any) -> NoReturn:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _said(message: str, code: int) -> int:
    say(f"fsdp: {message}", sys.stderr)
    return code


def _parser(add_commands: Callable[[Any], None] | None) -> argparse.ArgumentParser:
    about_all = "Inspect, verify and convert checkpoints, plan the memory of a training, and merge reports."
    parser = argparse.ArgumentParser(
        prog="fsdp", description=about_all, epilog=_EPILOG, formatter_class=_Lines, add_help=False
    )
    _add_help(parser)
    version = f"fsdp {__version__}"
    parser.add_argument("--version", action="version", version=version, help="Print the version, and exit.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    about: tuple[tuple[str, str, Callable[..., int]], ...] = (
        ("inspect", _INSPECT, _inspect),
        ("verify", _VERIFY, _verify),
        ("convert", _CONVERT, _convert),
    )
    for name, text, run in about:
        command = add_command(commands, name, text, _EPILOG)
        command.add_argument("path", metavar="CHECKPOINT", help="The file or folder.")
        if name == "inspect":
            command.add_argument("--json", action="store_true", help="Print JSON, with each tensor of the optimizer.")
        elif name == "convert":
            _add_target(command)
        command.add_argument(
            "--from",
            dest="format",
            choices=WORDS,
            help="The format of CHECKPOINT; by default, it is found from the files.",
        )
        if name != "verify":
            _add_choices(command)
        command.set_defaults(run=run)
    command = add_command(commands, "diagnose", _DIAGNOSE)
    command.add_argument("path", metavar="FOLDER", help="The folder of the reports.")
    command.set_defaults(run=_diagnose)
    if add_commands is not None:
        add_commands(commands)
    return parser


class _Lines(argparse.HelpFormatter):
    """Wraps each line of a text separately."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = [(line, line[: len(line) - len(line.lstrip())]) for line in text.splitlines()]
        return "\n".join(textwrap.fill(line, width, subsequent_indent=begin + indent) for line, begin in lines)


def add_command(commands: Any, name: str, about: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Add a subcommand and return its parser; the list of commands contains the first line of `about`."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=about.splitlines()[0], description=about, epilog=epilog, formatter_class=_Lines, add_help=False
    )
    _add_help(command)
    return command


def _add_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="help", help="Print this text, and exit.")


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="TARGET", help="The file or folder to write.")
    command.add_argument(
        "--to",
        type=_target,
        choices=TARGETS,
        help="The format of TARGET. By default, its ending decides: .safetensors, or .pt, .pth, .bin and .ckpt for "
        "torch; any other is fsdp.",
    )
    command.add_argument("--only", choices=("model", "optimizer"), help="Write this part alone.")
    command.add_argument(
        "--dtype",
        choices=tuple(_DTYPES),
        help="Cast the model's floating-point tensors, including buffers, to this dtype.",
    )
    command.add_argument("--overwrite", action="store_true", help="Replace a checkpoint of the same kind at TARGET.")
    command.add_argument(
        "--max-file-bytes",
        type=_size,
        metavar="N",
        help="For fsdp and safetensors: begin another file before a file has more than N bytes; 5G is 5 x 2^30.",
    )
    command.add_argument(
        "--tied",
        action="append",
        type=_pair,
        default=[],
        metavar="NAME=OTHER",
        help="For torch, dcp and safetensors: also write the model's tensor OTHER under NAME, because plain models "
        "expect all names of tied parameters, and sharded models save a single name. May be repeated.",
    )
    command.add_argument(
        "--by-number",
        action="store_true",
        help="For torch: write the optimizer's state by the numbers of parameters, as torch's optimizers load it, and "
        "not by names.",
    )
    command.add_argument(
        "--flat-optimizer",
        action="store_true",
        help="For dcp: write the optimizer's state in the form of get_optimizer_state_dict with "
        "flatten_optimizer_state_dict=True.",
    )


def _add_choices(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("for information that a checkpoint lacks, or keeps under an unusual name")
    group.add_argument("--model-key", metavar="KEY", help="The key of the model, such as app.model.")
    group.add_argument("--optimizer-key", metavar="KEY", help="The key of the optimizer.")
    group.add_argument(
        "--param-order",
        metavar="FILE",
        help="For an optimizer with numbered parameters: a file with their names, one in each line, in the order of "
        "the optimizer (with a single group, the order of model.named_parameters()). For fairscale: the keys of the "
        "shards.",
    )
    group.add_argument(
        "--optimizer-files",
        metavar="PATH",
        help="For fairscale and fsdp1: the files of the optimizer's state, if they are separate from the weights.",
    )


def _choices(args: argparse.Namespace) -> Choices:
    if not os.path.lexists(args.path) and not any(each.is_at(args.path) for each in FORMATS):
        raise UsageError(f"{args.path}: there is no such file or folder")
    order = getattr(args, "param_order", None)
    try:
        lines = [] if order is None else Path(order).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--param-order: {error}") from None
    chosen = {key: getattr(args, key, None) for key in ("model_key", "optimizer_key", "only", "optimizer_files")}
    return Choices(param_order=None if order is None else [line.strip() for line in lines if line.strip()], **chosen)


def _target(text: str) -> str:
    if text == "fairscale":
        raise argparse.ArgumentTypeError(
            "FairScale's shards can be read, but not written: convert to torch, and load that file into the model "
            "before FairScale wraps it"
        )
    return text


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 5000000, 500M or 5G")
    return int(match[1]) * _FACTORS[match[2]]


def _pair(text: str) -> tuple[str, str]:
    name, equal, other = text.partition("=")
    if not (name and equal and other):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=OTHER")
    return name, other


def _inspect(args: argparse.Namespace, choices: Choices) -> int:
    with closing(_opened(args, choices)) as source:
        if args.json:
            print(json.dumps(described(source), indent=1))
        else:
            for line in lines(source):
                say(line)
    return FINE


def _opened(args: argparse.Namespace, choices: Choices) -> Source:
    try:
        return open_source(args.path, args.format, choices)
    except ValueError as error:
        try:
            source = open_source(args.path, args.format, replace(choices, only="model"))
        except ValueError:
            raise error from None
        return replace(source, notes=(*source.notes, f"the optimizer is not shown: {error}"))


def described(source: Source) -> dict[str, Any]:
    """Return a description of a checkpoint for `json.dumps`."""
    found: dict[str, Any] = {
        "path": source.path,
        "format": source.format,
        "world_size": source.world_size,
        "model": _tensors(source.model),
        "optimizer": None,
        "extra_state": sorted(source.extra),
        "generators": source.generators is not None,
        "values": source.values,
        "notes": list(source.notes),
    }
    if source.optimizer is not None:
        rest, tensors = source.optimizer_rest, _tensors(source.optimizer)
        found["optimizer"] = {"class": rest["optimizer"], **tensors, "groups": rest["groups"], "state": rest["state"]}
    return found


def _tensors(reader: TensorReader) -> dict[str, Any]:
    tensors = {
        name: {"shape": list(each.shape), "dtype": _dtype(each.dtype), "nbytes": each.nbytes}
        for name, each in reader.tensors.items()
    }
    return {"nbytes": reader.nbytes, "tensors": tensors}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def lines(source: Source) -> Iterator[str]:
    """Yield the lines of a readable description of a checkpoint."""
    saved = f", saved by {source.world_size} rank{'s' if source.world_size != 1 else ''}" if source.world_size else ""
    yield f"{source.path}: {source.format}{saved}"
    yield ""
    tensors = source.model.tensors
    rows = [("  tensor", "shape", "dtype", "bytes")]
    for name, each in tensors.items():
        shape = readable(" x ".join(map(str, each.shape)), _MOST_WIDTH) or "number"
        rows.append((f"  {readable(name, _MOST_WIDTH)}", shape, _dtype(each.dtype), f"{each.nbytes:,}"))
    count = sum(each.shape.numel() for each in tensors.values())
    yield from aligned(rows)
    yield f"model: {len(tensors):,} tensors, {count:,} elements, {size_text(source.model.nbytes)}"
    if source.extra:
        yield f"extra state of modules: {', '.join(sorted(source.extra))}"
    if source.optimizer is not None:
        yield ""
        yield from _optimizer(source.optimizer, source.optimizer_rest, kinds_in(source))
    values = decoded(source.values)
    if isinstance(values, dict):
        yield from ("", "values:", *(f"  {key}: {short(value)}" for key, value in values.items()))
    elif values is not None:
        yield from ("", f"values: {short(values)}")
    if source.notes:
        yield ""
        yield from (f"note: {note}" for note in source.notes)


def _optimizer(reader: TensorReader, rest: Mapping[str, Any], known: Mapping[str, Kinds]) -> Iterator[str]:
    name = f" ({rest['optimizer']})" if rest["optimizer"] else ""
    yield f"optimizer{name}: {len(reader.tensors):,} tensors, {size_text(reader.nbytes)}"
    for number, group in enumerate(rest["groups"]):
        options = ", ".join(
            f"{key}={value!r}"
            for key, value in decoded(group["options"]).items()
            if value is not None and value is not False
        )
        yield f"  group {number}: {len(group['params']):,} parameters, {options}"
    keys: dict[str, list[Kind]] = {}
    for saved in known.values():
        for key, kind in saved.items():
            keys.setdefault(key, []).append(kind)
    for key, kinds in keys.items():
        yield f"  state {key!r} of {len(kinds):,} parameters: {_summary(kinds)}"


def _summary(kinds: Sequence[Kind]) -> str:
    if isinstance(kinds[0], Elements):
        return "tensors of " + ", ".join(sorted({_dtype(kind.dtype) for kind in kinds if isinstance(kind, Elements)}))
    values = [kind.value for kind in kinds if not isinstance(kind, Elements)]
    texts = list(dict.fromkeys(map(short, values)))
    return texts[0] if len(texts) == 1 else f"{len(texts)} different values, {texts[0]} first"


def _diagnose(args: argparse.Namespace, choices: Choices) -> int:
    for line in page(args.path):
        say(line)
    return FINE


def _verify(args: argparse.Namespace, choices: Choices) -> int:
    found = format_of(args.path, args.format)
    with Progress("verifying") as progress:
        problems, nbytes, how = examine(found, args.path, progress.start)
    for problem in problems:
        say(problem)
    if problems:
        count = len(problems)
        say(f"{args.path} ({found.word}) is damaged in {count} place{'s' if count > 1 else ''}")
        return WRONG
    say(f"{args.path} ({found.word}) is fine: {size_text(nbytes)}, {how}")
    return FINE


def _convert(args: argparse.Namespace, choices: Choices) -> int:
    word = args.to or _ENDINGS.get(os.path.splitext(args.target)[1], "fsdp")
    _require_sense(args, word)
    require_free(args.target, args.overwrite)
    with closing(open_source(args.path, args.format, choices)) as source, Progress("converting") as progress:
        try:
            require_apart(source, args.target)
            dtype = _DTYPES[args.dtype] if args.dtype else None
            # Plain models expect tied parameters under all their names.
            tied = {**(source.aliases if word in ("torch", "dcp") else {}), **dict(args.tied)}
            only = "model" if word == "safetensors" else args.only
            content = content_of(source, dtype, only, tied)
            if args.by_number and not source.is_in_order:
                raise ValueError(
                    f"{source.path} does not contain the order of parameters of different units, so their numbers are "
                    "unknown: omit --by-number, and rekey the optimizer's state with the model "
                    "(fsdp.optim_utils.rekey_optim_state_dict)"
                )
        except ValueError as error:
            raise UsageError(str(error)) from None
        for note in (*source.notes, *_lost(source, word)):
            say(f"note: {note}", sys.stderr)
        writers: dict[str, Callable[..., None]] = {
            "fsdp": partial(write_ours, max_file_bytes=args.max_file_bytes),
            "safetensors": partial(write_safetensors, max_file_bytes=args.max_file_bytes),
            "dcp": partial(write_dcp, is_flat=args.flat_optimizer),
            "torch": partial(write_torch, by_number=args.by_number),
        }
        advance = progress.start(content.nbytes)
        try:
            writers[word](args.target, content, advance=advance)
        except (BrokenPipeError, FileExistsError):
            raise
        except (OSError, RuntimeError) as error:  # torch's writers do not name the file
            if args.target in str(error):
                raise
            raise OSError(f"cannot write {args.target}: {error}") from error
    count = len(content.model or ()) + len(content.optimizer or ())
    say(f"{args.target} ({word}): {count:,} tensors, {size_text(content.nbytes)}")
    return FINE


def _require_sense(args: argparse.Namespace, word: str) -> None:
    """Raise UsageError for options that the target format does not support."""
    given = (
        ("--max-file-bytes", args.max_file_bytes is not None, ("fsdp", "safetensors")),
        ("--by-number", args.by_number, ("torch",)),
        ("--flat-optimizer", args.flat_optimizer, ("dcp",)),
        ("--tied", bool(args.tied), ("torch", "dcp", "safetensors")),
        ("--only optimizer", args.only == "optimizer", ("torch", "dcp")),
    )
    for option, is_given, words in given:
        if is_given and word not in words:
            raise UsageError(f"{option} is for {' and '.join(words)}, and the target is {word}")
    if args.only == "optimizer" and (args.dtype or args.tied):
        raise UsageError("--dtype and --tied apply to the model, which --only optimizer excludes")


def _lost(source: Source, word: str) -> Iterator[str]:
    """Yield notes on data that the format does not support."""
    if word == "safetensors":
        has = {"the optimizer": source.optimizer is not None, "extra state of modules": bool(source.extra)}
        has |= {"values": source.values is not None}
        if names := [what for what, is_there in has.items() if is_there]:
            yield f"left out, because safetensors files contain tensors of the model only: {', '.join(names)}"
    if word != "fsdp" and source.generators is not None:
        yield "left out: the states of random number generators, which only fsdp has"


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line. Text from files is shortened, and control characters are escaped."""
    print(readable(text.replace(":\n\t", ": ").replace("\n\t", "; ").replace("\n", " ")), file=file or sys.stdout)


class Progress(AbstractContextManager["Progress"]):
    """A context manager for a progress bar on a terminal, using tqdm if installed; without effect elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._total, self._done, self._shown = what, 0, 0, 0.0
        self._bar: Any = None
        self._is_seen = sys.stderr.isatty()

    def start(self, total: int) -> Progress:
        self._total = total
        if self._is_seen:
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self._bar = tqdm(total=total, desc=self._what, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
        return self

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._is_seen and time.monotonic() - self._shown > _PERIOD:
            self._shown = time.monotonic()
            part = self._done / max(self._total, 1)
            filled = round(30 * part)
            bar = "#" * filled + "." * (30 - filled)
            text = f"{self._what} [{bar}] {part:4.0%} of {size_text(self._total)}"
            print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown:
            print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)
