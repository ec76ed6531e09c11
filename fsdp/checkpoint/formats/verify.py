"""Reading checkpoints from end to end, to find out whether they are what was saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp.checkpoint.checksums import BLOCK_BYTES, blocks
from fsdp.checkpoint.formats.dcp import DcpFolder
from fsdp.checkpoint.formats.rank_files import rank_files
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.manifest import Manifest, complete
from fsdp.checkpoint.safetensors import SafetensorsFiles

Advance = Callable[[int], None]
Start = Callable[[int], Advance]  # is given the number of bytes that will be read


@dataclass(frozen=True)
class Examined:
    """The result of reading a checkpoint from end to end.

    Attributes:
        problems: all that is wrong.
        nbytes: that were read.
        how: what is known if nothing is wrong.
    """

    problems: list[str]
    nbytes: int
    how: str


def examine_ours(path: str, start: Start) -> Examined:
    """Read a folder of `fsdp.save`: every byte has a checksum.

    Raises:
        FileNotFoundError: if there is no complete one.
    """
    folder = complete(path)
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return Examined([str(error)], 0, "")
    problems, opened = [], []
    for each in filter(None, (manifest.model, manifest.optimizer)):
        found = list(each.damaged_heads(folder))
        problems += found
        if not found:
            try:
                opened.append(each.opened_in(folder))
            except (ValueError, OSError) as error:
                problems.append(str(error))
    total = sum(tensor.nbytes for files in opened for tensor in files.tensors.values())
    advance = start(total)
    for files in opened:
        with files:
            problems += files.damaged(advance)
    return Examined(problems, total, "all is what its checksums say")


def examine_safetensors(path: str, start: Start) -> Examined:
    """Read safetensors files: their headers describe them, and they can be read. They have no checksums."""
    try:
        files = SafetensorsFiles(path)
    except (ValueError, FileNotFoundError) as error:
        return Examined([str(error)], 0, "")
    total = sum(tensor.nbytes for tensor in files.tensors.values())
    advance, problems = start(total), []
    buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with files:
        for name, tensor in files.tensors.items():
            try:
                for begin, end in blocks(tensor.nbytes):
                    files.read(name, buffer[: end - begin].view(tensor.dtype), begin // tensor.dtype.itemsize)
                    advance(end - begin)
            except (ValueError, OSError) as error:
                problems.append(str(error))
    return Examined(problems, total, "headers and sizes agree, and all can be read; the format has no checksums")


def examine_torch(path: str, start: Start) -> Examined:
    """Read a file of `torch.save`: the archive's own checksums, if whoever wrote it did not leave them out."""
    try:
        archive = TorchArchive(path)
    except ValueError as error:
        return Examined([str(error)], 0, "")
    total = os.path.getsize(path)
    try:
        archive.content  # noqa: B018 (which is read now)
    except ValueError as error:
        return Examined([str(error)], total, "")
    return Examined(list(archive.damaged(start(total))), total, _how(archive.has_checksums))


def examine_ranks(path: str, start: Start) -> Examined:
    """Read a file of `torch.save` for each rank: none is missing, and their archives' checksums."""
    try:
        files = rank_files(path)
    except (ValueError, FileNotFoundError) as error:
        return Examined([str(error)], 0, "")
    advance = start(sum(map(os.path.getsize, files)))
    found = [examine_torch(file, lambda _: advance) for file in files]
    problems = [problem for each in found for problem in each.problems]
    hows = sorted({each.how for each in found})
    return Examined(problems, sum(each.nbytes for each in found), f"in {len(files)} files, {', '.join(hows)}")


def examine_dcp(path: str, start: Start) -> Examined:
    """Read a folder of `torch.distributed.checkpoint`: every chunk is there, and is what its checksums say."""
    try:
        folder = DcpFolder(path)
    except ValueError as error:
        return Examined([str(error)], 0, "")
    problems = list(folder.damaged(start(folder.nbytes)))
    return Examined(problems, folder.nbytes, "" if problems else _how(folder.has_checksums))


def _how(has_checksums: bool) -> str:
    if has_checksums:
        return "all is what torch's checksums say"
    return "all can be read; there are no checksums, since it was saved without them"
