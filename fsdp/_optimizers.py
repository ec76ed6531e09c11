"""What has to happen around an optimizer's step, and mistakes that would otherwise pass in silence.

torch calls hooks before and after every step of its optimizers. Before a step, gradients join their parameters, and
what cannot be stepped is refused; after it, what an optimizer made for shards on disk goes there too. Around a load
torch has hooks of single optimizers only, so `load_state_dict` of all is another function from the first wrapping on.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp._collect import is_ours, taken_by
from fsdp._dtensors import is_dtensor, is_on_many_ranks
from fsdp._flat_param import PieceParameter
from fsdp._offload import DiskHome


@cache
def watch_optimizers() -> None:
    """Accompany every torch optimizer at its steps, and when it loads a state, from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    torch.optim.Optimizer.load_state_dict = _loading(torch.optim.Optimizer.load_state_dict)  # type: ignore[method-assign]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """A closure makes the gradients in the middle of the step: then is the time to look at them."""
    closure = kwargs.get("closure") or next((each for each in args[1:2] if callable(each)), None)
    if closure is None:
        _prepare(optimizer)
        return None

    def then_prepare() -> Any:
        loss = closure()
        _prepare(optimizer)
        return loss

    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": then_prepare}
    return (*args[:1], then_prepare, *args[2:]), kwargs


def _prepare(optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ours = _ours(params)
    for param in ours:
        if param.owner._has_unreduced and param.grad is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): gradients that were accumulated under no_sync() are not reduced "
                "over the ranks yet and would be left out. Run the last backward of the step outside no_sync()."
            )
    if any(_is_spread(param) for param in ours):
        _refuse_lonely_scaler(optimizer)
        _refuse_products(optimizer)
    _refuse_original_parameters(optimizer, params)
    _warn_of_whole_parameters(optimizer, ours)
    _refuse_mixed_dtypes(optimizer, ours)
    for param in ours:
        what = f"{type(optimizer).__name__}.step() of a flat parameter with {param.owner._names[0]}"
        param.owner.home.check(what, optimizer.state.get(param, {}).values())
        param.owner.bring_gradient()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ours = _ours(params)
    # Fused optimizers write without torch counting it, and by that count we know that gathered parameters are stale.
    increment_version([param.owner for param in ours if param.grad is not None])
    on_disk = [param for param in ours if isinstance(param.owner.home, DiskHome)]
    for param in on_disk:
        param.owner.home.keep_state(optimizer.state.get(param, {}), param.numel())
    for files in {param.owner.home.files for param in on_disk}:
        files.release()


def _ours(params: Iterable[Any]) -> list[Any]:
    """Those that are shards, or pieces of shards."""
    return [p for p in params if is_ours(p) and p.owner._is_managed]


def _is_spread(param: Any) -> bool:
    """Whether other ranks have other parts of a parameter, and torch does not know."""
    return not is_dtensor(param) and (param.owner._is_sharded or is_on_many_ranks(param.owner.parts))


def _refuse_original_parameters(optimizer: torch.optim.Optimizer, params: list[Any]) -> None:
    names = [taken_by(param) for param in params]
    stale = [name for name in names if name is not None]
    if stale:
        listing = ", ".join(stale[:5]) + (f" and {len(stale) - 5} more" if len(stale) > 5 else "")
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was wrapped: it holds original parameters that "
            f"get no gradients any more ({listing}). Hand it over with reshard_optimizer(optimizer) of the outermost "
            "FullyShardedDataParallel, or make it after wrapping, from the wrapped model's parameters()."
        )


# Optimizers that look at a parameter's rows and columns, or at its norm, by their classes' names.
_OF_WHOLE_PARAMETERS = re.compile("adafactor|muon|shampoo|lamb(?!da)|lars", re.IGNORECASE)
_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _warn_of_whole_parameters(optimizer: torch.optim.Optimizer, ours: list[Any]) -> None:
    """Warn once of an optimizer that cannot do on flat shards what it does on whole parameters."""
    if ours and optimizer not in _warned and _OF_WHOLE_PARAMETERS.search(type(optimizer).__name__):
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} goes by the rows, columns or norms of whole parameters, and gets flat shards, "
            f"as that with {ours[0].owner._names[0]}: it does not train as without sharding, and its state may not be "
            "saved whole. Use an optimizer that works element by element (Adam, AdamW, SGD, ...), or leave the "
            "parameters that it needs whole with ignored_parameters, summing their gradients over the ranks yourself.",
            stacklevel=4,
        )


def _refuse_products(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if ranks would search along other lines each, and call the model another number of times."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RuntimeError(
            "LBFGS goes by products over all parameters, and would take them over this rank's shards. Use an optimizer "
            "that works element by element (Adam, AdamW, SGD, ...)."
        )


def _refuse_mixed_dtypes(optimizer: torch.optim.Optimizer, ours: list[Any]) -> None:
    """Raise RuntimeError if torch's optimizer would fail on gradients or state of other dtypes, naming neither."""
    takes_them = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults.get("fused")
    if takes_them or not type(optimizer).__module__.startswith("torch.optim"):
        return
    for param in ours:
        if param.grad is not None and param.grad.dtype != param.dtype:
            raise RuntimeError(
                f"{type(optimizer).__name__} takes gradients in the parameters' own dtype, {param.dtype}, and "
                f"keep_low_precision_grads=True keeps them in {param.grad.dtype}. Leave it out, or use an optimizer "
                "that widens gradients: torch's SGD (not fused), or one of your own."
            )
        moment = optimizer.state[param].get("exp_avg") if param in optimizer.state else None
        if moment is not None and moment.dtype != param.dtype:
            raise RuntimeError(
                f"{type(optimizer).__name__}: its state 'exp_avg' of {_name_of(param)} is {moment.dtype}, and the "
                f"parameter {param.dtype}, as after a cast of the model. Make a new optimizer from its parameters()."
            )


def _name_of(param: Any) -> str:
    """The name of a parameter of ours, or of the first of those in a flat one."""
    return str(getattr(param, "fqn", None) or f"the flat parameter with {param.owner._names[0]}")


# Loading


def _loading(load: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's `load_state_dict` that refuses the state of the unsharded model's."""

    @wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        _refuse_whole_state(self, state_dict)
        load(self, state_dict)

    return load_state_dict


def _refuse_whole_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError for state of whole parameters, which torch would give to shards, or refuse without a remedy."""
    own = [group["params"] for group in optimizer.param_groups]
    spread = [param for param in _ours(chain.from_iterable(own)) if param.owner._is_sharded]
    if not spread:
        return
    saved = [group["params"] for group in state_dict["param_groups"]]
    problem = ""
    if len(saved) == len(own) and list(map(len, saved)) != list(map(len, own)):
        problem = f"it has {sum(map(len, saved))} parameters, and the optimizer {sum(map(len, own))}"
    for number, param in zip(chain.from_iterable(saved), chain.from_iterable(own), strict=False):
        for key, value in {} if problem else state_dict["state"].get(number, {}).items():
            if _is_of_whole(value, param):
                problem = f"its {key!r} of {_name_of(param)} has the shape of the whole parameter, {tuple(value.shape)}"
    if problem:
        remedy = (
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with full_state_dict=True"
            if is_dtensor(spread[0])
            else "fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, full)"
        )
        raise ValueError(
            f"{type(optimizer).__name__}.load_state_dict: this rank has its part of the state only, and this state is "
            f"another optimizer's: {problem}. If it is that of the unsharded model, give it names by "
            f"fsdp.optim_utils.rekey_optim_state_dict(state, plain_model, 'names'), and load that by {remedy} "
            "(docs/optimizer_state.md)."
        )


def _is_of_whole(value: Any, param: Any) -> bool:
    """Whether something in a state is of a whole parameter, of which this rank has a part."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not is_ours(param) or not param.owner._is_sharded:
        return False
    if is_dtensor(param):
        return not is_dtensor(value) and value.shape == param.shape
    whole = [param.whole_shape] if isinstance(param, PieceParameter) else param.owner._shapes
    return value.shape != param.shape and value.shape in whole


# How many calls may lie between a scaler's step and our hook: torch's own have four.
_CALLS_TO_A_SCALER = 12


def _refuse_lonely_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if the step is called by a scaler that decides on this rank alone whether to skip it.

    A scaler leaves no trace on an optimizer, and on a rank that skips there is no step at all; so this looks at who
    calls. A rank that skipped alone would train on with other weights than the rest, silently.
    """
    frame = sys._getframe(1)
    for _ in range(_CALLS_TO_A_SCALER):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            if scaler.is_enabled() and not getattr(scaler, "agrees_over_ranks", False):
                for left in ("grad_scale", "found_inf"):  # on a fused optimizer, which would use them in its next step
                    optimizer.__dict__.pop(left, None)
                raise RuntimeError(
                    f"{type(scaler).__module__}.{type(scaler).__name__} looks for infinities in this rank's shards "
                    "only: ranks would skip different steps. Use fsdp.ShardedGradScaler, which takes the same "
                    "arguments."
                )
            return
