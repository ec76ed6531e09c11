"""The original parameters taken over by units: the new place of each, as long as it is referenced.

A tied module outside of the unit may refer to an original parameter, or an optimizer created too early.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.engine.flat_param import FlatParameter, ParamInfo
from fsdp.engine.names import join, named_modules
from fsdp.engine.user_attributes import Attributes, attributes_of

Places = list[ParamInfo]


class Taken(NamedTuple):
    """A record of the new place of a parameter. All references are weak, so the record keeps no memory alive."""

    param: weakref.ref[nn.Parameter]
    description: str
    flat_param: weakref.ref[FlatParameter] | None  # which contains the values now; None for a summoned copy
    slot: int  # the parameter's number there
    lender: weakref.ref[Any] | None = None  # the unit that took it, if other units may share it

    @property
    def is_used(self) -> bool:
        """True if its flat parameter still exists."""
        return self.flat_param is not None and self.flat_param() is not None


# Parameters taken over by a unit, by id, while they are still referenced: by a tied module outside of the
# unit, or by an optimizer created too early.
_taken: dict[int, Taken] = {}
times_taken = [0]  # the number of entries set


def taken_over(param: Tensor) -> Taken | None:
    """Return the record of this original parameter; None if no unit took it over."""
    taken = _taken.get(id(param))
    return taken if taken is not None and taken.param() is param else None


def taken_by(param: Tensor) -> str | None:
    """Return the name under which a unit took over this original parameter; None if no unit did."""
    taken = taken_over(param)
    return None if taken is None else taken.description


def lender_of(param: Tensor) -> Any | None:
    """Return the unit that owns only this original parameter and can share it, or None."""
    taken = taken_over(param)
    return None if taken is None or taken.lender is None else taken.lender()


def note_stale(
    param: nn.Parameter,
    description: str,
    flat_param: weakref.ref[FlatParameter] | None = None,
    slot: int = 0,
    lender: weakref.ref[Any] | None = None,
) -> None:
    """Record that `param` is no longer, or soon no longer, a trained parameter of the model."""
    key = id(param)
    reference = weakref.ref(param, lambda _: _taken.pop(key, None))
    times_taken[0] += 1
    _taken[key] = Taken(reference, description, flat_param, slot, lender)


def follow_flat_param(old: FlatParameter, now: Mapping[int, tuple[FlatParameter, int]]) -> None:
    """Record the new flat parameters of the originals: by number, the new flat parameter and the number in it."""
    for key, taken in list(_taken.items()):  # a garbage collection may remove some
        if taken.flat_param is not None and taken.flat_param() is old and taken.slot in now:
            flat_param, slot = now[taken.slot]
            times_taken[0] += 1
            _taken[key] = taken._replace(flat_param=weakref.ref(flat_param), slot=slot)


def is_ours(param: Tensor) -> bool:
    """Return whether a listed parameter is a shard, or the local shard of an original parameter."""
    return owner_of(param) is not None


def owner_of(param: Tensor) -> FlatParameter | None:
    """Return the shard of a listed parameter, which is the shard itself or a view of it; None for other parameters."""
    owner = getattr(param, "owner", None)  # not __dict__, which compilers of optimizers cannot trace
    return owner if isinstance(owner, FlatParameter) else None


def take_over(
    params: dict[nn.Parameter, Places], flat_params: Sequence[FlatParameter], owner: str, lender: Any = None
) -> None:
    """Remove parameters, in the order of the flat parameters that they became, from the modules of the `owner`.

    The library then manages the modules' attributes. The `lender` is a unit that can share them with other units.
    """
    lent_by = None if lender is None else weakref.ref(lender)
    slots = [(weakref.ref(flat), slot) for flat in flat_params for slot in range(len(flat.metadata()[0]))]
    for (param, places), (flat_param, slot) in zip(params.items(), slots, strict=True):
        note_stale(param, f"{places[0].fqn} of {owner}", flat_param, slot, lent_by)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_refuse_gradient)
        for place in places:
            place.module._parameters[place.name] = None  # keeps the name's place in the order of parameters


def _refuse_gradient(param: Tensor) -> None:
    """Hook of an original parameter: raise RuntimeError because a computation used it after sharding."""
    taken = taken_over(param)
    if taken is not None and taken.is_used:
        param.grad = None
        raise RuntimeError(
            f"the original parameter {taken.description} has received a gradient, but its module was sharded "
            "since: this rank's gradient is not reduced, and would be lost. " + _HELD
        )


_HELD = (
    "Do not keep parameters in lists, dictionaries or other attributes that are filled before sharding: read them as "
    "attributes of their modules (self.weight) in each forward. A class may also override `__setattr__` and update its "
    "cache there, which is called for each tensor that replaces a parameter."
)
_IN_DDP = (
    "It is a DistributedDataParallel: shard the model inside it (its attribute `module`) instead. Sharded models "
    "average gradients over the ranks by themselves."
)


def refuse_held(root: nn.Module) -> None:
    """Raise RuntimeError if a module of a tree still refers to an original parameter taken over by a unit.

    Warn if an attribute of another parameter refers to an original, which may be a mark that no computation reads.
    """
    originals = {key: taken for key, taken in list(_taken.items()) if taken.is_used}
    for path, module in named_modules(root) if originals else ():
        values = [(name, value, False) for name, value in module.__dict__.items() if name not in _OF_MODULES]
        marks = [(name, attributes, True) for name, attributes in _set_on_parameters(module)]
        for name, value, is_mark in [*values, *marks]:
            for param in _tensors_in(value):
                if id(param) in originals and taken_over(param) is not None:
                    remedy = _IN_DDP if isinstance(module, DistributedDataParallel) else _HELD
                    message = (
                        f"{join(path, name)} holds the original parameter "
                        f"{originals[id(param)].description}, whose module was sharded since: computations with the "
                        f"original would not train the model, and read old values. {remedy}"
                    )
                    if not is_mark:
                        raise RuntimeError(message)
                    warnings.warn(message, stacklevel=2)


_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def _set_on_parameters(module: nn.Module) -> Iterator[tuple[str, Attributes]]:
    """Yield the names of a module's parameters, including parameters in flat parameters, and their attributes."""
    for name, param in module._parameters.items():
        if isinstance(param, FlatParameter):
            yield from zip(param.metadata()[0], param.attributes, strict=True)
        elif param is not None:
            yield name, attributes_of(param)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an attribute: the value itself, or the items of lists, tuples, sets and dictionaries."""
    ahead, seen = [value], set()
    while ahead:
        item = ahead.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple, set, frozenset, dict)) and id(item) not in seen:
            seen.add(id(item))
            ahead += item.values() if isinstance(item, dict) else item
