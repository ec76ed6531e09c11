"""The constructor's options, resolved and checked once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fsdp._comm import Group

# Arguments of FairScale's that are not built yet, with the only values that mean what is done today.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "mixed_precision": (False,),
    "fp32_reduce_scatter": (False, None),
    "move_params_to_cpu": (False,),
    "cpu_offload": (False,),
    "move_grads_to_cpu": (None, False),
    "compute_dtype": (None,),
    "buffer_dtype": (None,),
    "no_broadcast_optim_state": (False, None),
    "state_dict_device": (None,),
    "clear_autocast_cache": (False,),
    "force_input_to_fp32": (False,),
    "state_dict_on_rank_0_only": (False,),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one wrapper was asked for, every default decided."""

    reshard_after_forward: bool
    disable_reshard_on_root: bool
    flatten_parameters: bool
    bucket_cap_mb: float
    compute_device: torch.device | None
    gradient_predivide_factor: float | None
    verbose: bool
    allow_reset_parameters: bool

    mixed_precision: bool = False
    move_params_to_cpu: bool = False
    move_grads_to_cpu: bool = False
    cpu_offload: bool = False
    no_broadcast_optim_state: bool = False

    @classmethod
    def resolve(cls, **given: Any) -> Options:
        """Check the constructor's arguments.

        Raises:
            NotImplementedError: for an option that this version does not build.
            ValueError: for a value out of range.
        """
        for name, allowed in _NOT_YET.items():
            if not any(given[name] is value for value in allowed):
                raise NotImplementedError(
                    f"{name}={given[name]!r} is not built yet in this version of fsdp; leave it at its default"
                )
        factor = given["gradient_predivide_factor"]
        if factor is not None and factor <= 0:
            raise ValueError(f"gradient_predivide_factor must be positive, got {factor}")
        device = given["compute_device"]
        names = _FIELDS - set(_NOT_YET) - {"compute_device"}
        return cls(
            compute_device=None if device is None else torch.device(device),
            **{name: given[name] for name in names},
        )

    @property
    def public_names(self) -> frozenset[str]:
        """Options that FairScale's users read as attributes of the wrapper."""
        return _FIELDS

    @property
    def bucket_bytes(self) -> int:
        return max(0, int(self.bucket_cap_mb * 2**20))

    def device_for(self, module: nn.Module) -> torch.device:
        """Where to compute: as asked, else where the parameters are, inner wrappers' included."""
        return next(module.parameters()).device if self.compute_device is None else self.compute_device

    def predivide_factor(self, world_size: int) -> float:
        """As asked, else the smallest power of two whose square is at least `world_size`, or that doesn't divide it."""
        if self.gradient_predivide_factor is not None:
            return float(self.gradient_predivide_factor)
        factor = 1
        while factor * factor < world_size and world_size % factor == 0:
            factor *= 2
        return float(factor)

    @staticmethod
    def checked_reduce_group(wanted: Any, process_group: Group, default: Any) -> Group:
        """The group that the user named for reductions.

        Raises:
            TypeError: if it is neither a group nor the name of one.
        """
        if wanted == default:
            return process_group
        if not hasattr(wanted, "rank") or not hasattr(wanted, "size"):
            raise TypeError(
                f"process_group_reduce_scatter must be a process group or a ProcessGroupName, got {wanted!r}"
            )
        if wanted.size() != process_group.size():
            warnings.warn(
                f"process_group_reduce_scatter has {wanted.size()} ranks and process_group {process_group.size()}: "
                "gradients are reduced over process_group instead",
                stacklevel=4,
            )
            return process_group
        return wanted


_FIELDS = frozenset(field.name for field in fields(Options))
