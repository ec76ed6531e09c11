"""Where ranks do not share a file system, those that do not see the folder send their parts to the first, who writes.

One block at a time, from one rank after the other, so that nobody needs memory for more.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import BLOCK_BYTES, Fragment, fragment, spans
from fsdp.checkpoint.folder import Destination
from fsdp.checkpoint.safetensors_writer import Entry, PlannedFile, chunks_of, write_at, written
from fsdp.distributed.consensus import Ranks, from_everyone, number_among

_WHAT = "parts of a checkpoint"
# By the name of a tensor, where the parts of one rank begin and end, in bytes of the tensor.
_Extents = dict[str, list[tuple[int, int]]]


def sees_folder(destination: Destination, ranks: Ranks) -> bool:
    """Collective. Whether this rank sees the folder that the first one has made, which is tried and not assumed."""
    token = destination.token
    return from_everyone(ranks, token)[0] == token


class Senders:
    """Collective. The ranks that do not see the folder and have something to write.

    Args:
        ranks: all.
        entries: what this rank has to send.
    """

    def __init__(self, ranks: Ranks, entries: Sequence[Entry]) -> None:
        self._comm = ranks[0].for_device(ranks[0].talk_device)
        self._own = number_among(ranks)
        heard = [pickle.loads(each) for each in from_everyone(ranks, pickle.dumps(_extents(entries)))]
        self.ranks: dict[int, _Extents] = {rank: extents for rank, extents in enumerate(heard) if extents}

    def require_way(self, folder: str) -> None:
        """Raise RuntimeError, on every rank, if one of them cannot reach the first: it is in another replica."""
        for rank in self.ranks:
            if rank >= self._comm.world_size:
                raise RuntimeError(
                    f"rank {rank} does not see {folder}, which rank 0 has made, and cannot send its part there: "
                    "save to a file system that all ranks share"
                )

    def send(self, destination: Destination, files: Sequence[PlannedFile], entries: Sequence[Entry]) -> list[Fragment]:
        """Have the first rank write the parts of all senders. To be called by all ranks.

        Returns:
            The checksums of what this rank has sent.
        """
        if self._own in self.ranks:
            return [self._sent(entry.name, begin, memory) for entry in entries for begin, memory in chunks_of(entry)]
        if self._own == 0:
            self._receive(destination.folder, files)
        return []

    def _sent(self, name: str, begin: int, memory: memoryview) -> Fragment:
        chunk = torch.frombuffer(memory, dtype=torch.uint8).to(self._comm.talk_device)
        self._comm.exchange({}, {0: [chunk]}, _WHAT, "checkpoint").wait()
        self._comm.settle()  # the memory is used for the next one
        return fragment(name, begin, memory)

    def _receive(self, folder: str, files: Sequence[PlannedFile]) -> None:
        """Write what comes, or drop it after the first error, since the others cannot know of that."""
        problem: OSError | None = None
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=self._comm.talk_device)
        with ExitStack() as stack:
            places = {name: (number, file.begins[name]) for number, file in enumerate(files) for name in file.begins}
            fds = [stack.enter_context(written(folder, file)) for file in files]
            for rank, name, begin, end in self._chunks(places.keys()):
                chunk = buffer[: end - begin]
                self._comm.exchange({rank: [chunk]}, {}, _WHAT, "checkpoint").wait()
                number, first = places[name]
                if problem is None:
                    try:
                        write_at(fds[number], _memory(chunk), first + begin)
                    except OSError as error:
                        error.filename = error.filename or os.path.join(folder, files[number].name)
                        problem = error
            if problem is not None:
                raise problem

    def _chunks(self, names: Collection[str]) -> Iterator[tuple[int, str, int, int]]:
        """What comes, in its order: the rank, the tensor, and which bytes of it."""
        for rank, extents in self.ranks.items():
            for name, parts in extents.items():
                if name in names:
                    for begin, end in parts:
                        for start, stop in spans(begin, end):
                            yield rank, name, start, stop


def _extents(entries: Sequence[Entry]) -> _Extents:
    return {
        entry.name: [
            (part.start * entry.dtype.itemsize, (part.start + part.values.numel()) * entry.dtype.itemsize)
            for part in entry.parts
        ]
        for entry in entries
        if entry.parts
    }


def _memory(chunk: Tensor) -> memoryview:
    return chunk.cpu().numpy().data
