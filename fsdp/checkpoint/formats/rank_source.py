"""What readers of ranks' files make of all that they have found: one checkpoint to read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp.checkpoint.formats.lazy_tensors import LazyReader
from fsdp.checkpoint.formats.optim import FoundState
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.stitched import Stitched, reader_of
from fsdp.checkpoint.formats.values import materialised, shown
from fsdp.checkpoint.json_values import MAX_TENSOR_BYTES, encoded

_EXTRA = "_extra_state"


def source_of_ranks(
    word: str,
    title: str,
    found: Mapping[str, Any],
    state: FoundState | None,
    values: Mapping[Any, Any],
    notes: Sequence[str],
    world_size: int | None,
    *,
    is_in_order: bool = True,
) -> Source:
    """A checkpoint.

    Args:
        word: for its format.
        title: what messages call it.
        found: by plain name what there is of the model: `Stitched` tensors, some under several names, and others.
        state: of the optimizer, if there is one.
        values: what else the user has saved.
        notes, world_size, is_in_order: see `Source`.

    Raises:
        ValueError: for what is no tensor and no extra state in the model.
        TypeError: for extra state that no checkpoint holds.
    """
    tensors, aliases, extra = _sorted_out(found, title)
    others = {} if state is None or not state.others else {state.key: state.others}
    kept = {**values, **others}
    return Source(
        format=word,
        path=title,
        model=reader_of(title, tensors),
        optimizer=None if state is None else LazyReader(title, state.tensors),
        optimizer_rest=None if state is None else state.rest,
        extra=extra,
        values=encoded(kept, "values") if kept else None,
        world_size=world_size,
        notes=tuple(notes),
        aliases=aliases,
        is_in_order=is_in_order,
    )


def _sorted_out(found: Mapping[str, Any], title: str) -> tuple[list[Stitched], dict[str, str], dict[str, Any]]:
    """Tensors, second names of some, and modules' extra state, encoded."""
    tensors, aliases, extra = [], {}, {}
    for name, value in found.items():
        if name.rpartition(".")[2] == _EXTRA:
            is_small = isinstance(value, Stitched) and value.shape.numel() * value.dtype.itemsize <= MAX_TENSOR_BYTES
            extra[name] = encoded(value.whole() if is_small else materialised(value), f"{title}: {name}")
        elif not isinstance(value, Stitched):
            raise ValueError(f"{title}: {name} is a {shown(value)}, not a tensor")
        elif value.name == name:
            tensors.append(value)
        else:
            aliases[name] = value.name
    return tensors, aliases, extra
