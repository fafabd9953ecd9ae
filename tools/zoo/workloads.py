"""Factories of all workloads: ``tools.zoo.workloads:gpt2`` returns the model and its inputs, as the command line takes them.

What they build is chosen by three variables of the environment, for a factory takes no arguments: ``ZOO_TINY`` (1: tiny widths),
``ZOO_LAYERS`` (at most so many; 0: all) and ``ZOO_DTYPE``. With ``ZOO_TURN`` a factory waits for its turn on the GPU (``turn``).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tools.zoo.architectures import ARCHITECTURES, LAYERS, TINY, Architecture
from tools.zoo.diffusion import DIFFUSION
from tools.zoo.images import IMAGES
from tools.zoo.plain import DiT, Llama, SelectiveScan
from tools.zoo.size import TINY_BATCH, TINY_LENGTH, Made, Size
from tools.zoo.turn import wait_for_turn

_SEED = 0
_STD = 0.02


def _llama(size: Size) -> Made:
    width, heads, vocabulary, length = (64, 4, 128, TINY_LENGTH) if size.is_tiny else (2048, 16, 32_000, 1024)
    model = Llama(width=width, heads=heads, layers=size.cut(16), vocabulary=vocabulary, length=length)
    return model, (torch.randint(0, vocabulary, (size.batch(1), length)),)


def _dit(size: Size) -> Made:
    width, heads, side, batch = (64, 4, 8, TINY_BATCH) if size.is_tiny else (1152, 16, 64, 4)
    model = DiT(width=width, heads=heads, layers=size.cut(28), side=side)
    return model, (torch.randn(batch, 4, side, side, dtype=size.dtype), torch.arange(batch))


def _scan(size: Size) -> Made:
    width, steps = (32, 8) if size.is_tiny else (768, 128)
    model = SelectiveScan(width=width, states=16, layers=size.cut(4), steps=steps)
    return model, (torch.randn(TINY_BATCH, steps, width, dtype=size.dtype),)


PLAIN: Mapping[str, tuple[str, Callable[[Size], Made]]] = {
    "llama-by-hand": ("plain PyTorch", _llama),
    "dit-by-hand": ("plain PyTorch", _dit),
    "selective-scan-by-hand": ("plain PyTorch", _scan),
}
BUILT = {**PLAIN, **DIFFUSION, **IMAGES}
NAMES = (*ARCHITECTURES, *BUILT)


def family_of(name: str) -> str:
    """Return the heading that a workload stands under."""
    return BUILT[name][0] if name in BUILT else ARCHITECTURES[name].family


def attribute_of(name: str) -> str:
    """Return a workload's factory as a Python name."""
    return name.replace("-", "_")


def make(name: str, size: Size | None = None) -> Made:
    """Build a workload on the CPU, with seeded random weights.

    Args:
        name: one of :data:`NAMES`.
        size: None: that of the environment.
    """
    size = size or Size.of_environment()
    torch.manual_seed(_SEED)
    model, inputs = BUILT[name][1](size) if name in BUILT else _of_transformers(ARCHITECTURES[name], size)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of ones and zeros would hide what is left out
            parameter.add_(torch.randn_like(parameter) * _STD)
    return model.eval().to(size.dtype), inputs


def __getattr__(attribute: str) -> Callable[[], Made]:
    """Return a workload's factory."""
    for name in NAMES:
        if attribute_of(name) == attribute:
            return functools.partial(_made_in_turn, name)
    raise AttributeError(attribute)


def _made_in_turn(name: str) -> Made:
    made = make(name)
    wait_for_turn(os.environ)
    return made


def _of_transformers(architecture: Architecture, size: Size) -> Made:
    import transformers

    config = _config(architecture, size)
    model = getattr(transformers, architecture.model).from_config(config)
    if architecture.part:
        model = getattr(model, architecture.part)
    return model, _inputs(architecture, config, model, size)


def _config(architecture: Architecture, size: Size) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(architecture.kind, **architecture.fields)
    if size.is_tiny:
        config = AutoConfig.for_model(architecture.kind, **_tiny_fields(config.to_dict(), architecture))
    for part in (config, *(getattr(config, key, None) for key in ("text_config", "vision_config"))):
        for key in LAYERS:
            if isinstance(count := getattr(part, "__dict__", {}).get(key), int):  # no alias: ConvNeXt's counts stages
                setattr(part, key, size.cut(count))
        if isinstance(kinds := getattr(part, "__dict__", {}).get("layer_types"), list):
            part.layer_types = kinds[: part.num_hidden_layers]
    return config


def _tiny_fields(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return a configuration's fields with tiny sizes; those that follow from others are left to it."""
    kept = {key: value for key, value in config.items() if key in architecture.fields and key not in TINY}
    small = {key: TINY[key] for key, value in config.items() if key in TINY and value is not None}
    layers = {key: 2 for key in LAYERS if isinstance(config.get(key), int)}
    nested = {
        key: {field: TINY[field] for field, value in config[key].items() if field in TINY and value is not None}
        | {field: 2 for field in LAYERS if isinstance(config[key].get(field), int)}
        for key in ("text_config", "vision_config") if isinstance(config.get(key), dict)
    }  # fmt: skip
    return {**kept, **small, **layers, **nested, **architecture.tiny}


def _inputs(architecture: Architecture, config: Any, model: nn.Module, size: Size) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    batch = size.batch(architecture.batch)
    length = min(architecture.length, TINY_LENGTH) if size.is_tiny else architecture.length
    side = architecture.tiny_image if size.is_tiny else architecture.image
    inputs: dict[str, Any] = {}
    if "pixel_values" in names:
        inputs["pixel_values"] = torch.randn(batch, 3, side, side, dtype=size.dtype)
    if "past_values" in names:
        inputs["past_values"] = torch.randn(batch, config.context_length, config.num_input_channels, dtype=size.dtype)
    if "input_features" in names:
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.randn(batch, config.num_mel_bins, frames, dtype=size.dtype)
    if "input_values" in names:
        inputs["input_values"] = torch.randn(batch, 4000 if size.is_tiny else length, dtype=size.dtype)
    if "input_ids" in names:
        vocabulary = getattr(config, "vocab_size", None) or config.text_config.vocab_size
        inputs["input_ids"] = torch.randint(3, vocabulary, (batch, length))
    if "decoder_input_ids" in names and architecture.family == "encoder-decoder":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if "use_cache" in names and hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return inputs
