"""What people from torch's FSDP1 pass and call: taken where it means something here, else it says what to use."""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.layers import foreign_names
from fsdp.layers.foreign_names import ATTRIBUTES, KEYWORDS, METHODS, NAMES, VARIABLES
from tests.helpers.dtensor_twins import seeded
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone


def wrapped(**options: Any) -> Any:
    return FullyShardedDataParallel(nn.Linear(2, 3), Alone(), **options)


def test_cpu_offload_goes_by_what_it_says() -> None:
    assert not wrapped(cpu_offload=CPUOffload(offload_params=False)).cpu_offload
    assert wrapped(cpu_offload=CPUOffload(offload_params=True)).cpu_offload
    with pytest.raises(TypeError, match=r"cpu_offload must be True, False or torch's CPUOffload, got 'cpu'"):
        wrapped(cpu_offload="cpu")


def test_the_third_positional_argument_of_fsdp1_is_told_its_keyword() -> None:
    with pytest.raises(TypeError, match=r"got <ShardingStrategy.*>\. Pass it as sharding_strategy=\.\.\."):
        FullyShardedDataParallel(nn.Linear(2, 3), Alone(), ShardingStrategy.SHARD_GRAD_OP)  # type: ignore[arg-type]


def test_a_mixed_precision_of_torch_is_taken() -> None:
    policy = TorchMixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    ours = wrapped(mixed_precision=policy).mixed_precision
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": torch.bfloat16}
    assert ours == MixedPrecision(**dtypes, full_precision_modules=(nn.modules.batchnorm._BatchNorm,))
    output = wrapped(mixed_precision=policy)(torch.ones(1, 2))
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("name", list(KEYWORDS))
def test_other_arguments_say_what_to_use(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument {name}, which torch's FSDP has") as error:
        wrapped(**{name: BackwardPrefetch.BACKWARD_PRE})
    assert KEYWORDS[name] in str(error.value)


def test_fsdp_shard_says_what_to_use_before_it_asks_for_units() -> None:
    with pytest.raises(TypeError, match=r"no argument auto_wrap_policy, .*call fsdp\.shard\(module, units="):
        fsdp.shard(nn.Linear(2, 3), auto_wrap_policy=None)  # type: ignore[call-arg]


def test_one_error_names_all_arguments_that_only_fsdp1_has() -> None:
    given = {"device_mesh": None, "use_orig_params": True, "limit_all_gathers": True}
    with pytest.raises(
        TypeError, match=r"device_mesh, .* as process_group\. It has no argument limit_all_gathers, .*omit"
    ):
        fsdp.shard(nn.Linear(1, 1), units={nn.Linear}, **given)


def test_writeback_says_what_to_use() -> None:
    summon: Any = FullyShardedDataParallel.summon_full_params  # called on the class, as FSDP1's
    with pytest.raises(TypeError, match=r"no argument writeback, .*volatile=True is writeback=False"):
        summon(wrapped(), writeback=False)


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_say_what_to_use(name: str) -> None:
    for asked in (FullyShardedDataParallel, wrapped()):
        assert not hasattr(asked, name)
        with pytest.raises(
            AttributeError, match=f"FullyShardedDataParallel has no {name}, which torch's FSDP has"
        ) as error:
            getattr(asked, name)
        assert METHODS[name] in str(error.value)


@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_attributes_say_what_to_use(name: str) -> None:
    model = wrapped()
    assert not hasattr(model, name)
    with pytest.raises(
        AttributeError, match=f"FullyShardedDataParallel has no {name}, which torch's FSDP has"
    ) as error:
        getattr(model, name)
    assert ATTRIBUTES[name] in str(error.value)


@pytest.mark.parametrize("name", list(NAMES))
def test_names_of_its_modules_say_what_to_use(name: str) -> None:
    for module in (fsdp, importlib.import_module("fsdp.wrap")):
        assert not hasattr(module, name)
        told = f"{module.__name__} has no {name}, which torch's FSDP1 has: {NAMES[name]}"
        with pytest.raises(AttributeError, match=re.escape(told)):
            getattr(module, name)
        with pytest.raises(ImportError, match=re.escape(told)):
            exec(f"from {module.__name__} import {name}")


def test_the_names_are_those_of_the_installed_torch() -> None:
    from torch.distributed.fsdp import wrap

    theirs = {name for name in torch.distributed.fsdp.__all__ if not hasattr(fsdp, name)}
    theirs |= {name for name in wrap.__all__ if not hasattr(importlib.import_module("fsdp.wrap"), name)}
    assert theirs == set(NAMES)


def test_other_names_are_missing_as_in_any_module() -> None:
    with pytest.raises(ImportError, match=r"cannot import name 'absent' from 'fsdp\.wrap'"):
        exec("from fsdp.wrap import absent")
    with pytest.raises(AttributeError, match=r"module 'fsdp\.wrap' has no attribute 'absent'"):
        importlib.import_module("fsdp.wrap").absent  # noqa: B018


def test_an_attribute_of_the_wrapped_module_is_found_first() -> None:
    module = nn.Linear(2, 3)
    module._handle = 7
    assert FullyShardedDataParallel(module, Alone())._handle == 7


@pytest.mark.parametrize("form", [{}, {"use_orig_params": True}, {"flatten_parameters": False}], ids=str)
@pytest.mark.parametrize("is_inside", [False, True], ids=["outermost", "inside a plain module"])
@on_ranks(2)
def test_torchs_optimizer_state_is_an_error(form: dict[str, Any], is_inside: bool) -> None:
    model: nn.Module = FullyShardedDataParallel(seeded(lambda _: nn.Linear(2, 3)), **form)
    model = nn.Sequential(model) if is_inside else model
    optimizer = torch.optim.AdamW(model.parameters())
    told = r"do not support the shards of (weight|the flat parameter with weight), .*fsdp.save\(path, model"
    with pytest.raises(NotImplementedError, match=told):  # before the first step, which torch's function takes
        get_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(get_model_state_dict(model)) == 2
    with pytest.raises(NotImplementedError, match=told):
        get_state_dict(model, optimizer)
    with pytest.raises(NotImplementedError, match=told):
        set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []})


@on_ranks(2)
def test_torchs_model_state_is_full_without_a_warning_of_modules_without_parameters() -> None:
    plain = seeded(lambda _: nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2))))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = FullyShardedDataParallel(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = get_model_state_dict(model)
    assert_same(state, expected)


@pytest.mark.parametrize("form", [{}, {"use_orig_params": True}], ids=str)
@on_ranks(2)
def test_torchs_optimizer_state_is_an_error_after_a_load_and_before_a_step(form: dict[str, Any]) -> None:
    model = FullyShardedDataParallel(seeded(lambda _: nn.Linear(2, 3)), **form)
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    model(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(NotImplementedError, match="do not support the shards of"):
        get_state_dict(model, optimizers[1])


@on_ranks(2)
def test_torchs_optimizer_state_of_what_every_rank_has_is_right() -> None:
    model = FullyShardedDataParallel(seeded(lambda _: nn.Linear(2, 3)), sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(get_state_dict(model, optimizer)[1]["state"]) == 1


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As in a process that has wrapped nothing yet, without variables."""
    foreign_names._warn_of_variables.cache_clear()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    foreign_names._warn_of_variables.cache_clear()


@pytest.mark.parametrize("name", list(VARIABLES))
def test_an_environment_variable_is_warned_of_once(name: str, new_process: pytest.MonkeyPatch) -> None:
    new_process.setenv(name, "1")
    with pytest.warns(UserWarning, match=f"{name}=1 is for torch's FullyShardedDataParallel") as warned:
        [wrapped() for _ in range(2)]
    assert len(warned) == 1
    assert VARIABLES[name] in str(warned[0].message)
    assert warned[0].filename == __file__


def test_a_variable_that_is_not_set_to_one_says_nothing(new_process: pytest.MonkeyPatch, recwarn: Any) -> None:
    for name in VARIABLES:
        new_process.setenv(name, "0")
    wrapped()
    assert not recwarn.list


def test_the_variables_are_those_of_the_installed_torch() -> None:
    from torch.distributed.fsdp import _flat_param

    theirs = {value for name, value in vars(_flat_param).items() if name.startswith("_FSDP_")}
    assert theirs == set(VARIABLES)
