"""State trees: the walk over a nest of mappings, lists and tuples, and what two of them must have in common.

A *path* is the tuple of keys and indices that leads to a place in the tree. Everything that is no container is a leaf.
Containers are seen alike, as keys with children, so that what is done to trees is written once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from fsdp.state_dict_utils.tensors import described, is_tensor, own_copy, why_unknown

Path = tuple[Any, ...]

_SHOWN = 5  # keys in one message


def spelled(path: Path) -> str:
    """Spell a path for messages."""
    return ".".join(map(str, path)) if path else "the whole tree"


class CompanionMismatch(ValueError):  # noqa: N818  # a name that torch has
    """Two trees do not match that must.

    Attributes:
        path: the keys and indices that lead to the place; empty for the whole tree.
        difference: what differs there.
    """

    def __init__(self, path: Path, difference: str) -> None:
        self.path = path
        self.difference = difference
        super().__init__(f"{spelled(path)}: {difference}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.difference)


# One tree


def children(node: Any) -> dict[Any, Any] | None:
    """Return what is in a container, by key or index; None for a leaf."""
    if isinstance(node, Mapping):
        return dict(node.items())
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    return None


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path, in order."""
    inside = children(tree)
    if inside is None:
        yield path, tree
        return
    for key, child in inside.items():
        yield from leaves(child, (*path, key))


def mapped(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Return a new tree of the same containers, with `function` of path and leaf in the place of each leaf."""
    return written(tree, None, lambda path, leaf, _: function(path, leaf))


def rebuilt(like: Any, values: dict[Any, Any]) -> Any:
    """Return a new container of the type of `like` with these children; a plain one where its own cannot be built."""
    if isinstance(like, Mapping):
        return _rebuilt_mapping(like, values)
    plain: type = list if isinstance(like, list) else tuple
    if type(like) is plain:
        return plain(values.values())
    try:
        make = type(like)._make if hasattr(like, "_fields") else type(like)
        return make(list(values.values()))
    except TypeError:  # its constructor takes something else
        return plain(values.values())


def _rebuilt_mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(like) is dict:
        return values
    try:
        if isinstance(like, dict):
            # A copy keeps what it knows beside its items: a default factory, the versions in `_metadata`.
            new = copy.copy(like)
            new.clear()
            new.update(values)
            return new
        return type(like)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def emptied(tree: Any) -> Any:
    """Return the outermost container without its contents, for ranks that want no result; None for a leaf."""
    if isinstance(tree, Mapping):
        return rebuilt(tree, {})
    return [] if isinstance(tree, list) else () if isinstance(tree, tuple) else None


def check_leaves(tree: Any, why: Callable[[Any], str | None], kind: type[Exception] = ValueError) -> None:
    """Raise an error for the first leaf with which something is wrong, and say `why`."""
    for path, leaf in leaves(tree):
        if problem := why(leaf):
            raise kind(f"{spelled(path)}: {problem}")


def check_types(tree: Any, type_check: bool) -> None:
    """Raise TypeError for the first leaf that is neither a dense tensor nor of a plain type, unless told not to."""
    if type_check:
        check_leaves(tree, why_unknown, TypeError)


def with_own_leaves(tree: Any) -> Any:
    """Return the tree with a copy of each leaf that is no tensor."""

    def own(path: Path, leaf: Any) -> Any:
        try:
            return leaf if is_tensor(leaf) else own_copy(leaf)
        except TypeError as error:
            raise TypeError(f"{spelled(path)}: {error}") from error

    return mapped(own, tree)


# Two trees


@dataclass(frozen=True)
class Comparison:
    """The rules by which two trees must match."""

    names: tuple[str, str]  # what messages call them
    differ: Callable[[Any, Any], str | None]  # says what is wrong with two leaves
    strict: bool = True  # refuse keys of mappings that only one of them has
    fills: bool = False  # None in the second tree, or a key that it lacks, is a place for what the first one has there

    def check(self, first: Any, second: Any, path: Path = ()) -> None:
        """Raise CompanionMismatch at the first place where they do not match."""
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
                listing = ", ".join(repr(key) for key in lacking[:_SHOWN]) + ", ..." * (len(lacking) > _SHOWN)
                raise CompanionMismatch(path, f"{listing} {'is' if len(lacking) == 1 else 'are'} in {name} only, and "
                                        f"{other} has no such key")  # fmt: skip

    def _unlike(self, ours: str, theirs: str) -> str:
        return f"{ours} in {self.names[0]}, {theirs} in {self.names[1]}"


def _kind(node: Any) -> type:
    return Mapping if isinstance(node, Mapping) else list if isinstance(node, list) else tuple


def written(source: Any, target: Any, put: Callable[[Path, Any, Any], Any], path: Path = ()) -> Any:
    """Return `target` with what `put` makes of each leaf of `source` and the leaf in its place (or None).

    Mutable mappings and lists of `target` are changed in place and stay the same objects; a tuple in which something
    is replaced is made anew, as are containers that `target` lacks.
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
    """The paths that the keys of a flattened tree stand for, and the containers on the way.

    A path is a tuple of the keys and indices that lead to the value. It is a dict of paths, compares as one, and can be
    pickled.

    Attributes:
        containers: by path, an empty container of the type that is there.
    """

    containers: dict[Path, Any]

    def __init__(self, paths: Mapping[str, Path] | None = None) -> None:
        super().__init__(paths or {})
        self.containers = {}


def flatten_state_dict(tree: Any, *, type_check: bool = True) -> tuple[dict[str, Any], FlatMapping]:
    """Return the leaves of a nested tree by dotted keys, ``"state.0.exp_avg"``, in order; no communication.

    The flat dict holds the leaves themselves, not copies. A container that is empty has a key of its own, with an empty
    container as its value, so that it comes back.

    Args:
        tree: a mapping, list or tuple; it is not changed.
        type_check: see `fsdp.state_dict_utils`.

    Returns:
        The flat dict, and the mapping that `unflatten_state_dict` needs: for each of its keys the path, a tuple of keys
        and indices.

    Raises:
        ValueError: if two paths give the same key (``{"a": {"b": 1}, "a.b": 2}``, or ``1`` beside ``"1"``).
        TypeError: if `tree` is no container, and for a leaf of an unknown type.
    """
    if children(tree) is None:
        raise TypeError(f"a mapping, list or tuple can be flattened, got a {type(tree).__name__}")
    check_types(tree, type_check)
    flat: dict[str, Any] = {}
    mapping = FlatMapping()
    for path, leaf in _ends(tree, (), mapping.containers):
        key = spelled(path)
        if key in mapping:
            raise ValueError(
                f"two values would have the key {key!r}: those at {mapping[key]} and at {path}. Rename one of them."
            )
        flat[key], mapping[key] = leaf, path
    return flat, mapping


def _ends(node: Any, path: Path, containers: dict[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield leaves and empty containers below the root, and note all containers on the way."""
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


def unflatten_state_dict(flat: Mapping[str, Any], mapping: FlatMapping) -> Any:
    """Return the nested tree that `flatten_state_dict` took apart, with the values of `flat`; no communication.

    Args:
        flat: a value for each key of the mapping; not changed. Values may have been replaced since.
        mapping: what `flatten_state_dict` returned. Where it is a plain dict of paths, all containers become dicts.

    Returns:
        The tree, of new containers in which keys have their old order.

    Raises:
        ValueError: for keys that only one of the two has.
    """
    for name, keys, others in (("flat dict", flat, mapping), ("mapping", mapping, flat)):
        if only := [key for key in keys if key not in others]:
            raise ValueError(f"keys of the {name} only: {only[:5]}. Both must come from one flatten_state_dict.")
    containers = mapping.containers if isinstance(mapping, FlatMapping) else {}
    nested: dict[Any, Any] = {}
    for key, path in mapping.items():
        node = nested
        for step in path[:-1]:
            node = node.setdefault(step, _Inner())
        node[path[-1]] = flat[key]
    return _assembled(nested, (), containers)


class _Inner(dict[Any, Any]):
    """A container that is being put together: values that are dicts themselves must not be taken for one."""


def _assembled(node: Any, path: Path, containers: Mapping[Path, Any]) -> Any:
    values = {
        key: _assembled(child, (*path, key), containers) if isinstance(child, _Inner) else child
        for key, child in node.items()
    }
    return rebuilt(containers.get(path, {}), values)
