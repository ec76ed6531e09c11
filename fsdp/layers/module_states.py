"""`sync_module_states`: a module receives the values of rank 0 before it is sharded.

Values are sent before sharding, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import Communicator, during
from fsdp.distributed.consensus import from_everyone, peers_answer, sent_by_first
from fsdp.distributed.dtensor import local_part
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import clean_name
from fsdp.engine.unit import own_modules
from fsdp.layers.managed_params import Places
from fsdp.layers.verify import agree_on_plan


@during("FullyShardedDataParallel(sync_module_states=True)")
def take_states_of_first(
    module: nn.Module,
    found: dict[nn.Parameter, Places],
    ignored: Ignored,
    ranks: Sequence[Communicator],
    device: torch.device,
) -> dict[nn.Parameter, Places]:
    """Collective. Broadcast the values of rank 0 to a module before wrapping, one tensor at a time.

    A rank needs no additional memory, or memory for the largest tensor if it is on a different device or not
    contiguous. Tensors on the meta device on ranks other than 0 are allocated on `device`; tensors on the meta device
    of all ranks stay without values. The current parameters for `found` are returned. For `DTensor`s the local parts
    are sent. Buffers of inner units and of ignored modules are not sent.

    Raises:
        RuntimeError: if the ranks have different parameters or buffers, with the first rank that differs; if rank 0
            has no values, but another rank has.
    """
    buffers = _buffers(module, ignored)
    tensors: list[tuple[str, Tensor]] = [(places[0].fqn, param) for param, places in found.items()]
    tensors += [(names[0], buffer) for buffer, names, _ in buffers]
    described = [f"{name}{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    has_others = any(comm.world_size > 1 for comm in ranks)
    waiting = [False] * len(tensors)
    if has_others and peers_answer(ranks):
        agree_on_plan(ranks, [(type(module).__name__, {"tensors": described})])
        waiting = _waiting(tensors, ranks)
    count = len(found)
    if has_others:
        found = {
            param if waits else _with_memory(param, places, device): places
            for (param, places), waits in zip(found.items(), waiting, strict=False)
        }
        for (buffer, _, entries), waits in zip(buffers, waiting[count:], strict=True):
            if buffer.is_meta and not waits:
                made = torch.empty_like(buffer, device=device)
                for listed, name in entries:
                    listed[name] = made
    every = [*found, *(entries[0][0][entries[0][1]] for _, _, entries in buffers)]
    sent = [tensor for tensor, waits in zip(every, waiting, strict=True) if not waits]
    with torch.no_grad():
        for tensor in sent if has_others else ():
            local = local_part(tensor).detach()
            values = sent_by_first(ranks, local.to(device).contiguous())
            if values.data_ptr() != local.data_ptr():
                local.copy_(values)
    return found


def _waiting(tensors: Sequence[tuple[str, Tensor]], ranks: Sequence[Communicator]) -> list[bool]:
    """Collective. Return which tensors no rank has values of."""
    by_rank = from_everyone(ranks, bytes(tensor.is_meta for _, tensor in tensors))
    waiting = [all(each) for each in zip(*by_rank, strict=True)]
    for (name, _), waits, is_meta in zip(tensors, waiting, by_rank[0], strict=True):
        if is_meta and not waits:
            raise RuntimeError(
                f"sync_module_states=True: {name} is on the meta device on rank 0, which is to send its values"
            )
    return waiting


def _with_memory(param: nn.Parameter, places: Places, device: torch.device) -> nn.Parameter:
    if not param.is_meta:
        return param
    made = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
    for place in places:
        place.module._parameters[place.name] = made
    return made


def _buffers(module: nn.Module, ignored: Ignored) -> list[tuple[Tensor, list[str], list[tuple[dict[str, Any], str]]]]:
    """Return each buffer once, with its names and the entries that list it."""
    names = {inner: clean_name(name) for name, inner in module.named_modules()}
    found: dict[int, tuple[Tensor, list[str], list[tuple[dict[str, Any], str]]]] = {}
    for inner in own_modules(module):
        for name, buffer in inner._buffers.items() if inner not in ignored.modules else ():
            if buffer is not None:
                _, known_as, entries = found.setdefault(id(buffer), (buffer, [], []))
                known_as.append(f"{names[inner]}.{name}".lstrip("."))
                entries.append((inner._buffers, name))
    return list(found.values())
