"""The validation loss of a small GPT with exact, with quantised and with rare communication, for several seeds.

    python -m benchmarks.quantised_losses
    python -m benchmarks.quantised_losses --steps 100 --seeds 0 --ranks 2
    python -m benchmarks.quantised_losses --errors

The model, the data and the schedule are those of `examples.gpt`. docs/communication.md contains the results. With an
outer optimizer there are two replicas, each sharded over half of the ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fsdp
from benchmarks._ranks import run_ranks
from examples.gpt.model import GPT, Block, GPTConfig, next_byte_loss
from examples.gpt.text import Corpus, load_corpus, training_batches, validation_batches
from examples.gpt.train import Place, learning_rate, validation_loss
from fsdp import OuterOptimizer, QuantizedGather, QuantizedReduce

CONFIG = GPTConfig(num_layers=2, num_heads=4, width=64, context=64)
BATCH, HIGHEST_RATE, VALIDATION_BATCHES = 4, 3e-3, 64
NUM_SUMMED = 50

Compress = Callable[[nn.Module], object]
WAYS: dict[str, Compress] = {
    "float32": lambda model: None,
    "8-bit reduce": lambda model: fsdp.compress(model, reduce=QuantizedReduce(8)),
    "8-bit reduce, feedback": lambda model: fsdp.compress(model, reduce=QuantizedReduce(8, feedback=True)),
    "4-bit reduce": lambda model: fsdp.compress(model, reduce=QuantizedReduce(4)),
    "4-bit reduce, feedback": lambda model: fsdp.compress(model, reduce=QuantizedReduce(4, feedback=True)),
    "8-bit gather": lambda model: fsdp.compress(model, gather=QuantizedGather(8)),
    "8-bit gather, 8-bit reduce": lambda model: fsdp.compress(
        model, gather=QuantizedGather(8), reduce=QuantizedReduce(8)
    ),
    "8-bit gather, 4-bit reduce": lambda model: fsdp.compress(
        model, gather=QuantizedGather(8), reduce=QuantizedReduce(4)
    ),
    "8-bit gather, 4-bit reduce, feedback": lambda model: fsdp.compress(
        model, gather=QuantizedGather(8), reduce=QuantizedReduce(4, feedback=True)
    ),
    "4-bit gather": lambda model: fsdp.compress(model, gather=QuantizedGather(4)),
    "8-bit sum over replicas": lambda model: fsdp.compress(model, replicas=QuantizedReduce(8)),
    "4-bit sum over replicas": lambda model: fsdp.compress(model, replicas=QuantizedReduce(4)),
    "4-bit sum over replicas, feedback": lambda model: fsdp.compress(model, replicas=QuantizedReduce(4, feedback=True)),
}
REPLICAS = 2
HYBRID = {way for way in WAYS if "replicas" in way}
OUTER = {f"outer optimizer, every {every} steps": every for every in (10, 50)}


def main(arguments: Sequence[str] | None = None) -> int:
    ways = [*WAYS, *OUTER]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised_losses", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ways, default=ways, metavar="WAY", help=", ".join(ways))
    parser.add_argument("--errors", action="store_true", help="only the relative errors of gradients")
    options = parser.parse_args(arguments)
    numel = sum(param.numel() for param in GPT(CONFIG).parameters())
    print(f"{numel:,} parameters, {options.ranks} ranks, {options.steps} steps of {BATCH} sequences on each rank")
    if options.errors:
        run_ranks(_print_errors, options.ranks, [way for way in options.only if way in WAYS])
        return 0
    run_ranks(_train_all, options.ranks, options.only, options.steps, options.seeds)
    return 0


def _train_all(ways: Sequence[str], steps: int, seeds: Sequence[int]) -> None:
    """Collective. Print the losses of all ways, on the first rank."""
    corpus = load_corpus(None, context=CONFIG.context, max_bytes=4_000_000)
    for way in ways:
        losses = [_train(way, steps, seed, corpus) for seed in seeds]
        if dist.get_rank() == 0:
            each = " ".join(f"{loss:.4f}" for loss in losses)
            print(f"{way:40} mean {statistics.mean(losses):.4f}   {each}", flush=True)


def _print_errors(ways: Sequence[str]) -> None:
    """Collective. Print the relative errors of a gradient, and of the sum of gradients with the same weights."""
    corpus = load_corpus(None, context=CONFIG.context, max_bytes=4_000_000)
    for way in ways:
        exact = _gradients(way, corpus, is_exact=True)
        found = [_distance(*pair) for pair in zip(_gradients(way, corpus), exact, strict=True)]
        if dist.get_rank() == 0:
            print(f"{way:40} one {found[0]:.5f}   sum of {NUM_SUMMED} {found[1]:.5f}", flush=True)


def _gradients(way: str, corpus: Corpus, *, is_exact: bool = False) -> list[Tensor]:
    """Collective. Return this rank's shards of the gradient of one batch, and of the sum over several batches."""
    torch.manual_seed(0)
    model, _ = _sharded(way)
    if not is_exact:
        WAYS[way](model)
    batches = training_batches(corpus.train, batch=BATCH, context=CONFIG.context, seed=dist.get_rank())
    found = []
    for number in range(1, NUM_SUMMED + 1):
        next_byte_loss(model, next(batches)).backward()
        if number in (1, NUM_SUMMED):
            found.append(torch.cat([param.grad.view(-1) for param in model.parameters() if param.grad is not None]))
    return found


def _distance(found: Tensor, exact: Tensor) -> float:
    """Collective. Return the norm of the difference over all ranks, relative to the norm of `exact`."""
    squares = torch.stack([(found - exact).square().sum(), exact.square().sum()])
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


def _sharded(way: str) -> tuple[Any, DeviceMesh]:
    """Collective. Return the sharded model of a way, and the mesh of its replicas, if it has any."""
    mesh = init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("replica", "rank"))
    over = mesh["rank"].get_group() if way in OUTER else mesh if way in HYBRID else None
    return fsdp.shard(GPT(CONFIG), units={Block}, process_group=over), mesh


def _train(way: str, steps: int, seed: int, corpus: Corpus) -> float:
    """Collective. Return the validation loss after so many steps."""
    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    torch.manual_seed(seed)
    model, mesh = _sharded(way)
    if way in WAYS:
        WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    outer = OuterOptimizer(optimizer, mesh["replica"], every=OUTER[way]) if way in OUTER else None
    order = seed * place.world_size + place.rank
    batches = training_batches(corpus.train, batch=BATCH, context=CONFIG.context, seed=order)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, HIGHEST_RATE)
        next_byte_loss(model, next(batches)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step()
    limits = {"batch": BATCH, "context": CONFIG.context, "max_batches": VALIDATION_BATCHES}
    held_out = validation_batches(corpus.validation, **limits)
    return validation_loss(model, held_out, place)


if __name__ == "__main__":
    sys.exit(main())
