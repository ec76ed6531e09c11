"""A bit that changes between two ranks is noticed where it arrives, and training goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp
from fsdp import check_messages, use_torch_collectives
from fsdp.distributed.collectives import DirectExchange, communicator
from fsdp.distributed.communicator import CollectiveError, DamagedMessageError
from tests.distributed.test_recovery import BATCHES, Training, errors_of, start, weights_after
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

KINDS = ["all-gather", "reduce-scatter", "an exchange of messages"]
LARGE = 8  # bytes, of what is damaged: neither checksums nor lone numbers


def damaging(number: int) -> Any:
    """Stand before gloo, and flip one bit of a large message of rank 1 to rank 0, that with a number."""
    count, send = iter(range(1_000_000)), dist.ProcessGroup.send

    def send_damaged(group: dist.ProcessGroup, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        if group.rank() == 1 and peer == 0 and tensor.nbytes > LARGE and next(count) == number:
            tensor = tensor.clone()  # what this rank has is as it was
            tensor.view(torch.uint8)[tensor.nbytes // 2] ^= 1 << 6
        return send(group, [tensor], peer, tag)

    return mock.patch.object(dist.ProcessGroup, "send", send_damaged)


def test_a_flipped_bit_is_an_error_that_names_both_ranks_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    numbers = [5, 11, 17]
    errors = ranks(3, backend=None).run(_train_with_flipped_bits, tmp_path, numbers)
    for number, first, *others in zip(numbers, *errors, strict=True):
        assert first.startswith("DamagedMessageError: rank 0: "), number
        assert any(f"rank 0: {kind}" in first for kind in KINDS)
        assert "did not complete: a message from rank 1 was damaged in transit (checksum " in first
        assert "fsdp.recover(model)" in first
        for error in others:
            assert error.startswith("CollectiveError: ")
            assert "rank 0 has called fsdp.recover(), after DamagedMessageError: rank 0: " in error


def _train_with_flipped_bits(folder: Path, numbers: list[int]) -> list[str]:
    """Return the error of each training, in which the message of a number is damaged."""
    start(folder, 3)
    expected = [weights_after([each for each in range(BATCHES) if each != left_out]) for left_out in range(BATCHES)]
    check_messages()
    errors = []
    for number in numbers:
        training = Training("")
        with damaging(number):
            (error,) = errors_of(training, lambda model=training.model: fsdp.recover(model))
        assert any(torch.equal(training.weights(), each) for each in expected)  # without the batch that was damaged
        errors.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return errors


@on_ranks(3, backend=None)
def test_without_checksums_a_flipped_bit_changes_the_weights_in_silence(tmp_path: Path) -> None:
    start(tmp_path, 3)
    expected = weights_after(range(BATCHES))
    training = Training("")
    with damaging(15):
        assert not errors_of(training, lambda: False)
    assert not torch.equal(training.weights(), expected)
    dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_ranks_that_do_not_all_check_are_told_apart(tmp_path: Path) -> None:
    check_messages(start(tmp_path, 2) == 0)
    fsdp.set_watchdog(1.0, raises=True)
    with pytest.raises(CollectiveError) as error:
        weights_after([0])
    dist.destroy_process_group()
    error = str(error.value)
    assert "  rank 0: waiting for an exchange of messages, with checksums" in error
    assert "  rank 1: waiting for an exchange of messages" in error
    assert "different collectives" in error


@on_ranks(2)
def test_other_ways_than_gloo_are_refused() -> None:
    switches: list[Callable[[bool], None]] = [check_messages, use_torch_collectives]
    for switch in switches:
        switch(True)
    try:
        with pytest.raises(RuntimeError, match=r"check_messages\(\) supports messages .* through gloo"):
            communicator(dist.group.WORLD, torch.device("cpu"))
    finally:
        for switch in switches:
            switch(False)


@on_ranks(2)
def test_what_is_moved_to_a_device_goes_the_same_way() -> None:
    check_messages()
    try:
        way = communicator(dist.group.WORLD, torch.device("cpu"))
        assert way.for_device(torch.device("cpu")) is way
        assert isinstance(way.apart(), DirectExchange)
    finally:
        check_messages(False)
    assert communicator(dist.group.WORLD, torch.device("cpu")) is not way


def test_the_error_is_no_consequence_of_another_rank() -> None:
    assert not issubclass(DamagedMessageError, CollectiveError)
