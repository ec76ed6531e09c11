"""The work of a rank in `benchmarks.step` and `lora`: train a GPT with a contestant, and record the costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._contestants import CONTESTANTS, FLOOR, SHARDED_FLOOR, Contestant, Kind, Policy
from benchmarks._measure import (
    bytes_sent,
    meter_of,
    operations,
    profiled,
    rotated,
    settle,
    synchronize,
)
from benchmarks._ranks import this_device
from benchmarks._skipping import Skip, skipping
from examples.gpt.model import GPT, SIZES, GPTConfig, next_byte_loss
from examples.gpt.report import HeldBytes, measure_held_bytes
from fsdp.distributed.switches import SHARED_MEMORY, is_off

_SGD_STEPS, _ADAMW_STEPS = 3, 3

# How far the losses of `first_losses` may be apart in bfloat16. Twice the gradient moves a loss by 0.4 percent or more
# after one step of SGD and by 3 percent after two, rounding by less than 0.04 percent. Adam's first steps are as long
# for a gradient that is all rounding as for any other.
BFLOAT16_TOLERANCES = [2.0**-9] * (_SGD_STEPS + 1) + [2.0**-5] * (_ADAMW_STEPS - 1)

# The same in float32 on an accelerator, whose sums have other orders than DDP's.
_ACCELERATOR_TOLERANCES = [1e-4] * (_SGD_STEPS + 1) + [2.0**-9] * (_ADAMW_STEPS - 1)

_STEPS_TO_SETTLE = 4  # until a library that learns the order of the units communicates as it will from then on


@dataclass(frozen=True)
class Setup:
    """Settings that all contestants share.

    Args:
        size: a key of `SIZES`.
        batch, context: sequences per rank and step, and their length.
        foreach: use AdamW's foreach implementation instead of the fused implementation.
        device: one of `DEVICES`.
        skip: communication to skip.
        policy: the settings of sharded contestants.
        sgd_rate: learning rate of the steps whose losses are compared.
    """

    size: str = "17M"
    batch: int = 4
    context: int = 64
    foreach: bool = False
    device: str = "cpu"
    skip: Skip = Skip.NOTHING
    policy: Policy = field(default_factory=Policy)
    sgd_rate: float = 0.1

    @property
    def config(self) -> GPTConfig:
        config = SIZES[self.size]
        return replace(config, context=max(config.context, self.context))

    def model(self, config: GPTConfig) -> GPT:
        """The plain model to train, from torch's random numbers."""
        return GPT(config)

    @property
    def float32_tolerances(self) -> list[float] | None:
        """How far `first_losses` may be apart in float32; None for the difference of sums on a CPU."""
        return None if self.device == "cpu" else _ACCELERATOR_TOLERANCES

    @property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in self.model(self.config).parameters())

    def windows(self, seed: int, device: torch.device) -> Tensor:
        """Return a batch `[batch, context + 1]`, equal for every contestant and different on every rank."""
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        shape = self.batch, self.context + 1
        return torch.randint(self.config.vocab, shape, generator=generator).to(device)

    def adamw(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained(module), lr=1e-3, foreach=self.foreach, fused=not self.foreach)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters to optimize."""
    return [param for param in module.parameters() if param.requires_grad]


def build(contestant: Contestant, setup: Setup, device: torch.device, config: GPTConfig | None = None) -> nn.Module:
    """Build the model from the common seed, wrapped block by block; a `config` sets different sizes."""
    torch.manual_seed(0)
    with device:
        model = setup.model(config or setup.config)
    return contestant.wrap(model, model.blocks, device, setup.policy)


def train_step(module: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor) -> Tensor:
    loss = next_byte_loss(module, windows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# --- time and bytes, interleaved


@dataclass
class Rounds:
    """The measurements of a contestant on a rank.

    Args:
        losses: losses of the first steps, from the same weights and batches for all contestants; these steps also warm
            up.
        seconds, cpu_seconds: per step, an entry for each round.
        sent: bytes per step, an entry for each round; empty if the kernel does not provide them.
        sent_in_float32: bytes of a step in float32; None if not counted.
        operations: backend operations in a step, by name.
        held: bytes of parameters, gradients and optimizer state between backward and the next step.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    sent_in_float32: int | None = None
    operations: dict[str, int] = field(default_factory=dict)
    held: HeldBytes | None = None


def first_losses(module: nn.Module, setup: Setup, device: torch.device) -> list[float]:
    """Return losses on the same batch repeatedly, so that a wrong gradient shows in the next loss.

    SGD before AdamW, because AdamW's result does not depend on the scale of the gradient.
    """
    windows = setup.windows(0, device)
    sgd = torch.optim.SGD(trained(module), lr=setup.sgd_rate)
    losses = [train_step(module, sgd, windows) for _ in range(_SGD_STEPS)]
    adamw = setup.adamw(module)
    losses += [train_step(module, adamw, windows) for _ in range(_ADAMW_STEPS)]
    return [loss.item() for loss in losses]


def refusals(setup: Setup, names: Sequence[str]) -> dict[str, str]:
    """Return the error messages of contestants that raise an error. Runs on every rank."""
    found = {}
    for name in names:
        try:
            first_losses(build(CONTESTANTS[name], setup, this_device()), setup, this_device())
        except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def train_interleaved(
    setup: Setup, names: Sequence[str], num_rounds: int, steps: int, *, before_rounds: Callable[[], None] | None = None
) -> dict[str, Rounds]:
    """All contestants in this process, `steps` steps each in turn; runs on every rank.

    `before_rounds` is called when all are warm and the timed rounds begin.
    """
    device = this_device()
    modules = {name: build(CONTESTANTS[name], setup, device) for name in names}
    results = {name: Rounds() for name in names}
    with skipping(setup.skip, modules.values()):
        for name, module in modules.items():
            results[name].losses = first_losses(module, setup, device)
        optimizers = {name: setup.adamw(module) for name, module in modules.items()}
        batches = [setup.windows(1 + index, device) for index in range(steps)]
        for name, module in modules.items():
            results[name].held = _held_in_step(module, optimizers[name], batches[0])  # makes the optimizer's state
        settle()
        if before_rounds is not None:
            before_rounds()
        for order in rotated(names, num_rounds):
            for name in order:
                _one_round(results[name], modules[name], optimizers[name], batches, device)
        for name, module in modules.items():
            dist.barrier()
            with profiled() as trace:
                train_step(module, optimizers[name], batches[0])
                synchronize(device)
            results[name].operations = operations(trace)
    counted = [name for name in names if not _shares_memory(CONTESTANTS[name], device)]
    for name in set(names).difference(counted):
        results[name].sent.clear()
    if setup.policy.is_mixed and setup.skip is Skip.NOTHING:
        for name in counted:
            results[name].sent_in_float32 = _sent_in_float32(CONTESTANTS[name], setup, device)
    return results


def _shares_memory(contestant: Contestant, device: torch.device) -> bool:
    """Return whether messages may go through shared memory, where nobody counts them."""
    return contestant.kind is Kind.OURS and device.type == "cpu" and not is_off(SHARED_MEMORY)


def _held_in_step(module: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor) -> HeldBytes:
    """Make a step, and look before it drops the gradients."""
    next_byte_loss(module, windows).backward()
    optimizer.step()
    held = measure_held_bytes(module, optimizer)
    optimizer.zero_grad()
    return held


def _sent_in_float32(contestant: Contestant, setup: Setup, device: torch.device) -> int | None:
    """Return the bytes that this rank sends in a step with default settings."""
    setup = replace(setup, policy=replace(setup.policy, compute_dtype=torch.float32))
    module = build(contestant, setup, device)
    optimizer = torch.optim.SGD(trained(module), lr=0.0)
    windows = setup.windows(0, device)
    for _ in range(_STEPS_TO_SETTLE):
        train_step(module, optimizer, windows)
    dist.barrier()
    before = bytes_sent()
    train_step(module, optimizer, windows)
    synchronize(device)
    dist.barrier()
    after = bytes_sent()
    return None if before is None or after is None else after - before


def _one_round(
    result: Rounds,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Tensor],
    device: torch.device,
) -> None:
    dist.barrier()
    sent, cpu, start = bytes_sent(), time.process_time(), time.perf_counter()
    for windows in batches:
        train_step(module, optimizer, windows)
    synchronize(device)
    seconds = time.perf_counter() - start
    # After the barrier, so that bytes and work for a slower rank are included.
    dist.barrier()
    result.cpu_seconds.append((time.process_time() - cpu) / len(batches))
    result.seconds.append(seconds / len(batches))
    if sent is not None and (now := bytes_sent()) is not None:
        result.sent.append((now - sent) / len(batches))


# --- memory, one contestant a process


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's process above the baseline with all libraries loaded and without a model.

    Args:
        built: the peak while the model was built and wrapped.
        peak: the peak in the training steps.
        between: after a step.
    """

    built: int
    peak: int
    between: int


def train_alone(setup: Setup, name: str, steps: int) -> tuple[Memory, Memory]:
    """Train a contestant in this fresh process; return resident and live memory, which are equal on CPU.

    On CPU the environment of the process determines which of the two is measured: by default cached memory of malloc
    is resident, and with `NOTHING_KEPT` it is not. On accelerators the caching allocator reports both.
    """
    device = this_device()
    contestant = CONTESTANTS[name]
    # Loads the code and the matmul kernels' work space, which do not count for a library. The kernels use the real
    # sizes, but the wrapped model is tiny: memory pools of a library must not be hidden in the baseline.
    _train_and_drop(contestant, replace(setup.config, num_layers=2, num_heads=4, width=64), setup, device)
    floor = CONTESTANTS[SHARDED_FLOOR if contestant.is_sharded and setup.policy.is_mixed else FLOOR]
    _train_and_drop(floor, replace(setup.config, num_layers=1), setup, device)
    settle()
    synchronize(device)
    meter = meter_of(device)
    module = build(contestant, setup, device)
    built = meter.peaks()
    optimizer = setup.adamw(module)
    windows = setup.windows(0, device)
    for _ in range(steps):
        train_step(module, optimizer, windows)
    synchronize(device)
    dist.barrier()
    between = meter.now()  # first: reading /proc allocates, too
    peaks = meter.peaks()
    resident, live = (Memory(*values) for values in zip(built, peaks, between, strict=True))
    return resident, live


def _train_and_drop(contestant: Contestant, config: GPTConfig, setup: Setup, device: torch.device) -> None:
    module = build(contestant, setup, device, config)
    optimizer = setup.adamw(module)
    for _ in range(2):
        train_step(module, optimizer, setup.windows(0, device))
