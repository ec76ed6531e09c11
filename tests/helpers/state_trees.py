"""What tests of state trees share: trees of every kind of leaf, `DTensor`s of every placement, and bitwise equality."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.equality import bits_of
from tests.helpers.memory import bytes_with_garbage, live_bytes


class Moments(NamedTuple):
    """A named tuple in a tree."""

    first: Any
    second: Any


# Kept for the life of a process, because groups are never destroyed.
@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Collective. All ranks in a mesh of this shape."""
    return init_device_mesh("cpu", shape)


def spread(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A `DTensor` with the values of `whole`, which every rank has. What torch makes of it, without communication."""
    nowhere = [Replicate()] * mesh.ndim
    replicated = DTensor.from_local(whole.clone(), mesh, nowhere, run_check=False)
    spread = replicated.redistribute(placements=placements)
    # Of its own memory: a replicated one would share that of the whole.
    return DTensor.from_local(
        spread.to_local().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def counting(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different values in all places, as far as the dtype goes."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)


# Wholes that divide evenly at some world sizes and not at others; some leave ranks without an element.
WHOLES: dict[str, Callable[[], Tensor]] = {
    "even": lambda: counting(12, 4),
    "uneven": lambda: counting(7, 5),
    "one": lambda: counting(1, 1),
    "nothing": lambda: counting(0, 3),
    "cube": lambda: counting(5, 3, 2).to(torch.float64),
    "half": lambda: counting(5, 2, dtype=torch.bfloat16),
    "flags": lambda: counting(5, 2) > 4,
    "complex": lambda: torch.complex(counting(3, 5), -counting(3, 5)),
    "int16": lambda: counting(5, 3, dtype=torch.int16),
    "float8": lambda: counting(5, 3, dtype=torch.float8_e4m3fn),
}


def placements_for(world_size: int) -> list[tuple[tuple[int, ...], list[Placement]]]:
    """Shapes of meshes, and placements on them."""
    line: list[tuple[tuple[int, ...], list[Placement]]] = [
        ((world_size,), [placement]) for placement in (Shard(0), Shard(1), Replicate())
    ]
    sides = (2, world_size // 2) if world_size % 2 == 0 else (1, world_size)
    pairs: list[list[Placement]] = [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [_StridedShard(0, split_factor=sides[1]), Shard(0)],
    ]
    return line + [(sides, pair) for pair in pairs]


def spread_everywhere() -> tuple[dict[str, Any], dict[str, Any]]:
    """Collective. A tree of `DTensor`s: every whole with every placement; and the tree of wholes."""
    sharded: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    for shape, placements in placements_for(dist.get_world_size()):
        mesh = mesh_of(*shape)
        name = f"{shape} {placements}"
        wholes[name] = {key: make() for key, make in WHOLES.items()}
        sharded[name] = {key: spread(whole, mesh, placements) for key, whole in wholes[name].items()}
    return sharded, wholes


def blank(tree: dict[str, Any], change: Callable[[DTensor], Tensor] = torch.zeros_like) -> dict[str, Any]:
    """A tree of `spread_everywhere` with other tensors in the place of its own."""
    return {name: {key: change(tensor) for key, tensor in inside.items()} for name, inside in tree.items()}


def tensors_in(tree: dict[str, Any]) -> list[Any]:
    """The tensors of a tree of `spread_everywhere`."""
    return [tensor for inside in tree.values() for tensor in inside.values()]


def partial_sums(whole: Tensor) -> DTensor:
    """A `DTensor` whose ranks hold summands of `whole`."""
    mesh = mesh_of(dist.get_world_size())
    rank, count = dist.get_rank(), dist.get_world_size()
    summand = torch.full_like(whole, rank + 1) if rank < count - 1 else whole - sum(range(1, count))
    return DTensor.from_local(summand, mesh, [Partial()], run_check=False)


def plain_tree() -> dict[str, Any]:
    """Every kind of container and leaf, without `DTensor`s."""
    return {
        "model": OrderedDict([("weight", counting(2, 3)), ("scale", torch.tensor(3.5)), ("none", counting(0, 2))]),
        "state": {0: {"step": 7, "moments": Moments(counting(3), counting(3, dtype=torch.bfloat16))}, 1: {}},
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "name": "all", "amsgrad": False}],
        "other": (b"bytes", io.BytesIO(b"file"), None, 1 + 2j, [], ()),
    }


def assert_same_tree(actual: Any, expected: Any, path: str = "tree") -> None:
    """The same containers, types and bits; `DTensor`s by what this rank holds, and where."""
    assert type(actual) is type(expected), path
    if isinstance(expected, dict):
        assert list(actual) == list(expected), path
        for key in expected:
            assert_same_tree(actual[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_tree(one, other, f"{path}.{number}")
    elif isinstance(expected, DTensor):
        assert (actual.device_mesh, actual.placements) == (expected.device_mesh, expected.placements), path
        assert actual.shape == expected.shape, path
        assert_same_tree(actual.to_local(), expected.to_local(), path)
    elif isinstance(expected, Tensor):
        assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device), path
        assert torch.equal(bits_of(actual), bits_of(expected)), path
    elif isinstance(expected, io.BytesIO):
        assert actual.getvalue() == expected.getvalue(), path
    else:
        assert actual == expected, path


class Peak(TorchDispatchMode):
    """The most bytes that tensors hold at once beyond what was there, looked at after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._before = live_bytes()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, bytes_with_garbage() - self._before)
        return result


def fails_on(wrong: Collection[int], error: type[Exception], message: str) -> Any:
    """Expect an error on the ranks that are wrong, and on the others one that names the first of them."""
    if dist.get_rank() in wrong:
        return pytest.raises(error, match=message)
    said = rf"rank \d could not \w+ a state dict.* {error.__name__}: .*{message.removeprefix('^')}"
    return pytest.raises(RuntimeError, match=said)
