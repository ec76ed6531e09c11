"""The state of an optimizer beside FairScale's shards is found here by parameters' names.

Of a flat parameter an optimizer has flat state, which lies as the parameter's elements lie; so the metadata of the
weights say what is in it. FairScale's full dictionaries have tensors in the parameters' shapes, under numbers, which
count the parameters in the order of the metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp.checkpoint.formats.consolidate import Backing, Shard, backings_of
from fsdp.checkpoint.formats.optim import FoundState, NamedState, SavedOptimizer, is_single
from fsdp.checkpoint.formats.source import Elements, is_tensor
from fsdp.engine.names import clean_name

_ADDED = ("param_id_map", "uncollected_local_ids")
_NAMES = "param_names"


def is_full(saved: SavedOptimizer) -> bool:
    """Return whether it is FairScale's full dictionary."""
    return all(key in saved.content for key in _ADDED)


def state_of(saved: Sequence[SavedOptimizer], shards: Sequence[Shard], order: Sequence[str] | None) -> FoundState:
    """Return the state by names.

    Args:
        saved: the full dictionary, or all ranks'.
        shards: of the weights.
        order: see `fsdp.checkpoint.formats.fairscale.open_fairscale`.

    Raises:
        ValueError: for what does not fit; it names the file.
        TypeError: for values that no checkpoint holds.
    """
    first = saved[0]
    state = NamedState(str(first))
    if is_full(first):
        groups = list(_add_full(state, first, shards[0]))
    else:
        groups = list(_add_local(state, saved, shards, order))
    return state.found(first, groups, _ADDED)


# --- FairScale's full dictionary ------------------------------------------------------------------------------------

_Group = tuple[Mapping[str, Any], list[str]]


def _add_full(state: NamedState, saved: SavedOptimizer, shard: Shard) -> Iterator[_Group]:
    described = list(shard.parameters())
    if len(described) != len(saved.content["param_id_map"]):
        raise ValueError(
            f"{saved} has {len(saved.content['param_id_map'])} parameters, and the metadata of {shard.title} name "
            f"{len(described)}: they are of different models"
        )
    for number, (name, shape) in enumerate(described):
        for key, value in saved.content["state"].get(number, {}).items():
            if isinstance(value, list) and value and all(is_single(key, each, shape) for each in value):
                state.add_single([name], key, value)  # 0-d tensors, one of each rank
            else:
                state.add(name, key, value, shape)
    for group in saved.content["param_groups"]:
        yield group, [described[number][0] for number in group["params"]]


# --- each rank's own ------------------------------------------------------------------------------------------------


def _add_local(
    state: NamedState,
    saved: Sequence[SavedOptimizer],
    shards: Sequence[Shard],
    order: Sequence[str] | None,
) -> Iterator[_Group]:
    if len(saved) != len(shards):
        raise ValueError(
            f"there are {len(shards)} files of weights, and {len(saved)} of the optimizer: {saved[0]}, ..."
        )
    backings = {backing.key: backing for backing in backings_of(shards, False)}
    keys = keys_by_number(saved, shards[0], backings, order)
    for number, key in keys.items():
        holders = list(zip(saved, shards, strict=True))[: len(backings[key].pieces)]
        _add_backing(state, backings[key], number, holders)
    for group in saved[0].content["param_groups"]:
        yield group, [name for number in group["params"] for name in backings[keys[number]].names]


def keys_by_number(
    saved: Sequence[SavedOptimizer], shard: Shard, backings: Mapping[str, Backing], order: Sequence[str] | None
) -> dict[Any, str]:
    """Return the key of a shard by the optimizer's number."""
    groups = [list(group["params"]) for group in saved[0].content["param_groups"]]
    for other in saved[1:]:
        if [list(group["params"]) for group in other.content["param_groups"]] != groups:
            raise ValueError(f"{other} has other parameter groups than {saved[0]}")
    numbers = [number for group in groups for number in group]
    named = [name for group in saved[0].content["param_groups"] for name in group.get(_NAMES, ())]
    # State dicts list parameters in the order of `parameters()`, tied ones once among those that the metadata name.
    listed = [key for key in map(clean_name, shard.weights) if key in backings]
    keys = [clean_name(key) for key in (order or named or listed)]
    unknown = [key for key in keys if key not in backings]
    if unknown:
        raise ValueError(f"{shard.title} has no shard {', '.join(unknown[:5])}. It has {', '.join(listed[:5])}, ...")
    if len(keys) != len(numbers) or (len(groups) > 1 and not order and not named):
        raise ValueError(
            f"{saved[0]} has {len(numbers)} parameters in {len(groups)} group(s), and {shard.title} has {len(listed)} "
            f"shards ({', '.join(listed[:4])}{', ...' if len(listed) > 4 else ''}): nothing says which is which. Give "
            "a file with the shards' keys in the order of the optimizer's numbers (--param-order)"
        )
    return dict(zip(numbers, keys, strict=True))


def _add_backing(
    state: NamedState,
    backing: Backing,
    number: Any,
    holders: Sequence[tuple[SavedOptimizer, Shard]],
) -> None:
    """Add the state of one flat parameter."""
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
        if len({piece.dtype for piece in pieces}) > 1:
            raise ValueError(f"{state.where(backing.key, key)} has another dtype on some ranks")
        for each in backing.cut(pieces):
            state.add_elements(each.name, key, each)


def _piece(
    backing: Backing, key: str, rank: int, value: Any, holders: Sequence[tuple[SavedOptimizer, Shard]]
) -> Elements:
    """Return a rank's shard of the state, without padding; weights may be without, and the first rank's have none."""
    saved, shard = holders[rank]
    sizes = [each.get(backing.key).shape.numel() for each in (shard, holders[0][1])]
    if not is_tensor(value) or value.shape.numel() not in sizes:
        found = list(value.shape) if is_tensor(value) else type(value).__name__
        raise ValueError(
            f"{saved}: the optimizer's state '{key}' of {backing.key} is {found}, and the shard in {shard.title} has "
            f"shape [{sizes[0]}]: what is neither of the shard's shape nor a number cannot be put together. If all "
            "keys are so, the order of parameters is another one (--param-order)."
        )
    return Elements.of(value, backing.pieces[rank].numel)
