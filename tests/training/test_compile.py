"""`torch.compile` of blocks, of units, and around everything: what is computed, how many graphs, and where they break.

A backend that counts stands for a compiler. The plain model, prepared in the same way, says how parameters are named;
the plain model as it is says what should be computed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, module_wrap_policy
from tests.helpers.compile_backends import (
    Block,
    Counter,
    Stack,
    call_compile,
    stack,
    torch_compile,
    torchs_own_deprecations,
    user_module,
)
from tests.helpers.equality import assert_close
from tests.helpers.models import Wrap, keep
from tests.helpers.module_kinds import FORMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import from_one_rank, fully_sharded
from tests.helpers.twins import batch, score

PRELOAD = ["torch._inductor.compile_fx"]
STEPS = 2

# Ways to compile. Each returns the model, and what computes its loss.

Loss = Callable[[Tensor], Tensor]


def loss_of(model: Callable[[Tensor], Tensor]) -> Loss:
    return lambda inputs: score(model(inputs))


def eagerly(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    return model, loss_of(model)


def blocks_in_place(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap, partial(call_compile, backend=backend))
    return model, loss_of(model)


def blocks_as_modules(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap, partial(torch_compile, backend=backend, fullgraph=True))
    return model, loss_of(model)


def blocks_in_place_inside_units(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap, lambda block: nn.Sequential(call_compile(block, backend, fullgraph=True)))
    return model, loss_of(model)


def blocks_as_modules_inside_units(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap, lambda block: nn.Sequential(torch_compile(block, backend, fullgraph=True)))
    return model, loss_of(model)


def blocks_inside_one_unit(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model = wrap(Stack(keep, partial(torch_compile, backend=backend, fullgraph=True)))
    return model, loss_of(model)


def wrapped_blocks_in_place(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    for block in user_module(model).blocks:
        block.compile(backend=backend, fullgraph=True)
    return model, loss_of(model)


def blocks_in_wrappers_in_place(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    for block in user_module(model).blocks:
        user_module(block).compile(backend=backend, fullgraph=True)
    return model, loss_of(model)


def wrapped_blocks_as_modules(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    blocks = user_module(model).blocks
    for number, block in enumerate(blocks):
        blocks[number] = torch_compile(block, backend)
    return model, loss_of(model)


def root_in_place(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = call_compile(stack(wrap), backend)
    return model, loss_of(model)


def root_in_place_before(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model = wrap(call_compile(Stack(wrap), backend))
    return model, loss_of(model)


def root_as_module(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    return model, loss_of(torch_compile(model, backend))


def loss_function(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    return model, torch.compile(loss_of(model), backend=backend)


def a_method(wrap: Wrap, backend: Any) -> tuple[nn.Module, Loss]:
    model = stack(wrap)
    return model, loss_of(torch.compile(model.forward, backend=backend))


Way = Callable[[Wrap, Any], tuple[nn.Module, Loss]]

# In these, a compiler is given blocks. Most ask for an error where it cannot make one graph of a block.
OF_BLOCKS: list[Way] = [
    blocks_in_place,
    blocks_as_modules,
    blocks_in_place_inside_units,
    blocks_as_modules_inside_units,
    blocks_inside_one_unit,
    wrapped_blocks_in_place,
    blocks_in_wrappers_in_place,
]
# In these, it meets the borders of units on its way.
ACROSS_UNITS: list[Way] = [
    wrapped_blocks_as_modules,
    root_in_place,
    root_in_place_before,
    root_as_module,
    loss_function,
    a_method,
]


# Training


@dataclass
class Trained:
    losses: list[float]  # of the global batch, each step's, and at last one in evaluation
    weights: dict[str, Tensor]
    names: list[str]  # of parameters
    graphs: list[int]  # how many there were after each step, and after two evaluations
    breaks: list[int]


def train(way: Way, wrap: Wrap, parts: list[int], backend: Counter) -> Trained:
    """Train on these ranks' batches, the one rank's own or all ranks' one after the other."""
    model, loss_of_batch = way(wrap, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = Trained([], {}, [name for name, _ in model.named_parameters()], [], [])

    def record(loss: float) -> None:
        found.losses.append(loss)
        found.graphs.append(len(backend.sizes))
        found.breaks.append(sum(counters["graph_break"].values()))

    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for part in parts:
            loss = loss_of_batch(batch(step, part)) / len(parts)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        record(sum(losses))
    model.eval()
    for step in range(2):
        with torch.no_grad():
            record(sum(loss_of_batch(batch(step, part)).item() / len(parts) for part in parts))
    found.weights = model.state_dict()
    return found


def train_sharded(way: Way, options: dict[str, Any], backend: Counter) -> Trained:
    """Collective."""
    found = train(way, fully_sharded(**options), [dist.get_rank()], backend)
    losses = torch.tensor(found.losses)
    dist.all_reduce(losses)
    found.losses = (losses / dist.get_world_size()).tolist()
    return found


@cache
def train_plain(world_size: int) -> Trained:
    """Once in each process, for all ways to compile the sharded one."""
    return train(eagerly, keep, list(range(world_size)), Counter("eager"))


def assert_close_trainings(found: Trained, expected: Trained) -> None:
    assert_close(found.losses, expected.losses, rtol=1e-11, atol=1e-13)
    assert_close(list(found.weights.values()), list(expected.weights.values()), rtol=1e-11, atol=1e-13)


@parametrize_cases(at_most=7, way=OF_BLOCKS, options=FORMS, world_size=[1, 2], reshard_after_forward=[True, False])
@on_ranks("world_size")
def test_compiled_blocks_train_as_the_plain_model_in_one_graph_without_a_break(case: Case) -> None:
    options = case.options | {"reshard_after_forward": case.reshard_after_forward}
    backend = _train_all(case.way, options, "aot_eager")
    assert backend.breaks == []
    # All blocks are calls of one graph, as they are of the plain model; evaluation has its own.
    assert backend.sizes == [Block.OPERATIONS] * 2


# The graphs of blocks are those of the test above, and are run as they were traced.
@parametrize_pairs(at_most=6, way=ACROSS_UNITS, world_size=[2, 1], options=FORMS[:2])
@on_ranks("world_size")
def test_what_is_compiled_across_units_trains_as_the_plain_model_and_breaks_at_their_borders(
    way: Way, options: dict[str, Any]
) -> None:
    backend = _train_all(way, options, "eager")
    assert backend.breaks
    assert all("ForwardHooks." in reason for reason in backend.breaks)
    assert backend.sizes.count(Block.OPERATIONS) == 2  # a whole block, in training and in evaluation


def _train_all(way: Way, options: dict[str, Any], inner: str) -> Counter:
    torch.set_default_dtype(torch.float64)
    plain, _ = way(keep, "eager")  # compiled by a call, which it does not get
    expected = from_one_rank(partial(train_plain, dist.get_world_size()))
    found = train_sharded(way, options, backend := Counter(inner))
    assert_close_trainings(found, expected)
    assert list(found.weights) == list(plain.state_dict())
    if options.keys() & {"use_orig_params", "flatten_parameters"}:
        assert sorted(found.names) == sorted(name for name, _ in plain.named_parameters())
    # Nothing is compiled again, neither by later steps nor by a second evaluation.
    assert len(set(found.graphs[:STEPS])) == len(set(found.graphs[STEPS:])) == 1
    assert len(set(found.breaks[:STEPS])) == 1
    return backend


# Graphs


@on_ranks(1)
def test_blocks_of_other_shapes_take_a_graph_each() -> None:
    for wrap in (keep, *(fully_sharded(**options) for options in FORMS)):
        backend = Counter("eager")
        model = stack(wrap, partial(call_compile, backend=backend, fullgraph=True), hidden=(3, 9, 5))
        for step in range(2):
            score(model(batch(step, 0).float())).backward()
        assert backend.sizes == [Block.OPERATIONS] * 3, wrap


@on_ranks(2)
def test_auto_wrap_finds_blocks_in_compiled_modules() -> None:
    backend = Counter("eager")
    torch.manual_seed(0)
    plain = Stack(keep, partial(torch_compile, backend=backend, fullgraph=True))
    names, expected = list(plain.state_dict()), plain(batch(0, 0).float())
    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        model = FullyShardedDataParallel(auto_wrap(plain, module_wrap_policy({Block})))
    assert [type(block._orig_mod) for block in model.blocks] == [FullyShardedDataParallel] * 3
    assert torch.equal(model(batch(0, 0).float()), expected)
    assert list(model.state_dict()) == names
    assert backend.breaks == []


# A real compiler


@torchs_own_deprecations
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
@on_ranks(2, timeout=120)
def test_blocks_compiled_by_inductor_train(tmp_path: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # which ranks share, so that each kernel is built once
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # To compile headers beforehand and to try vector instructions takes longer than two kernels.
    with inductor.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        _compare_with_inductor()


def _compare_with_inductor() -> None:
    states, backend = [], Counter("inductor")
    for prepare in (keep, partial(call_compile, backend=backend, fullgraph=True)):
        model = _small_stack(fully_sharded(), prepare)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            score(model(batch(step, dist.get_rank()).float())).backward()
            optimizer.step()
        states.append(list(model.state_dict().values()))
    torch.testing.assert_close(*states)
    assert backend.sizes == [2]


class SmallBlock(nn.Module):
    """Of two kernels, each of which the compiler takes seconds for; a bias would be a third."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.inner(inputs))


def _small_stack(wrap: Wrap, prepare: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), *(wrap(prepare(SmallBlock())) for _ in range(2))))
