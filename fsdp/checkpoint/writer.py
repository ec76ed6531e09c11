"""Saving a checkpoint: all ranks agree on the contents and write them.

A save has two steps. `prepare` examines the model and plans the parts for each rank (`Plan`). `write` writes the
files, and renames the folder to the final path after all files are on disk. `write` does not use the model, only the
memory of the parts.

If ranks do not share a file system, ranks without access to the folder send their ranges to rank 0, which writes them.
They send single blocks sequentially, so no rank requires memory for more than one block (`Senders`).

A `Saver` copies the data to host memory, and a thread on each rank writes the copies during training. The threads use
separate process groups, so their messages cannot be confused with messages of the training.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp.checkpoint.checksums import BLOCK_BYTES, Fragment, fragment, merged, spans
from fsdp.checkpoint.folder import Destination, newest, numbered, rotate
from fsdp.checkpoint.folder import found as complete_at
from fsdp.checkpoint.generators import generator_states
from fsdp.checkpoint.json_values import encoded
from fsdp.checkpoint.manifest import TensorSet, manifest_of
from fsdp.checkpoint.model_tensors import (
    Target,
    all_ranks,
    entry_of,
    extra_states,
    handles_of,
    named_tensors,
    prepared,
    ready,
    written_here,
)
from fsdp.checkpoint.optim import Optimizers, common_state, kinds_to_save, state_entries
from fsdp.checkpoint.safetensors import SUFFIX, Entry, PlannedFile, opened_to_write, store_at, write_parts
from fsdp.distributed.collectives import during
from fsdp.distributed.communicator import CollectiveError, own_rank
from fsdp.distributed.consensus import (
    Ranks,
    done_by_all,
    from_everyone,
    number_among,
    require_same,
    size_of,
    told_by_all,
)
from fsdp.distributed.devices import HOST
from fsdp.engine.names import paths_in
from fsdp.engine.unit import Unit
from fsdp.layers.state_dict.full import buffers_in_own_precision
from fsdp.optim_utils.state import OwnKinds, options_as_text, require_same_options
from fsdp.state_dict_utils import StateDictStager

_WHAT = "save a checkpoint"
_SENT = "parts of a checkpoint"
# The begin and end of each range of a rank, in bytes of the tensor, by the tensor's name.
_Extents = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Plan:
    """The content of a checkpoint. Parts of entries, extra state, values and generators may differ between ranks."""

    sets: list[TensorSet]  # of the model and the optional optimizer
    optimizer_rest: Any  # other values of the optimizer's state; encoded, like the next three fields
    extra: dict[str, Any]  # extra state of modules, by name
    values: Any
    generators: Any  # the states of this rank's generators; None if they are not saved
    cast: dict[str, torch.dtype]  # the previous dtype of each parameter that is cast, by name


@dataclass(frozen=True)
class Saved:
    """A saved checkpoint.

    Attributes:
        path: the folder.
        nbytes: the size of the files with tensors, in bytes.
        cast: the previous dtype of each parameter saved in a different dtype, by name.
    """

    path: Path
    nbytes: int
    cast: dict[str, torch.dtype]


@dataclass(frozen=True)
class Place:
    """The destination of a checkpoint: a folder, or, with a step, a subfolder of a folder with multiple checkpoints."""

    path: str | os.PathLike[str]
    step: int | None = None
    keep: int | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError for an invalid path, step or number of checkpoints."""
        _require_number("step", self.step)
        _require_number("keep", self.keep)
        if not os.fspath(self.path):
            raise ValueError("path is empty: a checkpoint is a folder")
        if os.fsdecode(self.path).endswith(".safetensors"):
            raise ValueError(
                f"path is the name of a file, {os.fspath(self.path)!r}: a checkpoint is a folder, in which the save "
                "creates model.safetensors. Pass the name of the folder"
            )
        if self.step is not None and self.step < 0:
            raise ValueError(f"step must be 0 or more, got {self.step}")
        if self.keep is not None and (self.step is None or self.keep < 1):
            raise ValueError(f"keep={self.keep} must be positive, and requires step")

    @property
    def folder(self) -> str:
        return os.fspath(self.path) if self.step is None else numbered(self.path, self.step)

    def require_replaceable(self) -> None:
        """Raise ValueError if the current folder of the process is in the folder, which the checkpoint replaces."""
        folder, here = map(os.path.realpath, (self.folder, os.getcwd()))
        if os.path.commonpath((folder, here)) == folder:
            raise ValueError(
                f"cannot save to {os.fspath(self.path)!r}: the checkpoint would replace the current folder, {here}. "
                "Pass a folder inside it, such as 'checkpoint'"
            )

    @property
    def what_is_there(self) -> str:
        """Return a description of the files visible to this rank after an incomplete save."""
        if self.step is not None:
            last = newest(self.path)
            return f"The newest complete checkpoint is {last}." if last else f"{self.path} has no complete checkpoint."
        if complete_at(self.folder) is None:
            return f"{self.folder} is not a complete checkpoint."
        return f"{self.folder} is a complete checkpoint: the previous one, or this one if all ranks had written it."


@during("fsdp.save()")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    values: Any = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | None = None,
    generators: bool = True,
) -> Saved:
    """Collective. Save a model, and optionally its optimizer, as files with unsharded tensors under their FQNs.

    Every rank writes the ranges of its own shards directly from memory into the final files. There is no all-gather,
    and values that are cast or on an accelerator require only a few blocks of 4 MiB. The first replica writes
    replicated shards, and rank 0 writes unsharded tensors (buffers, ignored parameters). Tied parameters are written
    under the first of their names. Ranks without access to rank 0's folder send their ranges to rank 0, in single
    blocks.

    The files are written to a temporary folder and synced to the disk, and the folder is then renamed to `path`. If
    the save fails or is killed at any moment, the previous checkpoint is kept. User files in the previous checkpoint
    are copied to the new checkpoint.

    Args:
        path: the folder, with the same name on all ranks. An existing checkpoint or an empty folder is replaced.
        model: a wrapped model, a model with units, or a plain model. A plain model must be equal on all ranks
            of the default process group.
        optimizer: an optimizer of the model's parameters, or a list of optimizers with different parameters; by
            default, no optimizer is saved. Elementwise state is saved as tensors with the parameter's shape, numbers
            and parameter groups by the parameters' names. State of other shapes raises an error.
        step: the training step. If given, the folder is the subfolder ``step-00000100`` of `path`; see `newest`.
        keep: with `step`, the number of checkpoints to keep, by default all. After this checkpoint is complete, the
            checkpoints with the lowest steps are removed.
        values: additional values of rank 0: None, numbers, strings, bytes, lists, tuples, dicts, and tensors up to 1
            MiB each.
        dtype: the dtype of floating-point parameters, by default their dtype in the model. Buffers keep their dtype.
        max_file_bytes: the maximum number of bytes of tensors in a file, as Hugging Face divides models
            (``model-00001-of-00003.safetensors`` and an index). By default, the model is a single file, and the
            optimizer another.
        generators: if True, save the states of every rank's random number generators (Python's, NumPy's, torch's).

    Returns:
        The path of the checkpoint, its size, and the cast parameters.

    Raises:
        RuntimeError: during a forward or backward, or inside `summon_full_params`; if parameters have no values; if
            the ranks of a unit differ from the ranks of the outermost unit; on every rank, with the reason, if another
            rank fails, or if ranks have different paths, steps or settings.
        OSError: if this rank cannot write: the disk is full, the folder read-only, the path a file or no checkpoint.
        TypeError: for `values` of other types, with their position; for arguments that are not a model, optimizer,
            number or float dtype.
        ValueError: for a `path` that ends with ``.safetensors``; for an optimizer of other parameters, or two
            optimizers of the same parameter; for state that is neither a number nor of the parameter's shape (the
            message names parameter, key and shape); if other ranks of this job have saved a different model to `path`,
            for example another stage of a pipeline.
        NotImplementedError: for parameters on two overlapping meshes neither of which contains the other (the message
            names two parameters and their ranks); for `Partial` placements.
    """
    place = Place(path, step, keep)
    found, ranks, units = prepare(place, model, optimizer, values, dtype, max_file_bytes, generators)
    try:
        return write(place, found, ranks)
    finally:
        release(units)


def prepare(
    place: Place,
    model: nn.Module,
    optimizer: Any,
    values: Any,
    dtype: torch.dtype | None,
    max_file_bytes: int | None,
    generators: bool,
) -> tuple[Plan, Ranks, list[Unit]]:
    """Collective. Return the plan, the ranks that write, and the units whose memory the plan uses."""
    units, ranks = ready(model, _WHAT)

    def settings() -> tuple[None, tuple[str, str]]:
        _check_arguments(place, dtype, max_file_bytes)
        given = "no optimizer" if optimizer is None else "an optimizer"
        text = f"{place.folder}, keep={place.keep}, generators={bool(generators)}, {given}"
        return None, (text, text)

    require_same(ranks, "places or settings for a checkpoint", told_by_all(ranks, _WHAT, settings)[1])

    def begin() -> tuple[dict[str, Target], dict[str, nn.Module]]:
        place.require_replaceable()
        paths_of = paths_in(model)
        return named_tensors(paths_of, units), extra_states(paths_of)

    tensors, modules = done_by_all([ranks], "find its part of a checkpoint", begin)
    written = written_here(tensors, ranks, _WHAT)
    state_to_save = None if optimizer is None else _optimizer_state(optimizer, tensors, written, ranks)

    def look() -> tuple[Plan, tuple[str, str]]:
        with buffers_in_own_precision(units):
            entries = [entry_of(name, target, dtype, written) for name, target in tensors.items()]
        cast = {entry.name: tensors[entry.name].dtype for entry in entries if entry.dtype != tensors[entry.name].dtype}
        states = encoded(generator_states(), "generators") if generators else None
        extra = {name: encoded(module.get_extra_state(), name) for name, module in modules.items()}
        sets = [TensorSet.planned("model", entries, max_file_bytes)]
        rest = None
        if state_to_save is not None:
            state, rest = state_to_save()
            sets.append(TensorSet.planned("optimizer", state, max_file_bytes))
        content = [json.dumps(rest).encode(), *(file.head for each in sets for file in each.files)]
        digest = hashlib.sha256(b"".join(content)).hexdigest()
        shown = f"{sum(len(each.entries) for each in sets)} tensors ({digest[:8]})"
        return Plan(sets, rest, extra, encoded(values, "values"), states, cast), (digest, shown)

    found, heard = told_by_all(ranks, "prepare its part of a checkpoint", look)
    require_same(ranks, "tensors or settings to save", heard)
    return found, ranks, units


def _check_arguments(place: Place, dtype: Any, max_file_bytes: Any) -> None:
    place.check()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    _require_number("max_file_bytes", max_file_bytes)
    if max_file_bytes is not None and max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be a positive number of bytes or None, got {max_file_bytes}")


def _optimizer_state(
    optimizer: Any, tensors: dict[str, Target], written: Collection[str], ranks: Ranks
) -> Callable[[], tuple[list[Entry], Any]]:
    """Collective. Return a function for the tensors of an optimizer's state and the other values for the manifest."""

    def look() -> tuple[Optimizers, tuple[list[OwnKinds], dict[str, str]]]:
        optimizers = Optimizers(optimizer, tensors)
        return optimizers, (kinds_to_save(optimizers), options_as_text(optimizers.param_groups))

    optimizers, heard = told_by_all(ranks, "prepare its optimizer's state", look)
    kinds = common_state([own for own, _ in heard])
    require_same_options(ranks, [options for _, options in heard])
    return partial(state_entries, optimizers, kinds, written)


def _require_number(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number or None, got {value!r}")


def release(units: Sequence[Unit]) -> None:
    """Notify the storages that their shards were read and are not needed soon."""
    for handle in handles_of(units):
        handle.storage.release()


def write(place: Place, found: Plan, ranks: Ranks) -> Saved:
    """Collective. Write a checkpoint to its destination. After an error, the previous checkpoint is kept."""
    destination = Destination(place.folder)
    is_first = number_among(ranks) == 0

    def on_first(what: str, job: Callable[[], None]) -> None:
        done_by_all([ranks], what, job if is_first else lambda: None)

    def begin() -> tuple[None, bytes]:
        if not is_first:  # a network file system would cache that the folder does not exist
            return None, b""
        _refuse_other_model(destination.path)
        destination.begin()
        for each in found.sets:
            each.create(destination.folder)
        return None, destination.token

    try:
        _, tokens = told_by_all(ranks, f"make {destination.folder}", begin)
        is_seen = is_first or destination.token == tokens[0]  # tested, not assumed
        heard = _written(destination, found, ranks, is_seen=is_seen)
        on_first(f"complete {destination.path}", lambda: destination.commit(_manifest(found, ranks, heard)))
        if place.keep is not None and place.step is not None:
            on_first(f"remove old checkpoints from {place.path}", partial(rotate, place.path, place.keep, place.step))
    except BaseException as error:
        if is_first:
            destination.abandon()
        if isinstance(error, CollectiveError):  # only the first rank knows the outcome, and it may be dead
            told, *rest = str(error).splitlines()
            error.args = ("\n".join([told, place.what_is_there, *rest]),)
        raise
    nbytes = sum(file.nbytes for each in found.sets for file in each.files if file.name.endswith(SUFFIX))
    return Saved(Path(destination.path), nbytes, found.cast)


def _refuse_other_model(path: str) -> None:
    """Record in the job's store that this rank, the first of its model's ranks, saves to a path.

    Raises:
        ValueError: if the first rank of another model in this job has saved a checkpoint to the path.
    """
    if not dist.is_initialized():
        return
    key, mine = f"fsdp.save {os.fsencode(path)!r}", str(own_rank())  # the store supports only UTF-8
    try:
        # The store of all ranks, by a separate connection. A thread that waits for a key blocks its connection, and may
        # wait for ranks that wait for this save.
        store = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        first = store.compare_set(key, "", mine).decode()
    except (AttributeError, RuntimeError):  # simulated ranks have no store
        return
    if first == mine:
        return
    if complete_at(path) is None:  # the other checkpoint was moved, or never completed
        store.set(key, mine)
    else:
        raise ValueError(
            f"{path} is a checkpoint of another model, which rank {first} and the ranks of its group saved in this "
            f"job. Rank {mine} would replace it. Save every model, and every stage of a pipeline, to a separate folder"
        )


# For each rank: the checksums of its ranges in each set, and its global rank with the states of its generators.
_Written = list[tuple[list[list[Fragment]], tuple[int, Any]]]


def _written(destination: Destination, found: Plan, ranks: Ranks, *, is_seen: bool) -> _Written:
    """Collective. Write all ranges to the files; a rank without access to the folder sends its ranges."""
    unseen = [] if is_seen else [entry for each in found.sets for entry in each.entries]
    senders = Senders(ranks, unseen, destination.folder)

    def write_own() -> tuple[None, tuple[list[list[Fragment]], tuple[int, Any]]]:
        fragments: list[list[Fragment]] = [[] for _ in found.sets]
        own = [each.own for each in found.sets]
        files = [(number, file) for number, each in enumerate(found.sets) for file in each.files] if is_seen else []
        # Ranks begin with different files, because most file systems permit a single writer of a file at a time.
        first = number_among(ranks) * len(files) // size_of(ranks)
        for number, file in files[first:] + files[:first]:
            fragments[number] += write_parts(destination.folder, [file], own[number])
        return None, (fragments, (own_rank(), found.generators))

    _, heard = told_by_all(ranks, f"write to {destination.folder}", write_own)
    for number, each in enumerate(found.sets if senders.ranks else ()):
        send = partial(senders.send, destination, each.files, each.entries)
        _, sent = told_by_all(ranks, f"write to {destination.folder}", send)
        for (fragments, _), more in zip(heard, sent, strict=True):
            fragments[number] += more
    return heard


def _manifest(found: Plan, ranks: Ranks, heard: _Written) -> bytes:
    sets = [
        each.written(one for fragments, _ in heard for one in fragments[number])
        for number, each in enumerate(found.sets)
    ]
    of_ranks = sorted((each for _, each in heard), key=itemgetter(0))  # the order in `heard` depends on process groups
    generators = None if found.generators is None else [states for _, states in of_ranks]
    rest = {"optimizer_rest": found.optimizer_rest, "extra": found.extra, "values": found.values}
    return manifest_of(size_of(ranks), sets, generators=generators, **rest)


class Senders:
    """The ranks with data to write but without access to the folder. The constructor is collective."""

    def __init__(self, ranks: Ranks, entries: Sequence[Entry], folder: str) -> None:
        self._comm = ranks[0].on_host.for_device(HOST)
        self._own = number_among(ranks)
        extents = {entry.name: entry.extents for entry in entries if entry.values is not None}
        heard = from_everyone(ranks, extents)
        self.ranks: dict[int, _Extents] = {rank: extents for rank, extents in enumerate(heard) if extents}
        for rank in self.ranks:
            if rank >= self._comm.world_size:
                raise RuntimeError(
                    f"rank {rank} does not see {folder}, which rank 0 has created, and cannot write its part: save to "
                    "a file system that all ranks share"
                )

    def send(
        self, destination: Destination, files: Sequence[PlannedFile], entries: Sequence[Entry]
    ) -> tuple[None, list[Fragment]]:
        """Collective. Send the data of all senders to rank 0, which writes it. Return this rank's checksums second."""
        sent: list[Fragment] = []
        problem: Exception | None = None
        data = chain.from_iterable(entry.chunks() for entry in entries)
        for name, begin, end in self._chunks(self._own, {entry.name for entry in entries}):
            if problem is None:
                try:
                    _, memory = next(data)
                    sent.append(fragment(name, begin, memory))
                    chunk = torch.frombuffer(memory, dtype=torch.uint8)
                except Exception as error:  # noqa: BLE001 (rank 0 waits for all chunks: send substitutes)
                    problem = error
            if problem is not None:
                chunk = torch.empty(end - begin, dtype=torch.uint8, device=HOST)
            self._comm.exchange({}, {0: [chunk]}, _SENT, "checkpoint").wait()
            self._comm.settle()  # the memory is reused for the next chunk
        if problem is not None:
            raise problem
        if self._own == 0:
            self._receive(destination.folder, files)
        return None, merged(sent)

    def _receive(self, folder: str, files: Sequence[PlannedFile]) -> None:
        """Write the received data, or discard it after an error, because the senders cannot detect the error."""
        problem: OSError | None = None
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=HOST)
        with ExitStack() as stack:
            places = {name: (number, file.begins[name]) for number, file in enumerate(files) for name in file.begins}
            fds: list[int] = []
            try:
                fds += [stack.enter_context(opened_to_write(folder, file)) for file in files]
            except OSError as error:
                problem = error
            chunks = ((rank, *chunk) for rank in self.ranks for chunk in self._chunks(rank, places.keys()))
            for rank, name, begin, end in chunks:
                chunk = buffer[: end - begin]
                self._comm.exchange({rank: [chunk]}, {}, _SENT, "checkpoint").wait()
                number, first = places[name]
                if problem is None:
                    try:
                        store_at(fds[number], chunk.numpy().data, first + begin)
                    except OSError as error:
                        error.filename = error.filename or os.path.join(folder, files[number].name)
                        problem = error
            if problem is not None:
                raise problem

    def _chunks(self, rank: int, names: Collection[str]) -> Iterator[tuple[str, int, int]]:
        """Yield the chunks of a rank in the order of sending: the name of the tensor, and the range of bytes."""
        for name, extents in self.ranks.get(rank, {}).items():
            for extent in extents if name in names else ():
                yield from ((name, *span) for span in spans(*extent))


# The last thread of each rank. Threads of all savers use the same process groups, so a thread writes after the thread
# before it, in the order in which all ranks have called `save`.
_writers: dict[int, threading.Thread] = {}


@during("fsdp.checkpoint.Saver.save()")
def _write_for(job: Future[Saved], before: threading.Thread | None, place: Place, found: Plan, ranks: Ranks) -> None:
    if before is not None:
        before.join()
    try:
        job.set_result(write(place, found, ranks))
    except BaseException as error:  # noqa: BLE001 (the job raises it)
        job.set_exception(error)


def _report(jobs: list[Future[Saved]]) -> None:
    """Print the exception of the last job, when it ends, because no later call can report it."""
    for job in jobs:  # without waiting: the garbage collector may call this in the thread of the job
        job.add_done_callback(_print_error)


def _print_error(job: Future[Saved]) -> None:
    error = job.exception()
    if error is not None:
        print("fsdp: a checkpoint could not be saved:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)


class Saver(AbstractContextManager["Saver"]):
    """Saves checkpoints in the background: training waits only for a copy to host memory.

    Each rank copies the data to write: shards of the model, and its part of the optimizer's state. The memory is reused
    for the next checkpoint.

    An error in the background is raised on every rank, by the next `save` or by `wait`. If neither is called, the
    error is printed. The interpreter does not exit before a checkpoint is written. However,
    ``torch.distributed.destroy_process_group()`` must be called only after the checkpoint is complete: use the saver
    in a ``with`` block, or call `wait` first.

    Args:
        when_busy: the behaviour of `save` while any rank is still writing the last checkpoint: "wait" until it is
            complete, or "raise" a RuntimeError on every rank.
        pin_memory, max_bytes: options of the copies, see `fsdp.StateDictStager`.

    Raises:
        ValueError: for an unknown `when_busy`, and as in `StateDictStager`.
    """

    def __init__(
        self, *, when_busy: Literal["wait", "raise"] = "wait", pin_memory: bool = False, max_bytes: int | None = None
    ) -> None:
        if when_busy not in ("wait", "raise"):
            raise ValueError(f'when_busy must be "wait" or "raise", got {when_busy!r}')
        self._waits = when_busy == "wait"
        self._stager = StateDictStager(pin_memory, max_bytes=max_bytes)
        self._jobs: list[Future[Saved]] = []  # the last job, until its outcome was reported
        self._saved: Saved | None = None  # the result of the last job
        weakref.finalize(self, _report, self._jobs)

    @property
    def is_busy(self) -> bool:
        """Return whether this rank is still writing."""
        return not all(job.done() for job in self._jobs)

    @during("fsdp.checkpoint.Saver.save()")
    def save(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Any = None,
        *,
        step: int | None = None,
        keep: int | None = None,
        values: Any = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int | None = None,
        generators: bool = True,
    ) -> None:
        """Collective. Save as `fsdp.save`, but return as soon as model and optimizer may be changed again.

        Raises:
            RuntimeError: if the last checkpoint is still being written, and `when_busy` is "raise".
            Exception: the exception of the last save. In this case, this save does not begin.
            MemoryError: if the copies need more than `max_bytes`.
            Also all exceptions that `fsdp.save` raises before it writes.
        """
        what = "save a checkpoint in the background"
        ranks = all_ranks(prepared(model, what)[1], what)
        done_by_all([ranks], what, self._require_room)
        done_by_all([ranks], "save the last checkpoint", self._finish)
        place = Place(path, step, keep)
        found, ranks, units = prepare(place, model, optimizer, values, dtype, max_file_bytes, generators)
        found = done_by_all([ranks], "copy its part of a checkpoint", lambda: self._copied(found))
        release(units)
        place = replace(place, path=os.path.abspath(place.path))  # the current folder may change later
        job: Future[Saved] = Future()
        work = job, _writers.get(own_rank()), place, found, tuple(comm.apart() for comm in ranks)
        # Not a daemon: the interpreter waits for this thread at exit.
        writer = threading.Thread(target=_write_for, name=f"saves {place.folder}", args=work)
        writer.start()
        _writers[own_rank()] = writer
        self._jobs.append(job)
        self._saved = None

    def wait(self) -> Saved | None:
        """Block until the last checkpoint is complete, and return it. Not collective.

        Returns:
            The result of `fsdp.save`; None if no checkpoint was saved.

        Raises:
            Exception: the exception of the save, once.
        """
        self._finish()
        return self._saved

    def _require_room(self) -> None:
        if self.is_busy and not self._waits:
            raise RuntimeError(
                'the last checkpoint is still being written. Save less often, or with when_busy="wait", or wait()'
            )

    def _finish(self) -> None:
        if self._jobs:
            self._jobs[0].exception()  # waits; an interrupt of the wait keeps the job
            self._saved = self._jobs.pop().result()

    def _copied(self, found: Plan) -> Plan:
        values = [entry.values for each in found.sets for entry in each.entries if entry.values is not None]
        copies = iter(self._stager.stage(values))

        def copied(entry: Entry) -> Entry:
            return entry if entry.values is None else replace(entry, values=next(copies))

        sets = [TensorSet(each.stem, [copied(entry) for entry in each.entries], each.files) for each in found.sets]
        return replace(found, sets=sets)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._finish()
        except Exception:
            if error is None:
                raise
            print("fsdp: besides, a checkpoint could not be saved:", file=sys.stderr)
            traceback.print_exc()  # the exception of the block propagates
        finally:
            self._stager.close()
