"""The safetensors format: ranges of tensors are read from files, and multiple ranks write files concurrently.

A file contains the length N of the header (eight bytes, little-endian), N bytes of JSON, and the data:
``{name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}``. Offsets are counted
from the end of the header; values are row-major and little-endian, without gaps. Multiple files have an index,
``model.safetensors.index.json`` with ``{"weight_map": {name: file}}``. Source: https://huggingface.co/docs/safetensors
and the reference implementation, which has the same limits.

[Note: several writers] `plan` is arithmetic: it computes headers and offsets from names, dtypes and shapes, with the
same result on every rank. Then each rank writes its ranges at these offsets (`write_parts`), directly from memory.
Values on a device other than the CPU, or of a different dtype, are copied through a block. No all-gather is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.checksum_threads import ChecksumThreads
from fsdp.checkpoint.checksums import (
    BLOCK_BYTES,
    Fragment,
    HoleError,
    block_span,
    by_name,
    fragment,
    from_text,
    merged,
    of_block,
    spans,
)
from fsdp.checkpoint.folder import named
from fsdp.checkpoint.formats.source import FoundTensor, SeenFile, StridedTensor, TensorReader
from fsdp.checkpoint.untrusted import beside, content_of, opened, readable, reading, short
from fsdp.distributed.devices import host_bytes

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_ONE_FILE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
_MAX_ENTRY = 8192  # characters of a tensor's entry in a header
_MAX_DIMS = 64  # as in numpy
_MOST_ELEMENTS = (1 << 63) - 1  # the maximum in torch
_LENGTH_BYTES = 8  # of the header's length, at the start of a file
_METADATA = "__metadata__"  # the key of a header that is not a tensor's name
_FORM = "form of "  # the prefix of a tensor's name in a header's metadata, for the tensor's form
# Data begin at a multiple of these bytes in the file, as tensors do in memory; the header is padded with spaces. If the
# alignments in the processor's cache lines differed, copies to and from the page cache took twice the time.
_LINE = 64
_STORED_AT_ONCE = 1 << 20  # bytes: larger writes are sent to the disk immediately; small writes share pages


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the keys of an object are not unique: {short([name for name, _ in pairs])}")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_without_duplicates)
_NEXT, _ENTRY = re.compile(r"[ \t\n\r]*(.?)", re.DOTALL), re.compile(r"\{[^{}]*\}")

_NAMES = (
    "F64 float64, F32 float32, F16 float16, BF16 bfloat16, F8_E4M3 float8_e4m3fn, F8_E5M2 float8_e5m2, "
    "F8_E8M0 float8_e8m0fnu, F8_E4M3FNUZ float8_e4m3fnuz, F8_E5M2FNUZ float8_e5m2fnuz, C64 complex64, I64 int64, "
    "I32 int32, I16 int16, I8 int8, U64 uint64, U32 uint32, U16 uint16, U8 uint8, BOOL bool"
)
DTYPES: dict[str, torch.dtype] = {
    key: getattr(torch, name) for key, name in map(str.split, _NAMES.split(", ")) if hasattr(torch, name)
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
NO_KIND = (
    "which safetensors files cannot hold. Cast it; or save full state dicts with torch.save, by state_dict() and "
    "fsdp.optim_utils.full_optim_state_dict()"
)


class SafetensorsFiles(TensorReader):
    """The tensors of a file, of multiple files with an index (``*.safetensors.index.json``), or of a folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(_resolve(path), {})
        self.metadata: dict[str, str] = {}
        with reading(self.path):
            found = self._of_index() if self.path.endswith(".json") else self._of_file(self.path)
        self.forms = {key[len(_FORM) :]: form for key, form in self.metadata.items() if key.startswith(_FORM)}
        self._stored = found
        self.tensors = {name: FoundTensor(self, name, each.file.path, each) for name, each in found.items()}

    def _of_file(self, path: str) -> dict[str, StridedTensor]:
        tensors, metadata = _read_header(path)
        self.metadata |= metadata
        return tensors

    def _of_index(self) -> dict[str, StridedTensor]:
        files: dict[str, dict[str, StridedTensor]] = {}
        found = {}
        for name, file in files_by_name(self.path).items():
            if file not in files:
                files[file] = self._of_file(file)
            if name not in files[file]:
                raise ValueError(f"{self.path} lists {name} in {os.path.basename(file)}, which does not contain it")
            found[name] = files[file][name]
        return found

    @property
    def digest(self) -> str:
        """Return a hash of names, dtypes, shapes, file names and offsets; folders and values are not included."""
        places = sorted(
            (name, str(each.dtype), list(each.shape), os.path.basename(each.file), self._stored[name].begin)
            for name, each in self.tensors.items()
        )
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()

    def damaged(self, advance: Callable[[int], object]) -> Iterator[str]:
        """Yield the errors of the tensors, reading each once in blocks; `advance` receives the bytes of each block."""
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        for name, tensor in self.tensors.items():
            for begin, end in spans(0, tensor.nbytes):
                advance(end - begin)
                try:
                    self.read(name, buffer[: end - begin].view(tensor.dtype), begin // tensor.dtype.itemsize)
                except (ValueError, OSError) as error:
                    yield str(error)


def files_by_name(index: str) -> dict[str, str]:
    """Return the path of each tensor's file from an index of multiple files, by the tensor's name.

    Raises:
        FileNotFoundError: if one of the files does not exist.
        ValueError: if the index is damaged, or names a file that is not in its folder.
    """
    try:
        weight_map = json.loads(content_of(index, _MAX_HEADER))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'{index} is no index of files of tensors, {{"weight_map": {{...}}}}: {error}') from None
    places = {file: beside(index, file) for file in names.values()}
    for name, file in names.items():
        if not os.path.exists(places[file]):
            raise FileNotFoundError(f"{index} names {places[file]}, which does not exist, for {name}")
    return {name: places[file] for name, file in names.items()}


def _read_header(path: str) -> tuple[dict[str, StridedTensor], dict[str, str]]:
    with opened(path) as file:
        seen = SeenFile.of(path, file.fileno())
        size = seen.nbytes
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise ValueError(
                f"{path} is not a complete safetensors file: its {size} bytes cannot hold a header of {length} bytes "
                f"(at most {_MAX_HEADER})"
            )
        text = file.read(length)
    first = _LENGTH_BYTES + length
    tensors: dict[str, StridedTensor] = {}
    metadata: dict[str, str] = {}
    for name, entry in _members(path, text):
        if name == _METADATA:
            metadata = entry
        else:
            tensors[name] = _stored(seen, name, entry, first)
    _check_places(path, tensors, first, size)
    return tensors, metadata


def _members(path: str, text: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Decode the members of a header sequentially, because Python's objects need many times the memory of JSON."""
    names: set[str] = set()
    try:
        header = _JsonText(text.decode())
        for name in header.members():
            if name in names:
                raise ValueError(f"{readable(name, 200)} is in it twice")
            names.add(name)
            yield name, header.strings() if name == _METADATA else header.entry(name)
        header.end()
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read: {error}") from None


class _JsonText:
    """The text of a header, and the position of the next character to decode."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def members(self) -> Iterator[str]:
        """Yield the names of an object's members. The caller must decode each value before requesting the next name."""
        self._take("{")
        if self._next() == "}":
            self._take("}")
            return
        while True:
            name = self._string("name, which is a string,")
            self._take(":")
            yield name
            if self._take(",}") == "}":
                return

    def strings(self) -> dict[str, str]:
        """Decode an object of strings; ValueError for any other value."""
        return {name: self._string(f"string for {readable(name, 200)}") for name in self.members()}

    def entry(self, name: str) -> dict[str, Any]:
        """Decode the object of a tensor, which contains no nested objects."""
        self._next()
        found = _ENTRY.match(self._text, self._at, self._at + _MAX_ENTRY)
        if found is None:
            raise ValueError(
                f"{readable(name, 200)} has no dtype, shape and two data_offsets in at most {_MAX_ENTRY} characters, "
                f"but {short(self._text[self._at : self._at + 100])}"
            )
        self._at = found.end()
        return _JSON.raw_decode(found.group())[0]

    def end(self) -> None:
        if self._next():
            raise ValueError(f"there is more after its end, at character {self._at}")

    def _string(self, what: str) -> str:
        if self._next() != '"':
            raise ValueError(f"there is no {what} at character {self._at}")
        found, self._at = _JSON.raw_decode(self._text, self._at)
        return found

    def _take(self, wanted: str) -> str:
        found = self._next()
        if not found or found not in wanted:
            raise ValueError(f"there is no {' or '.join(wanted)} at character {self._at}")
        self._at += 1
        return found

    def _next(self) -> str:
        """Return the next character that is not whitespace; an empty string at the end."""
        found: Any = _NEXT.match(self._text, self._at)  # always matches
        self._at = found.start(1)
        return found[1]


def _stored(file: SeenFile, name: str, entry: Any, first: int) -> StridedTensor:
    path, most = file.path, file.nbytes
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} in {path} has no dtype, shape and two data_offsets, but {short(entry)}") from None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name} in {path} is of dtype {short(kind)}, which torch {torch.__version__} does not have")
    numbers: list[Any] = [*shape, begin, end] if isinstance(shape, list) else [None]
    if isinstance(shape, list) and len(shape) > _MAX_DIMS:
        raise ValueError(f"{name} in {path} has {len(shape)} dimensions, but at most {_MAX_DIMS} are supported")
    if {*map(type, numbers)} != {int} or not 0 <= min(numbers) <= max(numbers) <= _MOST_ELEMENTS:
        raise ValueError(f"{name} in {path} has shape {short(shape)} and data_offsets {short(entry['data_offsets'])}")
    numel = 0 if 0 in shape else 1
    for size in shape if numel else ():  # with Python's integers, which do not overflow
        numel *= size
        if numel > most:  # more than the file can contain; the product may have thousands of digits
            break
    if end - begin != numel * DTYPES[kind].itemsize:
        raise ValueError(
            f"{name} in {path} has {end - begin} bytes, and {short(shape)} of {kind} needs "
            f"{numel * DTYPES[kind].itemsize}{' or more' if numel > most else ''}"
        )
    return StridedTensor(file, first + begin, DTYPES[kind], torch.Size(shape))


def _check_places(path: str, tensors: Mapping[str, StridedTensor], first: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the remaining file without gaps."""
    reached, before = first, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != reached:
            what = "overlaps" if tensor.begin < reached else "does not follow"
            raise ValueError(f"{name} in {path} {what} {before or 'the header'}: its offset is wrong")
        reached, before = tensor.begin + tensor.nbytes, name
        if reached > size:
            raise ValueError(f"{path} is truncated: {name} ends at byte {reached}, and the file at {size}")
    if reached != size:
        raise ValueError(f"{path} has {size - reached} bytes after {before or 'its header'} that belong to no tensor")


def _resolve(path: str | os.PathLike[str]) -> str:
    """Return the file or index at a path, or in the folder at the path."""
    place = os.fspath(path)
    if not os.path.isdir(place):
        return place
    names = sorted(os.listdir(place))
    files = [name for name in names if name.endswith(SUFFIX)]
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    # Checkpoints contain the optimizer's tensors in addition to the model's.
    models = [[name for name in names if name == wanted] for wanted in (_ONE_FILE, f"model{INDEX_SUFFIX}")]
    for candidates in (*models, indices, files):
        if len(candidates) == 1:
            return os.path.join(place, candidates[0])
    if not files and not indices:
        raise FileNotFoundError(f"{place} has no .safetensors file, and no {INDEX_SUFFIX[1:]} of several")
    shown = readable(", ".join(indices or files), 500)
    raise ValueError(f"{place} has several safetensors files, {shown}: pass one of them")


class CheckedFiles(SafetensorsFiles):
    """Files whose bytes are compared with checksums during reading; damaged bytes raise ValueError.

    Blocks that this rank reads completely are compared immediately. Fragments of blocks at the ends of ranges are
    combined with the fragments of other ranks after all ranks have read.
    """

    def __init__(self, path: str | os.PathLike[str], checksums: Mapping[str, str]) -> None:
        super().__init__(path)
        self._expected = {name: from_text(text) for name, text in checksums.items()}
        for name, tensor in self.tensors.items():
            if len(self._expected.get(name, ())) != -(-tensor.nbytes // BLOCK_BYTES):
                raise ValueError(
                    f"{tensor} is of {tensor.nbytes} bytes, but its checksums are missing or for another size"
                )
        missing = next((name for name in checksums if name not in self.tensors), None)
        if missing is not None:
            raise ValueError(f"{self.path} has no tensor {readable(missing)}, but its checksums exist")
        self.tensors = {name: self.tensors[name] for name in checksums}  # in the order of the checksums
        self._fragments: list[Fragment] = []
        self._checksums = ChecksumThreads()

    def hold(self) -> None:
        """Open the files, so that they can be read after a save replaces the checkpoint; at most 64 stay open."""
        for file in dict.fromkeys(each.file for each in self._stored.values()):
            self._files.open(file)

    def read(self, name: str, target: Tensor, start: int = 0) -> None:
        try:
            super().read(name, target, start)
        finally:
            found = self._checksums.take()
        nbytes = self.tensors[name].nbytes
        for each in found:
            if (each.begin, each.end) == block_span(each.block, nbytes):
                self._compare(each.name, each.block, each.checksum)
            else:
                self._fragments.append(each)

    def _fill(self, found: FoundTensor, into: Tensor, start: int) -> None:
        found.tensor.fill(self._files, into, start)
        self._checksums.add(found.name, start * found.dtype.itemsize, host_bytes(into))

    def close(self) -> None:
        self._checksums.close()
        super().close()

    def _compare(self, name: str, block: int, checksum: int) -> None:
        if checksum != self._expected[name][block]:
            begin, end = block_span(block, self.tensors[name].nbytes)
            raise ValueError(
                f"{self.tensors[name]} is damaged: bytes {begin} to {end} of it do not match their checksum. Load "
                "another checkpoint."
            )

    @property
    def fragments(self) -> list[Fragment]:
        """Return the fragments of partly read blocks, for the other ranks."""
        return merged(self._fragments)

    def compare_fragments(self, heard: Iterable[Fragment]) -> None:
        """Compare the blocks that this rank has read partly, using the fragments of all ranks.

        Bytes that none of these ranks has read are read again (parts of `DTensor`s on other ranks).
        """
        others = by_name(heard)
        for name, by_block in by_name(self.fragments).items():
            for number, mine in by_block.items():
                self._compare(name, number, self._put_together(mine, others.get(name, {}).get(number, [])))
        self._fragments = []

    def _put_together(self, mine: list[Fragment], others: list[Fragment]) -> int:
        own = {(each.begin, each.end, each.nbytes) for each in mine}
        known = [*mine, *(each for each in others if (each.begin, each.end, each.nbytes) not in own)]
        begin, end = block_span(mine[0].block, self.tensors[mine[0].name].nbytes)
        try:
            return of_block(known, begin, end)
        except HoleError:
            found = self.tensors[mine[0].name]
            size = found.dtype.itemsize
            block = torch.empty((end - begin) // size, dtype=found.dtype, device="cpu")
            super()._fill(found, block, begin // size)
            return fragment(found.name, begin, host_bytes(block)).checksum


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor to write, and the elements that this rank writes, if any."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    values: Tensor | FoundTensor | None = None  # flat, of any dtype and device
    ranges: Sequence[tuple[int, int]] | None = None  # row-major, consecutive in `values`; None for all of the tensor
    form: str = ""  # of a parameter that the file contains in another form, for example as bytes

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Return the ranges of the values, in bytes of the tensor."""
        ranges = [(0, self.shape.numel())] if self.ranges is None else self.ranges
        return [(start * self.dtype.itemsize, stop * self.dtype.itemsize) for start, stop in ranges]

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield chunks of the values: the offset in the tensor, and the bytes up to the end of a block or a range."""
        values, size = self.values, self.dtype.itemsize
        if values is None:
            return
        # Whole blocks of data from files, so that each block is compared with its checksum immediately.
        stored_size = min(size, values.dtype.itemsize) if isinstance(values, FoundTensor) else size
        group = BLOCK_BYTES * size // stored_size
        first = 0
        for batch in _batches((span for extent in self.extents for span in spans(*extent, group)), group):
            last = first + sum(end - begin for begin, end in batch) // size
            if isinstance(values, FoundTensor):
                chunk = torch.empty(last - first, dtype=self.dtype, device="cpu")
                values.reader.read(values.name, chunk, first)
            else:
                chunk = values.detach()[first:last].to("cpu", self.dtype).contiguous()
            memory = host_bytes(chunk)
            for start, stop in (one for span in batch for one in spans(*span)):
                yield start, memory[: stop - start]
                memory = memory[stop - start :]
            first = last


def _batches(every: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Group consecutive ranges, with or without gaps, into batches of at most `most` bytes."""
    batch: list[tuple[int, int]] = []
    room = most
    for begin, end in every:
        if batch and end - begin > room:
            yield batch
            batch, room = [], most
        batch.append((begin, end))
        room -= end - begin
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """A file to write."""

    name: str  # without the folder
    head: bytes  # all bytes before the data
    begins: dict[str, int]  # the offset of each tensor in the file, by name
    nbytes: int


def plan(entries: Sequence[Entry], stem: str, max_file_bytes: int | None = None) -> list[PlannedFile]:
    """Plan the files for some tensors: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on.

    A new file begins before a file would contain more than `max_file_bytes` of tensors; a single tensor may be larger.
    Multiple files are followed by an index.
    """
    if twice := [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]:
        raise ValueError(f"two tensors have the name {twice[0]}: names must be unique")
    for entry in entries:
        if entry.name == _METADATA:
            raise ValueError(f"the name {_METADATA} is reserved in safetensors files: rename the tensor")
        if entry.dtype not in KINDS:
            raise TypeError(f"{entry.name} is of {entry.dtype}, {NO_KIND}")
        if len(entry.shape) > _MAX_DIMS:
            raise ValueError(f"{entry.name} has {len(entry.shape)} dimensions, but a file supports at most {_MAX_DIMS}")
    bundles: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if max_file_bytes is not None and bundles[-1] and filled + entry.nbytes > max_file_bytes:
            bundles.append([])
            filled = 0
        bundles[-1].append(entry)
        filled += entry.nbytes
    if len(bundles) == 1:
        return [_planned(f"{stem}{SUFFIX}", entries)]
    files = [
        _planned(f"{stem}-{number:05d}-of-{len(bundles):05d}{SUFFIX}", bundle)
        for number, bundle in enumerate(bundles, start=1)
    ]
    weight_map = {name: file.name for file in files for name in file.begins}
    total = sum(entry.nbytes for entry in entries)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()
    return [*files, PlannedFile(f"{stem}{INDEX_SUFFIX}", index, {}, len(index))]


def _planned(name: str, entries: Sequence[Entry]) -> PlannedFile:
    header: dict[str, object] = {
        _METADATA: {
            "format": "pt",  # required by older versions of transformers
            **{_FORM + entry.name: entry.form for entry in entries if entry.form},
        }
    }
    offset, offsets = 0, {}
    # All tensors are aligned: tensors that fill whole lines come first, then the largest elements before the smallest.
    for entry in sorted(entries, key=lambda each: (each.nbytes % _LINE > 0, -each.dtype.itemsize)):
        offsets[entry.name] = offset
        header[entry.name] = {
            "dtype": KINDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _LINE)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"the names of {len(entries)} tensors need {len(text)} bytes, but a safetensors file can have "
            f"{_MAX_HEADER}: divide them among several files (max_file_bytes)"
        )
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    begins = {key: len(head) + begin for key, begin in offsets.items()}
    return PlannedFile(name, head, begins, len(head) + offset)


def create(folder: str, file: PlannedFile) -> None:
    """Create a file with its final size and its header."""
    path = os.path.join(folder, file.name)
    with named(path), open(path, "xb") as made:
        made.write(file.head)
        made.truncate(file.nbytes)
        made.flush()
        os.fsync(made.fileno())  # no rank writes to, or syncs, a file without elements


def write_parts(
    folder: str,
    files: Sequence[PlannedFile],
    entries: Mapping[str, Entry],
    advance: Callable[[int], object] = lambda nbytes: None,
) -> list[Fragment]:
    """Write this rank's parts of tensors, by name, into existing files, and return the checksums.

    Each file is synced to the disk. `advance` receives the number of bytes of each write.
    """
    with closing(ChecksumThreads()) as checksums:
        for file in files:
            mine = [name for name in file.begins if name in entries]
            if not mine:
                continue
            with opened_to_write(folder, file) as fd:
                for name in mine:
                    for begin, memory in entries[name].chunks():
                        checksums.add(name, begin, memory)
                        store_at(fd, memory, file.begins[name] + begin)
                        advance(len(memory))
        return merged(checksums.take())


@contextmanager
def opened_to_write(folder: str, file: PlannedFile) -> Iterator[int]:
    """Open an existing file for writing, and sync the file to the disk at the end."""
    path = os.path.join(folder, file.name)
    fd = os.open(path, os.O_WRONLY)
    try:
        with named(path):
            yield fd
            os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, memory: memoryview, offset: int) -> None:
    """Write all bytes of the memory, in multiple calls if the system writes only a part."""
    while memory:
        count = os.pwrite(fd, memory, offset)
        memory, offset = memory[count:], offset + count


def store_at(fd: int, memory: memoryview, offset: int) -> None:
    """Write all bytes of the memory. Large writes are sent to the disk immediately, instead of during `fsync`."""
    write_at(fd, memory, offset)
    if sys.platform == "linux" and len(memory) >= _STORED_AT_ONCE:
        with suppress(OSError):  # Linux starts to write dirty pages to the disk, and drops clean pages
            os.posix_fadvise(fd, offset, len(memory), os.POSIX_FADV_DONTNEED)
