"""`fsdp.compress`: gradients and parameters are sent quantised, for slow networks.

The engine does not depend on this module. Gradients use a different communicator (`QuantizedReduceScatter`), and
unsharded parameters a different class (`QuantizedParameters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.block_codes import DTYPES, BlockCodes
from fsdp.distributed.communicator import Communicator, during
from fsdp.distributed.consensus import agree_on, done_by_all
from fsdp.distributed.custom_collectives import InFront
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.runtime import Runtime, runtime_of_root
from fsdp.engine.unit import Unit
from fsdp.layers.quantized_params import MakeQuantized
from fsdp.layers.quantized_reduce import Feedback, QuantizedReduceScatter, QuantizedSums
from fsdp.layers.summary import size_text
from fsdp.layers.verify import require_sharded

_KEY = "quantized_reduce_feedback"  # of an optimizer's state


@dataclass(frozen=True)
class QuantizedReduce:
    """Send gradients in 8 or 4 bits, with a float32 scale for each block.

    Each rank sends the piece of its gradient for each other rank once. That rank adds the pieces in float32. A value is
    rounded by at most 1/254 (8 bits) or 1/14 (4 bits) of the largest absolute value of its block.

    Args:
        bits: 8 or 4.
        block: the number of elements with a common scale, an even number.
        feedback: add the rounding errors of a gradient to the next gradient. Each rank keeps the errors of what it
            sends in bfloat16: 2 (W - 1) / W bytes for each trained parameter of the *unsharded* model.

    Raises:
        ValueError: for other numbers.
    """

    bits: int = 8
    block: int = 256
    feedback: bool = False

    def __post_init__(self) -> None:
        _ = self.codes

    @property
    def codes(self) -> BlockCodes:
        """The format of messages."""
        return BlockCodes(self.bits, self.block)


@dataclass(frozen=True)
class QuantizedGather:
    """Send parameters in 8 or 4 bits to forward and backward, with a float32 scale for each block.

    All ranks compute with the same bits: each rank also rounds its own shard. The shards that the optimizer steps stay
    exact. A parameter is rounded by at most 1/254 (8 bits) or 1/14 (4 bits) of the largest absolute value of its block.

    Args:
        bits: 8 or 4.
        block: the number of elements with a common scale, an even number.

    Raises:
        ValueError: for other numbers.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        _ = self.codes

    @property
    def codes(self) -> BlockCodes:
        """The format of messages."""
        return BlockCodes(self.bits, self.block)


@during("fsdp.compress()")
def compress(
    model: nn.Module, *, reduce: QuantizedReduce | None = None, gather: QuantizedGather | None = None
) -> Compression:
    """Collective. Send gradients and parameters of all units quantised from now on, for both front doors. ::

        compression = fsdp.compress(model, reduce=fsdp.QuantizedReduce(bits=4), gather=fsdp.QuantizedGather())

    Call the function on every rank with the same arguments, between steps. A second call replaces the first one.
    Parameters of integer dtypes, parameters without dimensions, and units of a single rank are sent as before.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        reduce: how gradients are sent; None for exact gradients.
        gather: how parameters are sent to forward and backward; None for exact parameters.

    Returns:
        An object that saves the error feedback, and whose text shows the bytes of a unit's collectives.

    Raises:
        TypeError: if `model` is not sharded, or for an argument of another class.
        NotImplementedError: for features that cannot be combined with it, by name: replicas (hybrid sharding,
            NO_SHARD), float64 and complex parameters, tensor parallelism, communication hooks, custom
            reduce-scatters, parameters with an all-gather of their own, `fsdp.SameBits`; after the first use of
            `fsdp.join` or `fsdp.cond`.
        RuntimeError: if ranks have different arguments; inside a forward or backward; for an inner unit.
    """
    runtime = runtime_of_root(require_sharded(model, "fsdp.compress"), "fsdp.compress", "module")
    runtime.ensure_idle("compress communication")
    everyone = runtime.root.everyone
    done_by_all([everyone], "compress communication", lambda: _require_possible(runtime, reduce, gather))
    agree_on(everyone, "arguments of fsdp.compress", f"reduce={reduce}, gather={gather}")
    return Compression(runtime, reduce, gather)


class Compression:
    """The quantised communication of a model, as `fsdp.compress` returns it.

    Attributes:
        reduce, gather: the arguments of `fsdp.compress`.
    """

    def __init__(self, runtime: Runtime, reduce: QuantizedReduce | None, gather: QuantizedGather | None) -> None:
        self.reduce, self.gather = reduce, gather
        self._units = runtime.units
        self._feedback: list[tuple[Feedback, Communicator]] = []
        by_way: dict[Communicator, list[FlatParamHandle]] = {}  # one for each, or small gradients would not be together
        for handle in runtime.handles:
            if handle.is_sharded:
                way = handle.reduce_comm
                way = way.plain if isinstance(way, QuantizedReduceScatter) else way
                handle.connect(handle.comm, way, handle.replicas, handle.replica_axis)
                self._gather_with(handle)
                if handle.gradients.dtype in DTYPES:
                    by_way.setdefault(way, []).append(handle)
        if reduce is not None:
            for way, handles in by_way.items():
                sums = QuantizedSums(reduce.codes, handles, reduce.feedback)
                front = QuantizedReduceScatter(way, sums)
                for handle in handles:
                    handle.connect(handle.comm, front, handle.replicas, handle.replica_axis)
                self._feedback += [(each, way) for each in sums.feedback]

    def _gather_with(self, handle: FlatParamHandle) -> None:
        plain: Any = handle.new_unsharded
        make = plain = plain.plain if isinstance(plain, MakeQuantized) else plain
        if self.gather is not None and handle.flat_param.dtype in DTYPES:
            make = MakeQuantized(plain, self.gather.codes)
        if make is not handle.new_unsharded:
            handle.new_unsharded = make
            handle.forms.clear()
            handle.follow_precision()

    # --- error feedback -----------------------------------------------------------------------------------------

    @property
    def feedback_nbytes(self) -> int:
        """The bytes of rounding errors that this rank keeps."""
        return sum(feedback.nbytes for feedback, _ in self._feedback)

    @contextmanager
    def stored_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Collective at its beginning. The optimizer's state contains the error feedback inside the context. ::

            with compression.stored_in(optimizer):
                fsdp.save("checkpoint", model, optimizer)

        The errors of all ranks are added up, at full precision, on the ranks whose shards they are of: a tensor like
        the parameter, under the key "quantized_reduce_feedback". All functions that save and reshard optimizer state
        include it, for any number of ranks. This training goes on from the same sums, so a training that is resumed on
        as many ranks has the same bits.

        Args:
            optimizer: of all trained parameters of the model, after its first step.

        Raises:
            ValueError: for a parameter that the optimizer does not have.
            RuntimeError: for a parameter without optimizer state, before the first step.
        """
        with during("stored_in()"):
            params = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for feedback, _ in self._feedback:
                for param in feedback.handle.listed_params if feedback.handle.requires_grad else ():
                    _require_in(optimizer, params, param, feedback.handle.name)
            stored = []
            for feedback, way in self._feedback:
                if feedback.handle.requires_grad:
                    errors = feedback.settle(way)
                    for param, part in _by_param(feedback.handle, errors):
                        stored.append(param)
                        state = torch.zeros_like(param, requires_grad=False)
                        local_part(state).view(-1).copy_(part)
                        optimizer.state[param][_KEY] = state
        try:
            yield
        finally:
            for param in stored:
                optimizer.state[param].pop(_KEY, None)

    def load_from(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the error feedback out of a loaded optimizer state. Call it on every rank. Not collective.

        Where the state has none, feedback begins at zero.
        """
        for feedback, _ in self._feedback:
            handle = feedback.handle
            errors = torch.zeros(handle.layout.shard_numel, device=handle.storage.device)
            for param, part in _by_param(handle, errors):
                state = optimizer.state[param].pop(_KEY, None) if param in optimizer.state else None
                if state is not None:
                    part.copy_(local_part(state).view(-1))
            feedback.sent, feedback.received = None, errors

    # --- what is saved --------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the bytes that each rank sends for one all-gather and one reduction of all units, and without."""
        handles = [handle for unit in self._units for handle in unit.handles if handle.is_sharded]
        gathered = [(handle, handle.flat_param.dtype, handle.dtype) for handle in handles]
        reduced = [(one, one.gradients.dtype, one.gradients.dtype) for one in handles if one.requires_grad]
        return "\n".join(
            [
                f"all-gather: {_bytes_sent(self.gather, gathered)}",
                f"reduction: {_bytes_sent(self.reduce, reduced)}",
                f"error feedback: {size_text(self.feedback_nbytes)} on this rank",
            ]
        )


def _bytes_sent(
    policy: QuantizedReduce | QuantizedGather | None, sent: Iterable[tuple[FlatParamHandle, torch.dtype, torch.dtype]]
) -> str:
    """Return how much is sent of handles of this dtype, and how much would be sent in that dtype."""
    exact = quantized = 0
    for handle, dtype, plain in sent:
        peers, numel = handle.comm.world_size - 1, handle.layout.shard_numel
        exact += peers * numel * plain.itemsize
        is_quantized = policy is not None and dtype in DTYPES
        quantized += peers * (policy.codes.nbytes(numel) if policy and is_quantized else numel * plain.itemsize)
    share = f" ({quantized / exact:.3f})" if exact else ""
    return f"{size_text(quantized)} instead of {size_text(exact)}{share}"


def _by_param(handle: FlatParamHandle, shard: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters that optimizers step, with their flat parts of a shard ``[shard_numel]``."""
    if handle.orig_params is None:
        return [(handle.flat_param, shard)]
    parts = handle.layout.local_shards(shard, handle.comm.rank)
    return [(param, part) for param, part in zip(handle.listed_params, parts, strict=True) if param.requires_grad]


def _require_in(optimizer: torch.optim.Optimizer, params: set[int], param: nn.Parameter, name: str) -> None:
    if id(param) not in params:
        if param.requires_grad:
            raise ValueError(f"{name}: a {type(optimizer).__name__} without this parameter cannot store its feedback")
    elif not optimizer.state.get(param) and not isinstance(optimizer, torch.optim.SGD):
        raise RuntimeError(
            f"{name}: the {type(optimizer).__name__} has no state of this parameter yet. Save after its first step."
        )


def _require_possible(runtime: Runtime, reduce: Any, gather: Any) -> None:
    for name, given, kind in (("reduce", reduce, QuantizedReduce), ("gather", gather, QuantizedGather)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"fsdp.compress: {name} must be a fsdp.{kind.__name__} or None, got {given!r}")
    problems = [problem for unit in runtime.units for problem in _problems(unit, reduce, gather)]
    if runtime.participation is not None and (reduce or gather):
        problems.append("the model uses fsdp.SameBits, fsdp.join or fsdp.cond, which send gradients by themselves")
    if problems:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise NotImplementedError(f"fsdp.compress: {problems[0]}{more}")


def _problems(unit: Unit, reduce: Any, gather: Any) -> Iterator[str]:
    """Yield the features of a unit that quantised communication does not support."""
    if (reduce or gather) and unit.axes[1].world_size > 1:
        yield f"{unit.name} has replicas, over which gradients are summed exactly: use FULL_SHARD over all ranks"
    if reduce and unit.policy.comm_hook is not None:
        yield f"{unit.name} has a communication hook, which sends gradients in its own way: leave one of the two out"
    if gather and unit.precision.full_in_eval:
        yield f"{unit.name} has full_precision_in_eval, and gathers would be quantised there too: leave one of them out"
    for handle in unit.handles:
        if not handle.is_sharded:
            continue
        front = isinstance(handle.reduce_comm, InFront) and not isinstance(handle.reduce_comm, QuantizedReduceScatter)
        if reduce and front:
            yield f"{handle.name} has a custom reduce-scatter, which sends gradients in its own way: leave it out"
        if gather and any(each is not None for each in handle.flat_param.examples):
            yield f"{handle.name} is of a class with an all-gather of its own (fsdp_pre_all_gather): leave `gather` out"
        if (reduce or gather) and any(part is not None for part in handle.flat_param.parts):
            yield f"{handle.name} is tensor-parallel: shard it over the data-parallel ranks only"
        dtypes = {handle.flat_param.dtype} if gather else set()
        dtypes |= {handle.gradients.dtype} if reduce and handle.requires_grad else set()
        wide = sorted(str(each) for each in dtypes if each.is_complex or each is torch.float64)
        if wide:
            yield f"{handle.name} is of {wide[0]}: only float32, bfloat16 and float16 are quantised"
