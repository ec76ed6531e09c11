"""What ranks write into a folder of reports becomes one page, with the first cause on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.checkpoint.cli import main
from fsdp.distributed.reports import Event, Kind, clock, page, read_events


def write(folder: Path, *events: tuple[float, int, Kind, str]) -> list[str]:
    for at, rank, kind, text in events:
        Event(kind, text, rank, host=f"node{rank}", pid=100 + rank, at=at).write(folder)
    return list(page(folder))


def test_the_first_cause_is_on_top_and_ranks_that_say_the_same_share_an_entry(tmp_path: Path) -> None:
    lines = write(
        tmp_path / "reports",
        (10.0, 0, Kind.WAIT, "fsdp: rank 0 has waited\n  rank 1: in no collective\nThe others wait for rank 1."),
        (11.0, 2, Kind.FOLLOWED, "rank 2: all-gather of a did not complete: rank 1 was ended by ValueError"),
        (10.9, 1, Kind.END, "ValueError: a bad batch (data.py:9 in load)"),
        (11.1, 0, Kind.FOLLOWED, "rank 0: all-gather of a did not complete: rank 1 was ended by ValueError"),
    )
    assert lines[:3] == [
        "The first cause, on rank 1 (node1, process 101):",
        "  ended by ValueError: a bad batch (data.py:9 in load)",
        "",
    ]
    assert [line.split(" ", 2)[2] for line in lines[3:] if not line.startswith(" ")] == [
        "rank 0:",
        "rank 1: the first cause, see above",
        "ranks 0, 2:",
    ]
    assert lines[4:7] == [
        "  waited too long: fsdp: rank 0 has waited",
        "    rank 1: in no collective",
        "    The others wait for rank 1.",
    ]


def test_ranks_that_differ_are_the_cause_of_the_errors_that_say_so(tmp_path: Path) -> None:
    lines = write(
        tmp_path,
        (1.0, 1, Kind.END, "RuntimeError: fsdp: the ranks have taken different optimizer steps"),
        (2.0, 0, Kind.DIFFERENCE, "fsdp: the ranks have taken different optimizer steps"),
        (0.5, 2, Kind.STOPPED, "KeyboardInterrupt"),
    )
    assert lines[1] == "  the ranks differ: fsdp: the ranks have taken different optimizer steps"


def test_who_was_interrupted_first_is_the_cause_of_what_followed_and_not_of_what_came_before(tmp_path: Path) -> None:
    stopped, followed = "KeyboardInterrupt (train.py:9 in load)", "rank 0: all-gather of a did not complete: rank 1 ..."
    lines = write(tmp_path / "by hand", (1.0, 1, Kind.STOPPED, stopped), (1.5, 0, Kind.FOLLOWED, followed))
    assert lines[:2] == ["The first cause, on rank 1 (node1, process 101):", f"  was stopped by: {stopped}"]
    lines = write(tmp_path / "at last", (0.5, 0, Kind.FOLLOWED, followed), (9.0, 2, Kind.STOPPED, "KeyboardInterrupt"))
    assert lines[0] == "The first cause, on rank 0 (node0, process 100):"


def test_a_closed_connection_is_told_where_a_rank_could_say_nothing_else(tmp_path: Path) -> None:
    closed, gone = "rank 1 has closed its connections", "rank 2: all-gather of a did not complete: rank 1 is gone"
    lines = write(tmp_path / "alone", (1.0, 0, Kind.CLOSED, closed))
    assert lines[1] == f"  saw that {closed}"
    lines = write(tmp_path / "both", (1.0, 2, Kind.CLOSED, closed), (1.6, 2, Kind.FOLLOWED, gone))
    assert not any(closed in line for line in lines)


def test_a_wait_that_is_reported_again_and_again_is_one_entry(tmp_path: Path) -> None:
    report = "fsdp: rank {} has waited for all-gather of a for {} s.\n  rank 3: is stopped\nThe others wait for rank 3."
    lines = write(tmp_path, *((10.0 * n, n % 2, Kind.WAIT, report.format(n % 2, 16 * 2**n)) for n in range(5)))
    assert len(lines) == 6
    assert lines[5].endswith(" ranks 0-1: the first cause, see above (5 times, until " + clock(40.0)[-8:] + ")")


def test_lines_that_no_rank_has_written_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, (1.0, 0, Kind.END, "ValueError"))
    with open(tmp_path / "rank00000.fsdp-report.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "ended by", "text": 1}\n[]\n{"kind": 3}\nnull\n{"cut')
    assert [event.text for event in read_events(tmp_path)] == ["ValueError"]


def test_a_folder_without_reports_and_none_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "the folder contains no reports of ranks" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2
