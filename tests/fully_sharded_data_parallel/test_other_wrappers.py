"""What else spreads a model over devices takes no sharded one: it would overwrite shards with each other."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fsdp
from tests.helpers.models import keep, nested_mlp
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool


def test_distributed_data_parallel_around_what_is_sharded_is_refused(ranks: RankPool) -> None:
    ranks(2).run(_wrap_in_ddp)


def _wrap_in_ddp() -> None:
    model = nested_mlp(fully_sharded())
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel has been given NestedMlp.*Leave it out"):
        DistributedDataParallel(model)
    assert all(map(torch.equal, model.parameters(), before))
    # A unit further inside shows when it runs.
    part = nested_mlp(keep)
    part.trunk = fully_sharded()(part.trunk)
    ddp = DistributedDataParallel(part)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel has been given .*Sequential.*Leave it out"):
        ddp(torch.ones(2, 5))
    # Nor does it average what is not spread over ranks: gradients do not come by autograd.
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel has been given NestedMlp"):
        DistributedDataParallel(nested_mlp(fully_sharded(process_group=Alone())))
    # What it is told to ignore it may have inside.
    part = nested_mlp(keep)
    part.trunk = fully_sharded()(part.trunk)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        part, [name for name, _ in part.named_parameters() if name.startswith("trunk")]
    )
    DistributedDataParallel(part)(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is not None for param in part.parameters())


def test_replicas_of_what_is_sharded_are_refused(ranks: RankPool) -> None:
    ranks(2).run(_replicate)


def _replicate() -> None:
    # As torch.nn.parallel.replicate does with every module that it is given.
    for model in (nested_mlp(fully_sharded()), fsdp.fully_shard(nested_mlp(keep))):
        with pytest.raises(RuntimeError, match=r"DataParallel has been given .*NestedMlp.*one process for each device"):
            model._replicate_for_data_parallel()
