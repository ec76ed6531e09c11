"""A journal records operations of this rank that must be equal on all ranks of a model, for example optimizer steps.

Pages are numbered by an event with equal counts on all ranks. Entries of a page are unordered. The next page closes a
page, which can then be compared with the same page of other ranks (`roll_call`).
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

KEPT = 1024  # the maximum number of pages with entries


@dataclass
class Settings:
    """The settings for comparisons between ranks, see `set_watchdog`."""

    raises: bool = False
    replicas_every: int = 1000


settings = Settings()


class Finding(NamedTuple):
    """The texts of a message about a difference between ranks."""

    meaning: str  # the first line, with {page} for the number of the page
    remedy: str  # the last sentence
    begin: str = ""  # the prefix of the lines to which the finding applies


class Journal:
    """A record of the operations of a model on this rank.

    Args:
        name: the name, the same on all ranks, and unique among the journals of these ranks.
        ranks: the global ranks that keep this journal.
        error: the message for a difference.
        warning_of: the optional message for a difference that is limited to lines with a prefix (`begin`).

    A journal contains no reference to the model, because the watchdog's thread would keep the model alive.

    Attributes:
        page: the number of the open page.
        notes: the counts of noted objects and texts, by page. `note` writes to them. Hot paths also do so directly, and
            call `forget` if there are too many pages.
        difference: a description of the difference between the ranks; empty if no difference is known.
        is_raised: if True, this rank raised an error for the difference.
        warning: the first difference that is only a warning; empty if there is none.
    """

    def __init__(self, name: str, ranks: Iterable[int], error: Finding, warning_of: Finding | None = None) -> None:
        self.ranks = tuple(sorted(ranks))
        self.name = f"{name} of {zlib.crc32(repr(self.ranks).encode())}"
        self._error, self._warning_of = error, warning_of
        self.difference = self.warning = ""
        self.is_raised = False
        self.page = 0
        self.first_unsent = 0  # earlier pages were sent to the comparing rank, or deleted
        self.notes: dict[int, dict[tuple[Hashable, str], int]] = {}
        # An earlier model with the same name, in another default process group, may still exist.
        for before in [each for each in list(journals) if each.name == self.name]:
            journals.discard(before)
        journals.add(self)

    def note(self, what: Hashable, text: str) -> None:
        """Add an entry to the open page.

        Args:
            what: identifies an object of this rank, such as an optimizer, which may not exist on other ranks. Of the
                objects with the same text, only the largest count is compared.
            text: the description, the same on all ranks; multiple lines are shown separately.
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
        """Return the finding for lines that are not equal on all ranks, and the lines to which it applies."""
        minor = self._warning_of
        major = [line for line in lines if minor is None or not line.startswith(minor.begin)]
        return (self._error, major) if major or minor is None else (minor, list(lines))

    def is_error(self, finding: Finding) -> bool:
        return finding is self._error or settings.raises

    def closed(self) -> tuple[int, list[str]]:
        """Return the number of the first closed page that was not sent, and the digests of all closed pages from it."""
        first, end = self.first_unsent, self.page
        digests = [_digest(self.lines(number)) for number in range(first, end)]
        kept = self.first_unsent  # another thread may have deleted a page meanwhile
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
