"""A warning about writes to the tensors of a full state dict. These are copies: the model does not change.

State dicts of unsharded models, and of models under `fully_shard`, share the model's memory, so averages of weights and
partial loads write to it. In a copy, such a write is lost unless the state dict is saved or loaded elsewhere, which
the library cannot detect. The user is warned when a modified tensor is freed and no sharded model has loaded it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class _Copies:
    """The tensors of a state dict."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.is_silent = False  # a sharded model has loaded one of the tensors, or the user was warned


_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def watch_copies(state: Mapping[str, Any], keys: Collection[str], title: str) -> None:
    """Warn once when a tensor under any of these keys was modified in place and is freed."""
    copies = _Copies(title)
    for key, value in state.items():
        if key in keys and isinstance(value, Tensor) and not (value.is_meta or value.is_inference()):
            _copies[value] = copies
            alias = value.detach()  # has the same memory and version, and is dropped together with the tensor
            weakref.finalize(value, _warn_if_written, copies, key, alias, alias._version).atexit = False


def note_loaded(state: Mapping[str, Any]) -> None:
    """Suppress the warning for state dicts that share a tensor with `state`, because a model loads its values."""
    for value in state.values():
        copies = _copies.get(value) if isinstance(value, Tensor) else None
        if copies is not None:
            copies.is_silent = True


def _warn_if_written(copies: _Copies, key: str, alias: Tensor, version: int) -> None:
    if alias._version != version and not copies.is_silent:
        copies.is_silent = True
        warnings.warn(
            f"{key} of the state dict of {copies.title} was written in place and deleted: this did not change the "
            "model, because state_dict() of a sharded model returns copies. To change the model, pass the state dict "
            "to its load_state_dict(), or write to parameters inside summon_full_params(). Ignore this warning if the "
            "state dict was saved or loaded elsewhere.",
            stacklevel=3,
        )
