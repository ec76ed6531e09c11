"""Parameters that users replace or write between steps are kept in the shards, or refused by name.

Training goes on as on an unwrapped model to which the same was done. Casting and moving is in `test_changed_dtype.py`,
loading past the wrapper in `test_changed_by_loading.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.changed_params import LAYOUTS, ChangedTwins, adamw, by_data, find, in_place, momentum
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import MakeOptimizer, fully_sharded
from tests.helpers.ranks import RankPool

# Of the root's own unit (one of them 0-d), of a unit of a single parameter, and of a unit inside of that.
PATHS = ["entry.weight", "scale", "trunk.0.weight", "trunk.2.0.bias"]

in_every_way = parametrize_pairs(
    world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True], make_optimizer=[momentum, adamw]
)
in_every_layout = parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True])


def twins_of(layout: str, whole: bool, **how: Any) -> ChangedTwins:
    return ChangedTwins(layout, reshard_after_forward=not whole, **how)


def new_value(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.numel()).view(like.shape)


# A new parameter in the module


@in_every_way
@on_ranks("world_size")
def test_an_assigned_parameter_is_kept(layout: str, whole: bool, make_optimizer: MakeOptimizer) -> None:
    twins = twins_of(layout, whole, make_optimizer=make_optimizer)
    twins.assign("scale", torch.tensor(3.0))  # before anything has run
    twins.assert_close()
    before = dict(twins.sharded.named_parameters())

    def change() -> None:
        for path in PATHS:
            twins.assign(path, new_value(twins.plain.get_parameter(path)))
        twins.assert_close()
        twins.assign("entry.weight", torch.full((7, 5), 0.25, dtype=torch.bfloat16))
        with twins.sharded.summon_full_params():  # type: ignore[operator]
            assert find(twins.sharded, "entry").weight.eq(0.25).all()

    twins.train(change, whole=whole)
    after = dict(twins.sharded.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is param and param.dtype == torch.float64 for name, param in before.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_the_same_tensor_may_be_assigned_again(layout: str) -> None:
    twins = ChangedTwins(layout)
    value = nn.Parameter(torch.ones(7, 5))
    for _ in range(3):
        find(twins.sharded, "entry").weight = value
        with torch.no_grad():
            twins.plain.get_parameter("entry.weight").copy_(value)
        twins.step()
        twins.assert_close()


class Assigning(nn.Linear):
    """A layer whose forward assigns a view of its weight, as layers do that move it to a device and back."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__(5, 5)
        self.view, self.frozen = view, nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs) * self.frozen
        self.weight = nn.Parameter(self.view(self.weight.data))
        self.frozen = nn.Parameter(self.frozen.detach(), requires_grad=False)
        return outputs


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True])
@on_ranks("world_size")
def test_a_forward_may_assign_the_parameter_itself(layout: str, whole: bool) -> None:
    def make(wrap: Wrap) -> nn.Module:
        torch.manual_seed(0)
        assigning = Assigning(lambda data: data)
        if wrap is keep:  # or the optimizer of the plain model would have the former parameters
            assigning.forward = partial(nn.Linear.forward, assigning)  # type: ignore[method-assign]
        return wrap(nn.Sequential(nn.Linear(5, 5), wrap(assigning)))

    twins = twins_of(layout, whole, make=make)
    before = dict(twins.sharded.named_parameters())
    for _ in range(3):
        twins.step()
        twins.assert_close()
    after = dict(twins.sharded.named_parameters())
    assert all(after[name] is param for name, param in before.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_forward_that_assigns_another_view_of_a_parameter_is_an_error_by_name(layout: str) -> None:
    wrap = fully_sharded(**LAYOUTS[layout])
    model = wrap(nn.Sequential(nn.Linear(5, 5), wrap(Assigning(Tensor.t))))
    model(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match=r"weight has no values now: .* memory of unsharded .* copy"):
        model(torch.ones(2, 5))


@on_ranks(2)
def test_an_optimizer_of_an_assigned_parameter_says_so() -> None:
    twins = ChangedTwins()
    twins.assign("entry.weight", torch.ones(7, 5))
    optimizer = torch.optim.SGD(find(twins.sharded, "entry").parameters(), lr=0.1)
    twins.step()
    with pytest.raises(RuntimeError, match=r"entry\.weight"):
        optimizer.step()


# Tied parameters


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh())


def tied(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Tied())


@in_every_layout
@on_ranks("world_size")
def test_a_tied_parameter_is_replaced_under_all_its_names(layout: str, whole: bool) -> None:
    twins = twins_of(layout, whole, make=tied)

    def change() -> None:
        value = nn.Parameter(new_value(torch.empty(5, 5)))
        find(twins.sharded, "first").weight = find(twins.sharded, "second").weight = value
        with torch.no_grad():
            twins.plain.get_parameter("first.weight").copy_(value)

    twins.train(change, whole=whole)


@in_every_layout
@on_ranks("world_size")
def test_a_tied_parameter_replaced_under_one_name_is_refused(layout: str, whole: bool) -> None:
    twins = twins_of(layout, whole, make=tied)

    def change() -> None:
        find(twins.sharded, "second").weight = nn.Parameter(torch.ones(5, 5))
        _assert_refused(twins, r"some of its names \(first\.weight, second\.weight\)")
        find(twins.sharded, "first").weight = find(twins.sharded, "second").weight  # now under both
        with torch.no_grad():
            twins.plain.get_parameter("first.weight").fill_(1)

    twins.train(change, whole=whole)


@in_every_layout
@on_ranks("world_size")
def test_one_value_for_two_parameters_would_be_a_tie_and_is_refused(layout: str, whole: bool) -> None:
    twins = twins_of(layout, whole, make=two_alike)
    value = nn.Parameter(torch.ones(5, 5))

    def change() -> None:
        find(twins.sharded, "0").weight = find(twins.sharded, "1").weight = value
        _assert_refused(twins, r"1\.weight.*0\.weight")
        for path in ("0.weight", "1.weight"):
            twins.assign(path, value.detach())

    twins.train(change, whole=whole)


def two_alike(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


# What cannot be kept


def _assert_refused(twins: ChangedTwins, message: str) -> None:
    """Forward, saving and summoning all say so, more than once."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            twins.sharded(torch.ones(2, 5))
        with pytest.raises(RuntimeError, match=message):
            twins.sharded.state_dict()
        with (
            pytest.raises(RuntimeError, match=message),
            twins.sharded.summon_full_params(),  # type: ignore[operator]
        ):
            pass


def other_shape(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(5, 7))


def frozen(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(7, 5), requires_grad=False)


def nothing(module: nn.Module) -> None:
    module.weight = None  # type: ignore[assignment]


def plain_tensor(module: nn.Module) -> None:
    module.__dict__["weight"] = torch.ones(7, 5)  # as assigning does where torch lets it


REFUSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "other_shape": (other_shape, r"entry\.weight: expected shape \(7, 5\), got \(5, 7\)"),
    "frozen": (frozen, r"entry\.weight has requires_grad=False now"),
    "nothing": (nothing, r"entry\.weight was removed"),
    "plain_tensor": (plain_tensor, r"entry\.weight was removed, or is no longer a parameter"),
}


@parametrize_pairs(at_most=5, refused=list(REFUSED), world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True])
@on_ranks("world_size")
def test_what_cannot_be_kept_is_refused_until_it_is_put_right(refused: str, layout: str, whole: bool) -> None:
    replace, message = REFUSED[refused]
    twins = twins_of(layout, whole)

    def change() -> None:
        replace(find(twins.sharded, "entry"))
        _assert_refused(twins, message)
        _put_right(twins)

    twins.train(change, whole=whole)


def _put_right(twins: ChangedTwins) -> None:
    twins.assign("entry.weight", new_value(torch.empty(7, 5)))


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS), whole=[False, True])
@on_ranks("world_size")
def test_a_frozen_parameter_is_not_replaced_by_a_trained_one(layout: str, whole: bool) -> None:
    twins = twins_of(layout, whole, make=half_frozen)

    def change() -> None:
        find(twins.sharded, "0").weight = nn.Parameter(torch.ones(5, 5))
        _assert_refused(twins, r"0\.weight has requires_grad=True now")
        twins.assign("0.weight", torch.ones(5, 5), requires_grad=False)

    twins.train(change, whole=whole)


def half_frozen(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].weight.requires_grad_(False)
    return wrap(model)


# The parameters that the wrapper lists


@in_every_way
def test_in_place_changes_of_listed_parameters_are_kept(
    ranks: RankPool, world_size: int, layout: str, whole: bool, make_optimizer: MakeOptimizer
) -> None:
    ranks(world_size).run(_write_listed, in_place, layout, whole, make_optimizer)


@in_every_way
def test_data_of_listed_parameters_may_be_replaced(
    ranks: RankPool, world_size: int, layout: str, whole: bool, make_optimizer: MakeOptimizer
) -> None:
    ranks(world_size).run(_write_listed, by_data, layout, whole, make_optimizer)


def _write_listed(
    write: Callable[[nn.Parameter], None], layout: str, whole: bool, make_optimizer: MakeOptimizer
) -> None:
    twins = twins_of(layout, whole, make_optimizer=make_optimizer)

    def change() -> None:
        for model in twins.models:
            for param in model.parameters():
                write(param)

    twins.train(change, whole=whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1)
def test_replaced_data_is_in_the_next_state_dict_and_summon(layout: str) -> None:
    twins = ChangedTwins(layout)

    def replace() -> None:
        for model in twins.models:
            for param in model.parameters():
                by_data(param)

    def change() -> None:
        replace()
        twins.assert_close()
        replace()
        with twins.sharded.summon_full_params():  # type: ignore[operator]
            assert torch.equal(find(twins.sharded, "entry").weight, twins.plain.get_parameter("entry.weight"))

    twins.train(change)


@pytest.mark.parametrize("write", ["in_place", "by_data", "assign"])
@on_ranks(2)
def test_a_change_of_what_one_rank_holds_is_seen_by_all(write: str) -> None:
    twins = twins_of("pieces", whole=True)

    def change() -> None:
        if write == "assign":
            twins.assign("scale", torch.tensor(0.5))
            return
        for model in twins.models:
            {"in_place": in_place, "by_data": by_data}[write](dict(model.named_parameters())["scale"])

    twins.train(change, whole=True)


@parametrize_pairs(world_size=[2, 1], whole=[False, True])
@on_ranks("world_size")
def test_a_piece_of_another_dtype_is_refused(whole: bool) -> None:
    twins = twins_of("pieces", whole)

    def change() -> None:
        # All of a unit: a rank that has nothing of a parameter would wait for those that raise.
        pieces = [piece for piece in twins.sharded.params if piece.numel()]  # type: ignore[union-attr]
        before = [piece.data for piece in pieces]
        assert before
        for piece in pieces:
            piece.data = piece.data.half()
        _assert_refused(twins, r"(weight|bias|scale): its \.data was replaced by torch\.float16")
        for piece, data in zip(pieces, before, strict=True):
            piece.data = data

    twins.train(change, whole=whole)


@parametrize_pairs(layout=["flat", "unflattened"], world_size=[2, 1], whole=[False, True])
@on_ranks("world_size")
def test_a_flat_parameter_of_another_size_is_refused(layout: str, whole: bool) -> None:
    twins = twins_of(layout, whole)

    def change() -> None:
        shard = twins.sharded.params[0]  # type: ignore[index]
        before = shard.data
        shard.data = torch.zeros(before.numel() + 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"its \.data was replaced\. Change"):
                twins.sharded(torch.ones(2, 5))
        shard.data = before

    twins.train(change, whole=whole)
