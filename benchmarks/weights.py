"""Weights for another process: time, memory and collectives, compared to loops over FSDP2's full tensors.

    python -m benchmarks.weights
    python -m benchmarks.weights --gigabytes 0.25 --ranks 4 --bucket-mb 16
    python -m benchmarks.weights --gigabytes 0.1 --mbits 1000           # on two machines, with a slow link

A GPT is wrapped block by block, and all its weights are made available on the first rank (`ours`), on every rank
(`ours-all`), or in another process on this machine (`ours-socket`, `ours-shm`). `fsdp2-loop` calls `full_tensor()` for
each parameter, `fsdp2-state` collects the full state dict on the first rank and broadcasts it; no contestant uses the
weights. Times are interleaved in the same run. Memory is the increase of peak resident memory, in separate processes
for each contestant. `changes` prints the bytes of an update after a step of AdamW in bfloat16. Exits with 1 if a rank
of `ours` needs more than two buckets by more than 32 MB. With `--mbits`, the ranks are on two machines
(`benchmarks.two_machines`), the process that receives is on the first one, and no memory is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fsdp
from benchmarks._contestants import FSDP2, OURS
from benchmarks._machines import Machine, NotAllowedError, two_machines
from benchmarks._measure import NOTHING_KEPT, count_collectives, operations, profiled, ratio, table, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._states import (
    SLACK,
    TINY,
    config_of,
    growth,
    interleaved,
    parser_of,
    seconds,
    sizes_of,
    tokens,
    wrapped,
)
from examples.gpt.model import GPTConfig

LOOP, STATE, ALL, SOCKET, SHARED = "fsdp2-loop", "fsdp2-state", "ours-all", "ours-socket", "ours-shm"
SECRET = "benchmark"
# A process that receives all updates, and prints its address first.
RECEIVER = """
import sys
from fsdp.weights import receive
address, secret = sys.argv[1:]
with receive(address, secret=secret) as receiver:
    print(receiver.address, flush=True)
    for update in receiver:
        for _ in update.buckets():
            pass
"""

Send = Callable[[nn.Module, int, str], Any]  # of a model, the bytes of a bucket, the address of a receiver


@dataclass(frozen=True)
class Cost:
    """The cost of an update on a rank."""

    growth: int  # bytes resident at the highest, above those before
    collectives: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("weights", "Weights for another process", 0.5, WAYS)
    parser.add_argument("--bucket-mb", type=int, default=32, help="size of a bucket (%(default)s)")
    parser.add_argument("--mbits", type=float, help="of a link between two machines with the ranks")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        try:
            machines = stack.enter_context(two_machines()) if options.mbits else ()
        except NotAllowedError as reason:
            print(f"skipped, this system makes no two machines: {reason}")
            return 0
        for machine in machines:
            machine.limit(options.mbits)
        return _compare(options, machines)


def _compare(options: argparse.Namespace, machines: Sequence[Machine]) -> int:
    host = machines[0].address if machines else "127.0.0.1"
    config, bucket = config_of(options.gigabytes), options.bucket_mb * 1_000_000
    full, unit = sizes_of(config)
    print(
        f"A GPT of {config.num_layers} blocks, {full / 1e9:.2f} GB in float32, largest unit {unit / 1e6:.0f} MB, "
        f"{-(-full // bucket)} buckets of {options.bucket_mb} MB or less.",
        flush=True,
    )
    warn_if_busy()
    measured = [] if options.no_memory or machines else options.only
    costs = {
        name: run_ranks(_measure, options.ranks, name, config, bucket, environment=NOTHING_KEPT) for name in measured
    }
    rows = [
        [name, str(rank), f"{cost.growth / 1e6:.0f}", f"{cost.collectives:.0f}"]
        for name, found in costs.items()
        for rank, cost in enumerate(found)
    ]
    print(table(["", "rank", "peak MB", "collectives"], rows), flush=True)
    job = options.only, config, bucket, options.rounds, host
    times = run_ranks(_time, options.ranks, *job, machines=machines)[0]
    base = [values[0] for values in times.get(LOOP, next(iter(times.values())))]
    rows = [
        [name, f"{sorted(own)[len(own) // 2] / full * 1e9:.2f}", ratio(own, base)]
        for name, own in ((name, [values[0] for values in found]) for name, found in times.items())
    ]
    print(table(["", "s/GB", f"over {LOOP}"], rows), flush=True)
    print(run_ranks(_changes, options.ranks, config, bucket, host, machines=machines)[0], flush=True)
    holds = all(cost.growth <= 2 * bucket + SLACK for name in (OURS, ALL) for cost in costs.get(name, ()))
    if not holds:
        print("Ours needs more memory than two buckets.")
    return 0 if holds else 1


# --- on a rank


def _measure(name: str, config: GPTConfig, bucket: int) -> Cost:
    with _receiver(name) as address:
        WAYS[name](_wrapped(name, TINY), bucket, address)  # what is loaded at first use is not the model's
        model = _wrapped(name, config)
        WAYS[name](model, bucket, address)  # makes the plan
        _, grown = growth(lambda: WAYS[name](model, bucket, address))
        with profiled() as trace:
            WAYS[name](model, bucket, address)
    return Cost(grown, count_collectives(operations(trace), dist.get_world_size()))


def _time(names: Sequence[str], config: GPTConfig, bucket: int, rounds: int, host: str) -> dict[str, list[list[float]]]:
    models = {library: wrapped(library, config) for library in {_library(name) for name in names}}

    def measured(name: str) -> list[float]:
        with _receiver(name, host) as address:
            model = models[_library(name)]
            WAYS[name](_wrapped(name, TINY), bucket, address)
            return [seconds(lambda: WAYS[name](model, bucket, address))[1]]

    return interleaved(measured, names, rounds)


def _changes(config: GPTConfig, bucket: int, host: str) -> str:
    """Return the bytes of an update of changes, and the bytes of the changed positions and values."""
    model = _wrapped(OURS, config).to(torch.bfloat16)
    snapshot = fsdp.weights.Snapshot()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    with _receiver("changes", host) as address:
        sink = fsdp.weights.SocketSink(address, SECRET)
        for _ in range(3):
            before = [param.detach().clone() for param in model.parameters()]
            model(tokens()).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            changed = sum(int((one != param).sum()) for one, param in zip(before, model.parameters(), strict=True))
            _, took = seconds(lambda: fsdp.stream_weights(model, sink, bucket_bytes=bucket, since=snapshot))
    found = torch.tensor([changed, snapshot.sent_nbytes, sum(param.numel() for param in model.parameters())])
    dist.all_reduce(found)
    changed, sent, total = found.tolist()
    return (
        f"changes: {changed / total:.1%} of the elements, {sent / 1e6:.1f} MB sent, {sent / (6 * changed + 1):.2f} of "
        f"their positions (4 bytes) and values (2 bytes), {sent / (2 * total):.1%} of all weights, {took:.2f} s"
    )


def _library(name: str) -> str:
    return FSDP2 if name in (LOOP, STATE) else OURS


def _wrapped(name: str, config: GPTConfig) -> nn.Module:
    return wrapped(_library(name), config)


@contextmanager
def _receiver(name: str, host: str = "127.0.0.1") -> Iterator[str]:
    """Collective. A process that receives, started by the first rank for ways that have one, and its address."""
    process, told = None, [""]
    if name in (SOCKET, SHARED, "changes") and dist.get_rank() == 0:
        listen = "fsdp benchmark" if name == SHARED else f"{host}:0"
        program = RECEIVER.replace("secret=secret", "secret=secret, keep=True") if name == "changes" else RECEIVER
        command = [sys.executable, "-c", program, listen, "" if name == SHARED else SECRET]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        told = [process.stdout.readline().strip() if process.stdout else ""]
    dist.broadcast_object_list(told)
    try:
        yield told[0]
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _send_to_first(model: nn.Module, bucket: int, _: str) -> None:
    sink = _Ignored() if dist.get_rank() == 0 else None
    fsdp.stream_weights(model, sink, bucket_bytes=bucket)


def _send_to_all(model: nn.Module, bucket: int, _: str) -> None:
    fsdp.stream_weights(model, _Ignored(), bucket_bytes=bucket)


class _Ignored(fsdp.weights.Sink):
    """Receives buckets, and does nothing with them."""

    def bucket(self, number: int, tensor: torch.Tensor) -> None:
        return


def _send_by_sockets(model: nn.Module, bucket: int, address: str) -> None:
    fsdp.stream_weights(model, fsdp.weights.SocketSink(address, SECRET), bucket_bytes=bucket)


def _send_by_memory(model: nn.Module, bucket: int, address: str) -> None:
    fsdp.stream_weights(model, fsdp.weights.SharedMemorySink(address), bucket_bytes=bucket)


def _loop(model: nn.Module, *_: Any) -> None:
    for param in model.parameters():
        param.full_tensor()  # type: ignore[attr-defined]


def _state(model: nn.Module, *_: Any) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    for name, param in model.named_parameters():
        value: Any = state[name] if state else torch.empty(param.shape, dtype=param.dtype)
        dist.broadcast(value, 0)


WAYS: dict[str, Send] = {
    OURS: _send_to_first,
    ALL: _send_to_all,
    SOCKET: _send_by_sockets,
    SHARED: _send_by_memory,
    LOOP: _loop,
    STATE: _state,
}


if __name__ == "__main__":
    sys.exit(main())
