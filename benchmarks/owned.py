"""Muon on a sharded GPT: by owners, compared to FSDP2 with `DTensor`s and FSDP2 with a manual gather, in the same run.

    python -m benchmarks.owned
    python -m benchmarks.owned --size 17M --ranks 4 --rounds 6

`torch.optim.Muon` steps the matrices of the blocks, and `torch.optim.AdamW` all other parameters. `step` is a whole
training step, `optimizer` the optimizers' part of it; bytes are the bytes that a rank sends in the optimizers' part,
by the kernel's counters. Contestants run in rotating order. Before that, all contestants train from the same weights
on the same batches; exits with 1 if their losses differ by more than float32 noise.

The manual gather is the simplest implementation: every rank gathers each matrix's gradient, steps a whole copy of the
matrix, and keeps its rows.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fsdp
from benchmarks._contestants import CONTESTANTS, FSDP2, OURS_ORIG, OURS_ROWS
from benchmarks._measure import Spread, bytes_sent, ratio, rotated, settle, table, warn_if_busy
from benchmarks._ranks import run_ranks, this_device
from benchmarks._training import Setup, build
from examples.gpt.model import SIZES, next_byte_loss

Step = Callable[[], None]
_TOLERANCE = 1e-4  # relative, of losses after steps in which orthogonalization has amplified rounding
_FIRST_STEPS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.owned", description="Muon on a sharded GPT, in four ways")
    parser.add_argument("--size", choices=SIZES, default="17M", help="of the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of each contestant in a round")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args(arguments)
    setup = Setup(size=options.size, batch=options.batch, context=options.context)
    print(
        f"Muon for the matrices of a GPT's blocks, AdamW for the rest: {setup.num_parameters / 1e6:.1f}M parameters on "
        f"{options.ranks} ranks, batches of {options.batch} x {options.context} tokens per rank."
    )
    warn_if_busy()
    results = run_ranks(_measure, options.ranks, setup, options.rounds, options.steps)
    plan, _ = results[0]
    by_rank = [timed for _, timed in results]
    print(
        f"Owners have {plan['owned'] / 1e6:.1f} MB of matrices; by the plan rank 0 receives "
        f"{plan['received'] / 1e6:.2f} MB, and the most expensive rank has {plan['balance']:.3f} of the mean cost."
    )
    first = by_rank[0]
    base = first[_BY_OWNERS_ROWS]
    rows = [
        [
            name,
            ratio(one.seconds, base.seconds),
            f"{Spread.of(one.seconds).median * 1e3:.1f} ms",
            ratio(one.in_optimizer, base.in_optimizer),
            f"{Spread.of(one.in_optimizer).median * 1e3:.1f} ms",
            f"{sum(Spread.of(each[name].sent).median for each in by_rank) / len(by_rank) / 1e6:.2f} MB",
            f"{max(each[name].state for each in by_rank) / 1e6:.1f} MB",
        ]
        for name, one in first.items()
    ]
    header = ["", "step, of the first", "step", "optimizer, of the first", "optimizer", "sent in it", "state, most"]
    print(table(header, rows))
    losses = {name: one.losses for name, one in first.items()}
    worst = max(
        abs(loss - other) / abs(other)
        for found in losses.values()
        for loss, other in zip(found, losses[_BY_OWNERS_ROWS], strict=True)
    )
    print(f"Losses of the first steps are within {worst:.1e} of each other.")
    return 0 if worst <= _TOLERANCE else 1


@dataclass
class Timed:
    """A rank's seconds and bytes per step, with an entry for each round; bytes of state; first losses."""

    seconds: list[float] = field(default_factory=list)
    in_optimizer: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    state: int = 0
    losses: list[float] = field(default_factory=list)


# --- contestants


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    return "blocks." in name and len(shape) == 2


_MUON = functools.partial(torch.optim.Muon, lr=0.02)
_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True)


def _by_owners(model: nn.Module) -> tuple[Step, list[Any], Any]:
    optimizer = fsdp.OwnedOptimizer(
        model, [{"params": _is_matrix, "optimizer": _MUON}, {"optimizer": _ADAMW, "sharded": True}]
    )
    return optimizer.step, [optimizer], optimizer.plan


def _divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if _is_matrix(name, param.shape)]
    return matrices, [param for name, param in named if not _is_matrix(name, param.shape)]


def _by_dtensors(model: nn.Module) -> tuple[Step, list[Any], Any]:
    matrices, rest = _divided(model)
    muon, adamw = _MUON(matrices), _ADAMW(rest)

    def step() -> None:
        muon.step()
        adamw.step()

    return step, [muon, adamw], None


def _by_hand(model: nn.Module) -> tuple[Step, list[Any], Any]:
    matrices, rest = _divided(model)
    copies = [nn.Parameter(_full(param.detach()).clone()) for param in matrices]
    muon, adamw = _MUON(copies), _ADAMW(rest)

    @torch.no_grad()
    def step() -> None:
        for copy, param in zip(copies, matrices, strict=True):
            copy.grad = _full(param.grad)
        muon.step()
        for copy, param in zip(copies, matrices, strict=True):
            rows = copy.chunk(dist.get_world_size())[dist.get_rank()]
            param.to_local().copy_(rows)  # type: ignore[attr-defined]
        adamw.step()

    return step, [muon, adamw], None


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_BY_OWNERS_ROWS = "owners, ours-rows"
_WAYS: dict[str, tuple[str, Callable[[nn.Module], tuple[Step, list[Any], Any]]]] = {
    _BY_OWNERS_ROWS: (OURS_ROWS, _by_owners),
    "owners, ours-orig": (OURS_ORIG, _by_owners),
    "fsdp2, DTensors": (FSDP2, _by_dtensors),
    "fsdp2, by hand": (FSDP2, _by_hand),
}


# --- on a rank


def _measure(setup: Setup, num_rounds: int, steps: int) -> tuple[dict[str, float], dict[str, Timed]]:
    device = this_device()
    models = {name: build(CONTESTANTS[wrap], setup, device) for name, (wrap, _) in _WAYS.items()}
    made = {name: _WAYS[name][1](model) for name, model in models.items()}
    found = {name: Timed() for name in _WAYS}
    windows = [setup.windows(index, device) for index in range(_FIRST_STEPS + 1)]

    def train(name: str, index: int) -> tuple[float, float, int]:
        model, (step, _, _) = models[name], made[name]
        loss = next_byte_loss(model, windows[index])
        loss.backward()
        dist.barrier()  # so that nobody's optimizer waits for another one's backward
        sent, start = bytes_sent() or 0, time.perf_counter()
        step()
        dist.barrier()
        seconds, sent = time.perf_counter() - start, (bytes_sent() or 0) - sent
        model.zero_grad()
        return loss.item(), seconds, sent

    for name in _WAYS:
        found[name].losses = [train(name, index)[0] for index in range(_FIRST_STEPS)]
        found[name].state = sum(map(_nbytes, made[name][1])) + (
            sum(copy.nbytes for copy in made[name][1][0].param_groups[0]["params"]) if "by hand" in name else 0
        )
    settle()
    for order in rotated(list(_WAYS), num_rounds):
        for name in order:
            dist.barrier()
            start, in_optimizer, sent = time.perf_counter(), 0.0, 0
            for _ in range(steps):
                _, seconds, nbytes = train(name, _FIRST_STEPS)
                in_optimizer, sent = in_optimizer + seconds, sent + nbytes
            found[name].seconds.append((time.perf_counter() - start) / steps)
            found[name].in_optimizer.append(in_optimizer / steps)
            found[name].sent.append(sent / steps)
    plan = made[_BY_OWNERS_ROWS][2]
    costs = list(plan.costs.values())
    about = {
        "owned": 4.0 * sum(plan.numels.values()),
        "received": float(plan.received(dist.get_rank())),
        "balance": max(costs) * len(costs) / sum(costs),
    }
    return about, found


def _nbytes(optimizer: Any) -> int:
    """Return the bytes of state on this rank, with the copies of values that owners keep."""
    held = [_local(value) for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    if isinstance(optimizer, fsdp.OwnedOptimizer):
        held += [param for param in optimizer.optimizers[0].param_groups[0]["params"] if not param.is_meta]
    return sum(each.nbytes for each in held)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    sys.exit(main())
