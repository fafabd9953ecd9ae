"""From a MODEL_ID to a model and its inputs."""

from __future__ import annotations
