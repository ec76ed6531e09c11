"""The zoo: small random models of many families of `transformers`, with inputs.

`FAMILIES` has a row for each family: the classes, and the sizes in their configuration that are not those of `SMALL`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

# By the names that configurations have for them; each takes those that it knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "hidden_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 12),
    **dict.fromkeys(("projection_dim", "moe_intermediate_size", "patch_size", "head_dim", "d_kv"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "type_vocab_size"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 32),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 32),
    "image_size": 8,
    "num_channels": 3,
    "num_experts_per_tok": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
FORMS = ["flat", "orig", "rows"]  # the wrapper, `use_orig_params=True`, `fully_shard`
ROWS, LENGTH, VOCABULARY = 2, 6, 20
SPECIAL = 3  # tokens below it


@dataclass(frozen=True)
class Family:
    """Classes of one configuration.

    Args:
        heads: what their names have after the family's.
        sizes: of the configuration, besides `SMALL`; None leaves out a size of `SMALL`.
        inputs: the shapes of a row of inputs that `batch` does not know; of integers where the name says so.
        methods: of layers, besides forward, that read weights.
    """

    heads: tuple[str, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()


def _of(
    heads: str, inputs: Mapping[str, tuple[int, ...]] | None = None, methods: tuple[str, ...] = (), **sizes: Any
) -> Family:
    return Family(tuple(heads.split()), sizes, inputs or {}, methods)


LM, SEQ2SEQ = "ForCausalLM", "ForConditionalGeneration"
ENCODER = "ForMaskedLM ForSequenceClassification"
IMAGES = "ForImageClassification"
# Stages, for models whose layers are of several widths.
STAGES = {"depths": (1, 1), "hidden_sizes": (8, 12), "num_stages": 2}

# A batch norm of very few values multiplies rounding.
LARGE = {"pixel_values": (3, 32, 32)}
WAVES = {"conv_dim": (4, 4), "conv_kernel": (4, 4), "conv_stride": (4, 4)}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}

FAMILIES: dict[str, Family] = {
    # Decoders
    "Llama": _of(f"Model {LM} ForSequenceClassification ForQuestionAnswering"),
    "Mistral": _of(f"{LM} ForTokenClassification"),
    "Mixtral": _of(f"{LM}"),
    "Qwen2": _of(f"{LM}"),
    "Qwen2Moe": _of(f"{LM}", shared_expert_intermediate_size=8),
    "Qwen3": _of(f"{LM}"),
    "Qwen3Moe": _of(f"{LM}"),
    "Gemma": _of(f"{LM}"),
    "Gemma2": _of(f"{LM}"),
    "Gemma3Text": _of("Model"),
    "Phi": _of(f"{LM}"),
    "Phi3": _of(f"{LM}"),
    "Phimoe": _of(f"{LM}"),
    "GPT2": _of("Model LMHeadModel DoubleHeadsModel"),
    "GPTNeo": _of(f"{LM}", attention_types=[[["global", "local"], 1]]),
    "GPTNeoX": _of(f"{LM} ForTokenClassification"),
    "GPTJ": _of(f"{LM}", rotary_dim=2),
    "GPTBigCode": _of(f"{LM}"),
    "GptOss": _of(f"{LM}"),
    "OPT": _of(f"{LM} ForQuestionAnswering", word_embed_proj_dim=8),
    "Bloom": _of(f"{LM}"),
    "Falcon": _of(f"{LM}", new_decoder_architecture=True),
    "FalconMamba": _of(f"{LM}"),
    "FalconH1": _of(f"{LM}", mamba_d_ssm=16, mamba_n_heads=4, mamba_d_head=4, mamba_d_state=4, mamba_chunk_size=4),
    "Mamba": _of(f"{LM}"),
    "Mamba2": _of(f"{LM}", num_heads=4, head_dim=4, state_size=4, n_groups=1, chunk_size=4),
    "Jamba": _of(f"{LM}", num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=1),
    "Rwkv": _of(f"{LM}"),
    "RecurrentGemma": _of(f"{LM}", num_hidden_layers=3, lru_width=8),
    "StableLm": _of(f"{LM}"),
    "Starcoder2": _of(f"{LM}"),
    "Olmo": _of(f"{LM}"),
    "Olmo2": _of(f"{LM}"),
    "Olmoe": _of(f"{LM}"),
    "Cohere": _of(f"{LM}"),
    "Cohere2": _of(f"{LM}"),
    "Granite": _of(f"{LM}"),
    "GraniteMoe": _of(f"{LM}"),
    "CodeGen": _of(f"{LM}", n_head=4, n_embd=16, rotary_dim=2),
    "CTRL": _of("LMHeadModel", dff=12),
    "XGLM": _of(f"{LM}"),
    "BioGpt": _of(f"{LM}"),
    "Persimmon": _of(f"{LM}"),
    "Mpt": _of(f"{LM}"),
    "Glm": _of(f"{LM}"),
    "Glm4": _of(f"{LM}"),
    "Helium": _of(f"{LM}"),
    "JetMoe": _of(f"{LM}"),
    "MiniMax": _of(f"{LM}"),
    "SmolLM3": _of(f"{LM}"),
    "Exaone4": _of(f"{LM}"),
    "Ernie4_5": _of(f"{LM}"),
    "Lfm2": _of(f"{LM}"),
    "Nemotron": _of(f"{LM}", head_dim=4),
    "DeepseekV3": _of(
        f"{LM}",
        q_lora_rank=4,
        kv_lora_rank=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "DiffLlama": _of(f"{LM}"),
    "Doge": _of(f"{LM}"),
    "OpenAIGPT": _of("LMHeadModel"),
    "ImageGPT": _of("ForCausalImageModeling"),
    "XLNet": _of("LMHeadModel", d_inner=12, d_head=4, max_position_embeddings=None),
    "Reformer": _of(
        "ModelWithLMHead",
        {"input_ids": (8,)},
        ("backward_pass",),
        attn_layers=["local", "lsh"],
        axial_pos_embds_dim=(4, 4),
        axial_pos_shape=(2, 4),
        num_buckets=2,
        attention_head_size=4,
        feed_forward_size=12,
        is_decoder=True,
        hash_seed=0,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        hidden_dropout_prob=0.0,  # a layer seeds its dropout by chance
        local_attention_probs_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
    ),
    # Encoders
    "Bert": _of(f"Model {ENCODER} ForPreTraining ForQuestionAnswering"),
    "Roberta": _of(f"{ENCODER}"),
    "Albert": _of(f"{ENCODER}"),
    "DistilBert": _of(f"{ENCODER}"),
    "Electra": _of(f"{ENCODER} ForPreTraining"),
    "Deberta": _of("ForMaskedLM"),
    "DebertaV2": _of("ForMaskedLM ForTokenClassification"),
    "Camembert": _of("ForMaskedLM"),
    "XLMRoberta": _of("ForMaskedLM"),
    "XLM": _of("WithLMHeadModel", n_words=32, emb_dim=8),
    "Longformer": _of("ForMaskedLM", attention_window=4),
    "BigBird": _of("ForMaskedLM", attention_type="original_full"),
    "RemBert": _of("ForMaskedLM", input_embedding_size=8, output_embedding_size=8),
    "RoFormer": _of("ForMaskedLM"),
    "MPNet": _of("ForMaskedLM"),
    "MobileBert": _of("ForMaskedLM", intra_bottleneck_size=8, true_hidden_size=8),
    "SqueezeBert": _of("ForMaskedLM", methods=("forward",), q_groups=2, k_groups=2, v_groups=2),
    "Funnel": _of("ForMaskedLM", block_sizes=(1, 1), num_hidden_layers=None, d_head=4, d_inner=12),
    "ConvBert": _of("ForMaskedLM"),
    "FNet": _of("ForMaskedLM", tpu_short_seq_length=6),
    "IBert": _of("ForMaskedLM"),
    "LayoutLM": _of("ForMaskedLM"),
    "MegatronBert": _of("ForMaskedLM"),
    "ModernBert": _of("ForMaskedLM"),
    "Nystromformer": _of("ForMaskedLM", segment_means_seq_len=6, num_landmarks=3),
    "Canine": _of("ForSequenceClassification", num_hash_buckets=16),
    "Esm": _of("ForMaskedLM", mask_token_id=4, position_embedding_type="rotary"),
    "Ernie": _of("ForMaskedLM"),
    "Splinter": _of("ForQuestionAnswering"),
    "Yoso": _of("ForMaskedLM"),
    "Flaubert": _of("WithLMHeadModel", n_words=32, emb_dim=8),
    "RoCBert": _of(
        "ForMaskedLM", pronunciation_vocab_size=16, shape_vocab_size=16, pronunciation_embed_dim=4, shape_embed_dim=4
    ),
    "Tapas": _of("ForMaskedLM", type_vocab_sizes=[2] * 7),
    # Encoders and decoders
    "T5": _of(f"Model {SEQ2SEQ} EncoderModel"),
    "MT5": _of(f"{SEQ2SEQ}"),
    "UMT5": _of(f"{SEQ2SEQ}"),
    "LongT5": _of(f"{SEQ2SEQ}", local_radius=3),
    "SwitchTransformers": _of(f"{SEQ2SEQ}", num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    "Bart": _of(f"Model {SEQ2SEQ} ForQuestionAnswering"),
    "MBart": _of(f"{SEQ2SEQ}"),
    "Pegasus": _of(f"{SEQ2SEQ}"),
    "PegasusX": _of(f"{SEQ2SEQ}", block_size=4, num_global_tokens=2),
    "BigBirdPegasus": _of(f"{SEQ2SEQ}", attention_type="original_full"),
    "Blenderbot": _of(f"{SEQ2SEQ}"),
    "LED": _of(
        f"{SEQ2SEQ}", max_encoder_position_embeddings=32, max_decoder_position_embeddings=32, attention_window=4
    ),
    "M2M100": _of(f"{SEQ2SEQ}"),
    "Marian": _of("MTModel"),
    "NllbMoe": _of(f"{SEQ2SEQ}"),
    "PLBart": _of(f"{SEQ2SEQ}"),
    "ProphetNet": _of(
        f"{SEQ2SEQ}", num_encoder_attention_heads=2, num_decoder_attention_heads=2, num_hidden_layers=None
    ),
    # Images and videos
    "ViT": _of(f"Model {IMAGES} ForMaskedImageModeling"),
    "DeiT": _of(f"{IMAGES}"),
    "Beit": _of(f"{IMAGES}"),
    "Swin": _of(f"{IMAGES}", embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=2, patch_size=2),
    "Swinv2": _of(f"{IMAGES}", embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=2, patch_size=2),
    "ConvNext": _of(f"{IMAGES}", patch_size=2, **STAGES),
    "ConvNextV2": _of(f"{IMAGES}", patch_size=2, **STAGES),
    "ResNet": _of(f"{IMAGES}", LARGE, embedding_size=8, hidden_sizes=(8, 12), depths=(1, 1)),
    "RegNet": _of(f"{IMAGES}", LARGE, embedding_size=8, hidden_sizes=(8, 12), depths=(1, 1), groups_width=4),
    "Dinov2": _of(f"{IMAGES}"),
    "DINOv3ViT": _of("Model"),
    "Data2VecVision": _of(f"{IMAGES}"),
    "PoolFormer": _of(
        f"{IMAGES}",
        hidden_sizes=(8, 12),
        depths=(1, 1),
        num_encoder_blocks=2,
        patch_sizes=(3, 3),
        strides=(2, 2),
        padding=(1, 1),
    ),
    "Segformer": _of(
        f"{IMAGES} ForSemanticSegmentation",
        hidden_sizes=(8, 12),
        depths=(1, 1),
        num_encoder_blocks=2,
        patch_sizes=(3, 3),
        strides=(2, 2),
        num_attention_heads=(2, 2),
        sr_ratios=(1, 1),
        mlp_ratios=(1, 1),
        decoder_hidden_size=8,
    ),
    "FocalNet": _of(f"{IMAGES}", embed_dim=8, depths=(1, 1), hidden_sizes=(8, 8), patch_size=2, focal_levels=(1, 1)),
    "ViTMAE": _of("ForPreTraining", decoder_hidden_size=8, decoder_num_hidden_layers=1, decoder_num_attention_heads=2),
    "ViTMSN": _of(f"{IMAGES}"),
    "DPT": _of(
        "ForSemanticSegmentation",
        num_hidden_layers=4,
        backbone_out_indices=(0, 1, 2, 3),
        neck_hidden_sizes=4 * (8,),
        fusion_hidden_size=8,
        auxiliary_loss_weight=0.4,
    ),
    "IJepa": _of(f"{IMAGES}"),
    "Vivit": _of("ForVideoClassification", {"pixel_values": (2, 3, 8, 8)}, num_frames=2, tubelet_size=(1, 4, 4)),
    "VideoMAE": _of("ForVideoClassification", {"pixel_values": (2, 3, 8, 8)}, num_frames=2, tubelet_size=1),
    "Timesformer": _of("ForVideoClassification", {"pixel_values": (2, 3, 8, 8)}, num_frames=2),
    # Images and text
    "Siglip": _of("Model"),
    "AltCLIP": _of("Model"),
    "CLIP": _of("Model ForImageClassification"),
    "Blip": _of("Model"),
    "ChineseCLIP": _of("Model"),
    "Git": _of(f"{LM}"),
    "OwlViT": _of("Model"),
    "Owlv2": _of("Model"),
    "Vilt": _of("Model"),
    "GroupViT": _of("Model"),
    "Aimv2": _of("Model"),
    # Sound and series
    "Wav2Vec2": _of("ForCTC ForSequenceClassification", **WAVES),
    "Hubert": _of("ForCTC", **WAVES),
    "WavLM": _of("ForCTC", **WAVES),
    "UniSpeech": _of("ForCTC", **WAVES),
    "Data2VecAudio": _of("ForCTC", **WAVES, conv_pos_kernel_size=3),
    "Whisper": _of(f"{SEQ2SEQ}", {"input_features": (4, 16)}, num_mel_bins=4, max_source_positions=8),
    "Speech2Text": _of(
        f"{SEQ2SEQ}",
        {"input_features": (16, 4)},
        input_feat_per_channel=4,
        input_channels=1,
        conv_channels=8,
        conv_kernel_sizes=(3, 3),
    ),
    "AST": _of("ForAudioClassification", {"input_values": (8, 8)}, num_mel_bins=8, max_length=8, patch_size=4),
    "PatchTST": _of("ForPrediction", {"past_values": (32, 2)}, num_input_channels=2),
    "PatchTSMixer": _of("ForPrediction", {"past_values": (32, 2)}, num_input_channels=2),
}


def names() -> list[str]:
    """The classes, in the order of the table."""
    return [family + head for family, row in FAMILIES.items() for head in row.heads]


def heads() -> set[str]:
    """Classes that share their body with the first one of their family."""
    return {family + head for family, row in FAMILIES.items() for head in row.heads[1:]}


def made(name: str, seed: int = 0) -> Any:
    """A model with random weights, the same for a seed."""
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    sizes = _small(kind.config_class) | dict(_row(name).sizes)
    return kind(kind.config_class(**{key: value for key, value in sizes.items() if value is not None}))


def _row(name: str) -> Family:
    return next(row for family, row in FAMILIES.items() for head in row.heads if family + head == name)


def _small(config: Any) -> dict[str, Any]:
    known = config()
    aliases = {key for key in SMALL if key in config.attribute_map or isinstance(getattr(config, key, None), property)}
    sizes = {key: SMALL[key] for key in SMALL.keys() - aliases if isinstance(getattr(known, key, ""), (int, NoneType))}
    return sizes | {key: _small(part) for key, part in config.sub_configs.items() if part.__name__ != "AutoConfig"}


def layers(model: Any) -> list[nn.Module]:
    """What users wrap: modules of the classes that the model does not split, or those in its lists."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [each for each in model.modules() if type(each).__name__ in classes and each is not model]
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    found = found or [each for one in lists for each in one if not isinstance(each, nn.ModuleList)]
    return [each for each in found if any(True for _ in each.parameters())]


def methods(name: str) -> tuple[str, ...]:
    """The methods of layers that have to be registered."""
    return _row(name).methods


def batch(name: str, model: Any, seed: int) -> dict[str, Any]:
    """Inputs, as far as the model's forward takes them, the same for a seed."""
    torch.manual_seed(seed)
    given, config = inspect.signature(model.forward).parameters, model.config
    vision = getattr(config, "vision_config", config)
    shapes: dict[str, tuple[int, ...]] = {"input_ids": (LENGTH,), "input_values": (400,)}
    if config.is_encoder_decoder:
        shapes["decoder_input_ids"] = (LENGTH,)
    if "pixel_values" in given:
        shapes["pixel_values"] = (3, *2 * (getattr(vision, "image_size", 8),))
    shapes = {key: shape for key, shape in (shapes | dict(_row(name).inputs)).items() if key in given}
    found = {key: _drawn(key, (ROWS, *shape)) for key, shape in shapes.items()}
    if "labels" in given and name.endswith(("LM", "LMHeadModel", "LMHead", "ForConditionalGeneration")):
        found["labels"] = found["decoder_input_ids" if config.is_encoder_decoder else "input_ids"]
    return found


def _drawn(key: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(SPECIAL, VOCABULARY, shape) if "ids" in key else torch.randn(shape)


def score(outputs: Any) -> Tensor:
    """A loss in which all outputs are that have a gradient, the model's own loss included."""
    found = [each.float().square().mean() for each in _tensors(outputs) if each.requires_grad]
    return torch.stack(found).sum()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(each)
