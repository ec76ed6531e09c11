"""The command ``fsdp compare``: find the first difference between two recordings of `fsdp.record_fingerprints`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdp.checkpoint.cli import FINE, WRONG, UsageError, add_command
from fsdp.checkpoint.untrusted import BROKEN, opened, readable
from fsdp.optim_utils.recording import FORMAT, VERSION, Key

_DIGITS = 16  # of a fingerprint
_COMPARE = (
    "Name the first step, unit, parameter and direction in which two trainings differ.\n"
    "They were recorded by fsdp.record_fingerprints. The exit code is 1 if they differ."
)


class Place(NamedTuple):
    """A position in a training: a micro-batch of a step, or (None) the end of the step, when an optimizer steps."""

    step: int
    micro_batch: int | None

    def __str__(self) -> str:
        return f"step {self.step}" + ("" if self.micro_batch is None else f", micro-batch {self.micro_batch}")


@dataclass(frozen=True)
class Recorded:
    """The recording of a training in a file."""

    about: Mapping[str, Any]  # the environment, for example the number of ranks
    entries: Mapping[Place, Mapping[Key, str]]  # in the order of the training; fingerprints as hexadecimal digits

    @classmethod
    def read(cls, path: str | Path) -> Recorded:
        keys: list[list[Key]] = []
        entries: dict[Place, dict[Key, str]] = {}
        about: dict[str, Any] = {}
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    found = json.loads(line)
                    if number == 1:
                        if found.get(FORMAT) != VERSION:
                            raise ValueError(f"its version is {found.get(FORMAT)}, but only {VERSION} is supported")
                        about = {str(name): value for name, value in found.items() if name != FORMAT}
                    elif "values" not in found:
                        named = (tuple(each) for each in found["keys"])
                        keys.append([Key(str(way), str(unit), str(name), int(call)) for way, unit, name, call in named])
                    else:
                        micro_batch = found.get("micro_batch")
                        place = Place(int(found["step"]), None if micro_batch is None else int(micro_batch))
                        names, digits = keys[found["keys"]], found["values"]
                        if len(digits) != _DIGITS * len(names):
                            raise ValueError(f"{len(digits)} digits for {len(names)} entries")
                        values = (digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS))
                        entries[place] = dict(zip(names, values, strict=True))
                except BROKEN as error:
                    raise ValueError(
                        f"{path} is not a recording of fsdp.record_fingerprints, or is damaged in line {number}: "
                        f"{type(error).__name__}: {readable(str(error))}"
                    ) from error
        if not about:
            raise ValueError(f"{path} is empty, not a recording of fsdp.record_fingerprints")
        return cls(about, entries)

    @property
    def last_step(self) -> int:
        """Return the number of the last recorded step; -1 if there is none."""
        return max((place.step for place in self.entries), default=-1)


class Difference(NamedTuple):
    """A difference between two recordings, with both values; None for a missing value."""

    place: Place
    key: Key
    one: str | None
    other: str | None

    def __str__(self) -> str:
        _, unit, name, call = self.key
        of = f" of {name}" if name else ""
        where = f" (unit '{unit}')" if name and unit else f" of unit '{unit}'" if unit else ""
        again = f" in its call {call + 1}" if call else ""
        return f"{self.place}: {self.key.direction}{of}{where}{again}"


def differences(one: Recorded, other: Recorded) -> Iterator[Difference]:
    """Yield the differences up to the end of the shorter recording, in the order of the training."""
    last = min(one.last_step, other.last_step)
    for place in sorted({*one.entries, *other.entries}, key=_in_time):
        mine, others = one.entries.get(place, {}), other.entries.get(place, {})
        for key in () if place.step > last else dict.fromkeys([*mine, *others]):
            if mine.get(key) != others.get(key):
                yield Difference(place, key, mine.get(key), others.get(key))


def add_compare(commands: Any) -> None:
    command = add_command(commands, "compare", _COMPARE)
    command.add_argument("one", metavar="A", help="A recording.")
    command.add_argument("other", metavar="B", help="Another recording.")
    command.set_defaults(run=_run)


def _in_time(place: Place) -> tuple[int, float]:
    return place.step, float("inf") if place.micro_batch is None else place.micro_batch


def _run(args: argparse.Namespace, choices: Any) -> int:
    for path in (args.one, args.other):
        if not Path(path).exists():
            raise UsageError(f"{path} does not exist")
    one, other = Recorded.read(args.one), Recorded.read(args.other)
    for what in dict.fromkeys([*one.about, *other.about]):
        here, there = one.about.get(what), other.about.get(what)
        if here != there:
            note = " (matrix products have other bits)" if what == "threads" else ""
            print(f"note: {what}: {here} in A, {there} in B{note}")
    if one.last_step != other.last_step:
        print(f"note: A ends with step {one.last_step}, B with step {other.last_step}")
    found = list(differences(one, other))
    if not found:
        print(f"no difference up to step {min(one.last_step, other.last_step)}")
        return FINE
    first = found[0]
    same_place = [each for each in found if each.place == first.place]
    print(f"first difference in {first}")
    print(f"  A: {first.one or 'nothing of this'}\n  B: {first.other or 'nothing of this'}")
    there = len({*one.entries.get(first.place, {}), *other.entries.get(first.place, {})})
    print(f"{len(same_place)} of the {there} entries there differ, and {len(found)} in all steps")
    return WRONG
