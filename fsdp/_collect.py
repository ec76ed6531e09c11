"""Which parameters a unit takes, in which groups, and how they leave the modules that they belonged to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from fsdp._dtensors import MeshPart, check_placements, is_dtensor
from fsdp._flat_param import FlatParameter, ParamInfo, PieceParameter
from fsdp._names import clean_name

Places = list[ParamInfo]

# Parameters that a unit has taken over, by id, while somebody still holds them: a tied module outside of the
# unit, or an optimizer made too early.
_taken: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}


def collect(module: nn.Module) -> dict[nn.Parameter, Places]:
    """The parameters below `module` that no inner unit took, each with every place where it is used.

    Raises:
        TypeError: if one is an integer tensor or another kind that cannot be flattened.
        ValueError: if one was taken over by a unit that doesn't contain this place: a tie would be lost; or has
            hooks; or is a DTensor of which this rank has no part.
    """
    found: dict[nn.Parameter, Places] = {}
    for prefix, submodule in module.named_modules():
        for name, param in submodule._parameters.items():
            fqn = clean_name(f"{prefix}.{name}" if prefix else name)
            if isinstance(param, FlatParameter) and not param._is_managed:
                raise ValueError(
                    f"{fqn} is a FlatParameter that no FullyShardedDataParallel made: it would not be sharded. Wrap "
                    "the plain module, without a FlattenParamsWrapper around it or inside."
                )
            if param is None or isinstance(param, (FlatParameter, PieceParameter)):
                continue
            _check(fqn, param)
            found.setdefault(param, []).append(ParamInfo(submodule, name, fqn))
    return found


def _check(fqn: str, param: nn.Parameter) -> None:
    if not param.is_floating_point() and not param.is_complex():
        raise TypeError(
            f"{fqn} is a parameter of {param.dtype}: only floating-point parameters can be sharded. Register it as a "
            "buffer (register_buffer) if it is not trained."
        )
    check_placements(fqn, param)
    is_known = type(param) in _PLAIN or is_dtensor(param)
    if param.layout is not torch.strided or param.device.type == "meta" or not is_known:
        kind = f"{param.layout} {param.device.type}" if is_known else type(param).__name__
        raise TypeError(
            f"{fqn} is a {kind} parameter: only plain, dense parameters with values can be flattened. Materialize it "
            "(to_empty() and reset_parameters()) or convert it before wrapping."
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(
            f"{fqn} has gradient hooks, which would never run: another tensor takes its place. Remove them before "
            "wrapping; gradients can be hooked afterwards on the wrapper's `params`, flat and reduced."
        )
    owner = taken_by(param)
    if owner is not None:
        raise ValueError(
            f"{fqn} is the same parameter as {owner}, which an inner unit has already taken over: wrapped like this, "
            "the two would no longer be tied. Leave that module unwrapped, so that the unit that contains both takes "
            "the parameter (auto_wrap does so by itself)."
        )


_PLAIN = (nn.Parameter,)


def taken_by(param: torch.Tensor) -> str | None:
    """The name under which a unit took over this original parameter, None if none did."""
    reference, name = _taken.get(id(param), (None, None))
    return name if reference is not None and reference() is param else None


def note_stale(param: nn.Parameter, description: str) -> None:
    """Remember that `param` is not, or not for long, what the model trains."""
    key = id(param)
    _taken[key] = (weakref.ref(param, lambda _: _taken.pop(key, None)), description)


def group(params: dict[nn.Parameter, Places], kind: Callable[[Places], Hashable]) -> list[list[nn.Parameter]]:
    """Parameters that can share one flat parameter: of one dtype, device and `requires_grad`, and used alike.

    `DTensor`s only with others that are spread over the same ranks.

    Args:
        params: with the places where each is used.
        kind: what tells uses apart.
    """
    groups: dict[Hashable, list[nn.Parameter]] = {}
    for param, places in params.items():
        part = MeshPart.of(param)
        spread = None if part is None else part.kind
        groups.setdefault((param.dtype, param.device, param.requires_grad, spread, kind(places)), []).append(param)
    return list(groups.values())


def take_over(params: dict[nn.Parameter, Places], owner: str) -> None:
    """Remove the parameters from their modules; from now on the modules' attributes are ours."""
    for param, places in params.items():
        note_stale(param, f"{places[0].fqn} of {owner}")
        for place in places:
            del place.module._parameters[place.name]


def names_of(params: Sequence[nn.Parameter], places: dict[nn.Parameter, Places]) -> list[str]:
    """The names of parameters at their first places."""
    return [places[param][0].fqn for param in params]
