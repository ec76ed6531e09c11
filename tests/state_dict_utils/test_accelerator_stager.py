"""Staging from an accelerator: the copy's side stream, pinned memory, and the way back."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import StateDictStager
from fsdp.state_dict_utils import origins, restore
from tests.helpers.accelerator import ACCELERATOR, device_module, page_locking
from tests.helpers.pairs import parametrize_pairs

pytestmark = pytest.mark.accelerator

BUSY = 50_000_000  # clock cycles: some ten milliseconds, in which the host runs ahead
SIZES = [3, 1 << 18, 1 << 19]  # float32 values: in torch's pinned memory, registered by us


@parametrize_pairs(numel=SIZES, pin_memory=[False, True], share_memory=[False, True])
def test_a_copy_has_what_was_queued_before(numel: int, pin_memory: bool, share_memory: bool) -> None:
    with page_locking():
        stager = StateDictStager(pin_memory, share_memory)
        weight = torch.zeros(numel, device=ACCELERATOR)
        for step in range(1, 4):
            device_module()._sleep(BUSY)
            weight.fill_(step)
            copied = stager.stage({"w": nn.Parameter(weight), "view": weight[1:], "cpu": torch.ones(2)})
            weight.fill_(-1)
            assert copied["w"].device.type == copied["view"].device.type == "cpu"
            assert bool((copied["w"] == step).all())
            assert copied["view"].untyped_storage().data_ptr() == copied["w"].untyped_storage().data_ptr()
            assert copied["w"].is_pinned() == pin_memory
            assert copied["w"].is_shared() == share_memory
            del copied


@parametrize_pairs(numel=SIZES, share_memory=[False, True])
def test_pinned_memory_is_released(numel: int, share_memory: bool) -> None:
    with page_locking():
        stager = StateDictStager(pin_memory=True, share_memory=share_memory)
        for _ in range(20):  # registering an address twice is an error, and so is a size that was not unregistered
            stager.stage(torch.ones(numel, device=ACCELERATOR))
            gc.collect()
            assert stager.held_bytes == 0


def test_memory_that_a_dropped_copy_is_written_to_is_kept_until_then() -> None:
    with page_locking():
        stager = StateDictStager(pin_memory=True)
        arrived = device_module().Event()
        device_module()._sleep(BUSY)
        arrived.record()
        pending = stager.stage([torch.ones(SIZES[-1], device=ACCELERATOR)], non_blocking=True)
        stager.close()
        assert not arrived.query()
        del pending
        assert arrived.query()
        assert stager.held_bytes == 0


def test_copies_do_not_wait_for_what_is_queued_after_them() -> None:
    stager = StateDictStager(pin_memory=True)
    weight = torch.ones(3, device=ACCELERATOR)
    device_module().synchronize()
    pending = stager.stage([weight], non_blocking=True)
    ended = device_module().Event()
    device_module()._sleep(20 * BUSY)
    ended.record()
    assert pending.wait()[0].tolist() == [1, 1, 1]
    assert not ended.query()


class Sums:
    """Knows the sum of its values, which it finds out again when it is copied."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, total=float(state["values"].sum()))


def test_code_that_copies_itself_sees_values_that_have_arrived() -> None:
    stager = StateDictStager(pin_memory=True)
    device_module()._sleep(BUSY)
    copied = stager.stage([Sums(torch.ones(100, device=ACCELERATOR))], non_blocking=True)
    assert copied.wait()[0].total == 100.0  # type: ignore[attr-defined]


def test_what_is_protected_may_be_changed_on_the_stream_while_it_is_copied() -> None:
    stager = StateDictStager(pin_memory=True)
    weight = torch.ones(1 << 24, device=ACCELERATOR)
    device_module()._sleep(BUSY)
    pending = stager.stage([weight], non_blocking=True)
    pending.protect()
    weight.zero_()
    assert bool((pending.wait()[0] == 1).all())


def test_originals_that_are_dropped_meanwhile_are_copied_right() -> None:
    stager = StateDictStager(pin_memory=True)
    device_module()._sleep(BUSY)
    pending = stager.stage([torch.ones(1 << 24, device=ACCELERATOR)], non_blocking=True)
    overwritten = torch.zeros(1 << 24, device=ACCELERATOR)
    assert bool((pending.wait()[0] == 1).all())
    del overwritten


def test_a_copy_goes_back_to_its_devices() -> None:
    weight = torch.arange(4.0, device=ACCELERATOR)
    copied = StateDictStager().stage({"w": weight, "view": weight[2:], "cpu": torch.ones(2)})
    assert origins(copied) == [f"{ACCELERATOR}:0", "cpu"]
    restored = restore(copied)
    assert restored["view"].tolist() == [2, 3]
    assert restored["view"].device == weight.device
    assert restored["view"].untyped_storage().data_ptr() == restored["w"].untyped_storage().data_ptr()
    assert restored["cpu"].device.type == "cpu"


class Hides:
    """Copies itself with a tensor that is in none of its attributes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hides:
        made = Hides()
        made.weight = torch.ones(1, device=ACCELERATOR)  # type: ignore[attr-defined]
        return made


class Shows:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(1, device=ACCELERATOR))

    def __deepcopy__(self, memo: dict[int, Any]) -> Shows:
        made = Shows.__new__(Shows)
        made.weight = copy.deepcopy(self.weight, memo)
        return made


def test_what_copies_itself_ends_on_the_cpu_or_is_named() -> None:
    assert StateDictStager().stage(Shows()).weight.device.type == "cpu"
    with pytest.raises(
        TypeError, match=rf"the tree\[0\]\['weight'\]: the copy of an object contains a new tensor on {ACCELERATOR}"
    ):
        StateDictStager().stage([Hides()])
