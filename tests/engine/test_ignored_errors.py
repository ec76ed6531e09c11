"""What `ignored_modules` and `ignored_parameters` refuse, and what may be added after wrapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, module_wrap_policy
from tests.helpers.changed_params import LAYOUTS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, alone

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_parameters"])
def test_an_iterator_would_be_used_up(argument: str) -> None:
    model = layers()
    given = model[0].modules() if argument == "ignored_modules" else model[0].parameters()
    with pytest.raises(TypeError, match=rf"{argument} is an iterator.*list"):
        alone(model, **{argument: given})
    with (
        enable_wrap(module_wrap_policy({nn.Linear}), wrapper_cls=FullyShardedDataParallel, process_group=Alone()),
        pytest.raises(TypeError, match=rf"{argument} is an iterator"),
    ):
        auto_wrap(model, **{argument: given})
    assert model[0].weight.sum() == layers()[0].weight.sum()  # the model is as it was
    alone(model, **{argument: list(model[0].modules() if argument == "ignored_modules" else model[0].parameters())})


@pytest.mark.parametrize(
    ("argument", "given", "message"),
    [
        ("ignored_modules", [nn.Parameter(torch.ones(1))], "ignored_modules must be .* of Modules, found a Parameter"),
        ("ignored_modules", ["0"], "found a str"),
        ("ignored_modules", 3, "ignored_modules must be .* of Modules, found a int"),
        ("ignored_parameters", ["0.weight"], "ignored_parameters must be .* of Parameters, found a str"),
        ("ignored_parameters", [torch.ones(1)], "found a Tensor"),
        ("ignored_parameters", [nn.Linear(1, 1)], "found a Linear"),
    ],
)
def test_wrong_kinds_are_named(argument: str, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        alone(layers(), **{argument: given})


@pytest.mark.parametrize("ignored", ["", "1"])
def test_the_wrapped_module_cannot_be_ignored(ignored: str) -> None:
    model = layers()
    with pytest.raises(ValueError, match=r"ignored_modules contains the Sequential that is to be wrapped.*unwrapped"):
        alone(model[1], ignored_modules=[model.get_submodule(ignored)])
    alone(model[1], ignored_modules=[model[0]])


@parametrize_pairs(layout=list(LAYOUTS), inner=["1", "1.0"])
@on_ranks(1, 2)
def test_what_an_inner_unit_has_sharded_cannot_be_ignored(layout: str, inner: str) -> None:
    model = layers()
    weight = model[1][0].weight
    ignored = model.get_submodule(inner)
    model[1] = FullyShardedDataParallel(model[1], **LAYOUTS[layout])
    with pytest.raises(ValueError, match="is ignored, but an inner unit has sharded it already"):
        FullyShardedDataParallel(model, ignored_modules=[ignored])
    with pytest.raises(ValueError, match=r"0\.weight.* is ignored, but an inner unit has sharded it already"):
        FullyShardedDataParallel(model, ignored_parameters=[weight])
    with pytest.raises(ValueError, match="is ignored, but an inner unit has sharded it already"):
        FullyShardedDataParallel(model, ignored_modules=[model[1]])
    FullyShardedDataParallel(model)(torch.ones(2, 5)).sum().backward()


@every_layout
@on_ranks(2)
def test_a_parameter_added_after_wrapping_is_refused(layout: str) -> None:
    plain = layers()
    model = FullyShardedDataParallel(plain, ignored_modules=[plain[1]], **LAYOUTS[layout])
    plain[0].extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"0\.extra became a parameter after sharding.*ignored_parameters"):
        model(torch.ones(2, 5))


@every_layout
@on_ranks(2)
def test_a_module_put_into_the_model_after_its_first_use_is_refused(layout: str) -> None:
    """By whatever way, into a unit that is called and into one inside, as long as it is there."""
    options = LAYOUTS[layout]
    plain = layers()
    plain.append(FullyShardedDataParallel(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), **options))
    ignored = plain.append(nn.Sequential())[-1]
    model = FullyShardedDataParallel(plain, ignored_modules=[ignored], **options)
    inputs = torch.ones(2, 5)
    inner: Any = next(module for module in plain[2].modules() if type(module) is nn.Sequential)
    tanh, middle = inner[1], plain[1]
    tanh.register_parameter("absent", None)
    model(inputs).sum().backward()

    def put(at: nn.Sequential, name: str, module: nn.Module | None) -> None:
        at._modules.pop(name) if module is None else at._modules.update({name: module})

    for change, undo, name in [
        (lambda: plain.append(nn.Linear(5, 5)), lambda: plain.pop(-1), r"4\.weight"),
        (lambda: put(inner, "1", nn.Linear(5, 5)), lambda: put(inner, "1", tanh), r"2\.1\.weight"),
        (lambda: setattr(plain, "1", nn.Linear(5, 5)), lambda: setattr(plain, "1", middle), r"1\.weight"),
        (lambda: put(tanh, "extra", nn.PReLU()), lambda: put(tanh, "extra", None), r"2\.1\.extra\.weight"),
        (lambda: setattr(tanh, "extra", nn.Parameter(inputs)), lambda: delattr(tanh, "extra"), r"2\.1\.extra"),
        (lambda: setattr(tanh, "absent", nn.Parameter(inputs)), lambda: setattr(tanh, "absent", None), r"2\.1\.absent"),
    ]:
        change()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"^{name} became a parameter after sharding"):
                model(inputs)
        undo()
        model(inputs).sum().backward()
    # What is not trained, is wrapped itself, or is put into what is ignored, may come.
    plain.append(nn.ReLU())
    ignored.append(nn.Linear(5, 5))
    plain.append(FullyShardedDataParallel(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), **options))
    model.zero_grad()
    model(inputs).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@every_layout
@on_ranks(2)
def test_one_added_to_an_ignored_module_is_welcome(layout: str) -> None:
    plain = layers()
    model = FullyShardedDataParallel(plain, ignored_modules=[plain[1]], **LAYOUTS[layout])
    plain[1][0].extra = nn.Parameter(torch.ones(1))
    model(torch.ones(2, 5)).sum().backward()
    assert torch.equal(model.state_dict()["1.0.extra"], torch.ones(1))


@every_layout
@on_ranks(2)
def test_an_ignored_parameter_may_be_replaced(layout: str) -> None:
    plain = layers()
    model = FullyShardedDataParallel(plain, ignored_modules=[plain[1]], **LAYOUTS[layout])
    for value in (1.0, 2.0):
        plain[1][0].weight = nn.Parameter(torch.full((5, 5), value))
        model(torch.ones(2, 5)).sum().backward()
        assert plain[1][0].weight.grad is not None
        assert torch.equal(model.state_dict()["1.0.weight"], torch.full((5, 5), value))
