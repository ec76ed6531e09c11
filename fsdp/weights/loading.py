"""Loading a stream of weights into a sharded model: each rank copies its own ranges of each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp.checkpoint.formats.source import TensorReader
from fsdp.checkpoint.loader import does_not_fit, misfits
from fsdp.checkpoint.model_tensors import all_ranks, prepared, tensors_in
from fsdp.checkpoint.writer import release
from fsdp.distributed.collectives import during
from fsdp.distributed.consensus import done_by_all, sent_by_first, told_by_all
from fsdp.engine.names import paths_in
from fsdp.layers.state_dict.full import stored_buffers
from fsdp.weights.plan import Run, WeightPlan
from fsdp.weights.receiver import Receiver
from fsdp.weights.sinks import Sink

_WHAT = "load a stream of weights"


class Source(Protocol):
    """Weights that arrive in buckets, such as an `Update`."""

    plan: WeightPlan

    def buckets(self) -> Iterator[tuple[int, Tensor]]: ...


class ModelSink(Sink):
    """Loads a stream into another model on the same ranks, which may be sharded differently.

    The constructor is collective. Every rank creates this sink, and passes the sink to `stream_weights`. Each rank
    receives complete buckets, and copies its ranges of each bucket with `Tensor.copy_`, which casts values.

    Args:
        model: the model to load into, with or without units.
        strict: If True, raise an error for parameters of the model that the stream does not contain.

    Raises:
        RuntimeError: if names or shapes differ, with all differences, before any tensor is changed; in a forward or
            backward, or inside `summon_full_params`.
    """

    def __init__(self, model: nn.Module, *, strict: bool = True) -> None:
        self._model, self._strict = model, strict
        self.units, self.everyone = prepared(model, _WHAT)
        self.found: Any = _IncompatibleKeys([], [])
        self._open = ExitStack()

    def open(self, plan: WeightPlan) -> None:
        self._plan = plan
        stream = TensorReader("the stream", {tensor.name: tensor for tensor in plan.tensors})  # type: ignore[misc]
        stream.forms = {tensor.name: tensor.form for tensor in plan.tensors}
        names = set(stream.tensors)
        found = tensors_in(paths_in(self._model), self.units)
        # A stream contains buffers only on request.
        targets = [each for each in found if isinstance(each.param, nn.Parameter) or not names.isdisjoint(each.keys)]
        missing, unexpected, problems = misfits(targets, stream, self._strict)
        if unexpected and not self._strict:
            problems.append(f"unexpected: {', '.join(unexpected)}")
        if problems:
            raise RuntimeError(does_not_fit("the stream", self._model, problems))
        self.found = _IncompatibleKeys(missing, unexpected)
        by_name = {key: target for target in targets for key in target.keys}
        self._targets = [by_name[tensor.name] for tensor in plan.tensors]
        held = {number: target.held for number, target in enumerate(self._targets)}
        self._held = {number: replace(one, offset=0) for number, one in held.items() if one is not None}
        self._open.enter_context(torch.no_grad())
        self._open.enter_context(stored_buffers(self.units))

    def bucket(self, number: int, tensor: Tensor) -> None:
        # Also tensors without a part on this rank: all ranks must record that a shard was changed.
        values: dict[int, list[tuple[Run, Tensor]]] = {piece.tensor: [] for piece in self._plan.buckets[number]}
        for run in self._plan.runs(number, self._held):
            values[run.piece.tensor].append((run, self._plan.run_view(run, tensor)))
        for place, found in values.items():
            self._targets[place].fill(partial(_copy, found))

    def close(self, error: BaseException | None) -> None:
        self._open.close()
        release(self.units)


def _copy(values: Sequence[tuple[Run, Tensor]], held: Tensor) -> None:
    for run, value in values:
        held[run.start : run.start + run.box.numel].view(run.box.sizes).copy_(value)


@during("fsdp.load_stream()")
def load_stream(model: nn.Module, source: Source | Receiver | None, *, strict: bool = True) -> Any:
    """Collective. Load weights that another process sends, for example a training with a different number of ranks.

    Each rank copies its ranges of each bucket to its shards with `Tensor.copy_`, which casts values. Units are not
    unsharded. A rank holds at most two buckets.

    Args:
        model: a wrapped model, a model that contains units, or a plain model.
        source: an `Update`, or a `Receiver` whose next update is loaded. Either the first rank passes a source and the
            other ranks pass None, so that the first rank broadcasts each bucket; or every rank passes a source of the
            same weights.
        strict: If True, raise an error for parameters of the model that the stream does not contain. Names that the
            model does not have always raise an error.

    Returns:
        torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

    Raises:
        RuntimeError: if names or shapes differ, with all differences, before any tensor is changed; in a forward or
            backward, or inside `summon_full_params`; on every rank, with the reason, if another rank fails. Parameters
            may then be partly loaded.
        ConnectionError, ValueError: on the rank with the source, if the sender fails, or the source ends early.
        TypeError: for another kind of source.
        ValueError: if only some ranks pass a source, other than the first rank alone.
    """
    sink = ModelSink(model, strict=strict)
    ranks = all_ranks(sink.everyone, _WHAT)

    def begin() -> tuple[Source | None, WeightPlan | None]:
        found = source.next() if isinstance(source, Receiver) else source
        if found is not None and not (hasattr(found, "plan") and callable(getattr(found, "buckets", None))):
            raise TypeError(f"source must be an fsdp.weights.Update, a Receiver or None, got {found!r}")
        return found, None if found is None else replace(found.plan, rank=0)

    own, plans = told_by_all(ranks, "begin to receive weights", begin)
    plan, count = plans[0], sum(each is not None for each in plans)
    if plan is None or count not in (1, len(plans)):
        raise ValueError("source must be passed on the first rank only, or on every rank")
    if any(each is not None and (each.tensors, each.buckets) != (plan.tensors, plan.buckets) for each in plans):
        raise RuntimeError("the sources of the ranks have different plans. Every rank must receive the same weights")
    try:
        done_by_all([ranks], "load the weights", lambda: sink.open(plan))
        arriving = None if own is None else own.buckets()
        hosts = tuple(comm.on_host for comm in ranks)
        for number, nbytes in enumerate(plan.bucket_nbytes):
            bucket = done_by_all([ranks], f"receive bucket {number}", partial(_next_bucket, arriving, number, plan))
            if count < len(plans):
                bucket = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if bucket is None else bucket.cpu()
                bucket = sent_by_first(hosts, bucket)
            done_by_all([ranks], f"load bucket {number}", partial(sink.bucket, number, bucket))
        done_by_all([ranks], "complete the stream", partial(next, arriving or iter(()), None))
    except BaseException:
        if own is not None and callable(stop := getattr(own, "stop", None)):
            stop()
        raise
    finally:
        sink.close(None)
    return sink.found


def _next_bucket(arriving: Iterator[tuple[int, Tensor]] | None, number: int, plan: WeightPlan) -> Any:
    """Return the next bucket of this rank's source, or None without a source; raise ValueError after the end."""
    if arriving is None:
        return None
    for _, bucket in arriving:
        return bucket
    raise ValueError(
        f"the source has ended before bucket {number} of {len(plan.buckets)}: the model has only a part of the "
        "weights. Load a complete stream into it"
    )
