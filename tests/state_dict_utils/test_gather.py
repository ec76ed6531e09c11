"""Gathering a state tree: whole tensors from shards of every kind, on all ranks or on some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp import use_torch_collectives
from fsdp.state_dict_utils import CompanionMismatch, distribute_state_dict, gather_state_dict
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.state_trees import (
    Peak,
    assert_same_tree,
    counting,
    fails_on,
    mesh_of,
    partial_sums,
    plain_tree,
    spread,
    spread_everywhere,
)


@on_ranks(1, 3, 4)
def test_every_placement_becomes_the_whole_bit_for_bit() -> None:
    sharded, wholes = spread_everywhere()
    before = [tensor.to_local().clone() for tree in sharded.values() for tensor in tree.values()]
    gathered = gather_state_dict({"model": [sharded], "plain": plain_tree()})
    assert_same_tree(gathered, {"model": [wholes], "plain": plain_tree()})
    after = [tensor.to_local() for tree in sharded.values() for tensor in tree.values()]
    assert_same_tree(after, before)


@on_ranks(3)
def test_partial_tensors_are_summed() -> None:
    assert_same_tree(gather_state_dict([partial_sums(counting(3, 2))]), [counting(3, 2)])


@on_ranks(4)
def test_parts_are_joined_in_the_order_of_the_mesh() -> None:
    for whole in (counting(8, 4), counting(7, 5)):
        line, square = DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [[3, 1], [0, 2]])
        tree = [
            spread(whole, line, [Shard(0)]),
            spread(whole, square, [Shard(1), Shard(0)]),
            spread(whole, square, [_StridedShard(0, split_factor=2), Shard(0)]),
        ]
        assert_same_tree(gather_state_dict(tree), [whole] * 3)
        local = [torch.zeros_like(tensor) for tensor in tree]
        assert_same_tree(distribute_state_dict([whole] * 3, local, "cpu"), tree)


@pytest.mark.parametrize("wanted", [(), (1,)])
@on_ranks(4)
def test_backends_with_collectives_of_their_own_gather_the_same(wanted: tuple[int, ...]) -> None:
    sharded, wholes = spread_everywhere()
    use_torch_collectives()
    try:
        gathered = gather_state_dict(sharded, ranks_only=wanted)
    finally:
        use_torch_collectives(False)
    assert_same_tree(gathered, wholes if not wanted or dist.get_rank() in wanted else {})


@pytest.mark.parametrize("wanted", [(0,), [1, 3]])
@on_ranks(4)
def test_every_placement_is_gathered_for_some(wanted: Sequence[int]) -> None:
    sharded, wholes = spread_everywhere()
    result = gather_state_dict(sharded, ranks_only=wanted)
    assert_same_tree(result, wholes if dist.get_rank() in wanted else {})


@on_ranks(4)
def test_a_mesh_may_reach_beyond_the_group() -> None:
    tree = [spread(counting(7), mesh_of(4), [Shard(0)])]
    result = gather_state_dict(tree, pg=mesh_of(2, 2).get_group(1), ranks_only=(1,))
    assert_same_tree(result, [counting(7)] if dist.get_rank() % 2 else [])


@on_ranks(4)
def test_sums_of_parts_are_summed_and_joined() -> None:
    whole = counting(7, 5, dtype=torch.int64)
    for mesh in (mesh_of(2, 2), DeviceMesh("cpu", [[3, 1], [0, 2]])):
        rows = spread(whole, mesh, [Replicate(), Shard(0)]).to_local()
        place, _ = mesh.get_coordinate() or (0, 0)
        summand = 3 * rows if place else -2 * rows
        tensor = DTensor.from_local(
            summand, mesh, [Partial(), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        assert_same_tree(gather_state_dict([tensor]), [whole])


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch does not create such a DTensor")
@on_ranks(2)
def test_parts_that_are_interleaved_otherwise_are_refused() -> None:
    tensor = spread(counting(8), mesh_of(2), [_StridedShard(0, split_factor=2)])
    message = r"^0: .*_StridedShard.* interleaves other parts than those of the mesh dimensions behind it"
    with pytest.raises(ValueError, match=message):
        gather_state_dict([tensor])
    with pytest.raises(CompanionMismatch, match=message):
        distribute_state_dict([counting(8)], [tensor], "cpu")


@on_ranks(3)
def test_what_was_gathered_has_memory_of_its_own_and_no_more_than_it_needs() -> None:
    sharded, _ = spread_everywhere()
    for name, tree in gather_state_dict(sharded).items():
        for key, tensor in tree.items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, (name, key)
            assert not tensor.requires_grad


def test_plain_tensors_share_memory_with_the_result() -> None:
    weight = torch.nn.Parameter(counting(3))
    gathered = gather_state_dict({"weight": weight})["weight"]
    assert gathered.data_ptr() == weight.data_ptr()
    assert not gathered.requires_grad


# Who gets it


@on_ranks(4)
def test_ranks_are_counted_in_the_group() -> None:
    mesh = mesh_of(2, 2)
    pair = mesh.get_group(1)  # ranks 0 and 1, 2 and 3
    tree = [spread(counting(5), mesh, [Replicate(), Shard(0)])]
    result = gather_state_dict(tree, pg=pair, ranks_only=(1,))
    assert_same_tree(result, [counting(5)] if dist.get_rank() % 2 else [])


@pytest.mark.parametrize(("tree", "nothing"), [(OrderedDict(a=1), OrderedDict()), ([1], []), ((1,), ()), (1, None)])
@on_ranks(2)
def test_others_get_an_empty_container(tree: Any, nothing: Any) -> None:
    assert_same_tree(gather_state_dict(tree, ranks_only=(0,)), nothing if dist.get_rank() else tree)


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_may_leave_the_result_to_others() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    tree = {"weight": spread(counting(5), mesh, [Shard(0)]) if dist.get_rank() < 2 else _of_others(mesh)}
    assert_same_tree(gather_state_dict(tree, ranks_only=(1,)), {"weight": counting(5)} if dist.get_rank() == 1 else {})
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match=r"^weight: a DTensor on a mesh that this rank is not in"):
            gather_state_dict(tree)
    else:
        gather_state_dict(tree)


def _of_others(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))


# Where it goes


@pytest.mark.parametrize("options", [{"cpu_offload": True}, {"device": "cpu"}, {"device": "cpu", "cpu_offload": True}])
@on_ranks(2)
def test_the_result_may_go_to_the_host(options: dict[str, Any]) -> None:
    assert_same_tree(gather_state_dict([spread(counting(5), mesh_of(2), [Shard(0)])], **options), [counting(5)])


@on_ranks(2)
def test_a_result_may_go_to_any_device() -> None:
    # The meta device stands for one that is not there.
    weight, plain = gather_state_dict([spread(counting(5), mesh_of(2), [Shard(0)]), counting(2)], device="meta")
    assert weight.is_meta
    assert weight.shape == (5,)
    assert plain.is_meta


# Memory


@parametrize_pairs(rows=[72, 73], dim=[0, 1])
@on_ranks(3)
def test_ranks_hold_their_result_and_at_most_one_tensor_more(rows: int, dim: int) -> None:
    mesh = mesh_of(3)
    whole = counting(rows, rows)
    tree = [spread(whole, mesh, [Shard(dim)]) for _ in range(8)]
    gathers = Peak()
    with gathers:
        gather_state_dict(tree, ranks_only=(0,))
    # Rows are received in their place. Of columns those of other ranks are received beside it.
    beside = whole.nbytes if dim else 0
    result = len(tree) * whole.nbytes if dist.get_rank() == 0 else 0
    allowed = result + beside if dist.get_rank() == 0 else 0
    # Much less than a part: torch keeps a mesh's ranks, and before the gather each rank hears a header from each.
    slack = 128 + 512 * dist.get_world_size()
    assert slack < whole.nbytes // dist.get_world_size() // 2
    assert result <= gathers.bytes <= allowed + slack


# What cannot be gathered


class Custom:
    """A type that no one knows."""

    def __init__(self) -> None:
        self.tensor = counting(2)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_a_bad_leaf_on_one_rank_is_an_error_on_all_ranks_of_the_mesh(shape: tuple[int, ...]) -> None:
    sharded = spread(counting(5), mesh_of(*shape), [Shard(0)] * len(shape))
    for leaf, error, message in (
        (Custom(), TypeError, r"leaf: a Custom is neither"),
        (torch.empty(2, device="meta"), ValueError, r"leaf: on the meta device"),
        (torch.eye(2).to_sparse_csr(), TypeError, r"leaf: a tensor of layout torch.sparse_csr"),
    ):
        # The last rank of a mesh of two dimensions shares a group with two of the others only.
        tree = {"weight": sharded, "leaf": leaf if dist.get_rank() == 3 else None}
        with fails_on([3], error, message):
            gather_state_dict(tree)
    assert_same_tree(gather_state_dict({"weight": sharded})["weight"], counting(5))


@on_ranks(2)
def test_ranks_that_gather_differently_are_told() -> None:
    mesh, rank = DeviceMesh("cpu", [0, 1]), dist.get_rank()
    one, other = (DTensor.from_local(torch.ones(rows), mesh, [Shard(0)]) for rows in (2, 3))
    message = r"gather different DTensors, or to different ranks.* are \(.*\) and .* here, and \(.*\) and .* on another"
    for tree, ranks_only in (({"w": one}, [rank]), ([one, other][: 1 + rank], []), ([one, other][:: 1 - 2 * rank], [])):
        with pytest.raises(ValueError, match=message):
            gather_state_dict(tree, ranks_only=ranks_only)


def test_options_that_exclude_each_other_or_name_no_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cpu_offload=True and device='meta' exclude each other"):
        gather_state_dict({}, cpu_offload=True, device="meta")
    with pytest.raises(ValueError, match=r"ranks_only=\(1,\): there is no rank 1, only 0 to 0"):
        gather_state_dict({}, ranks_only=(1,))
    with pytest.raises(TypeError, match=r"pg must be a process group that this rank is in, got 5"):
        gather_state_dict({}, pg=5)  # type: ignore[arg-type]
