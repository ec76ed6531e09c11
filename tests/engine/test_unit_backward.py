"""How far backward has come with a unit: its calls by age, and what it waits for before it is through."""

from __future__ import annotations

import weakref
from unittest.mock import Mock

from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit_backward import UnitBackward


class Call:
    """A forward of a unit."""

    number = 0


def made(backward: UnitBackward, count: int) -> list[Call]:
    every = [Call() for _ in range(count)]
    for call in every:
        call.number = backward.add(call)
    return every


def test_backward_awaits_the_oldest_call_of_which_there_is_a_graph() -> None:
    backward = UnitBackward()
    every = made(backward, 4)
    del every[0]
    backward.begin(())
    assert (backward.oldest, backward.reached) == (3, 0)
    for age, call in enumerate(reversed(every), start=1):
        assert backward.may_come
        backward.reach(call.number)
        assert backward.reached == age
    assert not backward.may_come


def test_calls_that_were_made_later_are_not_awaited() -> None:
    """Backward comes to the last one first: it has passed by those when it comes to an older one."""
    backward = UnitBackward()
    first, second = made(backward, 2)
    backward.begin(())
    backward.reach(first.number)
    assert not backward.may_come
    backward.reach(second.number)  # after all, by a re-entrant checkpoint
    assert not backward.may_come


def test_calls_that_a_backward_leaves_out_are_awaited_while_there_is_a_graph() -> None:
    """The backward may be one inside of a forward."""
    backward = UnitBackward()
    first, second = made(backward, 2)
    backward.begin(())
    backward.reach(second.number)
    assert backward.may_come
    (third,) = made(backward, 1)
    backward.begin(())
    backward.reach(third.number)
    assert (backward.oldest, backward.reached) == (3, 1)
    backward.reach(first.number)
    assert not backward.may_come
    made(backward, 1)
    left_out = made(backward, 1)
    backward.begin(())
    assert backward.oldest == 1
    del left_out
    backward.begin(())
    assert backward.oldest == 0


def test_backward_is_through_with_all_calls_gradients_and_inputs() -> None:
    backward, handle = UnitBackward(), Mock(FlatParamHandle)
    first, second = made(backward, 2)
    backward.begin([handle])
    backward.reach(second.number)
    backward.await_inputs(second)
    backward.missing.discard(handle)
    assert not backward.is_through  # with the first call
    backward.reach(first.number)
    assert not backward.is_through  # with the inputs of the second
    backward.leave(second)
    assert backward.is_through
    backward.missing.add(handle)
    assert not backward.is_through


def test_a_backward_that_has_begun_keeps_no_calls_alive() -> None:
    """A call holds on to what its hooks hold."""
    backward = UnitBackward()
    (call,) = made(backward, 1)
    backward.begin(())
    backward.await_inputs(call)
    backward.complete.add(Mock(FlatParamHandle))
    alive = weakref.ref(call)
    del call
    assert alive() is None
    backward.begin(())
    assert not backward.complete  # what was left is not this backward's


def test_forwards_without_a_backward_leave_nothing_behind() -> None:
    backward = UnitBackward()
    for _ in range(1000):
        made(backward, 1)
    assert len(backward._pending) == 1
