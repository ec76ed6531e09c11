"""The torch functions to be replaced when the first model is wrapped. `REPLACED` lists all of them.

Changes of `fully_shard` to `DTensor` are in `dtensor_params`, `counted_data` and `distributed.gathered_part`.

Each function receives tensors that a model lists, or the state of an optimizer for them. The original function would
treat this rank's shards as whole parameters, so a plain training loop would be wrong without an error. The replacements
look for shards among their arguments, and compute the same result for shards as for the unsharded parameters. They also
replace torch's behavior for `DTensor`s (`fully_shard`): torch would use unnamed collectives, and fails for multiple
meshes and, with the infinity norm, on ranks without rows.

With the environment variable FSDP_TORCH_FUNCTIONS=0, no function is replaced.

The clipping functions stay the same objects, because programs import them by name. torch's decorator stores the called
function in a closure cell, whose content is replaced.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils import clip_grad

from fsdp.distributed.communicator import during, some_of, uncompiled
from fsdp.distributed.dtensor import MeshPart, is_dtensor, local_part, memory_of, settled_gradient
from fsdp.distributed.switches import TORCH_FUNCTIONS, check_switches, is_off
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import is_ours, owner_of, taken_over
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.runtime import Runtime, reduce_deferred, runtimes
from fsdp.layers.grad_clipping import (
    Owned,
    clip_by_norm,
    norm_over_ranks,
    require_reduced,
    scale_to,
    unsharded_parameters,
)
from fsdp.layers.listed_shards import shards_among
from fsdp.layers.optimizer_states import load_state_dict

Tensors = Tensor | Iterable[Tensor]

_NAMED = 5  # parameters in one message


@uncompiled  # finding shards iterates over all models of the process
def _clip_grad_norm(
    torchs: Callable[..., Tensor],
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    params = _listed(parameters)
    _refuse_left_out(params)
    reduce_deferred(param.owner for param in params if is_ours(param))
    models = _models_of(params, "clip_grad_norm_")
    if models is None:
        return torchs(params or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    max_norm, norm_type = float(max_norm), float(norm_type)
    if (whole := models.whole) is not None:
        return models.shown(clip_by_norm(whole, max_norm, norm_type, error_if_nonfinite))
    models.prepare()
    models.announce_clip_norm(max_norm, norm_type, error_if_nonfinite)
    grads = ((settled_gradient(param), param) for param in params)
    owned = [(grad, param) for grad, param in grads if grad is not None]
    norm = models.norm(owned, norm_type, max_norm)
    scale_to([grad for grad, _ in owned], norm, max_norm, error_if_nonfinite)
    return models.shown(norm)


@uncompiled
def _get_total_norm(
    torchs: Callable[..., Tensor],
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    owned = _with_parameters(_listed(tensors))
    models = _models_of([param for _, param in owned], "get_total_norm", of_values=True)
    if models is None:
        return torchs([tensor for tensor, _ in owned], norm_type, error_if_nonfinite, foreach)
    models.prepare()
    norm = models.norm([(_local_value(tensor, param), param) for tensor, param in owned], float(norm_type))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"get_total_norm: the norm (of order {norm_type}) over all ranks is {norm.item()}")
    return models.shown(norm)


class Models:
    """The sharded models of a function's arguments; `handles` are by ids of flat parameters."""

    def __init__(
        self, params: Sequence[Any], function: str, handles: Mapping[int, tuple[Runtime, FlatParamHandle]]
    ) -> None:
        self._params, self._function = params, function
        found = [handles[id(param.owner)] for param in params if is_ours(param) and id(param.owner) in handles]
        self._runtimes = list(dict.fromkeys(runtime for runtime, _ in found))
        self._handles = dict.fromkeys(handle for _, handle in found)

    @property
    def whole(self) -> Runtime | None:
        """The only model, if the arguments are distinct parameters of it, with all that need or have gradients."""
        given = {id(param) for param in self._params}
        if len(self._runtimes) != 1 or len(given) < len(self._params):
            return None
        runtime = self._runtimes[0]
        own = [*_parameters(runtime), *unsharded_parameters(runtime.units)]
        needed = {id(param) for param in own if param.requires_grad or param.grad is not None}
        return runtime if needed <= given <= {id(param) for param in own} else None

    def prepare(self) -> None:
        """Move gradients to the device of their parameters, and raise RuntimeError if that is impossible."""
        for runtime in self._runtimes:
            if runtime.participation.is_joining:
                raise RuntimeError(
                    f"{self._function} inside fsdp.join: ranks that have finished take part only in clip_grad_norm_ "
                    "and clip_grad_value_ of all parameters of one model."
                )
            runtime.ensure_idle(f"call {self._function}")
        require_reduced(self._handles)

    def announce_clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        for runtime in self._runtimes:
            runtime.participation.announce_clip_norm(max_norm, norm_type, error_if_nonfinite)

    def shown(self, norm: Tensor) -> Tensor:
        """Return a norm in torch's form: for `DTensor`s, the norm is a `DTensor`."""
        part = MeshPart.of(self._params[0])
        if part is None:
            return norm
        from torch.distributed.tensor import Replicate

        return MeshPart(part.mesh, (Replicate(),) * part.mesh.ndim, norm.shape).dtensor(norm)

    @uncompiled
    def norm(self, owned: Owned, norm_type: float, max_norm: float | None = None) -> Tensor:
        """Collective. Return the norm over all ranks of given tensors, each with its parameter.

        With `max_norm`, the tensors are about to be clipped to this norm.
        """
        groups: dict[Any, list[Runtime]] = {}  # a single exchange for all models with the same ranks
        for runtime in self._runtimes:
            groups.setdefault(runtime.root.ranks or runtime, []).append(runtime)
        known = {id(one.flat_param): key for key in groups for runtime in groups[key] for one in runtime.handles}
        parts: dict[Any, list[tuple[Tensor, nn.Parameter]]] = {key: [] for key in groups}
        for tensor, param in owned:
            parts[known.get(id(owner_of(param)), next(iter(groups)))].append((tensor, param))
        with during(f"{self._function}()"):
            norms = []
            for key, together in groups.items():
                units = [unit for runtime in together for unit in runtime.units]
                norms.append(norm_over_ranks(together, parts[key], unsharded_parameters(units), norm_type, max_norm))
        if len(norms) == 1:
            return norms[0]
        dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]), norm_type)


def _models_of(params: Sequence[Any], function: str, *, of_values: bool = False) -> Models | None:
    """Return the sharded models with these parameters, which must have been used; None if torch's function is correct.

    torch's function is correct for parameters that are not sharded, and for `DTensor`s before the first run of their
    model. Hooks during a forward or backward may also use it to clip single `DTensor`s.

    Args:
        params: any tensors.
        function: the name of torch's function, for errors.
        of_values: If True, parameters without gradients count as well.
    """
    shards = shards_among(params)
    if not shards:
        return None
    known = list(runtimes())
    handles = {id(handle.flat_param): (runtime, handle) for runtime in known for handle in runtime.handles}
    if by_hand := [param for param in shards if param.owner.is_standalone]:
        raise RuntimeError(
            f"{function}: {by_hand[0].owner._names[0]} is sharded by a StandaloneHandle, and each rank would see its "
            "own shard. Sum the squares of the shards' gradients over the ranks (torch.distributed.all_reduce), and "
            "scale the gradients by hand; or make the module a unit, whose gradients this function clips."
        )
    unused = [param for param in shards if id(param.owner) not in handles]
    is_early = any(of_values or param.grad is not None for param in unused)
    if all(map(is_dtensor, shards)) and (is_early or any(runtime.is_computing for runtime in known)):
        return None
    if is_early:
        raise RuntimeError(
            f"{function}: before the first forward of a sharded model it is unknown which of its wrappers is the "
            "outermost one. Run the model first, or call model.clip_grad_norm_() of the outermost wrapper."
        )
    return Models(params, function, handles) if len(unused) < len(shards) else None


def _refuse_left_out(params: Iterable[Any]) -> None:
    """Raise RuntimeError for parameters from before sharding, or of unsharded modules, whose shards have gradients."""
    stale = [(param, taken) for param in params if param.grad is None and (taken := taken_over(param)) is not None]
    if not stale:
        return
    shards: dict[Any, Any] = {}  # by ids of unsharded parameters, and by places in flat parameters
    for handle in (handle for runtime in runtimes() for handle in runtime.handles):
        for slot, leaf in enumerate(handle.unsharded.leaves):
            shards[id(leaf)] = shards[handle.flat_param, slot] = handle.listed.param_of(slot)
    found = [
        (taken, shards.get(id(param) if taken.flat_param is None else (taken.flat_param(), taken.slot)))
        for param, taken in stale
    ]
    if names := [taken.description for taken, shard in found if shard is not None and shard.grad is not None]:
        raise RuntimeError(
            f"clip_grad_norm_: {some_of(names)} get no gradients, but their shards do, which would be ignored. The "
            "list was created before the model was sharded, or between a forward and its backward: call the model's "
            "parameters() each time, or create the list after sharding and between steps."
        )


def _parameters(runtime: Runtime) -> list[nn.Parameter]:
    return [param for handle in runtime.handles for param in handle.listed_params]


def _with_parameters(tensors: Sequence[Any]) -> Owned:
    """Return each tensor with the parameter whose gradient it is; other tensors with themselves."""
    owners: dict[Any, Any] = {}
    for param in (param for runtime in runtimes() for param in _parameters(runtime)):
        owners[id(param)] = param
        if param.grad is not None:
            owners |= {id(param.grad): param, _place(param.grad): param}
    owners.pop(None, None)
    return [(one, owners.get(id(one), owners.get(_place(one), one))) for one in tensors]


def _local_value(tensor: Tensor, param: Any) -> Tensor:
    """Return this rank's part, in the parameter's placements. Collective if a gradient has different placements."""
    part = MeshPart.of(param)
    return local_part(tensor) if part is None else part.gradient(tensor)


def _listed(tensors: Tensors) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _place(tensor: Tensor) -> tuple[int, int] | None:
    """Return the memory and offset of a plain tensor, which identify a detached gradient; None without memory."""
    memory = 0 if is_dtensor(tensor) or isinstance(tensor, Placeholder) else memory_of(tensor)
    return (memory, int(tensor.storage_offset())) if memory else None


_arguments = inspect.signature(torch.autograd.backward)


def _backward(torchs: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    given = _arguments.bind(*args, **kwargs)
    inputs = given.arguments.get("inputs")
    if inputs is not None:
        given.arguments["inputs"] = _leaves_of_all(inputs)
    try:
        torchs(*given.args, **given.kwargs)
    except RuntimeError as error:
        names = _freed_like(str(error))
        if not names:
            raise
        raise RuntimeError(
            f"{error} If there is no such operation: backward needs a parameter that is sharded now "
            f"({' or '.join(names)}), because a value computed with it left its unit other than as its output (through "
            "an attribute, a closure, a generator). Return the value from the forward, or compute it before the "
            "output; if this is a second backward through the same graph, add up the losses and run a single backward."
        ) from error


def _freed_like(message: str) -> list[str]:
    """Return the sharded parameters whose shape is in autograd's error about a changed saved tensor."""
    told = re.search(r"modified by an inplace operation: \[torch\.\S+ \[([\d, ]*)\]\]", message)
    if told is None:
        return []
    shape = sorted(map(int, re.findall(r"\d+", told[1])))  # a linear layer saves its weight transposed
    handles = [handle for runtime in runtimes() for handle in runtime.handles if handle.is_sharded]
    return [
        f"{slot.name} of {handle.unit_name}"
        for handle in handles
        for slot in handle.layout.slots
        if sorted(slot.shape) == shape
    ][:_NAMED]


def _leaves_of_all(inputs: Any) -> Any:
    listed: list[Any]
    if isinstance(inputs, GradientEdge):  # a tuple
        listed = [inputs]
    else:
        listed = _listed(inputs.values() if isinstance(inputs, Mapping) else inputs)
    owners = [owner_of(one) if isinstance(one, Tensor) else None for one in listed]
    if not any(owner is not None for owner in owners):
        return inputs
    handles: dict[Any, FlatParamHandle] = {one.flat_param: one for runtime in runtimes() for one in runtime.handles}
    found: list[Any] = []
    for one, owner in zip(listed, owners, strict=True):
        found += _leaves_of(one, handles[owner]) if owner in handles else [one]
    return found


def _leaves_of(param: Any, handle: FlatParamHandle) -> list[Tensor]:
    """Return the unsharded leaves in autograd's graph for a shard or a local shard."""
    return [leaf for slot, leaf in enumerate(handle.unsharded.leaves) if handle.listed.param_of(slot) is param]


class Replaced(NamedTuple):
    """A function of torch and the replacement.

    Attributes:
        name: the public name.
        function: torch's function, in its form since torch 2.11.
        ours: the replacement, which is called with torch's function and its arguments.
    """

    name: str
    function: Callable[..., Any]
    ours: Callable[..., Any]


# Each with the error of a plain training loop without the replacement.
REPLACED = (
    # Each rank would scale gradients by the norm of its own shards.
    Replaced("torch.nn.utils.clip_grad_norm_", nn.utils.clip_grad_norm_, _clip_grad_norm),
    # Each rank would get the norm of its own shards. torch's name of the function is private.
    Replaced("torch.nn.utils.get_total_norm", clip_grad._get_total_norm, _get_total_norm),
    # backward(inputs=...) with parameters that a model lists would compute no gradients.
    Replaced("torch.autograd.backward", torch.autograd.backward, _backward),
    # Ranks would continue with the state of another rank's shards.
    Replaced("torch.optim.Optimizer.load_state_dict", torch.optim.Optimizer.load_state_dict, load_state_dict),
)


def _around(torchs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(torchs)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(torchs, *args, **kwargs)

    return replacement


@cache
def teach_torch() -> None:
    """Replace the functions of the table, once.

    Raises:
        ValueError: see `check_switches`.
    """
    check_switches()
    if is_off(TORCH_FUNCTIONS):
        return
    for each in REPLACED:
        torchs = getattr(each.function, "__wrapped__", each.function)
        cells = [cell for cell in each.function.__closure__ or () if cell.cell_contents is torchs]
        replacement = _around(torchs, each.ours)
        for cell in cells:
            cell.cell_contents = replacement
        if not cells:
            place, _, attribute = each.name.rpartition(".")
            setattr(resolve_name(place), attribute, replacement)
