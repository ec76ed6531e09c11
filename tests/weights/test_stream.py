"""`fsdp.stream_weights` delivers the plain model's weights, bit for bit, from any form and number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fsdp
from fsdp.checkpoint.model_tensors import SlotTensor
from fsdp.distributed.collectives import DirectExchange
from fsdp.weights import Sink, WeightPlan
from fsdp.weights import plan as plan_module
from fsdp.weights.assembly import Shards
from tests.helpers import tensor_parallel
from tests.helpers.equality import assert_same
from tests.helpers.forms import full_state, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import Counting, Traffic
from tests.helpers.weights import (
    MODELS,
    ON_PAIRS,
    Collected,
    Parts,
    everything,
    step,
    tensor_parallel_gpt,
    tensors_of,
)

BUCKET = 400  # bytes: more than any row, less than the largest tensor


@on_ranks("world_size")
@parametrize_pairs(world_size=[2, 3, 1, 4], form=list(MODELS))
def test_every_rank_receives_the_plain_models_weights(world_size: int, form: str) -> None:
    expected = tensors_of(everything(seed=1))
    model, sink, parts = MODELS[form](1), Collected(), Parts()
    plan = fsdp.stream_weights(model, sink, bucket_bytes=BUCKET, buffers=True)
    assert_same(sink.state, expected)
    assert sink.closed_with == [None]
    assert max(sink.buckets) <= BUCKET
    assert sum(sink.buckets) >= plan.nbytes
    fsdp.stream_weights(model, parts, bucket_bytes=BUCKET, buffers=True)
    assert_same(parts.whole(), expected)


@on_ranks(4)
@pytest.mark.parametrize("form", list(ON_PAIRS))
def test_replicas_send_and_receive_once(form: str) -> None:
    model, sink, parts = ON_PAIRS[form](1), Collected(), Parts()
    plan = fsdp.stream_weights(model, parts, bucket_bytes=BUCKET)
    expected = tensors_of(everything(seed=1), buffers=False)
    assert_same(parts.whole(), expected)
    sent = torch.tensor(sum(map(len, parts.parts)))
    dist.all_reduce(sent)
    assert plan.nbytes <= int(sent) < plan.nbytes + 64  # but for what aligns dtypes
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    assert_same(sink.state, expected)


@on_ranks(4)
def test_tensor_parallel_weights_are_sent_whole() -> None:
    model, sink, parts = tensor_parallel_gpt(seed=1), Collected(), Parts()
    expected = tensors_of(tensor_parallel.gpt(vocabulary=True, seed=1))
    fsdp.stream_weights(model, sink, bucket_bytes=1000)
    assert_same(sink.state, expected)
    fsdp.stream_weights(model, parts, bucket_bytes=1000)
    assert_same(parts.whole(), expected)


@on_ranks(2)
@pytest.mark.parametrize("form", ["flat", "orig", "rows", "zero 1", "mixed"])
def test_weights_are_those_after_the_last_step(form: str) -> None:
    model, sink = MODELS[form](1), Collected()
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    before = sink.state
    for _ in range(2):
        step(model)
        fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
        expected = full_state(model)
        assert_same(sink.state, {name: expected[name] for name in sink.state})
        assert not torch.equal(sink.state["wide"], before["wide"])
        before = sink.state


@on_ranks(3)
@pytest.mark.parametrize("receiver", [0, 2])
def test_one_rank_receives_with_an_exchange_for_each_bucket(receiver: int) -> None:
    model = MODELS["rows"](1)
    sink = Collected() if dist.get_rank() == receiver else None
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)  # which makes the plan
    traffic = Traffic()
    with Counting(traffic), counted_exchanges() as exchanges:
        plan = fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    assert len(exchanges) == len(plan.buckets) <= plan.nbytes / BUCKET * 1.5
    received = sum(exchanges)
    if sink is None:
        assert received == 0
    else:
        assert_same(sink.state, tensors_of(everything(seed=1), buffers=False))
        own = {number: held.numel for number, held in plan.parts[receiver].items()}
        own |= {number: 1 for number, tensor in enumerate(plan.tensors) if tensor.name == "scale"}  # on every rank
        needed = plan.nbytes - sum(numel * plan.tensors[number].dtype.itemsize for number, numel in own.items())
        assert needed <= received < needed + 8 * len(plan.tensors)  # with bytes that align


@on_ranks(3)
def test_a_rank_looks_at_its_own_parts_and_at_those_that_it_receives() -> None:
    model = sharded(nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), "rows")
    sink = Ignored() if dist.get_rank() == 0 else None
    counts = []
    for _ in range(2):
        with mock.patch.object(WeightPlan, "runs", autospec=True, side_effect=WeightPlan.runs) as runs:
            plan = fsdp.stream_weights(model, sink, bucket_bytes=600)
        counts.append(runs.call_count)
    first, then = counts
    assert then == len(plan.buckets) * (3 if sink else 1), counts  # a consumer looks at those that it receives, too
    assert first == then + len(plan.buckets)
    assert len(plan.buckets) > 2


@on_ranks(3)
def test_a_plan_of_other_ranks_is_not_used_again() -> None:
    """Rank 0 holds the same in both meshes, and its plan of the second is under the key of the first."""
    full, model, sink = torch.arange(6.0).view(3, 2), nn.Module(), Collected()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2], [0, 2, 1])]
    for mesh in (*meshes, *meshes):
        (row,) = mesh.get_coordinate() or ()
        model.w = nn.Parameter(DTensor.from_local(full[row : row + 1].clone(), mesh, [Shard(0)]))
        fsdp.stream_weights(model, sink, bucket_bytes=1000)
        assert torch.equal(sink.state["w"], full)


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """The bytes that this rank receives in each exchange."""
    found: list[int] = []

    def exchange(self: Any, incoming: Any, *args: Any, do: Any = DirectExchange.exchange) -> Any:
        found.append(sum(each.nbytes for tensors in incoming.values() for each in tensors))
        return do(self, incoming, *args)

    with mock.patch.object(DirectExchange, "exchange", exchange):
        yield found


@on_ranks("world_size")
@parametrize_pairs(world_size=[2, 3], form=["flat", "rows"], everywhere=[True, False], most_messages=[512, 0])
def test_a_rank_allocates_at_most_two_buckets(world_size: int, form: str, everywhere: bool, most_messages: int) -> None:
    model = sharded(nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), form)
    bucket_bytes = 2 * 33 * 32 * 4
    allocated: list[int] = []

    def empty(*sizes: Any, do: Any = torch.empty, **options: Any) -> Tensor:
        made: Tensor = do(*sizes, **options)
        if sys._getframe(1).f_code.co_filename.endswith("assembly.py"):
            allocated.append(made.nbytes)
        return made

    consumes = everywhere or dist.get_rank() == 0
    expected = full_state(model)
    collected = Collected()
    with mock.patch.object(plan_module, "_MOST_MESSAGES", most_messages):
        with mock.patch.object(torch, "empty", empty):
            plan = fsdp.stream_weights(model, Ignored() if consumes else None, bucket_bytes=bucket_bytes)
        fsdp.stream_weights(model, collected, bucket_bytes=bucket_bytes)
    assert len(plan.buckets) == 6
    assert_same(collected.state, expected)
    aligned = 64 * world_size * (most_messages == 0)  # bytes that align packed parts
    assert consumes <= sum(allocated) <= (1 + consumes) * bucket_bytes + aligned


class Ignored(Sink):
    def bucket(self, number: int, tensor: Tensor) -> None:
        return


@on_ranks(2)
def test_a_rank_that_cannot_read_its_shards_is_reported_on_every_rank() -> None:
    model, rank = MODELS["flat"](1), dist.get_rank()

    def vector(self: Any, do: Any = SlotTensor.vector) -> Tensor:
        if rank:
            raise OSError(f"the disk of {self.names[0]} has failed")
        return do(self)

    for sink in (Collected(), Parts()):
        with (
            mock.patch.object(SlotTensor, "vector", vector),
            pytest.raises((OSError, RuntimeError), match="has failed"),
        ):
            fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    fsdp.stream_weights(model, Collected(), bucket_bytes=BUCKET)


@pytest.mark.parametrize("form", ["flat", "last dimension"])  # each run is a message, and parts are packed
@on_ranks(3)
def test_a_rank_that_has_no_memory_for_what_it_sends_is_reported_on_every_rank(form: str) -> None:
    model, rank = MODELS[form](1), dist.get_rank()

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory for a cast")

    sink = Collected() if rank == 0 else None
    failing = mock.patch.multiple(Shards, bytes_of=fail, packed=fail) if rank == 1 else nullcontext()
    with failing, pytest.raises((MemoryError, RuntimeError), match="no memory for a cast"):
        fsdp.stream_weights(model, sink, bucket_bytes=BUCKET, dtype=torch.bfloat16)
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    if sink is not None:
        assert isinstance(sink.closed_with[0], RuntimeError)
        assert_same(sink.state, tensors_of(everything(seed=1), buffers=False))


@on_ranks(2)
def test_buckets_are_few() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(30)))
    model = fsdp.FullyShardedDataParallel(model)
    nbytes = 30 * 17 * 16 * 4
    for bucket_bytes in (nbytes, 10 * 17 * 16 * 4, 4 * 17 * 16 * 4):
        plan = fsdp.stream_weights(model, lambda tensors: None, bucket_bytes=bucket_bytes)
        assert len(plan.buckets) == -(-nbytes // bucket_bytes)


@on_ranks(2)
@pytest.mark.parametrize("form", ["flat", "rows"])
def test_a_function_receives_the_tensors_of_each_bucket(form: str) -> None:
    found: list[dict[str, Tensor]] = []
    model = MODELS[form](1)

    def receive(tensors: dict[str, Tensor]) -> None:
        found.append({name: each.clone() for name, each in tensors.items()})

    plan = model.stream_weights(receive, bucket_bytes=500)
    assert len(found) == len(plan.buckets) > 1
    state = {name: value for bucket in found for name, value in bucket.items()}
    assert len(state) == sum(map(len, found))
    assert_same(state, tensors_of(everything(seed=1), buffers=False))
    with pytest.raises(ValueError, match=r"conv\.weight is larger than a bucket, with 144 bytes"):
        fsdp.stream_weights(model, receive, bucket_bytes=64)


@on_ranks(2)
def test_a_tied_parameter_is_sent_once_with_all_names() -> None:
    plan = fsdp.stream_weights(MODELS["flat"](1), Collected(), bucket_bytes=BUCKET)
    names = [each.names for each in plan.tensors]
    assert ("tokens.weight", "head.weight") in names
    assert plan.nbytes == sum(each.nbytes for each in everything().parameters())


# Options


@on_ranks(2)
@pytest.mark.parametrize("form", ["flat", "rows"])
def test_parameters_are_cast(form: str) -> None:
    sink = Collected()
    fsdp.stream_weights(MODELS[form](1), sink, bucket_bytes=BUCKET, dtype=torch.bfloat16, buffers=True)
    plain = everything(seed=1)
    expected = {
        name: value.bfloat16() if name not in dict(plain.named_buffers()) else value
        for name, value in tensors_of(plain).items()
    }
    assert_same(sink.state, expected)


@on_ranks(2)
def test_names_are_chosen_and_changed() -> None:
    model, sink = MODELS["flat"](1), Collected()
    fsdp.stream_weights(
        model, sink, bucket_bytes=BUCKET, only=["inner", "c*.bias"], rename=lambda name: f"model.{name}"
    )
    plain = tensors_of(everything(seed=1), buffers=False)
    expected = {f"model.{name}": plain[name] for name in plain if name.startswith("inner.") or name == "conv.bias"}
    assert_same(sink.state, expected)
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET, only=["scale"], rename={"scale": "s"})
    assert_same(sink.state, {"s": plain["scale"]})
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET, only=["head.weight"])
    assert_same(sink.state, dict.fromkeys(("tokens.weight", "head.weight"), plain["tokens.weight"]))


@on_ranks(2)
def test_tensors_that_belong_together_are_in_one_bucket() -> None:
    blocks = nn.ModuleList(nn.ModuleDict({key: nn.Linear(4, 6) for key in "qkvo"}) for _ in range(3))
    model = fsdp.FullyShardedDataParallel(blocks)
    together = [[f"*.{key}.weight" for key in "qkv"], ("0.o.weight", "1.o.weight")]
    seen: list[set[str]] = []
    fsdp.stream_weights(model, lambda tensors: seen.append(set(tensors)), bucket_bytes=310, together=together)
    assert len(seen) > 3
    for group in [*({f"{row}.{key}.weight" for key in "qkv"} for row in range(3)), {"0.o.weight", "1.o.weight"}]:
        assert sum(group <= names for names in seen) == 1
    with pytest.raises(ValueError, match=r"bucket_bytes=200 is too small to keep 0.q.weight, 0.k.weight, .*together"):
        fsdp.stream_weights(model, lambda tensors: None, bucket_bytes=200, together=together)


# Bad input


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"only": ["inner", "nothing.*"]}, ValueError, r"only has 'nothing\.\*'"),
        ({"together": [["wide", "nothing"]]}, ValueError, "together has 'nothing'"),
        ({"together": [["wide"], ["wide", "short"]]}, ValueError, "wide in two groups"),
        ({"only": [3]}, TypeError, "argument only must contain names"),
        ({"bucket_bytes": 8}, ValueError, r"smaller than a row of .*has \d+ bytes"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be a positive"),
        ({"bucket_bytes": 1.5}, ValueError, "bucket_bytes must be a positive"),
        ({"dtype": torch.int8}, TypeError, "dtype must be a floating-point"),
        ({"dtype": "bfloat16"}, TypeError, "dtype must be a floating-point"),
        ({"together": 3}, TypeError, "not iterable"),
        ({"since": 3}, TypeError, "since must be an fsdp.weights.Snapshot"),
        ({"rename": {"wide": "same", "short": "same"}}, ValueError, "the same name same"),
        ({"rename": {"wide": None}}, TypeError, "rename must return a name"),
        ({"sink": 3}, TypeError, "sink must be a function"),
        ({"sink": None}, ValueError, "sink is None on every rank"),
    ],
    ids=str,
)
def test_bad_arguments_are_errors_on_every_rank(options: dict[str, Any], error: Any, message: str) -> None:
    model = MODELS["flat"](1)
    arguments = {"sink": Collected(), "bucket_bytes": BUCKET, **options}
    with pytest.raises(error, match=message):
        fsdp.stream_weights(model, **arguments)
    if options != {"sink": None}:
        arguments = {"sink": Collected(), "bucket_bytes": BUCKET, **(options if dist.get_rank() else {})}
        with pytest.raises(error if dist.get_rank() else RuntimeError, match=message):
            fsdp.stream_weights(model, **arguments)
    sink = Collected()
    fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    assert_same(sink.state, tensors_of(everything(seed=1), buffers=False))


class Plain:
    """Has the three methods, and no base class."""

    def open(self, plan: WeightPlan) -> None:
        self.calls = ["open"]

    def bucket(self, number: int, tensor: Tensor) -> None:
        self.calls.append("bucket")

    def close(self, error: BaseException | None) -> None:
        self.calls.append("close")


@on_ranks(2)
def test_any_object_with_the_three_methods_is_a_sink() -> None:
    sink: Any = Plain()
    plan = fsdp.stream_weights(MODELS["flat"](1), sink, bucket_bytes=BUCKET)
    assert sink.calls == ["open", *["bucket"] * len(plan.buckets), "close"]


@on_ranks(2)
def test_ranks_with_other_settings_are_named() -> None:
    model = MODELS["flat"](1)
    with pytest.raises(RuntimeError, match="rank 1 has other tensors or settings to stream than rank 0"):
        fsdp.stream_weights(model, Collected(), bucket_bytes=BUCKET + dist.get_rank())
    with pytest.raises(TypeError, match="rank 1 has a different kind of sink"):
        fsdp.stream_weights(model, [Parts, Collected][dist.get_rank()](), bucket_bytes=BUCKET)


class Failing(Sink):
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self._where, self.error = where, ""

    def open(self, plan: WeightPlan) -> None:
        self._fail("open")

    def bucket(self, number: int, tensor: Tensor) -> None:
        self._fail(f"bucket {number}")

    def close(self, error: BaseException | None) -> None:
        self.error = str(error or "")
        self._fail("close")

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise KeyError(f"no space in {where}")


@on_ranks(3)
@pytest.mark.parametrize("where", ["open", "bucket 1", "close"])
@pytest.mark.parametrize("form", ["flat", "rows"])
def test_a_sink_that_raises_on_one_rank_is_reported_on_every_rank(form: str, where: str) -> None:
    model, rank = MODELS[form](1), dist.get_rank()
    sink = Failing(where if rank == 1 else "")
    with pytest.raises(KeyError if rank == 1 else RuntimeError, match=f"no space in {where}") as caught:
        fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    if rank != 1:
        assert "rank 1 could not" in str(caught.value)
        assert ("no space" in sink.error) == (where != "close")
    step(model)
    found = Collected()
    fsdp.stream_weights(model, found, bucket_bytes=BUCKET)
    expected = full_state(model)
    assert_same(found.state, {name: expected[name] for name in found.state})


@on_ranks(2)
def test_weights_are_not_sent_while_they_are_in_use() -> None:
    model = MODELS["flat"](1)
    with model.summon_full_params(), pytest.raises(RuntimeError, match="stream weights"):
        fsdp.stream_weights(model, Collected(), bucket_bytes=BUCKET)
    with pytest.raises(RuntimeError, match="Stream weights by the wrapper"):
        fsdp.stream_weights(model.norm, Collected(), bucket_bytes=BUCKET)
