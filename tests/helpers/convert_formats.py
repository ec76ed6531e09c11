"""What tests of formats and of the command share: a model with tensors of every kind, and how to compare."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.checkpoint.cli import main
from fsdp.checkpoint.formats.open_source import open_source
from fsdp.checkpoint.formats.source import Source, TensorReader
from tests.helpers.equality import assert_same

VALUES = {"step": 7, "lr": [0.1, float("inf")], "table": torch.arange(3)}


class Kinds(nn.Module):
    """Tensors in 16 bits, without dimensions, without elements, transposed, in several dtypes; and extra state.

    It computes nothing.
    """

    turned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.thin = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.fine = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.note: Any = ("seen", 3)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def kinds(seed: int = 0) -> Kinds:
    """The same values on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Kinds()


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """What has one dimension or none is in a group of its own."""
    params = list(model.parameters())
    flat = [param for param in params if param.dim() < 2]
    groups = [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": flat, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    """With gradients that are the same on every call; the last parameter gets none, and so no state."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(times):
        for param in list(model.parameters())[:-1]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def trained() -> tuple[Kinds, torch.optim.Optimizer]:
    """A model, and its optimizer with state."""
    model = kinds()
    optimizer = in_groups(model)
    stepped(model, optimizer)
    return model, optimizer


def saved(folder: Path, **options: Any) -> Path:
    """A checkpoint of ours with all there can be in one."""
    fsdp.save(folder, *trained(), values=VALUES, **options)
    return folder


def converted(path: Path, target: Path, *options: str) -> Path:
    """By the command."""
    assert main(["convert", str(path), str(target), *options]) == 0
    return target


def assert_same_checkpoint(path: Path, expected: Path) -> None:
    """Equal bits in all that two checkpoints of any formats say."""
    with closing(open_source(path)) as one, closing(open_source(expected)) as other:
        assert_same_tensors(one.model, other.model)
        assert (one.optimizer is None) is (other.optimizer is None)
        if one.optimizer is not None and other.optimizer is not None:
            assert_same_tensors(one.optimizer, other.optimizer)
            assert states_of(one) == states_of(other)
            assert groups_of(one) == groups_of(other)
        assert dict(one.extra) == dict(other.extra)
        assert one.values == other.values


def states_of(source: Source) -> dict[str, Any]:
    """What there is of each parameter that has any."""
    return {name: kinds for name, kinds in source.optimizer_rest["state"].items() if kinds}


def groups_of(source: Source) -> list[tuple[Any, list[str]]]:
    """The settings and the members of each group; formats may have members in another order."""
    return [(group["options"], sorted(group["params"])) for group in source.optimizer_rest["groups"]]


def assert_same_tensors(found: TensorReader, expected: TensorReader) -> None:
    assert set(found.tensors) == set(expected.tensors)
    for name in expected.tensors:
        assert_same(whole(found, name), whole(expected, name), name)


def whole(reader: TensorReader, name: str) -> Tensor:
    """All of a tensor."""
    made = torch.empty(reader.tensors[name].shape, dtype=reader.tensors[name].dtype)
    reader.read(name, made)
    return made


def assert_same_states(found: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    """Of a model, where extra state is left aside."""
    both = ({name: value for name, value in one.items() if isinstance(value, Tensor)} for one in (found, expected))
    assert_same(*both)


class Said(NamedTuple):
    """What a command returned and printed."""

    code: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Said:
    """Run it in this process."""
    capsys.readouterr()
    try:
        code = main([str(each) for each in arguments])
    except SystemExit as left:  # of argparse
        code = int(left.code or 0)
    captured = capsys.readouterr()
    return Said(code, captured.out, captured.err)
