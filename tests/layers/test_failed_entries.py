"""Every context of ours that fails while it is entered leaves everything as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import FlattenParamsWrapper, FullyShardedDataParallel, MixedPrecision
from tests.helpers.failing_calls import assert_failures_leave_nothing
from tests.helpers.ranks import RankPool


class Net(nn.Module):
    """Two units, buffers, a batch norm, a tied weight."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first = wrap(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.third(self.second(self.first(inputs)))
        return hidden * self.scale.sum()  # type: ignore[operator]


POLICY = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def flat(model: Callable[..., nn.Module], **options: Any) -> Any:
    wrap = partial(FullyShardedDataParallel, mixed_precision=POLICY, **options)
    return wrap(model(wrap))


def rows(model: Callable[..., nn.Module]) -> Any:
    return fsdp.fully_shard(model(fsdp.fully_shard))


def flattened(model: Callable[..., nn.Module]) -> Any:
    return FlattenParamsWrapper(model(lambda module: module))


FORMS = {"flat": flat, "orig": partial(flat, use_orig_params=True), "rows": rows, "flattened": flattened}


class Case(NamedTuple):
    """A context, the forms of models that it is for, and whether all ranks do the same in it."""

    enter: Callable[[Any], AbstractContextManager[Any]]
    forms: Sequence[str] = ("flat", "orig", "rows")
    is_alike: bool = True


def summon(**form: Any) -> Case:
    return Case(lambda model: model.summon_full_params(**form), ("flat", "orig"), not form.get("rank0_only"))


def call(function: Callable[[Any], Any], forms: Sequence[str] = ("flat", "orig", "rows")) -> Case:
    """A function instead of a context: it fails as well, and has no inside."""

    @contextmanager
    def called(model: Any) -> Iterator[None]:
        function(model)
        yield

    return Case(called, forms)


def load_own_state(model: Any) -> None:
    model.load_state_dict(_states.setdefault(model, model.state_dict()))


def load_own_shards(model: Any) -> None:
    model.load_sharded_state_dict(model.sharded_state_dict())


def record(model: Any) -> AbstractContextManager[Any]:
    return fsdp.record_fingerprints(model, os.devnull)


def average(model: Any) -> AbstractContextManager[Any]:
    if model not in _averages:
        _averages[model] = fsdp.EMA(model, decay=0.5)
    return _averages[model].applied_to(model)


# Of each model.
_optimizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_averages: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_states: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

CASES: dict[str, Case] = {
    "summon with_grads": summon(with_grads=True),
    "summon volatile offload_to_cpu": summon(volatile=True, offload_to_cpu=True),
    "summon rank0_only": summon(rank0_only=True, with_grads=True),
    "summon_shapes": Case(lambda model: model.summon_shapes(), ("flat", "orig")),
    "no_sync": Case(lambda model: model.no_sync(), ("flat", "orig")),
    "state_dict": call(lambda model: model.state_dict(), ("flat", "orig")),
    "sharded_state_dict": call(lambda model: model.sharded_state_dict(), ("flat", "orig")),
    "local_state_dict": call(lambda model: model.local_state_dict(), ("flat", "orig")),
    "load_state_dict": call(load_own_state),
    "load_sharded_state_dict": call(load_own_shards, ("flat", "orig")),
    "join": Case(lambda model: fsdp.join(model, _optimizers[model]), ("flat", "orig")),
    "trace": Case(fsdp.trace),
    "record_fingerprints": Case(record, is_alike=False),
    "detect_nonfinite": Case(fsdp.detect_nonfinite),
    "EMA.applied_to": Case(average),
    "unflatten_params": Case(lambda model: model.unflatten_params(), ("flattened",)),
    "enable_wrap": Case(lambda model: fsdp.enable_wrap(wrapper_cls=FullyShardedDataParallel), ("flat",)),
    "disable_checkpointing": Case(lambda model: fsdp.disable_checkpointing(), ("flat",)),
    "no_pre_load_state_dict_hook": Case(lambda model: fsdp.no_pre_load_state_dict_hook(), ("flat",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_context_that_fails_while_it_is_entered_leaves_nothing(ranks: RankPool, name: str) -> None:
    # Ranks that do different things cannot fail at the same place. Gradients may be in the middle of three ranks.
    world_size = 3 if name == "summon with_grads" else 2
    ranks(world_size if CASES[name].is_alike else 1).run(_fail, name, CASES[name].forms)


def _fail(name: str, forms: Sequence[str]) -> None:
    """Collective. A function that has failed with original parameters fails no more with flat ones."""
    done: list[str] = []
    for form in sorted(forms, key=lambda form: form == "flat"):
        torch.manual_seed(0)
        model = FORMS[form](Net)
        _optimizers[model] = torch.optim.SGD(model.parameters(), lr=0.1)
        _step(model)
        enter, things = partial(CASES[name].enter, model), (model, _optimizers[model])
        places = assert_failures_leave_nothing(enter, *things, besides=done if form == "flat" else ())
        assert places or done
        done = places if form == "orig" else done
        _step(model)


def _step(model: Any) -> None:
    model(torch.ones(4, 5)).float().sum().backward()
    _optimizers[model].step()
