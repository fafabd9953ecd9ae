"""Attention probabilities with a boolean mask: true where a score counts, or (mask_blocks) where it does not."""

from __future__ import annotations

import torch


def reference_where(
    scores: torch.Tensor, mask: torch.Tensor, *, scale: float = 0.125, blocked: float = float("-inf")
) -> torch.Tensor:
    return torch.softmax(torch.where(mask, scores * scale, blocked), dim=-1)


def reference_masked_fill(
    scores: torch.Tensor, mask: torch.Tensor, *, scale: float = 0.125, blocked: float = float("-inf")
) -> torch.Tensor:
    return torch.softmax((scores * scale).masked_fill(~mask, blocked), dim=-1)


def reference_mask_blocks(
    scores: torch.Tensor, mask: torch.Tensor, *, scale: float = 0.125, blocked: float = float("-inf")
) -> torch.Tensor:
    return torch.softmax((scores * scale).masked_fill(mask, blocked), dim=-1)
