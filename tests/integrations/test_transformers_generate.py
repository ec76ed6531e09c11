"""`generate()` of `transformers` under `fsdp.resident`: the tokens of the plain model, without communication."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import fully_shard
from tests.helpers.forms import full_state
from tests.helpers.hugging_face import FORMS, MODULES, PATIENCE, VOCABULARY, made, wrapped
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.traffic import Counting, Traffic

pytestmark = needs("transformers")
PRELOAD = [
    *MODULES,
    "transformers.models.t5.modeling_t5",
    "transformers.models.whisper.modeling_whisper",
]


def small(family: str) -> tuple[Any, set[type[nn.Module]]]:
    """A model in `eval()`, and the classes of its layers."""
    import transformers

    if family in ("llama", "gpt2"):
        model, layer = made(family)
        return model.eval(), {layer}
    torch.manual_seed(0)
    if family == "t5":
        from transformers.models.t5.modeling_t5 import T5Block

        sizes = {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes)).eval(), {
            T5Block
        }
    from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer, WhisperEncoderLayer

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=12,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        num_mel_bins=4,
        max_source_positions=8,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=VOCABULARY - 1,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.max_length = None
    return model, {WhisperDecoderLayer, WhisperEncoderLayer}


def shard(model: Any, layers: set[type[nn.Module]], form: str) -> Any:
    if form == "fully_shard":
        for module in model.modules():
            if isinstance(module, tuple(layers)):
                fully_shard(module)
        return fully_shard(model)
    return fsdp.shard(model, units=layers, **FORMS[form])


def prompt_of(family: str, rank: int) -> Tensor:
    if family == "whisper":
        return torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(rank))
    return torch.arange(1, 4 + 2 * rank)[None]


@pytest.mark.parametrize(
    ("size", "family", "form"),
    [
        *[(1, "llama", "flat"), (2, "llama", "fully_shard"), (3, "gpt2", "fully_shard")],
        *[(3, "t5", "flat"), (2, "t5", "original")],
        *[(2, "whisper", "fully_shard"), (2, "whisper", "flat")],
    ],
)
@on_ranks("size", timeout=PATIENCE)
def test_ranks_generate_the_tokens_of_the_plain_model_without_messages(size: int, family: str, form: str) -> None:
    plain, layers = small(family)
    model, rank = shard(copy.deepcopy(plain), layers, form), dist.get_rank()
    prompt = prompt_of(family, rank)
    traffic, expected = Traffic(), full_state(plain)
    ways: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 10},
        {"do_sample": True, "use_cache": False},
    ]
    with fsdp.resident(model), torch.no_grad():
        for options in ways:
            options |= {"max_new_tokens": 6 - rank}  # and nothing makes a rank wait for the others
            torch.manual_seed(rank)
            with Counting(traffic):
                found = model.generate(prompt, **options)
            torch.manual_seed(rank)
            assert torch.equal(found, plain.generate(prompt, **options))
    assert (traffic.values, traffic.words) == (0, 0)
    for name, value in full_state(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_a_small_budget_keeps_the_layers_that_run_for_each_token(form: str) -> None:
    plain, layers = small("t5")
    model, rank = shard(copy.deepcopy(plain), layers, form), dist.get_rank()
    fsdp.register_fsdp_forward_method(model, "generate")  # it calls the encoder, which reads the model's embedding
    prompt = prompt_of("t5", rank)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5 - rank}
    expected = plain.generate(prompt, **options)
    budget = sum(param.nbytes for layer in plain.decoder.block for param in layer.parameters()) + 200
    names = []
    for _ in range(2):
        with fsdp.resident(model, budget_bytes=budget) as kept:
            assert torch.equal(model.generate(prompt, synced_gpus=True, **options), expected)
        names.append(kept)
    assert names[1] == ("decoder.block.1", "decoder.block.0")  # the first context has counted the runs of units
    assert names[0] != names[1]


@on_ranks(2, timeout=PATIENCE)
def test_a_model_trains_between_generations() -> None:
    plain, layer = made("llama")
    model = wrapped(copy.deepcopy(plain), layer)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    prompt = prompt_of("llama", 0)
    with fsdp.resident(model):
        for _ in range(2):
            with torch.no_grad():
                tokens = model.generate(prompt, do_sample=False, max_new_tokens=4)
                assert torch.equal(tokens, plain.generate(prompt, do_sample=False, max_new_tokens=4))
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                each(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
