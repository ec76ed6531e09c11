"""Adapters of peft on a frozen transformers model, both sharded, in a plain loop.

    torchrun --nproc-per-node 2 examples/adapters/train.py
    torchrun --nproc-per-node 2 examples/adapters/train.py --quantise

The base is a small Llama with random weights, in bfloat16; yours comes from
`AutoModelForCausalLM.from_pretrained`. The model learns to continue sequences that
count upwards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsdp
from fsdp import FullyShardedDataParallel

VOCABULARY, LENGTH, BATCH = 64, 16, 16


def configuration() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )


def build(device: torch.device, quantise: bool = False) -> FullyShardedDataParallel:
    """Collective. The base is frozen, in bfloat16, or quantised to 8 bits by torchao;
    the adapters are trained, in float32. Units have some of both.
    """
    torch.manual_seed(0)  # the same weights on every rank
    base = LlamaForCausalLM(configuration()).bfloat16()
    if quantise:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        layers = base.model.layers  # the head keeps its dtype
        quantize_(layers, Int8WeightOnlyConfig())
        layers.requires_grad_(False)
    adapters = LoraConfig(
        r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    plain = get_peft_model(base, adapters).to(device)
    return fsdp.shard(plain, units={LlamaDecoderLayer}, use_orig_params=True)


def sequences(step: int, device: torch.device) -> Tensor:
    """This rank's batch of a step: numbers that count up from anywhere, [BATCH,
    LENGTH].
    """
    generator = torch.Generator().manual_seed(
        step * dist.get_world_size() + dist.get_rank()
    )
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return ((first + torch.arange(LENGTH)) % VOCABULARY).to(device)


def train(
    device: torch.device, folder: Path, steps: int = 60, quantise: bool = False
) -> list[float]:
    """Collective. Train the adapters, save them, and return the losses."""
    model = build(device, quantise)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        batch = sequences(step, device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)

    state = model.state_dict(rank0_only=True)  # collective
    if dist.get_rank() == 0:
        model.module.module.save_pretrained(
            folder, state_dict=state
        )  # for PeftModel.from_pretrained(base, folder)
        print(f"saved {sorted(path.name for path in folder.iterdir())}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60, help="[%(default)s]")
    parser.add_argument("--quantise", action="store_true", help="an 8-bit base (QLoRA)")
    asked = parser.parse_args()
    device = fsdp.init_distributed()
    train(device, Path("runs/adapters"), asked.steps, asked.quantise)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
