"""Parking: a model in training, or its optimizer, gives its memory to other programs for a while.

Only storages are parked: the bytes of a storage are copied to the host or to a file, and the storage's memory is freed.
All tensors stay the same objects, with the same aliases, so optimizers, local shards and `DTensor`s need no change.
Meanwhile an operation on such a tensor would read freed memory, which ends the process on a CPU. The class of each
tensor is therefore replaced by a subclass that raises an error, as torch replaces the class of an
`UninitializedParameter`. The storages of flat parameters (`ParkedStorage`) and an observer of steps raise the same
error earlier, before a rank communicates or writes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from fsdp.checkpoint.safetensors import KINDS, SUFFIX, Entry, Part, SafetensorsFiles, plan, write_at
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.consensus import done_by_all
from fsdp.distributed.devices import HOST, finish_queued, has_streams, is_host, return_cached_memory
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name
from fsdp.engine.observers import attached
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.runtime import runtime_of_root
from fsdp.engine.storage import ShardStorage
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.offload import DiskStorage
from fsdp.layers.state_requests import require_shards
from fsdp.layers.verify import require_sharded
from fsdp.optim_utils.owned import OwnedOptimizer
from fsdp.state_dict_utils.host_memory import allocate
from fsdp.state_dict_utils.stager import tensors_in

PARTS = ("parameters", "gradients", "optimizer")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Named = tuple[str, Any]  # a tensor, or None, and its name in files and errors


def park(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    to: str | os.PathLike[str] = "host",
    parts: Iterable[str] | None = None,
) -> int:
    """Collective. Free the memory of a sharded model and its optimizer, until `unpark` restores the same bits.

    Call it between steps, on every rank. Parameters, gradients and tensors of optimizers stay the same objects.
    Unsharded parameters that are kept between passes are freed, and gathered again when they are needed. While the
    parameters are parked, a forward, a backward, an optimizer step, a state dict, `fsdp.save` and every operation on a
    parked tensor raise a RuntimeError that names `unpark`. While only the optimizer is parked, the model can be used.
    Tensors that are parked already are skipped.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        optimizer: an optimizer of the model, or several optimizers; torch's own, `OwnedOptimizer`, or any other.
        to: ``"host"`` copies tensors on an accelerator to (pinned) host memory; tensors on the host stay there. A
            folder frees tensors on the host as well: each rank writes a safetensors file, which it removes when all of
            its bytes are back in memory. Tensors that are on disk already (``offload="disk"``) stay there.
        parts: some of ``"parameters"`` (all parameters and buffers of the model's modules), ``"gradients"`` (gradients,
            and accumulated gradients that are not reduced) and ``"optimizer"`` (the tensors in the optimizers' state
            and options). By default all, without ``"optimizer"`` if `optimizer` is None.

    Returns:
        The number of bytes that this rank has freed, without unsharded parameters.

    Raises:
        TypeError: for a model that is not sharded.
        ValueError: for unknown parts; on every rank, if memory on any rank is shared with NumPy or another process and
            cannot be freed.
        RuntimeError: inside of a forward, a backward or `summon_full_params`; for an inner unit.
        OSError: if the folder cannot be written. Then, and after any other error, nothing is parked on any rank.
    """
    return sum(one.nbytes for one in _park(model, optimizer, to, parts))


def unpark(model: nn.Module, parts: Iterable[str] | None = None) -> None:
    """Collective. Bring back the memory of a model and of its optimizers, with the same bits; addresses may differ.

    Call it on every rank. It brings back nothing if nothing is parked.

    Args:
        model: as for `park`.
        parts: the parts to bring back; None stands for all.

    Raises:
        TypeError: for a model that is not sharded.
        ValueError: for unknown parts.
        RuntimeError, OSError: on every rank, if any rank has not enough memory or cannot read its file. All of these
            parts are still parked then, on all ranks, and `unpark` may be called again.
    """
    root = require_sharded(model, "fsdp.unpark")
    wanted = _checked(PARTS if parts is None else parts)
    _unpark(root, [one for one in _records(root) if one.part in wanted])


@contextmanager
def parked(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    to: str | os.PathLike[str] = "host",
    parts: Iterable[str] | None = None,
) -> Iterator[int]:
    """Collective. Park a model and its optimizer inside the context, see `park` and `unpark`.

    The context may be nested: it brings back what it has parked itself. After an exception inside, this rank brings its
    memory back without the other ranks, which may not have failed.

    Yields:
        The number of bytes that this rank has freed.
    """
    root = require_sharded(model, "fsdp.park")
    ours = _park(model, optimizer, to, parts)
    try:
        yield sum(one.nbytes for one in ours)
    except BaseException:
        _unpark(root, [one for one in ours if one in _records(root)], alone=True)
        raise
    _unpark(root, [one for one in ours if one in _records(root)])


# --- copies -----------------------------------------------------------------------------------------------------------

# A storage with the name and dtype of its elements.
NamedStorage = tuple[str, torch.dtype, UntypedStorage]


class _HostCopies:
    """Copies of storages in host memory, pinned for accelerators with streams."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def keep(self, named: Sequence[NamedStorage]) -> None:
        """Copy storages, whose names are unique."""
        for _, _, storage in named:
            copied = _elements(allocate(storage.nbytes(), has_streams(storage.device.type), share=False))
            self._copies.append(copied.copy_(_elements(storage), non_blocking=True))

    def restore(self, named: Sequence[NamedStorage]) -> None:
        """Fill the same storages, which have memory again."""
        for (_, _, storage), copied in zip(named, self._copies, strict=True):
            _elements(storage).copy_(copied, non_blocking=True)

    def close(self) -> None:
        """Free all copies."""
        self._copies = []


class _FileCopies:
    """Copies in a safetensors file; its name is new, so that no file of a killed process is overwritten."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._path = os.fspath(folder), ""

    def keep(self, named: Sequence[NamedStorage]) -> None:
        values = [(name, _elements(storage, dtype)) for name, dtype, storage in named]
        entries = [Entry(name, each.dtype, each.shape, Part.whole(each)) for name, each in values]
        os.makedirs(self._folder, exist_ok=True)
        fd, self._path = tempfile.mkstemp(SUFFIX, f"parked-rank-{own_rank()}-", self._folder)
        (file,) = plan(entries, "parked")
        try:
            write_at(fd, memoryview(file.head), 0)
            for entry in entries:
                for begin, memory in entry.chunks():
                    write_at(fd, memory, file.begins[entry.name] + begin)
        except OSError as error:
            error.filename = error.filename or self._path
            raise
        finally:
            os.close(fd)

    def restore(self, named: Sequence[NamedStorage]) -> None:
        if named:
            with SafetensorsFiles(self._path) as file:
                for name, dtype, storage in named:
                    file.read(name, _elements(storage, dtype))

    def close(self) -> None:
        if self._path:
            with suppress(FileNotFoundError):
                os.unlink(self._path)


def _elements(storage: UntypedStorage, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return all elements of a storage as a vector, with a version counter of its own."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


# --- parked tensors ---------------------------------------------------------------------------------------------------

# Attributes that return values or aliases; all others are metadata, which parked tensors still have.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "_base"})
_METADATA = (
    *("numel", "nelement", "dim", "ndimension", "size", "stride", "storage_offset", "data_ptr", "untyped_storage"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_inference"),
    *("get_device", "_is_view", "__hash__"),
)


class _Guard:
    """A mixin for the class of a parked tensor: an operation on its values raises an error."""

    __slots__ = ()
    message: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":
            is_harmless = func.__self__.__name__ not in _VALUES
        elif func.__name__ in ("__set__", "__delete__"):
            is_harmless = func.__self__.__name__ in ("grad", "requires_grad")
        else:
            is_harmless = func.__name__ in _METADATA
        if not is_harmless:
            raise RuntimeError(cls.message)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self.message)

    def __repr__(self, **_: Any) -> str:
        return f"<{self.message}>"


@cache
def _guarded(kind: Any, message: str) -> Any:
    return type(f"Parked{kind.__name__}", (_Guard, kind), {"__module__": __name__, "message": message})


class ParkedStorage(ShardStorage):
    """The storage of a flat parameter that is parked: its values can neither be read nor written."""

    is_resident = False
    keeps_shards = True

    def __init__(self, storage: ShardStorage, message: str) -> None:
        super().__init__(storage.device)
        self._message = message

    def check(self, what: str, state: Iterable[Any] = ()) -> None:
        raise RuntimeError(f"{what}: {self._message}")

    def adopt(self, flat_param: Any) -> None:
        raise RuntimeError(self._message)


class _Parked:
    """The storages of a part that are parked by a single call.

    Args:
        root: the outermost unit.
        part: one of `PARTS`.
        named: the tensors of the part.
        stay: the addresses of storages that are not parked.
        optimizers: the optimizers whose steps use the part.
        to: see `park`.
    """

    def __init__(
        self,
        root: Unit,
        part: str,
        named: Iterable[Named],
        stay: set[int],
        optimizers: Sequence[torch.optim.Optimizer],
        to: str | os.PathLike[str],
    ) -> None:
        self.root, self.part, self.optimizers = root, part, optimizers
        self.copies = _HostCopies() if to == "host" else _FileCopies(to)
        self.message = (
            f"the {part} of {root.name} {'is' if part == 'optimizer' else 'are'} parked: call fsdp.unpark(model) "
            "before, on every rank, or leave `with fsdp.parked(...)`"
        )
        self._tensors: dict[int, Any] = {}  # by their ids
        found: dict[int, NamedStorage] = {}  # by their addresses
        names: set[str] = set()
        for name, value in named:
            for tensor in _plain_tensors(value):
                storage, address = tensor.untyped_storage(), tensor.untyped_storage().data_ptr()
                if not storage.nbytes() or address in stay or (to == "host" and is_host(storage.device)):
                    continue
                self._tensors |= {id(each): each for each in (tensor, value)}
                if address not in found:
                    found[address] = _named(f"{part}.{name}", tensor.dtype, storage, names)
        self.storages = list(found.values())
        self.sizes = [storage.nbytes() for _, _, storage in self.storages]
        self._undo = ExitStack()

    @property
    def nbytes(self) -> int:
        """The number of bytes that are freed."""
        return sum(self.sizes)

    def copy(self) -> None:
        """Copy all storages; their memory is still there."""
        if self.storages:
            self.copies.keep(self.storages)
        self._finish()

    def free(self) -> None:
        """Free the memory, and make operations on the tensors raise errors."""
        _records(self.root).append(self)
        self.drop()
        for tensor in self._tensors.values():
            kind: Any = type(tensor)
            with suppress(TypeError):  # a class whose objects keep it
                tensor.__class__ = _guarded(kind, self.message)
                self._undo.callback(setattr, tensor, "__class__", kind)
        for handle in _handles(self.root) if self.part == "parameters" else ():
            if not isinstance(handle.storage, ParkedStorage):
                self._undo.callback(setattr, handle, "storage", handle.storage)
                handle.storage = ParkedStorage(handle.storage, self.message)
        self._undo.enter_context(attached(self, [self.root]))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError for the step of an optimizer that uses the part; see `Observers`."""
        if self.part != "optimizer" or any(optimizer is one for one in self.optimizers):
            raise RuntimeError(f"{type(optimizer).__name__}.step(): {self.message}")

    def fill(self) -> None:
        """Allocate the memory again, and fill it."""
        for (_, _, storage), nbytes in zip(self.storages, self.sizes, strict=True):
            storage.resize_(nbytes)
        self.copies.restore(self.storages)
        self._finish()

    def drop(self) -> None:
        """Free the memory, also if it is filled again."""
        for _, _, storage in self.storages:
            storage.resize_(0)

    def end(self) -> None:
        """Allow all operations again, and free the copies."""
        _records(self.root).remove(self)
        self._undo.close()
        for handle in _handles(self.root) if self.part == "parameters" else ():
            # The shard has a new address. All views of it have moved along, so nothing else has changed.
            *_, handle._built_for = handle.shard_state
            if handle.orig_params is not None:
                handle.orig_params.note_places()
        self.copies.close()

    def _finish(self) -> None:
        for device in {storage.device for _, _, storage in self.storages if has_streams(storage.device.type)}:
            finish_queued(device)


def _named(name: str, dtype: torch.dtype, storage: UntypedStorage, names: set[str]) -> NamedStorage:
    """Return a storage with a new name; ValueError if torch cannot free it."""
    if not storage.resizable():
        raise ValueError(
            f"{name} cannot be parked, because NumPy or another process shares its memory, or has shared it: use "
            "tensor.detach().clone().numpy(), or leave out this part"
        )
    name = f"{name}.{len(names)}" if name in names else name
    names.add(name)
    return name, dtype if dtype in KINDS and storage.nbytes() % dtype.itemsize == 0 else torch.uint8, storage


def _records(root: Unit) -> list[_Parked]:
    """Return everything of a model that is parked."""
    found: list[_Parked] = root.requests.setdefault(_Parked, [])
    return found


def _park(
    model: nn.Module, optimizer: Optimizers, to: str | os.PathLike[str], parts: Iterable[str] | None
) -> list[_Parked]:
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    wanted = _checked(PARTS[: 3 if optimizers else 2] if parts is None else parts)
    if "optimizer" in wanted and not optimizers:
        raise ValueError("fsdp.park: the part 'optimizer' needs the argument `optimizer`")
    root = require_sharded(model, "fsdp.park")
    require_shards([root], "park the model")
    runtime = runtime_of_root(root, "fsdp.park")
    before = {one.part for one in _records(root)}
    ours: list[_Parked] = []

    def copy() -> None:
        if "parameters" not in before:
            for handle in runtime.handles:
                handle.absorb()
            runtime.release()
        stay = _mapped(root)
        named = {"parameters": _parameters(root), "gradients": _gradients(root), "optimizer": _states(optimizers)}
        for part, found in named.items():
            tensors = list(found)
            if part in wanted:
                ours.append(_Parked(root, part, tensors, stay, optimizers, to))
            stay = stay | {one.untyped_storage().data_ptr() for _, value in tensors for one in _plain_tensors(value)}
        for one in ours:
            one.copy()

    try:
        done_by_all([root.everyone], "park the model", copy)
    except BaseException:
        for one in ours:
            one.copies.close()
        raise
    ours = [one for one in ours if one.nbytes or one.part not in before]
    for one in ours:
        one.free()
    _return_memory(ours)
    return ours


def _unpark(root: Unit, ours: Sequence[_Parked], *, alone: bool = False) -> None:
    def fill() -> None:
        for one in ours:
            one.fill()

    try:
        done_by_all([] if alone else [root.everyone], "unpark the model", fill)
    except BaseException:
        for one in ours:
            one.drop()
        raise
    for one in ours:
        one.end()
    _return_memory(ours)


def _return_memory(ours: Iterable[_Parked]) -> None:
    for device in {HOST, *(storage.device for one in ours for _, _, storage in one.storages)}:
        return_cached_memory(device)


def _checked(parts: Iterable[str]) -> frozenset[str]:
    found = frozenset([parts] if isinstance(parts, str) else parts)
    if not found <= set(PARTS):
        raise ValueError(f"parts must be some of {', '.join(PARTS)}; got {', '.join(sorted(map(str, found)))}")
    return found


# --- the tensors of each part -----------------------------------------------------------------------------------------


def _handles(root: Unit) -> list[FlatParamHandle]:
    return [handle for _, unit in units_in(root) for handle in unit.handles]


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor with memory, or the tensors inside of it: a `DTensor` has one, other subclasses may have more."""
    if not isinstance(value, Tensor) or isinstance(value, (Placeholder, _Guard)):
        return
    inner = getattr(value, "__tensor_flatten__", None)
    for name in inner()[0] if inner is not None else ():
        yield from _plain_tensors(getattr(value, name))
    if inner is None and not value.is_meta and value.layout is torch.strided:
        yield value
        if value._base is not None:  # gradients are often views
            yield from _plain_tensors(value._base)


def _parameters(root: Unit) -> Iterator[Named]:
    for handle in _handles(root):
        forms = [tensor for form in handle.forms.values() for tensor in (form.full, *form.leaves)]
        for tensor in (handle.flat_param, handle.flat_param._vector, *handle.listed_params, *forms):
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


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Named]:
    for number, optimizer in enumerate(optimizers):
        start = f"{number}." if len(optimizers) > 1 else ""
        groups = optimizer.stepped_groups if isinstance(optimizer, OwnedOptimizer) else optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        if isinstance(optimizer, OwnedOptimizer):  # owners have copies of parameters
            yield from ((f"{start}{place}.param", param) for place, param in enumerate(params))
        numbers = {id(param): str(place) for place, param in enumerate(params)}
        fields = [(numbers.get(id(param), "other"), state) for param, state in optimizer.state.items()]
        for place, group in enumerate(optimizer.param_groups):
            fields.append((f"group {place}", {key: value for key, value in group.items() if key != "params"}))
        for name, held in fields:
            for key, value in held.items() if isinstance(held, dict) else [("state", held)]:
                yield from ((f"{start}{name}.{key}", tensor) for tensor in tensors_in(value))


def _mapped(root: Unit) -> set[int]:
    """Return the addresses of tensors in files, which the system reads and writes by itself; free their pages."""
    storages = (handle.flat_param.shard_storage for handle in _handles(root))
    files = {storage.files for storage in storages if isinstance(storage, DiskStorage)}
    for each in files:
        each.release()
    return {address for each in files for address in each.addresses}
