"""Checkpoint folders: written under a temporary name, renamed, found, and removed safely.

While ``run`` is saved, its files are in ``run.saving``. A folder is a checkpoint if it contains the manifest
``checkpoint.json``, which is written after all other files are on disk. Then an existing ``run`` is renamed to
``run.replaced``, ``run.saving`` to ``run``, and ``run.replaced`` is removed. If a process is killed between any two of
these steps, at least one of the three folders is complete, and `found` returns it.

During a save, rank 0 holds a lock on ``run.saving.lock``, which the system releases when the process exits for any
reason. The lock distinguishes a running save from a killed save: the folders of a running save are not changed, and
the next save cleans up the files of a killed save. On a file system without locks (NFS without its lock service), the
save that begins last uses the folder, and the earlier save raises an error before it completes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "checkpoint.json"
_PART = f"{MANIFEST}.part"  # the manifest while it is written
SAVING, REPLACED, _LOCK = ".saving", ".replaced", ".saving.lock"
_MARKER = "not-a-checkpoint"  # in an incomplete folder of this library, during saving or removal
# The names of all files in a checkpoint. The names of tensor files begin with "model" or "optimizer".
OURS = re.compile(r"(model|optimizer)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|checkpoint\.json(\.part)?|" + _MARKER)
_NUMBERED = re.compile(rf"step-(\d+)({'|'.join(map(re.escape, (SAVING, REPLACED, _LOCK)))})?")


def place_of(path: str | os.PathLike[str] | None) -> str:
    """Return a path as a string; FileNotFoundError for None, which `newest` returns."""
    if path is None:
        raise FileNotFoundError(
            "there is no checkpoint at None, which fsdp.checkpoint.newest(folder) returns if there is no complete "
            "checkpoint of fsdp.save(folder, ..., step=...). Begin at the first step instead, or check the folder."
        )
    return os.fspath(path)


def found(path: str | os.PathLike[str]) -> str | None:
    """Return the folder of the complete checkpoint at a path, possibly a killed save's temporary folder, or None."""
    place = os.path.realpath(path)
    # The path again at the end, because a running save may have renamed its folder to the path meanwhile.
    folders = place, place + SAVING, place + REPLACED, place
    return next((folder for folder in folders if _is_complete(folder)), None)


def is_left_behind(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is incomplete because a save or a removal was killed."""
    return os.path.lexists(os.path.join(folder, _MARKER)) and not _is_complete(os.fspath(folder))


def numbered(folder: str | os.PathLike[str], step: int) -> str:
    return os.path.join(os.fspath(folder), f"step-{step:08d}")


def step_of(folder: str | os.PathLike[str]) -> int | None:
    """Return the step of a checkpoint from its folder's name; None for a checkpoint without a step."""
    match = _NUMBERED.fullmatch(os.path.basename(os.path.realpath(folder)))
    return None if match is None else int(match[1])


def steps(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the complete checkpoints in a folder of numbered checkpoints, by their steps, the lowest first.

    Files of a killed save are ignored.
    """
    places = {step: numbered(folder, step) for step in sorted(_steps_named_in(folder))}
    return {step: Path(place) for step, place in places.items() if found(place) is not None}


def _steps_named_in(folder: str | os.PathLike[str]) -> set[int]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match is not None}


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint with the highest step in a folder of numbered checkpoints; None if there is none."""
    places = steps(folder)
    return places[max(places)] if places else None


def rotate(folder: str | os.PathLike[str], keep: int, step: int) -> None:
    """Remove all checkpoints in a folder except the `keep` highest steps and `step`.

    Incomplete folders of lower steps are also removed. Folders of running saves are kept.
    """
    kept = {*sorted(steps(folder))[-keep:], step}
    for number in _steps_named_in(folder) - kept:
        if number < max(kept):
            place = numbered(folder, number)
            lock = _Lock(os.path.realpath(place))
            if lock.take():
                try:
                    for each in (place + SAVING, place + REPLACED, place):
                        if _is_ours(each):
                            remove(each)
                finally:
                    lock.release()


class _Lock:
    """A lock on the path of a checkpoint for the process that saves or cleans up; the lock file names the process."""

    def __init__(self, place: str) -> None:
        self._path = place + _LOCK
        self._fd: int | None = None

    def take(self) -> bool:
        """Acquire the lock if the file system supports locks; return False if another process holds it."""
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            except OSError:
                pass  # a file system without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    self._fd = fd
                    with suppress(OSError):  # a full disk raises an error later
                        os.ftruncate(fd, 0)
                        os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    return True
            os.close(fd)  # the previous holder has removed the file meanwhile
        return True

    @property
    def holder(self) -> str:
        with suppress(OSError):
            return Path(self._path).read_bytes()[:200].decode(errors="replace") or "another process"
        return "another process"

    def release(self) -> None:
        if self._fd is None:
            return
        with suppress(OSError):
            os.unlink(self._path)
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough if the process was forked
        os.close(self._fd)
        self._fd = None


class Destination:
    """The destination of a save by a single process. An existing path must be a checkpoint."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        self.folder = self.path + SAVING  # the temporary folder for the new files
        self._token = b""  # identifies the folder that this save has created
        self._lock = _Lock(self.path)

    def begin(self) -> None:
        """Create the folder to write to, after cleaning up the files of killed saves."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if not self._lock.take():
            raise RuntimeError(
                f"another save to {self.path} is running, by {self._lock.holder}. Use a separate folder for "
                "each job, and restart a job only after all of its processes have ended"
            )
        self._put_in_order()
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise NotADirectoryError(f"{self.path} is a file: a checkpoint is a folder, and needs a separate path")
        if os.path.isdir(self.path) and os.listdir(self.path) and not _is_complete(self.path):
            raise FileExistsError(
                f"{self.path} contains files and is not a checkpoint: save to a new folder, or to an existing "
                "checkpoint"
            )
        os.makedirs(self.folder)
        self._token = uuid.uuid4().hex.encode()
        _write(os.path.join(self.folder, _MARKER), self._token)

    @property
    def token(self) -> bytes:
        """Return the token of the folder, equal for all processes with access to it; empty without a folder."""
        try:
            return Path(self.folder, _MARKER).read_bytes()
        except OSError:
            return b""

    def _put_in_order(self) -> None:
        if not os.path.lexists(self.path):
            left = found(self.path)
            if left is not None:
                os.rename(left, self.path)
        elif is_left_behind(self.path):
            remove(self.path)
        for folder in (self.folder, self.path + REPLACED):
            if os.path.lexists(folder):
                # Another save may have removed the marker.
                has_ours_alone = os.path.isdir(folder) and all(map(OURS.fullmatch, os.listdir(folder)))
                if not (_is_ours(folder) or has_ours_alone):
                    raise FileExistsError(f"{folder} is in the way, and was not created by a save: move it")
                remove(folder)

    def commit(self, manifest: bytes) -> None:
        """Rename the folder to its final path, after all files are on disk.

        If this fails, `abandon` restores the old checkpoint.
        """
        if not self._token or self.token != self._token:
            self._token = b""
            raise RuntimeError(
                f"{self.folder} was changed during this save: another process saves to the same place. Use a separate "
                "folder for each job, and restart a job only after all of its processes have ended"
            )
        for entry in os.scandir(self.path) if os.path.isdir(self.path) else ():
            if not OURS.fullmatch(entry.name):  # user files, such as a configuration or a tokenizer
                _copy_synced(entry.path, os.path.join(self.folder, entry.name))
        part = os.path.join(self.folder, _PART)
        _write(part, manifest)
        sync(part)
        os.unlink(os.path.join(self.folder, _MARKER))
        _sync_folder(self.folder)
        os.rename(part, os.path.join(self.folder, MANIFEST))
        _sync_folder(self.folder)
        if _is_complete(self.path):
            os.rename(self.path, self.path + REPLACED)
        os.rename(self.folder, self.path)
        _sync_folder(os.path.dirname(self.path))
        with suppress(OSError):  # the new checkpoint exists; the next save removes the remainder or raises
            remove(self.path + REPLACED)
        self._lock.release()

    def abandon(self) -> None:
        """Restore the old checkpoint and remove the written files as far as possible, after a failed save."""
        try:
            with suppress(OSError):
                if self._token and not os.path.lexists(self.path) and _is_complete(self.path + REPLACED):
                    os.rename(self.path + REPLACED, self.path)
                is_the_only_one = _is_complete(self.folder) and not _is_complete(self.path)
                if self._token and self.token in (self._token, b"") and not is_the_only_one:
                    remove(self.folder)
        finally:
            self._lock.release()


def remove(folder: str) -> None:
    """Remove a checkpoint, or its remaining files. The manifest is first renamed to a marker, which is removed last."""
    with suppress(FileNotFoundError):
        os.rename(os.path.join(folder, MANIFEST), os.path.join(folder, _MARKER))
    with suppress(FileNotFoundError):
        for entry in sorted(os.scandir(folder), key=lambda each: each.name == _MARKER):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)


def _is_complete(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, MANIFEST))


def _is_ours(folder: str) -> bool:
    if not os.path.isdir(folder):
        return False
    names = os.listdir(folder)
    return not names or not {_MARKER, MANIFEST, _PART}.isdisjoint(names)


def _copy_synced(source: str, target: str) -> None:
    """Copy a file, a link, or a folder with its contents, and sync the copy to the disk."""
    if os.path.isdir(source) and not os.path.islink(source):
        os.mkdir(target)
        for entry in os.scandir(source):
            _copy_synced(entry.path, os.path.join(target, entry.name))
        shutil.copystat(source, target)
        _sync_folder(target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
        if not os.path.islink(target):
            sync(target)


@contextmanager
def named(path: str) -> Iterator[None]:
    """Add the path of a file to errors of writes and syncs, which lack the path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def _write(path: str, content: bytes) -> None:
    with named(path):
        Path(path).write_bytes(content)


def _sync_folder(path: str) -> None:
    with suppress(OSError):  # not every file system supports this
        sync(path)


def sync(path: str) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)
