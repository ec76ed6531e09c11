"""Offload to host memory: what the options accept and say, and that nothing else changes.

Where there is no accelerator everything is in host memory anyway. To see what happens where there is one,
`accelerated` has the CPU stand for both.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, get_fsdp_instances
from tests.helpers.models import Wrap, nested_mlp, tiny_transformer
from tests.helpers.offload import BOTH, GRADS, KINDS, PARAMS, AlwaysReducing, accelerated, every_kind, on, with_folder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, every_pair, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    REGRESSION,
    TOKENS,
    Task,
    Training,
    adamw,
    alone,
    assert_bit_equal,
    assert_parity,
    fully_sharded,
    sgd_with_momentum,
    train_ddp,
    train_sharded,
)
from tests.helpers.twins import STEPS, assert_trains_like_plain, toolbox

# Options


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, (False, False)),
        ({"move_params_to_cpu": True}, (True, True)),
        ({"cpu_offload": True}, (True, True)),
        ({"cpu_offload": True, "move_params_to_cpu": True}, (True, True)),
        ({"cpu_offload": True, "move_grads_to_cpu": False}, (True, False)),
        (PARAMS, (True, False)),
        (GRADS, (False, True)),
        (BOTH, (True, True)),
        ({"offload": None, "offload_folder": None, "keep_offload_files": False}, (False, False)),
    ],
)
def test_attributes_say_what_is_offloaded(options: dict[str, Any], moved: tuple[bool, bool]) -> None:
    model = alone(nn.Linear(2, 3), **options)
    assert (model.move_params_to_cpu, model.move_grads_to_cpu) == moved
    assert model.cpu_offload is model.move_params_to_cpu


def test_disk_offloads_both(tmp_path: Path) -> None:
    model = alone(nn.Linear(2, 3), offload="disk", offload_folder=tmp_path)
    assert (model.move_params_to_cpu, model.move_grads_to_cpu, model.cpu_offload) == (True, True, True)


NOWHERE = "/dev/null/offload"
FOLDER = {"offload": "disk", "offload_folder": NOWHERE}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "gpu"}, r"offload must be None, 'cpu' or 'disk', got 'gpu'"),
        ({"offload": "cpu", "move_params_to_cpu": True}, r"offload='cpu' determines where .* omit move_params_to_cpu"),
        ({"offload": "cpu", "cpu_offload": True}, r"offload='cpu' determines where .* cpu_offload"),
        ({"offload": "cpu", "move_grads_to_cpu": False}, r"offload='cpu' determines where .* move_grads_to_cpu"),
        (FOLDER | {"move_params_to_cpu": True}, r"offload='disk' determines where .* omit move_params_to_cpu"),
        ({"offload": "disk"}, r"offload='disk' needs offload_folder"),
        ({"offload_folder": NOWHERE}, r"offload_folder and keep_offload_files are for offload='disk'"),
        ({"offload": "cpu", "keep_offload_files": True}, r"are for offload='disk'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone(nn.Linear(2, 3), **options)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    module = nn.Linear(2, 3)
    for folder in (tmp_path / "file", str(tmp_path / "file" / "below")):
        with pytest.raises(ValueError, match=rf"offload_folder='{folder}' cannot be used: .*Pass a folder on a disk"):
            alone(module, offload="disk", offload_folder=folder)
    assert alone(module)(torch.ones(1, 2)).shape == (1, 3)  # nothing was taken over


def test_a_module_s_own_attributes_of_these_names_are_still_forwarded() -> None:
    module = nn.Linear(2, 3)
    module.offload, module.precision = "mine", "mine too"  # type: ignore[assignment]
    model = alone(module)
    assert (model.offload, model.precision) == ("mine", "mine too")


# Training


@parametrize_cases(
    at_most=6,
    world_size=[2, 1],
    machine=["accelerated", "of CPUs only"],
    options=[*KINDS, {"cpu_offload": True}, {"move_params_to_cpu": True}],
    accumulate=[(1, True), (3, True), (2, False)],
    clip=[None, 0.3],
    recompute=["no", "outside", "inside"],
    others=every_pair(flatten_parameters=[True, False], reshard_after_forward=[True, False]),
)
@on_ranks("world_size")
def test_offloaded_units_train_like_one_process(case: Case) -> None:
    """Also if gradients accumulate, which answers pain point 16."""
    options = case.options | case.others
    turns, under_no_sync = case.accumulate
    wrap = partial(FullyShardedDataParallel if under_no_sync else AlwaysReducing, **options)
    make = partial(tiny_transformer, recompute=case.recompute)
    with on(case.machine):
        assert_parity(make, sgd_with_momentum, wrap=wrap, task=TOKENS, accumulate=turns, clip=case.clip)


@every_kind
@on_ranks(2)
def test_offloaded_training_is_ddp_s_to_the_bit(options: dict[str, Any]) -> None:
    training = Training(make_model=nested_mlp, make_optimizer=adamw)
    with accelerated():
        assert_bit_equal(train_sharded(training, fully_sharded(**options)), train_ddp(training))


@parametrize_pairs(world_size=[2, 1], options=KINDS)
@on_ranks("world_size")
def test_offloaded_units_can_be_called_in_unusual_ways(options: dict[str, Any]) -> None:
    with accelerated():
        assert_trains_like_plain(toolbox, *STEPS, options=options)


@on_ranks(2)
def test_units_may_differ_in_what_they_offload() -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, **next(kinds))

    with accelerated():
        for first in range(4):
            kinds = itertools.islice(itertools.cycle([*KINDS, {}]), first, None)
            assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, accumulate=2, clip=0.3)


@every_kind
@on_ranks(2)
def test_frozen_parameters_are_offloaded_too(options: dict[str, Any]) -> None:
    with accelerated():
        assert_parity(_frozen_trunk, sgd_with_trained, wrap=fully_sharded(**options), accumulate=2)


def _frozen_trunk(wrap: Wrap) -> nn.Module:
    def freeze_first(module: nn.Module) -> nn.Module:
        return wrap(module.requires_grad_(False) if isinstance(module, nn.Sequential) else module)

    return nested_mlp(freeze_first)


def sgd_with_trained(params: Any) -> torch.optim.Optimizer:
    return sgd_with_momentum([param for param in params if param.requires_grad])


# State


@every_kind
@on_ranks(2)
def test_a_state_dict_goes_out_and_in_again(options: dict[str, Any]) -> None:
    with accelerated():
        model = nested_mlp(fully_sharded(**options))
        step(model, sgd_with_momentum(model.parameters()))
        model(torch.ones(2, 5)).sum().backward()  # so that gradients are held while the state is taken
        state = {name: value.clone() for name, value in model.state_dict().items()}
        again = nested_mlp(fully_sharded(**options), seed=1)
        assert not torch.equal(again(torch.ones(2, 5)), model(torch.ones(2, 5)))
        again.load_state_dict(state)
        plain = nested_mlp(seed=2)
        plain.load_state_dict(state)
        for other in (again, plain):
            torch.testing.assert_close(other(torch.ones(2, 5)), model(torch.ones(2, 5)))
        for name, value in again.state_dict().items():
            assert torch.equal(value, state[name]), name


@every_kind
@on_ranks(1, 2)
def test_a_model_that_was_cast_trains_on(options: dict[str, Any]) -> None:
    task = Task(_wide_batch, REGRESSION.loss)
    with accelerated():
        for trained in (False, True):
            make = partial(_in_float64, trained=trained)
            tolerance = 1e-6 if trained else 1e-13  # the first step was in float32
            assert_parity(make, sgd_with_momentum, wrap=fully_sharded(**options), task=task, tolerance=tolerance)


def _in_float64(wrap: Wrap, trained: bool) -> nn.Module:
    model = nested_mlp(wrap)
    if trained:
        step(model, sgd_with_momentum(model.parameters()))
        model.zero_grad()
    return model.to(torch.float64)


def _wide_batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    inputs, targets = REGRESSION.batch(generator, rows)
    return inputs.double(), targets.double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


# A world of one, without torch.distributed

MODES = [{"offload": None}, *KINDS, {"offload": "disk"}]


def inputs(number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number))


@parametrize_cases(
    options=MODES, machine=["accelerated", "of CPUs only"], flatten_parameters=[True, False], turns=[1, 2]
)
def test_a_world_of_one_trains_without_torch_distributed(tmp_path: Path, case: Case) -> None:
    assert not dist.is_initialized()
    wrap = partial(alone, flatten_parameters=case.flatten_parameters, **with_folder(case.options, tmp_path))
    with on(case.machine):
        model, plain = nested_mlp(wrap), nested_mlp()
        optimizers = [adamw(each.parameters()) for each in (model, plain)]
        for number in range(3):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                for turn in range(case.turns):
                    each(inputs(10 * number + turn)).square().mean().backward()
                optimizer.step()
        expected = plain.state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], msg=f"{name} differs")


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("options", [BOTH, PARAMS, {"offload": "disk"}])
def test_a_world_of_one_streams_its_units(tmp_path: Path, options: dict[str, Any], trains: bool) -> None:
    with accelerated():
        layers = [alone(nn.Linear(5, 5), **with_folder(options, tmp_path)) for _ in range(6)]
        model = alone(nn.Sequential(*layers), **with_folder(options, tmp_path))
        units = [handle.unsharded.full for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
        whole: list[int] = []
        for layer in layers:
            layer.module.module.register_forward_hook(lambda *_: whole.append(sum(map(nbytes, units))))
            layer.module.module.register_full_backward_hook(lambda *_: whole.append(sum(map(nbytes, units))))
        for number in range(4):
            with torch.set_grad_enabled(trains):
                output = model(inputs(number).requires_grad_(trains))
            if trains:
                output.square().mean().backward()
            assert sum(map(nbytes, units)) == 0
        assert len(whole) == 4 * 6 * (1 + trains)
        assert nbytes(units[0]) < max(whole) <= 2 * units[0].nbytes  # the one that computes and the next


@pytest.mark.parametrize("options", MODES)
def test_a_model_that_was_dropped_is_freed(tmp_path: Path, options: dict[str, Any]) -> None:
    alive = {}
    for uses in (0, 1, 3):
        model = nested_mlp(partial(alone, **with_folder(options, tmp_path)))
        for _ in range(uses):
            model(inputs(0)).sum().backward()
        alive[uses] = [weakref.ref(each) for each in (model, *model.parameters())]
    del model
    gc.collect()  # once, since it looks at all there is in the process
    assert {uses: [each() for each in refs] for uses, refs in alive.items()} == dict.fromkeys(alive, [None] * 5)


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
