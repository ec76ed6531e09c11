"""Nothing of the package is reported by the checker of stream order, on a simulated accelerator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp.distributed.dtensor import local_part
from fsdp.testing import check_streams
from tests.helpers.offload import BOTH, GRADS, PARAMS
from tests.helpers.own_collectives import OwnAllGather, OwnReduceScatter
from tests.helpers.ranks import RankPool

DEVICE = "cuda"
Wrap = Callable[[nn.Module], Any]
BY_TORCH, THROUGH_HOST = "by torch", "through the host"


def flat(module: nn.Module, **options: Any) -> Any:
    return fsdp.FullyShardedDataParallel(module.to(DEVICE), **options)


def rows(module: nn.Module, **options: Any) -> Any:
    return fsdp.fully_shard(module.to(DEVICE), **options)


OPTIONS: dict[str, Wrap] = {
    "original": flat,
    "rows": rows,
    "both_on_host": partial(flat, **BOTH),
    "params_on_host": partial(flat, **PARAMS),
    "grads_on_host": partial(flat, use_orig_params=False, **GRADS),
    "rows_on_host": partial(rows, offload_policy=fsdp.CPUOffloadPolicy()),
    "not_resharded": partial(rows, reshard_after_forward=False),
    "kept_on_host": partial(flat, reshard_after_forward="host"),
    "replicated": partial(flat, sharding_strategy=fsdp.ShardingStrategy.NO_SHARD),
    "half": partial(flat, mixed_precision=True, compute_dtype=torch.bfloat16),
    "half_on_host": partial(flat, mixed_precision=True, compute_dtype=torch.bfloat16, **BOTH),
    "recomputed": lambda module: flat(fsdp.checkpoint_wrapper(module)),
    "activations_on_host": lambda module: flat(fsdp.checkpoint_wrapper(module, offload_to_cpu=True)),
}


def build(wrap: Wrap = lambda module: module, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)]
    return wrap(nn.Sequential(*map(wrap, layers)))


def train(model: Any, steps: int = 2, accumulated: int = 1, *, device: str = DEVICE) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for number in range(accumulated):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + number))
            is_last = number + 1 == accumulated or not hasattr(model, "no_sync")
            with nullcontext() if is_last else model.no_sync():
                model(batch.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def each_way(options: str, through_host: str = "") -> Any:
    """Parametrize with options, which go by torch's collectives, and some of them through the host as well."""
    rows = [(BY_TORCH, each) for each in options.split()] + [(THROUGH_HOST, each) for each in through_host.split()]
    return pytest.mark.parametrize(("way", "options"), rows)


def checked(body: Callable[..., None], way: str, *args: Any) -> None:
    fsdp.use_torch_collectives(way == BY_TORCH)
    try:
        with check_streams():
            body(*args)
    finally:
        fsdp.use_torch_collectives(False)


@cache  # on each rank, because the checker makes a training slow
def plain_state(accumulated: int) -> dict[str, Tensor]:
    plain = build()
    train(plain, accumulated=accumulated, device="cpu")
    return dict(plain.state_dict())


def assert_equal_to_plain(model: Any, accumulated: int = 1) -> None:
    state = model.state_dict()
    for name, value in plain_state(accumulated).items():
        whole = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        torch.testing.assert_close(whole.float().cpu(), value, rtol=1e-4, atol=1e-5)


ACCUMULATED = "rows grads_on_host"


@each_way(
    " ".join(name for name in OPTIONS if name not in ACCUMULATED.split()),
    "original both_on_host half_on_host kept_on_host",
)
def test_training_is_in_order(ranks: RankPool, way: str, options: str) -> None:
    ranks(2).run(checked, _train, way, options)


def _train(options: str) -> None:
    model = build(OPTIONS[options])
    train(model)
    if "half" not in options:
        assert_equal_to_plain(model)


@each_way(ACCUMULATED, "rows_on_host")
def test_gradients_that_accumulate_are_in_order(ranks: RankPool, way: str, options: str) -> None:
    ranks(2).run(checked, _accumulate, way, options)


def _accumulate(options: str) -> None:
    model = build(OPTIONS[options])
    train(model, accumulated=3)
    assert_equal_to_plain(model, accumulated=3)


@each_way("rows_on_host")
def test_replicas_are_in_order(ranks: RankPool, way: str, options: str) -> None:
    ranks(4).run(checked, _replicate, way, options)


def _replicate(options: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    for how in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        model = build(partial(OPTIONS[options], **how))  # type: ignore[arg-type]
        train(model)
        assert_equal_to_plain(model)


@each_way("original rows_on_host", "both_on_host")
def test_saving_in_the_background_is_in_order(ranks: RankPool, tmp_path: Path, way: str, options: str) -> None:
    ranks(2).run(checked, _save, way, options, tmp_path)


def _save(options: str, folder: Path) -> None:
    model = build(OPTIONS[options])
    optimizer = train(model)
    fsdp.save(folder / "now", model, optimizer)
    saver = fsdp.checkpoint.Saver()
    saver.save(folder / "later", model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    saver.wait()
    for name in ("now", "later"):
        again = build(OPTIONS[options], seed=1)
        fsdp.load(folder / name, again, torch.optim.AdamW(again.parameters()))
        assert_equal_to_plain(again)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_staging_is_in_order(ranks: RankPool, pin_memory: bool) -> None:
    ranks(1).run(checked, _stage, BY_TORCH, pin_memory)


def _stage(pin_memory: bool) -> None:
    stager = fsdp.state_dict_utils.StateDictStager(pin_memory=pin_memory)
    tree = {"large": torch.ones(1 << 21, device=DEVICE), "small": [torch.ones(3, device=DEVICE)]}
    for _ in range(2):
        pending = stager.stage(tree, non_blocking=True)
        pending.protect()
        tree["small"][0].add_(1)
        copied = pending.wait()
        assert copied["large"].device.type == "cpu"
        copied["large"].sum().item()
        del pending, copied
    blocking = stager.stage(tree)
    tree["large"].zero_()
    assert blocking["large"].eq(1).all()


@each_way("original rows grads_on_host both_on_host", "both_on_host")
def test_what_is_done_between_steps_is_in_order(ranks: RankPool, way: str, options: str) -> None:
    ranks(2).run(checked, _look_and_change, way, options)


def _look_and_change(options: str) -> None:
    model = build(OPTIONS[options])
    ema = fsdp.EMA(model, 0.5)
    optimizer = train(model)
    ema.update_parameters(model)
    with ema.applied_to(model), torch.no_grad():
        model(torch.ones(2, 6, device=DEVICE))
    if isinstance(model, fsdp.FullyShardedDataParallel):
        full = fsdp.optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
        fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, full)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model(torch.ones(2, 6, device=DEVICE)).sum().backward()
    if not isinstance(model, fsdp.FullyShardedDataParallel):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        model.clip_grad_norm_(0.5)
        with model.summon_full_params(with_grads=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
                if param.grad is not None:
                    param.grad.mul_(2)
    optimizer.step()


@pytest.mark.parametrize("options", ["half_on_host", "rows_on_host"])
def test_a_world_of_one_is_in_order(ranks: RankPool, options: str) -> None:
    ranks(1).run(checked, _look_and_change, BY_TORCH, options)


def test_steps_are_in_order_where_ranks_have_more_batches(ranks: RankPool) -> None:
    ranks(2).run(checked, _train_unevenly, BY_TORCH)


def _train_unevenly() -> None:
    model = build(OPTIONS["original"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp.join(model, optimizer):
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(2, 6, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_functions_of_users_are_in_order(ranks: RankPool) -> None:
    ranks(2).run(checked, _use_own_functions, BY_TORCH)


def _use_own_functions() -> None:
    model = build(OPTIONS["rows"])
    own = (OwnAllGather(), OwnReduceScatter())
    for layer in model:
        layer.set_custom_all_gather(own[0])
        layer.set_custom_reduce_scatter(own[1])
        layer.set_all_reduce_hook(lambda gradient: gradient.mul_(2), stream=torch.Stream(DEVICE))
    seen: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(local_part(param.grad).clone()))
    beside, present = torch.Stream(DEVICE), torch.accelerator.current_stream()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 6, device=DEVICE)).square().mean().backward()
        beside.wait_stream(present)
        with beside:
            optimizer.step()
        model.set_post_optim_event(beside.record_event())
        optimizer.zero_grad()
    assert seen
