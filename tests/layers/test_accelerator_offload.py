"""Offload from CUDA to the host and to disk: where things are, what comes out, and how much of the device it takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, get_fsdp_instances
from fsdp.engine.placeholder import Placeholder
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, device_module
from tests.helpers.equality import assert_close_state
from tests.helpers.models import nested_mlp
from tests.helpers.offload import BOTH, GRADS, PARAMS, AlwaysReducing, with_folder
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import adamw, alone, fully_sharded, sgd_with_momentum

pytestmark = pytest.mark.accelerator

DISK: dict[str, Any] = {"offload": "disk"}
KINDS = [BOTH, PARAMS, GRADS, DISK]
HOSTED = [BOTH, PARAMS, DISK]  # with shards on the host

every_kind = pytest.mark.parametrize("options", KINDS, ids=["both", "params", "grads", "disk"])
every_hosted = pytest.mark.parametrize("options", HOSTED, ids=["both", "params", "disk"])


def inputs(number: int, rows: int = 12) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(number))


def own_part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


# What comes out


@parametrize_cases(
    world_size=[2, 1, 3],
    options=KINDS,
    accumulate=[(1, True), (3, True), (2, False)],
    make_optimizer=[sgd_with_momentum, adamw],
    flatten_parameters=[True, False],
    clip=[None, 0.3],
)
@on_accelerators("world_size")
def test_offloaded_training_on_an_accelerator_equals_the_plain_model_on_the_cpu(tmp_path: Path, case: Case) -> None:
    how = with_folder(case.options, tmp_path) | {
        "flatten_parameters": case.flatten_parameters,
        "compute_device": ACCELERATOR,
    }
    turns, under_no_sync = case.accumulate
    wrapper = FullyShardedDataParallel if under_no_sync else AlwaysReducing
    model: Any = nested_mlp(lambda module: wrapper(module, **how))
    plain = nested_mlp()
    optimizer, plain_optimizer = case.make_optimizer(model.parameters()), case.make_optimizer(plain.parameters())
    for step in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for turn in range(turns):
            batch = inputs(10 * step + turn)
            with model.no_sync() if turn + 1 < turns else nullcontext():
                (model(own_part(batch).to(ACCELERATOR)).square().mean() / turns).backward()
            (plain(batch).square().mean() / turns).backward()
        if case.clip is not None:
            expected = nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
            torch.testing.assert_close(model.clip_grad_norm_(case.clip).cpu(), expected, rtol=1e-4, atol=1e-6)
        optimizer.step()
        plain_optimizer.step()
    assert_close_models(model, plain)


def assert_close_models(model: nn.Module, plain: nn.Module) -> None:
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    assert_close_state(found, plain.state_dict(), rtol=1e-4, atol=1e-5)


# Where things are


@parametrize_pairs(options=HOSTED, moved=["never", "before", "after"])
@on_accelerators(2)
def test_shards_and_the_optimizer_s_state_stay_on_the_host(tmp_path: Path, options: dict[str, Any], moved: str) -> None:
    options = with_folder(options, tmp_path)

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module.to(ACCELERATOR) if moved == "before" else module, **options)

    model: Any = nested_mlp(wrap)
    if moved == "after":
        model = model.to(ACCELERATOR)
    optimizer = adamw(model.parameters())
    for number in range(2):
        model(own_part(inputs(number)).to(ACCELERATOR)).sum().backward()
        optimizer.step()
    assert model.compute_device.type == ACCELERATOR
    for param in model.parameters():
        state = optimizer.state[param]
        assert {each.device.type for each in (param, param.grad, state["exp_avg"], state["exp_avg_sq"])} == {"cpu"}
        assert param.is_pinned() or options.get("offload") == "disk"
    assert {value.device.type for value in model.state_dict().values()} == {ACCELERATOR}


@pytest.mark.parametrize(
    ("options", "param_on", "grad_on"),
    [(BOTH, "cpu", "cpu"), (PARAMS, "cpu", ACCELERATOR), (GRADS, ACCELERATOR, "cpu")],
)
@on_accelerators(2)
def test_gradients_are_where_they_were_asked_for_until_the_step(
    options: dict[str, Any], param_on: str, grad_on: str
) -> None:
    model = nested_mlp(fully_sharded(compute_device=ACCELERATOR, **options))
    optimizer = sgd_with_momentum(model.parameters())
    model(own_part(inputs(0)).to(ACCELERATOR)).sum().backward()
    params: list[Any] = list(model.parameters())
    for param in params:
        assert (param.device.type, param.held_gradient.device.type) == (param_on, grad_on)
        assert isinstance(param.grad, Placeholder) is (param_on != grad_on)
        assert param.held_gradient.is_pinned() is (grad_on == "cpu")
    optimizer.step()
    assert {param.grad.device.type for param in params} == {param_on}


@every_hosted
@on_accelerators(2)
def test_a_model_that_was_moved_to_the_cpu_computes_there(tmp_path: Path, options: dict[str, Any]) -> None:
    options = with_folder(options, tmp_path)
    model, plain = nested_mlp(fully_sharded(**options)), nested_mlp()
    torch.testing.assert_close(model(inputs(0).to(ACCELERATOR)).cpu(), plain(inputs(0)), rtol=1e-4, atol=1e-5)
    model.cpu()
    torch.testing.assert_close(model(inputs(0)), plain(inputs(0)))
    model.to(ACCELERATOR)
    torch.testing.assert_close(model(inputs(0).to(ACCELERATOR)).cpu(), plain(inputs(0)), rtol=1e-4, atol=1e-5)


@every_hosted
@on_accelerators(2)
def test_what_is_changed_while_summoned_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    options = with_folder(options, tmp_path)
    model: Any = nested_mlp(fully_sharded(compute_device=ACCELERATOR, **options))
    plain: Any = nested_mlp()
    with model.summon_full_params(), torch.no_grad():
        assert model.entry.weight.device.type == ACCELERATOR
        model.entry.weight.mul_(2)
    with torch.no_grad():
        plain.entry.weight.mul_(2)
    assert_close_models(model, plain)
    again = nested_mlp(fully_sharded(compute_device=ACCELERATOR, **options), seed=1)
    again.load_state_dict(model.state_dict())
    assert_close_models(again, plain)


# How much of the device it takes

WIDTH, LAYERS = 512 if IS_SIMULATED else 4096, 16
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes
CAP = 10 * LAYER  # less than the parameters alone


@contextmanager
def capped() -> Iterator[None]:
    """No more than `CAP` of device memory can be allocated inside."""
    gc.collect()
    device_module().empty_cache()
    total = device_module().get_device_properties(0).total_memory
    device_module().set_per_process_memory_fraction((device_module().memory_reserved() + CAP) / total)
    try:
        yield
    finally:
        device_module().set_per_process_memory_fraction(1.0)
        device_module().empty_cache()


def stack() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]


def wide(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


@on_accelerators(1)
def test_what_is_capped_does_not_fit_without_offload() -> None:
    with capped(), pytest.raises(torch.OutOfMemoryError):
        nn.Sequential(*stack()).to(ACCELERATOR)


@every_hosted
@on_accelerators(1)
def test_a_world_of_one_infers_with_a_model_that_does_not_fit(tmp_path: Path, options: dict[str, Any]) -> None:
    options = with_folder(options, tmp_path)
    layers = stack()
    with torch.no_grad():
        expected = [nn.Sequential(*layers)(wide(number)) for number in range(3)]
    model = alone(nn.Sequential(*(alone(layer, **options) for layer in layers)), **options).eval()
    with capped():
        for number, outputs in enumerate(expected):
            device_module().reset_peak_memory_stats()
            before = device_module().memory_allocated()
            with torch.no_grad():
                torch.testing.assert_close(model(wide(number).to(ACCELERATOR)).cpu(), outputs, rtol=1e-3, atol=1e-4)
            # The unit that computes, the next one, and what is shorter than a layer (workspaces, activations).
            assert device_module().max_memory_allocated() - before < 3 * LAYER
            assert device_module().memory_allocated() - before < LAYER


@pytest.mark.parametrize("options", [BOTH, DISK], ids=["both", "disk"])  # with params only, gradients do not fit
@on_accelerators(1, timeout=120)
def test_a_world_of_one_trains_a_model_that_does_not_fit(tmp_path: Path, options: dict[str, Any]) -> None:
    options = with_folder(options, tmp_path)
    plain = nn.Sequential(*stack())
    model = alone(nn.Sequential(*(alone(layer, **options) for layer in stack())), **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    with capped():
        for number in range(2):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                batch = wide(number).to(ACCELERATOR) if each is model else wide(number)
                optimizer.zero_grad()
                each(batch).square().sum().backward()
                optimizer.step()
    for found, expected in zip(get_fsdp_instances(model)[1:], plain, strict=True):
        whole = torch.cat([param.detach().flatten() for param in expected.parameters()])
        torch.testing.assert_close(found.params[0].detach(), whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [BOTH, PARAMS], ids=["both", "params"])
@on_accelerators(2, timeout=120)
def test_peak_memory_of_several_ranks_is_below_that_of_the_whole(tmp_path: Path, options: dict[str, Any]) -> None:
    options = with_folder(options, tmp_path)
    wrap = fully_sharded(compute_device=ACCELERATOR, **options)
    width = min(WIDTH, 1024)
    model = wrap(nn.Sequential(*(wrap(nn.Linear(width, width)) for _ in range(16))))
    layer, whole = 4 * width**2, 16 * 4 * width**2
    batch = torch.ones(4, width, device=ACCELERATOR)
    for _ in range(2):
        model(batch).sum().backward()
        model.zero_grad()
    gc.collect()
    device_module().reset_peak_memory_stats()
    between = device_module().memory_allocated()
    model(batch).sum().backward()
    kept = whole // 2 if options == PARAMS else 0  # this rank's half of the gradients
    assert device_module().max_memory_allocated() - between < kept + 10 * layer
    assert device_module().memory_allocated() - between <= kept + layer


@on_accelerators(1)
def test_streams_leave_no_race_between_steps() -> None:
    """The optimizer writes pinned shards at once after backward; a copy still in flight would read half of it."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
    model = alone(nn.Sequential(*(alone(layer, **BOTH) for layer in layers)), **BOTH)
    for step in range(10):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_((step + 1) / 1024)
            outputs = model(torch.ones(2, 1024, device=ACCELERATOR))
            for param in model.parameters():
                param.zero_()
        torch.testing.assert_close(outputs, torch.full_like(outputs, float(step + 1) ** 8), rtol=1e-4, atol=0)
