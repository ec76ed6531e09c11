"""A short run of `tests.tools.soak`: exceptions, restarts and kills leave the weights of an undisturbed training."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_disturbed_training_ends_with_the_weights_of_an_undisturbed_one() -> None:
    options = "--steps 10 --save-every 3 --ranks 2 --seed 252"  # three lives, one with a kill, two with exceptions
    found = subprocess.run(
        [sys.executable, "-m", "tests.tools.soak", *options.split()],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "'lives': 3, 'killed': 1, 'exceptions': 2" in found.stdout
    assert "nothing has grown, and the weights are right" in found.stdout
