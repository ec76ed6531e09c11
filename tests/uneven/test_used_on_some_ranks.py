"""Parameters that some ranks use in a step and others don't, or none does.

The reference is the plain model with the mean of the ranks' gradients. A parameter that no rank used keeps no gradient,
which momentum and weight decay show in the weights: of a gradient of zeros both make a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.distributed.collectives import use_torch_collectives
from fsdp.distributed.communicator import Tags
from fsdp.engine.reduction import Bucket
from tests.helpers.comm_hooks import average, with_hook
from tests.helpers.dtensor_twins import ours
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import full_state
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import Net, Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

Uses = Callable[[int, int, str], bool]  # in a step, on a rank, of a part


class Block(nn.Module):
    """Parts of equal and of unequal sizes, each of which may be left out; inside of another block perhaps."""

    def __init__(self, name: str, wrap: Wrap, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.inner = name, inner
        self.parts = nn.ModuleDict({part: nn.Linear(5, 5) for part in "abc"})
        self.parts["d"] = nn.Linear(5, 5, bias=False)

    def forward(self, hidden: Tensor, uses: Callable[[str], bool]) -> Tensor:
        for number, (part, module) in enumerate(self.parts.items()):
            if self.inner is not None and number == 2:
                hidden = self.inner(hidden, uses)
            if uses(f"{self.name}.{part}"):
                hidden = hidden + torch.tanh(module(hidden))
        return hidden


class Model(nn.Module):
    """Blocks in a row, one of them with a block inside, and parts of the root before and after them."""

    def __init__(self, wrap: Wrap, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.entry, self.exit = nn.Linear(5, 5), nn.Linear(5, 5)
        inner = wrap(Block("inner", wrap))
        blocks = [Block("0", wrap), Block("1", wrap, inner), Block("2", wrap), Block("3", wrap)]
        self.blocks = nn.ModuleList(wrap(block) for block in blocks)

    def forward(self, hidden: Tensor, uses: Callable[[str], bool]) -> Tensor:
        if uses("entry"):
            hidden = hidden + self.entry(hidden)
        for block in self.blocks:
            if self.how == "plain":
                hidden = block(hidden, uses)
            else:
                hidden = checkpoint(block, hidden, uses, use_reentrant=self.how == "reentrant")
        if uses("exit"):
            hidden = hidden + self.exit(hidden)
        return hidden


def make_model(wrap: Wrap, how: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    return wrap(Model(wrap, how))


def one_here_another_there(step: int, rank: int, part: str) -> bool:
    """Each rank leaves out another part; the first of some blocks, the last of others; one part is used nowhere."""
    if part in ("entry", "exit"):
        return (step + rank + len(part)) % 2 == 0
    block, _, name = part.partition(".")
    if name == "d":
        return step == 1 and rank == 0  # else nowhere, so that it has momentum and no gradient
    return "abc"[(step + rank + len(block) + ord(block[0])) % 3] != name


def train_like_plain(
    make: Callable[[Wrap], nn.Module],
    wrap: Wrap,
    uses: Uses = one_here_another_there,
    accumulate: int = 1,
    steps: int = 4,
    **how: Any,
) -> None:
    """Collective. Some steps of the sharded and of the plain model end with the same weights."""
    torch.set_default_dtype(torch.float64)
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded, plain = make(wrap), make(keep)
    how = how or {"momentum": 0.9, "weight_decay": 0.1}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, **how) for model in (sharded, plain)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for turn in range(accumulate):
            at = step + 7 * turn
            with nullcontext() if turn == accumulate - 1 else no_sync(sharded):
                loss_of(sharded, at, rank, uses).backward()
            for other in range(world):
                (loss_of(plain, at, other, uses) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_close_state(full_state(sharded), plain.state_dict())


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    if not isinstance(model, fsdp.FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def loss_of(model: nn.Module, step: int, rank: int, uses: Uses) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(3, 5, generator=generator, requires_grad=True)
    return model(inputs, partial(uses, step, rank)).square().mean()


def by_name(name: str, param: nn.Parameter) -> str:
    return name


FORMS: dict[str, Callable[..., Wrap]] = {
    "unflattened": partial(fully_sharded, flatten_parameters=False),
    "grouped": partial(fully_sharded, group_by=by_name),
    "original": partial(fully_sharded, use_orig_params=True),
    "rows": ours,
}


@parametrize_cases(
    at_most=4,
    world_size=[2, 3],
    form=["unflattened", "grouped", "original", "rows"],
    how=["plain", "not reentrant"],
    accumulate=[1, 2],
    bucket_cap_mb=[0, 25],
    collectives=["ours", "torch's"],
)
def test_each_parameter_gets_the_sum_of_its_own_gradients(ranks: RankPool, world_size: int, case: Case) -> None:
    options = {} if case.form == "rows" else {"bucket_cap_mb": case.bucket_cap_mb}
    ranks(world_size).run(_train, case.form, options, case.how, case.accumulate, case.collectives)


def _train(form: str, options: dict[str, Any], how: str, accumulate: int, collectives: str) -> None:
    use_torch_collectives(collectives == "torch's")
    try:
        train_like_plain(partial(make_model, how=how), FORMS[form](**options), accumulate=accumulate)
    finally:
        use_torch_collectives(False)


def test_re_entrant_checkpoints_bring_what_nobody_saw_coming(ranks: RankPool) -> None:
    ranks(2).run(_train, "unflattened", {}, "reentrant", 1, "ours")
    ranks(2).run(_train, "original", {}, "reentrant", 2, "ours")


def test_replicas_and_communication_hooks_see_the_same_parameters(ranks: RankPool) -> None:
    ranks(4).run(_train_replicas, 0, "original")
    ranks(2).run(_train_with_hook, 25)


def _train_replicas(bucket_cap_mb: float, form: str) -> None:
    wrap = FORMS[form](process_group=mesh_of(2, 2), bucket_cap_mb=bucket_cap_mb)
    train_like_plain(make_model, wrap)


def _train_with_hook(bucket_cap_mb: float) -> None:
    wrap = FORMS["unflattened"](bucket_cap_mb=bucket_cap_mb)
    train_like_plain(partial(with_hook, make_model, average), wrap)


def test_a_bucket_is_reduced_in_one_order_whichever_of_it_was_complete_first() -> None:
    order: list[int] = []
    ranks = {"reduce_comm.world_size": 2, "replica_axis.world_size": 1}
    handles: list[Any] = [
        mock.MagicMock(tags=Tags(number, 0, 0, 0), is_replicated=False, **ranks) for number in (2, 0, 1)
    ]
    for handle in handles:
        handle.policy.all_reduce_hook, handle.policy.postdivide = None, 1.0
        handle.reduce.side_effect = partial(_reduced, handle, order)
    for _ in Bucket({*handles}).reduce():
        pass
    assert order == [0, 1, 2]
    assert all(handle.accept.call_args.args == (handle.tags.number,) for handle in handles)


def _reduced(handle: Any, order: list[int]) -> Any:
    order.append(handle.tags.number)
    return mock.MagicMock(wait=lambda: handle.tags.number)


class Straight(torch.autograd.Function):
    """Says that it has no gradient for a parameter that requires one."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: Tensor) -> Tensor:
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _scaled(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    net = Net(
        lambda net, x, uses: Straight.apply(net.layer(x), net.scale),
        layer=nn.Linear(5, 5),
        scale=nn.Parameter(torch.full((5,), 0.5)),
    )
    return wrap(net)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_what_a_function_has_no_gradient_for_keeps_none(form: str) -> None:
    train_like_plain(_scaled, FORMS[form]())


@on_ranks(2)
def test_ranks_with_a_loss_on_different_outputs_agree_where_nothing_is_gathered_for_backward() -> None:
    """Units that stay whole are reached by backward on one rank only."""
    for options in ({}, {"bucket_cap_mb": 0}, {"use_orig_params": True}):
        wrap = fully_sharded(reshard_after_forward=False, **options)
        train_like_plain(_heads, wrap, _one_head_each)


class Heads(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.body = wrap(nn.Linear(5, 5))
        self.heads = nn.ModuleList(wrap(nn.Linear(5, 5)) for _ in range(3))

    def forward(self, inputs: Tensor, uses: Callable[[str], bool]) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        outputs = [head(hidden) for head in self.heads]
        return torch.stack([output for number, output in enumerate(outputs) if uses(f"{number}.a")]).sum(0)


def _heads(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Heads(wrap))


def _one_head_each(step: int, rank: int, part: str) -> bool:
    return part == f"{(step + rank) % 3}.a"


class Probing(nn.Module):
    """Takes a gradient inside of its forward; then a unit with a layer that only some calls use."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.energy = wrap(nn.Linear(5, 5))
        self.some = wrap(Sometimes())
        self.exit = nn.Linear(5, 5)

    def forward(self, inputs: Tensor, uses: bool) -> Tensor:
        point = inputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(point).square().sum(), point)
        return self.exit(self.some(inputs + slope, uses))


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor, uses: bool) -> Tensor:
        hidden = torch.tanh(self.always(inputs))
        return torch.tanh(self.layer(hidden)) if uses else hidden


def _probing(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Probing(wrap))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_gradient_inside_of_a_forward_leaves_earlier_calls_to_the_backward_of_all(form: str) -> None:
    """Each rank uses the layer in another call. The reductions of the last backward are the same on all ranks."""
    options = {} if form == "rows" else {"bucket_cap_mb": 0}
    model, plain = _probing(FORMS[form](**options)), _probing(keep)
    inputs = torch.linspace(-1, 1, 15).view(3, 5)
    for _ in range(2):
        calls = [model(inputs * turn, uses=turn == 1 + dist.get_rank()) for turn in (1, 2)]
        sum(call.square().mean() for call in calls).backward()  # type: ignore[union-attr]
        for rank in range(2):
            twins = [plain(inputs * turn, uses=turn == 1 + rank) for turn in (1, 2)]
            (sum(twin.square().mean() for twin in twins) / 2).backward()  # type: ignore[union-attr]
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model(inputs, uses=True), plain(inputs, uses=True))
