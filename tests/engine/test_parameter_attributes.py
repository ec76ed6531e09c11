"""What users set on parameters is there on whatever stands for them: in forward, for optimizers, in copies."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FlattenParamsWrapper, FullyShardedDataParallel, fully_shard
from fsdp.compat.fairscale import DummyProcessGroup
from fsdp.engine.flat_param import FlatParameter
from tests.helpers.copied_twins import through_pickle
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded

KINDS = [{}, {"flatten_parameters": False}, {"use_orig_params": True}, {"mixed_precision": True}]


class Marked(nn.Module):
    """Has parameters with attributes, and notes those that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.zeros(3))
        self.weight.expert, self.weight.name_of_group = True, "experts"  # type: ignore[attr-defined]
        self.bias._linked_param, self.bias.no_decay = self.weight, True  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = marks(self)
        return nn.functional.linear(inputs, self.weight, self.bias)


def marks(module: Any) -> tuple[Any, ...]:
    weight, bias = module.weight, module.bias
    return weight.expert, weight.name_of_group, bias.no_decay, bias._linked_param is not None, hasattr(bias, "expert")


SET = (True, "experts", True, True, False)


@pytest.mark.parametrize("options", KINDS, ids=str)
@on_ranks(2)
def test_modules_and_optimizers_see_what_was_set(options: dict[str, Any]) -> None:
    options = {**options, **({"compute_dtype": torch.bfloat16} if options.get("mixed_precision") else {})}
    model = fully_sharded(**options)(Marked())
    for _ in range(2):
        _check(model, options)
        state = model.state_dict()
        model.load_state_dict(state)
        model.load_local_state_dict(model.local_state_dict())
    copied = copy.deepcopy(model)
    _check(copied, options)
    _check(through_pickle(model), options)
    _check(model.to(torch.float64) if not options.get("mixed_precision") else model, options)


def _check(model: Any, options: dict[str, Any]) -> None:
    module = model.module.module
    module.seen = None
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert module.seen == SET
    with model.summon_full_params():
        assert marks(module) == SET
    if not options.get("flatten_parameters", True) or options.get("use_orig_params"):
        listed = dict(model.named_parameters())
        assert listed["weight"].expert
        assert listed["bias"].no_decay
        listed["weight"].added = "later"
        assert copy.deepcopy(listed["weight"]).added == "later"


@on_ranks(2)
def test_rows_and_flattened_parameters_keep_what_was_set() -> None:
    model: Any = fully_shard(Marked(), mesh=init_device_mesh("cpu", (2,)))
    for one in (model, copy.deepcopy(model)):
        assert marks(one) == SET
        one(torch.ones(2, 4)).sum().backward()
        assert one.seen == SET


def test_a_flat_parameter_keeps_what_was_set_on_its_parts_in_copies_and_files() -> None:
    wrapper: Any = FlattenParamsWrapper(Marked())
    for one in (wrapper, copy.deepcopy(wrapper)):
        one(torch.ones(2, 4))
        assert one.module.seen == SET
        with one.unflatten_params():
            assert marks(one.module) == SET
    module = Marked()
    del module.bias._linked_param  # a parameter in a file of weights only would be read, too
    flat = FlattenParamsWrapper(module).flat_param
    flat.note = "a flat one"
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    read = torch.load(file)
    assert read.note == "a flat one"
    assert [view.__dict__ for view in read.get_param_views()] == [
        {"expert": True, "name_of_group": "experts"},
        {"no_decay": True},
    ]


class Linked(nn.Module):
    """Computes with a parameter that is an attribute of another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(1))
        self.scale.linked = self.weight  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.scale.linked * self.scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [*KINDS[:3], {"fully_shard": True}], ids=str)
@on_ranks(2)
def test_a_parameter_in_an_attribute_of_another_is_named_in_a_warning(options: dict[str, Any]) -> None:
    if options.get("fully_shard"):
        model: Any = fully_shard(Linked(), mesh=init_device_mesh("cpu", (2,)))
    else:
        model = fully_sharded(**options)(Linked())
    with torch.no_grad(), pytest.warns(UserWarning, match="scale holds the original parameter weight"):
        model(torch.ones(2, 4))


def test_names_that_stand_for_something_else_are_not_overwritten() -> None:
    module = nn.Linear(3, 2)
    module.weight.group, module.weight.owner = "mine", "me"  # type: ignore[attr-defined]
    module.weight.grad_fn_of_mine = None  # type: ignore[attr-defined]
    model: Any = FullyShardedDataParallel(module, DummyProcessGroup(rank=0, size=1), use_orig_params=True)
    model(torch.ones(1, 3)).sum().backward()
    piece = dict(model.named_parameters())["weight"]
    assert piece.group is None
    assert isinstance(piece.owner, FlatParameter)  # type: ignore[attr-defined]
    with model.summon_full_params():
        assert module.weight.group == "mine"  # type: ignore[attr-defined]
