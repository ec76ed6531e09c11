"""Parameters that are sharded as bytes are not streamed; the adapters beside them are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.quantised import quantised


@on_ranks(2)
def test_bytes_are_refused_by_name_and_adapters_are_sent() -> None:
    plain, model = quantised("two tensors"), FullyShardedDataParallel(quantised("two tensors"), use_orig_params=True)
    received: dict[str, Tensor] = {}

    def sink(tensors: dict[str, Any]) -> None:
        received.update({name: value.clone() for name, value in tensors.items()})

    with pytest.raises(NotImplementedError, match=r"0\.base\.weight is sharded as bytes, Rows8 \[17, 33\].*only="):
        fsdp.stream_weights(model, sink, bucket_bytes=1 << 16)
    fsdp.stream_weights(model, sink, bucket_bytes=1 << 16, only=["0.down", "0.up", "2.down", "2.up"])
    expected = {name: value for name, value in plain.state_dict().items() if "base" not in name}
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], value) for name, value in expected.items())


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
