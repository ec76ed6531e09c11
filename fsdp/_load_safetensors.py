"""Values from safetensors files: each rank reads the ranges that it keeps, straight into its shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import _IncompatibleKeys

from fsdp._agreement import Ranks, agree_on, agree_on_outcome
from fsdp._collect import is_ours
from fsdp._dtensors import MeshPart, local_part
from fsdp._flat_param import FlatParameter
from fsdp._forward import TrainingState
from fsdp._guards import Conversions
from fsdp._handle import FlatParamHandle
from fsdp._names import clean_name, plain_name
from fsdp._safetensors import SafetensorsFiles, StoredTensor
from fsdp._state_dict import ensure_agreed
from fsdp._unit import Unit, own_modules, unit_of


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Collective. Load whole values from safetensors files, each rank reading only what it keeps.

    The bytes go from the file into the shard's memory; a shard on an accelerator, and values of another dtype, go
    through 4 MiB of host memory. There is never a whole parameter on a rank of several. Buffers and parameters that
    are not sharded are read whole on every rank; of `DTensor`s, what the local part needs.

    Stored values are cast to the dtype of the parameter or buffer as `Tensor.copy_` does. Tied parameters are loaded
    from the first of their names that is there. Hooks of state dicts, and extra state, have no part in it.

    Args:
        model: with wrapped modules, or without; not a part of a wrapped module.
        path: a ``.safetensors`` file, an index of several (``model.safetensors.index.json``), or a folder that has one
            of these. Every rank needs the same files, which need not lie in the same place.
        strict: raise for missing and unexpected keys.

    Returns:
        torch's result with ``missing_keys`` and ``unexpected_keys``, in plain names.

    Raises:
        RuntimeError: for all missing and unexpected keys (if `strict`) and other shapes together, before anything is
            changed; in a forward or backward, or inside `summon_full_params`; if ranks have different files, or another
            rank could not read them.
        FileNotFoundError, ValueError, OSError: if this rank has no such file, or a file is not what it should be.
        NotImplementedError: for a `DTensor` that is cut along several dimensions.
    """
    units = [unit for unit in map(unit_of, model.modules()) if unit is not None]
    _require_rest(model, units)
    outermost = list(_outermost(model))
    for unit in outermost:
        ensure_agreed(unit)
    for handle in _handles(units):
        handle.absorb()
        handle.follow_shard()
    everyone = list(dict.fromkeys(unit.everyone for unit in outermost))
    with _opened(path, everyone) as files:
        targets = [*_sharded(model, units), *_unsharded(model, units)]
        missing, unexpected = _check(model, targets, files, strict)
        error = None
        try:
            _read(targets, units, files)
        except (OSError, ValueError) as found:
            error = found
        agree_on_outcome(everyone, f"read {files.path}", error)
    return _IncompatibleKeys(missing, unexpected)


# What is to be filled


class _Target(Protocol):
    """A tensor of the model."""

    names: list[str]
    aliases: list[str]  # it may be stored under these, too

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def part(self) -> MeshPart | None: ...
    def fill(self, files: SafetensorsFiles, key: str) -> None: ...


@dataclass
class _Slot:
    """A sharded parameter."""

    names: list[str]
    aliases: list[str]
    handle: FlatParamHandle
    slot: int

    @property
    def shape(self) -> torch.Size:
        return self.handle.layout.slots[self.slot].shape if self.part is None else self.part.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.handle.flat_param.dtype

    @property
    def part(self) -> MeshPart | None:
        return self.handle.flat_param.parts[self.slot]

    def fill(self, files: SafetensorsFiles, key: str) -> None:
        self.handle.home.check(self.handle.name)
        self.handle.fill(self.slot, lambda shard, start: _read_part(files, key, shard, start, self.part))
        self.handle.home.release()


@dataclass
class _Whole:
    """A buffer, or a parameter that is not sharded."""

    names: list[str]
    aliases: list[str]
    places: list[tuple[dict[str, Any], str]]  # in `_buffers`, or `_parameters`, of modules
    device: torch.device  # for one that has no memory yet

    @property
    def _tensor(self) -> Tensor:
        entries, name = self.places[0]
        return entries[name]

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def part(self) -> MeshPart | None:
        return MeshPart.of(self._tensor)

    @property
    def is_missing_memory(self) -> bool:
        """Whether it is a parameter without values, which others may hold and would not see replaced."""
        return self._tensor.is_meta and isinstance(self._tensor, nn.Parameter)

    def fill(self, files: SafetensorsFiles, key: str) -> None:
        if self._tensor.is_meta:
            made = torch.empty_like(self._tensor, device=self.device)
            for entries, name in self.places:
                entries[name] = made
        local = local_part(self._tensor.detach())
        flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
        _read_part(files, key, flat, 0, self.part)
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))
        increment_version(self._tensor)


def _read_part(files: SafetensorsFiles, key: str, into: Tensor, start: int, part: MeshPart | None) -> None:
    """Fill `into` from its element `start` on of a whole tensor, or of this rank's `part` of one."""
    if part is None:
        files.read(key, into, start)
        return
    done = 0
    for first, last in part.ranges(key, start, start + into.numel()):
        files.read(key, into[done : done + last - first], first)
        done += last - first


def _sharded(model: nn.Module, units: Sequence[Unit]) -> Iterator[_Target]:
    paths = _paths(model)
    for handle in _handles(units):
        for slot, places in enumerate(handle.places):
            names = [path + place.name for place in places for path in paths.get(place.module, ())]
            yield _Slot(*_with_aliases(names), handle, slot)


def _unsharded(model: nn.Module, units: Sequence[Unit]) -> Iterator[_Target]:
    """Each tensor once, with all of its names."""
    devices = {module: unit.device for unit in units for module in own_modules(unit.module)}
    found: dict[int, tuple[list[str], list[tuple[dict[str, Any], str]], torch.device]] = {}
    for module, paths in _paths(model).items():
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
                    names, places, _ = found.setdefault(id(tensor), ([], [], device))
                    names += [path + name for path in paths]
                    places.append((entries, name))
    for names, places, device in found.values():
        yield _Whole(*_with_aliases(names), places, device)


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Before what a module's tensors have their own names, in plain names."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        plain = clean_name(name)
        paths.setdefault(module, []).append(f"{plain}." if plain else "")
    return paths


def _with_aliases(names: list[str]) -> tuple[list[str], list[str]]:
    # Parts of names that torch's wrappers add, and files do not have.
    return names, [name for name in map(plain_name, names) if name not in names]


def _handles(units: Sequence[Unit]) -> list[FlatParamHandle]:
    return list(dict.fromkeys(handle for unit in units for handle in unit.seen))


def _outermost(module: nn.Module) -> Iterator[Unit]:
    """The units in a tree that lie in no other one, each once."""
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


# What can go wrong


def _require_rest(model: nn.Module, units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.access.close_loading is not None:
            unit.access.close_loading()  # a load that was given up by an exception
        if unit.runtime is not None:
            unit.runtime.ensure_idle("load safetensors files")
        if unit.state is TrainingState.SUMMON_FULL_PARAMS or any(handle.is_exposed for handle in unit.seen):
            raise RuntimeError(
                f"{unit.name}: inside summon_full_params() there are only copies of the parameters. Load safetensors "
                "files outside of it."
            )
    for module in model.modules():
        guarding = module.__dict__.get("_apply")
        if isinstance(guarding, Conversions) and guarding.unit not in units:
            raise RuntimeError(
                f"this {type(model).__name__} is a part of {guarding.unit.name}, which keeps its parameters in its own "
                "shards. Load safetensors files into the wrapper."
            )


@contextmanager
def _opened(path: str | os.PathLike[str], everyone: Sequence[Ranks]) -> Iterator[SafetensorsFiles]:
    """Collective. The files, which every rank has, with equal headers."""
    files, error = None, None
    try:
        files = SafetensorsFiles(path)
    except (OSError, ValueError) as found:
        error = found
    agree_on_outcome(everyone, "open its safetensors files", error)
    if files is not None:
        for ranks in everyone:
            agree_on(ranks, "safetensors files", files.digest, f"{files.path} with {len(files.tensors)} tensors")
        with files:
            yield files


def _check(
    model: nn.Module, targets: Sequence[_Target], files: SafetensorsFiles, strict: bool
) -> tuple[list[str], list[str]]:
    """The missing and the unexpected keys; RuntimeError for what cannot be loaded."""
    stored = files.tensors
    named = {name for target in targets for name in (*target.names, *target.aliases)}
    missing = [name for target in targets if _key(target, stored) is None for name in target.names]
    unexpected = [name for name in stored if name not in named]
    problems = []
    for target in targets:
        key = _key(target, stored)
        if key is not None:
            problems += _misfit(target, stored[key])
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    if problems:
        raise RuntimeError(
            f"{files.path} does not fit this {type(model).__name__}, and nothing was loaded:\n\t"
            + "\n\t".join(problems)
        )
    return missing, unexpected


def _key(target: _Target, stored: dict[str, StoredTensor]) -> str | None:
    return next((name for name in (*target.names, *target.aliases) if name in stored), None)


def _misfit(target: _Target, stored: StoredTensor) -> list[str]:
    if target.part is not None:
        target.part.cut_dim(stored.name)
    found = []
    if stored.shape != target.shape:
        found.append(f"{stored} has shape {list(stored.shape)}, and the model's {list(target.shape)}")
    if stored.dtype.is_complex and not target.dtype.is_complex:
        found.append(f"{stored} is of {stored.dtype}, and the model's of {target.dtype}")
    if isinstance(target, _Whole) and target.is_missing_memory:
        found.append(f"{target.names[0]} is on the meta device: give it memory first (to_empty), or wrap it")
    return found


# Reading


def _read(targets: Sequence[_Target], units: Sequence[Unit], files: SafetensorsFiles) -> None:
    for unit in units:
        unit.buffers.widen()  # they are kept in their own dtype
    try:
        with torch.no_grad():
            for target in targets:
                key = _key(target, files.tensors)
                if key is not None:
                    target.fill(files, key)
    finally:
        for unit in units:
            if not unit.in_full_precision:
                unit.buffers.narrow()
