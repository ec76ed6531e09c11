"""Processes and threads that receive weights, beside the ranks that send them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.weights import Receiver, SharedMemorySink, Sink, SocketSink, receive
from tests.helpers.forked import Forked

SECRET = "only we know"
KINDS = ["socket", "shared memory"]
BOUND = 100.0  # seconds, for what takes tenths of a second: the machine may be busy


def sink_to(address: str, secret: str = SECRET, timeout: float = BOUND, connect_timeout: float = BOUND) -> Sink:
    """A sink for a receiver at an address of either kind."""
    if ":" in address:
        return SocketSink(address, secret, timeout=timeout, connect_timeout=connect_timeout)
    return SharedMemorySink(address, timeout=timeout, connect_timeout=connect_timeout)


def address_for(kind: str) -> str:
    """An address to listen at, which no other receiver has."""
    return "127.0.0.1:0" if kind == "socket" else f"test {os.getpid()} {os.urandom(4).hex()}"


def told_by_first(value: Any) -> Any:
    """Collective. The value of rank 0."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


class Engine:
    """A thread of rank 0 that receives; `result` waits for the outcome of each update."""

    def __init__(self, receiver: Receiver, consume: Callable[[Any], Any]) -> None:
        self._outcomes: queue.Queue[Any] = queue.Queue()
        self._receiver, self._consume = receiver, consume
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                update = self._receiver.next()
                try:
                    self._outcomes.put(self._consume(update))
                except (OSError, ValueError) as error:
                    self._outcomes.put(error)
        except OSError:
            return  # the receiver was closed

    def result(self) -> Any:
        """The next outcome, which may be an exception."""
        return self._outcomes.get(timeout=BOUND)


@contextmanager
def engine(
    kind: str, consume: Callable[[Any], Any] | None = None, **options: Any
) -> Iterator[tuple[str, Engine | None]]:
    """Collective. A receiver on rank 0 and its address, which all ranks have."""
    if dist.get_rank():
        yield told_by_first(None), None
        return
    secret = SECRET if kind == "socket" else None
    with receive(address_for(kind), secret=secret, timeout=BOUND, **options) as receiver:
        running = Engine(receiver, consume or (lambda update: update.state()))
        yield told_by_first(receiver.address), running


def _save_updates(address: str, stop_after: int) -> None:
    """Receive updates, and end at a bucket in the middle of one."""
    secret = SECRET if ":" in address else None
    with receive(address, secret=secret, timeout=BOUND, keep=True) as receiver:
        print(receiver.address, flush=True)
        while True:
            update = receiver.next(timeout=BOUND)
            try:
                for bucket, _ in update.buckets():
                    if bucket == stop_after:
                        os.kill(os.getpid(), 9)
            except (OSError, ValueError) as error:
                print("error:", error, flush=True)
            print("received", flush=True)


@contextmanager
def program(address: str, stop_after: int = -1) -> Iterator[tuple[Forked, Any, str]]:
    """A process that receives without a process group, its output, and its address."""
    with Forked(_save_updates, address, stop_after) as process:
        try:
            yield process, process.stdout, process.stdout.readline().strip()
        finally:
            process.kill()


def clones(update: Any) -> dict[str, Tensor]:
    """The tensors of an update, taken from its buckets."""
    return {name: torch.clone(value) for name, value in update}
