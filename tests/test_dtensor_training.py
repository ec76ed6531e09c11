"""Tensor parallelism on one dimension of a mesh and sharded data parallelism on the other train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests._ranks import RankPool
from tests.pairs import parametrize_pairs
from tests.parallel import assert_parallel_parity, mesh_of
from tests.support import MakeOptimizer, adamw, sgd_with_momentum

every_mesh = pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)], ids=["2x2", "1x2", "2x1"])


@every_mesh
@pytest.mark.parametrize("make_optimizer", [sgd_with_momentum, adamw])
def test_data_times_tensor_parallel_equals_one_process(
    ranks: RankPool, shape: tuple[int, int], make_optimizer: MakeOptimizer
) -> None:
    ranks(shape[0] * shape[1]).run(_train, shape, make_optimizer, clip=0.3)


def _train(shape: tuple[int, int], make_optimizer: MakeOptimizer, **how: Any) -> None:
    assert_parallel_parity(mesh_of(*shape), make_optimizer, **how)


@parametrize_pairs(
    make_optimizer=[sgd_with_momentum, adamw],
    shape=[(2, 2), (1, 2), (2, 1)],
    kind=["sequence", "heads"],
    model=[
        {},
        {"vocabulary": True},
        {"vocabulary": True, "tied": True},
        {"recompute": True},
        {"frozen": ("query", "norms.0", "narrow.bias")},
    ],
    options=[
        {},
        {"reshard_after_forward": False, "bucket_cap_mb": 0},
        {"flatten_parameters": False},
        {"use_orig_params": True},
        {"move_params_to_cpu": True},
    ],
    training=[{"clip": 0.3}, {"accumulate": 2, "clip": 0.3}, {"accumulate": 2, "no_sync": False}],
)
def test_every_pair_of_options_trains_as_one_process(
    ranks: RankPool,
    make_optimizer: MakeOptimizer,
    shape: tuple[int, int],
    kind: str,
    model: dict[str, Any],
    options: dict[str, Any],
    training: dict[str, Any],
) -> None:
    how = {"model": {"kind": kind, **model}, "options": options, "steps": 4, **training}
    ranks(shape[0] * shape[1]).run(_train, shape, make_optimizer, **how)
