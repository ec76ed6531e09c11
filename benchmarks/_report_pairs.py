"""The cost of original parameters in the optimizer: contestants with and without them, and peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks._contestants import FSDP1_APART, FSDP1_FLAT, FSDP1_ORIG, FSDP2, OURS, OURS_ORIG
from benchmarks._measure import ratio, table

_PAIRS = (
    (OURS_ORIG, OURS),
    (FSDP1_ORIG, FSDP1_FLAT),
    (OURS_ORIG, FSDP1_ORIG),
    (OURS_ORIG, FSDP1_APART),
    (OURS_ORIG, FSDP2),
)
_MISSING = "-"


def report_original(columns: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Print the ratios of the pairs that ran, if `ours` with original parameters ran.

    Args:
        columns: by figure, then by contestant: a value for each round, or a single value.
    """
    ran = {name for values in columns.values() for name in values}
    pairs = [pair for pair in _PAIRS if ran.issuperset(pair)]
    if OURS_ORIG not in ran or not pairs:
        return
    rows = [[f"{one} / {other}", *(_ratio(values, one, other) for values in columns.values())] for one, other in pairs]
    print("\nOriginal parameters in the optimizer (use_orig_params=True), as ratios.")
    print(table(["", *columns], rows), flush=True)


def _ratio(values: Mapping[str, Sequence[float]], one: str, other: str) -> str:
    return ratio(values[one], values[other]) if one in values and all(values.get(other, [0])) else _MISSING
