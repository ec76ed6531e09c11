"""Planted mistakes: that the cases find them shows that they look where they should."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch.distributed as dist
from torch import Tensor


def _divided_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda buffer, slot, grad, divisor: original(buffer, slot, grad, 2 * divisor)


def _replaced_instead_of_added(original: Callable[..., Any]) -> Callable[..., Any]:
    def hold(shard: Any, reduced: Tensor) -> None:
        shard.grad = None
        original(shard, reduced)

    return hold


def _of_this_rank_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda comms, tensor, *rest: tensor


def _not_stored_on_the_last_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    def store(values: Any, slot: int, value: Tensor) -> None:
        if dist.get_rank() < dist.get_world_size() - 1:
            original(values, slot, value)

    return store


def _not_summed_over_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    def summed(comm: Any, tensor: Tensor, *args: Any) -> Generator[None, None, Tensor]:
        return tensor
        yield

    return summed


def _forgotten(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _stored_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    def store(listed: Any, given: dict[int, Tensor]) -> None:
        for slot, value in given.items():
            ours = listed._of(listed._flat_param.detach(), slot)
            ours.copy_(value)
            listed._have(slot, ours)

    return store


def _always_the_same(original: Any) -> Any:
    return property(lambda handle: (0, (), ()))


def _all_used(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pieces, used, *args: original(pieces, [1] * len(used), *args)


def _built_anew(original: Callable[..., Any]) -> Callable[..., Any]:
    def follow(handle: Any) -> None:
        before = handle._trained
        original(handle)
        if handle._trained != before:
            handle._build()

    return follow


def _returned_as_it_is(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state: state


def _none(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: []


# What is replaced, and what by.
MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "gradients are divided twice": ("fsdp.engine.grad_buffer.GradientBuffer.add", _divided_twice),
    "gradients replace accumulated ones": (
        "fsdp.engine.flat_param.FlatParameter.hold_gradient",
        _replaced_instead_of_added,
    ),
    "clipping knows this rank's norm only": ("fsdp.layers.grad_clipping.over_all", _of_this_rank_alone),
    "the last rank does not load": ("fsdp.engine.shard_values.ShardValues.store", _not_stored_on_the_last_rank),
    "replicas go apart": ("fsdp.engine.reduction.summed", _not_summed_over_replicas),
    "the optimizer's state is not loaded": ("fsdp.optim_utils.load_full_optim_state_dict", _forgotten),
    "stale parameters are computed with": ("fsdp.engine.handle.FlatParamHandle.shard_state", _always_the_same),
    "leaves are built anew when a parameter is frozen": (
        "fsdp.engine.handle.FlatParamHandle.follow_frozen",
        _built_anew,
    ),
    "a forward lists shards": ("fsdp.engine.presentation.Presentation.list_unsharded", _none),
    "writes to memory are not seen": ("fsdp.engine.runtime.Runtime._reshard_overwritten", _forgotten),
    "data of rows is dropped": ("fsdp.layers.dtensor_params.DTensorParams._replaced", _none),
    "data that was kept is overwritten": ("fsdp.engine.orig_params.OrigParams._store", _stored_in_place),
    "writes to rows are dropped": ("fsdp.distributed.gathered_part.Source.write_back", _forgotten),
    "numbers of another nesting are believed": ("fsdp.optim_utils.full.by_stored_names", _returned_as_it_is),
    "what is not used has a gradient": ("fsdp.engine.orig_params.OrigParams.show_gradients", _all_used),
}
