"""The roll call compares the ranks' journals page by page, on the first rank of each journal, without collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fsdp.distributed.communicator import named
from fsdp.distributed.journal import Journal, journals

_PER_SECOND = 64  # ranks that send to the first rank each second; with more ranks, each sends less often
_PAGES = 1024  # the maximum number of pages that wait on the first rank for other ranks' pages

Message = dict[str, Any]


class RollCall:
    """The exchange of journals.

    Args:
        rank, world_size: of the default process group.
        tell: sends a message to ranks, and returns their answers; a text or no entry for a rank that did not answer.
        among: this rank's journals.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        tell: Callable[[Sequence[int], Message], Mapping[int, Message | str]],
        among: Collection[Journal] = journals,
    ) -> None:
        self._rank, self._tell, self._journals = rank, tell, among
        self._every = 1 + world_size // _PER_SECOND
        self._until_next = self._every
        self._heard: dict[str, dict[int, dict[int, str]]] = {}  # by journal, page and rank

    @property
    def difference(self) -> str:
        """A description of a difference between ranks; empty if unknown, or if this rank raised an error."""
        return next((each.difference for each in list(self._journals) if not each.is_raised and each.difference), "")

    def tick(self) -> None:
        """Send new pages to the first rank of each journal, and compare pages on first ranks; call it every second."""
        self._until_next -= 1
        if self._until_next <= 0:
            self._until_next = self._every
            for journal in [each for each in list(self._journals) if not each.difference]:
                self._send(journal)
                if journal.ranks[0] == self._rank:
                    self._compare(journal)

    def _send(self, journal: Journal) -> None:
        first, digests = journal.closed()
        if not digests:
            return
        message = {"journal": journal.name, "rank": self._rank, "first": first, "digests": digests}
        if journal.ranks[0] == self._rank:
            self.answer(message)
        elif not isinstance(self._tell(journal.ranks[:1], message).get(journal.ranks[0]), dict):
            return  # a later call sends the pages again
        journal.first_unsent = max(journal.first_unsent, first + len(digests))

    def _compare(self, journal: Journal) -> None:
        pages = self._heard.get(journal.name, {})
        for number in sorted(pages)[:-_PAGES]:
            del pages[number]
        for number, heard in sorted(pages.items()):
            if len(heard) < len(journal.ranks):
                continue
            del pages[number]
            if len(set(heard.values())) > 1:
                self._report(journal, number)
            if journal.difference:
                return

    def _report(self, journal: Journal, page: int) -> None:
        """Notify all ranks of their difference on a page."""
        others = [rank for rank in journal.ranks if rank != self._rank]
        answers = self._tell(others, {"page": page, "of": journal.name})
        texts = {rank: each["lines"] for rank, each in answers.items() if isinstance(each, dict)}
        texts[self._rank] = journal.lines(page)
        common = set.intersection(*map(set, texts.values()))
        differing = set.union(*map(set, texts.values())) - common
        finding, about = journal.finding(differing)
        if journal.warning and not journal.is_error(finding):
            return  # only the first warning is reported
        by_text: dict[str, list[int]] = {}
        for rank, lines in sorted(texts.items()):
            own = [line for line in lines if line in about]
            shown = "; ".join(own[:3]) + (f"; and {len(own) - 3} more" if own[3:] else "")
            by_text.setdefault(shown or "nothing" + " more" * bool(common), []).append(rank)
        each = [f"  {named(ranks)}: {text}" for text, ranks in by_text.items()]
        text = "\n".join([finding.meaning.format(page=page), *each, finding.remedy])
        message = {"difference" if journal.is_error(finding) else "warning": text, "of": journal.name}
        self._tell(others, message)
        self.answer(message)

    def answer(self, message: Message) -> Message:
        if "journal" in message:
            pages = self._heard.setdefault(message["journal"], {})
            for number, digest in enumerate(message["digests"], message["first"]):
                pages.setdefault(number, {})[message["rank"]] = digest
            return {}
        journal = next((each for each in list(self._journals) if each.name == message["of"]), None)
        if journal is None:
            return {"lines": []}
        journal.difference = message.get("difference", journal.difference)
        journal.warning = message.get("warning", journal.warning)
        return {"lines": journal.lines(message.get("page", 0))}
