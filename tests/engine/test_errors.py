"""Bad input: each mistake is an error that names what was found, where, and what to do, on every rank.

Mistakes with the constructor need no other rank: they are made in a world of one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp import FlattenParamsWrapper, FullyShardedDataParallel, TrainingState, fully_shard
from fsdp.engine.placeholder import Placeholder
from tests.helpers.calls import summon
from tests.helpers.module_kinds import FORMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone, alone, fully_sharded, nested_mlp, sgd_with_momentum


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def step(model: nn.Module) -> None:
    """A whole step works: the model is in order."""
    optimizer = sgd_with_momentum(model.parameters())
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()


# What is wrapped


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_parameters_that_no_unit_shards(dtype: torch.dtype) -> None:
    module = layers()
    module[2].register_parameter("counts", nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False))
    with pytest.raises(TypeError, match=rf"2\.counts is a parameter of {dtype}.*only in units.*register_buffer"):
        FlattenParamsWrapper(module)


def fake_layers() -> nn.Module:
    with FakeTensorMode():
        return layers()


@pytest.mark.parametrize("shard", [alone, fully_shard], ids=["wrapper", "rows"])
@pytest.mark.parametrize("make", [fake_layers, layers], ids=["fake", "plain"])
def test_under_a_mode_of_fake_tensors(shard: Callable[[nn.Module], Any], make: Callable[[], nn.Module]) -> None:
    module = make()
    with pytest.raises(RuntimeError, match=r"this Sequential .* FakeTensorMode, .*fsdp\.plan\(model"), FakeTensorMode():
        shard(module)


@pytest.mark.parametrize("shard", [alone, fully_shard], ids=["wrapper", "rows"])
def test_fake_parameters(shard: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"this Sequential .* FakeTensorMode, .*fsdp\.plan\(model"):
        shard(fake_layers())


def test_a_module_that_is_wrapped_already() -> None:
    model = alone(layers())
    for again in (model.module, model.module.module):
        with pytest.raises(ValueError, match="is wrapped already, and its wrapper has parameters of its own: wrap"):
            alone(again)
    step(model)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_module_inside_of_one_that_is_wrapped_already(options: dict[str, Any]) -> None:
    model = nn.Sequential(layers(), nn.Linear(3, 3))
    inner = model[0]
    wrapped = alone(model, **options)
    with pytest.raises(ValueError, match=r"^0 is inside of Sequential, .*Wrap or shard inner modules before"):
        alone(inner, **options)
    assert wrapped.module.module[0] is inner


def test_parameters_that_somebody_else_flattened() -> None:
    with pytest.raises(ValueError, match="flat"):
        alone(nn.Sequential(FlattenParamsWrapper(nn.Linear(5, 3))))


@pytest.mark.parametrize(
    ("given", "kind"), [(nn.Linear, "type"), ([nn.Linear(2, 2)], "list"), (torch.relu, "builtin"), (None, "NoneType")]
)
def test_something_that_is_no_module(given: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"wraps an nn.Module, got a {kind}"):
        alone(given)


def test_parameters_without_values() -> None:
    with torch.device("meta"):
        module = layers()
    with pytest.raises(TypeError, match=r"0\.weight is a .*meta parameter.*to_empty"):
        FlattenParamsWrapper(module)
    with pytest.raises(TypeError, match=r"weight is an UninitializedParameter of a lazy module, .* run the model once"):
        alone(nn.LazyLinear(3))


def test_a_tie_that_wrapping_by_hand_would_cut() -> None:
    inside, outside = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    outside.weight = inside.weight
    model = nn.Sequential(alone(inside), outside)
    with pytest.raises(ValueError, match=r"1\.weight is the same parameter as weight of Linear.*auto_wrap"):
        alone(model)
    with pytest.raises(ValueError, match=r"^weight is the same parameter as weight of Linear.*no longer be tied"):
        alone(outside)
    assert isinstance(outside.bias, nn.Parameter), "nothing may be taken from a module that is refused"


# Options


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "gradient_predivide_factor must be positive, got 0", {"gradient_predivide_factor": 0}),
        (ValueError, "gradient_predivide_factor must be positive, got -2", {"gradient_predivide_factor": -2.0}),
        (TypeError, "process_group_reduce_scatter must be", {"process_group_reduce_scatter": 3}),
        (TypeError, "process_group_reduce_scatter must be", {"process_group_reduce_scatter": "reduce"}),
    ],
)
def test_values_out_of_range(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    module = layers()
    with pytest.raises(error, match=message):
        alone(module, **options)
    step(alone(module))


def test_what_clients_pass_for_the_default_is_taken() -> None:
    step(alone(layers(), fp32_reduce_scatter=None, move_grads_to_cpu=False, no_broadcast_optim_state=None))


def test_an_unknown_option() -> None:
    with pytest.raises(TypeError, match="sharding_strategy"):
        alone(layers(), sharding_strategy="FULL_SHARD")


def test_a_reduce_scatter_group_of_another_size_is_not_used() -> None:
    with pytest.warns(UserWarning, match="has 2 ranks and process_group 1: .* over process_group instead"):
        model = FullyShardedDataParallel(layers(), Alone(), Alone(2))
    assert model.process_group_reduce_scatter is model.process_group
    step(model)


@pytest.mark.parametrize("group", ["world", 3, object()])
def test_something_that_is_no_process_group(group: Any) -> None:
    with pytest.raises(TypeError, match="process_group must be"):
        FullyShardedDataParallel(layers(), group)


@on_ranks(2)
def test_a_group_that_this_rank_is_not_in() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        step(FullyShardedDataParallel(layers(), group))
    else:
        with pytest.raises((TypeError, ValueError), match=r"process_group.*this rank"):
            FullyShardedDataParallel(layers(), group)


@on_ranks(1, backend=None)
def test_without_a_process_group_the_error_shows_the_lines_that_fix_it() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized") as error:
        FullyShardedDataParallel(layers())
    advice = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    assert len(advice) == 2
    with socket.socket() as free:  # what torchrun would set
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    exec("\n".join(advice), {})
    step(FullyShardedDataParallel(layers()))


# Optimizers


@on_ranks(1, 2)
def test_an_optimizer_made_before_wrapping() -> None:
    module = layers()
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    elsewhere = nn.Linear(5, 1)
    bystander = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(module[0]), *module[1:]))
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="this SGD was created before the model was sharded") as error:
        early.step()
    for name in ("weight of Linear", "bias of Linear", "2.weight of Sequential", "2.bias of Sequential"):
        assert name in str(error.value)
    torch.optim.AdamW(model.parameters()).step()
    elsewhere(torch.ones(1, 5)).sum().backward()
    bystander.step()


@on_ranks(1)
def test_an_early_optimizer_of_a_large_model_is_described_in_short() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    early = torch.optim.Adam(module.parameters())
    model = FullyShardedDataParallel(module)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight of Sequential.* and 95 more"):
        early.step()


# Weights that are not there


@on_ranks(2)
def test_touching_one_names_it_and_the_way_out() -> None:
    """In all ways that engine/test_placeholder.py lists."""
    model = FullyShardedDataParallel(layers())
    weight = model.module.module[2].weight
    assert isinstance(weight, Placeholder)
    with pytest.raises(RuntimeError, match=r"2\.weight is sharded: .*summon_full_params\(\)"):
        weight.sum()
    step(model)


def test_in_a_world_of_one_the_weight_is_there() -> None:
    model = alone(layers())
    assert torch.equal(model.module.module[2].weight.detach(), model.state_dict()["2.weight"])


# Ranks that disagree


def narrower(wrap: Any) -> nn.Module:
    return wrap(nn.Sequential(wrap(nn.Linear(5, 6)), wrap(nn.Linear(6, 3))))


def usual(wrap: Any) -> nn.Module:
    return wrap(nn.Sequential(wrap(nn.Linear(5, 7)), wrap(nn.Linear(7, 3))))


def unwrapped_inside(wrap: Any) -> nn.Module:
    return wrap(nn.Sequential(wrap(nn.Linear(5, 7)), nn.Linear(7, 3)))


def frozen_inside(wrap: Any) -> nn.Module:
    return wrap(nn.Sequential(wrap(nn.Linear(5, 7).requires_grad_(False)), wrap(nn.Linear(7, 3))))


def double_inside(wrap: Any) -> nn.Module:
    return wrap(nn.Sequential(wrap(nn.Linear(5, 7)), wrap(nn.Linear(7, 3).double())))


def two_before_one(wrap: Any) -> nn.Module:
    one, two = nn.Linear(5, 7), nn.Linear(7, 3)  # of the same random numbers as `usual`'s
    last = wrap(two)
    return wrap(nn.Sequential(wrap(one), last))


def call(model: nn.Module) -> None:
    model(torch.ones(2, 5))


def state_dict(model: nn.Module) -> None:
    model.state_dict()


def call_twice(model: nn.Module) -> None:
    with suppress(RuntimeError):
        model(torch.ones(2, 5))
    model(torch.ones(2, 5))


@pytest.mark.parametrize(
    ("odd", "message", "use"),
    [
        (narrower, r"Unit '0' has .*\[7, 5\].* on rank 0 and .*\[6, 5\].* on rank 1", call),
        (unwrapped_inside, "rank 1", call),
        (frozen_inside, "Unit '0' has .*True.* on rank 0 and .*False.* on rank 1", summon),
        (double_inside, "Unit '1' has .*float32.* on rank 0 and .*float64.* on rank 1", state_dict),
        (narrower, "Unit '0' has .* on rank 1", call_twice),
    ],
)
@on_ranks(3)
def test_every_rank_says_who_differs_in_what_whatever_is_used_first(odd: Any, message: str, use: Any) -> None:
    make = odd if dist.get_rank() == 1 else usual
    # A timeout of its own, so that a hang is an error of the test and not the end of the processes.
    group = dist.new_group(timeout=timedelta(seconds=60))
    model = make(fully_sharded(process_group=group))
    with pytest.raises(RuntimeError, match=message) as error:
        use(model)
    assert f"rank {dist.get_rank()}" in str(error.value)
    assert "did not complete" not in str(error.value)


def test_a_parameter_with_gradient_hooks() -> None:
    module = layers()
    module[2].weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"2\.weight has gradient hooks.*Remove them before sharding"):
        alone(module)


@on_ranks(3)
def test_units_may_be_made_in_any_order() -> None:
    make = two_before_one if dist.get_rank() == 1 else usual
    step(make(fully_sharded()))


@on_ranks(3)
def test_models_that_only_some_ranks_have_do_not_matter() -> None:
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    everybody = dist.new_group(timeout=timedelta(seconds=60))
    others = []
    if dist.get_rank() == 0:
        others += [alone(layers()), alone(layers())]
    if dist.get_rank() < 2:
        others += [nested_mlp(fully_sharded(process_group=pair))]
    model = nested_mlp(fully_sharded(process_group=everybody))
    for each in (model, *others):
        step(each)
    step(model)


# The wrong moment


@on_ranks(2)
def test_a_second_root() -> None:
    inner = FullyShardedDataParallel(nn.Linear(5, 5))
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(5, 3)))
    step(inner)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a second root: unit '0' was called on its own.*_reset_lazy_init"):
            model(torch.ones(2, 5))
    inner._reset_lazy_init()
    step(model)


METHODS: dict[str, Callable[[Any], Any]] = {
    "summon_full_params": summon,
    "no_sync": lambda model: model.no_sync().__enter__(),
    "clip_grad_norm_": lambda model: model.clip_grad_norm_(1.0),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
    "apply": lambda model: model.apply(lambda module: None),
    "to": lambda model: model.to(torch.float64),
    "set_gradient_divide_factors": lambda model: model.set_gradient_divide_factors(1.0, 1.0),
    "_reset_lazy_init": lambda model: model._reset_lazy_init(),
}


def nothing() -> None:
    """What happens in the middle of an undisturbed step."""


class Interrupting(nn.Module):
    """Calls back in the middle of its forward, or of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.in_forward: Callable[[], Any] = nothing
        self.in_backward: Callable[[], Any] = nothing

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.in_forward()
        if hidden.requires_grad:
            hidden.register_hook(self._interrupt_backward)
        return self.last(hidden)

    def _interrupt_backward(self, _: Tensor) -> None:
        self.in_backward()


@pytest.mark.parametrize("moment", ["in_forward", "in_backward"])
@on_ranks(2)
def test_methods_in_the_middle(moment: str) -> None:
    model = FullyShardedDataParallel(Interrupting())
    step(model)
    for name, method in METHODS.items():
        setattr(model.module.module, moment, partial(method, model))
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(2, 5)).sum().backward()
        assert "in the middle of a forward or backward of root" in str(error.value), name
        setattr(model.module.module, moment, nothing)
        model.zero_grad()
        step(model)
        model.assert_state(TrainingState.IDLE)
