"""`Presentation` shows tensors to modules in the places of a handle's parameters, and detects replaced parameters.

A module has two entries for a parameter. Its code uses the *attribute* (``module.weight``). `parameters()`,
`state_dict()` and optimizers use the entry that is *listed* in ``_parameters``:

=============  ==========================  =======================================
handle         attribute                   listed
=============  ==========================  =======================================
sharded        placeholder, or `DTensor`   flat parameter, local shard or `DTensor`
unsharded      unsharded parameter         the same
computing      unsharded parameter         unsharded parameter
exposed        the listed parameter        ordinary parameter
=============  ==========================  =======================================

A handle is *computing* during forward and backward of its unit, so that `parameters()` in a forward returns the
parameters that the module computes with. Parameters are *exposed* for `summon_full_params`, state dicts and loads.

Assignments are recorded when they happen (`Listing`), so parameters are only compared after an assignment. An
assignment (``module.weight = nn.Parameter(...)``) is a new value of the parameter and is stored. A tensor that is
*lent* for a single call, for example by `torch.func.functional_call`, gets the gradients; the parameter is unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.distributed.dtensor import MeshPart, is_dtensor, local_part
from fsdp.engine.assigned_attributes import attributes_seen_by
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.layout import NO_SLOTS
from fsdp.engine.originals import is_ours, note_stale
from fsdp.engine.placeholder import Placeholder, ValuelessParameter
from fsdp.engine.unsharded_params import UnshardedParameters

_TO_EXPORT = "For torch.export, load the model's checkpoint into the unsharded model."

_put = dict.__setitem__  # writes to a `Listing` without recording

# The presentations that show lent tensors.
lenders: weakref.WeakSet[Presentation] = weakref.WeakSet()

# Parameters assigned by users, with the place of each, as long as users keep references.
_assigned: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Listing(dict[str, Any]):
    """A module's ``_parameters`` while handles run some of them. Reports each assignment and deletion of an item.

    `torch.func.functional_call` writes to ``_parameters`` directly, and later restores the old entries; an assignment
    uses `nn.Module.__setattr__`, which removes the module's attribute first. Otherwise this is an ordinary dictionary,
    also for compilers, and copies and pickles are dictionaries.
    """

    __slots__ = ("_module", "_names", "_presentations")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self._names = tuple(self)
        # Weak references: otherwise only the garbage collector would free a model.
        self._module = weakref.ref(module)
        self._presentations: dict[str, weakref.ref[Presentation]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> Listing:
        """Return the listing of a module; created if there is none."""
        listing = module._parameters
        if not isinstance(listing, cls):
            listing = module.__dict__["_parameters"] = cls(module)
        return listing

    def put(self, name: str, value: nn.Parameter | None) -> None:
        """Set an item without a report. A removed name returns to its place in the order."""
        is_missing = name not in self
        super().__setitem__(name, value)
        for known in self._names if is_missing else ():
            if known in self:
                super().__setitem__(known, self.pop(known))

    def report_to(self, presentation: Presentation, name: str) -> None:
        """Report changes of the item with this name to a presentation."""
        self._presentations[name] = weakref.ref(presentation)

    def _presentation_of(self, name: str) -> Presentation | None:
        found = self._presentations.get(name)
        return None if found is None else found()

    def __setitem__(self, name: str, value: Any) -> None:
        presentation, module = self._presentation_of(name), self._module()
        if presentation is not None and module is not None:
            value = presentation.notice(module, name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        presentation, module = self._presentation_of(name), self._module()
        if presentation is not None and module is not None:
            presentation.notice_removal(module, name)
        super().__delitem__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Look(Enum):
    """The tensors that modules see and list, unless ordinary parameters are exposed."""

    SHARDED = auto()  # attributes are placeholders; shards are listed
    UNSHARDED = auto()  # attributes are unsharded parameters; shards are listed
    COMPUTING = auto()  # attributes are unsharded parameters, also listed


class Presentation:
    """The tensors that modules see and list in the places of one handle's parameters.

    If a flat parameter is listed instead of its original parameters, modules list None at the original places.

    Args:
        places: for each original parameter, where it is used; the first place names the parameter.
        entries: for each listed parameter, the module and the name in the module.

    Attributes:
        lent: the places where a tensor is lent; the flag is True if the caller put it there, and False if the
            caller put it at another place of the parameter.
        look: the tensors that modules see, see `Look`.
        is_exposed: modules contain unsharded, ordinary parameters, for a state dict or `summon_full_params`.
        touched: the numbers of parameters with assignments to their places, until `changed` has compared all.
    """

    def __init__(
        self,
        places: Sequence[Sequence[ParamInfo]],
        entries: Sequence[tuple[nn.Module, str, nn.Parameter]],
    ) -> None:
        self._places = places
        self.entries = list(entries)
        self.wake()

    def __getstate__(self) -> dict[str, Any]:
        return {"_places": self._places, "entries": self.entries}

    def wake(self) -> None:
        """Enter the modules; called again in a copy, after the copy and the modules were copied or unpickled."""
        self.lent: dict[tuple[nn.Module, str], bool] = {}
        self.look = Look.SHARDED
        self.is_exposed = False
        self.touched = NO_SLOTS
        self._exposed: Sequence[nn.Parameter] = ()
        self._enter()

    def use(self, unsharded: UnshardedParameters, own_dtype: torch.dtype) -> None:
        """Show placeholders, and later leaves, of these unsharded parameters from now on.

        Args:
            unsharded: the parameters that modules compute with.
            own_dtype: the dtype of the shard, which lent tensors may have.
        """
        self._leaves, self._absent = unsharded.leaves, unsharded.absent
        for _, slot, entry in self._at.values():
            if isinstance(absent := self._absent[slot], Placeholder):
                absent.listed = entry
        self._unsharded, self._own_dtype = unsharded, own_dtype
        self.look = Look.SHARDED
        self.refill()

    def show(self) -> list[int]:
        """Show the unsharded parameters as attributes.

        Returns:
            The numbers of parameters with another tensor at any place; this tensor remains.
        """
        changed, leaves, absent, lent = [], self._leaves, self._absent, self.lent
        for place, (attributes, slot, _) in self._at.items():
            shown = attributes.get(name := place[1])
            if shown is absent[slot]:
                attributes[name] = leaves[slot]
            elif shown is not leaves[slot] and place not in lent:
                changed.append(slot)
        self.look = Look.UNSHARDED
        return changed

    def hide(self) -> None:
        """Show placeholders as attributes again. A tensor assigned by a user remains."""
        if self.look is Look.COMPUTING:
            self.list_shards()
        self.look = Look.SHARDED
        leaves, absent = self._leaves, self._absent
        for (_, name), (attributes, slot, _) in self._at.items():
            if attributes.get(name) is leaves[slot]:
                attributes[name] = absent[slot]

    def list_unsharded(self) -> list[int]:
        """List the unsharded parameters in the modules instead of flat parameters, until `list_shards`.

        Returns:
            The numbers of parameters with another listed tensor at any place; this tensor remains.
        """
        changed: list[int] = []
        if self.look is Look.COMPUTING:
            return changed
        self.look = Look.COMPUTING
        leaves, lent = self._leaves, self.lent
        for place, (_, slot, entry) in self._at.items():
            if place not in lent:
                module, name = place
                listed = module._parameters
                if listed.get(name) is entry:
                    _put(listed, name, leaves[slot])
                else:
                    changed.append(slot)
        for module, name, _ in self._flat:
            _put(module._parameters, name, None)
        return changed

    def list_shards(self) -> None:
        """List the shards again. A parameter assigned by a user meanwhile remains."""
        if self.look is not Look.COMPUTING:
            return
        self.look = Look.UNSHARDED
        leaves = self._leaves
        for (module, name), (_, slot, entry) in self._at.items():
            listed = module._parameters
            if listed.get(name) is leaves[slot]:
                _put(listed, name, entry)
        for module, name, flat_param in self._flat:
            _put(module._parameters, name, flat_param)

    def shown(self, slot: int) -> Tensor:
        """Return the tensor that should be the attribute of a parameter now."""
        return (self._absent if self.look is Look.SHARDED else self._leaves)[slot]

    def refill(self) -> None:
        """Restore all attributes, except lent tensors."""
        for place, (attributes, slot, _) in self._at.items():
            if place not in self.lent:
                attributes[place[1]] = self.shown(slot)

    def reveal(self, slot: int) -> None:
        """Show a parameter with its first values, if the buffer is the shard."""
        if isinstance(placeholder := self._absent[slot], ValuelessParameter):
            self._absent[slot] = leaf = self._leaves[slot]
            for module, name, _ in self._places[slot]:
                attributes = self._at[module, name][0]
                if attributes.get(name) is placeholder:
                    attributes[name] = leaf

    def add(self, places: Sequence[ParamInfo], param: nn.Parameter) -> None:
        """List and show the only parameter at additional places, which `_places` already contains."""
        self.entries += [(place.module, place.name, param) for place in places]
        self._enter()
        self.refill()

    def _enter(self) -> None:
        """List the entries in modules, and record assignments of other tensors."""
        numbers = {(place.module, place.name): slot for slot, used in enumerate(self._places) for place in used}
        listed = {(module, name): param for module, name, param in self.entries}
        # For each place: the mapping of the module's attributes, the parameter's number, and the listed shard.
        self._at = {place: (attributes_seen_by(place[0]), slot, listed.get(place)) for place, slot in numbers.items()}
        self._flat = [(*at, param) for at, param in listed.items() if at not in numbers]
        for module, name in dict.fromkeys([*numbers, *listed]):
            listing = Listing.of(module)
            listing.report_to(self, name)
            listing.put(name, listed.get((module, name), listing.get(name)))
        if self.look is Look.COMPUTING:
            self.look = Look.UNSHARDED
            self.list_unsharded()

    def enter(self) -> None:
        """List and show the tensors again, after `leave`."""
        self._enter()
        self.refill()

    def leave(self) -> None:
        """Remove all tensors from the modules. Names remain, to keep the order of parameters."""
        self.lent.clear()
        for module, name, param in self.entries:
            if module._parameters.get(name) is param:
                _put(module._parameters, name, None)
        for module, name in self._at if self.is_exposed else ():
            Listing.of(module).put(name, None)

    def expose(self, params: Sequence[nn.Parameter] | None) -> None:
        """List ordinary parameters until `conceal`; if None, keep the shards listed."""
        self.is_exposed = True
        if params is not None:
            for (module, name), (attributes, slot, _) in self._at.items():
                attributes[name] = params[slot]  # a class may cache its parameters
                del module.__dict__[name]
                _put(module._parameters, name, params[slot])
            self._exposed = params
            for module, name, _ in self._flat:
                _put(module._parameters, name, None)
            self.lent.clear()

    def conceal(self) -> None:
        """Remove ordinary parameters from the modules, and list and show the handle's tensors again."""
        if was_exposed := bool(self._exposed):
            self.leave()
            self._exposed = ()
        self.is_exposed = False
        self.touched = NO_SLOTS
        if was_exposed:
            self.enter()

    @property
    def is_lent(self) -> bool:
        """True if modules see lent tensors in all places."""
        return bool(self.lent) and len(self.lent) == len(self._at)

    def notice(self, module: nn.Module, name: str, value: Any) -> Any:
        """Record that a tensor is put in a place of a parameter, by an assignment or for a single call.

        Returns:
            The tensor to list there.

        Raises:
            RuntimeError: for values that modules cannot compute with.
        """
        if (module, name) not in self._at:
            if all(value is not param for own, known_as, param in self._flat if own is module and known_as == name):
                raise RuntimeError(
                    f"'{name}' of {type(module).__name__} is a flat parameter, which cannot be replaced. Assign "
                    "unsharded tensors to the original parameters, or pass them to torch.func.functional_call under "
                    f"those names; or change values inside `with model.summon_full_params():`. {_TO_EXPORT}"
                )
            return value
        _, slot, entry = self._at[module, name]
        self.touched |= {slot}
        if self._exposed:
            return value
        attributes = module.__dict__
        if name not in attributes and self._is_same(slot, value):
            note_stale(value, f"the values of {self._places[slot][0].fqn} that it had")
            value = self._leaves[slot]
        if (value is entry or self._is_own(slot, value)) and (
            (module, name) in self.lent or (value is not None and name not in attributes)
        ):  # a lent tensor is returned; or the shown tensor is assigned again, for example to tie weights
            self._show(slot, module, name, self.shown(slot), is_lent=False)
            return self._leaves[slot] if self.look is Look.COMPUTING else entry
        if value is None:
            attributes.pop(name, None)  # the parameter was removed
        elif name in attributes and value is not entry:
            self._show(slot, module, name, self._lendable(slot, name, value), is_lent=True)
        return value

    def notice_removal(self, module: nn.Module, name: str) -> None:
        """Record that an item is deleted, for example by weight norm, which then computes the parameter.

        Raises:
            RuntimeError: if the parameter is sharded. During its unit's forward, deletion affects only this forward.
        """
        if self.look is not Look.COMPUTING and not self.is_exposed:
            raise RuntimeError(
                f"'{name}' of this {type(module).__name__} is sharded, and can no longer be deleted or computed from "
                "other parameters. Apply weight norm, spectral norm, pruning and other parametrizations before "
                "sharding; and do not use torch's FullyShardedDataParallel around a sharded model, because it flattens "
                "parameters again."
            )
        module.__dict__.pop(name, None)
        if (module, name) in self._at:  # else it is a flat parameter
            self.touched |= {self._at[module, name][1]}

    def _is_own(self, slot: int, value: Any) -> bool:
        return value is self._leaves[slot] or value is self._absent[slot]

    def _is_same(self, slot: int, value: Any) -> bool:
        """Return whether a parameter is a new object with the values and memory of the leaf."""
        if not isinstance(value, nn.Parameter) or self._is_own(slot, value):
            return False
        needs_grad = self._leaves[slot].requires_grad
        return value.requires_grad is needs_grad and self._unsharded.is_same(slot, value)

    def _lendable(self, slot: int, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor that modules compute with, for a tensor passed for a single call.

        Raises:
            RuntimeError: if the shape is not the parameter's, for example because the tensor is a shard.
        """
        leaf = self._leaves[slot]
        if tensor.shape != leaf.shape or (is_dtensor(tensor) and not is_dtensor(leaf)):
            raise RuntimeError(
                f"{self._places[slot][0].fqn} was given a {type(tensor).__name__} of shape {tuple(tensor.shape)} as "
                "its value (by torch.func.functional_call?): pass an unsharded, plain tensor of shape "
                f"{tuple(leaf.shape)} under the original parameter's name. The model has such tensors inside "
                f"summon_full_params(), or after unshard() under fully_shard. {_TO_EXPORT}"
            )
        return tensor.to(leaf.dtype) if tensor.dtype == self._own_dtype else tensor

    def _show(self, slot: int, module: nn.Module, name: str, tensor: Tensor, *, is_lent: bool) -> None:
        """Show a lent tensor as attribute, or the parameter again."""
        # Callers find all places of a listed parameter themselves. A tensor for an unlisted parameter is shown in all
        # of the parameter's places, except places with another lent tensor.
        at = [place[:2] for place in self._places[slot] if self._at[place[:2]][2] is None]
        self.lent.pop((module, name), None)
        others = [place for place in at if place != (module, name) and not self.lent.get(place)]
        if not is_lent and any(map(self.lent.get, at)):
            others = []
        for each, key in [(module, name), *others]:
            each.__dict__[key] = tensor
        if is_lent:
            self.lent |= {(module, name): True, **dict.fromkeys(others, False)}
            lenders.add(self)
        else:
            for place in others:
                self.lent.pop(place, None)
            if not self.lent:
                lenders.discard(self)

    def refuse_lent(self, what: str, unit: str) -> None:
        """Raise RuntimeError if modules of `unit` compute with tensors passed for a single call."""
        for module, name in self.lent:
            raise RuntimeError(
                f"{unit}: cannot {what}: '{name}' of a {type(module).__name__} was replaced by other tensors for a "
                "computation, and is not restored yet. Do it outside torch.func.functional_call; and assign new values "
                "as attributes (module.weight = nn.Parameter(...)), not in `_parameters`."
            )

    def changed(self) -> list[int]:
        """Return the numbers of the parameters with another tensor in any of their places."""
        leaves, absent = self._leaves, self._absent
        changed = set()
        for place, (attributes, slot, entry) in self._at.items():
            if place not in self.lent:
                module, name = place
                shown, listed = attributes.get(name), module._parameters.get(name)
                is_shown = shown is leaves[slot] or shown is absent[slot]
                if not is_shown or listed is not (leaves[slot] if self.look is Look.COMPUTING else entry):
                    changed.add(slot)
        self.touched = frozenset(changed) or NO_SLOTS
        return sorted(changed)

    def replacement(self, slot: int) -> nn.Parameter:
        """Return the parameter assigned by a user where original number `slot` is used.

        A load with ``assign=True`` assigns a parameter to each place; all of them must be equal.

        Raises:
            ValueError: if no parameter was assigned, or not the same one in all places.
        """
        values = [place.module._parameters.get(place.name) for place in self._places[slot]]
        new = [value for value in values if value is not None and not self._has(value)]
        names = ", ".join(place.fqn for place in self._places[slot])
        if not new:
            raise ValueError(f"{names} was removed, or is no longer a parameter")
        if len(new) < len(values) or not all(_are_equal(value, new[0]) for value in new):
            raise ValueError(f"a parameter was replaced under only some of its names ({names})")
        return new[0]

    def _has(self, value: nn.Parameter) -> bool:
        """Return whether a parameter is one of those that modules list here."""
        if is_ours(value):
            return any(value is param for _, _, param in self.entries)
        return self.look is Look.COMPUTING and any(value is leaf for leaf in self._leaves)

    def assigned(self, slot: int) -> nn.Parameter:
        """Return the `replacement`, between steps.

        Raises:
            ValueError: also if a tie or hooks would be lost, because only the values of the parameter are stored.
        """
        value, name = self.replacement(slot), self._places[slot][0].fqn
        if is_ours(value) or value._backward_hooks or value._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} was replaced by a parameter with gradient hooks, or by one of another place in the model: "
                "register hooks on the sharded model's parameters(), and tie parameters before the first use"
            )
        presentation, other, other_name = _assigned.setdefault(value, (id(self), slot, name))
        if (presentation, other) != (id(self), slot):
            raise ValueError(
                f"{name} was replaced by the new value of {other_name}: tie parameters before the first use"
            )
        return value

    def take_back(self, slots: Sequence[int]) -> None:
        """Remove replacements from the modules. An optimizer that was given a replacement raises an error."""
        for slot in slots:
            note_stale(self.replacement(slot), f"a new value of {self._places[slot][0].fqn}, kept in its shard")
            for module, name, _ in self._places[slot]:
                if self._at[module, name][2] is None:
                    _put(module._parameters, name, None)
        self.touched = self.touched.difference(slots)
        self.enter()


def _are_equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one is other:
        return True
    alike = one.shape == other.shape and one.dtype == other.dtype and MeshPart.of(one) == MeshPart.of(other)
    return alike and not one.is_meta and torch.equal(local_part(one), local_part(other))
