"""Blocks quantised by the book, one after the other, and models that communicate so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import QuantizedGather, QuantizedReduce, compress
from fsdp.distributed.consensus import from_everyone
from fsdp.engine.unit import unit_of
from tests.helpers.equality import assert_same
from tests.helpers.forms import full_state, inside, sharded

BLOCK = 16  # small, so that the pieces of small models have several blocks


def rounded(row: Tensor, bits: int, block: int = BLOCK) -> Tensor:
    """A row as it arrives."""
    largest, found = 2 ** (bits - 1) - 1, []
    for part in row.split(block):
        scale = part.abs().max() / largest
        found.append(part if scale == 0 else (part / scale).round() * scale)
    return torch.cat(found) if found else row


def layers() -> nn.Module:
    """Three linear layers whose elements no number of ranks divides, and that no block divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3))


def compressed(
    form: str = "flat",
    reduce: QuantizedReduce | None = None,
    gather: QuantizedGather | None = None,
    model: nn.Module | None = None,
    replicas: QuantizedReduce | None = None,
    **options: Any,
) -> Any:
    """Collective. A sharded model that is compressed, as `.compression` of its module says."""
    model = sharded(layers() if model is None else model, form, (nn.Linear,), **options)
    inside(model).compression = compress(model, reduce=reduce, gather=gather, replicas=replicas)
    return model


def batch(step: int = 0, rank: int | None = None) -> Tensor:
    """This rank's batch of a step, or another rank's."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, step: int = 0) -> None:
    model(batch(step)).square().mean().backward()


def averaged_gradient(**policies: Any) -> tuple[Tensor, Tensor]:
    """Collective. The average gradient of a parameter that only rank 0 uses, over 64 backwards, and what it has there.

    One element of each block has a large gradient.
    """
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2 * BLOCK))
    module.forward = lambda scale: (module.weight * scale).sum()  # type: ignore[method-assign]
    model = compressed(model=module, **policies)
    (handle,) = handles_of(model)
    scale = torch.full((2 * BLOCK,), 0.05)
    scale[::BLOCK] = 1.0
    total = torch.zeros_like(handle.flat_param)
    for _ in range(64):
        model(scale * (dist.get_rank() == 0)).backward()
        total += handle.flat_param.grad
        model.zero_grad()
    return total.detach() / 64, scale


def handles_of(model: Any) -> list[Any]:
    units = dict.fromkeys(filter(None, map(unit_of, inside(model).modules())))
    return [handle for unit in units for handle in unit.handles]


def gathered_gradients(model: Any) -> list[Tensor]:
    """Collective. Of each flat parameter the reduced gradient, with the shards of all ranks one after the other."""
    found = []
    for handle in handles_of(model):
        handle.flat_param.bring_gradient()
        grad = handle.flat_param.grad
        if handle.orig_params is not None:
            handle.orig_params.collect_gradients()
            grad = handle.flat_param.grad
        found.append(torch.cat(from_everyone([handle.comm], grad.detach().view(-1).clone())))
    return found


@contextmanager
def sent_gradients() -> Iterator[dict[str, Tensor]]:
    """Record what each flat parameter hands over to its reduction, by its name: ``[world_size, n]`` in float32."""
    from fsdp.engine.grad_buffer import GradientBuffer

    found: dict[int, Tensor] = {}
    take = GradientBuffer.take

    def noted(buffer: GradientBuffer) -> Any:
        taken = take(buffer)
        found[id(buffer)] = (taken.flat.detach() / taken.divisor).float().view(dist.get_world_size(), -1).clone()
        return taken

    with mock.patch.object(GradientBuffer, "take", noted):
        yield found  # type: ignore[misc]


def assert_resumes_with_the_same_bits(begun: Callable[[], tuple[Any, torch.optim.Optimizer]], folder: Path) -> None:
    """Collective. A training that is saved with its error feedback and loaded goes on as the one that was not."""
    model, optimizer = begun()
    _train(model, optimizer, range(2))
    with inside(model).compression.stored_in(optimizer):
        fsdp.save(folder, model, optimizer)
    _train(model, optimizer, range(2, 4))
    resumed, its_optimizer = begun()
    fsdp.load(folder, resumed, its_optimizer)
    inside(resumed).compression.load_from(its_optimizer)
    for each in (optimizer, its_optimizer):
        assert not any("quantized_reduce_feedback" in state for state in each.state.values())
    _train(resumed, its_optimizer, range(2, 4))
    assert_same(full_state(resumed), full_state(model))


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
