"""Files that are damaged, or made to do harm: an error that names the file, soon, and with little memory."""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fsdp
from fsdp import checkpoint
from fsdp.checkpoint.cli import main
from fsdp.checkpoint.formats.open_source import open_source
from fsdp.checkpoint.formats.torch_file import TorchArchive, unpickled
from fsdp.checkpoint.safetensors import SafetensorsFiles
from tests.checkpoint.formats.test_fsdp1 import save as save_fsdp1
from tests.helpers.convert_formats import converted, saved
from tests.helpers.damaged_files import (
    Draw,
    assert_read_or_refused,
    bounded,
    damage,
    damage_header,
    damage_index,
    damage_manifest,
    damage_pickle,
    everything_in,
    manifest_of,
    memory_bounded,
    seal,
    zipped_with,
)
from tests.helpers.legacy_sources import RECORDED
from tests.helpers.ranks import RankPool
from tests.helpers.safetensors_files import save as save_safetensors
from tests.helpers.strange_states import load_something, state_dicts

FEW = settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck), derandomize=True)

# Random damage


@functools.cache
def original(folder: Path) -> dict[str, Any]:
    return everything_in(folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ours") / "run", max_file_bytes=300)


@pytest.fixture(scope="module")
def others(ours: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return of_all_formats(ours, ranks, tmp_path_factory.mktemp("others"))


def of_all_formats(ours: Path, ranks: RankPool, folder: Path) -> dict[str, Path]:
    """Make checkpoints of all formats, each by itself in a folder."""
    for word in ("safetensors", "dcp", "torch", "fairscale", "fsdp1"):
        (folder / word).mkdir()
    shutil.copytree(ours, folder / "fsdp" / "run")
    converted(ours, folder / "safetensors" / "run", "--to", "safetensors", "--max-file-bytes", "300")
    converted(ours, folder / "dcp" / "run", "--to", "dcp")
    converted(ours, folder / "torch" / "run.pt", "--to", "torch")
    shutil.copytree(RECORDED / "optim-flat-2", folder / "fairscale" / "run")
    (folder / "fsdp1" / "run").mkdir()
    ranks(2).run(save_fsdp1, folder / "fsdp1" / "run", "sharded", {})
    for other in [*folder.rglob("whole.pt"), *folder.rglob("full*.pt"), *folder.rglob("truth*.pt")]:
        other.unlink()
    return {each.name: each for each in folder.iterdir()}


@FEW
@given(data=st.data())
def test_a_damaged_checkpoint_of_ours_gives_what_was_saved_or_an_error(
    ours: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(ours, folder)
    damage(folder, data.draw)
    expected = original(ours)
    assert_read_or_refused(folder, lambda found: found["tensors"] == expected["tensors"], "fsdp")


DAMAGES = [
    *((word, damage) for word in ("safetensors", "dcp", "torch", "fairscale", "fsdp1")),
    *((word, damage_pickle) for word in ("torch", "fairscale", "fsdp1")),
    ("fsdp", damage_manifest),
    ("safetensors", damage_index),
    ("safetensors", damage_header),
]


@FEW
@given(data=st.data())
@pytest.mark.parametrize(("word", "change"), DAMAGES)
def test_damaged_files_are_read_or_refused_also_with_the_right_checksums(
    others: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    word: str,
    change: Callable[[Path, Draw], None],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / word
    shutil.copytree(others[word], folder)
    change(folder, data.draw)
    assert_read_or_refused(next(folder.iterdir()), lambda _: True, word)


# State dicts


@FEW
@given(data=st.data())
def test_strange_state_dicts_are_loaded_or_refused_and_then_nothing_was_changed(data: st.DataObject) -> None:
    with state_dicts() as loads:
        load_something(loads, data.draw)


# States of random number generators


def _numpy(change: Callable[[list[Any]], None]) -> Callable[[Any], None]:
    return lambda states: change(states["numpy"])


def _torch_position(states: Any) -> None:
    """All numbers are left from the last one on: torch takes it, and reads behind its memory."""
    kind, shape, text = states["torch"]["~tensor"]
    data = bytearray(base64.b64decode(text))
    struct.pack_into("<iiQ", data, 8, 624, 1, 624)
    states["torch"]["~tensor"] = [kind, shape, base64.b64encode(data).decode()]


def _python_position(states: Any) -> None:
    states["python"]["~tuple"][1]["~tuple"][-1] = 0  # which no generator has after its seed


STATES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "numpy's position": ("numpy's .* its position is 999999", _numpy(lambda state: state.__setitem__(2, 999_999))),
    "a negative one": ("numpy's .* its position is -1", _numpy(lambda state: state.__setitem__(2, -1))),
    "numpy's key": ("numpy's .* 624 numbers", _numpy(lambda state: state.__setitem__(1, {"~bytes": "AAAA"}))),
    "numpy's kind": ("numpy's .* the kind MT19937", _numpy(lambda state: state.__setitem__(0, "PCG64"))),
    "numpy's number kept": ("numpy's .* not a number", _numpy(lambda state: state.__setitem__(4, "x"))),
    "torch's position": ("torch's .* 624 of its numbers are left from position 624 on", _torch_position),
    "torch's length": ("torch's", lambda states: states.update(torch={"~tensor": ["U8", [2], "AAA="]})),
    "python's position": ("python's .* position", _python_position),
    "none of numpy's": ("do not include Python's, NumPy's and torch's", lambda states: states.pop("numpy")),
}


@pytest.mark.parametrize("case", STATES)
def test_a_generator_s_state_that_would_crash_is_an_error_before_anything_is_set(tmp_path: Path, case: str) -> None:
    message, change = STATES[case]
    fsdp.save(tmp_path / "run", torch.nn.Linear(2, 2))
    manifest = manifest_of(tmp_path / "run")
    change(manifest["generators"][0])
    seal(tmp_path / "run", manifest)
    model = torch.nn.Linear(2, 2)
    before, drawn = model.weight.detach().clone(), np.random.get_state()[1].copy()
    with pytest.raises(ValueError, match=message) as caught:
        fsdp.load(tmp_path / "run", model)
    assert str(tmp_path / "run") in str(caught.value)
    assert torch.equal(model.weight, before)
    assert np.array_equal(np.random.get_state()[1], drawn)
    assert not fsdp.load(tmp_path / "run", model, generators=False).has_generators


# Manifests that are sealed, and make no sense


def _drop(*keys: str) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        del manifest[keys[-1]]

    return change


def _put(value: Any, *keys: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


MANIFESTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "no ranks": ("world_size is 0", _put(0, "world_size")),
    "states of other ranks": ("there are not 1 states of generators", _put([], "generators")),
    "no model": ("model should have files and checksums, but is None", _drop("model")),
    "a model that is a list": ("model should have files", _put([], "model")),
    "two numbers of a file": ("instead of its size", _put([1, 2], "model", "files", "model.safetensors")),
    "a negative size": ("instead of its size", _put([-1, 2, 3], "model", "files", "model.safetensors")),
    "a size beyond all": ("instead of its size", _put([10**30, 2, 3], "model", "files", "model.safetensors")),
    "a file elsewhere": ("'../../x', which is not a name", _put([1, 1, 1], "model", "files", "../../x")),
    "no extra state": ("extra is None", _drop("extra")),
    "a tensor without checksums": (
        "its checksums are missing or",
        _put("", "model", "crc32", "wide.weight"),
    ),
    "checksums without a tensor": ("has no tensor x", _put("", "model", "crc32", "x")),
    "checksums in other digits": ("eight digits", _put("+1234567", "model", "crc32", "wide.weight")),
    "values of no kind": ("'values': unknown kind of value '~x'", _put({"~x": 1}, "values")),
    "no groups": ("rest of the optimizer's state is", _drop("optimizer_rest", "groups")),
    "a group without names": ("None for the names", _drop("optimizer_rest", "groups", 0, "params")),  # type: ignore[arg-type]
    "a parameter without state": ("no state for 'x'", _put(["x"], "optimizer_rest", "groups", 0, "params")),
    "a state of no kind": ("'step' of 'wide.weight' is", _put(["x"], "optimizer_rest", "state", "wide.weight", "step")),
    "a state without a tensor": (
        "no tensor for the optimizer's state 'x'",
        _put(["elements", "F32"], "optimizer_rest", "state", "wide.weight", "x"),
    ),
    "a number beyond all": ("'step' of", _put(["number", "I8", 999], "optimizer_rest", "state", "thin", "step")),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_sealed_manifest_that_makes_no_sense_is_an_error_that_says_why(ours: Path, tmp_path: Path, case: str) -> None:
    message, change = MANIFESTS[case]
    saved(tmp_path / "run")
    manifest = manifest_of(tmp_path / "run")
    change(manifest)
    seal(tmp_path / "run", manifest)
    for read in (checkpoint.verify, everything_in):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / "run")
        assert str(tmp_path / "run") in str(caught.value)


# What asks for much time or memory


def _pickle_of(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def _nested(kind: str, depth: int = 80) -> Any:
    """Each one holds the one before twice."""
    found: Any = {"x": 1} if kind == "dictionaries" else (1,)
    for _ in range(depth):
        found = {"a": found, "b": found} if kind == "dictionaries" else (found, found)
    return found


BOMBS: dict[str, bytes] = {
    "a number of bytes": _pickle_of(b"c__builtin__\nbytearray\n", b"\x8a\x05\x00\x00\x00\x00\x03", b"\x85R"),
    "a number for the memo": _pickle_of(b"N", b"r\xff\xff\xff\x7f"),
    "a length of bytes": _pickle_of(b"\x8e" + struct.pack("<Q", 12 << 30)),
    "a length of a bytearray": _pickle_of(b"\x96" + struct.pack("<Q", 12 << 30)),
    "a length of text": _pickle_of(b"\x8d" + struct.pack("<Q", 12 << 30)),
    "a length of a frame": _pickle_of(b"\x95" + struct.pack("<Q", 12 << 30)),
    "dictionaries that hold the same ones": pickle.dumps({"model": _nested("dictionaries")}),
    # Written by hand, since making the key would take as long: (x, x) of the one before, then {key: None}.
    "a key of tuples that hold the same ones": _pickle_of(b"}", b"K\x01\x85", b"2\x86" * 80, b"Ns"),
}


@pytest.mark.parametrize(("kind", "case"), [*(("zip", case) for case in BOMBS), ("dcp", "a length of bytes")])
def test_a_small_pickle_gets_little_time_and_memory(tmp_path: Path, case: str, kind: str) -> None:
    path = tmp_path / "x.pt"
    if kind == "zip":
        torch.save({}, path)
        zipped_with(path, "data.pkl", BOMBS[case])
    else:
        path = tmp_path / "x"
        path.mkdir()
        (path / ".metadata").write_bytes(BOMBS[case])
    with bounded(), pytest.raises(ValueError, match=str(tmp_path)):
        open_source(path)


def test_shared_objects_of_usual_size_are_read(tmp_path: Path) -> None:
    shared = {"betas": (0.9, 0.999), "names": [str(number) for number in range(100)]}
    torch.save({"model": {"x": torch.ones(2)}, "all": [shared] * 1000}, tmp_path / "x.pt")
    assert TorchArchive(str(tmp_path / "x.pt")).content["all"] == [shared] * 1000
    assert unpickled(pickle.dumps(_nested("tuples", 10))) == _nested("tuples", 10)


_EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def _header_file(folder: Path, header: str) -> Path:
    text = header.encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    return folder


def _of_shape(shape: str) -> str:
    return f'{{"x":{{"dtype":"U8","shape":{shape},"data_offsets":[0,1]}}}}'


HEADERS: dict[str, Callable[[], str]] = {
    "a number of digits": lambda: _of_shape(f"[{'9' * 20_000_000}]"),
    "dimensions in a short entry": lambda: _of_shape(f"[{','.join('1' * 4000)}]"),
    "lists in each other": lambda: _of_shape("[" * 10_000_000),
    "values": lambda: "{" + ",".join(['"":0'] * 4_000_000) + "}",
    "metadata of lists": lambda: '{"__metadata__":{"x":[' + ",".join(["[]"] * 7_000_000) + "]}}",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_20_mb_gets_little_time_and_memory(tmp_path: Path, case: str) -> None:
    _header_file(tmp_path, HEADERS[case]())
    with bounded(), memory_bounded(80 << 20), pytest.raises(ValueError, match=r"model\.safetensors") as caught:
        SafetensorsFiles(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_header_takes_no_more_memory_than_what_is_read_from_it(tmp_path: Path) -> None:
    entries = [f'"{number}":{_EMPTY}' for number in range(5_000)]
    header = ",".join([*entries, entries[-1]])
    _header_file(tmp_path, f"{{{header}}}")
    with bounded(), memory_bounded(12 * len(header)), pytest.raises(ValueError, match="4999 is in it twice"):
        SafetensorsFiles(tmp_path)


def test_records_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """Each would be read, so that the time would be the square of the size."""
    torch.save({"model": {"x": torch.ones(1000), "y": torch.ones(1000)}}, tmp_path / "x.pt")
    text = (tmp_path / "x.pt").read_bytes()
    first, second = (text.rindex(name.encode()) for name in ("/data/0", "/data/1"))
    place = text.rindex(b"PK\1\2", 0, first) + 42  # of the offset in an entry at the archive's end
    other = text.rindex(b"PK\1\2", 0, second) + 42
    damaged = bytearray(text)
    damaged[other : other + 4] = damaged[place : place + 4]
    damaged += bytes(0)
    size = text.rindex(b"PK\1\2", 0, first) + 24
    for begin in (size, other - 18):  # both claim more than half of the file
        damaged[begin - 4 : begin + 4] = struct.pack("<II", len(text) - 1500, len(text) - 1500)
    (tmp_path / "x.pt").write_bytes(damaged)
    with pytest.raises(ValueError, match="its contents exceed the file, or overlap"):
        open_source(tmp_path / "x.pt")


def test_a_rank_s_number_that_no_machine_has_is_no_list_of_missing_files(tmp_path: Path) -> None:
    content_of_rank = RECORDED / "flat-2" / "rank0.pt"
    shutil.copy(content_of_rank, tmp_path / "rank0.pt")
    shutil.copy(content_of_rank, tmp_path / "rank99999999999999.pt")
    with bounded(), pytest.raises(FileNotFoundError, match=r"no file of rank 1, 2, .* 16 and more"):
        open_source(tmp_path, "fairscale")


# What is no regular file


@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors", "x.pt", "rank0.pt", "run/.metadata"])
def test_a_pipe_is_an_error_and_nobody_waits(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with bounded(), pytest.raises(ValueError, match=r"not a regular file|not a complete") as caught:
            open_source(path)
        assert str(tmp_path) in str(caught.value)
    with bounded(), pytest.raises((ValueError, FileNotFoundError)):
        fsdp.load_safetensors(torch.nn.Linear(2, 2), tmp_path)


def test_a_pipe_in_a_checkpoint_of_ours_is_an_error(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", torch.nn.Linear(2, 2))
    (tmp_path / "run" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "run" / "model.safetensors")
    with bounded(), pytest.raises(ValueError, match=r"model\.safetensors is a pipe"):
        fsdp.load(tmp_path / "run", torch.nn.Linear(2, 2))


# Names of files that lie elsewhere


@pytest.mark.parametrize("how", ["absolute", "above", "by a link", "by a link to a folder"])
def test_an_index_names_files_in_its_folder_only(tmp_path: Path, how: str) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    save_file({"x": torch.ones(2)}, other / "secret.safetensors")
    names = {"absolute": f"{other}/secret.safetensors", "above": "../other/secret.safetensors"}
    names |= {"by a link": "x.safetensors", "by a link to a folder": "below/secret.safetensors"}
    (folder / "x.safetensors").symlink_to(other / "secret.safetensors")
    (folder / "below").symlink_to(other)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": names[how]}}))
    with pytest.raises(ValueError, match=r"index\.json names .* (not in|outside) its folder"):
        SafetensorsFiles(folder / "model.safetensors.index.json")


@pytest.mark.parametrize("files", [1, 2])
def test_folders_of_links_as_in_the_cache_of_hugging_face_are_read(tmp_path: Path, files: int) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    folder.mkdir(parents=True)
    state = {"x": torch.ones(2), "y": torch.zeros(3)}
    (tmp_path / "made").mkdir()
    save_safetensors(tmp_path / "made", state, files)
    for number, each in enumerate(sorted((tmp_path / "made").iterdir())):
        each.rename(blobs / f"{number:064x}")
        (folder / each.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert set(SafetensorsFiles(folder).tensors) == {"x", "y"}
    (tmp_path / "link").symlink_to(folder)  # a path that the user has named
    assert set(SafetensorsFiles(tmp_path / "link").tensors) == {"x", "y"}


def test_checkpoints_of_ours_and_of_dcp_have_their_files_in_their_folder(ours: Path, tmp_path: Path) -> None:
    shutil.copytree(ours, tmp_path / "run")
    converted(ours, tmp_path / "dcp", "--to", "dcp")
    for path in (next((tmp_path / "run").glob("model-*.safetensors")), next((tmp_path / "dcp").glob("*.distcp"))):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
        with pytest.raises(ValueError, match=r"is a link to .*, outside its folder"):
            open_source(path.parent)
    metadata = tmp_path / "dcp" / ".metadata"
    name = next((tmp_path / "dcp").glob("*.distcp")).name.encode()
    metadata.write_bytes(metadata.read_bytes().replace(name, b"../" + name[3:]))
    with pytest.raises(ValueError, match=r"names the file '\.\./.*', which is not in its folder"):
        open_source(tmp_path / "dcp")


def test_chunks_that_lie_over_each_other_make_no_tensor(tmp_path: Path) -> None:
    """What is between them would be whatever the memory had."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    from fsdp.checkpoint.formats.dcp import DcpFolder

    converted(saved(tmp_path / "ours"), tmp_path / "dcp", "--to", "dcp")
    with (tmp_path / "dcp" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    described = metadata.state_dict_metadata["model.wide.weight"]
    index, place = next(
        (index, place) for index, place in metadata.storage_data.items() if index.fqn == "model.wide.weight"
    )
    halves = [ChunkStorageMetadata(torch.Size(start), torch.Size((4, 5))) for start in ((0, 0), (2, 0))]
    described.chunks = halves
    described.size = torch.Size((8, 5))
    for half in halves:
        metadata.storage_data[type(index)(index.fqn, half.offsets)] = place
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"the chunks of model\.wide\.weight do not make a tensor of shape \[8, 5\]"):
        DcpFolder(str(tmp_path / "dcp"))


# Messages


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;title\x07\x1b[2J\u202e" + "long" * 2000
    save_file({name: torch.ones(2)}, tmp_path / "x.safetensors")
    torch.save({"model": {name: torch.ones(2)}, "other": {name: object}, name: 1}, tmp_path / "x.pt")
    for path in ("x.safetensors", "x.pt"):
        for command in ("inspect", "verify"):
            main([command, str(tmp_path / path)])
        main(["convert", str(tmp_path / path), str(tmp_path / f"{path}.ours")])
        main(["convert", str(tmp_path / path), str(tmp_path / f"{path}.other"), "--tied", f"y={name}y"])
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(each.isprintable() or each == "\n" for each in text)
        assert max(map(len, text.splitlines())) < 5000
    with pytest.raises(RuntimeError, match="does not fit this Linear") as caught:
        fsdp.load_safetensors(torch.nn.Linear(2, 2), tmp_path / "x.safetensors")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 10_000
    assert "\\x1b[2J" in str(caught.value)


def test_an_error_about_a_large_entry_is_short(tmp_path: Path) -> None:
    text = json.dumps({"x" * 1_000_000: {"dtype": "y" * 1_000_000}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
        SafetensorsFiles(tmp_path)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("key", [7, b"step"])
def test_a_key_of_an_optimizer_s_state_that_is_no_string_is_refused(tmp_path: Path, key: Any) -> None:
    optimizer = {"state": {"weight": {key: torch.zeros(2)}}, "param_groups": [{"params": ["weight"], "lr": 0.1}]}
    torch.save({"model": {"weight": torch.zeros(2)}, "optimizer": optimizer}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"run\.pt: the optimizer's state of weight has the key .*, no string"):
        everything_in(tmp_path / "run.pt")
