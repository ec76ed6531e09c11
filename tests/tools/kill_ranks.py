"""Kills ranks of a training at random moments while it saves, and goes on from what is there, again and again.

    python -m tests.tools.kill_ranks --kills 40 --ranks 4

It is one training. Each time it is started with a random number of ranks, loads the newest checkpoint, compares it bit
for bit with what was noted when it was saved, trains and saves in one of four ways, and one rank or all are killed.
Exits with 1 if anything but the newest complete state was loaded; the seed repeats what was drawn, but not the moments.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, checkpoint, optim_utils

WIDTH, LAYERS = 192, 4
WAYS = ["fsdp.save", "fsdp.save, keep=2", "Saver", "Saver, keep=2"]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    model = FullyShardedDataParallel(nn.Sequential(*map(FullyShardedDataParallel, layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Collective. Of all weights and state, gathered in another way than checkpoints are written; on every rank."""
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None) or {}
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, state in named["state"].items():
        tensors |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        value: Tensor = tensors[name].contiguous().flatten()
        found.update(name.encode() + bytes(value.view(torch.uint8).numpy().data))
    return found.hexdigest()


def train(rank: int, world_size: int, folder: Path, way: str) -> None:
    """A rank: goes on from the newest checkpoint until it is killed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    output = os.open(folder / "output", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 2)  # what survivors say of those that are gone
    model, optimizer = made()
    step, is_same = resumed(folder, model, optimizer)
    _note(folder, rank, f"loaded {step} {is_same}")
    saver = checkpoint.Saver()
    while True:
        step += 1
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        values = {"step": step, "digest": digest(model, optimizer)}
        options: dict[str, Any] = {"step": step, "keep": 2} if "keep" in way else {}
        path = folder / ("steps" if "keep" in way else "one")
        _note(folder, rank, f"begun {step}")
        if "Saver" in way:
            saver.save(path, model, optimizer, values=values, **options)
            saver.wait()
        else:
            fsdp.save(path, model, optimizer, values=values, **options)
        _note(folder, rank, f"done {step}")


def resumed(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, bool]:
    """Collective. The newest step that can be loaded, and whether its bits are those that were saved."""
    found: dict[int, Path] = {}
    for place in (folder / "one", checkpoint.newest(folder / "steps")):
        with suppress(FileNotFoundError):  # nothing was saved there yet
            found |= {fsdp.load(place, nn.Module(), strict=False).values["step"]: place} if place else {}
    if not found:
        return 0, True
    values = fsdp.load(found[max(found)], model, optimizer).values
    return values["step"], values["digest"] == digest(model, optimizer)


def _note(folder: Path, rank: int, text: str) -> None:
    """By the first rank, for the process that kills."""
    if rank == 0:
        with (folder / "notes").open("a") as file:
            file.write(text + "\n")


def _notes(folder: Path) -> list[list[str]]:
    path = folder / "notes"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _last(notes: Sequence[Sequence[str]], what: str) -> int:
    return max((int(note[1]) for note in notes if note[0] == what), default=0)


def kill_once(draw: random.Random, folder: Path, max_ranks: int, seconds: float) -> str:
    """Start the training, let it load and save, kill it at some moment, and say where that was."""
    world_size, way = draw.randint(1, max_ranks), draw.choice(WAYS)
    (folder / "store").unlink(missing_ok=True)
    before = len(_notes(folder))
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=train, args=(rank, world_size, folder, way)) for rank in range(world_size)]
    for each in ranks:
        each.start()
    while [note[0] for note in _notes(folder)[before:]] in (
        [],
        ["loaded"],
        ["loaded", "begun"],
        ["loaded", "begun", "done"],
    ):
        if any(not each.is_alive() for each in ranks):
            _end(ranks)
            raise RuntimeError(f"{way} with {world_size} ranks ended by itself")
        time.sleep(0.005)
    time.sleep(draw.random() * seconds)
    victims = ranks if draw.random() < 0.5 else [draw.choice(ranks)]
    for each in victims:
        each.kill()
    for each in victims:
        each.join()
    _end([each for each in ranks if each not in victims], patience=20)
    notes = _notes(folder)
    where = "in a save" if _last(notes, "begun") > _last(notes, "done") else "between saves"
    return f"{way}; {'all' if victims is ranks else 'one'} of {world_size}; {where}"


def _end(ranks: Sequence[BaseProcess], patience: float = 0) -> None:
    """Whoever is left is given some time to notice that others are gone; then it is killed as well."""
    deadline = time.monotonic() + patience
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
        if each.is_alive():
            print(f"  a rank was still waiting after {patience:g} s")
        each.kill()
        each.join()


def problems(notes: Sequence[Sequence[str]]) -> list[str]:
    """What the notes say that must not be: a load of other bits, or of an older state than was known to be saved."""
    found, done, begun = [], 0, 0
    for what, step, *rest in notes:
        if what == "loaded":
            if rest != ["True"]:
                found.append(f"step {step} was loaded with other bits than it was saved with")
            if not done <= int(step) <= begun:
                found.append(f"step {step} was loaded, and steps {done} to {begun} could have been")
            done = begun = int(step)
        elif what == "begun":
            begun = int(step)
        else:
            done = int(step)
    return found


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4, help="at most")
    parser.add_argument("--seconds", type=float, default=0.1, help="of the second save at most, before a kill")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="kills-"))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo", "fsdp"])
    print(f"seed {seed}, in {folder}")
    counts: Counter[str] = Counter()
    for number in range(1, options.kills + 1):
        told = kill_once(draw, folder, options.ranks, options.seconds)
        counts[told.rsplit("; ", 1)[1]] += 1
        print(f"kill {number:3}: {told}; the last save begun was of step {_last(_notes(folder), 'begun')}")
    kill_once(draw, folder, options.ranks, options.seconds)  # loads what the last one has left
    found = problems(_notes(folder))
    print(f"{options.kills} kills: {dict(counts)}; every load was of the newest state, to the last bit: {not found}")
    print("\n".join(found) or f"removed {folder}")
    if found:
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
