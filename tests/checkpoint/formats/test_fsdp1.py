"""Full states that torch's FSDP1 saves are read as files of `torch.save`; shards are refused with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import StateDictType

from fsdp.checkpoint.formats.open_source import open_source
from tests.helpers.legacy_sources import assert_same_values, state_of, weights_of
from tests.helpers.models import keep
from tests.helpers.ranks import RankPool


class Model(nn.Module):
    """A unit in a unit with parameters before and after it, a tie, a batch norm, and fewer elements than ranks."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = keep) -> None:
        super().__init__()
        self.inner = wrap(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)))
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.few = wrap(nn.Linear(5, 1, bias=False))
        self.tiny = wrap(nn.Linear(1, 1, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.tiny(self.few(self.last(self.first(self.inner(inputs)))))


def trained(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After two steps of Adam, on the same batches on all ranks."""
    torch.manual_seed(0)
    model = wrap(Model(wrap))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(folder: Path) -> None:
    """On each rank: train with FSDP1, and save its shards; on the first rank, also the full state."""
    warnings.simplefilter("ignore")  # torch's, of FSDP1
    model, optimizer = trained(lambda module: TorchFSDP1(module, device_id=torch.device("cpu")))
    with TorchFSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save({"model": model.state_dict()}, folder / f"rank{dist.get_rank()}.pt")
    full = TorchFSDP1.full_optim_state_dict(model, optimizer)
    with TorchFSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": whole, "optimizer": full, "step": 2}, folder / "whole.pt")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_full_state_is_read_and_is_that_of_the_unsharded_optimizer(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    ranks(world_size).run(save, tmp_path)
    source, whole = open_source(tmp_path / "whole.pt"), torch.load(tmp_path / "whole.pt", weights_only=True)
    found = weights_of(source)
    assert found.keys() == whole["model"].keys()
    assert all(torch.equal(found[name], value) for name, value in whole["model"].items())
    assert_same_values(state_of(source), whole["optimizer"]["state"])
    assert source.values == {"step": 2}
    model, optimizer = trained(keep)
    names = {param: name for name, param in model.named_parameters()}
    state = state_of(source)
    for param, entry in optimizer.state.items():
        for key, value in entry.items():
            torch.testing.assert_close(state[names[param]][key], value)


def test_shards_of_a_rank_are_refused_with_what_to_save_instead(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path)
    with pytest.raises(ValueError, match=r"rank0.pt has the shards of one rank in it .*save a full state dict, or"):
        open_source(tmp_path / "rank0.pt")
