"""`ShardedGradScaler`: loss scaling for float16, in which all ranks take or skip a step together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fsdp.distributed.collectives import communicator, during
from fsdp.distributed.communicator import Group, default_group, uncompiled
from fsdp.distributed.devices import HOST, accelerator
from fsdp.distributed.dtensor import missing_ranks
from fsdp.engine.originals import is_ours
from fsdp.engine.runtime import reduce_deferred, runtimes
from fsdp.layers.listed_shards import params_of


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded gradients: the ranks agree on infinite or NaN gradients.

    float16 gradients below 6e-8 are lost, so the loss is multiplied by a large scale before backward and gradients are
    divided by it before the step. If a gradient is not finite, the step is skipped and the scale is lowered. Each rank
    checks only its own shards, so the ranks combine the results in a reduction for each optimizer and step. ::

        scaler = ShardedGradScaler()
        loss = loss_of(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # if gradients are clipped
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    `unscale_` and `step` are collective over `process_group`; all other methods are torch's. Gradients may be on any
    device, including a different device than the loss, and of any floating-point dtype, including float16.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: see `torch.amp.GradScaler`.
        enabled: If False, no method has an effect.
        process_group: the ranks that must agree; None means all ranks. If units have separate process groups or
            parameters are DTensors, pass a group of all ranks that hold a part of the model.
        device: the device type of the loss ("cuda", "cpu"). None uses the accelerator if there is one, else "cpu". This
            is the last argument, as in FairScale, and not the first one, as in torch's classes.

    Raises:
        TypeError: if `init_scale` is a device.
    """

    agrees_over_ranks = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Group | None = None,
        device: str | None = None,
    ) -> None:
        first: Any = init_scale
        if isinstance(first, str):
            raise TypeError(
                f"ShardedGradScaler({first!r}): the first argument is init_scale, as in FairScale. "
                f"Pass device={first!r}"
            )
        super().__init__(
            device or (accelerator() or HOST).type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Collective. Step with unscaled gradients, unless a rank has an infinite or NaN gradient."""
        if not self._fuses_across_devices(optimizer):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)  # raises torch's error
        # The following code is the half of torch's step for optimizers that don't unscale (private; 2.11 to 2.15):
        # torch would pass scale and flag to the fused step by copies to the host without waiting for them.
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return returned

    def _fuses_across_devices(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self._enabled or not getattr(optimizer, "_step_supports_amp_scaling", False) or self._scale is None:
            return False
        return any(param.device != self._scale.device for param in params_of(optimizer))

    @uncompiled
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Private in torch, but the only method that both `unscale_` and the step of fused optimizers (which unscale in
        # their kernel) call. The signature has not changed since torch 1.6; tested with 2.11 to 2.15.
        if any(runtime.participation.is_joining for runtime in runtimes()):
            raise NotImplementedError(
                "ShardedGradScaler inside fsdp.join is not supported: all ranks would have to take part in it, but "
                "ranks that have finished do not. Train in bfloat16, which needs no scaling, or give all ranks equally "
                "many batches."
            )
        params = params_of(optimizer)
        reduce_deferred(param.owner for param in params if is_ours(param))
        # Grouped by class too: torch's function does not accept `DTensor`s mixed with plain gradients.
        grads: dict[tuple[torch.device, torch.dtype, type], list[Tensor]] = {}
        for param in params:
            if is_ours(param):
                if param.owner._has_unreduced and param.grad is not None:
                    raise RuntimeError(
                        "ShardedGradScaler: gradients that were accumulated under no_sync() are not reduced over the "
                        "ranks yet. Run the last backward of the step outside no_sync()."
                    )
                self._refuse_part_of(param)
                if param.owner.shard_storage is not None:
                    param.owner.shard_storage.check(f"unscaling of a flat parameter with {param.owner._names[0]}")
                param.owner.bring_gradient()
            if param.grad is not None:
                if param.grad.is_sparse:  # of an unsharded parameter
                    param.grad = param.grad.coalesce()
                grad = param.grad._values() if param.grad.is_sparse else param.grad
                grads.setdefault((grad.device, grad.dtype, type(grad)), []).append(grad)
        flags: dict[torch.device, Tensor] = {}
        for (device, *_), group in grads.items():
            # Blocking copies: torch's scaler does not wait for its copies, so CPU gradients might use an old scale.
            flag = flags.setdefault(device, found_inf.detach().to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inv_scale.to(device))
        agreed = self._agree(torch.stack([found_inf, *(flag.to(found_inf.device) for flag in flags.values())]).amax(0))
        return {device: agreed.to(device) for device in (flags or {found_inf.device: found_inf})}

    def _refuse_part_of(self, param: Any) -> None:
        missing = [] if self.process_group is None else missing_ranks(param.owner.parts, self.process_group)
        if missing:
            raise ValueError(
                f"ShardedGradScaler: ranks {missing} hold other parts of {param.owner._names[0]}, which is a DTensor, "
                "but are not in process_group: they would skip other steps. Use process_group=None for all ranks."
            )

    @during("ShardedGradScaler.unscale_() or step()")
    def _agree(self, found: Tensor) -> Tensor:
        if self.process_group is None and not (dist.is_available() and dist.is_initialized()):
            return found
        comm = communicator(default_group(self.process_group), found.device)
        return comm.all_reduce(found, "max", "whether gradients are finite").wait()
