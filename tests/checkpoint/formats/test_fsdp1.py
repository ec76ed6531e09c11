"""What torch's FSDP1 saves, by really running it: a source of it has the unsharded optimizer's state, to the bit.

The truth is what FSDP1 itself gathers; and that is what a plain model gets, trained on the same batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import StateDictType

from fsdp.checkpoint.formats.rank_files import has_fsdp1_shards, open_fsdp1
from fsdp.checkpoint.formats.trees import Choices
from tests.helpers.legacy_sources import assert_same_values, groups_of, state_of, weights_of
from tests.helpers.models import keep
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool

every_world = pytest.mark.parametrize("world_size", [2, 3])


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


def trained(wrap: Callable[[nn.Module], nn.Module], grouped: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After two steps of Adam, on the same batches on all ranks."""
    torch.manual_seed(0)
    model = wrap(Model(wrap))
    named = dict(model.named_parameters())
    biases = [param for name, param in named.items() if name.endswith("bias")]
    others = [param for name, param in named.items() if not name.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "lr": 0.5}] if grouped else [{"params": list(named.values())}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(folder: Path, kind: str, options: Mapping[str, Any]) -> None:
    """On each rank: train with FSDP1, and save `kind` of state; and the truth."""
    warnings.simplefilter("ignore")  # torch's, of FSDP1
    rank, how = dist.get_rank(), dict(options)
    grouped = how.pop("grouped", False)
    if "mesh" in how:
        how["device_mesh"] = init_device_mesh("cpu", how.pop("mesh"))

    def wrap(module: nn.Module) -> nn.Module:
        return TorchFSDP1(module, device_id=torch.device("cpu"), **how)

    model, optimizer = trained(wrap, grouped)
    states = dict.fromkeys(("sharded", "old sharded"), StateDictType.SHARDED_STATE_DICT)
    states |= {"local": StateDictType.LOCAL_STATE_DICT}
    if kind != "full":
        with TorchFSDP1.state_dict_type(model, states[kind]):
            weights = model.state_dict()
            if kind == "sharded":
                state = TorchFSDP1.optim_state_dict(model, optimizer)
            elif kind == "old sharded":
                state = TorchFSDP1.sharded_optim_state_dict(model, optimizer)
            else:
                state = optimizer.state_dict()
        torch.save({"model": weights, "optimizer": state, "step": 2}, folder / f"rank{rank}.pt")
    full = TorchFSDP1.full_optim_state_dict(model, optimizer)
    with TorchFSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()
    if rank == 0:
        torch.save({"model": whole, "optimizer": full, "step": 2}, folder / "whole.pt")


def folders(folder: Path) -> tuple[Path, Path]:
    """Two in it."""
    found = folder / "shards", folder / "whole"
    for each in found:
        each.mkdir()
    return found


def truth(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "whole.pt", weights_only=True)


@pytest.fixture(scope="module")
def of_two(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved, sharded and whole."""
    folder = tmp_path_factory.mktemp("fsdp1")
    ranks(2).run(save, folder, "sharded", {})
    return folder


def assert_is(source: Any, whole: Mapping[str, Any]) -> None:
    found = weights_of(source)
    assert found.keys() == whole["model"].keys()
    for name, value in whole["model"].items():
        assert torch.equal(found[name], value), name
    assert_same_values(state_of(source), whole["optimizer"]["state"])
    for (options, names), group in zip(groups_of(source), whole["optimizer"]["param_groups"], strict=True):
        assert names == group["params"]
        assert options["lr"] == group["lr"]


@every_world
def test_full_state_is_read_and_is_that_of_the_unsharded_optimizer(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    ranks(world_size).run(save, tmp_path, "full", {})
    source = open_fsdp1(tmp_path / "whole.pt")
    assert_is(source, truth(tmp_path))
    assert (source.world_size, source.values, source.notes) == (None, {"step": 2}, ())
    model, optimizer = trained(keep)
    names = {param: name for name, param in model.named_parameters()}
    found = state_of(source)
    for param, entry in optimizer.state.items():
        for key, value in entry.items():
            torch.testing.assert_close(found[names[param]][key], value)


@parametrize_pairs(world_size=[2, 3], use_orig_params=[False, True], kind=["sharded", "old sharded"])
def test_sharded_state_of_ranks_files_is_whole(
    ranks: RankPool, tmp_path: Path, world_size: int, kind: str, use_orig_params: bool
) -> None:
    shards, whole = folders(tmp_path)
    ranks(world_size).run(save, shards, kind, {"use_orig_params": use_orig_params})
    # With use_orig_params FSDP1 on CPUs gathers one key's values under all of them.
    ranks(world_size).run(save, whole, "full", {})
    source, expected = open_fsdp1(shards), truth(whole)
    expected["optimizer"]["param_groups"] = truth(shards)["optimizer"]["param_groups"]  # in another order
    assert_is(source, expected)
    assert source.world_size == world_size
    assert source.values == {"step": 2}


@every_world
def test_sharded_state_of_dtensors_is_whole(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    ranks(world_size).run(save, tmp_path, "sharded", {"mesh": (world_size,)})
    assert_is(open_fsdp1(tmp_path), truth(tmp_path))


def test_dtensors_say_whose_they_are_whatever_numbers_their_files_have(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(save, tmp_path, "sharded", {"mesh": (3,)})
    for number, rank in enumerate((2, 0, 1)):
        (tmp_path / f"rank{rank}.pt").rename(tmp_path / f"other-rank{number}.pt")
    assert_is(open_fsdp1(tmp_path), truth(tmp_path))


def test_sharded_state_of_replicas_is_that_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    ranks(4).run(save, tmp_path, "sharded", {"mesh": (2, 2), "sharding_strategy": ShardingStrategy.HYBRID_SHARD})
    assert_is(open_fsdp1(tmp_path), truth(tmp_path))


def test_groups_keep_their_settings(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, "sharded", {"use_orig_params": True, "grouped": True})
    source = open_fsdp1(tmp_path)
    names = [names for _, names in groups_of(source)]
    assert names == [group["params"] for group in truth(tmp_path)["optimizer"]["param_groups"]]
    assert "last.bias" in names[1]
    assert [options["lr"] for options, _ in groups_of(source)] == [0.01, 0.5]


def test_weights_and_state_may_be_in_different_files(of_two: Path, tmp_path: Path) -> None:
    torch.save(truth(of_two)["optimizer"], tmp_path / "optimizer.pt")
    assert_is(open_fsdp1(of_two, Choices(optimizer_files=tmp_path / "optimizer.pt")), truth(of_two))


def test_weights_alone_and_state_alone_are_read(of_two: Path, tmp_path: Path) -> None:
    whole = truth(of_two)
    torch.save(whole["model"], tmp_path / "model.pt")
    torch.save(whole["optimizer"], tmp_path / "optimizer.pt")
    weights, state = open_fsdp1(tmp_path / "model.pt"), open_fsdp1(tmp_path / "optimizer.pt")
    assert weights_of(weights).keys() == whole["model"].keys()
    assert (weights.optimizer, weights.values) == (None, None)
    assert_same_values(state_of(state), whole["optimizer"]["state"])
    assert (dict(state.model.tensors), state.notes) == ({}, ("there are no weights of a model in it",))


def test_state_by_numbers_is_read_with_names(of_two: Path, tmp_path: Path) -> None:
    whole = truth(of_two)
    names = whole["optimizer"]["param_groups"][0]["params"]
    numbered = {
        "state": {number: whole["optimizer"]["state"][name] for number, name in enumerate(names)},
        "param_groups": [{**whole["optimizer"]["param_groups"][0], "params": list(range(len(names)))}],
    }
    torch.save({"model": whole["model"], "optimizer": numbered}, tmp_path / "numbered.pt")
    assert_is(open_fsdp1(tmp_path / "numbered.pt", Choices(param_order=names)), whole)
    with pytest.raises(ValueError, match="numbers, but their names are unknown"):
        open_fsdp1(tmp_path / "numbered.pt")


def test_files_are_known_by_what_is_in_them(of_two: Path, tmp_path: Path) -> None:
    assert has_fsdp1_shards(of_two)
    assert not has_fsdp1_shards(of_two / "whole.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "plain.pt")
    assert not has_fsdp1_shards(tmp_path / "plain.pt")
    assert not has_fsdp1_shards(tmp_path / "nothing.pt")
    assert not has_fsdp1_shards(Path(__file__))
