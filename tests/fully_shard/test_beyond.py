"""What torch's `fully_shard` refuses or gets wrong, and ours does right: the table in docs/fully_shard.md.

Where it costs little, a test shows what torch's does as well, so that the table stays true.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchsOffload
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp
from fsdp.testing import World, WorldError
from tests.helpers.dtensor_twins import (
    assert_states_within,
    assert_trains_as_plain,
    assert_within,
    local,
    ours,
    seeded,
    torchs,
    uneven,
)
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Net, Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import adamw, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


# What torch's refuses


def blocks_with_tied_weights(wrap: Wrap) -> nn.Module:
    first, second = (nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2))
    second[0].weight, second[2].weight = first[0].weight, first[2].weight
    return Net(lambda net, x: net.second(net.first(x)), first=wrap(first), second=wrap(second))


@on_ranks(1, 2)
def test_parameters_tied_across_units_stay_tied() -> None:
    """The layers that `peft` repeats by `layer_replication` are such."""
    make = partial(seeded, blocks_with_tied_weights)
    assert_trains_as_plain(make)
    model: Any = make(ours())
    assert all(model.first[at].weight is model.second[at].weight for at in (0, 2))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in make().named_parameters()]
    if torch.__version__ >= "2.12":  # torch 2.11 does not refuse it
        with pytest.raises(ValueError, match=r"'second.0.weight' is shared"):
            once(make(torchs()), INPUTS)


def two_dtypes(wrap: Wrap) -> nn.Module:
    return Net(
        lambda net, x: net.second(net.first(x.to(torch.float32)).to(torch.float64)),
        first=nn.Linear(5, 4).to(torch.float32),
        second=nn.Linear(4, 3).to(torch.float64),
    )


@on_ranks(2)
def test_one_unit_may_have_parameters_of_two_dtypes() -> None:
    model, plain = seeded(two_dtypes, ours()), seeded(two_dtypes)
    for each in (model, plain):
        optimizer = sgd_with_momentum(each.parameters())
        once(each, INPUTS)
        optimizer.step()
    assert_states_within(full_state(model), plain.state_dict(), 1e-6)
    with pytest.raises(AssertionError, match=r"uniform original parameter dtype"):
        once(seeded(two_dtypes, torchs()), INPUTS)


def scaled(wrap: Wrap) -> nn.Module:
    return Net(
        lambda net, x: net.inner(x) * net.scale, inner=wrap(nn.Linear(5, 3)), scale=nn.Parameter(torch.tensor(0.7))
    )


@on_ranks(1, 2)
def test_a_parameter_may_have_no_dimensions() -> None:
    assert_trains_as_plain(partial(seeded, scaled))
    with pytest.raises(ValueError, match=r"doesn't support scalar parameters"):
        seeded(scaled, torchs())


def transposed(wrap: Wrap) -> nn.Module:
    return Net(lambda net, x: x @ net.weight, weight=nn.Parameter(torch.randn(3, 5).t()))


@on_ranks(2)
def test_a_parameter_may_be_non_contiguous() -> None:
    assert_trains_as_plain(partial(seeded, transposed))
    with pytest.raises(NotImplementedError, match=r"non-contiguous"):
        seeded(transposed, torchs())


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


@on_ranks(3)
def test_a_parameter_may_be_cut_unevenly_along_another_dimension() -> None:
    with pytest.raises(NotImplementedError, match=r"uneven sharding on dim 1"):
        uneven(torchs(shard_placement_fn=last_dim))
    assert_trains_as_plain(uneven, shard_placement_fn=last_dim)


def convolutions(wrap: Wrap) -> nn.Module:
    """Weights of four dimensions, and as many biases as channels: five on four ranks leave one without any."""
    return Net(
        lambda net, x: net.second(torch.tanh(net.first(x[None, None]))).sum(dim=(0, 1)),
        first=wrap(nn.Conv2d(1, 5, (3, 2))),
        second=wrap(nn.Conv2d(5, 2, (2, 3), padding=1)),
    )


def third_dim_of_convolutions(param: nn.Parameter) -> Shard:
    return Shard(2 if param.dim() == 4 else 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_convolutions_may_be_cut_along_the_dimensions_of_their_kernels(ranks: RankPool, world_size: int) -> None:
    make = partial(seeded, convolutions)
    ranks(world_size).run(assert_trains_as_plain, make, shard_placement_fn=third_dim_of_convolutions)


@on_ranks(2)
def test_load_state_dict_takes_whole_tensors() -> None:
    model, other = uneven(ours()), uneven(seed=1).state_dict()
    model.load_state_dict(other)
    assert_same_state(full_state(model), other)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        uneven(torchs()).load_state_dict(other)


@on_ranks(2)
def test_deepcopy_gives_a_sharded_copy() -> None:
    """That it trains by itself is in test_starts."""
    model = uneven(ours())
    for found, expected in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True):
        assert_same(local(found), local(expected))
    with pytest.raises(AssertionError, match=r"deepcopy"):
        copy.deepcopy(uneven(torchs()))


@on_ranks(2)
def test_other_dtensors_are_copied_by_torch_whatever_attributes_they_have() -> None:
    uneven(ours())  # which teaches the class how parameters are copied
    other: Any = distribute_tensor(torch.arange(4.0), dist.device_mesh.init_device_mesh("cpu", (2,)), [Shard(0)])
    other.owner = "somebody"
    copied = copy.deepcopy(other)
    assert copied.owner == "somebody"
    assert torch.equal(copied.full_tensor(), other.full_tensor())


@on_ranks(2)
def test_cpu_offload_needs_no_accelerator() -> None:
    assert_trains_as_plain(uneven, offload_policy=fsdp.CPUOffloadPolicy())
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA"):
            once(torchs_fully_shard(nn.Linear(5, 5), offload_policy=TorchsOffload()), INPUTS)


@on_ranks(2)
def test_frozen_parameters_may_be_thawed_under_mixed_precision() -> None:
    _thaw(ours)
    if torch.__version__ < "2.14":  # torch trains them from 2.14 on
        with pytest.raises(RuntimeError, match=r"grad_dtype"):
            _thaw(torchs)


def _thaw(contestant: Callable[..., Wrap]) -> None:
    model: Any = uneven(contestant(mp_policy={"param_dtype": torch.bfloat16}))
    model.trunk[0].requires_grad_(False)
    once(model, INPUTS)
    model.trunk[0].requires_grad_(True)
    model.zero_grad()
    once(model, INPUTS)
    assert model.trunk[0].weight.grad.dtype == torch.float32
    expected = uneven(contestant(mp_policy={"param_dtype": torch.bfloat16}))
    once(expected, INPUTS)
    for name, param in expected.named_parameters():
        assert_same(local(model.get_parameter(name).grad), local(param.grad), name)


# What torch's does wrong in silence


class Ordered(nn.Module):
    """Its units run in the order of `order`."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.a, self.b = wrap(nn.Linear(5, 5)), wrap(nn.Linear(5, 5))
        self.order = "ab"

    def forward(self, inputs: Tensor) -> Tensor:
        for name in self.order:
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


def test_ranks_that_run_units_in_different_orders_hear_of_it() -> None:
    with pytest.raises(WorldError, match=r"(?s)all-gather of [ab] in forward .*Rank 1 ran b before a in forward"):
        World(2).run(_run_in_different_orders)


def _run_in_different_orders() -> None:
    model: Any = seeded(Ordered, ours())
    model.order = "ab" if dist.get_rank() == 0 else "ba"
    model(INPUTS)


@on_ranks(2)
def test_units_in_different_orders_compute_with_wrong_weights_under_torchs() -> None:
    model: Any = seeded(Ordered, torchs())
    plain: Any = seeded(Ordered)
    model.order = plain.order = "ab" if dist.get_rank() == 0 else "ba"
    assert not torch.equal(model(INPUTS), plain(INPUTS))


@on_ranks(2)
def test_ranks_that_built_different_models_hear_of_it() -> None:
    layer = nn.Linear(5, 4 if dist.get_rank() == 1 else 3)
    model = ours()(nn.Sequential(ours()(layer)))
    with pytest.raises(RuntimeError, match=r"different models.*rank 1"):
        model(INPUTS)


class Sometimes(nn.Module):
    """Uses `extra` only where it is told to."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner, self.extra, self.exit = wrap(nn.Linear(5, 5)), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor, uses_extra: bool = True) -> Tensor:
        hidden = self.exit(self.inner(inputs))
        return self.extra(hidden) if uses_extra else hidden


@on_ranks(3)
def test_a_parameter_may_get_a_gradient_on_one_rank_only() -> None:
    model: Any = seeded(Sometimes, ours())
    plain: Any = seeded(Sometimes)
    model(INPUTS, dist.get_rank() == 1).sum().backward()
    (plain(INPUTS).sum() / 3).backward()
    grad = model.extra.weight.grad.full_tensor()
    assert_within("gradient", grad, plain.extra.weight.grad, 1e-6)


# Mistakes that torch's leaves to be found


@on_ranks(2)
def test_a_step_with_unreduced_gradients_is_an_error() -> None:
    for wrap in (ours(), torchs()):
        model: Any = uneven(wrap)
        optimizer, before = adamw(model.parameters()), full_state(model)
        model.set_requires_gradient_sync(False)
        once(model, INPUTS)
        if isinstance(model, fsdp.FSDPModule):
            with pytest.raises(RuntimeError, match=r"not reduced"):
                optimizer.step()
        else:
            optimizer.step()  # which leaves them out
        assert_same_state(full_state(model), before)


def without_values(wrap: Wrap) -> Any:
    with torch.device("meta"):
        model = wrap(nn.Linear(5, 3))
    return model.to_empty(device="cpu")


@on_ranks(2)
def test_parameters_without_values_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"weight, bias"):
        without_values(ours())(INPUTS)
    without_values(torchs())(INPUTS)  # which computes with them


class Growing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + getattr(self, "shift", 0.0)


@on_ranks(2)
def test_a_parameter_added_after_sharding_is_an_error() -> None:
    model, theirs = (wrap(Growing(5, 3)) for wrap in (ours(), torchs()))
    for each in (model, theirs):
        each.shift = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"shift"):
        once(model, INPUTS)
    once(theirs, INPUTS + dist.get_rank())  # each rank trains it alone
    heard = [torch.empty(3) for _ in range(2)]
    dist.all_gather(heard, theirs.shift.grad)
    assert not torch.equal(*heard)


def outputs_after_a_look(model: Any) -> tuple[Tensor, Tensor]:
    """Outputs after a step before which somebody has looked at some, and those of weights that are gathered anew."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once(model, INPUTS)
    with torch.no_grad():
        model(INPUTS)
        optimizer.step()
        found = model(INPUTS).clone()
        model.reshard()
        return found, model(INPUTS)


@on_ranks(2)
def test_a_forward_between_backward_and_step_leaves_no_old_weights() -> None:
    assert torch.equal(*outputs_after_a_look(uneven(ours())))
    assert not torch.equal(*outputs_after_a_look(uneven(torchs())))


def keeps_local_tensors(model: Any) -> bool:
    """Whether local tensors that were taken after parameters were assigned are the model's after a forward as well."""
    given = [(name, local(param).clone(), param) for name, param in model.named_parameters()]
    for name, part, param in given:
        placed = DTensor.from_local(
            part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        setattr(model, name, nn.Parameter(placed))
    taken = [local(param) for param in model.parameters()]
    with torch.no_grad():
        model(torch.ones(2, 4))
        for part in taken:
            part.fill_(2)
    return all(bool((local(value) == 2).all()) for value in model.state_dict().values())


@on_ranks(2)
def test_local_tensors_that_were_taken_before_the_first_forward_stay_the_models() -> None:
    assert keeps_local_tensors(ours()(nn.Linear(4, 3)))
    assert keeps_local_tensors(torchs()(nn.Linear(4, 3))) is (dist.get_rank() == 0)  # the other one's is padded
