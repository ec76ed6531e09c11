"""Modules that hold or find their weights in ways of their own train and evaluate as without the wrapper.

Each kind as one unit and in units of its parts, in every form of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.equality import assert_close
from tests.helpers.models import Net, Wrap
from tests.helpers.module_kinds import (
    FORMS,
    UNITS,
    Make,
    SideBySide,
    Units,
    assert_kind_trains,
    whole,
    wrapped_parts,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import adamw, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import batch, score

# Parametrizations


def normed(make_norm: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """Three layers, of which two have their weights computed."""
    layers = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 5)
    made = [make_norm(layer, *args, **options) for layer in layers[:2]]
    return nn.Sequential(made[0], nn.Tanh(), made[1], nn.Tanh(), layers[2])


class Symmetric(nn.Module):
    """Has a parameter itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width, width), 1.1))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight.triu() + weight.triu(1).transpose(-1, -2)) * self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.triu()


class Transposed(nn.Module):
    """Gives a view of the parameter."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.transpose(0, 1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.transpose(0, 1)


def with_own_parametrizations() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 5))
    parametrize.register_parametrization(model[0], "weight", Transposed())
    parametrize.register_parametrization(model[2], "weight", Symmetric(7))
    parametrize.register_parametrization(model[2], "weight", Transposed())
    return model


def old_norm(make: Callable[..., nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        return make(layer)


weight_norm = partial(normed, parametrizations.weight_norm)
spectral_norm = partial(normed, parametrizations.spectral_norm)
orthogonal = partial(normed, parametrizations.orthogonal)
householder = partial(normed, parametrizations.orthogonal, orthogonal_map="householder")
old_weight_norm = partial(normed, partial(old_norm, nn.utils.weight_norm))
old_spectral_norm = partial(normed, partial(old_norm, nn.utils.spectral_norm))

# Recurrent and attending


class Recurrent(nn.Module):
    """Each row is a sequence of five numbers."""

    def __init__(self, cell: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.cell = cell
        self.readout = nn.Linear(width, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        self.cell.flatten_parameters()  # as models do that were written for GPUs
        outputs, _ = self.cell(inputs[..., None])
        return self.readout(outputs.mean(1))


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM(1, 4, num_layers=2, bidirectional=True, proj_size=3, batch_first=True), 6)


def gru() -> nn.Module:
    return Recurrent(nn.GRU(1, 4, num_layers=2, batch_first=True), 4)


def attending(middle: nn.Module) -> nn.Module:
    """Each row is five tokens; two heads, so that torch's fast path for inference is open."""
    return Net(
        lambda net, x: net.readout(net.middle(net.embed(x[..., None])).flatten(1)),
        embed=nn.Linear(1, 4),
        middle=middle,
        readout=nn.Linear(20, 5),
    )


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.attention(inputs, inputs, inputs, need_weights=False)
        return outputs


def attention() -> nn.Module:
    return attending(SelfAttention())


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 11, dropout=0.0, batch_first=True)


def encoder() -> nn.Module:
    return attending(nn.TransformerEncoder(encoder_layer(), 2))


# Submodules and parameters in several places


class SharesModule(nn.Module):
    """The same module object in two branches."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(5, 5)
        self.left = nn.Sequential(shared, nn.Tanh(), nn.Linear(5, 7), nn.Linear(7, 5))
        self.right = nn.Sequential(nn.Linear(5, 5), shared)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.right(self.left(inputs))


class Listed(nn.Module):
    """Lists and dictionaries of parameters, nested, some of them in both."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(5, 5) / 5) for _ in range(3))
        self.large = nn.ParameterDict({name: nn.Parameter(torch.randn(5, 5) / 5) for name in "ab"})
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(5)), "again": self.weights[0]})
        self.deep = nn.ModuleDict({"lists": nn.ModuleList([nn.ParameterList([nn.Parameter(torch.randn(5))])])})

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.weights:
            inputs = torch.tanh(inputs @ weight)
        inputs = inputs @ self.large["a"] @ self.large["b"]
        return inputs @ self.named["again"] + self.named["bias"] * self.deep["lists"][0][0]


class ReadsChild(nn.Module):
    """Never calls its child, whose parameters it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 3)
        self.exit = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(inputs, self.child.weight, self.child.bias)
        return self.exit(torch.tanh(hidden @ self.child.weight))


# Odd parameters


class Odd(nn.Module):
    """0-d, empty and non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.zeros(0, 5))
        self.transposed = nn.Parameter((torch.randn(7, 5) / 7).t())
        self.strided = nn.Parameter((torch.randn(7, 10) / 7)[:, ::2])
        self.wide = nn.Parameter((torch.randn(3, 5) / 5).t())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(inputs @ self.transposed) @ self.strided
        return hidden @ self.wide @ self.wide.t() * self.scale + self.none.sum()


class Complex(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7)
        self.waves = nn.Linear(7, 3, dtype=torch.complex128)
        self.phase = nn.Parameter(torch.tensor(0.3 + 0.4j, dtype=torch.complex128))
        self.exit = nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        waves = self.waves(torch.tanh(self.entry(inputs)).to(torch.complex128)) * self.phase
        return self.exit(torch.view_as_real(waves).flatten(1))


KINDS: dict[str, Make] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "orthogonal": orthogonal,
    "householder": householder,
    "own parametrizations": with_own_parametrizations,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": old_spectral_norm,
    "lstm": lstm,
    "gru": gru,
    "attention": attention,
    "encoder": encoder,
    "shared module": SharesModule,
    "lists of parameters": Listed,
    "a child that is not called": ReadsChild,
    "odd shapes": Odd,
    "complex": Complex,
}


@parametrize_cases(
    at_most=17,
    kind=list(KINDS),
    options=FORMS,
    units=UNITS,
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adamw],
    reshard_after_forward=[True, False],
)
def test_training_equals_the_plain_module(ranks: RankPool, world_size: int, case: Case) -> None:
    options = {**case.options, "reshard_after_forward": case.reshard_after_forward}
    ranks(world_size).run(assert_kind_trains, KINDS[case.kind], case.units, case.make_optimizer, options)


# Evaluated

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


# Those that do something else in evaluation, or keep weights where a hook or a list has put them.
EVALUATED = ["weight_norm", "spectral_norm", "old weight_norm", "old spectral_norm", "lstm", "attention", "encoder"]


@parametrize_pairs(at_most=8, kind=EVALUATED, units=UNITS, options=FORMS)
@on_ranks(2)
def test_evaluation_between_steps_equals_the_plain_modules(kind: str, options: dict[str, Any], units: Units) -> None:
    make = KINDS[kind]
    pair = SideBySide(make, units, **options)
    for number, (name, mode) in enumerate(MODES.items()):
        pair.on_both(nn.Module.eval)
        with mode():
            assert_close(pair.sharded(batch(number, 0)), pair.plain(batch(number, 0)), name)
        pair.on_both(nn.Module.train)
        pair.step(number)
    pair.assert_close()


class FastPath(TorchDispatchMode):
    """Counts the calls of torch's kernel for inference."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._transformer_encoder_layer_fwd.default
        return func(*args, **(kwargs or {}))


def by_encoder_layers(model: nn.Module, wrap: Wrap) -> nn.Module:
    return wrapped_parts(model, wrap, parts=["middle.layers.0", "middle.layers.1"])


@parametrize_pairs(options=FORMS, units=[whole, by_encoder_layers])
@on_ranks(2)
def test_torchs_fast_path_for_inference_is_taken_where_it_can_be(options: dict[str, Any], units: Units) -> None:
    pair = SideBySide(encoder, units, **options)
    pair.step(0)
    pair.on_both(nn.Module.eval)
    with torch.no_grad():
        expected = pair.plain(batch(1, 0))
        with FastPath() as fast:
            assert_close(pair.sharded(batch(1, 0)), expected, "evaluated")
    # It reads weights behind the layers' backs, and torch leaves it where layers have hooks, as units do.
    assert fast.calls == (2 if units is whole else 0)
    pair.on_both(nn.Module.train)
    pair.step(1)
    pair.assert_close()


# Computed weights, with whole parameters


@parametrize_cases(make=[weight_norm, with_own_parametrizations], options=FORMS, units=UNITS)
@on_ranks(2)
def test_computed_weights_are_read_and_assigned_while_summoned(case: Case) -> None:
    pair = SideBySide(case.make, case.units, **case.options)
    pair.step(0)
    with pair.sharded.summon_full_params(), torch.no_grad():
        assert_close(pair.sharded[0].weight, pair.plain[0].weight, "read")
        values = [model[0].weight.neg() for model in (pair.sharded, pair.plain)]
        for model, value in zip((pair.sharded, pair.plain), values, strict=True):
            inside = model[0].module.module if model is pair.sharded and case.units is not whole else model[0]
            inside.weight = value
    pair.step(1)
    pair.assert_close()


@parametrize_pairs(make=[weight_norm, with_own_parametrizations], options=FORMS, units=UNITS)
@on_ranks(2)
def test_computed_weights_are_cached_over_several_forwards(make: Make, options: dict[str, Any], units: Units) -> None:
    pair = SideBySide(make, units, **options)
    for number in range(3):
        for model, inputs in ((pair.sharded, batch(number, dist.get_rank())), (pair.plain, None)):
            parts = [batch(number, rank) for rank in range(dist.get_world_size())] if inputs is None else [inputs]
            with parametrize.cached():
                for part in parts:
                    ((score(model(part)) + score(model(part.neg()))) / len(parts)).backward(retain_graph=True)
        pair.optimize()
    pair.assert_close()
