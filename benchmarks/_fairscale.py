"""FairScale on the CPU, for benchmarks and recordings; its environment is made as `record_fairscale_optim` says."""

from __future__ import annotations

import importlib.util
import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

FAIRSCALE = "fairscale"
_NAMES = ("fp32_to_fp16", "all_gather", "post_backward")


def is_installed() -> bool:
    """Whether this environment has it."""
    return importlib.util.find_spec("fairscale") is not None


class _NoStream:
    """In the place of a CUDA stream."""

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def fairscale_class() -> Any:
    """Return FairScale's class, with substitutes for CUDA functions."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Theirs  # type: ignore[import-not-found]

    if hasattr(Theirs, "is_on_cpu"):
        return Theirs
    Theirs.is_on_cpu = True
    stream = _NoStream()
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    make_others = Theirs._setup_streams

    def setup_streams(self: Any) -> None:
        if self._is_root and not self._streams:
            make_others(self)
            self._streams.update(dict.fromkeys(_NAMES, stream))  # the same dictionary as the children's

    Theirs._setup_streams = setup_streams
    return Theirs


def options_on_cpu(**more: Any) -> dict[str, Any]:
    """Return the arguments of FairScale's wrappers on the CPU."""
    return {"compute_device": torch.device("cpu"), "bucket_cap_mb": 0, **more}


def wrapped(model: nn.Module, units: nn.ModuleList) -> Any:
    """Collective. A model wrapped unit by unit, that gives its state to the first rank."""
    kind = fairscale_class()
    for index, unit in enumerate(units):
        units[index] = kind(unit, **options_on_cpu())
    return kind(model, **options_on_cpu(state_dict_on_rank_0_only=True))


def copying() -> AbstractContextManager[Any]:
    """Make ``cpu()`` copy inside the context: FairScale's gather requires it, but CPU tensors are not copied."""
    return mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone)


def from_first(value: Any) -> Any:
    """Collective. Return rank 0's value on all ranks, because FairScale loads states that every rank has."""
    written = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(value, written)  # and no plain pickle, which has all of a flat buffer with every view of it
    size = torch.tensor(written.tell())
    dist.broadcast(size, 0)
    content = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        content.copy_(torch.frombuffer(written.getbuffer(), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return torch.load(io.BytesIO(content.numpy().data), weights_only=False)
