"""The part of communication that lies beside computation: the arithmetic of intervals, and traces of known figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap import Interval, Overlap, length, measured, overlap

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(found: list[Interval]) -> set[int]:
    """The unit intervals that a set of intervals with whole borders contains."""
    return {point for start, stop in found for point in range(int(start), int(stop))}


@given(intervals, intervals)
def test_intervals_are_sets_of_points(one: list[Interval], other: list[Interval]) -> None:
    assert length(one) == len(points(one))
    part = overlap(one, other)
    assert part == (pytest.approx(len(points(one) & points(other)) / len(points(one))) if points(one) else None)


def kernel(name: str, start: float, stop: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start}


def test_kernels_of_nccl_are_communication() -> None:
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    reduction = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        kernel(gather, 0, 10),  # computes from 6 on
        kernel("ampere_sgemm_128x64_tn", 6, 12),
        kernel("void at::native::vectorized_elementwise_kernel<4>", 11, 20),
        kernel(gather, 14, 18),  # hidden
        kernel(reduction, 18, 30),  # computes until 20
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 30, 34),  # not hidden
        # Not on the device: what queues it, and its name on the timeline.
        kernel("nccl:_all_gather_base", 0, 40, "user_annotation"),
        kernel("nccl:_all_gather_base", 0, 40, "gpu_user_annotation"),
        kernel("aten::mm", 0, 40, "cpu_op"),
        {"ph": "i", "cat": "kernel", "name": gather, "ts": 50},
    ]
    assert measured(events, steps=2) == Overlap(
        gathers=7.0,
        gathers_beside=pytest.approx(8 / 14),
        reductions=8.0,
        communication=15.0,
        communication_beside=pytest.approx(10 / 30),
        computation=7.0,
        step=17.0,
    )


def test_messages_of_gloo_are_communication_of_a_cpu() -> None:
    events = [
        kernel("gloo:all_gather", 0, 4, "user_annotation"),
        kernel("gloo:recv", 8, 12, "user_annotation"),
        kernel("gloo:all_reduce", 20, 22, "user_annotation"),
        kernel("FSDP::all_gather (layers.3)", 0, 40, "user_annotation"),
        kernel("aten::addmm", 2, 10, "cpu_op"),
        kernel("aten::copy_", 10, 40, "cpu_op"),
    ]
    assert measured(events, steps=1) == Overlap(4.0, 0.5, 2.0, 10.0, pytest.approx(0.4), 8.0, 22.0)


def test_a_trace_without_communication_has_no_part_of_it() -> None:
    found = measured([kernel("sgemm", 0, 3)], steps=1)
    assert (found.gathers_beside, found.communication_beside, found.computation) == (None, None, 3.0)
    assert measured([], steps=1).step == 0
