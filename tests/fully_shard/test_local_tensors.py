"""What users see of parameters and gradients under `fully_shard`: how they lie in memory, and for how long."""

from __future__ import annotations

import copy
import math
import weakref
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.helpers.dtensor_twins import (
    Plan,
    assert_side_by_side,
    assert_within,
    conv_net,
    handles,
    local,
    mesh_of,
    ours,
    seeded,
    torchs,
    trained_twins,
    uneven,
    whole,
)
from tests.helpers.models import Net, Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


def nth_dim(dim: int, param: nn.Parameter) -> Shard:
    return Shard(min(dim, param.dim() - 1))


@parametrize_pairs(world_size=[1, 2], dim=[1, 2])
@on_ranks("world_size")
def test_along_any_dimension_everything_is_contiguous(dim: int) -> None:
    seen: list[Tensor] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.extend(tensor for tensor in vars(module).values() if isinstance(tensor, nn.Parameter))

    model = conv_net(ours(shard_placement_fn=partial(nth_dim, dim)))
    for module in model.modules():
        module.register_forward_pre_hook(look)
    once(model, INPUTS)
    assert len(seen) == len(list(model.parameters()))
    assert all(tensor.is_contiguous() for tensor in seen)
    for param in model.parameters():
        assert local(param).is_contiguous()
        assert param.grad is not None
        assert local(param.grad).is_contiguous()


@on_ranks(2)
def test_along_any_dimension_it_trains_as_unsharded() -> None:
    trained_twins(uneven, shard_placement_fn=partial(nth_dim, 1))


@on_ranks(2)
def test_the_memory_of_gradients_goes_with_them() -> None:
    model = uneven(ours())
    once(model, INPUTS)
    listed: list[Any] = list(model.parameters())
    memory = [weakref.ref(param.grad._local_tensor._base) for param in listed if param.grad is not None]
    assert memory
    assert all(each() is not None for each in memory)
    model.zero_grad()
    assert all(each() is None for each in memory)


@on_ranks(1)
def test_a_gradient_that_was_transposed_where_it_lies_is_added_to() -> None:
    plain: Any = nn.Linear(5, 5, bias=False)
    model: Any = ours()(copy.deepcopy(plain))
    for each in (model, plain):
        once(each, INPUTS)
        each.weight.grad = each.weight.grad.t()
        once(each, INPUTS)
    torch.testing.assert_close(local(model.weight.grad), plain.weight.grad)


@on_ranks(2)
def test_gradients_that_users_keep_stay_as_they_are() -> None:
    model = uneven(ours())
    once(model, INPUTS)
    kept = {name: param.grad for name, param in model.named_parameters()}
    before = {name: local(grad).clone() for name, grad in kept.items() if grad is not None}
    model.zero_grad()
    once(model, INPUTS * 2)
    for name, grad in before.items():
        assert torch.equal(local(kept[name]), grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["default", "kept"])
@on_ranks(2)
def test_parameters_are_listed_unsharded_as_by_torchs(options: dict[str, Any]) -> None:
    mine, theirs = (_kinds_listed(wrap(**options)) for wrap in (ours, torchs))
    assert mine == theirs


def _three_layers(wrap: Wrap) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(5, 4)), wrap(nn.Linear(4, 3)), nn.Linear(3, 2))


def _kinds_listed(wrap: Wrap) -> list[tuple[str, list[bool]]]:
    """Return which of the parameters a model lists are `DTensor`s, at moments of a step."""
    model: Any = seeded(_three_layers, wrap)
    found: list[tuple[str, list[bool]]] = []

    def look(moment: str, *_: Any) -> None:
        found.append((moment, [isinstance(param, DTensor) for param in model.parameters()]))

    look("at first")
    model.unshard()
    look("unsharded")
    model.reshard()
    look("resharded")
    model[0].register_forward_hook(partial(look, "in forward"))
    outputs = model(INPUTS)
    look("after forward")
    outputs.sum().backward()
    look("after backward")
    model.zero_grad()
    look("after zero_grad")
    return found


@on_ranks(2)
def test_an_optimizer_of_unsharded_parameters_is_refused() -> None:
    model: Any = uneven(ours())
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    once(model, INPUTS)
    with pytest.raises(RuntimeError, match=r"this SGD was created .*entry.weight of .*, unsharded"):
        optimizer.step()


@on_ranks(2)
def test_a_module_that_is_unsharded_saves_dtensors() -> None:
    model: Any = uneven(ours())
    model.unshard()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.load_state_dict(model.state_dict())
    model.reshard()
    model.set_reshard_after_backward(False)
    once(model, INPUTS)
    assert all(isinstance(param, DTensor) for param in model.parameters() if param.grad is not None)
    assert any(param.grad is not None for param in model.parameters())
    assert whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 0
    model.zero_grad()
    assert all(param.grad is None for handle in handles(model) for param in handle.listed_params)


def _freeze_and_thaw(model: Any, step: int) -> None:
    if step == 1:
        model.trunk.requires_grad_(False)
        model.entry.weight.requires_grad_(False)
    model.exit.weight.requires_grad_(step != 2)
    if step == 3:
        model.entry.weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("world_size", "plan", "mesh"),
    [
        (2, {"before_step": _freeze_and_thaw}, ()),
        (2, {"before_step": _freeze_and_thaw, "accumulate": 2}, ()),
        (4, {"before_step": _freeze_and_thaw, "accumulate": 2, "sync_each": True}, (2, 2)),
    ],
    ids=["frozen and thawed", "accumulated", "hybrid"],
)
@on_ranks("world_size")
def test_parameters_that_are_frozen_later_are_not_reduced(plan: dict[str, Any], mesh: tuple[int, ...]) -> None:
    options = {"mesh": mesh_of(*mesh)} if mesh else {}
    assert_side_by_side(Plan(make_model=uneven, steps=4, **plan), **options)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["held unsharded", "held in shards"])
@on_ranks(lambda mesh: math.prod(mesh))
def test_what_is_thawed_between_the_backwards_of_a_step(mesh: tuple[int, ...]) -> None:
    plain, model = uneven(), cast("Any", uneven(ours(mesh=mesh_of(*mesh))))
    model.entry.weight.requires_grad_(False)
    model(INPUTS).sum().backward()  # makes no room for it
    model.zero_grad()
    synchronise = model.set_requires_gradient_sync if len(mesh) == 1 else model.set_requires_all_reduce
    for is_last in (False, True):
        synchronise(is_last)
        for each, batches in ((model, [dist.get_rank()]), (plain, range(dist.get_world_size()))):
            each.entry.weight.requires_grad_(is_last)
            for batch in batches:
                each(INPUTS + batch).sum().backward()
    for (name, expected), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert_within(name, whole(param.grad), expected.grad / dist.get_world_size(), 1e-6)


def tied(wrap: Wrap) -> nn.Module:
    """An embedding and a projection with one weight."""
    net = Net(
        lambda net, tokens: net.exit(net.entry(tokens)), entry=nn.Embedding(6, 3), exit=nn.Linear(3, 6, bias=False)
    )
    net.exit.weight = net.entry.weight
    return net


@pytest.mark.parametrize("form", ["one memory", "copies"])
@on_ranks(2)
def test_ties_outlast_a_load_that_assigns(form: str) -> None:
    model, source = seeded(tied, ours()), seeded(tied, ours(), seed=5)
    state = source.state_dict()
    if form == "copies":
        state = {name: value.detach().clone() for name, value in state.items()}
    model.load_state_dict(state, assign=True)
    tokens = torch.arange(6)
    assert torch.equal(model(tokens), source(tokens))
    assert model.exit.weight is model.entry.weight
    assert [name for name, _ in model.named_parameters()] == ["entry.weight"]
    other = {name: value.detach() + number for number, (name, value) in enumerate(state.items())}
    with pytest.raises(RuntimeError, match=r"replaced under only some of its names \(entry.weight, exit.weight\)"):
        model.load_state_dict(other, assign=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("is_fresh", [True, False])
@on_ranks(2)
def test_transforms_of_torch_func(is_fresh: bool) -> None:
    plain = seeded(_three_layers)
    for transform in (
        lambda model: torch.func.jvp(model, (INPUTS,), (torch.ones_like(INPUTS),))[1],
        lambda model: torch.func.vjp(model, INPUTS)[1](torch.ones(4, 2))[0],
        lambda model: torch.func.grad(lambda inputs: model(inputs).square().sum())(INPUTS),
        lambda model: torch.func.vmap(model)(INPUTS),
        lambda model: torch.func.jacrev(model)(INPUTS),
    ):
        model = seeded(_three_layers, ours())
        if not is_fresh:
            once(model, INPUTS)
            model.zero_grad()
        torch.testing.assert_close(transform(model), transform(plain))
        once(model, INPUTS)
        assert all(param.grad is not None for param in model.parameters())
