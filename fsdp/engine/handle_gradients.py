"""How a handle takes in gradients: whole ones from autograd, one by one, and reduced ones for its shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import Pending
from fsdp.distributed.comm_hook import HookCall
from fsdp.engine.handle_state import HandleState
from fsdp.engine.labels import label
from fsdp.engine.placeholder import Placeholder, unreduced_gradient


class TakesGradients(HandleState):
    """The part of `FlatParamHandle` that backward needs."""

    def take_gradient(self, slot: int, leaf: Tensor, divisor: float) -> bool:
        """Move a leaf's gradient into the flat buffer; True when it was the last one missing in this backward."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{self.layout.slots[slot].name} has a gradient of layout {gradient.layout}: flat gradients are "
                    "dense. Make the embedding with sparse=False."
                )
            part = self.flat_param.parts[slot]
            self.gradients.add(slot, gradient if part is None else part.gradient(gradient), divisor)
        return self.gradients.is_complete

    def reduce(self) -> Pending:
        """Start to sum the accumulated gradient over the ranks; the result is the shard's, in `reduced_dtype`.

        With a hook it is an average, and here when this returns.
        """
        with label("reduce_scatter", self._unit_name):
            return self._reduce()

    def _reduce(self) -> Pending:
        what, gradient, dtype = f"reduce-scatter of {self.name}", self.gradients.take(), self.reduced_dtype
        if self.comm_hook is None or not self.layout.numel:
            return self.reduce_comm.reduce_scatter(gradient, what, self.reduce_tag, dtype)
        shard = self.comm_hook.reduce(gradient, HookCall(self.name, self.reduce_comm, self.reduce_tag), dtype)
        return Pending(what, (), lambda: shard)

    @property
    def reduced_dtype(self) -> torch.dtype:
        """Of what `reduce` brings: the shard's dtype; what is to be summed further does not lose digits before."""
        own = self.flat_param.dtype
        return torch.promote_types(own, self.gradients.dtype) if self.is_replicated else own

    def accept(self, reduced: Tensor) -> None:
        """Add a reduced gradient to the shard's; if there are hooks to be called with it, when `deliver` is."""
        self.flat_param._has_unreduced = False
        if not any(self.gradients.used) and any(self.gradients.missed) and not reduced.any():
            return  # no rank has anything of what all awaited
        self.storage.check(self.name)
        reduced = reduced.to(self.gradients.dtype) if self._precision.keeps_low_gradients else reduced
        if any(param._backward_hooks or param._post_accumulate_grad_hooks for param in self._hookable):
            self._reduced = reduced if self._reduced is None else self._reduced + reduced
        else:
            self.storage.accept(self.flat_param, reduced)

    @property
    def _hookable(self) -> Sequence[nn.Parameter]:
        return [self.flat_param] if self.pieces is None else self.pieces.params

    def deliver(self, used: Sequence[int], missed: Sequence[int]) -> None:
        """All gradients of this backward are reduced: call the hooks of `Tensor.register_hook`, and show gradients.

        Args:
            used, missed: of the original parameters, see `Pieces.show_gradients`.
        """
        reduced, self._reduced = self._reduced, None
        if reduced is not None:
            params = self._hookable
            slots = [slot for slot in range(len(params)) if self.pieces is None or used[slot]]
            for slot in slots:
                if params[slot]._backward_hooks:
                    part, grad = (reduced, reduced) if self.pieces is None else self.pieces.gradient_in(reduced, slot)
                    after = _after_hooks(params[slot], grad)
                    if after is not grad:
                        part.copy_(after if self.pieces is None else self.pieces.vector_of(slot, after))
            self.storage.accept(self.flat_param, reduced)
            self._delivered = [params[slot] for slot in slots]
        if self.pieces is not None:
            self.pieces.show_gradients(used, missed)

    def call_hooks(self) -> None:
        """Call the hooks of `Tensor.register_post_accumulate_grad_hook`, of what this backward has brought."""
        delivered, self._delivered = self._delivered, []
        if any(param._post_accumulate_grad_hooks for param in delivered):
            self.storage.copy_stream.settle()
            self.flat_param.bring_gradient()
            for param in (each for each in delivered if each.grad is not None):
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)

    def mark_unreduced(self) -> None:
        """Let the shard's missing gradient say why it is missing, if it is and something is accumulated."""
        if not self.gradients.is_empty:
            self.flat_param._has_unreduced = True
            if self.flat_param.grad is None:
                self.flat_param.grad = unreduced_gradient(self.name, self.flat_param)
            if self.pieces is not None:
                self.pieces.mark_unreduced(self.gradients.filled)

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for their reduction, and were not zeroed."""
        self.forget_zeroed()
        return self.flat_param.has_unreduced

    def forget_zeroed(self) -> None:
        """Free the gradient of which users have zeroed all that modules list; not inside a backward.

        There a gradient may be reduced that is not shown to the pieces yet, which looks the same.
        """
        if self.pieces is not None:
            self.pieces.forget_zeroed()

    def full_gradients(self) -> list[Tensor | None]:
        """Collective. The whole reduced gradients, with memory of their own; None for parameters without.

        Raises:
            RuntimeError: if gradients are not reduced yet.
        """
        if self.has_unreduced:
            raise RuntimeError(
                f"the gradients of {self.name} accumulated under no_sync() are not reduced over the ranks yet, so none "
                "can be shown. Run the last backward of the step outside no_sync()."
            )
        if self.pieces is not None:
            self.pieces.collect_gradients()
        self.flat_param.bring_gradient()
        grad = self.flat_param.grad
        if grad is None:
            return [None] * len(self.places)
        shard = grad.detach().view(-1).to(self.storage.device)
        full = shard.new_empty(self.layout.padded_numel)
        self.comm.all_gather(full, shard, f"all-gather of the gradient of {self.name}", ("gradient", self.tag)).wait()
        self.comm.settle()
        shown: list[Tensor | None] = []
        for slot, (view, part) in enumerate(zip(self.layout.unpack(full), self.flat_param.parts, strict=True)):
            has_none = self.pieces is not None and self.pieces.params[slot].grad is None
            shown.append(None if has_none else part.dtensor(view.clone()) if part else view.clone())
        return shown

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Have this rank's part of whole gradients, in the place of those that it has."""
        self.zero_grad()
        self.flat_param.forget_gradient()
        if all(gradient is None for gradient in gradients):
            return
        dtype = self.gradients.dtype if self._precision.keeps_low_gradients else self.flat_param.dtype
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.storage.device)
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                part = self.flat_param.parts[slot]
                whole = gradient.detach() if part is None else part.cut(self.layout.slots[slot].name, gradient.detach())
                self.layout.shard_of(slot, whole, shard, self.comm.rank)
        self.storage.accept(self.flat_param, shard)
        if self.pieces is not None:
            self.storage.copy_stream.settle()
            self.pieces.show_gradients([gradient is not None for gradient in gradients])

    @property
    def has_no_gradient(self) -> bool:
        """Whether nothing is there that the next gradient would be added to."""
        return all(param.grad is None for param in self.registry.params)

    def zero_grad(self) -> None:
        """Have no gradient, as after an optimizer's ``zero_grad()``."""
        for param in self.registry.params:
            param.grad = None

    def begin_backward(self, is_summing: bool = False) -> None:
        """Expect every gradient; `is_summing` if this backward's are added to, and not reduced at its end."""
        if self.pieces is not None:
            self.gradients.forget(self.pieces.zeroed)
            self.pieces.collect_gradients()
        # `mark_unreduced` left no None behind: the user has zeroed the gradients since, accumulated ones included.
        if self.flat_param.grad is None:
            self.flat_param.forget_gradient()
            self.gradients.drop()
        self.gradients.begin_backward(is_summing)

    def drop_unreduced(self) -> None:
        """Forget what is accumulated and not reduced, or not delivered."""
        self._reduced, self._delivered = None, []
        self.flat_param._has_unreduced = False
        self.gradients.drop()
        if isinstance(self.flat_param.grad, Placeholder) and self.flat_param.held_gradient is None:
            self.flat_param.grad = None
        if self.pieces is not None:
            self.pieces.show_gradients([False] * len(self.layout.slots))
        for unsharded in self._unsharded_by_dtype.values():
            for leaf in unsharded.leaves:
                leaf.grad = None


def _after_hooks(param: nn.Parameter, grad: Tensor) -> Tensor:
    """What the hooks of `Tensor.register_hook` make of a gradient."""
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
