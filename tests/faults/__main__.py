"""python -m tests.faults [PATTERN] [--sizes 2 4] [--words] [--markdown FILE] [--peer]"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.faults.job import Job
from tests.faults.runner import Runner, Verdict, table
from tests.helpers.ranks import RankPool

HEADS = ("fault", "phase", "kind", "ranks", "detected", "seconds", "rank", "unit", "remedy", "state", "files")


def row(verdict: Verdict) -> list[str]:
    """Return a line of the table."""
    marks = {True: "yes", False: "NO", None: "-"}
    fault = verdict.fault
    begin = [fault.name, verdict.key[0], fault.kind, str(verdict.world_size)]
    if not verdict.expressible:
        return [*begin, "no such thing", *["-"] * 6]
    if fault.quiet:
        seen = "FALSE ALARM" if verdict.is_detected else "rightly not"
    else:
        seen = "NO" if not verdict.is_detected else "yes" if verdict.is_in_time else "TOO LATE"
    if fault.missed and not verdict.is_good:
        seen += " (known)"
    seconds = "-" if verdict.seconds is None else f"{verdict.seconds:.1f}"
    named = [marks[verdict.named.get(what)] if verdict.is_detected else "-" for what in ("rank", "unit", "remedy")]
    return [*begin, seen, seconds, *named, "NO" if verdict.afterwards else "yes", marks[verdict.files]]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the counts."""
    asked = [each for each in verdicts if each.expressible and not each.fault.quiet]
    quiet = [each for each in verdicts if each.expressible and each.fault.quiet]
    named = [each for each in asked if each.is_detected and False not in each.named.values()]
    parts = [
        f"{len(verdicts)} runs of {len({each.key for each in verdicts})} faults",
        f"of {len(asked)} that can be run and must be reported: {sum(each.is_detected for each in asked)} detected",
        f"{sum(each.is_in_time for each in asked)} in time",
        f"{len(named)} with rank, unit and remedy",
        f"{sum(not each.afterwards and each.files is not False for each in verdicts)} states as promised",
        f"{sum(each.is_detected for each in quiet)} false alarms in {len(quiet)}",
        f"{sum(bool(each.fault.missed) for each in verdicts)} runs marked as not found yet",
    ]
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Run faults, and print a table.")
    parser.add_argument("pattern", nargs="?", default="", help="of 'phase: fault', as a regular expression")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="of the world")
    parser.add_argument("--peer", action="store_true", help="run torch's FSDP2 instead")
    parser.add_argument("--words", action="store_true", help="print what the ranks said")
    parser.add_argument("--markdown", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    chosen = [key for key in table() if re.search(options.pattern, ": ".join(key))]
    verdicts = []
    job: type[Job] = Job
    if options.peer:
        from tests.faults.peer import TorchJob

        job = TorchJob
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(Path(folder), ["fsdp.lightning"] * any(phase == "Lightning" for phase, _ in chosen))
        runner = Runner(Path(folder), pool, job)
        try:
            for size in options.sizes:
                for key in chosen:
                    if size in table()[key].sizes:
                        verdicts.append(runner.run(key, size))
                        _show(verdicts[-1], options.words)
                        if options.markdown:
                            options.markdown.write_text(_markdown(verdicts))
        finally:
            pool.close()
    print(summary(verdicts))
    sys.exit(any(each.is_good == bool(each.fault.missed) for each in verdicts))


def _markdown(verdicts: Sequence[Verdict]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *map(row, verdicts)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{summary(verdicts)}\n"


def _show(verdict: Verdict, words: bool) -> None:
    name, phase, kind, *rest = row(verdict)
    print(f"{phase[:14]:14} {name[:58]:58} {kind[:12]:12} {'  '.join(rest)}  ({verdict.took:.1f} s)", flush=True)
    if words or not (verdict.is_good or verdict.fault.missed):
        text = f"{verdict.afterwards}\n{verdict.words}".strip()
        print("    " + text.replace("\n", "\n    ")[:6000], flush=True)


if __name__ == "__main__":
    main()
