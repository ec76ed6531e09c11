"""`SafetensorsSink`: files that safetensors and transformers read, written by ranges."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import fsdp
from fsdp.weights import SafetensorsSink
from tests.helpers.checkpoint_models import content, counted_writes
from tests.helpers.equality import assert_same
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.weights import MODELS, everything, tensors_of

BUCKET = 400


@parametrize_pairs(world_size=[2, 3, 1, 4], form=["flat", "rows", "last dimension", "mixed", "ignored"])
def test_files_contain_the_plain_models_weights(ranks: RankPool, tmp_path: Path, world_size: int, form: str) -> None:
    written = ranks(world_size).run(_write, tmp_path / "model", form, None)
    expected = tensors_of(everything(seed=1))
    del expected["head.weight"]  # tied
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert_same(load_file(tmp_path / "model" / "model.safetensors"), expected)
    assert sum(written) == sum(each.nbytes for each in expected.values())


def _write(folder: Path, form: str, max_file_bytes: int | None, seed: int = 1) -> int:
    with counted_writes() as sizes:
        sink = SafetensorsSink(folder, max_file_bytes=max_file_bytes)
        fsdp.stream_weights(MODELS[form](seed), sink, bucket_bytes=BUCKET, buffers=True)
    return sum(sizes)


def test_several_files_replace_one_and_other_files_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_write, tmp_path, "flat", None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".streaming-killed").mkdir()
    ranks(3).run(_write, tmp_path, "flat", 600, 2)
    names = sorted(os.listdir(tmp_path))
    assert names[0] == "config.json"
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) > 3
    assert "model.safetensors" not in names
    found = {name: value for each in tmp_path.glob("model-*") for name, value in load_file(each).items()}
    plain = everything()
    fsdp.load_safetensors(plain, tmp_path)
    assert_same(tensors_of(plain), tensors_of(everything(seed=2)))
    assert found.keys() == tensors_of(plain).keys() - {"head.weight"}


@on_ranks(2)
def test_a_checkpoint_is_not_replaced_in_part(tmp_path: Path) -> None:
    model = MODELS["flat"](1)
    fsdp.save(tmp_path / "run", model)
    with pytest.raises((OSError, RuntimeError), match=r"run is a checkpoint of fsdp\.save"):
        fsdp.stream_weights(model, SafetensorsSink(tmp_path / "run"), bucket_bytes=BUCKET)
    fsdp.load(tmp_path / "run", model)
    fsdp.stream_weights(model, SafetensorsSink(tmp_path / "other"), bucket_bytes=BUCKET)


def test_a_stream_that_fails_keeps_the_files_before(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_write, tmp_path, "flat", None)
    before = content(tmp_path)
    ranks(2).run(_fail, tmp_path)
    assert content(tmp_path) == before
    assert os.listdir(tmp_path) == ["model.safetensors"]
    ranks(2).run(_write, tmp_path, "flat", None, 2)
    assert content(tmp_path) != before


def _fail(folder: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    model, rank = MODELS["flat"](2), dist.get_rank()
    with (
        mock.patch("os.pwrite", full if rank else os.pwrite),
        pytest.raises((OSError, RuntimeError), match=r"No space left on device.*model\.safetensors"),
    ):
        fsdp.stream_weights(model, SafetensorsSink(folder), bucket_bytes=BUCKET)


def test_a_stream_that_ends_between_two_files_leaves_no_mixture(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_write, tmp_path, "flat", 600)
    ranks(2).run(_end_after_a_file, tmp_path)
    with pytest.raises(ValueError, match="pass one of them"):
        fsdp.load_safetensors(everything(), tmp_path)
    ranks(2).run(_write, tmp_path, "flat", 600, 3)
    plain = everything()
    fsdp.load_safetensors(plain, tmp_path)
    assert_same(tensors_of(plain), tensors_of(everything(seed=3)))


def _end_after_a_file(folder: Path) -> None:
    replace, left = os.replace, [None]

    def only_one(source: str, target: str) -> None:
        if not left:
            raise OSError(5, "Input/output error", target)
        left.pop()
        replace(source, target)

    with mock.patch("os.replace", only_one), pytest.raises((OSError, RuntimeError), match="Input/output error"):
        _write(folder, "flat", 600, 2)


@on_ranks(2)
def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    model, sink = MODELS["flat"](1), SafetensorsSink(tmp_path / str(dist.get_rank()))
    with pytest.raises((OSError, RuntimeError), match="use a shared file system"):
        fsdp.stream_weights(model, sink, bucket_bytes=BUCKET)
    dist.barrier()
    assert not list(tmp_path.glob("*/*"))


@needs("transformers")
def test_transformers_loads_the_files(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(2).run(_write_llama, tmp_path)[0]
    from transformers import LlamaForCausalLM

    found = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(dict(found.state_dict()), expected)


def _write_llama(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 19}
    config = LlamaConfig(hidden_size=8, intermediate_size=12, **sizes, tie_word_embeddings=True)
    plain = LlamaForCausalLM(config)
    expected = {name: value.bfloat16() for name, value in plain.state_dict().items()}
    if dist.get_rank() == 0:
        config.save_pretrained(folder)
    model = fsdp.FullyShardedDataParallel(plain, use_orig_params=True)
    sink = SafetensorsSink(folder, max_file_bytes=1500)
    fsdp.stream_weights(model, sink, bucket_bytes=1000, dtype=torch.bfloat16)
    return expected


def test_bad_sizes_are_errors() -> None:
    with pytest.raises(ValueError, match="max_file_bytes must be a positive number"):
        SafetensorsSink("somewhere", max_file_bytes=0)
