"""What our `fully_shard` refuses, and in which words: every message says what to do instead."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchsPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchsOffload
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp
from fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from fsdp.layers.foreign_names import FULLY_SHARD_KEYWORDS
from tests.helpers.dtensor_twins import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


def linear() -> nn.Module:
    return nn.Linear(5, 3)


class WithoutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()


def with_a_parameter_named_like_a_wrapper() -> nn.Module:
    module = linear()
    module.register_parameter("_orig_mod", nn.Parameter(torch.ones(2)))
    return module


def of_torch_quantisation() -> nn.Module:
    model = linear()
    steps = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    model.steps = nn.Parameter(steps, requires_grad=False)  # type: ignore[assignment]
    return model


def of_dtensors() -> nn.Module:
    model = linear()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh_of(1), [Replicate()]))  # type: ignore[assignment]
    return model


def twice() -> nn.Module:
    return fsdp.fully_shard(linear())


def wrapped() -> nn.Module:
    return FullyShardedDataParallel(linear())


def with_wrapper_inside() -> nn.Module:
    return nn.Sequential(FullyShardedDataParallel(linear()), nn.Linear(3, 2))


def third(param: Tensor) -> Any:
    return Shard(2)


def replicated(param: Tensor) -> Any:
    return Replicate()


def number(param: Tensor) -> Any:
    return 1


# Modules


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (partial(nn.ModuleList, [linear()]), ValueError, "ModuleList has no forward.*on the modules in it"),
        (partial(nn.ModuleDict, {"a": linear()}), ValueError, "ModuleDict has no forward"),
        (partial(nn.ParameterList, [nn.Parameter(torch.ones(2))]), ValueError, "ParameterList has no forward"),
        (WithoutForward, ValueError, "WithoutForward has no forward"),
        (int, TypeError, "shards an nn.Module, got a int"),
        (list, ValueError, "got no modules"),
        (partial(list, "ab"), TypeError, "shards an nn.Module, got a str"),
        (twice, ValueError, "sharded already: call fully_shard only once"),
        (wrapped, ValueError, "FullyShardedDataParallel"),
        (with_wrapper_inside, ValueError, "Sequential has a FullyShardedDataParallel inside"),
        (with_a_parameter_named_like_a_wrapper, ValueError, "Linear has a parameter named _orig_mod.*another name"),
        (of_torch_quantisation, TypeError, "steps.*qint8"),
        (of_dtensors, ValueError, r"weight is a DTensor .* not another dimension of the same .*mesh=mesh\[\"dp\"\]"),
    ],
    ids=[
        "module_list", "module_dict", "parameter_list", "without_forward", "number", "empty", "list",
        "twice", "wrapped", "wrapper_inside", "named_like_a_wrapper", "quantised", "dtensors",
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_sharded(
    ranks: RankPool, make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    ranks(1).run(_refuse, make, error, message, {})


def _refuse(make: Callable[[], Any], error: type[Exception], message: str, options: dict[str, Any]) -> None:
    model = make()
    with pytest.raises(error, match=message):
        fsdp.fully_shard(model, **options)


@on_ranks(1)
def test_what_was_refused_is_left_as_it_was() -> None:
    model: Any = of_torch_quantisation()
    with pytest.raises(TypeError, match=r"steps.*qint8"):
        fsdp.fully_shard(model)
    assert type(model) is nn.Linear
    assert type(model.weight) is nn.Parameter
    del model.steps
    assert isinstance(fsdp.fully_shard(model), FSDPModule)


@on_ranks(1)
def test_a_module_of_a_class_that_allows_no_subclass_is_left_as_it_was() -> None:
    class Last(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("Last is not to be subclassed")

    modules = [linear(), Last(5, 3)]
    with pytest.raises(TypeError, match="not to be subclassed"):
        fsdp.fully_shard(modules)
    assert [type(module) for module in modules] == [nn.Linear, Last]
    assert all(type(param) is nn.Parameter for module in modules for param in module.parameters())
    assert isinstance(fsdp.fully_shard(modules[0]), FSDPModule)


@on_ranks(2)
def test_a_module_without_parameters_of_its_own_can_be_the_root() -> None:
    model: Any = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(nn.Linear(5, 5)), nn.Tanh()))
    once(model, INPUTS)
    assert model[0].weight.grad is not None


@on_ranks(2)
def test_ignored_parameters_stay_plain_and_apart() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    ignored = [model[1].weight]
    fsdp.fully_shard(model, ignored_params=set(ignored))
    assert model[1].weight is ignored[0]
    assert type(model[1].weight) is nn.Parameter
    once(model, INPUTS + dist.get_rank())
    assert model[1].weight.grad.shape == (2, 4)


# Options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reshard_after_forward": 3}, ValueError, "reshard_after_forward"),
        ({"reshard_after_forward": 0}, ValueError, "reshard_after_forward"),
        ({"reshard_after_forward": -1}, ValueError, "reshard_after_forward"),
        ({"reshard_after_forward": "yes"}, TypeError, "must be True, False, a number of ranks or \"host\", got 'yes'"),
        ({"reshard_after_forward": 2.0}, TypeError, "got 2.0"),
        ({"mesh": (2, 2)}, TypeError, "mesh must be a DeviceMesh, of init_device_mesh.*got a tuple"),
        ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy must be a MixedPrecisionPolicy, got a dtype"),
        ({"mp_policy": None}, TypeError, "mp_policy must be a MixedPrecisionPolicy"),
        ({"mp_policy": MixedPrecision()}, TypeError, "got a MixedPrecision, which belongs to"),
        ({"offload_policy": True}, TypeError, r"offload_policy must be CPUOffloadPolicy\(\) or OffloadPolicy\(\)"),
        ({"ignored_params": [1]}, TypeError, "ignored_params must be an iterable of Parameters, found a int"),
        ({"shard_placement_fn": third}, ValueError, r"Shard\(dim=2\) for weight, of shape \[3, 5\]"),
        ({"shard_placement_fn": replicated}, ValueError, r"must be Shard\(dim\)"),
        ({"shard_placement_fn": number}, ValueError, "shard_placement_fn returned 1 for weight"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_an_option_that_cannot_be(
    ranks: RankPool, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    ranks(1).run(_refuse, linear, error, message, options)


@pytest.mark.parametrize("name", FULLY_SHARD_KEYWORDS)
def test_arguments_of_the_wrapper_say_what_to_use(name: str) -> None:
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"fully_shard has no argument {name}, which FullyShardedDataParallel has") as e:
        fsdp.fully_shard(linear(), **given)
    assert FULLY_SHARD_KEYWORDS[name] in str(e.value)


@on_ranks(4)
def test_a_number_must_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward.*3"):
        fsdp.fully_shard(linear(), reshard_after_forward=3)
    fsdp.fully_shard(linear(), reshard_after_forward=4)


@on_ranks(1)
def test_a_mesh_has_one_or_two_dimensions() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(ValueError, match="got a 3-D DeviceMesh, and sharding uses at most two dimensions"):
        fsdp.fully_shard(linear(), mesh=init_device_mesh("cpu", (1, 1, 1)))


@on_ranks(2)
def test_no_dimensions_on_a_mesh_of_two() -> None:
    with pytest.raises(NotImplementedError, match=r"scale has no dimensions.*shape \[1\]"):
        fsdp.fully_shard(Scaled(), mesh=mesh_of(2, 1))


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))


@on_ranks(1)
def test_torchs_policies_are_taken() -> None:
    policy = TorchsPolicy(param_dtype=torch.bfloat16)
    model = fsdp.fully_shard(linear(), mp_policy=policy, offload_policy=TorchsOffload())
    assert model(INPUTS).dtype == torch.bfloat16


@on_ranks(1)
def test_no_offload_policy_is_the_default() -> None:
    model = fsdp.fully_shard(linear(), offload_policy=None)
    assert model(INPUTS).requires_grad


@on_ranks(1)
def test_a_dtype_that_cannot_hold_what_is_computed() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16, which cannot represent"):
        fsdp.fully_shard(linear().bfloat16(), mp_policy=policy)


@on_ranks(1, backend=None)
def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"call fsdp\.init_distributed\(\) first"):
        fsdp.fully_shard(linear())


# Afterwards


@on_ranks(1)
def test_a_wrapper_around_what_is_sharded() -> None:
    for model in (twice(), nn.Sequential(twice())):
        with pytest.raises(ValueError, match="a module that fully_shard has sharded"):
            fully_sharded()(model)


@on_ranks(1)
def test_a_module_inside_of_one_that_is_sharded_already() -> None:
    model = nn.Sequential(linear(), nn.Sequential(nn.Linear(3, 3)))
    for module in (fsdp.fully_shard(model)[1], model[1][0]):  # type: ignore[index]
        with pytest.raises(ValueError, match=r"^1(\.0)? is inside of Sequential, .*Wrap or shard inner modules before"):
            fsdp.fully_shard(module)
        assert not isinstance(module, FSDPModule)


@on_ranks(1)
def test_reshard_in_the_middle_of_a_forward() -> None:
    model = fsdp.fully_shard(Resharding(5, 3))
    with pytest.raises(RuntimeError, match=r"cannot reshard .* in the middle of its forward"):
        model(INPUTS)


class Resharding(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        self.reshard()  # type: ignore[operator]
        return super().forward(inputs)


@on_ranks(2)
def test_ranks_that_cut_along_other_dimensions_are_told_which() -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda _: Shard(dist.get_rank()))
    with pytest.raises(RuntimeError, match=r"weight\[4, 4\] along 1"):
        model(torch.ones(2, 4))


@on_ranks(1)
def test_a_tie_that_comes_too_late_leaves_the_module_as_it_was() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    fsdp.fully_shard(first)(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="Call fully_shard on all modules before the first forward"):
        fsdp.fully_shard(second)
    assert type(second) is nn.Linear
    assert type(second.bias) is nn.Parameter


@on_ranks(2)
def test_errors_of_the_engine_do_not_speak_of_the_wrapper() -> None:
    def lends_a_shard() -> None:
        model = fsdp.fully_shard(linear())
        torch.func.functional_call(model, {"weight": torch.ones(1, 5)}, (INPUTS,))

    def adds_a_parameter() -> None:
        model = fsdp.fully_shard(linear())
        model.extra = nn.Parameter(torch.ones(1))
        model(INPUTS)

    def is_of_another_kind_of_device() -> None:
        model = linear()
        mesh = mesh_of(2, 1)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh["replicate"], [Replicate()]))  # type: ignore[assignment]
        fsdp.fully_shard(model, mesh=mesh["replicate"])

    def reparametrizes() -> None:
        torch.nn.utils.parametrizations.weight_norm(fsdp.fully_shard(linear()))

    def ties_what_is_on_other_ranks() -> None:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        model[1].weight = model[0].weight
        mesh = mesh_of(2, 1)
        for module, where in ((model[0], "replicate"), (model[1], "replicate"), (model, "shard")):
            fsdp.fully_shard(module, mesh=mesh[where])
        model(INPUTS)

    def differs_between_ranks() -> None:
        torch.manual_seed(dist.get_rank())
        fsdp.fully_shard(linear())(INPUTS)

    for mistake in (
        lends_a_shard,
        adds_a_parameter,
        is_of_another_kind_of_device,
        reparametrizes,
        ties_what_is_on_other_ranks,
        differs_between_ranks,
    ):
        message = _message(mistake)
        assert message, mistake.__name__
        assert not WORDS_OF_THE_WRAPPER.search(message), f"{mistake.__name__}: {message}"


WORDS_OF_THE_WRAPPER = re.compile(r"[Ww]rap|process_group|compute_device|flatten_parameters|use_orig_params")


def _message(mistake: Callable[[], None]) -> str:
    try:
        mistake()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@on_ranks(2)
def test_a_gradient_that_is_no_dtensor_is_named() -> None:
    torch.manual_seed(0)
    model: Any = linear()
    plain = copy.deepcopy(model)
    weight = fsdp.fully_shard(model).weight
    weight.grad = torch.ones(3, 5)
    with pytest.raises(RuntimeError, match=r"weight has a gradient that is no DTensor.*distribute_tensor"):
        once(model, INPUTS)
    plain.weight.grad = torch.ones(3, 5)
    weight.grad = distribute_tensor(plain.weight.grad, weight.device_mesh, weight.placements)
    for each in (model, plain):
        once(each, INPUTS)
    assert torch.allclose(weight.grad.full_tensor(), plain.weight.grad)
