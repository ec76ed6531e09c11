"""``reshard_after_forward="host"``: parameters wait in host memory for their backward, which gathers nothing."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.layers.host_copy import HostCopy
from tests.helpers.accelerator import ACCELERATOR, device_module
from tests.helpers.changed_params import LAYOUTS
from tests.helpers.memory import handles_of, live_bytes
from tests.helpers.models import nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_accelerators, on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import (
    TOKENS,
    Training,
    adamw,
    assert_bit_equal,
    fully_sharded,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.traffic import by_group, counting_sent

ON_HOST: dict[str, Any] = {"reshard_after_forward": "host"}


@parametrize_cases(
    at_most=4,
    world_size=[2, 3, 4, 1],
    form=[*LAYOUTS],
    recompute=[None, "outside", "inside"],
    accumulate=[1, 2],
    mixed=[False, True],
)
@on_ranks("world_size")
def test_trains_with_the_bits_of_a_backward_that_gathers(case: Case) -> None:
    mixed = {"mixed_precision": True, "compute_dtype": torch.bfloat16} if case.mixed else {}
    model = partial(tiny_transformer, recompute=case.recompute)
    training = Training(make_model=model, make_optimizer=adamw, task=TOKENS, accumulate=case.accumulate)
    options = {**LAYOUTS[case.form], **mixed}
    found = train_sharded(training, fully_sharded(**options, **ON_HOST))
    assert_bit_equal(found, train_sharded(training, fully_sharded(**options)))


@on_ranks(2)
def test_copies_are_there_between_forward_and_backward_only() -> None:
    before = live_bytes()
    model: Any = nested_mlp(fully_sharded(**ON_HOST))
    train = lambda: model(torch.ones(3, 5)).sum().backward()  # noqa: E731
    train()
    model.zero_grad()
    at_rest = live_bytes() - before
    loss = model(torch.ones(3, 5)).sum()
    assert all(isinstance(handle.kept_shard, HostCopy) for handle in handles_of(model))
    freed = [handle for handle in handles_of(model) if not handle.unsharded.full.untyped_storage().nbytes()]
    copies = sum(handle.unsharded.full.nbytes for handle in freed)
    assert freed
    assert live_bytes() - before >= at_rest + copies
    loss.backward()
    del loss
    model.zero_grad()
    assert live_bytes() - before == at_rest


@on_ranks(2)
def test_a_forward_without_a_backward_copies_nothing_and_drops_what_waits() -> None:
    model: Any = nested_mlp(fully_sharded(**ON_HOST))
    copies = [handle.kept_shard for handle in handles_of(model)]
    model(torch.ones(3, 5))
    assert any(copy._shard is not None for copy in copies)
    with torch.no_grad():
        model(torch.ones(3, 5))
    assert all(copy._shard is None for copy in copies)


@on_ranks(2)
def test_a_recomputed_forward_is_served_from_the_host_as_well() -> None:
    wrap = fully_sharded(**ON_HOST, bucket_cap_mb=0)
    model: Any = wrap(nn.Sequential(*(fsdp.checkpoint_wrapper(wrap(nn.Linear(4, 4, bias=False))) for _ in range(3))))
    optimizer = sgd_with_momentum(model.parameters())
    for _ in range(3):
        with counting_sent(by_group) as sent:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert sum(sent.values()) == 2 * 3 * 16 * 4 // 2  # three all-gathers and three reduce-scatters, half of each


@on_ranks(2)
def test_weights_that_a_forward_writes_are_gathered_again_for_its_backward() -> None:
    class Normed(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
            return super().forward(inputs)

    found = []
    for wrap in (fully_sharded(**ON_HOST), fully_sharded(), lambda module: module):
        torch.manual_seed(0)
        model: Any = wrap(nn.Sequential(*(wrap(Normed(4, 4)) for _ in range(3))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@on_ranks(2)
def test_a_step_between_forward_and_backward_is_still_an_error() -> None:
    model: Any = nested_mlp(fully_sharded(**ON_HOST))
    optimizer = sgd_with_momentum(model.parameters())
    model(torch.ones(3, 5)).sum().backward()
    loss = model(torch.ones(3, 5)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"were changed .* between forward and backward"):
        loss.backward()


@pytest.mark.accelerator
@on_accelerators(2)
def test_the_device_holds_no_more_than_where_backward_gathers() -> None:
    width, layers = 256, 8
    peaks, between = [], []
    for how in (True, "host", False):
        wrap = fully_sharded(compute_device=ACCELERATOR, reshard_after_forward=how)
        model = wrap(nn.Sequential(*(wrap(nn.Linear(width, width)) for _ in range(layers))))
        batch = torch.ones(4, width, device=ACCELERATOR)
        for _ in range(2):
            model(batch).sum().backward()
            model.zero_grad()
        gc.collect()
        device_module().reset_peak_memory_stats()
        start = device_module().memory_allocated()
        loss = model(batch).sum()
        between.append(device_module().memory_allocated() - start)
        loss.backward()
        peaks.append(device_module().max_memory_allocated() - start)
        del model, loss
        gc.collect()
    layer = 4 * width**2
    assert between[1] <= between[0] + layer
    assert between[2] >= between[0] + (layers - 2) * layer
    assert peaks[1] <= peaks[0] + layer


@pytest.mark.parametrize("given", ["disk", 1.5])
@on_ranks(1)
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match='must be True, False, a number of ranks or "host", got'):
        fsdp.FullyShardedDataParallel(nn.Linear(2, 2), reshard_after_forward=given)
    with pytest.raises(TypeError, match='must be True, False, a number of ranks or "host", got'):
        fsdp.fully_shard(nn.Linear(2, 2), reshard_after_forward=given)


def test_parameters_that_are_kept_from_step_to_step_are_not_kept_on_the_host() -> None:
    zero_2 = fsdp.Placements.from_strategy(fsdp.ShardingStrategy.SHARD_OPTIM_GRADS)
    with pytest.raises(ValueError, match="reshard_after_forward='host' requires parameters that are sharded like"):
        zero_2.resharded("host")


def test_a_plan_counts_the_copies_and_no_all_gather_in_backward() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    layer = 4 * 8 * 8
    options: dict[str, Any] = {"auto_wrap_policy": fsdp.module_wrap_policy({nn.Linear}), "sample": torch.ones(2, 8)}
    options["bucket_cap_mb"] = 0
    gathering, kept, copied = (
        fsdp.plan(model, world_size=4, reshard_after_forward=how, **options) for how in (True, False, "host")
    )
    assert copied.host_peak == 4 * layer
    assert copied.bytes_sent == kept.bytes_sent == gathering.bytes_sent - 3 * layer * 3 // 4
    assert copied.peak == gathering.peak
    assert sum(unit.all_gathers for unit in copied.units) == 4
