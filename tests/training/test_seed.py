"""`materialize(seed=...)`: initial values that depend on the seed and on names, and on nothing else.

`test_pain_point_19_...` are about initial values that differ between ranks, or with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from tests.helpers.equality import assert_same_state
from tests.helpers.meta_models import FLAT, FORMS, Norms, Zoo, mlp, on_meta, sharded, started, state_of, transformer
from tests.helpers.models import Wrap
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone
from tests.helpers.ranks import RankPool


@parametrize_pairs(at_most=6, world_size=[1, 2, 3, 4], make=[Zoo, mlp, transformer, Norms], form=FORMS)
def test_pain_point_19_initial_values_do_not_depend_on_the_number_of_ranks(
    ranks: RankPool, world_size: int, make: Callable[[Wrap], nn.Module], form: dict[str, Any]
) -> None:
    expected = state_of(started(make))
    for found in ranks(world_size).run(_start, make, form):
        assert_same_state(found, expected)


def _start(make: Callable[[Wrap], nn.Module], form: dict[str, Any]) -> dict[str, Tensor]:
    return state_of(started(make, sharded(**form)))


def test_pain_point_19_initial_values_do_not_depend_on_what_ranks_have_drawn_before(ranks: RankPool) -> None:
    expected = state_of(started(Zoo))
    for found in ranks(3).run(_start_after_drawing):
        assert_same_state(found, expected)


def _start_after_drawing() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    torch.rand(dist.get_rank())
    return _start(Zoo, FLAT)


def test_values_do_not_depend_on_what_is_wrapped() -> None:
    expected = state_of(started(Zoo))
    whole = sharded(process_group=Alone())(on_meta(Zoo))
    fsdp.materialize(whole, seed=0)
    assert_same_state(state_of(whole), expected)


def test_values_do_not_depend_on_the_order_in_which_modules_are_given_some() -> None:
    expected = state_of(started(Norms))
    model: Any = on_meta(Norms)
    entry = model._modules.pop("entry")
    model.entry = entry  # it is the last now
    fsdp.materialize(model, seed=0)
    found = model.state_dict()
    assert_same_state({name: found[name] for name in expected}, expected)


def test_values_do_not_depend_on_torchs_wrappers_of_modules() -> None:
    plain: Any = started(Norms)
    compiled: Any = on_meta(Norms)
    compiled.exit = nn.ModuleDict({"_orig_mod": compiled.exit})  # as a compiled module lists it
    fsdp.materialize(compiled, seed=0)
    assert torch.equal(compiled.exit["_orig_mod"].weight, plain.exit.weight)


def test_another_seed_and_another_layer_of_one_shape_have_other_values() -> None:
    states = [state_of(started(Zoo, seed=seed)) for seed in (0, 1, -1)]
    assert len({tuple(state["tokens.weight"].flatten().tolist()) for state in states}) == 3
    assert not torch.equal(states[0]["twins.0.weight"], states[0]["twins.1.weight"])


def test_the_generators_go_on_where_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    started(Zoo)
    assert torch.equal(torch.rand(3), expected)


def test_the_generators_are_put_back_when_an_initialisation_raises() -> None:
    def fail(module: nn.Module) -> None:
        torch.rand(3)
        raise KeyError("on purpose")

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(KeyError, match="on purpose"):
        fsdp.materialize(on_meta(Zoo), param_init_fn=fail, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_without_a_seed_values_are_drawn_as_constructors_draw_them() -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    torch.manual_seed(3)
    fsdp.materialize(model)
    assert_same_state(model.state_dict(), dict(expected))


@pytest.mark.parametrize("seed", [1.5, "0", True])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(TypeError, match="seed must be an integer or None, got"):
        fsdp.materialize(nn.Linear(1, 1), seed=seed)
