"""The checker of stream order on an accelerator that is there: a simulated one in C++, or CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import fsdp
from fsdp.testing import Report, StreamOrderError, check_streams
from tests.helpers.accelerator import ACCELERATOR, device_module
from tests.helpers.on_ranks import on_accelerators

pytestmark = pytest.mark.accelerator


def reports(body: Callable[[], None]) -> list[Report]:
    try:
        with check_streams():
            body()
    except StreamOrderError as error:
        return error.reports
    return []


def test_what_is_in_order_is_not_reported() -> None:
    with check_streams():
        side = torch.Stream(ACCELERATOR)
        value = torch.ones(8, device=ACCELERATOR)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            value.mul_(2)
            copied = value.to("cpu", non_blocking=True)
            done = side.record_event()
        torch.accelerator.current_stream().wait_event(done)
        assert value.add_(1).sum().item() == 24
        done.synchronize()
        assert copied.sum().item() == 16


def test_waits_that_are_missing_are_reported() -> None:
    def body() -> None:
        side = device_module().Stream()
        value = torch.ones(8, device=ACCELERATOR)
        with device_module().stream(side):
            value.mul_(2)
        value.sum()

    found = reports(body)
    assert [(report.first, report.second) for report in found] == [("ones", "mul_"), ("mul_", "sum")]
    assert all(__file__ in report.second_place for report in found)


@on_accelerators(1)
def test_autograd_s_threads_are_observed() -> None:
    def body() -> None:
        model = nn.Linear(4, 4).to(ACCELERATOR)
        model(torch.ones(2, 4, device=ACCELERATOR)).sum().backward()
        with torch.Stream(ACCELERATOR):
            assert model.bias.grad is not None
            model.bias.grad.zero_()

    assert {report.second for report in reports(body)} == {"zero_"}


@pytest.mark.parametrize("way", ["flat", "rows"])
@pytest.mark.parametrize("offload", [False, True])
@on_accelerators(2)
def test_nothing_of_the_package_is_reported(way: str, offload: bool) -> None:
    with check_streams():
        if way == "flat":
            wrap = partial(fsdp.FullyShardedDataParallel, offload="cpu" if offload else None)
        else:
            wrap = partial(fsdp.fully_shard, **({"offload_policy": fsdp.CPUOffloadPolicy()} if offload else {}))
        model = wrap(nn.Sequential(*(wrap(nn.Linear(6, 6).to(ACCELERATOR)) for _ in range(3))))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 6, device=ACCELERATOR)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
