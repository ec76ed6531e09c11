"""The ways to start a large model together: the meta device, files, rank 0's values, and shards that have replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import ShardingStrategy
from tests.helpers.calls import summon
from tests.helpers.equality import assert_same_state
from tests.helpers.hybrid import assert_replicas_agree, mesh_of
from tests.helpers.meta_models import FORMS, Norms, Rotary, Zoo, initialise, mlp, on_meta, sharded, started, state_of
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.safetensors_files import save

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)
every_form = pytest.mark.parametrize("form", FORMS, ids=["flat", "original", "unflattened"])
every_layout = pytest.mark.parametrize("layout", ["2 replicas of 2 shards", "no shards"])


def spread(layout: str) -> dict[str, Any]:
    """Collective. The option for one of these over 4 ranks."""
    if layout == "no shards":
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    return {"process_group": mesh_of(2, 2)}


# Ranks compare with their replicas


@parametrize_pairs(layout=["2 replicas of 2 shards", "no shards"], odd=[1, 2, 3])
@on_ranks(4)
def test_a_replica_that_was_wrapped_with_other_values_is_named(layout: str, odd: int) -> None:
    model = nested_mlp(sharded(**spread(layout)), seed=int(dist.get_rank() == odd))
    with pytest.raises(RuntimeError, match=rf"sharded different values\. Rank {odd} has other values than rank 0"):
        model(INPUTS)


@every_layout
@on_ranks(4)
def test_replicas_that_were_wrapped_with_the_same_values_are_left_alone(layout: str) -> None:
    model = nested_mlp(sharded(**spread(layout)))
    assert torch.equal(model(INPUTS), nested_mlp()(INPUTS))


# Rank 0's values


@every_layout
@on_ranks(4)
def test_all_replicas_begin_with_the_values_of_rank_0(layout: str) -> None:
    model = nested_mlp(sharded(sync_module_states=True, **spread(layout)), seed=dist.get_rank())
    assert_replicas_agree(model)
    assert_same_state(state_of(model), nested_mlp(seed=0).state_dict())


@parametrize_pairs(form=FORMS, world_size=[2, 3])
def test_rank_0_may_be_the_only_one_with_values(ranks: RankPool, world_size: int, form: dict[str, Any]) -> None:
    ranks(world_size).run(_only_rank_0_has_values, form)


@every_layout
def test_rank_0_may_be_the_only_one_of_all_replicas_with_values(ranks: RankPool, layout: str) -> None:
    ranks(4).run(_only_rank_0_has_values, {"layout": layout})


def _only_rank_0_has_values(form: dict[str, Any]) -> None:
    options = spread(form["layout"]) if "layout" in form else form
    wrap = sharded(sync_module_states=True, **options)
    whole = _norms_with_values()
    expected = state_of(whole)
    model = _wrapped(whole, wrap) if dist.get_rank() == 0 else on_meta(Norms, wrap)
    assert_same_state(state_of(model), expected)
    model(INPUTS).sum().backward()


def _norms_with_values() -> Norms:
    torch.manual_seed(5)
    module = Norms(keep)
    nn.init.constant_(module.norm.get_buffer("running_mean"), 0.25)
    return module


def _wrapped(module: Norms, wrap: Wrap) -> nn.Module:
    module.entry = wrap(module.entry)
    return wrap(module)


@on_ranks(4)
def test_rank_0_of_all_replicas_needs_values() -> None:
    module = on_meta(mlp) if dist.get_rank() == 0 else nested_mlp()
    with pytest.raises(RuntimeError, match=r"on the meta device on rank 0, which must send its values"):
        sharded(sync_module_states=True, **spread("2 replicas of 2 shards"))(module)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(4)
def test_what_no_rank_has_values_of_waits_for_them(form: dict[str, Any]) -> None:
    options = spread(form["layout"]) if "layout" in form else form
    wrap = sharded(sync_module_states=True, **options)
    expected = state_of(_norms_with_values())
    with torch.device("meta"):
        module = Norms(keep)
    module.norm.running_mean = torch.full_like(module.norm.get_buffer("running_mean"), dist.get_rank(), device="cpu")
    model = _wrapped(module, wrap)
    assert torch.equal(module.norm.get_buffer("running_mean"), torch.zeros_like(module.norm.running_mean))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="meta device"):
        model(INPUTS)
    model.load_state_dict(expected)
    assert_same_state(state_of(model), expected)
    model(INPUTS).sum().backward()


# First values


@parametrize_pairs(layout=["2 replicas of 2 shards", "no shards"], make=[Zoo, mlp])
def test_a_seed_gives_the_same_bits_with_replicas(
    ranks: RankPool, layout: str, make: Callable[[Wrap], nn.Module]
) -> None:
    expected = state_of(started(make))
    for found in ranks(4).run(_start, layout, make):
        assert_same_state(found, expected)


def _start(layout: str, make: Callable[[Wrap], nn.Module]) -> dict[str, Tensor]:
    model = started(make, sharded(**spread(layout)))
    assert_replicas_agree(model)
    return state_of(model)


# Files


@parametrize_pairs(form=FORMS, world_size=[1, 3])
@on_ranks("world_size")
def test_a_file_gives_values_to_a_model_without_and_the_rest_is_initialised(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    expected = _rotary_in(tmp_path)
    model: Any = on_meta(Rotary, sharded(**form))
    result = fsdp.load_safetensors(model, tmp_path)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    with pytest.raises(RuntimeError, match=r"1 of its parameters and buffers have no values yet.*: inv_freq\."):
        model(INPUTS)
    fsdp.materialize(model, param_init_fn=initialise)
    assert_same_state(state_of(model), state_of(expected))
    assert torch.equal(model(INPUTS), expected(INPUTS))


def _rotary_in(folder: Path) -> nn.Module:
    """Collective. A model with values, whose state is in a file there now."""
    expected = started(Rotary)
    expected.get_buffer("steps").fill_(7)
    save(folder, expected.state_dict())
    return expected


@every_layout
@on_ranks(4)
def test_every_replica_reads_the_same_file(tmp_path: Path, layout: str) -> None:
    expected = _rotary_in(tmp_path)
    model = on_meta(Rotary, sharded(**spread(layout)))
    fsdp.load_safetensors(model, tmp_path)
    fsdp.materialize(model, param_init_fn=initialise)
    assert_replicas_agree(model)
    assert_same_state(state_of(model), state_of(expected))


@every_layout
@on_ranks(4)
def test_all_replicas_are_told_that_one_has_no_file(tmp_path: Path, layout: str) -> None:
    _rotary_in(tmp_path)
    model = on_meta(Rotary, sharded(**spread(layout)))
    is_odd = dist.get_rank() == 3
    with pytest.raises((RuntimeError, FileNotFoundError), match="elsewhere" if is_odd else "rank 3 could not open"):
        fsdp.load_safetensors(model, tmp_path / "elsewhere" if is_odd else tmp_path)


# A rank that lacks values


def _compute(model: Any) -> None:
    model(INPUTS)


def _save(model: Any) -> None:
    model.state_dict()


every_use = pytest.mark.parametrize("use", [_compute, _save, summon])


@parametrize_pairs(use=[_compute, _save, summon], odd=[0, 2])
def test_all_ranks_are_told_that_one_has_no_values(ranks: RankPool, use: Callable[[Any], None], odd: int) -> None:
    ranks(3).run(_lack_values, use, odd, {})


@every_use
def test_all_replicas_are_told_that_one_has_no_values(ranks: RankPool, use: Callable[[Any], None]) -> None:
    ranks(4).run(_lack_values, use, 3, {"layout": "2 replicas of 2 shards"})


def _lack_values(use: Callable[[Any], None], odd: int, form: dict[str, Any]) -> None:
    wrap, is_odd = sharded(**spread(form["layout"]) if form else {}), dist.get_rank() == odd
    model: Any = on_meta(mlp, wrap) if is_odd else nested_mlp(wrap)
    message = "have no values yet" if is_odd else rf"rank {odd} could not .* have no values yet, .*scale"
    for _ in range(2):  # and again, as long as it is so
        with pytest.raises(RuntimeError, match=message):
            use(model)
    fsdp.materialize(model, param_init_fn=initialise)
    use(model)
