"""`FlatParameter`: many parameters in one vector, and where they were."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import MeshPart, is_dtensor, local_part
from fsdp.distributed.gather_extension import is_extended, values_of
from fsdp.engine.counted_data import CountedParameter
from fsdp.engine.fingerprints import Fingerprints
from fsdp.engine.layout import ContiguousLayout, Layout
from fsdp.engine.placeholder import Placeholder, gradient_elsewhere


class ParamInfo(NamedTuple):
    """A place where a parameter is used: attribute `name` of `module`, `fqn` as seen from the unit's module."""

    module: nn.Module
    name: str
    fqn: str


class SharedParamInfo(NamedTuple):
    """A further place of a parameter that occurs several times in one unit; `primary` is the first one."""

    module: nn.Module
    name: str
    fqn: str
    primary: ParamInfo


Attributes = dict[str, Any]


def attributes_of(param: Tensor) -> Attributes:
    """Return the attributes that users have set on a parameter, and not its class."""
    own = {name for kind in type(param).__mro__ for name in vars(kind).get("__annotations__", ())}
    return {name: value for name, value in vars(param).items() if name not in own and not name.startswith(_NOT_SET)}


_NOT_SET = "__", "_dynamo"  # by users


def give_attributes(param: Tensor, attributes: Attributes) -> None:
    """Set what users had set on the parameter that this one stands for, but for what it has itself."""
    for name, value in attributes.items():
        if not hasattr(param, name):
            param.__dict__[name] = value


class FlatParameter(CountedParameter):
    """Several parameters, in row-major order one after the other, as one 1-D parameter.

    One that is by itself, and not sharded, may keep its shape.

    Args:
        params: a non-empty list or tuple of parameters of one dtype and device, none of them flat.
        requires_grad: whether the flat parameter is trained.
        names: the parameters' names, by default their numbers.

    Raises:
        ValueError: if `params` is empty, not a list or tuple of parameters, or contains a `FlatParameter`.
    """

    _names: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]  # of `DTensor`s, those of their local parts
    parts: tuple[MeshPart | None, ...]  # what those of them that are `DTensor`s are parts of
    _layout_type: type[Layout]  # how it is divided into shards
    _dims: tuple[int, ...] | None  # along which each is sharded; None: the first
    _align: int  # at a multiple of so many elements each parameter starts
    _is_sharded: bool  # it holds one rank's shard
    _is_managed: bool  # a handle runs it
    _has_unreduced: bool  # gradients were accumulated under `no_sync` and are not in `grad` yet
    valueless: set[int]  # the numbers of those that have no values yet: they came from the meta device
    shard_storage: Any  # where a shard and its gradient live
    attributes: tuple[Attributes, ...]  # what users had set on its parameters
    group: Hashable = None  # what `group_by` said of its parameters
    fingerprints: Fingerprints | None = None  # of what it was made from, until a handle takes them over
    example: Tensor | None = None  # an empty tensor of its parameter's class, if that has torch's all-gather extension
    _vector: Tensor | None = None  # the last one that was asked for

    def __new__(
        cls, params: Sequence[nn.Parameter], requires_grad: bool = True, names: Sequence[str] | None = None
    ) -> FlatParameter:
        if not isinstance(params, (list, tuple)) or not params:
            raise ValueError(f"FlatParameter needs a non-empty list or tuple of parameters, got {params!r}")
        is_pickled = len(params) == 1 and type(params[0]) is Tensor  # by FairScale: `__setstate__` follows
        for param in () if is_pickled else params:
            if not isinstance(param, nn.Parameter) or isinstance(param, FlatParameter) or is_dtensor(param):
                raise ValueError(f"FlatParameter flattens plain parameters, got a {type(param).__name__}")
        dtypes = {param.dtype for param in params}
        if len(dtypes) > 1:
            raise ValueError(f"FlatParameter flattens parameters of one dtype, got {sorted(map(str, dtypes))}")
        data = torch.cat([param.detach().reshape(-1) for param in params])
        shapes = tuple(param.shape for param in params)
        self = cls._build(data, requires_grad, tuple(names or map(str, range(len(params)))), shapes)
        self.attributes = tuple(map(attributes_of, params))
        return self

    @classmethod
    def _build(
        cls,
        data: Tensor,
        requires_grad: bool,
        names: tuple[str, ...],
        shapes: tuple[torch.Size, ...],
        layout_type: type[Layout] = ContiguousLayout,
    ) -> FlatParameter:
        self = Tensor._make_subclass(cls, data, requires_grad)
        self._names, self._shapes, self.parts = names, shapes, (None,) * len(shapes)
        self._is_sharded = self._is_managed = self._has_unreduced = False
        self._layout_type, self._align, self._dims = layout_type, 1, None
        self.valueless = set()
        self.attributes = tuple({} for _ in shapes)
        self.shard_storage = None
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
        replicas: int = 1,
        layout_type: type[Layout] = ContiguousLayout,
        dims: tuple[int, ...] | None = None,
        keeps_shape: bool = False,
    ) -> FlatParameter:
        """Make one rank's shard of the flat parameter straight from the parameters: there is no unsharded copy.

        Args:
            params, names: what it is made of; of `DTensor`s, their local parts. Zeros stand for what has no values.
            rank, world_size: which shard, of how many.
            storage: where it lives (a `ShardStorage`).
            align: each parameter starts at a multiple of so many elements.
            replicas: how many ranks hold this shard.
            layout_type: how it is divided into shards.
            dims: the dimension along which each parameter is sharded; None is the first.
            keeps_shape: if it is one parameter that no other rank has a part of, it has that one's shape.
        """
        locals_ = [values_of(local_part(param)) for param in params]
        shapes = tuple(local.shape for local in locals_)
        layout = layout_type.of(zip(names, shapes, strict=True), world_size, align, dims)
        shard = storage.allocate(layout.shard_numel, params[0].dtype)
        for slot, local in enumerate(locals_):
            if not local.is_meta:
                layout.shard_of(slot, local, shard, rank)
        if keeps_shape and world_size == 1 and not is_dtensor(params[0]):
            shard = shard.view(shapes[0])
        self = storage.flat_parameter._build(shard, params[0].requires_grad, tuple(names), shapes, layout_type)
        self._dims, self.parts = dims, tuple(MeshPart.of(param) for param in params)
        self._is_sharded, self._align = world_size > 1 and layout.numel > 0, align
        self.valueless = {slot for slot, local in enumerate(locals_) if local.is_meta and local.numel()}
        if world_size * replicas > 1 and layout.numel > 0:  # later nobody knows what the others have seen
            self.fingerprints = Fingerprints.of(locals_, layout.local_shards(self.vector, rank))
        self.shard_storage = storage
        self.attributes = tuple(map(attributes_of, params))
        if len(params) == 1:
            give_attributes(self, self.attributes[0])
        if is_extended(first := local_part(params[0].detach())):  # of the only one
            self.example = first.new_zeros([0] * first.dim())
        storage.release()
        return self

    @classmethod
    def part_of_shard(cls, shard: FlatParameter, slots: Sequence[int], rank: int, world_size: int) -> FlatParameter:
        """A shard of some of the parameters of another one, with a storage of its own of the same kind.

        Args:
            shard: this rank's.
            slots: the numbers of the parameters.
            rank, world_size: which shard, of how many.
        """
        storage = copy.deepcopy(shard.shard_storage)
        names, shapes = tuple(shard._names[slot] for slot in slots), tuple(shard._shapes[slot] for slot in slots)
        dims = None if shard._dims is None else tuple(shard._dims[slot] for slot in slots)
        layout = shard._layout_type.of(zip(names, shapes, strict=True), world_size, shard._align, dims)
        data, old = storage.allocate(layout.shard_numel, shard.dtype), shard.make_layout(world_size)
        values, places = old.local_shards(shard.detach(), rank), layout.local_shards(data, rank)
        for number, slot in enumerate(slots):
            places[number].copy_(values[slot])
        self = storage.flat_parameter._build(data, shard.requires_grad, names, shapes, shard._layout_type)
        self._dims, self.parts = dims, tuple(shard.parts[slot] for slot in slots)
        self._is_sharded, self._align = world_size > 1 and layout.numel > 0, shard._align
        self.valueless = {number for number, slot in enumerate(slots) if slot in shard.valueless}
        self.group, self.shard_storage = shard.group, storage
        self.attributes = tuple(shard.attributes[slot] for slot in slots)
        self.example = shard.example
        return self

    def __init__(self, params: Any = None, requires_grad: bool = True, names: Any = None) -> None:
        pass

    def make_layout(self, world_size: int = 1) -> Layout:
        """Return the layout of the parameters in the vector when `world_size` ranks share it."""
        return self._layout_type.of(zip(self._names, self._shapes, strict=True), world_size, self._align, self._dims)

    @property
    def vector(self) -> Tensor:
        """Its elements in one dimension, in the same memory."""
        known = self._vector
        if known is None or known.data_ptr() != self.data_ptr() or known.dtype is not self.dtype:
            with torch.inference_mode(False):
                known = self._vector = self.detach().as_subclass(Tensor).view(-1)
        return known

    @property
    def owner(self) -> FlatParameter:
        """Itself; what owns the memory of a `LocalShard`."""
        return self

    @property
    def has_unreduced(self) -> bool:
        """True if gradients wait for their reduction, and were not zeroed."""
        return self._has_unreduced and self.grad is not None

    @property
    def held_gradient(self) -> Tensor | None:
        """The reduced gradient, wherever it is; None without one."""
        grad = self.grad
        return grad.stands_for if isinstance(grad, Placeholder) else grad

    def hold_gradient(self, reduced: Tensor) -> None:
        """Add a reduced gradient; one on another device is kept there, beside the parameter."""
        held = self.held_gradient
        if held is not None:
            held.add_(_shaped(reduced.to(held.device), held.shape))
        elif reduced.device == self.device:
            self.grad = _shaped(reduced, self.shape)
        else:
            placeholder = gradient_elsewhere(f"a flat parameter with {self._names[0]}", self, reduced.device)
            placeholder.stands_for = reduced
            self.grad = placeholder

    def bring_gradient(self) -> None:
        """Have a gradient that is kept elsewhere in ``grad``, where optimizers look for it."""
        held = self.held_gradient
        if held is not None and held is not self.grad:
            self.grad = _shaped(held.to(self.device), self.shape)

    def forget_gradient(self) -> None:
        """Have no gradient, here or elsewhere."""
        self.grad = None

    def get_param_views(self, external_data: Tensor | None = None) -> list[Tensor]:
        """The original parameters as views of this one, or of `external_data` of the same size.

        Raises:
            ValueError: if the data hasn't as many elements as the original parameters together.
        """
        data = self if external_data is None else external_data
        layout = ContiguousLayout.of(zip(self._names, self._shapes, strict=True), 1, self._align)
        if data.numel() != layout.numel:
            raise ValueError(
                f"the {len(self._shapes)} parameters of this FlatParameter have {layout.numel} elements, the data has "
                f"{data.numel()}" + (" (it holds one rank's shard)" if self._is_sharded else "")
            )
        # One split: of as many slices, each would have a gradient of the full size.
        sizes = [size for slot, gap in zip(layout.slots, layout.gaps, strict=True) for size in (slot.numel, gap)]
        vectors = data.view(-1).split(sizes)[::2]
        views = [vector.view(shape) for vector, shape in zip(vectors, self._shapes, strict=True)]
        for view, attributes in zip(views, self.attributes, strict=True):
            give_attributes(view, attributes)
        return views

    def metadata(self) -> tuple[tuple[str, ...], tuple[torch.Size, ...], tuple[int, ...]]:
        """Names, shapes and numbers of elements of the original parameters."""
        return self._names, self._shapes, tuple(shape.numel() for shape in self._shapes)

    def __setstate__(self, state: Any) -> None:
        """Take the state of a pickle that FairScale made (only those have one): numels, shapes, and places."""
        numels, shapes, infos, _ = state
        names = (".".join(filter(None, (path, name))) for path, _, name in infos)
        self._names = tuple(names) or tuple(map(str, range(len(shapes))))
        self._shapes = tuple(map(torch.Size, shapes))
        self.attributes = tuple({} for _ in self._shapes)
        self._is_sharded = self.numel() != sum(numels)

    @torch.inference_mode(False)  # or the copy could not be trained
    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        storage = copy.deepcopy(self.shard_storage, memo)
        data = (
            self.detach().as_subclass(Tensor).clone() if storage is None else storage.allocate(self.numel(), self.dtype)
        )
        if storage is not None:
            data = data.view(self.shape).copy_(self.detach())
            storage.release()
        copied = memo[id(self)] = type(self)._build(
            data, self.requires_grad, self._names, self._shapes, self._layout_type
        )
        copied._is_sharded, copied._is_managed, copied.group = self._is_sharded, self._is_managed, self.group
        copied.parts, copied._align, copied._dims = self.parts, self._align, self._dims
        copied.valueless = set(self.valueless)
        copied.shard_storage = storage
        copied.attributes, copied.example = self.attributes, self.example
        give_attributes(copied, attributes_of(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self.detach().as_subclass(Tensor)
        return _rebuild_flat_parameter, (
            data,
            self.requires_grad,
            self._names,
            self._shapes,
            self._is_sharded,
            self._align,
            self.group,
            type(self),
            tuple(self.valueless),
            self._layout_type,
            self.attributes,
            attributes_of(self),
        )


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
) -> FlatParameter:
    flat = kind._build(data, requires_grad, names, shapes, layout_type)
    flat._is_sharded, flat._align, flat.group = sharded, align, group
    flat.valueless = set(valueless)
    flat.attributes = flat.attributes if attributes is None else attributes
    give_attributes(flat, own_attributes or {})
    return flat


# So that `torch.load` with its default, `weights_only=True`, reads a flat parameter back.
torch.serialization.add_safe_globals([_rebuild_flat_parameter, FlatParameter, ContiguousLayout])
