"""What `FullyShardedDataParallel` shows of itself: arguments, names, attributes and small methods, as in FairScale.

What needs no other rank runs in this process: `Alone` stands for a world of one.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    FlatParameter,
    FlattenParamsWrapper,
    FullyShardedDataParallel,
    ProcessGroupName,
    TrainingState,
    get_fsdp_instances,
)
from fsdp.layers.options import Options
from tests.helpers.calls import users
from tests.helpers.forms import FORMS, sharded
from tests.helpers.models import Net, Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import (
    Alone,
    alone,
    fully_sharded,
    nested_mlp,
    sgd_with_momentum,
)


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return torch.randn(3, 5, generator=generator)


def step(model: nn.Module) -> None:
    optimizer = sgd_with_momentum(model.parameters())
    model(inputs().to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# The constructor

FAIRSCALE_ARGUMENTS = {
    "module": inspect.Parameter.empty,
    "process_group": None,
    "process_group_reduce_scatter": ProcessGroupName.reduce_scatter,
    "reshard_after_forward": True,
    "disable_reshard_on_root": True,
    "mixed_precision": False,
    "fp32_reduce_scatter": False,
    "flatten_parameters": True,
    "move_params_to_cpu": False,
    "compute_dtype": None,
    "buffer_dtype": None,
    "move_grads_to_cpu": None,
    "bucket_cap_mb": 25,
    "compute_device": None,
    "no_broadcast_optim_state": False,
    "state_dict_device": None,
    "clear_autocast_cache": False,
    "force_input_to_fp32": False,
    "verbose": False,
    "cpu_offload": False,
    "state_dict_on_rank_0_only": False,
    "gradient_predivide_factor": None,
    "allow_reset_parameters": False,
}


def test_arguments_have_fairscales_names_order_and_defaults() -> None:
    parameters = inspect.signature(FullyShardedDataParallel).parameters
    theirs = [parameter for parameter in parameters.values() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert {parameter.name: parameter.default for parameter in theirs} == FAIRSCALE_ARGUMENTS
    assert [parameter.name for parameter in theirs] == list(FAIRSCALE_ARGUMENTS)
    assert {parameter.kind for parameter in theirs} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@on_ranks(2)
def test_arguments_by_position() -> None:
    group = dist.new_group()
    model = FullyShardedDataParallel(nested_mlp(), group, ProcessGroupName.default, False, False, False, False, False)
    assert model.process_group is model.process_group_reduce_scatter is group
    assert not model.reshard_after_forward
    assert not model.flatten_parameters
    second = FullyShardedDataParallel(nested_mlp(), group, dist.group.WORLD)
    assert second.process_group_reduce_scatter is dist.group.WORLD
    by_name = FullyShardedDataParallel(nested_mlp(), process_group_reduce_scatter="default")
    assert by_name.process_group_reduce_scatter is by_name.process_group
    for each in (model, second, by_name):
        step(each)


class Labelled(FullyShardedDataParallel):
    """Takes a keyword of its own, as clients' subclasses do, and keeps it before it is constructed itself."""

    def __init__(self, *args: Any, label: str = "", device_id: int = 0, **kwargs: Any) -> None:
        self.label = label
        assert not hasattr(self, "module")
        super().__init__(*args, **kwargs)
        self.device_id = device_id


def test_a_subclass_with_keywords_of_its_own() -> None:
    assert list(inspect.signature(Labelled).parameters) == ["args", "label", "device_id", "kwargs"]
    model = Labelled(nn.Sequential(nn.Linear(5, 3)), Alone(), label="encoder", device_id=1)
    assert (model.label, model.device_id) == ("encoder", 1)
    with pytest.raises(TypeError, match="no argument device_mesh, which torch's FSDP has: pass it as process_group"):
        Labelled(nn.Linear(5, 3), device_mesh=Alone())
    assert get_fsdp_instances(nn.ModuleList([model])) == [model]
    step(model)


class Tracker:
    """A proxy around a group, as clients use to watch communication."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@on_ranks(1, backend=None)
def test_a_dummy_group_of_one_needs_no_torch_distributed() -> None:
    assert not dist.is_initialized()
    group = Alone()
    model, plain = FullyShardedDataParallel(nested_mlp(), group, None), nested_mlp()
    for _ in range(2):
        step(model)
        step(plain)
    assert (model.rank, model.world_size, model.process_group) == (0, 1, group)
    sharded_state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded_state[name], value)


def test_a_proxy_of_a_group_of_one() -> None:
    step(FullyShardedDataParallel(nested_mlp(), Tracker(Alone())))


# Names


@on_ranks(1, 2)
def test_raw_names_are_fairscales() -> None:
    flat = "_fsdp_wrapped_module.flat_param_0"
    below = "_fsdp_wrapped_module._fpw_module"
    model = nested_mlp(fully_sharded())
    assert dict(model.named_parameters()).keys() == {
        flat,
        f"{below}.trunk.{flat}",
        f"{below}.trunk.{below}.2.{flat}",
        f"{below}.gate.{flat}",
    }
    assert next(iter(dict(model.named_parameters(prefix="model")))) == f"model.{flat}"
    assert list(dict(model.named_parameters(recurse=False))) == []
    assert list(dict(model.module.named_parameters(recurse=False))) == ["flat_param_0"]
    assert [name for name, _ in model.named_modules() if name.endswith("gate")] == [f"{below}.gate"]
    holder = nn.ModuleDict({"model": model})
    assert next(iter(dict(holder.named_parameters()))) == f"model.{flat}"


def test_several_groups_of_parameters_are_numbered() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2).double())
    names = [name for name, _ in alone(module).named_parameters()]
    assert names == [f"_fsdp_wrapped_module.flat_param_{number}" for number in range(3)]


@on_ranks(2)
def test_unflattened_names_are_plain() -> None:
    model, plain = nested_mlp(fully_sharded(flatten_parameters=False)), nested_mlp()
    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, param in found.items():
        assert isinstance(param, FlatParameter)
        assert param.shape == (-(-expected[name].numel() // 2),)


@pytest.mark.parametrize("options", [{}, {"flatten_parameters": False}, {"use_orig_params": True}])
@on_ranks(2)
def test_buffers_have_plain_names_where_parameters_have(options: dict[str, bool]) -> None:
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    expected = [name for name, _ in plain.named_buffers()]
    plain[1] = FullyShardedDataParallel(plain[1], **options)
    model = FullyShardedDataParallel(plain, **options)
    raw = [name for name, _ in model.named_buffers()]
    part = "_fsdp_wrapped_module._fpw_module."
    assert raw == (expected if options else [f"{part}1.{part}{name[2:]}" for name in expected])
    with model.summon_full_params():
        assert [name for name, _ in model.named_buffers()] == expected


@parametrize_pairs(flatten_parameters=[True, False], world_size=[1, 2])
@on_ranks("world_size")
def test_each_parameter_is_counted_once(flatten_parameters: bool) -> None:
    model = nested_mlp(fully_sharded(flatten_parameters=flatten_parameters))
    params = list(model.parameters())
    own = [param for wrapper in get_fsdp_instances(model) for param in wrapper.params]
    assert len(set(params)) == len(params) == len(own)
    assert set(params) == set(own)
    assert len(params) == (4 if flatten_parameters else len(list(nested_mlp().parameters())))
    padding = sum(sum(wrapper.numel_padded_per_param) for wrapper in get_fsdp_instances(model))
    total = torch.tensor(sum(param.numel() for param in params) - padding)
    dist.all_reduce(total)
    assert total == sum(param.numel() for param in nested_mlp().parameters())
    assert all(param._is_sharded == (model.world_size > 1) for param in params)
    # The user's own module has them too, in the same order.
    assert list(map(id, users(model).parameters())) == list(map(id, params))
    assert list(map(id, nn.ModuleList([model, users(model)]).parameters())) == list(map(id, params))


# Forwarding


class Model(nn.Module):
    """Attributes, a method and a property, like models of other libraries; it looks at its own parameters."""

    hidden = 7

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]


@on_ranks(2)
def test_module_and_its_module() -> None:
    module = Model()
    model = FullyShardedDataParallel(module)
    assert isinstance(model.module, FlattenParamsWrapper)
    assert model.module is model._fsdp_wrapped_module
    assert model.module.module is model.module._fpw_module is module
    assert model.hidden == 7
    assert model.layers is module.layers
    assert model[1] is module.layers[1]
    assert model.steps is module.steps
    assert model.configure_optimizers.__self__ is module
    assert hasattr(model, "hidden")
    assert not hasattr(model, "does_not_exist")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'does_not_exist'"):
        _ = model.does_not_exist
    indexed = FullyShardedDataParallel(nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
    assert isinstance(indexed[1], nn.Tanh)
    with pytest.raises((AttributeError, TypeError)):
        FullyShardedDataParallel(nn.Linear(5, 3))[0]


@pytest.mark.parametrize("flatten_parameters", [True, False])
@on_ranks(2)
def test_the_inner_module_goes_on_working(flatten_parameters: bool) -> None:
    torch.manual_seed(0)
    module = Model()
    module.layers[0] = FullyShardedDataParallel(module.layers[0])  # what is nested counts as well
    model = FullyShardedDataParallel(module, flatten_parameters=flatten_parameters)
    before = model.state_dict()
    assert module.dtype is torch.float32
    assert module.device == torch.device("cpu")
    optimizer = module.configure_optimizers()
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(map(id, model.parameters()))
    model(inputs()).square().mean().backward()
    optimizer.step()
    after = model.state_dict()
    assert not any(torch.equal(after[name], before[name]) for name in after if name != "steps")
    optimizer.zero_grad()
    module.zero_grad()
    assert not model.params_with_grad
    model.double()
    assert module.dtype is torch.float64


# Attributes

ATTRIBUTES: dict[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "training_state": TrainingState.IDLE,
    "mixed_precision": False,
    "flatten_parameters": True,
    "reshard_after_forward": True,
    "disable_reshard_on_root": True,
    "compute_dtype": torch.float32,
    "buffer_dtype": torch.float32,
    "compute_device": torch.device("cpu"),
    "move_params_to_cpu": False,
    "move_grads_to_cpu": False,
    "cpu_offload": False,
    "no_broadcast_optim_state": False,
    "numel_padded_per_param": [0],
    "gradient_predivide_factor": 1.0,
    "gradient_postdivide_factor": 1.0,
    "children_share_process_group": True,
    "verbose": False,
    "bucket_cap_mb": 25,
}


def test_attributes_of_one_rank() -> None:
    group = Alone()
    model = FullyShardedDataParallel(nn.Linear(5, 3), group)
    assert {name: getattr(model, name) for name in ATTRIBUTES} == ATTRIBUTES
    assert model.process_group is group
    assert model.process_group_reduce_scatter is group
    assert torch.device(model.state_dict_device).type == "cpu"
    assert model.params == model.non_shared_params() == [model.module.flat_param]


@on_ranks(3)
def test_attributes_follow_the_world() -> None:
    model = FullyShardedDataParallel(nn.Linear(5, 2))
    assert (model.rank, model.world_size) == (dist.get_rank(), 3)
    assert (model.gradient_predivide_factor, model.gradient_postdivide_factor) == (2.0, 1.5)
    assert model.process_group is dist.group.WORLD
    assert model.numel_padded_per_param == [0]  # 12 elements
    padded = FullyShardedDataParallel(nn.Linear(5, 2, bias=False), flatten_parameters=False)
    assert padded.numel_padded_per_param == [2 if dist.get_rank() == 2 else 0]  # 10 elements, 4 each
    originals = FullyShardedDataParallel(nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 2)), use_orig_params=True)
    # Of 10, 2, 4 and 2 elements, each at a multiple of 8: 34 with the gaps, of which each rank has 12.
    behind = {0: [2, 0, 0, 0], 1: [4, 6, 0, 0], 2: [0, 0, 4, 2]}[dist.get_rank()]
    assert originals.numel_padded_per_param == behind
    assert sum(param.numel() for param in originals.params) + sum(behind) == 12
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        mixed = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(5, 2), Alone())), pair)
        assert not mixed.children_share_process_group


@on_ranks(2)
def test_states_in_a_step() -> None:
    model = FullyShardedDataParallel(Model())
    seen = []
    users(model).layers.register_forward_hook(lambda *_: seen.append(model.training_state))
    hook = users(model).layers[1].register_full_backward_hook(lambda *_: seen.append(model.training_state))
    model(inputs()).sum().backward()
    hook.remove()
    assert seen == [TrainingState.FORWARD, TrainingState.BACKWARD_PRE]
    model.assert_state(TrainingState.IDLE)
    model.assert_state([TrainingState.FORWARD, TrainingState.IDLE])
    with pytest.raises(ValueError, match="expected to be FORWARD or BACKWARD_PRE, but it is IDLE"):
        model.assert_state([TrainingState.FORWARD, TrainingState.BACKWARD_PRE])
    with pytest.raises(ValueError, match="expected to be SUMMON_FULL_PARAMS, but it is IDLE"):
        model.assert_state(TrainingState.SUMMON_FULL_PARAMS)


def test_training_states_have_fairscales_names() -> None:
    names = ["IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "SUMMON_FULL_PARAMS"]
    assert [state.name for state in TrainingState] == names


def test_repr_tells_how_it_is_wrapped() -> None:
    short, long = alone(nn.Linear(5, 3)), alone(nn.Linear(5, 3), verbose=True)
    assert short.extra_repr() == "world_size=1, flatten_parameters=True, mixed_precision=False"
    assert long.extra_repr().startswith(short.extra_repr())
    for name in ("rank=0", "reshard_after_forward=True", "compute_dtype=torch.float32", "bucket_cap_mb=25"):
        assert name in long.extra_repr()
        assert name not in short.extra_repr()
    assert "world_size=1" in repr(nn.Sequential(short))
    assert "Linear(in_features=5, out_features=3" in repr(short)


@on_ranks(2)
def test_params_with_grad() -> None:
    wrap = fully_sharded()
    model = wrap(branches(wrap))
    assert model.params == []
    assert model.params_with_grad == []
    model(inputs()).sum().backward()
    assert model.params_with_grad == users(model).left.params
    model.zero_grad()
    assert model.params_with_grad == []


def branches(wrap: Wrap) -> nn.Module:
    """Two units, of which one call uses one."""
    return Net(lambda net, x: net.left(x), left=wrap(nn.Linear(5, 1)), right=wrap(nn.Linear(5, 1)))


@on_ranks(2)
def test_get_fsdp_instances() -> None:
    model = nested_mlp(fully_sharded())
    inside = users(model)
    assert get_fsdp_instances(model) == [model, inside.trunk, inside.trunk[2], inside.gate]
    assert get_fsdp_instances(inside) == [inside.trunk, inside.trunk[2], inside.gate]
    assert get_fsdp_instances(nn.Linear(2, 2)) == []
    wrap = fully_sharded()
    full = wrap(nn.Linear(5, 3))
    empty = wrap(nn.Sequential(full, nn.Tanh()))
    assert get_fsdp_instances(empty) == [empty, full]
    assert get_fsdp_instances(empty, skip_empty=True) == [full]
    assert get_fsdp_instances(nn.ModuleList([empty, model]), skip_empty=True) == [full, *get_fsdp_instances(model)]
    step(empty)
    assert list(dict(empty.named_parameters())) == [
        "_fsdp_wrapped_module._fpw_module.0._fsdp_wrapped_module.flat_param_0"
    ]


# Gradient factors

# What FairScale computes.
PREDIVIDE_FACTORS = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 4.0, 7: 2.0, 8: 4.0, 16: 4.0, 64: 8.0, 96: 16.0}


@pytest.mark.parametrize(("world_size", "factor"), PREDIVIDE_FACTORS.items())
def test_the_factor_before_the_sum(world_size: int, factor: float) -> None:
    assert Options().predivide_factor(world_size) == factor


def test_a_factor_of_the_users() -> None:
    assert Options(gradient_predivide_factor=3).predivide_factor(8) == 3.0
    model = alone(nn.Linear(5, 3), gradient_predivide_factor=4.0)
    assert (model.gradient_predivide_factor, model.gradient_postdivide_factor) == (4.0, 0.25)


def test_buckets_without_a_limit() -> None:
    model = alone(nn.Linear(5, 3), bucket_cap_mb=float("inf"))
    model(torch.ones(2, 5)).sum().backward()
    assert model.flat_params[0].grad is not None


def sharded_gradients(model: nn.Module) -> Tensor:
    """Collective. The gradient of a single unit, whole."""
    (param,) = model.parameters()
    pieces = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, param.grad)
    return torch.cat(pieces)


def mean_gradient(divisor: float) -> Tensor:
    """Collective. What a linear layer's gradient is, summed over ranks and divided."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 2)
    plain(inputs()).sum().backward()
    flat = torch.cat([param.grad.flatten() for param in plain.parameters()])
    dist.all_reduce(flat)
    return flat / divisor


@on_ranks(2)
def test_set_gradient_divide_factors() -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(5, 2))
    model.set_gradient_divide_factors(1.0, 1.0)
    model(inputs()).sum().backward()
    torch.testing.assert_close(sharded_gradients(model), mean_gradient(1.0))
    model.zero_grad()
    model.set_gradient_divide_factors(pre=4.0, post=0.25, recursive=True)
    assert (model.gradient_predivide_factor, model.gradient_postdivide_factor) == (4.0, 0.25)
    with model.no_sync():
        model(inputs()).sum().backward()
    model.set_gradient_divide_factors(1.0, 2.0)  # what is accumulated is divided as what follows
    model(inputs()).sum().backward()
    torch.testing.assert_close(sharded_gradients(model), mean_gradient(1.0))
    nested = nested_mlp(fully_sharded())
    nested.set_gradient_divide_factors(1.0, 3.0, recursive=False)
    assert [wrapper.gradient_postdivide_factor for wrapper in get_fsdp_instances(nested)] == [3.0, 1.0, 1.0, 1.0]
    nested.set_gradient_divide_factors(1.0, 3.0, recursive=True)
    assert [wrapper.gradient_postdivide_factor for wrapper in get_fsdp_instances(nested)] == [3.0] * 4
    with pytest.raises(ValueError, match="must be positive, got pre=0"):
        nested.set_gradient_divide_factors(0, 1.0)


# Which wrapper is the root


@on_ranks(2)
def test_the_root_is_found_at_first_use() -> None:
    model = nested_mlp(fully_sharded())
    wrappers = get_fsdp_instances(model)
    assert [wrapper._is_root for wrapper in wrappers] == [None] * 4
    model.state_dict()
    model.apply(lambda module: None)
    assert [wrapper._is_root for wrapper in wrappers] == [None] * 4, "that is not what makes a root"
    for forget in (FullyShardedDataParallel._reset_lazy_init, _forget_by_assignment):
        step(model)
        assert [wrapper._is_root for wrapper in wrappers] == [True, False, False, False]
        assert [wrapper.reshard_after_forward for wrapper in wrappers] == [False, True, True, True]
        forget(model)
        assert [wrapper._is_root for wrapper in wrappers] == [None] * 4
        assert [wrapper.reshard_after_forward for wrapper in wrappers] == [True] * 4
    resharding = nested_mlp(fully_sharded(disable_reshard_on_root=False))
    step(resharding)
    assert [wrapper.reshard_after_forward for wrapper in get_fsdp_instances(resharding)] == [True] * 4


def _forget_by_assignment(model: Any) -> None:
    model._is_root = None


@on_ranks(2)
def test_wrapping_around_a_model_that_was_used() -> None:
    inner = nested_mlp(fully_sharded())
    step(inner)
    outer = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(1, 2)))
    step(outer)
    assert outer._is_root
    assert not inner._is_root
    step(outer)


@on_ranks(2)
def test_a_child_of_two_roots() -> None:
    wrap = fully_sharded()
    child = wrap(nn.Linear(5, 4))
    first, second = (wrap(nn.Sequential(child, nn.Linear(4, 2))) for _ in range(2))
    step(first)
    step(second)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a second root: unit '0' now belongs to another root"):
            first(inputs())
    step(second)
    first._reset_lazy_init()
    step(first)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_root_that_lost_a_unit_between_its_forward_and_its_backward(form: str) -> None:
    child = sharded(nn.Linear(5, 4), form)
    first, second = (sharded(nn.Sequential(child, nn.Linear(4, 2)), form) for _ in range(2))
    losses = [model(inputs()).sum() for model in (first, second)]
    with pytest.raises(RuntimeError, match=r"a second root: unit '0' now belongs to another root"):
        losses[0].backward()
    losses[1].backward()
    step(second)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_root_with_a_unit_of_a_root_that_runs(form: str) -> None:
    child = sharded(nn.Linear(5, 4), form)
    first, second = (sharded(nn.Sequential(child, nn.Linear(4, 2)), form) for _ in range(2))
    step(first)

    def run_second(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"cannot become part of another .* in the middle of a forward"):
            second(inputs())

    hook = first[1].register_forward_hook(run_second)
    for _ in range(2):
        step(first)
    hook.remove()
    step(second)


# Moving and casting

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "half": nn.Module.half,
    "to_device_and_dtype": lambda module: module.to("cpu", torch.float64),
}


@parametrize_pairs(name=list(CASTS), world_size=[1, 2])
@on_ranks("world_size")
def test_a_model_is_cast_after_wrapping(name: str) -> None:
    for flatten_parameters in (True, False):
        model = nested_mlp(fully_sharded(flatten_parameters=flatten_parameters))
        plain = CASTS[name](nested_mlp())
        step(model)  # also when it was used before
        model.load_state_dict(nested_mlp().state_dict())
        assert CASTS[name](model) is model
        dtype = next(plain.parameters()).dtype
        assert model.compute_dtype is dtype
        same = torch.ones(2, 5, dtype=dtype)  # on every rank, so that no mean over ranks is to be computed
        assert torch.equal(model(same), plain(same))
        for each in (model, plain):
            each.zero_grad()
            optimizer = sgd_with_momentum(each.parameters())
            each(same).square().sum().backward()
            optimizer.step()
        sharded_state = model.state_dict()
        for key, value in plain.state_dict().items():
            found = sharded_state[key]
            assert found.dtype is dtype
            torch.testing.assert_close(found, value)


@on_ranks(2)
def test_gradients_are_cast_with_the_parameters() -> None:
    model = nested_mlp(fully_sharded())
    model(inputs()).sum().backward()
    before = [param.grad.double() for param in model.parameters()]
    model.double()
    assert all(map(torch.equal, (param.grad for param in model.parameters()), before))
    model(inputs().double()).sum().backward()
    assert all(not torch.equal(param.grad, old) for param, old in zip(model.parameters(), before, strict=True))


def test_buffers_are_cast_too() -> None:
    model = alone(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))).double()
    assert users(model)[1].running_mean.dtype is torch.float64
    step(model)


@on_ranks(1, 2)
def test_freezing_a_unit_after_wrapping() -> None:
    # As when a discriminator is held still while the generator learns through it.
    model, plain = (wrap(nn.Sequential(*map(wrap, _two_layers()))) for wrap in (fully_sharded(), keep))
    for requires_grad in (True, False, True):
        for each, first in ((model, users(model)[0]), (plain, plain[0])):
            each.zero_grad()
            first.requires_grad_(requires_grad)
            each(torch.ones(2, 5)).sum().backward()
        frozen, trained = users(model)[0].params[0], users(model)[1].params[0]
        assert (frozen.grad is not None) == (plain[0].weight.grad is not None) == requires_grad
        assert trained.grad is not None
    model.requires_grad_(False)
    assert not model(torch.ones(2, 5)).requires_grad


def _two_layers() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield nn.Linear(5, 4)
    yield nn.Linear(4, 2)


@on_ranks(2)
def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nested_mlp(fully_sharded())
        step(model)
        model.clip_grad_norm_(1.0)
        model.load_state_dict(model.state_dict())
        with model.summon_full_params():
            pass
        model.double()
        repr(model)
        step(model)
