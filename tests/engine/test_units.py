"""Whatever a unit holds, takes and returns, it trains like the same module without the wrapper.

Grids of more than two options are sampled (`parametrize_pairs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, get_fsdp_instances
from tests.helpers.models import Net, Wrap, seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.twins import (
    OPTIONS,
    STEPS,
    Step,
    Twins,
    assert_at_rest,
    assert_trains_like_plain,
    backward_twice,
    batch,
    eval_first,
    every_option,
    in_eval_mode,
    inference_mode_first,
    once,
    score,
    tanh_layers,
    toolbox,
    two_forwards_then_backwards,
)

# Modules without parameters


def around_nothing(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(5, 7), wrap(nn.Tanh()), wrap(nn.LayerNorm(7, elementwise_affine=False)), nn.Linear(7, 5)
    return wrap(nn.Sequential(wrap(wrap(nn.Identity())), *layers))


@parametrize_pairs(world_size=[2, 3], options=OPTIONS)
def test_a_unit_without_parameters(ranks: RankPool, world_size: int, options: dict[str, Any]) -> None:
    ranks(world_size).run(assert_trains_like_plain, around_nothing, once, eval_first, options=options)


@on_ranks(1, 2, 3)
def test_a_root_without_parameters() -> None:
    model, inputs = FullyShardedDataParallel(nn.ReLU()), torch.tensor([-1.0, 2.0], requires_grad=True)
    for _ in range(2):
        model(inputs).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [0.0, 2.0]
    assert (list(model.parameters()), model.params, model.numel_padded_per_param) == ([], [], [])
    assert model.state_dict() == {}
    model.load_state_dict(model.state_dict())
    with model.summon_full_params():
        assert list(model.parameters()) == []
    assert model.clip_grad_norm_(1.0) == 0.0


# Frozen parameters, and several dtypes, in one unit


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def adapted(inputs: int, outputs: int) -> nn.Module:
    """A frozen layer with a trained correction of low rank."""
    return Net(
        lambda net, x: net.base(x) + net.up(net.down(x)),
        base=frozen(nn.Linear(inputs, outputs)),
        down=nn.Linear(inputs, 2, bias=False),
        up=nn.Linear(2, outputs, bias=False),
    )


def adapted_layers() -> nn.Module:
    return nn.Sequential(adapted(5, 7), nn.Tanh(), adapted(7, 5))


def frozen_below() -> nn.Module:
    """The trained part has its gradients before the frozen one is needed for the last time."""
    return nn.Sequential(frozen(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 5))


def frozen_above() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), frozen(nn.Linear(7, 5)))


def frozen_layers() -> nn.Module:
    return frozen(tanh_layers())


def frozen_with_inplace_start() -> nn.Module:
    return nn.Sequential(InPlace(), frozen(nn.Linear(5, 5)))


class InPlace(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.tanh_()


def cast(dtype: torch.dtype) -> nn.Module:
    return Net(lambda net, x: x.to(net.dtype), dtype=dtype)


def two_dtypes() -> nn.Module:
    single = nn.Sequential(cast(torch.float32), nn.Linear(5, 5, dtype=torch.float32), nn.Tanh())
    return nn.Sequential(single, cast(torch.float64), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def two_dtypes_frozen() -> nn.Module:
    layers = two_dtypes()
    frozen(layers[0])
    return layers


GROUPED = [adapted_layers, frozen_below, frozen_above, frozen_layers, two_dtypes, two_dtypes_frozen]


@parametrize_cases(at_most=14, tool=GROUPED, step=STEPS[:7], options=OPTIONS)
def test_several_groups_of_parameters_in_a_unit(ranks: RankPool, case: Case) -> None:
    ranks(2).run(assert_groups_train, partial(toolbox, tool=case.tool), case.step, options=case.options)


@parametrize_cases(at_most=6, tool=GROUPED, order=["abc", "abcab"], reentrant=[True, False], options=OPTIONS)
def test_checkpointing_around_several_groups_of_parameters(ranks: RankPool, case: Case) -> None:
    make = partial(toolbox, tool=case.tool, order=case.order, recompute=case.reentrant)
    ranks(2).run(assert_groups_train, make, once, two_forwards_then_backwards, options=case.options)


def assert_groups_train(make: Callable[[Wrap], nn.Module], *steps: Step, options: dict[str, Any]) -> None:
    """As `assert_trains_like_plain`, where float32 parameters may round."""
    twins = Twins.of(make, **options)
    for number in range(max(3, len(steps) + 1)):
        twins.take(number, steps[number % len(steps)])
    assert_at_rest(twins.sharded)
    twins.share_plain()
    found = twins.sharded.state_dict()
    for name, value in twins.plain.state_dict().items():
        assert found[name].dtype is value.dtype
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tool", GROUPED, ids=lambda tool: tool.__name__)
@on_ranks(2)
def test_flat_parameters_keep_to_one_dtype_and_to_frozen_or_not(tool: Callable[[], nn.Module]) -> None:
    torch.set_default_dtype(torch.float64)
    plain = tool()
    groups = {(param.dtype, param.requires_grad) for param in plain.parameters()}
    wrapped = FullyShardedDataParallel(plain)
    assert {(param.dtype, param.requires_grad) for param in wrapped.params} == groups
    assert len(wrapped.params) == len(groups)


def frozen_between(wrap: Wrap) -> nn.Module:
    """The root's own frozen layer stands between an inner unit and a trained layer of the root."""
    torch.manual_seed(0)
    net = Net(
        lambda net, x: net.exit(torch.tanh(net.middle(net.inner(x)))),
        inner=wrap(tanh_layers()),
        middle=frozen(nn.Linear(5, 5)),
        exit=nn.Linear(5, 5),
    )
    return wrap(net)


@every_option
def test_a_frozen_layer_above_an_inner_unit(ranks: RankPool, options: dict[str, Any]) -> None:
    for step in (once, backward_twice, two_forwards_then_backwards):
        ranks(2).run(assert_trains_like_plain, frozen_between, step, options=options)


class Holder:
    """An object that nothing is known of."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def takes_holder() -> nn.Module:
    return Net(lambda net, held: net.layers(held.value), layers=frozen_below())


def gives_holder(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(
        nn.Sequential(
            nn.Linear(5, 5),
            Net(
                lambda net, x: net.second(Holder(net.first(x))), first=wrap(tanh_layers()), second=wrap(takes_holder())
            ),
        )
    )


def test_a_partly_frozen_unit_takes_its_inputs_in_any_object(ranks: RankPool) -> None:
    ranks(2).run(assert_trains_like_plain, gives_holder, once, two_forwards_then_backwards)


def inplace_toolbox(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), wrap(frozen_with_inplace_start()), nn.Linear(5, 5)))


def test_a_frozen_unit_may_change_its_inputs_in_place(ranks: RankPool) -> None:
    ranks(2).run(assert_trains_like_plain, inplace_toolbox, once)


@every_option
@on_ranks(2)
def test_partly_frozen_units_are_freed_one_by_one_in_a_recomputing_backward(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    model = toolbox(fully_sharded(**options, bucket_cap_mb=0), tool=adapted_layers, recompute=False)
    handles = [handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
    root, tool = (sum(h.unsharded.full.nbytes for h in w._unit.handles) for w in (model, model.tools["a"]))
    whole_tools: list[float] = []

    def count(_: Any) -> None:
        live = sum(handle.unsharded.full.untyped_storage().nbytes() for handle in handles)
        whole_tools.append((live - root) / tool)

    def watch(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(count)

    for module in (model.module.module.entry, *model.tools.values()):
        module.register_forward_hook(watch)
    for number in range(3):
        whole_tools.clear()
        once(model, batch(number, 0))
        # Seen where backward reaches the outputs of c, b, a and entry: besides the unit that computes, only one
        # that is prefetched or kept from forward.
        most = [3, 2, 1, 1] if options == {"reshard_after_forward": False} else [2, 2, 2, 1]
        assert len(whole_tools) == 4
        assert all(found <= allowed for found, allowed in zip(whole_tools, most, strict=True)), whole_tools


def sparse_table() -> nn.Module:
    return nn.Sequential(Whole(), nn.Embedding(7, 5, sparse=True))


class Whole(nn.Module):
    """Row numbers from numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, 0].abs().long().clamp_max(6)


@on_ranks(2)
def test_sparse_gradients_are_refused_by_name() -> None:
    model = toolbox(fully_sharded(), tool=sparse_table)
    with pytest.raises(RuntimeError, match=r"tools\.\w: 1\.weight has .*layout torch\.sparse_coo.*sparse=False"):
        once(model, torch.randn(4, 5))
    with torch.no_grad():
        model(torch.randn(4, 5))
    assert_at_rest(model)


# What units return


@dataclass(slots=True)
class SlottedRecord:
    left: Tensor
    right: Tensor


class Named(NamedTuple):
    left: Tensor
    right: Tensor


class Custom:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.parts = {"left": [left], "others": Holder(right)}


# What is made of two tensors, and how they are found in it again.
PACKINGS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "sequences": (lambda left, right: ([left, "text"], None, deque([right, 1.0])), lambda got: (got[0][0], got[2][0])),
    "mapping": (lambda left, right: {"left": left, 3: (right,)}, lambda got: (got["left"], got[3][0])),
    "slots": (SlottedRecord, lambda got: (got.left, got.right)),
    "named tuple": (Named, lambda got: (got.left, got.right)),
    "custom object": (Custom, lambda got: (got.parts["left"][0], got.parts["others"].value)),
}


class Packing(nn.Module):
    def __init__(self, packing: str) -> None:
        super().__init__()
        self.left, self.right = tanh_layers(), tanh_layers()
        self.packing = packing

    def forward(self, inputs: Tensor) -> Any:
        return PACKINGS[self.packing][0](self.left(inputs), self.right(inputs).exp())


class Unpacking(nn.Module):
    """Uses both of two packed outputs in training, and only the second in eval mode."""

    def __init__(self, wrap: Wrap, packing: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(wrap(Packing(packing)) for _ in range(2))
        self.packing = packing

    def forward(self, inputs: Tensor) -> Tensor:
        for unit in self.units:
            left, right = PACKINGS[self.packing][1](unit(inputs))
            inputs = left * right if self.training else right
        return inputs


def unpacking(wrap: Wrap, packing: str) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), Unpacking(wrap, packing)))


@pytest.mark.parametrize("packing", list(PACKINGS))
def test_outputs_in_any_packing(ranks: RankPool, packing: str) -> None:
    ranks(2).run(assert_trains_like_plain, partial(unpacking, packing=packing), once, in_eval_mode)


class Silent(nn.Module):
    """A unit that returns nothing; what it computes is found on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tanh_layers()
        self.result: Tensor | None = None

    def forward(self, inputs: Tensor) -> None:
        self.result = self.layers(inputs.detach())


class Listening(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.silent = wrap(Silent())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        try:
            raise ValueError("handled while the unit runs")
        except ValueError:
            assert self.silent(hidden) is None
        return hidden


def test_a_unit_may_return_none(ranks: RankPool) -> None:
    ranks(2).run(assert_trains_like_plain, partial(seeded, Listening), once)


def passing_on(wrap: Wrap) -> nn.Module:
    """Returns its input as it is, and as another output what it computed from it."""
    torch.manual_seed(0)
    return wrap(Net(lambda net, x: (x, net.layers(x)), layers=tanh_layers()))


@every_option
def test_an_input_leaf_may_be_returned(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, passing_on, use_leaf, use_both, options=options)


def use_leaf(model: nn.Module, inputs: Tensor) -> None:
    leaf = inputs.clone().requires_grad_()
    returned, _ = model(leaf)
    assert returned is leaf
    score(returned).backward()
    assert not leaf._backward_hooks
    use_both(model, inputs)


def use_both(model: nn.Module, inputs: Tensor) -> None:
    leaf = inputs.clone().requires_grad_()
    returned, computed = model(leaf)
    (score(returned) + score(computed)).backward()
    assert leaf.grad is not None


def position(whole: bool) -> nn.Module:
    """A unit whose output is a part of its parameter, or all of it."""
    return Net(
        lambda net, x: net.table if net.whole else net.table[: len(x)],
        table=nn.Parameter(torch.randn(1, 5) if whole else torch.randn(7, 5)),
        whole=whole,
    )


class Positioned(nn.Module):
    def __init__(self, wrap: Wrap, whole: bool) -> None:
        super().__init__()
        self.position = wrap(position(whole))
        self.layers = wrap(tanh_layers())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs + self.position(inputs))


@every_option
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_unit_may_return_its_parameter(ranks: RankPool, whole: bool, options: dict[str, Any]) -> None:
    make = partial(seeded, partial(Positioned, whole=whole))
    ranks(2).run(assert_trains_like_plain, make, once, eval_first, inference_mode_first, options=options)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_a_parameter_that_the_root_returned_is_still_there(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = position(whole=True)
    expected = model.table.detach().clone()
    model = FullyShardedDataParallel(model)
    with mode():
        output = model(torch.zeros(1))
        assert torch.equal(output.detach(), expected)


@on_ranks(1, 2)
def test_a_parameter_that_is_only_used_outside_of_its_units_forward() -> None:
    model: Any = fully_sharded()(beside())
    loss = model(torch.ones(1, 3)).sum()  # the root's parameters stay whole after it
    (loss + 2 * model.module.module.outside.sum()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert model.state_dict()["outside"].tolist() == [0.0] * 4


def beside() -> nn.Module:
    return Net(lambda net, x: net.inner(x), inner=nn.Linear(3, 2), outside=nn.Parameter(torch.ones(4)))
