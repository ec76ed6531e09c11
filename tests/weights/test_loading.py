"""Streams are loaded into sharded models of any form, on the same ranks or from another process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.weights import ModelSink, Sink, SocketSink, WeightPlan, receive
from tests.helpers.equality import assert_same
from tests.helpers.forked import Forked
from tests.helpers.forms import full_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.weights import MODELS, ON_PAIRS, everything, step, tensors_of

BUCKET = 400
FORMS = ["flat", "orig", "rows", "last dimension", "mixed", "ignored", "no shard", "offloaded", "plain"]


class Recorded(Sink):
    """Keeps all buckets, to be a source afterwards."""

    def open(self, plan: WeightPlan) -> None:
        self.plan, self.kept = plan, []

    def bucket(self, number: int, tensor: Tensor) -> None:
        self.kept.append(tensor.clone())

    def buckets(self) -> Iterator[tuple[int, Tensor]]:
        yield from enumerate(self.kept)


@on_ranks("world_size")
@parametrize_pairs(at_most=9, world_size=[2, 3, 1], source=FORMS, target=FORMS)
def test_a_model_loads_the_weights_of_another_form(world_size: int, source: str, target: str) -> None:
    model, recorded = MODELS[target](2), Recorded()
    sent = MODELS[source](1)
    fsdp.stream_weights(sent, ModelSink(model), bucket_bytes=BUCKET, buffers=True)
    assert_same(full_state(model), tensors_of(everything(seed=1)))
    fsdp.stream_weights(MODELS[source](3), recorded, bucket_bytes=BUCKET, buffers=True)
    found = fsdp.load_stream(model, recorded)
    assert not found.missing_keys
    assert_same(full_state(model), tensors_of(everything(seed=3)))


@pytest.mark.parametrize("is_own", [False, True], ids=["broadcast", "on every rank"])
@on_ranks(2, 1)
def test_a_source_that_ends_early_is_an_error_on_every_rank(is_own: bool) -> None:
    model, recorded = MODELS["flat"](2), Recorded()
    fsdp.stream_weights(MODELS["flat"](1), recorded, bucket_bytes=BUCKET, buffers=True)
    del recorded.kept[2:]
    with pytest.raises((ValueError, RuntimeError), match=r"the source has ended before bucket 2 of \d+"):
        fsdp.load_stream(model, recorded if is_own or dist.get_rank() == 0 else None)


@on_ranks(4)
@pytest.mark.parametrize("form", list(ON_PAIRS))
def test_the_first_rank_broadcasts_to_replicas(form: str) -> None:
    model, recorded = ON_PAIRS[form](2), Recorded()
    fsdp.stream_weights(MODELS["flat"](1), recorded, bucket_bytes=BUCKET, buffers=True)
    fsdp.load_stream(model, recorded if dist.get_rank() == 0 else None)
    assert_same(full_state(model), tensors_of(everything(seed=1)))


@on_ranks(2)
@pytest.mark.parametrize("form", ["flat", "rows", "orig"])
def test_training_goes_on_with_loaded_weights(form: str) -> None:
    model, other = MODELS[form](1), MODELS[form](2)
    step(model)
    step(other)
    fsdp.stream_weights(model, ModelSink(other), bucket_bytes=BUCKET, buffers=True)
    for each in (model, other):
        step(each)
    assert_same(full_state(other), full_state(model))


def test_weights_of_another_process_are_loaded(ranks: RankPool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Forked(_send, address) as process:
        ranks(2).run(_load_sent, address)
        assert process.wait() == 0


def _send(address: str) -> None:
    for seed in (5, 6):
        fsdp.stream_weights(everything(seed=seed), SocketSink(address, "secret"), bucket_bytes=400, buffers=True)


def _load_sent(address: str) -> None:
    models = {5: MODELS["flat"](1), 6: MODELS["rows"](1)}
    if dist.get_rank() == 0:
        with receive(address, secret="secret") as receiver:
            for model in models.values():
                fsdp.load_stream(model, receiver)
    else:
        for model in models.values():
            fsdp.load_stream(model, None)
    for seed, model in models.items():
        assert_same(full_state(model), tensors_of(everything(seed=seed)))


# Bad input


@on_ranks(2)
def test_weights_that_do_not_fit_change_nothing() -> None:
    model, other, recorded = MODELS["flat"](2), nn.Sequential(nn.Linear(3, 5)), Recorded()
    fsdp.stream_weights(other, recorded, bucket_bytes=BUCKET)
    with pytest.raises(RuntimeError, match=r"does not fit .*\n.*missing: .*\n.*unexpected: 0.weight, 0.bias"):
        fsdp.load_stream(model, recorded)
    with pytest.raises(RuntimeError, match=r"unexpected: 0.weight, 0.bias"):
        fsdp.load_stream(model, recorded if dist.get_rank() == 0 else None, strict=False)
    fsdp.stream_weights(MODELS["flat"](1), recorded, bucket_bytes=BUCKET, only=["inner"])
    with pytest.raises(RuntimeError, match=r"missing: .*wide"):
        fsdp.load_stream(model, recorded)
    assert_same(full_state(model), tensors_of(everything(seed=2)))
    assert "wide" in fsdp.load_stream(model, recorded, strict=False).missing_keys
    expected = {**tensors_of(everything(seed=2))}
    one = tensors_of(everything(seed=1), buffers=False)
    expected |= {name: value for name, value in one.items() if name.startswith("inner.")}
    assert_same(full_state(model), expected)


class Ending(Recorded):
    def buckets(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.kept[0]
        raise ConnectionError("the sender is gone")


@on_ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_source_that_fails_is_an_error_on_every_rank(everywhere: bool) -> None:
    model, source = MODELS["flat"](1), Ending()
    fsdp.stream_weights(model, source, bucket_bytes=150)
    given: Any = source if everywhere or dist.get_rank() == 0 else None
    with pytest.raises((ConnectionError, RuntimeError), match="the sender is gone"):
        fsdp.load_stream(model, given)
    step(model)


@on_ranks(2)
def test_sources_are_on_the_first_rank_or_on_all() -> None:
    model, source = MODELS["flat"](1), Recorded()
    fsdp.stream_weights(model, source, bucket_bytes=BUCKET)
    for given in (None, source if dist.get_rank() == 1 else None):
        with pytest.raises(ValueError, match="on the first rank only, or on every rank"):
            fsdp.load_stream(model, given)
    with pytest.raises((TypeError, RuntimeError), match="source must be an"):
        fsdp.load_stream(model, 3 if dist.get_rank() else source)  # type: ignore[arg-type]
    other = Recorded()
    fsdp.stream_weights(model, other, bucket_bytes=150)
    with pytest.raises(RuntimeError, match="different plans"):
        fsdp.load_stream(model, other if dist.get_rank() else source)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        fsdp.load_stream(torch.zeros(3), source)  # type: ignore[arg-type]
