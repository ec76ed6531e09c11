"""`sync_module_states`: the ranks begin with the values of the first one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fsdp._agreement import agree_on_plan
from fsdp._collect import Places
from fsdp._comm import Communicator
from fsdp._dtensors import local_part
from fsdp._ignored import Ignored
from fsdp._names import clean_name
from fsdp._unit import own_modules


def take_states_of_first(
    module: nn.Module,
    found: dict[nn.Parameter, Places],
    ignored: Ignored,
    comms: Sequence[Communicator],
    device: torch.device,
) -> None:
    """Collective. Give a module that is about to be wrapped the values that it has on rank 0, one tensor at a time.

    A rank needs no more memory for it, or that of the largest tensor if that is elsewhere or does not lie in one piece.

    Args:
        module: its buffers are sent, without those of inner units and of what is ignored.
        found: the parameters to send; of `DTensor`s, the local parts.
        ignored: what is left alone.
        comms: the ranks; with several, one after the other.
        device: where they communicate.

    Raises:
        RuntimeError: if the ranks have different parameters or buffers, naming the first rank that differs.
    """
    tensors = {f"{places[0].fqn}": local_part(param) for param, places in found.items()} | _buffers(module, ignored)
    described = [f"{name}{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    for comm in (one for one in comms if one.world_size > 1):
        if comm.peers_answer:
            agree_on_plan(comm, [(type(module).__name__, described)])
        with torch.no_grad():
            for tensor in _each_once(tensors.values()):
                _send(comm, tensor.detach(), device)


def _buffers(module: nn.Module, ignored: Ignored) -> dict[str, Tensor]:
    names = {inner: clean_name(name) for name, inner in module.named_modules()}
    return {
        f"{names[inner]}.{name}".lstrip("."): local_part(buffer)
        for inner in own_modules(module)
        if inner not in ignored.modules
        for name, buffer in inner._buffers.items()
        if buffer is not None
    }


def _each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _send(comm: Communicator, tensor: Tensor, device: torch.device) -> None:
    """Overwrite a tensor with that of rank 0: as bytes, since no backend has all dtypes."""
    if not tensor.numel():
        return
    in_place = tensor.device == device and tensor.is_contiguous()
    if in_place:
        sent = tensor
    elif comm.rank == 0:
        sent = tensor.to(device).contiguous()
    else:
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    comm.broadcast(sent.view(-1).view(torch.uint8)).wait()
    if not in_place and comm.rank != 0:
        tensor.copy_(sent)
