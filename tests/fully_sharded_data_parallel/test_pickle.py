"""Pickled models: groups of ranks stay behind, and are assigned as attributes afterwards, as FairScale has it.

That what was pickled goes on as its original would, whatever the options, is in `test_copies_options`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel
from fsdp.distributed.collectives import DirectExchange, communicator
from fsdp.layers.offload import DiskFlatParameter
from tests.helpers.copied_twins import (
    FLAT,
    ORIGINAL,
    UNFLATTENED,
    CopiedTwins,
    assert_goes_on_alike,
    connected,
    every_form,
    nested,
    shard_bytes,
    state_of,
    through_pickle,
    train,
    wrappers_in,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.memory import handles_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, adamw, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import batch, score

ASK_FOR_GROUPS = r"unpickled as rank \d of \d, and process groups cannot be pickled: assign `process_group` on every"


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch(item: Any, **how: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(item, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False, **how)


# There and back


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_goes_on_from_its_file(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """The model and its optimizer in one file per rank; another run reads them."""
    there = ranks(world_size).run(_save, tmp_path)
    here = ranks(world_size).run(_load_and_train, tmp_path)
    for expected, found in zip(there, here, strict=True):
        assert_same_state(found, expected)


def _save(folder: Path) -> Any:
    model = nested(fully_sharded(use_orig_params=True))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 0, 1)
    torch.save((model, optimizer), folder / f"{dist.get_rank()}.pt")
    train(model, optimizer, 2, 3)
    return state_of(model)


def _load_and_train(folder: Path) -> Any:
    model, optimizer = connected(torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False))
    train(model, optimizer, 2, 3)
    return state_of(model)


@on_ranks(2)
def test_a_mapped_file_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(nested(fully_sharded()), path)
    models = [connected(torch.load(path, weights_only=False, mmap=mapped)) for mapped in (True, False)]
    for model in models:
        train(model, sgd_with_momentum(model.parameters()), 0)
    assert_same_state(state_of(models[0]), state_of(models[1]))


@every_form
@on_ranks(1, 2)
def test_a_file_has_the_shards_once(options: dict[str, Any]) -> None:
    small, large = (
        FullyShardedDataParallel(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)), **options)
        for width in (4, 4096)
    )
    sizes = []
    for model in (small, large):
        model(torch.ones(1, 16)).sum().backward()  # gradients are not saved
        buffer = io.BytesIO()
        torch.save(model, buffer)
        sizes.append(buffer.tell())
    assert sizes[1] - sizes[0] == pytest.approx(shard_bytes(large) - shard_bytes(small), rel=0.01)


@on_ranks(2)
def test_shards_on_disk_come_back_into_files_of_their_own(tmp_path: Path) -> None:
    for options in (FLAT, ORIGINAL):
        model = nested(fully_sharded(offload="disk", offload_folder=tmp_path, **options))
        optimizer = adamw(model.parameters())
        train(model, optimizer, 0)
        copied, its_optimizer = through_pickle((model, optimizer))
        for handle, other in zip(handles_of(copied), handles_of(model), strict=True):
            assert isinstance(handle.flat_param, DiskFlatParameter)
            assert handle.storage.files is other.storage.files
            assert handle.storage.files.holds(handle.flat_param)
            assert handle.flat_param.data_ptr() != other.flat_param.data_ptr()
        train(copied, its_optimizer, 1)
        for param in copied.parameters():
            kept = its_optimizer.state[param]["exp_avg"]
            assert param.shard_storage.files.holds(kept) or not kept.numel()
        assert not torch.equal(state_of(copied)["scale"], state_of(model)["scale"])


def test_one_shard_from_a_disk_is_an_ordinary_tensor_when_it_is_read_alone(tmp_path: Path) -> None:
    """It has no unit any more, and optimizer state for it goes to memory."""
    model = FullyShardedDataParallel(nn.Linear(5, 3), Alone(), offload="disk", offload_folder=tmp_path)
    torch.save(model.params[0], tmp_path / "param.pt")
    found = torch.load(tmp_path / "param.pt")  # with weights_only=True
    assert torch.equal(found, model.params[0])
    found.grad = torch.ones(18)
    adamw([found]).step()


# Groups


@on_ranks(2)
def test_groups_are_missing_from_every_wrapper_until_they_are_assigned() -> None:
    model = pickled(nested(fully_sharded()))
    wrappers = wrappers_in(model)
    assert len(wrappers) == 4
    for wrapper in wrappers:
        assert wrapper.process_group == wrapper.process_group_reduce_scatter == "MISSING"
        assert not wrapper.is_connected
        assert (wrapper.rank, wrapper.world_size) == (dist.get_rank(), 2)
        wrapper.process_group = dist.group.WORLD
        assert wrapper.process_group is wrapper.process_group_reduce_scatter is dist.group.WORLD
        assert wrapper.is_connected
    train(model, sgd_with_momentum(model.parameters()), 0)


USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(torch.ones(1, 5)),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(nested().state_dict()),
    "summon_full_params": lambda model: model.summon_full_params().__enter__(),
    "clip_grad_norm_": lambda model: model.clip_grad_norm_(1.0),
    "no_sync": lambda model: model.no_sync().__enter__(),
    "forward of a part": lambda model: model.module.module.gate(torch.ones(1, 3)),
}


@parametrize_pairs(use=list(USES), options=[FLAT, ORIGINAL, UNFLATTENED])
@on_ranks(2)
def test_a_use_without_groups_says_what_to_assign_and_does_no_harm(use: str, options: dict[str, Any]) -> None:
    original = nested(fully_sharded(**options))
    model = pickled(original)
    with pytest.raises(RuntimeError, match=ASK_FOR_GROUPS):
        USES[use](model)
    connected(model)
    assert_same_state(state_of(model), state_of(original))
    train(model, sgd_with_momentum(model.parameters()), 0)


@on_ranks(2)
def test_a_wrapper_that_was_forgotten_is_noticed_before_anything_is_gathered() -> None:
    model = pickled(nested(fully_sharded()))
    forgotten = model.module.module.gate
    for wrapper in wrappers_in(model):
        if wrapper is not forgotten:
            wrapper.process_group = dist.group.WORLD
    begun = mock.patch.object(DirectExchange, "all_gather", side_effect=AssertionError("something was gathered"))
    with begun, pytest.raises(RuntimeError, match=ASK_FOR_GROUPS):
        model(torch.ones(1, 5))
    assert [wrapper.is_connected for wrapper in wrappers_in(model)].count(False) == 1
    forgotten.process_group = dist.group.WORLD
    train(model, sgd_with_momentum(model.parameters()), 0)


@on_ranks(2)
def test_a_gather_that_could_not_begin_leaves_the_model_usable() -> None:
    model = nested(fully_sharded())
    lost = mock.patch.object(DirectExchange, "all_gather", side_effect=ConnectionError("a peer is gone"))
    for _ in range(2):
        with lost, pytest.raises(ConnectionError, match="a peer is gone"):
            model(torch.ones(1, 5))
    assert_goes_on_alike(model, sgd_with_momentum, through_pickle)


class Stranger:
    """A group of another size, or in which this rank is another one."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@on_ranks(2)
def test_a_group_in_which_the_shards_do_not_fit_is_refused() -> None:
    for model in (pickled(nested(fully_sharded())), nested(fully_sharded())):
        before = model.process_group
        for rank, size in ((1 - dist.get_rank(), 2), (dist.get_rank(), 3), (0, 1)):
            with pytest.raises(ValueError, match=rf"holds the shards of rank {dist.get_rank()} of 2, but is rank"):
                model.process_group = Stranger(rank, size)
        with pytest.raises(TypeError, match="process_group must be a process group that this rank is in"):
            model.process_group = "WORLD"
        assert model.process_group is before
        train(connected(model), sgd_with_momentum(model.parameters()), 0)


@pytest.mark.parametrize("first", ["process_group", "process_group_reduce_scatter"])
@on_ranks(2)
def test_the_two_groups_are_assigned_in_any_order(first: str) -> None:
    groups = {"process_group": dist.new_group(), "process_group_reduce_scatter": dist.new_group()}
    model = pickled(nested(fully_sharded()))
    for wrapper in wrappers_in(model):
        for name in sorted(groups, key=lambda name: name != first):
            setattr(wrapper, name, groups[name])
        assert {name: getattr(wrapper, name) for name in groups} == groups
    device = model.compute_device
    for handle in handles_of(model):
        assert handle.comm is communicator(groups["process_group"], device)
        assert handle.reduce_comm is communicator(groups["process_group_reduce_scatter"], device)
    train(model, sgd_with_momentum(model.parameters()), 0)


@on_ranks(2)
def test_none_stands_for_the_defaults() -> None:
    model = pickled(nested(fully_sharded()))
    for wrapper in wrappers_in(model):
        wrapper.process_group = None
        wrapper.process_group_reduce_scatter = None
        assert wrapper.process_group is wrapper.process_group_reduce_scatter is dist.group.WORLD
    train(model, sgd_with_momentum(model.parameters()), 0)


@on_ranks(2)
def test_a_live_model_changes_over_to_another_group_between_steps() -> None:
    twins = CopiedTwins.of(nested, sgd_with_momentum)
    twins.train(0, 1)
    group = dist.new_group()
    for wrapper in wrappers_in(twins.sharded):
        wrapper.process_group = group
    assert {handle.comm for handle in handles_of(twins.sharded)} == {communicator(group, torch.device("cpu"))}
    twins.train(2)
    for wrapper in wrappers_in(twins.sharded):
        wrapper.process_group_reduce_scatter = dist.group.WORLD
    twins.train(3)
    twins.assert_close()


@on_ranks(2)
def test_a_group_is_not_changed_in_the_middle_of_a_forward() -> None:
    model = nested(fully_sharded())
    group = dist.new_group()
    for name in ("process_group", "process_group_reduce_scatter"):

        def change(module: Any, args: Any, output: Any, name: str = name) -> None:
            with pytest.raises(RuntimeError, match="in the middle of a forward or backward"):
                setattr(model, name, group)

        hook = model.module.module.entry.register_forward_hook(change)
        train(model, sgd_with_momentum(model.parameters()), 0)
        hook.remove()
        assert getattr(model, name) is dist.group.WORLD


# A world of one


@pytest.mark.parametrize("travel", [pickled, through_torch])
@every_form
def test_a_world_of_one_needs_no_groups_afterwards(travel: Callable[[Any], Any], options: dict[str, Any]) -> None:
    """Nor `torch.distributed`: a dummy with ``rank()`` and ``size()`` is enough to wrap."""
    model = nested(fully_sharded(process_group=Alone(), process_group_reduce_scatter=None, **options))
    plain = nested()
    inputs = batch(0, 0).float()
    for _ in range(2):
        model = travel(model)
        assert model.is_connected
        assert model.process_group == "MISSING"
        optimizers = [sgd_with_momentum(each.parameters()) for each in (model, plain)]
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            score(each(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        sharded_state = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(sharded_state[name], value)
    group = Alone()
    for wrapper in wrappers_in(model):
        wrapper.process_group, wrapper.process_group_reduce_scatter = group, None
        assert wrapper.process_group is group
    model(inputs)


# Before it is connected


@on_ranks(2)
def test_an_unconnected_model_can_be_copied_and_pickled_again() -> None:
    original = nested(fully_sharded())
    expected = state_of(original)
    for model in (copy.deepcopy(pickled(original)), pickled(pickled(original)), copy.copy(pickled(original))):
        assert not model.is_connected
        assert_same_state(state_of(connected(model)), expected)


def test_a_rank_s_file_can_be_looked_at_without_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save, tmp_path)
    model, _ = torch.load(tmp_path / "1.pt", weights_only=False)
    names = [name for name, _ in nested().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    with pytest.raises(RuntimeError, match="unpickled as rank 1 of 2"):
        model(torch.ones(1, 5))


# What pickle itself has to say


@on_ranks(2)
def test_what_cannot_be_pickled_gives_pythons_own_error() -> None:
    model = nested(fully_sharded())
    model.module.module.activation = lambda inputs: inputs
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"[Cc]an't (pickle|get).*lambda"):
        pickle.dumps(model)
    del model.module.module.activation
    assert_goes_on_alike(model, sgd_with_momentum, through_pickle)


@pytest.mark.parametrize("save", [pickle.dumps, through_torch], ids=["pickle", "torch.save"])
@on_ranks(2)
def test_a_weight_is_refused_by_itself_also_after_a_pickling_that_failed(save: Callable[[Any], Any]) -> None:
    model = nested(fully_sharded())
    model.module.module.hook = lambda: None
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        save(model)
    weight = next(module.weight for module in model.modules() if isinstance(module, nn.Linear))
    with pytest.raises(RuntimeError, match="sharded"):
        save(weight)


@on_ranks(1)
def test_the_safe_way_to_load_refuses_a_model_as_it_does_any_module() -> None:
    buffer = io.BytesIO()
    torch.save(nested(fully_sharded()), buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(buffer)
