"""Parameters that are sharded as bytes are streamed as bytes, with a description of their form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.weights.plan import PlannedTensor, WeightPlan
from tests.helpers.on_ranks import on_ranks
from tests.helpers.quantised import Rows8, quantised


@on_ranks(2)
def test_adapters_alone_are_sent() -> None:
    plain, model = quantised("two tensors"), FullyShardedDataParallel(quantised("two tensors"), use_orig_params=True)
    received: dict[str, Tensor] = {}

    def sink(tensors: dict[str, Any]) -> None:
        received.update({name: value.clone() for name, value in tensors.items()})

    fsdp.stream_weights(model, sink, bucket_bytes=1 << 16, only=["0.down", "0.up", "2.down", "2.up"])
    expected = {name: value for name, value in plain.state_dict().items() if "base" not in name}
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], value) for name, value in expected.items())


def zeroed(kind: str) -> Any:
    model = quantised(kind)
    with torch.no_grad():
        for param in model.parameters():
            for tensor in [param.values, param.scale] if isinstance(param, Rows8) else [param]:
                tensor.zero_()
    return model


@pytest.mark.parametrize("form", ["flat", "rows"])
@pytest.mark.parametrize("kind", ["two tensors", "plain dtypes"])
@on_ranks(3)
def test_bytes_are_sent_to_another_sharded_model(kind: str, form: str) -> None:
    plain, model = quantised(kind), FullyShardedDataParallel(quantised(kind), use_orig_params=True)
    target = FullyShardedDataParallel(zeroed(kind)) if form == "flat" else fsdp.fully_shard(zeroed(kind))
    fsdp.stream_weights(model, fsdp.weights.ModelSink(target), bucket_bytes=1 << 10)
    inputs = torch.ones(2, 33)
    torch.testing.assert_close(target(inputs), plain(inputs))


@on_ranks(2)
def test_bytes_are_sent_to_files_with_their_form(tmp_path: Path) -> None:
    plain, model = quantised("two tensors"), FullyShardedDataParallel(quantised("two tensors"), use_orig_params=True)
    fsdp.stream_weights(model, fsdp.weights.SafetensorsSink(tmp_path / "sent"), bucket_bytes=1 << 12)
    target = FullyShardedDataParallel(zeroed("two tensors"))
    fsdp.load_safetensors(target, tmp_path / "sent")
    inputs = torch.ones(2, 33)
    torch.testing.assert_close(target(inputs), plain(inputs))
    other = FullyShardedDataParallel(quantised("nested"))
    for load in (
        lambda: fsdp.load_safetensors(other, tmp_path / "sent"),
        lambda: fsdp.stream_weights(model, fsdp.weights.ModelSink(other), bucket_bytes=1 << 12),
    ):
        with pytest.raises(RuntimeError, match=r"0\.base\.weight in .* is Rows8 .* the model's is Doubled"):
            load()


def test_a_plan_keeps_forms() -> None:
    tensors = (
        PlannedTensor(("a",), torch.uint8, torch.Size([4]), "Rows8"),
        PlannedTensor(("b",), torch.int8, torch.Size()),
    )
    plan = WeightPlan(tensors, (), (), 0, "", "")
    assert WeightPlan.from_json(json.loads(json.dumps(plan.to_json()))).tensors == tensors


@on_ranks(3)
def test_integers_are_sent_as_integers() -> None:
    plain, model = quantised("plain dtypes"), FullyShardedDataParallel(quantised("plain dtypes"))
    received: dict[str, Tensor] = {}

    def sink(tensors: dict[str, Any]) -> None:
        received.update({name: value.clone() for name, value in tensors.items()})

    fsdp.stream_weights(model, sink, bucket_bytes=1 << 12)
    expected = plain.state_dict()
    assert received.keys() == expected.keys()
    for name, value in expected.items():
        assert (received[name].dtype, received[name].shape) == (value.dtype, value.shape)
        assert torch.equal(received[name].float(), value.float())
