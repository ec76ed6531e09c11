"""`append_shared_param`: modules with a tied parameter that are wrapped one by one, as FairScale's clients do."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import MixedPrecision, get_fsdp_instances
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Net, Wrap
from tests.helpers.module_kinds import SideBySide, assert_kind_trains, seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, adamw, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.tied_siblings import (
    KINDS,
    UNFLATTENED,
    Deep,
    Siblings,
    share_between,
    under_a_unit_deep_inside,
    under_the_root,
    unflattened,
    wrapped_siblings,
)
from tests.helpers.twins import assert_at_rest, batch, score

OUTER: list[dict[str, Any]] = [{}, {"flatten_parameters": False}]


# Training


@parametrize_cases(
    at_most=6,
    kind=[0, 1, 2, 3, 4],
    world_size=[2, 3, 1],
    make_optimizer=[sgd_with_momentum, adamw],
    reshard_after_forward=[True, False],
    options=OUTER,
)
def test_trains_as_the_tied_model_on_one_process(ranks: RankPool, world_size: int, case: Case) -> None:
    options = {**case.options, "reshard_after_forward": case.reshard_after_forward}
    ranks(world_size).run(assert_kind_trains, *KINDS[case.kind], case.make_optimizer, options)


@parametrize_pairs(at_most=4, kind=[0, 1, 2], world_size=[2, 1], options=OUTER)
@on_ranks("world_size")
def test_gradients_are_accumulated_under_no_sync(kind: int, options: dict[str, Any]) -> None:
    pair = SideBySide(*KINDS[kind], **options)
    for number in range(0, 6, 3):
        with pair.sharded.no_sync():
            pair.backward(number)
            pair.backward(number + 1)
        pair.step(number + 2)
    pair.assert_close()


@on_ranks(2)
def test_gradients_that_were_accumulated_before_sharing_count_alike() -> None:
    torch.set_default_dtype(torch.float64)
    model, plain, inputs = seeded(Siblings), seeded(Siblings), batch(0, 0)
    model.l1, model.l3 = UNFLATTENED(model.l1, gradient_predivide_factor=2.0), UNFLATTENED(model.l3)
    with model.l1.no_sync():
        score(model.l1(inputs)).backward()
    score(plain.l1(inputs)).backward()
    model.l1._reset_lazy_init()
    share_between(model.l1, model.l3)
    root = fully_sharded(gradient_predivide_factor=1.0)(model)  # runs the weight from now on
    for each in (root, plain):
        score(each(inputs)).backward()
    with root.summon_full_params(with_grads=True):
        assert_close(model.l1.module.weight.grad, plain.l1.weight.grad, "gradient of the shared weight")


@on_ranks(2)
def test_trains_in_mixed_precision_and_evaluates_in_full() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    model: Any = under_the_root(seeded(Siblings), fully_sharded(mixed_precision=policy))
    plain = seeded(Siblings)
    inputs = batch(0, 0).float()
    with fsdp.full_precision(model), torch.no_grad():
        torch.testing.assert_close(model(inputs), plain(inputs))
    output = model(inputs)
    torch.testing.assert_close(output.float(), plain(inputs), rtol=0.05, atol=0.05)
    score(output).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_trains_offloaded(ranks: RankPool, offload: str, tmp_path: Path) -> None:
    options = {"offload": offload} | ({"offload_folder": tmp_path} if offload == "disk" else {})
    ranks(2).run(assert_kind_trains, Siblings, under_the_root, adamw, options)


@on_ranks(2)
def test_an_optimizer_from_before_wrapping_is_handed_over() -> None:
    pair = SideBySide(Siblings, under_the_root)
    pair.sharded = seeded(Siblings)
    pair.optimizers = [adamw(model.parameters()) for model in (pair.sharded, pair.plain)]
    pair.on_both(lambda model: score(model(batch(0, 0))).backward())
    for optimizer in pair.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    pair.sharded = under_the_root(pair.sharded, UNFLATTENED)
    pair.sharded.reshard_optimizer(pair.optimizers[0])
    for number in range(3):
        pair.step(number)
    pair.assert_close()


# Who has it


@on_ranks(1, 2)
def test_is_listed_by_all_and_stepped_once() -> None:
    model: Any = under_the_root(seeded(Siblings), UNFLATTENED)
    (shared,) = set(model.l1.params) & set(model.l3.params)
    for _ in range(2):
        assert [param is shared for param in model.l1.params] == [True, False]
        assert [param is shared for param in model.l3.params] == [False, True]
        assert model.l1.non_shared_params() == model.l1.params
        assert [param is shared for param in model.l3.non_shared_params()] == [False]
        assert len(model.l3.numel_padded_per_param) == 2
        assert [param is shared for param in model.parameters()].count(True) == 1
        assert all(param is not shared for param in model.params)
        assert [name for name, _ in model.l3.named_parameters()] == ["weight", "bias"]
        model(torch.ones(2, 5))  # the root runs it from now on


@on_ranks(2)
def test_the_lowest_unit_around_all_uses_runs_it() -> None:
    model: Any = under_a_unit_deep_inside(seeded(Deep), UNFLATTENED)
    model(torch.ones(2, 5))
    runs_shared = [
        wrapper.module.module
        for wrapper in get_fsdp_instances(model)
        if any(handle not in wrapper._unit.owned_handles for handle in wrapper._unit.handles)
    ]
    assert runs_shared == [model.body[0].module.module, model.body[1].module.module]


def test_a_unit_in_two_places_is_left_around_all_of_them(ranks: RankPool) -> None:
    ranks(2).run(assert_kind_trains, Crossed, crossed)


class Crossed(nn.Module):
    """Each of two blocks has both siblings, so that neither block is around all uses."""

    def __init__(self) -> None:
        super().__init__()
        one, two = nn.Linear(5, 5), nn.Linear(5, 5)
        two.weight = one.weight
        self.left, self.right = nn.Sequential(one, nn.Linear(5, 5), two), nn.Sequential(two, nn.Linear(5, 5), one)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.right(torch.tanh(self.left(inputs)))


def crossed(model: Any, wrap: Wrap) -> nn.Module:
    one, two = unflattened(wrap)(model.left[0]), unflattened(wrap)(model.left[2])
    share_between(one, two)
    model.left[0] = model.right[2] = one
    model.left[2] = model.right[0] = two
    model.left, model.right = wrap(model.left), wrap(model.right)
    return wrap(model)


def outside() -> nn.Module:
    """The module itself uses the weight of a module inside of it."""
    net = Net(lambda net, x: net.own(net.inner(x)) @ net.weight, inner=nn.Linear(5, 5), own=nn.Linear(5, 5))
    net.weight = net.inner.weight
    return net


def shared_with_a_module_inside(model: Any, wrap: Wrap) -> nn.Module:
    model.inner = unflattened(wrap)(model.inner)
    outer: Any = unflattened(wrap)(model)
    outer.append_shared_param(model.inner.module.weight)
    return outer


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_may_share_with_one_inside_of_it(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(assert_kind_trains, outside, shared_with_a_module_inside)


@parametrize_pairs(world_size=[1, 2], given=["what the module shows", "shard", "original"])
@on_ranks("world_size")
def test_is_known_by_any_of_its_forms(given: str) -> None:
    model: Any = seeded(Siblings)
    original = model.l1.weight
    model.l1, model.l3 = UNFLATTENED(model.l1), UNFLATTENED(model.l3)
    forms = {"what the module shows": model.l1.module.weight, "shard": model.l1.params[0], "original": original}
    for _ in range(2):  # the second time changes nothing
        model.l3.append_shared_param(forms[given])
        assert len(model.l3.params) == 2
    model.l3.append_shared_param(model.l3.module.weight)
    assert len(model.l3.params) == 2


# Between steps


@on_ranks(2)
def test_nothing_is_whole_between_steps() -> None:
    torch.set_default_dtype(torch.float64)
    model = under_a_unit_deep_inside(seeded(Deep), UNFLATTENED)
    handles = {handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles}
    for number in range(2):
        score(model(batch(number, 0))).backward()
        assert_at_rest(model)
        assert handles == {handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles}
    elements = sum(param.numel() for param in Deep().parameters())
    assert sum(param.numel() for param in model.parameters()) <= elements // 2 + len(handles)


@on_ranks(2)
def test_a_model_that_is_dropped_is_freed() -> None:
    plain = seeded(Siblings)
    originals = [weakref.ref(param) for param in plain.parameters()]
    model: Any = under_the_root(plain, UNFLATTENED)
    assert [original() for original in originals] == [None] * len(originals)
    score(model(batch(0, 0).float())).backward()
    kept = [weakref.ref(one) for one in (*model.parameters(), model.l1, model.l3)]
    del plain, model
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


@on_ranks(2)
def test_a_copy_is_shared_by_its_own_modules() -> None:
    pair = SideBySide(Siblings, under_the_root)
    pair.step(0)
    before = pair.sharded
    state = before.state_dict()
    pair.sharded = copy.deepcopy(before)
    pair.optimizers = [sgd_with_momentum(model.parameters()) for model in (pair.sharded, pair.plain)]
    for number in range(1, 4):
        pair.step(number)
    pair.assert_close()
    pair.assert_loads_back()
    assert_close_state(before.state_dict(), state)


def test_an_unpickled_model_shares_it_too() -> None:
    model: Any = wrapped_siblings(seeded(Siblings), fully_sharded(process_group=Alone()))
    model = fully_sharded(process_group=Alone())(model)
    model(torch.ones(2, 5))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: Any = torch.load(file, weights_only=False)
    for wrapper in get_fsdp_instances(loaded):
        wrapper.process_group = Alone()
    torch.testing.assert_close(loaded(torch.ones(2, 5)), model(torch.ones(2, 5)))
    with loaded.summon_full_params():
        assert loaded.l1.module.module.weight is loaded.l3.module.module.weight


@on_ranks(2)
def test_a_copy_of_one_sibling_does_not_take_the_model_with_it() -> None:
    model: Any = under_the_root(seeded(Siblings), UNFLATTENED)
    model(torch.ones(2, 5))
    expected = model.state_dict()["l1.weight"]
    copied = copy.deepcopy(model.l1)
    assert torch.equal(copied.state_dict()["weight"], expected)
    with pytest.raises(RuntimeError, match=r"weight of .* is shared .* with l3, which is not inside of l1"):
        copied(torch.ones(2, 5))
    model(torch.ones(2, 5))
