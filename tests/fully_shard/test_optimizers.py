"""torch's optimizers on the `DTensor`s of `fully_shard`: equal to the unsharded model, or an error before the step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.dtensor_twins import whole
from tests.helpers.on_ranks import on_ranks

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
INPUTS = torch.linspace(-1, 1, 12).view(2, 6)


def net(hidden: int, out: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, out))


def steps(model: nn.Module, optimizer: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(INPUTS).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [whole(param) for param in model.parameters()]


def fused_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)


def fused_adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.01, fused=True)


def rprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop(params, lr=0.01)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.01)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.01)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fused_sgd, "SGD with fused=True has no implementation for DTensors: omit fused=True"),
        (fused_adagrad, "Adagrad with fused=True has no implementation for DTensors: omit fused=True"),
        (rprop, r"Rprop selects elements by masks.*fsdp.OwnedOptimizer step each rank's rows"),
        (adafactor, "Adafactor combines rows and columns in place.*use fsdp.OwnedOptimizer"),
        (muon, r"Muon steps matrices in place.*2.weight, of 1 row on \d ranks,.*use fsdp.OwnedOptimizer"),
        (lbfgs, "LBFGS concatenates parameters.*0.weight"),
    ],
)
@on_ranks(2, 3)
def test_what_dtensors_do_not_support_is_an_error_before_the_step(make: MakeOptimizer, message: str) -> None:
    model = net(7, 1 if make is muon else 5)
    fsdp.fully_shard(model)
    optimizer = make(model.parameters())
    before = [value.clone() for value in weights(model)]
    with pytest.raises(RuntimeError, match=message):
        steps(model, optimizer)
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe"}])
@on_ranks(2)
def test_lbfgs_searches_by_the_mean_of_the_losses_of_all_ranks(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 4, 4, dtype=torch.float64)
    plain = net(8, 4).double()
    model = fsdp.fully_shard(copy.deepcopy(plain))
    calls = []
    for each, ranks in ((plain, [0, 1]), (model, [dist.get_rank()])):
        optimizer = torch.optim.LBFGS(each.parameters(), max_iter=9, **options)
        calls.append(0)

        def closure(each: nn.Module = each, ranks: list[int] = ranks, optimizer: Any = optimizer) -> torch.Tensor:
            calls[-1] += 1
            optimizer.zero_grad()
            loss = (each(inputs[ranks]) - targets[ranks]).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert calls[0] == calls[1]
    for found, expected in zip(weights(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach())


@on_ranks(2)
def test_complex_vectors_that_torch_would_not_step_are_an_error_and_others_are_stepped() -> None:
    for features, is_lost in ((3, True), (4, False)):
        torch.manual_seed(0)
        plain = nn.Linear(5, features, dtype=torch.complex64)
        model = fsdp.fully_shard(copy.deepcopy(plain))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
        for each in (plain, model):
            each(torch.ones(2, 5, dtype=torch.complex64)).abs().square().mean().backward()
        optimizers[0].step()
        if is_lost:
            with pytest.raises(
                RuntimeError,
                match=r"AdamW steps complex numbers as pairs.*writes to those of the DTensor bias are lost",
            ):
                optimizers[1].step()
            continue
        optimizers[1].step()
        for found, expected in zip(weights(model), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach())


@on_ranks(2, 3)
def test_muon_steps_whole_matrices_without_a_warning() -> None:
    plain, model = net(7, 5), net(7, 5)
    fsdp.fully_shard(model)
    steps(plain, muon(plain.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, muon(model.parameters()))
    for found, expected in zip(weights(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0.01)  # it rounds to bfloat16


ELEMENTWISE: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
}


@on_ranks(3)
def test_optimizers_that_work_element_by_element_are_as_without_sharding() -> None:
    for kind, make in ELEMENTWISE.items():
        plain = net(7, 5)
        steps(plain, make(plain.parameters()))
        model = net(7, 5)
        fsdp.fully_shard(model)
        steps(model, make(model.parameters()))
        for found, expected in zip(weights(model), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6, msg=kind)


@on_ranks(3)
def test_rows_are_stepped_by_the_owned_optimizer_that_the_error_names() -> None:
    plain = net(7, 5)
    steps(plain, rprop(plain.parameters()))
    model = net(7, 5)
    fsdp.fully_shard(model)
    steps(model, fsdp.OwnedOptimizer(model, [{"optimizer": torch.optim.Rprop, "sharded": True, "lr": 0.01}]))
    for found, expected in zip(weights(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2, 3)
def test_adafactor_leaves_original_parameters_out_that_are_empty_on_a_rank(foreach: bool) -> None:
    model = FullyShardedDataParallel(net(7, 5), use_orig_params=True)
    before = model.state_dict()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01, foreach=foreach)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps(model, optimizer)
    assert any("Adafactor needs the rows, columns or norms" in str(each.message) for each in told)
    after = model.state_dict()
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    assert all(value.isfinite().all() for value in after.values())
