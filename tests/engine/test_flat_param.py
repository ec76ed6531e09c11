"""`FlatParamHandle` on real ranks: what is in memory, what modules see, what is reduced.

Most of it runs on `Odd`, whose 23 elements divide by nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded, nested_mlp, sgd_with_momentum


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


NAMES = ("scalar", "empty", "transposed", "odd")
VALUES = {name: param.detach().clone() for name, param in Odd().named_parameters()}
ALL_NAMES = (*NAMES, "tied")


def take(handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
    """Into the flat gradient, as it is."""
    handle.take_gradient(slot, leaf)


def handle_of(module: nn.Module, comm: Communicator | None = None) -> FlatParamHandle:
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
    handle.on_gradient = take
    handle.rename("the unit", "the unit")
    return handle


def odd(comm: Communicator | None = None) -> tuple[Odd, FlatParamHandle]:
    """Return `Odd` and the handle of its parameters."""
    module = Odd()
    return module, handle_of(module, comm)


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


# Sharding


@on_ranks(3)
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


@on_ranks(3)
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


@on_ranks(3)
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


def test_steps_out_of_turn_are_errors_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    handle = handle_of(Odd(), LoneRank())
    for phase in (Phase.SHARDED, Phase.UNSHARDED):
        with pytest.raises(InternalError, match=f"rank 0, the unit: SHARDED -> {phase.name} is not a legal step"):
            handle._enter(phase)
    assert "fsdp internal error: rank 0, the unit" in capsys.readouterr().err, "autograd may swallow what is raised"


# Memory


@pytest.mark.parametrize("flatten_parameters", [True, False])
@on_ranks(2)
def test_a_step_gives_back_all_that_it_takes(flatten_parameters: bool) -> None:
    model = nested_mlp(fully_sharded(flatten_parameters=flatten_parameters))
    optimizer = sgd_with_momentum(model.parameters())
    inputs = torch.ones(4, 5)
    for number in range(3):
        with allocated() as nbytes:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        assert number == 0 or nbytes == [0]


# Attributes that were replaced


@pytest.mark.parametrize("state", ["sharded", "whole"])
@on_ranks(2)
def test_an_attribute_that_is_no_parameter_any_more_is_named(state: str) -> None:
    module, handle = odd()
    if state == "whole":
        handle.wait_for_unshard()
    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'odd'"):  # as without sharding
        module.odd = torch.zeros(7)
    with pytest.raises(RuntimeError, match="'odd' of this Odd is sharded, and can no longer be"):
        del module.odd
    module.odd = None  # type: ignore[assignment]
    handle.reshard()  # memory is given back whatever was done to the modules
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"the unit: .* odd, tied was removed.*Assign an nn.Parameter"):
        handle.wait_for_unshard()


# Names


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
    handle = handle_of(module)
    for _ in range(2):
        handle.wait_for_unshard()
        handle.begin_backward(GradientSync.FULL)
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


# Recurrent modules keep their weights in a second place


@on_ranks(2)
def test_summoned_recurrent_modules_compute_with_what_is_summoned() -> None:
    plain = nn.LSTM(1, 4, num_layers=2)
    model: Any = FullyShardedDataParallel(copy.deepcopy(plain), sync_module_states=True)
    plain.load_state_dict(model.state_dict())
    inputs = torch.linspace(-1, 1, 20).view(4, 5, 1)
    for _ in range(2):
        with model.summon_full_params(), torch.no_grad():
            assert torch.equal(model(inputs)[0], plain(inputs)[0])
            for net in (model.module.module, plain):
                net.weight_hh_l0.mul_(2)
            assert torch.equal(model(inputs)[0], plain(inputs)[0])
        assert torch.equal(model(inputs)[0], plain(inputs)[0])
