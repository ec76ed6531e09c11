"""Units with a smaller group of their own inside a larger root: experts, and layers in a group of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardedGradScaler, auto_wrap_bn, get_fsdp_instances
from tests.helpers.hybrid import every_nth, mesh_of, neighbours
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool

WIDTH = 6


class WithExpert(nn.Module):
    """A root with two layers of its own and one expert between them; experts of different `seed` differ."""

    def __init__(self, wrap: Wrap, wrap_expert: Wrap, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.exit = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.block = wrap(nn.Linear(WIDTH, WIDTH))
        torch.manual_seed(100 + seed)
        self.expert = wrap_expert(nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.expert(torch.tanh(self.block(self.entry(inputs)))))


def expert_of(rank: int, size: int) -> int:
    """Which of the experts a rank has, if `size` ranks that follow each other share one."""
    return rank // size


def group_of(size: int) -> Any:
    """Collective. This rank's group of so many; for one rank, what needs no process group."""
    return Alone() if size == 1 else neighbours(size)


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(size: int, root: Any, **options: Any) -> FullyShardedDataParallel:
    wrap = fully_sharded(process_group=root, **options)
    expert = fully_sharded(process_group=group_of(size), **options)
    model: Any = wrap(WithExpert(wrap, expert, expert_of(dist.get_rank(), size)))
    return model


class Reference:
    """All ranks in one process: one model for each expert, whose other parameters are kept the same."""

    def __init__(self, size: int) -> None:
        self.size, self.world = size, dist.get_world_size()
        self.models = [WithExpert(keep, keep, seed) for seed in range(self.world // size)]
        self.common = [name for name, _ in self.models[0].named_parameters() if not name.startswith("expert")]

    def backward(self, step: int) -> None:
        """The mean over all ranks for what all have, and over its own ranks for each expert."""
        for model in self.models:
            model.zero_grad()
        for rank in range(self.world):
            model = self.models[expert_of(rank, self.size)]
            (model(rows_of(rank, step)).square().mean() / self.size).backward()
        for name in self.common:
            params = [dict(model.named_parameters())[name] for model in self.models]
            total = torch.stack([param.grad for param in params if param.grad is not None]).mean(dim=0)
            for param in params:
                param.grad = total.clone()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """What all have counts once, and so does each expert."""
        every = [self.models[0].get_parameter(name) for name in self.common]
        every += [param for model in self.models for param in model.expert.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(every, max_norm, norm_type)
        for model in self.models[1:]:
            for name in self.common:
                model.get_parameter(name).grad = self.models[0].get_parameter(name).grad
        return norm


SIZES = [1, 2]
ROOTS = ["all", "hybrid"]


@parametrize_cases(
    at_most=4,
    size=[2, 1],
    root=ROOTS,
    form=[{}, {"use_orig_params": True}, {"flatten_parameters": False}],
    bucket_cap_mb=[25, 0],
    norm_type=[None, 2.0, 1.0, math.inf],
)
@on_ranks(4)
def test_experts_train_clip_and_are_saved_as_in_one_process(case: Case) -> None:
    options = {"bucket_cap_mb": case.bucket_cap_mb, **case.form}
    torch.set_default_dtype(torch.float64)
    model, reference = (
        sharded(case.size, mesh_of(2, 2) if case.root == "hybrid" else None, **options),
        Reference(case.size),
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, *reference.models)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(rows_of(dist.get_rank(), step).double()).square().mean().backward()
        reference.backward(step)
        if case.norm_type is not None:
            norm = model.clip_grad_norm_(0.05, case.norm_type)
            torch.testing.assert_close(norm, reference.clip(0.05, case.norm_type))
        for optimizer in optimizers:
            optimizer.step()
    expected = reference.models[expert_of(dist.get_rank(), case.size)].state_dict()
    found = model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("size", SIZES)
@on_ranks(4)
def test_a_saved_expert_is_loaded_by_the_ranks_that_have_it(size: int) -> None:
    model = sharded(size, None)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with model.summon_full_params(), torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    assert not torch.equal(model.state_dict()["expert.0.weight"], saved["expert.0.weight"])
    model.load_state_dict(saved)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name


@on_ranks(4)
def test_ranks_that_load_different_values_of_one_expert_are_refused_by_all() -> None:
    model = sharded(2, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = dict(before)
    state["expert.0.bias"] = before["expert.0.bias"] + dist.get_rank() // 3  # on rank 3 alone
    with pytest.raises(RuntimeError, match=r"rank 3 has other values than rank 2 of expert\.0\.bias"):
        model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@on_ranks(4)
def test_small_gradients_of_different_groups_do_not_meet_in_one_bucket() -> None:
    torch.set_default_dtype(torch.float64)
    # All new, so that their units have the same tags.
    pairs, all_ranks, odd_and_even = neighbours.__wrapped__(2), dist.new_group(), every_nth.__wrapped__(2)
    kinds = 2 * [pairs, all_ranks, odd_and_even]
    assert_gradients_are_right([fully_sharded(process_group=kind) for kind in kinds], late_rank=None)


@on_ranks(2)
def test_groups_that_reduce_over_one_group_are_not_mixed_up() -> None:
    torch.set_default_dtype(torch.float64)
    options = {"process_group_reduce_scatter": dist.new_group(), "bucket_cap_mb": 0}
    # One rank has the gradients of the last unit later than the others, and the other rank before them.
    assert_gradients_are_right(
        [fully_sharded(process_group=dist.new_group(), **options) for _ in range(2)], late_rank=1
    )


class Sum(nn.Module):
    """Adds up multiples of what layers make of the same; a rank that is `late` does not use a parameter of the last."""

    def __init__(self, wraps: Sequence[Wrap], late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(wrap(Shifted(late and wrap is wraps[-1])) for wrap in wraps)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([(number + 1) * layer(inputs) for number, layer in enumerate(self.layers)]).sum(dim=0)


class Shifted(nn.Linear):
    """Has a parameter whose gradient is zero, or missing."""

    def __init__(self, lacks_shift: bool) -> None:
        super().__init__(5, 5)
        self.shift = nn.Parameter(torch.ones(3))
        self.lacks_shift = lacks_shift

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.lacks_shift else super().forward(inputs) + 0 * self.shift.sum()


def assert_gradients_are_right(wraps: list[Wrap], late_rank: int | None) -> None:
    """Collective. On the same rows everywhere, for which it does not matter over whom gradients are averaged."""
    plain = Sum([keep] * len(wraps), late=False)
    model = fully_sharded()(Sum(wraps, late=dist.get_rank() == late_rank))
    for each in (model, plain):
        each(rows_of(0, 0).double()).square().mean().backward()
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)


@on_ranks(2)
def test_batch_norms_in_a_group_of_one() -> None:
    torch.manual_seed(0)
    norms = auto_wrap_bn(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), single_rank_pg=True)
    model: Any = fully_sharded()(norms)
    model(torch.randn(4, 5) * (1 + dist.get_rank())).sum().backward()
    # Twelve numbers per rank, each a parameter of its own.
    norm = model.clip_grad_norm_(1e9)
    powers = sum(param.grad.square().sum() for param in model.parameters())
    dist.all_reduce(powers)
    torch.testing.assert_close(norm, powers.sqrt())


@on_ranks(4)
def test_replicas_of_a_unit_count_once() -> None:
    # Experts on two ranks of which each holds all: two experts, of four elements whose gradient is 1.
    expert = fully_sharded(process_group=(neighbours(1), neighbours(2)))(nn.Linear(4, 1, bias=False))
    model: Any = fully_sharded()(nn.Sequential(expert, nn.Linear(1, 1, bias=False).requires_grad_(False)))
    with model.summon_full_params(), torch.no_grad():
        model.module[1].weight.fill_(1.0)
    model(torch.ones(1, 4)).sum().backward()
    assert model.clip_grad_norm_(1e9).item() == pytest.approx(math.sqrt(8))


def test_a_scaler_skips_on_all_ranks_together(ranks: RankPool) -> None:
    stepped = ranks(4).run(_scale_with_experts)
    assert stepped == [False] * 4


def _scale_with_experts() -> bool:
    model = sharded(1, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu")
    scaler.scale(model(rows_of(0, 0)).mean()).backward()
    if dist.get_rank() == 3:
        model.expert.params[0].grad[0] = math.inf
    before = [param.detach().clone() for param in model.parameters()]
    scaler.step(optimizer)
    return any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@on_ranks(4)
def test_a_wrapper_says_whether_inner_ones_have_groups_of_their_own() -> None:
    assert not sharded(2, None).children_share_process_group
    assert not sharded(1, mesh_of(2, 2)).children_share_process_group
    wrap = fully_sharded(process_group=mesh_of(2, 2))
    model: Any = wrap(WithExpert(wrap, wrap, 0))
    assert model.children_share_process_group
    assert len(get_fsdp_instances(model)) == 3
