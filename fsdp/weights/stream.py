"""`stream_weights` sends all weights of a sharded model to a sink, in bounded buckets.

[Note: agreements] Besides the exchange of buckets, the ranks communicate four short messages in each stream: they
compare their settings, report that their sinks are open, report that all buckets are consumed, and report that their
sinks are closed. An exception on a rank is therefore raised on all ranks, and no rank waits for a failed rank. If a
sink fails, its rank continues to exchange buckets, because the other ranks have not been notified yet.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fsdp.checkpoint.model_tensors import (
    dtype_in_files,
    handles_of,
    named_tensors,
    ready,
    written_here,
)
from fsdp.checkpoint.writer import release
from fsdp.distributed.collectives import LONE_RANK, communicator, during
from fsdp.distributed.communicator import Communicator, default_group
from fsdp.distributed.consensus import Ranks, agree_on_outcome, from_everyone, number_among, size_of, told_by_all
from fsdp.distributed.devices import HOST
from fsdp.engine.names import paths_in, plain_name
from fsdp.engine.unit import Unit
from fsdp.layers.state_dict.full import buffers_in_own_precision
from fsdp.weights.assembly import Assembly, Shards
from fsdp.weights.changes import Snapshot
from fsdp.weights.plan import Holding, PlannedTensor, WeightPlan, chosen, groups_of, in_buckets
from fsdp.weights.sinks import Consumer, Sink, sink_of

_WHAT = "stream weights"
Rename = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True)
class Settings:
    """The arguments of a stream that determine its plan."""

    bucket_bytes: int
    dtype: torch.dtype | None
    rename: Rename | None
    together: Sequence[Iterable[str]]
    only: Iterable[str] | None
    buffers: bool

    def __post_init__(self) -> None:
        if type(self.bucket_bytes) is not int or self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be a positive number of bytes, got {self.bucket_bytes!r}")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {self.dtype!r}")

    def renamed(self, name: str) -> str:
        if self.rename is None:
            return name
        new = self.rename.get(name, name) if isinstance(self.rename, Mapping) else self.rename(name)
        if not isinstance(new, str) or not new:
            raise TypeError(f"rename must return a name for {name}, got {new!r}")
        return new


@dataclass(frozen=True)
class _Known:
    """The plan of a model, with the elements that each rank holds."""

    plan: WeightPlan
    holdings: list[Holding]
    alike: frozenset[int]
    is_direct: bool  # the parts of all ranks, see `WeightPlan.is_direct`
    planned_in: str  # the stream that created the plan, the same on all ranks


# The cached plans of each model, by a digest of all inputs of the plan.
_plans: WeakKeyDictionary[nn.Module, dict[str, _Known]] = WeakKeyDictionary()
_MOST_PLANS = 8  # the maximum number for a model


@during("fsdp.stream_weights()")
def stream_weights(
    model: nn.Module,
    sink: Sink | Consumer | None,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    together: Sequence[Iterable[str]] = (),
    only: Iterable[str] | None = None,
    since: Snapshot | None = None,
    buffers: bool = False,
) -> WeightPlan:
    """Collective. Send the weights of a model to a sink, in bounded buckets, using the names of the plain model.

    Units are not unsharded. Each rank copies its ranges of a bucket, and the bucket is assembled by one exchange while
    the sink consumes the previous bucket. A rank that receives buckets holds at most two of them; other ranks hold
    their part of a bucket. If the sink receives parts (files, sockets, shared memory), no exchange is needed.

    The first stream of a model creates a plan, and later streams with equal settings use the same plan.

    Args:
        model: a wrapped model, a model that contains units, or a plain model with equal values on all ranks.
        sink: a function that receives the tensors of each bucket as a dict by name, or a `fsdp.weights.Sink`. The
            memory of the tensors is reused after the function has returned. None on ranks that receive no buckets:
            only ranks with a sink assemble buckets.
        bucket_bytes: the maximum number of bytes in a bucket. Larger tensors are divided by rows, which is not
            supported if `sink` is a function. The number of exchanges is the number of buckets.
        dtype: the dtype in which floating-point parameters are sent; None (default) sends each in its own dtype.
        rename: a function or a mapping from the plain model's names to other names.
        together: groups of names whose tensors are sent in the same bucket, for example
            ``[("*.q_proj.*", "*.k_proj.*", "*.v_proj.*")]``, where * matches the same text in all names of a group.
        only: the names of tensors or modules to send, where * matches any text; None (default) sends all.
        since: on every rank, the snapshot of the last stream, to send only changes; see `fsdp.weights.Snapshot`.
            The sink must be a `SocketSink`, a `SharedMemorySink`, or another sink that supports changes.
        buffers: If True, also send persistent buffers, with the values of the first rank that holds them.

    Returns:
        The plan of the stream, with the names, dtypes and shapes of all tensors, and the content of each bucket.

    Raises:
        ValueError: for unknown names in `together` or `only`; if a row, or a group of `together`, is larger than a
            bucket; if `rename` returns the same name twice.
        TypeError: for a sink or an argument of another type.
        RuntimeError: in a forward or backward, or inside `summon_full_params`; if there are parameters without values;
            if the ranks have different settings; on every rank, with the reason, if the sink or another operation
            fails on another rank. In these cases the model is unchanged, and training can continue.
        NotImplementedError: for parameters on meshes that overlap only partly; for `Partial` placements.
    """
    units, ranks = ready(model, _WHAT)
    with torch.no_grad(), buffers_in_own_precision(units if buffers else ()):
        settings = partial(Settings, bucket_bytes, dtype, rename, together, only, bool(buffers))
        stream = Stream(model, units, ranks, sink, settings, since)
        try:
            return stream.run()
        finally:
            release(units)


class Stream:
    """A single stream of a model. The constructor and `run` are collective."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        ranks: Ranks,
        sink: Any,
        settings: Callable[[], Settings],
        since: Snapshot | None,
    ) -> None:
        self._units, self._ranks, self._rank, self._since = units, ranks, number_among(ranks), since
        known, comm = _plans.setdefault(model, {}), _comm_of(ranks)

        def look() -> tuple[str, tuple[str, str, str, str, int, str]]:
            self._sink, asked = sink_of(sink), settings()
            if since is not None and not (isinstance(since, Snapshot) and getattr(self._sink, "takes_changes", False)):
                raise TypeError(
                    "since must be an fsdp.weights.Snapshot, for a sink that supports changes (SocketSink, "
                    f"SharedMemorySink), got {since!r} for {type(self._sink).__name__}"
                )
            self._find(model, asked)
            common = _digest((asked.bucket_bytes, self._tensors, self._groups))
            key = f"{common} {_digest(self._held)}"
            before = known.get(key)
            self._buckets = (
                in_buckets(self._tensors, asked.bucket_bytes, self._groups) if before is None else before.plan.buckets
            )
            kind = "" if self._sink is None else getattr(self._sink, "receives", "buckets")
            base = "" if since is None else since.base(key)
            return key, (
                common,
                "" if before is None else before.planned_in,
                kind,
                secrets.token_hex(8),
                comm.rank,
                base,
            )

        self._key, heard = told_by_all(ranks, _WHAT, look)
        self._require_agreement(heard)
        plans = {planned_in for _, planned_in, *_ in heard}
        if "" in plans or len(plans) > 1:  # a rank has no plan, or a plan from a different stream than another rank
            known[self._key] = self._planned(stream=heard[0][3])
            while len(known) > _MOST_PLANS:
                del known[next(iter(known))]
        self._known = known[self._key]
        base = heard[0][5] if len({each[5] for each in heard}) == 1 else ""
        self.plan = replace(self._known.plan, rank=self._rank, stream=heard[0][3], base=base)
        self._kinds = [each[2] for each in heard]
        self._comm, self._places = comm, [each[4] for each in heard]

    def _find(self, model: nn.Module, settings: Settings) -> None:
        """Find the tensors of the stream on this rank, before the ranks have compared them."""
        found = named_tensors(paths_in(model), self._units)
        if not settings.buffers:
            found = {name: target for name, target in found.items() if isinstance(target.param, nn.Parameter)}
        names = [list(dict.fromkeys([name, *map(plain_name, target.names)])) for name, target in found.items()]
        names = [names[number] for number in chosen(names, settings.only)]
        self._targets = {each[0]: found[each[0]] for each in names}  # in the order of the model
        self._groups = groups_of(names, settings.together)
        tensors = []
        taken: dict[str, str] = {}
        for (name, target), every in zip(self._targets.items(), names, strict=True):
            if target.param.is_meta:
                raise RuntimeError(f"cannot {_WHAT}: {name} is on the meta device and has no values")
            sent = tuple(dict.fromkeys(map(settings.renamed, every)))
            for each in sent:
                if taken.setdefault(each, name) != name:
                    raise ValueError(f"rename gives {taken[each]} and {name} the same name {each}")
            tensors.append(PlannedTensor(sent, dtype_in_files(target, settings.dtype), target.shape, target.form))
        self._tensors = tuple(tensors)
        held = {number: target.held for number, target in enumerate(self._targets.values())}
        self._held = {number: one for number, one in held.items() if one is not None}

    def _require_agreement(self, heard: Sequence[Any]) -> None:
        for rank, (common, _, kind, *_) in enumerate(heard):
            if common != heard[0][0]:
                raise RuntimeError(
                    f"rank {self._rank}: rank {rank} has other tensors or settings to stream than rank 0. Every rank "
                    "must pass the same arguments except for the sink"
                )
            if "parts" in (kind, heard[0][2]) and kind != heard[0][2]:
                raise TypeError(
                    f"rank {self._rank}: rank {rank} has a different kind of sink than rank 0. A sink that receives "
                    "parts (files, sockets, shared memory) must be passed on every rank"
                )
        if not any(each[2] for each in heard):
            raise ValueError("sink is None on every rank: pass it on the ranks that are to receive the weights")

    def _planned(self, stream: str) -> _Known:
        """Collective. Return the plan of this model, which requires the elements that each rank holds."""
        written = written_here(self._targets, self._ranks, _WHAT)
        numbers = {number for number, name in enumerate(self._targets) if name in written}
        unplaced = {number: replace(held, offset=0) for number, held in self._held.items()}  # offsets are local
        own_part = {number: held for number, held in self._held.items() if number in numbers}
        is_direct = WeightPlan(self._tensors, self._buckets, ()).is_direct(own_part)
        heard = from_everyone(self._ranks, (unplaced, numbers, is_direct))
        parts = tuple({number: held[number] for number in sorted(own)} for held, own, _ in heard)
        for number, tensor in enumerate(self._tensors):
            held = sum(part[number].numel for part in parts if number in part)
            if held != tensor.shape.numel():
                raise RuntimeError(
                    f"cannot {_WHAT}: the ranks hold {held} of {tensor.shape.numel()} elements of {tensor.name}"
                )
        are_direct = all(each for *_, each in heard)
        plan = WeightPlan(self._tensors, self._buckets, parts)
        return _Known(plan, [held for held, *_ in heard], self._alike(), are_direct, stream)

    def _alike(self) -> frozenset[int]:
        """Return the tensors that are equal on replicas: no buffers, and no parameters that each rank trains alone."""
        many = size_of(self._ranks) > 1
        apart = {
            handle for unit in self._units if many and size_of(unit.everyone) == 1 for handle in handles_of([unit])
        }
        targets = enumerate(self._targets.values())
        return frozenset(
            number
            for number, target in targets
            if isinstance(target.param, nn.Parameter) and target.handle not in apart
        )

    @property
    def own(self) -> Holding:
        """The elements that this rank sends, in its vectors."""
        return {number: self._held[number] for number in self.plan.parts[self._rank]}

    def vectors(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """Return this rank's vectors of some tensors by their numbers, see `Held`."""
        targets = list(self._targets.values())
        return {number: targets[number].vector() for number in numbers}

    def run(self) -> WeightPlan:
        """Collective. Send all buckets."""
        job = _Consumption(self._sink)
        try:
            # All memory is allocated before the ranks depend on each other.
            send = job.attempt("prepare its parts", self._prepare)
            job.open(self.plan)
            job.agree(self._ranks)
            if send is not None:
                send(job)
            job.agree(self._ranks)
            job.close(None)
            job.agree(self._ranks)
        except BaseException as error:
            job.close(error)
            if self._since is not None:
                self._since.clear()
            raise
        if self._since is not None:
            self._since.complete(self._key, self.plan.stream)
        return self.plan

    def _prepare(self) -> Callable[[_Consumption], None]:
        """Return the function that sends all buckets."""
        vectors = self.vectors(range(len(self._targets)))
        device = self._units[0].device if self._units else next((each.device for each in vectors.values()), HOST)
        shards = Shards(self.plan, vectors, device)
        if "parts" in self._kinds:
            # All buckets use the same memory, because allocating new memory is slower.
            memory = torch.empty(self.plan.largest_part(self.own), dtype=torch.uint8, device=device)
            return partial(self._send_parts, shards, memory)
        consumers = [rank for rank, kind in enumerate(self._kinds) if kind]
        known, comm = self._known, self._comm.for_device(device)
        same = known.holdings, known.alike, known.is_direct
        assembly = Assembly(shards, self._held, *same, consumers, comm, self._places)

        def send(job: _Consumption) -> None:
            assembly.buckets(job.bucket)
            job.attempt("send its parts", assembly.check)

        return send

    def _send_parts(self, shards: Shards, memory: Tensor, job: _Consumption) -> None:
        own = self.own
        if self._since is not None:
            self._since.begin(is_complete=not self.plan.base)

        def part(number: int) -> Tensor:
            runs = self.plan.runs(number, own)
            packed = shards.packed(runs, memory)
            if self._since is None:
                return packed
            width = min((self.plan.dtype_of(run).itemsize for run in runs), default=1)
            return self._since.encoded(number, packed.cpu(), min(width, 8))

        for number in range(len(self.plan.buckets)):
            packed = job.attempt(f"pack bucket {number}", partial(part, number))
            if packed is not None:
                job.bucket(number, packed)


_T = TypeVar("_T")


class _Consumption:
    """The sink of this rank, and the first exception, after which no further function is called."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink, self._is_open = Sink() if sink is None else sink, False
        self._what = "stream weights"
        self._error: Exception | None = None

    def attempt(self, what: str, job: Callable[[], _T]) -> _T | None:
        """Return the result of a function; None if it, or an earlier function, has raised an exception."""
        if self._error is None:
            self._what = what
            try:
                return job()
            except Exception as error:  # noqa: BLE001 (it is raised by `agree`)
                self._error = error
        return None

    def open(self, plan: WeightPlan) -> None:
        self._is_open = self._error is None
        self.attempt("open its sink", lambda: self._sink.open(plan))

    def bucket(self, number: int, tensor: Tensor) -> None:
        self.attempt(f"consume bucket {number}", lambda: self._sink.bucket(number, tensor))

    def close(self, error: BaseException | None) -> None:
        """Close the sink once, if it was opened; `agree` reports an exception of the sink."""
        if self._is_open:
            self._is_open, self._error = False, None
            self.attempt("close its sink", lambda: self._sink.close(error))

    def agree(self, ranks: Ranks) -> None:
        """Collective. Raise the exception of this rank, or an error that reports another rank's exception."""
        agree_on_outcome([ranks], self._what, self._error)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _comm_of(ranks: Ranks) -> Communicator:
    """Return a communicator that connects any two of the ranks."""
    wide = [comm for comm in ranks if comm.world_size > 1]
    if len(wide) > 1:
        return communicator(default_group(None), HOST)
    return wide[0] if wide else LONE_RANK
