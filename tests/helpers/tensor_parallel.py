"""What tests of tensor parallelism share: a mesh of data x tensor dimensions, and a language model cut over it.

Ranks of one tensor dimension see the same rows; a batch is cut over the data dimension only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp.wrap.checkpoint_wrapper import checkpoint_wrapper
from tests.helpers.models import Wrap, keep
from tests.helpers.parity import MakeOptimizer, Parity, Parts, Task, assert_parity, fully_sharded

VOCABULARY, WIDTH, HEADS, HIDDEN, CONTEXT = 29, 8, 4, 14, 6


# Kept for the life of a process: groups are never destroyed, and a mesh that is made anew makes new ones.
@cache
def mesh_of(data: int, tensor: int) -> DeviceMesh:
    """Collective. `data` x `tensor` ranks, in dimensions "dp" and "tp"."""
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


@cache
def cube() -> DeviceMesh:
    """Collective. Four ranks in two tensor dimensions, "a" and "b", beside a data dimension of one."""
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))


def over_data(mesh: DeviceMesh, **options: Any) -> Wrap:
    """The wrap under test: shards over the data dimension."""
    return fully_sharded(process_group=mesh["dp"].get_group(), **options)


# The model


class Layer(nn.Module):
    """Attention and a perceptron, with linear layers that can be cut by heads and by hidden units."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        # Keys without a bias, whose gradient is zero but for rounding; see `tests.helpers.models.Attention`.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self.norms[0](inputs)
        # With tensor parallelism a rank has some of the heads.
        heads = [part(normed).unflatten(-1, (-1, WIDTH // HEADS)) for part in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads), is_causal=True)
        inputs = inputs + self.out(mixed.transpose(1, 2).flatten(2))
        return inputs + self.narrow(F.gelu(self.widen(self.norms[1](inputs))))


class Gpt(nn.Module):
    """A language model; each layer is a unit, embeddings, a norm and the head belong to the root."""

    def __init__(self, layers: list[nn.Module], tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(hidden)))


COLUMNS, ROWS = ColwiseParallel, RowwiseParallel


def heads_and_hidden() -> dict[str, ParallelStyle]:
    """Linear layers are cut; norms stay plain parameters."""
    columns = {name: COLUMNS() for name in ("query", "key", "value", "widen")}
    return {**columns, "out": ROWS(), "narrow": ROWS()}


def sequence() -> dict[str, ParallelStyle]:
    """Norms see a part of the sequence each: their parameters are replicated DTensors with partial gradients."""
    along = Shard(1)
    columns = {name: COLUMNS(input_layouts=along) for name in ("query", "key", "value", "widen")}
    return {
        **columns,
        **{name: ROWS(output_layouts=along) for name in ("out", "narrow")},
        **{f"norms.{number}": SequenceParallel() for number in range(2)},
    }


def parallel(layer: nn.Module, mesh: DeviceMesh, kind: str) -> nn.Module:
    """A layer with parameters on the tensor dimension."""
    tensor = mesh["tp"]
    if kind == "heads":
        return parallelize_module(layer, tensor, heads_and_hidden())
    parallelize_module(layer, tensor, sequence())
    # The module's own inputs and outputs are whole.
    parallelize_module(
        layer,
        tensor,
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    )
    return parallelize_module(
        layer, tensor, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )


def parallel_root(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Embedding and head cut along the vocabulary, which two ranks do not divide."""
    columns = COLUMNS(output_layouts=Replicate())
    return parallelize_module(model, mesh["tp"], {"tokens": ROWS(input_layouts=Replicate()), "head": columns})


def gpt(
    wrap: Wrap = keep,
    *,
    mesh: DeviceMesh | None = None,
    kind: str = "heads",
    vocabulary: bool = False,
    tied: bool = False,
    recompute: bool = False,
    frozen: tuple[str, ...] = (),
    seed: int = 0,
) -> nn.Module:
    """`Gpt` of two layers, wrapped and over `mesh`, or (with the wrap `keep`) whole; the same weights on every call.

    Args:
        wrap: around each layer and the whole.
        mesh: for tensor parallelism of the wrapped model.
        kind: "heads" or "sequence", how layers are cut.
        vocabulary: cut the embedding and the head as well.
        tied: embedding and head are one.
        recompute: layers are in checkpoint wrappers.
        frozen: parameters with one of these in their names are not trained.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gpt([Layer(HIDDEN) for _ in range(2)], tied)
    is_plain = wrap is keep or mesh is None
    for layer in () if is_plain else model.layers:
        parallel(layer, mesh, kind)  # type: ignore[arg-type]
    if vocabulary and not is_plain:
        parallel_root(model, mesh)  # type: ignore[arg-type]
        if tied:
            model.head.weight = model.tokens.weight  # which parallelize_module has made two
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrap(checkpoint_wrapper(layer) if recompute else layer)
    return wrap(model)


class DistributedLinear(nn.Linear):
    """A linear layer that computes on `DTensor`s whatever comes in."""

    def forward(self, inputs: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor) and not isinstance(inputs, DTensor):
            mesh = self.weight.device_mesh
            inputs = DTensor.from_local(inputs, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return super().forward(inputs)


class Whole(nn.Module):
    """Makes a `DTensor` a plain tensor."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.full_tensor() if isinstance(inputs, DTensor) else inputs


def perceptron(
    wrap: Wrap = keep,
    *,
    mesh: DeviceMesh,
    hidden: int,
    placements: Sequence[Sequence[Placement]],
    each: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Two layers with weights of the given `placements` on `mesh`, and plain ones around; for `REGRESSION`.

    Args:
        wrap: around the whole, and around `each` of the two.
        mesh: for tensor parallelism of the wrapped model.
        hidden: units between the two layers; any number.
        placements: of the two weights.
        each: the two layers are units.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ends = nn.Linear(5, 6), nn.Linear(6, 1)
        layers = DistributedLinear(6, hidden), DistributedLinear(hidden, 6)
    if wrap is not keep:
        for layer, cut in zip(layers, placements, strict=True):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, cut))
            # A bias lies along the first dimension.
            along = [place if place == Shard(0) else Replicate() for place in cut]
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, along))
    first, second = map(wrap, layers) if each else layers
    return wrap(nn.Sequential(ends[0], nn.Tanh(), first, nn.Tanh(), second, Whole(), ends[1]))


# Training


def _token_batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


SENTENCES = Task(_token_batch, _token_loss)


def own_rows(mesh: DeviceMesh) -> Parts:
    """The part of a batch that this rank sees: that of its place in the data dimension."""
    data = mesh["dp"]

    def parts(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        mine = data.get_local_rank()
        return [(inputs.chunk(data.size())[mine], targets.chunk(data.size())[mine])]

    return parts


def assert_parallel_parity(
    mesh: DeviceMesh,
    make_optimizer: MakeOptimizer,
    *,
    model: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    steps: int = 2,
    **training: Any,
) -> Parity:
    """Collective. Data x tensor parallel training is that of one process."""
    return assert_parity(
        partial(gpt, mesh=mesh, **(model or {})),
        make_optimizer,
        steps,
        wrap=over_data(mesh, **(options or {})),
        own=own_rows(mesh),
        task=SENTENCES,
        **training,
    )


class Experts(nn.Module):
    """Every rank computes with the experts that it has, on its own inputs."""

    def __init__(self, mesh: DeviceMesh, number: int = 3) -> None:
        super().__init__()
        # Three over two: the ranks have different numbers of them.
        self.weight = nn.Parameter(distribute_tensor(torch.randn(number, 5, 5, dtype=torch.double), mesh, [Shard(0)]))

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        return torch.einsum("bi,eij->bj", inputs, own)
