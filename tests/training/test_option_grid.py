"""Precision, offload and everything that changes when data comes and goes, together: every pair of options meets.

Each cell trains a small transformer sharded, and unsharded in the same precision. They are equal within the noise of
that precision: [Note: noise in 16 bits] of `tests.helpers.precision_twins`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.helpers.models import Block
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import TOKENS, Training, tiny_transformer, train_sharded
from tests.helpers.precision_twins import PRECISIONS, WRONG_FACTOR, Measured, fast_sgd_with_momentum
from tests.helpers.ranks import RankPool

# What each name in the grid means: options of the wrapper, ...
OFFLOADS: dict[str, dict[str, Any]] = {
    "on_device": {},
    "params_to_cpu": {"move_params_to_cpu": True, "move_grads_to_cpu": False},
    "grads_to_cpu": {"move_grads_to_cpu": True},
    "both_to_cpu": {"cpu_offload": True},
    "disk": {"offload": "disk"},
}
LAYOUTS: dict[str, dict[str, Any]] = {"flattened": {}, "unflattened": {"flatten_parameters": False}}
RESHARDING: dict[str, dict[str, Any]] = {"resharded": {}, "kept": {"reshard_after_forward": False}}

# ... of the training, ...
ACCUMULATIONS: dict[str, dict[str, Any]] = {
    "one_batch": {},
    "no_sync": {"accumulate": 2},
    "reduced_each_time": {"accumulate": 2, "no_sync": False},
}

# ... and of the model.
RECOMPUTES: dict[str, dict[str, Any]] = {
    "no_recompute": {},
    "inside": {"recompute": "inside"},
    "outside": {"recompute": "outside"},
    "inside_reentrant": {"recompute": "inside", "reentrant": True},
    "outside_reentrant": {"recompute": "outside", "reentrant": True},
}

GRID: dict[str, list[Any]] = {
    "precision": list(PRECISIONS),
    "offload": list(OFFLOADS),
    "layout": list(LAYOUTS),
    "resharding": list(RESHARDING),
    "accumulation": list(ACCUMULATIONS),
    "recompute": list(RECOMPUTES),
}


@parametrize_cases(at_most=6, world_size=[2, 3], **GRID)
def test_training_equals_the_unsharded_model_in_the_same_precision(
    ranks: RankPool, tmp_path: Path, world_size: int, case: Case
) -> None:
    scales = ranks(world_size).run(train_and_compare, case, str(tmp_path))
    assert scales == scales[:1] * len(scales)


def training_of(accumulation: str, **how: Any) -> Training:
    how |= ACCUMULATIONS[accumulation]
    return Training(make_model=tiny_transformer, make_optimizer=fast_sgd_with_momentum, steps=3, task=TOKENS, **how)


def train_and_compare(case: Case, folder: str, device: str = "cpu", unsharded_on: str = "cpu") -> list[float]:
    """Collective. Train one cell of the grid sharded and unsharded, and compare; returns the scales of the loss."""
    precision = PRECISIONS[case.precision]
    training = precision.training(training_of(case.accumulation, device=device))
    options = OFFLOADS[case.offload] | LAYOUTS[case.layout] | RESHARDING[case.resharding]
    if options.get("offload") == "disk":
        options["offload_folder"] = folder
    # Recomputing changes nothing but when things happen: the unsharded model does without.
    make_model = partial(tiny_transformer, **RECOMPUTES[case.recompute])
    trained = train_sharded(replace(training, make_model=make_model), precision.wrap(**options))
    if dist.get_rank() == 0:  # the others have the same state dict
        unsharded = precision.training(training_of(case.accumulation, device=unsharded_on))
        expected = Measured.of(unsharded)
        expected.compare(trained)
        expected.assert_sees_a_wrong_factor(unsharded)
    return trained.scales.tolist()


@pytest.mark.parametrize("name", PRECISIONS)
@on_ranks(2)
def test_a_wrong_factor_in_one_unit_is_found(name: str) -> None:
    # Else the grid would show nothing.
    precision = PRECISIONS[name]
    right = precision.wrap()

    def wrong(module: nn.Module) -> nn.Module:
        unit = right(module)
        if isinstance(module, Block):
            unit.set_gradient_divide_factors(2.0, 2.0 * WRONG_FACTOR)  # type: ignore[operator]
        return unit

    training = precision.training(training_of("one_batch"))
    trained = train_sharded(training, wrong)
    if dist.get_rank() == 0:  # the others have the same state dict
        with pytest.raises(AssertionError, match=r"differ in .*units"):
            Measured.of(training).compare(trained)
