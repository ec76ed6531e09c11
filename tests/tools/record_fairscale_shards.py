"""Records shards that FairScale itself makes, as test data, and has FairScale put together ours.

    pip install wheel && pip install --no-deps --no-build-isolation fairscale==0.4.13    # in an environment with torch
    python -m tests.tools.record_fairscale_shards

For each case FairScale trains a small model on a few CPU ranks for a step and saves each rank's local state and
metadata, and the whole state as the truth, to ``tests/data/fairscale/<case>/``. FairScale wants CUDA streams for that;
here they are stand-ins that do nothing, since on the CPU nothing runs beside the program. Nothing else of it is
changed. Then the same models are wrapped by this package, and FairScale's own `consolidate_shard_weights` must make
the whole weights of our shards, and FairScale must load them. Exits with an error if not.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._fairscale import fairscale_class, options_on_cpu
from benchmarks._ranks import run_ranks
from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.paths import DATA


class Case(NamedTuple):
    """One recording."""

    ranks: int
    theirs: dict[str, Any]  # FairScale's arguments
    ours: dict[str, Any]  # arguments of ours that mean the same
    is_alone: bool = False  # each rank has an inner unit of its own


# FairScale has batch norms of mixed precision in one flat parameter with the rest.
_MIXED = MixedPrecision(param_dtype=torch.float16, full_precision_modules=())

CASES = {
    "flat-2": Case(2, {}, {}),
    "flat-3": Case(3, {}, {}),
    "unflattened-3": Case(3, {"flatten_parameters": False}, {"flatten_parameters": False}),
    "mixed-2": Case(2, {"mixed_precision": True}, {"mixed_precision": _MIXED}),
    "alone-2": Case(2, {}, {}, is_alone=True),
}

Wrap = Callable[[nn.Module], nn.Module]


class Model(nn.Module):
    """A unit in a unit, each with a tied parameter and a batch norm."""

    def __init__(self, wrap: Wrap, *, tied: bool = True, wrap_inner: Wrap | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        inner = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.last = nn.Linear(5, 5, bias=False)
        if tied:
            inner[2].weight, self.last.weight = inner[0].weight, self.first.weight
        self.inner = (wrap_inner or wrap)(inner)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.inner(self.norm(self.first(inputs))))


def make_model(wrap: Wrap, **how: Any) -> nn.Module:
    """`Model`, with the same values on every call."""
    torch.manual_seed(0)
    return wrap(Model(wrap, **how))


def make_wrapped(kind: Any, case: Case, options: dict[str, Any], **how: Any) -> nn.Module:
    """Collective. The model in wrappers of a kind, FairScale's or ours."""

    def wrap(module: nn.Module, **more: Any) -> nn.Module:
        return kind(module, **options, **more)

    if case.is_alone:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        how["wrap_inner"] = partial(wrap, process_group=groups[dist.get_rank()])
    return make_model(wrap, **how)


def record(folder: str, name: str) -> None:
    """On each rank: train and save."""
    warnings.simplefilter("ignore")
    model = _theirs(CASES[name])
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs).float().square().sum().backward()
    optimizer.step()
    shards = {"weights": model.local_state_dict(), "metadata": model.local_metadata_dict()}
    torch.save(shards, Path(folder) / f"rank{dist.get_rank()}.pt")
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, Path(folder) / "whole.pt")


def check_ours(name: str) -> None:
    """On each rank: FairScale puts our shards together, and loads them."""
    warnings.simplefilter("ignore")
    case, plain = CASES[name], make_model(_keep)
    # Untied, because of an inner unit with ties that is the last one it cannot read its own shards either.
    untied: Any = make_wrapped(FullyShardedDataParallel, case, case.ours, tied=False)
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, (untied.local_state_dict(), untied.local_metadata_dict()))
    whole = fairscale_class().consolidate_shard_weights(*map(list, zip(*shards, strict=True)))
    _compare(whole, make_model(_keep, tied=False).state_dict())
    model = _theirs(case)
    model(torch.randn(4, 5))  # it cannot load before its first use; and now buffers are others
    for param in model.parameters():
        nn.init.zeros_(param)
    ours: Any = make_wrapped(FullyShardedDataParallel, case, case.ours)
    model.load_local_state_dict(ours.local_state_dict())
    _compare(model.state_dict(), plain.state_dict())


def _theirs(case: Case) -> Any:
    return make_wrapped(fairscale_class(), case, options_on_cpu(**case.theirs))


def _keep(module: nn.Module) -> nn.Module:
    return module


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if name not in found or not torch.equal(found[name], value):
            raise AssertionError(f"{name} is not what it should be: {found.get(name)} instead of {value}")


def record_all(
    about: str | None,
    cases: Mapping[str, Case],
    record: Callable[[str, str], None],
    check_ours: Callable[[str], None] | None = None,
) -> None:
    """Record all cases in a folder of the command line, and check with FairScale what this package makes of each."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "fairscale")
    out = parser.parse_args().out
    for name, case in cases.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        run_ranks(record, case.ranks, str(out / name), name)
        if check_ours is not None:
            run_ranks(check_ours, case.ranks, name)
        size = sum(path.stat().st_size for path in (out / name).iterdir())
        print(f"{name}: {case.ranks} ranks, {size} bytes{'; FairScale reads ours' if check_ours else ''}")


if __name__ == "__main__":
    record_all(__doc__, CASES, record, check_ours)
