"""From a MODEL_ID to a configuration and the place its weights come from."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fusion_advisor.errors import BadFactory, BrokenModelDirectory, MissingWeights, RemoteCodeRefused, UnknownArchitecture
from fusion_advisor.workload.architecture import remote_classes
from fusion_advisor.workload.hub import (
    HubModel,
    Unreachable,
    ask_hub,
    cached_folder,
    has_weights,
    is_offline,
    missing_shards,
    unknown_model,
)
from fusion_advisor.workload.preset import Preset, find_preset
from fusion_advisor.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A configuration, and where the weights that go with it are."""

    config: Any
    weights: str
    """``hub``, ``local`` or ``random``."""
    place: str = ""
    """Argument of ``from_pretrained``: a folder, or a Hub id whose weights are still to be fetched."""
    revision: str = ""
    notes: tuple[str, ...] = ()


def resolve_source(request: WorkloadRequest) -> Source:
    """Find a model: a local directory, else the local cache, else the Hub, else a shipped configuration.

    ``weights="random"`` needs only a configuration, so it prefers a shipped one to asking the Hub.
    """
    folder = Path(request.model_id).expanduser()
    if folder.is_file():
        if folder.suffix == ".py":
            raise BadFactory(factory=request.model_id, detail=f"no function is named{_functions(folder)}")
        raise BrokenModelDirectory(model_id=request.model_id, detail="it is a file")
    preset = find_preset(request.model_id)
    # A stray folder named like a known model (`./gpt2/` full of notes) does not hide that model.
    if folder.is_dir() and ((folder / "config.json").is_file() or preset is None):
        return _from_directory(request, folder)
    return _from_hub(request, preset)


def _functions(file: Path) -> str:
    """Name up to three functions of a file that may be factories, without running it."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return ""
    found = [one.name for one in body if isinstance(one, ast.FunctionDef) and not one.args.args and not one.name.startswith("_")]
    return f"; it has {', '.join(f'`{name}`' for name in found[:3])}" if found else "; it has none that takes no arguments"


def _from_directory(request: WorkloadRequest, folder: Path) -> Source:
    config = _read_config(request, folder)
    if request.weights == "random":
        return Source(config=config, weights="random", notes=("random weights, as asked for",))
    if has_weights(folder):
        if request.weights == "hub":
            raise MissingWeights(model_id=request.model_id, detail="it is a local directory, not a Hub id")
        return Source(config=config, weights="local", place=str(folder))
    missing = missing_shards(folder)
    detail = f"{folder.name}/ lacks {', '.join(missing)}" if missing else f"{folder.name}/ holds no safetensors or bin file"
    if request.weights != "auto":
        raise MissingWeights(model_id=request.model_id, detail=detail)
    return Source(config=config, weights="random", notes=(f"random weights: {detail}",))


def _from_hub(request: WorkloadRequest, preset: Preset | None) -> Source:
    same_repository = preset.ids if preset is not None and request.model_id in preset.ids else ()
    names = (request.model_id, *(name for name in same_repository if name != request.model_id))
    cached = cached_folder(names, request.revision)
    if request.weights == "random":
        return _random_from_hub(request, preset, cached)
    if cached is not None and has_weights(cached):
        # A snapshot's folder is named after its commit.
        return Source(config=_read_config(request, cached), weights="hub", place=str(cached), revision=cached.name)
    if request.weights == "local":
        raise MissingWeights(model_id=request.model_id, detail="the local cache does not hold them")
    found, reason = _try_hub(request)
    if found is not None:
        config = _read_config(request, found.folder)
        return Source(config=config, weights="hub", place=request.model_id, revision=found.revision)
    if request.weights == "hub":
        raise MissingWeights(model_id=request.model_id, detail=f"the Hub was not asked: {reason}")
    note = f"random weights: not in the local cache, and the Hub was not asked ({reason})"
    if cached is not None:
        return Source(config=_read_config(request, cached), weights="random", revision=cached.name, notes=(note,))
    if preset is not None:
        return Source(config=_config_of(preset), weights="random", notes=(f"{note}; the configuration is the shipped one",))
    raise unknown_model(request.model_id, unreachable=reason)


def _random_from_hub(request: WorkloadRequest, preset: Preset | None, cached: Path | None) -> Source:
    note = "random weights, as asked for"
    if cached is not None:
        return Source(config=_read_config(request, cached), weights="random", revision=cached.name, notes=(note,))
    # The shipped configuration is that of the default branch.
    if preset is not None and request.revision is None:
        return Source(config=_config_of(preset), weights="random", notes=(f"{note}; the configuration is the shipped one",))
    found, reason = _try_hub(request)
    if found is not None:
        return Source(config=_read_config(request, found.folder), weights="random", revision=found.revision, notes=(note,))
    raise unknown_model(request.model_id, unreachable=reason)


def _try_hub(request: WorkloadRequest) -> tuple[HubModel | None, str]:
    """Return what the Hub has, or why it could not be asked."""
    if is_offline(request):
        return None, "offline"
    try:
        return ask_hub(request), ""
    except Unreachable as error:
        return None, str(error)


def _config_of(preset: Preset) -> Any:
    values = dict(preset.config)
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def _read_config(request: WorkloadRequest, folder: Path) -> Any:
    """Read a folder's configuration; its own code runs only if it is trusted."""
    model_id = request.model_id
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModelDirectory(model_id=model_id, detail="it has no config.json") from None
    except (OSError, ValueError) as error:
        raise BrokenModelDirectory(model_id=model_id, detail=f"config.json is unreadable ({_first_line(error)})") from error
    if not isinstance(raw, dict) or not (raw.get("model_type") or raw.get("auto_map")):
        raise BrokenModelDirectory(model_id=model_id, detail="config.json names no model_type")
    model_type = raw.get("model_type", "")
    auto_map = raw.get("auto_map") or {}
    # Decided here and not by transformers: it would ask on the terminal, and a pipe would hang or fail.
    if model_type not in CONFIG_MAPPING and not (auto_map and request.trust_remote_code):
        if auto_map:
            raise RemoteCodeRefused(model_id=model_id, classes=remote_classes(auto_map))
        raise UnknownArchitecture(model_id=model_id, model_type=model_type, version=transformers.__version__)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=request.trust_remote_code, local_files_only=is_offline(request)
        )
    except Exception as error:  # a configuration class checks its fields with exceptions of its own
        detail = f"config.json is refused by transformers ({_first_line(error)})"
        raise BrokenModelDirectory(model_id=model_id, detail=detail) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
