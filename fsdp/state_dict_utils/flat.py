"""Nested trees as one flat dict with dotted keys, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsdp.state_dict_utils.tree import Path, check_types, children, rebuilt, spelled


class FlatMapping(dict[str, Path]):
    """For each key of a flattened tree the path that it stands for, and what containers are on the way.

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
    """The leaves of a nested tree by dotted keys, ``"state.0.exp_avg"``, in order; no communication.

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
    """Leaves and empty containers below the root; notes all containers on the way."""
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
    """The nested tree that `flatten_state_dict` took apart, with the values of `flat`; no communication.

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
