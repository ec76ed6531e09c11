"""A model's tensors as files have them, each once, under one FQN: which ranges of it each rank writes and reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.checkpoint.formats.source import TensorReader
from fsdp.checkpoint.safetensors import Entry, Part
from fsdp.distributed.collectives import LONE_RANK, communicator
from fsdp.distributed.communicator import default_group
from fsdp.distributed.consensus import Ranks, number_among
from fsdp.distributed.dtensor import MeshPart, local_part
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import Interval
from fsdp.engine.managed_params import is_ours
from fsdp.engine.module_overrides import Conversions
from fsdp.engine.names import clean_name, plain_name
from fsdp.engine.precision import BATCH_NORMS
from fsdp.engine.unit import TrainingState, Unit, own_modules, unit_of
from fsdp.state_dict.full import ensure_agreed


@dataclass
class SlotTensor:
    """A sharded parameter."""

    names: list[str]
    handle: FlatParamHandle
    slot: int

    @property
    def aliases(self) -> list[str]:
        return _aliases_of(self.names)

    @property
    def shape(self) -> torch.Size:
        return self.handle.layout.slots[self.slot].shape if self.part is None else self.part.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.handle.flat_param.dtype

    @property
    def part(self) -> MeshPart | None:
        return self.handle.flat_param.parts[self.slot]

    @property
    def param(self) -> nn.Parameter:
        """Return what an optimizer sees of it."""
        original = self.handle.orig_params
        return self.handle.flat_param if original is None else original.params[self.slot]

    @property
    def interval(self) -> Interval | None:
        """Return the elements that this rank has, and their place in `vector`."""
        return self.handle.layout.interval(self.slot, self.handle.comm.rank)

    def vector(self, name: str) -> Tensor:
        """Return this rank's shard of the flat parameter."""
        self.handle.storage.check(self.handle.name)
        return self.handle.flat_param.vector

    def is_written_here(self, ranks: Ranks) -> bool:
        """Return whether this rank is to write its elements: of replicas the first does."""
        if self.handle.comm.world_size * self.handle.replicas.world_size < size_of(ranks):
            return number_among(ranks) == 0
        return self.handle.replicas.rank == 0

    def fill(self, files: TensorReader, key: str) -> None:
        self.handle.storage.check(self.handle.name)
        self.handle.fill(self.slot, lambda shard, start: _read_part(files, key, shard, start, self.part))
        self.handle.storage.release()


@dataclass
class UnshardedTensor:
    """A buffer, or a parameter that is not sharded."""

    names: list[str]
    places: list[tuple[dict[str, Any], str]]  # in `_buffers`, or `_parameters`, of modules
    device: torch.device  # for one that has no memory yet

    @property
    def aliases(self) -> list[str]:
        return _aliases_of(self.names)

    @property
    def tensor(self) -> Tensor:
        entries, name = self.places[0]
        return entries[name]

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def part(self) -> MeshPart | None:
        return MeshPart.of(self.tensor)

    @property
    def param(self) -> Tensor:
        return self.tensor

    @property
    def interval(self) -> Interval | None:
        return Interval(0, 0, self.shape.numel(), 0) if self.shape.numel() else None

    def vector(self, name: str) -> Tensor:
        if self.tensor.is_meta:
            raise RuntimeError(f"cannot save a checkpoint: {name} is on the meta device and has no values")
        return self.tensor.detach().reshape(-1)

    def is_written_here(self, ranks: Ranks) -> bool:
        return number_among(ranks) == 0

    def fill(self, files: TensorReader, key: str) -> None:
        if self.tensor.is_meta:
            made = torch.empty_like(self.tensor, device=self.device)
            for entries, name in self.places:
                entries[name] = made
        local = local_part(self.tensor.detach())
        flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
        _read_part(files, key, flat, 0, self.part)
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))
        increment_version(self.tensor)


Target = SlotTensor | UnshardedTensor


def _read_part(files: TensorReader, key: str, into: Tensor, start: int, part: MeshPart | None) -> None:
    """Fill `into` from its element `start` on of an unsharded tensor, or of this rank's `part` of one."""
    if part is None:
        files.read(key, into, start)
        return
    done = 0
    for first, last in part.ranges(key, start, start + into.numel()):
        files.read(key, into[done : done + last - first], first)
        done += last - first


def prepared(model: nn.Module, what: str) -> tuple[list[Unit], list[Ranks]]:
    """Collective the first time. Return the units of a model, with shards as users see them, and their ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"cannot {what}: the model must be a torch.nn.Module, got {type(model).__name__}")
    units = [unit for unit in map(unit_of, model.modules()) if unit is not None]
    require_rest(model, units, what)
    outermost = list(outermost_units(model))
    for unit in outermost:
        ensure_agreed(unit)
    for handle in handles_of(units):
        if not handle.layout.is_row_major:
            raise NotImplementedError(
                f"cannot {what}: {handle.name} has parameters that are cut along other dimensions than the first "
                "(shard_placement_fn), which lie in files in many pieces. Use state_dict() and "
                "torch.distributed.checkpoint."
            )
        handle.absorb()
        handle.follow_shard()
    return units, list(dict.fromkeys(unit.everyone for unit in outermost))


def tensors_in(model: nn.Module, units: Sequence[Unit]) -> list[Target]:
    """Return all that files have of a model: what units took, and what is not sharded, each once with all its names."""
    paths_of = paths_in(model)
    sharded = [
        SlotTensor([path + place.name for place in places for path in paths_of.get(place.module, ())], handle, slot)
        for handle in handles_of(units)
        for slot, places in enumerate(handle.places)
    ]
    devices = {module: unit.device for unit in units for module in own_modules(unit.module)}
    others: dict[int, UnshardedTensor] = {}
    for module, paths in paths_of.items():
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
                    device = devices.get(module, torch.device("cpu"))
                    target = others.setdefault(id(tensor), UnshardedTensor([], [], device))
                    target.names += [path + name for path in paths]
                    target.places.append((entries, name))
    return [*sharded, *others.values()]


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have state which is no tensor (``get_extra_state``), by the names of that state."""
    return {
        plain_name(f"{paths[0]}_extra_state"): module
        for module, paths in paths_in(model).items()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def paths_in(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the prefixes of a module's tensors, in plain names."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        plain = clean_name(name)
        paths.setdefault(module, []).append(f"{plain}." if plain else "")
    return paths


def _aliases_of(names: list[str]) -> list[str]:
    """Return further names under which a tensor may be stored: without what torch's wrappers add, and files lack."""
    return [name for name in map(plain_name, names) if name not in names]


def handles_of(units: Sequence[Unit]) -> list[FlatParamHandle]:
    """Return all handles that the modules of some units see, each once."""
    return list(dict.fromkeys(handle for unit in units for handle in unit.visible_handles))


def outermost_units(module: nn.Module) -> Iterator[Unit]:
    """Yield the units in a tree that lie in no other one, each once."""
    seen: set[nn.Module] = set()
    ahead = [module]
    while ahead:
        current = ahead.pop()
        if current not in seen:
            seen.add(current)
            unit = unit_of(current)
            if unit is not None:
                yield unit
            else:
                ahead += reversed(list(current.children()))


def require_rest(model: nn.Module, units: Sequence[Unit], what: str) -> None:
    """Make sure that every shard is complete and not in use."""
    for unit in units:
        unit.require_idle(what)
        if unit.state is TrainingState.SUMMON_FULL_PARAMS or any(handle.is_exposed for handle in unit.visible_handles):
            raise RuntimeError(
                f"{unit.name}: inside summon_full_params() there are only copies of the parameters. "
                f"{what.capitalize()} outside of it."
            )
    for module in model.modules():
        guarding = module.__dict__.get("_apply")
        if isinstance(guarding, Conversions) and guarding.unit not in units:
            raise RuntimeError(
                f"this {type(model).__name__} is a part of {guarding.unit.name}, which keeps its parameters in its own "
                f"shards. {what.capitalize()} by the wrapper."
            )


def all_ranks(everyone: Sequence[Ranks]) -> Ranks:
    """Return the ranks that save a checkpoint together; of a model without units, all ranks."""
    if len(everyone) > 1:
        raise RuntimeError(
            "cannot save a checkpoint: units of this model that lie in no other one are spread over different ranks. "
            "Wrap the outermost module, with a process_group of all of them."
        )
    if everyone:
        return everyone[0]
    if dist.is_available() and dist.is_initialized():
        return (communicator(default_group(None), torch.device("cpu")),)
    return (LONE_RANK,)


def size_of(ranks: Ranks) -> int:
    """Return the number of ranks."""
    return math.prod(comm.world_size for comm in ranks)


def named_tensors(model: nn.Module, units: Sequence[Unit]) -> dict[str, Target]:
    """Return a model's tensors in the order of its modules, each under the first of its names there."""
    order = {path: number for number, path in enumerate(path for paths in paths_in(model).values() for path in paths)}

    def place(name: str) -> int:
        module, dot, _ = name.rpartition(".")
        return order[module + dot]

    named = [(min(target.names, key=place), target) for target in tensors_in(model, units)]
    return {plain_name(name): target for name, target in sorted(named, key=lambda pair: place(pair[0]))}


@contextmanager
def buffers_in_own_precision(units: Iterable[Unit]) -> Iterator[None]:
    """Have buffers in the dtype that they are kept in, and not that of computation."""
    units = list(units)
    for unit in units:
        unit.buffers.widen()
    try:
        yield
    finally:
        for unit in units:
            if not unit.in_full_precision:
                unit.buffers.narrow()


def require_one_model(units: Sequence[Unit], ranks: Ranks) -> None:
    """Raise RuntimeError if other ranks have other parameters under the same names."""
    for unit in units:
        # Batch norms that each rank trains for itself are saved as buffers are: those of the first rank.
        is_own_norm = isinstance(unit.module, BATCH_NORMS) and unit.comm.world_size == 1
        if size_of(unit.everyone) < size_of(ranks) and not is_own_norm:
            raise RuntimeError(
                f"cannot save a checkpoint: {unit.name} has a process group of its own, so that ranks outside of it "
                "have other values under the same names. Save it by itself, once for each group, to a folder for each."
            )


def entry_of(name: str, target: Target, ranks: Ranks, dtype: torch.dtype | None) -> Entry:
    """Return a tensor that is to be written, with this rank's ranges of it; `dtype` is of parameters."""
    if target.part is not None and target.part.mesh.size() > 1:
        raise NotImplementedError(
            f"{name} is a DTensor ({target.part}): checkpoints of tensor-parallel models are saved with "
            "torch.distributed.checkpoint, from sharded_state_dict() of the wrapper, or state_dict() under fully_shard"
        )
    is_parameter = isinstance(target, SlotTensor) or isinstance(target.tensor, nn.Parameter)
    kept = dtype if dtype is not None and is_parameter and target.dtype.is_floating_point else target.dtype
    return Entry(name, kept, target.shape, parts_of(target, target.vector(name), target.interval, ranks))


def parts_of(target: Target, flat: Tensor, interval: Interval | None, ranks: Ranks) -> list[Part]:
    """Return the ranges that this rank writes of a tensor; its elements in `interval`, if it has any, are in `flat`."""
    if interval is None or not target.is_written_here(ranks):
        return []
    if flat.stride(0) != 1:  # a buffer that is every other element of something
        flat = flat.clone(memory_format=torch.contiguous_format)
    return [Part(interval.start, flat[interval.offset : interval.offset + interval.numel])]
