"""The watchdog says where every rank is when one of them waits too long, and why a rank has ended.

Each rank listens on a socket of its own; the ranks give each other the addresses once, through the store of the default
process group. A thread looks every second for how long this rank has waited in a collective. If that is too long, it
asks all ranks where they are, makes a report of the answers (`positions`), and gives it to all; the first rank of each
machine prints it. A rank that is ended by an exception tells the others before it goes. Nothing of this goes through
the collectives that it is about.

The socket listens on the interface by which the ranks reach the first rank, or on the loopback device. A message is
answered only if it contains a secret that the ranks have exchanged through the store. The end of a process is noticed
when Python runs the functions that are registered for it; an exception that ended the process is then `sys.last_value`.

A thread answers, so a rank can be asked whatever its main thread does, unless it is stopped or holds the interpreter's
lock. On NCCL the host waits only where hosts exchange messages: in each backward, and in calls such as `fsdp.save`.
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

_TICK = 1.0  # seconds between two looks at how long this rank waits
_ANSWER = 1.0  # seconds that a rank is given to answer; its thread has nothing else to do
_AT_ONCE = 64  # ranks that are asked together
_LAST_WORDS = 0.5  # seconds that one waits for a word of a rank that has closed its connections
_SLACK = 2.0  # of the longest wait so far: what took long before may take long again
_POLL = 0.1  # seconds that the end of a process may have to wait for the thread that listens
_LOOPBACK = "127.0.0.1"
_STUCK = 10.0  # seconds, after which a wait whose connections are closed does not end any more

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
    """An address says where a rank listens, and what it wants to hear before it answers."""

    host: str
    pid: int
    ip: str
    port: int
    secret: str


@dataclass
class _Looks:
    """Examinations of the waits of the main thread, or of the waits of other threads, such as a saving thread.

    Attributes:
        asked: the wait that was looked at last.
        patience: seconds that it is given.
        lost: seconds of it in which this process did not run: its machine is busy, or it was stopped.
        reported_at: when where all ranks were was last said, or not worth saying.
        report: what was said then.
        questioned_at: when another rank last asked this one for its own report, which comes to all.
        questioned_by: that rank.
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
        """Note that a tick has taken so long."""
        self.lost += max(0.0, seconds - _TICK)

    def give_time(self) -> None:
        """Give twice the patience before the next look at all ranks."""
        self.patience, self.lost = 2 * self.patience, 0.0


class Watchdog:
    """The thread that looks after this rank's waits, and the socket on which it answers others.

    Args:
        rank, world_size: of the default process group.
        store: of the default process group, to exchange addresses; it is not used any more when all are known.
        number: of watchdogs that this process group has had before.
    """

    def __init__(self, rank: int, world_size: int, store: Any, number: int = 0) -> None:
        self._rank = rank
        self._store = dist.PrefixStore(f"fsdp.watchdog {number}", store)
        self._others = [each for each in range(world_size) if each != rank]
        self._addresses: dict[int, Address] = {}  # of those others that have told theirs
        self._ends: dict[int, str] = {}  # how ranks have ended
        self._exits: dict[int, str] = {}  # how processes of this machine have ended, if that could be seen
        self._looks = (_Looks(is_aside=False), _Looks(is_aside=True))
        self._given_up = ""  # waiting, because of this
        self._meetings: dict[tuple[int, ...], int] = {}  # of these ranks, to recover, that have ended
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
        """Tell the other ranks that an exception ends this one, unless it comes of what happened on another."""
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
        """Return why a collective did not complete: which ranks have ended, or where all were; empty if unknown.

        Args:
            closed_by: the rank that has closed its connection, if that is known.
        """
        if closed_by is not None:  # before anything else: a launcher is about to end all ranks, if one has died
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
        for answer in answers.values():  # a rank gives up before all others have heard why
            if isinstance(answer, dict) and answer.get("given up"):
                return str(answer["given up"])
        silent = [rank for rank, answer in answers.items() if answer in (_GONE, _ABSENT)]
        ends = {rank: end for rank in silent if (end := self._last_word(rank))}
        if not ends and closed_by is not None and answers.get(closed_by) == _ABSENT:
            ends = {closed_by: _CLOSED}
        elif not ends:  # those that have said nothing may have ended because of those that have
            ends = {rank: self._gone(rank) for rank in silent if answers[rank] == _GONE}
        for rank, end in ends.items():  # those that wait for this one will find it gone as well, and are to know these
            self._tell_all(self._end(rank, end))
        return "; ".join(f"rank {rank} {end}" for rank, end in ends.items())

    def _exit(self, rank: int) -> str:
        """Return how the process of a rank has ended, if that can be seen: soon after, on this machine."""
        address = self._addresses.get(rank)
        if not self._exits.get(rank) and address is not None and address.host == socket.gethostname():
            self._exits[rank] = _exit_of(address.pid)
        return self._exits.get(rank, "")

    def _gone(self, rank: int) -> str:
        address, seen = self._addresses[rank], self._exit(rank)
        why = _LEFT.capitalize() if seen == " with status 0" else _KILLED if seen else f"{_KILLED}, or {_LEFT}"
        return f"{_GONE}{seen} (process {address.pid} on {address.host}). {why}"

    def _end(self, rank: int, end: str) -> Message:
        """Return the message that says how a rank has ended, also for ranks that begin to listen later."""
        with suppress(RuntimeError):  # the store may be gone, too
            self._store.set(f"end of {rank}", end)
        return {"end": end, "rank": rank}

    def _last_word(self, rank: int) -> str:
        """Return how a rank has ended, if it or another one could say so."""
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
        """Say where all ranks are, or have them raise what is known, if this rank has waited for too long."""
        if now - wait.since > _TICK and self._roll_call.difference:
            self._give_up(self._roll_call.difference)  # who knows it does not come
            return
        if wait is not looks.asked:
            looks.asked, looks.patience = wait, patience + _SLACK * communicator.longest[looks.is_aside]
            looks.lost = 0.0
        # In turn, so that one asks for all: the others have its report before it is theirs to ask.
        turn = _TICK * self._rank / (1 + len(self._addresses))
        # More than one turn may come between two ticks: a rank that is asked leaves the report to the asking rank.
        is_questioned = now < looks.questioned_at + 2 * _ANSWER  # for the answers, and for telling them
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
        """Return the ranks that print a report: the first of each machine that has answered."""
        hosts = {rank: address.host for rank, address in self._addresses.items()} | {self._rank: socket.gethostname()}
        first = {hosts[rank]: rank for rank in sorted(answers, reverse=True) if not isinstance(answers[rank], str)}
        return list((first | {hosts[self._rank]: self._rank}).values())

    @property
    def _unknown(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._addresses]

    def _find_unknown(self) -> None:
        with suppress(RuntimeError):  # the store may be gone, with its process
            for rank in self._unknown:
                if self._store.check([key := f"address of {rank}"]):
                    self._addresses[rank] = Address(*json.loads(self._store.get(key)))

    def _show(self, report: str, is_aside: bool, printers: Sequence[int], shown: str) -> Message:
        """Note a report, print it if this rank is to, and return the message with which other ranks do the same."""
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
        """End all waits, or those for some ranks alone."""
        self._given_up = reason
        everyone = [self._rank, *self._others]
        for one in communicator.communicators_among(everyone if among is None else among):
            one.give_up()

    def meet(self, ranks: Sequence[int], why: str, state: Any) -> dict[int, Any]:
        """Collective, whatever some of the ranks wait for, which they give up. Return the state of each rank.

        Args:
            ranks: those that meet, this one among them.
            why: the others raise this, if they wait for each other.
            state: of this rank; JSON.
        """
        key = tuple(sorted(ranks))
        number = self._meetings.get(key, 0)
        self._log(Kind.RECOVERY, self._given_up or why)
        self._tell_all({"meeting": number, "ranks": key, "why": why}, key)
        self._give_up(self._given_up or why, key)
        names = {rank: f"meeting {number} of {zlib.crc32(repr(key).encode())}: {rank}" for rank in key}
        self._store.set(names[self._rank], json.dumps(state))
        arrival = SimpleNamespace(wait=lambda: self._await_all(names))  # is awaited like a collective
        communicator.finish([arrival], "the meeting of all ranks in fsdp.recover()")
        self._meetings[key] = number + 1
        self._given_up = ""
        return {rank: json.loads(self._store.get(name)) for rank, name in names.items()}

    def _await_all(self, names: Mapping[int, str]) -> None:
        """Block until each rank has set its name in the store.

        Raises:
            RuntimeError: if one is gone, or does not come out of a wait whose connections are closed: gloo (seen in
                torch 2.13) forgets to tell a sender that a peer, which had asked for a message, has closed its own.
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
                            f"rank {rank} does not come out of waiting for {known['waits_for']}, though its "
                            "connections are closed. End it, and start the job again from its last checkpoint"
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
            time.sleep(_POLL)  # see `_await_all`: now the others answer what they were asked for last
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
        """Return what each other rank, or each of some, has answered to a message; a text for one that has not."""
        self._find_unknown()
        ranks = list(self._addresses) if among is None else [*among]
        return dict.fromkeys(self._unknown, _ABSENT) | self._tell_some(ranks, message)

    def _tell_some(self, ranks: Sequence[int], message: Message) -> dict[int, Message | str]:
        """Return the same for the ranks whose addresses are known."""
        known, answers = [rank for rank in ranks if rank in self._addresses], dict[int, Message | str]()
        for first in range(0, len(known), _AT_ONCE):
            answers |= _tell({rank: self._addresses[rank] for rank in known[first : first + _AT_ONCE]}, message)
        return answers


class _Server(socketserver.ThreadingTCPServer):
    """Answers one line of JSON with another, if it has the secret in it."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Callable[[Message], Message]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.answer, self.secret = answer, secrets.token_hex(16)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave it to the one who asked."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _ANSWER

    def handle(self) -> None:
        server, message = cast(_Server, self.server), json.loads(self.rfile.readline(1 << 20))
        if hmac.compare_digest(message.pop("secret"), server.secret):
            self.wfile.write(json.dumps(server.answer(message)).encode() + b"\n")


def _tell(addresses: Mapping[int, Address], message: Message) -> dict[int, Message | str]:
    """Return the answer of each rank to a message, or a text for a rank that gives none.

    All ranks are asked together, without threads, because no thread can be started any more when the process ends.
    """
    answers = {rank: _no_answer(address) for rank, address in addresses.items()}
    until = time.monotonic() + _ANSWER
    with selectors.DefaultSelector() as ready, ExitStack() as stack:
        for rank, address in addresses.items():
            connection = socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET)
            stack.enter_context(connection).setblocking(False)
            try:
                with suppress(BlockingIOError):
                    connection.connect((address.ip, address.port))
                unsent = json.dumps({**message, "secret": address.secret}).encode() + b"\n"
                ready.register(connection, selectors.EVENT_WRITE, _Talk(rank, unsent))
            except OSError as error:
                answers[rank] = _no_answer(address, error)
        while ready.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in ready.select(left):
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
    is_elsewhere = address.host != socket.gethostname() and ip_address(address.ip).is_loopback  # not to be reached
    is_gone = isinstance(error, ConnectionRefusedError) and not is_elsewhere
    return _GONE if is_gone else _SILENT.format(**address._asdict())


@dataclass
class _Talk:
    """A message to a rank that is on its way, and what has come of the answer."""

    rank: int
    unsent: bytes
    heard: bytes = b""

    def go_on(self, connection: socket.socket) -> bool:
        """Send or receive a part, and return whether the answer is complete."""
        if self.unsent:
            self.unsent = self.unsent[connection.send(self.unsent) :]
            return False
        part = connection.recv(1 << 16)
        self.heard += part
        return not part or part.endswith(b"\n")


def _exit_of(pid: int) -> str:
    """Return how a process of this machine has ended, as long as its parent has not asked; empty if unknown."""
    with suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":
            status = int(fields[48])
            by = signal.Signals(status & 127).name if status & 127 else ""
            return f" by {by}" if by else f" with status {status >> 8}"
    return ""


def _own_ip(world_size: int, store: Any) -> str:
    """Return the address by which other ranks reach this one: the loopback device's if all are on this machine."""
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
watchdogs: dict[Any, Any] = communicator.made_once_for_groups()  # by the default group
_started: dict[Any, int] = communicator.made_once_for_groups()  # how many were started, by the default group


def set_watchdog(
    patience: float | None = 5.0,
    *,
    raises: bool = False,
    reports: str | Path | None = None,
    replicas_every: int = 1000,
) -> None:
    """Set how long a rank waits in a collective before a report says where all ranks are, and why they wait.

    Call it on every rank.

    Args:
        patience: seconds, beyond twice the longest of the last waits, or the time between two of them (ten seconds at
            most) if that is longer. None ends the watchdog, with its threads and its socket: nothing is watched, the
            errors of collectives do not say why other ranks have ended, and the steps of optimizers are not compared.
            The environment variable FSDP_WATCHDOG=0 is the same, from the beginning.
        raises: then give up waiting: every rank raises a `CollectiveError` with the report, where it waits now or in
            its next collective. Give a patience that is longer than anything that one rank does alone. The process
            groups on gloo that sharded models use are of no use afterwards, until `recover` has connected them anew.
            Others, with NCCL, are left to their own timeouts. Besides, that some ranks have changed shards or gradients
            between steps, and others not, is an error and no warning.
        reports: a folder, in which each rank writes what it reports and why it ends, for `python -m fsdp diagnose`.
            None: the one that the environment names by FSDP_REPORTS, or that was set before.
        replicas_every: backwards between two comparisons of replicas, each of which reads all shards once.

    Raises:
        ValueError: if the patience or `replicas_every` is not positive.
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
        if communicator.communicators:  # a model was wrapped while there was no watchdog
            watch()


def is_watching() -> bool:
    """Return whether ranks compare what they do, and say where they are (`set_watchdog`)."""
    return _patience is not None


def watch() -> None:
    """Start the watchdog of the default process group, if it has none and `set_watchdog` has not ended it."""
    group = dist.group.WORLD if dist.is_available() else None
    if _patience is None or group is None or group in watchdogs:
        return
    stop()
    if group.size() == 1 or "fake" in communicator.backend_names(group).values():
        return  # there are no other ranks, or they are only simulated
    passes.path.forget()
    store = cast(Any, group.get_group_store())
    if store is None:
        return  # ranks are threads, as in torch's own tests
    number = _started.get(group, 0)
    try:
        watchdogs[group] = Watchdog(dist.get_rank(), dist.get_world_size(), store.clone(), number)
    except (OSError, RuntimeError, NotImplementedError) as error:  # no sockets here, or a store of another kind
        warnings.warn(f"no watchdog tells why ranks wait for each other: {error}", stacklevel=2)
    _started[group] = number + 1
    _prepare_for_end()


def stop(*groups: Any) -> None:
    """Stop the watchdogs of some groups, by default of all: they were destroyed, or end with the process."""
    for group in groups or list(watchdogs):
        if (watchdog := watchdogs.pop(group, None)) is not None:
            watchdog.stop()


def meet(ranks: Sequence[int], why: str, state: Any) -> dict[int, Any]:
    """Collective: see `Watchdog.meet`.

    Raises:
        RuntimeError: if there is no watchdog, or a rank is gone.
    """
    watchdog = watchdogs.get(dist.group.WORLD)
    if watchdog is not None:
        return cast("dict[int, Any]", watchdog.meet(ranks, why, state))
    raise RuntimeError("the ranks have no way to tell each other that one has failed: there is no watchdog here")


def _explain(closed_by: int | None) -> str:
    watchdog = watchdogs.get(dist.group.WORLD)
    return "" if watchdog is None else cast(str, watchdog.explain(closed_by))


@cache
def _prepare_for_end() -> None:
    communicator.before_groups_end(_end)
    os.register_at_fork(after_in_child=watchdogs.clear)  # threads do not come along


def _end() -> None:
    """Announce the exception that ends this process, if there is one, and stop."""
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):  # an interactive session goes on after exceptions
        announce(error)
    stop()


def announce(error: BaseException) -> None:
    """Tell the other ranks which exception ends this one."""
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch()  # it may have wrapped nothing yet, and others wait for it all the same
    for watchdog in watchdogs.values():
        with suppress(Exception):
            watchdog.announce_end(error, error.__traceback__)


communicator.explain = _explain
