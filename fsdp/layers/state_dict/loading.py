"""`Loading` lets ``load_state_dict`` of a wrapper, or of a module around or inside of it, load unsharded values."""

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
    """Inside, ``load_state_dict`` takes raw names only, with the wrappers' path parts, and adds none to plain ones.

    For a state dict that no wrapper made, such as ``dict(model.named_parameters())`` of a tool that knows them. Keys
    with path parts are taken as they are outside of it as well. FairScale's name.
    """
    token = _adds_path_parts.set(False)
    try:
        yield
    finally:
        _adds_path_parts.reset(token)


class Loading:
    """Lets `nn.Module.load_state_dict` load a wrapped module like an unwrapped module, a unit at a time.

    torch iterates over the module tree and loads each module from the keys under its path. At the beginning of a
    wrapper, the keys get the path parts of the wrapper. At the beginning of a wrapper, or of a module of its unit that
    is loaded by itself, the unit's parameters are exposed, unless the complete load is recorded; at the end they are
    sharded again.
    """

    def __init__(self, wrapper: nn.Module, unit: Unit) -> None:
        self._unit = unit
        self._entered: nn.Module | None = None
        self._exit: ExitStack | None = None  # ends what began when that was entered
        wrapper.register_load_state_dict_post_hook(self._end)
        listing = {place.module for handle in unit.handles for used in handle.places for place in used}
        for module in own_modules(unit.module):
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no such hooks, and has no parameters of the unit
            # Wrappers of inner units list no parameters of this one, as a rule.
            if module in listing or {FSDP_PART, FLATTEN_PART}.isdisjoint(module._modules):
                unit.hooks += [
                    module.register_load_state_dict_pre_hook(self._enter),
                    module.register_load_state_dict_post_hook(self._leave),
                ]

    def begin(self, wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The wrapper takes its part of a state dict, as the first module of the unit."""
        self._add_path_parts(state_dict, prefix, *rest)
        self._enter(wrapper, state_dict, prefix, *rest)

    def _end(self, wrapper: nn.Module, incompatible: object) -> None:
        self._clean(incompatible)
        self._leave(wrapper, incompatible)

    def _add_path_parts(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        *_, missing, unexpected, self._error_msgs = rest
        # What modules outside of this one have reported: theirs are to clean, and they may be many.
        self._known = len(missing), len(unexpected), len(self._error_msgs)
        inner = f"{prefix}{FSDP_PART}.{FLATTEN_PART}."
        for key in [key for key in state_dict if key.startswith(prefix)] if _adds_path_parts.get() else ():
            if not key.startswith(prefix + FSDP_PART):
                state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)

    def _clean(self, incompatible: object) -> None:
        if not _adds_path_parts.get():
            return  # or a key without its path parts would be called missing and unexpected by the same name
        lists = incompatible.missing_keys, incompatible.unexpected_keys  # type: ignore[attr-defined]
        for keys, known in zip(lists, self._known, strict=False):
            keys[known:] = [clean_name(key) for key in keys[known:]]
        *_, known = self._known
        self._error_msgs[known:] = [clean_text(message) for message in self._error_msgs[known:]]

    def _enter(self, module: nn.Module, *rest: Any) -> None:
        # Otherwise the shards are loaded already, or what is to be written is listed.
        if not self._unit.request(LocalState) and self._unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            self._expose(module)
        if any(any(handle.flat_param.packings) for handle in self._unit.visible_handles):
            from fsdp.layers.packed_params import join_loaded  # for quantised and integer parameters

            join_loaded(self._unit, module, *rest)
        spread_loaded(module, *rest)

    def _expose(self, module: nn.Module) -> None:
        unit = self._unit
        if unit.runtime is not None:
            unit.runtime.ensure_idle("load a state dict")
        self._entered, unit.unfinished_load = module, self.close
        from fsdp.layers.state_dict.full import loading_in_place  # which nothing but a load needs

        self._exit = self._exit or ExitStack()
        self._exit.enter_context(loading_in_place(unit))

    def _leave(self, module: nn.Module, incompatible: object) -> None:
        if self._entered is module:
            self.close()

    def close(self) -> None:
        """Shard the parameters that are still exposed, even after an exception."""
        self._unit.unfinished_load = self._entered = None
        opened, self._exit = self._exit, None
        if opened is not None:
            opened.close()
