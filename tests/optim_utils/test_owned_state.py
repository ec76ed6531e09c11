"""State that lives with owners goes everywhere that sharded state goes: full, by names, in checkpoints, per rank."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

import fsdp
from fsdp import optim_utils
from fsdp.optim_utils.state import flat_state, nested_state
from tests.helpers.equality import assert_same
from tests.helpers.forms import trained_rows
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import FORMS, Twin, backward, gradients_of, is_matrix, muon_and_adamw, owned, talk, train_both
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.ranks import RankPool


def groups_of(kind: str) -> list[dict[str, Any]]:
    """State of the parameters' shapes; of other shapes; in lists; numbers and options that are counted."""
    if kind == "Muon":
        return muon_and_adamw()
    if kind == "Adafactor":
        return [
            {"params": is_matrix, "optimizer": torch.optim.Adafactor, "lr": 0.05},
            {"optimizer": torch.optim.NAdam, "lr": 1e-2},
        ]
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    return [{"params": is_matrix, "optimizer": soap, "lr": 1e-2}, {"optimizer": torch.optim.AdamW, "sharded": True}]


KINDS = ["Muon", "Adafactor", "SOAP"]


@parametrize_cases(
    at_most=6,
    kind=KINDS,
    way=["folder", "names", "first"],
    saved_at=[3, 1, 2, 4],
    loaded_at=[2, 4, 3, 1],
    form=list(FORMS),
)
def test_training_goes_on_at_another_world_size(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    forms = list(FORMS)
    ranks(case.saved_at).run(_train_and_save, tmp_path, case.kind, case.form)
    other = forms[forms.index(case.form) - 1]
    ranks(case.loaded_at).run(_load_and_train, tmp_path, case.kind, other, case.way)


def _train_and_save(path: Path, kind: str, form: str) -> None:
    model = talk(FORMS[form])
    optimizer, twin = owned(model, groups_of(kind)), Twin(groups_of(kind))
    train_both(model, optimizer, twin, range(2))
    fsdp.save(path / "saved", model, optimizer)
    full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert full is not None
    assert_same(full["state"], twin.named_state())
    if dist.get_rank() == 0:
        # As full states have it: strides are not kept, and products of other strides are rounded otherwise.
        states = [tree_map(contiguous, optimizer.state_dict()) for optimizer in twin.optimizers]
        torch.save((twin.model.state_dict(), states, full), path / "twin")
    dist.barrier()


def contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _load_and_train(path: Path, kind: str, form: str, way: str) -> None:
    weights, states, full = torch.load(path / "twin", weights_only=False)
    model = talk(FORMS[form], seed=1)
    optimizer, twin = owned(model, groups_of(kind)), Twin(groups_of(kind))
    fsdp.load(path / "saved", model, optimizer if way == "folder" else None)
    if way == "names":
        optim_utils.load_full_optim_state_dict(model, optimizer, full)
    elif way == "first":
        given = full if dist.get_rank() == 0 else None
        optim_utils.load_full_optim_state_dict(model, optimizer, given, rank0_only=True)
    twin.model.load_state_dict(weights)
    for own, state in zip(twin.optimizers, states, strict=True):
        own.load_state_dict(state)
    assert_same(optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None), full)
    train_both(model, optimizer, twin, range(2, 4))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_each_rank_loads_its_own(form: str) -> None:
    groups = groups_of("Adafactor")
    model = talk(FORMS[form])
    optimizer, twin = owned(model, groups), Twin(groups)
    train_both(model, optimizer, twin, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    again = owned(model, groups)
    again.load_state_dict(saved)
    assert_same(again.state_dict()["state"], saved["state"])
    train_both(model, again, twin, range(2, 4))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, saved)
    with pytest.raises((ValueError, RuntimeError), match="full_optim_state_dict"):
        again.load_state_dict(everyone[1 - dist.get_rank()])


@on_ranks(2)
def test_hooks_of_states_are_called_as_by_torchs_optimizers() -> None:
    """A hook before a load may replace the dictionary; the caller's is not changed."""
    groups = [{"optimizer": torch.optim.AdamW, "lr": 1e-2}]
    model = talk(FORMS["orig_params"])
    optimizer, plain = owned(model, groups), torch.optim.AdamW(talk().parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    calls = []
    for each in (optimizer, plain):
        called: list[str] = []

        def read(loaded: Any, state: dict[str, Any], called: list[str] = called) -> dict[str, Any]:
            called.append("before load")
            state.pop("comment")
            (group,) = state["param_groups"]
            return {**state, "param_groups": [{**group, "lr": 0.5}]}

        each.register_state_dict_pre_hook(lambda _, called=called: called.append("before save"))
        each.register_state_dict_post_hook(lambda _, state: {**state, "comment": 1})
        each.register_state_dict_post_hook(lambda _, state: state.update(second=2))
        each.register_load_state_dict_pre_hook(read)
        each.register_load_state_dict_post_hook(
            lambda loaded, called=called: called.append(f"loaded {loaded.param_groups[0]['lr']}")
        )
        state = each.state_dict()
        assert (state["comment"], state["second"]) == (1, 2)
        each.load_state_dict(state)
        assert "comment" in state
        calls.append(called)
    assert calls[0] == calls[1] == ["before save", "before load", "loaded 0.5"]


@on_ranks(2)
def test_fairscales_numbers_and_errors() -> None:
    model = talk(FORMS["orig_params"])
    optimizer, twin = owned(model, groups_of("Adafactor")), Twin(groups_of("Adafactor"))
    train_both(model, optimizer, twin, range(2))
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    again = owned(model, groups_of("Adafactor"))
    with pytest.raises(ValueError, match="OwnedOptimizer"):
        again.load_state_dict(model.get_shard_from_optim_state_dict(copy.deepcopy(full)))
    again.load_state_dict(optim_utils.shard_full_optim_state_dict(model, full, again))
    assert_same(again.state_dict()["state"], optimizer.state_dict()["state"])
    plain = torch.optim.Adafactor(model.parameters(), lr=0.05)
    with pytest.raises(ValueError, match="OwnedOptimizer"):
        optim_utils.load_full_optim_state_dict(model, plain, full)


@on_ranks(2)
def test_training_goes_on_from_fairscales_numbers_of_owners_and_of_shards() -> None:
    groups: list[dict[str, Any]] = [
        {"params": lambda name, shape: len(shape) == 2, "optimizer": torch.optim.AdamW, "lr": 1e-2},
        {"optimizer": torch.optim.AdamW, "sharded": True, "lr": 1e-2},
    ]
    model = talk(FORMS["orig_params"])
    optimizer, twin = owned(model, groups), Twin(groups)
    train_both(model, optimizer, twin, range(2))
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    again = owned(model, groups)
    again.load_state_dict(optim_utils.shard_full_optim_state_dict(model, full, again))
    train_both(model, again, twin, range(2, 4))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain.load_state_dict(
        optim_utils.shard_full_optim_state_dict(
            model, _in_one_group(optim_utils.full_optim_state_dict(model, again, recipient_rank=None)), plain
        )
    )
    full = model.gather_full_optim_state_dict(plain, recipient_rank=None)
    one = owned(model, groups[1:])
    optim_utils.load_full_optim_state_dict(model, one, full)
    train_both(model, one, twin, range(4, 6))


def _in_one_group(full: Any) -> Any:
    first, second = full["param_groups"]
    return full | {"param_groups": [first | {"params": first["params"] + second["params"]}]}


@on_ranks(2)
def test_state_of_an_unsharded_run_and_of_plain_shards_is_taken() -> None:
    adamw: list[dict[str, Any]] = [{"optimizer": torch.optim.AdamW, "lr": 1e-2}]
    model, twin = talk(FORMS["orig_params"]), Twin(adamw)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    plain.step()
    full = optim_utils.full_optim_state_dict(model, plain, recipient_rank=None)
    optimizer = owned(model, adamw)
    optim_utils.load_full_optim_state_dict(model, optimizer, full)
    found = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert found is not None
    assert full is not None
    assert_same(found["state"], full["state"])
    own = twin.optimizers[0]
    twin.step(gradients_of(talk_after(model, optimizer, 1)))
    named = optim_utils.rekey_optim_state_dict(own.state_dict(), twin.model, "names", own)
    optim_utils.load_full_optim_state_dict(model, optimizer, named)
    found = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert found is not None
    assert_same(found["state"], named["state"])


def talk_after(model: Any, optimizer: fsdp.OwnedOptimizer, step: int) -> Any:
    """Collective. Return the model with gradients of a step."""
    optimizer.zero_grad()
    backward(model, step)
    return model


def test_structure_is_kept() -> None:
    state = {
        "GG": [torch.ones(2), None, [torch.zeros(1)]],
        "Q": [],
        "step": 3,
        "pair": (1, 2),
        "by": {"a": torch.ones(1)},
    }
    flat = flat_state(state)
    assert list(flat) == ["GG[0]", "GG[1]", "GG[2][0]", "Q", "step", "pair", "by{'a'}"]
    assert_same(nested_state(flat), state)


@pytest.mark.parametrize(
    "keys", [["a{(}"], ["a{[1]}"], ["a{x.y}"], ["a{1.5}"], ["a", "a[0]"], ["a[0]", "a(1)"], ["a{" + "-" * 9000 + "1}"]]
)
def test_keys_that_no_state_has_are_value_errors(keys: list[str]) -> None:
    with pytest.raises(ValueError, match=r"a key 'a.* of an optimizer's state"):
        nested_state(dict.fromkeys(keys, torch.ones(1)))


@on_ranks(1)
def test_a_checkpoint_with_such_a_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    model = talk(FORMS["fully_shard"])
    optimizer = owned(model, [{"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}])
    backward(model, 0)
    optimizer.step()
    for state in optimizer.state.values():
        state["made_up{(}"] = state.pop("momentum_buffer")
    fsdp.save(path, model, optimizer)
    with pytest.raises(ValueError, match=f"{path}.*'made_up{{\\(}}'"):
        fsdp.load(path, model, optimizer)


@on_ranks(2)
def test_state_of_a_tensor_class_stays_on_its_rank() -> None:
    make = pytest.importorskip("torchao.optim").AdamW8bit
    groups: list[dict[str, Any]] = [{"params": is_matrix, "optimizer": make}, {"optimizer": torch.optim.AdamW}]
    model, twin = talk(FORMS["orig_params"], width=64), Twin(groups, width=64)
    optimizer = owned(model, groups)
    with torch.compiler.set_stance("force_eager"):
        train_both(model, optimizer, twin, range(2))
        with pytest.raises((NotImplementedError, RuntimeError), match="Save optimizer"):
            optim_utils.full_optim_state_dict(model, optimizer)
        again = owned(model, groups)
        again.load_state_dict(optimizer.state_dict())
        train_both(model, again, twin, range(2, 4))


@on_ranks(2)
def test_what_only_owners_can_have_is_refused_by_others(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [{"optimizer": torch.optim.Adafactor}]
    model = talk(FORMS["fully_shard"])
    optimizer = owned(model, groups)
    backward(model, 0)
    optimizer.step()
    fsdp.save(tmp_path / "saved", model, optimizer)
    plain = torch.optim.Adafactor(model.parameters())
    with pytest.raises(RuntimeError, match="OwnedOptimizer"):
        fsdp.load(tmp_path / "saved", model, plain)


def _by_columns(param: torch.nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


@on_ranks(2, 3)
def test_state_of_shards_along_a_later_dimension_goes_to_its_elements() -> None:
    def made(fn: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(torch.nn.Linear(5, 4), shard_placement_fn=fn)
        return model, owned(model, [{"optimizer": torch.optim.AdamW, "sharded": True, "lr": 1e-2}])

    (model, optimizer), (other, rows), (third, fresh) = made(_by_columns), made(None), made(_by_columns)
    for each, steps in ((model, optimizer), (other, rows)):
        each(torch.arange(10.0).view(2, 5)).square().mean().backward()
        steps.step()
    expected = optim_utils.full_optim_state_dict(other, rows, recipient_rank=None)
    assert expected is not None
    assert_same(optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None), expected)
    for rank0_only in (False, True):
        fresh.state.clear()
        given = expected if dist.get_rank() == 0 or not rank0_only else None
        optim_utils.load_full_optim_state_dict(third, fresh, given, rank0_only=rank0_only)
        assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


@on_ranks(2)
def test_state_of_modules_that_a_forward_has_left_unsharded() -> None:
    """Under `fully_shard`, ``parameters()`` lists unsharded parameters then."""
    make = partial(fsdp.OwnedOptimizer, groups=[{"optimizer": torch.optim.AdamW}])
    model, optimizer = trained_rows(make)
    expected = optim_utils.full_optim_state_dict(model, optimizer, None)
    model(torch.ones(1, 4))
    assert {type(param) for param in model.parameters()} != {DTensor}
    assert_same(optim_utils.full_optim_state_dict(model, optimizer, None), expected)
    optim_utils.load_full_optim_state_dict(model, optimizer, expected)
    again = make(model)
    assert [type(param) for group in again.param_groups for param in group["params"]] == [DTensor] * 4
