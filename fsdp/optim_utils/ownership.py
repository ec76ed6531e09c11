"""`Ownership` maps unsharded parameters to the ranks that step them, by arithmetic on shapes and held elements.

The *owner* of a parameter is one of the ranks that share it. The owner receives the gradient's ranges from the other
ranks, and sends back the new values of these ranges, without padding. Assume that W ranks each hold an equal part of
every parameter and own equally many bytes. Then a rank receives ``(W - 1) / W`` of its owned bytes as gradients, and
``(W - 1) / W`` of its part as values: ``2 (W - 1) / W**2`` of the owned bytes in a step. If owners hold larger parts,
the number is lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The cost of a parameter's step, by its shape, in any unit.
Cost = Callable[[torch.Size], float]


def matrix_cost(shape: torch.Size) -> float:
    """Return the approximate number of multiplications to orthogonalize or factorize a matrix.

    Tensors with more than two dimensions count as a matrix of the first by the product of all other dimensions. The
    cost of a vector is its number of elements.
    """
    numel = shape.numel()
    return numel * min(shape[0], numel // shape[0]) if len(shape) > 1 and numel else numel


class OwnedItem(NamedTuple):
    """A parameter that needs an owner."""

    name: str
    shape: torch.Size
    cost: float
    held: tuple[int, ...]  # elements on each rank that shares the parameter
    itemsize: int


class Owned(NamedTuple):
    """A parameter with its owner."""

    item: OwnedItem
    ranks: tuple[int, ...]  # the ranks that share the parameter
    owner: int  # the owner's index in `ranks`


def choose_owners(items: Sequence[OwnedItem], ranks: tuple[int, ...]) -> list[Owned]:
    """Assign an owner to each item; these ranks share the items.

    The most expensive items are assigned first. Candidates for an item are the ranks whose total cost stays within an
    equal share; among them, the rank that holds most of the item becomes the owner. If there is no candidate, the rank
    with the lowest cost becomes the owner. The result depends only on the arguments, and not on the order of the
    items.
    """
    world_size = len(ranks)
    share = math.fsum(item.cost for item in items) / world_size
    loads = [0.0] * world_size
    owners = [0] * len(items)
    for number in sorted(range(len(items)), key=lambda number: (-items[number].cost, items[number].name)):
        item = items[number]
        # Rounding in a sum of equal costs must not change the assignment.
        free = [rank for rank in range(world_size) if loads[rank] + item.cost <= share * (1 + 1e-9)]
        owners[number] = (
            min(free, key=lambda rank: (-item.held[rank], loads[rank], rank))
            if free
            else min(range(world_size), key=lambda rank: (loads[rank], -item.held[rank], rank))
        )
        loads[owners[number]] += item.cost
    return [Owned(item, ranks, owner) for item, owner in zip(items, owners, strict=True)]


@dataclass(frozen=True)
class Ownership:
    """The owner of each owned parameter; ``str()`` returns a table."""

    owned: Sequence[Owned]
    sharded: Sequence[str] = ()  # the names of parameters of which every rank steps its own elements

    @property
    def owner_of(self) -> dict[str, int]:
        """Return the owner of each parameter by name, as a number among all ranks."""
        return {item.name: ranks[owner] for item, ranks, owner in self.owned}

    @property
    def costs(self) -> dict[int, float]:
        """Return the total cost of each rank's parameters."""
        return self._summed(lambda item: item.cost)

    @property
    def numels(self) -> dict[int, int]:
        """Return the number of elements of each rank's parameters."""
        return {rank: int(numel) for rank, numel in self._summed(lambda item: item.shape.numel()).items()}

    def _summed(self, amount: Callable[[OwnedItem], float]) -> dict[int, float]:
        found = {rank: 0.0 for one in self.owned for rank in one.ranks}
        for item, ranks, owner in self.owned:
            found[ranks[owner]] += amount(item)
        return found

    def received(self, rank: int) -> int:
        """Return the bytes that a rank receives in a step: gradients of owned parameters, and values of shards."""
        total = 0
        for item, ranks, owner in self.owned:
            if rank in ranks:
                own = item.held[ranks.index(rank)]
                total += (item.shape.numel() - own if ranks[owner] == rank else own) * item.itemsize
        return total

    def __str__(self) -> str:
        total = math.fsum(self.costs.values()) or 1.0
        rows = [("parameter", "shape", "owner", "cost", "owner has of it")]
        for item, ranks, owner in sorted(self.owned, key=lambda one: (-one[0].cost, one[0].name)):
            part = item.held[owner] / max(item.shape.numel(), 1)
            shape = " x ".join(map(str, item.shape)) or "1 (0-d)"
            rows.append((item.name, shape, f"rank {ranks[owner]}", f"{item.cost / total:.1%}", f"{part:.0%}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        costs, numels = self.costs, self.numels
        lines += [
            f"rank {rank}: {costs[rank] / total:.1%} of the cost, {numels[rank]:,} elements, "
            f"{self.received(rank):,} bytes received in a step"
            for rank in costs
        ]
        if self.sharded:
            lines.append(f"stepped where they are sharded: {', '.join(self.sharded)}")
        return "\n".join(lines)
