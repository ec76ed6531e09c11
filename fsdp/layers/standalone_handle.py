"""Handles for users: `flat_param_handles` returns a model's handles; a `StandaloneHandle` shards without a unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import LONE_RANK, communicator
from fsdp.distributed.consensus import agree_on
from fsdp.distributed.dtensor import is_dtensor
from fsdp.engine.autograd import BackwardPass
from fsdp.engine.flat_param import FlatParameter, refuse_unlike
from fsdp.engine.grad_buffer import GradientSync, divided
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.ignored import Ignored
from fsdp.engine.orig_params import OrigParams
from fsdp.engine.originals import Places, take_over
from fsdp.engine.placements import Placements
from fsdp.engine.policy import Policy
from fsdp.engine.precision import MixedPrecision, Precision
from fsdp.engine.shard import Shard
from fsdp.engine.storage import ShardStorage
from fsdp.engine.unit import units_of
from fsdp.layers.fingerprints import take_fingerprints
from fsdp.layers.flatten_params_wrapper import free_suffixes
from fsdp.layers.managed_params import collect, names_of
from fsdp.layers.options import Options
from fsdp.layers.shard_module import ALIGNED, meet_torch, refuse_fake_tensors
from fsdp.layers.sharding_strategy import Groups
from fsdp.layers.verify import agree_on_values


def flat_param_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles of all units in a module tree, outer units first. Not collective.

    Units of `FullyShardedDataParallel` and of `fully_shard` are included. A `StandaloneHandle` is not included, because
    it belongs to no unit.
    """
    units = units_of(module.modules())
    for unit in units:
        unit.wake()
    return list(dict.fromkeys(handle for unit in units for handle in unit.owned_handles))


class StandaloneHandle(FlatParamHandle):
    """A `FlatParamHandle` that the user controls: no unit, hook or schedule runs it.

    The constructor is collective. The handle removes parameters from a module and shards them as a flat parameter. The
    module contains placeholders instead, or the unsharded parameters after `unshard` and `wait_for_unshard`. The module
    lists the shard as ``flat_param_0`` (or the next free number) for optimizers. Gradients of a backward are kept in
    the handle until `reduce_gradient`. The parameters must be unsharded during forward and backward. Keep a reference
    to the handle, because only the handle can unshard them.

    Args:
        params: parameters of `module` or of its submodules, with equal dtype and device, all trained or all frozen.
        module: the module to which names are relative.
        process_group: the ranks to shard over; None (the default) means all ranks. A 1-D `DeviceMesh` means its group.
        use_orig_params: If True, list this rank's shard of each parameter by name instead of the flat parameter.
        param_dtype: the dtype of the unsharded parameters; None does not cast them.
        reduce_dtype: the dtype in which gradients are summed; None means `param_dtype`.
        device: the device of the shard and of the computation; None means the device of the parameters.

    Raises:
        RuntimeError: without a process group; if the parameters or their values differ between ranks.
        TypeError: for `DTensor`s, integers, and parameters without values.
        ValueError: for an empty list; for parameters with different dtypes, devices or `requires_grad`, of another
            module, or already sharded; for a pair of groups.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        module: nn.Module,
        process_group: Any = None,
        *,
        use_orig_params: bool = False,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        name = type(module).__name__
        refuse_fake_tensors(module)
        found = _places_of(params, module)
        originals = list(found)
        groups = Groups.resolve(process_group, Placements.from_strategy())
        if groups.replicate is not None:
            raise ValueError("StandaloneHandle shards over one process_group, without replicas: pass one group")
        precision = Precision.of_policy(MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
        precision.check(names_of(originals, found)[0], originals[0].dtype, originals[0].requires_grad)
        meet_torch()
        device = originals[0].device if device is None else torch.device(device)
        comm = communicator(groups.shard, device)
        flat_param = FlatParameter.shard_of(
            originals,
            names_of(originals, found),
            comm.rank,
            comm.world_size,
            ShardStorage(device),
            align=ALIGNED if use_orig_params else 1,
        )
        take_fingerprints(flat_param, originals, comm.rank, comm.world_size)
        flat_param.is_standalone = True
        listed = ", ".join(f"{slot.name}{list(slot.shape)}" for slot in flat_param.make_layout().slots)
        kind = f"{flat_param.dtype} requires_grad={flat_param.requires_grad} use_orig_params={use_orig_params}"
        agree_on([comm], "parameters of a StandaloneHandle", f"{kind} {precision} {listed}", f"{kind}: {listed}")
        take_over(found, [flat_param], name)
        places = list(found.values())
        if use_orig_params:
            shard = Shard(flat_param, places, new_listed=OrigParams)
        else:
            shard = Shard(flat_param, places, [(module, f"flat_param_{free_suffixes(module, 1)[0]}")])
        predivide = Options().predivide_factor(comm.world_size)
        policy = Policy(False, False, False, predivide=predivide, postdivide=comm.world_size / predivide)
        super().__init__(shard, comm, comm, LONE_RANK, precision, policy)
        self._backward: BackwardPass | None = None  # the running or last backward
        self.on_gradient = _take_gradient
        self.rename(name, name)
        self.number_as(0)
        agree_on_values({self: name})

    def reduce_gradient(self) -> None:
        """Collective. Add the mean of the ranks' gradients since the last call to the shard's gradient.

        Every rank must call it. Missing gradients of a rank or a parameter count as zeros.
        """
        if not self.requires_grad:
            return
        if self.gradients.is_empty:
            self.gradients.owe()
        self.accept(divided(self.reduce().wait(), self.policy.postdivide))
        self.show_gradient([True] * len(self.layout.slots))
        self.settle()
        self.end_backward()

    def take_in(self, slot: int, leaf: Tensor) -> None:
        """Accumulate the gradient of a leaf. The first gradient of a backward begins the backward."""
        if self._backward is None or not self._backward.is_alive:
            self._backward = BackwardPass(self.mark_unreduced)
            self.begin_backward(GradientSync.FULL)
        self.take_gradient(slot, leaf)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a StandaloneHandle of {self.name} belongs to its module and its process group, and cannot be copied or "
            "pickled. Save the parameters after wait_for_unshard(), and create another handle for a copy."
        )


def _take_gradient(handle: Any, slot: int, leaf: Tensor) -> None:
    handle.take_in(slot, leaf)


def _places_of(params: Iterable[nn.Parameter], module: nn.Module) -> dict[nn.Parameter, Places]:
    """Return the parameters, in the given order, with the places where the module uses them."""
    wanted = list(dict.fromkeys(params))
    if not wanted:
        raise ValueError("StandaloneHandle needs parameters to shard, got none")
    ids = {id(param) for param in wanted}
    others = [param for param in module.parameters() if id(param) not in ids]  # including shards of other handles
    found = collect(module, Ignored.of(None, others))
    for number, param in enumerate(wanted):
        if is_dtensor(param):
            raise TypeError(f"StandaloneHandle supports plain parameters only, but params[{number}] is a DTensor")
        if param not in found:
            raise ValueError(
                f"params[{number}], of shape {list(param.shape)}, is not a parameter of this {type(module).__name__}, "
                "or is sharded already"
            )
    refuse_unlike(wanted, names_of(wanted, found))
    return {param: found[param] for param in wanted}
