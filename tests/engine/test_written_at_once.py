"""What a call has sent may be written as soon as it has returned: the other ranks get what was there when they asked.

Messages leave late here, so that one that nobody has waited for takes what was written since.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.distributed.collectives import communicator
from fsdp.distributed.custom_collectives import CustomAllGather
from fsdp.distributed.dtensor import local_part
from tests.helpers.late_messages import late_messages, under_way
from tests.helpers.on_ranks import on_ranks
from tests.helpers.own_collectives import OwnAllGather

BATCH = torch.linspace(-1.0, 1.0, 10).view(2, 5)
Values = list[Tensor]


class Averages(nn.Linear):
    """Loads the average of what it has and what it is given."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, param in self.named_parameters(recurse=False):
            with torch.no_grad():
                param.copy_((param + state_dict[prefix + name]) / 2)


class Counts(nn.Linear):
    """Adds one to its bias in each forward."""

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.add_(1.0)
        return super().forward(batch)


class Fails(nn.Module):
    """Keeps what it gets, and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.got: Values = []

    def forward(self, batch: Tensor) -> Tensor:
        self.got.append(batch.detach() * self.weight.detach().sum())
        raise ValueError("in the middle")


def build(kind: type[nn.Linear] = nn.Linear, last: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(3)
    layers = [fsdp.FullyShardedDataParallel(kind(5, 5), **options) for _ in range(2)]
    rest = [] if last is None else [fsdp.FullyShardedDataParallel(last)]
    return fsdp.FullyShardedDataParallel(nn.Sequential(*layers, *rest), **options)


def by_rows() -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    for layer in model:
        fsdp.fully_shard(layer)
    return fsdp.fully_shard(model)


def write(tensors: Any) -> None:
    """Write to memory of this rank, at once."""
    with torch.no_grad():
        for tensor in tensors:
            local_part(tensor).fill_(7.0)


def step(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(BATCH).square().mean().backward()
    optimizer.step()
    return optimizer


def states_of(optimizer: Any) -> Values:
    return [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]


# Each returns what was found of the model's values on the other ranks, having written to its own.


def forward() -> Values:
    model = build()
    with torch.no_grad():
        found = model(BATCH)
    write(model.parameters())
    return [found]


def failed_forward() -> Values:
    last = Fails()
    model = build(last=last)
    for _ in range(3):  # so that it is known what comes next
        with suppress(ValueError), torch.no_grad():
            model(BATCH)
    write(model.parameters())
    return last.got


def failed_backward() -> Values:
    model, got = by_rows(), []

    def fail(grad: Tensor) -> None:
        got.append(grad.clone())
        raise ValueError("in the middle")

    model[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="in the middle"):
        model(BATCH).square().sum().backward()
    model.reset_iter_state()
    write(model.parameters())
    return got


def backward_without_gradients() -> Values:
    model = by_rows()
    for param in model.parameters():
        param.requires_grad_(False)
    batch = BATCH.clone().requires_grad_()
    model(batch).square().sum().backward()
    write(model.parameters())
    return [batch.grad]  # type: ignore[list-item]


def written_in_place_while_unsharded() -> Values:
    model = by_rows()
    for layer in model:
        layer.unshard()
    found = [layer.weight.detach().clone() for layer in model]
    model._apply(lambda tensor: tensor.detach().fill_(7.0))
    return found


def written_and_resharded() -> Values:
    model = by_rows()
    found = []
    for layer in model:
        layer.unshard()
        found.append(layer.weight.detach().clone())
        with torch.no_grad():
            layer.weight.fill_(7.0)
        layer.reshard()
    return found


def backward() -> Values:
    model = build()
    batch = BATCH.clone().requires_grad_()
    model(batch).square().sum().backward()
    write(model.parameters())
    return [batch.grad]  # type: ignore[list-item]


def unsharded_by_hand() -> Values:
    model = by_rows()
    found = []
    for layer in model:
        layer.unshard()
        found.append(layer.weight.detach().clone())
        layer.reshard()
    write(model.parameters())
    return found


def state_dict() -> Values:
    model = build()
    found = model.state_dict()
    write(model.parameters())
    return list(found.values())


def state_dict_on_first() -> Values:
    model = build()
    found = model.state_dict(rank0_only=True)
    write(model.parameters())
    return list(found.values())


def summoned() -> Values:
    model = build()
    with model.summon_full_params(), torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    return list(model.state_dict().values())


def summoned_on_first() -> Values:
    model = build()
    with model.summon_full_params(rank0_only=True), torch.no_grad():
        shown = list(model.parameters()) if dist.get_rank() == 0 else []
        for param in shown:
            param.mul_(2.0)
    write(shown)
    return list(model.state_dict().values())


def looked_at() -> Values:
    model = build()
    with model.summon_full_params(volatile=True):
        found = [param.detach().clone() for param in model.parameters()]
    write(model.parameters())
    return found


def gradients_looked_at() -> Values:
    model = build()
    model(BATCH).square().sum().backward()
    with model.summon_full_params(volatile=True, with_grads=True):
        found = [param.grad.clone() for param in model.parameters()]
    write(param.grad for param in model.parameters())
    return found


def loaded() -> Values:
    model = build(Averages)
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    return list(model.state_dict().values())


def loaded_from_first() -> Values:
    model = build()
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state if dist.get_rank() == 0 else {}, rank0_only=True)
    write(state.values())
    return list(model.state_dict().values())


def loaded_local() -> Values:
    model = build()
    with torch.no_grad():
        found = model(BATCH)
    model.load_local_state_dict({name: value.clone().fill_(7.0) for name, value in model.local_state_dict().items()})
    return [found]


def optimizer_state() -> Values:
    model = build()
    optimizer = step(model)
    found = fsdp.optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    write(states_of(optimizer))
    return [state["exp_avg"] for state in found["state"].values()]


def optimizer_state_loaded() -> Values:
    model = build()
    optimizer = step(model)
    full = fsdp.optim_utils.full_optim_state_dict(model, optimizer)
    fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, full, rank0_only=True)
    write(value for state in (full or {"state": {}})["state"].values() for value in state.values())
    return states_of(optimizer)


def gathered() -> Values:
    model = by_rows()
    found = fsdp.state_dict_utils.gather_state_dict(model.state_dict())
    write(model.parameters())
    return list(found.values())


def written_in_forward() -> Values:
    model = build(Counts)
    with torch.no_grad():
        model(BATCH)
    return list(model.state_dict().values())


CALLS: list[Callable[[], Values]] = [
    *(forward, failed_forward, backward, failed_backward, backward_without_gradients),
    *(unsharded_by_hand, written_in_place_while_unsharded),
    written_and_resharded,
    *(state_dict, state_dict_on_first, summoned, summoned_on_first, looked_at, gradients_looked_at),
    *(loaded, loaded_from_first, loaded_local, written_in_forward, gathered),
    *(optimizer_state, optimizer_state_loaded),
]


@pytest.mark.parametrize("call", CALLS, ids=[call.__name__ for call in CALLS])
@on_ranks(2)
def test_what_was_sent_may_be_written_when_a_call_has_returned(call: Callable[[], Values]) -> None:
    expected = call()
    for late in range(2):
        with late_messages(0.01 if dist.get_rank() == late else 0.0):
            found = call()
            left = under_way()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text, late=late: f"{late}: {text}")
        assert not left


@on_ranks(2)
def test_what_was_sent_behind_a_collective_of_the_users_own_is_settled() -> None:
    with late_messages(0.01):
        way = CustomAllGather(communicator(dist.group.WORLD, torch.device("cpu")), OwnAllGather())
        way.exchange({}, {1: [torch.ones(3)]} if dist.get_rank() == 0 else {}, "values", 1).wait()
        assert under_way() == 1
        way.settle()
        assert not under_way()
        if dist.get_rank() == 1:
            way.exchange({0: [torch.empty(3)]}, {}, "values", 1).wait()
            way.settle()
