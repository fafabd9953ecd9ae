"""Looks a model id up on the Hugging Face Hub and in its local cache."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fusion_advisor.errors import AdvisorError, BrokenModelDirectory, GatedModel, UnknownModel, UsageError
from fusion_advisor.workload.preset import preset_ids
from fusion_advisor.workload.request import WorkloadRequest

_WHOLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class Unreachable(Exception):
    """The Hub did not answer; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """The Hub's answer about a model."""

    folder: Path
    """The snapshot that holds config.json; weights may not be there yet."""
    revision: str
    """Commit."""


def has_weights(folder: Path) -> bool:
    """Tell whether a folder holds a whole set of weights: one file, or an index with all its shards."""
    if any((folder / name).is_file() for name in _WHOLE_WEIGHTS):
        return True
    return any((folder / f"{name}.index.json").is_file() and not missing_shards(folder, name) for name in _WHOLE_WEIGHTS)


def missing_shards(folder: Path, name: str = _WHOLE_WEIGHTS[0]) -> tuple[str, ...]:
    """Return the shards that an index names and that are not there; an unreadable index counts as one."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return ()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, OSError):
        return (index.name,)
    return tuple(sorted(shard for shard in shards if not (folder / shard).is_file()))


def is_offline(request: WorkloadRequest) -> bool:
    """Tell whether the user or HF_HUB_OFFLINE forbids asking the Hub."""
    return request.offline or bool(constants.HF_HUB_OFFLINE)


def cached_folder(names: tuple[str, ...], revision: str | None) -> Path | None:
    """Return the local cache's snapshot of the first of these repositories that has one with a config.json."""
    for name in names:
        try:
            found = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:
            continue
        if isinstance(found, str):
            return Path(found).parent
    return None


def cached_ids() -> Iterator[str]:
    """Yield the ids of the models in the local cache, without the network."""
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        yield folder.name.removeprefix("models--").replace("--", "/")


def unknown_model(model_id: str, *, unreachable: str = "") -> UnknownModel:
    """Make the error for an id that names nothing, with the nearest id that would work."""
    sources = dict.fromkeys(preset_ids(), "its configuration is shipped")
    sources.update((known, "from your local cache") for known in cached_ids())
    folded = {known.lower(): known for known in sources}
    # Both whole ids and bare names are compared: people forget the organisation more often than a letter.
    bare = {known.lower().rpartition("/")[2]: known for known in sources}
    candidates = {**bare, **folded}
    near = difflib.get_close_matches(model_id.lower(), candidates, n=1, cutoff=0.75)
    best = candidates[near[0]] if near else ""
    has_token = huggingface_hub.get_token() is not None
    return UnknownModel(
        model_id=model_id, near=best, near_source=sources.get(best, ""), has_token=has_token, unreachable=unreachable
    )


def ask_hub(request: WorkloadRequest) -> HubModel:
    """Resolve the id to a commit of the Hub and fetch its config.json.

    The model's record is asked for first, with a short timeout and no retries: a file download would try for half a minute
    before it says that there is no network.

    Raises:
        Unreachable: the Hub did not answer.
        UnknownModel: it has no such model, or hides it.
        GatedModel: it has it and this token may not read it.
        UsageError: it has no such revision.
        BrokenModelDirectory: the repository has no config.json.
    """
    model_id = request.model_id
    try:
        huggingface_hub.HfApi().model_info(model_id, revision=request.revision, timeout=10)
        # By the name the user gave, not by commit: the cache then remembers which commit that name means.
        path = huggingface_hub.hf_hub_download(model_id, "config.json", revision=request.revision)
    except Exception as error:  # the HTTP library under huggingface_hub, and so its exceptions, differ between its versions
        if known := hub_error(error, request):
            raise known from error
        raise Unreachable(_one_line(error)) from error
    folder = Path(path).parent
    return HubModel(folder=folder, revision=folder.name)


def hub_error(error: BaseException, request: WorkloadRequest) -> AdvisorError | None:
    """Translate what huggingface_hub raised, looking through its chain of causes; None for a network failure."""
    cause: BaseException | None = error
    while cause is not None:
        # GatedRepoError is a RepositoryNotFoundError, so it has to be asked for first.
        if isinstance(cause, GatedRepoError):
            return GatedModel(model_id=request.model_id)
        if isinstance(cause, OfflineModeIsEnabled):
            return None
        if isinstance(cause, RevisionNotFoundError):
            detail = f"--revision {request.revision}: `{request.model_id}` has no such branch, tag or commit"
            return UsageError(detail=detail, help=f"see https://huggingface.co/{request.model_id}/tree/main")
        if isinstance(cause, (RepositoryNotFoundError, HFValidationError)):
            return unknown_model(request.model_id)
        if isinstance(cause, EntryNotFoundError) and not isinstance(cause, FileNotFoundError):
            return BrokenModelDirectory(model_id=request.model_id, detail="its repository has no config.json")
        cause = cause.__cause__ or cause.__context__
    return None


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
