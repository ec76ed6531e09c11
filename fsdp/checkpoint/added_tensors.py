"""Tensors that modules add to state dicts by overriding `_save_to_state_dict`, for example layers of bitsandbytes.

These tensors are neither parameters nor buffers: only this method returns them, and `_load_from_state_dict` loads them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.devices import byte_view
from fsdp.engine.originals import is_ours
from fsdp.layers.managed_params import is_packed

_REMEDY = "get_extra_state() and set_extra_state() of a module save such state."


def added_tensors(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Return the tensors that a module, without its submodules, adds to its state dict, by name.

    Warns of entries that checkpoints do not contain: other types, and entries computed from sharded parameters.

    Args:
        module: any module.
        path: the name of the module with a dot at the end, for messages.
    """
    if getattr(module._save_to_state_dict, "__func__", None) is nn.Module._save_to_state_dict:
        return {}
    name = f"{type(module).__name__}._save_to_state_dict of '{path.removesuffix('.')}'"
    entries: dict[str, Any] = {}
    alone = _without_shards(module)
    try:
        alone._save_to_state_dict(entries, "", True)
    except Exception as error:  # the method is the user's
        if alone is module:
            raise
        warnings.warn(
            f"{name} fails without sharded parameters, so the entries that it adds are not saved: {error}. {_REMEDY}",
            stacklevel=2,
        )
    buffers = {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
    listed = module._parameters | buffers
    own = {id(each) for each in listed.values()}  # also under a different name
    added = {
        key: value for key, value in entries.items() if not (key in listed or key == "_extra_state" or id(value) in own)
    }
    found = {key: value for key, value in added.items() if isinstance(value, Tensor)}
    if others := sorted(added.keys() - found.keys()):
        warnings.warn(
            f"{name} adds {', '.join(others)}, which are not tensors and are not saved. {_REMEDY}", stacklevel=2
        )
    return found


def _without_shards(module: nn.Module) -> nn.Module:
    """Return the module, or a shallow copy without the parameters whose entries a checkpoint already contains.

    These are sharded parameters, of which this rank has a part, and parameters that are saved as bytes together with
    the data of their class.
    """
    sharded = [
        name
        for name, one in module._parameters.items()
        if name in module.__dict__ or (one is not None and (is_ours(one) or is_packed(one, in_rows=True)))
    ]
    if not sharded:
        return module
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    found.__dict__["_parameters"] = {**module._parameters, **dict.fromkeys(sharded)}
    for name in sharded:
        found.__dict__.pop(name, None)
    return found


def take_back(module: nn.Module, path: str, entries: dict[str, Tensor], key: str) -> None:
    """Pass the entries to the module that has added them, after the entry `key` was loaded in place.

    Raises:
        RuntimeError: if the module has a different value of `key` afterwards.
    """
    module._load_from_state_dict(dict(entries), "", {}, False, [], [], [])
    now = added_tensors(module, path).get(key)
    if now is None or not _have_equal_bytes(now, entries[key]):
        raise RuntimeError(
            f"{path}{key}: {type(module).__name__}._save_to_state_dict adds it, but _load_from_state_dict does not "
            f"load its value. Build the model with the saved value, or register a buffer. {_REMEDY}"
        )


def _have_equal_bytes(one: Tensor, other: Tensor) -> bool:
    first, second = (byte_view(each.detach().contiguous()) for each in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(first, second)
