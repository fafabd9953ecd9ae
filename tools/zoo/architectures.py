"""The zoo's architectures from transformers: what stands here differs from the defaults of each configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Fields that count layers; an option of the zoo cuts those that a configuration has."""
TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model", "word_embed_proj_dim", "projection_dim"), 64),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar", "num_mel_bins", "state_size", "time_step_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    "vocab_size": 128, "image_size": 32, "patch_size": 8, "max_source_positions": 20, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
"""What a tiny workload has in place of a real one's sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of transformers.

    Attributes:
        kind: of the configuration, as transformers names it.
        family: heading in the table.
        model: the auto class that builds it.
        batch: of the real workload.
        length: tokens, or frames of sound; 0 where there are none.
        image: pixels of a side; 0 where there is no image.
        fields: of the configuration, where the defaults are no published model's.
        tiny: further fields of the tiny workload.
        tiny_image: pixels of a side there.
        part: attribute of the model that is run in its place (``encoder``).
    """

    kind: str
    family: str
    model: str = "AutoModel"
    batch: int = 1
    length: int = 0
    image: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    tiny_image: int = 32
    part: str = ""


_LM = "AutoModelForCausalLM"
_MASKED = "AutoModelForMaskedLM"
_IMAGES = "AutoModelForImageClassification"
_WINDOWS = {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4, "image_size": 64}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 24, 24], "embedding_size": 16}


def _decoder(kind: str, family: str = "decoder", *, tiny: Mapping[str, Any] | None = None, **fields: Any) -> Architecture:
    return Architecture(kind=kind, family=family, model=_LM, length=1024, fields=fields, tiny=tiny or {})


def _encoder(kind: str, *, tiny: Mapping[str, Any] | None = None, **fields: Any) -> Architecture:
    return Architecture(kind=kind, family="encoder", model=_MASKED, batch=16, length=256, fields=fields, tiny=tiny or {})


def _vision(kind: str, family: str, *, model: str = _IMAGES, image: int = 224, batch: int = 16, **more: Any) -> Architecture:
    return Architecture(kind=kind, family=family, model=model, image=image, batch=batch, **more)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _decoder("llama", hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8),
    "mistral": _decoder("mistral", sliding_window=512),
    "qwen2": _decoder("qwen2", hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2),
    "qwen3": _decoder("qwen3", hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8),
    "gemma2": _decoder("gemma2"),
    "gemma3": _decoder("gemma3_text", hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1),
    "phi-parallel-residual": _decoder("phi"),
    "phi3-packed-projections": _decoder("phi3", hidden_size=3072, intermediate_size=8192),
    "gpt-neox-parallel-residual": _decoder("gpt_neox", hidden_size=2048, intermediate_size=8192, num_attention_heads=16),
    "falcon": _decoder("falcon", hidden_size=2048, num_attention_heads=32),
    "gpt2": _decoder("gpt2"),
    "opt": _decoder("opt", hidden_size=2048, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048),
    "bloom-alibi": _decoder("bloom", hidden_size=1024, n_head=16),
    "olmo2": _decoder("olmo2", hidden_size=2048, intermediate_size=8192, num_attention_heads=16),
    "stablelm": _decoder("stablelm"),
    "starcoder2": _decoder("starcoder2", hidden_size=3072, num_attention_heads=24),
    "cohere": _decoder("cohere", hidden_size=2048, intermediate_size=8192, num_attention_heads=16, vocab_size=64_000),
    "granite-scaled": _decoder("granite", hidden_size=2048, intermediate_size=8192, num_attention_heads=32),
    "mixtral": _decoder("mixtral", "mixture of experts", hidden_size=1024, intermediate_size=3584, num_attention_heads=16),
    "olmoe": _decoder("olmoe", "mixture of experts", hidden_size=2048, intermediate_size=1024),
    "qwen3-moe": _decoder(
        "qwen3_moe", "mixture of experts", hidden_size=2048, moe_intermediate_size=768, num_experts=32, num_attention_heads=32
    ),
    "mamba": _decoder("mamba", "state space", hidden_size=768),
    "bert": _encoder("bert"),
    "roberta": _encoder("roberta"),
    "deberta-v3-disentangled": _encoder(
        "deberta-v2",
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        vocab_size=128_100,
    ),
    "modernbert-rotary": _encoder("modernbert", tiny={"global_attn_every_n_layers": 2}),
    "distilbert": _encoder("distilbert"),
    "albert": _encoder("albert", hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    "electra": _encoder("electra", hidden_size=768, intermediate_size=3072, num_attention_heads=12),
    "t5-relative": Architecture(kind="t5", family="encoder-decoder", model="AutoModelForSeq2SeqLM", batch=8, length=256),
    "bart": Architecture(kind="bart", family="encoder-decoder", model="AutoModelForSeq2SeqLM", batch=8, length=256),
    "whisper-encoder": Architecture(
        kind="whisper",
        family="speech",
        batch=8,
        length=3000,
        part="encoder",
        fields={
            "d_model": 1024,
            "encoder_ffn_dim": 4096,
            "encoder_attention_heads": 16,
            "decoder_layers": 2,
            "decoder_attention_heads": 16,
        },
    ),
    "wav2vec2": Architecture(
        kind="wav2vec2",
        family="speech",
        batch=8,
        length=48_000,
        tiny={
            "conv_dim": [32] * 3,
            "conv_stride": [5, 4, 4],
            "conv_kernel": [10, 8, 4],
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    "clip": Architecture(kind="clip", family="text and images", batch=16, length=64, image=224),
    "siglip": Architecture(kind="siglip", family="text and images", batch=16, length=64, image=224),
    "vit": _vision("vit", "vision transformer"),
    "dinov2-layer-scale": _vision("dinov2", "vision transformer"),
    "beit-relative": _vision("beit", "vision transformer", fields={"use_relative_position_bias": True}),
    "swin-windows": _vision(
        "swin",
        "window attention",
        tiny_image=64,
        tiny=_WINDOWS,
    ),
    "swinv2-windows": _vision(
        "swinv2",
        "window attention",
        image=256,
        fields={"image_size": 256, "window_size": 8},
        tiny_image=64,
        tiny=_WINDOWS,
    ),
    "convnext": _vision("convnext", "convolutions", tiny_image=64, tiny=_STAGES),
    "resnet": _vision("resnet", "convolutions", tiny_image=64, tiny=_STAGES | {"layer_type": "bottleneck"}),
    "regnet": _vision("regnet", "convolutions", tiny_image=64, tiny=_STAGES | {"groups_width": 8}),
    "efficientnet": _vision(
        "efficientnet",
        "convolutions",
        tiny_image=64,
        tiny={
            "width_coefficient": 0.5,
            "depth_coefficient": 0.5,
            "hidden_dim": 640,
            "image_size": 64,
        },
        fields={"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 224},
    ),
    "mobilenet-v2": _vision("mobilenet_v2", "convolutions", tiny_image=64, tiny={"image_size": 64, "depth_multiplier": 0.5}),
    "mobilevit": _vision(
        "mobilevit",
        "convolutions",
        image=256,
        batch=16,
        tiny_image=64,
        tiny={
            "hidden_sizes": [32, 32, 32],
            "neck_hidden_sizes": [8, 16, 16, 24, 24, 32, 32],
            "image_size": 64,
            "intermediate_size": 64,
            "patch_size": 2,
            "num_attention_heads": 4,
        },
    ),
    "poolformer": _vision(
        "poolformer",
        "convolutions",
        tiny_image=64,
        tiny={
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 16, 24, 24],
            "patch_sizes": [7, 3, 3, 3],
            "image_size": 64,
        },
    ),
    "segformer-b2": _vision(
        "segformer",
        "segmentation",
        model="AutoModelForSemanticSegmentation",
        image=512,
        batch=4,
        fields={"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768},
        tiny_image=64,
        tiny={
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 16, 32, 32],
            "decoder_hidden_size": 32,
            "num_attention_heads": [1, 2, 2, 4],
            "image_size": 64,
            "patch_sizes": [7, 3, 3, 3],
        },
    ),
    "patchtst": Architecture(
        kind="patchtst",
        family="time series",
        batch=64,
        length=512,
        fields={
            "num_input_channels": 7,
            "context_length": 512,
            "patch_length": 16,
            "patch_stride": 8,
            "d_model": 512,
            "ffn_dim": 2048,
        },
        tiny={"context_length": 64, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2},
    ),
}
