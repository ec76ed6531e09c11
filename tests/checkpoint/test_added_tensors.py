"""Tensors that a module adds to its state dict by itself are in checkpoints, as those of bitsandbytes' layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.checkpoint.manifest import read_ours
from fsdp.weights import ModelSink
from tests.helpers.forms import FORMS, full_state, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool


class Scaled(nn.Linear):
    """Keeps a scale beside its weight, which only its state dict has; `is_copied`, the state dict has a copy."""

    def __init__(self, scale: float = 1.0, is_copied: bool = True) -> None:
        super().__init__(3, 3)
        self.register_buffer("shift", torch.tensor(scale), persistent=False)
        self.scale, self._is_copied = torch.tensor([scale, -scale, float("nan")]), is_copied

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale[0]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale.clone() if self._is_copied else self.scale
        destination[f"{prefix}shift"] = self.shift

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if self._is_copied:
            self.scale = state_dict.pop(f"{prefix}weight.scale")
            self.shift = state_dict.pop(f"{prefix}shift")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _model(scale: float, is_copied: bool = True) -> nn.Module:
    torch.manual_seed(int(scale))
    return nn.Sequential(nn.Linear(3, 3), Scaled(scale, is_copied))


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = full_state(one), full_state(other)
    assert any(name.endswith("1.weight.scale") for name in first)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def _names(folder: Path) -> Iterable[str]:
    return read_ours(folder, with_optimizer=False).model.tensors


def _save(folder: Path, form: str, is_copied: bool) -> None:
    fsdp.save(folder, sharded(_model(5.0, is_copied), form, (Scaled,)))


def _load(folder: Path, form: str, is_copied: bool) -> None:
    model = sharded(_model(2.0, is_copied), form, (Scaled,))
    fsdp.load(folder, model)
    _assert_same(model, _model(5.0))
    other = sharded(_model(3.0, is_copied), form, (Scaled,))
    fsdp.load_safetensors(other, folder)
    sent = sharded(_model(7.0, is_copied), form, (Scaled,))
    fsdp.stream_weights(sent, ModelSink(other), bucket_bytes=64, buffers=True)
    _assert_same(other, _model(7.0))


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_they_are_saved_loaded_and_streamed(ranks: RankPool, tmp_path: Path, form: str, is_copied: bool) -> None:
    ranks(2).run(_save, tmp_path / "run", form, is_copied)
    ranks(3).run(_load, tmp_path / "run", form, is_copied)
    plain = _model(1.0)
    fsdp.load(tmp_path / "run", plain)
    _assert_same(plain, _model(5.0))
    assert set(_names(tmp_path / "run")) == set(plain.state_dict())


def test_checkpoints_without_them_load_if_that_is_asked_for(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model = _model(5.0)
    with pytest.raises(RuntimeError, match=r"missing: .*1\.weight\.scale"):
        fsdp.load(tmp_path / "run", model)
    found = fsdp.load(tmp_path / "run", model, strict=False)
    assert set(found.missing_keys) == {"1.weight.scale", "1.shift"}


class Sharing(nn.Module):
    """Its state dict has a buffer of another module, under names of its own."""

    def __init__(self, other: nn.BatchNorm1d) -> None:
        super().__init__()
        self._others = [other]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}mean"] = destination[f"{prefix}average"] = self._others[0].running_mean


def _with_shared(mean: float, is_first: bool) -> nn.Module:
    norm = nn.BatchNorm1d(2)
    nn.init.constant_(norm.get_buffer("running_mean"), mean)
    return nn.Sequential(*([norm, Sharing(norm)] if is_first else [Sharing(norm), norm]))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_buffer_that_another_module_adds_is_written_once_under_its_first_name(tmp_path: Path, is_first: bool) -> None:
    fsdp.save(tmp_path / "run", _with_shared(1.0, is_first))
    names = set(_with_shared(1.0, is_first).state_dict())
    others = {"1.mean", "1.average"} if is_first else {"0.average", "1.running_mean"}
    assert set(_names(tmp_path / "run")) == names - others
    restored = _with_shared(2.0, is_first)
    fsdp.load(tmp_path / "run", restored)
    assert torch.equal(restored.get_buffer(f"{0 if is_first else 1}.running_mean"), torch.ones(2))


class Failing(nn.Linear):
    def _save_to_state_dict(self, *args: Any) -> None:
        raise ZeroDivisionError("of the user")


def test_a_method_that_fails_on_a_plain_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of the user"):
        fsdp.save(tmp_path / "run", Failing(2, 2))


class Forgetting(Scaled):
    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Linear._load_from_state_dict(self, *args)  # type: ignore[attr-defined]


def test_a_module_that_does_not_take_its_value_back_is_named(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nn.Sequential(Forgetting(5.0)))
    fsdp.load(tmp_path / "run", nn.Sequential(Forgetting(5.0)))
    with pytest.raises(RuntimeError, match=r"0\.weight\.scale: Forgetting\._save_to_state_dict adds it, but"):
        fsdp.load(tmp_path / "run", nn.Sequential(Forgetting(2.0)))


class Special(nn.Linear):
    """Saves its weight under a former name as well, what is no tensor, and what it computes from its weight."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kind"] = "int4"
        destination[f"{prefix}gamma"] = self.weight
        destination[f"{prefix}sum"] = self.weight.detach().sum()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1)
def test_what_cannot_be_saved_is_a_warning(tmp_path: Path, form: str) -> None:
    plain = Special(2, 2)
    with pytest.warns(UserWarning, match=r"Special\._save_to_state_dict of '' adds kind, which are not tensors"):
        fsdp.save(tmp_path / "run", plain)
    assert set(_names(tmp_path / "run")) == {"weight", "bias", "sum"}
    with pytest.warns(UserWarning, match="of '0' fails without sharded parameters, so the entries that it adds"):
        fsdp.save(tmp_path / "run", sharded(nn.Sequential(Special(2, 2)), form))
    assert set(_names(tmp_path / "run")) == {"0.weight", "0.bias"}
