"""Readers receive the ranges that they request, of a single version, while a model is trained."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp
from fsdp.weights import WeightReader, WeightServer
from tests.helpers import tensor_parallel
from tests.helpers.engines import BOUND, KINDS, SECRET, address_for, told_by_first
from tests.helpers.equality import assert_same
from tests.helpers.forms import full_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.weights import MODELS, everything, step, tensor_parallel_gpt, tensors_of


def serve(model: Any, kind: str = "socket", **options: Any) -> WeightServer:
    address = "127.0.0.1:0" if kind == "socket" else told_by_first(address_for(kind))
    return fsdp.serve_weights(model, address, secret=SECRET if kind == "socket" else None, **options)


def train_until(server: WeightServer, read: Callable[[WeightReader], Any], model: Any = None) -> tuple[Any, list[Any]]:
    """Collective. Update the server, after steps of a model, until rank 0 has read.

    Return the result, and the states by version.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            with WeightReader(server.address, SECRET if ":" in server.address else None, timeout=BOUND) as reader:
                found.append(read(reader))
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    if dist.get_rank() == 0:
        thread.start()
    states: list[Any] = [None] * (server.version + 1)
    is_done = False
    while not is_done:
        if model is not None:
            step(model)
            states.append(full_state(model))
        server.update()
        is_done = told_by_first(bool(found))
    if dist.get_rank() == 0:
        thread.join(BOUND)
    return (found or [None])[0], states


@on_ranks("world_size")
@parametrize_pairs(world_size=[2, 3, 1], kind=KINDS, form=["flat", "rows", "last dimension", "mixed", "ignored"])
def test_a_reader_receives_the_weights(world_size: int, kind: str, form: str) -> None:
    server = serve(MODELS[form](1), kind, buffers=True)
    names = list(tensors_of(everything()))

    def read(reader: WeightReader) -> Any:
        request = reader.select(dict.fromkeys(names))
        assert request.read() >= 1
        return request.tensors, reader.received_nbytes

    found, _ = train_until(server, read)
    server.close()
    if dist.get_rank() == 0:
        expected = tensors_of(everything(seed=1))
        assert_same(found[0], expected)
        assert found[1] == sum(each.nbytes for each in expected.values())


@on_ranks(2)
@pytest.mark.parametrize("form", ["flat", "rows"])
def test_a_reader_receives_the_bytes_of_its_slices_only(form: str) -> None:
    server = serve(MODELS[form](1), dtype=torch.bfloat16)
    slices = {"tokens.weight": [slice(2, 6), slice(1, 3)], "conv.weight": [slice(1, None)], "inner.0.weight": None}
    slices["wide"] = [slice(3, 3)]  # of no rows

    def read(reader: WeightReader) -> Any:
        request = reader.select(slices)
        request.read()
        return request.tensors, reader.received_nbytes

    found, _ = train_until(server, read)
    if dist.get_rank() == 0:
        plain = tensors_of(everything(seed=1))
        expected = {name: plain[name][tuple(given or ())].bfloat16() for name, given in slices.items()}
        assert_same(found[0], expected)
        assert found[1] == sum(each.nbytes for each in expected.values())
    server.close()


@on_ranks(4)
def test_slices_of_another_tensor_parallel_size_are_read() -> None:
    server = serve(tensor_parallel_gpt(seed=1))

    def read(reader: WeightReader) -> Any:
        found: dict[str, list[Tensor]] = {}
        for part in range(3):  # ranks of the reader, where two ranks of the training divide the tensors
            slices = {}
            for each in reader.plan.tensors:
                rows = each.sizes[0]
                slices[each.name] = [slice(rows * part // 3, rows * (part + 1) // 3)]
            request = reader.select(slices)
            request.read()
            for name, value in request.tensors.items():
                found.setdefault(name, []).append(value)
        total = sum(each.nbytes for each in reader.plan.tensors)
        return {name: torch.cat(values) for name, values in found.items()}, reader.received_nbytes, total

    result, _ = train_until(server, read)
    server.close()
    if dist.get_rank() == 0:
        assert_same(result[0], tensors_of(tensor_parallel.gpt(vocabulary=True, seed=1)))
        assert result[1] == result[2]


@on_ranks(2)
@pytest.mark.parametrize("form", ["flat", "rows"])
def test_all_bytes_of_a_read_have_one_version(form: str) -> None:
    model = MODELS[form](1)
    server = serve(model)

    def read(reader: WeightReader) -> Any:
        request, found = reader.select(dict.fromkeys(each.name for each in reader.plan.tensors)), []
        for _ in range(5):
            version = request.read()
            found.append((version, {name: each.clone() for name, each in request.tensors.items()}))
        return found

    found, states = train_until(server, read, model)
    server.close()
    if dist.get_rank() == 0:
        versions = [version for version, _ in found]
        assert versions == sorted(set(versions))
        for version, tensors in found:
            assert_same(tensors, {name: states[version][name] for name in tensors})


# Bad input


@on_ranks(2)
def test_bad_requests_are_errors_of_the_reader_and_training_goes_on() -> None:
    model = MODELS["flat"](1)
    server = serve(model)

    def read(reader: WeightReader) -> str:
        for slices, message in [
            ({"nothing": None}, "no tensor 'nothing'"),
            ({"wide": [slice(0, 3, 2)]}, "slices without steps"),
            ({"short": [slice(0, 1)] * 2}, "supports slices"),
            ({"short": [3]}, "supports slices"),
        ]:
            with pytest.raises(ValueError, match=message):
                reader.select(slices)  # type: ignore[arg-type]
        request = reader.select({"wide": None})
        version = request.read()
        with pytest.raises(ValueError, match=r"have version \d+, and the reader requests version 1000"):
            request.read(version=1000)
        assert request.read() > version
        with pytest.raises(ConnectionError, match="the secret is wrong"):
            WeightReader(server.address, "wrong")
        return "done"

    result, _ = train_until(server, read, model)
    assert result == ("done" if dist.get_rank() == 0 else None)
    server.close()


@on_ranks(2)
def test_a_reader_that_ends_in_a_request_is_dropped() -> None:
    model = MODELS["flat"](1)
    server = serve(model, timeout=0.5)

    def read(reader: WeightReader) -> str:
        link = reader._links[0]
        assert link is not None
        from fsdp.weights.links import Kind

        link.send_json(Kind.REQUEST, {"number": 1, "version": None, "boxes": [[0, [0, 0], [3, 5]]]})
        return "done"  # without a connection to rank 1

    train_until(server, read, model)
    server.update()
    server.update()
    dropped = server.dropped
    server._timeout = BOUND  # for a reader that does not end

    def again(reader: WeightReader) -> Tensor:
        request = reader.select({"wide": None})
        request.read()
        return request.tensors["wide"]

    found, states = train_until(server, again, model)
    if dist.get_rank() == 0:
        assert any(torch.equal(found, state["wide"]) for state in states if state)
    assert isinstance(dropped, list)
    server.close()


@on_ranks(2)
def test_no_rank_keeps_connections_of_readers_that_have_ended() -> None:
    server = serve(MODELS["flat"](1))
    for _ in range(2):
        version, _ = train_until(server, lambda reader: reader.select({"wide": None}).read())
        assert dist.get_rank() or version <= server.version
        server.update()
        assert not server._links
    server.close()


@on_ranks(2)
def test_a_process_that_connects_to_a_rank_and_ends_does_not_disturb_a_reader() -> None:
    server = serve(MODELS["flat"](1))
    if dist.get_rank() == 0:
        host, port = server._addresses[1].split(":")
        socket.create_connection((host, int(port))).close()

    def read(reader: WeightReader) -> Any:
        request = reader.select({"wide": None})
        request.read()
        return request.tensors

    found, _ = train_until(server, read)
    server.close()
    if dist.get_rank() == 0:
        assert_same(found, {"wide": tensors_of(everything(seed=1))["wide"]})


@on_ranks(2)
def test_a_server_that_closes_ends_its_readers() -> None:
    server = serve(MODELS["flat"](1))

    def read(reader: WeightReader) -> WeightReader:
        request = reader.select({"wide": None})
        request.read()
        reader.close = lambda: None  # type: ignore[method-assign]
        return reader

    reader, _ = train_until(server, read)
    server.close()
    if dist.get_rank() == 0:
        with pytest.raises(ConnectionError, match="closed"):
            reader.select({"wide": None}).read()
        with pytest.raises(ConnectionError, match="no process listens"):
            WeightReader(server.address, SECRET, timeout=0.2)


@on_ranks(2)
def test_bad_arguments_are_errors_on_every_rank() -> None:
    model = MODELS["flat"](1)
    with pytest.raises(ValueError, match="requires a secret"):
        fsdp.serve_weights(model, "127.0.0.1:0")
    with pytest.raises((TypeError, RuntimeError), match="dtype must be"):
        serve(model, dtype="bfloat16" if dist.get_rank() else None)
    with pytest.raises(ValueError, match="only has 'nothing'"):
        serve(model, only=["nothing"])
    with pytest.raises((OSError, RuntimeError), match="cannot listen at"):
        fsdp.serve_weights(model, "127.0.0.1:0" if dist.get_rank() else "203.0.113.9:5", secret=SECRET)
