"""`FlatParamHandle` on real ranks: what is in memory, what modules see, what is reduced.

Most of it runs on `Odd`, whose 23 elements divide by nothing.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter, FullyShardedDataParallel
from fsdp.distributed.collectives import LONE_RANK, Communicator, communicator
from fsdp.distributed.communicator import LoneRank
from fsdp.engine.autograd import InternalError
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import take_over
from fsdp.engine.phase import Phase
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.policy import Policy
from fsdp.engine.precision import Precision
from fsdp.engine.shard import Shard
from fsdp.engine.storage import ShardStorage
from fsdp.layers.managed_params import collect, names_of
from fsdp.layers.state_dict.redistribute import assembled
from fsdp.layers.verify import describe_handle
from tests.helpers.calls import summon
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import assert_parity, fully_sharded, nested_mlp, sgd_with_momentum
from tests.helpers.ranks import RankPool


class Odd(nn.Module):
    """0-d, without elements, not contiguous, and one under two names; 23 elements in all."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(3, 5, generator=generator).T)
        self.odd = nn.Parameter(torch.randn(7, generator=generator))
        self.tied = self.odd

    def forward(self, factor: float = 1.0) -> Tensor:
        """Its gradient is ``2 * factor`` times each value, and twice that of `odd`."""
        values = (self.scalar, self.empty, self.transposed, self.odd, self.tied)
        return factor * sum(value.square().sum() for value in values)


NAMES = ("scalar", "empty", "transposed", "odd")
VALUES = {name: param.detach().clone() for name, param in Odd().named_parameters()}
FLAT = torch.cat([value.flatten() for value in VALUES.values()])
ALL_NAMES = (*NAMES, "tied")


def ignore(handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
    """For tests without gradients."""


def take(handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
    """Into the flat gradient, as it is."""
    handle.take_gradient(slot, leaf, 1.0)


def handle_of(
    module: nn.Module, comm: Communicator | None = None, on_gradient: Callable[..., None] = ignore
) -> FlatParamHandle:
    """The module's parameters in one handle, over all ranks if not told otherwise."""
    comm = comm or communicator(dist.group.WORLD, torch.device("cpu"))
    found = collect(module)
    params = list(found)
    flat = FlatParameter.shard_of(
        params, names_of(params, found), comm.rank, comm.world_size, ShardStorage(torch.device("cpu"))
    )
    take_over(found, [flat], type(module).__name__)
    module.register_parameter("flat_param_0", flat)
    places = list(found.values())
    shard = Shard(flat, places, [(module, "flat_param_0")])
    handle = FlatParamHandle(shard, comm, comm, LONE_RANK, Precision(), Policy(True, False, False))
    handle.on_gradient = on_gradient
    handle.rename("the unit", "the unit")
    return handle


def odd(*args: Any, **options: Any) -> tuple[Odd, FlatParamHandle]:
    """Return `Odd` and the handle of its parameters."""
    module = Odd()
    return module, handle_of(module, *args, **options)


def seen(module: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(module, name) for name in ALL_NAMES}


def assert_sharded(handle: FlatParamHandle, module: nn.Module) -> None:
    assert handle.phase is Phase.SHARDED
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    assert all(isinstance(value, Placeholder) for value in seen(module).values())


def assert_whole(handle: FlatParamHandle, module: nn.Module, factor: float = 1.0) -> None:
    assert handle.phase is Phase.UNSHARDED
    assert [seen(module)[name] is leaf for name, leaf in zip(NAMES, handle.unsharded.leaves, strict=True)] == [True] * 4
    for name, value in VALUES.items():
        assert torch.equal(seen(module)[name], factor * value), name


@contextmanager
def allocated() -> Iterator[list[int]]:
    """Bytes that this thread took inside and has not given back, as the allocator counts them."""
    found: list[int] = []
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield found
    # Not from the profile's own sums: those leave out what happens while a send or receive is on its way.
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    found.append(sum(event.nbytes() for event in events))


def held() -> int:
    """Bytes of all tensors that anything in Python refers to."""
    gc.collect()
    # Neither placeholders nor what compilers of other tests have left, which have no memory.
    kinds = (Tensor, nn.Parameter, FlatParameter)
    tensors = [item for item in gc.get_objects() if type(item) in kinds]
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


# Sharding


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_keeps_its_chunk_padded_with_zeros(ranks: RankPool, world_size: int) -> None:
    shards = ranks(world_size).run(_shard)
    size = math.ceil(23 / world_size)
    assert [len(shard) for shard in shards] == [size] * world_size
    assert [value for shard in shards for value in shard] == FLAT.tolist() + [0.0] * (size * world_size - 23)


def _shard() -> list[float]:
    module, handle = odd()
    assert_sharded(handle, module)
    assert dict(module.named_parameters()) == {"flat_param_0": handle.flat_param}
    return handle.flat_param.tolist()


@on_ranks(2, 3)
def test_while_sharded_modules_see_placeholders() -> None:
    module = Odd()
    handle_of(module)
    for name, value in seen(module).items():
        like = VALUES["odd" if name == "tied" else name]
        assert (value.shape, value.dtype, value.device) == (like.shape, like.dtype, like.device)
        assert value.requires_grad
        with pytest.raises(RuntimeError, match=f"^{'odd' if name == 'tied' else name} is sharded.*summon_full_params"):
            value.sum()
    with pytest.raises(RuntimeError, match="scalar is sharded"):
        module()


@on_ranks(2, 3)
def test_while_whole_modules_see_leaves() -> None:
    module, handle = odd()
    handle.wait_for_unshard()
    assert_whole(handle, module)
    assert module.tied is module.odd
    assert module.transposed.is_contiguous(), "row-major like all that is flattened"
    for leaf in handle.unsharded.leaves:
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert isinstance(leaf, nn.Parameter)
    assert dict(module.named_parameters()) == {"flat_param_0": handle.flat_param}
    assert handle.unsharded.full.untyped_storage().nbytes() == handle.layout.padded_numel * 4


@on_ranks(2, 3)
def test_the_phases_of_a_cycle() -> None:
    module, handle = odd()
    handle.unshard()
    assert handle.phase is Phase.UNSHARDING
    assert all(isinstance(value, Placeholder) for value in seen(module).values()), "nobody may read it yet"
    handle.unshard()
    assert handle.phase is Phase.UNSHARDING
    handle.wait_for_unshard()
    assert_whole(handle, module)
    handle.wait_for_unshard()
    handle.unshard()
    assert_whole(handle, module)
    handle.reshard()
    assert_sharded(handle, module)
    handle.reshard()
    assert_sharded(handle, module)
    handle.unshard()
    handle.reshard()  # of what is on its way
    assert_sharded(handle, module)
    handle.wait_for_unshard()
    assert_whole(handle, module)


@on_ranks(2, 3)
def test_leaves_live_as_long_as_the_handle() -> None:
    module, handle = odd()
    leaves, placeholders = list(handle.unsharded.leaves), list(seen(module).values())
    full, versions = handle.unsharded.full, [leaf._version for leaf in leaves]
    for _ in range(3):
        handle.wait_for_unshard()
        assert_whole(handle, module)
        assert all(new is old for new, old in zip(handle.unsharded.leaves, leaves, strict=True))
        assert handle.unsharded.full is full
        begin = full.data_ptr()
        assert [leaf.data_ptr() for leaf in leaves if leaf.numel()] == [begin, begin + 4, begin + 64]
        assert [leaf._version for leaf in leaves] == versions, "gathering is no change of the weights"
        handle.reshard()
        assert all(new is old for new, old in zip(seen(module).values(), placeholders, strict=True))


@on_ranks(2, 3)
def test_what_autograd_saved_is_there_again_after_the_next_gather() -> None:
    module, handle = odd()
    handle.wait_for_unshard()
    inputs = torch.ones(2, 3, requires_grad=True)
    loss = torch.nn.functional.linear(inputs, module.transposed).square().sum()
    handle.reshard()
    noise = torch.full_like(FLAT, math.nan)  # takes the place that was freed
    handle.wait_for_unshard()
    loss.backward()
    assert not noise.isfinite().any()
    plain = torch.ones(2, 3, requires_grad=True)
    torch.nn.functional.linear(plain, VALUES["transposed"]).square().sum().backward()
    torch.testing.assert_close(inputs.grad, plain.grad)  # kernels may add in another order, by how weights are aligned


def test_steps_out_of_turn_are_errors_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    handle = handle_of(Odd(), LoneRank())
    for phase in (Phase.SHARDED, Phase.UNSHARDED):
        with pytest.raises(InternalError, match=f"rank 0, the unit: SHARDED -> {phase.name} is not a legal step"):
            handle._enter(phase)
    assert "fsdp internal error: rank 0, the unit" in capsys.readouterr().err, "autograd may swallow what is raised"


# Memory


@on_ranks(2, 3)
def test_memory_to_the_byte(world_size: int) -> None:
    size = math.ceil(23 / world_size)
    found = {}
    for state in ("sharded", "whole", "resharded"):
        with allocated() as nbytes:
            handle = handle_of(Odd())
            for _ in range(3 if state == "resharded" else 0):
                handle.wait_for_unshard()
                handle.reshard()
            if state == "whole":
                handle.wait_for_unshard()
            handle.comm.settle()
        found[state] = nbytes[0]
        handle.reshard()
        del handle
    assert found == {"sharded": 4 * size, "whole": 4 * (size + size * world_size), "resharded": 4 * size}


@parametrize_pairs(world_size=[2, 3], flatten_parameters=[True, False])
@on_ranks("world_size")
def test_between_steps_a_rank_holds_shards_only(world_size: int, flatten_parameters: bool) -> None:
    units = (47, 77, 37, 3) if flatten_parameters else (1, 35, 7, 3, 1, 77, 33, 3, 1, 3)
    shards = sum(math.ceil(numel / world_size) for numel in units)
    _train_and_watch(flatten_parameters)  # what torch keeps of the first training in a process is not the model's
    before = held()
    trained = _train_and_watch(flatten_parameters)
    found = held() - before
    del trained
    assert found == 4 * shards * 3, "values, gradients and momentum"


def _train_and_watch(flatten_parameters: bool) -> Any:
    model = nested_mlp(fully_sharded(flatten_parameters=flatten_parameters))
    optimizer = sgd_with_momentum(model.parameters())
    inputs = torch.ones(4, 5)
    for number in range(3):
        with allocated() as nbytes:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        if number > 0:
            assert nbytes == [0], "a step gives back all that it takes"
    return model, optimizer


# A shard that changes


def _add_one(handle: FlatParamHandle) -> None:
    with torch.no_grad():
        handle.flat_param.add_(1)


@parametrize_pairs(world_size=[2, 3], state=["sharded", "whole"])
@on_ranks("world_size")
def test_a_changed_shard_is_gathered_again(state: str) -> None:
    module, handle = odd()
    handle.wait_for_unshard()
    if state == "sharded":
        handle.reshard()
    handle.comm.settle()
    _add_one(handle)
    handle.wait_for_unshard()
    assert torch.equal(module.odd, VALUES["odd"] + 1)
    assert torch.equal(module.transposed, VALUES["transposed"] + 1)


@on_ranks(2, 3)
def test_a_buffer_that_is_stale_can_be_freed() -> None:
    module, handle = odd()
    handle.wait_for_unshard()
    handle.comm.settle()
    _add_one(handle)
    handle.reshard()
    assert_sharded(handle, module)


def test_a_stale_lone_handle_is_followed_too() -> None:
    module, handle = odd(LoneRank())
    handle.wait_for_unshard()
    _add_one(handle)
    handle.wait_for_unshard()
    assert torch.equal(module.odd, VALUES["odd"] + 1)
    handle.reshard()


def _load(model: FullyShardedDataParallel) -> None:
    model.load_state_dict(model.state_dict())


def _step(model: FullyShardedDataParallel) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1)


@on_ranks(2)
@torch.no_grad()
def test_a_state_is_what_the_optimizer_left_also_after_a_forward_alone() -> None:
    model = nested_mlp(fully_sharded())
    with torch.enable_grad():
        model(torch.ones(4, 5))  # the root is whole now, for a backward
    for param in model.parameters():
        param.mul_(2)
    sharded_state = model.state_dict()
    for name, value in nested_mlp().state_dict().items():
        assert torch.equal(sharded_state[name], 2 * value), name


CHANGES = {"state_dict": FullyShardedDataParallel.state_dict, "load": _load, "summon": summon, "step": _step}


@parametrize_pairs(change=list(CHANGES), world_size=[1, 3])
@on_ranks("world_size")
def test_a_root_kept_whole_for_a_backward_that_never_came(change: str) -> None:
    inputs = torch.ones(4, 5)
    model = nested_mlp(fully_sharded())
    expected = model(inputs).detach()  # with gradients on, and no backward
    CHANGES[change](model)
    assert torch.equal(model(inputs), expected)
    model(inputs).sum().backward()


@parametrize_pairs(world_size=[2, 3], dtype=[torch.float64, torch.bfloat16])
@on_ranks("world_size")
def test_a_cast_shard_is_followed(dtype: torch.dtype) -> None:
    arrived: list[int] = []
    module, handle = odd(on_gradient=lambda _, slot, leaf: arrived.append(slot))
    handle.wait_for_unshard()
    handle.reshard()
    module.to(dtype)
    assert handle.flat_param.dtype is dtype
    handle.wait_for_unshard()
    for name, value in VALUES.items():
        assert torch.equal(getattr(module, name), value.to(dtype)), name
    module().backward()
    assert sorted(arrived) == [0, 1, 2, 3]
    handle.reshard()
    assert_sharded(handle, module)
    assert {value.dtype for value in seen(module).values()} == {dtype}
    assert handle.shard_state == handle._gathered
    assert handle.unsharded.full.nbytes == handle.layout.padded_numel * dtype.itemsize


@on_ranks(2, 3)
def test_a_cast_model_trains_in_the_new_dtype() -> None:
    model, plain = nested_mlp(fully_sharded()), nested_mlp()
    inputs = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    model(inputs.float()).sum().backward()
    model.zero_grad()
    for net in (model.double(), plain.double()):
        net(inputs).square().sum().backward()
        sgd_with_momentum(net.parameters()).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_shard_replaced_by_something_else_is_an_error() -> None:
    handle = handle_of(Odd())
    shard = handle.flat_param.data
    handle.flat_param.data = torch.zeros(23)
    with pytest.raises(RuntimeError, match=r"the unit: the flat parameter's shard has 23 elements instead of 12"):
        handle.wait_for_unshard()
    handle.flat_param.data = shard
    handle.wait_for_unshard()
    handle.reshard()


# Attributes that were replaced


@pytest.mark.parametrize("state", ["sharded", "whole"])
@on_ranks(2)
def test_an_attribute_that_is_no_parameter_any_more_is_named(state: str) -> None:
    module, handle = odd()
    if state == "whole":
        handle.wait_for_unshard()
    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'odd'"):  # as without sharding
        module.odd = torch.zeros(7)
    with pytest.raises(RuntimeError, match="'odd' of this Odd is sharded, and cannot be"):
        del module.odd
    module.odd = None  # type: ignore[assignment]
    handle.reshard()  # memory is given back whatever was done to the modules
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"the unit: .* odd, tied was removed.*Assign an nn.Parameter"):
        handle.wait_for_unshard()


@pytest.mark.parametrize("state", ["sharded", "whole"])
@on_ranks(3)
def test_a_parameter_that_was_assigned_is_written_to_the_shard(state: str) -> None:
    module, handle = odd()
    if state == "whole":
        handle.wait_for_unshard()
    module.transposed = nn.Parameter(torch.arange(15.0).view(5, 3))
    handle.wait_for_unshard()
    assert torch.equal(module.transposed, torch.arange(15.0).view(5, 3))
    assert module.transposed is handle.unsharded.leaves[2]
    assert [name for name, _ in module.named_parameters()] == ["flat_param_0"]
    handle.reshard()
    assert_sharded(handle, module)


@on_ranks(2)
def test_the_second_name_of_a_shared_parameter_is_named() -> None:
    module, handle = odd()
    module.tied = nn.Parameter(torch.zeros(7))
    with pytest.raises(RuntimeError, match=r"replaced under only some of its names \(odd, tied\)"):
        handle.wait_for_unshard()


@on_ranks(2)
@torch.no_grad()
def test_what_the_error_advises_mends_it() -> None:
    model = fully_sharded()(nn.Linear(3, 2))
    inner = model.module.module
    for _ in range(2):
        inner.weight = None
        with pytest.raises(RuntimeError, match=r"weight was removed, or is no parameter any more.*nn\.Parameter"):
            model(torch.ones(1, 3))
        inner.weight = nn.Parameter(torch.ones(2, 3))
        with model.summon_full_params():
            inner.bias.zero_()
        assert model(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]


# Gradients


@on_ranks(2, 3)
def test_gradients_leave_one_by_one_and_come_back_summed() -> None:
    arrived: list[bool] = []
    module, handle = odd(on_gradient=lambda handle, slot, leaf: arrived.append(handle.take_gradient(slot, leaf, 2.0)))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number in (1, 2):
        handle.wait_for_unshard()
        handle.begin_backward(GradientSync.FULL, fills_unused=False)
        module(rank + 1.0).backward()
        assert arrived == [False, False, False, True] * number, "once per parameter, the shared one too"
        assert all(leaf.grad is None for leaf in handle.unsharded.leaves)
        handle.reshard()
        handle.accept(handle.reduce().wait())
        assert handle.gradients.is_empty
        # The sum over ranks of 2 * (rank + 1) times the value, divided by 2; `odd` counts twice.
        once = FLAT * world_size * (world_size + 1) / 2
        expected = number * torch.cat([once[:16], 2 * once[16:]])
        shard = torch.zeros(handle.layout.shard_numel)
        mine = expected[rank * len(shard) :][: len(shard)]
        shard[: len(mine)] = mine
        torch.testing.assert_close(handle.flat_param.grad, shard)


@on_ranks(2, 3)
def test_accumulated_gradients_are_reduced_once() -> None:
    module, handle = odd(on_gradient=take)
    for _ in range(3):
        handle.wait_for_unshard()
        handle.begin_backward(GradientSync.FULL, fills_unused=False)
        module().backward()
        handle.mark_unreduced()
        assert isinstance(handle.flat_param.grad, Placeholder)
        with pytest.raises(RuntimeError, match=r"gradients of the unit were accumulated under no_sync\(\)"):
            handle.flat_param.grad.norm()
    handle.accept(handle.reduce().wait())
    scalar = handle.flat_param.grad[0] if dist.get_rank() == 0 else torch.tensor(9.0 * dist.get_world_size())
    torch.testing.assert_close(scalar, torch.tensor(2 * 1.5 * 3.0 * dist.get_world_size()))
    assert handle.gradients.is_empty


@on_ranks(2)
def test_zeroing_gradients_drops_what_was_accumulated() -> None:
    module, handle = odd(on_gradient=take)
    for zero in (lambda: setattr(handle.flat_param, "grad", None), handle.drop_unreduced):
        handle.wait_for_unshard()
        handle.begin_backward(GradientSync.FULL, fills_unused=False)
        module(1000.0).backward()
        handle.mark_unreduced()
        zero()
        assert handle.flat_param.grad is None
        handle.begin_backward(GradientSync.FULL, fills_unused=False)
        assert handle.gradients.is_empty
        module().backward()
        reduced = handle.reduce().wait()
        assert reduced.abs().max() <= 2 * 4 * FLAT.abs().max()


@on_ranks(2)
def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    module, handle = odd(on_gradient=take)
    handle.wait_for_unshard()
    handle.begin_backward(GradientSync.FULL, fills_unused=False)
    module.scalar.square().backward()
    assert handle.gradients.missing
    reduced = handle.reduce().wait()
    assert reduced.tolist() == ([6.0] + [0.0] * 11 if dist.get_rank() == 0 else [0.0] * 12)


@on_ranks(2)
def test_a_frozen_handle_has_no_gradients() -> None:
    module = Odd().requires_grad_(False)
    handle = handle_of(module)
    assert not handle.requires_grad
    handle.wait_for_unshard()
    assert not any(leaf.requires_grad for leaf in handle.unsharded.leaves)
    assert not module().requires_grad
    assert handle.gradients.is_empty


# Copies out and values in


@parametrize_pairs(world_size=[2, 3], state=["sharded", "whole"])
@on_ranks("world_size")
def test_full_copies_have_memory_of_their_own(state: str) -> None:
    module, handle = odd()
    if state == "whole":
        handle.wait_for_unshard()
    copies = assembled(handle, at_first=False)
    assert all(map(torch.equal, copies, VALUES.values()))
    for value in copies:
        value.fill_(math.nan)
    handle.wait_for_unshard()
    assert_whole(handle, module)


@on_ranks(2)
def test_full_copies_are_of_the_shards_as_they_are_now() -> None:
    _, handle = odd()
    handle.wait_for_unshard()
    handle.comm.settle()
    _add_one(handle)
    assert torch.equal(assembled(handle, at_first=False)[3], VALUES["odd"] + 1)


@on_ranks(2, 3)
def test_every_rank_stores_its_part() -> None:
    module, handle = odd()
    for slot, value in enumerate(VALUES.values()):
        handle.values.store(slot, nn.Parameter(3 * value.double()))
    handle.wait_for_unshard()
    assert_whole(handle, module, factor=3.0)
    with pytest.raises(ValueError, match=r"transposed: expected shape \(5, 3\), got \(3, 5\)"):
        handle.values.store(2, torch.zeros(3, 5))


@on_ranks(2)
def test_places_are_listed_in_the_fields_names() -> None:
    module, handle = odd()
    assert [(info.module, info.name, info.fqn) for info in handle.param_infos] == [(module, n, n) for n in NAMES]
    (shared,) = handle.shared_param_infos
    assert (shared.module, shared.name, shared.fqn, shared.primary.fqn) == (module, "tied", "tied", "odd")
    assert describe_handle(handle) == (
        "torch.float32 requires_grad=True over 2 ranks by DirectExchange: "
        "scalar[], empty[0, 4], transposed[5, 3], odd[7]"
    )


# Small and lone ones


class Pair(nn.Module):
    """Two elements, fewer than three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.tensor([2.0, 3.0]))


def test_fewer_elements_than_ranks(ranks: RankPool) -> None:
    assert ranks(3).run(_shard_a_pair) == [[2.0, 12.0], [3.0, 18.0], [0.0, 0.0]]


def _shard_a_pair() -> list[float]:
    module = Pair()
    handle = handle_of(module, on_gradient=take)
    handle.wait_for_unshard()
    assert module.pair.tolist() == [2.0, 3.0]
    handle.begin_backward(GradientSync.FULL, fills_unused=False)
    module.pair.square().sum().backward()
    handle.reshard()
    handle.accept(handle.reduce().wait())
    return [handle.flat_param.item(), handle.flat_param.grad.item()]


class Nothing(nn.Module):
    """A parameter without elements, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(3, 0))


@on_ranks(2)
def test_nothing_to_shard_needs_no_other_rank() -> None:
    if dist.get_rank() == 0:
        return
    module = Nothing()
    handle = handle_of(module, on_gradient=take)
    for _ in range(2):
        handle.wait_for_unshard()
        handle.begin_backward(GradientSync.FULL, fills_unused=False)
        (torch.ones(2, 3) @ module.nothing).sum().backward()
        handle.accept(handle.reduce().wait())
        handle.reshard()
    assert handle.flat_param.shape == handle.flat_param.grad.shape == (0,)
    assert assembled(handle, at_first=False)[0].shape == (3, 0)


def test_alone_the_whole_is_the_shard_itself() -> None:
    module, handle = odd(LoneRank())
    assert not handle.is_sharded
    assert handle.unsharded.full.data_ptr() == handle.flat_param.data_ptr()
    for _ in range(2):
        for leaf, name in zip(handle.unsharded.leaves, NAMES, strict=True):
            assert getattr(module, name) is leaf, "there is nothing that could be missing"
        handle.wait_for_unshard()
        assert_whole(handle, module)
        handle.reshard()
        assert handle.unsharded.full.untyped_storage().nbytes() == 23 * 4
    with torch.no_grad():
        handle.flat_param.mul_(2)
    assert torch.equal(module.odd, 2 * VALUES["odd"])
    handle.values.store(3, VALUES["odd"])
    assert torch.equal(module.tied, VALUES["odd"])


def test_alone_a_cast_shard_is_followed() -> None:
    module, handle = odd(LoneRank())
    module.double()
    handle.wait_for_unshard()
    assert torch.equal(module.odd, VALUES["odd"].double())
    assert handle.unsharded.full.data_ptr() == handle.flat_param.data_ptr()


def test_alone_a_step_needs_no_gather() -> None:
    arrived: list[bool] = []
    module, handle = odd(LoneRank(), lambda handle, slot, leaf: arrived.append(handle.take_gradient(slot, leaf, 1.0)))
    handle.wait_for_unshard()
    module().backward()
    assert arrived == [False, False, False, True]
    handle.accept(handle.reduce().wait())
    torch.optim.SGD([handle.flat_param], lr=0.5).step()
    assert not module.scalar.any(), "1.5 - 0.5 * 2 * 1.5"
    assert torch.equal(module.odd, -VALUES["odd"])


# Recurrent modules keep their weights in a second place


class Recurrent(nn.Module):
    """Reads its inputs one after the other."""

    def __init__(self, wrap: Wrap, make: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = make(1, 4, batch_first=True)
        self.readout = wrap(nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.recurrent(inputs.unsqueeze(-1))
        return self.readout(hidden[:, -1, :4])


RECURRENT: dict[str, Callable[..., nn.RNNBase]] = {
    "RNN": nn.RNN,
    "GRU": partial(nn.GRU, bidirectional=True, bias=False),
    "LSTM": partial(nn.LSTM, num_layers=2),
}


def recurrent(wrap: Wrap = keep, *, kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return wrap(Recurrent(wrap, RECURRENT[kind]))


@parametrize_pairs(world_size=[2, 3], kind=list(RECURRENT))
def test_recurrent_modules_train_like_unsharded(ranks: RankPool, world_size: int, kind: str) -> None:
    ranks(world_size).run(assert_parity, partial(recurrent, kind=kind), sgd_with_momentum, wrap=fully_sharded())


@pytest.mark.parametrize("options", [{"flatten_parameters": False}, {"reshard_after_forward": False}], ids=str)
def test_recurrent_modules_train_with_every_option(ranks: RankPool, options: dict[str, Any]) -> None:
    model = partial(recurrent, kind="LSTM")
    ranks(3).run(assert_parity, model, sgd_with_momentum, wrap=fully_sharded(**options))


@on_ranks(2)
def test_summoned_recurrent_modules_compute_with_what_is_summoned() -> None:
    model, plain = recurrent(fully_sharded(), kind="LSTM"), recurrent(kind="LSTM")
    inputs = torch.linspace(-1, 1, 20).view(4, 5)
    for _ in range(2):
        with model.summon_full_params(), torch.no_grad():
            assert torch.equal(model(inputs), plain(inputs))
            for net in (model.module.module, plain):
                net.recurrent.weight_hh_l0.mul_(2)
            assert torch.equal(model(inputs), plain(inputs))
        assert torch.equal(model(inputs), plain(inputs))
