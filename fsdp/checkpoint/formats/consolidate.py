"""Unsharded weights from all ranks' shards, offline: without process group or wrapped model, parameter by parameter.

The metadata of a rank's shards describe their contents (`local_metadata_dict`). The ranks' parts of a parameter,
without padding, are its elements in rank order, so this module does not depend on the layout of shards. The format is
FairScale's, and FairScale's shards are also supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from fsdp.checkpoint.formats.source import Piece, Stitched, is_tensor, memory_of
from fsdp.distributed.communicator import some_of
from fsdp.engine.names import clean_name, join
from fsdp.layers.state_dict.local import shard_mark

_ENTRY = ("fsdp_path", "params", "no_broadcast_optim_state", "shared_param_info")
_BACKING = ("names", "shapes", "numels", "padding")


def consolidate(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool,
    strict: bool,
) -> dict[str, Any]:
    """Return unsharded weights by plain names; see `FullyShardedDataParallel.consolidate_shard_weights`.

    Tensors are new, on the device of rank 0's tensors, and created one parameter at a time: only the arguments and the
    result are held in memory. For a unit with fewer ranks than the outermost unit, the values are from rank 0's group.
    """
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ValueError(
            f"consolidation needs the weights and the metadata of each rank: got {len(shard_weights)} of weights and "
            f"{len(shard_metadata)} of metadata"
        )
    given = enumerate(zip(shard_weights, shard_metadata, strict=True))
    shards = [Shard(f"rank {rank}", *each) for rank, each in given]
    found = put_together(shards, with_module_buffers, strict)
    # A tensor with multiple names is created once.
    made = {
        id(each): each.whole() if isinstance(each, Stitched) else each.detach().clone().contiguous()
        for each in found.values()
        if is_tensor(each)
    }
    return {name: made.get(id(each), each) for name, each in found.items()}


def put_together(shards: Sequence[Shard], with_module_buffers: bool, strict: bool) -> dict[str, Any]:
    """Return `Stitched` tensors by plain name, including all names of tied tensors, and rank 0's other data."""
    first = shards[0]
    for other in shards[1:]:
        other.check_alike(first)
    full: dict[str, Any] = {}
    for backing in backings_of(shards, strict):
        full |= backing.cut(backing.pieces)
    for entry in first.entries:
        for source, copy in entry["shared_param_info"]:
            if join(entry["fsdp_path"], source) in full:
                full[join(entry["fsdp_path"], copy)] = full[join(entry["fsdp_path"], source)]
    for name in first.buffer_names if with_module_buffers else ():
        if first.has(name) or strict:
            full[name] = first.get(name)
    _add_unlisted(full, first, with_module_buffers, strict)
    return full


def backings_of(shards: Sequence[Shard], strict: bool) -> Iterator[Backing]:
    """Yield the sharded parameters in the order of the metadata. Unless `strict`, only those in the first shard."""
    for number, entry in enumerate(shards[0].entries):
        holders = shards[:1] if entry["no_broadcast_optim_state"] else shards
        for name in entry["params"]:
            if strict or shards[0].has(join(entry["fsdp_path"], name)):
                yield Backing(number, name, holders)


class Shard:
    """The saved weights and metadata of a rank."""

    def __init__(self, title: str, weights: Any, metadata: Any) -> None:
        for what, given in (("weights", weights), ("metadata", metadata)):
            if not isinstance(given, Mapping):
                raise ValueError(f"the {what} of {title} are a {type(given).__name__}, not a dict")
        self.title, self.weights = title, weights
        self.keys = {clean_name(key): key for key in weights}
        try:
            self.entries: list[dict[str, Any]] = [_checked(entry) for entry in metadata["param_metadata"]]
            self.buffer_names: list[str] = list(metadata["buffer_names"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the metadata of {title} are not what local_metadata_dict() gives: {type(error).__name__}: {error}"
            ) from None

    def has(self, key: str) -> bool:
        return key in self.keys

    def get(self, key: str) -> Any:
        if key not in self.keys:
            raise ValueError(
                f"{self.title}: {key!r} is missing in its weights, although its metadata contain it. The "
                "file belongs to another model or is truncated. strict=False skips names that rank 0 does not have, "
                "such as buffers with persistent=False, which FairScale lists but does not save."
            )
        return self.weights[self.keys[key]]

    def backings(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield the key of each flat parameter, the path of its unit, and its parameters' names."""
        for entry in self.entries:
            for backing, described in entry["params"].items():
                yield join(entry["fsdp_path"], backing), entry["fsdp_path"], list(described["names"])

    def parameters(self) -> Iterator[tuple[str, torch.Size]]:
        for entry in self.entries:
            for described in entry["params"].values():
                for name, shape in zip(described["names"], described["shapes"], strict=True):
                    yield join(entry["fsdp_path"], name), torch.Size(shape)

    def check_alike(self, first: Shard) -> None:
        """Raise ValueError unless the metadata equal the metadata of rank 0, except for padding."""
        for (where, own), (_, others) in zip(self._description(), first._description(), strict=False):
            if own != others:
                raise ValueError(
                    f"{self.title} and {first.title} have shards of different models: {where} is {own!r} on "
                    f"{self.title} and {others!r} on {first.title}"
                )

    def _description(self) -> Iterator[tuple[str, Any]]:
        yield "the list of units", [entry["fsdp_path"] for entry in self.entries]
        for entry in self.entries:
            unit = f"unit {entry['fsdp_path'] or '(root)'}"
            yield f"the list of parameters in {unit}", list(entry["params"])
            for backing, described in entry["params"].items():
                for what in _BACKING[:-1]:
                    yield f"{what!r} of {backing} in {unit}", list(described[what])


class Backing:
    """A flat parameter, or a separately sharded parameter, with the ranks' parts of it without padding."""

    def __init__(self, number: int, name: str, shards: Sequence[Shard]) -> None:
        entry = shards[0].entries[number]
        self._path, self.key = entry["fsdp_path"], join(entry["fsdp_path"], name)
        self._described = entry["params"][name]
        self.names = [join(self._path, each) for each in self._described["names"]]
        self.pieces = [self._piece(shard, shard.entries[number]["params"][name]["padding"]) for shard in shards]
        self._check_order(shards)
        self._check_size(shards)

    def _piece(self, shard: Shard, padding: int) -> Piece:
        value = shard.get(self.key)
        if not is_tensor(value):
            raise ValueError(f"{shard.title}: {self.key!r} is a {type(value).__name__}, not a tensor")
        numel = value.shape.numel()
        if not 0 <= padding <= numel:
            raise ValueError(
                f"{shard.title}: {self.key!r} has {numel} elements, but its metadata say that {padding} are padding. "
                "The file is truncated, or weights and metadata are of different ranks or models."
            )
        return Piece.of(value, numel - padding)

    def _check_order(self, shards: Sequence[Shard]) -> None:
        """Check that only the last shard is padded, and that shards are in order where state dicts number them."""
        kinds = {piece.tensor.dtype for piece in self.pieces}
        if len(kinds) > 1:
            dtypes = ", ".join(str(piece.tensor.dtype) for piece in self.pieces)
            raise ValueError(f"{self.key!r} has different dtypes on the ranks: {dtypes}")
        held = [(shard, piece) for shard, piece in zip(shards, self.pieces, strict=True) if piece.numel]
        for (shard, piece), (after, _) in pairwise(held):
            padding = shard.get(self.key).shape.numel() - piece.numel
            if padding:
                raise ValueError(
                    f"{shard.title}: {self.key!r} ends with {padding} elements of padding, but {after.title} continues "
                    "it. Pass the ranks in order, each with its own metadata."
                )
        marks = [
            (shard.title, mark) for shard, _ in held if (mark := shard_mark(shard.weights, self._path)) is not None
        ]
        for (title, mark), (next_title, following) in pairwise(marks):
            if following != (mark[0] + 1, mark[1]):
                raise ValueError(
                    f"{self.key!r}: {next_title} is shard {following[0]} of {following[1]}, after shard {mark[0]} of "
                    f"{mark[1]} of {title}. Pass all shards of the same save, in order."
                )

    def _check_size(self, shards: Sequence[Shard]) -> None:
        found, wanted = sum(piece.numel for piece in self.pieces), sum(self._described["numels"])
        if found == wanted:
            return
        sizes = ", ".join(f"{piece.numel} on {shard.title}" for shard, piece in zip(shards, self.pieces, strict=True))
        names = self._described["names"]
        raise ValueError(
            f"{self.key!r} has {found} elements on the {len(shards)} ranks given ({sizes}, without padding), and its "
            f"metadata say {wanted} ({some_of(names, 3)}). "
            + (
                "A rank's shard is missing, or a file is truncated: pass the complete files of all ranks."
                if found < wanted
                else "Weights and metadata are of different models, or a unit was sharded over fewer ranks than its "
                "root: then pass only the ranks of its first group."
            )
        )

    def cut(self, pieces: Sequence[Piece]) -> dict[str, Stitched]:
        """Return the tensors in a vector that has the same layout as this flat parameter."""
        found, start = {}, 0
        for name, shape in zip(self.names, self._described["shapes"], strict=True):
            found[name] = Stitched(pieces, start, shape)
            start += found[name].shape.numel()
        return found


def _checked(entry: Any) -> dict[str, Any]:
    """Return a unit's entry in the metadata; raise KeyError or ValueError if it is none."""
    found = {what: entry[what] for what in _ENTRY}
    for backing, described in found["params"].items():
        names, shapes, numels, _ = (described[what] for what in _BACKING)
        if not len(names) == len(shapes) == len(numels):
            raise ValueError(f"{backing} has {len(names)} names, {len(shapes)} shapes and {len(numels)} numels")
        for name, shape, numel in zip(names, shapes, numels, strict=True):
            if torch.Size(shape).numel() != numel:
                raise ValueError(f"{name} of {backing} has shape {tuple(shape)} and {numel} elements")
    return found


def _add_unlisted(full: dict[str, Any], first: Shard, with_module_buffers: bool, strict: bool) -> None:
    """Add data that FairScale's metadata lack: additional names of ties, which share memory, and extra state."""
    gives = {key: [join(path, name) for name in names] for key, path, names in first.backings()}
    gives |= {name: [name] for name in first.buffer_names}
    at = {memory_of(first.get(key)): key for key in gives if first.has(key)}
    for key in (key for key in first.keys if key not in gives):
        value = first.get(key)
        source = at.get(memory_of(value))
        if source is not None:
            full |= {new: full[old] for old, new in _renamed(source, key, gives[source]).items() if old in full}
        elif key in full or any(_renamed(one, key, names).values() & full.keys() for one, names in gives.items()):
            continue  # an additional name in the metadata, of a tied shard that was copied
        elif key.rpartition(".")[2] == "_extra_state":
            full |= {key: value} if with_module_buffers else {}
        elif strict:
            raise ValueError(
                f"{first.title}: {key!r} is in its weights, but not in its metadata: these belong to another model, or "
                "another version of it. strict=False ignores it."
            )


def _renamed(source: str, key: str, names: Sequence[str]) -> dict[str, str]:
    """Return the names under `key` that correspond to `source`: a parameter, or a unit's flat parameter."""
    if list(names) == [source]:
        return {source: key}
    path, _, backing = source.rpartition(".")
    other, _, same = key.rpartition(".")
    return {name: join(other, name[len(path) + 1 if path else 0 :]) for name in names} if same == backing else {}
