"""`FlatParameter`: multiple parameters in a single vector, and their original places."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import MeshPart, is_dtensor, local_part
from fsdp.distributed.gather_extension import inner_of, values_of
from fsdp.engine.counted_data import CountedParameter
from fsdp.engine.layout import NO_SLOTS, ContiguousLayout, Layout
from fsdp.engine.placeholder import Placeholder, gradient_elsewhere
from fsdp.engine.user_attributes import Attributes, attributes_of, give_attributes, give_grad_dtype


class ParamInfo(NamedTuple):
    """A place where a parameter is used: attribute `name` of `module`, `fqn` as seen from the unit's module."""

    module: nn.Module
    name: str
    fqn: str


class SharedParamInfo(NamedTuple):
    """A further place of a parameter with multiple places in a unit; `primary` is the first place."""

    module: nn.Module
    name: str
    fqn: str
    primary: ParamInfo


def _of_shard(name: str) -> Callable[..., Any]:
    """Return a method of tensors that warns if the tensor is a shard."""
    torchs = getattr(Tensor, name)

    @wraps(torchs)
    def method(self: ListedParameter, *args: Any, **kwargs: Any) -> Any:
        if self._is_sharded:
            warnings.warn(
                f"{name}() of a parameter of a FullyShardedDataParallel uses this rank's shard only. Call it in the "
                "module's forward or inside `with model.summon_full_params():`, where parameters are unsharded; or "
                "use fully_shard, whose DTensors compute it over all ranks. For optimizers that need it use "
                "fsdp.OwnedOptimizer, which steps whole parameters.",
                stacklevel=2,
            )
        return torchs(self, *args, **kwargs)

    return method


class ListedParameter(CountedParameter):
    """A parameter for optimizers that may be a shard; non-elementwise methods then warn."""

    _is_sharded: bool

    norm, mean, std, var = map(_of_shard, ("norm", "mean", "std", "var"))
    max, min, median = map(_of_shard, ("max", "min", "median"))


class FlatParameter(ListedParameter):
    """Multiple parameters concatenated in row-major order, as a single 1-D parameter.

    A single, unsharded parameter may keep its shape.

    Args:
        params: a non-empty list or tuple of unflattened parameters with the same dtype, device and `requires_grad`.
        requires_grad: whether the flat parameter is trained.
        names: the parameters' names. Default: their numbers.

    Raises:
        ValueError: if `params` is empty, not a list or tuple of tensors, or contains a `FlatParameter`; or for
            parameters with different dtype, device, or `requires_grad`.
    """

    _layout: Layout  # of the parameters (local parts of `DTensor`s) on a single rank
    parts: tuple[MeshPart | None, ...]  # the mesh and placements of each `DTensor` parameter
    packings: tuple[Any, ...]  # of parameters sharded as bytes (`fsdp.layers.packing`)
    examples: tuple[Tensor | None, ...]  # for each parameter trained in a tensor subclass, an empty tensor of it
    attributes: tuple[Attributes, ...]  # set by users on the parameters
    valueless: frozenset[int]  # numbers of parameters without values yet, from the meta device
    shard_storage: Any = None  # the storage of a shard and its gradient
    _is_sharded: bool = False  # True for one rank's shard
    _is_managed: bool = False  # True if a handle runs it
    is_standalone: bool = False  # True if the handle has no unit
    _has_unreduced: bool = False  # gradients were accumulated under `no_sync` and are not in `grad` yet
    group: Hashable = None  # the key of `group_by` for its parameters
    fingerprints: Any = None  # of the original parameters, until a handle takes them over
    _vector: Tensor | None = None  # created on demand; deleted when `.data` is assigned

    def __new__(
        cls, params: Sequence[nn.Parameter], requires_grad: bool = True, names: Sequence[str] | None = None
    ) -> FlatParameter:
        if not isinstance(params, (list, tuple)) or not params:
            raise ValueError(f"FlatParameter needs a non-empty list or tuple of parameters, got {params!r}")
        is_pickled = len(params) == 1 and type(params[0]) is Tensor  # by FairScale: `__setstate__` follows
        for param in () if is_pickled else params:
            if not isinstance(param, nn.Parameter) or isinstance(param, FlatParameter) or is_dtensor(param):
                raise ValueError(f"FlatParameter flattens plain parameters, got a {type(param).__name__}")
        names, attributes = tuple(names or map(str, range(len(params)))), tuple(map(attributes_of, params))
        refuse_unlike(params, names)
        data = torch.cat([param.detach().reshape(-1) for param in params])
        layout = ContiguousLayout.of(zip(names, (param.shape for param in params), strict=True), 1)
        self = cls._build(data, requires_grad, layout, attributes=attributes)
        give_grad_dtype(self, params[0])
        return self

    @classmethod
    def _build(cls, data: Tensor, requires_grad: bool, layout: Layout, **known: Any) -> FlatParameter:
        """Return a flat parameter around `data`, with the given attributes."""
        self = Tensor._make_subclass(cls, data, requires_grad)
        self._layout, self.parts = layout, (None,) * len(layout.slots)
        self.attributes, self.valueless = tuple({} for _ in layout.slots), NO_SLOTS
        self.packings = self.examples = self.parts
        self.__dict__.update(known)
        return self

    @classmethod
    def shard_of(
        cls,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        rank: int,
        world_size: int,
        storage: Any,
        align: int = 1,
        layout_type: type[Layout] = ContiguousLayout,
        dims: tuple[int, ...] | None = None,
        keeps_shape: bool = False,
        block: int = 1,
    ) -> FlatParameter:
        """Create one rank's shard of the flat parameter directly from the parameters, without an unsharded copy.

        Args:
            params, names: the parameters; local parts are used for `DTensor`s, and zeros for missing values.
            rank, world_size: the number of the shard, and the number of shards.
            storage: the `ShardStorage` that allocates the shard.
            align: each parameter starts at a multiple of this number of elements.
            layout_type: the layout that divides the vector into shards.
            dims: the dimension along which each parameter is sharded. Default: the first.
            keeps_shape: If True, a single, undivided parameter keeps its shape.
            block: no rank's part of a parameter begins or ends inside a block of this number of its elements.
        """
        kinds = [local_part(param.detach()) for param in params]
        locals_ = list(map(values_of, kinds))
        shapes = tuple(local.shape for local in locals_)
        if dims is not None:  # multiple inner tensors are along the first dimension
            dims = tuple(d + v.dim() - k.dim() if k.dim() else 0 for d, v, k in zip(dims, locals_, kinds, strict=True))
        named_shapes = list(zip(names, shapes, strict=True))
        layout = layout_type.of(named_shapes, world_size, align, dims, block)
        shard = storage.allocate(layout.shard_numel, params[0].dtype)
        for slot, local in enumerate(locals_):
            if not local.is_meta:
                layout.shard_of(slot, local, shard, rank)
        if keeps_shape and world_size == 1 and not is_dtensor(params[0]):
            shard = shard.view(shapes[0])
        self = storage.flat_parameter._build(
            shard,
            params[0].requires_grad,
            layout_type.of(named_shapes, 1, align, dims, block),
            parts=tuple(map(MeshPart.of, params)),
            attributes=tuple(map(attributes_of, params)),
            examples=tuple(kind.new_zeros([0] * kind.dim()) if inner_of(kind) else None for kind in kinds),
            valueless=frozenset({slot for slot, one in enumerate(locals_) if one.is_meta and one.numel()}) or NO_SLOTS,
            shard_storage=storage,
            _is_sharded=world_size > 1 and layout.numel > 0,
        )
        if len(params) == 1:
            give_attributes(self, self.attributes[0])
        give_grad_dtype(self, params[0])
        storage.release()
        return self

    def part_of_shard(self, slots: Sequence[int], rank: int, world_size: int) -> FlatParameter:
        """Return a shard of some of the parameters, with a new storage of the same kind.

        Args:
            slots: the numbers of the parameters.
            rank, world_size: the number of this shard, and the number of shards.
        """
        storage, layout = copy.deepcopy(self.shard_storage), self.make_layout(world_size, slots)
        data = storage.allocate(layout.shard_numel, self.dtype)
        own = self.make_layout(world_size).local_shards(self.detach(), rank)
        for slot, place in zip(slots, layout.local_shards(data, rank), strict=True):
            place.copy_(own[slot])
        return self._with(data, storage, slots, _is_sharded=world_size > 1 and layout.numel > 0)

    def _with(self, data: Tensor, storage: Any, slots: Sequence[int], **others: Any) -> FlatParameter:
        """Return a flat parameter of some of these parameters, around other data."""

        def some(each: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(each[slot] for slot in slots)

        made = type(self)._build(
            data,
            self.requires_grad,
            self.make_layout(1, slots),
            parts=some(self.parts),
            packings=some(self.packings),
            examples=some(self.examples),
            attributes=some(self.attributes),
            valueless=frozenset({n for n, slot in enumerate(slots) if slot in self.valueless}) or NO_SLOTS,
            shard_storage=storage,
            group=self.group,
            **others,
        )
        give_grad_dtype(made, self)
        return made

    def __init__(self, params: Any = None, requires_grad: bool = True, names: Any = None) -> None:
        pass

    def make_layout(self, world_size: int = 1, slots: Sequence[int] | None = None) -> Layout:
        """Return the layout of all or some of the parameters in a vector that `world_size` ranks share."""
        own = self._layout
        if world_size == own.world_size and slots is None:
            return own
        chosen = own.slots if slots is None else [own.slots[slot] for slot in slots]
        named_shapes = [(slot.name, slot.shape) for slot in chosen]
        return own.of(named_shapes, world_size, own.align, [slot.dim for slot in chosen], own.block)

    @property
    def _names(self) -> tuple[str, ...]:
        return self._layout.names

    @property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return self._layout.shapes

    @property
    def vector(self) -> Tensor:
        """The elements in one dimension, in the same memory."""
        if self._vector is None:
            with torch.inference_mode(False):
                self._vector = self.detach().as_subclass(Tensor).view(-1)
        return self._vector

    @property
    def owner(self) -> FlatParameter:
        """This flat parameter; for a `LocalShard`, the owner of its memory."""
        return self

    @property
    def has_unreduced(self) -> bool:
        """True if gradients wait for a reduction and were not zeroed."""
        return self._has_unreduced and self.grad is not None

    @property
    def held_gradient(self) -> Tensor | None:
        """The reduced gradient on any device; None if there is none."""
        grad = self.grad
        return grad.stands_for if isinstance(grad, Placeholder) else grad

    def hold_gradient(self, reduced: Tensor) -> None:
        """Add a reduced gradient; a gradient on another device stays there."""
        held = self.held_gradient
        if held is not None:
            held.add_(_shaped(reduced.to(held.device), held.shape))
        elif reduced.device == self.device:
            self.grad = _shaped(reduced, self.shape)
        else:
            placeholder = gradient_elsewhere(f"a flat parameter with {self._names[0]}", self, reduced)
            placeholder.stands_for = reduced
            self.grad = placeholder

    def bring_gradient(self) -> None:
        """Copy a gradient from another device to ``grad``, where optimizers expect it."""
        held = self.held_gradient
        if held is not None and held is not self.grad:
            self.grad = _shaped(held.to(self.device), self.shape)

    def get_param_views(self, external_data: Tensor | None = None) -> list[Tensor]:
        """Return the original parameters as views of this one, or of `external_data` of the same size.

        Raises:
            ValueError: if the data does not have as many elements as all original parameters.
        """
        data = self if external_data is None else external_data
        layout = ContiguousLayout.of(zip(self._names, self._shapes, strict=True), 1, self._layout.align)
        if data.numel() != layout.numel:
            raise ValueError(
                f"the {len(self._shapes)} parameters of this FlatParameter have {layout.numel} elements, the data has "
                f"{data.numel()}" + (" (it holds one rank's shard)" if self._is_sharded else "")
            )
        # A single split: each of many slices would have a gradient of the full size.
        sizes = [size for slot, gap in zip(layout.slots, layout.gaps, strict=True) for size in (slot.numel, gap)]
        vectors = data.view(-1).split(sizes)[::2]
        views = [vector.view(shape) for vector, shape in zip(vectors, self._shapes, strict=True)]
        for view, attributes in zip(views, self.attributes, strict=True):
            give_attributes(view, attributes)
        return views

    def metadata(self) -> tuple[tuple[str, ...], tuple[torch.Size, ...], tuple[int, ...]]:
        """Return names, shapes and numbers of elements of the original parameters."""
        return self._names, self._shapes, tuple(shape.numel() for shape in self._shapes)

    def __setstate__(self, state: Any) -> None:
        """Set the state from a pickle created by FairScale (only these contain one): numels, shapes, and places."""
        numels, shapes, infos, _ = state
        names = [".".join(filter(None, (path, name))) for path, _, name in infos]
        self._layout = ContiguousLayout.of(zip(names or map(str, range(len(shapes))), shapes, strict=True), 1)
        self.attributes = tuple({} for _ in shapes)
        self._is_sharded = self.numel() != sum(numels)

    @torch.inference_mode(False)  # else the copy could not be trained
    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        storage = copy.deepcopy(self.shard_storage, memo)
        data = (
            self.detach().as_subclass(Tensor).clone() if storage is None else storage.allocate(self.numel(), self.dtype)
        )
        if storage is not None:
            data = data.view(self.shape).copy_(self.detach())
            storage.release()
        same = {"_is_sharded": self._is_sharded, "_is_managed": self._is_managed}
        copied = memo[id(self)] = self._with(data, storage, range(len(self._layout.slots)), **same)
        give_attributes(copied, attributes_of(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        data, layout = self.detach().as_subclass(Tensor), self._layout
        return _rebuild_flat_parameter, (
            data,
            self.requires_grad,
            self._names,
            self._shapes,
            self._is_sharded,
            layout.align,
            self.group,
            type(self),
            tuple(self.valueless),
            type(layout),
            self.attributes,
            attributes_of(self),
            *((layout.block, self.packings) if layout.block > 1 or any(self.packings) else ()),  # unknown to 0.1.0
        )


class ListedParameters:
    """The parameters that modules list and optimizers step: in this class, the flat parameter itself.

    `OrigParams` lists local shards of the original parameters instead, which are views of the shard, and applies users'
    changes to them. This class requires no such updates. Docstrings of empty methods describe `OrigParams`.

    Args:
        flat_param: the shard.
        layout: the layout of the original parameters.
        rank: the number of the shard.

    Attributes:
        params: the listed parameters.
        absent: for each original parameter, the tensor that modules see while it is sharded; None for placeholders.
        versions: versions of parameters whose writes the shard's own counter does not count.
    """

    absent: list[Tensor] | None = None
    versions: tuple[int, ...] = ()

    def __init__(self, flat_param: FlatParameter, layout: Layout, rank: int) -> None:
        self._flat_param, self._layout = flat_param, layout
        self.params: list[nn.Parameter] = [flat_param]

    def param_of(self, slot: int) -> nn.Parameter:
        """Return the listed parameter with the elements of an original parameter."""
        return self._flat_param

    @property
    def requires_grad(self) -> list[bool]:
        """A flag for each original parameter: True if it is trained."""
        return [self._flat_param.requires_grad] * len(self._layout.slots)

    @property
    def zeroed(self) -> Sequence[int]:
        """The numbers of parameters without a gradient, whose accumulated gradients the user dropped."""
        return ()

    def alias(self) -> None:
        """Make the parameters views of the shard, which may be a different tensor now."""

    def note_places(self) -> None:
        """Record the addresses of the parameters after the shard's memory was moved."""

    def absorb(self) -> Sequence[int]:
        """Write values assigned to ``.data`` of the parameters to the shard.

        Return the numbers of parameters for which writes were detected.
        """
        return ()

    def follow_frozen(self) -> None:
        """Train the shard if any parameter is trained."""

    def local_shard_of(self, slot: int, value: Tensor) -> Tensor | None:
        """Return this rank's flat shard of a value distributed over ranks; None for an unsharded value."""
        return None

    def give_memory(self, slots: Iterable[int]) -> None:
        """Show the shard's memory in parameters that had no values, and showed no memory until now."""

    def collect_gradients(self) -> None:
        """Apply users' changes to gradients: zeroed (None) gradients become zero in the shard's gradient as well."""

    def show_reduced(self, used: Sequence[int], missed: Sequence[int]) -> None:
        """Show the gradients of a backward, after adding gradients accumulated in local shards by autograd."""

    def show_gradients(self, used: Sequence[int], missed: Sequence[int] = ()) -> None:
        """Set gradients to their elements of the shard's gradient; parameters not `used` remain without a gradient.

        Args:
            used: for each original parameter, whether a gradient was added on any rank.
            missed: numbers of parameters with expected gradients, whose gradients are shown only if nonzero.
        """

    def mark_unreduced(self, filled: Sequence[int]) -> None:
        """Mark missing gradients as unreduced for parameters with accumulated gradients; using one raises an error."""

    def forget_zeroed(self) -> None:
        """Free the shard's gradient if all gradients were zeroed."""


def refuse_unlike(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ValueError unless a single flat parameter can contain all of these."""
    for what in ("dtype", "device", "requires_grad", "grad_dtype"):
        values = [getattr(param, what) for param in params]
        if len(set(values)) > 1:
            listing = ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            raise ValueError(
                f"FlatParameter flattens parameters of one {what}, got {listing}. Create a FlatParameter for each."
            )


def keep_gradients_in(dtype: torch.dtype, params: Iterable[Tensor]) -> None:
    """Set the dtype of parameters' gradients, also of gradients cast together with the parameters."""
    for param in params:
        gradient = param.grad
        if gradient is not None and gradient.dtype != dtype:
            param.grad, gradient = None, gradient.to(dtype)
        param.grad_dtype, param.grad = dtype, gradient


def _shaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    return tensor if tensor.shape == shape else tensor.view(shape)


def _rebuild_flat_parameter(
    data: Tensor,
    requires_grad: bool,
    names: Any,
    shapes: Any,
    sharded: bool,
    align: int = 1,
    group: Hashable = None,
    kind: type[FlatParameter] = FlatParameter,
    valueless: tuple[int, ...] = (),
    layout_type: type[Layout] = ContiguousLayout,
    attributes: tuple[Attributes, ...] | None = None,
    own_attributes: Attributes | None = None,
    block: int = 1,
    packings: tuple[Any, ...] | None = None,
) -> FlatParameter:
    known = {"valueless": frozenset(valueless) or NO_SLOTS, "group": group, "_is_sharded": sharded}
    known["packings"] = packings or (None,) * len(shapes)
    if attributes is not None:
        known["attributes"] = attributes
    layout = layout_type.of(zip(names, shapes, strict=True), 1, align, None, block)
    flat = kind._build(data, requires_grad, layout, **known)
    give_attributes(flat, own_attributes or {})
    return flat


# So that `torch.load` with its default, `weights_only=True`, can read a flat parameter.
torch.serialization.add_safe_globals([_rebuild_flat_parameter, FlatParameter, ContiguousLayout])
