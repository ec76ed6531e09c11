"""The cause of a hang is found by comparing what the ranks have run; no process group is needed for that."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp.distributed.passes import Pass, Path
from fsdp.distributed.paths import difference
from fsdp.distributed.positions import Position, Report, conclusion

UNITS = ["root (Net)", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]

Steps = list[Pass]


def forward(number: int, units: Sequence[str] = UNITS, **known: Any) -> Pass:
    return Pass(
        **{
            "name": f"forward {number}",
            "model": "root (Net)",
            "ranks": "ranks 0-3",
            "mode": ["in train()", "with gradients"],
            "units": list(units),
            "is_over": True,
        }
        | known
    )


def backward(number: int, units: Sequence[str] = UNITS, **known: Any) -> Pass:
    usual = {"name": f"backward {number}", "mode": ["with reduction"], "reduced": UNITS[::-1]}
    return forward(number, [units[0], *units[:0:-1]], **usual | known)


def step(number: int, units: Sequence[str] = UNITS) -> Steps:
    return [forward(number, units), backward(number, units)]


def cut(passes: Steps, events: int) -> Steps:
    """Return what a rank has noted that has come no further."""
    found = []
    for one in passes:
        if events <= 0:
            break
        done = len(one.units) + 1
        found.append(one if events >= done else replace(one, units=one.units[:events], is_over=False))
        events -= done
    return found


def said(*paths: Steps) -> str:
    return difference(dict(enumerate(paths)), range(len(paths)))


# What goes wrong on one rank from forward 3 on, and what is said.

OTHERS = "(rank 0|ranks 0, 2)"


def with_units(change: Callable[[list[str]], list[str]]) -> Steps:
    return [*step(1), *step(2), *step(3, change(list(UNITS)))]


def swapped(units: list[str]) -> list[str]:
    units[2], units[3] = units[3], units[2]
    return units


WRONG: dict[str, tuple[Steps, str]] = {
    "order": (
        with_units(swapped),
        rf"rank 1 ran blocks\.2 before blocks\.1 in forward 3; {OTHERS} ran blocks\.1 first\. .*same order",
    ),
    "order in backward": (
        [*step(1), *step(2), forward(3), backward(3, swapped(list(UNITS)))],
        rf"rank 1 ran blocks\.1 before blocks\.2 in backward 3; {OTHERS} ran blocks\.2 first\. .*same order",
    ),
    "left out": (
        with_units(lambda units: [*units[:2], *units[3:]]),
        rf"rank 1 left blocks\.1 out of forward 3, which {OTHERS} ran\. .*fsdp\.cond",
    ),
    "the last is left out": (
        with_units(lambda units: units[:-1]),
        rf"rank 1 left blocks\.3 out of forward 3, which {OTHERS} ran",
    ),
    "one more": (
        with_units(lambda units: [*units, "blocks.9"]),
        rf"{OTHERS} left blocks\.9 out of forward 3, which rank 1 ran",
    ),
    "instead": (
        with_units(lambda units: [*units[:2], "blocks.9", *units[3:]]),
        rf"rank 1 ran blocks\.9 in forward 3, where {OTHERS} ran blocks\.1",
    ),
    "twice": (
        with_units(lambda units: [*units[:2], *units[1:]]),
        rf"rank 1 ran blocks\.0 twice in forward 3, {OTHERS} once",
    ),
    "the last twice": (
        with_units(lambda units: [*units, units[-1]]),
        rf"rank 1 ran blocks\.3 twice in forward 3, {OTHERS} once",
    ),
    "three times": (
        with_units(lambda units: [*units[:2], units[1], *units[1:]]),
        rf"rank 1 ran blocks\.0 3 times in forward 3, {OTHERS} once",
    ),
    "a forward more": (
        [*step(1), *step(2), forward(3), forward(4), backward(3)],
        rf"rank 1 began forward 4 (while {OTHERS} (is|are) in|where {OTHERS} ran) (backward 3|forward 4).*fsdp\.join",
    ),
    "no backward": (
        [*step(1), *step(2), forward(3), *step(4)],
        rf"rank 1 began forward 4 (while {OTHERS} (is|are) in|where {OTHERS} ran) (backward 3|forward 4).*fsdp\.join",
    ),
    "without gradients": (
        [*step(1), *step(2), forward(3, mode=["in train()", "without gradients"]), backward(3)],
        rf"rank 1 runs forward 3 without gradients, {OTHERS} with gradients\. .*torch\.no_grad",
    ),
    "evaluation": (
        [*step(1), *step(2), forward(3, mode=["in eval()", "without gradients"])],
        rf"rank 1 runs forward 3 in eval\(\) without gradients, {OTHERS} in train\(\) with gradients",
    ),
    "no_sync": (
        [*step(1), *step(2), forward(3), backward(3, mode=["under no_sync()"], reduced=())],
        rf"rank 1 runs backward 3 under no_sync\(\), {OTHERS} with reduction",
    ),
    "frozen": (
        [*step(1), *step(2), forward(3), backward(3, reduced=UNITS[:1:-1])],
        rf"rank 1 did not train blocks\.0, root \(Net\) in backward 3, where it is frozen; {OTHERS} did",
    ),
    "a part is frozen": (
        [*step(1), *step(2), forward(3), backward(3, reduced=[*UNITS[:0:-1], "root (Net) without bias"])],
        rf"rank 1 trains root \(Net\) without bias in backward 3, {OTHERS} trains root \(Net\)\.",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_cause_is_named_with_the_rank_the_unit_and_the_pass(kind: str, world_size: int) -> None:
    wrong, pattern = WRONG[kind]
    right = [*step(1), *step(2), *step(3), *step(4)]
    paths = [right, wrong, right][:world_size]
    assert re.match(pattern, found := said(*paths)), found


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("kind", WRONG)
def test_the_cause_is_named_wherever_the_ranks_stand_behind_it(kind: str, data: st.DataObject) -> None:
    """Ranks that come no further than to the first thing that differs are in doubt only about what comes later."""
    right, (wrong, _) = [*step(1), *step(2), *step(3), *step(4)], WRONG[kind]
    differing = _first_difference(right, wrong)
    rank_0, rank_1, rank_2 = (
        cut(path, data.draw(st.integers(differing, _length(path)))) for path in (right, wrong, right)
    )
    found = said(rank_0, rank_1, rank_2)
    assert "rank 1" in found
    assert re.search("forward 3|backward 3|forward 4", found)
    assert said(rank_0, cut(right, data.draw(st.integers(1, _length(right)))), rank_2) == ""


def _length(passes: Steps) -> int:
    return sum(len(one.units) + 1 for one in passes)


def _events(passes: Steps) -> list[Any]:
    found: list[Any] = []
    for one in passes:
        first, *others = [*one.units, "the end"] if one.is_over else one.units
        found += [(one.name, one.mode, one.reduced, first), *others]
    return found


def _first_difference(right: Steps, wrong: Steps) -> int:
    """Return how many events a rank has noted when the first is among them which the other has not."""
    pairs = list(zip(_events(right), _events(wrong), strict=False))
    return next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs)) + 1


@given(
    units=st.lists(st.sampled_from(UNITS[1:]), min_size=1, max_size=6),
    steps=st.integers(1, 6),
    come=st.lists(st.integers(0, 60), min_size=2, max_size=5),
    kept=st.integers(1, 8),
)
def test_ranks_on_the_same_path_have_no_difference_wherever_they_are(
    units: list[str], steps: int, come: list[int], kept: int
) -> None:
    path = [one for number in range(steps) for one in step(number + 1, [UNITS[0], *units])]
    assert said(*(cut(path, each)[-kept:] for each in come)) == ""


@given(
    order=st.permutations(UNITS[1:]),
    faulty=st.integers(0, 4),
    world_size=st.integers(3, 5),
    come=st.lists(st.integers(0, 5), min_size=5, max_size=5),
)
def test_the_rank_that_differs_from_most_is_the_odd_one(
    order: list[str], faulty: int, world_size: int, come: list[int]
) -> None:
    faulty %= world_size
    other = [UNITS[0], *order]
    paths = [[forward(1), forward(2, other if rank == faulty else UNITS)] for rank in range(world_size)]
    found = said(*paths)
    if other == UNITS:
        assert found == ""
    else:
        first = next(number for number, one in enumerate(other) if one != UNITS[number])
        assert found.startswith(f"rank {faulty} ran {other[first]} before {UNITS[first]} in forward 2; rank")


def test_of_two_ranks_the_odd_one_is_that_which_does_what_it_did_not_do_before() -> None:
    usual, other = [*step(1), *step(2)], [*step(1), *step(2, swapped(list(UNITS)))]
    assert said(usual, other).startswith("rank 1 ran blocks.2 before blocks.1 in forward 2; rank 0")
    assert said(other, usual).startswith("rank 0 ran blocks.2 before blocks.1 in forward 2; rank 1")


def test_what_is_not_known_yet_is_left_in_doubt() -> None:
    waiting = replace(forward(1, UNITS[:3]), is_over=False)
    other = replace(forward(1, [*UNITS[:2], "blocks.3"]), is_over=False)
    expected = "rank 1 ran blocks.3 before blocks.1 in forward 1, or left blocks.1 out; rank 0 ran blocks.1 first."
    assert said([waiting], [other]).startswith(expected)


def test_an_old_difference_that_did_no_harm_is_not_taken_for_the_cause() -> None:
    paths = [
        [*step(1, units), *step(2), forward(3, UNITS[:number], is_over=False)]
        for number, units in ((3, UNITS), (2, swapped(list(UNITS))))
    ]
    paths[1].append(forward(4))
    assert said(*paths).startswith("rank 1 began forward 4 while rank 0 is in forward 3")


def test_models_of_other_ranks_are_not_compared() -> None:
    other = [forward(9, ranks="ranks 4-7")]
    assert said(step(1), step(1), other, other) == ""


def test_the_model_is_named_where_there_are_several() -> None:
    critic = forward(1, ["root (Critic)"], model="root (Critic)")
    found = said([*step(1), replace(critic, is_over=False)], [*step(1), forward(2)])
    assert found.startswith("rank 1 began forward 2 of root (Net) while rank 0 is in forward 1 of root (Critic)")


def test_a_path_numbers_passes_by_their_model_and_keeps_the_last() -> None:
    path = Path()
    for _ in range(20):
        begun = path.begin("forward", "root", frozenset({0, 1, 3}), ["in train()"])
        path.begin("forward", "critic", frozenset({0}), ["in train()"])
    assert (begun.name, begun.ranks) == ("forward 20", "ranks 0-1, 3")
    assert len(path.passes) == 8
    for number in range(5000):
        begun.come_to(f"blocks.{number}")
    assert len(begun.units) == 1000
    assert str(begun) == "forward 20 (..., blocks.996, blocks.997, blocks.998, blocks.999)"


def test_what_other_ranks_are_told_of_a_path_stays_as_it_was_then() -> None:
    path = Path()
    now = path.begin("forward", "root (Net)", frozenset({0, 1}), [])
    now.come_to("blocks.0")
    told = path.snapshot()
    now.come_to("blocks.1")
    now.is_over = True
    assert [(one.units, one.is_over) for one in told] == [(["blocks.0"], False)]


def test_passes_are_counted_anew_for_the_ranks_that_have_recovered() -> None:
    path, every, some = Path(), frozenset({0, 1, 2}), frozenset({0, 1})
    for ranks in (every, some, every):
        path.begin("forward", "root", ranks, ["in train()"])
    path.forget(every)
    assert [(one.name, one.ranks) for one in path.passes] == [("forward 1", "ranks 0-1")]
    assert path.begin("forward", "root", every, ["in train()"]).name == "forward 1"
    assert path.begin("forward", "root", some, ["in train()"]).name == "forward 2"
    path.forget()
    assert not path.passes
    assert path.begin("forward", "root", some, ["in train()"]).name == "forward 1"


# Conclusions from positions

ALL = [[0, 1, 2]]


def at(waits_for: str | None = None, call: str = "", passes: Sequence[Pass] = (), **known: Any) -> Position:
    usual: dict[str, Any] = {"awaits": [], "seconds": 9.0, "stack": [], "occupation": None, "groups": ALL}
    return Position(**usual | {"waits_for": waits_for, "call": call, "passes": passes} | known)


def test_a_call_that_other_ranks_have_not_made_is_named() -> None:
    training = at("all-gather of root", passes=[*step(1), forward(2, UNITS[:1], is_over=False)])
    saving = at("an exchange of messages", "fsdp.save()", step(1))
    found = "ranks 0, 2 are in fsdp.save(), which every rank must call"
    assert conclusion(0, {0: saving, 1: training, 2: saving}).startswith(f"R{found[1:]}, and rank 1 in forward 2. Make")
    assert conclusion(0, {0: saving, 1: at(), 2: saving}).startswith(f"The others wait for rank 1. R{found[1:]}. Make")
    loading = at("an exchange of messages", "fsdp.load()")
    assert conclusion(1, {0: saving, 1: loading}).startswith(
        "Rank 0 is in fsdp.save(), which every rank must call, and rank 1 in fsdp.load(). Make the same calls"
    )


def test_other_arguments_of_the_same_call_are_told() -> None:
    answers = {rank: at(f"the norm of order {rank}", "clip_grad_norm_()", step(1)) for rank in range(2)}
    assert "different collectives of clip_grad_norm_(). Make the call with the same" in conclusion(0, answers)


def test_other_groups_of_ranks_are_named() -> None:
    pair, alone = at("talk", groups=[[0, 1]]), at(passes=[forward(1, ranks="rank 2")], groups=[])
    assert conclusion(2, {0: pair, 1: pair, 2: at("talk", groups=ALL)}).startswith(
        "Rank 2 shards over ranks 0-2, and ranks 0-1 over ranks 0-1. Pass the same ranks"
    )
    assert conclusion(0, {0: at("talk"), 1: at("talk"), 2: alone}).startswith(
        "The others wait for rank 2. Rank 0 shards over ranks 0-2, and rank 2 over itself alone."
    )
    assert conclusion(0, {0: at("talk"), 1: at("talk"), 2: at(groups=[])}) == "The others wait for rank 2."
    apart = {0: at("talk", groups=[*ALL, [0, 1]]), 1: at("talk"), 2: at()}
    assert conclusion(0, apart) == "The others wait for rank 2."  # rank 1 may wait for it before it makes the second


def test_a_rank_that_is_late_may_have_taken_another_path_before() -> None:
    wrong = [*step(1), forward(2, UNITS[:-1])]
    waiting = at("all-gather of blocks.3", passes=[*step(1), forward(2, is_over=False)])
    found = str(Report(0, {0: waiting, 1: at(passes=wrong), 2: waiting}))
    assert "The others wait for rank 1. Rank 1 left blocks.3 out of forward 2, which ranks 0, 2 ran." in found


def test_what_came_before_is_in_order_and_names_each_unit_once() -> None:
    waiting = at("all-gather of blocks.1", passes=[*step(1), forward(2, UNITS[:3], is_over=False)])
    assert str(waiting) == (
        "waiting for all-gather of blocks.1; ran backward 1 (..., blocks.3, blocks.2, blocks.1, blocks.0), "
        "forward 2 (root (Net), blocks.0, blocks.1)"
    )
