"""Checksums are computed beside reads and writes, in the processor cores that the host's ranks do not use."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp
from fsdp.checkpoint import checksum_threads
from fsdp.checkpoint.checksum_threads import ChecksumThreads, free_cores
from fsdp.checkpoint.checksums import BLOCK_BYTES, Fragment, fragment
from tests.helpers.on_ranks import on_ranks

CORES = mock.patch.object(checksum_threads, "free_cores", return_value=2)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fsdp checksums")]


def wait_for_their_end() -> None:
    for thread in running():
        thread.join(timeout=60)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 3), st.lists(st.lists(st.binary(max_size=20), max_size=9), max_size=4))
def test_fragments_come_in_their_order_with_any_number_of_cores(cores: int, calls: list[list[bytes]]) -> None:
    with mock.patch.object(checksum_threads, "free_cores", return_value=cores):
        threads = ChecksumThreads()
    for blocks in calls:
        for begin, block in enumerate(blocks):
            threads.add("a", begin, memoryview(block))
        assert threads.take() == [fragment("a", begin, memoryview(block)) for begin, block in enumerate(blocks)]
    threads.close()
    wait_for_their_end()


def test_no_more_blocks_wait_in_memory_than_threads_compute() -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    def slow(name: str, begin: int, memory: memoryview) -> Fragment:
        started.release()
        assert go_on.wait(60)
        return fragment(name, begin, memory)

    with CORES, mock.patch.object(checksum_threads, "fragment", slow):
        threads = ChecksumThreads()
        adding = threading.Thread(target=lambda: [threads.add("a", each, memoryview(b"abc")) for each in range(10)])
        adding.start()
        for _ in range(2):
            assert started.acquire(timeout=60)
        adding.join(timeout=0.2)
        assert adding.is_alive()  # it waits for the first block
        go_on.set()
        adding.join(timeout=60)
        assert len(threads.take()) == 10
    threads.close()
    wait_for_their_end()


def test_blocks_are_computed_by_the_caller_when_the_interpreter_exits() -> None:
    with CORES:
        threads = ChecksumThreads()
    blocks = [bytes([number]) for number in range(6)]
    for begin, block in enumerate(blocks):
        is_exit = begin > 2
        with mock.patch.object(ThreadPoolExecutor, "submit", side_effect=RuntimeError) if is_exit else nullcontext():
            threads.add("a", begin, memoryview(block))
    assert threads.take() == [fragment("a", begin, memoryview(block)) for begin, block in enumerate(blocks)]
    threads.close()
    wait_for_their_end()


def test_an_error_in_a_thread_is_raised_by_the_caller() -> None:
    def failing(name: str, begin: int, memory: memoryview) -> Fragment:
        if begin == 0:
            raise MemoryError("no memory")
        return fragment(name, begin, memory)

    with CORES, mock.patch.object(checksum_threads, "fragment", failing):
        threads = ChecksumThreads()
        threads.add("a", 0, memoryview(b"one"))
        threads.add("a", 3, memoryview(b"two"))
        with pytest.raises(MemoryError, match="no memory"):
            threads.take()
        threads.add("a", 3, memoryview(b"two"))
        assert threads.take() == [fragment("a", 3, memoryview(b"two"))]
    threads.close()
    wait_for_their_end()


@on_ranks(2)
def test_a_checkpoint_has_the_same_files_and_its_damage_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(nn.Linear(2100, 2000))  # of three blocks a rank
    fsdp.save(tmp_path / "inline", model)
    expected = [value.clone() for value in model.state_dict().values()]
    with CORES:
        fsdp.save(tmp_path / "threads", model)
        for folder in ("inline", "threads"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fsdp.load(tmp_path / folder, model)
            assert all(map(torch.equal, model.state_dict().values(), expected))
        wait_for_their_end()
        dist.barrier()
        files = [tmp_path / folder / "model.safetensors" for folder in ("inline", "threads")]
        assert files[0].read_bytes() == files[1].read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            with files[1].open("r+b") as file:
                file.seek(BLOCK_BYTES + BLOCK_BYTES // 2)
                file.write(b"damage")
        dist.barrier()
        with pytest.raises((ValueError, RuntimeError), match="is damaged: bytes 4194304 to 8388608"):
            fsdp.load(tmp_path / "threads", model)
    wait_for_their_end()
    assert not running()


@pytest.mark.parametrize(
    ("given_ranks", "cores", "free"), [("1", 2, 1), ("2", 2, 0), ("4", 2, 0), ("8", 64, 7), ("", 3, 2), ("two", 3, 2)]
)
def test_ranks_of_a_host_share_its_cores(given_ranks: str, cores: int, free: int) -> None:
    affinity = mock.patch.object(os, "sched_getaffinity", return_value=set(range(cores)), create=True)
    with affinity, mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": given_ranks}):
        assert free_cores() == free
