"""The script of docs/lightning.md, run as a user runs it: Lightning starts the other ranks."""

from __future__ import annotations

import os
import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from tests.helpers.needs import needs
from tests.helpers.paths import DATA, ROOT
from tests.helpers.ranks import RankPool

pytestmark = needs("lightning")

SCRIPT = DATA / "recipes" / "lightning_trainer.py"


PRELOAD = ["fsdp.lightning"]

# What a rank of another job has in its environment, and a shell has not.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_")


def test_it_trains_at_two_ranks_and_goes_on_at_one(ranks: RankPool, tmp_path: Path) -> None:
    # The first rank is in a process that has imported Lightning.
    process = ranks(1, backend=None, timeout=240)
    first = _last_printed(process.run(_run_script, ["--devices", "2", "--epochs", "2", "--folder", str(tmp_path)])[0])
    assert (tmp_path / "last.ckpt").exists()
    newest = str(tmp_path / "epoch=1-step=8.ckpt")
    again = ["--devices", "1", "--epochs", "4", "--folder", str(tmp_path), "--resume", newest]
    second = _last_printed(process.run(_run_script, again)[0])
    assert first[1:] + second[1:] == (2, 4)
    assert second[0] < first[0]


def _last_printed(text: str) -> tuple[float, int]:
    """The last loss and epoch that the script prints."""
    found = re.search(r"val_loss (\S+) after epoch (\d+)", text)
    assert found, text
    return float(found[1]), int(found[2])


def _run_script(arguments: list[str]) -> str:
    for name in [name for name in os.environ if name.startswith(OF_RANKS)]:
        del os.environ[name]
    os.environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}  # of the ranks that Lightning starts
    sys.argv = [str(SCRIPT), *arguments]
    with warnings.catch_warnings(), redirect_stdout(StringIO()) as output:
        warnings.simplefilter("ignore")  # Lightning's own, as in `tests.helpers.lightning`
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return output.getvalue()
