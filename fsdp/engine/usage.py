"""Which parameters get a gradient in a backward, on which ranks: what has to be reduced, when, and what stays None.

A parameter may be used on some ranks only. Then these complete its flat parameter's gradient at another time than the
others, or never; but all ranks must reduce the same, at the same time, or they would wait for each other, or sum up
what does not belong together. So when a backward begins the ranks tell each other for which parameters autograd will
come with a gradient. Flat parameters of which it is the same everywhere are reduced as soon as they are complete, and
those of which it is not at the end of backward, on all ranks. What nobody uses is not reduced, and keeps the gradient
that it had; in original parameters each by itself.

Two things are known only when backward has ended, and exchanged then. A re-entrant checkpoint runs autograd inside of
autograd, and brings gradients that the outer run knows nothing of; so whatever trains, and no rank saw coming, is asked
about again. And where ranks run different modules (`Participation.is_uneven`), they don't begin a backward together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.engine.autograd import will_run
from fsdp.engine.handle import FlatParamHandle

_HELD, _COMING = 1, 2  # what a rank has of a gradient: it is accumulated already, it comes in this backward


class _Among:
    """The flat parameters that are reduced over the same ranks."""

    def __init__(self, ranks: tuple[Communicator, Communicator], handles: Sequence[FlatParamHandle]) -> None:
        self.handles = handles
        self._comms = [comm for comm in ranks if comm.world_size > 1]
        self.forecast: Pending | None = None
        self.is_open = True  # not all is known before the end

    def most(self, values: Sequence[int]) -> Pending:
        """Collective. The largest of all ranks' values (below 256), one by one."""
        told = torch.tensor(values, dtype=torch.uint8)
        *within, last = self._comms
        for comm in within:
            told = comm.all_reduce(told.to(comm.talk_device), "max", "exchange of what gets a gradient").wait()
        return last.all_reduce(told.to(last.talk_device), "max", "exchange of what gets a gradient")


class Usage:
    """What the ranks of one root know of each other's gradients in the backward that runs, or ran last."""

    def __init__(self) -> None:
        self._among: list[_Among] = []
        self._differing: set[FlatParamHandle] = set()
        self._used: dict[FlatParamHandle, Sequence[int]] = {}  # for each parameter, whether on any rank
        self._times: dict[FlatParamHandle, int] = {}  # how often it is reduced
        self._handles: Sequence[FlatParamHandle] = ()

    def begin(self, handles: Sequence[FlatParamHandle], *, ranks_begin_together: bool) -> None:
        """Collective, inside of the backward that begins; the answers are awaited when they are needed.

        Args:
            handles: all of the root's.
            ranks_begin_together: whether all ranks do. If not, nothing is known before the end.
        """
        self._differing, self._used, self._times, self._handles = set(), {}, {}, handles
        by_ranks: dict[tuple[Communicator, Communicator], list[FlatParamHandle]] = {}
        for handle in handles:
            if not handle.is_local:
                by_ranks.setdefault((handle.reduce_comm, handle.replicas), []).append(handle)
        self._among = [_Among(ranks, some) for ranks, some in by_ranks.items()]
        for among in self._among if ranks_begin_together else ():
            among.forecast = among.most([value for handle in among.handles for value in _forecast(handle)])

    def abandon(self) -> None:
        """After a backward that failed: take what other ranks have sent, which the next one would take for its own."""
        for among in self._among:
            if among.forecast is not None:
                pending, among.forecast = among.forecast, None
                pending.wait()

    def differs(self, handle: FlatParamHandle) -> bool:
        """Whether ranks use different parameters of it, so that its reduction has to wait until backward has ended."""
        self._read_forecasts()
        return handle in self._differing

    def _read_forecasts(self) -> None:
        for among in self._among:
            if among.forecast is not None:
                pending, among.forecast, among.is_open = among.forecast, None, False
                values = iter(pending.wait().tolist())
                for handle in among.handles:
                    self._take_in(among, handle, [(next(values), next(values)) for _ in handle.layout.slots])

    def _take_in(self, among: _Among, handle: FlatParamHandle, told: Iterable[tuple[int, int]]) -> None:
        """Of each parameter what the ranks have, and whether it trains on any without that a gradient would come."""
        used = self._used[handle] = []
        for has, lacks in told:
            used.append(has)
            if lacks and has == _COMING:
                self._differing.add(handle)
            elif lacks:
                among.is_open = True
        self._times[handle] = int(any(used))

    def end(self) -> None:
        """Collective. Autograd has ended: what was not known before."""
        self._read_forecasts()
        for among in self._among:
            if not among.is_open:
                continue
            values = iter(among.most([value for handle in among.handles for value in _report(handle)]).wait().tolist())
            for handle in among.handles:
                self._times[handle] = next(values)
                self._used[handle] = [next(values) for _ in handle.layout.slots]
                handle.gradients.awaited = ()

    def is_due(self, handle: FlatParamHandle) -> bool:
        """Whether it still has to be reduced, with zeros for what there is no gradient of on this rank."""
        return handle.gradients.times_taken < self._times.get(handle, 0) or not handle.gradients.is_empty

    def show_gradients(self) -> None:
        """After all reductions: have handles show their gradients, those of original parameters that any rank used."""
        for handle in self._handles:
            missed = [slot for slot, is_missed in enumerate(handle.gradients.missed) if is_missed]
            handle.shard_gradient.deliver(self._used.get(handle, handle.gradients.used), missed)


def _forecast(handle: FlatParamHandle) -> Iterable[int]:
    """For each parameter two numbers: what this rank has of its gradient, and whether none comes though it trains."""
    every = [one.accumulators for one in handle.forms]
    coming = [[node is not None and will_run(node) for node in nodes] for nodes in every]
    trains = every[0]
    handle.gradients.awaited = [any(each) for each in zip(*coming, strict=True)]
    for node, comes, held in zip(trains, handle.gradients.awaited, handle.gradients.arrived, strict=True):
        yield _COMING if comes else _HELD * held
        yield node is not None and not comes


def _report(handle: FlatParamHandle) -> Iterable[int]:
    """How often this rank reduces it, and for each parameter, whether there was a gradient."""
    yield handle.gradients.times_taken + (not handle.gradients.is_empty)
    yield from handle.gradients.arrived
