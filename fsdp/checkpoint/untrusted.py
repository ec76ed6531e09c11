"""Reading untrusted or damaged files: the rules for every reader.

Only regular files are opened, because reading from a pipe might never end. Files that a file names must be in its
folder. Invalid contents always raise a ValueError that names the path, with a short message without control
characters. Counts and sizes from a file are compared with the size of the file before use.
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

# Exceptions from reading an invalid file.
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
    RuntimeError,  # of torch, for shapes; also the base class of RecursionError and NotImplementedError
)


def descriptor(path: str | os.PathLike[str]) -> int:
    """Return the descriptor of a file opened for reading, which the caller closes; ValueError unless it is regular."""
    place = os.fspath(path)
    fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for a writer of a pipe
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    raise ValueError(f"{place} is a pipe, a socket or a device, not a regular file")


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading; raises the same errors as `descriptor`."""
    return os.fdopen(descriptor(path), "rb")


def content_of(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the content of a file; ValueError also if the file has more than `most` bytes."""
    with opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if most is not None and nbytes > most:
            raise ValueError(f"{os.fspath(path)} has {nbytes} bytes, but at most {most} are supported")
        return file.read()


def beside(path: str, name: str) -> str:
    """Return the path of a file that the file at `path` names, in the same folder or below it.

    The folder that contains the target of a link at `path` is also permitted, because the same user has created both
    links. The cache of Hugging Face, and folders of links to another folder, have this structure.

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
            f"{path} names {name!r}, which is a link to {real}, outside its folder: replace the link by the file, or "
            "link both files to one folder"
        )
    return place


def readable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a readable text: without its middle if it is long, and with escaped control characters."""
    if len(text) > most:
        head = most * 2 // 3
        text = f"{text[:head]}... ({len(text) - most} characters) ...{text[len(text) - most + head :]}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def short(value: Any, width: int = 60) -> str:
    """Return the `repr` of a value in a single line."""
    text = " ".join(readable(repr(value), 4 * width).split())
    return text if len(text) <= width else text[: width - 3] + "..."


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors from an invalid file into a ValueError that names `path`.

    Raises:
        ValueError: instead of any error in `BROKEN`.
        OSError: for unreadable files, unchanged unless the message is long or contains control characters.
    """
    place = os.fspath(path)
    try:
        yield
    except OSError as error:
        if error.errno is None:  # an error of this module
            raise type(error)(readable(str(error))) from None
        if len(str(error)) > _MOST_CHARACTERS:
            raise OSError(error.errno, error.strerror, readable(str(error.filename), 1000)) from None
        raise
    except BROKEN as error:
        text = str(error)
        if type(error) is ValueError:  # which describes the error
            text = text if place in text else f"{place}: {text}"
        elif type(error) is not TypeError or place not in text:
            text = f"{place} is damaged, or has an unknown form: {type(error).__name__}: {text}"
        raise ValueError(readable(text)) from None
