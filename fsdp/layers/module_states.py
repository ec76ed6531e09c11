"""`sync_module_states`: broadcasts the values of rank 0 to a module before it is sharded, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp.distributed.collectives import Communicator, during
from fsdp.distributed.consensus import from_everyone, peers_answer, sent_by_first
from fsdp.distributed.dtensor import local_part
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import join, named_modules
from fsdp.engine.unit import own_modules
from fsdp.layers.deferred_init import Place, Uninitialized
from fsdp.layers.managed_params import Found
from fsdp.layers.verify import agree_on_plan


@during("FullyShardedDataParallel(sync_module_states=True)")
def take_states_of_first(
    module: nn.Module,
    found: Found,
    ignored: Ignored,
    ranks: Sequence[Communicator],
    device: torch.device,
) -> Found:
    """Collective. Broadcast the values of rank 0 to a module before wrapping, one tensor at a time.

    A rank needs no additional memory, or memory for the largest tensor if it is on a different device or not
    contiguous. Tensors on the meta device on ranks other than 0 are allocated on `device`; tensors on the meta device
    of all ranks stay without values. Of `DTensor`s, the local parts are sent. Buffers of inner units and of ignored
    modules are not sent. Returns `found` with the current parameters.

    Raises:
        RuntimeError: if the ranks have different parameters or buffers, with the first rank that differs; if another
            rank has values of a tensor, but rank 0 does not.
        TypeError: for sparse buffers.
    """
    listed = [_Listed(places[0].fqn, param, [place[:2] for place in places]) for param, places in found.items()]
    listed += _buffers(module, ignored)
    if all(comm.world_size == 1 for comm in ranks):
        return found
    waiting = [False] * len(listed)
    if peers_answer(ranks):
        described = [one.described for one in listed]
        agree_on_plan(ranks, [(type(module).__name__, {"tensors": described})])
        waiting = _waiting(listed, ranks)
    for one in listed:
        if one.tensor.layout is not torch.strided:
            raise TypeError(
                f"sync_module_states=True: {one.name} is a {one.tensor.layout} tensor, and only dense ones are sent. "
                "Register its indices and values as buffers, and create it from them in forward"
            )
    current = [one.tensor if waits else one.with_memory(device) for one, waits in zip(listed, waiting, strict=True)]
    with torch.no_grad():
        for tensor in (tensor for tensor, waits in zip(current, waiting, strict=True) if not waits):
            local = local_part(tensor).detach()
            values = sent_by_first(ranks, local.to(device).contiguous().resolve_conj().resolve_neg())
            if values.data_ptr() != local.data_ptr():
                once = tuple(slice(None if stride else 1) for stride in local.stride())  # of an expanded tensor
                local[once].copy_(values[once])
    return dict(zip(current, found.values(), strict=False))  # parameters are listed first


class _Listed(NamedTuple):
    """A parameter or buffer, with a name and the places where modules list it."""

    name: str
    tensor: Any
    places: list[Place]

    @property
    def described(self) -> str:
        """The properties that are the same on all ranks."""
        tensor = self.tensor
        return f"{self.name}{list(tensor.shape)} {tensor.dtype}{f' {tensor.layout}' * (tensor.layout != torch.strided)}"

    def with_memory(self, device: torch.device) -> Any:
        """Return the tensor; a meta tensor is replaced by a tensor on this device."""
        if not self.tensor.is_meta:
            return self.tensor
        made = Uninitialized(self.places, self.tensor)
        made.give_memory(device)
        return made.value


def _waiting(listed: Sequence[_Listed], ranks: Sequence[Communicator]) -> list[bool]:
    """Collective. Return for each tensor whether it is without values on all ranks."""
    by_rank = from_everyone(ranks, bytes(one.tensor.is_meta for one in listed))
    waiting = [all(each) for each in zip(*by_rank, strict=True)]
    for one, waits, is_meta in zip(listed, waiting, by_rank[0], strict=True):
        if is_meta and not waits:
            raise RuntimeError(
                f"sync_module_states=True: {one.name} is on the meta device on rank 0, which must send its values"
            )
    return waiting


def _buffers(module: nn.Module, ignored: Ignored) -> list[_Listed]:
    names = {inner: name for name, inner in named_modules(module)}
    found: dict[int, _Listed] = {}
    for inner in own_modules(module):
        for name, buffer in inner._buffers.items() if inner not in ignored.modules else ():
            if buffer is not None:
                one = _Listed(join(names[inner], name), buffer, [])
                found.setdefault(id(buffer), one).places.append((inner, name))
    return list(found.values())
