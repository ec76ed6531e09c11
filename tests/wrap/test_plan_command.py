"""``python -m fsdp plan``, and the page about planning."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp.__main__ import main
from tests.helpers.paths import ROOT

Captured = pytest.CaptureFixture[str]

FACTORIES = """
import torch
from torch import nn


class Layer(nn.Linear):
    pass


def layers():
    return nn.Sequential(*(Layer(12, 12, bias=False) for _ in range(3)))


def sampled():
    return layers(), torch.zeros(5, 12)


def nothing():
    return 3


def failing():
    raise KeyError("of the user")
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "factories_of_plans.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories_of_plans", raising=False)
    return "factories_of_plans"


def test_a_plan_is_printed(factories: str, capsys: Captured) -> None:
    arguments = ["plan", f"{factories}:sampled", "--world-size", "4", "--unit", "Layer", "--bandwidth", "2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "One rank of 4, in one step" in text
    assert re.search(r"^2 x 0 +144 +0 +144 B +576 B +2$", text, re.MULTILINE)
    assert "at 2 GB/s" in text
    assert "Activations are not counted" not in text


def test_options_change_the_plan(factories: str, capsys: Captured) -> None:
    def planned(*options: str) -> Any:
        assert main(["plan", f"{factories}:layers", "--world-size", "4", "--unit", "Layer", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    plain = planned()
    assert plain["parameter_bytes"] == 3 * 4 * 144 // 4
    assert plain["optimizer_bytes"] == 2 * plain["parameter_bytes"] + 3 * 4
    assert not plain["has_activations"]
    assert planned("--keep")["bytes_sent"] < plain["bytes_sent"]
    assert 2 * planned("--dtype", "bfloat16")["bytes_sent"] == plain["bytes_sent"]
    assert planned("--optimizer", "SGD")["optimizer_bytes"] == 0
    assert planned("--replicas", "2")["parameter_bytes"] == 2 * plain["parameter_bytes"]
    assert planned("--backend", "nccl")["collectives"] == plain["collectives"]
    assert planned("--bandwidth", "1")["seconds_of_communication"] == plain["bytes_sent"] / 1e9


def test_units_are_chosen_by_a_budget(factories: str, capsys: Captured) -> None:
    arguments = ["plan", f"{factories}:sampled", "--world-size", "4", "--budget"]
    assert main([*arguments, "1"]) == 0
    assert capsys.readouterr().out.startswith("Fits into 1.0 GiB on each rank: 3 units inside of the outermost one")
    assert main([*arguments, "1e-6", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["missing"] == data["plan"]["peak"] - 1073
    assert data["remedies"]["offload"]["host_peak"] > 0
    assert main(["plan", f"{factories}:sampled", "--world-size", "4", "--offload", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_peak"] > 0


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("factories_of_plans", (), "a module and its function that returns the model"),
        ("factories_of_plans:gone", (), "has no attribute 'gone'"),
        ("no_such_module:gone", (), "No module named 'no_such_module'"),
        ("factories_of_plans:nothing", (), "returned int: return an nn.Module"),
        (
            "factories_of_plans:failing",
            (),
            ":failing raised KeyError on the meta device: 'of the user'",
        ),
        ("factories_of_plans:layers", ("--unit", "Lair"), "no module of this class, but of Layer, Sequential"),
        ("factories_of_plans:layers", ("--unit", "Layer", "--budget", "1"), "omit --unit and --keep"),
        ("factories_of_plans:layers", ("--optimizer", "Adan"), "torch.optim has no optimizer of this name"),
        ("factories_of_plans:layers", ("--optimizer", "Optimizer"), "torch.optim has no optimizer of this name"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    factories: str, capsys: Captured, factory: str, options: tuple[str, ...], message: str
) -> None:
    assert main(["plan", factory, "--world-size", "2", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.startswith("fsdp: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "said"), [("--bandwidth", "bandwidth is a positive"), ("--budget", "memory_budget is")]
)
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_numbers_that_make_no_sense_are_one_line(
    factories: str, capsys: Captured, option: str, said: str, value: str
) -> None:
    assert main(["plan", f"{factories}:layers", "--world-size", "2", option, value]) == 1
    assert capsys.readouterr().err.startswith(f"fsdp: {said}")


def test_the_example_of_the_page_prints_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    code, shown = re.findall(r"^```(?:python)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    assert printed.getvalue() == shown
