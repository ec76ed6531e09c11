"""What tests of offload share: its kinds, and a CPU that stands for a host and its accelerator.

Where there is no accelerator everything is in host memory anyway. To see on any machine what offload does where there
is one, `accelerated` has shards copied for every gather and gradients arrive late, and what would be on another device
than its parameter is kept in a tensor that is no more use here than one on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdp import FlatParameter, FullyShardedDataParallel
from fsdp.distributed.devices import CopyStream
from fsdp.layers.offload import DiskStorage, HostStorage

BOTH: dict[str, Any] = {"offload": "cpu"}
PARAMS: dict[str, Any] = {"move_params_to_cpu": True, "move_grads_to_cpu": False}
GRADS: dict[str, Any] = {"move_grads_to_cpu": True}
KINDS = [BOTH, PARAMS, GRADS]

every_kind = pytest.mark.parametrize("options", KINDS, ids=["both", "params", "grads"])


class AlwaysReducing(FullyShardedDataParallel):
    """Accumulates as users do who don't know `no_sync`."""

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class Far(Tensor):
    """A tensor on another device: it has values, but only a copy or an addition from over there reaches them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    over_there: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Far:
        self = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=torch.device("meta"))
        self.over_there = values
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return args[0].over_there.clone()
        if func is torch.ops.aten.add_.Tensor and isinstance(args[1], Far):
            args[0].over_there.add_(args[1].over_there)
            return args[0]
        raise AssertionError(f"{func} across devices")


class LateLane(CopyStream):
    """Copies to the host that have arrived when the lane settles and not before, as on CUDA."""

    def __init__(self, arrived: Callable[[Tensor], Tensor]) -> None:
        self._arrived = arrived
        self._leaving: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def to_host(self, source: Tensor, use: Callable[[Tensor], None]) -> None:
        self._leaving.append((source.clone(), use))

    def settle(self) -> None:
        leaving, self._leaving = self._leaving, []
        for source, use in leaving:
            use(self._arrived(source))


@contextmanager
def accelerated() -> Iterator[None]:
    """Whatever is offloaded inside is away from where it is computed with."""
    lanes = {True: LateLane(lambda source: source), False: LateLane(Far)}  # by whether shards are on the host as well
    accept = HostStorage.accept
    both = mock.Mock(settle=lambda: [lane.settle() for lane in lanes.values()])  # the runtime has one for a device

    def accept_from_device(home: HostStorage, flat_param: FlatParameter, reduced: Tensor) -> None:
        accept(home, flat_param, reduced if home._grads or not home._params else Far(reduced))

    with (
        mock.patch.object(HostStorage, "is_elsewhere", property(lambda home: home._params)),
        mock.patch.object(DiskStorage, "is_elsewhere", property(lambda home: True)),
        mock.patch.object(HostStorage, "copy_stream", property(lambda home: lanes[home._params])),
        mock.patch.object(HostStorage, "accept", accept_from_device),
        mock.patch("fsdp.engine.runtime.copy_stream_of", return_value=both),
    ):
        yield


def on(machine: str) -> AbstractContextManager[None]:
    return accelerated() if machine == "accelerated" else nullcontext()


def with_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    return options | {"offload_folder": folder} if options.get("offload") == "disk" else options
