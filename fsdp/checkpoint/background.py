"""Saving checkpoints while training goes on: from copies in host memory, by a thread on each rank.

The threads talk to each other over groups of their own, so that their messages never meet those of training.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from fsdp.checkpoint.manifest import TensorSet
from fsdp.checkpoint.model_tensors import all_ranks, prepared
from fsdp.checkpoint.safetensors import Entry, Part
from fsdp.checkpoint.writer import Place, Plan, Saved, prepare, release, write
from fsdp.distributed.collectives import during
from fsdp.distributed.consensus import Ranks, done_by_all
from fsdp.state_dict_utils import StateDictStager

_WHAT = "save a checkpoint in the background"


class _Job:
    """One checkpoint that is being written. What became of it is told once."""

    def __init__(self, place: Place, found: Plan, ranks: Ranks) -> None:
        self._work: tuple[Place, Plan, Ranks] | None = (place, found, ranks)
        self._error: BaseException | None = None
        self.saved: Saved | None = None
        self._thread = threading.Thread(target=self._run, name=f"saves {place.folder}")
        self._thread.start()  # which the interpreter waits for at its end

    @during("fsdp.checkpoint.Saver.save()")
    def _run(self) -> None:
        try:
            if self._work is not None:
                self.saved = write(*self._work)
        except BaseException as error:  # noqa: BLE001 (it is raised by whoever asks)
            self._error = error
        finally:
            self._work = None  # the copies can be written over

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        """Wait for it; raise what it raised, unless that was told before."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def report(self) -> None:
        """Print what it raised, since nobody will ask any more."""
        self._thread.join()
        if self._error is not None:
            print("fsdp: a checkpoint could not be saved:", file=sys.stderr)
            traceback.print_exception(self._error)


def _report(jobs: list[_Job]) -> None:
    for job in jobs:
        job.report()


class Saver:
    """Saves checkpoints in the background: training waits for a copy to host memory only.

    What is copied is what this rank is to write: its shards, and its part of the optimizer's state. The memory is used
    again for the next checkpoint.

    An error in the background is raised on every rank, by the next `save` or by `wait`; what nobody asked for is
    printed in the end. The interpreter does not exit before a checkpoint is written, but
    ``torch.distributed.destroy_process_group()`` must not be called before: use the saver in a ``with`` block, or call
    `wait`.

    Args:
        when_busy: what `save` does while the last checkpoint is still being written on any rank: "wait" for it, or
            "raise" a RuntimeError on every rank.
        pin_memory, max_bytes: of the copies, see `fsdp.StateDictStager`.

    Raises:
        ValueError: for another `when_busy`; as `StateDictStager`.
    """

    def __init__(
        self, *, when_busy: Literal["wait", "raise"] = "wait", pin_memory: bool = False, max_bytes: int | None = None
    ) -> None:
        if when_busy not in ("wait", "raise"):
            raise ValueError(f'when_busy must be "wait" or "raise", got {when_busy!r}')
        self._waits = when_busy == "wait"
        self._stager = StateDictStager(pin_memory, max_bytes=max_bytes)
        self._jobs: list[_Job] = []  # the last one
        weakref.finalize(self, _report, self._jobs)

    @property
    def _job(self) -> _Job | None:
        return self._jobs[0] if self._jobs else None

    @property
    def is_busy(self) -> bool:
        """Return whether this rank is still writing."""
        return self._job is not None and self._job.is_running

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
        """Collective. Save as `fsdp.save`, but return when model and optimizer may be changed again.

        Raises:
            RuntimeError: if the last checkpoint is still being written, and `when_busy` is "raise".
            Exception: what the last one has raised; this one is not begun then.
            MemoryError: if the copies need more than `max_bytes`.
            Besides, what `fsdp.save` raises before it writes.
        """
        place = Place(path, step, keep)
        ranks = all_ranks(prepared(model, _WHAT)[1])
        done_by_all([ranks], _WHAT, self._require_room)
        done_by_all([ranks], "save the last checkpoint", self._finish)
        found, ranks, units = prepare(
            place, model, optimizer, values, dtype=dtype, max_file_bytes=max_file_bytes, generators=generators
        )
        found = done_by_all([ranks], "copy its part of a checkpoint", lambda: self._copied(found))
        release(units)
        self._jobs[:] = [_Job(place, found, tuple(comm.apart() for comm in ranks))]

    def wait(self) -> Saved | None:
        """Block until the last checkpoint is there, and say where. On each rank for itself.

        Returns:
            What `fsdp.save` returns; None if nothing was saved.

        Raises:
            Exception: what the save has raised, once.
        """
        self._finish()
        return None if self._job is None else self._job.saved

    def _require_room(self) -> None:
        if self.is_busy and not self._waits:
            raise RuntimeError(
                'the last checkpoint is still being written. Save less often, or with when_busy="wait", or wait()'
            )

    def _finish(self) -> None:
        if self._job is not None:
            self._job.finish()

    def _copied(self, found: Plan) -> Plan:
        """Return the same with copies of what this rank is to write."""
        values = [part.values for each in found.sets for entry in each.entries for part in entry.parts]
        copies = iter(self._stager.stage(values))

        def copied(entry: Entry) -> Entry:
            return replace(entry, parts=[Part(part.start, next(copies)) for part in entry.parts])

        sets = [TensorSet(each.stem, [copied(entry) for entry in each.entries], each.files) for each in found.sets]
        return replace(found, sets=sets)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._finish()
        except Exception:
            if error is None:
                raise
            print("fsdp: besides, a checkpoint could not be saved:", file=sys.stderr)
            traceback.print_exc()  # and let the error pass that the block was left with
        finally:
            self._stager.close()
