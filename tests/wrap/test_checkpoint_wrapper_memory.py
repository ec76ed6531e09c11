"""What `checkpoint_wrapper` keeps between forward and backward, and where; and the same on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp.wrap.checkpoint_wrapper import checkpoint_wrapper
from fsdp.wrap.live_bytes import LiveBytes
from tests.helpers.accelerator import ACCELERATOR, device_module, later_kernels
from tests.helpers.equality import assert_same
from tests.wrap.test_checkpoint_wrapper import Function, gradients, inputs, kept_or_offloaded, layers

IMPLEMENTATION = sys.modules["fsdp.wrap.checkpoint_wrapper"]  # the package may mean the function by this name

# Memory


WIDTH, ROWS = 16, 64
ACTIVATION = WIDTH * ROWS * 4
SMALL = 4096 // 2  # stand-ins


def tanhs(depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Tanh() for _ in range(depth)))


def kept_bytes(module: Callable[[Tensor], Any]) -> int:
    """What is alive between forward and backward, besides the output: each layer makes its input."""
    batch = torch.zeros(ROWS, WIDTH, requires_grad=True)
    with LiveBytes("cpu") as made:
        output = module(batch)
        size = made.live.total() - ACTIVATION
        output.sum().backward()
    assert batch.grad is not None
    return size


def test_activations_are_not_kept() -> None:
    # A tanh keeps its result; the first one's input and the last one's result are not counted.
    assert kept_bytes(tanhs()) == 3 * ACTIVATION
    assert kept_bytes(checkpoint_wrapper(tanhs())) < SMALL


@pytest.mark.parametrize("nested", [False, True])
def test_inputs_of_each_checkpointed_layer_are_kept_unless_they_are_inside_of_another(nested: bool) -> None:
    module = nn.Sequential(*(checkpoint_wrapper(tanhs()) for _ in range(3)))
    size = kept_bytes(checkpoint_wrapper(module) if nested else module)
    assert size < SMALL if nested else 2 * ACTIVATION <= size < 2 * ACTIVATION + SMALL


def test_inputs_in_containers_are_dropped_like_others_inside_of_another_checkpoint() -> None:
    class Outer(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            for inner in inners:
                batch = inner([{"batch": batch}], other=batch)
            return batch

    inners = [
        checkpoint_wrapper(Function(lambda _, nest, other: nest[0]["batch"].tanh() * other.tanh())) for _ in range(3)
    ]
    assert kept_bytes(checkpoint_wrapper(Outer())) < SMALL


@contextmanager
def host(device: str) -> Iterator[None]:
    with mock.patch.object(IMPLEMENTATION, "HOST", torch.device(device)):
        yield


@pytest.mark.parametrize("nested", [False, True])
def test_offload_moves_inputs_and_nothing_else(nested: bool) -> None:
    # As if the host were somewhere that keeps no bytes.
    moved = []
    offloaded = nn.Sequential(*(checkpoint_wrapper(tanhs(), offload_to_cpu=True) for _ in range(3)))
    module = checkpoint_wrapper(offloaded, offload_to_cpu=True) if nested else offloaded
    pack = IMPLEMENTATION._Offloaded.__init__

    def watched(self: Any, tensor: Tensor) -> None:
        moved.append(tensor.shape)
        pack(self, tensor)

    batch = torch.zeros(ROWS, WIDTH, requires_grad=True)
    with host("meta"), mock.patch.object(IMPLEMENTATION._Offloaded, "__init__", watched), LiveBytes("cpu") as made:
        output = module(batch)
        assert made.live.total() - ACTIVATION < SMALL
    assert [shape for shape in moved if shape == output.shape] == [(ROWS, WIDTH)] * (1 if nested else 3)


# On CUDA


@pytest.mark.accelerator
@kept_or_offloaded
def test_gradients_on_an_accelerator_are_those_of_the_plain_module(offload_to_cpu: bool) -> None:
    results: list[list[Tensor | None]] = []
    for module in (layers(), layers()):
        module.to(ACCELERATOR)
        if results:
            module = nn.Sequential(*(checkpoint_wrapper(layer, offload_to_cpu) for layer in module))
        torch.manual_seed(5)
        batch = inputs().detach().to(ACCELERATOR).requires_grad_()
        with later_kernels():
            for _ in range(3):  # copies of one step and the next go through the same memory
                module(batch).sin().sum().backward()
        results.append(gradients(module, [batch]))
    assert_same(*results)


@pytest.mark.accelerator
def test_inputs_come_back_on_another_stream_than_they_have_left_on() -> None:
    side = device_module().Stream()

    def beside(weight: Tensor, batch: Tensor) -> Tensor:
        with device_module().stream(side):
            return (batch * weight).sin()

    batch = torch.linspace(0, 1, 1000, device=ACCELERATOR).requires_grad_()
    module = Function(beside).to(ACCELERATOR)
    device_module().synchronize()  # so that what is beside need not wait for them
    found = []
    for each in (module, checkpoint_wrapper(module, offload_to_cpu=True)):
        batch.grad = None
        device_module()._sleep(50_000_000)
        output = each(batch)
        with device_module().stream(side):
            output.sum().backward()
        device_module().synchronize()
        found.append(batch.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


@pytest.mark.accelerator
def test_random_numbers_on_an_accelerator_are_restored_for_inputs_in_containers() -> None:
    def drop(weight: Tensor, *, batches: list[Tensor]) -> Tensor:
        return nn.functional.dropout(batches[0] * weight, 0.5).sin()

    found = []
    for module in (Function(drop).to(ACCELERATOR), checkpoint_wrapper(Function(drop).to(ACCELERATOR))):
        torch.manual_seed(5)
        batch = torch.ones(1000, device=ACCELERATOR, requires_grad=True)
        module(batches=[batch]).sum().backward()
        found.append(batch.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


@pytest.mark.accelerator
def test_offload_frees_the_devices_memory() -> None:
    size = 8 * 2**20

    def kept(offload_to_cpu: bool) -> int:
        module = nn.Sequential(*(checkpoint_wrapper(tanhs(), offload_to_cpu) for _ in range(4)))
        batch = torch.zeros(size // 4, device=ACCELERATOR, requires_grad=True)
        before = device_module().memory_allocated()
        output = module(batch)
        after = device_module().memory_allocated()
        output.sum().backward()
        return after - before

    assert kept(False) == pytest.approx(4 * size, abs=2**16)
    assert kept(True) == pytest.approx(size, abs=2**16)  # the output
