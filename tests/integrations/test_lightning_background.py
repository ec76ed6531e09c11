"""Lightning's `AsyncCheckpointIO` with sharded checkpoints: training goes on while they are written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.checkpoint import writer
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]


@on_lit_ranks(2)
def test_training_goes_on_and_the_last_checkpoint_stays_until_the_next_is_there(tmp_path: Path) -> None:
    from tests.helpers import lightning as lit

    steps = {number: threading.Event() for number in range(1, 13)}
    until = iter([8, 12, 12])  # the last steps of the epochs after those that are saved: by then the next save waits
    seen: dict[int, list[str]] = {}

    class Watching(lit.Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            dist.barrier()
            seen[self.trainer.global_step] = _checkpoints(tmp_path)
            steps[self.trainer.global_step].set()

    with _writing(lambda: steps[next(until)].wait(60) or pytest.fail("training waits for the checkpoint")):
        trainer = _fitted(tmp_path, Watching(), epochs=3)
    assert seen[6] == []
    # By now the callback has asked to have the first one removed, and the second is not there yet.
    assert seen[10] == ["epoch=0-step=4.ckpt"]
    assert _checkpoints(tmp_path) == ["epoch=2-step=12.ckpt"]
    with lit.quiet():
        trainer.validate(Watching(), lit.batches(), ckpt_path=tmp_path / "epoch=2-step=12.ckpt", verbose=False)
    expected = lit.trained_alone(lit.Regression(), epochs=3)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)


@on_lit_ranks(2)
def test_a_checkpoint_that_fails_is_told_by_the_next_and_the_one_before_is_kept(tmp_path: Path) -> None:
    from tests.helpers import lightning as lit

    calls: list[None] = []
    with (
        _writing(lambda: calls.append(None)),
        _full_disk(lambda: len(calls) == 2 and dist.get_rank() == 1),
        pytest.raises((OSError, RuntimeError), match="No space left on device"),
    ):
        _fitted(tmp_path, lit.Regression(), epochs=4)
    dist.barrier()
    assert len(calls) == 2
    assert _checkpoints(tmp_path) == ["epoch=0-step=4.ckpt"]
    assert fsdp.checkpoint.verify(tmp_path / "epoch=0-step=4.ckpt")


@on_lit_ranks(2)
def test_a_failure_at_the_end_is_told_as_well_but_not_in_the_place_of_another(tmp_path: Path) -> None:
    from tests.helpers import lightning as lit

    class Failing(lit.Regression):
        def on_train_end(self) -> None:
            raise ZeroDivisionError("of the module")

    with _full_disk(lambda: True), pytest.raises((OSError, RuntimeError), match="No space left on device"):
        _fitted(tmp_path, lit.Regression(), epochs=1)
    with _full_disk(lambda: True), pytest.raises(ZeroDivisionError, match="of the module"):
        _fitted(tmp_path, Failing(), epochs=1)
    assert _checkpoints(tmp_path) == []


def _fitted(folder: Path, module: Any, epochs: int) -> Any:
    """By a Trainer that keeps the checkpoint of the last epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import AsyncCheckpointIO

    from tests.helpers import lightning as lit

    trainer = lit.trainer(
        folder,
        strategy=lit.fsdp.lightning.FullyShardedStrategy(state_dict_type="sharded"),
        plugins=[AsyncCheckpointIO()],
        callbacks=[ModelCheckpoint(folder, save_top_k=1)],
        enable_checkpointing=True,
        max_epochs=epochs,
    )
    lit.fitted(module, trainer)
    dist.barrier()  # the first rank removes what is not wanted any more
    return trainer


@contextmanager
def _writing(first: Callable[[], Any]) -> Iterator[None]:
    """Whoever writes in the background does something first, on each rank."""
    write = writer.write

    def writing(place: Any, found: Any, ranks: Any) -> Any:
        first()
        return write(place, found, ranks)

    with mock.patch.object(writer, "write", writing):
        yield


@contextmanager
def _full_disk(is_full: Callable[[], bool]) -> Iterator[None]:
    pwrite = os.pwrite

    def write(*args: Any) -> int:
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    with mock.patch("os.pwrite", write):
        yield


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".ckpt")
