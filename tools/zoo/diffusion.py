"""The zoo's denoisers and decoders from diffusers: published widths, random weights, and inputs as the pipelines pass them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tools.zoo.size import TINY_LENGTH, Made, Size, optional_package


def _randn(size: Size, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=size.dtype)


def _unet(size: Size) -> Made:
    tiny = {
        "block_out_channels": (16, 32), "norm_num_groups": 4, "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }  # fmt: skip
    side, text, width = (16, 5, 32) if size.is_tiny else (64, 77, 768)
    model = optional_package("diffusers").UNet2DConditionModel(
        sample_size=side, cross_attention_dim=width, layers_per_block=size.cut(2), **tiny if size.is_tiny else {}
    )
    return model, {
        "sample": _randn(size, 2, 4, side, side),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": _randn(size, 2, text, width),
        "return_dict": False,
    }


def _decoder(size: Size) -> Made:
    widths, groups, side = ((16, 32), 4, 16) if size.is_tiny else ((128, 256, 512, 512), 32, 64)
    coder = optional_package("diffusers").AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=size.cut(2),
        norm_num_groups=groups,
        sample_size=8 * side,
    )
    return nn.Sequential(coder.post_quant_conv, coder.decoder), (_randn(size, 1, 4, side, side),)


def _dit(size: Size) -> Made:
    heads, width, side, classes = (4, 16, 8, 10) if size.is_tiny else (16, 72, 32, 1000)
    model = optional_package("diffusers").DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=width, sample_size=side, out_channels=8, num_layers=size.cut(28),
        num_embeds_ada_norm=classes,
    )  # fmt: skip
    batch = size.batch(8)
    return model, {
        "hidden_states": _randn(size, batch, 4, side, side),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.arange(batch) % classes,
        "return_dict": False,
    }


def _flux(size: Size) -> Made:
    tiny = {
        "in_channels": 16, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 32,
        "pooled_projection_dim": 32, "axes_dims_rope": (8, 12, 12),
    }  # fmt: skip
    side, text, channels, width, pooled = (6, TINY_LENGTH, 16, 32, 32) if size.is_tiny else (32, 256, 64, 4096, 768)
    model = optional_package("diffusers").FluxTransformer2DModel(
        num_layers=size.cut(19), num_single_layers=size.cut(38), guidance_embeds=True, **tiny if size.is_tiny else {}
    )
    places = torch.zeros(side, side, 3, dtype=size.dtype)
    places[..., 1], places[..., 2] = torch.arange(side)[:, None], torch.arange(side)
    return model, {
        "hidden_states": _randn(size, 1, side * side, channels),
        "encoder_hidden_states": _randn(size, 1, text, width),
        "pooled_projections": _randn(size, 1, pooled),
        "timestep": torch.tensor([0.5], dtype=size.dtype),
        "guidance": torch.tensor([3.5], dtype=size.dtype),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3, dtype=size.dtype),
        "return_dict": False,
    }


def _sd3(size: Size) -> Made:
    heads, head, side, table, text, width, pooled = (
        (4, 16, 16, 12, TINY_LENGTH, 32, 32) if size.is_tiny else (24, 64, 64, 192, 333, 4096, 2048)
    )
    model = optional_package("diffusers").SD3Transformer2DModel(
        sample_size=2 * side, num_layers=size.cut(24), attention_head_dim=head, num_attention_heads=heads,
        joint_attention_dim=width, caption_projection_dim=heads * head, pooled_projection_dim=pooled, pos_embed_max_size=table,
    )  # fmt: skip
    return model, {
        "hidden_states": _randn(size, 2, 16, side, side),
        "encoder_hidden_states": _randn(size, 2, text, width),
        "pooled_projections": _randn(size, 2, pooled),
        "timestep": torch.full((2,), 500),
        "return_dict": False,
    }


def _pixart(size: Size) -> Made:
    heads, head, side, text, width = (4, 16, 16, TINY_LENGTH, 32) if size.is_tiny else (16, 72, 64, 120, 4096)
    model = optional_package("diffusers").PixArtTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=head, cross_attention_dim=heads * head, sample_size=side,
        caption_channels=width, num_layers=size.cut(28),
    )  # fmt: skip
    mask = torch.ones(2, text, dtype=torch.int64)
    mask[1, text // 2 :] = 0
    return model, {
        "hidden_states": _randn(size, 2, 4, side, side),
        "encoder_hidden_states": _randn(size, 2, text, width),
        "timestep": torch.full((2,), 500),
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


DIFFUSION: Mapping[str, tuple[str, Callable[[Size], Made]]] = {
    "stable-diffusion-unet": ("diffusion", _unet),
    "stable-diffusion-decoder": ("diffusion", _decoder),
    "dit-xl-2": ("diffusion", _dit),
    "flux": ("diffusion", _flux),
    "sd3-medium": ("diffusion", _sd3),
    "pixart-alpha": ("diffusion", _pixart),
}
