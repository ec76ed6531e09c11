"""Loss scaling: all ranks take or skip the same steps, whichever of them meets an infinity.

Pain point 17 of the peers is a scaler that decides on each rank alone: ranks skip different steps, train on with
different weights, and hang.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp import ShardedGradScaler, fully_shard
from fsdp.distributed.collectives import DirectExchange, TorchCollectives
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.models import Net, nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import (
    REGRESSION,
    TOKENS,
    Alone,
    Task,
    Training,
    fully_sharded,
    fused_adamw,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.precision_twins import PRECISIONS, InPrecision, Measured, fast_sgd_with_momentum
from tests.helpers.ranks import RankPool

OFFLOADS: dict[str, dict[str, Any]] = {
    "params": {"move_params_to_cpu": True, "move_grads_to_cpu": False},
    "grads": {"move_grads_to_cpu": True},
    "both": {"offload": "cpu"},
    "disk": {"offload": "disk"},
}


def offload_options(offload: str, folder: Path) -> dict[str, Any]:
    """Arguments of the wrapper."""
    return OFFLOADS[offload] | ({"offload_folder": str(folder)} if offload == "disk" else {})


def new_scaler(**options: Any) -> ShardedGradScaler:
    defaults: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2, "device": "cpu"}
    return ShardedGradScaler(**(defaults | options))


def batch(step: int) -> Tensor:
    """This rank's part."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def backward(model: nn.Module, scaler: torch.amp.GradScaler, inputs: Tensor | None = None) -> None:
    model.zero_grad()
    scaler.scale(model(batch(0) if inputs is None else inputs).float().square().mean()).backward()


def spoil_shard(params: Any, value: float = math.inf) -> None:
    """Put a value that cannot be stepped into one gradient of this rank."""
    grad = next(param.grad for param in params if param.grad is not None)
    getattr(grad, "stands_for", grad)[0] = value  # of one that is kept on another device, a placeholder


def step_changes(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Step, and say whether this rank's parameters are others now."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    scaler.step(optimizer)
    assert all(param.isfinite().all() for param in params)
    return any(not torch.equal(param, old) for param, old in zip(params, before, strict=True))


@contextmanager
def counted_reductions() -> Iterator[list[str]]:
    """The all-reduces that this rank takes part in, by their operation."""
    calls: list[str] = []

    def counted(reduce: Any) -> Any:
        def counting(self: Any, tensor: Tensor, op: str, what: str) -> Any:
            calls.append(op)
            return reduce(self, tensor, op, what)

        return counting

    with ExitStack() as stack:
        for kind in (DirectExchange, TorchCollectives):
            stack.enter_context(mock.patch.object(kind, "all_reduce", counted(kind.all_reduce)))
        yield calls


# The same as one process

# Rows whose targets no float16 gradient can follow: in these steps, in the last rank's part only.
BURSTS = (1, 4)
SCALES_AFTER_BURSTS = [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]


def _bursting_batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    inputs, targets = REGRESSION.batch(generator, rows)
    if generator.initial_seed() // 1000 in BURSTS:
        targets[-1] *= 1e6
    return inputs, targets


def test_a_device_as_the_first_argument_is_an_error() -> None:
    """As torch's classes take it."""
    with pytest.raises(TypeError, match=r"the first argument is init_scale, as in FairScale. Pass device='cpu'"):
        ShardedGradScaler("cpu")  # type: ignore[arg-type]


@parametrize_pairs(clip=[None, 0.2], world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_17_scaled_training_equals_torchs_scaler_on_the_unsharded_model(clip: float | None) -> None:
    precision = PRECISIONS["float16_mixed"]
    training = precision.training(
        Training(
            make_model=nested_mlp,
            make_optimizer=sgd_with_momentum,
            steps=len(SCALES_AFTER_BURSTS),
            task=Task(_bursting_batch, F.mse_loss),
            clip=clip,  # needs gradients that are unscaled first
        )
    )
    expected = Measured.of(training)
    trained = train_sharded(training, precision.wrap())
    assert trained.scales.tolist() == SCALES_AFTER_BURSTS
    expected.compare(trained)
    if clip is not None:
        assert trained.norms.isfinite().tolist() == [step not in BURSTS for step in range(training.steps)]


@on_ranks(2)
def test_pure_float16_trains_scaled_as_unsharded() -> None:
    # torch's own scaler refuses float16 gradients. A power of two changes no digit of them, so the twin does without.
    precision = InPrecision(name="float16", stored=torch.float16)
    training = precision.training(
        Training(make_model=tiny_transformer, make_optimizer=fast_sgd_with_momentum, steps=4, task=TOKENS)
    )
    expected = Measured.of(training)
    scaled = train_sharded(replace(training, scaling={"init_scale": 64.0}), precision.wrap())
    assert scaled.scales.tolist() == [64.0] * 4
    expected.compare(replace(scaled, scales=expected.reference.scales))
    expected.assert_sees_a_wrong_factor(training)


# Infinities on one rank only

# By step, the rank that spoils it; and what every rank must make of it, where two good steps double the scale.
SPOILED_BY = {1: 0, 2: 1, 5: 1}
TAKEN = [True, False, False, True, True, False, True, True]
SCALES = [1024.0, 512.0, 256.0, 256.0, 512.0, 256.0, 256.0, 512.0]


def assert_skips_together(
    model: nn.Module,
    *,
    place: str = "shard",
    value: float = math.inf,
    make_optimizer: Any = sgd_with_momentum,
    clips: bool = False,
    device: str = "cpu",
) -> None:
    """Collective. Train, with some steps spoiled by one rank, in its batch or its shard: see `TAKEN` and `SCALES`."""
    optimizer, scaler = make_optimizer(model.parameters()), new_scaler(device=device)
    outcomes = []
    for step in range(len(TAKEN)):
        spoils = SPOILED_BY.get(step, -1) == dist.get_rank()
        inputs = batch(step).to(device)
        if spoils and place == "batch":
            inputs[1, 2] = value
        backward(model, scaler, inputs)
        if spoils and place == "shard":
            spoil_shard(model.parameters(), value)
        if clips:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.1)  # type: ignore[operator]
        taken = step_changes(scaler, optimizer)
        scaler.update()
        outcomes.append((taken, scaler.get_scale()))
    assert outcomes == list(zip(TAKEN, SCALES, strict=True))


@parametrize_pairs(at_most=4, value=[math.inf, -math.inf, math.nan], place=["batch", "shard"], world_size=[2, 3])
def test_pain_point_17_all_ranks_skip_the_steps_that_one_cannot_take(
    ranks: RankPool, world_size: int, place: str, value: float
) -> None:
    ranks(world_size).run(skip_together, place=place, value=value)


def skip_together(options: dict[str, Any] | None = None, device: str = "cpu", **how: Any) -> None:
    """Collective. See `assert_skips_together`; `options` are the wrapper's."""
    with torch.device(device):
        model = nested_mlp(fully_sharded(mixed_precision=True, **(options or {})))
    assert_skips_together(model, device=device, **how)


@pytest.mark.parametrize(
    ("make_optimizer", "clips"), [(fused_adamw, False), (fused_adamw, True), (sgd_with_momentum, True)]
)
def test_pain_point_17_fused_and_clipped_steps_skip_together(ranks: RankPool, make_optimizer: Any, clips: bool) -> None:
    """Fused optimizers unscale by themselves, and clipping of unscaled gradients leaves an infinity found."""
    ranks(2).run(skip_together, make_optimizer=make_optimizer, clips=clips)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_pain_point_17_offloaded_gradients_skip_together(ranks: RankPool, tmp_path: Path, offload: str) -> None:
    options = offload_options(offload, tmp_path)
    for optimizer in (sgd_with_momentum, fused_adamw):
        ranks(2).run(skip_together, options, make_optimizer=optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@on_ranks(2)
def test_pain_point_17_gradients_of_any_dtype_skip_together(dtype: torch.dtype) -> None:
    sharded = fully_sharded()
    assert_skips_together(sharded(cast(nested_mlp(lambda module: sharded(module.to(dtype))), dtype)))


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module with inputs of the dtype that its parameters have."""
    return Net(lambda net, x: net.inner(x.to(net.dtype)), inner=module, dtype=dtype)


@pytest.mark.parametrize("clips", [False, True])
@on_ranks(2)
def test_fused_optimizers_on_another_device_than_the_scale_skip_together(clips: bool) -> None:
    """There is one device here, so the answer to whether there are two is pretended."""
    with mock.patch.object(ShardedGradScaler, "_fuses_across_devices", return_value=True):
        skip_together(make_optimizer=fused_adamw, clips=clips)
        _compare_fused()
        scaler, optimizer = new_scaler(), fused_adamw((model := nested_mlp(fully_sharded())).parameters())
        backward(model, scaler, batch(0))
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)


def test_fused_adamw_unscales_as_the_default_one(ranks: RankPool) -> None:
    ranks(2).run(_compare_fused)


def _compare_fused() -> None:
    results = []
    for make_optimizer in (fused_adamw, partial(torch.optim.AdamW, lr=1e-2)):
        model, scaler = nested_mlp(fully_sharded(mixed_precision=True)), new_scaler()
        optimizer = make_optimizer(model.parameters())
        for step in range(3):
            backward(model, scaler, batch(step))
            assert step_changes(scaler, optimizer)
            scaler.update()
        results.append(model.state_dict())
    torch.testing.assert_close(*results)


# What is agreed on, and how often


@on_ranks(2)
def test_units_of_different_dtypes_are_unscaled_and_skipped_together() -> None:
    half = fully_sharded()(nn.Linear(7, 3).half())
    model = fully_sharded()(
        nn.Sequential(nn.Linear(5, 7), cast(half, torch.float16), cast(nn.Linear(3, 1), torch.float32))
    )
    optimizer = sgd_with_momentum(model.parameters())
    assert {param.dtype for param in model.parameters()} == {torch.float16, torch.float32}
    gradients = []
    for scaler in (new_scaler(init_scale=64.0), new_scaler(enabled=False)):
        backward(model, scaler)
        scaler.unscale_(optimizer)
        gradients.append([param.grad for param in model.parameters()])
    # A power of two changes no digit, but of what is too small for float16.
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    for dtype in (torch.float16, torch.float32):
        scaler = new_scaler()
        backward(model, scaler)
        if dist.get_rank() == 1:
            spoil_shard(param for param in model.parameters() if param.dtype is dtype)
        assert not step_changes(scaler, optimizer)


@on_ranks(3)
def test_each_optimizer_steps_or_skips_by_its_own_gradients() -> None:
    model, scaler = nested_mlp(fully_sharded(mixed_precision=True)), new_scaler()
    first, *others = model.parameters()
    spoiled, sound = sgd_with_momentum([first]), sgd_with_momentum(others)
    backward(model, scaler)
    if dist.get_rank() == 2:
        spoil_shard([first])
    assert not step_changes(scaler, spoiled)
    assert step_changes(scaler, sound)
    scaler.update()
    assert scaler.get_scale() == 512.0, "one optimizer that skips is enough to lower the scale"


@pytest.mark.parametrize("make_optimizer", [sgd_with_momentum, fused_adamw])
@on_ranks(2)
def test_pain_point_17_one_reduction_for_each_optimizer_and_step(make_optimizer: Any) -> None:
    # Units of two dtypes, so more than one group of gradients.
    sharded = fully_sharded()
    model = sharded(
        nn.Sequential(sharded(cast(nn.Linear(5, 5).double(), torch.float64)), cast(nn.Linear(5, 3), torch.float32))
    )
    scaler = new_scaler()
    for step in range(2):
        optimizers = [make_optimizer([param]) for param in model.parameters()]
        assert len(optimizers) == 2
        backward(model, scaler, batch(step))
        with counted_reductions() as calls:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert calls == ["max", "max"]
        optimizer = make_optimizer(model.parameters())
        backward(model, scaler, batch(step))
        with counted_reductions() as calls:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert calls == ["max"], "what unscale_ found is not asked for again"


@pytest.mark.parametrize("make_optimizer", [sgd_with_momentum, fused_adamw])
@on_ranks(3)
def test_pain_point_17_a_rank_without_any_gradient_takes_part(make_optimizer: Any) -> None:
    model, scaler = nested_mlp(fully_sharded(mixed_precision=True)), new_scaler()
    optimizer = make_optimizer(model.parameters())
    for spoiled in (False, True):
        backward(model, scaler)
        if dist.get_rank() == 1:
            model.zero_grad()
        elif spoiled and dist.get_rank() == 2:
            spoil_shard(model.parameters())
        assert step_changes(scaler, optimizer) is (not spoiled and dist.get_rank() != 1)
        scaler.update()
    assert scaler.get_scale() == 512.0


@on_ranks(3)
def test_only_the_ranks_of_the_process_group_agree() -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    group = alone if dist.get_rank() == 2 else pair
    model = nested_mlp(fully_sharded(mixed_precision=True, process_group=group))
    scaler = new_scaler(process_group=group)
    for _ in range(dist.get_rank() // 2 + 1):  # the rank that is alone steps twice, and nobody waits
        backward(model, scaler)
        if dist.get_rank() == 1:
            spoil_shard(model.parameters())
        assert step_changes(scaler, sgd_with_momentum(model.parameters())) is (dist.get_rank() == 2)
        scaler.update()
    assert scaler.get_scale() == (2048.0 if dist.get_rank() == 2 else 512.0)


@on_ranks(1, backend=None)
def test_a_world_of_one_needs_no_torch_distributed() -> None:
    for group in (None, Alone()):
        model = nested_mlp(fully_sharded(mixed_precision=True, process_group=Alone()))
        scaler, optimizer = new_scaler(process_group=group), sgd_with_momentum(model.parameters())
        inputs = torch.ones(4, 5)
        for value in (1.0, math.nan):
            inputs[0, 0] = value
            backward(model, scaler, inputs)
            assert step_changes(scaler, optimizer) is (value == 1.0)
            scaler.update()
        assert scaler.get_scale() == 512.0


# The rest of the interface


@on_ranks(2)
def test_a_disabled_scaler_does_nothing() -> None:
    model, scaler = nested_mlp(fully_sharded()), new_scaler(enabled=False)
    loss = model(batch(0)).mean()
    assert scaler.scale(loss) is loss
    loss.backward()
    optimizer = sgd_with_momentum(model.parameters())
    with counted_reductions() as calls:
        scaler.unscale_(optimizer)
        assert step_changes(scaler, optimizer)
        scaler.update()
    assert not calls
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0


@on_ranks(2)
def test_a_scaler_that_is_loaded_goes_on_where_the_saved_one_was() -> None:
    model, saved = nested_mlp(fully_sharded(mixed_precision=True)), new_scaler(growth_interval=3)
    optimizer = sgd_with_momentum(model.parameters())

    def step(scaler: ShardedGradScaler) -> float:
        backward(model, scaler)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert [step(saved) for _ in range(2)] == [1024.0, 1024.0]
    state = saved.state_dict()
    # It is torch's own state, either way.
    assert state.keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    loaded = ShardedGradScaler(device="cpu")
    loaded.load_state_dict(state)
    assert loaded.state_dict() == state
    assert step(loaded) == 2048.0, "the third good step in a row, two of them before it was saved"


@pytest.mark.parametrize("offload", [None, "grads", "disk"])
@on_ranks(2)
def test_gradients_that_are_not_reduced_are_refused(tmp_path: Path, offload: str | None) -> None:
    options = {} if offload is None else offload_options(offload, tmp_path)
    model, scaler = nested_mlp(fully_sharded(mixed_precision=True, **options)), new_scaler()
    optimizer = sgd_with_momentum(model.parameters())
    for reduced_before in (False, True):
        model.zero_grad()
        if reduced_before:
            scaler.scale(model(batch(0)).mean()).backward()
        with model.no_sync():  # type: ignore[operator]
            scaler.scale(model(batch(1)).mean()).backward()
        for refused in (scaler.unscale_, scaler.step):
            with pytest.raises(RuntimeError, match=r"ShardedGradScaler: .* no_sync\(\) are not reduced"):
                refused(optimizer)


@on_ranks(2)
def test_ignored_parameters_under_fully_shard_are_unscaled_and_skipped_with_the_others() -> None:
    layer = nn.Linear(5, 4)
    model = fully_shard(layer, ignored_params={layer.bias})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for scaler in (new_scaler(init_scale=64.0), new_scaler(enabled=False)):
        backward(model, scaler)
        scaler.unscale_(optimizer)
        gradients.append([full_tensor(param.grad) for param in model.parameters()])
    torch.testing.assert_close(*gradients)
    scaler = new_scaler()
    backward(model, scaler)
    if dist.get_rank() == 1:
        spoil_shard([layer.bias])
    assert not step_changes(scaler, optimizer)


def test_sparse_gradients_of_other_parameters_are_unscaled() -> None:
    # A table outside of the wrapped model that shares its optimizer.
    table, scaler = nn.Embedding(5, 3, sparse=True), new_scaler()
    optimizer = torch.optim.SGD(table.parameters())
    loss: Tensor = table(torch.tensor([1, 1, 2])).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().sum(dim=1).tolist() == [0.0, 6.0, 3.0, 0.0, 0.0]
