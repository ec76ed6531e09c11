"""``python -m fsdp inspect``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from fsdp.checkpoint.cli.show import say, size_text
from fsdp.checkpoint.formats.open_source import open_source
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.optim import ELEMENTS, NUMBER
from fsdp.checkpoint.safetensors import DTYPES
from fsdp.checkpoint.untrusted import readable, short

_MOST_WIDTH = 200  # characters in a column: all rows are as wide as the widest one
HELP = "show what is in a checkpoint: tensors, the optimizer's groups and state, values"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What it takes."""
    command.add_argument("--json", action="store_true", help="as JSON, with the optimizer's tensors one by one")


def run(args: argparse.Namespace, choices: Choices) -> int:
    """Print it."""
    with closing(_opened(args, choices)) as source:
        if args.json:
            print(json.dumps(described(source), indent=1))
        else:
            for line in lines(source):
                say(line)
    return 0


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
    """All that there is, as `json.dumps` can write it."""
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
        rest = source.optimizer_rest
        found["optimizer"] = {"class": rest["optimizer"], **_tensors(source.optimizer)}
        found["optimizer"] |= {"groups": rest["groups"], "state": rest["state"]}
    return found


def _tensors(reader: TensorReader) -> dict[str, Any]:
    tensors = {
        name: {"shape": list(each.shape), "dtype": _dtype(each.dtype), "nbytes": each.nbytes}
        for name, each in reader.tensors.items()
    }
    return {"nbytes": sum(each["nbytes"] for each in tensors.values()), "tensors": tensors}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# To read


def lines(source: Source) -> Iterator[str]:
    """The same for people."""
    saved = f", saved by {source.world_size} rank{'s' if source.world_size != 1 else ''}" if source.world_size else ""
    yield f"{source.path}: {source.format}{saved}"
    yield ""
    tensors = list(source.model.tensors.items())
    rows = [
        (
            readable(name, _MOST_WIDTH),
            readable(" x ".join(map(str, each.shape)), _MOST_WIDTH) or "number",
            _dtype(each.dtype),
            f"{each.nbytes:,}",
        )
        for name, each in tensors
    ]
    count = sum(each.shape.numel() for _, each in tensors)
    nbytes = sum(each.nbytes for _, each in tensors)
    yield from _table([("tensor", "shape", "dtype", "bytes"), *rows])
    yield f"model: {len(rows):,} tensors, {count:,} elements, {size_text(nbytes)}"
    if source.extra:
        yield f"extra state of modules: {', '.join(sorted(source.extra))}"
    if source.optimizer is not None:
        yield ""
        yield from _optimizer(source.optimizer, source.optimizer_rest)
    yield from _values(source)
    if source.notes:
        yield ""
        yield from (f"note: {note}" for note in source.notes)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:-1], widths, strict=False)]
        yield "  " + "  ".join([*cells, row[-1].rjust(widths[-1])])


def _optimizer(reader: TensorReader, rest: Mapping[str, Any]) -> Iterator[str]:
    nbytes = sum(each.nbytes for each in reader.tensors.values())
    name = f" ({rest['optimizer']})" if rest["optimizer"] else ""
    yield f"optimizer{name}: {len(reader.tensors):,} tensors, {size_text(nbytes)}"
    for number, group in enumerate(rest["groups"]):
        options = ", ".join(
            f"{key}={value!r}"
            for key, value in decoded(group["options"]).items()
            if value is not None and value is not False
        )
        yield f"  group {number}: {len(group['params']):,} parameters, {options}"
    keys: dict[str, list[list[Any]]] = {}
    for kinds in rest["state"].values():
        for key, kind in kinds.items():
            keys.setdefault(key, []).append(kind)
    for key, kinds in keys.items():
        yield f"  state {key!r} of {len(kinds):,} parameters: {_summary(kinds)}"


def _summary(kinds: Sequence[Sequence[Any]]) -> str:
    if kinds[0][0] == ELEMENTS:
        return "tensors of " + ", ".join(sorted({_dtype(DTYPES[kind[1]]) for kind in kinds if kind[0] == ELEMENTS}))
    values = [decoded(kind[2] if kind[0] == NUMBER else kind[1]) for kind in kinds if kind[0] != ELEMENTS]
    texts = list(dict.fromkeys(map(short, values)))
    return texts[0] if len(texts) == 1 else f"{len(texts)} different values, {texts[0]} first"


def _values(source: Source) -> Iterator[str]:
    values = decoded(source.values)
    if values is None:
        return
    yield ""
    if isinstance(values, dict):
        yield "values:"
        yield from (f"  {key}: {short(value)}" for key, value in values.items())
    else:
        yield f"values: {short(values)}"
