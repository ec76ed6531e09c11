"""The bytes that a rank receives, counted alike for our messages and for torch's collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp.distributed.collectives import DirectExchange


@dataclass
class Traffic:
    """Bytes that this rank has received.

    Attributes:
        values: of parameters, gradients and activations. A collective counts as what it needs at least.
        words: of what ranks tell each other besides, which is bytes here and nothing with torch's.
    """

    values: int = 0
    words: int = 0


class Counting(TorchDispatchMode):
    """Adds to `traffic` what this rank receives inside, also what `DTensor`s communicate."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            nbytes = _received(func.__name__.partition(".")[0], args, tensors)
            if tensors and tensors[0].dtype is torch.uint8:
                self.traffic.words += nbytes
            else:
                self.traffic.values += nbytes
        return found


def _received(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> int:
    """Return how many bytes a rank receives in one collective at least."""
    nbytes = [each.nbytes for each in tensors]
    match name:
        case "send" | "wait_tensor" | "_wrap_tensor_autograd":
            return 0
        case "recv_":
            return sum(nbytes)
        case "scatter_":
            return nbytes[0]
        case "_allgather_base_":
            return nbytes[0] - nbytes[1]
        case "_reduce_scatter_base_":
            return nbytes[1] - nbytes[0]
        case "allreduce_":
            return sum(_all_reduced(each, dist.ProcessGroup.unbox(args[1])) for each in tensors)
        case "all_gather_into_tensor":
            return nbytes[0] * (args[1] - 1)
        case "reduce_scatter_tensor":
            return nbytes[0] * (args[2] - 1) // args[2]
        case "all_reduce":
            return _all_reduced(tensors[0], _resolve_process_group(args[2]))
    raise NotImplementedError(f"{name} is not counted yet")


def _all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Each rank sums one part of equal size, and sends it to all."""
    return 2 * (group.size() - 1) * -(-tensor.numel() // group.size()) * tensor.element_size()


def by_group(group: Any, tensor: Tensor) -> Any:
    return group


def by_dtype(group: Any, tensor: Tensor) -> torch.dtype:
    return tensor.dtype


@contextmanager
def gathering() -> Iterator[list[str]]:
    """The all-gathers that this rank begins, as errors name them."""
    begun: list[str] = []
    do = DirectExchange.all_gather

    def all_gather(comm: Any, full: Tensor, shard: Tensor, what: str, tag: Any) -> Any:
        begun.append(what)
        return do(comm, full, shard, what, tag)

    with mock.patch.object(DirectExchange, "all_gather", all_gather):
        yield begun


@contextmanager
def counting_sent(key: Callable[[Any, Tensor], Any]) -> Iterator[Counter[Any]]:
    """Count the bytes of parameters and gradients that this rank sends, by a `key` of process group and tensor."""
    sent: Counter[Any] = Counter()
    kind = type(dist.group.WORLD)
    send: Any = kind.send  # type: ignore[union-attr]

    def count(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        for tensor in tensors:
            if tensor.dtype is not torch.uint8:  # which is what ranks tell each other
                sent[key(group, tensor)] += tensor.nbytes
        return send(group, tensors, *args)

    with mock.patch.object(kind, "send", count):
        yield sent
