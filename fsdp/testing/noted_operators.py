"""`NoteOperators` is a mode that records the memory and the stream of every operator.

torch also activates modes in the threads of autograd and in optimizers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fsdp.distributed.devices import HOST, is_host
from fsdp.testing.access_log import Timeline
from fsdp.testing.stream_order import Held, StreamOrder

# These operators change or query a tensor's view, and access no memory.
_WITHOUT_ACCESS = {"set_", "resize_", "resize_as_", "record_stream", "is_pinned"}
_COPIES = {"copy_", "_to_copy"}
# The results of these operators depend on values, for which the host waits.
_SYNCHRONISING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MESSAGES = {"send", "recv_", "recv_any_source_"}
_wait = dist.Work.wait if dist.is_available() else None


class Operand(NamedTuple):
    """A tensor in the arguments of an operator; `writes` is None if its memory is neither read nor written."""

    tensor: Tensor
    argument: str
    writes: bool | None


class Accelerator(threading.local):
    """The observed or simulated accelerator, with the state of each thread.

    Args:
        device: the device, with its index.
        simulated: if True, tensors only report this device.
        timeline: a function that returns the timeline of a stream (default: this thread's current stream).

    Attributes:
        target: the reported device of this thread's new tensors, and whether they are pinned; None: as the operands.
        is_unnoted: if True, operators of this thread are not recorded, because torch's code waits for a collective.
        stream: this thread's current simulated stream; None for the default stream.
        work: this thread's last work, kept alive so that the caller receives this Python object.
    """

    target: tuple[torch.device, bool] | None = None
    is_unnoted = False
    stream: Any = None
    work: Any = None

    def __init__(self, device: torch.device, simulated: bool, timeline: Callable[..., Timeline]) -> None:
        self.device, self.simulated, self.timeline = device, simulated, timeline

    @contextmanager
    def here(self, **state: Any) -> Iterator[None]:
        """Change the state of this thread in the context."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)


class NoteOperators(TorchDispatchMode):
    """Records every operator, on the current stream of the call."""

    def __init__(self, order: StreamOrder, accelerator: Accelerator) -> None:
        super().__init__()
        self._order, self._accelerator = order, accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._order.is_active or self._accelerator.is_unnoted or FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # For wrapper subclasses, the next calls are for the inner tensors.
            return NotImplemented
        given = {name: args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(_arguments(func))}
        operands = [Operand(each, name, _arguments(func)[name]) for name in given for each in tensors_in(given[name])]
        with self._order.lock:
            held = [self._order.held(each.tensor.untyped_storage()) for each in operands]
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        if func.namespace == "c10d" and self._accelerator.simulated and func._opname not in _MESSAGES:
            result = _done_at_once(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        with self._order.lock:
            self._order.collect()
            if is_collective:
                self._note_collective(func, operands, held, result, _group_of(given))
            else:
                self._note(func, operands, held, result, bool(given.get("non_blocking")))
        return result

    def _note(self, func: Any, operands: list[Operand], held: list[Held], result: Any, non_blocking: bool) -> None:
        order, name = self._order, func._opname
        queued = [not is_host(each.device) for each in held]
        made = self._made(result, any(queued))
        used = [each for each, operand in zip(queued, operands, strict=True) if operand.writes is not None]
        on_device = any(used) or any(not is_host(device) for _, device, _ in made)
        timeline = self._accelerator.timeline() if on_device else order.host
        access = order.access(name, timeline)
        for tensor, device, pinned in made:
            order.allocate(tensor.untyped_storage(), device, pinned, access)
        for operand, is_queued in zip(operands, queued, strict=True):
            if operand.writes is not None and name not in _WITHOUT_ACCESS:
                # On host memory, only copies are queued. For example, a scalar operand is read during the call.
                is_now = on_device and not is_queued and name not in _COPIES
                order.note(order.access(name, order.host) if is_now else access, operand.tensor, operand.writes)
        if "empty" not in name:
            for tensor, _, _ in made:
                order.note(access, tensor, True)
        if not on_device:
            return
        if name in _COPIES:
            ends = [*tensors_in(result), *(operand.tensor for operand in operands)]
            waits = not all(self._may_go_on(each, non_blocking) for each in ends)
        else:
            gives_numbers = bool(func._schema.returns) and not any(True for _ in tensors_in(result))
            waits = gives_numbers or not _SYNCHRONISING.isdisjoint(func.tags)
        if waits:
            order.host.wait(timeline.moment())

    def _made(self, result: Any, on_device: bool) -> list[tuple[Tensor, torch.device, bool]]:
        """Return the result tensors with new memory, with their devices, and whether the memory is pinned."""
        found = {}
        for each in tensors_in(result):
            storage = each.untyped_storage()
            if not self._order.is_known(storage):
                if not self._accelerator.simulated:
                    found[storage] = each, each.device, is_host(each.device) and each.is_pinned()
                else:
                    home = self._accelerator.device if on_device else HOST
                    found[storage] = each, *(self._accelerator.target or (home, False))
        return list(found.values())

    def _may_go_on(self, end: Tensor, non_blocking: bool) -> bool:
        """Return whether a copy from or to a tensor is asynchronous for the host."""
        held = self._order.held(end.untyped_storage())
        is_observed = not self._accelerator.simulated
        return not is_host(held.device) or (non_blocking and (held.is_pinned or (is_observed and end.is_pinned())))

    def _note_collective(
        self, func: Any, operands: list[Operand], held: list[Held], result: Any, group: str | None
    ) -> None:
        order, name = self._order, func._opname
        if "barrier" in name or "wrap_tensor" in name or not operands:
            return
        on_device = any(not is_host(each.device) for each in held)
        current = self._accelerator.timeline() if on_device else order.host
        if name == "wait_tensor":
            order.finish(None, current)
            return
        if on_device or func.namespace == "_c10d_functional":  # functional collectives have no work to wait for
            timeline = order.timeline(("collectives", group), f"collectives of group {group}")
        else:
            timeline = Timeline("a message between ranks")
        made = [(tensor, device) for tensor, device, _ in self._made(result, on_device)]
        for tensor, device in made:
            order.allocate(tensor.untyped_storage(), device, False, order.access(name, current))
        timeline.wait(current.moment())
        if func.namespace == "_c10d_functional":  # torch keeps the inputs alive until the collective ends
            for each in held:
                each.memory.kept_for.add(timeline)
        accesses = []
        for tensor, argument, writes in [*operands, *(Operand(tensor, "output", True) for tensor, _ in made)]:
            is_read = argument.startswith("input") or name in ("send", "isend")
            accesses.append(order.access(name, timeline))
            order.note(accesses[-1], tensor, bool(writes) or not is_read)
        work = _work_of(result)
        if work is not None:
            self._accelerator.work = work
            order.begin(work, timeline, accesses)


@cache
def _arguments(func: Any) -> dict[str, bool | None]:
    """Return for each argument of an operator whether it is written; None if it is neither read nor written."""
    name = func._opname
    only_shape = name.endswith("_like") or name.startswith("new_")
    found: dict[str, bool | None] = {}
    for each in func._schema.arguments:
        is_written = each.alias_info is not None and each.alias_info.is_write
        is_looked_at = only_shape or (each.alias_info is not None and not is_written)
        found[each.name] = None if is_looked_at else is_written
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory, on a device or the host, in an argument or result."""
    if isinstance(value, Tensor):
        is_wrapper = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
        if not is_wrapper and value.layout is torch.strided and real_device(value).type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def real_device(tensor: Tensor) -> torch.device:
    """Return the actual device of a tensor, independently of a simulation."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch._C.TensorBase.device.__get__(tensor)


def _group_of(given: Mapping[str, Any]) -> str | None:
    if "process_group" in given:
        return str(dist.ProcessGroup.unbox(given["process_group"]).group_name)
    named = given.get("group_name")
    return None if named is None else str(getattr(named, "group_name", named))


def _work_of(result: Any) -> Any:
    found = result[-1] if isinstance(result, tuple) and result else result
    return dist.Work.unbox(found) if isinstance(found, torch.ScriptObject) else None


def _done_at_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective of a simulated device synchronously, so that its work keeps no memory alive."""
    result = func(*tree_map_only(Tensor, _without_owner, args), **kwargs)
    work = _work_of(result)
    if work is not None and _wait is not None:
        _wait(work)
    return result


def _without_owner(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if not tensor.numel() or real_device(tensor).type == "meta":
        return tensor
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    alias = torch.frombuffer(memory, dtype=tensor.dtype, count=storage.nbytes() // tensor.element_size())
    return alias.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
