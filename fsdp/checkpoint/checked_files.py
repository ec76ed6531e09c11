"""Safetensors files of which every byte that is read is compared with the checksums that were saved with them.

Blocks that this rank reads as a whole are compared at once. Of those at the ends of its parts it knows fragments, which
are put together with the other ranks' when all have read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import (
    Fragment,
    HoleError,
    block_count,
    block_span,
    blocks,
    by_name,
    fragment,
    from_text,
    of_block,
    spans,
)
from fsdp.checkpoint.safetensors import SafetensorsFiles, StoredTensor
from fsdp.checkpoint.untrusted import readable


class CheckedFiles(SafetensorsFiles):
    """As `SafetensorsFiles`; reading what is damaged raises ValueError.

    Args:
        path: a file, or an index of several.
        checksums: by a tensor's name, those of its blocks as text.
    """

    def __init__(self, path: str | os.PathLike[str], checksums: Mapping[str, str]) -> None:
        super().__init__(path)
        self._expected = {name: from_text(text) for name, text in checksums.items()}
        for name, tensor in self.tensors.items():
            if len(self._expected.get(name, ())) != block_count(tensor.nbytes):
                raise ValueError(f"{tensor} is of {tensor.nbytes} bytes, for which there are other checksums, or none")
        missing = next((name for name in checksums if name not in self.tensors), None)
        if missing is not None:
            raise ValueError(f"{self.path} has no tensor {readable(missing)}, and there are checksums of it")
        self.tensors = {name: self.tensors[name] for name in checksums}  # in their own order
        self._fragments: list[Fragment] = []

    def _fill(self, stored: StoredTensor, target: Tensor, begin: int) -> None:
        size, first = stored.dtype.itemsize, begin - stored.begin
        for start, end in spans(first, first + target.nbytes):
            chunk = target[(start - first) // size : (end - first) // size]
            super()._fill(stored, chunk, stored.begin + start)
            read = fragment(stored.name, start, chunk.view(torch.uint8).numpy().data)
            if (start, end) == self._block(read):
                self._compare(read.name, read.block, read.checksum)
            else:
                self._fragments.append(read)

    def _block(self, one: Fragment) -> tuple[int, int]:
        """Where the block of a fragment begins and ends."""
        return block_span(one.block, self.tensors[one.name].nbytes)

    def _compare(self, name: str, block: int, checksum: int) -> None:
        if checksum != self._expected[name][block]:
            begin, end = block_span(block, self.tensors[name].nbytes)
            raise ValueError(
                f"{self.tensors[name]} is damaged: bytes {begin} to {end} of it are not what was saved. Load another "
                "checkpoint."
            )

    @property
    def fragments(self) -> bytes:
        """What this rank has read of blocks that are not whole, for the others."""
        return pickle.dumps(self._fragments)

    def compare_fragments(self, heard: Iterable[bytes]) -> None:
        """Compare the blocks that this rank has read in part, with what all ranks have read of them.

        What none of them has read (parts of `DTensor`s, of which they are not all the ranks) is read again.

        Raises:
            ValueError: for a damaged block.
        """
        others = by_name(each for payload in heard for each in pickle.loads(payload))
        for name, by_block in by_name(self._fragments).items():
            for number, mine in by_block.items():
                self._compare(name, number, self._put_together(mine, others.get(name, {}).get(number, [])))
        self._fragments = []

    def _put_together(self, mine: list[Fragment], others: list[Fragment]) -> int:
        own = {(each.begin, each.end) for each in mine}
        known = [*mine, *(each for each in others if (each.begin, each.end) not in own)]
        begin, end = self._block(mine[0])
        try:
            return of_block(known, begin, end)
        except HoleError:
            return self.block_checksum(mine[0].name, begin, end)

    def block_checksum(self, name: str, begin: int, end: int) -> int:
        """That of bytes ``begin:end`` of a tensor, which are read."""
        stored = self.tensors[name]
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        super()._fill(stored, buffer, stored.begin + begin)
        return fragment(name, begin, buffer.numpy().data).checksum

    def damaged(self, advance: Callable[[int], None] | None = None) -> Iterable[str]:
        """What is wrong with the tensors, each read once, a block at a time.

        Args:
            advance: is told how many bytes were read.
        """
        for name, tensor in self.tensors.items():
            for number, (begin, end) in enumerate(blocks(tensor.nbytes)):
                if advance is not None:
                    advance(end - begin)
                if self.block_checksum(name, begin, end) != self._expected[name][number]:
                    yield f"{tensor} is damaged: bytes {begin} to {end} of it are not what was saved"
