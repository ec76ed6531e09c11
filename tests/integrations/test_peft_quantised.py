"""QLoRA: adapters of `peft` on a base with quantised weights train, save and load as on the unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard
from tests.helpers.equality import assert_close_state
from tests.helpers.hugging_face import FORMS, MODULES, PATIENCE, logits, made, plain_of, rows
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.quantised import Rows8, plain_values

pytestmark = [
    needs("transformers", "peft"),
    # peft calls what transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
PRELOAD = [*MODULES, "peft"]

KINDS = ["two tensors", "torchao", "bitsandbytes"]


def quantised_base(kind: str) -> tuple[Any, type[nn.Module]]:
    """A small Llama whose linear layers, but for the head, are quantised and frozen."""
    base, layer = made("llama")
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(base, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("_proj"))
    elif kind == "bitsandbytes":
        in_4_bits(base)
    else:
        for name, module in base.named_modules():
            if name.endswith("_proj"):
                module.weight = nn.Parameter(Rows8.of(module.weight), requires_grad=False)
    base.requires_grad_(False)
    return base, layer


def in_4_bits(base: Any) -> None:
    """Replace the linear layers by those of bitsandbytes, as `transformers` does when it loads a model in 4 bits."""
    import bitsandbytes

    for name, module in list(base.named_modules()):
        if name.endswith("_proj"):
            made = bitsandbytes.nn.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            made.load_state_dict(module.state_dict())
            made.support_avx512bf16_for_cpu = False  # for an evaluation, it would convert weights, and not these sizes
            base.set_submodule(name, made.to("cpu"))
    base.is_loaded_in_4bit = True


def with_adapters(kind: str) -> tuple[Any, type[nn.Module]]:
    from peft import LoraConfig, get_peft_model

    base, layer = quantised_base(kind)
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config), layer


def sharded(kind: str, form: str) -> Any:
    model, layer = with_adapters(kind)
    if form != "fully_shard":
        return fsdp.shard(model, units={layer}, **FORMS[form])
    for module in model.modules():
        if isinstance(module, layer):
            fully_shard(module)
    return fully_shard(model)


def train(model: Any, steps: int) -> list[float]:
    """Train the adapters on the same rows on every rank; return the losses."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.2)
    losses = []
    for row in rows(steps):
        loss = model.train()(**{name: value[None] for name, value in row.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@parametrize_pairs(kind=KINDS, form=["flat", "original", "fully_shard"], world_size=[2, 3])
@on_ranks("world_size", timeout=PATIENCE)
def test_adapters_on_a_quantised_base_train_as_unsharded(kind: str, form: str, tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    if kind != "two tensors":
        pytest.importorskip(kind)
    with torch.compiler.set_stance("force_eager"):
        model, (plain, _) = sharded(kind, form), with_adapters(kind)
        assert train(model, 6) == pytest.approx(train(plain, 6), rel=1e-6)
        bases = [one.flat_param for one in fsdp.flat_param_handles(model) if one.flat_param.dtype is torch.uint8]
        assert len(bases) == 2  # one for each layer
        fsdp.save(tmp_path / "saved", model)
        again = sharded(kind, form)
        fsdp.load(tmp_path / "saved", again)
        torch.testing.assert_close(logits(again), logits(plain), rtol=1e-5, atol=1e-5)
        if not isinstance(model, FullyShardedDataParallel):
            return
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert type(state[name]) is type(value), name
            torch.testing.assert_close(plain_values(state[name]), plain_values(value), rtol=1e-5, atol=1e-5, msg=name)
        adapters = get_peft_model_state_dict(plain_of(model), state_dict=state)
        assert_close_state(adapters, get_peft_model_state_dict(plain), rtol=1e-5, atol=1e-5)
        plain_of(model).save_pretrained(tmp_path / "adapters", state_dict=state, is_main_process=dist.get_rank() == 0)
        dist.barrier()
        loaded = PeftModel.from_pretrained(quantised_base(kind)[0], tmp_path / "adapters")
        torch.testing.assert_close(logits(loaded), logits(plain), rtol=1e-5, atol=1e-5)
