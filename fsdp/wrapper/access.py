"""What a wrapper shows of itself: attributes under FairScale's names, forwarding, and its place in the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp.distributed.communicator import Group
from fsdp.engine.flatten_params_wrapper import FlattenParamsWrapper
from fsdp.engine.forward_hooks import TrainingState
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import FSDP_PART, clean_name, module_name
from fsdp.engine.options import Options
from fsdp.engine.precision import MixedPrecision
from fsdp.engine.registration import Forwarding
from fsdp.engine.runtime import ddp_message
from fsdp.engine.sharding_strategy import ShardingStrategy
from fsdp.engine.shared_params import share
from fsdp.engine.unit import Unit

# Where modules keep what may be the wrapped module's; not there before the constructor of `nn.Module`.
_ENTRIES = ("_parameters", "_buffers")


class WrapperAccess(nn.Module):
    """The reading half of `FullyShardedDataParallel`; the other half is construction and what changes something."""

    _fsdp_wrapped_module: FlattenParamsWrapper
    _options: Options
    _unit: Unit
    process_group: Group
    process_group_reduce_scatter: Group
    replicate_group: Group | None
    sharding_strategy: ShardingStrategy
    rank: int
    world_size: int
    flatten_parameters: bool
    verbose: bool

    @property
    def module(self) -> FlattenParamsWrapper:
        """The `FlattenParamsWrapper` inside; its ``module`` is the user's."""
        return self._fsdp_wrapped_module

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrapper's own parameters, as optimizers see them: its shards, or its pieces of original parameters."""
        return [param for handle in self._listed_handles for param in handle.registry.params]

    @property
    def _listed_handles(self) -> list[FlatParamHandle]:
        return [*self._unit.own, *self._unit.borrowed]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters, inner wrappers' included, that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def non_shared_params(self) -> list[nn.Parameter]:
        """The own parameters without those of `append_shared_param`."""
        return [param for handle in self._unit.own for param in handle.registry.params]

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Share a parameter that another wrapper's module has in common with this one's and that the other one took.

        For modules that were tied and then wrapped one by one, each with ``flatten_parameters=False``, the same
        options and at least one parameter of its own. Call it on every wrapper but the first, before the first use. The
        parameter is then in `params` of both, in ``parameters()`` once, and under both names in state dicts. The lowest
        wrapper around all that share it gathers it, for as long as that one computes. Doing it twice changes nothing.

        Args:
            p: the parameter, as the first wrapper's module shows it (``first.module.weight``), as its ``params`` list
                it, or as it was before wrapping.

        Raises:
            ValueError: if this wrapper flattens its parameters, if `p` is not tied to a parameter of its module or was
                not taken by another such wrapper, or if the two differ in ranks, device or precision.
            RuntimeError: after the first use of either, and inside `summon_full_params`.
        """
        if self.flatten_parameters:
            raise ValueError(
                f"append_shared_param: {self._unit.name} has flatten_parameters=True, so its parameters lie in one "
                "vector and cannot be shared one by one. Wrap all that share it with flatten_parameters=False."
            )
        share(self._unit, p)

    @property
    def reshard_after_forward(self) -> bool:
        """Whether whole parameters are freed after forward; the root's becomes False at its first use."""
        return self._unit.wishes.frees_after_forward

    @property
    def training_state(self) -> TrainingState:
        """What the wrapper is doing."""
        return self._unit.state

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over the ranks."""
        return self._unit.predivide

    @property
    def gradient_postdivide_factor(self) -> float:
        """What gradients are divided by after they were summed over the ranks."""
        return self._unit.postdivide

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return self._unit.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which dtype it computes: its first parameter's, unless the precision says another."""
        own = self.params[0].dtype if self.params else torch.float32
        return self._options.precision.compute_dtype(own)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype in which floating-point buffers are computed with; None if a policy leaves them as they are."""
        is_policy = isinstance(self._options.mixed_precision, MixedPrecision)
        return self._options.precision.buffers or (None if is_policy else self.compute_dtype)

    @property
    def state_dict_device(self) -> torch.device:
        """Where the tensors of `state_dict` are."""
        return self._options.state_dict_device or self.compute_device

    @property
    def numel_padded_per_param(self) -> list[int]:
        """For each of `params`, how many of its elements are padding: none in pieces of original parameters."""
        pad = [handle.layout.padding(handle.comm.rank) for handle in self._listed_handles]
        return [0] * len(self.params) if self._options.use_orig_params else pad

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # What FairScale keeps as attributes of this name and we resolved once, at the door.
            options = self.__dict__.get("_options")
            if options is not None and name in options.public_names:
                return getattr(options, name)
            if "_fsdp_wrapped_module" not in self.__dict__.get("_modules", {}):
                raise  # a subclass's constructor is before ours
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module.__getitem__(key)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `nn.Module.named_modules`; seen from a plain module around wrappers, what is in them has its plain name.

        So tools that look for modules by the names in a state dict find them, as `peft` does.
        """
        found = super().named_modules(memo, prefix, remove_duplicate)
        if not prefix or FSDP_PART in prefix.split("."):
            return found
        return ((module_name(name), module) for name, module in found)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`; plain names inside `summon_full_params` and without flattening."""
        plain = (
            not self.flatten_parameters
            or self._options.use_orig_params
            or self.training_state is TrainingState.SUMMON_FULL_PARAMS
        )
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean_name(name) if plain else name, param

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`, of the wrapped module: gathering and freeing happen around what is compiled."""
        self.module.module.compile(*args, **kwargs)

    def extra_repr(self) -> str:
        text = f"world_size={self.world_size}, flatten_parameters={self.flatten_parameters}, "
        text += f"mixed_precision={bool(self._options.mixed_precision)}"
        if self.replicate_group is not None:
            text += f", sharding_strategy={self.sharding_strategy.name}, replicas={self._unit.replicas.world_size}"
        if self.verbose:
            text += (
                f", rank={self.rank}, reshard_after_forward={self.reshard_after_forward}, "
                f"compute_dtype={self.compute_dtype}, compute_device={self.compute_device}, "
                f"bucket_cap_mb={self._options.bucket_cap_mb}, "
                f"gradient_predivide_factor={self.gradient_predivide_factor}"
            )
        return text

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError unless `training_state` is `state`, or one of several."""
        expected = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in expected:
            names = " or ".join(one.name for one in expected)
            raise ValueError(f"{self._unit.name}: expected to be {names}, but it is {self.training_state.name}")

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost wrapper; None while that is not known. Setting None forgets it."""
        runtime = self._unit.runtime
        return None if runtime is None else runtime.root is self._unit

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What `DistributedDataParallel` asks first of what it is given."""
        raise RuntimeError(ddp_message(self._unit.name))

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"DataParallel has been given {self._unit.name}, which is sharded over processes and cannot be copied to "
            "several devices of one. Call the FullyShardedDataParallel itself, in one process for each device."
        )

    def _reset_lazy_init(self) -> None:
        """Forget which wrapper is outermost; the next use finds out again."""
        for unit in self._units():
            if unit.runtime is not None:
                unit.runtime.forget()

    def _forward_entries(self) -> None:
        """Have what is put in the wrapped module's parameters and buffers through this wrapper arrive there."""
        for kind in _ENTRIES:
            self.__dict__[kind] = Forwarding(self.__dict__[kind], lambda: self._unit.module, kind)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_root" and value is None:
            self._reset_lazy_init()
        elif any(isinstance(one, Forwarding) and one.forwards(name) for one in map(self.__dict__.get, _ENTRIES)):
            setattr(self._unit.module, name, value)
        elif isinstance(value, nn.Module) and name in self._children_inside():
            setattr(self.module.module, name, value)  # where it is read from
        else:
            super().__setattr__(name, value)

    def _children_inside(self) -> dict[str, nn.Module | None]:
        flattener = self.__dict__.get("_modules", {}).get("_fsdp_wrapped_module")
        return {} if flattener is None else flattener.module._modules

    @property
    def children_share_process_group(self) -> bool:
        """Whether all inner wrappers shard, and replicate, over the same ranks as this one."""
        return all(unit.everyone == self._unit.everyone for unit in self._units())
