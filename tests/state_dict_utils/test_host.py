"""State trees in shared and pinned host memory, and copies between it and a GPU.

Without a GPU, a stand-in for CUDA's runtime notes which memory is registered with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.state_dict_utils import (
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    gather_state_dict,
    offload_state_dict_to_cpu,
)
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, device_module
from tests.helpers.on_ranks import on_ranks
from tests.helpers.state_trees import assert_same_tree, counting, mesh_of, spread

TREE = {"weight": counting(2, 3), "scalar": torch.tensor(1.5), "nothing": torch.empty(0, 3), "half": counting(3).half()}


def tensors(tree: dict[str, Any]) -> list[torch.Tensor]:
    return list(tree.values())


# Shared


def test_shared_tensors_lie_each_in_shared_memory_of_its_own() -> None:
    new = create_cpu_state_dict(TREE, share_memory=True)
    assert check_state_dict_similarity(TREE, new, raise_error=True)
    assert all(tensor.is_shared() for tensor in tensors(new))
    assert not any(tensor.is_shared() for tensor in tensors(create_cpu_state_dict(TREE)))
    assert len({tensor.data_ptr() for tensor in tensors(new)}) == len(TREE)
    assert_same_tree(copy_state_dict(TREE, new), TREE)


@on_ranks(3)
def test_shared_memory_of_dtensors() -> None:
    from torch.distributed.tensor import Shard

    sharded = spread(counting(2, 3), mesh_of(3), [Shard(0)])
    new = create_cpu_state_dict([sharded], share_memory=True)
    assert new[0].to_local().is_shared()
    assert_same_tree(copy_state_dict([sharded], new), [sharded])


def test_no_more_shared_memory_is_an_error_that_names_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int, device: str) -> None:
        raise RuntimeError("Too many open files")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    with pytest.raises(RuntimeError, match=r"^a\.0: .*no shared memory of 8 bytes: Too many .*ulimit -n.*file_system"):
        create_cpu_state_dict({"a": [counting(2)]}, share_memory=True)


# Pinned, without a GPU


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("share_memory", [True, False])
def test_pinning_without_an_accelerator_is_an_error(share_memory: bool) -> None:
    with pytest.raises(
        RuntimeError, match=r"pin_memory=True needs an accelerator, .* pin_memory=torch.accelerator.is_available\(\)"
    ):
        create_cpu_state_dict(TREE, pin_memory=True, share_memory=share_memory)


def test_pinning_what_is_shared_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp.state_dict_utils.host_memory.accelerator", lambda: torch.device("xpu", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"can be combined with CUDA only.*Omit one of them"):
        create_cpu_state_dict(TREE, pin_memory=True, share_memory=True)


class Runtime:
    """Stands for CUDA's runtime: what is registered, by address, and which errors it gives."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.room = 1 << 30

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert size > 0
        assert is_mapped(address)
        assert address not in self.registered
        assert flags == 1, "cudaHostRegisterPortable: for all devices"
        if sum(self.registered.values()) + size > self.room:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert is_mapped(address)  # CUDA does not accept memory that is gone
        del self.registered[address]
        return 0


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc to see which memory is mapped")
    runtime = Runtime()
    with monkeypatch.context() as patched:
        patched.setattr("fsdp.state_dict_utils.host_memory.accelerator", lambda: torch.device("cuda", 0))
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "cudart", lambda: runtime)
        yield runtime


def test_memory_that_is_shared_and_pinned_is_registered_until_it_is_released(runtime: Runtime) -> None:
    tree = create_cpu_state_dict(TREE, pin_memory=True, share_memory=True)
    assert all(tensor.is_shared() for tensor in tensors(tree))
    expected = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(tree) if tensor.numel()}
    assert runtime.registered == expected
    weight = tree["weight"].data_ptr()
    view = tree["weight"][1:].detach()
    del tree
    gc.collect()
    assert runtime.registered == {weight: expected[weight]}
    del view
    gc.collect()
    assert runtime.registered == {}


def test_memory_can_be_registered_again_and_again(runtime: Runtime) -> None:
    for _ in range(50):
        assert len(create_cpu_state_dict(TREE, pin_memory=True, share_memory=True)) == len(TREE)
    gc.collect()
    assert runtime.registered == {}


def test_memory_that_cannot_be_registered_is_an_error_that_names_the_tensor(runtime: Runtime) -> None:
    runtime.room = 30
    with pytest.raises(RuntimeError, match=r"^1: .*CUDA cannot page-lock 8 bytes \(error 2\).*ulimit -l"):
        create_cpu_state_dict([counting(6), counting(2)], pin_memory=True, share_memory=True)
    gc.collect()
    assert runtime.registered == {}


# With an accelerator


def on_accelerator() -> dict[str, Any]:
    return {key: tensor.to(ACCELERATOR) for key, tensor in TREE.items()}


@pytest.mark.accelerator
@pytest.mark.parametrize("share_memory", [False, True])
def test_pinned_trees_take_copies_from_an_accelerator(share_memory: bool) -> None:
    if share_memory and IS_SIMULATED:
        pytest.skip("only CUDA pins memory that is shared already")
    tree = create_cpu_state_dict(on_accelerator(), pin_memory=True, share_memory=share_memory)
    assert all(tensor.is_pinned() for tensor in tensors(tree) if tensor.numel())
    assert all(tensor.is_shared() == share_memory for tensor in tensors(tree))
    copy_state_dict(on_accelerator(), tree, non_blocking=True)
    device_module().synchronize()
    assert_same_tree(tree, TREE)


@pytest.mark.gpu
def test_registered_memory_is_unregistered_when_released() -> None:
    for _ in range(20):  # the same addresses come again, and CUDA refuses those that are still registered
        create_cpu_state_dict(on_accelerator(), pin_memory=True, share_memory=True)


@pytest.mark.accelerator
def test_offloading_and_gathering_bring_tensors_of_an_accelerator_to_the_host() -> None:
    for _ in range(3):
        tree = on_accelerator()
        device_module()._sleep(20_000_000)
        assert_same_tree(offload_state_dict_to_cpu({key: tensor + 0 for key, tensor in tree.items()}), TREE)
        assert_same_tree(gather_state_dict(tree, cpu_offload=True), TREE)
