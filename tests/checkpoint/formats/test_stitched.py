"""Tensors in pieces, in files and in memory, that are read by ranges as one; and files that change in the meantime."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fsdp.checkpoint.formats.source import Piece, Stitched, TensorReader
from fsdp.checkpoint.formats.torch_file import TorchArchive
from tests.helpers.safetensors_files import counted_reads

VALUES = torch.arange(24.0)


def in_file(path: Path, values: torch.Tensor) -> Piece:
    torch.save(values, path)
    return Piece.of(TorchArchive(str(path)).content)


def assert_every_range_is_read(reader: TensorReader, name: str, expected: torch.Tensor) -> None:
    flat = expected.reshape(-1)
    for start in range(flat.numel()):
        for stop in range(start + 1, flat.numel() + 1):
            part = torch.empty(stop - start, dtype=flat.dtype)
            reader.read(name, part, start)
            assert torch.equal(part, flat[start:stop]), (start, stop)


def test_every_range_of_pieces_in_files_and_in_memory_is_read(tmp_path: Path) -> None:
    turned = VALUES[10:16].view(2, 3).t().contiguous().t()  # lies in another order than that of its elements
    pieces = (
        in_file(tmp_path / "first.pt", VALUES[:10]),
        in_file(tmp_path / "turned.pt", turned),
        Piece.of(torch.empty(0)),
        Piece.of(turned.new_tensor(VALUES[16:20].tolist()).view(2, 2)),
        in_file(tmp_path / "more.pt", VALUES[20:]),
    )
    reader = TensorReader("all", {"all": Stitched(pieces, 0, (4, 6))})
    assert_every_range_is_read(reader, "all", VALUES)


def test_a_whole_is_in_memory_of_its_own() -> None:
    pieces = (Piece.of(VALUES, 4), Piece.of(VALUES[8:], 1))
    found = Stitched(pieces, 2, (3,)).whole()
    assert torch.equal(found, torch.tensor([2.0, 3.0, 8.0]))
    assert found.untyped_storage().nbytes() == 12


def test_only_what_is_wanted_of_a_file_is_read(tmp_path: Path) -> None:
    pieces = (in_file(tmp_path / "0.pt", VALUES), in_file(tmp_path / "1.pt", VALUES))
    reader = TensorReader("two", {"two": Stitched(pieces, 0, (48,))})
    with counted_reads() as sizes:
        reader.read("two", torch.empty(5), 22)
    assert sizes == [8, 12]


# Files that change


def test_a_file_that_has_taken_the_place_of_another_is_not_read(tmp_path: Path) -> None:
    reader = TensorReader("values", {"x": in_file(tmp_path / "x.pt", VALUES).tensor})
    torch.save(torch.zeros(24), tmp_path / "other.pt")
    os.replace(tmp_path / "other.pt", tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt was changed or replaced after it was opened: start again"):
        reader.read("x", torch.empty(24))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's list of open files")
def test_a_closed_reader_has_no_open_files_until_it_reads_again(tmp_path: Path) -> None:
    def is_open() -> bool:
        paths = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
        return os.path.realpath(tmp_path / "x.pt") in paths

    reader, target = TensorReader("values", {"x": in_file(tmp_path / "x.pt", VALUES).tensor}), torch.empty(24)
    assert not is_open()
    reader.read("x", target)
    assert is_open()
    reader.close()
    assert not is_open()
    reader.read("x", target)
    assert torch.equal(target, VALUES)
    reader.close()
