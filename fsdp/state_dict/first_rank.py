"""A state dict that only the first rank has, as the other ranks get it: its shapes, and all that is not sharded."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.consensus import agree_on_outcome, from_everyone
from fsdp.engine.names import clean_name
from fsdp.engine.shared_params import keys_of
from fsdp.engine.state_requests import FirstRank
from fsdp.engine.unit import Unit, unit_of


@dataclass(frozen=True)
class _Described:
    """A tensor of the state dict."""

    shape: torch.Size
    dtype: torch.dtype
    is_sharded: bool  # it is not sent here


def received(source: FirstRank, wrapper: nn.Module, unit: Unit, state_dict: Any) -> Mapping[str, Any]:
    """Collective. Return the first rank's state dict, on other ranks with sharded parameters on the meta device.

    Buffers and other values are sent, one after the other; sharded parameters come when their units are loaded.

    Args:
        source: that rank.
        wrapper: into which it is to be loaded.
        unit: its own.
        state_dict: on that rank; anything on others.

    Raises:
        RuntimeError, TypeError: on all ranks, if the first one's is no mapping with tensors.
    """
    error = None
    if source.is_here and not isinstance(state_dict, Mapping):
        error = TypeError(f"rank0_only=True: rank 0 has to pass a state dict, and passed a {type(state_dict).__name__}")
    agree_on_outcome([source.ranks], "load its state dict", error)
    sharded = _sharded_keys(source, wrapper)
    payload = b""
    if source.is_here:
        entries = [(key, _described(key, value, sharded)) for key, value in state_dict.items()]
        payload = pickle.dumps((entries, getattr(state_dict, "_metadata", None)))
    entries, metadata = pickle.loads(from_everyone(source.ranks, payload)[0])
    found = OrderedDict[str, Any]()
    for key, entry in entries:
        found[key] = state_dict[key] if source.is_here else entry
        if isinstance(entry, _Described):
            found[key] = _sent(source, unit.device, entry, state_dict[key] if source.is_here else None)
    found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _described(key: str, value: Any, sharded: set[str]) -> Any:
    is_tensor = isinstance(value, Tensor)
    return _Described(value.shape, value.dtype, key in sharded) if is_tensor else value


def _sent(source: FirstRank, device: torch.device, entry: _Described, value: Tensor | None) -> Tensor:
    if entry.is_sharded:
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta") if value is None else value
    made = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if value is not None:
        made.copy_(value.detach())
    for comm in reversed(source.ranks):
        if comm.world_size > 1 and made.numel():
            comm.broadcast(made.view(-1).view(torch.uint8)).wait()
    return made


def _sharded_keys(source: FirstRank, wrapper: nn.Module) -> set[str]:
    found: set[str] = set()
    for name, module in wrapper.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None and source.serves(unit):
            prefix = clean_name(name)
            found |= {f"{prefix}.{key}" if prefix else key for key in keys_of(unit)}
    return found
