"""``python -m fsdp convert``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing

import torch

from fsdp.checkpoint.cli.errors import UsageError
from fsdp.checkpoint.cli.show import Progress, say, size_text
from fsdp.checkpoint.formats.convert import Content, content_of, require_apart
from fsdp.checkpoint.formats.convert_place import require_free
from fsdp.checkpoint.formats.convert_safetensors import write_ours, write_safetensors
from fsdp.checkpoint.formats.convert_torch import write_torch
from fsdp.checkpoint.formats.open_source import open_source
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.trees import Choices

HELP = (
    "write a checkpoint in another format\n"
    "Tensors go through memory a few MiB at a time; for dcp, one tensor at a time. The target is written beside its "
    "place (NAME.converting, for fsdp NAME.saving), synced, and moved there when it is whole: an error or an interrupt "
    "leaves nothing. So there must be room for it, besides one that it replaces."
)
TARGETS = ("fsdp", "safetensors", "dcp", "torch", "fairscale")
_ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
_DTYPES = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
}
_SIZE = re.compile(r"(\d+)([KMGT]?)")
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What it takes."""
    command.add_argument("target", metavar="TARGET", help="the file or folder to write")
    command.add_argument(
        "--to",
        choices=TARGETS,
        help="the format. Without it, TARGET says: .safetensors, or .pt, .pth, .bin and .ckpt for torch; else fsdp",
    )
    command.add_argument("--only", choices=("model", "optimizer"), help="leave the other one out")
    command.add_argument("--dtype", choices=tuple(_DTYPES), help="of the model's floating-point tensors, buffers too")
    command.add_argument("--overwrite", action="store_true", help="replace a checkpoint of the same kind at TARGET")
    command.add_argument(
        "--max-file-bytes",
        type=_size,
        metavar="N",
        help="for fsdp and safetensors: begin another file before there is more in one; 5G is 5 x 2^30",
    )
    command.add_argument(
        "--tied",
        action="append",
        type=_pair,
        default=[],
        metavar="NAME=OTHER",
        help="for torch, dcp and safetensors: write the model's tensor OTHER as NAME too: plain models expect all "
        "names of tied parameters, and ours have one",
    )
    command.add_argument(
        "--template",
        metavar="FILES",
        help="for fairscale: old shards of the same model, which say how it is wrapped and cut, and for how many ranks",
    )
    command.add_argument(
        "--by-number",
        action="store_true",
        help="for torch: the optimizer's parameters by numbers, as torch's optimizers load them, not by names",
    )
    command.add_argument(
        "--flat-optimizer",
        action="store_true",
        help="for dcp: as get_optimizer_state_dict has it with flatten_optimizer_state_dict=True",
    )


def run(args: argparse.Namespace, choices: Choices) -> int:
    """Write it, and say what was written."""
    word = args.to or _ENDINGS.get(os.path.splitext(args.target)[1], "fsdp")
    _require_sense(args, word)
    require_free(args.target, args.overwrite)
    with closing(open_source(args.path, args.format, choices)) as source, Progress("converting") as progress:
        try:
            require_apart(source, args.target)
            dtype = _DTYPES[args.dtype] if args.dtype else None
            # Plain models expect tied parameters under all their names.
            tied = {**(source.aliases if word in ("torch", "dcp") else {}), **dict(args.tied)}
            content = content_of(source, dtype, args.only, tied)
            _require_order(source, args.by_number)
        except ValueError as error:
            raise UsageError(str(error)) from None
        for note in (*source.notes, *_lost(content, word)):
            say(f"note: {note}", sys.stderr)
        _write(args, word, content, progress.start(content.nbytes))
    count = len(content.model or ()) + len(content.optimizer or ())
    say(f"{args.target} ({word}): {count:,} tensors, {size_text(content.nbytes)}")
    return 0


def _write(args: argparse.Namespace, word: str, content: Content, advance: Progress) -> None:
    overwrite, path = args.overwrite, args.target
    if word == "dcp":
        from fsdp.checkpoint.formats.convert_dcp import write_dcp  # slow to import

        write_dcp(path, content, is_flat=args.flat_optimizer, overwrite=overwrite, advance=advance)
    elif word == "fairscale":
        from fsdp.checkpoint.formats.convert_fairscale import write_fairscale

        write_fairscale(path, content, args.template, overwrite=overwrite, advance=advance)
    elif word == "torch":
        write_torch(path, content, by_number=args.by_number, overwrite=overwrite, advance=advance)
    else:
        write = write_ours if word == "fsdp" else write_safetensors
        write(path, content, max_file_bytes=args.max_file_bytes, overwrite=overwrite, advance=advance)


def _require_sense(args: argparse.Namespace, word: str) -> None:
    """Raise UsageError for options that another format has."""
    given = (
        ("--max-file-bytes", args.max_file_bytes is not None, ("fsdp", "safetensors")),
        ("--by-number", args.by_number, ("torch",)),
        ("--template", args.template is not None, ("fairscale",)),
        ("--dtype", args.dtype is not None, ("fsdp", "safetensors", "dcp", "torch")),
        ("--flat-optimizer", args.flat_optimizer, ("dcp",)),
        ("--tied", bool(args.tied), ("torch", "dcp", "safetensors")),
        ("--only optimizer", args.only == "optimizer", ("torch", "dcp")),
    )
    for option, is_given, words in given:
        if is_given and word not in words:
            raise UsageError(f"{option} is for {' and '.join(words)}, and the target is {word}")
    if word == "fairscale" and args.template is None:
        raise UsageError("fairscale's shards are written like others of the same model: name those (--template)")
    if args.only == "optimizer" and (args.dtype or args.tied):
        raise UsageError("--dtype and --tied are about the model, and --only optimizer leaves it out")


def _require_order(source: Source, by_number: bool) -> None:
    """Raise ValueError if numbers are wanted, and nobody knows them."""
    if by_number and not source.is_in_order:
        raise ValueError(
            f"{source.path} does not say in which order the model has the parameters of different units, so that their "
            "numbers are not known: leave --by-number out, and rekey the optimizer's state with the model "
            "(fsdp.optim_utils.rekey_optim_state_dict)"
        )


def _lost(content: Content, word: str) -> Iterator[str]:
    """What the format has no place for."""
    source = content.source
    if word == "safetensors":
        lost = (
            ("the optimizer", content.optimizer is not None),
            ("extra state of modules", bool(source.extra)),
            ("values", source.values is not None),
        )
        names = [what for what, is_there in lost if is_there]
        if names:
            yield f"left out, since safetensors files have no place for it: {', '.join(names)}"
    if word != "fsdp" and source.generators is not None:
        yield "left out: the states of random number generators, which only fsdp has"


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, as 5000000, 500M or 5G")
    return int(match[1]) * _FACTORS[match[2]]


def _pair(text: str) -> tuple[str, str]:
    name, equal, other = text.partition("=")
    if not (name and equal and other):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=OTHER")
    return name, other
