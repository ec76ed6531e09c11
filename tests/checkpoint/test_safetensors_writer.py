"""Where tensors are to lie in safetensors files, and when the disk stores them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from fsdp.checkpoint.safetensors import Entry, PlannedFile, create, plan, write_parts
from tests.helpers.equality import assert_same

_ODD_AND_EVEN = [(3,), (16,), (5, 5), (64, 3), (), (1024,), (7, 16), (0,)]


def test_tensors_of_whole_cache_lines_begin_at_one_whatever_lies_beside_them() -> None:
    file, entries = _planned(_ODD_AND_EVEN, torch.float32)
    whole = [entry.name for entry in entries if entry.nbytes % 64 == 0]
    assert len(whole) == 5
    assert all(file.begins[name] % 64 == 0 for name in whole)


def test_every_tensor_is_aligned_for_its_dtype() -> None:
    dtypes = [torch.uint8, torch.float64, torch.bfloat16, torch.float32]
    entries = [
        Entry(f"{number}", dtypes[number % 4], torch.Size(shape)) for number, shape in enumerate(2 * _ODD_AND_EVEN)
    ]
    (file,) = plan(entries, "model")
    assert all(file.begins[entry.name] % entry.dtype.itemsize == 0 for entry in entries)


def test_nothing_lies_between_tensors() -> None:
    file, entries = _planned(_ODD_AND_EVEN, torch.float32)
    reached = len(file.head)
    for entry in sorted(entries, key=lambda each: (file.begins[each.name], each.nbytes)):
        assert file.begins[entry.name] == reached
        reached += entry.nbytes
    assert reached == file.nbytes


def test_a_tensor_of_more_dimensions_than_can_be_read_is_not_written() -> None:
    plan([Entry("x", torch.float32, torch.Size([1] * 64))], "model")
    with pytest.raises(ValueError, match="x has 65 dimensions, but a file supports at most 64"):
        plan([Entry("x", torch.float32, torch.Size([1] * 65))], "model")


def test_a_name_that_a_header_uses_is_refused() -> None:
    with pytest.raises(ValueError, match="the name __metadata__ is reserved in safetensors files"):
        plan([Entry("__metadata__", torch.float32, torch.Size([2]))], "model")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such hint")
@pytest.mark.parametrize("error", [None, OSError("no such hint here")])
def test_the_disk_begins_to_store_large_blocks_at_once(tmp_path: Path, error: OSError | None) -> None:
    values = {"large": torch.randn(3 << 18), "small": torch.randn(5)}  # 3 MiB
    entries = [Entry(name, each.dtype, each.shape, each) for name, each in values.items()]
    (file,) = plan(entries, "model")
    create(str(tmp_path), file)
    with mock.patch("os.posix_fadvise", side_effect=error) as advise:
        write_parts(str(tmp_path), [file], {entry.name: entry for entry in entries})
    ((_, begin, count, _), _), *others = advise.call_args_list
    assert (begin, count, others) == (file.begins["large"], 3 << 20, [])
    assert_same(load_file(tmp_path / file.name), values)


def _planned(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[PlannedFile, list[Entry]]:
    entries = [Entry(f"tensor{number}", dtype, torch.Size(shape)) for number, shape in enumerate(shapes)]
    (file,) = plan(entries, "model")
    return file, entries
