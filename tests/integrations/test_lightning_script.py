"""The script of docs/lightning.md, run as a user runs it: Lightning starts the ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import DATA, ROOT
from tests.integrations.test_lightning_training import needs_lightning

pytestmark = needs_lightning

SCRIPT = DATA / "recipes" / "lightning_trainer.py"


def test_it_trains_at_two_ranks_and_goes_on_at_one(tmp_path: Path) -> None:
    first = _run("--devices", "2", "--epochs", "2", "--folder", str(tmp_path))
    assert (tmp_path / "last.ckpt").exists()
    second = _run(
        "--devices", "1", "--epochs", "4", "--folder", str(tmp_path), "--resume", str(tmp_path / "epoch=1-step=8.ckpt")
    )
    assert first[1:] + second[1:] == (2, 4)
    assert second[0] < first[0]


def _run(*arguments: str) -> tuple[float, int]:
    """The last loss and epoch that the script prints."""
    # As from a shell, and not from a rank of another job.
    others = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"val_loss (\S+) after epoch (\d+)", done.stdout)
    assert found, done.stdout
    return float(found[1]), int(found[2])
