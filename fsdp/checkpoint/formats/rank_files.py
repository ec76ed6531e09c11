"""Checkpoints with a file for each rank: files are found by their names and combined into a single source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from fsdp.checkpoint.formats.source import Source, TensorReader, is_lazy
from fsdp.checkpoint.formats.torch_file import TorchArchive, is_torch_file, materialised, shown, values_of
from fsdp.checkpoint.formats.trees import Choices, NamedState, Paths, SavedOptimizer, optimizers_in
from fsdp.checkpoint.json_values import encoded

# The text before a number, the number, and the text after it, for the last number except a total (``rank3-of-8``).
_NUMBER = re.compile(r"^(.*?)(\d+)((?:[-_.]?of[-_.]?\d+)?\D*)$", re.DOTALL)
_TOTAL = re.compile(r"^[-_.]?of[-_.]?(\d+)")
# The text before a rank's number, but not before the number of an epoch or a step.
_RANK = re.compile(r"(?:^|(?:shards?|rank|gpu|worker|proc|process)[-_.]?)$", re.IGNORECASE)

_MOST_NAMED = 16  # of the ranks whose files are missing
_EXTRA = "_extra_state"

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


def is_in_files(path: str | os.PathLike[str], is_such: Callable[[Mapping[Any, Any]], bool]) -> bool:
    """Return whether there is such a dictionary in files of ranks at a path, whether or not some of them are missing.

    Two files of each checkpoint show it.
    """
    place = os.fspath(path)
    folder, name = (place, None) if os.path.isdir(place) else os.path.split(place)
    groups = _groups(folder or ".") if os.path.isdir(folder or ".") and not os.path.isfile(place) else {}
    if name is not None:
        stem, dot, ending = name.rpartition(".")
        groups = {key: group for key, group in groups.items() if _names_shards(key, stem, dot + ending)}
    files = [group[number] for group in groups.values() for number in sorted(group)[:2]]
    for file in [place] if os.path.isfile(place) else files:
        with suppress(OSError, ValueError):
            content = TorchArchive(file).content
            if isinstance(content, Mapping) and is_such(content):
                return True
    return False


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


class RankFiles:
    """The files of all ranks, which are combined into a single checkpoint."""

    def __init__(self, path: Paths, choices: Choices) -> None:
        self.title = os.fspath(path if isinstance(path, (str, os.PathLike)) else path[0])
        if choices.model_key is not None or choices.optimizer_key is not None:
            raise ValueError(f"{self.title}: model and optimizer are found by their contents: leave out their keys")
        self.files = [TorchArchive(each) for each in rank_files(path)]
        self.notes: list[str] = []
        self._choices = choices

    def optimizers(self, full: Callable[[SavedOptimizer], bool] = lambda saved: False) -> list[SavedOptimizer]:
        """Return the optimizer's dictionaries. If there are multiple optimizers, return none and add a note.

        If the first file's dictionary is `full`, other files are not examined.
        """
        given = self._choices.optimizer_files
        if self._choices.only == "model":
            return []
        sources = self.files if given is None else [TorchArchive(each) for each in rank_files(given)]
        found = [optimizers_in(file) for file in sources]
        if given is None and len(found[0]) == 1 and full(found[0][0]):
            return found[0]
        several = next((each for each in found if len(each) > 1), None)
        if several is not None:
            keys = ", ".join(each.key for each in several)
            self.notes.append(f"{keys} are left out: a checkpoint has the state of one optimizer")
            return []
        saved = [one for each in found for one in each]
        missing = next((file for file, each in zip(sources, found, strict=True) if not each), None)
        if missing is not None and given is not None and not saved:
            raise ValueError(f"{missing} has no dictionary of an optimizer in it")
        if missing is not None and saved and (len(saved) > 1 or missing is sources[0]):  # or the first has all of it
            raise ValueError(f"{missing} has no state of the optimizer under {saved[0].key!r}, and {saved[0].file} has")
        return saved

    def source(
        self,
        word: str,
        found: Mapping[str, Any],
        saved: Sequence[SavedOptimizer],
        state: NamedState | None,
        values: dict[Any, Any],
        order: Mapping[str, int] | None = None,
        **known: Any,
    ) -> Source:
        """Return the checkpoint: the model by plain names, the optimizer's dictionaries and their state, and values."""
        tensors, aliases, extra = _sorted_out(found, self.title)
        names = sorted(tensors, key=lambda name: (order or {}).get(name, -1))  # flat parameters' names stay first
        if saved and saved[0].others:
            values[saved[0].key] = saved[0].others
        return Source(
            format=word,
            path=self.title,
            model=TensorReader(self.title, {name: tensors[name] for name in names}),
            optimizer=None if state is None else TensorReader(self.title, state.tensors),
            optimizer_rest=None if state is None else state.rest(),
            extra=extra,
            values=encoded(values, "values") if values else None,
            notes=tuple(self.notes),
            aliases=aliases,
            **known,
        )

    def values(self, leave: Iterable[Any]) -> dict[Any, Any]:
        """Return the other contents of the first file, without some keys and without optimizers."""
        first = self.files[0]
        return values_of(first.content, {*leave, *(each.key for each in optimizers_in(first))}, self.notes)


def _sorted_out(found: Mapping[str, Any], title: str) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return tensors, second names of some, and modules' extra state, encoded."""
    tensors: dict[str, Any] = {}
    aliases, extra = {}, {}
    names: dict[int, str] = {}  # the first name, by the id of a tensor
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
