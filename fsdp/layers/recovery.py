"""Recovery: after an exception on any rank, all ranks return to the weights of the last step and continue training.

The failed rank, which has caught an exception, notifies the other ranks, which wait in a collective. They abandon their
waits, raise an error, and call `recover` as well. gloo closes connections when a wait is abandoned, so process groups
are reconnected. The work of the interrupted step is discarded. If other ranks have completed the step that failed on
this rank, this rank also takes the step, because steps cannot be undone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from fsdp.distributed import passes
from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.communicator import (
    CollectiveError,
    after_closing,
    backend_names,
    behind,
    communicators_among,
    named,
    own_rank,
)
from fsdp.distributed.consensus import done_by_all, peers_answer
from fsdp.distributed.messages import blank, renew
from fsdp.distributed.watchdog import meet
from fsdp.engine.phase import Phase
from fsdp.engine.runtime import Runtime, runtimes
from fsdp.engine.unit import Unit, outermost_units, units_in
from fsdp.layers.optimizer_hooks import optimizers_of

_CALL = "fsdp.recover()"
_AT_MOST = 100_000  # resources that a rank releases


def recover(model: nn.Module) -> bool:
    """Collective, at any time. Continue after an exception on any rank, from the weights of the last step.

    ::

        for batch in batches:
            while True:
                try:
                    train(batch)  # forward, backward, optimizer.step(), optimizer.zero_grad()
                except Exception:
                    if fsdp.recover(model):
                        continue  # with the same batch
                break  # continue with the next batch

    Call it on the rank that has caught an exception, and on the other ranks, which then raise a `CollectiveError`.
    Unsharded parameters and all gradients of the model are discarded. Process groups are reconnected: the groups of
    the model, and all other gloo groups among its ranks that fsdp uses, so user collectives on them work again. If
    some ranks have completed a step that failed on other ranks before any write, these ranks take the step too.

    Buffers (batch norm statistics), states of random generators, schedulers and scalers, and the error feedback of
    `fsdp.compress` are not restored.

    Args:
        model: a sharded model.

    Returns:
        True on ranks that were a step ahead: their interrupted batch was not used, and they must run it again together
        with the other ranks.

    Raises:
        RuntimeError: on every rank, if a rank cannot complete the last step because of partial writes or missing
            gradients. All ranks are idle then, and can load a checkpoint. Also if a rank has exited, if groups do not
            use gloo, or inside a forward, a backward, or `fsdp.join`.
        ValueError: if `model` is not sharded.
        TypeError: if `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_CALL} needs a sharded model, got {model!r}")
    outermost = outermost_units(model)
    roots = dict.fromkeys(unit if unit.runtime is None else unit.runtime.root for unit in outermost)
    if not roots:
        raise ValueError(f"{_CALL}: nothing in this {type(model).__name__} is sharded")
    were_ahead = [_recover(root) for root in roots]
    return any(were_ahead)


class _State(NamedTuple):
    """The steps of a rank, which the ranks exchange."""

    taken: int = 0
    backwards: int = 0  # the number of completed backwards
    can_step: bool = False  # the rank knows the optimizer for the missing step
    problem: str = ""  # the reason if the weights differ from the result of the last step; else empty


def _recover(root: Unit) -> bool:
    runtime = next((each for each in runtimes() if each.root is root), None)
    if runtime is not None and runtime.participation.is_joining:
        raise RuntimeError(f"{_CALL} inside fsdp.join: call it after the context, on every rank")
    if runtime is not None and runtime.is_computing:
        raise RuntimeError(f"{_CALL} in the middle of a forward or backward of {root.name}: call it after them")
    ways = communicators_among(root.ranks)
    for way in ways:
        if (names := backend_names(way.group)).get("cpu") != "gloo":
            raise RuntimeError(f"{_CALL} supports process groups of gloo only, got {names}: start the job again")
    optimizer, own = (None, _State()) if runtime is None else _steps_of(runtime)
    heard = {own_rank(): own}
    if len(root.ranks) > 1 and peers_answer(root.everyone):
        heard = {rank: _State(*state) for rank, state in meet(sorted(root.ranks), _reason(), own).items()}
    _come_to_rest(root, runtime, ways)
    if len(heard) > 1:
        for group in sorted({behind(way.group) for way in ways}, key=attrgetter("group_name")):
            renew(group)
    try:
        problem, late = _missing_steps(heard)
        if problem:
            raise RuntimeError(f"rank {own_rank()}: {_CALL}: {problem} Load the last checkpoint, on every rank.")
        is_late = own_rank() in late
        if late:
            step = optimizer.step if optimizer is not None and is_late else lambda: None
            done_by_all([root.everyone], "complete its last step", step)
    finally:
        for unit in units_in(root):
            for handle in unit.handles:
                handle.zero_grad()
        if runtime is not None:
            runtime.forget()  # the next forward creates orders of units and journals that are the same on all ranks
    return bool(late) and not is_late


def _reason() -> str:
    error = sys.exc_info()[1]
    cause = "" if error is None else f", after {type(error).__name__}{': ' * bool(str(error))}{str(error)[:300]}"
    return f"rank {own_rank()} has called {_CALL}{cause}. Call it on every rank, or end all ranks"


def _steps_of(runtime: Runtime) -> tuple[torch.optim.Optimizer | None, _State]:
    """Return the optimizer whose step was interrupted, or the model's only optimizer, and this rank's state."""
    steps = runtime.steps
    known = [steps.interrupted] if steps.interrupted is not None else optimizers_of(runtime.handles)
    optimizer = known[0] if len(known) == 1 else None
    return optimizer, _State(steps.taken, steps.backwards, optimizer is not None, steps.problem)


def _missing_steps(heard: Mapping[int, _State]) -> tuple[str, Sequence[int]]:
    """Return the reason if the ranks cannot reach the same weights, else "", and the ranks that must still step."""
    for problem in filter(None, (state.problem for state in heard.values())):
        return f"{named(rank for rank, state in heard.items() if state.problem == problem)} {problem}.", ()
    most = max(state.taken for state in heard.values())
    backwards = max(state.backwards for state in heard.values())
    late = {rank: state for rank, state in heard.items() if state.taken < most}
    lost = [rank for rank, state in late.items() if (state.taken, state.backwards) != (most - 1, backwards)]
    if lost:
        return f"{named(lost)} failed before the end of a backward whose step other ranks have already taken.", ()
    unable = [rank for rank, state in late.items() if not state.can_step]
    if unable:
        return (
            f"other ranks have taken a step that {named(unable)} cannot repeat, because the optimizer is unknown there."
        ), ()
    return "", list(late)


def _come_to_rest(root: Unit, runtime: Runtime | None, ways: Sequence[Communicator]) -> None:
    """Discard the state of an interrupted forward or backward, while connections are closed and no message arrives."""
    for unit in units_in(root):
        for handle in unit.handles:
            if handle.phase is Phase.UNSHARDING:
                handle._pending = Pending("", (), lambda: blank(0))
    passes.path.forget(root.ranks)
    with after_closing():
        for way in ways:
            _repeat(way.settle)
            way.restart_tags()
        if runtime is not None:
            _repeat(runtime.reset_iteration)
            _repeat(runtime.release)


def _repeat(end: Callable[[], None]) -> None:
    """Call a function that releases resources until no incomplete collective raises an error."""
    for _ in range(_AT_MOST):
        with suppress(CollectiveError):
            end()
            break
