"""What distributed tests share: models (from `tests.helpers.models`), three ways to train them, and the comparison.

Everything here is deterministic and the same on every rank; a batch is a function of its step. So one rank trains
what is not distributed, and tells the others (`from_one_rank`): the cores are few.

[Note: noise] Two float32 runs that differ only in the order of their sums drift apart; no sharded run can be
asked to be closer to an unsharded one than those are to each other. So a comparison trains the unsharded
model three times (on the global batch, on the same rows in another order, and on the ranks' parts one after
the other) and takes the distances between these as its measure.

The package under test is imported inside the functions that need it.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import TinyTransformer, Wrap, keep
from tests.helpers.models import nested_mlp as nested_mlp
from tests.helpers.models import tiny_transformer as tiny_transformer
from tests.helpers.ranks import RankPool

MakeModel = Callable[[Wrap], nn.Module]
Made = TypeVar("Made")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

NOISE_FACTOR = 8.0  # the noise is the largest of three samples, not a bound
NOISE_FLOOR = 1e-6  # eight units in the last place: all samples can come out at zero, as on a world of one


class Alone:
    """All that a process group needs to be for a world of one, without `torch.distributed`."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def alone(module: nn.Module, **options: Any) -> Any:
    """Wrap a module in a world of one."""
    return fully_sharded(process_group=Alone(), **options)(module)


class RanksTestCase(unittest.TestCase):
    """For grids with `parameterized.expand`, whose methods take no fixtures: `self.ranks(n).run(body)`."""

    ranks: RankPool

    @pytest.fixture(autouse=True)
    def _take_ranks(self, ranks: RankPool) -> None:
        self.ranks = ranks


def fully_sharded(**options: Any) -> Wrap:
    """The wrap under test, with these options."""
    from fsdp import FullyShardedDataParallel

    return partial(FullyShardedDataParallel, **options)


# Optimizers


def sgd_with_momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The strictest: a wrong factor on all gradients changes its weights, where Adam hides it."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


# Data


@dataclass(frozen=True)
class Task:
    """What a kind of model learns."""

    batch: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]  # (generator, rows) -> (inputs, targets)
    loss: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> the mean over rows


def _regression_batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 5, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def _token_batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    shape = (rows, TinyTransformer.CONTEXT + 1)
    tokens = torch.randint(TinyTransformer.VOCABULARY, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


REGRESSION = Task(_regression_batch, F.mse_loss)
TOKENS = Task(_token_batch, _token_loss)


# Training


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained and how, however it is distributed."""

    make_model: MakeModel
    make_optimizer: MakeOptimizer
    steps: int = 2
    task: Task = REGRESSION
    rows: int = 4  # in each rank's batch
    accumulate: int = 1  # batches per step
    no_sync: bool = True  # all batches of a step but the last are under `no_sync`
    clip: float | None = None  # the norm that gradients are clipped to
    device: str = "cpu"
    plain: Wrap = keep  # what the unsharded model is put in to compute in another precision than it is stored in
    scaling: Mapping[str, Any] | None = None  # arguments of the scaler of the loss; None trains without one

    def model(self, wrap: Wrap) -> nn.Module:
        """The model under `wrap`, made on the device that it is trained on."""
        with nullcontext() if self.device == "cpu" else torch.device(self.device):
            return self.make_model(wrap)

    def batch(self, step: int, turn: int) -> tuple[Tensor, Tensor]:
        """The global batch: what all ranks together see in one turn of a step."""
        generator = torch.Generator().manual_seed(1000 * step + turn)
        inputs, targets = self.task.batch(generator, self.rows * dist.get_world_size())
        return inputs.to(self.device), targets.to(self.device)


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    losses: Tensor  # [steps], float64: of the global batch
    norms: Tensor  # [steps], float64: of the gradient before clipping; empty without clipping
    scales: Tensor  # [steps], float64: of the loss, after each step; ones without a scaler
    weights: dict[str, Tensor]  # the whole state at the end, under the plain model's names


Parts = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]


def train_sharded(training: Training, wrap: Wrap | None = None, own: Parts | None = None) -> Trained:
    """Collective. Train the wrapped model, each rank on its part of every batch, or on its `own`."""
    from fsdp import ShardedGradScaler

    model = training.model(wrap or fully_sharded())

    def clip(max_norm: float) -> Tensor:
        return model.clip_grad_norm_(max_norm)  # type: ignore[operator]

    scaler = None if training.scaling is None else ShardedGradScaler(device=training.device, **training.scaling)
    record = _train(training, model, own or _own_part, model.no_sync, clip, scaler)  # type: ignore[arg-type]
    record["losses"] = _mean_over_ranks(record["losses"], training)
    return Trained(**record, weights=_owned(model.state_dict()))


def train_ddp(training: Training) -> Trained:
    """Collective. The same training with DistributedDataParallel."""
    module = training.model(keep)
    model = nn.parallel.DistributedDataParallel(module)
    clip = partial(nn.utils.clip_grad_norm_, list(module.parameters()))
    record = _train(training, model, _own_part, model.no_sync, clip, _plain_scaler(training))
    record["losses"] = _mean_over_ranks(record["losses"], training)
    return Trained(**record, weights=_owned(module.state_dict()))


def train_alone(training: Training, parts: Parts | None = None) -> Trained:
    """The same training in one process: on the global batch, or on `parts` of it one after the other."""
    model = training.plain(training.model(keep))
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    record = _train(training, model, parts or _whole, nullcontext, clip, _plain_scaler(training))
    return Trained(**record, weights=_owned(model.state_dict()))


def _plain_scaler(training: Training) -> torch.amp.GradScaler | None:
    return None if training.scaling is None else torch.amp.GradScaler(training.device, **training.scaling)


def _train(
    training: Training,
    model: nn.Module,
    parts: Parts,
    no_sync: Callable[[], AbstractContextManager[Any]],
    clip: Callable[[float], Tensor],
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Tensor]:
    optimizer = training.make_optimizer(model.parameters())
    record: dict[str, list[float]] = {"losses": [], "norms": [], "scales": []}
    for step in range(training.steps):
        optimizer.zero_grad()
        loss = 0.0
        for turn in range(training.accumulate):
            reduces = turn == training.accumulate - 1 or not training.no_sync
            with nullcontext() if reduces else no_sync():
                loss += sum(_backward(training, model, parts(*training.batch(step, turn)), scaler))
        if training.clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            record["norms"].append(float(clip(training.clip)))
        record["scales"].append(_step(optimizer, scaler))
        record["losses"].append(loss)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in record.items()}


def _backward(
    training: Training, model: nn.Module, parts: list[tuple[Tensor, Tensor]], scaler: torch.amp.GradScaler | None
) -> Iterator[float]:
    for inputs, targets in parts:
        outputs = model(inputs)
        # The loss is a sum over rows: in 16 bits it would say little.
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        loss = training.task.loss(outputs, targets) / (len(parts) * training.accumulate)
        (loss if scaler is None else scaler.scale(loss)).backward()
        yield loss.item()


def _step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> float:
    """Step, or skip the step if the scaler says so; returns the scale afterwards."""
    if scaler is None:
        optimizer.step()
        return 1.0
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def _whole(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(inputs, targets)]


def every_rank(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parts that the ranks see of a global batch."""
    size = dist.get_world_size()
    return list(zip(inputs.chunk(size), targets.chunk(size), strict=True))


def _own_part(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [every_rank(inputs, targets)[dist.get_rank()]]


def reordered(seed: int) -> Parts:
    """The global batch as one part, with its rows in an order of its own."""

    def parts(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).to(inputs.device)
        return [(inputs[order], targets[order])]

    return parts


def _mean_over_ranks(losses: Tensor, training: Training) -> Tensor:
    # After the training and not in it, where it would hide a collective that the model failed to wait for.
    total = losses.to(training.device)
    dist.all_reduce(total)
    return total.cpu() / dist.get_world_size()


def _owned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def from_one_rank(make: Callable[[], Made]) -> Made:
    """Collective. What `make` returns on the first rank, which alone calls it; it travels by pickle."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]  # type: ignore[return-value]


# Comparison


@dataclass(frozen=True)
class Distance:
    """How far two trainings are apart, each as a fraction of the larger value."""

    loss: float  # the largest over steps
    norm: float  # the largest over steps
    weight: float  # the largest over tensors, each relative to its own largest element
    where: str = ""  # the tensor with the largest

    def __str__(self) -> str:
        weight = f"weights {self.weight:.2e}" + (f" ({self.where})" if self.where else "")
        return f"losses {self.loss:.2e}, norms {self.norm:.2e}, {weight}"


@dataclass(frozen=True)
class Parity:
    """A sharded training against the unsharded one, and what could be expected."""

    training: Training
    reference: Trained
    distance: Distance

    @cached_property
    def noise(self) -> Distance:
        """Two more trainings, made by whoever first asks for it: most distances are below any noise."""
        return float32_noise(self.training, self.reference)

    def allowed(self, quantity: str, tolerance: float | None) -> float:
        if tolerance is not None:
            return tolerance
        if getattr(self.distance, quantity) <= NOISE_FLOOR:
            return NOISE_FLOOR
        return NOISE_FACTOR * getattr(self.noise, quantity) + NOISE_FLOOR


def distance(one: Trained, other: Trained) -> Distance:
    """The distance between two trainings of the same model; AssertionError when names or shapes differ."""
    shapes = [{name: tuple(value.shape) for name, value in side.weights.items()} for side in (one, other)]
    if shapes[0] != shapes[1]:
        odd = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
        listing = ", ".join(f"{name}: {shapes[0].get(name)} against {shapes[1].get(name)}" for name in odd)
        raise AssertionError(f"the state dicts have different names or shapes: {listing}")
    weights = {name: _relative(value, other.weights[name]) for name, value in one.weights.items()}
    # NaN counts as the largest, which max() alone would not promise.
    where = max(weights, key=lambda name: float("inf") if weights[name] != weights[name] else weights[name])
    norm = _relative(one.norms, other.norms, elementwise=True)
    return Distance(_relative(one.losses, other.losses, elementwise=True), norm, weights[where], where)


def float32_noise(training: Training, reference: Trained | None = None) -> Distance:
    """How far apart unsharded trainings are that differ only in the order of their sums: see Note [noise]."""
    reference = reference or train_alone(training)
    found = [distance(train_alone(training, parts), reference) for parts in (every_rank, reordered(1))]
    return Distance(*(max(getattr(d, field) for d in found) for field in ("loss", "norm", "weight")))


def assert_parity(
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    steps: int = 2,
    *,
    wrap: Wrap | None = None,
    own: Parts | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Parity:
    """Collective. The sharded model trains as the unsharded one does on the ranks' batches put together.

    Compares each step's loss and gradient norm and the final weights. `wrap` is `fully_sharded()` if not
    given; `own` is this rank's part of a batch, by default one for each rank; `options` are the other fields of
    `Training`. Two trainings may differ by `tolerance`, a fraction
    of the larger value; without one, by eight times the float32 noise of this very training plus 1e-6.
    """
    training = Training(make_model=make_model, make_optimizer=make_optimizer, steps=steps, **options)
    reference = from_one_rank(lambda: train_alone(training))
    parity = Parity(training, reference, distance(train_sharded(training, wrap, own), reference))
    for quantity in ("loss", "norm", "weight"):
        found, allowed = getattr(parity.distance, quantity), parity.allowed(quantity, tolerance)
        if not found <= allowed:  # written so that NaN fails
            raise AssertionError(
                f"sharded and unsharded training differ in {quantity} by {found:.2e}, allowed is "
                f"{allowed:.2e}; distance: {parity.distance}; float32 noise: {parity.noise}"
            )
    return parity


def assert_bit_equal(one: Trained, other: Trained) -> None:
    """Both trainings have the same losses and weights to the last bit; norms may round differently."""
    found = distance(one, other)
    same = torch.equal(one.losses, other.losses)
    if not same or any(not torch.equal(value, other.weights[name]) for name, value in one.weights.items()):
        raise AssertionError(f"the trainings are not equal bit for bit: {found}")


def _relative(one: Tensor, other: Tensor, *, elementwise: bool = False) -> float:
    """The largest difference, relative to the largest magnitude of the whole tensor or of each element."""
    if one.shape != other.shape:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    one, other = one.double(), other.double()
    size = torch.maximum(one.abs(), other.abs())
    if not elementwise:
        size = size.max()
    return float(((one - other).abs() / size.clamp_min(1e-30)).max())


def trained_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Collective for wrapped models. The whole gradients, from a step of size one."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return {name: before[name] - value for name, value in model.state_dict().items()}
