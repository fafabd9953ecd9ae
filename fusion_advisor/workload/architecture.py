"""Reads from a model's configuration: the class to build, the number of layers, the longest input."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from fusion_advisor.errors import RemoteCodeRefused, UnknownArchitecture, UsageError

# Auto classes that build what `architectures` names, by the table that lists their classes. A masked-LM or pre-training head is
# left out on purpose: such checkpoints are used as encoders, so AutoModel builds their body. In training they have their head.
_MASKED_LM = ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
_TASKS = (
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
)

_DEPTH_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "encoder_layers",
    "decoder_layers",
)
# `n_positions` comes last: it is the older spelling, and T5 keeps one that limits nothing (see below).
_POSITION_FIELDS = ("max_target_positions", "max_position_embeddings", "n_positions")
_RELATIVE_POSITIONS = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})
# Their position table starts after the padding id, so two of its rows are never a token's.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod", "roberta-prelayernorm", "mpnet"})


def auto_class(config: Any, *, model_id: str, trust_remote_code: bool, is_trained: bool = False) -> Any:
    """Return the ``AutoModel…`` class that ``config.architectures`` asks for; a masked LM has its head only to be trained.

    Raises:
        RemoteCodeRefused: only the repository's own code has the class, and it is not trusted.
        UnknownArchitecture: the installed transformers has no class for it.
    """
    model_type = config.model_type
    auto_map = getattr(config, "auto_map", None) or {}
    named = (getattr(config, "architectures", None) or [""])[0]
    if trust_remote_code:
        remote = [name for name in auto_map if name.startswith("AutoModel")]
        if remote:
            matching = [name for name in remote if str(auto_map[name]).endswith(f".{named}")]
            return getattr(transformers, (matching or remote)[0])
    for class_name, table in (*_TASKS, *((_MASKED_LM,) if is_trained else ())):
        if named and named in _classes(table, model_type):
            return getattr(transformers, class_name)
    is_decoder = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", model_type)
    # Where no architecture is named: encoders that can also decode (BERT) have a masked-LM class, true decoders have none.
    if not named and is_decoder and not _classes("MODEL_FOR_MASKED_LM_MAPPING_NAMES", model_type):
        return transformers.AutoModelForCausalLM
    if _classes("MODEL_MAPPING_NAMES", model_type):
        return transformers.AutoModel
    if any(name.startswith("AutoModel") for name in auto_map):
        raise RemoteCodeRefused(model_id=model_id, classes=remote_classes(auto_map))
    raise UnknownArchitecture(model_id=model_id, model_type=model_type, version=transformers.__version__)


def remote_classes(auto_map: dict[str, Any]) -> str:
    """Name the Python files that an ``auto_map`` would run."""
    found = {str(value[0] if isinstance(value, (list, tuple)) else value) for value in auto_map.values()}
    return f"it would run {', '.join(sorted(found))}" if found else ""


def _classes(table: str, model_type: str) -> tuple[str, ...]:
    found = getattr(modeling_auto, table, {}).get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and the ones nested in it (text, vision, encoder …)."""
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _with_parts(value)


def total_layers(config: Any) -> int | None:
    """Return the layer count of the deepest stack; None where the configuration names none."""
    counts = [
        count
        for part in _with_parts(config)
        for count in (*(vars(part).get(name) for name in _DEPTH_FIELDS), *(vars(part).get("depths") or ()))
        if isinstance(count, int)
    ]
    return max(counts, default=None)


def cut_layers(config: Any, layers: int, *, model_id: str) -> Any:
    """Return a copy whose every stack has at most ``layers`` layers, with per-layer lists cut to the same length.

    Stages of a convolutional model (``depths``) are cut each on its own.

    Raises:
        UsageError: there are fewer layers than that, or none that could be cut.
    """
    total = total_layers(config)
    if total is None:
        raise UsageError(detail=f"--layers: `{model_id}` has no layer count to cut", help="leave --layers out")
    if layers > total:
        raise UsageError(detail=f"--layers {layers}: `{model_id}` has {total}", help=f"pass at most {total}")
    config = copy.deepcopy(config)
    for part in _with_parts(config):
        values = vars(part)
        depths = {name: values[name] for name in _DEPTH_FIELDS if isinstance(values.get(name), int)}
        # Per-layer lists are known by their length; a list of stage sizes is as long as `depths`, never as the layer count.
        for name, value in list(values.items()):
            is_per_layer = isinstance(value, (list, tuple)) and len(value) > layers and len(value) in depths.values()
            if is_per_layer and name.endswith(("_types", "_layers", "_pattern")):
                # Written past the class's own __setattr__, which would check the list against the count that is cut next.
                object.__setattr__(part, name, value[:layers])
        for name, count in depths.items():
            object.__setattr__(part, name, min(count, layers))
        if isinstance(values.get("depths"), (list, tuple)):
            object.__setattr__(part, "depths", [min(count, layers) for count in values["depths"]])
    return config


def max_positions(config: Any) -> int | None:
    """Return the most tokens that the model (its decoder, where it has one) takes; None where nothing limits them."""
    kind = getattr(config, "model_type", "")  # somebody's own config need not have one
    if kind in _RELATIVE_POSITIONS:
        return None
    for part in (config, getattr(config, "text_config", None)):
        for name in _POSITION_FIELDS:
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value - 2 if kind in _OFFSET_POSITIONS else value
    return None
