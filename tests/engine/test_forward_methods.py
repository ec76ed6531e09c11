"""`register_fsdp_forward_method`: methods besides forward that compute with a unit's parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import TrainingState, register_fsdp_forward_method
from tests.helpers.models import Wrap, keep
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.twins import Twins

KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "kept": {"reshard_after_forward": False},
    "orig": {"use_orig_params": True},
    "unflattened": {"flatten_parameters": False},
}


class Coder(nn.Module):
    """Encodes and decodes by methods; its forward is both."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)

    def encode(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.down(inputs))

    def decode(self, code: Tensor) -> Tensor:
        return code @ self.up.weight.T + self.up.bias

    def nothing(self, inputs: Tensor) -> None:
        inputs.add_(self.down.bias.sum())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decode(self.encode(inputs))


class Model(nn.Module):
    """Calls its coder by the methods only."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.coder = wrap(Coder())
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.coder.decode(self.coder.encode(inputs)))


def model(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    made = wrap(Model(wrap))
    if wrap is not keep:
        for method in ("encode", "decode"):
            register_fsdp_forward_method(made.get_submodule("_fsdp_wrapped_module._fpw_module.coder"), method)
    return made


@parametrize_pairs(kind=list(KINDS), world_size=[1, 2])
def test_pain_point_13_training_through_methods_equals_the_plain_model(
    ranks: RankPool, world_size: int, kind: str
) -> None:
    ranks(world_size).run(_train_through_methods, KINDS[kind])


def _train_through_methods(options: dict[str, Any]) -> None:
    twins = Twins.of(model, **options)
    for number in range(2):
        twins.step(number, _step)
    twins.assert_close()


def _step(module: nn.Module, inputs: Tensor) -> None:
    module(torch.cat([inputs, inputs], dim=1)[:, :6]).square().mean().backward()


def test_without_it_the_error_names_the_weight(ranks: RankPool) -> None:
    ranks(2).run(_encode_unregistered)


def _encode_unregistered() -> None:
    coder: Any = fully_sharded()(Coder())
    with pytest.raises(RuntimeError, match=r"down\.weight is sharded.*Call the sharded module"):
        coder.encode(torch.ones(1, 6))
    register_fsdp_forward_method(coder, "encode")
    assert coder.encode(torch.ones(1, 6)).shape == (1, 3)


def test_the_modules_own_forward_calls_it_as_an_ordinary_method(ranks: RankPool) -> None:
    ranks(2).run(_call_inside_forward)


def _call_inside_forward() -> None:
    torch.manual_seed(0)
    plain = Coder()
    coder: Any = fully_sharded()(copy.deepcopy(plain))
    register_fsdp_forward_method(coder, "encode")
    register_fsdp_forward_method(coder, "decode")
    inputs = torch.ones(2, 6)
    assert torch.equal(coder(inputs), plain(inputs))
    coder(inputs).sum().backward()
    assert coder.training_state is TrainingState.IDLE


def test_memory_is_given_back_whatever_the_method_does(ranks: RankPool) -> None:
    ranks(2).run(_fail_in_a_method)


@torch.no_grad()
def _fail_in_a_method() -> None:
    coder: Any = fully_sharded()(Coder())
    register_fsdp_forward_method(coder, "encode")
    register_fsdp_forward_method(coder, "nothing")
    (handle,) = coder._unit.handles
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        coder.encode(torch.ones(1, 5))
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    assert coder.nothing(torch.ones(1, 6)) is None
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    assert coder.training_state is TrainingState.IDLE


def test_what_cannot_be_registered() -> None:
    coder = fully_sharded(process_group=Alone())(Coder())
    unsharded = nn.Linear(2, 2)
    register_fsdp_forward_method(unsharded, "forward")  # does nothing, so that programs may be run without sharding
    assert "forward" not in vars(unsharded)
    with pytest.raises(ValueError, match="Coder has no method 'sample'"):
        register_fsdp_forward_method(coder, "sample")
