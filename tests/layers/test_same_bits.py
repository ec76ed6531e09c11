"""`SameBits`: the same weights, losses, norms and optimizer state, to the bit, at every number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, SameBits, ShardingStrategy
from fsdp.distributed.journal import settings
from tests.helpers.hybrid import group_option
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.same_bits import (
    FORMS,
    FORMS_AND_OPTIMIZERS,
    OPTIMIZERS,
    adamw,
    loss_of,
    tokens_of,
    train_same_bits,
    writer,
)

STEPS = 2
MICRO_BATCHES = 6  # which one, two and three ranks divide


@pytest.mark.parametrize(("form", "optimizer"), FORMS_AND_OPTIMIZERS)
def test_bits_are_the_same_at_every_number_of_ranks_and_after_a_restart_at_another(
    ranks: RankPool, form: str, optimizer: str, tmp_path: Path
) -> None:
    (whole,) = ranks(1).run(_train, form, optimizer, range(STEPS))
    for mine in ranks(3).run(_train, form, optimizer, range(STEPS), save=tmp_path / "saved"):
        assert mine == whole
    for resumed in ranks(2).run(_train, form, optimizer, range(1, STEPS), load=tmp_path / "saved"):
        assert resumed == whole[1:]


def _train(form: str, optimizer: str, steps: range, save: Path | None = None, load: Path | None = None) -> list[str]:
    """Collective. The state is saved after the first of the steps."""
    model = writer(FORMS[form])
    optim = OPTIMIZERS[optimizer](model)
    if load is not None:
        fsdp.load(load, model, optim)
    bits = SameBits(model, MICRO_BATCHES, seed=3)
    found = train_same_bits(model, optim, bits, steps[:1])
    if save is not None:
        fsdp.save(save, model, optim)
    return found + train_same_bits(model, optim, bits, steps[1:])


WAYS: dict[str, Wrap] = {
    "bfloat16": partial(
        FullyShardedDataParallel, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "offload": partial(FullyShardedDataParallel, offload="cpu"),
    "kept unsharded": partial(FullyShardedDataParallel, reshard_after_forward=False),
    "no buckets": partial(FullyShardedDataParallel, bucket_cap_mb=0),
    "recomputed": lambda module: FullyShardedDataParallel(fsdp.checkpoint_wrapper(module)),
    "NO_SHARD": partial(FullyShardedDataParallel, sharding_strategy=ShardingStrategy.NO_SHARD),
    "collectives of torch": FullyShardedDataParallel,
    "NO_SHARD, collectives of torch": partial(FullyShardedDataParallel, sharding_strategy=ShardingStrategy.NO_SHARD),
}


def test_bits_are_the_same_in_all_ways_to_train(ranks: RankPool) -> None:
    one, three = (ranks(world_size).run(_train_in_all_ways)[0] for world_size in (1, 3))
    assert one == three


def _train_in_all_ways() -> dict[str, list[str]]:
    found = {}
    for way, wrap in WAYS.items():
        fsdp.use_torch_collectives("collectives of torch" in way)
        try:
            model = writer(wrap)
        finally:
            fsdp.use_torch_collectives(False)
        found[way] = train_same_bits(model, adamw(model), SameBits(model, 6), range(1))
    return found


def test_bits_are_the_same_beside_frozen_integers(ranks: RankPool) -> None:
    found = [ranks(world_size).run(_train_beside_integers)[0] for world_size in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def _train_beside_integers() -> dict[str, list[Any]]:
    found = {}
    for form, wrap in FORMS.items():
        model = writer()
        model.register_parameter("codes", nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False))
        sharded = wrap(model)
        found[form] = train_same_bits(sharded, adamw(sharded), SameBits(sharded, 6), range(2))
    return found


@on_ranks(2)
def test_what_is_replicated_is_compared_as_ever() -> None:
    with mock.patch.object(settings, "replicas_every", 1):
        model = writer(FORMS["fully_shard"])  # whose scalar every rank has
        train_same_bits(model, adamw(model), SameBits(model, 2), range(2))


def test_without_it_bits_are_others(ranks: RankPool) -> None:
    """So that the tests above can fail."""
    assert len({ranks(world_size).run(_train_plainly)[0] for world_size in (1, 2, 3)}) == 3


def _train_plainly() -> str:
    model = writer(FullyShardedDataParallel).eval()  # without dropout
    optim = adamw(model)
    for step in range(STEPS):
        optim.zero_grad()
        for number in range(dist.get_rank(), MICRO_BATCHES, dist.get_world_size()):
            loss = loss_of(model, tokens_of(step, number))
            (loss * dist.get_world_size() / MICRO_BATCHES).backward()
        optim.step()
    return fsdp.fingerprint(model, optim)


@on_ranks(3)
def test_gradients_are_the_means_over_micro_batches_and_zeros_before() -> None:
    model, plain = writer(FORMS["orig_params"]).eval(), writer().eval()
    bits, numbers = SameBits(model, 6), []
    state = torch.get_rng_state()
    for number in bits.step(0):
        loss_of(model, tokens_of(0, number)).backward()
        numbers.append(number)
        if len(numbers) == 1:
            assert not any(param.grad.any() for param in model.parameters() if param.grad is not None)
            torch.rand(3)
    assert numbers == [dist.get_rank(), dist.get_rank() + 3]
    assert torch.equal(torch.get_rng_state(), state)
    torch.stack([loss_of(plain, tokens_of(0, number)) for number in range(6)]).mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(bits.clip_grad_norm_(0.1).float(), norm)
    with model.summon_full_params(volatile=True, with_grads=True):
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, torch.zeros_like(other) if "unused" in name else other.grad)


# What is refused


@on_ranks(4)
def test_hybrid_sharding_is_refused() -> None:
    model = writer(_wrap(process_group=group_option("pair", 2, 2)))
    with pytest.raises(NotImplementedError, match=r"is sharded and replicated \(hybrid sharding\)"):
        SameBits(model, 4)


@on_ranks(2)
def test_what_cannot_have_the_same_bits_is_refused_by_name() -> None:
    for wrap, named, text in [
        (_wrap(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)), "", "reduced in torch.bfloat16"),
        (_wrap(ignored_parameters=_HEAD), "head.weight", "is trained but not sharded"),
    ]:
        _HEAD.clear()
        with pytest.raises(NotImplementedError, match=f"{named}.*{text}"):
            SameBits(_writer_with(wrap), 4)
    hooked = writer(FullyShardedDataParallel)
    hooked.register_comm_hook(None, fsdp.bf16_compress_hook)
    with pytest.raises(NotImplementedError, match="communication hook"):
        SameBits(hooked, 4)
    with pytest.raises(ValueError, match="5 micro-batches cannot be divided among 2 ranks"):
        SameBits(writer(FullyShardedDataParallel), 5)
    with pytest.raises(RuntimeError, match=r"different settings of fsdp\.SameBits.*seed 0.*seed 1"):
        SameBits(writer(FullyShardedDataParallel), 4, seed=dist.get_rank())
    with pytest.raises(TypeError, match=r"fsdp\.SameBits needs the outermost .*got a Writer"):
        SameBits(writer(), 4)
    branching = FullyShardedDataParallel(Branching())
    branching(torch.ones(1, 2))
    with pytest.raises(NotImplementedError, match=r"the model uses fsdp\.cond"):
        SameBits(branching, 2)
    norms = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    bits = SameBits(norms, 2)
    with pytest.raises(NotImplementedError, match="1 is a BatchNorm1d in training"):
        next(bits.step(0))


class Branching(nn.Module):
    """A model of which ranks may run a part or not."""

    def __init__(self) -> None:
        super().__init__()
        self.part = FullyShardedDataParallel(nn.Linear(2, 2))
        self.last = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(fsdp.cond(self.part, True, inputs))


_HEAD: list[nn.Parameter] = []


def _wrap(**options: Any) -> Wrap:
    return lambda module: FullyShardedDataParallel(module, **options)


def _writer_with(wrap: Wrap) -> nn.Module:
    plain = writer()
    _HEAD.append(plain.head.weight)
    return wrap(plain)


@on_ranks(2)
def test_mistakes_in_a_step_are_errors() -> None:
    model = writer(FullyShardedDataParallel)
    optim, bits = adamw(model), SameBits(model, 4)
    once = bits.step(0)
    next(once)
    with pytest.raises(RuntimeError, match=f"micro-batch {dist.get_rank()} was not reduced exactly once"):
        next(once)
    twice = bits.step(0)
    number = next(twice)
    loss_of(model, tokens_of(0, number)).backward()
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\) before all 4 micro-batches"):
        optim.step()
    loss_of(model, tokens_of(0, number)).backward()
    with pytest.raises(RuntimeError, match="was not reduced exactly once"):
        next(twice)
    with pytest.raises(RuntimeError, match="this backward belongs to no micro-batch"):
        loss_of(model, tokens_of(0, 0)).backward()
    optim.zero_grad()
    fresh = writer(FullyShardedDataParallel)
    unharmed = train_same_bits(fresh, adamw(fresh), SameBits(fresh, 4), range(1))
    assert train_same_bits(model, optim, bits, range(1)) == unharmed
    with pytest.raises(RuntimeError, match="clip with its method clip_grad_norm_"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="clip with its method clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="clip with its method clip_grad_norm_"):
        nn.utils.clip_grad_norm_(next(model.parameters()), 1.0)
    with pytest.raises(NotImplementedError, match="fused=True rounds the last elements"):
        torch.optim.AdamW(model.parameters(), fused=True).step()
    with pytest.raises(ValueError, match=r"SameBits.mean\(\) got \[1, 2\] values"):
        bits.mean([0.0] * (1 + dist.get_rank()))
    is_second = dist.get_rank() == 1
    error, said = (
        (TypeError, "float") if is_second else (fsdp.OtherRankError, "rank 1 could not average its numbers. TypeError")
    )
    with pytest.raises(error, match=said):
        bits.mean([None, None] if is_second else [0.0, 0.0])  # type: ignore[list-item]
    model.set_gradient_divide_factors(2.0, 1.0, recursive=True)
    with pytest.raises(RuntimeError, match="the divisor, communication hook or reduce-scatter"):
        next(bits.step(1))
