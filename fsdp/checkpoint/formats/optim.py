"""Optimizers' states in checkpoints of other formats, in the form of ours (`fsdp.checkpoint.optim.state_entries`).

There are three forms: that of torch's optimizers, in which parameters go by numbers; the same by names, as of
`get_optimizer_state_dict` and FSDP1; and flat ones, with keys like ``state.<name>.exp_avg``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp.checkpoint.formats.source import LazyTensor, is_lazy, whole
from fsdp.checkpoint.json_values import encoded
from fsdp.checkpoint.optim import ELEMENTS, NUMBER, VALUE
from fsdp.checkpoint.safetensors import KINDS
from fsdp.optim_utils.stream import is_number

_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True)
class Names:
    """A model's tensors, by plain names.

    Attributes:
        tensors: them.
        cleaned: the plain name for one that is found.
    """

    tensors: Mapping[str, LazyTensor]
    cleaned: Callable[[str], str]


def optimizer_state(
    path: str, found: Mapping[str, Any], model: Names, param_order: Sequence[str] | None, notes: list[str]
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The tensors of an optimizer's state under ``<name>/<key>``, and the rest of it.

    Args:
        path: of the checkpoint, for messages.
        found: the state, with lazy tensors.
        model: that it is of.
        param_order: the parameters' names in the order of ``model.named_parameters()``; None if it is not known.
        notes: get what is worth telling.

    Raises:
        ValueError: if it goes by numbers, and nobody says which parameters are meant; if it is of other parameters; for
            state that is neither of the parameter's shape nor a number.
    """
    if _GROUPS not in found:
        found = _unflattened(found, model)
        notes.append("parameters of the optimizer with equal settings count as one group")
    groups = list(found[_GROUPS])
    names = _names(path, found, groups, model, param_order)
    states = {names[key]: state for key, state in _keyed(found.get(_STATE, {}), names)}
    tensors: dict[str, LazyTensor] = {}
    kinds: dict[str, dict[str, list[Any]]] = {}
    for group in groups:
        for key in group["params"]:
            name = names[key]
            if name not in model.tensors:
                raise ValueError(
                    f"{path}: the optimizer has {name}, and the model has not. Convert without it (--only model)."
                )
            shape = model.tensors[name].shape
            kinds[name] = {}
            for state_key, value in states.get(name, {}).items():
                kind = _kind(path, name, state_key, value, shape)
                kinds[name][state_key] = kind
                if kind[0] == ELEMENTS:
                    tensors[f"{name}/{state_key}"] = value
    strangers = [name for name in states if name not in kinds]
    if strangers:
        raise ValueError(
            f"{path}: the optimizer has state of {', '.join(strangers[:5])}, which are in none of its groups"
        )
    rest = {
        "optimizer": "",
        "groups": [
            {
                "options": encoded(_options(group), f"{_GROUPS}[{number}]"),
                "params": list(dict.fromkeys(names[key] for key in group["params"])),
            }
            for number, group in enumerate(groups)
        ],
        "state": kinds,
    }
    return tensors, rest


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _kind(path: str, name: str, key: str, value: Any, shape: torch.Size) -> list[Any]:
    where = f"the optimizer's state '{key}' of {name}"
    if not is_lazy(value):
        try:
            return [VALUE, encoded(value, where)]
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None
    if value.dtype not in KINDS:
        raise ValueError(f"{path}: {where} is of {value.dtype}, which safetensors files cannot hold")
    if not value.shape and (len(shape) > 0 or is_number(key)):
        return [NUMBER, KINDS[value.dtype], encoded(whole(value).item(), where)]
    if value.shape == shape:
        return [ELEMENTS, KINDS[value.dtype]]
    raise ValueError(
        f"{path}: {where} has shape {list(value.shape)}, and the parameter {list(shape)}: what is neither of the "
        "parameter's shape nor a number has no place in a checkpoint for any number of ranks. Convert without it "
        "(--only model)."
    )


# By name


def _keyed(states: Mapping[Any, Any], names: Mapping[Any, str]) -> list[tuple[Any, Any]]:
    """States by what stands for parameters in the groups; numbers may have become texts."""
    texts = {str(key): key for key in names}
    return [(key if key in names else texts.get(str(key), key), state) for key, state in states.items()]


def _names(
    path: str, found: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], model: Names, order: Sequence[str] | None
) -> dict[Any, str]:
    """By what stands for parameters, their plain names."""
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: model.cleaned(key) for key in [*keys, *found.get(_STATE, {})]}
    if all("param_names" in group for group in groups):
        named = [
            (key, name) for group in groups for key, name in zip(group["params"], group["param_names"], strict=True)
        ]
        return {key: model.cleaned(name) for key, name in named}
    if "param_id_map" in found:
        raise ValueError(
            f"{path}: the optimizer goes by FairScale's numbers. Give it names first, with the model: "
            "fsdp.optim_utils.rekey_optim_state_dict(full, model, 'names')"
        )
    if order is None:
        raise ValueError(
            f"{path}: in the optimizer's state, parameters go by numbers, and nothing says which they are. Write the "
            "names of model.named_parameters() to a file, a line each, in the order that the optimizer was given "
            "them, and name it with --param-order; or convert without it (--only model)."
        )
    if len(order) != len(keys):
        raise ValueError(f"{path}: the optimizer has {len(keys)} parameters, and {len(order)} names were given")
    return {key: model.cleaned(order[number]) for number, key in enumerate(sorted(keys))}


def _unflattened(found: Mapping[str, Any], model: Names) -> dict[str, Any]:
    """The same with states by names, and parameters with equal settings in a group."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        what, _, rest = key.partition(".")
        if what in (_STATE, _GROUPS):
            name, state_key = _split(rest, model)
            (states if what == _STATE else settings).setdefault(name, {})[state_key] = value
    groups: dict[str, dict[str, Any]] = {}
    order = {name: number for number, name in enumerate(model.tensors)}
    for name in sorted(settings, key=lambda each: order.get(each, len(order))):
        options = settings[name]
        text = json.dumps(encoded(options, name), sort_keys=True)
        groups.setdefault(text, {**options, "params": []})["params"].append(name)
    return {_STATE: states, _GROUPS: list(groups.values())}


def _split(text: str, model: Names) -> tuple[str, str]:
    """The name of a parameter, and what follows it, which may both have dots."""
    parts = text.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = model.cleaned(".".join(parts[:count]))
        if name in model.tensors:
            return name, ".".join(parts[count:])
    return ".".join(parts[:-1]), parts[-1]
