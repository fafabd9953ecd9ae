"""The zoo's image models from timm: published widths, random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.zoo.size import Made, Size, optional_package


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """One model of timm.

    Attributes:
        model: its name there.
        family: heading in the table.
        tiny: name of a small model of the same kind.
        tiny_arguments: of that one.
        is_cut: its ``blocks`` are layers in a row, which can be cut; other models have stages.
    """

    model: str
    family: str
    tiny: str
    tiny_arguments: Mapping[str, Any] = field(default_factory=dict)
    is_cut: bool = False


_SWIN = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
_TINY_SIDE = 64

MODELS: Mapping[str, ImageModel] = {
    "timm-resnet50": ImageModel(model="resnet50", family="convolutions", tiny="test_resnet"),
    "timm-efficientnet-b0": ImageModel(model="efficientnet_b0", family="convolutions", tiny="test_efficientnet"),
    "timm-mobilenetv3-large": ImageModel(
        model="mobilenetv3_large_100", family="convolutions", tiny="mobilenetv3_small_050", tiny_arguments={"num_classes": 10}
    ),
    "timm-convnext-tiny": ImageModel(model="convnext_tiny", family="convolutions", tiny="test_convnext"),
    "timm-regnety-032": ImageModel(
        model="regnety_032", family="convolutions", tiny="regnety_002", tiny_arguments={"num_classes": 10}
    ),
    "timm-swin-tiny": ImageModel(
        model="swin_tiny_patch4_window7_224",
        family="window attention",
        tiny="swin_tiny_patch4_window7_224",
        tiny_arguments=_SWIN,
    ),
    "timm-maxvit-tiny": ImageModel(
        model="maxvit_tiny_tf_224", family="window attention", tiny="test_maxvit", tiny_arguments={"img_size": 64}
    ),
    "timm-coatnet-0": ImageModel(
        model="coatnet_0_rw_224", family="vision transformer", tiny="test_coatnet", tiny_arguments={"img_size": 64}
    ),
    "timm-vit-base": ImageModel(
        model="vit_base_patch16_224",
        family="vision transformer",
        tiny="test_vit",
        tiny_arguments={"img_size": 64},
        is_cut=True,
    ),
    "timm-mixer-b16": ImageModel(
        model="mixer_b16_224",
        family="mixer",
        tiny="mixer_s32_224",
        tiny_arguments={"img_size": 64, "mlp_ratio": (0.5, 0.5), "num_classes": 10},
        is_cut=True,
    ),
}


def _made(image: ImageModel, size: Size) -> Made:
    side, name = (_TINY_SIDE, image.tiny) if size.is_tiny else (224, image.model)
    model = optional_package("timm").create_model(name, **image.tiny_arguments if size.is_tiny else {})
    if image.is_cut:
        model.blocks = model.blocks[: size.cut(len(model.blocks))]
    return model, (torch.randn(size.batch(16), 3, side, side, dtype=size.dtype),)


IMAGES: Mapping[str, tuple[str, Callable[[Size], Made]]] = {
    name: (image.family, functools.partial(_made, image)) for name, image in MODELS.items()
}
