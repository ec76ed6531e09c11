"""Checkpoints with a file for each rank: finding the files of one by their names, and making one source of all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from fsdp.checkpoint.formats.optim import NamedState, SavedOptimizer, optimizers_in
from fsdp.checkpoint.formats.source import Source, TensorReader, is_lazy
from fsdp.checkpoint.formats.torch_file import TorchArchive, is_torch_file, materialised, shown
from fsdp.checkpoint.json_values import encoded

# What is before a number, the number, and what is after it: the last one, but for a total (``rank3-of-8``).
_NUMBER = re.compile(r"^(.*?)(\d+)((?:[-_.]?of[-_.]?\d+)?\D*)$", re.DOTALL)
_TOTAL = re.compile(r"^[-_.]?of[-_.]?(\d+)")
# What is before a rank's number, and not before that of an epoch or a step.
_RANK = re.compile(r"(?:^|(?:shards?|rank|gpu|worker|proc|process)[-_.]?)$", re.IGNORECASE)

_MOST_NAMED = 16  # of the ranks whose files are missing
_EXTRA = "_extra_state"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# By what is before and after their numbers, files by number.
_Groups = dict[tuple[str, str], dict[int, str]]


def rank_files(path: Paths) -> list[str]:
    """Return the files of all ranks, in order.

    Args:
        path: a folder with one file for each rank, whose last number is the rank's; one of these files; the name that
            they have in common (``checkpoint_last.pt`` for ``checkpoint_last-shard0.pt`` and so on); a file that is
            none of such; or all files, in order.

    Raises:
        FileNotFoundError: if there are none, or if some are missing; says which.
        ValueError: for a folder in which there are those of several checkpoints.
    """
    if not isinstance(path, (str, os.PathLike)):
        return [os.fspath(each) for each in path]
    place = os.fspath(path)
    if os.path.isdir(place):
        return _only(place, _groups(place))
    folder, name = os.path.split(place)
    groups = _groups(folder or ".") if os.path.isdir(folder or ".") else {}
    matched = _NUMBER.match(name)
    if matched and (matched[1], matched[3]) in groups:
        return _in_order(place, matched[3], groups[matched[1], matched[3]])
    if os.path.isfile(place):
        return [place]
    stem, dot, ending = name.rpartition(".")
    found = {key: group for key, group in groups.items() if _names_shards(key, stem, dot + ending)}
    if not found:
        raise FileNotFoundError(
            f"there is no {place}, and no file for each rank of that name ({stem}-shard0{dot}{ending})"
        )
    return _only(place, found)


def title_of(path: Paths) -> str:
    """Return the name that messages have for the files of all ranks."""
    return os.fspath(path if isinstance(path, (str, os.PathLike)) else path[0])


def likely_files(path: str | os.PathLike[str]) -> list[str]:
    """Return two files of each checkpoint at a path, which show its format whether or not others are missing."""
    place = os.fspath(path)
    if os.path.isfile(place):
        return [place]
    folder, name = (place, None) if os.path.isdir(place) else os.path.split(place)
    groups = _groups(folder or ".") if os.path.isdir(folder or ".") else {}
    if name is not None:
        stem, dot, ending = name.rpartition(".")
        groups = {key: group for key, group in groups.items() if _names_shards(key, stem, dot + ending)}
    return [group[number] for group in groups.values() for number in sorted(group)[:2]]


def _names_shards(key: tuple[str, str], stem: str, ending: str) -> bool:
    before, after = key
    return bool(re.fullmatch(rf"{re.escape(stem)}[-_.].*", before)) and _TOTAL.sub("", after) == ending


def _groups(folder: str) -> _Groups:
    groups: _Groups = {}
    for name in sorted(os.listdir(folder)):
        matched, place = _NUMBER.match(name), os.path.join(folder, name)
        if matched and _RANK.search(matched[1]) and os.path.isfile(place):
            groups.setdefault((matched[1], matched[3]), {})[int(matched[2])] = place
    return {key: group for key, group in groups.items() if any(map(is_torch_file, group.values()))}


def _only(place: str, groups: _Groups) -> list[str]:
    if not groups:
        raise FileNotFoundError(f"{place} has no files of torch.save with a rank's number in their names (rank0.pt)")
    if len(groups) > 1:
        names = sorted(os.path.basename(group[min(group)]) for group in groups.values())
        raise ValueError(
            f"{place} has files of several checkpoints, as {', '.join(names[:6])}: name the first file of one. (Model "
            "parts of tensor parallelism are read one by one.)"
        )
    ((_, after), group) = next(iter(groups.items()))
    return _in_order(place, after, group)


def _in_order(place: str, after: str, group: Mapping[int, str]) -> list[str]:
    total = _TOTAL.match(after)
    count = int(total[1]) if total else max(group) + 1
    missing = list(islice((number for number in range(count) if number not in group), _MOST_NAMED + 1))
    if missing:
        more = " and more" if len(missing) > _MOST_NAMED else ""
        raise FileNotFoundError(
            f"{place}: there is {os.path.basename(group[min(group)])}, and no file of rank "
            f"{', '.join(map(str, missing[:_MOST_NAMED]))}{more}. All ranks' are needed."
        )
    return [group[number] for number in sorted(group)]


def optimizers_of(files: Sequence[TorchArchive], given: Paths | None, notes: list[str]) -> list[SavedOptimizer]:
    """Return the optimizer's dictionaries, which the first file alone may have. Of several it has none, but a note."""
    sources = files if given is None else [TorchArchive(each) for each in rank_files(given)]
    found = [optimizers_in(file) for file in sources]
    several = next((each for each in found if len(each) > 1), None)
    if several is not None:
        keys = ", ".join(each.key for each in several)
        notes.append(f"{keys} are left out: a checkpoint has the state of one optimizer")
        return []
    saved = [one for each in found for one in each]
    missing = next((file for file, each in zip(sources, found, strict=True) if not each), None)
    if missing is not None and given is not None and not saved:
        raise ValueError(f"{missing} has no dictionary of an optimizer in it")
    if missing is not None and saved and (len(saved) > 1 or missing is sources[0]):  # or the first one has all of it
        raise ValueError(f"{missing} has no state of the optimizer under {saved[0].key!r}, and {saved[0].file} has")
    return saved


def source_of_ranks(
    word: str,
    title: str,
    found: Mapping[str, Any],
    saved: Sequence[SavedOptimizer],
    state: NamedState | None,
    values: dict[Any, Any],
    notes: Sequence[str],
    world_size: int | None,
    order: Mapping[str, int] | None = None,
    *,
    is_in_order: bool = True,
) -> Source:
    """Return one checkpoint: the model by plain names, the optimizer's dictionaries and their state, and values."""
    tensors, aliases, extra = _sorted_out(found, title)
    names = sorted(tensors, key=lambda name: (order or {}).get(name, -1))  # those of a flat parameter stay first
    if saved and saved[0].others:
        values[saved[0].key] = saved[0].others
    return Source(
        format=word,
        path=title,
        model=TensorReader(title, {name: tensors[name] for name in names}),
        optimizer=None if state is None else TensorReader(title, state.tensors),
        optimizer_rest=None if state is None else state.rest(),
        extra=extra,
        values=encoded(values, "values") if values else None,
        world_size=world_size,
        notes=tuple(notes),
        aliases=aliases,
        is_in_order=is_in_order,
    )


def _sorted_out(found: Mapping[str, Any], title: str) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return tensors, second names of some, and modules' extra state, encoded."""
    tensors: dict[str, Any] = {}
    aliases, extra = {}, {}
    names: dict[int, str] = {}  # by the id of a tensor, the first one
    for name, value in found.items():
        if name.rpartition(".")[2] == _EXTRA:
            extra[name] = encoded(materialised(value), f"{title}: {name}")
        elif not is_lazy(value):
            raise ValueError(f"{title}: {name} is a {shown(value)}, not a tensor")
        elif names.setdefault(id(value), name) == name:
            tensors[name] = value
        else:
            aliases[name] = names[id(value)]
    return tensors, aliases, extra
