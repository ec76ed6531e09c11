"""Parameters shared by multiple units: `append_shared_param`.

A tied parameter must belong to a unit that contains all of its uses. If modules with a tied parameter are wrapped
separately, with ``flatten_parameters=False``, the first wrapper owns the parameter and the other wrappers *want* it.
When the parameter is appended to such a wrapper, the wrapper's places are added to the handle, so there is a single
shard, leaf and gradient. Before the first use, the handle moves to the lowest unit around all these units, which
keeps the parameter unsharded during its whole forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp.distributed.dtensor import MeshPart, is_dtensor
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import paths_in
from fsdp.engine.originals import Places, follow_flat_param, lender_of, note_stale, taken_over
from fsdp.engine.precision import Precision
from fsdp.engine.shard import Shard
from fsdp.engine.unit import Share, TrainingState, Unit, Wanted, unit_of, units_in
from fsdp.layers.state_requests import Exporting


def wanted(tied: Mapping[nn.Parameter, Places]) -> list[Wanted]:
    """Return the parameters that `collect` found in other units, with these units."""
    found = []
    for param, places in tied.items():
        owner, taken = lender_of(param), taken_over(param)
        if owner is not None and taken is not None and taken.flat_param is not None:
            shard = taken.flat_param()
            found += [Wanted(handle, owner, places) for handle in owner.owned_handles if handle.flat_param is shard]
    return found


def claimed_by(units: Iterable[Unit]) -> set[tuple[nn.Module, str]]:
    """Return the places of parameters that units want; an enclosing unit must not own them."""
    return {(place.module, place.name) for unit in units for one in unit.wanted for place in one.places}


def share(unit: Unit, param: Any) -> None:
    """Add a parameter of another unit to `unit`; see `append_shared_param`."""
    if any(one.state is TrainingState.SUMMON_FULL_PARAMS for one in (unit, *(one.owner for one in unit.wanted))):
        raise RuntimeError(
            f"append_shared_param: inside summon_full_params() the modules of {unit.name} and of units tied to it have "
            "copies only. Leave the context first."
        )
    asked = next((one for one in unit.wanted if _is_of(one.handle, param)), None)
    if asked is None:
        if any(_is_of(handle, param) for handle in unit.borrowed_handles):
            return
        open_ones = ", ".join(one.places[0].fqn for one in unit.wanted) or "none"
        raise ValueError(
            f"{unit.name}: append_shared_param got a {type(param).__name__} that is not a parameter of another wrapper "
            f"that is tied to one in this module (those are: {open_ones}). Tie them before wrapping (b.weight = "
            "a.weight), wrap both with flatten_parameters=False, and pass the weight of the first wrapped module."
        )
    check_share(unit, asked)
    for place in asked.places:
        place.module._parameters[place.name] = None
    asked.handle.use_at(asked.places)
    unit.wanted.remove(asked)
    _join(unit, asked.handle, asked.owner)


def _join(unit: Unit, handle: FlatParamHandle, owner: Unit) -> None:
    """Record that `unit` uses a handle of another unit."""
    common = next((one for one in owner.shares if one.handle is handle), None)
    if common is None:
        common = Share(handle, [owner], owner)
        owner.shares.append(common)
    common.members.append(unit)
    unit.shares.append(common)
    from fsdp.layers.verify import agreed  # not required before the first use

    agreed.difference_update(common.members)


def check_share(unit: Unit, asked: Wanted) -> None:
    """Raise an error if a unit cannot use a parameter of another unit."""
    owner, name = asked.owner, f"{asked.places[0].fqn} of {unit.name}"
    for one in (unit, owner):
        if one.runtime is not None:
            raise RuntimeError(
                f"{name} can be shared before the first use only, and {one.name} was used already. Call fully_shard "
                "on all modules before it, or append_shared_param right after wrapping, or after `_reset_lazy_init()` "
                "on the outermost wrapper."
            )
    ours, theirs = _dtypes(unit.precision_at(asked.places)), _dtypes(asked.handle.precision)
    for what, differ in (
        ("process_group", unit.everyone != owner.everyone),
        ("compute_device", unit.device != owner.device),
        ("precision", ours != theirs),
    ):
        if differ:
            raise ValueError(
                f"{name} and {_name(asked.handle)} of {owner.name} are one parameter, but their units differ in "
                f"{what}. Shard both with the same {what}."
            )


def split_off(param: nn.Parameter, owner: Unit | None) -> None:
    """Move an original parameter of `owner` into a separate flat parameter. Not collective.

    With `fully_shard`, a module may share a parameter with a module that is already sharded, but was not used yet. The
    shared parameter requires a separate handle, which the unit around both modules can run.
    """
    taken = taken_over(param)
    shard = None if taken is None or taken.flat_param is None else taken.flat_param()
    handle = next((one for one in owner.owned_handles if one.flat_param is shard), None) if owner is not None else None
    if taken is None or owner is None or handle is None or len(handle.places) == 1:
        return
    if owner.runtime is not None:
        raise RuntimeError(
            f"{taken.description} is tied to a parameter of the module to be sharded, but its own module was used "
            "already. Call fully_shard on all modules before the first forward."
        )
    _alone(owner, handle, taken.slot)


def _alone(owner: Unit, handle: FlatParamHandle, slot: int) -> FlatParamHandle:
    """Split a handle of `owner` in two if it has multiple parameters; return the handle of this parameter alone."""
    handle.absorb()
    if len(handle.places) == 1:
        return handle
    rest = [other for other in range(len(handle.places)) if other != slot]
    parts = [_split_out(owner, handle, slots) for slots in ([slot], rest)]
    handle.presentation.leave()
    for kept in (owner.owned_handles, owner.handles):
        at = kept.index(handle)
        kept[at : at + 1] = parts
    for part in parts:
        part.presentation.enter()
    return parts[0]


def _split_out(owner: Unit, handle: FlatParamHandle, slots: Sequence[int]) -> FlatParamHandle:
    """Return a handle for some of the parameters of another handle, with a copy of their local shards."""
    from fsdp.layers.dtensor_params import DTensorParams  # imports DTensor, which takes a second

    old, listed = handle.flat_param, handle.orig_params
    if not isinstance(listed, DTensorParams):
        raise TypeError(f"{handle.name} is not in rows")
    flat_param = old.part_of_shard(slots, handle.comm.rank, handle.comm.world_size)
    flat_param.fingerprints = handle.values.fingerprints and handle.values.fingerprints.only(slots)
    params = [listed.params[slot] for slot in slots]
    new_orig_params = partial(DTensorParams, spread=listed.spread, params=params)
    kept = handle.kept_shard
    places = [handle.places[slot] for slot in slots]
    shard = Shard(flat_param, places, (), new_orig_params, new_unsharded=handle.new_unsharded)
    comms = handle.comm, handle.reduce_comm, handle.replicas
    alike = None if kept is None else kept.alike()
    made = FlatParamHandle(shard, *comms, handle.precision, owner.policy, handle.replica_axis, alike)
    owner.attach(made)
    follow_flat_param(old, {slot: (flat_param, number) for number, slot in enumerate(slots)})
    return made


def refuse_nothing_own(found: Mapping[nn.Parameter, Places], tied: Mapping[nn.Parameter, Places], kind: str) -> None:
    """Raise ValueError if all parameters of a module belong to other units."""
    if tied and not found:
        names = ", ".join(places[0].fqn for places in tied.values())
        raise ValueError(
            f"{kind} has no parameter of its own: {names} is the same parameter as one which another unit has already "
            "taken over. Leave both modules unwrapped: the unit that contains both must take over the parameter "
            "(auto_wrap does this automatically)."
        )


class _Listed(NamedTuple):
    """A parameter in a module under `fully_shard`, with the unit that owns it."""

    param: nn.Parameter
    unit: Unit

    def found(self) -> tuple[FlatParamHandle, int]:
        """Return the handle of the parameter, and the parameter's number in the handle."""
        return next(
            (handle, slot)
            for handle in self.unit.owned_handles
            for slot, param in enumerate(_dtensors(handle))
            if param is self.param
        )

    @property
    def places(self) -> list[ParamInfo]:
        handle, slot = self.found()
        return handle.places[slot]


def _dtensors(handle: FlatParamHandle) -> Sequence[nn.Parameter]:
    """Return a handle's parameters if they are `DTensor`s, else nothing."""
    listed = handle.orig_params
    return listed.params if listed is not None and is_dtensor(listed.params[0]) else ()


def tie_assigned(units: Iterable[Unit]) -> None:
    """Merge parameters that the user tied after sharding, so that modules list the same `DTensor` for both.

    Units after the first use are skipped; their handles raise an error instead.

    Raises:
        RuntimeError: for two parameters that cannot be merged.
    """
    kept: dict[nn.Parameter, _Listed] = {}
    others: list[tuple[_Listed, nn.Parameter]] = []
    for unit in units:
        for handle in () if unit.runtime is not None else unit.owned_handles:
            kept |= {param: _Listed(param, unit) for param in _dtensors(handle)}
    for one in list(kept.values()):
        values = {place.module._parameters.get(place.name) for place in one.places}
        value = values.pop()
        if not values and value is not None and value is not one.param and kept.setdefault(value, one) is not one:
            others.append((one, value))
    for one, value in others:
        _tie(kept[value], one)


def _tie(first: _Listed, other: _Listed) -> None:
    """Replace the parameter `other` by the parameter `first` in all its places."""
    places, name = other.places, other.places[0].fqn
    _check_alike(first, other)
    note_stale(other.param, f"what {name} was before it was tied to {first.places[0].fqn}")
    for place in places:  # the value that the user assigned belongs to the first parameter
        place.module._parameters.update({place.name: other.param})
    other.found()[0].presentation.refill()
    handle = _alone(first.unit, *first.found())
    left = _alone(other.unit, *other.found())
    left.presentation.leave()
    other.unit.give_up(left)
    other.unit.owned_handles.remove(left)
    for place in places:
        place.module._parameters.update({place.name: None})
    handle.use_at(places)
    if other.unit is not first.unit:
        _join(other.unit, handle, first.unit)


def _check_alike(first: _Listed, other: _Listed) -> None:
    """Raise RuntimeError for two parameters that cannot be merged."""
    (handle, slot), (left, number) = first.found(), other.found()
    for what, differ in (
        ("shape or placements", MeshPart.of(first.param) != MeshPart.of(other.param)),
        ("dtype", first.param.dtype != other.param.dtype),
        ("ranks", first.unit.everyone != other.unit.everyone),
        ("device", first.unit.device != other.unit.device),
        ("precision", _dtypes(handle.precision) != _dtypes(left.precision)),
        ("the modules that share them already", any(one.handle is left for one in other.unit.shares)),
    ):
        if differ:
            raise RuntimeError(
                f"{left.places[number][0].fqn} was tied to {handle.places[slot][0].fqn} after sharding, and cannot "
                f"become one parameter with it: they differ in {what}. Tie them before fully_shard."
            )


def settle_shares(root: Unit, names: Mapping[Unit, str], *, all_inside: bool) -> None:
    """Assign each shared parameter in a tree of units to the lowest unit around all its uses.

    The `names` are those of all units in the tree. With `all_inside`, all units that share a parameter must be in the
    tree; otherwise such a parameter is not moved. A tied parameter that is not shared yet raises a RuntimeError.
    """
    units = list(names)
    _refuse_wanted(names)
    tie_assigned(units)
    shares = dict.fromkeys(one for unit in units for one in unit.shares)
    around = _units_around(units) if shares else {}
    for one in shares:
        missing = [member.name for member in one.members if member not in names]
        if not missing:
            _move(one, _lowest_around(one.members, root, around))
        elif all_inside:
            here = ", ".join(f"'{names[member]}'" for member in one.members if member in names)
            raise RuntimeError(
                f"{_name(one.handle)} of {here} is shared (append_shared_param) with {', '.join(missing)}, which is "
                f"not inside of {root.name}, the outermost unit in use. Shard the module that contains them all, and "
                "call or unshard it before the modules inside of it."
            )


def _move(one: Share, unit: Unit) -> None:
    """Assign a shared handle to another unit, which must have the same ranks, while no unit computes."""
    before = one.holder
    if unit is before:
        return
    owner = one.members[0]
    for what, differ in (
        ("their ranks", unit.everyone != owner.everyone),
        ("their devices", unit.device != owner.device),
    ):
        if differ:
            raise RuntimeError(
                f"{unit.name} is the innermost unit around all modules that share {_name(one.handle)} of {owner.name}, "
                f"and has to gather it, but it differs from them in {what}. Shard it over the same ranks and device."
            )
    one.handle.gradients.rescale(before.policy.predivide / unit.policy.predivide)
    before.give_up(one.handle)
    unit.adopt(one.handle)
    if before not in one.members:
        before.shares.remove(one)
    if unit not in one.members:
        unit.shares.append(one)
    one.holder = unit


def _refuse_wanted(names: Mapping[Unit, str]) -> None:
    for unit, name in names.items():
        for one in unit.wanted:
            owner = names.get(one.owner, one.owner.name)
            raise RuntimeError(
                f"{one.places[0].fqn} of '{name}' is the same parameter as {_name(one.handle)} of '{owner}', which has "
                f"taken it over: the two would no longer be tied. Call append_shared_param on the wrapper of '{name}' "
                "before the first use; or leave both unwrapped: the unit that contains both must take over the "
                "parameter (auto_wrap does this automatically)."
            )


def _units_around(units: Iterable[Unit]) -> dict[Unit, dict[Unit, None]]:
    """Return for each unit of a tree the units that contain it, inner before outer, including the unit."""
    found: dict[Unit, dict[Unit, None]] = {unit: {} for unit in units}
    for unit in reversed(found):
        for inner in units_in(unit):
            found[inner][unit] = None
    return found


def _lowest_around(members: Sequence[Unit], root: Unit, around: Mapping[Unit, Mapping[Unit, None]]) -> Unit:
    modules = {module for member in members for module in member.modules}
    common = (unit for unit in around[members[0]] if all(unit in around[member] for member in members))
    return next(unit for unit in common if unit is root or not _reaches(root, modules, without=unit))


def _reaches(root: Unit, modules: set[nn.Module], without: Unit) -> bool:
    """Return whether any of `modules` is in the root's tree outside the unit `without`."""
    seen: set[nn.Module] = set()
    ahead = [root.module]
    while ahead:
        current = ahead.pop()
        if current in modules and unit_of(current) is not without:
            return True
        if current not in seen and unit_of(current) is not without:
            seen.add(current)
            ahead += current.children()
    return False


def exported_around(unit: Unit) -> set[int]:
    """Return the addresses of shared parameters in the enclosing unit's state dict that is being created."""
    around = [one for inner in units_in(unit) for one in inner.shares if one.holder.request(Exporting)]
    places = [one.handle.places[0][0] for one in around if one.handle.presentation.is_exposed]
    values = [place.module._parameters[place.name] for place in places]
    return {value.data_ptr() for value in values if value is not None}


def keys_of(unit: Unit) -> set[str]:
    """Return the names, relative to the unit's module, of all parameters that its modules list while summoned."""
    shared = {one.handle for one in unit.shares}
    keys = {place.fqn for handle in unit.handles if handle not in shared for used in handle.places for place in used}
    if shared:
        paths = paths_in(unit.module)
        places = [place for handle in shared for place in handle.places[0]]
        keys |= {path + place.name for place in places for path in paths.get(place.module, ())}
    return keys


def _dtypes(precision: Precision) -> tuple[Any, ...]:
    return precision.compute, precision.reduce, precision.grads


def _is_of(handle: FlatParamHandle, param: Any) -> bool:
    """Return whether `param` belongs to the handle: an original parameter, the shard, or a tensor in a module."""
    taken = taken_over(param) if isinstance(param, Tensor) else None
    if taken is not None:
        return taken.flat_param is not None and taken.flat_param() is handle.flat_param
    places = [place for used in handle.places for place in used]
    return param is handle.flat_param or any(place.module.__dict__.get(place.name) is param for place in places)


def _name(handle: FlatParamHandle) -> str:
    return handle.places[0][0].fqn
