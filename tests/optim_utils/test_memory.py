"""Who holds how much while optimizer state is put together and dealt out, and what is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import optim_utils
from fsdp.distributed.collectives import DirectExchange
from fsdp.optim_utils import gather
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import MakeOptimizer, adam
from tests.helpers.parity import fully_sharded
from tests.helpers.state_dicts import LAYER_BYTES, LAYERS, LiveBytes, at_most

FULL = 2 * LAYERS * LAYER_BYTES  # two moments


def _trained() -> tuple[Any, Any]:
    wrap = fully_sharded()
    model: Any = wrap(nn.Sequential(*(wrap(nn.Linear(64, 64, bias=False)) for _ in range(LAYERS)), nn.Linear(64, 1)))
    return model, _stepped(model, adam)


def _stepped(model: nn.Module, make_optimizer: MakeOptimizer) -> Any:
    optimizer = make_optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 64) * dist.get_rank()).square().mean().backward()
        optimizer.step()
    return optimizer


@on_ranks(2, 3)
def test_ranks_that_only_take_part_need_no_memory() -> None:
    model, optimizer = _trained()
    model.gather_full_optim_state_dict(optimizer)
    if dist.get_rank() == 0:
        with at_most(FULL + LAYER_BYTES // 2):  # and small tensors
            model.gather_full_optim_state_dict(optimizer)
        return
    with LiveBytes() as live:
        model.gather_full_optim_state_dict(optimizer)
    assert live.peak < LAYER_BYTES // 4


@on_ranks(4)
def test_a_stream_holds_what_is_on_its_way() -> None:
    model, optimizer = _trained()
    window, gather.WINDOW = gather.WINDOW, LAYER_BYTES
    try:
        with LiveBytes() as live:
            for _ in optim_utils.stream_optim_state(model, optimizer):
                pass
    finally:
        gather.WINDOW = window
    allowed = 3 * LAYER_BYTES if dist.get_rank() == 0 else LAYER_BYTES // 4
    assert live.peak <= allowed, f"{live.peak / LAYER_BYTES} tensors"


@on_ranks(2, 3)
def test_loading_from_the_first_rank_needs_a_shard() -> None:
    model, optimizer = _trained()
    named = optim_utils.full_optim_state_dict(model, optimizer)
    fresh, shard = adam(model), FULL // dist.get_world_size()
    with at_most(shard + LAYER_BYTES):
        optim_utils.load_full_optim_state_dict(model, fresh, named, rank0_only=True)
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    for state in fresh.state.values():
        state["exp_avg"].zero_()
    with at_most(LAYER_BYTES):
        optim_utils.load_full_optim_state_dict(model, fresh, named, rank0_only=True)
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


@on_ranks(3)
def test_every_byte_is_sent_once() -> None:
    model, optimizer = _trained()
    sent = [0]
    exchange = DirectExchange.exchange

    def counted(self: Any, incoming: Any, outgoing: Any, what: str, tag: int) -> Any:
        sent[0] += sum(part.numel() * part.element_size() for parts in outgoing.values() for part in parts)
        return exchange(self, incoming, outgoing, what, tag)

    DirectExchange.exchange = counted  # type: ignore[method-assign]
    try:
        named = optim_utils.full_optim_state_dict(model, optimizer)
        for_gathering, sent[0] = sent[0], 0
        optim_utils.load_full_optim_state_dict(model, optimizer, named, rank0_only=True)
        for_loading = sent[0]
    finally:
        DirectExchange.exchange = exchange  # type: ignore[method-assign]
    held = sum(
        kept.numel * 2 * 4
        for unit in model._units()
        for handle in unit.handles
        for rank in range(3)
        for kept in handle.layout.intervals(rank)
        if rank == dist.get_rank() or dist.get_rank() == 0
    )
    layouts = [handle.layout for unit in model._units() for handle in unit.handles]
    own = sum(kept.numel * 2 * 4 for layout in layouts for kept in layout.intervals(dist.get_rank()))
    assert (for_gathering, for_loading) == ((0, held - own) if dist.get_rank() == 0 else (own, 0))
