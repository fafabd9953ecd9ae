"""Rotary embedding of queries and keys, and what a static cache takes: the rotated keys and the values, at their positions."""

from __future__ import annotations

import torch


def reference_rotate_half(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    q_out = q * cos + rotated(q) * sin
    return q_out, keys.index_copy_(2, position, k * cos + rotated(k) * sin), values.index_copy_(2, position, v)
