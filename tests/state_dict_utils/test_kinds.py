"""Leaves of all kinds: what is no dense tensor is refused with its path, or carried along whole, in every function."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp.state_dict_utils import (
    CompanionMismatch,
    broadcast_state_dict,
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    distribute_state_dict,
    flatten_state_dict,
    gather_state_dict,
    offload_state_dict_to_cpu,
    unflatten_state_dict,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.state_trees import counting, fails_on, mesh_of, spread

CPU = "cpu"
# Of torch, about kinds of tensors that it made and does not promise to keep.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in (
        "torch.quantize_per_tensor",
        "TypedStorage is deprecated",
        "Sparse CSR tensor support",
        "The PyTorch API of nested tensors",
    )
]


def quantised(scale: float, zero_point: int = 3, dtype: torch.dtype = torch.qint8) -> Tensor:
    return torch.quantize_per_tensor(counting(2, 3) / 10, scale, zero_point, dtype)


def per_channel() -> Tensor:
    return torch.quantize_per_channel(counting(2, 3), torch.tensor([0.1, 0.5]), torch.tensor([0, 1]), 0, torch.qint8)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([counting(2, 3), counting(1, 3)], layout=torch.jagged)


SPECIAL: dict[str, Callable[[], Tensor]] = {
    "COO": lambda: torch.diag(counting(2)).to_sparse(),
    "CSR": lambda: torch.diag(counting(2)).to_sparse_csr(),
    "CSC": lambda: torch.diag(counting(2)).to_sparse_csc(),
    "BSR": lambda: torch.diag(counting(2)).to_sparse_bsr(1),
    "quantised": lambda: quantised(0.1),
    "of another scale": lambda: quantised(0.5),
    "unsigned": lambda: quantised(0.1, dtype=torch.quint8),
    "per channel": per_channel,
    "nested": lambda: torch.nested.nested_tensor([counting(2), counting(1)]),
    "jagged": jagged,
    "wrapper": lambda: TwoTensor(counting(2), -counting(2)),
    "of few bits": lambda: torch.ones(3, dtype=torch.uint8).view(torch.uint4),
}
OBJECTS: dict[str, Callable[[], Any]] = {
    "storage": lambda: counting(3).untyped_storage(),
    "generator": lambda: torch.Generator().manual_seed(3),
    "dtype": lambda: torch.float32,
    "set": lambda: {1, 2},
}
UNKNOWN = {**SPECIAL, **OBJECTS}
NOT_SENT = "of few bits", "storage"  # torch.save has no way for them
PLAIN: dict[str, Callable[[], Any]] = {
    "tensor": lambda: counting(2, 3),
    "another tensor": lambda: -counting(2, 3),
    "of another shape": lambda: counting(2),
    "of another dtype": lambda: counting(2, 3).to(torch.float64),
    "counts": lambda: counting(2, 3).to(torch.int64),
    "dense": lambda: torch.diag(counting(2)),
    "None": lambda: None,
    "number": lambda: 7,
    "text": lambda: "text",
    "file in memory": lambda: io.BytesIO(b"file"),
}
IMPOSSIBLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "file": lambda: open(__file__, "rb"),  # noqa: SIM115
    "closed file in memory": lambda: _closed(),
    "freed": lambda: freed(),
    "lazy": lambda: torch.empty(2, 3, device="meta"),
}
NO_TARGET: dict[str, Callable[[], Any]] = {"expanded": lambda: torch.zeros(3).expand(2, 3), "freed": lambda: freed()}


def _closed() -> io.BytesIO:
    file = io.BytesIO(b"x")
    file.close()
    return file


def freed() -> Tensor:
    tensor = counting(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def bits(leaf: Any) -> Any:
    """What tells leaves apart: kind and values of all kinds."""
    if isinstance(leaf, TwoTensor):
        return "wrapper", bits(leaf.a), bits(leaf.b)
    if isinstance(leaf, DTensor):
        return "DTensor", leaf.placements, bits(leaf.to_local())
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return leaf.layout, [bits(part) for part in leaf.unbind()]
    if isinstance(leaf, Tensor) and leaf.is_quantized:
        return leaf.dtype, leaf.dequantize().tolist(), str(leaf.qscheme())
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        return leaf.layout, leaf.to_dense().tolist()
    if isinstance(leaf, Tensor) and (leaf.is_meta or leaf.untyped_storage().nbytes() == 0):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.contiguous().view(torch.uint8).tolist()
    if isinstance(leaf, torch.UntypedStorage):
        return "storage", leaf.tolist()
    if isinstance(leaf, torch.Generator):
        return "generator", leaf.get_state().tolist()
    if isinstance(leaf, io.BytesIO):
        return "closed" if leaf.closed else leaf.getvalue()
    return type(leaf), leaf if isinstance(leaf, (int, str, set)) else None


def snapshot(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    return [snapshot(value) for value in tree] if isinstance(tree, list) else bits(tree)


# One leaf


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_leaves_are_refused_with_their_path_and_nothing_is_changed(name: str) -> None:
    leaf = UNKNOWN[name]()
    into: list[Any] = [torch.zeros(2), None]
    for call in (
        gather_state_dict,
        offload_state_dict_to_cpu,
        create_cpu_state_dict,
        flatten_state_dict,
        lambda tree: copy_state_dict(tree, into),
        lambda tree: copy_state_dict(into, tree),
        lambda tree: check_state_dict_similarity(tree, into),
        lambda tree: broadcast_state_dict(tree, into, CPU),
        lambda tree: distribute_state_dict(tree, into, CPU),
        lambda tree: distribute_state_dict(into, tree, CPU),
    ):
        tree = [counting(2), leaf]
        with pytest.raises(TypeError, match=r"1: .*[Rr]emove it from the tree.*type_check=False"):
            call(tree)
        assert snapshot([tree, into]) == snapshot([[counting(2), leaf], [torch.zeros(2), None]])


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_leaves_are_carried_along_by_every_function(name: str) -> None:
    leaf = UNKNOWN[name]()
    tree = [counting(2), leaf]
    calls: list[Callable[[], Any]] = [
        lambda: gather_state_dict(tree, type_check=False),
        lambda: offload_state_dict_to_cpu(tree, type_check=False),
        lambda: create_cpu_state_dict(tree, type_check=False),
        lambda: copy_state_dict(tree, [torch.zeros(2), UNKNOWN[name]()], type_check=False),
        lambda: distribute_state_dict(tree, [torch.zeros(2), None], CPU, type_check=False),
        lambda: unflatten_state_dict(*flatten_state_dict(tree, type_check=False)),
    ]
    if name not in NOT_SENT:
        calls += [
            lambda: broadcast_state_dict(tree, [torch.zeros(2), UNKNOWN[name]()], CPU, type_check=False),
            lambda: broadcast_state_dict(tree, [torch.zeros(2), None], CPU, type_check=False, max_coalesced_bytes=64),
        ]
    for call in calls:
        carried = call()
        assert bits(carried[1]) == bits(leaf)
        assert check_state_dict_similarity(tree, carried, type_check=False)
    assert snapshot(tree) == snapshot([counting(2), leaf])


def test_quantised_values_arrive_in_targets_of_another_scale() -> None:
    for write in (copy_state_dict, lambda full, local, **checks: distribute_state_dict(full, local, CPU, **checks)):
        for target in (quantised(0.5), quantised(0.1, -20), None):
            into = write([quantised(0.1)], [target], type_check=False) if target is not None else [quantised(0.1)]
            assert torch.equal(into[0].dequantize(), quantised(0.1).dequantize())


def test_tensors_of_different_layouts_are_different() -> None:
    kinds = ["COO", "CSR", "CSC", "BSR"]
    tensors = [torch.diag(counting(2)), *(SPECIAL[kind]() for kind in kinds)]
    for number, first in enumerate(tensors):
        for other, second in enumerate(tensors):
            assert check_state_dict_similarity([first], [second], type_check=False) == (number == other)
    with pytest.raises(CompanionMismatch, match=r"^0: tensor of layout torch.sparse_coo \[2, 2\] of float32 and te"):
        copy_state_dict([tensors[1]], [tensors[0]], type_check=False)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_copied_changes_nothing(name: str) -> None:
    into: dict[str, Any] = {"a": torch.zeros(2), "b": None}
    if name in ("freed", "lazy"):
        into["b"] = torch.zeros(2, 3)
    before = snapshot(into)
    for write in (
        copy_state_dict,
        lambda full, local, **checks: distribute_state_dict(full, local, CPU, **checks),
        lambda full, local, **checks: broadcast_state_dict(full, local, CPU, **checks),
    ):
        with pytest.raises((TypeError, ValueError), match="b: "):
            write({"a": counting(2), "b": IMPOSSIBLE[name]()}, into, type_check=False)
        assert snapshot(into) == before


@pytest.mark.parametrize("name", NO_TARGET)
def test_what_cannot_be_written_changes_nothing(name: str) -> None:
    into = {"a": torch.zeros(2), "b": NO_TARGET[name]()}
    before = snapshot(into)
    for write in (
        copy_state_dict,
        lambda full, local: distribute_state_dict(full, local, CPU),
        lambda full, local: broadcast_state_dict(full, local, CPU),
    ):
        with pytest.raises(CompanionMismatch, match=r"^b: .*(clone\(\) it|its memory was freed)"):
            write({"a": counting(2), "b": counting(2, 3)}, into)
        assert snapshot(into) == before


# Trees of all kinds

ALL = {**PLAIN, **UNKNOWN, **IMPOSSIBLE, **NO_TARGET}
KEYS = st.sampled_from("abc")
LEAVES = st.sampled_from(sorted(ALL)).map(lambda name: ALL[name]())
TREES = st.recursive(
    LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=2), max_leaves=6
)
WRITERS: list[Callable[..., Any]] = [
    copy_state_dict,
    lambda full, local, **checks: distribute_state_dict(full, local, CPU, **checks),
    lambda full, local, **checks: broadcast_state_dict(full, local, CPU, **checks),
]


@settings(max_examples=100, deadline=None)
@example(ALL["storage"](), ALL["storage"](), WRITERS[2], False)  # which torch.load makes another class of
@given(TREES, TREES, st.sampled_from(WRITERS), st.booleans())
def test_any_tree_is_written_whole_or_refused_with_nothing_changed(
    full: Any, other: Any, write: Callable[..., Any], type_check: bool
) -> None:
    for local in (other, full):
        tree = {"first": counting(2), "full": full}
        into = {"first": torch.zeros(2), "full": local}
        before = snapshot(into)
        try:
            write(tree, into, type_check=type_check)
        except (TypeError, ValueError) as error:
            problem = str(error)
            assert snapshot(into) == before
        else:
            problem = "full"
            assert snapshot(into["first"]) == snapshot(counting(2))
            _assert_holds(into["full"], full)
        assert "full" in problem, "the path is named"


def _assert_holds(written: Any, full: Any) -> None:
    """All values of a tree are in another one, which may have casts, and keys of its own."""
    if isinstance(full, dict):
        for key, value in full.items():
            _assert_holds(written[key], value)
    elif isinstance(full, list):
        for one, other in zip(written, full, strict=True):
            _assert_holds(one, other)
    elif isinstance(full, Tensor) and full.dtype != written.dtype:
        assert torch.equal(written, full.to(written.dtype))
    else:
        assert bits(written) == bits(full)


@settings(max_examples=100, deadline=None)
@given(TREES, st.booleans())
def test_any_tree_is_carried_whole_or_refused(tree: Any, type_check: bool) -> None:
    before = snapshot(tree)
    for function in (
        gather_state_dict,
        offload_state_dict_to_cpu,
        create_cpu_state_dict,
        lambda tree, **checks: unflatten_state_dict(*flatten_state_dict([tree], **checks))[0],
    ):
        try:
            result = function(tree, type_check=type_check)
        except (TypeError, ValueError):
            pass
        else:
            assert check_state_dict_similarity(tree, result, type_check=type_check)
        assert snapshot(tree) == before


# On several ranks


@on_ranks(2)
def test_any_tree_arrives_on_every_rank_or_is_an_error_on_every_rank() -> None:
    count = 80
    mesh = mesh_of(2)
    outcomes = set()
    for seed in range(count):
        draws = random.Random(seed)
        choice = sorted(ALL if draws.random() < 0.5 else (PLAIN.keys() | UNKNOWN.keys()) - {*NOT_SENT})
        names = [draws.choice(choice) for _ in range(2)]
        local_names = [[draws.choice(choice) if draws.random() < 0.3 else name for name in names] for _ in "01"]
        full = {"first": counting(4), "rest": [ALL[name]() for name in names]}
        into = {
            "first": spread(torch.zeros(4), mesh, [Shard(0)]),
            "rest": [ALL[name]() for name in local_names[dist.get_rank()]],
        }
        before = snapshot(into)
        options: dict[str, Any] = {"type_check": draws.random() < 0.3}
        if is_broadcast := draws.random() < 0.6:
            options["max_coalesced_bytes"] = draws.choice([0, 256])
        else:
            options["pg"] = dist.group.WORLD
        problem = ""
        try:
            (broadcast_state_dict if is_broadcast else distribute_state_dict)(full, into, CPU, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = str(error)
            assert "rest." in problem, problem
            assert snapshot(into) == before, (seed, problem)
        else:
            assert into["first"].to_local().tolist() == counting(4)[dist.get_rank() * 2 :][:2].tolist()
        problems: list[str] = ["", ""]
        dist.all_gather_object(problems, problem)
        assert bool(problems[0]) == bool(problems[1]), (seed, names, local_names, problems)
        outcomes.add((is_broadcast, bool(problem)))
    assert len(outcomes) == 4


@on_ranks(2)
def test_a_dtensor_of_special_tensors_is_refused_on_every_rank() -> None:
    mesh = mesh_of(2)
    wrapper = DTensor.from_local(TwoTensor(counting(2), counting(2)), mesh, [Shard(0)], run_check=False)
    plain = DTensor.from_local(counting(2), mesh, [Replicate()], run_check=False)
    leaf = wrapper if dist.get_rank() == 1 else spread(counting(4), mesh, [Shard(0)])
    for type_check in (True, False):
        with fails_on([1], TypeError, r"1: a tensor of the class TwoTensor, which wraps other"):
            gather_state_dict([plain, leaf], type_check=type_check)
