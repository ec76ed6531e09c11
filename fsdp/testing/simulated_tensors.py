"""CPU tensors that report an accelerator as device, and functions that read tensors without an operator.

torch's names are replaced instead of using a mode, because modes are inactive while torch runs internal code that
calls hooks of this library and of users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _device

from fsdp.distributed.devices import HOST, is_host
from fsdp.testing.noted_operators import Accelerator, real_device, tensors_in
from fsdp.testing.stream_order import StreamOrder

Names = Iterator[tuple[Any, dict[str, Any]]]  # modules and classes of torch, with the replacements of their attributes

_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"]
_MAKING = ["arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"]
_MAKING += ["randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros", *_LIKE]
_MAKING_NEW = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]


def reading_names(order: StreamOrder, accelerator: Accelerator) -> Names:
    """Yield replacements that record reads by the host, and calls of `Tensor.record_stream`."""

    def reading(name: str) -> Callable[..., Any]:
        real = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            with order.lock:
                for part in _plain(tensor):
                    on_host = is_host(order.held(part.untyped_storage()).device)
                    timeline = order.host if on_host else accelerator.timeline()
                    order.note(order.access(name, timeline), part, False)
                    order.host.wait(timeline.moment())
            return real(tensor, *args, **kwargs)

        return read

    yield Tensor, {name: reading(name) for name in ("numpy", "tolist")}
    record = Tensor.record_stream

    def record_stream(tensor: Tensor, stream: Any) -> None:
        if not accelerator.simulated:
            record(tensor, stream)
        for part in _plain(tensor):
            order.held(part.untyped_storage()).memory.kept_for.add(accelerator.timeline(stream))

    yield Tensor, {"record_stream": record_stream}


class SimulatedTensors:
    """Replacements of torch's functions and properties, so that CPU tensors report an accelerator."""

    def __init__(self, order: StreamOrder, accelerator: Accelerator) -> None:
        self._order, self._accelerator = order, accelerator

    def names(self) -> Names:
        # torch caches its factory functions when a `torch.device` is first used as a context. The cache must contain
        # the original functions: otherwise `with torch.device("meta")` would have no effect after the check.
        with HOST:
            torch.empty(0, device=HOST)
        yield torch, {name: self._making(getattr(torch, name)) for name in _MAKING}
        yield Tensor, {name: self._making(getattr(Tensor, name)) for name in _MAKING_NEW}
        yield (
            Tensor,
            {
                "device": property(self._device_of),
                "is_cpu": property(lambda tensor: is_host(self._device_of(tensor))),
                "is_cuda": property(lambda tensor: self._device_of(tensor).type == "cuda"),
                "get_device": lambda tensor: -1 if is_host(self._device_of(tensor)) else 0,
                "is_pinned": lambda tensor, *_, **__: self._is_pinned(tensor),
                "pin_memory": lambda tensor, *_, **__: self._pin_memory(tensor),
                "to": lambda tensor, *args, **kwargs: self._to(tensor, *args, **kwargs),
                "cpu": lambda tensor, *_, **__: self._moved(tensor, HOST, None, False, False),
                "cuda": lambda tensor, device=None, non_blocking=False, **_: self._moved(
                    tensor, self._accelerator.device, None, non_blocking, False
                ),
            },
        )
        wrap: Any = Tensor._make_wrapper_subclass

        def wrapped(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:  # autograd compares the actual devices
            is_ours = device is not None and self._whole(device) == self._accelerator.device
            made: Tensor = wrap(*args, device=HOST if is_ours else device, **kwargs)
            return made

        yield Tensor, {"_make_wrapper_subclass": staticmethod(wrapped)}
        make: Any = UntypedStorage.__new__

        def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> UntypedStorage:
            wanted = None if device is None else self._whole(device)
            is_ours = wanted == self._accelerator.device
            storage: UntypedStorage = make(cls, *args, device=HOST if is_ours else device, **kwargs)
            if is_ours:
                access = self._order.access("UntypedStorage", self._accelerator.timeline())
                self._order.allocate(storage, self._accelerator.device, False, access)
            return storage

        yield UntypedStorage, {"device": property(lambda one: self._order.held(one).device), "__new__": new}

    def _whole(self, device: Any) -> torch.device:
        # Private in torch, whose `get_default_device` creates a tensor to read its device. Tested with torch 2.13.
        found = torch.device(device or _device.CURRENT_DEVICE or HOST)
        return self._accelerator.device if found.type == self._accelerator.device.type else found

    def _device_of(self, tensor: Tensor) -> torch.device:
        if is_host(real_device(tensor)):
            for part in _plain(tensor):
                return self._order.held(part.untyped_storage()).device
        return real_device(tensor)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return any(self._order.held(part.untyped_storage()).is_pinned for part in _plain(tensor))

    def _pin_memory(self, tensor: Tensor) -> Tensor:
        if self._is_pinned(tensor):
            return tensor
        with self._accelerator.here(target=(HOST, True)):
            return tensor.clone()

    def _making(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        is_like = make.__name__.endswith("_like") or make.__name__.startswith("new_")

        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            if device is None and not pin_memory and (is_like or self._whole(None) == HOST):
                return make(*args, **kwargs)
            wanted = self._whole(device)
            if wanted != self._accelerator.device and not is_host(wanted):
                return make(*args, device=device, **kwargs)
            if make in (_tensor, _as_tensor):
                whole = make(*args, device=None if args and isinstance(args[0], Tensor) else HOST, **kwargs)
                return self._moved(whole.detach(), wanted, None, False, False).requires_grad_(whole.requires_grad)
            with self._accelerator.here(target=(wanted, pin_memory)):
                return make(*args, device=HOST, **kwargs)

        return made

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            return self._moved(tensor, args[0].device, args[0].dtype, kwargs.get("non_blocking", False), copy)
        # Private in torch; `nn.Module.to` parses its arguments with it. Tested with torch 2.11 to 2.15.
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        moved = self._moved(tensor, device, dtype, non_blocking, copy)
        return moved if memory_format is None else moved.contiguous(memory_format=memory_format)

    def _moved(self, tensor: Tensor, device: Any, dtype: Any, non_blocking: bool, copy: bool) -> Tensor:
        source = self._device_of(tensor)
        device, dtype = source if device is None else self._whole(device), dtype or tensor.dtype
        if source == device or "meta" in (source.type, device.type):
            return _to(tensor, device=device if device.type == "meta" else None, dtype=dtype, copy=copy)
        if tensor.requires_grad and torch.is_grad_enabled():
            moved: Tensor = _Moved.apply(tensor, self, source, device, dtype, non_blocking)
            return moved
        return self.copied(tensor, device, dtype, non_blocking)

    def copied(self, tensor: Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        # As in torch, asynchronous copies to the host use pinned memory.
        with self._accelerator.here(target=(device, non_blocking and is_host(device))):
            copied: Tensor = torch.ops.aten._to_copy(tensor, dtype=dtype, non_blocking=non_blocking)
            return copied


_to, _tensor, _as_tensor = Tensor.to, torch.tensor, torch.as_tensor


class _Moved(torch.autograd.Function):
    """Copies a tensor to another device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to: SimulatedTensors, source: Any, *how: Any) -> Tensor:
        ctx.back = to, source, tensor.dtype
        return to.copied(tensor, *how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        to, source, dtype = ctx.back
        return to.copied(gradient, source, dtype, False), *(None,) * 5


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory in a tensor, which may be a wrapper subclass."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _plain(getattr(tensor, name))
    else:
        yield from tensors_in(tensor)
