"""A `transformers.Trainer` for models that are sharded already.

from fsdp.transformers import Trainer  # instead of: from transformers import Trainer
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp

try:
    from transformers import GenerationMixin, TrainingArguments
    from transformers import Trainer as _PlainTrainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
except ImportError as error:
    raise ImportError(
        "fsdp.transformers needs transformers and accelerate: pip install 'fsdp[transformers]'"
    ) from error

from fsdp.accelerate import Accelerator, outermost, together


class Trainer(_PlainTrainer):
    """`transformers.Trainer`, for a model in a `FullyShardedDataParallel` or under `fully_shard`.

    Shard the model first and pass it as `model`; all other arguments are the same as in `transformers.Trainer`. The
    class can be combined with subclasses of `transformers.Trainer` (``class Mine(fsdp.transformers.Trainer,
    transformers.Seq2SeqTrainer)``). ``trainer.model`` is the wrapped module and ``trainer.model_wrapped`` the wrapper.

    Checkpoints are written by `fsdp.save`: every rank writes its part, any number of ranks can resume from them, and
    `from_pretrained` can read them. A user's call of `save_model` writes the gathered model from rank 0.

    Raises:
        TypeError: without a model, or with a `model_init`.
        ValueError: for a model that is not sharded, or only in part; for arguments that shard, wrap or compile the
            model once more (``fsdp``, ``deepspeed``, ``auto_find_batch_size``, ``torch_compile``); for arguments that
            know of another number of ranks than there are, for example on CPU without ``use_cpu=True``.
    """

    label_smoother: Any

    def __init__(self, model: nn.Module | None = None, *others: Any, **options: Any) -> None:
        if not isinstance(model, nn.Module) or options.get("model_init") is not None:
            raise TypeError("Trainer needs the sharded model itself, and does not support model_init")
        if outermost(model) is None:
            raise ValueError(
                f"this {type(model).__name__} is not sharded: wrap it first (or use transformers.Trainer, which trains "
                "it with DistributedDataParallel)"
            )
        # Subclasses of `transformers.Trainer`, such as those of trl, have `args` in another place.
        for args in (*others, *options.values()):
            if isinstance(args, TrainingArguments):
                _refuse(args)
        # The Trainer uses the model's class, its configuration and the arguments of its forward.
        plain = model.module.module if isinstance(model, fsdp.FullyShardedDataParallel) else model
        super().__init__(plain, *others, **options)
        self.model_wrapped = model
        if self.label_smoother is not None and _class_name(plain) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            # transformers.Trainer shifts labels by the name of the class, which `fully_shard` changes.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        _prepare_to_generate(model, plain)
        # Some arguments take precedence over the environment, and all ranks would then use the same batches.
        if dist.is_initialized() and self.args.world_size != dist.get_world_size():
            raise ValueError(
                f"TrainingArguments found {self.args.world_size} rank(s), but there are {dist.get_world_size()}: pass "
                "use_cpu=True on CPU, and start the ranks with torchrun"
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: shards are already on their device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.accelerator.prepare_model(self.model_wrapped)

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters of the unsharded model."""
        sharded = self.model_wrapped
        with sharded.summon_shapes() if isinstance(sharded, fsdp.FullyShardedDataParallel) else nullcontext():
            return super().get_num_trainable_parameters()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the decayed parameters as the model lists them, without the wrappers' prefixes.

        `transformers.Trainer` builds the names from the names of children.
        """
        names = super().get_decay_parameter_names(model)
        return [name.replace("_fsdp_wrapped_module._fpw_module.", "") for name in names]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer like `transformers.Trainer`.

        Raises:
            ValueError: for a weight decay if a flat parameter contains both biases or norms, which must not decay, and
                decayed parameters.
        """
        is_flat = any("flat_param_" in name for name, _ in self.model.named_parameters())
        if self.optimizer is None and self.args.weight_decay and is_flat:
            raise ValueError(
                "weight_decay excludes biases and norms, which are in one flat parameter with other parameters here: "
                "wrap with use_orig_params=True, or pass optimizers=(optimizer, None), created from the wrapped "
                "model's parameters"
            )
        return super().create_optimizer(model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective. Save the model for `from_pretrained`: gathered, and written from rank 0's host memory.

        Args:
            output_dir: the folder. Default: the `output_dir` of the training arguments.
            _internal_call: True for a checkpoint, which `fsdp.save` writes together with the optimizer.

        Raises:
            OSError: if rank 0 cannot write. Other ranks raise an `OtherRankError` with the reason.
        """
        folder = self.args.output_dir if output_dir is None else output_dir
        if _internal_call:
            optimizer = None if self.args.save_only_model else self.optimizer.optimizer
            fsdp.save(folder, self.model_wrapped, optimizer, generators=False)
            together(f"save the configuration to {folder}", partial(self._save_beside, folder))
            return
        with _saved_state(self.model_wrapped, self.model, self.accelerator) as state:
            together(f"save the model to {folder}", partial(self._save, folder, state_dict=state))
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside(self, folder: str) -> None:
        """Save the parts of a `transformers.Trainer` checkpoint other than weights."""
        if not self.args.should_save:
            return
        for part in ("config", "generation_config"):
            if getattr(self.model, part, None) is not None:
                getattr(self.model, part).save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the scheduler; the optimizer is saved with the model."""
        path = os.path.join(output_dir, SCHEDULER_NAME)

        def save() -> None:
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), path)

        together(f"write {path}", save)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: the model is loaded together with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        is_complete = os.path.isfile(scheduler)  # otherwise it was saved with save_only_model
        fsdp.load(checkpoint, self.model_wrapped, self.optimizer.optimizer if is_complete else None, generators=False)
        if is_complete:
            read = partial(torch.load, scheduler, weights_only=True)
            together(f"load {scheduler}", lambda: self.lr_scheduler.load_state_dict(read()))

    def _load_best_model(self) -> None:
        fsdp.load(self.state.best_model_checkpoint, self.model_wrapped, generators=False)


@contextmanager
def _saved_state(model: Any, plain: nn.Module, accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """Collective. Provide the state for rank 0 to save, in host memory.

    `peft` also reads the state of modules that are saved as a whole, and computes prompts; parameters are unsharded.
    """
    if _is_of_peft(plain) and isinstance(model, fsdp.FullyShardedDataParallel):
        with model.summon_full_params(rank0_only=True, volatile=True, offload_to_cpu=True):
            named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
            yield dict(chain(*named))
        return
    state = accelerator.get_state_dict(model)
    if not _is_of_peft(plain):
        yield state
        return
    model.unshard()
    try:
        yield state
    finally:
        model.reshard()


def _class_name(model: Any) -> str:
    """Return the name of a model's class before `fully_shard`; for a PEFT model, the class of its inner model."""
    if _is_of_peft(model):
        model = model.base_model.model
    kind = type(model)
    return kind.__bases__[1].__name__ if issubclass(kind, fsdp.FSDPModule) else kind.__name__


def _is_of_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _prepare_to_generate(model: nn.Module, plain: Any) -> None:
    """Make `generate` by default run on all ranks until the last rank has all of its tokens."""
    if not hasattr(plain, "generate"):
        return
    if _is_of_peft(plain) or getattr(getattr(plain, "config", None), "is_encoder_decoder", False):
        # `generate` also calls parts of the model separately, such as an encoder.
        fsdp.register_fsdp_forward_method(model, "generate")
    if dist.is_initialized() and dist.get_world_size() > 1:
        for module in plain.modules():
            if isinstance(module, GenerationMixin):
                # transformers reads this attribute, which torch sets, for the default of `synced_gpus`.
                module._is_fsdp_managed_module = True


def _refuse(args: Any) -> None:
    """Raise an error for arguments that would make the Trainer shard, wrap or compile the model again."""
    wanted = [name for name in ("fsdp", "deepspeed", "auto_find_batch_size", "torch_compile") if getattr(args, name)]
    if wanted:
        raise ValueError(
            f"{', '.join(wanted)}: the model is sharded already, and the Trainer must not wrap it again. Omit this "
            "argument; compile blocks before they are wrapped (docs/performance.md)"
        )
