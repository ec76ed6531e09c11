"""Reads damaged checkpoints and loads strange state dicts, a great many: each gives what it may, or one kind of error.

    python -m tests.fuzz_files --files 50000 --states 50000 --seed 1

Checkpoints of all formats are damaged in their bytes, and in manifests, indexes, headers and pickles whose checksums
are right. No reading may take 20 seconds, or half a gigabyte more than there was. `make test` does the same a few
hundred times (`tests/checkpoint/formats/test_hostile_files.py`). What is found is made small, and printed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.helpers.ranks import RankPool

Draw = Callable[[st.SearchStrategy[Any]], Any]
Trial = Callable[[Draw], None]


def of_files(whole: Path, folder: Path, word: str, change: Callable[[Path, Draw], None]) -> Trial:
    """Return a trial that damages a checkpoint, and reads it."""
    from tests.helpers.damaged_files import assert_read_or_refused

    def run(draw: Draw) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        change(folder, draw)
        assert_read_or_refused(next(folder.iterdir()), lambda _: True, word)

    return run


def repeat(trial: Trial, count: int, start: int) -> None:
    """Run a trial so many times, with what is drawn from a seed."""
    done: list[None] = []

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        done.append(None)
        trial(data.draw)

    begun = time.monotonic()
    run()
    print(f"{len(done):7} in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    """See above."""
    # Not by the ranks that RankPool starts, which look at this module first.
    from tests.checkpoint.formats.test_hostile_files import DAMAGES, of_all_formats
    from tests.helpers.convert_formats import saved
    from tests.helpers.strange_states import load_something, state_dicts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--states", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place, state_dicts() as loads:
        folder = Path(place)
        pool = RankPool(folder)
        (folder / "all").mkdir()
        whole = of_all_formats(saved(folder / "ours", max_file_bytes=300), pool, folder / "all")
        pool.close()
        for word, change in DAMAGES:
            print(f"{word:12} {change.__name__:16}", end="", flush=True)
            repeat(of_files(whole[word], folder / "now", word, change), options.files // len(DAMAGES), options.seed)
        print(f"{'state dicts':29}", end="", flush=True)
        repeat(lambda draw: load_something(loads, draw), options.states, options.seed)


if __name__ == "__main__":
    main()
