"""`LiveBytes` tracks the memory of tensors during a computation, by its purpose."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _belongs_to(storage: torch.UntypedStorage, arguments: Any) -> bool:
    """Return whether an operator's result is one of its arguments, or a view of an argument."""
    given = (each for each in tree_leaves(arguments) if isinstance(each, Tensor) and each.layout is torch.strided)
    return any(each.untyped_storage()._cdata == storage._cdata for each in given)


class LiveBytes(TorchDispatchMode):
    """While active, counts the bytes of all storages on a type of device, from allocation until release.

    Existing storages, and memory that an operator allocates and frees internally, are not counted. A storage has the
    *kind* that was set when the storage was first seen, until another kind is assigned.

    Args:
        device: the type of device, e.g. "meta".
        host_kind: the kind that represents host memory.

    Attributes:
        kind: the kind of subsequent allocations.
        live: the current bytes, by kind.
        peak: the maximum sum of the bytes of all kinds except `host_kind`, since `forget_peak`.
        at_peak: `live` at the time of the peak.
        host_peak: the maximum bytes of `host_kind` since `forget_peak`.
    """

    def __init__(self, device: str, host_kind: str | None = None) -> None:
        super().__init__()
        self._device, self._host_kind = device, host_kind
        self.kind = ""
        self.live: Counter[str] = Counter()
        self._total = 0
        self._known: dict[int, tuple[str, int]] = {}  # the kind and bytes of each storage, by its id
        self.forget_peak()

    def forget_peak(self) -> None:
        """Reset the peak to the current live bytes."""
        self.peak, self.at_peak = self._total, Counter(self.live)
        self.host_peak = self.live[self._host_kind] if self._host_kind else 0

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            found = resize(storage, nbytes)
            if storage.device.type == self._device:
                self._see(storage)
            return found

        # Not an operator, so the dispatcher does not detect that a storage is resized (torch 2.11 to 2.15).
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == self._device:
                storage = each.untyped_storage()
                if storage._cdata in self._known or not _belongs_to(storage, (args, kwargs)):
                    self._see(storage)
        return result

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """Set the kind of allocations inside the context, or in calls of a function that this decorates."""
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer

    def assign(self, tensor: Tensor, kind: str) -> None:
        """Assign a kind to a tensor's memory from now on."""
        storage = tensor.untyped_storage()
        self._see(storage)
        key = storage._cdata
        before, nbytes = self._known[key]
        self._known[key] = kind, nbytes
        self._change(before, -nbytes)
        self._change(kind, nbytes)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key).atexit = False
            kind, before = self.kind, 0
        else:
            kind, before = known
            if nbytes == before:
                return
        self._known[key] = kind, nbytes
        self._change(kind, nbytes - before)

    def _forget(self, key: int) -> None:
        kind, nbytes = self._known.pop(key)
        self._change(kind, -nbytes)

    def _change(self, kind: str, nbytes: int) -> None:
        self.live[kind] += nbytes
        if kind == self._host_kind:
            self.host_peak = max(self.host_peak, self.live[kind])
            return
        self._total += nbytes
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, Counter(self.live)
