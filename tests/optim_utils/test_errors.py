"""Optimizer state that cannot be put together or cut is an error that says what, where and what to do."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, OtherRankError, fully_shard, optim_utils
from tests.helpers.equality import assert_same
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import FORMS, adam, from_first, garden, grouped_adamw, momentum, train, trained
from tests.helpers.parity import fully_sharded

# Gathering


@on_ranks(2)
def test_state_of_another_shape_is_refused_on_all_ranks() -> None:
    model, optimizer = trained()
    if dist.get_rank() == 1:
        optimizer.state[model.params[0]]["row"] = torch.ones(2, 3)
    said = (
        r"the optimizer's state 'row' of scale \(in one flat parameter with \d more\) has shape \(2, 3\), and this rank"
    )
    with pytest.raises(ValueError if dist.get_rank() == 1 else RuntimeError, match=f"{said}.*ignored_parameters"):
        model.gather_full_optim_state_dict(optimizer)
    optimizer.state[model.params[0]].pop("row", None)
    assert from_first(model.gather_full_optim_state_dict(optimizer))["state"]


@on_ranks(2)
def test_what_is_no_optimizer_and_no_rank_is_refused() -> None:
    model, optimizer = trained()
    with pytest.raises(TypeError, match=r"another object with a state_dict\(\), is needed; got a int"):
        model.gather_full_optim_state_dict(3)
    with pytest.raises(TypeError, match=r"Linear.state_dict\(\) has no 'state' and 'param_groups'"):
        model.gather_full_optim_state_dict(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"recipient_rank must be None or one of the 2 ranks, got 2"):
        model.gather_full_optim_state_dict(optimizer, recipient_rank=2)
    other = adam(nn.Linear(3, 2))
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0, of shape \(2, 3\), is not of this model. Make its layer a submodule"
    ):
        model.gather_full_optim_state_dict(other)
    plain = garden()
    early = adam(plain)
    with pytest.raises(ValueError, match=r"is not of this model as it is wrapped now: it was .*scale.* before"):
        FullyShardedDataParallel(plain).gather_full_optim_state_dict(early)
    with pytest.raises(TypeError, match="the outermost FullyShardedDataParallel is needed, got a Linear"):
        optim_utils.full_optim_state_dict(nn.Linear(1, 1), optimizer)

    class Unknown:
        def state_dict(self) -> dict[str, Any]:
            return {"state": {}, "param_groups": [{"params": [0, 1, 2]}]}

    with pytest.raises(ValueError, match=r"has 3 parameters, but the model has \d+, and without param_groups"):
        model.gather_full_optim_state_dict(Unknown())
    with pytest.raises((ValueError, OtherRankError), match="one of the 2 ranks, got 2"):
        model.gather_full_optim_state_dict(optimizer, recipient_rank=2 * dist.get_rank())


@on_ranks(2)
def test_not_inside_of_forward_or_summoned_parameters() -> None:
    model, optimizer = trained()
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    with model.summon_full_params():
        for act in (
            lambda: model.gather_full_optim_state_dict(optimizer),
            lambda: model.get_shard_from_optim_state_dict(full),
            lambda: optim_utils.load_full_optim_state_dict(model, optimizer, full),
        ):
            with pytest.raises(
                RuntimeError, match=r"cannot .* optimizer state: root \(Garden\) is inside summon_full_params"
            ):
                act()


# Cutting


def _spoil(full: dict[str, Any], how: str) -> None:
    first = next(iter(full["state"]))
    if how == "shape":
        full["state"][1]["exp_avg"] = torch.ones(2, 2)
    elif how == "missing":
        del full["state"][1]
    elif how == "keys":
        del full["state"][1]["exp_avg"]
    elif how == "step":
        full["state"][1]["step"] = 7.0
    elif how == "nameless":
        full["state"][99] = full["state"].pop(first)
    elif how == "number":
        del full["param_names"]
        full["state"][99] = full["state"].pop(first)
    elif how == "name":
        full["param_names"][1] = "another.weight"
    elif how == "names":
        full["param_names"] = ["scale"]
    elif how == "count":
        del full["param_names"]
        full["param_id_map"].popitem()
    elif how == "map":
        del full["param_id_map"], full["param_names"]
    elif how == "groups":
        group = full["param_groups"][0]
        full["param_groups"] = [group | {"params": [0]}, group | {"params": group["params"][1:]}]
    elif how == "kind":
        full["state"]["scale"] = full["state"].pop(first)
    else:
        del full["param_groups"]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("shape", ValueError, r"state 'exp_avg' of entry.weight has shape \(2, 2\), and the parameter \(7, 5\)"),
        ("missing", ValueError, r"has scale, but not entry.weight; the two are in one flat parameter"),
        ("keys", ValueError, r"of scale has 'exp_avg' \(elements .*, and that of entry.weight no 'exp_avg'; the two"),
        ("step", ValueError, r"of scale has 'step' \(2.0\), and that of entry.weight 'step' \(7.0\);.*use_orig_params"),
        ("number", ValueError, r"has a parameter number 99, but the model does not"),
        ("nameless", ValueError, r"has a parameter number 99 without a name in 'param_names'"),
        ("name", ValueError, r"has a parameter 'another.weight', but the model does not.* remove 'param_names'"),
        ("names", TypeError, r"'param_names' is a mapping of numbers to names"),
        ("count", ValueError, r"is of a model with 9 parameters, but this one has 10"),
        ("map", ValueError, r"has numbers as keys and no 'param_id_map'.*rekey_optim_state_dict"),
        ("groups", ValueError, r"scale .*and entry.weight (not in it.*group_by|in parameter groups)"),
        ("kind", TypeError, r"are all names or all numbers; got int, str"),
        ("no groups", TypeError, r"has the keys 'state' and 'param_groups'; got a mapping with"),
    ],
)
@on_ranks(2)
def test_a_state_that_does_not_fit_changes_nothing(how: str, error: type[Exception], message: str) -> None:
    model: Any = nested_mlp(fully_sharded())
    optimizer = adam(model)
    train(model, optimizer, range(2))
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    _spoil(full, how)
    kept, own = copy.deepcopy(full), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=message):
        model.get_shard_from_optim_state_dict(full)
    for rank0_only in (False, True):
        given = full if dist.get_rank() == 0 or not rank0_only else None
        with pytest.raises((error, RuntimeError) if rank0_only else error, match=message):
            optim_utils.load_full_optim_state_dict(model, optimizer, given, rank0_only=rank0_only)
    assert_same(full, kept)
    assert_same(optimizer.state_dict(), own)


@on_ranks(2)
def test_a_rank_that_cannot_load_tells_the_others() -> None:
    model, optimizer = trained()
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    given = 3 if dist.get_rank() == 1 else full
    said = "a full optimizer state has the keys 'state' and 'param_groups'; got a int"
    with pytest.raises((TypeError, RuntimeError), match=said):
        optim_utils.load_full_optim_state_dict(model, optimizer, given)
    with pytest.raises((TypeError, RuntimeError), match="got a NoneType"):
        optim_utils.load_full_optim_state_dict(model, optimizer, None, rank0_only=True)
    given = full if dist.get_rank() == 0 else None
    with pytest.raises((TypeError, RuntimeError), match=r"got a NoneType\. If only the first rank .*rank0_only=True"):
        optim_utils.load_full_optim_state_dict(model, optimizer, given)
    with pytest.raises(RuntimeError, match="rank 0 has rank0_only=False and rank 1 has rank0_only=True"):
        optim_utils.load_full_optim_state_dict(model, optimizer, full, rank0_only=dist.get_rank() == 1)


def _refuse_on_one_rank(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise LookupError("no use for this state")


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(2)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_every_rank(rank0_only: bool) -> None:
    model, optimizer = trained()
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    optimizer.register_load_state_dict_pre_hook(_refuse_on_one_rank)
    with pytest.raises((LookupError, OtherRankError), match="no use for this state"):
        optim_utils.load_full_optim_state_dict(model, optimizer, full, rank0_only=rank0_only)


@on_ranks(2)
def test_other_groups_are_refused() -> None:
    model: Any = garden(fully_sharded(**FORMS[2]))
    optimizer = grouped_adamw(model)
    train(model, optimizer, range(2))
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert named is not None
    with pytest.raises(
        ValueError, match="in parameter groups 0 and 0, but the optimizer state has them in groups 0 and 1"
    ):
        optim_utils.load_full_optim_state_dict(model, adam(model), named)
    some = momentum(model)
    whole = optim_utils.full_optim_state_dict(model, some, recipient_rank=None)
    with pytest.raises(
        ValueError, match=r"has frozen.weight in its parameter group 0, but the optimizer state does not"
    ):
        optim_utils.load_full_optim_state_dict(model, adam(model), whole)
    few = torch.optim.AdamW([dict(model.named_parameters())["idle"]])
    with pytest.raises(ValueError, match=r"the optimizer state has scale, but the optimizer does not"):
        optim_utils.load_full_optim_state_dict(model, few, named)


def test_other_keys_are_refused() -> None:
    plain = nn.Linear(2, 2)
    full = adam(plain).state_dict()
    with pytest.raises(ValueError, match="to must be 'names' or 'numbers', got 'ids'"):
        optim_utils.rekey_optim_state_dict(full, plain, "ids")
    with pytest.raises(ValueError, match="the optimizer state has parameters that the model does not have: 1"):
        optim_utils.rekey_optim_state_dict(full, nn.Linear(2, 2, bias=False), "names")
    with pytest.raises(ValueError, match="Adam has parameters that are not the module's"):
        optim_utils.rekey_optim_state_dict(full, plain, "names", adam(nn.Linear(2, 2)))


# Optimizers that need whole parameters


def sgd_named(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of a class with this name, with these options in its group."""
    optimizer: torch.optim.Optimizer = type(name, (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    optimizer.param_groups[0] |= options
    return optimizer


# By its name or its options, what an optimizer of shards warns of.
WARNINGS: list[tuple[str, dict[str, Any], str]] = [
    ("Adafactor", {}, r"Adafactor needs the rows.*ignored_parameters"),
    ("FusedLAMB", {}, r"FusedLAMB needs the rows.*ignored_parameters"),
    ("AdamMini", {}, r"AdamMini needs the rows.*ignored_parameters"),
    ("AdamP", {}, r"AdamP needs the rows.*ignored_parameters"),
    ("Prodigy", {}, "Prodigy estimates its step size from all parameters"),
    ("Adai", {}, "Adai computes means or norms over all parameters"),
    ("LookSAM", {}, "SAM divides by the norm of all gradients, but"),
    ("SGD", {"rho": 0.05, "adaptive": False}, "SAM divides by the norm of all"),  # the inner optimizer of SAM
]


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@on_ranks(2)
def test_optimizers_of_whole_parameters_warn_once(form: dict[str, Any]) -> None:
    model: FullyShardedDataParallel = garden(fully_sharded(**form))
    for name, options, message in WARNINGS:
        with pytest.warns(UserWarning, match=message) as seen:
            train(model, sgd_named(name, model, **options), range(2))
        assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, options in (("LambdaSGD", {}), ("AdamPlus", {}), ("Prodigy", {"fsdp_in_use": True})):
            train(model, sgd_named(name, model, **options), range(1))
        plain = garden()
        train(plain, sgd_named("Adafactor", plain), range(1), alone=True)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, and has its own state dict, as Lookahead of `pytorch_optimizer`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.defaults = inner, inner.state, inner.defaults
        self._optimizer_step_pre_hooks: dict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: dict[int, Any] = OrderedDict()
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@on_ranks(2)
def test_an_optimizer_around_another_one_may_leave_torchs_constructor_out() -> None:
    states = []
    for around in (Around, lambda inner: inner):
        model: FullyShardedDataParallel = garden(fully_sharded())
        train(model, around(torch.optim.Adam(model.parameters(), lr=0.1)), range(2))
        states.append(model.state_dict())
    assert_same(*states)


@pytest.mark.parametrize("form", ["flat", "original", "fully_shard"])
@on_ranks(2)
def test_an_optimizer_that_divides_parameters_among_ranks_is_refused(form: str) -> None:
    """Before its step: ranks would overwrite their shards with those of others, or wait for each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which the module of torch uses
        from torch.distributed.optim import ZeroRedundancyOptimizer

    wrap = fully_sharded(use_orig_params=form == "original")
    model = fully_shard(nested_mlp()) if form == "fully_shard" else nested_mlp(wrap)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    before = [value.clone() for value in model.state_dict().values()]
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer steps each parameter.*optimizer_class"):
        optimizer.step()
    for now, then in zip(model.state_dict().values(), before, strict=True):
        assert_same(now, then)


@on_ranks(2, 1)
def test_an_optimizer_that_searches_along_lines_is_refused_where_ranks_have_parts() -> None:
    model: FullyShardedDataParallel = garden(fully_sharded())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    inputs = torch.ones(2, 5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    if dist.get_world_size() == 1:
        assert optimizer.step(closure) > closure()
        return
    with pytest.raises(RuntimeError, match="LBFGS needs inner products over all parameters"):
        optimizer.step(closure)
