"""A gradient that is not finite is named on the rank where it comes from, if that was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp.distributed.communicator import CollectiveError
from fsdp.distributed.dtensor import local_part
from tests.helpers.forms import sharded
from tests.helpers.on_ranks import on_ranks

BAD = 1  # the number of the batch that is not finite, on rank 1


def layers(form: str) -> nn.Module:
    torch.manual_seed(0)
    return sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), form, (nn.Linear,))


@pytest.mark.parametrize("form", ["flat", "rows"])
@on_ranks(2, backend=None)
def test_the_first_one_is_named_with_its_rank_and_the_others_hear_of_it_and_can_go_on(
    tmp_path: Path, form: str
) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(tmp_path / "store"), 2))
    model, expected = layers(form), layers(form)
    train(expected, [0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for number in range(3):
        try:
            with fsdp.detect_nonfinite(model):
                step(model, optimizer, number)
        except RuntimeError as error:
            errors.append(error)
            fsdp.recover(model)
    (error,) = errors
    assert "rank 1: the gradient of bias of unit '1'" in str(error)
    assert isinstance(error, CollectiveError) == (rank == 0)
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(local_part(mine), local_part(its))
    dist.destroy_process_group()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    is_bad = number == BAD and dist.get_rank() == 1
    (model(torch.ones(2, 4) * number) * (float("nan") if is_bad else 1.0)).sum().backward()
    optimizer.step()


def train(model: nn.Module, numbers: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in numbers:
        step(model, optimizer, number)


@on_ranks(2)
def test_nothing_is_looked_at_outside() -> None:
    model = layers("flat")
    with fsdp.detect_nonfinite(model):
        train(model, [0])
    train(model, [BAD])
    assert not any(param.isfinite().all() for param in model.parameters())


def test_a_model_that_is_not_sharded_has_nothing_to_look_at() -> None:
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"), fsdp.detect_nonfinite(nn.Linear(1, 1)):
        pass


@pytest.mark.parametrize("observe", ["detect_nonfinite", "record_fingerprints"])
@pytest.mark.parametrize("form", ["flat", "rows"])
@on_ranks(2)
def test_a_sparse_gradient_is_the_same_error_inside_an_observation(tmp_path: Path, form: str, observe: str) -> None:
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Embedding(4, 4, sparse=True)), form)
    contexts = {
        "detect_nonfinite": fsdp.detect_nonfinite(model),
        "record_fingerprints": fsdp.record_fingerprints(model, tmp_path / "recording"),
    }
    with contexts[observe], pytest.raises(RuntimeError, match=r"0\.weight has a gradient of layout torch\.sparse_coo"):
        model(torch.tensor([0, 1])).sum().backward()
