"""`plan` predicts the memory and communication of a training on a number of ranks, before anything is allocated.

The planner shards a copy of the model on the meta device over imagined ranks (`fsdp.distributed.imagined`), and trains
the copy for some steps. Units, buffers, prefetches and reductions are the library's own, and everything except values
is computed. `LiveBytes` counts the memory that would be allocated.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor, nn

from fsdp.distributed import devices
from fsdp.distributed.communicator import words_of
from fsdp.distributed.devices import Arrival, QueuedCopies
from fsdp.distributed.imagined import META, ImaginedGroup, Message
from fsdp.engine.autograd import differentiable_tensors
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import is_ours
from fsdp.engine.runtime import runtime_of
from fsdp.engine.trees import map_tensors
from fsdp.engine.unit import Unit, own_modules, unit_of, units_in
from fsdp.engine.user_attributes import attributes_of, give_attributes, give_grad_dtype
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.layers import offload
from fsdp.layers.deferred_init import trust_values
from fsdp.layers.managed_params import is_packed
from fsdp.layers.offload import HostStorage
from fsdp.layers.packing import Packing
from fsdp.layers.summary import aligned, size_text
from fsdp.wrap import AutoWrapPolicy
from fsdp.wrap.live_bytes import LiveBytes
from fsdp.wrap.shard import shard

PARAMETERS, UNSHARDED, BUFFERS, INPUTS = "parameters", "unsharded parameters", "buffers", "inputs"
GRADIENTS, GRAD_BUFFERS, MESSAGES = "gradients", "gradient buffers", "messages"
OPTIMIZER, ACTIVATIONS = "optimizer state", "activations"
ON_HOST = "on the host"
BUILT, FORWARD, BACKWARD, STEP, BETWEEN = "after construction", "forward", "backward", "optimizer step", "between steps"

# Two steps to learn the order of units, and one step that is counted.
_STEPS = 3

_NOT_MODELLED = {
    "process_group": "pass the numbers of ranks: world_size and replicas",
    "process_group_reduce_scatter": "omit it",
    "compute_device": "omit it: the plan does not depend on it",
    "state_dict_device": "omit it",
    "offload_folder": "plan offload='cpu', which needs as many bytes on the host as on disk",
    "keep_offload_files": "omit it",
    "move_grads_to_cpu": "plan offload='cpu', which moves parameters and gradients",
    "sync_module_states": "omit it: it changes how training begins, and no step",
    "param_init_fn": "omit it: it changes how training begins, and no step",
}


@dataclass(frozen=True)
class PlannedUnit:
    """The figures of a unit on a rank.

    Attributes:
        name: the name of the unit's module in the model.
        parameters: the number of elements of its parameters.
        padding: the number of elements that are added, on all ranks together, so that shards have equal sizes.
        shard_bytes: the bytes of this rank's shard, including padding, in the storage dtype.
        unsharded_bytes: the bytes of the all-gathered parameters, in the compute dtype.
        gradient_bytes: the bytes of the shard's reduced gradient; 0 if the unit is frozen.
        flat_parameters: the number of flat parameters.
        all_gathers: the all-gathers of all its flat parameters in one step. Small ones share collectives across units.
    """

    name: str
    parameters: int
    padding: int
    shard_bytes: int
    unsharded_bytes: int
    gradient_bytes: int
    flat_parameters: int
    all_gathers: int


@dataclass(frozen=True)
class PlannedPhase:
    """A phase of a training, with the peak memory of one rank.

    Attributes:
        name: "after construction", "forward", "backward", "optimizer step" or "between steps".
        peak: the peak in bytes, without host memory if parameters are offloaded.
        by_kind: the bytes at the peak, by purpose.
        host_peak: the peak of host memory during the phase, if parameters are offloaded.
    """

    name: str
    peak: int
    by_kind: Mapping[str, int]
    host_peak: int = 0


@dataclass(frozen=True)
class Plan:
    """The memory and the communication of one rank that trains a model; see `plan`.

    Attributes:
        world_size, replicas: the number of ranks, and the number of ranks that hold the same shard.
        units: the units, in the order in which they are all-gathered, the outermost first.
        parameter_bytes, gradient_bytes, optimizer_bytes: of this rank's shards, the gradients after a backward, and
            the optimizer's state. Without padding, their sums over the ranks are the bytes of the unsharded model,
            unless gradients are PARTIAL.
        phases: the phases of the training, in order.
        has_activations: True if a sample input was given. Otherwise, the peaks do not include activations.
        bytes_sent: the bytes of parameters and gradients that this rank sends in one step.
        collectives: the number of collectives of each kind in one step of the rank.
        bandwidth: the number of bytes per second that a rank sends, as given to `plan`; None if not given.
        snapshot_bytes: the bytes of the host copy of a `fsdp.weights.Snapshot`; 0 without a snapshot.
    """

    world_size: int
    replicas: int
    units: tuple[PlannedUnit, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    phases: tuple[PlannedPhase, ...]
    has_activations: bool
    bytes_sent: int
    collectives: Mapping[str, int]
    bandwidth: float | None
    snapshot_bytes: int = 0

    @property
    def peak(self) -> int:
        """The peak of all phases in bytes, without host memory if parameters are offloaded."""
        return max(phase.peak for phase in self.phases)

    @property
    def host_peak(self) -> int:
        """The peak of host memory in bytes: offloaded parameters, gradients and optimizer state."""
        return max(phase.host_peak for phase in self.phases)

    @property
    def seconds_of_communication(self) -> float | None:
        """The time to send all bytes of one step at the full bandwidth; None without a bandwidth."""
        return None if self.bandwidth is None else self.bytes_sent / self.bandwidth

    def __str__(self) -> str:
        return "\n".join(_described(self))


def plan(
    module: nn.Module,
    world_size: int,
    *,
    auto_wrap_policy: AutoWrapPolicy | Iterable[type[nn.Module]] | None = None,
    sample: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    replicas: int = 1,
    rank: int = 0,
    backend: str = "gloo",
    bandwidth: float | None = None,
    snapshot: torch.dtype | None = None,
    **options: Any,
) -> Plan:
    """Predict the memory of each phase, the bytes sent, and the collectives of a training on one rank.

    Nothing is allocated, no process group is required, and the model is not changed. A copy of the model is sharded on
    the meta device, and trained for some steps with imagined ranks. The plan contains only the memory of tensors,
    without temporary memory inside kernels, Python's own memory, and rounding by allocators. Attention with a fused CPU
    kernel is counted as fused.

    Args:
        module: the plain model, with parameters on any device, including the meta device. Activation checkpointing in
            the model is supported.
        world_size: the number of ranks.
        auto_wrap_policy: the units inside the root: a set of classes, or a policy, as for `fsdp.shard`. None
            (default): only the root is a unit.
        sample: an input of the model on one rank: a tensor, a tuple of arguments, or a mapping of keywords. Only shapes
            and dtypes are used. Without a sample, the planner assumes no activations, and units that run in the order
            in which they are listed, all of them also in backward.
        loss: a function of the model's output that returns the loss. Default: the sum of all floating-point tensors.
        optimizer: a function that creates the optimizer from the trained parameters: a class of `torch.optim`, or a
            ``functools.partial`` of a class.
        replicas: the number of ranks that hold the same shard (hybrid sharding); must divide `world_size`.
        rank: the planned rank. With `use_orig_params`, ranks differ by a few bytes of optimizer state.
        backend: the backend of the process group. With "gloo", ranks exchange messages, which use different memory than
            the collectives of backends such as "nccl".
        bandwidth: the number of bytes per second that a rank sends.
        snapshot: the dtype in which ``fsdp.stream_weights(..., since=snapshot)`` sends floating-point parameters; the
            host copy of the sent weights is counted. None (default): no weights are sent.
        **options: options of `FullyShardedDataParallel`, for every unit. With ``offload="cpu"``, device memory and host
            memory are counted separately.

    Raises:
        TypeError: for an unknown option of `FullyShardedDataParallel`.
        ValueError: for an option without support in the planner, a model that is already sharded, inconsistent
            numbers of ranks, or a bandwidth that is not positive.
        RuntimeError: if the model cannot compute on the meta device, for example because it reads values.
    """
    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise ValueError(f"bandwidth is a positive number of bytes per second, got {bandwidth:g}")
    _check(module, world_size, replicas, rank, options)
    count = world_size // replicas
    shard_group = ImaginedGroup(rank % count, count, backend == "gloo")
    replica_group = ImaginedGroup(rank // count, replicas, backend == "gloo")
    over = shard_group if replicas == 1 else (shard_group, replica_group)
    copied, ignored = copy_on_meta(module, options)
    live = LiveBytes(META.type, ON_HOST)
    with (
        shard_group.reachable(),
        replica_group.reachable(),
        mock.patch.object(offload, "HostStorage", partial(_ImaginedHostStorage, live)),
        mock.patch.object(devices, "_IN_ORDER", _HostCopies(live)),  # used by the meta device
        warnings.catch_warnings(),
        live,
    ):
        warnings.simplefilter("ignore")
        for buffer in copied.buffers():
            live.assign(buffer, BUFFERS)
        settings = {**options, **ignored, "process_group": over, "compute_device": META}
        with live.allocating(PARAMETERS):
            if auto_wrap_policy is None:
                model = FullyShardedDataParallel(copied, **settings)
            else:
                model = shard(copied, auto_wrap_policy, **settings)
        training = _Training(model, live, optimizer, (shard_group, replica_group))
        call = _listed_order(training.units) if sample is None else partial(_call, sample=_on_meta(sample, live))
        with _fused_attention():
            training.run(call, loss or _sum_of)
        found = training.plan(world_size, replicas, sample is not None, bandwidth)
        return found if snapshot is None else replace(found, snapshot_bytes=training.sent_bytes(snapshot))


def _check(module: nn.Module, world_size: int, replicas: int, rank: int, options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _NOT_MODELLED:
            raise ValueError(f"plan() does not model {name}: {_NOT_MODELLED[name]}")
    placements = options.get("placements")
    reshards = options.get("reshard_after_forward", True) if placements is None else placements.reshard_after_forward
    if type(reshards) is int:
        raise ValueError(f"plan() does not model reshard_after_forward={reshards}: plan True, which takes less memory")
    if world_size < 1 or replicas < 1 or world_size % replicas:
        raise ValueError(f"replicas must divide world_size, got replicas={replicas} and world_size={world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be one of 0 to {world_size - 1}, got {rank}")
    for name, inner in module.named_modules():
        if unit_of(inner) is not None:
            raise ValueError(
                f"{name or type(module).__name__} is sharded already: pass plan() the plain model, and choose units "
                "with auto_wrap_policy"
            )


def copy_on_meta(module: nn.Module, options: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy of a module on the meta device, and the options that name parts of the module, for the copy."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        if is_packed(param):
            packing = Packing("", param)
            made = packing.unpack(torch.empty(packing.nbytes, dtype=torch.uint8, device=META))
        else:
            made = torch.empty_like(param, device=META)
        is_param = isinstance(made, nn.Parameter)
        memo[id(param)] = new = made if is_param else nn.Parameter(made, requires_grad=param.requires_grad)
        give_grad_dtype(new, param)
        give_attributes(new, attributes_of(param))  # which a policy or `group_by` may read
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    copied = copy.deepcopy(module, memo)
    for inner in copied.modules():
        inner.register_forward_pre_hook(_refuse_autocast)
    named = {}
    for name in ("ignored_modules", "ignored_parameters"):
        given = options.get(name)
        parts = [given] if isinstance(given, (nn.Module, Tensor)) else given or ()
        named[name] = [memo[id(part)] for part in parts if id(part) in memo]
    return copied, named


class _HostCopies(QueuedCopies):
    """Copies to the imagined host. As on an accelerator, a source is kept until the next copy."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def copied_to_host(self, source: Tensor) -> tuple[Tensor, Arrival]:
        with self._live.allocating(ON_HOST):
            return source.clone(), Arrival()


class _ImaginedHostStorage(HostStorage):
    """Imagined host memory, which is also on the meta device, and is distinguished by its kind."""

    def __init__(self, live: LiveBytes, *where: Any) -> None:
        super().__init__(*where)
        self._live = live

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._live.allocating(ON_HOST):
            return torch.zeros(numel, dtype=dtype, device=META)

    def adopt(self, flat_param: FlatParameter) -> None:
        """Do nothing: the shard is on the imagined host already."""

    def staged(self, flat_param: FlatParameter, dtype: torch.dtype) -> Tensor:
        return flat_param.vector.clone().to(dtype)


def _on_meta(sample: Any, live: LiveBytes) -> Any:
    def moved(tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device=META).requires_grad_(tensor.requires_grad)
        live.assign(made, INPUTS)
        return made

    return map_tensors(moved, sample)


def _call(model: nn.Module, sample: Any) -> Any:
    try:
        if isinstance(sample, Mapping):
            return model(**sample)
        return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)
    except RuntimeError as error:
        if "meta" not in str(error).lower():
            raise
        raise RuntimeError(
            f"{error}: the model reads values of a tensor, but plan() computes without values (the first traceback has "
            "the line). Pass a sample that avoids this, for models of transformers an attention_mask with four "
            "dimensions (docs/memory.md), or no sample"
        ) from error


def _sum_of(output: Any) -> Tensor:
    sums = [tensor.sum() for tensor in differentiable_tensors(output) if tensor.is_floating_point()]
    if not sums:
        raise ValueError("the model returns no tensor that depends on its trained parameters: pass plan() a loss")
    return torch.stack([each.float() for each in sums]).sum() if len(sums) > 1 else sums[0]


def _listed_order(units: Sequence[Unit]) -> Callable[[nn.Module], Any]:
    """Return a forward that only uses the parameters of a unit, and runs its inner units."""

    def inside(unit: Unit) -> list[Unit]:
        inner = [unit_of(child) for own in own_modules(unit.module) for child in own.children()]
        return [each for each in dict.fromkeys(inner) if each not in (None, unit)]

    for unit in units:
        unit.module.forward = partial(_use, unit, inside(unit))
    return lambda model: model(torch.empty((), device=META))


def _use(unit: Unit, inner: Sequence[Unit], value: Tensor) -> Tensor:
    for place in unit.places():
        param = getattr(place.module, place.name)
        if param.requires_grad:  # classes of frozen parameters may not support sums
            value = value + param.sum()
    for each in inner:
        value = each.module(value)
    return value


@contextmanager
def _optimizers_on_meta() -> Iterator[None]:
    """Allow all optimizers to step on the meta device, including optimizers with ``fused=True`` or that read values."""
    name = "_get_fused_kernels_supported_devices"  # private (torch 2.11 to 2.15)
    supported = getattr(optimizer_module, name)()
    with (
        mock.patch.object(optimizer_module, name, return_value=[*supported, META.type]),
        mock.patch.object(Tensor, "item", return_value=0.5),  # an arbitrary value, of a norm or a stored rate
    ):
        yield


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Make attention on the meta device use the memory of a fused kernel, which torch does not have for this device.

    A `TorchFunctionMode` is not sufficient, because such a mode is disabled inside functions that it intercepts.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        yield
    finally:
        library._destroy()  # private, but required to remove it before garbage collection (torch 2.11 to 2.15)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_alike = query.dim() == 4 and query.shape[0] == key.shape[0] and query.shape[3] == value.shape[3]
    is_dense = all(each.stride(-1) == 1 for each in (query, key, value))
    can_fuse = is_alike and is_dense and not dropout_p and (attn_mask is None or not attn_mask.requires_grad)
    # Private operators that the public function calls (torch 2.11 to 2.15).
    if can_fuse:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    unfused = torch.ops.aten._scaled_dot_product_attention_math
    return unfused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _refuse_autocast(module: nn.Module, inputs: Any) -> None:
    if torch._C._is_any_autocast_enabled():  # private; the public function checks one device (torch 2.11 to 2.15)
        raise ValueError(
            "plan() does not model torch.autocast, which the meta device does not follow: omit it, and set the compute "
            "dtype with mixed_precision=MixedPrecision(param_dtype=...)"
        )


class _Training:
    """A sharded model on the meta device, which is trained to count memory and messages."""

    def __init__(
        self,
        model: FullyShardedDataParallel,
        live: LiveBytes,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        groups: Sequence[ImaginedGroup],
    ) -> None:
        self._model, self._live, self._groups = model, live, groups
        self._names = units_in(model._unit)
        self.units = list(self._names)
        trust_values(self.units)  # disables the check for missing values
        for unit in self.units:
            for handle in unit.handles:
                self._watch(handle)
        is_offloaded = any(handle.storage.is_elsewhere for unit in self.units for handle in unit.handles)
        self._optimizer_kind = ON_HOST if is_offloaded else OPTIMIZER
        self._trained = [param for param in model.parameters() if param.requires_grad]
        with live.allocating(self._optimizer_kind):
            self._optimizer = optimizer(self._trained) if self._trained else None
        self._phases: dict[str, PlannedPhase] = {}
        self._gradient_bytes = 0
        self._step: list[Message] = []

    def _watch(self, handle: FlatParamHandle) -> None:
        live = self._live
        for slot in tuple(handle.valueless):
            handle.values.renewed([slot])
        is_offloaded = handle.storage.is_elsewhere
        for tensor in (handle.flat_param, *handle.listed_params):
            live.assign(tensor, ON_HOST if is_offloaded else PARAMETERS)
        if not handle.unsharded.is_shard:
            live.assign(handle.unsharded.full, UNSHARDED)
        for owner, name, kind in (
            (handle, "gather_kept", UNSHARDED),
            (handle, "begin_gather", MESSAGES),
            (handle, "reduce", MESSAGES),
            (handle.gradients, "add", GRAD_BUFFERS),
        ):
            setattr(owner, name, live.allocating(kind)(getattr(owner, name)))
        accept = handle.accept

        def accepted(reduced: Tensor) -> None:
            accept(reduced)
            if (held := handle.flat_param.held_gradient) is not None:
                live.assign(held, ON_HOST if is_offloaded else GRADIENTS)

        handle.accept = accepted  # type: ignore[method-assign]

    def run(self, call: Callable[[nn.Module], Any], loss: Callable[[Any], Tensor]) -> None:
        self._live.forget_peak()
        self._note(BUILT)
        runtime: Any = runtime_of(self._model._unit)
        runtime.unshard_ahead = self._live.allocating(MESSAGES)(runtime.unshard_ahead)
        for _ in range(_STEPS):
            for group in self._groups:
                group.sent.clear()
            self._train(call, loss)
        runtime.forget()  # removes this model from the models that `runtimes` returns

    def _train(self, call: Callable[[nn.Module], Any], loss: Callable[[Any], Tensor]) -> None:
        with self._live.allocating(ACTIVATIONS):
            self._live.forget_peak()
            value = loss(call(self._model))
            self._note(FORWARD)
            value.backward()
            self._note(BACKWARD)
            del value
        handles = [handle for unit in self.units for handle in unit.handles]
        grads = (handle.flat_param.held_gradient for handle in handles)
        self._gradient_bytes = sum(grad.nbytes for grad in grads if grad is not None)
        self._gradient_bytes += sum(handle.gradients.nbytes for handle in handles)
        if self._optimizer is not None:
            with self._live.allocating(self._optimizer_kind), _optimizers_on_meta():
                self._live.forget_peak()
                self._optimizer.step()
            self._note(STEP)
            self._optimizer.zero_grad()
        self._step = [message for group in self._groups for message in group.sent]
        self._live.forget_peak()
        self._note(BETWEEN)

    def _note(self, name: str) -> None:
        """Record the peak of a phase if it is the highest so far, and begin the next phase."""
        live, before = self._live, self._phases.get(name)
        on_host = max(live.host_peak, before.host_peak if before else 0)
        if before is None or live.peak > before.peak:
            kinds = {kind: nbytes for kind, nbytes in live.at_peak.items() if nbytes and kind != ON_HOST}
            before = PlannedPhase(name, live.peak, kinds)
        self._phases[name] = replace(before, host_peak=on_host)
        live.forget_peak()

    def plan(self, world_size: int, replicas: int, has_activations: bool, bandwidth: float | None) -> Plan:
        state = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = [value for each in state for value in each.values() if isinstance(value, Tensor)]
        messages = (each for each in self._groups[0].sent if each.kind == "all-gather")
        gathered = [number for each in messages for number in words_of(each.tag) if isinstance(number, int)]

        def first_gather(unit: Unit) -> int:  # in the step; units that are not gathered are last
            places = (gathered.index(tag) for tag in map(_tag, unit.handles) if tag in gathered)
            return min(places, default=len(gathered) if unit.handles else 0)

        return Plan(
            world_size=world_size,
            replicas=replicas,
            units=tuple(self._planned(unit, gathered) for unit in sorted(self.units, key=first_gather)),
            parameter_bytes=sum(h.flat_param.nbytes for unit in self.units for h in unit.handles),
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=sum(tensor.nbytes for tensor in tensors),
            phases=tuple(self._phases.values()),
            has_activations=has_activations,
            bytes_sent=sum(message.nbytes for message in self._step),
            collectives=dict(Counter(message.kind for message in self._step)),
            bandwidth=bandwidth,
        )

    def sent_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of weights that this rank sends to other processes; only the first replica sends shards."""
        handles = [handle for unit in self.units for handle in unit.handles if handle.replicas.rank == 0]
        is_first = not any(group.rank() for group in self._groups)
        whole = [param for param in self._model.parameters() if is_first and not is_ours(param)]
        elements = [
            (interval.numel, handle.flat_param.dtype)
            for handle in handles
            for interval in handle.layout.intervals(handle.comm.rank)
        ]
        elements += [(param.numel(), param.dtype) for param in whole]
        return sum(numel * (dtype if own.is_floating_point else own).itemsize for numel, own in elements)

    def _planned(self, unit: Unit, gathered: Sequence[Any]) -> PlannedUnit:
        handles = unit.handles
        trained = [handle for handle in handles if handle.requires_grad]
        return PlannedUnit(
            name=self._names[unit],
            parameters=sum(slot.numel for handle in handles for slot in handle.layout.slots),
            padding=sum(
                handle.layout.padded_numel - sum(slot.numel for slot in handle.layout.slots) for handle in handles
            ),
            shard_bytes=sum(handle.flat_param.nbytes for handle in handles),
            unsharded_bytes=sum(handle.layout.unsharded_numel * handle.dtype.itemsize for handle in handles),
            gradient_bytes=sum(handle.flat_param.numel() * handle.kept_grad_dtype.itemsize for handle in trained),
            flat_parameters=len(handles),
            all_gathers=sum(gathered.count(_tag(handle)) for handle in handles),
        )


def _tag(handle: FlatParamHandle) -> int:
    """Return the tag of a handle's all-gathers along the shard axis."""
    return handle.kept_shard.tag if handle.kept_shard is not None and handle.kept_shard.lasts else handle.tags.gather


def _described(plan: Plan) -> Iterator[str]:
    replicas = f", of which {plan.replicas} hold the same shard" if plan.replicas > 1 else ""
    yield f"One rank of {plan.world_size}{replicas}, in one step"
    yield ""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for unit in plan.units:
        sizes = map(size_text, (unit.shard_bytes, unit.unsharded_bytes))
        row = (f"{unit.parameters:,}", str(unit.padding), *sizes, str(unit.all_gathers))
        alike.setdefault(row, []).append(unit.name)
    named = [(names[0] if len(names) == 1 else f"{len(names)} x {names[0]}", *row) for row, names in alike.items()]
    yield from aligned([("unit", "parameters", "padding", "shard", "unsharded", "all-gathers"), *named])
    yield ""
    kinds = list(dict.fromkeys(kind for phase in plan.phases for kind in phase.by_kind))
    rows = [[kind, *(size_text(phase.by_kind.get(kind, 0)) for phase in plan.phases)] for kind in kinds]
    rows.append(["peak", *(size_text(phase.peak) for phase in plan.phases)])
    if plan.host_peak:
        rows.append(["and on the host", *(size_text(phase.host_peak) for phase in plan.phases)])
    yield from aligned([("bytes at the peak of", *(phase.name for phase in plan.phases)), *rows])
    if not plan.has_activations:
        yield "Activations are not counted: pass a sample of the model's input."
    yield ""
    sent = ", ".join(f"{count} x {kind}" for kind, count in plan.collectives.items()) or "nothing"
    yield f"sent: {size_text(plan.bytes_sent)} ({sent})"
    if plan.seconds_of_communication is not None and plan.bandwidth is not None:
        yield f"      {plan.seconds_of_communication:.3g} s at {plan.bandwidth / 1e9:g} GB/s"
    if plan.snapshot_bytes:
        yield f"snapshot of sent weights: {size_text(plan.snapshot_bytes)} on the host"
