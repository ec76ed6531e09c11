"""`Parameters` contains the parameters that optimizers of a wrapped model see, and the originals' names and numbers.

Names are the names in the module before wrapping, as in its ``state_dict()``. Numbers are FairScale's: they count the
wrappers' own parameters, wrapper by wrapper in the order of ``modules()``, and within a wrapper in the order of its
modules. They depend on the set of wrapped modules, but neither on the form of parameters (flat, separate, original) nor
on the number of ranks.
Parameters outside all wrappers are last.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import paths_in, plain_name, state_name
from fsdp.engine.originals import is_ours
from fsdp.engine.unit import Unit, own_modules, unit_of, unit_of_wrapper, units_of
from fsdp.layers.listed_shards import named_shards
from fsdp.layers.state_requests import require_shards
from fsdp.optim_utils.state import OptimParam, Original, grouped, params_of

Place = tuple[OptimParam, Original]


class Parameters:
    """All parameters that an optimizer of a wrapped model may contain; `root` is the unit of the outermost wrapper.

    Attributes:
        listed: the parameters that optimizers see, in the order of ``wrapper.parameters()``.
        by_number: the originals, each with its listed parameter, in the order of their numbers.
        by_name: the originals by name; tied parameters are under each of their names. Names that contain path parts of
            torch's wrappers are also listed without these parts.
        numbers: the number of each original.
    """

    def __init__(self, wrapper: nn.Module, root: Unit) -> None:
        units = units_of(root.module.modules())
        paths = {module: list(map(state_name, found)) for module, found in paths_in(wrapper).items()}
        self._by_param: dict[int, OptimParam] = {}
        places: dict[tuple[FlatParamHandle, int], Place] = {}
        for unit in units:
            for handle in unit.owned_handles:
                for one in params_of(handle, paths, is_uncollected(unit, root)):
                    self._by_param[id(one.param)] = one
                    places |= {(handle, original.slot): (one, original) for original in one.originals}
        numbered = [places[place] for unit in units for place in _in_order(unit) if place in places]
        listed = named_shards(wrapper)
        for name, param in listed.items():
            if not is_ours(param):
                unsharded = Original(state_name(name), param.shape)
                numbered.append((OptimParam(param, None, (unsharded,)), unsharded))
                self._by_param[id(param)] = numbered[-1][0]
        self.listed = [one for one in map(self.of, listed.values()) if one is not None]
        known = set(self.listed)
        self.by_number = {number: place for number, place in enumerate(numbered) if place[0] in known}
        self.numbers = {original: number for number, (_, original) in self.by_number.items()}
        self.by_name = {original.name: (one, original) for one, original in self.by_number.values()}
        for one, original in self.by_number.values():  # and by the other names of tied parameters
            for place in [] if one.handle is None else one.handle.places[original.slot]:
                for path in paths.get(place.module, ()):
                    self.by_name.setdefault(path + place.name, (one, original))
        self.by_name = {plain_name(name): found for name, found in self.by_name.items()} | self.by_name

    def stepped_by(self, optim: Any) -> Parameters:
        """Return these parameters with the stepped tensors if the optimizer is an `OwnedOptimizer`."""
        find = getattr(optim, "stepped_in", None)
        if find is None:
            return self
        found = copy.copy(self)
        places: dict[Place, Place] = {}
        for one, original in self.by_number.values():
            stepped = find(one.handle, original.slot, one.param)
            if stepped is not None:
                same = replace(stepped, originals=(original,), is_uncollected=one.is_uncollected)
                places[one, original] = same, original
        found.by_number = {number: places.get(place, place) for number, place in self.by_number.items()}
        found.by_name = {name: places.get(place, place) for name, place in self.by_name.items()}
        found.listed = list(dict.fromkeys(one for one, _ in found.by_number.values()))
        found._by_param = {id(one.param): one for one in found.listed}
        return found

    @property
    def names(self) -> dict[int, str]:
        """Return the names by number, in the order of ``wrapper.parameters()``.

        Using this order, loading detects whether the optimizer has its parameters in the order of its model.
        """
        return {self.numbers[original]: original.name for one in self.listed for original in one.originals}

    def named(self, name: str) -> Place | None:
        """Return the original with a name, which may contain path parts of wrappers; None if there is none."""
        return self.by_name.get(name, self.by_name.get(plain_name(name)))

    def of(self, param: Any) -> OptimParam | None:
        """Return the `OptimParam` of a parameter; None if the parameter does not belong to the model."""
        return self._by_param.get(id(param))


def _in_order(unit: Unit) -> list[tuple[FlatParamHandle, int]]:
    """Return the parameters of a unit, in the order in which its modules list them."""
    every = [(handle, slot) for handle in unit.owned_handles for slot in range(len(handle.layout.slots))]
    at = {(place.module, place.name): key for key in every for place in key[0].places[key[1]]}
    wanted = ((module, name) for module in own_modules(unit.module) for name in module._parameters)
    return list(dict.fromkeys([*(at[place] for place in wanted if place in at), *every]))


def root_of(model: Any, optim: Any = None) -> Unit:
    """Return the unit of an outermost wrapper; raise TypeError for any other model.

    With an `OwnedOptimizer`, a module under `fully_shard` is also accepted.
    """
    root = unit_of_wrapper(model)
    if root is None and hasattr(optim, "stepped_in") and isinstance(model, nn.Module):
        root = unit_of(model)
    if root is None:
        raise TypeError(f"the outermost FullyShardedDataParallel is needed, got a {type(model).__name__}")
    return root


def is_uncollected(unit: Unit, root: Unit) -> bool:
    """Return whether a unit's optimizer state is excluded from the gathered state.

    The state is excluded by option, or if rank 0 already has all of it (a unit with a single rank in a sharded model).
    """
    is_alone = unit.comm.world_size == 1 < root.comm.world_size and unit is not root
    return is_alone or unit.settings["no_broadcast_optim_state"]


def parameters_of(model: nn.Module, what: str, optim: Any = None) -> Parameters:
    """Return a model's parameters for optimizers; an error inside a forward, backward or `summon_full_params`."""
    root = root_of(model, optim)
    require_shards(units_of(root.module.modules()), what)
    return Parameters(model, root).stepped_by(optim)


@dataclass(frozen=True, eq=False)
class OwnState:
    """The state of an optimizer on this rank."""

    dictionary: Mapping[str, Any]  # the optimizer's state_dict(), which must not be changed
    groups: list[list[OptimParam]]  # the parameters of each group
    ids: dict[OptimParam, Any]  # the optimizer's number of each parameter
    states: dict[OptimParam, Mapping[str, Any]]  # the state of each parameter with state


def own_state(params: Parameters, optim: Any) -> OwnState:
    """Return the state of an optimizer, or of another object with a ``state_dict()``, on this rank."""
    if not callable(getattr(optim, "state_dict", None)):
        raise TypeError(f"an optimizer, or another object with a state_dict(), is needed; got a {type(optim).__name__}")
    dictionary = optim.state_dict()
    if not isinstance(dictionary, Mapping) or not {"state", "param_groups"} <= dictionary.keys():
        raise TypeError(
            f"{type(optim).__name__}.state_dict() has no 'state' and 'param_groups' as torch's optimizers have"
        )
    groups = held_by(params, optim, dictionary)
    numbers = [number for group in dictionary["param_groups"] for number in group["params"]]
    ids = dict(zip((one for group in groups for one in group), numbers, strict=True))
    states = {one: dictionary["state"].get(number) for one, number in ids.items() if not one.is_bytes}
    return OwnState(dictionary, groups, ids, {one: state for one, state in states.items() if state})


def held_by(params: Parameters, optim: Any, dictionary: Mapping[str, Any]) -> list[list[OptimParam]]:
    """Return the parameters in each group of an optimizer with this ``state_dict()``.

    An object without ``param_groups`` must contain the model's parameters in order: either all, or the trainable
    ones.
    """
    sizes = [len(group["params"]) for group in dictionary["param_groups"]]
    shown = getattr(optim, "stepped_groups", getattr(optim, "param_groups", None))
    if isinstance(shown, (list, tuple)) and [len(group["params"]) for group in shown] == sizes:
        return grouped(shown, type(optim).__name__, params.of)
    for every in (params.listed, [one for one in params.listed if one.param.requires_grad]):
        if len(every) == sum(sizes):
            starts = [sum(sizes[:number]) for number in range(len(sizes))]
            return [every[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    raise ValueError(
        f"{type(optim).__name__}: its state_dict() has {sum(sizes)} parameters, but the model has "
        f"{len(params.listed)}, and without param_groups their correspondence is unknown. Add a `param_groups` "
        "attribute, or pass the inner optimizer."
    )
