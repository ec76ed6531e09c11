"""The positions of ranks that wait for each other, and a report of the positions with the cause."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from fsdp.distributed import communicator, passes
from fsdp.distributed.communicator import named
from fsdp.distributed.passes import Pass

_FRAMES = 3  # lines of the user's code in a report, for each rank
_PASSES = 2  # passes in a report, for each rank
_NEW = 1.0  # seconds after which a collective should be complete if all ranks have reached it

_CALLS = "Make the same calls on every rank, in the same order, and not under a condition like `if rank == 0`."
_ARGUMENTS = "Make the call with the same arguments on every rank."
_UNITS = "Run the same units in the same passes on every rank, and make the same calls."
_GROUPS = "Pass the same ranks on every rank (process_group, mesh, WORLD_SIZE)."

# Known operations that may take long, by parts of their file names.
_SLOW = [
    ("/torch/_dynamo/", "compiling"),
    ("/torch/_inductor/", "compiling"),
    ("/fsdp/checkpoint/", "saving or loading a checkpoint"),
    ("/torch/serialization.py", "saving or loading a file"),
    ("/torch/distributed/checkpoint/", "saving or loading a checkpoint"),
    ("/bdb.py", "in a debugger"),
]
_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_DECORATORS = ("wrapper", "decorate_context", "replacement")  # wrap public functions of torch
_LIBRARIES = tuple(
    {str(Path(module).parent) for module in (torch.__file__, communicator.__file__.replace("/distributed/", "/"))}
    | {sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib")}
)


@dataclass
class Position:
    """A position describes the current operation of a rank.

    Attributes:
        waits_for: the collective, of the library or of torch, for which the rank waits; None if it does not wait.
        awaits: the ranks whose messages the rank waits for; empty if unknown, as in torch's collectives.
        call: the current public call; empty during forward and backward.
        seconds: the duration of the wait; 0 in a collective of torch.
        stack: the innermost lines of the user's code in the thread, such as "train.py:12 in step", the outermost first.
        occupation: the current operation, if known and possibly long; None otherwise.
        passes: the latest forwards and backwards of the main thread, the oldest first.
        groups: the ranks of the process groups that the rank's models use.
    """

    waits_for: str | None
    awaits: Sequence[int]
    call: str
    seconds: float
    stack: Sequence[str]
    occupation: str | None
    passes: Sequence[Pass]
    groups: Sequence[Sequence[int]]

    @classmethod
    def here(cls, is_aside: bool) -> Position:
        """Return the position of this rank's main thread, or of the other thread with the longest wait."""
        thread, wait = longest_wait(is_aside) or (threading.main_thread().ident or 0, None)
        stacks = {each: _frames(frame) for each, frame in sys._current_frames().items()}
        busy = [frame for each, frames in stacks.items() if communicator.is_aside(each) is is_aside for frame in frames]
        call = "" if wait or is_aside else _call_of_torchs(stacks.get(thread, ()))
        return cls(
            waits_for=wait.what if wait else "a collective of torch" if call else None,
            awaits=communicator.awaited_by(thread),
            call=wait.call if wait else call,
            seconds=time.monotonic() - wait.since if wait else 0.0,
            stack=_places(stacks.get(thread, ())),
            occupation=next((words for frame in busy for part, words in _SLOW if part in frame.filename), None),
            passes=[] if is_aside else passes.path.snapshot(),
            groups=communicator.ranks_of_groups(),
        )

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Position:
        return cls(**{**known, "passes": [Pass(**one) for one in known["passes"]]})

    def __str__(self) -> str:
        where = f", at {' > '.join(self.stack)}" if self.stack else ""
        if self.waits_for is None:
            return f"in no collective{f', {self.occupation}' if self.occupation else ''}{where}"
        call = f" in {self.call}" if self.call else ""
        ran = f"; ran {', '.join(map(str, self.passes[-_PASSES:]))}" if self.passes else ""
        return f"waiting for {self.waits_for}{call}{where}{ran}"


class Report:
    """A report describes the answers of the ranks as text.

    Args:
        asker: the rank that waits too long.
        answers: the positions by rank, or a text with the reason if a rank gave no answer.
    """

    def __init__(self, asker: int, answers: Mapping[int, Position | str]) -> None:
        self._asker, self._answers = asker, answers
        self._came = {rank: each for rank, each in answers.items() if isinstance(each, Position)}
        self._wait = self._came[asker]
        self._late = _late(asker, answers)

    @property
    def is_due(self) -> bool:
        """False if the wait is over, if all ranks have just arrived, or if late ranks run a known long operation."""
        busy = [rank for rank in self._late if rank in self._came and self._came[rank].occupation]
        if self._late or self._wait.waits_for is None:
            return self._wait.waits_for is not None and busy != self._late
        are_together = {each.waits_for for each in self._came.values()} == {self._wait.waits_for}
        return not are_together or min(each.seconds for each in self._came.values()) > _NEW

    def __str__(self) -> str:
        seconds = f"{self._wait.seconds:.0f} s"
        head = f"fsdp: rank {self._asker} has waited for {self._wait.waits_for} for {seconds}."
        return "\n".join([head, *lines_of(self._answers), conclusion(self._asker, self._answers)])


def lines_of(answers: Mapping[int, Position | str]) -> list[str]:
    """Return the answers as lines of text; ranks with equal answers share a line."""
    by_text: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        by_text.setdefault(str(answer), []).append(rank)
    return [f"  {named(ranks)}: {text}" for text, ranks in by_text.items()]


def conclusion(asker: int, answers: Mapping[int, Position | str]) -> str:
    """Return the reason why ranks wait for each other, and a remedy, according to their positions."""
    from fsdp.distributed.paths import difference  # only required for reports

    came = {rank: each for rank, each in answers.items() if isinstance(each, Position)}
    waiting = {rank: each for rank, each in came.items() if each.waits_for is not None}
    late = _late(asker, answers)
    found = difference({rank: each.passes for rank, each in came.items()}, [asker, *waiting])
    found = found or _of_calls(waiting, not late) or _of_groups(asker, came, late)
    found = found[:1].upper() + found[1:]
    if late:
        return f"The others wait for {named(late)}.{f' {found}' if found else ''}"
    if found:
        return found
    if len({(each.waits_for, each.call) for each in waiting.values()}) > 1:
        call = waiting[asker].call
        remedy = _ARGUMENTS if call else _UNITS
        return f"The ranks wait for each other in different collectives{f' of {call}' if call else ''}. {remedy}"
    return "All ranks wait for the same collective: the network is slow, or has lost a message."


def _late(asker: int, answers: Mapping[int, Position | str]) -> list[int]:
    """Return the ranks for which a rank waits, directly or indirectly, and which do not wait in a collective."""
    seen, ahead = {asker}, [asker]
    late = []
    while ahead:
        rank = ahead.pop()
        each = answers.get(rank)
        if isinstance(each, Position) and each.waits_for is not None:
            ahead += {*(each.awaits or answers)} - seen
            seen.update(ahead)
        elif rank in answers:
            late.append(rank)
    return sorted(late)


def _of_calls(waiting: Mapping[int, Position], are_all: bool) -> str:
    """Return a description of the ranks in different public calls; empty if there is no difference."""
    by_call: dict[str, list[int]] = {}
    for rank, each in sorted(waiting.items()):
        by_call.setdefault(each.call, []).append(rank)
    training, calls = by_call.pop("", []), list(by_call.items())
    if not calls or (are_all and len(calls) == 1 and not training):
        return ""
    (first, ranks), *others = calls
    text = f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} in {first}, which every rank must call"
    for call, elsewhere in others:
        text += f", and {named(elsewhere)} in {call}"
    if training:
        last = waiting[training[0]].passes[-1:]
        where = last[0].name if last and not last[0].is_over else "forward or backward"
        text += f", and {named(training)} in {where}"
    return f"{text}. {_CALLS}"


def _of_groups(asker: int, came: Mapping[int, Position], late: Sequence[int]) -> str:
    """Return a description of the ranks without a group in which `asker` waits for them; empty if there are none."""
    for group in came[asker].groups:
        without = [rank for rank in group if rank in came and group not in came[rank].groups]
        are_through = all(rank in without and came[rank].passes and not came[rank].groups for rank in late)
        if without and are_through:
            theirs = " and ".join(map(named, came[without[0]].groups)) or "itself alone"
            return f"rank {asker} shards over {named(group)}, and {named(without)} over {theirs}. {_GROUPS}"
    return ""


def longest_wait(is_aside: bool) -> tuple[int, communicator.Wait] | None:
    """Return the thread with the longest wait and this wait, of the main or of other threads; None without a wait."""
    found = [each for each in list(communicator.waits.items()) if communicator.is_aside(each[0]) is is_aside]
    return min(found, key=lambda each: each[1].since, default=None)


def places_in(frame: FrameType | None) -> Sequence[str]:
    """Return the innermost lines of the user's code in a stack (at most `_FRAMES`), the outermost first."""
    return _places(_frames(frame))


def last_place(trace: TracebackType | None) -> Sequence[str]:
    """Return the innermost line of the user's code in the traceback of an exception, if any."""
    return _places(traceback.extract_tb(trace))[-1:]


def _frames(frame: FrameType | None) -> Sequence[traceback.FrameSummary]:
    return traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)[::-1] if frame else []


def _places(frames: Sequence[traceback.FrameSummary]) -> Sequence[str]:
    users = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
    return [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in users][-_FRAMES:]


def _call_of_torchs(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the function called by the user's code if a thread is in a collective of torch, otherwise ""."""
    if not any(frame.filename.endswith(_COLLECTIVES) for frame in frames):
        return ""
    called = takewhile(lambda frame: frame.filename.startswith(_LIBRARIES), reversed(frames))
    public = (each.name for each in reversed([*called]) if not each.name.startswith("_"))
    return next((f"{name}()" for name in public if name not in _DECORATORS), "a call of torch.distributed")
