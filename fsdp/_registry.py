"""What modules list among their parameters while a handle runs them, and what users have put there instead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp._collect import is_ours, note_stale
from fsdp._flat_param import ParamInfo

# What users have assigned, with the place that it was for, while they still hold it.
_assigned: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Registry:
    """The entries of one flat parameter, or of its pieces, in the ``_parameters`` of modules.

    Args:
        places: for each original parameter, where it is used, first the place that names it.
        entries: the modules with the name under which, and the parameter that, each is to list.
    """

    def __init__(
        self, places: Sequence[Sequence[ParamInfo]], entries: Sequence[tuple[nn.Module, str, nn.Parameter]]
    ) -> None:
        self._places = places
        self.entries = list(entries)
        numbers = {(place.module, place.name): slot for slot, used in enumerate(places) for place in used}
        self._listed = [(numbers[entry[:2]], *entry) for entry in self.entries if entry[:2] in numbers]
        self.enter()

    @property
    def params(self) -> list[nn.Parameter]:
        """What optimizers see, each once."""
        return list(dict.fromkeys(param for _, _, param in self.entries))

    def add(self, places: Sequence[ParamInfo], param: nn.Parameter) -> None:
        """Have `param`, which is listed elsewhere already, listed at these places too."""
        self.entries += [(place.module, place.name, param) for place in places]
        self._listed += [(0, place.module, place.name, param) for place in places]
        self.enter()

    def enter(self) -> None:
        """Have the modules list the entries."""
        for module, name, param in self.entries:
            module._parameters[name] = param

    def leave(self) -> None:
        """Undo `enter`."""
        for module, name, param in self.entries:
            if module._parameters.get(name) is param:
                del module._parameters[name]

    def replacement(self, slot: int) -> nn.Parameter:
        """The parameter that a user has assigned where original number `slot` is used.

        Raises:
            ValueError: if there is none, or not the same one in all places.
        """
        ours = [param for _, _, param in self.entries]
        values = [place.module._parameters.get(place.name) for place in self._places[slot]]
        new = [value for value in values if value is not None and all(value is not param for param in ours)]
        names = ", ".join(place.fqn for place in self._places[slot])
        if not new:
            raise ValueError(f"{names} was removed, or is no parameter any more")
        if any(value is not new[0] for value in values):
            raise ValueError(f"a parameter was replaced under only some of its names ({names})")
        return new[0]

    def missing(self) -> list[int]:
        """The numbers of the parameters in one of whose places an entry of ours should be listed, and is not."""
        return [slot for slot, module, name, param in self._listed if module._parameters.get(name) is not param]

    def assigned(self, slot: int) -> nn.Parameter:
        """As `replacement`, between steps.

        Raises:
            ValueError: besides, if a tie or hooks would be lost: of the parameter, only the values are kept.
        """
        value, name = self.replacement(slot), self._places[slot][0].fqn
        if is_ours(value) or value._backward_hooks or value._post_accumulate_grad_hooks:
            raise ValueError(f"{name} was given a parameter with gradient hooks, or one that the model has elsewhere")
        registry, other, other_name = _assigned.setdefault(value, (id(self), slot, name))
        if (registry, other) != (id(self), slot):
            raise ValueError(f"{name} was given the new value of {other_name}: ties must be made before wrapping")
        return value

    def withdraw(self, slots: Sequence[int]) -> None:
        """Take replacements out of the modules; an optimizer that was given one will say so."""
        for slot in slots:
            note_stale(self.replacement(slot), f"a new value of {self._places[slot][0].fqn}, kept in its shard")
        for slot in slots:
            for place in self._places[slot]:
                if not any(place.module is module and place.name == name for _, module, name, _ in self._listed):
                    del place.module._parameters[place.name]
        self.enter()
