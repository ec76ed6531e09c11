"""Users may set a default device: what the library keeps on the host, and what ranks tell each other, stays there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp.checkpoint.cli import main
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks
from tests.helpers.on_ranks import on_accelerators, on_ranks
from tests.training.test_accelerator_uses import adamw, assert_trained, build, flat, train


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _uneven(model: Any, device: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device="cpu"))
    with fsdp.join(model, optimizer):
        for number in range(1 + dist.get_rank()):
            model(torch.full((3, 6), 1.0 + number, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_ranks_have_different_numbers_of_batches() -> None:
    states = []
    for default in ("cpu", "meta"):
        torch.manual_seed(0)
        model = fsdp.FullyShardedDataParallel(nn.Linear(6, 6, device="cpu"))
        with default_device(default):
            _uneven(model, "cpu")
        states.append(model.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


@on_ranks(2)
def test_a_checkpoint_is_saved_loaded_and_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(nn.Linear(6, 6, device="cpu"))
    again = fsdp.FullyShardedDataParallel(nn.Linear(6, 6, device="cpu"))
    with default_device("meta"):
        fsdp.save(tmp_path / "saved", model)
        fsdp.load(tmp_path / "saved", again)
        if dist.get_rank() == 0:
            main(["convert", str(tmp_path / "saved"), str(tmp_path / "one.pt")])
        dist.barrier()
    state = model.state_dict()
    torch.testing.assert_close(again.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(torch.load(tmp_path / "one.pt")["model"], state, rtol=0, atol=0)


def test_twins_on_the_host_are_there() -> None:
    with default_device("meta"):
        twin = fsdp.state_dict_utils.create_cpu_state_dict({"weight": torch.ones(2, device="cpu")})
    assert twin["weight"].device.type == "cpu"


@pytest.mark.accelerator
@pytest.mark.parametrize("options", [{"reshard_after_forward": "host"}, {"offload": "cpu"}], ids=str)
def test_a_copy_on_the_host_is_pinned(accelerator_ranks: AcceleratorRanks, options: dict[str, Any]) -> None:
    accelerator_ranks(2).run(_train_with_default_device, options)


def _train_with_default_device(options: dict[str, Any]) -> None:
    model = build(lambda module: flat(module, **options))
    with default_device(ACCELERATOR):
        twin = fsdp.state_dict_utils.create_cpu_state_dict(model.state_dict(), pin_memory=True)
        model(torch.ones(3, 6)).sum().backward()
    assert all(value.device.type == "cpu" for value in twin.values())
    model.zero_grad()
    train(model, adamw(model), 2)
    assert_trained(model, 2)


@pytest.mark.accelerator
@on_accelerators(2)
def test_ranks_with_an_accelerator_have_different_numbers_of_batches() -> None:
    model = flat(nn.Linear(6, 6))
    with default_device(ACCELERATOR):
        _uneven(model, ACCELERATOR)
