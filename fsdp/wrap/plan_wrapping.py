"""`plan_wrapping` chooses the units of a model, and which of them are resharded after forward, by a memory budget.

Every candidate is evaluated by `plan`. The bytes that a step sends depend little on the division into units: each
parameter is gathered for forward, again for backward if it was resharded between, and each gradient is reduced. So the
units are as large as the budget allows. As many as possible of the units that run last in forward stay unsharded until
backward. Backward begins with these units, so their parameters are kept for the shortest time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from fsdp.engine.forward_hooks import has_forward
from fsdp.engine.precision import MixedPrecision
from fsdp.layers.summary import aligned, size_text
from fsdp.wrap import AutoWrapPolicy, ModuleGraph, force_leaf_classes
from fsdp.wrap.checkpoint_wrapper import checkpoint_wrapper
from fsdp.wrap.plan import Plan, copy_on_meta, plan

# The coarsest units have at most _COARSEST of the model, so that a unit is gathered while another unit computes. The
# finest have at least _FINEST of the coarsest units. Modules with less than _LEAST of a unit belong to the root.
_COARSEST, _FINEST, _LEAST = 1 / 4, 1 / 16, 1 / 10
# Finer units are tried if keeping an additional unit unsharded would save more than this part of the sent bytes.
_WORTHWHILE = 1 / 30
# A search that takes longer reports its plans.
_SILENT_SECONDS = 5.0

CHECKPOINTING, PRECISION, OFFLOAD, TOGETHER = "activation checkpointing", "bfloat16", "offload", "all of these"
_HOW = {
    CHECKPOINTING: "fsdp.checkpoint_wrapper(module) for modules inside of the model",
    PRECISION: "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)",
    OFFLOAD: "offload='cpu'",
}


class _NamedPolicy:
    """An auto-wrap policy that selects modules by name, with the `reshard_after_forward` of each module."""

    def __init__(self, units: Mapping[str, bool]) -> None:
        self._units = units
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def __call__(
        self, module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool = False
    ) -> bool | Mapping[str, Any]:
        if recurse and module_is_root:
            names = {inner: name for name, inner in module.named_modules()}
            absent = sorted(self._units.keys() - set(names.values()))
            if absent:
                raise ValueError(
                    f"this {type(module).__name__} has no module {absent[0]!r}, which was planned to be a unit: wrap "
                    "the module that was passed to plan_wrapping(), or a model with the same structure"
                )
            self._names.update(names)
        name = self._names.get(module, "")
        return recurse or (name in self._units and {"reshard_after_forward": self._units[name]})


@dataclass(frozen=True)
class PlannedWrapping:
    """The units that `plan_wrapping` has chosen, and an auto-wrap policy that selects these units.

    The policy selects the modules with these names in any model that contains them, with the `reshard_after_forward` of
    each. For example, plan a copy on the meta device, and wrap the real model. The policy raises a ValueError if the
    model lacks one of the modules, or if the budget is not met.

    Attributes:
        units: by the name of each unit except the root, whether the unit is resharded after forward; in the order of
            forward.
        plan: the plan of a training with these units.
        memory_budget: the given budget, in bytes.
        remedies: if no candidate fits, plans with measures that lower the peak: "activation checkpointing", "bfloat16",
            "offload" (of parameters, gradients and optimizer state), and "all of these" if multiple measures do.
    """

    units: Mapping[str, bool]
    plan: Plan
    memory_budget: int
    remedies: Mapping[str, Plan]
    _policy: AutoWrapPolicy = field(repr=False, compare=False)

    @property
    def missing(self) -> int:
        """The number of bytes by which the peak exceeds the budget; 0 if the plan fits."""
        return max(0, self.plan.peak - self.memory_budget)

    @property
    def fits(self) -> bool:
        """True if the budget is met."""
        return not self.missing

    def __call__(self, **asked: Any) -> bool | Mapping[str, Any]:
        if not self.fits:
            raise ValueError(str(self))
        return self._policy(**asked)

    def __str__(self) -> str:
        return "\n".join(_described(self))


def plan_wrapping(module: nn.Module, world_size: int, memory_budget: float, **arguments: Any) -> PlannedWrapping:
    """Choose units, and which of them to reshard after forward, for a memory budget and the fewest bytes sent. ::

        wrapping = fsdp.plan_wrapping(model, 64, 40 * 2**30, sample=tokens, mixed_precision=policy)
        model = fsdp.shard(model, wrapping, mixed_precision=policy)

    Nothing is allocated, no process group is required, and the model is not changed. `plan` evaluates the candidates:
    units with the size of blocks, or of modules inside blocks if blocks are too large. As many as possible of the units
    that run last stay unsharded until backward. If no candidate fits, the result contains measures that would help.

    Args:
        module: the plain model; see `plan`.
        world_size: the number of ranks.
        memory_budget: the maximum of `Plan.peak` in bytes. Subtract memory that `plan` does not count, for example
            rounding and fragmentation of the device's allocator. Without a `sample`, activations are not counted.
        **arguments: all other arguments of `plan`, for example `sample`, `loss`, `optimizer`, `replicas` and `backend`,
            and the options of `FullyShardedDataParallel` that the model will be wrapped with.

    Raises:
        TypeError: for `auto_wrap_policy` and `reshard_after_forward`, which this function chooses.
        ValueError, RuntimeError: as `plan`.
    """
    for name in ("auto_wrap_policy", "reshard_after_forward"):
        if name in arguments:
            raise TypeError(f"plan_wrapping() chooses {name}: omit it")
    if not 0 <= memory_budget < math.inf:
        raise ValueError(f"memory_budget is a number of bytes, got {memory_budget:g}")
    search = _Search(module, world_size, int(memory_budget), arguments)
    granularities = _granularities(ModuleGraph(module, (), arguments))
    found: list[PlannedWrapping] = []
    for names in granularities:
        try:
            found.append(search.judge(dict.fromkeys(names, True)))
        except RuntimeError:  # modules read the weights of a layer without calling it, for example of an embedding
            larger = [name for name in names if any(module.get_submodule(name).children())]
            if larger == names:
                raise
            found.append(search.judge(dict.fromkeys(larger, True)))
        if found[-1].fits:
            found[-1] = search.keep_most(found[-1])
            planned = found[-1].plan
            # The maximum part of the sent bytes that is saved by keeping another unit unsharded.
            saving = max((unit.unsharded_bytes for unit in planned.units[1:]), default=0) / max(planned.bytes_sent, 1)
            if not any(found[-1].units.values()) or saving < _WORTHWHILE:
                break
    best = min(found, key=lambda one: (one.missing, one.plan.bytes_sent))
    if best.fits:
        return best
    return replace(best, remedies=search.remedies(best, granularities[0]))


class _Search:
    """The plans of a search. If the search takes long, the first rank reports each plan on stderr."""

    def __init__(self, module: nn.Module, world_size: int, budget: int, arguments: Mapping[str, Any]) -> None:
        self._module, self._world_size, self._budget, self._arguments = module, world_size, budget, arguments
        self._start, self._count = time.monotonic(), 0

    def _plan(self, module: nn.Module, policy: AutoWrapPolicy, arguments: Mapping[str, Any]) -> Plan:
        planned = plan(module, self._world_size, auto_wrap_policy=policy, **arguments)
        self._count += 1
        seconds = time.monotonic() - self._start
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if seconds >= _SILENT_SECONDS and is_first:
            print(
                f"fsdp.plan_wrapping: plan {self._count} after {seconds:.0f} s has a peak of "
                f"{size_text(planned.peak)}, the budget is {size_text(self._budget)}",
                file=sys.stderr,
                flush=True,
            )
        return planned

    def judge(self, units: Mapping[str, bool]) -> PlannedWrapping:
        """Return a candidate with its plan and its actual units: because of ties, some modules do not become units."""
        policy = _NamedPolicy(units)
        planned = self._plan(self._module, policy, self._arguments)
        found = {unit.name: units[unit.name] for unit in planned.units if unit.name in units}
        return PlannedWrapping(found, planned, self._budget, {}, policy)

    def keep_most(self, resharding: PlannedWrapping) -> PlannedWrapping:
        """Return the candidate in which the most units stay unsharded after forward, beginning with the last to run."""
        names = list(resharding.units)

        def keeping(count: int) -> PlannedWrapping:
            return self.judge({name: place < len(names) - count for place, name in enumerate(names)})

        best, fitting, beyond = resharding, 0, len(names)
        worst = keeping(beyond) if names else best
        if worst.fits:
            return min(best, worst, key=lambda one: one.plan.bytes_sent)
        nbytes = {unit.name: unit.unsharded_bytes for unit in best.plan.units}
        guesses = cycle((True, True, False))
        while beyond - fitting > 1:
            count = (fitting + beyond) // 2
            if next(guesses):
                # Each additional resharded unit lowers the peak by its unsharded parameters, as long as these are
                # allocated at the peak. The search therefore usually ends with this guess and the number above the
                # guess. Otherwise, bisection ends the search.
                count, over = beyond, worst.missing
                while over > 0 and count > fitting + 1:
                    count -= 1
                    over -= nbytes[names[len(names) - count - 1]]
            tried = keeping(count)
            if tried.fits:
                best, fitting = tried, count
            else:
                worst, beyond = tried, count
        return best

    def remedies(self, closest: PlannedWrapping, blocks: Iterable[str]) -> dict[str, Plan]:
        """Return plans with measures that lower the peak of a candidate."""

        def planned(remedies: Collection[str]) -> Plan:
            trained, options = self._module, dict(self._arguments)
            if CHECKPOINTING in remedies:
                trained, ignored = copy_on_meta(self._module, self._arguments)
                options |= ignored
                for name in blocks:
                    checkpoint_wrapper(trained.get_submodule(name))
            if PRECISION in remedies:
                options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
            if OFFLOAD in remedies:
                options["offload"] = "cpu"
            return self._plan(trained, closest._policy, options)

        possible = {
            CHECKPOINTING: self._arguments.get("sample") is not None,
            PRECISION: not any(map(self._arguments.get, ("mixed_precision", "compute_dtype"))),
            OFFLOAD: not any(map(self._arguments.get, ("offload", "move_params_to_cpu", "cpu_offload"))),
        }
        found = {remedy: planned({remedy}) for remedy, is_possible in possible.items() if is_possible}
        found = {remedy: one for remedy, one in found.items() if one.peak < closest.plan.peak}
        if len(found) > 1:
            found[TOGETHER] = planned(set(found))
        return found


def _granularities(graph: ModuleGraph) -> list[list[str]]:
    """Return lists of names of possible units, large units first; at least one list, which may be empty."""
    names = {inner: name for name, inner in graph.root.named_modules()}
    numel = {inner: sum(param.numel() for param in graph.uses[inner]) for inner in graph.modules}
    sizes = sorted({numel[inner] for inner in graph.modules if inner is not graph.root}, reverse=True)
    limit = next((size for size in sizes if size <= numel[graph.root] * _COARSEST), max(sizes, default=0))
    least = max(1, limit * _FINEST)
    found = []
    while limit >= least:
        found.append([names[inner] for inner in _largest(graph, numel, limit)])
        limit = next((size for size in sizes if size <= limit / 2), 0)
    return [one for place, one in enumerate(found) if one not in found[:place]] or [[]]


def _largest(graph: ModuleGraph, numel: Mapping[nn.Module, int], limit: int) -> Iterable[nn.Module]:
    """Return the largest modules that have at most `limit` parameters, or that cannot be divided."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        children = [child for _, child in graph.children(module) if numel[child]]
        is_whole = not children or isinstance(module, force_leaf_classes())
        if module is not graph.root and has_forward(module) and (is_whole or numel[module] <= limit):
            if numel[module] >= limit * _LEAST:
                found[module] = None
        elif not is_whole:
            for child in children:
                visit(child)

    visit(graph.root)
    return found


def _described(wrapping: PlannedWrapping) -> Iterator[str]:
    plan, budget = wrapping.plan, size_text(wrapping.memory_budget)
    kept = sum(not reshards for reshards in wrapping.units.values())
    what = f"{len(wrapping.units)} units inside of the outermost one, {kept} of them unsharded until backward"
    if wrapping.fits:
        yield f"Fits into {budget} on each rank: {what}"
        yield ""
        yield str(plan)
        return
    yield f"Nothing fits into {budget} on each rank."
    yield f"The closest misses it by {size_text(wrapping.missing)}: {what}."
    yield ""
    rows = [
        ("", "peak", "on the host", "sent", ""),
        ("as it is", *map(size_text, (plan.peak, plan.host_peak, plan.bytes_sent)), ""),
    ]
    for remedy, one in wrapping.remedies.items():
        more = one.peak - wrapping.memory_budget
        verdict = f"misses it by {size_text(more)}" if more > 0 else "fits"
        rows.append((remedy, size_text(one.peak), size_text(one.host_peak), size_text(one.bytes_sent), verdict))
    yield from aligned(rows)
    yield ""
    yield from (f"{remedy}: {how}" for remedy, how in _HOW.items() if remedy in wrapping.remedies)
