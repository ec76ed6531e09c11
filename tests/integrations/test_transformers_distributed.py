"""`transformers`' own distributed configuration, which shards while it loads, with ours for torch's `fully_shard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from tests.helpers.dtensor_twins import assert_at_rest, assert_within, local, spread_of
from tests.helpers.fsdp2_clients import installed
from tests.helpers.hugging_face import LENGTH, PATIENCE, VOCABULARY
from tests.helpers.needs import needs
from tests.helpers.ranks import RankPool

PRELOAD = ["transformers.models.llama.modeling_llama", "transformers.distributed.fsdp"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "mixed precision": {"fsdp_size": 2, "fsdp_mixed_precision": True},
    "hybrid": {"dp_replicate_size": 2, "fsdp_size": 2},
    "tensor parallel": {"fsdp_size": 2, "tp_size": 2},
}


@needs("transformers")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_pretrained_shards_as_with_torchs(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    config = LAYOUTS[layout]
    world_size = torch.Size(config.get(key, 1) for key in ("dp_replicate_size", "fsdp_size", "tp_size")).numel()
    ranks(world_size, timeout=PATIENCE).run(_train_both, tmp_path, config)


def _train_both(folder: Path, config: dict[str, Any]) -> None:
    _save_one(folder / "start", tied=False)
    expected, losses = _train(folder / "start", config)
    with installed():
        model, found = _train(folder / "start", config)
        assert isinstance(model, fsdp.FSDPModule)
        assert not isinstance(expected, fsdp.FSDPModule)
        assert_at_rest(model)
        assert found == pytest.approx(losses, rel=1e-5)
        state = model.state_dict()
        for name, value in expected.state_dict().items():
            assert spread_of(state[name]) == spread_of(value), name
            assert_within(name, local(state[name]), local(value), 1e-4)
        model.save_pretrained(folder / "end")
        dist.barrier()
        again, _ = _load(folder / "end", config)
    for name, value in again.state_dict().items():
        assert_within(name, local(value), local(state[name]))


@needs("transformers")
@pytest.mark.parametrize("layout", ["mixed precision", "tensor parallel"])
def test_a_head_that_is_tied_after_sharding_is_one_parameter(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """`from_pretrained` ties when both are sharded; torch's trains that wrongly where rows do not divide evenly."""
    config = {key: value for key, value in LAYOUTS[layout].items() if key != "fsdp_mixed_precision"}
    world_size = torch.Size(config.values()).numel()
    ranks(world_size, timeout=PATIENCE).run(_train_tied, tmp_path, config)


def _train_tied(folder: Path, config: dict[str, Any]) -> None:
    import transformers

    _save_one(folder / "start", tied=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "start")
    with installed():
        model, losses = _train(folder / "start", config)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_at_rest(model)
    rank = model._device_mesh["fsdp"].get_local_rank()
    assert losses == pytest.approx([each[rank] for each in _stepped(plain, range(config["fsdp_size"]))], rel=1e-4)


def _save_one(folder: Path, *, tied: bool) -> None:
    """Collective. A small model as `transformers` saves it."""
    import transformers

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "max_position_embeddings": 16}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()


def _load(folder: Path, config: dict[str, Any]) -> tuple[Any, Any]:
    import transformers
    from transformers.distributed import DistributedConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**config))
    return model, model._device_mesh


def _train(folder: Path, config: dict[str, Any]) -> tuple[Any, list[float]]:
    model, mesh = _load(folder, config)
    rank = mesh["fsdp"].get_local_rank()
    return model, [own for (own,) in _stepped(model, range(rank, rank + 1))]


def _stepped(model: Any, ranks: range) -> list[list[float]]:
    """Return the losses of some ranks' batches in two steps on their mean."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for step in range(2):
        losses = []
        for rank in ranks:
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
            losses.append(model(input_ids=tokens, labels=tokens).loss)
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found
