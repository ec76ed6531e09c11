"""Parking: temporarily release the memory of a model in training, or of its optimizer, for other programs.

Only storages are parked: the bytes of a storage are copied to the host or to a file, and the storage's memory is freed.
All tensors stay the same objects, with the same aliases, so optimizers, local shards and `DTensor`s are not changed.
An operation on a parked tensor would access freed memory. Therefore the class of each tensor is replaced by a
subclass, as torch does for an `UninitializedParameter`: operations that only read values use the copy, and all other
operations raise an error (`parked_tensors`). The storages of flat parameters and an observer of steps raise the same
error earlier, before a rank communicates or writes. If only the state of an optimizer is parked, the optimizer can
step (`parked_steps`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import nn

from fsdp.checkpoint.parked_steps import ParkedSteps
from fsdp.checkpoint.parked_tensors import Named, ParkedStorage, ParkedTensors, addresses, host_values
from fsdp.checkpoint.unit_states import UnitStates
from fsdp.distributed.consensus import done_by_all
from fsdp.distributed.devices import HOST, finish_queued, has_streams, return_cached_memory
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name
from fsdp.engine.observers import attached
from fsdp.engine.precision import Buffers
from fsdp.engine.runtime import runtime_of_root
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.state_dict.full import buffers_in_own_precision
from fsdp.layers.state_requests import require_shards
from fsdp.layers.verify import require_sharded

PARTS = ("parameters", "gradients", "optimizer")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def park(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    to: str | os.PathLike[str] = "host",
    parts: Iterable[str] | None = None,
) -> int:
    """Collective. Free the memory of a sharded model and its optimizer, until `unpark` restores the same bits.

    Call this function between steps, on every rank. Parameters, gradients and tensors of optimizers stay the same
    objects. Unsharded parameters kept between passes are freed, and all-gathered again when required. While
    the parameters are parked, a forward, a backward, an optimizer step, a load and operations on a parked tensor raise
    a RuntimeError that names `unpark`. State dicts, `fsdp.save` and `stream_weights` read the parked values; tensors
    of these state dicts are on the host. If only the optimizer is parked, training can continue: a step restores the
    state of one unit after another, see `ParkedSteps`. Already parked tensors are skipped.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        optimizer: an optimizer of the model, or multiple optimizers: torch's, `OwnedOptimizer`, or any other.
        to: ``"host"`` copies tensors on an accelerator to (pinned) host memory, and does not park tensors on the host.
            A folder is used for tensors on the host as well: each rank writes safetensors files, and removes a file
            after all of its bytes were restored. Tensors on disk (``offload="disk"``) are not parked.
        parts: some of ``"parameters"`` (all parameters and buffers of the model's modules), ``"gradients"`` (gradients,
            and accumulated unreduced gradients) and ``"optimizer"`` (the tensors in the optimizers' state
            and options). The default is all parts, without ``"optimizer"`` if `optimizer` is None.

    Returns:
        The number of bytes freed by this rank, without unsharded parameters.

    Raises:
        TypeError: for an unsharded model.
        ValueError: for unknown parts; on every rank, if memory on any rank is shared with NumPy or another process and
            cannot be freed.
        RuntimeError: during a forward or backward, or inside `summon_full_params`; for an inner unit.
        OSError: if the folder cannot be written. After any error, this call has parked no tensors on any rank.
    """
    return sum(one.nbytes for one in _park(model, optimizer, to, parts))


def unpark(model: nn.Module, parts: Iterable[str] | None = None) -> None:
    """Collective. Restore the parked memory of a model and its optimizers, with the same bits; addresses may differ.

    Call this function on every rank. Parts that are not parked are skipped.

    Args:
        model: as in `park`.
        parts: the parts to restore, by default all.

    Raises:
        TypeError: for an unsharded model.
        ValueError: for unknown parts.
        RuntimeError, OSError: on every rank, if any rank lacks memory or cannot read its file. In this case, all of
            these parts stay parked on all ranks, and `unpark` may be called again.
    """
    root = require_sharded(model, "fsdp.unpark")
    wanted = done_by_all([root.everyone], "unpark the model", lambda: _checked(PARTS if parts is None else parts))
    _unpark(root, [one for one in _records(root) if one.part in wanted])


@contextmanager
def parked(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    to: str | os.PathLike[str] = "host",
    parts: Iterable[str] | None = None,
) -> Iterator[int]:
    """Collective. Park a model and its optimizer during the context, see `park` and `unpark`.

    Contexts may be nested: each restores only the tensors that it has parked. After an exception in the context, this
    rank restores its memory without the other ranks, which may not have failed.

    Yields:
        The number of bytes freed by this rank.
    """
    root = require_sharded(model, "fsdp.park")
    ours = _park(model, optimizer, to, parts)
    try:
        yield sum(one.nbytes for one in ours)
    except BaseException:
        _unpark(root, [one for one in ours if one in _records(root)], alone=True)
        raise
    _unpark(root, [one for one in ours if one in _records(root)])


class _Parked(ParkedTensors):
    """The tensors of one of `PARTS` that a single call parks; for an optimizer, only the state of a single handle."""

    def __init__(
        self,
        root: Unit,
        part: str,
        to: str | os.PathLike[str],
        steps: ParkedSteps | None = None,
        handle: FlatParamHandle | None = None,
    ) -> None:
        message = (
            f"the {part} of {root.name} {'is' if part == 'optimizer' else 'are'} parked: call fsdp.unpark(model) "
            "first, on every rank, or leave `with fsdp.parked(...)`"
        )
        super().__init__(part, to, message, is_readable=part != "gradients")
        self.root, self.steps, self._handle, self.undo = root, steps, handle, ExitStack()

    def hold(self) -> None:
        """Make uses of the freed tensors raise errors, or make steps restore the tensors, until `end`."""
        if self.part == "parameters":
            self._hold_parameters(_handles(self.root))
        if self.steps is not None:
            self.undo.enter_context(self.steps.with_parked(self._handle, self))
        else:
            self.undo.enter_context(attached(self, [self.root]))

    def _hold_parameters(self, handles: Sequence[FlatParamHandle]) -> None:
        self.undo.callback(_note_places, handles)
        if any(isinstance(each.storage, ParkedStorage) for each in handles):
            return
        for unit in units_in(self.root):
            self.undo.callback(setattr, unit, "buffers", unit.buffers)
            unit.buffers = Buffers((), None)  # buffers in their own precision require no casts for state dicts
        for handle in handles:
            handle.values.touch()  # so that all ranks reject older graphs, even if addresses stay equal
            flat_param, vector = handle.flat_param, handle.flat_param.vector
            self.undo.callback(setattr, flat_param, "_vector", vector)
            flat_param._vector = host_values(vector)
            self.undo.callback(setattr, handle, "storage", handle.storage)
            handle.storage = ParkedStorage(handle.storage, self.message)
        _note_places(handles)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError for the step of an optimizer of the model; see `Observers`."""
        raise RuntimeError(f"{type(optimizer).__name__}.step(): {self.message}")

    def end(self) -> None:
        super().end()
        self.undo.close()


def _note_places(handles: Iterable[FlatParamHandle]) -> None:
    """Record the new addresses of shards, or that their memory is freed. All their views have the same storages."""
    for handle in handles:
        *_, handle._built_for = handle.shard_state
        handle.listed.note_places()


def _records(root: Unit) -> list[_Parked]:
    found: list[_Parked] = root.requests.setdefault(_Parked, [])
    return found


def _park(
    model: nn.Module, optimizer: Optimizers, to: str | os.PathLike[str], parts: Iterable[str] | None
) -> list[_Parked]:
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    root = require_sharded(model, "fsdp.park")

    def given() -> frozenset[str]:
        wanted = _checked(PARTS[: 3 if optimizers else 2] if parts is None else parts)
        if "optimizer" in wanted and not optimizers:
            raise ValueError("fsdp.park: the part 'optimizer' needs the argument `optimizer`")
        return wanted

    require_shards([root], "park the model")
    runtime = runtime_of_root(root, "fsdp.park")
    wanted = done_by_all([root.everyone], "park the model", given)
    before = {one.part for one in _records(root)}
    ours: list[_Parked] = []
    undo = ExitStack()

    def copy() -> None:
        if "parameters" not in before:
            if "parameters" in wanted:
                undo.enter_context(buffers_in_own_precision(list(units_in(root))))
            runtime.release()
        ours.extend(_found(wanted, root, optimizers, to))
        for one in ours:
            one.copy()
        _finish(ours)

    try:
        done_by_all([root.everyone], "park the model", copy)
    except BaseException:
        undo.close()
        for one in ours:
            one.end()
        raise
    changed = {one.part for one in ours if one.nbytes} | (wanted - before)
    ours = [one for one in ours if one.part in changed]
    for one in ours:
        if one.part == "parameters":
            one.undo = undo
        _records(root).append(one)
        one.free()
        one.hold()
    _return_memory(ours)
    return ours


def _found(
    wanted: Collection[str], root: Unit, optimizers: Sequence[torch.optim.Optimizer], to: str | os.PathLike[str]
) -> Iterator[_Parked]:
    """Yield the tensors to park. Memory that multiple parts share belongs to the first of them."""
    stay = _mapped(root)
    for part, named in (("parameters", _parameters), ("gradients", _gradients)):
        tensors = list(named(root))
        if part in wanted:
            one = _Parked(root, part, to)
            one.find(tensors, stay)
            yield one
        stay |= addresses(tensors)
    for number, optimizer in enumerate(optimizers if "optimizer" in wanted else ()):
        steps = _steps_of(root, optimizer, f"{number}." if len(optimizers) > 1 else "")
        for handle in steps.states.handles:
            one = _Parked(root, "optimizer", to, steps, handle)
            one.find(steps.states.named(handle), stay)
            yield one


def _unpark(root: Unit, ours: Sequence[_Parked], *, alone: bool = False) -> None:
    def fill() -> None:
        for one in ours:
            one.fill()
        _finish(ours)

    try:
        done_by_all([] if alone else [root.everyone], "unpark the model", fill)
    except BaseException:
        for one in ours:
            one.drop()
        raise
    for one in ours:
        _records(root).remove(one)
        one.end()
    _return_memory(ours)


def _finish(ours: Iterable[_Parked]) -> None:
    for device in {device for one in ours for device in one.devices if has_streams(device.type)}:
        finish_queued(device)


def _return_memory(ours: Iterable[_Parked]) -> None:
    for device in {HOST, *(device for one in ours for device in one.devices)}:
        return_cached_memory(device)


def _checked(parts: Iterable[str]) -> frozenset[str]:
    found = frozenset([parts] if isinstance(parts, str) else parts)
    if not found <= set(PARTS):
        raise ValueError(f"parts must be some of {', '.join(PARTS)}; got {', '.join(sorted(map(str, found)))}")
    return found


def _handles(root: Unit) -> list[FlatParamHandle]:
    return [handle for unit in units_in(root) for handle in unit.handles]


def _steps_of(root: Unit, optimizer: torch.optim.Optimizer, start: str) -> ParkedSteps:
    """Return the existing or new `ParkedSteps` of an optimizer, whose state may already be parked in part."""

    def check() -> None:
        for one in _records(root):
            if one.part != "optimizer":
                one.step(optimizer)

    def stay() -> set[int]:
        return _mapped(root) | addresses(_parameters(root)) | addresses(_gradients(root))

    for hook in optimizer._optimizer_step_pre_hooks.values():
        steps = getattr(hook, "__self__", None)
        if isinstance(steps, ParkedSteps):
            steps.states.divide()
            return steps
    return ParkedSteps(optimizer, UnitStates(root, optimizer, start), root.device, check, stay)


def _parameters(root: Unit) -> Iterator[Named]:
    for handle in _handles(root):
        unsharded = handle.unsharded.full, *handle.unsharded.leaves
        vectors = [] if isinstance(handle.storage, ParkedStorage) else [handle.flat_param.vector]
        for tensor in (handle.flat_param, *vectors, *handle.listed_params, *unsharded):
            yield handle.name, tensor
    for name, tensor in chain(root.module.named_parameters(), root.module.named_buffers()):
        yield clean_name(name), tensor


def _gradients(root: Unit) -> Iterator[Named]:
    for handle in _handles(root):
        buffer, shown = handle.gradients, (param.grad for param in handle.listed_params)
        unreduced = (buffer._flat, *buffer._scattered, *chain(*buffer._places))
        for tensor in (handle.flat_param.held_gradient, *unreduced, *shown):
            yield handle.name, tensor
    for name, param in root.module.named_parameters():
        yield clean_name(name), param.grad


def _mapped(root: Unit) -> set[int]:
    """Return the addresses of memory-mapped tensors, which the system reads and writes; release their pages."""
    storages = (handle.flat_param.shard_storage for handle in _handles(root))
    files = {storage.files for storage in storages if storage.files is not None}
    for each in files:
        each.release()
    return {address for each in files for address in each.addresses}
