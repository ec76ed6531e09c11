"""What tests of safetensors files share: files with the state of a model, and a count of what is read of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp import get_fsdp_instances
from tests.helpers.models import nested_mlp


def save(folder: Path, state: dict[str, Tensor], files: int = 1) -> Path:
    """Write a state to one file, or to several with an index. On ranks: collective, rank 0 writes."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(folder, state, files)
    if dist.is_initialized():
        dist.barrier()
    return folder


def _write(folder: Path, state: dict[str, Tensor], files: int) -> None:
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return
    names = list(state)
    places = {name: f"part-{number % files}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: state[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def other_values() -> dict[str, Tensor]:
    """A state of `nested_mlp` that no model is made with."""
    return nested_mlp(seed=1).state_dict()


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The bytes of each read."""
    sizes: list[int] = []

    def preadv(fd: int, buffers: list[Any], offset: int, do: Callable[..., int] = os.preadv) -> int:
        sizes.append(do(fd, buffers, offset))
        return sizes[-1]

    with mock.patch("os.preadv", preadv):
        yield sizes


def shard_bytes(model: nn.Module) -> int:
    """Of this rank's parameters, without padding."""
    handles = [handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
    kept = [(handle, handle.layout.intervals(handle.comm.rank)) for handle in handles]
    return sum(each.numel * handle.flat_param.element_size() for handle, intervals in kept for each in intervals)
