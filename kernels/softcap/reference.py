"""Soft cap of logits as Gemma 2 writes it: smooth, and never beyond ±cap."""

from __future__ import annotations

import torch


def reference_tanh(x: torch.Tensor, *, cap: float = 30.0) -> torch.Tensor:
    return cap * torch.tanh(x / cap)
