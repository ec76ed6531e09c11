"""What tests of optimizer state share: a model with parameters of every kind, optimizers, and their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import Wrap, keep

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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return wrap(Garden(wrap))


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, alone: bool = False) -> None:
    """Collective unless `alone`. Each rank on its rows of the global batch, which every world size sees alike."""
    for step in steps:
        inputs = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
        targets = inputs.sum(dim=1, keepdim=True).sin()
        if not alone:
            rank, size = dist.get_rank(), dist.get_world_size()
            inputs, targets = inputs.chunk(size)[rank], targets.chunk(size)[rank]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def from_first(value: Any) -> Any:
    """Collective. The first rank's, in memory of its own."""
    box = [value]
    dist.broadcast_object_list(box)
    return copy.deepcopy(box[0])


def pairs_of(found: Any, expected: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two nests, which must have the same form."""
    assert type(found) is type(expected) or isinstance(found, Tensor) is isinstance(expected, Tensor), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            yield from pairs_of(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from pairs_of(one, other, f"{path}[{number}]")
    else:
        yield path, found, expected


def assert_same(found: Any, expected: Any) -> None:
    """To the last bit: keys, shapes, dtypes and values."""
    for path, one, other in pairs_of(found, expected):
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), path
            assert torch.equal(one.cpu(), other.cpu()), path
        else:
            assert one == other, path


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for path, one, other in pairs_of(found, expected):
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), path
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=tolerance, msg=lambda text, path=path: f"{path}: {text}"
            )
        else:
            assert one == other, path


def with_plain_steps(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's own dictionary with numbers for steps, as those that are cut have."""
    entries = {
        number: {key: value.item() if key == "step" else value for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in state["param_groups"]]
    return {**state, "state": entries, "param_groups": groups}
