"""What `fsdp.plan` predicts is what training then takes: states and messages to the byte, peaks within 0.5 percent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from examples.gpt.model import GPT, Block, GPTConfig
from fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    auto_wrap,
    checkpoint_wrapper,
    enable_wrap,
    module_wrap_policy,
)
from fsdp.distributed.collectives import communicator
from fsdp.distributed.imagined import META, ImaginedGroup
from fsdp.engine.runtime import runtimes
from fsdp.layers.fingerprints import fingerprint
from fsdp.layers.summary import size_text
from fsdp.wrap import AutoWrapPolicy
from fsdp.wrap.live_bytes import LiveBytes
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import Net
from tests.helpers.ranks import RankPool

BATCH, CONTEXT, WIDTH = 2, 64, 128


def gpt(num_layers: int = 3) -> nn.Module:
    return GPT(GPTConfig(num_layers, num_heads=4, width=WIDTH, context=CONTEXT))


def short_gpt() -> nn.Module:
    return gpt(2)


def checkpointed_gpt() -> nn.Module:
    model: Any = short_gpt()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return model


def adapted(inner: nn.Module) -> nn.Module:
    """A frozen block with a small one beside it that is trained."""
    return Net(
        lambda net, x: net.inner(x) + net.up(torch.relu(net.down(x))),
        inner=inner.requires_grad_(False),
        down=nn.Linear(WIDTH, 8),
        up=nn.Linear(8, WIDTH),
    )


def adapted_gpt() -> nn.Module:
    model: Any = short_gpt().requires_grad_(False)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = adapted(block)
    return model


class UnevenConvolutions(nn.Module):
    """Convolutions of 3 to 131 channels, which no number of ranks divides, with batch norms."""

    CHANNELS = (3, 17, 33, 70, 131)

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(few, many, 3, stride=2, padding=1), nn.BatchNorm2d(many), nn.ReLU())
            for few, many in zip(self.CHANNELS, self.CHANNELS[1:], strict=False)
        )
        self.head = nn.Linear(self.CHANNELS[-1], 10)

    def forward(self, images: Tensor) -> Any:
        for stage in self.stages:
            images = stage(images)
        return self.head(images.mean((2, 3)))


class Layers(nn.Sequential):
    """Linear layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(33, 131), nn.ReLU(), nn.Linear(131, 33))


def stacked_layers() -> nn.Module:
    return nn.Sequential(Layers(), Layers(), Layers(), nn.Linear(33, 7))


def loss_of(output: Tensor) -> Tensor:
    return output.float().sum()


@dataclass(frozen=True)
class Case:
    """A model that is trained, and planned."""

    model: Callable[[], nn.Module]
    units: type[nn.Module] = Block
    shape: tuple[int, ...] | None = None  # of the inputs; None: of tokens
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    rows: int = BATCH  # of tokens

    def sample(self) -> Tensor:
        return torch.zeros(self.rows, CONTEXT).long() if self.shape is None else torch.zeros(self.shape)

    @property
    def policy(self) -> Any:
        return module_wrap_policy({self.units})

    def plan(self, world_size: int, backend: str = "gloo", **options: Any) -> fsdp.Plan:
        with torch.device("meta"):
            model = self.model()
        return fsdp.plan(
            model,
            world_size,
            auto_wrap_policy=self.policy,
            sample=self.sample(),
            loss=loss_of,
            optimizer=self.optimizer,
            backend=backend,
            **{**self.options, **options},
        )


CONVOLUTIONS = UnevenConvolutions, nn.Sequential, (BATCH, 3, 63, 61)
CASES = {
    "GPT": Case(gpt),
    "GPT kept after forward": Case(short_gpt, options={"reshard_after_forward": False}),
    "GPT in bfloat16": Case(short_gpt, options={"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}),
    "GPT of original parameters": Case(short_gpt, options={"use_orig_params": True}),
    "GPT not sharded": Case(short_gpt, options={"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "GPT with checkpoints": Case(checkpointed_gpt),
    "GPT of one unit for each parameter": Case(short_gpt, options={"flatten_parameters": False, "bucket_cap_mb": 0}),
    "GPT by ZeRO-1": Case(short_gpt, options={"sharding_strategy": ShardingStrategy.SHARD_OPTIM}),
    "GPT by ZeRO-2": Case(short_gpt, options={"sharding_strategy": ShardingStrategy.SHARD_OPTIM_GRADS}),
    "convolutions": Case(*CONVOLUTIONS),
    "convolutions by fused AdamW": Case(*CONVOLUTIONS, optimizer=partial(torch.optim.AdamW, fused=True)),
    "adapters": Case(adapted_gpt, Net),
    "adapters of original parameters": Case(adapted_gpt, Net, options={"use_orig_params": True}),
}


@dataclass
class Measured:
    """What one rank held and sent in training."""

    states: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    host_peaks: dict[str, int] = field(default_factory=dict)
    sent: int = 0


@contextmanager
def counting(measured: Measured) -> Iterator[None]:
    """Count the bytes of parameters and gradients that this rank sends."""
    kind: Any = type(dist.group.WORLD)
    send = kind.send

    def count(self: Any, tensors: list[Tensor], *args: Any) -> Any:
        if tensors[0].dtype is not torch.uint8:  # which is what ranks tell each other
            measured.sent += sum(tensor.nbytes for tensor in tensors)
        return send(self, tensors, *args)

    with mock.patch.object(kind, "send", count):
        yield


def train(case: Case, policy: AutoWrapPolicy | None = None, device: str = "cpu") -> Measured:
    """Train as was planned, and measure."""
    measured, live, host = Measured(), LiveBytes(device), LiveBytes("cpu")
    plain = case.model().to(device)
    inputs = case.sample().to(device)

    def note(phase: str) -> None:
        measured.peaks[phase] = max(measured.peaks.get(phase, 0), live.peak)
        measured.host_peaks[phase] = max(measured.host_peaks.get(phase, 0), host.peak)
        forget()

    def forget() -> None:
        live.forget_peak()
        host.forget_peak()

    for each in (device, "cpu"):
        fingerprint(torch.ones(1, device=each))  # which keeps a table of 512 KiB from the first time on
    with live, host if device != "cpu" else nullcontext(), counting(measured):
        for tensor in (inputs, *plain.buffers()):
            live.assign(tensor, "")
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **case.options):
            inner = auto_wrap(plain, policy or case.policy)
        model = FullyShardedDataParallel(inner, **case.options)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = case.optimizer(trained)
        forget()
        note("after construction")
        for _ in range(3):
            measured.sent = 0
            loss = loss_of(model(inputs))
            note("forward")
            loss.backward()
            note("backward")
            del loss
            handles = [handle for wrapper in fsdp.get_fsdp_instances(model) for handle in wrapper._unit.handles]
            grads = [each for each in (handle.flat_param.held_gradient for handle in handles) if each is not None]
            unreduced = sum(handle.gradients.nbytes for handle in handles)
            forget()
            optimizer.step()
            note("optimizer step")
            state = [each for one in optimizer.state.values() for each in one.values() if isinstance(each, Tensor)]
            measured.states = {
                "parameters": sum(handle.flat_param.nbytes for handle in handles),
                "gradients": sum(grad.nbytes for grad in grads) + unreduced,
                "optimizer": sum(each.nbytes for each in state),
            }
            del grads, state
            optimizer.zero_grad()
            forget()
            note("between steps")
    return measured


def _train(name: str) -> Measured:
    return train(CASES[name])


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in CASES), ("convolutions", 4)])
def test_what_is_planned_is_what_training_takes(ranks: RankPool, name: str, world_size: int) -> None:
    _compare(CASES[name].plan(world_size), ranks(world_size).run(_train, name)[0])


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIM"])
def test_what_is_planned_with_replicas_is_what_training_takes(ranks: RankPool, strategy: str) -> None:
    case = Case(gpt, options={"sharding_strategy": ShardingStrategy[strategy]})
    plan = case.plan(4, replicas=2)
    _compare(plan, ranks(4).run(_train_with_replicas, strategy)[0])
    blocks = [unit for unit in plan.units if "blocks" in unit.name]
    assert [unit.all_gathers for unit in blocks] == [2, 2, 1]


def _train_with_replicas(strategy: str) -> Measured:
    options = {"sharding_strategy": ShardingStrategy[strategy], "process_group": mesh_of(2, 2)}
    return train(Case(gpt, options=options))


def _compare(plan: fsdp.Plan, measured: Measured) -> None:
    planned = {"parameters": plan.parameter_bytes, "gradients": plan.gradient_bytes, "optimizer": plan.optimizer_bytes}
    assert planned == measured.states
    assert plan.bytes_sent == measured.sent
    peaks = {phase.name: phase.peak for phase in plan.phases}
    assert peaks == pytest.approx(measured.peaks, rel=0.005)


OFFLOADED: dict[str, dict[str, Any]] = {
    "flat": {},
    "by original parameters": {"use_orig_params": True},
    "in bfloat16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
}


@pytest.mark.accelerator
@pytest.mark.parametrize(("name", "world_size"), [("flat", 1), *((name, 2) for name in OFFLOADED)])
def test_what_is_offloaded_is_counted_on_the_host(
    accelerator_ranks: AcceleratorRanks, name: str, world_size: int
) -> None:
    case = offloaded(name)
    plan = case.plan(world_size, backend="nccl")
    measured: Measured = accelerator_ranks(world_size, backend="nccl").run(_train_offloaded, name)[0]
    assert {phase.name: phase.host_peak for phase in plan.phases} == measured.host_peaks
    assert {phase.name: phase.peak for phase in plan.phases} == pytest.approx(measured.peaks, rel=0.005)
    assert plan.host_peak > plan.parameter_bytes + plan.gradient_bytes + plan.optimizer_bytes
    assert size_text(plan.host_peak) in str(plan)


def offloaded(name: str) -> Case:
    return Case(stacked_layers, Layers, (BATCH, 33), {"offload": "cpu", **OFFLOADED[name]})


def _train_offloaded(name: str) -> Measured:
    case = offloaded(name)
    case.options["compute_device"] = ACCELERATOR
    return train(case, device=ACCELERATOR)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_states_and_messages_are_known_without_a_sample(backend: str) -> None:
    policy = module_wrap_policy({Block})
    without, given = (
        fsdp.plan(gpt(), 4, auto_wrap_policy=policy, sample=sample, backend=backend)
        for sample in (None, CASES["GPT"].sample())
    )
    assert without.units == given.units
    assert without.bytes_sent == given.bytes_sent
    assert without.collectives == given.collectives
    assert without.optimizer_bytes == given.optimizer_bytes
    assert without.peak < given.peak
    assert (without.has_activations, given.has_activations) == (False, True)


def test_replicas_send_what_is_reduced_across() -> None:
    model = nn.Linear(12, 12, bias=False)
    for world_size, replicas in ((4, 2), (8, 2), (6, 3)):
        shards = world_size // replicas
        plan = fsdp.plan(model, world_size, replicas=replicas, backend="nccl")
        whole = 4 * 12 * 12
        # One all-gather, since the outermost unit keeps its parameters, and one reduction.
        within = 2 * whole * (shards - 1) // shards
        assert plan.bytes_sent == within + 2 * (whole // shards) * (replicas - 1) // replicas
        assert plan.parameter_bytes == whole // shards


def test_collectives_of_a_backend_receive_less_than_messages() -> None:
    by_messages, by_collectives = (
        fsdp.plan(gpt(), 4, auto_wrap_policy=module_wrap_policy({Block}), backend=backend, bucket_cap_mb=0)
        for backend in ("gloo", "nccl")
    )
    assert by_messages.bytes_sent == by_collectives.bytes_sent
    assert by_messages.collectives == by_collectives.collectives
    assert by_messages.peak > by_collectives.peak


@pytest.mark.parametrize("sends_pieces", [True, False])
def test_what_is_sent_lives_until_it_is_awaited(sends_pieces: bool) -> None:
    group = ImaginedGroup(0, 2, sends_pieces)
    with group.reachable():
        way, full = communicator(group, META), torch.empty(8, device=META)
        shard = torch.empty(4, device=META)
        gathering, is_there = way.all_gather(full, shard, "", ""), weakref.ref(shard)
        del shard
        assert is_there() is not None
        gathering.wait()
        is_there = weakref.ref(full)
        if not sends_pieces:
            reducing = way.reduce_scatter(full, "", "")
            del full, gathering
            assert is_there() is not None
            reducing.wait()
            assert is_there() is None


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_the_state_of_every_optimizer_of_torch_is_planned(name: str) -> None:
    make: Any = getattr(torch.optim, name)
    plan = fsdp.plan(nn.Linear(7, 6, bias=False), 2, optimizer=make, sample=torch.zeros(2, 7))
    shard = nn.Parameter(torch.ones(21))
    shard.grad = torch.ones(21)
    optimizer = make([shard])
    optimizer.step()
    state = [each for each in optimizer.state[shard].values() if isinstance(each, Tensor)]
    assert plan.optimizer_bytes == sum(each.nbytes for each in state) > 0


def test_the_model_stays_as_it_is() -> None:
    model, others = gpt(), runtimes()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fsdp.plan(model, 3, auto_wrap_policy=module_wrap_policy({Block}), sample=CASES["GPT"].sample())
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * len(before)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    assert all(param.grad is None for param in model.parameters())
    assert all(runtime in others for runtime in runtimes())


def test_units_are_classes_or_a_policy() -> None:
    by_class = fsdp.plan(gpt(), 2, auto_wrap_policy={Block})
    assert len(by_class.units) > 1
    assert by_class == fsdp.plan(gpt(), 2, auto_wrap_policy=module_wrap_policy({Block}))
    with pytest.raises(ValueError, match="LSTM occurs nowhere in this GPT"):
        fsdp.plan(gpt(), 2, auto_wrap_policy={nn.LSTM})


def test_it_plans_inside_of_a_wrapping_context() -> None:
    policy = module_wrap_policy({Block})
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, reshard_after_forward=False):
        inside = fsdp.plan(gpt(), 2, auto_wrap_policy=policy)
    assert inside == fsdp.plan(gpt(), 2, auto_wrap_policy=policy)


def test_ignored_modules_are_not_sharded() -> None:
    model: Any = gpt()
    ignored = list(model.blocks[0].modules())
    plan = fsdp.plan(model, 2, auto_wrap_policy=module_wrap_policy({Block}), ignored_modules=[model.blocks[0]])
    left_out = sum(param.numel() for param in ignored[0].parameters())
    assert len(plan.units) == len(model.blocks)
    assert sum(unit.parameters for unit in plan.units) == sum(p.numel() for p in model.parameters()) - left_out


def test_ignored_parts_are_given_as_to_the_wrapper() -> None:
    model: Any = gpt()
    expected = fsdp.plan(model, 2, ignored_modules=[model.blocks[0].mlp])
    assert fsdp.plan(model, 2, ignored_modules=model.blocks[0].mlp) == expected
    assert fsdp.plan(model, 2, ignored_modules=[model.blocks[0].mlp, nn.Linear(2, 2)]) == expected, "one is elsewhere"
    one = fsdp.plan(model, 2, ignored_parameters=model.blocks[0].mlp.up.weight)
    assert one == fsdp.plan(model, 2, ignored_parameters=[model.blocks[0].mlp.up.weight])


def test_functions_see_what_users_have_set_on_parameters() -> None:
    model = gpt()
    for param in model.parameters():
        param.kind = "vector" if param.dim() < 2 else "matrix"  # type: ignore[attr-defined]
    plan = fsdp.plan(model, 2, group_by=lambda _, param: param.kind)
    assert [unit.flat_parameters for unit in plan.units] == [2]


@pytest.mark.parametrize(("world_size", "dtype"), [(3, torch.bfloat16), (4, torch.float32)])
def test_a_snapshot_of_sent_weights_has_the_planned_bytes(world_size: int, dtype: torch.dtype, ranks: RankPool) -> None:
    replicas = 2 if world_size == 4 else 1
    plans = [fsdp.plan(gpt(), world_size, rank=r, replicas=replicas, snapshot=dtype) for r in range(world_size)]
    planned = [plan.snapshot_bytes for plan in plans]
    total = sum(param.numel() for param in gpt().parameters()) * dtype.itemsize
    assert sum(planned) == total
    assert replicas == 1 or planned[2:] == [0, 0]  # the second replica sends nothing
    assert f"snapshot of sent weights: {size_text(planned[0])} on the host" in str(plans[0])
    assert "snapshot" not in str(replace(plans[0], snapshot_bytes=0))
    assert ranks(world_size).run(_snapshot_bytes, replicas, dtype) == planned


def _snapshot_bytes(replicas: int, dtype: torch.dtype) -> int:
    over = None if replicas == 1 else mesh_of(replicas, dist.get_world_size() // replicas)
    model = FullyShardedDataParallel(gpt(), process_group=over)
    snapshot = fsdp.weights.Snapshot()
    fsdp.stream_weights(model, _Changes(), bucket_bytes=1 << 20, dtype=dtype, since=snapshot)
    return snapshot.nbytes


class _Changes(fsdp.weights.Sink):
    """A sink that supports changes, and ignores them."""

    receives = "parts"
    takes_changes = True

    def bucket(self, number: int, tensor: Tensor) -> None:
        return


def test_the_table_says_what_the_data_say() -> None:
    plan = CASES["GPT"].plan(2)
    text = str(replace(plan, bandwidth=1e9))
    assert "2 x blocks.0" in text  # the last one is not gathered again
    for phase in plan.phases:
        assert phase.name in text
        assert size_text(phase.peak) in text
        assert sum(phase.by_kind.values()) == phase.peak
    assert f"{plan.bytes_sent / 1e9:.3g} s at 1 GB/s" in text
    assert "Activations are not counted" not in text
    assert "Activations are not counted" in str(replace(plan, has_activations=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"move_grads_to_cpu": True}, "does not model move_grads_to_cpu: plan offload='cpu'"),
        ({"offload": "disk", "offload_folder": "."}, "does not model offload_folder: plan offload='cpu'"),
        ({"process_group": None}, "does not model process_group: pass the numbers"),
        ({"world_size": 4, "replicas": 3}, "replicas must divide world_size"),
        ({"rank": 2}, "rank must be one of 0 to 1"),
        ({"reshard_after_forward": 2}, "does not model reshard_after_forward=2: plan True"),
    ],
)
def test_what_is_not_modelled_is_an_error_that_names_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fsdp.plan(nn.Linear(2, 2), **{"world_size": 2, **arguments})
    with pytest.raises(TypeError, match="no_such_option"):
        fsdp.plan(nn.Linear(2, 2), 2, no_such_option=True)


class Autocasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(inputs)


def test_what_the_meta_device_does_not_follow_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not model torch\.autocast"):
        fsdp.plan(Autocasting(), 2, sample=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="no tensor that depends on its trained parameters"):
        fsdp.plan(nn.Linear(2, 2).requires_grad_(False), 2, sample=torch.zeros(1, 2))


class ReadingValues(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if (inputs == 0).all() else inputs


class SelectingByValues(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs[inputs[:, 0] > 0])


@pytest.mark.parametrize("kind", [ReadingValues, SelectingByValues])
def test_a_model_that_reads_values_is_an_error_with_a_remedy(kind: type[nn.Linear]) -> None:
    with pytest.raises(RuntimeError, match=r"the model reads values of a tensor.*attention_mask with four dimensions"):
        fsdp.plan(kind(2, 2), 2, sample=torch.zeros(1, 2))
    assert fsdp.plan(kind(2, 2), 2).parameter_bytes == 12


def test_a_model_of_a_thousand_million_parameters_is_planned_without_its_memory() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=10, num_heads=16, width=3072, context=1024))
    plan = fsdp.plan(model, 64, auto_wrap_policy=module_wrap_policy({Block}), sample=torch.zeros(1, 1024).long())
    numel = sum(param.numel() for param in model.parameters())
    assert numel > 1e9
    assert numel * 4 <= plan.parameter_bytes * 64 < numel * 4 * 1.001
