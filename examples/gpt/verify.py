"""Checks a finished training run from outside: a single process with a plain GPT and
without `fsdp`.

`python -m examples.gpt.verify OUT` reads `OUT/model.pt` and `OUT/report.json`,
compares, prints what it found, and exits with status 1 when anything disagrees.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from examples.gpt.model import GPT, next_byte_loss
from examples.gpt.report import HeldBytes, Report, measure_held_bytes
from examples.gpt.text import load_corpus, validation_batches

# The same float32 operations on the same batches: on a CPU the difference is 0 or a
# rounding of the mean; a GPU may choose another kernel for the same product.
LOSS_TOLERANCE = 1e-5
# As a share of the loss before training. How often each byte occurs takes English or
# code to about 0.6 of it; above three quarters nothing has been learned that is worth
# the name.
CLEARLY_FALLEN = 0.75
SAMPLE_BYTES = 400


class Findings:
    """The checks so far; a failed check is printed immediately and recorded."""

    def __init__(self) -> None:
        self.num_failed = 0

    def check(self, holds: bool, statement: str) -> None:
        print(f"  {'ok    ' if holds else 'FAILED'}  {statement}")
        self.num_failed += not holds


def load_plain(path: Path, report: Report) -> GPT:
    """The saved weights in an ordinary model; missing, unexpected or misshapen ones
    raise RuntimeError.
    """
    model = GPT(report.config).to(report.device)
    model.load_state_dict(
        torch.load(path, map_location=report.device, weights_only=True), strict=True
    )
    return model


@torch.no_grad()
def validation_loss(model: GPT, batches: list[Tensor]) -> float:
    device = model.head.weight.device
    return sum(
        next_byte_loss(model, batch.to(device)).item() for batch in batches
    ) / len(batches)


def replicated_bytes(model: GPT, batch: Tensor) -> HeldBytes:
    """The bytes of each rank in replicated training: a step of the plain model,
    measured in the same way.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    next_byte_loss(model, batch.to(model.head.weight.device)).backward()
    optimizer.step()
    return measure_held_bytes(model, optimizer)


@torch.no_grad()
def sample(
    model: GPT,
    prompt: bytes,
    num_bytes: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """Continue `prompt` by `num_bytes` bytes drawn from the model's distribution."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        window = torch.tensor([text[-model.config.context :]], device=device)
        chances = torch.softmax(model(window)[0, -1].float().cpu() / temperature, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)


def printable(text: bytes) -> str:
    # What a model writes may contain anything, also what a terminal takes for commands.
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c == "\n" else " " for c in decoded.expandtabs(4)
    )


def check_losses(
    findings: Findings, report: Report, model: GPT, batches: list[Tensor]
) -> None:
    first, last = report.first_loss, report.last_loss
    findings.check(
        last < CLEARLY_FALLEN * first,
        f"validation loss fell from {first:.4f} to {last:.4f} nats per byte (below "
        f"{CLEARLY_FALLEN:.0%})",
    )
    again = validation_loss(model, batches)
    findings.check(
        abs(again - last) <= LOSS_TOLERANCE,
        f"the plain model's is {again:.4f}, {abs(again - last):.1e} away (allowed: "
        f"{LOSS_TOLERANCE:.0e})",
    )


def check_bytes(findings: Findings, report: Report, replicated: HeldBytes) -> None:
    """Every rank's shards against the plain arithmetic of equal pieces, rounded up in
    each unit.
    """
    world_size, bytes_each = len(report.held_bytes), 4
    num_params = replicated.parameters // bytes_each
    shard = sum(-(-numel // world_size) for numel in report.unit_numels)
    padding = world_size * shard - num_params
    measured = sum(held.parameters for held in report.held_bytes) // bytes_each
    findings.check(
        measured == num_params + padding,
        f"{world_size} shards hold {measured:,} elements: {num_params:,} parameters, "
        f"{padding:,} of padding",
    )
    # Adam's state has two elements for each parameter, and a number of steps for each
    # flat parameter.
    expected = HeldBytes(
        shard * bytes_each,
        shard * bytes_each,
        (2 * shard + len(report.unit_numels)) * bytes_each,
    )
    wrong = {
        rank: held for rank, held in enumerate(report.held_bytes) if held != expected
    }
    findings.check(
        not wrong,
        "every rank holds one shard of parameters and gradients, and two of optimizer "
        "state"
        + "".join(
            f"; rank {rank}: {held}, expected {expected}"
            for rank, held in wrong.items()
        ),
    )


def print_table(report: Report, replicated: HeldBytes) -> None:
    rank0, world_size = report.held_bytes[0], len(report.held_bytes)
    print(
        f"\nbytes that live tensors hold, {replicated.parameters // 4:,} parameters in "
        "float32"
    )
    print(
        f"{'':18}{f'sharded, each of {world_size}':>22}"
        f"{'replicated, each':>22}{'share':>8}"
    )
    for name in ("parameters", "gradients", "optimizer_state", "total"):
        ours, theirs = getattr(rank0, name), getattr(replicated, name)
        print(
            f"{name.replace('_', ' '):18}{ours:>22,}{theirs:>22,}{ours / theirs:>8.3f}"
        )


def main(folder: Path) -> int:
    # A terminal that cannot show a character of the sample must not turn a good run
    # into a failed one.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        report = Report.read(folder / "report.json")
        model = load_plain(folder / "model.pt", report)
    except (OSError, RuntimeError, UnpicklingError) as error:
        print(
            f"error: {folder} does not hold the whole output of a training run: "
            f"{error}",
            file=sys.stderr,
        )
        return 1
    corpus = load_corpus(
        report.data, context=report.config.context, max_bytes=report.max_bytes
    )
    batches = validation_batches(
        corpus.validation,
        batch=report.batch,
        context=report.config.context,
        max_batches=report.max_batches,
    )
    speed = (
        f"{report.tokens_per_second:,.0f} tokens/s over {len(report.held_bytes)} ranks"
    )
    print(f"\n{report.steps} steps in {report.seconds:.0f} s, {speed}")
    print("a sample from the plain model with the saved weights:")
    prompt = b"def " if report.data is None else bytes(corpus.validation[:32].tolist())
    print(
        "".join(
            f"  | {line}\n"
            for line in printable(sample(model, prompt, SAMPLE_BYTES)).splitlines()
        )
    )

    findings = Findings()
    print(f"checks in one process without fsdp, weights from {folder / 'model.pt'}")
    findings.check("fsdp" not in sys.modules, "the package is not imported here")
    findings.check(
        corpus.digest == report.digest, "the text is the one that was trained on"
    )
    check_losses(findings, report, model, batches)
    replicated = replicated_bytes(
        model, batches[0]
    )  # last of all, since it changes the weights
    check_bytes(findings, report, replicated)
    print_table(report, replicated)
    return 1 if findings.num_failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.gpt.verify OUT")
    sys.exit(main(Path(sys.argv[1])))
