"""A rank of the training job: sharded training of the byte-level GPT on real text.

`examples.gpt.launch` (that is, `make train`) starts it once per rank through torchrun.
Afterwards `examples.gpt.verify` compares its output with a plain, unsharded model:

    OUT/model.pt     the consolidated weights under the plain model's names
    OUT/report.json  what was trained and measured (`Report`)
    OUT/checkpoints  the two newest checkpoints, from which any number of ranks goes on
"""

from __future__ import annotations

import io
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import fsdp
from examples.gpt.model import GPT, SIZES, Block, count_units, next_byte_loss
from examples.gpt.options import Options, parse_options
from examples.gpt.report import HeldBytes, Report, measure_held_bytes, write_whole
from examples.gpt.text import Corpus, load_corpus, training_batches, validation_batches
from fsdp import FullyShardedDataParallel

WARMUP_STEPS = 20
STEPS_BETWEEN_LOGS = 10
MAX_VALIDATION_BATCHES = 64


@dataclass(frozen=True)
class Place:
    """Where this rank is."""

    rank: int
    world_size: int
    device: torch.device

    def mean(self, value: float) -> float:
        """Collective. The mean of every rank's value."""
        return self._reduce(value, dist.ReduceOp.SUM) / self.world_size

    def max(self, value: float) -> float:
        """Collective. The largest of every rank's value."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        reduced = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, op=op)
        return reduced.item()

    def peak_bytes(self) -> int:
        """This process's memory at its highest: the GPU's, or else the whole "
        "process's."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (
            peak if sys.platform == "darwin" else peak * 1024
        )  # in bytes there, in KiB elsewhere


def join_group(options: Options) -> Place:
    """Collective. Set up the process group that torchrun described in the "
    "environment."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(
            "error: this is one rank of many. Start it with: python -m "
            "examples.gpt.launch"
        )
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return Place(dist.get_rank(), dist.get_world_size(), device)


def shard(plain: GPT) -> FullyShardedDataParallel:
    """Collective. Create a unit for each block, and a unit for all other parameters."""
    return fsdp.shard(plain, units={Block})


@torch.no_grad()
def validation_loss(model: nn.Module, batches: list[Tensor], place: Place) -> float:
    """Collective. The mean loss over all batches, which the ranks share among them."""
    model.eval()
    loss = 0.0
    for first in range(0, len(batches), place.world_size):
        # Every rank must call the model the same number of times; batches beyond the
        # end are not counted.
        index = first + place.rank
        weight = index < len(batches)
        loss += (
            weight
            * next_byte_loss(
                model, batches[min(index, len(batches) - 1)].to(place.device)
            ).item()
        )
    model.train()
    return place.mean(loss) * place.world_size / len(batches)


def learning_rate(step: int, steps: int, highest: float) -> float:
    """A linear rise over the first steps, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return highest * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return highest * (0.55 + 0.45 * math.cos(math.pi * done))


class Trainer:
    """The model, its optimizer and the bar; `run` is the training loop. Collective, as
    all of it trains.
    """

    def __init__(
        self, model: FullyShardedDataParallel, options: Options, place: Place
    ) -> None:
        self.model = model
        self.options = options
        self.place = place
        self.steps = (
            options.steps
        )  # fewer when they would take too long, see `_affordable_steps`
        # Created after wrapping: the optimizer sees a flat shard per unit.
        self.optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=0.1
        )
        self.held_bytes: HeldBytes | None = None  # known after the first step
        self.first = 0  # the step to begin with
        self.first_loss = 0.0  # on other data, before anything was trained

    @property
    def tokens_per_step(self) -> int:
        return (
            self.place.world_size
            * self.options.batch
            * SIZES[self.options.size].context
        )

    def resume(self) -> bool:
        """Load model, optimizer and step of the newest checkpoint, if requested and
        available.
        """
        newest = (
            fsdp.checkpoint.newest(self.options.out / "checkpoints")
            if self.options.resume
            else None
        )
        if newest is None:
            return False
        loaded = fsdp.load(newest, self.model, self.optimizer)
        self.first, self.first_loss = (
            1 + (loaded.step or 0),
            loaded.values["first loss"],
        )
        if self.place.rank == 0:
            print(
                f"resumed after step {loaded.step}, on {self.place.world_size} ranks",
                flush=True,
            )
        return True

    def run(self, batches: Iterator[Tensor]) -> float:
        """Train, and return the seconds that it took."""
        start = time.perf_counter()
        # Into a file rather than onto a terminal, a line now and then is enough.
        quiet = self.place.rank != 0
        interval = 0.5 if sys.stderr.isatty() else 15.0
        shown = {
            "desc": "training",
            "unit": "step",
            "disable": quiet,
            "mininterval": interval,
        }
        with tqdm(initial=self.first, total=self.steps, **shown) as bar:
            step = self.first
            while step < self.steps:
                loss = self._step(next(batches).to(self.place.device), step)
                if (step + 1) % self.options.save_every == 0:
                    self._save(step)
                step += 1
                if step % STEPS_BETWEEN_LOGS == 0 or step == self.steps:
                    seconds = self.place.max(time.perf_counter() - start)
                    self.steps = self._affordable_steps(step, seconds)
                    bar.total = self.steps
                    bar.set_postfix(
                        self._figures(loss, (step - self.first) / seconds),
                        refresh=False,
                    )
                bar.update()
        return time.perf_counter() - start

    def _step(self, windows: Tensor, step: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.steps, self.options.learning_rate)
        loss = next_byte_loss(self.model, windows)
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        if self.held_bytes is None:
            self.held_bytes = measure_held_bytes(self.model, self.optimizer)
        self.optimizer.zero_grad()
        return loss.detach()

    def _save(self, step: int) -> None:
        values = {"first loss": self.first_loss}
        fsdp.save(
            self.options.out / "checkpoints",
            self.model,
            self.optimizer,
            step=step,
            values=values,
            keep=2,
        )

    def _affordable_steps(self, step: int, seconds: float) -> int:
        # A slow machine gets a shorter run with the whole schedule in it, not a broken
        # one; where there is time enough the run depends on nothing but its options.
        # All ranks see the same seconds.
        affordable = self.first + int(
            self.options.max_seconds * (step - self.first) / seconds
        )
        return max(step, min(self.options.steps, affordable))

    def _figures(self, loss: Tensor, steps_per_second: float) -> dict[str, str]:
        return {
            "loss": f"{self.place.mean(loss.item()):.3f}",
            "tokens/s": f"{steps_per_second * self.tokens_per_step:,.0f}",
            "peak MiB/rank": f"{self.place.max(self.place.peak_bytes()) / 2**20:,.0f}",
        }


def gather_held_bytes(held: HeldBytes | None, world_size: int) -> list[HeldBytes]:
    """Collective. Every rank's measurement, by rank."""
    gathered: list[HeldBytes] = [HeldBytes(0, 0, 0)] * world_size
    dist.all_gather_object(gathered, held)
    return gathered


def save_weights(
    model: FullyShardedDataParallel, options: Options, place: Place
) -> None:
    """Collective: consolidating needs every rank, writing only the first."""
    state = model.state_dict()
    if place.rank == 0:
        content = io.BytesIO()
        torch.save({name: value.cpu() for name, value in state.items()}, content)
        write_whole(options.out / "model.pt", content.getvalue())


def train(options: Options, place: Place, corpus: Corpus) -> Report:
    """Collective. Train and save; the report is the same on all ranks."""
    config = SIZES[options.size]
    torch.manual_seed(
        options.seed
    )  # the same on all ranks: sharding does not broadcast the weights
    plain = GPT(config).to(place.device)
    unit_numels = count_units(plain)
    trainer = Trainer(shard(plain), options, place)
    windows = {"batch": options.batch, "context": config.context}
    held_out = validation_batches(
        corpus.validation, **windows, max_batches=MAX_VALIDATION_BATCHES
    )

    if not trainer.resume():
        trainer.first_loss = validation_loss(trainer.model, held_out, place)
    # Text that was not seen before the interruption, and other text on each rank.
    seed = (options.seed + trainer.first) * place.world_size + place.rank
    seconds = trainer.run(training_batches(corpus.train, **windows, seed=seed))
    last_loss = validation_loss(trainer.model, held_out, place)
    save_weights(trainer.model, options, place)
    return Report(
        config=config,
        unit_numels=unit_numels,
        held_bytes=gather_held_bytes(trainer.held_bytes, place.world_size),
        first_loss=trainer.first_loss,
        last_loss=last_loss,
        data=options.data,
        max_bytes=options.max_bytes,
        digest=corpus.digest,
        batch=options.batch,
        max_batches=MAX_VALIDATION_BATCHES,
        device=place.device.type,
        steps=trainer.steps - trainer.first,
        seconds=seconds,
        tokens_per_second=(trainer.steps - trainer.first)
        * trainer.tokens_per_step
        / seconds,
        learning_rate=options.learning_rate,
        seed=options.seed,
        torch=torch.__version__,
    )


def main() -> None:
    options = parse_options()
    place = join_group(options)
    corpus = load_corpus(
        options.data, context=SIZES[options.size].context, max_bytes=options.max_bytes
    )
    report = train(options, place, corpus)
    if place.rank == 0:
        report.write(options.out / "report.json")
    # Not in a `finally`: after an error on one rank the others still wait in a
    # collective, and leaving without a word is what lets torchrun end them.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
