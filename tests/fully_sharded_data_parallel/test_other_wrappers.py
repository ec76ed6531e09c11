"""What else spreads or copies a model takes no sharded one: it would overwrite shards with each other, or keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp
from tests.helpers.copied_twins import FLAT, ORIGINAL, UNFLATTENED
from tests.helpers.equality import assert_close
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.twins import batch


@on_ranks(2)
def test_distributed_data_parallel_around_what_is_sharded_is_refused() -> None:
    model = nested_mlp(fully_sharded())
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel got NestedMlp.*Remove DistributedDataParallel"):
        DistributedDataParallel(model)
    assert all(map(torch.equal, model.parameters(), before))
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel got Linear.*Remove DistributedDataParallel"):
        DistributedDataParallel(fsdp.fully_shard(nn.Linear(4, 4)))
    # A unit further inside shows when it runs.
    part = nested_mlp(keep)
    part.trunk = fully_sharded()(part.trunk)
    ddp = DistributedDataParallel(part)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel got .*Sequential.*Remove DistributedDataParallel"):
        ddp(torch.ones(2, 5))
    # Nor does it average what is not spread over ranks: gradients do not come by autograd.
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel got NestedMlp"):
        DistributedDataParallel(nested_mlp(fully_sharded(process_group=Alone())))
    # Under another name than those that it is to ignore it takes the parameter all the same, and averages nothing.
    part = ignored_in_ddp([name for name, _ in mixed().named_parameters()])
    with pytest.raises(RuntimeError, match=r"got .*Sequential.*named_parameters\(remove_duplicate=False\)"):
        part(torch.ones(2, 5))


def mixed(**options: Any) -> nn.Module:
    """A model of which one part is sharded."""
    model = nested_mlp(keep)
    model.trunk = fully_sharded(**options)(model.trunk)
    return model


def ignored_in_ddp(names: list[str], **options: Any) -> DistributedDataParallel:
    """`mixed`, whose sharded part has these names, in one that is to ignore it."""
    model = mixed(**options)
    ignored = [name for name in names if name.startswith("trunk")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


@pytest.mark.parametrize("form", [FLAT, ORIGINAL, UNFLATTENED])
@on_ranks(2)
def test_a_unit_that_distributed_data_parallel_ignores_trains_with_the_rest(form: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    plain = nested_mlp(keep)
    model = ignored_in_ddp([name for name, _ in mixed(**form).named_parameters(remove_duplicate=False)], **form)
    for number in range(3):
        inputs = [batch(number, rank) for rank in range(2)]
        model(inputs[dist.get_rank()]).square().mean().backward()
        (sum(plain(each).square().mean() for each in inputs) / 2).backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, plain)]
        assert_close(norms[0], norms[1], "norm")
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param -= 0.1 * param.grad  # type: ignore[operator]
                param.grad = None
    with model.module.trunk.summon_full_params():
        assert_close(list(model.parameters()), list(plain.parameters()))


@pytest.mark.filterwarnings("ignore:.*lists no parameters")
@pytest.mark.parametrize("form", [FLAT, ORIGINAL])
@on_ranks(2)
def test_torchs_wrapper_around_what_is_sharded_is_refused(form: dict[str, Any]) -> None:
    model = nested_mlp(fully_sharded(**form))
    with pytest.raises(RuntimeError, match=r"is sharded.*do not use torch's"):
        torchs.FullyShardedDataParallel(model, device_id=torch.device("cpu"), **form)


@pytest.mark.parametrize("by", ["FullyShardedDataParallel", "fully_shard"])
@on_ranks(2)
def test_what_torch_has_sharded_is_refused_inside(by: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if by == "fully_shard":
        torchs.fully_shard(model[0])
    else:
        model[0] = torchs.FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    for door in (fsdp.fully_shard, fsdp.FullyShardedDataParallel):
        with pytest.raises(ValueError, match=rf"'0' of this Sequential is sharded by torch's {by}.*from fsdp"):
            door(model)


@on_ranks(2)
def test_replicas_of_what_is_sharded_are_refused() -> None:
    # As torch.nn.parallel.replicate does with every module that it is given.
    for model in (nested_mlp(fully_sharded()), fsdp.fully_shard(nested_mlp(keep))):
        with pytest.raises(RuntimeError, match=r"DataParallel got .*NestedMlp.*one process for each device"):
            model._replicate_for_data_parallel()


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")  # of two classes, by the version of torch
@on_ranks(2)
def test_what_torch_jit_would_make_of_shards_is_refused() -> None:
    for model in (nested_mlp(fully_sharded()), fsdp.fully_shard(nested_mlp(keep))):
        for make in (torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 5))):
            for given in (model, nn.Sequential(model)):
                with pytest.raises(RuntimeError, match=r"torch.jit got .*load it into the plain model with"):
                    make(given)
        model(torch.ones(2, 5)).sum().backward()
