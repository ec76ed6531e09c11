"""What the strategy makes sure of, so that nothing goes wrong in silence: options, the Trainer's wishes, optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

import fsdp

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# By an argument of the wrapper, what says it instead.
_OURS = {
    "module": "the LightningModule is wrapped",
    "compute_device": "it is the Trainer's device",
    "move_params_to_cpu": "say cpu_offload",
    "state_dict_on_rank_0_only": "checkpoints are gathered on the first rank",
    "no_broadcast_optim_state": "checkpoints hold all optimizer state",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Make sure that the wrapper takes them.

    Raises:
        TypeError: for one that it has not.
        ValueError: for one that the strategy sets.
    """
    known = inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters
    for name in options:
        if name in _OURS:
            raise ValueError(f"FullyShardedStrategy sets {name} of the wrappers itself: {_OURS[name]}")
        if name not in known or name == "self":
            raise TypeError(
                f"FullyShardedStrategy got {name!r}, which is neither an argument of its own nor one of "
                "FullyShardedDataParallel"
            )


def check_trainer(trainer: Any, module: LightningModule) -> None:
    """Refuse what the Trainer would do to a sharded model.

    Raises:
        ValueError: naming the argument or callback, and what to do instead.
    """
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        raise ValueError(
            "StochasticWeightAveraging copies the whole model, and this one is sharded: take the callback out, and "
            "keep an average with fsdp.EMA(trainer.model) in a callback of your own"
        )
    if module._compiler_ctx is not None:
        raise ValueError(
            "a compiled LightningModule cannot be sharded: compile the blocks inside of it, in configure_model, each "
            "before it is wrapped (block.compile())"
        )
    inside = (each for unit in fsdp.get_fsdp_instances(module) for each in unit.modules())
    if trainer.strategy._layer_sync is not None and any(isinstance(each, _BATCH_NORMS) for each in inside):
        raise ValueError(
            "sync_batchnorm=True would change batch norms that configure_model has wrapped already: call "
            "nn.SyncBatchNorm.convert_sync_batchnorm on a module before you wrap it"
        )


def wrap_called(module: nn.Module, prefix: str = "") -> nn.Module:
    """Wrap the modules that a step with manual optimization calls, each as a whole and in it what the policy picks.

    Raises:
        ValueError: for a parameter that would be the outermost wrapper's own.
    """
    for name, param in module.named_parameters(recurse=False):
        raise ValueError(
            f"with manual optimization, {prefix}{name} of shape {list(param.shape)} must lie in a module that "
            "training_step calls: give it to a module with a forward, such as the one that uses it"
        )
    for name, child in module.named_children():
        if isinstance(child, fsdp.FullyShardedDataParallel) or not any(True for _ in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            wrap_called(child, f"{prefix}{name}.")
        else:
            inner = fsdp.auto_wrap(child, keep_wrapped=True)
            is_wrapped = isinstance(inner, fsdp.FullyShardedDataParallel)
            module._modules[name] = inner if is_wrapped else fsdp.wrap(inner)
    return module


class Wrapped:
    """A LightningModule's wrapper, and what was in it when it was wrapped."""

    def __init__(self, wrapper: fsdp.FullyShardedDataParallel) -> None:
        self.wrapper = wrapper
        self.modules = WeakSet(wrapper.modules())


def refuse_new_modules(module: LightningModule, wrapped: Wrapped) -> None:
    """Refuse modules that came to a model after it was wrapped: a `configure_model` that does its work twice.

    Raises:
        RuntimeError: naming them.
    """
    for name, each in module.named_modules():
        if each not in wrapped.modules and any(True for _ in each.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} was wrapped for an earlier stage, and {name} is another module now, "
                "without what was trained. configure_model is called before each stage: return at once if the modules "
                "are there."
            )


def check_optimizers(wrapper: fsdp.FullyShardedDataParallel, make: Callable[[], None], strategy: Any) -> None:
    """Have `make` make the strategy's optimizers, and make sure that they step what will have gradients.

    Raises:
        ValueError: if they are not of the wrapped model's parameters, or of a part of them by mistake.
    """
    hint = (
        "Make optimizers in configure_optimizers, which is called when the model is wrapped, of self.trainer.model."
        "parameters(). With use_orig_params=True, the default, self.parameters() and that of its parts do as well."
    )
    try:
        make()
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ValueError(f"the optimizer got no parameters of the sharded model. {hint}") from error
    known = {id(param): name for name, param in wrapper.named_parameters()}
    stepped: set[int] = set()
    for optimizer in strategy.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if id(param) not in known:
                    raise ValueError(
                        f"{type(optimizer).__name__}: parameter {place} of group {number}, of shape "
                        f"{list(param.shape)}, is not of the sharded model: it was taken before the model was wrapped. "
                        f"{hint}"
                    )
            stepped |= {id(param) for param in group["params"]}
    if stepped:
        _refuse_missing(wrapper, stepped, hint)


def _refuse_missing(wrapper: fsdp.FullyShardedDataParallel, stepped: set[int], hint: str) -> None:
    """A part of the model, as ``self.net``, does not list what of it lies in the outermost wrapper's flat parameter."""
    listed = {id(param): name for name, param in wrapper.named_parameters() if param.requires_grad}
    for param in wrapper.params if wrapper.flatten_parameters else ():
        if id(param) in listed and id(param) not in stepped:
            raise ValueError(
                f"no optimizer steps {listed[id(param)]}, which has in it what lies outside of inner units. {hint}"
            )
