"""`copy.deepcopy` of wrapped models: each rank copies its shards, and the two models go ways of their own.

With which options is in `test_copies_options`, what a copy costs and how it is used beside its original in
`test_copies_together`, pickling in `test_pickle`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, get_fsdp_instances
from tests.helpers.copied_twins import (
    FLAT,
    ORIGINAL,
    UNFLATTENED,
    CopiedTwins,
    Travel,
    assert_goes_on_alike,
    every_form,
    every_travel,
    nested,
    recurrent,
    state_of,
    through_pickle,
    tied_and_frozen,
    train,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.memory import handles_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, adamw, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import batch, score

# Independent, and right


@parametrize_cases(
    at_most=5,
    world_size=[2, 3, 1],
    make_optimizer=[sgd_with_momentum, adamw],
    options=[FLAT, ORIGINAL, UNFLATTENED],
    make=[nested, tied_and_frozen, recurrent],
    travel=[copy.deepcopy, through_pickle],
)
@on_ranks("world_size")
def test_pain_point_12_a_copy_and_its_original_train_apart_as_plain_models_do(case: Case) -> None:
    first = CopiedTwins.of(case.make, case.make_optimizer, **case.options)
    first.train(0, 1)
    second = first.copied(case.travel)
    second.assert_close()
    second.train(2, 3, 4)
    first.assert_close()  # what the copy has learned is not in it
    first.train(5, 6)
    first.assert_close()
    second.assert_close()


@every_form
@on_ranks(2)
def test_a_copy_made_before_the_first_use_trains(options: dict[str, Any]) -> None:
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    second = first.copied()
    for twins in (second, first):
        twins.train(0, 1)
        twins.assert_close()


@parametrize_pairs(options=[FLAT, ORIGINAL, UNFLATTENED], world_size=[1, 2])
@on_ranks("world_size")
def test_a_copy_made_between_forward_and_backward_trains_and_so_does_the_original(options: dict[str, Any]) -> None:
    """After a forward the root is still whole."""
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    first.train(0)
    loss = score(first.sharded(batch(1, dist.get_rank())))
    second = first.copied()
    assert not any(
        handle.unsharded.full.untyped_storage().nbytes() for handle in handles_of(second.sharded) if handle.is_sharded
    )
    loss.backward()
    for rank in range(dist.get_world_size()):
        (score(first.plain(batch(1, rank))) / dist.get_world_size()).backward()
    first.optimize()
    second.train(2)
    first.assert_close()
    second.assert_close()


@parametrize_pairs(options=[FLAT, ORIGINAL, UNFLATTENED], world_size=[1, 2])
@on_ranks("world_size")
def test_a_copy_made_in_inference_mode_trains(options: dict[str, Any]) -> None:
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    with torch.inference_mode():
        first.sharded(batch(0, 0))
        copied = copy.deepcopy(first.sharded)
        copied(batch(0, 0))
    second = CopiedTwins(copied, first.plain, (sgd_with_momentum(copied.parameters()), first.optimizers[1]))
    second.train(0, 1)
    second.assert_close()


@every_form
@on_ranks(2)
def test_gradients_are_not_copied(options: dict[str, Any]) -> None:
    """Neither those of a backward nor what is accumulated; the original keeps both."""
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    first.backward(0)
    with first.sharded.no_sync():
        score(first.sharded(batch(1, dist.get_rank()))).backward()
    second = first.copied()
    assert all(param.grad is None for param in second.sharded.parameters())
    second.train(2)  # which an optimizer would refuse if something unreduced had come along
    second.assert_close()
    for rank in range(dist.get_world_size()):
        (score(first.plain(batch(1, rank))) / dist.get_world_size()).backward()
    first.backward(3)
    first.optimize()
    first.assert_close()


@every_form
@on_ranks(2)
def test_what_users_put_in_the_place_of_a_parameter_is_copied(options: dict[str, Any]) -> None:
    """It is in no shard before the next gather."""
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    first.train(0)
    for module in (first.sharded.module.module, first.plain):
        module.entry.weight = nn.Parameter(torch.full((7, 5), 0.25))
    if "use_orig_params" in options:
        piece = dict(first.sharded.named_parameters())["exit.bias"]
        piece.data = torch.full_like(piece, 3.0)
        first.plain.exit.bias.data.fill_(3.0)
    CopiedTwins(copy.deepcopy(first.sharded), first.plain, first.optimizers).assert_close()
    first.assert_close()


# Other things to copy


@every_form
@on_ranks(2)
def test_what_users_write_to_unsharded_parameters_is_copied(options: dict[str, Any]) -> None:
    model: Any = FullyShardedDataParallel(nn.Linear(5, 3), reshard_after_forward=False, **options)
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    with torch.no_grad():
        model.module.module.weight.fill_(7.0)
    assert copy.deepcopy(model).state_dict()["weight"].eq(7.0).all()
    assert model.state_dict()["weight"].eq(7.0).all()


@parametrize_pairs(travel=[copy.deepcopy, through_pickle], options=[FLAT, ORIGINAL, UNFLATTENED])
@on_ranks(2)
def test_a_parent_is_copied_with_the_wrapped_models_in_it(travel: Travel, options: dict[str, Any]) -> None:
    parent = nn.Sequential(nested(fully_sharded(**options)), nn.Tanh(), FullyShardedDataParallel(nn.Linear(1, 1)))
    copied = assert_goes_on_alike(parent, sgd_with_momentum, travel)
    assert len(get_fsdp_instances(copied)) == len(get_fsdp_instances(parent)) == 5


@every_form
@on_ranks(2)
def test_a_wrapper_inside_can_be_copied_and_used_by_itself(options: dict[str, Any]) -> None:
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    first.train(0)
    inner, plain = copy.deepcopy((first.sharded.module.module.trunk, first.plain.trunk))
    second = CopiedTwins(inner, plain, (sgd_with_momentum(inner.parameters()), sgd_with_momentum(plain.parameters())))
    for number in (1, 2):
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(number))
        for model in (inner, plain):
            score(model(inputs)).backward()
        second.optimize()
    second.assert_close()
    first.train(3)
    first.assert_close()


@parametrize_pairs(travel=[copy.deepcopy, through_pickle], options=[FLAT, ORIGINAL, UNFLATTENED], world_size=[1, 2])
def test_the_module_inside_can_be_copied_without_its_wrapper(
    ranks: RankPool, travel: Travel, options: dict[str, Any], world_size: int
) -> None:
    """Its unit comes along, so it gathers as before. At world size 1 pickling is enough; else it has lost its ranks."""
    if travel is copy.deepcopy or world_size == 1:
        ranks(world_size).run(_copy_inside, travel, options)


def _copy_inside(travel: Travel, options: dict[str, Any]) -> None:
    first = CopiedTwins.of(nested, sgd_with_momentum, **options)
    first.train(0)
    first.sharded(batch(1, dist.get_rank()))  # the root shows its weights
    inner, plain = travel(first.sharded.module.module), copy.deepcopy(first.plain)
    before = state_of(first.sharded)
    optimizers = (sgd_with_momentum(inner.parameters()), sgd_with_momentum(plain.parameters()))
    second = CopiedTwins(inner, plain, optimizers)
    second.train(2, 3)
    for rank in range(dist.get_world_size()):
        found = inner(batch(4, rank))
        torch.testing.assert_close(found, plain(batch(4, rank)), rtol=1e-9, atol=1e-11)
    assert_same_state(state_of(first.sharded), before)


@on_ranks(2)
def test_a_part_of_a_unit_that_is_copied_still_says_that_it_is_sharded() -> None:
    model = nested(fully_sharded())
    entry = copy.deepcopy(model.module.module.entry)
    with pytest.raises(RuntimeError, match=r"entry\.weight is sharded"):
        entry(torch.ones(1, 5))


class Labelled(FullyShardedDataParallel):
    def __init__(self, module: nn.Module, label: list[str], **options: Any) -> None:
        super().__init__(module, **options)
        self.label = label


@every_travel
@on_ranks(2)
def test_a_subclass_is_copied_with_its_attributes(travel: Travel) -> None:
    model = Labelled(nn.Linear(5, 3), ["encoder"])
    copied = travel(model)
    assert type(copied) is Labelled
    assert copied.label == ["encoder"]
    assert copied.label is not model.label


@on_ranks(2)
def test_hooks_of_users_are_copied_and_ours_still_run_around_them() -> None:
    model, note = nested(fully_sharded()), Note()
    model.register_forward_hook(note)
    copied, its_note = copy.deepcopy((model, note))
    score(copied(batch(0, 0).float())).backward()
    assert (note.calls, its_note.calls) == (0, 1)


class Note:
    """A hook."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1


@every_form
@on_ranks(2)
def test_a_shallow_copy_shares_everything_as_torchs_does(options: dict[str, Any]) -> None:
    model = nested(fully_sharded(**options))
    shallow = copy.copy(model)
    assert all(one is other for one, other in zip(shallow.parameters(), model.parameters(), strict=True))
    assert shallow.process_group is model.process_group is dist.group.WORLD
    train(shallow, sgd_with_momentum(shallow.parameters()), 0)
    assert_same_state(state_of(shallow), state_of(model))


def test_ranks_of_an_own_group_are_shared_and_no_group_is_copied() -> None:
    group = Alone()
    model = nested(fully_sharded(process_group=group))
    for wrapper in get_fsdp_instances(copy.deepcopy(model)):
        assert wrapper.process_group is wrapper.process_group_reduce_scatter is group


@on_ranks(2)
def test_the_copy_of_a_root_may_become_part_of_another_model() -> None:
    """A root keeps its weights between forward and backward; the copy of one is no root yet."""
    model = nested(fully_sharded())
    train(model, sgd_with_momentum(model.parameters()), 0)
    copied = copy.deepcopy(model)
    assert (model.reshard_after_forward, copied.reshard_after_forward) == (False, True)
    outer = FullyShardedDataParallel(nn.Sequential(copied, nn.Linear(1, 1)))
    train(outer, sgd_with_momentum(outer.parameters()), 0, 1)
    assert copied.reshard_after_forward


class RefusesToLoad(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        raise KeyError("it has other plans")


@every_travel
@on_ranks(2)
def test_a_load_that_was_given_up_does_not_stand_in_the_way(travel: Travel) -> None:
    """It leaves its unit whole until the next use."""
    parent = nn.Sequential(FullyShardedDataParallel(nn.Sequential(nn.Linear(5, 5), RefusesToLoad(5, 3))))
    with pytest.raises(KeyError, match="it has other plans"):
        parent.load_state_dict({})
    train(travel(parent), sgd_with_momentum(parent.parameters()), 0)


# When it is refused


class CopiesItself(nn.Module):
    """Its forward, or its backward, copies the model that it is in."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(5, 5), where
        self.models: list[nn.Module] = []

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layer(inputs)
        if self.where == "forward":
            self._copy()
        elif self.where == "backward":
            output.register_hook(lambda gradient: self._copy())
        return output

    def _copy(self) -> None:
        for model in self.models:
            with pytest.raises(RuntimeError, match="cannot copy the model in the middle of a forward or backward"):
                copy.deepcopy(model)
        self.where = "done"


@parametrize_pairs(where=["forward", "backward"], world_size=[1, 2])
@on_ranks("world_size")
def test_a_copy_in_the_middle_of_a_pass_is_refused_and_the_pass_goes_on(where: str) -> None:
    module = CopiesItself(where)
    inner = FullyShardedDataParallel(module)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(5, 1)))
    module.models += [model, inner, nn.Sequential(model), module]
    train(model, sgd_with_momentum(model.parameters()), 0, 1)
    assert module.where == "done"


@parametrize_pairs(travel=[copy.deepcopy, through_pickle], options=[FLAT, ORIGINAL, UNFLATTENED])
@on_ranks(2)
def test_a_copy_inside_summon_full_params_is_refused(travel: Travel, options: dict[str, Any]) -> None:
    model = nested(fully_sharded(**options))
    inner = model.module.module.trunk
    for summoned, copied in ((model, model), (model, inner), (inner, model), (inner, nn.Sequential(model))):
        with (
            summoned.summon_full_params(),
            pytest.raises(RuntimeError, match="a copy would contain unsharded parameters"),
        ):
            travel(copied)
    train(travel(model), sgd_with_momentum(model.parameters()), 0)
