"""Which parameters an optimizer sees, which original ones are in each, and by which names and numbers they are known.

Names are those of the module from before wrapping. Numbers are FairScale's: they count the wrappers' own parameters,
wrapper by wrapper in the order of ``modules()``, each wrapper's in the order in which its modules list them. So they
depend on which modules are wrapped, and neither on how (flat, one by one, as original parameters) nor on the number of
ranks. Parameters that no wrapper took come last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import LONE_RANK, Communicator
from fsdp.distributed.dtensor import MeshPart
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import Interval
from fsdp.engine.managed_params import is_ours
from fsdp.engine.names import clean_name, join
from fsdp.engine.optimizer_hooks import without_signature
from fsdp.engine.unit import TrainingState, Unit, units_in


@dataclass(frozen=True, eq=False)
class Original:
    """One original parameter.

    Attributes:
        name: in the module before it was wrapped.
        number: see above.
        shape: of the whole.
        slot: its number in the flat parameter.
        part: what the flat parameter has of it, of a `DTensor`.
    """

    name: str
    number: int
    shape: torch.Size
    slot: int
    part: MeshPart | None


@dataclass(frozen=True, eq=False)
class Listed:
    """What an optimizer sees: a flat parameter's shard, a piece of one, or a parameter that nobody sharded.

    Attributes:
        param: is what it sees.
        handle: whose shard it is, or is a piece of; None for what is whole on every rank.
        originals: what it was made of, in the order of their places in it.
        is_uncollected: its state is not to be gathered.
    """

    param: nn.Parameter
    handle: FlatParamHandle | None
    originals: tuple[Original, ...]
    is_uncollected: bool = False

    @property
    def comm(self) -> Communicator:
        """The ranks that share it."""
        return LONE_RANK if self.handle is None else self.handle.comm

    @property
    def replicas(self) -> Communicator:
        """The ranks that have the same part of it."""
        return LONE_RANK if self.handle is None else self.handle.replicas

    @property
    def device(self) -> torch.device:
        """Where its parts must be to be sent."""
        return self.param.device if self.handle is None else self.handle.storage.device

    @property
    def name(self) -> str:
        """What messages call it."""
        first = self.originals[0].name
        return (
            first
            if len(self.originals) == 1
            else f"{first} (in one flat parameter with {len(self.originals) - 1} more)"
        )

    def kept_shape(self, original: Original) -> torch.Size:
        """Of what the flat parameter has of an original: of a `DTensor` its local part."""
        return original.shape if self.handle is None else self.handle.layout.slots[original.slot].shape

    def interval(self, original: Original, rank: int) -> Interval | None:
        """What a rank keeps of an original, in row-major order, and where in a tensor like `param`; None if nothing."""
        if self.handle is None:
            return Interval(0, 0, original.shape.numel(), 0) if original.shape.numel() else None
        found = self.handle.layout.interval(original.slot, rank)
        if found is None or self.handle.pieces is None:
            return found
        return Interval(found.slot, found.start, found.stop, 0)

    def has_part(self, rank: int) -> bool:
        """Whether a rank keeps any elements of it."""
        return any(self.interval(original, rank) is not None for original in self.originals)

    def cut(self, original: Original, value: Tensor) -> Tensor:
        """What the flat parameter has of a whole value, as a vector; shares memory where that can be."""
        local = value if original.part is None else original.part.cut(original.name, value)
        return local.detach().reshape(-1)


class Parameters:
    """All that an optimizer of a wrapped model may see.

    Args:
        wrapper: the outermost one.
        root: its unit.
        is_uncollected: whether the state of what a unit took is not to be gathered.

    Attributes:
        listed: in the order of ``wrapper.parameters()``.
        by_number, by_name: the originals, each with what has it; tied ones by all their names.
    """

    def __init__(self, wrapper: nn.Module, root: Unit, is_uncollected: Callable[[Unit], bool]) -> None:
        self.root = root
        self.by_number: dict[int, tuple[Listed, Original]] = {}
        self.by_name: dict[str, tuple[Listed, Original]] = {}
        by_param: dict[int, Listed] = {}
        originals: dict[tuple[FlatParamHandle, int], Original] = {}
        units = units_in(root)
        for path, unit in units:
            for handle, slot in _in_order(unit):
                kept, part = handle.layout.slots[slot], handle.flat_param.parts[slot]
                shape = kept.shape if part is None else part.shape
                name = join("" if unit is root else path, kept.name)
                originals[handle, slot] = Original(name, len(originals), shape, slot, part)
        for _, unit in units:
            for one in (one for handle in unit.own for one in _listed_of(handle, originals, is_uncollected(unit))):
                by_param[id(one.param)] = one
        numbers = itertools.count(len(originals))
        for name, param in wrapper.named_parameters():
            if not is_ours(param):
                whole = Original(clean_name(name), next(numbers), param.shape, 0, None)
                by_param[id(param)] = Listed(param, None, (whole,))
        self._by_param = by_param
        self.listed = [by_param[id(param)] for param in wrapper.parameters() if id(param) in by_param]
        for one in self.listed:
            for original in one.originals:
                self.by_number[original.number] = self.by_name[original.name] = one, original
        self._add_second_names(wrapper)

    def _add_second_names(self, wrapper: nn.Module) -> None:
        paths: dict[nn.Module, list[str]] = {}
        for path, module in wrapper.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(clean_name(path))
        for one, original in list(self.by_number.values()):
            for place in [] if one.handle is None else one.handle.places[original.slot]:
                for path in paths.get(place.module, ()):
                    self.by_name.setdefault(join(path, place.name), (one, original))

    def of(self, param: Any) -> Listed | None:
        """What an optimizer's parameter is."""
        return self._by_param.get(id(param))

    @property
    def numbered(self) -> list[tuple[Listed, Original]]:
        """All originals in the order of their numbers."""
        return [self.by_number[number] for number in sorted(self.by_number)]


def _in_order(unit: Unit) -> list[tuple[FlatParamHandle, int]]:
    """What a unit took, in the order in which its modules listed it before."""
    every = [(handle, slot) for handle in unit.own for slot in range(len(handle.layout.slots))]
    at = {(place.module, place.name): key for key in every for place in key[0].places[key[1]]}
    wanted = ((module, name) for module, names in unit.param_order.items() for name in names)
    return list(dict.fromkeys([*(at[place] for place in wanted if place in at), *every]))


def _listed_of(
    handle: FlatParamHandle, originals: Mapping[tuple[FlatParamHandle, int], Original], is_uncollected: bool
) -> list[Listed]:
    found = tuple(originals[handle, slot] for slot in range(len(handle.layout.slots)))
    if handle.pieces is None:
        return [Listed(handle.flat_param, handle, found, is_uncollected)]
    return [
        Listed(piece, handle, (original,), is_uncollected)
        for piece, original in zip(handle.pieces.params, found, strict=True)
    ]


def require_shards(root: Unit, what: str) -> None:
    """Raise RuntimeError inside `summon_full_params`, where modules show no shards."""
    inside = TrainingState.SUMMON_FULL_PARAMS
    summoned = [unit.name for _, unit in units_in(root) if unit.state is inside or unit.access.summoned is not None]
    if summoned:
        raise RuntimeError(f"cannot {what}: {summoned[0]} is inside summon_full_params(). Leave it first.")


# --- an optimizer's own dictionary ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnState:
    """This rank's state of an optimizer.

    Attributes:
        dictionary: as the optimizer gave it; not to be changed.
        groups: for each parameter group, what is in it.
        ids: the optimizer's numbers.
        states: by what the optimizer sees, its state; only where there is any.
    """

    dictionary: Mapping[str, Any]
    groups: list[list[Listed]]
    ids: dict[Listed, Any]
    states: dict[Listed, Mapping[str, Any]]


def own_state(params: Parameters, optim: Any) -> OwnState:
    """What an optimizer, or anything else with a ``state_dict()``, has on this rank.

    Raises:
        TypeError: without such a method, or if it does not return what torch's optimizers do.
        ValueError: for parameters that are not of the model.
    """
    if not callable(getattr(optim, "state_dict", None)):
        raise TypeError(f"an optimizer, or another object with a state_dict(), is needed; got a {type(optim).__name__}")
    dictionary = optim.state_dict()
    if not isinstance(dictionary, Mapping) or not {"state", "param_groups"} <= dictionary.keys():
        raise TypeError(
            f"{type(optim).__name__}.state_dict() has no 'state' and 'param_groups' as torch's optimizers have"
        )
    dictionary = without_signature(dictionary)
    groups = held_by(params, optim, [len(group["params"]) for group in dictionary["param_groups"]])
    numbers = [number for group in dictionary["param_groups"] for number in group["params"]]
    ids = dict(zip((one for group in groups for one in group), numbers, strict=True))
    states = {one: dictionary["state"].get(number) for one, number in ids.items()}
    return OwnState(dictionary, groups, ids, {one: state for one, state in states.items() if state})


def held_by(params: Parameters, optim: Any, sizes: Sequence[int]) -> list[list[Listed]]:
    """What is in each parameter group of an optimizer, whose dictionary has groups of these sizes.

    One that shows no ``param_groups`` has the model's parameters in their order, all or the trainable ones.

    Raises:
        ValueError: for parameters that are not of the model.
    """
    groups = getattr(optim, "param_groups", None)
    shown = [list(group["params"]) for group in groups] if isinstance(groups, (list, tuple)) else None
    if shown is not None and [len(group) for group in shown] == list(sizes):
        found = [[params.of(param) for param in group] for group in shown]
        for number, (group, known) in enumerate(zip(shown, found, strict=True)):
            for place, (param, one) in enumerate(zip(group, known, strict=True)):
                if one is None:
                    raise ValueError(
                        f"{type(optim).__name__}: parameter {place} of group {number}, of shape {tuple(param.shape)}, "
                        "is not of this model as it is wrapped now. Call this on the outermost "
                        "FullyShardedDataParallel, with an optimizer of its parameters() only; hand over one that "
                        "was made before wrapping with reshard_optimizer."
                    )
        return found  # type: ignore[return-value]
    for every in (params.listed, [one for one in params.listed if one.param.requires_grad]):
        if len(every) == sum(sizes):
            starts = [sum(sizes[:number]) for number in range(len(sizes))]
            return [every[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    raise ValueError(
        f"{type(optim).__name__}: its state_dict() has {sum(sizes)} parameters, the model has {len(params.listed)}, "
        "and it shows no param_groups that would say which. Give it a `param_groups` attribute, or pass the optimizer "
        "inside."
    )
