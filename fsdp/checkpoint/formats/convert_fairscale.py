"""Writing a checkpoint as FairScale's shards, like others of the same model: those say how it is wrapped and cut.

What a shard has of which parameter is in the metadata of the old one, which the new one gets as well. Its elements are
read and written a piece at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.formats.consolidate import Backing, Shard, backings_of
from fsdp.checkpoint.formats.convert import Advance, Content
from fsdp.checkpoint.formats.convert_place import new_place
from fsdp.checkpoint.formats.convert_torch import Pieces, save_in_pieces
from fsdp.checkpoint.formats.fairscale import RankFile, read_rank_file
from fsdp.checkpoint.formats.fairscale_optim import SavedOptimizer, keys_by_number
from fsdp.checkpoint.formats.rank_files import Paths, rank_files, title_of
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.formats.stitched import memory_of
from fsdp.checkpoint.formats.values import materialised
from fsdp.checkpoint.json_values import decoded, encoded
from fsdp.checkpoint.optim import ELEMENTS, NUMBER
from fsdp.checkpoint.safetensors import DTYPES
from fsdp.checkpoint.untrusted import reading
from fsdp.engine.names import clean_name

_PIECE_BYTES = 4 << 20
_EXTRA = "_extra_state"


def write_fairscale(path: str, content: Content, like: Paths, *, overwrite: bool, advance: Advance) -> None:
    """A folder with a file for each rank, under the names and keys of others.

    Args:
        path: the folder.
        content: what is to be written; dtypes are those of the old shards.
        like: files of all ranks with weights and metadata of the same model, wrapped alike; their values do not matter.
        overwrite: replace what is there.
        advance: is told how many bytes of tensors were written.

    Raises:
        FileNotFoundError: for missing files.
        ValueError: if they are of another model, or cut in another way than FairScale's; if the source is damaged.
        OSError: if it cannot be written.
    """
    with reading(title_of(like)):
        files = [read_rank_file(each) for each in rank_files(like)]
        shards = [Shard(each.file.path, each.weights, each.metadata) for each in files]
        template = _Template(files, shards, list(backings_of(shards, True)), content)
    template.check()
    names = [os.path.basename(each.file.path) for each in files]
    own = re.compile("|".join(map(re.escape, names)))
    with new_place(path, is_folder=True, overwrite=overwrite, own=own) as folder:
        for rank, name in enumerate(names):
            rooms: dict[int, Pieces] = {}
            save_in_pieces(os.path.join(folder, name), template.tree(rank, rooms), rooms, advance)


@dataclass(frozen=True)
class _Range:
    """Elements of a vector in which tensors lie one after the other."""

    reader: TensorReader
    names: Sequence[str]
    start: int
    count: int

    def pieces(self, numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """They, and zeros until there are `numel`. The memory is used again for the next piece."""
        step = _PIECE_BYTES // dtype.itemsize
        buffer = torch.empty(min(step, numel), dtype=dtype)
        begin = 0
        for name in self.names:
            size = self.reader.tensors[name].shape.numel()
            first, last = max(self.start - begin, 0), min(self.start + self.count - begin, size)
            for at in range(first, last, step):
                piece = buffer[: last - at]
                self.reader.read(name, piece, at)
                yield piece
            begin += size
        for at in range(self.count, numel, step):
            yield buffer[: numel - at].zero_()


@dataclass(frozen=True)
class _Template:
    """Old shards, and what is to be in new ones.

    Attributes:
        files, shards: of all ranks.
        backings: what is sharded.
        content: the new values.
        starts: for each backing, of each rank the first element that it has.
    """

    files: Sequence[RankFile]
    shards: Sequence[Shard]
    backings: Sequence[Backing]
    content: Content
    starts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def _source(self) -> Source:
        return self.content.source

    def check(self) -> None:
        """Raise ValueError unless the source is of the same model, and shards are cut as FairScale cuts."""
        first, tensors = self.shards[0], self._source.model.tensors
        for name, shape in first.parameters():
            if self._name(name) not in tensors:
                raise ValueError(f"{first.title} has {name}, and {self._source.path} has not: it is of another model")
            found = tensors[self._name(name)].shape
            if found != shape:
                raise ValueError(f"{name} has shape {list(shape)} in {first.title}, and in the source {list(found)}")
        known = {self._name(name) for name, _ in first.parameters()} | set(map(self._name, first.buffer_names))
        left = [name for name in tensors if name not in known]
        if left:
            raise ValueError(f"{self._source.path} has {', '.join(left[:5])}, and {first.title} has not")
        for backing in self.backings:
            sizes = [shard.get(backing.key).shape.numel() for shard in self.shards]
            total = sum(piece.numel for piece in backing.pieces)
            is_alone = len(backing.pieces) < len(self.shards)
            if any(size != (total if is_alone else -(-total // len(self.shards))) for size in sizes):
                raise ValueError(
                    f"{first.title}: {backing.key} is not cut into equal parts over all ranks, as FairScale does. "
                    "(Pieces of use_orig_params and replicas cannot be written.)"
                )
            self.starts[backing.key] = [0 if is_alone else min(rank * sizes[0], total) for rank in range(len(sizes))]

    def _name(self, name: str) -> str:
        return self._source.aliases.get(name, name)

    def tree(self, rank: int, rooms: dict[int, Pieces]) -> dict[str, Any]:
        """What is to be in a rank's file; `rooms` gets what gives its tensors their elements."""
        file = self.files[rank]
        weights = {}
        known: dict[Any, Tensor] = {}  # what lies in the same memory is one, as it was
        backings = {backing.key: backing for backing in self.backings}
        for key, value in file.weights.items():
            name = clean_name(key)
            if name.rpartition(".")[2] == _EXTRA:
                own = encoded(materialised(value), f"{file.file}: {name}")
                weights[key] = decoded(self._source.extra.get(name, own))
            elif memory_of(value) in known:
                weights[key] = known[memory_of(value)]
            else:
                names = [name] if name not in backings else backings[name].names
                weights[key] = known[memory_of(value)] = self._room(
                    rank, names, backings.get(name), value.shape, value.dtype, self._source.model, rooms
                )
        (weights_key,) = (key for key in file.keys if file.file.content[key] is file.weights)
        (metadata_key,) = (key for key in file.keys if file.file.content[key] is file.metadata)
        values = decoded(self._source.values)
        others = dict(values) if isinstance(values, dict) else {} if values is None else {"values": values}
        optimizers = {}
        if self.content.optimizer is not None:
            optimizers = dict([self._optimizer(rank, others, rooms)])
        return {**others, weights_key: weights, metadata_key: dict(file.metadata), **optimizers}

    def _room(
        self,
        rank: int,
        names: Sequence[str],
        backing: Backing | None,
        shape: torch.Size,
        dtype: torch.dtype,
        reader: TensorReader,
        rooms: dict[int, Pieces],
        suffix: str = "",
    ) -> Tensor:
        """Memory for what a rank has of a backing, or for all of a tensor, which is never touched."""
        stored = [f"{self._name(name)}{suffix}" for name in names]
        start, total = 0, shape.numel()
        if backing is not None:
            start, total = self.starts[backing.key][rank], sum(piece.numel for piece in backing.pieces)
        room = torch.empty(shape, dtype=dtype)
        count = min(total - start, shape.numel())
        rooms[id(room)] = partial(_Range(reader, stored, start, count).pieces, shape.numel(), dtype)
        return room

    def _optimizer(self, rank: int, others: dict[str, Any], rooms: dict[int, Pieces]) -> tuple[str, dict[str, Any]]:
        """The key and the dictionary of a rank's optimizer."""
        saved = self._saved_optimizer(rank)
        reader, rest = self._source.optimizer, self._source.optimizer_rest
        backings = {backing.key: backing for backing in self.backings}
        state: dict[Any, dict[str, Any]] = {}
        options: dict[str, Any] = {name: group["options"] for group in rest["groups"] for name in group["params"]}
        keys = keys_by_number([saved], self.shards[rank], backings, None)
        for number, key in keys.items():
            backing = backings[key]
            kinds = [rest["state"].get(self._name(name)) for name in backing.names]
            if any(kind != kinds[0] for kind in kinds) or kinds[0] is None or reader is None:
                raise ValueError(
                    f"{self._source.path}: the parameters in {key} ({', '.join(backing.names[:3])}, ...) have "
                    "different states, and one flat parameter has one: write it without (--only model)"
                )
            shape = self.shards[rank].get(key).shape
            entry = state.setdefault(number, {})
            for name, kind in kinds[0].items():
                if kind[0] == ELEMENTS:
                    dtype, suffix = DTYPES[kind[1]], f"/{name}"
                    entry[name] = self._room(rank, backing.names, backing, shape, dtype, reader, rooms, suffix)
                elif kind[0] == NUMBER:
                    entry[name] = torch.tensor(decoded(kind[2]), dtype=DTYPES[kind[1]])
                else:
                    entry[name] = decoded(kind[1])
        groups = []
        for group in saved.content["param_groups"]:
            named = [self._name(name) for number in group["params"] for name in backings[keys[number]].names]
            found = [options.get(name) for name in named]
            if any(each is None or each != found[0] for each in found):
                raise ValueError(
                    f"{saved} has {', '.join(named[:3])}, ... in one parameter group, and {self._source.path} has not: "
                    "write it without (--only model)"
                )
            settings = decoded(found[0]) if found else {key: group[key] for key in group if key != "params"}
            groups.append({**settings, "params": list(group["params"])})
        more = others.pop(saved.key, {})
        return saved.key, {"state": state, "param_groups": groups, **(more if isinstance(more, dict) else {})}

    def _saved_optimizer(self, rank: int) -> SavedOptimizer:
        """The old one, for the order of its parameters."""
        found = list(self.files[rank].optimizers.values())
        if len(found) != 1:
            raise ValueError(
                f"{self.files[rank].file} has {'no state' if not found else 'states'} of an optimizer"
                f"{'' if not found else 's'}, and the order of an optimizer's parameters is read from it: write "
                "without (--only model), or give files with the state of one"
            )
        return found[0]
