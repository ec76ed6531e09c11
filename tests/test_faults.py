"""Each fault of the table is reported in time, by name, and leaves what is promised (`tests.faults`).

Most that end quickly on two ranks and some of the others are run each time; `make test ARGS="tests/test_faults.py
--all-faults"` runs all, and `python -m tests.faults` prints the table.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.fault import ENDED, Fault, raises
from tests.faults.runner import Key, Record, Runner, Verdict, judge, table
from tests.faults.wrapping import BUILD_ALIKE
from tests.helpers.ranks import RankPool
from tests.helpers.workers import Ending

pytestmark = pytest.mark.waiting

SLOW = 4  # of those that are not quick, in a sample
# Kinds of which no rank dies or is waited for, but in some phases where a report of the watchdog is what finds them.
QUICK = {
    "options",
    "structure",
    "values",
    "optimizer",
    "damaged files",
    "exchanged files",
    "other versions",
    "two jobs",
}
REPORTED = {"reduction", "clipping", "step", "cond", "join", "hybrid", "fully_shard", "offload to disk"}


def is_quick(phase: str, fault: Fault) -> bool:
    is_compared = fault.remedy == BUILD_ALIKE  # at first use, by a function that has its own tests, with less around it
    return fault.kind in QUICK and not is_compared and phase not in REPORTED and fault.by == "all" and 2 in fault.sizes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" in metafunc.fixturenames:
        runs = [(key, size) for key, fault in table().items() for size in fault.sizes]
        if not metafunc.config.getoption("--all-faults"):
            quick = [(key, 2) for key, fault in table().items() if is_quick(key[0], fault)]
            slow = [(key, size) for key, size in runs if not is_quick(key[0], table()[key])]
            runs = quick + random.Random(metafunc.config.getoption("--fuzz-seed")).sample(slow, SLOW)
        runs.sort(key=lambda run: run[1])  # ranks of one world after the other
        metafunc.parametrize(("key", "world_size"), runs, ids=[f"{': '.join(key)}, {size}" for key, size in runs])


def test_a_fault_is_reported_and_leaves_what_is_promised(
    ranks: RankPool, tmp_path: Path, key: Key, world_size: int
) -> None:
    verdict = Runner(tmp_path, ranks).run(key, world_size)
    if verdict.fault.missed:
        assert not verdict.is_good, "it is found now: take away its mark `missed`"
    else:
        assert verdict.is_good, f"{verdict}"


def test_there_are_as_many_faults_as_promised() -> None:
    runs = [size for fault in table().values() for size in fault.sizes]
    assert len(table()) >= 120
    assert set(runs) == {2, 4}


# What counts as found

FAULT = Fault("a bad batch", "exceptions", raises(ValueError()), "batch", rank=ENDED, unit="all-gather", by="others")
GOOD = Record(error="CollectiveError: all-gather of root: rank 1 was ended by ValueError", raised_at=11.0)
VICTIM = Record(error="ValueError: a bad batch", raised_at=10.0)


def judged(*records: Record | None, fault: Fault = FAULT, headline: str = "") -> Verdict:
    endings = [Ending.DIED if record is None else Ending.RETURNED for record in records]
    headlines = [headline if record is None else "" for record in records]
    return judge(("forward", fault.name), fault, records, endings, headlines, struck=10.0)


def test_a_fault_that_is_named_within_seconds_is_found() -> None:
    verdict = judged(GOOD, VICTIM)
    assert verdict.is_good
    assert verdict.seconds == 1.0
    assert verdict.named == {"rank": True, "unit": True, "remedy": None}


@pytest.mark.parametrize(
    "record",
    [
        Record(),  # nothing was said
        replace(GOOD, raised_at=30.0),  # when the group's timeout was over
        replace(GOOD, error="CollectiveError: all-gather of root"),
        replace(GOOD, error="RuntimeError: rank 1 was ended by ValueError"),
        replace(GOOD, afterwards="head.weight has changed"),
    ],
)
def test_a_fault_that_is_silent_late_or_nameless_or_leaves_something_else_is_not_found(record: Record) -> None:
    assert not judged(record, VICTIM).is_good


def test_only_the_signal_of_the_fault_may_end_a_rank() -> None:
    killed = replace(FAULT, ends="SIGKILL")
    assert judged(GOOD, None, fault=killed, headline="killed by SIGKILL").is_good
    assert not judged(GOOD, None, fault=killed, headline="killed by SIGABRT").is_good
    assert not judged(GOOD, None, headline="killed by SIGABRT").is_good


def test_a_word_where_none_is_due_is_a_false_alarm() -> None:
    quiet = replace(FAULT, quiet=True)
    assert judged(Record(), Record(), fault=quiet).is_good
    assert not judged(Record(said=[(11.0, "rank 1 was ended by")]), Record(), fault=quiet).is_good
