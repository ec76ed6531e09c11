"""Checkpoints in files: time, memory and bytes written, compared to torch and to the disk itself.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --ranks 4 --rounds 3 --folder /mnt/scratch

Adam has stepped a GPT that is wrapped block by block; the state is three times as large as the model. Every contestant
saves the state to a new folder, until all data is on the disk (`save`), and loads it again; `go on` is the time until
training can continue. Times are interleaved in the same run. Memory is the increase of peak resident memory (with
``--device cuda``, of the GPU's memory), in separate processes for each contestant. All contestants read recently
written files from the system's cache. Exits with 1 if a rank of `ours` needs more than 5 % of the full state and the
largest parameter, or if the files have more than 1.01 times the state's bytes. Saving in the background also needs a
copy of the rank's data.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._checkpoint_ways import BACKGROUND, DISK, NAMES, WAYS, FileWay, disk_way
from benchmarks._contestants import OURS
from benchmarks._measure import NOTHING_KEPT, ratio, table, warn_if_busy
from benchmarks._ranks import DEVICES, run_ranks
from benchmarks._states import TINY, config_of, growth, interleaved, parser_of, print_times, seconds, sizes_of, stepped
from examples.gpt.model import GPT, GPTConfig

_JOBS = ("save", "go on", "load")


@dataclass(frozen=True)
class Cost:
    """The cost of a save and a load on a rank, in bytes."""

    save_growth: int  # resident at the highest, above those before
    load_growth: int
    written: int  # to the disk


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("checkpoint", "Checkpoints in files", 0.4, dict.fromkeys(NAMES), DEVICES)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="below it files are written (%(default)s)")
    parser.add_argument("--tensors", type=int, help="so many small ones in the model, instead of --gigabytes")
    options = parser.parse_args(arguments)
    config = config_of(options.gigabytes) if options.tensors is None else _small(options.tensors)
    state = 3 * sizes_of(config)[0]
    print(f"A GPT of {config.num_layers} blocks and Adam: {state / 1e9:.2f} GB of state, {options.ranks} ranks.")
    warn_if_busy()
    options.folder.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint-"))
    try:
        measured = [] if options.no_memory else [name for name in options.only if name != DISK]
        costs = {
            name: run_ranks(
                *(_measure, options.ranks, name, config, folder), device=options.device, environment=NOTHING_KEPT
            )
            for name in measured
        }
        _print_costs(costs, state)
        times = run_ranks(*(_time, options.ranks, options.only, config, folder, options.rounds), device=options.device)[
            0
        ]
    finally:
        shutil.rmtree(folder)
    print_times(times, _JOBS)
    _print_over_disk(times)
    return _judged({name: costs[name] for name in (OURS, BACKGROUND) if name in costs}, config, options.ranks)


def _small(tensors: int) -> GPTConfig:
    """A GPT of about so many tensors, of which each is of no size."""
    return GPTConfig(num_layers=max(1, tensors // 12), num_heads=1, width=16, context=16)


def _print_costs(costs: Mapping[str, Sequence[Cost]], state: int) -> None:
    rows = [
        [name, str(rank), *(f"{value / state:.3f}" for value in (cost.save_growth, cost.load_growth, cost.written))]
        for name, found in costs.items()
        for rank, cost in enumerate(found)
    ]
    if rows:
        print(table(["over the full state", "rank", "save: memory", "load: memory", "written"], rows), flush=True)


def _print_over_disk(times: Mapping[str, Sequence[Sequence[float]]]) -> None:
    if {OURS, DISK} <= times.keys():
        for number in (0, 2):
            own, disk = ([values[number] for values in times[name]] for name in (OURS, DISK))
            print(f"{_JOBS[number]}: ours takes {ratio(own, disk)} of what the disk takes for as many bytes.")


def _judged(costs: Mapping[str, Sequence[Cost]], config: GPTConfig, ranks: int) -> int:
    state = 3 * sizes_of(config)[0]
    with torch.device("meta"):
        largest = max(param.numel() * param.element_size() for param in GPT(config).parameters())
    problems = []
    for name, found in costs.items():
        allowed = 0.05 * state + largest
        copies = state / ranks if name == BACKGROUND else 0
        for rank, cost in enumerate(found):
            if cost.save_growth > allowed + copies or cost.load_growth > allowed:
                problems.append(f"{name}: rank {rank} needs more memory than it should.")
        if sum(cost.written for cost in found) > 1.01 * state:
            problems.append(f"{name} writes more bytes than the state has.")
    print(*problems, sep="\n")
    return 1 if problems else 0


# --- on a rank


def _measure(name: str, config: GPTConfig, folder: Path) -> Cost:
    way = WAYS[name]
    made = stepped(way.model, TINY)  # what is loaded at first use is not the state's
    way.save(folder / "first", *made)()
    dist.barrier()
    way.load(folder / "first", *made)
    made = stepped(way.model, config)
    before = _written()
    _, save_growth = growth(lambda: way.save(folder / name, *made)())
    written = _written() - before
    _, load_growth = growth(lambda: way.load(folder / name, *made))
    _remove(folder / "first")
    _remove(folder / name)
    return Cost(save_growth, load_growth, written)


def _time(names: Sequence[str], config: GPTConfig, folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    ways = {name: disk_way(3 * sizes_of(config)[0]) if name == DISK else WAYS[name] for name in names}
    models = {model: stepped(model, config) for model in dict.fromkeys(way.model for way in ways.values())}

    def measured(name: str) -> list[float]:
        way, made = ways[name], models[ways[name].model]
        until_free, saving = _save_seconds(way, folder / name, made)
        _, loading = seconds(functools.partial(way.load, folder / name, *made))
        _remove(folder / name)
        return [saving, until_free, loading]

    return interleaved(measured, names, rounds)


def _save_seconds(way: FileWay, folder: Path, made: tuple[Any, Any]) -> tuple[float, float]:
    """Return the time until all ranks can continue, and until all data is on the disk.

    There is no barrier in between: `dcp.async_save` communicates in the background over the same process group, and a
    barrier would interfere with its messages.
    """
    dist.barrier()
    began = time.perf_counter()
    finish = way.save(folder, *made)
    until_free = torch.tensor(time.perf_counter() - began)
    finish()
    dist.barrier()
    saving = time.perf_counter() - began
    dist.all_reduce(until_free, dist.ReduceOp.MAX)
    return until_free.item(), saving


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def _written() -> int:
    """Bytes that this process has sent to disks."""
    match = re.search(r"^write_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(match[1]) if match is not None else 0


if __name__ == "__main__":
    sys.exit(main())
