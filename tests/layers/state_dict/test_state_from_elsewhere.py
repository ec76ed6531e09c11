"""States of something else than the sharded model that they are loaded into: they load, or it is said how."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard, optim_utils
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

FORMS: dict[str, dict[str, Any] | None] = {
    "flat": {},
    "original": {"use_orig_params": True},
    "unflattened": {"flatten_parameters": False},
    "fully_shard": None,
}
every_form = pytest.mark.parametrize("form", FORMS)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))


def sharded(form: str) -> Any:
    model, options = plain(), FORMS[form]
    if options is None:
        fully_shard(model[0])
        return fully_shard(model)
    model[0] = FullyShardedDataParallel(model[0], **options)
    return FullyShardedDataParallel(model, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()


def assert_same_function(model: nn.Module, expected: nn.Module) -> None:
    inputs = torch.arange(10.0).reshape(2, 5)
    torch.testing.assert_close(model(inputs), expected(inputs))


# Names with something in front, as DistributedDataParallel and torch.compile save them


@pytest.mark.parametrize("form", ["flat", "original", "unflattened"])
@on_ranks(2)
def test_torchs_set_model_state_dict_loads_or_names_what_does(form: str) -> None:
    model, expected = sharded(form), {name: value + 1 for name, value in plain().state_dict().items()}
    if form == "flat":
        with pytest.raises(RuntimeError, match=r"'.*flat_param_0' is this rank's shard.*model.load_state_dict\("):
            set_model_state_dict(model, dict(expected), options=StateDictOptions(full_state_dict=True))
    else:
        set_model_state_dict(model, dict(expected), options=StateDictOptions(full_state_dict=True))
        torch.testing.assert_close(model.state_dict(), OrderedDict(expected))
        model.load_state_dict(plain().state_dict())
    on_first = dict(expected) if dist.get_rank() == 0 else {}
    with pytest.raises(
        RuntimeError, match=r"is empty on this rank.*model.load_state_dict\(state_dict, rank0_only=True"
    ):
        set_model_state_dict(
            model, dict(on_first), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
    assert_same_function(model, plain())  # nothing was loaded
    model.load_state_dict(on_first, rank0_only=True)
    torch.testing.assert_close(model.state_dict(), OrderedDict(expected))
    model.load_state_dict(plain().state_dict())
    set_model_state_dict(model, dict(expected))
    torch.testing.assert_close(model.state_dict(), OrderedDict(expected))


@on_ranks(2)
def test_an_empty_state_dict_under_fully_shard_names_no_argument_of_the_wrapper() -> None:
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        sharded("fully_shard").load_state_dict({})
    assert "rank0_only" not in str(caught.value)


@every_form
@on_ranks(2)
def test_a_state_dict_of_a_wrapped_model_says_how_it_is_loaded(form: str) -> None:
    model, other = sharded(form), plain()
    with torch.no_grad():
        other[0].weight.fill_(0.5)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        state = {prefix + name: value for name, value in other.state_dict().items()}
        with pytest.raises(RuntimeError, match=rf"every key begins with '{prefix}'.*removeprefix\('{prefix}'\)"):
            model.load_state_dict(state)
        assert set(model.load_state_dict(state, strict=False).unexpected_keys) == set(state)
    assert_same_function(model, plain())  # nothing was loaded
    model.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()})
    assert_same_function(model, other)
    # What is not in front of every key, and another model's names, are torch's to report.
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"module.0.weight": other[0].weight, "0.bias": other[0].bias})
    assert "every key" not in str(caught.value)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"encoder.weight": other[0].weight})
    assert "every key" not in str(caught.value)


@every_form
@on_ranks(2)
def test_a_state_dict_with_path_parts_of_wrappers_says_how_it_is_loaded(form: str) -> None:
    model, other = sharded(form), plain()
    with torch.no_grad():
        other[0].weight.fill_(0.5)
    state = {
        f"_fsdp_wrapped_module.{name}".replace("2.", "2._fsdp_wrapped_module."): value
        for name, value in other.state_dict().items()
    }
    said = r"keys such as '_fsdp_wrapped_module.0.weight'.*key\.replace\('_fsdp_wrapped_module.', ''\): value"
    with pytest.raises(RuntimeError, match=said):
        model.load_state_dict(state)
    model.load_state_dict({key.replace("_fsdp_wrapped_module.", ""): value for key, value in state.items()})
    assert_same_function(model, other)


@on_ranks(2)
def test_files_of_a_wrapped_model_say_how_they_are_loaded(tmp_path: Path) -> None:
    model, other = sharded("flat"), nn.ModuleDict({"module": plain()})
    with torch.no_grad():
        other["module"][0].weight.fill_(0.5)
    if dist.get_rank() == 0:
        save_file(other.state_dict(), tmp_path / "model.safetensors")
    dist.barrier()
    fsdp.save(tmp_path / "saved", other, torch.optim.Adam(other.parameters()))
    said = r"every key begins with 'module\.'.*torch\.nn\.ModuleDict\(\{'module': model\}\)"
    with pytest.raises(RuntimeError, match=said):
        fsdp.load_safetensors(model, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=said):
        fsdp.load(tmp_path / "saved", model)
    assert_same_function(model, plain())
    holder = nn.ModuleDict({"module": model})
    fsdp.load(tmp_path / "saved", holder, torch.optim.Adam(model.parameters()))
    assert_same_function(model, other["module"])


# Optimizers


@parametrize_pairs(form=list(FORMS), make=[torch.optim.Adam, torch.optim.SGD])
@on_ranks(2)
def test_the_state_of_a_plain_optimizer_is_refused_where_it_is_loaded(form: str, make: Any) -> None:
    other = plain()
    options: dict[str, Any] = {"lr": 0.1} if make is torch.optim.Adam else {"lr": 0.1, "momentum": 0.9}
    other_optimizer = make(other.parameters(), **options)
    step(other, other_optimizer)
    model = sharded(form)
    model.load_state_dict(other.state_dict())
    optimizer = make(model.parameters(), **options)
    said = "set_optimizer_state_dict" if form == "fully_shard" else r"fsdp\.optim_utils\.load_full_optim_state_dict"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(other_optimizer.state_dict())
    assert not optimizer.state
    # As it says.
    saved = copy.deepcopy(other_optimizer.state_dict())
    named = optim_utils.rekey_optim_state_dict(saved, other, "names", other_optimizer)
    if form == "fully_shard":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))
    else:
        optim_utils.load_full_optim_state_dict(model, optimizer, named)
    step(model, optimizer)
    step(other, other_optimizer)
    assert_same_function(model, other)
    again = make(model.parameters(), **options)
    again.load_state_dict(optimizer.state_dict())  # this rank's own
    step(model, again)
    step(other, other_optimizer)
    assert_same_function(model, other)


@on_ranks(1)
def test_plain_models_and_lone_ranks_load_what_they_like() -> None:
    other = plain()
    other_optimizer = torch.optim.Adam(other.parameters())
    step(other, other_optimizer)
    for model in (plain(), sharded("flat"), sharded("unflattened"), sharded("original")):
        optimizer = torch.optim.Adam(model.parameters())
        if len(optimizer.param_groups[0]["params"]) != 3:
            with pytest.raises(ValueError, match="doesn't match the size"):
                optimizer.load_state_dict(other_optimizer.state_dict())
        else:
            optimizer.load_state_dict(other_optimizer.state_dict())


# After a cast


@parametrize_pairs(form=list(FORMS), make=[torch.optim.Adam, torch.optim.AdamW])
@on_ranks(2)
def test_an_optimizer_with_state_from_before_a_cast_names_the_parameter(form: str, make: Any) -> None:
    model = sharded(form)
    optimizer = make(model.parameters())
    step(model, optimizer)
    optimizer.zero_grad()
    model.half()
    loss = model(torch.ones(2, 5, dtype=torch.float16)).square().mean()
    loss.backward()
    said = (
        r"state 'exp_avg' of .*weight.* is torch\.float32, but the parameter is torch\.float16.*Create a new optimizer"
    )
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    make(model.parameters(), eps=1e-3).step()
    assert bool(torch.isfinite(model(torch.ones(2, 5, dtype=torch.float16))).all())


# Steps


def test_what_is_loaded_says_of_which_step_it_is(tmp_path: Path) -> None:
    model = plain()
    assert fsdp.load(fsdp.save(tmp_path / "run", model, step=120).path, model).step == 120
    assert fsdp.load(tmp_path / "run" / "step-00000120", model).step == 120
    (tmp_path / "best").symlink_to(tmp_path / "run" / "step-00000120")
    assert fsdp.load(tmp_path / "best", model).step == 120
    fsdp.save(tmp_path / "run", model, step=123456789)
    newest = fsdp.checkpoint.newest(tmp_path / "run")
    assert newest is not None
    assert fsdp.load(newest, model).step == 123456789
    newest.rename(newest.with_name("step-00000007.saving"))  # as a killed save leaves it
    assert fsdp.load(tmp_path / "run" / "step-00000007", model).step == 7
    assert fsdp.load(fsdp.save(tmp_path / "alone", model).path, model).step is None


@on_ranks(2)
def test_a_weight_that_a_method_reads_names_what_makes_methods_known() -> None:
    model = FullyShardedDataParallel(Coder())
    with pytest.raises(RuntimeError, match=r"sharded.*register_fsdp_forward_method\(model, 'name'\)"):
        model.encode(torch.ones(2, 3))
    fsdp.register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(torch.ones(2, 3)), model(torch.ones(2, 3)))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.encode(inputs)

    def encode(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + self.bias
