"""`ignored_modules` and `ignored_parameters`: left as they are, and still saved, loaded, summoned and clipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, auto_wrap, default_auto_wrap_policy, enable_wrap
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.orig_params import LocalShard
from tests.helpers.changed_params import LAYOUTS, adamw, momentum
from tests.helpers.equality import assert_close
from tests.helpers.models import Net
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import MakeOptimizer
from tests.helpers.ranks import RankPool
from tests.helpers.twins import Twins, score

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Mixture(nn.Module):
    """An adapter and a temperature that are to be ignored, beside two layers and a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7)
        self.adapter = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.block = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.block(self.adapter(self.entry(inputs))) * self.temperature


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


IGNORED = ["adapter.0.weight", "adapter.0.bias", "adapter.2.weight", "adapter.2.bias", "temperature"]


def by_hand(model: Mixture, **options: Any) -> nn.Module:
    """The inner unit has nothing that is ignored, so it need not be told."""
    model.block = FullyShardedDataParallel(model.block, **options)  # type: ignore[assignment]
    return FullyShardedDataParallel(
        model, ignored_modules=[model.adapter], ignored_parameters=[model.temperature], **options
    )


def by_policy(model: Mixture, **options: Any) -> nn.Module:
    """Everything of five elements or more is a unit, but for what is ignored."""
    policy = partial(default_auto_wrap_policy, min_num_params=5, skip_params_check_for_root=True)
    ignored = {"ignored_modules": [model.adapter], "ignored_parameters": [model.temperature]}
    with enable_wrap(policy, wrapper_cls=FullyShardedDataParallel, **ignored, **options):
        return auto_wrap(model)


WRAPS = [by_hand, by_policy]


class IgnoringTwins(Twins):
    """A wrapped model with ignored parameters and the plain one, the ignored gradients averaged as a user would."""

    def __init__(
        self,
        wrap: Callable[..., nn.Module] = by_hand,
        layout: str = "flat",
        make_optimizer: MakeOptimizer = momentum,
        **options: Any,
    ) -> None:
        torch.set_default_dtype(torch.float64)
        models = wrap(mixture(), **LAYOUTS[layout], **options), mixture()
        super().__init__(*models, [make_optimizer(model.parameters()) for model in models])

    def backward(self, number: int | None = None, *, sync: bool = True) -> None:
        """Collective. Averaged gradients in both."""
        super().backward(number, sync=sync)
        for param in ignored_in(self.sharded).values():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def ignored_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is no shard and no piece of one, by its plain name."""
    with model.summon_full_params():  # type: ignore[operator]
        names = {param: name for name, param in model.named_parameters()}
    ours = (FlatParameter, LocalShard)
    return {names[param]: param for param in model.parameters() if not isinstance(param, ours)}


# What they are


@parametrize_pairs(world_size=[2, 1], wrap=WRAPS, layout=list(LAYOUTS))
@on_ranks("world_size")
def test_they_stay_ordinary_parameters(wrap: Callable[..., nn.Module], layout: str) -> None:
    plain = mixture()
    before = dict(plain.named_parameters())
    model = wrap(plain, **LAYOUTS[layout])
    for _ in range(2):
        found = ignored_in(model)
        assert sorted(found) == sorted(IGNORED)
        assert all(found[name] is before[name] for name in IGNORED)
        slots = [slot for unit in model._units() for handle in unit.handles for slot in handle.layout.slots]  # type: ignore[operator]
        assert sum(slot.numel for slot in slots) == sum(
            param.numel() for name, param in before.items() if name not in IGNORED
        )
        assert plain.adapter(torch.ones(2, 7)).shape == (2, 7)  # outside of the model's forward too
        model(torch.ones(2, 5)).sum().backward()
        assert all(param.grad is not None for param in found.values())


@parametrize_cases(
    at_most=4,
    world_size=[3, 2, 1],
    wrap=WRAPS,
    layout=list(LAYOUTS),
    make_optimizer=[momentum, adamw],
    kept=[False, True],
)
@on_ranks("world_size")
def test_training_equals_the_plain_model(case: Case) -> None:
    twins = IgnoringTwins(case.wrap, case.layout, case.make_optimizer, reshard_after_forward=not case.kept)
    for _ in range(2):
        twins.backward()
        twins.optimize()
    twins.assert_close()


@on_ranks(1)
def test_a_size_policy_does_not_count_them() -> None:
    model = mixture()
    counted: dict[str, int] = {}

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int, **_: Any) -> bool:
        if not recurse:
            counted[type(module).__name__] = unwrapped_params
        assert all(module is not inner for inner in ignored.modules())
        return recurse

    ignored = model.adapter
    with enable_wrap(policy, wrapper_cls=FullyShardedDataParallel, ignored_parameters=[model.temperature]):
        auto_wrap(model, ignored_modules=[ignored])
    assert counted["Mixture"] == sum(
        param.numel() for name, param in mixture().named_parameters() if name not in IGNORED
    )


@on_ranks(1)
def test_they_may_be_given_as_any_collection() -> None:
    for kind in (list, tuple, set):
        model = mixture()
        wrapped = FullyShardedDataParallel(
            model, ignored_modules=kind([model.adapter]), ignored_parameters=kind([model.temperature])
        )
        assert sorted(ignored_in(wrapped)) == sorted(IGNORED)
    model = mixture()
    assert len(ignored_in(FullyShardedDataParallel(model, ignored_modules=model.adapter))) == 4


def tied_to_ignored() -> nn.Module:
    net = Net(
        lambda net, x: net.third(net.second(net.first(x))),
        first=nn.Linear(5, 5),
        second=nn.Linear(5, 5),
        third=nn.Linear(5, 5, bias=False),
    )
    net.third.weight = net.first.weight
    return net


@pytest.mark.parametrize("which", ["first", "third"])
@on_ranks(2)
def test_what_they_share_with_others_is_ignored_everywhere(which: str) -> None:
    torch.manual_seed(0)
    plain = tied_to_ignored()
    model = FullyShardedDataParallel(plain, ignored_modules=[plain.get_submodule(which)])
    assert plain.first.weight is plain.third.weight
    assert isinstance(plain.third.weight, nn.Parameter)
    before = plain.first.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    score(model(torch.ones(2, 5))).backward()
    optimizer.step()
    state = model.state_dict()
    assert not torch.equal(state["first.weight"], before)
    assert torch.equal(state["first.weight"], state["third.weight"])


# States


@every_layout
@on_ranks(2)
def test_the_state_has_them_in_tensors_of_its_own(layout: str) -> None:
    twins = IgnoringTwins(by_policy, layout)
    twins.assert_close()
    state = twins.sharded.state_dict()
    for name, param in ignored_in(twins.sharded).items():
        assert state[name].data_ptr() != param.data_ptr()
    kept = {name: value.clone() for name, value in state.items()}
    twins.backward()
    twins.optimize()
    assert all(torch.equal(value, kept[name]) for name, value in state.items())


@parametrize_pairs(world_size=[2, 1], wrap=WRAPS, layout=list(LAYOUTS))
@on_ranks("world_size")
def test_they_are_loaded_with_the_rest(wrap: Callable[..., nn.Module], layout: str) -> None:
    twins = IgnoringTwins(wrap, layout)
    state = {name: value + 1 for name, value in twins.plain.state_dict().items()}
    for model in (twins.sharded, twins.plain):
        assert not any(model.load_state_dict(state))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "temperature"'):
        twins.sharded.load_state_dict({name: value for name, value in state.items() if name != "temperature"})
    twins.backward()
    twins.optimize()
    twins.assert_close()


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_summoning_leaves_them_and_keeps_what_is_changed(layout: str) -> None:
    twins = IgnoringTwins(by_hand, layout)
    expected = dict(twins.plain.named_parameters())
    with twins.sharded.summon_full_params(), torch.no_grad():  # type: ignore[operator]
        found = dict(twins.sharded.named_parameters())
        assert {name: param.shape for name, param in found.items()} == {n: p.shape for n, p in expected.items()}
        for params in (found, expected):
            params["temperature"].fill_(2)
            params["entry.bias"].fill_(3)
    twins.backward()
    twins.optimize()
    twins.assert_close()


# Clipping


@parametrize_cases(
    norm_type=[2.0, 1.0, math.inf], world_size=[2, 1], layout=list(LAYOUTS), wrap=WRAPS, max_norm=[0.01, 100.0]
)
@on_ranks("world_size")
def test_the_norm_is_that_of_the_plain_model(case: Case) -> None:
    twins = IgnoringTwins(case.wrap, case.layout)
    twins.backward()
    found = twins.sharded.clip_grad_norm_(case.max_norm, case.norm_type)  # type: ignore[operator]
    expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), case.max_norm, case.norm_type)
    assert_close(found, expected, "norm")
    twins.optimize()
    twins.assert_close()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_is_the_same_on_all_ranks_when_their_gradients_are_not(ranks: RankPool, norm_type: float) -> None:
    found = ranks(2).run(_clip_unlike, norm_type)
    assert len(set(found)) == 1


def _clip_unlike(norm_type: float) -> float:
    twins = IgnoringTwins()
    twins.backward()
    for param in ignored_in(twins.sharded).values():
        param.grad = torch.full_like(param, dist.get_rank() + 1.0)
    return float(twins.sharded.clip_grad_norm_(1.0, norm_type))  # type: ignore[operator]


def test_ranks_may_have_gradients_of_different_ones(ranks: RankPool) -> None:
    found = ranks(2).run(_clip_wide_on_one_rank)
    assert found[0] == found[1] == pytest.approx(math.sqrt(3**2 / 2))


def _clip_wide_on_one_rank() -> float:
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double())
    model = FullyShardedDataParallel(plain, ignored_modules=[plain[1]])
    if dist.get_rank() == 0:
        plain[1].weight.grad = torch.zeros(5, 5, dtype=torch.float64)
        plain[1].weight.grad[0, 0] = 3
    return float(model.clip_grad_norm_(1.0))


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_before_anything_is_clipped() -> None:
    twins = IgnoringTwins()
    twins.backward()
    param = ignored_in(twins.sharded)["temperature"]
    others = [other for other in twins.sharded.parameters() if other is not param]
    before = [other.grad.clone() for other in others if other.grad is not None]
    param.grad = torch.tensor(math.inf if dist.get_rank() == 1 else 1.0)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        twins.sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)  # type: ignore[operator]
    after = [other.grad for other in others if other.grad is not None]
    assert all(map(torch.equal, after, before))


@parametrize_pairs(world_size=[2, 1], layout=list(LAYOUTS), wrap=WRAPS)
@on_ranks("world_size")
def test_values_are_clipped_too(layout: str, wrap: Callable[..., nn.Module]) -> None:
    twins = IgnoringTwins(wrap, layout)
    twins.backward()
    twins.sharded.clip_grad_value_(1e-3)  # type: ignore[operator]
    nn.utils.clip_grad_value_(twins.plain.parameters(), 1e-3)
    for param in ignored_in(twins.sharded).values():
        assert param.grad is not None
        assert param.grad.abs().max() <= 1e-3
    twins.optimize()
    twins.assert_close()


# Dtypes


class Counting(nn.Module):
    """A buffer and an integer parameter, which could not be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.weight.dtype is self.seen.dtype is torch.float32
        return inputs * self.weight.to(inputs.dtype) + self.seen.to(inputs.dtype)


def counting() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), Counting())


@every_layout
@on_ranks(2)
def test_mixed_precision_casts_neither_their_parameters_nor_their_buffers(layout: str) -> None:
    plain = counting()
    options: dict[str, Any] = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
    model = FullyShardedDataParallel(plain, ignored_modules=[plain[2]], **options, **LAYOUTS[layout])
    for _ in range(2):
        output = model(torch.ones(4, 5))
        assert output.dtype is torch.bfloat16
        output.sum().backward()
    assert model.state_dict()["2.seen"].dtype is torch.float32
    assert plain[2].weight.grad is not None
    assert plain[2].weight.grad.dtype is torch.float32


@every_layout
@on_ranks(2)
def test_integer_parameters_may_be_ignored(layout: str) -> None:
    plain = counting()
    model = FullyShardedDataParallel(plain, ignored_parameters=[plain[2].steps], **LAYOUTS[layout])
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    model(torch.ones(4, 5)).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    state = model.state_dict()
    assert state["2.steps"].dtype is torch.int64
    model.load_state_dict({**state, "2.steps": torch.ones(3, dtype=torch.int64)})
    assert torch.equal(plain[2].steps, torch.ones(3, dtype=torch.int64))
