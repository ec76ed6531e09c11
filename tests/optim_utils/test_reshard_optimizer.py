"""An optimizer that was made before wrapping is handed over, and goes on as if nothing had happened.

Twins are in float64, so that nothing is hidden by rounding and AdamW does not blow noise up: one model is trained for
ten steps plain, the other one is wrapped after three. What is refused is in test_reshard_optimizer_errors.py.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardedGradScaler, auto_wrap, enable_wrap, module_wrap_policy, wrap
from fsdp.layers.listed_shards import params_of
from fsdp.layers.offload import DiskStorage
from tests.helpers.copied_twins import FLAT, ORIGINAL, UNFLATTENED, every_form
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Block, NestedMlp, Net, keep, nested_mlp, tiny_transformer
from tests.helpers.offload import on
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import stepped
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import REGRESSION, TOKENS, Task, alone, every_rank, fully_sharded
from tests.helpers.ranks import RankPool

EARLY, ALL = 3, 10  # steps before wrapping, and of all

Losses = list[float]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

KINDS = [FLAT, ORIGINAL, UNFLATTENED]


# Optimizers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, **how)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, fused=True)


def foreach_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, foreach=True, amsgrad=True)


def decay_matrices_only(model: nn.Module) -> torch.optim.Optimizer:
    """No weight decay on biases and scales, and a rate of its own for the entry, each with its name."""
    entry = [(name, p) for name, p in model.named_parameters() if name.startswith("entry")]
    spared = [(name, p) for name, p in model.named_parameters() if not name.startswith("entry") and p.dim() < 2]
    decayed = [(name, p) for name, p in model.named_parameters() if not name.startswith("entry") and p.dim() > 1]
    groups = [{"params": spared, "weight_decay": 0.0}, {"params": decayed}, {"params": entry, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3)


# Wrapping what is there already


def as_one(model: nn.Module, **options: Any) -> nn.Module:
    return fully_sharded(**options)(model)


def in_units(model: nn.Module, **options: Any) -> nn.Module:
    """The units of `nested_mlp`."""
    wrapped = fully_sharded(**options)
    assert isinstance(model, NestedMlp)
    assert isinstance(model.trunk, nn.Sequential)
    model.trunk[2] = wrapped(model.trunk[2])
    model.trunk, model.gate = wrapped(model.trunk), wrapped(model.gate)
    return wrapped(model)


def by_auto_wrap(model: nn.Module, **options: Any) -> nn.Module:
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
        return wrap(auto_wrap(model, module_wrap_policy({Block})))


tied_transformer = partial(tiny_transformer, tied=True)
MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module], Task]] = {
    "one unit": (nested_mlp, as_one, REGRESSION),
    "nested units": (nested_mlp, in_units, REGRESSION),
    "auto_wrap": (tied_transformer, by_auto_wrap, TOKENS),
}


# Training


class Twin:
    """A model in training with an optimizer, and with a scheduler and a scaler if there are any."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        task: Task = REGRESSION,
        make_scheduler: MakeScheduler | None = None,
        **scaling: Any,
    ) -> None:
        self.model, self.optimizer, self.task = model, make_optimizer(model), task
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.scaler = ShardedGradScaler(device="cpu", enabled=bool(scaling), **scaling)
        self.losses: Losses = []  # of this rank's part of the batches

    def train(self, steps: Sequence[int], *, sharded: bool = False) -> None:
        for number in steps:
            inputs, targets = self.task.batch(torch.Generator().manual_seed(number), 4 * dist.get_world_size())
            if sharded:
                inputs, targets = every_rank(inputs, targets)[dist.get_rank()]
            inputs = inputs.double() if inputs.is_floating_point() else inputs
            targets = targets.double() if targets.is_floating_point() else targets
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scheduler is not None:
                self.scheduler.step()
            self.losses.append(loss.item())

    def hand_over(self, wrapped: nn.Module) -> None:
        self.model = wrapped
        assert isinstance(wrapped, FullyShardedDataParallel)
        wrapped.reshard_optimizer(self.optimizer)


def assert_goes_on(
    make_optimizer: MakeOptimizer, options: dict[str, Any], models: str = "nested units", **how: Any
) -> tuple[Twin, Twin]:
    """Collective. Wrapped after three steps and handed over, a model trains as the plain one; returns both."""
    torch.set_default_dtype(torch.float64)
    make_model, wrapped, task = MODELS[models]
    late, plain = (Twin(make_model(keep), make_optimizer, task, **how) for _ in range(2))
    plain.train(range(ALL))
    late.train(range(EARLY))
    late.hand_over(wrapped(late.model, **options))
    late.train(range(EARLY, ALL), sharded=True)
    losses = torch.tensor(late.losses)
    dist.all_reduce(losses)
    assert_close(losses / dist.get_world_size(), torch.tensor(plain.losses), "losses")
    assert_close_state(late.model.state_dict(), plain.model.state_dict())
    return late, plain


@parametrize_cases(
    at_most=6,
    world_size=[3, 2, 1],
    make_optimizer=[sgd, adamw, fused_adamw, foreach_adamw],
    options=KINDS,
    models=list(MODELS),
)
def test_pain_point_21_an_optimizer_made_before_wrapping_goes_on_where_it_was(
    ranks: RankPool, world_size: int, case: Case
) -> None:
    ranks(world_size).run(_go_on, case.make_optimizer, case.options, case.models)


def _go_on(make_optimizer: MakeOptimizer, options: dict[str, Any], models: str) -> None:
    assert_goes_on(make_optimizer, options, models)


OTHERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 2, "lr": 0.05}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
]


def other(cls: type[torch.optim.Optimizer], arguments: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    return cls(model.parameters(), **arguments)  # type: ignore[call-arg]


@pytest.mark.parametrize(("cls", "arguments"), OTHERS)
def test_every_optimizer_that_treats_elements_alike_goes_on(
    ranks: RankPool, cls: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    for options in (FLAT, ORIGINAL):
        ranks(2).run(_go_on, partial(other, cls, arguments), options, "nested units")


@pytest.mark.parametrize("options", [ORIGINAL, UNFLATTENED], ids=["original", "unflattened"])
@on_ranks(2)
def test_groups_keep_their_order_their_options_and_their_names(options: dict[str, Any]) -> None:
    late, plain = assert_goes_on(decay_matrices_only, options)
    for found, expected in zip(late.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert {**found, "params": None} == {**expected, "params": None}
        assert "param_names" in found
        sharded = dict(late.model.named_parameters())
        assert [id(sharded[name]) for name in found["param_names"]] == [id(param) for param in found["params"]]


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """It changes the rate and beta1 of all groups in every step, the rate from 4e-4 up to 1e-2 and down to 4e-8."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=ALL + 1)


@on_ranks(2)
def test_a_learning_rate_scheduler_made_before_wrapping_keeps_its_hold() -> None:
    late, plain = assert_goes_on(adamw, FLAT, make_scheduler=one_cycle)
    rates = [twin.optimizer.param_groups[0]["lr"] for twin in (late, plain)]
    assert rates[0] == rates[1] < 1e-4


@every_form
def test_a_scaler_of_the_loss_goes_on_with_it(ranks: RankPool, options: dict[str, Any]) -> None:
    for make_optimizer in (sgd, fused_adamw):
        ranks(2).run(_go_on_scaled, make_optimizer, options)


def _go_on_scaled(make_optimizer: MakeOptimizer, options: dict[str, Any]) -> None:
    late, plain = assert_goes_on(make_optimizer, options, init_scale=2.0**8, growth_interval=2)
    assert late.scaler.get_scale() == plain.scaler.get_scale() == 2.0**13


# Where state is


@parametrize_cases(
    options=KINDS, offload=["cpu", "disk"], machine=["accelerated", "of CPUs only"], make_optimizer=[sgd, fused_adamw]
)
@on_ranks(2)
def test_offloaded_shards_go_on(tmp_path: Path, case: Case) -> None:
    folder = {"offload_folder": tmp_path} if case.offload == "disk" else {}
    with on(case.machine):
        assert_goes_on(case.make_optimizer, {**case.options, "offload": case.offload, **folder})


@every_form
def test_state_of_shards_on_disk_is_there_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer = stepped(adamw)
    wrapped = alone(model, offload="disk", offload_folder=tmp_path, **options)
    wrapped.reshard_optimizer(optimizer)
    tensors = [(p, state[key]) for p, state in optimizer.state.items() for key in ("exp_avg", "exp_avg_sq")]
    assert len(tensors) == 2 * len(wrapped.params)
    for param, value in tensors:
        assert isinstance(param.shard_storage, DiskStorage)
        assert param.shard_storage.files.holds(value)


@every_form
def test_a_rank_has_its_part_of_the_state_only(ranks: RankPool, options: dict[str, Any]) -> None:
    whole = sum(param.numel() for param in nested_mlp().parameters())
    numels = ranks(3).run(_state_numel, options)
    padding = 3 * 2 * len(list(nested_mlp().parameters()))  # less than a world size for each parameter at most
    assert 2 * whole <= sum(numels) <= 2 * whole + padding
    assert max(numels) < whole


def _state_numel(options: dict[str, Any]) -> int:
    model, optimizer = stepped(adamw)
    as_one(model, **options).reshard_optimizer(optimizer)  # type: ignore[operator]
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in tensors)


@every_form
def test_originals_and_their_state_are_let_go(options: dict[str, Any]) -> None:
    model, optimizer = stepped(adamw)
    held: list[Tensor] = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]
    alive = [weakref.ref(tensor) for tensor in held]
    held.clear()
    wrapped = alone(model, **options)
    assert any(reference() is not None for reference in alive)  # by the optimizer
    wrapped.reshard_optimizer(optimizer)
    assert [reference() for reference in alive] == [None] * len(alive)


def test_a_dropped_model_is_freed_while_an_optimizer_holds_its_originals() -> None:
    model, optimizer = stepped(adamw)
    wrapped = alone(model)
    alive = [weakref.ref(each) for each in (wrapped, *wrapped.params)]
    del model, wrapped
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert optimizer.state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@every_form
def test_state_keeps_its_dtype(options: dict[str, Any], dtype: torch.dtype) -> None:
    model, optimizer = stepped(sgd)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    assert {optimizer.state[param]["momentum_buffer"].dtype for param in wrapped.params} == {dtype}


@pytest.mark.parametrize("value", [None, True, 3, 0.5, torch.tensor(3, dtype=torch.int64)])
@every_form
def test_a_number_or_nothing_is_kept(options: dict[str, Any], value: Any) -> None:
    model, optimizer = stepped(sgd)
    for state in optimizer.state.values():
        state["extra"] = value
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    assert all(optimizer.state[param]["extra"] is value for param in wrapped.params)


# Parameters without dimensions, whose state looks like a number


def temperature() -> nn.Module:
    """Nothing but a scalar beside a layer that another optimizer has."""
    return Net(
        lambda net, x: net.layer(x) * net.log.exp(),
        layer=nn.Linear(5, 1),
        log=nn.Parameter(torch.tensor(math.log(2.0))),
    )


def only_the_scalar(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam([model.log], lr=1e-2)  # type: ignore[list-item]


@parametrize_pairs(world_size=[1, 2], options=[ORIGINAL, UNFLATTENED])
@on_ranks("world_size")
def test_an_optimizer_of_nothing_but_a_scalar(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    late, plain = (Twin(temperature(), only_the_scalar) for _ in range(2))
    plain.model.load_state_dict(late.model.state_dict())
    plain.train(range(ALL))
    late.train(range(EARLY))
    late.hand_over(as_one(late.model, **options))
    late.train(range(EARLY, ALL), sharded=True)
    (state,) = late.optimizer.state.values()
    keeps_shape = options == UNFLATTENED and dist.get_world_size() == 1
    dims = [state[key].dim() for key in ("step", "mu_product", "exp_avg", "exp_avg_sq")]
    assert dims == ([0, 0, 0, 0] if keeps_shape else [0, 0, 1, 1])
    assert_close(late.model.state_dict()["log"], plain.model.state_dict()["log"], "log")


class Decaying(torch.optim.SGD):
    """Keeps for each parameter a factor of its own making."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            self.state[param]["factor"] = torch.tensor(0.5)
        return super().step(closure)


def test_what_is_a_number_for_other_parameters_is_one_for_a_scalar_too() -> None:
    model, optimizer = stepped(lambda model: Decaying(model.parameters()))
    alone(model).reshard_optimizer(optimizer)
    (state,) = optimizer.state.values()
    assert {key: value.dim() for key, value in state.items()} == {"factor": 0, "momentum_buffer": 1}
