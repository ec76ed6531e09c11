"""Unsharded parameters registered in the modules: for summoning, for state dicts, and for loading.

All three use an `Exposure`: a unit's parameters are registered in the modules as ordinary parameters, with separate
memory or without memory. So all features of `nn.Module` (names, hooks, `state_dict`, `_load_from_state_dict`, in-place
changes) work as in an unwrapped module. Closing the exposure stores this rank's shards of the values, or discards
them. The unit computes with other tensors, so the memory of an exposed tensor stays valid if a user keeps it.

Loading has three steps: record, agree, commit. In a `recording`, modules list a `LoadTarget` for each parameter, so
`nn.Module.load_state_dict` checks keys and shapes and reports errors as usual, and the targets record the values. The
ranks exchange the outcome. Then either all ranks store their shards of the values, or no rank does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.consensus import from_everyone, number_among, sent_by_first, told_by_all
from fsdp.distributed.devices import HOST, is_host
from fsdp.distributed.dtensor import is_dtensor, local_part
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import is_ours, note_stale
from fsdp.engine.unit import TrainingState, Unit
from fsdp.engine.user_attributes import give_attributes
from fsdp.layers.deferred_init import is_marked, mark
from fsdp.layers.fingerprints import fingerprint
from fsdp.layers.grad_clipping import require_reduced
from fsdp.layers.state_dict.redistribute import as_modules_see, assembled, blanks, deal
from fsdp.layers.state_requests import Summoning, serving
from fsdp.layers.verify import NOT_WRITTEN, difference_of_written

Values = Mapping[tuple[FlatParamHandle, int], Tensor]  # by the handle, and the parameter's number in the handle
Entry = tuple[dict[str, Any], str, Tensor]  # a listed tensor: the module's dictionary, the name, and the tensor
_Shown = TypeVar("_Shown")
_StandIn = TypeVar("_StandIn", bound=Tensor)


class Exposure:
    """A unit's modules with ordinary parameters in place of their sharded parameters, until closed.

    The modules list `tensors` for each handle; None leaves them unchanged. With `by_value`, changes without a new
    version are detected too, for example through ``.data``.
    """

    def __init__(
        self, unit: Unit, tensors: Mapping[FlatParamHandle, Sequence[Tensor] | None], by_value: bool = False
    ) -> None:
        self._unit = unit
        self.handles = list(tensors)
        self.params = {handle: _as_params(handle, each) for handle, each in tensors.items() if each is not None}
        self.numbered = {
            (handle, slot): param for handle, params in self.params.items() for slot, param in enumerate(params)
        }
        self._looks = {
            (handle, slot): _Look.at(param, handle.flat_param.packings[slot], by_value)
            for (handle, slot), param in self.numbered.items()
        }
        self._outer_state = unit.state
        unit.transition_to(TrainingState.SUMMON_FULL_PARAMS)
        try:
            unit.buffers.widen()
            for handle in self.handles:
                handle.presentation.expose(self.params.get(handle))
        except BaseException:
            self.close()
            raise

    def changed(self) -> list[tuple[FlatParamHandle, int]]:
        """Return the parameters that were written or replaced."""
        return [
            (handle, slot)
            for (handle, slot), param in self.numbered.items()
            if listed_at(handle.places[slot][0]) is not param or not self._looks[handle, slot].is_of(param)
        ]

    def close(self, keep: Callable[[FlatParamHandle, int], None] | None = None) -> None:
        """Restore the shards in the modules, and `keep` this rank's shards of the current values.

        Raises a RuntimeError with the names of parameters that were removed, replaced under only some of their names,
        or have another shape. All other values are stored, and the unit remains usable.
        """
        problems: list[str] = []
        try:
            for handle, slot in () if keep is None else self.changed():
                handle.values.note_written([slot])  # other values are still those that the ranks have wrapped
            for handle in self.handles:
                handle.settle()  # peers may still be receiving from the shard
            if keep is not None:
                for handle, slot in self.numbered:
                    try:
                        keep(handle, slot)
                    except ValueError as error:
                        problems.append(str(error))
        finally:  # also if only some of the parameters are shown
            for handle in self.handles:
                handle.presentation.conceal()
            self._unit.buffers.narrow()
            self._unit.transition_to(self._outer_state)
        if problems:
            raise RuntimeError(f"{self._unit.name}: these changes could not be kept: " + "; ".join(problems))


def _as_params(handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    pairs = zip(tensors, handle.requires_grad_each, strict=True)
    params = [each if isinstance(each, nn.Parameter) else nn.Parameter(each, need) for each, need in pairs]
    for param, places, attributes in zip(params, handle.places, handle.flat_param.attributes, strict=True):
        note_stale(param, f"a summoned copy of {places[0].fqn}")
        give_attributes(param, attributes)
    return params


class _Look(NamedTuple):
    """A record of a parameter, used to detect later whether it was written.

    Users may write or replace inner tensors of a parameter sharded as bytes. A write to an inner tensor does
    not increment the parameter's version.
    """

    packing: Any  # of a parameter that is sharded as bytes, or None
    tensors: list[Any]  # the parameter, and its inner tensors
    versions: list[int | None]  # of each tensor; None if unknown, as in inference mode
    value: int | None  # a fingerprint, if requested

    @classmethod
    def at(cls, param: nn.Parameter, packing: Any, by_value: bool) -> _Look:
        tensors = [param, *(() if packing is None else packing.inner_of(param))]
        has_version = [isinstance(each, Tensor) and not each.is_inference() for each in tensors]
        versions = [each._version if known else None for each, known in zip(tensors, has_version, strict=True)]
        # For other classes, only versions are compared.
        is_plain = packing is not None or type(local_part(param)) in (Tensor, nn.Parameter)
        is_seen = by_value and is_plain and not local_part(param).is_meta
        return cls(packing, tensors, versions, _bits_of(param, packing) if is_seen else None)

    def is_of(self, param: nn.Parameter) -> bool:
        now = _Look.at(param, self.packing, by_value=False)
        is_same = all(map(operator.is_, now.tensors, self.tensors)) and now.versions == self.versions
        return is_same and None not in now.versions and self.value in (None, _bits_of(param, self.packing))


def _bits_of(value: Tensor, packing: Any) -> int:
    """Return the fingerprint of a parameter's values; 0 if its class, shape, dtype or metadata has changed."""
    if packing is None:
        return fingerprint(local_part(value))
    try:
        return fingerprint(packing.pack(value))
    except ValueError:
        return 0  # storing the value raises the error, after the ranks have compared their fingerprints


def hidden_handles(unit: Unit) -> list[FlatParamHandle]:
    """Return the handles with parameters in a unit's modules, except already exposed handles."""
    return [handle for handle in unit.visible_handles if not handle.presentation.is_exposed]


def unsharded(
    unit: Unit, at_first: bool = False, device: torch.device | None = None
) -> dict[FlatParamHandle, list[Tensor]]:
    """Collective. Return the unsharded parameters of a unit, for an `Exposure`; those without values are marked.

    If only the first rank needs them (`at_first`), they are on the meta device on other ranks.
    """
    found = {}
    for handle in hidden_handles(unit):
        tensors = assembled(handle, at_first)
        for slot in handle.valueless:
            mark(tensors[slot])
        # `DTensor`s stay on the device of their mesh.
        found[handle] = [
            each if device is None or each.is_meta or is_dtensor(each) else each.to(device) for each in tensors
        ]
    return found


def keep_value(handle: FlatParamHandle, slot: int) -> None:
    """Store the value of an exposed parameter, unless it had no values and is still not initialized."""
    value = handle.presentation.replacement(slot)
    if slot not in handle.valueless or not is_marked(value):
        handle.values.keep(slot, value)


@contextmanager
def for_each(units: Iterable[Unit], show: Callable[[Unit], AbstractContextManager[_Shown]]) -> Iterator[list[_Shown]]:
    """Enter a context for each unit in turn, and exit all of them at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(show(unit)) for unit in units]


def deal_changes(handles: Sequence[FlatParamHandle], changed: Sequence[Sequence[int]], values: Values) -> None:
    """Collective. Send all ranks the `values` of the parameters changed on the first rank."""
    for number, handle in enumerate(handles):
        slots = [slot for which, slot in changed if which == number]
        kept = {slot: values[handle, slot] for slot in slots if (handle, slot) in values}
        for slot, value in kept.items():
            part, packing = handle.flat_param.parts[slot], handle.flat_param.packings[slot]
            if part is not None:
                kept[slot] = local_part(part.to_local(handle.layout.slots[slot].name, value))
            elif packing is not None:
                kept[slot] = packing.pack(value)
        if slots:
            deal(handle, slots, kept)


def beside_ours(module: nn.Module) -> Iterator[Entry]:
    """Yield the entries of a module that the library does not manage."""
    entries: dict[str, Any]
    if isinstance(module, torch.jit.ScriptModule):
        return  # a script module only lists tensors of its own
    for entries in (module._parameters, module._buffers):
        for name, tensor in entries.items():
            if tensor is not None and not is_ours(tensor):
                yield entries, name, tensor


@contextmanager
def standing_in(
    entries: Iterable[Entry], stand_in: Callable[[Tensor], _StandIn]
) -> Iterator[list[tuple[dict[str, Any], str, _StandIn]]]:
    """List what `stand_in` returns for each tensor inside the context, and yield the entries with these tensors."""
    before = list(entries)
    shown: list[tuple[dict[str, Any], str, _StandIn]] = []
    try:
        for listed, name, tensor in before:
            shown.append((listed, name, stand_in(tensor)))
            dict.__setitem__(*shown[-1])  # no `Presentation` records it
        yield shown
    finally:
        for entry in before:
            dict.__setitem__(*entry)


def listed_at(place: ParamInfo) -> nn.Parameter | None:
    """Return the parameter that a module lists in a place."""
    return place.module._parameters.get(place.name)


class LoadTarget(nn.Parameter):
    """A placeholder for a tensor while a state is loaded. Copying a value into it records the value in `source`.

    A `LoadTarget` has no memory. When all ranks could load their values, a rank stores its shard of the value. So the
    rank reads only this shard of a file that is mapped into memory.
    """

    source: Tensor | None
    _check: Callable[[Tensor], None]
    _device: torch.device
    is_meta = False  # otherwise torch's load would warn that copying has no effect

    @classmethod
    def like(
        cls, shape: torch.Size, tensor: Tensor, check: Callable[[Tensor], None], requires_grad: bool = False
    ) -> LoadTarget:
        """Return a target of this shape, with `tensor`'s dtype and device; `check` raises an error for unfit values."""
        empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
        made = Tensor._make_subclass(cls, empty, requires_grad)
        made.source, made._check, made._device = None, check, tensor.device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def copy_(self, value: Tensor, non_blocking: bool = False) -> LoadTarget:
        # Batch norms copy `num_batches_tracked` onto itself if a state dict does not contain it.
        if not isinstance(value, LoadTarget):
            self._check(value)
            self.source = value.detach() if value.requires_grad else value  # `detach` may lose attributes of a class
        return self


def recording(unit: Unit, check: Callable[[FlatParamHandle, int, Tensor], None], *, in_bytes: bool = False) -> Exposure:
    """Set a `LoadTarget` in a unit's modules for each parameter. Not collective.

    Args:
        unit: the unit to load.
        check: function of a handle, a parameter's number and a value; raises an error for unfit values.
        in_bytes: If True, load parameters sharded as bytes as bytes.
    """
    targets: dict[FlatParamHandle, list[Tensor]] = {}
    for handle in hidden_handles(unit):
        handle.storage.check(handle.name)
        handle.absorb()
        shard = handle.flat_param
        kinds = zip(handle.layout.slots, shard.parts, shard.packings, handle.requires_grad_each, strict=True)
        targets[handle] = [
            LoadTarget.like(
                (part or (None if in_bytes else packing) or kept).shape, shard, partial(check, handle, slot), need
            )
            for slot, (kept, part, packing, need) in enumerate(kinds)
        ]
    return Exposure(unit, targets)


def recorded(exposure: Exposure) -> Values:
    """Return the values copied into the targets of a `recording`."""
    return {
        key: param.source
        for key, param in exposure.numbered.items()
        if isinstance(param, LoadTarget) and param.source is not None
    }


@contextmanager
def summoned(units: Sequence[Unit], form: Summoning) -> Iterator[None]:
    """Collective. Set unsharded parameters in the units' modules; units that are summoned already must match `form`."""
    closed = []
    for unit in units:
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            form.require_shown_by(unit.request(Summoning), unit)
        else:
            closed.append(unit)
    with ExitStack() as undo:  # if an error is raised before all units are entered, possibly on a single rank
        shown = []
        for unit in closed:
            shown.append(_Summoned(unit, form))
            undo.callback(shown[-1].forget)
        undo.pop_all()
    with ExitStack() as stack:
        for each in shown:
            stack.callback(each.close)
        yield


class _Summoned:
    """An exposure of values and gradients in a given form. Collective over the unit's ranks and their replicas."""

    @during("summon_full_params()")
    def __init__(self, unit: Unit, form: Summoning) -> None:
        self._unit, self._form = unit, form
        self._is_here = not form.rank0_only or number_among(unit.everyone) == 0
        handles = hidden_handles(unit)
        for handle in handles:
            handle.storage.check(handle.name)
        for handle in handles if form.on_host else ():
            if any(handle.flat_param.parts) and not is_host(handle.storage.device):
                raise NotImplementedError(
                    f"summon_full_params(offload_to_cpu=True): {handle.name} has DTensors, which are on the device of "
                    "their mesh. Omit offload_to_cpu, and move the tensors that you need (full_tensor().cpu())."
                )
        device = HOST if form.on_host else None
        grads = {handle: _full_gradients(handle) for handle in handles} if form.with_grads else {}
        values = unsharded(unit, form.rank0_only, device)
        shown = {handle: tensors if self._is_here else None for handle, tensors in values.items()}
        for handle, found in grads.items() if self._is_here else ():
            shown[handle] = _with_gradients(handle, values[handle], found)
        by_value = form.keeps_changes and form.rank0_only and self._is_here
        self._exposure = Exposure(unit, shown, by_value)
        unit.requests[Summoning] = form

    def forget(self) -> None:
        self._unit.requests.pop(Summoning, None)
        self._exposure.close()

    @during("summon_full_params()")
    def close(self) -> None:
        """Reshard the values; see `Exposure.close`. With ``rank0_only``, all ranks raise the first rank's error."""
        form, exposure = self._form, self._exposure
        self._unit.requests.pop(Summoning, None)
        try:
            changed = set(exposure.changed()) if form.keeps_changes else set()
            if form.keeps_changes and not form.rank0_only:
                self._agree_on(changed)
        except BaseException:
            exposure.close()
            raise
        params: dict[FlatParamHandle, list[Any]] = {
            handle: [listed_at(places[0]) for places in handle.places] for handle in exposure.handles
        }
        kept: dict[tuple[FlatParamHandle, int], Tensor] = {}

        def keep(handle: FlatParamHandle, slot: int) -> None:
            if form.rank0_only and (handle, slot) not in changed:
                # Not stored, else this rank would discard unsharded parameters that the other ranks still use.
                handle.values.check(slot, handle.presentation.replacement(slot))
                return
            keep_value(handle, slot)
            kept[handle, slot] = params[handle][slot]

        problems: list[str] = []
        try:
            exposure.close(keep if form.keeps_changes else None)
        except RuntimeError as error:
            problems.append(str(error))
        grads = {handle: [getattr(param, "grad", None) for param in listed] for handle, listed in params.items()}
        if form.keeps_changes and form.rank0_only:
            problems = self._share(kept, grads, problems)
        elif form.keeps_changes and form.with_grads and not problems:
            for handle in exposure.handles:
                _keep_gradients(handle, grads[handle])
        if problems:
            raise RuntimeError(problems[0])

    def _agree_on(self, changed: Collection[tuple[FlatParamHandle, int]]) -> None:
        listed = {(handle, slot): listed_at(handle.places[slot][0]) for handle, slot in self._exposure.numbered}
        written = {
            handle.places[slot][0].fqn: NOT_WRITTEN
            if (handle, slot) not in changed or value is None
            else _bits_of(value, handle.flat_param.packings[slot])
            for (handle, slot), value in listed.items()
        }
        ranks, name = self._unit.everyone, self._unit.name
        problem = difference_of_written(ranks, written)
        if problem:
            raise RuntimeError(
                f"rank {own_rank()}: {name}: leaving summon_full_params(), {problem} Make the same changes on every "
                "rank, or use rank0_only=True to keep the first rank's."
            )

    def _share(
        self, values: Values, grads: Mapping[FlatParamHandle, Sequence[Tensor | None]], problems: Sequence[str]
    ) -> list[str]:
        """Collective. Send the changes of the first rank to all ranks, and return its problems."""
        handles = self._exposure.handles
        changed = [(handles.index(handle), slot) for handle, slot in values]
        have = [[grad is not None for grad in grads[handle]] for handle in handles if self._form.with_grads]
        changed, have, problems = from_everyone(self._unit.everyone, (changed, have, problems))[0]
        deal_changes(handles, changed, values)
        for handle, flags in zip(handles, have, strict=False):
            own = enumerate(grads[handle])
            _keep_gradients(handle, [self._sent(handle, slot, grad) if flags[slot] else None for slot, grad in own])
        return list(problems)

    def _sent(self, handle: FlatParamHandle, slot: int, value: Tensor | None) -> Tensor:
        """Collective. Return the first rank's gradient on all ranks; a `DTensor` is sent as its local part."""
        shape, device, part = handle.layout.slots[slot].shape, handle.storage.device, handle.flat_param.parts[slot]
        if value is None or not self._is_here:
            tensor = torch.empty(shape, dtype=handle.kept_grad_dtype, device=device)
        else:
            local = value if part is None else part.gradient(value)
            tensor = local.detach().to(device, handle.kept_grad_dtype).reshape(shape).contiguous()
        tensor = sent_by_first(self._unit.everyone, tensor)
        return tensor if part is None else part.dtensor(tensor)


@contextmanager
def shapes_summoned(units: Sequence[Unit]) -> Iterator[None]:
    """Not collective. Set meta parameters in the units' modules inside the context; summoned units are unchanged."""
    with for_each([unit for unit in units if unit.state is not TrainingState.SUMMON_FULL_PARAMS], _shapes):
        yield


@contextmanager
def _shapes(unit: Unit) -> Iterator[None]:
    shapes = {}
    for handle in hidden_handles(unit):
        handle.absorb()
        shapes[handle] = as_modules_see(handle, blanks(handle, torch.device("meta")))
    # The form of ranks without values: operations that need values raise an error.
    form = Summoning(keeps_changes=False, with_grads=False, rank0_only=True, on_host=False)
    with closing(Exposure(unit, shapes)), serving([unit], form):
        yield


def params_shown(unit: Unit, paths: Mapping[nn.Module, Sequence[str]]) -> dict[str, nn.Parameter]:
    """Return a summoned unit's parameters on this rank by name, tied ones once; `paths` is `paths_in` of a model."""
    places = [
        places[0] for handle in unit.visible_handles if handle.presentation.is_exposed for places in handle.places
    ]
    listed = {paths[place.module][0] + place.name: listed_at(place) for place in places}
    return {name: param for name, param in listed.items() if param is not None and not is_ours(param)}


def _full_gradients(handle: FlatParamHandle) -> list[Tensor | None]:
    """Collective. Return the unsharded reduced gradients, in separate memory.

    None for a parameter if no rank that holds elements of it has a gradient.
    """
    layout, slots = handle.layout, range(len(handle.places))

    def own() -> tuple[None, list[bool]]:
        require_reduced([handle], "show gradients")
        return None, [handle.listed.param_of(slot).grad is not None for slot in slots]

    _, told = told_by_all((handle.comm,), "show gradients", own)
    holders = [[rank for rank in range(len(told)) if layout.interval(slot, rank)] or range(len(told)) for slot in slots]
    has_gradient = [any(told[rank][slot] for rank in holders[slot]) for slot in slots]
    if not any(has_gradient):
        return [None] * len(slots)
    grad, device = handle.flat_param.grad, handle.storage.device
    if grad is None:  # but other ranks have gradients
        shard = torch.zeros(layout.shard_numel, dtype=handle.kept_grad_dtype, device=device)
    else:
        shard = grad.detach().view(-1).to(device)
    full = shard.new_empty(layout.padded_numel)
    what, tag = f"all-gather of the gradient of {handle.name}", ("gradient", handle.tags.gather)
    handle.comm.all_gather(full, shard, what, tag).wait()
    shown: list[Tensor | None] = []
    for view, part, has in zip(layout.unpack(full), handle.flat_param.parts, has_gradient, strict=True):
        shown.append((part.dtensor(view.clone()) if part else view.clone()) if has else None)
    return shown


def _with_gradients(
    handle: FlatParamHandle, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor]:
    params = _as_params(handle, tensors)
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            if gradient.dtype != param.dtype:
                param.grad_dtype = None  # any
            param.grad = gradient.to(param.device)
    return list[Tensor](params)


def _keep_gradients(handle: FlatParamHandle, gradients: Sequence[Tensor | None]) -> None:
    handle.zero_grad()
    handle.flat_param.grad = None
    if all(gradient is None for gradient in gradients):
        return
    shard = torch.zeros(handle.layout.shard_numel, dtype=handle.kept_grad_dtype, device=handle.storage.device)
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            part, local = handle.flat_param.parts[slot], gradient.detach()
            local = local if part is None else part.to_local(handle.layout.slots[slot].name, local)
            handle.layout.shard_of(slot, local, shard, handle.comm.rank)
    # Through `data`, which does not count writes: ranks write different numbers of parts, and compare write counts.
    handle.storage.accept(handle.flat_param, shard.data)
    handle.storage.copy_stream.settle()
    handle.listed.show_gradients([gradient is not None for gradient in gradients])
