"""`FullyShardedStrategy`: Lightning's Trainer with a model that is sharded over the ranks.

The LightningModule becomes the module of an outermost wrapper, inside of which are the units that `configure_model`
wraps and those that the policy finds. The Trainer calls its steps through that wrapper's forward.

[Note: restored early, loaded late] The Trainer restores either before `setup`, when the model is not wrapped, or after
it, when it forgets the user's ``weights_only``. So it restores before, and what it hands over for the model is kept
until `setup` has wrapped it.

[Note: manual optimization] There, backward and optimizer steps are in the middle of `training_step`, where gradients of
a unit that is still in its forward cannot be clipped. So the step is called outside of the outermost wrapper's forward.
Then that one must have no parameters of its own: each module that the step calls is a unit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torchmetrics import Metric

import fsdp
from fsdp.lightning.checkpoint import Checkpoints

AutoWrapPolicy = Callable[..., bool]
# What refuses float32 inputs with 16-bit parameters there; on CUDA, autocast casts them.
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NOT_MIXED_ON_CPU = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_INSTANCE_NORMS, nn.Bilinear)
_AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_DEFAULT_MIN_NUM_PARAMS = 100_000_000
# Where a LightningModule keeps its wrapper, for the next stage and the next Trainer. Not a submodule of it.
_WRAPPED = "_fsdp_wrapped"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# By an argument of the wrapper, what says it instead.
_OURS = {
    "module": "the LightningModule is wrapped",
    "compute_device": "it is the Trainer's device",
    "move_params_to_cpu": "say cpu_offload",
    "state_dict_on_rank_0_only": "checkpoints are gathered on the first rank",
    "no_broadcast_optim_state": "checkpoints hold all optimizer state",
}


class FullyShardedStrategy(DDPStrategy):
    """Fully sharded training with Lightning's Trainer, on CPU with gloo and on CUDA with NCCL.

    ``Trainer(strategy="fsdp_flat")`` after ``import fsdp.lightning``, or an instance for other arguments; those of the
    strategy for FairScale that Lightning had up to 1.9 have their names. What `fsdp.wrap` wraps in `configure_model`
    becomes units; then `auto_wrap_policy` wraps what is left, and the LightningModule as a whole is the outermost one.
    `configure_optimizers` is called after that, with the parameters that are to be optimized.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for Lightning's `DDPStrategy`.
        cpu_offload: shards live in host memory, and the optimizer steps there.
        flatten_parameters, reshard_after_forward, move_grads_to_cpu, bucket_cap_mb: see `FullyShardedDataParallel`.
        fp32_reduce_scatter: with ``precision="bf16-mixed"`` or ``"16-mixed"``, sum gradients over the ranks in float32.
        compute_dtype: with those, the dtype of all-gathers and computation; otherwise that which parameters must have.
        min_num_params: without `auto_wrap_policy`, modules with so many parameters become units. Default: 100 million.
        state_dict_to_cpu: gather full states on the host; False: on the device.
        auto_wrap_policy: which modules become units: a policy as for `fsdp.auto_wrap`, or a set of classes of modules.
        state_dict_type: "full" writes checkpoints as one file with unsharded tensors, gathered on the first rank, which
            other strategies read, too. "sharded" writes folders of `fsdp.save`, to which every rank writes its part,
            in the background with the plugin `AsyncCheckpointIO`. Both are read whichever is chosen.
        options: further arguments of `FullyShardedDataParallel`. Unless they say otherwise, optimizers see the original
            parameters (``use_orig_params``), so that ``self.parameters()`` is what it was, and all ranks begin with the
            first one's values (``sync_module_states``).

    Raises:
        TypeError: for arguments that there are not.
        ValueError: for those that contradict each other, or that the strategy sets itself.
    """

    strategy_name = "fsdp_flat"

    def __init__(
        self,
        accelerator: Any = None,
        cpu_offload: bool = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_cap_mb: float = 25,
        min_num_params: int | None = None,
        state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        *,
        auto_wrap_policy: AutoWrapPolicy | Iterable[type[nn.Module]] | None = None,
        state_dict_type: str = "full",
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        _check_options(options)
        self._policy = _policy(auto_wrap_policy, min_num_params)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._fp32_reduce_scatter, self._compute_dtype = fp32_reduce_scatter, compute_dtype
        self._options: dict[str, Any] = {
            "use_orig_params": flatten_parameters and "group_by" not in options,
            "sync_module_states": True,
            "state_dict_device": torch.device("cpu") if state_dict_to_cpu else None,
            **options,
            "cpu_offload": cpu_offload,
            "flatten_parameters": flatten_parameters,
            "reshard_after_forward": reshard_after_forward,
            "move_grads_to_cpu": move_grads_to_cpu,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._checkpoints = Checkpoints(self, self._required_wrapper, state_dict_type)
        self._for_setup: tuple[Mapping[str, Any], bool] | None = None

    # --- what Lightning asks a strategy -----------------------------------------------------------------------------

    @property
    def wrapper(self) -> fsdp.FullyShardedDataParallel | None:
        """Return the outermost wrapper, as ``trainer.model``; None before the model is set up."""
        return self.model if isinstance(self.model, fsdp.FullyShardedDataParallel) else None

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        # Of torch's scaler the settings are taken: with it, each rank would decide alone whether to step.
        scaler = precision_plugin.scaler if isinstance(precision_plugin, MixedPrecision) else None
        if scaler is not None and not getattr(scaler, "agrees_over_ranks", False):
            sharded = fsdp.ShardedGradScaler(device=precision_plugin.device, enabled=scaler.is_enabled())
            if scaler.is_enabled():
                sharded.load_state_dict(scaler.state_dict())
            precision_plugin.scaler = sharded
        self._precision_plugin = precision_plugin

    @property
    def is_distributed(self) -> bool:
        """Return True: every rank gets its own part of the data."""
        return True

    def connect(self, model: LightningModule) -> None:
        """Take the LightningModule from the Trainer, which may have been wrapped for an earlier stage."""
        super().connect(model)
        if _WRAPPED in model.__dict__:
            self.model = model.__dict__[_WRAPPED].wrapper

    def model_to_device(self) -> None:
        """Do nothing: the wrappers move the model, unit by unit."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Have tensors made on the host, or without values (on the meta device) with ``empty_init=True``."""
        place: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Surround `configure_model`: `fsdp.wrap` and `fsdp.auto_wrap` make units with this strategy's arguments."""
        with self._wrapping():
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without summing them over the ranks."""
        with self._required_wrapper().no_sync():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model unless it is, make optimizers of it, and load what was restored."""
        if self.accelerator is None or self.lightning_module is None:
            raise RuntimeError("FullyShardedStrategy.setup() is for the Trainer to call")
        self.accelerator.setup(trainer)
        _check_trainer(trainer, self.lightning_module)
        if self.wrapper is None:
            self._wrap(trainer, self.lightning_module)
        _refuse_new_modules(self.lightning_module, self.lightning_module.__dict__[_WRAPPED])
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self._for_setup is not None:
            restored, self._for_setup = self._for_setup, None
            self._checkpoints.load_model(*restored)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, of the wrapped model's parameters."""
        _check_optimizers(self._required_wrapper(), functools.partial(super().setup_optimizers, trainer), self)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; see the note on manual optimization."""
        module = self.lightning_module
        if module is None or module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Leave the model where it is: its shards belong to the wrappers."""
        module, model, optimizers = self._lightning_module, self.model, self.optimizers
        self._lightning_module, self.model, self.optimizers = None, None, []  # what would be moved to the host
        try:
            with closing(self._checkpoints):
                super().teardown()
        finally:
            self._lightning_module, self.model, self.optimizers = module, model, optimizers

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Return the full state on the first rank; an empty one elsewhere, or where it is not gathered."""
        return self._checkpoints.model_state()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Collective. Return the same for an optimizer, numbered as that of the unsharded model."""
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective. Write a checkpoint. All ranks raise an error if one cannot write."""
        self._checkpoints.save(checkpoint, filepath, storage_options, super().save_checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove it on the first rank: at once, or when the one that is being written is there."""
        self._checkpoints.remove(functools.partial(super().remove_checkpoint, filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective. Return a checkpoint without the model's tensors, which are read when they are wanted."""
        return self._checkpoints.open(checkpoint_path, weights_only, super().load_checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective. Load the model, now or in `setup`: see the note on restoring."""
        if self.wrapper is None:
            self._for_setup = (checkpoint, strict)
        else:
            self._checkpoints.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Have each rank's optimizers go on with their shards."""
        self._checkpoints.load_optimizers(checkpoint)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name, when `fsdp.lightning` is imported."""
        strategy_registry.register(cls.strategy_name, cls, description="Fully sharded training with fsdp")

    # --- wrapping ---------------------------------------------------------------------------------------------------

    def _required_wrapper(self) -> fsdp.FullyShardedDataParallel:
        if self.wrapper is None:
            raise RuntimeError("the model is not wrapped yet: FullyShardedStrategy does that when the Trainer runs")
        return self.wrapper

    def _wrapping(self) -> AbstractContextManager[None]:
        return fsdp.enable_wrap(self._policy, wrapper_cls=fsdp.FullyShardedDataParallel, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of every wrapper."""
        arguments = {**self._options, "compute_device": self.root_device}
        if not isinstance(self.precision_plugin, MixedPrecision):
            given = {"compute_dtype": self._compute_dtype, "fp32_reduce_scatter": self._fp32_reduce_scatter}
            return {name: value for name, value in given.items() if value is not None} | arguments
        # What a step is given is left alone: autocast casts it where it is multiplied, and targets keep their digits.
        policy = fsdp.MixedPrecision(
            param_dtype=self._compute_dtype or _AUTOCAST_DTYPES[self.precision_plugin.precision],
            reduce_dtype=torch.float32 if self._fp32_reduce_scatter else None,
            cast_forward_inputs=False,
        )
        if self.root_device.type == "cpu":
            policy = replace(policy, full_precision_modules=(*policy.full_precision_modules, *_NOT_MIXED_ON_CPU))
        return {"mixed_precision": policy} | arguments

    def _wrap(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        with self._wrapping():
            if module.automatic_optimization:
                wrapped = fsdp.auto_wrap(module, keep_wrapped=True)
            else:
                wrapped = _wrap_called(module)
        if not isinstance(wrapped, fsdp.FullyShardedDataParallel):
            wrapped = fsdp.FullyShardedDataParallel(module, **self._arguments())
        for metric in (each for each in module.modules() if isinstance(each, Metric)):
            metric.to(self.root_device)
        with wrapped.no_sync():  # it is the outermost from now on, also for units that are called before it
            pass
        self.model = wrapped
        module.__dict__[_WRAPPED] = _Wrapped(wrapped, WeakSet(wrapped.modules()))


def _policy(given: Any, min_num_params: int | None) -> AutoWrapPolicy:
    if given is None:
        least = _DEFAULT_MIN_NUM_PARAMS if min_num_params is None else min_num_params
        return functools.partial(fsdp.default_auto_wrap_policy, min_num_params=least)
    if min_num_params is not None:
        raise ValueError("min_num_params and auto_wrap_policy say both which modules become units: give one of them")
    if isinstance(given, (set, frozenset, list, tuple)):
        return fsdp.module_wrap_policy(given)
    if not callable(given):
        raise TypeError(f"auto_wrap_policy is a policy or a set of module classes, got {given!r}")
    return given


# --- checks, so that nothing goes wrong in silence --------------------------------------------------------------------


def _check_options(options: Mapping[str, Any]) -> None:
    """Make sure that the wrapper takes them, and that the strategy does not set them."""
    known = inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters
    for name in options:
        if name in _OURS:
            raise ValueError(f"FullyShardedStrategy sets {name} of the wrappers itself: {_OURS[name]}")
        if name not in known or name == "self":
            raise TypeError(
                f"FullyShardedStrategy got {name!r}, which is neither an argument of its own nor one of "
                "FullyShardedDataParallel"
            )


def _check_trainer(trainer: Any, module: LightningModule) -> None:
    """Refuse what the Trainer would do to a sharded model."""
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


def _wrap_called(module: nn.Module, prefix: str = "") -> nn.Module:
    """Wrap the modules that a step with manual optimization calls, each as a whole and in it what the policy picks.

    No parameter may be the outermost wrapper's own.
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
            _wrap_called(child, f"{prefix}{name}.")
        else:
            inner = fsdp.auto_wrap(child, keep_wrapped=True)
            is_wrapped = isinstance(inner, fsdp.FullyShardedDataParallel)
            module._modules[name] = inner if is_wrapped else fsdp.wrap(inner)
    return module


class _Wrapped(NamedTuple):
    """The wrapper of a LightningModule, and the modules in it when it was wrapped."""

    wrapper: fsdp.FullyShardedDataParallel
    modules: WeakSet[nn.Module]


def _refuse_new_modules(module: LightningModule, wrapped: _Wrapped) -> None:
    """Refuse modules that came to a model after it was wrapped: a `configure_model` that does its work twice."""
    for name, each in module.named_modules():
        if each not in wrapped.modules and any(True for _ in each.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} was wrapped for an earlier stage, and {name} is another module now, "
                "without what was trained. configure_model is called before each stage: return at once if the modules "
                "are there."
            )


def _check_optimizers(wrapper: fsdp.FullyShardedDataParallel, make: Callable[[], None], strategy: Any) -> None:
    """Have `make` make the strategy's optimizers, and make sure that they step what will have gradients."""
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
    known = {id(param): (name, param.requires_grad) for name, param in wrapper.named_parameters()}
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
    # An optimizer of a submodule (``self.net``) does not list the outermost wrapper's flat parameter.
    for param in wrapper.params if stepped and wrapper.flatten_parameters else ():
        name, is_trained = known.get(id(param), ("", False))
        if is_trained and id(param) not in stepped:
            raise ValueError(f"no optimizer steps {name}, which has in it what lies outside of inner units. {hint}")
