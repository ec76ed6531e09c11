"""`load_safetensors` into parameters that are `DTensor`s: files have whole tensors, ranks read their parts of parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp import FullyShardedDataParallel, load_safetensors
from fsdp.distributed.dtensor import MeshPart
from fsdp.engine.boxes import Box
from tests.helpers.equality import assert_same_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.safetensors_files import counted_reads, save, shard_bytes
from tests.helpers.tensor_parallel import cube, gpt, mesh_of, over_data

OPTIONS = [{}, {"use_orig_params": True}, {"flatten_parameters": False}, {"move_params_to_cpu": True}]


@parametrize_cases(
    at_most=6, shape=[(2, 2), (1, 2), (2, 1)], model=[{}, {"vocabulary": True}, {"kind": "sequence"}], options=OPTIONS
)
@on_ranks(lambda case: case.shape[0] * case.shape[1])
def test_parts_are_those_of_the_whole_tensors_in_the_file(tmp_path: Path, case: Case) -> None:
    save(tmp_path, gpt(seed=1).state_dict())
    mesh = mesh_of(*case.shape)
    model = gpt(over_data(mesh, **case.options), mesh=mesh, **case.model)
    with counted_reads() as sizes:
        load_safetensors(model, tmp_path)
    assert sum(sizes) == shard_bytes(model) + sum(buffer.nbytes for _, buffer in model.named_buffers())
    assert_same_state(model.state_dict(), gpt(seed=1).state_dict())


@on_ranks(2)
def test_ignored_dtensors_are_read_in_part(tmp_path: Path) -> None:
    save(tmp_path, {"0.weight": torch.rand(6, 4), "1.weight": torch.rand(4, 4)})
    mesh = mesh_of(1, 2)["tp"]
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 4, bias=False))
    module[0].weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]))
    model = FullyShardedDataParallel(module, ignored_modules=[module[0]])
    load_safetensors(model, tmp_path)
    assert isinstance(module[0].weight, DTensor)
    from fsdp.checkpoint.safetensors import SafetensorsFiles

    whole = torch.empty(6, 4)
    with SafetensorsFiles(tmp_path) as files:
        files.read("0.weight", whole)
    assert torch.equal(module[0].weight.full_tensor(), whole)


@on_ranks(4)
def test_what_is_cut_along_two_dimensions(tmp_path: Path) -> None:
    state = {"0.weight": torch.rand(4, 4), "1.weight": torch.rand(4, 4)}
    save(tmp_path, state)
    mesh = cube()
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    placements = [[Replicate(), Shard(0)], [Shard(0), Shard(1)]]
    for layer, each in zip(module, placements, strict=True):
        layer.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh["a", "b"], each))
    model = FullyShardedDataParallel(module, process_group=mesh["dp"].get_group())
    with counted_reads() as sizes:
        load_safetensors(model, tmp_path)
    assert sum(sizes) == shard_bytes(model)
    assert_same_state(model.state_dict(), state)


# Arithmetic


class Mesh:
    """All that is asked of a mesh."""

    def __init__(self, sizes: list[int], place: list[int]) -> None:
        self._sizes, self._place = sizes, place

    def size(self, number: int) -> int:
        return self._sizes[number]

    def get_coordinate(self) -> list[int]:
        return self._place


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_range_of_a_part_is_found_in_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    place = [data.draw(st.integers(0, size - 1)) for size in sizes]
    dims = st.integers(-len(shape), len(shape) - 1)
    placements = [data.draw(st.one_of(st.just(Replicate()), dims.map(Shard))) for _ in sizes]
    part = MeshPart(cast(Any, Mesh(sizes, place)), tuple(placements), torch.Size(shape))
    whole = torch.arange(math.prod(shape)).view(shape)
    box = Box(part.offsets, tuple(part.to_local("x", whole).shape))
    local = part.to_local("x", whole).reshape(-1)
    start = data.draw(st.integers(0, local.numel()))
    stop = data.draw(st.integers(start, local.numel()))
    found: list[Tensor] = [whole.view(-1)[first:last] for first, last in box.ranges(shape, start, stop)]
    assert len(found) <= math.prod(box.sizes[:-1])
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), local[start:stop])
