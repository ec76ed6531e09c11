"""Gathering of optimizer state as a stream of unsharded tensors, from which full dictionaries are created.

The ranks first exchange the kinds of their state, and all small values. Then each recipient receives the shards of a
tensor directly into the unsharded tensor. Other ranks allocate no memory for the tensor.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import Communicator, during
from fsdp.distributed.consensus import (
    Ranks,
    agree_on_outcome,
    from_everyone,
    number_among,
    size_of,
    told_by_all,
)
from fsdp.distributed.devices import is_host
from fsdp.distributed.dtensor import full_tensor
from fsdp.layers.state_dict.full import ensure_agreed
from fsdp.optim_utils.full import ADDED, beside, copied_options
from fsdp.optim_utils.params import OwnState, Parameters, own_state, parameters_of, root_of
from fsdp.optim_utils.state import (
    Elements,
    Kind,
    Number,
    OptimParam,
    Original,
    SharedKinds,
    Value,
    nested_state,
    options_as_text,
    own_kinds,
    release,
    require_same_options,
    shared_kinds,
)

# Maximum bytes of unsharded tensors in flight; a single larger tensor is permitted.
WINDOW = 2**25

_WHAT = "gather its optimizer state"
_T = TypeVar("_T")


def in_window(jobs: Iterable[tuple[int, Callable[[], Callable[[], _T]]]]) -> Iterator[_T]:
    """Yield the results of jobs in order; later jobs are started early if all in flight have at most `WINDOW` bytes.

    A job is a number of bytes, and a function that starts a transfer and returns a function that waits for the result.
    """
    nbytes_ahead, ahead = 0, deque[tuple[int, Callable[[], _T]]]()
    for nbytes, begin in jobs:
        while ahead and nbytes_ahead + nbytes > WINDOW:
            nbytes_ahead -= ahead[0][0]
            yield ahead.popleft()[1]()
        ahead.append((nbytes, begin()))
        nbytes_ahead += nbytes
    while ahead:
        yield ahead.popleft()[1]()


class OptimStream:
    """Gathers an optimizer's unsharded state from all ranks once. The constructor is collective.

    `is_wanted` is True on the rank with the number `recipient` among the root's ranks, or on all ranks. `shared`
    contains the kinds of state of each parameter on all ranks.
    """

    def __init__(self, model: nn.Module, optim: Any, recipient: int | None) -> None:
        root = root_of(model, optim)
        root.require_idle("gather an optimizer state")
        ensure_agreed(root)
        everyone = root.everyone
        size = size_of(everyone)
        self.is_wanted = recipient is None or number_among(everyone) == recipient

        def read() -> tuple[tuple[Parameters, OwnState, dict[Ranks, list[OptimParam]], list[bytes]], dict[str, str]]:
            if recipient is not None and not 0 <= recipient < size:
                raise ValueError(f"recipient_rank must be None or one of the {size} ranks, got {recipient}")
            params = parameters_of(model, "gather an optimizer state", optim)
            own = own_state(params, optim)
            members: dict[Ranks, list[OptimParam]] = {}
            for one in params.listed:
                members.setdefault((one.comm, one.replicas), []).append(one)
            kinds = [pickle.dumps(own_kinds(each, own.states, "gathering")) for each in members.values()]
            options = options_as_text(own.dictionary["param_groups"], beside(own.dictionary))
            return (params, own, members, kinds), options

        (self.params, self.own, members, kinds), options = told_by_all(everyone, _WHAT, read)
        self.shared: dict[OptimParam, SharedKinds] = {}
        self._receivers: dict[Communicator, list[int]] = {}
        problems: list[str] = []
        for ((comm, replicas), each), pickled in zip(members.items(), kinds, strict=True):
            heard = from_everyone((comm, replicas), (self.is_wanted, pickled))
            replica = slice(replicas.rank * comm.world_size, (replicas.rank + 1) * comm.world_size)
            self._receivers[comm] = [rank for rank, (is_wanted, _) in enumerate(heard[replica]) if is_wanted]
            by_rank = [pickle.loads(other) for _, other in heard]
            for one, every, shared in zip(each, shared_kinds(by_rank), shared_kinds(by_rank[replica]), strict=True):
                if not (one.is_uncollected and comm.world_size > 1):
                    problems += every.problems(keeps_numbers=True)
                    self.shared |= {one: shared} if shared.kinds else {}
        agree_on_outcome([everyone], _WHAT, ValueError(problems[0]) if problems else None)
        require_same_options(everyone, options)

    def tensors(self) -> Iterator[tuple[Original, str, Tensor]]:
        """Collective. Yield parameter, key and tensor, like `stream_optim_state`; if closed early, drop the others."""

        def jobs() -> Iterator[tuple[int, Callable[[], Callable[[], tuple[Original, str, Tensor]]]]]:
            for one, original in self.params.by_number.values():
                for key, kind in self.shared[one].kinds.items() if one in self.shared else ():
                    if isinstance(kind, Elements):
                        nbytes = (kind.shape or original.shape).numel() * kind.dtype.itemsize
                        yield nbytes, partial(self._post, one, original, key, kind)

        tensors = in_window(jobs())
        try:
            yield from chain(tensors)  # without `chain`, `tensors` would be closed together with this generator
        except GeneratorExit:  # the other ranks wait for this rank's messages
            deque(tensors, maxlen=0)
            raise
        finally:
            for comm in self._receivers:  # until all sent data has arrived, the state must not be changed
                comm.settle()
            release(self.params.listed)

    def _post(self, one: OptimParam, original: Original, key: str, kind: Elements) -> Callable[[], Any]:
        """Start sending and receiving the shards of a tensor; return a function that waits for the tensor."""
        comm, mine = one.comm, one.interval(original, one.comm.rank, kind.shape)
        incoming: dict[int, list[Tensor]] = {}
        outgoing: dict[int, list[Tensor]] = {}
        if self.is_wanted:
            numel = one.local_shape(original, kind.shape).numel()
            made = torch.empty(numel, dtype=kind.dtype, device=one.device)
            ranks = (rank for rank in range(comm.world_size) if rank != comm.rank)
            there = {rank: one.interval(original, rank, kind.shape) for rank in ranks}
            incoming = {rank: [made[kept.start : kept.stop]] for rank, kept in there.items() if kept is not None}
        else:
            made = torch.empty(kind.shape or original.shape, dtype=kind.dtype, device="meta")
        if mine is not None and self._receivers[comm]:
            value = self.own.states[one][key].detach().reshape(-1)
            part = value[mine.offset : mine.offset + mine.numel].to(one.device).contiguous()
            outgoing = {rank: [part] for rank in self._receivers[comm] if rank != comm.rank}
        what = f"gather of the optimizer state of {one.name}"
        pending = comm.exchange(incoming, outgoing, what, ("optimizer", one.tag))
        if self.is_wanted and mine is not None:  # while the other shards are in flight
            made[mine.start : mine.stop].copy_(part)

        def finish() -> tuple[Original, str, Tensor]:
            pending.wait()
            if not self.is_wanted:
                if not is_host(one.device):
                    comm.settle()  # release the copies for sending
                return original, key, made
            local = one.local_value(original, made, kind.shape)
            tensor = local if original.part is None else full_tensor(original.part.dtensor(local))
            return original, key, tensor.cpu()

        return finish


def stream_optim_state(
    model: nn.Module, optim: Any, recipient_rank: int | None = 0
) -> Iterator[tuple[str, str, Tensor]]:
    """Collective. Yield a full optimizer state one unsharded tensor at a time, without 0-d tensors and plain values.

    Iterate on every rank. A recipient needs memory for the current tensor and the tensors in flight (up to 32 MiB, or a
    single larger tensor); other ranks need none. The optimizer may be stepped after the iteration. If every rank stops
    early, the remaining tensors are received and discarded.

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters, or an object with the same ``state_dict()``.
        recipient_rank: the number of the receiving rank; None for all ranks.

    Yields:
        The parameter's name, the key of the state (``exp_avg``), and the tensor in the parameter's shape: on the host,
        in separate memory; on other ranks, on the meta device.

    Raises:
        The errors of `FullyShardedDataParallel.gather_full_optim_state_dict`, before the first tensor.
    """
    stream = OptimStream(model, optim, recipient_rank)
    return ((original.name, key, tensor) for original, key, tensor in stream.tensors())


def fairscale_dictionary(model: nn.Module, optim: Any, recipient_rank: int | None) -> dict[str, Any] | None:
    """Collective. Return FairScale's full dictionary on recipients, None on other ranks."""
    stream = OptimStream(model, optim, recipient_rank)
    params, ids = stream.params, stream.own.ids
    found = _filled(stream, params.numbers.__getitem__, _as_fairscale)
    if found is None:
        return None
    id_map = {number: ids.get(one) if one in stream.shared else None for number, (one, _) in params.by_number.items()}
    uncollected = [number for one, number in ids.items() if one.is_uncollected]
    return found | dict(zip(ADDED, (id_map, uncollected, params.names), strict=True))


@during("full_optim_state_dict()")
def full_optim_state_dict(model: nn.Module, optim: Any, recipient_rank: int | None = 0) -> dict[str, Any] | None:
    """Collective. Return a full optimizer state under the parameters' names.

    Like `FullyShardedDataParallel.gather_full_optim_state_dict`, but with names instead of numbers, without the keys
    that describe numbers, and with 0-d tensors as in the optimizer. If ranks have different 0-d tensors, the result is
    a list with the tensors of all ranks; ``step`` must be equal.

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters, or an object with the same ``state_dict()``.
        recipient_rank: the number of the receiving rank; None for all ranks.

    Returns:
        The dictionary; None on other ranks.

    Raises:
        The errors of `FullyShardedDataParallel.gather_full_optim_state_dict`.
    """
    stream = OptimStream(model, optim, recipient_rank)
    return _filled(stream, lambda original: original.name, _as_it_is)


def _filled(
    stream: OptimStream, key_of: Callable[[Original], Any], kept: Callable[[str, Kind, SharedKinds], Any]
) -> dict[str, Any] | None:
    state: dict[Any, dict[str, Any]] = {}
    for one, original in stream.params.by_number.values():
        if one in stream.shared and stream.is_wanted:
            shared = stream.shared[one]
            # Also for tensors from other ranks, so that keys have the optimizer's order.
            how = _as_it_is if one.is_owned else kept  # on a single rank, without numbers of other ranks
            state[key_of(original)] = {key: how(key, kind, shared) for key, kind in shared.kinds.items()}
    for original, name, tensor in stream.tensors():
        if stream.is_wanted:
            state[key_of(original)][name] = tensor
    if not stream.is_wanted:
        return None
    for one, original in stream.params.by_number.values():
        if one.is_owned and one in stream.shared:
            state[key_of(original)] = nested_state(state[key_of(original)])
    groups = [
        copied_options(group) | {"params": [key_of(original) for one in members for original in one.originals]}
        for group, members in zip(stream.own.dictionary["param_groups"], stream.own.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups, **beside(stream.own.dictionary)}


def _as_fairscale(key: str, kind: Kind, shared: SharedKinds) -> Any:
    """Return ``step`` as a plain number, like FairScale, and other 0-d tensors as a list with each rank's tensor."""
    if isinstance(kind, Number):
        return kind.value if key == "step" else [number.held for number in shared.numbers(key)]
    return copy.deepcopy(kind.value) if isinstance(kind, Value) else None


def _as_it_is(key: str, kind: Kind, shared: SharedKinds) -> Any:
    if isinstance(kind, Number):
        numbers = shared.numbers(key)
        return kind.held if all(number == kind for number in numbers) else [each.held for each in numbers]
    return _as_fairscale(key, kind, shared)
