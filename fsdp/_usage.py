"""Which original parameters got a gradient on any rank: the others have None, as without sharding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp._comm import Communicator
from fsdp._handle import FlatParamHandle
from fsdp._unit import Unit


def show_gradients(units: Sequence[Unit]) -> None:
    """Collective. After reductions: give pieces of original parameters their gradients, if they were used on any rank,
    and call hooks.

    A sum over ranks is zero where a parameter was used nowhere, and where its gradient is zero; only the ranks together
    can tell. They exchange one byte per parameter, all units together, and a rank reads the answer only if something
    was not used on it: so nobody waits for the device otherwise.
    """
    by_ranks: dict[tuple[Communicator, ...], list[FlatParamHandle]] = {}
    for unit in units:
        for handle in unit.handles:
            # What was accumulated before its parameters were frozen has been reduced with the rest.
            if handle.pieces is not None and (handle.requires_grad or any(handle.gradients.used)):
                by_ranks.setdefault((handle.reduce_comm, handle.replicas), []).append(handle)
            elif handle.pieces is None:
                handle.deliver(())
    for ranks, handles in by_ranks.items():
        _show(ranks, handles)


def _show(ranks: Sequence[Communicator], handles: Sequence[FlatParamHandle]) -> None:
    here = b"".join(bytes(handle.gradients.used) for handle in handles)
    flags = torch.tensor(list(here), dtype=torch.uint8).to(handles[0].home.device)
    for comm in ranks:
        flags = comm.all_reduce(flags, "max").wait()
    used = list(here) if all(here) else flags.tolist()
    for handle in handles:
        count = len(handle.gradients.used)
        mine, used = used[:count], used[count:]
        handle.deliver(mine)
