"""What clients of FairScale reach for beyond its documentation: private names, groups of their own, small helpers."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.compat.fairscale import (
    DummyProcessGroup,
    ReduceScatterBucketer,
    apply_to_tensors,
    pack_kwargs,
    split_non_tensors,
    unpack_kwargs,
    unpack_non_tensors,
)
from fsdp.layers.foreign_names import PRIVATE
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import assert_parity, fully_sharded, nested_mlp, sgd_with_momentum

ALONE = DummyProcessGroup(rank=0, size=1)


def linear(kind: Any = FullyShardedDataParallel, **options: Any) -> Any:
    return kind(nn.Sequential(nn.Linear(3, 2)), ALONE, **options)


# Names with an underscore


class Overriding(FullyShardedDataParallel):
    """Does around each forward what some clients do."""

    calls: list[str]
    returns: Any = None

    def _register_post_backward_hooks(self) -> None:
        self.calls.append("post")

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        assert isinstance(outputs, Tensor)
        self.calls.append("pre")
        return self.returns


def test_registering_hooks_can_be_overridden() -> None:
    model = linear(Overriding)
    model.calls = []
    outputs = model(torch.ones(1, 3))
    assert model.calls == ["post", "pre"]
    torch.testing.assert_close(outputs, linear_like(model)(torch.ones(1, 3)))  # None was returned, and is not it
    outputs.sum().backward()
    assert model.flat_param.grad is not None


def test_what_an_override_returns_is_returned() -> None:
    model = linear(Overriding)
    model.calls, model.returns = [], "something else"
    assert model(torch.ones(1, 3)) == "something else"


def linear_like(model: Any) -> nn.Module:
    plain = nn.Sequential(nn.Linear(3, 2))
    plain.load_state_dict(model.state_dict())
    return plain


@on_ranks(2)
def test_free_full_params_gives_memory_back() -> None:
    model: Any = fully_sharded(reshard_after_forward=False, flatten_parameters=False)(nn.Sequential(nn.Linear(3, 2)))
    with model.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    is_whole = [handle.is_unsharded for handle in model._unit.handles]
    assert is_whole == [True, True]
    model._free_full_params([model.params[0]])
    assert [handle.is_unsharded for handle in model._unit.handles] == [False, True]
    model._free_full_params()
    assert [handle.is_unsharded for handle in model._unit.handles] == [False, False]
    model(torch.ones(1, 3)).sum().backward()


def test_free_full_params_in_the_middle_of_a_forward_is_refused() -> None:
    model = linear()
    model.module.module.register_forward_pre_hook(lambda *_: model._free_full_params())
    with pytest.raises(RuntimeError, match="cannot free full parameters in the middle of a forward"):
        model(torch.ones(1, 3))


def test_lazy_init_settles_the_root_and_a_reset_forgets_it() -> None:
    model: Any = FullyShardedDataParallel(nn.Sequential(linear(), nn.Linear(2, 2)), ALONE)
    assert model._is_root is None
    model._lazy_init()
    assert [each._is_root for each in (model, model[0])] == [True, False]
    model._reset_lazy_init()
    assert model._is_root is None
    model._lazy_init()
    model._is_root = None
    assert model[0]._is_root is None


@pytest.mark.parametrize("name", list(PRIVATE))
def test_what_is_not_there_says_what_to_use_instead(name: str) -> None:
    model = linear()
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=f"no {name}, which FairScale's has: ") as error:
        getattr(model, name)
    assert PRIVATE[name] in str(error.value)


def test_a_name_of_the_users_module_comes_first() -> None:
    model = linear()
    model.module.module._streams = "the user's"
    assert model._streams == "the user's"


# Groups of their own


class Counting:
    """A proxy of a group that counts what goes through it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if "gather" in name or "scatter" in name:
            self.seen.append(name)
        return getattr(self.group, name)


@on_ranks(2)
def test_a_proxy_of_a_group_of_several_trains() -> None:
    proxy = Counting(dist.group.WORLD)
    assert_parity(nested_mlp, sgd_with_momentum, wrap=fully_sharded(process_group=proxy), clip=0.1)
    assert any("gather" in name for name in proxy.seen)
    assert any("scatter" in name for name in proxy.seen)


@on_ranks(2)
def test_a_proxy_saves_loads_and_takes_the_first_ranks_values() -> None:
    torch.manual_seed(dist.get_rank())
    proxy = Counting(dist.group.WORLD)
    model: Any = FullyShardedDataParallel(nn.Linear(3, 2), proxy, sync_module_states=True)
    state = model.state_dict()
    torch.manual_seed(0)
    torch.testing.assert_close(state["weight"], nn.Linear(3, 2).weight.detach())
    first = state if dist.get_rank() == 0 else None
    model.load_state_dict(first, rank0_only=True)
    assert model._unit.ranks == {0, 1}


@on_ranks(2)
def test_parameters_say_that_they_are_sharded() -> None:
    model: Any = nested_mlp(fully_sharded())
    assert all(param._is_sharded for param in model.parameters())
    assert not any(param._is_sharded for param in linear().parameters())


# Helpers


def test_apply_to_tensors_goes_into_any_container() -> None:
    pair = namedtuple("pair", "left right")
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    nest: Any = OrderedDict(a=[torch.ones(1), "text"], b=pair((torch.ones(1),), None), c={"d": packed})
    found = apply_to_tensors(lambda tensor: tensor + 1, nest)
    assert isinstance(found, OrderedDict)
    assert (float(found["a"][0]), found["a"][1]) == (2.0, "text")
    assert isinstance(found["b"], pair)
    assert float(found["b"].left[0]) == 2.0
    torch.testing.assert_close(found["c"]["d"].data, torch.full((3,), 2.0))
    assert float(nest["a"][0]) == 1.0


def test_a_function_that_writes_in_place_keeps_a_packed_sequence() -> None:
    def fill(tensor: torch.Tensor) -> None:
        tensor.fill_(0)

    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    found = apply_to_tensors(fill, {"a": packed})["a"]
    padded, lengths = nn.utils.rnn.pad_packed_sequence(found)
    assert not padded.any()
    assert lengths.tolist() == [2, 1]


def test_keywords_are_packed_and_unpacked() -> None:
    keys, values = pack_kwargs(1, 2, a=3, b=4)
    assert (keys, values) == (("a", "b"), (1, 2, 3, 4))
    assert unpack_kwargs(keys, values) == ((1, 2), {"a": 3, "b": 4})
    assert unpack_kwargs((), (1,)) == ((1,), {})
    with pytest.raises(ValueError, match="2 names and only 1 values"):
        unpack_kwargs(("a", "b"), (1,))


def test_tensors_are_split_from_the_rest() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    tensors, rest = split_non_tensors((x, y, None, 3))
    assert rest == {"is_tensor": [True, True, False, False], "objects": [None, 3]}
    assert unpack_non_tensors(tensors, rest) == (x, y, None, 3)
    assert unpack_non_tensors(*split_non_tensors(x)) == (x,)
    with pytest.raises(ValueError, match="needs 2 tensors, got 1"):
        unpack_non_tensors((x,), rest)


# The bucketer


@on_ranks(2)
def test_small_reductions_wait_for_each_other() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Tensor] = {}
    bucketer = ReduceScatterBucketer(bucket_cap_mb=1)

    def reduce(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        inputs = [torch.full(shape, float(10 * rank + to), dtype=dtype) for to in range(world_size)]
        bucketer.reduce_scatter_async(inputs, dist.group.WORLD, lambda result: found.update({name: result}))
        for each in inputs:
            each.zero_()  # callers free them

    reduce("small", (2, 3))
    reduce("double", (4,), torch.float64)
    assert not found
    reduce("large", (2**20,))
    assert list(found) == ["large"]
    with pytest.raises(RuntimeError, match=r"1 reductions of torch\.float32 are pending: call flush\(\)"):
        bucketer.teardown()
    reduce("fills", (80000,))  # of 87381 for each rank
    reduce("next", (80000,))
    assert list(found) == ["large", "small", "fills"]
    bucketer.flush()
    assert set(found) == {"small", "double", "large", "fills", "next"}
    for name, shape in {"small": (2, 3), "double": (4,), "fills": (80000,), "large": (2**20,)}.items():
        expected = float(sum(10 * other + rank for other in range(world_size)))
        torch.testing.assert_close(found[name].float(), torch.full(shape, expected))
    bucketer.teardown()
    assert not bucketer.buckets


def test_without_a_bucket_nothing_waits() -> None:
    found: list[Tensor] = []
    ReduceScatterBucketer(bucket_cap_mb=0).reduce_scatter_async([torch.ones(2)], ALONE, found.append)
    torch.testing.assert_close(found, [torch.ones(2)])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [([], "a tensor for each of 1, got 0"), ([torch.ones(1)] * 2, "a tensor for each of 1, got 2")],
)
def test_the_bucketer_wants_a_tensor_for_each_rank(inputs: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReduceScatterBucketer().reduce_scatter_async(inputs, ALONE)


def test_the_bucketer_wants_tensors_that_are_alike() -> None:
    with pytest.raises(ValueError, match="one shape, dtype and device"):
        ReduceScatterBucketer().reduce_scatter_async([torch.ones(1), torch.ones(2)], DummyProcessGroup(0, 2))


# Optimizer state


class StepCounting(torch.optim.Optimizer):
    """Counts steps by what `start` is, and converts nothing when it loads."""

    def __init__(self, params: Any, start: Any) -> None:
        super().__init__(params, {})
        self._start = start

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", self._start) + 1
            state["sum"] = state.get("sum", 0) + param.grad


@pytest.mark.parametrize("start", [torch.tensor(0.0), torch.tensor(0), 0, 0.0], ids=str)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_shard_of_an_optimizer_state_has_the_types_of_the_live_one(start: Any, flatten: bool) -> None:
    model = linear(flatten_parameters=flatten)
    optimizer = StepCounting(model.parameters(), start)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer)
    assert [state["step"] for state in full["state"].values()] == [2, 2]
    assert not any(isinstance(state["step"], Tensor) for state in full["state"].values()), "FairScale's format"
    shard = model.get_shard_from_optim_state_dict(full)
    for found, live in zip(shard["state"].values(), optimizer.state.values(), strict=True):
        assert type(found["step"]) is type(live["step"])
        assert getattr(found["step"], "dtype", None) == getattr(live["step"], "dtype", None)
        assert found["step"] == 2
        assert torch.equal(found["sum"], live["sum"])
    optimizer.load_state_dict(shard)
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [3] * len(optimizer.state)


# A world of one


class Kinds(nn.Module):
    """Parameters of several numbers of dimensions, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.cube = nn.Parameter(torch.randn(2, 3, 2))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tied(self.layer(inputs)) * self.scale
        return torch.einsum("bi,kij->bkj", hidden, self.cube)


ALONE_OPTIONS: list[dict[str, Any]] = [{}, {"move_params_to_cpu": True}, {"offload": "disk"}, {"mixed_precision": True}]


@pytest.mark.parametrize("options", ALONE_OPTIONS, ids=str)
def test_unflattened_parameters_keep_their_shapes_in_a_world_of_one(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("offload"):
        options = options | {"offload_folder": tmp_path}
    if options.get("mixed_precision"):
        options = options | {"compute_dtype": torch.bfloat16}
    plain, shapes = Kinds(), {name: param.shape for name, param in Kinds().named_parameters()}
    model = FullyShardedDataParallel(Kinds(), ALONE, flatten_parameters=False, **options)
    optimizers = [torch.optim.Adam(one.parameters(), 0.01) for one in (model, plain)]
    tolerance = 0.05 if options.get("mixed_precision") else 1e-6
    for number in range(6):
        assert {name: param.shape for name, param in model.named_parameters()} == shapes
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            one(torch.linspace(-1, 1, 6).view(2, 3) + number).float().square().sum().backward()
            if one is model:
                assert all(param.grad.shape == param.shape for param in model.parameters())
                model.clip_grad_norm_(1e9)
            optimizer.step()
        _travel(number, model, optimizers[0])
        sharded_state = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(sharded_state[name], value, rtol=tolerance, atol=tolerance)
    assert all(state["exp_avg"].shape == param.shape for param, state in optimizers[0].state.items())


def _travel(number: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """After each step the state leaves and comes back in another way."""
    if number == 0:
        model.load_state_dict(model.state_dict())
        full = model.gather_full_optim_state_dict(optimizer)
        optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    elif number == 1:
        local = {name: value.clone() for name, value in model.local_state_dict().items()}
        whole = model.consolidate_shard_weights([local], [model.local_metadata_dict()])
        for name, value in model.state_dict().items():
            assert torch.equal(whole[name], value)
            assert local[name].shape == value.shape
        model.load_local_state_dict({name: value.flatten() for name, value in local.items()})  # as they were before
    elif number == 2:
        with model.summon_full_params():
            model.layer.bias.data.mul_(1)
        model.load_sharded_state_dict(model.sharded_state_dict())
    elif number == 3:
        copied = copy.deepcopy(model)
        assert [param.shape for param in copied.parameters()] == [param.shape for param in model.parameters()]
        copied(torch.ones(1, 3)).sum().backward()
        pickled = pickle.loads(pickle.dumps(model))
        assert [param.shape for param in pickled.parameters()] == [param.shape for param in model.parameters()]
    elif number == 4:
        for param in model.parameters():
            param.data = param.data.clone()


def test_a_plain_optimizer_is_handed_over_in_a_world_of_one() -> None:
    plain = Kinds()
    optimizer = torch.optim.Adam(plain.parameters(), 0.01)
    plain(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    model: Any = FullyShardedDataParallel(plain, ALONE, flatten_parameters=False)
    model.reshard_optimizer(optimizer)
    for state, moment in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg"], moment)
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
