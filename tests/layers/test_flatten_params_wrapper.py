"""`FlattenParamsWrapper` by itself: a module that computes, trains and saves like the one inside, from flat vectors.

`Net` has all that is easily lost: a layer whose weight is shared, buffers, and parameters in several modules.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FlatParameter, FlattenParamsWrapper
from tests.helpers.equality import assert_same_state
from tests.helpers.models import keep

Tensors = dict[str, Tensor]


class Net(nn.Module):
    """`first`: 20 elements, `norm`: 8 (and three buffers), `again` shares its weight with `second`: 24 in all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.second = nn.Linear(4, 4)
            self.again = nn.Linear(4, 4)
            self.again.weight = self.second.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.again(torch.tanh(self.second(self.norm(self.first(inputs)))))


INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
NUMEL = 20 + 8 + 24
GROUPS: dict[str, Callable[[Net], Any]] = {
    "all": lambda net: None,
    "some": lambda net: list(net.first.parameters()),
    "two groups": lambda net: [[*net.first.parameters()], [net.second.weight, net.second.bias, net.again.bias]],
    "nothing": lambda net: [[]],
    "an empty list": lambda net: [],
}
every_group = pytest.mark.parametrize("group", GROUPS)


def wrap(group: str = "all", *, seed: int = 0, names: list[str] | None = None) -> FlattenParamsWrapper:
    net = Net(seed)
    return FlattenParamsWrapper(net, GROUPS[group](net), names)


def same_but(state: Tensors, changes: Tensors) -> Tensors:
    return {name: changes.get(name, value) for name, value in state.items()}


# What is stored


def test_all_parameters_become_one_flat_parameter() -> None:
    wrapper, plain = wrap(), Net()
    assert dict(wrapper.named_parameters()) == {"flat_param_0": wrapper.flat_param}
    assert isinstance(wrapper.flat_param, FlatParameter)
    assert wrapper.flat_params == [wrapper.flat_param]
    assert wrapper.flat_param.tolist() == [v for param in plain.parameters() for v in param.flatten().tolist()]
    assert list(wrapper.module.parameters()) == []
    assert wrapper.is_flattened


def test_a_shared_parameter_is_stored_once() -> None:
    wrapper = wrap()
    assert wrapper.flat_param.numel() == NUMEL == sum(param.numel() for param in Net().parameters())
    assert wrapper.num_params_managed == len(list(Net().parameters())) == 7
    assert wrapper.module.again.weight is wrapper.module.second.weight


def test_a_shared_parameter_may_be_listed_under_both_its_names() -> None:
    net = Net()
    wrapper = FlattenParamsWrapper(net, [*net.second.parameters(), *net.again.parameters()])
    assert wrapper.flat_param.numel() == 24
    assert wrapper.num_params_managed == 3


@pytest.mark.parametrize(
    ("group", "numels", "managed", "left"),
    [("some", [20], 2, 32), ("two groups", [20, 24], 5, 8), ("nothing", [], 0, NUMEL), ("an empty list", [], 0, NUMEL)],
)
def test_groups_become_flat_parameters_and_the_rest_is_left(
    group: str, numels: list[int], managed: int, left: int
) -> None:
    wrapper = wrap(group)
    assert [flat.numel() for flat in wrapper.flat_params] == numels
    assert wrapper.num_params_managed == managed
    assert sum(param.numel() for param in wrapper.module.parameters()) == left
    assert sum(param.numel() for param in wrapper.parameters()) == NUMEL


def test_flat_parameters_have_names() -> None:
    assert wrap("two groups").flat_param_names == ["flat_param_0", "flat_param_1"]
    wrapper = wrap("two groups", names=["first", "second"])
    assert wrapper.flat_param_names == ["flat_param_first", "flat_param_second"]
    own = [name for name, _ in wrapper.named_parameters(recurse=False)]
    assert own == ["flat_param_first", "flat_param_second"]


def test_the_only_flat_parameter_has_a_short_name() -> None:
    for group in ("two groups", "nothing"):
        with pytest.raises(RuntimeError, match=r"there are \d flat parameters; use flat_params"):
            _ = wrap(group).flat_param


def test_metadata_lists_plain_names() -> None:
    wrapper = wrap("two groups")
    assert wrapper.metadata(0) == (("first.weight", "first.bias"), (torch.Size((4, 4)), torch.Size((4,))), (16, 4))
    assert wrapper.metadata(1)[0] == ("second.weight", "second.bias", "again.bias")


@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_module_stays_frozen(trained: bool) -> None:
    wrapper = FlattenParamsWrapper(Net().requires_grad_(trained))
    assert wrapper.flat_param.requires_grad is trained
    assert wrapper(INPUTS).requires_grad is trained


def test_odd_parameters_are_flattened_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).T)

        def forward(self) -> Tensor:
            return self.scalar * self.transposed

    wrapper = FlattenParamsWrapper(Odd())
    assert wrapper.flat_param.tolist() == [2.0, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert wrapper().tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    assert [tuple(value.shape) for value in wrapper.state_dict().values()] == [(), (0, 3), (3, 2)]


def test_a_module_without_parameters_is_left_as_it_is() -> None:
    wrapper = FlattenParamsWrapper(nn.Tanh())
    assert (wrapper.flat_params, wrapper.is_flattened, wrapper.num_params_managed) == ([], False, 0)
    assert torch.equal(wrapper(INPUTS), INPUTS.tanh())


# Computing


@every_group
def test_it_trains_like_the_module_inside(group: str) -> None:
    wrapper, plain = wrap(group), Net()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (wrapper, plain)]
    for _ in range(3):
        for net, optimizer in zip((wrapper, plain), optimizers, strict=True):
            optimizer.zero_grad()
            net(INPUTS).square().sum().backward()
            optimizer.step()
        assert torch.equal(wrapper(INPUTS), plain(INPUTS))
    assert_same_state(wrapper.state_dict(), plain.state_dict())


def test_attributes_are_views_of_the_flat_parameter() -> None:
    wrapper = wrap()
    for _ in range(2):
        weight = wrapper.module.first.weight
        assert not isinstance(weight, nn.Parameter)
        assert weight.shape == (4, 4)
        with torch.no_grad():
            wrapper.flat_param.fill_(2.5)
            # With gradients on, torch refuses views of what was changed, until the next forward makes new ones.
            assert weight.unique().tolist() == [2.5]
        wrapper(INPUTS)


def forward_without_gradients(wrapper: FlattenParamsWrapper) -> None:
    with torch.no_grad():
        wrapper(INPUTS)


@pytest.mark.parametrize(
    "before",
    [FlattenParamsWrapper.state_dict, forward_without_gradients, lambda wrapper: None],
    ids=["state_dict", "no_grad", "nothing"],
)
def test_gradients_flow_through_attributes_outside_of_forward(before: Callable[[FlattenParamsWrapper], Any]) -> None:
    wrapper = wrap()
    before(wrapper)
    wrapper.module.first.weight.sum().backward()
    assert wrapper.flat_param.grad is not None
    assert wrapper.flat_param.grad.tolist() == [1.0] * 16 + [0.0] * (NUMEL - 16)


@pytest.mark.parametrize("before", [FlattenParamsWrapper.state_dict, FlattenParamsWrapper.flat_state_dict])
def test_looking_at_the_state_does_not_disturb_a_backward(before: Callable[[FlattenParamsWrapper], Any]) -> None:
    wrapper, plain = wrap(), Net()
    loss = wrapper(INPUTS).square().sum()
    before(wrapper)
    loss.backward()
    plain(INPUTS).square().sum().backward()
    grad = next(wrapper.get_param_views([wrapper.flat_param.grad]))
    assert torch.equal(grad, plain.first.weight.grad)


def test_views_of_data_from_elsewhere() -> None:
    wrapper = wrap("two groups")
    data = [torch.arange(20), None]
    views = list(wrapper.get_param_views(data))
    assert [tuple(view.shape) for view in views] == [(4, 4), (4,), (4, 4), (4,), (4,)]
    assert torch.equal(views[0], torch.arange(16).view(4, 4))
    assert torch.equal(views[2], Net().second.weight)
    with pytest.raises(ValueError, match="expected data for 2 flat parameters, got 1"):
        list(wrapper.get_param_views([torch.zeros(20)]))
    with pytest.raises(ValueError, match="have 20 elements, the data has 21"):
        list(wrapper.get_param_views([torch.zeros(21), None]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_wrapper_computes_in_the_new_dtype(dtype: torch.dtype) -> None:
    wrapper, plain = wrap("some").to(dtype), Net().to(dtype)
    assert wrapper.flat_param.dtype is dtype
    assert wrapper.module.first.weight.dtype is dtype, "also where a method of the module uses it, without forward"
    assert torch.equal(wrapper(INPUTS.to(dtype)), plain(INPUTS.to(dtype)))
    assert_same_state(wrapper.state_dict(), plain.state_dict())


def test_arguments_and_attributes_are_passed_on() -> None:
    wrapper = FlattenParamsWrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert wrapper[1] is wrapper.module[1]
    assert wrapper.module is wrapper._fpw_module
    wrapper.module.colour = "red"
    assert wrapper.colour == "red"
    with pytest.raises(AttributeError, match=r"Sequential.*nonsense"):
        _ = wrapper.nonsense
    attention = FlattenParamsWrapper(nn.MultiheadAttention(4, 2, batch_first=True))
    tokens = torch.ones(1, 3, 4)
    outputs, weights = attention(tokens, tokens, value=tokens, need_weights=True)
    assert outputs.shape == (1, 3, 4)
    assert weights.shape == (1, 3, 3)


def test_the_views_can_be_had_from_the_module() -> None:
    """Under the name that FairScale's clients use."""
    wrapper = wrap("some")
    wrapper(INPUTS)
    views = wrapper.module._unflattened_param_views
    assert [view.shape for view in views] == [(4, 4), (4,)]
    assert torch.equal(views[0], wrapper.module.first.weight)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_modules_compute_with_the_views(make: Callable[..., nn.RNNBase]) -> None:
    torch.manual_seed(0)
    plain = make(4, 3)
    wrapper = FlattenParamsWrapper(copy.deepcopy(plain))
    for net in (wrapper, plain):
        net(INPUTS)[0].sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    wrapper.state_dict()
    assert torch.equal(wrapper(INPUTS)[0], plain(INPUTS)[0])
    with wrapper.unflatten_params():
        assert torch.equal(wrapper(INPUTS)[0], plain(INPUTS)[0])


# Saving and loading


@every_group
def test_a_state_of_the_plain_module_can_be_loaded(group: str) -> None:
    wrapper, plain = wrap(group, seed=1), Net()
    assert str(wrapper.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_same_state(wrapper.state_dict(), plain.state_dict())
    assert torch.equal(wrapper(INPUTS), plain(INPUTS))
    assert len(wrapper.flat_params) == len(list(wrapper.parameters(recurse=False)))


def test_a_state_keeps_its_prefix_and_destination() -> None:
    expected = {f"a.b.{name}": value for name, value in Net().state_dict().items()}
    found: Tensors = {"other": torch.ones(1)}
    wrap().state_dict(destination=found, prefix="a.b.")
    assert_same_state(found, {"other": torch.ones(1), **expected})


@every_group
def test_a_flat_state_has_the_names_of_what_is_stored(group: str) -> None:
    """Flat ones, and plain ones for what is not flattened, as in FairScale's files."""
    wrapper = wrap(group)
    flattened = {name for index in range(len(wrapper.flat_params)) for name in wrapper.metadata(index)[0]}
    flattened |= {"again.weight"} if "second.weight" in flattened else set()
    rest = [name for name in Net().state_dict() if name not in flattened]
    assert list(wrapper.flat_state_dict()) == wrapper.flat_param_names + rest


@every_group
def test_a_flat_state_can_be_loaded(group: str) -> None:
    wrapper = wrap(group, seed=1)
    wrapper.load_state_dict(wrap(group).flat_state_dict())
    assert_same_state(wrapper.state_dict(), Net().state_dict())


def test_an_old_flat_state_can_be_loaded() -> None:
    """Its only flat parameter was called `flat_param`."""
    old = {name.replace("flat_param_0", "flat_param"): value for name, value in wrap().flat_state_dict().items()}
    assert "flat_param" in old
    wrapper = wrap(seed=1)
    wrapper.load_state_dict(old)
    assert_same_state(wrapper.state_dict(), Net().state_dict())
    assert "flat_param" in old, "the caller's dict is left alone"


def test_optimizers_survive_loading() -> None:
    wrapper = wrap(seed=1)
    flat = wrapper.flat_param
    wrapper.load_state_dict(Net().state_dict())
    assert wrapper.flat_param is flat
    assert list(wrapper.parameters()) == [flat]
    assert flat.is_leaf


def test_missing_and_unexpected_names_are_plain() -> None:
    state = Net().state_dict()
    del state["first.weight"]
    state["nonsense"] = torch.ones(1)
    wrapper = wrap(seed=1)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first\.weight"'):
        wrapper.load_state_dict(state)
    result = wrapper.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["first.weight"], ["nonsense"])
    assert_same_state(wrapper.state_dict(), same_but(Net().state_dict(), {"first.weight": Net(seed=1).first.weight}))


def test_a_wrong_shape_is_an_error_with_the_plain_name() -> None:
    state = {**Net().state_dict(), "first.weight": torch.zeros(3)}
    wrapper = wrap()
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        wrapper.load_state_dict(state)
    assert wrapper.is_flattened
    wrapper.load_state_dict(Net().state_dict())


class Unreadable(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        raise OSError("unreadable")


def test_a_load_that_fails_leaves_it_usable() -> None:
    wrapper = FlattenParamsWrapper(Unreadable(4, 4))
    for _ in range(2):
        with pytest.raises(OSError, match="unreadable"):
            wrapper.load_state_dict(wrapper.state_dict())
        assert wrapper.is_flattened
        assert list(wrapper.parameters()) == [wrapper.flat_param]
        wrapper(INPUTS).sum().backward()


# In a larger module


class Outer(nn.Module):
    """Two wrappers and a plain layer."""

    def __init__(self, seed: int = 0, wrapped: bool = True) -> None:
        super().__init__()
        wrap_it = FlattenParamsWrapper if wrapped else keep
        self.one = wrap_it(Net(seed))
        self.two = nn.ModuleList([wrap_it(Net(seed + 1))])
        self.three = nn.Linear(4, 4)
        nn.init.constant_(self.three.weight, seed)
        nn.init.zeros_(self.three.bias)


def test_wrappers_inside_a_module_load_plain_names() -> None:
    outer = Outer(seed=5)
    outer.load_state_dict(Outer(wrapped=False).state_dict())
    assert_same_state(outer.state_dict(), Outer().state_dict())
    assert outer.one.is_flattened
    assert torch.equal(outer.one(INPUTS), Net()(INPUTS))


@pytest.mark.parametrize("name", ["flat_param_0", "flat_param"])
def test_wrappers_inside_a_module_load_flat_names(name: str) -> None:
    state = {f"three.{key}": value for key, value in Outer().three.state_dict().items()}
    for prefix, wrapper in (("one.", Outer().one), ("two.0.", Outer().two[0])):
        flat = wrapper.flat_state_dict()
        state |= {prefix + key.replace("flat_param_0", name): value for key, value in flat.items()}
    outer = Outer(seed=5)
    outer.load_state_dict(state)
    assert_same_state(outer.state_dict(), Outer().state_dict())


def test_flat_parameters_are_not_flattened_again() -> None:
    module = nn.Sequential(nn.Linear(4, 4), wrap())
    with pytest.raises(ValueError, match=r"1\.flat_param_0 is a FlatParameter"):
        FlattenParamsWrapper(module)
    assert len(list(module.parameters())) == 3


# Unflattened for a while


@every_group
def test_inside_unflatten_params_parameters_are_ordinary(group: str) -> None:
    wrapper, plain = wrap(group), Net()
    with wrapper.unflatten_params():
        assert not wrapper.is_flattened
        assert_same_state(dict(wrapper.module.named_parameters()), dict(plain.named_parameters()))
        assert list(wrapper.parameters(recurse=False)) == []
        assert wrapper.module.again.weight is wrapper.module.second.weight
        assert isinstance(wrapper.module.second.weight, nn.Parameter)
        assert torch.equal(wrapper(INPUTS), plain(INPUTS))
        assert_same_state(wrapper.state_dict(), plain.state_dict())
    assert [name for name, _ in wrapper.named_parameters(recurse=False)] == wrapper.flat_param_names
    assert torch.equal(wrapper(INPUTS), plain(INPUTS))


@torch.no_grad()
def _scale(net: Net) -> None:
    net.second.weight.mul_(2)


def _replace(net: Net) -> None:
    net.second.weight = net.again.weight = nn.Parameter(2 * net.second.weight.detach())


def _assign_data(net: Net) -> None:
    net.second.weight.data = 2 * net.second.weight.data


@pytest.mark.parametrize("change", [_scale, _replace, _assign_data])
def test_changes_inside_unflatten_params_are_kept(change: Callable[[Net], None]) -> None:
    wrapper, plain = wrap(), Net()
    flat = wrapper.flat_param
    with wrapper.unflatten_params():
        change(wrapper.module)
    _scale(plain)
    assert_same_state(wrapper.state_dict(), plain.state_dict())
    assert wrapper.flat_param is flat
    assert torch.equal(wrapper(INPUTS), plain(INPUTS))


def test_changes_are_kept_after_an_exception_too() -> None:
    wrapper, plain = wrap(), Net()
    with suppress(ZeroDivisionError), wrapper.unflatten_params():
        _scale(wrapper.module)
        1 / 0  # noqa: B018
    _scale(plain)
    assert wrapper.is_flattened
    assert_same_state(wrapper.state_dict(), plain.state_dict())


def test_other_values_can_be_shown_for_a_while() -> None:
    wrapper = wrap("two groups")
    others = [torch.full((20,), 1.5), torch.full((24,), 2.5)]
    with wrapper.unflatten_params(flat_params=others):
        state = copy.deepcopy(wrapper.state_dict())
        _scale(wrapper.module)
    assert state["first.weight"].unique().tolist() == [1.5]
    assert_same_state(wrapper.state_dict(), Net().state_dict())
    wrapper.load_state_dict(state)
    assert [flat.unique().tolist() for flat in wrapper.flat_params] == [[1.5], [2.5]]
    with (
        pytest.raises(ValueError, match="have 20 elements, the data has 2"),
        wrapper.unflatten_params([others[0][:2]] * 2),
    ):
        pass
    assert wrapper.is_flattened
    assert wrapper(INPUTS).shape == (5, 4)


def test_a_state_can_be_loaded_inside_unflatten_params() -> None:
    wrapper = wrap(seed=1)
    with wrapper.unflatten_params():
        wrapper.load_state_dict(Net().state_dict())
        assert not wrapper.is_flattened
    assert_same_state(wrapper.state_dict(), Net().state_dict())


def test_unflatten_params_can_be_nested() -> None:
    wrapper = wrap()
    with wrapper.unflatten_params():
        with wrapper.unflatten_params():
            assert not wrapper.is_flattened
        assert not wrapper.is_flattened, "what the inner one found it leaves behind"
        assert isinstance(wrapper.module.first.weight, nn.Parameter)
    assert wrapper.is_flattened
    assert_same_state(wrapper.state_dict(), Net().state_dict())


def test_a_change_that_cannot_be_kept_is_named() -> None:
    for change, found in ((nn.Parameter(torch.ones(3, 3)), "has shape"), (None, "was removed")):
        wrapper = wrap()
        with pytest.raises(ValueError, match=rf"first\.weight.*{found}"), wrapper.unflatten_params():
            wrapper.module.first.weight = change
        assert torch.equal(wrapper.module.first.weight, Net().first.weight)
        assert_same_state(wrapper.state_dict(), Net().state_dict())
        assert torch.equal(wrapper(INPUTS), Net()(INPUTS))


# Copies


def through_pickle(wrapper: FlattenParamsWrapper) -> FlattenParamsWrapper:
    return pickle.loads(pickle.dumps(wrapper))


def through_a_file(wrapper: FlattenParamsWrapper) -> FlattenParamsWrapper:
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("travel", [through_pickle, through_a_file, copy.deepcopy])
def test_a_copy_is_a_wrapper_of_its_own(travel: Callable[[FlattenParamsWrapper], FlattenParamsWrapper]) -> None:
    wrapper = wrap()
    wrapper(INPUTS)
    other = travel(wrapper)
    assert_same_state(other.state_dict(), wrapper.state_dict())
    assert [name for name, _ in other.named_parameters()] == ["flat_param_0"]
    assert other.flat_param is next(other.parameters())
    other(INPUTS).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not torch.equal(other(INPUTS), wrapper(INPUTS))
    assert torch.equal(wrapper.flat_param, wrap().flat_param)
    other.load_state_dict(Net(seed=2).state_dict())
    assert_same_state(other.state_dict(), Net(seed=2).state_dict())


# Errors


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a", "a"]])
def test_names_must_be_unique_and_one_per_group(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"flat_param_names must be unique and one per group.*for 2 groups"):
        wrap("two groups", names=names)


def test_a_group_has_one_dtype() -> None:
    net = Net()
    net.norm.double()
    with pytest.raises(ValueError, match=r"dtypes \['torch\.float32', 'torch\.float64'\].*norm\.weight"):
        FlattenParamsWrapper(net)
    wrapper = FlattenParamsWrapper(net, [[*net.first.parameters()], [*net.norm.parameters()]])
    assert [flat.dtype for flat in wrapper.flat_params] == [torch.float32, torch.float64]


def test_a_group_is_trained_or_frozen() -> None:
    net = Net()
    net.first.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad \['False', 'True'\].*first\.weight"):
        FlattenParamsWrapper(net)
    wrapper = FlattenParamsWrapper(net, [[*net.first.parameters()], [*net.norm.parameters()]])
    assert [flat.requires_grad for flat in wrapper.flat_params] == [False, True]


def test_groups_hold_the_modules_own_parameters_once() -> None:
    net = Net()
    with pytest.raises(ValueError, match="not a plain parameter of the Net"):
        FlattenParamsWrapper(net, [nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="in two groups"):
        FlattenParamsWrapper(net, [[net.first.weight], [net.first.weight]])
    assert_same_state(dict(net.named_parameters()), dict(Net().named_parameters()))
