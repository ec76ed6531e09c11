"""What tests of damaged and hostile files share: bounds of time and memory, changes of files, and reading all."""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fsdp.checkpoint.cli import described, lines
from fsdp.checkpoint.formats.open_source import examine, format_of, open_source
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.generators import GeneratorStates
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.untrusted import reading
from tests.helpers.convert_formats import whole
from tests.helpers.equality import bits_of

_MORE_BYTES = 1 << 29  # of addresses, which are taken for more than is used


@contextmanager
def bounded(seconds: int = 20) -> Iterator[None]:
    """What takes much time within raises TimeoutError, and what takes much memory MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MORE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_bounded(nbytes: int) -> Iterator[None]:
    """What takes more of Python's memory within is an AssertionError."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def _too_long(*_: Any) -> None:
    raise TimeoutError("reading takes too long")


def everything_in(path: Path, word: str | None = None) -> dict[str, Any]:
    """All that a checkpoint of any format has, read in every way but converting."""
    with closing(open_source(path, word)) as source:
        readers = [source.model, *([] if source.optimizer is None else [source.optimizer])]
        tensors = {
            name: bits_of(whole(reader, name)).numpy().tobytes() for reader in readers for name in reader.tensors
        }
        list(lines(source))
        text = json.dumps(described(source))
        with reading(path):
            for states in source.generators or ():
                GeneratorStates(decoded(states))
    return {"tensors": tensors, "described": text}


def assert_read_or_refused(path: Path, allowed: Callable[[Any], bool], word: str | None = None) -> None:
    """Reading gives what is allowed or one kind of error, which is short and names a file; and so does examining."""
    found, refused = _read_or_refused(lambda: everything_in(path, word))
    assert refused is not None or allowed(found)
    _, refused_too = _read_or_refused(lambda: examine(format_of(str(path), word), str(path), lambda _: lambda _: None))
    for error in filter(None, (refused, refused_too)):
        text = str(error)
        assert type(error) in (ValueError, FileNotFoundError), repr(error)
        assert str(path.parent) in text, text
        assert len(text) < 5000
        assert all(each.isprintable() or each in "\n\t" for each in text), text


def _read_or_refused(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        with bounded():
            return read(), None
    except (ValueError, FileNotFoundError) as error:
        return None, error


# Changes


def edits() -> st.SearchStrategy[list[tuple[str, float, bytes]]]:
    """A few changes: what is done, where between begin and end, and bytes for it."""
    known = [b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", b"-1", b"9" * 20, b"../", b"\x1b[2J", b"]"]
    edit = st.tuples(
        st.sampled_from(["flip", "cut", "insert", "write", "drop"]),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(known) | st.binary(min_size=1, max_size=4),
    )
    return st.lists(edit, min_size=1, max_size=3)


def edited(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """Some data after changes."""
    for what, where, given in changes:
        place = int(where * len(data))
        if what == "flip" and data:
            data = data[:place] + bytes([data[place] ^ (1 << given[0] % 8)]) + data[place + 1 :]
        elif what == "cut":
            data = data[:place]
        elif what == "insert":
            data = data[:place] + given + data[place:]
        elif what == "write":
            data = data[:place] + given + data[place + len(given) :]
        else:
            data = data[:place] + data[place + len(given) :]
    return data


Draw = Callable[[st.SearchStrategy[Any]], Any]


def strange_values() -> st.SearchStrategy[Any]:
    """What nobody expects somewhere in JSON."""
    numbers = [None, -1, 0, 1 << 40, 10**30, 1.5]
    return st.sampled_from([*numbers, "", "../x", "/etc/passwd", "\x1b[2J", [], {}, [[]], {"~tuple": 3}, "F32"])


def replaced(tree: Any, draw: Draw, strange: st.SearchStrategy[Any] | None = None) -> Any:
    """A tree of dictionaries and lists in which something is gone, or something strange."""
    if isinstance(tree, (dict, list)) and tree and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(tree) if isinstance(tree, dict) else range(len(tree))))
        made = dict(tree) if isinstance(tree, dict) else list(tree)
        if draw(st.integers(0, 9)) == 0:
            del made[key]
        else:
            made[key] = replaced(made[key], draw, strange)
        return made
    return draw(strange_values() if strange is None else strange)


def seal(folder: Path, content: Any) -> None:
    """Write the manifest of a checkpoint, with the checksum that it should have."""
    text = json.dumps(content, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "checkpoint.json").write_text(f'{{"sha256":"{digest}","checkpoint":{text}}}')


def manifest_of(folder: Path) -> Any:
    """What a checkpoint says of itself."""
    return json.loads((folder / "checkpoint.json").read_text())["checkpoint"]


def damage(folder: Path, draw: Draw) -> None:
    """Change bytes of some file."""
    path = draw(st.sampled_from(sorted(each for each in folder.rglob("*") if each.is_file())))
    path.write_bytes(edited(path.read_bytes(), draw(edits())))


def damage_pickle(folder: Path, draw: Draw) -> None:
    """Change bytes of the pickle in some file of `torch.save`, checksums and all."""
    path = draw(st.sampled_from(sorted(each for each in folder.rglob("*") if each.is_file())))
    zipped_with(path, "data.pkl", edited(TorchArchive(str(path))._pickle, draw(edits())))


def damage_manifest(folder: Path, draw: Draw) -> None:
    """Put something else into the manifest of a checkpoint of ours, checksum and all."""
    seal(folder / "run", replaced(manifest_of(folder / "run"), draw))


def damage_index(folder: Path, draw: Draw) -> None:
    """Put something else into the index of safetensors files."""
    index = folder / "run" / "model.safetensors.index.json"
    index.write_text(json.dumps(replaced(json.loads(index.read_text()), draw)))


def damage_header(folder: Path, draw: Draw) -> None:
    """Put something else into the header of a safetensors file."""
    path = draw(st.sampled_from(sorted((folder / "run").glob("*.safetensors"))))
    text = path.read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.dumps(replaced(json.loads(text[8 : 8 + length]), draw)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + text[8 + length :])


def zipped_with(path: Path, name: str, content: bytes) -> None:
    """Write a file of `torch.save` again with another record in it, checksums and all."""
    with zipfile.ZipFile(path) as archive:
        records = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in records.items():
            archive.writestr(each, content if each.endswith(f"/{name}") else data)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")
