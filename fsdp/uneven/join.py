"""Ranks without further batches take part in the collectives of other ranks (`fsdp.join`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp.distributed.communicator import uncompiled
from fsdp.distributed.consensus import agree_on, from_everyone
from fsdp.engine.runtime import Runtime, runtime_of_root
from fsdp.engine.trees import map_tensors
from fsdp.layers.grad_clipping import clip_grad_norm, clip_grad_value
from fsdp.layers.verify import require_sharded
from fsdp.uneven.messages import Kind, Message, float_of
from fsdp.uneven.regions import END, visits_of

_MODEL = -1  # stands for the model, where messages contain the number of an optimizer


@contextmanager
def join(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    after_step: Callable[[torch.optim.Optimizer], None] | None = None,
) -> Iterator[Joining]:
    """Collective. Train with different numbers of batches on the ranks: finished ranks still take part in collectives.

    ::

        with fsdp.join(model, optimizer):
            for batch in batches:  # 3 on one rank, 8 on another
                loss(model(batch)).backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

    After its last batch, a rank waits at the end of the context. Until all loops have ended, this rank joins the other
    ranks' all-gathers and contributes zero gradients. The rank also clips, steps and zeroes its shards with the
    other ranks, using their learning rates.

    Gradients are sums over ranks, divided by the number of *all* ranks. Like in `DistributedDataParallel.join` by
    default, a batch therefore has the same weight whether other ranks still have batches or not. For the mean over the
    ranks with a batch, multiply the loss by ``dist.get_world_size() / joined.running_ranks``, where ``joined`` is the
    value of the context manager.

    Other collective functions are not supported inside: `summon_full_params`, state dicts and similar functions raise
    an error, and user collectives would wait forever. Buffers of finished ranks (batch norm statistics) do not change.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        optimizers: all optimizers of the model's parameters, in the same order on every rank; also as a list, as in
            `fsdp.save`.
        after_step: an optional function that finished ranks call with the optimizer after each step, for example to
            update learning rate schedulers and averages, as the loop does on other ranks.

    Yields:
        An object with ``running_ranks``, the number of ranks that took part in the last forward with a batch.

    Raises:
        RuntimeError: on an inner unit, in a forward, backward or another `join`, or if ranks pass different optimizers.
        TypeError: if `model` is not sharded by this library.
        ValueError: without an optimizer.
        NotImplementedError: for PARTIAL gradients, and inside for `ShardedGradScaler` and for steps with a closure.
    """
    root = require_sharded(model, "fsdp.join")
    listed: list[Any] = []
    for given in optimizers:
        listed += given if isinstance(given, (list, tuple)) else [given]
    if not listed:
        raise ValueError("fsdp.join: pass the optimizer, because ranks that have finished run its steps as well")
    runtime = runtime_of_root(root, "fsdp.join")
    runtime.ensure_idle("begin fsdp.join")
    if deferring := next((unit.name for unit in runtime.units if unit.placements.defers_reduction), None):
        raise NotImplementedError(
            f"fsdp.join: {deferring} has PARTIAL gradients, which the step reduces, but ranks that have finished have "
            "no gradients. Use SHARD_OPTIM_GRADS, whose backwards reduce them."
        )
    kinds = ", ".join(type(each).__name__ for each in listed)
    agree_on(runtime.root.everyone, "optimizers in fsdp.join", kinds)
    joining = Joining(runtime, model, listed, after_step)
    try:
        joining.begin()
        yield joining
        joining.serve()
    finally:
        joining.end()


class Joining:
    """The state of `fsdp.join` between the first and the last batch of any rank.

    While all ranks have batches, they only exchange this fact, once during each forward. As soon as a rank is out of
    batches, the other ranks announce operations that change gradients or shards, and finished ranks perform the same
    operations.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        after_step: Callable[[torch.optim.Optimizer], None] | None,
    ) -> None:
        self._runtime, self._model, self._optimizers = runtime, model, optimizers
        self._visits = visits_of(runtime)
        self._after_step = after_step
        self._undo: list[Callable[[], None]] = []

    @property
    def running_ranks(self) -> int:
        """The number of ranks that took part in the last forward with a batch; 0 before the first."""
        return self._visits.running_ranks

    def begin(self) -> None:
        """Announce this rank's operations from now on, until `end`."""
        self._runtime.checks.trust_values(self._runtime.root)
        self._visits.joining, self._visits.running_ranks = self.perform, 0
        self._visits.has_after_step = self._after_step is not None
        for number, optimizer in enumerate(self._optimizers):
            first: Any = optimizer.register_step_pre_hook(_refuse_closure)
            first.hooks_dict_ref().move_to_end(first.id, last=False)  # before the hook of parking, which adds a closure
            self._undo.append(first.remove)
            hook = optimizer.register_step_pre_hook(partial(self._before_step, number))
            self._undo.append(hook.remove)
            self._announce_before(optimizer, number)
        self._announce_before(self._model, _MODEL)

    def end(self) -> None:
        """Undo `begin`, after the last batch of all ranks or after an exception."""
        for undo in self._undo:
            undo()
        self._visits.end_join()

    def serve(self) -> None:
        """Collective. After the last batch of this rank, take part in operations of other ranks until all finish."""
        visits = self._visits
        visits.is_finished = True
        while True:
            rows, event = visits.round(Message(Kind.FINISHED))
            waiting = [row for row in rows if row.kind == Kind.WAIT]
            if event is not None:
                visits.perform(event, rows)
            elif not waiting:
                return
            elif all(row.subject == END for row in waiting):
                visits.end_followed_backward()

    @uncompiled
    def _before_step(self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._visits.tell(Message(Kind.STEP, number)):
            self._share_options(_options(optimizer))

    def _announce_before(self, owner: Any, number: int) -> None:
        original = owner.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if self._visits.joining == self.perform:
                self._visits.tell(Message(Kind.ZERO_GRAD, number, int(set_to_none)))
            original(set_to_none)

        def undo() -> None:
            if owner.__dict__.get("zero_grad") is zero_grad:
                del owner.__dict__["zero_grad"]

        if "zero_grad" not in owner.__dict__:
            owner.__dict__["zero_grad"] = zero_grad
            self._undo.append(undo)

    def _share_options(self, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Collective. Return the options of the ranks that step; finished ranks pass an empty list."""
        given = [found for found in from_everyone(self._visits.talk.comms, own) if found]
        if any(_differ(other, given[0]) for other in given[1:]):
            raise RuntimeError(
                "fsdp.join: the ranks step with different options (for example learning rates), which ranks that have "
                "finished cannot know. Set the same options of the optimizer on all ranks."
            )
        return given[0]

    def perform(self, event: Message) -> None:
        if event.kind == Kind.CLIP_NORM:
            numbers = float_of(event.argument), float_of(event.extra)
            clip_grad_norm(self._runtime, *numbers, error_if_nonfinite=bool(event.subject))
        elif event.kind == Kind.CLIP_VALUE:
            clip_grad_value(self._runtime, float_of(event.argument))
        elif event.kind == Kind.ZERO_GRAD:
            owner: Any = self._model if event.subject == _MODEL else self._optimizers[event.subject]
            owner.zero_grad(set_to_none=bool(event.argument))
        elif event.kind == Kind.STEP:
            optimizer = self._optimizers[event.subject]
            for group, options in zip(optimizer.param_groups, self._share_options([]), strict=True):
                group.update({name: _taken(group.get(name), value) for name, value in options.items()})
            optimizer.step()
            if self._after_step is not None:
                self._after_step(optimizer)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, with numbers instead of tensors, so that ranks can compare them."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return map_tensors(lambda tensor: tensor.tolist(), options)


def _differ(one: Any, other: Any) -> bool:
    if pickle.dumps(one) == pickle.dumps(other):  # NaN, arrays and objects of users have no other equality
        return False
    try:
        return bool(one != other)
    except ValueError:  # of arrays with different values
        return True


def _taken(own: Any, given: Any) -> Any:
    """Return another rank's value of an option; update this rank's tensors in place, as schedulers may use them."""
    if isinstance(own, tuple) and isinstance(given, tuple) and len(own) == len(given):
        return tuple(map(_taken, own, given))
    return own.copy_(torch.as_tensor(given, device=own.device)) if isinstance(own, torch.Tensor) else given


def _refuse_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise NotImplementedError(
            "fsdp.join: optimizer.step(closure) runs additional forwards, which ranks that have finished do not "
            "join. Call backward first, and then step() without a closure."
        )
