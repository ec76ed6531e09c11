"""Properties of a copy of a state, with a probe for each: used by `benchmarks.stager`.

A probe takes a function that copies a tree, calls it, and returns whether the property holds. Errors are also results.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Copy = Callable[[Any], Any]


class Point(NamedTuple):
    x: Tensor
    y: int


@dataclass(frozen=True)
class Frozen:
    weight: Tensor
    inner: Any = None


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    weight: Tensor


class Custom:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class CopiesItself(Custom):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(copy.deepcopy(self.weight, memo))


class Tagged(Tensor):
    tag: Any


class TwoTensor(Tensor):
    """A wrapper, as quantised weights are."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> TwoTensor:
        self = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)
        self.first, self.second = first, second
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> TwoTensor:
        return TwoTensor(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, second = (
            func(*[getattr(each, name) if isinstance(each, TwoTensor) else each for each in args], **(kwargs or {}))
            for name in ("first", "second")
        )
        return TwoTensor(first, second)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _aliases(stage: Copy) -> bool:
    weight = nn.Parameter(torch.ones(4))
    copied = stage([weight, {"tied": weight}])
    return copied[0] is copied[1]["tied"] and type(copied[0]) is nn.Parameter


def _sharing(stage: Copy) -> bool:
    whole = torch.arange(6.0)
    copied = stage([whole, whole[2:], torch.arange(6.0)])
    return _memory(copied[0]) == _memory(copied[1]) != _memory(copied[2])


def _views(stage: Copy) -> bool:
    whole = torch.arange(24.0)
    views = [whole[1::2], whole.view(4, 6).t(), whole.as_strided((5, 4), (2, 1), 3), whole[3].expand(2), whole[4:4]]
    copied = stage([whole, *views])
    looks = [(each.stride(), each.storage_offset()) for each in copied[1:]]
    same = all(torch.equal(*pair) for pair in zip(copied[1:], views, strict=True))
    return same and looks == [(each.stride(), each.storage_offset()) for each in views]


def _dtypes(stage: Copy) -> bool:
    whole = torch.arange(6.0)
    copied = stage([whole, whole.view(torch.int32)])
    return _memory(copied[0]) == _memory(copied[1]) and copied[1].dtype == torch.int32


def _conjugates(stage: Copy) -> bool:
    whole = torch.view_as_complex(torch.arange(6.0).view(3, 2))
    views = [whole.conj(), whole.conj().imag]
    return all(torch.equal(*pair) for pair in zip(stage(views), views, strict=True))


def _sparse(stage: Copy) -> bool:
    dense = torch.eye(3)
    return all(torch.equal(each.to_dense(), dense) for each in stage([dense.to_sparse(), dense.to_sparse_csr()]))


def _containers(stage: Copy) -> bool:
    weight = torch.arange(3.0)
    tree = [Point(weight, 1), Frozen(weight, Frozen(weight)), FrozenSlotted(weight), Custom(weight)]
    copied = stage([*tree, weight])
    weights = [copied[0].x, copied[1].weight, copied[1].inner.weight, copied[2].weight, copied[3].weight]
    kept = [type(each) for each in copied[:-1]] == [type(each) for each in tree]
    return kept and all(_memory(each) == _memory(copied[-1]) != _memory(weight) for each in weights)


def _metadata(stage: Copy) -> bool:
    state: Any = nn.BatchNorm1d(2).state_dict()
    return stage(state)._metadata == state._metadata


def _cycles(stage: Copy) -> bool:
    tree: dict[str, Any] = {"w": torch.ones(1)}
    tree["self"] = tree
    copied = stage(tree)
    return copied["self"] is copied


def _subclasses(stage: Copy) -> bool:
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.tag = "kept"
    copied = stage(tagged)
    return type(copied) is Tagged and copied.tag == "kept"


def _wrappers(stage: Copy) -> bool:
    original = TwoTensor(torch.ones(2), torch.zeros(2))
    copied = stage(original)
    fresh = copied.first.data_ptr() != original.first.data_ptr()
    return type(copied) is TwoTensor and fresh and copied.second.tolist() == [0, 0]


def _dtensors(stage: Copy) -> bool:
    with _world_of_one():
        mesh = init_device_mesh("cpu", (1,))
        original = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        copied = stage(original)
        fresh = copied.to_local().data_ptr() != original.to_local().data_ptr()
        same = torch.equal(copied.to_local(), original.to_local())
        return isinstance(copied, DTensor) and copied.device_mesh is mesh and fresh and same


class _world_of_one:  # noqa: N801
    def __enter__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        dist.init_process_group(
            "gloo", rank=0, world_size=1, store=dist.FileStore(str(Path(self._folder.name) / "s"), 1)
        )

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()
        self._folder.cleanup()


def _meta(stage: Copy) -> bool:
    copied = stage(torch.empty(3, device="meta"))
    return bool(copied.is_meta)


def _freed(stage: Copy) -> bool:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    try:
        stage({"weight": freed})
    except (RuntimeError, TypeError) as error:
        return "weight" in str(error)
    return False


def _on_cpu(stage: Copy) -> bool | None:
    if not torch.cuda.is_available():
        return None
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    copied = stage([weight, Frozen(weight), TwoTensor(weight.data, weight.data), CopiesItself(weight)])
    found = [copied[0], copied[1].weight, copied[2].first, copied[3].weight]
    return all(each.device.type == "cpu" for each in found)


def _kept_while_held(stage: Copy) -> bool:
    weight = torch.zeros(4)
    first = stage(weight)
    weight.fill_(1)
    stage(weight)
    return first.tolist() == [0, 0, 0, 0]


PROPERTIES: dict[str, Callable[[Copy], bool | None]] = {
    "shared storages stay shared": _sharing,
    "parameters stay parameters, tied ones one": _aliases,
    "views stay views": _views,
    "views of another dtype": _dtypes,
    "conjugate and negative views": _conjugates,
    "sparse tensors (COO, CSR)": _sparse,
    "NamedTuples, dataclasses, objects": _containers,
    "_metadata of a state dict": _metadata,
    "cycles": _cycles,
    "plain subclasses with attributes": _subclasses,
    "wrapper subclasses": _wrappers,
    "DTensors, on the same mesh": _dtensors,
    "every tensor ends on the CPU": _on_cpu,
    "no values made up for meta tensors": _meta,
    "freed memory is an error with a name": _freed,
    "a copy that is held is not overwritten": _kept_while_held,
}


def tried(probe: Callable[[Copy], bool | None], stage: Copy) -> str:
    """The answer as a cell of a table."""
    try:
        holds = probe(stage)
    except Exception as error:  # noqa: BLE001  # whatever it is, the property does not hold
        return type(error).__name__
    return "no CUDA here" if holds is None else "yes" if holds else "no"
