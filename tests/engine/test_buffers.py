"""Buffers keep dtype and values unless the user says otherwise, and come back to both wherever they are shown.

`test_pain_point_18_...` are about models that went wrong because a wrapper cast their buffers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import alone, fully_sharded

PRECISE = 1 + 2**-10  # 1 in bfloat16


class Rotary(nn.Module):
    """Turns its input by its position, as attention with rotary embeddings does, after a layer."""

    CONTEXT = 2048

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        positions = torch.arange(self.CONTEXT, dtype=SINGLE)
        self.register_buffer("angles", positions * 0.99)
        self.register_buffer("positions", torch.arange(self.CONTEXT))
        self.register_buffer("is_even", positions % 2 == 0, persistent=False)
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("scale", torch.tensor(PRECISE), persistent=False)
        self.register_buffer("nothing", None)

    def turns(self) -> Tensor:
        return torch.stack([self.get_buffer("angles").cos(), self.get_buffer("angles").sin()], dim=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.turns().to(inputs.dtype)


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in module.named_buffers()}


OWN = {"angles": SINGLE, "positions": torch.int64, "is_even": torch.bool, "phases": torch.complex64, "scale": SINGLE}


def own_and_cast(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {name: dtype if own is SINGLE else own for name, own in OWN.items()}


def policy(buffer_dtype: torch.dtype | None, **more: Any) -> MixedPrecision:
    return MixedPrecision(param_dtype=BRAIN, buffer_dtype=buffer_dtype, **more)


# By default


@pytest.mark.parametrize("param_dtype", [HALF, BRAIN])
def test_pain_point_18_tables_of_positions_stay_in_float32(param_dtype: torch.dtype) -> None:
    """Positions above 256 are not even different numbers in bfloat16: angles would be off by radians."""
    rotary = Rotary()
    expected = rotary.turns()
    model = alone(rotary, mixed_precision=MixedPrecision(param_dtype=param_dtype))
    model(torch.ones(Rotary.CONTEXT, 2)).float().sum().backward()
    assert dtypes(rotary) == OWN
    assert torch.equal(rotary.turns(), expected)
    cast = Rotary()
    alone(cast, mixed_precision=MixedPrecision(param_dtype=param_dtype, buffer_dtype=param_dtype))
    assert (cast.turns().float() - expected).abs().max() > 0.4, "which is what they are spared"


@pytest.mark.parametrize("options", [{}, {"mixed_precision": MixedPrecision()}, {"force_input_to_fp32": True}])
def test_without_mixed_precision_buffers_are_left_alone(options: dict[str, Any]) -> None:
    rotary = Rotary()
    before = dict(rotary.named_buffers())
    alone(rotary, **options)
    assert dtypes(rotary) == OWN
    assert all(after is before[name] for name, after in rotary.named_buffers())


def test_buffers_of_other_dtypes_are_left_alone() -> None:
    """Parameters in 16 bits, with tables in 32 or 64."""
    rotary = Rotary()
    rotary.layer.to(BRAIN)
    rotary.register_buffer("fine", torch.ones(2, dtype=DOUBLE))
    alone(rotary)
    assert dtypes(rotary) == {**OWN, "fine": DOUBLE}


# By FairScale's flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"mixed_precision": True}, HALF),
        ({"mixed_precision": True, "compute_dtype": BRAIN}, BRAIN),
        ({"mixed_precision": True, "compute_dtype": BRAIN, "buffer_dtype": SINGLE}, SINGLE),
        ({"mixed_precision": True, "buffer_dtype": BRAIN}, BRAIN),
        ({"buffer_dtype": HALF}, HALF),
        ({"compute_dtype": SINGLE}, SINGLE),
    ],
)
def test_with_flags_buffers_are_cast_as_in_fairscale(flags: dict[str, Any], expected: torch.dtype) -> None:
    rotary = Rotary()
    alone(rotary, **flags)
    assert dtypes(rotary) == own_and_cast(expected)


def test_with_flags_16_bit_parameters_have_16_bit_buffers() -> None:
    rotary = Rotary()
    rotary.layer.half()
    alone(rotary, compute_dtype=HALF)
    assert dtypes(rotary) == own_and_cast(HALF)


# By a policy


@pytest.mark.parametrize("dtype", [HALF, BRAIN, DOUBLE])
def test_a_policy_casts_floating_point_buffers(dtype: torch.dtype) -> None:
    rotary = Rotary()
    alone(rotary, mixed_precision=policy(dtype))
    assert dtypes(rotary) == own_and_cast(dtype)


def test_buffers_can_be_cast_where_parameters_are_not() -> None:
    rotary = Rotary()
    alone(rotary, mixed_precision=MixedPrecision(buffer_dtype=BRAIN))
    assert dtypes(rotary) == own_and_cast(BRAIN)
    assert rotary.layer.weight.dtype is SINGLE


class Sharing(nn.Module):
    """Two modules with one buffer, which each also has under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        shared = torch.full((2,), PRECISE)
        for layer in (self.first, self.second):
            layer.register_buffer("table", shared)
        self.second.register_buffer("alias", shared)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs) * self.first.get_buffer("table"))

    def buffers_seen(self) -> list[Tensor]:
        return [self.first.get_buffer("table"), self.second.get_buffer("table"), self.second.get_buffer("alias")]


def test_shared_buffers_stay_shared() -> None:
    sharing = Sharing()
    model = alone(sharing, mixed_precision=policy(BRAIN))

    def assert_shared(dtype: torch.dtype) -> None:
        first, *others = sharing.buffers_seen()
        assert all(other is first for other in others)
        assert first.dtype is dtype

    assert_shared(BRAIN)
    with model.summon_full_params():
        assert_shared(SINGLE)
    assert_shared(BRAIN)
    model.load_state_dict(model.state_dict())
    assert_shared(BRAIN)


def test_a_unit_casts_its_own_buffers_only() -> None:
    """What lies in an inner unit is a matter of that unit's policy."""
    kept, cast = Rotary(), Rotary()
    outer = Rotary()
    outer.inner = nn.ModuleList([alone(kept, mixed_precision=policy(None)), alone(cast, mixed_precision=policy(HALF))])
    alone(outer, mixed_precision=policy(BRAIN))
    assert dtypes(kept) == OWN
    assert dtypes(cast) == own_and_cast(HALF)
    assert outer.get_buffer("angles").dtype is BRAIN


# Shown and saved


@parametrize_pairs(world_size=[1, 2], flags=[{"mixed_precision": policy(BRAIN)}, {"mixed_precision": True}])
@on_ranks("world_size")
def test_what_is_shown_and_saved_has_the_own_dtype(flags: dict[str, Any]) -> None:
    rotary = Rotary()
    model = FullyShardedDataParallel(rotary, **flags)
    computed = dtypes(rotary)
    persistent = {name: dtype for name, dtype in OWN.items() if name not in ("is_even", "scale")}
    for _ in range(2):
        assert {name: value.dtype for name, value in model.state_dict().items() if name in OWN} == persistent
        assert dtypes(rotary) == computed
        with model.summon_full_params():
            assert dtypes(rotary) == OWN
        assert dtypes(rotary) == computed
        model(torch.ones(Rotary.CONTEXT, 2)).float().sum().backward()
    with pytest.raises(ZeroDivisionError), model.summon_full_params():
        raise ZeroDivisionError
    assert dtypes(rotary) == computed


@pytest.mark.parametrize("buffer_dtype", [None, BRAIN, DOUBLE])
@on_ranks(2)
def test_pain_point_18_values_survive_a_round_trip(buffer_dtype: torch.dtype | None) -> None:
    """A table that was never written to is saved as it was loaded, whatever it was cast to for computing."""
    plain = Rotary()
    model = FullyShardedDataParallel(copy.deepcopy(plain), mixed_precision=policy(buffer_dtype))
    model(torch.ones(Rotary.CONTEXT, 2))
    for _ in range(2):
        saved = model.state_dict()
        assert torch.equal(saved["angles"], plain.get_buffer("angles"))
        model.load_state_dict(saved)


def test_changed_buffers_are_shown_and_saved_as_changed() -> None:
    """In place or by assignment, in computation or while summoned."""
    rotary = Rotary()
    model = alone(rotary, mixed_precision=policy(BRAIN))
    rotary.get_buffer("angles").fill_(2.5)
    assert torch.equal(model.state_dict()["angles"], torch.full((Rotary.CONTEXT,), 2.5))
    with model.summon_full_params():
        rotary.get_buffer("angles").fill_(PRECISE)
        assert torch.equal(model.state_dict()["angles"], torch.full((Rotary.CONTEXT,), PRECISE))
    assert torch.equal(rotary.get_buffer("angles"), torch.ones(Rotary.CONTEXT, dtype=BRAIN))
    rotary.angles = torch.full((Rotary.CONTEXT,), 3.0)
    assert torch.equal(model.state_dict()["angles"], torch.full((Rotary.CONTEXT,), 3.0))
    rotary.angles = None  # type: ignore[assignment]
    assert "angles" not in model.state_dict()


@on_ranks(2)
def test_loaded_buffers_are_cast_for_computation() -> None:
    plain = Rotary()
    plain.get_buffer("angles").fill_(PRECISE * 2)
    rotary = Rotary()
    model = fully_sharded(mixed_precision=policy(BRAIN))(rotary)
    model.load_state_dict(plain.state_dict())
    assert dtypes(rotary) == own_and_cast(BRAIN)
    assert torch.equal(rotary.get_buffer("angles"), torch.full((Rotary.CONTEXT,), 2.0, dtype=BRAIN))
    assert torch.equal(model.state_dict()["angles"], plain.get_buffer("angles"))


# Moving


def test_buffers_follow_a_cast_of_the_module() -> None:
    rotary = Rotary()
    alone(rotary).double()
    assert dtypes(rotary) == own_and_cast(DOUBLE)


def test_a_cast_of_the_module_leaves_the_dtype_that_a_policy_computes_buffers_in() -> None:
    rotary = Rotary()
    model = alone(rotary, mixed_precision=policy(BRAIN)).double()
    model(torch.ones(Rotary.CONTEXT, 2))
    with model.summon_full_params():
        pass
    assert dtypes(rotary) == own_and_cast(BRAIN)


# Every rank has its own


@on_ranks(2)
def test_buffers_are_not_averaged_over_ranks() -> None:
    """As with running statistics: each rank's are of its own batches, and nothing is sent."""
    rotary = Rotary()
    model = fully_sharded(mixed_precision=policy(None))(rotary)
    rotary.get_buffer("angles").fill_(dist.get_rank())
    model(torch.ones(Rotary.CONTEXT, 2)).float().sum().backward()
    assert torch.equal(rotary.get_buffer("angles"), torch.full((Rotary.CONTEXT,), float(dist.get_rank())))
    assert torch.equal(model.state_dict()["angles"], rotary.get_buffer("angles"))
