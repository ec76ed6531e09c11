"""`SafetensorsSink` writes files in the layout of Hugging Face's ``save_pretrained``; each rank writes its ranges."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from glob import escape, glob

import torch
from torch import Tensor

from fsdp.checkpoint.folder import MANIFEST, OURS, sync
from fsdp.checkpoint.safetensors import Entry, PlannedFile, create, named, store_at
from fsdp.checkpoint.safetensors import plan as planned_files
from fsdp.weights.plan import WeightPlan
from fsdp.weights.sinks import Sink

_PART = ".streaming-"  # begins the name of the folder that contains the files of an incomplete stream


class SafetensorsSink(Sink):
    """Writes safetensors files that ``from_pretrained`` can load, with an index if there are multiple files.

    Every rank creates this sink, and writes its own ranges of each bucket. All ranks need access to the folder. The
    files are written to a temporary folder in `folder`. After all ranks have written and synced the files, these
    replace the model's files; other files, such as a configuration, are kept. If the stream fails, the previous files
    are kept. The index of previous files with the same names is removed first, and the new index is moved last, so that
    old and new files are never loaded together.

    Tied parameters are stored under their first name.

    Args:
        folder: the folder, which is created if necessary.
        max_file_bytes: the maximum number of bytes of tensors in a file; None creates a single file.

    Raises:
        OSError: if this rank cannot write, or if the folder is a checkpoint of `fsdp.save`. The other ranks raise a
            RuntimeError that names the rank.
        TypeError, ValueError: for tensors that safetensors files cannot contain.
    """

    receives = "parts"

    def __init__(self, folder: str | os.PathLike[str], *, max_file_bytes: int | None = None) -> None:
        if max_file_bytes is not None and (type(max_file_bytes) is not int or max_file_bytes < 1):
            raise ValueError(f"max_file_bytes must be a positive number of bytes or None, got {max_file_bytes!r}")
        self._folder, self._most = os.path.realpath(folder), max_file_bytes
        self._fds: dict[str, int] = {}

    def open(self, plan: WeightPlan) -> None:
        self._plan, self._place = plan, os.path.join(self._folder, _PART + plan.stream)
        entries = [Entry(tensor.name, tensor.dtype, tensor.shape, form=tensor.form) for tensor in plan.tensors]
        self._files = planned_files(entries, "model", self._most)
        self._file_of: dict[str, PlannedFile] = {name: file for file in self._files for name in file.begins}
        if plan.rank == 0:
            if os.path.lexists(os.path.join(self._folder, MANIFEST)):
                raise FileExistsError(
                    f"{self._folder} is a checkpoint of fsdp.save, which could not be loaded with other files in it: "
                    "write the weights to another folder"
                )
            os.makedirs(self._folder, exist_ok=True)
            for left in glob(os.path.join(escape(self._folder), f"{_PART}*")):
                shutil.rmtree(left)  # created by a stream that was killed
            os.mkdir(self._place)
            for file in self._files:
                create(self._place, file)

    def bucket(self, number: int, tensor: Tensor) -> None:
        packed = tensor.cpu()
        for run in self._plan.runs(number, self._plan.parts[self._plan.rank]):
            planned = self._plan.tensors[run.piece.tensor]
            file, size = self._file_of[planned.name], planned.dtype.itemsize
            memory = self._plan.packed_view(run, packed).view(-1).view(torch.uint8).numpy().data
            box = run.box.moved((run.piece.first, *(0 for _ in planned.sizes[1:])))
            with named(self._path(file.name)):
                for start, stop in box.ranges(planned.sizes, 0, box.numel):
                    count = (stop - start) * size
                    store_at(self._fd(file.name), memory[:count], file.begins[planned.name] + start * size)
                    memory = memory[count:]
        if number == len(self._plan.buckets) - 1:
            for name, fd in self._fds.items():
                with named(self._path(name)):
                    os.fsync(fd)

    def _path(self, name: str) -> str:
        return os.path.join(self._place, name)

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            try:
                self._fds[name] = os.open(self._path(name), os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            except FileNotFoundError as error:
                error.strerror = "rank 0 has created this file, and this rank does not see it: use a shared file system"
                raise
        return self._fds[name]

    def close(self, error: BaseException | None) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
        if self._plan.rank:
            return
        try:
            if error is None:
                self._replace()
        finally:
            shutil.rmtree(self._place, ignore_errors=True)

    def _replace(self) -> None:
        """Move the new files to the folder, and remove the files of the previous weights with other names."""
        names = [file.name for file in self._files]
        if len(names) > 1 and any(os.path.exists(os.path.join(self._folder, name)) for name in names[:-1]):
            # If the process is killed below, the folder has no index, instead of an index of old and new files.
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, names[-1]))
            sync(self._folder)
        for name in names:
            os.replace(os.path.join(self._place, name), os.path.join(self._folder, name))
        for name in os.listdir(self._folder):
            if name.startswith("model") and OURS.fullmatch(name) and name not in names:
                os.unlink(os.path.join(self._folder, name))
        sync(self._folder)
