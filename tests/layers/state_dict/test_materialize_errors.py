"""What `materialize` refuses: what would leave a model with memory in the place of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fsdp
from tests.helpers.meta_models import FORMS, Norms, Rotary, initialise, mlp, on_meta, sharded
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone

EITHER: dict[str, Wrap] = {"plain": keep, "wrapped": sharded(process_group=Alone())}
either = pytest.mark.parametrize("wrap", EITHER.values(), ids=EITHER)
every_form = pytest.mark.parametrize("form", FORMS, ids=["flat", "original", "unflattened"])


def layers(wrap: Wrap, make: Callable[[], nn.Module] = lambda: nn.Linear(3, 2)) -> Any:
    with torch.device("meta"):
        return wrap(nn.Sequential(make()))


def test_a_module_that_cannot_initialise_itself() -> None:
    for wrap in EITHER.values():
        with pytest.raises(RuntimeError, match=r"the root \(NestedMlp\) has scale without values, and no reset_param"):
            fsdp.materialize(on_meta(mlp, wrap))


@either
def test_a_buffer_that_nobody_initialises(wrap: Wrap) -> None:
    with pytest.raises(RuntimeError, match=r"root \(Rotary\) has inv_freq, steps without values.*param_init_fn"):
        fsdp.materialize(on_meta(Rotary, wrap))


def to_meta(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.to("meta"))
    nn.init.zeros_(module.bias)


def half(module: Any) -> None:
    nn.init.zeros_(module.bias)


def reshaped(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(3, 2))
    nn.init.zeros_(module.bias)


def if_on_meta(module: Any) -> None:
    """As functions for torch's FSDP1 often begin."""
    if any(tensor.is_meta for tensor in module.parameters(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()


def removed(module: Any) -> None:
    nn.init.zeros_(module.bias)
    module.weight = None


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (half, r"0 \(Linear\): its initialisation left weight without values"),
        (if_on_meta, r"left weight without values\. .* must not test for the meta device"),
        (to_meta, r"0 \(Linear\): its initialisation left weight on the meta device"),
        (reshaped, r"0 \(Linear\): its initialisation changed the shape of weight to \(3, 2\); it was \(2, 3\)"),
        (removed, r"0 \(Linear\): its initialisation removed weight"),
    ],
)
@either
def test_an_initialisation_that_leaves_something_without_values(
    wrap: Wrap, init: Callable[[nn.Module], None], message: str
) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        fsdp.materialize(layers(wrap), param_init_fn=init)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64])
def test_a_forgotten_buffer_is_noticed_whatever_its_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.empty(3, dtype=dtype, device="meta"))
    with pytest.raises(RuntimeError, match="left table without values"):
        fsdp.materialize(model)
    fsdp.materialize(model, param_init_fn=lambda module: module.get_buffer("table").zero_())
    assert not model.get_buffer("table").any()


@either
def test_parametrized_weights(wrap: Wrap) -> None:
    with pytest.raises(RuntimeError, match=r"0\.parametrizations\.weight \(ParametrizationList\) has original0, .*no"):
        fsdp.materialize(layers(wrap, lambda: parametrizations.weight_norm(nn.Linear(3, 2))))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_weights_that_a_hook_computes() -> None:
    with pytest.raises(RuntimeError, match=r"0 \(Linear\): its initialisation left weight_g without values"):
        fsdp.materialize(layers(keep, lambda: torch.nn.utils.weight_norm(nn.Linear(3, 2))))


def test_memory_that_a_parent_takes_away_again() -> None:
    def init(module: Any) -> None:
        module.to_empty(device="cpu", recurse=True)
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)

    with pytest.raises(RuntimeError, match=r"\(MultiheadAttention\): .*reallocated.*: weight, bias.*recurse=False"):
        fsdp.materialize(nn.MultiheadAttention(4, 2, device="meta"), param_init_fn=init)


@on_ranks(2)
def test_a_parent_that_initialises_another_unit() -> None:
    attention: Any = nn.MultiheadAttention(4, 2, device="meta")
    attention.out_proj = sharded()(attention.out_proj)
    with pytest.raises(RuntimeError, match="bias is sharded"):
        fsdp.materialize(sharded()(attention))


def test_a_part_of_a_unit() -> None:
    model = layers(EITHER["wrapped"])
    with pytest.raises(ValueError, match="this Linear is a part of Sequential"):
        fsdp.materialize(model.module.module[0])


def test_inside_summon_full_params() -> None:
    model = EITHER["wrapped"](nn.Linear(2, 2))
    with model.summon_full_params(), pytest.raises(RuntimeError, match="is inside summon_full_params"):  # type: ignore[operator]
        fsdp.materialize(model)


def test_inside_a_forward() -> None:
    class Late(nn.Linear):
        def forward(self, inputs: Any) -> Any:
            fsdp.materialize(model)
            return super().forward(inputs)

    model = EITHER["wrapped"](Late(2, 2))
    with pytest.raises(RuntimeError, match="cannot materialize in the middle of a forward"):
        model(torch.ones(1, 2))


@every_form
def test_after_an_error_nothing_has_values_and_it_can_be_tried_again(form: dict[str, Any]) -> None:
    model = sharded(process_group=Alone(), **form)(on_meta(Norms))

    def fail(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, nn.BatchNorm1d):
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fsdp.materialize(model, param_init_fn=fail)
    with pytest.raises(RuntimeError, match=r"9 of its .* no values yet.*: entry\.weight"):
        model.state_dict()
    fsdp.materialize(model, seed=0)
    plain = on_meta(Norms)
    fsdp.materialize(plain, seed=0)
    inputs = torch.ones(2, 5)
    assert torch.equal(model(inputs), plain(inputs))


def test_a_module_whose_initialisation_has_failed_is_to_be_built_again() -> None:
    def fail(_: nn.Module) -> None:
        raise ZeroDivisionError

    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError):
        sharded(process_group=Alone(), param_init_fn=fail)(module)
    with pytest.raises(ValueError, match=r"this Linear is wrapped already, .* in param_init_fn .* again"):
        sharded(process_group=Alone())(module)
