"""Original parameters for the optimizer: this rank's local shard of each parameter, under the original name.

With ``use_orig_params=True``, modules do not list a flat parameter. Each original parameter is replaced by a
`LocalShard`, a view of the shard. Optimizers then have groups, learning rates and missing gradients per parameter.
All other code uses flat vectors: a step on local shards is a step on the shard.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Hashable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import memory_of
from fsdp.engine.counted_data import bring_seen
from fsdp.engine.flat_param import FlatParameter, ListedParameter, ListedParameters
from fsdp.engine.layout import Layout
from fsdp.engine.placeholder import Placeholder, unreduced_gradient
from fsdp.engine.user_attributes import Attributes, attributes_of, give_attributes


class LocalShard(ListedParameter):
    """This rank's local shard of an original parameter: elements ``offset:offset + numel()`` in row-major order.

    1-D, and empty on ranks without elements of the parameter. For a `DTensor`, a shard of the local part.
    """

    fqn: str  # relative to the wrapped module
    unsharded_shape: torch.Size  # of the parameter, or of a DTensor's local part
    offset: int
    owner: FlatParameter  # the shard, of which this is a view

    @property
    def group(self) -> Hashable:
        """The key that `group_by` returned."""
        return self.owner.group

    @property
    def _is_sharded(self) -> bool:  # type: ignore[override]
        return self.owner._is_sharded

    @property
    def has_unreduced(self) -> bool:
        """True if gradients wait for a reduction, and this gradient was not zeroed."""
        return self.owner._has_unreduced and self.grad is not None

    @property
    def shard_storage(self) -> Any:
        return self.owner.shard_storage

    @classmethod
    def of(
        cls, owner: FlatParameter, start: int, numel: int, requires_grad: bool, fqn: str, shape: torch.Size, offset: int
    ) -> LocalShard:
        """Return elements ``start:start + numel`` of the shard `owner`, which share its version counter."""
        local = Tensor._make_subclass(cls, owner.detach()[start : start + numel], requires_grad)
        local.fqn, local.unsharded_shape, local.offset, local.owner = fqn, shape, offset, owner
        return local

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShard:
        build, (owner, *others), *_ = self.__reduce_ex__(2)
        copied = memo[id(self)] = build(copy.deepcopy(owner, memo), *others)
        give_attributes(copied, attributes_of(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        start = int(self.storage_offset() - self.owner.storage_offset())
        args = (start, self.numel(), self.requires_grad, self.fqn, self.unsharded_shape, self.offset)
        return type(self).of, (self.owner, *args), attributes_of(self) or None

    def __setstate__(self, state: Attributes) -> None:
        give_attributes(self, state)


class OrigParams(ListedParameters):
    """The local shards of the original parameters of one flat parameter, and their gradients."""

    def __init__(self, flat_param: FlatParameter, layout: Layout, rank: int) -> None:
        super().__init__(flat_param, layout, rank)
        self._rank = rank
        self._grad: weakref.ref[Tensor] | None = None  # the shard's gradient, while local shards show it
        self._intervals = [layout.interval(slot, rank) for slot in range(len(layout.slots))]
        self.params = [self._new(slot, layout, flat_param.requires_grad) for slot in range(len(layout.slots))]
        self._pointers: dict[int, int] = {}  # the last recorded address of each
        self.alias()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_grad": None}

    def _new(self, slot: int, layout: Layout, requires_grad: bool) -> nn.Parameter:
        interval, kept = self._intervals[slot], layout.slots[slot]
        offset, numel, start = (interval.offset, interval.numel, interval.start) if interval else (0, 0, 0)
        kind = self._flat_param.shard_storage.local_shard
        param = kind.of(self._flat_param, offset, numel, requires_grad, kept.name, kept.shape, start)
        give_attributes(param, self._flat_param.attributes[slot])
        return param

    # `DTensorParams` overrides these conversions between elements of a vector and parameters.

    def _of(self, shard: Tensor, slot: int) -> Tensor:
        """Return the elements of a parameter in a vector like the shard, in the shape of the local shard."""
        interval = self._intervals[slot]
        return shard[interval.offset : interval.offset + interval.numel] if interval else shard[:0]

    def _show(self, slot: int, local: Tensor) -> Tensor:
        """Return elements of a vector in the form of a local shard."""
        return local

    def _have(self, slot: int, local: Tensor) -> None:
        """Make a local shard a view of these elements of the shard."""
        self.params[slot].data = local
        self._pointers[slot] = _pointer(self.params[slot])

    def _replaced(self) -> list[int]:
        """Return the numbers of the local shards with other memory now."""
        return [slot for slot, param in enumerate(self.params) if _pointer(param) != self._pointers[slot]]

    def elements_of(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor in the form of a local shard, in order, as the same memory or a copy."""
        return tensor.detach()

    def given_gradient(self, slot: int) -> Tensor:
        """Return the elements of a local shard's gradient, which may be set by users, autograd or this library."""
        return self.elements_of(self.params[slot].grad)  # type: ignore[arg-type]  # only called if there is a gradient

    def param_of(self, slot: int) -> nn.Parameter:
        return self.params[slot]

    @property
    def requires_grad(self) -> list[bool]:
        return list(map(_needs_grad, self.params))

    def alias(self) -> None:
        shard = self._flat_param.detach()
        for slot in range(len(self.params)):
            self._have(slot, self._of(shard, slot))

    def note_places(self) -> None:
        self._pointers = {slot: _pointer(param) for slot, param in enumerate(self.params)}

    def absorb(self) -> list[int]:
        if given := {slot: self._assigned(slot) for slot in self._replaced()}:
            self._store(given)
        return []

    def follow_frozen(self) -> None:
        is_trained = True in self.requires_grad
        if self._flat_param.requires_grad is not is_trained:  # transforms of torch.func do not support setting the flag
            self._flat_param.requires_grad_(is_trained)

    def _assigned(self, slot: int) -> Tensor:
        """Return this rank's elements of a tensor assigned by a user to a local shard's ``.data``."""
        param: Any = self.params[slot]
        if getattr(param, "owner", None) is not self._flat_param:
            raise RuntimeError(
                f"{self._layout.slots[slot].name}: torch.utils.swap_tensors has replaced its shard by another tensor. "
                "Assign the other tensor's values to .data, or write them with copy_() under torch.no_grad()."
            )
        ours, given = self._of(self._flat_param.detach(), slot), self.elements_of(param)
        if given.shape == param.unsharded_shape and given.shape != ours.shape:
            given = self._layout.local_shard_of(slot, given, self._rank).view(ours.shape)
        if given.shape != ours.shape or given.dtype != ours.dtype:
            raise RuntimeError(
                f"{param.fqn}: its .data was replaced by {given.dtype} of shape {tuple(param.shape)}. This rank's "
                f"local shard is {ours.dtype} of shape {tuple(ours.shape)}, the unsharded parameter is "
                f"{tuple(param.unsharded_shape)}: assign a tensor like one of these, change the parameter inside `with "
                "model.summon_full_params():`, or cast the whole model."
            )
        return given

    @torch.inference_mode(False)  # else the shard could not be trained afterwards
    def _store(self, given: Mapping[int, Tensor]) -> None:
        """Move the shard to new memory, with these values of replaced local shards."""
        # Programs swap weights by `.data`: other tensors may use the present memory now, and keep its values.
        flat, before = self._flat_param, self._flat_param.detach()
        flat.data = flat.shard_storage.allocate(flat.numel(), flat.dtype).view(flat.shape).copy_(before)
        shard = flat.detach()
        for slot, param in enumerate(self.params):
            if slot in given:
                self._of(shard, slot).copy_(given[slot])
                flat.valueless -= {slot}
            self._have(slot, self._of(shard, slot))
            if slot not in given:
                bring_seen(param, memory_of(before))

    def show_reduced(self, used: Sequence[int], missed: Sequence[int]) -> None:
        self._flat_param.bring_gradient()
        grad = self._flat_param.grad
        if grad is not None and not isinstance(grad, Placeholder):
            for slot, param in enumerate(self.params):
                if param.grad is None or isinstance(param.grad, Placeholder):
                    continue
                ours, given = self._of(grad, slot), self.given_gradient(slot)
                if _address(given) != _address(ours):  # a loss used the local shard directly
                    ours.add_(given)
        self.show_gradients(used, missed)

    def show_gradients(self, used: Sequence[int], missed: Sequence[int] = ()) -> None:
        self._flat_param.bring_gradient()
        grad = self._flat_param.grad
        if grad is not None and not isinstance(grad, Placeholder):
            # This tensor is the base of all gradient views, which alone keep it alive until `zero_grad()`. The base is
            # not replaced: using it, a storage on disk detects whether users have kept the gradient.
            grad = grad.detach() if grad._is_view() else grad
            self._grad, self._flat_param.grad = weakref.ref(grad), None
        for slot, param in enumerate(self.params):
            shown = param.grad
            if isinstance(shown, Placeholder):
                shown = param.grad = None
            if grad is None or (shown is None and not used[slot]):
                continue
            local = self._of(grad, slot)
            if shown is not None or slot not in missed or local.any():
                param.grad = self._show(slot, local)

    def gradient_in(self, grad: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return a local shard's elements of a gradient of the shard, also in the local shard's form."""
        local = self._of(grad, slot)
        return local, self._show(slot, local)

    def mark_unreduced(self, filled: Sequence[int]) -> None:
        for slot, param in enumerate(self.params):
            if filled[slot] and param.grad is None:
                param.grad = unreduced_gradient(param.fqn, param)  # type: ignore[attr-defined]  # both kinds have it

    @property
    def zeroed(self) -> list[int]:
        return [slot for slot, grad in enumerate(map(_grad_of, self.params)) if grad is None]

    def forget_zeroed(self) -> None:
        if self._flat_param.grad is not None and not self._has_gradient():
            self._flat_param.grad = None

    def _has_gradient(self) -> bool:
        return any(map(operator.is_not, map(_grad_of, self.params), repeat(None)))

    def collect_gradients(self) -> None:
        self.forget_zeroed()
        if self._flat_param.grad is None and not self._has_gradient():
            return
        given = {
            slot: self.given_gradient(slot)
            for slot, param in enumerate(self.params)
            if not (param.grad is None or isinstance(param.grad, Placeholder))
        }  # may raise before any change
        if self._flat_param.grad is None:
            shown = None if self._grad is None else self._grad()
            # If this library did not show a gradient, users have assigned gradients.
            flat = self._flat_param
            flat.grad = torch.zeros_like(flat.detach(), dtype=flat.grad_dtype) if shown is None else shown
        grad = self._flat_param.grad
        if grad is None or isinstance(grad, Placeholder):
            return
        for slot, param in enumerate(self.params):
            ours = self._of(grad, slot)
            if slot not in given:
                ours.zero_()
            elif _address(given[slot]) != _address(ours):
                ours.copy_(given[slot])
                param.grad = self._show(slot, ours)


_needs_grad = operator.attrgetter("requires_grad")
_grad_of = operator.attrgetter("grad")


def _pointer(tensor: Tensor) -> int:
    # Also for empty tensors: ranks without elements of a parameter must detect that it was replaced, like other ranks.
    return tensor.data_ptr() or tensor.untyped_storage().data_ptr()


def _address(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor, also of an empty tensor, whose own pointer is null."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
