"""The safetensors format: what is in a file, and reading a range of it straight into a tensor's memory.

A file is eight bytes with the length N of the header (little-endian), N bytes of JSON, and the data:
``{name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}``, offsets counted from
the end of the header, values row-major and little-endian, without holes. Several files have an index,
``model.safetensors.index.json`` with ``{"weight_map": {name: file}}``. Source: https://huggingface.co/docs/safetensors
and the reference implementation, whose limits are these.

Nothing is mapped: pages of a mapping that were touched count as memory of the process.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.untrusted import beside, content_of, descriptor, opened, readable, reading, short

INDEX_SUFFIX = ".safetensors.index.json"
_ONE_FILE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
_CHUNK_BYTES = 4 << 20
_MOST_ELEMENTS = (1 << 63) - 1  # that torch can count

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPES: dict[str, torch.dtype] = {key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is: `begin` is the byte of `file` at which its first element is."""

    name: str
    file: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return readable(f"{self.name} in {self.file}")


class SafetensorsFiles:
    """The tensors of one or several files, by name. As a context manager, it closes the files that it has opened.

    Args:
        path: a file, an index of several (``*.safetensors.index.json``), or a folder that has either.

    Attributes:
        path: the file or index.
        tensors: where each is.
        metadata: strings that were saved with them.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if one is not what it should be; it names the file and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _resolve(path)
        self.metadata: dict[str, str] = {}
        with reading(self.path):
            self.tensors = self._of_index() if self.path.endswith(".json") else self._of_file(self.path)
        self._open: dict[str, int] = {}

    def _of_file(self, path: str) -> dict[str, StoredTensor]:
        tensors, metadata = read_header(path)
        self.metadata |= metadata
        return tensors

    def _of_index(self) -> dict[str, StoredTensor]:
        try:
            weight_map = json.loads(content_of(self.path))["weight_map"]
            pairs = [(str(name), str(file)) for name, file in weight_map.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f'{self.path} is no index of safetensors files, {{"weight_map": {{...}}}}: {error}'
            ) from None
        files: dict[str, dict[str, StoredTensor]] = {}
        found = {}
        for name, file in pairs:
            if file not in files:
                place = beside(self.path, file)
                if not os.path.exists(place):
                    raise FileNotFoundError(f"{self.path} names {place} for {name}, and there is no such file")
                files[file] = self._of_file(place)
            if name not in files[file]:
                raise ValueError(f"{self.path} says that {name} is in {file}, but it is not")
            found[name] = files[file][name]
        return found

    @property
    def digest(self) -> str:
        """Of names, dtypes, shapes and places, not of values: equal for equal headers, wherever the files lie."""
        places = sorted(
            (each.name, str(each.dtype), list(each.shape), os.path.basename(each.file), each.begin)
            for each in self.tensors.values()
        )
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()

    def read(self, name: str, target: Tensor, start: int = 0) -> None:
        """Read elements ``start : start + target.numel()`` of a tensor, in row-major order.

        Straight into the memory of `target` if that is on the CPU and of the stored dtype; otherwise through a buffer
        of 4 MiB, cast as by `Tensor.copy_`. Version counters do not see it.

        Args:
            name: which tensor.
            target: contiguous, of any shape, dtype and device.
            start: the first element.

        Raises:
            ValueError: if `target` is not contiguous, or the range not in the tensor; if the file has become too short.
            OSError: if the file cannot be read.
        """
        stored = self.tensors[name]
        if not target.is_contiguous() or not 0 <= start <= stored.numel - target.numel():
            raise ValueError(
                f"{stored}: cannot read elements {start} to {start + target.numel()} of {stored.numel} into a tensor "
                f"of shape {list(target.shape)} and strides {list(target.stride())}"
            )
        flat = target.detach().as_strided((target.numel(),), (1,))  # one element may have any stride
        begin = stored.begin + start * stored.dtype.itemsize
        if flat.device.type == "cpu" and flat.dtype == stored.dtype:
            self._fill(stored, flat, begin)
            return
        step = _CHUNK_BYTES // stored.dtype.itemsize
        buffer = torch.empty(min(step, flat.numel()), dtype=stored.dtype, device="cpu")
        for first in range(0, flat.numel(), step):
            part = buffer[: flat.numel() - first]
            self._fill(stored, part, begin + first * stored.dtype.itemsize)
            flat[first : first + part.numel()].copy_(part)

    def _fill(self, stored: StoredTensor, target: Tensor, begin: int) -> None:
        if not target.numel():
            return
        memory = target.view(torch.uint8).numpy().data
        fd = self._descriptor(stored.file)
        done = 0
        while done < len(memory):  # the system reads at most 2 GiB at once, and less when it is interrupted
            count = os.preadv(fd, [memory[done:]], begin + done)
            if count == 0:
                raise ValueError(f"{stored}: the file has become too short, it ends before byte {begin + len(memory)}")
            done += count

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = descriptor(file)
        return self._open[file]

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that were opened; reading opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])


def read_header(path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors and the metadata of one file.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if it is not a whole safetensors file.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{path} is no whole safetensors file: its {size} bytes cannot hold a header of {length} bytes "
                f"(at most {MAX_HEADER})"
            )
        header = _parsed(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    if not _maps(metadata, str):
        raise ValueError(f"{path}: __metadata__ of a safetensors file must map strings to strings")
    first = 8 + length
    tensors = {name: _stored(path, name, entry, first, size) for name, entry in header.items()}
    _check_places(path, tensors.values(), first, size)
    return tensors, metadata


def _parsed(path: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file: its header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is no JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{readable(name, 200)} is in it twice")
    return found


def _maps(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(each, kind) for each in value.values())


def _stored(path: str, name: str, entry: Any, first: int, most: int) -> StoredTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} in {path} has no dtype, shape and two data_offsets, but {short(entry)}") from None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name} in {path} is of dtype {short(kind)}, which torch {torch.__version__} has not")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if any(type(number) is not int or not 0 <= number <= _MOST_ELEMENTS for number in numbers):
        raise ValueError(f"{name} in {path} has shape {short(shape)} and data_offsets {short(entry['data_offsets'])}")
    numel = 0 if 0 in shape else 1
    for size in shape if numel else ():  # in Python's numbers, which do not overflow
        numel *= size
        if numel > most:  # of a file that has a byte for each of them: its numbers may have thousands of digits
            break
    if end - begin != numel * DTYPES[kind].itemsize:
        raise ValueError(
            f"{name} in {path} has {end - begin} bytes, and {short(shape)} of {kind} needs "
            f"{numel * DTYPES[kind].itemsize}{' or more' if numel > most else ''}"
        )
    return StoredTensor(name, path, DTYPES[kind], torch.Size(shape), first + begin)


def _check_places(path: str, tensors: Iterable[StoredTensor], first: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the rest of the file, one after the other."""
    reached, before = first, ""
    for tensor in sorted(tensors, key=lambda each: (each.begin, each.nbytes)):
        if tensor.begin != reached:
            what = "overlaps" if tensor.begin < reached else "does not follow"
            raise ValueError(f"{tensor.name} in {path} {what} {before or 'the header'}: its offset is wrong")
        reached, before = tensor.begin + tensor.nbytes, tensor.name
        if reached > size:
            raise ValueError(f"{path} is truncated: {tensor.name} ends at byte {reached}, and the file at {size}")
    if reached != size:
        raise ValueError(f"{path} has {size - reached} bytes after {before or 'its header'} that belong to no tensor")


def _resolve(path: str | os.PathLike[str]) -> str:
    """The file or index that is meant by a path."""
    place = os.fspath(path)
    if not os.path.isdir(place):
        return place
    names = sorted(os.listdir(place))
    whole = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    # Checkpoints have the optimizer's tensors beside the model's.
    models = [[name for name in names if name == wanted] for wanted in (_ONE_FILE, f"model{INDEX_SUFFIX}")]
    for candidates in (*models, indices, whole):
        if len(candidates) == 1:
            return os.path.join(place, candidates[0])
    if not whole and not indices:
        raise FileNotFoundError(f"{place} has no .safetensors file, and no {INDEX_SUFFIX[1:]} of several")
    shown = readable(", ".join(indices or whole), 500)
    raise ValueError(f"{place} has several safetensors files, {shown}: name the one that is meant")
