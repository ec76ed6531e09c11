"""Requests describe the running operation on the state of units; see `Unit.request`.

A unit has at most one request of each kind. The outermost unit decides how a state dict is created or loaded, for all
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
    """Ranks report errors of an operation to each other before each of its collectives, and at its end.

    The walk over modules calls hooks and methods of the user, which may fail on a rank.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.ranks = ranks
        self._what = what
        self.is_over = False  # a rank failed, or all is done

    def report(self, error: Exception | None = None, value: Any = None) -> list[Any]:
        """Collective until it is over. Return the values of all ranks; raise as `told_by_all` if a rank has failed."""
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
        """Collective. Report at the end whether this rank has failed inside the context."""
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
    """The load of a state dict that only the first of several ranks has, which tells the others of its changes."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks, "load its state dict")
        self.is_here = number_among(ranks) == 0

    def serves(self, unit: Unit) -> bool:
        """Return whether a unit's parameters are shared by just these ranks."""
        return tuple(self.ranks) == unit.everyone


@dataclass(frozen=True)
class Saving:
    """A state dict is being taken."""

    progress: Progress  # of the ranks that hold a part of the outermost unit
    dtype: torch.dtype | None  # of floating-point parameters; None leaves them in their own
    device: torch.device | None  # of tensors; None leaves them where they are computed with
    rank0_only: bool  # only the first of the ranks is to have it

    @property
    def ranks(self) -> Ranks:
        return self.progress.ranks

    @property
    def is_here(self) -> bool:
        """Return whether this rank is to have it."""
        return not self.rank0_only or number_among(self.ranks) == 0

    def check(self, keep_vars: bool) -> None:
        """Raise ValueError for a dtype that parameters cannot be cast to."""
        if self.dtype is not None:
            check_dtype("dtype", self.dtype)
            if keep_vars:
                raise ValueError("state_dict(keep_vars=True) gives the tensors themselves, which have their own dtype")


class Exporting:
    """The state dict of the unit itself is being created, rather than an enclosing unit's."""


class LocalState:
    """State dicts are of the shards."""


class ShardedState:
    """Modules list this rank's parts of parameters, for a sharded state dict."""


class Filling:
    """Modules give their parameters first values."""


class Converting:
    """The module is being cast or moved."""


@dataclass(frozen=True)
class LoadPass:
    """A state dict is being loaded."""

    read: frozenset[Unit] | None = None  # units whose values may be read by it; None if it only copies
    source: FirstRank | None = None  # the first rank, if only that one has the values

    def source_of(self, unit: Unit) -> FirstRank | None:
        """Return the rank that alone has the values of a unit's parameters; None if every rank has them."""
        return self.source if self.source is not None and self.source.serves(unit) else None


@dataclass(frozen=True)
class Summoning:
    """Parameters are summoned."""

    keeps_changes: bool  # they are sharded again with what was changed
    with_grads: bool  # unsharded gradients are shown
    rank0_only: bool  # only the first rank has them
    on_host: bool  # they are in host memory

    @property
    def described(self) -> str:
        """The arguments, as a user gives them."""
        return (
            f"volatile={not self.keeps_changes}, rank0_only={self.rank0_only}, with_grads={self.with_grads}, "
            f"offload_to_cpu={self.on_host}"
        )

    def require_shown_by(self, other: Summoning | None, unit: Unit) -> None:
        """Raise RuntimeError if the unit is summoned already, in a form that differs from the requested form."""
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
                f"summon_full_params cannot be nested in another form: {unit.name} is summoned already, and without "
                f"{', '.join(differing)}. Leave that first, or ask for the same."
            )


@contextmanager
def saving(root: Unit, form: Saving) -> Iterator[Saving]:
    """Create the state dict of all units of the tree in this form, or in the form that an enclosing unit has chosen."""
    outer = root.request(Saving)
    if outer is not None:
        yield outer
        return
    units = [unit for _, unit in units_in(root)]
    wanted = (handle.storage.state_device for unit in units for handle in unit.handles)
    form = replace(form, device=form.device or next(filter(None, wanted), None))
    with serving(units, form):
        yield form


@contextmanager
def serving(units: Iterable[Unit], request: object) -> Iterator[None]:
    """Set a request on the units while the context is active, in place of another request of the same kind."""
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
    """Raise RuntimeError inside a forward or backward, and where the modules of a unit show no shards."""
    for unit in units:
        unit.require_idle(what)
        is_shown = any(handle.presentation.is_exposed for handle in unit.visible_handles)  # by another unit
        if is_shown or unit.state is TrainingState.SUMMON_FULL_PARAMS:
            raise RuntimeError(f"cannot {what}: {unit.name} is inside summon_full_params(). Leave it first.")
