"""What modules under `fully_shard` can be told, ours and torch's side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchsModule
from torch.distributed.tensor import DTensor, Shard

import fsdp
from fsdp import FSDPModule
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.unit import unit_of
from tests.helpers.dtensor_twins import (
    ROUNDING,
    assert_at_rest,
    assert_states_within,
    handles,
    is_whole,
    local,
    mesh_of,
    ours,
    seeded,
    torchs,
    uneven,
)
from tests.helpers.models import Net, Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.own_collectives import OwnAllGather, OwnReduceScatter
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import Counting, Traffic

Found = dict[str, Tensor | None]
Steps = Callable[[Any], Found]


def torchs_has(method: str) -> pytest.MarkDecorator:
    """A mark for tests beside torch's that need a method which torch 2.11 does not have."""
    has = hasattr(TorchsModule, method)
    return pytest.mark.skipif(not has, reason=f"this torch has no {method} to compare with")


def inputs(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, 5, generator=generator, dtype=torch.get_default_dtype())


def gradients(model: nn.Module, step: str = "") -> Found:
    """This rank's part of each gradient that is reduced."""
    reduced = {
        name: None if isinstance(param.grad, Placeholder) else param.grad for name, param in model.named_parameters()
    }
    return {f"{step}{name}": None if grad is None else local(grad).clone() for name, grad in reduced.items()}


def backward(model: Any, number: int) -> None:
    model(inputs(number)).square().sum().backward()


def assert_alike(make: Callable[[Wrap], nn.Module], steps: Steps, **options: Any) -> None:
    """Collective. The steps find the same with ours as with torch's: to the bit on two ranks, else in float64.

    A rank receives no more meanwhile.
    """
    tolerance = None
    if dist.get_world_size() > 2:
        torch.set_default_dtype(torch.float64)
        tolerance = ROUNDING
    most, traffic = Traffic(), Traffic()
    with Counting(most):
        expected = steps(make(torchs(**options)))
    with Counting(traffic):
        found = steps(make(ours(**options)))
    assert traffic.values <= most.values
    assert_states_within(found, expected, tolerance)


# How far gradients go


@pytest.mark.parametrize(("world_size", "part"), [(1, "trunk"), (2, "trunk"), (2, "")], ids=str)
def test_one_module_accumulates_while_others_reduce(ranks: RankPool, world_size: int, part: str) -> None:
    ranks(world_size).run(assert_alike, uneven, partial(_accumulate_in, part))


def _accumulate_in(part: str, model: Any) -> Found:
    """In a module with those inside of it, or in the outermost one alone."""
    module = model.get_submodule(part)
    module.set_requires_gradient_sync(False, recurse=bool(part))
    backward(model, 0)
    found = gradients(model, "first ")
    module.set_requires_gradient_sync(True, recurse=bool(part))
    backward(model, 1)
    return found | gradients(model)


@on_ranks(2)
def test_what_accumulates_in_one_module_cannot_be_stepped() -> None:
    model: Any = uneven(ours())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.trunk.set_requires_gradient_sync(False)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="not reduced"):
        optimizer.step()


@pytest.mark.parametrize("replicas", [2, 4])
@on_ranks(4)
def test_gradients_accumulate_scattered_before_replicas_are_added(replicas: int) -> None:
    assert_alike(uneven, _all_reduce_last, mesh=(replicas, 4 // replicas))


def _all_reduce_last(model: Any) -> Found:
    found: Found = {}
    for step in range(2):
        for turn in range(3):
            model.set_requires_all_reduce(turn == 2)
            backward(model, 3 * step + turn)
        found |= gradients(model, f"{step} ")
        model.zero_grad()
    model.set_requires_gradient_sync(False)  # of both kinds in one step
    backward(model, 7)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    backward(model, 8)
    model.set_requires_all_reduce(True)
    backward(model, 9)
    return found | gradients(model)


@on_ranks(4)
def test_gradients_that_replicas_are_missing_from_cannot_be_stepped() -> None:
    model: Any = uneven(ours(mesh=(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_all_reduce(False)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="not reduced"):
        optimizer.step()
    model.zero_grad()  # drops them
    model.set_requires_all_reduce(True)
    backward(model, 1)
    found = gradients(model)
    model.zero_grad()
    backward(model, 1)
    assert_states_within(found, gradients(model))


class OnlyFirst(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return self[0](inputs)


class HalfUsed(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.used = wrap(OnlyFirst(nn.Linear(5, 4), nn.Linear(4, 4)))
        self.unused = wrap(nn.Linear(5, 3))
        self.exit = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.unused(inputs)
        return self.exit(inputs).sum(1) + self.used(inputs).sum(1)


def half_used(wrap: Wrap) -> nn.Module:
    return seeded(HalfUsed, wrap)


@torchs_has("set_reduce_scatter_unused_params")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_nobody_uses_gets_zeros_if_that_is_asked_for(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(assert_alike, half_used, _fill_unused)


def _fill_unused(model: Any) -> Found:
    backward(model, 0)
    found = gradients(model, "unfilled ")
    model.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    backward(model, 1)
    return found | gradients(model)


def half_frozen(wrap: Wrap) -> nn.Module:
    """A frozen parameter beside trained ones, which has a handle of its own."""

    def frozen(module: nn.Module) -> nn.Module:
        if isinstance(module, OnlyFirst):
            module[0].bias.requires_grad_(False)
        return wrap(module)

    return seeded(HalfUsed, frozen)


@torchs_has("set_reduce_scatter_unused_params")
@on_ranks(4)
def test_frozen_parameters_get_none_over_replicas() -> None:
    assert_alike(half_frozen, _fill_unused, mesh=(2, 2))


@torchs_has("set_reduce_scatter_max_input_buffers")
def test_more_reductions_in_flight_change_no_gradient(ranks: RankPool) -> None:
    ranks(2).run(assert_alike, uneven, _more_in_flight)


def _more_in_flight(model: Any) -> Found:
    model.set_reduce_scatter_max_input_buffers(3)
    backward(model, 0)
    return gradients(model)


@on_ranks(1)
def test_settings_that_are_out_of_range() -> None:
    model: Any = uneven(ours())
    for wrong, error in ((True, TypeError), (1.0, TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="True or False"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="not sharded"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="not sharded"):
        fsdp.share_comm_ctx([nn.Linear(2, 2)])
    with pytest.raises(NotImplementedError, match="directly into their parameters"):
        model.set_symm_mem_for_comm()
    fsdp.share_comm_ctx([model])
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_post_optim_event(None)
    with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(2.0)
    backward(model, 0)


# Resharding


@pytest.mark.parametrize(("asked", "keeps"), [(None, True), (True, False), (False, True)])
@on_ranks(2)
def test_the_outermost_module_reshards_after_forward_if_told_to(asked: bool | None, keeps: bool) -> None:
    for make in (uneven, lambda wrap: wrap(nn.Linear(5, 2))):
        model: Any = make(ours(reshard_after_forward=asked))
        for number in range(2):
            loss = model(inputs(number)).sum()
            assert is_whole(model) is keeps
            loss.backward()
            assert_at_rest(model)


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2)
def test_resharding_keeps_the_memory_of_unsharded_parameters_if_told_to(dim: int) -> None:
    torch.set_default_dtype(torch.float64)

    def make(wrap: Wrap) -> Any:
        return seeded(lambda _: nn.Sequential(wrap(nn.Linear(5, 7, bias=False)), nn.Tanh(), nn.Linear(7, 2)), wrap)

    shard = ours(shard_placement_fn=lambda param: Shard(min(dim, param.dim() - 1)))
    kept, freed = make(shard), make(shard)
    kept.set_keep_unsharded_storage(True)
    addresses = set()
    kept[0].register_forward_pre_hook(lambda module, *_: addresses.add(module.weight.data_ptr()))
    for number in range(3):
        for model in (kept, freed):
            backward(model, number)
            torch.optim.SGD(model.parameters(), 0.1).step()
        assert_at_rest(freed)
        assert kept[0].weight.shape == (7, 5)
        assert {handle.unsharded.full.untyped_storage().nbytes() > 0 for handle in handles(kept)} == {True}
        assert isinstance(kept[0].weight, DTensor)
    assert len(addresses) == 1
    for one, other in zip(kept.parameters(), freed.parameters(), strict=True):
        assert torch.equal(local(one), local(other))
    kept.set_keep_unsharded_storage(False)
    backward(kept, 3)
    assert_at_rest(kept)


def embedded(wrap: Wrap) -> nn.Module:
    return Net(
        lambda net, x: net.exit(net.table((x.abs() * 3).long() % 9).sum(1)),
        table=wrap(nn.Embedding(9, 5)),
        exit=wrap(nn.Linear(5, 2)),
    )


@on_ranks(2)
def test_backward_unshards_nothing_where_it_needs_nothing() -> None:
    assert_alike(lambda wrap: seeded(embedded, wrap), _sharded_in_backward)
    model: Any = seeded(embedded, ours())
    model.table.set_unshard_in_backward(False)
    for number in range(3):
        backward(model, number)
    gathered: list[Any] = []
    exchange = FlatParamHandle._exchange
    FlatParamHandle._exchange = lambda handle, *sent: gathered.append(handle) or exchange(handle, *sent)  # type: ignore
    try:
        loss = model(inputs(4)).sum()
        gathered.clear()
        loss.backward()
    finally:
        FlatParamHandle._exchange = exchange  # type: ignore[method-assign]
    assert model.table.weight.grad is not None
    assert not set(handles(model.table)) & set(gathered)


def _sharded_in_backward(model: Any) -> Found:
    model.table.set_unshard_in_backward(False)
    found: Found = {}
    for number in range(3):
        backward(model, number)
        found |= gradients(model, f"{number} ")
    return found


@on_ranks(2)
def test_weights_that_backward_needs_after_all_are_an_error() -> None:
    model: Any = uneven(ours())
    model.trunk.set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|needed for gradient"):
        backward(model, 0)


# A failed step


class Failing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.isnan().any():
            raise ValueError("not a number")
        return super().forward(inputs)


def failing(wrap: Wrap) -> nn.Module:
    return seeded(lambda wrap: nn.Sequential(wrap(nn.Linear(5, 4)), wrap(Failing(4, 2))), wrap)


@pytest.mark.skipif(not hasattr(TorchsModule, "reset_iter_state"), reason="torch 2.11 cannot")
def test_a_step_that_has_failed_is_forgotten(ranks: RankPool) -> None:
    ranks(2).run(assert_alike, failing, _fail_and_reset)


def _fail_and_reset(model: Any) -> Found:
    backward(model, 0)
    with pytest.raises(ValueError, match="not a number"):
        model(inputs(0) * float("nan"))
    model.reset_iter_state()
    model.zero_grad()  # torch's keeps reduced gradients before 2.15
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"reset_iter_state.*(outermost|root)"):
        model[0].reset_iter_state()
    return gradients(model)


@on_ranks(2)
def test_a_step_is_not_forgotten_in_the_middle() -> None:
    model: Any = fsdp.fully_shard(Net(lambda net, x: net.tell() or net.layer(x), layer=nn.Linear(5, 2)))
    model.tell = lambda: None
    backward(model, 0)
    model.tell = model.reset_iter_state
    with pytest.raises(RuntimeError, match="cannot reset the iteration in the middle of a forward"):
        model(inputs(0))
    assert_at_rest(model)


@on_ranks(2)
def test_what_has_accumulated_is_forgotten_with_a_failed_step() -> None:
    found = []
    for fails in (True, False):
        model: Any = failing(ours())
        if fails:
            model.reset_iter_state()  # before the first use there is nothing to forget
            backward(model, 2)
            model.set_requires_gradient_sync(False)
            backward(model, 0)
            model.reset_iter_state()
            assert [param.grad for param in model.parameters()] == [None] * 4
            model.set_requires_gradient_sync(True)
        backward(model, 1)
        found.append(gradients(model))
    assert_states_within(*found)


# Collectives of the user's own


def even(wrap: Wrap) -> nn.Module:
    """Of parts that two ranks divide alike in ours and torch's."""
    layers = [(5, 8), (8, 2)]
    return seeded(lambda wrap: nn.Sequential(*(wrap(nn.Linear(*each, bias=False)) for each in layers)), wrap)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_the_users_own(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(assert_alike, even, _use_own)


def _use_own(model: Any) -> Found:
    gathers, scatters = [OwnAllGather(), OwnAllGather()], [OwnReduceScatter(), OwnReduceScatter()]
    for layer, gather, scatter in zip(model, gathers, scatters, strict=True):
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(scatter)
    for number in range(2):
        backward(model, number)
    assert all(one.calls for one in (*gathers, *scatters))
    if dist.get_world_size() == 2:
        for one, kind in zip((*gathers, *scatters), ((40, 20), (16, 8), (20, 40), (8, 16)), strict=True):
            assert set(one.calls) == {(*kind, torch.float32, 2)}
    return gradients(model)


@pytest.mark.parametrize("mesh", [(2,), (2, 1)], ids=["sharded", "replicated"])
@on_ranks(2)
def test_a_hook_sees_each_reduced_gradient(mesh: tuple[int, ...]) -> None:
    assert_alike(even, _see_and_double, mesh=mesh)


@on_ranks(2)
def test_a_hook_runs_on_a_stream_of_any_device() -> None:
    assert_alike(even, partial(_see_and_double, stream=torch.cpu.Stream()), mesh=(2,))


def _see_and_double(model: Any, stream: Any = None) -> Found:
    seen: Found = {}

    def double(gradient: Tensor) -> None:
        seen[str(gradient.numel())] = gradient.sum()
        gradient.mul_(2)

    for layer in model:
        layer.set_all_reduce_hook(double, stream=stream)
    backward(model, 0)
    return {key: seen[key] for key in sorted(seen)} | gradients(model)


@torchs_has("set_separate_reduce_scatter_group")
def test_reductions_have_a_group_of_their_own(ranks: RankPool) -> None:
    ranks(2).run(assert_alike, uneven, _set_apart)


def _set_apart(model: Any) -> Found:
    backward(model, 0)
    model.set_separate_reduce_scatter_group()
    if isinstance(model, FSDPModule):
        assert all(one.reduce_comm is not one.comm for one in handles(model) if one.is_sharded)
    backward(model, 1)
    model.set_separate_reduce_scatter_group(False)
    backward(model, 2)
    return gradients(model)


@torchs_has("set_separate_reduce_scatter_group")
def test_collectives_of_the_users_own_stay_when_the_group_changes(ranks: RankPool) -> None:
    ranks(2).run(assert_alike, even, _use_own_apart)


def _use_own_apart(model: Any) -> Found:
    gather, scatter = OwnAllGather(), OwnReduceScatter()
    for layer in model:
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(scatter)
    found: Found = {}
    for number, is_apart in enumerate((True, False)):
        model.set_separate_reduce_scatter_group(is_apart)
        gather.calls.clear()
        scatter.calls.clear()
        backward(model, number)
        assert gather.calls
        assert len(scatter.calls) == 2
        found |= gradients(model, f"{number} ")
    return found


# Several modules in one unit, and none


class Tailed(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = wrap(nn.Linear(5, 6))
        self.norm = nn.LayerNorm(6)
        self.act = wrap(nn.Tanh())
        self.head = nn.Linear(6, 2)
        wrap([self.norm, self.head])

    def forward(self, inputs: Tensor, with_head: bool = True) -> Tensor:
        hidden = self.norm(self.act(self.entry(inputs)))
        return self.head(hidden) if with_head else hidden


def tailed(wrap: Wrap) -> nn.Module:
    return seeded(Tailed, wrap)


@parametrize_pairs(reshards=[None, True, False], world_size=[1, 2])
def test_a_list_of_modules_is_one_unit(ranks: RankPool, world_size: int, reshards: bool | None) -> None:
    ranks(world_size).run(assert_alike, tailed, _train_group, reshard_after_forward=reshards)


def _train_group(model: Any) -> Found:
    found: Found = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        backward(model, number)
        found |= gradients(model, f"{number} ")
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: local(value) for name, value in model.state_dict().items()}


@on_ranks(2)
def test_modules_of_a_list_are_unsharded_together() -> None:
    model: Any = tailed(ours())
    assert type(model.norm).__name__ == "FSDPLayerNorm"
    assert fsdp.fully_shard.state(model.norm) == fsdp.fully_shard.state(model.head)  # type: ignore[attr-defined]
    assert fsdp.fully_shard.state(nn.Linear(2, 2)) is None  # type: ignore[attr-defined]
    assert unit_of(model.norm) is unit_of(model.head)
    model.norm.unshard()
    assert is_whole(model.head)
    model.head.reshard()
    assert_at_rest(model)
    seen = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(is_whole(model.norm)))
    for _ in range(2):
        loss = model(inputs(0)).sum()
        loss.backward()
    assert seen == [True, True]
    assert_at_rest(model)
    assert list(model.state_dict()) == list(tailed(lambda module: module).state_dict())


@on_ranks(2)
def test_modules_of_a_list_may_be_run_at_different_times() -> None:
    model: Any = tailed(ours())
    plain: Any = tailed(lambda module: module)
    for number in range(3):
        rows = [inputs(10 * number + rank) for rank in (0,)]
        for each in (model, plain):
            hidden = each(rows[0], with_head=False)
            cut = hidden.detach().requires_grad_()
            for chunk in cut.split(1):
                each.head(chunk).square().sum().backward()
            hidden.backward(cut.grad)
    for name, param in plain.named_parameters():
        dist.all_reduce(param.grad)
        whole = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(whole, param.grad / dist.get_world_size(), rtol=1e-5, atol=1e-6)
    assert_at_rest(model)


@on_ranks(2)
def test_a_module_without_parameters_can_be_sharded() -> None:
    module: Any = fsdp.fully_shard(nn.Tanh())
    assert isinstance(module, FSDPModule)
    assert module(torch.ones(2)).equal(torch.ones(2).tanh())
    module.unshard()
    module.reshard()
    ignoring = nn.Linear(5, 2)
    fsdp.fully_shard(ignoring, ignored_params=set(ignoring.parameters()))
    ignoring(inputs(0)).sum().backward()
    assert type(ignoring.weight) is nn.Parameter


# A mesh with dimensions for other things


@on_ranks(4)
def test_dimensions_of_a_mesh_are_chosen_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    found = {}
    for dims in (
        fsdp.DataParallelMeshDims("shard", "replicate"),
        fsdp.DataParallelMeshDims(("replicate", "shard")),
        fsdp.DataParallelMeshDims(replicate=("replicate", "shard")),
    ):
        model: Any = seeded(lambda wrap: nn.Linear(5, 4))
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        backward(model, 0)
        found[dims.shard] = model.weight.grad.full_tensor(), model.weight.placements
    (hybrid, two), (flat, one), (replicated, none) = found.values()
    assert (two, one, none) == ((Replicate(), Shard(0)), (Shard(0),), (Replicate(),))
    torch.testing.assert_close(hybrid, flat)
    torch.testing.assert_close(replicated, flat)
    with pytest.raises(ValueError, match="names 'rows'"):
        fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims("rows"))
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        fsdp.DataParallelMeshDims()
    assert mesh_of(4).ndim == 1


@on_ranks(2)
def test_a_list_of_modules_gets_memory_and_dtype_with_the_model_around_it() -> None:
    with torch.device("meta"):
        model: Any = tailed(ours())
    assert model.head.weight.is_meta
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    model(inputs(0).double()).sum().backward()
    assert model.norm.weight.grad.dtype is torch.float64
    with pytest.raises(RuntimeError, match="cannot be cast or moved separately from its unit"):
        model.norm.float()


@on_ranks(1)
def test_modules_whose_parameters_are_all_in_sharded_ones_get_memory() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(fsdp.fully_shard(nn.Linear(5, 4)), fsdp.fully_shard(nn.Linear(4, 2)))
    fsdp.fully_shard(model)
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    backward(model, 0)
