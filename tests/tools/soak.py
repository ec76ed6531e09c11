"""A long training with random exceptions and restarts, which ends with the weights of an undisturbed one.

    python -m tests.tools.soak --steps 2000 --save-every 50 --ranks 4

It is one training of many lives. In each a random number of ranks loads the newest checkpoint and trains on; now and
then one raises an exception, in forward, in backward or in its step, and all go on by `fsdp.recover`, or, if that
cannot be, from the newest checkpoint. A life ends at a random step, of all or of one that is killed. The same batches
train an unsharded model: in the end the weights are compared. Live tensors, threads and open files must not grow within
a life, but for what each recovery leaves. The seed repeats what is drawn.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, checkpoint
from fsdp.distributed.communicator import CollectiveError

WIDTH, BATCH = 32, 12  # samples, which 1, 2, 3 and 4 ranks share evenly
PATIENCE = 600  # seconds, for one life
PER_RECOVERY = {"threads": 2, "files": 0, "tensors": 0, "memory": 0}  # torch does not let go of a group's threads
ALLOWED = {"memory": 8 << 20}  # growth within a life


@dataclass(frozen=True)
class Life:
    """A life of the training: where it ends, and what happens on the way.

    Attributes:
        last: it ends when this step has been taken.
        killed: the rank that is killed then; None: all end.
        failures: by step, the rank that raises an exception, and where.
    """

    world_size: int
    last: int
    killed: int | None
    failures: dict[int, tuple[int, str]]

    @classmethod
    def drawn(cls, draw: random.Random, begin: int, steps: int, max_ranks: int) -> Life:
        """Return a life that begins after some step."""
        world_size = draw.randint(1, max_ranks)
        last = min(steps, begin + draw.randint(steps // 40 + 2, steps // 5 + 2))
        is_killed = world_size > 1 and last < steps and draw.random() < 0.5
        chosen = [step for step in range(begin, last - 1) if world_size > 1 and draw.random() < 0.04 + 2 / steps]
        failures = {step: (draw.randrange(world_size), draw.choice(["forward", "backward", "step"])) for step in chosen}
        return cls(world_size, last, draw.randrange(world_size) if is_killed else None, failures)


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # noise near zero is not blown up


@functools.cache
def target() -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / WIDTH**0.5


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the samples of one step, of all ranks."""
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 + step))
    return inputs, torch.tanh(inputs @ target())


def undisturbed(steps: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of an unsharded model after all batches."""
    model = plain_model().to(dtype)
    optimizer = optimizer_of(model)
    for step in range(steps):
        inputs, wanted = (each.to(dtype) for each in batch(step))
        optimizer.zero_grad()
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()
    return model.state_dict()


# --- on a rank --------------------------------------------------------------------------------------------------------


class Training:
    """The training on one rank, which counts the steps that it has taken."""

    def __init__(self, life: Life) -> None:
        self._life, self._failed = life, set[int]()
        layers = plain_model()
        for number, layer in enumerate(layers):
            layers[number] = FullyShardedDataParallel(layer)
        self.model = FullyShardedDataParallel(layers)
        self.optimizer = optimizer_of(self.model)
        self.optimizer.register_step_pre_hook(lambda *_: self._fail("step"))
        self.optimizer.register_step_post_hook(self._count)
        self.taken = 0

    def _count(self, *_: Any) -> None:
        self.taken += 1

    def _fail(self, where: str) -> None:
        """Raise an exception where it is this rank's turn, once."""
        if self._life.failures.get(self.taken) == (dist.get_rank(), where) and self.taken not in self._failed:
            self._failed.add(self.taken)
            raise ValueError(f"a bad {where}")

    def step(self) -> None:
        inputs, wanted = (each.chunk(self._life.world_size)[dist.get_rank()] for each in batch(self.taken))
        self.optimizer.zero_grad()
        self._fail("forward")
        out = self.model(inputs)
        if out.requires_grad:
            out.register_hook(lambda _: self._fail("backward"))
        (out - wanted).square().mean().backward()
        self.optimizer.step()

    def load(self, path: Path | None) -> None:
        assert path is not None
        self.taken = fsdp.load(path, self.model, self.optimizer).step or 0

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def live(rank: int, life: Life, folder: Path, save_every: int) -> None:
    """Train as one rank, from the newest checkpoint to the end of this life."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    output = os.open(folder / f"output {rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 2)
    try:
        store = dist.FileStore(str(folder / "store"), life.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=life.world_size)
        _train(rank, life, folder, save_every)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - it ends the process anyhow
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _train(rank: int, life: Life, folder: Path, save_every: int) -> None:
    training, recovered, loaded = Training(life), 0, 0
    newest = checkpoint.newest(folder / "steps")
    if newest is None:
        fsdp.save(folder / "steps", training.model, training.optimizer, step=0)
    else:
        training.load(newest)
    begun = saved = training.taken
    while True:
        try:
            if training.taken % save_every == 0 and training.taken > saved:
                fsdp.save(folder / "steps", training.model, training.optimizer, step=training.taken, keep=2)
                saved = training.taken
                _note(
                    folder / f"usage {rank}",
                    usage() | {"step": training.taken - begun, "recovered": recovered, "loaded": loaded},
                )
            elif training.taken < life.last:
                training.step()
            else:
                break
        except (ValueError, CollectiveError):
            try:
                fsdp.recover(training.model)
                recovered += 1
            except RuntimeError as error:  # one was still in the backward of a step that others had taken
                if "Load the last checkpoint" not in str(error):
                    raise
                training.load(checkpoint.newest(folder / "steps"))
                loaded += 1
    if rank == life.killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if life.killed is not None:
        training.step()  # which does not end without that rank
    weights = training.weights()
    if rank == 0:
        torch.save({"step": training.taken, "weights": weights}, folder / "weights")


def usage() -> dict[str, int]:
    """Return what must not grow in a process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "tensors": sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def _note(path: Path, values: dict[str, int]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


# --- in the parent ----------------------------------------------------------------------------------------------------


def run(life: Life, folder: Path, save_every: int) -> list[dict[str, Any]]:
    """Let a training live, and return what each rank has used, at each save."""
    for old in [folder / "store", *folder.glob("usage *"), *folder.glob("output *")]:
        old.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=live, args=(rank, life, folder, save_every)) for rank in range(life.world_size)]
    for each in ranks:
        each.start()
    until = time.monotonic() + PATIENCE
    for each in ranks:
        each.join(max(0.0, until - time.monotonic()))
    endings = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
    expected = [0] * life.world_size
    if life.killed is not None:
        expected = [-signal.SIGKILL if rank == life.killed else 1 for rank in range(life.world_size)]
    if endings != expected:
        texts = "".join(f"\n--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(folder.glob("output *")))
        raise RuntimeError(f"{life}: the ranks ended by {endings}, and {expected} was to come{texts}")
    return [json.loads(line) | {"rank": path.name} for path in sorted(folder.glob("usage *")) for line in path.open()]


def growth(notes: Sequence[dict[str, Any]]) -> list[str]:
    """Return what has grown in a life, of what is noted at each save but the first, beyond what each recovery leaves.

    What is there for a moment, as while the watchdog answers a rank, is not there in all notes of the later half.
    """
    found = []
    for rank in sorted({note["rank"] for note in notes}):
        own = [note for note in notes if note["rank"] == rank][1:]
        if len(own) < 2:
            continue
        for what, per_recovery in PER_RECOVERY.items():
            rest = [note[what] - per_recovery * (note["recovered"] + note["loaded"]) for note in own]
            middle = len(rest) // 2
            before, after = min(rest[:middle]), min(rest[middle:])
            if after - before > ALLOWED.get(what, 0):
                found.append(f"{what} of {rank}, beyond what recoveries leave: {rest} at steps of this life {own}")
    return found


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights."""
    return max((ours[name].double() - value.double()).abs().max().item() for name, value in theirs.items())


def soak(steps: int, save_every: int, max_ranks: int, seed: int, folder: Path) -> list[str]:
    """Train, print what happens, and return what must not be."""
    # First, so that what torch imports for the first step is there in all processes that are forked.
    wide, narrow = undisturbed(steps, torch.float64), undisturbed(steps, torch.float32)
    draw, counts, problems, begin = random.Random(seed), Counter[str](), list[str](), 0
    while begin < steps:
        life = Life.drawn(draw, begin, steps, max_ranks)
        notes = run(life, folder, save_every)
        problems += growth(notes)
        counts["lives"] += 1
        counts["killed"] += life.killed is not None
        counts["exceptions"] += len(life.failures)
        counts["loaded instead of recovered"] += max((note["loaded"] for note in notes), default=0)
        newest = checkpoint.newest(folder / "steps")
        end = "all end" if life.killed is None else f"rank {life.killed} is killed"
        print(f"steps {begin}-{life.last}, {life.world_size} ranks, {len(life.failures)} exceptions, {end}", flush=True)
        begin = steps if life.last == steps else int(str(newest).rpartition("-")[2]) if newest else 0
    found = torch.load(folder / "weights")
    noise, apart = distance(narrow, wide), distance(found["weights"], wide)
    print(f"{steps} steps, seed {seed}: {dict(counts)}")
    print(f"weights differ from an undisturbed training in float64 by {apart:.1e}, one in float32 does by {noise:.1e}")
    if found["step"] != steps or apart > 10 * noise:
        problems.append(f"the weights are not those of {steps} steps")
    return problems


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 3, 4], help="at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    problems = soak(options.steps, options.save_every, options.ranks, options.seed, folder)
    print("\n".join(problems) or "nothing has grown, and the weights are right")
    if problems:
        sys.exit(f"see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
