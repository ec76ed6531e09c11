"""The tables of `benchmarks.step` and `benchmarks.lora`: time and bytes, memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks._contestants import CONTESTANTS, DDP, FLOOR, Kind
from benchmarks._figures import Figures, best_peers, cpu_above_floor, floor_of, live_bytes, peak_bytes
from benchmarks._measure import Spread, ratio, table
from benchmarks._report_pairs import report_original
from benchmarks._training import Setup

_BYTES = 4  # of a float32 parameter
_MISSING = "-"


def _label(name: str, setup: Setup) -> str:
    return f"{name} (float32)" if setup.policy.is_mixed and name in (DDP, FLOOR) else name


def _share_of_float32(figure: Figures) -> str:
    if figure.sent is None or not figure.sent_in_float32:
        return _MISSING
    return f"{figure.sent / figure.sent_in_float32:.2f}"


def report_times(figures: Mapping[str, Figures], setup: Setup) -> None:
    peer, cpu_peer, *_ = best_peers(figures)
    rows = []
    for name, figure in figures.items():
        is_floor = CONTESTANTS[name].kind is Kind.FLOOR
        above, floor = cpu_above_floor(figures, name), figures[floor_of(name)].seconds
        rows.append(
            [
                _label(name, setup),
                str(Spread.of_ratios(figure.seconds, figures[peer].seconds)) if peer else _MISSING,
                _MISSING if is_floor else str(Spread.of_ratios(figure.seconds, floor)),
                _MISSING
                if is_floor or not cpu_peer
                else str(Spread.of_ratios(above, cpu_above_floor(figures, cpu_peer))),
                _MISSING if figure.sent is None else f"{figure.sent / setup.num_parameters / _BYTES:.2f}",
                *([_MISSING if is_floor else _share_of_float32(figure)] if setup.policy.is_mixed else []),
                f"{figure.collectives:g}",
                f"{1000 * statistics.median(figure.seconds):.0f}",
                _MISSING if is_floor else f"{1000 * statistics.median(above):.0f}",
            ]
        )
    header = [
        "",
        "step / best peer",
        "step / floor",
        "CPU+ / best peer",
        "sent",
        *(["sent / float32"] if setup.policy.is_mixed else []),
        "colls",
        "step ms",
        "CPU+ ms",
    ]
    print(f"\nBest sharded peer: {peer or 'none'} by step time, {cpu_peer or 'none'} by CPU above the floor.")
    print(table(header, rows), flush=True)


def report_memory(figures: Mapping[str, Figures], setup: Setup) -> None:
    peaks, lives = peak_bytes(figures), live_bytes(figures)
    *_, peer, live_peer = best_peers(figures)
    rows = []
    for name, figure in figures.items():
        if name not in peaks or name not in lives:
            continue
        runs: list[Sequence[float]] = [
            peaks[name],
            lives[name],
            [run.between for run in figure.live],
            [run.built for run in figure.resident],
        ]
        rows.append(
            [
                _label(name, setup),
                ratio(peaks[name], peaks[peer]) if peer else _MISSING,
                ratio(lives[name], lives[live_peer]) if live_peer else _MISSING,
                *(f"{statistics.median(counts) / setup.num_parameters:.2f}" for counts in runs),
                f"{statistics.median(peaks[name]) / 2**20:.0f}",
            ]
        )
    header = ["", "peak / best peer", "live / best peer", "peak", "live", "between", "building", "peak MiB"]
    best = f"{peer or 'none'} by peak, {live_peer or 'none'} by live bytes"
    print(f"\nMemory of a rank in bytes per parameter. Best sharded peer: {best}.")
    print(table(header, rows), flush=True)


def report_original_parameters(figures: Mapping[str, Figures]) -> None:
    """Print the cost of the optimizer's original parameters in all figures."""
    report_original(
        {
            "step": {name: figure.seconds for name, figure in figures.items()},
            "CPU+": {name: cpu_above_floor(figures, name) for name in figures},
            "sent": {name: [figure.sent] for name, figure in figures.items() if figure.sent is not None},
            "peak": peak_bytes(figures),
            "live": live_bytes(figures),
        }
    )
