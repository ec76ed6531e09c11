"""Records shards that FairScale itself makes, as test data, and has FairScale put together ours.

    pip install wheel && pip install --no-deps --no-build-isolation fairscale==0.4.13    # in an environment with torch
    python benchmarks/record_fairscale_shards.py

For each case FairScale trains a small model on a few CPU ranks for a step and saves each rank's local state and
metadata, and the whole state as the truth, to ``tests/data/fairscale/<case>/``. FairScale wants CUDA streams for that;
here they are stand-ins that do nothing, since on the CPU nothing runs beside the program. Nothing else of it is
changed. Then the same models are wrapped by this package, and FairScale's own `consolidate_shard_weights` must make
the whole weights of our shards, and FairScale must load them. Exits with an error if not.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(_ROOT))

from benchmarks._ranks import run_ranks
from fsdp import FullyShardedDataParallel

# The model, its ranks, and FairScale's arguments.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "flat-2": (2, {}),
    "flat-3": (3, {}),
    "unflattened-3": (3, {"flatten_parameters": False}),
    "mixed-2": (2, {"mixed_precision": True}),
}
_NAMES = ("fp32_to_fp16", "all_gather", "post_backward")

Wrap = Callable[[nn.Module], nn.Module]


class Model(nn.Module):
    """A unit in a unit, each with a tied parameter and a batch norm. `tests/fairscale_shards.py` has the same one."""

    def __init__(self, wrap: Wrap, *, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        inner = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.last = nn.Linear(5, 5, bias=False)
        if tied:
            inner[2].weight, self.last.weight = inner[0].weight, self.first.weight
        self.inner = wrap(inner)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.inner(self.norm(self.first(inputs))))


def make_model(wrap: Wrap, *, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Model(wrap, tied=tied))


class _NoStream:
    """In the place of a CUDA stream."""

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _fairscale() -> Any:
    """FairScale's class, with stand-ins for what it needs of CUDA."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Theirs  # type: ignore[import-not-found]

    stream = _NoStream()
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    Tensor.record_stream = lambda *_: None  # type: ignore[assignment, method-assign]
    make_others = Theirs._setup_streams

    def setup_streams(self: Any) -> None:
        if self._is_root and not self._streams:
            make_others(self)
            self._streams.update(dict.fromkeys(_NAMES, stream))  # the same dictionary as the children's

    Theirs._setup_streams = setup_streams
    return Theirs


def record(folder: str, options: dict[str, Any]) -> None:
    """On each rank: train and save."""
    warnings.simplefilter("ignore")
    theirs, cpu = _fairscale(), torch.device("cpu")
    model = make_model(lambda module: theirs(module, compute_device=cpu, bucket_cap_mb=0, **options))
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs).float().square().sum().backward()
    optimizer.step()
    rank = dist.get_rank()
    shards = {"weights": model.local_state_dict(), "metadata": model.local_metadata_dict()}  # type: ignore[operator]
    torch.save(shards, Path(folder) / f"rank{rank}.pt")
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, Path(folder) / "whole.pt")


def check_ours(options: dict[str, Any]) -> None:
    """On each rank: FairScale puts our shards together, and loads them."""
    warnings.simplefilter("ignore")
    theirs, cpu = _fairscale(), torch.device("cpu")
    # It fails on its own shards, too, of an inner unit with ties that is the last one.
    ours, plain = (make_model(wrap, tied=False) for wrap in (_ours(options), _keep))
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, (ours.local_state_dict(), ours.local_metadata_dict()))  # type: ignore[operator]
    _compare(theirs.consolidate_shard_weights(*map(list, zip(*shards, strict=True))), plain.state_dict())
    model = make_model(lambda module: theirs(module, compute_device=cpu, bucket_cap_mb=0, **options))
    model(torch.randn(4, 5))  # it cannot load before its first use; and now buffers are others
    for param in model.parameters():
        nn.init.zeros_(param)
    ours = make_model(_ours(options))
    model.load_local_state_dict(ours.local_state_dict())  # type: ignore[operator]
    _compare(model.state_dict(), make_model(_keep).state_dict())


def _ours(options: dict[str, Any]) -> Wrap:
    return lambda module: FullyShardedDataParallel(module, **options)


def _keep(module: nn.Module) -> nn.Module:
    return module


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if name not in found or not torch.equal(found[name], value):
            raise AssertionError(f"{name} is not what it should be: {found.get(name)} instead of {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=_ROOT / "tests" / "data" / "fairscale")
    out = parser.parse_args().out
    for case, (ranks, options) in CASES.items():
        (out / case).mkdir(parents=True, exist_ok=True)
        run_ranks(record, ranks, str(out / case), options)
        run_ranks(check_ours, ranks, options)
        size = sum(path.stat().st_size for path in (out / case).iterdir())
        print(f"{case}: {ranks} ranks, {size} bytes; FairScale reads ours")


if __name__ == "__main__":
    main()
