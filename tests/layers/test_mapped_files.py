"""Tensors in mapped files: what they hold, when their files go, and what is said before the system would kill us."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.layers.mapped_files import MappedFiles, Region, files_under
from tests.helpers.memory import mapped_kib
from tests.helpers.paths import ROOT

PAGE = mmap.PAGESIZE
MIB = 1 << 20
LARGE = MIB // 4  # elements of float32: such a tensor has a file of its own

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads Linux's /proc")


@pytest.fixture
def files(tmp_path: Path) -> MappedFiles:
    return MappedFiles(tmp_path, keep=False)


def make(files: MappedFiles, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return files.allocate(numel, dtype, "test")[0]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What is in them


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("numel", [0, 1, PAGE // 4 + 1, LARGE + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_tensor_begins_as_zeros(tmp_path: Path, dtype: torch.dtype, numel: int, keep: bool) -> None:
    made = make(MappedFiles(tmp_path, keep), numel, dtype)
    assert (made.shape, made.dtype, made.device.type) == ((numel,), dtype, "cpu")
    assert made.is_contiguous()
    assert not made.any()


@pytest.mark.parametrize("keep", [False, True])
def test_tensors_start_at_pages_and_never_overlap(tmp_path: Path, keep: bool) -> None:
    files = MappedFiles(tmp_path, keep)
    sizes = [1, PAGE, PAGE + 1, 3, LARGE, 2, LARGE // 4, 5 * PAGE - 1] * 5
    made = [make(files, size).fill_(number) for number, size in enumerate(sizes)]
    assert all(tensor.data_ptr() % PAGE == 0 for tensor in made)
    for number, tensor in enumerate(made):
        assert (tensor == number).all()


@pytest.mark.parametrize("numel", [1, LARGE + 3])
def test_values_survive_their_release(files: MappedFiles, numel: int) -> None:
    made, region = files.allocate(numel, torch.float32, "test")
    made.copy_(torch.arange(numel))
    region.release()
    assert torch.equal(made, torch.arange(numel, dtype=torch.float32))
    files.release()
    assert torch.equal(made, torch.arange(numel, dtype=torch.float32))


# How much of the system they take


@needs_proc
def test_small_tensors_share_a_file(files: MappedFiles) -> None:
    before = descriptors()
    small = [make(files, PAGE // 4) for _ in range(1024)]  # a page each, four MiB together
    assert descriptors() == before + 1
    small.append(make(files, 1))
    assert descriptors() == before + 2


@needs_proc
@pytest.mark.parametrize(("keep", "numel"), [(False, LARGE), (True, 1)])
def test_a_large_or_kept_tensor_has_a_file_of_its_own(tmp_path: Path, keep: bool, numel: int) -> None:
    files = MappedFiles(tmp_path, keep)
    before = descriptors()
    made = [make(files, numel) for _ in range(3)]
    assert descriptors() == before + len(made)


@needs_proc
@pytest.mark.parametrize(("numel", "times"), [(1, 1100), (LARGE, 100)])  # shared files have room for 1024 small ones
def test_dropped_tensors_give_their_mapping_and_descriptor_back(files: MappedFiles, numel: int, times: int) -> None:
    before = descriptors()
    for _ in range(times):
        make(files, numel)
    assert descriptors() <= before + 1  # the shared file that has room left
    assert mapped_kib(files.folder, "Size") <= 4 * 1024


@needs_proc
def test_a_tensor_lives_on_without_what_made_it(tmp_path: Path) -> None:
    files = MappedFiles(tmp_path, keep=False)
    made = [make(files, 3).fill_(1), make(files, LARGE).fill_(2)]
    del files
    gc.collect()
    assert [float(tensor.double().mean()) for tensor in made] == [1, 2]


# When they go


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    return sorted(name for _, _, names in os.walk(folder) for name in names)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of children that have ended in three ways, and their parent, which uses files after a child's end."""
    folder = tmp_path_factory.mktemp("ended")
    script = f"""
        import os, signal, sys, torch
        from fsdp.layers.mapped_files import MappedFiles
        for ending in ("return", "raise", "kill"):
            child = os.fork()
            if child:
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
                continue
            made = []
            for keep in (True, False):
                files = MappedFiles({str(folder)!r} + f"/{{ending}}/{{keep}}", keep)
                made += [(files, files.allocate(numel, torch.float32, "test")[0].fill_(7)) for numel in (1, {LARGE})]
            if ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if ending == "raise":
                raise ValueError
            sys.exit()
        files = MappedFiles({str(folder)!r}, False)
        made = files.allocate(3, torch.float32, "test")[0].fill_(7)
        child = os.fork()
        if child == 0:
            sys.exit()
        os.waitpid(child, 0)
        assert made.eq(7).all()
        files.allocate({LARGE}, torch.float32, "test")
        """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    return folder, subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)


def test_files_vanish_however_the_process_ends_unless_kept(
    ended: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = ended
    assert list(map(int, done.stdout.split())) == [0, 1, -signal.SIGKILL], done.stderr
    for ending in ("return", "raise", "kill"):
        kept, others = folder / ending / "True", folder / ending / "False"
        assert names_in(others) == [], ending
        small, large = (next(kept.rglob(name)) for name in names_in(kept))
        assert torch.frombuffer(bytearray(large.read_bytes()), dtype=torch.float32).eq(7).all(), ending
        assert torch.frombuffer(bytearray(small.read_bytes()), dtype=torch.float32, count=1) == 7, ending
        assert ending == "kill" or list(others.iterdir()) == []


def test_a_forked_child_that_ends_takes_nothing_with_it(
    ended: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    done = ended[1]
    assert done.returncode == 0, done.stderr


# One folder for all units of a process


def test_units_that_name_the_same_folder_share_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_under(tmp_path / "a", keep=False)
    monkeypatch.chdir(tmp_path)
    assert files_under("a", keep=False) is files
    assert files_under("a", keep=True) is not files
    assert files_under("b", keep=False) is not files


def test_a_folder_can_be_used_again_when_its_files_are_gone(tmp_path: Path) -> None:
    files = files_under(tmp_path, keep=False)
    folder = files.folder
    del files
    gc.collect()
    again = files_under(tmp_path, keep=False)
    assert os.path.isdir(again.folder)
    assert again.folder != folder


# A disk that is full or gone


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@needs_proc
@pytest.mark.parametrize("keep", [False, True])
def test_a_disk_without_room_is_an_error_and_leaves_nothing(tmp_path: Path, keep: bool) -> None:
    files = MappedFiles(tmp_path, keep)
    before = descriptors()
    with limited(resource.RLIMIT_FSIZE, MIB):
        with pytest.raises(RuntimeError, match=rf"{4 * MIB} bytes for shard in .*{files.folder}.* \d+ bytes free"):
            files.allocate(4 * LARGE, torch.float32, "shard")
        assert (names_in(files.folder), descriptors()) == ([], before)
        assert not make(files, LARGE).any()  # what there is room for can be had


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_room_is_reserved_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fallocate: bool) -> None:
    if not has_fallocate:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    files = MappedFiles(tmp_path, keep=True)
    made = make(files, 2 * LARGE + 1)
    (name,) = names_in(files.folder)
    assert os.stat(os.path.join(files.folder, name)).st_blocks * 512 >= made.nbytes
    assert not made.any()


@needs_proc
def test_too_many_files_are_an_error_that_names_the_limit(files: MappedFiles) -> None:
    with limited(resource.RLIMIT_NOFILE, descriptors() + 8):
        made = [make(files, LARGE) for _ in range(3)]
        with pytest.raises(RuntimeError, match=r"Too many open files.*raise `ulimit -n`"):
            made += [make(files, LARGE) for _ in range(descriptors() + 8)]  # numbers that were closed are used first


@pytest.mark.parametrize("what_went", ["ours", "the user's"])
def test_a_folder_that_was_removed_is_an_error_that_names_it(tmp_path: Path, what_went: str) -> None:
    files = MappedFiles(tmp_path / "offload", keep=False)
    shutil.rmtree(files.folder if what_went == "ours" else tmp_path / "offload")
    with pytest.raises(RuntimeError, match=files.folder):
        make(files, LARGE)


# A mapping that is dead


@needs_proc
def test_only_what_lies_behind_the_end_of_a_shared_file_is_lost(files: MappedFiles) -> None:
    first, last = (files.allocate(3, torch.float32, "shard") for _ in range(2))
    os.truncate(f"/proc/self/fd/{descriptor_of(files)}", PAGE)
    first[1].check("first")
    with pytest.raises(RuntimeError, match=rf"last: .* was truncated to {PAGE} bytes"):
        last[1].check("last")


def descriptor_of(files: MappedFiles) -> str:
    def target(descriptor: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the listing's own
            return ""

    (found,) = (descriptor for descriptor in os.listdir("/proc/self/fd") if files.folder in target(descriptor))
    return found


# What the system is advised


class RecordingMap(mmap.mmap):
    """A mapping that remembers what was advised for it."""

    advice: list[tuple[Any, ...]]

    def madvise(self, *args: Any) -> None:
        self.__dict__.setdefault("advice", []).append(args)
        super().madvise(*args)


@pytest.mark.parametrize("numel", [1, PAGE, LARGE + 3])
def test_advice_is_for_the_tensor_s_own_pages(files: MappedFiles, monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(mmap, "mmap", RecordingMap)
    neighbours = [make(files, 1), make(files, 1)]  # so that a small one starts inside of its file
    made, region = files.allocate(numel, torch.float32, "test")
    region.read_ahead()
    region.release()
    mapping: Any = region._mapping()
    *ahead, (released, start, length) = mapping.advice
    assert released == mmap.MADV_DONTNEED
    assert {advice for advice, _, _ in ahead} == {mmap.MADV_WILLNEED}
    pieces = [(begin, begin + size) for _, begin, size in ahead]
    assert [begin for begin, _ in pieces] == [start, *(end for _, end in pieces[:-1])], "one after the other"
    assert pieces[-1][1] == start + length
    assert length == -(-made.nbytes // PAGE) * PAGE
    assert address_of(mapping) + start == made.data_ptr()
    assert not torch.cat(neighbours).any()


def address_of(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


@needs_proc
def test_what_is_released_leaves_the_process_s_memory(files: MappedFiles) -> None:
    made, region = files.allocate(4 * LARGE, torch.float32, "test")
    made.fill_(1)
    assert mapped_kib(files.folder, "Rss") == 4 * 1024
    region.release()
    assert mapped_kib(files.folder, "Rss") == 0
    small = make(files, 3).fill_(1)
    assert made.sum() == made.numel()
    files.release()
    assert mapped_kib(files.folder, "Rss") == 0
    assert small.sum() == 3


def test_a_dropped_tensor_s_region_takes_no_advice(files: MappedFiles) -> None:
    made, region = files.allocate(LARGE, torch.float32, "test")
    alive = [region.is_alive]
    del made
    alive.append(region.is_alive)
    assert alive == [True, False]
    region.read_ahead()
    region.release()


def test_a_system_without_advice_does_without(files: MappedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    region: Region
    made, region = files.allocate(3, torch.float32, "test")
    for name in ("MADV_WILLNEED", "MADV_DONTNEED"):
        monkeypatch.delattr(mmap, name)
    made.fill_(1)
    region.read_ahead()
    region.release()
    assert made.sum() == 3
