"""State dicts, summoning and errors of `append_shared_param`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import MixedPrecision
from tests.helpers.equality import assert_close_state
from tests.helpers.module_kinds import SideBySide, seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.tied_siblings import (
    KINDS,
    UNFLATTENED,
    Blocks,
    Siblings,
    share_between,
    under_the_root,
    wrapped_blocks,
    wrapped_siblings,
)

used = pytest.mark.parametrize("is_used", [False, True], ids=["before use", "after use"])


def siblings(**options: Any) -> Any:
    """Unflattened, and not shared yet."""
    model: Any = seeded(Siblings)
    wrap = fully_sharded(**({"flatten_parameters": False} | options))
    model.l1, model.l3 = wrap(model.l1), wrap(model.l3)
    return model


# State dicts


@parametrize_pairs(kind=[0, 1, 2, 4], is_used=[False, True])
@on_ranks(2)
def test_saved_under_every_name_and_once(kind: int, is_used: bool) -> None:
    pair = SideBySide(*KINDS[kind])
    if is_used:
        pair.step(0)
    expected = pair.plain.state_dict()
    assert_close_state(pair.sharded.state_dict(), expected)
    _assert_ties(pair.sharded.state_dict(), expected)
    narrow = pair.sharded.state_dict(dtype=torch.bfloat16)
    assert {value.dtype for value in narrow.values()} == {torch.bfloat16}
    with pair.sharded.summon_full_params():
        summoned = pair.sharded.state_dict()
        assert_close_state(summoned, expected)
        _assert_ties(summoned, expected)
        live = {param.data_ptr() for param in pair.sharded.parameters()}
        assert live.isdisjoint(value.data_ptr() for value in summoned.values())
        tied = {id(param) for _, param in pair.sharded.named_parameters(remove_duplicate=False)}
        assert len(tied) == len({id(param) for param in pair.plain.parameters()})
    pair.step(1)
    pair.assert_close()


def _assert_ties(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for one in expected:
        for other in expected:
            is_tied = expected[one].data_ptr() == expected[other].data_ptr()
            assert (found[one].data_ptr() == found[other].data_ptr()) is is_tied, (one, other)


@parametrize_pairs(kind=[0, 1, 2, 4], is_used=[False, True])
@on_ranks(2)
def test_loaded_under_any_name(kind: int, is_used: bool) -> None:
    pair = SideBySide(*KINDS[kind])
    if is_used:
        pair.step(0)
    for number, name in enumerate(pair.plain.state_dict()):
        state = {name: torch.full_like(pair.plain.state_dict()[name], 0.01 * number)}
        results = [model.load_state_dict(state, strict=False) for model in (pair.sharded, pair.plain)]
        assert results[0] == results[1]
        pair.assert_close()
    pair.step(1)
    pair.assert_close()


@parametrize_pairs(world_size=[1, 2], sibling=["l1", "l3"], is_used=[False, True])
@on_ranks("world_size")
def test_that_of_one_sibling_alone_is_complete(sibling: str, is_used: bool) -> None:
    pair = SideBySide(Siblings, under_the_root)
    if is_used:
        pair.step(0)
    ours, plain = getattr(pair.sharded, sibling), getattr(pair.plain, sibling)
    assert_close_state(ours.state_dict(), plain.state_dict())
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    pair.on_both(lambda model: getattr(model, sibling).load_state_dict(changed))
    with ours.summon_full_params(), torch.no_grad():
        ours.module.module.weight.mul_(2)
    with torch.no_grad():
        plain.weight.mul_(2)
    pair.assert_close()
    pair.step(1)
    pair.assert_close()


@parametrize_pairs(block=["left", "right"], is_used=[False, True])
@on_ranks(2)
def test_that_of_a_unit_around_one_sibling_is_complete(block: str, is_used: bool) -> None:
    pair = SideBySide(Blocks, wrapped_blocks)
    if is_used:
        pair.step(0)
    ours, plain = getattr(pair.sharded, block), getattr(pair.plain, block)
    assert_close_state(ours.state_dict(), plain.state_dict())
    assert {value.dtype for value in ours.state_dict(dtype=torch.float16).values()} == {torch.float16}
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of a .* inside a FullyShardedDataParallel"):
        ours.module.module.state_dict()
    pair.step(1)
    pair.assert_close()


@on_ranks(2)
def test_a_gather_while_another_shows_it_is_an_error() -> None:
    pair = SideBySide(Siblings, under_the_root)
    pair.step(0)
    message = "another unit that shares its parameter is inside summon_full_params"
    with pair.sharded.l1.summon_full_params():
        assert_refused(lambda: pair.sharded(torch.ones(2, 5)), message, RuntimeError)
    pair.step(1)
    pair.assert_close()


# Other changes between steps


@used
@on_ranks(2)
def test_casting_freezing_and_assigning_reach_it(is_used: bool) -> None:
    pair = SideBySide(Siblings, under_the_root)
    if is_used:
        pair.step(0)
    pair.on_both(lambda model: model.float().double())

    def freeze(model: Any) -> None:
        model.l1.requires_grad_(False)

    pair.on_both(freeze)
    pair.step(1)
    pair.assert_close()
    pair.on_both(lambda model: model.requires_grad_(True))
    pair.step(2)
    pair.assert_close()


@on_ranks(2)
def test_another_outermost_unit_may_be_used_later() -> None:
    pair = SideBySide(Siblings, under_the_root)
    pair.step(0)
    pair.sharded._reset_lazy_init()
    pair.sharded = fully_sharded()(nn.Sequential(pair.sharded, nn.Linear(5, 5)))
    pair.plain = nn.Sequential(pair.plain, nn.Linear(5, 5))
    pair.plain.load_state_dict(pair.sharded.state_dict())
    pair.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pair.sharded, pair.plain)]
    pair.step(1)
    pair.assert_close()


# Errors


def assert_refused(body: Callable[[], object], message: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=message):
        body()


def test_of_a_flattened_wrapper_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = fully_sharded(process_group=Alone())(model[1])
    unflat: Any = fully_sharded(process_group=Alone(), flatten_parameters=False)(model[0])
    assert_refused(lambda: flat.append_shared_param(unflat.params[0]), "has flatten_parameters=True.*Wrap all")


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}], ids=str)
@pytest.mark.parametrize("flattened", ["first", "second"])
def test_a_tie_with_a_flattened_wrapper_is_refused_at_wrapping(options: dict[str, Any], flattened: str) -> None:
    model: Any = seeded(Siblings)
    wraps = [
        fully_sharded(process_group=Alone(), flatten_parameters=False),
        fully_sharded(process_group=Alone(), **options),
    ]
    first, second = reversed(wraps) if flattened == "first" else wraps
    model.l1 = first(model.l1)
    assert_refused(lambda: second(model.l3), r"^weight is the same parameter as weight of Linear.*auto_wrap")


def test_nothing_of_its_own_is_refused_at_wrapping() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    two.weight = one.weight
    wrap = fully_sharded(process_group=Alone(), flatten_parameters=False)
    wrap(one)
    assert_refused(lambda: wrap(two), "Linear has no parameter of its own: weight is the same.*Leave both")
    assert isinstance(two.weight, nn.Parameter)


def test_what_is_not_tied_is_refused() -> None:
    model = siblings(process_group=Alone())
    other: Any = fully_sharded(process_group=Alone(), flatten_parameters=False)(nn.Linear(5, 5))
    foreign = [other.module.weight, other.params[0], nn.Parameter(torch.ones(5, 5)), model.l1.module.bias, None]
    for param in foreign:
        assert_refused(
            lambda param=param: model.l3.append_shared_param(param),  # type: ignore[misc]
            r"is not a parameter of another wrapper.*\(those are: weight\)",
        )
    assert_refused(lambda: model.l1.append_shared_param(model.l1.module.weight), "those are: none")


@on_ranks(2)
def test_a_tie_that_was_not_shared_is_an_error_at_first_use() -> None:
    model = UNFLATTENED(siblings())
    for use in (lambda: model(torch.ones(2, 5)), model.state_dict, model.l3.state_dict):  # type: ignore[union-attr, operator]
        assert_refused(
            use, r"^weight of '.*' is the same parameter as weight of '.*'.*append_shared_param", RuntimeError
        )
    model.l3.append_shared_param(model.l1.module.weight)  # type: ignore[union-attr, operator]
    model(torch.ones(2, 5))


@on_ranks(2)
def test_after_the_first_use_is_too_late() -> None:
    model = siblings()
    with model.l1.summon_full_params():
        assert_refused(
            lambda: share_between(model.l1, model.l3),
            "inside summon_full_params.*Leave the context first",
            RuntimeError,
        )
    model.l1(torch.ones(2, 5))
    assert_refused(
        lambda: share_between(model.l1, model.l3), "before the first use only, and .*Linear.* was used", RuntimeError
    )
    model.l1._reset_lazy_init()  # as the message says
    share_between(model.l1, model.l3)
    UNFLATTENED(model)(torch.ones(2, 5))


@on_ranks(2)
def test_one_sibling_used_alone_is_an_error() -> None:
    model = wrapped_siblings(seeded(Siblings), fully_sharded())
    for one in (model.l1, model.l3):
        with pytest.raises(
            RuntimeError, match=r"is shared \(append_shared_param\) with Linear, which is not inside of"
        ):
            one(torch.ones(2, 5))
    root = fully_sharded()(model)  # as the message says
    root(torch.ones(2, 5))
    root._reset_lazy_init()
    root.state_dict()
    assert_refused(lambda: root.l1.module.weight + 1, "weight is sharded: outside of .* backward of", RuntimeError)


@on_ranks(2)
def test_wrappers_that_differ_are_refused() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    bfloat = MixedPrecision(param_dtype=torch.bfloat16)
    for options, what in (({"process_group": group}, "process_group"), ({"mixed_precision": bfloat}, "precision")):
        model: Any = seeded(Siblings)
        model.l1, model.l3 = UNFLATTENED(model.l1), fully_sharded(flatten_parameters=False, **options)(model.l3)
        assert_refused(
            lambda model=model: share_between(model.l1, model.l3),  # type: ignore[misc]
            f"weight of Linear and weight of Linear are one parameter, but their units differ in {what}",
        )


@on_ranks(2)
def test_the_unit_around_them_must_have_the_same_ranks() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = siblings(process_group=group)
    share_between(model.l1, model.l3)
    root = fully_sharded()(model)
    assert_refused(
        lambda: root(torch.ones(2, 5)),
        "innermost unit around all modules that share weight.*differs from them in their ranks",
        RuntimeError,
    )
