"""Overrides of module methods inside a unit, for casts, moves, freezing, calls and state dicts.

`.to()`, `.half()` and `.cuda()` all call `nn.Module._apply`, which changes the listed parameters of a module. A
unit's parameters are packed into vectors that can only be changed as a whole, so ``_apply`` of the unit's modules is
overridden. ``requires_grad_`` is overridden too, because the original method would have no effect on a part of a flat
parameter.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import check_device, is_dtensor
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.forward_hooks import forward_hooks_of, threads_in
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name
from fsdp.engine.originals import is_ours
from fsdp.engine.phase import Phase
from fsdp.engine.unit import ModuleGroup, TrainingState, Unit, own_modules, unit_of, unit_of_wrapper, units_in
from fsdp.layers.shared_params import tie_assigned
from fsdp.layers.state_requests import Converting, Filling, LocalState, serving

Conversion = Callable[[Tensor], Tensor]
_AT_REST = (TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS)


def guard(unit: Unit, *, lists_parts: bool = False, names_shards: bool = False) -> None:
    """Override methods of a unit's modules once its handles are complete; arguments as in `shard_module.ParamForm`."""
    tied = {place.module for one in unit.wanted for place in one.places}
    # Inner units save their own parameters. Buffers may be cast.
    is_bare = unit.holds_nothing and not any(module._buffers for module in own_modules(unit.module))
    taken_from = {unit.module, *(place.module for place in unit.places()), *tied}
    for module in own_modules(unit.module):
        if module in taken_from and not is_bare:
            check = partial(_list_shards, unit) if lists_parts else partial(_check_partial_state, unit, names_shards)
            unit.hooks.append(module.register_state_dict_pre_hook(check))
        if not taken_from.isdisjoint(module.modules()):
            module.__dict__["_apply"] = Conversions(unit, module, gives_memory=lists_parts)
            if module is not unit.module:
                module.__dict__["requires_grad_"] = partial(_require_grad, unit, module)
                if not (lists_parts or names_shards):
                    # A bound method, because compilers inspect its function.
                    module.__dict__["named_parameters"] = NamedParameters(unit, module).named_parameters


def move_values(module: nn.Module, device: torch.device) -> None:
    """Move a module like ``module.to(device)``, but keep tensors without values on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def refuse_shared_modules(module: nn.Module) -> None:
    """Raise ValueError if another unit has taken over parameters of `module`, or of a module in it."""
    for submodule in own_modules(module):
        guarding = submodule.__dict__.get("_apply")
        if isinstance(guarding, Conversions) and not guarding.unit.holds_nothing:
            owner, kind = guarding.unit, type(submodule).__name__
            around = [clean_name(name) for name, found in _named_modules(owner.module) if found is module]
            if around and around[0]:
                raise ValueError(
                    f"{around[0]} is inside of {owner.name}, a unit that has taken over the parameters of the modules "
                    "in it already. Wrap or shard inner modules before the modules around them."
                )
            here = [clean_name(name) or kind for name, found in _named_modules(module) if found is submodule]
            there = [clean_name(name) for name, found in _named_modules(owner.module) if found is submodule]
            raise ValueError(
                f"{' = '.join(here)} is the same {kind} as {there[0]} of {owner.name}, a unit that has taken over its "
                "parameters and would not unshard them here. Wrap the shared module itself first, once, and use the "
                "wrapper in every place; or leave the modules that share it unwrapped (auto_wrap does this "
                "automatically)."
            )


def _named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(module.named_modules(remove_duplicate=False))


def reshard(unit: Unit) -> None:
    """Free the memory of a unit's own unsharded parameters. Written values are stored in the shards."""
    for handle in unit.handles:
        handle.reshard()  # stores written values, which `Unit.reshard` does not
    unit.reshard()
    unit.settle()  # `parameters()` lists the shards from now on


def _list_shards(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Reshard before a state dict: it must not contain unsharded parameters, whose memory will be freed."""
    for each in dict.fromkeys((unit, *(shared.holder for shared in unit.shares))):
        each.end_left_forward()
        if each.state is not TrainingState.IDLE and each.runtime is not None:
            each.runtime.ensure_idle("take a state dict", is_served=True)
        elif each.state is TrainingState.IDLE and any(handle.phase is Phase.UNSHARDED for handle in each.handles):
            reshard(each)


def _check_partial_state(unit: Unit, names_shards: bool, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if unit.state is TrainingState.SUMMON_FULL_PARAMS or unit.request(LocalState) is not None:
        return
    remedy = (
        "Call state_dict() of the wrapper on every rank, or enter summon_full_params() on every rank and call it "
        "there: both are collective, so one rank alone would wait. local_state_dict() of the wrapper returns shards."
    )
    if not names_shards:
        raise RuntimeError(
            f"{unit.name}: state_dict() of a {type(module).__name__} inside a FullyShardedDataParallel would hold "
            f"this rank's shards, or nothing. {remedy}"
        )
    if any(handle.is_sharded for handle in unit.visible_handles):
        warnings.warn(
            f"{unit.name}: state_dict() of a module inside a FullyShardedDataParallel(flatten_parameters=False) holds "
            f"this rank's shards, as FairScale's does. For unsharded values: {remedy}",
            stacklevel=3,
        )


@contextmanager
def unswapped() -> Iterator[None]:
    """Disable torch's option to swap parameters for new objects inside the context, because shards would be lost."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


class Conversions:
    """The ``_apply`` of a unit's module."""

    def __init__(self, unit: Unit, module: nn.Module, *, gives_memory: bool = False) -> None:
        self.unit, self._module, self._gives_memory = unit, module, gives_memory

    def __call__(self, fn: Conversion, recurse: bool = True) -> nn.Module:
        if self.unit.request(Filling) is not None:
            return self._convert(fn, recurse)  # `to_empty` in an initialization, of temporary tensors
        if self.unit.request(Converting) is None:
            if _is_computing(self.unit) and self._keeps_all(fn):
                return self._module  # models cast modules in their forward, to the current dtype
            self._check(fn)
            if self._module is self.unit.module:
                return self._convert_unit(fn, recurse)
            if self._gives_memory and _makes_memory(fn):
                return self._give_memory(fn, recurse)
        return self._convert(fn, recurse)

    def _convert(self, fn: Conversion, recurse: bool) -> nn.Module:
        own, listed = self._module._parameters, dict(self._module._parameters)
        rows = [name for name, param in listed.items() if param is not None and is_ours(param) and is_dtensor(param)]
        for name in rows:
            own.pop(name)  # torch would replace these tensors; they are updated with their shard instead
        try:
            with unswapped():
                type(self._module)._apply(self._module, fn, recurse)
        finally:
            if rows:
                listed |= own
                own.clear()
                own.update(listed)
        return self._module

    def _give_memory(self, fn: Conversion, recurse: bool) -> nn.Module:
        """Run `to_empty` for a module inside the unit: only its parameters and buffers are allocated."""
        for handle in self.unit.visible_handles:
            handle.absorb()
        with serving([self.unit], Converting()):
            self._convert(partial(_convert_tensor, self.unit, fn, True), recurse)
        self._reveal(self.unit.visible_handles, recurse)
        return self._module

    def _reveal(self, handles: Iterable[FlatParamHandle], recurse: bool) -> None:
        """List shard memory instead of meta tensors for the module's parameters without values."""
        inside = set(self._module.modules() if recurse else [self._module])
        for handle in handles:
            here = [slot for slot in handle.valueless if any(one.module in inside for one in handle.places[slot])]
            handle.listed.give_memory(here)

    def _keeps_all(self, fn: Conversion) -> bool:
        """Return whether a conversion changes no parameter and no buffer, including flat parameters (not listed)."""
        listed = (*self._module.parameters(), *self._module.buffers())
        changes = any(_changes(handle, fn) for unit in units_in(self.unit) for handle in unit.visible_handles)
        return not changes and all(fn(tensor) is tensor for tensor in listed)

    def _check(self, fn: Conversion) -> None:
        """Raise an error, before any change, for a conversion that shards do not support."""
        unit = self.unit
        if unit.runtime is not None:
            unit.runtime.ensure_idle("move or cast the module")
        is_whole = self._module is unit.module
        units = list(units_in(unit)) if is_whole else [unit]
        self._refuse_bytes([handle for each in units for handle in each.visible_handles], fn)
        for each in units:
            changed = [handle for handle in each.visible_handles if _changes(handle, fn)]
            is_summoned = each.state is TrainingState.SUMMON_FULL_PARAMS
            if any(is_summoned or handle.presentation.is_exposed for handle in changed):
                raise RuntimeError(
                    f"{each.name}: inside summon_full_params() there are only copies of the parameters, whose new "
                    "dtype or device would be lost. Cast or move the model outside the context."
                )
            for handle in changed if is_whole else ():
                if handle.has_unreduced:
                    raise RuntimeError(
                        f"{handle.name}: cannot move or cast gradients that were accumulated under no_sync() and not "
                        "reduced over the ranks yet. Do it after the last backward of the step, or after zero_grad()."
                    )
                _check_cast(handle, fn)
        if not is_whole:
            self._refuse_part([handle for handle in unit.visible_handles if _changes(handle, fn)], fn)

    def _refuse_bytes(self, handles: Iterable[FlatParamHandle], fn: Conversion) -> None:
        """Raise RuntimeError for a cast of parameters sharded as bytes."""
        packed = [
            (handle.flat_param, packing, places)
            for handle in handles
            for places, packing in zip(handle.places, handle.flat_param.packings, strict=True)
            if packing is not None
        ]
        inside = set(self._module.modules()) if packed else set()
        for shard, packing, places in packed:
            # Checked for the parameter's dtype and for the bytes, because `nn.Module.type` also casts integers.
            for dtype in (packing.dtype, shard.dtype) if any(place.module in inside for place in places) else ():
                cast = fn(torch.empty(0, dtype=dtype, device=shard.device)).dtype
                if cast != dtype:
                    raise RuntimeError(
                        f"{self.unit.name}: {places[0].fqn} is sharded as bytes ({packing.description}), which cannot "
                        f"be cast from {dtype} to {cast}. Cast the module before it is quantised and sharded."
                    )

    def _refuse_part(self, handles: Sequence[FlatParamHandle], fn: Conversion) -> None:
        inside = set(self._module.modules())
        for handle in handles:
            places = [place for used in handle.places for place in used]
            here = [place for place in places if place.module in inside]
            # If the module lists a flat parameter with this parameter only, a cast of the module changes it completely.
            listed = {entry[:2] for entry in handle.presentation.entries} if handle.orig_params is None else ()
            alone = len(handle.places) == 1 and all(place[:2] in listed for place in places) and here == places
            if here and not (alone and fn(_probe(handle)).device == handle.flat_param.device):
                raise RuntimeError(
                    f"{self.unit.name}: {here[0].fqn} cannot be cast or moved separately from its unit, whose "
                    "parameters are in one vector. Cast or move the whole model (model.to(...)), or do it before "
                    "sharding: a unit may mix dtypes."
                )

    def _convert_unit(self, fn: Conversion, recurse: bool) -> nn.Module:
        from fsdp.layers.verify import renew_fingerprints, settle_fingerprints  # for models before their first use

        unit = self.unit
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            return self._convert(fn, recurse)  # shards do not change, else `_check` has raised an error
        # A `ModuleGroup` is not in the module tree, and is converted together with the enclosing unit.
        inside = [each for each in units_in(unit) if isinstance(each.module, ModuleGroup)]
        units = [unit, *(each for each in inside if each is not unit and each.request(Converting) is None)]
        tie_assigned(units_in(unit))
        for handle in (handle for each in units for handle in each.visible_handles):
            handle.absorb()
            handle.listed.collect_gradients()  # gradients are converted with the shard's gradient
            settle_fingerprints(handle)
        around = fn.args[0] if isinstance(fn, partial) and fn.func is _convert_tensor else None  # the enclosing unit
        if unit.runtime is not None and (around is None or around.runtime is not unit.runtime):
            unit.runtime.release()
        device = fn(torch.empty(0, device=unit.device)).device
        gives_memory = self._gives_memory and _makes_memory(fn)
        # Shards are already allocated, and may contain values of modules for which `to_empty` is not called.
        keep = partial(torch.Tensor.to, device=device) if gives_memory else fn
        with serving(units, Converting()):
            self._convert(partial(_convert_tensor, unit, fn, gives_memory), recurse)
            for handle in (handle for each in units for handle in each.handles):
                _apply_to_hidden(handle, partial(_convert_tensor, unit, keep, False))
                if gives_memory:
                    self._reveal([handle], recurse)
        for each in units:
            _follow(each, device)
            for handle in each.handles:
                renew_fingerprints(handle)
        return self._module


def _follow(unit: Unit, device: torch.device) -> None:
    """Update a unit for computation on `device`, after its parameters were cast or moved."""
    unit.device = device
    unit.comm, unit.replicas = unit.comm.for_device(device), unit.replicas.for_device(device)
    unit.axes = unit.axes[0].for_device(device), unit.axes[1].for_device(device)
    for handle in unit.handles:
        handle.storage.device = device
        handle.follow_shard()


def _require_grad(unit: Unit, module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """Override of ``requires_grad_`` for a module in a unit."""
    inside = set(module.modules())
    for handle in unit.handles:
        here = [place for places in handle.places for place in places if place.module in inside]
        listed = any(owner in inside for owner, _, _ in handle.presentation.entries)
        packed = [places[0].fqn for places, one in zip(handle.places, handle.flat_param.packings, strict=True) if one]
        if packed and requires_grad and (here or listed):
            raise RuntimeError(
                f"{unit.name}: {packed[0]} is sharded as bytes, which cannot be trained: thaw the parameters "
                "of other modules only, for instance of adapters"
            )
        if here and not listed and handle.requires_grad is not requires_grad:
            raise RuntimeError(
                f"{unit.name}: {here[0].fqn} cannot be frozen or thawed separately from its flat parameter. Do it "
                "before wrapping, wrap with use_orig_params=True, or freeze the whole wrapped module."
            )
    listing = module.__dict__.pop("named_parameters", None)  # it would warn without need
    try:
        return type(module).requires_grad_(module, requires_grad)
    finally:
        if listing is not None:
            module.__dict__["named_parameters"] = listing


class NamedParameters:
    """The ``named_parameters`` of a module inside a unit. Warns if a flat parameter contains all its parameters."""

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self.unit, self._module = unit, module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        is_empty = True
        for named in type(self._module).named_parameters(self._module, *args, **kwargs):
            is_empty = False
            yield named
        hides = is_empty and self._hides(recurse=kwargs.get("recurse", args[1] if args[1:] else True))
        # torch's functions for state dicts iterate over all modules, and then call `state_dict` of the wrapper.
        if hides and not is_called_from("torch.distributed.checkpoint.state_dict"):
            # The same text for all modules, so that a loop over many modules prints a single warning.
            asked_by_parameters = sys._getframe(1).f_code is nn.Module.parameters.__code__
            warnings.warn(
                "a module inside of a FullyShardedDataParallel lists no parameters: they are parts of the flat "
                "parameter of the wrapper around it, so a loop over them (to freeze, count or group them) does "
                "nothing. Freeze before wrapping, wrap the module by itself, or wrap with use_orig_params=True; "
                "inside `with model.summon_full_params():` all parameters are listed.",
                stacklevel=3 if asked_by_parameters else 2,
            )

    def _hides(self, *, recurse: bool) -> bool:
        """Return whether the unit manages parameters of the module."""
        inside = set(self._module.modules()) if recurse else {self._module}
        return any(place.module in inside for place in self.unit.places())


def _probe(handle: FlatParamHandle) -> Tensor:
    return torch.empty(0, dtype=handle.flat_param.dtype, device=handle.flat_param.device)


def _changes(handle: FlatParamHandle, fn: Conversion) -> bool:
    before = _probe(handle)
    after = fn(before)
    return (before.dtype, before.device) != (after.dtype, after.device)


def _is_computing(unit: Unit) -> bool:
    return unit.runtime is not None and unit.runtime.root.state not in _AT_REST


def _makes_memory(fn: Conversion) -> bool:
    """Return whether `fn` is the conversion of `to_empty`, which allocates without copying."""
    try:
        return not fn(torch.empty(0, device="meta")).is_meta
    except RuntimeError:  # meta tensors cannot be copied to a device
        return False


def _convert_tensor(unit: Unit, fn: Conversion, gives_memory: bool, tensor: Tensor) -> Tensor:
    """Apply `fn`; offloaded tensors (shards, gradients) and tensors without values are cast, but not moved.

    However, `to_empty` allocates memory for listed tensors without values. Gradients with a separately configured dtype
    are moved, but not cast.
    """
    if tensor.is_meta and gives_memory:
        from fsdp.layers.deferred_init import note_empty  # only for parameters without values

        return note_empty(fn(tensor))
    if tensor.is_meta:
        return tensor.to(fn(torch.empty(0, dtype=tensor.dtype, device=unit.device)).dtype)
    converted = fn(tensor)
    for handle in unit.visible_handles:
        stays, is_apart = handle.storage.keeps_shards, handle.precision.grads is not None
        for param in (handle.flat_param, *handle.listed_params) if stays or is_apart else ():
            if tensor is param.grad and is_apart:
                return tensor if stays else tensor.to(converted.device)
            if stays and (tensor is param or tensor is param.grad):
                return converted.to(tensor.device)
    return converted


def _check_cast(handle: FlatParamHandle, fn: Conversion) -> None:
    """Raise ValueError, or RuntimeError for a move, if the handle does not support a shard converted by `fn`."""
    shard = handle.flat_param
    if any(shard.parts):
        check_device(handle.name, shard.parts, fn(torch.empty(0, device=handle.storage.device)).device)
    before = _probe(handle)
    cast = fn(before)
    if not (handle.storage.keeps_shards or torch._has_compatible_shallow_copy_type(before, cast)):
        raise RuntimeError(
            f"{handle.name}: torch cannot move a parameter from {before.device} to {cast.device} in place, as it can "
            "to CUDA. Move the module there before it is sharded."
        )
    handle.precision.check(f"after this cast {handle.name}", cast.dtype, shard.requires_grad)


def _apply_to_hidden(handle: FlatParamHandle, fn: Conversion) -> None:
    """Apply the conversion of `nn.Module._apply` to a shard not listed by modules."""
    if handle.orig_params is not None:
        shard = handle.flat_param
        with torch.no_grad():
            grad = None if shard.grad is None else fn(shard.grad)  # before it is unset: `fn` compares it with `grad`
            shard.grad = None
            shard.data = fn(shard)
            shard.grad = None if grad is None else grad.to(handle.kept_grad_dtype)
        handle.orig_params.alias()
        handle.orig_params.show_gradients([0] * len(handle.places))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Register another method of a wrapped module to unshard and reshard the unit, like a call of the module.

    Use it for methods that compute outside `forward`, for example ``model.encode(x)`` or ``model.decode(z)``. A
    ``generate()`` that only calls the module does not require it. Inside the module's own forward the method is not
    changed. Name and semantics are the same as in torch's function for `fully_shard`. Not collective, but call it on
    every rank; the registered method is collective, like forward.

    Args:
        module: a `FullyShardedDataParallel`, the module that it wraps, or a module under `fully_shard`. Other modules
            are not changed, so that the same program can run without sharding.
        method_name: the name of a method of the module.

    Raises:
        ValueError: if a sharded module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        unit = unit_of_wrapper(module)
        if unit is None:
            return
        module = unit.module
    if not callable(getattr(type(module), method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register")
    module.__dict__[method_name] = partial(_call_as_forward, unit, module, method_name)


def _call_as_forward(unit: Unit, module: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a unit's module, and unshard and reshard the unit as in a call of the module."""
    method = MethodType(getattr(type(module), name), module)
    if unit.state is TrainingState.FORWARD and threading.get_ident() in threads_in(unit):
        return method(*args, **kwargs)
    return forward_hooks_of(module).around(method, args, kwargs)
