"""The hooks before and after the steps of all optimizers: mistakes that would pass in silence are errors there.

Before an optimizer's first step, and whenever its parameters, its state or the models have changed since, everything is
examined that can be wrong with it (`_examined`). In any other step the hooks look only at what a step can change: the
gradients, the versions of the shards, and the options of the groups.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp.distributed.communicator import uncompiled
from fsdp.distributed.dtensor import held_part, is_dtensor, is_on_many_ranks
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import is_ours, taken_by, times_taken
from fsdp.engine.runtime import Runtime, runtimes
from fsdp.engine.storage import ShardStorage

if TYPE_CHECKING:
    from fsdp.layers.steps import Part


@cache
def watch_optimizers() -> None:
    """Accompany the steps of every torch optimizer from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@dataclass
class _Examined:
    """An optimizer as it was examined.

    Attributes:
        key: the identities of its state, which a load replaces, and of its parameters, their dtypes, and the number of
            parameters that were taken over by then.
        ours: those that are shards, with the flat parameters that they belong to.
        parts: what the models that have these note of the optimizer; weakly, because an optimizer keeps no model alive.
        is_settled: all of the shards belong to models that have been used.
        brought: the flat parameters whose gradients may be kept elsewhere.
        on_disk: the shards that are on disk.
        has_stepped: it has taken a step.
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
    refuse_shards_of_others(optimizer, _unchecked.pop(optimizer, None))

    def then_prepare() -> Any:
        loss = closure()
        _prepare(optimizer)
        return loss

    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": then_prepare}
    return (*args[:1], then_prepare, *args[2:]), kwargs


def _prepare(optimizer: torch.optim.Optimizer) -> None:
    params = _listed(optimizer)
    key = [id(optimizer.state), *map(id, params), *map(_DTYPE, params), times_taken[0]]
    known = _examined.get(optimizer)
    is_current = known is not None and known.key == key and known.is_settled
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
    has_gradient = not known.ours
    for param, owner in known.ours:
        if param.grad is not None:
            has_gradient = True
            if owner._has_unreduced:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): gradients that were accumulated under no_sync() are not "
                    "reduced over the ranks yet and would be left out. Run the last backward of the step outside "
                    "no_sync()."
                )
            if param.grad.dtype is not param.dtype:
                _refuse_mixed_gradients(optimizer, param)
    if not has_gradient:
        _refuse_missing_gradients(type(optimizer).__name__, known.ours)
    for param in known.on_disk:
        what = f"{type(optimizer).__name__}.step() of a flat parameter with {param.owner._names[0]}"
        param.owner.shard_storage.check(what, optimizer.state.get(param, {}).values())
    for owner in known.brought:
        owner.bring_gradient()
    if isinstance(optimizer, torch.optim.Adafactor):  # which divides by the number of elements on this rank
        for param, _ in known.ours:
            if not param.numel():
                param.grad = None
    for part in parts:
        part.steps.begin(optimizer, part)


def _examine(optimizer: torch.optim.Optimizer, params: list[Any], key: list[Any]) -> tuple[_Examined, list[Part]]:
    """Raise an error for an optimizer that cannot step what it has been given, and warn, once, of what looks wrong."""
    refuse_shards_of_others(optimizer, _unchecked.pop(optimizer, None))
    ours = shards_among(params)
    if isinstance(optimizer, torch.optim.LBFGS) and any(_is_spread(param) for param in ours):
        raise RuntimeError(  # ranks would search along other lines each, and call the model another number of times
            "LBFGS goes by products over all parameters, and would take them over this rank's shards. Use an optimizer "
            "that works element by element (Adam, AdamW, SGD, ...)."
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" and any(is_dtensor(p) or _is_spread(p) for p in ours):
        raise RuntimeError(
            "ZeroRedundancyOptimizer steps each parameter on one rank and sends it to the others, which have other "
            "shards. Use the optimizer that it was given as optimizer_class: its state is sharded like the parameters."
        )
    _refuse_what_dtensors_lack(optimizer, ours)
    _refuse_original_parameters(optimizer, params)
    if ours:
        _refuse_lonely_scaler(ours)
    before = _examined.get(optimizer)
    if optimizer not in _seen:
        _seen.add(optimizer)
        for mistake in _mistakes(optimizer, params, ours):
            warnings.warn(mistake, stacklevel=5)
        _watch_states(optimizer)
    _refuse_mixed_state(optimizer, ours)
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
    """Yield the runtimes of the models that have some of these shards, with the handles of the shards."""
    wanted = set(map(id, owners))
    for runtime in runtimes():
        if stepped := [handle for handle in runtime.handles if id(handle.flat_param) in wanted]:
            yield runtime, stepped


def state_of(param: torch.Tensor) -> dict[str, Any]:
    """Return what the optimizer that has stepped a shard has of it; empty if none has."""
    return next((each.state[param] for each, known in _stepping() if param in each.state), {})


def optimizers_of(handles: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return those that have stepped some of a model's shards."""
    shards = {handle.flat_param for handle in handles}
    return [each for each, _ in _stepping() if any(param.owner in shards for param in shards_among(_listed(each)))]


def _stepping() -> list[tuple[torch.optim.Optimizer, _Examined]]:
    return [(each, known) for each, known in list(_examined.items()) if known.has_stepped and known.ours]


def _listed(optimizer: torch.optim.Optimizer) -> list[Any]:
    return list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _examined.get(optimizer)
    if known is None or not known.ours:
        return
    known.has_stepped = True
    # Fused optimizers write without torch counting it, and by that count we know that gathered parameters are stale.
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


def shards_among(params: Iterable[Any]) -> list[Any]:
    """Return the parameters of which other ranks may have other shards."""
    return [p for p in params if is_ours(p) and p.owner._is_managed]


def _refuse_lonely_scaler(ours: Iterable[Any]) -> None:
    """Raise RuntimeError for a step that torch's gradient scaler takes: it looks at this rank's shards only.

    A rank that decides alone to skip a step would train on with other weights than the rest, silently.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    scaler = None if frame is None else frame.f_locals.get("self")
    decides_alone = scaler is not None and scaler.is_enabled() and not getattr(scaler, "agrees_over_ranks", False)
    if decides_alone and any(map(_is_spread, ours)):
        raise RuntimeError(
            f"{type(scaler).__module__}.{type(scaler).__name__} looks for infinities in this rank's shards only: ranks "
            "would skip different steps. Use fsdp.ShardedGradScaler, which takes the same arguments."
        )


def _is_spread(param: Any) -> bool:
    """Return whether other ranks have other shards of a parameter, and torch does not know."""
    return not is_dtensor(param) and (param.owner._is_sharded or is_on_many_ranks(param.owner.parts))


def _refuse_what_dtensors_lack(optimizer: torch.optim.Optimizer, ours: list[Any]) -> None:
    """Raise RuntimeError for an optimizer whose step needs an operation that `DTensor`s lack (seen in torch 2.13)."""
    rows = [param for param in ours if is_dtensor(param)]
    if not rows:
        return
    uneven = next((param for param in rows if _is_uneven(param)), None)
    optim, problem = torch.optim, ""
    if isinstance(optimizer, (optim.SGD, optim.Adagrad)) and any(
        group.get("fused") for group in optimizer.param_groups
    ):
        problem = "with fused=True has no implementation for DTensors: leave out fused=True"
    elif isinstance(optimizer, optim.Rprop):
        problem = (
            "selects elements by masks, which DTensors do not support: let fsdp.OwnedOptimizer step each rank's rows, "
            'with {"optimizer": torch.optim.Rprop, "sharded": True}'
        )
    elif type(optimizer).__name__ == "Adafactor":  # torch's, and that of transformers
        problem = (
            f"combines rows and columns in place, which DTensors such as {_name_of(rows[0])} do not support: let it "
            "step whole parameters by owners, with fsdp.OwnedOptimizer"
        )
    elif isinstance(optimizer, optim.Muon) and (few := next(filter(None, map(_fewer_rows_than_ranks, rows)), None)):
        problem = (
            f"steps matrices in place, which DTensors such as {few}, do not support: let it step whole parameters by "
            "owners, with fsdp.OwnedOptimizer"
        )
    elif isinstance(optimizer, optim.LBFGS) and uneven is not None:
        problem = (
            f"joins parameters in one vector, and DTensors with other numbers of rows on other ranks, such as "
            f"{_name_of(uneven)}, cannot be: use an optimizer that works element by element (Adam, AdamW, SGD, ...)"
        )
    elif not isinstance(optimizer, optim.SGD) and type(optimizer).__module__.startswith("torch.optim"):
        lost = next((each for each in rows if each.is_complex() and each.dim() <= 1 and _is_lost_as_real(each)), None)
        if lost is not None:
            problem = (
                f"steps complex numbers as pairs of real ones, and DTensors lose what is written to those of "
                f"{_name_of(lost)}, since ranks have different numbers of its elements: use FullyShardedDataParallel, "
                "or hold it as a real parameter (torch.view_as_complex in the forward)"
            )
    if problem:
        raise RuntimeError(f"{type(optimizer).__name__} {problem}.")


def _fewer_rows_than_ranks(param: Any) -> str:
    """Describe a parameter whose rows are fewer than the ranks; torch computes with all rows on each rank then."""
    for number, placement in enumerate(param.placements):
        rows, ranks = param.shape[placement.dim] if placement.is_shard() else math.inf, param.device_mesh.size(number)
        if rows < ranks:
            return f"{_name_of(param)}, of {rows} row{'s' * (rows > 1)} on {ranks} ranks"
    return ""


def _is_lost_as_real(param: Any) -> bool:
    return param.dim() == 0 or _is_uneven(param)


def _is_uneven(param: Any) -> bool:
    return any(
        placement.is_shard() and param.shape[placement.dim] % param.device_mesh.size(number)
        for number, placement in enumerate(param.placements)
    )


def _refuse_missing_gradients(optimizer: str, ours: list[tuple[Any, Any]]) -> None:
    """Raise RuntimeError if an optimizer is to step shards that have never had a gradient, though a forward was run.

    After a first backward, a step without gradients is allowed, and changes nothing.
    """
    shards = {owner for param, owner in ours if param.requires_grad}
    for runtime in runtimes():
        if runtime.has_trained is False and any(one.flat_param in shards for one in runtime.handles):
            raise RuntimeError(
                f"{optimizer}.step(): nothing in {runtime.root.name} has got a gradient since it was first used. What "
                "it lists are shards, which torch.autograd.grad() doesn't find in the graph. Call backward(), which "
                "takes them as its inputs as well."
            )


def _refuse_original_parameters(optimizer: torch.optim.Optimizer, params: list[Any]) -> None:
    names = [taken_by(param) for param in params]
    stale = [name for name in names if name is not None]
    if stale:
        listing = ", ".join(stale[:5]) + (f" and {len(stale) - 5} more" if len(stale) > 5 else "")
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was sharded, or while it was unsharded: it "
            f"holds parameters that get no gradients ({listing}). Make it after sharding and between steps, from the "
            "model's parameters(); or hand it over with the method reshard_optimizer of the outermost "
            "FullyShardedDataParallel."
        )


# Optimizers that look at a parameter's rows and columns, or at its norm or mean, by their classes' names.
_OF_UNSHARDED_PARAMETERS = re.compile(
    "adafactor|muon|shampoo|soap|lamb(?!da)|lars|adam_?mini|novograd|sm3|kron|galore|^(a2grad|adalite|adamp|adatam|aida|"
    "alice|amos|came|conda|dash|emofact|fromage|gravity|mars|nero|racs|ranger|rose|scion(light)?|sgdp|sgdsai|splus|"
    "stableadamw|stablespam|tam)$",
    re.IGNORECASE,
)
# Optimizers that cannot work with any division of parameters among ranks, with the reason.
_OF_MORE = {
    re.compile("prodigy|dadapt", re.IGNORECASE): "estimates the size of its steps from all parameters together, and "
    "sees what this rank has of them: ranks take steps of different sizes",
    re.compile("^(adagc|adai|adams|avagrad|trac)$", re.IGNORECASE): "takes means or norms over all parameters "
    "together, and sees what this rank has of them: ranks compute different ones",
    re.compile("^([agw]|friendly|look)?sam$", re.IGNORECASE): "divides by the norm of all gradients together, and sees "
    "what this rank has of them: ranks compute different norms, except of the DTensors of fully_shard",
    re.compile("orthograd", re.IGNORECASE): "projects gradients by whole parameters, and sees this rank's shards",
    re.compile("lora_?rite", re.IGNORECASE): "steps pairs of parameters together, and a rank may have one of a pair",
    re.compile("sophiah|adahessian", re.IGNORECASE): "takes second derivatives, and reduced gradients have no graph",
}
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that have stepped


def impossible(kind: str) -> str:
    """Return why an optimizer of a class of this name cannot train what is sharded; empty if it can."""
    return next((reason for names, reason in _OF_MORE.items() if names.search(kind)), "")


def _mistakes(optimizer: torch.optim.Optimizer, params: list[Any], ours: list[Any]) -> Iterator[str]:
    """Yield what an optimizer is not likely to do as the user expects."""
    kind = type(optimizer).__name__
    flat = [p for p in ours if not is_dtensor(p) and (p.shape,) != p.owner._shapes]  # others are seen as they were
    if flat and _OF_UNSHARDED_PARAMETERS.search(kind):
        yield (
            f"{kind} goes by the rows, columns or norms of whole parameters, and gets flat shards, as that with "
            f"{flat[0].owner._names[0]}: it does not train as without sharding, and its state may not be saved whole. "
            "Have it step whole parameters by owners, with fsdp.OwnedOptimizer; use an optimizer that works element by "
            "element (Adam, AdamW, SGD, ...); or leave the parameters that it needs whole with ignored_parameters, "
            "summing their gradients over the ranks yourself."
        )
    # prodigyopt's and dadaptation's classes add up their estimates over all ranks if they are told to.
    adds_up = all(group.get("fsdp_in_use") for group in optimizer.param_groups)
    if any({"rho", "adaptive"} <= group.keys() for group in optimizer.param_groups):
        kind = "SAM"  # its inner optimizer has its groups, and is all that is seen of first_step() and second_step()
    if (reason := impossible(kind)) and not adds_up and any(map(_is_spread, ours)):
        yield (
            f"{kind} {reason}. fsdp.OwnedOptimizer does not help. Use another optimizer, or train without sharding "
            "(docs/optimizers.md has a table)."
        )
    if names := _names_of_mixed_group(optimizer):
        yield (
            f"a group of this {kind} has no sharded parameters, and another one has all, matrices and vectors alike "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): shards are 1-D, and a flat parameter is "
            "many in one, so rules like `param.ndim >= 2`, or by name, do not tell them apart. Wrap with "
            "use_orig_params=True and make groups by names, or by `len(param.unsharded_shape)`; or wrap with group_by, "
            "and make groups by `param.group`."
        )
    if not any(is_dtensor(param) or _is_spread(param) for param in ours):
        return
    apart = [p for p in params if p.grad is not None and not is_ours(p) and not is_dtensor(p)]
    if apart:
        ignored = {id(param) for runtime in runtimes() for param in runtime.root.module.parameters()}
        apart = [param for param in apart if id(param) not in ignored]
    if apart:  # the outermost module was forgotten
        shapes = ", ".join([*(str(list(param.shape)) for param in apart[:3]), *(["..."] if apart[3:] else [])])
        yield (
            f"this {kind} steps sharded parameters, and {len(apart)} that are not (of shapes {shapes}): nobody "
            "averages their gradients over the ranks, so each rank trains its own. Shard the outermost module as well, "
            "with these ignored if you average them yourself."
        )


def _names_of_mixed_group(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names in a group by a rule that took shards of matrices and of biases for the same, both being 1-D.

    The group for matrices is empty then, or decays nothing but parameters that are not sharded; that for biases has all
    the shards. A rule by names does the same with flat parameters, whose names say nothing.
    """
    for of_shards in optimizer.param_groups:
        params = of_shards["params"]
        shapes = [shape for param in shards_among(params) for shape in _shapes_in(param)]
        if any(param.ndim >= 2 for param in params) or len({len(shape) >= 2 for shape in shapes}) < 2:
            continue
        for other in optimizer.param_groups:
            is_empty = not other["params"] and _options(other) != _options(of_shards)
            decays = other.get("weight_decay", 0) > of_shards.get("weight_decay", 0)
            if is_empty or (other["params"] and decays and all(param.ndim >= 2 for param in other["params"])):
                return [name for param in shards_among(params) for name in _names_in(param)]
    return []


def _options(group: dict[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key != "params"})


def _shapes_in(param: Any) -> tuple[torch.Size, ...]:
    return param._shapes if param is param.owner else (param.unsharded_shape,)


def _names_in(param: Any) -> tuple[str, ...]:
    return param._names if param is param.owner else (param.fqn,)


def _takes_other_dtypes(optimizer: torch.optim.Optimizer) -> bool:
    takes_them = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults.get("fused")
    return takes_them or not type(optimizer).__module__.startswith("torch.optim")


def _refuse_mixed_gradients(optimizer: torch.optim.Optimizer, param: Any) -> None:
    """Raise RuntimeError if torch's optimizer would fail on a gradient of another dtype, without a name."""
    if not _takes_other_dtypes(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__} takes gradients in the parameters' own dtype, {param.dtype}, and "
            f"keep_low_precision_grads=True or the parameters' grad_dtype keeps them in {param.grad.dtype}. Leave it "
            "out, or use an optimizer that takes both: torch's SGD (not fused), or one of your own."
        )


def _refuse_mixed_state(optimizer: torch.optim.Optimizer, ours: list[Any]) -> None:
    """Raise RuntimeError if torch's optimizer would fail on state of another dtype, without a name."""
    for param in () if _takes_other_dtypes(optimizer) else ours:
        moment = optimizer.state[param].get("exp_avg") if param in optimizer.state else None
        if moment is not None and moment.dtype != param.dtype:
            raise RuntimeError(
                f"{type(optimizer).__name__}: its state 'exp_avg' of {_name_of(param)} is {moment.dtype}, and the "
                f"parameter {param.dtype}, as after a cast of the model. Make a new optimizer from its parameters()."
            )


def _name_of(param: Any) -> str:
    """Return the name of a parameter of ours, or of the first of those in a flat one."""
    return str(getattr(param, "fqn", None) or f"the flat parameter with {param.owner._names[0]}")


# An optimizer's state dict contains under this key, beside `state` and `param_groups`, which ranks' shards it is of, as
# pairs of a rank and a number of ranks. Version 0.1.0 wrote such a list into each group.
SHARDS_OF = "fsdp_shards_of"

Signature = list[list[int]]
# Signatures of loaded states. Before the first forward no runtime knows this rank's shards: the next step compares.
_unchecked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Signature] = weakref.WeakKeyDictionary()


def load_state_dict(torchs: Callable[..., None], self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state as `torchs` does, but refuse that of the unsharded model and of other ranks."""
    _refuse_state_functions(self)
    signature = signature_of(state_dict)
    refuse_shards_of_others(self, signature)
    if not signature:
        _refuse_unsharded_state(self, state_dict)
    groups = state_dict.get("param_groups", ())
    if any(SHARDS_OF in group for group in groups):  # torch would copy the key into the optimizer's groups
        groups = [{key: value for key, value in group.items() if key != SHARDS_OF} for group in groups]
        state_dict = {**state_dict, "param_groups": groups}
    torchs(self, state_dict)
    if shards_among(_listed(self)):
        _watch_states(self)
    if self in _examined:
        _examined[self].key = []
    expect_shards_of(self, signature)
    _become_dtensors(self)


def _watch_states(optimizer: torch.optim.Optimizer) -> None:
    # An optimizer around another one, whose constructor does not call torch's, has a state dict of its own.
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if hooks is not None and _check_state not in hooks.values():
        optimizer.register_state_dict_post_hook(_check_state)


def _check_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    _refuse_state_functions(optimizer)
    sign(state_dict, _listed(optimizer))


def _refuse_state_functions(optimizer: torch.optim.Optimizer) -> None:
    """Raise NotImplementedError if torch's `get_optimizer_state_dict` or a similar function uses an optimizer's state.

    These functions take the shards of each rank, which are ordinary tensors, for the same values on all ranks.
    """
    if is_called_from("torch.distributed.checkpoint.state_dict"):
        for param in shards_among(_listed(optimizer)):
            if param.owner._is_sharded and not is_dtensor(param):
                raise NotImplementedError(
                    "torch.distributed.checkpoint's functions for optimizer state do not know the shards of "
                    f"{_name_of(param)}, and would keep those of one rank. Use fsdp.save(path, model, optimizer) and "
                    "fsdp.load; or shard the model by fsdp.fully_shard, whose parameters are DTensors."
                )


def sign(state_dict: dict[str, Any], params: Iterable[Any]) -> None:
    """Add to an optimizer's state dict whose shards it is of, if other ranks have other shards of its parameters."""
    own = _shards_in(params)
    if any(world_size > 1 for _, world_size in own):
        state_dict[SHARDS_OF] = own


def signature_of(state_dict: Mapping[str, Any]) -> Signature:
    """Return whose shards an optimizer's state dict is of; empty if that was not known when it was made."""
    found = [state_dict, *state_dict.get("param_groups", ())]
    return sorted({tuple(shards): list(shards) for each in found for shards in each.get(SHARDS_OF, ())}.values())


def expect_shards_of(optimizer: torch.optim.Optimizer, signature: Signature) -> None:
    """Note whose shards the loaded state of an optimizer is of, for the next step."""
    _unchecked[optimizer] = signature


def refuse_shards_of_others(optimizer: torch.optim.Optimizer, signature: Signature | None) -> None:
    """Raise RuntimeError if a state is of other shards than this rank's, as far as both are known."""
    own = _shards_in(_listed(optimizer)) if signature else []
    if own and own != signature:
        theirs, ours = (" and ".join(f"{rank} of {size}" for rank, size in each) for each in (signature or [], own))
        raise RuntimeError(
            f"the state loaded into this {type(optimizer).__name__} is of the shards of rank {theirs}, and this "
            f"rank has those of rank {ours}: optimizer.state_dict() has this rank's shards only. Have every rank load "
            "what it has saved itself; or save the whole state, with fsdp.save or "
            "fsdp.optim_utils.full_optim_state_dict, and load it with fsdp.load or load_full_optim_state_dict."
        )


def _shards_in(params: Iterable[Any]) -> Signature:
    """Return the ranks' shards, of how many, of parameters; nothing while that is not known, or torch knows."""
    ours = {id(param.owner) for param in shards_among(params) if not is_dtensor(param)}
    handles = (handle for runtime in runtimes() for handle in runtime.handles) if ours else ()
    comms = (handle.comm for handle in handles if id(handle.flat_param) in ours)
    return sorted([list(each) for each in {(comm.rank, comm.world_size) for comm in comms}])


def _refuse_unsharded_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError for state of unsharded parameters, which torch would give to shards or refuse without remedy."""
    own = [group["params"] for group in optimizer.param_groups]
    spread = [param for param in shards_among(chain.from_iterable(own)) if param.owner._is_sharded]
    if not spread:
        return
    saved = [group["params"] for group in state_dict["param_groups"]]
    problem = ""
    if len(saved) == len(own) and list(map(len, saved)) != list(map(len, own)):
        problem = f"it has {sum(map(len, saved))} parameters, and the optimizer {sum(map(len, own))}"
    for number, param in zip(chain.from_iterable(saved), chain.from_iterable(own), strict=False):
        for key, value in {} if problem else state_dict["state"].get(number, {}).items():
            if _is_of_unsharded(value, param):
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
            "(docs/optimizers.md)."
        )


def _is_of_unsharded(value: Any, param: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not is_ours(param) or not param.owner._is_sharded:
        return False
    if is_dtensor(param):
        return not is_dtensor(value) and value.shape == param.shape
    return value.shape != param.shape and value.shape in _shapes_in(param)


# By these keys, torch's optimizers keep what is about a parameter as such; any other 0-d state of a 0-d parameter is
# the value for its one element.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def is_number(
    key: str, found: Sequence[int], shape: Sequence[int], has_elements: Mapping[str, bool] | None = None
) -> bool:
    """Return whether a tensor of shape `found` in an optimizer's state is about a parameter (or shard) as such.

    A 0-d parameter tells nothing by its `shape`; by key, `has_elements` says whether others have a value for each
    element.
    """
    return not found and (len(shape) > 0 or not (has_elements or {}).get(key, key not in _NUMBERS))


def keys_with_elements(states: Iterable[tuple[torch.Size, Mapping[str, Any]]]) -> dict[str, bool]:
    """Return by key whether parameters with these shapes and states, of those not 0-d, have values for each element."""
    found: dict[str, bool] = {}
    for shape, state in states:
        if shape:
            for key, value in state.items():
                found[key] = found.get(key, False) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    return found


def _become_dtensors(optimizer: torch.optim.Optimizer) -> None:
    """Make `DTensor`s of plain tensors in the state of `DTensor`s without dimensions.

    `torch.distributed.checkpoint.state_dict` shards a full state by its shapes, and leaves 0-d tensors as they are.
    """
    single = [param for param in shards_among(_listed(optimizer)) if is_dtensor(param) and not param.dim()]
    states = ((param.shape, state) for param, state in optimizer.state.items())
    has_elements = keys_with_elements(states) if single else {}
    for param in single:
        for key, value in optimizer.state.get(param, {}).items():
            is_plain = isinstance(value, torch.Tensor) and not is_dtensor(value)
            if is_plain and not value.dim() and not is_number(key, value.shape, param.shape, has_elements):
                made = optimizer.state[param][key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
                held_part(made).copy_(value)
