"""Which parameters a unit takes, in which groups, and how they leave the modules that they belonged to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from fsdp._flat_param import FlatParameter, ParamInfo, PieceParameter
from fsdp._ignored import Ignored
from fsdp._names import clean_name

Places = list[ParamInfo]
GroupKey = Callable[[str, nn.Parameter], Hashable]  # of a parameter's name and the parameter

# Parameters that a unit has taken over, by id, while somebody still holds them: a tied module outside of the
# unit, or an optimizer made too early.
_taken: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}


def collect(module: nn.Module, ignored: Ignored | None = None) -> dict[nn.Parameter, Places]:
    """The parameters below `module` that no inner unit took, each with every place where it is used.

    Args:
        module: the root to look below.
        ignored: what to leave out.

    Raises:
        TypeError: if one is an integer tensor or another kind that cannot be flattened.
        ValueError: if one was taken over by a unit that doesn't contain this place: a tie would be lost; or has
            hooks.
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
            if param is None or is_ours(param):
                continue
            if ignored is not None and ignored.has(submodule, param):
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
    if param.layout is not torch.strided or param.device.type == "meta" or type(param) not in _PLAIN:
        kind = type(param).__name__ if type(param) not in _PLAIN else f"{param.layout} {param.device.type}"
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


def is_ours(param: torch.Tensor) -> bool:
    """Whether what a module lists is a shard, or a piece of one."""
    return isinstance(param, (FlatParameter, PieceParameter))


def group(
    params: dict[nn.Parameter, Places], kind: Callable[[Places], Hashable], key: GroupKey | None
) -> list[tuple[Hashable, list[nn.Parameter]]]:
    """Parameters that can share one flat parameter: of one dtype, device, `requires_grad` and key, and used alike.

    Args:
        params: with the places where each is used.
        kind: what tells uses apart.
        key: what the user tells apart.

    Returns:
        Each group with its key, None without `key`.

    Raises:
        TypeError: if a key cannot be hashed.
    """
    groups: dict[Hashable, list[nn.Parameter]] = {}
    keys: dict[Hashable, Hashable] = {}
    for param, places in params.items():
        own = key_of(param, places, key)
        alike = (param.dtype, param.device, param.requires_grad, kind(places), own)
        keys[alike] = own
        groups.setdefault(alike, []).append(param)
    return [(keys[alike], members) for alike, members in groups.items()]


def key_of(param: nn.Parameter, places: Places, key: GroupKey | None) -> Hashable:
    """What the user's `group_by` says of a parameter."""
    found = None if key is None else key(places[0].fqn, param)
    try:
        hash(found)
    except TypeError:
        raise TypeError(
            f"group_by({places[0].fqn!r}, ...) returned {found!r}, which cannot be hashed: return a string, a number, "
            "or a tuple of such"
        ) from None
    return found


def text_of_key(key: Hashable) -> str:
    """A key as ranks can compare it: texts of other objects than plain values may differ though the keys are equal."""
    if isinstance(key, tuple):
        return f"({', '.join(map(text_of_key, key))})"
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__


def take_over(params: dict[nn.Parameter, Places], owner: str) -> None:
    """Remove the parameters from their modules; from now on the modules' attributes are ours."""
    for param, places in params.items():
        note_stale(param, f"{places[0].fqn} of {owner}")
        for place in places:
            del place.module._parameters[place.name]


def names_of(params: Sequence[nn.Parameter], places: dict[nn.Parameter, Places]) -> list[str]:
    """The names of parameters at their first places."""
    return [places[param][0].fqn for param in params]
