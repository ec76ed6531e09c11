"""Ranks that do different things: modules that not every rank runs, and ranks that run out of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp.engine.runtime import Runtime, running, runtime_of, runtime_of_root
from fsdp.engine.unit import unit_of, unit_of_wrapper
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.uneven.join import Joining
from fsdp.uneven.regions import visits_of


def cond(module: nn.Module, run_here: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Collective. Run a module on the ranks that want to, with the others taking part in its collectives.

    For a vision tower and a batch without images, an expert without tokens, or a layer that is dropped. All ranks of
    the outermost wrapper call it, at the same place and for the same module, inside of that one's forward. They tell
    each other with one small message whether they run it:

    - if no rank does, nothing else happens, and no parameter of it is all-gathered;
    - if all do, it runs as if it was called directly;
    - otherwise, those that run it compute, and the others join their all-gathers, in forward and in backward, and add
      zeros to its gradients: these are the sum over the ranks that ran it, divided by the number of all ranks.

    Calls may be inside of each other, and in modules under activation checkpointing. Backward has to come before the
    next forward. On CUDA, ranks wait for the message on the host; a group with a gloo backend for the CPU besides
    (``init_process_group("cpu:gloo,cuda:nccl")``) keeps that from waiting for the device.

    Args:
        module: part of a wrapped model, wrapped itself, with wrapped modules inside, or plain.
        run_here: whether this rank runs it.
        args, kwargs: for the module; not looked at where it does not run.

    Returns:
        The module's output, or None on a rank that does not run it.

    Raises:
        ValueError: if the module is not part of the wrapped model that runs.
        RuntimeError: on every rank, if they call it for different modules or run different units in it, if the module
            raised on one of them, or if it runs twice in one forward and not on all ranks each time.
    """
    runtime = _runtime_of(module)
    unit = unit_of_wrapper(module)
    own = module if unit is None else unit.module
    return visits_of(runtime).visit(own, bool(run_here), lambda: module(*args, **kwargs))


@contextmanager
def join(
    model: FullyShardedDataParallel,
    *optimizers: torch.optim.Optimizer,
    after_step: Callable[[torch.optim.Optimizer], None] | None = None,
) -> Iterator[Joining]:
    """Collective. Train with different numbers of batches on the ranks: those that have finished keep serving.

    ::

        with fsdp.join(model, optimizer):
            for batch in batches:  # 3 on one rank, 8 on another
                loss(model(batch)).backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

    A rank whose loop has ended waits at the end of the context. Until all have, it joins their all-gathers, contributes
    zeros to gradients, clips, steps and zeroes its own shards whenever the others do, with their learning rates.

    Gradients stay sums over ranks divided by the number of *all* ranks, so a batch has the same weight whether other
    ranks still have one or not, as in `DistributedDataParallel.join` by default. For the mean over the ranks that had a
    batch, multiply the loss by ``model.world_size / joined.running_ranks``, where ``joined`` is what the context gives.

    Nothing else inside may need all ranks: `summon_full_params`, state dicts and the like raise, collectives of your
    own would wait forever. Buffers of ranks that have finished (statistics of batch norm) stay as they are.

    Args:
        model: the outermost wrapper.
        optimizers: all that step its parameters, in the same order on every rank.
        after_step: called with the optimizer on ranks that have finished, after each step that they take: for learning
            rate schedulers and averages, which the loop would have stepped.

    Yields:
        An object with ``running_ranks``, the number of ranks that took part in the last forward with a batch.

    Raises:
        RuntimeError: on an inner wrapper, inside a forward or backward, inside another `join`.
        TypeError: if `model` is no `FullyShardedDataParallel`.
        ValueError: without an optimizer.
        NotImplementedError: inside, for optimizers stepped with a closure, and `ShardedGradScaler`.
    """
    if not isinstance(model, FullyShardedDataParallel):
        raise TypeError(f"fsdp.join needs the outermost FullyShardedDataParallel, got a {type(model).__name__}")
    if not optimizers:
        raise ValueError("fsdp.join: give it the optimizer, which ranks that have finished step as well")
    runtime = runtime_of_root(model._unit, "join")
    runtime.ensure_idle("begin fsdp.join")
    joining = Joining(runtime, model, optimizers, after_step)
    joining.begin()
    try:
        yield joining
        joining.serve()
    finally:
        joining.end()


def _runtime_of(module: nn.Module) -> Runtime:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fsdp.cond runs an nn.Module, got a {type(module).__name__}: wrap the function in a module")
    for inner in module.modules():
        unit = unit_of(inner)
        if unit is not None:
            return runtime_of(unit)
    runtime = running()
    if runtime is not None:
        return runtime
    raise ValueError(
        f"fsdp.cond: {type(module).__name__} has no wrapped modules, and no wrapped model is running: call it inside "
        "of the forward of the outermost FullyShardedDataParallel"
    )
