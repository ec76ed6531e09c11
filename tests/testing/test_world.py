"""A world of ranks in one process gives what processes over gloo give, to the bit, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.distributed.collectives import use_torch_collectives
from fsdp.distributed.gathered_part import LEAST_TORCH
from fsdp.distributed.messages import check_messages
from fsdp.testing import World
from tests.helpers.equality import assert_same
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.own_collectives import OwnAllGather, OwnReduceScatter
from tests.helpers.parity import adamw
from tests.helpers.ranks import RankPool

# torch 2.12 renamed these.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- torch.distributed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_function_of_torch_distributed_gives_the_bits_of_gloo(ranks: RankPool, world_size: int) -> None:
    found, expected = World(world_size).run(_all_functions), ranks(world_size).run(_all_functions)
    for rank in range(world_size):
        for name, value in expected[rank].items():
            assert_same(found[rank][name], value, f"{name} on rank {rank}")


def _all_functions() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.randn(size * 5, generator=torch.Generator().manual_seed(rank))
    got: dict[str, Any] = {"rank": rank, "backend": dist.get_backend()}

    def empty() -> list[Tensor]:
        return [torch.empty(5) for _ in range(size)]

    for kind in ("SUM", "MIN", "MAX", "PRODUCT"):
        dist.all_reduce(got.setdefault(f"all_reduce {kind}", own.clone()), op=getattr(dist.ReduceOp, kind))
    for numel in (1, 2, 3, 7, 16, 100, 1001):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        dist.all_reduce(got.setdefault(f"all_reduce {numel}", values))
    pieces = [piece.clone() for piece in own.chunk(size)]
    dist.all_gather(got.setdefault("all_gather", empty()), pieces[0])
    _ALL_GATHER(got.setdefault("all_gather_single", torch.empty(size * 5)), pieces[0])
    dist.reduce_scatter(got.setdefault("reduce_scatter", torch.empty(5)), pieces)
    _REDUCE_SCATTER(got.setdefault("reduce_scatter_single", torch.empty(5)), own)
    _REDUCE_SCATTER(got.setdefault("reduce_scatter_single AVG", torch.empty(5)), own, op=dist.ReduceOp.AVG)
    dist.all_to_all_single(got.setdefault("all_to_all_single", torch.empty(size * 5)), own)
    dist.broadcast(got.setdefault("broadcast", own.clone()), src=1)
    dist.gather(pieces[1], got.setdefault("gather", empty()) if rank == 1 else None, dst=1)
    dist.scatter(got.setdefault("scatter", torch.empty(5)), pieces if rank == 1 else None, src=1)
    dist.reduce(reduced := own.clone(), dst=1)
    got["reduce"] = reduced if rank == 1 else None
    got["async"] = own.clone()
    dist.all_reduce(got["async"], async_op=True).wait()
    dist.all_gather_object(got.setdefault("objects", [None] * size), {"rank": rank})
    dist.broadcast_object_list(got.setdefault("object", [f"rank {rank}"]), src=1)
    dist.barrier()

    following, preceding = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.full((2,), 10.0 * rank + tag), following, tag=tag) for tag in (7, 8)]
    for tag in (8, 7):  # in another order than they were sent in
        dist.recv(got.setdefault(f"tag {tag}", torch.empty(2)), preceding, tag=tag)
    for work in works:
        work.wait()
    swap = [dist.P2POp(dist.isend, own, following), dist.P2POp(dist.irecv, torch.empty(size * 5), preceding)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    got["batch"] = swap[1].tensor

    first, rest = dist.new_group([0]), dist.new_group(list(range(1, size)))
    mine = rest if rank else first
    dist.all_reduce(got.setdefault("in a group", own.clone()), group=mine)
    got["number in the group"] = dist.get_group_rank(mine, rank)

    replicated = nn.parallel.DistributedDataParallel(nn.Linear(5 * size, 2))
    replicated(own.view(1, -1)).sum().backward()
    got["DistributedDataParallel"] = replicated.module.weight.grad

    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("one", "all"))
    spread = distribute_tensor(torch.arange(9.0).view(3, 3), mesh, [Replicate(), Shard(0)])
    got["DTensor"], got["its part"] = (spread @ spread.T).full_tensor(), spread.to_local()
    return got


@on_ranks(2)
def test_a_rank_of_a_real_job_can_run_a_world() -> None:
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    model(torch.ones(2, 5)).sum().backward()
    assert World(3).run(dist.get_world_size) == [3, 3, 3]
    model(torch.ones(2, 5)).sum().backward()
    dist.all_reduce(total := torch.ones(1))
    assert float(total) == 2.0


# --- training -------------------------------------------------------------------------------------------------------


def _wrapper() -> Callable[[nn.Module], nn.Module]:
    return FullyShardedDataParallel


def _by_torch() -> Callable[[nn.Module], nn.Module]:
    use_torch_collectives()
    return FullyShardedDataParallel


def _with_checksums() -> Callable[[nn.Module], nn.Module]:
    check_messages()
    return FullyShardedDataParallel


def _rows() -> Callable[[nn.Module], nn.Module]:
    return fully_shard


def _hybrid() -> Callable[[nn.Module], nn.Module]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return lambda module: fully_shard(module, mesh=mesh)


def _hybrid_wrapper() -> Callable[[nn.Module], nn.Module]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = tuple(next(each for each in found if each != dist.GroupMember.NON_GROUP_MEMBER) for found in pairs)
    return lambda module: FullyShardedDataParallel(module, process_group=group)


WAYS = {way.__name__.strip("_"): way for way in (_wrapper, _by_torch, _with_checksums, _rows, _hybrid, _hybrid_wrapper)}


@pytest.mark.parametrize(
    ("way", "world_size"),
    [
        ("wrapper", 3),
        ("rows", 2),
        ("hybrid", 4),
        ("hybrid_wrapper", 4),
        ("by_torch", 3),
        ("with_checksums", 2),
    ],
)
def test_a_training_has_the_bits_of_real_processes(ranks: RankPool, way: str, world_size: int) -> None:
    found, expected = World(world_size).run(_train, way, 2), ranks(world_size).run(_train, way, 2)
    assert_same(found, expected)


def _train(way: str, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, gradient norms, and the whole state."""
    try:
        torch.manual_seed(0)
        wrap = WAYS[way]()
        model = wrap(nn.Sequential(wrap(nn.Linear(5, 7)), nn.Linear(7, 3))) if way == "hybrid" else nested_mlp(wrap)
    finally:
        use_torch_collectives(False)
        check_messages(False)
    clip = getattr(model, "clip_grad_norm_", None) or (
        lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor()  # type: ignore[attr-defined]
    )
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(inputs).square().mean()
        loss.backward()
        norms.append(float(clip(0.1)))
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {name: getattr(value, "full_tensor", value.clone)() for name, value in model.state_dict().items()}
    return losses, norms, state


# Of each `FSDPModule` method, what it does before two backwards.
METHODS: dict[str, Callable[[Any], Any]] = {
    "unshard": lambda model: model.unshard(async_op=True).wait(),
    "reshard": lambda model: model.reshard(),
    "wait_for_unshard": lambda model: model.wait_for_unshard(),
    "set_reshard_after_forward": lambda model: model[0].set_reshard_after_forward(False),
    "set_reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "set_modules_to_forward_prefetch": lambda model: model[0].set_modules_to_forward_prefetch([model[1]]),
    "set_modules_to_backward_prefetch": lambda model: model[1].set_modules_to_backward_prefetch([model[0]]),
    "set_unshard_in_backward": lambda model: model[0].set_unshard_in_backward(False),
    "set_requires_gradient_sync": lambda model: model.set_requires_gradient_sync(False),
    "set_requires_all_reduce": lambda model: model.set_requires_all_reduce(False),
    "_set_unshard_async_op": lambda model: model._set_unshard_async_op(True),
    "set_is_last_backward": lambda model: model.set_is_last_backward(False),
    "set_manual_backward_finalization": lambda model: model.set_manual_backward_finalization(True),
    "finalize_backward": lambda model: model.finalize_backward(),
    "set_keep_unsharded_storage": lambda model: model.set_keep_unsharded_storage(True),
    "set_gradient_divide_factor": lambda model: model[0].set_gradient_divide_factor(3.0),
    "set_force_sum_reduction_for_comms": lambda model: model.set_force_sum_reduction_for_comms(True),
    "set_reduce_scatter_unused_params": lambda model: model.set_reduce_scatter_unused_params(True),
    "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "set_custom_all_gather": lambda model: model[0].set_custom_all_gather(OwnAllGather()),
    "set_custom_reduce_scatter": lambda model: model[0].set_custom_reduce_scatter(OwnReduceScatter()),
    "set_all_reduce_hook": lambda model: model[0].set_all_reduce_hook(lambda gradient: gradient.mul_(2)),
    "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(),
    "set_allocate_memory": lambda model: model.set_allocate_memory_from_process_group_for_comm(True),
    "set_symm_mem_for_comm": lambda model: model.set_symm_mem_for_comm(),
    "reset_iter_state": lambda model: model.reset_iter_state(),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "stream_weights": lambda model: model.stream_weights(lambda _: None, bucket_bytes=1000),
}


def test_methods_of_fully_shard_do_what_they_do_in_real_processes(ranks: RankPool) -> None:
    assert_same(World(2).run(_call_methods), ranks(2).run(_call_methods))


def _call_methods() -> dict[str, Any]:
    found = {}
    for name, call in METHODS.items():
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Sequential(fully_shard(nn.Linear(6, 8)), fully_shard(nn.Linear(8, 4))))
        try:
            call(model)
        except NotImplementedError:
            found[name] = "refused"
            continue
        for step in range(2):
            model(torch.full((2, 6), dist.get_rank() + step + 1.0)).square().mean().backward()
        model.finalize_backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 6)).mean().backward()
        model.finalize_backward()
        found[name] = [param.grad.full_tensor() for param in model.parameters()]
    return found


def test_the_order_of_ranks_makes_no_difference() -> None:
    first, *others = (World(3, seed=seed, late=[seed]).run(_train, "rows", 2) for seed in range(3))
    for other in others:
        assert_same(other, first)


@pytest.mark.skipif(torch.__version__ < LEAST_TORCH, reason="writes to parts are lost")
def test_ranks_write_to_parts_of_parameters_in_any_order() -> None:
    for seed in range(6):
        for weight in World(2, seed=seed).run(_written_in_part):
            assert weight[1].eq(0).all(), seed
            assert weight[3:].eq(2).all(), seed


def _written_in_part() -> Tensor:
    model = fully_shard(nn.Linear(3, 5))
    with torch.no_grad():
        model.weight[1].zero_()
        model.weight[3:].fill_(2)
        return model.weight.full_tensor()


@pytest.mark.parametrize(("world_size", "by_torch"), [(16, False), (32, True)])  # 992 messages are slower than one
def test_many_ranks_train_as_one_process_does(world_size: int, by_torch: bool) -> None:
    alone, sharded = _train_in_float64(keep, 0, 1), World(world_size).run(_train_in_float64_on_ranks, by_torch)
    for name, value in alone.items():
        assert (sharded[0][name] - value).abs().max() < 1e-10, name


def _train_in_float64_on_ranks(by_torch: bool) -> dict[str, Tensor]:
    use_torch_collectives(by_torch)  # by this rank
    return _train_in_float64(FullyShardedDataParallel, dist.get_rank(), dist.get_world_size())


def _train_in_float64(wrap: Callable[[nn.Module], nn.Module], rank: int, size: int) -> dict[str, Tensor]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of this rank
    try:
        model = nested_mlp(wrap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(step))
            own = inputs.view(size, -1, 5)[rank]
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        torch.set_default_dtype(usual)


# --- states and files -----------------------------------------------------------------------------------------------


def test_checkpoints_are_saved_and_loaded_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    saved = World(3).run(_save, str(tmp_path))
    loaded = World(2).run(_load, str(tmp_path))
    for state in loaded:
        assert_same(state, saved[0])


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_world_size())
    model = nn.Sequential(fully_shard(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def _save(folder: str) -> Any:
    model, optimizer = _made()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with fsdp.checkpoint.Saver() as saver:  # in a thread of its own
        saver.save(folder, model, optimizer)
        saver.wait()
    return _whole_state(model, optimizer)


def _load(folder: str) -> Any:
    model, optimizer = _made()
    fsdp.load(folder, model, optimizer)
    return _whole_state(model, optimizer)


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    moments = {
        (number, key): value.full_tensor()
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if hasattr(value, "full_tensor")
    }
    return full, moments
