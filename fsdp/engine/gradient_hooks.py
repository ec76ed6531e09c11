"""`GradientHooks` calls users' hooks on the parameters of optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.orig_params import OrigParams

IN_BACKWARD = "_in_backward_optimizers"  # the attribute by which torch marks parameters


class GradientHooks:
    """The hooks of a handle, and the reduced gradient waiting for them.

    The gradient waits until backward ends, because a hook must be called once with the whole gradient of this
    backward.

    Args:
        flat_param: this rank's shard.
        params: the parameters with possible hooks: the flat parameter, or the local shards of its original parameters.
        orig_params: the object with the local shards, if they are listed instead of the flat parameter.
    """

    def __init__(
        self, flat_param: FlatParameter, params: Sequence[nn.Parameter], orig_params: OrigParams | None
    ) -> None:
        self._flat_param, self._params, self._orig_params = flat_param, params, orig_params
        self.waiting: Tensor | None = None  # [shard_numel]
        self.delivered: Sequence[nn.Parameter] = ()  # with gradients from this backward

    def keep(self, reduced: Tensor) -> None:
        """Keep a reduced gradient ``[shard_numel]`` until backward ends, or add it to the kept gradient."""
        self.waiting = reduced if self.waiting is None else self.waiting + reduced

    def run(self, used: Sequence[int]) -> None:
        """Call the hooks of `Tensor.register_hook` with the waiting gradient, and add their results to the gradient.

        Args:
            used: for each original parameter, whether any rank used it.
        """
        reduced, self.waiting = self.waiting, None
        if reduced is None:
            return
        params, orig_params = self._params, self._orig_params
        slots = [slot for slot in range(len(params)) if orig_params is None or used[slot]]
        for slot in slots:
            if params[slot]._backward_hooks:
                part, grad = (reduced, reduced) if orig_params is None else orig_params.gradient_in(reduced, slot)
                after = _after_hooks(params[slot], grad)
                if after is not grad:
                    part.copy_(after if orig_params is None else orig_params.elements_of(after))
        self._flat_param.shard_storage.accept(self._flat_param, reduced)
        self._flat_param.shard_storage.copy_stream.settle()  # so that it is complete when shown to optimizers and hooks
        self.delivered = [params[slot] for slot in slots]

    def end_backward(self) -> None:
        """Call the hooks of `Tensor.register_post_accumulate_grad_hook` for gradients of this backward.

        Afterwards step the optimizers of `_apply_optimizer_in_backward`, and drop the gradients, as its hooks do.
        """
        delivered, self.delivered = self.delivered, ()
        if delivered and any(param._post_accumulate_grad_hooks or _optimizers_of(param) for param in delivered):
            self._flat_param.bring_gradient()
            for param in (each for each in delivered if each.grad is not None):
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)
                for optimizer in (optimizers := _optimizers_of(param)):
                    optimizer.step()
                if optimizers:
                    param.grad = None

    def abandon(self) -> None:
        """Discard waiting and delivered gradients."""
        self.waiting, self.delivered = None, ()


def _after_hooks(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the result of the hooks of `Tensor.register_hook` for a gradient."""
    for hook in list((param._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _optimizers_of(param: nn.Parameter) -> list[torch.optim.Optimizer]:
    """Return the optimizers created for a parameter by torch's `_apply_optimizer_in_backward`.

    Their hooks are on its node in the graph, which the gradient of a shard does not pass. A copy of the parameter has
    the same list, and is not stepped by it.
    """
    found = param.__dict__.get(IN_BACKWARD, ())
    return [each for each in found if any(param is own for group in each.param_groups for own in group["params"])]
