"""Rotary embedding as Llama-like models write it: the halves of the head dim are swapped, one of them negated."""

from __future__ import annotations

import torch


def reference_rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low = x[..., : x.shape[-1] // 2]
    high = x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-high, low), dim=-1) * sin
