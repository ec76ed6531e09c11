"""The order of units: what is predicted from what was seen, and when a prediction is trusted."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp.engine.reduction import Reductions
from fsdp.engine.schedule import ExecutionOrder


class Unit:
    """Equal to every other one: units are told apart by identity."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


UNITS = {name: Unit() for name in "abcd"}


def name_of(found: Unit) -> str:
    return next(name for name, unit in UNITS.items() if unit is found)


def run(order: ExecutionOrder[Unit], names: str) -> str:
    """One pass; returns what was due when each unit began, "-" for nothing."""
    order.begin()
    expected = [order.enter(UNITS[name]).due for name in names]
    return "".join(name_of(found[0]) if found else "-" for found in expected)


def test_the_first_pass_is_only_watched() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    assert run(order, "abc") == "---"
    assert not order.is_settled
    assert not order.at_expected_end()


def test_a_pass_is_predicted_from_the_one_before() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "abc")
    assert run(order, "abc") == "bc-"
    assert run(order, "abc") == "bc-"


def test_units_that_run_several_times_are_predicted_by_their_place() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "abacab")
    assert run(order, "abacab") == "bacab-"


def test_of_a_unit_that_runs_several_times_in_a_row_the_next_other_one_is_expected() -> None:
    """What it needs itself is here already."""
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "aabbb")
    assert run(order, "aabbb") == "b----"


def test_the_unit_that_is_due_next_is_known_too() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "aabbcd")
    order.begin()
    found = [order.enter(UNITS[name]) for name in "aabbcd"]
    assert ["".join(map(name_of, (*each.due, *each.later))) for each in found] == ["bc", "", "cd", "", "d", ""]


def test_small_units_are_due_in_buckets_while_the_bucket_before_runs() -> None:
    sizes = dict(zip("abcdefgh", (9, 1, 2, 1, 2, 9, 1, 1), strict=True))
    own, due = expected_in(ExecutionOrder[str](sizes.__getitem__, 4), "abcdefgh")
    assert own == ["a", "bcd", "", "", "e", "f", "gh", ""]
    assert due == ["bcd", "e", "", "", "f", "gh", "", ""]


def test_a_unit_that_runs_again_is_due_after_it_has_run() -> None:
    assert expected_in(ExecutionOrder[str](lambda _: 1, 9), "abac") == (["ab", "", "ac", ""], ["", "ac", "", ""])


def test_the_first_bucket_is_due_when_a_pass_begins_with_what_is_here_already() -> None:
    order = ExecutionOrder[str](lambda _: 1, 2)
    for _ in range(2):
        order.begin()
        found = [order.enter(name, is_gathered=name != "r") for name in "rarbcr"]
    assert [(*each.own, *each.due) for each in found] == [("a", "b"), ("a", "b"), (), ("c",), ("c",), ()]
    assert order.at_expected_end() is False
    order.begin()
    for name in "rarbcr":
        order.enter(name, is_gathered=False)
    assert order.at_expected_end()


def test_a_bucket_is_due_when_the_last_item_runs_that_is_here_before_it() -> None:
    _, due = expected_in(ExecutionOrder[str](), "RRaRRbcR")
    assert due == ["", "a", "", "", "b", "c", "", ""]
    _, due = expected_in(ExecutionOrder[str](lambda _: 1, 2), "abcdRRef")
    assert due == ["cd", "", "", "", "", "ef", "", ""]


def test_a_bucket_is_the_same_where_an_item_that_is_here_runs_more_or_less_often() -> None:
    for often in ("RRab", "ab", "RRRaRb"):
        order = ExecutionOrder[str](lambda _: 1, 2)
        expected_in(order, "RRab")
        order.begin()
        found = [order.enter(name, is_gathered=name.islower()) for name in often]
        assert found[often.index("a")].own == ["a", "b"]


def expected_in(order: ExecutionOrder[str], names: str) -> tuple[list[str], list[str]]:
    """The buckets that begin, and those that are due, at each place of a pass that was recorded before.

    Items in upper case are here already.
    """
    for _ in range(2):
        order.begin()
        found = [order.enter(name, is_gathered=name.islower()) for name in names]
    return ["".join(each.own) for each in found], ["".join(each.due) for each in found]


@given(st.text("abcdefgh", min_size=1, max_size=24), st.data())
def test_each_unit_is_due_before_it_runs_and_little_at_a_time(names: str, data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(0, 6), label=name) for name in sorted(set(names))}
    limit = data.draw(st.integers(0, 8), label="limit")
    ahead: list[str] = []  # gathered, and not run yet
    order = ExecutionOrder[str](sizes.__getitem__, limit)
    for place, (own, due) in enumerate(zip(*expected_in(order, names), strict=True)):
        name = names[place]
        if not place:
            ahead += own
        if not place or name != names[place - 1]:
            assert ahead[0] == name, "in their order"
            assert not own or own == "".join(ahead)[: len(own)], "it has come together"
            del ahead[0]
        assert not set(due) & {*ahead, name}, "not while it is on its way, or runs"
        ahead += due
        assert sum(sizes[one] for one in ahead if sizes[one] <= limit) <= 2 * limit
        assert sum(sizes[one] > limit for one in ahead) <= 1
    assert not ahead


@given(st.text("abcdR", min_size=1, max_size=24))
def test_no_memory_is_held_while_items_run_that_are_here(names: str) -> None:
    _, due = expected_in(ExecutionOrder[str](), names)
    for found, following in zip(due, [*names[1:], ""], strict=True):
        assert not found or following != "R"


def test_entering_without_a_begun_pass_predicts_nothing() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    assert order.enter(UNITS["a"]) == ((), (), ())
    assert not order.at_expected_end()


@pytest.mark.parametrize(
    ("first", "second", "predicted"),
    [
        ("abcd", "acbd", "b---"),  # at the second unit; what comes later in the right place is not trusted
        ("abcd", "bacd", "----"),
        ("abc", "abcd", "bc--"),  # longer
        ("abcd", "ab", "bc"),  # shorter
    ],
)
def test_the_prediction_stops_at_the_first_difference(first: str, second: str, predicted: str) -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, first)
    assert run(order, second) == predicted


def test_the_next_pass_is_predicted_from_what_really_happened() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "abc")
    run(order, "acb")
    assert run(order, "acb") == "cb-"


def test_beginning_without_running_anything_forgets_nothing() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "ab")
    order.begin()
    order.begin()
    assert run(order, "ab") == "b-"


def test_an_order_seen_twice_running_is_settled() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "ab")
    run(order, "ab")
    assert not order.is_settled, "the second pass may still go on"
    run(order, "ab")
    assert order.is_settled


@pytest.mark.parametrize("other", ["ba", "a", "abc", "b"])
def test_another_order_unsettles_until_it_was_seen_twice(other: str) -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    for _ in range(3):
        run(order, "ab")
    run(order, other)
    order.begin()
    assert not order.is_settled
    for _ in range(2):
        run(order, other)
        order.begin()
    assert order.is_settled


def test_the_expected_end_is_known_once_the_order_is_settled() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    run(order, "ab")
    run(order, "ab")
    assert not order.at_expected_end(), "seen only once before"
    order.begin()
    order.enter(UNITS["a"])
    assert not order.at_expected_end()
    order.enter(UNITS["b"])
    assert order.at_expected_end()
    order.enter(UNITS["c"])
    assert not order.at_expected_end(), "it went on after all"


def test_no_end_is_expected_in_a_pass_that_went_another_way() -> None:
    order: ExecutionOrder[Unit] = ExecutionOrder()
    for _ in range(3):
        run(order, "ab")
    run(order, "cb")
    assert not order.at_expected_end()


def test_gradients_that_still_wait_are_sent_in_one_order_on_all_ranks() -> None:
    """They have come in the order of this rank's graph."""
    sent: list[int] = []
    reductions = Reductions(0)
    with mock.patch.object(Reductions, "_start", lambda _, number: sent.append(number)):
        reductions._waiting = {2: 2, 0: 0, 1: 1}  # type: ignore[dict-item]
        reductions.finish()
    assert sent == [0, 1, 2]
