"""State trees: their leaves, the walk over mappings, lists and tuples, and the conditions for two trees to match.

A leaf counts as a tensor if it has a plain strided layout, so that its elements can be sharded, sent and written: a
dense tensor of a dtype that torch can copy, a plain subclass of it, or a `DTensor` with such a local tensor. All other
tensors (sparse, quantized, nested tensors, wrappers of other tensors) are treated like objects of unknown types.

A *path* is the tuple of keys and indices of a node in the tree. Every object that is not a container is a leaf. All
containers have the same interface, keys with children, so functions on trees do not distinguish them.
"""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.communicator import some_of
from fsdp.distributed.dtensor import MeshPart, arrived, is_dtensor, local_part, set_local_part
from fsdp.state_dict_utils.gather import odd_parts
from fsdp.state_dict_utils.host_memory import allocate

PLAIN_LEAVES = (int, float, complex, str, bytes, io.BytesIO, type(None))
Path = tuple[Any, ...]


def is_tensor(leaf: Any) -> bool:
    """Return True if a leaf is a tensor whose elements can be sharded, sent and written."""
    return isinstance(leaf, Tensor) and _special(leaf) is None


def why_unknown(leaf: Any) -> str | None:
    """Return the reason why a leaf is of an unknown type; None for a tensor or a plain value."""
    if sharded := _why_sharded(leaf):
        return sharded
    if isinstance(leaf, Tensor):
        if (special := _special(leaf)) is None:
            return None
        return (
            f"a tensor {special[0]}, but only strided (dense) tensors are supported. {special[1]}, remove it from the "
            "tree, or pass type_check=False."
        )
    if isinstance(leaf, PLAIN_LEAVES):
        return None
    return (
        f"a {type(leaf).__name__} is neither a container (a mapping, list or tuple) nor a tensor, number, str, bytes, "
        "io.BytesIO or None. Remove it from the tree, or pass type_check=False."
    )


def _why_sharded(leaf: Any) -> str | None:
    """Return the reason why a `ShardedTensor`, whose `device` raises an error in torch, is not supported; or None."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if module is None or not isinstance(leaf, module.ShardedTensor):
        return None
    return (
        "a ShardedTensor, which torch has replaced by DTensor. Pass device_mesh to torch's FullyShardedDataParallel to "
        "get DTensors."
    )


def _special(tensor: Tensor) -> tuple[str, str] | None:
    """Return the reason why a tensor has no plain strided layout, and the remedy; None if it has."""
    local = arrived(local_part(tensor))
    if local.is_nested:
        return "that is nested", "Split it with unbind()"
    if local.layout is not torch.strided:
        return f"of layout {local.layout}", "Convert it with to_dense()"
    if local.is_quantized:
        return f"of quantised {local.dtype}", "Convert it with dequantize(), or use int_repr() and its scales"
    if is_wrapper(local):
        return (
            f"of the class {type(local).__name__}, which wraps other tensors"
        ), "Add the tensors that it wraps to the tree instead"
    if not casts(local.dtype, local.dtype):
        return f"of {local.dtype}, which torch cannot copy", "View it as torch.uint8"
    return None


@cache
def casts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if values of a dtype can be stored in another dtype without losing their kind."""
    if not torch.can_cast(source, target):
        return False
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except RuntimeError:  # torch has no kernel for this
        return False
    return True


def described(value: Any) -> str:
    """Describe a node for messages. Leaves of unknown types match if their descriptions are equal."""
    if not isinstance(value, Tensor):
        return "None" if value is None else type(value).__name__
    kind = "DTensor" if is_dtensor(value) else "tensor"
    if (special := _special(value)) is not None:
        kind += f" {special[0]}"
        if value.is_nested:
            return f"{kind}, of {str(value.dtype).removeprefix('torch.')}"
    return f"{kind} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def is_wrapper(tensor: Tensor) -> bool:
    """Return True if a tensor's storage is inaccessible, on another device, or has a size without memory."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    try:
        storage = tensor.untyped_storage()
        if storage.device != tensor.device:
            return True
        return storage.data_ptr() == 0 and storage.nbytes() > 0 and not tensor.is_meta
    except (NotImplementedError, RuntimeError):
        return True


def missing_memory(tensor: Tensor) -> str | None:
    """Return the error if a dense tensor's memory was freed or is too small, or None."""
    extent = tensor.numel()
    if extent and not tensor.is_contiguous():
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + extent) * tensor.itemsize if extent else 0
    there = tensor.untyped_storage().nbytes()
    if needed <= there:
        return None
    return (
        f"{by_class(tensor)} needs {needed} bytes of its storage, which has {there}: its memory was freed "
        "(a sharded parameter, say)"
    )


def by_class(tensor: Tensor) -> str:
    shape = "several shapes" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
    return f"a {type(tensor).__module__}.{type(tensor).__qualname__} of {shape} and dtype {tensor.dtype}"


def without_values(leaf: Any) -> str | None:
    """Return the reason why a tensor cannot be read; None for a readable tensor and for any other leaf."""
    if isinstance(leaf, Tensor) and leaf.is_meta:
        return "on the meta device, where there are no values"
    missing = missing_memory(arrived(local_part(leaf))) if is_tensor(leaf) else None
    return f"without its memory: {missing}" if missing else None


def not_writable(tensor: Tensor) -> str | None:
    """Return the reason why a tensor that is not on the meta device cannot be written, or None."""
    local = local_part(tensor)
    if local.numel() and any(step == 0 and size > 1 for size, step in zip(local.shape, local.stride(), strict=True)):
        return "multiple elements of the target share memory (it was expanded): clone() it"
    return missing_memory(local)


def cannot(leaf: Any, what: str, error: Exception) -> str:
    """Return a message for a leaf of an unknown type that cannot be copied or sent."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)  # torch appends a list of all kernels
    return f"a {described(leaf)} cannot {what}: {reason}. Remove it from the tree."


def has_part(tensor: Tensor) -> bool:
    """Return True if this rank holds a part of a tensor; False for a `DTensor` on a mesh of other ranks."""
    part = MeshPart.of(tensor)
    return part is None or part.mesh.get_coordinate() is not None


def placed(value: Tensor, target: Tensor | None, home: torch.device) -> Tensor:
    """Store an unsharded value in `target`, or in a new tensor on `home` if `target` is None or a meta tensor."""
    if target is None:
        return value.to(home, copy=True)
    if not has_part(target):
        return target
    mesh_part = MeshPart.of(target)
    part = value if mesh_part is None else mesh_part.held_of(value)
    if not target.is_meta:
        local_part(target).detach().copy_(part)
        return target
    new = torch.empty_like(target.detach(), device=home, memory_format=torch.contiguous_format)
    local_part(new).copy_(part)
    return new


def differ_as_values(full: Any, local: Any) -> str | None:
    """Return why an unsharded value cannot be stored in a leaf; None if it can."""
    difference = _differ_in_kind(full, local, casting=True)
    if difference is not None or not is_tensor(local):
        return difference
    part = MeshPart.of(local)
    if part is not None and not has_part(local):
        return None
    if part is not None and any(placement.is_partial() for placement in part.placements):
        return f"placements {list(part.placements)}: a whole value cannot be divided into Partial parts"
    return odd_parts(local) or (None if local.is_meta else not_writable(local))


def differ_as_parts(source: Any, into: Any) -> str | None:
    """Return the reason why ranks cannot copy their parts of a leaf into another leaf, or None."""
    difference = _differ_in_kind(source, into, casting=True) or _differ_in_spread(source, into)
    if difference is not None or not is_tensor(source):
        return difference
    for name, tensor in (("source", source), ("target", into)):
        if missing := without_values(tensor):
            return f"the {name} is {missing}"
    return not_writable(into)


def differ_in_form(first: Any, second: Any) -> str | None:
    """Return the difference of two leaves apart from their values, or None."""
    if not isinstance(first, Tensor) and not isinstance(second, Tensor):
        return None if type(first) is type(second) else f"{described(first)} and {described(second)}"
    return _differ_in_kind(first, second, casting=False) or _differ_in_spread(first, second)


def _differ_in_kind(first: Any, second: Any, casting: bool) -> str | None:
    """Return the difference in kind if one of the leaves is a tensor of any kind, or None."""
    if not is_tensor(first) or not is_tensor(second):
        special = isinstance(first, Tensor) or isinstance(second, Tensor)
        names = described(first), described(second)
        return f"{names[0]} and {names[1]}" if special and names[0] != names[1] else None
    if first.shape != second.shape:
        return f"{described(first)} and {described(second)}"
    fits = casts(first.dtype, second.dtype) if casting else first.dtype == second.dtype
    return None if fits else f"dtypes {first.dtype} and {second.dtype}" + ", which loses values" * casting


def _differ_in_spread(first: Any, second: Any) -> str | None:
    if not is_tensor(first):
        return None
    ours, theirs = MeshPart.of(first), MeshPart.of(second)
    if ours != theirs:
        return f"{'a plain tensor' if ours is None else ours} and {'a plain tensor' if theirs is None else theirs}"
    shapes = local_part(first).shape, local_part(second).shape
    return None if shapes[0] == shapes[1] else f"local parts {list(shapes[0])} and {list(shapes[1])}"


def host_twin(tensor: Tensor, pin_memory: bool, share_memory: bool) -> Tensor:
    """Return a tensor of the same shape, dtype and placements in new host memory; its values are undefined."""
    local = local_part(tensor)
    shape, dtype, nbytes = local.shape, local.dtype, math.prod(local.shape) * local.dtype.itemsize
    if not share_memory:  # without elements there is no memory, and nothing to pin
        new = torch.empty(shape, dtype=dtype, pin_memory=pin_memory and nbytes > 0, device="cpu")
    elif nbytes == 0:
        new = torch.empty(shape, dtype=dtype, device="cpu").share_memory_()
    else:
        strides = torch.empty(shape, device="meta").stride()
        new = torch.empty(0, dtype=dtype, device="cpu").set_(
            allocate(nbytes, pin_memory, share=True), 0, shape, strides
        )
    if not is_dtensor(tensor):
        return new
    twin = torch.empty_like(tensor.detach(), device="cpu")
    set_local_part(twin, new)
    return twin


def spelled(path: Path) -> str:
    return ".".join(map(str, path)) if path else "the whole tree"


class CompanionMismatch(ValueError):  # noqa: N818  # torch's name
    """Two trees do not match.

    Attributes:
        path: the keys and indices of the mismatch; empty for the whole tree.
        difference: a description of the mismatch.
    """

    def __init__(self, path: Path, difference: str) -> None:
        self.path = path
        self.difference = difference
        super().__init__(f"{spelled(path)}: {difference}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.difference)


def children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key or index; None for a leaf."""
    if isinstance(node, Mapping):
        return dict(node.items())
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    return None


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    inside = children(tree)
    if inside is None:
        yield path, tree
        return
    for key, child in inside.items():
        yield from leaves(child, (*path, key))


def mapped(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Return a new tree with the same containers, in which `function` of path and leaf replaces each leaf."""
    return written(tree, None, lambda path, leaf, _: function(path, leaf))


def rebuilt(like: Any, values: dict[Any, Any]) -> Any:
    """Return a new container of the type of `like` with these children, or a plain container if that fails."""
    kind: Any = type(like)
    is_mapping = isinstance(like, Mapping)
    plain: Any = values if is_mapping else list(values.values()) if isinstance(like, list) else tuple(values.values())
    if kind in (dict, list, tuple):
        return plain
    try:
        if isinstance(like, dict):
            # A copy preserves attributes: a default factory, the versions in `_metadata`.
            new = copy.copy(like)
            new.clear()
            new.update(values)
            return new
        return kind(values) if is_mapping else getattr(kind, "_make", kind)(list(values.values()))
    except TypeError:  # its constructor has different arguments
        return plain


def emptied(tree: Any) -> Any:
    """Return the outermost container without its contents, for ranks that receive no result; None for a leaf."""
    return None if children(tree) is None else rebuilt(tree, {})


def check_leaves(tree: Any, why: Callable[[Any], str | None], kind: type[Exception] = ValueError) -> None:
    """Raise an error for the first leaf for which `why` returns a reason."""
    for path, leaf in leaves(tree):
        if problem := why(leaf):
            raise kind(f"{spelled(path)}: {problem}")


def check_types(tree: Any, type_check: bool) -> None:
    """Raise TypeError for the first leaf that is neither a dense tensor nor of a plain type, if `type_check`.

    A `ShardedTensor` always raises an error, because a result that contains it would be incomplete.
    """
    check_leaves(tree, why_unknown if type_check else _why_sharded, TypeError)


def with_own_leaves(tree: Any) -> Any:
    """Return the tree with copies of all leaves other than dense tensors and immutable values."""

    def own(path: Path, leaf: Any) -> Any:
        try:
            if isinstance(leaf, io.BytesIO):
                return io.BytesIO(leaf.getvalue())
            if isinstance(leaf, PLAIN_LEAVES) or is_tensor(leaf):
                return leaf
            if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
                # torch's deepcopy does not support all of these
                return leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return copy.deepcopy(leaf)
        except Exception as error:
            raise TypeError(f"{spelled(path)}: {cannot(leaf, 'be copied', error)}") from error

    return mapped(own, tree)


@dataclass(frozen=True)
class Comparison:
    """The rules by which two trees must match."""

    names: tuple[str, str]  # of the two trees, for messages
    differ: Callable[[Any, Any], str | None]  # returns the difference of two leaves
    strict: bool = True  # reject keys in only one of the mappings
    fills: bool = False  # None or missing keys in the second tree are filled from the first

    def check(self, first: Any, second: Any, path: Path = ()) -> None:
        """Raise CompanionMismatch for the first path at which the trees do not match."""
        if self.fills and second is None:
            return
        ours, theirs = children(first), children(second)
        if ours is None and theirs is None:
            difference = self.differ(first, second)
            if difference is not None:
                raise CompanionMismatch(path, difference)
            return
        if ours is None or theirs is None or _kind(first) is not _kind(second):
            raise CompanionMismatch(path, self._unlike(described(first), described(second)))
        if isinstance(first, Mapping):
            self._check_keys(ours, theirs, path)
        elif len(ours) != len(theirs):
            raise CompanionMismatch(path, self._unlike(f"{len(ours)} items", f"{len(theirs)} items"))
        for key, child in ours.items():
            if key in theirs:
                self.check(child, theirs[key], (*path, key))

    def _check_keys(self, ours: dict[Any, Any], theirs: dict[Any, Any], path: Path) -> None:
        sides = zip(self.names, reversed(self.names), (ours, theirs), (theirs, ours), strict=True)
        for name, other, present, wanted in sides if self.strict else ():
            if lacking := [key for key in present if key not in wanted]:
                listing = some_of(map(repr, lacking))
                raise CompanionMismatch(path, f"{listing} {'is' if len(lacking) == 1 else 'are'} in {name} only, and "
                                        f"{other} has no such key")  # fmt: skip

    def _unlike(self, ours: str, theirs: str) -> str:
        return f"{ours} in {self.names[0]}, {theirs} in {self.names[1]}"


def _kind(node: Any) -> type:
    return Mapping if isinstance(node, Mapping) else list if isinstance(node, list) else tuple


def written(source: Any, target: Any, put: Callable[[Path, Any, Any], Any], path: Path = ()) -> Any:
    """Return `target` with the results of `put` for each leaf of `source` and its counterpart in `target` (or None).

    Mutable mappings and lists of `target` are changed in place and stay the same objects. Tuples with replaced items,
    and containers that `target` lacks, are created.
    """
    inside, theirs = children(source), children(target)
    if inside is None:
        return put(path, source, target)
    new = {key: written(child, (theirs or {}).get(key), put, (*path, key)) for key, child in inside.items()}
    if theirs is None:
        return rebuilt(source, new)
    changed = {key: value for key, value in new.items() if key not in theirs or theirs[key] is not value}
    if not isinstance(target, (MutableMapping, list)):
        return rebuilt(target, theirs | changed) if changed else target
    for key, value in changed.items():
        target[key] = value
    return target


class FlatMapping(dict[str, Path]):
    """The paths of the keys of a flattened tree, and the containers on these paths.

    A path is the tuple of keys and indices of a value. This class is a dict of paths, compares like a dict, and can be
    pickled.

    Attributes:
        containers: by path, an empty container of the type at this path.
    """

    containers: dict[Path, Any]

    def __init__(self, paths: Mapping[str, Path] | None = None) -> None:
        super().__init__(paths or {})
        self.containers = {}


def flatten_state_dict(tree: Any, *, type_check: bool = True) -> tuple[dict[str, Any], FlatMapping]:
    """Return the leaves of a nested tree by dotted keys, ``"state.0.exp_avg"``, in order, without communication.

    The flat dict contains the leaves themselves, not copies. An empty container has its own key with an empty
    container as value, so that it can be restored.

    Args:
        tree: a mapping, list or tuple; it is not changed.
        type_check: see `fsdp.state_dict_utils`.

    Returns:
        The flat dict, and the mapping that `unflatten_state_dict` needs: for each of its keys the path, a tuple of keys
        and indices.

    Raises:
        ValueError: if two paths have the same key (``{"a": {"b": 1}, "a.b": 2}``, or both ``1`` and ``"1"``).
        TypeError: if `tree` is not a container, and for a leaf of an unknown type.
    """
    if children(tree) is None:
        raise TypeError(f"a mapping, list or tuple can be flattened, got a {type(tree).__name__}")
    if type_check:
        check_leaves(tree, why_unknown, TypeError)
    flat: dict[str, Any] = {}
    mapping = FlatMapping()
    for path, leaf in _ends(tree, (), mapping.containers):
        key = spelled(path)
        if key in mapping:
            raise ValueError(
                f"two values would have the key {key!r}: the values at {mapping[key]} and at {path}. Rename one."
            )
        flat[key], mapping[key] = leaf, path
    return flat, mapping


def _ends(node: Any, path: Path, containers: dict[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield leaves and empty containers below the root, and record all containers on their paths."""
    inside = children(node)
    if inside is not None:
        containers[path] = _without_contents(node)
    if inside or not path:
        for key, child in (inside or {}).items():
            yield from _ends(child, (*path, key), containers)
    else:
        yield path, node if inside is None else _without_contents(node)


def _without_contents(node: Any) -> Any:
    # A named tuple cannot be empty.
    return type(node)._make([None] * len(node)) if hasattr(node, "_fields") else rebuilt(node, {})


def unflatten_state_dict(flat: Mapping[str, Any], mapping: Mapping[str, Path]) -> Any:
    """Return the nested tree of a flat dict, using the paths of the keys, without communication.

    Args:
        flat: a value for each key of the mapping, or for some of them; not changed. Values may have been replaced.
        mapping: the mapping from `flatten_state_dict`, possibly with additional paths, or a plain dict of paths, as
            torch's functions return it. A container of unknown type becomes a list if its keys are integers, and a
            dict otherwise.

    Returns:
        The tree, with new containers, and keys in the order of the mapping. Items of lists and tuples without a
        value are None if they precede another item.

    Raises:
        ValueError: for a key without a path, and for a path that leads through the value of another key.
    """
    if only := [key for key in flat if key not in mapping]:
        raise ValueError(
            f"keys of the flat dict only: {some_of(map(repr, only))}. The mapping must have a path for each key."
        )
    values = [(key, path, flat[key]) for key, path in mapping.items() if key in flat]
    return _nested(values, (), mapping.containers if isinstance(mapping, FlatMapping) else {})


def _nested(values: Sequence[tuple[str, Path, Any]], at: Path, containers: Mapping[Path, Any]) -> Any:
    """Return the container at the path `at`, which contains the `values`, given with their keys and paths."""
    by_step: dict[Any, list[tuple[str, Path, Any]]] = {}
    for key, path, value in values:
        if len(path) == len(at):
            raise ValueError(f"{key!r} has the path {path}, where another key has its value. Give it another path.")
        by_step.setdefault(path[len(at)], []).append((key, path, value))
    inside = {}
    for step, below in by_step.items():
        (_, path, value), *others = below
        is_value = len(path) == len(at) + 1 and not others
        inside[step] = value if is_value else _nested(below, (*at, step), containers)
    # Integers in a path are indices of lists, unless the container has a different known type. The root is a dict.
    like = containers.get(at, [] if at and all(type(step) is int for step in inside) else {})
    if not isinstance(like, Mapping):
        size = max(len(like), *(step + 1 for step in inside), 0)
        inside = {index: inside.get(index) for index in range(size)}
    return rebuilt(like, inside)
