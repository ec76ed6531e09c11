"""Reports in a single line whether the contestants of a benchmark compute the same losses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks._contestants import CONTESTANTS, DDP, Kind

# A different order of the sums over a batch changes a loss by a relative 1e-7, which grows over a few steps.
_SAME_LOSS = 1e-5


def report_losses(losses: Mapping[str, Sequence[Sequence[float]]], tolerances: Sequence[float] | None = None) -> bool:
    """Print how the first losses of each contestant compare with DDP's; return whether all are the same.

    Args:
        losses: by contestant, then by rank, then by step. DDP must be included; the floors, which do not communicate,
            and lossy contestants are excluded.
        tolerances: the relative tolerance of the loss of each step; by default float32 noise.
    """
    reference = losses[DDP]
    verdicts, same = [], True
    for name, ranks in losses.items():
        if name == DDP or CONTESTANTS[name].kind is Kind.FLOOR or CONTESTANTS[name].is_lossy:
            continue
        allowed = tolerances or [_SAME_LOSS] * len(reference[0])
        distances = [
            (abs(mine - other) / abs(other), tolerance)
            for rank, reference_rank in zip(ranks, reference, strict=True)
            for mine, other, tolerance in zip(rank, reference_rank, allowed, strict=True)
        ]
        distance = max(each for each, _ in distances)
        if all(each <= tolerance for each, tolerance in distances):  # and not `max`, which overlooks what is no number
            verdicts.append(f"{name} {'equal to the bit' if distance == 0 else f'within {distance:.1e}'}")
        else:
            same = False
            verdicts.append(f"{name} DIFFERS by {distance:.1e}, it has {ranks[0]} on rank 0")
    steps = ", ".join(f"{loss:.4f}" for loss in reference[0])
    print(f"\nThe first losses, against DDP's ({steps} on rank 0): {'; '.join(verdicts)}", flush=True)
    if not same:
        print("Contestants that compute different things cannot be compared.", file=sys.stderr)
    return same
