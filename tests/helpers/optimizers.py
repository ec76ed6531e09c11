"""What tests of optimizer state share: a model with parameters of every kind, optimizers, and their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.models import Wrap, keep, nested_mlp, seeded
from tests.helpers.parity import (
    NOISE_FACTOR,
    NOISE_FLOOR,
    REGRESSION,
    Distance,
    Parts,
    Task,
    Trained,
    distance,
    every_rank,
    fully_sharded,
    reordered,
)

ROWS = 12  # every world size here divides them


class Garden(nn.Module):
    """Nested units, tied, frozen, unused, 0-d and double-precision parameters."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        core = wrap(nn.Sequential(nn.Linear(7, 5), nn.PReLU()))
        self.trunk = wrap(nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), core))
        self.entry = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.fine = nn.Parameter(torch.linspace(0, 1, 5, dtype=torch.float64))
        self.tail = nn.Linear(5, 5, bias=False)
        self.tail.weight = self.entry.weight
        self.unused = wrap(nn.Linear(3, 2))
        self.idle = nn.Parameter(torch.ones(3))  # in a unit with others

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(torch.tanh(self.entry(inputs))) * self.scale
        return self.tail(self.frozen(hidden) + self.fine.float()).sum(1, keepdim=True)


def garden(wrap: Wrap = keep, seed: int = 0) -> Any:
    """The same weights on every call."""
    return seeded(Garden, wrap, seed)


def is_bias(name: str, param: nn.Parameter) -> bool:
    """For groups of parameters."""
    return name.endswith("bias")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def grouped_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Biases, and flat parameters of them (`group_by`), are not decayed; they come last."""
    kinds: list[list[nn.Parameter]] = [[], []]
    for name, param in model.named_parameters():
        own = getattr(param, "group", None)
        kinds[is_bias(name, param) if own is None else own].append(param)
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05, momentum=0.9)


def adadelta(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(model.parameters(), lr=0.1)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    """With a 0-d tensor beside the step."""
    return torch.optim.NAdam(model.parameters(), lr=1e-2)


def stateless(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    alone: bool = False,
    task: Task = REGRESSION,
    parts: Parts | None = None,
) -> None:
    """Collective unless `alone`. Each rank on its rows of the global batch, which every world size sees alike.

    Alone, on the global batch, or on `parts` of it one after the other.
    """
    for step in steps:
        batch = task.batch(torch.Generator().manual_seed(step), ROWS)
        pieces = [every_rank(*batch)[dist.get_rank()]] if not alone else parts(*batch) if parts else [batch]
        optimizer.zero_grad()
        for inputs, targets in pieces:
            (task.loss(model(inputs), targets) / len(pieces)).backward()
        optimizer.step()


def assert_within_noise(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    make: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    steps: range,
    task: Task = REGRESSION,
) -> None:
    """On a rank. Two trainings of a model are as close as unsharded ones are that sum in other orders: see
    Note [noise] in tests/helpers/parity.py.
    """
    samples: list[dict[str, Tensor]] = []
    for dtype in {value.dtype for value in expected.values()}:
        floor = max(NOISE_FLOOR, torch.finfo(dtype).eps)  # of 16 bits the last one may be another
        apart = _distance(found, expected, dtype)
        if not apart.weight <= floor:
            samples = samples or _unsharded(make, make_optimizer, steps, task)
            noise = max(_distance(sample, samples[0], dtype).weight for sample in samples[1:])
            assert apart.weight <= NOISE_FACTOR * noise + floor, f"{apart}; noise of this training: {noise:.2e}"


def _unsharded(
    make: Callable[[], nn.Module], make_optimizer: MakeOptimizer, steps: range, task: Task
) -> list[dict[str, Tensor]]:
    """The weights after trainings that differ in the order of their sums."""
    states = []
    for parts in (None, every_rank, reordered(1), reordered(2)):
        model = make()
        train(model, make_optimizer(model), steps, alone=True, task=task, parts=parts)
        states.append(dict(model.state_dict()))
    return states


def _distance(one: dict[str, Tensor], other: dict[str, Tensor], dtype: torch.dtype) -> Distance:
    """Between the weights of a dtype."""
    nothing = torch.empty(0)
    sides = [{name: value for name, value in side.items() if value.dtype == dtype} for side in (one, other)]
    return distance(*(Trained(nothing, nothing, nothing, side) for side in sides))


def from_first(value: Any) -> Any:
    """Collective. The first rank's, in memory of its own."""
    box = [value]
    dist.broadcast_object_list(box)
    return copy.deepcopy(box[0])


def stepped(make_optimizer: MakeOptimizer, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, `nested_mlp` by default, whose optimizer took a step before wrapping."""
    model = model or nested_mlp(keep)
    optimizer = make_optimizer(model)
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


FORMS: list[dict[str, Any]] = [{}, {"flatten_parameters": False}, {"use_orig_params": True}, {"group_by": is_bias}]


def trained(make_optimizer: Any = adam, model: Any = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Collective. A model and its optimizer after two steps."""
    model = garden(fully_sharded(**options)) if model is None else model
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    return model, optimizer
