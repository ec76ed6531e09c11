"""FairScale's files, and ours of `local_state_dict`: one for each rank, read as one checkpoint.

Each file has the rank's weights and metadata, under any keys: fairseq's are ``model`` and ``fsdp_metadata``, metaseq's
``model`` and ``shard_metadata``. They are known by what is in them. The state of an optimizer is either each rank's
own, or FairScale's full one, which the first rank has (`fsdp.checkpoint.formats.fairscale_optim`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsdp.checkpoint.formats.consolidate import Shard, put_together
from fsdp.checkpoint.formats.fairscale_optim import is_full, state_of
from fsdp.checkpoint.formats.optim import SavedOptimizer, left_out, optimizers_in
from fsdp.checkpoint.formats.rank_files import Paths, likely_files, rank_files, source_of_ranks, title_of
from fsdp.checkpoint.formats.source import Source, Stitched, is_tensor, memory_of, stitched
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.formats.values import shown, values_of
from fsdp.engine.names import clean_name, join

FORMAT = "fairscale"


@dataclass(frozen=True)
class RankFile:
    """The content of one rank's file.

    Attributes:
        file: it.
        weights, metadata: of the rank.
        optimizers: what it has of them, by their keys.
        keys: where weights and metadata are.
    """

    file: TorchArchive
    weights: Mapping[str, Any]
    metadata: Mapping[str, Any]
    optimizers: Mapping[str, SavedOptimizer]
    keys: frozenset[str]


def is_fairscale(path: str | os.PathLike[str]) -> bool:
    """Return whether there are files of ranks at a path, with weights and metadata as FairScale's users save them."""
    for file in likely_files(path):
        with suppress(OSError, ValueError):
            content = TorchArchive(file).content
            if isinstance(content, Mapping) and any(map(_is_metadata, content.values())):
                return True
    return False


def open_fairscale(
    path: Paths,
    *,
    optimizer: Paths | None = None,
    optimizer_params: Sequence[str] | None = None,
    strict: bool = True,
    with_optimizer: bool = True,
) -> Source:
    """Open a checkpoint of ranks' files. Close it when it is read.

    Args:
        path: a folder of them, one of them, or all in rank order (`fsdp.checkpoint.formats.rank_files.rank_files`).
        optimizer: files with the optimizer's state, if they are others: one for each rank, or one with FairScale's full
            dictionary.
        optimizer_params: the keys of the shards (``layers.0.flat_param_0``) in the order of the optimizer's numbers.
            None if it has those of ``model.parameters()`` in one group.
        strict: raise an error for keys that the weights lack or metadata do not name. False leaves them out.
        with_optimizer: look for the state of one.

    Raises:
        FileNotFoundError: for missing files.
        ValueError: for files that are damaged, of other ranks, or of other models; names the file, and the key.
        TypeError: for state of an optimizer that no checkpoint holds.
    """
    files = [read_rank_file(each) for each in rank_files(path)]
    first, shards = files[0], [Shard(each.file.path, each.weights, each.metadata) for each in files]
    is_whole = len(shards) == 1 and not any(shards[0].has(key) for key, _, _ in shards[0].backings())
    found = dict(_whole(shards[0])) if is_whole else put_together(shards, True, strict)
    title = title_of(path)
    found, is_in_order = _in_order(found, shards[0])
    saved, notes = _optimizers(files, optimizer) if with_optimizer else ([], [])
    state = state_of(saved, shards, optimizer_params) if saved else None
    values = values_of(first.file.content, first.keys | first.optimizers.keys(), notes)
    world_size = None if is_whole else len(files)
    return source_of_ranks(FORMAT, title, found, state, values, notes, world_size, is_in_order=is_in_order)


def read_fairscale(path: str, choices: Choices) -> Source:
    """Open a checkpoint as `open_fairscale`, with what the user has said.

    Raises:
        ValueError: also for choices that are none here.
    """
    choices.refuse_keys(path)
    return open_fairscale(
        path,
        optimizer=choices.optimizer_files,
        optimizer_params=choices.param_order,
        with_optimizer=choices.only != "model",
    )


def read_rank_file(path: str | os.PathLike[str]) -> RankFile:
    """Read a rank's file.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if it cannot be read, or has no weights or metadata.
    """
    file = TorchArchive(os.fspath(path))
    if not isinstance(file.content, Mapping):
        raise ValueError(f"{file} has a {shown(file.content)} in it, not a dict with a rank's weights and metadata")
    described = {key: value for key, value in file.content.items() if _is_metadata(value)}
    if len(described) != 1:
        raise ValueError(
            f"{file} has {'no metadata' if not described else 'several metadata: ' + ', '.join(described)} of shards "
            "(local_metadata_dict(): param_metadata and buffer_names), without which nobody can tell what is in a flat "
            f"parameter. It has {', '.join(map(str, list(file.content)[:8]))}. Weights and metadata of a rank are to "
            "be in one file."
        )
    ((key, metadata),) = described.items()
    weights = [other for other, value in file.content.items() if other != key and _fits(value, metadata)]
    if len(weights) != 1:
        raise ValueError(
            f"{file} has {'no weights' if not weights else 'several: ' + ', '.join(weights)} that its metadata "
            f"({key!r}) describe"
        )
    optimizers = {each.key: each for each in optimizers_in(file)}
    return RankFile(file, file.content[weights[0]], metadata, optimizers, frozenset((key, weights[0])))


def _is_metadata(value: Any) -> bool:
    return isinstance(value, Mapping) and "param_metadata" in value and "buffer_names" in value


def _fits(value: Any, metadata: Mapping[str, Any]) -> bool:
    """Return whether it has any of the tensors that metadata name, sharded or not."""
    if not isinstance(value, Mapping):
        return False
    keys = {clean_name(key) for key in value if isinstance(key, str)}
    return any(
        join(entry["fsdp_path"], name) in keys
        for entry in metadata["param_metadata"]
        for backing, described in entry["params"].items()
        for name in (backing, *described["names"])
    )


def _whole(shard: Shard) -> Iterator[tuple[str, Any]]:
    """Yield weights that were not sharded when they were saved, as fairseq does by default; tied ones as one."""
    known: dict[Any, Stitched] = {}
    for key, value in shard.weights.items():
        name = clean_name(key)
        if is_tensor(value):
            yield name, known.setdefault(memory_of(value), stitched(name, value))
        else:
            yield name, value


def _in_order(found: Mapping[str, Any], shard: Shard) -> tuple[dict[str, Any], bool]:
    """Return the same in the order of the modules, and whether that is known.

    State dicts have it. Of flat parameters they say only where the units are, so that parameters of a unit that come
    after another one in it cannot be told from those before.
    """
    units = [path for _, path, _ in shard.backings()]
    is_flat = any(len(names) > 1 for _, _, names in shard.backings())
    order = {name: number for number, name in enumerate(map(clean_name, shard.weights))}
    names = sorted(found, key=lambda name: order.get(name, -1))  # those of a flat parameter stay where they are
    return {name: found[name] for name in names}, not is_flat or len(set(units)) == 1


def _optimizers(files: Sequence[RankFile], given: Paths | None) -> tuple[list[SavedOptimizer], list[str]]:
    """Return the dictionaries of all ranks, or the full one, and what is to be told."""
    if given is not None:
        return [_optimizer_in(TorchArchive(path)) for path in rank_files(given)], []
    keys = list(files[0].optimizers)
    if len(keys) > 1:
        return [], [left_out(files[0].optimizers.values())]
    if not keys:
        return [], []
    first = files[0].optimizers[keys[0]]
    if is_full(first):
        return [first], []
    for each in files:
        if keys[0] not in each.optimizers:
            raise ValueError(f"{each.file} has no state of the optimizer under {keys[0]!r}, and {first.file} has")
    return [each.optimizers[keys[0]] for each in files], []


def _optimizer_in(file: TorchArchive) -> SavedOptimizer:
    found = optimizers_in(file)
    if len(found) != 1:
        raise ValueError(f"{file} has {'no' if not found else 'several'} dictionaries of an optimizer in it")
    return found[0]
