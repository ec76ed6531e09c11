"""Checkpoints with a file for each rank: files are found by their names and combined into a single source.

This module reads checkpoints of torch's FullyShardedDataParallel (FSDP1) that were saved with `torch.save`;
`fairscale` reads FairScale's:

- A single file with a full state dict, a full optimizer state by names (``FSDP.full_optim_state_dict``, or
  ``optim_state_dict`` with ``FULL_STATE_DICT``), or both.
- A file for each rank, with sharded state dicts (``SHARDED_STATE_DICT``, ``FSDP.sharded_optim_state_dict``): shards in
  `ShardedTensor`s or `DTensor`s, which contain their positions, read without a process group.

Local state dicts (``LOCAL_STATE_DICT``) are not supported: they contain shards of flat parameters, and the files do
not contain the layout of these.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from fsdp.checkpoint.formats.source import (
    ChunkedTensor,
    LazyTensor,
    Source,
    StridedTensor,
    TensorReader,
    are_all_of,
    is_lazy,
    is_tensor,
    memory_of,
)
from fsdp.checkpoint.formats.torch_file import Foreign, TorchArchive, is_torch_file, materialised, shown, values_of
from fsdp.checkpoint.formats.trees import (
    DEFAULT,
    Choices,
    NamedState,
    SavedOptimizer,
    is_optimizer_state,
    is_single,
    names_by_key,
    optimizers_in,
)
from fsdp.checkpoint.json_values import encoded
from fsdp.distributed.communicator import some_of
from fsdp.engine.boxes import Box
from fsdp.engine.names import plain_name
from fsdp.optim_utils.full import OWN_KEYS

# The text before a number, the number, and the text after it, for the last number except a total (``rank3-of-8``).
_NUMBER = re.compile(r"^(.*?)(\d+)((?:[-_.]?of[-_.]?\d+)?\D*)$", re.DOTALL)
_TOTAL = re.compile(r"^[-_.]?of[-_.]?(\d+)")
# The text before a rank's number, but not before the number of an epoch or a step.
_RANK = re.compile(r"(?:^|(?:shards?|rank|gpu|worker|proc|process)[-_.]?)$", re.IGNORECASE)

_MOST_NAMED = 16  # ranks with missing files in a message
_EXTRA = "_extra_state"
_FLAT = "_flat_param"
_MODELS = ("model", "state_dict", "model_state_dict", "module")

# Files by number, for each pair of texts before and after the number.
_Groups = dict[tuple[str, str], dict[int, str]]


def rank_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the files of all ranks, in order.

    Args:
        path: a folder with a file for each rank, whose last number is the rank; any of these files; their common name
            (``checkpoint_last.pt`` for ``checkpoint_last-shard0.pt`` and so on); or a single file.
    """
    place = os.fspath(path)
    folder, name = os.path.split(place)
    matched = _NUMBER.match(name)
    if matched and not os.path.isdir(place) and (group := _groups(folder).get((matched[1], matched[3]))):
        return _in_order(place, matched[3], group)
    if os.path.isfile(place):
        return [place]
    found = _groups_at(place)
    if not found and not os.path.isdir(place):
        stem, dot, ending = name.rpartition(".")
        raise FileNotFoundError(
            f"there is no {place}, and no file for each rank of that name ({stem}-shard0{dot}{ending})"
        )
    return _only(place, found)


def is_in_files(path: str | os.PathLike[str], is_such: Callable[[Mapping[Any, Any]], bool]) -> bool:
    """Return whether files of ranks at a path contain a dictionary for which `is_such` is True; files may be missing.

    Only two files of each checkpoint are examined.
    """
    place = os.fspath(path)
    groups = {} if os.path.isfile(place) else _groups_at(place)
    files = [group[number] for group in groups.values() for number in sorted(group)[:2]]
    for file in files or [place]:
        with suppress(OSError, ValueError):
            content = TorchArchive(file).content
            if isinstance(content, Mapping) and is_such(content):
                return True
    return False


def _groups_at(place: str) -> _Groups:
    """Return the files of ranks in a folder, or with the common name `place`."""
    if os.path.isdir(place):
        return _groups(place)
    folder, name = os.path.split(place)
    stem, dot, ending = name.rpartition(".")
    before = re.compile(rf"{re.escape(stem)}[-_.].*")
    groups = _groups(folder).items()
    return {key: group for key, group in groups if before.fullmatch(key[0]) and _TOTAL.sub("", key[1]) == dot + ending}


def _groups(folder: str) -> _Groups:
    groups: _Groups = {}
    folder = folder or "."
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
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
            f"{place} has files of several checkpoints, such as {some_of(names)}: pass the first file of one. (Model "
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
            f"{place}: {os.path.basename(group[min(group)])} exists, but no file of rank "
            f"{', '.join(map(str, missing[:_MOST_NAMED]))}{more}. The files of all ranks are needed."
        )
    return [group[number] for number in sorted(group)]


class RankFiles:
    """The files of all ranks, which are combined into a single checkpoint."""

    def __init__(self, path: str | os.PathLike[str], choices: Choices) -> None:
        self.title = os.fspath(path)
        if choices.model_key is not None or choices.optimizer_key is not None:
            raise ValueError(f"{self.title}: model and optimizer are identified by their contents: omit their keys")
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
            self.notes.append(f"{keys} are ignored: a checkpoint has the state of one optimizer")
            return []
        saved = [one for each in found for one in each]
        missing = next((file for file, each in zip(sources, found, strict=True) if not each), None)
        if missing is not None and given is not None and not saved:
            raise ValueError(f"{missing} has no dictionary of an optimizer in it")
        if missing is not None and saved and (len(saved) > 1 or missing is sources[0]):  # else the first has all
            raise ValueError(f"{missing} has no state of the optimizer under {saved[0].key!r}, unlike {saved[0].file}")
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
        names = sorted(tensors, key=lambda name: (order or {}).get(name, -1))  # names in flat parameters first
        others = values_of(saved[0].content, OWN_KEYS, []) if saved else {}  # for example ``loss_scale``
        if others:
            values[saved[0].key] = others
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
    """Return tensors, aliases of tied tensors, and the modules' extra state, encoded."""
    tensors: dict[str, Any] = {}
    aliases, extra = {}, {}
    names: dict[Any, str] = {}  # the first name, by the memory of a tensor
    for name, value in found.items():
        if name.rpartition(".")[2] == _EXTRA:
            extra[name] = encoded(materialised(value), f"{title}: {name}")
        elif not is_lazy(value):
            raise ValueError(f"{title}: {name} is a {shown(value)}, not a tensor")
        elif (first := names.setdefault(memory_of(value), name)) == name:
            tensors[name] = value
        else:
            aliases[name] = first
    return tensors, aliases, extra


def has_fsdp1_shards(path: str | os.PathLike[str]) -> bool:
    def has_shards(content: Mapping[Any, Any]) -> bool:
        inside = (each for each in (content, *content.values()) if isinstance(each, Mapping))
        return any(_has_shards(each) for each in inside if not is_optimizer_state(each))

    return is_in_files(path, has_shards)


def _has_shards(state_dict: Mapping[Any, Any]) -> bool:
    return _is_local(state_dict) or any(map(_is_sharded, state_dict.values()))


def _is_local(state_dict: Mapping[Any, Any]) -> bool:
    """Return whether a state dict contains flat parameters, as in LOCAL_STATE_DICT."""
    return any(str(key).rpartition(".")[2] == _FLAT for key in state_dict)


def open_fsdp1(path: str | os.PathLike[str], choices: Choices = DEFAULT) -> Source:
    """Open a single file or all ranks' files of FSDP1; the caller closes the source."""
    ranks = RankFiles(path, choices)
    files = ranks.files
    key = _model_key(files[0])
    models = [] if key is None and not _is_state_dict(files[0].content) else [_model(file, key) for file in files]
    if models and _is_local(models[0]):
        raise ValueError(
            f"{files[0]} has flat parameters of LOCAL_STATE_DICT in it, without the names of the parameters that they "
            "contain. Load it with FSDP1 on the same number of ranks, and save SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    found = _whole(models, files)
    saved = ranks.optimizers()
    state = _state(saved, choices.param_order, found) if saved else None
    values = {} if key is None else ranks.values([key])
    if not models:
        ranks.notes.append("there are no weights of a model in it")
    world_size = len(files) if models and _has_shards(models[0]) else None
    return ranks.source("fsdp1", found, saved, state, values, world_size=world_size)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and not is_optimizer_state(value)
        and any(is_tensor(each) or _is_sharded(each) for each in value.values())
        and all(isinstance(key, str) for key in value)
    )


def _model_key(file: TorchArchive) -> str | None:
    """Return the key of the model; None if the model has no key."""
    if not isinstance(file.content, Mapping):
        raise ValueError(f"{file} contains a {shown(file.content)}, not a dict")
    if _is_state_dict(file.content) or is_optimizer_state(file.content):
        return None
    found = [key for key, value in file.content.items() if _is_state_dict(value)]
    found = [key for key in found if key in _MODELS] or found
    if len(found) > 1:
        raise ValueError(f"{file} has several state dicts, {', '.join(found)}: save the right one as 'model'")
    return found[0] if found else None


def _model(file: TorchArchive, key: str | None) -> Mapping[str, Any]:
    found = file.content if key is None else file.content.get(key) if isinstance(file.content, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} has no state dict of the model{'' if key is None else f' under {key!r}'}")
    return {plain_name(name): value for name, value in found.items()}


def _whole(models: Sequence[Mapping[str, Any]], files: Sequence[TorchArchive]) -> dict[str, Any]:
    """Return the tensors and other values of a model by name, combined from all ranks' files."""
    found: dict[str, Any] = {}
    for name, value in models[0].items() if models else ():
        missing = [file for model, file in zip(models, files, strict=True) if name not in model]
        if missing:
            raise ValueError(f"{missing[0]} has no {name}, unlike {files[0]}: they belong to different models")
        found[name] = value
        if is_tensor(value) or _is_sharded(value):
            found[name] = _merged(name, [model[name] for model in models], [file.path for file in files])
    return found


def _state(saved: Sequence[SavedOptimizer], order: Sequence[str] | None, model: Mapping[str, Any]) -> NamedState:
    first = saved[0]
    names = names_by_key(str(first), first.content, order, plain_name)
    state = NamedState(str(first))
    for number, name in names.items():
        entries = [each.content["state"].get(number) or {} for each in saved]
        shape = model[name].shape if is_lazy(model.get(name)) else torch.Size([1])
        for key, value in entries[0].items():
            missing = [file for file, entry in zip(saved, entries, strict=True) if key not in entry]
            if missing:
                raise ValueError(f"{missing[0]} has no '{key}' of {name}, unlike {first}")
            values = [entry[key] for entry in entries]
            if not _is_sharded(value) and is_single(key, value, shape):
                state.add_single([name], key, values)
            else:
                each = _merged(f"{name}/{key}", values, [each.file.path for each in saved])
                if name in model and each.shape != shape:
                    raise ValueError(state.odd_shape(name, key, each.shape, shape))
                state.add_elements(name, key, each)
    state.groups = [(group, [names[number] for number in group["params"]]) for group in first.content["param_groups"]]
    return state


def _is_sharded(value: Any) -> bool:
    module, _, name = value.origin.rpartition(".") if isinstance(value, Foreign) else ("", "", "")
    return name in ("ShardedTensor", "DTensor") and f"{module}.".startswith("torch.distributed.")


def _merged(name: str, values: Sequence[Any], files: Sequence[str]) -> LazyTensor:
    """Return a tensor from its shards in the files, or from the first file if it is not sharded."""
    first = values[0]
    if not _is_sharded(first):
        return first
    shape, dtype, _ = _shards_of(name, first, files[0])
    held: dict[Box, StridedTensor] = {}  # replicas have equal shards
    for value, file in zip(values, files, strict=True):
        other, _, found = _shards_of(name, value, file) if _is_sharded(value) else (None, None, [])
        if other != shape:
            raise ValueError(f"{name} in {file} differs from {files[0]}, which has shards of {list(shape)}")
        for box, tensor in found:
            if tuple(tensor.shape) != box.sizes:
                raise ValueError(f"{name} in {file} has shape {list(tensor.shape)}, not {list(box.sizes)}")
            held.setdefault(box, tensor)
    if not are_all_of(shape, held.keys()):
        raise ValueError(
            f"{name}: the {len(files)} files given have {sum(box.numel for box in held)} of its {shape.numel()} "
            "elements, or some twice. A rank's file is missing, or a file was saved by another number of ranks."
        )
    dtype = next((tensor.dtype for tensor in held.values()), dtype)
    return ChunkedTensor(dtype, shape, {box: partial(held.__getitem__, box) for box in held if box.numel})


def _shards_of(name: str, value: Any, file: str) -> tuple[torch.Size, torch.dtype, list[tuple[Box, StridedTensor]]]:
    """Return the shape and dtype of an unsharded tensor, and its shards in a file."""
    try:
        if value.origin.endswith(".DTensor"):
            shape = torch.Size(value.args[2])
            return shape, value.args[1], [(_rows(name, value, shape, file), value.fields["_local_tensor"])]
        shards, described = value.state[0], value.state[1].fields
        places = [each.fields["metadata"].fields for each in shards]
        boxes = [Box(tuple(each["shard_offsets"]), tuple(each["shard_sizes"])) for each in places]
        properties = described["tensor_properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        tensors = [each.fields["tensor"] for each in shards]
        return torch.Size(described["size"]), dtype, list(zip(boxes, tensors, strict=True))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name} in {file} is a {value.origin} in an unknown form ({error!r}): load it with the version of torch "
            "that saved it, and save FULL_STATE_DICT"
        ) from None


def _rows(name: str, value: Any, shape: torch.Size, file: str) -> Box:
    """Return the box of the rows that a `DTensor`'s shard contains."""
    spec = value.fields["_spec"].fields
    kinds = [each.origin.rpartition(".")[2] for each in spec["placements"]]
    sharded = [dim for dim, kind in enumerate(kinds) if kind != "Replicate"]
    if not sharded:
        return Box.whole(shape)
    if len(sharded) > 1 or kinds[sharded[0]] != "Shard" or spec["placements"][sharded[0]].fields["dim"] != 0:
        dims = [each.fields.get("dim", "") for each in spec["placements"]]
        shown = ", ".join(f"{kind}({dim})" for kind, dim in zip(kinds, dims, strict=True))
        raise ValueError(
            f"{name} in {file} has placements {shown}, but FSDP1's files must shard the first dimension over one group "
            "of ranks: save such a model with torch.distributed.checkpoint"
        )
    ranks, number = _place_in_mesh(spec["mesh"].fields, sharded[0])
    rows = -(-shape[0] // ranks)  # as `torch.chunk`
    first, last = (min(each * rows, shape[0]) for each in (number, number + 1))
    return Box.rows(first, last, shape)


def _place_in_mesh(mesh: Mapping[str, Any], dim: int) -> tuple[int, int]:
    """Return the size of a mesh dimension, and the file's position in it. The form depends on torch's version."""
    if "mesh" in mesh:
        sizes = mesh["mesh"].shape
    else:
        layout = mesh["_layout"].fields
        sizes = [each.fields["shape"] for each in layout["axes"]] if "axes" in layout else layout["shape"]
    size = sizes[dim]
    return size if isinstance(size, int) else math.prod(size), mesh["_coordinate_on_dim"][dim]
