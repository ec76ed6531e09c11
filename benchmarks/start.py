"""The growth of a rank's memory while a large model is started from the meta device, with this library and with torch.

    python -m benchmarks.start
    python -m benchmarks.start --gigabytes 0.25 --ranks 2 --only ours files

A GPT is built on the meta device, wrapped block by block, and initialized: by its modules, or (`files`) from a
safetensors file, which is written before. The increase of peak resident memory is compared with the minimum if units
are unsharded sequentially: the rank's shard and the largest unit. Exits with 1 if a contestant of this library needs
more than 1.1 times the minimum on any rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._measure import NOTHING_KEPT, table, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._states import BYTES, TINY, config_of, growth, seconds, sizes_of
from examples.gpt.model import GPT, GPTConfig, count_units
from fsdp import FullyShardedDataParallel, load_safetensors, materialize

OURS, FILES, TORCH = "ours", "files", "fsdp2"
ALLOWED = 1.1
_WIDTH = 1536


@dataclass(frozen=True)
class Started:
    """The measurements of a start on a rank."""

    shard: int  # bytes that it keeps
    largest_unit: int
    growth: int  # of resident memory, at the highest
    seconds: float

    @property
    def ratio(self) -> float:
        return self.growth / (self.shard + self.largest_unit)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    config = config_of(options.gigabytes, _WIDTH)
    size = f"{config.num_layers} blocks, {sizes_of(config)[0] / 1e9:.2f} GB in float32"
    print(f"A GPT of {size}, started on {options.ranks} ranks.")
    warn_if_busy()
    holds, rows = True, []
    for name in options.only:
        # Contestants run sequentially in separate processes: memory that is left would hide the next contestant's.
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for each in (TINY, config) if name == FILES else ():
                _write(each, _file(Path(folder), each))
            found = run_ranks(_measure, options.ranks, name, config, Path(folder), environment=NOTHING_KEPT)
        rows += [_row(name, rank, started) for rank, started in enumerate(found)]
        holds &= name == TORCH or all(started.ratio <= ALLOWED for started in found)
    print(table(["", "rank", "peak/(shard+unit)", "peak MB", "shard MB", "unit MB", "seconds"], rows), flush=True)
    if not holds:
        print(f"One of ours needs more than {ALLOWED} times its shard and the largest unit.")
    return 0 if holds else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description="Memory while a model is started from the meta device."
    )
    add = parser.add_argument
    add("--gigabytes", type=float, default=2.0, help="size of the model in float32 (%(default)s)")
    add("--ranks", type=int, default=4, help="processes (%(default)s)")
    add("--only", nargs="+", choices=sorted(WAYS), default=list(WAYS), help="contestants")
    add("--folder", type=Path, help="where to write the file for a moment (default: that of temporary files)")
    return parser.parse_args(arguments)


def _row(name: str, rank: int, started: Started) -> list[str]:
    sizes = [f"{count / 1e6:.0f}" for count in (started.growth, started.shard, started.largest_unit)]
    return [name, str(rank), f"{started.ratio:.3f}", *sizes, f"{started.seconds:.1f}"]


def _file(folder: Path, config: GPTConfig) -> Path:
    return folder / f"{config.width}.safetensors"


def _write(config: GPTConfig, file: Path) -> None:
    """Write random values of each parameter sequentially, so that the whole model need not fit into memory."""
    params = dict(_on_meta(config).named_parameters())
    header, end = {}, 0
    for name, param in params.items():
        begin, end = end, end + param.numel() * BYTES
        header[name] = {"dtype": "F32", "shape": list(param.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for param in params.values():
            stream.write(torch.randn(param.numel()).mul_(0.02).numpy().tobytes())


# --- on a rank


def _measure(name: str, config: GPTConfig, folder: Path) -> Started:
    WAYS[name](TINY, folder)  # what is loaded at first use is not the model's
    (_, took), grown = growth(lambda: seconds(lambda: WAYS[name](config, folder)))
    units = count_units(_on_meta(config))
    shard = sum(-(-numel // dist.get_world_size()) for numel in units) * BYTES
    return Started(shard, max(units) * BYTES, grown, took)


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _wrapped(config: GPTConfig) -> nn.Module:
    model = _on_meta(config)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block)
    return FullyShardedDataParallel(model)


def _ours(config: GPTConfig, folder: Path) -> nn.Module:
    sharded = _wrapped(config)
    materialize(sharded, seed=0)
    return sharded


def _files(config: GPTConfig, folder: Path) -> nn.Module:
    sharded = _wrapped(config)
    load_safetensors(sharded, _file(folder, config))
    return sharded


def _fsdp2(config: GPTConfig, folder: Path) -> nn.Module:
    model = _on_meta(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            module.reset_parameters()
    return model


# By name, the function that builds and initializes a model of this size. Each source of values has its own entry.
WAYS: dict[str, Callable[[GPTConfig, Path], nn.Module]] = {OURS: _ours, FILES: _files, TORCH: _fsdp2}


if __name__ == "__main__":
    sys.exit(main())
