"""`transformers` models from files to files, by a recipe of docs/hugging_face.md: sharded they do as plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import MixedPrecision, fully_shard, register_fsdp_forward_method
from tests.helpers.equality import assert_same_state
from tests.helpers.hugging_face import (
    FAMILIES,
    FORMS,
    MODULES,
    PATIENCE,
    from_pretrained,
    logits,
    made,
    plain_of,
    recipe,
    rows,
    sharded,
    whole_state,
    wrapped,
)
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

pytestmark = needs("transformers")
PRELOAD = MODULES


def from_files(family: str, form: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Collective. A model that `save_pretrained` has saved, loaded by the recipe; and the same one plain."""
    source, layer = made(family, seed=3)
    if dist.get_rank() == 0:
        source.save_pretrained(folder)
    dist.barrier()
    if form != "fully_shard":
        return recipe("finetune").load(folder, layer, **FORMS[form], **options), source
    with torch.device("meta"):
        model = type(source)(type(source.config).from_pretrained(folder))
    for module in model.modules():
        if isinstance(module, layer):
            fully_shard(module)
    fully_shard(model)
    fsdp.load_safetensors(model, folder)
    fsdp.materialize(model, param_init_fn=model._init_weights)
    return model, source


# From files, and to files


@pytest.mark.parametrize(
    ("size", "family", "form"),
    [(2, "llama", "flat"), (3, "llama", "original"), (3, "gpt2", "flat"), (2, "gpt2", "fully_shard")],
)
@on_ranks("size", timeout=PATIENCE)
def test_a_model_from_files_computes_and_trains_as_the_plain_one(tmp_path: Path, family: str, form: str) -> None:
    model, plain = from_files(family, form, tmp_path / "source")
    assert torch.equal(logits(model), logits(plain))
    buffers = dict(plain_of(model).named_buffers())
    assert bool(buffers) is (family == "llama")  # the tables of its rotary embedding, which are in no file
    assert all(torch.equal(value, expected) for value, expected in zip(buffers.values(), plain.buffers(), strict=True))
    plain_of(model).activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    batches = _batches(dist.get_rank())
    if form == "fully_shard":
        losses = _train_without_wrapper(model, optimizer, batches)
    else:
        losses = list(recipe("finetune").train(model, optimizer, batches, max_norm=0.2))
    expected = _train_plain(plain)
    for loss in losses:
        dist.all_reduce(loss)
    torch.testing.assert_close(torch.stack(losses) / dist.get_world_size(), torch.stack(expected))
    found = whole_state(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    recipe("finetune").save(model, tmp_path / "saved", optimizer)
    if dist.get_rank() == 0:
        assert_same_state(from_pretrained(family, tmp_path / "saved").state_dict(), found)


@pytest.mark.parametrize("form", ["flat", "original"])
@on_ranks(2, timeout=PATIENCE)
def test_a_folder_in_bfloat16_is_trained_in_float32(tmp_path: Path, form: str) -> None:
    source, layer = made("llama", seed=3)
    if dist.get_rank() == 0:
        source.bfloat16().save_pretrained(tmp_path / "source")
    dist.barrier()
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    model = recipe("finetune").load(tmp_path / "source", layer, **FORMS[form], mixed_precision=policy)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model).float(), logits(source.bfloat16()).float())
    before = whole_state(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # steps that weights of 1 lose in 16 bits
    list(recipe("finetune").train(model, optimizer, _batches(dist.get_rank())))
    assert not [name for name, value in whole_state(model).items() if torch.equal(value, before[name])]
    recipe("finetune").save(model, tmp_path / "saved")
    assert from_pretrained("llama", tmp_path / "saved").dtype is torch.float32


@on_ranks(2, timeout=PATIENCE)
def test_a_folder_with_other_names_than_the_model_is_converted(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    source = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=16, **sizes))
    if dist.get_rank() == 0:
        source.save_pretrained(tmp_path / "downloaded")
        read = GPTNeoXForCausalLM.from_pretrained(tmp_path / "downloaded", dtype="auto")
        read.save_pretrained(tmp_path / "converted", save_original_format=False)
    dist.barrier()
    plain = GPTNeoXForCausalLM(source.config)
    model = fsdp.shard(plain, units=plain.gpt_neox.layers)
    with pytest.raises(RuntimeError, match=r"(?s)missing: lm_head.weight.*unexpected: embed_out.weight"):
        fsdp.load_safetensors(model, tmp_path / "downloaded")
    fsdp.load_safetensors(model, tmp_path / "converted")
    assert_same_state(whole_state(model), source.state_dict())
    fsdp.save(tmp_path / "saved", model)
    if dist.get_rank() == 0:
        source.config.save_pretrained(tmp_path / "saved")
    dist.barrier()
    assert_same_state(GPTNeoXForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), source.state_dict())


def _batches(rank: int) -> list[dict[str, Tensor]]:
    tokens = torch.stack([row["input_ids"] for row in rows(6, seed=rank)])
    return [{"input_ids": part, "labels": part} for part in tokens.split(2)]


def _train_plain(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for turns in zip(*map(_batches, range(dist.get_world_size())), strict=True):
        tokens = torch.cat([batch["input_ids"] for batch in turns])
        losses += _train_without_wrapper(model, optimizer, [{"input_ids": tokens, "labels": tokens}])
    return losses


def _train_without_wrapper(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> Any:
    model.train()
    losses = []
    for batch in batches:
        losses.append(model(**batch).loss)
        losses[-1].backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_a_gathered_state_is_saved_by_save_pretrained(tmp_path: Path, form: str) -> None:
    model = sharded("gpt2", form)
    state, expected = whole_state(model), logits(model)
    if dist.get_rank() == 0:
        plain_of(model).save_pretrained(tmp_path, state_dict=state)
        assert torch.equal(logits(from_pretrained("gpt2", tmp_path)), expected)


def test_the_initialisation_of_transformers_gives_values_from_nothing(ranks: RankPool) -> None:
    found = [ranks(size, timeout=PATIENCE).run(_initialise)[0] for size in (1, 2)]
    assert_same_state(*found)  # type: ignore[arg-type]


def _initialise() -> dict[str, Tensor]:
    import transformers

    plain, layer = made("llama")
    with torch.device("meta"):
        model = wrapped(transformers.LlamaForCausalLM(plain.config), layer)
    fsdp.materialize(model, param_init_fn=plain_of(model)._init_weights, seed=0)
    state = model.state_dict()
    assert all(torch.equal(*pair) for pair in zip(plain_of(model).buffers(), plain.buffers(), strict=True))
    for name, value in plain.state_dict().items():
        assert float(state[name].std()) == pytest.approx(float(value.std()), rel=0.2, abs=1e-6), name
        assert float(state[name].mean()) == pytest.approx(float(value.mean()), abs=0.01), name
    return {name: value.clone() for name, value in state.items()}


@on_ranks(2, timeout=PATIENCE)
def test_initialising_by_apply_draws_what_the_plain_model_draws() -> None:
    model, plain = sharded("gpt2"), made("gpt2", seed=1)[0]
    for one in (model, plain):
        torch.manual_seed(2)
        one.apply(plain._init_weights)
    assert_same_state(model.state_dict(), plain.state_dict())


# Generating


@pytest.mark.parametrize(("size", "family", "form"), [(3, "llama", "original"), (2, "gpt2", "fully_shard")])
@on_ranks("size", timeout=PATIENCE)
def test_prompts_of_any_length_are_continued_as_by_the_plain_model(tmp_path: Path, family: str, form: str) -> None:
    model, plain = from_files(family, form, tmp_path)
    rank = dist.get_rank()
    prompt = torch.arange(3 + 2 * rank)[None]
    ways: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 10},
        {"do_sample": True, "use_cache": False},
        {"do_sample": False, "num_beams": 3},
    ]
    for options in ways:
        # The ranks finish one after the other.
        options |= {"max_new_tokens": 6 - rank}
        torch.manual_seed(rank)
        found = recipe("finetune").generate(model, prompt, **options)
        torch.manual_seed(rank)
        assert torch.equal(found, plain.eval().generate(prompt, **options))
    assert found.shape[1] == 9 + rank


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_a_rank_that_meets_the_end_serves_the_others(form: str) -> None:
    model, plain = sharded("llama", form), made("llama")[0].eval()
    prompt = torch.arange(4)[None]
    ahead = plain.generate(prompt, do_sample=False, max_new_tokens=8)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 28}
    if dist.get_rank() == 1:
        options["eos_token_id"] = int(ahead[0, 5])
    expected = plain.generate(prompt, **options)
    assert (expected.shape[1] < 12) is (dist.get_rank() == 1)
    assert torch.equal(recipe("finetune").generate(model, prompt, **options), expected)


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_an_encoder_and_a_decoder_generate_when_the_method_is_registered(form: str) -> None:
    import transformers
    from transformers.models.t5.modeling_t5 import T5Block

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=29, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3, decoder_start_token_id=0
    )
    plain = transformers.T5ForConditionalGeneration(config).eval()
    prompt = torch.arange(3 + dist.get_rank())[None]
    expected = plain.generate(prompt, do_sample=False, max_new_tokens=4)
    model: Any = plain
    if form == "fully_shard":
        for module in plain.modules():
            if isinstance(module, T5Block):
                fully_shard(module)
        fully_shard(plain)
    else:
        model = wrapped(plain, T5Block, **FORMS[form])
    register_fsdp_forward_method(model, "generate")  # it calls the encoder, which reads the model's embedding
    assert torch.equal(recipe("finetune").generate(model, prompt, do_sample=False, max_new_tokens=4), expected)


# Precision


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, timeout=PATIENCE)
def test_mixed_precision_spares_the_tables_of_rotary_embeddings(tmp_path: Path, form: str) -> None:
    model, plain = from_files("llama", form, tmp_path, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    for param in plain.parameters():
        param.data = param.data.bfloat16()
    assert all(buffer.dtype is torch.float32 for buffer in plain_of(model).buffers())
    found = logits(model)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, logits(plain))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    prompt = torch.arange(4)[None]
    assert torch.equal(recipe("finetune").generate(model, prompt, **options), plain.generate(prompt, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = list(recipe("finetune").train(model, optimizer, 3 * _batches(0)[:1]))
    assert losses[-1] < losses[0]


# What a sharded model says of itself


@pytest.mark.parametrize("form", [*FORMS, "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_dtype_device_and_embeddings_are_there(form: str) -> None:
    model, plain = sharded("llama", form), made("llama")[0]
    for one in (model, plain_of(model), plain_of(model).base_model):
        assert one.dtype is torch.float32
        assert one.device == torch.device("cpu")
        assert one.get_input_embeddings().weight.shape == plain.get_input_embeddings().weight.shape
    count = plain.num_parameters()
    assert model.num_parameters() < (1.01 * count / 2 if form != "fully_shard" else 1e9)


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2, timeout=PATIENCE)
def test_in_one_unit_a_part_has_parameters_only_in_their_original_form(family: str) -> None:
    flat, original = (fsdp.FullyShardedDataParallel(made(family)[0], use_orig_params=on) for on in (False, True))
    assert flat.dtype is torch.float32
    with pytest.raises(StopIteration):
        _ = plain_of(flat).base_model.dtype
    assert plain_of(original).base_model.dtype is torch.float32
    assert torch.equal(logits(flat), logits(original))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, timeout=PATIENCE)
def test_what_needs_whole_weights_says_so(tmp_path: Path, form: str) -> None:
    plain = plain_of(sharded("llama", form))
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight is sharded"):
        plain.resize_token_embeddings(31)
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of a LlamaForCausalLM inside"):
        plain.save_pretrained(tmp_path)
