"""The safetensors format: files of the `safetensors` package are read to the bit, and corrupt ones are named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fsdp.checkpoint.safetensors import DTYPES, SafetensorsFiles

TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "half": torch.linspace(-1, 1, 7).bfloat16(),
}


def read(files: SafetensorsFiles, name: str, dtype: torch.dtype | None = None) -> Tensor:
    stored = files.tensors[name]
    found = torch.empty(stored.shape, dtype=dtype or stored.dtype)
    files.read(name, found)
    return found


def assert_holds(path: Path, expected: dict[str, Tensor]) -> None:
    with SafetensorsFiles(path) as files:
        assert set(files.tensors) == set(expected)
        for name, value in expected.items():
            assert torch.equal(read(files, name), value)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# What the package has written


def test_tensors_are_read_to_the_bit_and_metadata_as_strings_by_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert_holds(tmp_path / "a.safetensors", TENSORS)
    assert SafetensorsFiles(tmp_path / "a.safetensors").metadata == {"format": "pt"}


def written_by_the_package() -> list[torch.dtype]:
    from safetensors.torch import _TYPES

    return [dtype for dtype in DTYPES.values() if dtype in _TYPES.values()]


@pytest.mark.parametrize("dtype", written_by_the_package(), ids=str)
def test_every_dtype_is_read_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(24, dtype=torch.uint8)
    value = numbers.bool() if dtype == torch.bool else numbers.view(dtype)
    save_file({"x": value}, tmp_path / "x.safetensors")
    with SafetensorsFiles(tmp_path / "x.safetensors") as files:
        assert files.tensors["x"].dtype == dtype
        assert torch.equal(bits(read(files, "x")), bits(value))


def test_no_dtype_of_the_package_is_left_out() -> None:
    from safetensors.torch import _TYPES

    assert set(_TYPES) <= set(DTYPES)


# Ranges


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_range_is_read_into_any_place_and_dtype(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    numel = data.draw(st.integers(0, 50))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    stored, wanted = (data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])) for _ in range(2))
    value = torch.randn(numel).to(stored)
    path = tmp_path_factory.mktemp("ranges") / "x.safetensors"
    save_file({"before": torch.ones(3), "x": value}, path)
    memory = torch.full((60,), -7.0, dtype=wanted)
    with SafetensorsFiles(path) as files, mock.patch("fsdp.checkpoint.checksums.BLOCK_BYTES", 24):
        files.read("x", memory[5 : 5 + stop - start], start)
    expected = torch.full((60,), -7.0, dtype=wanted)
    expected[5 : 5 + stop - start] = value[start:stop].to(wanted)
    assert torch.equal(memory, expected)


def test_values_of_the_stored_dtype_go_straight_to_their_place(tmp_path: Path) -> None:
    save_file({"x": torch.arange(100.0)}, tmp_path / "x.safetensors")
    target = torch.empty(100)
    addresses = []

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        addresses.extend(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() for buffer in buffers)
        return os.readv(fd, buffers)

    with SafetensorsFiles(tmp_path / "x.safetensors") as files, mock.patch("os.preadv", preadv):
        files.read("x", target)
    assert addresses == [target.data_ptr()]


def test_other_dtypes_are_cast_in_pieces_of_4_mib(tmp_path: Path) -> None:
    value = torch.arange(3_000_000.0)
    save_file({"x": value}, tmp_path / "x.safetensors")
    sizes = []

    def preadv(fd: int, buffers: list[Any], offset: int, do: Callable[..., int] = os.preadv) -> int:
        sizes.append(len(buffers[0]))
        return do(fd, buffers, offset)

    with SafetensorsFiles(tmp_path / "x.safetensors") as files, mock.patch("os.preadv", preadv):
        found = read(files, "x", torch.float64)
    assert torch.equal(found, value.double())
    assert sizes == [4 << 20, 4 << 20, 12_000_000 - (8 << 20)]


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    found = torch.empty(3, 4, dtype=torch.float64)
    with SafetensorsFiles(tmp_path / "a.safetensors") as files, torch.device("meta"):
        files.read("matrix", found)
    assert torch.equal(found, TENSORS["matrix"].double())


def test_a_read_that_comes_in_parts_is_completed(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")

    def short(fd: int, buffers: list[Any], offset: int, do: Callable[..., int] = os.preadv) -> int:
        return do(fd, [buffers[0][:5]], offset)

    with mock.patch("os.preadv", short):
        assert_holds(tmp_path / "a.safetensors", TENSORS)


@pytest.mark.parametrize(
    ("target", "start"),
    [(torch.empty(13), 0), (torch.empty(2), 11), (torch.empty(2), -1), (torch.empty(4, 3).t(), 0)],
    ids=["too long", "behind the end", "before the beginning", "not contiguous"],
)
def test_a_range_that_is_not_there_is_refused(tmp_path: Path, target: Tensor, start: int) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    with SafetensorsFiles(tmp_path / "a.safetensors") as files, pytest.raises(ValueError, match=r"matrix in .*a\.safe"):
        files.read("matrix", target, start)


# Several files


def save_folder(folder: Path) -> dict[str, Tensor]:
    """Two files with an index; the second has a tensor that the index does not name."""
    first, second = {"a": torch.ones(3), "b": torch.zeros(2)}, {"c": torch.arange(4.0), "spare": torch.ones(1)}
    folder.mkdir(exist_ok=True)
    save_file(first, folder / "one.safetensors")
    save_file(second, folder / "two.safetensors")
    places = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return first | {"c": second["c"]}


@pytest.mark.parametrize("path", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_an_index_says_which_tensors_are_meant(tmp_path: Path, path: str) -> None:
    assert_holds(tmp_path / path, save_folder(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_a_folder_with_one_file_is_that_file(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert_holds(tmp_path, TENSORS)


def test_a_whole_model_goes_before_other_files(tmp_path: Path) -> None:
    save_folder(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds(tmp_path, TENSORS)


def test_a_folder_with_several_files_and_no_index_or_with_none_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"several safetensors files, one\.safetensors, two\.safetensors: pass one"):
        SafetensorsFiles(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no \.safetensors file"):
        SafetensorsFiles(tmp_path / "empty")


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json names .*two\.safetensors, which does not exist, for c"):
        SafetensorsFiles(tmp_path)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path)
    save_file({"d": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"index\.json lists c in two\.safetensors, which does not contain it"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.safetensors\.index\.json is no index"):
        SafetensorsFiles(tmp_path)


def test_the_digest_is_of_headers_and_not_of_values_or_folders(tmp_path: Path) -> None:
    def digest(folder: str, **tensors: Tensor) -> str:
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "x.safetensors")
        return SafetensorsFiles(tmp_path / folder).digest

    first = digest("a", x=torch.ones(3))
    assert digest("b", x=torch.zeros(3)) == first
    assert digest("c", x=torch.ones(4)) != first
    assert digest("d", x=torch.ones(3).int()) != first
    assert digest("e", y=torch.ones(3)) != first


# Corrupt files


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_has_any_json_spaces_and_escapes(tmp_path: Path) -> None:
    text = '\t{ "__metadata__" :\r{"a" : "}{,\\"" , "b":""},\n"\\u00e9\\"" :  %s , "": %s } \n'
    header = text % (json.dumps(entry(0, 4, [1]), indent=2), json.dumps(entry(4, 12)))
    path = write(tmp_path / "x", header.encode(), torch.arange(3.0).numpy().tobytes())
    assert_holds(path, {'\u00e9"': torch.tensor([0.0]), "": torch.tensor([1.0, 2.0])})
    assert SafetensorsFiles(path).metadata == {"a": '}{,"', "b": ""}


def test_as_many_dimensions_as_may_be_saved_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones([1] * 63 + [3])}, tmp_path / "x")
    assert_holds(tmp_path / "x", {"x": torch.ones([1] * 63 + [3])})


def test_a_file_by_hand_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"x": entry(4, 12), "y": entry(0, 4, [])}, torch.arange(3.0).numpy().tobytes())
    assert_holds(path, {"y": torch.tensor(0.0), "x": torch.tensor([1.0, 2.0])})


HEADERS = {
    "no JSON": (b"{", "header cannot be read"),
    "no text": (b"\xff\xfe", "header cannot be read"),
    "deep": (b"[" * 100_000, "header cannot be read"),
    "no object": ([1], "header cannot be read: there is no { at character 0"),
    "twice": (b'{"x": %s, "x": {}}' % json.dumps(entry(0, 8)).encode(), "x is in it twice"),
    "a key twice": (b'{"x": {"dtype": "F32", "dtype": "I32"}}', r"not unique: \['dtype', 'dtype'\]"),
    "metadata": ({"__metadata__": {"a": 1}}, "there is no string for a at character 23"),
    "metadata of another kind": ({"__metadata__": ["a"]}, "there is no { at character 17"),
    "a number for a name": (b"{1: 2}", "there is no name, which is a string, at character 1"),
    "a comma too many": (b'{"x": %s,}' % json.dumps(entry(0, 8)).encode(), "there is no name"),
    "more behind it": (b"{} {}", "there is more after its end, at character 3"),
    "no end": (b'{"x": %s' % json.dumps(entry(0, 8)).encode(), r"there is no , or } at character \d+"),
    "no entry": ({"x": 3}, r"x has no dtype, shape and two data_offsets in at most 8192 characters, but '3}'"),
    "an entry in an entry": ({"x": {"dtype": {}}}, r"x has no dtype, shape and two data_offsets in at most"),
    "many dimensions": ({"x": entry(0, 4, [1] * 65)}, r"x in .* has 65 dimensions, but at most 64 are supported"),
    "no shape": ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, r"x in .* has no dtype, shape"),
    "one offset": ({"x": entry(0, 8) | {"data_offsets": [0]}}, r"x in .* has no dtype, shape and two data_offsets"),
    "unknown dtype": ({"x": entry(0, 8, dtype="F7")}, r"x in .* is of dtype 'F7', which torch .* does not have"),
    "dtype of another kind": ({"x": entry(0, 8, dtype=["F32"])}, r"x in .* is of dtype \['F32'\]"),
    "negative shape": ({"x": entry(0, 8, [-2])}, r"x in .* has shape \[-2\]"),
    "fractional shape": ({"x": entry(0, 8, [2.0])}, r"x in .* has shape \[2\.0\]"),
    "true shape": ({"x": entry(0, 4, [True])}, r"x in .* has shape \[True\]"),
    "shape of another kind": ({"x": entry(0, 8, 2)}, r"x in .* has shape 2 "),
    "negative offset": ({"x": entry(-8, 0)}, r"x in .* data_offsets \[-8, 0\]"),
    "turned round": ({"x": entry(8, 0)}, r"x in .* has -8 bytes, and \[2\] of F32 needs 8"),
    "too few bytes": ({"x": entry(0, 4)}, r"x in .* has 4 bytes, and \[2\] of F32 needs 8"),
    "overflowing": ({"x": entry(0, 0, [1 << 40, 1 << 40])}, r"x in .* has 0 bytes"),
    "overlap": ({"x": entry(0, 8), "y": entry(4, 12)}, r"y in .* overlaps x"),
    "same place": ({"x": entry(0, 8), "y": entry(0, 8)}, r"y in .* overlaps x"),
    "hole": ({"x": entry(4, 12)}, r"x in .* does not follow the header"),
    "out of range": ({"x": entry(0, 8), "y": entry(8, 16)}, r"truncated: y ends at byte \d+, and the file at \d+"),
    "more data": ({"x": entry(0, 4, [])}, r"has 8 bytes after x that belong to no tensor"),
}


@pytest.mark.parametrize(("header", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_a_corrupt_file_is_refused_and_named(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, bytes(12))
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFiles(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 8, 30])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.safetensors is not a complete safetensors file"):
        SafetensorsFiles(path)


def test_a_header_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(ValueError, match=r"huge\.safetensors .* \(at most 100000000\)"):
        SafetensorsFiles(path)


def test_an_index_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, 100_000_001)
    with pytest.raises(ValueError, match=r"index\.json has 100000001 bytes, but at most 100000000 are supported"):
        SafetensorsFiles(path)


def test_a_file_that_is_cut_off_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    with SafetensorsFiles(path) as files:
        read(files, next(iter(TENSORS)))
        os.truncate(path, path.stat().st_size - 8)
        last = max(files.tensors.values(), key=lambda found: found.tensor.begin + found.nbytes)
        with pytest.raises(ValueError, match=r"x\.safetensors is truncated: it ends before byte"):
            read(files, last.name)
    save_folder(tmp_path / "run")
    with SafetensorsFiles(tmp_path / "run") as files:
        os.truncate(tmp_path / "run" / "one.safetensors", 8)
        with pytest.raises(ValueError, match=r"one\.safetensors was changed or replaced"):
            read(files, "a")


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        SafetensorsFiles(tmp_path / "nothing.safetensors")
