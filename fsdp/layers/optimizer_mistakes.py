"""Errors and warnings for optimizers that cannot train their parameters, or not as the user expects.

`fsdp.layers.optimizer_hooks` defines when an optimizer is examined.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fsdp.distributed.communicator import some_of
from fsdp.distributed.dtensor import is_dtensor
from fsdp.engine.call_stack import frames_from
from fsdp.engine.originals import is_ours, taken_by
from fsdp.engine.runtime import runtimes
from fsdp.layers.listed_shards import is_spread, name_of, names_in, shapes_in, shards_among


def refuse(optimizer: torch.optim.Optimizer, params: list[Any], ours: list[Any]) -> None:
    """Raise RuntimeError for an optimizer that cannot step its parameters `params`, with the shards `ours`."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(is_spread(param) for param in ours):
        raise RuntimeError(  # line searches would differ between ranks, with different numbers of calls of the model
            "LBFGS needs inner products over all parameters, but would compute them over this rank's shards. Use an "
            "elementwise optimizer (Adam, AdamW, SGD, ...)."
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" and any(is_dtensor(p) or is_spread(p) for p in ours):
        raise RuntimeError(
            "ZeroRedundancyOptimizer steps each parameter on one rank and sends it to ranks with different shards. Use "
            "its optimizer_class directly: that optimizer's state is sharded like the parameters."
        )
    _refuse_what_dtensors_lack(optimizer, ours)
    _refuse_original_parameters(optimizer, params)
    if ours:
        _refuse_lonely_scaler(ours)
    _refuse_mixed_state(optimizer, ours)


def _refuse_lonely_scaler(ours: Iterable[Any]) -> None:
    """Raise RuntimeError for a step of torch's gradient scaler, which only checks this rank's shards.

    If a single rank skips a step, it would continue with different weights, without an error.
    """
    step = torch.amp.GradScaler.step.__code__
    frames = (frame for frame in frames_from(sys._getframe(2)) if frame.f_code is step)
    scaler = next((frame.f_locals.get("self") for frame in frames), None)
    decides_alone = scaler is not None and scaler.is_enabled() and not getattr(scaler, "agrees_over_ranks", False)
    if decides_alone and any(map(is_spread, ours)):
        raise RuntimeError(
            f"{type(scaler).__module__}.{type(scaler).__name__} looks for infinities in this rank's shards only: ranks "
            "would skip different steps. Use fsdp.ShardedGradScaler, which takes the same arguments."
        )


def _refuse_what_dtensors_lack(optimizer: torch.optim.Optimizer, ours: list[Any]) -> None:
    """Raise RuntimeError for an optimizer with an operation that `DTensor` does not support (seen in torch 2.13)."""
    rows = [param for param in ours if is_dtensor(param)]
    if not rows:
        return
    uneven = next((param for param in rows if _is_uneven(param)), None)
    optim, problem = torch.optim, ""
    if isinstance(optimizer, (optim.SGD, optim.Adagrad)) and any(
        group.get("fused") for group in optimizer.param_groups
    ):
        problem = "with fused=True has no implementation for DTensors: omit fused=True"
    elif isinstance(optimizer, optim.Rprop):
        problem = (
            "selects elements by masks, which DTensors do not support: let fsdp.OwnedOptimizer step each rank's rows, "
            'with {"optimizer": torch.optim.Rprop, "sharded": True}'
        )
    elif type(optimizer).__name__ == "Adafactor":  # of torch and of transformers
        problem = (
            f"combines rows and columns in place, which DTensors such as {name_of(rows[0])} do not support: use "
            "fsdp.OwnedOptimizer, which steps whole parameters"
        )
    elif isinstance(optimizer, optim.Muon) and (few := next(filter(None, map(_fewer_rows_than_ranks, rows)), None)):
        problem = (
            f"steps matrices in place, which DTensors such as {few}, do not support: use fsdp.OwnedOptimizer, which "
            "steps whole parameters"
        )
    elif isinstance(optimizer, optim.LBFGS) and uneven is not None:
        problem = (
            "concatenates parameters, which fails for DTensors with different numbers of rows on the ranks, such as "
            f"{name_of(uneven)}: use an elementwise optimizer (Adam, AdamW, SGD, ...)"
        )
    elif not isinstance(optimizer, optim.SGD) and type(optimizer).__module__.startswith("torch.optim"):
        lost = next((each for each in rows if each.is_complex() and _is_lost_as_real(each)), None)
        if lost is not None:
            problem = (
                f"steps complex numbers as pairs of real ones, and writes to those of the DTensor {name_of(lost)} are "
                "lost, because ranks have different numbers of its elements: use FullyShardedDataParallel, or a real "
                "parameter (torch.view_as_complex in the forward)"
            )
    if problem:
        raise RuntimeError(f"{type(optimizer).__name__} {problem}.")


def _fewer_rows_than_ranks(param: Any) -> str:
    """Describe a parameter with fewer rows than ranks, for which torch uses all rows on each rank; else ""."""
    for number, placement in enumerate(param.placements):
        rows, ranks = param.shape[placement.dim] if placement.is_shard() else math.inf, param.device_mesh.size(number)
        if rows < ranks:
            return f"{name_of(param)}, of {rows} row{'s' * (rows > 1)} on {ranks} ranks"
    return ""


def _is_lost_as_real(param: Any) -> bool:
    return param.dim() == 0 or (param.dim() == 1 and _is_uneven(param))


def _is_uneven(param: Any) -> bool:
    return any(
        placement.is_shard() and param.shape[placement.dim] % param.device_mesh.size(number)
        for number, placement in enumerate(param.placements)
    )


def refuse_missing_gradients(optimizer: str, ours: list[tuple[Any, Any]]) -> None:
    """Raise RuntimeError if an optimizer steps shards that have never had a gradient, although a forward was run.

    After the first backward, a step without gradients is allowed, and has no effect.
    """
    shards = {owner for param, owner in ours if param.requires_grad}
    for runtime in runtimes():
        if runtime.has_trained is False and any(one.flat_param in shards for one in runtime.handles):
            raise RuntimeError(
                f"{optimizer}.step(): no parameter of {runtime.root.name} has received a gradient since its first use. "
                "Its parameters() are shards, which torch.autograd.grad() does not find in the graph. Call backward(), "
                "which also accepts them as inputs."
            )


def _refuse_original_parameters(optimizer: torch.optim.Optimizer, params: list[Any]) -> None:
    names = [taken_by(param) for param in params]
    stale = [name for name in names if name is not None]
    if stale:
        raise RuntimeError(
            f"this {type(optimizer).__name__} was created before the model was sharded, or while it was unsharded: it "
            f"has parameters that get no gradients ({some_of(stale)}). Create it after sharding and between steps "
            "(after the next forward, if parameters were assigned), from the model's parameters(); or pass it to "
            "reshard_optimizer() of the outermost FullyShardedDataParallel (not available under fully_shard)."
        )


# Class names of optimizers that use a parameter's rows and columns, or its norm or mean.
_OF_UNSHARDED_PARAMETERS = re.compile(
    "adafactor|muon|shampoo|soap|lamb(?!da)|lars|adam_?mini|novograd|sm3|kron|galore|^(a2grad|adalite|adamp|adatam|aida|"
    "alice|amos|came|conda|dash|emofact|fromage|gravity|mars|nero|racs|ranger|rose|scion(light)?|sgdp|sgdsai|splus|"
    "stableadamw|stablespam|tam)$",
    re.IGNORECASE,
)
# Class names of optimizers that do not support any division of parameters among ranks, with the reason.
_OF_MORE = {
    re.compile("prodigy|dadapt", re.IGNORECASE): (
        "estimates its step size from all parameters, but gets this rank's shards only: step sizes would differ "
        "between ranks"
    ),
    re.compile("^(adagc|adai|adams|avagrad|trac)$", re.IGNORECASE): (
        "computes means or norms over all parameters, but gets this rank's shards only: these would differ between "
        "ranks"
    ),
    re.compile("^([agw]|friendly|look)?sam$", re.IGNORECASE): (
        "divides by the norm of all gradients, but gets this rank's shards only: ranks would compute different norms, "
        "except with the DTensors of fully_shard"
    ),
    re.compile("orthograd", re.IGNORECASE): (
        "projects gradients with whole parameters, but gets this rank's shards only"
    ),
    re.compile("lora_?rite", re.IGNORECASE): (
        "steps pairs of parameters together, but a rank may have only one of a pair"
    ),
    re.compile("sophiah|adahessian", re.IGNORECASE): "needs second derivatives, but reduced gradients have no graph",
}


def impossible(kind: str) -> str:
    """Return the reason if an optimizer class with this name cannot train sharded parameters; else ""."""
    return next((reason for names, reason in _OF_MORE.items() if names.search(kind)), "")


def warnings_of(optimizer: torch.optim.Optimizer, params: list[Any], ours: list[Any]) -> Iterator[str]:
    """Yield warnings of an optimizer's behavior that the user probably does not expect."""
    kind = type(optimizer).__name__
    flat = [p for p in ours if not is_dtensor(p) and (p.shape,) != p.owner._shapes]  # with a different shape
    if flat and _OF_UNSHARDED_PARAMETERS.search(kind):
        yield (
            f"{kind} needs the rows, columns or norms of whole parameters, but gets flat shards, such as that with "
            f"{flat[0].owner._names[0]}: its steps differ from those without sharding, and saving its state may fail. "
            "Use fsdp.OwnedOptimizer, which steps whole parameters; use an elementwise optimizer (Adam, AdamW, SGD, "
            "...); or pass these parameters as ignored_parameters, and sum their gradients over the ranks yourself."
        )
    # prodigyopt's and dadaptation's classes sum their estimates over all ranks if this option is set.
    adds_up = all(group.get("fsdp_in_use") for group in optimizer.param_groups)
    if any({"rho", "adaptive"} <= group.keys() for group in optimizer.param_groups):
        kind = "SAM"  # hooks only see the steps of its inner optimizer, which has its groups
    if (reason := impossible(kind)) and not adds_up and any(map(is_spread, ours)):
        yield (
            f"{kind} {reason}. fsdp.OwnedOptimizer does not help. Use another optimizer, or train without sharding "
            "(docs/optimizers.md has a table)."
        )
    if names := _names_of_mixed_group(optimizer):
        yield (
            f"a group of this {kind} has no sharded parameters, and another group has all of them, matrices and "
            f"vectors ({some_of(names, 3)}): shards are 1-D, and a flat parameter contains many parameters, so rules "
            "such as `param.ndim >= 2`, or names, do not distinguish them. Wrap with use_orig_params=True and group by "
            "names, or by `len(param.unsharded_shape)`; or wrap with group_by, and group by `param.group`."
        )
    one_of_each = {id(param.owner): param for param in ours}.values()  # a parameter of each shard
    if not any(is_dtensor(param) or is_spread(param) for param in one_of_each):
        return
    apart = [p for p in params if p.grad is not None and not is_ours(p) and not is_dtensor(p)]
    if apart:
        ignored = {id(param) for runtime in runtimes() for param in runtime.root.module.parameters()}
        apart = [param for param in apart if id(param) not in ignored]
    if apart:  # the outermost module was forgotten
        shapes = some_of([list(param.shape) for param in apart], 3)
        yield (
            f"this {kind} steps sharded parameters, and {len(apart)} that are not (of shapes {shapes}): the gradients "
            "of these are not averaged over the ranks, so each rank trains different values. Shard the outermost "
            "module as well, or ignore these parameters if you average their gradients yourself."
        )


def _names_of_mixed_group(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names in a group with shards of both matrices and biases, because all shards are 1-D.

    Then the group for matrices is empty, or has weight decay for unsharded parameters only, and the group for biases
    contains all shards. A rule by names has the same result with flat parameters.
    """
    for of_shards in optimizer.param_groups:
        params = of_shards["params"]
        shapes = [shape for param in shards_among(params) for shape in shapes_in(param)]
        if any(param.ndim >= 2 for param in params) or len({len(shape) >= 2 for shape in shapes}) < 2:
            continue
        for other in optimizer.param_groups:
            is_empty = not other["params"] and _options(other) != _options(of_shards)
            decays = other.get("weight_decay", 0) > of_shards.get("weight_decay", 0)
            if is_empty or (other["params"] and decays and all(param.ndim >= 2 for param in other["params"])):
                return [name for param in shards_among(params) for name in names_in(param)]
    return []


def _options(group: dict[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key != "params"})


def _takes_other_dtypes(optimizer: torch.optim.Optimizer) -> bool:
    takes_them = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults.get("fused")
    return takes_them or not type(optimizer).__module__.startswith("torch.optim")


def refuse_mixed_gradients(optimizer: torch.optim.Optimizer, param: Any) -> None:
    """Raise RuntimeError if torch's optimizer would fail on a gradient of another dtype, without naming it."""
    if not _takes_other_dtypes(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__} requires gradients in the parameters' own dtype, {param.dtype}, but "
            f"keep_low_precision_grads=True or the parameters' grad_dtype keeps them in {param.grad.dtype}. Omit this "
            "setting, or use an optimizer that supports both dtypes, such as torch's SGD (not fused)."
        )


def _refuse_mixed_state(optimizer: torch.optim.Optimizer, ours: list[Any]) -> None:
    """Raise RuntimeError if torch's optimizer would fail on state of another dtype, without naming it."""
    for param in () if _takes_other_dtypes(optimizer) else ours:
        moment = optimizer.state[param].get("exp_avg") if param in optimizer.state else None
        if moment is not None and moment.dtype != param.dtype:
            raise RuntimeError(
                f"{type(optimizer).__name__}: its state 'exp_avg' of {name_of(param)} is {moment.dtype}, but the "
                f"parameter is {param.dtype}, as after a cast of the model. Create a new optimizer from its "
                "parameters()."
            )
