"""The parameters that a module lists inside of its own forward and backward are those that it computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.engine.originals import is_ours
from tests.helpers.forms import FORMS, assert_trains, batch, inside, sharded
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


def penalty(module: nn.Module) -> Any:
    return sum(param.square().sum() for param in module.parameters())


class Inner(nn.Module):
    """Adds a penalty of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.part(inputs)) * self.scale + penalty(self)


class Net(nn.Module):
    """Uses its parameters by a list of them, besides computing with its parts."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.part, self.inner, self.exit, self.use = nn.Linear(5, 5), Inner(), nn.Linear(5, 1), use

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.inner(self.part(inputs))) + self.use(self, inputs)


def own_parts(net: Any, inputs: Tensor) -> Any:
    # With `inner` a unit of its own, which is sharded by now; what is not: everything that the root computes with.
    return sum(penalty(module) for module in (net.part, net.exit))


def scaled_part(net: Any, inputs: Tensor) -> Any:
    scaled = {name: param * 1.5 for name, param in net.part.named_parameters()}
    return functional_call(net.part, scaled, (inputs,)).mean() + net.part(inputs).mean()


def by_name(net: Any, inputs: Tensor) -> Any:
    named = dict(net.part.named_parameters())
    assert set(named) == {"weight", "bias"}
    assert named["weight"] is net.part.weight is net.part.get_parameter("weight")
    return (named["weight"] @ inputs.T).mean()


def recomputed(net: Any, inputs: Tensor) -> Any:
    return checkpoint(lambda inputs: net.part(inputs).mean() + penalty(net.part), inputs, use_reentrant=False)


def first_of_its_dtype(net: Any, inputs: Tensor) -> Any:
    return inputs.to(next(net.part.parameters()).dtype).mean() * next(net.exit.parameters()).numel()


def after_a_gradient(net: Any, inputs: Tensor) -> Any:
    """A gradient inside of the forward, as that of an energy; then a penalty."""
    if torch.is_grad_enabled():
        point = inputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.inner(point).square().sum(), point)  # perhaps a unit
        return penalty(net.part) + net.part(slope).mean()
    return penalty(net.part)


REPLICATED = {"sharding_strategy": ShardingStrategy.NO_SHARD}
USES = [after_a_gradient, own_parts, scaled_part, by_name, recomputed, first_of_its_dtype]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@parametrize_pairs(at_most=3, form=FORMS, units=[(), (Inner,)], world_size=[2, 3])
@on_ranks("world_size")
def test_parameters_that_a_forward_lists_are_unsharded(use: Any, form: str, units: Any) -> None:
    assert_trains(partial(Net, use), form, _loss, units)


def _loss(model: Any, inputs: Tensor, step: int) -> Tensor:
    with torch.no_grad():
        before = model(inputs).square().mean()
    loss: Tensor = model(inputs).square().mean()
    loss.backward()
    return loss + before


@pytest.mark.parametrize(
    ("form", "options", "world_size"), [("flat", {}, 2), ("orig", {}, 3), ("rows", {}, 3), ("orig", REPLICATED, 2)]
)
@on_ranks("world_size")
def test_a_gradient_inside_leaves_them_listed_while_others_are_accumulated(form: str, options: dict[str, Any]) -> None:
    def body(model: Any, inputs: Tensor, step: int) -> Tensor:
        with without_sync(model):
            model(inputs + 1).square().mean().backward()
        loss: Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    assert_trains(partial(Net, after_a_gradient), form, body, (Inner,), **options)


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_the_whole_model_lists_what_it_computes_with(form: str) -> None:
    names: list[list[str]] = []

    def use(net: Any, inputs: Tensor) -> Any:
        names.append([name for name, _ in net.named_parameters()])
        return penalty(net)

    assert_trains(partial(Net, use), form, _loss)
    assert all(found == [name for name, _ in Net(use).named_parameters()] for found in names)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_shards_are_listed_between_passes(form: str) -> None:
    model = sharded(seeded(partial(Net, own_parts)).double(), form, (Inner,))
    before = list(inside(model).parameters())
    assert all(map(is_ours, before))

    def assert_lists_shards() -> None:
        assert all(one is other for one, other in zip(inside(model).parameters(), before, strict=True))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch(0, 0))
    assert_lists_shards()
    model(batch(0, 0)).sum().backward()
    assert_lists_shards()
    optimizer.step()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, 4, dtype=torch.float64))
    assert_lists_shards()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_backward_lists_unsharded_parameters(form: str) -> None:
    shapes: list[Any] = []

    def use(net: Any, inputs: Tensor) -> Any:
        result = net.part(inputs).mean()
        if result.requires_grad:
            result.register_hook(lambda _: shapes.append({name: p.shape for name, p in net.part.named_parameters()}))
        return result

    assert_trains(partial(Net, use), form, _loss, steps=2)
    assert len(shapes) >= 2
    assert all(found == {"weight": (5, 5), "bias": (5,)} for found in shapes)


class Manual(nn.Module):
    """Runs backward and steps inside of its own forward, as Lightning's manual optimization does."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.optimizer = nn.Linear(5, 1), None

    def forward(self, inputs: Tensor, model: nn.Module) -> Tensor:
        loss = self.part(inputs).square().mean()
        loss.backward()
        if self.optimizer is not None:
            for param in self.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_gradients_are_scaled_and_stepped_inside_of_a_forward(form: str) -> None:
    plain = seeded(Manual).double()
    model = sharded(seeded(Manual).double(), form)
    for each in (model, plain):
        inside(each).__dict__["optimizer"] = torch.optim.SGD(each.parameters(), lr=1.0)
    for step in range(2):  # every rank has the same batch
        assert torch.equal(model(batch(step, 0), model), plain(batch(step, 0), plain))
    from tests.helpers.equality import assert_close_state
    from tests.helpers.forms import full_state

    assert_close_state(full_state(model), plain.state_dict())


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_a_forward_sees_the_dtype_that_it_computes_in(form: str) -> None:
    seen: list[torch.dtype] = []

    def use(net: Any, inputs: Tensor) -> Any:
        seen.append(next(net.parameters()).dtype)
        return 0.0

    model = sharded(seeded(partial(Net, use)), form, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model(torch.ones(3, 5))
    assert seen == [torch.bfloat16]
    assert next(model.parameters()).dtype == torch.float32
