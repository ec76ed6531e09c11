"""A warning about writes to the tensors of a full state dict, which are copies: the model does not see them.

Unsharded models, and those under `fully_shard`, list their own memory in a state dict, so averages of weights and
partial loads write to it. Of a copy such a write is lost, unless the state dict is saved or loaded elsewhere, which
nothing can tell. The user is warned when a tensor that was written is dropped and no sharded model has loaded it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class _Copies:
    """The tensors of one state dict."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.is_silent = False  # a sharded model has loaded a tensor of it, or the user was warned


_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def watch_copies(state: Mapping[str, Any], keys: Collection[str], title: str) -> None:
    """Warn once when a tensor under one of these keys was written in place and is dropped."""
    copies = _Copies(title)
    for key, value in state.items():
        if key in keys and isinstance(value, Tensor) and not (value.is_meta or value.is_inference()):
            _copies[value] = copies
            alias = value.detach()  # has the same memory and version, and is dropped together with the tensor
            weakref.finalize(value, _warn_if_written, copies, key, alias, alias._version).atexit = False


def note_loaded(state: Mapping[str, Any]) -> None:
    """Warn of no state dict that has a tensor in this one: its values reach a model."""
    for value in state.values():
        copies = _copies.get(value) if isinstance(value, Tensor) else None
        if copies is not None:
            copies.is_silent = True


def _warn_if_written(copies: _Copies, key: str, alias: Tensor, version: int) -> None:
    if alias._version != version and not copies.is_silent:
        copies.is_silent = True
        warnings.warn(
            f"{key} of the state dict of {copies.title} was written in place and dropped: the model keeps its values, "
            "because state_dict() of a sharded model returns copies. To change the model, pass the state dict to its "
            "load_state_dict(), or write to parameters inside summon_full_params(). Ignore this warning if the state "
            "dict was saved or loaded elsewhere.",
            stacklevel=3,
        )
