"""Compiled blocks beside other features, and what a compiler must not hide."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    OwnedOptimizer,
    SameBits,
    ShardedGradScaler,
    ShardingStrategy,
    checkpoint_wrapper,
)
from fsdp.engine.runtime import runtimes
from fsdp.layers import optimizer_hooks, same_bits, torch_functions
from tests.helpers.compile_backends import (
    Block,
    Counter,
    call_compile,
    stack,
    torch_compile,
    torchs_own_deprecations,
    user_module,
)
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import FORMS, full_state, sharded
from tests.helpers.models import Wrap, keep
from tests.helpers.module_kinds import FORMS as OPTIONS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import batch, score

PRELOAD = ["torch._inductor.compile_fx"]


# Whole steps


Step = Callable[[Tensor], None]


def clipped(model: Any) -> Step:
    optimizer = sgd_with_momentum(model.parameters())

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        score(model(inputs)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    return step


def accumulated(model: Any) -> Step:
    optimizer = sgd_with_momentum(model.parameters())

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            score(model(inputs)).backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                score(model(inputs)).backward()
        score(model(inputs + 1)).backward()
        optimizer.step()

    return step


def owned(model: Any) -> Step:
    optimizer = OwnedOptimizer(model, [{"optimizer": sgd_with_momentum}])

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        score(model(inputs)).backward()
        optimizer.step()

    return step


def scaled(model: Any) -> Step:
    optimizer, scaler = sgd_with_momentum(model.parameters()), ShardedGradScaler(init_scale=4.0, device="cpu")

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(score(model(inputs))).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def read(model: Any) -> Step:
    """With what reads unsharded values between steps."""
    optimizer = sgd_with_momentum(model.parameters())

    def step(inputs: Tensor) -> None:
        model.state_dict()
        if isinstance(model, FSDPModule):
            model.unshard()
            model.reshard()
        else:
            with model.summon_full_params():
                pass
        optimizer.zero_grad()
        score(model(inputs)).backward()
        optimizer.step()

    return step


STEPS: dict[str, Callable[[Any], Step]] = {
    "clipped": clipped,
    "accumulated": accumulated,
    "owned": owned,
    "scaled": scaled,
    "read": read,
}


# With other features: as without a compiler, to the bit, since "aot_eager" computes the same operations


class Normed(nn.Module):
    """With a batch norm, which mixed precision leaves in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.norm, self.narrow = nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.narrow(self.norm(self.widen(inputs)).relu())


def normed(wrap: Wrap, prepare: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(*(wrap(prepare(Normed())) for _ in range(2))))


BESIDE: dict[str, dict[str, Any]] = {
    "mixed precision": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "full precision": {},
    "offload": {"offload": "cpu"},
    "both": {"mixed_precision": True, "compute_dtype": torch.bfloat16, "offload": "cpu"},
}


def checkpoint_of_compiled(block: nn.Module, backend: Any) -> nn.Module:
    return checkpoint_wrapper(torch_compile(block, backend, fullgraph=True))


def compiled_checkpoint(block: nn.Module, backend: Any) -> nn.Module:
    return call_compile(checkpoint_wrapper(block), backend, fullgraph=True)


@parametrize_pairs(
    at_most=4,
    world_size=[2, 1],
    beside=list(BESIDE),
    options=[*OPTIONS, {"reshard_after_forward": False}],
    prepare=[partial(call_compile, fullgraph=True), torch_compile, checkpoint_of_compiled, compiled_checkpoint],
    no_sync=[False, True],
)
@on_ranks("world_size")
def test_other_features_go_on_working(beside: str, options: dict[str, Any], prepare: Any, no_sync: bool) -> None:
    if prepare is compiled_checkpoint and "mixed_precision" in BESIDE[beside]:
        prepare = checkpoint_of_compiled  # the other has a test of its own
    backend = Counter()
    states = [
        _accumulate(BESIDE[beside] | options, prepare, no_sync) for prepare in (keep, partial(prepare, backend=backend))
    ]
    expected, found = (list(state.values()) for state in states)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert backend.breaks == []
    assert len(backend.sizes) == 2  # one more for the first block, whose inputs require no gradient


def _accumulate(options: dict[str, Any], prepare: Wrap, no_sync: bool) -> dict[str, Tensor]:
    model = normed(fully_sharded(**options), prepare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        with model.no_sync() if no_sync else nullcontext():  # type: ignore[operator]
            score(model(batch(2 * step, dist.get_rank()).float()).float()).backward()
        score(model(batch(2 * step + 1, dist.get_rank()).float()).float()).backward()
        optimizer.step()
    return dict(model.state_dict())


@on_ranks(2)
def test_a_checkpoint_around_a_batch_norm_in_full_precision_stays_uncompiled_but_right() -> None:
    backend = Counter()
    prepares: list[Wrap] = [keep, lambda block: call_compile(checkpoint_wrapper(block), backend)]
    expected, found = (list(_accumulate(BESIDE["mixed precision"], each, False).values()) for each in prepares)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert backend.breaks  # what an error with fullgraph=True is about
    assert len(backend.sizes) <= 2


class Broken(nn.Module):
    """With a graph break of its own, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(7, 7), nn.BatchNorm1d(7)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs)
        torch._dynamo.graph_break()
        return self.norm(hidden)


def test_a_graph_break_in_a_checkpoint_neither_compiles_for_every_call_nor_counts_statistics_twice() -> None:
    backend = Counter("eager")
    expected, found = Broken(), checkpoint_wrapper(Broken())
    found.load_state_dict(expected.state_dict())
    compiled = torch.compile(found, backend=backend)
    for step in range(4):
        for model in (expected, compiled):
            score(model(torch.linspace(-1, step, 28).view(4, 7))).backward()
    pairs = zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert len(backend.sizes) <= 2


@on_ranks(2)
def test_a_compiled_block_computes_inside_summon_full_params() -> None:
    backend = Counter("eager")
    model = stack(fully_sharded(), partial(call_compile, backend=backend, fullgraph=True))
    inputs, graphs = batch(0, 0).float(), []
    for _ in range(3):
        with torch.no_grad():
            expected = model(inputs)
            with model.summon_full_params():  # type: ignore[operator]
                assert torch.equal(model(inputs), expected)
        score(model(inputs)).backward()
        graphs.append(len(backend.sizes))
    assert graphs == [3, 3, 3]  # without gradients, summoned, and in training: no more by doing it again


@torchs_own_deprecations
def test_a_compiled_optimizer_steps_shards(ranks: RankPool) -> None:
    # A graph of AdamW would take many seconds to make.
    ranks(2).run(_step_compiled, {})
    ranks(2).run(_step_compiled, {"use_orig_params": True})


def _step_compiled(options: dict[str, Any]) -> None:
    states = []
    for backend in (None, Counter("eager")):
        # One small unit is enough: each parameter has a part of the optimizer's graph.
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(5, 3), **options)
        optimizer = sgd_with_momentum(model.parameters())
        step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
        for number in range(3):  # the first step makes the momenta, and the second one another graph
            optimizer.zero_grad()
            score(model(batch(number, dist.get_rank()).float())).backward()
            step()
        states.append(list(model.state_dict().values()))
    torch.testing.assert_close(*states)


@torchs_own_deprecations
@parametrize_pairs(at_most=5, form=FORMS, kind=list(STEPS), world_size=[2, 1])
@on_ranks("world_size")
def test_a_compiled_function_contains_the_whole_step(form: str, kind: str) -> None:
    """Backward calls hooks, which move data, from the frame of the function."""
    make, states = STEPS[kind], []
    for backend in (None, Counter("eager")):
        model = sharded(stack(keep, hidden=(13, 3)), form, (Block,))
        step = make(model)
        compiled = step if backend is None else torch.compile(step, backend=backend)
        for number in range(2):
            compiled(batch(number, dist.get_rank()).float())
        states.append(full_state(model))
    assert_close_state(*states, rtol=1e-5, atol=1e-7)  # torch 2.11 rounds compiled steps in another way


@torchs_own_deprecations
@on_ranks(1)
def test_what_looks_at_all_models_is_not_compiled() -> None:
    """Torch 2.14 has failed to trace it, and a thread that imported a module at the same time broke a trace."""
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    optimizer = sgd_with_momentum(model.parameters())
    score(model(batch(0, 0).float())).backward()
    compiled = []

    def seen_runtimes() -> list[Any]:
        compiled.append(torch.compiler.is_compiling())
        return runtimes()

    def clip_and_step() -> None:
        nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    in_clip = mock.patch.object(torch_functions, "runtimes", seen_runtimes)
    with in_clip, mock.patch.object(optimizer_hooks, "runtimes", seen_runtimes):
        torch.compile(clip_and_step, backend="eager")()
    assert len(compiled) > 3
    assert not any(compiled)


@torchs_own_deprecations
@on_ranks(1)
def test_what_same_bits_asks_of_a_compiled_step_is_not_compiled() -> None:
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    bits, optimizer = SameBits(model, micro_batches=1), torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for number in bits.step(0):
        score(model(batch(number, 0).float())).backward()
    compiled = []

    def seen_host(device: torch.device) -> bool:
        compiled.append(torch.compiler.is_compiling())
        return True

    with mock.patch.object(same_bits, "is_host", seen_host), pytest.raises(NotImplementedError, match="fused"):
        torch.compile(optimizer.step, backend="eager")()
    assert compiled == [False]


# What docs/performance.md answers


PLACED = [None, ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_OPTIM]


@pytest.mark.parametrize("strategy", PLACED)
@on_ranks(2)
def test_a_single_graph_of_all_units_is_an_error_that_names_the_hook(strategy: ShardingStrategy | None) -> None:
    model = stack(fully_sharded(sharding_strategy=strategy))
    backend = Counter()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ForwardHooks\.before"):
        torch.compile(model, backend=backend, fullgraph=True)(batch(0, 0).float())
    assert backend.sizes == []
    score(model(batch(0, 0).float())).backward()  # the model can still be used


@torchs_own_deprecations
@pytest.mark.parametrize(
    ("strategy", "message"),
    [(None, "modified by an inplace operation"), (ShardingStrategy.NO_SHARD, "compiled autograd runs a backward")],
)
@on_ranks(2)
def test_compiled_autograd_raises_and_training_continues(strategy: ShardingStrategy | None, message: str) -> None:
    model, backend = stack(fully_sharded(sharding_strategy=strategy), hidden=(3,)), Counter("eager")
    plain = stack(keep, hidden=(3,))
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(RuntimeError, match=message):
        torch.compile(lambda inputs: score(model(inputs)).backward(), backend=backend)(batch(0, 0).float())
    model.zero_grad()
    for trained in (model, plain):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        score(trained(batch(0, 0).float())).backward()
        optimizer.step()
    torch.testing.assert_close(list(model.state_dict().values()), list(plain.state_dict().values()))


@on_ranks(2)
def test_weights_and_gradients_keep_their_addresses_without_sharding() -> None:
    """CUDA graphs read both by address."""
    found = _addresses(ShardingStrategy.NO_SHARD)
    assert len(set(map(tuple, found))) == 1
    assert 0 not in found[0]


@pytest.mark.parametrize("strategy", [strategy for strategy in ShardingStrategy if strategy.name != "NO_SHARD"])
@on_ranks(2)
def test_weights_that_are_sharded_between_steps_have_no_address(strategy: ShardingStrategy) -> None:
    assert 0 in _addresses(strategy)[0]


def _addresses(strategy: ShardingStrategy) -> list[list[int]]:
    """Collective. Train, and return the addresses of a block's weights and of all gradients after each step."""
    model = stack(fully_sharded(sharding_strategy=strategy))
    optimizer, found, leaves = sgd_with_momentum(model.parameters()), [], []
    block = user_module(user_module(model).blocks[0])
    block.register_forward_pre_hook(lambda module, _: leaves.append(module.widen.weight))
    for step in range(3):
        score(model(batch(step, dist.get_rank()).float())).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        grads = [param.grad.data_ptr() for param in model.parameters() if param.grad is not None]
        found.append([leaves[-1].untyped_storage().data_ptr(), *grads])
    return found


# Pain point 29: nothing is dropped in silence


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2)
def test_pain_point_29_a_compiled_function_finds_no_sharded_weight(backend: str) -> None:
    model = stack(fully_sharded())
    widen = user_module(user_module(model).blocks[0]).widen
    with torch.no_grad():
        model(batch(0, 0).float())
    for use in (lambda inputs: widen(inputs), lambda inputs: inputs * widen.weight.norm()):
        with pytest.raises(RuntimeError, match=r"widen\.weight is sharded.*summon_full_params"):
            torch.compile(use, backend=backend)(torch.ones(2, 7))


class ReturnsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.inner = nn.Linear(3, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(inputs), self.weight[1:3], self.weight


@on_ranks(2)
def test_pain_point_29_weights_that_a_compiled_block_returns_stay_valid() -> None:
    plain = ReturnsWeights()
    model = FullyShardedDataParallel(torch_compile(ReturnsWeights(), Counter(), fullgraph=True))
    for found in (plain(torch.ones(2, 3)), model(torch.ones(2, 3))):
        sum(tensor.sin().sum() for tensor in found[1:]).backward()
        assert torch.equal(found[1], plain.weight[1:3])
        assert torch.equal(found[2], plain.weight)


def test_pain_point_29_a_checkpoint_that_cannot_be_compiled_warns() -> None:
    backend = Counter("eager")
    model = torch.compile(checkpoint_wrapper(Block(5), offload_to_cpu=True), backend=backend)
    inputs = torch.ones(2, 7)
    with pytest.warns(UserWarning, match=r"leaves Block uncompiled.*checkpoint_wrapper\(torch.compile"):
        model(inputs).sum().backward()
    assert backend.sizes == []
    assert len(backend.breaks) == 1
    checkpoint_wrapper(torch_compile(Block(5), backend, fullgraph=True), offload_to_cpu=True)(inputs).sum().backward()
    assert backend.sizes == [Block.OPERATIONS]


def test_a_compiled_checkpoint_takes_all_arguments_and_counts_statistics_once() -> None:
    torch.manual_seed(0)
    found = checkpoint_wrapper(Awkward())
    expected = Awkward()
    expected.load_state_dict(found.state_dict())
    backend = Counter()
    compiled = torch_compile(found, backend, fullgraph=True)
    for step in range(3):
        results = []
        for model in (compiled, expected):
            torch.manual_seed(step)
            inputs = torch.randn(4, 7, requires_grad=True)
            first, others = model(inputs, {"a": [torch.randn(4, 7)]}, scale=2.0)
            (first.sum() + others["normed"].sin().sum()).backward()
            results.append([first, inputs.grad, *model.state_dict().values()])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert len(backend.sizes) == 1


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.3)

    def forward(self, inputs: Tensor, nested: Any, *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        normed = self.drop(self.norm(self.inner(inputs))) * scale
        return normed + nested["a"][0], {"normed": normed}
