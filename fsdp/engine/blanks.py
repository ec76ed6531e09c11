"""Memory that waits for values: what is on the meta device gets some, and it is found out whether values came.

That is told by a mark, a value that no initialisation gives all of a tensor: so whatever was written is seen, also
through ``.data``, which leaves no other trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.engine.managed_params import is_ours

Place = tuple[nn.Module, str]

# Memory that `to_empty` gave, with its version then, until values are found in it.
_empty: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark(tensor: Tensor) -> None:
    """Fill memory that has no values yet with what `is_marked` knows again."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max)


def is_marked(tensor: Tensor) -> bool:
    """Whether nothing was written to any element since `mark`. Of booleans there is no telling: it says so."""
    flat = tensor.detach().reshape(-1)
    # The first element says no in most cases, and costs nothing.
    return flat.numel() > 0 and bool(_marks(flat[:1]).all()) and bool(_marks(flat).all())


def _marks(flat: Tensor) -> Tensor:
    if flat.is_floating_point() or flat.is_complex():
        return torch.isnan(flat.float() if flat.dtype.itemsize == 1 else flat)
    if flat.dtype is torch.bool:
        return torch.ones_like(flat)
    return flat == (torch.iinfo(flat.dtype).min or torch.iinfo(flat.dtype).max)


def note_empty(tensor: Tensor) -> Tensor:
    """Remember that memory waits for values, and return it."""
    mark(tensor)
    _empty[tensor] = tensor._version
    return tensor


def _waits(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True
    version = _empty.get(tensor)
    if version is None:
        return False
    if tensor._version == version if tensor.dtype is torch.bool else is_marked(tensor):
        return True
    del _empty[tensor]
    return False


class Blank:
    """A parameter or buffer that modules list themselves and that is on the meta device, or was until `to_empty`.

    Args:
        tensor: what is there.
        places: all that list it, of parameters or of buffers.
    """

    def __init__(self, tensor: Tensor, places: list[Place]) -> None:
        self.places = places
        self._before = tensor
        self._given = tensor
        self._version = 0

    @property
    def value(self) -> Tensor | None:
        """What is in the first of its places now."""
        module, name = self.places[0]
        return module._parameters.get(name, module._buffers.get(name))

    @torch.inference_mode(False)  # or what is made in inference could not be used in training
    def give_memory(self, device: torch.device) -> None:
        """Put marked memory into all of its places."""
        made = torch.empty_like(self._before, device=device, requires_grad=False)
        is_parameter = isinstance(self._before, nn.Parameter)
        self._given = nn.Parameter(made, self._before.requires_grad) if is_parameter else made
        mark(self._given)
        self._version = self._given._version
        self.put(self._given)

    def put(self, value: Tensor) -> None:
        """Have `value` in all of its places."""
        for module, name in self.places:
            setattr(module, name, value)  # which also reaches the lists that recurrent modules keep

    @property
    def is_filled(self) -> bool:
        """Whether values came since it got memory."""
        value, given = self.value, self._given
        if value is None or value.is_meta:
            return False
        if value.dtype is torch.bool:
            return value is not given or value._version != self._version
        # Not the version: batch norms load their count of batches from itself where a state dict has none.
        return value.numel() == 0 or not is_marked(value)

    def take_back(self) -> None:
        """Undo `give_memory`."""
        self.put(self._before)

    def keep_if_filled(self) -> None:
        """Leave the values there, or what was there before if none came."""
        value = self.value
        if value is not None and self.is_filled:
            self.put(value)
        else:
            self.take_back()


def blanks_in(modules: Iterable[nn.Module]) -> list[Blank]:
    """What the modules list themselves and has no values, each once."""
    found: dict[int, Blank] = {}
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or is_ours(tensor) or not _waits(tensor):
                continue
            found.setdefault(id(tensor), Blank(tensor, [])).places.append((module, name))
    return list(found.values())
