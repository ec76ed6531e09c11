"""`Usage`: ranks exchange which parameters get gradients, so that all reduce the same gradients at the same time.

A parameter may be used on some ranks only. The gradient of its flat parameter then completes at a different time on
these ranks, or never; but all ranks must issue the same reductions in the same order. When a backward begins, the ranks
therefore exchange for which parameters autograd will compute a gradient:

- Flat parameters with the same answer on all ranks are reduced as soon as they are complete.
- Flat parameters with different answers are reduced at the end of backward, on all ranks.
- A parameter that no rank uses is not reduced and keeps its gradient. This also applies to each original parameter: the
  layout leaves unused parameters out of the message if possible.

A unit may run multiple times before a backward, and ranks may use a parameter in different calls. The ranks therefore
also exchange how many calls backward will reach, see `Runtime._reduce_complete`.

Three facts are known, and exchanged, only after backward. A re-entrant checkpoint runs autograd during another run and
adds gradients that the outer run does not announce; trained parameters that no rank announced are therefore exchanged
again. A user's function may return None although autograd announced a gradient; parameters for which this happened the
last time are exchanged again, too. Gradients of modules that only some ranks run are announced when they are complete
(`Participation.announced`); no rank knows before the end whether they will arrive.

On backends where tags do not distinguish all-gathers, such as NCCL, ranks that run units of equal sizes in different
orders would use each other's parameters. There, ranks also exchange a checksum of all-gathers since the last backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import torch

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.passes import path
from fsdp.engine.autograd import will_run
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle

_HELD, _COMING = 1, 2  # the state of a gradient on a rank: accumulated already, or expected in this backward
_DOUBTS = 2  # of an expected gradient: a user's function returned None for it the last time
_ORDER_BYTES = 4


class _Among:
    """The flat parameters reduced over the same ranks; gradients of `foreseen` are known in advance."""

    def __init__(
        self,
        ranks: tuple[Communicator, Communicator],
        handles: Sequence[FlatParamHandle],
        foreseen: Sequence[FlatParamHandle],
    ) -> None:
        self.handles, self.foreseen = handles, foreseen
        self._comms = [comm for comm in ranks if comm.world_size > 1]
        self.forecast: Pending | None = None
        self.order = b""  # the last bytes of the forecast
        self.is_open = True  # some facts are known only at the end

    def take_order(self) -> bytes:
        """Return a checksum of the all-gathers since the last backward, and its complement; empty if tags are sent.

        In the maximum over all ranks, the halves are complements of each other if all ranks have the same checksum.
        """
        order = b""
        for comm in dict.fromkeys(handle.comm for handle in self.foreseen):
            if comm.world_size > 1 and not comm.sends_pieces:
                order = zlib.crc32(order + b"%d" % comm.take_order()).to_bytes(_ORDER_BYTES, "big")
        return order + bytes(255 - each for each in order)

    def without_order(self, told: torch.Tensor) -> torch.Tensor:
        """Return the maximum values of all ranks without the bytes of `take_order`.

        Raises:
            RuntimeError: if these bytes differ between ranks that share parameters.
        """
        if not self.order:
            return told
        if _differ(told):
            passes = ", ".join(map(str, path.snapshot()[-3:]))
            raise RuntimeError(
                f"rank {own_rank()}: the ranks have run units in different orders since the last backward, so that "
                f"some have computed with the parameters of another unit. This rank ran {passes}. Run the same units "
                "in the same order on every rank."
            )
        return told[: -len(self.order)]

    def largest(self, values: bytearray) -> Pending:
        """Collective. Start to compute the elementwise maximum of all ranks' values."""
        told = torch.frombuffer(values, dtype=torch.uint8)
        first = self.handles[0]
        what = f"exchange of which parameters get a gradient in the {first.passes.stage or 'backward'} of {first.name}"
        *within, last = self._comms
        for comm in within:
            told = comm.on_host.all_reduce(told, "max", what).wait()
            # Replicas that gather separately may run different forwards; they only exchange whether any ranks differ.
            if self.order and all(handle.comm.world_size <= comm.world_size for handle in self.foreseen):
                told[-2 * _ORDER_BYTES : -_ORDER_BYTES] = 255 * _differ(told)
                told[-_ORDER_BYTES:] = 255
        return last.on_host.all_reduce(told, "max", what)


def _differ(told: torch.Tensor) -> bool:
    """Return whether ranks have different checksums, given the maximum bytes of checksums and complements."""
    return bool((told[-2 * _ORDER_BYTES : -_ORDER_BYTES] != 255 - told[-_ORDER_BYTES:]).any())


class Usage:
    """The ranks' knowledge of each other's gradients, in the running or last backward of a root."""

    def __init__(self) -> None:
        self._among: list[_Among] = []
        self._differing: set[FlatParamHandle] = set()
        self._used: dict[FlatParamHandle, Sequence[int]] = {}  # for each parameter, whether any rank uses it
        self._times: dict[FlatParamHandle, int] = {}  # the number of reductions
        self._oldest_calls: dict[FlatParamHandle, int] = {}  # age of the oldest call of the handle's unit on any rank
        self._handles: Collection[FlatParamHandle] = ()
        # Parameters whose gradient is in doubt: a user's function returned None for it the last time.
        self._doubted: dict[FlatParamHandle, set[int]] = {}

    def begin(self, handles: Mapping[FlatParamHandle, int], announced: Collection[FlatParamHandle]) -> None:
        """Collective, when a backward begins; the answers are awaited when they are required.

        The backward reduces `handles`, each with the age of the oldest call of its unit (see `UnitBackward`). The state
        of handles in `announced` is only known at the end.
        """
        self._differing, self._used, self._times, self._oldest_calls = set(), {}, {}, {}
        self._handles = handles.keys()
        by_ranks: dict[tuple[Communicator, Communicator], list[FlatParamHandle]] = {}
        for handle in handles:
            if not handle.is_local:
                by_ranks.setdefault((handle.reduce_comm, handle.replica_axis), []).append(handle)
        self._among = [
            _Among(ranks, some, [handle for handle in some if handle not in announced])
            for ranks, some in by_ranks.items()
        ]
        for among in self._among:
            if among.foreseen:
                ages = bytes([min(handles[handle], 255) for handle in among.foreseen])
                order = among.take_order()
                among.order = b"" if announced else order
                among.forecast = among.largest(_forecast(among.foreseen, self._doubted) + ages + among.order)

    def abandon(self) -> None:
        """After a failed backward: receive other ranks' messages, which would otherwise reach the next backward."""
        for among in self._among:
            among.take_order()  # ranks may have failed at different places
            if among.forecast is not None:
                pending, among.forecast = among.forecast, None
                pending.wait()

    def differs(self, handle: FlatParamHandle) -> bool:
        """Return whether ranks use different parameters of a handle, which is then reduced after backward."""
        self._read_forecasts()
        return handle in self._differing

    def is_coming(self, handle: FlatParamHandle) -> bool:
        """Return whether every rank will complete a handle in this backward, because all gradients are expected."""
        if self.differs(handle) or handle not in self._used:
            return False  # on some ranks only, or unknown before the end
        trained = zip(self._used[handle], handle.requires_grad_each, strict=True)
        return all(state == _COMING for state, is_trained in trained if is_trained)

    def oldest_call(self, handle: FlatParamHandle) -> int:
        """Return the age of the oldest call of a handle's unit that any rank expects backward to reach."""
        return self._oldest_calls.get(handle, 0)

    def _read_forecasts(self) -> None:
        for among in self._among:
            if among.forecast is not None:
                pending, among.forecast = among.forecast, None
                among.is_open = len(among.foreseen) < len(among.handles)
                told, among.order = among.without_order(pending.wait()).tolist(), b""
                start, params = 0, (len(told) - len(among.foreseen)) // 2
                states, lacks, ages = told[:params], told[params : 2 * params], told[2 * params :]
                for handle, self._oldest_calls[handle] in zip(among.foreseen, ages, strict=True):
                    stop = start + len(handle.layout.slots)
                    self._take_in(among, handle, states[start:stop], lacks[start:stop])
                    start = stop

    def _take_in(self, among: _Among, handle: FlatParamHandle, states: list[int], lacks: list[int]) -> None:
        """Record the state of each parameter's gradient, and whether a trained parameter gets none on some rank."""
        self._used[handle] = states
        self._times[handle] = int(any(states))
        if any(lacks):
            for state, lack in zip(states, lacks, strict=True):
                if lack and state == _COMING:
                    self._differing.add(handle)
                if lack and (state != _COMING or lack == _DOUBTS):
                    among.is_open = True

    def end(self) -> None:
        """Collective. Exchange the facts that are known only after backward."""
        self._read_forecasts()
        for handle in self._handles:
            self._learn(handle)
        for among in self._among:
            if not among.is_open:
                continue
            values = iter(among.largest(bytearray(chain.from_iterable(map(_report, among.handles)))).wait().tolist())
            for handle in among.handles:
                self._times[handle] = next(values)
                self._used[handle] = [next(values) for _ in handle.layout.slots]
                handle.gradients.awaited = ()

    def _learn(self, handle: FlatParamHandle) -> None:
        """After backward, record which parameters' gradients are in doubt in the next backward."""
        gradients, before = handle.gradients, self._doubted.pop(handle, set())
        if 0 in gradients.used and 0 in gradients.filled:
            both = zip(gradients.arrived, handle.requires_grad_each, strict=True)
            missing = {slot for slot, (has_arrived, is_trained) in enumerate(both) if is_trained and not has_arrived}
            doubted = {slot for slot in missing if slot in before or (gradients.awaited and gradients.awaited[slot])}
            if doubted:
                self._doubted[handle] = doubted

    def is_due(self, handle: FlatParamHandle) -> bool:
        """Return whether a handle still requires a reduction, with zeros for missing gradients of this rank."""
        gradients = handle.gradients
        return gradients.is_reduced and (gradients.times_taken < self._times.get(handle, 0) or not gradients.is_empty)

    def unused(self, handle: FlatParamHandle) -> list[int]:
        """Return the numbers of the parameters without gradients on any rank, after backward."""
        return [slot for slot, state in enumerate(self._used.get(handle, ())) if not state]

    def note_held(self) -> None:
        """After all reductions: record in handles for which parameters they hold sums that exclude replicas."""
        for handle in self._handles:
            if handle.gradients.sync is GradientSync.SHARDS:
                handle.gradients.note_held(self._used.get(handle, handle.gradients.used))

    def show_gradients(self) -> None:
        """After all reductions: show gradients of handles, and of the original parameters that any rank used."""
        for handle in self._handles:
            if handle.gradients.sync is GradientSync.FULL:
                handle.show_gradient(self._used.get(handle, handle.gradients.used))


def _forecast(handles: Iterable[FlatParamHandle], doubted: Mapping[FlatParamHandle, set[int]]) -> bytearray:
    """Return the state of each parameter's gradient on this rank, and then whether a trained parameter gets none."""
    states, lacks = bytearray(), bytearray()
    for handle in handles:
        nodes = handle.unsharded.accumulators
        handle.gradients.awaited = awaited = [node is not None and will_run(node) for node in nodes]
        if all(awaited) and handle not in doubted:
            states += bytes((_COMING,)) * len(awaited)
            lacks += bytes(len(awaited))
        else:
            held = handle.gradients.arrived
            states += bytes([_COMING if comes else _HELD * has for comes, has in zip(awaited, held, strict=True)])
            lacks += bytes([node is not None and not comes for comes, node in zip(awaited, nodes, strict=True)])
            for slot in doubted.get(handle, ()):
                lacks[slot - len(awaited)] = _DOUBTS
    return states + lacks


def _report(handle: FlatParamHandle) -> Iterable[int]:
    """Yield how often this rank reduces a handle, and for each parameter, whether a gradient arrived."""
    yield handle.gradients.times_taken + (not handle.gradients.is_empty)
    yield from handle.gradients.arrived
