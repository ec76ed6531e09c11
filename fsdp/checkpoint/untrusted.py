"""Reading files that others have written, or that were damaged since: the rules for every reader.

Only regular files are opened, since a pipe would wait for its writer for ever. Files that a file names lie beside it.
What cannot be understood is one kind of error, a ValueError with the path in it, in a message that is short and that a
terminal only prints. Bounds are the reader's own: no count or size that a file claims is believed before it was
compared with the size of the file.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import IO, Any

_MOST_CHARACTERS = 4000  # of a message
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)

# What reading a file can raise that is not what it should be.
BROKEN = (
    zipfile.BadZipFile,
    UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    struct.error,
    RuntimeError,  # of torch, for shapes; RecursionError and NotImplementedError are such, too
)


def descriptor(path: str | os.PathLike[str]) -> int:
    """Open a file to read it; the caller closes it.

    Raises:
        ValueError: if it is no regular file.
        OSError: if it cannot be opened.
    """
    place = os.fspath(path)
    fd = os.open(place, _FLAGS)  # which does not wait for anybody who writes to a pipe
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    raise ValueError(f"{place} is a pipe, a socket or a device, and no regular file")


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read it; raises what `descriptor` raises."""
    return os.fdopen(descriptor(path), "rb")


def content_of(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return all of a file.

    Raises:
        ValueError: also if the file has more than `most` bytes.
        OSError: see `descriptor`.
    """
    with opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if most is not None and nbytes > most:
            raise ValueError(f"{os.fspath(path)} has {nbytes} bytes, and at most {most} are read")
        return file.read()


def beside(path: str, name: str) -> str:
    """Return the place of a file that the file at `path` names: in the same folder or below it.

    A link is followed to where the file at `path` really lies as well, since whoever made one link made the other one.
    So look the cache of Hugging Face, and a folder of links to the files of another one.

    Raises:
        ValueError: if the name leads out of the folder.
    """
    folder = os.path.dirname(path)
    place = os.path.join(folder, name)
    if not name or "\0" in name or os.path.isabs(name) or os.pardir in name.replace("\\", "/").split("/"):
        raise ValueError(f"{path} names the file {name!r}, which is not in its folder")
    real = os.path.realpath(place)
    homes = (os.path.realpath(folder), os.path.dirname(os.path.realpath(path)))
    if not any(real.startswith(os.path.join(home, "")) for home in homes):
        raise ValueError(
            f"{path} names {name!r}, which is a link to {real}, outside of its folder: put the file itself there, or "
            "links to one folder for both"
        )
    return place


def readable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text for people: without its middle if it is long, and with escapes for what a terminal would obey."""
    if len(text) > most:
        head = most * 2 // 3
        text = f"{text[:head]}... ({len(text) - most} characters) ...{text[len(text) - most + head :]}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def short(value: Any, width: int = 60) -> str:
    """Return a value on one line, as `repr` shows it."""
    text = " ".join(readable(repr(value), 4 * width).split())
    return text if len(text) <= width else text[: width - 3] + "..."


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors within, of a file that is not what it should be, into a ValueError that names `path`.

    Raises:
        ValueError: in the place of all of `BROKEN`.
        OSError: for files that cannot be read, unchanged but for a message that is long or has what a terminal obeys.
    """
    place = os.fspath(path)
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a message of ours
            raise type(error)(readable(str(error))) from None
        if len(str(error)) > _MOST_CHARACTERS:
            raise OSError(error.errno, error.strerror, readable(str(error.filename), 1000)) from None
        raise
    except BROKEN as error:
        text = str(error)
        if type(error) is ValueError:  # which says what is wrong
            text = text if place in text else f"{place}: {text}"
        elif type(error) is not TypeError or place not in text:
            text = f"{place} is damaged, or of a form that is not known here: {type(error).__name__}: {text}"
        raise ValueError(readable(text)) from None
