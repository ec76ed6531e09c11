"""`Loading` loads unsharded values in ``load_state_dict`` of a wrapper, or of a module around or inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fsdp.distributed.dtensor import spread_loaded
from fsdp.engine.names import FLATTEN_PART, FSDP_PART, clean_name, clean_text
from fsdp.engine.unit import TrainingState, Unit, own_modules
from fsdp.layers.state_requests import LocalState

_adds_path_parts: ContextVar[bool] = ContextVar("_adds_path_parts", default=True)


@contextmanager
def no_pre_load_state_dict_hook() -> Iterator[None]:
    """Make ``load_state_dict`` accept only raw names inside the context, which include the wrappers' path parts.

    Use it for a state dict not created by a wrapper, for example ``dict(model.named_parameters())``. Outside
    the context, raw names are accepted as well, and path parts are added to plain names. FairScale's name.
    """
    token = _adds_path_parts.set(False)
    try:
        yield
    finally:
        _adds_path_parts.reset(token)


class Loading:
    """Hooks with which `nn.Module.load_state_dict` loads a wrapped module like an unwrapped module, unit by unit.

    torch iterates over the module tree and loads each module from the keys under its path. At the beginning of a
    wrapper, the wrapper's path parts are added to the keys. At the beginning of a wrapper, or of a separately loaded
    module of its unit, the unit's parameters are exposed, unless the complete load is recorded. At the end they are
    resharded.
    """

    def __init__(self, wrapper: nn.Module, unit: Unit) -> None:
        self._unit = unit
        self._entered: nn.Module | None = None
        self._exit: ExitStack | None = None  # the contexts that were entered with that module
        wrapper.register_load_state_dict_post_hook(self._end)
        listing = {place.module for handle in unit.handles for used in handle.places for place in used}
        for module in own_modules(unit.module):
            if isinstance(module, torch.jit.ScriptModule):
                continue  # does not support such hooks, and contains no parameters of the unit
            # Wrappers of inner units usually list no parameters of this unit.
            if module in listing or {FSDP_PART, FLATTEN_PART}.isdisjoint(module._modules):
                unit.hooks += [
                    module.register_load_state_dict_pre_hook(self._enter),
                    module.register_load_state_dict_post_hook(self._leave),
                ]

    def begin(self, wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Begin the load of the unit at its first module, the wrapper."""
        self._add_path_parts(state_dict, prefix, *rest)
        self._enter(wrapper, state_dict, prefix, *rest)

    def _end(self, wrapper: nn.Module, incompatible: object) -> None:
        self._clean(incompatible)
        self._leave(wrapper, incompatible)

    def _add_path_parts(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        *_, missing, unexpected, self._error_msgs = rest
        # Keys and errors of modules outside are not cleaned here: they may be many, and their own hooks clean them.
        self._known = len(missing), len(unexpected), len(self._error_msgs)
        inner = f"{prefix}{FSDP_PART}.{FLATTEN_PART}."
        for key in [key for key in state_dict if key.startswith(prefix)] if _adds_path_parts.get() else ():
            if not key.startswith(prefix + FSDP_PART):
                state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)

    def _clean(self, incompatible: object) -> None:
        if not _adds_path_parts.get():
            return  # otherwise a key without path parts would be missing and unexpected under the same name
        lists = incompatible.missing_keys, incompatible.unexpected_keys  # type: ignore[attr-defined]
        for keys, known in zip(lists, self._known, strict=False):
            keys[known:] = [clean_name(key) for key in keys[known:]]
        *_, known = self._known
        self._error_msgs[known:] = [clean_text(message) for message in self._error_msgs[known:]]

    def _enter(self, module: nn.Module, *rest: Any) -> None:
        # Otherwise shards are loaded, or the modules already list the parameters to be written.
        if not self._unit.request(LocalState) and self._unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            self._expose(module)
        if any(any(handle.flat_param.packings) for handle in self._unit.visible_handles):
            from fsdp.layers.packed_params import join_loaded  # only for quantised and integer parameters

            join_loaded(self._unit, module, *rest)
        spread_loaded(module, *rest)

    def _expose(self, module: nn.Module) -> None:
        unit = self._unit
        if unit.runtime is not None:
            unit.runtime.ensure_idle("load a state dict")
        self._entered, unit.unfinished_load = module, self.close
        from fsdp.layers.state_dict.full import loading_in_place  # only for a load

        self._exit = self._exit or ExitStack()
        self._exit.enter_context(loading_in_place(unit))

    def _leave(self, module: nn.Module, incompatible: object) -> None:
        if self._entered is module:
            self.close()

    def close(self) -> None:
        """Reshard the parameters that are still exposed, even after an exception."""
        self._unit.unfinished_load = self._entered = None
        opened, self._exit = self._exit, None
        if opened is not None:
            opened.close()
