"""Where a converted checkpoint is put: written beside its place, and moved there whole.

Our own folders have a life of their own (`fsdp.checkpoint.folder`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fsdp.checkpoint.folder import sync

WRITING, REPLACED = ".converting", ".replaced"


@contextmanager
def new_place(path: str, *, is_folder: bool, overwrite: bool, own: re.Pattern[str]) -> Iterator[str]:
    """A file or folder to write to, which is at `path` if the block succeeds, and nowhere if it fails.

    Args:
        path: where it is to be.
        is_folder: it is one.
        overwrite: replace what is there.
        own: names of files that a folder may have which is replaced.

    Raises:
        FileExistsError: if something is there, and it must not be replaced.
        OSError: if it cannot be written.
    """
    place = os.path.realpath(path)
    part = place + WRITING
    require_free(path, overwrite)
    if os.path.lexists(place):
        _require_own(place, is_folder, own)
    if os.path.lexists(part):
        raise FileExistsError(f"{part} is in the way: another conversion is writing it, or was killed. Remove it.")
    os.makedirs(part if is_folder else os.path.dirname(part), exist_ok=True)
    try:
        yield part
        for name in (*_inside(part), part):
            sync(name)
        _replace(part, place)
        sync(os.path.dirname(place))
    except BaseException:
        remove(part)
        raise


def require_free(path: str, overwrite: bool) -> None:
    """Raise FileExistsError if something is at a place, and must not be replaced."""
    if os.path.lexists(path) and not overwrite and not (os.path.isdir(path) and not os.listdir(path)):
        raise FileExistsError(f"{path} is there already: name another place, or replace it (--overwrite)")


def _require_own(place: str, is_folder: bool, own: re.Pattern[str]) -> None:
    if os.path.isdir(place) != is_folder:
        raise FileExistsError(f"{place} is a {'file' if is_folder else 'folder'}: move it away first")
    others = [name for name in os.listdir(place) if not own.fullmatch(name)] if is_folder else []
    if others:
        raise FileExistsError(f"{place} has other files in it ({', '.join(sorted(others)[:3])}): it is not replaced")


def _inside(part: str) -> list[str]:
    return [os.path.join(part, name) for name in os.listdir(part)] if os.path.isdir(part) else []


def _replace(part: str, place: str) -> None:
    if not os.path.isdir(part):
        os.replace(part, place)
        return
    old = place + REPLACED
    if os.path.lexists(place):
        os.rename(place, old)
    os.rename(part, place)
    remove(old)


def remove(place: str) -> None:
    """Remove a file, or a folder with all that is in it, as far as that can be done."""
    if os.path.isdir(place):
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(place)
