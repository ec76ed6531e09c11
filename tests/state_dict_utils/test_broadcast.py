"""Broadcasting a state tree: rank 0 has the whole values, and every rank's tree takes its part of them."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp.distributed.collectives import DirectExchange
from fsdp.state_dict_utils import CompanionMismatch, broadcast_state_dict, gather_state_dict
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.state_trees import (
    Moments,
    Peak,
    assert_same_tree,
    blank,
    counting,
    fails_on,
    mesh_of,
    partial_sums,
    plain_tree,
    spread,
    spread_everywhere,
    tensors_in,
)

CPU = torch.device("cpu")


class Custom:
    """A type that no one knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    def __hash__(self) -> int:
        return 0


def from_rank_0(tree: Any) -> Any:
    """What each rank passes as the full tree: only rank 0's is looked at."""
    return tree if dist.get_rank() == 0 else {"nobody": Custom()}


# What arrives


@pytest.mark.parametrize(("world_size", "budget"), [(3, 0), (4, 100)])
@on_ranks("world_size")
def test_each_rank_takes_its_part_bit_for_bit(budget: int) -> None:
    sharded, wholes = spread_everywhere()
    local = {"model": blank(sharded), "plain": {}}
    kept = tensors_in(local["model"])
    full = {"model": wholes, "plain": plain_tree()}
    result = broadcast_state_dict(from_rank_0(full), local, CPU, max_coalesced_bytes=budget)
    assert result is local
    assert_same_tree(local, {"model": sharded, "plain": plain_tree()})
    assert all(one is two for one, two in zip(kept, tensors_in(local["model"]), strict=True))
    if dist.get_rank() == 0:
        assert_same_tree(full, {"model": spread_everywhere()[1], "plain": plain_tree()})


@parametrize_pairs(budget=[0, 1 << 20], world_size=[1, 3])
@on_ranks("world_size")
def test_an_empty_tree_is_filled_with_memory_of_its_own(budget: int) -> None:
    full = plain_tree()
    full["model"]["columns"] = counting(3, 4).t()
    local: dict[str, Any] = {}
    broadcast_state_dict(from_rank_0(full), local, CPU, max_coalesced_bytes=budget)
    assert_same_tree(local, full)
    for key, tensor in local["model"].items():
        tensor.zero_()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, key
    assert_same_tree(full["model"]["weight"], counting(2, 3))


@on_ranks(2)
def test_tensors_keep_memory_and_dtype_and_other_leaves_are_replaced() -> None:
    weight, half = nn.Parameter(torch.zeros(2, 3)), torch.zeros(3, dtype=torch.bfloat16)
    columns = torch.zeros(3, 2).t()
    local = OrderedDict(weight=weight, half=half, columns=columns, step=0, pair=(half, None), file=io.BytesIO())
    full = {
        "weight": counting(2, 3),
        "half": counting(3),
        "columns": counting(2, 3),
        "step": 7.5,
        "pair": (-counting(3), "x"),
        "file": io.BytesIO(b"new"),
    }
    assert broadcast_state_dict(from_rank_0(full), local, CPU) is local
    assert local["weight"] is weight
    assert_same_tree(weight.data, counting(2, 3))
    assert_same_tree(columns, counting(2, 3).t().contiguous().t())
    assert_same_tree(local["pair"], (half, "x"))
    assert local["pair"][0] is half
    assert_same_tree(half, -counting(3, dtype=torch.bfloat16))
    assert_same_tree([local["step"], local["file"]], [7.5, io.BytesIO(b"new")])


@on_ranks(2)
def test_a_tuple_at_the_root_is_returned() -> None:
    target = torch.zeros(3)
    result = broadcast_state_dict(from_rank_0(Moments(counting(3), 5)), Moments(target, None), CPU)
    assert_same_tree(result, Moments(counting(3), 5))
    assert result.first is target


@on_ranks(4)
def test_only_ranks_of_the_group_take_part() -> None:
    pair = mesh_of(2, 2).get_group(1)
    first = dist.get_rank() // 2 * 2
    local: dict[str, Any] = {}
    broadcast_state_dict({"rank": torch.tensor(dist.get_rank())}, local, CPU, pair)
    assert local["rank"].item() == first


@pytest.mark.parametrize("on_meta", [False, True])
@on_ranks(3)
def test_a_model_of_another_library_is_loaded_and_saved(on_meta: bool) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
        plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).to_empty(device="cpu")
    for tensor in plain.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape) * 100)
    fully_shard(model, mesh=mesh_of(3))
    local = model.state_dict()
    broadcast_state_dict(from_rank_0(plain.state_dict()), local, CPU, strict=True, max_coalesced_bytes=100)
    if on_meta:
        model.load_state_dict(local, assign=True)
    assert_same_tree(gather_state_dict(model.state_dict()), plain.state_dict())
    inputs = torch.rand(4, 5)
    torch.testing.assert_close(model(inputs), plain(inputs))


# Places without values


@on_ranks(1, 3)
def test_targets_on_the_meta_device_are_materialised() -> None:
    sharded, wholes = spread_everywhere()
    local: dict[str, Any] = blank(sharded, lambda tensor: torch.empty_like(tensor, device="meta"))
    local["plain"] = {
        "half": torch.empty(3, dtype=torch.bfloat16, device="meta"),
        "same": torch.empty(2, device="meta"),
    }
    full = {**wholes, "plain": {"half": counting(3), "same": counting(2)}}
    broadcast_state_dict(from_rank_0(full), local, CPU, strict=True, cpu_offload=True)
    assert_same_tree(local.pop("plain"), {"half": counting(3, dtype=torch.bfloat16), "same": counting(2)})
    assert_same_tree(local, sharded)


@on_ranks(2)
def test_none_is_a_place_for_anything() -> None:
    local = {"step": None, "state": [None]}
    broadcast_state_dict(from_rank_0({"step": torch.tensor(1), "state": [{"a": [1]}]}), local, CPU, strict=True)
    assert_same_tree(local, {"step": torch.tensor(1), "state": [{"a": [1]}]})


# Memory and messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_tensors_of_the_same_dtype_are_received_in_place(ranks: RankPool, dtype: torch.dtype) -> None:
    grown = ranks(2).run(_weigh_receiving, dtype)[1]
    assert grown == 0 if dtype == torch.float32 else grown == 1


def _weigh_receiving(dtype: torch.dtype) -> float:
    whole = counting(100, 100)
    local = [torch.zeros(100, 100, dtype=dtype) for _ in range(3)]
    peak = Peak()
    with peak:
        broadcast_state_dict(from_rank_0([whole] * 3), local, CPU)
    assert_same_tree(local[2], whole.to(dtype))
    return peak.bytes // whole.nbytes


@pytest.mark.parametrize(("budget", "held"), [(0, 1), (85_000, 2), (10, 1)])
def test_beside_the_result_there_is_one_tensor_or_the_budget(ranks: RankPool, budget: int, held: int) -> None:
    assert ranks(2).run(_weigh_sharding, budget)[1] == held


def _weigh_sharding(budget: int) -> int:
    whole = counting(100, 100)
    local = [spread(torch.zeros(100, 100), mesh_of(2), [Shard(1)]) for _ in range(4)]
    peak = Peak()
    with peak:
        broadcast_state_dict(from_rank_0([whole] * 4), local, CPU, max_coalesced_bytes=budget)
    assert_same_tree(local[3].full_tensor(), whole)
    return peak.bytes // whole.nbytes


@pytest.mark.parametrize(("budget", "messages"), [(0, 6), (31, 6), (32, 3), (64, 2), (1000, 1)])
@on_ranks(2)
def test_neighbours_share_a_message_within_the_budget(budget: int, messages: int) -> None:
    full = [counting(3) for _ in range(6)]  # 12 bytes each, 16 in a buffer
    local = [torch.zeros(3) for _ in range(6)]
    with mock.patch.object(DirectExchange, "broadcast", autospec=True, side_effect=DirectExchange.broadcast) as sent:
        broadcast_state_dict(from_rank_0(full), local, CPU, max_coalesced_bytes=budget)
    assert_same_tree(local, full)
    assert sent.call_count == messages  # the description goes the way of all short messages


# Trees that do not fit


WRONG: list[tuple[Any, str]] = [
    ({"b": counting(3)}, r"^b: .*tensor \[2\] of float32 and tensor \[3\] of float32"),
    ({"b": [3]}, r"^b: .*tensor \[2\] of float32 in the full tree, list in the local one"),
    ({"b": counting(2), "c": Custom()}, r"c: a Custom is neither a container"),
]


@on_ranks(3)
def test_a_tree_that_does_not_fit_on_one_rank_is_an_error_on_all() -> None:
    for wrong, message in WRONG:
        local = {"a": torch.zeros(2), **(wrong if dist.get_rank() == 2 else {"b": torch.zeros(2)})}
        error = TypeError if "Custom" in message else CompanionMismatch
        with fails_on([2], error, message):
            broadcast_state_dict(from_rank_0({"a": counting(2), "b": counting(2)}), local, CPU)
        assert_same_tree(local["a"], torch.zeros(2))


@on_ranks(2)
def test_what_rank_0_cannot_send_is_an_error_on_all() -> None:
    sharded = spread(counting(4), mesh_of(2), [Shard(0)])
    for leaf, error, message in (
        (sharded, TypeError, r"a\.0: a DTensor instead of an unsharded tensor: use gather"),
        (torch.empty(1, device="meta"), ValueError, r"a\.0: on the meta device"),
        (Custom(), TypeError, r"a\.0: a Custom is neither a container"),
    ):
        local: dict[str, Any] = {}
        with fails_on([0], error, message):
            broadcast_state_dict(from_rank_0({"a": [leaf]}), local, CPU)
        assert local == {}


@on_ranks(3)
def test_parts_of_sums_and_parts_of_odd_sizes_cannot_be_written() -> None:
    with pytest.raises(CompanionMismatch, match=r"^0: .*a whole value cannot be divided into Partial"):
        broadcast_state_dict(from_rank_0([counting(4)]), [partial_sums(counting(4))], CPU)
    size = dist.get_rank() + 1
    odd = DTensor.from_local(torch.zeros(size), mesh_of(3), [Shard(0)], shape=torch.Size([6]), stride=(1,))
    with fails_on([0, 2], CompanionMismatch, r"^0: .*local part is \[[13]\], and .* of \[6\] makes it \[2\]"):
        broadcast_state_dict(from_rank_0([counting(6)]), [odd], CPU)


@on_ranks(2)
def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device='meta': the group sends tensors on cpu"):
        broadcast_state_dict({}, {}, "meta")
    with pytest.raises(ValueError, match=r"max_coalesced_bytes is a number of bytes, got -1"):
        broadcast_state_dict({}, {}, CPU, max_coalesced_bytes=-1)
    with pytest.raises(TypeError, match=r"pg must be a process group that this rank is in, got -100"):
        broadcast_state_dict({}, {}, CPU, -100)  # type: ignore[arg-type]
