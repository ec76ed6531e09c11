"""Plans place every row of every tensor in a single bucket, and every element in the part of a single rank."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch import Tensor

from fsdp.checkpoint.model_tensors import Held
from fsdp.engine.boxes import Box
from fsdp.engine.layout import ContiguousLayout
from fsdp.weights.plan import PlannedTensor, WeightPlan, chosen, groups_of, in_buckets, shares


def tensors_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[PlannedTensor]:
    return [PlannedTensor((f"t{number}",), dtype, torch.Size(shape)) for number, shape in enumerate(shapes)]


def flat_parts(tensors: list[PlannedTensor], world_size: int) -> tuple[dict[int, Held], ...]:
    """The parts of ranks that have a flat parameter of all tensors."""
    layout = ContiguousLayout.of([(each.name, each.shape) for each in tensors], world_size)
    return tuple(
        {
            each.slot: Held(Box((0,) * len(shape), tuple(shape)), each.start, each.stop, each.offset)
            for each in layout.intervals(rank)
            for shape in [tensors[each.slot].shape]
        }
        for rank in range(world_size)
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_bucket_and_in_one_part(seed: int) -> None:
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int8]
    shapes = [tuple(rng.randrange(5) for _ in range(rng.randrange(4))) for _ in range(rng.randrange(1, 20))]
    tensors = [
        PlannedTensor((f"t{number}",), rng.choice(dtypes), torch.Size(shape)) for number, shape in enumerate(shapes)
    ]
    bucket_bytes = rng.choice([200, 256, 1000, 10_000])
    buckets = in_buckets(tensors, bucket_bytes, [])
    plan = WeightPlan(tuple(tensors), buckets, flat_parts(tensors, rng.randrange(1, 5)))
    counts = [torch.zeros(each.sizes, dtype=torch.int32) for each in tensors]
    for number, nbytes in enumerate(plan.bucket_nbytes):
        assert nbytes <= bucket_bytes
        used = torch.zeros(nbytes, dtype=torch.uint8)
        for piece in buckets[number]:
            memory = plan.view(piece, used).view(-1).view(torch.uint8)
            assert not memory.any()
            memory.fill_(1)
        for part in plan.parts:
            end = 0
            for run in plan.runs(number, part):
                assert run.packed >= end
                end = run.packed + run.box.numel * plan.dtype_of(run).itemsize
                box = run.box.moved((run.piece.first, *(0 for _ in run.box.sizes[1:])))
                counts[run.piece.tensor][
                    tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                ] += 1
    assert all(bool((each == 1).all()) for each in counts)
    assert WeightPlan.from_json(json.loads(json.dumps(plan.to_json()))).buckets == buckets


def test_packed_parts_are_unpacked_to_the_bucket() -> None:
    tensors = tensors_of((5, 3), (4,), (2, 2, 3))
    plan = WeightPlan(tuple(tensors), in_buckets(tensors, 64, []), flat_parts(tensors, 3))
    for number, nbytes in enumerate(plan.bucket_nbytes):
        bucket = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        found: Tensor = torch.zeros_like(bucket)
        for part in plan.parts:
            runs = plan.runs(number, part)
            packed = torch.zeros(plan.packed_nbytes(runs), dtype=torch.uint8)
            plan.pack(runs, bucket, packed)
            plan.unpack(runs, packed, found)
        for piece in plan.buckets[number]:
            assert torch.equal(plan.view(piece, found).view(torch.uint8), plan.view(piece, bucket).view(torch.uint8))


def test_the_order_of_the_model_is_kept_unless_it_needs_more_buckets() -> None:
    tensors = tensors_of((4, 4), (2, 4), (4, 4), (2, 4))
    order = [[piece.tensor for piece in bucket] for bucket in in_buckets(tensors, 96, [])]
    assert order == [[0, 1], [2, 3]]
    tensors = tensors_of((1, 8), (1, 8), (3, 8), (3, 8))
    assert len(in_buckets(tensors, 128, [])) == 2  # each small tensor beside a large tensor


def test_all_ranks_have_parts_of_a_bucket_as_large_as_a_unit() -> None:
    tensors = tensors_of(*[(8, 8), (8,)] * 3)
    plan = WeightPlan(tuple(tensors), in_buckets(tensors, 3 * 9 * 8 * 4, []), flat_parts(tensors, 3))
    assert len(plan.buckets) == 1
    assert all(plan.runs(0, part) for part in plan.parts)


def test_rows_that_do_not_fit_are_in_other_buckets() -> None:
    [tensor] = tensors_of((10, 4))
    buckets = in_buckets([tensor], 50, [])
    assert [(piece.first, piece.rows) for [piece] in buckets] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    with pytest.raises(ValueError, match="smaller than a row of t0, which has 16 bytes"):
        in_buckets([tensor], 15, [])


@pytest.mark.parametrize("wanted", [Box((0, 0), (6, 5)), Box((2, 1), (3, 2)), Box((5, 4), (1, 1)), Box((3, 0), (0, 5))])
def test_shares_of_all_ranks_are_the_requested_box(wanted: Box) -> None:
    [tensor] = tensors_of((6, 5))
    values = torch.arange(30.0)
    count = 0
    for rank, part in enumerate(flat_parts([tensor], 4)):
        for share in shares(tensor, part.get(0), wanted):
            found = share.of_vector(values[rank * 8 :])
            box = tuple(slice(at, at + size) for at, size in zip(share.common.offsets, share.common.sizes, strict=True))
            assert torch.equal(found, values.view(6, 5)[box])
            count += share.common.numel
    assert count == math.prod(wanted.sizes)


def test_names_are_matched_with_the_same_text() -> None:
    names = [["a.0.q.weight"], ["a.0.k.weight"], ["a.1.q.weight"], ["a.1.k.weight", "tied"], ["b"]]
    assert groups_of(names, [["a.*.q.weight", "a.*.k.weight"]]) == [[0, 1], [2, 3]]
    assert groups_of(names, [["tied", "b"]]) == [[3, 4]]
    assert chosen(names, ["a.1"]) == [2, 3]
    assert chosen(names, ["*.q.*", "tied"]) == [0, 2, 3]
    assert chosen(names, None) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"tensors": [[["a"], "F33", [2]]]}, {"buckets": [[["x"]]]}, {"parts": 3}])
def test_a_plan_that_is_not_valid_is_an_error(change: dict[str, object]) -> None:
    tensors = tensors_of((2, 2))
    plan = WeightPlan(tuple(tensors), in_buckets(tensors, 64, []), flat_parts(tensors, 1))
    with pytest.raises(ValueError, match="the sender's plan is not valid"):
        WeightPlan.from_json({**plan.to_json(), **change})
