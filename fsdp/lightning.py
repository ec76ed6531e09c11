"""A strategy for Lightning's Trainer. Importing this registers ``Trainer(strategy="fsdp_flat")``.

This module requires ``lightning.pytorch`` (2.6.4 or newer), not the package ``pytorch_lightning``.

The LightningModule becomes the module of an outermost wrapper. Inside this wrapper are the units that
`configure_model` wraps and the units that the policy selects. The Trainer calls its steps through the wrapper's
forward. Checkpoints are a single file with unsharded tensors, or a folder with the shards of all ranks.

[Note: restored early, loaded late] The Trainer restores a checkpoint either before `setup`, when the model is not
wrapped, or after `setup`, but then without the user's ``weights_only``. The strategy therefore restores before `setup`,
and keeps the model's state until `setup` wraps the model.

[Note: manual optimization] In manual optimization, backward and optimizer steps are in the middle of `training_step`,
where gradients of a unit that is still in its forward cannot be clipped. The step is therefore called outside the
outermost wrapper's forward. The outermost wrapper must have no parameters of its own: each called module is a unit.

[Note: in the background] With Lightning's `AsyncCheckpointIO`, folders are written by a `Saver` during training.
Callbacks assume that a checkpoint exists when `save` returns, and remove the previous checkpoint. Removals
therefore wait until all earlier checkpoints are complete.

[Note: numbers and names] In files, optimizer state is unsharded and uses the numbers of the unsharded model's
optimizer, so that files can be exchanged with other strategies. Names are also stored, in torch's ``param_names``, and
take precedence over numbers.
"""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout

import fsdp
import fsdp.checkpoint
from fsdp.optim_utils import full_optim_state_dict, load_full_optim_state_dict
from fsdp.wrap import AutoWrapPolicy

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch import callbacks as _callbacks
    from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(f"fsdp.lightning needs lightning: pip install 'fsdp[lightning]' ({error})") from error

_Result = TypeVar("_Result")
# Modules that reject float32 inputs with 16-bit parameters on CPU; on CUDA, autocast casts them.
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NOT_MIXED_ON_CPU = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_INSTANCE_NORMS, nn.Bilinear)
_AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE_DTYPES = {"64-true": torch.float64, "32-true": torch.float32}
_TRUE_DTYPES |= {"bf16-true": torch.bfloat16, "16-true": torch.float16}
# Attributes of the strategy that are arguments of every wrapper.
_SHARED = (
    *("cpu_offload", "flatten_parameters", "reshard_after_forward"),
    *("move_grads_to_cpu", "bucket_cap_mb", "state_dict_device"),
)
_DEFAULT_MIN_NUM_PARAMS = 100_000_000
# The attribute of a LightningModule for its wrapper, for the next stage and the next Trainer. Not a submodule.
_WRAPPED = "_fsdp_wrapped"
_AVERAGES = (_callbacks.StochasticWeightAveraging, getattr(_callbacks, "WeightAveraging", ()))  # the second since 2.6
_FOR_ERRORS = timedelta(seconds=60)  # for a rank with an exception to wait for other ranks' exceptions
_errors = itertools.count()  # after which this process saved; the same on all ranks
_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()  # of sharded models
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# The strategy's replacements, by argument of the wrapper.
_OURS = {
    "module": "the LightningModule is wrapped",
    "compute_device": "it is the Trainer's device",
    "move_params_to_cpu": "say cpu_offload",
    "state_dict_on_rank_0_only": "checkpoints are gathered on the first rank",
    "no_broadcast_optim_state": "checkpoints hold all optimizer state",
}
# Arguments of Lightning's FSDPStrategy.
_THEIRS = {
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpointing_policy"), "call fsdp.checkpoint_wrapper(block)"
    ),
    **dict.fromkeys(("limit_all_gathers", "forward_prefetch", "backward_prefetch"), "leave it out"),
    "device_mesh": "pass process_group",
}
_FOLDER = "fsdp_folder"  # key in the Trainer's checkpoint: the folder of the tensors
_TRAINER = "lightning"  # key in the values of a folder: a torch.save of the Trainer's state
_NAMES = "param_names"


class FullyShardedStrategy(DDPStrategy):
    """Fully sharded training with Lightning's Trainer, on CPU with gloo and on CUDA with NCCL.

    ``Trainer(strategy="fsdp_flat")`` after ``import fsdp.lightning``, or an instance for other arguments. Lightning's
    strategy for FairScale (up to 1.9) had the same arguments; its name ``"ddp_fully_sharded"`` is registered as well.
    Modules that `fsdp.wrap` wraps in `configure_model` become units. Then `auto_wrap_policy` wraps the remaining
    modules, and the whole LightningModule becomes the outermost unit. `configure_optimizers` is called afterwards, and
    sees the parameters to optimize.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io: the same as for Lightning's `DDPStrategy`.
        precision_plugin, process_group_backend, timeout: also as for `DDPStrategy`.
        cpu_offload: If True, keep shards in host memory, and run the optimizer there.
        flatten_parameters, reshard_after_forward, move_grads_to_cpu, bucket_cap_mb: see `FullyShardedDataParallel`.
        fp32_reduce_scatter: with ``precision="bf16-mixed"`` or ``"16-mixed"``, sum gradients across ranks in float32.
        compute_dtype: with these precisions, the dtype of all-gathers and computation; otherwise the required dtype of
            parameters.
        min_num_params: without `auto_wrap_policy`, the minimum number of parameters of a unit. Default: 100 million.
        state_dict_to_cpu: If True, gather full states on the host, otherwise on the device.
        auto_wrap_policy: a policy for `fsdp.auto_wrap`, or a set of module classes that become units.
        state_dict_type: "full" writes checkpoints as a single file with unsharded tensors, gathered on rank 0, which
            other strategies can also read. "sharded" writes folders of `fsdp.save`, to which every rank writes its
            part, in the background with the plugin `AsyncCheckpointIO`. Both types can always be read.
        options: other arguments of `FullyShardedDataParallel`. By default, optimizers use the original parameters
            (``use_orig_params``), so ``self.parameters()`` does not change, and all ranks start with rank 0's values
            (``sync_module_states``).

    Attributes:
        options: the other arguments. Every other setting is an attribute with the name of its argument, which may be
            assigned before the Trainer runs; `state_dict_to_cpu` becomes `state_dict_device`.
        process_group: the ranks across which the model is sharded.

    Raises:
        TypeError: for unknown arguments.
        ValueError: for contradicting arguments, or arguments that the strategy sets itself.
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
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.cpu_offload, self.move_grads_to_cpu = cpu_offload, move_grads_to_cpu
        self.flatten_parameters, self.reshard_after_forward = flatten_parameters, reshard_after_forward
        self.fp32_reduce_scatter, self.compute_dtype = fp32_reduce_scatter, compute_dtype
        self.bucket_cap_mb = bucket_cap_mb
        self.state_dict_device = options.pop("state_dict_device", torch.device("cpu") if state_dict_to_cpu else None)
        self.auto_wrap_policy, self.min_num_params = auto_wrap_policy, min_num_params
        if auto_wrap_policy is None:
            self.min_num_params = _DEFAULT_MIN_NUM_PARAMS if min_num_params is None else min_num_params
        elif min_num_params is not None:
            raise ValueError("min_num_params and auto_wrap_policy both choose the units: pass only one")
        self._policy()  # check the policy
        self.options: dict[str, Any] = options
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type is 'full' or 'sharded', got {state_dict_type!r}")
        self._is_full = state_dict_type == "full"
        self._saver: fsdp.checkpoint.Saver | None = None
        self._removals: list[Callable[[], None]] = []  # waiting for pending writes
        self._for_setup: tuple[Mapping[str, Any], bool] | None = None

    @property
    def wrapper(self) -> fsdp.FullyShardedDataParallel | None:
        """Return the outermost wrapper, as ``trainer.model``; None before the model is set up."""
        return self.model if isinstance(self.model, fsdp.FullyShardedDataParallel) else None

    @property
    def process_group(self) -> Any:
        """Return the ranks across which the model is sharded. Default: all ranks, once they are connected."""
        given = self.options.get("process_group")
        return torch.distributed.group.WORLD if given is None else given

    @property
    def state_dict_type(self) -> str:
        """Return the type of new checkpoints, "full" or "sharded"."""
        return "full" if self._is_full else "sharded"

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        # Only the settings of torch's scaler are used: with this scaler, each rank would decide itself whether to step.
        scaler = precision_plugin.scaler if isinstance(precision_plugin, MixedPrecision) else None
        if scaler is not None and not getattr(scaler, "agrees_over_ranks", False):
            sharded = fsdp.ShardedGradScaler(device=precision_plugin.device, enabled=scaler.is_enabled())
            if scaler.is_enabled():
                sharded.load_state_dict(scaler.state_dict())
            precision_plugin.scaler = sharded
        self._precision_plugin = precision_plugin

    @property
    def is_distributed(self) -> bool:
        """Return True: every rank gets a different part of the data."""
        return True

    def connect(self, model: LightningModule) -> None:
        """Receive the LightningModule from the Trainer; it may have been wrapped for an earlier stage."""
        super().connect(model)
        if _WRAPPED in model.__dict__:
            self.model = model.__dict__[_WRAPPED].wrapper

    def model_to_device(self) -> None:
        """Do nothing: the wrappers move the model, unit by unit."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors on the host, or on the meta device with ``empty_init=True``."""
        place: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Surround `configure_model`: `fsdp.wrap` and `fsdp.auto_wrap` use this strategy's arguments by default."""
        options = {**self._precision_arguments(), **self._wrapper_options(), "compute_device": self.root_device}
        try:
            with fsdp.enable_wrap(self._policy(), wrapper_cls=fsdp.FullyShardedDataParallel, **options):
                yield
        except ValueError as error:
            if "param_dtype" not in str(error) and "mixed_precision" not in str(error):
                raise
            precision = self.precision_plugin.precision
            raise ValueError(f"{error} Under a Trainer, precision={precision!r} chooses it.") from error

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without summing them across ranks."""
        with self._required_wrapper().no_sync():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model if needed, create its optimizers, and load the restored state."""
        if self.accelerator is None or self.lightning_module is None:
            raise RuntimeError("FullyShardedStrategy.setup() is for the Trainer to call")
        self.accelerator.setup(trainer)
        _check_trainer(trainer, self.lightning_module)
        if self.wrapper is None:
            self._wrap(trainer, self.lightning_module)
        else:
            _refuse_other_settings(self.lightning_module.__dict__[_WRAPPED].settings, self._settings())
        _refuse_new_modules(self.lightning_module, self.lightning_module.__dict__[_WRAPPED])
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self._for_setup is not None:
            restored, self._for_setup = self._for_setup, None
            self.load_model_state_dict(*restored)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers from the wrapped model's parameters."""
        _check_optimizers(self._required_wrapper(), functools.partial(super().setup_optimizers, trainer), self)
        _OPTIMIZERS.update(map(_plain, self.optimizers))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; see the note on manual optimization."""
        module = self.lightning_module
        if module is None or module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Keep the model on its device, because the wrappers own the shards."""
        module, model, optimizers = self._lightning_module, self.model, self.optimizers
        self._lightning_module, self.model, self.optimizers = None, None, []  # Lightning would move them to the host
        try:
            super().teardown()
        finally:
            self._lightning_module, self.model, self.optimizers = module, model, optimizers
            self._close_saver()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Return the full state on rank 0; an empty dict on other ranks, or if it is not gathered."""
        self._wait_for_errors()
        return self._required_wrapper().state_dict(rank0_only=True) if self._is_full else {}

    def _wait_for_errors(self) -> None:
        """Collective. Raise an error if a callback saves because of an exception that not all ranks have.

        The other ranks would continue their step, whose collectives do not match the collectives of a save. All ranks
        therefore synchronize using the store.
        """
        module = self.lightning_module
        if module is None or module.trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        world: Any = torch.distributed.group.WORLD
        store, number = world.get_group_store(), next(_errors)
        keys = [f"fsdp.lightning: error {number} of rank {rank}" for rank in range(self.world_size)]
        store.set(keys[self.global_rank], "")
        with suppress(RuntimeError):
            store.wait(keys, _FOR_ERRORS)
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if absent:
            raise RuntimeError(
                f"rank {self.global_rank} cannot save after its exception: within {_FOR_ERRORS.seconds} s, ranks "
                f"{absent} had none, and a checkpoint needs all ranks. Resume from the last checkpoint"
            )

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Collective. Return an optimizer's full state on rank 0, with the unsharded model's numbers."""
        return _numbered_state(self._required_wrapper(), _plain(optimizer)) if self._is_full else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective. Write a checkpoint. All ranks raise an error if any rank cannot write."""
        path = self.broadcast(filepath)
        if not self._is_full:
            self._save_folder(checkpoint, path, storage_options)
            return
        write = super().save_checkpoint

        def write_file() -> None:
            if os.path.isdir(path):
                raise IsADirectoryError(
                    f"{path} is a folder, but state_dict_type='full' writes a file: pass another path"
                )
            write(checkpoint, path, storage_options)

        self._together(f"write {path}", write_file)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on rank 0, after pending writes of other checkpoints are complete."""
        remove = functools.partial(super().remove_checkpoint, filepath)
        if self._saver is None:
            remove()
        else:
            self._removals.append(remove)

    def _close_saver(self) -> None:
        """Wait for this rank's writes. On failure, raise the error, or print it during another exception."""
        if self._saver is None:
            return
        try:
            self._saver.__exit__(*sys.exc_info())
            self._finish_saving()
        finally:
            self._saver, self._removals = None, []

    def _finish_saving(self) -> None:
        if self._saver is not None and self._saver.wait() is not None:
            while self._removals:
                self._removals.pop(0)()

    def _save_folder(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        if storage_options is not None or not self._is_stock():
            raise ValueError(
                "state_dict_type='sharded' writes folders by itself, without storage_options and CheckpointIO plugins "
                "other than AsyncCheckpointIO: omit them, or use state_dict_type='full'"
            )
        if "://" in os.fspath(path):
            raise ValueError(f"{path}: sharded checkpoints are written to file systems: pass a path")
        # This dictionary contains no state of the model and optimizers.

        def packed() -> bytes:
            content = io.BytesIO()
            if self.is_global_zero:
                torch.save(checkpoint, content)
            return content.getvalue()

        content = self._together(f"write {path}", packed)
        self._together("save the last checkpoint", self._finish_saving)
        save: Callable[..., Any] = fsdp.save
        module = self.lightning_module
        # Only a running Trainer waits for pending writes at its end.
        is_running = module is not None and module.trainer.state.status == TrainerStatus.RUNNING
        if isinstance(self.checkpoint_io, AsyncCheckpointIO) and is_running:
            self._saver = self._saver or fsdp.checkpoint.Saver()
            save = self._saver.save
        optimizers = self._plain_optimizers() if "optimizer_states" in checkpoint else None
        save(path, self._required_wrapper(), optimizers, values={_TRAINER: content}, generators=False)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective. Return a checkpoint without the model's tensors, which are read when they are required."""
        path, read = self.broadcast(checkpoint_path), super().load_checkpoint
        self._together("save the last checkpoint", self._finish_saving)

        def look() -> dict[str, Any]:
            if os.path.isdir(path):
                return _open_folder(path, weights_only)
            if self._is_stock() and zipfile.is_zipfile(path):
                # Memory-mapped: ranks of a machine share the file's pages, and each rank reads only its part.
                return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return read(path, weights_only=weights_only)

        return self._together(f"read {path}", look)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective. Load the model, now or in `setup`; see the note on restoring."""
        if self.wrapper is None:
            self._for_setup = (checkpoint, strict)
            return
        folder = checkpoint.get(_FOLDER)
        if folder is None:
            self.wrapper.load_state_dict(checkpoint["state_dict"], strict=strict)
            return
        fsdp.load(folder, self.wrapper, strict=strict, generators=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Load the optimizers. Callbacks may have added parameters since the model was loaded."""
        if (folder := checkpoint.get(_FOLDER)) is not None:
            fsdp.load(folder, self._required_wrapper(), self._plain_optimizers(), generators=False, weights=False)
            return
        saved, optimizers = checkpoint["optimizer_states"], self.optimizers
        if len(saved) != len(optimizers):
            raise ValueError(
                f"the checkpoint has {len(saved)} optimizers, but configure_optimizers returned {len(optimizers)}"
            )
        for optimizer, state in zip(optimizers, saved, strict=True):
            _load_numbered_state(self._required_wrapper(), _plain(optimizer), state)

    def _is_stock(self) -> bool:
        """Return whether files are written and read in the same way as by Lightning itself."""
        return type(self.checkpoint_io) in (TorchCheckpointIO, AsyncCheckpointIO)

    def _plain_optimizers(self) -> Any:
        found = [_plain(each) for each in self.optimizers]
        return found[0] if len(found) == 1 else found or None

    def _together(self, what: str, do: Callable[[], _Result]) -> _Result:
        """Collective. Call a function on each rank; if it fails on any rank, all ranks raise an error."""
        try:
            result = do()
        except Exception as error:
            self.reduce_boolean_decision(False)
            self._heard(f"rank {self.global_rank} could not {what}. {type(error).__name__}: {error}")
            raise
        if not self.reduce_boolean_decision(True):
            raise fsdp.OtherRankError(f"rank {self.global_rank}: {self._heard('')}")
        return result

    def _heard(self, text: str) -> str:
        """Collective. Return the first nonempty text, in rank order."""
        return next(filter(None, [self.broadcast(text, rank) for rank in range(self.world_size)]))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's names, when `fsdp.lightning` is imported."""
        for name in (cls.strategy_name, "ddp_fully_sharded"):
            strategy_registry.register(name, cls, description="Fully sharded training with fsdp", override=True)

    def _required_wrapper(self) -> fsdp.FullyShardedDataParallel:
        if self.wrapper is None:
            raise RuntimeError("the model is not wrapped yet: FullyShardedStrategy does that when the Trainer runs")
        return self.wrapper

    def _policy(self) -> AutoWrapPolicy:
        given = self.auto_wrap_policy
        if given is None:
            least = _DEFAULT_MIN_NUM_PARAMS if self.min_num_params is None else self.min_num_params
            return functools.partial(fsdp.default_auto_wrap_policy, min_num_params=least)
        if isinstance(given, (set, frozenset, list, tuple)):
            return fsdp.module_wrap_policy(given)
        if not callable(given):
            raise TypeError(f"auto_wrap_policy is a policy or a set of module classes, got {given!r}")
        return given

    def _wrapper_options(self) -> dict[str, Any]:
        shows_originals = self.flatten_parameters and "group_by" not in self.options
        defaults = {"use_orig_params": shows_originals, "sync_module_states": True}
        return {**defaults, **{name: getattr(self, name) for name in _SHARED}, **self.options}

    def _precision_arguments(self) -> dict[str, Any]:
        _check_precision(self)
        if not isinstance(self.precision_plugin, MixedPrecision):
            return {"compute_dtype": self.compute_dtype}
        # Inputs of a step are not cast: autocast casts them where necessary, and targets keep their precision.
        policy = fsdp.MixedPrecision(
            param_dtype=self.compute_dtype or _AUTOCAST_DTYPES[self.precision_plugin.precision],
            reduce_dtype=torch.float32 if self.fp32_reduce_scatter else None,
            cast_forward_inputs=False,
        )
        if self.root_device.type == "cpu":
            policy = replace(policy, full_precision_modules=(*policy.full_precision_modules, *_NOT_MIXED_ON_CPU))
        return {"mixed_precision": policy}

    def _settings(self) -> dict[str, Any]:
        """Return all settings that define the sharding, for comparison with a later Trainer."""
        policy = self.auto_wrap_policy
        found = {
            **self._wrapper_options(),
            "fp32_reduce_scatter": bool(self.fp32_reduce_scatter),
            "compute_dtype": self.compute_dtype,
            "auto_wrap_policy": policy if policy is None or callable(policy) else frozenset(policy),
            "min_num_params": self.min_num_params,
            "precision": self.precision_plugin.precision,
            "device": self.root_device,
        }
        for name in ("ignored_modules", "ignored_parameters"):
            if found.get(name) is not None:
                found[name] = frozenset(found[name])  # lists of tensors cannot be compared
        for name in ("param_init_fn", "sync_module_states"):  # only used during wrapping
            found.pop(name, None)
        return found

    def _wrap(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        wrapped: Any
        with self.model_sharded_context():
            if module.automatic_optimization:
                wrapped = fsdp.auto_wrap(module, keep_wrapped=True)
            else:
                wrapped = _wrap_called(module)
            if not isinstance(wrapped, fsdp.FullyShardedDataParallel):
                wrapped = fsdp.wrap(module)
        for metric in (each for each in module.modules() if isinstance(each, Metric)):
            metric.to(self.root_device)
        with wrapped.no_sync():  # makes it the root, even if other units are called first
            pass
        self.model = wrapped
        module.__dict__[_WRAPPED] = _Wrapped(wrapped, WeakSet(wrapped.modules()), self._settings())


def _check_options(options: Mapping[str, Any]) -> None:
    known = inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters
    for name in options:
        if name == "mixed_precision" and not isinstance(options[name], fsdp.MixedPrecision):
            raise ValueError(
                f"mixed_precision={options[name]!r}: choose precision='16-mixed' or 'bf16-mixed' of the Trainer, or "
                "pass an fsdp.MixedPrecision"
            )
        if name in _OURS:
            raise ValueError(f"FullyShardedStrategy sets {name} of the wrappers itself: {_OURS[name]}")
        if name in _THEIRS:
            raise TypeError(f"FullyShardedStrategy has no {name}, which Lightning's FSDPStrategy has: {_THEIRS[name]}")
        if name not in known or name == "self":
            raise TypeError(
                f"FullyShardedStrategy got {name!r}, which is neither an argument of its own nor one of "
                "FullyShardedDataParallel"
            )


def _check_precision(strategy: FullyShardedStrategy) -> None:
    name, dtype = strategy.precision_plugin.precision, strategy.compute_dtype
    if isinstance(strategy.precision_plugin, MixedPrecision):
        for option in ("buffer_dtype", "force_input_to_fp32"):
            if strategy.options.get(option):
                raise ValueError(
                    f"{option} cannot be combined with precision={name!r}, which does not cast buffers and inputs: "
                    "omit it"
                )
        return
    if strategy.fp32_reduce_scatter:
        raise ValueError(
            f"fp32_reduce_scatter=True needs precision='bf16-mixed' or '16-mixed' of the Trainer, got {name!r}. With "
            "parameters of 16 bits, mixed_precision=fsdp.MixedPrecision(reduce_dtype=torch.float32) of the strategy "
            "sums gradients in float32."
        )
    own = _TRUE_DTYPES.get(name)
    if dtype is not None and own is not None and dtype != own:
        raise ValueError(
            f"compute_dtype={dtype} conflicts with precision={name!r} of the Trainer, which computes in {own}. Use "
            "precision='bf16-mixed' or '16-mixed' to compute in 16 bits with parameters of 32, or 'bf16-true' or "
            "'16-true' for 16 bits everywhere."
        )


def _check_trainer(trainer: Any, module: LightningModule) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, _AVERAGES):
            raise ValueError(
                f"{type(callback).__name__} copies the whole model, but this one is sharded: remove the callback, and "
                "keep an average with fsdp.EMA(trainer.model) in your own callback"
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
    """Wrap the modules that a manual optimization step calls, and inner modules selected by the policy.

    The outermost wrapper must have no parameters of its own.
    """
    for name, param in module.named_parameters(recurse=False):
        raise ValueError(
            f"with manual optimization, {prefix}{name} of shape {list(param.shape)} must be in a module that "
            "training_step calls: move it to a module with a forward, such as the module that uses it"
        )
    for name, child in module.named_children():
        if isinstance(child, fsdp.FullyShardedDataParallel) or not any(True for _ in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward and "forward" not in vars(child):
            _wrap_called(child, f"{prefix}{name}.")
        else:
            inner = fsdp.auto_wrap(child, keep_wrapped=True)
            is_wrapped = isinstance(inner, fsdp.FullyShardedDataParallel)
            module._modules[name] = inner if is_wrapped else fsdp.wrap(inner)
    return module


class _Wrapped(NamedTuple):
    """The wrapper of a LightningModule, the modules at wrapping, and the settings of the strategy."""

    wrapper: fsdp.FullyShardedDataParallel
    modules: WeakSet[nn.Module]
    settings: dict[str, Any]


def _refuse_other_settings(sharded_by: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError if a Trainer requires other sharding settings than the Trainer that sharded the model."""
    listed = []
    for name in sorted(sharded_by.keys() | wanted.keys()):
        before, now = sharded_by.get(name), wanted.get(name)
        if before == now:
            continue
        if callable(before) and callable(now):  # functions cannot be compared
            warnings.warn(
                f"{name} of this Trainer's strategy differs from the function that the model was sharded with, and is "
                "not called: the model is not changed. Pass the same function to both.",
                stacklevel=2,
            )
        else:
            listed.append(f"{name}={before!r}, not {now!r}")
    if listed:
        raise ValueError(
            f"an earlier Trainer has sharded this LightningModule with {'; '.join(listed)}. A sharded model keeps its "
            "settings: use the same settings in this Trainer's strategy and precision, or load a checkpoint into a new "
            "LightningModule."
        )


def _refuse_new_modules(module: LightningModule, wrapped: _Wrapped) -> None:
    """Raise RuntimeError for modules added after wrapping, for example if `configure_model` runs twice."""
    for name, each in module.named_modules():
        if each not in wrapped.modules and any(True for _ in each.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} was wrapped for an earlier stage, but {name} is a different module now, "
                "without the trained values. configure_model is called before each stage: return immediately if the "
                "modules exist."
            )


def _check_optimizers(wrapper: fsdp.FullyShardedDataParallel, make: Callable[[], None], strategy: Any) -> None:
    """Create the strategy's optimizers with `make`, and check that they contain all trainable parameters."""
    hint = (
        "Create optimizers in configure_optimizers, which is called after wrapping, from self.trainer.model."
        "parameters(). With use_orig_params=True, the default, parameters() of self and its submodules work too."
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
                        f"{list(param.shape)}, is not of the sharded model. Either its layer is not a submodule of the "
                        "LightningModule: make it an attribute. Or the parameter was taken before the model was "
                        f"wrapped. {hint}"
                    )
            stepped |= {id(param) for param in group["params"]}
    # An optimizer of a submodule (``self.net``) does not list the outermost wrapper's flat parameter.
    for param in wrapper.params if stepped and wrapper.flatten_parameters else ():
        name, is_trained = known.get(id(param), ("", False))
        if is_trained and id(param) not in stepped:
            raise ValueError(f"no optimizer steps {name}, which contains the parameters outside inner units. {hint}")


def _not_in_optimizer(
    lightnings: Callable[..., list[Any]], optimizer: torch.optim.Optimizer, params: Iterable[Any]
) -> list[Any]:
    """Return the parameters thawed by `BaseFinetuning` that an optimizer does not contain.

    Lightning compares values, and a rank may have no elements of two parameters, which would be equal on this rank.
    """
    if optimizer not in _OPTIMIZERS:
        return lightnings(optimizer, params)
    known, found = {id(param) for group in optimizer.param_groups for param in group["params"]}, list(params)
    if not found:
        raise RuntimeError(
            "a finetuning callback has thawed modules without parameters: with use_orig_params=False only units have "
            "parameters, which are flat. Use use_orig_params=True, or an auto_wrap_policy that makes these modules "
            "units."
        )
    lightnings(optimizer, [param for param in found if id(param) in known])  # warns about them
    return [param for param in found if id(param) not in known]


def _open_folder(path: Any, weights_only: bool | None) -> dict[str, Any]:
    values = fsdp.checkpoint.values(path)
    if not isinstance(values, dict) or _TRAINER not in values:
        raise ValueError(
            f"{path} is a checkpoint, but not of a Trainer: load it into the model with fsdp.load(path, trainer.model)"
        )
    rest: dict[str, Any] = torch.load(io.BytesIO(values[_TRAINER]), map_location="cpu", weights_only=weights_only)
    return {**rest, _FOLDER: os.fspath(path)}


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _numbered_state(model: fsdp.FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    """Collective. Return an optimizer's full state with the unsharded model's numbers; empty except on rank 0."""
    named = full_optim_state_dict(model, optimizer, recipient_rank=0)
    if named is None:
        return {}
    numbers: dict[str, int] = {}
    groups = []
    for group in named["param_groups"]:
        names = list(group["params"])
        numbers |= {name: number for number, name in enumerate(names, start=len(numbers))}
        groups.append({**group, "params": [numbers[name] for name in names], _NAMES: names})
    state = {numbers[name]: each for name, each in named["state"].items()}
    return {**named, "state": state, "param_groups": groups}


def _load_numbered_state(model: fsdp.FullyShardedDataParallel, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Collective. Load a full state from this or another strategy into an optimizer; each rank loads its shards."""
    if all(_NAMES in group for group in saved["param_groups"]):
        names = [name for group in saved["param_groups"] for name in group[_NAMES]]
    else:
        names = _names_in(model, optimizer)
    listed = [number for group in saved["param_groups"] for number in group["params"]]
    if len(names) != len(listed):
        raise ValueError(
            f"the optimizer state in the checkpoint has {len(listed)} parameters, but this {type(optimizer).__name__} "
            f"has {len(names)}: create it with the same parameters, in the same groups"
        )
    by_number = dict(zip(listed, names, strict=True))
    groups = [
        {key: value for key, value in group.items() if key != _NAMES}
        | {"params": [by_number[n] for n in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {by_number[number]: each for number, each in saved["state"].items()}
    load_full_optim_state_dict(model, optimizer, {**saved, "state": state, "param_groups": groups})


def _names_in(model: fsdp.FullyShardedDataParallel, optimizer: Any) -> list[str]:
    """Collective. Return the names of an optimizer's parameters, in its order."""
    full = full_optim_state_dict(model, optimizer, recipient_rank=None) or {}
    names = [name for group in full["param_groups"] for name in group["params"]]
    if len(names) != sum(len(group["params"]) for group in optimizer.param_groups):
        raise ValueError(
            "the checkpoint's optimizer state numbers the parameters of an unsharded model, but this optimizer has "
            "flat parameters. Load it with FullyShardedStrategy(use_orig_params=True), the default, and save it again: "
            "the new state contains names."
        )
    return names


_callbacks.BaseFinetuning.filter_on_optimizer = staticmethod(  # type: ignore[method-assign]
    functools.partial(_not_in_optimizer, _callbacks.BaseFinetuning.filter_on_optimizer)
)
FullyShardedStrategy.register_strategies(StrategyRegistry)
