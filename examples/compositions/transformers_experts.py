"""A mixture of experts of `transformers`: its experts over an axis of ranks.

    torchrun --nproc-per-node 4 -m examples.compositions.transformers_experts

`transformers` calls a registered function instead of the forward of its experts, so the
model is unchanged. The function serves Mixtral, Qwen-MoE and other models whose experts
have the parameters `gate_up_proj` and `down_proj`. With `ep=None`, experts are sharded
like all other parameters, which is also exact if a rank has no token for some experts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import fsdp
from examples.compositions.expert_parallel import divide, mesh_of
from examples.compositions.loop import run
from examples.compositions.routing import local, routed

VOCABULARY, LENGTH, BATCH = 32, 6, 4  # BATCH of all ranks together


def over_ranks(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return [tokens, width] of the experts `index` [tokens, top], by their weights."""

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        found, every = [], (local(experts.gate_up_proj), local(experts.down_proj))
        for part, gate_up, down in zip(rows.split(counts), *every, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            found.append(F.linear(experts.act_fn(gate) * up, down))
        return torch.cat(found)

    top, group = index.shape[1], getattr(experts, "group", None)
    rows = hidden.repeat_interleave(top, dim=0)
    rows = routed(compute, rows, index.flatten(), experts.num_experts, group)
    return (rows.unflatten(0, (-1, top)) * weights[..., None]).sum(1)


ALL_EXPERTS_FUNCTIONS.register("over_ranks", over_ranks)


def build() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads, **experts)
    model = MixtralForCausalLM(config).double()
    model.set_experts_implementation("eager")  # others do not compute in float64
    return model


def loss_of(model: nn.Module, part: int, parts: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH)).chunk(parts)[part]
    logits = model(tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def shard(model: Any, ep: int | None = 2) -> Any:
    if ep is not None:
        model.set_experts_implementation("over_ranks")
        mesh = mesh_of(ep)
    for layer in model.model.layers:
        if ep is not None:
            divide(layer.mlp.experts, mesh)
        fsdp.fully_shard(layer)
    return fsdp.fully_shard(model)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


if __name__ == "__main__":
    run(sys.modules[__name__])
