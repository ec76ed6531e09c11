"""Programs in which sharded training was reported to go wrong silently, for any library and for the plain model.

Each case is a program of a user. It runs with the unsharded model on all rows, and with a library on this rank's rows;
both must return equal tensors. A `Side` contains the functions that a library documents for a purpose: sharding, and
unsharded values. Everything else in a program is torch's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.helpers.ranks import RankError, Ranks
from tests.helpers.workers import Ending

Values = dict[str, Tensor]
RIGHT, WRONG, WARNED = "right", "wrong without a word", "wrong, with the warning "
PROBE = torch.linspace(-1, 1, 10).view(2, 5)


class Side:
    """The unsharded model, which the other sides are compared with."""

    def shard(self, model: nn.Module, *units: str, mesh: DeviceMesh | None = None) -> Any:
        return model

    def part(self, rows: Tensor) -> Tensor:
        return rows

    def seed(self) -> int:
        return 0

    def values(self, model: nn.Module) -> Values:
        """Collective. Return the unsharded values of the model's parameters by name."""
        return {name: plain(value) for name, value in model.state_dict().items()}

    def rows(self, step: int) -> Tensor:
        return self.part(torch.randn(4, 5, generator=torch.Generator().manual_seed(step)))

    def tokens(self, step: int) -> Tensor:
        return self.part(torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step)))


class Sharded(Side):
    """A library that shards a model over two ranks, each of which trains on half of the rows."""

    def part(self, rows: Tensor) -> Tensor:
        return rows[dist.get_rank() :: dist.get_world_size()]

    def seed(self) -> int:
        return dist.get_rank()

    def shard(self, model: nn.Module, *units: str, mesh: DeviceMesh | None = None) -> Any:
        for unit in units:
            setattr(model, unit, self.wrap(model.get_submodule(unit), mesh))
        return self.wrap(model, mesh)

    def wrap(self, module: nn.Module, mesh: DeviceMesh | None) -> Any:
        raise NotImplementedError


class FSDP1(Sharded):
    def wrap(self, module: nn.Module, mesh: DeviceMesh | None) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
        if mesh is not None:
            options |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        return FullyShardedDataParallel(module, **options)


class FSDP2(Sharded):
    def wrap(self, module: nn.Module, mesh: DeviceMesh | None) -> Any:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))


class Wrapper(Sharded):
    def wrap(self, module: nn.Module, mesh: DeviceMesh | None) -> Any:
        from fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(module, process_group=mesh, use_orig_params=True)


class FullyShard(Sharded):
    def wrap(self, module: nn.Module, mesh: DeviceMesh | None) -> Any:
        from fsdp import fully_shard

        return fully_shard(module, mesh=mesh)


LIBRARIES: dict[str, type[Sharded]] = {
    "FSDP1": FSDP1,
    "FSDP2": FSDP2,
    "`FullyShardedDataParallel`": Wrapper,
    "`fully_shard`": FullyShard,
}
PEERS, OURS = list(LIBRARIES)[:2], list(LIBRARIES)[2:]


def plain(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.first(rows).tanh())


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 2 beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 7).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(5, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + self.lora_b(self.lora_a(rows))


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 4, **options), nn.Linear(4, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def take_step(model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_probe(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return plain(model(PROBE))


# The programs


def replicas_without_shards(side: Side) -> Values:
    mesh = None if type(side) is Side else init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = side.shard(Net(), "first", mesh=mesh)
    optimizer = sgd(model)
    for step in range(2):
        take_step(model, side.rows(step), optimizer)
    return side.values(model)


def clipping(side: Side) -> Values:
    model = side.shard(Net(), "first")
    optimizer = sgd(model)
    for step in range(2):
        model(side.rows(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model)


def overflow_on_one_rank(side: Side) -> Values:
    torch.manual_seed(0)
    model = side.shard(nn.Linear(5, 3))
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, factor in enumerate([1.0, 3e38]):  # the second overflows in the last row of the weight only
        outputs = model(side.rows(step))
        scaler.scale(outputs.square().mean() + factor * outputs[:, 2].mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return side.values(model)


def tied_after_sharding(side: Side) -> Values:
    model = side.shard(Words())
    model.head.weight = model.embed.weight
    optimizer = sgd(model)
    for step in range(2):
        take_step(model, side.tokens(step), optimizer)
    return side.values(model)


def moving_average(side: Side) -> Values:
    model = Net()
    average = side.shard(copy.deepcopy(model).requires_grad_(False))
    model = side.shard(model)
    optimizer, outputs = sgd(model), {}
    for step in range(3):
        take_step(model, side.rows(step), optimizer)
        for averaged, param in zip(average.parameters(), model.parameters(), strict=True):
            averaged.data.lerp_(param.data, 0.5)
        outputs[f"step {step}"] = on_probe(average)
    return outputs


def saved_adapter(side: Side) -> Values:
    model = side.shard(Adapted(), "base")
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    take_step(model, side.rows(0), optimizer)
    inner = getattr(model, "module", model)
    return {name: plain(value) for name, value in inner.state_dict().items() if "lora" in name}


def renormalized_embedding(side: Side) -> Values:
    model = side.shard(Words(max_norm=0.5), "embed")
    optimizer = sgd(model)
    for step in range(2):
        take_step(model, side.tokens(step), optimizer)
    with torch.no_grad():
        model(side.tokens(2))
    return side.values(model)


def optimizer_before_sharding(side: Side) -> Values:
    model = Net()
    optimizer = sgd(model)
    model = side.shard(model, "first")
    take_step(model, side.rows(0), optimizer)
    return side.values(model)


def forward_before_the_optimizer(side: Side) -> Values:
    model = side.shard(Net(), "first")
    on_probe(model)
    optimizer = sgd(model)
    for step in range(2):
        take_step(model, side.rows(step), optimizer)
    return side.values(model)


def assigned_data(side: Side) -> Values:
    model = side.shard(Net(), "first")
    optimizer = sgd(model)
    for step in range(2):
        take_step(model, side.rows(step), optimizer)
        for param in model.parameters():
            param.data = param.data * 0.5
    return side.values(model)


def whole_matrices(side: Side) -> Values:
    model = side.shard(Net(), "first")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    for step in range(2):
        take_step(model, side.rows(step), optimizer)
    return side.values(model)


def seeded_by_rank(side: Side) -> Values:
    model = side.shard(Net(seed=side.seed()), "first")
    optimizer = sgd(model)
    take_step(model, side.rows(0), optimizer)
    return side.values(model)


@dataclass(frozen=True)
class Case:
    """A program, and for each library of this package that must raise an error a pattern of its message."""

    title: str
    program: Callable[[Side], Values]
    wrapper: str = ""
    fully_shard: str = ""

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")

    def error(self, library: str) -> str:
        """Return the pattern of the error that a library of this package raises, or an empty text."""
        return {OURS[0]: self.wrapper, OURS[1]: self.fully_shard}[library]


SEEDS = r"other values than rank 0 of last\.weight.*Seed all ranks alike"
LATE = r"SGD was created before the model was sharded.*Create it after sharding"
ROWS = WARNED + r"Adafactor needs the rows, columns or norms.*OwnedOptimizer"
CASES = (
    Case("Replicas without shards", replicas_without_shards),
    Case("Clipping by the norm of a shard", clipping),
    Case("An overflow on one rank", overflow_on_one_rank, wrapper=r"this rank's shards only.*ShardedGradScaler"),
    Case("Weights tied after sharding", tied_after_sharding, wrapper=r"embed\.weight is sharded.*summon_full_params"),
    Case("A moving average of the weights", moving_average),
    Case(
        "An adapter saved in shards", saved_adapter, wrapper=r"hold this rank's shards.*state_dict\(\) of the wrapper"
    ),
    Case("An embedding that renormalizes its rows", renormalized_embedding),
    Case("An optimizer created before sharding", optimizer_before_sharding, LATE, LATE),
    Case("A forward before the optimizer is created", forward_before_the_optimizer),
    Case("Assigned data of a parameter", assigned_data),
    Case(
        "An optimizer of whole matrices", whole_matrices, wrapper=ROWS, fully_shard=r"rows and columns.*OwnedOptimizer"
    ),
    Case("Another seed on each rank", seeded_by_rank, SEEDS, SEEDS),
)


def is_right(title: str, library: str) -> tuple[bool, list[str]]:
    """Collective. Return whether a library and the plain model give equal values on this rank, and its warnings."""
    program = next(case.program for case in CASES if case.title == title)
    expected = program(Side())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = program(LIBRARIES[library]())
    right = expected.keys() == found.keys() and all(
        found[name].shape == value.shape and torch.allclose(found[name], value, atol=1e-5)
        for name, value in expected.items()
    )
    return right, [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def outcome(ranks: Ranks, title: str, library: str) -> str:
    """Run a case on ranks and return `RIGHT`, `WRONG`, the message of the error, or of a warning after `WARNED`."""
    try:
        results = ranks.run(is_right, title, library)
    except RankError as error:
        messages = [each.headline for each in error.outcomes if each.ending is Ending.RAISED]
        if not messages:
            raise
        return messages[0]
    if all(right for right, _ in results):
        return RIGHT
    texts = [text for _, texts in results for text in texts]
    return WARNED + texts[0] if texts else WRONG
