"""Random sequences of calls on torch's `fully_shard` and on ours, which must find the same.

    torchrun --nproc-per-node 4 -m tests.tools.compare_calls --first 0 --count 100

A `Calls` follows from its seed alone, on every rank alike. Losses, norms, gradients with their dtypes, and weights are
compared after each call. Sequences avoid what is known to differ (see the table in docs/fully_shard.md): units are
resharded before clipping and after steps, and nothing is zeroed, clipped or stepped while gradients wait unsharded.
Nothing is loaded while `set_is_last_backward(False)` holds: torch (2.15) may compute with the values from before.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.engine.placeholder import Placeholder
from tests.helpers.dtypes import BRAIN, SINGLE

ROWS, FEATURES = 3, 5  # of each rank's batch
Found = dict[str, Tensor | None]


class Block(nn.Module):
    """A norm, a linear layer and one that is not used if a flag says so."""

    def __init__(self, width: int, *, is_recomputed: bool) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)
        self.optional = nn.Linear(width, width, bias=False)
        self._is_recomputed = is_recomputed

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        if self._is_recomputed and torch.is_grad_enabled():
            return checkpoint(self._run, x, flag, use_reentrant=False)
        return self._run(x, flag)

    def _run(self, x: Tensor, flag: bool) -> Tensor:
        hidden = torch.tanh(self.layer(self.norm(x)))
        return x + hidden + (self.optional(hidden) if flag else 0)

    def energy(self, x: Tensor) -> Tensor:
        """Another method than forward, which is registered as one."""
        return self.optional(self.norm(x)).float().sum()


class Model(nn.Module):
    """Blocks between two layers; one block may run twice."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(FEATURES, calls.width), nn.Linear(calls.width, 3)
        self.blocks = nn.ModuleList(Block(calls.width, is_recomputed=calls.is_recomputed) for _ in range(calls.depth))
        self._twice = calls.twice
        if calls.has_frozen:
            self.blocks[1].get_parameter("layer.bias").requires_grad_(False)

    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        x = self.entry(x)
        for number, block in enumerate(self.blocks):
            for _ in range(1 + (number == self._twice)):
                x = block(x, flag or number != 1)
        return self.exit(x)


@dataclass(frozen=True)
class Calls:
    """All that a seed decides: a model, how it is sharded, and the calls, each with a number between 0 and 1."""

    seed: int
    width: int
    depth: int
    dtype: torch.dtype
    policy: dict[str, Any]
    output_dtype: torch.dtype | None
    reshards: bool | None
    has_replicas: bool
    has_frozen: bool
    is_recomputed: bool
    is_grouped: bool
    is_nested: bool
    is_offloaded: bool
    along_second: bool
    twice: int
    is_adam: bool
    calls: tuple[tuple[str, float], ...]

    @classmethod
    def of_seed(cls, seed: int, world_size: int) -> Calls:
        rng = random.Random(seed)

        def often(share: float) -> bool:
            return rng.random() < share

        dtype, narrow = rng.choice((SINGLE, SINGLE, BRAIN)), rng.choice((None, None, BRAIN))
        policy = {"param_dtype": narrow, "reduce_dtype": rng.choice((None, None, SINGLE, BRAIN))}
        is_grouped = often(0.2)
        names = [name for name in CALLS for _ in range(4 if name == "train" else 1)]
        calls = [(rng.choice(names), rng.random()) for _ in range(rng.randint(4, 12))]
        return cls(
            seed=seed,
            width=rng.choice((4, 6, 8)),
            depth=rng.choice((2, 3)),
            dtype=dtype,
            policy=policy,
            output_dtype=rng.choice((None, None, SINGLE, BRAIN)),
            reshards=rng.choice((None, True, False)),
            has_replicas=world_size == 4 and often(0.5),
            has_frozen=often(0.3),
            is_recomputed=often(0.3),
            is_grouped=is_grouped,
            is_nested=not is_grouped and often(0.25),
            is_offloaded=often(0.2),
            along_second=often(0.3),
            twice=-1 if is_grouped else rng.choice((-1, -1, 0, 1)),
            is_adam=often(0.3),
            calls=(*calls, ("synchronize", 1.0), ("train", 0.5), ("step", 0.5), ("train", 0.0)),
        )

    @property
    def tolerance(self) -> float:
        dtypes = (self.dtype, self.policy["param_dtype"], self.policy["reduce_dtype"])
        return 0.2 if BRAIN in dtypes else 2e-4


@cache
def _mesh(has_replicas: bool) -> DeviceMesh:
    shape, names = ((2, 2), ("replicate", "shard")) if has_replicas else ((dist.get_world_size(),), ("shard",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass
class Run:
    """A sharded model of one of the libraries, and what the calls have found so far."""

    library: ModuleType
    calls: Calls
    reduces: bool = True
    sums_replicas: bool = True
    has_unreduced: bool = False
    is_last: bool = True
    batches: int = 0
    found: Found = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.calls.seed)
        self.model: Any = Model(self.calls).to(self.calls.dtype)
        self._shard()
        self.units: list[Any] = [each for each in self.model.modules() if isinstance(each, self.library.FSDPModule)]
        kind = torch.optim.AdamW if self.calls.is_adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.01 if self.calls.is_adam else 0.05)

    def _shard(self) -> None:
        calls, library = self.calls, self.library
        mesh = _mesh(calls.has_replicas)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(**calls.policy)}
        if calls.reshards is not None:
            options["reshard_after_forward"] = calls.reshards
        if calls.along_second:
            size = mesh.size(-1)
            options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % size == 0 else None
        if calls.is_offloaded:
            pinned = {"pin_memory": False} if library is torchs else {}
            options["offload_policy"] = library.CPUOffloadPolicy(**pinned)
        blocks = list(self.model.blocks)
        if calls.is_grouped:
            library.fully_shard(blocks[:2], **options)
            blocks = blocks[2:]
        for block in blocks:
            if calls.is_nested:
                library.fully_shard(block.layer, **options)
            library.fully_shard(block, **options)
            library.register_fsdp_forward_method(block, "energy")
        if calls.output_dtype is not None:
            options["mp_policy"] = library.MixedPrecisionPolicy(**calls.policy, output_dtype=calls.output_dtype)
        library.fully_shard(self.model, **options)

    @property
    def is_settled(self) -> bool:
        """No gradients wait for a reduction, or may begin to."""
        return self.reduces and self.sums_replicas and not self.has_unreduced

    def batch(self) -> Tensor:
        self.batches += 1
        self.has_unreduced |= torch.is_grad_enabled()
        generator = torch.Generator().manual_seed(17 * self.batches + dist.get_rank())
        dtype = SINGLE if self.calls.policy["param_dtype"] else self.calls.dtype
        return torch.randn(ROWS, FEATURES, generator=generator).to(dtype)

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def play(self) -> Found:
        """Collective. Make all calls, and return what they have found: losses, norms, gradients and weights."""
        for place, (name, number) in enumerate(self.calls.calls):
            value = CALLS[name](self, number)
            self.has_unreduced &= not (self.reduces and self.sums_replicas and name in BACKWARDS)
            if value is not None:
                self.found[f"result of call {place}, {name}"] = value
            for key, param in self.model.named_parameters():
                if isinstance(param, DTensor):
                    self.found[f"gradient of {key} after call {place}, {name}"] = _whole(param.grad)
        return self.found | {key: value.full_tensor() for key, value in self.model.state_dict().items()}


def _whole(gradient: Tensor | None) -> Tensor | None:
    if isinstance(gradient, Placeholder):  # for gradients that wait unsharded
        return None
    return gradient.full_tensor().clone() if isinstance(gradient, DTensor) else gradient


def train(run: Run, number: float) -> Tensor:
    loss = run.model(run.batch(), number < 0.8).float().square().mean()
    loss.backward()
    return loss.detach()


def two_forwards(run: Run, number: float) -> None:
    first, second = (run.model(run.batch()).float() for _ in range(2))
    (first.sum() * second.mean()).backward()


def backward_twice(run: Run, number: float) -> None:
    output = run.model(run.batch()).float()
    output.square().mean().backward(retain_graph=True)
    if not run.calls.is_recomputed:
        output.sum().backward()


def evaluate(run: Run, number: float) -> Tensor:
    with torch.no_grad():
        result = run.model(run.batch()).float().sum()
    run.reshard()
    return result


def call_method(run: Run, number: float) -> None:
    if not run.calls.is_grouped:
        run.model(run.batch()).float().mean().backward()
        dtype = run.calls.policy["param_dtype"] or run.calls.dtype
        run.model.blocks[-1].energy(torch.ones(2, run.calls.width, dtype=dtype)).backward()


def synchronize(run: Run, number: float) -> None:
    run.reduces = number > 0.5
    run.model.set_requires_gradient_sync(run.reduces)
    if run.reduces:
        run.model.set_is_last_backward(True)
        run.model.set_requires_all_reduce(True)
        run.sums_replicas = run.is_last = True


def last_backward(run: Run, number: float) -> None:
    run.is_last = number > 0.5
    run.model.set_is_last_backward(run.is_last)


def all_reduce(run: Run, number: float) -> None:
    if run.calls.has_replicas:
        run.sums_replicas = number > 0.5
        run.model.set_requires_all_reduce(run.sums_replicas)


def divide(run: Run, number: float) -> None:
    for unit in run.units:
        unit.set_gradient_divide_factor(1.0 + int(4 * number))
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no operation that divides


def reshard_after(run: Run, number: float) -> None:
    unit = run.units[int(number * len(run.units))]
    unit.set_reshard_after_forward(number > 0.5, recurse=False)
    unit.set_reshard_after_backward(number < 0.7, recurse=False)


def unshard(run: Run, number: float) -> None:
    unit = run.units[int(number * len(run.units))]
    unit.unshard()
    unit.reshard()


def prefetch(run: Run, number: float) -> None:
    first, second = run.units[1], run.units[-1]
    if first is not second:
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def fill_unused(run: Run, number: float) -> None:
    if hasattr(torchs.FSDPModule, "set_reduce_scatter_unused_params"):
        run.model.set_reduce_scatter_unused_params(number > 0.5)


def keep_storage(run: Run, number: float) -> None:
    if hasattr(torchs.FSDPModule, "set_keep_unsharded_storage"):
        run.model.set_keep_unsharded_storage(number > 0.5)


def load(run: Run, number: float) -> None:
    run.reshard()
    if run.is_last:
        run.model.load_state_dict({key: value.detach() * 0.9 for key, value in run.model.state_dict().items()})


def clip(run: Run, number: float) -> Tensor | None:
    run.reshard()
    if not run.is_settled:
        return None
    norm = _whole(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1 + number))
    return None if norm is None else norm.float()  # torch's norm of 16-bit gradients has 16 bits


def step(run: Run, number: float) -> None:
    if run.is_settled:
        run.optimizer.step()
        run.reshard()


def zero(run: Run, number: float) -> None:
    if run.is_settled:
        run.optimizer.zero_grad(set_to_none=number > 0.3)


BACKWARDS = {"train", "two_forwards", "backward_twice", "call_method"}
CALLS: dict[str, Callable[[Run, float], Tensor | None]] = {
    each.__name__: each
    for each in (
        *(train, two_forwards, backward_twice, evaluate, call_method, synchronize, last_backward, all_reduce, divide),
        *(reshard_after, unshard, prefetch, fill_unused, keep_storage, load, clip, step, zero),
    )
}


def difference(calls: Calls) -> str:
    """Collective. Return the first difference between the libraries, or their errors; empty if both find the same."""
    ours, theirs = (_play(library, calls) for library in (fsdp, torchs))
    if isinstance(ours, str) or isinstance(theirs, str):
        told = [each if isinstance(each, str) else "no error" for each in (ours, theirs)]
        return f"ours: {told[0]:.300}; torch's: {told[1]:.300}"
    return next(_differences(ours, theirs, calls.tolerance), "")


def _differences(ours: Found, theirs: Found, tolerance: float) -> Iterator[str]:
    for name in [name for name in ours if name in theirs]:  # modules list shards and unsharded parameters differently
        value, expected = ours[name], theirs[name]
        if value is None or expected is None:
            if value is not expected:
                yield f"{name}: only {'torch' if value is None else 'ours'} has it"
        elif value.dtype != expected.dtype:
            yield f"{name}: {value.dtype}, torch's: {expected.dtype}"
        else:
            off, size = float((value - expected).abs().max()), float(expected.abs().max())
            if not off <= tolerance * (size + 1e-3):
                yield f"{name}: off by {off:.2g} of {size:.2g}"


def _play(library: ModuleType, calls: Calls) -> Found | str:
    try:
        found: Found | str = Run(library, calls).play()
    except Exception as error:  # noqa: BLE001 (compared with that of the other library)
        found = f"{type(error).__name__}: {error}"
    has_failed = torch.tensor([isinstance(found, str)], dtype=torch.int32)
    dist.all_reduce(has_failed)
    return "an error of another rank" if has_failed.item() and not isinstance(found, str) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="the number of seeds")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    count = 0
    for seed in range(args.first, args.first + args.count):
        if told := difference(Calls.of_seed(seed, dist.get_world_size())):
            count += 1
            print(f"rank {dist.get_rank()}, seed {seed}: {told}", flush=True)
    if dist.get_rank() == 0:
        print(f"{args.count} sequences, {count} with a difference")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
