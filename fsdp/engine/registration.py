"""A handle enters what it runs among the parameters of modules, and notices what users put there instead.

Between passes modules list shards. During forward and backward of a unit its modules list the unsharded parameters, so
that `parameters()` inside of a forward returns the parameters that the module computes with.

Two things are told apart. An assignment (``module.weight = nn.Parameter(...)``) is a new value of the parameter, and is
kept. A tensor that is *lent* for one call, by `torch.func.functional_call` and what is like it, is computed with, gets
the gradients, and leaves the parameter as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.distributed.dtensor import MeshPart, local_part
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.managed_params import is_ours, note_stale

_put = dict.__setitem__  # in a `Listing`, which does not notice it

# What users have assigned, with the place that it was for, while they still hold it.
_assigned: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Listing(dict[str, Any]):
    """A module's ``_parameters`` while handles run some of them: it notices what is lent, and given back.

    `torch.func.functional_call` writes to ``_parameters`` of modules, and writes back what it found; an assignment goes
    through `nn.Module.__setattr__`, which removes the module's attribute first. It is an ordinary dictionary otherwise,
    also for compilers, and is copied and pickled as one.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        # Weakly, or a model would be freed only by the garbage collector.
        self._module = weakref.ref(module)
        self._registries: weakref.WeakValueDictionary[str, Registry] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, module: nn.Module) -> Listing:
        """That of a module, made if it has none."""
        listing = module._parameters
        if not isinstance(listing, cls):
            listing = module.__dict__["_parameters"] = cls(module)
        return listing

    def report_to(self, registry: Registry, name: str) -> None:
        """Tell this registry what is put under a name."""
        self._registries[name] = registry

    def looks_of(self, name: Any) -> Looks | None:
        """Return the handle that runs the parameter of this name; None if there is none."""
        registry = self._registries.get(name)
        return None if registry is None else registry._looks()

    def __setitem__(self, name: str, value: Any) -> None:
        registry, module = self._registries.get(name), self._module()
        if registry is not None and module is not None:
            value = registry.notice(module, name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        registry = self._registries.get(name)
        if registry is not None:
            registry.refuse_removal(self._module(), name)
        super().__delitem__(name)
        module = self._module()
        if name in self._registries and module is not None:
            module.__dict__.pop(name, None)  # as if it was a parameter like others

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Forwarding(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a wrapper, to which names of the wrapped module's own belong as well.

    What is put there under such a name goes to that module. They are not listed twice.

    Args:
        entries: the wrapper's own.
        wrapped: gives the wrapped module.
        kind: ``_parameters`` or ``_buffers``.
    """

    def __init__(self, entries: dict[str, Any], wrapped: Callable[[], nn.Module], kind: str) -> None:
        super().__init__(entries)
        self._wrapped, self._kind = wrapped, kind

    def forwards(self, name: str) -> bool:
        """Return whether a name is the wrapped module's."""
        return not super().__contains__(name) and name in self._wrapped().__dict__[self._kind]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._wrapped().__dict__[self._kind]

    def __missing__(self, name: str) -> Any:
        if self.forwards(name):
            return getattr(self._wrapped(), name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.forwards(name):
            self._wrapped().__dict__[self._kind][name] = value
        else:
            super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Looks(Protocol):
    """The tensors that modules see of parameters, by their numbers."""

    def present(self, slot: int) -> Tensor:
        """Return what they are to see now."""

    def is_own(self, slot: int, value: Any) -> bool:
        """Return whether they may have seen this before."""

    def lendable(self, slot: int, tensor: Tensor) -> Tensor:
        """Return what they can compute with of a tensor that is lent."""


class Registry:
    """The entries of one flat parameter, or of its local shards, in the ``_parameters`` of modules.

    At the places of a parameter that is not listed itself, because a flat one is, modules list None.

    Args:
        places: for each original parameter, where it is used, first the place that names it.
        entries: the modules with the name under which, and the parameter that, each is to list.
        looks: what gives a parameter, by its number, its looks in modules; held weakly. A copy needs another one
            (`wake`).
    """

    def __init__(
        self,
        places: Sequence[Sequence[ParamInfo]],
        entries: Sequence[tuple[nn.Module, str, nn.Parameter]],
        looks: Looks,
    ) -> None:
        self._places = places
        self._looks = weakref.ref(looks)
        self.entries = list(entries)
        self.lent: set[tuple[nn.Module, str]] = set()  # where a tensor is lent
        self._leaves: Sequence[nn.Parameter] | None = None  # listed in the places of the entries, while modules compute
        numbers = {(place.module, place.name): slot for slot, used in enumerate(places) for place in used}
        self._listed = [(numbers[entry[:2]], *entry) for entry in self.entries if entry[:2] in numbers]
        listed = {(module, name): param for module, name, param in self.entries}
        # Where modules list unsharded parameters while they compute: the number of each, and what is listed otherwise.
        self._at = [(*at, slot, listed.get(at)) for at, slot in numbers.items()]
        self._flat = [(*at, param) for at, param in listed.items() if at not in numbers]
        self.enter()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_looks": None, "lent": set(), "_leaves": None}

    def wake(self, looks: Looks) -> None:
        """After it was copied or unpickled, with the modules."""
        self._looks = weakref.ref(looks)
        self.enter()

    @property
    def is_lent(self) -> bool:
        """True if modules see none of it, but tensors that are lent in all of its places."""
        return bool(self.lent) and len(self.lent) == sum(map(len, self._places))

    def add(self, places: Sequence[ParamInfo], param: nn.Parameter) -> None:
        """Have `param`, which is listed elsewhere already, listed at these places too."""
        self.entries += [(place.module, place.name, param) for place in places]
        self._listed += [(0, place.module, place.name, param) for place in places]
        self._at += [(place.module, place.name, 0, param) for place in places]
        self.enter()

    def enter(self) -> None:
        """Have the modules list the entries, and tell what else is put there."""
        for module, name, param in self.entries:
            Listing.of(module).report_to(self, name)
            module._parameters.update({name: param})  # which, unlike an item that is set, is not told
        for places in self._places:
            for place in places:
                Listing.of(place.module).report_to(self, place.name)
                place.module._parameters.setdefault(place.name, None)
        if self._leaves is not None:  # in the middle of a pass
            leaves, self._leaves = self._leaves, None
            self.list_leaves(leaves)

    def list_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        """List these unsharded parameters in the modules, and no flat parameter, until `list_shards`."""
        if self._leaves is leaves:
            return
        self._leaves, lent = leaves, self.lent
        for module, name, slot, _ in self._at:
            if not lent or (module, name) not in lent:
                _put(module._parameters, name, leaves[slot])
        for module, name, _ in self._flat:
            _put(module._parameters, name, None)

    def list_shards(self) -> None:
        """List the entries again. A parameter that a user assigned in between stays."""
        leaves, self._leaves = self._leaves, None
        if leaves is None:
            return
        for module, name, slot, listed in self._at:
            if module._parameters.get(name) is leaves[slot]:
                _put(module._parameters, name, listed)
        for module, name, flat_param in self._flat:
            _put(module._parameters, name, flat_param)

    def leave(self) -> None:
        """Undo `enter`."""
        self.lent.clear()
        for module, name, param in self.entries:
            if module._parameters.get(name) is param:
                module._parameters.pop(name)
        for places in self._places:
            for place in places:
                if place.module._parameters.get(place.name, place) is None:
                    place.module._parameters.pop(place.name)

    def notice(self, module: nn.Module, name: str, value: Any) -> Any:
        """Something is being put where we list what is ours, by an assignment or for one call.

        Returns:
            What is to be listed there.

        Raises:
            RuntimeError: for what modules cannot compute with.
        """
        entry = next((param for own, known_as, param in self.entries if own is module and known_as == name), None)
        looks = self._looks()
        if looks is None:
            return value
        slot = next((slot for slot, used in enumerate(self._places) if (module, name) in [x[:2] for x in used]), None)
        if slot is None:
            if value is not entry:
                raise RuntimeError(
                    f"'{name}' of {type(module).__name__} is a flat parameter, made of many: nothing can be put in its "
                    "place. Assign unsharded tensors to the original parameters, or pass them to "
                    "torch.func.functional_call under those names; or change values inside "
                    "`with model.summon_full_params():`."
                )
        elif (value is entry or looks.is_own(slot, value)) and (
            (module, name) in self.lent or (value is not None and name not in module.__dict__)
        ):  # what was lent is given back; or what modules see is assigned again, as by a function that ties weights
            self._show(slot, module, name, looks.present(slot), is_lent=False)
            return entry if self._leaves is None else self._leaves[slot]
        elif value is None:
            module.__dict__.pop(name, None)  # removed
        elif name in module.__dict__ and value is not entry:
            self._show(slot, module, name, looks.lendable(slot, value), is_lent=True)
        return value

    def _show(self, slot: int, module: nn.Module, name: str, tensor: Tensor, *, is_lent: bool) -> None:
        """Have modules see a tensor that is lent, or again what is ours."""
        places = [(place.module, place.name) for place in self._places[slot]]
        if any(listed == slot for listed, *_ in self._listed):
            places = [(module, name)]  # whoever wants a tied one in its other places too finds it listed there
        for at in places:
            at[0].__dict__[at[1]] = tensor
        if is_lent:
            self.lent.update(places)
        else:
            self.lent.difference_update(places)

    def replacement(self, slot: int) -> nn.Parameter:
        """The parameter that a user has assigned where original number `slot` is used.

        A load with ``assign=True`` assigns one to each of its places; they must be equal.

        Raises:
            ValueError: if there is none, or not the same one in all places.
        """
        ours = [*(param for _, _, param in self.entries), *(self._leaves or ())]
        values = [place.module._parameters.get(place.name) for place in self._places[slot]]
        new = [value for value in values if value is not None and all(value is not param for param in ours)]
        names = ", ".join(place.fqn for place in self._places[slot])
        if not new:
            raise ValueError(f"{names} was removed, or is no parameter any more")
        if len(new) < len(values) or not all(_are_equal(value, new[0]) for value in new):
            raise ValueError(f"a parameter was replaced under only some of its names ({names})")
        return new[0]

    def refuse_removal(self, module: nn.Module | None, name: str) -> None:
        """Raise RuntimeError if a parameter is taken out of its module while it is sharded, as by weight norm."""
        # Inside of its unit's forward a parameter is a leaf, and a parametrization is for that forward alone.
        if self._leaves is None and (module, name) in [at[:2] for at in self._at]:
            raise RuntimeError(
                f"'{name}' of this {type(module).__name__} is sharded, and cannot be computed from other parameters "
                "any more. Apply weight norm, spectral norm, pruning and other parametrizations before sharding."
            )

    def refuse_lent(self, what: str, unit: str) -> None:
        """Raise RuntimeError if modules of `unit` compute with tensors that were given for one call."""
        for module, name in self.lent:
            raise RuntimeError(
                f"{unit}: cannot {what}: '{name}' of a {type(module).__name__} was given other tensors to compute "
                "with, which have not been taken back. Do it outside of torch.func.functional_call; and assign new "
                "values as attributes (module.weight = nn.Parameter(...)), not in `_parameters`."
            )

    def missing(self) -> list[int]:
        """The numbers of the parameters in one of whose places an entry of ours should be listed, and is not."""
        return [
            slot
            for slot, module, name, param in self._listed
            if module._parameters.get(name) is not (param if self._leaves is None else self._leaves[slot])
            and (module, name) not in self.lent
        ]

    def assigned(self, slot: int) -> nn.Parameter:
        """Return the `replacement`, between steps.

        Raises:
            ValueError: besides, if a tie or hooks would be lost: of the parameter, only the values are kept.
        """
        value, name = self.replacement(slot), self._places[slot][0].fqn
        if is_ours(value) or value._backward_hooks or value._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} was given a parameter with gradient hooks, or one that the model has elsewhere: hooks are for "
                "what the sharded model lists, and ties must be made before the first use"
            )
        registry, other, other_name = _assigned.setdefault(value, (id(self), slot, name))
        if (registry, other) != (id(self), slot):
            raise ValueError(f"{name} was given the new value of {other_name}: ties must be made before the first use")
        return value

    def withdraw(self, slots: Sequence[int]) -> None:
        """Take replacements out of the modules; an optimizer that was given one will say so."""
        for slot in slots:
            note_stale(self.replacement(slot), f"a new value of {self._places[slot][0].fqn}, kept in its shard")
        for slot in slots:
            for place in self._places[slot]:
                if not any(place.module is module and place.name == name for _, module, name, _ in self._listed):
                    place.module._parameters.pop(place.name, None)
        self.enter()


class Contents:
    """The modules and parameters that the modules of a tree hold.

    Each forward in training asks whether these are others now, so the loops run in C. Modules may get other
    dictionaries (`nn.Sequential` does when a part of it is deleted): they are looked up each time.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module.__dict__ for module in root.modules()]
        self._held = self._look()

    def _look(self) -> tuple[list[Any], list[str]]:
        children = map(dict.values, filter(None, map(itemgetter("_modules"), self._modules)))
        params = filter(None, map(itemgetter("_parameters"), self._modules))
        return list(chain.from_iterable(children)), list(chain.from_iterable(params))

    def have_changed(self) -> bool:
        """Return whether a module or a parameter was put into one of the modules since, or taken out."""
        return self._look() != self._held


def _are_equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one is other:
        return True
    alike = one.shape == other.shape and one.dtype == other.dtype and MeshPart.of(one) == MeshPart.of(other)
    return alike and not one.is_meta and torch.equal(local_part(one), local_part(other))
