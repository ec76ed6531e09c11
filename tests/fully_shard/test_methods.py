"""What a module can do besides, once our `fully_shard` was called on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import fsdp
from fsdp import FSDPModule, UnshardHandle
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.kept_shard import KeptShard
from fsdp.engine.unit import unit_of
from tests.helpers.dtensor_twins import (
    Uneven,
    adamw_at_once,
    assert_at_rest,
    assert_within,
    handles,
    is_whole,
    local,
    ours,
    seeded,
    torchs,
    uneven,
)
from tests.helpers.equality import assert_same
from tests.helpers.memory import live_bytes
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


# The class


@on_ranks(1)
def test_the_class_is_a_subclass_of_its_own() -> None:
    model = uneven(ours())
    assert type(model).__name__ == "FSDPUneven"
    assert isinstance(model, Uneven)
    assert isinstance(model, FSDPModule)
    assert type(model) is type(uneven(ours()))
    assert not isinstance(uneven(), FSDPModule)


@on_ranks(1)
def test_calling_the_class_makes_a_plain_module() -> None:
    layer = fsdp.fully_shard(nn.Linear(5, 3))
    made = type(layer)(5, 3, bias=False)
    assert type(made) is nn.Linear
    assert made.bias is None


# unshard and reshard


@on_ranks(2)
def test_unshard_and_reshard() -> None:
    model: Any = uneven(ours())
    plain = uneven()
    assert model.unshard() is None
    assert_same(model.entry.weight.detach(), plain.get_parameter("entry.weight").detach(), "entry.weight")
    assert not isinstance(model.entry.weight, DTensor)
    assert not is_whole(model.trunk)  # inner modules keep theirs
    assert not isinstance(dict(model.named_parameters())["entry.weight"], DTensor)
    model.reshard()
    assert_at_rest(model)
    assert isinstance(model.entry.weight, DTensor)


class SometimesUsed(nn.Linear):
    """A unit that uses its parameters on the first rank only."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if dist.get_rank() == 0 else 2 * inputs


@on_ranks(2)
def test_unshard_after_a_backward_that_failed() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 5), SometimesUsed(5, 5), nn.Linear(5, 5))
    for module in (*model, model):
        fsdp.fully_shard(module)
    hook = model[0].register_forward_hook(lambda module, args, output: (output.register_hook(_fail), None)[1])
    with pytest.raises(ValueError, match="as told"):
        model(INPUTS).sum().backward()
    hook.remove()
    model[1].unshard()
    once(model, INPUTS)
    assert_at_rest(model)


def _fail(gradient: Tensor) -> None:
    raise ValueError("as told")


@on_ranks(2)
def test_unshard_without_waiting() -> None:
    model: Any = uneven(ours())
    once(model, INPUTS)
    for wait in (lambda handle: handle.wait(), lambda handle: model.gate.wait_for_unshard()):
        handle = model.gate.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        wait(handle)
        assert model.gate.weight.shape == (2, 3)
        assert not isinstance(model.gate.weight, DTensor)
        model.gate.reshard()
    model.gate.unshard(async_op=True)
    with gathers() as seen:
        model(INPUTS)
    assert "gate" not in seen


@on_ranks(2)
def test_wait_for_unshard_without_an_unshard_does_nothing() -> None:
    model: Any = uneven(ours())
    model.wait_for_unshard()
    assert_at_rest(model)


# Resharding


@contextmanager
def gathers() -> Iterator[list[str]]:
    """The names of the units whose parameters are gathered, in order."""
    seen: list[str] = []

    def noted(do: Callable[..., Any]) -> Callable[..., Any]:
        def method(handle: FlatParamHandle, *args: Any) -> Any:
            seen.append(handle.unit_name.removeprefix("root (").removesuffix(")"))
            return do(handle, *args)

        return method

    alone, together = noted(FlatParamHandle._exchange), noted(FlatParamHandle.expect)
    with mock.patch.multiple(FlatParamHandle, _exchange=alone, expect=together):
        yield seen


FORWARD = ["FSDPUneven", "trunk", "trunk.2", "gate"]
OUTER_FIRST = ["gate", "trunk", "trunk.2"]  # in backward, where an outer module returns what an inner one has returned


@pytest.mark.parametrize(
    ("reshards", "expected"), [(True, ["FSDPUneven", *OUTER_FIRST]), (False, [])], ids=["resharded", "kept"]
)
@on_ranks(2)
def test_reshard_after_forward_decides_what_backward_gathers(reshards: bool, expected: list[str]) -> None:
    model: Any = uneven(ours(reshard_after_forward=not reshards))
    model.set_reshard_after_forward(reshards)
    once(model, INPUTS)
    with gathers() as seen:
        loss = model(INPUTS).sum()
        assert sorted(seen) == sorted(FORWARD)
        assert is_whole(model.gate) is not reshards
        seen.clear()
        loss.backward()
    assert seen == expected
    assert_at_rest(model)


@on_ranks(2)
def test_set_reshard_after_forward_of_one_module_only() -> None:
    model: Any = uneven(ours())
    model.trunk.set_reshard_after_forward(False, recurse=False)
    model(INPUTS)
    assert is_whole(model.trunk)
    assert not is_whole(model.trunk[2])


@on_ranks(2)
def test_what_a_used_module_was_told_holds_for_its_copies() -> None:
    inner: Any = fsdp.fully_shard(nn.Linear(4, 4))
    once(inner, torch.ones(2, 4))
    inner.set_reshard_after_forward(False)
    outer = fsdp.fully_shard(nn.Sequential(copy.deepcopy(inner), nn.Linear(4, 2)))
    outer(torch.ones(2, 4))
    assert is_whole(outer[0])


@on_ranks(2)
def test_set_reshard_after_backward_keeps_parameters_for_the_next_forward() -> None:
    model: Any = uneven(ours())
    optimizer = adamw_at_once(model.parameters())
    model.set_reshard_after_backward(False)
    once(model, INPUTS)
    with gathers() as seen:
        once(model, INPUTS)
    assert seen == OUTER_FIRST  # in forward all were there
    optimizer.step()
    with gathers() as seen, torch.no_grad():
        model(INPUTS)
    assert sorted(seen) == sorted(FORWARD)  # what is stale is not used


@on_ranks(2, 4)
def test_a_number_gathers_among_the_neighbours_in_backward() -> None:
    model = uneven(ours(reshard_after_forward=2))
    once(model, INPUTS)
    near: list[tuple[str, int]] = []

    def gather(one: KeptShard, full: Tensor, name: str, stage: str, do: Callable[..., Any] = KeptShard.gather) -> Any:
        near.append((name, one.comm.world_size))
        return do(one, full, name, stage)

    with gathers() as seen, mock.patch.object(KeptShard, "gather", gather):
        once(model, INPUTS)
    if dist.get_world_size() == 2:  # all are neighbours: there is nothing nearer
        assert (near, seen[-3:]) == ([], OUTER_FIRST)
    else:
        assert [name for name, _ in near] == ["root (FSDPUneven)", *OUTER_FIRST]
        assert {size for _, size in near} == {2}
        assert sorted(seen) == sorted(FORWARD)


# Prefetching


class Chain(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, wrap(nn.Linear(5, 5)))

    def forward(self, inputs: Tensor) -> Tensor:
        for name in "abcd":
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


@on_ranks(2)
def test_modules_to_prefetch_in_forward() -> None:
    model: Any = seeded(lambda wrap: Chain(wrap), ours())
    model.a.set_modules_to_forward_prefetch([model.c, model.b])
    model.b.set_modules_to_forward_prefetch([])
    model.c.set_modules_to_forward_prefetch([model.d])
    with mock.patch("fsdp.engine.runtime.SMALL_BYTES", 0):  # or the outermost module would have all gathered
        once(model, INPUTS)
    with gathers() as seen:
        model(INPUTS)
    assert seen == ["a", "c", "b", "d"]


@on_ranks(2)
def test_modules_to_prefetch_in_backward() -> None:
    model: Any = seeded(lambda wrap: Chain(wrap), ours())
    model.d.set_modules_to_backward_prefetch([model.b, model.c])
    loss = model(INPUTS).sum()
    with gathers() as seen:
        loss.backward()
    assert seen == ["d", "b", "c", "a"]
    assert_at_rest(model)


# Gradients


@on_ranks(2)
def test_a_module_is_not_prefetched_after_its_backward() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 5), SometimesUsed(5, 5), nn.Linear(5, 5))
    for module in (*model, model):
        fsdp.fully_shard(module)
    model[0].set_modules_to_backward_prefetch([model[1], model[2]])
    for _ in range(2):
        with gathers() as seen:
            once(model, INPUTS)
        assert seen.count("1") == 2
    assert_at_rest(model)


@on_ranks(3)
def test_gradients_are_divided_by_the_factor_that_was_set() -> None:
    model: Any = uneven(ours())
    once(model, INPUTS)
    expected = {name: local(param.grad) * 3 / 5 for name, param in model.named_parameters()}
    model.zero_grad()
    for unit in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        unit.set_gradient_divide_factor(5)
    once(model, INPUTS)
    for name, param in model.named_parameters():
        assert_within(name, local(param.grad), expected[name], 1e-5)
    with pytest.raises(ValueError, match="positive"):
        model.set_gradient_divide_factor(0)


@on_ranks(2)
def test_set_is_last_backward_changes_no_gradient() -> None:
    one, other = uneven(ours()), uneven(ours())
    for turn in range(2):
        other.set_is_last_backward(turn == 1)  # type: ignore[operator]
        for model in (one, other):
            once(model, INPUTS * turn)
    for name, param in one.named_parameters():
        assert_same(local(other.get_parameter(name).grad), local(param.grad), name)


@on_ranks(2)
def test_parameters_whose_backwards_are_not_over_are_listed_unsharded() -> None:
    model: Any = uneven(ours())
    for syncs, is_last, is_listed in [(False, False, True), (True, False, False), (False, True, False)]:
        model.set_requires_gradient_sync(syncs)
        model.set_is_last_backward(is_last)
        once(model, INPUTS)  # also with gradients, for which parameters are listed as shards otherwise
        assert not is_whole(model.trunk)
        assert all(isinstance(param, DTensor) is not is_listed for param in model.parameters())
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())


# Other methods that compute


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def encode(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.encode(inputs)


@on_ranks(2)
def test_other_methods_can_gather_too() -> None:
    model: Any = fsdp.fully_shard(Coder())
    fsdp.register_fsdp_forward_method(model, "encode")
    model.encode(INPUTS).sum().backward()
    assert model.inner.weight.grad is not None
    assert_at_rest(model)
    model(INPUTS)
    plain = nn.Linear(2, 2)
    fsdp.register_fsdp_forward_method(plain, "forward")
    assert "forward" not in plain.__dict__


# What others see


@on_ranks(2)
def test_a_profiler_shows_what_is_done_for_which_module() -> None:
    model = uneven(ours())
    once(model, INPUTS)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        once(model, INPUTS)
    shown = {event.key for event in profiler.key_averages()}
    assert "FSDP::all_gather_wait (trunk.2)" in shown
    # Small units are gathered and reduced together: the label says from which unit to which.
    assert {"FSDP::all_gather (root (FSDPUneven) to gate)", "FSDP::all_gather (gate to trunk.2)"} <= shown
    assert any(key.startswith("FSDP::reduce_scatter (") for key in shown), sorted(filter(lambda k: "FSDP" in k, shown))


@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": False}, {"mp_policy": {"param_dtype": torch.bfloat16}}, {"mesh": (2, 1)}],
    ids=["plain", "kept after forward", "mixed", "replicated"],
)
@on_ranks(2)
def test_between_steps_there_is_as_much_memory_as_with_torchs(options: dict[str, Any]) -> None:
    once(_even(torchs(**options)), EVEN_INPUTS)  # what is made once for all models
    once(_even(ours(**options)), EVEN_INPUTS)
    expected, found = (_weigh_steps(wrap(**options)) for wrap in (torchs, ours))
    for moment, nbytes in found.items():
        assert 0 < nbytes <= expected[moment], f"{moment}: {nbytes} against {expected[moment]} of torch's"


EVEN_INPUTS = torch.ones(2, 8)


def _even(wrap: Wrap) -> nn.Module:
    """Sizes that two ranks divide, so that nobody pads."""
    layers = nn.Sequential(*(wrap(nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 4))
    return wrap(layers)


def _weigh_steps(wrap: Wrap) -> dict[str, int]:
    """Return the bytes that a model adds at each moment between two passes."""
    before = live_bytes()
    model = _even(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {"sharded": live_bytes() - before}
    for step in range(2):
        once(model, EVEN_INPUTS)
        found[f"after backward {step}"] = live_bytes() - before
        optimizer.step()
        found[f"after step {step}"] = live_bytes() - before
        optimizer.zero_grad()
        found[f"after zero_grad {step}"] = live_bytes() - before
    with torch.no_grad():
        model(EVEN_INPUTS)
    found["after a forward without gradients"] = live_bytes() - before
    return found


@on_ranks(2)
def test_between_steps_there_are_shards_and_nothing_else() -> None:
    once(uneven(ours()), INPUTS)  # what is made once for all models
    before = live_bytes()
    model: Any = uneven(ours())
    shards = sum(handle.flat_param.numel() for handle in handles(model)) * 4
    assert live_bytes() - before == shards
    for _ in range(2):
        once(model, INPUTS)
        assert live_bytes() - before == 2 * shards  # and the gradients
        model.zero_grad()
        assert live_bytes() - before == shards
        with torch.no_grad():
            model(INPUTS)
        kept = sum(handle.unsharded.full.nbytes for handle in unit_of(model).handles)  # type: ignore[union-attr]
        assert live_bytes() - before == shards + kept  # the outermost module's, for the next forward, as with torch's
    model.reshard()
    assert live_bytes() - before == shards


@on_ranks(2)
def test_an_inner_module_may_be_unsharded_before_the_outermost_one_is_used() -> None:
    inner = fsdp.fully_shard(nn.Linear(4, 4))
    model = fsdp.fully_shard(nn.Sequential(inner, nn.Linear(4, 2)))
    inner.unshard()  # type: ignore[operator]
    model(torch.ones(2, 4)).sum().backward()
    units = [unit_of(inner), unit_of(model)]
    assert [unit is not None and unit.frees_after_forward for unit in units] == [True, False]


class WithNamesOfItsOwn(nn.Linear):
    """What a user's module may be called inside is not ours."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._unit, self._units = "metres", ["metres"]


@on_ranks(1)
def test_a_module_keeps_attributes_that_are_called_as_ours_are() -> None:
    module: Any = fsdp.fully_shard(WithNamesOfItsOwn())
    fsdp.register_fsdp_forward_method(module, "forward")
    module.set_reshard_after_backward(False)
    assert (module._unit, module._units) == ("metres", ["metres"])
