"""Small things of FairScale's that clients import and that this library itself has no use for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class DummyProcessGroup:
    """A group that says of what size it is and which rank this is, and brings nothing to anybody.

    With ``size=1`` it is enough for a wrapper, without `torch.distributed`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def apply_to_type(type_fn: Callable[[Any], bool], fn: Callable[[Any], Any], container: Any) -> Any:
    """A copy of a nest of containers with `fn` applied to whatever `type_fn` is true of."""
    if type_fn(container):
        return fn(container)
    if isinstance(container, PackedSequence):
        return container._replace(data=apply_to_type(type_fn, fn, container.data))
    if isinstance(container, dict):
        copied = type(container)() if isinstance(container, OrderedDict) else {}
        copied.update((key, apply_to_type(type_fn, fn, value)) for key, value in container.items())
        return copied
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*(apply_to_type(type_fn, fn, item) for item in container))
    if isinstance(container, (list, tuple, set)):
        kind = next(kind for kind in (list, tuple, set) if isinstance(container, kind))
        return kind(apply_to_type(type_fn, fn, item) for item in container)
    return container


def apply_to_tensors(fn: Callable[[Tensor], Any], container: Any) -> Any:
    """A copy of a nest of containers with `fn` applied to its tensors."""
    return apply_to_type(torch.is_tensor, fn, container)


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of keyword arguments, and all values in one tuple, which ends with theirs."""
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(kwarg_keys: Sequence[str], flat_args: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """What `pack_kwargs` was given.

    Raises:
        ValueError: for more names than values.
    """
    if len(kwarg_keys) > len(flat_args):
        raise ValueError(f"unpack_kwargs got {len(kwarg_keys)} names and only {len(flat_args)} values")
    first = len(flat_args) - len(kwarg_keys)
    return flat_args[:first], dict(zip(kwarg_keys, flat_args[first:], strict=True))


def split_non_tensors(mixed: Any) -> tuple[tuple[Tensor, ...], dict[str, list[Any]] | None]:
    """The tensors of a tuple, and what `unpack_non_tensors` needs to put the rest back; None for a single tensor."""
    if isinstance(mixed, Tensor):
        return (mixed,), None
    rest = {
        "is_tensor": [isinstance(each, Tensor) for each in mixed],
        "objects": [each for each in mixed if not isinstance(each, Tensor)],
    }
    return tuple(each for each in mixed if isinstance(each, Tensor)), rest


def unpack_non_tensors(tensors: Sequence[Tensor], packed_non_tensors: dict[str, list[Any]] | None) -> Any:
    """What `split_non_tensors` was given, with these tensors.

    Raises:
        ValueError: for another number of tensors.
    """
    if packed_non_tensors is None:
        return tensors
    is_tensor, objects = packed_non_tensors["is_tensor"], packed_non_tensors["objects"]
    if len(tensors) + len(objects) != len(is_tensor):
        raise ValueError(f"unpack_non_tensors needs {len(is_tensor) - len(objects)} tensors, got {len(tensors)}")
    left, right = iter(tensors), iter(objects)
    return tuple(next(left if each else right) for each in is_tensor)


class _Refused:
    """A class of FairScale's that can be imported and not made: files of clients name it at the top."""

    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"fsdp.compat.fairscale has no {type(self).__name__}: {self.instead}")


class ShardedDataParallel(_Refused):
    """Stands in for FairScale's, which shards gradients by whole parameters."""

    instead = "wrap with FullyShardedDataParallel(reshard_after_forward=False), which needs no optimizer of its own"


class OSS(_Refused):
    """Stands in for FairScale's optimizer, which shards its state by whole parameters."""

    instead = "wrap with FullyShardedDataParallel, after which any optimizer of its parameters() is sharded"
