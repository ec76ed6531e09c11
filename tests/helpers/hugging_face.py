"""What tests of `transformers` and `accelerate` share: small models, batches, and processes as torchrun starts them.

Both are imported on the ranks only, since that takes seconds; `MODULES` are for the `PRELOAD` of a file of tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, fully_shard, load, module_wrap_policy
from fsdp.state_dict_utils import gather_state_dict

FAMILIES = ["llama", "gpt2"]  # the second ties its head to its embedding
VOCABULARY, LENGTH = 29, 9
PATIENCE = 240  # seconds: on a busy machine ranks take long to import it all
TOKENS = torch.arange(LENGTH)[None]
MODULES = [  # what ranks import for these
    "fsdp.transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]

# Ways to shard, by the name that tests have for them.
FORMS: dict[str, dict[str, Any]] = {"flat": {}, "original": {"use_orig_params": True}}


def made(family: str, seed: int = 0) -> tuple[Any, type[nn.Module]]:
    """A small language model, and the class of its layers."""
    import transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(seed)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=12,
            n_layer=2,
            n_head=3,
            bos_token_id=None,
            eos_token_id=None,
            # Dropout would draw other numbers on each rank than in one process.
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config), GPT2Block
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config), LlamaDecoderLayer


def wrapped(model: nn.Module, layer: type[nn.Module], **options: Any) -> Any:
    """With a unit for each layer, and one for what is left."""
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
        auto_wrap(model, module_wrap_policy({layer}))
    return FullyShardedDataParallel(model, **options)


def sharded(family: str, form: str = "flat", seed: int = 0, **options: Any) -> Any:
    """As `wrapped`, in a form of `FORMS`, or ("fully_shard") without a wrapper."""
    model, layer = made(family, seed)
    if form != "fully_shard":
        return wrapped(model, layer, **FORMS[form], **options)
    for module in model.modules():
        if isinstance(module, layer):
            fully_shard(module)
    return fully_shard(model)


def save_with_torchs_fsdp(folder: Path, kind: str, model: Any, optimizer: Any) -> None:
    """Collective. Replace a checkpoint in a folder by what `accelerate` saves of the same with torch's `fully_shard`.

    `kind` is the name of a `StateDictType`; model and optimizer are of torch's `fully_shard`.
    """
    from accelerate import PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import StateDictType

    load(folder, model, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("model.safetensors", "optimizer.safetensors", "checkpoint.json"):
            (folder / name).unlink()
    config = SimpleNamespace(rank0_only=kind == "FULL_STATE_DICT", offload_to_cpu=True)
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType[kind], state_dict_config=config)
    job = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    with as_launched():
        PartialState()  # which its messages need
        save_fsdp_model(plugin, job, model, folder)
        save_fsdp_optimizer(plugin, job, optimizer, model, folder)


def whole_state(model: Any) -> dict[str, Tensor]:
    """Collective. The state of a sharded model, whole on every rank."""
    return dict(gather_state_dict(model.state_dict()))


def recipe(name: str) -> Any:
    """The code that docs/hugging_face.md shows, as a module."""
    return importlib.import_module(f"tests.data.recipes.{name}")


def plain_of(model: Any) -> Any:
    """The `PreTrainedModel` in a sharded one."""
    return model.module.module if isinstance(model, FullyShardedDataParallel) else model


def from_pretrained(family: str, folder: Path, **options: Any) -> Any:
    """As a user of `transformers` loads it, in a process that knows nothing of ranks."""
    import transformers

    kind = type(made(family)[0])
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    assert isinstance(transformers.AutoModelForCausalLM.from_pretrained(folder), kind)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """A data set of token sequences of one length."""
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


@contextmanager
def as_launched() -> Iterator[None]:
    """What torchrun tells ranks by their environment, where `accelerate` looks; one alone is a plain process."""
    from accelerate.state import AcceleratorState, GradientState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    if size != "1":
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update(told, MASTER_ADDR=socket.gethostname(), MASTER_PORT="1")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # What was found out for an earlier test is kept for the process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


BATCH = 6  # rows in a global batch


def arguments(folder: Path, **options: Any) -> Any:
    import transformers

    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH // dist.get_world_size(),
        "per_device_eval_batch_size": BATCH // dist.get_world_size(),
        "max_steps": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.2,  # less than the norms that are met
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(**usual | options)


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    """Ours for a model that is sharded, and `transformers`' own for another."""
    import transformers

    from fsdp.accelerate import outermost
    from fsdp.transformers import Trainer

    kind: Any = transformers.Trainer if outermost(model) is None else Trainer
    return kind(model, arguments(folder, **options), train_dataset=rows(5 * BATCH), eval_dataset=rows(BATCH, seed=1))
