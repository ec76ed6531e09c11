"""`fully_shard` beside torch's other composable functions, optimizers that step in backward, inputs from elsewhere."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

import fsdp
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.offload import Far
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import Counting, Traffic

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
every_replicate = pytest.mark.parametrize("where", ["replicate", "replicate_with_fsdp"])


def _replicate(where: str) -> Any:
    return importlib.import_module(f"torch.distributed._composable.{where}").replicate


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 5)), nn.Linear(5, 3)).double()


def _batches() -> list[Tensor]:
    return list(torch.randn(3, 2 * dist.get_world_size(), 4, dtype=torch.double, generator=torch.Generator()))


def _own(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@parametrize_pairs(where=["replicate", "replicate_with_fsdp"], is_inside=[True, False])
@on_ranks(2)
def test_replicated_and_sharded_modules_train_as_one_model(where: str, is_inside: bool) -> None:
    model, plain = _model(), _model()
    if is_inside:
        fsdp.fully_shard(model[1])
        _replicate(where)(model)
    else:
        _replicate(where)(model[1])
        fsdp.fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=False) for each in (model, plain)]
    for batch in _batches():
        model(_own(batch)).square().mean().backward()
        plain(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    sharded = [isinstance(param, DTensor) and param.placements[0].is_shard() for param in model.parameters()]
    assert sharded == [number in (2, 3) if is_inside else number not in (2, 3) for number in range(6)]
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(param), expected, **TOLERANCE)


@every_replicate
@on_ranks(1)
def test_a_sharded_module_cannot_be_replicated(where: str) -> None:
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        _replicate(where)(fsdp.fully_shard(nn.Linear(4, 3)))


@on_ranks(2)
def test_an_optimizer_for_each_parameter_steps_in_backward_as_with_torchs() -> None:
    trained, received = [], []
    for fully_shard in (fsdp.fully_shard, torchs_fully_shard):
        model = _model()
        for module in (model[0], model[1], model):
            fully_shard(module)
        received.append(Traffic())
        optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}
        stepped: list[Tensor] = []

        def step(param: Tensor, optimizers: Any = optimizers, stepped: Any = stepped) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()
            stepped.append(param)

        for param in optimizers:
            param.register_post_accumulate_grad_hook(step)
        for number, batch in enumerate(_batches(), 1):
            with Counting(received[-1]):
                model(_own(batch)).square().mean().backward()
            assert all(param.grad is None for param in model.parameters())
            assert len(stepped) == number * len(optimizers)
        trained.append([copy.copy(param.to_local()) for param in optimizers])  # type: ignore[attr-defined]
    assert 0 < received[0].values <= received[1].values
    for own, expected in zip(*trained, strict=True):
        torch.testing.assert_close(own, expected, **TOLERANCE)


@on_ranks(1)
def test_inputs_of_the_outermost_module_come_to_its_device() -> None:
    model = fsdp.fully_shard(Scaled(4, 3))
    rows, scale = torch.ones(2, 4), torch.tensor(2.0)
    expected = model({"rows": [rows]}, scale=scale)
    assert torch.equal(model({"rows": [Far(rows)]}, scale=Far(scale)), expected)
    packed = nn.utils.rnn.PackedSequence(Far(rows), torch.tensor([2]))
    assert torch.equal(fsdp.fully_shard(nn.LSTM(4, 3))(packed)[0].batch_sizes, packed.batch_sizes)
    seen: list[Tensor] = []
    outer = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(nn.Identity())))
    outer[0].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    outer(rows)
    assert seen[0] is rows


class Scaled(nn.Linear):
    def forward(self, inputs: dict[str, list[Tensor]], *, scale: Tensor) -> Tensor:  # type: ignore[override]
        (rows,) = inputs["rows"]
        return super().forward(rows) * scale


@on_ranks(1)
def test_the_wrapper_leaves_inputs_where_they_are() -> None:
    """As FairScale's does: lengths of sequences, say, have to be on the host."""
    module, lengths = Keeping(4, 3), Far(torch.ones(2))
    fsdp.FullyShardedDataParallel(module)(torch.ones(2, 4), lengths)
    assert module.lengths is lengths


class Keeping(nn.Linear):
    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        self.lengths = lengths
        return super().forward(inputs)
