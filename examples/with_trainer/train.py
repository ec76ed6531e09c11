"""Adapters of peft on a sharded transformers model, trained by the Trainer, which
resumes on any number of ranks.

    torchrun --nproc-per-node 2 examples/with_trainer/train.py

The base is a small Llama with random weights; yours comes from
`AutoModelForCausalLM.from_pretrained`. The task is to continue sequences that count
upwards. With `--resume` it goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.transformers import Trainer

VOCABULARY, LENGTH, BATCH = 64, 16, 48  # of all ranks together


def build(device: torch.device) -> FullyShardedDataParallel:
    """Collective. The base is frozen; only the adapters are trained, and have gradients
    and optimizer state.
    """
    torch.manual_seed(0)  # the same weights on every rank
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    adapters = LoraConfig(
        r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    plain = get_peft_model(base, adapters).to(device)
    return fsdp.shard(plain, units={LlamaDecoderLayer}, use_orig_params=True)


def sequences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Numbers that count up from anywhere."""
    first = torch.randint(
        VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed)
    )
    return [
        {"input_ids": row, "labels": row}
        for row in (first + torch.arange(LENGTH)) % VOCABULARY
    ]


def train(
    device: torch.device,
    folder: Path,
    steps: int = 60,
    resume: bool = False,
    **options: Any,
) -> list[float]:
    """Collective. Train, optionally resuming from the newest checkpoint, and return the
    losses on other data.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=1e-2,
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
        **options,
    )
    trainer = Trainer(
        build(device),
        arguments,
        train_dataset=sequences(960, seed=1),
        eval_dataset=sequences(96, seed=2),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(
        str(folder / "adapters")
    )  # for PeftModel.from_pretrained(base, folder / "adapters")
    return [
        entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=60, help="earlier runs included [%(default)s]"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint"
    )
    arguments = parser.parse_args()
    losses = train(
        fsdp.init_distributed(),
        Path("runs/with_trainer"),
        arguments.steps,
        arguments.resume,
    )
    if dist.get_rank() == 0:
        print("losses on other data:", ", ".join(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
