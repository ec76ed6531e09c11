"""A model wrapped and the same model plain, which take the same steps and must stay the same.

In float64 and with SGD without momentum, so that nothing is hidden by rounding or by the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import TrainingState, get_fsdp_instances
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Wrap, keep
from tests.helpers.parity import MakeOptimizer, from_one_rank, fully_sharded

if TYPE_CHECKING:
    from typing_extensions import Self

Step = Callable[[nn.Module, Tensor], None]

# Ways to wrap a unit that differ in when its parameters come and go.
OPTIONS: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"flatten_parameters": False}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["default", "kept", "unflattened"])


# The comparison


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1)


class Twins:
    """A sharded model and the same model plain, each with an optimizer of one making, which take the same steps."""

    def __init__(self, sharded: Any, plain: Any, optimizers: Sequence[Any] = ()) -> None:
        self.sharded, self.plain, self.optimizers = sharded, plain, optimizers
        self.number = 0  # of the last batch
        self.tolerance = {"rtol": 1e-11, "atol": 1e-13}

    @classmethod
    def of(cls, make: Callable[[Wrap], nn.Module], make_optimizer: MakeOptimizer = sgd, **options: Any) -> Self:
        torch.set_default_dtype(torch.float64)
        models = make(fully_sharded(**options)), make(keep)
        return cls(*models, [make_optimizer(model.parameters()) for model in models])

    @property
    def models(self) -> tuple[Any, Any]:
        return self.sharded, self.plain

    def loss(self, model: nn.Module, rank: int) -> Tensor:
        return score(model(batch(self.number, rank)))

    def backward(self, number: int | None = None, *, sync: bool = True) -> None:
        """Collective. Add the gradients of a batch, the next one by default. The losses agree."""
        self.number = self.number + 1 if number is None else number
        with nullcontext() if sync else self.sharded.no_sync():
            found = self.loss(self.sharded, dist.get_rank())
            found.backward()
        for rank in range(dist.get_world_size()):
            expected = self.loss(self.plain, rank)
            (expected / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                assert_close(found, expected, "loss", **self.tolerance)

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, number: int | None = None) -> None:
        """Collective."""
        self.backward(number)
        self.optimize()

    def take(self, number: int, step: Step) -> None:
        """Collective. One step of both, whose `step` computes gradients; only rank 0 trains the plain model."""
        self.optimizers[0].zero_grad()
        step(self.sharded, batch(number, dist.get_rank()))
        self.optimizers[0].step()
        if dist.get_rank() == 0:
            self._take_plain(number, step)

    def _take_plain(self, number: int, step: Step) -> None:
        self.optimizers[1].zero_grad()
        for rank in range(dist.get_world_size()):
            step(self.plain, batch(number, rank))
        for param in self.plain.parameters():
            if param.grad is not None:
                param.grad /= dist.get_world_size()
        self.optimizers[1].step()

    def share_plain(self) -> None:
        """Collective. Broadcast the plain state of rank 0."""
        self.plain.load_state_dict(from_one_rank(self.plain.state_dict))

    def assert_close(self) -> None:
        """Collective. The states agree, and the sharded model is at rest."""
        assert_at_rest(self.sharded)
        self.share_plain()
        assert_close_state(self.sharded.state_dict(), self.plain.state_dict(), **self.tolerance)


def assert_trains_like_plain(
    make: Callable[[Wrap], nn.Module], *steps: Step, options: dict[str, Any] | None = None
) -> None:
    """Collective. The given steps and the first one again leave the same weights sharded and plain."""
    take_all(Twins.of(make, **(options or {})), *steps, steps[0])


def take_all(twins: Twins, *steps: Step) -> None:
    """Collective. After these steps the sharded and the plain weights are the same, and not those from before."""
    before = {name: value.clone() for name, value in twins.plain.state_dict().items()}
    for number, step in enumerate(steps):
        twins.take(number, step)
    twins.assert_close()
    assert any(not torch.equal(value, before[name]) for name, value in twins.plain.state_dict().items())


def assert_at_rest(model: nn.Module) -> None:
    """Between steps every unit is idle, and no whole parameter has memory."""
    for wrapper in get_fsdp_instances(model):
        assert wrapper.training_state is TrainingState.IDLE
        for handle in wrapper._unit.handles:
            whole = handle.unsharded.full.untyped_storage().nbytes() if handle.is_sharded else 0
            assert whole == 0, f"{handle.name} is whole between steps"


# Steps


def score(output: Tensor) -> Tensor:
    return output.sin().mean()


def once(model: nn.Module, inputs: Tensor) -> None:
    score(model(inputs)).backward()


def with_input_gradient(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    score(model(inputs)).backward()
    assert inputs.grad is not None


def two_forwards_then_backwards(model: nn.Module, inputs: Tensor) -> None:
    first, second = score(model(inputs)), score(model(inputs.neg()))
    first.backward()
    second.backward()


def two_forwards_then_backwards_in_reverse(model: nn.Module, inputs: Tensor) -> None:
    first, second = score(model(inputs)), score(model(inputs.neg()))
    second.backward()
    first.backward()


def two_forwards_then_one_backward(model: nn.Module, inputs: Tensor) -> None:
    (score(model(inputs)) + 2 * score(model(inputs.neg()))).backward()


def backward_twice(model: nn.Module, inputs: Tensor) -> None:
    loss = score(model(inputs))
    loss.backward(retain_graph=True)
    loss.backward()


def forward_without_backward_first(model: nn.Module, inputs: Tensor) -> None:
    model(inputs.neg())
    once(model, inputs)


def input_gradients_only_first(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(model(inputs)), inputs)
    score(model(inputs)).backward(inputs=[inputs])
    torch.testing.assert_close(inputs.grad, gradient)
    once(model, gradient)


def no_grad_between(model: nn.Module, inputs: Tensor) -> None:
    loss = score(model(inputs))
    _infer(model, inputs, torch.no_grad)
    loss.backward()


def inference_mode_between(model: nn.Module, inputs: Tensor) -> None:
    loss = score(model(inputs))
    _infer(model, inputs, torch.inference_mode)
    loss.backward()


def eval_first(model: nn.Module, inputs: Tensor) -> None:
    _infer(model, inputs, nullcontext)
    once(model, inputs)


def inference_mode_first(model: nn.Module, inputs: Tensor) -> None:
    _infer(model, inputs, torch.inference_mode)
    once(model, inputs)


def in_eval_mode(model: nn.Module, inputs: Tensor) -> None:
    once(model.eval(), inputs)
    model.train()


def _infer(model: nn.Module, inputs: Tensor, mode: Callable[[], Any]) -> None:
    with mode():
        assert torch.isfinite(model.eval()(inputs)).all()
    model.train()


STEPS = [
    once,
    with_input_gradient,
    two_forwards_then_backwards,
    two_forwards_then_backwards_in_reverse,
    two_forwards_then_one_backward,
    backward_twice,
    forward_without_backward_first,
    input_gradients_only_first,
    no_grad_between,
    inference_mode_between,
    eval_first,
    inference_mode_first,
]


# Models


def tanh_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


class Toolbox(nn.Module):
    """A root whose units run in the order that each call names.

    `recompute` checkpoints each unit from outside: True in the re-entrant way, False in the other.
    """

    def __init__(
        self, wrap: Wrap, tool: Callable[[], nn.Module] = tanh_layers, order: str = "abc", recompute: bool | None = None
    ) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.tools = nn.ModuleDict({name: wrap(tool()) for name in "abc"})
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.order, self.recompute = order, recompute

    def forward(self, inputs: Tensor, order: str | None = None) -> Tensor:
        hidden = self.entry(inputs)
        for name in order or self.order:
            if self.recompute is None:
                hidden = hidden + self.tools[name](hidden)
            else:
                hidden = hidden + checkpoint(self.tools[name], hidden, use_reentrant=self.recompute)
        return hidden * self.scale


def toolbox(wrap: Wrap, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Toolbox(wrap, **how))
