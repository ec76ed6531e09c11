"""The Python overhead of a library: 100 tiny units on torch's fake group of 64 ranks, compared to the peers.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --only ours fsdp2 --skip reductions

The fake group does not communicate and the units have little computation, so the time above the plain module's is
bookkeeping. The ratio to FSDP2 is first. `docs/benchmarks.md` explains the columns. Exits with 1 if the contestants
compute different losses on two real ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.nn.parallel import DistributedDataParallel

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import (
    CONTESTANTS,
    DDP,
    FLOOR,
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    OURS,
    OURS_ORIG,
    OURS_ROWS,
    Contestant,
    Policy,
    choose,
)
from benchmarks._measure import (
    DISPATCHED,
    Spread,
    operations,
    profiled,
    rotated,
    settle,
    synchronize,
    table,
    warn_if_busy,
)
from benchmarks._ranks import run_fake_rank, run_ranks, this_device
from benchmarks._report_losses import report_losses
from benchmarks._report_pairs import report_original
from benchmarks._skipping import Skip, set_ddp_reduction, skipping

AMONG = (OURS, OURS_ORIG, OURS_ROWS, FSDP1_FLAT, FSDP1_ORIG, FSDP2, DDP, FLOOR)
TARGET = 0.3  # of FSDP2's time per unit
WIDTH = 64
_BATCH = 4


@dataclass(frozen=True)
class Workload:
    """The number of units, the linear layers of each, and whether a step clips the gradients."""

    units: int
    layers: int
    clips: bool


class TinyUnits(nn.Module):
    """Many units of one or more linear layers, with a ReLU between the units."""

    def __init__(self, num_units: int, num_layers: int = 1) -> None:
        super().__init__()
        units = ([nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)] for _ in range(num_units))
        self.units = nn.ModuleList(layers[0] if num_layers == 1 else nn.Sequential(*layers) for layers in units)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.relu(unit(x))
        return x


def build(contestant: Contestant, workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    model = TinyUnits(workload.units, workload.layers).to(this_device())
    return contestant.wrap(model, model.units, this_device(), Policy())


def train_step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, clips: bool = False) -> Tensor:
    loss = module(batch).square().mean()
    loss.backward()
    if clips:
        clip(module)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def clip(module: nn.Module) -> None:
    if isinstance(module, TorchFSDP1):  # torch's function does not know its shards
        module.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def optimizer_of(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def first_losses(names: Sequence[str], workload: Workload, num_steps: int = 4) -> dict[str, list[float]]:
    """Return losses of a few steps on a real group, since the fake group has no results. Runs on every rank."""
    batch = torch.randn(_BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = {}
    for name in names:
        module = build(CONTESTANTS[name], workload)
        optimizer = optimizer_of(module, lr=1.0)
        losses[name] = [train_step(module, optimizer, batch, workload.clips).item() for _ in range(num_steps)]
    return losses


@dataclass
class Measured:
    """A contestant on the fake group: CPU seconds per step with an entry for each round, and collectives per step."""

    cpu_seconds: list[float] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)


def train_interleaved(
    names: Sequence[str], workload: Workload, num_rounds: int, steps: int, skip: Skip
) -> dict[str, Measured]:
    """All contestants on the fake group; they take turns, in another order each round."""
    batch = torch.randn(_BATCH, WIDTH, device=this_device())
    modules = {name: build(CONTESTANTS[name], workload) for name in names}
    # Results of the fake group are undefined, so the parameters are not updated.
    optimizers = {name: optimizer_of(module, lr=0.0) for name, module in modules.items()}
    results = {name: Measured() for name in names}
    ddp = modules[DDP]
    if skip is not Skip.REDUCTIONS and isinstance(ddp, DistributedDataParallel):
        # DDP's reduction fails on a fake group, whose futures contain no tensor.
        set_ddp_reduction(ddp, lambda gradients: dist.all_reduce(gradients, async_op=True))
    with skipping(skip, modules.values()):
        for index, order in enumerate(rotated(names, 2 + num_rounds), start=-2):  # two rounds to warm up
            for name in order:
                start = time.process_time()
                for _ in range(steps):
                    train_step(modules[name], optimizers[name], batch, workload.clips)
                if index >= 0:
                    results[name].cpu_seconds.append((time.process_time() - start) / steps)
                synchronize(this_device())  # not measured: the host's time to queue the work is
            if index < 0:
                settle()
        for name in names:
            with profiled() as trace:
                train_step(modules[name], optimizers[name], batch, workload.clips)
            results[name].collectives = operations(trace, DISPATCHED)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    names = choose(options.only, among=AMONG, always=(FSDP2, DDP, FLOOR))
    print(
        f"{options.units} units of {options.layers} Linear({WIDTH}, {WIDTH}), fake group of {options.ranks} ranks, "
        f"{'SGD, clipping' if options.clip else 'SGD'}, {options.rounds} rounds of {options.steps} steps in rotated "
        f"order, {options.device}, torch {torch.__version__}",
        flush=True,
    )
    warn_if_busy()
    workload = Workload(options.units, options.layers, options.clip)
    skip, same = Skip(options.skip), True
    if skip is Skip.NOTHING:
        ranks = run_ranks(first_losses, 2, names, replace(workload, units=min(options.units, 10)))
        same = report_losses({name: [rank[name] for rank in ranks] for name in names})
    else:
        print(f"\nWithout {skip.value}: results are wrong, only the times mean something.")
    results = run_fake_rank(
        *(train_interleaved, options.ranks, names, workload, options.rounds, options.steps, skip),
        device=options.device,
    )
    report(results, options.units)
    if options.json is not None:
        contestants = {name: asdict(result) for name, result in results.items()}
        options.json.write_text(json.dumps({"torch": torch.__version__, "contestants": contestants}, indent=1))
    return 0 if same else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description="Python time per unit and step: ours and the peers."
    )
    parser.add_argument("--units", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="of a unit, with two parameters each (%(default)s)")
    parser.add_argument("--clip", action="store_true", help="gradients by their norm in each step")
    parser.add_argument("--ranks", type=int, default=64, help="of the fake group (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of each contestant in a round (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the units (%(default)s)")
    parser.add_argument("--skip", choices=[skip.value for skip in Skip], default=Skip.NOTHING.value)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(AMONG),
        metavar="NAME",
        help=f"of {', '.join(AMONG)}; {FSDP2}, {DDP} and {FLOOR} always run",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    options = parser.parse_args(arguments)
    for name in ("units", "layers", "ranks", "rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def report(results: Mapping[str, Measured], num_units: int) -> None:
    plain = results[FLOOR].cpu_seconds
    above = {
        name: [mine - least for mine, least in zip(result.cpu_seconds, plain, strict=True)]
        for name, result in results.items()
        if name != FLOOR
    }
    rows = []
    for name, values in above.items():
        per_unit = Spread.of([1e6 * value / num_units for value in values])
        rows.append(
            [
                name,
                str(Spread.of_ratios(values, above[FSDP2])),
                f"{per_unit.median:.0f} ({per_unit.low:.0f}-{per_unit.high:.0f})",
                f"{1000 * statistics.median(results[name].cpu_seconds):.1f}",
                f"{sum(results[name].collectives.values())}",
            ]
        )
    rows.append([FLOOR, "-", "-", f"{1000 * statistics.median(plain):.1f}", "0"])
    print("\nCPU time of a unit and step above the plain module's.")
    print(table(["", "ratio to fsdp2", "us per unit", "step ms", "collectives"], rows))
    report_original({"CPU above the plain module": above})
    if OURS in above:
        ratio = Spread.of_ratios(above[OURS], above[FSDP2]).median
        verdict = "met" if ratio <= TARGET else "MISSED"
        print(f"\n{ratio:.3f} of fsdp2's, at most {TARGET:.2f} wanted: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
