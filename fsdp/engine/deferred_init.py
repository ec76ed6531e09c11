"""What has no values yet is not computed with, and not saved: an error names it and the ways to give it values."""

from __future__ import annotations

import json
from collections.abc import Iterator

from torch import nn

from fsdp.distributed.consensus import from_everyone, number_among, peers_answer
from fsdp.engine.blanks import blanks_in
from fsdp.engine.names import clean_name
from fsdp.engine.unit import Unit, own_modules, unit_of, units_in

_NAMED = 5  # in messages
_REMEDY = (
    "Give them values first, on every rank: fsdp.materialize(model), with param_init_fn=... for modules without "
    "reset_parameters(); or load them (load_state_dict, fsdp.load_safetensors)."
)


def require_values(module: nn.Module, what: str, recurse: bool = True) -> None:
    """Make sure that everything in the units of a module tree has values. Every rank for itself.

    Args:
        module: the root to look below.
        what: is to be done.
        recurse: look into the units inside of the first one, too.

    Raises:
        RuntimeError: naming the parameters and buffers without.
    """
    units = [(name, unit) for name, inner in module.named_modules() if (unit := unit_of(inner)) is not None]
    missing: list[str] = []
    for name, unit in units if recurse else units[:1]:
        if unit.awaits_values:
            found = [clean_name(f"{name}.{inner}" if name else inner) for inner in valueless_in(unit)]
            unit.awaits_values = bool(found)
            missing += found
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        owner = units[0][1].name
        raise RuntimeError(
            f"{owner}: cannot {what}: {len(missing)} of its parameters and buffers have no values yet, because they "
            f"were on the meta device when it was wrapped: {', '.join(missing[:_NAMED])}{more}. {_REMEDY}"
        )


def require_values_everywhere(root: Unit, what: str, recurse: bool = True) -> None:
    """Collective until all ranks have all values. As `require_values`, on every rank if one lacks any.

    Or the others would wait, in their next gather, for a rank that has raised an error.

    Args:
        root: the unit to look below.
        what: is to be done.
        recurse: look into the units inside of the first one, too.

    Raises:
        RuntimeError: naming the parameters and buffers without values, and the first rank that lacks them.
    """
    units = [unit for _, unit in units_in(root)] if recurse else [root]
    if not any(unit.awaits_values_somewhere for unit in units):
        return
    problem = None
    try:
        require_values(root.module, what, recurse)
    except RuntimeError as error:
        problem = error
    own = [str(problem or ""), *(unit.awaits_values for unit in units)]
    told = [own]
    if peers_answer(root.everyone):
        told = [json.loads(other) for other in from_everyone(root.everyone, json.dumps(own).encode())]
    for number, unit in enumerate(units, start=1):
        unit.awaits_values_somewhere = any(one[number] for one in told)
    if problem is not None:
        raise problem
    for rank, (text, *_) in enumerate(told):
        if text:
            raise RuntimeError(f"rank {number_among(root.everyone)}: rank {rank} has parameters without values. {text}")


def valueless_in(unit: Unit) -> Iterator[str]:
    """The names, from its module, of what a unit took or its modules list and that has no values."""
    for handle in unit.own:
        handle.absorb()  # what users have assigned counts
        yield from (handle.layout.slots[slot].name for slot in sorted(handle.valueless))
    names = {inner: name for name, inner in unit.module.named_modules()}
    for blank in blanks_in(own_modules(unit.module)):
        inner, name = blank.places[0]
        yield f"{names[inner]}.{name}" if names[inner] else name
