"""Files of `torch.save`: which part is the model, which the optimizer, and what cannot be known."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.checkpoint.formats.open_source import open_source
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.json_values import decoded
from tests.helpers.convert_formats import command, converted, in_groups, kinds, stepped, trained, whole
from tests.helpers.equality import assert_same
from tests.helpers.models import nested_mlp


def stored(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "all.pt")
    return folder / "all.pt"


def opened(folder: Path, content: Any, **choices: Any) -> Source:
    return open_source(stored(folder, content), choices=Choices(**choices))


def assert_is_model(source: Source, model: nn.Module) -> None:
    with closing(source):
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        assert set(source.model.tensors) == set(state)
        for name, value in state.items():
            assert_same(whole(source.model, name), value, name)


# The model


@pytest.mark.parametrize("key", [None, "model", "module"])
def test_the_model_is_found_under_usual_keys(tmp_path: Path, key: str | None) -> None:
    model = kinds()
    source = opened(tmp_path, model.state_dict() if key is None else {key: model.state_dict(), "epoch": 3})
    assert_is_model(source, model)
    assert source.format == "torch"
    assert decoded(source.extra["_extra_state"]) == {"note": ("seen", 3)}
    assert decoded(source.values) == (None if key is None else {"epoch": 3})


def test_a_model_under_an_unusual_key_is_named(tmp_path: Path) -> None:
    content = {"run.1": {"weights of it": nested_mlp().state_dict()}, "other": {"x": 3}}
    with pytest.raises(ValueError, match=r"no model under a usual key \('run\.1', 'other'\): .* \(--model-key\)"):
        opened(tmp_path, content)
    assert_is_model(opened(tmp_path, content, model_key="run.1.weights of it"), nested_mlp())


def test_a_key_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no 'net' \(--model-key\): there are 'model'"):
        opened(tmp_path, {"model": nested_mlp().state_dict()}, model_key="net")


def test_what_wrappers_add_to_names_is_left_out_and_noted(tmp_path: Path) -> None:
    model = nested_mlp()
    state = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    source = opened(tmp_path, {"model": state})
    assert_is_model(source, model)
    assert any("parts of names that wrappers add were removed" in note for note in source.notes)


def test_what_is_no_plain_value_is_left_out_and_noted(tmp_path: Path) -> None:
    big = torch.zeros(1 << 19)
    content = {"model": nested_mlp().state_dict(), "place": Path("here"), "ema": {"x": big}, "step": 4}
    source = opened(tmp_path, content)
    assert decoded(source.values) == {"step": 4}
    assert any(f"left out: place is a {PosixPath.__module__}.PosixPath" in note for note in source.notes), source.notes
    assert any("left out: ema, with tensors that are not the model's" in note for note in source.notes), source.notes


def test_settings_of_a_program_are_a_dictionary(tmp_path: Path) -> None:
    settings = argparse.Namespace(lr=[0.1], data=argparse.Namespace(path="x"))
    source = opened(tmp_path, {"model": nested_mlp().state_dict(), "args": settings})
    assert decoded(source.values) == {"args": {"lr": [0.1], "data": {"path": "x"}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "contains a list, but a checkpoint is a dictionary"),
        ({"epoch": 3}, r"has no model under a usual key \(no dictionaries\)"),
        ({"model": argparse.Namespace()}, "has no model under a usual key"),
    ],
)
def test_files_without_a_model_are_errors(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, content)


# The optimizer


def full(key: str, change: Callable[[Any], Any] = lambda state: state) -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), key: change(optimizer.state_dict())}


def named(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """By names, as `get_optimizer_state_dict` and FSDP1 have it."""
    listed = order_of(model)
    return {
        "state": {listed[number]: each for number, each in state["state"].items()},
        "param_groups": [
            {**group, "params": [listed[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def order_of(model: nn.Module) -> list[str]:
    """The names in the order that `in_groups` gives parameters to the optimizer."""
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for group in in_groups(model).param_groups for param in group["params"]]


def assert_is_optimizer(folder: Path, *options: str) -> None:
    """The file has that of `trained`, which goes on from it."""
    model = kinds(seed=1)
    optimizer = in_groups(model)
    fsdp.load(converted(folder / "all.pt", folder / "ours", *options), model, optimizer)
    expected, other = trained()
    stepped(model, optimizer)
    stepped(expected, other)
    for name, value in expected.named_parameters():
        assert_same(dict(model.named_parameters())[name], value, name)


def test_an_optimizer_by_names_is_found_under_usual_keys(tmp_path: Path) -> None:
    stored(tmp_path, full("optimizer_state_dict", lambda state: named(kinds(), state)))
    assert_is_optimizer(tmp_path)


def test_an_optimizer_elsewhere_is_named(tmp_path: Path) -> None:
    stored(tmp_path, {**full("x"), "x": {"first": full("optimizer", lambda each: named(kinds(), each))["optimizer"]}})
    with closing(open_source(tmp_path / "all.pt")) as source:
        assert source.optimizer is None
    assert_is_optimizer(tmp_path, "--optimizer-key", "x.first")


def test_an_optimizer_by_numbers_needs_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, full("optimizer"))
    said = command(capsys, "convert", tmp_path / "all.pt", tmp_path / "ours")
    assert said.code == 1
    assert "parameters have numbers, but their names are unknown" in said.err
    assert "--param-order" in said.err
    assert not (tmp_path / "ours").exists()
    (tmp_path / "order").write_text("\n".join(order_of(kinds())))
    assert_is_optimizer(tmp_path, "--param-order", str(tmp_path / "order"))


def test_an_order_of_another_length_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the optimizer has 8 parameters, but 2 names were given"):
        opened(tmp_path, full("optimizer"), param_order=["thin", "scale"])


def test_names_in_the_groups_are_enough(tmp_path: Path) -> None:
    def with_names(state: dict[str, Any]) -> dict[str, Any]:
        order = order_of(kinds())
        for group in state["param_groups"]:
            group["param_names"] = [order[number] for number in group["params"]]
        return state

    stored(tmp_path, full("optimizer", with_names))
    assert_is_optimizer(tmp_path)


def test_state_of_other_shapes_is_refused_by_optimizers_of_elements_alone(tmp_path: Path) -> None:
    content = full("optimizer", lambda state: named(kinds(), state))
    content["optimizer"]["state"]["wide.weight"]["row"] = torch.ones(7)
    stored(tmp_path, content)
    model = kinds()
    with pytest.raises(RuntimeError, match=r"'row' of wide.weight has shape \(7,\), and the parameter \(7, 5\)"):
        fsdp.load(converted(tmp_path / "all.pt", tmp_path / "ours"), model, in_groups(model))
    assert_is_model(opened(tmp_path, content, only="model"), trained()[0])


def test_state_of_other_parameters_is_an_error(tmp_path: Path) -> None:
    content = full("optimizer", lambda state: named(kinds(), state))
    content["optimizer"]["param_groups"][0]["params"].append("head.weight")
    with pytest.raises(ValueError, match=r"the optimizer has head\.weight, but the model does not"):
        opened(tmp_path, content)


def test_fairscales_numbers_need_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"by FairScale's numbers.*rekey_optim_state_dict"):
        opened(tmp_path, full("optimizer", lambda state: {**state, "param_id_map": {0: 0}}))


# Which format


def test_a_folder_of_several_checkpoints_names_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        fsdp.save(tmp_path, nested_mlp(), step=step)
    with pytest.raises(ValueError, match=r"is a folder of several checkpoints: pass one.*step-00000002"):
        open_source(tmp_path)


def test_what_a_killed_save_has_left_is_no_checkpoint(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp())
    (tmp_path / "run" / "checkpoint.json").rename(tmp_path / "run" / "not-a-checkpoint")
    with pytest.raises(ValueError, match="is not a complete checkpoint of a supported format"):
        open_source(tmp_path / "run")
