"""A journal is what this rank has done that must be alike on all ranks of a model, such as its optimizers' steps.

Its pages are numbered by something that all ranks count alike. Entries of a page have no order. The next page closes
a page, which can then be compared with the same page of other ranks (`roll_call`).
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

KEPT = 1024  # pages on which there is something


@dataclass
class Settings:
    """The settings of how the ranks compare what they do, see `set_watchdog`."""

    raises: bool = False
    replicas_every: int = 1000


settings = Settings()


class Finding(NamedTuple):
    """A finding has the words for a difference between ranks, in messages."""

    meaning: str  # with {page} for the number of the page
    remedy: str  # a sentence for the end
    begin: str = ""  # of the lines that it is about


class Journal:
    """A record of what one model has done on this rank.

    Args:
        name: alike on all its ranks, and of no other journal of these ranks.
        ranks: all that keep this journal, by their numbers in the default process group.
        error: what is said of a difference.
        warning_of: what is said where nothing differs but lines that begin in its way.

    A journal has no reference to the model, which the watchdog's thread would keep alive.

    Attributes:
        page: the number of the page that is open.
        notes: by page, how often each thing was noted with each text. `note` writes to them, and so do hot paths, which
            call `forget` if there are too many pages.
        difference: how the ranks differ; empty while nobody has found that they do.
        is_raised: this rank knows it, by an error.
        warning: the first difference that is no error; empty while nobody has found one.
    """

    def __init__(self, name: str, ranks: Iterable[int], error: Finding, warning_of: Finding | None = None) -> None:
        self.ranks = tuple(sorted(ranks))
        self.name = f"{name} of {zlib.crc32(repr(self.ranks).encode())}"
        self._error, self._warning_of = error, warning_of
        self.difference = self.warning = ""
        self.is_raised = False
        self.page = 0
        self.first_unsent = 0  # those before it have been sent to the rank that compares, or are forgotten
        self.notes: dict[int, dict[tuple[Hashable, str], int]] = {}
        # A model before it may have had the name, in another default process group, and not be freed yet.
        for before in [each for each in list(journals) if each.name == self.name]:
            journals.discard(before)
        journals.add(self)

    def note(self, what: Hashable, text: str) -> None:
        """Note something on the open page.

        Args:
            what: tells things apart that this rank has and others may not have: of those with the same text only that
                with the most notes counts.
            text: describes it, alike on all ranks; several lines are shown each by itself.
        """
        notes = self.notes.setdefault(self.page, {})
        notes[what, text] = notes.get((what, text), 0) + 1
        if len(self.notes) > KEPT:
            self.forget()

    def forget(self) -> None:
        oldest = next(iter(self.notes))
        self.first_unsent = max(self.first_unsent, oldest + 1)
        del self.notes[oldest]

    def finding(self, lines: Iterable[str]) -> tuple[Finding, list[str]]:
        """Return what is to be said of lines that not all ranks have, and which of them it is about."""
        minor = self._warning_of
        major = [line for line in lines if minor is None or not line.startswith(minor.begin)]
        return (self._error, major) if major or minor is None else (minor, list(lines))

    def is_error(self, finding: Finding) -> bool:
        return finding is self._error or settings.raises

    def closed(self) -> tuple[int, list[str]]:
        """Return the number of the first closed page that was not sent yet, and digests of all from there."""
        first, end = self.first_unsent, self.page
        digests = [_digest(self.lines(number)) for number in range(first, end)]
        kept = self.first_unsent  # another thread may have forgotten a page meanwhile
        return kept, digests[kept - first :]

    def lines(self, page: int) -> list[str]:
        most: dict[str, int] = {}
        for (_, text), count in self.notes.get(page, {}).items():
            most[text] = max(count, most.get(text, 0))
        times = {text: "" if count == 1 else f" ({count} times)" for text, count in most.items()}
        return sorted(line + times[text] for text in most for line in text.split("\n"))


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest() if lines else ""


journals: weakref.WeakSet[Journal] = weakref.WeakSet()  # of this rank
