"""Local state dicts: a rank's shards, their metadata for consolidation, and loading, without communication.

A local state dict is the result of `nn.Module.state_dict` without a gather: modules list their shards, under the names
of FairScale's flat parameters. Loading has two steps. First, all keys are compared, and no value changes; then shards
are copied, and the remaining entries (buffers, ignored parameters, extra state) are passed to
`nn.Module.load_state_dict`, for modules with a custom load method.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp.distributed.communicator import some_of
from fsdp.distributed.dtensor import is_dtensor
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name, join, named_modules, paths_in
from fsdp.engine.originals import is_ours
from fsdp.engine.unit import Unit, unit_of_wrapper, units_in
from fsdp.layers.shared_params import settle_shares
from fsdp.layers.state_dict.full import is_customised, require_mapping, stored_buffers, with_wrapped_metadata
from fsdp.layers.state_requests import LocalState, require_shards, serving

_NAMED = 5  # in messages
_EXTRA = "_extra_state"
_MARK = "fsdp_shard"  # key in a state dict's metadata for a unit's module, with the rank and the number of ranks
_REMEDY = (
    "A shard can be loaded only by the same rank of the same number of ranks, into a model with the same wrapping. "
    "Otherwise consolidate the shards of all ranks (FullyShardedDataParallel.consolidate_shard_weights) and use "
    "load_state_dict."
)


def _members_in(wrapper: nn.Module) -> dict[Unit, str]:
    """Return the units of this wrapper and of inner wrappers, with their paths relative to it as plain names."""
    named = ((path, unit_of_wrapper(module)) for path, module in named_modules(wrapper))
    return {unit: path for path, unit in named if unit is not None}


def _title(unit: Unit, path: str) -> str:
    return f"'{path}'" if path else f"{unit.name}, the outermost"


@contextmanager
def local(root: Unit, what: str) -> Iterator[None]:
    """Inside the context, state dicts of all units of the tree contain shards."""
    if root.request(LocalState):  # this state is part of an enclosing unit's state, perhaps in a subclass
        yield
        return
    units = units_in(root)
    require_shards(units, what)
    settle_shares(root, units, all_inside=False)
    for handle in _handles(units):
        handle.absorb()  # tensors that users have assigned to parameters are stored in the shards
        handle.presentation.refuse_lent("save or load its shards", handle.unit_name)
        handle.storage.check_readable(handle.name)
    with serving(units, LocalState()):
        yield


def local_state(unit: Unit, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Return the `state_dict` of a unit's module inside `local`: shards, under the names that modules list."""
    with stored_buffers([unit]):
        state = unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        metadata.setdefault(prefix[:-1], {})[_MARK] = (unit.comm.rank, unit.comm.world_size)
    return state


def shard_mark(state_dict: Any, path: str) -> tuple[int, int] | None:
    """Return the rank and world size of the unit at `path` (a plain name) in a local state dict; None if unknown."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    found = metadata.get(path, {}).get(_MARK)
    return None if found is None else tuple(found)


def local_metadata(root: nn.Module) -> dict[str, Any]:
    """Return the metadata of an outermost wrapper's shards on this rank, in FairScale's format for `consolidate`."""
    paths, members = paths_in(root), _members_in(root)
    outermost = next(iter(members))
    entries = [_entry(unit, path, outermost) for unit, path in members.items()]
    for (unit, own_path), entry in zip(members.items(), entries, strict=True):
        for handle in unit.owned_handles:
            for slot, places in zip(handle.layout.slots, handle.places, strict=True):
                primary = join(own_path, slot.name)
                names = [path + place.name for place in places for path in paths.get(place.module, ())]
                for name in dict.fromkeys(names):
                    if name != primary:
                        is_inside = not own_path or name.startswith(f"{own_path}.")
                        holder, path = (entry, own_path) if is_inside else (entries[0], "")
                        pair = primary.removeprefix(f"{path}."), name.removeprefix(f"{path}.")
                        holder["shared_param_info"].append(pair)
    beside = [key for key, tensor in _entries(root).items() if tensor is None or not is_ours(tensor)]
    return {"param_metadata": entries, "buffer_names": beside}


def _entry(unit: Unit, path: str, outermost: Unit) -> dict[str, Any]:
    for problem in _beyond_fairscale(unit):
        raise NotImplementedError(
            f"{_title(unit, path)}: {problem}, which FairScale's format does not support. Save state_dict() instead, "
            "which is unsharded on every rank; local_state_dict() by itself is loaded again by the same ranks."
        )
    # Only the group of a unit's ranks that contains the first rank is consolidated, if ranks are known.
    first, ranks = min(outermost.ranks, default=None), unit.comm.ranks
    is_counted = first is None or not ranks or first in ranks
    params: dict[str, dict[str, Any]] = {}
    for handle in unit.owned_handles:
        params |= dict(_backings(handle, unit.settings["flatten_parameters"], is_counted))
    alone = unit.comm.world_size == 1 < outermost.comm.world_size  # the first rank has all of it
    return {"fsdp_path": path, "params": params, "no_broadcast_optim_state": alone, "shared_param_info": []}


def _beyond_fairscale(unit: Unit) -> Iterator[str]:
    if unit.placements.is_nested:
        yield "it has shards that are divided along the replica axis again, in an order"
    for handle in unit.owned_handles:
        slots = handle.layout.slots
        if any(handle.flat_param.parts):
            yield f"{slots[0].name} is a DTensor, of which a shard has parts of parts"
        if any(handle.flat_param.packings):
            yield f"{slots[0].name} is sharded as bytes, with a class and a shape"
        if handle.orig_params is None and any(one.stop < other.start for one, other in pairwise(slots)):
            yield (
                f"{handle.name} has padding between its parameters, for blocks of {unit.placements.block_numel} "
                "elements (wrap with use_orig_params=True to avoid it)"
            )


def _backings(handle: FlatParamHandle, is_flat: bool, is_counted: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names under which modules list a handle's parameters, with the contents of each."""
    slots, rank = handle.layout.slots, handle.comm.rank
    # Each parameter separately: the format does not support gaps in a vector. Local shards have no padding.
    groups = [slots] if handle.orig_params is None else [(slot,) for slot in slots]
    for number, group in enumerate(groups):
        listed = handle.listed.param_of(number)
        padding = handle.layout.padding(rank) if handle.orig_params is None else 0
        is_one = handle.orig_params is not None or not is_flat
        yield (
            group[0].name if is_one else handle.presentation.entries[0][1],
            {
                "names": [slot.name for slot in group],
                "shapes": [slot.shape for slot in group],
                "numels": [slot.numel for slot in group],
                # Elements that must not be read count as padding, for FairScale's reader too.
                "padding": padding if is_counted else listed.numel(),
            },
        )


def _entries(root: nn.Module) -> dict[str, Tensor | None]:
    """Return the saved tensors of modules by plain name (shards, local shards, other tensors); None for extra state."""
    found: dict[str, Tensor | None] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        path = clean_name(path)
        kept = {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                found.setdefault(join(path, name), tensor)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[join(path, _EXTRA)] = None
    return found


class LocalLoad:
    """A load of this rank's shards inside `local`. Creation only checks the state dict; values change when it runs.

    The keys may be plain or raw names. With `strict`, missing and unexpected keys raise an error.
    """

    def __init__(self, root: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
        self._root, self._members, self._strict, self._given = root, _members_in(root), strict, state_dict
        self._handles = {id(one.flat_param): one for one in _handles(self._members)}
        self._wanted = _entries(root)
        self._shards = {key: one for key, one in self._wanted.items() if one is not None and is_ours(one)}
        self._values = self._renamed(state_dict)
        named = root.named_modules(remove_duplicate=False)
        self._loads_alone = [clean_name(path) for path, module in named if is_customised(module)]
        problems = [*self._other_ranks(), *self._misfits(), *(self._odd_keys() if strict else ())]
        if problems:
            self._refuse(problems)

    def _refuse(self, problems: Sequence[str]) -> None:
        unit = next(iter(self._members))
        more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
        raise RuntimeError(
            f"rank {unit.comm.rank} of {unit.comm.world_size}: cannot load this local state dict into {unit.name}: "
            + "; ".join([*problems[:_NAMED], *more])
            + f". {_REMEDY}"
        )

    def _renamed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values by plain names; the names in old versions of FairScale had no number."""
        require_mapping(state_dict)
        values: dict[str, Any] = {}
        for key, value in state_dict.items():
            name = clean_name(key)
            if name not in self._wanted and name.rpartition(".")[2] == "flat_param":
                name += "_0"
            if name in values:
                raise RuntimeError(f"two keys of this local state dict mean {name!r}: remove one of them")
            values[name] = value
        return values

    def _other_ranks(self) -> Iterator[str]:
        for unit, path in self._members.items():
            comm, mark = unit.comm, shard_mark(self._given, path)
            if mark is not None and mark != (comm.rank, comm.world_size):
                yield (
                    f"of unit {_title(unit, path)} it has shard {mark[0]} of {mark[1]}, and this rank has shard "
                    f"{comm.rank} of {comm.world_size}"
                )

    def _misfits(self) -> Iterator[str]:
        for key, own in self._wanted.items():
            value = self._values.get(key)
            if own is None or key not in self._values or (key not in self._shards and self._is_left_alone(key)):
                continue
            if not isinstance(value, Tensor) or (key in self._shards and is_dtensor(value)):
                yield f"{key!r} is a {type(value).__name__} instead of a tensor"
            elif value.is_meta:
                yield f"{key!r} has no values: it is on the meta device"
            elif key in self._shards and value.numel() != own.numel():
                handle = self._handle(own)
                unit = next(one for one in self._members if handle in (*one.owned_handles, *one.borrowed_handles))
                yield (
                    f"{key!r} (unit {_title(unit, self._members[unit])}, shard {handle.comm.rank} of "
                    f"{handle.comm.world_size}) has {value.numel()} elements, and this rank's shard has {own.numel()}"
                )
            elif key in self._shards and value.dtype != own.dtype and any(self._handle(own).flat_param.packings):
                names = ", ".join(slot.name for slot in self._handle(own).layout.slots)
                yield (
                    f"{key!r} is of {value.dtype}, and this rank's shard has bytes ({own.dtype}) of {names}: load the "
                    "local state dict of a model that is quantised in the same way, or values with load_state_dict"
                )
            elif key not in self._shards and not _fits(value, own):
                yield f"{key!r} has shape {tuple(value.shape)}, and the model has {tuple(own.shape)}"

    def _odd_keys(self) -> Iterator[str]:
        missing = [key for key in self._wanted if key not in self._values]
        unexpected = [key for key in self._values if key not in self._wanted]
        for what, keys in (("missing keys", missing), ("unexpected keys", unexpected)):
            keys = [key for key in keys if key in self._shards or not self._is_left_alone(key)]
            if keys:
                yield f"{what} {some_of(map(repr, keys))}"

    def _is_left_alone(self, key: str) -> bool:
        """Return True if a module handles the key with a custom load method, so that the result is unknown."""
        return any(not path or key.startswith(f"{path}.") for path in self._loads_alone)

    def _handle(self, listed: Tensor) -> FlatParamHandle:
        return self._handles[id(listed.owner)]  # type: ignore[attr-defined]

    def run(self) -> Any:
        """Load, and return torch's result with the plain names of missing and unexpected keys."""
        for handle in self._handles.values():
            handle.storage.check(handle.name)
        for handle in self._handles.values():
            handle.values.touch()  # even if this rank loads no value, because other ranks may
        done: set[int] = set()  # tied parameters have multiple names
        for key, own in self._shards.items():
            if key in self._values and id(own) not in done:
                done.add(id(own))
                handle = self._handle(own)
                shards = handle.orig_params.params if handle.orig_params is not None else []
                slot = next((slot for slot, each in enumerate(shards) if each is own), None)  # None: flat parameter
                handle.values.fill_local(self._values[key], slot)
        rest = OrderedDict((key, value) for key, value in self._values.items() if key not in self._shards)
        if hasattr(self._given, "_metadata"):
            rest._metadata = self._given._metadata  # type: ignore[attr-defined]
        with stored_buffers(list(self._members)):
            result = nn.Module.load_state_dict(self._root, with_wrapped_metadata(rest, self._root), strict=False)
        missing = [key for key in self._shards if key not in self._values]
        result.missing_keys[:] = [*missing, *(key for key in result.missing_keys if key not in self._shards)]
        if self._strict and (result.missing_keys or result.unexpected_keys):  # from modules with custom load methods
            self._refuse([f"missing keys {result.missing_keys}, unexpected keys {result.unexpected_keys}"])
        return result


def _fits(value: Tensor, own: Tensor) -> bool:
    """Return True if torch would load the value; torch accepts a tensor of a single element for a scalar."""
    return is_lazy(own) or value.shape == own.shape or (own.dim() == 0 and value.shape == (1,))


def _handles(units: Iterable[Unit]) -> list[FlatParamHandle]:
    """Return all handles with parameters in a tree's modules, regardless of the unit that runs them."""
    listed = [(*unit.owned_handles, *unit.borrowed_handles, *unit.handles) for unit in units]
    return list(dict.fromkeys(handle for handles in listed for handle in handles))
