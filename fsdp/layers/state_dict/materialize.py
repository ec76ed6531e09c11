"""`materialize` initializes parameters and buffers without values, unit by unit and module by module.

A unit's modules list its parameters as ordinary tensors in new memory, without a gather. Each module initializes its
direct parameters and buffers; then each rank copies its shard, and the memory is freed before the next unit.

Children are initialized before their parents, as in constructors, so a module can change the values of children. For
example, torch's attention zeroes the bias of the projection. A tied parameter is initialized once, by the first of its
modules. Existing values are protected: modules list temporary copies in their places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.distributed.devices import HOST, default_generators, is_host, return_freed_memory
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import plain_name
from fsdp.engine.originals import is_ours
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.unit import Unit, own_modules, unit_of, units_of
from fsdp.layers.deferred_init import Uninitialized, mark, uninitialized_in
from fsdp.layers.module_overrides import Conversions
from fsdp.layers.state_dict.redistribute import as_modules_see, blanks
from fsdp.layers.state_dict.summon import Exposure, beside_ours, hidden_handles, standing_in
from fsdp.layers.state_requests import Filling, require_shards, serving

ParamInit = Callable[[nn.Module], object]
Lacks = list[Uninitialized]

# The second name is used by torch's attention, and by models with the same convention.
_RESETS = ("reset_parameters", "_reset_parameters")


@torch.inference_mode(False)  # otherwise the values could not be trained
@during("fsdp.materialize()")
def materialize(model: nn.Module, *, param_init_fn: ParamInit | None = None, seed: int | None = None) -> None:
    """Initialize all parameters and buffers of a model without values, as created on the meta device.

    Call it on every rank, with the same arguments, before the first use; the ranks do not communicate. Memory for a
    single unit at a time is allocated on the unit's compute device. The function supports any tree of modules, with or
    without units; tensors outside units are created on the device of the units, or on the default device. Existing
    values of parameters and buffers, for example loaded from a file, are kept.

    Each module with parameters or buffers without values *directly* in it is initialized once, children before parents.
    The default initialization is the module's method ``reset_parameters()`` (or ``_reset_parameters()``, as in
    `nn.MultiheadAttention`). The method or `param_init_fn` may write in place, or assign new parameters of the same
    shape.

    Args:
        model: the outermost module; it may be unwrapped.
        param_init_fn: function to initialize the tensors directly in a given module. Their memory is already
            allocated, so ``to_empty`` is not required; if called, use ``recurse=False``.
        seed: the seed of the values. torch's generators are seeded for each module from this number and the module's
            plain name in `model`. So values depend on the type of device, but not on the number of ranks, the wrapped
            modules or the order. The generators' states are restored. If None (the default), the current states are
            used, which must be the same on every rank.

    Raises:
        RuntimeError: for a module without an initialization method, or that leaves a tensor without values; inside a
            forward or backward, or `summon_full_params`.
        ValueError: for a part of a unit, or a new value with another shape.
        TypeError: if `param_init_fn` is not callable, or `seed` is not an integer.
    """
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    guarding = model.__dict__.get("_apply")
    if isinstance(guarding, Conversions) and unit_of(model) is None:
        raise ValueError(
            f"this {type(model).__name__} is a part of {guarding.unit.name}, whose parameters are in one vector: call "
            "materialize with the FullyShardedDataParallel around it, or the whole model"
        )
    _Materializing(model, param_init_fn, seed).fill_all()


@torch.inference_mode(False)
def materialize_unit(unit: Unit, param_init_fn: ParamInit) -> None:
    """Run `materialize` for a unit's modules, without the modules of inner units."""
    _Materializing(unit.module, param_init_fn, None).fill_unit(unit)


class _Materializing:
    def __init__(self, model: nn.Module, param_init_fn: ParamInit | None, seed: int | None) -> None:
        if param_init_fn is not None and not callable(param_init_fn):
            raise TypeError(f"param_init_fn must be a function of a module, got {param_init_fn!r}")
        self._init, self._seed = param_init_fn, seed
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        self._order = _children_first(model)
        self._units = units_of(self._order)
        require_shards(self._units, "materialize")
        self._device = _device_beside(model, self._units)
        self._filled: dict[nn.Module, Lacks] = {}  # initialized tensors in the modules, by the initializing module
        self._scratch: set[int] = set()  # ids of temporary parameters, in place of parameters with values
        self._lacks: dict[nn.Module, Lacks] = {}  # tensors without values, by the module that initializes them
        numbers = self._numbers = {module: number for number, module in enumerate(self._order)}
        for lack in _lacks_in(self._order, self._units):
            lack.places.sort(key=lambda place: numbers.get(place[0], len(numbers)))
            if (first := lack.places[0][0]) in numbers:
                self._lacks.setdefault(first, []).append(lack)

    def fill_all(self) -> None:
        in_units = {module for unit in self._units for module in own_modules(unit.module)}
        last = {unit_of(module): module for module in self._order}
        for module in self._order:
            unit = unit_of(module)
            if unit is not None:
                if module is last[unit]:
                    self.fill_unit(unit)
            elif module not in in_units:
                self._fill_module(module, self._lacks.get(module, []), self._device)

    def fill_unit(self, unit: Unit) -> None:
        own, shown = set(own_modules(unit.module)), set(hidden_handles(unit))
        found = {
            module: [lack for lack in lacks if lack.handle is None or lack.handle in shown]
            for module, lacks in self._lacks.items()
            if module in own
        }
        wanted = {(lack.handle, lack.slot) for lacks in found.values() for lack in lacks}
        if not wanted:
            return
        # Modules list new memory in place of all parameters, but only the values of wanted parameters are stored.
        memory = {one: as_modules_see(one, blanks(one, one.storage.device)) for one in hidden_handles(unit)}
        for handle, tensors in memory.items():
            for slot, tensor in enumerate(tensors):
                if (handle, slot) in wanted:
                    mark(tensor)

        def keep(handle: FlatParamHandle, slot: int) -> None:
            if (handle, slot) in wanted:
                handle.values.store(slot, handle.presentation.replacement(slot))

        exposure, is_filled = Exposure(unit, memory), False
        self._scratch = {id(param) for key, param in exposure.numbered.items() if key not in wanted}
        with serving([unit], Filling()):
            try:
                for module in sorted(found, key=self._numbers.__getitem__):
                    self._fill_module(module, found[module], unit.device)
                is_filled = True
            finally:
                exposure.close(keep if is_filled else None)
        for module, lacks in found.items():
            self._filled[module] = [lack for lack in lacks if lack.handle is None]  # parameters are sharded now
        return_freed_memory()

    def _fill_module(self, module: nn.Module, lacks: Lacks, device: torch.device) -> None:
        if not lacks:
            return
        name = self._names[module] or "the root"
        text = f"{name} ({type(module).__name__})"
        init = self._init or _own_init(module, text, lacks)
        for lack in lacks:
            lack.give_memory(device)
        inside = [inner for inner in module.modules() if inner is not module]
        below = [lack for inner in inside for lack in self._filled.get(inner, ())]
        before = [(lack, _address(lack)) for lack in below]
        try:
            reach = _out_of_reach(module, lacks, below, self._scratch)
            with reach, _drawing_from(self._seed, self._names[module], device), torch.no_grad():
                init(module)
            for lack in lacks:
                _require_filled(lack, text)
            moved = [lack.places[0][1] for lack, address in before if _address(lack) != address]
            if moved:  # probably without values
                raise RuntimeError(
                    f"{text}: its initialisation reallocated parameters or buffers of inner modules, which were "
                    f"initialised already: {', '.join(moved)}. Initialise only tensors directly in the module; if it "
                    "calls to_empty(), use recurse=False."
                )
        except BaseException:
            for lack in lacks:
                lack.take_back()
            raise
        for lack in lacks:
            if lack.value is not None:
                lack.put(lack.value)
        self._filled[module] = list(lacks)


def _children_first(model: nn.Module) -> list[nn.Module]:
    """Return all modules, each once, in the order in which constructors finish."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found:
                visit(child)
        found[module] = None

    visit(model)
    return list(found)


def _device_beside(model: nn.Module, units: Sequence[Unit]) -> torch.device:
    """Return the device for tensors outside units: the device of units, of other values, or the default device."""
    devices = [unit.device for unit in units]
    devices += [tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    devices += [device for device in (torch.get_default_device(),) if device.type != "meta"]
    return devices[0] if devices else HOST


def _own_init(module: nn.Module, text: str, lacks: Lacks) -> ParamInit:
    for name in _RESETS:
        if callable(getattr(module, name, None)):
            return lambda each: getattr(each, name)()
    names = ", ".join(lack.places[0][1] for lack in lacks)
    raise RuntimeError(
        f"{text} has {names} without values, and no reset_parameters() to initialise them. Pass materialize, or the "
        "wrapper, a param_init_fn that initialises such modules, or load the values first."
    )


def _lacks_in(modules: Sequence[nn.Module], units: Sequence[Unit]) -> Iterator[Uninitialized]:
    """Yield all tensors without values: parameters of the units, and listed tensors of the modules."""
    for unit in units:
        for handle in unit.owned_handles:
            handle.absorb()  # tensors that users have assigned have values
            for slot in sorted(handle.valueless):
                places = [(place.module, place.name) for place in handle.places[slot]]
                yield Uninitialized(places, None, handle, slot)
    yield from uninitialized_in(modules)


def _address(lack: Uninitialized) -> int | None:
    value = lack.value
    is_here = value is not None and not is_ours(value) and not isinstance(value, Placeholder)
    return value.data_ptr() if value is not None and is_here else None


def _require_filled(lack: Uninitialized, module: str) -> None:
    value, name = lack.value, lack.places[0][1]
    if value is None:
        raise RuntimeError(f"{module}: its initialisation removed {name}")
    if value.shape != lack.shape:
        raise ValueError(
            f"{module}: its initialisation changed the shape of {name} to {tuple(value.shape)}; it was "
            f"{tuple(lack.shape)} when the model was wrapped"
        )
    if value.numel() and not lack.is_filled:
        where = "on the meta device" if value.is_meta else "without values"
        raise RuntimeError(
            f"{module}: its initialisation left {name} {where}. Pass a param_init_fn that initialises every parameter "
            "and buffer directly in the module that it is called with. They are allocated by then, so it must not test "
            "for the meta device."
        )


@contextmanager
def _drawing_from(seed: int | None, name: str, device: torch.device) -> Iterator[None]:
    """Seed torch's generators from `seed` and a module's name inside the context, and restore them afterwards."""
    number, devices = hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], [] if is_host(device) else [device]
    with torch.random.fork_rng(devices, enabled=seed is not None, device_type=device.type):
        for generator in () if seed is None else default_generators(device):
            generator.manual_seed(int.from_bytes(number, "big") >> 1)
        yield


def _out_of_reach(
    module: nn.Module, lacks: Lacks, below: Lacks, scratch: Collection[int]
) -> AbstractContextManager[object]:
    """Replace values that an initialization of `module` must not change by temporary copies.

    The initialization may change the new values of children (`below`), except tensors shared with another module.
    Temporary parameters, by their ids (`scratch`), need no protection.
    """
    own = {id(lack.value) for lack in lacks} | set(scratch)
    drawn = {id(lack.value) for lack in below} | own
    others = [
        (entries, name, tensor)
        for inner in module.modules()
        for entries, name, tensor in beside_ours(inner)
        if not tensor.is_meta and id(tensor) not in (own if inner is module else drawn)
    ]
    return standing_in(others, _copied)


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
