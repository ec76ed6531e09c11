"""Whatever a step does, the model trains like the same model without the wrapper.

Almost every test here is one comparison (`assert_trains_like_plain`): the wrapped model takes some steps, each rank
on its own inputs, the plain model takes the same steps on the inputs of all ranks one after the other, and their
weights must agree. test_units.py does the same for what a unit holds, takes and returns. Grids of more than two
options are sampled (`parametrize_pairs`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy, TrainingState, fully_shard, get_fsdp_instances
from fsdp.distributed import passes
from fsdp.distributed.communicator import CollectiveError
from tests.helpers.calls import infer
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Net, Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import gathering
from tests.helpers.twins import (
    OPTIONS,
    STEPS,
    Step,
    Twins,
    assert_at_rest,
    assert_trains_like_plain,
    backward_twice,
    batch,
    every_option,
    in_eval_mode,
    once,
    score,
    sgd,
    tanh_layers,
    toolbox,
    two_forwards_then_backwards,
)

# Each kind with one form of parameters, and below with all.


@every_option
def test_steps_of_all_kinds_in_turn(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, nested_mlp, *STEPS, options=options)


def inner_unit_alone(model: nn.Module, inputs: Tensor) -> None:
    score(model.trunk(inputs.repeat(1, 2)[:, :7])).backward()


def the_users_own_module(model: nn.Module, inputs: Tensor) -> None:
    own = model.module.module if isinstance(model, FullyShardedDataParallel) else model
    score(own(inputs)).backward()


@every_option
def test_an_inner_unit_may_be_called_alone_once_the_root_was_used(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, nested_mlp, once, inner_unit_alone, options=options)


@every_option
def test_calling_the_users_module_is_calling_the_wrapper(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, nested_mlp, the_users_own_module, once, options=options)


@on_ranks(2)
def test_calling_the_users_module_first_makes_its_wrapper_the_root() -> None:
    model = nested_mlp(fully_sharded())
    the_users_own_module(model, torch.randn(4, 5))
    assert [wrapper._is_root for wrapper in get_fsdp_instances(model)] == [True, False, False, False]


# Units in any order


def in_order(order: str) -> Step:
    return partial(_in_order, order)


def _in_order(order: str, model: nn.Module, inputs: Tensor) -> None:
    score(model(inputs, order)).backward()


@parametrize_pairs(
    options=OPTIONS,
    orders=[
        ["abcab"],  # units used more than once
        ["aaa"],
        ["ab"],  # a whole unit is never used
        ["abc", "ab", "c"],  # not used now and then
        ["abc", "cba", "bca", "abc", "acb"],  # the next unit is mispredicted
        ["", "abc"],
        ["abc", "abcc", "aabc"],
    ],
)
def test_units_run_in_any_order(ranks: RankPool, orders: list[str], options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, toolbox, *map(in_order, orders), options=options)


def several_roots(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(tanh_layers()) for _ in range(3)))


@pytest.mark.parametrize("step", [once, two_forwards_then_backwards, backward_twice])
@on_ranks(2)
def test_units_without_a_common_root_train_side_by_side(step: Step) -> None:
    twins = Twins.of(several_roots)
    for number in range(3):
        twins.take(number, step)
    for sharded, plain in zip(twins.sharded, twins.plain, strict=True):
        assert sharded._is_root
        Twins(sharded, plain).assert_close()


class PartlyUsed(nn.Module):
    """A unit whose parameters are needed by some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.always(inputs))
        return self.sometimes(hidden) if self.training else hidden


def in_both_modes(model: nn.Module, inputs: Tensor) -> None:
    losses = [score(model.train(mode)(inputs)) for mode in (True, False)]
    for loss in losses:
        loss.backward()
    model.train()


@every_option
def test_unused_parameters_get_no_gradient_or_zero(ranks: RankPool, options: dict[str, Any]) -> None:
    make = partial(toolbox, tool=PartlyUsed)
    for steps in ([in_eval_mode, once, in_both_modes], [once, in_eval_mode, backward_twice]):
        ranks(2).run(assert_trains_like_plain, make, *steps, options=options)


def returns_no_gradient(model: nn.Module, inputs: Tensor) -> None:
    output = model(inputs)
    (output.detach() * inputs.clone().requires_grad_()).sum().backward()
    once(model, inputs)


def test_an_output_may_go_unused(ranks: RankPool) -> None:
    ranks(2).run(assert_trains_like_plain, nested_mlp, returns_no_gradient)


@on_ranks(2)
def test_two_forwards_of_compiled_units_then_backwards() -> None:
    twins = Twins.of(compiled_toolbox)
    for number, step in enumerate([once, two_forwards_then_backwards]):
        twins.take(number, step)
    assert_at_rest(twins.sharded)
    found = list(twins.sharded.state_dict().values())
    twins.share_plain()
    torch.testing.assert_close(found, list(twins.plain.state_dict().values()))


def compiled_toolbox(wrap: Wrap) -> nn.Module:
    return toolbox(wrap, tool=tanh_layers if wrap is keep else compiled_layers)


def compiled_layers() -> nn.Module:
    layers = tanh_layers()
    layers.compile(backend="aot_eager")
    return layers


# Hooks


@on_ranks(2)
def test_one_hook_of_ours_on_every_output() -> None:
    model = toolbox(fully_sharded())
    for _ in range(3):
        outputs: list[Tensor] = []
        watching = [
            wrapper.register_forward_hook(lambda _, __, output, outputs=outputs: outputs.append(output))
            for wrapper in get_fsdp_instances(model)
        ]
        loss = score(model(torch.randn(4, 5)))
        assert [len(output._backward_hooks or {}) for output in outputs] == [1] * 4
        loss.backward()
        assert [len(output._backward_hooks or {}) for output in outputs] == [1] * 4
        for handle in watching:
            handle.remove()
    for wrapper in get_fsdp_instances(model):
        for handle in wrapper._unit.handles:
            assert all(len(leaf._post_accumulate_grad_hooks) == 1 for leaf in handle.unsharded.leaves)


@on_ranks(2)
def test_no_hook_without_a_backward_to_come() -> None:
    model = nested_mlp(fully_sharded())
    with torch.no_grad():
        assert not model(torch.randn(4, 5))._backward_hooks
    assert_at_rest(model)


@on_ranks(2)
def test_training_states_as_seen_from_inside() -> None:
    model = nested_mlp(fully_sharded())
    trunk = model.trunk
    seen: dict[str, list[TrainingState]] = {}

    def look(moment: str) -> None:
        seen[moment] = [model.training_state, trunk.training_state]

    trunk.module.module[0].register_forward_hook(lambda *_: look("forward"))
    trunk.module.module[1].register_full_backward_hook(lambda *_: look("backward"))
    model.module.module.entry.register_full_backward_hook(lambda *_: look("backward of others"))
    once(model, torch.randn(4, 5))
    look("between steps")
    state = TrainingState
    assert seen == {
        "forward": [state.FORWARD, state.FORWARD],
        "backward": [state.BACKWARD_PRE, state.BACKWARD_PRE],
        "backward of others": [state.BACKWARD_PRE, state.BACKWARD_POST],
        "between steps": [state.IDLE, state.IDLE],
    }


# Exceptions


class Trap(nn.Module):
    """The identity, until it is armed: then it raises once, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        error, self.forward_error = self.forward_error, None
        if error is not None:
            raise error
        if self.backward_error is not None and inputs.requires_grad:
            inputs = inputs.view_as(inputs)
            inputs.register_hook(self._spring)
        return inputs

    def _spring(self, gradient: Tensor) -> None:
        error, self.backward_error = self.backward_error, None
        if error is not None:
            raise error


def trapped_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Trap(), nn.Tanh(), nn.Linear(7, 5))


trapped_toolbox = partial(toolbox, tool=trapped_layers)


def arm(model: nn.Module, where: str, error: BaseException) -> None:
    traps = [module for module in model.modules() if isinstance(module, Trap)]
    setattr(traps[1], f"{where}_error", error)


def forget(model: nn.Module) -> None:
    """What comes first after the failure: nothing but the next step."""


def save(model: nn.Module) -> None:
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def summon(model: nn.Module) -> None:
    with model.summon_full_params():
        assert len(list(model.parameters())) == 15


def call_inner_unit(model: nn.Module) -> None:
    model.tools["b"](torch.ones(4, 5)).sum().backward()


@parametrize_cases(
    at_most=5,
    where=["forward", "backward"],
    error=[ValueError, KeyboardInterrupt],
    then=[forget, save, summon, call_inner_unit, infer],
    options=OPTIONS,
)
@on_ranks(2)
def test_after_an_exception_the_model_is_usable(case: Case) -> None:
    twins = Twins.of(trapped_toolbox, **case.options)
    for number in range(6):
        if number % 2:
            arm(twins.sharded, case.where, case.error("sprung"))
            with pytest.raises(case.error, match="sprung"):
                once(twins.sharded, batch(number, 0))
            case.then(twins.sharded)
        twins.take(number, once)
    twins.assert_close()


@on_ranks(2)
def test_a_unit_is_idle_at_once_after_an_exception_in_forward() -> None:
    model = toolbox(fully_sharded(), tool=trapped_layers)
    arm(model, "forward", ValueError("sprung"))
    with pytest.raises(ValueError, match="sprung"):
        once(model, torch.randn(4, 5))
    assert_at_rest(model)


@pytest.mark.parametrize("prepend", [True, False])
@on_ranks(2)
def test_a_users_hook_may_raise(prepend: bool) -> None:
    twins = Twins.of(toolbox)

    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    own = twins.sharded.tools["b"].module.module
    for register in (own.register_forward_pre_hook, own.register_forward_hook):
        for number in range(2):
            hook = register(refuse, prepend=prepend)
            with pytest.raises(ValueError, match="refused"):
                once(twins.sharded, batch(number, 0))
            hook.remove()
            assert_at_rest(twins.sharded)
            twins.take(number, once)
    twins.assert_close()


class Careful(nn.Module):
    """Goes on without a unit that fails."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.second = wrap(trapped_layers()), wrap(trapped_layers())

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            inputs = inputs + self.second(self.first(inputs))
        except ValueError:
            inputs = self.first(inputs.neg())
        return inputs


def careful(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), Careful(wrap)))


def fail_inside(model: nn.Module, inputs: Tensor) -> None:
    arm(model, "forward", ValueError("sprung"))
    once(model, inputs)


@every_option
def test_a_model_may_catch_the_exception_of_its_unit(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, careful, once, fail_inside, fail_inside, options=options)


@on_ranks(2)
def test_a_backward_that_failed_leaves_the_next_one_whole() -> None:
    assert_trains_like_plain(trapped_toolbox, fail_first_of_two_backwards)
    assert_trains_like_plain(trapped_toolbox, fail_and_zero_in_place)


def fail_first_of_two_backwards(model: nn.Module, inputs: Tensor) -> None:
    if isinstance(model, FullyShardedDataParallel):
        arm(model, "backward", ValueError("sprung"))
        failing, working = score(model(inputs.neg())), score(model(inputs))
        with pytest.raises(ValueError, match="sprung"):
            failing.backward()
        model.zero_grad()
        working.backward()
    else:
        once(model, inputs)


def fail_and_zero_in_place(model: nn.Module, inputs: Tensor) -> None:
    """What has come of the gradients that failed is not added to later ones."""
    if isinstance(model, FullyShardedDataParallel):
        once(model, inputs)
        arm(model, "backward", ValueError("sprung"))
        with pytest.raises(ValueError, match="sprung"):
            once(model, inputs.neg())
        model.zero_grad(set_to_none=False)
    once(model, inputs)


@every_option
@on_ranks(2)
def test_weights_changed_between_forward_and_backward_are_an_error(options: dict[str, Any]) -> None:
    twins = Twins.of(nested_mlp, **options)
    for number in range(2):
        twins.take(number, once)
        loss = score(twins.sharded(batch(number, 0)))
        message = r"root.*were changed .*between forward and backward"
        with changed(twins.sharded), pytest.raises(RuntimeError, match=message):
            loss.backward()
    twins.take(2, once)
    twins.assert_close()


OPTIMIZERS: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True},
    {},
]  # fused ones write behind the back of torch's version counters


@parametrize_pairs(at_most=6, kind=OPTIMIZERS, options=[{}, {"use_orig_params": True}], world_size=[2, 1])
@on_ranks("world_size")
def test_a_step_after_a_forward_without_a_backward_is_seen_by_the_next_one(
    kind: dict[str, Any], options: dict[str, Any]
) -> None:
    model, plain = nested_mlp(fully_sharded(**options)).double(), nested_mlp(keep).double()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, **kind) for each in (model, plain)]
    for number in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            score(each(batch(number, 0))).backward()
            each(batch(number, 0))  # keeps the root whole, for a backward that does not come
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model(batch(number, 1)), plain(batch(number, 1)))


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=str)
@on_ranks(1, 2)
def test_a_step_between_forward_and_backward_is_an_error(kind: dict[str, Any]) -> None:
    model = nested_mlp(fully_sharded()).double()
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    score(model(batch(0, 0))).backward()
    loss = score(model(batch(0, 0)))
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"were changed .*between forward and backward"):
        loss.backward()


@on_ranks(1, 2)
def test_a_cast_between_forward_and_backward_is_an_error() -> None:
    """The buffers that autograd has saved would be made anew."""
    model = nested_mlp(fully_sharded()).double()
    score(model(batch(0, 0))).backward()
    loss = score(model(batch(0, 0)))
    model.float()
    with pytest.raises(RuntimeError, match=r"were changed .*between forward and backward"):
        loss.backward()
    score(model.double()(batch(0, 0))).backward()


@on_ranks(2)
def test_summoning_between_forward_and_backward_says_volatile() -> None:
    """What is saved back may have changed."""
    model: Any = nested_mlp(fully_sharded()).double()
    loss = score(model(batch(0, 0)))
    with model.summon_full_params(volatile=True):
        pass
    loss.backward()
    loss = score(model(batch(1, 0)))
    with model.summon_full_params():
        pass
    with pytest.raises(RuntimeError, match=r"summon_full_params\(\) without volatile=True.*forward and backward"):
        loss.backward()


class Picky(nn.Module):
    """Uses its second half on some ranks only."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.ranks = ranks

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(inputs)
        return outputs + self.second(inputs) if dist.get_rank() < self.ranks else outputs


@on_ranks(3)
def test_ranks_may_complete_small_gradients_in_different_orders() -> None:
    """What one rank did not use is complete at the end of backward only."""
    torch.manual_seed(0)
    wrap = fully_sharded()
    plain = nn.Sequential(*(Picky(using) for using in (3, 1, 2, 0, 3, 1))).double()
    model = wrap(nn.Sequential(*map(wrap, copy.deepcopy(plain))))
    for number in range(3):
        inputs = batch(number, 0)
        model(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.01).step()
            each.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def choosing() -> nn.Module:
    """Computes with two of its four layers at a time."""
    return Net(
        lambda net, x, first: net.layers[first](x) * net.layers[first + 1](x),
        layers=nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4)),
    )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_ranks_may_complete_the_parameters_of_one_unit_in_different_orders(strategy: str) -> None:
    """Each is reduced by itself, and ranks that wait for different ones would wait for ever."""
    torch.manual_seed(0)
    plain = choosing().double()
    model = fully_sharded(flatten_parameters=False, bucket_cap_mb=0, sharding_strategy=ShardingStrategy[strategy])(
        copy.deepcopy(plain)
    )
    _trains_with_two_calls(model, plain, (0, 2) if dist.get_rank() else (2, 0))


class Skipping(nn.Module):
    """Has layers that it may leave out, around and behind what it contains."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 5), nn.Linear(5, 5)
        self.inside = nn.ModuleList(inside)

    def forward(self, inputs: Tensor, is_used: bool) -> Tensor:
        outputs = self.before(inputs) if is_used else inputs + 0.5
        for module in self.inside:
            outputs = outputs + module(outputs, is_used)
        return torch.tanh(self.after(outputs) if is_used else outputs / 2)


def always(inside: nn.Module) -> nn.Module:
    """Has a layer that is always used, so that its output has a gradient."""
    return Net(lambda net, x, is_used: net.inside(net.layer(x), is_used), layer=nn.Linear(5, 5), inside=inside)


@pytest.mark.parametrize("kind", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "rows"])
@on_ranks(2)
def test_ranks_may_use_the_parameters_of_a_unit_in_different_ones_of_its_calls(kind: str) -> None:
    """They complete its gradient early or late in a backward of several calls, and must not wait for each other."""
    torch.manual_seed(0)
    blocks = [Skipping(Skipping(), Skipping()) for _ in range(3)]
    plain = always(Skipping(*blocks)).double()
    model = copy.deepcopy(plain)
    every = [module for module in model.modules() if isinstance(module, Skipping)]
    if kind == "rows":
        for module in (*reversed(every), model):
            fully_shard(module)
    else:
        wrapped = fully_sharded(sharding_strategy=ShardingStrategy[kind])
        for module in reversed(every):
            module.inside = nn.ModuleList(wrapped(inner) for inner in module.inside)
        model.inside = wrapped(model.inside)
        model = wrapped(model)
    _trains_with_two_calls(model, plain, (True, False) if dist.get_rank() else (False, True))


def _trains_with_two_calls(model: nn.Module, plain: nn.Module, choices: tuple[Any, Any]) -> None:
    """A backward of two calls, with a choice of parameters in each, has the plain model's gradients and weights."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
    for number in range(3):
        for each in (model, plain):
            if number == 1:  # one that backward doesn't come to, on one rank for as long as the others are computed
                kept = each(batch(number, 2), choices[0])
                if dist.get_rank():
                    del kept
            sum(each(batch(number, turn), choice).square().mean() for turn, choice in enumerate(choices)).backward()
        for param in plain.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_state(model), dict(plain.state_dict()))


class InOwnDtype(nn.Linear):
    """Takes and returns any dtype."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self.weight.dtype)).to(inputs.dtype)


@on_ranks(2)
def test_units_whose_small_gradients_went_together_may_be_cast_and_frozen_apart() -> None:
    model = fully_sharded()(nn.Sequential(*(fully_sharded()(InOwnDtype(5, 5)) for _ in range(4))))
    inputs = batch(0, 0).float()
    for change in (lambda: None, model[1].double, lambda: model[3].requires_grad_(False)):
        change()
        model.zero_grad()
        model(inputs).square().sum().backward()
        for param in model.parameters():
            assert param.grad is None if not param.requires_grad else param.grad.dtype == param.dtype


@contextmanager
def changed(model: nn.Module) -> Iterator[None]:
    """Other weights inside."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    yield
    with torch.no_grad():
        for param in model.parameters():
            param.div_(2)


# Without torch.distributed


@every_option
@on_ranks(1, backend=None)
def test_a_world_of_one_needs_no_process_group(options: dict[str, Any]) -> None:
    assert not dist.is_initialized()
    torch.set_default_dtype(torch.float64)
    options = {"process_group_reduce_scatter": None, **options}
    sharded, plain = nested_mlp(fully_sharded(process_group=Alone(), **options)), nested_mlp(keep)
    optimizers = sgd(sharded.parameters()), sgd(plain.parameters())
    for number in range(3):
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            optimizer.zero_grad()
            two_forwards_then_backwards(model, batch(number, 0))
            optimizer.step()
    assert sharded.world_size == 1
    assert sharded.children_share_process_group
    assert not dist.is_initialized()
    assert_same_state(sharded.state_dict(), plain.state_dict())
    assert float(sharded.clip_grad_norm_(1.0)) > 0


# What is exchanged, and when


class _Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(("error", "is_over"), [(CollectiveError("lost"), False), (ValueError("wrong"), True)])
@on_ranks(1)
def test_other_ranks_are_told_that_a_forward_has_ended_unless_a_collective_failed_in_it(
    error: Exception, is_over: bool
) -> None:
    wrap = fully_sharded()
    model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), _Fails(error)))
    with pytest.raises(type(error)):
        model(torch.ones(2, 5))
    assert passes.path.passes[-1].is_over is is_over


@on_ranks(2)
def test_a_unit_s_own_all_gather_goes_before_that_of_the_next_one() -> None:
    wrap = fully_sharded(bucket_cap_mb=0)
    model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.Linear(5, 5), wrap(nn.Linear(5, 5))))
    for _ in range(2):  # then the order is known
        model(torch.ones(2, 5)).sum().backward()
    with gathering() as started:
        model(torch.ones(2, 5))
    units = [each._unit for each in (model, model[0], model[2])]
    assert started == [f"all-gather of {unit.handles[0].name} in forward" for unit in units]


@on_ranks(2)
def test_ranks_compare_what_they_have_once() -> None:
    model = nested_mlp(fully_sharded())
    with mock.patch("fsdp.layers.verify.agree_on_plan") as compared:
        for _ in range(2):
            model.state_dict()
    assert compared.call_count == 1
