"""Checkpoints and `transformers`: its `from_pretrained` loads what is saved here, and what it saves is loaded here.

The recipe is that of docs/checkpoints.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import load_safetensors
from tests.helpers.equality import assert_same_state
from tests.helpers.hugging_face import FAMILIES, MODULES, from_pretrained, logits, made, sharded, wrapped
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import adamw
from tests.helpers.ranks import RankPool

pytestmark = needs("transformers")
PRELOAD = MODULES


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


@parametrize_pairs(family=FAMILIES, max_file_bytes=[None, 4000])
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
        assert_same_state(loaded.state_dict(), weights)
        assert torch.equal(logits(loaded), expected)
        assert not torch.equal(logits(made(family)[0]), expected)


@on_ranks(2)
def test_an_export_in_16_bits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = sharded("llama")
    fsdp.save(folder, model, dtype=torch.bfloat16)
    weights = model.state_dict()
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
        loaded = from_pretrained("llama", folder, dtype=torch.bfloat16)
        assert_same_state(loaded.state_dict(), {name: value.bfloat16() for name, value in weights.items()})


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_what_transformers_has_saved_is_loaded_and_trained(tmp_path: Path, family: str) -> None:
    source, layer = made(family, seed=5)
    if dist.get_rank() == 0:
        source.save_pretrained(tmp_path / "one")
        source.save_pretrained(tmp_path / "several", max_shard_size=4000)
    dist.barrier()
    for name in ("one", "several"):
        config = type(source.config).from_pretrained(tmp_path / name)
        model = wrapped(type(source)(config), layer)
        load_safetensors(model, tmp_path / name)
        assert torch.equal(logits(model), logits(source))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    fsdp.save(tmp_path / "run", model, optimizer)
