"""The full state dict of a wrapped module: unsharded copies of its tensors, under the names of the unwrapped module.

To save, torch iterates over modules whose parameters are unsharded. To load, torch iterates over modules with
`LoadTarget`s, which record the values copied into them; when the state dicts fit on all ranks, each rank stores its
shards of the values. So a state dict that does not fit changes no value, and loading neither gathers nor copies
unsharded parameters. Modules with load hooks or methods that might read or write values do not support this. If the
tree contains such a module, units are loaded one after the other, and values loaded before an error are
kept, as in torch.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import Communicator
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.consensus import (
    agree_on,
    agree_on_outcome,
    done_by_all,
    from_everyone,
    sent_by_first,
)
from fsdp.distributed.dtensor import full_tensor, is_dtensor, local_part
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name, foreign_prefix, join, prefix_problem, wrapped_problem
from fsdp.engine.originals import is_ours
from fsdp.engine.unit import TrainingState, Unit, own_modules, unit_of, units_in
from fsdp.layers.deferred_init import memory_to_load_into, require_values_everywhere
from fsdp.layers.fingerprints import fingerprint, sampled
from fsdp.layers.module_overrides import unswapped
from fsdp.layers.shared_params import exported_around, keys_of, settle_shares
from fsdp.layers.state_dict.lost_writes import note_loaded, watch_copies
from fsdp.layers.state_dict.sharded import TensorPart, store
from fsdp.layers.state_dict.summon import (
    Exposure,
    LoadTarget,
    Values,
    beside_ours,
    deal_changes,
    for_each,
    keep_value,
    recorded,
    recording,
    standing_in,
    unsharded,
)
from fsdp.layers.state_requests import (
    Exporting,
    FirstRank,
    LoadPass,
    Saving,
    ShardedState,
    Summoning,
    saving,
    serving,
)
from fsdp.layers.verify import NOT_WRITTEN, agree, agree_on_values, agreed, difference_of_written

Walk = Callable[..., Any]  # `nn.Module.load_state_dict` of a wrapper


def ensure_agreed(root: Unit) -> None:
    """Collective the first time. Compare the units of all ranks before their shards are combined."""
    units = units_in(root)
    if not agreed.issuperset(units):
        settle_shares(root, units, all_inside=False)
        agree(root, units)


def ensure_same_values(root: Unit) -> None:
    """Collective the first time. Compare the values that the ranks have wrapped, before the values are read."""
    if root.state is not TrainingState.SUMMON_FULL_PARAMS:
        agree_on_values({handle: name for unit, name in units_in(root).items() for handle in unit.handles})


def save_full(wrapper: nn.Module, unit: Unit, asked: Saving, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Collective. Return the unsharded state of a wrapper, in the form chosen by the outermost saved wrapper."""

    def between_hooks(take: Callable[[], Any]) -> Any:
        for before in wrapper._state_dict_pre_hooks.values():
            before(wrapper, prefix, keep_vars)
        state = take()
        for after in wrapper._state_dict_hooks.values():
            changed = after(wrapper, state, prefix, state._metadata.get(prefix[:-1], {}))
            state = state if changed is None else changed
        return state

    is_outermost = unit.request(Saving) is None
    if unit.request(ShardedState):  # without an all-gather
        return between_hooks(
            partial(unit.module.state_dict, destination=destination, prefix=prefix, keep_vars=keep_vars)
        )

    def gathered() -> Any:
        if unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            form.progress.report()
            if is_outermost:
                agree_on(form.ranks, "arguments of state_dict()", f"rank0_only={form.rank0_only}")
        ensure_agreed(unit)
        require_values_everywhere(unit, "take a state dict")
        ensure_same_values(unit)
        return _full_state(unit, destination, prefix, keep_vars, form)

    unit.require_idle("take a state dict")
    summoning = unit.request(Summoning)
    if summoning is not None and summoning.rank0_only:
        raise RuntimeError(
            "state_dict(): inside summon_full_params(rank0_only=True) the other ranks' modules are sharded, and inside "
            "summon_shapes() no module has values. Call it outside the context, with state_dict(rank0_only=True)."
        )
    is_gathered = any(each.state is not TrainingState.SUMMON_FULL_PARAMS for each in units_in(unit))
    with saving(unit, asked) as form, form.progress.reported() if is_outermost and is_gathered else nullcontext():
        asked.check(keep_vars)
        state = between_hooks(gathered)
    if is_outermost and not form.is_here:
        for key in [key for key in state if key.startswith(prefix)]:
            del state[key]
    elif is_outermost and not keep_vars:
        watch_copies(state, {key for key in state if key.startswith(prefix)}, type(unit.module).__name__)
    return state


def _full_state(unit: Unit, destination: Any, prefix: str, keep_vars: bool, form: Saving) -> Any:
    """Collective. Return the `state_dict` of the unit's module, with copies of its unsharded parameters.

    On ranks that do not receive the state, tensors are on the meta device.
    """
    summoned = unit.state is TrainingState.SUMMON_FULL_PARAMS
    # Exposed parameters are copies; buffers, ignored parameters and summoned parameters are not.
    others = [param for param in unit.module.parameters() if not is_ours(param)]
    before = 0 if destination is None else len(destination)
    at_first = form.rank0_only and tuple(form.ranks) == unit.everyone
    with nullcontext() if summoned else closing(Exposure(unit, unsharded(unit, at_first, form.device))):
        with serving([unit], Exporting()):
            state = unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        # The unit's keys are last. Iterating over the keys of all units for each unit would be slow.
        count = max(0, len(state) - before) if state is destination else len(state)
        last = reversed(list(islice(reversed(state), count)))
        keys = [key for key in last if key.startswith(prefix) and isinstance(state[key], Tensor)]
        if not form.is_here:
            for key in keys:
                state[key] = _without_values(state[key])
        elif not keep_vars:
            beside = (*others, *unit.module.buffers())
            live = {local_part(tensor).data_ptr() for tensor in beside if tensor.layout is torch.strided}
            _gather_dtensors(state, unit, prefix, keys)
            params = {prefix + key for key in keys_of(unit)}
            left = exported_around(unit)
            moved: dict[Any, Tensor] = {}  # tied tensors stay tied
            for key in keys:
                value = state[key]
                if value.layout is not torch.strided:  # its elements are in several tensors
                    state[key] = value.to(form.device, copy=True)
                elif value.data_ptr() not in left:
                    if type(value) not in (Tensor, nn.Parameter):  # a tensor subclass, which is a copy already
                        state[key] = value.to(form.device) if form.device else value
                        continue
                    wanted = form.dtype if key in params and value.is_floating_point() else None
                    place = (value.data_ptr(), value.shape, value.stride(), value.dtype, wanted)
                    if place not in moved or value.numel() == 0:
                        moved[place] = _own(value, live, form.device, wanted)
                    state[key] = moved[place]
    return state


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _gather_dtensors(state: dict[str, Any], unit: Unit, prefix: str, keys: Iterable[str]) -> None:
    """Collective over their meshes. Replace `DTensor`s at these keys by unsharded tensors, tied `DTensor`s once."""
    for handle in unit.handles:
        for places in handle.places:
            names = [prefix + place.fqn for place in places if is_dtensor(state.get(prefix + place.fqn))]
            if names:
                state.update(dict.fromkeys(names, full_tensor(state[names[0]])))
    for key in keys:
        if is_dtensor(state[key]):
            state[key] = full_tensor(state[key])


def _own(value: Tensor, live: set[int], device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    moved = value.to(device=device, dtype=dtype) if device or dtype else value
    return moved.clone() if moved.data_ptr() in live else moved


def load_full(
    wrapper: nn.Module, unit: Unit, walk: Walk, state_dict: Mapping[str, Any], strict: bool, rank0_only: bool
) -> Any:
    """Collective. Load an unsharded state dict into a wrapper using torch's `walk`.

    If the state dict of any rank does not fit, all ranks raise an error, and all values are unchanged, unless modules
    have custom load hooks or methods. With `rank0_only`, only the first rank's state dict is used.
    """
    source = FirstRank(unit.everyone) if rank0_only else None
    if isinstance(state_dict, Mapping):
        note_loaded(state_dict)
    if source is not None:
        state_dict = _received(source, wrapper, unit, state_dict)

    def load() -> Any:
        try:
            with unswapped():
                return walk(with_wrapped_metadata(state_dict, wrapper), strict=strict)
        except Exception as error:
            explain(error, unit.module, state_dict, _problem_of_wrapper)
            raise

    form = LoadPass(read=_agree_to_read(unit, wrapper), source=source)
    if form.read is None:
        return _record_and_commit(wrapper, unit, form, load)
    units = list(units_in(unit))
    with serving(units, form):
        try:
            return _done(unit, source, load)
        finally:
            for each in units:
                each.end_load()


def _record_and_commit(wrapper: nn.Module, unit: Unit, form: LoadPass, load: Callable[[], Any]) -> Any:
    """Collective. Load the state dict if it fits on all ranks; otherwise leave all values unchanged."""
    units = list(units_in(unit))
    hidden = [each for each in units if each.state is not TrainingState.SUMMON_FULL_PARAMS]
    with (
        for_each(hidden, lambda each: closing(_recording(each, form))) as recordings,
        _beside(wrapper.modules()) as rest,
    ):
        result = done_by_all([unit.everyone], "load its state dict", load)
        values = [recorded(each) for each in recordings]
        if form.source is None:
            problem = _difference(unit, dict(zip(hidden, values, strict=True)))
            text = (
                f"rank {own_rank()}: loading a state dict, {problem} Load the same state dict on every rank, or pass "
                "rank0_only=True to load the first rank's."
            )
            agree_on_outcome([unit.everyone], "load its state dict", RuntimeError(text) if problem else None)

    def commit() -> None:
        with stored_buffers(units), torch.no_grad():
            for entries, name, target in rest.tensors:
                if target.source is not None:
                    entries[name].copy_(target.source)
            for module, state in rest.extra:
                module.set_extra_state(state)
        for each, exposure, found in zip(hidden, recordings, values, strict=True):
            _keep(exposure.handles, found, form.source_of(each))

    _done(unit, form.source, commit)
    return result


def _difference(unit: Unit, values: Mapping[Unit, Values]) -> str:
    """Collective. Return a description of the difference if samples of the ranks' state dicts differ; else "".

    A parameter that only some ranks load, with ``strict=False``, is a difference too. Ranks without a common unit may
    differ: for example, experts in units with separate groups have different values on each rank.
    """
    loaded: dict[tuple[Communicator, Communicator], dict[str, int]] = {}
    for each, name in units_in(unit).items():
        found = values.get(each, {})
        for handle in each.handles:
            numbers = loaded.setdefault((handle.comm, handle.replicas), {})
            for slot, places in enumerate(handle.places):
                value = found.get((handle, slot))
                key = join("" if each is unit else name, places[0].fqn)
                numbers[key] = NOT_WRITTEN if value is None else _sample_of(value, handle.flat_param.packings[slot])
    # All groups are compared before an error is raised, because ranks of the next groups may have no error here.
    problems = [difference_of_written(ranks, written) for ranks, written in loaded.items()]
    return next(filter(None, problems), "")


def _sample_of(value: Tensor, packing: Any) -> int:
    return fingerprint(sampled(local_part(value) if packing is None else packing.pack(value)))


def _done(unit: Unit, source: FirstRank | None, job: Callable[[], Any]) -> Any:
    """Collective. Return the result of `job` if it succeeds on all ranks."""
    if source is None:
        return done_by_all([unit.everyone], "load its state dict", job)
    with source.reported():
        return job()


def _agree_to_read(unit: Unit, root: nn.Module) -> frozenset[Unit] | None:
    """Collective. Return the units whose values a load may read on any rank.

    None means that all modules of the tree only copy values, on every rank, so the complete load can be recorded.
    """
    units = list(units_in(unit))
    others = (tensor for module in root.modules() for *_, tensor in beside_ours(module))
    is_simple = not any(map(is_customised, root.modules())) and not any(map(is_dtensor, others))
    own = [is_simple, *(any(map(is_customised, own_modules(each.module))) for each in units)]
    told = from_everyone(unit.everyone, own)
    if all(flags[0] for flags in told):
        return None
    return frozenset(each for number, each in enumerate(units, start=1) if any(flags[number] for flags in told))


def is_customised(module: nn.Module) -> bool:
    """Return True if a module has a load hook or method that belongs neither to torch nor to this library."""
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return any(_is_users(getattr(one, "hook", one)) for one in (*hooks, module._load_from_state_dict))


def _is_users(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    origin = getattr(function, "__module__", None) or ""
    is_lazy = origin == "torch.nn.modules.lazy"
    return is_lazy or not origin.startswith(("torch.nn.modules.", f"{__name__.partition('.')[0]}."))


def _received(source: FirstRank, wrapper: nn.Module, unit: Unit, state_dict: Any) -> Mapping[str, Any]:
    """Collective. Return the first rank's state dict; sharded parameters are on the meta device on other ranks.

    Buffers and other values are sent one after the other; sharded parameters are sent when their units are loaded.
    """
    error = None
    if source.is_here and not isinstance(state_dict, Mapping):
        error = TypeError(f"rank0_only=True: rank 0 must pass a state dict, but passed a {type(state_dict).__name__}")
    elif source.is_here:
        for key, value in state_dict.items():
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                error = TypeError(
                    f"rank0_only=True: {key} is a {value.layout} tensor, and only dense ones are sent. Pass the state "
                    "dict on every rank"
                )
    agree_on_outcome([source.ranks], "load its state dict", error)
    given: Any = None
    if source.is_here:
        tensors = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
        described = {**state_dict, **{key: _without_values(tensor) for key, tensor in tensors.items()}}
        sent = tensors.keys() - _sharded_keys(source, wrapper)
        given = described, sent, getattr(state_dict, "_metadata", None)
    described, sent, metadata = from_everyone(source.ranks, given)[0]
    found = OrderedDict[str, Any](state_dict if source.is_here else described)
    for key in (key for key in found if key in sent):
        made = torch.empty_like(described[key], device=unit.device)
        if source.is_here:
            made.copy_(found[key].detach())
        found[key] = sent_by_first(source.ranks, made)
    found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _sharded_keys(source: FirstRank, wrapper: nn.Module) -> set[str]:
    found: set[str] = set()
    for name, module in wrapper.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None and source.serves(unit):
            found |= {join(clean_name(name), key) for key in keys_of(unit)}
    return found


def _recording(unit: Unit, form: LoadPass) -> Exposure:
    source = form.source_of(unit)
    is_here = source is None or source.is_here

    def check(handle: FlatParamHandle, slot: int, value: Tensor) -> None:
        if is_here:  # other ranks only receive shapes
            _refuse_meta(value)
        if is_here and (packing := handle.flat_param.packings[slot]) is not None:
            packing.check(value)
        if isinstance(value, TensorPart):
            raise NotImplementedError(
                f"it is a part of a tensor, {value}. Load a sharded state with load_sharded_state_dict()"
            )

    return recording(unit, check)


def _refuse_meta(value: Tensor) -> None:
    if value.is_meta:
        raise NotImplementedError("it is on the meta device, and has no values to copy")


class _Rest(NamedTuple):
    """A record of the values to be written by a load, except for sharded parameters."""

    tensors: list[tuple[dict[str, Any], str, LoadTarget]]  # the module's dictionary, the name and the target
    extra: list[tuple[nn.Module, Any]]


@contextmanager
def _beside(modules: Iterable[nn.Module]) -> Iterator[_Rest]:
    """Replace unsharded tensors in the modules by targets inside the context, and record extra state."""
    targets, modules = dict[int, LoadTarget](), list(modules)
    before = [entry for module in modules for entry in beside_ours(module) if not isinstance(entry[2], LoadTarget)]

    def target(tensor: Tensor) -> LoadTarget:
        return targets.setdefault(id(tensor), LoadTarget.like(tensor.shape, tensor, partial(_try, tensor)))

    extra = [module for module in modules if "set_extra_state" not in module.__dict__]
    with standing_in(before, target) as shown:
        rest = _Rest(shown, [])
        try:
            for module in extra:
                module.__dict__["set_extra_state"] = lambda state, module=module: rest.extra.append((module, state))
            yield rest
        finally:
            for module in extra:
                module.__dict__.pop("set_extra_state", None)


def _try(tensor: Tensor, value: Tensor) -> None:
    _refuse_meta(value)
    torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").copy_(value)


@contextmanager
def stored_buffers(units: Sequence[Unit]) -> Iterator[None]:
    """Inside the context, cast buffers to the saved dtype, and allocate memory for tensors without values."""
    with memory_to_load_into(units), buffers_in_own_precision(units):
        yield


@contextmanager
def buffers_in_own_precision(units: Sequence[Unit]) -> Iterator[None]:
    """Inside the context, cast buffers from the compute dtype to the saved dtype, unless an `Exposure` has done so."""
    cast = [unit for unit in units if unit.state is not TrainingState.SUMMON_FULL_PARAMS]
    try:
        for unit in cast:
            unit.buffers.widen()
        yield
    finally:
        for unit in cast:
            unit.buffers.narrow()


def _keep(handles: Sequence[FlatParamHandle], values: Values, source: FirstRank | None) -> None:
    """Store the recorded values. Collective if only the first rank has values."""
    if source is not None and (source.is_over or not source.is_here):
        values = {}
    store(values)
    _tell(handles, values, source)


def _tell(
    handles: Sequence[FlatParamHandle], values: Values, source: FirstRank | None, error: Exception | None = None
) -> None:
    """Collective if only the first rank has values: other ranks receive their shards of its stored values."""
    if source is not None and not source.is_over:
        changed = [[handles.index(handle), slot] for handle, slot in values]
        deal_changes(handles, source.report(error, changed)[0], values)


@contextmanager
def loading_in_place(unit: Unit) -> Iterator[None]:
    """Collective, unless an enclosing load is recorded. Make the unit's parameters loadable inside the context."""
    form = unit.request(LoadPass)
    with ExitStack() as stack:
        if form is None:  # the user loads a module inside or around the wrapper
            ensure_agreed(unit)
            form = LoadPass(read=_agree_to_read(unit, unit.module))
            stack.enter_context(serving(list(units_in(unit)), form))
        stack.enter_context(_loadable(unit, form))
        yield


@contextmanager
def _loadable(unit: Unit, form: LoadPass) -> Iterator[None]:
    """Make a unit's modules loadable inside the context; written values are stored, even after an exception."""
    source = form.source_of(unit)
    is_here = source is None or source.is_here
    is_read = unit in (form.read or ())
    if is_read:
        exposure = Exposure(unit, unsharded(unit, at_first=source is not None), by_value=is_here)
    else:
        exposure = _recording(unit, form)
    try:
        with memory_to_load_into([unit]):
            yield
    finally:
        if is_read:
            _keep_written(exposure, is_here, source)
        else:
            values = recorded(exposure)
            exposure.close()
            _keep(exposure.handles, values, source)


def _keep_written(exposure: Exposure, is_here: bool, source: FirstRank | None) -> None:
    """Store the values of a load that could read them. If only the first rank has values, all ranks raise its error."""
    written = set(exposure.changed())
    kept: dict[tuple[FlatParamHandle, int], Tensor] = {}

    def keep(handle: FlatParamHandle, slot: int) -> None:
        if (handle, slot) in written:
            kept[handle, slot] = handle.presentation.replacement(slot)
            keep_value(handle, slot)

    error = None
    try:
        exposure.close(keep if is_here and not (source is not None and source.is_over) else None)
    except RuntimeError as problem:
        if source is None:
            raise
        error = problem
    _tell(exposure.handles, kept, source, error)


def require_mapping(state_dict: Any) -> None:
    """Raise TypeError, as torch does, for values other than a state dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")


def with_wrapped_metadata(state_dict: Any, root: nn.Module) -> Any:
    """Return a shallow copy with version metadata under wrapped names too, as torch expects for this module tree."""
    require_mapping(state_dict)
    copied = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        wrapped = {name: metadata[clean_name(name)] for name, _ in root.named_modules() if clean_name(name) in metadata}
        copied._metadata = type(metadata)({**metadata, **wrapped})  # type: ignore[attr-defined]
    return copied


def explain(
    error: Exception,
    plain: Any,
    state_dict: Mapping[str, Any],
    problem_of: Callable[[Mapping[str, Any]], str] = wrapped_problem,
) -> None:
    """Add a remedy to an error of loading into a module (`plain`) if the keys of the state reveal the cause."""
    if not isinstance(error, RuntimeError):
        return
    problem = problem_of(state_dict)
    if not problem and (front := foreign_prefix(state_dict, partial(hasattr, plain))):
        remedy = f"load {{key.removeprefix({front!r}): value for key, value in state_dict.items()}}"
        problem = prefix_problem(front, remedy)
    if problem:
        error.args = (f"{error}\n\t{problem}",)


def _problem_of_wrapper(state_dict: Mapping[str, Any]) -> str:
    """Return the result of `wrapped_problem`, or a remedy for arguments from torch's ``set_model_state_dict``."""
    if not state_dict:
        return (
            "the state dict is empty on this rank. If only the first rank has it, call "
            "model.load_state_dict(state_dict, rank0_only=True) on every rank, also instead of "
            "set_model_state_dict(broadcast_from_rank0=True)"
        )
    if (listed := next((key for key, value in state_dict.items() if isinstance(value, FlatParameter)), None)) is None:
        return wrapped_problem(state_dict)
    return (
        f"{listed!r} is this rank's shard, which torch's set_model_state_dict(full_state_dict=True) added under the "
        "names of parameters(): for flat parameters use model.load_state_dict(state_dict), or use_orig_params=True"
    )
