"""The entry point of the training job (`make train`): train on all ranks, then check
the result in a separate process.

Errors in the arguments are reported here, in a single line, before any rank starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import fsdp
from examples.gpt.model import SIZES
from examples.gpt.options import Options, parse_options, to_arguments
from examples.gpt.text import TextError, load_corpus

ROOT = Path(__file__).resolve().parents[2]
CPU_RANKS = 2


class OptionError(Exception):
    """Arguments that this machine does not support; the message is a single line for
    the user.
    """


def resolve(options: Options) -> Options:
    """Choose default options for this machine.

    Raises:
        OptionError: more ranks than the machine has GPUs, no GPU at all, an output
        folder that cannot be made, or a training to resume that is finished.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = options.device or ("cuda" if num_gpus else "cpu")
    if device == "cuda" and not num_gpus:
        raise OptionError(
            "--device cuda: torch finds no GPU on this machine. Leave the argument out."
        )
    most = num_gpus if device == "cuda" else max(8, os.cpu_count() or 1)
    ranks = options.ranks or (num_gpus if device == "cuda" else CPU_RANKS)
    if ranks > most:
        what = "one rank for each GPU" if device == "cuda" else "on this machine's CPU"
        raise OptionError(f"--ranks {ranks} are too many: at most {most}, {what}.")
    # Both absolute, since the ranks run in the repository and not where the user is.
    data = (
        None
        if options.data is None
        else str(Path(options.data).expanduser().absolute())
    )
    out = options.out.expanduser().absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--out {options.out} cannot be made: {error.strerror}."
        ) from error
    done = 1 + max(fsdp.checkpoint.steps(out / "checkpoints"), default=-1)
    if options.resume and options.steps <= done:
        raise OptionError(
            f"--steps {options.steps} are done: the newest checkpoint in {out} has "
            f"{done} steps. Give more to go on, such as --steps {2 * done}."
        )
    return replace(options, data=data, out=out, ranks=ranks, device=device)


def run_module(arguments: Sequence[str]) -> int:
    """Run `python -m ...` in the repository and return its exit status."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment
    )
    # torchrun's ranks are in sessions of their own: only it can end them, so it must
    # never be left or killed.
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # the terminal has interrupted it as well
        raise
    except SystemExit:
        process.terminate()
        process.wait()
        raise


def main() -> int:
    start = time.perf_counter()
    try:
        options = resolve(parse_options())
        corpus = load_corpus(
            options.data,
            context=SIZES[options.size].context,
            max_bytes=options.max_bytes,
        )
    except (OptionError, TextError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    backend = "NCCL" if options.device == "cuda" else "gloo"
    num_bytes, num_held_out = len(corpus.train), len(corpus.validation)
    print(
        f"text: {corpus.origin}, {num_bytes:,} bytes to train on and {num_held_out:,} "
        "held out"
    )
    print(f"ranks: {options.ranks} on {options.device} with {backend}", flush=True)

    # Files of an earlier run must not be mistaken for files of this run.
    for name in ("model.pt", "report.json"):
        (options.out / name).unlink(missing_ok=True)
    if not options.resume:
        shutil.rmtree(options.out / "checkpoints", ignore_errors=True)
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.ranks),
    ]
    status = run_module([*torchrun, "-m", "examples.gpt.train", *to_arguments(options)])
    if status:
        print(
            f"error: training ended with status {status}; the messages above say why.",
            file=sys.stderr,
        )
        return status
    status = run_module(["examples.gpt.verify", str(options.out)])
    print(
        f"{'done' if status == 0 else 'FAILED'} after "
        f"{time.perf_counter() - start:.0f} s"
    )
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
