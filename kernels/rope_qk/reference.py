"""Rotary embedding of queries and keys in one launch; there may be fewer key heads than query heads."""

from __future__ import annotations

import torch


def reference_rotate_half(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
