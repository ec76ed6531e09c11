"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`, and helpers for writing hooks.

The following hook is equivalent to the library without a hook:

    def average(state, gradient, shard):
        ranks = gradient.numel() // shard.numel()
        shard.copy_(reduce_scatter(gradient)).div_(ranks)

A hook is a user's function that computes this rank's shard of the average from every rank's unsharded gradients. Like
torch's hooks, it may call `torch.distributed`. `reduce_scatter` uses the communicator of this library instead. On gloo
it sends half the bytes, sums in rank order (so that runs are reproducible to the bit), and errors contain the unit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp.distributed.collectives import Communicator, communicator
from fsdp.distributed.communicator import Group, default_group


class HookCall(NamedTuple):
    """The flat parameter for which a hook runs, and the communicator of the ranks that reduce its gradient."""

    name: str
    comm: Communicator
    tag: int


# Per thread: on CUDA hooks run in autograd's threads.
_running: ContextVar[HookCall | None] = ContextVar("_running", default=None)


@dataclass(frozen=True)
class CommHook:
    """A communication hook with its state.

    The contract is the same as in torch's FSDP1 for sharded strategies (`torch.distributed.fsdp`,
    ``register_comm_hook``), so torch's hooks for FSDP1 work unchanged. Hooks may replace ``shard.data`` by a tensor of
    another dtype.
    """

    function: Callable[[Any, Tensor, Tensor], None]
    state: Any

    @property
    def name(self) -> str:
        """The name of the function with its module, the same on all ranks with the same hook."""
        named: Any = self.function
        while isinstance(named, partial):
            named = named.func
        named = named if hasattr(named, "__qualname__") else type(named)
        return f"{named.__module__}.{named.__qualname__}"

    def __deepcopy__(self, memo: Any) -> CommHook:
        return self  # copies of the model share the hook, because its state may contain process groups

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a model with a communication hook ({self.name}) cannot be pickled, because the hook knows the ranks. "
            "Save its state_dict(), or pickle the model before register_comm_hook."
        )

    def reduce(self, gradient: Tensor, of: tuple[str, Communicator, int], dtype: torch.dtype) -> Tensor:
        """Collective if the hook is collective. Return this rank's shard ``[n]`` of the average in `dtype`.

        The gradient ``[world_size * n]`` is in the dtype of the reduction, before any division, and may be overwritten.
        An error in the hook is raised as a RuntimeError that contains the name of the flat parameter.
        """
        call = HookCall(*of)
        # Neither zeros nor uninitialized memory: NaN shows elements that the hook does not fill.
        shard = gradient.new_full((gradient.numel() // call.comm.world_size,), float("nan"))
        expected = _kind(shard)
        # The hook may call torch.distributed, where gloo matches messages by their order of arrival.
        call.comm.meet(f"the communication hook for {call.name}", call.tag)
        token = _running.set(call)
        try:
            returned = self.function(self.state, gradient, shard)  # type: ignore[func-returns-value]
        except Exception as error:
            raise RuntimeError(
                f"{call.name}: the communication hook {self.name} raised {type(error).__name__}: {error}"
            ) from error
        finally:
            _running.reset(token)
        if returned is not None:
            raise RuntimeError(
                f"{call.name}: the communication hook {self.name} returned a {type(returned).__name__}, which would be "
                "ignored: fill `shard` in place and return None. (Hooks of DistributedDataParallel, which return "
                "futures, are not supported.)"
            )
        if _kind(shard) != expected:
            raise RuntimeError(
                f"{call.name}: the communication hook {self.name} replaced `shard` by {list(shard.shape)} of "
                f"{shard.dtype} on {shard.device}; it was [{expected[0][0]}] of {gradient.dtype} on {expected[1]}: "
                "fill it in place."
            )
        return shard.to(dtype)


@dataclass(frozen=True)
class AllReduceHook:
    """A user's function that modifies a shard's gradient in place after the reduction.

    For example, the function sums over additional replicas, which are not part of the unit's mesh.
    """

    function: Callable[[Tensor], None]  # called with this rank's shard of the averaged gradient, flat
    stream: Any = None  # the stream on which the function runs; None means the current stream

    def __deepcopy__(self, memo: Any) -> AllReduceHook:
        return self  # the function may contain process groups

    def run(self, gradient: Tensor) -> Tensor:
        """Collective if the function is collective. Return the modified gradient."""
        if self.stream is None:
            self.function(gradient)
            return gradient
        device = torch.get_device_module(gradient.device)
        present = device.current_stream(gradient.device)
        self.stream.wait_stream(present)
        with device.stream(self.stream):
            self.function(gradient)
        present.wait_stream(self.stream)
        return gradient


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.device, bool, bool]:
    """Return the properties of a tensor that a hook must not change. A hook may change the dtype."""
    return tensor.shape, tensor.device, tensor.is_floating_point(), tensor.is_complex()


def reduce_scatter(tensor: Tensor, group: Group | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Collective. Sum a tensor over the ranks, and return this rank's part of the sum. For use inside a hook.

    Args:
        tensor: ``[world_size * n]``, with the same shape and dtype on every rank; it is sent in its dtype and may be
            overwritten.
        group: an optional process group (default: the ranks of the unit for which the hook was called).
        dtype: the dtype of the result (default: the dtype of `tensor`). gloo computes the sum in the wider of the two
            dtypes; other backends compute it in the dtype of `tensor`.

    Returns:
        ``[n]``, the sum of elements ``rank * n`` to ``(rank + 1) * n``. The result may share memory with `tensor`.

    Raises:
        RuntimeError: outside of a hook, or if another rank did not answer.
        TypeError: if `group` is not a process group that contains this rank.
        ValueError: if `tensor` cannot be divided into equal shards.
    """
    call = _running.get()
    if call is None:
        raise RuntimeError(
            "reduce_scatter can be called only inside a communication hook, because its messages contain the number of "
            "a unit. Elsewhere use torch.distributed."
        )
    comm = call.comm if group is None else communicator(default_group(group), tensor.device)
    if tensor.dim() != 1 or tensor.numel() % comm.world_size:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be divided into {comm.world_size} equal parts")
    if comm.is_read_in_place(tensor):
        tensor = tensor.clone()  # the hook may write to `tensor` after this function returns
    return comm.reduce_scatter(tensor, f"reduce-scatter for {call.name}", call.tag, dtype).wait()


def bf16_compress_hook(state: Group | None, gradient: Tensor, shard: Tensor) -> None:
    """Collective. Average gradients that are sent in bfloat16, which requires half the bytes of float32.

    Each rank's gradient is rounded to bfloat16, with a relative error of at most 2**-8 per element. On gloo the
    rounded gradients are summed in float32, in the order of ranks. The error of the average is then at most 2**-8 of
    the average of the absolute values (in addition to the rounding of float32). NCCL and other backends add in
    bfloat16 and round after each addition, which adds up to ``world_size - 1`` times this error. The result is then
    rounded to the unit's reduce dtype.

    The range is the same as in float32, so gradients do not overflow and require no scaling. Gradients are also
    rounded if there is only a single rank.

    Args:
        state: the process group to average over (default: the wrapper's group).
        gradient: ``[world_size * n]``, see `FullyShardedDataParallel.register_comm_hook`.
        shard: ``[n]``.

    Raises:
        TypeError: for complex gradients.
    """
    if gradient.is_complex():
        raise TypeError(f"a gradient of {gradient.dtype} would lose its imaginary part in bfloat16")
    ranks = gradient.numel() // shard.numel()
    shard.copy_(reduce_scatter(gradient.to(torch.bfloat16), state, dtype=torch.float32).div_(ranks))
