"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`, and helpers for writing hooks.

The following hook is equivalent to the library without a hook:

    def average(state, gradient, shard):
        ranks = gradient.numel() // shard.numel()
        shard.copy_(reduce_scatter(gradient)).div_(ranks)

A hook is a user's function that computes this rank's shard of the average from every rank's unsharded gradients. A
hook may also call `torch.distributed`, like torch's hooks. `reduce_scatter` uses the communicator of the library
instead: on gloo it sends half the bytes, sums in the order of ranks (so that runs are reproducible to the bit), and
messages and errors contain the unit.
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
    """The flat parameter that a hook runs for, and the communicator of the ranks that reduce it."""

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
        """The name of the function with its module: the same on ranks that have the same hook."""
        named: Any = self.function
        while isinstance(named, partial):
            named = named.func
        named = named if hasattr(named, "__qualname__") else type(named)
        return f"{named.__module__}.{named.__qualname__}"

    def __deepcopy__(self, memo: Any) -> CommHook:
        return self  # a copy of the model uses the same hook, which knows the ranks

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a model with a communication hook ({self.name}) cannot be pickled, because the hook knows the ranks. "
            "Save state_dict(), or pickle the model before register_comm_hook."
        )

    def reduce(self, gradient: Tensor, of: tuple[str, Communicator, int], dtype: torch.dtype) -> Tensor:
        """Collective if the hook is. Return this rank's shard ``[n]`` of the average, of this dtype.

        The gradient ``[world_size * n]`` is in the dtype of the reduction, before any division; the hook may overwrite
        it. An error in the hook becomes a RuntimeError that contains the name of the flat parameter.
        """
        call = HookCall(*of)
        # Not zeros, and not what happens to be in memory: what a hook forgets to fill shall be noticed.
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
                "futures, are others.)"
            )
        if _kind(shard) != expected:
            raise RuntimeError(
                f"{call.name}: the communication hook {self.name} left {list(shard.shape)} of {shard.dtype} on "
                f"{shard.device} in `shard`, which was [{expected[0][0]}] on {expected[1]}: fill it in place."
            )
        return shard.to(dtype)


@dataclass(frozen=True)
class AllReduceHook:
    """A user's function that modifies a shard's gradient in place after the reduction.

    For example, it sums over additional replicas, which are not part of the unit's mesh.
    """

    function: Callable[[Tensor], None]  # called with this rank's shard of the averaged gradient, flat
    stream: Any = None  # on which it runs; None means the present one

    def __deepcopy__(self, memo: Any) -> AllReduceHook:
        return self  # it knows the ranks

    def run(self, gradient: Tensor) -> Tensor:
        """Collective, as far as the function is. Return the gradient that it has changed."""
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
    """Return all that a hook may not change; the dtype it may."""
    return tensor.shape, tensor.device, tensor.is_floating_point(), tensor.is_complex()


def reduce_scatter(tensor: Tensor, group: Group | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Collective. Sum a tensor over the ranks, each of which receives its part. For use inside a hook.

    Args:
        tensor: ``[world_size * n]``, with the same shape and dtype on every rank; it is sent in its dtype and may be
            overwritten.
        group: the ranks; None means the ranks of the unit that the hook was called for.
        dtype: the dtype of the result; None means the dtype of `tensor`. gloo computes the sum in the wider of the
            two; other backends compute it in the dtype of `tensor`.

    Returns:
        ``[n]``, the sum of elements ``rank * n`` to ``(rank + 1) * n``. It may share memory with `tensor`.

    Raises:
        RuntimeError: outside of a hook, or if another rank did not answer.
        TypeError: for a `group` that is no process group that this rank is in.
        ValueError: for a tensor that cannot be divided into equal shards.
    """
    call = _running.get()
    if call is None:
        raise RuntimeError(
            "reduce_scatter is for communication hooks while they run, because its messages carry the "
            "number of a unit. Elsewhere use torch.distributed."
        )
    comm = call.comm if group is None else communicator(default_group(group), tensor.device)
    if tensor.dim() != 1 or tensor.numel() % comm.world_size:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be cut into {comm.world_size} equal parts")
    if comm.is_read_in_place(tensor):
        tensor = tensor.clone()  # the hook may write it when this returns
    return comm.reduce_scatter(tensor, f"reduce-scatter for {call.name}", call.tag, dtype).wait()


def bf16_compress_hook(state: Group | None, gradient: Tensor, shard: Tensor) -> None:
    """Collective. Average gradients that are sent in bfloat16, which takes half the bytes of float32.

    Each rank's gradient is rounded to bfloat16, with a relative error of at most 2**-8 per element. On gloo the
    rounded gradients are summed in float32, in the order of ranks. The error of the average is then at most 2**-8 of
    the average of the absolute values (in addition to the rounding of float32). NCCL and other backends add in
    bfloat16, and round at each addition: up to ``world_size - 1`` times as much again. The result is then rounded to
    the unit's reduce dtype.

    The range is the same as in float32, so gradients do not overflow and need no scaling. A single rank rounds its
    gradients too.

    Args:
        state: the process group to average over; None means the wrapper's group.
        gradient: ``[world_size * n]``, see `FullyShardedDataParallel.register_comm_hook`.
        shard: ``[n]``.

    Raises:
        TypeError: for complex gradients.
    """
    if gradient.is_complex():
        raise TypeError(f"a gradient of {gradient.dtype} would lose its imaginary part in bfloat16")
    ranks = gradient.numel() // shard.numel()
    shard.copy_(reduce_scatter(gradient.to(torch.bfloat16), state, dtype=torch.float32).div_(ranks))
