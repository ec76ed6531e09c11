"""Runs the scripts in `tests/data/clients` with FairScale itself: what they call must be what it had.

    python -m tests.tools.run_fairscale_clients            # in the environment of `record_fairscale_shards`
    python -m tests.tools.run_fairscale_clients pickles    # writes what FairScale pickles, as test data

On two CPU ranks, with that module's stand-ins for CUDA. Prints how far each script is from training unsharded, and
exits with an error if one fails.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

import torch

from benchmarks._fairscale import fairscale_class
from benchmarks._ranks import run_ranks
from tests.helpers.paths import DATA

_CLIENTS = DATA / "clients"


class _Dummy:
    """FairScale's last version has its `DummyProcessGroup` in a module that needs more than it installs."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def run(name: str) -> tuple[float, float]:
    """On each rank. How far losses and weights are from those of one process."""
    warnings.simplefilter("ignore")
    fairscale_class()
    for method in ("pin_memory", "cuda"):
        setattr(torch.Tensor, method, lambda self, *_: self)
    # It gathers optimizer states through one buffer, of which a copy to the host is a copy only with a device.
    torch.Tensor.cpu = lambda self, *_: self.detach().clone()  # type: ignore[method-assign]
    for path in ("fairscale.utils", "fairscale.utils.testing"):  # which that version had moved
        sys.modules[path] = ModuleType(path)
    sys.modules["fairscale.utils.testing"].__dict__["DummyProcessGroup"] = _Dummy
    client: Any = importlib.import_module(f"tests.data.clients.{name}")
    found, expected = client.main(), client.plain()
    losses = torch.tensor(found["losses"]) - torch.tensor(expected["losses"])
    weights = [(found["state"][key].float() - value).abs().max() for key, value in expected["state"].items()]
    return float(losses.abs().max()), float(max(weights))


def record_pickles() -> None:
    """Classes of FairScale's, as its checkpoints name them."""
    from fairscale.nn.data_parallel import TrainingState  # type: ignore[import-not-found]
    from fairscale.nn.misc.flatten_params_wrapper import FlatParameter  # type: ignore[import-not-found]

    params = [torch.nn.Parameter(torch.arange(4.0).view(2, 2)), torch.nn.Parameter(torch.arange(4.0, 7.0))]
    torch.save({"flat": FlatParameter(params), "state": TrainingState.BACKWARD_PRE}, DATA / "fairscale" / "pickles.pt")


def main() -> None:
    if sys.argv[1:] == ["pickles"]:
        record_pickles()
        return
    wanted = sys.argv[1:] or sorted(path.stem for path in _CLIENTS.glob("like_*.py"))
    for name in wanted:
        # Its other way of reducing hands gloo a shape that current versions of torch refuse.
        losses, weights = run_ranks(run, 2, name, environment={"ENABLE_NCCL_BASE_COLLECTIVES": "0"})[0]
        print(f"{name}: losses {losses:.1e}, weights {weights:.1e} from unsharded", flush=True)
        if max(losses, weights) > (1e-2 if name.endswith("_mixed") else 1e-3):
            sys.exit(f"{name} does not train as it should")


if __name__ == "__main__":
    main()
