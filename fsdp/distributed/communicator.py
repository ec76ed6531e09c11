"""`Communicator` is the interface of all communication with other ranks, for every backend.

This module contains the interface, the implementation for a single rank, and functions for users' process groups:
devices, ranks, backends, and the default group. The implementations that use `torch.distributed` are in
`distributed.collectives`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.profiler import record_function

from fsdp.distributed.devices import HOST, accelerator

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])

# The tensors of a message, in order, by rank.
Messages = Mapping[int, Sequence[Tensor]]

# The subject of a message: the number of a handle (`Communicator.new_tag`), a word, or both. Tags must be the same on
# all ranks; descriptions for error messages need not be.
Tag = int | str | tuple[int | str, ...]


class Tags(NamedTuple):
    """The number of a handle among all handles of its root, and its unique tags.

    Tags distinguish the messages of different collectives. They are the same on all ranks.
    """

    number: int
    gather: int  # for all-gathers
    reduce: int  # for reductions
    replica: int  # along the replica axis


def words_of(tag: Tag) -> tuple[int | str, ...]:
    return tag if isinstance(tag, tuple) else (tag,)


# The current public call of this thread, as users write it; empty during forward and backward.
_call: ContextVar[str] = ContextVar("_call", default="")
# The timeout for waits of this thread, if different from the group's timeout.
_limit: ContextVar[tuple[timedelta, ...]] = ContextVar("_limit", default=())


_MANY_TAGS = 1 << 20  # more than all handles of a process use


class Pending:
    """A collective in flight; only `wait` returns the result."""

    def __init__(self, what: str, works: Sequence[Any], result: Callable[[], Tensor]) -> None:
        self.what = what
        self._works = works
        self._result: Callable[[], Tensor] | None = result
        self._arrived: Tensor
        self._failure: str | None = None

    def after(self, work: Any) -> Pending:
        """Make `wait` first wait for `work`, and return this object."""
        self._works = [work, *self._works]
        return self

    def wait(self) -> Tensor:
        if self._failure is not None:
            raise CollectiveError(self._failure)  # the data is incomplete
        if self._result is not None:
            ends = [begin(self.what) for begin in wait_observers] if wait_observers else ()
            try:
                finish(self._works, self.what)
                # Drop `_result`, which keeps the sent tensor alive until now.
                self._works, result, self._result = (), self._result, None
                self._arrived = result()
            except BaseException as error:
                # An interrupted wait must be repeated: messages still arrive in the buffers, which would be freed.
                if isinstance(error, RuntimeError) or self._result is None:
                    self._works, self._failure = (), str(error) or type(error).__name__
                raise
            for end in ends:
                end()
        return self._arrived


# Each is called before a wait for a collective, in the waiting thread, with the collective's description. The returned
# function is called after the wait.
wait_observers: tuple[Callable[[str], Callable[[], None]], ...] = ()


def after_use_of(sent: object, result: Tensor) -> Tensor:
    """Return `result`; the argument `sent` is kept alive until the collective that reads it is awaited."""
    return result


class Communicator(ABC):
    """The ranks of a group. Every method is collective over these ranks."""

    peers_answer = True  # False if the other ranks are only simulated, so comparisons with them are meaningless
    sends_pieces = False  # True if the library itself sends messages between ranks, with tags
    group: Any = None  # the process group, or a user's object that wraps it; None without a group

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._tags = itertools.count()

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of the group, in order; see `ranks_of` for users' objects."""
        return ranks_of(self.group)

    def new_tag(self) -> int:
        """Return a new tag for a handle. Every rank of the group must call this method the same number of times."""
        return next(self._tags)

    def take_order(self) -> int:
        """Return a checksum of the tags of all all-gathers since the last call; 0 if the tags are sent.

        Ranks with the same all-gathers in the same order get the same checksum.
        """
        return 0

    def note_order(self, tag: Tag) -> None:  # noqa: B027 (not required for a single rank)
        """Add an all-gather to the checksum of `take_order`, if the tag is not sent."""

    def restart_tags(self) -> None:
        """Continue with the same tags on all ranks, even after different numbers of tags were created."""
        self._tags = itertools.count((next(self._tags) // _MANY_TAGS + 1) * _MANY_TAGS)

    @property
    def on_host(self) -> Communicator:
        """The communicator of the same ranks for CPU tensors. The first access is collective.

        Small tensors are exchanged on the CPU, because the host would otherwise wait for the device.
        """
        return self

    def for_device(self, device: torch.device) -> Communicator:
        """Return the communicator of the same ranks for tensors on another device."""
        return self

    def apart(self) -> Communicator:
        """Return a separate communicator of the same ranks for a thread's CPU tensors; collective the first time."""
        return self

    def share_memory(self, nbytes: int) -> None:  # noqa: B027 (most backends ignore it)
        """Collective. Prepare to send messages of up to `nbytes` through shared memory, if all ranks support it."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor ``[numel]`` for use in a reduction."""
        return torch.empty(numel, dtype=dtype, device=device)

    def is_read_in_place(self, tensor: Tensor) -> bool:
        """Return whether other ranks read `tensor` directly, maybe after the reduction has returned on this rank."""
        return False

    def give_up(self) -> None:  # noqa: B027 (a wait on an accelerator's stream cannot be ended)
        """Abort current and later waits of this rank with an error, if the host waits (with gloo)."""

    def ensure_connected(self) -> None:  # noqa: B027 (only unpickled communicators are not connected)
        """Raise RuntimeError if the ranks cannot be reached."""

    def __deepcopy__(self, memo: Any) -> Communicator:
        return self  # copies use the same ranks

    def __reduce__(self) -> str | tuple[Any, ...]:
        return MissingRanks, (self.rank, self.world_size)

    @abstractmethod
    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        """Fill `full` ``[world_size * n]`` with every rank's `shard` ``[n]``, of the same dtype.

        `shard` must not change until `settle` returns.
        """

    @abstractmethod
    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        """Sum `full` ``[world_size * n]`` over the ranks; `wait` returns this rank's part ``[n]`` of the sum.

        `full` is sent in its dtype. `dtype` is the dtype of the result (default: the same). The sum uses the wider
        dtype, unless the backend sums. `full` must not be used until `wait` returns, and may share memory with the
        result. If `is_read_in_place(full)`, it must never be written again.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        """Reduce a small tensor in place by "sum" or "max". The description `what` must be the same on all ranks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> Pending:
        """Overwrite `tensor` in place with the tensor of the group's first rank."""

    def meet(self, what: str, tag: Tag) -> None:  # noqa: B027 (without tags there is nothing to compare)
        """Block until all ranks reach the same operation, before communication without tags."""

    @abstractmethod
    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        """Send tensors to some ranks and receive tensors from some ranks, independently of all other ranks.

        For each message, the sender and the receiver must pass tensors of equal sizes in the same order. All tensors
        must be contiguous, and sent tensors must not change until `settle`. The result of `wait` is meaningless. On
        accelerators, a first call without previous communication is collective, also for ranks without messages.
        """

    def swap(self, outgoing: Sequence[Tensor], what: str, tag: Tag, then: Callable[[list[Tensor]], Tensor]) -> Pending:
        """Send each rank a tensor ``[n]``; `wait` returns the result of `then` for the received tensors.

        `then` is called with a tensor from each rank, including this rank, in rank order. The tensors of `outgoing`
        must not be used until `wait` returns.
        """
        received = [each if rank == self.rank else torch.empty_like(each) for rank, each in enumerate(outgoing)]
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        incoming, sent = ({peer: [each[peer]] for peer in peers} for each in (received, outgoing))
        arrived = self.exchange(incoming, sent, what, tag)
        return Pending(what, (), lambda: then(received if arrived.wait() is not None else []))

    @abstractmethod
    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Block, and return every rank's payload in rank order. Payloads may have any length.

        Raises:
            RuntimeError: on every rank, if the backend uses tags and ranks are in different public calls (`during`).
        """

    def settle(self) -> None:  # noqa: B027 (not required if collectives complete with their messages)
        """Block until peers have received all data from this rank; afterwards, shards may be written again."""


class MissingRanks(Communicator):
    """The communicator of an unpickled model: rank and world size are known, but there is no process group."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"this model was unpickled as rank {self.rank} of {self.world_size}, and process groups cannot be pickled: "
            "assign `process_group` on every FullyShardedDataParallel in it (fsdp.get_fsdp_instances(model)) before use"
        )

    all_gather = reduce_scatter = all_reduce = broadcast = exchange = all_gather_bytes = ensure_connected = _refuse


class LoneRank(Communicator):
    """A group of a single rank, which already holds all data to gather or reduce."""

    def __reduce__(self) -> str:
        return "LONE_RANK"

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    @property
    def ranks(self) -> Sequence[int]:
        return [own_rank()]

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard, non_blocking=True)
        return Pending(what, (), lambda: full)

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        return Pending(what, (), lambda: full.to(dtype or full.dtype))

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        return Pending(what, (), lambda: tensor)

    def broadcast(self, tensor: Tensor) -> Pending:
        return Pending("broadcast", (), lambda: tensor)

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        return Pending(what, (), lambda: torch.empty(0, device=HOST))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


LONE_RANK = LoneRank()


class OtherRankError(RuntimeError):
    """A collective function cannot continue because of an error on another rank. The message contains the error's text.

    The failed rank raises the original error instead.
    """


class DifferentCallsError(RuntimeError):
    """Ranks are in different calls of this library; every rank of the communicator raises it."""

    def __str__(self) -> str:
        return f"rank {own_rank()}: {super().__str__()}"  # may be raised on another rank than created


class CollectiveError(OtherRankError):
    """A collective did not complete because another rank raised an error, ended, or did not make the same call.

    The message contains the reason and the positions of the ranks, if known. See `set_watchdog`.
    """


class DamagedMessageError(RuntimeError):
    """The received bits of a message differ from the sent bits, see `check_messages`."""


class ClosedConnectionError(RuntimeError):
    """A rank closed its connection to this rank, or the process of the rank ended."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class Wait(NamedTuple):
    """A collective for which a thread of this rank waits, the current public call, and the start time of the wait."""

    what: str
    call: str
    since: float


# For the watchdog: the current wait and the end of the last wait, by thread; and the longest recent wait in seconds, of
# other threads (True) and of the main thread (False). Old waits decay: after a thousand waits, they count for a third.
waits: dict[int, Wait] = {}
_resumed: dict[int, float] = {}
longest = {False: 0.0, True: 0.0}
_awaited: dict[int, Sequence[Any]] = {}  # the awaited works, by thread; not in `Wait`, which the watchdog keeps
_LONG = 10.0  # the maximum time to count between two waits, in seconds: a rank may pause for hours


main_threads = {threading.main_thread().ident}  # also the main threads of simulated ranks (`fsdp.testing`)


def is_aside(thread: int) -> bool:
    """Return whether a thread is not the main thread, for example a thread for background saving."""
    return thread not in main_threads


def awaited_by(thread: int) -> list[int]:
    """Return the ranks whose messages a thread waits for; empty if unknown."""
    senders = {getattr(work, "sender", None) for work in _awaited.get(thread, ())}
    return sorted(rank for rank in senders if isinstance(rank, int))


def explain(closed_by: int | None) -> str:
    """Return an explanation for an incomplete collective; the watchdog replaces this function."""
    return ""


def finish(works: Sequence[Any], what: str) -> None:
    """Wait for works of `torch.distributed`; if any did not complete, raise an error with the known cause."""
    thread, since = threading.get_ident(), time.monotonic()
    beside = thread not in main_threads  # `is_aside` inlined: this runs for every message
    outer, of_outer = waits.get(thread), _awaited.get(thread, ())  # if a signal handler calls this during another wait
    waits[thread], _awaited[thread] = Wait(what, _call.get(), since), works
    try:
        limit = _limit.get()
        for work in works:
            if work is not None:
                work.wait(*limit)
    except RuntimeError as error:
        raise incomplete(what, error) from error
    finally:
        if outer is None:
            del waits[thread], _awaited[thread]
        else:
            waits[thread], _awaited[thread] = outer, of_outer
    now = time.monotonic()
    # After long computation between two waits, ranks may be further apart.
    since_last = 0.0 if beside else min(now - _resumed.get(thread, since), _LONG)
    longest[beside] = max(0.999 * longest[beside], now - since, since_last / 2)
    _resumed[thread] = now


def measure_anew() -> None:
    """Reset the measured durations of waits."""
    longest.update(dict.fromkeys(longest, 0.0))
    _resumed.clear()


def incomplete(what: str, error: RuntimeError) -> RuntimeError:
    """Return the error for an incomplete collective."""
    call = _call.get()
    begin = f"rank {own_rank()}: {what}{f' in {call}' if call else ''} did not complete: "
    if isinstance(error, DamagedMessageError):
        return DamagedMessageError(f"{begin}{error}")
    known = explain(error.rank if isinstance(error, ClosedConnectionError) else None)
    if known:
        return CollectiveError(f"{begin}{known}\n({error})")
    if call:
        remedy = f"This rank is in {call}: make the same call on every rank of the group"
    else:
        remedy = (
            "This rank is in forward or backward. Every rank of the group must run the same units in every step, in "
            "evaluation too, and make the same collective calls (state_dict, clip_grad_norm_, fsdp.save). Where ranks "
            "have different numbers of batches use fsdp.join, and where not every rank runs a module fsdp.cond"
        )
    return CollectiveError(f"{begin}{error}. {remedy}; check the other ranks: one may have failed or run other code.")


@contextmanager
def after_closing() -> Iterator[None]:
    """Skip all waits of this thread in the context, because connections are closed and no more messages arrive.

    gloo (seen in torch 2.13) never completes a message if the peer requested it, but closed the connection before
    receiving it. Without this context, such a wait would end with the group's timeout.
    """
    token = _limit.set((timedelta(milliseconds=1),))
    try:
        yield
    finally:
        _limit.reset(token)


def uncompiled(function: _Function) -> _Function:
    """Exclude a function that moves data or examines all models from compilation, and all functions called by it.

    The effect is the same as with `torch.compiler.disable`, which takes seconds to import and uses a slower wrapper.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # causes a graph break in traced callers
    skip = eval_frame._FrameAction.SKIP  # private; `torch.compiler.disable` uses the same (torch 2.11 to 2.15)
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


class during:  # noqa: N801 (lower case like `contextlib.suppress`)
    """A context manager and decorator: errors inside contain the outermost public call, as users write it.

    Calls of a decorated function are not compiled, because compilers cannot trace collectives.
    """

    def __init__(self, call: str) -> None:
        self._described = call

    def __enter__(self) -> None:
        self._token = _call.set(_call.get() or self._described)

    def __exit__(self, *_: object) -> None:
        _call.reset(self._token)

    def __call__(self, function: _Function) -> _Function:
        @uncompiled
        @wraps(function)
        def described(*args: Any, **kwargs: Any) -> Any:
            with during(self._described):
                return function(*args, **kwargs)

        return cast("_Function", described)


def present_call() -> str:
    """Return the current public call of this thread; empty during forward and backward."""
    return _call.get()


def in_stage(stage: str, what: str, tag: Tag) -> tuple[str, Tag]:
    """Return the description and tag of a collective, extended by the current pass or public call of this rank.

    Ranks in different passes or calls therefore do not receive each other's messages. Errors report the call
    separately.

    Args:
        stage: the current or last pass of a model; empty if ranks may be in different passes and calls.
        what, tag: the description and tag of the collective, without the pass.
    """
    call = _call.get()
    return f"{what} in {stage}" if stage and not call else what, (*words_of(tag), call or stage) if stage else tag


def named(ranks: Iterable[int]) -> str:
    """Format ranks as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if not runs:
        return "no ranks"
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {text}"


def some_of(names: Iterable[object], most: int = 5) -> str:
    """Format the first `most` names, as "a, b and 3 more"."""
    texts = list(map(str, names))
    return ", ".join(texts[:most]) + f" and {len(texts) - most} more" * (len(texts) > most)


def own_rank() -> int:
    """Return the global rank of this process for error messages; 0 without `torch.distributed`."""
    return dist.get_rank() if dist.is_initialized() else 0


def labelled(what: str, name: str, function: Callable[..., _Result], *args: Any) -> _Result:
    """Return the result of a function, which profilers show as a range ``FSDP::all_gather (layers.3)``."""
    # private, as in torch's code: without a profiler, `record_function` still takes 5 us (torch 2.11 to 2.15)
    if not torch.autograd._profiler_enabled():
        return function(*args)
    with record_function(f"FSDP::{what} ({name})"):
        return function(*args)


# The ranges of these profilers form a stack. A range from one backward hook to another would end a different range.
_STACKS = (torch._C._profiler.ActiveProfilerType.NVTX, torch._C._profiler.ActiveProfilerType.ITT)


def begin_range(what: str, name: str) -> record_function | None:
    """Start a range as in `labelled`; the caller must end it by `__exit__`. None without a suitable profiler."""
    if not torch.autograd._profiler_enabled() or torch._C._autograd._profiler_type() in _STACKS:
        return None
    return record_function(f"FSDP::{what} ({name})").__enter__()


class _Forked:
    """Replaces a process group in a process that was forked from a rank: the connections belong to the parent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"this process was forked from rank {self._rank}, whose connections to other ranks are not inherited. Use "
            "a sharded model only in the process that wrapped it, and fork other processes (multiprocessing, workers "
            "of a DataLoader) only for work without the model"
        )


def _leave_groups_to_parent() -> None:
    for one in [*communicators.values(), *of_destroyed.values()]:
        one.group = _Forked(own_rank())


def made_once_for_groups() -> dict[Any, Any]:
    """Return a dictionary for objects created once per process group; the dictionary is cleared when the process ends.

    A gloo thread needs the GIL to free a tensor of a user's last collective. The destructor of a group waits for its
    threads. If the destructor runs during interpreter shutdown, when no thread can acquire the GIL, the process is
    aborted ("terminate called without an active exception", torch 2.13).
    """
    made: dict[Any, Any] = {}
    _made.append(made)
    return made


def once_for_groups(function: _Function) -> _Function:
    """Cache the results of a function whose arguments include process groups; see `made_once_for_groups`."""
    known = made_once_for_groups()

    @wraps(function)
    def remembered(*key: Any) -> Any:
        if key not in known:
            watch_process()
            known[key] = function(*key)
        return known[key]

    return cast("_Function", remembered)


_made: list[dict[Any, Any]] = []
_before_end: list[Callable[[], None]] = []


def before_groups_end(function: Callable[[], None]) -> None:
    """Register a function to be called when the process ends, before process groups are released."""
    watch_process()
    _before_end.append(function)


@cache
def watch_process() -> None:
    """Register handlers for the end of the process and for forks, when the first process group is used."""
    atexit.register(_let_groups_go)
    os.register_at_fork(after_in_child=_leave_groups_to_parent)


def forget_groups(groups: Collection[Any]) -> None:
    """Delete the objects of process groups that are no longer usable."""
    for made in _made:
        for key in list(made):
            if any(part in groups for part in _parts(key)):
                del made[key]


def _parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def forget_destroyed_groups() -> None:
    """Delete the objects for destroyed groups, with their threads, files and memory.

    Existing models keep the objects in use.
    """
    if len(main_threads) > 1:
        return  # ranks are threads, and torch knows the groups of only one rank at a time
    groups = {
        part for made in _made for key in list(made) for part in _parts(key) if isinstance(part, dist.ProcessGroup)
    }
    ended = {group for group in groups if not ranks_of(group)}
    ways = {key: way for key, way in list(communicators.items()) if key[0] in ended}
    of_destroyed.update(ways)
    forget_groups({*ended, *ways.values()})


# All communicators, by group and device type; `collectives.communicator` creates them.
communicators: dict[tuple[Any, str, type, bool], Any] = made_once_for_groups()
of_destroyed: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # those of destroyed groups that models still use


def _let_groups_go() -> None:
    """Release the process groups of models that exist until the process ends; see `made_once_for_groups`."""
    for function in _before_end:
        function()
    for comm in [*communicators.values(), *of_destroyed.values()]:
        comm.group = None
    for made in _made:
        made.clear()
    gc.collect()  # unreferenced models with reference cycles hold their groups too


class Group(Protocol):
    """The required interface of a process group; for a single rank, an object with these two methods suffices."""

    def rank(self) -> int: ...
    def size(self) -> int: ...


def behind(group: Any) -> Any:
    """Return torch's process group: `group` itself, or the group that a user's object wraps."""
    if dist.is_available() and not isinstance(group, dist.ProcessGroup):
        held = getattr(group, "__dict__", {}).values()
        return next((each for each in held if isinstance(each, dist.ProcessGroup)), group)
    return group


def ranks_of(group: Any) -> Sequence[int]:
    """Return the global ranks of a group, in order; empty if they cannot be determined for a user's object."""
    try:
        return dist.get_process_group_ranks(behind(group))
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError):
        return [own_rank()] if group.size() == 1 else []


def ranks_of_groups() -> list[list[int]]:
    """Return the sorted global ranks of each group with a communicator."""
    found = dict.fromkeys(tuple(sorted(ranks_of(one.group))) for one in list(communicators.values()))
    return [list(ranks) for ranks in found if ranks]


def communicators_among(ranks: Iterable[int]) -> list[Communicator]:
    """Return the communicators of all groups that consist only of the given ranks."""
    members = [(set(ranks_of(one.group)), one) for one in list(communicators.values())]
    return [one for found, one in members if found and found.issubset(ranks)]


def backend_names(group: Any) -> dict[str, str]:
    """Return the backend by device type, e.g. ``{"cpu": "gloo", "cuda": "nccl"}``; empty if torch does not know it."""
    try:
        config = dist.get_backend_config(behind(group))
    except (ValueError, RuntimeError, AttributeError, TypeError):
        return {}
    return dict(re.findall(r"([^,:]+):([^,]+)", config))


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a group, which the library uses for derived groups; None if unknown."""
    known = behind(group)
    try:
        return cast(timedelta, known._get_backend(known._device_types[0]).options._timeout)  # private (2.11 to 2.15)
    except (AttributeError, IndexError, RuntimeError):
        return None


def number_of_groups() -> int:
    """Return the number that torch uses in the name of the next group that only its members create.

    The number is private in torch (seen in 2.11 to 2.15). Before 2.14 it counts the groups of this rank, and since
    then all groups that this rank took part in creating. Returns -1 if torch stores the number elsewhere.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if torch.__version__ >= "2.14":
        return getattr(world, "group_count", -1)
    return len(getattr(world, "pg_names", ())) or -1


def default_group(group: Group | None) -> Group:
    """Return `group`, or by default the group of all ranks; if there is none, raise an error with instructions."""
    if group is not None:
        if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
            raise TypeError(
                f"process_group must be a process group that this rank is in, got {group!r}. (dist.new_group returns a "
                "number on ranks that are not in the group: wrap the module only on its members.)"
            )
        return group
    if dist.is_available() and dist.is_initialized():
        return cast(Group, dist.group.WORLD)
    raise RuntimeError(
        "sharding needs a process group and torch.distributed is not initialized. Start the script with torchrun and "
        "put these two lines before the model is sharded:\n"
        "    import fsdp\n"
        "    device = fsdp.init_distributed()  # move the model to this device"
    )


def served_device(group: Group) -> torch.device:
    """Return the default compute device: the current accelerator if `group` supports it, else the CPU."""
    device = accelerator()
    return HOST if device is None or device.type not in backend_names(group) else device


def summed(
    comm: Communicator, tensor: Tensor, dtype: torch.dtype, what: str, tag: Tag
) -> Generator[None, None, Tensor]:
    """Collective, in stages. Return the sum of all ranks' tensors ``[n]``, with the same bits on all ranks.

    Each rank sends 2 (W - 1) / W of the tensor's bytes, as in a ring all-reduce.

    Args:
        comm: the communicator of the ranks.
        tensor: the summand of this rank; it may be overwritten.
        dtype: the dtype in which the tensor is sent.
        what, tag: see `Communicator`.
    """
    if not comm.sends_pieces:
        pending = comm.all_reduce(tensor.to(dtype), what=what)
        del tensor
        yield
        return pending.wait()
    numel, wide = tensor.numel(), tensor.dtype
    tensor = tensor.to(dtype)
    if numel % comm.world_size:
        tensor = torch.cat([tensor, tensor.new_zeros(-numel % comm.world_size)])
    pending = comm.reduce_scatter(tensor, what, tag, wide)
    del tensor
    yield
    shard = pending.wait().to(dtype)
    pending = comm.all_gather(shard.new_empty(comm.world_size * shard.numel()), shard, what, tag)
    yield
    return pending.wait()[:numel]


def completed(stages: Generator[None, None, Tensor]) -> Tensor:
    """Run all stages of a collective without a pause, and return the result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Tensor = end.value
            return result


def reduced_scattered(
    comm: Communicator, tensor: Tensor, dtype: torch.dtype, what: str, tag: Tag
) -> Generator[None, None, Tensor]:
    """Collective, in stages. Return this rank's part ``[n / W]`` of the sum of tensors ``[n]``; see `summed`."""
    pending = comm.reduce_scatter(tensor.to(dtype), what, tag, tensor.dtype)
    del tensor
    yield
    return pending.wait()
