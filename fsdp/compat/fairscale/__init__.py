"""FairScale's import paths for this library: after `install`, code written for FairScale runs as it is.

import fsdp.compat.fairscale

fsdp.compat.fairscale.install()  # before anything imports fairscale

from fairscale.nn import FullyShardedDataParallel
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.serialization import add_safe_globals

from fsdp.compat.fairscale.names import INSTEAD, PROVIDED, VERSION
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.unit import TrainingState

_ROOT = "fairscale"


def install(force: bool = False) -> None:
    """From now on, ``import fairscale...`` finds this library. Doing it twice changes nothing.

    For the process; call it at the top of the program, in every process that imports `fairscale` or unpickles what
    names it. `docs/fairscale.md` has the table of what is found where. Everything else below `fairscale` is an error
    that names what to use instead.

    Args:
        force: also where FairScale is installed, whose place this library then takes.

    Raises:
        RuntimeError: if FairScale is installed, unless forced; or if it was imported before, in any case: what has its
            classes already would not notice.
    """
    if _FINDER in sys.meta_path:
        return
    loaded = [name for name in sys.modules if _is_below(name)]
    if loaded:
        where = getattr(sys.modules[loaded[0]], "__file__", None) or "somewhere else"
        raise RuntimeError(
            f"{loaded[0]} was imported already, from {where}. Call fsdp.compat.fairscale.install() before the first "
            "import of fairscale, and of packages that import it."
        )
    found = None if force else find_spec(_ROOT)
    if found is not None:
        raise RuntimeError(
            f"FairScale is installed ({found.origin}) and would be hidden. Uninstall it, or say that this is meant: "
            "fsdp.compat.fairscale.install(force=True)."
        )
    sys.meta_path.insert(0, _FINDER)
    _allow_pickles()


def uninstall() -> None:
    """Take back `install`. What was imported meanwhile goes on working; new imports find FairScale, or nothing."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if _is_below(name)]:
        if getattr(sys.modules[name], "__loader__", None) is _FINDER:
            del sys.modules[name]


def _is_below(name: str) -> bool:
    return name == _ROOT or name.startswith(f"{_ROOT}.")


class _Finder(MetaPathFinder, Loader):
    """Serves the modules of the table, and knows nothing of others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_below(fullname):
            return None
        if fullname not in PROVIDED:
            # Without `name`, or `from fairscale.nn import X` would put its own message in the place of this one.
            raise ModuleNotFoundError(_missing(fullname))
        return ModuleSpec(fullname, self, origin="fsdp.compat.fairscale", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # Modules below first: some have the name of a function that their package exports, and that one counts.
        for name in PROVIDED:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)
        names = PROVIDED[module.__name__]
        module.__dict__.update(names, __all__=[name for name in names if not name.startswith("_")])
        module.__doc__ = f"Stands in for {module.__name__}; see `fsdp.compat.fairscale`."

        def missing(name: str) -> Any:
            raise AttributeError(_missing(f"{module.__name__}.{name}"))

        module.__dict__["__getattr__"] = missing

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """So that those who ask for the version of the installed package get an answer."""
        return [_AsInstalled()] if context.name in (None, _ROOT) else []


class _AsInstalled(Distribution):
    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {_ROOT}\nVersion: {VERSION}\nSummary: stands in for it, of fsdp\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


_FINDER = _Finder()


def _missing(fullname: str) -> str:
    instead = next((INSTEAD[part] for part in fullname.split(".") if part in INSTEAD), None)
    return f"fsdp.compat.fairscale has no {fullname}: " + (
        instead or "it covers FullyShardedDataParallel and what belongs to it; docs/fairscale.md lists all names"
    )


def _allow_pickles() -> None:
    """Have `torch.load` with its default, ``weights_only=True``, read what names these classes of FairScale's."""
    add_safe_globals(
        [
            (FlatParameter, "fairscale.nn.misc.flatten_params_wrapper.FlatParameter"),
            (TrainingState, "fairscale.nn.data_parallel.fully_sharded_data_parallel.TrainingState"),
        ]
    )
