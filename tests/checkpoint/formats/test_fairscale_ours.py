"""Files of this package's `local_state_dict` and of each rank's optimizer, which are in FairScale's format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.checkpoint.formats.fairscale import open_fairscale
from fsdp.checkpoint.formats.trees import Choices
from fsdp.optim_utils import full_optim_state_dict
from tests.helpers.legacy_sources import assert_same_values, groups_of, state_of, weights_of
from tests.helpers.models import keep
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool

WAYS: dict[str, dict[str, Any]] = {
    "flat": {},
    "unflattened": {"flatten_parameters": False},
    "pieces": {"use_orig_params": True},
}


class Model(nn.Module):
    """Units before, between and after the parameters of the outermost one; a tie; fewer elements than ranks."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = keep) -> None:
        super().__init__()
        self.before = wrap(nn.Linear(3, 3))
        self.first = nn.Linear(3, 3)
        self.between = wrap(nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 3)))
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.between(self.first(self.before(inputs)))) * self.frozen.sum()


def save(folder: Path, way: str, grouped: bool) -> None:
    """On each rank: train, save a file, and the whole of it."""
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(
        Model(lambda module: FullyShardedDataParallel(module, **WAYS[way])), **WAYS[way]
    )
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:]}] if grouped else [{"params": params}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step + dist.get_rank()))).sum().backward()
        optimizer.step()
    content = {"weights": model.local_state_dict(), "metadata": model.local_metadata_dict()}
    torch.save({**content, "optimizer": optimizer.state_dict()}, folder / f"rank{dist.get_rank()}.pt")
    listed = {param: name for name, param in model.named_parameters()}
    whole = {"model": model.state_dict(), "optimizer": full_optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        order = [listed[param] for group in optimizer.param_groups for param in group["params"]]
        torch.save({**whole, "order": order}, folder / "whole.pt")


@parametrize_pairs(world_size=[1, 2], grouped=[False, True], way=list(WAYS))
def test_our_files_are_whole_weights_and_state(
    ranks: RankPool, tmp_path: Path, way: str, grouped: bool, world_size: int
) -> None:
    ranks(world_size).run(save, tmp_path, way, grouped)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    # The frozen parameter has a shard, and is not in the optimizer.
    with pytest.raises(ValueError, match="--param-order"):
        open_fairscale(tmp_path)
    source = open_fairscale(tmp_path, Choices(param_order=whole["order"]))
    found = weights_of(source)
    assert found.keys() == whole["model"].keys()
    for name, value in whole["model"].items():
        assert torch.equal(found[name], value), name
    assert_same_values(state_of(source), whole["optimizer"]["state"])
    expected = whole["optimizer"]["param_groups"]
    assert [options["lr"] for options, _ in groups_of(source)] == [group["lr"] for group in expected]
    assert [sorted(names) for _, names in groups_of(source)] == [sorted(group["params"]) for group in expected]


def test_the_order_of_parameters_is_that_in_which_modules_list_them(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_all, tmp_path)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same_values(state_of(open_fairscale(tmp_path)), whole["optimizer"]["state"])


def save_all(folder: Path) -> None:
    """Unflattened parameters of the outermost unit around those of an inner one, all of one size."""
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), flatten_parameters=False)
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), inner, nn.Linear(2, 2, bias=False))
    model: Any = FullyShardedDataParallel(plain, flatten_parameters=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    content = {"weights": model.local_state_dict(), "metadata": model.local_metadata_dict()}
    torch.save({**content, "optimizer": optimizer.state_dict()}, folder / f"rank{dist.get_rank()}.pt")
    full = full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"optimizer": full}, folder / "whole.pt")
