"""A short program in a new process that has imported torch already, which takes a new interpreter seconds."""

from __future__ import annotations

import contextlib
import ctypes
import io
import textwrap

from tests.helpers.ranks import RankPool

_MMAP_THRESHOLD = -3  # an option of glibc's mallopt


def printed_by_program(ranks: RankPool, text: str, *, mapped_from: int | None = None) -> str:
    """Run a program in a new process, and return the text that it prints.

    Args:
        ranks: the fixture, whose server forks the process.
        text: the program.
        mapped_from: the bytes from which on glibc maps each block of memory, and returns it when it is freed, so that
            resident memory is memory in use. By default, glibc decides.
    """
    printed: str = ranks(1, backend=None).run(_run_program, textwrap.dedent(text), mapped_from)[0]
    return printed


def _run_program(text: str, mapped_from: int | None) -> str:
    library = ctypes.CDLL(None)
    if mapped_from is not None and library.mallopt(_MMAP_THRESHOLD, mapped_from) != 1:
        raise RuntimeError(f"glibc does not map blocks from {mapped_from} bytes on")
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)  # free memory of the server would hide the program's
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()
