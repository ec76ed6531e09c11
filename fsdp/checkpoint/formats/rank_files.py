"""Checkpoints with a file for each rank: their files are found by names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import islice

from fsdp.checkpoint.formats.torch_file import is_torch_file
from fsdp.checkpoint.formats.trees import Paths

# The text before a number, the number, and the text after it, for the last number except a total (``rank3-of-8``).
_NUMBER = re.compile(r"^(.*?)(\d+)((?:[-_.]?of[-_.]?\d+)?\D*)$", re.DOTALL)
_TOTAL = re.compile(r"^[-_.]?of[-_.]?(\d+)")
# The text before a rank's number, but not before the number of an epoch or a step.
_RANK = re.compile(r"(?:^|(?:shards?|rank|gpu|worker|proc|process)[-_.]?)$", re.IGNORECASE)

_MOST_NAMED = 16  # of the ranks whose files are missing

# By the text before and after their numbers, files by number.
_Groups = dict[tuple[str, str], dict[int, str]]


def rank_files(path: Paths) -> list[str]:
    """Return the files of all ranks, in order.

    Args:
        path: a folder with a file for each rank, whose last number is the rank; any of these files; their common name
            (``checkpoint_last.pt`` for ``checkpoint_last-shard0.pt`` and so on); a single file; or a list of all
            files, in order.

    Raises:
        FileNotFoundError: if files are missing, with their names.
        ValueError: for a folder with the files of multiple checkpoints.
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


def first_files(path: str | os.PathLike[str]) -> list[str]:
    """Return two files of each checkpoint at a path, by which formats are detected even if other files are missing."""
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
