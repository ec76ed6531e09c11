"""`fsdp.compat.fairscale`: what is found below `fairscale`, what is not, and when it is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.compat import fairscale as compat
from fsdp.compat.fairscale import INSTEAD, PROVIDED
from tests.helpers.fairscale_paths import fairscale_installed
from tests.helpers.paths import DATA, ROOT

RECORDED, DOCS = DATA / "fairscale", ROOT / "docs" / "migration.md"


@pytest.fixture
def installed() -> Iterator[None]:
    with fairscale_installed():
        yield


@pytest.mark.usefixtures("installed")
class TestNames:
    @pytest.mark.parametrize("path", list(PROVIDED))
    def test_a_module_has_what_the_table_says(self, path: str) -> None:
        module = importlib.import_module(path)
        for name, value in PROVIDED[path].items():
            assert getattr(module, name) is value
            scope: dict[str, Any] = {}
            exec(f"from {path} import {name}", scope)
            assert scope[name] is value

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("fairscale.nn", "FullyShardedDataParallel"),
            ("fairscale.nn.data_parallel", "TrainingState"),
            ("fairscale.nn.data_parallel", "auto_wrap_bn"),
            ("fairscale.nn.data_parallel", "get_fsdp_instances"),
            ("fairscale.nn.misc.flatten_params_wrapper", "FlatParameter"),
            ("fairscale.optim.grad_scaler", "ShardedGradScaler"),
            ("fairscale.nn.wrap", "enable_wrap"),
            ("fairscale.nn.checkpoint.checkpoint_utils", "patch_batchnorm"),
        ],
    )
    def test_these_are_this_librarys_own(self, path: str, name: str) -> None:
        assert getattr(importlib.import_module(path), name) is getattr(fsdp, name)

    def test_a_name_that_is_also_a_module_is_the_function(self) -> None:
        import fairscale.nn.wrap.auto_wrap

        assert fairscale.nn.wrap is fsdp.wrap
        assert sys.modules["fairscale.nn.wrap"].auto_wrap is fsdp.auto_wrap

    def test_a_star_import_brings_the_names(self) -> None:
        scope: dict[str, Any] = {}
        exec("from fairscale.nn import *", scope)
        assert scope["FullyShardedDataParallel"] is fsdp.FullyShardedDataParallel

    def test_versions_compare_as_clients_compare_them(self) -> None:
        import fairscale

        assert fairscale.__version__ >= "0.4.0"
        assert importlib.metadata.version("fairscale") == fairscale.__version__
        assert importlib.util.find_spec("fairscale") is not None

    def test_the_documentation_lists_every_module_and_name(self) -> None:
        text = DOCS.read_text(encoding="utf-8")
        for path, names in PROVIDED.items():
            assert f"`{path}`" in text
            for name in names:
                assert f"`{name}`" in text, f"{path}.{name}"


@pytest.mark.usefixtures("installed")
class TestWhatIsNotThere:
    @pytest.mark.parametrize(
        "statement", ["from fairscale.nn import Pipe", "import fairscale.nn.pipe", "from fairscale.nn.pipe import Pipe"]
    )
    def test_an_import_says_what_to_use_instead(self, statement: str) -> None:
        with pytest.raises(ImportError, match=r"has no fairscale\.nn\.[pP]ipe: .*torch\.distributed\.pipelining"):
            exec(statement)

    def test_an_attribute_says_what_to_use_instead(self) -> None:
        import fairscale

        with pytest.raises(AttributeError, match=r"has no fairscale\.nn\.MOELayer: .* separate process_group"):
            _ = fairscale.nn.MOELayer
        assert not hasattr(fairscale.nn, "MOELayer")

    def test_a_name_that_nobody_has_heard_of_is_named(self) -> None:
        with pytest.raises(ImportError, match=r"has no fairscale\.optim\.grad_scaler\.Nothing: .*docs/migration\.md"):
            exec("from fairscale.optim.grad_scaler import Nothing")

    @pytest.mark.parametrize("path", ["fairscale.nn.ShardedDataParallel", "fairscale.optim.OSS"])
    def test_classes_that_clients_import_beside_can_be_asked_after_and_not_made(self, path: str) -> None:
        module, _, name = path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        assert not isinstance(nn.Linear(1, 1), cls)
        with pytest.raises(NotImplementedError, match=f"no {name}: wrap with FullyShardedDataParallel"):
            cls(nn.Linear(1, 1))

    def test_no_hint_is_for_something_that_is_there(self) -> None:
        there = {part for path, names in PROVIDED.items() for part in (*path.split("."), *names)}
        assert not there & INSTEAD.keys()

    def test_other_modules_are_left_to_others(self) -> None:
        assert importlib.util.find_spec("fairscale_of_another_kind") is None


class TestInstalling:
    def test_twice_is_once(self) -> None:
        with fairscale_installed():
            finders = list(sys.meta_path)
            compat.install()
            assert sys.meta_path == finders

    def test_uninstalling_takes_it_all_back(self) -> None:
        finders = list(sys.meta_path)
        with fairscale_installed():
            importlib.import_module("fairscale.nn")
        assert sys.meta_path == finders
        assert not [name for name in sys.modules if name.split(".")[0] == "fairscale"]
        compat.uninstall()

    def test_what_was_imported_goes_on_working_after_uninstalling(self) -> None:
        with fairscale_installed():
            module = importlib.import_module("fairscale.nn")
        assert module.wrap is fsdp.wrap

    def test_too_late_is_an_error_that_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = ModuleType("fairscale")
        real.__file__ = "/somewhere/fairscale/__init__.py"
        monkeypatch.setitem(sys.modules, "fairscale", real)
        for force in (False, True):
            with pytest.raises(RuntimeError, match=r"imported already, from /somewhere.* before the first import"):
                compat.install(force)
        compat.uninstall()
        assert sys.modules["fairscale"] is real

    def test_an_installed_fairscale_is_hidden_only_by_force(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "fairscale").mkdir()
        (tmp_path / "fairscale" / "__init__.py").write_text("real = True\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(RuntimeError, match=r"is installed \(.*fairscale.__init__\.py\).*install\(force=True\)"):
            compat.install()
        with fairscale_installed():
            assert importlib.import_module("fairscale").nn.wrap is fsdp.wrap
        assert importlib.import_module("fairscale").real
        del sys.modules["fairscale"]


@pytest.mark.usefixtures("installed")
class TestPickles:
    """`tests/data/fairscale/pickles.pt` was written by FairScale (`tests/tools/run_fairscale_clients.py`)."""

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_classes_of_theirs_are_ours(self, weights_only: bool) -> None:
        found = torch.load(RECORDED / "pickles.pt", weights_only=weights_only)
        assert found["state"] is fsdp.TrainingState.BACKWARD_PRE
        flat = found["flat"]
        assert isinstance(flat, fsdp.FlatParameter)
        assert flat.requires_grad
        assert flat.metadata() == (("0", "1"), (torch.Size([2, 2]), torch.Size([3])), (4, 3))
        torch.testing.assert_close(flat.get_param_views()[1].detach(), torch.tensor([4.0, 5.0, 6.0]))

    def test_a_wrapper_of_theirs_says_what_to_save(self) -> None:
        blank = fsdp.FullyShardedDataParallel.__new__(fsdp.FullyShardedDataParallel)
        with pytest.raises(RuntimeError, match=r"pickled by FairScale.* save its state_dict\(\)"):
            blank.__setstate__({"_modules": {}, "rank": 0, "process_group": "MISSING"})

    def test_a_shard_of_theirs_says_that_it_is_one(self) -> None:
        flat = fsdp.FlatParameter([torch.arange(4.0)])
        layers = [("layer", nn.Linear(1, 1), "weight"), ("", nn.Linear(1, 1), "bias")]
        flat.__setstate__(([4, 3], [torch.Size([2, 2]), torch.Size([3])], layers, []))
        assert flat.metadata()[0] == ("layer.weight", "bias")
        with pytest.raises(ValueError, match="holds one rank's shard"):
            flat.get_param_views()
