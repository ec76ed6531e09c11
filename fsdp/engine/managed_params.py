"""The parameters that a unit takes: found, grouped, and taken out of the modules that they belonged to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import MeshPart, check_placements, is_dtensor, local_part
from fsdp.distributed.gather_extension import check_extension, holds_extended, values_of
from fsdp.engine.flat_param import FlatParameter, ParamInfo
from fsdp.engine.names import clean_name, join
from fsdp.engine.placeholder import Placeholder

Places = list[ParamInfo]
GroupKey = Callable[[str, nn.Parameter], Hashable]  # of a parameter's name and the parameter


@dataclass(frozen=True)
class Ignored:
    """`ignored_modules`, with all that is inside of them, and `ignored_parameters`: what is not sharded.

    A parameter that an ignored module uses is ignored wherever else it is used: so ties are kept.
    """

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[Tensor] = frozenset()

    @classmethod
    def of(cls, modules: Iterable[nn.Module] | None, parameters: Iterable[nn.Parameter] | None) -> Ignored:
        """Return what the arguments of a front door name, which must be modules and parameters."""
        roots = _checked("ignored_modules", modules, nn.Module)
        inside = frozenset(inner for root in roots for inner in root.modules())
        named = _checked("ignored_parameters", parameters, nn.Parameter)
        return cls(
            inside,
            frozenset(named)
            | {param for module in inside for param in module._parameters.values() if param is not None},
        )

    def __or__(self, other: Ignored) -> Ignored:
        """Return what either of them leaves alone."""
        return Ignored(self.modules | other.modules, self.parameters | other.parameters)

    def check(self, sharded: Iterable[ParamInfo]) -> None:
        """Raise ValueError if an inner unit, whose parameters are used at `sharded`, has taken what is ignored now."""
        names = [name for name in map(taken_by, self.parameters) if name is not None]
        names += [
            f"{place.fqn} of a {type(place.module).__name__}" for place in sharded if place.module in self.modules
        ]
        if names:
            raise ValueError(
                f"{names[0]} is ignored, but an inner unit has sharded it already: ignore it there as well, or nowhere"
            )

    def has(self, module: nn.Module, param: Tensor) -> bool:
        """Return whether a parameter of a module is to be left alone."""
        return module in self.modules or param in self.parameters


def _checked(argument: str, given: Any, kind: type[Any]) -> list[Any]:
    if isinstance(given, Iterator):
        raise TypeError(f"{argument} is an iterator, which one wrapper would use up: give a list, list(...)")
    is_one = isinstance(given, kind) or not isinstance(given, Iterable)
    found = [] if given is None else [given] if is_one else list(given)
    for item in found:
        if not isinstance(item, kind):
            raise TypeError(f"{argument} must be an iterable of {kind.__name__}s, found a {type(item).__name__} in it")
    return found


class Taken(NamedTuple):
    """A record of what a parameter has become. It holds all weakly, and so keeps nobody's memory."""

    param: weakref.ref[nn.Parameter]
    description: str
    flat_param: weakref.ref[FlatParameter] | None  # which has its values now; None for a summoned copy
    slot: int  # its number there
    lender: weakref.ref[Any] | None = None  # the unit that took it, if others may share it

    @property
    def is_used(self) -> bool:
        """True if the flat parameter that contains it still exists."""
        return self.flat_param is not None and self.flat_param() is not None


# Parameters that a unit has taken over, by id, while somebody still holds them: a tied module outside of the
# unit, or an optimizer made too early.
_taken: dict[int, Taken] = {}
times_taken = [0]  # in which an entry of it was set


def collect(
    module: nn.Module,
    ignored: Ignored | None = None,
    tied: dict[nn.Parameter, Places] | None = None,
    claimed: Collection[tuple[nn.Module, str]] = (),
    *,
    with_values: bool = True,
    takes_all: bool = False,
) -> dict[nn.Parameter, Places]:
    """Return the parameters below `module` that no inner unit took, each with every place where it is used.

    Places that inner units see to (`claimed`) are left out. Parameters that another unit took and can share go to
    `tied`, if that is given. With `takes_all`, frozen integers and tensor subclasses with torch's all-gather
    extension are taken too.

    Raises:
        TypeError: if one is an integer tensor or another kind that cannot be flattened.
        ValueError: if one was taken over by a unit that doesn't contain this place, or is tied to another by its memory
            only: a tie would be lost; or if one has hooks, or is a DTensor of which this rank has no part.
    """
    found: dict[nn.Parameter, Places] = {}
    for prefix, submodule in module.named_modules():
        for name, param in submodule._parameters.items():
            fqn = clean_name(f"{prefix}.{name}" if prefix else name)
            if isinstance(param, FlatParameter) and not param._is_managed:
                raise ValueError(
                    f"{fqn} is a FlatParameter that no FullyShardedDataParallel made: it would not be sharded. Wrap "
                    "the plain module, without a FlattenParamsWrapper around it or inside."
                )
            if param is None or (submodule, name) in claimed:
                continue
            if ignored is not None and ignored.has(submodule, param):
                continue
            if (owner := owner_of(param)) is not None:
                _refuse_standalone(fqn, owner)
                continue
            kind = found
            if tied is not None and lender_of(param) is not None:
                kind = tied
            else:
                _refuse_taken(fqn, param)
            _check(fqn, param, with_values, takes_all)
            kind.setdefault(param, []).append(ParamInfo(submodule, name, fqn))
    _refuse_aliases(found | (tied or {}))
    return found


def _refuse_standalone(fqn: str, shard: FlatParameter) -> None:
    if shard.is_standalone:
        raise ValueError(
            f"{fqn} is sharded by a StandaloneHandle, which no unit would unshard: shard the module without the "
            "handle, or have the parameter ignored and go on unsharding it by hand"
        )


def _refuse_aliases(found: dict[nn.Parameter, Places]) -> None:
    seen: dict[int, Places] = {}
    for param, places in found.items():
        local = values_of(local_part(param))
        other = seen.setdefault(local.data_ptr(), places) if local.numel() and not local.is_meta else places
        if other is not places:
            raise ValueError(
                f"{places[0].fqn} is a parameter of its own in the memory of {other[0].fqn}: sharded, they would no "
                "longer change together. Tie them by making them one parameter (b.weight = a.weight), or give each its "
                "memory (.clone())."
            )


def _check(fqn: str, param: nn.Parameter, with_values: bool, takes_all: bool) -> None:
    if param.is_quantized or not (takes_all or param.is_floating_point() or param.is_complex()):
        raise TypeError(
            f"{fqn} is a parameter of {param.dtype}: only floating-point parameters can be sharded. Register it as a "
            "buffer (register_buffer) if it is not trained."
        )
    check_placements(fqn, param)
    is_known = type(param) in _PLAIN or (is_dtensor(param) and not holds_extended(param))
    if takes_all and holds_extended(param):
        check_extension(fqn, local_part(param))
        is_known = True
    if param.layout is not torch.strided or (param.is_meta and with_values) or not is_known:
        kind = f"{param.layout} {param.device.type}" if is_known else type(param).__name__
        kind += f" around a {type(local_part(param)).__name__}" if is_dtensor(param) else ""
        raise TypeError(
            f"{fqn} is a {kind} parameter: only plain, dense parameters with values can be flattened. Materialize it "
            "(to_empty() and reset_parameters()) or convert it before sharding."
        )
    if taken_over(param) is None and (param._backward_hooks or param._post_accumulate_grad_hooks):
        raise ValueError(
            f"{fqn} has gradient hooks, which would never run: another tensor takes its place. Remove them before "
            "sharding, and register them afterwards on what the sharded model lists."
        )


def _refuse_taken(fqn: str, param: nn.Parameter) -> None:
    owner = taken_by(param)
    if owner is not None:
        raise ValueError(
            f"{fqn} is the same parameter as {owner}, which an inner unit has already taken over: sharded like this, "
            "the two would no longer be tied. Leave that module alone, so that the unit that contains both takes "
            "the parameter (auto_wrap does so by itself)."
        )


_PLAIN = (nn.Parameter,)


def taken_over(param: Tensor) -> Taken | None:
    """Return what this original parameter has become, None if no unit took it over."""
    taken = _taken.get(id(param))
    return taken if taken is not None and taken.param() is param else None


def taken_by(param: Tensor) -> str | None:
    """Return the name under which a unit took over this original parameter, None if none did."""
    taken = taken_over(param)
    return None if taken is None else taken.description


def lender_of(param: Tensor) -> Any | None:
    """Return the unit that took over this original parameter alone, and can share it with others; None if none did."""
    taken = taken_over(param)
    return None if taken is None or taken.lender is None else taken.lender()


def note_stale(
    param: nn.Parameter,
    description: str,
    flat_param: weakref.ref[FlatParameter] | None = None,
    slot: int = 0,
    lender: weakref.ref[Any] | None = None,
) -> None:
    """Remember that `param` is not, or not for long, what the model trains."""
    key = id(param)
    reference = weakref.ref(param, lambda _: _taken.pop(key, None))
    times_taken[0] += 1
    _taken[key] = Taken(reference, description, flat_param, slot, lender)


def follow_flat_param(old: FlatParameter, now: Mapping[int, tuple[FlatParameter, int]]) -> None:
    """Note that what was in a flat parameter is in others now: for each number in which, and under which number."""
    for key, taken in _taken.items():
        if taken.flat_param is not None and taken.flat_param() is old:
            flat_param, slot = now[taken.slot]
            times_taken[0] += 1
            _taken[key] = taken._replace(flat_param=weakref.ref(flat_param), slot=slot)


def is_ours(param: Tensor) -> bool:
    """Return whether what a module lists is a shard, or the local shard of an original parameter."""
    return owner_of(param) is not None


def owner_of(param: Tensor) -> FlatParameter | None:
    """Return the shard that something listed is, or is a view of; None for other parameters."""
    owner = getattr(param, "owner", None)  # and not by __dict__, which compilers of optimizers cannot trace
    return owner if isinstance(owner, FlatParameter) else None


def group(
    params: dict[nn.Parameter, Places], kind: Callable[[Places], Hashable], key: GroupKey | None
) -> list[tuple[Hashable, list[nn.Parameter]]]:
    """Group parameters that can share a flat parameter: of one dtype, device, `requires_grad` and key, and used alike.

    `DTensor`s share one only with others that are spread over the same ranks. Uses are told apart by `kind`, and users
    tell parameters apart by `key`, which each group is returned with.
    """
    groups: dict[Hashable, list[nn.Parameter]] = {}
    keys: dict[Hashable, Hashable] = {}
    usual = device_of(params)
    for param, places in params.items():
        own = key_of(param, places, key)
        part = MeshPart.of(param)
        spread = None if part is None else part.kind
        # What has no values is nowhere: it must lie beside the same others as on a rank that has its values.
        device = usual if param.is_meta else param.device
        alike = (param.dtype, device, param.requires_grad, spread, kind(places), own)
        keys[alike] = own
        groups.setdefault(alike, []).append(param)
    return [(keys[alike], members) for alike, members in groups.items()]


def device_of(params: Iterable[nn.Parameter]) -> torch.device | None:
    """Return the device of the first of the parameters that has values; None if none has."""
    return next((param.device for param in params if not param.is_meta), None)


def key_of(param: nn.Parameter, places: Places, key: GroupKey | None) -> Hashable:
    """Return what the user's `group_by` says of a parameter."""
    found = None if key is None else key(places[0].fqn, param)
    try:
        hash(found)
    except TypeError:
        raise TypeError(
            f"group_by({places[0].fqn!r}, ...) returned {found!r}, which cannot be hashed: return a string, a number, "
            "or a tuple of such"
        ) from None
    return found


def text_of_key(key: Hashable) -> str:
    """Return a key as ranks can compare it: texts of other objects than plain values may differ for equal keys."""
    if isinstance(key, tuple):
        return f"({', '.join(map(text_of_key, key))})"
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__


def take_over(
    params: dict[nn.Parameter, Places], flat_params: Sequence[FlatParameter], owner: str, lender: Any = None
) -> None:
    """Remove parameters, in the order of the flat parameters that they became, from the modules of the `owner`.

    From now on the modules' attributes are ours. The `lender` is a unit that can share them with others.
    """
    lent_by = None if lender is None else weakref.ref(lender)
    slots = [(weakref.ref(flat), slot) for flat in flat_params for slot in range(len(flat.metadata()[0]))]
    for (param, places), (flat_param, slot) in zip(params.items(), slots, strict=True):
        note_stale(param, f"{places[0].fqn} of {owner}", flat_param, slot, lent_by)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_refuse_gradient)
        for place in places:
            del place.module._parameters[place.name]


def _refuse_gradient(param: Tensor) -> None:
    """Hook of an original parameter: raise RuntimeError because a computation used it after sharding."""
    taken = taken_over(param)
    if taken is not None and taken.is_used:
        param.grad = None
        raise RuntimeError(
            f"the original parameter {taken.description} has received a gradient, but its module was sharded since: "
            "this gradient is of one rank, and would be lost. " + _HELD
        )


_HELD = (
    "Do not keep parameters in lists, dictionaries or other attributes that are filled before sharding: read them as "
    "attributes of their modules (self.weight) in each forward. A class may also override `__setattr__` and update its "
    "cache there, which is called for each tensor that takes the place of a parameter."
)


def refuse_held(root: nn.Module) -> None:
    """Raise RuntimeError if a module of a tree still holds an original parameter that was taken over."""
    originals = {key: taken for key, taken in _taken.items() if taken.is_used}
    for path, module in root.named_modules() if originals else ():
        for name, value in module.__dict__.items():
            for param in () if name in _OF_MODULES else _tensors_in(value):
                if id(param) in originals and taken_over(param) is not None:
                    raise RuntimeError(
                        f"{clean_name(join(path, name))} holds the original parameter "
                        f"{originals[id(param)].description}, whose module was sharded since: computations with the "
                        "original would not train the model. " + _HELD
                    )


_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an attribute holds: itself, or in lists, tuples, sets and dictionaries."""
    ahead, seen = [value], set()
    while ahead:
        item = ahead.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple, set, frozenset, dict)) and id(item) not in seen:
            seen.add(id(item))
            ahead += item.values() if isinstance(item, dict) else item


def names_of(params: Sequence[nn.Parameter], places: dict[nn.Parameter, Places]) -> list[str]:
    """Return the names of parameters at their first places."""
    return [places[param][0].fqn for param in params]


def ddp_message(name: str) -> str:
    """Return the message about `DistributedDataParallel` around a sharded model, with the remedy."""
    return (
        f"DistributedDataParallel has been given {name}, which is sharded: it takes the ranks' shards for copies of "
        "the same parameters, and overwrites them with those of its first rank. Leave it out: gradients are averaged "
        "over the ranks without it (for replicas of shards, shard over a 2-D mesh), and build the model anew. Around "
        "other parameters, have it ignore the unit's by all their names: named_parameters(remove_duplicate=False)."
    )


class AssignedAttributes:
    """The attributes of a module whose class overrides `__setattr__`, for example to update a cache.

    `nn.RNNBase` updates a list of its weights in this way. Each tensor that is shown in the place of a parameter is
    assigned to the attribute, so that the class can follow; the parameters that the module lists do not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        return self._module.__dict__.get(name)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        attributes = self._module.__dict__
        listed = attributes["_parameters"]
        attributes["_parameters"] = {other: param for other, param in listed.items() if other != name}
        try:
            setattr(self._module, name, tensor)
        except RuntimeError:
            if not isinstance(tensor, Placeholder):  # a class that computes with each assigned tensor cannot with this
                raise
        finally:
            attributes["_parameters"] = listed
        attributes[name] = tensor


def attributes_seen_by(module: nn.Module) -> dict[str, Any] | AssignedAttributes:
    """Return the mapping in which a module looks up its parameters by name before the parameters that it lists."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module.__dict__
    if isinstance(module, nn.RNNBase):
        # It would move the weights into memory of cuDNN's choice; ours lie one after the other already.
        module.__dict__["flatten_parameters"] = _leave_as_they_are
    return AssignedAttributes(module)


def _leave_as_they_are() -> None:
    pass
