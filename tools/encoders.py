"""Encoders with random weights for ``tools.measure_ranges``: ``fusion-advisor apply tools/encoders.py:bert --shapes …``.

Each function returns a model and the named inputs of one call. ``FA_TINY=1`` makes them small, to try a measurement on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_IS_TINY = os.environ.get("FA_TINY") == "1"
_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4} if _IS_TINY else {}


def bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return BERT-base and a batch of two rows, the second of which is padded: ids and mask of (2, 64)."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**_SMALL)).eval()
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    return model, {"input_ids": torch.randint(3, 200, (2, 64)), "attention_mask": mask}


def vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return ViT-B/16 and two images: pixels of (2, 3, 224, 224)."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(**_SMALL, num_labels=1000)
    return ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 224, 224)}


def whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the encoder of Whisper small and two windows of 30 s: features of (2, 80, 3000)."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    small = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    if _IS_TINY:
        small = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
    return WhisperEncoder(WhisperConfig(**small)).eval(), {"input_features": torch.randn(2, 80, 3000)}
