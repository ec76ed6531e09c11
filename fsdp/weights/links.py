"""Links between ranks that send weights and another process: sockets, and shared memory on the same host.

[Note: protocol] Each rank connects to the receiving process, which listens. A message is a header (magic number, kind,
CRC-32 and length of the content) and its content. Both sides prove with a challenge that they have the same secret,
which is never sent. Then each rank sends its number, and rank 0 also the plan of the stream. After the receiver has
accepted the stream of all ranks, each rank sends its part of each bucket, and the receiver confirms each part. At the
end the receiver confirms that all buckets are consumed. Contents are JSON or bytes of tensors; no code is loaded.
Links are not encrypted.

For shared memory, the messages use a local socket, and the parts are in anonymous memory of the sending rank, whose
file descriptor is sent with a message. The system frees the memory when both processes have closed it or have ended,
for any reason.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import crc32
from fsdp.weights.plan import WeightPlan
from fsdp.weights.sinks import Sink

_VERSION = 2  # of the protocol
_MAGIC = b"fsdw"
_HEAD = struct.Struct("<4sBIQ")
_PEER = struct.Struct("3i")  # the process, user and group at the other end of a local socket
_NONCE_BYTES = 16
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
_LEAD = 16  # the maximum number of parts in flight on a socket
_SHORT = 1 << 12  # the maximum bytes of content sent together with the header
_MAX_TEXT = 1 << 28  # the maximum bytes of all messages except parts of buckets


class Kind(IntEnum):
    """The kinds of messages."""

    CHALLENGE = auto()
    ANSWER = auto()
    WELCOME = auto()
    STREAM = auto()
    MEMORY = auto()
    ACCEPTED = auto()
    PART = auto()
    TAKEN = auto()
    END = auto()
    DONE = auto()
    ERROR = auto()
    PLAN = auto()
    REQUEST = auto()


class PeerError(ConnectionError):
    """An error that the other process has reported before it closed the connection."""


class Link:
    """A connection that sends and receives messages with checksums. `peer` describes the other process in errors."""

    def __init__(self, connection: socket.socket, peer: str, timeout: float) -> None:
        self._socket, self.peer, self._timeout = connection, peer, timeout
        connection.settimeout(timeout)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory: mmap.mmap | None = None  # shared with the process at the other end
        self._sent = 0  # parts that the receiver has not yet taken

    def set_peer(self, peer: str, timeout: float) -> None:
        """Change the description of the other process, and the number of seconds to wait for data."""
        self.peer, self._timeout = peer, timeout
        self._socket.settimeout(timeout)

    def fileno(self) -> int:
        return self._socket.fileno()

    def require_own_user(self) -> None:
        """Raise PermissionError if the process at the other end of a local socket belongs to another user."""
        if self._socket.family == socket.AF_UNIX:
            found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            process, user, _ = _PEER.unpack(found)
            if user != os.getuid():
                raise PermissionError(
                    f"process {process} of user {user} has a different user than this process, {os.getuid()}"
                )

    def send(self, kind: Kind, content: bytes | memoryview = b"", fd: int | None = None) -> None:
        """Send a message; an open file can be sent with it to a process on the same host."""
        head = _HEAD.pack(_MAGIC, kind, crc32(content), len(content))
        try:
            if fd is not None:
                socket.send_fds(self._socket, [head], [fd])
            else:
                self._send_all(head if len(content) > _SHORT else head + bytes(content))
            if len(content) > _SHORT:
                self._send_all(content)
        except OSError as error:
            self._explain(error)

    def _send_all(self, memory: bytes | memoryview) -> None:
        """Send all bytes. In contrast to `socket.sendall`, the timeout restarts whenever some bytes are sent."""
        left = memoryview(memory)
        while left:
            left = left[self._socket.send(left) :]

    def send_json(self, kind: Kind, value: Any) -> None:
        self.send(kind, json.dumps(value, separators=(",", ":")).encode())

    def receive(self, *kinds: Kind, most: int = _MAX_TEXT, into: Tensor | None = None) -> Tensor:
        """Return the content of the next message as a tensor of bytes, in new memory or in `into`.

        Raises:
            ConnectionError: if the message is of another kind, has more than `most` bytes, or has a wrong checksum.
        """
        return self._content(*self._head(*kinds, most=most), into)

    def receive_json(self, kind: Kind) -> Any:
        try:
            return json.loads(bytes(self.receive(kind).numpy()))
        except ValueError as error:
            raise ConnectionError(f"{self.peer} has sent no valid JSON: {error}") from None

    def _head(self, *kinds: Kind, most: int) -> tuple[int, int]:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        magic, kind, checksum, length = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise ConnectionError(f"{self.peer} does not use the protocol of fsdp.weights")
        if kind == Kind.ERROR and length <= _MAX_TEXT:
            text = bytes(self._content(checksum, length).numpy()).decode(errors="replace")
            raise PeerError(f"{self.peer} reports an error: {text}")
        if kind not in kinds or length > most:
            raise ConnectionError(f"{self.peer} has sent {length} bytes of kind {kind}, expected {kinds} of {most}")
        return checksum, length

    def _content(self, checksum: int, length: int, into: Tensor | None = None) -> Tensor:
        content = torch.empty(length, dtype=torch.uint8, device="cpu") if into is None else into[:length]
        memory = content.numpy().data
        self._fill(memory)
        if crc32(memory) != checksum:
            raise ConnectionError(f"bytes from {self.peer} were damaged in transit: their checksum is different")
        return content

    def _fill(self, memory: memoryview) -> None:
        while memory:
            try:
                count = self._socket.recv_into(memory)
            except TimeoutError:
                raise TimeoutError(f"{self.peer} has sent nothing for {self._timeout:g} s") from None
            except OSError as error:
                raise ConnectionError(f"the connection to {self.peer} has failed: {error}") from None
            if not count:
                raise ConnectionError(f"{self.peer} has closed its connection, or its process has ended")
            memory = memory[count:]

    def _explain(self, error: OSError) -> None:
        """Raise the error that the other process sent before it closed the connection, or else the socket's error."""
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{self.peer} has received nothing for {self._timeout:g} s") from None
        try:
            self._socket.settimeout(1.0)
            while True:
                self.receive(*Kind)  # messages before the error
        except PeerError:
            raise
        except OSError:
            raise ConnectionError(f"the connection to {self.peer} has failed: {error}") from None

    def share(self, nbytes: int) -> None:
        """Create shared memory that the other process can read."""
        fd = os.memfd_create("fsdp.weights")
        try:
            os.ftruncate(fd, max(nbytes, 1))
            self._memory = mmap.mmap(fd, max(nbytes, 1))
            self.send(Kind.MEMORY, fd=fd)
        finally:
            os.close(fd)

    def map_shared(self) -> None:
        """Map the memory that the other process shares."""
        head, fds, *_ = socket.recv_fds(self._socket, _HEAD.size, 1)
        if len(head) != _HEAD.size or _HEAD.unpack(head)[1] != Kind.MEMORY or len(fds) != 1:
            raise ConnectionError(f"{self.peer} has sent no shared memory")
        try:
            self._memory = mmap.mmap(fds[0], 0)
        finally:
            os.close(fds[0])

    def send_part(self, part: Tensor) -> None:
        """Send a part of a bucket. Wait first if shared memory, or a socket, still contains too many earlier parts."""
        memory = part.numpy().data
        if self._memory is None:
            self.settle(_LEAD - 1)
            self.send(Kind.PART, memory)
        else:
            self.settle()
            self._memory[: len(memory)] = memory
            self.send_json(Kind.PART, len(memory))
        self._sent += 1

    def settle(self, most: int = 0) -> None:
        """Wait until at most `most` parts are not confirmed. The timeout restarts with each confirmed part."""
        while self._sent > most:
            self.receive(Kind.TAKEN)
            self._sent -= 1

    def receive_part(self, into: Tensor) -> Tensor:
        """Return a part of a bucket: the beginning of `into`, or shared memory, valid until `taken` is called."""
        if self._memory is None:
            return self.receive(Kind.PART, most=len(into), into=into)
        nbytes = self.receive_json(Kind.PART)
        if type(nbytes) is not int or not 0 <= nbytes <= len(self._memory):
            raise ConnectionError(f"{self.peer} has sent a part of {nbytes!r} bytes")
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes) if nbytes else _EMPTY

    def taken(self) -> None:
        self.send(Kind.TAKEN)

    def end(self, text: str = "") -> None:
        """Close the connection; if there is a text, the other process raises an error that contains the text."""
        with suppress(OSError):
            if text:
                self._socket.settimeout(1.0)
                self.send(Kind.ERROR, text.encode())
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also ends waits of other threads
        self._socket.close()
        self._memory = None


def is_shared_memory(address: str) -> bool:
    """Return whether an address is the name of a process on this host, instead of ``host:port``."""
    return ":" not in address


def local_address(name: str) -> str:
    """Return the address of a local socket without a file, which the system frees with the process."""
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("shared memory without files requires Linux. Use a socket: SocketSink(address, secret)")
    return f"\0fsdp.weights {os.getuid()} {name}"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"an address has the form host:port, got {address!r}")
    return host.strip("[]"), int(port)


def key_of(secret: str | bytes | None, address: str) -> bytes:
    """Return the secret as bytes; raise ValueError if it is missing and the address is ``host:port``."""
    key = secret.encode() if isinstance(secret, str) else secret or b""
    if not isinstance(key, bytes):
        raise TypeError(f"secret must be a str or bytes, got {type(secret).__name__}")
    if not key and not is_shared_memory(address):
        raise ValueError("a socket requires a secret, with which both processes know each other")
    return key


def connect(address: str, key: bytes, connect_timeout: float, timeout: float) -> Link:
    """Connect to a process; wait up to `connect_timeout` seconds until the process listens."""
    is_local, until = is_shared_memory(address), time.monotonic() + connect_timeout
    peer = f"the process at {address}"
    while True:
        left = max(until - time.monotonic(), 0.1)
        try:
            if is_local:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(left)
                connection.connect(local_address(address))
            else:
                connection = socket.create_connection(split_address(address), left)
            break
        except OSError as error:  # the process does not listen yet, or its host cannot be reached
            if time.monotonic() > until:
                raise ConnectionError(f"no process listens at {address} for {connect_timeout:g} s: {error}") from None
            time.sleep(0.05)
    link = Link(connection, peer, timeout)
    try:
        link.require_own_user()
        hello = bytes(link.receive(Kind.CHALLENGE).numpy())
        if hello[0] != _VERSION:
            raise ConnectionError(f"{peer} uses version {hello[0]} of the protocol, and this process {_VERSION}")
        own = secrets.token_bytes(_NONCE_BYTES)
        link.send(Kind.ANSWER, own + _proof(key, b"client", hello + own))
        if not hmac.compare_digest(bytes(link.receive(Kind.WELCOME).numpy()), _proof(key, b"server", own + hello)):
            raise PermissionError(f"{peer} does not know the secret")
    except BaseException:
        link.end()
        raise
    return link


def accept(link: Link, key: bytes) -> None:
    """Require that the other process of a new connection knows the secret and, if local, belongs to the same user."""
    link.require_own_user()
    hello = bytes([_VERSION]) + secrets.token_bytes(_NONCE_BYTES)
    link.send(Kind.CHALLENGE, hello)
    answer = bytes(link.receive(Kind.ANSWER, most=1024).numpy())
    own, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"client", hello + own)):
        raise PermissionError("the secret is wrong")
    link.send(Kind.WELCOME, _proof(key, b"server", own + hello))


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key or b"\0", role + nonces, "sha256")


class SocketSink(Sink):
    """Sends weights to a process listening at a TCP address, see `receive`. Every rank creates this sink.

    Each rank has a separate connection, and sends its own parts with checksums. Connections are not encrypted: use
    a trusted network.

    Args:
        address: ``host:port``.
        secret: the secret of the receiving process, which is not sent.
        timeout: the number of seconds to wait until the receiver has confirmed another part, or the last bucket.
        connect_timeout: the number of seconds to wait until the receiver listens; None (default) uses `timeout`.

    Raises:
        ConnectionError: if the receiver does not listen at the address, has another secret, ends, or reports an error.
        PermissionError, TimeoutError: if the receiver cannot prove that it knows the secret; if it is too slow.
    """

    receives = "parts"
    takes_changes = True

    def __init__(
        self, address: str, secret: str | bytes, *, timeout: float = 300.0, connect_timeout: float | None = None
    ) -> None:
        split_address(address)
        self._start(address, key_of(secret, address), timeout, connect_timeout)

    def _start(self, address: str, key: bytes, timeout: float, connect_timeout: float | None) -> None:
        self._address, self._key = address, key
        self._timeouts = (timeout if connect_timeout is None else connect_timeout), timeout
        self._link: Link | None = None

    def open(self, plan: WeightPlan) -> None:
        self._is_accepted = False
        self._link = link = connect(self._address, self._key, *self._timeouts)
        content = plan.to_json() if plan.rank == 0 else None
        numbers = {"stream": plan.stream, "rank": plan.rank, "ranks": len(plan.parts)}
        link.send_json(Kind.STREAM, {**numbers, "plan": content})
        if is_shared_memory(self._address):
            link.share(plan.largest_part(plan.parts[plan.rank]) + CHANGES_BYTES)

    def bucket(self, number: int, tensor: Tensor) -> None:
        self._accepted().send_part(tensor.cpu())

    def _accepted(self) -> Link:
        """Return the link; the first call waits until the receiver has accepted the stream of all ranks."""
        if self._link is None:
            raise ConnectionError(f"this rank has no connection to {self._address}")
        if not self._is_accepted:
            self._link.receive(Kind.ACCEPTED)
            self._is_accepted = True
        return self._link

    def close(self, error: BaseException | None) -> None:
        link, text = self._link, "" if error is None else text_of(error)
        if link is None:
            return
        try:
            if error is None:
                self._accepted().settle()
                link.send(Kind.END)
                link.receive(Kind.DONE)
        finally:
            self._link = None
            link.end(text)


CHANGES_BYTES = 64  # by which an encoded part can exceed the part itself


class SharedMemorySink(SocketSink):
    """Sends weights through shared memory to a process of the same user on the same host. Every rank creates this sink.

    Each rank creates shared memory for its largest part of a bucket. The memory has no name, and is freed when both
    processes have closed it or ended. Linux only.

    Args:
        name: the name of the receiver, see `receive`; without ``:``.
        timeout, connect_timeout: as for `SocketSink`.

    Raises:
        ConnectionError: if the receiver does not listen, ends, or reports an error.
        RuntimeError: on systems other than Linux.
    """

    def __init__(self, name: str, *, timeout: float = 300.0, connect_timeout: float | None = None) -> None:
        if not name or not is_shared_memory(name):
            raise ValueError(
                f"the name of a receiver in shared memory must not be empty or contain a colon, got {name!r}"
            )
        local_address(name)
        self._start(name, b"", timeout, connect_timeout)


def listening(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket for an address, and the address with the actual port."""
    if is_shared_memory(address):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place: Any = local_address(address)
    else:
        host, port = split_address(address)
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from None
    if is_shared_memory(address):
        return listener, address
    return listener, f"{split_address(address)[0]}:{listener.getsockname()[1]}"


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
