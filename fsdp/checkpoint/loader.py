"""Loading a checkpoint, or plain safetensors files: each rank reads its own ranges directly into its shards.

Any number of ranks can load a checkpoint. All ranks together compare the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp.checkpoint.folder import found, place_of, step_of
from fsdp.checkpoint.formats.source import FoundTensor, Source, TensorReader
from fsdp.checkpoint.generators import GeneratorStates
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.manifest import read_ours
from fsdp.checkpoint.model_tensors import (
    Target,
    UnshardedTensor,
    all_ranks,
    extra_states,
    named_tensors,
    prepared,
    ranges_of,
    read_ranges,
    tensors_in,
)
from fsdp.checkpoint.optim import StatePlan
from fsdp.checkpoint.safetensors import CheckedFiles, SafetensorsFiles
from fsdp.checkpoint.untrusted import readable, reading
from fsdp.distributed.collectives import during
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.consensus import (
    Ranks,
    agree_on,
    done_by_all,
    from_everyone,
    numbers_of,
    peers_answer,
    size_of,
)
from fsdp.distributed.dtensor import local_part
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.names import foreign_prefix, paths_in, plain_name, prefix_problem
from fsdp.engine.unit import Unit
from fsdp.layers.listed_shards import named_shards
from fsdp.layers.state_dict.full import stored_buffers
from fsdp.optim_utils.state import groups_of


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint.

    Attributes:
        path: the folder.
        values: the `values` argument of `save`.
        missing_keys, unexpected_keys: keys of the model that the checkpoint lacks, and vice versa, as plain names.
        has_generators: whether the states of this rank's random number generators were restored.
        world_size: the number of ranks that saved the checkpoint; None if unknown.
    """

    path: Path
    values: Any
    missing_keys: list[str]
    unexpected_keys: list[str]
    has_generators: bool
    world_size: int | None

    @property
    def step(self) -> int | None:
        """Return the step of the checkpoint; None if it was saved without a step."""
        return step_of(self.path)


@during("fsdp.load_safetensors()")
def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Collective. Load unsharded values from safetensors files. Each rank reads only its own ranges.

    Bytes are read directly into the shard's memory. For a shard on an accelerator, or values of a different dtype, 4
    MiB of host memory are used as a buffer. With multiple ranks, no rank allocates an unsharded parameter. Buffers and
    unsharded parameters are read completely on every rank; for `DTensor`s, the local part is read.

    Stored values are cast to the dtype of the parameter or buffer, as in `Tensor.copy_`. Tied parameters are loaded
    from the first of their names that the files contain. State dict hooks and extra state are not used.

    Args:
        model: a model with or without units; not a submodule of a unit.
        path: a ``.safetensors`` file, an index of multiple files (``model.safetensors.index.json``), or a folder that
            contains either. The files must be the same on every rank, but paths may differ.
        strict: if True, missing and unexpected keys raise an error.

    Returns:
        torch's result with ``missing_keys`` and ``unexpected_keys``, as plain names.

    Raises:
        RuntimeError: for all missing and unexpected keys (if `strict`) and different shapes together, before any
            tensor is changed; during a forward or backward, or inside `summon_full_params`; if ranks have different
            files, or another rank could not read its files.
        FileNotFoundError, ValueError, OSError: if this rank has no such file, or a file is invalid.
        NotImplementedError: for a `DTensor` with a `Partial` placement.
    """
    units, everyone = prepared(model, "load safetensors files")
    files = done_by_all(everyone, "open its safetensors files", lambda: SafetensorsFiles(path))
    with files:
        for ranks in everyone:
            agree_on(ranks, "safetensors files", files.digest, f"{files.path} with {len(files.tensors)} tensors")

        def look() -> tuple[list[Target], list[str], list[str]]:
            targets = tensors_in(paths_in(model), units)
            missing, unexpected, problems = misfits(targets, files, strict)
            if problems:
                raise RuntimeError(does_not_fit(files.path, model, problems))
            return targets, missing, unexpected

        targets, missing, unexpected = done_by_all(everyone, f"load {files.path}", look)
        done_by_all(everyone, f"read {files.path}", lambda: read(targets, units, files))
    return _IncompatibleKeys(missing, unexpected)


@during("fsdp.load()")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    generators: bool = True,
    weights: bool = True,
) -> Loaded:
    """Collective. Load a checkpoint saved by any number of ranks. Each rank reads only its own ranges.

    Like `fsdp.load_safetensors`, but all bytes are also compared with the checkpoint's checksums during reading.

    Folders of ``torch.distributed.checkpoint`` are also loaded by ranges, but without comparing checksums. The model
    and the optimizer are found under their usual keys, for example ``model`` and ``optimizer`` (docs/checkpoints.md
    lists the rules). Folders of ``accelerate`` and of the Trainer of ``transformers`` are also supported, with torch's
    FSDP or unsharded. If unsharded, the optimizer's state is keyed by the positions of parameters in the groups.

    Args:
        path: the folder. A complete checkpoint that a killed save has left under a temporary name is also found.
        model: a model with or without units; not a submodule of a unit.
        optimizer: an optimizer of the model's parameters, or a list of optimizers, with the same groups as in the
            checkpoint. The saved settings are loaded, too. By default, no optimizer state is loaded.
        strict: if True, missing and unexpected keys of the model raise an error. Optimizers must always match.
        generators: if True, and the number of ranks is the same, restore this rank's random number generators.
        weights: if False, load only the optimizer, which is then required, and do not change the model.

    Returns:
        The saved values, the step, and the missing and unexpected keys, as a `Loaded`.

    Raises:
        FileNotFoundError: if there is no complete checkpoint at `path`.
        RuntimeError: for all mismatches together, before any tensor is changed; during a forward or backward, or
            inside `summon_full_params`; on every rank, with the reason, if another rank fails.
        ValueError: if a file is damaged; the message names the file and the tensor. Parameters and state may already
            have been changed: load another checkpoint. Also if an optimizer is given, and the checkpoint contains
            none, or if ``weights=False`` and no optimizer is given.
        OSError: if a file cannot be read.
    """
    units, everyone = prepared(model, "load a checkpoint")
    given = "no optimizer" if optimizer is None else "an optimizer"
    for ranks in everyone:
        settings = f"strict={bool(strict)}, generators={bool(generators)}, weights={bool(weights)}, {given}"
        agree_on(ranks, "settings to load a checkpoint", settings)
    if not weights and optimizer is None:
        raise ValueError(
            "fsdp.load(weights=False) loads an optimizer only, but no optimizer was given: pass the optimizer"
        )
    with ExitStack() as stack:
        source = done_by_all(
            everyone,
            f"open the checkpoint {path}",
            lambda: stack.enter_context(closing(_opened(path, model, optimizer))),
        )
        for ranks in everyone:  # all must have opened the same checkpoint
            agree_on(ranks, "checkpoints", source.identity, source.path)

        # The process groups may differ from the save's: generators are restored by the ranks' global numbers.
        numbers = sorted(numbers_of(everyone[0])) if len(everyone) == 1 else []

        def look() -> _Plan:
            states = _generators(source, everyone, numbers) if generators else None
            return _Plan(source, model, units, optimizer, states, strict=strict, weights=weights)

        plan = done_by_all(everyone, f"load {source.path}", look)
        state = done_by_all(everyone, f"read {source.path}", plan.read)
        _compare(source, everyone)
    done_by_all(everyone, f"load {source.path}", lambda: plan.give(state))
    return Loaded(
        *(Path(source.path), decoded(source.values), plan.missing, plan.unexpected),
        *(plan.generators is not None, source.world_size),
    )


class _Plan:
    """The parts of a checkpoint to load into a model and optimizers. All mismatches raise a single RuntimeError."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        units: Sequence[Unit],
        optimizer: Any,
        generators: GeneratorStates | None,
        *,
        strict: bool,
        weights: bool,
    ) -> None:
        self._source, self._units, self.generators = source, units, generators
        paths_of, problems = paths_in(model), list[str]()
        tensors = named_tensors(paths_of, units)
        self._targets = [*tensors.values()] if weights else []
        modules = extra_states(paths_of) if weights else {}
        self.missing, self.unexpected = list[str](), list[str]()
        if weights:
            self.missing, self.unexpected, problems = misfits(self._targets, source.model, strict)
        if strict and weights:
            both = {"missing": modules.keys() - source.extra.keys(), "unexpected": source.extra.keys() - modules.keys()}
            problems += [f"{what}: {readable(', '.join(sorted(names)))}" for what, names in both.items() if names]
        self._state = None if optimizer is None else StatePlan(optimizer, tensors, source)
        problems += [] if self._state is None else self._state.problems
        if problems:
            raise RuntimeError(does_not_fit(source.path, model, problems))
        self._modules = {name: module for name, module in modules.items() if name in source.extra}

    def read(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Read the weights into the model, and return this rank's shard of the optimizer's state."""
        read(self._targets, self._units, self._source.model)
        return {} if self._state is None else self._state.read()

    def give(self, state: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Load the state of optimizers, modules and generators, which may run code of the user."""
        if self._state is not None:
            self._state.give(state)
        for name, module in self._modules.items():
            module.set_extra_state(decoded(self._source.extra[name]))
        if self.generators is not None:
            self.generators.set()


def _opened(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> Source:
    place = place_of(path)
    with reading(place):
        if found(place) is None and os.path.exists(place):
            other = _of_others(place, model, optimizer)
            if other is not None:
                return other
        return read_ours(place, with_optimizer=optimizer is not None)


def _of_others(place: str, model: nn.Module, optimizer: Any) -> Source | None:
    """Open the folder of another library; return None if its format cannot be loaded without a conversion."""
    from fsdp.checkpoint.formats.accelerate_folder import is_accelerate, read_accelerate  # imported only if required
    from fsdp.checkpoint.formats.dcp import is_dcp, read_dcp
    from fsdp.checkpoint.formats.plain_folder import plain_optimizer, read_plain
    from fsdp.checkpoint.formats.trees import Choices

    choices = Choices(only=None if optimizer is not None else "model")
    if is_dcp(place):
        return read_dcp(place, choices)
    if is_accelerate(place):
        return read_accelerate(place, choices)
    plain = plain_optimizer(place)
    if plain is None:
        return None
    return read_plain(place, plain, choices, None if optimizer is None else _names_of(plain, model, optimizer))


def _names_of(place: str, model: nn.Module, optimizer: Any) -> list[list[str]]:
    """Return the parameters' names in each group of an optimizer; plain optimizers number them in this order.

    Raises:
        ValueError: for flat parameters, each of which contains multiple parameters, and for multiple optimizers.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if len(given) != 1:
        raise ValueError(f"{place} has the state of one optimizer, but {len(given)} were given")
    groups = [group["params"] for group in groups_of(given[0])]
    if any(isinstance(param, FlatParameter) for params in groups for param in params):
        raise ValueError(
            f"{place} numbers the parameters of an unsharded model, but a flat parameter contains several of them: "
            "shard with fully_shard or use_orig_params=True, or load the model alone, without the optimizer"
        )
    names = {id(param): plain_name(name) for name, param in named_shards(model).items()}
    return [[names.get(id(param), "a parameter that the model does not have") for param in params] for params in groups]


def _compare(source: Source, everyone: Sequence[Ranks]) -> None:
    """Collective. Compare the checksums, if any, of blocks that ranks have read only in part."""
    checked = [files for files in (source.model, source.optimizer) if isinstance(files, CheckedFiles)]
    if not checked:
        return
    own = [files.fragments for files in checked]
    heard = [each for ranks in everyone if peers_answer(ranks) for each in from_everyone(ranks, own)]

    def compare() -> None:
        for number, files in enumerate(checked):
            files.compare_fragments(chain.from_iterable(each[number] for each in heard))

    done_by_all(everyone, f"find {source.path} undamaged", compare)


def _generators(source: Source, everyone: Sequence[Ranks], numbers: Sequence[int]) -> GeneratorStates | None:
    """Return this rank's generator states; None without saved states, or if the number of ranks differs.

    `numbers` contains the ranks' global numbers in the order of the saved states, or is empty.
    """
    if source.generators is None or len(everyone) > 1:
        return None
    ranks = all_ranks(everyone, "load a checkpoint")  # also for a model without units
    if size_of(ranks) != source.world_size:
        return None
    number = numbers.index(own_rank()) if numbers else own_rank()
    try:
        return GeneratorStates(decoded(source.generators[number]))
    except ValueError as error:
        raise ValueError(
            f"{source.path}, of rank {number}: {error}. Load another checkpoint, or this one with generators=False."
        ) from None


def misfits(targets: Sequence[Target], files: TensorReader, strict: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the missing and the unexpected keys, and all reasons why the files cannot be loaded."""
    stored = files.tensors
    named = {name for target in targets for name in target.keys}
    unexpected = [name for name in stored if name not in named]
    missing, problems = list[str](), list[str]()
    for target in targets:
        key = _key(target, stored)
        if key is None:
            missing += dict.fromkeys(map(plain_name, target.names))
        else:
            problems += _misfit(target, stored[key])
    own = {name.partition(".")[0] for name in named}
    prefix = foreign_prefix(unexpected, own.__contains__) if strict and missing else ""
    if prefix:
        holder = "model"
        for part in reversed(prefix.split(".")[:-1]):
            holder = f"torch.nn.ModuleDict({{{part!r}: {holder}}})"
        problems.append(prefix_problem(prefix, f"load into {holder}, which has it in its names too"))
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    return missing, unexpected, problems


def does_not_fit(path: str, model: nn.Module, problems: Sequence[str]) -> str:
    lines = "\n\t".join(map(readable, problems))
    return f"{path} does not fit this {type(model).__name__}, and nothing was loaded:\n\t{lines}"


def _key(target: Target, stored: Mapping[str, FoundTensor]) -> str | None:
    return next((name for name in target.keys if name in stored), None)


def _misfit(target: Target, stored: FoundTensor) -> list[str]:
    found = []
    form, own = target.description, target.form
    if stored.form and stored.form != own:
        found.append(
            f"{stored} is {stored.form}, but the model's is {form or own or 'a tensor'}: load it into a model that is "
            "quantised in the same way, with the same class and metadata"
        )
    elif form and (stored.shape, stored.dtype) != (target.shape, target.dtype):
        found.append(
            f"{stored} has shape {list(stored.shape)} of {stored.dtype}, but the model's, {list(target.shape)} of "
            f"{target.dtype}, is {form}: load files of a model that is quantised and sharded in the same way, or pass "
            "a state dict to load_state_dict"
        )
    elif stored.shape != target.shape:
        found.append(f"{stored} has shape {list(stored.shape)}, but the model's {list(target.shape)}")
    if stored.dtype.is_complex and not target.dtype.is_complex:
        found.append(f"{stored} is of {stored.dtype}, but the model's of {target.dtype}")
    if isinstance(target, UnshardedTensor) and target.tensor.is_meta and isinstance(target.tensor, nn.Parameter):
        # Other objects may refer to this tensor, and would not see a replacement.
        found.append(f"{target.names[0]} is on the meta device: allocate it first (to_empty), or wrap it")
    if isinstance(target, UnshardedTensor) and not target.tensor.is_meta:
        local = local_part(target.tensor)
        repeats = any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True))
        if repeats and local.numel():
            found.append(f"{target.names[0]} is expanded, one value for multiple elements: replace it by a clone()")
    return found


def read(targets: Sequence[Target], units: Sequence[Unit], files: TensorReader) -> None:
    with stored_buffers(units), torch.no_grad():
        for target in targets:
            key = _key(target, files.tensors)
            if key is not None:
                target.fill(partial(read_ranges, files, key, ranges_of(target)))
