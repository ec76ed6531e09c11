"""Functions that read and rekey full optimizer states, whose keys are names or FairScale's numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp.distributed.communicator import some_of
from fsdp.engine.names import plain_name
from fsdp.engine.unit import unit_of_wrapper
from fsdp.layers.listed_shards import named_shards, params_of
from fsdp.layers.optimizer_states import SHARDS_OF
from fsdp.optim_utils.params import Parameters, Place, parameters_of
from fsdp.optim_utils.state import ELEMENTWISE, flat_state, options_of

# The key of the parameters' names. States of FairScale and of version 0.1.0 do not have this key.
NAMES = "param_names"
# Additional keys of a full state by numbers: two FairScale keys, and names.
ADDED = ("param_id_map", "uncollected_local_ids", NAMES)
OWN_KEYS = ("state", "param_groups", SHARDS_OF, *ADDED)
_FROM_FIRST = ". If only the first rank has it, every rank calls load_full_optim_state_dict(..., rank0_only=True)"


def copied_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(options_of(group))


@dataclass(frozen=True)
class Given:
    """A full optimizer state, matched with the parameters of a model."""

    states: dict[Place, dict[str, Any]]  # the state of each original parameter, in new dictionaries
    groups: list[tuple[dict[str, Any], list[Place]]]  # the options and the parameters of each group
    beside: dict[str, Any]  # the dictionary's other entries
    remedy: str = ""  # for the error about a tensor without its parameter's shape
    order: Sequence[Place] | None = None  # the order of parameters in the saved model; None if it is unknown


def _keys_in(full: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the keys of all parameters in a full state, from the state and from the groups."""
    yield from full["state"]
    for group in full["param_groups"]:
        yield from group["params"]


def _goes_by_names(full: Any) -> bool:
    """Return True if a full optimizer state has names as keys, False for numbers; else raise TypeError."""
    if not isinstance(full, Mapping) or not {"state", "param_groups"} <= full.keys():
        found = f"a mapping with {sorted(map(str, full))}" if isinstance(full, Mapping) else f"a {type(full).__name__}"
        raise TypeError(
            f"a full optimizer state has the keys 'state' and 'param_groups'; got {found}{_FROM_FIRST * (full is None)}"
        )
    if not isinstance(full["state"], Mapping) or not all(isinstance(each, Mapping) for each in full["state"].values()):
        raise TypeError("in a full optimizer state, 'state' is a mapping with a mapping for each parameter")
    groups = full["param_groups"]
    if not isinstance(groups, Sequence) or not all(isinstance(each, Mapping) and "params" in each for each in groups):
        raise TypeError("in a full optimizer state, 'param_groups' is a list of mappings, each with 'params'")
    kinds = {type(key) for key in _keys_in(full)}
    if not kinds <= {str} and not kinds <= {int}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"in a full optimizer state, the keys of parameters are all names or all numbers; got {names}")
    return kinds == {str}


def beside(dictionary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an optimizer's dictionary other than state and groups, such as a ``loss_scale``."""
    return {key: value for key, value in dictionary.items() if key not in OWN_KEYS}


def by_stored_names(full: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the numbers in a full state by the names that the state stores for them, if there are any.

    Numbers refer to different parameters if different modules are wrapped; names do not.
    """
    names = full.get(NAMES)
    if names is None:
        return full
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
        raise TypeError(f"in a full optimizer state, {NAMES!r} is a mapping of numbers to names")
    lacking = next((key for key in _keys_in(full) if key not in names), None)
    if lacking is not None:
        raise ValueError(f"the optimizer state has a parameter number {lacking} without a name in {NAMES!r}")
    return {
        **{key: value for key, value in full.items() if key not in ADDED},
        "state": {names[key]: state for key, state in full["state"].items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]} for group in full["param_groups"]
        ],
    }


_OTHER_NUMBERS = (
    "This state has numbers instead of names, and numbers depend on the wrapped modules: wrap the same modules as when "
    "it was saved; or convert it to names, with a model that is wrapped in the same way "
    "(fsdp.optim_utils.rekey_optim_state_dict(full, model, 'names'))."
)
_OTHER_MODEL = (
    "Load the state of a model with parameters of the same shapes. If the optimizer itself keeps tensors of other "
    f"shapes: {ELEMENTWISE}"
)


def given(params: Parameters, full: Any) -> Given:
    """Match a full state, by FairScale's numbers or by names, with a model's parameters; `full` is not changed."""
    hint = "" if _goes_by_names(full) else f" If only names have changed, remove {NAMES!r} to use numbers."
    names = full.get(NAMES)
    full = by_stored_names(full)
    by_names = _goes_by_names(full)
    if not by_names and "param_id_map" not in full and any(True for _ in _keys_in(full)):
        raise ValueError(
            "this optimizer state has numbers as keys and no 'param_id_map': it was not saved from a wrapped model, "
            "and its numbers may refer to other parameters. Convert it to names first, with the model of the state: "
            "fsdp.optim_utils.rekey_optim_state_dict(full, model, 'names')."
        )
    if not by_names and "param_id_map" in full and len(full["param_id_map"]) not in (len(params.by_number), 0):
        raise ValueError(
            f"this optimizer state is of a model with {len(full['param_id_map'])} parameters, but this one has "
            f"{len(params.by_number)}. {_OTHER_NUMBERS}"
        )

    def place_of(key: Any) -> Place:
        place = params.named(key) if by_names else params.by_number.get(key)
        if place is None:
            what = f"a parameter {key!r}" if by_names else f"a parameter number {key}"
            raise ValueError(f"the optimizer state has {what}, but the model does not. Is it of another model?{hint}")
        return place

    states = {place_of(key): state for key, state in full["state"].items()}
    states = {place: flat_state(state) if place[0].is_owned else dict(state) for place, state in states.items()}
    groups = [
        (copied_options(group), list(dict.fromkeys(place_of(key) for key in group["params"])))
        for group in full["param_groups"]
    ]
    order = None  # FairScale's models list their parameters in the order of their numbers
    if names is not None or not by_names:
        found = params.by_number.values() if names is None else map(params.named, names.values())
        order = [place for place in found if place is not None]
    return Given(states, groups, beside(full), _OTHER_MODEL if by_names else _OTHER_NUMBERS, order)


def _numbers_of_module(module: nn.Module, optim: Any) -> dict[str, int]:
    """Return torch's optimizer number of each parameter of an unwrapped module, by name.

    Without an optimizer (`optim`), the numbers are those for ``module.parameters()``.
    """
    names = {param: plain_name(name) for name, param in named_shards(module).items()}
    if optim is None:
        return {name: number for number, name in enumerate(names.values())}
    held = params_of(optim)
    if any(param not in names for param in held):
        raise ValueError(f"{type(optim).__name__} has parameters that are not the module's")
    return {names[param]: number for number, param in enumerate(held)}


def rekey_optim_state_dict(full: Mapping[str, Any], model: nn.Module, to: str, optim: Any = None) -> dict[str, Any]:
    """Return a full optimizer state with names instead of numbers as keys, or vice versa.

    For a wrapped model, the numbers are FairScale's, and the result contains ``param_id_map``,
    ``uncollected_local_ids`` and ``param_names``. For a plain module, torch's optimizers define the numbers. To
    convert a state between the two, use names. ``param_names`` in the state take precedence over the model's numbers.

    Args:
        full: the state, which is not changed; the result shares its tensors.
        model: the model of the state: the outermost wrapper, or a plain module.
        to: "names" or "numbers".
        optim: for a plain module, the optimizer that defines the numbers; None uses the order of
            ``model.parameters()``.

    Raises:
        TypeError: if `full` is not such a dictionary.
        ValueError: for any other value of `to`; if the model lacks parameters of the state.
    """
    if to not in ("names", "numbers"):
        raise ValueError(f"to must be 'names' or 'numbers', got {to!r}")
    _goes_by_names(full)
    uncollected = full.get("uncollected_local_ids", [])
    full = by_stored_names(full)
    by_names, goes_on_by_names = _goes_by_names(full), to == "names"
    is_wrapped = unit_of_wrapper(model) is not None
    local: dict[int, int] = {}  # the optimizer's number of each FairScale number
    if is_wrapped:
        params = parameters_of(model, "rekey an optimizer state")
        numbers = {name: params.numbers[original] for name, (_, original) in params.by_name.items()}
        ids = {one: number for number, one in enumerate(params.listed)}
        local = {number: ids[one] for number, (one, _) in params.by_number.items()}
        first = params.names
    else:
        numbers = _numbers_of_module(model, optim)
        first = {number: name for name, number in numbers.items()}
    known: Mapping[Any, Any] = numbers if by_names else first
    if by_names is goes_on_by_names:
        known = {key: key for key in known}
    keys = dict.fromkeys(_keys_in(full))
    table = {key: known.get(key, known.get(plain_name(key)) if by_names else None) for key in keys}
    lacking = [key for key, new in table.items() if new is None]
    if lacking:
        raise ValueError(
            f"the optimizer state has parameters that the model does not have: {some_of(map(repr, lacking))}"
        )
    state = {table[key]: dict(entry) for key, entry in full["state"].items()}
    groups = [
        copied_options(group) | {"params": [table[key] for key in group["params"]]} for group in full["param_groups"]
    ]
    if not goes_on_by_names:  # optimizers match parameters by their order in groups
        for group in groups:
            group["params"].sort(key=lambda number: (local.get(number, 0), number))
    added = {}
    if is_wrapped and not goes_on_by_names:
        mapped = {number: one if number in state else None for number, one in local.items()}
        added = dict(zip(ADDED, (mapped, list(uncollected), first), strict=True))
    return {"state": state, "param_groups": groups, **added, **beside(full)}
