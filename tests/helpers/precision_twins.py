"""The precisions that people train in, each with an unsharded twin, and how close to it is equal.

[Note: noise in 16 bits] As in `tests.helpers.parity`, the measure is the distance between unsharded trainings that
differ only in the order of their sums and means. In 16 bits that is far from nothing, and a single weight may land a
whole unit in the last place away, so the largest difference would say little. Distances are norms instead: of the
difference of two updates (what was learned, not the weights, most of which were there before), relative to the update.
They are taken for every tensor, where few elements make them jumpy, and for all of a unit together, where the noise
averages out and a wrong factor on gradients shows plainly. That it would show is asserted wherever trainings are
compared in a grid.

SGD with momentum is linear in a constant factor on gradients, so a training with another learning rate is one with
a wrong factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from fsdp import MixedPrecision
from tests.helpers.models import Wrap, keep
from tests.helpers.parity import Trained, Training, every_rank, fully_sharded, reordered, train_alone

# The noise is the largest of five samples, not a bound; that of single numbers may be small by chance.
NOISE_FACTORS = {"loss": 8.0, "norm": 8.0, "tensors": 4.0, "units": 4.0}
NOISE_FLOOR = 1e-6  # eight units in the last place of float32

# The wrong factor that is hardest to see among those that sharding could make of world size and accumulation.
WRONG_FACTOR = 2 / 3


class MixedTwin(nn.Module):
    """A module that computes in `dtype` with casts of its parameters, which keep their own.

    Autograd's way back through the casts gives them gradients in their own dtype, and adds up there.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        low = {name: param.to(self.dtype) for name, param in self.module.named_parameters()}
        cast = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in inputs)
        return functional_call(self.module, low, cast)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class InPrecision:
    """A precision: how the sharded model is told to train in it, and what does the same without sharding."""

    name: str
    stored: torch.dtype = torch.float32  # parameters, as they are before they are wrapped
    options: Mapping[str, Any] = field(default_factory=dict)  # of the wrapper
    plain: Wrap = keep  # what the unsharded model is put in
    scaling: Mapping[str, Any] | None = None  # of the loss

    def wrap(self, **options: Any) -> Wrap:
        """The wrap under test, in this precision, with these options besides."""
        sharded = fully_sharded(**self.options, **options)
        return lambda module: sharded(module.to(self.stored))

    def training(self, training: Training) -> Training:
        """The same training in this precision."""
        return replace(training, plain=lambda module: self.plain(module.to(self.stored)), scaling=self.scaling)

    def __str__(self) -> str:
        return self.name


PRECISIONS = {
    precision.name: precision
    for precision in (
        InPrecision(name="float32"),
        InPrecision(
            name="bfloat16_mixed",
            options={"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
            plain=partial(MixedTwin, dtype=torch.bfloat16),
        ),
        InPrecision(
            name="float16_mixed",
            options={"mixed_precision": True},
            plain=partial(MixedTwin, dtype=torch.float16),
            scaling={"init_scale": 2.0**10, "growth_interval": 2},  # it grows on the way
        ),
        InPrecision(name="bfloat16", stored=torch.bfloat16),
    )
}


# Distance


@dataclass(frozen=True)
class Gap:
    """How far two trainings of one model are apart."""

    loss: float  # the largest over steps, relative
    norm: float  # the same of the gradient's norm before clipping, where it is finite
    tensors: dict[str, float]  # norm of the difference of two updates, relative to the update
    units: dict[str, float]  # the same, for what a unit holds taken together

    def largest(self, quantity: str) -> float:
        if quantity in ("loss", "norm"):
            return getattr(self, quantity)
        # NaN counts as the largest, which max() alone would not promise.
        return max((float("inf") if gap != gap else gap for gap in getattr(self, quantity).values()), default=0.0)


def unit_of(name: str) -> str:
    """The unit of a `TinyTransformer` that holds the tensor of this name."""
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root"


def gap(one: Trained, reference: Trained, start: Mapping[str, Tensor]) -> Gap:
    """How far `one` is from `reference`, both having begun with the weights `start`."""
    kinds = [{name: (value.dtype, value.shape) for name, value in each.weights.items()} for each in (one, reference)]
    assert kinds[0] == kinds[1], f"the state dicts have different names, dtypes or shapes: {kinds}"
    apart = {name: one.weights[name].double() - value.double() for name, value in reference.weights.items()}
    update = {name: value.double() - start[name].double() for name, value in reference.weights.items()}
    assert torch.equal(one.norms.isfinite(), reference.norms.isfinite()), f"{one.norms} against {reference.norms}"
    finite = reference.norms.isfinite()
    return Gap(
        _largest_ratio(one.losses, reference.losses),
        _largest_ratio(one.norms[finite], reference.norms[finite]),
        _ratios(apart, update, str),
        _ratios(apart, update, unit_of),
    )


def _largest_ratio(one: Tensor, reference: Tensor) -> float:
    return float(((one - reference).abs() / reference.abs()).max()) if len(reference) else 0.0


def _ratios(
    apart: Mapping[str, Tensor], update: Mapping[str, Tensor], part_of: Callable[[str], str]
) -> dict[str, float]:
    norms = [_norms(tensors, part_of) for tensors in (apart, update)]
    # Where nothing was learned, nothing may differ.
    return {part: norms[0][part] / norm if norm else float(norms[0][part] > 0) for part, norm in norms[1].items()}


def _norms(tensors: Mapping[str, Tensor], part_of: Callable[[str], str]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        squares[part_of(name)] = squares.get(part_of(name), 0.0) + float(tensor.square().sum())
    return {part: square**0.5 for part, square in squares.items()}


# Comparison


@dataclass(frozen=True)
class Measured:
    """The unsharded training, and what can be expected of a sharded one."""

    start: dict[str, Tensor]
    reference: Trained
    allowed: dict[str, float]  # by quantity
    noise: list[Gap]

    @classmethod
    def of(cls, training: Training) -> Measured:
        """Train several times in one process."""
        start = train_alone(replace(training, steps=0)).weights
        reference = train_alone(training)
        others = [train_alone(training, parts) for parts in (every_rank, reordered(1), reordered(2))]
        alike = (_train_alone_like_ranks(training), _train_alone_rounding_sums(training))
        noise = [gap(trained, reference, start) for trained in (*others, *alike)]
        allowed = {
            quantity: factor * max(each.largest(quantity) for each in noise) + NOISE_FLOOR
            for quantity, factor in NOISE_FACTORS.items()
        }
        return cls(start, reference, allowed, noise)

    def compare(self, trained: Trained) -> Gap:
        """Assert that `trained` is equal to the reference within noise."""
        found = gap(trained, self.reference, self.start)
        scales = [each.scales.tolist() for each in (trained, self.reference)]
        assert scales[0] == scales[1], f"the scales of the loss are {scales[0]}, unsharded {scales[1]}"
        # Written so that NaN fails.
        apart = [quantity for quantity, allowed in self.allowed.items() if not found.largest(quantity) <= allowed]
        assert not apart, f"sharded and unsharded training differ in {', '.join(apart)}: {found}; noise: {self.noise}"
        return found

    def assert_sees_a_wrong_factor(self, training: Training) -> None:
        """A constant factor on the gradients of any one unit would have been found."""
        wrong = train_alone(replace(training, make_optimizer=_with_wrong_factor))
        found = gap(wrong, self.reference, self.start)
        blind = {unit: size for unit, size in found.units.items() if not size > 1.5 * self.allowed["units"]}
        assert not blind, f"a factor of {WRONG_FACTOR} would pass: {blind}, allowed is {self.allowed['units']}"


def _train_alone_like_ranks(training: Training) -> Trained:
    """The ranks' parts one after the other, each with the mean over its own rows; gradients are averaged afterwards.

    Where the number of ranks is no power of two, every gradient of a row is rounded another way.
    """
    size = dist.get_world_size()

    def plain(module: nn.Module) -> nn.Module:
        model = training.plain(module)
        for param in model.parameters():
            param.register_hook(lambda grad: grad / size)
        return model

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return training.task.loss(outputs, targets) * size

    trained = train_alone(replace(training, plain=plain, task=replace(training.task, loss=loss)), every_rank)
    return replace(trained, losses=trained.losses / size)


def _train_alone_rounding_sums(training: Training) -> Trained:
    """Accumulated gradients are rounded once more, as where they are reduced in the dtype of the computation."""
    twin = training.plain(nn.Linear(1, 1))
    digits = 1 - math.log2(torch.finfo(twin.dtype if isinstance(twin, MixedTwin) else torch.float32).eps)

    def optimizer_of(params: Any) -> torch.optim.Optimizer:
        optimizer = training.make_optimizer(params)
        optimizer.register_step_pre_hook(lambda *_: _round_gradients(optimizer, digits))
        return optimizer

    return train_alone(replace(training, make_optimizer=optimizer_of))


def _round_gradients(optimizer: torch.optim.Optimizer, digits: float) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            mantissa, exponent = torch.frexp(param.grad.float())
            param.grad = torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent).to(param.grad.dtype)


def fast_sgd_with_momentum(params: Any, factor: float = 1.0) -> torch.optim.Optimizer:
    """Faster than usual, so that weights in bfloat16 move by several units in the last place."""
    return torch.optim.SGD(params, lr=0.5 * factor, momentum=0.9)


_with_wrong_factor = partial(fast_sgd_with_momentum, factor=WRONG_FACTOR)
