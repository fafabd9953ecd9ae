"""Published configurations of well-known models, shipped so that they run with no network.

Each file in ``presets/`` is one family: ``base`` holds what its models share, and each model adds its own fields, the ids of its
repository (the bare legacy one too), the ids of other checkpoints of the same shape, and its parameter count as a check.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A shipped configuration."""

    ids: tuple[str, ...]
    """Names of one and the same repository."""
    same_shape: tuple[str, ...]
    """Other repositories with the same configuration and other weights."""
    parameters: int
    """With tied weights counted once, as transformers builds it (transformers 5 ties T5's head always)."""
    config: dict[str, Any]
    """The keys of the repository's config.json that decide shapes and arithmetic."""


def load_presets() -> tuple[Preset, ...]:
    """Read all shipped configurations."""
    presets: list[Preset] = []
    folder = files("fusion_advisor.workload") / "presets"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".json"):
            continue
        family = json.loads(entry.read_text(encoding="utf-8"))
        presets.extend(
            Preset(
                ids=tuple(row["ids"]),
                same_shape=tuple(row.get("same_shape", ())),
                parameters=row["parameters"],
                config={**family["base"], **row["config"]},
            )
            for row in family["models"]
        )
    return tuple(presets)


def find_preset(model_id: str) -> Preset | None:
    """Return the shipped configuration of a Hub id, or None."""
    return next((preset for preset in load_presets() if model_id in preset.ids or model_id in preset.same_shape), None)


def preset_ids() -> tuple[str, ...]:
    """Return every id that has a shipped configuration."""
    return tuple(model_id for preset in load_presets() for model_id in (*preset.ids, *preset.same_shape))
