"""`fsdp.compress`: gradients and parameters are sent quantised, for slow networks.

The engine does not depend on this module. Gradients use different communicators (`QuantizedReduceScatter`,
`QuantizedReplicaSums`), and unsharded parameters a different class (`QuantizedParameters`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.block_codes import DTYPES, BlockCodes
from fsdp.distributed.communicator import Communicator, completed, during, summed
from fsdp.distributed.consensus import agree_on, done_by_all
from fsdp.distributed.custom_collectives import InFront
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.participation import Participation
from fsdp.engine.runtime import Runtime, runtime_of_root
from fsdp.engine.unit import Unit
from fsdp.engine.unsharded_params import UnshardedParameters
from fsdp.layers.listed_shards import params_of
from fsdp.layers.quantized_params import MakeQuantized
from fsdp.layers.quantized_reduce import Feedback, QuantizedReduceScatter, QuantizedSums, Quantizing
from fsdp.layers.quantized_replicas import QuantizedReplicaSums, ReplicaFeedback, ReplicaSums
from fsdp.layers.summary import size_text
from fsdp.layers.verify import require_sharded

_KEY = "quantized_reduce_feedback"  # of an optimizer's state


@dataclass(frozen=True)
class _Quantized:
    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        _ = self.codes

    @property
    def codes(self) -> BlockCodes:
        """The format of messages."""
        return BlockCodes(self.bits, self.block)


@dataclass(frozen=True)
class QuantizedReduce(_Quantized):
    """Send gradients in 8 or 4 bits, with a float32 scale for each block.

    Each rank sends a piece of its gradient to each other rank, which adds the received pieces in float32. A value is
    rounded by at most 1/254 (8 bits) or 1/14 (4 bits) of the largest absolute value of its block.

    Args:
        bits: the number of bits of a value, 8 (the default) or 4.
        block: the number of elements with a common scale, an even number.
        feedback: If True, add the rounding errors of a gradient to the next gradient. Each rank keeps the errors of
            sent values in bfloat16: 2 (W - 1) / W bytes for each trained parameter of the *unsharded* model; between
            replicas, 2 bytes for each trained parameter of its shard.

    Raises:
        ValueError: for unsupported numbers.
    """

    feedback: bool = False


@dataclass(frozen=True)
class QuantizedGather(_Quantized):
    """Send parameters in 8 or 4 bits to forward and backward, with a float32 scale for each block.

    All ranks compute with the same bits, because each rank also rounds its own shard. The optimizer updates exact
    shards. A parameter is rounded by at most 1/254 (8 bits) or 1/14 (4 bits) of the block's largest absolute value.

    Args:
        bits: the number of bits of a value, 8 (the default) or 4.
        block: the number of elements with a common scale, an even number.

    Raises:
        ValueError: for unsupported numbers.
    """


@during("fsdp.compress()")
def compress(
    model: nn.Module,
    *,
    reduce: QuantizedReduce | None = None,
    gather: QuantizedGather | None = None,
    replicas: QuantizedReduce | None = None,
) -> Compression:
    """Collective. Quantise the gradients and parameters that all units send from now on, for both front doors. ::

        compression = fsdp.compress(model, reduce=fsdp.QuantizedReduce(bits=4), gather=fsdp.QuantizedGather())

    Call the function on every rank with the same arguments, between steps. A second call replaces the first call.
    Parameters of integer dtypes, parameters without dimensions, and units of a single rank are not quantised. With
    hybrid sharding, ``replicas=fsdp.QuantizedReduce()`` alone only affects the network between replicas, which is often
    slower.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        reduce: the quantisation of gradients in reduce-scatters; None (the default) for exact gradients.
        gather: the quantisation of parameters in all-gathers for forward and backward; None for exact parameters.
        replicas: the quantisation of gradients between the replicas of a shard (hybrid sharding, NO_SHARD), and of
            their sum; None for exact sums. All replicas receive the same bits.

    Returns:
        An object to save the error feedback. Its text shows the bytes of the collectives of all units.

    Raises:
        TypeError: if `model` is not sharded, or for an argument of another class.
        ValueError: for `replicas` without replicas, and for `reduce` or `gather` without sharding.
        NotImplementedError: for features that cannot be combined with it, by name: optimizer state sharded over
            replicas, float64 and complex parameters, tensor parallelism, communication hooks, custom reduce-scatters,
            parameters with a custom all-gather, `fsdp.SameBits`; after the first use of `fsdp.join` or `fsdp.cond`.
        RuntimeError: if arguments differ between ranks; inside a forward or backward; for an inner unit.
    """
    runtime = runtime_of_root(require_sharded(model, "fsdp.compress"), "fsdp.compress")
    runtime.ensure_idle("compress communication")
    everyone = runtime.root.everyone
    given = {"reduce": reduce, "gather": gather, "replicas": replicas}
    done_by_all([everyone], "compress communication", lambda: _require_possible(runtime, **given))
    agree_on(everyone, "arguments of fsdp.compress", ", ".join(f"{name}={each}" for name, each in given.items()))
    found = Compression(runtime, reduce, gather, replicas)
    _present[runtime.root] = weakref.ref(found)
    return found


_present: weakref.WeakKeyDictionary[Unit, weakref.ref[Compression]] = weakref.WeakKeyDictionary()  # by outermost unit


class Compression:
    """The quantised communication of a model, returned by `fsdp.compress`.

    Attributes:
        reduce, gather, replicas: the arguments of `fsdp.compress`.
    """

    def __init__(
        self,
        runtime: Runtime,
        reduce: QuantizedReduce | None,
        gather: QuantizedGather | None,
        replicas: QuantizedReduce | None,
    ) -> None:
        self.reduce, self.gather, self.replicas = reduce, gather, replicas
        self._units, self._root = runtime.units, runtime.root
        self._feedback: dict[FlatParamHandle, list[Feedback | ReplicaFeedback]] = {}
        handles = [(unit, handle) for unit in runtime.units for handle in unit.handles]
        for _, handle in handles:
            way, axis = _plain(handle.reduce_comm), _plain(handle.replica_axis)
            handle.connect(handle.comm, way, handle.replicas, axis)
            if handle.is_sharded:
                self._gather_with(handle)
        reduced = [(unit, handle) for unit, handle in handles if handle.gradients.dtype in DTYPES]
        # Handles with the same communicator share a front, otherwise small gradients would not be bucketed.
        if reduce is not None:
            for way, members in _by(operator.attrgetter("reduce_comm"), (one for _, one in reduced if one.is_sharded)):
                sums = QuantizedSums(reduce.codes, members, way, reduce.feedback)
                front = QuantizedReduceScatter(way, sums)
                for handle in members:
                    handle.connect(handle.comm, front, handle.replicas, handle.replica_axis)
                self._keep(sums.feedback.values())
        if replicas is not None:
            replicated = (handle for unit, handle in reduced if _has_replicas(unit, handle))
            for axis, members in _by(operator.attrgetter("replica_axis"), replicated):
                totals = ReplicaSums(replicas.codes, members, replicas.feedback)
                across = QuantizedReplicaSums(axis, totals)
                for handle in members:
                    handle.connect(handle.comm, handle.reduce_comm, handle.replicas, across)
                self._keep(totals.feedback)

    def _keep(self, feedback: Iterable[Feedback | ReplicaFeedback]) -> None:
        for each in feedback:
            self._feedback.setdefault(each.handle, []).append(each)

    def _gather_with(self, handle: FlatParamHandle) -> None:
        present: Any = handle.new_unsharded
        make = UnshardedParameters if isinstance(present, MakeQuantized) else present
        if self.gather is not None and handle.flat_param.dtype in DTYPES:
            make = MakeQuantized(self.gather.codes)
        if make is not present:
            handle.new_unsharded = make
            handle.renew_unsharded()

    @property
    def feedback_nbytes(self) -> int:
        """The bytes of the rounding errors on this rank."""
        return sum(feedback.nbytes for each in self._feedback.values() for feedback in each)

    @contextmanager
    def stored_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Collective at the beginning. Store the error feedback in the optimizer's state inside the context. ::

            with compression.stored_in(optimizer):
                fsdp.save("checkpoint", model, optimizer)

        The errors of all ranks are reduce-scattered without quantisation. The sum is a tensor like the parameter, under
        the key "quantized_reduce_feedback". All functions that save and reshard optimizer state include it, for any
        number of ranks. This training continues with the same sums, so a training resumed on the same number of
        ranks has the same bits.

        Args:
            optimizer: the optimizer of all trained parameters of the model, after its first step.

        Raises:
            ValueError: for a parameter that the optimizer does not contain.
            RuntimeError: before the first step; after another call of `fsdp.compress` for the model.
            NotImplementedError: for an optimizer whose state belongs to other tensors (`OwnedOptimizer`).
            OtherRankError: with the reason, if another rank raises one of these errors.
        """
        stored: list[nn.Parameter] = []
        try:
            with during("stored_in()"):
                trained = [handle for handle in self._feedback if handle.requires_grad]
                check = partial(self._require_storage, optimizer, trained)
                done_by_all([self._root.everyone], "store its feedback", check)
                for handle in trained:
                    for param, part in _by_param(handle, self._settle(handle)):
                        # A parameter without state was not used by a step.
                        if optimizer.state.get(param) or isinstance(optimizer, torch.optim.SGD):
                            stored.append(param)
                            state = torch.zeros_like(param, requires_grad=False)
                            local_part(state).view(-1).copy_(part)
                            optimizer.state[param][_KEY] = state
            yield
        finally:
            for param in stored:  # a new dictionary, because a state_dict() from inside contains the old one
                state = optimizer.state[param]
                optimizer.state[param] = {key: value for key, value in state.items() if key != _KEY}

    def _require_present(self) -> None:
        present = _present.get(self._root)
        if present is None or present() is not self:
            raise RuntimeError(
                f"{self._root.name}: fsdp.compress was called again for this model. Store and load the feedback with "
                "the object that the last call returned"
            )

    def _require_storage(self, optimizer: torch.optim.Optimizer, trained: Sequence[FlatParamHandle]) -> None:
        """Raise an error if an optimizer cannot store the feedback of these handles."""
        kind, params = type(optimizer).__name__, set(map(id, params_of(optimizer)))
        self._require_present()
        for handle in trained:
            for param in handle.listed_params:
                if param.requires_grad and id(param) not in params:
                    raise ValueError(
                        f"{handle.name}: the {kind} does not have this parameter, so it cannot store its error feedback"
                    )
        if trained and not isinstance(optimizer, torch.optim.SGD):
            if not any(optimizer.state.values()):
                raise RuntimeError(
                    f"{trained[0].name}: the {kind} has no state yet. Store the feedback after its first step."
                )
            if not any(id(param) in params for param in optimizer.state):
                raise NotImplementedError(
                    f"{trained[0].name}: the {kind} has no state of its own parameters, so it cannot store error "
                    "feedback. Use an optimizer that steps the shards, or compress without feedback"
                )

    def load_from(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the error feedback from a loaded optimizer state, and continue with it. Call it on every rank.

        Not collective. Parameters without feedback in the state start at zero.

        Raises:
            RuntimeError: after another call of `fsdp.compress` for the model.
        """
        self._require_present()
        for handle in self._feedback:
            errors = torch.zeros(handle.layout.shard_numel, device=handle.storage.device)
            for param, part in _by_param(handle, errors):
                state = optimizer.state[param].pop(_KEY, None) if param in optimizer.state else None
                if state is not None:
                    part.copy_(local_part(state).view(-1))
            self._begin_with(handle, errors)

    def _settle(self, handle: FlatParamHandle) -> Tensor:
        """Collective. Return all ranks' errors ``[shard_numel]`` for this rank's shard, and continue with them."""
        errors = torch.stack([each.settle() for each in self._feedback[handle]]).sum(0)
        axis = _plain(handle.replica_axis)
        if axis.world_size > 1:
            what, tag = f"feedback of {handle.name}", ("feedback", handle.tags.replica)
            errors = completed(summed(axis, errors, errors.dtype, what, tag))
        self._begin_with(handle, errors)
        return errors

    def _begin_with(self, handle: FlatParamHandle, errors: Tensor) -> None:
        """Replace the errors of a handle; each replica keeps a part of the errors."""
        axis, own = handle.replica_axis, errors
        if axis.world_size > 1:
            share = -(-errors.numel() // axis.world_size)
            own = torch.zeros_like(errors)
            part = slice(axis.rank * share, (axis.rank + 1) * share)
            own[part] = errors[part]
        for number, feedback in enumerate(self._feedback[handle]):
            feedback.begin_with(None if number else own)

    def __str__(self) -> str:
        """Return the bytes that a rank sends to all-gather and reduce all units, with and without quantisation."""
        handles = [(unit, handle) for unit in self._units for handle in unit.handles]
        gathered, reduced, replicated = _Sent(self.gather), _Sent(self.reduce), _Sent(self.replicas)
        for unit, handle in handles:
            numel, dtype = handle.layout.shard_numel, handle.gradients.dtype
            if handle.is_sharded:
                gathered.add(handle.comm.world_size - 1, numel, handle.flat_param.dtype, handle.dtype)
            if handle.is_sharded and handle.requires_grad:
                reduced.add(handle.comm.world_size - 1, numel, dtype, dtype)
            if _has_replicas(unit, handle) and handle.requires_grad:  # pieces, then a sum
                ranks = handle.replica_axis.world_size
                replicated.add(2 * (ranks - 1), -(-numel // ranks), dtype, dtype)
        lines = [f"all-gather: {gathered}", f"reduction: {reduced}"]
        lines += [f"sum over replicas: {replicated}"] if replicated.exact else []
        return "\n".join([*lines, f"error feedback: {size_text(self.feedback_nbytes)} on this rank"])


class _Sent:
    """The bytes that this rank sends with a policy, and would send without it."""

    def __init__(self, policy: _Quantized | None) -> None:
        self._codes = None if policy is None else policy.codes
        self.exact = self._quantized = 0

    def add(self, messages: int, numel: int, dtype: torch.dtype, plain: torch.dtype) -> None:
        """Add messages with `numel` elements of this dtype, which would be sent in the dtype `plain`."""
        exact, codes = numel * plain.itemsize, self._codes if dtype in DTYPES else None
        self.exact += messages * exact
        self._quantized += messages * (exact if codes is None else codes.nbytes(numel))

    def __str__(self) -> str:
        share = f" ({self._quantized / self.exact:.3f})" if self.exact else ""
        return f"{size_text(self._quantized)} instead of {size_text(self.exact)}{share}"


def _by(
    comm_of: Callable[[FlatParamHandle], Communicator], handles: Iterable[FlatParamHandle]
) -> list[tuple[Communicator, list[FlatParamHandle]]]:
    """Return the handles, grouped by the result of `comm_of`."""
    found: dict[Communicator, list[FlatParamHandle]] = {}
    for handle in handles:
        found.setdefault(comm_of(handle), []).append(handle)
    return list(found.items())


def _plain(comm: Communicator) -> Communicator:
    """Return a communicator without quantisation."""
    return comm.plain if isinstance(comm, Quantizing) else comm


def _has_replicas(unit: Unit, handle: FlatParamHandle) -> bool:
    """Return whether a handle's gradients are summed along the replica axis of its unit's mesh."""
    return unit.axes[1].world_size > 1 and _plain(handle.replica_axis) is unit.axes[1]


def _by_param(handle: FlatParamHandle, shard: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters that optimizers step, with their flat parts of a shard ``[shard_numel]``."""
    if handle.orig_params is None:
        return [(handle.flat_param, shard)]
    parts = handle.layout.local_shards(shard, handle.comm.rank)
    return [(param, part) for param, part in zip(handle.listed_params, parts, strict=True) if param.requires_grad]


def _require_possible(runtime: Runtime, reduce: Any, gather: Any, replicas: Any) -> None:
    kinds = {"reduce": QuantizedReduce, "gather": QuantizedGather, "replicas": QuantizedReduce}
    given = {"reduce": reduce, "gather": gather, "replicas": replicas}
    for name, kind in kinds.items():
        if given[name] is not None and not isinstance(given[name], kind):
            raise TypeError(f"fsdp.compress: {name} must be an fsdp.{kind.__name__} or None, got {given[name]!r}")
    is_sharded = any(unit.axes[0].world_size > 1 for unit in runtime.units)
    is_replicated = any(unit.axes[1].world_size > 1 for unit in runtime.units)
    if replicas and is_sharded and not is_replicated:
        raise ValueError("fsdp.compress: no unit has replicas, so that `replicas` has no effect: use `reduce`")
    if (reduce or gather) and is_replicated and not is_sharded:
        raise ValueError(
            "fsdp.compress: nothing is sharded, so that `reduce` and `gather` have no effect: use `replicas`"
        )
    problems = [problem for unit in runtime.units for problem in _problems(unit, reduce, gather, replicas)]
    if type(runtime.participation) is not Participation and any(given.values()):
        problems.append("the model uses fsdp.SameBits, fsdp.join or fsdp.cond, which send gradients by themselves")
    if problems:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise NotImplementedError(f"fsdp.compress: {problems[0]}{more}")


def _problems(unit: Unit, reduce: Any, gather: Any, replicas: Any) -> Iterator[str]:
    if (reduce or gather or replicas) and unit.placements.is_nested:
        yield f"{unit.name} has optimizer state that is sharded over replicas as well: use HYBRID_SHARD or FULL_SHARD"
    if reduce and unit.policy.comm_hook is not None:
        yield f"{unit.name} has a communication hook, which sends gradients by itself: omit the hook or `reduce`"
    for handle in unit.handles:
        across = replicas and _has_replicas(unit, handle)
        if not (handle.is_sharded or across):
            continue
        if reduce and isinstance(handle.reduce_comm, InFront) and not isinstance(handle.reduce_comm, Quantizing):
            yield f"{handle.name} has a custom reduce-scatter, which sends gradients by itself: omit it or `reduce`"
        if gather and any(each is not None for each in handle.flat_param.examples):
            yield f"{handle.name} is of a class with a custom all-gather (fsdp_pre_all_gather): omit `gather`"
        if (reduce or gather or across) and any(part is not None for part in handle.flat_param.parts):
            yield f"{handle.name} is tensor-parallel: shard it over the data-parallel ranks only"
        dtypes = {handle.flat_param.dtype} if gather else set()
        dtypes |= {handle.gradients.dtype} if (reduce or across) and handle.requires_grad else set()
        wide = sorted(str(each) for each in dtypes if each.is_complex or each is torch.float64)
        if wide:
            yield f"{handle.name} is of {wide[0]}: only float32, bfloat16 and float16 are quantised"
