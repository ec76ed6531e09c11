"""`UnitStates`: the state of an optimizer, divided into parts corresponding to flat parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.parked_tensors import Named, addresses
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit, units_in
from fsdp.optim_utils.owned import OwnedOptimizer
from fsdp.optim_utils.state import groups_of
from fsdp.state_dict_utils.stager import tensors_in

# The optimizers of torch that update each parameter using only its gradient, state and options, so that multiple calls
# for different parameters compute the same bits. Other optimizers may use norms over all parameters, or count calls.
_NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"
BY_PARAMETER = frozenset(getattr(torch.optim, name) for name in _NAMES.split())


class UnitStates:
    """The state of an optimizer in parts: one for each flat parameter, and one for all other state and options.

    If an optimizer is not in `BY_PARAMETER`, or tensors of multiple units share memory, the latter contains all state.
    `start` is the prefix of the tensors' names.

    Attributes:
        handles: the handle of each part's flat parameter; None for the part with all other state.
    """

    def __init__(self, root: Unit, optimizer: torch.optim.Optimizer, start: str) -> None:
        self._root, self._optimizer, self._start = root, optimizer, start
        self.is_divided = type(optimizer) in BY_PARAMETER
        self.divide()
        if self.is_divided:
            found = [addresses(self.named(handle)) for handle in self.handles]
            self.is_divided = sum(map(len, found)) == len(set().union(*found))
            if not self.is_divided:
                self.divide()

    def divide(self) -> None:
        """Divide the state by the optimizer's current parameters."""
        groups = groups_of(self._optimizer)
        owners: dict[int, FlatParamHandle] = {}
        for unit in units_in(self._root) if self.is_divided else ():
            owners.update((id(param), handle) for handle in unit.handles for param in handle.listed_params)
        # The parameters of each part, for each group of the optimizer.
        self.params: dict[FlatParamHandle | None, list[list[Any]]] = {}
        for number, group in enumerate(groups):
            for param in group["params"]:
                empty: list[list[Any]] = [[] for _ in groups]
                self.params.setdefault(owners.get(id(param)), empty)[number].append(param)
        self.params.setdefault(None, [[] for _ in groups])
        self._numbers = {id(param): str(place) for place, param in enumerate(self._listed)}

    @property
    def handles(self) -> list[FlatParamHandle | None]:
        return list(self.params)

    @property
    def _listed(self) -> list[Any]:
        return [param for group in groups_of(self._optimizer) for param in group["params"]]

    def named(self, handle: FlatParamHandle | None) -> Iterator[Named]:
        state = self._optimizer.state
        own = [param for params in self.params.get(handle, ()) for param in params]
        fields = [(self._numbers[id(param)], state[param]) for param in own if param in state]
        if handle is None:
            if isinstance(self._optimizer, OwnedOptimizer):  # owners have copies of parameters
                yield from ((f"{self._start}{place}.param", param) for place, param in enumerate(self._listed))
            fields += [("other", held) for param, held in state.items() if id(param) not in self._numbers]
            for place, group in enumerate(self._optimizer.param_groups):
                options = {key: tensors_in(value) for key, value in group.items() if key != "params"}
                # Numbers stay in memory: schedulers read and write them.
                fields.append((f"group {place}", {key: [*filter(Tensor.dim, each)] for key, each in options.items()}))
        for name, held in fields:
            for key, value in held.items() if isinstance(held, dict) else [("state", held)]:
                yield from ((f"{self._start}{name}.{key}", tensor) for tensor in tensors_in(value))
