"""torch's own `GradScaler` on sharded models: a clear error where ranks could skip different steps, else it works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, fused_adamw, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.optim_utils.test_grad_scaler import backward, step_changes


class OwnScaler(torch.amp.GradScaler):
    """As libraries derive theirs."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)


SGD = partial(torch.optim.SGD, lr=0.1)


def _scheduled_sgd(params: Any) -> torch.optim.Optimizer:
    optimizer = SGD(params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts calls of its own around the step
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "default": SGD,
    "foreach": partial(SGD, foreach=True),
    "fused": partial(SGD, fused=True),
    "fused_adamw": fused_adamw,
    "scheduled": _scheduled_sgd,
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)

LONELY = r"Scaler looks for infinities in this rank's shards only.*fsdp\.ShardedGradScaler"


@parametrize_pairs(kind=[torch.amp.GradScaler, OwnScaler, torch.cpu.amp.GradScaler], optimizer=list(OPTIMIZERS))
def test_pain_point_17_torchs_scaler_is_refused_where_ranks_could_disagree(
    ranks: RankPool, optimizer: str, kind: type[torch.amp.GradScaler]
) -> None:
    ranks(2).run(_step_with_torchs_scaler, optimizer, kind, is_refused=True)


@parametrize_pairs(kind=[torch.amp.GradScaler, OwnScaler], optimizer=list(OPTIMIZERS))
def test_torchs_scaler_works_in_a_world_of_one(
    ranks: RankPool, optimizer: str, kind: type[torch.amp.GradScaler]
) -> None:
    ranks(1).run(_step_with_torchs_scaler, optimizer, kind, is_refused=False)


def _step_with_torchs_scaler(optimizer: str, kind: type[torch.amp.GradScaler], is_refused: bool) -> None:
    model = nested_mlp(fully_sharded(mixed_precision=True))
    stepping, scaler = OPTIMIZERS[optimizer](model.parameters()), _torchs_scaler(kind)
    for unscale_first in (False, True):
        backward(model, scaler)
        if unscale_first:
            scaler.unscale_(stepping)
        if is_refused:
            with pytest.raises(RuntimeError, match=LONELY):
                scaler.step(stepping)
            scaler = _torchs_scaler(kind)
        else:
            assert step_changes(scaler, stepping)
            scaler.update()


def _torchs_scaler(kind: type[torch.amp.GradScaler], **options: Any) -> torch.amp.GradScaler:
    if issubclass(kind, (torch.cpu.amp.GradScaler, torch.cuda.amp.GradScaler)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and in use everywhere
            return kind(init_scale=1024.0, **options)
    return kind("cpu", init_scale=1024.0, **options)


@parametrize_pairs(
    kind=[torch.amp.GradScaler, OwnScaler, torch.cpu.amp.GradScaler, torch.cuda.amp.GradScaler],
    optimizer=list(OPTIMIZERS),
)
@on_ranks(2)
def test_torchs_scaler_works_where_it_is_disabled(optimizer: str, kind: type[torch.amp.GradScaler]) -> None:
    # As in scripts that scale for float16 and not for bfloat16.
    model, scaler = nested_mlp(fully_sharded()), _torchs_scaler(kind, enabled=False)
    backward(model, scaler)
    assert step_changes(scaler, OPTIMIZERS[optimizer](model.parameters()))


@on_ranks(2)
def test_torchs_scaler_may_step_what_is_not_sharded() -> None:
    nested_mlp(fully_sharded())  # optimizers are watched from now on
    plain = nested_mlp(keep)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(plain, scaler)
    assert step_changes(scaler, sgd_with_momentum(plain.parameters()))
