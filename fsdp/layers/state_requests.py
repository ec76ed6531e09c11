"""Requests describe the running operation on the state of units; see `Unit.request`.

A unit has at most one request of each kind. The outermost unit defines how a state dict is created or loaded, for all
units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp.distributed.communicator import CollectiveError
from fsdp.distributed.consensus import Ranks, number_among, told_by_all
from fsdp.engine.precision import check_dtype
from fsdp.engine.unit import TrainingState, Unit, units_in


class Progress:
    """Reports errors of an operation to the other ranks, before each collective of the operation and at the end.

    The iteration over modules calls hooks and methods of the user, which may fail on a single rank.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.ranks = ranks
        self._what = what
        self.is_over = False  # a rank failed, or the operation is complete

    def report(self, error: Exception | None = None, value: Any = None) -> list[Any]:
        """Collective until `is_over`. Return all ranks' values; raise the error of `told_by_all` if a rank failed."""
        if self.is_over:
            return []

        def outcome() -> tuple[None, Any]:
            if error is not None:
                raise error
            return None, value

        self.is_over = True  # also if the exchange fails
        _, told = told_by_all(self.ranks, self._what, outcome)
        self.is_over = False
        return told

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Collective. Report at the end whether this rank failed inside the context."""
        try:
            yield
        except CollectiveError:
            raise  # other ranks do not answer
        except Exception as error:
            self.report(error)
            raise
        self.report()
        self.is_over = True


class FirstRank(Progress):
    """Progress of loading a state dict that only the first rank has, which sends changes to the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks, "load its state dict")
        self.is_here = number_among(ranks) == 0

    def serves(self, unit: Unit) -> bool:
        """Return whether a unit is sharded and replicated over exactly these ranks."""
        return tuple(self.ranks) == unit.everyone


@dataclass(frozen=True)
class Saving:
    """A state dict is being created."""

    progress: Progress  # of the ranks of the outermost unit
    dtype: torch.dtype | None  # of floating-point parameters; None does not cast them
    device: torch.device | None  # of tensors; None means the compute device
    rank0_only: bool  # only the first rank receives the state dict

    @property
    def ranks(self) -> Ranks:
        return self.progress.ranks

    @property
    def is_here(self) -> bool:
        """Return whether this rank receives the state dict."""
        return not self.rank0_only or number_among(self.ranks) == 0

    def check(self, keep_vars: bool) -> None:
        """Raise ValueError for a dtype to which parameters cannot be cast."""
        if self.dtype is not None:
            check_dtype("dtype", self.dtype)
            if keep_vars:
                raise ValueError(
                    "state_dict(keep_vars=True) returns the tensors themselves, so it conflicts with dtype: omit "
                    "keep_vars or dtype"
                )


class Exporting:
    """The state dict of this unit is being created, instead of an enclosing unit's."""


class LocalState:
    """State dicts contain this rank's shards."""


class ShardedState:
    """Modules list this rank's parts of parameters, for a sharded state dict."""


class Filling:
    """Modules initialize their parameters."""


class Converting:
    """The module is being cast or moved."""


@dataclass(frozen=True)
class LoadPass:
    """A state dict is being loaded."""

    read: frozenset[Unit] | None = None  # units whose values the load may read; None if it only copies
    source: FirstRank | None = None  # the first rank, if only this rank has the values

    def source_of(self, unit: Unit) -> FirstRank | None:
        """Return the only rank with the values of a unit's parameters; None if every rank has them."""
        return self.source if self.source is not None and self.source.serves(unit) else None


@dataclass(frozen=True)
class Summoning:
    """Parameters are summoned."""

    keeps_changes: bool  # changed values are stored in the shards
    with_grads: bool  # the parameters have unsharded gradients
    rank0_only: bool  # only the first rank lists unsharded parameters
    on_host: bool  # unsharded parameters are in host memory

    @property
    def described(self) -> str:
        """The arguments of `summon_full_params`."""
        return (
            f"volatile={not self.keeps_changes}, rank0_only={self.rank0_only}, with_grads={self.with_grads}, "
            f"offload_to_cpu={self.on_host}"
        )

    def require_shown_by(self, other: Summoning | None, unit: Unit) -> None:
        """Raise RuntimeError if the unit is summoned already, in a different form."""
        if other is None:
            raise RuntimeError(
                f"{unit.name}: its state is being loaded or saved; summon parameters before or after that"
            )
        differing = [
            f"{name}={asked}"
            for name, asked, given in (
                ("volatile", not self.keeps_changes, not other.keeps_changes),
                ("rank0_only", self.rank0_only, other.rank0_only),
                ("offload_to_cpu", self.on_host, other.on_host),
                ("with_grads", self.with_grads, self.with_grads and other.with_grads),
            )
            if asked is not given
        ]
        if differing:
            raise RuntimeError(
                f"nested summon_full_params() must have the same arguments: {unit.name} is summoned already, without "
                f"{', '.join(differing)}. Leave the outer context first, or pass the same arguments."
            )


@contextmanager
def saving(root: Unit, form: Saving) -> Iterator[Saving]:
    """Create the state dict of all units of the tree in this form, or in the form chosen by an enclosing unit."""
    outer = root.request(Saving)
    if outer is not None:
        yield outer
        return
    units = list(units_in(root))
    wanted = (handle.storage.state_device for unit in units for handle in unit.handles)
    form = replace(form, device=form.device or next(filter(None, wanted), None))
    with serving(units, form):
        yield form


@contextmanager
def serving(units: Iterable[Unit], request: object) -> Iterator[None]:
    """Set a request on the units inside the context, replacing another request of the same kind."""
    kind = type(request)
    outer = {unit: unit.requests.get(kind) for unit in units}
    for unit in outer:
        unit.requests[kind] = request
    try:
        yield
    finally:
        for unit, before in outer.items():
            del unit.requests[kind]
            if before is not None:
                unit.requests[kind] = before


def require_shards(units: Iterable[Unit], what: str) -> None:
    """Raise RuntimeError inside a forward or backward, and if the modules of a unit do not list shards."""
    for unit in units:
        unit.require_idle(what)
        is_shown = any(handle.presentation.is_exposed for handle in unit.visible_handles)  # by another unit
        if is_shown or unit.state is TrainingState.SUMMON_FULL_PARAMS:
            raise RuntimeError(f"cannot {what}: {unit.name} is inside summon_full_params(). Leave the context first.")
