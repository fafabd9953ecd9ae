"""Attention probabilities before there was SDPA: scale, add the mask, softmax. The scale is a factor or a divisor."""

from __future__ import annotations

import torch


def reference_upcast(scores: torch.Tensor, mask: torch.Tensor, *, scale: float = 0.5) -> torch.Tensor:
    weights = scores * scale + mask
    return torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(scores.dtype)


def reference_divisor(scores: torch.Tensor, mask: torch.Tensor, *, scale: float = 0.5) -> torch.Tensor:
    return torch.softmax(scores / scale + mask, dim=-1)
