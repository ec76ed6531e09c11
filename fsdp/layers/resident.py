"""Units that stay unsharded between forwards without gradients, for generation: `resident`.

Each generated token requires a forward, which spends most of the time in all-gathers of unchanged parameters. The
units to keep are chosen as in the relaxed knapsack problem (Dantzig, "Discrete-variable extremum problems", 1957): by
saved bytes for each byte of memory. A resident unit saves an all-gather of its size in each run, so this ratio is the
number of runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp.distributed import passes
from fsdp.distributed.communicator import during
from fsdp.distributed.consensus import agree_on, from_everyone
from fsdp.engine.checks import Checks
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.observers import attached
from fsdp.engine.runtime import Runtime, runtime_of_root
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.verify import require_sharded


@contextmanager
def resident(model: nn.Module, budget_bytes: int | None = None) -> Iterator[tuple[str, ...]]:
    """Collective at the beginning. Keep units unsharded between forwards without gradients, within a memory budget. ::

        with fsdp.resident(model, budget_bytes=8 << 30), torch.no_grad():
            for batch in batches:
                output = model(batch)

    The units are all-gathered when the context begins, and resharded when the context ends. Inside, their forwards
    without gradients do not communicate. A forward with gradients uses the unsharded parameters and reshards each unit
    as usual. After an optimizer step, the next forward all-gathers the new values.

    If all units are resident, ranks may run different numbers of forwards, so ``generate`` does not require
    ``synced_gpus``. Otherwise, all ranks must run the same forwards.

    Units with the most runs in earlier contexts of this model are chosen first; with the same number of runs, the
    innermost units first, then the smallest. A unit that does not fit is skipped. If parameters are changed inside the
    context, all ranks must make the same changes, because values are not compared between ranks.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        budget_bytes: the maximum size of all resident units, in bytes of unsharded parameters in the compute dtype;
            None (the default) means no limit. Other units need additional memory during their computation.

    Yields:
        The names of the resident units.

    Raises:
        TypeError: if `model` is not sharded.
        ValueError: for a negative budget.
        RuntimeError: inside a forward, a backward or `fsdp.join`; for an inner unit; on every rank, if budgets differ
            between ranks.
    """
    root = require_sharded(model, "fsdp.resident")
    runtime = runtime_of_root(root, "fsdp.resident")
    runtime.ensure_idle("enter fsdp.resident()")
    chosen: Sequence[Unit] = ()
    orders = _Orders(runtime)
    try:
        with during("fsdp.resident()"):
            agree_on(root.everyone, "budgets in fsdp.resident", str(budget_bytes))
            if budget_bytes is not None and budget_bytes < 0:
                raise ValueError(f"fsdp.resident: budget_bytes must not be negative, got {budget_bytes}")
            runtime.checks.trust_values(root)
            every = _chosen(runtime, budget_bytes)
            chosen = [unit for unit in every if not unit.policy.keeps_for_inference]
            for place, unit in enumerate(chosen):
                unit.policy.keeps_for_inference = True
                for started in chosen[place : place + 2]:  # prefetches an all-gather
                    started.unshard()
                unit.wait_for_unshard()
                unit.is_spare = True  # no backward will use the parameters
        runtime.checks = orders
        with attached(orders, runtime.units):
            yield tuple(unit.name for unit in every)
    finally:
        orders.restore()
        passes.path.forget(root.ranks)
        for unit in chosen:
            unit.policy.keeps_for_inference = False
        for unit in () if runtime.is_computing else chosen:
            for handle in unit.handles:
                handle.absorb()
            unit.reshard()


_runs: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()  # forwards without gradients in contexts


class _Orders(Checks):
    """Checks that also count forwards without gradients, and record their order separately.

    Ranks may run different numbers of these forwards. The order of forwards with gradients, used to prefetch units and
    keep them for the backward, is the same on all ranks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._checks = runtime, runtime.checks
        self._before = runtime._forward_order
        around = runtime.checks
        self._training: ExecutionOrder[Unit] = around._training if isinstance(around, _Orders) else self._before
        self._inference = runtime.new_order()

    def forward(self, unit: Unit, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            _runs[unit] = _runs.get(unit, 0) + 1

    def before_forward(self, unit: Unit) -> None:
        self._checks.before_forward(unit)
        if torch.is_grad_enabled() and self._runtime._forward_order is self._inference:
            passes.path.forget(self._runtime.root.ranks)  # the counts of passes may differ between ranks
        self._runtime._forward_order = self._training if torch.is_grad_enabled() else self._inference

    def trust_values(self, unit: Unit) -> None:
        self._checks.trust_values(unit)

    def merge_written(self, handle: FlatParamHandle) -> None:
        self._checks.merge_written(handle)

    def restore(self) -> None:
        self._runtime.checks, self._runtime._forward_order = self._checks, self._before


def _chosen(runtime: Runtime, budget_bytes: int | None) -> list[Unit]:
    """Collective. Return the units to keep, the most useful first."""
    runs_here = [_runs.get(unit, 0) for unit in runtime.units]
    runs = map(sum, zip(*from_everyone(runtime.root.everyone, runs_here), strict=True))
    depths = dict.fromkeys(runtime.units, 0)
    for unit in runtime.units:
        for inner in units_in(unit):
            depths[inner] += 1
    sizes = [
        sum(one.unsharded.full.nbytes for one in unit.handles if not one.unsharded.is_shard)  # without shards
        for unit in runtime.units
    ]
    ranked = sorted(
        zip(runtime.units, runs, sizes, strict=True), key=lambda each: (-each[1], -depths[each[0]], each[2])
    )
    found, left = [], math.inf if budget_bytes is None else budget_bytes
    for unit, _, nbytes in ranked:
        if nbytes <= left:
            found.append(unit)
            left -= nbytes
    return found
