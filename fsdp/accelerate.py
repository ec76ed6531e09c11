"""An `accelerate.Accelerator` that supports models that are sharded already.

from fsdp.accelerate import Accelerator  # instead of: from accelerate import Accelerator
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import fsdp
from fsdp.state_dict_utils import gather_state_dict

try:
    from accelerate import Accelerator as _PlainAccelerator
    from accelerate.utils import DistributedType, convert_outputs_to_fp32, gather_object
except ImportError as error:
    raise ImportError("fsdp.accelerate needs accelerate: pip install 'fsdp[accelerate]'") from error


def outermost(model: nn.Module) -> fsdp.FullyShardedDataParallel | fsdp.FSDPModule | None:
    """Return the model if it is a wrapper or a module under `fully_shard`; None if it is not sharded.

    Raises:
        ValueError: for a plain module with sharded inner modules, which have no common root to clip and accumulate.
    """
    if isinstance(model, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
        return model
    if fsdp.get_fsdp_instances(model) or any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} contains sharded modules, but is not sharded itself: wrap the whole model too, or "
            "pass the wrapper around it"
        )
    return None


def together(what: str, do: Callable[[], object]) -> None:
    """Collective. Call a function on each rank; if it fails on any rank, all ranks raise an error."""
    failure: Exception | None = None
    try:
        do()
    except Exception as error:  # noqa: BLE001 (raised when all ranks know)
        failure = error
    raise_on_all(what, failure)


def raise_on_all(what: str, failure: Exception | None) -> None:
    """Collective. Raise this rank's error, or otherwise an error with the first failure of another rank, if any."""
    own = f"rank {dist.get_rank() if dist.is_initialized() else 0}"
    told = "" if failure is None else f"{own} could not {what}. {type(failure).__name__}: {failure}"
    heard = next(filter(None, gather_object([told])), "")
    if failure is not None:
        raise failure
    if heard:
        raise fsdp.OtherRankError(f"{own}: {heard}")


class Accelerator(_PlainAccelerator):
    """`accelerate.Accelerator`, for models in a `FullyShardedDataParallel` or under `fully_shard`.

    Shard the model first, create the optimizer from its parameters, and `prepare` both. Sharded models are not wrapped
    in `DistributedDataParallel`, and gradients are clipped by the norm across all ranks. `save_state` writes the files
    of `fsdp.save`, and `unwrap_model` and `get_state_dict` return the objects to save. In all other respects, and for
    models that are not sharded, the class behaves like `accelerate.Accelerator`.

    ``mixed_precision`` ("bf16", "fp16") computes under autocast. The wrapper's own mixed precision also halves
    communication, and does not require this argument. With "fp16", the scaler is a `ShardedGradScaler`.

    Args:
        args, kwargs: arguments of `accelerate.Accelerator`.

    Raises:
        ValueError: if `accelerate` is configured to shard models itself (FSDP, DeepSpeed, Megatron-LM).
    """

    _custom_objects: list[Any]
    _optimizers: list[Any]
    scaler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._know_sharded_models()

    @classmethod
    def adopt(cls, accelerator: _PlainAccelerator) -> Accelerator:
        """Convert an accelerator created by other code (such as a Trainer), before it prepares models.

        Raises:
            ValueError: the same as the constructor.
        """
        accelerator.__class__ = cls
        accelerator._know_sharded_models()
        return accelerator

    def _know_sharded_models(self) -> None:
        others = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
        if self.distributed_type in others:
            raise ValueError(
                f"accelerate is configured for {self.distributed_type.value}, which shards models itself. For models "
                "that are sharded already disable it: `accelerate launch --multi_gpu`, or torchrun"
            )
        self._is_saving = False
        if type(self.scaler) is torch.amp.GradScaler:
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = fsdp.ShardedGradScaler(device=self.device.type, **options)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model like `accelerate`; a sharded model is not moved or wrapped, except for autocast.

        Raises:
            ValueError: for a plain module with sharded inner modules; if `accelerate` uses another number of ranks than
                there are, for example on CPU without ``cpu=True``.
        """
        if outermost(model) is None:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        # All ranks would use the same batches.
        if dist.is_initialized() and self.num_processes != dist.get_world_size():
            raise ValueError(
                f"accelerate found {self.num_processes} rank(s), but there are {dist.get_world_size()}: pass cpu=True "
                "to the Accelerator on CPU, and start the ranks with torchrun or `accelerate launch`"
            )
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        if self.native_amp and not is_prepared and isinstance(model, fsdp.FullyShardedDataParallel):
            self._autocast(model.module.module)
        # accelerate prepares models in this way if they need not be distributed.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _autocast(self, inside: Any) -> None:
        """Make the module in a wrapper compute under autocast, as in a `DistributedDataParallel`.

        Other methods of the module, such as `generate`, do not call the wrapper.
        """
        inside._original_forward = forward = inside.forward  # accelerate uses this name to remove autocast
        if not hasattr(forward, "__func__"):
            inside.forward = convert_outputs_to_fp32(self.autocast()(forward))
            return
        # A method, so that a copy of the module uses its own parameters.
        inside.forward = MethodType(convert_outputs_to_fp32(self.autocast()(forward.__func__)), inside)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Unwrap a model like `accelerate`; a wrapper is replaced by its module, which keeps inner wrappers."""
        return super().unwrap_model(
            model.module.module if isinstance(model, fsdp.FullyShardedDataParallel) else model, *args, **kwargs
        )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate like `accelerate`: backwards inside this context keep unsharded gradients on each rank."""
        if not isinstance(model, fsdp.FSDPModule):
            with super().no_sync(model):
                yield
            return
        try:
            model.set_requires_gradient_sync(False)
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """Join uneven inputs like `accelerate`, for models that are not sharded.

        Raises:
            NotImplementedError: for a sharded model, which `fsdp.join` supports.
        """
        if any(isinstance(each, nn.Module) and outermost(each) is not None for each in joinables):
            raise NotImplementedError(
                "join_uneven_inputs has no effect on a sharded model, and ranks would wait for each other: use "
                "`with fsdp.join(model, optimizer):`"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Collective. Scale gradients so that their norm, across all ranks, is at most `max_norm`.

        Args:
            parameters: parameters of any previously used models.
            max_norm, norm_type: the same as for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping, the same on every rank.
        """
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = super().clip_grad_norm_(listed, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor contains a part of the norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Collective. Return the state like `accelerate`; for a sharded model, only on rank 0."""
        if self._is_saving:
            return {}
        sharded = outermost(model)
        if sharded is None:
            return super().get_state_dict(model, unwrap=unwrap)
        if isinstance(sharded, fsdp.FullyShardedDataParallel):
            return sharded.state_dict(rank0_only=True)
        return gather_state_dict(model.state_dict(), cpu_offload=True, ranks_only=(0,))

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Collective. Save like `accelerate`; a sharded model and its optimizer are saved by `fsdp.save`.

        Any number of ranks can load these files, and `from_pretrained` can read the model if the folder contains a
        configuration. Schedulers, samplers, random states and registered objects are saved in `accelerate`'s files,
        which contain unsharded tensors for `DTensor`s in the state of a registered object, such as an `fsdp.EMA`.

        Args:
            output_dir: the folder. Default: automatic names.
            safe_serialization: must be True for a sharded model.
            options: arguments of `fsdp.save`, such as ``max_file_bytes``.

        Raises:
            NotImplementedError: for a sharded model together with another model.
            ValueError: for a registered optimizer of the sharded model; `prepare` it.
            OtherRankError: with the reason, if another rank cannot write the model or its other states.
        """
        model, optimizers = self._model_and_optimizers("save_state")
        if model is None:
            return super().save_state(output_dir, safe_serialization, **options)
        if not safe_serialization:
            raise ValueError("save_state: a sharded model is always saved as safetensors")

        def save(_: Any, weights: list[Any], folder: str) -> None:
            weights.clear()
            fsdp.save(folder, model, optimizers, generators=False, **options)

        registered = self._custom_objects
        # Before other hooks add files to the folder.
        with self._instead(save, self.register_save_state_pre_hook, self._save_model_state_pre_hook, last=False):
            try:
                self._custom_objects = [SimpleNamespace(state_dict=partial(self._whole, each)) for each in registered]
                return super().save_state(output_dir)
            finally:
                self._custom_objects = registered

    def _whole(self, registered: Any) -> Any:
        """Collective. Return the state of a registered object, with unsharded tensors on ranks that write it."""
        states: list[Any] = []
        together(f"take the state of its {type(registered).__name__}", lambda: states.append(registered.state_dict()))
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves(states)):
            return states[0]
        ranks = () if self.project_configuration.save_on_each_node else (0,)
        return gather_state_dict(states[0], cpu_offload=True, ranks_only=ranks, type_check=False)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Collective. Load like `accelerate`; any number of ranks can load a sharded model.

        Args:
            input_dir: the folder. Default: the newest folder with an automatic name.
            load_kwargs: the same as in `accelerate`.
            options: arguments of `fsdp.load`, such as ``strict``.

        Raises:
            NotImplementedError: for a sharded model together with another model.
            ValueError: if the folder does not exist on this rank. The other ranks raise an `OtherRankError`.
        """
        model, optimizers = self._model_and_optimizers("load_state")
        if model is None:
            super().load_state(input_dir, load_kwargs, **options)
            return

        def find() -> None:
            if input_dir is not None and not os.path.isdir(os.path.expanduser(input_dir)):
                raise ValueError(f"load_state: {os.fspath(input_dir)} is not a folder")

        together(f"find {input_dir}", find)

        def load(models: list[nn.Module], folder: str) -> None:
            models.clear()
            fsdp.load(folder, model, optimizers, generators=False, **options)

        # After other hooks have seen the models.
        with self._instead(load, self.register_load_state_pre_hook, self._load_model_state_pre_hook, last=True):
            super().load_state(input_dir, load_kwargs)

    def _model_and_optimizers(self, method: str) -> tuple[nn.Module | None, list[torch.optim.Optimizer] | None]:
        if not any(outermost(model) for model in self._models):
            return None, None
        if len(self._models) > 1:
            raise NotImplementedError(
                f"{method}: only a single sharded model is supported, and {len(self._models)} models were prepared. "
                "Save each with fsdp.save, in a separate folder."
            )
        # Under `fully_shard`, `parameters()` lists unsharded parameters while modules are unsharded.
        shards = {id(param) for _, param in nn.Module.named_parameters(self._models[0])}
        for each in self._custom_objects:
            groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else ()
            if any(id(param) in shards for group in groups for param in group["params"]):
                raise ValueError(
                    f"{method}: a {type(each).__name__} of sharded parameters is registered for checkpointing, which "
                    "saves the first rank's part of its state only. Pass it to prepare() instead."
                )
        return self._models[0], [each.optimizer for each in self._optimizers] or None

    @contextmanager
    def _instead(
        self, do: Callable[..., None], register: Callable[..., Any], hooks: Any, *, last: bool
    ) -> Iterator[None]:
        """Make `accelerate` call a collective function as a hook in this context, and omit the model and its optimizer.

        Args:
            do: the hook, which saves or loads the model on all ranks.
            register: the method of `accelerate` that registers the hook.
            hooks: the `OrderedDict` of hooks that were registered by this method.
            last: If True, call the hook after all other hooks, otherwise before them.
        """
        is_done = False

        def hook(*arguments: Any) -> None:
            nonlocal is_done
            do(*arguments)
            is_done = True

        handle, failure = register(hook), None
        hooks.move_to_end(handle.id, last=last)
        optimizers, self._optimizers, self._is_saving = self._optimizers, [], True
        try:
            yield
        except Exception as error:
            if not is_done:  # the other ranks are in the hook, or raise as well
                raise
            failure = error
        finally:
            self._optimizers, self._is_saving = optimizers, False
            handle.remove()
        raise_on_all("save or load its other states", failure)
