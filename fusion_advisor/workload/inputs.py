"""Example inputs made from a configuration: seeded, and the same bytes on every device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fusion_advisor.errors import NoExampleInputs, SequenceTooLong, UsageError
from fusion_advisor.records import TensorMeta
from fusion_advisor.runtime.call_tensors import tensors_in
from fusion_advisor.workload.architecture import max_positions
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.static_cache import cache_name, filled_cache

_LONG_TOKENS = 512
_SHORT_TOKENS = 128
_IMAGE_SIZE = 224
_MASKED, _IGNORED = 0.15, -100
"""Share of tokens that a masked LM predicts, as BERT was trained, and the label of all others."""
NEW_TOKENS = 32
"""Tokens that ``generate`` makes by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """Arguments of one step; those that are made here have names."""

    kwargs: dict[str, Any]
    args: tuple[Any, ...] = ()
    seq_len: int
    """Tokens, or the image's edge where there are no tokens."""
    context: int = 0
    """Tokens that the cache among ``kwargs`` holds."""
    notes: tuple[str, ...] = ()


def make_inputs(model: nn.Module, request: WorkloadRequest, *, device: torch.device, dtype: torch.dtype) -> ExampleInputs:
    """Make the inputs of one step.

    Causal LMs get ``input_ids`` and ``use_cache=False``; for phase ``prefill`` also ``logits_to_keep=1``, where the model has it;
    for phase ``train`` ``labels``, with which the model computes its own loss, as masked LMs and image classifiers do;
    for phase ``decode`` one token, and a static cache that a prefill of ``context`` tokens has filled.
    Encoder-decoders get both sides at the same length (Whisper: 30 s of audio features). Encoders get ``input_ids`` only, as
    users of one unpadded batch pass them. Default lengths are 512 tokens for causal LMs on a GPU and 128 for the rest, or the
    model's maximum where that is less: on two CPU cores a step of GPT-2 at 512 leaves time for too few rounds to tell a gain
    from the noise.

    Raises:
        SequenceTooLong: the model has fewer positions.
        NoStaticCache: a decode step is wanted of a model without such a cache.
        UsageError: an option that this model has no use for.
        NoExampleInputs: the model wants an input that is not known here.
    """
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    # Drawn on the CPU, because a generator's stream differs between devices.
    generator = torch.Generator().manual_seed(request.seed)
    wanted = getattr(model, "main_input_name", "input_ids")
    # BERT's body takes `use_cache` too: what can generate is a language model, whatever its forward accepts.
    is_causal = not config.is_encoder_decoder and bool(getattr(model, "can_generate", lambda: False)())
    if request.phase not in ("forward", "train") and not is_causal:
        detail = f"--phase {request.phase} needs a causal language model; `{request.model_id}` is a {type(model).__name__}"
        raise UsageError(detail=detail, help="leave --phase out")
    if request.phase == "decode":
        return _decode_inputs(model, request, generator, device)

    # A two-tower model (CLIP) names either tower as its main input and needs both; a generator reads text without an image.
    has_image = wanted == "pixel_values" or (
        hasattr(config, "vision_config") and "pixel_values" in parameters and not is_causal and not config.is_encoder_decoder
    )
    kwargs: dict[str, Any] = {}
    if has_image:
        kwargs["pixel_values"] = _pixels(config, request.batch, generator)
        if "input_ids" not in parameters:
            kwargs.update(_labels(model, request, kwargs, generator))
            return ExampleInputs(kwargs=_placed(kwargs, device, dtype), seq_len=_edge(kwargs["pixel_values"], request))
    elif wanted == "input_features" and hasattr(config, "max_source_positions"):
        # Whisper's encoder halves the frames and takes no other number of them.
        frames = 2 * config.max_source_positions
        kwargs["input_features"] = torch.randn(request.batch, config.num_mel_bins, frames, generator=generator)
    elif wanted != "input_ids":
        raise NoExampleInputs(model_id=request.model_id, class_name=type(model).__name__, wanted=wanted)

    seq_len = _sequence_length(config, request, is_long=is_causal and device.type == "cuda")
    seq_len = _prompt_length(config, request, seq_len) if request.phase == "generate" else seq_len
    kwargs.update(_text_inputs(config, request, seq_len, generator, has_audio="input_features" in kwargs, has_image=has_image))
    if "use_cache" in parameters and (is_causal or config.is_encoder_decoder):
        kwargs["use_cache"] = False
    kwargs.update(_labels(model, request, kwargs, generator))
    notes: tuple[str, ...] = ()
    if request.phase == "prefill":
        if "logits_to_keep" in parameters:
            kwargs["logits_to_keep"] = 1
        else:
            notes = (f"{type(model).__name__} has no logits_to_keep: prefill computes the logits of every token",)
    return ExampleInputs(kwargs=_placed(kwargs, device, dtype), seq_len=seq_len, notes=notes)


def _labels(
    model: nn.Module, request: WorkloadRequest, kwargs: dict[str, Any], generator: torch.Generator
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Make what a training step predicts, where the model computes a loss of it: it is drawn after all inputs."""
    if request.phase != "train" or "labels" not in inspect.signature(model.forward).parameters:
        return {}
    kind, config = type(model).__name__, cast("Any", model.config)
    if kind.endswith("ForImageClassification"):
        return {"labels": torch.randint(config.num_labels, (request.batch,), generator=generator)}
    if config.is_encoder_decoder or "input_ids" not in kwargs:
        return {}
    ids = kwargs["input_ids"]
    if kind.endswith("ForMaskedLM"):
        asked = torch.rand(ids.shape, generator=generator) < _MASKED
        asked[:, 0] = True
        return {"labels": torch.where(asked, ids, _IGNORED)}
    return {"labels": ids.clone()} if bool(getattr(model, "can_generate", lambda: False)()) else {}


def _edge(pixels: torch.Tensor, request: WorkloadRequest) -> int:
    """Return the height of images, which stands for the length of a sequence.

    Raises:
        UsageError: a length was asked for.
    """
    edge = int(pixels.shape[-1])
    if request.seq_len is not None:
        detail = f"--seq-len: `{request.model_id}` takes images, its size is set by its configuration ({edge})"
        raise UsageError(detail=detail, help="leave --seq-len out")
    return edge


def _text_inputs(
    config: Any, request: WorkloadRequest, seq_len: int, generator: torch.Generator, *, has_audio: bool, has_image: bool
) -> dict[str, Any]:
    """Draw the tokens of a model's encoder (or only part) and of its decoder."""
    made: dict[str, Any] = {}
    text = getattr(config, "text_config", None) or config
    if not has_audio:
        made["input_ids"] = _tokens(text, request.batch, seq_len, generator)
        if has_image and isinstance(getattr(text, "eos_token_id", None), int):
            # CLIP and its kin pool the text at the end-of-text token.
            made["input_ids"][:, -1] = text.eos_token_id
    if config.is_encoder_decoder:
        made["decoder_input_ids"] = _tokens(text, request.batch, seq_len, generator)
    return made


def _decode_inputs(model: nn.Module, request: WorkloadRequest, generator: torch.Generator, device: torch.device) -> ExampleInputs:
    config: Any = model.config
    maximum = max_positions(config)
    context = request.context or min(_LONG_TOKENS, (maximum or _LONG_TOKENS + 1) - 1)
    if maximum is not None and context >= maximum:
        raise SequenceTooLong(option="--context", seq_len=context, maximum=maximum, most=maximum - 1, model_id=request.model_id)
    text = getattr(config, "text_config", None) or config
    ids = _tokens(text, request.batch, context + 1, generator).to(device)
    cache, room = filled_cache(model, ids[:, :-1], maximum=maximum, phase=request.phase, model_id=request.model_id)
    kwargs = {"input_ids": ids[:, -1:].clone(), cache_name(model): cache, "use_cache": True}
    notes = (f"the static cache holds {context} tokens and has room for {room}; each step writes the next position again",)
    return ExampleInputs(kwargs=kwargs, seq_len=1, context=context, notes=notes)


def input_metas(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, TensorMeta], ...]:
    """Describe every tensor among the arguments: nested ones are ``cache.layers.0.keys``, positional ones named as in forward."""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        names = []
    positional = [(names[position] if position < len(names) else f"arg{position}", value) for position, value in enumerate(args)]
    return tuple(
        (found, _describe(tensor)) for name, value in (*positional, *kwargs.items()) for found, tensor in tensors_in(name, value)
    )


def move(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a (nested) value with its tensors on ``device``, floating-point ones in ``dtype`` if one is given."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {name: move(item, device, dtype) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move(item, device, dtype) for item in value)
    return value


def _sequence_length(config: Any, request: WorkloadRequest, *, is_long: bool) -> int:
    maximum = max_positions(config)
    if request.seq_len is None:
        default = _LONG_TOKENS if is_long else _SHORT_TOKENS
        return min(default, maximum) if maximum is not None else default
    if maximum is not None and request.seq_len > maximum:
        raise SequenceTooLong(
            option="--seq-len", seq_len=request.seq_len, maximum=maximum, most=maximum, model_id=request.model_id
        )
    return request.seq_len


def _prompt_length(config: Any, request: WorkloadRequest, seq_len: int) -> int:
    """Leave room for the new tokens: a default length gives way, one that was asked for does not."""
    maximum, new_tokens = max_positions(config), request.new_tokens or NEW_TOKENS
    if maximum is None or seq_len + new_tokens <= maximum:
        return seq_len
    most = maximum - new_tokens
    if request.seq_len is not None or most < 1:
        option, length = ("--seq-len", seq_len) if most >= 1 else ("--new-tokens", new_tokens)
        raise SequenceTooLong(
            option=option, seq_len=length, maximum=maximum, most=most if most >= 1 else maximum - 1, model_id=request.model_id
        )
    return most


def _tokens(config: Any, batch: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int):
        # Some models mask or number positions by the padding id; a random one in the middle would be no realistic input.
        ids[ids == padding] = (padding + 1) % config.vocab_size
    return ids


def _pixels(config: Any, batch: int, generator: torch.Generator) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or _IMAGE_SIZE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(batch, getattr(vision, "num_channels", 3), height, width, generator=generator)


def _placed(kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {name: move(value, device, dtype) for name, value in kwargs.items()}


def _describe(value: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        shape=tuple(value.shape),
        stride=tuple(value.stride()) if value.layout == torch.strided else (),
        dtype=str(value.dtype).removeprefix("torch."),
        offset=int(value.storage_offset()) if value.layout == torch.strided else 0,
        device=value.device.type,
    )
