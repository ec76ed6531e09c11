"""Optimizers from before wrapping on CUDA, where counts of steps are on the host or on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.accelerator import ACCELERATOR
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded

pytestmark = pytest.mark.accelerator


@parametrize_pairs(
    at_most=7,
    case=[
        (ACCELERATOR, {}, {}),
        (ACCELERATOR, {"fused": True}, {}),
        (ACCELERATOR, {"capturable": True}, {}),
        (ACCELERATOR, {}, {"offload": "cpu"}),
        (ACCELERATOR, {"fused": True}, {"offload": "cpu"}),
        ("cpu", {}, {"compute_device": ACCELERATOR}),
        ("cpu", {"fused": True}, {"compute_device": ACCELERATOR}),
    ],
    use_orig_params=[False, True],
)
@on_accelerators(2)
def test_state_goes_where_the_shards_are(
    case: tuple[str, dict[str, Any], dict[str, Any]], use_orig_params: bool
) -> None:
    born_on, how, options = case
    options = {**options, "use_orig_params": use_orig_params}
    torch.set_default_dtype(torch.float64)
    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    late, plain = nested_mlp(keep).to(born_on), nested_mlp(keep).to(born_on)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, **how) for model in (late, plain)]
    for model, optimizer in zip((late, plain), optimizers, strict=True):
        for number, batch in enumerate(batches):
            if number == 2 and model is late:
                model = fully_sharded(**options)(model)
                model.reshard_optimizer(optimizer)  # type: ignore[operator]
            on = ACCELERATOR if number >= 2 and model is not plain else born_on
            part = batch.chunk(2)[dist.get_rank()] if number >= 2 and model is not plain else batch
            optimizer.zero_grad()
            model(part.to(on)).square().mean().backward()
            optimizer.step()
        if model is not plain:
            late = model
    shards = optimizers[0].param_groups[0]["params"]
    for param in shards:
        state = optimizers[0].state[param]
        assert state["exp_avg"].device == param.device
        assert state["step"].device == (param.device if how else torch.device("cpu"))
    expected = plain.state_dict()
    for name, value in late.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=1e-9, atol=1e-11)
