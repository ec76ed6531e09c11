"""Low-rank adapters on a frozen base, with this library and with torch, in the same run.

    python -m benchmarks.lora
    python -m benchmarks.lora --base float32 --only ours fsdp2
    python -m benchmarks.lora --adapters base
    python -m benchmarks.lora --int8

Ratios are first, because only ratios are valid on other machines; bytes are exact. `docs/benchmarks.md` explains the
columns. Exits with 1 if the contestants compute different losses, or if `ours` has gradients, optimizer state or
messages for parameters that are not trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import (
    CONTESTANTS,
    DDP,
    FLOOR,
    FSDP1_APART,
    FSDP1_ORIG,
    FSDP2,
    OURS,
    OURS_INT8,
    OURS_ORIG,
    SHARDED_FLOOR,
    Kind,
    choose,
)
from benchmarks._figures import Figures, join, with_memory, without_refused
from benchmarks._lora import LoraSetup, costs
from benchmarks._measure import table, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._report_losses import report_losses
from benchmarks._report_steps import report_memory, report_original_parameters, report_times
from benchmarks._step_options import add_options, check_counts, describe, write_json
from benchmarks._training import BFLOAT16_TOLERANCES, train_interleaved

AMONG = (OURS, OURS_ORIG, FSDP1_ORIG, FSDP1_APART, FSDP2, DDP, FLOOR, SHARDED_FLOOR)
_ALWAYS = (DDP, FLOOR, SHARDED_FLOOR)  # everything is related to them
_HOLDS_WITHIN = 0.01  # padding, and the optimizer's step counts
_HEADERS = 400  # bytes that gloo adds to a collective
_MISSING = "-"
_HOLDS = "yes"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    setup = _setup(options)
    always = (*_ALWAYS, OURS_INT8) if options.int8 else _ALWAYS
    names = choose(options.only, among=(*AMONG, OURS_INT8) if options.int8 else AMONG, always=always)
    what = f"adapters of rank {setup.rank} in {_name(setup.adapter_dtype)} on a frozen base in {options.base}"
    print(describe(options, setup, what), flush=True)
    warn_if_busy()
    names = without_refused(setup, names, options.ranks)
    if FSDP1_APART in names:
        print(f"In {FSDP1_APART} every adapter is a unit of its own; in the others it is part of its block's.")
    ranks = run_ranks(
        train_interleaved, options.ranks, setup, names, options.rounds, options.steps, device=setup.device
    )
    figures = {name: join([rank[name] for rank in ranks]) for name in names}
    losses = {name: [rank[name].losses for rank in ranks] for name in names if name != OURS_INT8}  # other weights
    is_narrow = torch.bfloat16 in (setup.base_dtype, setup.adapter_dtype)
    same = report_losses(losses, BFLOAT16_TOLERANCES if is_narrow else setup.float32_tolerances)
    holds = report_bytes(figures, setup, options.ranks)
    report_times(figures, setup)
    if not options.no_memory:
        figures = with_memory(figures, setup, options.ranks, options.memory_runs)
        report_memory(figures, setup)
    report_original_parameters(figures)
    if options.json is not None:
        write_json(options, ranks, figures)
    return 0 if same and holds else 1


def _setup(options: argparse.Namespace) -> LoraSetup:
    base = getattr(torch, options.base)
    return LoraSetup(
        size=options.size,
        batch=options.batch,
        context=options.context,
        foreach=options.foreach,
        device=options.device,
        sgd_rate=0.3,  # adapters have smaller gradients than what they adapt
        rank=options.rank,
        base_dtype=base,
        adapter_dtype=base if options.adapters == "base" else getattr(torch, options.adapters),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lora", description="Training adapters on a frozen base: ours and the peers."
    )
    add_options(parser, AMONG, _ALWAYS, rounds=12)
    add = parser.add_argument
    add("--rank", type=int, default=LoraSetup.rank, help="of the adapters (%(default)s)")
    add("--base", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of what is frozen (%(default)s)")
    add("--adapters", choices=("float32", "base"), default="float32", help="dtype of what is trained (%(default)s)")
    add("--int8", action="store_true", help=f"also {OURS_INT8}, whose frozen layers torchao quantises")
    add("--memory-runs", type=int, default=3, help="runs whose memory figures are spread (%(default)s)")
    options = parser.parse_args(arguments)
    check_counts(parser, options, "rank", "memory_runs")
    return options


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- bytes


def report_bytes(figures: Mapping[str, Figures], setup: LoraSetup, world_size: int) -> bool:
    """Print the bytes held and sent by each sharded contestant with the formulas; return whether `ours` matches."""
    units = setup.units()
    trained = sum(unit.trained_numel for unit in units)
    rows, ours_hold = [], True
    for name, figure in figures.items():
        if not CONTESTANTS[name].is_sharded or figure.held is None or name == OURS_INT8:
            continue
        wanted = costs(setup, name, world_size)
        compared = (
            _compare(figure.held.gradients, wanted.gradients),
            _compare(figure.held.optimizer_state, wanted.optimizer_state),
            _compare(figure.sent, wanted.sent, _HEADERS * figure.collectives),
        )
        rows.append([name, *(cell for cells in compared for cell in cells)])
        if CONTESTANTS[name].kind is Kind.OURS:
            ours_hold &= all(cells[-1] in (_HOLDS, _MISSING) for cells in compared)
    part = f"{world_size - 1}/{world_size}"
    print(
        f"\nBytes of a rank, of {world_size}; {trained:,} of {setup.num_parameters:,} elements are trained. Formulas:"
        f"\n  gradients: trained elements / {world_size} x {setup.adapter_dtype.itemsize}. AdamW's state: twice that."
        f"\n  sent in a step: {part} of what is gathered (blocks twice, the root once; by ours the last block once)"
        "\n  and of the trained elements (twice by peers on gloo, whose reduce-scatter is an all-reduce)."
    )
    header = ["", "gradients", "formula", "holds", "state", "formula", "holds", "sent", "formula", "holds"]
    print(table(header, rows), flush=True)
    if not ours_hold:
        print("Ours has bytes that the formulas do not know.", file=sys.stderr)
    return ours_hold


def _compare(measured: float | None, formula: float, more: float = 0) -> tuple[str, str, str]:
    """Return the measured value, the formula's value, and whether they are equal, except for `more` bytes."""
    if measured is None:
        return _MISSING, f"{formula:,.0f}", _MISSING
    holds = abs(measured - formula) <= _HOLDS_WITHIN * formula + more
    verdict = _HOLDS if holds else f"{measured / formula:.2f} x" if formula else "no"
    return f"{measured:,.0f}", f"{formula:,.0f}", verdict


if __name__ == "__main__":
    sys.exit(main())
