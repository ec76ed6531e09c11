"""Every form of a model's state can be made of every other one, at any numbers of ranks, bit for bit.

The forms: whole weights from the first rank, each rank's shards consolidated offline, a folder of
`torch.distributed.checkpoint`, and the unsharded model. Files are really written, by one number of ranks, and read by
another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel
from tests.helpers.dcp_folders import alone_warning, everything, load_sharded, save_sharded, state_in
from tests.helpers.equality import assert_same_state
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

pytestmark = alone_warning

LAYOUTS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]


def write_whole(model: Any, folder: Path) -> None:
    state = model.state_dict(rank0_only=True)
    if dist.get_rank() == 0:
        torch.save(state, folder / "model.pt")


def write_local(model: Any, folder: Path) -> None:
    torch.save((model.local_state_dict(), model.local_metadata_dict()), folder / f"rank{dist.get_rank()}.pt")


def read_whole(folder: Path) -> Any:
    return torch.load(folder / "model.pt", mmap=True)


def read_local(folder: Path) -> Any:
    ranks = [torch.load(file, mmap=True) for file in sorted(folder.glob("rank*.pt"))]
    return FullyShardedDataParallel.consolidate_shard_weights(*zip(*ranks, strict=True))


def read_sharded(folder: Path) -> Any:
    return state_in(folder, everything)


WRITERS: dict[str, Callable[[Any, Path], None]] = {"whole": write_whole, "local": write_local, "sharded": save_sharded}
READERS: dict[str, Callable[[Path], Any]] = {
    "whole": read_whole,
    "local": read_local,
    "sharded": read_sharded,
    "unsharded": read_whole,
}


@parametrize_cases(
    at_most=7,
    saved_by=[3, 1, 2, 4],
    loaded_by=[2, 4, 1, 3],
    first=["local", "sharded", "whole", "unsharded"],
    second=["sharded", "local", "whole"],
    saving=LAYOUTS,
    loading=LAYOUTS,
)
def test_one_form_becomes_another(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    before, after = tmp_path / "first", tmp_path / "second"
    before.mkdir()
    after.mkdir()
    expected = everything(seed=3).state_dict()
    if case.first == "unsharded":
        torch.save(expected, before / "model.pt")
    else:
        ranks(case.saved_by).run(_save, case.first, before, case.saving)
    ranks(case.loaded_by).run(_load_and_save, case.first, before, case.second, after, case.loading)
    model = everything(seed=4)
    model.load_state_dict(READERS[case.second](after))
    assert_same_state(model.state_dict(), expected)


def _save(form: str, folder: Path, options: dict[str, Any]) -> None:
    WRITERS[form](everything(fully_sharded(**options), seed=3), folder)


def _load_and_save(first: str, before: Path, second: str, after: Path, options: dict[str, Any]) -> None:
    model = everything(fully_sharded(**options), seed=4)
    if first == "sharded":
        load_sharded(model, before)
    else:
        model.load_state_dict(READERS[first](before))
    WRITERS[second](model, after)
    dist.barrier()
