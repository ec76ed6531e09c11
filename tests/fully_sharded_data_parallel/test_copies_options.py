"""Copies and what is pickled have all that their originals were wrapped with."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    auto_wrap,
    checkpoint_wrapper,
    enable_wrap,
    module_wrap_policy,
)
from fsdp.layers.verify import describe_handle
from tests.helpers.copied_twins import (
    FLAT,
    ORIGINAL,
    UNFLATTENED,
    Travel,
    assert_goes_on_alike,
    every_travel,
    nested,
    normed,
    recurrent,
    through_pickle,
    tied_and_frozen,
)
from tests.helpers.memory import handles_of
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded, sgd_with_momentum


def checkpointed(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    block = wrap(checkpoint_wrapper(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))))
    return wrap(nn.Sequential(block, nn.Linear(5, 3)))


def auto_wrapped(wrap: Wrap) -> nn.Module:
    assert isinstance(wrap, partial)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)))
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **wrap.keywords):
        return wrap(auto_wrap(layers, module_wrap_policy({nn.Linear})))


class InItsOwnDtype(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self.weight.dtype)).to(inputs.dtype)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))  # 0-d, so it goes with any dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def partly_ignored(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    left, scale = InItsOwnDtype(5, 7), Scaled()
    layers = nn.Sequential(wrap(nn.Linear(5, 5)), left, nn.Linear(7, 3), scale)
    return wrap(layers, ignored_modules=[left], ignored_parameters=[scale.factor])  # type: ignore[call-arg]


def by_kind(name: str, param: nn.Parameter) -> str:
    return "matrices" if param.dim() > 1 else "others"


def grouped(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), group_by=by_kind)  # type: ignore[call-arg]


BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
KEPT = MixedPrecision(param_dtype=torch.bfloat16, full_precision_modules=[nn.BatchNorm1d, nn.LSTM, nn.GRU])
PRECISIONS = {"full": None, "bfloat16": BFLOAT16, "partly kept": KEPT, "by flags": True}


@parametrize_cases(
    at_most=9,
    travel=[copy.deepcopy, through_pickle],
    world_size=[3, 2, 1],
    form=[FLAT, ORIGINAL, UNFLATTENED],
    precision=list(PRECISIONS),
    offload=[{}, {"offload": "cpu"}, {"offload": "disk"}],
    reshard=[{}, {"reshard_after_forward": False}],
    make=[normed, nested, recurrent, tied_and_frozen, checkpointed, auto_wrapped, partly_ignored, grouped],
)
@on_ranks("world_size")
def test_a_copy_goes_on_as_its_original_whatever_the_options(tmp_path: Path, case: Case) -> None:
    folder = {"offload_folder": tmp_path} if case.offload.get("offload") == "disk" else {}
    mixed = {"mixed_precision": PRECISIONS[case.precision]}
    model = case.make(fully_sharded(**case.form, **mixed, **case.offload, **folder, **case.reshard))
    copied = assert_goes_on_alike(model, sgd_with_momentum, case.travel)
    assert repr(copied) == repr(model)
    for handle, other in zip(handles_of(copied), handles_of(model), strict=True):
        assert describe_handle(handle) == describe_handle(other)
        assert type(handle.flat_param) is type(other.flat_param)
        assert handle.flat_param.group == other.flat_param.group


@every_travel
@on_ranks(2)
def test_buffers_come_back_as_they_were_before_wrapping(travel: Travel) -> None:
    """What is computed with is rounded to 16 bits; the copy has the originals besides, as the model has."""
    table = normed().state_dict()["table"]
    assert not torch.equal(table.bfloat16().float(), table)
    copied = travel(normed(fully_sharded(mixed_precision=BFLOAT16)))
    inner = copied.module.module
    assert inner.table.dtype == torch.bfloat16
    assert inner.block[1].running_mean.dtype == torch.float32  # of a batch norm, which is kept
    assert torch.equal(copied.state_dict()["table"], table)
    inner.table.zero_()  # from now on the original is out of date
    assert torch.equal(travel(copied).state_dict()["table"], torch.zeros(7))
    assert torch.equal(copied.state_dict()["table"], torch.zeros(7))
