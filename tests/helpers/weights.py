"""Sinks that keep what they receive, and models in every form whose weights are sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.weights import Sink, WeightPlan
from tests.helpers import tensor_parallel
from tests.helpers.dcp_folders import Everything
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import Wrap, keep, seeded
from tests.helpers.owned import under_fully_shard


class Collected(Sink):
    """Keeps the rows that it receives, as whole tensors, and counts the buckets."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.buckets: list[int] = []
        self.closed_with: list[BaseException | None] = []

    def open(self, plan: WeightPlan) -> None:
        self.plan = plan
        self.state = {name: torch.empty(each.shape, dtype=each.dtype) for each in plan.tensors for name in each.names}

    def bucket(self, number: int, tensor: Tensor) -> None:
        assert tensor.nbytes == self.plan.bucket_nbytes[number]
        self.buckets.append(tensor.nbytes)
        for piece in self.plan.buckets[number]:
            planned = self.plan.tensors[piece.tensor]
            for name in planned.names:
                rows = self.state[name].view(planned.sizes)[piece.first : piece.first + piece.rows]
                rows.copy_(self.plan.view(piece, tensor))

    def close(self, error: BaseException | None) -> None:
        self.closed_with.append(error)


class Parts(Sink):
    """Keeps this rank's parts, which `whole` puts together to the state that any rank can have."""

    receives = "parts"

    def open(self, plan: WeightPlan) -> None:
        self.plan, self.parts = plan, []

    def bucket(self, number: int, tensor: Tensor) -> None:
        assert number == len(self.parts)
        self.parts.append(tensor.cpu().clone())

    def close(self, error: BaseException | None) -> None:
        assert error is None

    def whole(self) -> dict[str, Tensor]:
        """Collective. Every rank's parts, together."""
        heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(heard, (self.plan.rank, self.parts))
        found = Collected()
        found.open(self.plan)
        for number, nbytes in enumerate(self.plan.bucket_nbytes):
            bucket = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
            for rank, parts in heard:
                self.plan.unpack(self.plan.runs(number, self.plan.parts[rank]), parts[number], bucket)
            found.bucket(number, bucket)
        return found.state


class Anything(Everything):
    """`Everything` with a forward, as `fully_shard` requires it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(self.norm(inputs * self.scale)).sum() + self.tokens.weight.sum() + self.wide.sum().float()


def everything(wrap: Wrap = keep, seed: int = 0) -> Any:
    """`Anything` in two units; the same values on every call."""
    return seeded(Anything, wrap, seed)


def tensors_of(model: nn.Module, buffers: bool = True) -> dict[str, Tensor]:
    """The state of a plain model."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return {name: each.detach() for name, each in model.state_dict().items() if buffers or name in params}


def step(model: Any) -> None:
    """Collective. A step that changes the weights of `Anything`."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _inside(wrap: Callable[..., Any], seed: int) -> Any:
    model = everything(seed=seed)
    model.inner = wrap(model.inner)
    return model  # whose root has no unit


def _ignoring(seed: int) -> Any:
    model = everything(seed=seed)
    return FullyShardedDataParallel(model, ignored_modules=[model.conv, model.norm])


def _mixed(seed: int) -> Any:
    model = everything(seed=seed)
    model.inner = under_fully_shard(model.inner)
    model.conv = FullyShardedDataParallel(model.conv)
    return model


def _strategy(strategy: str, seed: int, **options: Any) -> Any:
    wrap = partial(FullyShardedDataParallel, sharding_strategy=ShardingStrategy[strategy], **options)
    return everything(wrap, seed)


def _hybrid_flat(seed: int) -> Any:
    return everything(partial(FullyShardedDataParallel, process_group=mesh_of(2, dist.get_world_size() // 2)), seed)


def _hybrid_rows(seed: int) -> Any:
    def wrap(module: nn.Module) -> nn.Module:
        ignored = {each for each in module.parameters(recurse=False) if each.dim() == 0}
        return under_fully_shard(module, mesh=mesh_of(2, dist.get_world_size() // 2), ignored_params=ignored)

    return everything(wrap, seed)


def _by_dimension(seed: int) -> Any:
    from torch.distributed.tensor import Shard

    def last(param: nn.Parameter) -> Shard | None:
        return Shard(param.dim() - 1) if param.dim() > 1 else None

    return everything(partial(under_fully_shard, shard_placement_fn=last), seed)


# Models that hold the values of `everything(seed=seed)`. Collective.
MODELS: dict[str, Callable[[int], Any]] = {
    "flat": lambda seed: everything(FullyShardedDataParallel, seed),
    "single": lambda seed: everything(partial(FullyShardedDataParallel, flatten_parameters=False), seed),
    "orig": lambda seed: everything(partial(FullyShardedDataParallel, use_orig_params=True), seed),
    "rows": lambda seed: everything(under_fully_shard, seed),
    "last dimension": _by_dimension,
    "inside": lambda seed: _inside(FullyShardedDataParallel, seed),
    "rows inside": lambda seed: _inside(under_fully_shard, seed),
    "mixed": _mixed,
    "ignored": _ignoring,
    "no shard": lambda seed: _strategy("NO_SHARD", seed),
    "zero 1": lambda seed: _strategy("SHARD_OPTIM", seed),
    "zero 2": lambda seed: _strategy("SHARD_OPTIM_GRADS", seed),
    "offloaded": lambda seed: everything(partial(FullyShardedDataParallel, offload="cpu"), seed),
    "plain": lambda seed: everything(seed=seed),
}
ON_PAIRS: dict[str, Callable[[int], Any]] = {
    "hybrid flat": _hybrid_flat,
    "hybrid rows": _hybrid_rows,
}


def tensor_parallel_gpt(seed: int) -> nn.Module:
    """Collective, on four ranks: data and tensor parallel."""
    mesh = tensor_parallel.mesh_of(2, 2)
    return tensor_parallel.gpt(tensor_parallel.over_data(mesh), mesh=mesh, vocabulary=True, seed=seed)
