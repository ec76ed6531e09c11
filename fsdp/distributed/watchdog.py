"""The watchdog reports the positions of all ranks when a rank waits too long, and the reason why a rank ended.

Each rank listens on a socket. The ranks exchange the addresses once, through the store of the default process group.
Every second, a thread checks the current wait of this rank in a collective. If the wait is too long, the thread
requests the positions of all ranks, creates a report (`positions`), and sends the report to all ranks; one rank of each
machine prints it. Before an exception ends a rank, the rank notifies all other ranks. The watchdog uses no collectives.

The socket listens on the interface that connects this rank to the first rank, or on the loopback device. A message is
answered only if it contains a secret that the ranks have exchanged through the store. The end of a process is detected
in Python's exit functions; an exception that ended the process is then `sys.last_value`.

A separate thread answers requests, whatever the main thread does, unless the process is stopped or the main thread
holds the GIL. On NCCL the host waits only in exchanges between hosts: in each backward, and in calls such as
`fsdp.save`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import socketserver
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from fsdp.distributed import communicator, passes
from fsdp.distributed.communicator import named
from fsdp.distributed.journal import journals, settings
from fsdp.distributed.positions import Position, Report, last_place, longest_wait
from fsdp.distributed.reports import Event, Kind
from fsdp.distributed.roll_call import RollCall
from fsdp.distributed.switches import WATCHDOG, is_off

_TICK = 1.0  # seconds between two checks of this rank's waits
_ANSWER = 1.0  # timeout for an answer in seconds; the answering thread only answers
_AT_ONCE = 64  # the maximum number of ranks to ask in parallel
_LAST_WORDS = 0.5  # seconds to wait for the notification of a rank that has closed its connections
_SLACK = 2.0  # factor of the longest recent wait, because a later wait may take as long
_POLL = 0.1  # seconds between two checks; the end of a process may wait so long for the listening thread
_LOOPBACK = "127.0.0.1"
_STUCK = 10.0  # seconds after which a wait on closed connections is assumed never to end

# Why a rank does not answer.
_GONE = "is gone: its process has ended"
_KILLED = (
    "Look at what this rank has printed; if there is no error in it, the process was killed, as the kernel does when "
    "memory runs out (dmesg says so)"
)
_LEFT = "its program ended without this call, which every rank must make"
_SILENT = "gives no answer: it is stopped, or cannot be reached (process {pid} on {host})"
_ABSENT = "has wrapped no model yet"
_CLOSED = "is gone: it has closed its connections, and had wrapped no model yet"

Message = dict[str, Any]


class Address(NamedTuple):
    """The socket on which a rank listens, and the secret that each message to this rank must contain."""

    host: str
    pid: int
    ip: str
    port: int
    secret: str


@dataclass
class _Looks:
    """The state of checks of the main thread's waits, or of the waits of other threads, such as a saving thread.

    Attributes:
        asked: the last checked wait.
        patience: the maximum duration of this wait before a report, in seconds.
        lost: the seconds of this wait in which the process did not run, because it was stopped or the machine was busy.
        reported_at: the time of the last report, or of the last decision that no report was due.
        report: the last report.
        questioned_at: the time of the last request from another rank for its report, which all ranks receive.
        questioned_by: the rank that sent this request.
    """

    is_aside: bool
    asked: communicator.Wait | None = None
    patience: float = 0.0
    lost: float = 0.0
    reported_at: float = 0.0
    report: str = ""
    questioned_at: float = 0.0
    questioned_by: int = 0

    def pass_time(self, seconds: float) -> None:
        """Record the duration of a tick in seconds."""
        self.lost += max(0.0, seconds - _TICK)

    def give_time(self) -> None:
        """Double the patience before the next request to all ranks."""
        self.patience, self.lost = 2 * self.patience, 0.0


class Watchdog:
    """The thread for checks of this rank's waits, and the socket for requests of other ranks.

    Args:
        rank, world_size: of the default process group.
        store: the store of the default process group, for the exchange of addresses and of the reasons of ends.
        number: the number of earlier watchdogs of this process group.
    """

    def __init__(self, rank: int, world_size: int, store: Any, number: int = 0) -> None:
        self._rank = rank
        self._store = dist.PrefixStore(f"fsdp.watchdog {number}", store)
        self._others = [each for each in range(world_size) if each != rank]
        self._addresses: dict[int, Address] = {}  # the known addresses of other ranks
        self._ends: dict[int, str] = {}  # the reasons why ranks have ended
        self._exits: dict[int, str] = {}  # the exit statuses of processes on this machine, if known
        self._looks = (_Looks(is_aside=False), _Looks(is_aside=True))
        self._given_up = ""  # the reason for aborted waits; empty if waits were not aborted
        self._meetings: dict[tuple[int, ...], int] = {}  # the number of completed meetings (`recover`), by ranks
        self._roll_call = RollCall(rank, world_size, self._tell_some)
        self._stopped = threading.Event()
        self._server = _Server((_own_ip(world_size, store), 0), self._answer)
        ip, port = self._server.server_address[:2]
        own = Address(socket.gethostname(), os.getpid(), str(ip), port, self._server.secret)
        self._store.set(f"address of {rank}", json.dumps(own))
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=[_POLL], name="fsdp answers", daemon=True),
            threading.Thread(target=self._run, name="fsdp watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(_TICK)

    def announce_end(self, error: BaseException, trace: TracebackType | None) -> None:
        """Notify the other ranks that an exception ends this rank, unless the cause is on another rank."""
        text = " ".join(str(error).split())
        place = "".join(f" ({place})" for place in last_place(trace))
        end = f"{type(error).__name__}{': ' * bool(text)}{text[:600]}{place}"
        if isinstance(error, communicator.OtherRankError):
            self._log(Kind.FOLLOWED, str(error))
        else:
            self._log(Kind.END if isinstance(error, Exception) else Kind.STOPPED, end)
        if not isinstance(error, communicator.CollectiveError):
            self._tell_all(self._end(self._rank, f"was ended by {end}"))

    def explain(self, closed_by: int | None) -> str:
        """Return why a collective did not complete: the ended ranks, or the positions of all ranks; empty if unknown.

        Args:
            closed_by: the rank that closed its connection, if known.
        """
        if closed_by is not None:  # first, because a launcher soon ends all ranks if a rank dies
            ended = self._exit(closed_by) and f": that has ended{self._exit(closed_by)}"
            self._log(Kind.CLOSED, f"rank {closed_by} has closed its connections, as when its process ends{ended}")
        until = time.monotonic() + _LAST_WORDS
        while not (known := self._given_up or self._roll_call.difference or self._ends) and time.monotonic() < until:
            time.sleep(0.02)
        if isinstance(known, str):
            return known
        if self._ends:
            return "; ".join(f"rank {rank} {end}" for rank, end in sorted(self._ends.items()))
        wait = communicator.waits.get(threading.get_ident())
        for looks in self._looks:
            if wait is not None and looks.asked is wait and looks.reported_at > wait.since:
                return looks.report
        answers = self._tell_all({})
        for answer in answers.values():  # a rank may abort its waits before other ranks know the reason
            if isinstance(answer, dict) and answer.get("given up"):
                return str(answer["given up"])
        silent = [rank for rank, answer in answers.items() if answer in (_GONE, _ABSENT)]
        ends = {rank: end for rank in silent if (end := self._last_word(rank))}
        if not ends and closed_by is not None and answers.get(closed_by) == _ABSENT:
            ends = {closed_by: _CLOSED}
        elif not ends:  # otherwise, ranks without a reason may have ended because of ranks with a reason
            ends = {rank: self._gone(rank) for rank in silent if answers[rank] == _GONE}
        for rank, end in ends.items():  # ranks that wait for this rank will fail too, and report these reasons
            self._tell_all(self._end(rank, end))
        return "; ".join(f"rank {rank} {end}" for rank, end in ends.items())

    def _exit(self, rank: int) -> str:
        """Return the exit status of a rank's process as text; empty if unknown, for example on another machine."""
        address = self._addresses.get(rank)
        if not self._exits.get(rank) and address is not None and address.host == socket.gethostname():
            self._exits[rank] = _exit_of(address.pid)
        return self._exits.get(rank, "")

    def _gone(self, rank: int) -> str:
        address, seen = self._addresses[rank], self._exit(rank)
        why = _LEFT.capitalize() if seen == " with status 0" else _KILLED if seen else f"{_KILLED}, or {_LEFT}"
        return f"{_GONE}{seen} (process {address.pid} on {address.host}). {why}"

    def _end(self, rank: int, end: str) -> Message:
        """Return a message with the reason why a rank ended; store the reason for ranks that start to listen later."""
        with suppress(RuntimeError):  # the process of the store may have ended too
            self._store.set(f"end of {rank}", end)
        return {"end": end, "rank": rank}

    def _last_word(self, rank: int) -> str:
        """Return the stored reason why a rank ended; empty if no rank stored a reason."""
        with suppress(RuntimeError):
            if self._store.check([key := f"end of {rank}"]):
                return self._store.get(key).decode()
        return ""

    def _run(self) -> None:
        pause, next_look = _TICK, 0.0
        logged: set[str] = set()
        before = time.monotonic()
        while not self._stopped.wait(_TICK):
            now = time.monotonic()
            for looks in self._looks:
                looks.pass_time(now - before)
            if self._unknown and now > next_look:
                self._find_unknown()
                pause, next_look = 2 * pause, now + pause
            if _patience is None:
                before = time.monotonic()
                continue
            self._roll_call.tick()
            known = {text for each in list(journals) for text in (each.difference, each.warning) if text}
            for text in known - logged:
                self._log(Kind.DIFFERENCE, text)
            logged |= known
            for looks in self._looks:
                if found := longest_wait(looks.is_aside):
                    self._look(looks, found[1], now, _patience)
            before = time.monotonic()

    def _look(self, looks: _Looks, wait: communicator.Wait, now: float, patience: float) -> None:
        """Report the positions of all ranks, or abort the wait because of a known difference, if it takes too long."""
        if now - wait.since > _TICK and self._roll_call.difference:
            self._give_up(self._roll_call.difference)  # ranks that know the difference do not make the collective
            return
        if wait is not looks.asked:
            looks.asked, looks.patience = wait, patience + _SLACK * communicator.longest[looks.is_aside]
            looks.lost = 0.0
        # The ranks wait in turn, so that a single rank asks: other ranks receive the report before their turn.
        turn = _TICK * self._rank / (1 + len(self._addresses))
        # Multiple turns may fall between two ticks. A rank that is asked leaves the report to the asking rank.
        is_questioned = now < looks.questioned_at + 2 * _ANSWER  # the time for the answers and for the report
        waited = now - max(wait.since, looks.reported_at) - looks.lost
        if waited > looks.patience + turn and not is_questioned:
            answers = self._ask_all(looks.is_aside)
            if looks.reported_at >= now or (looks.questioned_at >= now and looks.questioned_by < self._rank):
                return  # another rank has begun at the same time
            report = Report(self._rank, answers)
            if report.is_due:
                first, positions = str(report).split("\n", 1)
                is_new = looks.reported_at < wait.since or not looks.report.endswith(positions)
                shown = str(report) if is_new else f"{first} Nothing has changed since the last report."
                self._tell_all(self._show(str(report), looks.is_aside, self._printers(answers), shown))
                if settings.raises:
                    self._give_up(str(report))
            else:
                looks.reported_at = now
                looks.give_time()

    def _printers(self, answers: Mapping[int, Position | str]) -> list[int]:
        """Return the ranks that print a report: this rank, and the first answering rank of each other machine."""
        hosts = {rank: address.host for rank, address in self._addresses.items()} | {self._rank: socket.gethostname()}
        first = {hosts[rank]: rank for rank in sorted(answers, reverse=True) if not isinstance(answers[rank], str)}
        return list((first | {hosts[self._rank]: self._rank}).values())

    @property
    def _unknown(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._addresses]

    def _find_unknown(self) -> None:
        with suppress(RuntimeError):  # the process of the store may have ended
            for rank in self._unknown:
                if self._store.check([key := f"address of {rank}"]):
                    self._addresses[rank] = Address(*json.loads(self._store.get(key)))

    def _show(self, report: str, is_aside: bool, printers: Sequence[int], shown: str) -> Message:
        """Record a report and print it if this rank is in `printers`; return the message for other ranks."""
        looks = self._looks[is_aside]
        looks.report, looks.reported_at = report, time.monotonic()
        looks.give_time()
        if self._rank in printers:
            print(shown, file=sys.stderr, flush=True)
        self._log(Kind.WAIT, report)
        return {"report": report, "aside": is_aside, "printers": printers, "shown": shown}

    def _log(self, kind: Kind, text: str) -> None:
        if _folder:
            Event(kind, text, self._rank).write(_folder)

    def _give_up(self, reason: str, among: Iterable[int] | None = None) -> None:
        """Abort the waits of this rank, in all groups or in the groups with only ranks from `among`."""
        self._given_up = reason
        everyone = [self._rank, *self._others]
        for one in communicator.communicators_among(everyone if among is None else among):
            one.give_up()

    def meet(self, ranks: Sequence[int], why: str, state: Any) -> dict[int, Any]:
        """Collective. Abort current waits of all ranks for each other, and return the state of each rank.

        Args:
            ranks: the participating ranks, including this rank.
            why: the text of the error that other ranks raise in an aborted wait.
            state: the state of this rank, as JSON data.
        """
        key = tuple(sorted(ranks))
        number = self._meetings.get(key, 0)
        self._log(Kind.RECOVERY, self._given_up or why)
        self._tell_all({"meeting": number, "ranks": key, "why": why}, key)
        self._give_up(self._given_up or why, key)
        names = {rank: f"meeting {number} of {zlib.crc32(repr(key).encode())}: {rank}" for rank in key}
        self._store.set(names[self._rank], json.dumps(state))
        arrival = SimpleNamespace(wait=lambda: self._await_all(names))  # awaited like a collective
        communicator.finish([arrival], "the meeting of all ranks in fsdp.recover()")
        self._meetings[key] = number + 1
        self._given_up = ""
        return {rank: json.loads(self._store.get(name)) for rank, name in names.items()}

    def _await_all(self, names: Mapping[int, str]) -> None:
        """Block until each rank sets its name in the store.

        Raises:
            RuntimeError: if a rank ended, or does not leave a wait on closed connections: gloo (seen in torch 2.13)
                does not notify a sender if a peer requests a message and then closes the connection.
        """
        begun = time.monotonic()
        next_look = begun + _TICK
        while late := [rank for rank, name in names.items() if not self._store.check([name])]:
            time.sleep(_POLL)
            if time.monotonic() > next_look:
                answers = self._tell_some(late, {"where": False})
                if gone := [rank for rank, answer in answers.items() if answer == _GONE]:
                    raise RuntimeError(f"{named(gone)} {_GONE}")
                for rank, answer in answers.items():
                    known = {} if isinstance(answer, str) else answer
                    if known.get("waits_for") and min(known["seconds"], time.monotonic() - begun) > _STUCK:
                        raise RuntimeError(
                            f"rank {rank} still waits for {known['waits_for']}, although its connections are closed. "
                            "End it, and start the job again from its last checkpoint"
                        )
                next_look = time.monotonic() + _TICK

    def _answer(self, message: Message) -> Message:
        if "end" in message:
            self._ends[message["rank"]] = message["end"]
        elif "report" in message:
            self._show(message["report"], message["aside"], message["printers"], message["shown"])
            if settings.raises:
                self._give_up(message["report"])
        elif "meeting" in message:
            time.sleep(_POLL)  # see `_await_all`: meanwhile other ranks send the messages requested last
            if message["meeting"] == self._meetings.get(tuple(message["ranks"]), 0) and not self._given_up:
                self._give_up(message["why"], message["ranks"])
        elif "where" in message:
            if "asker" in message:
                looks = self._looks[message["where"]]
                looks.questioned_by, looks.questioned_at = message["asker"], time.monotonic()
            return asdict(Position.here(message["where"]))
        elif message:
            return self._roll_call.answer(message)
        return {"given up": self._given_up}

    def _ask_all(self, is_aside: bool) -> dict[int, Position | str]:
        answers: dict[int, Position | str] = {self._rank: Position.here(is_aside)}
        for rank, answer in self._tell_all({"where": is_aside, "asker": self._rank}).items():
            known = self._ends.get(rank, self._gone(rank) if answer == _GONE else answer)
            answers[rank] = known if isinstance(known, str) else Position.from_json(known)
        return answers

    def _tell_all(self, message: Message, among: Iterable[int] | None = None) -> dict[int, Message | str]:
        """Return the answer of each other rank, or of the ranks `among`, to a message; a text if there is no answer."""
        self._find_unknown()
        ranks = list(self._addresses) if among is None else [*among]
        return dict.fromkeys(self._unknown, _ABSENT) | self._tell_some(ranks, message)

    def _tell_some(self, ranks: Sequence[int], message: Message) -> dict[int, Message | str]:
        """Return the answers like `_tell_all`, for the ranks whose addresses are known."""
        known, answers = [rank for rank in ranks if rank in self._addresses], dict[int, Message | str]()
        for first in range(0, len(known), _AT_ONCE):
            answers |= _tell({rank: self._addresses[rank] for rank in known[first : first + _AT_ONCE]}, message)
        return answers


class _Server(socketserver.ThreadingTCPServer):
    """Answers a line of JSON with a line of JSON, if the request contains the secret."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Callable[[Message], Message]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.answer, self.secret = answer, secrets.token_hex(16)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, because the asking rank reports a missing answer."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _ANSWER

    def handle(self) -> None:
        server, message = cast(_Server, self.server), json.loads(self.rfile.readline(1 << 20))
        if hmac.compare_digest(message.pop("secret"), server.secret):
            self.wfile.write(json.dumps(server.answer(message)).encode() + b"\n")


def _tell(addresses: Mapping[int, Address], message: Message) -> dict[int, Message | str]:
    """Return the answer of each rank to a message, or a text with the reason if there is no answer.

    All ranks are asked in parallel, without threads, because threads cannot be started while the process ends.
    """
    answers = {rank: _no_answer(address) for rank, address in addresses.items()}
    until = time.monotonic() + _ANSWER
    # Errors of this process, such as too many open files, leave some or all ranks without an answer.
    with suppress(OSError), selectors.DefaultSelector() as ready, ExitStack() as stack:
        for rank, address in addresses.items():
            try:
                kind = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
                connection = stack.enter_context(socket.socket(kind))
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.connect((address.ip, address.port))
                unsent = json.dumps({**message, "secret": address.secret}).encode() + b"\n"
                ready.register(connection, selectors.EVENT_WRITE, _Talk(rank, unsent))
            except OSError as error:
                answers[rank] = _no_answer(address, error)
        # What has arrived is read even if this thread had to wait so long for a core.
        while ready.get_map() and (events := ready.select(max(0.0, until - time.monotonic()))):
            for key, _ in events:
                connection, talk = cast(socket.socket, key.fileobj), key.data
                try:
                    is_over = talk.go_on(connection)
                    if is_over:
                        answers[talk.rank] = json.loads(talk.heard)
                    elif not talk.unsent:
                        ready.modify(connection, selectors.EVENT_READ, talk)
                except (OSError, ValueError) as error:
                    is_over, answers[talk.rank] = True, _no_answer(addresses[talk.rank], error)
                if is_over:
                    ready.unregister(connection)
    return answers


def _no_answer(address: Address, error: Exception | None = None) -> Message | str:
    is_elsewhere = address.host != socket.gethostname() and ip_address(address.ip).is_loopback  # not reachable
    is_gone = isinstance(error, ConnectionRefusedError) and not is_elsewhere
    return _GONE if is_gone else _SILENT.format(**address._asdict())


@dataclass
class _Talk:
    """A message to a rank in flight, and the part of the answer received so far."""

    rank: int
    unsent: bytes
    heard: bytes = b""

    def go_on(self, connection: socket.socket) -> bool:
        """Send or receive the next part, and return whether the answer is complete."""
        if self.unsent:
            self.unsent = self.unsent[connection.send(self.unsent) :]
            return False
        part = connection.recv(1 << 16)
        self.heard += part
        return not part or part.endswith(b"\n")


def _exit_of(pid: int) -> str:
    """Return the exit status of a process on this machine until its parent reaps it; empty if unknown."""
    with suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":
            status = int(fields[48])
            by = signal.Signals(status & 127).name if status & 127 else ""
            return f" by {by}" if by else f" with status {status >> 8}"
    return ""


def _own_ip(world_size: int, store: Any) -> str:
    """Return the IP address at which other ranks reach this rank: loopback if all ranks are on this machine."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == str(world_size):
        return _LOOPBACK
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if host := getattr(store, "host", os.environ.get("MASTER_ADDR", "")):  # "" is the loopback device
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 1))  # sends nothing
                return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return _LOOPBACK


_patience: float | None = None if is_off(WATCHDOG) else 5.0
_folder = os.environ.get("FSDP_REPORTS", "")
watchdogs: dict[Any, Any] = communicator.made_once_for_groups()  # by default group
_started: dict[Any, int] = communicator.made_once_for_groups()  # the number of started watchdogs, by default group


def set_watchdog(
    patience: float | None = 5.0,
    *,
    raises: bool = False,
    reports: str | Path | None = None,
    replicas_every: int = 1000,
) -> None:
    """Set how long a rank waits in a collective before the watchdog reports the positions of all ranks and the cause.

    Call this function on every rank.

    Args:
        patience: the number of seconds in addition to twice the longest recent wait, or to the time between two recent
            waits if longer (at most ten seconds). None stops the watchdog, its threads and its socket. Waits are then
            not reported, errors of collectives do not explain why other ranks have ended, and optimizer steps are not
            compared. The environment variable FSDP_WATCHDOG=0 has the same effect from the start.
        raises: if True, every rank also raises a `CollectiveError` with the report, in its current wait or in the next
            collective. Use a patience that exceeds all work of a single rank while the other ranks wait. Afterwards,
            the gloo groups of sharded models are unusable until `recover` reconnects them. Groups of other
            backends, for example NCCL, use their own timeouts. In addition, if some ranks have changed shards or
            gradients between steps and other ranks have not, an error is raised instead of a warning.
        reports: an optional folder to which each rank writes its reports and the reason of its end, for `python -m fsdp
            diagnose`. The default is the folder set before, or FSDP_REPORTS in the environment.
        replicas_every: the number of backwards between two comparisons of replicas, each of which reads all shards.

    Raises:
        ValueError: if `patience` or `replicas_every` is not positive.
    """
    global _patience, _folder
    if patience is not None and not patience > 0:
        raise ValueError(f"set_watchdog: patience is a positive number of seconds, or None for never, got {patience}")
    if replicas_every < 1:
        raise ValueError(f"set_watchdog: replicas_every is a positive number of backwards, got {replicas_every}")
    _patience, _folder = patience, str(reports or _folder)
    settings.raises, settings.replicas_every = raises, replicas_every
    communicator.measure_anew()
    if patience is None:
        for journal in list(journals):
            journal.difference = ""
        stop(dist.group.WORLD if dist.is_available() else None)
    else:
        _prepare_for_end()
        if communicator.communicators:  # a model was wrapped without a watchdog
            watch()


def is_watching() -> bool:
    """Return whether ranks compare their operations and report their positions (`set_watchdog`)."""
    return _patience is not None


def watch() -> None:
    """Start the watchdog of the default process group, unless it is running or `set_watchdog` has disabled it."""
    group = dist.group.WORLD if dist.is_available() else None
    if _patience is None or group is None or group in watchdogs:
        return
    stop()
    if group.size() == 1 or "fake" in communicator.backend_names(group).values():
        return  # the other ranks do not exist, or are only simulated
    passes.path.forget()
    store = cast(Any, group.get_group_store())
    if store is None:
        return  # ranks are threads, as in torch's tests
    number = _started.get(group, 0)
    try:
        watchdogs[group] = Watchdog(dist.get_rank(), dist.get_world_size(), store.clone(), number)
    except (OSError, RuntimeError, NotImplementedError) as error:  # no sockets, or an unsupported class of store
        warnings.warn(f"no watchdog was started, so the reasons of waits will not be reported: {error}", stacklevel=2)
    _started[group] = number + 1
    _prepare_for_end()


def stop(*groups: Any) -> None:
    """Stop the watchdogs of some groups (default: all groups)."""
    for group in groups or list(watchdogs):
        if (watchdog := watchdogs.pop(group, None)) is not None:
            watchdog.stop()


def meet(ranks: Sequence[int], why: str, state: Any) -> dict[int, Any]:
    """Collective, see `Watchdog.meet`.

    Raises:
        RuntimeError: if there is no watchdog, or if a rank ended.
    """
    watchdog = watchdogs.get(dist.group.WORLD)
    if watchdog is not None:
        return cast("dict[int, Any]", watchdog.meet(ranks, why, state))
    raise RuntimeError("ranks cannot report failures to each other, because there is no watchdog here")


def _explain(closed_by: int | None) -> str:
    watchdog = watchdogs.get(dist.group.WORLD)
    return "" if watchdog is None else cast(str, watchdog.explain(closed_by))


@cache
def _prepare_for_end() -> None:
    communicator.before_groups_end(_end)
    os.register_at_fork(after_in_child=watchdogs.clear)  # the child process has none of the threads


def _end() -> None:
    """Announce the exception that ends this process, if any, and stop the watchdogs."""
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):  # an interactive session continues after exceptions
        announce(error)
    stop()


def announce(error: BaseException) -> None:
    """Notify the other ranks of the exception that ends this rank."""
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch()  # this rank may have wrapped no model yet, while other ranks wait for it
    for watchdog in watchdogs.values():
        with suppress(Exception):
            watchdog.announce_end(error, error.__traceback__)


communicator.explain = _explain
