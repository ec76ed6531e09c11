"""What a pickle would take, found before it is unpickled: where it ends, and how much memory and time it asks for.

The unpickler of the standard library believes what a pickle says: it allocates as many bytes as a string claims to
have, and a memo of twice the number under which something is remembered. And it hashes keys, which takes as long as
there are paths through a tuple of tuples that are the same ones: exponentially many. So the operations are gone through
first, with numbers on the stack in the place of objects.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from typing import Any, NamedTuple

from fsdp.checkpoint.formats.lazy_tensors import is_lazy

_PATHS_PER_BYTE = 100  # of a pickle: objects that are mentioned several times count as often
_FREE_PATHS = 1 << 20  # in small ones
# What operations do, but for those that are told apart by their names.
_REMEMBER, _RECALL, _MARK, _REPEAT, _DROP, _STOP, _FRAME, _COMBINE, _LEAF = range(9)
_SPECIAL = {
    "PUT": _REMEMBER,
    "BINPUT": _REMEMBER,
    "LONG_BINPUT": _REMEMBER,
    "MEMOIZE": _REMEMBER,
    "GET": _RECALL,
    "BINGET": _RECALL,
    "LONG_BINGET": _RECALL,
    "MARK": _MARK,
    "DUP": _REPEAT,
    "POP": _DROP,
    "STOP": _STOP,
    "FRAME": _FRAME,
}
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


class _Operation(NamedTuple):
    """What one does.

    Attributes:
        kind: one of the above.
        fixed: how many bytes its argument has.
        is_length: whether these say how many more there are.
        lines: how many lines of text are its argument instead.
        pops: how many objects it takes from the stack, below a mark if it has one.
        to_mark: whether it takes all down to the mark.
        pushes: whether it leaves an object.
    """

    kind: int
    fixed: int
    is_length: bool
    lines: int
    pops: int
    to_mark: bool
    pushes: bool


def _operation(code: pickletools.OpcodeInfo) -> _Operation:
    before, pushes = [each.name for each in code.stack_before], bool(code.stack_after)
    size = code.arg.n if code.arg is not None else 0
    lines = 0 if size != pickletools.UP_TO_NEWLINE else 2 if code.name in ("GLOBAL", "INST") else 1
    kind = _SPECIAL.get(code.name, _COMBINE if before or not pushes else _LEAF)
    pops = before.index("mark") if "mark" in before else len(before)
    return _Operation(kind, _LENGTHS.get(size, max(size, 0)), size in _LENGTHS, lines, pops, "mark" in before, pushes)


_OPERATIONS = {ord(code.code): _operation(code) for code in pickletools.opcodes}


def end_of_pickle(data: bytes, begin: int = 0) -> int:
    """Where a pickle ends that begins at a byte of some data.

    Raises:
        EOFError: if it ends behind the data.
        LookupError, ValueError: if it is none, or asks for more than its size allows.
    """
    most = _FREE_PATHS + _PATHS_PER_BYTE * (len(data) - begin)
    stack: list[int] = []  # for each object how many there are in it; 0 for a mark
    memo: dict[int, int] = {}
    place, end = begin, len(data)
    while place < end:
        kind, fixed, is_length, lines, pops, to_mark, pushes = _OPERATIONS[data[place]]
        first = place + 1
        place = first + fixed
        if is_length:
            place += int.from_bytes(data[first:place], "little")
        elif lines:
            for _ in range(lines):
                place = data.find(b"\n", place) + 1 or end + 1
        if place > end:
            break
        if kind == _LEAF:
            stack.append(1)
        elif kind == _REMEMBER:
            number = _number(data[first:place], lines) if place > first else len(memo)
            if not 0 <= number <= place - begin:  # the unpickler allocates as many places
                raise ValueError(f"an object is remembered under number {number}, after {place - begin} bytes")
            memo[number] = stack[-1]
        elif kind == _RECALL:
            stack.append(memo[_number(data[first:place], lines)])
        elif kind == _MARK:
            stack.append(0)
        elif kind == _COMBINE:
            count = 1
            if to_mark:
                while found := stack.pop():
                    count += found
            for _ in range(pops):
                count += stack.pop()
            if count > most:
                raise ValueError("objects that are mentioned several times make it many times larger than the file")
            if pushes:
                stack.append(count)
        elif kind == _STOP:
            return place
        elif kind == _REPEAT:
            stack.append(stack[-1])
        elif kind == _DROP:
            stack.pop()
        elif _number(data[first:place], 0) > end - place:  # of a frame
            break
    raise EOFError("the pickle is cut short")


def _number(argument: bytes, is_text: int) -> int:
    return int(argument) if is_text else int.from_bytes(argument, "little")


def require_small(tree: Any, nbytes: int) -> None:
    """Raise ValueError if a walk through a tree of containers would take much longer than the tree's pickle is.

    Where containers are mentioned several times, a walk comes to what is in them as often. Cycles are left to whoever
    walks, who finds no end in them at the first try.
    """
    most = _FREE_PATHS + _PATHS_PER_BYTE * nbytes
    counts: dict[int, int] = {}
    stack = [(tree, False)]
    while stack:
        value, is_done = stack.pop()
        inside = _inside(value)
        if is_done:
            counts[id(value)] = 1 + sum(counts.get(id(each), 1) for each in inside)
            if counts[id(value)] > most:
                raise ValueError("what is mentioned several times in it makes it many times larger than the file")
        elif inside and id(value) not in counts:
            counts[id(value)] = 1
            stack.append((value, True))
            stack.extend((each, False) for each in inside)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)) and not is_lazy(value):
        return list(value)
    state = getattr(value, "state", None)  # of an object that was not made
    return [state, getattr(value, "args", ())] if state is not None else []
