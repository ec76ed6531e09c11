"""What lies in mapped files is read from the files; and from memory where that is not so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fsdp._formats.file_mappings import FileMappings
from fsdp._formats.stitched import StitchedReader, stitched

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not tell")


def mapped(path: Path, values: torch.Tensor) -> torch.Tensor:
    torch.save(values, path)
    found: torch.Tensor = torch.load(path, mmap=True, weights_only=True)
    return found


def test_a_part_of_a_mapped_file_is_read_from_it(tmp_path: Path) -> None:
    found, target = mapped(tmp_path / "values.pt", torch.arange(9000.0)), torch.empty(5)
    assert FileMappings().read(found[8000:8005], target)
    assert torch.equal(target, torch.arange(8000.0, 8005.0))


def test_other_memory_is_not(tmp_path: Path) -> None:
    found = mapped(tmp_path / "values.pt", torch.arange(9.0))
    files = FileMappings()
    assert not files.read(found.clone(), torch.empty(9))
    assert not files.read(torch.arange(1 << 20), torch.empty(1 << 20, dtype=torch.int64))


def test_a_file_that_has_taken_the_place_of_the_mapped_one_is_not_read(tmp_path: Path) -> None:
    found = mapped(tmp_path / "values.pt", torch.arange(9.0))
    reader = StitchedReader("values", [stitched("values", found)])
    torch.save(torch.zeros(9), tmp_path / "other.pt")
    os.replace(tmp_path / "other.pt", tmp_path / "values.pt")
    target = torch.empty(9)
    reader.read("values", target)
    assert torch.equal(target, torch.arange(9.0))


def test_a_file_that_was_cut_short_is_an_error_and_no_crash(tmp_path: Path) -> None:
    found = mapped(tmp_path / "values.pt", torch.arange(90000.0))
    files = FileMappings()
    os.truncate(tmp_path / "values.pt", 1000)
    with pytest.raises(ValueError, match=r"values.pt has become too short"):
        files.read(found, torch.empty(90000))


def test_values_are_cast_on_their_way(tmp_path: Path) -> None:
    found = mapped(tmp_path / "values.pt", torch.arange(9.0))
    reader, target = StitchedReader("values", [stitched("values", found)]), torch.empty(4, dtype=torch.float64)
    reader.read("values", target, 3)
    assert torch.equal(target, torch.arange(3.0, 7.0, dtype=torch.float64))


def test_a_closed_reader_says_so(tmp_path: Path) -> None:
    found = mapped(tmp_path / "values.pt", torch.arange(9.0))
    reader = StitchedReader("some values", [stitched("values", found)])
    reader.close()
    assert reader.tensors["values"].nbytes == 36
    with pytest.raises(ValueError, match="some values is closed"):
        reader.read("values", torch.empty(9))
