"""Two emulated machines in network namespaces: the speed of training on a slow link.

    python -m benchmarks.two_machines
    python -m benchmarks.two_machines --rates 200 --rounds 4 --only ours fsdp2-prefetch
    python -m benchmarks.two_machines --quantised --only ours

Requires Linux, root and iproute2; otherwise names the missing requirement and exits with 0. docs/benchmarks.md
explains the columns. Exits with 1 if contestants compute different losses.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import (
    DDP,
    FLOOR,
    FSDP1_FLAT,
    FSDP2,
    FSDP2_PREFETCH,
    OURS,
    OURS_4_BIT,
    OURS_8_BIT,
    SHARDED_FLOOR,
    choose,
)
from benchmarks._figures import Figures, best_peers, join, with_memory
from benchmarks._machines import Machine, NotAllowedError, raw_bandwidth, two_machines
from benchmarks._measure import Spread, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._report_bound import least_bytes, of_the_bound, report_bounds
from benchmarks._report_losses import report_losses
from benchmarks._report_steps import report_memory, report_times
from benchmarks._step_options import add_options, check_counts, describe, write_json
from benchmarks._training import Rounds, Setup, train_interleaved

AMONG = (OURS, FSDP1_FLAT, FSDP2, FSDP2_PREFETCH, DDP, FLOOR, SHARDED_FLOOR)
_QUANTISED = (OURS_8_BIT, OURS_4_BIT)
_ALWAYS = (DDP, FLOOR, SHARDED_FLOOR)  # whose losses everybody must have, and what bounds are computed from

# The targets of `ours`: the maximum ratio to the best sharded peer's step, and by Mbit/s the minimum ratio to the
# bound.
TARGET_STEP = 0.6
TARGET_BOUND = {1000.0: 0.8, 200.0: 0.9}

_WORLD_SIZE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        with two_machines() as machines:
            good = True
            for mbits in options.rates:
                good &= _speed(machines, mbits, options)
    except NotAllowedError as reason:
        print(f"skipped, this system makes no two machines: {reason}")
        return 0
    return 0 if good else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_machines",
        description="Two machines on one: steps on a slow link.",
    )
    add_options(parser, AMONG, _ALWAYS, rounds=6)
    # So many tokens that computing takes about as long as the wire at 1 Gbit/s: then both have to be overlapped.
    parser.set_defaults(batch=10, steps=2)
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1000, 200], metavar="MBIT", help="of the link (1000 200)"
    )
    parser.add_argument(
        "--quantised", action="store_true", help=f"also {' and '.join(_QUANTISED)}: fsdp.compress with 8-bit gathers"
    )
    options = parser.parse_args(arguments)
    check_counts(parser, options)
    if options.ranks != _WORLD_SIZE or options.device != "cpu":
        parser.error("there is one rank on each of two machines, on CPU")
    if min(options.rates) < 1:
        parser.error("--rates must be at least 1 Mbit/s")
    return options


# --- a slow link


def _speed(machines: tuple[Machine, Machine], mbits: float, options: argparse.Namespace) -> bool:
    setup = Setup(size=options.size, batch=options.batch, context=options.context, foreach=options.foreach)
    names = choose(options.only, among=AMONG, always=_ALWAYS) + list(_QUANTISED if options.quantised else ())
    print(f"\n=== {mbits:g} Mbit/s\n{describe(options, setup, 'two machines')}", flush=True)
    warn_if_busy()
    bandwidth = _limited(machines, mbits)
    for machine in machines:
        machine.limit(None)  # what comes before the rounds is not timed, and may be quick
    job = machines, mbits, setup, names, options.rounds, options.steps
    ranks = run_ranks(_train, _WORLD_SIZE, *job, machines=machines)
    figures = {name: join([rank[name] for rank in ranks]) for name in names}
    same = report_losses({name: [rank[name].losses for rank in ranks] for name in names})
    report_times(figures, setup)
    report_bounds(figures, setup, bandwidth, _WORLD_SIZE)
    if not options.no_memory:
        figures = with_memory(figures, setup, _WORLD_SIZE, machines=machines)
        report_memory(figures, setup)
    _report_targets(figures, setup, mbits, bandwidth)
    if options.json is not None:
        options = argparse.Namespace(**{**vars(options), "json": _by_rate(options.json, mbits)})
        write_json(options, ranks, figures)
    return same


def _limited(machines: tuple[Machine, Machine], mbits: float) -> float:
    """Limit the link, and measure its bandwidth in bytes per second."""
    for machine in machines:
        machine.limit(mbits)
    bandwidth = raw_bandwidth(machines, mbits)
    print(f"Plain sockets carry {bandwidth * 8 / 1e6:.1f} Mbit/s each way at once; headers take the rest.", flush=True)
    return bandwidth


def _train(
    machines: Sequence[Machine], mbits: float, setup: Setup, names: Sequence[str], num_rounds: int, steps: int
) -> dict[str, Rounds]:
    def limit() -> None:
        machines[dist.get_rank()].limit(mbits)
        dist.barrier()

    return train_interleaved(setup, names, num_rounds, steps, before_rounds=limit)


def _report_targets(figures: Mapping[str, Figures], setup: Setup, mbits: float, bandwidth: float) -> None:
    """Print `ours` relative to its targets, if `ours` ran."""
    ours, peer = figures.get(OURS), best_peers(figures).step
    if ours is None:
        return
    print()
    if peer is not None:
        ratio = Spread.of_ratios(ours.seconds, figures[peer].seconds)
        verdict = "met" if ratio.median <= TARGET_STEP else "MISSED"
        print(f"step time: {ratio} of the best sharded peer's ({peer}), at most {TARGET_STEP:.2f} wanted: {verdict}")
    if mbits in TARGET_BOUND:
        part = of_the_bound(figures, OURS, least_bytes(OURS, setup, _WORLD_SIZE) / bandwidth)
        verdict = "met" if part.median >= TARGET_BOUND[mbits] else "MISSED"
        print(f"{part} of the physical bound, at least {TARGET_BOUND[mbits]:.2f} wanted: {verdict}", flush=True)


def _by_rate(path: Path, mbits: float) -> Path:
    return path.with_name(f"{path.stem}-{mbits:g}{path.suffix}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed then, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
