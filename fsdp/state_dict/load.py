"""Loading a state dict as if nothing was wrapped: every rank its own, or all of them the first one's.

torch's own walk over the modules does it, twice. The first time there are only shapes, in the model and in the state
dict, so that one which does not fit changes nothing. In the second, each unit's parameters remember what is copied into
them, and when the walk leaves the unit's module every rank keeps its part of that. So nothing is gathered, and there is
no copy of whole parameters; but for modules whose own load hooks or methods might read or write them, there is.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import is_dtensor, spread_loaded
from fsdp.engine.agreement import agree_on_outcome, from_everyone, number_among, peers_answer
from fsdp.engine.blanks import Blank, blanks_in
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import is_ours
from fsdp.engine.names import FLATTEN_PART, FSDP_PART, clean_name, clean_text, foreign_prefix, prefix_problem
from fsdp.engine.state_requests import FirstRank, LoadPass, loading
from fsdp.engine.unit import TrainingState, Unit, own_modules, units_in
from fsdp.state_dict.awaiting import Awaiting
from fsdp.state_dict.exposure import Exposure, close_all, deal_changes, install, listed_at
from fsdp.state_dict.first_rank import received
from fsdp.state_dict.full import ensure_agreed
from fsdp.state_dict.redistribute import blanks, shapes_of

Walk = Callable[..., Any]  # `nn.Module.load_state_dict` of a wrapper


def load_whole(
    wrapper: nn.Module, unit: Unit, walk: Walk, state_dict: Mapping[str, Any], strict: bool, rank0_only: bool
) -> Any:
    """Collective. Load a whole state dict into a wrapper.

    Args:
        wrapper: to be loaded.
        unit: its own.
        walk: torch's way to load it.
        state_dict, strict: as for `nn.Module.load_state_dict`.
        rank0_only: only the first rank's state dict counts.

    Raises:
        RuntimeError: if it does not fit, on every rank; nothing was changed then, unless modules have load hooks or
            methods of their own. If another rank failed.
    """
    source = FirstRank(unit.everyone) if rank0_only else None
    if source is not None:
        state_dict = received(source, wrapper, unit, state_dict)
    read = _agree_to_read(unit, _misfit(wrapper, unit, walk, state_dict, strict))
    result, error = None, None
    with loading(unit, LoadPass(read=read, source=source)):
        try:
            result = walk(with_wrapped_metadata(state_dict, wrapper), strict=strict)
        except Exception as found:  # noqa: BLE001 - all ranks are told of it first
            explain(found, unit.module, state_dict)
            error = found
        try:
            if source is not None:
                source.finish(error)
            else:
                agree_on_outcome([unit.everyone], "load its state dict", error)
        finally:
            _close_loads(unit)
    if error is not None:
        raise error
    return result


def _misfit(wrapper: nn.Module, unit: Unit, walk: Walk, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """What torch has to say against the state dict; None also if only loading it could tell."""
    others = (tensor for module in wrapper.modules() for tensor in _unsharded(module).values())
    if any(map(is_customised, wrapper.modules())) or any(map(is_dtensor, others)):
        return None
    shapes = OrderedDict((key, _shape(value)) for key, value in state_dict.items())
    shapes._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
    with loading(unit, LoadPass(is_trial=True)), _without_values(wrapper, unit):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is no matter of shapes is told when values are loaded
                walk(with_wrapped_metadata(shapes, wrapper), strict=strict)
        except Exception as error:  # noqa: BLE001 - all ranks are told of it
            explain(error, unit.module, state_dict)
            return error
        finally:
            _close_loads(unit)
    return None


def _shape(value: Any) -> Any:
    is_plain = type(value) in (Tensor, nn.Parameter)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_plain else value


@contextmanager
def _without_values(wrapper: nn.Module, unit: Unit) -> Iterator[None]:
    """What is not sharded is on the meta device inside, and extra state is nowhere."""
    for _, each in units_in(unit):
        each.buffers.widen()
    before = [(module._parameters, module._buffers, _unsharded(module)) for module in wrapper.modules()]
    for params, buffers, tensors in before:
        for name, tensor in tensors.items():
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if name in params:
                params[name] = nn.Parameter(shape, tensor.requires_grad)
            else:
                buffers[name] = shape
    extra = [module for module in wrapper.modules() if "set_extra_state" not in module.__dict__]
    for module in extra:
        module.__dict__["set_extra_state"] = _ignore
    try:
        yield
    finally:
        for module in extra:
            del module.__dict__["set_extra_state"]
        for params, buffers, tensors in before:
            for name, tensor in tensors.items():
                (params if name in params else buffers)[name] = tensor
        for _, each in units_in(unit):
            if not each.in_full_precision:
                each.buffers.widen()
                each.buffers.narrow()


def _ignore(state: Any) -> None:
    pass


def _unsharded(module: nn.Module) -> dict[str, Any]:
    """What a module lists that is not ours."""
    listed = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in listed if tensor is not None and not is_ours(tensor)}


def is_customised(module: nn.Module) -> bool:
    """Whether a module's load is more than copying: hooks or a method that are neither ours nor torch's own."""
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return any(_is_users(getattr(one, "hook", one)) for one in (*hooks, module._load_from_state_dict))


def _is_users(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    origin = getattr(function, "__module__", None) or ""
    is_lazy = origin == "torch.nn.modules.lazy"
    return is_lazy or not origin.startswith(("torch.nn.modules.", f"{__name__.partition('.')[0]}."))


def _agree_to_read(unit: Unit, error: Exception | None) -> frozenset[Unit]:
    """Collective. The units whose values a load may read on any rank.

    Raises:
        Exception: `error`, on the rank that has one.
        RuntimeError: on the others, naming the first rank that has one.
    """
    units = [each for _, each in units_in(unit)]
    own = [any(map(is_customised, own_modules(each.module))) for each in units]
    text = "" if error is None else f"{type(error).__name__}: {error}"
    told = [[text, own]]
    if peers_answer(unit.everyone):
        told = [json.loads(other) for other in from_everyone(unit.everyone, json.dumps([text, own]).encode())]
    if error is not None:
        raise error
    for rank, (problem, _) in enumerate(told):
        if problem:
            me = number_among(unit.everyone)
            raise RuntimeError(f"rank {me}: rank {rank} could not load its state dict. {problem}")
    return frozenset(each for number, each in enumerate(units) if any(flags[number] for _, flags in told))


def _close_loads(unit: Unit) -> None:
    for _, each in units_in(unit):
        if each.access.close_loading is not None:
            each.access.close_loading()


class _Loaded(Exposure):
    """A unit's modules with whole parameters that are to be written. Collective if they may be read, too.

    Args:
        unit: whose modules.
        form: how it is loaded.
    """

    def __init__(self, unit: Unit, form: LoadPass) -> None:
        self._is_trial, self._source = form.is_trial, form.source_of(unit)
        self._is_here = not form.is_trial and (self._source is None or self._source.is_here)
        self._is_read = not form.is_trial and unit in form.read
        self._written: set[tuple[FlatParamHandle, int]] = set()
        self._kept: dict[tuple[FlatParamHandle, int], Tensor] = {}
        super().__init__(unit, keep_changes=not form.is_trial, at_first=self._source is not None)

    def _values(self, handle: FlatParamHandle) -> list[Tensor]:
        if self._is_read:
            return super()._values(handle)
        handle.storage.check(handle.name)
        handle.absorb()
        if not any(handle.flat_param.parts):
            return shapes_of(handle)
        tensors = blanks(handle) if self._is_here else shapes_of(handle)
        return [
            part.dtensor(each) if part else each for each, part in zip(tensors, handle.flat_param.parts, strict=True)
        ]

    @property
    def _compares_values(self) -> bool:
        return self._is_read and self._is_here

    def _install(self, handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
        if self._is_read or any(handle.flat_param.parts):
            return super()._install(handle, tensors)
        params: list[nn.Parameter] = []
        for tensor, needs in zip(tensors, handle.requires_grad_each, strict=True):
            params.append(Awaiting.of(tensor.shape, tensor.dtype, needs, may_get_shapes=not self._is_here))
        return install(handle, params)

    def _changed(self) -> list[tuple[FlatParamHandle, int]]:
        slots = [(handle, slot) for handle in self._handles for slot in range(len(handle.places))]
        listed = [(handle, slot, listed_at(handle.places[slot][0])) for handle, slot in slots]
        copied = [
            (handle, slot) for handle, slot, param in listed if isinstance(param, Awaiting) and param.source is not None
        ]
        return [*copied, *super()._changed()]

    def _keep(self, handle: FlatParamHandle, slot: int) -> None:
        value = handle.registry.replacement(slot)
        if (handle, slot) in self._written:
            if isinstance(value, Awaiting) and value.source is not None:
                self._kept[handle, slot] = value.source
                handle.store(slot, value.source)
            else:
                self._kept[handle, slot] = value
                super()._keep(handle, slot)

    def close(self) -> None:
        """See `Exposure.close`. If only the first rank has values, all raise what that one does."""
        source = self._source
        self._written = set(self._changed())
        if source is None or self._is_trial:
            super().close()
            return
        self._keep_changes = self._is_here and not source.is_over
        problem = ""
        try:
            super().close()
        except RuntimeError as error:
            problem = str(error)
        if not source.is_over:
            changed = [[self._handles.index(handle), slot] for handle, slot in self._kept]
            deal_changes(self._handles, source.tell(changed, problem), self._kept)


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


def explain(error: Exception, plain: Any, state_dict: Mapping[str, Any]) -> None:
    """Add to an error of torch's what to do if something stands in front of every key.

    Args:
        error: that loading a state dict has raised.
        plain: the module as users know it.
        state_dict: that was to be loaded.
    """
    front = foreign_prefix(state_dict, partial(hasattr, plain)) if isinstance(error, RuntimeError) else ""
    if front:
        remedy = f"load {{key.removeprefix({front!r}): value for key, value in state_dict.items()}}"
        error.args = (f"{error}\n\t{prefix_problem(front, remedy)}",)


class Loading:
    """Lets `nn.Module.load_state_dict` load a wrapped module as if it was not, one unit at a time.

    torch walks the module tree and loads each module from the keys under its path. On entering a wrapper, the keys get
    the path parts of the wrapper. On entering it, or a module of its unit that is loaded by itself, the unit's
    parameters are exposed; on leaving it they are sharded again.
    """

    def __init__(self, wrapper: nn.Module, unit: Unit) -> None:
        self._unit = unit
        self._open: list[tuple[nn.Module, Exposure]] = []
        self._form = ExitStack()  # of the units inside, if this is the outermost one and not loaded through its wrapper
        self._blanks: list[Blank] = []  # memory for buffers that had no values
        wrapper.register_load_state_dict_pre_hook(self._add_path_parts)
        wrapper.register_load_state_dict_post_hook(self._clean)
        for module in (wrapper, *own_modules(unit.module)):
            unit.hooks += [
                module.register_load_state_dict_pre_hook(self._enter),
                module.register_load_state_dict_pre_hook(spread_loaded),
                module.register_load_state_dict_post_hook(self._leave),
            ]

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
        if self._unit.access.is_local:
            return  # the shards are loaded already
        if self._unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            if self._unit.runtime is not None:
                self._unit.runtime.ensure_idle("load a state dict")
            if self._unit.access.loading is None:
                ensure_agreed(self._unit)
                self._form.enter_context(loading(self._unit, LoadPass(read=_agree_to_read(self._unit, None))))
            form = self._unit.access.loading or LoadPass()
            if self._unit.awaits_values and not form.is_trial:
                self._blanks = blanks_in(own_modules(self._unit.module))
                for blank in self._blanks:
                    blank.give_memory(self._unit.device)
            self._open.append((module, _Loaded(self._unit, form)))
            self._unit.access.close_loading = self.close

    def _leave(self, module: nn.Module, incompatible: object) -> None:
        if self._open and self._open[0][0] is module:
            self.close()

    def close(self) -> None:
        """Shard what is still exposed, after an exception too."""
        self._unit.access.close_loading = None
        opened, self._open = self._open, []
        blanks, self._blanks = self._blanks, []
        for blank in blanks:
            blank.keep_if_filled()
        try:
            close_all([exposure for _, exposure in opened])
        finally:
            self._form.close()
