"""Training in mixed and in 16-bit precision is what one process would do that casts in the same places.

[Note: reference] `train_by_hand` keeps one master model. In each turn it makes a low-precision copy, has it compute
every rank's part of the batch, and adds up the gradients that the ranks would have: divided, in the dtype in which they
are sent, in rank order. All this is deterministic, so the sharded model must come to the same bits.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import MixedPrecision, use_torch_collectives
from tests.helpers.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    REGRESSION,
    TOKENS,
    MakeModel,
    MakeOptimizer,
    Task,
    Training,
    assert_bit_equal,
    from_one_rank,
    fully_sharded,
    nested_mlp,
    tiny_transformer,
    train_sharded,
)

# The reference


@dataclass(frozen=True)
class Precise:
    """In which dtypes is stepped, computed and reduced."""

    own: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def options(self) -> dict[str, Any]:
        """How a wrapper is told."""
        if self.own is self.compute is self.reduce:
            return {}
        return {"mixed_precision": MixedPrecision(param_dtype=self.compute, reduce_dtype=self.reduce)}

    def training(self, make_model: MakeModel, make_optimizer: MakeOptimizer, task: Task, **how: Any) -> Training:
        """Of this model cast to the own dtype, with inputs of at least the computation's."""

        def batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
            inputs, targets = task.batch(generator, rows)
            return inputs.to(self.own) if inputs.is_floating_point() else inputs, targets

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return task.loss(outputs.float(), targets)

        def make(wrap: Wrap) -> nn.Module:
            return make_model(lambda module: wrap(module.to(self.own)))

        return Training(make_model=make, make_optimizer=make_optimizer, task=Task(batch, loss), **how)


MIXED = {
    "bfloat16": Precise(SINGLE, BRAIN, BRAIN),
    "bfloat16, reduced in float32": Precise(SINGLE, BRAIN, SINGLE),
    "float16": Precise(SINGLE, HALF, HALF),
    "float16, reduced in float32": Precise(SINGLE, HALF, SINGLE),
    "float32, reduced in bfloat16": Precise(SINGLE, SINGLE, BRAIN),
    "float64 master of bfloat16": Precise(DOUBLE, BRAIN, BRAIN),
}
PURE = {
    "pure bfloat16": Precise(BRAIN, BRAIN, BRAIN),
    "pure bfloat16, reduced in float32": Precise(BRAIN, BRAIN, SINGLE),
    "pure float16": Precise(HALF, HALF, HALF),
    "pure float64": Precise(DOUBLE, DOUBLE, DOUBLE),
}
PRECISIONS = {**MIXED, **PURE}


def train_by_hand(training: Training, precise: Precise) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of the global batch, and the weights at the end: see Note [reference]."""
    master = training.model(keep)
    optimizer = training.make_optimizer(master.parameters())
    losses = []
    for step in range(training.steps):
        of_ranks = [gradients_by_hand(training, step, rank, master, precise) for rank in range(dist.get_world_size())]
        losses.append(sum(loss for loss, _ in of_ranks) / len(of_ranks))
        for param, *gradients in zip(master.parameters(), *(found for _, found in of_ranks), strict=True):
            param.grad = mean_by_hand(gradients, precise)
        optimizer.step()
    return torch.tensor(losses, dtype=torch.float64), master.state_dict()


def gradients_by_hand(
    training: Training, step: int, rank: int, master: nn.Module, precise: Precise
) -> tuple[float, list[Tensor]]:
    """One rank's loss, and the gradients that it sends; it adds them over micro-batches in the wider dtype."""
    wide = torch.promote_types(precise.own, precise.reduce)
    sums = [torch.zeros_like(param, dtype=wide) for param in master.parameters()]
    total_loss = 0.0
    for turn in range(training.accumulate):
        low = copy.deepcopy(master).to(precise.compute)
        inputs, targets = (part.chunk(dist.get_world_size())[rank] for part in training.batch(step, turn))
        output = low(inputs.to(precise.compute) if inputs.is_floating_point() else inputs)
        loss = training.task.loss(output, targets) / training.accumulate
        loss.backward()
        total_loss += loss.item()
        for total, param in zip(sums, low.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad.to(wide) / predivide_factor()
    return total_loss, [total.to(precise.reduce) for total in sums]


def mean_by_hand(gradients: list[Tensor], precise: Precise) -> Tensor:
    total = gradients[0].to(torch.promote_types(precise.own, precise.reduce))
    for gradient in gradients[1:]:
        total += gradient
    return total.to(precise.own).div_(dist.get_world_size() / predivide_factor())


def predivide_factor() -> float:
    """What divides gradients before they are summed, so that 16 bits can hold the sum."""
    return {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}[dist.get_world_size()]


# Parity

# With a power of two for a learning rate: torch multiplies by it and adds at once, and in 16 bits rounds once or twice,
# depending on where in memory an element is.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.125, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
}
MODELS: dict[str, tuple[MakeModel, Task]] = {
    "mlp": (nested_mlp, REGRESSION),
    "transformer": (tiny_transformer, TOKENS),
    "recomputed": (partial(tiny_transformer, recompute="outside"), TOKENS),
    "tied": (partial(tiny_transformer, tied=True, nested=False), TOKENS),
}


@parametrize_cases(
    at_most=10,
    precision=list(PRECISIONS),
    world_size=[3, 1, 2, 4],
    model=list(MODELS),
    optimizer=list(OPTIMIZERS),
    reshard_after_forward=[True, False],
    flatten_parameters=[True, False],
    accumulate=[1, 3],
)
@on_ranks("world_size")
def test_training_equals_casts_by_hand_bit_for_bit(case: Case) -> None:
    options = case.only("reshard_after_forward", "flatten_parameters")
    precise = PRECISIONS[case.precision]
    make_model, task = MODELS[case.model]
    training = precise.training(make_model, OPTIMIZERS[case.optimizer], task, accumulate=case.accumulate)
    sharded = train_sharded(training, fully_sharded(**precise.options, **options))
    losses, weights = from_one_rank(partial(train_by_hand, training, precise))
    torch.testing.assert_close(sharded.losses, losses, rtol=1e-12, atol=0)  # ranks add their losses in another order
    assert list(sharded.weights) == list(weights)
    for name, value in weights.items():
        assert sharded.weights[name].dtype is precise.own
        assert torch.equal(sharded.weights[name], value), name


FLAGS: list[tuple[dict[str, Any], MixedPrecision]] = [
    ({}, MixedPrecision(param_dtype=HALF)),
    ({"compute_dtype": BRAIN}, MixedPrecision(param_dtype=BRAIN)),
    ({"compute_dtype": BRAIN, "fp32_reduce_scatter": True}, MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE)),
]


@pytest.mark.parametrize(("flags", "policy"), FLAGS)
@on_ranks(3)
def test_fairscales_flags_train_as_the_policy_that_says_the_same(flags: dict[str, Any], policy: MixedPrecision) -> None:
    training = MIXED["bfloat16"].training(tiny_transformer, OPTIMIZERS["sgd"], TOKENS)
    wraps = [fully_sharded(mixed_precision=True, **flags), fully_sharded(mixed_precision=policy)]
    assert_bit_equal(*(train_sharded(training, wrap) for wrap in wraps))


@parametrize_pairs(
    at_most=5,
    precision=["bfloat16", "float16", "bfloat16, reduced in float32", "pure bfloat16", "pure float16"],
    world_size=[2, 3],
    accumulate=[1, 3],
)
@on_ranks("world_size")
def test_torchs_own_collectives_give_the_same_gradients_but_for_their_sums(precision: str, accumulate: int) -> None:
    """gloo adds in the dtype that is sent: one rounding, to half a unit in the last place, for each rank."""
    precise = PRECISIONS[precision]
    own = _gradients(precise, accumulate)
    use_torch_collectives()
    try:
        found = _gradients(precise, accumulate)
    finally:
        use_torch_collectives(False)
    rounding = dist.get_world_size() * torch.finfo(precise.reduce).eps
    for one, other in zip(found, own, strict=True):
        assert one.dtype is precise.own
        assert (one - other).abs().max() <= rounding * other.abs().max()


def _gradients(precise: Precise, accumulate: int) -> list[Tensor]:
    training = precise.training(nested_mlp, OPTIMIZERS["sgd"], REGRESSION, accumulate=accumulate)
    model: Any = training.model(fully_sharded(**precise.options))
    for turn in range(accumulate):
        inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in training.batch(0, turn))
        with model.no_sync() if turn < accumulate - 1 else nullcontext():
            training.task.loss(model(inputs), targets).backward()
    return [param.grad for param in model.parameters()]
