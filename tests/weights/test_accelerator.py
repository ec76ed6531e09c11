"""Weights on an accelerator, where copies and exchanges are queued."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.weights import ModelSink
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks, later_kernels
from tests.helpers.engines import engine, sink_to
from tests.helpers.equality import assert_same
from tests.helpers.owned import under_fully_shard
from tests.helpers.weights import Collected, Parts, everything, tensors_of

pytestmark = pytest.mark.accelerator
BUCKET = 400
WRAPS: dict[str, Any] = {
    "flat": FullyShardedDataParallel,
    "rows": under_fully_shard,
    "offloaded": partial(FullyShardedDataParallel, offload="cpu"),
}


@pytest.mark.parametrize(
    ("form", "through_host"), [("flat", True), ("rows", False), ("rows", True), ("offloaded", False)]
)
def test_weights_on_an_accelerator_are_sent(accelerator_ranks: AcceleratorRanks, form: str, through_host: bool) -> None:
    accelerator_ranks(2, through_host=through_host).run(_send, form)


def made(form: str, seed: int) -> Any:
    model = everything(seed=seed).to(ACCELERATOR)
    model.inner = WRAPS[form](model.inner)
    return WRAPS[form](model)


def _send(form: str) -> None:
    model = made(form, seed=1)
    expected = tensors_of(everything(seed=1))
    sink, parts = Collected(), Parts()
    with later_kernels():
        for _ in range(2):
            fsdp.stream_weights(model, sink if dist.get_rank() else None, bucket_bytes=BUCKET, buffers=True)
            if dist.get_rank():
                assert_same(sink.state, expected)
        fsdp.stream_weights(model, sink, bucket_bytes=BUCKET, buffers=True)
        assert_same(sink.state, expected)
        other = made("rows", seed=2)
        fsdp.stream_weights(model, ModelSink(other), bucket_bytes=BUCKET, buffers=True)
        fsdp.stream_weights(other, parts, bucket_bytes=BUCKET, buffers=True)
        assert_same(parts.whole(), expected)
        with engine("socket") as (address, engine_here):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, buffers=True, dtype=torch.bfloat16)
            if engine_here is not None:
                assert_same(engine_here.result()["wide"], expected["wide"].bfloat16())
