"""`UnshardedParameters`: a flat parameter gathered in one buffer, and the leaves that modules compute with.

The buffer is a tensor created once, whose *storage* is freed and allocated again. The leaves, one per parameter, are
views created once and never again; modules compute with them, and autograd accumulates into them. Leaves are created
from ``.data``, so each has a separate version counter: to autograd, gathering into the buffer does not look like a
change of saved weights. If a parameter is a `DTensor`, its leaf is a `DTensor` around such a view.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import is_dtensor, local_part, memory_of, set_local_part
from fsdp.distributed.gather_extension import PLAIN
from fsdp.engine.autograd import FreedLeaves, accumulator_of
from fsdp.engine.counted_data import CountedParameter, counted, version_of, version_of_dtensor
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.layout import Layout
from fsdp.engine.placeholder import Placeholder, copy_as, sharded_weight, valueless_weight
from fsdp.engine.rows_layout import Arrangement
from fsdp.engine.user_attributes import give_attributes


class UnshardedParameters:
    """The parameters of a layout in one buffer.

    Args:
        flat_param: this rank's shard, which knows the kind of each parameter.
        layout: where the parameters are in the buffer.
        full: ``[unsharded_numel]`` or more, the buffer; never freed if the shard itself is the buffer (`is_shard`).
        requires_grad: the flag of each leaf.
        on_gradient: called with a parameter's number and its leaf when the leaf's gradient is complete; also
            called for frozen leaves, without a gradient.
        absent: for each parameter, the tensor that modules see while it is sharded. Default: placeholders, or the
            leaves if the buffer is the shard.

    Attributes:
        leaves: the unsharded parameters.
        absent: the same as the argument, with placeholders created.
        nbytes: the size of the buffer.
    """

    is_exact = True  # leaves contain the values of the shards, cast to the compute dtype
    outgoing: Tensor | None = None  # sent by this rank in an all-gather instead of the shard

    def __init__(
        self,
        flat_param: FlatParameter,
        layout: Layout,
        full: Tensor,
        *,
        is_shard: bool,
        requires_grad: Sequence[bool],
        on_gradient: Callable[[int, Tensor], None],
        absent: Sequence[Tensor] | None = None,
    ) -> None:
        self.full = full
        self.is_shard = is_shard
        self.nbytes = full.numel() * full.element_size()
        views = [view.data for view in layout.views(full[: layout.unsharded_numel])]
        parts, self._attributes = flat_param.parts, flat_param.attributes
        seen = [part.shown(view) if part else view for view, part in zip(views, parts, strict=True)]
        self._on_gradient = on_gradient
        self._has_wide_gradients = (flat_param.grad_dtype or flat_param.dtype).itemsize > flat_param.dtype.itemsize
        self._layout = layout
        self._placeholders: dict[str, Placeholder] = {}
        self.leaves = list(map(self._new_leaf, range(len(seen)), seen, requires_grad))
        self._freed = FreedLeaves(self.leaves)
        are_dtensors = any(map(is_dtensor, self.leaves))
        self._version_of: Callable[[Any], int] = version_of_dtensor if are_dtensors else version_of
        self._placed = [view.numel() > 0 for view in views]
        self._expected: list[int] | None = None  # the leaves' versions, while they contain the gathered values
        if is_shard:
            self.rest()
        self.absent = list(self._hidden(flat_param.valueless) if absent is None else absent)
        self._arrangement = None if is_shard or layout.gathers_in_order else Arrangement(layout, full)
        self._gathered = full[: layout.padded_numel]
        self._accumulators: list[Any] | None = None
        self._is_arranged = False  # whether `_arrangement` is used in the running all-gather
        self.free()

    def _watch(self, inside: Mapping[int, Sequence[Tensor]]) -> None:
        """Also watch tensors inside leaves, by the leaves' ids: classes may use separate version counters for them."""

        def version_within(leaf: Tensor) -> int:
            return leaf._version + sum(tensor._version for tensor in inside.get(id(leaf), ()))

        self._version_of = version_within
        self._freed = FreedLeaves([*self.leaves, *(tensor for tensors in inside.values() for tensor in tensors)])

    def _new_leaf(self, number: int, tensor: Tensor, requires_grad: bool) -> nn.Parameter:
        """Return a leaf around the unsharded values of a parameter."""
        may_train = tensor.is_floating_point() or tensor.is_complex()
        leaf = counted(tensor, may_train)  # so that writes through its `.data` are detected
        if may_train:  # also for frozen parameters, whose leaf stays the same tensor when thawed
            leaf.register_post_accumulate_grad_hook(partial(self._on_gradient, number))
            leaf.requires_grad_(requires_grad)
            if self._has_wide_gradients:
                leaf.grad_dtype = None  # any dtype, because operators may compute wider gradients
        give_attributes(leaf, self._attributes[number])
        name = self._layout.slots[number].name
        copy_as(leaf, self._placeholders.setdefault(name, sharded_weight(name, leaf)))
        return leaf

    def _hidden(self, valueless: Collection[int]) -> Iterator[Tensor]:
        """Yield for each parameter the tensor that modules see while the parameter is sharded."""
        for number, (slot, leaf) in enumerate(zip(self._layout.slots, self.leaves, strict=True)):
            if not self.is_shard:
                yield self._placeholders[slot.name]
            else:
                yield valueless_weight(slot.name, leaf) if number in valueless else leaf

    @property
    def accumulators(self) -> list[Any]:
        """The nodes through which autograd accumulates gradients of leaves; None for frozen leaves."""
        if self._accumulators is None:
            self._accumulators = [accumulator_of(leaf) if leaf.requires_grad else None for leaf in self.leaves]
        return self._accumulators

    def begin_gather(self, *, directly: bool = False) -> Tensor:
        """Return memory ``[padded_numel]`` to all-gather into: the buffer if parameters have the same order in it.

        Args:
            directly: If True, the message contains the whole buffer in its order.
        """
        self._is_arranged = self._arrangement is not None and not directly
        if self._arrangement is not None and self._is_arranged:
            return self._arrangement.begin()
        self._allocate()
        return self.full if directly else self._gathered

    def end_gather(self, *, is_wanted: bool = True) -> None:
        """Copy out the values received in the completed all-gather."""
        if self._arrangement is not None and self._is_arranged:
            if is_wanted:
                self._allocate()
            self._arrangement.end(is_wanted)
        if is_wanted:
            self._freed.unseal()
            self.rest()

    def free(self, *, keeps_memory: bool = False) -> None:
        """Free the buffer's memory, or only discard the values (`keeps_memory`).

        The storage is freed, and the tensor is kept: autograd may have saved the leaves, and must find the data in the
        same storage again after the next all-gather.
        """
        if not self.is_shard:
            if self._expected is not None and not torch.is_inference_mode_enabled():
                self._freed.seal()  # also in backward: a retained graph has saved the leaves
            if not keeps_memory:
                self._release()
            self._expected = None

    def _release(self) -> None:
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            warnings.warn(
                f"{self._layout.slots[0].name} and the parameters that are sharded with it stay unsharded in "
                "memory, because NumPy shares the memory: copy a weight first, as in "
                "weight.detach().clone().numpy().",
                stacklevel=2,
            )

    def outdate(self) -> None:
        """Mark the next values as new: autograd then raises an error in graphs that saved the leaves earlier."""
        if not self.is_shard:
            self._freed.outdate()

    def _allocate(self) -> None:
        storage = self.full.untyped_storage()
        if storage.nbytes() != self.nbytes:  # memory shared with NumPy could not be freed
            storage.resize_(self.nbytes)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor uses the buffer's memory, which will be freed."""
        return not self.is_shard and memory_of(tensor) == self.full.untyped_storage().data_ptr()

    @property
    def references(self) -> int:
        """Return how many tensors use the buffer's memory, including tensors saved by graphs."""
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)

    def is_same(self, number: int, value: Tensor) -> bool:
        """Return whether a tensor is another object with the same memory, shape and strides as a leaf."""
        leaf = self.leaves[number]
        return type(value) in PLAIN and type(leaf) in (*PLAIN, CountedParameter) and are_same(value, leaf)

    def name_unit(self, unit: str) -> None:
        """Set the name of the unit in messages of placeholders."""
        for name, placeholder in self._placeholders.items():
            placeholder.rename(name, unit)

    def rest(self) -> None:
        """Detect writes to the leaves from now on."""
        self._expected = list(map(self._version_of, self.leaves))

    def written(self) -> list[int]:
        """The numbers of the leaves written since the all-gather, or since `rest`."""
        if self._expected is None or (now := list(map(self._version_of, self.leaves))) == self._expected:
            return []
        both = zip(now, self._expected, strict=True)
        return [number for number, (version, expected) in enumerate(both) if version != expected]

    def differ_from(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        """Return whether the buffer differs from this rank's shards, a tensor of shape ``[]``.

        Version counters miss some writes, by ``torch._foreach_*`` on `DTensor`s, NumPy and collectives.

        Args:
            shards: the flat shard of each parameter.
            rank: the number of this rank in the layout.
        """
        found = torch.zeros((), dtype=torch.bool, device=self.full.device)
        for slot, view in enumerate(self._views()):
            if (own := shards[slot]).numel():
                found |= (self._layout.local_shard_of(slot, view, rank) != own.to(view)).any()
        return found

    def moved(self) -> list[int]:
        """The numbers of `written` leaves whose ``.data`` now uses other memory than the buffer."""
        written = self.written()
        views = self._views() if written else []
        return [
            number
            for number in written
            if self._placed[number] and local_part(self.leaves[number]).data_ptr() != views[number].data_ptr()
        ]

    def _views(self) -> list[Tensor]:
        return self._layout.views(self.full.detach()[: self._layout.unsharded_numel])

    def new_value(self, number: int) -> nn.Parameter:
        """Return a leaf that was `written`, with the new values for the shards."""
        return self.leaves[number]

    def train(self, requires_grad: Sequence[bool]) -> None:
        """Set for each leaf whether future operations are differentiated with respect to it.

        The leaves stay the same tensors, so earlier graphs keep their paths to the leaves; as for ordinary parameters,
        autograd reads the flag again when it accumulates.
        """
        for leaf, needs in zip(self.leaves, requires_grad, strict=True):
            if leaf.requires_grad is not needs:
                leaf.requires_grad_(needs)
        self._accumulators = None

    def restore(self, numbers: Sequence[int]) -> None:
        """Restore `written` leaves as views of the buffer, with their new values."""
        for number in set(self.moved()).intersection(numbers):
            view = self._views()[number]
            view.copy_(local_part(self.leaves[number]).detach())
            set_local_part(self.leaves[number], view.data)
        self.rest()


def are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two plain tensors contain the same elements in the same memory."""
    has_memory = one.layout is other.layout is torch.strided and one.device == other.device and not one.is_meta
    return has_memory and one.dtype == other.dtype and one.is_set_to(other)
