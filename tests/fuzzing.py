"""Random models, wrappings, options and sequences of calls, each compared with the unsharded model.

A `Case` follows from its seed alone, on every rank alike. It is run by `run_case`: every rank builds the sharded model
and an unsharded twin, does the same with both, and compares values after each operation. The twin computes the batches
of all ranks, one after the other, and averages their gradients, so it needs no process group.

Everything is in float64 (but for cases that compute in float32 on purpose), so two right results agree to about 1e-12,
and a wrong divisor, a stale weight or a shifted shard is seen at once.
"""

from __future__ import annotations

import copy
import itertools
import pkgutil
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

ROWS = 2  # of each rank's batch
_device = "cpu"  # of the models and batches, see `run_seeds`
Flags = Sequence[bool]  # for each `Optional`, by its number, whether it runs


# --- models: all blocks take and return [rows, 2, width], and hand the flags on --------------------------------------


class Leaf(nn.Module):
    """An ordinary layer or a few of them."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return x + torch.tanh(self.layers(x))


class Bare(nn.Module):
    """A layer whose output is a view of what it has computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return self.layer(x)


class Scale(nn.Module):
    """A parameter with one element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 0.9))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return x * self.scale


class Convolution(nn.Module):
    """A parameter with three dimensions, and a bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, channels, 3)  # holds the parameters; the simulated device computes no convolutions

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        windows = nn.functional.pad(x, (1, 1)).unfold(-1, 3, 1)
        return x + nn.functional.linear(windows, self.conv.weight[:, 0], self.conv.bias).mean(-1).tanh()


class Lookup(nn.Module):
    """An embedding, of which a batch uses some rows."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return x + 0.1 * self.table(torch.arange(x.shape[1], device=x.device) % self.table.num_embeddings)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Optional(nn.Module):
    """A layer that always runs and one that runs if its flag says so: perhaps on some ranks only."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.always, self.sometimes = nn.Linear(width, width), nn.Linear(width, width)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        x = torch.tanh(self.always(x)) + 0.1
        return x + self.sometimes(x).tanh() if flags[self.number] else x


class Penalty(nn.Module):
    """A layer that adds a penalty of the parameters that it lists, and computes a second time with scaled ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        penalty = sum(param.square().mean() for param in self.parameters())
        halved = {name: 0.5 * param for name, param in self.layer.named_parameters()}
        return x + torch.tanh(self.layer(x)) + functional_call(self.layer, halved, (x,)).tanh() + 0.1 * penalty


class Counter(nn.Module):
    """A buffer that is alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        if torch.is_grad_enabled() and self.training:
            self.calls += 1
        return x


class Chain(nn.Module):
    """One block after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        for block in self.blocks:
            x = block(x, flags)
        return x


class Around(nn.Module):
    """A block with a parameter of its own, called in one of several ways."""

    def __init__(self, inner: nn.Module, width: int, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way
        self.shift = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return getattr(self, f"_{self.way}")(x, flags) + self.shift

    def _residual(self, x: Tensor, flags: Flags) -> Tensor:
        return x + self.inner(x, flags)

    def _twice(self, x: Tensor, flags: Flags) -> Tensor:
        return self.inner(self.inner(x, flags).tanh(), flags)

    def _recomputed(self, x: Tensor, flags: Flags) -> Tensor:
        return checkpoint(self.inner, x, flags, use_reentrant=False)

    def _in_place(self, x: Tensor, flags: Flags) -> Tensor:
        y = self.inner(x, flags)
        y += 1
        return y

    def _by_keyword(self, x: Tensor, flags: Flags) -> Tensor:
        return self.inner(x=x, flags=flags)

    def _frozen_input(self, x: Tensor, flags: Flags) -> Tensor:
        return x + self.inner(x.detach(), flags)

    def _energy(self, x: Tensor, flags: Flags) -> Tensor:
        """The gradient of what the block computes, as a value; the block is not trained by it."""
        if not torch.is_grad_enabled():
            return self.inner(x, flags)
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(point, flags).square().sum(), point)
        return self.inner(x, flags) + 0.1 * slope


WAYS = ("residual", "twice", "recomputed", "in_place", "by_keyword", "frozen_input", "energy")


class Model(nn.Module):
    """A chain with parameters of its own before and after it, for inputs ``[rows, 2, 3]``.

    A large output has a small gradient, so that no training diverges: rounding errors would grow with it.
    """

    optional = 0  # how many flags it takes

    def __init__(self, chain: nn.Module, width: int) -> None:
        super().__init__()
        self.entry, self.chain, self.exit = nn.Linear(3, width), chain, nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return self.exit(self.chain(torch.tanh(self.entry(x)) + 0.1, flags)).asinh()


# --- a case -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """All that a seed decides, but for values."""

    seed: int
    world_size: int
    door: str  # "wrapper" or "fully_shard"
    options: dict[str, Any]  # of the wrapper or `fully_shard`, by names of things that are made on the ranks
    wrapped: float  # the share of blocks that are units
    flags: str  # "always", "alike" on all ranks, or "apart"
    optimizer: str
    frozen: bool  # some parameters are, from the beginning
    mixed: bool  # some parameters are float32
    operations: list[str]

    @classmethod
    def of_seed(cls, seed: int, world_size: int) -> Case:
        rng = random.Random(f"case {seed}")
        door = rng.choice(("wrapper", "wrapper", "fully_shard"))
        options = _wrapper_options(rng, world_size) if door == "wrapper" else _shard_options(rng, world_size)
        operations = [rng.choice(OPERATIONS) for _ in range(rng.randint(2, 6))]
        return cls(
            seed,
            world_size,
            door,
            options,
            wrapped=rng.choice((0.0, 0.4, 0.8)),
            flags=rng.choice(("always", "alike", "apart")),
            optimizer=rng.choice(tuple(OPTIMIZERS)),
            frozen=rng.random() < 0.3,
            mixed=rng.random() < 0.2,
            operations=["train", *operations, "train"],
        )

    @property
    def tolerance(self) -> float:
        """The largest difference that is allowed, relative to the largest element."""
        return 2e-3 if self.options.get("computes_in_float32") or self.mixed else 1e-9


def _wrapper_options(rng: random.Random, world_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "reshard_after_forward": _reshards(rng.random()),
        "disable_reshard_on_root": rng.random() < 0.6,
        "bucket_cap_mb": rng.choice((25, 25, 0, 1e-3)),
        "gradient_predivide_factor": rng.choice((None, None, 1.0, float(world_size))),
        "sync_module_states": rng.random() < 0.2,
    }
    shape = rng.choice(("flat", "flat", "original", "original", "one by one", "grouped"))
    if shape == "original":
        options["use_orig_params"] = True
    elif shape == "one by one":
        options["flatten_parameters"] = False
    elif shape == "grouped":
        options["group_by"] = rng.choice(("dimensions", "name"))
        options["use_orig_params"] = rng.random() < 0.3
    if rng.random() < 0.2:
        options["sharding"] = rng.choice(("replicated", "hybrid") if world_size == 4 else ("replicated",))
    if rng.random() < 0.15:
        options["computes_in_float32"] = True
    return options


def _reshards(drawn: float) -> bool | str:
    return "host" if drawn < 0.1 else drawn < 0.6


def _shard_options(rng: random.Random, world_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"reshard_after_forward": _reshards(rng.random())}
    if world_size == 4 and rng.random() < 0.3:
        options["sharding"] = "hybrid"
    if rng.random() < 0.15:
        options["computes_in_float32"] = True
    return options


def plain_model(case: Case) -> Model:
    """The unsharded model of a case, with the same values on every call."""
    rng = random.Random(f"model {case.seed}")
    torch.manual_seed(case.seed)
    width, optional = rng.choice((3, 5, 7)), itertools.count()

    def leaf() -> nn.Module:
        made: nn.Module = rng.choice(
            (
                lambda: Leaf(nn.Linear(width, width)),
                lambda: Leaf(nn.Sequential(nn.Linear(width, 4), nn.GELU(), nn.Linear(4, width, bias=False))),
                lambda: Leaf(nn.LayerNorm(width)),
                lambda: Bare(width),
                lambda: Scale((1,) if case.door == "fully_shard" else rng.choice(((), (1,)))),
                lambda: Convolution(rng.choice((1, 3))),
                lambda: Lookup(width, rng.choice((2, 5))),
                lambda: Tied(width),
                lambda: Optional(width, next(optional)),
                lambda: Penalty(width),
            )
        )()
        return made if rng.random() < 0.8 else Chain([Counter(), made])

    def tree(depth: int) -> nn.Module:
        kind = rng.random()
        if depth == 0 or kind < 0.4:
            return leaf()
        if kind < 0.7:
            return Chain([tree(depth - 1) for _ in range(rng.randint(1, 3))])
        return Around(tree(depth - 1), width, rng.choice(WAYS))

    model = Model(Chain([tree(2) for _ in range(rng.randint(1, 4))]), width)
    model.optional = next(optional)
    for module in model.modules():
        if case.mixed and isinstance(module, Scale):
            module.float()
    for name, param in model.named_parameters():
        if case.frozen and name != "exit.weight" and rng.random() < 0.3:
            param.requires_grad_(False)
    return model


UNITS = (Leaf, Bare, Scale, Convolution, Lookup, Tied, Optional, Penalty, Chain, Around)


def _shard(case: Case, model: Model, again: int = 0) -> Any:
    """The model with some of its blocks as units (others, with other numbers `again`), and itself as the outermost."""
    rng = random.Random(f"units {case.seed}" + (f" {again}" if again else ""))
    wrap = _front_door(case)

    def inside(module: nn.Module) -> None:
        for name, child in module.named_children():
            inside(child)
            # Each is called whenever what is around it is, so all ranks run the same units.
            is_unit = isinstance(child, UNITS) or isinstance(module, (Leaf, Bare))
            if is_unit and rng.random() < case.wrapped and any(True for _ in _untaken(child)):
                setattr(module, name, wrap(child))

    inside(model)
    return wrap(model)


def _untaken(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that no unit inside has taken, as far as modules show them."""
    from fsdp import FSDPModule, FullyShardedDataParallel

    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, (FSDPModule, FullyShardedDataParallel)):
            yield from _untaken(child)


_MESHES: dict[Any, Any] = {}


def _mesh() -> Any:
    """Two replicas of two shards; made once, because process groups are kept."""
    from torch.distributed.device_mesh import init_device_mesh

    if dist.group.WORLD not in _MESHES:
        _MESHES[dist.group.WORLD] = init_device_mesh(_device, (2, 2), mesh_dim_names=("replicate", "shard"))
    return _MESHES[dist.group.WORLD]


GROUPS = {"dimensions": lambda name, param: param.dim(), "name": lambda name, param: name.split(".")[0]}


def _front_door(case: Case) -> Callable[[nn.Module], Any]:
    from fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard

    options = dict(case.options)
    in_float32, sharding = options.pop("computes_in_float32", False), options.pop("sharding", None)
    if case.door == "fully_shard":
        if in_float32:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
        if sharding == "hybrid":
            options["mesh"] = _mesh()
        return partial(fully_shard, **options)
    if in_float32:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.float32)
    if sharding == "replicated":
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    elif sharding == "hybrid":
        options["process_group"] = _mesh()
    if "group_by" in options:
        options["group_by"] = GROUPS[options["group_by"]]
    return partial(FullyShardedDataParallel, **options)


# --- the two models, and what is done with both -----------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.05, eps=1e-3),  # not so small that noise is scaled up
}


@dataclass
class Pair:
    """The sharded model and its unsharded twin, with an optimizer each."""

    case: Case
    sharded: Any
    plain: nn.Module
    rng: random.Random
    step: int = 0
    fills_unused: bool = False  # parameters that no rank has used get zeros
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.renew_optimizers()

    def renew_optimizers(self) -> None:
        make = OPTIMIZERS[self.case.optimizer]
        self.reshard()
        self.optimizers = make(list(self.sharded.parameters())), make(list(self.plain.parameters()))

    def reshard(self) -> None:
        """Have `parameters()` list shards: under `fully_shard` it lists what was kept unsharded, as torch's does."""
        for module in self.sharded.modules():
            if not self.is_wrapper and hasattr(module, "reshard"):
                module.reshard()

    # Data

    def batch(self, rank: int, turn: int) -> tuple[Tensor, Flags]:
        generator = torch.Generator().manual_seed(self.case.seed * 1000003 + self.step * 1009 + turn * 101 + rank)
        inputs = torch.randn(ROWS, 2, 3, generator=generator).to(_device)
        of = rank if self.case.flags == "apart" else 0
        rng = random.Random(f"flags {self.case.seed} {self.step} {turn} {of}")
        return inputs, [self.case.flags == "always" or rng.random() < 0.5 for _ in range(self.plain.optional)]

    # What the two front doors do in different ways

    @property
    def is_wrapper(self) -> bool:
        return self.case.door == "wrapper"

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.sharded.no_sync() if self.is_wrapper else _without_sync(self.sharded)

    def clip(self, max_norm: float) -> Tensor:
        if self.is_wrapper:
            return self.sharded.clip_grad_norm_(max_norm)
        return _whole(nn.utils.clip_grad_norm_(self.sharded.parameters(), max_norm))

    def fill_unused(self, fills: bool) -> None:
        self.fills_unused = fills
        if not self.is_wrapper:
            self.sharded.set_reduce_scatter_unused_params(fills)

    def state(self) -> dict[str, Tensor]:
        return {name: _whole(value).detach().clone() for name, value in self.sharded.state_dict().items()}

    # Comparison

    def compare(self, what: str) -> None:
        state, expected = self.state(), self.plain.state_dict()
        if state.keys() != expected.keys():
            raise AssertionError(f"{what}: different names {sorted(state.keys() ^ expected.keys())}")
        for name, value in expected.items():
            self.same(f"{what}: {name}", state[name], value)

    def same(self, what: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape:
            raise AssertionError(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
        size = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((found.cpu().double() - expected.cpu().double()).abs().max()) if expected.numel() else 0.0
        if not error <= self.case.tolerance * max(size, 0.1):  # written so that NaN fails
            raise AssertionError(f"{what}: off by {error:.2e}, the largest element is {size:.2e}")

    # Computation

    def twins(self, turn: int) -> Iterator[Tensor]:
        """The unsharded model's loss of each rank's batch; only this rank's counts as a call of its own."""
        for rank in range(self.case.world_size):
            self.plain.train(rank == dist.get_rank())
            yield self.plain(*self.batch(rank, turn)).square().mean()
        self.plain.train()

    def backward(self, turn: int, share: float, chosen: Chosen | None = None) -> None:
        """Losses of one batch of each rank, and their gradients; of the chosen parameters only, if there are any."""
        inputs, flags = self.batch(dist.get_rank(), turn)
        loss = self.sharded(inputs, flags).square().mean()
        is_trained = any(param.requires_grad for param in self.plain.parameters())  # else nobody could run a backward
        if is_trained:
            (loss * share).backward(inputs=None if chosen is None else chosen.sharded)
        for rank, twin in enumerate(self.twins(turn)):
            if is_trained:
                (twin * share / self.case.world_size).backward(inputs=None if chosen is None else chosen.plain)
            if rank == dist.get_rank():
                self.same("loss", loss.detach(), twin.detach())

    def end_step(self, clip: float | None = None) -> None:
        _fill_missing(self.sharded, self.plain)
        for param in self.plain.parameters() if self.fills_unused else ():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), clip)
            self.same("gradient norm", self.clip(clip).detach(), norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1


@dataclass
class Chosen:
    """Parameters as the sharded model lists them, and the same ones of its twin."""

    sharded: list[nn.Parameter] = field(default_factory=list)
    plain: list[nn.Parameter] = field(default_factory=list)


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _whole(value: Tensor) -> Tensor:
    from fsdp.distributed.dtensor import full_tensor

    return full_tensor(value)


def _fill_missing(sharded: Any, plain: nn.Module) -> None:
    """Zeros in the twin for parameters without a gradient that lie in a flat parameter with others that have one."""
    for _, together in _listed(sharded, plain):
        if any(param.grad is not None for param in together):
            for param in together:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad


def _listed(sharded: Any, plain: nn.Module) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
    """What the sharded model lists, with the parameters of the twin that are in it."""
    from fsdp import FlatParameter

    params = dict(plain.named_parameters(remove_duplicate=False))
    for raw, listed in sharded.named_parameters():
        *path, name = (part for part in raw.split(".") if part not in WRAPPERS)
        names = listed.metadata()[0] if isinstance(listed, FlatParameter) and name.startswith("flat_param") else [name]
        yield listed, [params[".".join([*path, each])] for each in names]


WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module"}


# --- operations -------------------------------------------------------------------------------------------------------


def train(pair: Pair) -> None:
    """A step of one or two batches, accumulated with or without communication, perhaps clipped."""
    turns, silent = pair.rng.choice((1, 1, 2)), pair.rng.random() < 0.5
    for turn in range(turns):
        with pair.no_sync() if silent and turn < turns - 1 else nullcontext():
            pair.backward(turn, 1 / turns)
    pair.end_step(clip=pair.rng.choice((None, 0.1, 100.0)))


def train_some(pair: Pair) -> None:
    """A step on the gradients of some parameters, which backward is told."""
    trained = [(one, twins) for one, twins in _listed(pair.sharded, pair.plain) if one.requires_grad]
    # Where ranks use different parameters, backward to some of them would come through other units on other ranks.
    chosen, share = Chosen(), pair.rng.choice((0.5, 1.0)) if pair.case.flags != "apart" else 1.0
    for one, twins in trained:
        if pair.rng.random() < share:
            chosen.sharded.append(one)
            chosen.plain += twins
    if chosen.sharded:
        pair.backward(6, 1.0, chosen)
        pair.end_step()


def evaluate(pair: Pair) -> None:
    pair.sharded.eval(), pair.plain.eval()
    with torch.no_grad():
        inputs, flags = pair.batch(dist.get_rank(), 7)
        pair.same("evaluation", pair.sharded(inputs, flags), pair.plain(inputs, flags))
    pair.sharded.train(), pair.plain.train()


def forward_only(pair: Pair) -> None:
    """A forward whose backward never comes."""
    inputs, flags = pair.batch(dist.get_rank(), 8)
    pair.sharded(inputs, flags), pair.plain(inputs, flags)


def two_forwards(pair: Pair) -> None:
    """Two forwards before the backward of both."""
    batches = [pair.batch(dist.get_rank(), turn) for turn in (3, 4)]
    sum(pair.sharded(*batch).square().mean() for batch in batches).backward()
    for turn in (3, 4):
        for twin in pair.twins(turn):
            (twin / pair.case.world_size).backward()
    pair.end_step()


def toggle(pair: Pair) -> None:
    """Parameters are frozen while a graph exists: for a second forward, or for backward."""
    pair.fill_unused(False)  # it would depend on when they are frozen
    listed = [each for each in _listed(pair.sharded, pair.plain) if pair.rng.random() < 0.5]
    frozen = {pair.sharded: [one for one, _ in listed], pair.plain: [twin for _, twins in listed for twin in twins]}
    order, reference = pair.rng.choice(("together", "first", "second", "backward")), pair.rng.random() < 0.3
    recomputes = any(getattr(module, "way", "") == "recomputed" for module in pair.plain.modules())
    if recomputes or not any(param.requires_grad for param in pair.plain.parameters()):
        return  # torch refuses to compute again what saves other tensors than before, as what is frozen does

    def run(model: Any, rank: int, share: float) -> Tensor:
        first, before = model(*pair.batch(rank, 10)).square().mean(), [one.requires_grad for one in frozen[model]]
        for param in frozen[model]:
            param.requires_grad_(False)
        losses = [first]
        if order == "backward":
            (first * share).backward()
        else:
            with torch.set_grad_enabled(not reference):
                losses.append(model(*pair.batch(rank, 11)).square().mean())
        for param, needs in zip(frozen[model], before, strict=True):
            param.requires_grad_(needs)
        if order == "together":
            (sum(losses) * share).backward()
        elif order != "backward":
            for loss in losses if order == "first" else reversed(losses):
                if loss.requires_grad:
                    (loss * share).backward()
        return sum(losses).detach()

    found = run(pair.sharded, dist.get_rank(), 1.0)
    for rank in range(pair.case.world_size):
        pair.plain.train(rank == dist.get_rank())
        expected = run(pair.plain, rank, 1.0 / pair.case.world_size)
        if rank == dist.get_rank():
            pair.same("loss", found, expected)
    pair.plain.train()
    pair.end_step()


def backward_again(pair: Pair) -> None:
    """A graph is kept, and backward runs through it twice."""
    if not any(param.requires_grad for param in pair.plain.parameters()):
        return
    loss = pair.sharded(*pair.batch(dist.get_rank(), 12)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    for twin in pair.twins(12):
        (twin / pair.case.world_size).backward(retain_graph=True)
        (twin / pair.case.world_size).backward()
    pair.end_step()


def write_memory(pair: Pair) -> None:
    """Parameters are written in ways that raise no version counter, after a forward that may have left them whole."""
    evaluate(pair)
    how = pair.rng.choice(("foreach", "assigned", "swapped"))
    for model, optimizer in zip((pair.sharded, pair.plain), pair.optimizers, strict=True):
        params = optimizer.param_groups[0]["params"]
        kept = [param.data for param in params]
        if how == "foreach":
            torch._foreach_mul_(kept, 0.9)
        else:
            for param in params:
                param.data = param.data * 0.9
        if how == "swapped":
            with torch.no_grad():
                model(*pair.batch(0, 13) if pair.case.flags != "apart" else pair.batch(dist.get_rank(), 13))
            for param, data in zip(params, kept, strict=True):
                param.data = data
    evaluate(pair)


def write_rows(pair: Pair) -> None:
    """A part of a parameter along the sharded dimension is written."""
    if pair.is_wrapper or torch.__version__ < "2.13":  # see `fsdp.distributed.gathered_part`
        return
    pair.reshard()
    params = dict(pair.sharded.named_parameters())
    name = pair.rng.choice([name for name, param in pair.plain.named_parameters() if param.dim()])
    start = pair.rng.randrange(params[name].shape[0])
    with torch.no_grad():
        for param in (params[name], dict(pair.plain.named_parameters())[name]):
            param[start:].mul_(0.5)
            param[start].add_(0.25)


def average(pair: Pair) -> None:
    """An average of the weights is kept by torch, and evaluated before and after an update."""
    pair.reshard()
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (pair.sharded, pair.plain)]
    for _ in range(2):
        inputs = pair.batch(dist.get_rank(), 14)
        with torch.no_grad():
            pair.same("average", *(each.eval()(*inputs) for each in averages))
        train(pair)
        pair.reshard()
        for each, model in zip(averages, (pair.sharded, pair.plain), strict=True):
            each.update_parameters(model)


def wrap_otherwise(pair: Pair) -> None:
    """Training goes on with other units, which get the optimizer's state."""
    from fsdp import optim_utils

    options = pair.case.options
    originals = options.get("use_orig_params") or not options.get("flatten_parameters", True)
    if not originals or pair.case.optimizer == "sgd":  # of a flat parameter, parts with and without a state are refused
        return
    by_numbers = pair.rng.random() < 0.5  # as FairScale's methods do, of which the first rank has the state
    if by_numbers:
        told = [pair.sharded.gather_full_optim_state_dict(pair.optimizers[0])]
        dist.broadcast_object_list(told)
    else:
        told = [optim_utils.full_optim_state_dict(pair.sharded, pair.optimizers[0], recipient_rank=None)]
    pair.sharded = _shard(pair.case, copy.deepcopy(pair.plain), again=pair.step + 1)
    new = OPTIMIZERS[pair.case.optimizer](list(pair.sharded.parameters()))
    if by_numbers:
        new.load_state_dict(pair.sharded.get_shard_from_optim_state_dict(told[0]))
    else:
        optim_utils.load_full_optim_state_dict(pair.sharded, new, told[0])
    pair.optimizers = new, pair.optimizers[1]


def load(pair: Pair) -> None:
    """Other values, through `load_state_dict`."""
    torch.manual_seed(pair.step)
    state = {name: value + 0.1 * torch.randn_like(value) for name, value in pair.plain.state_dict().items()}
    for names in _tied(pair.plain):
        for name in names[1:]:
            state[name] = state[names[0]]
    pair.plain.load_state_dict(state)
    pair.sharded.load_state_dict({name: value.clone() for name, value in state.items()})


def summon(pair: Pair) -> None:
    """Whole parameters are changed in place."""
    if not pair.is_wrapper:
        return
    on_first, by_data = pair.rng.random() < 0.3, pair.rng.random() < 0.5
    with pair.sharded.summon_full_params(rank0_only=on_first), torch.no_grad():
        if dist.get_rank() == 0 or not on_first:
            for param in pair.sharded.parameters():
                (param.data if by_data else param).mul_(0.9)
    with torch.no_grad():
        for param in pair.plain.parameters():
            param.mul_(0.9)


def scale_data(pair: Pair) -> None:
    """Shards are changed between steps: through ``.data``, but of `DTensor`s, where nobody can see that."""
    pair.reshard()
    with torch.no_grad():
        for param in pair.sharded.parameters():
            (param.data if pair.is_wrapper else param).mul_(0.8)
        for param in pair.plain.parameters():
            param.mul_(0.8)


def copy_models(pair: Pair) -> None:
    """Training goes on with copies."""
    pair.sharded, pair.plain = copy.deepcopy(pair.sharded), copy.deepcopy(pair.plain)
    pair.renew_optimizers()


def freeze(pair: Pair) -> None:
    """A parameter is frozen, or thawed, by its name."""
    originals = pair.case.options.get("use_orig_params") or not pair.is_wrapper
    if not originals:
        return
    params = dict(pair.sharded.named_parameters())
    names = [name for name in dict(pair.plain.named_parameters()) if name in params]
    if len(names) < 2:
        return
    name = pair.rng.choice(names)
    for param in (params[name], dict(pair.plain.named_parameters())[name]):
        param.requires_grad_(not param.requires_grad)
    pair.renew_optimizers()


def fail(pair: Pair) -> None:
    """A forward that raises, on every rank, and leaves everything as it was."""
    inner = pair.sharded.module.module if pair.is_wrapper else pair.sharded
    hook = inner.exit.register_forward_pre_hook(_raise)
    try:
        pair.sharded(*pair.batch(dist.get_rank(), 9))
    except KeyError as error:
        if "on purpose" not in str(error):
            raise
    hook.remove()
    hook = pair.plain.exit.register_forward_pre_hook(_raise)
    with suppress(KeyError):
        pair.plain(*pair.batch(dist.get_rank(), 9))
    hook.remove()


def _raise(*args: Any) -> None:
    raise KeyError("on purpose")


def optimizer_state(pair: Pair) -> None:
    """The optimizer's state is the twin's, and goes to a new optimizer."""
    from fsdp import optim_utils

    if not pair.is_wrapper:
        return
    full = optim_utils.full_optim_state_dict(pair.sharded, pair.optimizers[0], recipient_rank=None)
    names = {param: name for name, param in pair.plain.named_parameters()}
    state = {names[param]: value for param, value in pair.optimizers[1].state.items()}
    for name, values in state.items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.dim():
                pair.same(f"{key} of {name}", full["state"][name][key], value)
    new = OPTIMIZERS[pair.case.optimizer](list(pair.sharded.parameters()))
    optim_utils.load_full_optim_state_dict(pair.sharded, new, full)
    pair.optimizers = new, pair.optimizers[1]


def save_and_load(pair: Pair) -> None:
    """Through files, to a model whose values were changed in between."""
    import fsdp

    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    try:
        fsdp.save(f"{made[0]}/saved", pair.sharded, pair.optimizers[0], generators=False)
        with torch.no_grad():
            for param in pair.sharded.parameters():
                param.add_(1.0)
        fsdp.load(f"{made[0]}/saved", pair.sharded, pair.optimizers[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(made[0]))


def local_state(pair: Pair) -> None:
    """Shards, as each rank saves its own."""
    if not pair.is_wrapper:
        return
    saved = {name: value.clone() for name, value in pair.sharded.local_state_dict().items()}
    with torch.no_grad():
        for param in pair.sharded.parameters():
            param.add_(1.0)
    pair.sharded.load_local_state_dict(saved)


def change_settings(pair: Pair) -> None:
    """Settings of `fully_shard`'s modules, which change when they communicate, and what unused parameters get."""
    from fsdp import FSDPModule

    if pair.is_wrapper:
        return
    units: list[Any] = [module for module in pair.sharded.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(pair.rng.random() < 0.5, recurse=False)
        unit.set_reshard_after_backward(pair.rng.random() < 0.5, recurse=False)
    pair.rng.choice(units).set_modules_to_forward_prefetch(pair.rng.sample(units, 1))
    pair.rng.choice(units).set_modules_to_backward_prefetch(pair.rng.sample(units, 1))
    pair.sharded.set_keep_unsharded_storage(pair.rng.random() < 0.5)
    pair.sharded.set_reduce_scatter_max_input_buffers(pair.rng.choice((1, 3)))
    pair.fill_unused(pair.rng.random() < 0.5)


def discard(pair: Pair) -> None:
    """Gradients are accumulated and thrown away."""
    with pair.no_sync():
        pair.backward(5, 1.0)
    pair.optimizers[0].zero_grad(), pair.optimizers[1].zero_grad()


OPERATIONS = (
    "train",
    "train",
    "train_some",
    "evaluate",
    "forward_only",
    "two_forwards",
    "toggle",
    "toggle",
    "backward_again",
    "write_memory",
    "write_memory",
    "write_rows",
    "average",
    "wrap_otherwise",
    "load",
    "summon",
    "scale_data",
    "copy_models",
    "freeze",
    "fail",
    "optimizer_state",
    "save_and_load",
    "local_state",
    "discard",
    "change_settings",
)


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [each for each in names.values() if len(each) > 1]


# --- running ----------------------------------------------------------------------------------------------------------


def run_case(case: Case) -> None:
    """Collective. Do what the case says with both models, and raise AssertionError where they differ."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        pair = _make(case)
        pair.compare("after wrapping")
        for number, name in enumerate(case.operations):
            what = f"operation {number}, {name}"
            try:
                globals()[name](pair)
                pair.compare("afterwards")
            except Exception as error:
                raise CaseError(f"seed {case.seed} at {what}: {type(error).__name__}: {error}\n{case}") from error
    finally:
        torch.set_default_dtype(before)


class CaseError(AssertionError):
    """A case's result differs from the unsharded model's, or it raised."""


def _make(case: Case) -> Pair:
    plain = plain_model(case).to(_device)
    return Pair(case, _shard(case, copy.deepcopy(plain)), plain, random.Random(f"operations {case.seed}"))


def run_seeds(seeds: Sequence[int], world_size: int, device: str = "cpu") -> None:
    """Collective. The cases of these seeds, one after the other."""
    global _device
    _device = device
    for seed in seeds:
        run_case(Case.of_seed(seed, world_size))


# --- planted mistakes: that the cases find these shows that they look where they should -------------------------------


def _divided_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda buffer, slot, grad, divisor: original(buffer, slot, grad, 2 * divisor)


def _replaced_instead_of_added(original: Callable[..., Any]) -> Callable[..., Any]:
    def hold(shard: Any, reduced: Tensor) -> None:
        shard.grad = None
        original(shard, reduced)

    return hold


def _of_this_rank_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda comms, tensor, *rest: tensor


def _not_stored_on_the_last_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    def store(values: Any, slot: int, value: Tensor) -> None:
        if dist.get_rank() < dist.get_world_size() - 1:
            original(values, slot, value)

    return store


def _not_summed_over_replicas(original: dict[Any, Any]) -> dict[Any, Any]:
    from fsdp.engine.placements import Collective

    def summed(comm: Any, tensor: Tensor, *args: Any) -> Iterator[None]:
        return tensor
        yield

    return original | {Collective.ALL_REDUCE: summed}


def _forgotten(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _stored_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    def store(listed: Any, given: dict[int, Tensor]) -> None:
        for slot, value in given.items():
            ours = listed._of(listed._flat_param.detach(), slot)
            ours.copy_(value)
            listed._have(slot, ours)

    return store


def _always_the_same(original: Any) -> Any:
    return property(lambda handle: (0, (), ()))


def _all_used(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pieces, used, *args: original(pieces, [1] * len(used), *args)


def _built_anew(original: Callable[..., Any]) -> Callable[..., Any]:
    def follow(handle: Any) -> None:
        before = handle._trained
        original(handle)
        if handle._trained != before:
            handle._build()

    return follow


def _returned_as_it_is(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state: state


def _none(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: []


# What is replaced, and what by.
MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "gradients are divided twice": ("fsdp.engine.grad_buffer.GradientBuffer.add", _divided_twice),
    "gradients replace accumulated ones": (
        "fsdp.engine.flat_param.FlatParameter.hold_gradient",
        _replaced_instead_of_added,
    ),
    "clipping knows this rank's norm only": ("fsdp.layers.grad_clipping.over_all", _of_this_rank_alone),
    "the last rank does not load": ("fsdp.engine.shard_values.ShardValues.store", _not_stored_on_the_last_rank),
    "replicas go apart": ("fsdp.engine.reduction._STAGES", _not_summed_over_replicas),
    "the optimizer's state is not loaded": ("fsdp.optim_utils.load_full_optim_state_dict", _forgotten),
    "stale parameters are computed with": ("fsdp.engine.handle.FlatParamHandle.shard_state", _always_the_same),
    "leaves are built anew when a parameter is frozen": (
        "fsdp.engine.handle.FlatParamHandle.follow_frozen",
        _built_anew,
    ),
    "a forward lists shards": ("fsdp.engine.presentation.Presentation.list_unsharded", _none),
    "writes to memory are not seen": ("fsdp.engine.runtime.Runtime._reshard_overwritten", _forgotten),
    "data of rows is dropped": ("fsdp.layers.dtensor_params.DTensorParams._replaced", _none),
    "data that was kept is overwritten": ("fsdp.engine.orig_params.OrigParams._store", _stored_in_place),
    "writes to rows are dropped": ("fsdp.distributed.gathered_part.Source.write_back", _forgotten),
    "numbers of another nesting are believed": ("fsdp.optim_utils.full.by_stored_names", _returned_as_it_is),
    "what is not used has a gradient": ("fsdp.engine.orig_params.OrigParams.show_gradients", _all_used),
}


def run_seeds_with(mistake: str, seeds: Sequence[int], world_size: int) -> None:
    """Collective. As `run_seeds`, with a mistake planted in the library."""
    place, planted = MISTAKES[mistake]
    owner, _, name = place.rpartition(".")
    pkgutil.resolve_name(place)  # loads what is loaded when it is first used
    target = pkgutil.resolve_name(owner)
    with mock.patch.object(target, name, planted(target.__dict__[name])):
        run_seeds(seeds, world_size)
