"""Recovery: after an exception on any rank, all come back to the weights of the last step, and train on.

The rank that has caught an exception tells the others, which wait for it in some collective: they give their waits up,
raise an error, and come here as well. gloo closes connections when a wait is given up, so process groups are connected
anew. What a rank has done of the step that was interrupted is dropped. Where others have ended the step that failed on
this rank, it is taken here too: nobody could take it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from fsdp.distributed.collectives import Pending
from fsdp.distributed.communicator import CollectiveError, backend_names, behind, communicators_among, own_rank
from fsdp.distributed.consensus import done_by_all, peers_answer
from fsdp.distributed.messages import blank, renew
from fsdp.distributed.roll_call import named
from fsdp.distributed.watchdog import meet
from fsdp.engine.handle import Phase
from fsdp.engine.optimizer_hooks import optimizers_of
from fsdp.engine.runtime import Runtime, runtimes

_CALL = "fsdp.recover()"
_AT_MOST = 100_000  # things that a rank has to let go of


def recover(model: nn.Module) -> bool:
    """Collective, each rank in its own time. Go on after an exception on any rank, from the weights of the last step.

    ::

        for batch in batches:
            while True:
                try:
                    train(batch)  # forward, backward, optimizer.step(), optimizer.zero_grad()
                except Exception:
                    if fsdp.recover(model):
                        continue  # with the same batch
                break  # and go on with the next one

    Call it on the rank that has caught an exception, and on the others, which raise a `CollectiveError` when it does.
    Unsharded parameters and all gradients of the model are dropped. Process groups are connected anew: those that the
    model uses, and all others on gloo among its ranks that fsdp knows; so your own collectives on them work again. A
    step that some ranks have taken, because it failed on others before anything was written, is taken on these too.

    Not undone are buffers (statistics of batch norm), states of random generators, schedulers and scalers.

    Args:
        model: a sharded model that has been used.

    Returns:
        True on ranks that were a step ahead: they have not used the batch that they were interrupted in, and have to
        run it again, now with the others.

    Raises:
        RuntimeError: on every rank, if the last step cannot be completed on one that has begun to write, or has lost
            its gradients. All ranks are idle then, and can load a checkpoint. Besides if a rank is gone, if groups are
            not on gloo, or inside of a forward, a backward, or `fsdp.join`.
        ValueError: if nothing in `model` is sharded, or was used yet.
    """
    modules = {module: number for number, module in enumerate(model.modules())}
    found = [runtime for runtime in runtimes() if runtime.root.modules[0] in modules]
    if not found:
        raise ValueError(f"{_CALL}: nothing in this {type(model).__name__} is sharded and was used: start again")
    found.sort(key=lambda runtime: modules[runtime.root.modules[0]])
    were_ahead = [_recover(runtime) for runtime in found]
    return any(were_ahead)


class _State(NamedTuple):
    """The steps of a rank, as the ranks tell each other.

    Attributes:
        taken: so many.
        backwards: so many have ended, the last of them before the next step.
        can_step: it knows the optimizer to take a step with, which has not begun to write.
        problem: why its weights are not those of the last step; empty if they are.
    """

    taken: int
    backwards: int
    can_step: bool
    problem: str


def _recover(runtime: Runtime) -> bool:
    if runtime.participation.is_joining:
        raise RuntimeError(f"{_CALL} inside fsdp.join: call it after the context, on every rank")
    if runtime.is_computing:
        raise RuntimeError(f"{_CALL} in the middle of a forward or backward of {runtime.root.name}: call it after them")
    root, steps = runtime.root, runtime.usage.steps
    groups = {behind(one.group) for one in communicators_among(root.ranks)}
    for group in groups:
        if backend_names(group).get("cpu") != "gloo":
            raise RuntimeError(f"{_CALL} is for process groups on gloo, got {backend_names(group)}: start again")
    optimizer = _optimizer_to_step(runtime)
    own = _State(steps.taken, steps.backwards, optimizer is not None, steps.problem)
    heard = {own_rank(): own}
    is_spread = len(root.ranks) > 1 and peers_answer(root.everyone)
    if is_spread:
        heard = {rank: _State(*state) for rank, state in meet(sorted(root.ranks), _reason(), own).items()}
    _come_to_rest(runtime)
    for group in sorted(groups, key=attrgetter("group_name")) if is_spread else ():
        renew(group)
    try:
        problem, behind_ranks = _missing_steps(heard)
        if problem:
            raise RuntimeError(f"rank {own_rank()}: {_CALL}: {problem} Load the last checkpoint, on every rank.")
        is_behind = own_rank() in behind_ranks
        if behind_ranks:
            done_by_all([root.everyone], "complete its last step", lambda: _step(optimizer if is_behind else None))
    finally:
        for handle in runtime.handles:
            handle.zero_grad()
        runtime.forget()  # the next forward begins with orders of units and journals that are alike on all ranks
    return bool(behind_ranks) and not is_behind


def _reason() -> str:
    error = sys.exc_info()[1]
    cause = "" if error is None else f", after {type(error).__name__}{': ' * bool(str(error))}{str(error)[:300]}"
    return f"rank {own_rank()} has called {_CALL}{cause}. Call it on every rank, or end them all"


def _optimizer_to_step(runtime: Runtime) -> torch.optim.Optimizer | None:
    """Return the optimizer whose step was interrupted, or the only one of a model."""
    steps = runtime.usage.steps
    if steps.interrupted is not None:
        return steps.interrupted
    known = optimizers_of(runtime.handles)
    return known[0] if len(known) == 1 else None


def _missing_steps(heard: Mapping[int, _State]) -> tuple[str, Sequence[int]]:
    """Return why ranks cannot come to the same weights, if they can't, and those that have to take a step yet."""
    for problem in filter(None, (state.problem for state in heard.values())):
        return f"{named(rank for rank, state in heard.items() if state.problem == problem)} {problem}.", ()
    most = max(state.taken for state in heard.values())
    backwards = max(state.backwards for state in heard.values())
    late = {rank: state for rank, state in heard.items() if state.taken < most}
    lost = [rank for rank, state in late.items() if (state.taken, state.backwards) != (most - 1, backwards)]
    if lost:
        return f"{named(lost)} failed before the gradients were there that others have taken a step with already.", ()
    unable = [rank for rank, state in late.items() if not state.can_step]
    if unable:
        return f"others have taken a step that {named(unable)} cannot repeat, not knowing with which optimizer.", ()
    return "", list(late)


def _step(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()


def _come_to_rest(runtime: Runtime) -> None:
    """Drop all that a forward or backward has left, where connections are closed and nothing arrives any more."""
    for handle in runtime.handles:
        if handle.phase is Phase.UNSHARDING:
            handle._pending = Pending("", (), lambda: blank(0))
    for one in communicators_among(runtime.root.ranks):
        _repeat(one.settle)
    _repeat(runtime.reset_iteration)
    _repeat(runtime.release)


def _repeat(end: Callable[[], None]) -> None:
    """Call what lets go of one thing after the other, and raises an error for each that did not complete."""
    for _ in range(_AT_MOST):
        with suppress(CollectiveError):
            end()
            break
