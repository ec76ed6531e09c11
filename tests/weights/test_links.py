"""Sockets and shared memory: weights arrive in a process without ranks, and errors arrive on every rank."""

from __future__ import annotations

import socket
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.weights import SharedMemorySink, Snapshot, SocketSink, receive
from fsdp.weights.links import Kind, Link
from tests.helpers.engines import KINDS, address_for, clones, engine, program, sink_to, told_by_first
from tests.helpers.equality import assert_same
from tests.helpers.forms import full_state, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.paces import at_some_pace
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.weights import MODELS, Collected, everything, step, tensors_of

BUCKET = 400


@on_ranks("world_size")
@parametrize_pairs(world_size=[2, 3, 1], kind=KINDS, form=["flat", "rows", "last dimension", "mixed", "ignored"])
def test_a_process_receives_the_plain_models_weights(world_size: int, kind: str, form: str) -> None:
    model = MODELS[form](1)
    with engine(kind) as (address, engine_here):
        for seed in (1, 2):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, buffers=True)
            if engine_here is not None:
                assert_same(engine_here.result(), tensors_of(everything(seed=seed)))
            model = MODELS[form](2)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_received_bucket_by_bucket(kind: str) -> None:
    model = MODELS["flat"](1)
    with engine(kind, clones) as (address, engine_here):
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=1000)
        if engine_here is not None:
            assert_same(engine_here.result(), tensors_of(everything(seed=1), buffers=False))
        with pytest.raises((RuntimeError, OSError), match="is larger than a bucket"):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=64)
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=1000)


def test_a_receiver_that_reads_slowly_is_waited_for_as_long_as_it_reads() -> None:
    content = memoryview(bytes(5 << 20))

    def read_slowly(there: socket.socket, pace: float) -> None:
        with there:
            while there.recv(1 << 18, socket.MSG_WAITALL):
                time.sleep(0.1 * pace)

    def check(pace: float) -> None:
        here, there = socket.socketpair()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        with ThreadPoolExecutor(1) as pool, here:  # closed first, which ends the reading
            reading = pool.submit(read_slowly, there, pace)
            Link(here, "the engine", timeout=pace).send(Kind.PART, content)  # which takes twice as long
        reading.result()

    at_some_pace(check)


@on_ranks(2)
def test_an_engine_that_consumes_slowly_is_waited_for_as_long_as_it_consumes() -> None:
    model = fsdp.FullyShardedDataParallel(nn.Linear(4, 23))

    def check(pace: float) -> None:
        def consume_slowly(update: Any) -> int:
            return len([time.sleep(0.15 * pace) for _ in update.buckets()])

        with engine("socket", consume_slowly) as (address, engine_here):
            sink = sink_to(address, timeout=2.0 * pace)
            plan = fsdp.stream_weights(model, sink, bucket_bytes=16)  # all of it fits in the socket
            assert len(plan.buckets) * 0.15 > 3.5
            if engine_here is not None:
                assert engine_here.result() == len(plan.buckets)

    at_some_pace(check)


@on_ranks(2)
def test_a_wrong_secret_is_an_error_on_every_rank() -> None:
    model, rank = MODELS["flat"](1), dist.get_rank()
    with engine("socket") as (address, engine_here):
        for secret in ("wrong", "wrong" if rank == 1 else None):
            sink = sink_to(address, secret) if secret else sink_to(address)
            with pytest.raises((OSError, RuntimeError), match="the secret is wrong"):
                fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
        step(model)
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET)
        if engine_here is not None:
            assert isinstance(engine_here.result(), dict)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_stops_is_an_error_on_every_rank(kind: str) -> None:
    def fail(update: Any) -> None:
        for number, _ in update.buckets():
            if number == 1:
                raise ValueError("the engine has no such layer")

    def refuse(update: Any) -> None:
        update.stop("the engine has no layer 3")

    model = MODELS["rows"](1)
    for consume, reason in ((fail, "the receiver has stopped"), (refuse, "the engine has no layer 3")):
        with engine(kind, consume) as (address, _):
            for _ in range(2):
                with pytest.raises((OSError, RuntimeError), match=reason):
                    fsdp.stream_weights(model, sink_to(address), bucket_bytes=150)


class Stopping(SocketSink):
    """Fails on one rank, in the middle."""

    def bucket(self, number: int, tensor: Tensor) -> None:
        if number == 1 and dist.get_rank() == 1:
            raise KeyError("out of luck")
        super().bucket(number, tensor)


@on_ranks(2)
def test_an_error_of_a_rank_is_raised_by_the_receiver() -> None:
    model = MODELS["flat"](1)
    with engine("socket") as (address, engine_here):
        with pytest.raises((KeyError, RuntimeError), match="out of luck"):
            fsdp.stream_weights(model, Stopping(address, "only we know"), bucket_bytes=BUCKET)
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET)
        if engine_here is not None:
            assert "KeyError" in str(engine_here.result())
            assert isinstance(engine_here.result(), dict)


@on_ranks(2)
def test_damaged_bytes_are_an_error_on_every_rank() -> None:
    def damaged(self: Link, kind: Kind, content: Any = b"", fd: Any = None, do: Any = Link.send) -> None:
        if kind != Kind.PART or dist.get_rank() == 0:
            do(self, kind, content, fd)
            return
        original = self._socket

        class Flipping:
            def send(self, data: Any) -> int:
                changed = bytearray(data)
                if content and len(changed) >= len(content):
                    changed[-1] ^= 1
                original.sendall(changed)
                return len(changed)

        self._socket = Flipping()  # type: ignore[assignment]
        try:
            do(self, kind, content, fd)
        finally:
            self._socket = original

    model = MODELS["flat"](1)
    with engine("socket") as (address, _):
        with (
            mock.patch.object(Link, "send", damaged),
            pytest.raises((OSError, RuntimeError), match="checksum is different"),
        ):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET)
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_is_killed_is_restarted(kind: str) -> None:
    model, here = MODELS["flat"](1), dist.get_rank() == 0
    wanted = told_by_first(address_for(kind)) if kind == "shared memory" else "127.0.0.1:0"
    with program(wanted, stop_after=2) if here else nullcontext([None] * 3) as (process, _, own):
        address = told_by_first(own)
        with pytest.raises((OSError, RuntimeError), match=r"closed its connection|has failed"):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=150)
        assert process is None or process.wait() == -9
    step(model)
    with program(address) if here else nullcontext([None] * 3) as (process, output, _):
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET)
        assert output is None or output.readline() == "received\n"
    dist.barrier()
    assert "memfd:fsdp.weights" not in Path("/proc/self/maps").read_text()
    with pytest.raises((OSError, RuntimeError), match="no process listens at"):
        fsdp.stream_weights(model, sink_to(address, connect_timeout=0.2), bucket_bytes=BUCKET)


@on_ranks(2)
def test_a_host_that_does_not_answer_is_an_error_with_its_address_on_every_rank() -> None:
    model, here = MODELS["flat"](1), dist.get_rank() == 0
    with ExitStack() as stack:
        own = None
        if here:  # a queue of connections that is full, so that the system answers no further one
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            own = f"127.0.0.1:{listener.getsockname()[1]}"
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
        address = told_by_first(own)
        started = time.monotonic()
        with pytest.raises((OSError, RuntimeError), match=f"no process listens at {address} for 0.3 s"):
            fsdp.stream_weights(model, sink_to(address, connect_timeout=0.3), bucket_bytes=BUCKET)
        assert time.monotonic() - started < 30
    fsdp.stream_weights(model, Collected(), bucket_bytes=BUCKET)


# Changes


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["flat", "rows"])
def test_changes_give_the_receiver_equal_weights(form: str, kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(300, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).bfloat16()
    model = sharded(plain, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    snapshot, counts = Snapshot(), []
    with engine(kind, keep=True) as (address, engine_here):
        before: dict[str, Tensor] = {}
        for number in range(6):
            plan = fsdp.stream_weights(model, sink_to(address), bucket_bytes=16_000, since=snapshot)
            assert bool(plan.base) == (number > 0)
            state = full_state(model)
            if engine_here is not None:
                assert_same(engine_here.result(), state)
            sent = torch.tensor(snapshot.sent_nbytes)
            dist.all_reduce(sent)
            changed = sum(int((before[name] != state[name]).sum()) for name in before)
            counts.append((int(sent), changed))
            before = state
            model(torch.randint(0, 300, (4, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    total = sum(each.nbytes for each in before.values())
    assert counts[0][0] >= total
    heads = 24 * 2 * len(plan.buckets)
    for sent, changed in counts[1:]:
        assert 0 < changed < 0.9 * total / 2
        assert sent <= heads + min(changed * (2 + 4) * 1.2, total)


@on_ranks(2)
def test_a_restarted_receiver_has_no_weights_to_change_and_receives_all_again() -> None:
    model, snapshot = MODELS["flat"](1), Snapshot()
    with engine("socket", keep=True) as (address, _):
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=snapshot)
    step(model)
    with engine("socket", keep=True) as (address, engine_here):
        with pytest.raises((OSError, RuntimeError), match="for example because it was restarted"):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=snapshot)
        assert snapshot.nbytes == 0
        plan = fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=snapshot)
        assert not plan.base
        if engine_here is not None:
            assert isinstance(engine_here.result(), dict)
    with engine("socket") as (address, _), pytest.raises((OSError, RuntimeError), match="keep=True"):
        fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=snapshot)


@on_ranks(2)
def test_a_snapshot_of_other_settings_sends_all_weights() -> None:
    model, snapshot = MODELS["flat"](1), Snapshot()
    with engine("socket", keep=True) as (address, engine_here):
        for dtype in (None, torch.bfloat16, None):
            plan = fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=snapshot, dtype=dtype)
            assert not plan.base
            if engine_here is not None:
                engine_here.result()
        assert fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=snapshot).base
        if engine_here is not None:
            assert_same(engine_here.result(), tensors_of(everything(seed=1), buffers=False))


@on_ranks(1)
def test_a_receiver_frees_the_weights_that_it_keeps_before_it_allocates_others() -> None:
    kept: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def empty(*sizes: Any, do: Any = torch.empty, **options: Any) -> Tensor:
        if sys._getframe(1).f_code.co_filename.endswith("receiver.py"):
            alive.extend(each() is not None for each in kept)
        made: Tensor = do(*sizes, **options)
        return made

    def consume(update: Any) -> int:
        number = len(list(update.buckets()))
        kept[:] = map(weakref.ref, update._kept.buckets)
        return number

    model = MODELS["flat"](1)
    with engine("socket", consume, keep=True) as (address, engine_here), mock.patch.object(torch, "empty", empty):
        assert engine_here is not None
        for _ in range(2):
            fsdp.stream_weights(model, sink_to(address), bucket_bytes=BUCKET, since=Snapshot())
            assert engine_here.result() == len(kept) > 1
    assert alive
    assert not any(alive)


@on_ranks(2)
def test_changes_need_a_sink_that_supports_them() -> None:
    with pytest.raises(TypeError, match="for a sink that supports changes"):
        fsdp.stream_weights(MODELS["flat"](1), lambda tensors: None, bucket_bytes=1000, since=Snapshot())


# Bad input


def test_bad_addresses_and_secrets_are_errors() -> None:
    for address in ("host:", ":5", "host:port", "host:70000"):
        with pytest.raises(ValueError, match="form host:port"):
            SocketSink(address, "secret")
    with pytest.raises(ValueError, match="requires a secret"):
        SocketSink("host:5", "")
    with pytest.raises(ValueError, match="requires a secret"):
        receive("127.0.0.1:0")
    with pytest.raises(TypeError, match="secret must be a str"):
        receive("127.0.0.1:0", secret=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty or contain a colon"):
        SharedMemorySink("host:5")
    with receive("taken by a test") as receiver, pytest.raises(OSError, match="cannot listen at taken by a test"):
        receive(receiver.address)
    with receive("127.0.0.1:0", secret="x") as receiver, pytest.raises(TimeoutError, match="no sender has connected"):
        receiver.next(timeout=0.01)
