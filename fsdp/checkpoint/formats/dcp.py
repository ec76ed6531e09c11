"""Folders of `torch.distributed.checkpoint`: ranges are read without this package; folders are written by it.

``.metadata`` is a pickle. For each tensor it contains the shape and the boxes (chunks) that ranks have written. Each
chunk is a small archive of `torch.save` in a ``.distcp`` file. Classes in the pickle are not instantiated, so no code
of the folder is executed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.formats.convert import Advance, Content, new_place, tree_of
from fsdp.checkpoint.formats.source import ChunkedTensor, Source, StridedTensor, are_all_of
from fsdp.checkpoint.formats.torch_file import Foreign, TorchArchive, unpickled
from fsdp.checkpoint.formats.trees import MODEL_KEYS, OPTIMIZER_KEYS, Choices, source_of_tree
from fsdp.checkpoint.safetensors import Entry
from fsdp.checkpoint.untrusted import beside, content_of, reading, short
from fsdp.engine.boxes import Box

_METADATA = ".metadata"
_OF_RANK = re.compile(r"__(\d+)_")
_OWN = re.compile(r"\.metadata|__\d+_\d+\.distcp")


def is_dcp(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _METADATA))


def read_dcp(path: str, choices: Choices) -> Source:
    folder = DcpFolder(path)
    with reading(path):
        known = {"world_size": folder.world_size, "identity": folder.identity}
        return source_of_tree("dcp", path, folder.tree(), choices, **known)


@dataclass(frozen=True)
class _Saved:
    """A tensor or another value in a folder: an archive within a file."""

    name: str
    path: str
    begin: int
    nbytes: int

    def open(self) -> TorchArchive:
        return TorchArchive(self.path, self.begin, self.nbytes, f"{self.name} in {self.path}")


def _tensor_in(item: _Saved, dtype: torch.dtype, box: Box) -> StridedTensor:
    found = item.open().content
    if not isinstance(found, StridedTensor):
        raise ValueError(f"{item.name} in {item.path} is not a tensor, although {_METADATA} lists it as a tensor")
    if (tuple(found.shape), found.dtype) != (box.sizes, dtype):
        raise ValueError(
            f"{item.name} in {item.path} has shape {list(found.shape)} and {found.dtype}, but {_METADATA} lists "
            f"{list(box.sizes)} and {dtype}"
        )
    return found


class DcpFolder:
    """A folder of `torch.distributed.checkpoint`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._place = os.path.join(path, _METADATA)
        if not is_dcp(path):
            raise ValueError(
                f"{path} is incomplete: {_METADATA}, which is written last, is missing. Use another checkpoint."
            )
        with reading(self._place):
            content = content_of(self._place)
            self.identity = hashlib.sha256(content).hexdigest()  # the same for equal contents
            self._read(unpickled(content).state)

    def _read(self, metadata: Mapping[str, Any]) -> None:
        self._described: dict[str, Foreign] = dict(metadata["state_dict_metadata"])
        self._paths: Mapping[str, Any] = metadata.get("planner_data") or {}
        self._items: dict[tuple[str, tuple[int, ...] | None], _Saved] = {}
        places: dict[str, str] = {}
        for key, place in metadata["storage_data"].items():
            name, offsets, file = key.state["fqn"], key.state.get("offset"), place.state["relative_path"]
            if place.state.get("transform_descriptors"):
                raise ValueError(f"{name} is compressed ({short(place.state['transform_descriptors'])})")
            if file not in places:
                places[file] = beside(self._place, file)
            begin, nbytes = index(place.state["offset"]), index(place.state["length"])
            if min(begin, nbytes) < 0:
                raise ValueError(f"{name} is {short(nbytes)} bytes from byte {short(begin)} of {file} on")
            item = _Saved(name, places[file], begin, nbytes)
            self._items[name, None if offsets is None else tuple(offsets)] = item
        self._tensors = {
            name: self._tensor(name, described.state)
            for name, described in self._described.items()
            if described.origin.endswith(".TensorStorageMetadata")
        }

    def _tensor(self, name: str, described: Mapping[str, Any]) -> ChunkedTensor:
        dtype, shape = described["properties"].state[0], torch.Size(described["size"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is of {dtype!r}")
        chunks: dict[Box, Callable[[], StridedTensor]] = {}
        for chunk in described["chunks"]:
            box = Box(tuple(map(index, chunk.state["offsets"])), tuple(map(index, chunk.state["sizes"])))
            chunks[box] = cache(partial(_tensor_in, self._items[name, box.offsets], dtype, box))
        if not are_all_of(shape, chunks.keys()):
            raise ValueError(f"the chunks of {name} do not make a tensor of shape {list(shape)}")
        return ChunkedTensor(dtype, shape, chunks)

    @property
    def world_size(self) -> int | None:
        matches = (_OF_RANK.match(os.path.basename(item.path)) for item in self._items.values())
        return len({match[1] for match in matches if match is not None}) or None

    def tree(self) -> Any:
        """Return the contents; ValueError if files are missing or too short."""
        if (problem := next(self.misplaced(), None)) is not None:
            raise ValueError(f"{problem}. Load another checkpoint.")
        root: dict[Any, Any] = {}
        for name in self._described:
            path = self._path(name)
            below = root
            for key in path[:-1]:
                below = below.setdefault(key, {})
            if name not in self._tensors and (name, None) not in self._items:
                raise ValueError(f"{self._place} is damaged: it does not contain the location of {name}")
            found = self._tensors.get(name)
            below[path[-1]] = self._items[name, None].open().content if found is None else found
        return _with_lists(root)

    def _path(self, name: str) -> tuple[Any, ...]:
        """Return the path of a value in the tree. Without saved paths, usual keys are split off at the first dot."""
        if name in self._paths:
            return tuple(self._paths[name])
        known = (*MODEL_KEYS, *OPTIMIZER_KEYS)
        if not self._paths and all(each.partition(".")[0] in known for each in self._described):
            first, _, rest = name.partition(".")
            return (first, rest)
        return (name,)

    def misplaced(self) -> Iterator[str]:
        """Yield errors for files that are missing or too short, or contain overlapping parts."""
        ends: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for item in self._items.values():
            ends[item.path] = max(ends.get(item.path, 0), item.begin + item.nbytes)
            sizes[item.path] = sizes.get(item.path, 0) + item.nbytes
        for path, end in ends.items():
            if not os.path.exists(path):
                yield f"{path} is missing"
            elif os.path.getsize(path) < end:
                yield f"{path} has {os.path.getsize(path)} bytes, and its contents end at {end}"
            elif os.path.getsize(path) < sizes[path]:
                yield f"{path} has {os.path.getsize(path)} bytes, and overlapping parts"

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self._items.values())

    def archives(self) -> Iterator[Callable[[], TorchArchive]]:
        """Yield a function that opens each archive, for archives at their expected offsets."""
        for item in self._items.values():
            if os.path.exists(item.path) and os.path.getsize(item.path) >= item.begin + item.nbytes:
                yield item.open


def _with_lists(tree: Any) -> Any:
    """Return the tree with lists instead of dictionaries whose keys are all numbers."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(value) for key, value in tree.items()}
    if made and all(isinstance(key, int) for key in made):
        return [made[key] for key in sorted(made)]
    return made


def write_dcp(path: str, content: Content, *, is_flat: bool, advance: Advance) -> None:
    """Write a folder with ``model.<name>``, ``optimizer.state.<name>.<key>``, and the values, a tensor at a time."""
    import torch.distributed.checkpoint as dcp  # the import takes long
    from torch.distributed.checkpoint.api import CheckpointException

    entries: dict[int, Entry] = {}  # by the id of the object that represents a tensor in the state

    def make(entry: Entry) -> Tensor:
        stand_in = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        entries[id(stand_in)] = entry
        return stand_in

    class Planner(dcp.DefaultSavePlanner):
        """A planner that reads the values of a tensor when they are requested."""

        last: mmap.mmap | None = None

        def resolve_data(self, write_item: Any) -> Any:
            entry = entries.get(id(self.state_dict[write_item.index.fqn]))
            if entry is None:
                return super().resolve_data(write_item)
            if self.last is not None:
                # The tensor has been written. The writer keeps all tensors of a file until its end, so their pages are
                # released.
                self.last.madvise(mmap.MADV_DONTNEED)
                self.last = None
            if not entry.nbytes:
                return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            self.last = mmap.mmap(-1, entry.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for begin, memory in entry.chunks():
                self.last[begin : begin + len(memory)] = memory
                advance(len(memory))
            return torch.frombuffer(self.last, dtype=entry.dtype).view(entry.shape)

    state = tree_of(content, make, is_flat=is_flat)
    with new_place(path, own=_OWN) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Without copying in advance, tensors are requested sequentially.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        failures: list[BaseException] = []
        try:
            dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
        if failures:  # raised here, to keep its original context
            raise failures[0]
