"""Whole parameters in the modules' own places: for summoning, for state dicts, and for loading.

All three are one thing, an `Exposure`: a unit's parameters are gathered into tensors with memory of their own and
registered in the modules as ordinary parameters, so that everything of `nn.Module` (names, hooks, `state_dict`,
`_load_from_state_dict`, in-place changes) works on them as if nothing was wrapped. Closing it keeps this rank's part
of the values, or forgets them. They are not the tensors that the unit computes with, so what a user keeps of them
stays valid memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fsdp._agreement import agree, agree_on_values
from fsdp._blanks import Blank, blanks_in, is_marked, mark
from fsdp._collect import is_ours, note_stale
from fsdp._dtensors import is_dtensor, local_part, spread_loaded, whole
from fsdp._flat_param import ParamInfo
from fsdp._forward import TrainingState
from fsdp._handle import FlatParamHandle
from fsdp._names import FLATTEN_PART, FSDP_PART, clean_name, clean_text
from fsdp._sharing import exported_around, keys_of, settle_shares
from fsdp._unit import Unit, own_modules, units_in


class Exposure:
    """Collective over the unit's ranks. One unit's modules with whole, ordinary parameters, until closed.

    Args:
        keep_changes: shard changed values on closing.
    """

    def __init__(self, unit: Unit, keep_changes: bool) -> None:
        self._unit = unit
        self._keep_changes = keep_changes
        # Not what a unit around this one shows already, which shares it.
        self._handles = self._shown(unit)
        values = [self._values(handle) for handle in self._handles]  # may fail: nothing is changed before
        self._outer_state, unit.state = unit.state, TrainingState.SUMMON_FULL_PARAMS
        unit.buffers.widen()
        self._installed = [
            (handle, slot, param, _version_of(param))
            for handle, tensors in zip(self._handles, values, strict=True)
            for slot, param in enumerate(self._install(handle, tensors))
        ]
        unit.restore_order()

    def close(self) -> None:
        """Shard the values again, changed ones included if they are to be kept.

        Raises:
            RuntimeError: if a parameter was removed, replaced under one of its names only, or has another
                shape. Everything else is kept, and the unit is usable.
        """
        problems: list[str] = []
        for handle, slot in self._changed() if self._keep_changes else ():
            handle.note_written([slot])  # what was only looked at, is as the ranks have wrapped it
        self._installed = []
        for handle in self._handles:
            problems += self._remove(handle)
        self._unit.restore_order()
        if not self._unit.in_full_precision:
            self._unit.buffers.narrow()
        self._unit.state = self._outer_state
        if problems:
            raise RuntimeError(f"{self._unit.name}: these changes could not be kept: " + "; ".join(problems))

    def _install(self, handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
        return _install(handle, tensors)

    def _remove(self, handle: FlatParamHandle) -> list[str]:
        return _remove(handle, self._keep if self._keep_changes else None)

    def _changed(self) -> list[tuple[FlatParamHandle, int]]:
        """Which parameters were written, or replaced."""
        return [
            (handle, slot)
            for handle, slot, param, version in self._installed
            if version is None or listed_at(handle.places[slot][0]) is not param or _version_of(param) != version
        ]

    def _shown(self, unit: Unit) -> list[FlatParamHandle]:
        return [handle for handle in unit.seen if not handle.is_exposed]

    def _values(self, handle: FlatParamHandle) -> list[Tensor]:
        """What to show. Gathered on every rank, since others may have values that are missing here."""
        tensors = handle.full_copies()
        for slot in handle.valueless:
            mark(tensors[slot])
        return tensors

    def _keep(self, handle: FlatParamHandle, slot: int) -> None:
        """Keep what a parameter is now; one that had no values, and got none, goes on having none."""
        value = handle.registry.replacement(slot)
        if slot not in handle.valueless or not is_marked(value):
            handle.keep(slot, value)


def _install(handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    params = []
    for slot, (tensor, places) in enumerate(zip(tensors, handle.places, strict=True)):
        param = nn.Parameter(tensor, handle.requires_grad_each[slot])
        params.append(param)
        note_stale(param, f"a summoned copy of {places[0].fqn}")
        for place in places:
            place.module.__dict__.pop(place.name, None)
            place.module._parameters[place.name] = param
    handle.registry.leave()
    handle.is_exposed = True
    handle.whole.refresh_rnns()
    return params


def _version_of(param: nn.Parameter) -> int | None:
    """How often it was written; None if that is not known, in inference mode."""
    return None if param.is_inference() else param._version


def listed_at(place: ParamInfo) -> nn.Parameter | None:
    """What a module lists there."""
    return place.module._parameters.get(place.name)


def _remove(handle: FlatParamHandle, keep: Callable[[FlatParamHandle, int], None] | None) -> list[str]:
    problems = []
    handle.is_exposed = False
    for slot, places in enumerate(handle.places):
        try:
            if keep is not None:
                keep(handle, slot)
        except ValueError as error:
            problems.append(str(error))
        for place in places:
            place.module._parameters.pop(place.name, None)
    handle.fill_places()
    handle.registry.enter()
    return problems


@contextmanager
def exposed(units: Sequence[Unit], keep_changes: bool) -> Iterator[None]:
    """Collective. The units' modules hold whole parameters inside; also after an exception they are sharded again."""
    exposures: list[Exposure] = []
    try:
        for unit in units:
            exposures.append(Exposure(unit, keep_changes))
        yield
    finally:
        close_all(exposures)


def close_all(exposures: Sequence[Exposure]) -> None:
    """Close every exposure, the last first, and raise the first error afterwards."""
    errors = []
    for exposure in reversed(exposures):
        try:
            exposure.close()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def ensure_agreed(root: Unit) -> None:
    """Collective the first time. The ranks compare what they have before they trust each other's shards."""
    named_units = units_in(root)
    if not all(unit.is_agreed for _, unit in named_units):
        settle_shares(root, named_units, all_inside=False)
        agree(root.everyone, named_units)


def ensure_same_values(root: Unit) -> None:
    """Collective the first time. As `ensure_agreed`, of what the shards were cut from; for who is about to read it."""
    if root.state is not TrainingState.SUMMON_FULL_PARAMS:
        agree_on_values(units_in(root))


def whole_state(
    unit: Unit,
    destination: Any,
    prefix: str,
    keep_vars: bool,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Collective. The `state_dict` of the unit's module with its parameters whole, in tensors of its own.

    Args:
        unit: whose state.
        destination, prefix, keep_vars: as for `nn.Module.state_dict`.
        device: where the tensors should be; None leaves them on the device of computation.
        dtype: of the unit's floating-point parameters; None leaves them in their own.
    """
    summoned = unit.state is TrainingState.SUMMON_FULL_PARAMS
    # Exposed parameters belong to nobody else; buffers do, and so do parameters that are ignored or were summoned.
    others = [param for param in unit.module.parameters() if not is_ours(param)]
    with nullcontext() if summoned else exposed([unit], keep_changes=False):
        with _exporting(unit):
            state = unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not keep_vars:
            live = {local_part(tensor).data_ptr() for tensor in (*others, *unit.module.buffers())}
            _make_whole(state, unit, prefix)
            params = {prefix + key for key in keys_of(unit)}
            left = exported_around(unit)
            moved: dict[Any, Tensor] = {}  # tied tensors stay tied
            for key, value in state.items():
                if key.startswith(prefix) and isinstance(value, Tensor) and value.data_ptr() not in left:
                    wanted = dtype if key in params and value.is_floating_point() else None
                    place = (value.data_ptr(), value.shape, value.stride(), value.dtype, wanted)
                    if place not in moved or value.numel() == 0:
                        moved[place] = _own(value, live, device, wanted)
                    state[key] = moved[place]
    return state


def _make_whole(state: dict[str, Any], unit: Unit, prefix: str) -> None:
    """Collective over their meshes. Whole tensors in the place of `DTensor`s, tied ones once."""
    for handle in unit.handles:
        for places in handle.places:
            names = [prefix + place.fqn for place in places if is_dtensor(state.get(prefix + place.fqn))]
            if names:
                state.update(dict.fromkeys(names, whole(state[names[0]])))
    for key, value in state.items():
        if key.startswith(prefix) and is_dtensor(value):
            state[key] = whole(value)


@contextmanager
def _exporting(unit: Unit) -> Iterator[None]:
    unit.is_exporting = True
    try:
        yield
    finally:
        unit.is_exporting = False


def _own(value: Tensor, live: set[int], device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    moved = value.to(device=device, dtype=dtype) if device or dtype else value
    return moved.clone() if moved.data_ptr() in live else moved


def with_wrapped_metadata(state_dict: Any, root: nn.Module) -> Any:
    """A shallow copy whose version metadata is found under wrapped names too, where torch will look for it."""
    copied = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        wrapped = {name: metadata[clean_name(name)] for name, _ in root.named_modules() if clean_name(name) in metadata}
        copied._metadata = type(metadata)({**metadata, **wrapped})  # type: ignore[attr-defined]
    return copied


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
    """Lets `nn.Module.load_state_dict` load a wrapped module as if it was not, one unit at a time.

    torch walks the module tree and loads each module from the keys under its path. On entering a wrapper, the keys get
    the path parts of the wrapper. On entering it, or a module of its unit that is loaded by itself, the unit's
    parameters are exposed; on leaving it they are sharded again.
    """

    def __init__(self, wrapper: nn.Module, unit: Unit) -> None:
        self._unit = unit
        self._open: list[tuple[nn.Module, Exposure]] = []
        self._blanks: list[Blank] = []  # memory for buffers that had no values
        wrapper.register_load_state_dict_pre_hook(self._add_path_parts)
        wrapper.register_load_state_dict_post_hook(self._clean)
        for module in (wrapper, *own_modules(unit.module)):
            module.register_load_state_dict_pre_hook(self._enter)
            module.register_load_state_dict_pre_hook(spread_loaded)
            module.register_load_state_dict_post_hook(self._leave)

    def _add_path_parts(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._error_msgs = rest[-1]
        inner = f"{prefix}{FSDP_PART}.{FLATTEN_PART}."
        for key in [key for key in state_dict if key.startswith(prefix)] if _adds_path_parts.get() else ():
            if not key.startswith(prefix + FSDP_PART):
                state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)

    def _clean(self, module: nn.Module, incompatible: object) -> None:
        if not _adds_path_parts.get():
            return  # or a key without its path parts would be called missing and unexpected by the same name
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):  # type: ignore[attr-defined]
            keys[:] = [clean_name(key) for key in keys]
        self._error_msgs[:] = [clean_text(message) for message in self._error_msgs]

    def _enter(self, module: nn.Module, *rest: Any) -> None:
        if self._unit.is_local:
            return  # the shards are loaded already
        if self._unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            if self._unit.runtime is not None:
                self._unit.runtime.ensure_idle("load a state dict")
            ensure_agreed(self._unit)
            self._open.append((module, Exposure(self._unit, keep_changes=True)))
            if self._unit.awaits_values:
                self._blanks = blanks_in(own_modules(self._unit.module))
                for blank in self._blanks:
                    blank.give_memory(self._unit.device)
            self._unit.close_loading = self.close

    def _leave(self, module: nn.Module, incompatible: object) -> None:
        if self._open and self._open[0][0] is module:
            self.close()

    def close(self) -> None:
        """Shard what is still exposed, after an exception too."""
        self._unit.close_loading = None
        opened, self._open = self._open, []
        blanks, self._blanks = self._blanks, []
        for blank in blanks:
            blank.keep_if_filled()
        close_all([exposure for _, exposure in opened])
