"""`EMA`: torch's average of the unwrapped model, of which each rank keeps its shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, get_fsdp_instances
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.copied_twins import (
    FLAT,
    ORIGINAL,
    UNFLATTENED,
    CopiedTwins,
    every_form,
    nested,
    normed,
    recurrent,
    shard_bytes,
    state_of,
    through_pickle,
    tied_and_frozen,
    train,
)
from tests.helpers.equality import assert_close_state, assert_same_state
from tests.helpers.forms import FORMS, full_state, sharded
from tests.helpers.memory import live_bytes
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import adamw, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import Counting, Traffic
from tests.helpers.twins import batch

DECAY = 0.8  # small, so that four steps show a mistake


def torch_ema(model: nn.Module, **how: Any) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), **how)


# The average


@parametrize_cases(
    at_most=5,
    world_size=[2, 3, 1],
    options=[FLAT, ORIGINAL, UNFLATTENED, {"offload": "cpu"}],
    make_optimizer=[sgd_with_momentum, adamw],
    make=[nested, tied_and_frozen, recurrent],
    average=[fsdp.EMA, AveragedModel],
)
@on_ranks("world_size")
def test_the_average_is_torchs_of_the_unwrapped_model(case: Case) -> None:
    """Through torch's own class as well, which copies and averages what `parameters()` lists."""
    twins = CopiedTwins.of(case.make, case.make_optimizer, **case.options)
    ema = fsdp.EMA(twins.sharded, DECAY) if case.average is fsdp.EMA else torch_ema(twins.sharded)
    expected = torch_ema(twins.plain)
    for number in range(4):
        twins.train(number)
        ema.update_parameters(twins.sharded)
        expected.update_parameters(twins.plain)
        if number in (0, 1, 3):
            assert_close_state(ema.module.state_dict(), expected.module.state_dict())
    averages, weights = expected.module.state_dict(), twins.plain.state_dict()
    assert any(not torch.equal(averages[name], weights[name]) for name in weights)
    with torch.no_grad():
        for rank in range(dist.get_world_size()):
            torch.testing.assert_close(ema(batch(20, rank)), expected(batch(20, rank)), rtol=1e-9, atol=1e-11)
    twins.assert_close()


@on_ranks(2)
def test_it_stays_in_the_dtype_of_the_shards_under_mixed_precision() -> None:
    model = nested(fully_sharded(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)))
    optimizer = sgd_with_momentum(model.parameters())
    ema = fsdp.EMA(model, DECAY)
    expected: dict[str, Tensor] = {}
    for number in range(4):
        train(model, optimizer, number)
        ema.update_parameters(model)
        now = state_of(model)
        expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] if expected else now[name] for name in now}
    for name, value in ema.module.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name])
    with torch.no_grad():
        assert ema(batch(0, 0).float()).dtype == torch.bfloat16


@on_ranks(2)
def test_bfloat16_shards_do_not_follow_a_decay_close_to_one() -> None:
    """Half a unit in the last place is at least 1/512 of a value; an eighth of it times 0.01 is less."""
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = FullyShardedDataParallel(nn.Linear(5, 3).to(dtype))
        ema = fsdp.EMA(model, 0.99)
        ema.update_parameters(model)  # the first one only copies
        before = state_of(ema.module)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.125)
        for _ in range(20):
            ema.update_parameters(model)
        after = ema.module.state_dict()
        moved[dtype] = any(not torch.equal(after[name], before[name]) for name in before)
    assert moved == {torch.bfloat16: False, torch.float32: True}


@on_ranks(2)
def test_nothing_is_trained_in_it() -> None:
    model = nested(fully_sharded())
    ema = fsdp.EMA(model)
    assert not any(param.requires_grad for param in ema.parameters())
    assert not ema(torch.ones(1, 5)).requires_grad
    assert all(param.requires_grad for param in model.parameters())


# What it costs


@every_form
@on_ranks(2)
def test_nothing_is_sent_to_make_update_or_apply_it(options: dict[str, Any]) -> None:
    model = nested(fully_sharded(**options))
    train(model, sgd_with_momentum(model.parameters()), 0)
    with Counting(traffic := Traffic()):
        ema = fsdp.EMA(model)
        for _ in range(3):
            ema.update_parameters(model)
        with ema.applied_to(model):
            pass
        assert traffic == Traffic()
        ema(batch(0, 0).float())
        assert traffic.values  # or nothing is counted


@parametrize_pairs(options=[FLAT, ORIGINAL, UNFLATTENED], world_size=[1, 2])
@on_ranks("world_size")
def test_it_takes_one_more_shard(options: dict[str, Any]) -> None:
    model = nested(fully_sharded(**options))
    fsdp.EMA(model).update_parameters(model)  # what torch makes once is not counted
    before = live_bytes()
    ema = fsdp.EMA(model)
    for _ in range(2):
        ema.update_parameters(model)
    assert live_bytes() - before == shard_bytes(model) + ema.n_averaged.nbytes


# In the model's place


@parametrize_pairs(options=[FLAT, ORIGINAL, UNFLATTENED], world_size=[1, 2])
@on_ranks("world_size")
def test_the_model_has_the_average_inside_applied_to(options: dict[str, Any]) -> None:
    twins = CopiedTwins.of(nested, sgd_with_momentum, **options)
    ema = fsdp.EMA(twins.sharded, DECAY)
    for number in range(3):
        twins.train(number)
        ema.update_parameters(twins.sharded)
    own, average, inputs = state_of(twins.sharded), state_of(ema.module), batch(9, 0)
    with torch.no_grad():
        outputs = [twins.sharded(inputs), ema(inputs)]
        assert not torch.equal(*outputs)
        for error in (None, ZeroDivisionError("while it is evaluated")):
            with suppress(ZeroDivisionError), ema.applied_to(twins.sharded):
                assert torch.equal(twins.sharded(inputs), outputs[1])
                assert_same_state(state_of(twins.sharded), average)
                if error is not None:
                    raise error
            assert torch.equal(twins.sharded(inputs), outputs[0])
            assert torch.equal(ema(inputs), outputs[1])
    assert_same_state(state_of(twins.sharded), own)
    assert_same_state(state_of(ema.module), average)
    twins.train(4)  # the optimizer goes on
    twins.assert_close()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_the_average_keeps_its_values_while_it_is_applied(form: str, tmp_path: Path) -> None:
    """The average can be saved beside the evaluation, and entering the context again does not restore the weights."""
    model, inputs = sharded(nested(lambda module: module).double(), form), batch(9, 0)
    ema = fsdp.EMA(model, DECAY)
    ema.update_parameters(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
        own, average, outputs = full_state(model), full_state(ema.module), [model(inputs), ema(inputs)]
        assert not torch.equal(*outputs)
        with ema.applied_to(model):
            assert torch.equal(ema(inputs), outputs[1])
            assert_same_state(full_state(ema.module), average)
            with ema.applied_to(model):
                assert torch.equal(model(inputs), outputs[1])
            assert torch.equal(model(inputs), outputs[1])
            fsdp.save(tmp_path / "ema", ema)
        assert torch.equal(model(inputs), outputs[0])
    assert_same_state(full_state(model), own)
    fsdp.load(tmp_path / "ema", ema)
    assert_same_state(full_state(ema.module), average)


@on_ranks(2)
def test_weights_can_be_loaded_into_it() -> None:
    """As for any copy, a gathered parameter that is out of date is gathered again."""
    model = nested(fully_sharded())
    ema = fsdp.EMA(model)
    inputs = batch(0, 0).float()
    before = ema(inputs)
    train(model, sgd_with_momentum(model.parameters()), 0, 1)
    ema.module.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(ema(inputs), model(inputs))
        assert not torch.equal(ema(inputs), before)


# Saved, loaded, copied


@every_form
@on_ranks(2)
def test_its_state_dict_is_that_of_the_unwrapped_average_and_loads_into_both(options: dict[str, Any]) -> None:
    twins = CopiedTwins.of(nested, sgd_with_momentum, **options)
    ema, plain = fsdp.EMA(twins.sharded, DECAY), torch_ema(twins.plain)
    for number in range(3):
        twins.train(number)
        ema.update_parameters(twins.sharded)
        plain.update_parameters(twins.plain)
    saved = ema.state_dict()
    assert_close_state(dict(saved), dict(plain.state_dict()))
    plain.load_state_dict(saved)
    again = fsdp.EMA(twins.sharded, DECAY)
    again.load_state_dict(saved)
    assert again.n_averaged == 3  # or the next update would copy
    twins.train(3)
    for average in (ema, again):
        average.update_parameters(twins.sharded)
    plain.update_parameters(twins.plain)
    assert_close_state(again.module.state_dict(), plain.module.state_dict())
    assert_same_state(state_of(again), state_of(ema))


@pytest.mark.parametrize("form", ["flat", "original", "fully_shard"])
def test_a_checkpoint_of_it_is_loaded_by_any_number_of_ranks(ranks: RankPool, tmp_path: Path, form: str) -> None:
    expected = ranks(2).run(_averaged, form, tmp_path, None)[0]
    assert_same_state(ranks(3).run(_averaged, form, None, tmp_path)[0], expected)


def _averaged(form: str, target: Path | None, source: Path | None) -> dict[str, Tensor]:
    """The average after two updates, which is saved, or loaded into one without updates."""
    model: Any = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    if form == "fully_shard":
        fsdp.fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=form == "original")
    ema = fsdp.EMA(model, DECAY)
    if source is not None:
        fsdp.load(source / "ema", ema)
    for number in range(2 if source is None else 0):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), number)
        ema.update_parameters(model)
    if target is not None:
        fsdp.save(target / "ema", ema)
    assert ema.n_averaged == 2
    return {name: full_tensor(value) for name, value in ema.module.state_dict().items()}


@pytest.mark.parametrize("travel", [copy.deepcopy, through_pickle])
@on_ranks(2)
def test_it_goes_on_after_it_was_copied_together_with_its_model(travel: Callable[[Any], Any]) -> None:
    model = nested(fully_sharded())
    optimizer, ema = sgd_with_momentum(model.parameters()), fsdp.EMA(model, DECAY)
    train(model, optimizer, 0)
    ema.update_parameters(model)
    others = travel((model, optimizer, ema))
    for each, its_optimizer, its_ema in ((model, optimizer, ema), others):
        train(each, its_optimizer, 1)
        its_ema.update_parameters(each)
    assert_same_state(state_of(others[2]), state_of(ema))
    assert not torch.equal(state_of(ema.module)["scale"], state_of(model)["scale"])


# Buffers


@pytest.mark.parametrize("use_buffers", [False, True], ids=["copied", "averaged"])
@on_ranks(2)
def test_buffers_are_copied_or_averaged(use_buffers: bool) -> None:
    model = normed(fully_sharded())
    optimizer, ema = sgd_with_momentum(model.parameters()), fsdp.EMA(model, DECAY, use_buffers=use_buffers)
    expected = torch.zeros(7)
    for number in range(4):
        train(model, optimizer, number)
        ema.update_parameters(model)
        own = model.state_dict()["block.1.running_mean"]
        expected = DECAY * expected + (1 - DECAY) * own if use_buffers and number else own
    assert expected.any()
    torch.testing.assert_close(ema.module.state_dict()["block.1.running_mean"], expected)


@pytest.mark.parametrize("plain", ["buffers", "ignored"])
@on_ranks(2)
def test_plain_tensors_beside_the_dtensors_of_fully_shard_are_averaged(plain: str) -> None:
    options = {"ignored_params": {(ignored := normed()).exit.bias}} if plain == "ignored" else {}
    model = fsdp.fully_shard(ignored if options else normed(), **options)
    name = "exit.bias" if options else "block.1.running_mean"
    ema = fsdp.EMA(model, DECAY, use_buffers=plain == "buffers")
    before, optimizer = {}, sgd_with_momentum(model.parameters())
    for number in range(2):
        train(model, optimizer, number)
        ema.update_parameters(model)
        own = {each: full_tensor(model.state_dict()[each]).clone() for each in (name, "exit.weight")}
        before = {each: DECAY * before[each] + (1 - DECAY) * value for each, value in own.items()} if number else own
    found = ema.module.state_dict()
    assert_close_state({each: full_tensor(found[each]) for each in before}, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
@on_ranks(2)
def test_frozen_values_without_an_average_are_copied(dtype: torch.dtype) -> None:
    for wrap in (fsdp.fully_shard, FullyShardedDataParallel):
        module = nn.Linear(3, 3)
        frozen = torch.arange(6).to(dtype)
        module.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
        model = wrap(module, **({"sync_module_states": True} if wrap is FullyShardedDataParallel else {}))
        ema = fsdp.EMA(model, DECAY)
        for _ in range(2):
            ema.update_parameters(model)
        found = fsdp.state_dict_utils.gather_state_dict(ema.module.state_dict())["frozen"]
        assert torch.equal(found.view(torch.uint8), frozen.view(torch.uint8))


@on_ranks(2)
def test_shards_are_averaged_while_a_module_of_fully_shard_is_unsharded() -> None:
    torch.set_default_dtype(torch.float64)
    model, plain = fsdp.fully_shard(nested(lambda module: module)), nested(lambda module: module)
    ema, expected = fsdp.EMA(model, DECAY), torch_ema(plain)
    optimizers = [sgd_with_momentum(each.parameters()) for each in (model, plain)]
    for number in range(2):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            for place in range(2):
                (each(batch(number, place)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(batch(9, 0))  # as an evaluation without no_grad(): the module waits for a backward
        ema.update_parameters(model)
        expected.update_parameters(plain)
    average = {name: full_tensor(value).clone() for name, value in ema.module.state_dict().items()}
    assert_close_state(average, dict(expected.module.state_dict()))
    with ema.applied_to(model):
        assert_same_state({name: full_tensor(value) for name, value in model.state_dict().items()}, average)


@on_ranks(2)
def test_torchs_update_bn_gives_it_statistics_of_its_own() -> None:
    torch.set_default_dtype(torch.float64)
    model, plain = normed(fully_sharded()), normed()
    train(model, sgd_with_momentum(model.parameters()), 0, 1)
    ema = fsdp.EMA(model, DECAY)
    ema.update_parameters(model)
    plain.load_state_dict(ema.module.state_dict())
    batches = [(batch(number, dist.get_rank()), None) for number in range(3)]
    update_bn(batches, ema)
    update_bn(batches, plain)
    assert_close_state(ema.module.state_dict(), plain.state_dict())
    ema.eval()
    plain.eval()
    torch.testing.assert_close(ema(batches[0][0]), plain(batches[0][0]))


# When it is refused


@on_ranks(2)
def test_another_model_is_refused_before_anything_is_changed() -> None:
    model, other = nested(fully_sharded()), recurrent(fully_sharded())
    ema = fsdp.EMA(model)
    before = state_of(ema), state_of(other)
    with pytest.raises(ValueError, match="this average belongs to another model: it has 4 parameters on this rank"):
        ema.update_parameters(other)
    with pytest.raises(ValueError, match="Create a new EMA of this model"), ema.applied_to(other):
        pass
    assert_same_state(state_of(ema), before[0])
    assert_same_state(state_of(other), before[1])


@on_ranks(2)
def test_a_model_that_was_cast_since_is_refused() -> None:
    model = nested(fully_sharded())
    ema = fsdp.EMA(model)
    model.double()
    with pytest.raises(ValueError, match="or they differ in shape or dtype"):
        ema.update_parameters(model)
    ema.module.double()
    ema.update_parameters(model)
    assert_same_state(state_of(ema.module), state_of(model))


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must be between 0 and 1"):
        fsdp.EMA(nn.Linear(2, 2), decay)


def test_a_model_that_is_not_wrapped_is_averaged_too() -> None:
    plain = nn.Linear(2, 2)
    ema, expected = fsdp.EMA(plain, DECAY), torch_ema(plain)
    for _ in range(3):
        with torch.no_grad():
            plain.weight.add_(1.0)
        ema.update_parameters(plain)
        expected.update_parameters(plain)
    assert_same_state(dict(ema.module.state_dict()), dict(expected.module.state_dict()))


@on_ranks(2)
def test_wrappers_in_a_plain_parent_are_averaged() -> None:
    parent = nn.Sequential(nested(fully_sharded()), nn.Linear(1, 1))
    ema = fsdp.EMA(parent, DECAY)
    train(parent, sgd_with_momentum(parent.parameters()), 0)
    ema.update_parameters(parent)
    assert len(get_fsdp_instances(ema)) == len(get_fsdp_instances(parent))
    assert_same_state(state_of(ema.module), state_of(parent))
