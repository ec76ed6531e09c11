"""Optimizers in Lightning's checkpoint files: whole, and numbered as an unsharded optimizer numbers its parameters.

So files go from this strategy to others and back. Names are stored beside the numbers, in torch's own ``param_names``,
and count before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsdp
from fsdp.optim_utils import full_optim_state_dict, load_full_optim_state_dict

_NAMES = "param_names"


def numbered_state(model: fsdp.FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    """Collective. An optimizer's whole state, as of the unsharded model's; empty on other ranks than the first."""
    named = full_optim_state_dict(model, optimizer, recipient_rank=0)
    if named is None:
        return {}
    numbers: dict[str, int] = {}
    groups = []
    for group in named["param_groups"]:
        names = list(group["params"])
        numbers |= {name: number for number, name in enumerate(names, start=len(numbers))}
        groups.append({**group, "params": [numbers[name] for name in names], _NAMES: names})
    state = {numbers[name]: each for name, each in named["state"].items()}
    return {**named, "state": state, "param_groups": groups}


def load_numbered_state(model: fsdp.FullyShardedDataParallel, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Collective. Have each rank's optimizer go on with its part of a whole state, from this strategy or another.

    Raises:
        ValueError: for a state without names, if the optimizer has flat parameters, whose numbers are others; for a
            state that does not fit the optimizer.
        RuntimeError: if another rank could not load it.
    """
    if all(_NAMES in group for group in saved["param_groups"]):
        names = [name for group in saved["param_groups"] for name in group[_NAMES]]
    else:
        names = _names_in(model, optimizer)
    listed = [number for group in saved["param_groups"] for number in group["params"]]
    if len(names) != len(listed):
        raise ValueError(
            f"the optimizer state in the checkpoint is of {len(listed)} parameters, and this "
            f"{type(optimizer).__name__} has {len(names)}: make it of the same parameters, in the same groups"
        )
    by_number = dict(zip(listed, names, strict=True))
    groups = [
        {key: value for key, value in group.items() if key != _NAMES}
        | {"params": [by_number[n] for n in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {by_number[number]: each for number, each in saved["state"].items()}
    load_full_optim_state_dict(model, optimizer, {**saved, "state": state, "param_groups": groups})


def _names_in(model: fsdp.FullyShardedDataParallel, optimizer: Any) -> list[str]:
    """Of the parameters of an optimizer, in its order. Collective."""
    whole = full_optim_state_dict(model, optimizer, recipient_rank=None) or {}
    names = [name for group in whole["param_groups"] for name in group["params"]]
    if len(names) != sum(len(group["params"]) for group in optimizer.param_groups):
        raise ValueError(
            "the checkpoint's optimizer state goes by the numbers of an unsharded model's parameters, and this "
            "optimizer has flat ones. Load it with FullyShardedStrategy(use_orig_params=True), the default, and save "
            "it anew: then it goes by names."
        )
    return names
