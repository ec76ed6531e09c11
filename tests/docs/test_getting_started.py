"""The programs of README.md and docs/getting_started.md run; the second goes on with more ranks, as the page says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankPool

PAGE = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE, WITHOUT_WRAPPER = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROGRAM, WEIGHTS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_it_is_resumed_on_more_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks(2).run(_run, tmp_path, 1)[0]
    assert first == ["step   0: loss 5.687", "done"]
    assert first[0] in PAGE
    resumed, *losses, _ = ranks(3).run(_run, tmp_path, 3)[0]
    assert resumed == "resumed after step 0, on 3 ranks"
    assert [line.partition(":")[0] for line in losses] == ["step   1", "step   2"]
    read = WEIGHTS.replace("00000250", "00000002").replace("checkpoints", str(tmp_path / "checkpoints"))
    exec(read.replace("print(", "assert torch.Size([256, 64]) == ("), {"torch": torch})


def test_the_example_of_the_readme_prints_what_the_readme_says(ranks: RankPool, tmp_path: Path) -> None:
    in_place = EXAMPLE.replace("model = fsdp.shard(model, units={nn.TransformerEncoderLayer})\n", WITHOUT_WRAPPER)
    in_place = in_place.replace("range(10)", "range(2)")
    assert "fsdp.shard" in EXAMPLE
    assert "fsdp.shard" not in in_place
    for form, program, steps in (("wrapped", EXAMPLE, 10), ("in place", in_place, 2)):
        (tmp_path / form).mkdir()
        for rank, lines in enumerate(ranks(2).run(_print, tmp_path / form, program)):
            assert len(lines) == steps
            shown = re.findall(rf"^rank {rank}, step [09]: loss \d\.\d+$", README, re.MULTILINE)
            assert len(shown) == 2
            for line, expected in zip(lines[::9], shown, strict=False):
                assert line.split(": loss ")[0] == expected.split(": loss ")[0]
                assert float(line.split()[-1]) == pytest.approx(float(expected.split()[-1]), abs=2e-3)


def _print(folder: Path, program: str) -> list[str]:
    """Run a program in a folder, and return what it prints."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _execute(program, print=lambda line, flush=False: said.append(line))
    return said


def _run(folder: Path, steps: int) -> list[str]:
    """Run the program of the page in a folder, and return what it prints."""
    return _print(folder, PROGRAM.replace("STEPS = 300", f"STEPS = {steps}").replace("step % 50 == 0", "True"))


def _execute(program: str, **known: Any) -> None:
    """Run a program in the process group that there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "init_distributed", lambda: torch.device("cpu"))
        patch.setattr(dist, "destroy_process_group", lambda: None)
        exec(program, known)


def test_the_picture_of_what_was_measured_shows_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "pictures")
    measured = importlib.import_module("measured")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert measured.figures(page)[0][0] == "17M parameters, float32"
    measured.draw(page, tmp_path / "drawn.svg")
    picture = ROOT / "docs" / "pictures" / "measured.svg"
    assert (tmp_path / "drawn.svg").read_text() == picture.read_text(), "run docs/pictures/measured.py"
