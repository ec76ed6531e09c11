"""FairScale's files, and files of `local_state_dict`: a file for each rank, read as a single checkpoint.

Each file contains the rank's weights and metadata under any keys, for example ``model`` and ``fsdp_metadata``
(fairseq), or ``model`` and ``shard_metadata`` (metaseq). Both are detected by their contents. The state of an optimizer
is either a part in each file, or FairScale's full state on rank 0. State of a flat parameter is flat and has the same
layout as the parameter, so the metadata of the weights also describe the state. FairScale's full state contains tensors
in the parameters' shapes, keyed by the positions of the parameters in the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp.checkpoint.formats.consolidate import Backing, Shard, backings_of, put_together
from fsdp.checkpoint.formats.rank_files import RankFiles, is_in_files
from fsdp.checkpoint.formats.source import Piece, Source, is_tensor
from fsdp.checkpoint.formats.torch_file import TorchArchive, shown
from fsdp.checkpoint.formats.trees import DEFAULT, Choices, NamedState, SavedOptimizer, is_single
from fsdp.distributed.communicator import some_of
from fsdp.engine.names import clean_name, join
from fsdp.optim_utils.full import NAMES, by_stored_names


def is_fairscale(path: str | os.PathLike[str]) -> bool:
    """Return whether there are files of ranks at a path, with weights and metadata as FairScale's users save them."""
    return is_in_files(path, lambda content: any(map(_is_metadata, content.values())))


def open_fairscale(path: str | os.PathLike[str], choices: Choices = DEFAULT) -> Source:
    """Open a checkpoint of ranks' files; the caller closes the source."""
    ranks = RankFiles(path, choices)
    shards, keys = zip(*map(_shard_in, ranks.files), strict=True)
    is_whole = len(shards) == 1 and not any(shards[0].has(key) for key, _, _ in shards[0].backings())
    if is_whole:  # saved unsharded, as fairseq does by default
        found = {clean_name(key): value for key, value in shards[0].weights.items()}
    else:
        found = put_together(shards, True, True)
    order, is_in_order = _order(shards[0])
    saved = ranks.optimizers(_is_full)
    state = NamedState(str(saved[0])) if saved else None
    if state is not None and _is_full(saved[0]):
        _add_full(state, saved[0], shards[0])
    elif state is not None:
        _add_local(state, saved, shards, choices.param_order)
    size = None if is_whole else len(shards)
    values = ranks.values(keys[0])
    return ranks.source("fairscale", found, saved, state, values, order, world_size=size, is_in_order=is_in_order)


def _shard_in(file: TorchArchive) -> tuple[Shard, tuple[str, str]]:
    """Return a rank's weights and metadata, and their keys in its file."""
    if not isinstance(file.content, Mapping):
        raise ValueError(f"{file} contains a {shown(file.content)}, not a dict with a rank's weights and metadata")
    described = {key: value for key, value in file.content.items() if _is_metadata(value)}
    if len(described) != 1:
        raise ValueError(
            f"{file} has {'no metadata' if not described else 'several metadata: ' + ', '.join(described)} of shards "
            "(local_metadata_dict(): param_metadata and buffer_names), which describe the contents of flat parameters. "
            f"It has {', '.join(map(str, list(file.content)[:8]))}. Weights and metadata of a rank must be in the same "
            "file."
        )
    ((key, metadata),) = described.items()
    weights = [other for other, value in file.content.items() if other != key and _fits(value, metadata)]
    if len(weights) != 1:
        raise ValueError(
            f"{file} has {'no weights' if not weights else 'several: ' + ', '.join(weights)} that its metadata "
            f"({key!r}) describe"
        )
    return Shard(file.path, file.content[weights[0]], metadata), (key, weights[0])


def _is_metadata(value: Any) -> bool:
    return isinstance(value, Mapping) and "param_metadata" in value and "buffer_names" in value


def _fits(value: Any, metadata: Mapping[str, Any]) -> bool:
    """Return whether a dictionary contains any tensor that the metadata name, sharded or not."""
    if not isinstance(value, Mapping):
        return False
    keys = {clean_name(key) for key in value if isinstance(key, str)}
    return any(
        join(entry["fsdp_path"], name) in keys
        for entry in metadata["param_metadata"]
        for backing, described in entry["params"].items()
        for name in (backing, *described["names"])
    )


def _order(shard: Shard) -> tuple[dict[str, int], bool]:
    """Return the positions of tensors in the order of the modules, and whether this order is known.

    State dicts have this order. For flat parameters they contain only the order of units, so it is unknown whether a
    unit's parameter is before or after an inner unit.
    """
    units = [path for _, path, _ in shard.backings()]
    is_flat = any(len(names) > 1 for _, _, names in shard.backings())
    order = {name: number for number, name in enumerate(map(clean_name, shard.weights))}
    return order, not is_flat or len(set(units)) == 1


def _is_full(saved: SavedOptimizer) -> bool:
    return "param_id_map" in saved.content and "uncollected_local_ids" in saved.content


def _add_full(state: NamedState, saved: SavedOptimizer, shard: Shard) -> None:
    described = list(shard.parameters())
    if len(described) != len(saved.content["param_id_map"]):
        raise ValueError(
            f"{saved} has {len(saved.content['param_id_map'])} parameters, but the metadata of {shard.title} list "
            f"{len(described)}: they belong to different models"
        )
    content = by_stored_names(saved.content)
    names: dict[Any, str] = dict(enumerate(name for name, _ in described))
    if NAMES in saved.content:
        names = {name: name for name in names.values()}
        strangers = [name for group in content["param_groups"] for name in group["params"] if name not in names]
        if strangers:
            raise ValueError(f"{saved} has {strangers[0]}, which is not in the metadata of {shard.title}")
    shapes = dict(described)
    for number, name in names.items():
        for key, value in content["state"].get(number, {}).items():
            if isinstance(value, list) and value and all(is_single(key, each, shapes[name]) for each in value):
                state.add_single([name], key, value)  # a 0-d tensor of each rank
            else:
                state.add(name, key, value, shapes[name])
    for group in content["param_groups"]:
        state.groups.append((group, [names[number] for number in group["params"]]))


def _add_local(
    state: NamedState, saved: Sequence[SavedOptimizer], shards: Sequence[Shard], order: Sequence[str] | None
) -> None:
    if len(saved) != len(shards):
        raise ValueError(
            f"there are {len(shards)} files of weights, but {len(saved)} of the optimizer: {saved[0]}, ..."
        )
    backings = {backing.key: backing for backing in backings_of(shards, False)}
    keys = _keys_by_number(saved, shards[0], backings, order)
    for number, key in keys.items():
        holders = list(zip(saved, shards, strict=True))[: len(backings[key].pieces)]
        _add_backing(state, backings[key], number, holders)
    for group in saved[0].content["param_groups"]:
        state.groups.append((group, [name for number in group["params"] for name in backings[keys[number]].names]))


def _keys_by_number(
    saved: Sequence[SavedOptimizer], shard: Shard, backings: Mapping[str, Backing], order: Sequence[str] | None
) -> dict[Any, str]:
    groups = [list(group["params"]) for group in saved[0].content["param_groups"]]
    for other in saved[1:]:
        if [list(group["params"]) for group in other.content["param_groups"]] != groups:
            raise ValueError(f"{other} has different parameter groups than {saved[0]}")
    numbers = [number for group in groups for number in group]
    named = [name for group in saved[0].content["param_groups"] for name in group.get(NAMES, ())]
    # State dicts list parameters in the order of `parameters()`; of a tied parameter, the metadata contain one name.
    listed = [key for key in map(clean_name, shard.weights) if key in backings]
    keys = [clean_name(key) for key in (order or named or listed)]
    unknown = [key for key in keys if key not in backings]
    if unknown:
        raise ValueError(f"{shard.title} has no shard {some_of(unknown)}. It has {some_of(listed)}")
    if len(keys) != len(numbers) or (len(groups) > 1 and not order and not named):
        raise ValueError(
            f"{saved[0]} has {len(numbers)} parameters in {len(groups)} group(s), and {shard.title} has {len(listed)} "
            f"shards ({some_of(listed)}): their correspondence is unknown. Pass a file with the shards' keys in the "
            "order of the optimizer's numbers (--param-order)"
        )
    return dict(zip(numbers, keys, strict=True))


def _add_backing(
    state: NamedState, backing: Backing, number: Any, holders: Sequence[tuple[SavedOptimizer, Shard]]
) -> None:
    entries = [saved.content["state"].get(number) or {} for saved, _ in holders]
    parts = [rank for rank, piece in enumerate(backing.pieces) if piece.numel] or [0]
    wanted = list(entries[parts[0]])
    for rank in parts:
        if set(entries[rank]) != set(wanted):
            raise ValueError(
                f"{holders[rank][0]}: the optimizer's state of {backing.key} has the keys {sorted(entries[rank])}, and "
                f"{holders[parts[0]][0]} has {sorted(wanted)}"
            )
    for key in wanted:
        values = [entries[rank][key] for rank in parts]
        stored = [holders[rank][1].get(backing.key).shape for rank in parts]
        if all(is_single(key, value, shape) for value, shape in zip(values, stored, strict=True)):
            state.add_single(backing.names, key, values)
            continue
        pieces = [_piece(backing, key, rank, entries[rank][key], holders) for rank in parts]
        if len({piece.tensor.dtype for piece in pieces}) > 1:
            raise ValueError(f"{state.where(backing.key, key)} has different dtypes on the ranks")
        for name, each in backing.cut(pieces).items():
            state.add_elements(name, key, each)


def _piece(backing: Backing, key: str, rank: int, value: Any, holders: Sequence[tuple[SavedOptimizer, Shard]]) -> Piece:
    """Return a rank's state without padding. The padded size is the size of this rank's or rank 0's weights."""
    saved, shard = holders[rank]
    sizes = [each.get(backing.key).shape.numel() for each in (shard, holders[0][1])]
    if not is_tensor(value) or value.shape.numel() not in sizes:
        found = list(value.shape) if is_tensor(value) else type(value).__name__
        raise ValueError(
            f"{saved}: the optimizer's state '{key}' of {backing.key} is {found}, but the shard in {shard.title} has "
            f"shape [{sizes[0]}]: only tensors of the shard's shape and numbers can be combined. If all keys are "
            "affected, the order of parameters differs (--param-order)."
        )
    return Piece.of(value, backing.pieces[rank].numel)
