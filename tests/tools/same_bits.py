"""The training of `make train` with `fsdp.SameBits`, at several numbers of ranks: one hash in the end.

    python -m tests.tools.same_bits --ranks 1 2 3 4 8 --steps 50
    python -m tests.tools.same_bits --cost 2      # what a step costs, beside ordinary accumulation, on so many ranks

It trains the GPT of `examples.gpt` on the standard library's source, with AdamW, and with Muon by owners beside AdamW.
Each training is also interrupted in the middle, saved, and resumed at another number of ranks. All must have the same
losses, norms and fingerprint in every step; otherwise the program ends with 1. With ``--cost``, steps of SameBits and
of ordinary trainings take turns in one run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from benchmarks._measure import Spread
from benchmarks._ranks import run_ranks
from examples.gpt.model import GPT, SIZES, Block, next_byte_loss
from examples.gpt.text import load_corpus
from fsdp import FullyShardedDataParallel, SameBits, auto_wrap, enable_wrap, module_wrap_policy, wrap

MICRO_BATCHES = 24
Report = list[str]


@functools.cache
def text(size: str) -> Tensor:
    return load_corpus(None, context=SIZES[size].context, max_bytes=4_000_000).train


def windows(size: str, batch: int, step: int, number: int) -> Tensor:
    """The text of a micro-batch."""
    generator = torch.Generator().manual_seed(1_000_003 * step + number)
    starts = torch.randint(0, len(text(size)) - SIZES[size].context - 1, (batch,), generator=generator)
    return torch.stack([text(size)[start : start + SIZES[size].context + 1].long() for start in starts])


def sharded(size: str) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=True):
        return cast(FullyShardedDataParallel, wrap(auto_wrap(GPT(SIZES[size]), module_wrap_policy({Block}))))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    of_blocks = {
        "params": lambda name, shape: "blocks" in name and len(shape) == 2,
        "optimizer": torch.optim.Muon,
        "lr": 0.02,
    }
    return fsdp.OwnedOptimizer(model, [of_blocks, {"optimizer": torch.optim.AdamW, "sharded": True, "lr": 1e-3}])


def train(size: str, batch: int, kind: str, steps: range, load: str | None, save: str | None) -> Report:
    """Collective. Return a line for each step."""
    model = sharded(size)
    optimizer = optimizer_of(model, kind)
    if load is not None:
        fsdp.load(load, model, optimizer)
    bits, lines = SameBits(model, MICRO_BATCHES), []
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for number in bits.step(step):
            loss = next_byte_loss(model, windows(size, batch, step, number))
            loss.backward()
            losses.append(loss)
        norm = bits.clip_grad_norm_(1.0)
        optimizer.step()
        lines.append(f"loss {bits.mean(losses):.17g}, norm {norm:.17g}, {fsdp.fingerprint(model, optimizer)}")
    if save is not None:
        fsdp.save(save, model, optimizer)
    return lines


def compare(size: str, batch: int, kind: str, every: list[int], steps: int, folder: Path) -> bool:
    """Return whether trainings at all numbers of ranks are the same, and one that changes in the middle."""
    first: Report = []
    is_same = True
    for number, ranks in enumerate(every):
        begin = time.perf_counter()
        lines = run_ranks(train, ranks, size, batch, kind, range(steps), None, None)[0]
        first = first or lines
        is_same &= lines == first
        print(f"{kind}, {ranks} ranks: {lines[-1]} ({time.perf_counter() - begin:.0f} s)", flush=True)
        after = every[(number + 1) % len(every)]
        saved = str(folder / f"{kind}-{ranks}")
        half = run_ranks(train, ranks, size, batch, kind, range(steps // 2), None, saved)[0]
        half += run_ranks(train, after, size, batch, kind, range(steps // 2, steps), saved, None)[0]
        is_same &= half == first
        print(f"{kind}, {ranks} ranks, then {after}: {half[-1]}", flush=True)
    return is_same


def measure(size: str, batch: int, steps: int) -> dict[str, list[float]]:
    """Collective. Return the processor's seconds for steps of several ways to train, which take turns, on this rank.

    And those for a fingerprint. Other programs do not count, and neither does waiting for other ranks.
    """
    models = {way: sharded(size) for way in ("same bits", "reduced each time", "no_sync")}
    optimizers = {way: optimizer_of(model, "AdamW") for way, model in models.items()}
    bits = SameBits(models["same bits"], MICRO_BATCHES)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = range(rank, MICRO_BATCHES, ranks)
    seconds: dict[str, list[float]] = {way: [] for way in (*models, "fingerprint")}

    def backward(model: nn.Module, step: int, number: int) -> None:
        next_byte_loss(model, windows(size, batch, step, number)).backward()

    for step in range(steps):
        for way, model in models.items():
            optimizers[way].zero_grad()
            dist.barrier()
            begin = time.process_time()
            if way == "same bits":
                for number in bits.step(step):
                    backward(model, step, number)
                bits.clip_grad_norm_(1.0)
            else:
                for number in numbers:
                    if way == "no_sync" and number is not numbers[-1]:
                        with model.no_sync():
                            backward(model, step, number)
                    else:
                        backward(model, step, number)
                model.clip_grad_norm_(1.0)
            optimizers[way].step()
            seconds[way].append(time.process_time() - begin)
        begin = time.process_time()
        fsdp.fingerprint(models["same bits"], optimizers["same bits"])
        seconds["fingerprint"].append(time.process_time() - begin)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", "Muon"])
    parser.add_argument("--cost", type=int, metavar="RANKS", help="measure what a step costs instead")
    args = parser.parse_args()
    if args.cost:
        seconds = run_ranks(measure, args.cost, args.size, args.batch, args.steps)[0]
        base = seconds.pop("same bits")
        for way, each in seconds.items():
            found = Spread.of_ratios(base[2:], each[2:])
            print(f"same bits / {way}: {found.median:.3f} ({found.low:.3f} to {found.high:.3f}); ", end="")
            print(f"{statistics.median(each):.4f} s")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = [
            compare(args.size, args.batch, kind, args.ranks, args.steps, Path(folder)) for kind in args.optimizers
        ]
    print("all the same" if all(results) else "DIFFERENT")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
