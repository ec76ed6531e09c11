"""What has no values yet, while an initialisation gives it some."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp.engine.blanks import Blank, blanks_in, is_marked
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import is_ours
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.unit import Unit

Entry = tuple[dict[str, Tensor | None], str, Tensor]  # what a module lists, and under which name


class Lack:
    """A parameter or buffer without values, while it is given some.

    Args:
        places: all modules that have it, with the name there; the first is to initialise it.
        handle, slot: what holds it, for a unit's parameter.
        blank: for what modules list themselves.
    """

    def __init__(
        self,
        places: list[tuple[nn.Module, str]],
        handle: FlatParamHandle | None = None,
        slot: int = 0,
        blank: Blank | None = None,
    ) -> None:
        self.places = places
        self.handle, self.slot = handle, slot
        self._blank = blank
        self._shape = torch.Size()

    @property
    def name(self) -> str:
        """In the module that is to initialise it."""
        return self.places[0][1]

    @property
    def value(self) -> Tensor | None:
        module, name = self.places[0]
        return module._parameters.get(name, module._buffers.get(name))

    @property
    def address(self) -> int | None:
        value = self.value
        is_here = value is not None and not is_ours(value) and not isinstance(value, Placeholder)
        return value.data_ptr() if value is not None and is_here else None

    def give_memory(self, device: torch.device) -> None:
        """A unit's parameters have it already."""
        if self._blank is not None:
            self._blank.places = self.places
            self._blank.give_memory(device)
        value = self.value
        self._shape = value.shape if value is not None else torch.Size()

    def check(self, module: str) -> None:
        """Raise unless there are values now; `module` was to bring them."""
        value = self.value
        if value is None:
            raise RuntimeError(f"{module}: its initialisation removed {self.name}")
        if value.shape != self._shape:
            raise ValueError(
                f"{module}: its initialisation gave {self.name} the shape {tuple(value.shape)}; it is "
                f"{tuple(self._shape)} in the model that was wrapped"
            )
        is_left = value.is_meta or (is_marked(value) if self._blank is None else not self._blank.is_filled)
        if is_left and value.numel():
            where = "on the meta device" if value.is_meta else "without values"
            raise RuntimeError(
                f"{module}: its initialisation left {self.name} {where}. Give a param_init_fn that initialises every "
                "parameter and buffer that is directly in the module that it is called with."
            )

    def settle(self) -> None:
        """Have what was assigned in the first place in the others, too."""
        value = self.value
        for module, name in self.places[1:]:
            entries = module._parameters if name in module._parameters else module._buffers
            if value is not None and entries.get(name) is not value:
                setattr(module, name, value)

    def take_back(self) -> None:
        """Undo `give_memory`."""
        if self._blank is not None:
            self._blank.take_back()


def lacks_in(modules: Sequence[nn.Module], units: Sequence[Unit]) -> Iterator[Lack]:
    """All that has no values: of what the units took, and of what the modules list."""
    for unit in units:
        for handle in unit.own:
            handle.absorb()  # what users have assigned has values
            for slot in sorted(handle.valueless):
                yield Lack([_at(place) for place in handle.places[slot]], handle, slot)
    for blank in blanks_in(modules):
        yield Lack(list(blank.places), blank=blank)


def _at(place: ParamInfo) -> tuple[nn.Module, str]:
    return place.module, place.name


def others_in(module: nn.Module, lacks: Sequence[Lack], below: Sequence[Lack], scratch: Collection[int]) -> list[Entry]:
    """Where an initialisation of `module` may find values that are not its to change: in itself and below.

    What children were given just now it may change, but not what it has in common with another module.

    Args:
        module: is to initialise `lacks`.
        lacks, below: what it gives values to, and what modules inside of it were given before.
        scratch: ids of parameters that will be forgotten anyway.
    """
    own = {id(lack.value) for lack in lacks} | set(scratch)
    drawn = {id(lack.value) for lack in below} | own
    found = []
    for inner in module.modules():
        entries: dict[str, Tensor | None]
        for entries in (inner._parameters, inner._buffers):  # type: ignore[assignment]
            for name, tensor in entries.items():
                if tensor is None or tensor.is_meta or is_ours(tensor):
                    continue
                if id(tensor) not in (own if inner is module else drawn):
                    found.append((entries, name, tensor))
    return found


@contextmanager
def out_of_reach(places: Sequence[Entry]) -> Iterator[None]:
    """Copies in the place of tensors."""
    for entries, name, tensor in places:
        copy = tensor.detach().clone()
        entries[name] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    try:
        yield
    finally:
        for entries, name, tensor in places:
            entries[name] = tensor
