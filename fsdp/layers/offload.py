"""Storages that offload shards and their gradients from the compute device to host memory or to files on disk.

torch requires a parameter and its gradient on the same device. If the user stores them on different devices, the
gradient is not in `.grad` (`FlatParameter.hold_gradient`), but moved to the parameter for clipping, unscaling, or the
optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp.distributed.devices import HOST, has_streams, is_host
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.orig_params import LocalShard
from fsdp.engine.storage import ShardStorage

if TYPE_CHECKING:
    from fsdp.layers.mapped_files import MappedFiles, Region


class HostStorage(ShardStorage):
    """Host memory for shards, for gradients, or for both; pinned if the compute device is an accelerator."""

    is_resident = False

    def __init__(self, device: torch.device, params: bool, grads: bool) -> None:
        super().__init__(device)
        self._params, self._grads = params, grads
        self.keeps_shards = params

    @property
    def is_elsewhere(self) -> bool:  # type: ignore[override]  # follows `device`
        return self._params and not is_host(self.device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not self.is_elsewhere:
            return super().allocate(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=HOST, pin_memory=has_streams(self.device.type))

    def adopt(self, flat_param: FlatParameter) -> None:
        is_pinned = not has_streams(self.device.type) or flat_param.is_pinned()
        if self.is_elsewhere and (flat_param.device != HOST or not is_pinned):
            values = flat_param.detach()
            flat_param.data = self.allocate(values.numel(), values.dtype).view(values.shape).copy_(values)

    def accept(self, flat_param: FlatParameter, reduced: Tensor) -> None:
        if self._grads:
            self.copy_stream.to_host(reduced, flat_param.hold_gradient)
        else:
            flat_param.hold_gradient(reduced)


class _OnDisk:
    """A parameter in a mapped file. Optimizer state created like this parameter is also in mapped files."""

    shard_storage: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fill = _LIKENESSES.get(func)
        like = kwargs.get("input", args[0] if args else None)
        # A shard unpickled without the model is in memory.
        storage = like.shard_storage if isinstance(like, _OnDisk) else None
        if fill is None or storage is None or kwargs.get("device") not in (None, HOST):
            with torch._C.DisableTorchFunctionSubclass():  # as in `Parameter`, which disables this method
                return func(*args, **kwargs)
        numel, dtype = like.numel(), kwargs.get("dtype") or like.dtype
        made, _ = storage.files.allocate(numel, dtype, "optimizer state")
        return fill(made.view(like.shape), args, kwargs).requires_grad_(kwargs.get("requires_grad", False))


class DiskFlatParameter(_OnDisk, FlatParameter):
    """A shard in a mapped file."""


torch.serialization.add_safe_globals([DiskFlatParameter])


class DiskLocalShard(_OnDisk, LocalShard):
    """A local shard of an original parameter, in a mapped file."""


_LIKENESSES: dict[Any, Callable[[Tensor, Any, Any], Tensor]] = {
    torch.zeros_like: lambda made, args, kwargs: made,
    torch.empty_like: lambda made, args, kwargs: made,
    torch.ones_like: lambda made, args, kwargs: made.fill_(1),
    torch.full_like: lambda made, args, kwargs: made.fill_(args[1] if len(args) > 1 else kwargs["fill_value"]),
}


class DiskStorage(ShardStorage):
    """Files on disk for the shard, its gradient and optimizer state, mapped into memory."""

    flat_parameter = DiskFlatParameter
    local_shard = DiskLocalShard
    keeps_shards = True
    is_resident = False

    def __init__(self, device: torch.device, files: MappedFiles) -> None:
        super().__init__(device)
        self.files = files
        self._shard: tuple[int, Region] | None = None  # address and region
        self._grad: tuple[Tensor, Region] | None = None
        self._shown: weakref.ref[Tensor] | None = None  # the gradient in this file that users see

    def __reduce__(self) -> tuple[Any, ...]:  # also for copies, which share the files
        return DiskStorage, (self.device, self.files)

    @property
    def is_elsewhere(self) -> bool:  # type: ignore[override]  # follows `device`
        return not is_host(self.device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        made, region = self.files.allocate(numel, dtype, "shard")
        self._shard = (made.data_ptr(), region)
        return made

    def adopt(self, flat_param: FlatParameter) -> None:
        if self._shard is None or flat_param.data_ptr() != self._shard[0]:
            values = flat_param.detach()
            flat_param.data = self.allocate(values.numel(), values.dtype).view(values.shape).copy_(values)

    def read_ahead(self) -> None:
        if self._shard is not None:  # the gradient is not read next, but written
            self._shard[1].read_ahead()

    def release(self) -> None:
        for region in self._regions():
            region.release()

    def check(self, what: str, state: Iterable[Any] = ()) -> None:
        for region in (*self._regions(), *self.files.regions_of(state)):
            region.check(what)

    def accept(self, flat_param: FlatParameter, reduced: Tensor) -> None:
        if flat_param.held_gradient is None:
            # All steps use the same file for gradients: creating a file takes longer than writing it.
            is_kept = self._shown is not None and self._shown() is not None  # the user still references it
            if self._grad is None or self._grad[0].dtype != reduced.dtype or is_kept:
                self._grad = self.files.allocate(reduced.numel(), reduced.dtype, "gradient")
            # A cast of the model changes the returned tensor. Detached last, it is the base of all views, which keep it
            # alive, because users may keep the gradient of a local shard.
            reduced = self._grad[0].copy_(reduced).view(flat_param.shape).detach()
            self._shown = weakref.ref(reduced)
        flat_param.hold_gradient(reduced)
        self.release()

    def keep_state(self, state: dict[str, Any], shape: torch.Size) -> None:
        """Move an optimizer's state for a parameter of this shape from memory to files."""
        for key, value in state.items():
            if key == "step" and not shape:
                continue  # a count, although its shape is the parameter's
            if isinstance(value, Tensor) and value.shape == shape and value.numel() and not self.files.holds(value):
                made, _ = self.files.allocate(value.numel(), value.dtype, "optimizer state")
                state[key] = made.view(shape).copy_(value)

    def _regions(self) -> list[Region]:
        return [kept[1] for kept in (self._shard, self._grad) if kept is not None]
