"""A user's own way from every rank's whole gradients to this rank's part of their average."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp.distributed.collectives import Communicator


class HookCall(NamedTuple):
    """For which flat parameter a hook runs, and its own way to the ranks that reduce it."""

    name: str
    comm: Communicator
    tag: int


# Per thread: on CUDA hooks run in autograd's threads.
_running: ContextVar[HookCall | None] = ContextVar("_running", default=None)


def running_call() -> HookCall | None:
    """The call of a hook that this thread is in."""
    return _running.get()


@dataclass(frozen=True)
class CommHook:
    """A communication hook with its state.

    The contract is that of torch's FSDP1 for sharded strategies (`torch.distributed.fsdp`, ``register_comm_hook``), so
    that torch's hooks for it work unchanged. They may replace ``shard.data`` by a tensor of another dtype.
    """

    function: Callable[[Any, Tensor, Tensor], None]
    state: Any

    @property
    def name(self) -> str:
        """Where the hook is defined: the same on ranks that have the same hook."""
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

    def reduce(self, gradient: Tensor, call: HookCall, dtype: torch.dtype) -> Tensor:
        """Collective, as far as the hook is. This rank's part of the average.

        Args:
            gradient: ``[world_size * n]``, in the dtype of the reduction, not divided by anything. The hook may do with
                it what it likes.
            call: whose gradient it is.
            dtype: of the result ``[n]``.

        Raises:
            RuntimeError: naming the flat parameter, for whatever the hook raises (its cause), for a hook that returns
                something, and for one that puts something of another kind in the place of its result.
        """
        # Not zeros, and not what happens to be in memory: what a hook forgets to fill shall be noticed.
        shard = gradient.new_full((gradient.numel() // call.comm.world_size,), float("nan"))
        expected = _kind(shard)
        # It may call torch.distributed, where gloo takes what comes first for what was asked for.
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
                f"{call.name}: the communication hook {self.name} left {_described(shard)} in `shard`, which was "
                f"[{expected[0][0]}] on {expected[1]}: fill it in place."
            )
        return shard.to(dtype)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.device, bool, bool]:
    """What a hook may not change; the dtype it may."""
    return tensor.shape, tensor.device, tensor.is_floating_point(), tensor.is_complex()


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
