"""Faults in a training by Lightning's Trainer; importing Lightning is left to the ranks."""

from __future__ import annotations

import importlib.util
import signal
from functools import partial

from tests.faults.fault import ENDED, GONE, LATE, Fault, assigns, ends_by, inside, raises, sleeps
from tests.faults.job import Job

GATHER = r"all-gather of (net|head|root)"


def fit(job: Job) -> None:
    """Train with a Trainer."""
    from tests.helpers import lightning as lit

    class Module(lit.WithLayers):
        def training_step(self, batch, index):  # type: ignore[no-untyped-def]
            if index == 1 and job.struck is not None:
                job.trainer = self.trainer
                job.strike(job.inside)
            return super().training_step(batch, index)

    lit.fitted(Module(), lit.trainer(job.folder), range(job.batches))


def saves(job: Job) -> None:
    job.trainer.save_checkpoint(job.folder / "one.ckpt")


by_trainer = partial(Fault, at="fit", program="fit", sizes=(2,))

# fmt: off
FAULTS = {
    "Lightning": [
        by_trainer("an error in training_step", "exceptions", inside(raises(ValueError("a bad batch"))),
            rank=f"{ENDED} ValueError: a bad batch", unit=GATHER, by="others"),
        by_trainer("killed", "SIGKILL", inside(ends_by(signal.SIGKILL)), rank=GONE, unit=GATHER, ends="SIGKILL"),
        by_trainer("late", "slow ranks", inside(sleeps(6)), rank=LATE, unit=GATHER, raises=False, by="one"),
        by_trainer("a checkpoint on one rank only", "extra calls", inside(saves),
            rank=f"{ENDED} RuntimeError: cannot take a state dict", unit=GATHER, by="others"),
        by_trainer("fewer batches on one rank", "skipping", assigns(batches=2), rank=r"rank 1\b", unit="."),
    ]
    * (importlib.util.find_spec("lightning") is not None)
}
# fmt: on
