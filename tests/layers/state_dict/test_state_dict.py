"""State dicts: what leaves a sharded model, and what may enter it, is what the plain module would give and take.

Most tests run on `Zoo`, which holds everything that a state dict can hold, and compare with the same model unwrapped.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, OtherRankError, TrainingState, get_fsdp_instances
from fsdp.engine.names import clean_name
from tests.helpers.calls import summon
from tests.helpers.equality import assert_same_state
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, nested_mlp
from tests.helpers.ranks import RankPool
from tests.helpers.state_dicts import LAYER_BYTES, LAYERS, at_most, tokens, train, zoo


class Parent(nn.Module):
    """A plain module around a wrapped one."""

    def __init__(self, wrap: Wrap, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.before = nn.Linear(3, 2)
        self.child = zoo(wrap, seed)
        self.register_buffer("after", torch.arange(3.0))


# Saving


@parametrize_pairs(world_size=[1, 2, 3, 4], flatten_parameters=[True, False])
@on_ranks("world_size")
def test_the_state_is_the_plain_modules(flatten_parameters: bool) -> None:
    wrap = fully_sharded(flatten_parameters=flatten_parameters)
    expected = zoo().state_dict()
    model = zoo(wrap)
    for _ in range(2):
        assert_same_state(model.state_dict(), expected)
    assert model.state_dict()._metadata == expected._metadata
    train(model)
    model.load_state_dict(expected)  # weights and statistics are those of the start again, seen by every rank
    assert_same_state(model.state_dict(), expected)
    assert_same_state(Parent(wrap).state_dict(), Parent(keep).state_dict())


def _train_and_save() -> dict[str, Any]:
    model = zoo(fully_sharded())
    train(model)
    state = model.state_dict()
    assert not torch.equal(state["trunk.0.weight"], zoo().state_dict()["trunk.0.weight"])
    assert torch.equal(state["head.weight"], state["tokens.weight"]), "tied parameters are under each name"
    # Statistics of a batch norm are each rank's own, as they are without sharding.
    return {name: value for name, value in state.items() if "running" not in name}


@on_ranks(2)
def test_the_state_is_owned() -> None:
    model = zoo(fully_sharded())
    for change in (model.state_dict(), model.state_dict(keep_vars=False)):
        storages = set()
        for name, value in change.items():
            if isinstance(value, Tensor):
                assert not value.requires_grad
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name
                storages.add(value.untyped_storage().data_ptr())
                value.fill_(17)
        # Tied names may share theirs; the empty parameter's is nobody's.
        assert len(storages) >= len([key for key, value in change.items() if isinstance(value, Tensor)]) - 1
        assert_same_state(model.state_dict(), zoo().state_dict())
    before = model.state_dict()
    kept = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
    train(model)
    assert all(torch.equal(before[name], value) for name, value in kept.items()), "training may not change it"


@pytest.mark.parametrize("to_sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
@on_ranks(2)
def test_sparse_buffers_are_owned_copies(to_sparse: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: this layout is in beta state
        module.register_buffer("adjacency", to_sparse(torch.eye(3)))
    model = fully_sharded()(module)
    for state in (model.state_dict(), model.sharded_state_dict()):
        copied = state["adjacency"]
        assert copied.layout is module.adjacency.layout
        copied.values().zero_() if copied.layout is torch.sparse_csr else copied._values().zero_()
        assert torch.equal(module.adjacency.to_dense(), torch.eye(3))
    at_first = model.state_dict(rank0_only=True)
    assert list(at_first) == (["weight", "bias", "adjacency"] if dist.get_rank() == 0 else [])


@on_ranks(2)
def test_prefix_destination_and_keep_vars() -> None:
    model = zoo(fully_sharded())
    destination: OrderedDict[str, Any] = OrderedDict(before=1)
    destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    assert model.state_dict(destination=destination, prefix="model.") is destination
    assert list(destination) == ["before", *(f"model.{name}" for name in zoo().state_dict())]
    variables = model.state_dict(keep_vars=True)
    assert isinstance(variables["trunk.0.weight"], nn.Parameter)
    assert variables["trunk.0.weight"].requires_grad
    assert not variables["frozen.weight"].requires_grad
    assert variables["head.weight"] is variables["tokens.weight"]
    inner = model.module.module.trunk.state_dict()
    assert_same_state(inner, zoo().trunk.state_dict())


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_a_state_dict_between_forward_and_backward(reshard_after_forward: bool) -> None:
    wrap = fully_sharded(reshard_after_forward=reshard_after_forward)
    model, undisturbed = nested_mlp(wrap), nested_mlp(wrap)
    inputs = torch.ones(2, 5)
    loss = model(inputs).sum()
    assert_same_state(model.state_dict(), nested_mlp().state_dict())
    loss.backward()
    undisturbed(inputs).sum().backward()
    for found, expected in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    model(inputs)  # and no backward
    model.state_dict()
    model(inputs).sum().backward()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_a_state_dict_in_the_middle_of_accumulation(reshard_after_forward: bool) -> None:
    wrap = fully_sharded(reshard_after_forward=reshard_after_forward)
    model, undisturbed = nested_mlp(wrap), nested_mlp(wrap)
    inputs = torch.ones(2, 5)
    for each in (model, undisturbed):
        with each.no_sync():
            each(inputs).sum().backward()
        if each is model:
            assert_same_state(model.state_dict(), nested_mlp().state_dict())
        each(inputs).sum().backward()
    for found, expected in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@on_ranks(2)
def test_a_state_dict_while_summoned() -> None:
    model = zoo(fully_sharded())
    with model.summon_full_params():
        state = model.state_dict()
        assert_same_state(state, zoo().state_dict())
        for value in state.values():
            if isinstance(value, Tensor):
                value.fill_(17)
        model.load_state_dict(zoo(seed=1).state_dict())
    assert_same_state(model.state_dict(), zoo(seed=1).state_dict())


@on_ranks(2)
def test_buffers_stay_in_their_own_dtype_while_summoned() -> None:
    layer: Any = nn.Linear(3, 3)
    layer.register_buffer("table", torch.tensor(1.0001))
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model: Any = FullyShardedDataParallel(layer, mixed_precision=policy)
    with model.summon_full_params():
        model.load_state_dict({**model.state_dict(), "table": torch.tensor(1.0002)})
        assert torch.equal(model.state_dict()["table"], torch.tensor(1.0002))
    assert layer.table.dtype is torch.bfloat16


# Loading


@parametrize_pairs(world_size=[2, 3], flatten_parameters=[True, False])
@on_ranks("world_size")
def test_there_and_back(flatten_parameters: bool) -> None:
    wrap = fully_sharded(flatten_parameters=flatten_parameters)
    model, plain = zoo(wrap), zoo(seed=1)
    params = list(model.parameters())
    train(model)
    assert str(plain.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(plain.eval()(tokens()), model.eval()(tokens()))
    replaced = zoo(seed=2)
    given = replaced.state_dict()
    untouched = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
    assert_same_state(model.state_dict(), replaced.state_dict())
    assert list(given) == list(replaced.state_dict()), "the dictionary is the caller's"
    assert torch.equal(replaced.eval()(tokens()), model.eval()(tokens()))
    assert all(map(torch.is_same_size, model.parameters(), params))
    assert [id(param) for param in model.parameters()] == [id(param) for param in params], "optimizers go on working"
    train(model.train())
    assert all(torch.equal(given[name], value) for name, value in untouched.items()), "values are copied"


def test_a_state_saved_at_one_world_size_loads_at_another(ranks: RankPool) -> None:
    state, *others = ranks(3).run(_train_and_save)
    for other in others:
        assert_same_state(other, state)
    for world_size in (1, 4):
        ranks(world_size).run(_load_what_others_saved, state)


def _load_what_others_saved(state: dict[str, Any]) -> None:
    model = zoo(fully_sharded())
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    assert all("running" in name for name in found.missing_keys)
    after = model.state_dict()
    assert_same_state({name: after[name] for name in state}, state)


@on_ranks(1, 3)
def test_a_wrapped_child_of_a_plain_module() -> None:
    parent = Parent(fully_sharded())
    assert str(parent.load_state_dict(Parent(keep, seed=1).state_dict())) == "<All keys matched successfully>"
    assert_same_state(parent.state_dict(), Parent(keep, seed=1).state_dict())
    Parent(keep).load_state_dict(parent.state_dict())
    state = parent.state_dict()
    del state["child.trunk.0.weight"], state["before.bias"]
    state["child.extra"] = torch.ones(1)
    with pytest.raises(RuntimeError) as error:
        parent.load_state_dict(state)
    for part in ('Missing key(s) in state_dict: "before.bias", "child.trunk.0.weight"', '"child.extra"'):
        assert part in str(error.value)
    train(parent.child)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_changed_shards_are_seen_at_once(reshard_after_forward: bool) -> None:
    model = nested_mlp(fully_sharded(reshard_after_forward=reshard_after_forward))
    model(torch.ones(2, 5))  # parameters are kept for a backward that does not come
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    doubled = {name: 2.0 * value for name, value in nested_mlp().state_dict().items()}
    assert_same_state(model.state_dict(), doubled)
    with model.summon_full_params():
        assert torch.equal(model.module.module.entry.weight, doubled["entry.weight"])


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_loading_after_a_forward_is_seen_by_the_next(reshard_after_forward: bool) -> None:
    model = nested_mlp(fully_sharded(reshard_after_forward=reshard_after_forward))
    inputs = torch.ones(2, 5)
    model(inputs)  # parameters are kept for a backward that does not come
    model.load_state_dict(nested_mlp(seed=1).state_dict())
    assert_same_state(model.state_dict(), nested_mlp(seed=1).state_dict())
    assert torch.equal(model(inputs), nested_mlp(seed=1)(inputs))
    model(inputs).sum().backward()


@on_ranks(2, 4)
def test_ranks_that_keep_nothing_of_a_parameter_notice_that_it_changed() -> None:
    model = FullyShardedDataParallel(nn.PReLU())  # one element: all ranks but the first hold padding only
    inputs = -torch.ones(2)
    model(inputs)  # parameters are kept for a backward that does not come
    model.load_state_dict({"weight": torch.tensor([0.5])})
    assert model.state_dict()["weight"].item() == 0.5
    model(inputs)
    with model.summon_full_params():
        model.module.module.weight.data.fill_(0.75)
    assert torch.equal(model(inputs), 0.75 * inputs)


LOADS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "plain_dict": dict,  # without the versions that torch keeps beside it
    "missing": lambda state: state.pop("trunk.2.0.weight"),
    "missing_tied": lambda state: state.pop("head.weight"),
    "missing_counter": lambda state: state.pop("trunk.1.num_batches_tracked"),
    "missing_unit": lambda state: [state.pop(name) for name in list(state) if name.startswith("trunk.2")],
    "unexpected_inside": lambda state: state.update({"trunk.2.0.extra": torch.ones(1)}),
    "unexpected_unit": lambda state: state.update({"trunk.9.weight": torch.ones(1)}),
    "shape": lambda state: state.update({"trunk.2.0.weight": torch.ones(3, 3)}),
    "shape_of_buffer": lambda state: state.update({"trunk.1.running_mean": torch.ones(3)}),
    "dtype": lambda state: state.update({"trunk.2.0.weight": torch.ones(5, 7, dtype=torch.float64)}),
    "no_tensor": lambda state: state.update({"trunk.2.0.weight": "text"}),
    "tied_differently": lambda state: state.update({"head.weight": torch.ones(11, 5)}),
    "empty": lambda state: state.clear(),
}


@pytest.mark.parametrize("name", LOADS)
@on_ranks(2)
def test_it_loads_as_the_plain_module_does(name: str) -> None:
    """Whatever the dictionary is, keys, errors and values are those of the plain module. An error changes nothing.

    The error of an empty one has a remedy behind, for ranks of which only the first has a state.
    """
    for strict in (True, False):
        found, expected = (_outcome(zoo(wrap), name, strict) for wrap in (fully_sharded(), keep))
        is_error = isinstance(found[0], list)
        assert (found[0][: len(expected[0])] if is_error else found[0]) == expected[0]
        assert_same_state(found[1], zoo().state_dict() if is_error else expected[1])


def _outcome(model: nn.Module, name: str, strict: bool) -> tuple[Any, dict[str, Any]]:
    """What loading returned or said, and the state afterwards."""
    state = zoo(seed=1).state_dict()
    changed = LOADS[name](state)
    try:
        result = model.load_state_dict(changed if name == "plain_dict" else state, strict=strict)
    except RuntimeError as error:
        said: Any = str(error).replace("FullyShardedDataParallel:", "Zoo:").splitlines()
    else:
        said = (sorted(result.missing_keys), sorted(result.unexpected_keys))
    after = {key: value.clone() if isinstance(value, Tensor) else value for key, value in model.state_dict().items()}
    train(model)  # usable, whatever happened
    assert all(wrapper.training_state is TrainingState.IDLE for wrapper in get_fsdp_instances(model))
    return said, after


@pytest.mark.parametrize("key", ["tokens.weight", "trunk.1.running_mean"])
@on_ranks(2)
def test_values_that_cannot_be_copied_are_refused_before_anything_is_changed(key: str) -> None:
    model, state = zoo(fully_sharded()), zoo(seed=1).state_dict()
    if dist.get_rank() == 1:
        state[key] = state[key].to("meta")
    with pytest.raises(RuntimeError, match=f'rank 1 could not load.*"{key}".*no values to copy|"{key}".*no values to'):
        model.load_state_dict(state)
    assert_same_state(model.state_dict(), zoo().state_dict())
    assert not model.state_dict()["tokens.weight"].is_meta


class Extra(nn.Linear):
    """Has extra state, which it copies into a buffer."""

    def __init__(self, seen: float = 0.0) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.tensor(seen))

    def get_extra_state(self) -> float:
        return float(self.seen) + 1

    def set_extra_state(self, state: float) -> None:
        if state < 0:
            raise ValueError("below zero")
        assert self.seen == state - 1, "buffers are loaded before"
        self.seen.fill_(state)


@on_ranks(2)
def test_extra_state_is_set_when_all_ranks_can_load() -> None:
    model = fully_sharded()(nn.Sequential(fully_sharded()(Extra()), Extra()))
    state = nn.Sequential(Extra(4.0), Extra(5.0)).state_dict()
    misfit = {**state, "1.weight": torch.ones(7)} if dist.get_rank() == 0 else state
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight"):
        model.load_state_dict(misfit)
    assert [float(model.state_dict()[f"{number}.seen"]) for number in (0, 1)] == [0, 0]
    model.load_state_dict(state)
    assert [float(model.state_dict()[f"{number}.seen"]) for number in (0, 1)] == [5, 6]
    refused = {**state, "1._extra_state": -1.0} if dist.get_rank() == 0 else state
    with pytest.raises((ValueError, RuntimeError), match="below zero"):
        model.load_state_dict(refused)
    model(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_loading_with_assign_is_refused() -> None:
    model = nested_mlp(fully_sharded())
    with pytest.raises(NotImplementedError, match="values are copied into shards"):
        model.load_state_dict(nested_mlp(seed=1).state_dict(), assign=True)


# What users hang on state dicts


class Versioned(nn.Module):
    """Changed its format in version 2, and knows how to read version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))
        self.loads: list[int | None] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.loads.append(local_metadata.get("version"))
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "old_weight").T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]


@on_ranks(2)
def test_overrides_of_load_from_state_dict_see_the_version() -> None:
    wrap = fully_sharded()
    layer = Versioned()
    model = wrap(nn.Sequential(wrap(layer), wrap(nn.Sequential(nn.Linear(3, 5), Versioned()))))
    state = model.state_dict()
    new = OrderedDict((name, torch.full_like(value, 2.0)) for name, value in state.items())
    new._metadata = state._metadata  # type: ignore[attr-defined]
    model.load_state_dict(new)
    assert layer.loads == [2]
    assert_same_state(model.state_dict(), new)
    old = OrderedDict(
        (name.replace("0.weight", "0.old_weight") if name == "0.weight" else name, value) for name, value in new.items()
    )
    old["0.old_weight"] = torch.arange(15.0).view(3, 5)
    old["1.1.old_weight"] = old.pop("1.1.weight").T.contiguous()
    model.load_state_dict(old)
    assert layer.loads == [2, None]
    assert torch.equal(model.state_dict()["0.weight"], torch.arange(15.0).view(3, 5).T)
    train_on = torch.ones(2, 5)
    model(train_on).sum().backward()


Calls = list[tuple[Any, ...]]


@on_ranks(2)
def test_the_users_hooks_run_as_on_the_plain_module() -> None:
    assert _hooked(fully_sharded()) == _hooked(keep)


def _hooked(wrap: Wrap) -> Calls:
    """What hooks on the user's modules saw, and that what they did to the state dict counts."""
    calls: Calls = []
    layers = [nn.Linear(5, 7), nn.Linear(7, 3)]
    inner = nn.Sequential(layers[0])
    outer = nn.Sequential(wrap(inner), layers[1])
    for number, module in enumerate((layers[0], layers[1], inner, outer)):
        _watch(module, number, calls)
    model = wrap(outer)
    state = model.state_dict()
    assert state.pop("extra") == "of the outer"
    state["0.0.weight"] = torch.full((7, 5), 2.0)
    state["renamed"] = state.pop("1.bias")
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()["0.0.weight"], torch.full((7, 5), 2.0))
    return calls


def _watch(module: nn.Module, number: int, calls: Calls) -> None:
    def before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        calls.append((number, "before saving", prefix, sorted(dict(module.named_parameters(recurse=False)))))

    def after_saving(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        calls.append((number, "after saving", prefix, sorted(state)))
        if number == 3:
            state[prefix + "extra"] = "of the outer"

    def before_loading(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        names = sorted(clean_name(key[len(prefix) :]) for key in state if key.startswith(prefix))
        calls.append((number, "before loading", names))
        if number == 3 and prefix + "renamed" in state:
            state[prefix + "1.bias"] = state.pop(prefix + "renamed")

    def after_loading(module: nn.Module, incompatible: Any) -> None:
        calls.append((number, "after loading", list(incompatible.missing_keys), list(incompatible.unexpected_keys)))

    module.register_state_dict_pre_hook(before_saving)
    module.register_state_dict_post_hook(after_saving)
    module.register_load_state_dict_pre_hook(before_loading)
    module.register_load_state_dict_post_hook(after_loading)


@on_ranks(2)
def test_hooks_on_the_wrapper() -> None:
    model = nested_mlp(fully_sharded())
    seen = []
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append(("before", prefix)))
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}epoch": 3}))
    model.register_load_state_dict_post_hook(lambda module, keys: keys.unexpected_keys.remove("epoch"))
    state = model.state_dict()
    assert seen == [("before", "")]
    assert state["epoch"] == 3
    model.load_state_dict(state)
    holder = nn.ModuleDict({"model": model})
    assert holder.state_dict()["model.epoch"] == 3
    assert seen == [("before", ""), ("before", "model.")]


class Tagged(FullyShardedDataParallel):
    """Adds something of its own to the state, as clients of FairScale do."""

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        state = super().state_dict(destination, prefix, keep_vars)
        state[f"{prefix}tag"] = type(self.module.module).__name__
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, **options: Any) -> Any:
        return super().load_state_dict({k: v for k, v in state_dict.items() if k != "tag"}, strict, **options)


@on_ranks(2)
def test_a_subclass_with_its_own_state_dict() -> None:
    model = Tagged(nn.Sequential(FullyShardedDataParallel(nn.Linear(5, 3)), nn.Linear(3, 2)))
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias", "tag"]
    assert state["tag"] == "Sequential"
    model.load_state_dict(state)
    parent = nn.ModuleDict({"model": model})
    assert parent.state_dict()["model.tag"] == "Sequential"
    nested = FullyShardedDataParallel(nn.Sequential(Tagged(nn.Linear(5, 3)), nn.Linear(3, 2)))
    assert nested.state_dict()["0.tag"] == "Linear"


class Refusing(nn.Linear):
    """Has extra state, and may refuse to give it."""

    fails = False

    def get_extra_state(self) -> int:
        if self.fails:
            raise ValueError("of the user")
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize("place", ["wrapper", "before", "after", "extra"])
@on_ranks(2)
def test_a_user_hook_that_fails_on_one_rank_stops_all(place: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the user")

    inner = Refusing(3, 2)
    model: Any = FullyShardedDataParallel(nn.Sequential(inner, FullyShardedDataParallel(nn.Linear(2, 2))))
    expected, hook = model.state_dict(), None
    if dist.get_rank() == 1:
        inner.fails = place == "extra"
        if not inner.fails:
            register = "register_state_dict_post_hook" if place == "after" else "register_state_dict_pre_hook"
            hook = getattr(model if place == "wrapper" else inner, register)(fail)
        error, said = ValueError, "of the user"
    else:
        error, said = OtherRankError, "rank 0: rank 1 could not take its state dict. ValueError: of the user"
    for options in ({}, {"rank0_only": True}):
        with pytest.raises(error, match=said):
            model.state_dict(**options)
    inner.fails = False
    if hook is not None:
        hook.remove()
    assert_same_state(model.state_dict(), expected)


@on_ranks(2)
def test_arguments_that_differ_between_ranks_are_an_error_on_all() -> None:
    model: Any = nested_mlp(fully_sharded())
    is_second = dist.get_rank() == 1
    with pytest.raises(ValueError if is_second else OtherRankError, match=r"dtype must be .* got torch.int32"):
        model.state_dict(dtype=torch.int32 if is_second else torch.float32)
    with pytest.raises(RuntimeError, match=r"rank 0 has rank0_only=False and rank 1 has rank0_only=True"):
        model.state_dict(rank0_only=is_second)
    assert_same_state(model.state_dict(), nested_mlp().state_dict())


@on_ranks(2)
def test_an_exception_in_a_users_hook_leaves_the_model_usable() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the user")

    model = zoo(fully_sharded())
    expected = model.state_dict()
    inner = model.module.module.trunk.module.module[0]
    for register, use in (
        (inner.register_state_dict_post_hook, model.state_dict),
        (inner.register_load_state_dict_pre_hook, model.load_state_dict),
        (inner.register_load_state_dict_post_hook, model.load_state_dict),
    ):
        hook = register(fail)
        with pytest.raises(ValueError, match="of the user"):
            use(*[expected][: register is not inner.register_state_dict_post_hook])
        hook.remove()
        assert_same_state(model.state_dict(), expected)
        train(model)
        expected = model.state_dict()


def _forward(model: nn.Module) -> None:
    model(tokens())


@pytest.mark.parametrize("use", [_forward, FullyShardedDataParallel.state_dict, summon])
@on_ranks(2)
def test_a_load_through_a_parent_that_failed_is_put_right_by_the_next_use(use: Callable[[Any], Any]) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the user")

    parent = Parent(fully_sharded())
    hook = parent.child.module.module.frozen.register_load_state_dict_pre_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        parent.load_state_dict(parent.state_dict())
    hook.remove()
    use(parent.child)
    train(parent.child)
    parent.load_state_dict(Parent(keep, seed=1).state_dict())
    assert_same_state(parent.state_dict(), Parent(keep, seed=1).state_dict())


# Memory


@on_ranks(4)
def test_no_rank_holds_two_full_copies() -> None:
    wrap = fully_sharded()
    model = wrap(nn.Sequential(*(wrap(nn.Linear(64, 64, bias=False)) for _ in range(LAYERS)), nn.Linear(64, 1)))
    with at_most(LAYERS * LAYER_BYTES):  # the result, in which pieces are received
        state = model.state_dict()
    with at_most(0):  # every rank cuts its part from what it is given
        model.load_state_dict(state)
    holder = nn.ModuleDict({"model": model})
    state = holder.state_dict()
    with at_most(0):
        holder.load_state_dict(state)


@on_ranks(2)
def test_of_a_mapped_file_a_rank_reads_its_part(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    expected = nn.Linear(2048, 2048, bias=False)
    if dist.get_rank() == 0:
        torch.save(expected.state_dict(), path)
    dist.barrier()
    model = FullyShardedDataParallel(nn.Linear(2048, 2048, bias=False))
    state = torch.load(path, mmap=True)
    model.load_state_dict(state)
    resident = [int(line.split()[1]) * 1024 for line in _mapping(path) if line.startswith("Rss:")]
    assert 0 < sum(resident) < 0.8 * path.stat().st_size, "half of it, and what the kernel maps around"
    assert torch.equal(model.state_dict()["weight"], state["weight"])


def _mapping(path: Path) -> list[str]:
    """What the kernel says of this file in the process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begins = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    return [line for number in begins for line in lines[number + 1 : number + 6]]
