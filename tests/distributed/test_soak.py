"""A short soak (`tests.tools.soak`): exceptions, restarts and kills leave the weights of an undisturbed training."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_disturbed_training_ends_with_the_weights_of_an_undisturbed_one() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.tools.soak",
        "--steps",
        "24",
        "--save-every",
        "4",
        "--ranks",
        "3",
        "--seed",
        "14",
    ]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "nothing has grown, and the weights are right" in found.stdout
    assert "'killed': 0" not in found.stdout
    assert "'exceptions': 0" not in found.stdout
