"""Values are what checkpoints have besides tensors to read by ranges: small tensors, and whatever else was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdp.checkpoint.formats.source import is_lazy, whole
from fsdp.checkpoint.formats.torch_file import Foreign
from fsdp.checkpoint.json_values import MAX_TENSOR_BYTES, encoded

_NAMESPACE = "argparse.Namespace"


def materialised(value: Any, *, keep_state: bool = False) -> Any:
    """Return the same tree with small tensors read, and with dictionaries for ``argparse.Namespace``s.

    `keep_state` leaves what is under ``state`` alone.
    """
    if is_lazy(value) and value.shape.numel() * value.dtype.itemsize <= MAX_TENSOR_BYTES:
        return whole(value)
    if isinstance(value, Foreign) and value.origin == _NAMESPACE and isinstance(value.state, Mapping):
        return materialised(value.state)
    if isinstance(value, Mapping):
        kept = "state" if keep_state else None
        return {
            key: each if key == kept or str(key).startswith(f"{kept}.") else materialised(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        made = [materialised(each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def values_of(content: Mapping[Any, Any], leave: Iterable[Any], notes: list[str]) -> dict[Any, Any]:
    """Return what else a user has saved, as far as a checkpoint of ours can hold it; notes say what was left out."""
    left, found = set(leave), {}
    for key, value in content.items():
        if key not in left:
            try:
                read = materialised(value)
                encoded(read, str(key))
            except (TypeError, RecursionError) as error:
                has_tensors = isinstance(error, TypeError) and _has_tensors(value)
                what = f"{key}, with tensors that are not the model's" if has_tensors else str(error).partition(":")[0]
                notes.append(f"left out: {what}")
            else:
                found[key] = read
    return found


def shown(value: Any) -> str:
    """Return what messages call a value of its kind."""
    if isinstance(value, Foreign):
        return value.origin
    return "Tensor" if is_lazy(value) else type(value).__name__


def _has_tensors(tree: Any) -> bool:
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return is_lazy(tree) or any(map(_has_tensors, values))
