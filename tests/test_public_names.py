"""The names of the package: as attributes after `import fsdp`, and as modules to import from."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import fsdp

MODULES = ("checkpoint", "optim_utils", "state_dict_utils", "weights")
NAMES = {
    "checkpoint": ("Saver", "load"),
    "optim_utils": ("OwnedOptimizer", "full_optim_state_dict"),
    "state_dict_utils": ("StateDictStager",),
    "weights": ("SocketSink", "receive"),
    "wrap": ("auto_wrap", "enable_wrap"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_an_attribute_and_can_be_imported_from(name: str) -> None:
    module = importlib.import_module(f"fsdp.{name}")
    assert isinstance(module, ModuleType)
    assert getattr(fsdp, name) is module


@pytest.mark.parametrize("name", NAMES)
def test_a_star_import_brings_the_names_of_a_module(name: str) -> None:
    found: dict[str, object] = {}
    exec(f"from fsdp.{name} import *", found)
    assert set(NAMES[name]) <= set(found)


def test_wrap_is_the_function_as_an_attribute_and_the_module_to_import_from() -> None:
    module = importlib.import_module("fsdp.wrap")
    importlib.import_module("fsdp.wrap.batch_norm")
    assert isinstance(module, ModuleType)
    assert fsdp.wrap is module.wrap
    from fsdp.wrap import auto_wrap

    assert auto_wrap is fsdp.auto_wrap


def test_the_options_are_explained_where_the_wrapper_is_made() -> None:
    for text in (fsdp.FullyShardedDataParallel.__init__.__doc__, fsdp.FullyShardedDataParallel.__doc__):
        assert text is not None
    assert "disable_reshard_on_root: " in (fsdp.FullyShardedDataParallel.__init__.__doc__ or "")
