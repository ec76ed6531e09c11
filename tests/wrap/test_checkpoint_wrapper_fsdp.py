"""`checkpoint_wrapper` with units: around them, inside of them, or both; always the training of the plain model.

"inside" is `FullyShardedDataParallel(checkpoint_wrapper(module))`, where a unit is gathered for backward and computes
again; "around" is `checkpoint_wrapper(FullyShardedDataParallel(module))`, where recomputation gathers it.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    auto_wrap,
    enable_wrap,
    get_fsdp_instances,
    module_wrap_policy,
)
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.phase import Phase
from fsdp.wrap.checkpoint_wrapper import checkpoint_wrapper, disable_checkpointing
from tests.helpers.models import Block, Wrap, keep, nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    TOKENS,
    Training,
    assert_bit_equal,
    assert_parity,
    fully_sharded,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.ranks import RankPool
from tests.helpers.twins import (
    OPTIONS,
    STEPS,
    Twins,
    assert_at_rest,
    assert_trains_like_plain,
    every_option,
    once,
    tanh_layers,
    toolbox,
)


def checkpointed(where: str, wrap: Wrap, module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """`wrap` around a module with checkpoints; the plain model has neither."""
    if wrap is keep:
        return module
    if where in ("inside", "both"):
        module = checkpoint_wrapper(module, offload_to_cpu)
    module = wrap(module)
    return checkpoint_wrapper(module, offload_to_cpu) if where in ("around", "both") else module


def mlp(where: str, wrap: Wrap) -> nn.Module:
    """All four units are checkpointed: the root, two in it, and one in one of those."""
    return nested_mlp(partial(checkpointed, where, wrap))


# Training


@parametrize_pairs(world_size=[2, 1], where=["inside", "around", "both"], options=OPTIONS)
def test_units_train_like_the_plain_model(
    ranks: RankPool, world_size: int, where: str, options: dict[str, Any]
) -> None:
    ranks(world_size).run(assert_trains_like_plain, partial(mlp, where), *STEPS[1:8], options=options)


@parametrize_pairs(order=["abcab", "abc"], where=["inside", "around", "both"], options=OPTIONS)
def test_units_that_run_several_times(ranks: RankPool, order: str, where: str, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, partial(tools, where, order), *STEPS[:6], options=options)


def tools(where: str, order: str, wrap: Wrap) -> nn.Module:
    return toolbox(partial(checkpointed, where, wrap), order=order)


@parametrize_cases(
    world_size=[2, 1], where=["inside", "around"], accumulate=[3, 1], no_sync=[True, False], clip=[0.3, None]
)
def test_a_transformer_with_accumulation_and_clipping(ranks: RankPool, world_size: int, case: Case) -> None:
    ranks(world_size).run(
        _transformer_parity, case.where, accumulate=case.accumulate, no_sync=case.no_sync, clip=case.clip
    )


def _transformer_parity(where: str, **options: Any) -> None:
    wrap = partial(checkpointed, where, fully_sharded())
    assert_parity(tiny_transformer, sgd_with_momentum, wrap=wrap, task=TOKENS, **options)


class SeveralInOne(nn.Module):
    """A checkpointed sequence of units, between layers of the root."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.units = nn.Sequential(*(wrap(tanh_layers()) for _ in range(3)))
        if wrap is not keep:
            checkpoint_wrapper(self.units)
        self.exit = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.units(self.entry(inputs)))


def several_in_one(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(SeveralInOne(wrap))


@every_option
def test_one_checkpoint_around_several_units(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, several_in_one, *STEPS[1:6], options=options)


@on_ranks(2)
def test_checkpointed_layers_become_units_by_policy() -> None:
    wrapped = []

    def wrap_by_policy(model: nn.Module) -> nn.Module:
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        for block in blocks:
            checkpoint_wrapper(block)
        with enable_wrap(wrapper_cls=FullyShardedDataParallel):
            model = FullyShardedDataParallel(auto_wrap(model, module_wrap_policy({Block})))
        wrapped.append((len(blocks), len(get_fsdp_instances(model))))
        return model

    make = partial(tiny_transformer, nested=False)
    assert_parity(make, sgd_with_momentum, wrap=wrap_by_policy, task=TOKENS)
    assert wrapped == [(2, 3)]


# The same as without checkpoints


@parametrize_cases(
    at_most=4,
    where=["inside", "around", "both"],
    offload_to_cpu=[False, True],
    options=[
        {},
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"mixed_precision": True, "compute_dtype": torch.bfloat16},
        {"move_params_to_cpu": True},
    ],
)
@on_ranks(2)
def test_training_is_the_same_to_the_bit_with_and_without_checkpoints(case: Case) -> None:
    wrap = fully_sharded(**case.options)
    training = Training(make_model=tiny_transformer, make_optimizer=sgd_with_momentum, task=TOKENS)
    with_checkpoints = train_sharded(
        training, partial(checkpointed, case.where, wrap, offload_to_cpu=case.offload_to_cpu)
    )
    assert_bit_equal(with_checkpoints, train_sharded(training, wrap))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 5))


@parametrize_pairs(
    where=["inside", "around", "both"],
    mixed=[None, MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)],
)
@on_ranks(2)
def test_batch_norms_and_dropout_of_a_unit(where: str, mixed: MixedPrecision | None) -> None:
    wrap = fully_sharded(mixed_precision=mixed or False)
    states = []
    for model in (wrap(normed()), checkpointed(where, wrap, normed())):
        torch.manual_seed(7)
        for number in range(3):
            once(model, torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())))
        grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        states.append((model.state_dict(), grads))
    for name, value in states[0][0].items():
        assert torch.equal(states[1][0][name], value), name
    assert all(torch.equal(one, other) for one, other in zip(states[0][1], states[1][1], strict=True))  # type: ignore[arg-type]
    assert int(states[1][0]["1.num_batches_tracked"]) == 3


# Names, gradients, memory


@pytest.mark.parametrize("where", ["inside", "around", "both"])
@on_ranks(2)
def test_names_and_state_dicts_do_not_know_of_checkpoints(where: str) -> None:
    wrap = fully_sharded()
    plain, model = nested_mlp(wrap), mlp(where, wrap)
    assert isinstance(model, FullyShardedDataParallel)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    found, expected = model.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    expected = {name: value + 1 for name, value in expected.items()}
    model.load_state_dict(expected)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@parametrize_cases(
    where=["inside", "around"], trained=["input", "parameter", "neither"], flatten_parameters=[True, False]
)
@on_ranks(2)
def test_outputs_require_a_gradient_only_if_an_input_or_a_parameter_does(case: Case) -> None:
    module = nn.Linear(5, 5).requires_grad_(case.trained == "parameter")
    unit = checkpointed(case.where, fully_sharded(flatten_parameters=case.flatten_parameters), module)
    inputs = torch.ones(2, 5, requires_grad=case.trained == "input")
    output = unit(inputs)
    assert output.requires_grad == (case.trained != "neither")
    if case.trained != "neither":
        output.sum().backward()
        assert (inputs.grad is None) == (case.trained != "input")
    assert_at_rest(unit)


@on_ranks(2)
def test_saved_tensors_are_inputs_and_no_parameters_are_held() -> None:
    model = checkpointed("inside", fully_sharded(), tanh_layers())
    inputs = torch.ones(3, 5, requires_grad=True)
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel():
            saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    assert saved == [(3, 5)]
    output.sum().backward()
    assert inputs.grad is not None


@pytest.mark.parametrize("where", ["inside", "around", "one for all"])
@on_ranks(2)
def test_units_are_gathered_once_for_backward_however_they_are_checkpointed(where: str) -> None:
    wrap = fully_sharded()
    model = several_in_one(wrap) if where == "one for all" else mlp(where, wrap)
    for _ in range(3):  # until the order is known
        once(model, torch.ones(4, 5))
    starts: list[str] = []
    begin = FlatParamHandle.begin_unshard

    def counted(handle: FlatParamHandle) -> bool:
        if handle.phase is Phase.SHARDED:
            starts.append(handle.name)
        return begin(handle)

    with mock.patch.object(FlatParamHandle, "begin_unshard", counted):
        output = model(torch.ones(4, 5))
        forward = len(starts)
        output.sum().backward()
    units = len(get_fsdp_instances(model))
    assert forward == units
    assert len(starts) - forward == units - 2  # the root and the last unit are still there


@on_ranks(2)
def test_disabled_checkpoints_in_some_steps() -> None:
    def disabled(model: nn.Module, inputs: Tensor) -> None:
        with disable_checkpointing():
            once(model, inputs)

    twins = Twins.of(partial(mlp, "both"))
    for number in range(4):
        twins.take(number, disabled if number % 2 else once)
    twins.assert_close()


class FrozenTwice(nn.Module):
    """A frozen unit that is called twice, in a re-entrant checkpoint; it computes its own activations again as well."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry, self.frozen = nn.Linear(4, 4), wrap(checkpoint_wrapper(nn.Linear(4, 4)).requires_grad_(False))

    def twice(self, x: Tensor) -> Tensor:
        return self.frozen(self.frozen(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.twice, self.entry(x), use_reentrant=True)
        return found


@on_ranks(2)
def test_a_frozen_unit_is_kept_until_its_first_call_is_recomputed() -> None:
    plain, model = FrozenTwice(keep), FullyShardedDataParallel(FrozenTwice(FullyShardedDataParallel))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        each(torch.ones(2, 4)).square().sum().backward()
    norm = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norm)
