"""Embedding times a number: Gemma multiplies by the square root of the hidden size."""

from __future__ import annotations

import torch


def reference_scaled(weight: torch.Tensor, ids: torch.Tensor, *, scale: float = 55.42562584220407) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, weight) * scale
