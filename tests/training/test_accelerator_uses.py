"""What a user does with a model, on an accelerator: it ends with the weights of the plain model on the CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from fsdp.distributed.dtensor import full_tensor, local_part
from fsdp.engine.unit import unit_of
from fsdp.layers.offload import HostStorage
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, AcceleratorRanks, device_module, later_kernels
from tests.helpers.compile_backends import Counter, call_compile
from tests.helpers.offload import BOTH, GRADS
from tests.helpers.on_ranks import on_accelerators

pytestmark = pytest.mark.accelerator

Wrap = Callable[[nn.Module], Any]
HOSTED = {"offload_policy": fsdp.CPUOffloadPolicy()}


def flat(module: nn.Module, **options: Any) -> Any:
    return fsdp.FullyShardedDataParallel(module.to(ACCELERATOR), **options)


def rows(module: nn.Module, **options: Any) -> Any:
    return fsdp.fully_shard(module.to(ACCELERATOR), **options)


FORMS: dict[str, Wrap] = {
    "flat": partial(flat, use_orig_params=False),
    "original": flat,
    "original_on_host": partial(flat, offload="cpu"),
    "rows": rows,
    "rows_on_host": partial(rows, **HOSTED),
}


class Layer(nn.Sequential):
    """Has a forward of its own, without which torch 2.11 does not compile it."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))  # type: ignore[no-any-return]


def build(wrap: Wrap | None = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = [Layer(nn.Linear(6, 6), nn.GELU()) for _ in range(3)]
    if wrap is None:
        return nn.Sequential(*layers)
    return wrap(nn.Sequential(*map(wrap, layers)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, *, sharded: bool = True) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, first + steps):
        batch = torch.randn(4 * world_size, 6, generator=torch.Generator().manual_seed(step))
        model(batch.chunk(world_size)[rank].to(ACCELERATOR) if sharded else batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cache
def expected(steps: int) -> dict[str, Tensor]:
    """Once in each process: all forms are compared with the same training."""
    plain = build()
    train(plain, adamw(plain), steps, sharded=False)
    found: dict[str, Tensor] = plain.state_dict()
    return found


def assert_trained(model: Any, steps: int, factor: float = 1.0) -> None:
    state = model.state_dict()
    for name, value in expected(steps).items():
        torch.testing.assert_close(
            full_tensor(state[name]).cpu(),
            factor * value,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("form", FORMS)
def test_trains_saves_and_goes_on(accelerator_ranks: AcceleratorRanks, tmp_path: Path, form: str) -> None:
    accelerator_ranks(2).run(_save_and_go_on, form, tmp_path)


def _save_and_go_on(form: str, folder: Path) -> None:
    model = build(FORMS[form])
    optimizer = adamw(model)
    train(model, optimizer, 1)
    fsdp.save(folder / "now", model, optimizer)
    saver = fsdp.checkpoint.Saver()
    saver.save(folder / "later", model, optimizer)
    train(model, optimizer, 2, first=1)  # while that is written
    saver.wait()
    assert_trained(model, 3)
    for name, further in (("now", 1), ("later", 2)):
        again = build(FORMS[form], seed=1)
        fresh = adamw(again)
        fsdp.load(folder / name, again, fresh)
        assert_trained(again, 1)
        train(again, fresh, further, first=1)
        assert_trained(again, 1 + further)


@pytest.mark.parametrize("form", ["original", "rows_on_host"])
def test_ranks_that_share_an_accelerator_train_through_the_host(
    accelerator_ranks: AcceleratorRanks, tmp_path: Path, form: str
) -> None:
    accelerator_ranks(2, through_host=True).run(_save_and_go_on, form, tmp_path)


@pytest.mark.parametrize("form", ["flat", "original_on_host", "rows"])
@on_accelerators(2)
def test_gradients_of_gradients(form: str) -> None:
    rank, found = dist.get_rank(), []
    for model in (build(FORMS[form]), build()):
        optimizer, is_sharded = adamw(model), not found
        for step in range(2):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            if is_sharded:
                inputs = inputs.chunk(2)[rank].to(ACCELERATOR)
            outputs = model(inputs.requires_grad_())
            (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            (outputs.square().mean() + gradient.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: full_tensor(value).cpu() for name, value in model.state_dict().items()})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["original", "original_on_host"])
@on_accelerators(2)
def test_unsharded_parameters_and_optimizer_state_are_taken_and_put_back(form: str) -> None:
    model = build(FORMS[form])
    optimizer = adamw(model)
    train(model, optimizer, 2)
    full = fsdp.optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    again = build(FORMS[form], seed=1)
    again.load_state_dict(model.state_dict())
    fresh = adamw(again)
    fsdp.optim_utils.load_full_optim_state_dict(again, fresh, full)
    train(again, fresh, 2, first=2)
    assert_trained(again, 4)
    with again.summon_full_params(), torch.no_grad():
        for param in again.parameters():
            param.mul_(2)
    assert_trained(again, 4, factor=2)


@on_accelerators(4)
def test_replicas_and_whole_parameters_among_neighbours() -> None:
    mesh = init_device_mesh(ACCELERATOR, (2, 2), mesh_dim_names=("replicate", "shard"))
    for form, options in (("rows_on_host", {"mesh": mesh}), ("rows", {"reshard_after_forward": 2})):
        model = build(partial(FORMS[form], **options))
        train(model, adamw(model), 2)
        assert_trained(model, 2)


@on_accelerators(2)
def test_the_state_dict_of_rows_goes_through_torchs_checkpoints(tmp_path: Path) -> None:
    model = build(rows)
    train(model, adamw(model), 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    again = build(rows, seed=1)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    again.load_state_dict(state)
    assert_trained(again, 2)


@pytest.mark.parametrize("strategy", [None, "NO_SHARD", "SHARD_OPTIM"])
@on_accelerators(2)
def test_a_model_of_the_meta_device_computes_on_the_accelerator(strategy: str | None) -> None:
    chosen = None if strategy is None else fsdp.ShardingStrategy[strategy]
    with torch.device("meta"):
        model = fsdp.FullyShardedDataParallel(nn.Linear(6, 6), sharding_strategy=chosen)
    fsdp.materialize(model, seed=0)
    assert {param.device.type for param in model.parameters()} == {ACCELERATOR}
    assert model(torch.ones(2, 6, device=ACCELERATOR)).device.type == ACCELERATOR


@pytest.mark.parametrize("offload_to_cpu", [False, True])
@on_accelerators(2)
def test_activations_are_computed_again_or_brought_back(offload_to_cpu: bool) -> None:
    model = build(lambda module: flat(fsdp.checkpoint_wrapper(module, offload_to_cpu=offload_to_cpu)))
    train(model, adamw(model), 3)
    assert_trained(model, 3)


@on_accelerators(2)
def test_ranks_with_more_batches_than_others_accumulate_and_clip() -> None:
    states = []
    for device in ("cpu", ACCELERATOR):
        torch.manual_seed(0)
        model = fsdp.FullyShardedDataParallel(nn.Sequential(flat_on(device), flat_on(device)).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(3, 6, device=device)
        with fsdp.join(model, optimizer):
            for number in range(2 * (1 + dist.get_rank())):
                with model.no_sync() if number % 2 == 0 else nullcontext():
                    model(number + batch).square().mean().backward()
                if number % 2:
                    model.clip_grad_norm_(0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name].cpu(), value, rtol=1e-4, atol=1e-5)


def flat_on(device: str) -> Any:
    return fsdp.FullyShardedDataParallel(nn.Linear(6, 6).to(device))


@on_accelerators(2)
def test_scaled_gradients_of_half_precision() -> None:
    model = build(partial(flat, mixed_precision=True, compute_dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), fsdp.ShardedGradScaler(init_scale=2.0**8)
    losses = []
    for _ in range(4):
        loss = model(torch.ones(4, 6, device=ACCELERATOR)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


@on_accelerators(4)
def test_tensor_parallel_modules_are_sharded_besides() -> None:
    mesh = init_device_mesh(ACCELERATOR, (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    model = copy.deepcopy(plain).to(ACCELERATOR)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["data"])
    for each, device in ((plain, "cpu"), (model, ACCELERATOR)):
        optimizer = adamw(each)
        for step in range(3):
            each(torch.full((2, 6), 1.0 + step, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(full_tensor(value).cpu(), plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not IS_SIMULATED and find_spec("triton") is None, reason="inductor needs Triton for a GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of what a compiler imports
@pytest.mark.parametrize("form", ["original", "rows"])
@on_accelerators(2, timeout=300)
def test_compiled_units_train(tmp_path: Path, form: str) -> None:
    """By inductor on CUDA; it cannot compile for the simulated device, where graphs run as they are."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    backend = Counter("eager" if IS_SIMULATED else "inductor")

    def wrap(module: nn.Module) -> Any:
        compiled = call_compile(module, backend, fullgraph=True) if isinstance(module, Layer) else module
        return FORMS[form](compiled)

    model = build(wrap)
    train(model, adamw(model), 2)
    assert_trained(model, 2)
    assert backend.sizes


@pytest.mark.parametrize("form", ["original_on_host", "rows_on_host"])
@on_accelerators(2)
def test_shards_on_the_host_are_followed_where_memory_comes_back_at_once(form: str) -> None:
    """Pinned memory that was freed is the first to be given out again: a new shard may lie where the old one did."""
    blocks: dict[int, Tensor] = {}
    allocate = HostStorage.allocate

    def again(storage: HostStorage, numel: int, dtype: torch.dtype) -> Tensor:
        return blocks.setdefault(numel, allocate(storage, numel, dtype))

    torch.manual_seed(0)
    plain = nn.Linear(6, 6)
    with mock.patch.object(HostStorage, "allocate", again):
        model = FORMS[form](copy.deepcopy(plain)).to(ACCELERATOR)
    for each, device in ((plain, "cpu"), (model, ACCELERATOR)):
        optimizer = adamw(each)
        for _ in range(2):
            each(torch.ones(2, 6, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = model(torch.ones(2, 6, device=ACCELERATOR)).cpu()
    torch.testing.assert_close(found, plain(torch.ones(2, 6)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["original_on_host", "rows_on_host"])
@on_accelerators(2)
def test_shards_may_be_written_as_soon_as_a_call_has_returned(form: str) -> None:
    model = build(FORMS[form])
    batch = torch.ones(2, 6, device=ACCELERATOR)
    expected = model(batch).cpu()
    calls: list[Callable[[], Any]] = [lambda: model(batch), lambda: whole_state(model)]
    with torch.no_grad(), later_kernels():
        for call in calls:
            kept = [local_part(param).clone() for param in model.parameters()]
            found = call()
            for param in model.parameters():
                param.zero_()
            if isinstance(found, Tensor):
                torch.testing.assert_close(found.cpu(), expected)
            else:
                assert all(bool(value.any()) for value in found.values())
            for param, value in zip(model.parameters(), kept, strict=True):
                local_part(param).copy_(value)
    torch.testing.assert_close(model(batch).cpu(), expected)


@on_accelerators(2)
def test_shards_that_are_sent_quantised_may_be_written_when_forward_has_returned() -> None:
    model = build(FORMS["original_on_host"])
    fsdp.compress(model, gather=fsdp.QuantizedGather())
    batch = torch.ones(2, 6, device=ACCELERATOR)
    with torch.no_grad(), later_kernels():
        expected = model(batch).cpu()
        found = model(batch)
        for param in model.parameters():
            param.zero_()
        torch.testing.assert_close(found.cpu(), expected)


@on_accelerators(2)
def test_shards_that_were_sent_to_the_first_rank_may_be_written_by_the_others() -> None:
    model = build(FORMS["original_on_host"])
    expected = model.state_dict()
    with torch.no_grad(), later_kernels():
        found = model.state_dict(rank0_only=True)
        if dist.get_rank():
            for param in model.parameters():
                param.zero_()
        else:
            torch.testing.assert_close(found, expected)


def whole_state(model: Any) -> dict[str, Tensor]:
    return fsdp.state_dict_utils.gather_state_dict(model.state_dict())


@pytest.mark.parametrize("form", ["flat", "original_on_host", "rows", "rows_on_host"])
@on_accelerators(2)
def test_hooks_get_gradients_that_are_there(form: str) -> None:
    model = build(FORMS[form])
    seen: dict[nn.Parameter, Tensor] = {}

    def look(param: nn.Parameter) -> None:
        seen[param] = local_part(param.grad).clone()  # type: ignore[arg-type]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    with later_kernels():
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 6, device=ACCELERATOR)).square().mean().backward()
            device_module().synchronize()
            for param in model.parameters():
                torch.testing.assert_close(seen[param], local_part(param.grad), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("use_orig_params", "options"), [(True, {}), (False, BOTH), (True, GRADS)], ids=["device", "both", "grads"]
)
@on_accelerators(2)
def test_gradients_that_are_summoned_are_there_and_changes_of_them_are_kept(
    use_orig_params: bool, options: dict[str, Any]
) -> None:
    plain, model = build(), build(partial(flat, use_orig_params=use_orig_params, **options))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for each, device in ((plain, "cpu"), (model, ACCELERATOR)):
        each(torch.ones(2, 6, device=device)).square().mean().backward()
    expected = [param.grad.clone() for param in plain.parameters()]
    with later_kernels():
        with model.summon_full_params(with_grads=True):
            for param, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad.cpu(), grad, rtol=1e-4, atol=1e-6)
                param.grad.mul_(2)
        assert all(param.grad is not None for param in model.parameters() if param.numel())
    for param in plain.parameters():
        param.grad.mul_(2)
    for optimizer in optimizers:
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["flat", "rows"])
@on_accelerators(2)
def test_an_all_gather_that_is_not_wanted_any_more_writes_to_nobody_elses_memory(form: str) -> None:
    model = build(FORMS[form])
    train(model, adamw(model), 1)
    units = filter(None, map(unit_of, model[0].modules()))
    handles = [handle for unit in dict.fromkeys(units) for handle in unit.handles]
    with later_kernels():
        for _ in range(5):
            for handle in handles:
                handle.unshard()
                handle.reshard()
            others = [
                torch.ones(handle.layout.padded_numel, device=ACCELERATOR) for handle in handles for _ in range(2)
            ]
            device_module().synchronize()
            assert all(bool(other.eq(1).all()) for other in others)


@on_accelerators(2)
def test_shards_that_another_stream_has_stepped_are_awaited() -> None:
    """As with `set_post_optim_event`."""
    model = build(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stepping = device_module().Stream()
    batch = torch.ones(2, 6, device=ACCELERATOR)
    for _ in range(3):
        model(batch).sum().backward()
        stepping.wait_stream(device_module().current_stream())
        with device_module().stream(stepping):
            device_module()._sleep(20_000_000)
            optimizer.step()
            done = device_module().Event()
            done.record()
        model.set_post_optim_event(done)
    found = model(batch)
    device_module().synchronize()
    torch.testing.assert_close(found, model(batch), rtol=0, atol=0)
