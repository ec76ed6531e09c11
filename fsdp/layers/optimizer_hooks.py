"""Hooks before and after the steps of all optimizers. They raise errors for otherwise silent mistakes.

An optimizer is fully examined (`optimizer_mistakes`) before the first step, and after changes of the parameters, the
optimizer state or the models. In other steps, the hooks only check properties that change between steps: gradients,
versions of shards, and options of groups.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp.distributed.communicator import uncompiled
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import times_taken
from fsdp.engine.runtime import Runtime, runtimes
from fsdp.engine.storage import ShardStorage
from fsdp.layers.exact_norm import over_all
from fsdp.layers.listed_shards import params_of, shards_among
from fsdp.layers.optimizer_mistakes import refuse, refuse_missing_gradients, refuse_mixed_gradients, warnings_of
from fsdp.layers.optimizer_states import refuse_shards_of_others, unchecked, watch_states

if TYPE_CHECKING:
    from fsdp.layers.steps import Part


@cache
def watch_optimizers() -> None:
    """Register hooks for the steps of all torch optimizers."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@dataclass
class _Examined:
    """The result of an optimizer's examination.

    Attributes:
        key: the identities of the optimizer's state (a load replaces it) and parameters, their dtypes, and the number
            of parameters that units had taken over.
        ours: the shards among the parameters, with their flat parameters.
        parts: the parts of models that the optimizer steps. Weak, because an optimizer must not keep a model alive.
        is_settled: all of the shards belong to models that were used before.
        brought: the flat parameters whose gradients may be on another device.
        on_disk: the shards on disk.
        has_stepped: the optimizer has taken a step.
    """

    key: list[Any]
    ours: list[tuple[Any, Any]]
    parts: list[weakref.ref[Part]]
    is_settled: bool
    brought: list[Any]
    on_disk: list[Any]
    has_stepped: bool = False


_PARAMS, _DTYPE = itemgetter("params"), attrgetter("dtype")
_examined: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Examined] = weakref.WeakKeyDictionary()


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 and callable(args[1]) else None)
    if closure is None:
        _prepare(optimizer)
        return None
    refuse_shards_of_others(optimizer, unchecked.get(optimizer))

    def then_prepare() -> Any:
        loss = closure()
        _prepare(optimizer)
        return _mean_over_ranks(optimizer, loss) if isinstance(optimizer, torch.optim.LBFGS) else loss

    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": then_prepare}
    return (*args[:1], then_prepare, *args[2:]), kwargs


def _mean_over_ranks(optimizer: torch.optim.Optimizer, loss: Any) -> Any:
    """Collective. Return the mean of the ranks' losses, which corresponds to the shards' gradients.

    A line search compares losses; with different losses, ranks would call the model different numbers of times.
    """
    part = next((reference() for reference in _examined[optimizer].parts), None)
    if part is None:
        return loss
    root = part.steps.root
    own = torch.as_tensor(loss, device=root.device).detach()
    total = over_all(root.everyone, own.clone(), "sum", f"the mean of the losses for {type(optimizer).__name__}")
    return total / math.prod(comm.world_size for comm in root.everyone)


def _prepare(optimizer: torch.optim.Optimizer) -> None:
    params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))  # `params_of`, inlined for speed
    key = [id(optimizer.state), *map(id, params), *map(_DTYPE, params), times_taken[0]]
    known = _examined.get(optimizer)
    is_current = known is not None and known.key == key and known.is_settled and optimizer not in unchecked
    parts: list[Part] = []
    for reference in known.parts if known is not None and is_current else ():
        part = reference()
        if part is None or getattr(part.steps.root.runtime, "steps", None) is not part.steps:
            is_current = False
            break
        parts.append(part)
    if known is None or not is_current:
        known, parts = _examine(optimizer, params, key)
    for part in parts:
        runtime: Any = part.steps.root.runtime
        if runtime.has_deferred:
            runtime.reduce_deferred()
    _check_gradients(optimizer, known.ours)
    for param in known.on_disk:
        what = f"{type(optimizer).__name__}.step() of a flat parameter with {param.owner._names[0]}"
        param.owner.shard_storage.check(what, optimizer.state.get(param, {}).values())
    for owner in known.brought:
        owner.bring_gradient()
    if isinstance(optimizer, torch.optim.Adafactor):  # it divides by the number of elements on this rank
        for param, _ in known.ours:
            if not param.numel():
                param.grad = None
    for part in parts:
        part.steps.begin(optimizer, part)


def _check_gradients(optimizer: torch.optim.Optimizer, ours: list[tuple[Any, Any]]) -> None:
    """Raise RuntimeError for gradients that a step would omit or cannot use."""
    has_gradient = not ours
    for param, owner in ours:
        if param.grad is not None:
            has_gradient = True
            if owner._has_unreduced:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): gradients that were accumulated under no_sync() are not "
                    "reduced over the ranks yet and would be ignored. Run the last backward of the step outside "
                    "no_sync(), or with fully_shard after set_requires_gradient_sync(True)."
                )
            if param.grad.dtype is not param.dtype:
                refuse_mixed_gradients(optimizer, param)
    if not has_gradient:
        refuse_missing_gradients(type(optimizer).__name__, ours)


def _examine(optimizer: torch.optim.Optimizer, params: list[Any], key: list[Any]) -> tuple[_Examined, list[Part]]:
    """Raise an error for an optimizer that cannot step its parameters; on the first call, warn of likely mistakes."""
    refuse_shards_of_others(optimizer, unchecked.pop(optimizer, None))
    ours = shards_among(params)
    refuse(optimizer, params, ours)
    before = _examined.get(optimizer)
    if before is None:
        for mistake in warnings_of(optimizer, params, ours):
            warnings.warn(mistake, stacklevel=5)
        watch_states(optimizer)
    owners = list({id(param.owner): param.owner for param in ours}.values())
    parts = [runtime.steps.part(optimizer, handles) for runtime, handles in _models_of(owners)]
    known = _examined[optimizer] = _Examined(
        key,
        [(param, param.owner) for param in ours],
        list(map(weakref.ref, parts)),
        sum(len(part.handles) for part in parts) == len(owners),
        [owner for owner in owners if type(owner.shard_storage) is not ShardStorage],
        [param for param in ours if param.owner.shard_storage.files is not None],
        before is not None and before.has_stepped,
    )
    return known, parts


def _models_of(owners: Iterable[Any]) -> Iterator[tuple[Runtime, list[FlatParamHandle]]]:
    """Yield the runtimes of the models that contain some of these shards, with the handles of the shards."""
    wanted = set(map(id, owners))
    for runtime in runtimes():
        if stepped := [handle for handle in runtime.handles if id(handle.flat_param) in wanted]:
            yield runtime, stepped


def state_of(param: torch.Tensor) -> dict[str, Any]:
    """Return the state of a shard in the optimizer that has stepped it; empty if there is none."""
    return next((each.state[param] for each, known in _stepping() if param in each.state), {})


def optimizers_of(handles: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have stepped some of the handles' shards."""
    shards = {handle.flat_param for handle in handles}
    return [each for each, _ in _stepping() if any(param.owner in shards for param in shards_among(params_of(each)))]


def _stepping() -> list[tuple[torch.optim.Optimizer, _Examined]]:
    return [(each, known) for each, known in list(_examined.items()) if known.has_stepped and known.ours]


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _examined.get(optimizer)
    if known is None or not known.ours:
        return
    known.has_stepped = True
    # Fused optimizers do not increment versions, which are required to detect stale unsharded parameters.
    increment_version([owner for param, owner in known.ours if param.grad is not None])
    for param in known.on_disk:
        param.owner.shard_storage.keep_state(optimizer.state.get(param, {}), param.shape)
    for files in {param.owner.shard_storage.files for param in known.on_disk} if known.on_disk else ():
        files.release()
    for reference in known.parts:
        part = reference()
        if part is not None:
            part.steps.end(optimizer, part)
            runtime: Any = part.steps.root.runtime
            if runtime.keeps_parameters:
                runtime.end_step(part.handles)
