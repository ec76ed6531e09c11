"""Checkpoints and `transformers`: its `from_pretrained` loads what is saved here, and what it saves is loaded here.

The recipe is that of docs/checkpoints.md.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, load_safetensors, module_wrap_policy
from tests._ranks import RankPool
from tests.stored import assert_equal_states
from tests.support import adamw

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (the extra `transformers`; `make test` tries to)",
)

FAMILIES = ["llama", "gpt2"]  # the second ties its head to its embedding
TOKENS = torch.arange(9)[None]


def made(family: str, seed: int = 0) -> tuple[Any, type[nn.Module]]:
    """A small language model, and the class of its layers. Imported on the ranks only, as it takes seconds."""
    import transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(seed)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=2, n_head=3)
        return transformers.GPT2LMHeadModel(config), GPT2Block
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config), LlamaDecoderLayer


def wrapped(model: nn.Module, layer: type[nn.Module], **options: Any) -> Any:
    """With a unit for each layer, and one for what is left."""
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
        auto_wrap(model, module_wrap_policy({layer}))
    return FullyShardedDataParallel(model, **options)


def sharded(family: str, **options: Any) -> Any:
    return wrapped(*made(family), **options)


def from_pretrained(family: str, folder: Path, **options: Any) -> Any:
    """As a user of `transformers` loads it, in a process that knows nothing of ranks."""
    import transformers

    kind = type(made(family)[0])
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    assert isinstance(transformers.AutoModelForCausalLM.from_pretrained(folder), kind)
    return model.eval()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_file_bytes", [None, 4000])
def test_from_pretrained_gives_the_logits_of_the_sharded_model(
    ranks: RankPool, tmp_path: Path, family: str, max_file_bytes: int | None
) -> None:
    ranks(2).run(_train_and_save, tmp_path / "run", family, max_file_bytes)
    assert (tmp_path / "run" / "model.safetensors.index.json").exists() is (max_file_bytes is not None)


def _train_and_save(folder: Path, family: str, max_file_bytes: int | None) -> None:
    model = sharded(family)
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(3))
    saved = fsdp.save(folder, model, optimizer, max_file_bytes=max_file_bytes)
    if dist.get_rank() == 0:
        model.config.save_pretrained(saved.path)
    expected, weights = logits(model), model.state_dict()
    if dist.get_rank() == 0:
        loaded = from_pretrained(family, folder)
        assert_equal_states(loaded.state_dict(), weights)
        assert torch.equal(logits(loaded), expected)
        assert not torch.equal(logits(made(family)[0]), expected)


def test_the_configuration_is_in_the_next_checkpoint_too(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_twice, tmp_path)


def _save_twice(folder: Path) -> None:
    model = sharded("gpt2", use_orig_params=True)
    optimizer = adamw(model.parameters())
    saved = fsdp.save(folder / "run", model, optimizer)
    if dist.get_rank() == 0:
        model.config.save_pretrained(saved.path)
    train(model, optimizer, range(1))
    fsdp.save(folder / "run", model, optimizer)
    expected = logits(model)
    if dist.get_rank() == 0:
        assert torch.equal(logits(from_pretrained("gpt2", folder / "run")), expected)


def test_an_export_in_16_bits(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_export, tmp_path / "run")


def _export(folder: Path) -> None:
    model = sharded("llama")
    fsdp.save(folder, model, dtype=torch.bfloat16)
    weights = model.state_dict()
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
        loaded = from_pretrained("llama", folder, dtype=torch.bfloat16)
        assert_equal_states(loaded.state_dict(), {name: value.bfloat16() for name, value in weights.items()})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_has_saved_is_loaded_and_trained(ranks: RankPool, tmp_path: Path, family: str) -> None:
    ranks(2).run(_load_pretrained, tmp_path, family)


def _load_pretrained(folder: Path, family: str) -> None:
    source, layer = made(family, seed=5)
    if dist.get_rank() == 0:
        source.save_pretrained(folder / "one")
        source.save_pretrained(folder / "several", max_shard_size=4000)
    dist.barrier()
    for name in ("one", "several"):
        config = type(source.config).from_pretrained(folder / name)
        model = wrapped(type(source)(config), layer)
        load_safetensors(model, folder / name)
        assert torch.equal(logits(model), logits(source))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    fsdp.save(folder / "run", model, optimizer)
