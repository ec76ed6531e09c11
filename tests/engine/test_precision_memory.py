"""What mixed precision saves: bytes on the wire and bytes of whole parameters; and that nothing is left of its casts.

Bytes sent are those that ranks hand to the process group, message by message. Bytes in memory are those of all tensors
of a dtype, each storage counted once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.dtypes import BRAIN, HALF, SINGLE
from tests.helpers.memory import handles_of, live_bytes
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import alone, fully_sharded
from tests.helpers.traffic import by_dtype, counting_sent

WIDTH, UNITS = 32, 3


class Tower(nn.Module):
    """Equal units one after the other; the root has a layer of its own."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = nn.Linear(5, WIDTH)
        self.units = nn.ModuleList(wrap(nn.Linear(WIDTH, WIDTH)) for _ in range(UNITS))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for unit in self.units:
            hidden = torch.tanh(unit(hidden))
        return hidden


def tower(**options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    wrap = fully_sharded(**options)
    model: Any = wrap(Tower(wrap))
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(1, 5)).float().sum().backward()
    model.zero_grad()


# On the wire


def sent_in_a_step(**options: Any) -> Counter[torch.dtype]:
    model = tower(**options)
    step(model)  # the ranks also agree in the first one
    with counting_sent(by_dtype) as sent:
        step(model)
    return sent


@parametrize_cases(
    dtype=[BRAIN, HALF, None], world_size=[2, 3], reshard_after_forward=[True, False], bucket_cap_mb=[25, 0]
)
@on_ranks("world_size")
def test_16_bits_halve_what_is_sent(world_size: int, case: Case) -> None:
    """Whether a policy says so, or FairScale's default."""
    options = case.only("reshard_after_forward", "bucket_cap_mb")
    full = sent_in_a_step(**options)
    mixed = sent_in_a_step(mixed_precision=MixedPrecision(param_dtype=case.dtype) if case.dtype else True, **options)
    assert mixed == {case.dtype or HALF: full[SINGLE] // 2}
    assert full.keys() == {SINGLE}
    numel = 6 * WIDTH + UNITS * (WIDTH + 1) * WIDTH
    world_size = dist.get_world_size()
    gathers = 2 if options["reshard_after_forward"] else 1
    # Each rank sends all pieces but its own; of the root's parameters, and of the last unit's once the order is
    # known, only one gather is needed.
    assert full[SINGLE] <= (gathers + 1) * (numel + UNITS * world_size) * 4 * (world_size - 1) // world_size


@parametrize_pairs(
    world_size=[2, 3],
    options=[
        {"mixed_precision": MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE)},
        {"mixed_precision": True, "compute_dtype": BRAIN, "fp32_reduce_scatter": True},
    ],
)
@on_ranks("world_size")
def test_gradients_in_float32_cost_half_of_the_saving(options: dict[str, Any]) -> None:
    """With one gather for each reduction, three quarters are sent."""
    full = sent_in_a_step(reshard_after_forward=False)
    mixed = sent_in_a_step(reshard_after_forward=False, **options)
    assert mixed == {BRAIN: full[SINGLE] // 4, SINGLE: full[SINGLE] // 2}
    assert mixed.total() == 0.75 * full.total()


@on_ranks(2)
def test_parameters_in_float32_can_have_gradients_in_16_bits() -> None:
    full = sent_in_a_step(reshard_after_forward=False)
    mixed = sent_in_a_step(reshard_after_forward=False, mixed_precision=MixedPrecision(reduce_dtype=BRAIN))
    assert mixed == {SINGLE: full[SINGLE] // 2, BRAIN: full[SINGLE] // 4}


# Whole parameters


def linears(model: nn.Module) -> list[nn.Linear]:
    """The root's own layer first."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@parametrize_pairs(world_size=[1, 2], reshard_after_forward=[True, False], flatten_parameters=[True, False])
@on_ranks("world_size")
def test_gathered_parameters_take_half_and_are_freed(reshard_after_forward: bool, flatten_parameters: bool) -> None:
    options = {"reshard_after_forward": reshard_after_forward, "flatten_parameters": flatten_parameters}
    before = live_bytes(BRAIN)
    model = tower(mixed_precision=MixedPrecision(param_dtype=BRAIN), **options)
    handles = handles_of(model)
    unit = 2 * max(handle.layout.padded_numel for handle in handles[-2:])
    all_of_them = 2 * sum(handle.layout.padded_numel for handle in handles)
    whole: list[int] = []

    def look(*_: Any) -> None:
        whole.append(sum(handle.unsharded.full.untyped_storage().nbytes() for handle in handles))

    for layer in linears(model):
        layer.register_forward_hook(look)
    for _ in range(3):
        step(model)
        look()
        assert whole[-1] == 0
        assert live_bytes(BRAIN) == before, "no cast, no buffer and no activation outlives a step"
    if options["reshard_after_forward"]:
        assert max(whole) <= all_of_them - (UNITS - 2) * unit, "the root and two units"
    else:
        assert max(whole) == all_of_them


@on_ranks(2)
def test_shards_that_were_cast_to_be_gathered_are_not_kept() -> None:
    """After a forward there is the root's buffer, and what backward needs of a batch of one row."""
    before = live_bytes(BRAIN)
    model = tower(mixed_precision=MixedPrecision(param_dtype=BRAIN))
    root, *units = (2 * handle.layout.padded_numel for handle in handles_of(model))
    for _ in range(2):  # from the third on the last unit stays whole, too
        output = model(torch.ones(1, 5))
        activations = (5 + 3 * UNITS * WIDTH) * 2
        assert root < live_bytes(BRAIN) - before <= root + activations < root + units[0] // 2
        output.float().sum().backward()
        del output
        assert live_bytes(BRAIN) == before


@on_ranks(2)
def test_at_most_one_cast_shard_besides_the_one_in_flight_is_alive() -> None:
    before = live_bytes(BRAIN)
    model = tower(mixed_precision=MixedPrecision(param_dtype=BRAIN), bucket_cap_mb=0)
    _, *units = handles_of(model)
    shard = 2 * units[0].layout.shard_numel
    alive: list[int] = []

    def look(*_: Any) -> None:
        whole = sum(handle.unsharded.full.untyped_storage().nbytes() for handle in handles_of(model))
        alive.append((live_bytes(BRAIN) - before - whole) // shard)

    for layer in linears(model)[1:]:
        layer.register_forward_hook(look)
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(1, 5))
    assert len(alive) == 3 * UNITS
    assert max(alive) <= 2


@on_ranks(2)
def test_between_steps_there_are_float32_shards_to_the_byte() -> None:
    before = live_bytes(SINGLE)
    model = tower(mixed_precision=MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE))
    shards = sum(4 * handle.layout.shard_numel for handle in handles_of(model))

    assert live_bytes(SINGLE) - before == shards
    for _ in range(3):
        model(torch.ones(1, 5)).float().sum().backward()
        assert live_bytes(SINGLE) - before == 2 * shards
        model.zero_grad()
        assert live_bytes(SINGLE) - before == shards


# The cache of autocast


class Casts(TorchDispatchMode):
    """Counts the casts of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._to_copy.default and args[0].shape == (WIDTH, WIDTH)
        return func(*args, **(kwargs or {}))


@parametrize_pairs(clears=[True, False], world_size=[1, 2])
@on_ranks("world_size")
def test_autocasts_weights_are_forgotten_if_so_asked(clears: bool) -> None:
    """Otherwise autocast keeps a cast copy of every whole weight until its context ends, and uses it again."""
    model = tower(clear_autocast_cache=clears)
    with torch.autocast("cpu", BRAIN):
        for expected in [UNITS, UNITS] if clears else [UNITS, 0]:
            with Casts() as casts:
                model(torch.ones(1, 5))
            assert casts.number == expected


def test_an_inner_unit_clears_the_cache_after_its_own_forward() -> None:
    unit = alone(nn.Linear(5, 5), clear_autocast_cache=True)
    with mock.patch.object(torch, "clear_autocast_cache") as clear:
        alone(nn.Sequential(unit, nn.Linear(5, 5)))(torch.ones(1, 5))
    assert clear.call_count == 1


@on_ranks(2)
def test_autocast_around_a_wrapped_model_computes_as_around_a_plain_one() -> None:
    plain = Tower(lambda module: module)
    for clears in (False, True):
        model = tower(clear_autocast_cache=clears)
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        with torch.autocast("cpu", BRAIN):
            outputs = [each(torch.ones(1, 5)) for each in (plain, model)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.float().sum().backward()
        with torch.no_grad():
            for param in (*plain.parameters(), *model.parameters()):
                assert param.grad is not None
                param.sub_(param.grad)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)
