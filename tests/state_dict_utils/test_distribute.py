"""Distributing a state tree that every rank has whole: each rank's tree takes its part, without communication."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp.distributed.collectives import DirectExchange
from fsdp.state_dict_utils import CompanionMismatch, distribute_state_dict
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.state_trees import (
    Peak,
    assert_same_tree,
    blank,
    counting,
    fails_on,
    mesh_of,
    plain_tree,
    spread,
    spread_everywhere,
    tensors_in,
)

CPU = torch.device("cpu")


@on_ranks(3, 4)
def test_each_rank_takes_its_part_bit_for_bit() -> None:
    sharded, wholes = spread_everywhere()
    local = {"model": blank(sharded), "plain": {}}
    kept = tensors_in(local["model"])
    full = {"model": wholes, "plain": plain_tree()}
    assert distribute_state_dict(full, local, CPU) is local
    assert_same_tree(local, {"model": sharded, "plain": plain_tree()})
    assert_same_tree(full, {"model": spread_everywhere()[1], "plain": plain_tree()})
    assert all(one is two for one, two in zip(kept, tensors_in(local["model"]), strict=True))


@on_ranks(4)
def test_targets_on_the_meta_device_are_materialised() -> None:
    sharded, wholes = spread_everywhere()
    local = blank(sharded, lambda tensor: torch.empty_like(tensor, device="meta"))
    distribute_state_dict(wholes, local, CPU, strict=True, cpu_offload=True)
    assert_same_tree(local, sharded)
    sources = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(wholes)} - {0}
    for tensor in tensors_in(local):
        part = tensor.to_local()  # type: ignore[attr-defined]
        assert part.untyped_storage().data_ptr() not in sources
        assert part.untyped_storage().nbytes() == part.nbytes


@on_ranks(3)
def test_parameters_take_values_in_place() -> None:
    blank, filled = (spread(whole, mesh_of(3), [Shard(0)]) for whole in (torch.zeros(4, 2), counting(4, 2)))
    sharded, plain = nn.Parameter(blank), nn.Parameter(torch.zeros(2))
    result = distribute_state_dict([counting(4, 2), counting(2)], [sharded, plain], CPU)
    assert result[0] is sharded
    assert result[1] is plain
    assert sharded.requires_grad
    assert_same_tree([sharded.detach(), plain.detach()], [filled, counting(2)])


def test_new_tensors_share_no_memory_with_the_full_tree() -> None:
    full = {"new": counting(2), "meta": counting(2)}
    local: dict[str, Any] = {"meta": torch.empty(2, device="meta")}
    distribute_state_dict(full, local, CPU)
    assert_same_tree(local, {"meta": counting(2), "new": counting(2)})
    assert not {tensor.data_ptr() for tensor in full.values()} & {tensor.data_ptr() for tensor in local.values()}


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_go_straight_into_the_local_parts(ranks: RankPool, dim: int) -> None:
    assert ranks(3).run(_weigh_distributing, dim) == [0, 0, 0]


def _weigh_distributing(dim: int) -> int:
    whole = counting(7, 7)
    local = [spread(torch.zeros(7, 7), mesh_of(3), [Shard(dim)])]
    peak = Peak()
    with peak:
        distribute_state_dict([whole], local, CPU)
    assert_same_tree(local, [spread(whole, mesh_of(3), [Shard(dim)])])
    return peak.bytes


@on_ranks(2)
def test_nothing_is_sent() -> None:
    local = [spread(torch.zeros(5), mesh_of(2), [Shard(0)])]
    if dist.get_rank() == 0:  # the other rank would have to answer if something was sent
        distribute_state_dict([counting(5)], local, CPU)
        assert_same_tree(local[0].to_local(), counting(3))


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_keeps_what_it_has() -> None:
    mesh = DeviceMesh("cpu", [0, 2])
    size = {0: 3, 1: 0, 2: 2}[dist.get_rank()]
    target = DTensor.from_local(
        torch.zeros(size), mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)
    )
    distribute_state_dict([counting(5)], [target], CPU)
    assert_same_tree(target.to_local(), {0: counting(3), 1: torch.zeros(0), 2: counting(5)[3:]}[dist.get_rank()])


# Trees that do not fit


@on_ranks(2)
def test_a_tree_that_does_not_fit_is_an_error_where_it_is() -> None:
    local = {"a": torch.zeros(2), "b": torch.zeros(2 + dist.get_rank())}
    if dist.get_rank() == 1:
        with pytest.raises(CompanionMismatch, match=r"^b: tensor \[2\] of float32 and tensor \[3\] of float32$"):
            distribute_state_dict({"a": counting(2), "b": counting(2)}, local, CPU)
        assert_same_tree(local["a"], torch.zeros(2))
    else:
        distribute_state_dict({"a": counting(2), "b": counting(2)}, local, CPU)


@on_ranks(3)
def test_with_a_group_it_is_an_error_on_all_of_its_ranks() -> None:
    local = {"a": torch.zeros(2), "b": torch.zeros(2 + dist.get_rank() // 2)}
    with fails_on([2], CompanionMismatch, r"^b: .*tensor \[2\] of float32 and tensor \[3\] of float32$"):
        distribute_state_dict({"a": counting(2), "b": counting(2)}, local, CPU, dist.group.WORLD)
    assert_same_tree(local["a"], torch.zeros(2))
    local["b"] = torch.zeros(2)
    with mock.patch.object(DirectExchange, "broadcast") as sent:
        distribute_state_dict({"a": counting(2), "b": counting(2)}, local, CPU, dist.group.WORLD)
    assert not sent.called
    assert_same_tree(local, {"a": counting(2), "b": counting(2)})


@pytest.mark.parametrize(
    ("full", "local", "message"),
    [
        ({"a": 1}, {}, r"'a' is in the full tree only, and the local one has no such key"),
        ({}, {"a": 1}, r"'a' is in the local one only, and the full tree has no such key"),
    ],
)
def test_strict_refuses_keys_that_the_other_lacks(full: Any, local: Any, message: str) -> None:
    with pytest.raises(CompanionMismatch, match=message):
        distribute_state_dict(full, local, CPU, strict=True)
    distribute_state_dict(full, local, CPU)
    assert local == {"a": 1}


def test_lists_must_be_of_one_length_in_any_case() -> None:
    with pytest.raises(CompanionMismatch, match=r"^a: 1 items in the full tree, 2 items in the local one"):
        distribute_state_dict({"a": [1]}, {"a": [1, 2]}, CPU)
