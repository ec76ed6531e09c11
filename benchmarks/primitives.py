"""Ways to gather and to reduce-scatter on gloo: time and bytes, in the same run.

Why `fsdp.distributed.collectives` has `DirectExchange`.

    python benchmarks/primitives.py
    python benchmarks/primitives.py --ranks 4 --mib 4

All ways give the same result, which is checked first. Bytes are those that a rank really sent (TCP_INFO).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._measure import bytes_sent, table, warn_if_busy
from benchmarks._ranks import run_ranks
from fsdp.distributed.collectives import DirectExchange, TorchCollectives

_ROUNDS = 15

Way = Callable[[Tensor], Tensor]


def ways() -> dict[str, Way]:
    """Return the ways; each takes a rank's tensor, ``[world_size * n]``; gathers use its first ``n`` elements."""
    world = dist.group.WORLD
    direct, native = DirectExchange(world), TorchCollectives(world)
    world_size = dist.get_world_size()

    def gather_by(comm: TorchCollectives) -> Way:
        def gather(whole: Tensor) -> Tensor:
            shard = whole[: whole.numel() // world_size]
            gathered = comm.all_gather(torch.empty_like(whole), shard, "gather", 0).wait()
            comm.settle()
            return gathered

        return gather

    def reduce_scatter_by(comm: TorchCollectives) -> Way:
        return lambda whole: comm.reduce_scatter(whole.clone(), "reduce-scatter", 0).wait()

    def all_to_all(whole: Tensor) -> Tensor:
        received = torch.empty_like(whole)
        dist.all_to_all_single(received, whole)
        return received.view(world_size, -1).sum(dim=0)

    def all_reduce(whole: Tensor) -> Tensor:
        summed = whole.clone()
        dist.all_reduce(summed)
        return summed.view(world_size, -1)[dist.get_rank()]

    return {
        "gather: gloo": gather_by(native),
        "gather: direct exchange (ours)": gather_by(direct),
        "reduce-scatter: gloo": reduce_scatter_by(native),
        "reduce-scatter: all-reduce, then a slice": all_reduce,
        "reduce-scatter: all-to-all, then a sum": all_to_all,
        "reduce-scatter: direct exchange (ours)": reduce_scatter_by(direct),
    }


def measure(numel: int) -> list[tuple[str, float, float]]:
    """Collective. Name, median seconds and bytes sent of every way, interleaved."""
    torch.manual_seed(dist.get_rank())
    whole = torch.randn(numel)
    named = ways()
    check_equal(named, whole)
    seconds: dict[str, list[float]] = {name: [] for name in named}
    sent: dict[str, int] = dict.fromkeys(named, 0)
    for _ in range(_ROUNDS):
        for name, way in named.items():
            dist.barrier()
            before, start = bytes_sent() or 0, time.perf_counter()
            way(whole)
            seconds[name].append(time.perf_counter() - start)
            sent[name] += (bytes_sent() or 0) - before
    return [(name, statistics.median(seconds[name]), sent[name] / _ROUNDS) for name in named]


def check_equal(named: dict[str, Way], whole: Tensor) -> None:
    """Raise RuntimeError unless all ways of the same kind have equal results."""
    expected: dict[str, Tensor] = {}
    for name, way in named.items():
        result = way(whole)
        kind = name.partition(":")[0]
        if not torch.allclose(result, expected.setdefault(kind, result), atol=1e-5):
            raise RuntimeError(f"{name} gives another result than the first way to {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(chr(10))[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=16, help="size of what every rank has, in MiB (16)")
    options = parser.parse_args()
    warn_if_busy()
    numel = int(options.mib * 2**18) // options.ranks * options.ranks
    results = run_ranks(measure, options.ranks, numel)[0]
    print(f"{options.mib:g} MiB of float32, {options.ranks} ranks, medians of {_ROUNDS}, torch {torch.__version__}\n")
    rows = [(name, f"{1e3 * taken:.1f}", f"{sent / 2**20:.1f}") for name, taken, sent in results]
    print(table(("way", "ms", "MiB sent"), rows))


if __name__ == "__main__":
    main()
