"""Functions that collect, check and group the parameters of a unit before they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, mul
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from fsdp.distributed.dtensor import MeshPart, check_placements, is_dtensor, local_part
from fsdp.distributed.gather_extension import PLAIN, check_extension, holds_extended, inner_of, is_of_values
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.flat_param import FlatParameter, ParamInfo
from fsdp.engine.gradient_hooks import IN_BACKWARD
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import WRAPPER_PARTS, join, named_modules
from fsdp.engine.originals import Places, lender_of, owner_of, taken_by, taken_over
from fsdp.engine.precision import check_dtype
from fsdp.engine.shard import Shard
from fsdp.engine.unit import Unit, units_in

Found = dict[nn.Parameter, Places]
GroupKey = Callable[[str, nn.Parameter], Hashable]  # of a parameter's name and the parameter
# `FlatParameter.shard_of` with the unit's ranks and storage; keyword arguments override them.
MakeFlatParam = Callable[..., FlatParameter]


class Sharder(Protocol):
    """Shards the parameters of a unit."""

    def prepare(self, found: Found, tied: Found, module: nn.Module) -> Found:
        """Return the parameters to shard; share tied parameters with inner units.

        Raises:
            NotImplementedError, RuntimeError, ValueError: for parameters that do not support this form.
        """

    def shard(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        """Shard the parameters, and remove them from their modules."""


def collect(
    module: nn.Module,
    ignored: Ignored | None = None,
    tied: Found | None = None,
    claimed: Collection[tuple[nn.Module, str]] = (),
    *,
    for_unit: bool = False,
    takes_all: bool = False,
) -> Found:
    """Return the parameters below `module` that belong to no inner unit, with all places where each is used.

    Places of inner units (`claimed`) are excluded. Parameters of another unit that can be shared are added to `tied`,
    if given. With `for_unit`, parameters without values and parameters sharded as bytes are accepted; with
    `takes_all`, also frozen integers and tensor subclasses with torch's all-gather extension.

    Raises:
        TypeError: if a parameter is an integer tensor or has another type that cannot be flattened.
        ValueError: if a parameter has a name that wrappers add for modules; if it belongs to a unit that does not
            contain this place; if it only shares memory with another parameter, because the tie would be lost; if a
            parameter has hooks, or is a DTensor without a local part on this rank.
    """
    found: Found = {}
    for path, submodule in named_modules(module):
        for name, param in submodule._parameters.items():
            fqn = join(path, name)
            if isinstance(param, FlatParameter) and not param._is_managed:
                raise ValueError(
                    f"{fqn} is a FlatParameter that no FullyShardedDataParallel made: it would not be sharded. Wrap "
                    "the plain module, without a FlattenParamsWrapper around it or inside."
                )
            if param is None or (submodule, name) in claimed:
                continue
            if name in WRAPPER_PARTS:
                raise ValueError(
                    f"{type(submodule).__name__} has a parameter named {name}: wrappers add this name for a module, "
                    "and names of parameters omit it. Give the parameter another name"
                )
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
            if isinstance(submodule, torch.jit.ScriptModule):
                raise TypeError(
                    f"{fqn} is a parameter of a module of torch.jit, which keeps its own parameters: shard the plain "
                    "module, or pass this one in ignored_modules (its parameters in ignored_params of fully_shard)"
                )
            if not (for_unit and is_packed(param, in_rows=takes_all)):  # `Packing` checks packed parameters
                _check(fqn, param, for_unit, takes_all)
            kind.setdefault(param, []).append(ParamInfo(submodule, name, fqn))
    refuse_aliases({param: places[0].fqn for param, places in (found | (tied or {})).items()})
    return found


def is_packed(param: Tensor, in_rows: bool = False) -> bool:
    """Return whether a parameter is sharded as bytes: frozen, and not a dense tensor of a usual floating dtype.

    Args:
        param: a parameter.
        in_rows: If True, exclude tensors that `fully_shard` divides by rows: plain tensors of any dtype, and classes
            with torch's all-gather extension.
    """
    if in_rows and (type(param) is nn.Parameter or (holds_extended(param, if_trained=False) and is_of_values(param))):
        return False
    if param.requires_grad or param.layout is not torch.strided or param.is_quantized or is_dtensor(param):
        return False
    if type(param) is nn.Parameter:
        return not (param.is_complex() or (param.is_floating_point() and param.dtype.itemsize > 1))
    from fsdp.layers.tensor_protocol import protocol_of  # for subclasses of tensors

    return protocol_of(type(param)) is not None


def _refuse_standalone(fqn: str, shard: FlatParameter) -> None:
    if shard.is_standalone:
        raise ValueError(
            f"{fqn} is sharded by a StandaloneHandle, which no unit would unshard: shard the module without the "
            "handle, or ignore the parameter and unshard it by hand"
        )


@dataclass
class _Memory:
    """The addresses of a parameter's elements: the first byte, the byte after the last, and the form."""

    name: str
    begin: int
    end: int
    itemsize: int
    shape: torch.Size
    strides: tuple[int, ...]  # in elements

    @classmethod
    def of(cls, name: str, local: Tensor) -> _Memory:
        shape, strides, size, begin = local.shape, local.stride(), local.itemsize, local.data_ptr()
        numel = 1 + sum(map(mul, strides, shape)) - sum(strides)  # of the range, with elements of other tensors
        return cls(name, begin, begin + size * numel, size, shape, strides)

    @cached_property
    def elements(self) -> Any:
        """An array of NumPy. Its elements are not read, and may be in the memory of an accelerator."""
        strides = tuple(self.itemsize * stride for stride in self.strides)
        described = {"version": 3, "data": (self.begin, True), "shape": self.shape, "strides": strides}
        return np.asarray(SimpleNamespace(__array_interface__={**described, "typestr": f"|V{self.itemsize}"}))


def refuse_aliases(named: Mapping[nn.Parameter, str]) -> None:
    """Raise ValueError if two of these parameters use the same memory."""
    found: list[_Memory] = []
    for param, name in named.items():
        if type(param) is not nn.Parameter and is_packed(param):
            continue  # inner tensors hold the memory, and bytes are copied from them
        local = _memory_of(param)
        has_memory = local.numel() and not local.is_meta and local.layout is torch.strided
        if has_memory and local.data_ptr():  # 0 for classes with inner tensors
            found.append(_Memory.of(name, local))
    _refuse_overlaps(found)


def _refuse_overlaps(found: Iterable[_Memory]) -> None:
    """Raise ValueError if two parameters have elements in common; columns of a matrix, for example, have none."""
    reaching: list[_Memory] = []  # with addresses after the first of the next
    for each in sorted(found, key=attrgetter("begin")):
        reaching = [other for other in reaching if other.end > each.begin]
        for other in reaching:
            if np.shares_memory(each.elements, other.elements):
                raise _lost_tie(each.name, other.name)
        reaching.append(each)


def _memory_of(param: Tensor) -> Tensor:
    if type(param) is nn.Parameter:
        return param
    local = local_part(param)
    return next(iter(inner_of(local)), local)


def _lost_tie(name: str, other: str) -> ValueError:
    return ValueError(
        f"{name} is a separate parameter that shares memory with {other}: after sharding, they would no longer change "
        "together. Tie them as one parameter (b.weight = a.weight), or copy one of them (.clone())."
    )


# For each unit, the storage and memory of each trained parameter before sharding. A weak reference keeps the identity
# of a storage without its memory.
_memory: WeakKeyDictionary[Unit, list[tuple[StorageWeakRef, _Memory]]] = WeakKeyDictionary()


def refuse_aliases_of_units(unit: Unit, found: Found) -> None:
    """Raise ValueError if trained parameters of a new unit and of its inner units used the same memory."""
    own = _memory[unit] = []
    for param, places in found.items():
        local = _memory_of(param)
        if param.requires_grad and local.numel() and not local.is_meta and local.data_ptr():
            own.append((StorageWeakRef(local.untyped_storage()), _Memory.of(places[0].fqn, local)))
    if not unit.contains_units:
        return
    in_storages: dict[int, list[_Memory]] = {}
    for each, path in units_in(unit).items():
        for storage, memory in _memory.get(each, ()):
            name = memory.name if each is unit else join(path, memory.name)
            in_storages.setdefault(storage.cdata, []).append(replace(memory, name=name))
    for in_storage in in_storages.values():
        _refuse_overlaps(in_storage)


def forget_memory(units: Iterable[Unit]) -> None:
    """Discard the original memory of the units' parameters, because no unit will be created around these units."""
    for unit in units:
        _memory.pop(unit, None)


def _check(fqn: str, param: nn.Parameter, for_unit: bool, takes_all: bool) -> None:
    if not (
        param.requires_grad or type(param) in PLAIN or is_dtensor(param) or hasattr(type(param), "__tensor_flatten__")
    ):
        raise TypeError(
            f"{fqn} is a frozen {type(param).__name__}, a class without __tensor_flatten__, which may keep data "
            "outside the tensor, as bitsandbytes' Int8Params does: quantise it in a class that names its inner tensors "
            "(of torchao, or Params4bit), or pass it in ignored_parameters (ignored_params of fully_shard), so that "
            "every rank keeps it"
        )
    if param.is_quantized:
        raise TypeError(
            f"{fqn} is a parameter of {param.dtype}, one of torch's own quantised dtypes, which are not sharded: "
            "quantise the weight with a class of torchao, register it as a buffer (register_buffer), or pass it in "
            "ignored_parameters (ignored_params of fully_shard)"
        )
    if not (takes_all or param.is_floating_point() or param.is_complex()):
        raise TypeError(
            f"{fqn} is a parameter of {param.dtype}: integers are sharded only in units, by "
            "FullyShardedDataParallel or fully_shard. Register it as a buffer (register_buffer), or pass it in "
            "ignored_parameters."
        )
    if is_lazy(param):
        raise TypeError(
            f"{fqn} is an UninitializedParameter of a lazy module, which has no shape yet: run the model once "
            "on an input before sharding"
        )
    check_dtype(f"grad_dtype of {fqn}", None if param.grad_dtype == param.dtype else param.grad_dtype)
    check_placements(fqn, param)
    is_known = type(param) in PLAIN or (is_dtensor(param) and not holds_extended(param))
    if takes_all and holds_extended(param):
        check_extension(fqn, param)
        is_known = True
    if param.layout is not torch.strided or (param.is_meta and not for_unit) or not is_known:
        kind = f"{param.layout} {param.device.type}" if is_known else type(param).__name__
        kind += f" around a {type(local_part(param)).__name__}" if is_dtensor(param) else ""
        raise TypeError(
            f"{fqn} is a {kind} parameter: only plain, dense parameters with values can be flattened. Materialize it "
            "(to_empty() and reset_parameters()) or convert it before sharding. Frozen tensors of classes with "
            "__tensor_flatten__ are sharded as bytes: freeze it (requires_grad_(False)). To train it, use fully_shard, "
            "which shards classes of plain tensors."
        )
    is_hooked = param._backward_hooks or param._post_accumulate_grad_hooks or IN_BACKWARD in vars(param)
    if taken_over(param) is None and is_hooked:
        raise ValueError(
            f"{fqn} has gradient hooks, which would never run: another tensor replaces it. Remove them before "
            "sharding, and register them afterwards on the sharded model's parameters()."
        )


def _refuse_taken(fqn: str, param: nn.Parameter) -> None:
    owner = taken_by(param)
    if owner is not None:
        raise ValueError(
            f"{fqn} is the same parameter as {owner}, which an inner unit has already taken over: sharded like this, "
            "the two would no longer be tied. Do not shard that module by itself: the unit that contains both must "
            "take over the parameter (auto_wrap does this automatically)."
        )


def group(
    params: Found, kind: Callable[[Places], Hashable], key: GroupKey | None
) -> list[tuple[Hashable, list[nn.Parameter]]]:
    """Group parameters that can share a flat parameter: with equal dtypes, device, `requires_grad`, key and usage.

    `DTensor`s share a flat parameter only with `DTensor`s on the same ranks. `kind` distinguishes uses, and the user's
    `key` distinguishes parameters; each group is returned with its key.
    """
    groups: dict[Hashable, list[nn.Parameter]] = {}
    keys: dict[Hashable, Hashable] = {}
    usual = device_of(params)
    for param, places in params.items():
        own = key_of(param, places, key)
        part = MeshPart.of(param)
        spread = None if part is None else part.kind
        # A meta parameter is grouped as on a rank that has its values.
        device = usual if param.is_meta else param.device
        alike = (param.dtype, param.grad_dtype, device, param.requires_grad, spread, kind(places), own)
        keys[alike] = own
        groups.setdefault(alike, []).append(param)
    return [(keys[alike], members) for alike, members in groups.items()]


def device_of(params: Iterable[nn.Parameter]) -> torch.device | None:
    """Return the device of the first parameter with values; None if there is none."""
    return next((param.device for param in params if not param.is_meta), None)


def key_of(param: nn.Parameter, places: Places, key: GroupKey | None) -> Hashable:
    """Return the result of the user's `group_by` for a parameter."""
    found = None if key is None else key(places[0].fqn, param)
    try:
        hash(found)
    except TypeError:
        raise TypeError(
            f"group_by({places[0].fqn!r}, ...) returned {found!r}, which cannot be hashed: return a string, a number, "
            "or a tuple of these"
        ) from None
    return found


def text_of_key(key: Hashable) -> str:
    """Return a key as text, comparable across ranks. Objects are named by class: equal keys may print differently."""
    if isinstance(key, tuple):
        return f"({', '.join(map(text_of_key, key))})"
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__


def names_of(params: Sequence[nn.Parameter], places: Found) -> list[str]:
    """Return the names of parameters at their first places."""
    return [places[param][0].fqn for param in params]


def reader_message(name: str) -> str:
    """Return the error message for a caller that reads the names to be ignored by `DistributedDataParallel`."""
    # `torch.jit` reads all attributes of a module before the parameters.
    if is_called_from("torch.jit._trace") or is_called_from("torch.jit._script"):
        return (
            f"torch.jit got {name}, which is sharded: its result would contain the shards of this rank. Save the model "
            "with fsdp.save, load it into the plain model with fsdp.load, and pass that model to torch.jit."
        )
    if is_called_from("accelerate.accelerator"):
        return (
            f"accelerate would wrap {name}, which is sharded, in DistributedDataParallel. Use "
            "fsdp.accelerate.Accelerator, or fsdp.transformers.Trainer instead of transformers.Trainer. Or call "
            "prepare_model(model, evaluation_mode=True, device_placement=False)."
        )
    return ddp_message(name)


def ddp_message(name: str) -> str:
    """Return the message about `DistributedDataParallel` around a sharded model, with the remedy."""
    return (
        f"DistributedDataParallel got {name}, which is sharded: it treats the ranks' shards as copies of the same "
        "parameters, and overwrites them with those of its first rank. Remove DistributedDataParallel, because "
        "gradients are averaged without it (for replicas of shards, shard over a 2-D mesh), and rebuild the model. If "
        "other parameters need it, let it ignore the unit's parameters under all names: "
        "named_parameters(remove_duplicate=False)."
    )
