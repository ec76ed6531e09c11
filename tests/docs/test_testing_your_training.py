"""The tests of docs/testing_your_training.md pass, and the world that has a mistake says what the page shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import FullyShardedDataParallel
from fsdp.testing import Fault, World, WorldError, die
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "testing_your_training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.split("\n## Missing waits")[0], re.MULTILINE | re.DOTALL)


def test_the_tests_of_the_page_pass() -> None:
    known: dict[str, Any] = {"pytest": pytest}
    for block in BLOCKS:
        exec(block, known)
    known["test_sharded_training_equals_training_in_one_process"]()
    known["test_the_order_of_ranks_makes_no_difference"](seed=1)


@pytest.mark.parametrize("argument", re.findall(r"^\| `(World\(.*?\)|Fault\(.*?\))` \|", PAGE, re.MULTILINE))
def test_the_arguments_of_the_page_are_taken(argument: str) -> None:
    eval(argument, {"World": World, "Fault": Fault, "die": die})


def test_a_wait_without_end_is_shown_as_on_the_page() -> None:
    report = re.search(r"^```\n(rank 0: .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert report is not None
    with pytest.raises(WorldError) as caught:
        World(4).run(_skip_a_layer)
    names = {"layers.3": "layers.0", "layers.4": "layers.1", "train.py": "test_testing_your_training.py"}
    for line in report[1].splitlines():
        shown = re.sub(r" in step; ran \.\.\.", "", line)
        for name, ours in names.items():
            shown = shown.replace(name, ours)
        expected = re.sub(r":\d+", r":\\d+", re.escape(shown))
        assert re.search(expected, str(caught.value)), shown


def _skip_a_layer() -> None:
    model = FullyShardedDataParallel(_Layers(first=1 if torch.distributed.get_rank() == 1 else 0))
    model(torch.ones(1, 2))


class _Layers(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(FullyShardedDataParallel(nn.Linear(2, 2)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[self.first :]:
            inputs = layer(inputs)
        return inputs
