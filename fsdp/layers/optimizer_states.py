"""The state dict of a torch optimizer for shards, with a signature of the rank's shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from fsdp.distributed.dtensor import held_part, is_dtensor, refuse_part_of_others
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.originals import is_ours
from fsdp.engine.runtime import runtimes
from fsdp.layers.listed_shards import name_of, params_of, shapes_in, shards_among

# The key of the signature in an optimizer's state dict, next to `state` and `param_groups`: pairs of a rank and a
# number of ranks. Version 0.1.0 wrote such a list into each group.
SHARDS_OF = "fsdp_shards_of"
Signature = list[list[int]]
# Signatures of loaded states. Before the first forward, this rank's shards are unknown, so the next step compares them.
unchecked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Signature] = weakref.WeakKeyDictionary()


def load_state_dict(torchs: Callable[..., None], self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state using `torchs`; raise an error for the state of an unsharded model or of another rank."""
    _refuse_state_functions(self)
    signature = signature_of(state_dict)
    refuse_shards_of_others(self, signature)
    by_mesh: dict[int, tuple[str, Any]] = {}  # the first value on each mesh, which alone contains a rank's coordinates
    for each in state_dict.get("state", {}).values():
        for key, value in each.items() if isinstance(each, Mapping) else ():
            if is_dtensor(value):
                by_mesh.setdefault(id(value.device_mesh), (key, value))
    for key, value in by_mesh.values():
        refuse_part_of_others(f"{key!r} of the state for this {type(self).__name__}", value)
    if not signature:
        _refuse_unsharded_state(self, state_dict)
    groups = state_dict.get("param_groups", ())
    if any(SHARDS_OF in group for group in groups):  # torch would copy the key into the optimizer's groups
        groups = [{key: value for key, value in group.items() if key != SHARDS_OF} for group in groups]
        state_dict = {**state_dict, "param_groups": groups}
    torchs(self, state_dict)
    if shards_among(params_of(self)):
        watch_states(self)
    expect_shards_of(self, signature)
    _become_dtensors(self)


def watch_states(optimizer: torch.optim.Optimizer) -> None:
    # Optimizers that wrap another one without calling torch's constructor define their own state dict.
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if hooks is not None and _check_state not in hooks.values():
        optimizer.register_state_dict_post_hook(_check_state)


def _check_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    _refuse_state_functions(optimizer)
    sign(state_dict, params_of(optimizer))


def _refuse_state_functions(optimizer: torch.optim.Optimizer) -> None:
    """Raise NotImplementedError if torch's `get_optimizer_state_dict` or a similar function uses an optimizer's state.

    These functions assume that the state of each rank's shards, in ordinary tensors, is the same on all ranks.
    """
    if is_called_from("torch.distributed.checkpoint.state_dict"):
        for param in shards_among(params_of(optimizer)):
            if param.owner._is_sharded and not is_dtensor(param):
                raise NotImplementedError(
                    "torch.distributed.checkpoint's functions for optimizer state do not support the shards of "
                    f"{name_of(param)}, and would save those of one rank only. Use fsdp.save(path, model, optimizer) "
                    "and fsdp.load; or shard the model with fsdp.fully_shard, whose parameters are DTensors."
                )


def sign(state_dict: dict[str, Any], params: Iterable[Any]) -> None:
    """Add the signature to an optimizer's state dict, if other ranks have different shards of its parameters."""
    own = _shards_in(params)
    if any(world_size > 1 for _, world_size in own):
        state_dict[SHARDS_OF] = own


def signature_of(state_dict: Mapping[str, Any]) -> Signature:
    """Return the signature of an optimizer's state dict; empty if it was unknown when the state dict was created."""
    found = [state_dict, *state_dict.get("param_groups", ())]
    return sorted({tuple(shards): list(shards) for each in found for shards in each.get(SHARDS_OF, ())}.values())


def expect_shards_of(optimizer: torch.optim.Optimizer, signature: Signature) -> None:
    """Record the signature of an optimizer's loaded state, for a comparison in the next step."""
    unchecked[optimizer] = signature


def refuse_shards_of_others(optimizer: torch.optim.Optimizer, signature: Signature | None) -> None:
    """Raise RuntimeError if a state belongs to different shards than this rank's, if both are known."""
    own = _shards_in(params_of(optimizer)) if signature else []
    if own and own != signature:
        theirs, ours = (" and ".join(f"{rank} of {size}" for rank, size in each) for each in (signature or [], own))
        raise RuntimeError(
            f"the state loaded into this {type(optimizer).__name__} is for the shards of rank {theirs}, but this rank "
            f"has those of rank {ours}: optimizer.state_dict() contains one rank's shards only. Load on every rank the "
            "state that this rank saved; or save the full state with fsdp.save or "
            "fsdp.optim_utils.full_optim_state_dict, and load it with fsdp.load or load_full_optim_state_dict."
        )


def _shards_in(params: Iterable[Any]) -> Signature:
    """Return pairs of rank and number of ranks for shards of parameters, without `DTensor`s; empty if unknown."""
    ours = {id(param.owner) for param in shards_among(params) if not is_dtensor(param)}
    handles = (handle for runtime in runtimes() for handle in runtime.handles) if ours else ()
    comms = (handle.comm for handle in handles if id(handle.flat_param) in ours)
    return sorted([list(each) for each in {(comm.rank, comm.world_size) for comm in comms}])


def _refuse_unsharded_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError for state of unsharded parameters; torch would assign it to shards, or fail without remedy."""
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
                problem = f"its {key!r} of {name_of(param)} has the shape of the whole parameter, {tuple(value.shape)}"
    if problem:
        remedy = (
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with full_state_dict=True"
            if is_dtensor(spread[0])
            else "fsdp.optim_utils.load_full_optim_state_dict(model, optimizer, full)"
        )
        raise ValueError(
            f"{type(optimizer).__name__}.load_state_dict: this optimizer has the state of this rank's shards, but the "
            f"given state does not fit: {problem}. If it is the state of the unsharded model, convert its numbers to "
            "names with fsdp.optim_utils.rekey_optim_state_dict(state, plain_model, 'names'), and load the result with "
            f"{remedy} (docs/optimizers.md)."
        )


def _is_of_unsharded(value: Any, param: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not is_ours(param) or not param.owner._is_sharded:
        return False
    if is_dtensor(param):
        return not is_dtensor(value) and value.shape == param.shape
    return value.shape != param.shape and value.shape in shapes_in(param)


# The keys of state in torch's optimizers that has a single value for each parameter. Other 0-d state of a 0-d parameter
# has a value for each element.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def is_number(
    key: str, found: Sequence[int], shape: Sequence[int], has_elements: Mapping[str, bool] | None = None
) -> bool:
    """Return whether a tensor of shape `found` in an optimizer's state is a single value for a parameter or shard.

    For a 0-d parameter, the `shape` is not sufficient; `has_elements` then contains by key whether the state of other
    parameters has a value for each element.
    """
    return not found and (len(shape) > 0 or not (has_elements or {}).get(key, key not in _NUMBERS))


def keys_with_elements(states: Iterable[tuple[torch.Size, Mapping[str, Any]]]) -> dict[str, bool]:
    """Return by key whether the state of parameters that are not 0-d has a value for each element."""
    found: dict[str, bool] = {}
    for shape, state in states:
        if shape:
            for key, value in state.items():
                found[key] = found.get(key, False) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    return found


def _become_dtensors(optimizer: torch.optim.Optimizer) -> None:
    """Convert plain tensors in the state of 0-d `DTensor`s to `DTensor`s.

    `torch.distributed.checkpoint.state_dict` shards a full state by its shapes, and does not convert 0-d tensors.
    """
    single = [param for param in shards_among(params_of(optimizer)) if is_dtensor(param) and not param.dim()]
    states = ((param.shape, state) for param, state in optimizer.state.items())
    has_elements = keys_with_elements(states) if single else {}
    for param in single:
        for key, value in optimizer.state.get(param, {}).items():
            is_plain = isinstance(value, torch.Tensor) and not is_dtensor(value)
            if is_plain and not value.dim() and not is_number(key, value.shape, param.shape, has_elements):
                made = optimizer.state[param][key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
                held_part(made).copy_(value)
