"""`Placements` define where a unit's parameters, gradients and optimizer state are between uses.

The ranks of a unit form a mesh with two axes: the *shard axis* and the *replica axis*. For each axis and each kind of
tensor there is a `Placement`. The collectives of a step follow from `stages`, a function of two placements. Sharding
strategies are names of such values, without separate code. This module contains only arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache, cached_property
from math import prod
from typing import Any, Literal, NamedTuple


class Axis(Enum):
    """An axis of a unit's mesh."""

    SHARD = 0
    REPLICA = 1


class Placement(Enum):
    """The part of a tensor that each rank along an axis holds.

    Members:
        REPLICATED: the whole tensor, the same on every rank.
        SHARDED: a shard. `FullyShardedDataParallel` divides a flat vector, and `fully_shard` the rows of parameters.
        PARTIAL: the whole tensor, summed over this rank's batches only. The sum over ranks is still to be computed.
        OWNED: whole tensors, each on a single rank.
    """

    REPLICATED = auto()
    SHARDED = auto()
    PARTIAL = auto()
    OWNED = auto()


REPLICATED, SHARDED, PARTIAL, OWNED = Placement


class Placed(NamedTuple):
    """The placements of a tensor along both axes. A shard is divided along the shard axis first."""

    shard: Placement
    replica: Placement

    def __str__(self) -> str:
        return f"({self.shard.name}, {self.replica.name})"

    def numel(self, padded_numel: int, sizes: Mapping[Axis, int]) -> int:
        """Return each rank's number of elements of a padded tensor; `sizes` are numbers of ranks by axis."""
        return padded_numel // prod(sizes[axis] for axis in Axis if self[axis.value] is SHARDED)


class Collective(Enum):
    """A collective along an axis, or a copy without communication."""

    ALL_GATHER = auto()
    REDUCE_SCATTER = auto()
    ALL_REDUCE = auto()
    SLICE = auto()  # of a tensor that the rank holds
    TO_OWNERS = auto()
    FROM_OWNERS = auto()


_COLLECTIVES = {
    (SHARDED, REPLICATED): Collective.ALL_GATHER,
    (PARTIAL, SHARDED): Collective.REDUCE_SCATTER,
    (PARTIAL, REPLICATED): Collective.ALL_REDUCE,
    (REPLICATED, SHARDED): Collective.SLICE,
    (SHARDED, OWNED): Collective.TO_OWNERS,
    (OWNED, SHARDED): Collective.FROM_OWNERS,
}

# The number of times a ring sends a tensor, except this rank's part.
_TIMES_SENT = {Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1, Collective.ALL_REDUCE: 2, Collective.SLICE: 0}


class Stage(NamedTuple):
    """A collective along an axis. The tensor's placements `before` and `after` it differ along this axis only."""

    collective: Collective
    axis: Axis
    before: Placed
    after: Placed

    def numel_sent(self, padded_numel: int, sizes: Mapping[Axis, int]) -> int:
        """Return how many elements a rank sends; raise ValueError for owned tensors, where this depends on owners."""
        if self.collective not in _TIMES_SENT:
            raise ValueError(f"{self.collective.name}: the elements that are sent depend on the owners")
        numel = max(placed.numel(padded_numel, sizes) for placed in (self.before, self.after))
        ranks = sizes[self.axis]
        padded = -(-numel // ranks) * ranks
        return _TIMES_SENT[self.collective] * (ranks - 1) * padded // ranks


@cache
def stages(source: Placed, target: Placed) -> tuple[Stage, ...]:
    """Return the collectives that convert a tensor from one placement to another, in order.

    A tensor is divided along the shard axis first, and joined along the replica axis first, so every stage uses a
    contiguous part of the tensor.

    Raises:
        ValueError: if no collectives convert between these placements.
    """
    joins = any(source[axis.value] is SHARDED and target[axis.value] is REPLICATED for axis in Axis)
    found, now = [], source
    for axis in sorted(Axis, key=lambda axis: axis.value, reverse=joins):
        one, other = now[axis.value], target[axis.value]
        if one is not other:
            if (one, other) not in _COLLECTIVES:
                raise ValueError(f"no collective turns {one.name} into {other.name} along the {axis.name} axis")
            after = now._replace(**{axis.name.lower(): other})
            found.append(Stage(_COLLECTIVES[one, other], axis, now, after))
            now = after
    return tuple(found)


UNSHARDED = Placed(REPLICATED, REPLICATED)
UNREDUCED = Placed(PARTIAL, PARTIAL)


class ShardingStrategy(Enum):
    """Names of `Placements`. Members of torch's enum with the same names are accepted as well.

    Members:
        FULL_SHARD: parameters, gradients and optimizer state are sharded over one group.
        SHARD_GRAD_OP: the same, and parameters stay unsharded from forward to backward (`reshard_after_forward` False).
        NO_SHARD: every rank has all parameters, and gradients are averaged over the group.
        HYBRID_SHARD: sharded over the ranks of one group, and replicated over multiple such groups.
        _HYBRID_SHARD_ZERO2: the same, and parameters stay unsharded from forward to backward.
        SHARD_OPTIM: optimizer state is sharded (ZeRO-1); parameters are gathered and gradients reduced once per step.
        SHARD_OPTIM_GRADS: optimizer state and gradients are sharded (ZeRO-2); parameters are gathered once per step.
        HYBRID_SHARD_OPTIM: as HYBRID_SHARD, with gradients and optimizer state sharded over the replicas too (HFSDP).
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()
    SHARD_OPTIM = auto()
    SHARD_OPTIM_GRADS = auto()
    HYBRID_SHARD_OPTIM = auto()

    @property
    def is_hybrid(self) -> bool:
        """Return whether there are two groups."""
        return self.name.lstrip("_").startswith("HYBRID")

    @classmethod
    def of(cls, given: Any) -> ShardingStrategy | None:
        """Return the strategy passed by a user, which may be torch's."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, Enum) and given.name in cls.__members__:
            return cls[given.name]
        raise TypeError(
            f"sharding_strategy must be an fsdp.ShardingStrategy ({', '.join(cls.__members__)}) or None, got {given!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Define where a unit's parameters, gradients and optimizer state are between uses, along both axes of its mesh.

    Each argument is a `Placed`, a pair of placements. With a single process group there is no replica axis, and the
    second placement of the pair has no effect. ::

        sharded = Placed(Placement.SHARDED, Placement.REPLICATED)
        unsharded = Placed(Placement.REPLICATED, Placement.REPLICATED)
        zero_2 = Placements(parameters=unsharded, gradients=sharded, optimizer=sharded)

    Args:
        parameters: the placements between steps, outside of the unit's forward and backward. Parameters that are less
            sharded than the optimizer state are all-gathered once after each step, and kept until the next step.
        gradients: the placements after each backward. `PARTIAL` accumulates gradients without communication; the next
            optimizer step, or the next function that requires them, reduces them.
        optimizer: the placements of the shard that the optimizer steps, and of the optimizer state.
        reshard_after_forward: True also frees parameters after forward if they are sharded between uses; False keeps
            them unsharded until backward. A number shards them until backward over that many neighbouring ranks.
            "host" copies them to host memory, from which backward copies them back: each rank then holds all of the
            model's parameters in host memory, in the compute dtype.
        block_numel: no rank's shard of a parameter begins or ends inside a block of this number of elements, in
            row-major order. `FullyShardedDataParallel` pads shards for this, and `fully_shard` raises an error for
            rows that do not fit. Quantised parameters and 8-bit optimizer states use a scale for each block.

    Raises:
        TypeError: for a value that is not a pair of placements, or an invalid type of `reshard_after_forward`.
        ValueError: for inconsistent placements. The message names valid placements.
    """

    parameters: Placed
    gradients: Placed
    optimizer: Placed
    reshard_after_forward: bool | int | Literal["host"] = True
    block_numel: int = 1

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer"):
            object.__setattr__(self, name, _pair(name, getattr(self, name)))
        check_reshard(self.reshard_after_forward)
        if type(self.block_numel) is not int or self.block_numel < 1:
            raise ValueError(f"block_numel must be a positive number of elements, got {self.block_numel!r}")
        for axis in Axis:
            _check(axis, *(placed[axis.value] for placed in (self.parameters, self.gradients, self.optimizer)))
        if self.optimizer == Placed(REPLICATED, SHARDED):
            raise ValueError(
                "optimizer state is SHARDED along the replica axis and REPLICATED along the shard axis: shard it along "
                "the shard axis first, or swap the two process groups"
            )
        if self.gradients.shard is PARTIAL and self.gradients.replica is not PARTIAL:
            raise ValueError(
                f"gradients are PARTIAL along the shard axis and {self.gradients.replica.name} along the replica axis, "
                "which is reduced after the shard axis: use PARTIAL along both"
            )
        if self.parameters.shard is REPLICATED and self.parameters.replica is SHARDED:
            raise ValueError(
                "parameters are SHARDED along the replica axis and REPLICATED along the shard axis: use "
                "parameters=(SHARDED, REPLICATED), as in HYBRID_SHARD_OPTIM"
            )
        if self.keeps_parameters and type(self.reshard_after_forward) is not bool:
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward!r} requires parameters that are sharded like the "
                "optimizer state, but these placements keep them less sharded between steps: omit it"
            )

    @classmethod
    def from_strategy(
        cls, strategy: Any = None, reshard_after_forward: bool | int | Literal["host"] = True
    ) -> Placements:
        """Return the placements of a `ShardingStrategy`. Default: FULL_SHARD.

        Raises:
            TypeError: for a value that is not a strategy.
            ValueError: if the strategy and `reshard_after_forward` contradict each other.
        """
        named = ShardingStrategy.of(strategy)
        value = _NAMED[named or ShardingStrategy.FULL_SHARD]
        if named is not None and (not value.reshard_after_forward or value.keeps_unsharded):
            if type(reshard_after_forward) is not bool:
                raise ValueError(
                    f"sharding_strategy={named.name} keeps parameters unsharded after forward, which conflicts with "
                    f"reshard_after_forward={reshard_after_forward!r}: omit one of them"
                )
            return value
        if named is not None and named in _KEPT and not reshard_after_forward:
            raise ValueError(
                f"sharding_strategy={named.name} reshards after forward, which conflicts with "
                f"reshard_after_forward=False: omit one of them, or use {_KEPT[named].name}"
            )
        return value.resharded(reshard_after_forward)

    def resharded(self, after_forward: bool | int | Literal["host"]) -> Placements:
        """Return these placements with another `reshard_after_forward`."""
        if self.reshard_after_forward is after_forward:
            return self
        return replace(self, reshard_after_forward=after_forward)

    @classmethod
    def resolve(cls, placements: Any, strategy: Any, reshard_after_forward: bool | int | Literal["host"]) -> Placements:
        """Return the placements for the arguments of a front door.

        Raises:
            TypeError: for a value of another class.
            ValueError: for contradicting arguments.
        """
        if placements is None:
            # 0 and 1 are accepted as False and True: flags of a command line are often such numbers.
            check_reshard(reshard_after_forward)
            is_flag = reshard_after_forward in (0, 1)
            return cls.from_strategy(strategy, bool(reshard_after_forward) if is_flag else reshard_after_forward)
        if not isinstance(placements, cls):
            raise TypeError(f"placements must be an fsdp.Placements or None, got {placements!r}")
        if strategy is not None or reshard_after_forward is not True:
            other = "sharding_strategy" if strategy is not None else "reshard_after_forward"
            raise ValueError(
                f"placements and {other} both determine where parameters are sharded: omit {other}, or use "
                "Placements.from_strategy(sharding_strategy, reshard_after_forward)"
            )
        return placements

    def strategy(self, is_hybrid: bool) -> ShardingStrategy | None:
        """Return the name of these placements; None if they have no name.

        Args:
            is_hybrid: True if there is a replica axis besides the shard axis.
        """
        plain = self if self.block_numel == 1 else replace(self, block_numel=1)
        named = (each for each, value in _NAMED.items() if value == plain and each.is_hybrid is is_hybrid)
        return next(named, ShardingStrategy.NO_SHARD if self.optimizer == UNSHARDED == self.gradients else None)

    @property
    def gather(self) -> tuple[Stage, ...]:
        """Return the stages from the updated shards to the parameters between uses, which run once after a step."""
        return stages(self.optimizer, self.parameters)

    @property
    def unshard(self) -> tuple[Stage, ...]:
        """Return the stages before each use of parameters."""
        return stages(self.parameters, UNSHARDED)

    @property
    def reduce(self) -> tuple[Stage, ...]:
        """Return the stages of the gradients of each backward."""
        return stages(UNREDUCED, self.gradients)

    @property
    def settle(self) -> tuple[Stage, ...]:
        """Return the stages from the gradients of backwards to the gradients that the optimizer uses."""
        return stages(self.gradients, self.optimizer)

    @cached_property
    def keeps_parameters(self) -> bool:
        """True if parameters are kept less sharded than the optimizer state, across steps."""
        return bool(self.gather)

    @cached_property
    def keeps_unsharded(self) -> bool:
        """True if the kept parameters are unsharded."""
        return self.keeps_parameters and not self.unshard

    @cached_property
    def defers_reduction(self) -> bool:
        """True if backwards leave a part of the reduction to the next optimizer step."""
        return bool(self.settle)

    @property
    def is_nested(self) -> bool:
        """True if shards are divided again along the replica axis."""
        return self.optimizer.replica is SHARDED

    def in_rows(self, is_sharded: bool) -> Placements:
        """Return these placements if `DTensor`s support them; `is_sharded`: the mesh contains dimensions to shard over.

        Raises:
            NotImplementedError: for shards that are divided again along the replica axis.
            ValueError: if the mesh does not fit.
        """
        if self.is_nested:
            raise NotImplementedError(
                "fully_shard does not support optimizer state that is SHARDED along the replica axis "
                "(HYBRID_SHARD_OPTIM), because the rows of DTensors are in the order of the mesh. Use "
                "FullyShardedDataParallel, or REPLICATED along the replica axis"
            )
        if is_sharded is (self.optimizer == UNSHARDED):
            remedy = "dp_mesh_dims=DataParallelMeshDims(replicate=...)" if is_sharded else "a dimension to shard over"
            raise ValueError(
                f"the optimizer state is {self.optimizer.shard.name} along the shard axis, but the mesh was passed to "
                f"{'shard' if is_sharded else 'replicate'} over: pass {remedy}, or other placements"
            )
        return self

    @cached_property
    def on_one_axis(self) -> Placements:
        """The placements along the shard axis alone."""
        parts = (self.parameters, self.gradients, self.optimizer)
        ours = [Placed(each.shard, PARTIAL if each.shard is PARTIAL else REPLICATED) for each in parts]
        return self if ours == [*parts] else replace(self, parameters=ours[0], gradients=ours[1], optimizer=ours[2])


def check_reshard(given: Any) -> None:
    """Raise TypeError unless this is a valid type of `reshard_after_forward`."""
    if not isinstance(given, int) and given != "host":
        raise TypeError(f'reshard_after_forward must be True, False, a number of ranks or "host", got {given!r}')


def _pair(name: str, given: Any) -> Placed:
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(one, Placement) for one in given):
        return Placed(*given)
    raise TypeError(
        f"{name} must be an fsdp.Placed, a pair of placements along the shard and the replica axis, got {given!r}"
    )


def _check(axis: Axis, parameters: Placement, gradients: Placement, optimizer: Placement) -> None:
    """Raise ValueError for inconsistent placements along an axis."""
    along = f"along the {axis.name.lower()} axis"
    if OWNED in (parameters, gradients, optimizer):
        raise ValueError(
            f"OWNED {along} is not supported, because units keep shards. For optimizers that need whole tensors use "
            "fsdp.OwnedOptimizer"
        )
    if PARTIAL in (parameters, optimizer):
        name = "parameters" if parameters is PARTIAL else "optimizer state"
        raise ValueError(f"PARTIAL {along} is for gradients, not for {name}: use REPLICATED")
    if parameters is SHARDED and optimizer is REPLICATED:
        raise ValueError(
            f"parameters are SHARDED and optimizer state is REPLICATED {along}: the optimizer steps the shards. Use "
            "SHARDED for both, or REPLICATED for both"
        )
    if gradients not in (PARTIAL, optimizer):
        meant = "PARTIAL or SHARDED" if optimizer is SHARDED else "PARTIAL or REPLICATED"
        raise ValueError(
            f"gradients are {gradients.name} and optimizer state is {optimizer.name} {along}: gradients must be "
            f"{meant}. PARTIAL accumulates them on each rank and reduces them at the step (SHARD_OPTIM)"
        )


_SHARDED = Placed(SHARDED, REPLICATED)
_ON_BOTH = Placed(SHARDED, SHARDED)
_FULL = Placements(parameters=_SHARDED, gradients=_SHARDED, optimizer=_SHARDED)
_UNTIL_BACKWARD = replace(_FULL, reshard_after_forward=False)

_NAMED: dict[ShardingStrategy, Placements] = {
    ShardingStrategy.FULL_SHARD: _FULL,
    ShardingStrategy.SHARD_GRAD_OP: _UNTIL_BACKWARD,
    ShardingStrategy.HYBRID_SHARD: _FULL,
    ShardingStrategy._HYBRID_SHARD_ZERO2: _UNTIL_BACKWARD,
    ShardingStrategy.SHARD_OPTIM: Placements(parameters=UNSHARDED, gradients=UNREDUCED, optimizer=_SHARDED),
    ShardingStrategy.SHARD_OPTIM_GRADS: Placements(parameters=UNSHARDED, gradients=_SHARDED, optimizer=_SHARDED),
    ShardingStrategy.HYBRID_SHARD_OPTIM: Placements(parameters=_SHARDED, gradients=_ON_BOTH, optimizer=_ON_BOTH),
    ShardingStrategy.NO_SHARD: Placements(parameters=UNSHARDED, gradients=UNSHARDED, optimizer=UNSHARDED),
}

# Strategies that reshard after forward, and the corresponding strategies that do not.
_KEPT = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy._HYBRID_SHARD_ZERO2,
}
