"""Half of the steps, a checkpoint, and the other half at another number of ranks: as if training had not stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from fsdp import optim_utils
from tests.helpers.equality import assert_same
from tests.helpers.models import Net, Wrap, keep, nested_mlp, tiny_transformer
from tests.helpers.offload import with_folder
from tests.helpers.optimizers import (
    MakeOptimizer,
    adadelta,
    adam,
    assert_within_noise,
    garden,
    grouped_adamw,
    is_bias,
    momentum,
    train,
)
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import REGRESSION, TOKENS, fully_sharded
from tests.helpers.ranks import RankPool

HALF = 2
FORMS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False},
    {"use_orig_params": True},
    {"group_by": is_bias},
    {"offload": "disk"},
]
OPTIMIZERS: list[MakeOptimizer] = [adam, grouped_adamw, momentum, adadelta]


def frozen(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    """Of which a unit is frozen, and a part of another."""

    def freeze(module: nn.Module) -> nn.Module:
        for part in module.modules():
            if isinstance(part, nn.PReLU) or (part is module and isinstance(part, nn.Linear)):  # the gate
                part.requires_grad_(False)
        return wrap(module)

    return nested_mlp(freeze, seed=seed)


def unused_and_three_dtypes(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    """A unit that no forward uses, and parameters of three dtypes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net(
            lambda net, x: net.out(net.used(x * net.fine.float()) * net.thin.float()),
            used=wrap(nn.Linear(5, 3)),
            unused=wrap(nn.Linear(3, 3)),
            thin=nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            fine=nn.Parameter(torch.linspace(0, 1, 5, dtype=torch.float64)),
            out=nn.Linear(3, 1),
        )
        return wrap(net)


def tied(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    return tiny_transformer(wrap, tied=True, seed=seed)


MODELS: list[Callable[..., nn.Module]] = [garden, frozen, unused_and_three_dtypes, tied]


@parametrize_cases(
    at_most=6, saved_by=[2, 1, 3, 4], loaded_by=[3, 1, 2, 4], form=FORMS, make_optimizer=OPTIMIZERS, make_model=MODELS
)
def test_half_of_the_steps_at_another_number_of_ranks(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    (saved, trained), *_ = ranks(case.saved_by).run(
        _train_and_save, tmp_path, case.form, case.make_optimizer, case.make_model
    )
    torch.save((saved, trained), tmp_path / "states.pt")
    is_same = case.saved_by == case.loaded_by
    ranks(case.loaded_by).run(
        _load_and_train, tmp_path, case.form, case.make_optimizer, case.make_model, is_same=is_same
    )


def _made(
    folder: Path,
    form: dict[str, Any],
    make_optimizer: MakeOptimizer,
    make_model: Callable[..., nn.Module],
    *,
    seed: int,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(fully_sharded(**with_folder(form, folder / "offload")), seed=seed)
    return model, make_optimizer(model)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Any]:
    """Collective. All of it on every rank, by another way than checkpoints take."""
    full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    return {name: value.clone() for name, value in model.state_dict().items()}, full


def _train_and_save(folder: Path, *how: Any) -> tuple[Any, Any]:
    """The states at half of the steps, and at the end."""
    task = TOKENS if tied in how else REGRESSION
    model, optimizer = _made(folder, *how, seed=0)
    train(model, optimizer, range(HALF), task=task)
    fsdp.save(folder / "run", model, optimizer)
    saved = _state(model, optimizer)
    train(model, optimizer, range(HALF, 2 * HALF), task=task)
    return saved, _state(model, optimizer)


def _load_and_train(folder: Path, *how: Any, is_same: bool) -> None:
    task = TOKENS if tied in how else REGRESSION
    saved, trained = torch.load(folder / "states.pt", weights_only=True)
    model, optimizer = _made(folder, *how, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = 77.0  # comes with the checkpoint
    fsdp.load(folder / "run", model, optimizer)
    assert_same(_state(model, optimizer), saved)
    train(model, optimizer, range(HALF, 2 * HALF), task=task)
    found = _state(model, optimizer)
    if is_same:
        assert_same(found, trained)
    _, make_optimizer, make_model = how
    assert_within_noise(found[0], trained[0], make_model, make_optimizer, range(2 * HALF), task)
