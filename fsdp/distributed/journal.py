"""A journal is what this rank has done that must be alike on all ranks of a model, such as its optimizers' steps.

Its pages are numbered by something that all ranks count alike. What is noted on one page has no order, and a page is
closed when the next one is begun: then it can be compared with that of the other ranks (`roll_call`).
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

_KEPT = 1024  # pages on which there is something


@dataclass
class Settings:
    """The settings of how the ranks compare what they do, see `set_watchdog`."""

    raises: bool = False
    replicas_every: int = 1000


settings = Settings()


class Journal:
    """A record of what one model has done on this rank.

    Args:
        name: alike on all its ranks, and of no other journal of these ranks.
        ranks: all that keep this journal, by their numbers in the default process group.
        found: says what a difference on a page means, for messages, with {page} for its number.
        remedy: a sentence for the end of that message.
        lesser: what is noted behind these words makes a warning, if nothing else differs.
        lesser_found, lesser_remedy: the words of that warning.

    It knows nothing of the model, which the watchdog's thread would keep alive.

    Attributes:
        page: the number of the page that is open.
        difference: how the ranks differ; empty while nobody has found that they do.
        is_raised: this rank knows it, by an error.
        warning: the first lesser difference; empty while nobody has found one.
    """

    def __init__(
        self,
        name: str,
        ranks: Iterable[int],
        found: str,
        remedy: str,
        *,
        lesser: str = "",
        lesser_found: str = "",
        lesser_remedy: str = "",
    ) -> None:
        self.ranks = tuple(sorted(ranks))
        self.name = f"{name} of {zlib.crc32(repr(self.ranks).encode())}"
        self.found, self.remedy = found, remedy
        self.lesser, self.lesser_found, self.lesser_remedy = lesser, lesser_found, lesser_remedy
        self.difference = self.warning = ""
        self.is_raised = False
        self.page = 0
        self.first_unsent = 0  # those before it have been sent to the rank that compares, or are forgotten
        self._notes: dict[int, dict[tuple[Hashable, str], int]] = {}
        journals.add(self)

    def note(self, what: Hashable, text: str) -> None:
        """Note something on the open page.

        Args:
            what: tells things apart that this rank has and others may not have: of those with the same text only that
                with the most notes counts.
            text: describes it, alike on all ranks; several lines are shown each by itself.
        """
        notes = self._notes.setdefault(self.page, {})
        notes[what, text] = notes.get((what, text), 0) + 1
        if len(self._notes) > _KEPT:
            oldest = next(iter(self._notes))
            self.first_unsent = max(self.first_unsent, oldest + 1)
            del self._notes[oldest]

    def closed(self) -> tuple[int, list[str]]:
        """Return the number of the first closed page that was not sent yet, and digests of all from there."""
        first, end = self.first_unsent, self.page
        digests = [_digest(self.lines(number)) for number in range(first, end)]
        kept = self.first_unsent  # another thread may have forgotten a page meanwhile
        return kept, digests[kept - first :]

    def lines(self, page: int) -> list[str]:
        """Return the text of a closed page."""
        most: dict[str, int] = {}
        for (_, text), count in self._notes.get(page, {}).items():
            most[text] = max(count, most.get(text, 0))
        times = {text: "" if count == 1 else f" ({count} times)" for text, count in most.items()}
        return sorted(line + times[text] for text in most for line in text.split("\n"))


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest() if lines else ""


journals: weakref.WeakSet[Journal] = weakref.WeakSet()  # of this rank
