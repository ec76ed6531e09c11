"""The tensors of a model in files, each under a single FQN, and the ranges that each rank writes and reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.checkpoint.added_tensors import added_tensors, take_back
from fsdp.checkpoint.formats.source import TensorReader
from fsdp.checkpoint.safetensors import KINDS, Entry
from fsdp.distributed.collectives import LONE_RANK, communicator
from fsdp.distributed.communicator import Communicator, default_group, own_rank, ranks_of
from fsdp.distributed.consensus import Ranks, from_everyone, number_among, size_of, told_by_all
from fsdp.distributed.devices import HOST
from fsdp.distributed.dtensor import MeshPart, groups_of, is_on_many_ranks, local_part
from fsdp.distributed.gather_extension import inner_of
from fsdp.engine.boxes import Box
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import plain_name
from fsdp.engine.originals import is_ours
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.unit import Unit, outermost_units, own_modules, units_of
from fsdp.layers.deferred_init import require_values_everywhere
from fsdp.layers.managed_params import is_packed
from fsdp.layers.module_overrides import Conversions
from fsdp.layers.state_dict.full import ensure_agreed, ensure_same_values
from fsdp.layers.state_dict.sharded import is_apart
from fsdp.layers.state_requests import require_shards

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"  # compared by name, because its import takes long


@dataclass(frozen=True, slots=True)
class Held:
    """The elements of a tensor on this rank: elements ``start:stop`` of a box of the tensor, in row-major order.

    The elements are consecutive in this rank's `vector`, from `offset` on.
    """

    box: Box
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass
class _Named:
    names: list[str]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The names under which the tensor may be stored, including names without the prefixes of torch's wrappers."""
        return tuple(dict.fromkeys((*self.names, *map(plain_name, self.names))))


@dataclass
class SlotTensor(_Named):
    """A sharded parameter."""

    handle: FlatParamHandle
    slot: int

    @property
    def shape(self) -> torch.Size:
        seen = self.part or self.packing
        return self.handle.layout.slots[self.slot].shape if seen is None else seen.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.handle.flat_param.dtype if self.packing is None else self.packing.dtype

    @property
    def packing(self) -> Any:
        """Return the packing of a plain tensor that is sharded as bytes, such as integers, or None."""
        packing = self._form
        return packing if packing is not None and packing.is_tensor and packing.dtype in KINDS else None

    @property
    def description(self) -> str:
        """The class, dtypes and metadata of a parameter that is sharded as bytes; empty for other parameters."""
        return "" if self._form is None else str(self._form.description)

    @property
    def form(self) -> str:
        """The form of a parameter, if files contain it as a tensor of another form; otherwise empty."""
        example = self.handle.flat_param.examples[self.slot]
        count = 0 if example is None else len(inner_of(example))
        text = self.description if self.packing is None else ""
        return _in_header(text or (f"{count} inner tensors" if count > 1 else ""))

    @property
    def _form(self) -> Any:
        return self.handle.flat_param.packings[self.slot]

    @property
    def part(self) -> MeshPart | None:
        return self.handle.flat_param.parts[self.slot]

    @property
    def param(self) -> nn.Parameter:
        """Return the parameter that an optimizer updates."""
        return self.handle.listed.param_of(self.slot)

    @cached_property
    def held(self) -> Held | None:
        layout, rank = self.handle.layout, self.handle.comm.rank
        interval = layout.interval(self.slot, rank)
        if interval is None:
            return None
        if self.packing is not None:  # the interval counts bytes, and ends with padding
            size = self.dtype.itemsize
            start, stop = interval.start // size, min(interval.stop // size, self.shape.numel())
            return Held(Box.whole(self.shape), start, stop, interval.offset // size) if start < stop else None
        if isinstance(layout, RowsLayout):
            box, start = layout.local_box(self.slot, rank), 0
        else:
            box, start = Box.whole(layout.slots[self.slot].shape), interval.start
        if self.part is not None:
            box = box.moved(self.part.offsets)
        return Held(box, start, start + interval.numel, interval.offset)

    def vector(self) -> Tensor:
        self.handle.storage.check_readable(self.handle.name)
        return self.handle.flat_param.vector if self.packing is None else self.handle.flat_param.vector.view(self.dtype)

    def fill(self, read: Callable[[Tensor], None]) -> None:
        """Call a function that writes the values of this rank's elements to a vector."""
        self.handle.storage.check(self.handle.name)
        self.handle.values.fill(
            self.slot, lambda shard: read(shard if self.packing is None else shard.view(self.dtype))
        )
        self.handle.storage.release()


@dataclass
class UnshardedTensor(_Named):
    """A buffer, or an unsharded parameter."""

    places: list[tuple[dict[str, Any], str]]  # in `_buffers`, or `_parameters`, of modules
    device: torch.device  # of the memory, if the tensor is on the meta device
    filled: Callable[[], None] | None = None  # called after a value was loaded

    handle: ClassVar[None] = None
    slot: ClassVar[int] = 0

    @property
    def tensor(self) -> Tensor:
        entries, name = self.places[0]
        return entries[name]

    @property
    def shape(self) -> torch.Size:
        if self.packing is not None:
            return torch.Size([self.packing.nbytes])
        self._require_elements()
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype if self.packing is None else torch.uint8

    @cached_property
    def packing(self) -> Any:
        """The packing of a frozen tensor of a quantised class, which is saved as bytes; None for any other tensor."""
        if not is_packed(self.tensor, in_rows=True):
            return None
        from fsdp.layers.packing import Packing  # for quantised parameters

        return Packing(self.names[0], self.tensor)

    @property
    def description(self) -> str:
        """The class, dtypes and metadata of a tensor that is saved as bytes; empty for other tensors."""
        return "" if self.packing is None else str(self.packing.description)

    @property
    def form(self) -> str:
        """The form of the tensor, if files contain it as a tensor of another form; otherwise empty."""
        return _in_header(self.description)

    @property
    def part(self) -> MeshPart | None:
        return MeshPart.of(self.tensor)

    @property
    def param(self) -> Tensor:
        return self.tensor

    @cached_property
    def held(self) -> Held | None:
        if self.packing is not None:
            return Held(Box.whole(self.shape), 0, self.packing.nbytes, 0)
        self._require_elements()
        part, local = self.part, local_part(self.tensor)
        if part is not None and not all(each.is_shard() or each.is_replicate() for each in part.placements):
            raise NotImplementedError(
                f"{self.names[0]} has placements {list(part.placements)}: only Shard and Replicate can be saved"
            )
        box = Box.whole(local.shape) if part is None else Box.whole(local.shape).moved(part.offsets)
        return Held(box, 0, local.numel(), 0) if local.numel() else None

    def _require_elements(self) -> None:
        if self.tensor.layout is not torch.strided or self.tensor.is_nested:
            kind = "nested" if self.tensor.is_nested else str(self.tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"{self.names[0]} is a {kind} tensor, which cannot be saved: register the tensors that it consists of, "
                "such as indices and values, as buffers, and this tensor with persistent=False"
            )

    def vector(self) -> Tensor:
        if self.tensor.is_meta:
            raise RuntimeError(
                f"cannot save a checkpoint: {plain_name(self.names[0])} is on the meta device and has no values"
            )
        if self.packing is not None:
            packed: Tensor = self.packing.pack_form(self.tensor)
            return packed
        return as_stored(local_part(self.tensor)).reshape(-1)

    def fill(self, read: Callable[[Tensor], None]) -> None:
        if self.tensor.is_meta:
            made = torch.empty_like(self.tensor, device=self.device)
            for entries, name in self.places:
                entries[name] = made
        if self.packing is not None:
            packed = self.packing.pack_form(self.tensor)
            read(packed)
            self.packing.unpack_into(packed, self.tensor)
            return
        local = local_part(self.tensor.detach())
        flat = as_stored(local).contiguous().view(-1)
        read(flat)
        if flat.data_ptr() != local.data_ptr():
            local.copy_(flat.view(local.shape))
        increment_version(self.tensor)
        if self.filled is not None:
            self.filled()


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory contains the values, after a lazy conjugation or negation was applied."""
    return tensor.detach().resolve_conj().resolve_neg()


Target = SlotTensor | UnshardedTensor
Paths = Mapping[nn.Module, Sequence[str]]  # of the modules in a model
_MAX_FORM = 1000  # characters


def _in_header(form: str) -> str:
    return form if len(form) < _MAX_FORM else f"{form[:_MAX_FORM]}... ({hashlib.sha256(form.encode()).hexdigest()})"


def ranges_of(target: Target) -> list[tuple[int, int]]:
    """Return the ranges of this rank's elements in a row-major tensor, or in elementwise state of an optimizer."""
    held = target.held
    return [] if held is None else list(held.box.ranges(target.shape, held.start, held.stop))


def read_ranges(files: TensorReader, key: str, ranges: Iterable[tuple[int, int]], into: Tensor) -> None:
    """Fill a vector with ranges of a tensor in files."""
    done = 0
    for first, last in ranges:
        files.read(key, into[done : done + last - first], first)
        done += last - first


def prepared(model: nn.Module, what: str) -> tuple[list[Unit], list[Ranks]]:
    """Collective the first time. Apply the user's changes to the shards; return the model's units and their ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"cannot {what}: the model must be a torch.nn.Module, got {type(model).__name__}")
    modules = [*model.modules()]
    units = units_of(modules)
    require_rest(model, modules, units, what)
    outermost = list(outermost_units(model))
    for unit in outermost:
        ensure_agreed(unit)
    for handle in handles_of(units):
        handle.absorb()
        handle.follow_shard()
    spread = {unit.everyone: unit for unit in reversed(outermost)}
    tensors = [*model.parameters(), *chain.from_iterable(module._buffers.values() for module in modules)]
    meshes = [part.mesh for tensor in tensors if tensor is not None and (part := MeshPart.of(tensor)) is not None]
    meshes += [part.mesh for handle in handles_of(units) for part in handle.flat_param.parts if part is not None]
    return units, [_with_meshes(unit, dict.fromkeys(meshes)) for unit in reversed(spread.values())]


def _with_meshes(unit: Unit, meshes: Iterable[Any]) -> Ranks:
    """Return the ranks over which a unit is sharded, together with the ranks of the model's `DTensor` meshes.

    The largest set of ranks comes first, and sets that add no ranks are omitted.
    """
    found: list[tuple[Collection[int], Ranks]] = [(unit.ranks, unit.everyone)]
    order = {comm.group: number for number, comm in enumerate(unit.everyone)}  # keeps the ranks' numbers
    for mesh in meshes:
        groups = [group for spread_over, group in groups_of(mesh).values() if len(spread_over) > 1]
        groups.sort(key=lambda group: order.get(group, len(order)))
        comms = [communicator(group, torch.device(mesh.device_type)) for group in groups]
        found.append((mesh.mesh.flatten().tolist(), comms))
    kept: list[Communicator] = []
    reached = {own_rank()}
    for spread_over, ways in sorted(found, key=lambda one: -len(one[0])):
        if not spread_over or not reached.issuperset(spread_over):
            kept += ways
            reached.update(spread_over)
    return tuple(kept) or unit.everyone


def tensors_in(paths_of: Paths, units: Sequence[Unit]) -> list[Target]:
    """Return all tensors of a model (`paths_in`) for files, sharded or not, each once with all of its names.

    A sharded parameter is omitted if its modules were removed from the model, because it has no name.
    """
    sharded = [
        SlotTensor(names, handle, slot)
        for handle in handles_of(units)
        for slot, places in enumerate(handle.places)
        if (names := [path + place.name for place in places for path in paths_of.get(place.module, ())])
    ]
    devices = {module: unit.device for unit in units for module in own_modules(unit.module)}
    others: dict[int, UnshardedTensor] = {}
    for module, paths in paths_of.items():
        device = devices.get(module, HOST)
        added = added_tensors(module, paths[0])
        for key, one in added.items():
            target = others.setdefault(id(one), UnshardedTensor([], [], device))
            target.names += [path + key for path in paths]
            target.places.append((added, key))
            target.filled = partial(take_back, module, paths[0], added, key)
        buffers = {
            name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for entries, listed in ((module._parameters, module._parameters), (module._buffers, buffers)):
            for name, tensor in listed.items():
                if isinstance(tensor, FlatParameter) and not tensor._is_managed:
                    raise NotImplementedError(
                        f"{paths[0]}{name} is flat: load a FlattenParamsWrapper with load_state_dict"
                    )
                if tensor is not None and not is_ours(tensor):
                    target = others.setdefault(id(tensor), UnshardedTensor([], [], device))
                    target.names += [path + name for path in paths]
                    target.places.append((entries, name))
    return [*sharded, *others.values()]


def extra_states(paths_of: Paths) -> dict[str, nn.Module]:
    """Return the modules of a model with extra state (``get_extra_state``), by the name of the state."""
    return {
        plain_name(f"{paths[0]}_extra_state"): module
        for module, paths in paths_of.items()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def handles_of(units: Sequence[Unit]) -> list[FlatParamHandle]:
    """Return all handles whose parameters the modules of these units use, each once."""
    return list(dict.fromkeys(handle for unit in units for handle in unit.visible_handles))


def require_rest(model: nn.Module, modules: Sequence[nn.Module], units: Sequence[Unit], what: str) -> None:
    """Raise an error for shards that are in use, of torch's FSDP1, or of a unit that is not in the model."""
    require_shards(units, what)
    inside = set(units)
    if any(kind.__module__ == _FSDP1 for each in {*map(type, modules)} for kind in each.__mro__):
        raise TypeError(
            f"cannot {what}: this {type(model).__name__} has parameters in shards of torch's FSDP1, which only torch "
            "can read. Save and load what torch.distributed.checkpoint.state_dict.get_state_dict returns, as in "
            "docs/leaving.md."
        )
    for module in modules:
        guarding = module.__dict__.get("_apply")
        if isinstance(guarding, Conversions) and guarding.unit not in inside:
            raise RuntimeError(
                f"this {type(model).__name__} is a part of {guarding.unit.name}, which keeps its parameters in its own "
                f"shards. {what.capitalize()} by the wrapper."
            )


def all_ranks(everyone: Sequence[Ranks], what: str) -> Ranks:
    """Return the ranks that save a model together; for a model without units, all ranks."""
    if len(everyone) > 1:
        raise RuntimeError(
            f"cannot {what}: the outermost units of this model are sharded over different ranks. Wrap the outermost "
            "module, with a process_group of all these ranks."
        )
    if everyone:
        return everyone[0]
    if dist.is_available() and dist.is_initialized():
        return (communicator(default_group(None), HOST),)
    return (LONE_RANK,)


def ready(model: nn.Module, what: str) -> tuple[list[Unit], Ranks]:
    """Collective. Check that the values of a model can be saved or sent; return the units and the ranks for this."""
    units, everyone = prepared(model, what)
    ranks = all_ranks(everyone, what)
    _require_one_model(model, units, what)
    for unit in outermost_units(model):
        require_values_everywhere(unit, what)
        ensure_same_values(unit)
    return units, ranks


def named_tensors(paths_of: Paths, units: Sequence[Unit]) -> dict[str, Target]:
    """Return a model's tensors in the order of its modules, each under its first name in this order."""
    order = {path: number for number, path in enumerate(path for paths in paths_of.values() for path in paths)}

    def place(name: str) -> int:
        path = name
        while path not in order:  # names of added tensors may contain dots
            path = path[:-1].rpartition(".")[0]
            path += "." if path else ""
        return order[path]

    named = [(min(target.names, key=place), target) for target in tensors_in(paths_of, units)]
    return {plain_name(name): target for name, target in sorted(named, key=lambda pair: place(pair[0]))}


def _require_one_model(model: nn.Module, units: Sequence[Unit], what: str) -> None:
    """Raise RuntimeError if ranks have different parameters under the same names."""
    most = max((size_of(unit.everyone) for unit in outermost_units(model)), default=1)
    for unit in units:
        # Expert parallelism: ranks have different parts of the same parameters, as their `MeshPart`s show.
        is_spread = all(is_on_many_ranks(handle.flat_param.parts) for handle in unit.owned_handles)
        if is_apart(unit, most) and not is_spread:
            raise RuntimeError(
                f"cannot {what}: {unit.name} has a separate process group, so ranks outside it have different values "
                "under the same names. Save it for each group to a separate folder."
            )


def written_here(tensors: Mapping[str, Target], ranks: Ranks, what: str) -> set[str]:
    """Collective. Return the names of the tensors that this rank writes; the first rank writes replicated elements."""

    def digests() -> tuple[dict[str, bytes], tuple[int, set[bytes]]]:
        held = {name: target.held for name, target in tensors.items()}
        texts = {name: f"{name} {one.box} {one.start}:{one.stop}" for name, one in held.items() if one is not None}
        own = {name: hashlib.blake2b(text.encode(), digest_size=8).digest() for name, text in texts.items()}
        return own, (own_rank(), set(own.values()))

    own, heard = told_by_all(ranks, "find its part of a checkpoint", digests)
    reached = [rank for rank, _ in heard]
    told = from_everyone(ranks, (reached, _crossing(tensors)))
    if len(set(reached)) < len(reached) or any(other != reached for other, _ in told):
        names = next((names for _, names in told if names), "its parameters are")
        raise NotImplementedError(
            f"cannot {what}: {names} spread over meshes that overlap in part, of which neither contains the "
            "other. Create all meshes with a single init_device_mesh, or save the model's state_dict() with "
            "torch.distributed.checkpoint."
        )
    before = set().union(*(others for _, others in heard[: number_among(ranks)]))
    return {name for name, digest in own.items() if digest not in before}


def _crossing(tensors: Mapping[str, Target]) -> str:
    """Return a description of two tensors, neither of which is on all ranks of the other; empty if there are none."""
    firsts: dict[tuple[Any, ...], str] = {}  # the first tensor of each group and meshes, whose ranks are counted
    for name, target in tensors.items():
        group = None if target.handle is None else target.handle.comm.group
        meshes = [part.mesh for part in (target.part, MeshPart.of(target.param)) if part is not None]
        firsts.setdefault((group, *meshes), name)
    spread: dict[frozenset[int], str] = {}
    for (group, *meshes), name in firsts.items():
        ranks = set() if group is None else set(ranks_of(group))
        spread.setdefault(frozenset(ranks.union(*(mesh.mesh.flatten().tolist() for mesh in meshes))), name)
    for (ours, one), (theirs, other) in combinations(spread.items(), 2):
        if not (ours <= theirs or theirs <= ours):
            return f"{one} (over ranks {sorted(ours)}) and {other} (over ranks {sorted(theirs)}) are"
    return ""


def dtype_in_files(target: Target, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is saved or sent: a given `dtype` applies to floating-point parameters."""
    is_cast = isinstance(target.param, nn.Parameter) and target.dtype.is_floating_point
    return dtype if dtype is not None and is_cast else target.dtype


def entry_of(name: str, target: Target, dtype: torch.dtype | None, written: Collection[str]) -> Entry:
    """Return the entry of a tensor to save, with the part that this rank writes."""
    vector, held = target.vector(), target.held
    own = None if held is None or name not in written else vector[held.offset : held.offset + held.numel]
    ranges = None if own is None else ranges_of(target)
    return Entry(name, dtype_in_files(target, dtype), target.shape, own, ranges, target.form)
