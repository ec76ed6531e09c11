"""What is cast on the way into a unit and out of it, and where units of different precision meet.

What needs no other rank runs in this process, with a world of one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from tests.helpers.models import Net, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import alone

TO_BRAIN = MixedPrecision(param_dtype=BRAIN)


class Spy(nn.Module):
    """Remembers what it was called with, and returns `give` of its input after a layer."""

    def __init__(self, give: Callable[[Tensor], Any] = keep) -> None:  # type: ignore[assignment]
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.give = give
        self.got: list[tuple[Any, dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got.append((args, kwargs))
        return self.give(self.layer(torch.ones(2, 3, dtype=self.layer.weight.dtype)))


def given_to(unit_options: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """What reaches a module that is wrapped with these options and called with these arguments."""
    spy = Spy()
    alone(spy, **unit_options)(*args, **kwargs)
    return spy.got[0]


def numbers() -> Tensor:
    return torch.full((2, 3), 1.5)


# Nests: what is made of a tensor, and how the tensor is found in it again.


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclass
class Batch:
    x: Tensor
    labels: list[str]
    number: int = field(default=3, init=False)


@dataclass(slots=True)
class DoubledBatch:
    x: Tensor
    double: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x, self.double = self.x / 2, self.x


@dataclass
class Derived:
    """Has an attribute that is no field, and the attributes of its tensor."""

    x: Tensor

    def __post_init__(self) -> None:
        self.double = 2 * self.x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


@dataclass(frozen=True, kw_only=True)
class FrozenBatch:
    x: Tensor


class ReadOnly(Mapping[str, Tensor]):
    """A mapping of a user's own that can neither be changed nor copied."""

    def __init__(self, **items: Tensor) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Tensor:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class Branch:
    """A node of a tree, which refers to the node around it."""

    x: Tensor
    around: Branch | None = None
    inside: list[Branch] = field(default_factory=list)

    @classmethod
    def tree(cls, x: Tensor) -> Branch:
        root = cls(x)
        root.inside.append(cls(x, root))
        return root


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """An ordered dictionary with attributes that refuses `update`, as a well-known library's outputs do."""

    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x["x"] if isinstance(self.x, dict) else self.x

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a ModelOutput cannot be updated")


class Items(dict[str, Any]):
    """Has its items as attributes; a missing one is no `AttributeError`."""

    __getattr__ = dict.__getitem__


class OwnDict(dict[str, Any]):
    """Is its own ``__dict__``."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class MoreThanItems(dict[str, Any]):
    def __init__(self, name: str, x: Tensor) -> None:
        super().__init__(x=x)
        self.name, self.x = name, x


def packed(tensor: Tensor) -> PackedSequence:
    return pack_padded_sequence(tensor, torch.tensor([3, 2]), batch_first=True)


NESTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda got: got),
    "list": (lambda x: [x, "text"], lambda got: got[0]),
    "tuple": (lambda x: (x, None), lambda got: got[0]),
    "namedtuple": (lambda x: Point(x, "text"), lambda got: got.x),
    "return type": (lambda x: x.max(dim=0), lambda got: got.values),
    "packed sequence": (packed, lambda got: got.data),
    "dict": (lambda x: {"x": x, 3: "text"}, lambda got: got["x"]),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda got: got["x"]),
    "default dict": (lambda x: defaultdict(list, x=x), lambda got: got["x"]),
    "user dict": (lambda x: UserDict(x=x), lambda got: got["x"]),
    "dict with attributes": (lambda x: Items(x=x), lambda got: got.x),
    "dict of itself": (lambda x: OwnDict(x=x), lambda got: got.x),
    "dict with a name": (lambda x: MoreThanItems("name", x), lambda got: got.x if got["x"] is got.x else got.name),
    "model output": (lambda x: ModelOutput(x), lambda got: got.x),
    "dataclass": (lambda x: Batch(x, ["text"]), lambda got: got.x),
    "dataclass with computed fields": (DoubledBatch, lambda got: got.x if got.double.dtype is got.x.dtype else got),
    "dataclass with more attributes": (Derived, lambda got: got.double if got.dtype is got.double.dtype else got),
    "frozen dataclass": (lambda x: FrozenBatch(x=x), lambda got: got.x),
    "nest": (lambda x: [{"a": (Point(Batch(x, []), "a"), 1)}], lambda got: got[0]["a"][0].x.x),  # type: ignore[arg-type]
}
every_nest = pytest.mark.parametrize(("nest", "find"), NESTS.values(), ids=NESTS)


# Inputs


@every_nest
def test_inputs_are_cast_in_every_nest(nest: Callable[[Tensor], Any], find: Callable[[Any], Tensor]) -> None:
    given = nest(numbers())
    (got,), _ = given_to({"mixed_precision": TO_BRAIN}, given)
    assert type(got) is type(given)
    assert find(got).dtype is BRAIN
    assert torch.equal(find(got).float(), find(given))
    assert find(given).dtype is SINGLE, "the caller's own nest is left alone"


@pytest.mark.parametrize("kind", [ReadOnly, lambda **items: MappingProxyType(items)])
def test_inputs_are_cast_in_mappings_that_cannot_be_changed(kind: Any) -> None:
    (got,), _ = given_to({"mixed_precision": TO_BRAIN}, kind(x=numbers(), y=numbers()))
    assert {key: value.dtype for key, value in got.items()} == {"x": BRAIN, "y": BRAIN}


def test_keyword_arguments_are_cast() -> None:
    args, kwargs = given_to({"mixed_precision": TO_BRAIN}, numbers(), mask=numbers(), flags={"x": numbers()}, depth=2)
    assert [args[0].dtype, kwargs["mask"].dtype, kwargs["flags"]["x"].dtype] == [BRAIN] * 3
    assert kwargs["depth"] == 2


def test_what_is_no_floating_point_tensor_is_passed_on_itself() -> None:
    class Opaque:
        x = numbers()

    @dataclass(eq=False)
    class Described(nn.Linear):
        size: int

        def __post_init__(self) -> None:
            super().__init__(self.size, self.size)

    others: list[Any] = [3, 2.5, "text", None, Opaque(), {1, 2}, torch.arange(3), torch.tensor([True]), Described(3)]
    others += [torch.ones(2, dtype=torch.complex64), torch.Size([2]), SINGLE, nn.ReLU()]
    (got, _), kwargs = given_to({"mixed_precision": TO_BRAIN}, others, numbers(), key=others[4])
    assert all(new is old for new, old in zip(got, others, strict=True))
    assert kwargs["key"] is others[4]


@every_nest
def test_nests_in_which_nothing_is_cast_are_passed_on_themselves(
    nest: Callable[[Tensor], Any], find: Callable[[Any], Tensor]
) -> None:
    given = nest(numbers().bfloat16())
    (got,), _ = given_to({"mixed_precision": TO_BRAIN}, given)
    assert got is given


@pytest.mark.parametrize("policy", [TO_BRAIN, False])
def test_a_nest_that_contains_itself_is_passed_on(policy: Any) -> None:
    unit = alone(spy := Spy(Branch.tree), mixed_precision=policy)
    given = Branch.tree(numbers())
    mapping: dict[str, Any] = {"x": numbers()}
    mapping["itself"] = mapping
    output = unit(numbers(), given, mapping)
    (_, got, items), _ = spy.got[0]
    dtype = BRAIN if policy else SINGLE
    assert [got.x.dtype, got.inside[0].x.dtype, items["x"].dtype] == [dtype] * 3
    assert got.inside[0].around is given
    assert items["itself"] is mapping
    (output.x.sum() + output.inside[0].x.sum()).backward()
    assert [param.grad is None for param in unit.parameters()] == [False]


def test_inputs_are_left_alone_if_so_asked() -> None:
    given = numbers()
    (got,), _ = given_to({"mixed_precision": MixedPrecision(param_dtype=BRAIN, cast_forward_inputs=False)}, given)
    assert got is given


@pytest.mark.parametrize("policy", [MixedPrecision(), MixedPrecision(reduce_dtype=BRAIN), False])
def test_inputs_are_left_alone_where_nothing_else_is_cast(policy: Any) -> None:
    given = numbers()
    (got,), _ = given_to({"mixed_precision": policy}, given)
    assert got is given


@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE])
@pytest.mark.parametrize("policy", [TO_BRAIN, True])
def test_gradients_of_inputs_have_the_inputs_dtype(dtype: torch.dtype, policy: Any) -> None:
    inputs = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    alone(nn.Linear(3, 3), mixed_precision=policy)(inputs).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.dtype is dtype
    assert inputs.grad.any()


def test_recurrent_modules_compute_in_the_policys_dtype() -> None:
    """Their weights are in a list besides, and their states among the inputs and outputs."""
    model = alone(nn.LSTM(3, 4, batch_first=True), mixed_precision=TO_BRAIN)
    outputs, states = model(packed(torch.ones(2, 3, 3)), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))
    assert {tensor.dtype for tensor in (outputs.data, *states)} == {BRAIN}
    outputs.data.float().sum().backward()
    assert model.params[0].grad is not None


# FairScale's way: the outermost unit casts


class Recorder(nn.Linear):
    """Remembers the dtypes that came in, computes in its weight's, and returns float32."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.got: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.got.append(inputs.dtype)
        return super().forward(inputs.to(self.weight.dtype)).float()


class Tree(nn.Module):
    """A recorder before a unit that is one; `recompute` checkpoints the unit from outside."""

    def __init__(self, unit: nn.Module, recompute: bool | None) -> None:
        super().__init__()
        self.entry = Recorder()
        self.unit = unit
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        return (
            self.unit(hidden) if self.recompute is None else checkpoint(self.unit, hidden, use_reentrant=self.recompute)
        )


def seen_in(outer: dict[str, Any], inner: dict[str, Any], recompute: bool | None) -> list[set[torch.dtype]]:
    """The dtypes that reached the outer and the inner module in forwards and backwards."""
    recorder = Recorder()
    tree = Tree(alone(recorder, **inner), recompute)
    model = alone(tree, **outer)
    for _ in range(2):
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert len(recorder.got) == (2 if recompute is None else 4)
    return [set(tree.entry.got), set(recorder.got)]


FLAG = {"mixed_precision": True, "compute_dtype": BRAIN}
POLICY = {"mixed_precision": TO_BRAIN}
every_recomputation = pytest.mark.parametrize("recompute", [None, True, False])


@every_recomputation
def test_with_flags_only_the_outermost_unit_casts(recompute: bool | None) -> None:
    assert seen_in(FLAG, FLAG, recompute) == [{BRAIN}, {SINGLE}]


@every_recomputation
def test_with_flags_an_inner_unit_is_outermost_below_full_precision(recompute: bool | None) -> None:
    assert seen_in({}, FLAG, recompute) == [{SINGLE}, {BRAIN}]


@every_recomputation
def test_with_policies_every_unit_casts(recompute: bool | None) -> None:
    assert seen_in(POLICY, POLICY, recompute) == [{BRAIN}, {BRAIN}]


@every_recomputation
def test_a_policys_unit_casts_below_flags_and_not_the_other_way_round(recompute: bool | None) -> None:
    assert seen_in(FLAG, POLICY, recompute) == [{BRAIN}, {BRAIN}]
    assert seen_in(POLICY, FLAG, recompute) == [{BRAIN}, {SINGLE}]


@pytest.mark.parametrize(
    ("compute", "autocast", "expected"),
    [(SINGLE, BRAIN, BRAIN), (SINGLE, torch.half, torch.half), (SINGLE, None, SINGLE), (BRAIN, torch.half, BRAIN)],
)
def test_with_flags_of_float32_autocast_says_what_inputs_are_cast_to(
    compute: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype
) -> None:
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        args, _ = given_to({"mixed_precision": True, "compute_dtype": compute}, numbers(), numbers().double())
        assert [each.dtype for each in args] == [expected] * 2
        (inputs,), _ = given_to({"mixed_precision": MixedPrecision(param_dtype=SINGLE)}, numbers().double())
        assert inputs.dtype == SINGLE, "a policy says it itself"


def test_which_unit_is_outermost_is_found_out_again_after_a_reset() -> None:
    recorder = Recorder()
    inner = alone(recorder, **FLAG)
    inner(numbers())
    inner._reset_lazy_init()
    outer = alone(Tree(inner, recompute=None), **FLAG)
    outer(numbers())
    outer._reset_lazy_init()
    inner(numbers())
    assert recorder.got == [BRAIN, SINGLE, BRAIN]


# Widening


@pytest.mark.parametrize(("given", "expected"), [(HALF, SINGLE), (BRAIN, SINGLE), (SINGLE, SINGLE), (DOUBLE, DOUBLE)])
def test_16_bit_inputs_are_widened_for_a_unit_of_full_precision(given: torch.dtype, expected: torch.dtype) -> None:
    (args, (flag,)), kwargs = given_to(
        {"force_input_to_fp32": True}, [numbers().to(given)], (True,), x=numbers().half()
    )
    assert args[0].dtype is expected
    assert flag is True
    assert kwargs["x"].dtype is SINGLE


def test_without_being_asked_nothing_is_widened() -> None:
    given = numbers().half()
    (got,), _ = given_to({}, given)
    assert got is given


def test_a_unit_of_full_precision_is_widened_inside_a_mixed_one() -> None:
    """FairScale's float32 head in a float16 model."""
    assert seen_in(FLAG, {"force_input_to_fp32": True}, None) == [{BRAIN}, {SINGLE}]
    head = alone(nn.Linear(3, 3), force_input_to_fp32=True)
    model = alone(nn.Sequential(nn.Linear(3, 3), head), **FLAG)
    outputs = model(numbers())
    assert outputs.dtype is SINGLE
    outputs.sum().backward()
    assert [param.grad.dtype for param in model.parameters() if param.grad is not None] == [SINGLE] * 2


# Outputs


@every_nest
def test_outputs_are_cast_in_every_nest(nest: Callable[[Tensor], Any], find: Callable[[Any], Tensor]) -> None:
    spy = Spy(nest)
    policy = MixedPrecision(param_dtype=BRAIN, output_dtype=SINGLE)
    output = alone(spy, mixed_precision=policy)()
    assert type(output) is type(nest(numbers()))
    assert find(output).dtype is SINGLE
    find(output).sum().backward()


def test_outputs_keep_the_dtype_of_the_computation_unless_asked() -> None:
    for options in (FLAG, POLICY):
        assert alone(nn.Linear(3, 3), **options)(numbers()).dtype is BRAIN


def test_outputs_that_are_no_floating_point_tensors_stay() -> None:
    policy = MixedPrecision(param_dtype=BRAIN, output_dtype=SINGLE)
    model = alone(Spy(lambda x: (x, x.argmax(), x > 0, "text")), mixed_precision=policy)
    values, where, is_positive, text = model()
    assert [values.dtype, where.dtype, is_positive.dtype, text] == [SINGLE, torch.int64, torch.bool, "text"]


def test_every_unit_has_its_own_output_dtype() -> None:
    recorder = Recorder()
    inner = alone(nn.Linear(3, 3), mixed_precision=MixedPrecision(param_dtype=BRAIN, output_dtype=DOUBLE))
    wrap = MixedPrecision(param_dtype=BRAIN, output_dtype=HALF)
    model = alone(nn.Sequential(inner, recorder), mixed_precision=wrap)
    assert model(numbers()).dtype is HALF
    assert recorder.got == [DOUBLE]


@on_ranks(2)
def test_a_returned_parameter_outlives_its_unit_in_the_output_dtype() -> None:
    torch.manual_seed(0)
    plain, copied = returning(), returning()
    copied.load_state_dict(plain.state_dict())
    policy = MixedPrecision(param_dtype=BRAIN, output_dtype=SINGLE)
    model = FullyShardedDataParallel(copied, mixed_precision=policy, disable_reshard_on_root=False)
    _, weight, bias = model(numbers())
    assert torch.equal(weight, plain.layer.weight.bfloat16().float())
    assert torch.equal(bias, plain.layer.bias[1:].bfloat16().float())
    (weight.sum() + 2 * bias.sum()).backward()
    step(model)
    state = model.state_dict()
    assert torch.equal(state["layer.weight"], plain.layer.weight - 1)
    assert torch.equal(state["layer.bias"], plain.layer.bias - torch.tensor([0.0, 2.0, 2.0]))


def returning() -> nn.Module:
    return Net(lambda net, x: (net.layer(x), net.layer.weight, net.layer.bias[1:]), layer=nn.Linear(3, 3))


# Units of different precision


def sections() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 3))


def gradient_of(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def step(model: nn.Module, gradients: dict[str, Tensor] | None = None) -> None:
    """Subtract its gradients, or these, from a model's parameters."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.sub_(gradients[name] if gradients is not None else gradient_of(param))


def by_hand(inputs: Tensor, outer: torch.dtype, inner: torch.dtype, final: torch.dtype) -> tuple[Tensor, nn.Module]:
    """What the sections compute in these dtypes, and the sections after a step."""
    plain = sections()
    first, second = plain[0], plain[1]
    lows = [copy.deepcopy(first).to(outer), copy.deepcopy(second).to(inner)]
    output = lows[1](lows[0](inputs.to(outer)).to(inner)).to(final)
    output.float().sin().sum().backward()
    step(plain, {f"{n}.{name}": gradient_of(param) for n, m in enumerate(lows) for name, param in m.named_parameters()})
    return output, plain


PRECISIONS = [
    pytest.param(BRAIN, SINGLE, None, id="float32 head in bfloat16 trunk"),
    pytest.param(SINGLE, BRAIN, None, id="bfloat16 block in float32 model"),
    pytest.param(SINGLE, BRAIN, SINGLE, id="bfloat16 block in float32 model, outputs cast back"),
    pytest.param(BRAIN, HALF, None, id="float16 in bfloat16"),
    pytest.param(HALF, BRAIN, HALF, id="bfloat16 in float16, outputs cast back"),
]


@pytest.mark.parametrize(("outer", "inner", "output"), PRECISIONS)
@on_ranks(2)
def test_units_of_different_precision_nest(outer: torch.dtype, inner: torch.dtype, output: torch.dtype | None) -> None:
    plain = sections()
    policy = MixedPrecision(param_dtype=inner, output_dtype=output)
    plain[1] = FullyShardedDataParallel(plain[1], mixed_precision=policy)
    model = FullyShardedDataParallel(plain, mixed_precision=MixedPrecision(param_dtype=outer))
    # The same inputs on all ranks: the mean of their gradients is each one's, but for the last bit in float32.
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    expected, after = by_hand(inputs, outer, inner, output or inner)
    found = model(inputs)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    found.float().sin().sum().backward()
    step(model)
    state = model.state_dict()
    torch.testing.assert_close(state, after.state_dict(), rtol=1e-6, atol=1e-7)
    before = sections().state_dict()
    assert not any(torch.equal(state[name], value) for name, value in before.items())


def test_outputs_are_cast_inside_summon_full_params_too() -> None:
    model = alone(nn.Linear(3, 2), mixed_precision=MixedPrecision(param_dtype=BRAIN, output_dtype=DOUBLE))
    with torch.no_grad(), model.summon_full_params():
        assert model(torch.ones(1, 3)).dtype == DOUBLE
