"""After an exception on one rank all ranks train on as if there had been no such batch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.distributed import watchdog
from fsdp.distributed.collectives import DirectExchange, communicator
from fsdp.distributed.communicator import CollectiveError, communicators_among, finish
from fsdp.distributed.messages import Sending
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.waiting

BAD = 2  # the number of the batch that fails
BATCHES = 5


class Failing(nn.Module):
    """Raises for some inputs, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_in = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails_in == "forward":
            raise ValueError("a bad batch")
        if self.fails_in == "backward":
            inputs.register_hook(self._fail)
        return inputs * 2

    def _fail(self, grad: Tensor) -> None:
        raise ValueError("a bad gradient")


class Training:
    """A training that fails on rank 1, in one of its batches."""

    def __init__(self, fails_in: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.failing = Failing()
        layers = [FullyShardedDataParallel(nn.Linear(4, 4), **options) for _ in range(3)]
        self.model = FullyShardedDataParallel(nn.Sequential(layers[0], layers[1], self.failing, layers[2]), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(self._before_step)
        self.fails_in, self.number = fails_in, 0

    def step(self, number: int) -> None:
        self.number = number
        is_failing = number == BAD and dist.get_rank() == 1
        self.failing.fails_in = self.fails_in if is_failing else ""
        inputs = torch.full((2, 4), number + dist.get_rank() + 1.0)
        self.optimizer.zero_grad()
        self.model(inputs).square().sum().backward()
        self.optimizer.step()

    def _before_step(self, *args: Any) -> None:
        if self.fails_in == "step" and self.number == BAD and dist.get_rank() == 1:
            self.fails_in = ""
            raise ValueError("a bad step")

    def weights(self) -> Tensor:
        with self.model.summon_full_params():
            return torch.cat([param.detach().flatten().clone() for param in self.model.parameters()])


def weights_after(numbers: Sequence[int], **options: Any) -> Tensor:
    """Return the weights of a training that sees these batches only."""
    training = Training("", **options)
    for number in numbers:
        training.step(number)
    return training.weights()


def errors_of(training: Training, recover: Callable[[], bool]) -> list[Exception]:
    """Train on all batches, as docs/troubleshooting.md says."""
    errors: list[Exception] = []
    for number in range(BATCHES):
        while True:
            try:
                training.step(number)
            except Exception as error:  # noqa: BLE001 (as the page says)
                errors.append(error)
                if recover():
                    continue
            break
    return errors


def start(folder: Path, world_size: int) -> int:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    return rank


@parametrize_pairs(
    at_most=5,
    fails_in=["forward", "backward", "step"],
    options=[
        {},
        {"use_orig_params": True, "reshard_after_forward": False},
        {"sharding_strategy": ShardingStrategy.NO_SHARD, "bucket_cap_mb": 0},
    ],
)
@on_ranks(3, backend=None)
def test_training_goes_on_as_if_there_had_been_no_bad_batch(
    tmp_path: Path, fails_in: str, options: dict[str, Any]
) -> None:
    rank = start(tmp_path, 3)
    # A step that fails is one that others have taken: it is taken after all, and the batch counts.
    expected = weights_after([number for number in range(BATCHES) if number != BAD or fails_in == "step"], **options)
    training = Training(fails_in, **options)
    (error,) = errors_of(training, lambda: fsdp.recover(training.model))
    if rank == 1:
        assert isinstance(error, ValueError)
    else:
        assert isinstance(error, CollectiveError)
        assert "rank 1 has called fsdp.recover(), after ValueError: a bad " in str(error)
    assert torch.equal(training.weights(), expected)
    dist.barrier()  # the default group is of use again
    dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_a_step_that_failed_in_the_middle_is_said_on_every_rank_and_all_are_idle(tmp_path: Path) -> None:
    start(tmp_path, 2)
    training = Training("")
    training.step(0)
    saved = training.model.state_dict()
    param = next(training.model.parameters())

    def write_and_fail(*args: Any) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                param.add_(1)
            raise ValueError("out of memory")

    hook = training.optimizer.register_step_pre_hook(write_and_fail)
    with pytest.raises((ValueError, CollectiveError)):
        _step_twice(training)
    hook.remove()
    with pytest.raises(RuntimeError) as error:
        fsdp.recover(training.model)
    training.model.load_state_dict(saved)
    training.step(1)
    dist.destroy_process_group()
    error = str(error.value)
    assert "fsdp.recover(): rank 1 failed in the middle of a step, with a part of the weights written." in error
    assert "Load the last checkpoint, on every rank." in error


def _step_twice(training: Training) -> None:
    training.step(1)
    training.step(2)


def test_a_rank_that_is_gone_ends_the_wait_for_it(ranks: RankPool, tmp_path: Path) -> None:
    (error,) = [each for each in ranks(2, backend=None).run(_recover_alone, tmp_path) if each]
    assert "the meeting of all ranks in fsdp.recover() did not complete" in error
    assert "rank 1" in error


def _recover_alone(folder: Path) -> str:
    rank = start(folder, 2)
    training = Training("")
    training.step(0)
    if rank == 1:
        watchdog.stop()  # as at the end of a process
        return ""
    with pytest.raises(CollectiveError) as error:
        fsdp.recover(training.model)
    return str(error.value)


@on_ranks(2, backend=None)
def test_a_rank_may_fail_before_the_first_forward_and_again_at_once(tmp_path: Path) -> None:
    start(tmp_path, 2)
    expected = weights_after([2, 4])
    training = Training("")
    for number in range(BATCHES):
        try:
            if number in (0, 1, 3) and dist.get_rank() == 1:
                raise ValueError("a file cannot be read")
            training.step(number)
        except (ValueError, CollectiveError):
            assert not fsdp.recover(training.model)
    assert torch.equal(training.weights(), expected)
    dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_what_was_on_its_way_is_not_waited_for(tmp_path: Path) -> None:
    rank = start(tmp_path, 2)
    training = Training("")
    training.step(0)
    communicator(dist.new_group([0, 1]), torch.device("cpu"))  # which the model does not use
    ways = communicators_among([0, 1])
    assert len(ways) == 2
    for way in ways:
        assert isinstance(way, DirectExchange)
        for _ in range(2):
            way._sent.append(Sending([LostWork()], "all-gather of 1 in backward"))
    if rank == 1:
        assert not fsdp.recover(training.model)
    else:
        with pytest.raises(CollectiveError, match=r"rank 1 has called fsdp\.recover"):
            training.step(1)
        assert not fsdp.recover(training.model)
    assert not any(way._sent for way in ways)
    training.step(1)
    dist.destroy_process_group()


class LostWork:
    """The work of a message of which gloo does not tell that it cannot arrive."""

    def wait(self, *limit: timedelta) -> None:
        assert limit, "this would wait for half an hour"
        raise RuntimeError("Timed out waiting 1ms for send operation to complete")

    def is_completed(self) -> bool:
        return False


@on_ranks(2, backend=None)
def test_a_rank_that_does_not_come_out_of_its_wait_is_named(tmp_path: Path) -> None:
    rank = start(tmp_path, 2)
    training = Training("")
    training.step(0)
    store = dist.FileStore(str(tmp_path / "stuck"), 2)
    if rank == 0:
        stuck = mock.Mock(wait=lambda: store.wait(["named"]))
        finish([stuck], "all-gather of 0 in forward")
    else:
        words = "rank 0 still waits for all-gather of 0 in forward"
        with mock.patch.object(watchdog, "_STUCK", 1.0), pytest.raises(RuntimeError, match=words):
            fsdp.recover(training.model)
        store.set("named", "")


@on_ranks(2, backend=None)
def test_recoveries_leave_no_tensors(tmp_path: Path) -> None:
    start(tmp_path, 2)
    training, used = Training("forward"), []
    for _ in range(3):
        with pytest.raises((ValueError, CollectiveError)):
            training.step(BAD)
        fsdp.recover(training.model)
        training.step(BAD + 1)
        training.optimizer.zero_grad()
        gc.collect()
        used.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    assert len(set(used[1:])) == 1, used
    dist.destroy_process_group()


def test_a_plain_model_cannot_be_recovered() -> None:
    with pytest.raises(TypeError, match="needs a sharded model, got 5"):
        fsdp.recover(5)
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
        fsdp.recover(nn.Linear(1, 1))
