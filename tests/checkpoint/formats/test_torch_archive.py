"""Files of `torch.save` looked at without loading them: places of tensors, ranges, and objects that are not made."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp.checkpoint.formats.source import StridedTensor, TensorReader
from fsdp.checkpoint.formats.torch_file import Foreign, TorchArchive, is_torch_file
from tests.helpers.checkpoint_models import flip
from tests.helpers.damaged_files import Touch
from tests.helpers.equality import assert_same
from tests.helpers.safetensors_files import counted_reads


def with_attribute() -> Tensor:
    made = torch.ones(3)
    made.mark = "seen"  # type: ignore[attr-defined]
    return made


TENSORS: dict[str, Tensor] = {
    "contiguous": torch.arange(12.0).view(3, 4),
    "16 bits": torch.randn(5).bfloat16(),
    "8 bits": torch.randn(5).to(torch.float8_e4m3fn),
    "unsigned": torch.arange(3).to(torch.uint16),
    "bits": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex64),
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "every other": torch.arange(20.0)[3:9:2],
    "columns": torch.arange(20.0).view(4, 5)[:, 1:3],
    "expanded": torch.ones(2).expand(3, 2),
    "parameter": nn.Parameter(torch.ones(2)),
    "with an attribute": with_attribute(),
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> TorchArchive:
    path = tmp_path_factory.mktemp("torch") / "all.pt"
    torch.save(TENSORS, path)
    return TorchArchive(str(path))


@pytest.mark.parametrize("name", list(TENSORS))
def test_every_kind_of_tensor_is_read(archive: TorchArchive, name: str) -> None:
    reader, expected = TensorReader("file", archive.content), TENSORS[name].detach()
    found = torch.empty(expected.shape, dtype=expected.dtype)
    reader.read(name, found)
    assert_same(found, expected, name)


@pytest.mark.parametrize("name", list(TENSORS))
def test_every_range_is_read(archive: TorchArchive, name: str) -> None:
    reader, flat = TensorReader("file", archive.content), TENSORS[name].detach().reshape(-1)
    for start in range(flat.numel()):
        for stop in range(start + 1, flat.numel() + 1):
            part = torch.empty(stop - start, dtype=flat.dtype)
            reader.read(name, part, start)
            assert_same(part, flat[start:stop], f"{name}[{start}:{stop}]")


def test_a_range_costs_as_many_bytes_as_it_has(archive: TorchArchive) -> None:
    reader = TensorReader("file", archive.content)
    with counted_reads() as sizes:
        reader.read("contiguous", torch.empty(5), 3)
        reader.read("columns", torch.empty(2), 2)  # a row
    assert sizes == [20, 8]


# What else is in a file


def test_containers_and_numbers_are_as_they_were(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "counts": Counter((2, 2, 3)),
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list, {1: [2]}),
        "nested": [(1, 2.5, None, True, "text"), {3: b"bytes"}],
        "set": {1, 2},
        "frozen": frozenset((1, 2)),
        "size": torch.Size((2, 3)),
        "dtype": torch.float16,
        "complex": 1 + 2j,
    }
    torch.save(saved, tmp_path / "all.pt")
    assert TorchArchive(str(tmp_path / "all.pt")).content == saved


def test_nothing_is_executed(tmp_path: Path) -> None:
    torch.save({"bad": Touch(str(tmp_path / "made")), "good": torch.ones(2)}, tmp_path / "all.pt")
    found = TorchArchive(str(tmp_path / "all.pt")).content
    assert not (tmp_path / "made").exists()
    assert isinstance(found["bad"], Foreign)
    assert found["bad"].origin.endswith(".open")
    assert isinstance(found["good"], StridedTensor)


class Listing(list):  # type: ignore[type-arg]
    pass


def test_objects_of_other_classes_keep_nobody_from_the_rest(tmp_path: Path) -> None:
    saved = {"args": argparse.Namespace(a=1), "list": Listing([1]), "sparse": torch.eye(2).to_sparse(), "x": 1}
    torch.save(saved, tmp_path / "all.pt")
    found = TorchArchive(str(tmp_path / "all.pt")).content
    origins = {key: value.origin for key, value in found.items() if isinstance(value, Foreign)}
    assert origins["args"] == "argparse.Namespace"
    assert found["args"].state == {"a": 1}
    assert origins["list"] == f"{__name__}.Listing"
    assert origins.keys() == {"args", "list", "sparse"}
    assert found["x"] == 1


class Outer:
    class Inner:
        value = 3

    class Kind(enum.Enum):
        ONE = 1


def test_classes_inside_of_others_are_called_by_their_names(tmp_path: Path) -> None:
    torch.save({"inner": Outer.Inner(), "member": Outer.Kind.ONE, "x": 1}, tmp_path / "all.pt")
    found = TorchArchive(str(tmp_path / "all.pt")).content
    assert found["inner"].origin == f"{__name__}.Outer.Inner"
    assert getattr(found["member"], "origin", "").startswith(f"{__name__}.Outer.Kind")
    assert found["x"] == 1


class Weighted(Tensor):
    """A tensor of a program's own."""


def test_a_tensor_of_another_class_says_what_it_is_made_of(tmp_path: Path) -> None:
    tensor = torch.ones(3).as_subclass(Weighted)
    tensor.weight = torch.arange(2.0)  # type: ignore[attr-defined]
    torch.save({"x": tensor}, tmp_path / "all.pt")
    found = TorchArchive(str(tmp_path / "all.pt")).content["x"]
    assert isinstance(found, Foreign)
    assert found.origin == f"{__name__}.Weighted"
    assert isinstance(found.fields["weight"], StridedTensor)


def test_a_conjugate_is_not_taken_for_its_memory(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "all.pt")
    assert isinstance(TorchArchive(str(tmp_path / "all.pt")).content["x"], Foreign)


# Damage


def places(archive: TorchArchive) -> range:
    """The bytes of some tensor."""
    record = next(record for name, record in archive.records.items() if name.endswith("data/0"))
    return range(record.begin, record.begin + record.nbytes)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(9.0)}, tmp_path / "all.pt")
    archive = TorchArchive(str(tmp_path / "all.pt"))
    done: list[int] = []
    assert not list(archive.damaged(done.append))
    assert sum(done) == sum(record.nbytes for record in archive.records.values())
    flip(tmp_path / "all.pt", places(archive)[13])
    (problem,) = TorchArchive(str(tmp_path / "all.pt")).damaged(done.append)
    assert problem.endswith("all.pt is damaged: all/data/0 in it does not match its checksum")


def test_files_without_checksums_say_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(9.0)}, tmp_path / "all.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    archive = TorchArchive(str(tmp_path / "all.pt"))
    assert not archive.has_checksums
    assert not list(archive.damaged(lambda nbytes: None))
    assert archive.content["x"].shape == (9,)


@pytest.mark.parametrize("size", [0, 10, 200, -1])
def test_truncated_files_are_errors(tmp_path: Path, size: int) -> None:
    path = tmp_path / "all.pt"
    torch.save({"x": torch.arange(9.0)}, path)
    os.truncate(path, size % path.stat().st_size)
    with pytest.raises(ValueError, match=r"all\.pt is not a file of torch.save, or is truncated or damaged"):
        TorchArchive(str(path))


def test_a_pickle_that_was_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    torch.save({"x": torch.arange(9.0)}, path)
    record = TorchArchive(str(path)).records["all/data.pkl"]
    flip(path, record.begin + 20)
    with pytest.raises(ValueError, match=r"all/data\.pkl in it does not match its checksum"):
        TorchArchive(str(path))


def test_a_file_from_before_torch_1_6_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    torch.save({"x": torch.arange(9.0)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"all\.pt has the format of torch before 1\.6, .* save it again"):
        TorchArchive(str(path))


# Which files are such


@pytest.mark.parametrize("is_old", [False, True])
def test_files_are_known_whole_or_cut_short(tmp_path: Path, is_old: bool) -> None:
    path = tmp_path / "all.pt"
    torch.save({"x": torch.arange(9.0)}, path, _use_new_zipfile_serialization=not is_old)
    assert is_torch_file(path)
    os.truncate(path, 200)
    assert is_torch_file(path)


def test_other_files_are_not(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", x=np.arange(3))  # a zip archive as well
    (tmp_path / "pickle").write_bytes(pickle.dumps({"x": 1}))
    (tmp_path / "empty").touch()
    for name in ("arrays.npz", "pickle", "empty", "missing", "."):
        assert not is_torch_file(tmp_path / name), name
