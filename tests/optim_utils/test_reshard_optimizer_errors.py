"""What `reshard_optimizer` refuses, and that it then has changed nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp import FlattenParamsWrapper, FullyShardedDataParallel
from fsdp.layers.mapped_files import MappedFiles
from tests.helpers.copied_twins import FLAT, ORIGINAL, every_form
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import alone, fully_sharded
from tests.optim_utils.test_reshard_optimizer_held import inside

REMEDY = "Wrap with use_orig_params=True"
ANEW = "Create the optimizer after wrapping"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return optimizer


def nest(model: nn.Sequential, **options: Any) -> FullyShardedDataParallel:
    """The last layer is a unit by itself and the others are the root's."""
    model[2] = alone(model[2], **options)
    return alone(model, **options)


@contextmanager
def refused(optimizer: torch.optim.Optimizer, *parts: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """What is done inside raises an error with these parts, and leaves the optimizer as it was."""
    objects, values = inside(optimizer), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error) as raised:
        yield
    for part in parts:
        assert part in str(raised.value)
    assert inside(optimizer) == objects
    torch.testing.assert_close(optimizer.state_dict(), values, rtol=0, atol=0)


# Parameters of one flat parameter that are not treated alike


def test_parameters_of_one_flat_parameter_in_several_groups() -> None:
    model = layers()
    weights, biases = (list(filter(lambda p: p.dim() == dim, model.parameters())) for dim in (2, 1))
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 1.0}]
    optimizer = stepped(model, torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1))
    wrapped = nest(model)
    found = "2.weight is in its parameter group 0 and 2.bias in group 1, with lr 0.5 and 1.0, weight_decay 0.1 and 0.0;"
    with refused(optimizer, found.replace("2.", "0."), REMEDY):
        wrapped.reshard_optimizer(optimizer)


def test_several_groups_with_the_same_options_may_differ_later() -> None:
    model = layers()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = stepped(model, torch.optim.SGD(groups, lr=torch.tensor(0.1)))
    wrapped = alone(model)
    with refused(optimizer, "0.weight is in its parameter group 0 and 2.weight in group 1, with the same options"):
        wrapped.reshard_optimizer(optimizer)


def test_groups_that_are_units_need_no_remedy() -> None:
    model = layers()
    groups = [{"params": list(model[2].parameters()), "lr": 1.0}, {"params": list(model[0].parameters())}]
    optimizer = stepped(model, torch.optim.AdamW(groups))
    wrapped = nest(model)
    wrapped.reshard_optimizer(optimizer)
    own, inner = wrapped.parameters()
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [[id(inner)], [id(own)]]


def test_some_parameters_of_one_flat_parameter() -> None:
    model = layers()
    optimizer = stepped(model, torch.optim.AdamW([p for p in model.parameters() if p is not model[2].bias]))
    wrapped = nest(model)
    with refused(optimizer, "it has 2.weight, but not 2.bias; the two are in one flat parameter", REMEDY):
        wrapped.reshard_optimizer(optimizer)


def later(model: nn.Sequential, change: Callable[[dict[str, Any]], Any]) -> torch.optim.Optimizer:
    """An optimizer that took a step, with the last bias's state changed."""
    optimizer = stepped(model, adamw(model))
    change(optimizer.state[model[2].bias])  # type: ignore[index]
    return optimizer


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda state: state["step"].add_(1),
            "has 'step' (1.0 of torch.float32), and that of 2.bias 'step' (2.0 of torch",
        ),
        (lambda state: state.clear(), "and that of 2.bias no 'exp_avg', no 'exp_avg_sq', no 'step';"),
        (
            lambda state: state.pop("exp_avg"),
            "has 'exp_avg' (elements of torch.float32), and that of 2.bias no 'exp_avg';",
        ),
        (lambda state: state.update(step=1.0), "has 'step' (1.0 of torch.float32), and that of 2.bias 'step' (1.0);"),
        (lambda state: state.update(exp_avg=None), "(elements of torch.float32), and that of 2.bias 'exp_avg' (None)"),
        (lambda state: state.update(exp_avg=torch.tensor(0.5)), "and that of 2.bias 'exp_avg' (0.5 of torch.float32)"),
        (
            lambda state: state.update(exp_avg=state["exp_avg"].double()),
            "(elements of torch.float32), and that of 2.bias 'exp_avg' (elements of torch.float64)",
        ),
    ],
)
def test_parameters_of_one_flat_parameter_in_different_states(change: Callable[[Any], Any], found: str) -> None:
    model = layers()
    optimizer = later(model, change)
    with refused(optimizer, found, REMEDY):
        alone(model).reshard_optimizer(optimizer)


def test_the_remedy_keeps_parameters_apart() -> None:
    model = layers()
    optimizer = later(model, lambda state: state["step"].add_(1))
    wrapped = alone(model, use_orig_params=True)
    wrapped.reshard_optimizer(optimizer)
    assert [float(optimizer.state[param]["step"]) for param in wrapped.params] == [1, 1, 1, 2]


def test_an_error_in_the_last_unit_leaves_the_first_alone() -> None:
    model = layers()
    optimizer = later(model, lambda state: state["step"].add_(1))
    wrapped = nest(model)
    with refused(optimizer, "state of 2.weight has 'step' (1.0 of torch.float32), and that of 2.bias 'step' (2.0 of"):
        wrapped.reshard_optimizer(optimizer)


# State that cannot be cut


class Quantized(Tensor):
    """A tensor that is not what it looks like."""

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (torch.zeros(2, 1), "has shape (2, 1), and the parameter (2, 3): only tensors of"),
        (torch.zeros(6), "has shape (6,), and the parameter (2, 3): only tensors of"),
        ([torch.zeros(2, 3)], "is a list: only plain tensors and numbers"),
        (torch.zeros(2, 3).as_subclass(Quantized), "is a Quantized: only plain tensors and numbers"),
    ],
)
@every_form
def test_state_of_another_shape_or_kind(options: dict[str, Any], state: Any, found: str) -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    optimizer.state[model[2].weight]["extra"] = state
    wrapped = nest(model, **options)
    expected = f"this AdamW cannot be resharded: the optimizer's state 'extra' of 2.weight {found}"
    with refused(optimizer, expected, ANEW):
        wrapped.reshard_optimizer(optimizer)


def test_no_room_for_the_state(tmp_path: Path) -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    wrapped = nest(model, offload="disk", offload_folder=tmp_path)
    allocate, made = MappedFiles.allocate, []

    def allocate_three(*args: Any) -> Any:
        made.append(args)
        if len(made) == 4:
            raise RuntimeError("cannot make a file")
        return allocate(*args)

    with mock.patch.object(MappedFiles, "allocate", allocate_three), refused(optimizer, error=RuntimeError):
        wrapped.reshard_optimizer(optimizer)
    wrapped.reshard_optimizer(optimizer)
    assert len(optimizer.state) == 2


# Parameters of others


STRANGER = "parameters of another wrapped model, or of units around this one"


@every_form
def test_parameters_of_another_wrapped_model(options: dict[str, Any]) -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    other = alone(model, **options)
    with refused(optimizer, STRANGER, "0.weight of Sequential", "separate optimizers"):
        alone(layers(), **options).reshard_optimizer(optimizer)
    other.reshard_optimizer(optimizer)
    with refused(optimizer, STRANGER, "the shard with 0.weight"):
        alone(layers(), **options).reshard_optimizer(optimizer)


def test_an_inner_wrapper_does_not_have_them_all() -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    wrapped = nest(model)
    inner = model[2]
    assert isinstance(inner, FullyShardedDataParallel)
    with refused(optimizer, STRANGER, "0.weight of Sequential", "of the outermost FullyShardedDataParallel"):
        inner.reshard_optimizer(optimizer)
    wrapped.reshard_optimizer(optimizer)


def test_a_model_that_is_gone() -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    alone(model)
    del model
    with refused(optimizer, STRANGER, "0.weight of Sequential"):
        alone(layers()).reshard_optimizer(optimizer)


def test_parameters_that_a_flatten_params_wrapper_took() -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    FlattenParamsWrapper(model)
    with refused(optimizer, STRANGER):
        alone(layers()).reshard_optimizer(optimizer)


@every_form
def test_summoned_copies(options: dict[str, Any]) -> None:
    wrapped = alone(layers(), **options)
    with wrapped.summon_full_params():
        optimizer = adamw(wrapped)
    with refused(optimizer, "created inside summon_full_params()", "a summoned copy of 0.weight", ANEW):
        wrapped.reshard_optimizer(optimizer)


@pytest.mark.parametrize("options", [FLAT, ORIGINAL], ids=["flat", "original"])
def test_what_stands_for_a_parameter_beside_the_parameter(options: dict[str, Any]) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = alone(model, **options)
    optimizer.add_param_group({"params": list(wrapped.parameters())})
    with refused(optimizer, "it holds 0.weight both as it was before wrapping and as it is now"):
        wrapped.reshard_optimizer(optimizer)


# The rest


def test_something_that_is_no_optimizer() -> None:
    model = layers()
    scheduler = torch.optim.lr_scheduler.ConstantLR(adamw(model))
    with pytest.raises(TypeError, match=re.escape("takes a torch.optim.Optimizer, got a ConstantLR")):
        alone(model).reshard_optimizer(scheduler)  # type: ignore[arg-type]


def test_in_the_middle_of_a_forward() -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    wrapped = alone(model)
    model[1].register_forward_hook(lambda *_: wrapped.reshard_optimizer(optimizer))
    with refused(optimizer, "cannot hand over an optimizer in the middle of a forward", error=RuntimeError):
        wrapped(torch.ones(2, 5))


@every_form
@on_ranks(2)
def test_a_step_without_handing_over_says_how(options: dict[str, Any]) -> None:
    model = layers()
    optimizer = stepped(model, adamw(model))
    wrapped = fully_sharded(**options)(model)
    wrapped(torch.ones(2, 5)).sum().backward()
    with refused(optimizer, "or pass it to reshard_optimizer", "0.weight", error=RuntimeError):
        optimizer.step()
    wrapped.reshard_optimizer(optimizer)  # type: ignore[operator]
    optimizer.step()
