"""If ranks wait for each other, a comparison of their operations shows the cause and a remedy.

Each rank records its latest passes (`passes`). When a rank waits too long, `difference` finds the first place at
which the ranks differ. This function only requires the records, and no process group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fsdp.distributed.communicator import named, some_of
from fsdp.distributed.passes import Pass

_ORDER = "Run the same units in the same order on every rank; fsdp.cond runs a module on some ranks only."
_TIMES = (
    "Call the model and backward() equally often on every rank, in the same order; where ranks have different numbers "
    "of batches use fsdp.join."
)
_MODES = (
    "Run each pass in the same mode on every rank: torch.no_grad(), eval(), no_sync(), and factors that divide "
    "gradients."
)
_MOST_MODES = 3  # the maximum number of modes for each side in a message
_FROZEN = "Freeze and unfreeze the same parameters on every rank (requires_grad_)."


def difference(paths: Mapping[int, Sequence[Pass]], among: Iterable[int]) -> str:
    """Return a description of the place at which the ranks' paths differ, and the remedy; "" if the paths are equal.

    The order and modes of all recorded passes are compared first. An old difference in units may be harmless: units
    are first compared from the last common forward of all ranks, and then from earlier forwards.

    Args:
        paths: the passes of each rank, the oldest first.
        among: the ranks that wait for each other. The paths of other ranks are compared if they run the same model.
    """
    compared = _of_one_model(paths, among)
    first = min(compared, default=-1)
    common = [
        one for one in compared.get(first, ()) if all(any(map(one.is_same, other)) for other in compared.values())
    ]
    forwards = [one for one in common if one.name.startswith("forward")] or common
    for start, units in [*((one, False) for one in common[:1]), *((one, True) for one in reversed(forwards))]:
        since = {rank: [*each][_index(each, start) :] for rank, each in compared.items()}
        if found := _Divergence.first_of(since, paths, units=units):
            return found.text
    return ""


def _of_one_model(paths: Mapping[int, Sequence[Pass]], among: Iterable[int]) -> dict[int, list[Pass]]:
    """Return the passes of models on the same ranks as the last model of the first rank in `among` with passes."""
    ranks = next((paths[rank][-1].ranks for rank in among if paths[rank]), None)
    found = {rank: [one for one in each if one.ranks == ranks] for rank, each in paths.items()}
    return {rank: each for rank, each in found.items() if each}


def _index(passes: Sequence[Pass], wanted: Pass) -> int:
    return next(number for number, one in enumerate(passes) if one.is_same(wanted))


@dataclass
class _Side:
    """Ranks with equal paths up to and including the place of a divergence, and an example of these paths."""

    ranks: Sequence[int]
    passes: Sequence[Pass]
    number: int  # the index of the pass that contains the place
    kind: str  # the kind of event at the place
    value: Any
    is_usual: bool  # if True, the previous pass of this kind was equal up to the place

    @property
    def name(self) -> str:
        return named(self.ranks)

    @property
    def here(self) -> Pass:
        return self.passes[self.number]


class _Divergence:
    """A place at which operations of ranks differ: the `odd` ranks run a different operation than the `rest`."""

    def __init__(self, sides: Sequence[_Side]) -> None:
        by_trust = sorted(sides, key=lambda side: (-len(side.ranks), not side.is_usual, min(side.ranks)))
        self.rest, self.odd = by_trust[0], by_trust[1]
        self._has_models = len({one.model for side in sides for one in side.passes}) > 1

    @classmethod
    def first_of(
        cls, since: Mapping[int, Sequence[Pass]], paths: Mapping[int, Sequence[Pass]], *, units: bool
    ) -> _Divergence | None:
        """Return the first divergence, starting from the common first pass; None if all paths are equal."""
        events = {
            rank: [(number, *event) for number, one in enumerate(passes) for event in one.events(units=units)]
            for rank, passes in since.items()
        }
        for place in range(max(map(len, events.values()))):
            there: dict[Hashable, list[int]] = {}
            for rank, each in events.items():
                if place < len(each):  # otherwise the rank is behind, which is not a difference
                    there.setdefault(each[place], []).append(rank)
            if len(there) > 1:
                sides = []
                for ranks in there.values():
                    first = max(ranks, key=lambda rank: len(events[rank]))  # the rank with the most events
                    number, kind, value = events[first][place]
                    begin = [one[1:] for one in events[first][: place + 1] if one[0] == number]
                    is_usual = _is_usual(paths[first], since[first][number], begin)
                    sides.append(_Side(ranks, since[first], number, kind, value, is_usual))
                return cls(sides)
        return None

    @property
    def text(self) -> str:
        kinds = {self.rest.kind, self.odd.kind}
        if kinds == {"mode"}:
            return self._text_of_modes()
        if kinds == {"reduced"}:
            return self._text_of_reduced()
        if "begin" in kinds:
            return self._text_of_passes()
        return self._text_of_units()

    def _text_of_modes(self) -> str:
        own, others = (
            " ".join([word for word in side.here.mode if word not in other.here.mode][:_MOST_MODES])
            for side, other in ((self.odd, self.rest), (self.rest, self.odd))
        )
        runs = "runs" if len(self.odd.ranks) == 1 else "run"
        return f"{self.odd.name} {runs} {self._shown(self.odd.here)} {own}, {self.rest.name} {others}. {_MODES}"

    def _text_of_reduced(self) -> str:
        odd, rest, name = self.odd, self.rest, self._shown(self.odd.here)
        own = [each for each in odd.here.reduced if each not in rest.here.reduced]
        others = [each for each in rest.here.reduced if each not in odd.here.reduced]
        if own and others:
            text = f"{odd.name} trains {some_of(own)} in {name}, {rest.name} trains {some_of(others)}"
        elif own or others:
            less, more = (odd, rest) if others else (rest, odd)
            text = f"{less.name} did not train {some_of(own or others)} in {name}, where it is frozen; {more.name} did"
        else:
            return f"{odd.name} and {rest.name} have their units in different orders. {_ORDER}"
        return f"{text}. {_FROZEN}"

    def _text_of_passes(self) -> str:
        ahead, other = self.odd, self.rest
        if ahead.kind != "begin" or (other.kind == "begin" and other.here.name.startswith("forward")):
            ahead, other = other, ahead
        last = other.passes[-1]
        if last.is_over:
            meanwhile = f"where {other.name} ran {self._shown(other.here)}"
        else:
            meanwhile = f"while {other.name} {'is' if len(other.ranks) == 1 else 'are'} in {self._shown(last)}"
        return f"{ahead.name} began {self._shown(ahead.here)} {meanwhile}. {_TIMES}"

    def _text_of_units(self) -> str:
        name, both = self._shown(self.odd.here), ((self.odd, self.rest), (self.rest, self.odd))
        for side, other in both:
            count = side.here.units.count
            if count(side.value) > max(1, other.here.units.count(side.value)) and side.value in self._before:
                times, once = (_count(each, side.value) for each in (side, other))
                return f"{side.name} ran {side.value} {times} in {name}, {other.name} {once}. {_ORDER}"
        odd, rest = self.odd, self.rest
        lacking = [side for side, other in both if side.here.is_over and other.value not in (*side.here.units, None)]
        if len(lacking) == 1:
            left = lacking[0]
            other = rest if left is odd else odd
            return f"{left.name} left {other.value} out of {name}, which {other.name} ran. {_ORDER}"
        if lacking:
            return f"{odd.name} ran {odd.value} in {name}, where {rest.name} ran {rest.value}. {_ORDER}"
        doubt = "" if rest.value in odd.here.units else f", or left {rest.value} out"
        order = f"{odd.name} ran {odd.value} before {rest.value} in {name}{doubt}"
        return f"{order}; {rest.name} ran {rest.value} first. {_ORDER}"

    @property
    def _before(self) -> Sequence[str]:
        """The common units of all ranks in this pass before the paths differ."""
        pairs = zip(self.odd.here.units, self.rest.here.units, strict=False)
        return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _shown(self, one: Pass) -> str:
        return f"{one.name} of {one.model}" if self._has_models else one.name


def _count(side: _Side, unit: str) -> str:
    count = side.here.units.count(unit)
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _is_usual(passes: Sequence[Pass], present: Pass, begin: Sequence[tuple[str, Hashable]]) -> bool:
    """Return whether a rank's previous pass of the same kind and model begins with the same events."""
    kind = present.name.split()[0]
    earlier = passes[: _index(passes, present)]
    before = [one for one in earlier if one.name.startswith(kind) and one.model == present.model]
    return bool(before) and list(before[-1].events())[1 : len(begin)] == list(begin[1:])
