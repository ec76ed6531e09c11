"""Ours and torch's `fully_shard` side by side, and ours beside a plain twin.

Both cut parameters alike, so weights and gradients are compared part by part on every rank, without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchsPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Shard

import fsdp
from fsdp import TrainingState
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit, unit_of
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import full_state
from tests.helpers.models import NestedMlp, Wrap, keep
from tests.helpers.models import seeded as seeded
from tests.helpers.parity import REGRESSION, MakeModel, MakeOptimizer, Task
from tests.helpers.traffic import Counting, Traffic
from tests.helpers.twins import Step, Twins, once, sgd, take_all

FullyShard = Callable[..., Any]
ROUNDING = 1e-10  # of float64 sums in another order, relative to the largest element


def adamw_one_by_one(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False)


def adamw_at_once(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=True)


class SgdOfParts(torch.optim.SGD):
    """SGD with momentum that steps this rank's parts of `DTensor`s as plain tensors.

    torch looks for a sharding of every operation on `DTensor`s of each size, which takes tens of milliseconds on a mesh
    of several dimensions: most of a training, where the optimizer is not the point.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.listed = list(params)
        super().__init__([nn.Parameter(local(param)) for param in self.listed], lr=0.1, momentum=0.9)

    def step(self, closure: None = None) -> None:
        for own, param in zip(self.param_groups[0]["params"], self.listed, strict=True):
            own.grad = None if param.grad is None else local(param.grad)
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.listed:
            param.grad = None


# Sharding


def ours(**options: Any) -> Wrap:
    """Our `fully_shard`, with what `_translated` knows in words."""
    return _wrap(fsdp.fully_shard, fsdp.MixedPrecisionPolicy, options)


def torchs(**options: Any) -> Wrap:
    """torch's, with the same words; it cannot offload without an accelerator, so it doesn't."""
    options.pop("offload_policy", None)
    return _wrap(torchs_fully_shard, TorchsPolicy, options)


def _wrap(fully_shard: FullyShard, policy: Any, options: dict[str, Any]) -> Wrap:
    found = dict(options)
    if "mp_policy" in found:
        found["mp_policy"] = policy(**found["mp_policy"])
    if "mesh" in found:
        found["mesh"] = found["mesh"] if isinstance(found["mesh"], DeviceMesh) else mesh_of(*found["mesh"])

    def wrap(module: nn.Module) -> nn.Module:
        sharded: nn.Module = fully_shard(module, **found)
        return sharded

    return wrap


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def last_dim_if_even(param: nn.Parameter) -> Shard | None:
    """A placement that torch's has too: even along the last dimension."""
    return Shard(param.dim() - 1) if param.shape[-1] % dist.get_world_size() == 0 else None


# Models


class Uneven(NestedMlp):
    """A perceptron as torch's `fully_shard` takes it too: its scale has a dimension."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__(wrap, scale=[1.25], gates=2)


class ConvNet(nn.Module):
    """Convolutions with batch norm, over inputs of five elements."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        layers = [nn.Conv1d(1, 6, 3, padding=1), nn.Conv1d(6, 5, 3, padding=1)]
        self.layers = nn.ModuleList(wrap(self._layer(conv)) for conv in layers)
        self.exit = nn.Linear(5, 1)

    @staticmethod
    def _layer(conv: nn.Conv1d) -> nn.Module:
        # Without conv bias: batch norm takes it out again, so that its gradient is nothing but rounding.
        conv.register_parameter("bias", None)
        return nn.Sequential(conv, nn.BatchNorm1d(conv.out_channels), nn.ReLU())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.unsqueeze(1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.exit(hidden.mean(2))


def uneven(wrap: Wrap = keep, *, seed: int = 0) -> nn.Module:
    return seeded(Uneven, wrap, seed)


def partly_frozen(frozen: Sequence[str], wrap: Wrap) -> nn.Module:
    """`Uneven` with these modules frozen before it is sharded: both kinds of unit must find it so."""

    def build(inner: Wrap) -> nn.Module:
        model = Uneven(keep)
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        for name in ("trunk.2", "trunk", "gate"):
            inner(model.get_submodule(name))
        return model

    return seeded(build, wrap)


def conv_net(wrap: Wrap = keep) -> nn.Module:
    return seeded(ConvNet, wrap)


# Training side by side


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What both train, and how."""

    make_model: MakeModel
    make_optimizer: MakeOptimizer = SgdOfParts
    task: Task = REGRESSION
    steps: int = 2
    rows: int = 2
    accumulate: int = 1
    sync_each: bool = False  # also reduce after the batches of a step that are not its last
    clip: float | None = None
    before_step: Callable[[Any, int], None] | None = None
    mesh: DeviceMesh | None = None  # of data parallelism: the ranks beside it see the same batches
    is_counted: bool = True  # whether what ranks receive in the last step is compared

    @property
    def place(self) -> int:
        """Return which of the batches of a step this rank sees."""
        return dist.get_rank() if self.mesh is None else self.mesh.get_local_rank(self.mesh.ndim - 1)


@dataclass
class Trained:
    """What a rank has seen of a training: losses, its parts of gradients and weights, what the last step brought."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Any] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


def train(plan: Plan, wrap: Wrap) -> Trained:
    """Collective. Train under one `fully_shard`, each rank on its own batches."""
    model: Any = plan.make_model(wrap)
    optimizer = plan.make_optimizer(model.parameters())
    found = Trained()
    for step in range(plan.steps):
        with Counting(found.traffic) if plan.is_counted and step == plan.steps - 1 else nullcontext():
            _take_step(plan, step, model, optimizer, found)
    state = model.state_dict()
    found.weights = {name: local(value).clone() for name, value in state.items()}
    found.spread = {name: spread_of(value) for name, value in state.items() if isinstance(value, DTensor)}
    return found


def _take_step(plan: Plan, step: int, model: Any, optimizer: torch.optim.Optimizer, found: Trained) -> None:
    if plan.before_step is not None:
        plan.before_step(model, step)
    for turn in range(plan.accumulate):
        if plan.accumulate > 1:
            model.set_requires_gradient_sync(plan.sync_each or turn == plan.accumulate - 1)
        generator = torch.Generator().manual_seed(1000 * step + 10 * turn + plan.place)
        inputs, targets = plan.task.batch(generator, plan.rows)
        outputs, targets = model(_like_weights(inputs)), _like_weights(targets)
        loss = plan.task.loss(outputs.to(torch.get_default_dtype()), targets)
        loss.backward()
        found.losses.append(loss.item())
    if plan.clip is not None:
        found.norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), plan.clip))))
    found.gradients.append({name: _copied(param.grad) for name, param in model.named_parameters()})
    optimizer.step()
    optimizer.zero_grad()


def spread_of(tensor: DTensor) -> tuple[Any, ...]:
    """Return all by which a `DTensor` knows where its elements are."""
    return tensor.shape, tensor.stride(), tensor.placements, tensor.device_mesh


def _like_weights(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def _copied(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else local(grad).clone()


def assert_side_by_side(
    plan: Plan,
    *,
    theirs: Plan | None = None,
    unlike: dict[str, Any] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Collective. Ours trains as torch's does: the same losses, norms, gradients and weights on this rank.

    Bit for bit at one and two ranks, where sums have one order; in float64 and but for rounding at more, and for norms,
    or within a `tolerance`, relative to the largest element. A rank receives no more than with torch's, but for norms:
    a number from each other rank, which torch's communicate without being seen. `unlike` are options that only ours is
    given, and `theirs` is the plan of torch's, if it is another one.
    """
    if tolerance is None and (dist.get_world_size() > 2 or plan.clip is not None):
        torch.set_default_dtype(torch.float64)
        tolerance = ROUNDING
    expected, found = train(theirs or plan, torchs(**options)), train(plan, ours(**{**options, **(unlike or {})}))
    assert_within("losses", torch.tensor(found.losses), torch.tensor(expected.losses), tolerance)
    assert_within("norms", torch.tensor(found.norms), torch.tensor(expected.norms), tolerance)
    for step, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert list(mine) == list(theirs)
        for name, gradient in theirs.items():
            assert_within(f"gradient of {name} in step {step}", mine[name], gradient, tolerance)
    assert_states_within(found.weights, expected.weights, tolerance)
    assert found.spread == expected.spread
    # torch's ranks tell each other nothing besides, and gather parameters of several dtypes as bytes.
    most = (
        expected.traffic.values
        + expected.traffic.words
        + len(found.norms) * (dist.get_world_size() - 1) * torch.float64.itemsize
    )
    assert found.traffic.values <= most, "a rank receives more than with torch's"


def assert_within(what: str, found: Tensor | None, expected: Tensor | None, tolerance: float | None = None) -> None:
    """Equal tensors, or both None: to the last bit, or within a `tolerance` relative to the largest element."""
    assert (found is None) is (expected is None), f"{what}: {found} against {expected}"
    if found is None or expected is None:
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if tolerance is None or not found.is_floating_point():
        assert torch.equal(found, expected), f"{what}: {found} against {expected}"
    elif found.numel():
        distance = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
        assert distance <= tolerance, f"{what} is {distance:.1e} away: {found} against {expected}"


def assert_states_within(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float | None = None
) -> None:
    """As `assert_within`, of tensors under the same names in the same order."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_within(name, found[name], value, tolerance)


# Ours beside a plain twin


class RowTwins(Twins):
    """A model under our `fully_shard`, and the same one plain, which take the same steps."""

    @classmethod
    def of(cls, make: Callable[[Wrap], nn.Module], **options: Any) -> RowTwins:
        torch.set_default_dtype(torch.float64)
        models = make(ours(**options)), make(keep)
        return cls(*models, [sgd(model.parameters()) for model in models])

    def assert_close(self) -> None:
        assert_at_rest(self.sharded)
        self.share_plain()
        assert_close_state(full_state(self.sharded), self.plain.state_dict(), rtol=1e-10, atol=1e-12)


def assert_trains_as_plain(make: Callable[[Wrap], nn.Module], *steps: Step, **options: Any) -> None:
    """As `trained_twins`, for bodies of tests."""
    trained_twins(make, *steps, **options)


def trained_twins(make: Callable[[Wrap], nn.Module], *steps: Step, **options: Any) -> RowTwins:
    """Collective. The given steps and the first one again leave the same weights sharded and plain."""
    twins = RowTwins.of(make, **options)
    steps = steps or (once,)
    take_all(twins, *steps, steps[0])
    return twins


# Looking inside


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """Collective. The whole of a `DTensor`."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def units(model: nn.Module) -> Iterator[Unit]:
    return filter(None, map(unit_of, model.modules()))


def handles(model: nn.Module) -> list[FlatParamHandle]:
    return [handle for unit in units(model) for handle in unit.handles]


def is_whole(model: nn.Module) -> bool:
    """Whether any of its own parameters takes the memory of the whole."""
    unit = unit_of(model)
    assert unit is not None
    return any(handle.unsharded.full.untyped_storage().nbytes() > 0 for handle in unit.handles if handle.is_sharded)


def assert_at_rest(model: nn.Module) -> None:
    """Between steps every unit is idle, no whole parameter has memory, and modules list `DTensor`s."""
    for unit in units(model):
        assert unit.state is TrainingState.IDLE
        assert not is_whole(unit.module), f"{unit.name} is whole between steps"
    assert all(isinstance(param, DTensor) for param in model.parameters())
