"""What the commands print: sizes, short values, and how far they are."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from fsdp.checkpoint.untrusted import readable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PERIOD = 0.1  # seconds between two lines of progress


def size_text(nbytes: float) -> str:
    """A number of bytes to read: ``1.5 MiB``."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return ""  # never


def say(text: str, file: TextIO | None = None) -> None:
    """Print one line. What comes from files is shortened, and what a terminal would obey escaped."""
    print(readable(text.replace(":\n\t", ": ").replace("\n\t", "; ").replace("\n", " ")), file=file or sys.stdout)


class Progress:
    """A bar on a terminal, by tqdm if that is installed, and nothing elsewhere. A context manager.

    Args:
        what: is done.
    """

    def __init__(self, what: str) -> None:
        self._what, self._total, self._done, self._shown = what, 0, 0, 0.0
        self._bar: Any = None
        self._is_seen = sys.stderr.isatty()

    def start(self, total: int) -> Progress:
        """Say how many bytes there are."""
        self._total = total
        if self._is_seen:
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self._bar = tqdm(total=total, desc=self._what, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
        return self

    def __call__(self, nbytes: int) -> None:
        """So many more are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._is_seen and time.monotonic() - self._shown > _PERIOD:
            self._shown = time.monotonic()
            part = self._done / max(self._total, 1)
            filled = round(30 * part)
            bar = "#" * filled + "." * (30 - filled)
            self._say(f"{self._what} [{bar}] {part:4.0%} of {size_text(self._total)}")

    def _say(self, text: str) -> None:
        print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown:
            self._say("")
            print("\r", end="", file=sys.stderr, flush=True)
