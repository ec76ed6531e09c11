"""Ranges of weights on request: readers receive the requested ranges from the ranks that hold them.

[Note: boundaries] The ranks answer requests only during `WeightServer.update`, which the training calls between steps.
There are no threads, so a reader never receives bytes of two steps. Rank 0 looks for requests and announces them to the
other ranks. Every rank answers the announced requests, using its own connection to the reader. A reader that has ended,
or is too slow, is dropped, and the training continues.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.checkpoint.model_tensors import ready
from fsdp.checkpoint.writer import release
from fsdp.distributed.collectives import during
from fsdp.distributed.consensus import done_by_all, from_everyone, number_among
from fsdp.engine.boxes import Box
from fsdp.layers.state_dict.full import buffers_in_own_precision
from fsdp.weights.links import Kind, Link, accept, connect, is_shared_memory, key_of, listening, text_of
from fsdp.weights.plan import PlannedTensor, WeightPlan, box_view, shares
from fsdp.weights.sinks import Sink
from fsdp.weights.stream import Rename, Settings, Stream

_WHAT = "serve weights"
_ONE_BUCKET = 1 << 62  # bytes: ranges on request need no buckets

Slices = Mapping[str, Sequence[slice] | None]


class _Nowhere(Sink):
    """Represents the readers in the plan, which describes the parts of all ranks."""

    receives = "parts"


class WeightServer:
    """Answers readers on every rank, see `serve_weights`.

    Attributes:
        address: the address that a `WeightReader` requires, on every rank.
        version: the number of calls of `update`.
        dropped: the readers dropped in the last `update`, with the reasons.
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        secret: str | bytes | None,
        settings: Callable[[], Settings],
        timeout: float,
    ) -> None:
        self._model, self._timeout = model, timeout
        self.version, self.dropped = 0, list[str]()
        self._links: dict[str, Link] = {}  # by reader
        units, ranks = ready(model, _WHAT)
        rank = number_among(ranks)

        def begin() -> tuple[bytes, Settings, socket.socket, str]:
            place = f"{address}.{rank}" if is_shared_memory(address) and rank else address
            return key_of(secret, address), settings(), *listening(place)

        self._key, self._settings, self._listener, own = done_by_all([ranks], "listen for readers", begin)
        self._addresses = from_everyone(ranks, own)
        self.address = self._addresses[0]
        try:
            self._plan = self._prepared(units, ranks).plan
        except BaseException:
            self.close()
            raise

    def _prepared(self, units: Any, ranks: Any) -> Stream:
        return Stream(self._model, units, ranks, _Nowhere(), lambda: self._settings, None)

    @during("fsdp.weights.WeightServer.update()")
    def update(self) -> int:
        """Collective. Answer all waiting readers with the current weights, which get the next version number.

        Call this method between steps, for example after `optimizer.step()`. Without readers, the ranks exchange a
        single short message.

        Returns:
            The version of the weights.

        Raises:
            RuntimeError: in a forward or backward, or inside `summon_full_params`; if names, shapes or dtypes of the
                model's parameters have changed. A reader that fails raises no error, see `dropped`.
        """
        units, ranks = ready(self._model, _WHAT)
        self.version += 1
        self.dropped = []
        found = self._try("all readers", self._look) if number_among(ranks) == 0 else None
        waiting, connected = from_everyone(ranks, (found or {}, list(self._links)))[0]
        for reader in self._links.keys() - set(connected):  # readers that have ended, which only rank 0 detects
            self._links.pop(reader).end()
        if waiting:
            with torch.no_grad(), buffers_in_own_precision(units if self._settings.buffers else ()):
                stream = self._prepared(units, ranks)
                if (stream.plan.tensors, stream.plan.parts) != (self._plan.tensors, self._plan.parts):
                    raise RuntimeError("the parameters of the model have changed: create another server for them")
                try:
                    for reader, request in waiting.items():
                        self._try(reader, partial(self._answer, stream, reader, request))
                finally:
                    release(units)
        return self.version

    def _try(self, reader: str, job: Any) -> Any:
        """Call a function, and drop the reader if it raises."""
        try:
            return job()
        except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            self.dropped.append(f"{reader}: {text_of(error)}")
            link = self._links.pop(reader, None)
            if link is not None:
                link.end(text_of(error))
            return None

    def _look(self) -> dict[str, Any]:
        """Return the requests that have arrived, by reader, and accept new readers."""
        while _is_readable(self._listener):
            self._try("a new reader", self._accept_one)
        readable = {reader: link for reader, link in self._links.items() if _is_readable(link)}
        found = {
            reader: self._try(reader, partial(link.receive_json, Kind.REQUEST)) for reader, link in readable.items()
        }
        return {reader: request for reader, request in found.items() if request is not None}

    def _accept_one(self) -> None:
        """Accept a reader, and send it the addresses of all ranks; rank 0 also sends the plan."""
        self._listener.settimeout(self._timeout)
        connection, _ = self._listener.accept()
        link = Link(connection, "a reader", self._timeout)
        try:
            accept(link, self._key)
            reader = str(link.receive_json(Kind.STREAM)["reader"])
            plan = self._plan.to_json() if self._plan.rank == 0 else None
            link.send_json(Kind.PLAN, {"plan": plan, "addresses": self._addresses})
        except BaseException as error:
            link.end(text_of(error))
            raise
        link.set_peer(f"reader {reader}", self._timeout)
        self._links[reader] = link

    def _link_of(self, reader: str) -> Link:
        """Return the connection of a reader; wait until the reader connects, and accept other readers meanwhile."""
        until = time.monotonic() + self._timeout
        while reader not in self._links:
            if not _is_readable(self._listener, max(until - time.monotonic(), 0.0)):
                raise TimeoutError(f"it has not connected to rank {self._plan.rank} for {self._timeout:g} s")
            self._try("a new reader", self._accept_one)
        return self._links[reader]

    def _answer(self, stream: Stream, reader: str, request: Any) -> None:
        """Send the requested elements that this rank holds. The reader sends the same request to all ranks."""
        rank = stream.plan.rank
        link = self._link_of(reader)
        if rank and link.receive_json(Kind.REQUEST)["number"] != request["number"]:
            raise ValueError("the requests of a reader are in a different order on another rank")
        wanted = [(int(number), Box(tuple(offsets), tuple(sizes))) for number, offsets, sizes in request["boxes"]]
        text = ""
        if request["version"] not in (None, self.version):
            text = f"the weights have version {self.version}, and the reader requests version {request['version']}"
        link.send_json(Kind.ACCEPTED, {"version": self.version, "error": text})
        if text:
            return
        own, vectors = stream.own, stream.vectors({number for number, _ in wanted})
        for number, box in wanted:
            tensor = stream.plan.tensors[number]
            found = shares(tensor, own.get(number), box)
            if found:
                values = [share.of_vector(vectors[number]).detach().to(tensor.dtype).reshape(-1) for share in found]
                link.send(Kind.PART, torch.cat(values).cpu().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Stop listening, and disconnect all readers. Not collective."""
        self._listener.close()
        while self._links:
            self._links.popitem()[1].end("the server was closed")


@during("fsdp.serve_weights()")
def serve_weights(
    model: nn.Module,
    address: str,
    *,
    secret: str | bytes | None = None,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    only: Iterable[str] | None = None,
    buffers: bool = False,
    timeout: float = 10.0,
) -> WeightServer:
    """Collective. Serve ranges of weights to readers in other processes, see `fsdp.weights.WeightReader`.

    Readers receive only the requested bytes, directly from the ranks that hold them. Requests are answered by
    `WeightServer.update`, which the training calls between steps on all ranks.

    Args:
        model: as for `stream_weights`.
        address: ``host:port`` at which this rank listens; port 0 chooses a free port. Readers need the address of rank
            0. A name without ``:`` serves processes of the same user on the same host.
        secret: the secret of the readers; required for ``host:port``.
        dtype, rename, only, buffers: as for `stream_weights`.
        timeout: the number of seconds that `update` waits for a reader that has sent a request.

    Raises:
        OSError: if this rank cannot listen at its address. The other ranks raise a RuntimeError.
        ValueError: if the address is not valid, or a required secret is missing; as `stream_weights`.
        RuntimeError, TypeError, NotImplementedError: as `stream_weights`.
    """
    settings = partial(Settings, _ONE_BUCKET, dtype, rename, (), only, bool(buffers))
    return WeightServer(model, address, secret, settings, timeout)


class WeightReader(AbstractContextManager["WeightReader"]):
    """Reads ranges of the weights that the ranks of a training serve. No process group is required.

    Creating a reader waits until the training calls `WeightServer.update`. A reader is a context manager.

    Args:
        address: the address of rank 0, `WeightServer.address`.
        secret: the secret of the server.
        timeout: the number of seconds to wait for the training to reach its next boundary between steps.

    Attributes:
        plan: the names, dtypes and shapes of all tensors.
        received_nbytes: the number of received bytes of weights.

    Raises:
        ConnectionError: if the server does not listen, ends, or has another secret.
        TimeoutError: if the training does not reach a boundary in time.
    """

    def __init__(self, address: str, secret: str | bytes | None = None, *, timeout: float = 300.0) -> None:
        self._key, self._timeout = key_of(secret, address), timeout
        self._name, self._count, self.received_nbytes = secrets.token_hex(8), 0, 0
        first, told = self._connect(address)
        self._links: dict[int, Link] = {0: first}  # by rank; the other connections are created at the first read
        self._addresses = told["addresses"]
        self.plan = WeightPlan.from_json(told["plan"])
        self._numbers = {name: number for number, each in enumerate(self.plan.tensors) for name in each.names}

    def _connect(self, address: str) -> tuple[Link, Any]:
        link = connect(address, self._key, self._timeout, self._timeout)
        try:
            link.send_json(Kind.STREAM, {"reader": self._name})
            return link, link.receive_json(Kind.PLAN)
        except BaseException:
            link.end()
            raise

    def select(self, slices: Slices) -> WeightRequest:
        """Return a request for some tensors, which can be read repeatedly.

        Args:
            slices: by name, a slice for each dimension of the tensor, or None for the whole tensor. Dimensions without
                a slice are complete.

        Raises:
            ValueError: for unknown names, and slices with steps or with more dimensions than the tensor.
        """
        boxes: dict[str, tuple[int, Box]] = {}
        for name, given in slices.items():
            if name not in self._numbers:
                raise ValueError(f"the served weights have no tensor {name!r}")
            number = self._numbers[name]
            boxes[name] = number, _box(self.plan.tensors[number], given)
        return WeightRequest(self, boxes)

    def read_into(self, boxes: Sequence[tuple[int, Box, Tensor]], version: int | None) -> int:
        """Read boxes of numbered tensors into tensors of the boxes' sizes; return the version."""
        self._count += 1
        content = [[number, box.offsets, box.sizes] for number, box, _ in boxes]
        request = {"number": self._count, "version": version, "boxes": content}
        with ThreadPoolExecutor(len(self._addresses)) as pool:
            found = list(pool.map(partial(self._read_from, request, boxes), range(len(self._addresses))))
        versions = {each for each, _, _ in found}
        text = next((text for _, text, _ in found if text), "")
        if text:
            raise ValueError(text)
        if len(versions) != 1:
            raise RuntimeError(f"the ranks have answered with different versions: {sorted(versions)}")
        self.received_nbytes += sum(nbytes for _, _, nbytes in found)
        return versions.pop()

    def _read_from(self, request: Any, boxes: Sequence[tuple[int, Box, Tensor]], rank: int) -> tuple[int, str, int]:
        """Read the parts that a rank holds; return the version, the server's error, and the number of bytes."""
        if rank not in self._links:
            self._links[rank] = self._connect(self._addresses[rank])[0]
        link = self._links[rank]
        link.send_json(Kind.REQUEST, request)
        told = link.receive_json(Kind.ACCEPTED)
        if told["error"]:
            return told["version"], told["error"], 0
        total = 0
        for number, box, into in boxes:
            tensor = self.plan.tensors[number]
            found = shares(tensor, self.plan.parts[rank].get(number), box)
            nbytes = sum(share.common.numel for share in found) * tensor.dtype.itemsize
            part = link.receive(Kind.PART, most=nbytes).view(tensor.dtype) if found else None
            for share in found:
                size = share.common.numel
                values, part = part[:size], part[size:]  # type: ignore[index]
                place = share.common.moved([-at for at in box.offsets])
                box_view(into, place).copy_(values.view(share.common.sizes))
            total += nbytes
        return told["version"], "", total

    def close(self) -> None:
        """Disconnect from all ranks."""
        for link in self._links.values():
            link.end()

    def __exit__(self, *_: Any) -> None:
        self.close()


class WeightRequest:
    """A request for slices of tensors, see `WeightReader.select`.

    Attributes:
        tensors: by name, the slices, on the host; `read` writes to them.
    """

    def __init__(self, reader: WeightReader, boxes: Mapping[str, tuple[int, Box]]) -> None:
        self._reader = reader
        self.tensors: dict[str, Tensor] = {}
        self._boxes = []
        for name, (number, box) in boxes.items():
            tensor = reader.plan.tensors[number]
            made = torch.empty(box.sizes, dtype=tensor.dtype, device="cpu")
            self.tensors[name] = made.view(()) if not tensor.shape else made
            self._boxes.append((number, box, made))

    def read(self, version: int | None = None) -> int:
        """Wait for the next boundary between steps, read all slices, and return the version of the weights.

        All bytes belong to the same version. Only the requested bytes are received.

        Args:
            version: the required version; None reads any.

        Raises:
            ValueError: if the weights have another version.
            ConnectionError, TimeoutError: if the training ends, or does not reach a boundary in time. Create
                another reader then.
        """
        return self._reader.read_into(self._boxes, version)


def _is_readable(connection: socket.socket | Link, seconds: float = 0.0) -> bool:
    """Return whether a connection or data is available, or arrives within this number of seconds."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _box(tensor: PlannedTensor, given: Sequence[slice] | None) -> Box:
    slices = list(given or ())
    are_plain = all(isinstance(each, slice) and each.step in (None, 1) for each in slices)
    if len(slices) > len(tensor.sizes) or not are_plain:
        raise ValueError(
            f"{tensor.name} of shape {list(tensor.shape)} supports slices without steps only, got {given!r}"
        )
    slices += [slice(None)] * (len(tensor.sizes) - len(slices))
    spans = [each.indices(size) for each, size in zip(slices, tensor.sizes, strict=True)]
    return Box(tuple(begin for begin, _, _ in spans), tuple(max(0, end - begin) for begin, end, _ in spans))
